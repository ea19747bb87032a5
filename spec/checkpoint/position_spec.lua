-- A run that goes on is the run that never stopped, in its samples and in its metrics: with every loader, with and
-- without workers, in a loop and in a pipeline that loads ahead, and on another number of ranks where the order of the
-- data allows it.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local packages = require "perilune.data.packages"
local shell = require "spec.support.shell"
local nn, data, plan = peri.nn, peri.data, peri.plan

local folder, clean = shell.temporary()
teardown(clean)

local shape = { rows = 50, dense_features = 2, sparse_features = 2 }
local function with(...)
  local out = {}
  for _, t in ipairs { ... } do
    for name, value in pairs(t) do out[name] = value end -- any order: named arguments
  end
  return out
end
local file = folder .. "/samples.txt"
data.synthetic.write(with(shape, { path = file, num_rows = 60, seed = 5, ids_per_bag = { 0, 1 } }))
local blocks = {}
for i = 0, 19 do
  blocks[#blocks + 1] = ("Package: p%d\nSection: s%d\nDescription: word%d tool\nDepends: p%d, p%d\n"):format(i, i % 3,
    i % 5, (i * 7 + 1) % 20, (i + 1) % 20)
end
local lists = packages.parse(table.concat(blocks, "\n"))

local common = { batch_size = 8, epochs = 3 }
local makers = {
  synthetic = function(a) return data.synthetic(with(shape, common, { num_rows = 60, seed = 3 }, a)) end,
  criteo = function(a) return data.criteo(with(shape, common, { path = file, part = "train" }, a)) end,
  packages = function(a) return data.debian(with(common, { packages = lists, negatives = 1 }, a)) end,
  DataLoadingThread = function(a)
    local loader = function(arguments) return require("perilune").data.synthetic(arguments) end
    return peri.pipeline.DataLoadingThread { loader = loader, num_workers = a.num_workers or 1, global_batches = true,
      arguments = with(shape, common, { num_rows = 60, seed = 3, rank = a.rank, world_size = a.world_size,
        batch_size = a.batch_size }) }
  end,
  Generator = function(a)
    return data.Generator { global_batches = true, make = function(first)
      local source = data.synthetic(with(shape, common, { num_rows = 60, seed = 3 }, a)):skip(first)
      return function() return source() end
    end }
  end,
}

local function text_of(b)
  if not b then return "end" end
  return table.concat({ b.global_row, b.global_rows, table.concat(b.sparse_features:values():to_list(), " "),
    table.concat(b.dense_features:to_list(), " ") }, "; ")
end

--- The texts of the next n batches.
local function take(loader, n)
  local list = {}
  for i = 1, n do list[i] = text_of(loader()) end
  return list
end

