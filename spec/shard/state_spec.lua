-- State of sharded collections: under the names of the unsharded one, in pieces that say where they are, whole when it
-- is asked for; loaded from whole tensors or from pieces of the same plan. Rates and states of the fused optimizers.
-- mpirun: 4
local peri = require "perilune"
local sharded = require "spec.support.sharded"
local shell = require "spec.support.shell"
local worlds = require "spec.support.worlds"
local nn, plan, gather = peri.nn, peri.plan, peri.shard.gather_state_dict

local optimizers = { rowwise = { optimizer = "rowwise_adagrad", learning_rate = 0.1 },
  adam = { optimizer = "partial_rowwise_adam", learning_rate = 0.05 }, sgd = { optimizer = "sgd", learning_rate = 0.1 },
  lion = { optimizer = "lion", learning_rate = 0.01 } }

local function unsharded(params, device, seed)
  return peri.EmbeddingBagCollection { tables = sharded.tables {}, fused_params = params, device = device, seed = seed }
end

local function train(ebc, device, step, ranks)
  ebc(sharded.batch(step, ranks, device)):values():sum():backward()
end

--- The numbers of a (nested) dictionary of tensors, as text.
local function numbers(dict)
  local copy = {}
  for name, x in peri.util.ordered(dict) do
    copy[name] = peri.Tensor.is(x) and table.concat(x:to_list(), " ") or type(x) == "table" and numbers(x) or x
  end
  return copy
end

local names = { "embedding_bags.a.weight", "embedding_bags.b.weight", "embedding_bags.c.weight" }

