-- flushes.lua: a model of two collections and three table batches in files, trained and flushed by ranks, for the specs
-- of flushes over ranks. As a script it trains and flushes for ever, until it is killed (FOLDER/ready-RANK
-- then holds the process): luajit spec/support/flushes.lua FOLDER SIM_RANKS (0: under mpirun)
local ffi = require "ffi"
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local plan = peri.plan

local M = {}
local ROWS = 24

--- A module of two collections; "one" has table batches of two optimizers.
local function module_of()
  local Pair = peri.nn.Module:extend "Pair"
  function Pair:init()
    local function collection(names)
      return peri.EmbeddingBagCollection { device = "meta", seed = 7,
        fused_params = { optimizer = "sgd", learning_rate = 0.5 }, tables = peri.util.map(names, function(name)
          return peri.EmbeddingBagConfig { name = name, num_embeddings = ROWS, embedding_dim = 8,
            feature_names = { name }, data_type = name == "half" and "FP16" or "FP32" }
        end) }
    end
    self.one, self.two = collection { "a", "half" }, collection { "c" }
  end
  function Pair:forward(kjt) return self.one(kjt):values(), self.two(kjt):values() end
  return Pair()
end

--- The model on a group, its files in `folder` (a name, or a function of the rank); `entry` (of a table's name) changes
--- its plan entry.
function M.model(group, folder, entry)
  local params = plan.CacheParams { load_factor = 1, directory = type(folder) == "function" and folder(group:rank())
    or folder }
  local function of(name)
    local options = { compute_kernel = "fused_uvm_caching", cache_params = params }
    return entry and entry(name, options) or plan.row_wise(options)
  end
  return peri.DistributedModelParallel { module = module_of(), group = group,
    plan = plan.ShardingPlan { one = { a = of "a", half = of "half" }, two = { c = of "c" } } }
end

function M.release(model)
  for _, s in ipairs(model.sharded) do s:release() end
end

--- One step: every rank updates two rows of each table, other rows in every step.
function M.step(model, k)
  local rank, n = model.group:rank(), model.group:size()
  local ids, lengths = {}, {}
  for t = 1, 3 do
    ids[2 * t - 1], ids[2 * t], lengths[t] = (k * n + rank + t) % ROWS, (5 * k + 7 * rank) % ROWS, 2
  end
  local kjt = peri.KeyedJaggedTensor { keys = { "a", "half", "c" }, values = ids, lengths = lengths }
  local one, two = model(kjt)
  model:backward(peri.nn.functional.mean(one) + peri.nn.functional.mean(two))
end

function M.train(model, first, last)
  for k = first, last do M.step(model, k) end
end

--- Iterations of all shards of this rank: a number if they are equal.
function M.iteration(model)
  local found
  for _, s in ipairs(model.sharded) do
    for _, shard in ipairs(s:local_shards()) do
      assert(found == nil or found == shard.iteration(), "shards of different iterations")
      found = shard.iteration()
    end
  end
  return found
end

--- All weights on this rank, as lists.
function M.weights(model)
  local list = {}
  for _, s in ipairs(model.sharded) do
    for _, shard in ipairs(s:local_shards()) do
      list[#list + 1] = shard.read("weight", 0, peri.empty(shard.shape "weight")):to_list()
    end
  end
  return list
end

pcall(ffi.cdef, "int getpid(void);")

local function for_ever(group, folder)
  local model = M.model(group, folder)
  for k = 1 + (M.iteration(model) or 0), 1e9 do
    M.step(model, k)
    model:flush()
    if k == 3 then
      local file = io.open(("%s/ready-%d"):format(folder, group:rank()), "w")
      file:write(ffi.C.getpid())
      file:close()
    end
  end
end

if arg and arg[0] and arg[0]:find "flushes%.lua$" then
  local folder, ranks = arg[1], tonumber(arg[2])
  if ranks > 0 then sim.run(ranks, function(_, world) for_ever(world, folder) end)
  else for_ever(peri.init { timeout = 30 }, folder) end
end

return M
