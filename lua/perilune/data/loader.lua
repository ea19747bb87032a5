-- loader.lua: from a source of samples to the batches that one rank sees.
--
-- A source has: dense (names of dense features), keys (names of sparse features), rows (by key: rows of its table),
-- tables (by key: name of its table; features with the same table share it), source:fill(host, batch_size, rank, world)
-- which fills a host batch with this rank's rows of the next global batch and sets its global_rows (0 at the end of a
-- pass), and source:rewind(epoch) (epochs count from 0). It may have source:skip(batch_size), which leaves the next
-- global batch out and returns its rows: workers need that to be fast.
--
-- `batch_size` counts the rows of the *global* batch: of all ranks together. Rank r of w takes rows [G r / w, G (r+1) /
-- w) of it, so what is trained does not depend on w. A rank whose share of a last, short batch is empty gets a batch of
-- 0 rows.
local P = require "perilune.ffi"
local util = require "perilune.util"
local position = require "perilune.data.position"
local jagged = require "perilune.jagged"
local batch = require "perilune.data.batch"
local Workers = require "perilune.data.workers"
local signature = require "perilune.signature"

local Loader = util.seal(util.class "Loader")
Loader.of_ranks = true -- ranks have positions of their own, which are alike

--- The arguments that every kind of loader takes beside its own.
Loader.common = {
  batch_size = util.whole(util.required, 1, 2 ^ 31), -- rows of all ranks together
  rank = util.optional, world_size = util.optional, device = util.optional,
  epochs = 1,                 -- passes; math.huge: for ever
  limit = util.whole(nil, 1), -- rows per pass, rounded up to whole batches; nil: all
  drop_last = false,          -- leave out a last batch that is not full
  num_workers = 0,            -- threads that make batches ahead; 0: the caller's makes them when they are asked for
  prefetch_factor = 2,        -- batches that are made ahead for each of them, at most
  pin_memory = util.optional, -- they make them in memory pinned for the device (default: true where batches are copied
                              -- to one)
  timeout = 300,              -- seconds that a batch of theirs is waited for, at most
}

--- Fields of such arguments that a worker's own loader does not get: it has its own, or none.
local of_the_caller = { "device", "num_workers", "prefetch_factor", "pin_memory", "timeout" }

--- Arguments on which it does not depend which sample comes where in a pass.
local of_no_order = { path = true, files = true, make = true, epochs = true, limit = true, batch_size = true,
  drop_last = true, rank = true, world_size = true }
for _, name in ipairs(of_the_caller) do of_no_order[name] = true end

--- The others: where a position in one loader means the same sample in another.
local function order_of(arguments)
  local order = {}
  for name, value in util.ordered(arguments) do
    if not of_no_order[name] then order[name] = value end
  end
  return order
end

--- Rank and world size: as given, else those of the world that was joined (by whoever began this thread), else a world
--- of one.
function Loader._place(func, args)
  local world, place = P.state.world, P.state.place or { 0, 1 }
  local size = util.integer(func, "world_size", args.world_size or (world and world:size()) or place[2], 1, 2 ^ 31 - 1)
  local rank = util.integer(func, "rank", args.rank or (world and world:rank()) or place[1], 0, size - 1)
  return rank, size
end

local function check_fraction(func, what, value)
  if type(value) ~= "number" or not (value >= 0 and value <= 1) then
    P.fail(("%s: %s is %s, allowed: 0..1"):format(func, what, tostring(value)))
  end
end

--- [0, to); an empty one lies at the end, since [0, 0) means all to readers.
local function from_start(to)
  if to == 0 then return 1, 1 end
  return 0, to
end

--- Share of all data that a part is, [from, to) of [0, 1): train and test (its tail of `holdout`), fit and validation
--- (the two of train: its tail of `validation`).
function Loader.bounds(func, part, holdout, validation)
  util.one_of(func, "part", part, { "all", "train", "test", "fit", "validation" })
  check_fraction(func, "holdout", holdout)
  check_fraction(func, "validation", validation)
  local head = 1 - holdout
  if part == "train" then return from_start(head) end
  if part == "test" then return head, 1 end
  if part == "fit" then return from_start(head * (1 - validation)) end
  if part == "validation" then return head * (1 - validation), head end
  return 0, 1
end

--- A list of n names: "c1", "c2", ...
function Loader.numbered(letter, n)
  local names = {}
  for i = 1, util.integer("Loader.numbered", "n", n, 0, 2 ^ 20) do names[i] = letter .. i end
  return names
end

