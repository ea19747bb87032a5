-- ema.lua: an operation that keeps an exponential moving average of parameters: average = decay average + (1 - decay) parameter, after
-- every update of the dense part that it follows in a schedule.
--
--   local ema, average_of = peri.pipeline.ema { params = model:dense_parameters(), decay = 0.999 }
--   local schedule = schedules.sparse_dist:insert(ema, { last = true })
--   average_of(model:dense_parameters()[1])
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"

--- ema { params =, decay = 0.999, name = "ema" }: an operation, and function(parameter) -> its average. Averages begin with the numbers of
--- the parameters now. Local.
local function ema(args)
  local func = "pipeline.ema"
  local a = util.named(func, args, { params = util.required.list, decay = 0.999, name = "ema" })
  if not (a.decay >= 0 and a.decay <= 1) then P.fail(("%s: decay is %g, allowed: 0..1"):format(func, a.decay)) end
  local params, averages, place = {}, {}, {}
  for i, p in ipairs(a.params) do
    p = signature.value(func, ("params[%d]"):format(i), p, "tensor")
    params[i], place[p] = p, i
    averages[i] = P.lasting(function() return Tensor.zeros(p:shape(), p:dtype(), p:device()):copy(p:detach()) end)
  end
  local function step()
    for i, p in ipairs(params) do averages[i]:copy(averages[i] * a.decay + p:detach() * (1 - a.decay)) end
  end
  local operation = { a.name, needs = { "grad" }, reads = { "dense" }, run = function() P.no_grad(P.scope, step) end }
  --- The average of a parameter, which changes with the next step.
  local function average_of(p)
    local i = place[p]
    if not i then P.fail(func .. ": averages: this is none of its parameters") end
    return averages[i]
  end
  return operation, average_of
end

return ema
