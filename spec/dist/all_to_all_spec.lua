-- all_to_all on lists and tpu_all_to_all: the examples of their documents, all dtypes, groups, gradients (the adjoint
-- identity), bad calls.
local dist = require "perilune.dist"
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local F = peri.nn.functional

local dtypes = { "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool", "c64", "c128" }
local parts = { c64 = 2, c128 = 2 }

local function lists(tensors)
  local out = {}
  for i, t in ipairs(tensors) do out[i] = t:to_list() end
  return out
end

--- Pieces of a tensor along dimension 1.
local function split(t, sizes)
  local out, at = {}, 0
  for i, n in ipairs(sizes) do
    out[i] = t:slice(1, at, at + n)
    at = at + n
  end
  return out
end
local function ones_list(n)
  local out = {}
  for i = 1, n do out[i] = 1 end
  return out
end
local function sequence(from, n)
  local out = {}
  for i = 1, n do out[i] = from + i - 1 end
  return out
end

--- Sum over ranks of a number.
local function total(world, x) return world:all_reduce(peri.tensor({ x }, "f64", "cpu")):wait():item() end

describe("all_to_all on lists", function()
  worlds.each("example 1: equal sizes", function(world, device)
    local rank = world.rank_number
    local input = split(peri.tensor(sequence(rank * 4, 4), "i64", device), ones_list(4))
    local output = split(peri.empty({ 4 }, "i64", device), ones_list(4))
    assert.is_nil(dist.all_to_all(output, input))
    assert.same({ { rank }, { 4 + rank }, { 8 + rank }, { 12 + rank } }, lists(output))
  end, { sizes = { 4 } })

  worlds.each("example 2: uneven sizes", function(world, device)
    local rank = world.rank_number
    local splits = { { 2, 2, 1, 1 }, { 3, 2, 2, 2 }, { 2, 1, 1, 1 }, { 2, 2, 2, 1 } }
    local counts = { 6, 9, 5, 7 }
    local input = split(peri.tensor(sequence(rank * 10, counts[rank + 1]), "i64", device), splits[rank + 1])
    local output = {}
    for r = 1, 4 do output[r] = peri.empty({ splits[r][rank + 1] }, "i64", device) end
    dist.all_to_all(output, input, world)
    assert.same(({
      { { 0, 1 }, { 10, 11, 12 }, { 20, 21 }, { 30, 31 } },
      { { 2, 3 }, { 13, 14 }, { 22 }, { 32, 33 } },
      { { 4 }, { 15, 16 }, { 23 }, { 34, 35 } },
      { { 5 }, { 17, 18 }, { 24 }, { 36 } },
    })[rank + 1], lists(output))
  end, { sizes = { 4 } })

  worlds.each("example 3: complex numbers", function(world, device)
    local rank, numbers = world.rank_number, {}
    for i = 1, 4 do numbers[i] = { 4 * rank + i, 4 * rank + i } end
    local input = split(peri.tensor(numbers, "c64", device), ones_list(4))
    local output = split(peri.empty({ 4 }, "c64", device), ones_list(4))
    dist.all_to_all(output, input)
    local want = {}
    for r = 0, 3 do want[r + 1] = { 4 * r + rank + 1, 4 * r + rank + 1 } end
    assert.same(want, lists(output))
  end, { sizes = { 4 } })

  worlds.each("any dtype, any shapes, views, empty parts, asynchronously", function(world, device, n)
    local rank = world.rank_number
    for _, dtype in ipairs(dtypes) do
      local function rows(from, to) return (from * 2 + to) % 3 end
      local function block(from, to)
        local data = {}
        for i = 1, rows(from, to) do
          local v = (from * 5 + to * 3 + i) % 7
          data[i] = parts[dtype] and { { v, -v }, { i, 0 } } or dtype == "bool" and { v % 2, 1 } or { v, i }
        end
        if #data == 0 then return peri.empty({ 0, 2 }, dtype, device) end
        return peri.tensor(data, dtype, device)
      end
      local input, output, want = {}, {}, {}
      for r = 0, n - 1 do
        input[r + 1] = block(rank, r):transpose(1, 2) -- [2, rows]: no buffer in rank order
        output[r + 1] = peri.empty({ rows(r, rank) * 2 }, dtype, device)
        want[r + 1] = block(r, rank):transpose(1, 2):contiguous():to_list()
      end
      local work = dist.all_to_all(output, input, nil, true)
      assert.equal(output, work:wait())
      assert.equal(output, work:wait())
      assert.same(want, lists(output), dtype)
    end
  end)

  worlds.each("ranks outside the group get nothing", function(world, device, n)
    local rank = world.rank_number
    local members = {}
    for r = 1, n - 1 do members[r] = n - r end -- all but 0, backwards
    local group = dist.new_group(members, "all but 0")
    local input, output = {}, {}
    for i = 1, n - 1 do
      input[i] = peri.full({ 2 }, rank * 10 + i, "f32", device)
      output[i] = peri.full({ 2 }, -1, "f32", device)
    end
    local work = dist.all_to_all(output, input, group, true)
    if rank == 0 then
      assert.equal(dist.NON_GROUP_MEMBER, group)
      assert.is_nil(work)
      for i = 1, n - 1 do assert.equal(-1, output[i]:item(0)) end
    else
      work:wait()
      for i = 1, n - 1 do assert.equal((n - i) * 10 + group.rank_number + 1, output[i]:item(0)) end
    end
  end, { sizes = { 2, 3, 4, 5, 8 } })

  worlds.each("its gradient is its adjoint", function(world, device, n)
    local rank = world.rank_number
    for _, dtype in ipairs { "f32", "f64" } do
      local function size(from, to) return (from + 2 * to) % 4 end
      local input, output, leaves = {}, {}, {}
      for r = 0, n - 1 do
        leaves[r + 1] = peri.Tensor.normal({ size(rank, r), 3 }, 0, 1, 7, rank * n + r, dtype,
          device):requires_grad(r ~= 1)
        input[r + 1] = leaves[r + 1]
        output[r + 1] = peri.empty({ 3, size(r, rank) }, dtype, device)
      end
      dist.functional.all_to_all(output, input):wait()
      local y, loss = 0, nil
      for r = 0, n - 1 do
        local cotangent = peri.Tensor.normal({ 3, size(r, rank) }, 0, 1, 8, rank * n + r, dtype, device)
        local product = F.mul(output[r + 1], cotangent):sum()
        y = y + product:item()
        loss = loss and F.add(loss, product) or product
      end
      loss:backward()
      local x = 0
      for r = 0, n - 1 do
        local leaf = leaves[r + 1]
        if r == 1 then
          assert.is_nil(leaf:grad())
          -- its share of the inner product, from the definition: the cotangent of what rank 1 got from here
          local cotangent = peri.Tensor.normal({ 3, size(rank, r) }, 0, 1, 8, r * n + rank, dtype,
            device):reshape(size(rank, r), 3)
          x = x + F.mul(leaf, cotangent):sum():item()
        else
          x = x + F.mul(leaf, leaf:grad()):sum():item()
        end
      end
      local a, b = total(world, y), total(world, x)
      assert.is_true(math.abs(a - b) <= (dtype == "f64" and 1e-12 or 1e-4) * (1 + math.abs(a)),
        ("%g and %g"):format(a, b))
    end
  end)

  worlds.each("a rank without inputs of its own takes part in the backward pass", function(world, device, n)
    local rank, input = world.rank_number, {}
    for r = 1, n do input[r] = peri.full({ 2 }, rank, "f32", device) end
    if rank > 0 then for r = 1, n do input[r]:requires_grad() end end
    local output = dist.functional.all_to_all(nil, input):wait()
    local loss
    for r = 1, n do
      local s = F.mul(output[r], rank + 1):sum()
      loss = loss and F.add(loss, s) or s
    end
    loss:backward()
    for r = 1, n do
      if rank > 0 then assert.same({ r, r }, input[r]:grad():to_list()) else assert.is_nil(input[r]:grad()) end
    end
  end, { sizes = { 2, 3 } })

  worlds.each("bad calls are errors that leave the group usable", function(world, device, n)
    local function list(count, dtype, size)
      local out = {}
      for i = 1, count do out[i] = peri.ones({ size or 1 }, dtype or "f32", device) end
      return out
    end
    local function bad(pattern, ...)
      local args = { n = select("#", ...), ... }
      assert.error_matches(function() dist.all_to_all(unpack(args, 1, args.n)) end, pattern)
    end
    bad("%d+ tensors in input_tensor_list for the " .. n .. " ranks", list(n), list(n + 1))
    bad("%d+ tensors in output_tensor_list", list(n - 1), list(n))
    bad("output_tensor_list is a nil, wanted a list", nil, list(n))
    bad("group is a string", list(n), list(n), "world")
    local mixed = list(n)
    mixed[n] = 5
    bad("input_tensor_list%[" .. n .. "%] is a number, wanted a tensor", list(n), mixed)
    local dtyped = list(n)
    dtyped[n] = peri.ones({ 1 }, "i64", device)
    bad("output " .. n - 1 .. ".*i64", dtyped, list(n))
    bad("elements for itself and expects", list(n, "f32", 2), list(n))
    assert.error_matches(function() dist.functional.all_to_all(list(n), list(n), world):wait()[1]:requires_grad() end,
      "not a leaf")
    dist.all_to_all(list(n), list(n))
    if n > 1 then -- sizes that two ranks see differently
      local output, input = list(n), list(n)
      if world.rank_number == 0 then input[2] = peri.ones({ 3 }, "f32", device) end
      local ok, err = pcall(dist.all_to_all, output, input)
      if not ok then
        assert.is_true(err.name == "EMISMATCH" or err.name == "EPEER" or err.name == "EABORTED", tostring(err))
      end
      if world.rank_number == 1 then assert.is_false(ok) end
    end
  end, { sizes = { 1, 3 }, only = "sim" })
end)

