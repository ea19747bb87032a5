-- Inputs of exchanges that lie otherwise than their shapes say, turned views or every second number of a larger tensor,
-- and results that are still on their way give what copies of them give, forward and backward.
local dist = require "perilune.dist"
local ops = require "perilune.dist.ops"
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local F = peri.nn.functional

--- The view [rows, cols] of a leaf [cols, rows + 1], or of its gradient.
local function turned(leaf, rows) return leaf:slice(2, 1, rows + 1):transpose(1, 2) end

local function repeated(n, x)
  local list = {}
  for i = 1, n do list[i] = x end
  return list
end

--- Exchanges of one [rows, cols] input, or of several: rows, cols, how many, and the call.
local exchanges = {
  alltoall_pooled = { function(n) return 2 * n, 3, 1 end, function(n, x)
    return ops.alltoall_pooled { a2a_pooled_embs_tensor = x[1], batch_size_per_rank = repeated(n, 2),
      dim_sum_per_rank = repeated(n, 3) }
  end },
  alltoallv = { function(n) return n + 1, 2, 1 end,
    function(n, x) return ops.alltoallv { inputs = x, out_split = repeated(n, 2) } end },
  ["alltoallv of two"] = { function(n) return n + 1, 2, 2 end, function(n, x)
    return ops.alltoallv { inputs = x, out_split = repeated(n, 4) }
  end },
  reduce_scatter_pooled = { function(n) return 2, 3, n end,
    function(_, x) return ops.reduce_scatter_pooled { inputs = x } end },
  reduce_scatter_base_pooled = { function(n) return 2 * n, 3, 1 end, function(_, x)
    return ops.reduce_scatter_base_pooled { input = x[1] }
  end },
  reduce_scatter_v_pooled = { function(n) return 2 * n, 3, 1 end, function(n, x)
    return ops.reduce_scatter_v_pooled { input = x[1], input_splits = repeated(n, 2) }
  end },
  all_gather_base_pooled = { function() return 2, 3, 1 end,
    function(_, x) return ops.all_gather_base_pooled { input = x[1] } end },
  alltoall_sequence = { function(n) return n, 3, 1 end, function(n, x, device)
    return ops.alltoall_sequence { a2a_sequence_embs_tensor = x[1], num_features = 1,
      batch_size_per_rank = repeated(n, 1), lengths_after_sparse_data_all2all = peri.full({ n }, 1, "i32", device),
      input_splits = repeated(n, 1), output_splits = repeated(n, 1) }
  end },
  tpu_all_to_all = { function(n) return 2 * n, 3, 1 end, function(n, x)
    local row = {}
    for r = 1, n do row[r] = r - 1 end
    return dist.tpu_all_to_all { input = x[1], group_assignment = { row }, split_count = n, split_dimension = 1,
      concat_dimension = 2 }
  end },
  ["all_to_all of lists"] = { function(n) return 2, 3, n end,
    function(_, x) return dist.functional.all_to_all(nil, x) end },
}

describe("views as inputs of", function()
  for _, name in ipairs(peri.util.keys(exchanges)) do
    worlds.each(name, function(world, device, n)
      local size, call = exchanges[name][1], exchanges[name][2]
      local rows, cols, count = size(n)
      local leaves, views, copies = {}, {}, {}
      for i = 1, count do
        leaves[i] = peri.Tensor.normal({ cols, rows + 1 }, 0, 1, 10 + i, world.rank_number, "f64",
          device):requires_grad()
        views[i] = turned(leaves[i], rows)
        copies[i] = peri.tensor(views[i]:to_list(), "f64", device, { rows, cols }):requires_grad()
      end
      local function run(inputs)
        local out = call(n, inputs, device):wait()
        local list, loss = peri.Tensor.is(out) and { out } or out, nil
        local numbers = {}
        for i, t in ipairs(list) do
          numbers[i] = { t:shape(), t:to_list() }
          local part = F.mul(t, peri.Tensor.normal(t:shape(), 0, 1, 50 + i, world.rank_number, "f64", device)):sum()
          loss = loss and F.add(loss, part) or part
        end
        loss:backward()
        return numbers
      end
      local want = run(copies)
      assert.same(want, run(views))
      local late = {}
      for i = 1, count do
        assert.same(copies[i]:grad():to_list(), turned(leaves[i]:grad(), rows):to_list())
        leaves[i]:set_grad(nil)
        late[i] = dist.LazyAwaitable(dist.NoWait(turned(leaves[i], rows)))
      end
      assert.same(want, run(late))
      for i = 1, count do
        assert.same(copies[i]:grad():to_list(), turned(leaves[i]:grad(), rows):to_list())
      end
    end)
  end

  worlds.each("KJTAllToAll", function(world, device, n)
    local rank, keys = world.rank_number, {}
    for r = 1, n do keys[r] = "f" .. r end
    --- Every second of the numbers of a larger tensor.
    local function spread(list, dtype)
      local wide = {}
      for i, x in ipairs(list) do wide[i] = { x, -1 } end
      local t = peri.tensor(wide, dtype, device)
      return peri.tensor(list, dtype, device), t:slice(2, 0, 1):reshape(-1)
    end
    local ids, weights, lengths = {}, {}, {}
    for i = 1, 2 * n do ids[i], weights[i], lengths[i] = 100 * rank + i, i / 2, 1 end
    local a, b = spread(ids, "i64")
    local c, d = spread(weights, "f32")
    local e, f = spread(lengths, "i32")
    local results = {}
    for i, set in ipairs { { a, c, e }, { b, d, f } } do
      local kjt = peri.KeyedJaggedTensor { keys = keys, values = set[1], weights = set[2], lengths = set[3] }
      local got = dist.KJTAllToAll(world, repeated(n, 1))(kjt):wait():wait()
      results[i] = { got:values():to_list(), got:weights():to_list(), got:lengths():to_list() }
    end
    assert.same(results[1], results[2])
    for r = 0, n - 1 do assert.equal(100 * r + 2 * rank + 1, results[1][1][2 * r + 1]) end
  end)
end)
