-- reshard.lua: a live model under another plan, between two steps: what saving it and loading the checkpoint under the
-- other plan would make of it, in the same objects.
--
-- Tables do not fit into memory twice. So the sharded modules are saved as a checkpoint into a folder for a moment,
-- their memory and row files are given back, they are made again under the new plan, and each rank reads the rectangles
-- that it now has. Where that fails, they are made again under the old plan. A process that dies meanwhile leaves the
-- checkpoint in the folder, and the next reshard there removes it a day later (see sweep).
local environment = require "perilune.environment"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local parameter = require "perilune.nn.parameter"
local all_or_none = require("perilune.nn.ranks").all_or_none
local checkpoint = require "perilune.checkpoint"
local checkpoint_parts = require "perilune.checkpoint.parts"
local names = require "perilune.checkpoint.names"
local ShardingEnv = require "perilune.plan.env"
local runtime = require "perilune.plan.runtime"
local stream = require "perilune.tensor.stream"

local M = {}
local FUNC = "DistributedModelParallel:reshard"
local LEFT_SECONDS = 86400 -- no reshard takes so long, and clocks of hosts differ by less

local arguments = {
  folder = util.optional.string, -- for the tables meanwhile, shared by all hosts; default: TMPDIR or /var/tmp, on one
                                 -- host
}

-- -- before anything changes ------------------------------------------------------------------------------------------

--- An error while something of a batch is under way, which belongs to the old plan.
local function check_between(model)
  model:check_moment()
  checkpoint_parts.check_flights(FUNC, model, "whose ids went where rows of module '%s' are now")
end

