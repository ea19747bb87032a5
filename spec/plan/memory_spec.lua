-- Memory of plans is what the runtime allocates, and plans propose nothing that it refuses: every optimizer, data type,
-- sharding type and compute kernel, made on the ranks of a sim world and looked at.
-- cuda: always
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local tbes = require "perilune.embed.tbe"
local config = require "perilune.embed.config"
local storage = require "perilune.plan.storage"
local runtime = require "perilune.plan.runtime"
local enumerators = require "perilune.plan.enumerators"
local planners = require "perilune.plan.planner"
local plan_options = require "perilune.plan.options"
local plan = peri.plan

local RANKS, LOCAL, ROWS, DIM = 4, 2, 52, 16
local PADDING = 64 -- bytes at most that a state's table is padded by
local kernels = { "fused", "fused_uvm_caching", "dense" }
local all = { "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard",
  "data_parallel" }
local bytes_of = { FP32 = 4, FP16 = 2, BF16 = 2 }
local dtype_bytes = { f32 = 4, f16 = 2, bf16 = 2, i64 = 8 }

local everything = { sharding_types = function() return all end, compute_kernels = function() return kernels end }
local devices = { os.getenv "PERI_OPAQUE_DEVICE" == "cuda_host" and "opaque" or "cpu" }

--- Ways to shard a table that a planner offers under an optimizer, as options by "type kernel".
local function offered(optimizer, data_type)
  local constraints = { t = plan.ParameterConstraints { sharding_types = all, compute_kernels = kernels,
    min_partition = 8 } }
  local topology = plan.Topology { world_size = RANKS, local_world_size = LOCAL }
  local tables = { { name = "t", num_embeddings = ROWS, embedding_dim = DIM, feature_names = { "f" },
    data_type = data_type } }
  local enumerator = enumerators.EmbeddingEnumerator { topology = topology, constraints = constraints,
    sharder = everything, batch_size = 4, estimators = {} }
  local ok, list = pcall(enumerator.enumerate, enumerator,
    { { path = "", kind = "EmbeddingBagCollection", tables = tables, optimizer = optimizer } })
  local out = {}
  for _, o in ipairs(ok and list or {}) do out[o.sharding_type .. " " .. o.compute_kernel] = o end
  return out, topology
end

--- Ranks of an option's shards: all, one after the other from 0 on.
local function places_of(option)
  local ranks = {}
  for k = 1, option.num_shards do ranks[k] = (k - 1) % RANKS end
  if option.sharding_type == "table_row_wise" or option.sharding_type == "table_column_wise" then
    for k = 1, option.num_shards do ranks[k] = (k - 1) % LOCAL end
  end
  return ranks
end

local function module_of(group, way, entry, optimizer, data_type)
  local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = ROWS, embedding_dim = DIM,
    feature_names = { "f" }, data_type = data_type } }
  return peri.shard.ShardedEmbeddingBagCollection { tables = tables,
    plan = plan.ShardingPlan({ [""] = { t = entry } }).plan[""], group = group,
    fused_params = config.usual_params(optimizer), device = way.device }
end

--- Bytes that the tables of this rank take, and their states: rows of caches in the place of the tables', which know
--- which row they have if they are rounded.
local function allocated(pieces, data_type)
  local bytes, states = 0, 0
  for _, piece in ipairs(pieces) do
    local slots = piece.cached and piece.cache_statistics().slots
    bytes = bytes + (slots and data_type ~= "FP32" and 8 * slots or 0)
    for _, name in ipairs(piece.names()) do
      local shape = piece.shape(name)
      local numbers = (shape[2] or 1) * (slots or shape[1])
      local size = slots and (name == "weight" and bytes_of[data_type] or name == "prev_iter" and 8 or 4)
        or dtype_bytes[piece.state(name):dtype()]
      bytes, states = bytes + numbers * size, states + 1
    end
  end
  return bytes, states
end

local function check_way(way, option, topology, optimizer, data_type)
  local ranks = option.partition_by == "uniform" or places_of(option)
  local entry = planners.entry(option, ranks == true and true or ranks, topology)
  sim.run(RANKS, function(_, world)
    local module = module_of(world, way, entry, optimizer, data_type)
    local bytes, states = allocated(module:local_shards(), data_type)
    local said, k = 0, 0
    for _, run in ipairs(option.runs) do
      for _ = 1, run.n do
        local rank = ranks == true and k or ranks[k + 1]
        if rank == world:rank() then said = said + runtime.bytes(option, run, way.compute_device) end
        k = k + 1
      end
    end
    local more = said - bytes
    -- of a dense table the module has the weights only; its optimizer's states are the dense part's
    assert(more >= 0 and (more < PADDING * states + 1 or option.compute_kernel == "dense"),
      ("%s %s %s %s on %s, rank %d: planned %d bytes, allocated %d"):format(optimizer, data_type, option.sharding_type,
        option.compute_kernel, way.device, world:rank(), said, bytes))
  end, { device = way.device, local_size = LOCAL })
