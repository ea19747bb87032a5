-- The loaders of files under pipelines and checkpoints: ranks whose files end at different places, and runs that go on
-- from a save.
local peri = require "perilune"
local support = require "spec.support.pipeline"
local worlds = require "spec.support.worlds"
local data = peri.data

local folder = os.tmpname()
os.remove(folder)
assert(os.execute("mkdir " .. folder) == 0)
teardown(function() os.execute("rm -rf " .. folder) end)

-- A file of `rows` lines of three numbers and three bags, packed if its name says so.
local function file(name, rows)
  local path = folder .. "/" .. name:gsub("%.gz$", "")
  local f = assert(io.open(path, "w"))
  for i = 1, rows do
    f:write(("%d,%g,%g,%g,%d|%d,%d,%s\n"):format(i % 2, i % 5, i % 3 - 1, i % 7 / 2, i % 30, i * 7 % 30, i * 11 % 30,
      i % 4 > 0 and i % 9 or ""))
  end
  f:close()
  if name:match "%.gz$" then assert(os.execute("gzip -nf " .. path) == 0) end
  return folder .. "/" .. name
end
local columns = { { name = "y", kind = "label" } }
for i = 1, 3 do columns[#columns + 1] = { name = "x" .. i, kind = "dense" } end
for i = 1, 3 do columns[#columns + 1] = { name = "f" .. i, kind = "ids", rows = 30, separator = "|" } end

local function pipeline(world, device)
  local model = support.model(world, device)
  local optimizer = support.optimizer(model)
  return peri.pipeline.TrainPipelineSparseDist { model = model, optimizer = optimizer, device = device }, model,
    optimizer
end

describe("files over ranks", function()
  local paths = { file("a", 21), file("b.gz", 5), file("c", 13) }
  worlds.each("may end at different places: all ranks train to the longest end", function(world, device, n)
    local function batches(rank)
      return data.csv { path = paths, columns = columns, batch_size = 4 * n, split = "files", rank = rank,
        world_size = n, device = device }
    end
    local most = 0
    for rank = 0, n - 1 do most = math.max(most, math.ceil(batches(rank):count() / 4)) end
    local loader, steps, rows = batches(world:rank()), 0, 0
    for _ in pipeline(world, device):run(function()
      local batch = loader()
      rows = rows + (batch and batch.rows or 0)
      return batch
    end) do steps = steps + 1 end
    assert.equal(most, steps)
    assert.equal(loader:count(), rows)
  end, { sizes = { 1, 2, 3 }, devices = { "cpu" }, timeout = 60 })
end)

describe("a run that goes on has the bits of one that never stopped", function()
  local text = file("long.gz", 61)
  data.cache.write { path = folder .. "/long.samples", loader = data.csv { path = text, columns = columns,
    batch_size = 8, rank = 0, world_size = 1 } }
  local kinds = {
    csv = function(args) return data.csv(args) end,
    cache = function(args)
      args.path, args.columns, args.shuffle, args.shuffle_block = folder .. "/long.samples", nil, true, 8
      return data.cache(args)
    end,
  }
  for kind, make in pairs(kinds) do
    worlds.each("of " .. kind, function(world, device, n)
      local function parts(workers)
        local p, model, optimizer = pipeline(world, device)
        local loader = make { path = text, columns = columns, batch_size = 8, epochs = 2, num_workers = workers,
          rank = world:rank(), world_size = n, device = device }
        return p, { model = model, optimizer = optimizer, loader = loader }
      end
      local function losses(p, loader, steps)
        local list = {}
        for loss in p:run(loader) do
          list[#list + 1] = loss
          if #list == steps then break end
        end
        return list
      end
      local p, all = parts(0)
      local whole = losses(p, all.loader)
      assert.equal(16, #whole)
      assert.is_true(whole[1] ~= whole[16])
      local q, first = parts(0)
      local before = losses(q, first.loader, 5)
      local save = ("%s/%s-%d"):format(folder, kind, n)
      peri.checkpoint.save(save, first)
      local r, second = parts(2)
      peri.checkpoint.load(save, second)
      for _, loss in ipairs(losses(r, second.loader)) do before[#before + 1] = loss end
      second.loader:stop()
      assert.same(whole, before)
    end, { sizes = { 1, 2 }, devices = { "cpu" }, timeout = 60 })
  end
end)
