-- Enumeration and estimators: every option, shard, byte and millisecond is TorchRec's, and the worked examples of its
-- formulas.
local peri = require "perilune"
local support = require "spec.support.planner"
local plan = peri.plan

local function near(want, got, what)
  if math.abs(want - got) > 1e-9 * math.abs(want) then error(("%s: %.17g, wanted %.17g"):format(what, got, want), 2) end
end

local parts = { "fwd_compute", "fwd_comms", "bwd_compute", "bwd_comms", "prefetch_compute", "input_dist_comms",
  "total" }

local function compare(want, got)
  local what = tostring(got)
  assert.same({ want.module, want.table, want.sharding_type, want.compute_kernel, want.partition_by, want.is_pooled,
    want.is_weighted }, { got.path, got.name, got.sharding_type, got.compute_kernel, got.partition_by, got.is_pooled,
    got.is_weighted })
  local shards = got:shards()
  assert.equal(#want.shards, #shards, what)
  assert.equal(#want.shards, got.num_shards, what)
  for i, s in ipairs(shards) do
    local w = want.shards[i]
    assert.same({ w[1], w[2], w[3], w[4] }, { s.rows, s.cols, s.row_offset, s.col_offset }, what)
    local e = want.estimates[w[5] + 1]
    assert.same({ e.hbm, e.ddr, e.ssd }, { s.storage.hbm, s.storage.ddr, s.storage.ssd }, what)
    for _, part in ipairs(parts) do near(e[part], s.perf[part], what .. " " .. part) end
  end
end

describe("EmbeddingEnumerator", function()
  for _, name in ipairs(support.names) do
    it("finds and estimates the options of " .. name, function()
      local loaded = support.load(name)
      local options = loaded.enumerator:enumerate(loaded.collections)
      assert.equal(#loaded.case.options, #options)
      for i, want in ipairs(loaded.case.options) do compare(want, options[i]) end
    end)
  end

  local tables = { { name = "t", num_embeddings = 10, embedding_dim = 8, feature_names = { "f", "g" } } }
  local function enumerate(constraint, device)
    return plan.EmbeddingEnumerator { topology = plan.Topology { world_size = 2, compute_device = device or "cpu" },
      constraints = { t = constraint } }:enumerate { { path = "ebc", kind = "EmbeddingBagCollection",
        tables = tables } }
  end

  it("refuses constraints that leave nothing, with the table's name and what there is", function()
    assert.error_matches(function() enumerate { sharding_types = { "row_wise" } } end,
      "table 't' of module 'ebc': its constraints %(row_wise; any kernel%) leave none of the sharding types "
        .. "data_parallel, table_wise")
    assert.error_matches(function() enumerate { compute_kernels = { "fused_uvm" } } end, "any type; fused_uvm")
    assert.error_matches(function() enumerate { sharding_types = { "rowwise" } } end,
      "one of sharding_types is .*'rowwise'")
    assert.error_matches(function() enumerate { pooling_factors = { 1 } } end,
      "table 't': 1 pooling_factors, wanted one for each of 2 features")
  end)

  it("leaves tables of other devices out, and grids unless they are asked for", function()
    assert.equal(0, #enumerate { device_group = "cuda" })
    local ok, err = pcall(plan.ParameterConstraints, { device_group = "cuda:0" })
    assert.is_false(ok)
    assert.matches("device_group is 'cuda:0', allowed: cpu, cuda, mtia, tpu", tostring(err))
    for _, o in ipairs(enumerate({}, "cuda")) do assert.not_equal("grid_shard", o.sharding_type) end
    assert.equal("grid_shard", enumerate({ sharding_types = { "grid_shard" } }, "cuda")[1].sharding_type)
  end)

  it("takes a constraint by path and name before one by name", function()
    local list = plan.EmbeddingEnumerator { topology = plan.Topology { world_size = 2 }, constraints = {
      t = { sharding_types = { "table_wise" } }, ["b.t"] = { sharding_types = { "column_wise" } } } }:enumerate {
      { path = "a", kind = "EmbeddingBagCollection", tables = tables },
      { path = "b", kind = "EmbeddingBagCollection", tables = tables } }
    assert.same({ "b.t column_wise fused", "a.t table_wise fused" }, { tostring(list[1]), tostring(list[2]) })
  end)
end)

describe("shards", function()
  local options = require "perilune.plan.options"
  local function sizes(kind, rows, dim, topology, least)
    local out = {}
    for _, run in ipairs(options.runs(kind, rows, dim, plan.Topology(topology), least)) do
      for _ = 1, run.n do out[#out + 1] = kind == "row_wise" and run.rows or run.cols end
    end
    return out
  end

  it("of rows are blocks of ceil(rows / ranks), then the rest, then none", function()
    for text, want in pairs { ["10 4"] = { 3, 3, 3, 1 }, ["5 4"] = { 2, 2, 1, 0 }, ["1 4"] = { 1, 0, 0, 0 },
      ["8 2"] = { 4, 4 } } do
      local rows, ranks = text:match "(%d+) (%d+)"
      assert.same(want, sizes("row_wise", tonumber(rows), 8, { world_size = tonumber(ranks) }), text)
    end
  end)

  it("of rows follow memory where ranks differ in it", function()
    assert.same({ 2, 6, 2 },
      sizes("row_wise", 10, 8, { world_size = 3, custom_topology_data = { ddr_cap = { 2e9, 6e9, 2e9 } } }))
  end)

  it("of columns have the least width that divides them and is a multiple of 4", function()
    for text, want in pairs { ["256 0"] = { 128, 2 }, ["1024 0"] = { 128, 8 }, ["192 0"] = { 192, 1 },
      ["320 0"] = { 160, 2 }, ["384 0"] = { 128, 3 }, ["130 0"] = { 130, 1 }, ["192 33"] = { 48, 4 },
      ["192 64"] = { 64, 3 }, ["96 32"] = { 32, 3 } } do
      local dim, least = text:match "(%d+) (%d+)"
      local got = sizes("column_wise", 10, tonumber(dim), { world_size = 2 }, least ~= "0" and tonumber(least) or nil)
      assert.same(want, { got[1], #got }, text)
    end
  end)
end)

describe("estimators", function()
  local storage, perf = require "perilune.plan.storage", require "perilune.plan.perf"
  local options = require "perilune.plan.options"
  local topology = plan.Topology { world_size = 16, local_world_size = 8, compute_device = "cuda" }

  local function option(kind, kernel, optimizer, cache_params)
    return options.ShardingOption { path = "", name = "t", rows = 1e6, dim = 128, data_type = "FP32",
      sharding_type = kind, compute_kernel = kernel, runs = options.runs(kind, 1e6, 128, topology, 64),
      input_lengths = { 10 }, num_poolings = { 1 }, batch_sizes = { 512 }, is_pooled = true, is_weighted = false,
      optimizer = optimizer, cache_params = cache_params }
  end

  it("count state of optimizers, and what pipelines keep", function()
    local function hbm(o, pipeline)
      local estimator = storage.EmbeddingStorageEstimator { topology = topology, pipeline_type = pipeline }
      estimator:estimate { o }
      return o.runs[1].storage.hbm
    end
    assert.equal(516849664, hbm(option("table_wise", "fused"), "none"))
    assert.equal(513310720, hbm(option("table_wise", "fused"), "train_sparse_dist"))
    assert.equal(520849664, hbm(option("table_wise", "fused", "RowWiseAdagrad"), "none"))
    assert.equal(1537310720, hbm(option("table_wise", "fused", "adam"), "train_sparse_dist"))
    assert.equal(36485264, hbm(option("row_wise", "fused", "RowWiseAdagrad"), "none"))
    assert.equal(116953600, hbm(option("table_wise", "fused_uvm_caching", "RowWiseAdagrad", { load_factor = 0.2 }),
      "train_prefetch_sparse_dist"))
  end)

  it("give the times of the worked examples", function()
    local function total(kind, kernel, cache_params)
      local o = option(kind, kernel, nil, cache_params)
      perf.EmbeddingPerfEstimator { topology = topology }:estimate { o }
      return ("%.4f"):format(o.runs[1].perf.total)
    end
    assert.same({ "0.7707", "0.3975", "0.6570", "0.1315" },
      { total("table_wise", "fused"), total("column_wise", "fused"), total("row_wise", "fused"),
        total("table_row_wise", "fused") })
    assert.equal("3.44", ("%.2f"):format(total("table_wise", "fused_uvm_caching", { load_factor = 0.5 })))
  end)
end)

describe("Topology", function()
  it("knows machines, and refuses what cannot be", function()
    local t = plan.Topology.preset("dgx_a100_80gb", { world_size = 16 })
    assert.same({ 16, 8, 80 * 2 ^ 30 }, { t.world_size, t.local_world_size, t.devices[16].hbm })
    assert.error_matches(function() plan.Topology.preset "abacus" end, "allowed: .*dgx_h100_80gb")
    assert.error_matches(function() plan.Topology { world_size = 6, local_world_size = 4 } end,
      "6 ranks of groups of 4")
    assert.error_matches(function() plan.Topology { world_size = 2, hbm_mem_bw = -1 } end,
      "hbm_mem_bw is %-1, allowed: finite numbers > 0")
    assert.error_matches(function() plan.Topology { world_size = 2, custom_topology_data = { ddr_cap = { 1 } } } end,
      "ddr_cap has 1 numbers, wanted one for each of 2 ranks")
  end)

  it("of cpus has no memory of devices", function()
    assert.equal(2 ^ 30, plan.Topology({ world_size = 1, ddr_cap = 2 ^ 30 }).devices[1][plan.ParameterStorage.DDR])
    assert.equal(0, plan.Topology({ world_size = 1, hbm_cap = 2 ^ 30 }).devices[1].hbm)
  end)
end)
