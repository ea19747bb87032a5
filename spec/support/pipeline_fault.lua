-- pipeline_fault.lua: groups of ranks, each of which trains with the schedule of one slot: in that slot, at batch 2,
-- one rank of the group dies (kill -9), stops (SIGSTOP), or has no more data, and the others say how their run ended.
-- On several machines each group is spread over all of them. (Where it has no more data, one group may go from slot to
-- slot.) spec/pipeline/faults_spec.lua runs it under mpirun, with so many ranks for each group:
--   luajit spec/support/pipeline_fault.lua SCHEDULE FAULT DEADLINE RANKS FIRST STEP
-- takes slots FIRST, FIRST + STEP, ...; prints "at|group|rank|rank in the world" at first, and
--   "SLOT|rank|that rank in the world|seconds|error name|message" lines; where a run ends well: "ok|steps of batches
--     given"
local peri = require "perilune"
local P = require "perilune.ffi"
local support = require "spec.support.pipeline"
local faults = require "spec.support.pipeline_faults"
local C = P.C

local BATCH, BATCHES = 2, 7 -- at which it happens, of so many

local acts = {
  dies = "kill -9 $PPID",
  stalls = "(sleep %g; kill -9 $PPID) >/dev/null 2>&1 & kill -STOP $PPID", -- and is dead when the others have given up
}

--- The group of this rank and its number, from 1: as many ranks of each machine.
local function own_group(world, size)
  local machines, list = {}, {}
  for r = 0, world:size() - 1 do
    local m = world:node(r)
    if not machines[m] then
      machines[m] = {}
      list[#list + 1] = machines[m]
    end
    table.insert(machines[m], r)
  end
  local each = size / #list
  assert(each % 1 == 0, "groups of this size cannot be spread over the machines")
  for k = 1, world:size() / size do
    local ranks, mine = {}, false
    for _, m in ipairs(list) do
      for i = (k - 1) * each + 1, k * each do
        ranks[#ranks + 1] = assert(m[i], "machines have unequal numbers of ranks")
        mine = mine or m[i] == world:rank()
      end
    end
    if mine then return world:new_group(ranks, "slot " .. k), k end
  end
end

--- Train with the schedule of the number-th slot, and say how that ended.
local function run(name, fault, deadline, group, number)
  group:timeout(name == "prefetch_fused_2d" and 20 or 60) -- many processes start on few cores; groups within keep it
  P.state.world = group
  local size = group:size()
  local victim, over = group:rank() == faults.victim(size), false
  local troubled = group:global_rank(faults.victim(size))
  local slot, given, steps = nil, 0, 0
  local function trouble(context)
    if context.index ~= BATCH then return end
    group:timeout(deadline)
    if not victim then return end
    if fault == "dry" then over = true else os.execute(acts[fault]:format(deadline + 2)) end
  end
  local function train()
    local own = support.batches(name == "one_f_one_b" and 0 or group:rank(), "cpu", BATCHES) -- stages load the same
    local pipeline
    pipeline, slot = faults.pipeline(name, group, trouble, number)
    for _, step in pipeline:run(function()
      local batch = not over and own() or nil
      given = given + (batch and 1 or 0)
      return batch
    end) do steps = step end
  end
  local start = tonumber(C.peri_time_ns())
  local ok, err = pcall(train)
  local seconds = (tonumber(C.peri_time_ns()) - start) * 1e-9
  local said = ok and ("ok|%d of %d"):format(steps, given)
    or ("%s|%s"):format(err.name or "Lua", (tostring(err):gsub("\n.*", "")))
  io.stdout:write(("%d|%d|%d|%.2f|%s\n"):format(slot or -number, group:rank(), troubled, seconds, said))
  io.stdout:flush()
end

local function main(name, fault, deadline, size, first, step)
  C.peri_log_level_set(C.PERI_LOG_ERROR)
  local world = peri.init { timeout = 60 }
  if fault == "dry" and world:size() == size then -- nobody is lost: the same ranks go from slot to slot
    local ranks = {}
    for r = 0, world:size() - 1 do ranks[r + 1] = r end
    for number = first, #faults.slots(name, size), step do
      run(name, fault, deadline, world:new_group(ranks, "slot " .. number), number)
    end
    os.exit(0, true)
  end
  local group, number = own_group(world, size)
  io.stdout:write(("at|%d|%d|%d\n"):format(number, group:rank(), world:rank()))
  io.stdout:flush()
  run(name, fault, deadline, group, first + (number - 1) * step)
  os.exit(0, true)
end

main(arg[1], arg[2], tonumber(arg[3]), tonumber(arg[4]), tonumber(arg[5]), tonumber(arg[6]))
