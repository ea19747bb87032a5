-- beside.lua: what other programs have of the processors while ranks measure.
local peri = require "perilune"

local M = {}

local TICKS = 100 -- of /proc/stat, a second
local ROOM = 0.5  -- processors that are idle: others are in nobody's way

--- Seconds that processors of this machine have been busy and idle, in all; nil where nothing says so.
local function processor_seconds()
  local file = io.open "/proc/stat"
  local user, nice, system, idle, waiting = (file and file:read "*l" or ""):match "^cpu%s+(%d+) (%d+) (%d+) (%d+) (%d+)"
  if file then file:close() end
  return user and { busy = (user + nice + system) / TICKS, idle = (idle + waiting) / TICKS }
end

local function seconds() return tonumber(peri.ffi.C.peri_time_ns()) / 1e9 end

--- Processors that other programs had while f() ran in this process, which shares its work with nobody; 0 where there
--- was room for all, and where nothing says so. Local.
function M.others_of_process(f)
  local before, own, from = processor_seconds(), os.clock(), seconds()
  f()
  local after, passed = processor_seconds(), seconds() - from
  return M.processors_of_others(before, after, os.clock() - own, passed)
end

--- Of the seconds that processors were busy and idle before and after `passed` seconds ({ busy =, idle = }, or nil), of
--- which we had `ours`: how many processors others had; 0 where there was room for all.
function M.processors_of_others(before, after, ours, passed)
  if not (before and after) or passed <= 0 or (after.idle - before.idle) / passed > ROOM then return 0 end
  return math.max(0, (after.busy - before.busy - ours) / passed)
end

--- How many processors other programs had on this rank's machine while f() ran; 0 where there was room for all. f
--- returns whether hosts have processors of their own (else all ranks are on one machine). Collective.
function M.others(group, f)
  local before, own, from = processor_seconds(), os.clock(), seconds()
  local apart = f()
  local after, passed = processor_seconds(), seconds() - from
  local ours = peri.Tensor.tensor({ os.clock() - own }, "f64")
  local machine = apart and peri.dist.comm.intra_and_cross_node_pg { group = group } or group
  machine:all_reduce(ours):wait()
  return M.processors_of_others(before, after, ours:item(), passed)
end

return M
