-- calls.lua: what a call of a tensor function costs from Lua where there is next to nothing to compute: tensors of
-- 4 x 4 numbers, calls in scopes of 50. Columns: microseconds a call, without and with a gradient recorded: the best of
-- --rounds. Functions take turns, so that a slow second of the machine does not fall upon one of them. Each is compiled
-- anew when its turn comes: LuaJIT would give up some of the traces that hundreds of functions share, which is nothing
-- that a script's own loop meets.
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

-- -- the clock --------------------------------------------------------------------------------------------------------

local names = {}
for name in peri.util.ordered(functions) do
  if name:match(options.only) then names[#names + 1] = name end
end

--- A loop of its own for each function, so that each is compiled by itself.
local function loop_of(f, x)
  local loop = assert(loadstring "local f, x, n = ... return function() for _ = 1, n do f(x) end end")(f, x, CALLS)
  return function()
    local from = C.peri_time_ns()
    peri.scope(loop)
    return tonumber(C.peri_time_ns() - from) * 1e-3 / CALLS
  end
end

local best, loops = {}, {}
for _, name in ipairs(names) do
  best[name] = { math.huge, math.huge }
  local plain = peri.Tensor.uniform({ 4, 4 }, 0.1, 0.9, 1, 0)
  loops[name] = { loop_of(functions[name], plain), loop_of(functions[name], plain:clone():requires_grad()) }
end
for _ = 1, TURNS do
  for _, name in ipairs(names) do
    for i = 1, 2 do
      jit.flush()
      for _ = 1, math.ceil(options.rounds / TURNS) do best[name][i] = math.min(best[name][i], loops[name][i]()) end
    end
  end
end

local out = options.out and assert(io.open(options.out, "a"))
for _, name in ipairs(names) do
  local plain, recorded = best[name][1], best[name][2]
  print(("%-32s %7.2f %7.2f us"):format(name, plain, recorded))
  if out then out:write(json.encode { name = name, us = plain, recorded_us = recorded }, "\n") end
end
