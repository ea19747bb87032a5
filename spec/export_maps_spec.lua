-- Maps of raw ids in model files: for all 64-bit ids, whatever a map says of those that have no row, a file answers
-- with the bits of the Lua model in evaluation; alone and over ranks; and a file that follows a run knows what its maps
-- have learned and forgotten.
-- takes: 3 s
local ffi = require "ffi"
local json = require "dkjson"
local peri = require "perilune"
local bits = require "spec.support.bits"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
local serving = require "spec.support.serving"
local nn, plan, embed = peri.nn, peri.plan, peri.embed

local folder, clean = shell.temporary()
teardown(clean)

local ROWS = 40
-- All kinds of maps, and all that becomes of an id without a row.
local kinds = {
  row = function() return peri.MCHManagedCollisionModule { zch_size = ROWS, buckets = 3, eviction_interval = 1,
    eviction_policy = embed.LRU_EvictionPolicy {} } end,
  mch_hash = function() return peri.MCHManagedCollisionModule { zch_size = ROWS, buckets = 4, eviction_interval = 2,
    on_miss = "hash", spread = "modulo", eviction_policy = embed.LFU_EvictionPolicy {} } end,
  segments = function() return peri.MCHManagedCollisionModule { zch_size = ROWS, output_segments = { 0, 1, 17, ROWS },
    eviction_interval = 1, on_miss = "drop",
    eviction_policy = embed.DistanceLFU_EvictionPolicy { decay_exponent = 1 } } end,
  probe = function()
    return peri.HashZchManagedCollisionModule { zch_size = ROWS, total_num_buckets = 4, max_probe = 3 }
  end, probe_row = function() return peri.HashZchManagedCollisionModule { zch_size = ROWS, total_num_buckets = 1,
    max_probe = 8, on_miss = "row", spread = "modulo" } end,
  probe_drop = function() return peri.HashZchManagedCollisionModule { zch_size = ROWS, total_num_buckets = 2,
    max_probe = 5, disable_fallback = true, eviction_policy_name = "SINGLE_TTL_EVICTION",
    eviction_config = { features = { "f_probe_drop", "g_probe_drop" }, single_ttl = 1 } } end,
}
local names = peri.util.keys(kinds)

local Net = nn.Module:extend "Net"
function Net:init(args)
  local tables, modules = {}, {}
  for i, name in ipairs(args and args.names or names) do
    modules[name] = (args and args.modules or kinds)[name]()
    tables[i] = peri.EmbeddingBagConfig { name = name, num_embeddings = ROWS, embedding_dim = 4, pooling = i % 2 == 0
      and "MEAN" or "SUM", feature_names = { "f_" .. name, "g_" .. name } }
  end
  self.mc = peri.ManagedCollisionEmbeddingBagCollection {
    embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables, seed = 4, is_weighted = args
      and args.weighted, fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1, exact = true } },
    managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
      managed_collision_modules = modules } }
end
function Net:forward(b)
  local rows = self.mc(b.ids) -- the second result, rows for ids, is none of the file's
  return rows:values()
end

local edges = { 0LL, -1LL, 0x7fffffffffffffffLL, -0x7fffffffffffffffLL - 1, 1LL, 9007199254740993LL }

local function random(seed)
  local x = seed
  return function(n)
    x = (x * 1103515245 + 12345) % 2 ^ 31
    return math.floor(x / 2 ^ 16) % n
  end
end