--- worker: what a worker makes a loader like this one of: { module (perilune.data.<kind>), arguments (checked ones),
--- shared = a list of tensors, or a function that returns it }; nil: it cannot have workers.
function Loader:init(func, source, args, worker)
  local o = { num_workers = args.num_workers or 0, prefetch_factor = args.prefetch_factor or 2,
    pin_memory = args.pin_memory,
    timeout = args.timeout or 300 } -- a loader over a source of the caller's may not say
  Workers._check(func, o, 0)
  if o.num_workers > 0 and not worker then
    P.fail(func .. ": num_workers is given, but this kind of loader has no workers")
  end
  self.func, self.num_workers, self._options = func, o.num_workers, o
  self._worker, self._workers, self._skipped = worker or false, false, 0
  self._order = worker and order_of(worker.arguments) or false
  -- _given: with those left out; _pass: batches of one, 0: not known
  self.ahead, self._given, self._pass = { batches = 0 }, 0, 0
  self.source = source
  self.keys, self.rows, self.tables, self.dense = source.keys, source.rows, source.tables, source.dense
  self.raw = source.raw or {} -- by feature: whether its ids are any 64 bits, and not below `rows`
  self.batch_size = args.batch_size
  self.epochs = args.epochs == math.huge and args.epochs or util.integer(func, "epochs", args.epochs, 1)
  self.rank, self.world_size = Loader._place(func, args)
  -- nobody has said which rank this is
  self._early = not (args.rank or args.world_size or P.state.world or P.state.place)
  self.device, self.drop_last = args.device, args.drop_last
  self.limit = args.limit or math.huge
  self.epoch, self._delivered, self._keys = 0, 0, false
  self._over = false -- whether it has said that there are no more batches
  local most = math.ceil(self.batch_size / self.world_size)
  self._host = batch.host_batch(#self.dense, #self.keys, most, most * math.max(#self.keys, 1))
  source:rewind(0)
end

--- Tables as { name =, rows =, features = { ... } }, in the order of their first feature.
function Loader:table_list()
  local list, by_name = {}, {}
  for i, key in ipairs(self.keys) do
    local name = self.tables[i]
    local t = by_name[name]
    if not t then
      t = { name = name, rows = self.rows[i], features = {} }
      by_name[name], list[#list + 1] = t, t
    end
    t.features[#t.features + 1] = key
  end
  return list
end

--- Rows of one pass, a dropped last batch included.
function Loader:count()
  local n = math.min(self.source:count(), math.ceil(self.limit / self.batch_size) * self.batch_size)
  return self.drop_last and n - n % self.batch_size or n
end

-- Fill the host batch, or (skip) leave the batch out; returns its rows over all ranks, 0 at the end of the pass.
local function advance(self, skip)
  if self._delivered * self.batch_size >= self.limit then return 0 end
  if skip and self.source.skip then return self.source:skip(self.batch_size) end
  self.source:fill(self._host, self.batch_size, self.rank, self.world_size)
  return tonumber(self._host.ptr.global_rows)
end

-- What follows a batch that is not full: itself, or the first one of the next pass, or nothing.
local function turn(self, rows, skip)
  while rows == 0 or (rows < self.batch_size and self.drop_last) do
    if self._delivered == 0 then return nil end -- a pass without a batch: the next would have none either
    self._pass = self._delivered
    self._delivered, self.epoch = 0, self.epoch + 1
    if self.epoch >= self.epochs then return nil end
    self.source:rewind(self.epoch)
    rows = advance(self, skip)
  end
  self._delivered, self._given = self._delivered + 1, self._given + 1
  return self._host
end

local function next_host(self, skip)
  if self.epoch >= self.epochs then return nil end
  local rows = advance(self, skip)
  if rows < self.batch_size then return turn(self, rows, skip) end
  self._delivered, self._given = self._delivered + 1, self._given + 1
  return self._host
end

--- The next batch in host memory, which the next call overwrites; nil at the end of the last epoch. Of a loader without
--- workers.
function Loader:next_host()
  if self.num_workers > 0 then
    P.fail(("%s: next_host makes a batch on the thread that calls it; this loader has %d workers, whose batches "
      .. "next() returns"):format(
      self.func, self.num_workers))
  end
  return next_host(self, false)
end

--- Make the workers, with the first batch that is asked for: many loaders are only asked for their counts.
local function begin_workers(self)
  local w, o = self._worker, self._options
  local arguments = util.copy(w.arguments)
  for _, name in ipairs(of_the_caller) do arguments[name] = nil end
  arguments.rank, arguments.world_size = self.rank, self.world_size
  local shared = w.shared
  if type(shared) == "function" then shared = P.lasting(shared) end
  self._workers = Workers(self.func, { module = w.module, arguments = arguments, shared = shared }, {
    num_workers = self.num_workers, prefetch_factor = o.prefetch_factor, pin_memory = o.pin_memory, timeout = o.timeout,
    device = self.device or P.state.device, rank = self.rank, world_size = self.world_size, start = self._skipped,
  })
  return self._workers
end

--- Refuse a loader that took itself for the only rank, where by now there are others: each of them would train all
--- samples.
local function check_place(self)
  local world = P.state.world
  if not world or world:size() == 1 then return end
  P.fail(("%s: the loader was made before peri.init(), and has all samples on each of %d ranks; make it after "
    .. "peri.init(), or give rank and world_size"):format(self.func, world:size()))
end

--- The next batch as tensors on the loader's device; nil at the end. A loader is called like the function of a generic
--- `for`.
function Loader:next()
  if self._early then check_place(self) end
  if self.num_workers > 0 then
    local made = (self._workers or begin_workers(self)):next()
    self._over = not made
    if made then position.note(self) end
    return made
  end
  local host = next_host(self, false)
  if not host then
    self._over = true
    return nil
  end
  position.note(self)
  self._keys = self._keys or jagged.Keys.of(self.keys) -- once: making a KeyedJaggedTensor compares lists of names
  return batch.upload(host, self._keys, self.device, self.world_size)
end
Loader.__call = Loader.next

--- Whole passes among the next n batches are left out at once, where it is known how many batches they have; returns
--- the rest of n.
local function skip_passes(self, n)
  local to = self._delivered + n
  if self._pass == 0 or to < self._pass or self.epoch >= self.epochs then return n end
  self.epoch = self.epoch + math.floor(to / self._pass)
  self._given, self._delivered = self._given + n - to % self._pass, 0
  if self.epoch < self.epochs then self.source:rewind(self.epoch) end
  return to % self._pass
end

--- Leave the next n batches out: to go on where an earlier run has stopped.
function Loader:skip(n)
  if self._workers then
    for _ = 1, n do
      local b = self:next()
      if b then b:release() end
    end
  elseif self.num_workers > 0 then self._skipped = self._skipped + n
  else
    while n > 0 do
      n = skip_passes(self, n)
      if n > 0 and not next_host(self, true) then return self end
      n = n - 1
    end
  end
  return self
end

--- Start again with the first epoch.
function Loader:rewind()
  local workers = self._workers
  if workers and (self._skipped > 0 or not workers:_restart()) then
    workers:_give_up()
    self._workers = false
  end
  self.epoch, self._delivered, self._skipped, self._given, self._over, self.ahead = 0, 0, 0, 0, false, { batches = 0 }
  self.source:rewind(0)
  return self
end

-- -- where it is ------------------------------------------------------------------------------------------------------

--- Batches that a pass has under such settings.
local function batches_of(self, s)
  local rows = self.source:count()
  if s.limit then rows = math.min(rows, math.ceil(s.limit / s.batch_size) * s.batch_size) end
  return s.drop_last and math.floor(rows / s.batch_size) or math.ceil(rows / s.batch_size)
end

local function settings_of(self)
  return { batch_size = self.batch_size, drop_last = self.drop_last or false, limit = self.limit < math.huge
    and self.limit or nil }
end

--- The position, which holds on any number of ranks: batches that were given and, where a pipeline took them, trained.
function Loader:state_dict()
  local given = self._given
  if self.num_workers > 0 then given = self._skipped + (self._workers and self._workers.taken or 0) end
  local dict = settings_of(self)
  dict.loader, dict.batches, dict.order = self.func, given - self.ahead.batches, self._order or nil
  return dict
end

--- The position that a dict says in batches of this loader; nil and why: there is none.
local function batches_here(self, dict)
  local own, n = settings_of(self), dict.batches
  local alike = own.batch_size == dict.batch_size
  if alike and own.drop_last == dict.drop_last and own.limit == dict.limit then return n end
  if not position.is_count(dict.batch_size) or dict.batch_size == 0 then return nil, "it says no batch_size" end
  local pass, pass_here = batches_of(self, dict), batches_of(self, own)
  if pass == 0 or pass_here == 0 then return n == 0 and 0 or nil, "a pass over the data has no batch" end
  local epoch, row = math.floor(n / pass), n % pass * dict.batch_size
  local whole = row / own.batch_size
  if whole ~= math.floor(whole) or whole > pass_here then
    return nil, ("it is behind sample %d of a pass, where no batch of this loader begins (batch_size %d, limit %s): "
      .. "allowed: a batch_size that divides %d, such as %d"):format(row, own.batch_size, tostring(own.limit), row,
      dict.batch_size)
  end
  return epoch * pass_here + whole
end

--- What keeps load_state_dict(dict) from loading, in words; nil: nothing does. Changes nothing; not collective.
function Loader:check_state_dict(dict)
  if type(dict) ~= "table" or dict.loader ~= self.func or not position.is_count(dict.batches) then
    return ("it is no position in %s, but %s"):format(self.func, type(dict) == "table" and dict.loader
      and tostring(dict.loader)
      or "something else")
  end
  local why = self._order and position.difference(dict.order or {}, self._order)
  if why then return ("the order of its samples was another: %s"):format(why) end
  return (select(2, batches_here(self, dict)))
end

--- Go on behind such a position.
function Loader:load_state_dict(dict)
  local why = self:check_state_dict(dict)
  if why then P.fail(("%s:load_state_dict: %s"):format(self.func, why)) end
  self:rewind():skip((batches_here(self, dict)))
end

--- End the workers, if there are some: what they have made is given up. The garbage collector does so too.
function Loader:stop()
  if self._workers then self._workers:stop() end
end

signature.object("source", "a source of samples", { dense = "list", keys = "list", rows = "list", tables = "list",
  fill = "callable", rewind = "callable", count = "callable" })
signature.check("Loader.", Loader, { _place = "func: string, args: table", numbered = "letter: string, n: number",
  bounds = "func: string, part: any, holdout: any, validation: any" })
signature.check("Loader:", Loader, { init = "self: table, func: string, source: source, args: table, worker: table?",
  skip = "self: table, n: count" })

return Loader
