-- EmbeddingCollections whose tables have several dimensions: rows and what they learn are those of a collection for
-- each table, sharded in every way or not, on both devices.
-- mpirun: 3
-- takes: 3 s
local peri = require "perilune"
local golden = require "spec.support.golden"
local worlds = require "spec.support.worlds"
local shell = require "spec.support.shell"
local plan, F = peri.plan, peri.nn.functional
local folder, clean = shell.temporary()
teardown(clean)

local dims = { a = 4, b = 8, c = 2 }
local order = { "a", "b", "c" }
local features = { a = { "f", "g" }, b = { "g", "h" }, c = { "k" } }
local outputs = { f = "a", ["g@a"] = "a", ["g@b"] = "b", h = "b", k = "c" }
local RANKS = { 1, 2, 3 }

local function config(name, feature_names)
  return peri.EmbeddingConfig { name = name, num_embeddings = 9, embedding_dim = dims[name],
    feature_names = type(feature_names) == "table" and feature_names or features[name] }
end

--- First weights: table, row and column say which.
local function start(name)
  local rows = {}
  for r = 1, 9 do
    rows[r] = {}
    for c = 1, dims[name] do rows[r][c] = name:byte() + r + c / 16 end
  end
  return peri.tensor(rows)
end

--- A rank's batch, and what flows back to each output, alike in all plans.
local function batch(rank, device)
  local keys, values, lengths = { "h", "k", "g", "f" }, {}, {}
  for i = 1, 4 do
    for b = 0, 2 do
      local n = (i + b + rank) % 3
      lengths[#lengths + 1] = n
      for k = 1, n do values[#values + 1] = (3 * i + 5 * b + 2 * k + rank) % 9 end
    end
  end
  return peri.KeyedJaggedTensor { keys = keys, values = peri.tensor(values, "i64", device, { #values }),
    lengths = peri.tensor(lengths, "i32", device) }
end

local function up(rows, name)
  local list = {}
  for i = 1, rows:numel() do list[i] = ((i * 7 + #name) % 5 - 2) / 4 end
  return peri.tensor(list, rows:dtype(), rows:device(), rows:shape())
end

local function train(module, kjt)
  local result, loss = module(kjt), nil
  for name in peri.util.ordered(outputs) do
    local rows = result[name]:values()
    local term = F.sum(rows * up(rows, name))
    loss = loss and loss + term or term
  end
  loss:backward()
  return result
end

--- The rows of all outputs, and the tables afterwards, by a collection for each table; gradients of all ranks are added
--- up or averaged, as `fused` says.
local function expected(fused, ranks, device)
  local alone, rows = {}, {}
  for _, name in ipairs(order) do
    alone[name] = peri.EmbeddingCollection { tables = { config(name) }, fused_params = fused, device = device }
    alone[name]:weight(name):copy(start(name))
  end
  for rank = 0, ranks - 1 do
    rows[rank] = {}
    local kjt, loss = batch(rank, device), nil
    for _, name in ipairs(order) do
      local result = alone[name](kjt)
      for out, of in peri.util.ordered(outputs) do
        local own = of == name and (result[out] or result[out:match "^[^@]+"]) or nil
        if own then
          rows[rank][out] = own:values():detach():to_table()
          local term = F.sum(own:values() * up(own:values(), out))
          loss = loss and loss + term or term
        end
      end
    end
    if ranks == 1 then loss:backward() end
  end
  return rows, alone
end

for _, device in ipairs(require "spec.support.devices") do
  describe("a collection of several dimensions on " .. device, function()
    for _, kind in ipairs { "sgd", "rowwise_adagrad", "dense" } do
      it("is a collection for each table: " .. kind, function()
        local fused = kind ~= "dense" and { optimizer = kind, learning_rate = 0.5 } or nil
        local rows, alone = expected(fused, 1, device)
        for _, names in ipairs { { "a", "b", "c" }, { "c", "a", "b" } } do
          local tables = peri.util.map(names, config)
          local all = peri.EmbeddingCollection { tables = tables, fused_params = fused, device = device,
            need_indices = true }
          assert.equal(8, all:embedding_dim())
          for _, name in ipairs(order) do all:weight(name):copy(start(name)) end
          local result = train(all, batch(0, device))
          for out, want in peri.util.ordered(rows[0]) do
            assert.same(want, result[out]:values():to_table(), out)
            assert.equal(result[out]:values():size(1), result[out]:weights():numel())
          end
          for _, name in ipairs(order) do
            local got, want = all:weight(name), alone[name]:weight(name)
            if kind == "dense" then
              got, want = all:parameters()[peri.util.index_of(names)[name]]:grad(), alone[name]:parameters()[1]:grad()
            end
            golden.assert_near(want:to_list(), got:to_list(), { abs = 1e-6, rel = 1e-6 }, name)
          end
        end
      end)
    end
  end)
end

worlds.each("the planner places a collection of several dimensions", function(world, device, n)
  local Model = peri.nn.Module:extend "Model"
  function Model:init()
    self.ec = peri.EmbeddingCollection { tables = peri.util.map(order, config),
      fused_params = { optimizer = "sgd", learning_rate = 0.5 } }
  end
  function Model:forward(kjt) return self.ec(kjt) end
  local model = peri.DistributedModelParallel { module = Model(), group = world, device = device }
  local result = train(model, batch(world:rank(), device))
  for out, name in peri.util.ordered(outputs) do assert.equal(dims[name], result[out]:values():size(2)) end
  assert.equal(8, model.sharded[1]:embedding_dim())
end, { sizes = { 2 } })

describe("sharded", function()
  local kinds = {
    table_wise = function(n)
      return { a = plan.table_wise(n - 1), b = plan.table_wise(0), c = plan.table_wise(n - 1) }
    end, row_wise = function() return { a = plan.row_wise(), b = plan.row_wise(), c = plan.row_wise() } end,
    narrow_copies = function() return { a = plan.data_parallel(), b = plan.row_wise(), c = plan.row_wise() } end,
    mixed = function(n)
      return { a = plan.data_parallel(), b = plan.column_wise { ranks = { 0, n - 1 } }, c = plan.row_wise() }
    end,
  }
  for kind, entries in peri.util.ordered(kinds) do
    for _, more in ipairs { "", ", with index dedup", ", exact" } do
      worlds.each(kind .. more, function(world, device, n)
        local fused = { optimizer = "sgd", learning_rate = 0.5, exact = more == ", exact" or nil }
        local ec = peri.shard.ShardedEmbeddingCollection { tables = peri.util.map({ "c", "a", "b" }, config),
          plan = entries(n), group = world, device = device, fused_params = fused,
          use_index_dedup = more == ", with index dedup" }
        for _, s in ipairs(ec:local_shards()) do
          local whole = start(s.table)
          s.state("weight"):copy(whole:slice(1, s.row_offset, s.row_offset + s.rows):slice(2, s.col_offset,
            s.col_offset + s.cols))
        end
        local rows = expected(fused, n, "cpu")
        local result = train(ec, batch(world:rank(), device))
        for out, want in peri.util.ordered(rows[world:rank()]) do
          assert.same(want, result[out]:values():to_table(), out)
        end
        -- What an unsharded collection of one dimension a table learns from the batches of all ranks, by the linearity
        -- of SGD.
        local sums = {}
        for rank = 0, n - 1 do
          local kjt = batch(rank, "cpu")
          for out, name in peri.util.ordered(outputs) do
            local ids = kjt:get((out:gsub("@.*", ""))):values():to_list()
            local grad = up(peri.zeros { #ids, dims[name] }, out):to_list()
            sums[name] = sums[name] or start(name):to_list()
            for i, id in ipairs(ids) do
              for c = 1, dims[name] do
                local at = id * dims[name] + c
                sums[name][at] = sums[name][at] - 0.5 * grad[(i - 1) * dims[name] + c] / n
              end
            end
          end
        end
        for _, s in ipairs(ec:local_shards()) do
          local want = peri.tensor(sums[s.table]):reshape(9, dims[s.table])
          want = want:slice(1, s.row_offset, s.row_offset + s.rows):slice(2, s.col_offset, s.col_offset + s.cols)
          golden.assert_near(want:to_list(), s.state("weight"):to_list(), { abs = 1e-5, rel = 1e-6 }, s.table)
        end
      end, { sizes = RANKS })
    end
  end
end)

-- What a collection of several dimensions is combined with: it goes on being a collection for each table.
local Net = peri.nn.Module:extend "Net"
--- groups: lists of tables, a collection each.
function Net:init(groups, raw)
  local fused = { optimizer = "rowwise_adagrad", learning_rate = 0.1 }
  for i, names in ipairs(groups) do
    local maps = {}
    -- raw ids have one table
    local tables = peri.util.map(names, function(name) return config(name, raw and name == "b" and { "h" }) end)
    local ec = peri.EmbeddingCollection { tables = tables, fused_params = fused, seed = 5 }
    for _, name in ipairs(raw and names or {}) do
      maps[name] = peri.MCHManagedCollisionModule { zch_size = 9, device = "cpu", eviction_interval = 2,
        input_hash_size = 1000, buckets = 3, eviction_policy = peri.embed.LFU_EvictionPolicy {} }
    end
    self["ec" .. i] = raw and peri.ManagedCollisionEmbeddingCollection { embedding_collection = ec,
      managed_collision_collection =
      peri.ManagedCollisionCollection { embedding_configs = tables, managed_collision_modules = maps } } or ec
  end
end

local together, each = { { "c", "a", "b" } }, { { "a" }, { "b" }, { "c" } }
local function cached()
  return plan.row_wise { compute_kernel = "fused_uvm_caching", cache_params = plan.CacheParams { load_factor = 1 } }
end
local function spread(n) return { a = plan.table_wise(n - 1), b = plan.row_wise(), c = plan.table_wise(0) } end
local function rows() return { a = plan.row_wise(), b = plan.row_wise(), c = plan.row_wise() } end
local pairs_of = {
  ["tables in files"] = { entries = function() return { a = cached(), b = cached(), c = cached() } end },
  ["raw ids, resharded"] = { entries = spread, raw = true, later = rows },
  ["rows in 16 bits"] = { entries = spread, codec = { forward = "FP16", backward = "BF16" } },
  ["resharded"] = { entries = rows, later = spread },
  ["a checkpoint under another plan"] = { entries = spread, later = rows, loaded = true },
}

for name, case in peri.util.ordered(pairs_of) do
  worlds.each("several dimensions and " .. name, function(world, device, n)
    local codec = case.codec and peri.dist.codec.get_qcomm_codecs_registry(case.codec)
    local function build(groups, entries)
      local whole = {}
      for i, names in ipairs(groups) do
        whole["ec" .. i] = {}
        for _, t in ipairs(names) do whole["ec" .. i][t] = entries(n)[t] end
      end
      return peri.DistributedModelParallel { module = Net(groups, case.raw), group = world, plan = whole,
        device = device, sharders = codec
          and { peri.shard.EmbeddingCollectionSharder { qcomm_codecs_registry = codec } } or nil }, whole
    end
    local function step(model, groups, kjt)
      local found, loss = {}, nil
      for i, names in ipairs(groups) do
        local result = model.module["ec" .. i](kjt)
        for out, of in peri.util.ordered(outputs) do
          local own = peri.util.index_of(names)[of] and not (case.raw and out == "g@b")
            and (result[out] or result[out:match "^[^@]+"])
          if own then
            found[out] = own:values():detach():to_list()
            local term = F.sum(own:values() * up(own:values(), out))
            loss = loss and loss + term or term
          end
        end
      end
      loss:backward()
      return found
    end
    local one, three = build(together, case.entries), build(each, case.entries)
    for k = 1, 4 do
      local kjt = batch(world:rank() + k, device)
      local want, got = step(three, each, kjt), step(one, together, kjt)
      for out in peri.util.ordered(want) do golden.assert_near(want[out], got[out], { abs = 1e-6, rel = 1e-6 }, out) end
      if k == 2 and case.later then
        local path = world:all_gather_object(folder)[1] .. "/" .. n .. device
        local again, entries = build(together, case.later)
        if case.loaded then
          peri.checkpoint.save(path, { model = one }, { group = world })
          peri.checkpoint.load(path, { model = again }, { group = world })
          one = again
        else
          one:reshard(entries)
        end
      end
    end
  end, { sizes = { 2 } })
end

worlds.each("several dimensions, quantized", function(world, device, n)
  local kjt = batch(world:rank(), device)
  local float = peri.EmbeddingCollection { tables = peri.util.map({ "c", "a", "b" }, config), seed = 5,
    device = device }
  for _, dtype in ipairs { "INT8", "INT4" } do
    local function quant(x)
      return peri.QuantEmbeddingCollection.from_float(x, { dtype = dtype, output_dtype = "FP16" })
    end
    local want, all = {}, quant(float)
    for out, t in peri.util.ordered(outputs) do
      local one = peri.EmbeddingCollection { tables = { config(t) }, device = device }
      one:weight(t):copy(float:weight(t))
      want[out] = quant(one)(kjt)[(out:match "^[^@]+")]:values()
    end
    local function check(result)
      for out, rows_of in peri.util.ordered(want) do
        assert.same(rows_of:shape(), result[out]:values():shape(), out)
        assert.same(rows_of:to("f32"):to_list(), result[out]:values():to("f32"):to_list(), out)
      end
    end
    check(all(kjt))
    assert.equal(8, all:embedding_dim())
    local Model = peri.nn.Module:extend "Model"
    function Model:init() self.ec = all end
    local entries = spread(n)
    check(peri.DistributedModelParallel { module = Model(), group = world, device = device,
      plan = { ec = entries } }.module.ec(kjt))
  end
end, { sizes = { 2 } })
