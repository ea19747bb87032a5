-- mc_policies.lua: which ids keep their rows: eviction policies and filters of managed collision, by TorchRec's names.
-- A policy is a description; the maps (perilune/collision.h) do what it says.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
local C = P.C

local M = {}

-- -- filters ----------------------------------------------------------------------------------------------------------

local single = ffi.new "float[1]"
--- Rounded to 32 bits, as thresholds are.
local function f32(x)
  single[0] = x
  return single[0]
end

local function sum_of_counts(counts)
  local sum = 0
  for i = 1, #counts do sum = sum + counts[i] end
  return sum
end

--- mask (bool) of the counts that are larger than `limit`.
local function above(counts, values, limit)
  local mask = ffi.new("uint8_t[?]", math.max(#values, 1))
  for i, count in ipairs(values) do mask[i - 1] = f32(count) > limit and 1 or 0 end
  return Tensor.from_memory(mask, { #values }, "bool", counts:device())
end

--- A filter of new ids: called with a tensor of how often each id of a window was seen it returns a mask of those that
--- stay, and the threshold; called with a table of its argument it returns a filter with that argument, for
--- threshold_filtering_func.
local Filter = util.seal(util.class "ThresholdFilter")
M.Filter = Filter
function Filter:init(name, kind, argument, value, apply)
  if type(name) ~= "string" or argument and not (type(argument) == "string" and type(value) == "number")
    or not util.is_callable(apply) then
    P.fail("ThresholdFilter: filters are embed.dynamic_threshold_filter, average_threshold_filter and "
      .. "probabilistic_threshold_filter")
  end
  self.name, self.kind, self.argument, self.value, self._apply = name, kind, argument, value, apply
end

--- A filter's argument, if it makes sense: a probability, or a multiple of a mean.
local function argument_of(filter, value)
  local is_probability = filter.kind == C.PERI_FILTER_PROBABILISTIC
  if not (util.number(filter.name, filter.argument, value) >= 0 and value < math.huge) or is_probability
    and value > 1 then
    P.fail(("%s: %s is %g, allowed: 0..%s"):format(filter.name, filter.argument, value, is_probability and "1"
      or ", finite numbers"))
  end
  return value
end

function Filter:__tostring() return self.argument and ("%s(%g)"):format(self.name, self.value) or self.name end
function Filter:__call(counts, value)
  if not Tensor.is(counts) and (type(counts) == "table" or counts == nil) then
    local a = util.named(self.name, counts, self.argument and { [self.argument] = self.value } or {})
    local value_of = self.argument and argument_of(self, a[self.argument])
    return Filter(self.name, self.kind, self.argument, value_of, self._apply)
  end
  signature.value(self.name, "counts", counts, "tensor")
  if type(value) ~= "nil" and not self.argument then
    P.fail(("%s: value is %s, allowed: nil"):format(self.name, signature.text(value)))
  end
  if type(value) ~= "nil" then argument_of(self, value) end
  return self._apply(counts, value or self.value)
end

--- Keeps ids that were seen more often than threshold_skew_multiplier times the mean of the window.
M.dynamic_threshold_filter = Filter("dynamic_threshold_filter", C.PERI_FILTER_DYNAMIC, "threshold_skew_multiplier", 10,
  function(counts, multiplier)
    local values = counts:to_list()
    local limit = f32(f32(multiplier / math.max(#values, 1)) * f32(sum_of_counts(values)))
    return above(counts, values, limit), Tensor.tensor(limit, "f32", counts:device())
  end)

--- Keeps ids that were seen more often than the mean of the window.
M.average_threshold_filter = Filter("average_threshold_filter", C.PERI_FILTER_AVERAGE, false, 0, function(counts)
  local values = counts:to_list()
  local limit = f32(sum_of_counts(values) / math.max(#values, 1))
  return above(counts, values, limit), Tensor.tensor(limit, "f32", counts:device())
end)

--- Keeps an id that was seen n times with probability 1 - (1 - per_id_probability)^n: random numbers of the rank's
--- seed.
M.probabilistic_threshold_filter = Filter("probabilistic_threshold_filter", C.PERI_FILTER_PROBABILISTIC,
  "per_id_probability", 0.01, function(counts, probability)
    local values = counts:to_list()
    local drawn = require("perilune.nn.parameter").uniform({ math.max(#values, 1) }, 0, 1, "f32",
      "cpu"):detach():to_list()
    local mask = ffi.new("uint8_t[?]", math.max(#values, 1))
    for i, n in ipairs(values) do mask[i - 1] = 1 - (1 - probability) ^ n > drawn[i] and 1 or 0 end
    return Tensor.from_memory(mask, { #values }, "bool", counts:device()), Tensor.tensor(drawn, "f32", counts:device())
  end)

-- -- policies ---------------------------------------------------------------------------------------------------------

--- The base of policies, and with `score` one of your own: score(count, last_access, now) -> a number, higher is
--- better; when a window ends, the best ids among those with a row and the new ones have rows. Or a subclass with a
--- method score(self, count, last_access, now).
local MCHEvictionPolicy = util.seal(util.class "MCHEvictionPolicy")
M.MCHEvictionPolicy = MCHEvictionPolicy
MCHEvictionPolicy.kind, MCHEvictionPolicy.decay_exponent = C.PERI_FORGET_USER, 1

local function take_filter(self, filter)
  if filter ~= nil and not Filter.is(filter) then
    P.fail(("%s: threshold_filtering_func is %s, allowed: embed.dynamic_threshold_filter, "
      .. "embed.average_threshold_filter, embed.probabilistic_threshold_filter, each as it is or called with { its "
      .. "argument }"):format(self.class_name, signature.text(filter)))
  end
  self.threshold_filtering_func = filter or false
end

local own_arguments = { score = util.optional, threshold_filtering_func = util.optional }
function MCHEvictionPolicy:init(args)
  local a = util.named(self.class_name, args, own_arguments)
  if a.score then self.score = function(_, count, last_access, now) return a.score(count, last_access, now) end end
  if a.score ~= nil and not util.is_callable(a.score) or type(self.score) ~= "function" then
    P.fail(("%s: score is %s, wanted a function(count, last_access, now) that returns a number"):format(self.class_name,
      signature.text(a.score)))
  end
  take_filter(self, a.threshold_filtering_func)
end

--- A subclass: embed.MCHEvictionPolicy:extend "Mine", with a method score.
function MCHEvictionPolicy.extend(base, name) return util.class(name, base) end

local function define_policy(name, kind, decays)
  local class = util.class(name, MCHEvictionPolicy)
  M[name], class.kind = class, kind
  local spec = { threshold_filtering_func = util.optional, decay_exponent = decays and 1 or nil }
  function class:init(args)
    local a = util.named(name, args, spec)
    if decays and not (a.decay_exponent > 0 and a.decay_exponent < math.huge) then
      P.fail(("%s: decay_exponent is %g, allowed: finite numbers above 0"):format(name, a.decay_exponent))
    end
    if type(self.score) == "function" then
      P.fail(("%s: it has a score of its own, and is a %s; extend MCHEvictionPolicy"):format(self.class_name, name))
    end
    self.decay_exponent = a.decay_exponent or 1
    take_filter(self, a.threshold_filtering_func)
  end
  return class
end

--- Ids that were seen most often keep their rows: score = count.
define_policy("LFU_EvictionPolicy", C.PERI_FORGET_LFU, false)
--- Those that were seen last: score = -(now - last access + 1) ^ decay_exponent.
define_policy("LRU_EvictionPolicy", C.PERI_FORGET_LRU, true)
--- Those that were seen often and lately: score = count / (now - last access + 1) ^ decay_exponent.
define_policy("DistanceLFU_EvictionPolicy", C.PERI_FORGET_DISTANCE_LFU, true)

--- `policy` as a MCHEvictionPolicy: one, or a function(count, last_access, now).
function M.policy(func, policy)
  if MCHEvictionPolicy.is(policy) then return policy end
  if type(policy) == "function" then return MCHEvictionPolicy { score = policy } end
  P.fail(("%s: eviction_policy is %s, allowed: LFU_EvictionPolicy {}, LRU_EvictionPolicy {}, "
    .. "DistanceLFU_EvictionPolicy {}, a MCHEvictionPolicy, or a function(count, last_access, now) that returns a "
    .. "score"):format(func, signature.text(policy)))
end

-- -- scores of Lua ----------------------------------------------------------------------------------------------------

local function score_all(policy, counts, last, now)
  local c, n = counts:read()
  local l, out = last:read(), ffi.new("double[?]", math.max(n, 1))
  for i = 0, n - 1 do
    local count, access = tonumber(c[i]), tonumber(l[i])
    local value = policy:score(count, access, now)
    if type(value) ~= "number" or value ~= value then
      P.fail(("the score of count %d, last access %d, now %d is %s, wanted a number"):format(count, access, now,
        signature.text(value)))
    end
    out[i] = value
  end
  return Tensor.from_memory(out, { n }, "f64", counts:device())
end

--- What a policy of Lua says (f64) about ids that were seen `counts` times, at `last` for the last time (i64). Errors
--- name the table.
function M.scores(policy, counts, last, now, name)
  local ok, result = xpcall(score_all, P.locate, policy, counts, last, now)
  if ok then return result end
  local words = ("table '%s': the eviction policy: "):format(name)
  if type(result) == "table" and result.message then
    result.message = words .. result.message
  else
    result = words .. tostring(result)
  end
  error(result, 0)
end

signature.object("scoring_policy", "an eviction policy with a method score", { score = "callable" })
signature.check("embed.mc_policies.", M, {
  scores = "policy: scoring_policy, counts: tensor, last: tensor, now: integer, name: string" })

return M
