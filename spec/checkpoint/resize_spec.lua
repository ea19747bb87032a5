-- Tables of raw ids load into tables of other sizes: the ids that the policy would evict last are in it, with their
-- weights, states and counters; growing loses nothing; what did not fit is counted. The expectations are made of the
-- checkpoint's tensors, id by id.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
local Gather = require "perilune.checkpoint.gather"
local Fit = require "perilune.checkpoint.fit"
local nn, plan, embed = peri.nn, peri.plan, peri.embed
Gather.BLOCK = 10

local folder, clean = shell.temporary()
teardown(clean)

local Net = nn.Module:extend "Net"
function Net:init(o)
  local tables = { peri.EmbeddingBagConfig { name = "raw", num_embeddings = o.rows, embedding_dim = 4,
    feature_names = { "f" } } }
  self.mc = peri.ManagedCollisionEmbeddingBagCollection {
    embedding_bag_collection = peri.EmbeddingBagCollection { seed = 6,
      fused_params = { optimizer = "adagrad", learning_rate = 0.1, exact = true }, tables = tables },
    managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
      managed_collision_modules = { raw = o.module(o.rows, o.buckets) } } }
end
function Net:forward(kjt) return (self.mc(kjt):values():mean()) end

local kinds = {
  LFU = function(rows, buckets) return peri.MCHManagedCollisionModule { zch_size = rows, buckets = buckets,
    eviction_interval = 1, device = "cpu", eviction_policy = embed.LFU_EvictionPolicy() } end,
  LRU = function(rows, buckets) return peri.MCHManagedCollisionModule { zch_size = rows, buckets = buckets,
    eviction_interval = 1, device = "cpu", eviction_policy = embed.LRU_EvictionPolicy() } end,
  mine = function(rows, buckets) return peri.MCHManagedCollisionModule { zch_size = rows, buckets = buckets,
    eviction_interval = 1, device = "cpu",
    eviction_policy = embed.MCHEvictionPolicy { score = function(count, last) return last - count end } } end,
  hash = function(rows, buckets) return peri.HashZchManagedCollisionModule { zch_size = rows,
    total_num_buckets = buckets, device = "cpu" } end,
  hash_ttl = function(rows, buckets) return peri.HashZchManagedCollisionModule { zch_size = rows,
    total_num_buckets = buckets, device = "cpu", eviction_policy_name = "SINGLE_TTL_EVICTION",
    eviction_config = { features = { "f" }, single_ttl = 100 } } end,
}
local score = { LFU = function(count) return count end, LRU = function(_, last) return last end,
  mine = function(count, last) return last - count end, hash = function(_, _, _, row) return -row end,
  hash_ttl = function(_, _, time) return time end }

local function build(world, o)
  local model = Net(o)
  if world then
    model = peri.DistributedModelParallel { module = model, group = world, plan = { mc = { raw = plan.row_wise() } } }
  end
  return model
end

local function train(model, from, last)
  for i = from, last do
    peri.scope(function()
      model(peri.KeyedJaggedTensor { keys = { "f" }, values = { i * 37 % 41, i * i % 29, i % 7, i * 13 % 97 },
        lengths = { 2, 2 } })
        :backward()
    end)
  end
end