--- Keepers of dense tables' states (optimizers), which have to take other parameters: each once, and the same ones on
--- all ranks.
local function keepers_of(model)
  local tensors, list = {}, {}
  for _, sharded in ipairs(model.sharded) do
    tensors[sharded] = true
    for _, p in ipairs(sharded:parameters()) do tensors[p] = true end
  end
  for _, keeper in ipairs(parameter._keepers_of(tensors)) do
    local why = keeper._rebind_refusal and keeper:_rebind_refusal(model:named_parameters()) or keeper._rebind == nil
      and "it cannot take other parameters"
    if why then
      P.fail(("%s: tables with compute_kernel dense are trained by a %s, and %s"):format(FUNC, keeper.class_name, why))
    end
    if keeper._rebind then list[#list + 1] = keeper end -- false: it is retired (pipeline.ema)
  end
  local function text(keeper) return keeper.class_name .. " " .. table.concat(keeper.names, " ") end
  table.sort(list, function(x, y) return text(x) < text(y) end)
  return list
end

local function check_new_sharding(sharded, collection, name, sharding, optimizer, config)
  local was = sharded.plan.tables[name]
  if was and (was.compute_kernel == "dense") ~= (sharding.compute_kernel == "dense") then
    P.fail(("%s: module '%s', table '%s': compute_kernel was %s and is %s: dense tables have other optimizers, and "
      .. "their states are not the others'"):format(FUNC, collection.path, name, was.compute_kernel,
      sharding.compute_kernel))
  end
  if sharded._accumulates then sharded:_check_accumulates(name, sharding) end
  if not (optimizer and config) then return end
  local why = runtime.refusal { name = name, rows = config.num_embeddings, dim = config.embedding_dim,
    data_type = config.data_type, sharding_type = sharding.sharding_type, compute_kernel = sharding.compute_kernel,
    optimizer = optimizer.name, fused_params = optimizer.params, cache_params = sharding.cache_params }
  if why then P.fail(("%s: module '%s', %s"):format(FUNC, collection.path, why)) end
end

--- An error if the runtime cannot have the tables of a sharded module like that: now, and not when they have been given
--- back. collection: its path, its tables, and the plan for them.
function M.ask(sharded, collection)
  local optimizers, configs = {}, {}
  for _, o in ipairs(sharded.optimizers or {}) do
    for _, name in ipairs(o.tables) do optimizers[name] = o end
  end
  for _, t in ipairs(collection.tables) do configs[t.name] = t end
  for name, sharding in util.ordered(collection.plan.tables) do
    check_new_sharding(sharded, collection, name, sharding, optimizers[name], configs[name])
  end
end
--- Where the tables are saved, and whether all ranks can reach it.
local function folder_of(model, options)
  local group = model.dense_env.pg
  local nodes = ShardingEnv.from_process_group(group).nodes
  for _, node in ipairs(nodes) do
    if not options.folder and node ~= nodes[1] then
      P.fail(FUNC .. ": ranks are on several machines; folder = names one that all of them share, for the tables "
        .. "meanwhile")
    end
  end
  local folder = options.folder or environment "TMPDIR" or "/var/tmp"
  local there = io.open(folder .. "/.")
  if not there then P.fail(("%s: folder '%s' is not there"):format(FUNC, folder)) end
  there:close()
  return folder
end

--- By module, which of its tables are frozen: all ranks know it, those that have no shards of them too. An error where
--- some shards of a table are and others are not. Collective.
local function frozen_of(model)
  local own, all = util.map(model.sharded, function(sharded) return sharded:_frozen_tables() end), {}
  for _, list in ipairs(model.dense_env.pg:all_gather_object(own, FUNC)) do
    for i, sharded in ipairs(model.sharded) do
      all[i] = all[i] or {}
      for name, is in util.ordered(list[i]) do
        if (all[i][name] or is) ~= is or is == "frozen in part" then
          P.fail(("%s: module '%s', table '%s': some of its shards are frozen (requires_grad(false)) and others are "
            .. "not; allowed: all of them, on all ranks, or none"):format(FUNC, model._paths[i], name))
        end
        all[i][name] = is
      end
    end
  end
  return all
end

-- -- there and back ---------------------------------------------------------------------------------------------------

--- What is saved: the sharded modules, and the optimizers of their dense tables.
local function parts_of(modules, keepers)
  local parts = {}
  for i, sharded in ipairs(modules) do parts["m" .. i] = sharded end
  for i, keeper in ipairs(keepers) do parts["k" .. i] = keeper end
  return parts
end

--- What a module gives back: files of rows that stay in a folder of the user's (all rows are in the checkpoint, and
--- those of the other plan have their place), and bytes of memory, at most.
local function given_back(sharded)
  local paths, bytes, files = {}, 0, sharded:in_files()
  for _, s in ipairs(sharded:local_shards()) do
    local file = files and s.rows > 0 and s.cached and s.file()
    if file then paths[#paths + 1] = file.path end
    bytes = bytes + #s.names() * s.rows * s.cols * 4
  end
  return paths, bytes
end

--- Views of the old tables, such as the save's, keep their memory until they are collected, and compiled code has some
--- as constants; and what is free stays with its device, where only shards of the same size would find it. To give
--- that up and to collect costs more than small tables do: it is done once this many bytes may have stayed.
local STAYS, stayed = 2 ^ 25, 0

local function give_back_memory(modules)
  jit.flush()
  for _ = 1, 2 do collectgarbage() end
  local seen = {}
  for _, sharded in ipairs(modules) do
    local device = sharded.device or false
    if not seen[device] then stream.empty_cache(device or nil) end
    seen[device] = true
  end
end

--- Make the modules again under such plans, and load what was saved. What is a local error is one of all ranks.
local function go_to(a, plans, path)
  local ok, err = xpcall(function()
    local paths = {}
    for i, sharded in ipairs(a.modules) do
      local live, own, bytes = pcall(given_back, sharded)
      paths[i], stayed = live and own or {}, stayed + (live and bytes or 0)
      sharded:release()
    end
    if stayed > STAYS then
      give_back_memory(a.modules)
      stayed = 0
    end
    for i, sharded in ipairs(a.modules) do
      for _, file in ipairs(paths[i]) do os.remove(file) end
      sharded:_remake(plans[i])
      sharded:_freeze(a.frozen and a.frozen[i] or {})
    end
  end, P.locate)
  all_or_none({ a.group }, FUNC, not ok and err or nil)
  if a.rebind then a.rebind() end
  checkpoint.load(path, parts_of(a.modules, a.keepers), { group = a.shared })
  for _, sharded in ipairs(a.modules) do sharded:_remade() end
end

--- Remove what processes that died in a reshard have left in a folder. The time in a name is when that reshard began.
--- One that goes on has its tables there only, so a checkpoint has to be old, and nobody may have it open.
local function sweep(folder)
  local ok, list = pcall(names.all, folder)
  for _, name in ipairs(ok and list or {}) do
    local began = tonumber(name:match "^perilune%-reshard%-(%d+)%-%d+%-%d+$")
    if began and os.time() - began > LEFT_SECONDS then P.C.peri_checkpoint_remove(folder .. "/" .. name) end
  end
end

--- Put sharded modules under other plans. a: modules, a list of ShardedModules; plans, one for each; keepers:
--- optimizers of their dense tables, which rebind() gives the new parameters; folder; group: the ranks that do it
--- together; shared: those that have one copy of the tables; frozen: see frozen_of (nil: nothing is). Returns the error
--- after which the modules are under their old plans; nil: there was none. Collective.
function M.modules(a)
  local stamp = ("%d-%s"):format(os.time(), tostring(P.C.peri_flush_stamp()):match "%d+")
  local stamps = a.group:all_gather_object(stamp, FUNC)
  local first = a.shared:all_gather_object(a.group:rank(), FUNC)[1]
  local path = ("%s/perilune-reshard-%s-%d"):format(a.folder, stamps[1], first)
  local old = util.map(a.modules, function(sharded) return sharded.plan end)
  if a.shared:rank() == 0 then sweep(a.folder) end
  checkpoint.save(path, parts_of(a.modules, a.keepers), { group = a.shared })
  local ok, err = xpcall(go_to, P.locate, a, a.plans, path)
  if not ok then
    local back, why = xpcall(go_to, P.locate, a, old, path)
    if not back then
      P.fail(("%s: %s; the old plan could not be put back either: %s; the tables are in checkpoint '%s'"):format(FUNC,
        (errors.describe(err)), (errors.describe(why)), path))
    end
  end
  if a.shared:rank() == 0 then checkpoint.remove(path) end
  a.shared:barrier():wait()
  return not ok and err or nil
end

--- Of lists of parameters from before: those that are not the model's any more.
local function retire(before, model)
  local kept, gone = {}, {}
  for _, p in ipairs(model:parameters()) do kept[p] = true end
  for _, p in ipairs(before) do
    if not kept[p] then gone[#gone + 1] = p end
  end
  if #gone > 0 then
    parameter.retire(gone, "is a shard of a table that was cut otherwise since (reshard): take "
      .. "model:named_parameters() again")
  end
end

--- See DistributedModelParallel:reshard.
function M.reshard(model, plan, options)
  local a, group = util.named(FUNC, options or {}, arguments), model.dense_env.pg
  local keepers, folder, before
  local ok, err = xpcall(function()
    check_between(model)
    model:check_plan(plan)
    keepers, folder, before = keepers_of(model), folder_of(model, a), model:parameters()
  end, P.locate)
  all_or_none({ group }, FUNC, not ok and err or nil)
  local frozen = frozen_of(model)
  local plans = util.map(model.sharded, function(sharded, i)
    return plan:get_plan_for_module(model._paths[i]) or sharded.plan
  end)
  local function rebind()
    local params = #keepers > 0 and model:named_parameters()
    for _, keeper in ipairs(keepers) do keeper:_rebind(params) end
  end
  err = M.modules { modules = model.sharded, plans = plans, keepers = keepers, rebind = rebind, folder = folder,
    group = group, shared = model.group, frozen = frozen }
  if not err then model.plan = plan end
  retire(before, model)
  model:_resharded()
  if err then error(err, 0) end
end

signature.object("resharded_model", "a DistributedModelParallel",
  { dense_env = "table", sharded = "list", check_plan = "callable" })
signature.object("resharding", "what reshard makes of a model", { modules = "list", plans = "list", keepers = "list",
  folder = "string", group = "Group", shared = "Group" })
signature.check("model.reshard.", M, { reshard = "model: resharded_model, plan: any, options: table?",
  modules = "a: resharding" })

return M