describe("the position in data", function()
  for name, make in peri.util.ordered(makers) do
    it("of " .. name .. " leads another loader to the sample that comes next, in any pass, with any workers", function()
      for _, at in ipairs { 7, 19 } do
        for workers = 0, 2, 2 do
          local loader = make { num_workers = name ~= "Generator" and workers > 0 and workers or nil }
          take(loader, at)
          local dict = loader:state_dict()
          local want = take(loader, 30)
          local again = make { num_workers = name ~= "Generator" and 2 - workers > 0 and 2 - workers or nil }
          take(again, 1)
          again:load_state_dict(dict)
          assert.same(dict, again:state_dict())
          assert.same(want, take(again, 30))
          loader, again = loader.stop and loader:stop(), again.stop and again:stop() -- luacheck: ignore
        end
      end
    end)
  end

  it("holds for other sizes of batches where one begins there; other data is refused", function()
    local loader = makers.synthetic {}
    take(loader, 10) -- 8 in the first pass, of which the last has 4 samples; 16 samples of the second
    local dict = loader:state_dict()
    for size, row in pairs { [4] = 16, [16] = 16, [2] = 16 } do -- any order
      local again = makers.synthetic { batch_size = size, num_workers = size == 4 and 1 or 0 }
      again:load_state_dict(dict)
      local b = again()
      assert.same({ row, size }, { b.global_row, b.global_rows })
      again:stop()
    end
    for words, a in peri.util.ordered { ["seed was 3, and is 4"] = { seed = 4 },
      ["rows was 50, and is 60"] = { rows = 60 },
      ["behind sample 16 of a pass, where no batch of this loader begins.*divides 16, such as 8"] =
        { batch_size = 12 } } do
      local again = makers.synthetic(a)
      assert.error_matches(function() again:load_state_dict(dict) end, words)
      assert.equal(0, again().global_row) -- nothing changed
    end
    assert.error_matches(function() makers.criteo({}):load_state_dict(dict) end,
      "no position in data.criteo, but data.synthetic")
  end)

  it("counts the batches that a pipeline has trained, not those that it has loaded ahead", function()
    for name, make in peri.util.ordered(makers) do
      sim.run(2, function(rank, world)
        local place = { rank = rank, world_size = 2 }
        local seen = {}
        local Net = nn.Module:extend "Net"
        function Net:init()
          self.ebc = peri.EmbeddingBagCollection { seed = 5, fused_params = { optimizer = "sgd" },
            tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 50, embedding_dim = 4,
              feature_names = { name == "packages" and "section" or "c1" } } } }
        end
        function Net:forward(b)
          seen[#seen + 1] = text_of(b)
          return self.ebc(b.sparse_features):values():sum() * b.loss_scale
        end
        local model = peri.DistributedModelParallel { module = Net(), group = world,
          plan = { ebc = { t = plan.row_wise() } } }
        --- skipped: the pipeline is given a function that leaves out so many of the loader's batches before each one.
        local function run(loader, n, skipped)
          local pipeline = peri.pipeline.TrainPipelineSparseDist { model = model, optimizer = false }
          local function other()
            for _ = 1, skipped do loader() end
            return loader()
          end
          for _ = 1, n do pipeline:progress(skipped and other or loader) end
          return loader:state_dict().batches
        end
        for _, skipped in ipairs { false, 0, 1 } do
          local each = 1 + (skipped or 0)
          local loader, again, whole = make(place), make(place), make(place):skip(5 * each)
          assert.equal(5 * each, run(loader, 5, skipped))
          again:load_state_dict(loader:state_dict())
          seen = {}
          run(again, 3, skipped)
          for i = 1, 3 do
            if skipped == 1 then whole() end
            assert.equal(text_of(whole()), seen[i])
          end
          assert.equal(8 * each, run(loader, 1, skipped)) -- the first pipeline took two more, which nobody trains
          for _, l in ipairs { loader, again, whole } do
            if l.stop then l:stop() end
          end
        end
      end)
    end
  end)

  it("is not loaded while a pipeline has batches of another one in flight", function()
    local Net = nn.Module:extend "Net"
    function Net:init()
      self.ebc = peri.EmbeddingBagCollection { seed = 5, fused_params = { optimizer = "sgd" },
        tables = { peri.EmbeddingBagConfig {
        name = "t", num_embeddings = 50, embedding_dim = 4, feature_names = { "f" } } } }
    end
    function Net:forward(x) return self.ebc(x):values():sum() end
    sim.run(2, function(_, world)
      local seen = {}
      local loader = data.Generator { global_batches = true, make = function(first)
        local k = first - 1
        return function()
          k = k + 1
          seen[#seen + 1] = k
          return peri.KeyedJaggedTensor { keys = { "f" }, values = { k % 50 }, lengths = { 1 } }
        end
      end }
      local model = peri.DistributedModelParallel { module = Net(), group = world,
        plan = { ebc = { t = plan.row_wise() } } }
      local pipeline = peri.pipeline.TrainPipelineSparseDist { model = model, optimizer = false }
      local parts, options = { model = model, loader = loader }, { group = world }
      for _ = 1, 3 do pipeline:progress(loader) end
      peri.checkpoint.save(folder .. "/run/save-000001-step-3", parts,
        { group = world, values = { saver = { number = 1, step = 3 } } })
      pipeline:progress(loader)
      local words = "a pipeline has batches in flight.*module 'ebc'.*allowed: after pipeline:stop.*or after "
        .. "pipeline:close"
      local before = loader:state_dict()
      local saver = peri.checkpoint.Saver { folder = folder .. "/run", parts = parts, group = world }
      for _, load in ipairs {
        function() peri.checkpoint.load(folder .. "/run/save-000001-step-3", parts, options) end,
        function() model:load(folder .. "/run/save-000001-step-3", { group = world, parts = { loader = loader } }) end,
        function() saver:resume() end,
      } do
        assert.error_matches(load, words)
        assert.same(before, loader:state_dict())
      end
      pipeline:close()
      assert.equal(3, saver:resume())
      seen = {}
      pipeline:progress(loader)
      assert.equal(before.batches - 1, seen[1])
      saver:close()
    end)
  end)
end)
