-- verify.lua: what was predicted of plans beside what steps of them take here: `perilune plan --verify`, and make
-- bench-plan.
local peri = require "perilune"
local measure, most = require "perilune.calibration.measure", require("perilune.calibration.rates").most
local util, step = peri.util, require "perilune.plan.step"

local M = {}

local LEAST, MOST = 5, 500 -- turns

--- Run plans in turns. list: of { plan = ShardingPlan, ... }; args: { model =, topology =, batch_size =, constraints =,
--- group =, device = where tables are (nil: the processor), seconds = (about, for each) }. Each entry gets predicted
--- and measured = { ms =, forward_ms =, backward_ms =, bytes = } (of turns the fastest; median_ms: of all). Collective.
function M.compare(list, args)
  local group, prepared, times = args.group, {}, {}
  for i, entry in ipairs(list) do
    entry.predicted = step.predict(entry.plan, args.model, args.topology, args.batch_size, args.constraints)
    prepared[i] = measure.prepare { model = args.model, plan = entry.plan, constraints = args.constraints,
      batch_size = args.batch_size, group = group, device = args.device }
    times[i] = {}
    entry.measured = { ms = math.huge, forward_ms = math.huge, backward_ms = math.huge,
      bytes = most(group, prepared[i].bytes) }
  end
  local from = tonumber(peri.ffi.C.peri_time_ns()) / 1e9
  for turn = -1, MOST do
    for i, entry in ipairs(list) do
      local ms, ahead, back = measure.time(prepared[i])
      local m = entry.measured
      if turn > 0 then times[i][turn] = ms end
      if turn > 0 and ms < m.ms then m.ms, m.forward_ms, m.backward_ms = ms, ahead, back end
    end
    if turn >= LEAST and most(group, tonumber(peri.ffi.C.peri_time_ns()) / 1e9 - from) > args.seconds * #list then
      break
    end
  end
  for i, entry in ipairs(list) do
    entry.measured.median_ms = util.median(times[i])
    measure.release(prepared[i])
  end
  return list
end

--- Lines of one entry.
function M.lines(entry)
  local lines = { "                      predicted    measured     off" }
  for _, row in ipairs { { "a step, ms", "ms", 1 }, { "  forward", "forward_ms", 1 },
    { "  backward", "backward_ms", 1 }, { "fullest rank, MB", "bytes", 1e-6 } } do
    local p, m = entry.predicted[row[2]] * row[3], entry.measured[row[2]] * row[3]
    lines[#lines + 1] = ("  %-16s %12.4g%12.4g%7.1f %%"):format(row[1], p, m, 100 * (p / m - 1))
  end
  return lines
end

return M