--- The pieces of all ranks lie beside each other and are the whole table.
local function check_places(x, size)
  local covered = {}
  assert.same(size, x:size())
  for _, m in ipairs(x:metadata().shards_metadata) do
    assert.matches("^rank:%d+$", m.placement)
    for row = m.shard_offsets[1], m.shard_offsets[1] + m.shard_sizes[1] - 1 do
      for col = m.shard_offsets[2], m.shard_offsets[2] + m.shard_sizes[2] - 1 do
        local at = row * size[2] + col
        assert(not covered[at], "two pieces have the same element")
        covered[at] = true
      end
    end
  end
  for at = 0, size[1] * size[2] - 1 do assert(covered[at], "no piece has an element") end
  local here = {}
  for _, s in ipairs(x:local_shards()) do
    assert.same(s.metadata.shard_sizes, s.tensor:shape())
    here[#here + 1] = s.metadata
  end
  return here
end

describe("the state of a sharded collection", function()
  for _, kind in ipairs { "table_wise", "row_wise", "column_wise", "data_parallel", "mixed", "within_nodes" } do
    for name, params in peri.util.ordered(kind == "mixed" and optimizers or { rowwise = optimizers.rowwise }) do
      worlds.each(("%s, %s: is the unsharded one's, there and back"):format(kind, name), function(world, device)
        local whole = unsharded(params, device, 11)
        for step = 1, 2 do train(whole, device, step, { 0, 1 }) end
        local ebc = sharded.make { kind = kind, world = world, device = device, fused_params = params }
        assert.same(names, peri.util.keys(ebc:state_dict()))
        local want, states = whole:state_dict(), whole:fused_optimizer():state_dict()
        assert.same({ missing_keys = {}, unexpected_keys = {} }, ebc:load_state_dict(want))
        ebc:fused_optimizer():load_state_dict(states)
        assert.same(numbers(want), numbers(gather(ebc:state_dict())))
        assert.same(numbers(states), numbers(gather(ebc:fused_optimizer():state_dict())))
        for _, s in ipairs(ebc:local_shards()) do
          local rows = whole:table_rows(s.table, "weight", s.row_offset, s.rows)
          assert.equal(2, s.iteration())
          assert.equal(table.concat(rows:slice(2, s.col_offset, s.col_offset + s.cols):to_list(), " "),
            table.concat(s.state("weight"):to_list(), " "))
        end
        local back = unsharded(params, device, 12)
        back:load_state_dict(gather(ebc:state_dict()))
        back:fused_optimizer():load_state_dict(gather(ebc:fused_optimizer():state_dict()))
        for _, x in ipairs { whole, back } do train(x, device, 3, 0) end -- with all states, they learn the same
        assert.same(numbers(whole:state_dict()), numbers(back:state_dict()))
      end, { sizes = { 1, 3, 4 }, local_size = 2, devices = name == "rowwise" and { "cpu", "opaque" } or { "cpu" } })
    end

    worlds.each(kind .. ": says where it is, and moves by pieces", function(world, device)
      local a = sharded.make { kind = kind, world = world, device = device, fused_params = optimizers.rowwise }
      local b = sharded.make { kind = kind, world = world, device = device, fused_params = optimizers.rowwise,
        seed = 77 }
      local state = a:state_dict()
      for i, t in ipairs(sharded.configs) do
        local x = state[names[i]]
        if peri.Tensor.is(x) then assert.same({ t.rows, t.cols }, x:shape())
        else
          local here = check_places(x, { t.rows, t.cols })
          for _, m in ipairs(here) do assert.equal("rank:" .. world:rank(), m.placement) end
        end
      end
      train(a, device, 1, world:rank())
      b:load_state_dict(state) -- live: with what a has learned since
      b:fused_optimizer():load_state_dict(a:fused_optimizer():state_dict())
      sharded.assert_same(a, b, device)
      for _, x in ipairs { a, b } do train(x, device, 2, world:rank()) end
      sharded.assert_same(a, b, device)
    end, { sizes = { 1, 3, 4 }, local_size = 2 })
  end

  worlds.each("of sequences has their names", function(world, device)
    local function tables()
      return peri.util.map({ "u", "v" }, function(name)
        return peri.EmbeddingConfig { name = name, num_embeddings = 9, embedding_dim = 16, feature_names = { name } }
      end)
    end
    local params = { optimizer = "adagrad", learning_rate = 0.1 }
    local whole = peri.EmbeddingCollection { tables = tables(), fused_params = params, device = device, seed = 3 }
    local ec = peri.shard.ShardedEmbeddingCollection { tables = tables(), group = world, device = device,
      fused_params = params, seed = 4,
      plan = { u = plan.row_wise(), v = plan.column_wise { ranks = { 0, world:size() - 1 }, sizes = { 4, 12 } } } }
    assert.same(peri.util.keys(whole:state_dict()), peri.util.keys(ec:state_dict()))
    assert.is_truthy(ec:state_dict()["embeddings.u.weight"])
    ec:load_state_dict(whole:state_dict())
    assert.same(numbers(whole:state_dict()), numbers(gather(ec:state_dict())))
    assert.same({ "u.momentum1", "u.step" },
      peri.util.keys(ec:fused_optimizer():state_dict().state["embeddings.u.weight"]))
  end, { sizes = { 1, 2 } })

  worlds.each("of column blocks with a number for each row is their mean by width, made whole", function(world, device)
    local last = world:size() - 1
    local ebc = peri.shard.ShardedEmbeddingBagCollection { group = world, device = device,
      fused_params = optimizers.rowwise,
      tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 2, embedding_dim = 16,
        feature_names = { "f" } } },
      plan = { t = plan.column_wise { ranks = { 0, last }, sizes = { 4, 12 } } } }
    for _, s in ipairs(ebc:local_shards()) do s.state("momentum1"):fill(s.col_offset == 0 and 8 or 4) end
    local state = ebc:fused_optimizer():state()["embedding_bags.t.weight.momentum1"]
    assert.same({ 2 }, state:size())
    assert.same({ 5, 5 }, state:gather():to_list()) -- (4 * 8 + 12 * 4) / 16
  end, { sizes = { 1, 2 } })

  worlds.each("moves between dense and fused tables, and between ranks and none", function(world, device)
    local function make(options)
      local entries = {}
      for i, t in ipairs(sharded.configs) do
        entries[t.name] = i == 1 and plan.row_wise(options) or i == 2 and plan.data_parallel(options)
          or plan.table_wise(0, options)
      end
      return peri.shard.ShardedEmbeddingBagCollection { tables = sharded.tables {}, group = world, device = device,
        plan = entries, fused_params = optimizers.sgd, seed = options.compute_kernel == "dense" and 1 or 2 }
    end
    local dense, fused = make { compute_kernel = "dense" }, make { compute_kernel = "fused" }
    assert.is_nil(dense:fused_optimizer())
    assert.same(peri.util.keys(dense:state_dict()), peri.util.keys(fused:state_dict()))
    fused:load_state_dict(dense:state_dict())
    sharded.assert_same(dense, fused, device)
    local whole = peri.EmbeddingBagCollection { tables = sharded.tables {}, device = device, seed = 5 }
    dense:load_state_dict(whole:state_dict())
    assert.same(numbers(whole:state_dict()), numbers(gather(dense:state_dict())))
  end, { sizes = { 1, 3, 4 } })

  worlds.each("reaches rows in files", function(world, device)
    local folder, remove = shell.temporary()
    local a = sharded.make { kind = "row_wise", world = world, device = device,
      cache = { load_factor = 0.2, directory = folder } }
    local whole = unsharded({ optimizer = "rowwise_adagrad", learning_rate = 0.1 }, device, 21)
    train(whole, device, 1, 0)
    a:load_state_dict(whole:state_dict())
    a:fused_optimizer():load_state_dict(whole:fused_optimizer():state_dict())
    assert.is_nil((a:state_dict()[names[1]]:local_shards()[1] or {}).tensor)
    assert.same(numbers(whole:state_dict()), numbers(gather(a:state_dict())))
    assert.same(numbers(whole:fused_optimizer():state_dict()), numbers(gather(a:fused_optimizer():state_dict())))
    local second, remove_second = shell.temporary()
    local b = sharded.make { kind = "row_wise", world = world, device = device, seed = 8,
      cache = { load_factor = 0.2, directory = second } }
    b:load_state_dict(a:state_dict()) -- from files to files
    b:fused_optimizer():load_state_dict(a:fused_optimizer():state_dict())
    assert.same(numbers(gather(a:state_dict())), numbers(gather(b:state_dict())))
    assert.same(numbers(gather(a:fused_optimizer():state_dict())), numbers(gather(b:fused_optimizer():state_dict())))
    for _, x in ipairs { a, b } do
      x:flush()
      x:release()
    end
    remove()
    remove_second()
  end, { sizes = { 1, 2 }, devices = { "cpu" }, only = "sim" })

  it("of an unsharded collection in files is like that of one in memory", function()
    local folder, remove = shell.temporary()
    local params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 }
    local whole = unsharded(params, "cpu", 21)
    train(whole, "cpu", 1, 0)
    local filed = unsharded({ optimizer = "rowwise_adagrad", learning_rate = 0.1,
      cache_params = { load_factor = 0.5, directory = folder } }, "cpu", 22)
    assert.same(peri.util.keys(whole:state_dict()), peri.util.keys(filed:state_dict()))
    filed:load_state_dict(whole:state_dict())
    filed:fused_optimizer():load_state_dict(whole:fused_optimizer():state_dict())
    for _, x in ipairs { whole, filed } do train(x, "cpu", 2, 0) end
    assert.same(numbers(whole:state_dict()), numbers(gather(filed:state_dict())))
    assert.same(numbers(whole:fused_optimizer():state_dict()), numbers(gather(filed:fused_optimizer():state_dict())))
    filed:flush()
    filed._tbe:release()
    remove()
  end)

  worlds.each("has the tables' own dtypes", function(world, device)
    for _, data_type in ipairs { "FP16", "BF16" } do
      local a = sharded.make { kind = "mixed", world = world, device = device, data_type = data_type }
      local whole = peri.EmbeddingBagCollection { tables = sharded.tables { data_type = data_type }, device = device,
        seed = 31, fused_params = optimizers.rowwise }
      a:load_state_dict(whole:state_dict())
      local state = gather(a:state_dict())
      assert.equal(data_type:lower():gsub("fp", "f"), state[names[1]]:dtype())
      assert.same(numbers(whole:state_dict()), numbers(state))
    end
  end, { sizes = { 1, 3 }, devices = { "cpu" } })

  worlds.each("of all rows at once is each shard's own", function(world, device)
    local last = world:size() - 1
    local function make(entry, params)
      return peri.shard.ShardedEmbeddingBagCollection { group = world, device = device, fused_params = params,
        plan = { t = entry }, seed = 1,
        tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 4, embedding_dim = 8,
          feature_names = { "f" } } } }
    end
    local function state(ebc, name) return ebc:fused_optimizer():state()["embedding_bags.t.weight." .. name] end
    -- row 0, of the first shard
    local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 0 }, lengths = { 1 }, device = device }
    local entry, params = plan.column_wise { ranks = { 0, last }, sizes = { 4, 4 } },
      { optimizer = "shampoo", learning_rate = 0.1 }
    local a, b = make(entry, params), make(entry, params)
    a(kjt):values():sum():backward()
    local whole = state(a, "preconditioner"):gather()
    local list = whole:to_list()
    assert.same({ 8, 8 }, whole:shape())
    for row = 0, 7 do
      for col = 0, 7 do -- of blocks of columns by themselves: nothing of one with another
        if (row < 4) ~= (col < 4) then assert.equal(0, list[row * 8 + col + 1]) end
      end
    end
    assert.not_equal(0, list[1])
    b:fused_optimizer():load_state_dict(gather(a:fused_optimizer():state_dict()))
    assert.same(list, state(b, "preconditioner"):gather():to_list())
  end, { sizes = { 1, 2 }, devices = { "cpu" }, only = "sim" })

  worlds.each("is refused where it does not fit, by name, and nothing is loaded", function(world, device)
    local n = world:size()
    local ebc = sharded.make { kind = "row_wise", world = world, device = device }
    local other = sharded.make { kind = "column_wise", world = world, device = device, seed = 6 }
    local before = numbers(gather(ebc:state_dict()))
    local whole = gather(other:state_dict())
    local function refused(dict, text, strict)
      assert.error_matches(function() ebc:load_state_dict(dict, strict) end, text)
    end
    if n > 1 then
      refused(other:state_dict(),
        "ShardedEmbeddingBagCollection:load_state_dict: rank 0 of .-'embedding_bags.a.weight' has, as piece 1 "
          .. "of this rank, %[%d+, 8%] from %[%d+, 0%] on here, and .-: it is of another plan; "
          .. "ShardedTensor:gather%(%) makes it whole")
    end
    local some = { [names[1]] = whole[names[1]], more = whole[names[2]] }
    refused(some, "missing: 'embedding_bags.b.weight', 'embedding_bags.c.weight'; it has no 'more'")
    assert.same(before, numbers(gather(ebc:state_dict())))
    assert.same({ missing_keys = { names[2], names[3] }, unexpected_keys = { "more" } },
      ebc:load_state_dict(some, false))
    whole[names[2]] = peri.zeros({ 3, 16 }, "f32", device)
    refused(whole, "'embedding_bags.b.weight' has shape %[170, 16%] here, and %[3, 16%] in the state that is given",
      false)
    whole[names[2]] = 3
    refused(whole, "'embedding_bags.b.weight' is 3, wanted a tensor or a ShardedTensor")
    local unsharded_one = unsharded(optimizers.sgd, device, 1)
    assert.error_matches(function() unsharded_one:load_state_dict(ebc:state_dict()) end,
      "'embedding_bags.a.weight' is whole here, and a ShardedTensor in the state that is given; "
        .. "ShardedTensor:gather%(%) makes it whole")
  end, { sizes = { 1, 2 }, devices = { "cpu" } })
