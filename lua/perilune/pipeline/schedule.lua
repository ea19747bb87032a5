-- schedule.lua: Schedule: the operations of a training step, in the order in which a rank issues them, as data that can
-- be edited.
--
--   local sparse_dist = Schedule { name = "sparse_dist",
--     { "zero_grad" },
--     { "input_dist", ahead = 1, on = "dist" },   -- of the next batch, on a stream of its own
--     { "load", ahead = 2, on = "load" }, { "to_device", ahead = 2, on = "copy" },
--     { "forward" }, { "wait_dist", ahead = 1, on = "dist" }, { "backward" }, { "optimizer" },
--     staleness = { tables = 0, dense = 0 } }
--   local fused = sparse_dist:insert({ "lookup", on = "embed" }, { first = true }):called "fused"
--
-- Step n runs every operation once, on batch n + ahead. Editing makes a new schedule; check() says what follows from
-- it, or refuses it.
local P = require "perilune.ffi"
local util = require "perilune.util"
local kind_of = require("perilune.errors").kind
local operations = require "perilune.pipeline.operations"
local check = require "perilune.pipeline.check"
local signature = require "perilune.signature"

local Schedule = util.seal(util.class "Schedule")

--- Fields of an operation, beside its kind at [1].
local fields = {
  name = util.optional.string,       -- default: the kind; no two operations have one
  ahead = 0,                         -- it acts on batch n + ahead in step n; below 0: on one that went before
  on = "main",                       -- its stream
  every = 1, at = util.optional.number, -- only on batches b with b % every == at (default: every - 1, the last of each
                                        -- `every`)
  with = util.optional.string,       -- of who leaves `every` away: on the batches on which the operation of this kind
                                     -- acts, if there is one
  from_step = 0,                     -- only on batches from this one on; they count from 0
  until_step = util.optional.number, -- and on those before this one
  scale = 1,                         -- backward: of the loss
  hook = util.optional.string,       -- inside `backward`, which comes next: when the gradient of this module's output
                                     -- is there
  run = util.optional, needs = util.optional, makes = util.optional, reads = util.optional, changes = util.optional,
  posts = util.optional,             -- of an operation of one's own: see operations.own
}
-- of all ranks alike
local agreed = { "kind", "ahead", "on", "every", "at", "from_step", "until_step", "scale", "posts", "hook" }
local own_fields = { "run", "needs", "makes", "reads", "changes", "posts" }

local MOST_AHEAD, MOST_EVERY = 16, 4096

local function check_name(what, name)
  if type(name) ~= "string" or name == "" or name:find "%c" then
    P.fail(("%s: name is %s, wanted a line of text"):format(what, type(name) == "string" and ("%q"):format(name)
      or kind_of(name)))
  end
end

--- On which batches it acts: some.
local function check_when(what, o)
  util.integer(what, "every", o.every, 1, MOST_EVERY)
  o.at = util.integer(what, "at", o.at or o.every - 1, 0, o.every - 1)
  util.integer(what, "from_step", o.from_step, 0)
  if not o.until_step then return end
  util.integer(what, "until_step", o.until_step, 0)
  if o.from_step + (o.at - o.from_step) % o.every >= o.until_step then
    P.fail(("%s: it acts on no batch: those from %d (from_step) on and before %d (until_step)%s are none"):format(what,
      o.from_step, o.until_step, o.every > 1 and (" with b %% %d == %d (every, at)"):format(o.every, o.at) or ""))
  end
end

local function operation(func, source, place)
  if type(source) ~= "table" or type(source[1]) ~= "string" then
    P.fail(("%s: operation %s is %s, wanted a table that begins with its kind: %s"):format(func, place,
      type(source) == "table" and "without a kind" or kind_of(source), table.concat(operations.built_in, ", ")))
  end
  local kind, given = source[1], util.copy(source)
  given[1] = nil
  local o = util.named(("%s: operation '%s'"):format(func, kind), given, fields)
  local own, known = {}, operations.kinds[kind]
  for _, field in ipairs(own_fields) do
    own[field] = o[field]
    if known and o[field] ~= nil then
      P.fail(("%s: operation '%s' %s, and cannot have '%s'"):format(func, kind,
        known.own and "has what it was registered with" or "is one of the library", field))
    end
  end
  o.kind, o.name = kind, o.name or kind
  if o.run ~= nil then o.own = operations.own(func, kind, own)
  elseif not known then
    P.fail(("%s: no operation '%s'; allowed: %s, or one with run = function(context, pipeline)"):format(func, kind,
      table.concat(operations.built_in, ", ")))
  end
  check_name(("%s: operation '%s'"):format(func, kind), o.name)
  local what = ("%s: operation '%s'"):format(func, o.name)
  util.integer(what, "ahead", o.ahead, -MOST_AHEAD, MOST_AHEAD)
  check_when(what, o)
  if type(o.on) ~= "string" or not o.on:match "^[%a_][%w_]*$" then
    P.fail(("%s: on is %s, wanted the name of a stream, such as 'main'"):format(what, kind_of(o.on)))
  end
  if not (o.scale > 0 and o.scale < math.huge) then
    P.fail(("%s: scale is %g, allowed: numbers above 0"):format(what, o.scale))
  end
  return o
