-- A collection that is wrapped brings its numbers along, and files bring theirs: a flushed table goes on whatever was
-- asked of the collection before, and where both have something of their own nothing is lost without a word.
-- deadline: 120 s
-- mpirun: 3
local peri = require "perilune"
local collision = require "spec.support.collision"
local collective_utils = require "perilune.dist.collective_utils"
local tier = require "spec.support.tier"
local worlds = require "spec.support.worlds"
local plan = peri.plan
local C = peri.ffi.C

local ROWS = 30

--- What `f` returns on rank 0, on all ranks.
local function once(world, f, ...) return collective_utils.invoke_on_rank_and_broadcast_result(world, 0, f, ...) end

local entries = { plan.row_wise, function(options) return plan.table_wise(0, options) end, plan.column_wise }
local optimizers = { "sgd", "adam", "rowwise_adagrad" }

local function collection(seed)
  local tables = {}
  for i, name in ipairs { "a", "b" } do
    tables[i] = peri.EmbeddingBagConfig { name = name, num_embeddings = ROWS, embedding_dim = 8,
      feature_names = { name }, data_type = seed % 2 == 0 and "FP16" or "FP32", init_fn = i == 2
        and peri.embed.normal(0, 0.1) or nil }
  end
  return peri.EmbeddingBagCollection { tables = tables, seed = 3,
    fused_params = { optimizer = optimizers[seed % 3 + 1], learning_rate = 0.5 } }
end

local function batch(r)
  local ids, lengths = {}, {}
  for i = 1, 6 do ids[i], lengths[i] = r(ROWS) - 1, 1 end
  return peri.KeyedJaggedTensor { keys = { "a", "b" }, values = ids, lengths = lengths }
end
local function all()
  local ids, lengths = {}, {}
  for i = 1, 2 * ROWS do ids[i], lengths[i] = (i - 1) % ROWS, 1 end
  return peri.KeyedJaggedTensor { keys = { "a", "b" }, values = ids, lengths = lengths }
end
local function numbers(module) return peri.no_grad(function() return module(all()):values():to_list() end) end

--- What may have been asked of a collection; true: it has numbers of its own afterwards.
local looks = {
  nothing = function() end,
  ["its parameters"] = function(e) e:parameters() end,
  ["its state"] = function(e) e:state_dict() end,
  ["a lookup"] = function(e) numbers(e) end,
  ["a row"] = function(e) e:table_rows("a", "weight", 3, 2) end,
  ["its own state, loaded"] = function(e) e:load_state_dict(e:state_dict():clone()) end,
  ["a training step"] = function(e, r) e(batch(r)):values():sum():backward() return true end,
  ["other weights"] = function(e) e:weight("b"):slice(1, 4, 5):fill(0.25) return true end,
}