describe("tpu_all_to_all", function()
  worlds.each("the example of its document", function(world, device)
    local rank = world.rank_number
    local input = peri.tensor(rank == 0 and { { 1, 2 } } or { { 3, 4 } }, "f32", device)
    local got = dist.tpu_all_to_all { input = input, group_assignment = { { 0, 1 } }, concat_dimension = 1,
      split_dimension = 2, split_count = 2 }:wait()
    assert.same(rank == 0 and { { 1 }, { 3 } } or { { 2 }, { 4 } }, got:to_table())
  end, { sizes = { 2 } })

  --- Assignments of n ranks, rows in any order.
  local function assignments(n)
    local one, reverse, alone = { {} }, { {} }, {}
    for r = 0, n - 1 do
      one[1][r + 1], reverse[1][n - r], alone[r + 1] = r, r, { r }
    end
    local out = { one, reverse, alone }
    if n == 4 then
      out[4] = { { 2, 0 }, { 1, 3 } }
      out[5] = { { 3, 1 }, { 0, 2 } }
    elseif n == 8 then
      out[4] = { { 7, 0, 5, 2 }, { 1, 6, 3, 4 } }
      out[5] = { { 3, 1 }, { 0, 7 }, { 2, 6 }, { 5, 4 } }
    end
    return out
  end

  local function row_of(assignment, rank)
    for _, row in ipairs(assignment) do
      for _, r in ipairs(row) do if r == rank then return row end end
    end
  end

  worlds.each("any assignment, dimensions and dtype", function(world, device, n)
    local rank = world.rank_number
    for k, assignment in ipairs(assignments(n)) do
      local row = row_of(assignment, rank)
      local count = #row
      local shape = { 2 * count, 3, count }
      for split_at = 1, 3, 2 do
        for concat_at = 1, 3 do
          local dtype = dtypes[(k * 5 + split_at * 3 + concat_at) % #dtypes + 1]
          if dtype == "bool" then dtype = "i32" end
          local function input_of(r)
            local x = peri.Tensor.uniform(shape, 0, 100, 3, r, "f32", device)
            return x:to("i32"):to(dtype)
          end
          local got = dist.tpu_all_to_all { input = input_of(rank), group_assignment = assignment, split_count = count,
            split_dimension = split_at, concat_dimension = concat_at }:wait()
          local place, blocks = 0, {}
          for i, r in ipairs(row) do if r == rank then place = i - 1 end end
          local step = shape[split_at] / count
          for i, r in ipairs(row) do
            blocks[i] = input_of(r):to("f32"):slice(split_at, place * step, (place + 1) * step)
          end
          local want = F.cat(blocks, concat_at)
          assert.same(want:shape(), got:shape())
          assert.same(want:to_table(), got:to("f32"):to_table())
        end
      end
    end
  end, { sizes = { 1, 2, 3, 4, 5, 8 } })

  worlds.each("tensors of one dimension, and of six", function(world, device, n)
    local rank, row, all = world.rank_number, {}, {}
    for r = 0, n - 1 do row[r + 1] = r end
    for r = 0, n - 1 do
      for i = 0, 1 do all[#all + 1] = 100 * r + 2 * rank + i end
    end
    local x = peri.tensor(sequence(100 * rank, 2 * n), "i64", device)
    local got = dist.tpu_all_to_all { input = x, group_assignment = { row }, split_count = n, split_dimension = 1,
      concat_dimension = 1 }:wait()
    assert.same(all, got:to_list())
    local deep = dist.tpu_all_to_all { input = x:reshape(1, 1, n, 1, 2, 1), group_assignment = { row }, split_count = n,
      split_dimension = 3, concat_dimension = 6 }:wait()
    assert.same({ 1, 1, 1, 1, 2, n }, deep:shape())
    local turned = {}
    for i = 0, 1 do
      for r = 0, n - 1 do turned[#turned + 1] = 100 * r + 2 * rank + i end
    end
    assert.same(turned, deep:to_list())
  end)

  worlds.each("its gradient is its adjoint", function(world, device, n)
    local rank = world.rank_number
    for k, assignment in ipairs(assignments(n)) do
      local count = #row_of(assignment, rank)
      local x = peri.Tensor.normal({ 3, 2 * count, count }, 0, 1, k, rank, "f64", device):requires_grad()
      for _, d in ipairs { { 2, 1 }, { 2, 2 }, { 3, 2 } } do
        x:set_grad(nil)
        local y = dist.tpu_all_to_all { input = x, group_assignment = assignment, split_count = count,
          split_dimension = d[1], concat_dimension = d[2] }:wait()
        local cotangent = peri.Tensor.normal(y:shape(), 0, 1, 50 + k, rank, "f64", device)
        local inner = F.mul(y, cotangent):sum()
        inner:backward()
        local a, b = total(world, inner:item()), total(world, F.mul(x, x:grad()):sum():item())
        assert.is_true(math.abs(a - b) <= 1e-11 * (1 + math.abs(a)), ("%g and %g"):format(a, b))
      end
    end
  end, { sizes = { 1, 2, 3, 4, 5, 8 } })

  worlds.each("bad calls are errors on all ranks, and the group stays usable", function(world, device, n)
    local x = peri.ones({ n, 2 * n }, "f32", device)
    local all, twice, outside, few = { {} }, { {} }, { {} }, { {} }
    for r = 0, n - 1 do
      all[1][r + 1], twice[1][r + 1], outside[1][r + 1] = r, 0, r + 1
      if r < n - 1 then few[1][r + 1] = r end
    end
    local function bad(pattern, changes)
      local args = { input = x, group_assignment = all, split_count = n, split_dimension = 2, concat_dimension = 1 }
      for name, value in pairs(changes) do args[name] = value end
      assert.error_matches(function() dist.tpu_all_to_all(args) end, pattern)
    end
    bad("split_count is " .. n + 1 .. ", allowed: the " .. n, { split_count = n + 1 })
    bad("split_count is 0", { split_count = 0 })
    bad("rank 0 twice in group_assignment", { group_assignment = twice })
    bad("a rank of group_assignment is " .. n, { group_assignment = outside })
    bad("group_assignment of 1 x " .. n - 1, { group_assignment = few, split_count = n - 1 })
    bad("row 2 of group_assignment has 2 ranks, the first has 1", { group_assignment = { { 0 }, { 1, 2 } } })
    bad("group_assignment is no list of rows", { group_assignment = { 0, 1 } })
    bad("split_dimension is 3", { split_dimension = 3 })
    bad("concat_dimension is 0", { concat_dimension = 0 })
    bad("input is a number", { input = 3 })
    bad("does not divide by split_count", { input = peri.ones({ 2, n + 1 }, "f32", device) })
    assert.equal(n, dist.tpu_all_to_all { input = x, group_assignment = all, split_count = n, split_dimension = 2,
      concat_dimension = 1 }:wait():size(1) / n)
  end, { sizes = { 2, 3 } })

  worlds.each("ranks that disagree on shapes or assignments find out", function(world, device, n)
    local rank, row, other = world.rank_number, {}, {}
    for r = 0, n - 1 do row[r + 1], other[n - r] = r, r end
    local ok, err = pcall(function()
      dist.tpu_all_to_all { input = peri.ones({ 2, n }, "f32", device),
        group_assignment = { rank == 1 and other or row }, split_count = n, split_dimension = 2,
        concat_dimension = 1 }:wait()
    end)
    assert.is_false(ok)
    assert.equal("EMISMATCH", err.name)
    assert.matches("rank 1 posted", err.message)
  end, { sizes = { 2, 3 }, only = "sim" })
end)
