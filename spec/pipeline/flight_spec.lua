-- A batch stays as it is from when it is loaded until its forward pass; what is sent for it is what its forward pass
-- asks for; and what a schedule of rates returns is not lost without a word.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local support = require "spec.support.pipeline"
local pipeline = peri.pipeline

--- One batch of fixed shape, number n, with fields of its own.
local function made(n)
  return { dense_features = peri.full({ 2, 3 }, n / 10), labels = peri.tensor({ n % 2, 1 }, "f32"),
    more = { deep = { n = n } }, sparse_features = peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3" },
      values = peri.tensor({ n, n, n, n, n, n }, "i64"), lengths = peri.tensor({ 1, 1, 1, 1, 1, 1 }, "i32") } }
end

--- Ways to fill `old` with the numbers of batch n; each changes one thing.
local refills = {
  ["field 'labels' of batch %d was replaced"] = function(old, n) old.labels = made(n).labels end,
  ["field 'sparse_features' of batch %d was replaced"] = function(old, n)
    old.sparse_features = made(n).sparse_features
  end, ["field 'more.deep.n' of batch %d was replaced"] = function(old, n) old.more.deep = { n = n } end,
  ["field 'labels' of batch %d was changed in place"] = function(old, n) old.labels:copy(made(n).labels) end,
  ["field 'dense_features' of batch %d was changed in place"] = function(old, n) old.dense_features:fill(n) end,
  ["field 'sparse_features' of batch %d was changed in place"] = function(old, n)
    old.sparse_features:copy_(made(n).sparse_features)
  end,
}
for part in pairs { values = true, lengths = true } do -- of ids: through whatever handle
  refills["field 'sparse_features' of batch %d was changed in place" .. (part == "values" and "\1" or "\1\1")] =
    function(old)
    local t = old.sparse_features[part](old.sparse_features)
    t:copy(t)
  end
end

local ahead = { "sparse_dist", "fused_sparse_dist", "prefetch_sparse_dist", "eval_sparse_dist", "wire_first" }

describe("a batch in flight", function()
  for _, name in ipairs(ahead) do
    it("that is filled again is an error of its step, whatever of it changes, pipelined or not: " .. name, function()
      for text, refill in peri.util.ordered(refills) do
        for _, inputs in ipairs { false, name == "sparse_dist" and { bags = false, rows = false } or nil } do
          sim.run(1, function(_, world)
            local model, schedule = support.model(world, "cpu"), pipeline.schedules[name]
            local p = pipeline.Pipeline { model = model, optimizer = schedule.grad and support.optimizer(model) or nil,
              schedule = schedule, inputs = inputs or nil }
            local n, batch = 0, nil
            local function batches()
              n = n + 1
              if n > 8 then return nil end
              if n > 4 then refill(batch, n) else batch = made(n) end
              return batch
            end
            local ok, err = pcall(function()
              for _ in p:run(batches) do end -- luacheck: ignore
            end)
            assert.is_false(ok, text)
            assert.matches("^Pipeline: " .. text:gsub("\1", ""):gsub("%%d", "%%d+") .. " after the batch was loaded",
              err.message)
          end)
        end
      end
    end)
  end

  it("may be the same one again, may be changed by an operation, and after its step by anybody", function()
    sim.run(1, function(_, world)
      local model = support.model(world, "cpu")
      local own = { "own", run = function(context) context.batch.labels:fill(1) end, reads = { "batch" },
        changes = { "batch" } }
      local p = pipeline.Pipeline { model = model, optimizer = support.optimizer(model),
        schedule = pipeline.schedules.sparse_dist:insert(own, { before = "forward" }) }
      local n, all, same = 0, {}, made(1)
      local function batches()
        n = n + 1
        if all[n - 4] then all[n - 4].labels:fill(0) end -- its step is over
        all[n] = n <= 6 and made(n) or nil
        return all[n]
      end
      local steps = 0
      for _ in p:run(batches) do steps = steps + 1 end
      assert.equal(6, steps)
      p = peri.TrainPipelineSparseDist { model = model, optimizer = support.optimizer(model) }
      n = 0
      for _, step in p:run(function()
        n = n + 1
        return n <= 6 and same or nil
      end) do steps = step end
      assert.equal(6, steps)
    end)
  end)
end)

describe("what inputs gives", function()
  local function run(given, forward)
    return sim.run(1, function(_, world)
      local model = support.model(world, "cpu", { bags_only = true })
      local bags = model.module.bags
      rawset(model.module, "bags", nil)
      rawset(model.module, "bags", bags)
      local compute = model.module.compute
      rawset(model.module, "compute", function(self, batch)
        return compute(self, forward and forward(batch) or batch)
      end)
      local p = peri.TrainPipelineSparseDist { model = model, optimizer = support.optimizer(model),
        inputs = { bags = given } }
      local n = 0
      local ok, err = pcall(function()
        for _ in p:run(function()
          n = n + 1
          return n <= 9 and made(n) or nil
        end) do end -- luacheck: ignore
      end)
      return ok and "ok" or err.message
    end)
  end
  local function other(kjt, values)
    return peri.KeyedJaggedTensor { keys = kjt:keys(), values = values or kjt:values(), lengths = kjt:lengths() }
  end

  it("is what the model calls the module with, or that is an error: keys, sizes and numbers", function()
    local function same(batch) return batch.sparse_features end
    assert.same({ "ok" }, run(same))
    -- another object with the same ids
    assert.same({ "ok" }, run(function(batch) return other(batch.sparse_features) end))
    local function wrong(text, given)
      local said = run(given)[1]
      assert.matches("inputs['bags'] gave for batch ", said, 1, true)
      assert.matches(text, said, 1, true)
    end
    wrong("as argument 1 of the module's call, other ids", function(batch)
      return other(batch.sparse_features, { 1, 2, 3, 4, 5, 6 })
    end)
    local n = 0
    wrong("gave for batch 8, as argument 1 of the module's call, other ids", function(batch) -- not the first one only
      n = n + 1
      return n == 9 and other(batch.sparse_features, { 1, 2, 3, 4, 5, 6 }) or batch.sparse_features
    end)
    wrong("as argument 1", function(batch) return batch.sparse_features:permute { 1, 0, 2 } end)
    assert.matches("inputs['bags'] returned nothing for batch 0", run(function() end)[1], 1, true)
  end)
end)

describe("a schedule of rates", function()
  it("that returns something is an error, for what it returns would do nothing", function()
    for _, class in ipairs { "TrainPipelineBase", "TrainPipelineSparseDist", "Pipeline" } do
      for _, said in ipairs { 0.01, "x", false, { 1 } } do
        sim.run(1, function(_, world)
          local model = support.model(world, "cpu")
          local a = { model = model, optimizer = support.optimizer(model) }
          if class == "Pipeline" then a.schedule, a.on_step = pipeline.schedules.base, function() return said end
          else a.schedule = function() return said end end
          local ok, err = pcall(pipeline[class](a).progress, pipeline[class](a), support.batches(0, "cpu", 2))
          assert.is_false(ok)
          assert.matches(("^%s: %s returned .* for step 1, and what it returns is not used: it sets rates "
            .. "itself"):format(class, class == "Pipeline" and "on_step" or "schedule"), err.message)
        end)
      end
    end
  end)
end)
