-- peri.shard.explain: the list of a batch's rows, one line for each block of columns and rank that has rows of it; and
-- what goes through buffers where nothing has to: replicas, and everything in a world of one, whatever the device.
-- mpirun: none
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local plan = peri.plan

local DIMS = { 8, 4, 8 }

local function batch(device)
  return peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3" }, stride = 3,
    values = peri.tensor({ 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 }, "i64", device, { 12 }),
    lengths = peri.tensor({ 1, 2, 1, 1, 1, 1, 1, 2, 2 }, "i32", device, { 9 }) }
end

--- What rank 0 of `n` prints of a module of three tables under `entries`; the module works on afterwards.
local function explained(n, device, entries, sequence)
  local printed, print_of_all = {}, print
  rawset(_G, "print", function(text) printed[#printed + 1] = text end)
  local texts = sim.run(n, function(_, world)
    local tables = {}
    for t = 1, 3 do
      tables[t] = peri[sequence and "EmbeddingConfig" or "EmbeddingBagConfig"] { name = "t" .. t, num_embeddings = 20,
        embedding_dim = sequence and 8 or DIMS[t], feature_names = { "f" .. t } }
    end
    local module = peri.shard[sequence and "ShardedEmbeddingCollection" or "ShardedEmbeddingBagCollection"] {
      tables = tables, group = world, device = device, plan = entries, gradient_division = false,
      fused_params = { optimizer = "sgd", learning_rate = 1 } }
    local text, result = peri.shard.explain(module, batch(device)), module(batch(device))
    local values = sequence and result.f1:values() or result:values()
    values:backward(peri.full(values:shape(), 1, "f32", device))
    return text
  end)
  rawset(_G, "print", print_of_all)
  assert.equal(n, #printed)
  return texts[1]
end

--- Copied bytes of results and gradients; nil for what is not there.
local function copied(text)
  local list = {}
  for some, all in text:gmatch "(%d+) of (%d+) bytes are copied" do
    list[#list + 1] = { tonumber(some), tonumber(all) }
  end
  return list
end

describe("peri.shard.explain", function()
  it("has a line for the rows of each rank in each block of columns", function()
    local text = explained(2, "cpu", { t1 = plan.table_wise(1), t2 = plan.data_parallel(), t3 = plan.row_wise() })
    local lines = {}
    for line in text:match "^(.-)\nGradients":gmatch "\n  (t%d[^\n]*)" do
      lines[#lines + 1] = (line:gsub("%s+", " "))
    end
    assert.same({
      "t1 f1 3 x 8 rank 1, lane 0 0 row 0, column 0 through the buffer",
      "t2 f2 3 x 4 replica 24 row 0, column 8 in place, by the lookup",
      "t3 f3 3 x 8 own 0 row 0, column 12 through the buffer, added",
      "t3 f3 3 x 8 rank 1, lane 0 24 row 0, column 12 through the buffer, added",
    }, lines)
    -- 3 samples of 4 bytes: 8 columns of t1, 4 of t2, twice 8 of t3; the gradients of replicas and own rows are read
    -- where they lie
    assert.same({ { 12 * (8 + 16), 12 * (8 + 4 + 16) }, { 12 * (8 + 8), 12 * (8 + 4 + 16) } }, copied(text))
  end)

  for _, device in ipairs { "cpu", "opaque" } do
    for _, sequence in ipairs { false, true } do
      local what = ("%s on %s"):format(sequence and "sequences" or "bags", device)
      it("says that no rows of replicas are copied: " .. what, function()
        local entries = { t1 = plan.data_parallel(), t2 = plan.data_parallel(), t3 = plan.data_parallel() }
        for _, bytes in ipairs(copied(explained(2, device, entries, sequence))) do assert.equal(0, bytes[1]) end
      end)
      it("says that alone no rows are copied: " .. what, function()
        local entries = { t1 = plan.table_wise(0), t2 = plan.column_wise { ranks = { 0 } }, t3 = plan.row_wise() }
        for _, bytes in ipairs(copied(explained(1, device, entries, sequence))) do assert.equal(0, bytes[1]) end
      end)
    end
  end

  it("wants a sharded module", function()
    assert.error_matches(function() peri.shard.explain(peri.nn.Module(), batch "cpu") end, "wanted a sharded module")
  end)
end)