end

--- Everything that ranks must agree on: a list of { what it is, text }.
local function facts_of(self)
  local list = { { "schedule", tostring(self.name) },
    { "order of operations", table.concat(util.map(self.operations, function(o) return tostring(o.name) end), ", ") } }
  local function add(what, value)
    list[#list + 1] = { what, type(value) == "number" and ("%.17g"):format(value) or tostring(value) }
  end
  for _, option in ipairs { "depth", "flush", "grad" } do add(option, self[option]) end
  for _, promise in ipairs { "staleness", "live" } do
    for what, n in util.ordered(self[promise]) do add(("%s of %s"):format(promise, what), n) end
  end
  for _, o in ipairs(self.operations) do
    for _, field in ipairs(agreed) do add(("%s of '%s'"):format(field, o.name), o[field]) end
  end
  return list
end

local function text_of(facts)
  return table.concat(util.map(facts, function(f) return f[1] .. ": " .. f[2] end), "\n")
end

--- The library's schedules are everybody's, and each was checked as it was made: one whose fields were assigned to is
--- refused.
local function check_intact(self)
  for i, fact in ipairs(facts_of(self)) do
    local was = self.made[i]
    if not was or was[1] ~= fact[1] or was[2] ~= fact[2] then
      P.fail(("schedule '%s': its %s was assigned to, and is %s; a Schedule stays as it is: with, set, move, insert, "
        .. "drop and retime make new ones"):format(self.made[1][2], fact[1], fact[2]))
    end
  end
end

local options = { name = "schedule", depth = util.whole(nil, 1), flush = util.optional.number,
  staleness = util.optional.table, live = util.optional.table,
  grad = true }

function Schedule:init(source)
  local func = "Schedule"
  if type(source) ~= "table" then P.fail(("%s: %s, wanted a table of operations"):format(func, kind_of(source))) end
  local given = util.copy(source)
  for i = 1, #source do given[i] = nil end
  local a = util.named(func, given, options)
  check_name(func, a.name)
  self.name, func = a.name, ("schedule '%s'"):format(a.name)
  self.depth = a.depth
  -- so many batches are done with before others begin
  self.flush = a.flush and util.integer(func, "flush", a.flush, 1, MOST_EVERY)
  local s = util.named(func .. ": staleness", a.staleness or {}, { tables = 0, dense = 0 })
  self.staleness = { tables = util.integer(func, "staleness.tables", s.tables, 0),
    dense = util.integer(func, "staleness.dense", s.dense, 0) }
  self.live = util.copy(a.live or {}) -- resource of a batch -> how many batches may have it at once
  for what, n in util.ordered(self.live) do
    util.one_of(func, "live", what, operations.of_batch)
    util.integer(func, ("live.%s"):format(what), n, 1)
  end
  self.grad = a.grad -- false: nothing is recorded (evaluation)
  self.operations = {}
  local names = {}
  for i = 1, #source do
    local o = operation(func, source[i], i)
    if names[o.name] then
      P.fail(("%s: two operations are called '%s', at places %d and %d; give one a name"):format(func, o.name,
        names[o.name], i))
    end
    names[o.name], o.place = i, i
    self.operations[i] = o
  end
  self.made = facts_of(self)
end

-- -- editing ----------------------------------------------------------------------------------------------------------

--- The source of which `self` could be made again.
local function source_of(self)
  check_intact(self)
  local source = { name = self.name, depth = self.depth, flush = self.flush, staleness = util.copy(self.staleness),
    live = util.copy(self.live), grad = self.grad }
  for i, o in ipairs(self.operations) do
    local s = { o.kind }
    for name in util.ordered(fields) do s[name] = o[name] end
    source[i] = s
  end
  return source
end

local function find(self, source, name)
  for i, o in ipairs(source) do
    if (o.name or o[1]) == name then return i, o end
  end
  local names = util.map(source, function(o) return o.name or o[1] end)
  P.fail(("schedule '%s' has no operation '%s', but %s"):format(self.name, tostring(name), table.concat(names, ", ")))
end

--- The place that `where` means: { first = true }, { last = true }, { before = name }, { after = name }.
local function place_of(self, source, where)
  local a = util.named(("schedule '%s': where"):format(self.name), where,
    { first = false, last = false, before = util.optional, after = util.optional })
  local given = util.keys(where)
  if #given > 1 then
    P.fail(("schedule '%s': where has %s, allowed: one of first, last, before, after"):format(self.name,
      table.concat(given, " and ")))
  end
  if a.first then return 1 end
  if a.before then return (find(self, source, a.before)) end
  if a.after then return (find(self, source, a.after)) + 1 end
  if a.last then return #source + 1 end
  P.fail(("schedule '%s': where is empty, allowed: first, last, before, after"):format(self.name))
end

--- Move an operation; `changes` (optional): fields of it that change too.
function Schedule:move(name, where, changes)
  local source = source_of(self)
  local i, o = find(self, source, name)
  if where.before == name or where.after == name then
    P.fail(("schedule '%s': '%s' is to be moved before or after itself"):format(self.name, name))
  end
  table.remove(source, i)
  table.insert(source, place_of(self, source, where), o)
  for field, value in util.ordered(changes or {}) do o[field] = value end
  return Schedule(source)
end

--- Put an operation in.
function Schedule:insert(o, where)
  local source = source_of(self)
  table.insert(source, place_of(self, source, where or { last = true }), o)
  return Schedule(source)
end

--- Leave operations out.
function Schedule:drop(...)
  local source = source_of(self)
  for _, name in ipairs { ... } do table.remove(source, (find(self, source, name))) end
  return Schedule(source)
end

--- Change fields: { name = { field = value, ... }, ... }.
function Schedule:set(changes)
  local source = source_of(self)
  for name, values in util.ordered(changes) do
    local _, o = find(self, source, name)
    signature.value("Schedule:set", ("the changes of '%s'"):format(tostring(name)), values, "table")
    if values.every and values.at == nil then o.at = nil end
    for field, value in util.ordered(values) do o[field] = value end
  end
  return Schedule(source)
end

--- How many batches ahead operations act: { name = ahead, ... }.
function Schedule:retime(aheads)
  local changes = {}
  for name, ahead in util.ordered(aheads) do changes[name] = { ahead = ahead } end
  return self:set(changes)
end

--- This schedule with other options: depth, flush, staleness, live, grad.
function Schedule:with(changes)
  local source = source_of(self)
  for name, value in util.ordered(changes) do source[name] = value end
  return Schedule(source)
end

--- This schedule under another name.
function Schedule:called(name) return self:with { name = name } end

-- -- what it says -----------------------------------------------------------------------------------------------------

--- What follows from it (check.lua), or an error that says which two operations do not go together, and over what.
--- facts:
--- { dense_tables = whether an optimizer of the dense part trains tables }.
function Schedule:check(facts)
  check_intact(self)
  return check.run(self, facts or {})
end

--- Everything that ranks must agree on: a list of { what it is, text }.
function Schedule:facts() return facts_of(self) end

--- What ranks must agree on (facts) as one text.
function Schedule:text() return text_of(self:facts()) end

--- 16 hexadecimal digits of such a list (FNV-1a of its text).
function Schedule._hash_of(facts)
  local text, high, low = text_of(facts), 0xcbf29ce4, 0x84222325
  for i = 1, #text do -- a 64-bit product of two halves, each below 2^53
    low = bit.bxor(low, text:byte(i)) % 2 ^ 32
    local product = low * 0x1b3
    high = (high * 0x1b3 + low * 0x100 + math.floor(product / 2 ^ 32)) % 2 ^ 32
    low = product % 2 ^ 32
  end
  return ("%08x%08x"):format(high, low)
end

--- Equal on ranks that run the same schedule.
function Schedule:hash() return Schedule._hash_of(self:facts()) end

function Schedule:__tostring() return require("perilune.pipeline.show").table_of(self) end

signature.kind("Schedule", "a Schedule", Schedule.is)
signature.check("Schedule:", Schedule, { move = "self: Schedule, name: string, where: table, changes: table?",
  insert = "self: Schedule, o: table, where: table?", set = "self: Schedule, changes: table",
  retime = "self: Schedule, aheads: table", with = "self: Schedule, changes: table",
  called = "self: Schedule, name: string", check = "self: Schedule, facts: table?" })
signature.check("Schedule.", Schedule, { _hash_of = "facts: list" })
signature.check_each("Schedule:", Schedule, { "text", "facts", "hash" }, "self: Schedule")

return Schedule
