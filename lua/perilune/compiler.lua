-- compiler.lua: turns LuaJIT's compiler off where it makes wrong code, and says so. The interpreter computes the same things right, slower.
--
-- On ARM with 64 bits the compiler of LuaJIT 2.1.0-beta3 (Debian 12 has it as of March 2022) gives wrong numbers: specs of means of losses
-- and of evictions fail there, and pass without the compiler. Its faults were mended until November 2023; versions since August 2023 say
-- when they are of: 2.1.1737090214 counts seconds.
local getenv = require "perilune.environment"

local M = {}

local MENDED = 1700000000 -- November 2023

--- Does a LuaJIT (jit.version) make wrong code for this kind of processor (jit.arch)?
function M.wrong(arch, version)
  if arch ~= "arm64" then return false end
  local made = tonumber(version:match "2%.1%.(%d+)$")
  return not made or made < MENDED
end

--- Turn the compiler of this Lua state off, if it is one of those. It is said once: by the launcher for all that it starts, else by the
--- first rank.
function M.settle()
  if not M.wrong(jit.arch, jit.version) then return end
  jit.off()
  local rank = getenv "OMPI_COMM_WORLD_RANK" or getenv "PMI_RANK" or getenv "SLURM_PROCID" or "0"
  if getenv "PERI_UNCOMPILED" or rank ~= "0" then return end
  if package.preload["perilune.launcher"] then require("perilune.launcher").setenv("PERI_UNCOMPILED", "1") end
  io.stderr:write(("perilune: %s makes wrong code for this processor (%s), so Lua runs uncompiled, several times slower; a LuaJIT of 2024 "
    .. "or later would not (Debian 13 has one)\n"):format(jit.version, jit.arch))
end

return M
