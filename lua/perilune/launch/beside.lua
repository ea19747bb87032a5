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

--- How many processors other programs had on this rank's machine while f() ran; 0 where there was room for all. f returns whether hosts
--- have processors of their own (else all ranks are on one machine). Collective.
function M.others(group, f)
  local before, own, from = processor_seconds(), os.clock(), seconds()
  local apart = f()
  local after, passed = processor_seconds(), seconds() - from
  local ours = peri.Tensor.tensor({ os.clock() - own }, "f64")
  local machine = apart and peri.dist.comm.intra_and_cross_node_pg { group = group } or group
  machine:all_reduce(ours):wait()
  if not (before and after) or (after.idle - before.idle) / passed > ROOM then return 0 end
  return (after.busy - before.busy - ours:item()) / passed
end

return M
