-- Saver:resume goes on from no checkpoint of which a byte is another one than was saved, and changes nothing before it
-- knows.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
local nn, plan, embed = peri.nn, peri.plan, peri.embed

local folder, clean = shell.temporary()
teardown(clean)

local function tables(name)
  return { peri.EmbeddingBagConfig { name = name, num_embeddings = 24, embedding_dim = 4, feature_names = { name } } }
end

local Net = nn.Module:extend "Net"
function Net:init()
  self.ebc = peri.EmbeddingBagCollection { fused_params = { optimizer = "adagrad" }, tables = tables "t", seed = 1 }
  self.mc = peri.ManagedCollisionEmbeddingBagCollection {
    embedding_bag_collection = peri.EmbeddingBagCollection { fused_params = { optimizer = "sgd" }, tables = tables "u",
      seed = 1 },
    managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables "u",
      managed_collision_modules = {
      u = peri.MCHManagedCollisionModule { zch_size = 24, eviction_interval = 1, buckets = 6,
        eviction_policy = embed.LFU_EvictionPolicy {} } } } }
end
function Net:forward(batch) return self.ebc(batch.t):values():sum() + self.mc(batch.u):values():sum() end

local function build(world)
  return peri.DistributedModelParallel { module = Net(), group = world,
    plan = { ebc = { t = plan.row_wise() }, mc = { u = plan.row_wise() } } }
end

local function train(model, k)
  local function ids(key, list)
    return peri.KeyedJaggedTensor { keys = { key }, values = peri.tensor(list, "i64"), lengths = { #list } }
  end
  peri.scope(function()
    model { t = ids("t", { 5 * k % 24, 7 * k % 24, 11 * k % 24, 23 }),
      u = ids("u", { 1000 * k, 2000 + k, 31 * k, 3007 * k }) }:backward()
  end)
end

--- What was said to the user meanwhile.
local function heard(f)
  local stderr, said = io.stderr, {}
  io.stderr = { write = function(_, ...) -- luacheck: ignore 122
    said[#said + 1] = table.concat { ... }
    return io.stderr
  end }
  local ok, err = pcall(f)
  io.stderr = stderr -- luacheck: ignore 122
  assert(ok, err)
  return table.concat(said)
end

local function flip(path, at)
  local file = assert(io.open(path, "r+b"))
  file:seek("set", at)
  local byte = file:read(1):byte()
  file:seek("set", at)
  file:write(string.char(bit.bxor(byte, 1)))
  file:close()
end

describe("a run that goes on", function()
  it("takes the one before, whatever piece of the newest is damaged, on any number of ranks", function()
    local at = folder .. "/run"
    sim.run(2, function(_, world)
      local model = build(world)
      local saver = peri.checkpoint.Saver { folder = at, parts = { model = model }, group = world, full_every = 2,
        keep = 9 }
      for k = 1, 4 do
        train(model, k)
        saver:save(k)
      end
      saver:close()
    end)
    local flips = 0
    -- an increment, and what it is one of
    for _, case in ipairs { { "save-000004-step-4", 3 }, { "save-000003-step-3", 2 } } do
      local c = peri.checkpoint.Checkpoint(("%s/%s"):format(at, case[1]), true)
      local places = { { name = "the header", file = "rank-1.safetensors", at = 30 } }
      for _, name in ipairs(c:names()) do
        local pieces = c:tensor(name).pieces
        local piece = pieces[#pieces]
        if piece and piece.bytes > 0 then
          places[#places + 1] = { name = name, file = piece.file, at = piece.begin + piece.bytes - 1 }
        end
      end
      for _, place in ipairs(places) do
        local path = ("%s/%s/%s"):format(at, case[1], place.file)
        flip(path, place.at)
        flips = flips + 1
        local said = heard(function()
          sim.run(flips % 3 + 1, function(_, world)
            local saver = peri.checkpoint.Saver { folder = at, parts = { model = build(world) }, group = world,
              full_every = 2 }
            assert.equal(case[2], saver:resume(), place.name)
            saver:close()
          end)
        end)
        flip(path, place.at)
        assert.truthy(said:find(("'%s/%s' is not good: "):format(at, "save-000004-step-4"), 1, true), said)
        assert.truthy(said:find(place.file .. "' is damaged", 1, true), said)
        assert.is_nil(said:find("in part", 1, true), said)
      end
      c:close()
    end
    assert.is_true(flips > 12)
  end)
end)
