-- The rows of tables of raw ids and the maps that give them to ids are of one moment, wherever they are: files open
-- only with the map of their flush, a map loads only with the rows that are its own, and a state is taken only when no
-- map is ahead of its rows.
-- deadline: 240 s
-- mpirun: 3
local peri = require "perilune"
local collision = require "spec.support.collision"
local collective_utils = require "perilune.dist.collective_utils"
local moments = require "spec.support.collision_moments"
local tier = require "spec.support.tier"
local worlds = require "spec.support.worlds"
local embed, plan = peri.embed, peri.plan
local C = peri.ffi.C

local Model, kinds, kjt, batch, answers, ROWS = moments.Model, moments.kinds, moments.kjt, moments.batch,
  moments.answers, moments.ROWS

--- What `f` returns on rank 0, on all ranks.
local function once(world, f, ...) return collective_utils.invoke_on_rank_and_broadcast_result(world, 0, f, ...) end

local function release(model)
  for _, s in ipairs(model.sharded) do s:release() end
end

local function files_of(folder)
  local copies = {}
  for _, path in ipairs(tier.files(folder)) do copies[path] = tier.read_file(path) end
  return copies
end
local function put(folder, copies)
  tier.remove(folder .. "/*")
  for path, bytes in pairs(copies) do tier.write_file(path, bytes) end
  return true
end

--- Refused on all ranks, in the same words but for the ranks' own; everybody can go on.
local function refused(world, patterns, f)
  local ok, err = pcall(f)
  assert.is_false(ok)
  local text = tostring(err.message or err)
  local says = world and world:all_gather_object(text) or { text }
  for _, pattern in ipairs(patterns) do
    for _, x in ipairs(says) do assert.truthy(x:find(pattern), ("'%s' in: %s"):format(pattern, x)) end
  end
end

--- Three ranks are those of mpirun or of a sim world, in turn.
local function worlds_of(case)
  local sizes = case % 2 == 0 and { 2, 3 } or { 1, 2 }
  if worlds.mpirun then sizes = { case % 2 == 1 and 3 or nil } end
  return { sizes = sizes, devices = { "cpu" } }
end

