-- reducer.lua: data-parallel averaging of gradients, in buckets that travel during the backward pass. Every pass that
-- reaches a parameter ends when all gradients are averages; there is nothing to call after it.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
local group_of = require("perilune.dist.group").group_of
local C, check = P.C, P.check

local wrap, _, reducer_ptr = P.handle("peri_reducer", {}, nil, "a Reducer")
local out = ffi.new "peri_reducer *[1]"

local Reducer = util.class "Reducer"

--- Reducer { group =, params = (a list of leaves, equal on all ranks), bucket_bytes = 25 MiB (at most a quarter of all,
--- or 512 KiB) }. Collective over the group.
function Reducer:init(args)
  args = util.named("Reducer", args, { group = util.required, params = util.required, bucket_bytes = 0 })
  local n = #signature.value("Reducer", "params", args.params, "list")
  local list = ffi.new("peri_tensor *[?]", math.max(n, 1))
  for i = 1, n do list[i - 1] = Tensor.ptr(args.params[i]) end
  check(C.peri_reducer_new(group_of("Reducer", args.group):ptr(), list, n, args.bucket_bytes, out))
  self._ref = P.lasting(wrap, out[0])
end

--- A pass through the operation that made `tensor` ends with the averages too, whether or not it reaches a parameter.
function Reducer:watch(tensor) check(C.peri_reducer_watch(reducer_ptr(self._ref), Tensor.ptr(tensor))) end

--- Take part in the averages without a backward pass, on a rank that has none while others have; or after passes with
--- the reducer disabled.
function Reducer:finish()
  local ptr, round = reducer_ptr(self._ref), 0
  while check(C.peri_reducer_finish(ptr)) == C.PERI_PENDING do
    P.pause(round)
    round = round + 1
  end
end

--- Average at the end of backward passes (the default), or not (accumulation over several: all but the last). All ranks
--- alike.
function Reducer:enable(on) check(C.peri_reducer_enabled_set(reducer_ptr(self._ref), on ~= false)) end

--- Let backward passes end when the averages have set out: `finish` waits for them, before the next pass. All ranks
--- alike.
function Reducer:defer(on) check(C.peri_reducer_deferred_set(reducer_ptr(self._ref), on or false)) end

--- Let go of all parameters, which may be another reducer's from now on. Between two passes, on all ranks alike.
function Reducer:detach() C.peri_reducer_detach(reducer_ptr(self._ref)) end

function Reducer:release() self._ref:release() end

return Reducer
