-- Plans for GPUs: machines by name, prices of the dense part, memory of devices.
local shell = require "spec.support.shell"
local peri = require "perilune"
local json = require "dkjson"
local dense = require "perilune.plan.dense"
local step = require "perilune.plan.step"
local plan, nn = peri.plan, peri.nn

local function tables_of(n, rows, data_type, kernel, optimizer)
  local m, entries, constraints = { tables = {}, optimizer = optimizer or "rowwise_adagrad" }, {}, {}
  for t = 1, n do
    m.tables[t] = { name = "t" .. t, num_embeddings = rows, embedding_dim = 128, data_type = data_type }
    entries["t" .. t], constraints["t" .. t] = plan.table_wise(0, { compute_kernel = kernel }),
      plan.ParameterConstraints { pooling_factors = { 20 } }
  end
  return plan.describe.of(m), plan.ShardingPlan { [""] = entries }, constraints
end

describe("the machine h100", function()
  it("is a host of eight GPUs with prices, of which there may be more or fewer", function()
    local t = plan.Topology.preset "h100"
    assert.same({ 8, 8, "cuda" }, { t.world_size, t.local_world_size, t.compute_device })
    assert.is_true(t.devices[1].hbm > 70 * 2 ^ 30 and t.devices[1].hbm < 81 * 2 ^ 30)
    for _, way in ipairs { "forward", "backward" } do assert.is_true(t.costs[way].step > 0) end
    local many = plan.Topology.preset("h100", { world_size = 512 })
    assert.same({ 512, 8 }, { many.world_size, many.local_world_size })
    assert.equal(1, plan.Topology.preset("h100", { world_size = 1 }).local_world_size)
  end)

  it("takes no less time for more samples, wider types and more tables", function()
    local t = plan.Topology.preset("h100", { world_size = 1 })
    local function ms(n, batch, data_type)
      local model, p, constraints = tables_of(n, 1e6, data_type)
      return step.predict(p, model, t, batch, constraints).ms
    end
    local base = ms(4, 8192, "FP32")
    assert.is_true(ms(4, 16384, "FP32") > 1.5 * base)
    assert.is_true(ms(8, 8192, "FP32") > 1.5 * base)
    assert.is_true(ms(4, 8192, "FP16") < base)
  end)

  -- Of forward passes prices are those of sharded modules, which route ids and put results together beside the lookup:
  -- what was measured of lookups alone is compared with the prices of rows and bags alone.
  it("predicts lookups, updates, rows over the bus, and steps in f32 and TF32, within 25 % of what was measured on one",
    function()
    local measured = { ["rows in the host's memory"] = { 28.3 } } -- docs/benchmarks/gpu.md
    for _, file in ipairs { "2026-11-27-h100", "2026-11-27-h100-evening" } do
      for line in io.lines(("tests/gpu/results/%s.jsonl"):format(file)) do
        local r = json.decode(line)
        local name = (r.case or r.name) .. (r.precision and " " .. r.precision or "")
        measured[name] = measured[name] or {}
        table.insert(measured[name], r.step_ms or r.median_us and r.median_us / 1000)
      end
    end
    local t = plan.Topology.preset("h100", { world_size = 1 })
    local function near(name, ms) -- to all that was measured of it
      for _, want in ipairs(assert(measured[name], name)) do
        assert.is_true(math.abs(ms / want - 1) < 0.25, ("%s: %.3f ms, measured %.3f"):format(name, ms, want))
      end
    end
    local function predict(n, rows, batch, kernel, optimizer, data_type)
      local model, p, constraints = tables_of(n, rows, data_type or "FP32", kernel, optimizer)
      return step.predict(p, model, t, batch, constraints)
    end
    local function lookup_ms(n, rows, batch, data_type)
      local model, p, constraints = tables_of(n, rows, data_type)
      local list, placement = step.of_plan(p, model, t, batch, constraints)
      local all, some = step.amounts(step.by_rank(list, placement, t), t).forward, {}
      for _, unit in ipairs(step.units) do
        some[unit] = (unit:find "row" or unit:find "^bag") and all[unit] or 0
      end
      return step.compute(some, t.costs, "forward")
    end
    near("forward f32, E 1e7, D 128, L 20, B 65,536", lookup_ms(1, 1e7, 65536, "FP32"))
    near("forward f16, E 1e7, D 128, L 20, B 65,536", lookup_ms(1, 1e7, 65536, "FP16"))
    near("forward bf16 to f16, the same", lookup_ms(1, 1e7, 65536, "BF16"))
    near("int8 rows to f16, the same", lookup_ms(1, 1e7, 65536, "INT8"))
    near("int4 rows to f16, the same", lookup_ms(1, 1e7, 65536, "INT4"))
    near("B 512, T 32, E 1e5, D 128, L 20: forward", lookup_ms(32, 1e5, 512, "FP32"))
    near("B 512, T 32, f16, the same: forward", lookup_ms(32, 1e5, 512, "FP16"))
    near("rows in the host's memory", predict(1, 1e7, 65536, "fused_uvm").forward_ms)
    near("backward row-wise Adagrad, the same", predict(1, 1e7, 65536).backward_ms)
    near("backward f16 row-wise Adagrad, the same", predict(1, 1e7, 65536, nil, nil, "FP16").backward_ms)
    near("backward SGD, the same", predict(1, 1e7, 65536, nil, "sgd").backward_ms)
    near("backward Adam, the same", predict(1, 1e7, 65536, nil, "adam").backward_ms)
    near("B 512, T 32, E 1e5, D 128, L 20: backward", predict(32, 1e5, 512).backward_ms)
    local function step_of(data_type, output)
      local tables, entries, constraints = {}, {}, {}
      for i = 1, 26 do
        local name = "t" .. i
        tables[i] = peri.EmbeddingBagConfig { name = name, num_embeddings = 1e6, embedding_dim = 128,
          feature_names = { "f" .. i }, data_type = data_type }
        entries[name], constraints[name] = plan.table_wise(0), plan.ParameterConstraints { pooling_factors = { 3 } }
      end
      local model = plan.describe.of(nn.DLRM_DCN { dense_in_features = 13, dense_arch_layer_sizes = { 512, 256, 128 },
        over_arch_layer_sizes = { 1024, 1024, 512, 256, 1 }, dcn_num_layers = 3, dcn_low_rank_dim = 512,
        embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables, device = "meta",
          fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.01, output_dtype = output } } })
      local p = plan.ShardingPlan { [model[1].path] = entries }
      return model, step.predict(p, model, t, 8192, constraints).ms
    end
    local model, rows = step_of("FP32", "FP32")
    for name, precision in pairs { f32 = "highest", TF32 = "high", bf16 = "bf16" } do -- any order: each by itself
      local ms = dense.predict(model, t, 8192, precision).ms
      near("dense step " .. name, ms)
      near("step " .. name, rows + ms)
    end
    model, rows = step_of("FP16", "BF16")
    near("step bf16, FP16 tables, BF16 rows", rows + dense.predict(model, t, 8192, "bf16").ms)
  end)