end)

describe("what does not fit on one rank", function()
  --- Every rank but the last gives `good`, which fits; all must refuse, with these words, and have learned nothing.
  local function refused(world, load, good, bad, state, words)
    local last = world:size() - 1
    local before = numbers(gather(state()))
    if world:rank() == last then good = bad end
    local ok, err = pcall(load, good)
    assert.is_false(ok)
    local want = ("rank %d of group '%s': %s"):format(last, world.name, words)
    assert.truthy(tostring(err.message or err):find(want, 1, true), tostring(err.message or err))
    assert.same(before, numbers(gather(state())))
  end

  worlds.each("is refused on all, and loaded nowhere", function(world, device)
    local a = sharded.make { kind = "row_wise", world = world, device = device }
    local b = sharded.make { kind = "row_wise", world = world, device = device, seed = 6 }
    train(b, device, 1, world:rank())
    local good, bad = gather(b:state_dict()), gather(b:state_dict())
    bad[names[2]] = nil
    local function load(map, strict) a:load_state_dict(map, strict) end
    local function state() return a:state_dict() end
    refused(world, load, good, bad, state, "missing: 'embedding_bags.b.weight'")
    bad[names[2]] = peri.zeros({ 1, 2 }, "f32", device)
    refused(world, function(map) load(map, false) end, good, bad, state,
      "'embedding_bags.b.weight' has shape [170, 16] here, and [1, 2] in the state that is given")
    refused(world, load, good, nil, state, "map is nil, wanted a table")
    refused(world, function(map) a:load_state_dict(map or good, map == nil and 3 or nil) end, good, nil, state,
      "strict is 3, wanted true or false")

    local fused = a:fused_optimizer()
    local states, wrong = gather(b:fused_optimizer():state_dict()), gather(b:fused_optimizer():state_dict())
    wrong.state[names[3]]["c.momentum1"] = nil
    local function fused_state() return fused:state_dict() end
    refused(world, function(dict) fused:load_state_dict(dict) end, states, wrong, fused_state,
      "'c.momentum1' of parameter 'embedding_bags.c.weight' is missing")
    a:load_state_dict(good) -- and what fits everywhere is welcome
    fused:load_state_dict(states)
    assert.same(numbers(good), numbers(gather(a:state_dict())))
    assert.same(numbers(states), numbers(gather(fused:state_dict())))
  end, { sizes = { 2, 3, 4 } })

  worlds.each("of two modules leaves both as they are", function(world, device)
    local a = sharded.make { kind = "row_wise", world = world, device = device }
    local b = sharded.make { kind = "column_wise", world = world, device = device }
    local both = nn.optim.CombinedOptimizer { { name = "a", optimizer = a:fused_optimizer() },
      { name = "b", optimizer = b:fused_optimizer() } }
    for step = 1, 2 do
      train(a, device, step, world:rank())
      train(b, device, step, world:rank())
    end
    local good, bad = gather(both:state_dict()), gather(both:state_dict())
    for _, dict in ipairs { good, bad } do dict.state["a." .. names[1]]["a.momentum1"]:fill(7) end
    bad.state["b." .. names[1]]["a.momentum1"] = peri.zeros { 3 }
    refused(world, function(dict) both:load_state_dict(dict) end, good, bad, function() return both:state_dict() end,
      "state 'b.embedding_bags.a.weight.momentum1' has shape [200] here, and [3] in the state that is given")
  end, { sizes = { 2 } })
end)

