-- ema.lua: an operation that keeps an exponential moving average of parameters: average = decay average + (1 - decay)
-- parameter, after every update of the dense part that it follows in a schedule.
--
--   local ema, average_of, averages = peri.pipeline.ema { params = model:named_parameters(), decay = 0.999 }
--   local schedule = schedules.sparse_dist:insert(ema, { last = true })
--   average_of(model:dense_parameters()[1])
--   averages:load_state_dict(kept)     -- of averages:state_dict(), to go on with them
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local sharded = require "perilune.tensor.sharded"
local leaves = require "perilune.nn.parameter"
local spread_of = require "perilune.nn.spread"
local live = require("perilune.tensor.state_dict").live
local signature = require "perilune.signature"

--- The averages as what is saved, by the names of the parameters. spread: what these say of tables of which each rank
--- has its own part (nn/spread.lua), or nil.
--- unnamed: those that were given without a name, a list of { tensor =, name = }.
local Averages = util.class "Averages"
Averages.reads_stored = true -- load_state_dict takes StoredTensors, too (checkpoint/load.lua)
Averages.by_parameter = true -- its state dict is name of a parameter -> state
function Averages:init(names, tensors, params, spread, unnamed)
  self.params = { unnamed = unnamed } -- as optimizers have it
  self._names, self._tensors, self._params, self._retired = names, tensors, params, false
  self._spread, self._place = spread or {}, {}
  for i, p in ipairs(params) do self._place[p] = i end
  leaves.keep_rows(self, params)
end

--- Rows [first, first + n) of parameter i stand for another id from now on (parameter.restart_rows): their average
--- begins with their new numbers.
function Averages:restart_rows(i, first, n)
  self._tensors[i]:slice(1, first, first + n):copy(self._params[i]:detach():slice(1, first, first + n))
end

--- Parameter i is trained no more: its average stays as it is, and the next step of the operation is an error.
function Averages:retire(i, why) self._retired = ("parameter '%s' %s"):format(self._names[i], why) end
Averages._rebind = false -- not to the shards of another plan: it is retired then

--- name -> live tensor, or a ShardedTensor of the averages of a table over ranks. Local.
function Averages:state_dict()
  local dict, pieces = {}, spread_of.pieces_of(self._spread)
  for i, p in ipairs(self._params) do
    if not pieces[p] then
      if leaves.own_parts[p] then
        P.fail(("pipeline.ema: state_dict: average '%s' is of this rank's shard of a dense table, whose place nobody "
          .. "knows; allowed: ema { params = model:named_parameters() }, or a part of these by nn.optim.select"):format(
          self._names[i]))
      end
      dict[self._names[i]] = self._tensors[i]
    end
  end
  for _, e in ipairs(self._spread) do
    dict[e.name] = spread_of.state(e, false, function(p) return self._tensors[self._place[p]] end)
  end
  return live(dict)
end

--- What keeps load_state_dict(dict) from loading, in words; nil: nothing does. Changes nothing; not collective.
function Averages:check_state_dict(dict)
  local wrong, own = {}, self:state_dict()
  if type(dict) ~= "table" then return ("dict is %s, wanted a table"):format(errors.kind(dict)) end
  for name, target in util.ordered(own) do
    local given = rawget(dict, name)
    local why = given == nil and "is missing" or sharded.refusal(target, given)
    if why then wrong[#wrong + 1] = ("'%s' %s"):format(name, why) end
  end
  for name in util.ordered(dict) do
    if rawget(own, name) == nil then wrong[#wrong + 1] = ("it has no '%s'"):format(tostring(name)) end
  end
  return #wrong > 0 and table.concat(wrong, "; ") or nil
end

--- Go on with the averages of a state_dict; what does not fit is one error that lists it all, and nothing is changed.
--- Local.
function Averages:load_state_dict(dict)
  local why = self:check_state_dict(dict)
  if why then P.fail("pipeline.ema: load_state_dict: " .. why) end
  for name, target in util.ordered(self:state_dict()) do sharded.assign(target, dict[name]) end
end

--- ema { params = (a list of tensors, or of { name =, tensor = }), decay = 0.999, name = "ema" }: an operation,
--- function(parameter) -> its average, and the averages as what is saved: an object with state_dict and
--- load_state_dict. Averages begin with the numbers of the parameters now. Local.
local function ema(args)
  local func = "pipeline.ema"
  local a = util.named(func, args, { params = util.required.list, decay = 0.999, name = "ema" })
  if not (a.decay >= 0 and a.decay <= 1) then P.fail(("%s: decay is %g, allowed: 0..1"):format(func, a.decay)) end
  local params, averages, place, names, unnamed = {}, {}, {}, {}, {}
  for i, p in ipairs(a.params) do
    names[i] = type(p) == "table" and p.name or tostring(i - 1)
    p = signature.value(func, ("params[%d]"):format(i), type(p) == "table" and p.tensor or p, "tensor")
    if Tensor.is(a.params[i]) then unnamed[#unnamed + 1] = { tensor = p, name = names[i] } end
    params[i], place[p] = p, i
    averages[i] = P.lasting(function() return Tensor.zeros(p:shape(), p:dtype(), p:device()):copy(p:detach()) end)
  end
  local kept = Averages(names, averages, params, a.params.spread, unnamed)
  local function step()
    if kept._retired then P.fail(("%s: %s"):format(func, kept._retired)) end
    for i, p in ipairs(params) do averages[i]:copy(averages[i] * a.decay + p:detach() * (1 - a.decay)) end
  end
  local operation = { a.name, with = "optimizer", needs = { "grad" }, reads = { "dense" },
    run = function() P.no_grad(P.scope, step) end }
  --- The average of a parameter, which changes with the next step.
  local function average_of(p)
    local i = place[p]
    if not i then P.fail(func .. ": averages: this is none of its parameters") end
    return averages[i]
  end
  return operation, average_of, kept
end

return ema