end

for _, device in ipairs(devices) do
  local way = { device = device, compute_device = device == "cpu" and "cpu" or "cuda" }
  describe("plans on " .. device, function()
    for _, data_type in ipairs { "FP32", "FP16", "BF16" } do
      it("count for shards of " .. data_type .. " what the runtime allocates, and offer what it takes and nothing else",
        function()
        for _, optimizer in ipairs(config.optimizers()) do
          local options, topology = offered(optimizer, data_type)
          for _, kind in ipairs(all) do
            for _, kernel in ipairs(kernels) do
              local option = options[kind .. " " .. kernel]
              if option then check_way(way, option, topology, optimizer, data_type)
              else
                local ok, err = pcall(sim.run, RANKS, function(_, world)
                  module_of(world, way, plan.ParameterSharding { sharding_type = kind, compute_kernel = kernel,
                    ranks = (kind == "table_row_wise" or kind == "table_column_wise") and { 0, 1 }
                      or kind == "grid_shard" and { 0, 1, 2, 3 } or nil }, optimizer, data_type)
                end, { device = way.device, local_size = LOCAL })
                assert(not ok, ("%s %s %s %s is left out, and the runtime takes it"):format(optimizer, data_type, kind,
                  kernel))
                assert.is_string(tostring(err))
              end
            end
          end
        end
      end)
    end
  end)
end