describe("a ShardedTensor", function()
  --- Of pieces { first row, rows, list of numbers } of one rank.
  local function make(rows, pieces)
    local metadata, own = {}, {}
    for i, p in ipairs(pieces) do
      metadata[i] = { shard_offsets = { p[1] }, shard_sizes = { p[2] }, placement = "rank:0" }
      own[i] = { metadata = metadata[i], tensor = peri.tensor(p[3]) }
      own[i].write = function(row, source) own[i].tensor:slice(1, row, row + source:size(1)):copy(source) end
    end
    return peri.shard.ShardedTensor { size = { rows }, dtype = "f32", shards_metadata = metadata, local_shards = own }
  end

  it("is put together by the places of its pieces", function()
    local x = make(5, { { 2, 3, { 3, 4, 5 } }, { 0, 2, { 1, 2 } } })
    assert.same({ 1, 2, 3, 4, 5 }, x:gather():to_list())
    assert.equal(5, x:size(1))
    assert.equal("f32", x:dtype())
    assert.equal("ShardedTensor f32 [5] in 2 pieces, 2 here", tostring(x))
    assert.same({ a = { b = { 1, 2, 3, 4, 5 } }, c = 3 }, (function()
      local whole = gather { a = { b = x }, c = 3 }
      whole.a.b = whole.a.b:to_list()
      return whole
    end)())
  end)

  it("has no whole where pieces of one place differ", function()
    assert.same({ 1, 2 }, make(2, { { 0, 2, { 1, 2 } }, { 0, 2, { 1, 2 } } }):gather():to_list())
    assert.error_matches(function() make(2, { { 0, 2, { 1, 2 } }, { 0, 2, { 1, 3 } } }):gather() end,
      "ShardedTensor:gather: pieces at %[0%] of %[2%] differ between shards: each keeps its own, and there is no whole")
  end)

  it("is made of what it needs", function()
    assert.error_matches(function() peri.shard.ShardedTensor { size = { 1 } } end,
      "ShardedTensor: argument 'dtype' is missing")
    assert.error_matches(function()
      peri.shard.ShardedTensor { size = { 2, 3 }, dtype = "f32", local_shards = {},
        shards_metadata = { { shard_offsets = { 0, 0 }, shard_sizes = { 2 }, placement = "rank:0" } } }
    end, "ShardedTensor: shards_metadata%[1%] has 2 offsets and 1 sizes for 2 dimensions")
    assert.error_matches(function() gather(3) end, "gather_state_dict: dict is 3, wanted a table")
  end)
end)

