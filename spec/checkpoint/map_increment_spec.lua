-- Increments of maps of raw ids. A follower that knows docs/checkpoint_format.md only (manifest.json, and bytes of
-- files) replays the lists of increments onto what it knows of the parent, and has the map then; what is listed as
-- evicted and as learned is what sets of ids say.
local ffi = require "ffi"
local json = require "dkjson"
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
local nn, plan, embed = peri.nn, peri.plan, peri.embed
local C, check = peri.ffi.C, peri.ffi.check

local folder, clean = shell.temporary()
teardown(clean)

local BASE = "mc._managed_collision_collection._managed_collision_modules."
local ROWS = 96

local modules = {
  mch = function(rows, buckets) return peri.MCHManagedCollisionModule { zch_size = rows, buckets = buckets or 6,
    device = "cpu", eviction_interval = 2,
    eviction_policy = embed.DistanceLFU_EvictionPolicy { decay_exponent = 1 } } end,
  lru = function(rows) return peri.MCHManagedCollisionModule { zch_size = rows, buckets = 4, eviction_interval = 1,
    device = "cpu", eviction_policy = embed.LRU_EvictionPolicy {} } end,
  ttl = function(rows) return peri.HashZchManagedCollisionModule { zch_size = rows, total_num_buckets = 4,
    max_probe = 8, eviction_policy_name = "SINGLE_TTL_EVICTION",
    eviction_config = { features = { "f_ttl" }, single_ttl = 3 } } end,
  grow = function(rows)
    return peri.HashZchManagedCollisionModule { zch_size = rows, total_num_buckets = 4, max_probe = 8 }
  end,
}

local Net = nn.Module:extend "Net"
function Net:init(rows, buckets)
  local tables, made = {}, {}
  for name, make in peri.util.ordered(modules) do
    made[name] = make(rows, buckets)
    tables[#tables + 1] = peri.EmbeddingBagConfig { name = name, num_embeddings = rows, embedding_dim = 4,
      feature_names = { "f_" .. name } }
  end
  self.mc = peri.ManagedCollisionEmbeddingBagCollection {
    embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables, seed = 4,
      fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1, exact = true } },
    managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
      managed_collision_modules = made } }
end
function Net:forward(kjt) return (self.mc(kjt):values():sum()) end

local function build(world, rows, buckets)
  local net, entries = Net(rows or ROWS, buckets), {}
  if not world then return net end
  for name in pairs(modules) do entries[name] = plan.row_wise() end
  return peri.DistributedModelParallel { module = net, group = world, plan = { mc = entries } }
end

--- Numbers that look random, from `seed` on: function(n) -> 0 to n - 1.
local function random(seed)
  local x = seed
  return function(n)
    x = (x * 1103515245 + 12345) % 2 ^ 31
    return math.floor(x / 2 ^ 16) % n
  end
end

