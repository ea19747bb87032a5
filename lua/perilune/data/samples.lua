-- samples.lua: samples that a function of Lua makes, one at a time, as a loader.
--
--   local loader = peri.data.samples { batch_size = 256, dense = { "age" }, ids = { { name = "history", rows = 1000 }
--     },
--     make = function(arguments, epoch)   -- called at the beginning of each pass, from 0
--       local i = 0
--       return function()                 -- the next sample; nil: the pass is over
--         i = i + 1
--         return i <= 1000 and { label = i % 2, age = 30, history = { i % 7, i % 11 } } or nil
--       end
--     end }
--
-- Instead of a function, make may return a table that can be called and has skip(self, n): it leaves n samples out, or
-- those that are left in the pass, and returns how many. Workers then make the samples of their own batches only.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local Loader = require "perilune.data.loader"
local batch = require "perilune.data.batch"
local functions = require "perilune.data.functions"

local Source = util.seal(util.class "SampleSource")

function Source:init(func, make, arguments, fields)
  self.func, self.make, self.arguments = func, make, arguments
  self.dense, self.keys, self.rows, self.tables = fields.dense, fields.keys, fields.rows, fields.tables
  self.raw, self.columns = fields.raw, fields.columns
  self._next, self._over, self._epoch, self._row, self._count = false, false, 0, 0, false
  self._lists, self._labels, self._numbers = {}, {}, {}
end

--- An iterator over pass `epoch`.
local function iterator(self, epoch)
  local f = self.make(self.arguments, epoch)
  if not util.is_callable(f) then
    P.fail(("%s: make returned %s, wanted a function that returns the next sample"):format(self.func, errors.kind(f)))
  end
  return f
end

function Source:rewind(epoch) self._next, self._over, self._epoch, self._row = false, false, epoch, 0 end

local function begun(self)
  self._next = self._next or iterator(self, self._epoch)
  return self._next
end

--- The next sample of the pass; nil at its end, after which the iterator is not asked again.
local function next_sample(self)
  if self._over then return nil end
  local sample = begun(self)()
  if sample ~= nil and sample ~= false and type(sample) ~= "table" then
    P.fail(("%s: sample %d of pass %d is %s, wanted a table, or nil at the end"):format(self.func, self._row,
      self._epoch, errors.kind(sample)))
  end
  if sample then self._row = self._row + 1
  else self._over = true end
  return sample or nil
end

local function fail_sample(self, row, what, value, wanted)
  P.fail(("%s: sample %d of pass %d: %s is %s, wanted %s"):format(self.func, row, self._epoch, what, errors.kind(value),
    wanted))
end

local LARGEST = 0x1.fffffep127 -- of f32

local function number_of(self, row, sample, name)
  local x = sample[name]
  if x == nil and name == "label" then return 0 end
  if type(x) ~= "number" or x ~= x or math.abs(x) > LARGEST then
    fail_sample(self, row, name, x, type(x) == "number" and math.abs(x) < math.huge and "a number that f32 can hold"
      or "a finite number")
  end
  return x
end

--- Whether x can stand for an id of 64 bits: an integer of LuaJIT's, or a number that was not rounded.
local function is_raw(x)
  return ffi.istype("int64_t", x) or ffi.istype("uint64_t", x) or type(x) == "number" and x == math.floor(x)
    and math.abs(x) < 2 ^ 53
end

--- Add the ids of feature f of a sample to its list; returns how many.
local function add_ids(self, row, sample, f, list, n)
  local given, rows = sample[self.keys[f]], self.rows[f]
  if given == nil then return 0 end
  local bag = type(given) == "table" and given or { given }
  local fault = util.list_fault(bag)
  if fault then
    P.fail(("%s: sample %d of pass %d: the list %s %s"):format(self.func, row, self._epoch, self.keys[f], fault))
  end
  for k = 1, #bag do
    local id = type(bag[k]) ~= "string" and tonumber(bag[k])
    if self.raw[f] then
      if not is_raw(bag[k]) then
        fail_sample(self, row, ("%s, id %d,"):format(self.keys[f], k), bag[k],
          "whole numbers -2^53 + 1..2^53 - 1, or 64-bit integers (9007199254740993LL)")
      end
    elseif not id or id ~= math.floor(id) or id < 0 or id >= rows then
      fail_sample(self, row, ("%s, id %d,"):format(self.keys[f], k), bag[k],
        ("whole numbers 0..%.0f, below the rows of its table"):format(rows - 1))
    end
    list[n + k] = bag[k]
  end
  return #bag
end

