-- forward.lua: what stands before a sharded module while a pipeline runs: it gives the model's forward pass what
-- earlier operations made of the batch. TorchRec finds out by tracing what of the batch a module is called with; here
-- the first forward pass shows it: an argument that is a field of the batch, found by its identity.
local ffi = require "ffi"
local bit = require "bit"
local P = require "perilune.ffi"
local util = require "perilune.util"
local shard = require "perilune.shard"
local Tensor = require "perilune.tensor"
local KJT = require("perilune.jagged").KeyedJaggedTensor
local kind_of = require("perilune.errors").kind
local signature = require "perilune.signature"

local M = {}

-- -- arguments --------------------------------------------------------------------------------------------------------

--- Where in a batch an argument comes from: { "sparse_features" }, { 1 }, {}: the batch itself; or a constant.
local ArgInfo = util.class "ArgInfo"
M.ArgInfo = ArgInfo

function ArgInfo:init(steps, constant) self.steps, self.constant = steps or false, constant end

--- The argument, for this batch.
function ArgInfo:of(batch)
  local steps = self.steps
  if not steps then return self.constant end
  local at = batch
  for i = 1, #steps do
    if type(at) ~= "table" then
      local field = i > 1 and ("field '%s' of "):format(table.concat(steps, ".", 1, i - 1)) or ""
      P.fail(("%sa batch is %s, where %sthe first one was a table with a field '%s'"):format(field, kind_of(at), i > 1
        and "that of " or "", tostring(steps[i])))
    end
    at = at[steps[i]]
    if at == nil then
      P.fail(("a batch without field '%s', which the first one had"):format(table.concat(steps, ".", 1, i)))
    end
  end
  return at
end

function ArgInfo:__tostring()
  if not self.steps then return tostring(self.constant) end
  return "batch" .. table.concat(util.map(self.steps, function(s)
    return type(s) == "number" and ("[%d]"):format(s) or "." .. s
  end))
end

local MOST_DEEP = 3