end)

describe("plan.dense", function()
  it("counts products, what they give and weights", function()
    local a = dense._amounts({ { 512, 256 } }, 1000)
    assert.same({ product = 1, flop = 2 * 1000 * 512 * 256, out_byte = 1000 * 512 * 4, weight_byte = 512 * 256 * 4 },
      a.forward)
    assert.equal(2 * a.forward.flop, a.backward.flop)
    assert.same({ product = 1, flop = 0, out_byte = 0, weight_byte = 512 * 256 * 4 }, a.optimizer)
  end)

  it("is the sum of amounts times prices, and finds a model's matrices", function()
    local prices = {}
    for i, way in ipairs(dense.ways) do
      prices[way] = { product = 0.01 * i, flop = 1e-11, out_byte = 1e-9, weight_byte = 1e-9 * i }
    end
    local t = plan.Topology { world_size = 1, compute_device = "cuda", dense = { high = prices } }
    local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 8,
      feature_names = { "f" } } }
    local model = nn.Module:extend "Two"
    function model:init()
      self.bags = peri.EmbeddingBagCollection { tables = tables }
      self.net = nn.MLP { in_size = 13, layer_sizes = { 512, 256 } }
    end
    local described = plan.describe.of(model())
    assert.same({ { 512, 13 }, { 256, 512 } }, described.matrices)
    local got = dense.predict(described, t, 100)
    local a = dense._amounts(described.matrices, 100)
    local want = 0
    for _, way in ipairs(dense.ways) do
      local sum = 0
      for unit, amount in pairs(a[way]) do sum = sum + amount * prices[way][unit] end
      assert.near(sum, got[way], 1e-12)
      want = want + sum
    end
    assert.near(want, got.ms, 1e-12)
    assert.error_matches(function() dense.predict(described, t, 100, "bf16") end, "allowed: high")
    assert.is_nil(dense.predict(described, plan.Topology { world_size = 1 }, 100))
  end)

  it("has prices that a device was timed for, whichever it is", function()
    local prices, off = require("perilune.calibration.dense").prices("cpu", 1 / 64, function() end)
    assert.same(dense.precisions, { "highest", "high", "bf16" })
    for _, precision in ipairs(dense.precisions) do
      assert.is_true(off[precision] >= 0 and off[precision] < 1)
      for _, way in ipairs(dense.ways) do
        local sum = 0
        for _, unit in ipairs(dense.units) do sum = sum + prices[precision][way][unit] end
        assert.is_true(sum > 0 and sum < math.huge, precision .. " " .. way)
      end
    end
  end)

  it("counts cross layers in the dtype of the features, and nothing else", function()
    local function given_bytes(output)
      local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 8,
        feature_names = { "f" } } }
      local model = plan.describe.of(nn.DLRM_DCN { dense_in_features = 4, dense_arch_layer_sizes = { 8 },
        over_arch_layer_sizes = { 4, 1 }, dcn_num_layers = 1, dcn_low_rank_dim = 2,
        embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables, device = "meta",
          fused_params = { optimizer = "sgd", learning_rate = 0.1, output_dtype = output } } })
      local t = plan.Topology { world_size = 1, compute_device = "cuda", dense = {} }
      local zero = { product = 0, flop = 0, out_byte = 0, weight_byte = 0 }
      local price = { forward = { product = 0, flop = 0, out_byte = 1, weight_byte = 0 }, backward = zero,
        optimizer = zero }
      t.dense = { highest = price, bf16 = price }
      return { dense.predict(model, t, 1, "bf16").ms, dense.predict(model, t, 1, "highest").ms }
    end
    -- numbers given: 8 of the bottom layer, 2 and 16 of the cross layer, 4 and 1 of the top
    assert.same({ 124, 124 }, given_bytes())
    assert.same({ 124, 124 }, given_bytes "FP16")
    assert.same({ 92, 124 }, given_bytes "BF16")
  end)

  it("is refused where prices are not whole", function()
    assert.error_matches(function()
      plan.Topology { world_size = 1, dense = { high = { forward = { product = 1, flop = 1, out_byte = 1 } } } }
    end, "dense.high.forward.weight_byte")
    assert.error_matches(function() plan.Topology { world_size = 1, dense = { low = {} } } end,
      "allowed: highest, high, bf16")
  end)
