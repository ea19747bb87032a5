-- A map of raw ids that is saved in the middle of a window goes on as the one that never stopped: what was seen in the
-- window counts, on another number of ranks too. Without the part (older checkpoints, or part of one) windows begin
-- anew.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
local nn, plan, embed = peri.nn, peri.plan, peri.embed

local folder, clean = shell.temporary()
teardown(clean)

local policies = {
  LFU = function() return embed.LFU_EvictionPolicy { threshold_filtering_func = embed.average_threshold_filter } end,
  LRU = function() return embed.LRU_EvictionPolicy {} end,
  DistanceLFU = function() return embed.DistanceLFU_EvictionPolicy { decay_exponent = 1 } end,
  mine = function() return embed.MCHEvictionPolicy { score = function(count, last) return 3 * count + last end } end,
}

local Net = nn.Module:extend "Net"
function Net:init(policy)
  local tables = { peri.EmbeddingBagConfig { name = "raw", num_embeddings = 24, embedding_dim = 4,
    feature_names = { "f" } } }
  self.mc = peri.ManagedCollisionEmbeddingBagCollection {
    embedding_bag_collection = peri.EmbeddingBagCollection { seed = 6,
      fused_params = { optimizer = "adagrad", learning_rate = 0.1, exact = true }, tables = tables },
    managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
      managed_collision_modules = {
      raw = peri.MCHManagedCollisionModule { zch_size = 24, buckets = 6, eviction_interval = 5, device = "cpu",
        eviction_policy = policies[policy]() } } } }
end
function Net:forward(kjt) return (self.mc(kjt):values():sum()) end

local function build(world, policy)
  local model = Net(policy)
  if not world then return model end
  return peri.DistributedModelParallel { module = model, group = world, plan = { mc = { raw = plan.row_wise() } } }
end

--- Steps whose samples are dealt over the ranks (6 of 3 ids each), many of the same ids: windows hold counts above 255.
local function train(model, from, last, rank, ranks)
  for i = from, last do
    peri.scope(function()
      local values, lengths = {}, {}
      for s = 0, 5 do
        if s % ranks == rank then
          for k = 1, i % 5 == 2 and s == 0 and 300 or 3 do
            values[#values + 1] = k > 3 and 5 or (i * 37 + s * s * 11 + k * 7) % 61
          end
          lengths[#lengths + 1] = i % 5 == 2 and s == 0 and 300 or 3
        end
      end
      model(peri.KeyedJaggedTensor { keys = { "f" }, values = values, lengths = lengths }):backward()
    end)
  end
end

--- What the maps know.
local function known(path)
  local c, list = peri.checkpoint.open(path), {}
  for _, name in ipairs(c:names()) do
    if name:find("_managed_collision_modules", 1, true) then
      list[#list + 1] = name:match "[^.]*$" .. " "
        .. table.concat(peri.util.map(c:read(name):reshape(-1):to_list(), tostring), " ")
    end
  end
  c:close()
  return table.concat(list, "\n")
end

describe("a window of raw ids in a checkpoint", function()
  for policy in peri.util.ordered(policies) do
    it("goes on, on other numbers of ranks too: " .. policy, function()
      local want
      for from = 0, 2, 2 do
        local path = ("%s/%s-%d"):format(folder, policy, from)
        local function first(rank, world)
          local model = build(world, policy)
          train(model, 1, 8, rank or 0, world and 2 or 1) -- three steps into the second window
          peri.checkpoint.save(path, { model = model }, { group = world })
          train(model, 9, 16, rank or 0, world and 2 or 1)
          peri.checkpoint.save(path .. "-end", { model = model }, { group = world })
        end
        if from == 0 then first() else sim.run(from, first) end
        want = want or known(path .. "-end")
        assert.equal(want, known(path .. "-end"))
        for ranks = 0, 3 do
          local function again(rank, world)
            local model = build(world, policy)
            train(model, 1, 2, rank or 0, math.max(ranks, 1)) -- whatever it was before
            peri.checkpoint.load(path, { model = model }, { group = world })
            train(model, 9, 16, rank or 0, math.max(ranks, 1))
            peri.checkpoint.save(path .. "-again", { model = model }, { group = world, replace = true })
          end
          if ranks == 0 then again() else sim.run(ranks, again) end
          assert.equal(want, known(path .. "-again"))
        end
      end
    end)
  end

  it("begins anew where it is left out", function()
    local model = build(nil, "LFU")
    peri.checkpoint.load(folder .. "/LFU-0", { model = model }, { except = { "model.windows" } })
    local maps = model.mc:managed_collision_collection():managed_collision_modules()
    local start, entries = maps.raw:_settled_map():window()
    assert.same({ 8, 0 }, { start, entries:size(1) })
  end)

  it("begins anew where the map keeps its own step", function()
    for steps = 2, 14, 12 do -- before the window of the checkpoint, and behind it
      local model = build(nil, "LFU")
      train(model, 1, steps, 0, 1)
      peri.checkpoint.load(folder .. "/LFU-0", { model = model }, { except = {
        "model/mc._managed_collision_collection._managed_collision_modules.raw._current_iter_tensor" } })
      local maps = model.mc:managed_collision_collection():managed_collision_modules()
      local start, entries = maps.raw:_settled_map():window()
      assert.same({ steps, 0 }, { start, entries:size(1) })
    end
  end)
end)
