-- Small functions around sharded models (torchrec.distributed.utils), each by cases worked out by hand.
local peri = require "perilune"
local golden = require "spec.support.golden"
local sim = require "perilune.dist.sim"
local utils, nn, plan = peri.shard.utils, peri.nn, peri.plan

local function collection(name, options)
  local a = peri.util.copy(options or {})
  a.tables = { peri.EmbeddingBagConfig { name = name, num_embeddings = 6, embedding_dim = 4, feature_names = { "f" } } }
  return peri.EmbeddingBagCollection(a)
end

describe("names of a state_dict", function()
  it("are joined, picked and renamed", function()
    assert.equal("a.b", utils.append_prefix("a", "b"))
    assert.equal("b", utils.append_prefix("", "b"))
    assert.equal("a", utils.append_prefix("a", ""))
    local state = { ["a.x"] = 1, ["a.b.y"] = 2, ["ab.z"] = 3, a = 4 }
    assert.same({ x = 1, ["b.y"] = 2 }, utils.filter_state_dict(state, "a"))
    assert.same({}, utils.filter_state_dict(state, "b"))
    local same = state
    utils.add_prefix_to_state_dict(state, "a.") -- new names that old ones have too
    assert.same({ ["a.a.x"] = 1, ["a.a.b.y"] = 2, ["a.ab.z"] = 3, ["a.a"] = 4 }, same)
    assert.error_matches(function() utils.append_prefix(nil, "b") end, "append_prefix: prefix is nil, wanted a string")
  end)

  it("of a part are loaded into that part", function()
    local net, tower = nn.Module(), nn.Linear { in_features = 2, out_features = 1 }
    net.tower = tower
    local other = nn.Linear { in_features = 2, out_features = 1 }
    other:load_state_dict(utils.filter_state_dict(net:state_dict(), "tower"))
    assert.same(tower.weight:to_list(), other.weight:to_list())
    local state = other:state_dict()
    utils.add_prefix_to_state_dict(state, "tower.")
    assert.same({ missing_keys = {}, unexpected_keys = {} }, net:load_state_dict(state))
  end)

  it("none_throws is for what must be there", function()
    assert.equal(false, utils.none_throws(false))
    assert.error_matches(function() utils.none_throws(nil, "no plan") end, "none_throws: no plan")
  end)
end)

describe("options of fused tables", function()
  it("are merged into new tables", function()
    local own, more = { optimizer = "sgd", eps = 1 }, { lr = 3, eps = 2 }
    assert.same({ optimizer = "sgd", eps = 2, learning_rate = 3 }, utils.merge_fused_params(own, more))
    assert.same({ { optimizer = "sgd", eps = 1 }, { lr = 3, eps = 2 } }, { own, more })
    assert.same({}, utils.merge_fused_params())
    local entry = plan.row_wise { compute_kernel = "fused_uvm_caching", cache_params = { load_factor = 0.25 } }
    assert.equal(0.25, utils.add_params_from_parameter_sharding(own, entry).cache_params.load_factor)
    assert.equal("x", utils.add_params_from_parameter_sharding({ cache_params = "x" }, plan.row_wise()).cache_params)
    assert.same({ output_dtype = "f16", optimizer = "sgd" }, utils.convert_to_fbgemm_types { output_dtype = "FP16",
      optimizer = "sgd" })
    assert.error_matches(function() utils.convert_to_fbgemm_types { output_dtype = "F16" } end,
      "output_dtype is 'F16', allowed: BF16, FP16, FP32")
  end)

  it("name the optimizer that a dense one is", function()
    assert.equal("rowwise_adagrad", utils.optimizer_type_to_emb_opt_type(nn.optim.RowWiseAdagrad))
    for _, name in ipairs { "SGD", "Adagrad", "Adam" } do
      local fused = utils.optimizer_type_to_emb_opt_type(nn.optim[name])
      local dense, eps = collection("t", { seed = 1 }), name ~= "SGD" and 1e-8 or nil
      local own = collection("t", { seed = 1, fused_params = { optimizer = fused, learning_rate = 0.1, eps = eps } })
      local optimizer = nn.optim[name] { params = dense, lr = 0.1, eps = eps }
      for step = 1, 3 do
        for _, ebc in ipairs { dense, own } do
          ebc:zero_grad()
          ebc(peri.KeyedJaggedTensor { keys = { "f" }, values = { 0, 1, 2, 3, 4, 5 },
            lengths = { 6 } }):values():sum():backward(
            peri.full({}, step))
        end
        optimizer:step()
      end
      golden.assert_near(dense:weight("t"):to_list(), own:weight("t"):to_list(), { abs = 1e-6, rel = 1e-5 }, name)
    end
    assert.error_matches(function() utils.optimizer_type_to_emb_opt_type(nn.optim.RMSprop) end,
      "the class is RMSprop, allowed: nn.optim.Adagrad, nn.optim.Adam, nn.optim.RowWiseAdagrad, nn.optim.SGD")
    assert.error_matches(function() utils.optimizer_type_to_emb_opt_type "SGD" end, "the class is 'SGD', allowed")
  end)
end)

