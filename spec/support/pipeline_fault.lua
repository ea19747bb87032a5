-- pipeline_fault.lua: pairs of ranks, each of which trains with the schedule of one slot: in that slot, at batch 2, the second rank of the
-- pair dies (kill -9) or stops (SIGSTOP), and the first says how its run ended. spec/pipeline/faults_spec.lua runs it under mpirun, with
-- two ranks for each slot:
--   luajit spec/support/pipeline_fault.lua SCHEDULE FAULT DEADLINE    prints "SLOT|seconds|error name|message" lines
local peri = require "perilune"
local P = require "perilune.ffi"
local support = require "spec.support.pipeline"
local C = P.C

local BATCH = 2 -- at which it happens, of 5

local acts = {
  dies = "kill -9 $PPID",
  stalls = "(sleep %g; kill -9 $PPID) >/dev/null 2>&1 & kill -STOP $PPID", -- and is dead when the others have given up
}

local function main(name, fault, deadline)
  C.peri_log_level_set(C.PERI_LOG_ERROR)
  local world = peri.init { timeout = 60 }
  local number = math.floor(world:rank() / 2)
  local group = world:new_group({ 2 * number, 2 * number + 1 }, "slot " .. number + 1)
  group:timeout(60) -- many processes start on few cores
  local victim = group:rank() == 1
  local schedule, slot = support.slots(peri.pipeline.schedules.load(name), function(context)
    if context.index ~= BATCH then return end
    group:timeout(deadline)
    if victim then os.execute(acts[fault]:format(deadline + 2)) end
  end)(number + 1)
  local function train()
    local model = support.model(group, "cpu", name:match "prefetch" and { files = 0.9 } or nil)
    local pipeline = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model), schedule = schedule }
    for _ in pipeline:run(support.batches(group:rank(), "cpu", 5)) do end -- luacheck: ignore
  end
  P.state.world = group
  local start = tonumber(C.peri_time_ns())
  local ok, err = pcall(train)
  local seconds = (tonumber(C.peri_time_ns()) - start) * 1e-9
  local said = ok and "ok|" or ("%s|%s"):format(err.name or "Lua", (tostring(err):gsub("\n.*", "")))
  if not victim then io.stdout:write(("%d|%.2f|%s\n"):format(slot, seconds, said)) end
  io.stdout:flush()
  os.exit(0, true)
end

main(arg[1], arg[2], tonumber(arg[3]))