local function search(at, value, steps)
  if rawequal(at, value) then return steps end
  if type(at) ~= "table" or #steps == MOST_DEEP then return nil end
  local keys = util.keys(at)
  for _, key in ipairs(keys or {}) do
    local inner = util.copy(steps)
    inner[#inner + 1] = key
    local found = search(rawget(at, key), value, inner)
    if found then return found end
  end
end

--- The ArgInfo of an argument; nil: it does not come from the batch.
function ArgInfo.find(batch, value)
  local t = type(value)
  if value == nil or t == "number" or t == "boolean" or t == "string" then return ArgInfo(nil, value) end
  local steps = search(batch, value, {})
  return steps and ArgInfo(steps) or nil
end

-- -- forwards ---------------------------------------------------------------------------------------------------------

--- Before module number `index` of a pipeline, at `path` of the model. given: function(batch) -> the arguments, or nil:
--- find them out. context: of the batch whose forward pass runs now; false outside of it: then the module is as ever.
--- refusal: why it is not pipelined; loads: how often its state had been loaded when rows of it were last looked at;
--- everywhere, here: what its `changes` were when the last step ended, if rows of later batches had been looked up then
--- (false: none had).
local BaseForward = util.class "BaseForward"
M.BaseForward = BaseForward

function BaseForward:init(module, path, index, given)
  self.module, self.path, self.index, self.given = module, path, index, given or false
  self.context, self.args, self.refusal, self.loads = false, false, false, module._loads
  self.everywhere, self.here = false, false
  local early, why = module:sends_early()
  if not early then self.refusal = why end
end

--- Whether its stages can run before the forward pass: not before its arguments are known.
function BaseForward:_ready() return not self.refusal and (self.given or self.args) and true or false end

--- Batches of the pipeline are in flight, from this supply; false: none is any more.
function BaseForward:_fly(supply) self.module:_in_flight(self, supply) end

--- Whether state was loaded into the module since this was asked last.
function BaseForward:_loaded()
  local loads = self.module._loads
  if loads == self.loads then return false end
  self.loads = loads
  return true
end

--- Note how often the tables have been changed, for _tables_changed. ahead: whether rows of later batches have been
--- looked up; if not, there is nothing to note.
function BaseForward:_note_tables(ahead)
  self.everywhere, self.here = false, false
  if not ahead then return end
  self.module:settle()
  self.everywhere, self.here = self.module:changes()
end

--- Whether the tables were changed since; and whether by something that all ranks have done alike.
function BaseForward:_tables_changed()
  if not self.everywhere then return false, false end
  local everywhere, here = self.module:changes()
  local all = everywhere ~= self.everywhere
  return all or here ~= self.here, all
end

--- Its ids of a context's batch, which set out with those of other modules: see ShardedModule:defer.
function BaseForward:_defer(context)
  local batch = context.batch
  if not self:_ready() then
    P.fail(("module '%s': what of a batch it is called with is not known yet"):format(self.path))
  end
  local args, sent = self.args, context.sent[self.index]
  if self.given then
    local a, b, c = self.given(batch)
    if a == nil then P.fail(("inputs['%s'] returned nothing for batch %d, wanted what the module is called "
      .. "with"):format(self.path, context.index)) end
    sent[1], sent[2], sent[3] = a, b, c
    return self.module:defer(a, b, c)
  end
  local a, b, c = args[1]:of(batch), args[2]:of(batch), args[3]:of(batch)
  sent[1], sent[2], sent[3] = a, b, c
  return self.module:defer(a, b, c)
end

--- Look up what arrived. Collective.
function BaseForward:_lookup(dist) return self.module:compute_and_output_dist(dist:wait()) end

--- Look at the arguments of the first call.
function BaseForward:_learn(batch, a, b, c)
  local args, given = {}, { a, b, c }
  for i = 1, 3 do
    args[i] = ArgInfo.find(batch, given[i])
    if not args[i] then
      self.refusal = ("argument %d of its call is no field of the batch; inputs = { ['%s'] = function(batch) ... end "
        .. "} can name it")
        :format(i, self.path)
      return
    end
  end
  self.args = args
end

local function same(known, value)
  return rawequal(known, value) or type(known) ~= "table" and type(known) ~= "cdata" and known == value
end

local function bytes_of(t)
  local data = t:read()
  return ffi.string(data, ffi.sizeof(data))
end

--- How what an `inputs` function gave differs from an argument of the call, in words; nil: it does not. whole: look at
--- all numbers too.
local function difference(given, got, whole)
  given, got = util.resolve(given), util.resolve(got)
  if same(given, got) then return end
  if KJT.is(given) and KJT.is(got) then
    local a, b = given:describe(), got:describe()
    if a.values ~= b.values or a.bags ~= b.bags or a.weighted ~= b.weighted or a.values_dtype ~= b.values_dtype
      or table.concat(given:keys(), "\0") ~= table.concat(got:keys(), "\0") then
      return ("%s, and the call had %s"):format(tostring(given), tostring(got))
    end
    return whole and not given:equal(got) and "other ids, lengths or weights than the call had" or nil
  end
  if Tensor.is(given) and Tensor.is(got) then
    if given:dtype() ~= got:dtype() or table.concat(given:shape(), " ") ~= table.concat(got:shape(), " ") then
      return ("%s, and the call had %s"):format(tostring(given), tostring(got))
    end
    return whole and bytes_of(given) ~= bytes_of(got) and "other numbers than the call had" or nil
  end
  return ("%s, and the call had %s"):format(kind_of(given), kind_of(got))
end

--- Whether all numbers of batch n are compared: those of the first three, and of every batch whose number is a power of
--- two.
local function looked_at(n) return n < 3 or bit.band(n, n - 1) == 0 end

--- The model must call the module with what `inputs` said. What they are and how much of it is looked at in every
--- batch; the numbers, which costs something, now and then.
function BaseForward:_check_given(context, a, b, c)
  local sent, whole = context.sent[self.index], looked_at(context.index)
  local why, number = difference(sent[1], a, whole), 1
  if not why then why, number = difference(sent[2], b, whole), 2 end
  if not why then why, number = difference(sent[3], c, whole), 3 end
  if not why then return end
  P.fail(("inputs['%s'] gave for batch %d, as argument %d of the module's call, %s; it has to give what the model "
    .. "calls the module with")
    :format(self.path, context.index, number, why))
end

--- The model must call the module with what has been sent already.
function BaseForward:_check(context, a, b, c)
  if self.given then return self:_check_given(context, a, b, c) end
  local args, sent = self.args, context.sent[self.index]
  if not args then return end
  if same(sent[1], a) and same(sent[2], b) and same(sent[3], c) then return end
  local named, path = tostring(args[1]), self.path
  if same(args[1]:of(context.batch), a) then
    P.fail(("module '%s' is called with %s, which was replaced after its ids were sent; inputs = { ['%s'] = false } "
      .. "has it run whole")
      :format(path, named, path))
  end
  P.fail(("module '%s' is called with something else than %s, whose ids were sent; inputs = { ['%s'] = "
    .. "function(batch) ... end } names what to send"):format(path, named, path))
end

--- How its ids leave, for ranks to compare.
function BaseForward:_way()
  return self.path .. (self.refusal and " (not pipelined)" or self.given and " (inputs)" or "")
end

--- Ids that were sent before are looked up in the forward pass, rows that were looked up before are handed out.
local PipelinedForward = util.class("PipelinedForward", BaseForward)
M.PipelinedForward = PipelinedForward

function PipelinedForward:forward(a, b, c)
  local context, i = self.context, self.index
  if not context then return self.module:_whole_forward(a, b, c) end -- not in a step of the pipeline
  local rows, dist = context.rows[i], context.dists[i]
  if rows or dist then
    context.rows[i], context.dists[i] = false, false
    self:_check(context, a, b, c)
    return rows or self:_lookup(dist)
  end
  if not self.refusal and not self:_ready() then self:_learn(context.batch, a, b, c) end
  return self.module:_whole_forward(a, b, c)
end

--- Rows of `dist` from files into memory, in the background. Local.
function PipelinedForward:_prefetch(dist) self.module:prefetch(dist:wait()) end

--- The same by the name that it has where a pipeline's first schedule brings rows into memory.
M.PrefetchPipelinedForward = util.class("PrefetchPipelinedForward", PipelinedForward)

signature.kind("ShardedModule", "a sharded module", shard.ShardedModule.is)
signature.check("ArgInfo:", ArgInfo, { init = "self: table, steps: list?, constant: any" })
signature.check("BaseForward:", BaseForward,
  { init = "self: table, module: ShardedModule, path: string, index: count, given: any",
    _lookup = "self: table, dist: awaitable" })
signature.check("PipelinedForward:", PipelinedForward, { _prefetch = "self: table, dist: awaitable" })

return M