--- Lists of 0 to 4 ids: some that come again and again, and now and then an edge of the range.
local function batch(draw, n, options)
  local keys, values, lengths, weights = {}, {}, {}, {}
  for _, name in ipairs(options and options.names or names) do
    keys[#keys + 1], keys[#keys + 2] = "f_" .. name, "g_" .. name
    for _ = 1, 2 * n do
      lengths[#lengths + 1] = draw(5)
      for _ = 1, lengths[#lengths] do
        values[#values + 1] = draw(9) == 0 and edges[draw(#edges) + 1]
          or (draw(60) + (options and options.from or 0)) * 0x9e3779b97f4a7c1LL * (draw(2) * 2 - 1)
        weights[#weights + 1] = draw(100) / 32
      end
    end
  end
  return { ids = peri.KeyedJaggedTensor { keys = keys, values = peri.tensor(values, "i64"), lengths = lengths,
    weights = options and options.weighted and peri.tensor(weights) or nil } }
end

local function train(model, draw, options)
  peri.scope(function() model(batch(draw, 8, options)):sum():backward() end)
end

describe("a model file with maps of raw ids", function()
  for _, weighted in ipairs { false, true } do
    it(("has the bits of the model for all ids, %s"):format(weighted and "weighted" or "without weights"), function()
      local options = { weighted = weighted }
      local model, draw, path = Net(options), random(3), folder .. "/alone.peri"
      for i = 1, 5 do
        options.from = 8 * i
        train(model, draw, options)
      end
      local report = model:export(path, { batches = { batch(draw, 60, options), batch(draw, 200, options) } })
      assert.equal(0, report.differ)
      local file = peri.export.open(path, { verify = true })
      for _, input in ipairs(file:inputs()) do assert.is_true(input.mapped) end
      local stored = 0
      for _, s in peri.util.ordered(model.mc:statistics()) do
        assert.is_true(s.missed > 0 and s.hits > 0)
        stored = stored + s.occupied
      end
      assert.is_true(stored > 100)
      model:eval()
      local b = batch(draw, 50, options)
      local own = peri.export.ordered(function() return peri.ffi.no_grad(model.forward, model, b) end)
      assert.equal(bits(own), bits(file:predict(b).logits))
    end)
  end

  local function entries_of(rank)
    local entries = {}
    for _, name in ipairs(names) do entries[name] = name == "probe_row" and plan.table_wise(rank) or plan.row_wise() end
    return { mc = entries }
  end

  it("is the same file of a model over ranks", function()
    local alone, draw, path = Net(), random(5), folder .. "/ranks.peri"
    for i = 1, 4 do train(alone, draw, { from = 9 * i }) end
    local held = { batch(random(6), 50) }
    alone:export(path, { batches = held })
    local digest, state = peri.export.open(path):describe().digest, peri.shard.gather_state_dict(alone:state_dict())
    sim.run(2, function(rank, world)
      local model = peri.DistributedModelParallel { module = Net(), group = world, plan = entries_of(1) }
      model:load_state_dict(state)
      local report = model:export(path, { batches = held })
      if rank > 0 then return end
      assert.equal(0, report.differ)
      assert.equal(digest, peri.export.open(path):describe().digest)
    end)
  end)

  local only = { names = { "strict", "range" }, modules = {
    strict = function()
      return peri.HashZchManagedCollisionModule { zch_size = ROWS, total_num_buckets = 2, on_miss = "error" }
    end, range = function() return peri.MCHManagedCollisionModule { zch_size = ROWS, buckets = 4, spread = "range",
      input_hash_size = 1001, eviction_interval = 1, eviction_policy = embed.LFU_EvictionPolicy {} } end } }
  local function asked(strict, range)
    return { ids = peri.KeyedJaggedTensor { keys = { "f_strict", "g_strict", "f_range", "g_range" },
      lengths = { 1, 0, 1, 0 }, values = peri.tensor({ strict, range }, "i64") } }
  end

  it("refuses ids that its maps refuse, by feature, sample and id", function()
    local model, path = Net(only), folder .. "/strict.peri"
    for _ = 1, 3 do model(asked(77LL, 1000LL)):sum():backward() end
    local held, lengths, values = { "f_strict", "g_strict", "f_range", "g_range" }, {}, {}
    for k = 1, #held do
      for i = 1, 20 do lengths[#lengths + 1], values[#values + 1] = 1, k <= 2 and 77 or 40 * i end
    end
    local b = { ids = peri.KeyedJaggedTensor { keys = held, lengths = lengths, values = peri.tensor(values, "i64") } }
    assert.equal(0, model:export(path, { batches = { b } }).differ)
    local file = peri.export.open(path)
    for _, input in ipairs(file:inputs()) do
      assert.equal(input.name:match "strict" and "refuse" or "skip", input.unknown)
    end
    file:predict(asked(77LL, 1000LL))
    for _, case in ipairs { { 78LL, 5LL, "'f_strict', sample 0: id 78 .* has no row in the model's map" },
      { -1LL, 5LL, "id 18446744073709551615 %(as a signed number %-1%) has no row" },
      { 77LL, -1LL, "'f_range', sample 0: id 18446744073709551615 .* is outside of the range" },
      { 77LL, 1004LL, "id 1004 .* is outside of the range" } } do
      assert.error_matches(function() file:predict(asked(case[1], case[2])) end, case[3])
    end
    if serving.missing() then return end
    local server = serving.start(path, "--name m")
    for _, case in ipairs { { 78, 5, "f_strict" }, { -1, 5, "f_strict" }, { 77, 1004, "f_range" } } do
      local answer = server:post("v1/models/m:predict", ('{"instances":[{"f_strict":%d,"g_strict":[],"f_range":%d,'
        .. '"g_range":[]}]}'):format(case[1], case[2]))
      assert.matches("input '" .. case[3] .. "', sample 0: id", answer)
    end
    local metrics = server:get "metrics"
    for name, count in pairs { f_strict = 2, f_range = 1 } do
      assert.matches(('perilune_feature_values_total{feature="%s",what="range"} %d\n'):format(name, count), metrics)
    end
    server:stop()
  end)

  it("refuses a function of Lua in front of a map, by its name", function()
    local model = Net { names = { "a" },
      modules = { a = function()
        return peri.MCHManagedCollisionModule { zch_size = ROWS, eviction_interval = 1,
          eviction_policy = embed.LFU_EvictionPolicy {}, input_hash_func = function(ids) return ids end }
      end } }
    local ok, why = pcall(model.export, model, folder .. "/never.peri",
      { batches = { batch(random(1), 20, { names = { "a" } }) } })
    assert.is_false(ok)
    assert.matches("module 'mc': table 'a' has an input_hash_func", tostring(why))
  end)

  for ranks = 1, 2 do
    it(("follows a run of %d that learns and forgets ids"):format(ranks), function()
      local of, seen = ("%s/run%d"):format(folder, ranks), 0
      local follower, before
      sim.run(ranks, function(rank, world)
        local model, draw = Net(), random(9 + ranks)
        if ranks > 1 then
          model = peri.DistributedModelParallel { module = model, group = world, plan = entries_of(1) }
        end
        local saver = peri.checkpoint.Saver { folder = of, parts = { model = model }, every = 1, full_every = 5,
          keep = 100, group = world }
        for step = 1, 9 do
          local path = ("%s/follow%d.peri"):format(folder, ranks)
          local held = batch(random(77), 300, { from = 20 })
          model:export(path, { batches = { held } })
          if rank == 0 and step == 1 then
            os.execute(("cp %s %s.first"):format(path, path))
            follower = peri.export.follow(path .. ".first", of)
          elseif rank == 0 and step ~= 4 then -- at step 5 two increments at once
            local now, why = follower:poll()
            assert.is_truthy(now, why)
            local mine = bits(now:predict(held).logits)
            assert.equal(bits(peri.export.open(path):predict(held).logits), mine, "step " .. step)
            assert.is_true(mine ~= before)
            before, seen = mine, seen + 1
            now:release()
          end
          train(model, draw, { from = 12 * step })
          saver:step(step)
        end
        saver:close()
      end)
      assert.equal(7, seen)
    end)
  end

  it("answers over HTTP for all ids from 0 to 2^64 - 1, in JSON and binary, and counts those without a row", function()
    if serving.missing() then return pending(serving.missing()) end
    local model, draw, path = Net { names = { "row" }, modules = kinds }, random(8), folder .. "/http.peri"
    local function ask(id) return { ids = peri.KeyedJaggedTensor { keys = { "f_row", "g_row" }, lengths = { 1, 0 },
      values = peri.tensor({ id }, "i64") } } end
    local ids = { -2LL, 0x7ffffffffffffffeLL, -0x7fffffffffffffffLL - 1, 9007199254740993LL, 5LL }
    for _ = 1, 3 do
      for _, id in ipairs(ids) do model(ask(id)):sum():backward() end
      train(model, draw, { names = { "row" } })
    end
    model:export(path, { batches = { batch(draw, 30, { names = { "row" } }) }, name = "m" })
    local file, server = peri.export.open(path), serving.start(path)
    local function same(list, wanted, what)
      assert.equal(4 * 2, #list)
      for k = 1, 8 do assert.equal(wanted[k], tonumber(ffi.cast("float", list[k])), what) end
    end
    for _, id in ipairs(ids) do
      local text = ("%s"):format(tostring(ffi.cast("uint64_t", id))):gsub("ULL", "")
      local wanted = file:predict(ask(id)).logits:to_list()
      for _, form in ipairs { text, '"' .. text .. '"', "[" .. text .. "]" } do
        local body = ('{"instances":[{"f_row":%s,"g_row":[]}]}'):format(form)
        same(json.decode(server:post("v1/models/m:predict", body)).predictions[1], wanted, form)
      end
      local raw = ffi.string(ffi.new("int64_t[1]", id), 8)
      local head = '{"inputs":[{"name":"f_row","shape":[1,1],"datatype":"UINT64","parameters":{"binary_data_size":8}},'
        .. '{"name":"g_row","shape":[1,0],"datatype":"UINT64","parameters":{"binary_data_size":0}}]}'
      same(json.decode(server:post("v2/models/m/infer", head .. raw,
        ("-H 'Inference-Header-Content-Length: %d'"):format(#head)))
        .outputs[1].data, wanted, "binary " .. text)
    end
    server:post("v1/models/m:predict", '{"instances":[{"f_row":[123456789,123456790],"g_row":[]}]}')
    assert.equal("2", server:get("metrics"):match "\nperilune_skipped_ids_total (%d+)")
    server:stop()
  end)
end)
