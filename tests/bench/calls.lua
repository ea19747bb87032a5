-- calls.lua: what a call of a tensor function costs from Lua where there is next to nothing to compute: tensors of
-- 4 x 4 numbers, calls in scopes of 50. Columns, in microseconds a call, the best of --rounds: the call; what of it is
-- not the kernels' (the time that the device computes or copies, tests/bench/kernel_time.c); both again with a gradient
-- recorded. Functions take turns, so that a slow second of the machine does not fall upon one of them. Each is compiled
-- anew when its turn comes: LuaJIT would give up some of the traces that hundreds of functions share, which is nothing
-- that a script's own loop meets.
local ffi = require "ffi"
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local functions = require "spec.support.calls"
local C = peri.ffi.C

local parser = argparse("tests/bench/calls.lua", "What calls of tensor functions cost.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--rounds", "Rounds; the best one counts.", 100, tonumber)
parser:option("--only", "Functions whose names match this pattern.", ".")
local options = parser:parse(arg)
peri.init()

local CALLS, TURNS = 50, 4

ffi.cdef "double bench_kernel_time(bool on);"

-- -- the clock --------------------------------------------------------------------------------------------------------

local names = {}
for name in peri.util.ordered(functions) do
  if name:match(options.only) then names[#names + 1] = name end
end

--- A loop of its own for each function, so that each is compiled by itself. It returns microseconds a call: of all, or
--- (kernels_only) of the kernels.
local function loop_of(f, x)
  local loop = assert(loadstring "local f, x, n = ... return function() for _ = 1, n do f(x) end end")(f, x, CALLS)
  return function(kernels_only)
    ffi.C.bench_kernel_time(kernels_only)
    local from = C.peri_time_ns()
    peri.scope(loop)
    local all = tonumber(C.peri_time_ns() - from)
    local computing = ffi.C.bench_kernel_time(false)
    return 1e-3 * (kernels_only and computing or all) / CALLS
  end
end

local KINDS = { "plain", "recorded" }
local best, loops = {}, {}
for _, name in ipairs(names) do
  local plain = peri.Tensor.uniform({ 4, 4 }, 0.1, 0.9, 1, 0)
  loops[name] = { plain = loop_of(functions[name], plain),
    recorded = loop_of(functions[name], plain:clone():requires_grad()) }
  best[name] = { plain = { math.huge, math.huge }, recorded = { math.huge, math.huge } }
end
for _ = 1, TURNS do
  for _, name in ipairs(names) do
    for _, kind in ipairs(KINDS) do
      local loop, least = loops[name][kind], best[name][kind]
      jit.flush()
      for _ = 1, math.ceil(options.rounds / TURNS) do least[1] = math.min(least[1], loop(false)) end
      for _ = 1, math.ceil(options.rounds / TURNS / 4) do least[2] = math.min(least[2], loop(true)) end
    end
  end
end

local out = options.out and assert(io.open(options.out, "a"))
print(("%-32s %7s %7s %9s %7s"):format("us a call", "call", "over", "recorded", "over"))
for _, name in ipairs(names) do
  local plain, recorded = best[name].plain, best[name].recorded
  print(("%-32s %7.2f %7.2f %9.2f %7.2f"):format(name, plain[1], plain[1] - plain[2], recorded[1],
    recorded[1] - recorded[2]))
  if out then
    out:write(json.encode { name = name, us = plain[1], kernels_us = plain[2], recorded_us = recorded[1],
      recorded_kernels_us = recorded[2] }, "\n")
  end
end
