-- compiler.lua: keeps LuaJIT's compiler from code that it gets wrong. The interpreter computes the same things right,
-- slower.
--
-- On ARM with 64 bits the compiler of LuaJIT 2.1.0-beta3 (Debian 12 has it as of March 2022) gives wrong numbers: specs
-- of means of losses and of evictions fail there, and pass without the compiler. Its faults were mended until November
-- 2023; versions since August 2023 say when they are of: 2.1.1737090214 counts seconds.
--
-- On ARM, versions before 2025 also compile a product and a sum into one instruction that rounds once, while the
-- interpreter rounds twice: what a line computes would depend on how often it has run, and could differ between ranks.
-- Later versions have an option for that, "fma", which is off by itself; before, it is a part of "fuse".
--
-- On all processors that compiler makes wrong code for `pairs` and `next`, from September 2021, when it began to
-- compile them, until April
-- 2022. A loop over `pairs` inside another one that the compiler gave up ends early, without an error (LuaJIT's issue
-- 827), and the pointer to the next entry is cut to 32 bits where it and the entry's number change registers, which
-- kills the process (its issue 829; a function of Lua that is compiled and calls `next` meets that as well). Neither
-- happens where the compiler does not see that `next` is called.
local getenv = require "perilune.environment"

local M = {}

local MENDED = 1700000000 -- November 2023

--- What a LuaJIT (jit.version) must not compile for this kind of processor (jit.arch): "everything", "traversal"
--- (`pairs` and `next`) or nil. A version that does not say its date may be any before August 2023.
function M.wrong(arch, version)
  local made = tonumber(version:match "2%.1%.(%d+)$")
  if made and made >= MENDED then return nil end
  if arch == "arm64" then return "everything" end
  return not made and "traversal" or nil
end

-- LuaJIT's own
local original = { next = next, pairs = pairs }
M.original = original

-- `next` as a function of Lua that is not compiled: nor is a loop that calls it, and it is not taken for a loop over
-- LuaJIT's own.
local function interpreted(t, key)
  if type(t) ~= "table" then error(("bad argument #1 to 'next' (table expected, got %s)"):format(type(t)), 2) end
  return original.next(t, key)
end
jit.off(interpreted)

-- `next` for single questions, such as whether a list has other keys: a loop that asks them is compiled. The compiler
-- gives a loop up at a function that is not compiled, but a function of C that it does not know it leaves to the
-- interpreter and goes on behind it ("stitch"). table.sort is one, which calls `ask` once for two elements.
local sort, two = table.sort, { 1, 2 }
local asked, after, key_found, value_found
local function ask()
  key_found, value_found = original.next(asked, after)
end
jit.off(ask)
local function stitched(t, key)
  if type(t) ~= "table" then error(("bad argument #1 to 'next' (table expected, got %s)"):format(type(t)), 2) end
  asked, after = t, key
  sort(two, ask)
  local k, v = key_found, value_found
  asked, after, key_found, value_found = nil, nil, nil, nil -- what they hold would live longer
  return k, v
end

-- `pairs` that hands out `interpreted`, and what a metamethod __pairs gives as it is.
local may_have_pairs = { table = true, cdata = true, userdata = true }
local function traverse(t)
  if not may_have_pairs[type(t)] then
    error(("bad argument #1 to 'pairs' (table expected, got %s)"):format(type(t)), 2)
  end
  local iterate, state, first = original.pairs(t)
  return iterate == original.next and interpreted or iterate, state, first
end

--- Keep the compiler of this Lua state from what it makes wrong. That it is off is said once: by the launcher for all
--- that it starts, else by the first rank.
function M.settle()
  local wrong = M.wrong(jit.arch, jit.version)
  if wrong == "traversal" then _G.next, _G.pairs = stitched, traverse end
  if jit.arch == "arm64" and not pcall(jit.opt.start, "-fma") then jit.opt.start "-fuse" end
  if wrong ~= "everything" then return end
  jit.off()
  local rank = getenv "OMPI_COMM_WORLD_RANK" or getenv "PMI_RANK" or getenv "SLURM_PROCID" or "0"
  if getenv "PERI_UNCOMPILED" or rank ~= "0" then return end
  if package.preload["perilune.launcher"] then require("perilune.launcher").setenv("PERI_UNCOMPILED", "1") end
  io.stderr:write(("perilune: %s makes wrong code for this processor (%s), so Lua runs uncompiled, several times "
    .. "slower; a LuaJIT of 2024 or later would not (Debian 13 has one)\n"):format(jit.version, jit.arch))
end

return M
