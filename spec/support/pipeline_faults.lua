-- pipeline_faults.lua: every schedule of the library with a model that it trains, and an operation more in one of its
-- slots.
local peri = require "perilune"
local support = require "spec.support.pipeline"
local schedules = peri.pipeline.schedules

local M = {}

--- What schedules take that take a number, so that what they do every so many batches happens; options of their models.
local arguments = { accumulate = 2, prefetch_fused_2d = 2, semi_sync = 0 }
local options = {
  accumulate = function() return { no_replica = true } end, -- fused replicas cannot wait for their updates
  prefetch_sparse_dist = function() return { files = 0.9 } end,
  prefetch_fused_2d = function(size) return { two_d = size / 2, sync_interval = 0 } end,
}

--- The rank to which it happens; in a model of stages, of more than two one in the middle.
function M.victim(size) return math.floor(size / 2) end

local function schedule_of(name, size, stage)
  if name == "one_f_one_b" then return schedules.one_f_one_b { stages = size, stage = stage, micro_batches = 4 } end
  local s = schedules[name]
  if peri.util.is_callable(s) then s = s(arguments[name]) end
  return s
end

--- Slots of a schedule, as numbers; of the rank to which it happens.
function M.slots(name, size)
  local list, slots = {}, support.slots(schedule_of(name, size, M.victim(size)), function() end)
  while true do
    local _, slot = slots(#list + 1)
    if not slot then return list, #schedule_of(name, size, M.victim(size)).operations end
    list[#list + 1] = slot
  end
end

--- A Pipeline over `group` with an operation that runs act(context) in the number-th of those slots, and the slot. In a
--- model of stages only the rank to which it happens has it.
function M.pipeline(name, group, act, number)
  local size, stage = group:size(), nil
  local model
  if name == "one_f_one_b" then
    stage = support.stage(group, "cpu")
    model = support.part(stage, "cpu")
  else
    model = support.model(group, "cpu", options[name] and options[name](size) or nil)
  end
  local schedule = schedule_of(name, size, stage and stage.index)
  local slot = M.slots(name, size)[number]
  if not stage or group:rank() == M.victim(size) then schedule = support.slots(schedule, act)(number) end
  local trains = schedule:check().first.backward
  local optimizer = stage and peri.nn.optim.Adam { params = model:parameters(), lr = 0.05 } or trains
    and support.optimizer(model) or nil
  return peri.pipeline.Pipeline { model = model, optimizer = optimizer, schedule = schedule, stage = stage }, slot
end

return M
