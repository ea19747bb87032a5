-- What functions are given is looked at before it is used: an error names the function, the argument, the value, and
-- what is allowed.
local peri = require "perilune"
local ffi = require "ffi"

local function refuses(pattern, f, ...)
  local ok, err = pcall(f, ...)
  assert.is_false(ok, "no error: " .. pattern)
  local message = type(err) == "table" and err.message or err
  assert.truthy(tostring(message):find(pattern), ("'%s' is not like '%s'"):format(tostring(message), pattern))
end

describe("arguments", function()
  local t = peri.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
  local nine = { 1, 1, 1, 1, 1, 1, 1, 1, 1 }

  it("are shapes of at most 8 whole numbers", function()
    for _, make in ipairs { peri.zeros, peri.empty, peri.ones } do
      refuses("shape of 9 sizes, at most 8", make, nine)
    end
    refuses("shape of 9 sizes", peri.full, nine, 0)
    refuses("shape of 9 sizes", peri.Tensor.uniform, nine, 0, 1, 1)
    refuses("shape of 9 sizes", peri.Tensor.normal, nine, 0, 1, 1)
    refuses("shape of 9 sizes", peri.tensor, { 1 }, "f32", "cpu", nine)
    refuses("shape of 9 sizes", t.reshape, t, nine)
    refuses("shape of 9 sizes", t.reshape, t, unpack(nine))
    refuses("shape of 9 sizes", t.expand, t, nine)
    refuses("nested deeper than 8", peri.tensor, { { { { { { { { { 1 } } } } } } } } })
    local itself = {}
    itself[1] = itself
    refuses("a list inside itself", peri.tensor, itself)
    refuses("empty: size 2 of the shape is 1.5", peri.empty, { 1, 1.5 })
    refuses("empty: shape is nil, wanted a list", peri.empty)
  end)

  it("have the types that the list of them says", function()
    local util = peri.util
    local spec = { n = util.required.number, names = util.optional.list, options = util.optional.table,
      rows = util.any(5), x = util.required, eps = 0.5, sizes = { 1 }, style = "plain" }
    local function named(args) return util.named("f", args, spec) end
    local a = named { n = 3LL, x = false, rows = { 1, 2 }, style = 7 }
    assert.same({ n = 3, x = false, rows = { 1, 2 }, eps = 0.5, sizes = { 1 }, style = 7 }, a)
    assert.equal(5, named({ n = 1, x = 1 }).rows)
    refuses("f: argument 'n' is missing", named, { x = 1 })
    refuses("f: argument 'x' is missing", named, { n = 1 })
    refuses("f: n is 'a', wanted a number", named, { n = "a", x = 1 })
    refuses("f: names is 1, wanted a list", named, { n = 1, x = 1, names = 1 })
    refuses("f: options is 1, wanted a table", named, { n = 1, x = 1, options = 1 })
    refuses("f: eps is 'a', wanted a number", named, { n = 1, x = 1, eps = "a" })
    for _, temperature in ipairs { 0, -1, 0 / 0, math.huge } do
      refuses("temperature is .*, allowed: finite numbers above 0", peri.nn.functional.in_batch_softmax_loss, t, t,
        { temperature = temperature })
    end
    refuses("f: sizes is 1, wanted a list", named, { n = 1, x = 1, sizes = 1 })
    refuses("no type 'nunber'", function() return util.required.nunber end)
  end)

  it("are lists of one depth", function()
    refuses("entry 3 of a list is a table, beside entries that are numbers", peri.tensor, { 1, 2, {} })
    refuses("entry 2 of a list is 1, beside entries that are lists", peri.tensor, { { 1 }, 1 })
    refuses("a row of 1 elements beside one of 2", peri.tensor, { { 1, 2 }, { 1 } })
    refuses("entry %[2%]%[1%] is 'x', wanted a number", peri.tensor, { { 1 }, { "x" } })
    refuses("wanted pairs", peri.tensor, { 1, 2, 3 }, "c64")
    refuses("numbers in lists nested 2 deep, beside lists nested 3 deep", peri.tensor, { { { 1, 2 } }, { 6 } })
    refuses("numbers in lists nested 3 deep, beside lists nested 2 deep", peri.tensor, { { 6 }, { { 1, 2 } } })
  end)

  it("are whole lists: nothing stands behind a nil, or under a name", function()
    local K, optim = peri.KeyedJaggedTensor, peri.nn.optim
    local function p() return peri.ones({ 2 }):requires_grad() end
    local function sgd(name) return optim.SGD { params = { { name = name or "w", tensor = p() } } } end
    local linear = peri.nn.Linear { in_features = 2, out_features = 2 }
    local kjt = K { keys = { "f", "g" }, values = { 1, 2 }, lengths = { 1, 1 } }
    local takers = { -- what each makes of a list, and two entries for it
      { function(l) return peri.nn.Sequential(l) end, linear, linear },
      { function(l) return peri.nn.MLP { in_size = 3, layer_sizes = l } end, 3, 2 },
      { function(l) return optim.SGD { params = l } end, p(), p() },
      { function(l) return optim.Adam { params = { { params = l } } } end, p(), p() },
      { function(l) return optim.CombinedOptimizer(l) end, sgd "a", sgd "b" },
      { function(l) return optim.MultiStepLR { optimizer = sgd(), milestones = l } end, 1, 5 },
      { function(l) return optim.clip_grad_norm(l, 1) end, p(), p() },
      { function(l) return peri.EmbeddingBagConfig { name = "t", num_embeddings = 8, embedding_dim = 4,
        feature_names = l } end, "f", "g" },
      { function(l) return K { keys = l, values = { 1, 2 }, lengths = { 1, 1 } } end, "f", "g" },
      { function(l) return K { keys = { "f" }, values = l, lengths = { 2 } } end, 1, 2 },
      { function(l) return K.from_lists { keys = { "f" }, l } end, { 1 }, { 2 } },
      { function(l) return K.from_lists { keys = { "f" }, { l } } end, 1, 2 },
      { function(l) return K.concat(l) end, kjt:permute { 0 }, kjt:permute { 1 } },
      { function(l) return kjt:permute(l) end, 0, 1 },
      { function(l) return kjt:split(l) end, 1, 1 },
      { function(l) return peri.tensor(l) end, 1, 2 },
      { function(l) return peri.ones(l) end, 2, 3 },
      { function(l) return peri.ones({ 2, 3 }):sum(l) end, 1, 2 },
      { function(l) return peri.nn.functional.cat(l, 1) end, p(), p() },
      { function(l) return peri.embed.HashZchEvictionConfig { features = l, single_ttl = 1 } end, "f", "g" },
      { function(l) return peri.nn.metrics.evaluate(l, { 1, 0 }) end, 0.25, 0.5 },
      { function(l) return peri.data.samples { batch_size = 1, dense = l,
        make = function() return function() end end } end, "a", "b" },
    }
    for i, taker in ipairs(takers) do
      local f, a, b = unpack(taker)
      f { a, b }
      local behind = { a }
      behind[3] = b
      for _, wrong in ipairs { behind, { a, nil, b }, { first = a } } do
        local ok, err = pcall(f, wrong)
        assert.is_false(ok, ("number %d takes a list with a hole or a name"):format(i))
        assert.is_nil(err.message:find("attempt to ", 1, true), err.message)
      end
    end
  end)

  it("are numbers that fit the dtype", function()
    for dtype, bad in pairs { u8 = { 300, -1, 0.5, 0 / 0 }, i8 = { 128, -129 }, i16 = { 32768 },
      i32 = { 2 ^ 31, 1 / 0 }, i64 = { 1.5, 2 ^ 63, -1 / 0, 0xffffffffffffffffULL }, f32 = { 1e300, -1e39 },
      f16 = { 65520 }, bf16 = { 3.4e38 } } do
      for _, x in ipairs(bad) do
        refuses("entry %[1%]%[2%] is .*, which does not fit " .. dtype .. ", allowed: ", peri.tensor, { { 1, x } },
          dtype)
      end
    end
    for dtype, good in pairs { u8 = { 0, 255 }, i8 = { -128, 127 }, i16 = { -32768, 32767 },
      i32 = { -2 ^ 31, 2 ^ 31 - 1 }, f16 = { 65504, -65504 }, f64 = { 1e300 } } do
      assert.same(good, peri.tensor(good, dtype):to_list())
    end
    local inf = math.huge
    assert.same({ inf, -inf }, peri.tensor({ inf, -inf }, "f32"):to_list())
    local most = peri.tensor({ 0x7fffffffffffffffLL, -0x7fffffffffffffffLL - 1, 7ULL }, "i64"):read()
    assert.is_true(most[0] == 0x7fffffffffffffffLL and most[1] == -0x7fffffffffffffffLL - 1 and most[2] == 7)
    -- a 64-bit integer is the number that was written: no dtype rounds it without a word
    local exact = { f64 = { 9007199254740992LL, 0x1000000000000000LL }, f32 = { 16777216LL, 3ULL },
      bf16 = { -7LL, 128ULL } }
    for dtype, good in pairs(exact) do
      assert.same(peri.util.map(good, function(x) return tonumber(x) end), peri.tensor(good, dtype):to_list())
    end
    for dtype, bad in pairs { f64 = { 9007199254740993LL, 0x7fffffffffffffffLL, -1ULL },
      f32 = { 16777217LL, -0x7fffffffffffffffLL }, f16 = { 16777217LL }, bf16 = { 9007199254740993ULL },
      c64 = { 16777217LL } } do
      for _, x in ipairs(bad) do
        refuses(("is %s, which %s rounds"):format(tostring(x):gsub("-", "%%-"), dtype), peri.tensor, { { 1, x } },
          dtype)
      end
    end
    refuses("JaggedTensor: values: entry %[1%] is 9007199254740993LL, which f32 rounds", peri.JaggedTensor,
      { values = { 9007199254740993LL }, lengths = { 1 } })
    refuses("Dropout: p is 9007199254740993LL, wanted a number below 2^53", peri.nn.Dropout, { p = 9007199254740993LL })
    refuses("decay_exponent is 18446744073709551615ULL, wanted a number", peri.embed.LRU_EvictionPolicy,
      { decay_exponent = -1ULL })
    assert.same({ 1, 0, 1, 1 }, peri.tensor({ true, false, 0.25, 0 / 0 }, "bool"):to_list())
    refuses("300 does not fit u8", function() return peri.zeros({ 2 }, "u8"):fill(300) end)
    refuses("1.5 does not fit i64", peri.full, { 2 }, 1.5, "i64")
    refuses("nan does not fit i32", peri.full, { 2 }, 0 / 0, "i32")
    refuses("does not fit f32", peri.full, { 2 }, 1e300)
    refuses("KeyedJaggedTensor: values: entry %[2%] is 1.5, which does not fit i64", function()
      return peri.KeyedJaggedTensor { keys = { "a" }, values = { 1, 1.5 }, lengths = { 2 } }
    end)
  end)

  it("are host memory of the right size", function()
    refuses("write: 3 bytes of data for tensor f32 %[100%]", peri.Tensor.from_memory, "abc", { 100 })
    refuses("write: 8 bytes of data for tensor f32 %[3%]", peri.Tensor.from_memory, ffi.new "float[2]", { 3 })
    refuses("wanted a string, or a C array or pointer", peri.Tensor.from_memory, nil, { 3 })
    refuses("wanted a string, or a C array or pointer", t.write, t, nil)
    refuses("wanted a string, or a C array or pointer", t.write, t, t)
    refuses("wanted a string, or a C array or pointer", t.write, t, ffi.new "float *")
    assert.same({ 1, 2 }, peri.Tensor.from_memory(ffi.new("float[3]", { 1, 2, 3 }), { 2 }):to_list())
  end)

  it("are positions and dimensions that exist", function()
    refuses("item: tensor f32 %[2, 3%] on cpu has 6 elements", t.item, t)
    assert.equal(6, t:item(5))
    refuses("item: i is 1.5", t.item, t, 1.5)
    for _, f in ipairs { "sum", "mean", "max", "softmax", "log_softmax", "size" } do
      refuses(f .. ": .+ is 0, wanted a dimension", t[f], t, 0)
    end
    refuses("sum: dim is a table, wanted a dimension", t.sum, t, { 1, 0 })
    refuses("transpose: b is 0", t.transpose, t, 1, 0)
    refuses("slice: d is 0", t.slice, t, 0, 0, 1)
    refuses("read: tensor u8 %[2147483648%] on cpu is 2147483648 bytes, allowed: 2147483392", t.read,
      peri.empty({ 2 ^ 31 }, "u8"))
    refuses("cat: dim is 0", peri.nn.functional.cat, { t, t }, 0)
  end)

  it("are of the right class, and live", function()
    refuses("relu: t is nil, wanted a tensor", peri.nn.functional.relu)
    refuses("pow: exponent is nil, wanted a tensor or a number", t.pow, t)
    refuses("add: b is a table, wanted a tensor or a number", function() return t + {} end)
    refuses("copy: src is 1, wanted a tensor", t.copy, t, 1)
    local kjt = peri.KeyedJaggedTensor { keys = { "a" }, values = { 1, 2 }, lengths = { 2 } }
    refuses("get: key is nil, wanted a string", kjt.get, kjt)
    refuses("quantize.rows: format is nil, wanted a format", peri.sparse.quantize.rows, t)
    refuses("cat: entry 2 is a KeyedJaggedTensor, wanted a tensor", peri.nn.functional.cat, { t, kjt })
    local gone = peri.zeros { 1 }
    gone:release()
    refuses("sum: t was released", gone.sum, gone)
    refuses("add: a was released", function() return gone + 1 end)
    kjt:release()
    refuses("was released", kjt.values, kjt)
    refuses("was released", function() return kjt.a end)
  end)

  it("are no parts of a sharded module that was released", function()
    local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2 }, lengths = { 1, 1 } }
    local module = peri.shard.ShardedEmbeddingBagCollection {
      tables = { peri.EmbeddingBagConfig { name = "t", embedding_dim = 4, num_embeddings = 10,
        feature_names = { "f" } } },
      group = peri.init(), fused_params = { optimizer = "adagrad" },
      plan = { t = peri.ParameterSharding { sharding_type = "table_wise", compute_kernel = "fused", ranks = { 0 } } },
    }
    local piece = module:local_shards()[1]
    local row = peri.zeros { 1, 4 }
    piece.read("weight", 0, row)
    refuses("the state's name is nil, wanted a string", piece.state)
    refuses("row is nil, wanted a whole number", piece.read, "weight")
    local pending = module:input_dist(kjt):wait()
    module:release()
    for name, call in pairs {
      state = function() piece.state "weight" end, read = function() piece.read("weight", 0, row) end,
      write = function() piece.write("weight", 0, row) end, shape = function() piece.shape "weight" end,
      names = function() piece.names() end,
      iteration = function() piece.iteration() end, cache_statistics = function() piece.cache_statistics() end,
      input_dist = function() module:input_dist(kjt) end,
      compute = function() module:compute_and_output_dist(pending) end,
      prefetch = function() module:prefetch(pending) end, local_shards = function() module:local_shards() end,
      set_learning_rate = function() module:set_learning_rate(1) end,
    } do
      local ok, err = pcall(call)
      assert.truthy(not ok and err.message:find "was released", name .. ": " .. tostring(err))
    end
  end)

  it("say what a handle does not have", function()
    refuses("a tensor has no method 'sumn'", function() return t:sumn() end)
    refuses("index true, wanted a whole number %(from 0", function() return t[true] end)
  end)

  it("have operators without the module of neural networks", function()
    local script = 'local peri = require "perilune"; print((2 * peri.tensor { 1, 2 } + 1):sum():item(), '
      .. 'package.loaded["perilune.nn"])'
    local pipe = assert(io.popen(("luajit -e '%s' 2>&1"):format(script)))
    local said = pipe:read "*a"
    pipe:close()
    assert.equal("8\tnil\n", said)
  end)

  it("are objects with the fields and methods that are used", function()
    local world, sgd = peri.init(), peri.nn.optim.SGD { params = { peri.nn.Parameter(peri.ones { 2 }) } }
    local table_wise_by_size = peri.plan.table_wise_by_size
    refuses("modules%['ebc'%] %[1%] has embedding_dim = nil, wanted a number", table_wise_by_size,
      { ebc = { { name = "t", num_embeddings = 3 } } }, { world_size = 1 })
    refuses("modules%['ebc'%] %[1%] is 7, wanted the configuration of a table", table_wise_by_size, { ebc = { 7 } },
      { world_size = 1 })
    refuses("env has world_size = 'two', wanted a whole number", table_wise_by_size, {}, { world_size = "two" })
    local config = require "perilune.embed.config"
    refuses("output_names: tables %[1%] has feature_names = a table, wanted a list of strings", config.output_names,
      { { name = "t", embedding_dim = 4, feature_names = { false } } })
    refuses("fill_cache_params: slot is true, wanted a peri_cache_config", config._fill_cache_params, "f", true,
      config.CacheParams(), "FP32")
    refuses("LambdaLR: lr_lambda is 3, wanted a function", peri.nn.optim.LambdaLR, { optimizer = sgd, lr_lambda = 3 })
    refuses("StepLR: optimizer has lr = nil, wanted a function", peri.nn.optim.StepLR,
      { optimizer = {}, step_size = 1 })
    refuses("what lr_lambda returned is nil", peri.nn.optim.LambdaLR, { optimizer = sgd, lr_lambda = function() end })
    refuses("alltoall_pooled: codecs has forward = 3, wanted a QuantizedCommCodec", peri.dist.ops.alltoall_pooled,
      { a2a_pooled_embs_tensor = t, batch_size_per_rank = { 2 }, dim_sum_per_rank = { 3 }, codecs = { forward = 3 } })
    refuses("requests %[1%] is true, wanted an awaitable, or what", peri.dist.FusedKJTListSplitsAwaitable, { true })
    refuses("RowsAwaitable:init: parts %[1%] has 1 = 4", peri.dist.jagged.RowsAwaitable, world, { { 4, { 1 } } }, print)
    refuses("files.agree: group is a table, wanted a group of ranks", peri.shard._files.agree, {}, "f", {})
    refuses("EmbeddingBagCollectionSharder:shard: module has embedding_bag_configs = nil, wanted a function",
      peri.shard.EmbeddingBagCollectionSharder().shard, peri.shard.EmbeddingBagCollectionSharder(), {}, {}, {})
    refuses("Loader:init: source has count = nil, wanted a function", peri.data.Loader, "f", {}, {})
    local module = peri.nn.Linear { in_features = 1, out_features = 1 } -- whose fields would be renamed
    refuses("utils.add_prefix_to_state_dict: state_dict is .*, wanted a state_dict",
      peri.shard.utils.add_prefix_to_state_dict, module, "a.")
    refuses("utils.filter_state_dict: state_dict is .*, wanted a state_dict", peri.shard.utils.filter_state_dict,
      module, "a")
    local env = peri.plan.ShardingEnv.from_local(2)
    for _, modules in ipairs { module, { { "t" } }, { ebc = 3 } } do
      refuses("with_modules: modules is .*, wanted a table: path of a module", env.with_modules, env, modules)
    end
    local pieces = { size = { 2, 3 }, dtype = "f32", local_shards = {}, shards_metadata = {} }
    for name, wrong in peri.util.ordered { local_shards = { 1 }, shards_metadata = { { shard_sizes = 3 } },
      size = { "x" } } do
      local args = peri.util.copy(pieces)
      args[name] = wrong
      refuses("ShardedTensor: " .. name .. " %[1%]", peri.shard.ShardedTensor, args)
    end
  end)

  it("are plain numbers, lists and tensors where these are named", function()
    refuses("Reducer: params is 3, wanted a list", peri.dist.Reducer, { group = peri.init(), params = 3 })
    refuses("WarmupOptimizer: stages is 'mean', wanted a list", peri.nn.optim.WarmupOptimizer,
      { optimizer = {}, stages = "mean" })
    refuses("CosineAnnealingLR: T_max is .*, wanted a number", peri.nn.optim.CosineAnnealingLR,
      { optimizer = {}, T_max = t })
    for _, group in ipairs { 1, "f", peri.dist.Group } do
      refuses("Linear:load_state_dict: groups%[1%] is .*, wanted a Group", function()
        peri.nn.Linear({ in_features = 1, out_features = 1 }):load_state_dict({}, nil, { group })
      end)
    end
    refuses("Linear:load_state_dict: 'weight' is a table, wanted a tensor or a ShardedTensor; 'bias' is", function()
      peri.nn.Linear { in_features = 1, out_features = 1 }:load_state_dict { weight = {}, bias = {} }
    end)
    refuses("DLRMTrain: the batch's labels is nil, wanted a tensor", function()
      peri.nn.DLRMTrain(function() return t end):forward { dense_features = t, sparse_features = t }
    end)
    refuses("block_bucketize_sparse_features: my_size is ", peri.sparse.block_bucketize_sparse_features,
      { lengths = t, indices = t, block_sizes = { 1 }, my_size = t })
    refuses("plan.save_json: path is a table, wanted a string", peri.plan.save_json, peri.ShardingPlan {}, {})
    refuses("class Name: its base is 3, wanted a class", peri.dist.lazy_class, "Name", 3)
    refuses("LogisticRegression: dense_features is a tensor, wanted", peri.data.LogisticRegression,
      { rows = {}, dense_features = t })
    refuses("Loader.numbered: letter is a table, wanted a string", peri.data.Loader.numbered, {}, 1)
  end)

  it("may be lazy results that have no such name", function()
    for result, kind in pairs { [1LL] = "int64_t",
      [require("ffi").new "peri_row_format"] = "struct peri_row_format" } do
      local lazy = peri.LazyNoWait(result)
      refuses("LazyNoWait: its result is a " .. kind .. ", which has no 'lr'", function() return lazy.lr end)
      refuses("LazyNoWait: its result is a " .. kind .. ", which has no 'lr'", function() lazy.lr = 1 end)
    end
    refuses("a tensor has no method 'lr'", function() return peri.LazyNoWait(t).lr end)
    assert.equal(6, peri.LazyNoWait(t):numel())
  end)

  it("are shown in messages even if they hold themselves", function()
    local module = peri.nn.Sequential { peri.nn.ReLU() }
    module:add_module("self", module)
    assert.equal("Sequential(\n  (0): ReLU()\n  (self): Sequential(...)\n)", tostring(module))
    refuses("uniform: low is Sequential", peri.embed.uniform, module)
    module.self = nil
    assert.falsy(tostring(module):find "%.%.%.")
  end)
end)