describe("maps of raw ids and rows in files", function()
  setup(function() C.peri_log_level_set(C.PERI_LOG_ERROR) end)
  teardown(function() C.peri_log_level_set(C.PERI_LOG_WARN) end)

  for case, kind in ipairs(kinds) do
    worlds.each("open together if they are of one flush, and not else: " .. kind, function(world)
      local folder, r = once(world, tier.folder), collision.random(case)
      local sequence, here = case % 2 == 0, { compute_kernel = "fused_uvm_caching",
        cache_params = { load_factor = 1, directory = folder } }
      local alone = r(2) == 1 -- the other ranks have neither rows nor a map, and know all the same
      local function build()
        return peri.DistributedModelParallel { module = Model(kind, sequence,
          { optimizer = "adagrad", learning_rate = 0.5 }), group = world, plan = plan.ShardingPlan { mc = {
            t = alone and plan.table_wise(world:size() - 1, here) or plan.row_wise(here) } } }
      end
      local model, step, list = build(), 0, {}
      for i = 1, 3 do
        for _ = 1, 2 + r(3) do
          step = step + 1
          local loss = model(batch(case, step, world:rank(), world:size()))
          if i < 3 then loss:backward() end -- at last maps learn alone, and only counts and steps move
        end
        model:flush()
        local whole, maps = model:state_dict():gather(), {}
        for name, t in pairs(whole) do if name:find("_managed_collision_modules", 1, true) then maps[name] = t end end
        world:barrier():wait()
        list[i] = { whole = whole, maps = maps, files = once(world, files_of, folder), out = answers(model) }
        world:barrier():wait()
      end
      release(model)
      world:barrier():wait()
      for i, files in ipairs(list) do
        for j, given in ipairs(list) do
          once(world, put, folder, files.files)
          model = build()
          if i == j or r(2) == 1 then -- without a map nothing can be done
            local use = ({ function() answers(model) end,
              function() model(batch(case, 1, world:rank(), world:size())) end, function() model:state_dict() end,
              function() model:flush() end })[r(4)]
            refused(world, { "row file '.*%.peri'", ("flush %d"):format(i), "map here is new" }, use)
            model:train()
          end
          local loaded = given
          if i == j then model:load_state_dict(given.maps, false) else
            refused(world, { "row file '.*%.peri'", ("flush %d"):format(i), "the map has made %d+ steps" }, function()
              model:load_state_dict(given.maps, false)
            end)
            loaded = r(2) == 1 and given or files
            model:load_state_dict(loaded == given and given.whole or files.maps, false)
          end
          local out = answers(model)
          assert.same(loaded.out, out)
          release(model)
          world:barrier():wait()
        end
      end
      once(world, tier.remove, folder)
    end, worlds_of(case))
  end

  worlds.each("are no files of tables whose ids are rows, nor the other way round", function(world)
    local folder = once(world, tier.folder)
    local sharding = { t = plan.row_wise { compute_kernel = "fused_uvm_caching",
      cache_params = { load_factor = 1, directory = folder } } }
    local function plain()
      return peri.DistributedModelParallel { group = world, plan = plan.ShardingPlan { [""] = sharding },
        module = peri.EmbeddingBagCollection { seed = 5, fused_params = { optimizer = "sgd", learning_rate = 1 },
          tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = ROWS, embedding_dim = 4,
            feature_names = { "f" }, init_fn = embed.constant(1) } } } }
    end
    local function mapped()
      return peri.DistributedModelParallel { group = world,
        module = Model("lru", false, { optimizer = "sgd", learning_rate = 1 }),
        plan = plan.ShardingPlan { mc = sharding } }
    end
    local model = mapped()
    model(batch(1, 1, world:rank(), world:size())):backward()
    model:flush()
    release(model)
    world:barrier():wait()
    if world:size() == 1 then -- a plain table is cut elsewhere between ranks
      refused(world, { "its rows are those that a map gave to raw ids", "the table's ids are rows" }, plain)
      tier.remove(folder .. "/*")
      model = plain()
      model(kjt { 1, 2, 3 }):values():sum():backward()
      model:flush()
      release(model)
      refused(world, { "its rows are those of ids that are rows", "given to raw ids by a map" }, mapped)
    end
    once(world, tier.remove, folder)
  end, { sizes = { 1, 2 }, devices = { "cpu" } })

  for case, kind in ipairs(kinds) do
    worlds.each("are loaded from one state_dict, or not at all: " .. kind, function(world)
      local function build()
        return peri.DistributedModelParallel { module = Model(kind, case % 2 == 1,
          { optimizer = "adagrad", learning_rate = 0.5 }), group = world,
            plan = plan.ShardingPlan { mc = { t = plan.row_wise() } } }
      end
      local r, model, list = collision.random(case + 50), build(), {}
      local function parts_of(whole)
        local maps, rows = {}, {}
        for name, t in pairs(whole) do (name:find("_managed_collision_modules", 1, true) and maps or rows)[name] = t end
        return { whole = whole, maps = maps, rows = rows, out = answers(model) }
      end
      for s = 1, 9 do
        model(batch(case, s, world:rank(), world:size())):backward()
        if s % 3 == 0 then
          local dict = model:state_dict()
          list[s / 3] = parts_of(r(2) == 1 and dict:gather() or dict:clone())
        end
      end
      for _ = 1, 6 do
        local a, b = list[r(3)], list[r(3)]
        local mixed = peri.util.copy(a.rows)
        for name, t in pairs(b.maps) do mixed[name] = t end
        model = build()
        if a == b then model:load_state_dict(mixed) else
          refused(world, { "those of a map that had made %d steps, and the map has made %d steps",
            "from one state_dict" }, function()
            model:load_state_dict(mixed)
          end)
          if r(2) == 1 then model:load_state_dict(list[r(3)].whole) end
          model:load_state_dict(a.rows, false)
          local known = answers -- rows of a map that is not here
          if r(2) == 1 then known = function(m) m(batch(case, 1, world:rank(), world:size())) end end
          if not pcall(known, model) then
            refused(world, { "weights that were loaded are those of a map that had made %d steps" }, function()
              known(model)
            end)
            refused(world, { "and the map has made %d steps" }, function() model:load_state_dict(b.maps, false) end)
            model:load_state_dict(a.maps, false)
          else model:load_state_dict(a.whole) end
        end
        model:train()
        assert.same(a.out, answers(model))
      end
    end, worlds_of(case + 1))
  end

  it("open together on one rank without shards, too", function()
    local folder = tier.folder()
    local function build(directory)
      return Model("lfu", false,
        { optimizer = "sgd", learning_rate = 1, cache_params = { load_factor = 1, directory = directory } })
    end
    local function flush(model) model.mc:embedding_module():flush() end
    local model = build(folder)
    for s = 1, 5 do model(batch(3, s, 0, 1)):backward() end
    flush(model)
    local old = peri.shard.gather_state_dict(model.mc:managed_collision_collection():state_dict())
    for s = 6, 9 do model(batch(3, s, 0, 1)):backward() end
    flush(model)
    local new = peri.shard.gather_state_dict(model.mc:managed_collision_collection():state_dict())
    local whole, out = model:state_dict():gather(), answers(model)
    model.mc:embedding_module():materialise():release()
    local function load(map)
      local named = {}
      for name, t in pairs(map) do named["mc._managed_collision_collection." .. name] = t end
      model:load_state_dict(named, false)
    end
    model = build(folder)
    refused(nil, { "flush 2", "map here is new" }, function() model(batch(3, 1, 0, 1)) end)
    refused(nil, { "flush 2", "map here is new" }, function() model:state_dict() end)
    refused(nil, { "flush 2", "map here is new" }, function() flush(model) end)
    refused(nil, { "flush 2", "the map has made 5 steps", "had made 9 steps" }, function() load(old) end)
    load(new)
    assert.same(out, answers(model))
    model.mc:embedding_module():materialise():release()
    model = build(folder)
    model:load_state_dict(whole)
    assert.same(out, answers(model))
    model.mc:embedding_module():materialise():release()
    tier.remove(folder)
    if worlds.mpirun then return end
    model = build(nil) -- in memory's stead: a file that nobody reopens
    refused(nil, { "the rows are those of the map that is here, which has made 0 steps", "load the weights" },
      function() load(new) end)
    local weight = "mc._embedding_module.embedding_bags.t.weight"
    model:load_state_dict({ [weight] = whole[weight] }, false)
    load(new) -- rows first, then their map
    assert.same(out, answers(model))
  end)
end)