--- An error unless all that a sample has is described. A misspelt label would be 0, a misspelt list an empty bag.
local function check_names(self, row, sample)
  for name in next, sample do
    if not self.columns[name] then
      P.fail(("%s: sample %d of pass %d: '%s' is described nowhere, so nothing would read it; allowed: %s"):format(
        self.func, row, self._epoch, tostring(name), table.concat(util.keys(self.columns), ", ")))
    end
  end
end

--- This rank's samples, which have been taken, go into the host batch. first: number of the first one in the pass.
local function put(self, host, taken, first)
  local b, n, rows = host.ptr, 0, #taken
  b.rows = rows
  for i, sample in ipairs(taken) do
    check_names(self, first + i - 1, sample)
    b.labels[i - 1] = number_of(self, first + i - 1, sample, "label")
    for d, name in ipairs(self.dense) do
      b.dense[(i - 1) * #self.dense + d - 1] = number_of(self, first + i - 1, sample, name)
    end
  end
  local ids = self._lists
  for f = 1, #self.keys do
    for i, sample in ipairs(taken) do
      local count = add_ids(self, first + i - 1, sample, f, ids, n)
      b.lengths[(f - 1) * rows + i - 1], n = count, n + count
    end
  end
  host:reserve(n)
  for i = 1, n do b.values[i - 1] = ffi.cast("int64_t", ids[i]) end -- of a uint64_t the same bits
  b.ids = n
end

function Source:fill(host, batch_size, rank, world)
  local taken, first_row = {}, self._row
  for _ = 1, batch_size do
    local sample = next_sample(self)
    if not sample then break end
    taken[#taken + 1] = sample
  end
  local first, last = batch.share(#taken, rank, world)
  local own = {}
  for i = first + 1, last do own[#own + 1] = taken[i] end
  put(self, host, own, first_row + first)
  host.ptr.global_row, host.ptr.global_rows = first_row + first, #taken
end

function Source:skip(batch_size)
  local samples = begun(self)
  if type(samples) == "table" and util.is_callable(samples.skip) and not self._over then
    local n = util.integer(self.func, "what skip of the iterator returned (how many samples it left out)",
      samples:skip(batch_size), 0, batch_size)
    self._row, self._over = self._row + n, n < batch_size
    return n
  end
  for i = 0, batch_size - 1 do
    if not next_sample(self) then return i end
  end
  return batch_size
end

--- Samples of the first pass, which is made for it, once.
function Source:count()
  if not self._count then
    local f, n = iterator(self, 0), 0
    while f() do n = n + 1 end
    self._count = n
  end
  return self._count
end

local spec = {
  make = util.required,                     -- function(arguments, epoch) -> function() -> a sample, or nil; or the name
                                            -- of such a module
  arguments = util.optional,                -- what it gets: plain values
  dense = util.optional.list, ids = util.optional.list, -- names; { name =, rows =, table =, ids = }
}
for name, default in util.ordered(Loader.common) do spec[name] = default end

local function fields_of_arguments(func, a)
  local fields = { dense = {}, keys = {}, rows = {}, tables = {}, raw = {}, columns = { label = true } }
  for i, name in ipairs(a.dense or {}) do
    if type(name) ~= "string" then P.fail(("%s: dense[%d] is %s, wanted a name"):format(func, i, errors.kind(name))) end
    fields.dense[i], fields.columns[name] = name, true
  end
  for i, f in ipairs(a.ids or {}) do
    local what = ("%s: ids[%d]"):format(func, i)
    f = util.named(what, f, { name = util.required.string, rows = util.whole(util.required, 1), table = util.optional,
      ids = "exact" })
    util.one_of(what, "ids", f.ids, { "exact", "raw" })
    fields.raw[i] = f.ids == "raw"
    fields.keys[i], fields.rows[i] = f.name, f.rows
    fields.columns[f.name] = true
    fields.tables[i] = f.table or "t_" .. f.name
  end
  return fields
end

--- A loader of the samples that a function makes; see `spec` for the arguments.
return function(args)
  local func = "data.samples"
  local a = util.named(func, args, spec)
  local make, plain = a.make, util.copy(a)
  if type(make) == "table" and not util.is_callable(make) then make = functions.received(make) -- in a worker
  elseif a.num_workers > 0 or type(make) ~= "function" and not util.is_callable(make) then
    plain.make = functions.sent(func, "make", make, "a function(arguments, epoch) that returns an iterator")
    make = functions.received(plain.make)
  else plain.make = nil end
  return Loader(func, Source(func, make, a.arguments, fields_of_arguments(func, a)), a,
    { module = "perilune.data.samples", arguments = plain })
end
