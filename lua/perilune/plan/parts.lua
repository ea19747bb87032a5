-- plan/parts.lua: what parts of a planner return, looked at before it is used: users write parts themselves, and what
-- is wrong names the part.
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local partitioners = require "perilune.plan.partitioners"
local unchecked = require("perilune.plan.kinds").unchecked

local M = {}

local PLANNER = "EmbeddingShardingPlanner"

local function returned(method, value, kind)
  return signature.value(PLANNER, ("what %s returned"):format(method), value, kind)
end

--- What an enumerator goes by is what its planner goes by: what only the enumerator was given is taken from it, and
--- what both were given is the same, or an error. given: the planner's arguments as the user gave them; all: with
--- defaults.
function M.agree(func, given, all)
  local own = all.enumerator
  for _, name in ipairs { "batch_size", "constraints", "sharder" } do
    if own[name] ~= nil and given[name] == nil then all[name] = own[name]
    elseif own[name] ~= nil and given[name] ~= own[name] then
      P.fail(("%s: %s and an enumerator with another one; give %s to the enumerator only"):format(func, name, name))
    end
  end
  local topology = own.topology
  if signature.is("Topology", topology) and not rawequal(topology, all.topology)
    and tostring(topology) ~= tostring(all.topology) then
    P.fail(("%s: the topology of its enumerator is another one (%s; %s)"):format(func, tostring(topology),
      tostring(all.topology)))
  end
end

--- What a storage reservation left of a topology.
function M.reserved(topology) return returned("storage_reservation:reserve", topology, "Topology") end

--- The options of an enumerator.
function M.space(options) return returned("enumerator:enumerate", options, "proposal") end

--- The next proposal of proposers[i]: one option of each table of a search, whatever their order; nil: it has no more.
function M.proposal(proposer, i, search)
  local proposal = proposer:propose()
  if proposal == nil then return nil end
  local method = ("proposers[%d]:propose"):format(i)
  returned(method, proposal, "proposal")
  local seen = {}
  for k, option in ipairs(proposal) do
    local fqn = option.fqn
    if not search.places[fqn] or seen[fqn] then
      P.fail(("%s: what %s returned has [%d] of table '%s', %s; wanted one option of each table"):format(PLANNER,
        method, k, fqn, seen[fqn] and "of which it has another one" or "of which no options were loaded"))
    end
    seen[fqn] = true
  end
  if #proposal == search.num_tables then return proposal end
  for fqn in util.ordered(search.places) do
    if not seen[fqn] then
      P.fail(("%s: what %s returned has no option of table '%s'; wanted one of each table"):format(PLANNER, method,
        fqn))
    end
  end
end

--- Reasons of partitioners (partitioners.lua), by the field that tells which: what else they have.
local count = { count = "number" }
local group = { group = "number", tier = "string", rank = "int", left = "number" }
local relation = { relation = "table", tried = "number", rank = "int" }
local memory = { tier = "string", tried = "number", rank = "int", left = "number", run = "table" }
local none = { tried = "number" }

local function is_reason(why)
  if type(why) ~= "table" or not signature.is("ShardingOption", why.option) then return false end
  local fields = why.count and count or why.group and group or why.relation and relation or why.tier and memory or none
  for name, kind in util.ordered(fields) do
    if not signature.is(kind, why[name]) then return false end
  end
  return true
end

--- What a partitioner made of a proposal: a placement, or nil and why not: as partitioners.lua says it, or in words of
--- its own (says).
function M.placement(partitioner, proposal, topology)
  local partition = partitioner.partition
  local placement, why = (unchecked[partition] or partition)(partitioner, proposal, topology)
  if not placement then
    if is_reason(why) then return nil, why end
    return nil, { says = type(why) == "string" and why or "no placement, and no reason" }
  end
  partitioners.check_placement(PLANNER .. ": what partitioner:partition returned",
    proposal, returned("partitioner:partition", placement, "table"), topology.world_size)
  return placement
end

--- The rating of a plan.
function M.rating(model, proposal, placement)
  local rate = model.rate
  local rating = returned("performance_model:rate", (unchecked[rate] or rate)(model, proposal, placement), "number")
  if rating ~= rating then P.fail(PLANNER .. ": what performance_model:rate returned is nan, wanted a number") end
  return rating
end

return M