describe("memory of plans", function()
  it("is that of table batches, byte for byte: with what else fused_params say, mapped, and rows of bytes", function()
    local counted = { counter_weight_decay_mode = "l2", counter_halflife = 4,
      learning_rate_mode = "tail_id_lr_increase" }
    local more = { { optimizer = "adam", use_rowwise_bias_correction = true },
      { optimizer = "rowwise_adagrad", weight_decay = 0.1, weight_decay_mode = "counter",
        counter_based_regularization = counted },
      { optimizer = "sgd" }, { optimizer = "none" } }
    for _, params in ipairs(more) do
      for _, data_type in ipairs(params.optimizer == "none" and { "INT8", "FP8", "INT4", "INT2" }
        or { "FP32", "BF16" }) do
        for _, cols in ipairs { 4, 20 } do
          local option = plan.ShardingOption { path = "", name = "t", rows = 33, dim = cols,
            sharding_type = "table_wise", runs = {}, input_lengths = { 1 }, num_poolings = { 1 }, batch_sizes = { 1 },
            data_type = data_type, compute_kernel = "fused", optimizer = params.optimizer,
            fused_params = params }
          local batch = tbes.new { tables = { { name = "t", rows = 33, cols = cols } }, fused_params = params,
            data_type = config.table_types[data_type], device = "cpu" }
          local s = batch:statistics()
          local device, host, files = runtime.bytes(option, { n = 1, rows = 33, cols = cols,
            row_offset = 0, col_offset = 0 }, "cpu")
          assert.same({ s.weight_bytes + s.state_bytes, 0, 0 }, { device, host, files }, params.optimizer .. " "
            .. data_type)
          batch:release()
        end
      end
    end
  end)

  it("of collections whose tables differ in columns is the sum over their tables, on each rank", function()
    local dims = { 8, 16, 20 }
    for _, case in ipairs { { "adam", "FP16", "fused" }, { "rowwise_adagrad", "FP32", "fused_uvm_caching" },
      { "lamb", "BF16", "fused" } } do
      local optimizer, data_type, kernel = unpack(case)
      local topology = plan.Topology { world_size = RANKS, local_world_size = LOCAL }
      local tables, entries, said = {}, {}, {}
      for r = 0, RANKS - 1 do said[r] = 0 end
      for i, dim in ipairs(dims) do
        local kind = i == 2 and "row_wise" or "table_wise"
        tables[i] = peri.EmbeddingBagConfig { name = "t" .. i, num_embeddings = ROWS, embedding_dim = dim,
          feature_names = { "f" .. i }, data_type = data_type }
        entries["t" .. i] = plan.ParameterSharding { sharding_type = kind, compute_kernel = kernel, ranks = i ~= 2
          and { i } or nil }
        local runs, k = plan_options.runs(kind, ROWS, dim, topology), 0
        local option = plan.ShardingOption { path = "", name = "t" .. i, rows = ROWS, dim = dim, sharding_type = kind,
          runs = runs, input_lengths = { 1 }, num_poolings = { 1 }, batch_sizes = { 1 }, data_type = data_type,
          compute_kernel = kernel, optimizer = optimizer }
        for _, run in ipairs(runs) do
          for _ = 1, run.n do
            local r = i == 2 and k or i
            said[r], k = said[r] + runtime.bytes(option, run, "cpu"), k + 1
          end
        end
      end
      sim.run(RANKS, function(_, world)
        local module = peri.shard.ShardedEmbeddingBagCollection { tables = tables, group = world, device = "cpu",
          plan = plan.ShardingPlan({ [""] = entries }).plan[""], fused_params = config.usual_params(optimizer) }
        local bytes, states = allocated(module:local_shards(), data_type)
        local more = said[world:rank()] - bytes
        assert(bytes > 0 and more >= 0 and more < PADDING * states + 1,
          ("%s %s %s, rank %d: planned %d bytes, allocated %d"):format(optimizer, data_type, kernel, world:rank(),
            bytes + more, bytes))
      end, { local_size = LOCAL })
    end
  end)

  it("counts the maps of raw ids with their rows, of the buckets that a rank has", function()
    local embed, modules = peri.embed, {}
    local function mch(policy)
      return function(rows, buckets) return embed.MCHManagedCollisionModule { zch_size = rows, buckets = buckets,
        eviction_interval = 2, eviction_policy = policy, device = "meta" } end
    end
    modules.lfu, modules.lru = mch(embed.LFU_EvictionPolicy {}), mch(embed.LRU_EvictionPolicy {})
    modules.distance = mch(embed.DistanceLFU_EvictionPolicy {})
    function modules.hash(rows, buckets)
      local segments = {}
      for b = 0, buckets do segments[b + 1] = math.floor(b * rows / buckets) end
      return embed.HashZchManagedCollisionModule { zch_size = rows, total_num_buckets = buckets, on_miss = "row",
        output_segments = segments, device = "meta" }
    end
    local live = peri.ffi.C.peri_mem_live -- 4 to 6 MB of each table
    for name, make in peri.util.ordered(modules) do
      for i, case in ipairs { { 40007, 7 }, { 30000, 3 }, { 25000, 64 } } do
        local rows, buckets = unpack(case)
        local kind = (i + #name) % 2 == 0 and "EmbeddingCollection" or "EmbeddingBagCollection"
        local tables = { peri[kind:gsub("Collection", "Config")] { name = "t", num_embeddings = rows, embedding_dim = 8,
          feature_names = { "f" } } }
        local function build()
          local inner = peri[kind] { tables = tables, fused_params = config.usual_params "adam", device = "meta" }
          return peri["ManagedCollision" .. kind] {
            [kind == "EmbeddingCollection" and "embedding_collection" or "embedding_bag_collection"] = inner,
            managed_collision_collection = embed.ManagedCollisionCollection { embedding_configs = tables,
              managed_collision_modules = { t = make(rows, buckets) } } }
        end
        local model = plan.describe.of(build())
        local topology = plan.Topology { world_size = RANKS, local_world_size = LOCAL }
        local options = enumerators.EmbeddingEnumerator { topology = topology, batch_size = 4, estimators = {} }
          :enumerate(model)
        local kinds, before = {}, 0
        for _, o in ipairs(options) do
          kinds[#kinds + 1] = o.compute_kernel == "fused" and o.sharding_type or nil
          if o.compute_kernel == "fused" and (o.sharding_type == "row_wise" or i == 1) then
            local entry, said = planners.entry(o, o.sharding_type == "row_wise" or { 2 }, topology), 0
            for _, run in ipairs(o.runs) do said = said + run.n * select(2, storage.kept(o, run, topology)) end
            local made = {}
            for _ = 1, 2 do collectgarbage() end -- what came before is given up now, and not while it is counted
            sim.run(RANKS, function(_, world)
              if world:rank() == 0 then before = tonumber(live()) end
              world:barrier():wait()
              local module = build()
              made[world:rank()] = peri.shard[module.class_name .. "Sharder"] {}:shard(module,
                plan.ShardingPlan({ [""] = { t = entry } }).plan[""], plan.ShardingEnv.from_process_group(world), nil,
                "")
            end, { local_size = LOCAL })
            local more = tonumber(live()) - before - said
            assert.equal(RANKS - 1, #made)
            assert(more >= 0 and more < 80e3 * RANKS, ( -- modules and groups of ranks
              "%s of %d x %d, %s: planned %d bytes, allocated %d"):format(name,
              rows, buckets, o.sharding_type, said, said + more))
          end
        end
        assert.same({ "table_wise", "row_wise" }, kinds)
        if i == 1 then -- what a planner makes of the description is a plan that the model takes
          local planned = plan.EmbeddingShardingPlanner({ topology = topology, estimates = "step" }):plan(model)
          sim.run(RANKS, function()
            local sharded = peri.DistributedModelParallel { module = build(), plan = planned }
            assert(sharded.module.class_name:match "^ShardedManagedCollision")
          end, { local_size = LOCAL })
        end
      end
    end
  end)

  it("of 16-bit tables has states of 32 bits: the estimator's bytes grow by 4 a number for each state", function()
    local topology = plan.Topology { world_size = 1, compute_device = "cuda" }
    local function kept(optimizer, data_type, kernel)
      local o = plan.ShardingOption { path = "", name = "t", rows = 1e6, dim = 64, data_type = data_type,
        sharding_type = "table_wise", compute_kernel = kernel or "fused", optimizer = optimizer, input_lengths = { 1 },
        num_poolings = { 1 }, batch_sizes = { 1 }, is_pooled = true, is_weighted = false,
        runs = { { n = 1, rows = 1e6, cols = 64, row_offset = 0, col_offset = 0 } } }
      return storage.kept(o, o.runs[1], topology)
    end
    assert.same({ 64e6 * (2 + 4 + 4), 0, 0 }, { kept("adam", "BF16") })
    assert.same({ 64e6 * (2 + 4) + 4e6, 0, 0 }, { kept("partial_rowwise_lamb", "FP16") })
    assert.same({ 64e6 * 2 + 64 * 64 * 4, 0, 0 }, { kept("shampoo", "FP16") })
    assert.same({ 64e6 * 4 + 12e6, 0, 0 }, { kept("rowwise_rmsprop_ar", "FP32") })
    assert.same({ 64 * 64 * 4, 64e6 * 2, 0 }, { kept("shampoo", "FP16", "fused_uvm") }) -- only what has rows is mapped
    local device, host = kept("adagrad", "FP32", "fused_uvm_caching")
    assert.equal(0.2 * 64e6 * 8, device)
    assert.is_true(host > 64e6 * 8 and host < 1.1 * 64e6 * 8)
  end)
end)

describe("a planner", function()
  local function planner_of(optimizer, constraint)
    local model = plan.describe.of { tables = { { name = "t", num_embeddings = 1e6, embedding_dim = 64,
      data_type = "BF16" } }, optimizer = optimizer }
    return plan.EmbeddingShardingPlanner { topology = plan.Topology { world_size = 4, compute_device = "cuda",
      hbm_cap = 0.7e9 }, sharder = plan.perilune_sharder, constraints = { t = constraint },
      storage_reservation = plan.FixedPercentageStorageReservation { percentage = 0 } }, model
  end

  it("refuses with TorchRec's estimates, too, what memory does not hold", function()
    local whole = { sharding_types = { "table_wise" }, compute_kernels = { "fused" } }
    local planner, model = planner_of("adam", whole)
    assert.is_truthy(planner:plan(model)) -- 640 MB
    planner, model = planner_of("adam", whole)
    planner.topology.devices = peri.util.map(planner.topology.devices, function(d)
      return { rank = d.rank, hbm = 0.5e9, ddr = d.ddr, ssd = d.ssd }
    end)
    assert.error_matches(function() planner:plan(model) end, "none of %d+ proposals fits")
  end)

  it("proposes nothing that an optimizer forbids, says so among its reasons, and names it where nothing is left",
    function()
    local planner, model = planner_of "shampoo"
    planner:plan(model)
    for _, o in ipairs(planner.last.space) do
      assert.is_true(o.sharding_type == "table_wise" or o.sharding_type:match "column_wise" ~= nil, tostring(o))
    end
    local found
    for _, other in ipairs(plan.reasons.of(planner, model)[1].others) do
      found = found or other.option == "row_wise fused" and other.kind == "optimizer" and other.text
    end
    assert.matches("shampoo needs all rows of its columns on one rank", tostring(found))
    planner, model = planner_of("shampoo", { sharding_types = { "row_wise" } })
    assert.error_matches(function() planner:plan(model) end,
      "table 't' .* no way to train it with shampoo .*row_wise.*shampoo needs all rows")
  end)
end)
