-- comm.lua: where this rank is among the nodes (torchrec.distributed.comm), from the world it joined or from the
-- launcher's variables, and the groups within and across nodes.
local P = require "perilune.ffi"
local getenv = require "perilune.environment"
local util = require "perilune.util"
local signature = require "perilune.signature"
local group_of = require("perilune.dist.group").group_of
local state = P.state

local M = {}

--- Variables of torchrun, Intel MPI, Open MPI, MVAPICH and Slurm, in the order in which they are asked.
local variables = {
  local_size = { "LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE" },
  local_rank = { "LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID" },
  group_rank = { "GROUP_RANK", "SLURM_NODEID" },
  num_groups = { "GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES" },
  world_size = { "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS" },
  rank = { "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID" },
}

--- The first of the variables that is set; an error if it is no whole number.
local function variable(kind, environment)
  for _, name in ipairs(variables[kind]) do
    local text = environment and environment[name] or not environment and getenv(name) or nil
    if text and text ~= "" then
      local n = tonumber(text)
      if not n or n ~= math.floor(n) or n < 0 then
        P.fail(("comm: %s is '%s', allowed: whole numbers from 0"):format(name, text))
      end
      return n
    end
  end
end

--- Ranks by node from Slurm's list ("4(x2),3": nodes of 4, 4 and 3 ranks), or nil.
local function slurm_nodes(environment)
  local text
  for _, name in ipairs { "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE" } do
    text = text or (environment and environment[name] or not environment and getenv(name)) or nil
  end
  if not text then return nil end
  signature.value("comm", "the list of Slurm's tasks per node", text, "string")
  local nodes = {}
  for part in text:gmatch "[^,]+" do
    local count, times = part:match "^(%d+)%(x(%d+)%)$"
    count, times = count or part:match "^(%d+)$", times or 1
    if not count then P.fail(("comm: Slurm's tasks per node are '%s', allowed: lists like 4(x2),3"):format(text)) end
    for _ = 1, tonumber(times) do nodes[#nodes + 1] = tonumber(count) end
  end
  return nodes
end

--- The joined world unless the caller describes another one.
local function joined(world_size, environment)
  return world_size == nil and environment == nil and state.world or nil
end

local function world_size_of(func, world_size, environment)
  world_size = world_size or variable("world_size", environment) or 1
  return util.integer(func, "world_size", world_size, 1)
end

--- Ranks of a node. Of the joined world; else (or given a world size) as the launcher's variables say. A number that
--- does not divide the world size cannot be that of all nodes: then, as without any variable, all ranks count as one
--- node.
function M.get_local_size(world_size, environment)
  local world = joined(world_size, environment)
  if world then return world.local_size end
  world_size = world_size_of("get_local_size", world_size, environment)
  local nodes = slurm_nodes(environment)
  local n = variable("local_size", environment) or (nodes and nodes[1]) or world_size
  if n < 1 or world_size % n ~= 0 then return world_size end
  return n
end

--- This rank's place on its node.
function M.get_local_rank(world_size, rank, environment)
  local world = rank == nil and joined(world_size, environment)
  if world then return world.local_rank end
  local n = rank == nil and variable("local_rank", environment)
  if n then return n end
  rank = rank or variable("rank", environment) or 0
  return util.integer("get_local_rank", "rank", rank, 0) % M.get_local_size(world_size, environment)
end

--- This rank's node.
function M.get_group_rank(world_size, rank, environment)
  local world = rank == nil and joined(world_size, environment)
  if world then return world:node(world:rank()) end
  local n = rank == nil and variable("group_rank", environment)
  if n then return n end
  rank = rank or variable("rank", environment) or 0
  return math.floor(util.integer("get_group_rank", "rank", rank, 0) / M.get_local_size(world_size, environment))
end

--- Number of nodes.
function M.get_num_groups(world_size, environment)
  local world = joined(world_size, environment)
  if world then
    local most = 0
    for r = 0, world:size() - 1 do most = math.max(most, world:node(r) + 1) end
    return most
  end
  local n = world_size == nil and variable("num_groups", environment)
  if n then return n end
  world_size = world_size_of("get_num_groups", world_size, environment)
  return world_size / M.get_local_size(world_size, environment)
end

local who = "world_size: number?, rank: number?, environment: table?"
signature.check("", M, { get_local_size = "world_size: number?, environment: table?", get_local_rank = who,
  get_group_rank = who, get_num_groups = "world_size: number?, environment: table?" })

-- -- groups -----------------------------------------------------------------------------------------------------------

--- Nodes by rank + 1: given, or `local_size` consecutive ranks each.
local function topology_of(func, group, args)
  local n, nodes = group:size(), args.topology
  if nodes then
    if type(nodes) ~= "table" or #nodes ~= n then
      P.fail(("%s: topology has no node for each of the %d ranks"):format(func, n))
    end
    for i = 1, n do util.integer(func, "a node of topology", nodes[i], 0) end
    return nodes
  end
  local size = util.integer(func, "local_size", args.local_size, 1, n)
  if n % size ~= 0 then
    P.fail(("%s: nodes of %d ranks in a group of %d, allowed: divisors of it"):format(func, size, n))
  end
  nodes = {}
  for i = 1, n do nodes[i] = math.floor((i - 1) / size) end
  return nodes
end

--- The lists of ranks of this rank's two groups.
local function lists_of(func, group, nodes)
  local rank, by_node, place, most = group:rank(), {}, 0, nil
  for i = 1, #nodes do
    local list = by_node[nodes[i]] or {}
    by_node[nodes[i]] = list
    list[#list + 1] = i - 1
    if i - 1 == rank then place = #list end
  end
  local cross = {}
  for node, list in util.ordered(by_node) do
    most = most or #list
    if #list ~= most then
      P.fail(("%s: node %d has %d ranks and another one %d, allowed: equal numbers"):format(func, node, #list, most))
    end
    cross[#cross + 1] = list[place]
  end
  return by_node[nodes[rank + 1]], cross
end

--- The groups of this rank's node, and of the ranks with its place on all nodes: intra, cross. Named arguments: group
--- (the world), and to impose nodes: topology (a node number for each rank of the group) or local_size (consecutive
--- ranks). Collective; made once for a group and topology, later calls return the same groups. Closing the group they
--- were made from closes them.
function M.intra_and_cross_node_pg(args)
  local func = "intra_and_cross_node_pg"
  args = util.named(func, args, { group = util.optional, topology = util.optional, local_size = util.optional })
  local group = group_of(func, args.group)
  local imposed = args.topology or args.local_size
  local nodes = imposed and topology_of(func, group, args)
  local key = nodes and table.concat(nodes, " ") or "found"
  group._node_groups = group._node_groups or {}
  local made = group._node_groups[key]
  if not made then
    if nodes then
      local intra, cross = lists_of(func, group, nodes)
      made = { group:new_group(intra, "intra node"), group:new_group(cross, "cross node") }
    else
      made = { group:intra_node(), group:cross_node() }
    end
    group._node_groups[key] = made
  end
  return made[1], made[2]
end

return M