end)

describe("perilune plan --machine", function()
  if shell.no_launcher() then return it("is there", function() pending(shell.no_launcher()) end) end
  local folder, clean
  setup(function() folder, clean = shell.temporary() end)
  teardown(function() clean() end)

  local function run(words)
    local path = shell.write(folder .. "/model.lua", [[
      return { tables = { { name = "a", num_embeddings = 1e6, embedding_dim = 128 },
        { name = "b", num_embeddings = 1e5, embedding_dim = 64 } } }]])
    return shell.run(("%s plan %s %s"):format(shell.perilune, path, words), { PERI_DEVICE = "nowhere" })
  end

  it("plans for GPUs that are not there", function()
    local out, status = run "--machine h100:16 --no-reasons"
    assert.equal(0, status, out)
    assert.matches("2 tables on 16 ranks %(cuda%), 8 a host, 7%d%.%d GiB each", out)
    assert.matches("hbm a shard", out)
  end)

  it("refuses machines that it does not know, and what says ranks twice", function()
    for words, text in pairs {
      ["--machine h100:0"] = "allowed: NAME or NAME:RANKS, such as h100:8",
      ["--machine :8"] = "allowed: NAME or NAME:RANKS",
      ["--machine abacus:8"] = "nor a machine of that name, but .*h100",
      ["--machine h100:8 -n 4"] = "one of them says how many", ["--machine h100 --topology h100"] =
      "one of them says the machine", ["--machine h100:8 --verify"] =
        "the topology is of GPUs, and its steps run on one, but here: .*'nowhere'",
    } do
      local out, status = run(words)
      assert.is_true(status ~= 0, words)
      assert.matches(text, out)
    end
  end)
end)

describe("a model on a GPU without a plan", function()
  local build = io.popen("pwd"):read "*l" .. "/" .. (os.getenv "PERI_BUILD" or "build")
  local there = io.open(build .. "/cuda_host/libperilune_cuda_host.so")
  if there then there:close() end

  it("is planned for the GPU's memory", function()
    if not there then return pending "no C++ compiler was found" end
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local folder, clean = shell.temporary()
    local script = shell.write(folder .. "/script.lua", [[
      local peri = require "perilune"
      peri.init()
      local automatic = require "perilune.plan.automatic"
      local env = peri.plan.ShardingEnv.from_local(1, 0)
      local t = automatic.topology(env, {}, "cuda_host")
      print(t.compute_device, t.devices[1].hbm <= 3 * 2 ^ 30, t.devices[1].hbm > 2 ^ 30)
      print(automatic.topology(env, {}, "cpu").compute_device)
      local rates = require "perilune.calibration.rates" -- and its bus is measured by rows that are read over it
      local rate = rates.bus_rate(peri.world(), 2, rates.target_of("cuda_host", 0))
      print(rate > 0 and rate < math.huge)]])
    local out, status = shell.run(("%s run %s"):format(shell.perilune, script),
      { PERI_PLUGIN_PATH = build .. "/cuda_host", XDG_CACHE_HOME = folder })
    clean()
    assert.equal(0, status, out)
    assert.equal("cuda\ttrue\ttrue\ncpu\ntrue\n", out)
  end)
end)
