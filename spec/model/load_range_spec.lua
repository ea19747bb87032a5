-- Loading numbers that the dtype here cannot hold: an error on all ranks that names the tensor, the row, the number and
-- the range, before anything changes, whatever the plan and wherever the numbers come from. What rounds fits, and NaN
-- and infinities stay what they are.
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local shell = require "spec.support.shell"
local plan, gather = peri.plan, peri.shard.gather_state_dict

local ROWS, ROW, COLUMN, NAME = 40, 33, 5, "embedding_bags.t.weight"
local kinds = {
  table_wise = plan.table_wise, row_wise = plan.row_wise, data_parallel = plan.data_parallel,
  column_wise = function() return plan.column_wise { ranks = { 0, 0 } } end,
}
-- The least number that is too large by IEEE 754's rounding to nearest: half a step above the largest one.
local past = { f16 = 65520, bf16 = 0x1.ffp127, f32 = 0x1.ffffffp127 }
local data_types = { f16 = "FP16", bf16 = "BF16", f32 = "FP32" }

local function bags(dtype, cached)
  return peri.EmbeddingBagCollection {
    tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = ROWS, embedding_dim = 8, feature_names = { "f" },
      data_type = data_types[dtype] } },
    fused_params = { optimizer = "sgd", learning_rate = 0.1, cache_params = cached and { load_factor = 1 } or nil },
  }
end

local function models_of(world, dtype)
  local list = { plain = bags(dtype), cached = bags(dtype, true) }
  for kind, entry in peri.util.ordered(kinds) do
    list[kind] = peri.DistributedModelParallel { module = bags(dtype), group = world,
      plan = { [""] = { t = entry() } } }
  end
  return list
end

local function whole(value, dtype)
  local x = peri.zeros({ ROWS, 8 }, "f64", "cpu")
  x:slice(1, ROW, ROW + 1):slice(2, COLUMN, COLUMN + 1):fill(value)
  return x:to(dtype)
end

local function weights(model)
  local x = gather(model:state_dict())[NAME]
  return x:to("f64", "cpu"):to_list()
end

local scratch, clean = shell.temporary()
teardown(clean)

describe("loading numbers of a wider dtype", function()
  for dtype, limit in peri.util.ordered(past) do
    worlds.each("into " .. dtype .. ": those that fit, or an error on all ranks", function(world)
      for kind, model in peri.util.ordered(models_of(world, dtype)) do
        local before = weights(model)
        for _, sign in ipairs { 1, -1 } do
          local message = ("'%s' has %s[%%d.e+]+ at row %d, column %d, which %s cannot hold; allowed: %%-%%d"):format(
            NAME, sign < 0 and "%-" or "", ROW, COLUMN, dtype)
          assert.error_matches(function() model:load_state_dict { [NAME] = whole(sign * limit, "f64") } end, message)
          assert.same(before, weights(model), kind)
        end
        for _, value in ipairs { limit * (1 - 2 ^ -20), -limit * (1 - 2 ^ -20), math.huge, -math.huge, 0 / 0 } do
          model:load_state_dict { [NAME] = whole(value, "f64") }
          local got = weights(model)[ROW * 8 + COLUMN + 1]
          assert(value ~= value and got ~= got or got == value or math.abs(got) < limit and got / value > 0.99,
            kind .. ": " .. got)
        end
      end
    end, { sizes = { 1, 2, 3 }, devices = { "cpu" } })
  end

  worlds.each("from a checkpoint, and states of optimizers", function(world)
    local folder = world:all_gather_object(scratch, "spec")[1] .. "/" .. world:size()
    local dense = peri.nn.Linear { in_features = 2, out_features = 1 }
    local wide = peri.DistributedModelParallel { module = bags "f32", group = world,
      plan = { [""] = { t = plan.row_wise() } } }
    wide:load_state_dict { [NAME] = whole(1e5, "f32") }
    peri.checkpoint.save(folder, { model = wide }, { group = world })
    for kind, model in peri.util.ordered(models_of(world, "f16")) do
      local before = weights(model)
      assert.error_matches(function() peri.checkpoint.load(folder, { model = model }, { group = world,
        except = { "model.tables" } }) end, "'" .. NAME .. "' has 100000 at row 33, column 5")
      assert.same(before, weights(model), kind)
    end
    local adam = peri.nn.optim.Adam { params = dense:named_parameters() }
    local states, dict = {}, adam:state_dict()
    for name, state in peri.util.ordered(dict.state) do states[name] = peri.util.copy(state) end
    states.weight.exp_avg = peri.tensor({ { 0, -1e39 } }, "f64")
    dict = { state = states, param_groups = dict.param_groups }
    assert.error_matches(function() adam:load_state_dict(dict) end,
      "state 'weight.exp_avg' has %-1e%+39 at row 0, column 1, which f32 cannot hold; allowed: ")
    for _, steps in ipairs { 1.5, -1, 0 / 0, 2 ^ 53 } do
      states.weight.step = peri.tensor({ steps }, "f64")
      assert.error_matches(function() adam:load_state_dict(dict) end,
        "state 'weight.step' is %-?%S+, wanted a number of steps: a whole number, 0..2%^53 %- 1")
    end
  end, { sizes = { 1, 2 }, devices = { "cpu" } })
end)