describe("a collection that is wrapped", function()
  setup(function() C.peri_log_level_set(C.PERI_LOG_ERROR) end)
  teardown(function() C.peri_log_level_set(C.PERI_LOG_WARN) end)

  worlds.each("and was looked at leaves flushed rows alone; with numbers of its own it is refused", function(world)
    local folder, case = once(world, tier.folder), 0
    for _, what in ipairs(peri.util.keys(looks)) do
      for _, only_first in ipairs { false, true } do
        case = case + 1
        local r, entry = collision.random(case), entries[case % 3 + 1]
        local function wrap(e)
          local function of(directory) return entry { compute_kernel = "fused_uvm_caching",
            cache_params = { load_factor = 1, directory = directory } } end
          return peri.DistributedModelParallel { module = e, group = world,
            plan = plan.ShardingPlan { [""] = { a = of(folder), b = of(folder) } } }
        end
        local function done(model)
          model.sharded[1]:release()
          world:barrier():wait()
        end
        local e = collection(case) -- new files take what the collection has
        looks[what](e, collision.random(case + 100))
        local wanted = numbers(e)
        local model = wrap(e)
        assert.same(wanted, numbers(model))
        model(batch(collision.random(case * 10 + world:rank()))):values():sum():backward()
        model:flush()
        wanted = numbers(model)
        local iteration = model.sharded[1]:local_shards()[1]
        iteration = iteration and iteration.iteration()
        done(model)
        e = collection(case) -- flushed ones stay
        local own = (not only_first or world:rank() == 0) and looks[what](e, r)
        if once(world, function() return own or false end) then
          local before = once(world, function() return tier.read_file(tier.files(folder)[1]) end)
          local ok, err = pcall(wrap, e)
          assert.is_false(ok)
          assert.truthy(err.message:find "row file '.*%.peri' has flush 1, iteration %d+; one of them would be lost",
            err.message)
          world:barrier():wait()
          assert.equal(before, once(world, function() return tier.read_file(tier.files(folder)[1]) end))
          e = collection(case)
        end
        model = wrap(e)
        assert.same(wanted, numbers(model))
        if iteration then assert.equal(iteration, model.sharded[1]:local_shards()[1].iteration()) end
        done(model)
        once(world, tier.remove, folder .. "/*")
      end
    end
    once(world, tier.remove, folder)
  end, { sizes = { 1, 2, 3 }, devices = { "cpu" } })

  worlds.each("is of one model: a second one would train copies of its tables", function(world)
    local nn = peri.nn
    local Net = nn.Module:extend "Net"
    function Net:init(bags) self.bags, self.last = bags, nn.Linear { in_features = 4, out_features = 1 } end
    function Net:forward(kjt) return self.last(self.bags(kjt):values()):sum() end
    local function bags()
      return peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 6,
        embedding_dim = 4, feature_names = { "f" } } }, fused_params = { optimizer = "sgd", learning_rate = 1 } }
    end
    local function wrap(module)
      return peri.DistributedModelParallel { module = Net(module), group = world,
        plan = not peri.shard.ShardedModule.is(module) and plan.ShardingPlan { bags = { t = plan.row_wise() } } or nil }
    end
    local shared = bags()
    local first = wrap(shared)
    local ok, err = pcall(wrap, shared)
    assert.is_false(ok)
    assert.matches("module 'bags', this EmbeddingBagCollection is 'bags' of another DistributedModelParallel",
      err.message, 1, true)
    local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 5 }, lengths = { 1, 1 } }
    for what, use in peri.util.ordered { weight = function() return shared:weight "t" end,
      state_dict = function() return shared:state_dict() end, lookup = function() return shared(kjt) end,
      quantized = function() return peri.quantize_embeddings { module = shared, dtype = "INT8" } end } do
      local answered, words = pcall(use)
      assert.is_false(answered, what)
      assert.matches("EmbeddingBagCollection: 'bags' of a DistributedModelParallel has its tables in shards now",
        words.message, 1, true)
    end
    local second = wrap(first.module.bags) -- the sharded one is one module of both
    local function rows(model) return peri.no_grad(function() return model.module.bags(kjt):values():to_list() end) end
    local before = rows(first)
    second:backward(second(kjt))
    assert.not_same(before, rows(first))
    assert.same(rows(first), rows(second))
  end, { sizes = { 1, 2 }, devices = { "cpu" } })

  it("is no nn.EmbeddingBag where files are to stay", function()
    local ok, err = pcall(peri.DistributedModelParallel,
      { module = peri.nn.EmbeddingBag { num_embeddings = 4, embedding_dim = 2 }, group = peri.init(),
        sharders = { peri.shard.EmbeddingBagSharder { fused_params = { optimizer = "sgd" } } },
      plan = plan.ShardingPlan { [""] = { weight = plan.row_wise { compute_kernel = "fused_uvm_caching",
        cache_params = { directory = "/var/tmp" } } } } })
    assert.is_false(ok)
    assert.truthy(tostring(err):find("always brings numbers of its own; allowed: no directory", 1, true), tostring(err))
  end)
end)