describe("the optimizer of fused tables", function()
  local function make(world, device)
    return peri.shard.ShardedEmbeddingBagCollection { group = world, device = device,
      fused_params = { optimizer = "sgd", learning_rate = 0.5 },
      table_fused_params = { c = { optimizer = "sgd", learning_rate = 0.25 } }, seed = 1,
      tables = sharded.tables { pooling = "SUM", init_fn = peri.embed.constant(1) },
      plan = { a = plan.row_wise(), b = plan.data_parallel { compute_kernel = "fused" }, c = plan.table_wise(0) } }
  end
  -- The numbers of row 0 of b and c after a batch that uses them once on every rank.
  local function step(ebc, device)
    ebc(peri.KeyedJaggedTensor { keys = sharded.features, values = { 0, 0 }, lengths = { 0, 1, 1 },
      device = device }):values():sum()
      :backward()
    local state = gather(ebc:state_dict())
    return state["embedding_bags.b.weight"]:item(0), state["embedding_bags.c.weight"]:item(0)
  end

  worlds.each("has a group of parameters for each, whose rate holds at once", function(world, device)
    local ebc = make(world, device)
    local fused = ebc:fused_optimizer()
    assert.same({ { "embedding_bags.a.weight", "embedding_bags.b.weight" }, { "embedding_bags.c.weight" } },
      peri.util.map(fused.param_groups, function(group) return group.params end))
    assert.same({ 0.5, 0.25 }, peri.util.map(fused.param_groups, function(group) return group.lr end))
    assert.same({ 0.5, 0.75 }, { step(ebc, device) })
    fused.param_groups[2].lr = 0.125
    assert.same({ 0, 0.625 }, { step(ebc, device) })
    local schedule = nn.optim.StepLR { optimizer = fused, step_size = 1, gamma = 0.5 } -- each group from its own rate
    schedule:step()
    assert.same({ -0.25, 0.5625 }, { step(ebc, device) })
    fused:step()
    fused:zero_grad()
    local dict = fused:state_dict()
    assert.same({ lr = 0.0625, optimizer = "sgd", params = { "embedding_bags.c.weight" } }, dict.param_groups[2])
    fused:set_lr(1)
    assert.same({ 1, 1 }, peri.util.map(fused.param_groups, function(group) return group.lr end))
    fused:load_state_dict(dict)
    assert.same({ 0.25, 0.0625 }, peri.util.map(fused.param_groups, function(group) return group.lr end))
    local warm = nn.optim.WarmupOptimizer { optimizer = fused, lr = 2,
      stages = { { policy = "constant", max_iters = 1, value = 0.5 } } }
    assert.equal(1, fused.param_groups[2].lr)
    warm:step()
    warm:step()
    assert.equal(2, fused.param_groups[1].lr)
    assert.error_matches(function() fused.param_groups[1].rate = 2 end,
      "param_groups: it has no number 'rate'; those are: lr")
    assert.error_matches(function() fused.param_groups[1].lr = "2" end, "param_groups: lr is '2', wanted a number")
  end, { sizes = { 1, 3, 4 } })

  worlds.each("refuses what does not fit, by name", function(world, device)
    local fused = sharded.make({ kind = "row_wise", world = world, device = device }):fused_optimizer()
    local function refused(change, text)
      local dict = { state = {} }
      for name, own in peri.util.ordered(gather(fused:state_dict()).state) do dict.state[name] = own end
      change(dict.state)
      assert.error_matches(function() fused:load_state_dict(dict) end, text)
    end
    refused(function(s) s[names[2]] = nil end,
      "FusedOptimizer:load_state_dict: 'b.momentum1' of parameter 'embedding_bags.b.weight' is missing")
    refused(function(s) s.z = {} end,
      "FusedOptimizer:load_state_dict: it has no parameter 'z'; those are: embedding_bags.a.weight")
    refused(function(s) s[names[1]].sum = peri.zeros { 1 } end,
      "parameter 'embedding_bags.a.weight' has no state 'sum'")
    refused(function(s) s[names[1]]["a.momentum1"] = peri.zeros { 3 } end,
      "state 'embedding_bags.a.weight.momentum1' has shape %[200%]")
    refused(function(s) s[names[3]]["c.step"] = peri.tensor({ 5 }, "i64") end,
      "table 'c' was updated 5 times and table 'b' 0 times; those of one module are updated together")
    assert.error_matches(function() fused:load_state_dict {} end, "dict.state is nil, wanted a table")
    assert.error_matches(function() fused:add_param_group {} end, "parameters are given when it is made")
  end, { sizes = { 1, 2 }, devices = { "cpu" } })
end)
