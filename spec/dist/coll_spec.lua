-- Collective operations: every kind, on every dtype, device and world.
-- machines: 2,2
-- cuda: always
local peri = require "perilune"
local worlds = require "spec.support.worlds"

local dtypes = { "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool", "c64", "c128" }
local numbers = { "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8" }
local parts = { c64 = 2, c128 = 2 }

--- rows x 2 elements whose values tell rank, row and column apart, small enough for every dtype. Offset shifts the row
--- number.
local function mark(rank, row, column) return (rank * 7 + row * 3 + column * 5) % 11 end
local function block(rank, rows, dtype, device, offset)
  local data = {}
  for i = 1, rows do
    data[i] = {}
    for j = 1, 2 do
      local v = mark(rank, i + (offset or 0), j)
      data[i][j] = parts[dtype] and { v, -v } or dtype == "bool" and v % 2 or v
    end
  end
  if rows == 0 then return peri.empty({ 0, 2 }, dtype, device) end
  return peri.tensor(data, dtype, device)
end

--- What `block` holds, as a flat list appended to `list`.
local function append(list, rank, rows, dtype, offset)
  for i = 1, rows do
    for j = 1, 2 do
      local v = mark(rank, i + (offset or 0), j)
      list[#list + 1] = dtype == "bool" and v % 2 or v
      if parts[dtype] then list[#list + 1] = -v end
    end
  end
  return list
end

describe("collectives", function()
  worlds.each("broadcast from every root, all dtypes", function(world, device, n)
    for k, dtype in ipairs(dtypes) do
      local root = (k - 1) % n
      local t = world:broadcast(block(world.rank_number, 3, dtype, device), root):wait()
      assert.same(append({}, root, 3, dtype), t:to_list(), dtype)
    end
  end, { by_device = true })

  worlds.each("ranks that do not agree on a broadcast's root find out", function(world, device, n)
    local rank, all = world.rank_number, {}
    for r = 1, n do all[r] = r - 1 end
    for k, root in ipairs { rank, rank == 0 and 0 or 1, rank == n - 1 and rank or 0 } do
      for _, rows in ipairs { 3, 100000 } do -- in messages, and copied
        local group = world:new_group(all, ("roots %d %d"):format(k, rows))
        local ok, err = pcall(function()
          group:broadcast(peri.ones({ rows, 2 }, "f32", device), root):wait()
          group:barrier():wait() -- a rank that heard from its root may go on to here
        end)
        assert.is_false(ok)
        assert.matches("the ranks disagree: .*broadcast .* from rank %d.*broadcast .* from rank %d", err.message)
      end
    end
  end, { sizes = { 2, 3, 5 } })

  worlds.each("all_gather, equal and by rows, all dtypes", function(world, device, n)
    local rank = world.rank_number
    for _, dtype in ipairs(dtypes) do
      local equal, rows, uneven = {}, {}, {}
      for r = 0, n - 1 do
        append(equal, r, 2, dtype)
        rows[r + 1] = (r * 2) % 3
        append(uneven, r, rows[r + 1], dtype)
      end
      local a = world:all_gather(block(rank, 2, dtype, device))
      local b = world:all_gather_v(block(rank, rows[rank + 1], dtype, device), rows)
      assert.same(uneven, b:wait():to_list(), dtype)
      assert.same(equal, a:wait():to_list(), dtype)
    end
  end, { by_device = true })

  worlds.each("all_to_all, equal and by rows, all dtypes", function(world, device, n)
    local rank = world.rank_number
    for _, dtype in ipairs(dtypes) do
      local equal, uneven, send, recv, total = {}, {}, {}, {}, 0
      for r = 0, n - 1 do
        append(equal, r, 1, dtype, rank)
        send[r + 1], recv[r + 1] = (rank + 2 * r) % 3, (r + 2 * rank) % 3
        total = total + send[r + 1]
      end
      for r = 0, n - 1 do
        local before = 0
        for k = 0, rank - 1 do before = before + (r + 2 * k) % 3 end
        append(uneven, r, recv[r + 1], dtype, before)
      end
      local a = world:all_to_all(block(rank, n, dtype, device))
      local b = world:all_to_all_v(block(rank, total, dtype, device), send, recv)
      assert.same(equal, a:wait():to_list(), dtype)
      assert.same(uneven, b:wait():to_list(), dtype)
    end
  end, { by_device = true })

  worlds.each("all_reduce and reduce_scatter combine, all dtypes", function(world, device, n)
    local rank = world.rank_number
    for _, dtype in ipairs(numbers) do
      for _, op in ipairs { "sum", "min", "max" } do
        local whole, rows, first = {}, {}, 0
        for r = 0, n - 1 do
          rows[r + 1] = (r + 1) % 3
          if r < rank then first = first + rows[r + 1] end
        end
        local total = 0
        for r = 1, n do total = total + rows[r] end
        for i = 1, math.max(total, n) do
          for j = 1, 2 do
            local v = mark(0, i, j)
            for r = 1, n - 1 do
              local x = mark(r, i, j)
              v = op == "sum" and v + x or op == "min" and math.min(v, x) or math.max(v, x)
            end
            whole[#whole + 1] = v
          end
        end
        local function cut(from, count)
          local out = {}
          for i = 1, count do out[i] = whole[from + i] end
          return out
        end
        local a = world:all_reduce(block(rank, n, dtype, device), op)
        local b = world:reduce_scatter(block(rank, n, dtype, device), op)
        local c = world:reduce_scatter_v(block(rank, total, dtype, device), rows, op)
        local what = dtype .. " " .. op
        assert.same(cut(0, 2 * n), a:wait():to_list(), what)
        assert.same(cut(2 * rank, 2), b:wait():to_list(), what)
        assert.same(cut(2 * first, 2 * rows[rank + 1]), c:wait():to_list(), what)
      end
    end
  end, { by_device = true })

  worlds.each("complex sums, and bool as and / or", function(world, device, n)
    local rank = world.rank_number
    local want = { n * (n - 1) / 2, n, n, -n * (n - 1) / 2 }
    for _, dtype in ipairs { "c64", "c128" } do
      local t = peri.tensor({ { rank, 1 }, { 1, -rank } }, dtype, device)
      assert.same(want, world:all_reduce(t):wait():to_list())
      assert.error_matches(function() world:all_reduce(t, "max") end, "no order")
    end
    local b = peri.tensor({ rank == 0 and 1 or 0, 1, rank == 0 and 0 or 1 }, "bool", device)
    local low, high = b:to "bool", peri.tensor(b:to_list(), "bool", device)
    assert.same({ n == 1 and 1 or 0, 1, 0 }, world:all_reduce(peri.tensor(low:to_list(), "bool", device),
      "min"):wait():to_list())
    assert.same({ 1, 1, n == 1 and 0 or 1 }, world:all_reduce(high, "max"):wait():to_list())
    assert.error_matches(function() world:all_reduce(high) end, "sum of bool")
  end, { by_device = true })

  worlds.each("sums are made in rank order, 16-bit floats in f32", function(world, device, n)
    local rank, count = world.rank_number, 3000
    local function values(r, dtype) return peri.Tensor.normal({ count }, 0, 3, 5, r, "f32", "cpu"):to(dtype) end
    local _, ordered = world:transport_of(device)
    for _, dtype in ipairs(ordered and { "f32", "bf16", "f16" } or { "bf16", "f16" }) do
      local want, low = nil, dtype ~= "f32"
      for r = 0, n - 1 do
        local x = values(r, dtype):to "f32":to_list()
        if not want then want = x
        else
          for i = 1, count do want[i] = want[i] + x[i] end
          want = peri.tensor(want, "f32"):to_list() -- round to f32 after each step
        end
      end
      if low then want = peri.tensor(want, "f32"):to(dtype):to_list() end
      assert.same(want, world:all_reduce(values(rank, dtype):to(nil, device)):wait():to_list(), dtype)
    end
  end)

  worlds.each("views in, empty tensors, large tensors", function(world, device, n)
    local rank = world.rank_number
    local base = peri.tensor({ { 1, 2, 3 }, { 4, 5, 6 } }, "f32", device)
    local turned = world:all_gather(base:transpose(1, 2)):wait()
    assert.same({ 3 * n, 2 }, turned:shape())
    assert.same({ 1, 4, 2, 5, 3, 6 }, turned:slice(1, 3 * rank, 3 * rank + 3):reshape(-1):to_list())
    assert.same({ 0 }, world:all_reduce(peri.empty({ 0 }, "f32", device)):wait():shape())
    local none = {}
    for r = 1, n do none[r] = 0 end
    assert.same({ 0, 4 }, world:all_to_all_v(peri.empty({ 0, 4 }, "f32", device), none, none):wait():shape())
    local big = world:all_reduce(peri.full({ 70000 }, rank + 1, "f32", device)):wait():to_list()
    for i = 1, 70000, 777 do assert.equal(n * (n + 1) / 2, big[i]) end
  end, { by_device = true })

  worlds.each("many in flight, waited for in another order", function(world, device, n)
    local rank, flying = world.rank_number, {}
    for i = 1, 20 do
      flying[i] = i % 2 == 0 and world:all_reduce(peri.full({ i }, rank + i, "f64", device)) or world:barrier()
    end
    for i = 20, 1, -1 do
      local t = flying[i]:wait()
      assert.equal(t, flying[i]:wait()) -- waiting again is the same
      if i % 2 == 0 then assert.equal(n * (n - 1) / 2 + n * i, t:item(i - 1)) end
    end
  end, { by_device = true })

  worlds.each("dropped works go on, and leak nothing", function(world, device, n)
    for _ = 1, 5 do world:all_reduce(peri.ones({ 100 }, "f32", device)) end
    collectgarbage()
    collectgarbage()
    assert.equal(n, world:all_reduce(peri.ones({ 1 }, "f32", device)):wait():item())
  end, { by_device = true })

  worlds.each("groups of some ranks work beside each other", function(world, device, n)
    local rank, even, odd, reverse = world.rank_number, {}, {}, {}
    for r = 0, n - 1 do
      local list = r % 2 == 0 and even or odd
      list[#list + 1] = r
      reverse[n - r] = r
    end
    local mine = rank % 2 == 0 and even or odd
    local g = world:new_group(mine, rank % 2 == 0 and "even" or "odd")
    local back = world:new_group(reverse, "back")
    assert.equal(n - 1 - rank, back.rank_number)
    assert.equal(#mine, g.world_size)
    assert.equal(rank, g:global_rank(g.rank_number))
    local a = g:all_reduce(peri.full({ 2 }, rank, "f32", device))
    local b = back:all_gather(peri.full({ 1 }, rank, "f32", device))
    local c = world:all_reduce(peri.full({ 1 }, 1, "f32", device))
    local sum = 0
    for _, r in ipairs(mine) do sum = sum + r end
    assert.equal(n, c:wait():item())
    assert.same(reverse, b:wait():to_list())
    assert.same({ sum, sum }, a:wait():to_list())
    if n > 1 then
      local outside = world:new_group({ (rank + 1) % n }, "not me")
      assert.is_nil(outside)
    end
    -- a second group of the same list and name is another group
    local again = world:new_group(mine, rank % 2 == 0 and "even" or "odd")
    local x, y = again:barrier(), g:barrier()
    x:wait()
    y:wait()
  end, { by_device = true })

  worlds.each("tags must agree, and do", function(world)
    world:barrier(77):wait()
  end)
end)

describe("topology", function()
  worlds.each("intra-node and cross-node groups", function(world, device, n)
    local rank = world.rank_number
    assert.equal(rank % 2, world.local_rank)
    assert.equal(2, world.local_size)
    assert.equal(math.floor(rank / 2), world:node(rank))
    local intra, cross = world:intra_node(), world:cross_node()
    assert.equal(2, intra.world_size)
    assert.equal(n / 2, cross.world_size)
    assert.equal(math.floor(rank / 2), cross.rank_number)
    assert.equal(1, cross.local_size)
    local base = rank - rank % 2
    assert.equal(2 * base + 1, intra:all_reduce(peri.full({ 1 }, rank, "f32", device)):wait():item())
    local sum = 0
    for r = rank % 2, n - 1, 2 do sum = sum + r end
    assert.equal(sum, cross:all_reduce(peri.full({ 1 }, rank, "f32", device)):wait():item())
  end, { sizes = { 2, 4, 8 }, local_size = 2, devices = { "cpu" } })

  worlds.each("unequal nodes have no cross-node groups", function(world)
    local some = world:new_group({ 0, 1, 2 }, "some")
    if some then assert.error_matches(function() some:cross_node() end, "allowed: equal numbers") end
  end, { sizes = { 4 }, local_size = 2, devices = { "cpu" } })
end)

describe("what collectives refuse", function()
  worlds.each("is named, and leaves the group usable", function(world, device, n)
    local rank = world.rank_number
    local t = peri.ones({ 2, 3 }, "f32", device)
    assert.error_matches(function() world:broadcast(t, n) end, "root " .. n .. ", allowed: 0%.%." .. n - 1)
    assert.error_matches(function() world:all_reduce(t:transpose(1, 2)) end, "not contiguous")
    assert.error_matches(function() world:all_reduce(t, "mean") end, "'mean', allowed: sum, min, max")
    assert.error_matches(function() world:all_gather(t, peri.ones({ 2 * n, 4 }, "f32", device)) end, "is not " .. n
      .. " times")
    assert.error_matches(function() world:all_gather(t, peri.ones({ 2 * n, 3 }, "f64", device)) end, "wanted f64")
    assert.error_matches(function() world:all_to_all_v(t, { 1 }, { 1, 2, 3, 4, 5, 6, 7, 8, 9 }) end, "entries for the")
    local rows, negative = {}, {}
    for r = 1, n do rows[r], negative[r] = 2, 2 end
    negative[1] = -1
    assert.error_matches(function() world:all_to_all_v(t, rows, negative, peri.ones({ 1, 3 }, "f32", device)) end,
      "%-1 rows for rank 0")
    if n > 1 then
      assert.error_matches(function() world:all_to_all_v(t, rows, rows) end, "input splits sum to " .. 2 * n .. " rows")
      assert.error_matches(function() world:reduce_scatter(peri.ones({ n + 1, 2 }, "f32", device)) end, "multiples")
      local elsewhere = peri.ones({ 2 * n, 3 }, "f32", device == "cpu" and "opaque" or "cpu")
      assert.error_matches(function() world:all_gather(t, elsewhere) end, "different devices")
    end
    assert.error_matches(function() world:all_to_all(t, t) end, n == 1 and "overlap" or "overlap")
    assert.error_matches(function() world:new_group({ 0, 0 }, "twice") end, n == 1 and "2 ranks" or "rank 0 twice")
    assert.error_matches(function() world:new_group({ n }, "beyond") end, "rank " .. n .. " for group 'beyond'")
    assert.error_matches(function() world:new_group({}, "nobody") end, "0 ranks")
    assert.error_matches(function() world:timeout(-1) end, "%-1 s")
    assert.error_matches(function() world:global_rank(n) end, "allowed: 0%.%.")
    assert.is_true(world:is_healthy())
    assert.equal(n, world:all_reduce(peri.ones({ 1 }, "f32", device)):wait():item())
    assert.equal(rank, world:rank())
  end, { devices = { "cpu", "opaque" }, sizes = { 1, 2, 3 } })
end)