--- A step with `n` ids a table, of 200 that pass on as steps go by; some are negative, and all are beyond 2^53.
local function step(model, draw, i, n)
  peri.scope(function()
    local keys, values, lengths = {}, {}, {}
    for name in peri.util.ordered(modules) do
      keys[#keys + 1] = "f_" .. name
      for _ = 1, n do values[#values + 1] = (draw(200) + 20 * i) * 0x9e3779b97f4a7c1LL * (draw(2) * 2 - 1) end
      for _ = 1, 2 do lengths[#lengths + 1] = n / 2 end
    end
    model(peri.KeyedJaggedTensor { keys = keys, values = peri.tensor(values, "i64"), lengths = lengths }):backward()
  end)
end

-- -- the follower -----------------------------------------------------------------------------------------------------

local free = { _mch_sorted_raw_ids = "9223372036854775807", _hash_zch_identities = "-1" }
local by_row = peri.util.index_of { "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_mch_counts",
  "_mch_last_access_iter", "_hash_zch_identities", "_hash_zch_metadata" }
local types = { I64 = { "const int64_t *", 8 }, I32 = { "const int32_t *", 4 } }

local function text_of(x) return (tostring(x):gsub("LL$", "")) end

--- All of a table: key, value, true; then all again: key, value, false.
local function twice(list)
  return coroutine.wrap(function()
    for _, first in ipairs { true, false } do
      for key, value in pairs(list) do coroutine.yield(key, value, first) end
    end
  end)
end

--- Apply a checkpoint to what is known: table's name -> { [state] = numbers by row, row_of = id -> row }. Returns what
--- it lists: table's name -> { evicted = set, listed = set, rows = [state] = how many }.
local function follow(known, path)
  local file = assert(io.open(path .. "/manifest.json"))
  local manifest, tensors, told = json.decode(file:read "*a"), {}, {}
  file:close()
  for _, t in ipairs(manifest.tensors) do tensors[t.name] = t end
  local function numbers(t, piece) -- a tensor without elements has no piece
    if not piece then return {} end
    local data = assert(io.open(("%s/%s"):format(path, manifest.files[piece.file + 1].name), "rb"))
    data:seek("set", piece.begin)
    local bytes, list = data:read(piece.bytes) or "", {}
    data:close()
    local memory = ffi.cast(types[t.dtype][1], bytes)
    for k = 0, piece.bytes / types[t.dtype][2] - 1 do list[k + 1] = text_of(memory[k]) end
    return list
  end
  for name, t, forgets in twice(tensors) do
    local of, state = name:match "_managed_collision_modules%.(%w+)%.(_[%w_]+)$"
    for _, piece in ipairs(of and by_row[state] and t.pieces or {}) do
      local map = known[of] or { row_of = {} }
      known[of], map[state] = map, map[state] or {}
      told[of] = told[of] or { evicted = {}, listed = {}, rows = {} }
      local rows = piece.rows and numbers(tensors[piece.rows], tensors[piece.rows].pieces[1])
      local evicted = forgets and piece.rows and tensors[piece.rows:gsub("^%%rows", "%%evicted")]
      if forgets and free[state] and not piece.rows then -- all of these rows: what had one of them is forgotten
        for id, row in pairs(map.row_of) do
          if row >= piece.offset[1] and row < piece.offset[1] + piece.size[1] then map.row_of[id] = nil end
        end
      end
      for _, id in ipairs(free[state] and evicted and numbers(evicted, evicted.pieces[1]) or {}) do
        assert.is_truthy(map.row_of[id], "an id that nobody knew is evicted")
        map.row_of[id], told[of].evicted[id] = nil, true
      end
      for k, x in ipairs(forgets and {} or numbers(t, piece)) do
        local row = rows and tonumber(rows[k]) or piece.offset[1] + k - 1
        map[state][row] = x
        if free[state] and x ~= free[state] then map.row_of[x], told[of].listed[x] = row, true end
      end
      told[of].rows[state] = (told[of].rows[state] or 0) + (forgets and 0 or piece.listed or piece.size[1])
    end
  end
  return told
end

--- What the model's maps are, in the same form, by their state_dict alone. Collective.
local function maps_of(model)
  local result = {}
  local dict = peri.shard.gather_state_dict(model:state_dict())
  local function list(of, state)
    local t = dict[BASE .. of .. "." .. state]
    if not t then return nil end
    local memory, n, out = t:to "i64":read(), t:numel(), {}
    for k = 0, n - 1 do out[k] = text_of(memory[k]) end
    return out, n
  end
  for of in peri.util.ordered(modules) do
    local map, rows = { row_of = {} }, list(of, "_mch_remapped_ids_mapping")
    for state in pairs(by_row) do
      local numbers, n = list(of, state)
      if numbers then
        map[state] = {}
        for k = 0, n - 1 do
          local row = rows and tonumber(rows[k]) or k
          map[state][row] = numbers[k]
          if free[state] and numbers[k] ~= free[state] then map.row_of[numbers[k]] = row end
        end
      end
    end
    result[of] = map
  end
  return result
end

--- The ids of `a` that `b` has not.
local function without(a, b)
  local set = {}
  for id in pairs(a) do set[id] = not b[id] or nil end
  return set
end

--- The law, of one increment: before and now are maps, told is what it lists.
local function check_lists(before, now, told)
  for of in pairs(modules) do
    assert.same(without(before[of].row_of, now[of].row_of), told[of].evicted)
    assert.same(without(now[of].row_of, before[of].row_of), without(told[of].listed, before[of].row_of))
  end
end

local function save(name, model, options)
  return peri.checkpoint.save(folder .. "/" .. name, { model = model }, options)
end

describe("increments of maps that learn and evict at random", function()
  for ranks = 0, 2, 2 do
    it(("replay by their lists to exactly the maps, which are what sets of ids say; on %d ranks"):format(math.max(ranks,
      1)), function()
      local function run(rank, world)
        local model, draw, known, i = build(world), random(7 + ranks), {}, 0
        local function steps(n) for _ = 1, n do
          i = i + 1
          step(model, draw, i, 2 + 2 * draw(8))
        end end
        local function path(k) return ("r%d-%d"):format(ranks, k) end
        steps(4)
        save(path(0), model, { group = world, increments = true })
        local before, evicted = maps_of(model), 0
        if not rank or rank == 0 then follow(known, folder .. "/" .. path(0)) end
        for k = 1, 6 do
          if k == 3 and not world then -- a save that fails: its changes are in the next one
            steps(1)
            check(C.peri_fault_arm("checkpoint_write", 1))
            assert.is_false(pcall(save, "never", model, { increment_of = folder .. "/" .. path(k - 1) }))
            check(C.peri_fault_arm("checkpoint_write", 0))
          end
          steps(draw(4))
          local now = maps_of(model)
          local handle = save(path(k), model, { group = world, increment_of = folder .. "/" .. path(k - 1),
            async = k == 5 })
          if k == 5 then
            steps(1) -- after its moment
            handle:wait()
          end
          if not rank or rank == 0 then
            check_lists(before, now, follow(known, folder .. "/" .. path(k)))
            assert.same(now, known)
            for of in pairs(modules) do
              for _ in pairs(without(before[of].row_of, now[of].row_of)) do evicted = evicted + 1 end
            end
          end
          before = now
        end
        assert.is_true((rank or 0) > 0 or evicted > 20, "the sequence evicts")
      end
      if ranks == 0 then run() else sim.run(ranks, run) end
      local said = shell.run(("%s/perilune checkpoint show %s/r%d-6"):format(os.getenv "PERI_BUILD" or "build", folder,
        ranks))
      assert.truthy(said:find("_mch_sorted_raw_ids  *i64 *96 *%d+ *%d+ changed, %d+ ids evicted"), said)
      -- The chain loads, and its full checkpoint too, on any number of ranks.
      local known = {}
      for k = 0, 6 do follow(known, ("%s/r%d-%d"):format(folder, ranks, k)) end
      local c = peri.checkpoint.open(("%s/r%d-6"):format(folder, ranks))
      c:compact(("%s/r%d-full"):format(folder, ranks))
      c:close()
      for _, name in ipairs { "6", "full" } do
        local one, dict = build(), ("%s/r%d-%s"):format(folder, ranks, name)
        peri.checkpoint.load(dict, { model = one })
        assert.same(known, maps_of(one))
        sim.run(3, function(rank, world)
          local model = build(world)
          peri.checkpoint.load(dict, { model = model }, { group = world })
          local maps = maps_of(model)
          if rank == 0 then assert.same(known, maps) end
        end)
      end
      local full = {}
      follow(full, ("%s/r%d-full"):format(folder, ranks))
      assert.same(known, full)
    end)
  end

  it("are as large as what changed, not as the table", function()
    local model, draw, known = build(nil, 6000), random(3), {}
    for i = 1, 4 do step(model, draw, i, 200) end -- whole windows
    save("large-0", model, { increments = true })
    follow(known, folder .. "/large-0")
    step(model, draw, 5, 6)
    step(model, draw, 5, 6)
    save("large-1", model, { increment_of = folder .. "/large-0" })
    local told = follow(known, folder .. "/large-1")
    assert.same(maps_of(model), known)
    for of, x in pairs(told) do
      for state, rows in pairs(x.rows) do -- the row that ids without one share counts them, in each bucket
        assert.is_true(rows <= 12 + 6, ("%s %s: %d rows"):format(of, state, rows))
      end
    end
  end)

  it("stand on maps of which no flipped bit is loaded", function()
    local model, draw = build(), random(9)
    for i = 1, 3 do step(model, draw, i, 8) end
    save("sound", model)
    local c, n = peri.checkpoint.open(folder .. "/sound"), 0
    for _, name in ipairs(c:names()) do
      local piece = by_row[name:match "[^.]*$"] and c:tensor(name).pieces[1]
      if piece then
        shell.run(("rm -rf %s/flipped; cp -r %s/sound %s/flipped"):format(folder, folder, folder))
        local file = assert(io.open(("%s/flipped/%s"):format(folder, piece.file), "r+b"))
        file:seek("set", piece.begin + piece.bytes - 8)
        local byte = file:read(1):byte()
        file:seek("set", piece.begin + piece.bytes - 8)
        file:write(string.char(bit.bxor(byte, 1)))
        file:close()
        local ok, err = pcall(peri.checkpoint.load, folder .. "/flipped", { model = build() })
        assert.is_false(ok, name)
        assert.truthy(tostring(err):find(name, 1, true), tostring(err))
        n = n + 1
      end
    end
    c:close()
    assert.equal(4 + 3 + 2 + 1, n) -- states of mch, lru, ttl and grow
  end)

  it("that begin with what was loaded, or whose map a load of a part wrote, are no less exact", function()
    local model, other, draw, known = build(), build(), random(5), {}
    for i = 1, 3 do step(model, draw, i, 8) end
    for i = 9, 12 do step(other, draw, i, 8) end
    save("other", other)
    save("first", model)
    local again = build()
    peri.checkpoint.load(folder .. "/first", { model = again }, { increments = true })
    local before = maps_of(again)
    follow(known, folder .. "/first")
    peri.checkpoint.load(folder .. "/other", { model = again }, { only = { "model/mc" } })
    save("second", again, { increment_of = folder .. "/first" })
    check_lists(before, maps_of(other), follow(known, folder .. "/second"))
    assert.same(maps_of(other), known)
    -- A map of another size has no rows of the parent's: it is there as a whole.
    local larger = build(nil, 2 * ROWS)
    peri.checkpoint.load(folder .. "/second", { model = larger }, { increments = true })
    save("third", larger, { increment_of = folder .. "/second" })
    local grown = {}
    follow(grown, folder .. "/third")
    assert.same(maps_of(larger), grown)
    local q = build(nil, 2 * ROWS)
    peri.checkpoint.load(folder .. "/third", { model = q })
    assert.same(maps_of(larger), maps_of(q))
    -- In other buckets, over ranks, ids go from what one rank has to what the other has.
    sim.run(2, function(rank, world)
      local p = build(world, nil, 4)
      peri.checkpoint.load(folder .. "/second", { model = p }, { group = world, increments = true })
      save("fourth", p, { group = world, increment_of = folder .. "/second" })
      local maps, moved = maps_of(p), {}
      if rank > 0 then return end
      for _, name in ipairs { "first", "second", "fourth" } do follow(moved, folder .. "/" .. name) end
      assert.same(maps, moved)
      assert.are_not.same(maps.mch.row_of, known.mch.row_of)
    end)
  end)

  it("are followed by models of other ranks and of other sizes, as if these had loaded each", function()
    local of, draw = folder .. "/followed", random(11)
    local function state_of(model)
      local dict, list = peri.shard.gather_state_dict(model:state_dict()), {}
      for name, t in peri.util.ordered(dict) do
        list[#list + 1] = name .. " " .. table.concat(peri.util.map(t:reshape(-1):to_list(), tostring), " ")
      end
      return table.concat(list, "\n")
    end
    local one, larger = build(), build(nil, 2 * ROWS)
    local followers = { peri.checkpoint.follow(of, { model = one }, { group = false }),
      peri.checkpoint.follow(of, { model = larger }, { group = false }) }
    sim.run(2, function(rank, world)
      local model = build(world)
      local saver = peri.checkpoint.Saver { folder = of, parts = { model = model }, every = 1, full_every = 4, keep = 9,
        group = world }
      for i = 1, 6 do
        step(model, draw, i, 8)
        saver:step(i)
        local want = state_of(model)
        if rank == 0 and i ~= 2 then
          for _, f in ipairs(followers) do assert.truthy(f:poll()) end
          assert.is_true(want == state_of(one), ("step %d"):format(i))
          local fresh = build(nil, 2 * ROWS)
          peri.checkpoint.load(followers[2].path, { model = fresh }, { group = false })
          assert.is_true(state_of(fresh) == state_of(larger), ("step %d, of another size"):format(i))
        end
      end
      saver:close()
    end)
    for _, f in ipairs(followers) do f:close() end
  end)
end)