describe("models", function()
  local function model()
    local net = nn.Module()
    net.sparse = { collection("a", { fused_params = { optimizer = "sgd" } }), nn.Identity() }
    net.tower = nn.Module()
    net.tower.ebc = collection("b", { fused_params = { optimizer = "sgd" } })
    net.tower.over = nn.Linear { in_features = 1, out_features = 1 }
    net.over = nn.Sequential { nn.ReLU() }
    return net
  end

  it("tell their parts without sharded modules", function()
    assert.same({}, utils.get_unsharded_module_names(model()))
    sim.run(1, function(_, world)
      local wrapped = peri.DistributedModelParallel { module = model(), group = world }
      local names = utils.get_unsharded_module_names(wrapped.module)
      table.sort(names)
      assert.same({ "over", "sparse.1", "tower.over" }, names)
      assert.same({ "embedding_bags.a.weight" }, wrapped.module.sparse[1]:sharded_parameter_names())
      assert.same({ "x.embedding_bags.a.weight" }, wrapped.module.sparse[1]:sharded_parameter_names "x")
    end)
    assert.error_matches(function() utils.get_unsharded_module_names(3) end, "model is 3, wanted an nn.Module")
  end)

  it("get memory where they were descriptions", function()
    local net = nn.Module()
    net.described, net.ready = collection("a", { device = "meta", seed = 4 }), collection("a", { seed = 4 })
    assert.error_matches(function() net.described:weight "a" end, "a description without memory")
    utils.init_parameters(net, "cpu")
    assert.same(net.ready:weight("a"):to_list(), net.described:weight("a"):to_list())
    net.described:weight("a"):fill(7)
    utils.init_parameters(net) -- again: nothing
    assert.equal(7, net.described:weight("a"):item(0))
    net.mixed = peri.EmbeddingBagCollection { device = "meta", tables = {
      peri.EmbeddingBagConfig { name = "x", num_embeddings = 1, embedding_dim = 4, feature_names = { "f" } },
      peri.EmbeddingBagConfig { name = "y", num_embeddings = 1, embedding_dim = 4, feature_names = { "f" },
        data_type = "FP16" } } }
    assert.error_matches(function() utils.init_parameters(net, "cpu") end,
      "table 'y' holds FP16, table 'x' FP32; allowed in memory: one")
  end)

  for _, device in ipairs { "cpu", "opaque" } do
    it("permute blocks of pooled columns, with gradient, on " .. device, function()
      local permute = utils.PermutePooledEmbeddings({ 2, 1, 3 }, { 2, 0, 1 })
      local x = peri.tensor({ 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 }, "f32", device, { 2, 6 }):requires_grad()
      local y = permute(x)
      assert.same(y:to_table(), utils.PermutePooledEmbeddings { embs_dims = { 2, 1, 3 },
        permute = { 2, 0, 1 } }(x):to_table())
      assert.same({ { 4, 5, 6, 1, 2, 3 }, { 10, 11, 12, 7, 8, 9 } }, y:to_table())
      y:backward(peri.tensor({ 1, 2, 3, 4, 5, 6, 1, 1, 1, 1, 1, 1 }, "f32", device, { 2, 6 }))
      assert.same({ { 4, 5, 6, 1, 2, 3 }, { 1, 1, 1, 1, 1, 1 } }, x:grad():to_table())
      assert.error_matches(function() permute(peri.zeros({ 2, 5 }, "f32", device)) end,
        "PermutePooledEmbeddings: pooled is .-, wanted a tensor %[batch, 6%]")
      assert.error_matches(function() utils.PermutePooledEmbeddings({ 2 }, { 1 }) end,
        "permute%[1%] is 1, allowed: whole numbers 0..0")
    end)
  end
end)