--- id -> { row =, count =, last =, weight =, state = } of a checkpoint.
local function ids_of(path)
  local c, found = peri.checkpoint.open(path), {}
  local base = "model/mc._managed_collision_collection._managed_collision_modules.raw."
  local weight = c:read "model/mc._embedding_module.embedding_bags.raw.weight":to_list()
  local state = c:read "model.tables/state/mc._embedding_module.embedding_bags.raw.weight/raw.momentum1":to_list()
  local function list(name) return c:has(base .. name) and c:read(base .. name):reshape(-1):to_list() or {} end
  local sorted, rows = list "_mch_sorted_raw_ids", list "_mch_remapped_ids_mapping"
  local counts, last, identities = list "_mch_counts", list "_mch_last_access_iter", list "_hash_zch_identities"
  local times = list "_hash_zch_metadata"
  for k = 1, math.max(#sorted, #identities) do
    local id, row = sorted[k] or identities[k], rows[k] or k - 1
    if type(id) == "number" and id ~= -1 then
      found[id] = { count = counts[k], last = last[k], time = times[k], row = row,
        weight = table.concat(weight, " ", row * 4 + 1, row * 4 + 4),
        state = table.concat(state, " ", row * 4 + 1, row * 4 + 4) }
    end
  end
  c:close()
  return found
end

local function keys(t) return table.concat(peri.util.map(peri.util.keys(t), tostring), " ") end

--- The ids of `all` that fit into a table of such size.
local function best(kind, all, rows, buckets)
  local spread = embed.mc_map.spreads[kinds[kind](rows, buckets).spread]
  local segments, by_bucket, kept = embed.mc_map.segments(rows, buckets), {}, {}
  for id in peri.util.ordered(all) do
    local b = tonumber(peri.ffi.C.peri_collision_bucket(id, spread, buckets, 0)) + 1
    by_bucket[b] = by_bucket[b] or {}
    table.insert(by_bucket[b], id)
  end
  for b, list in peri.util.ordered(by_bucket) do
    table.sort(list, function(x, y)
      local u, v = score[kind](all[x].count, all[x].last, all[x].time, all[x].row),
        score[kind](all[y].count, all[y].last, all[y].time, all[y].row)
      if u ~= v then return u > v end
      return x < y
    end)
    local shared = kind:find "hash" and 0 or 1 -- the bucket's last row
    for k = 1, math.min(#list, segments[b + 1] - segments[b] - shared) do kept[list[k]] = all[list[k]] end
  end
  return kept
end

describe("a table of raw ids of another size", function()
  for kind, module in peri.util.ordered(kinds) do
    it("takes the ids that would be evicted last, with all that is theirs: " .. kind, function()
      local path = folder .. "/" .. kind
      local model = build(nil, { rows = 36, buckets = 6, module = module })
      train(model, 1, 12)
      peri.checkpoint.save(path, { model = model })
      local all = ids_of(path)
      -- rows, buckets, and rows of a window: some buckets, one, or a part of one
      for _, size in ipairs { { 12, 2, 14 }, { 12, 2, 4 }, { 60, 6, 14 }, { 92, 4, 14 }, { 36, 3, 14 } } do
        local rows, buckets = size[1], size[2]
        Gather.ROWS, Fit.SPAN = size[3], rows == 92 and 40 or 1000 -- rows of which it is kept where they were
        local want = best(kind, all, rows, buckets)
        for ranks = 0, 2, 2 do
          local again = ("%s_%d_%d_%d"):format(path, rows, size[3], ranks)
          local function go(_, world)
            local other = build(world, { rows = rows, buckets = buckets, module = module })
            train(other, 5, 6)
            peri.checkpoint.load(path, { model = other }, { group = world })
            peri.checkpoint.save(again, { model = other }, { group = world })
            train(other, 13, 15)
          end
          if ranks == 0 then go() else sim.run(ranks, go) end
          local got = ids_of(again)
          assert.equal(keys(want), keys(got))
          for id, x in peri.util.ordered(got) do
            x.row = all[id].row
            assert.same(all[id], x)
          end
        end
      end
    end)
  end

  for _, kind in ipairs { "LFU", "hash" } do
    it("of other buckets, and an increment of what was loaded has the rows that lie elsewhere now: " .. kind, function()
      for _, o in ipairs { { rows = 36, buckets = 3 }, { rows = 36, buckets = 6 }, { rows = 48, buckets = 6 } } do
        o.module = kinds[kind]
        local base = ("%s/increment-%s-%d-%d"):format(folder, kind, o.rows, o.buckets)
        local first, p = build(nil, { rows = 36, buckets = 6, module = kinds[kind] }), build(nil, o)
        train(first, 1, 12)
        peri.checkpoint.save(base .. "-0", { model = first })
        peri.checkpoint.load(base .. "-0", { model = p }, { increments = true })
        train(p, 13, 13)
        peri.checkpoint.save(base .. "-1", { model = p }, { increment_of = base .. "-0" })
        peri.checkpoint.save(base .. "-full", { model = p })
        assert.same(ids_of(base .. "-full"), ids_of(base .. "-1"))
      end
    end)
  end

  it("keeps the times that are not loaded, where a row has the id that it had", function()
    local path, prefix = folder .. "/times", "mc._managed_collision_collection._managed_collision_modules.raw."
    local first = build(nil, { rows = 36, buckets = 6, module = kinds.hash_ttl })
    local other = build(nil, { rows = 42, buckets = 6, module = kinds.hash_ttl })
    train(first, 1, 12)
    train(other, 3, 14)
    peri.checkpoint.save(path, { model = first })
    local function numbers(name) return other:state_dict()[prefix .. name]:gather():to_list() end
    local ids, times, kept = numbers "_hash_zch_identities", numbers "_hash_zch_metadata", 0
    peri.checkpoint.load(path, { model = other }, { except = { "model/" .. prefix .. "_hash_zch_metadata",
      "model/" .. prefix .. "_current_iter_tensor" } })
    for row, id in ipairs(numbers "_hash_zch_identities") do
      local same = id == ids[row]
      kept = kept + (same and id ~= -1 and 1 or 0)
      assert.equal(same and times[row] or -1, numbers "_hash_zch_metadata"[row])
    end
    assert.is_true(kept > 0)
  end)

  --- An id is looked for in more rows than windows can carry over their ends: a bucket is one window then.
  for what, probe in peri.util.ordered { short = 3, long = 5000 } do
    it("hash ids lie as if they had come one after the other, the longest times first, where max_probe is " .. what,
      function()
      local function hash(rows, buckets)
        return peri.HashZchManagedCollisionModule { zch_size = rows, total_num_buckets = buckets, device = "cpu",
          max_probe = probe, eviction_policy_name = "LRU_EVICTION",
          eviction_config = { features = { "f" }, single_ttl = 100 } }
      end
      local path, model = folder .. "/" .. what, build(nil, { rows = 60, buckets = 3, module = hash })
      Gather.ROWS = 3 -- windows of 6 rows: ids look for rows across their ends, and from the last one to the first
      train(model, 1, 30)
      peri.checkpoint.save(path, { model = model })
      local all = ids_of(path)
      for _, size in ipairs { { 30, 2 }, { 40, 4 }, { 60, 1 } } do
        local order, want = peri.util.keys(all), {}
        table.sort(order, function(x, y)
          if all[x].time ~= all[y].time then return all[x].time > all[y].time end
          return x < y
        end)
        local alone = peri.HashZchManagedCollisionModule { zch_size = size[1], total_num_buckets = size[2],
          device = "cpu", max_probe = probe,
          on_miss = "drop" } -- never takes a row back
        for _, id in ipairs(order) do
          local one = peri.KeyedJaggedTensor { keys = { "f" }, values = { id }, lengths = { 1 } }
          local row = alone(one):values():item(0)
          if row >= 0 then want[#want + 1] = ("%d in %d"):format(id, row) end
        end
        local other = build(nil, { rows = size[1], buckets = size[2], module = hash })
        local read, pick = 0, Fit._pick
        Fit._pick = function(fit, row, past)
          read = read + past - row
          return pick(fit, row, past)
        end
        Fit.SPAN = size[1] == 40 and 12 or 1000
        peri.checkpoint.load(path, { model = other })
        Fit._pick = pick
        -- All that is loaded takes one walk through the ids for each window, and one more where ids go on to the next.
        if Fit.SPAN == 1000 then assert.is_true(read / 60 <= size[1] / 6 + 2, ("%d walks"):format(read / 60)) end
        peri.checkpoint.save(path .. size[1] .. size[2], { model = other })
        local got = {}
        for id, x in peri.util.ordered(ids_of(path .. size[1] .. size[2])) do
          got[#got + 1] = ("%d in %d"):format(id, x.row)
          assert.equal(all[id].weight, x.weight)
        end
        table.sort(want)
        table.sort(got)
        if probe == 3 then assert.is_true(#want < #order) end
        assert.same(want, got)
      end
    end)
  end

  it("says how many ids did not fit", function()
    local out = shell.run(("%s run -n 1 %s"):format(shell.perilune, shell.write(folder .. "/says.lua", ([[
local peri = require "perilune"
local tables = { peri.EmbeddingBagConfig { name = "raw", num_embeddings = 4, embedding_dim = 4, feature_names = { "f" } } }
local Net = peri.nn.Module:extend "Net"
function Net:init()
  self.mc = peri.ManagedCollisionEmbeddingBagCollection { embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables,
    fused_params = { optimizer = "adagrad", learning_rate = 0.1 } }, managed_collision_collection = peri.ManagedCollisionCollection {
    embedding_configs = tables, managed_collision_modules = { raw = peri.MCHManagedCollisionModule { zch_size = 4, buckets = 1,
      device = "cpu", eviction_interval = 1, eviction_policy = peri.embed.LFU_EvictionPolicy() } } } }
end
peri.checkpoint.load("%s", { model = Net() })
]]):format(folder .. "/LFU"))))
    assert.truthy(out:find("^perilune: table 'raw' had 36 rows and has 4: 3 of %d+ ids are in it, %d+ did not fit and "
      .. "are left out"), out)
  end)
end)
