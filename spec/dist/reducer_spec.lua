-- Data-parallel gradients: averages over the ranks, in buckets, whatever the order in which gradients become ready.
local ffi = require "ffi"
local peri = require "perilune"
local dist = require "perilune.dist"
require "perilune.nn"
local worlds = require "spec.support.worlds"
local sim = require "perilune.dist.sim"
local P = require "perilune.ffi"
local C = P.C

local shapes = { { 3, 4 }, { 5 }, { 2, 2, 2 }, { 1 }, { 40, 10 } }

--- A leaf whose elements are 1, and the gradient that rank r gives it.
local function leaves(device, dtype)
  local out = {}
  for i, shape in ipairs(shapes) do out[i] = peri.ones(shape, dtype, device):requires_grad() end
  return out
end
local function upstream(rank, i, dtype, device)
  return peri.Tensor.uniform(shapes[i], -1, 1, 11, rank * 100 + i, dtype, device)
end

--- The mean over ranks as the reducer makes it: a sum in rank order, rounded after each step, divided once. (These
--- upstream numbers are multiples of 2^-23 in -1..1, so a sum of three is rounded once, whatever the order.)
local function mean(n, i, dtype, device)
  local sum = upstream(0, i, dtype, device):to_list()
  for r = 1, n - 1 do
    local x = upstream(r, i, dtype, device):to_list()
    for k = 1, #sum do sum[k] = sum[k] + x[k] end
    sum = peri.tensor(sum, dtype):to_list()
  end
  for k = 1, #sum do sum[k] = sum[k] / n end
  return peri.tensor(sum, dtype):to_list()
end

describe("Reducer", function()
  for _, bytes in ipairs { 1, 100, 0 } do -- a bucket for each parameter, some, one bucket
    worlds.each(("averages gradients, buckets of %d bytes"):format(bytes), function(world, device, n)
      for _, dtype in ipairs { "f32", "f64" } do
        local params = leaves(device, dtype)
        local reducer = dist.Reducer { group = world, params = params, bucket_bytes = bytes }
        for step = 1, 2 do
          local loss
          for k = 1, #params do
            local i = (k + world.rank_number + step) % #params + 1 -- each rank in another order
            params[i]:set_grad(nil)
            local part = (params[i] * upstream(world.rank_number, i, dtype, device)):sum()
            loss = loss and loss + part or part
          end
          loss:backward()
          for i, p in ipairs(params) do
            assert.same(mean(n, i, dtype, device), p:grad():to_list(), dtype .. " " .. i)
          end
        end
        reducer:release()
      end
    end, { sizes = { 1, 2, 3 } })
  end

  local it_alone = worlds.mpirun and function() end or it -- of a sim world: not again on every rank
  it_alone("cuts small models in parts too, which leave while the pass goes on", function()
    local counted = false
    sim.run(2, function(rank, world)
      local params = {}
      for i = 1, 4 do params[i] = peri.ones({ 2 ^ 17 }, "f32", "cpu"):requires_grad() end -- 512 KiB each
      local reducer = dist.Reducer { group = world, params = params }
      local sum = params[1]
      for i = 2, 4 do sum = sum * params[i] end
      local pass = ffi.new "peri_backward *[1]"
      local root = ffi.new("peri_tensor *[1]", peri.Tensor.ptr(sum:sum()))
      P.check(C.peri_backward_new(root, nil, 1, pass))
      if rank == 0 then
        assert.equal(C.PERI_PENDING, C.peri_backward_step(pass[0]))
        assert.equal(4, tonumber(C.peri_group_pending(world:ptr())))
        counted = true
      end
      while not counted do P.pause(1) end
      while P.check(C.peri_backward_step(pass[0])) == C.PERI_PENDING do P.pause(1) end
      C.peri_backward_release(pass[0])
      for i = 1, 4 do assert.equal(1, params[i]:grad():item(7)) end
      reducer:release()
    end)
  end)

  it_alone("lets a bucket end with a layer: its vectors stay with its matrix", function()
    local posted
    sim.run(2, function(rank, world)
      local W0, b0 = peri.ones({ 512, 512 }):requires_grad(), peri.ones({ 512 }):requires_grad() -- 1 MiB
      local W1, b1 = peri.ones({ 256, 512 }):requires_grad(), peri.ones({ 256 }):requires_grad() -- 512 KiB
      local reducer = dist.Reducer { group = world, params = { W0, b0, W1, b1 } }
      reducer:enable(false)
      local first, second = (W0 * W0):sum() + b0:sum(), W1:sum() + b1:sum()
      first:backward()
      reducer:enable(true)
      reducer:defer(true)
      second:backward()
      if rank == 0 then posted = tonumber(C.peri_group_pending(world:ptr())) end -- before rank 1 takes part
      reducer:finish()
      assert.equal(1, W1:grad():item(5))
      assert.equal(2, W0:grad():item(5))
      reducer:release()
    end)
    assert.equal(2, posted)
  end)

  worlds.each("lets a pass end when averages have set out, and waits for them in finish", function(world, device, n)
    local p, q = peri.ones({ 4 }, "f32", device):requires_grad(), peri.ones({ 3 }, "f32", device):requires_grad()
    local reducer = dist.Reducer { group = world, params = { p, q } }
    reducer:defer(true)
    for pass = 1, 3 do
      p:set_grad(nil)
      p:reshape(-1):backward(peri.full({ 4 }, world.rank_number * pass, "f32", device))
      reducer:finish()
      assert.equal(pass * (n - 1) / 2, p:grad():item(2))
      assert.is_nil(q:grad())
    end
    reducer:defer(false)
    p:set_grad(nil)
    p:reshape(-1):backward(peri.full({ 4 }, world.rank_number, "f32", device))
    assert.equal((n - 1) / 2, p:grad():item(2))
  end, { sizes = { 1, 2, 4 } })

  worlds.each("gives no gradient to what no rank has one of, as one rank does", function(world, device, n)
    local me = world.rank_number
    local reached = { -- who reaches which of three parameters, in each of the first steps; later ones repeat the last
      function(r, i) return i == 1 or i == 2 and r == 0 end, function(_, i) return i == 3 end,
      function(r, i) return i == 2 and r == n - 1 end, function(_, i) return i < 3 end,
      function(r, i) return r == i % n end }
    for _, dtype in ipairs { "f32", "f64" } do
      for _, bytes in ipairs { 1, 0 } do
        local function leaf(i) return peri.full({ i, 2 }, i, dtype, device):requires_grad() end
        local function optimizer(params)
          return peri.nn.optim.Adam { params = params, lr = 0.125, weight_decay = 0.25 }
        end
        local mine, plain = { leaf(1), leaf(2), leaf(3) }, { leaf(1), leaf(2), leaf(3) }
        local reducer = dist.Reducer { group = world, params = mine, bucket_bytes = bytes }
        local averaged, alone = optimizer(mine), optimizer(plain)
        for step = 1, 8 do
          local does = reached[math.min(step, #reached)]
          averaged:zero_grad()
          alone:zero_grad()
          local sum, whole
          for r = 0, n - 1 do
            for i = 1, 3 do
              local factor = (r - i) * step
              if does(r, i) and r == me then
                local part = (mine[i] * factor):sum()
                sum = sum and sum + part or part
              end
              if does(r, i) then
                local part = (plain[i] * (factor / n)):sum()
                whole = whole and whole + part or part
              end
            end
          end
          if sum then sum:backward() else reducer:finish() end
          whole:backward()
          averaged:step()
          alone:step()
          for i = 1, 3 do
            assert.equal(plain[i]:grad() == nil, mine[i]:grad() == nil, ("step %d, parameter %d"):format(step, i))
            local want, got = plain[i]:detach():to("f64"):reshape(-1):to_list(),
              mine[i]:detach():to("f64"):reshape(-1):to_list()
            for k = 1, #want do assert.near(want[k], got[k], 1e-6) end
          end
        end
        reducer:release()
      end
    end
  end, { sizes = { 1, 2, 3 } })

  it_alone("knows after any number of passes which rank has a gradient of what", function()
    sim.run(3, function(rank, world)
      local p, q = peri.ones({ 1 }):requires_grad(), peri.ones({ 1 }):requires_grad()
      local reducer = dist.Reducer { group = world, params = { p, q } }
      for pass = 1, 200 do -- 3^200 is beyond f32
        p:set_grad(nil)
        if rank == (pass < 150 and 2 or 0) then p:reshape(-1):backward(peri.full({ 1 }, 3)) else reducer:finish() end
        assert.equal(1, p:grad():item())
        assert.is_nil(q:grad())
      end
      reducer:release()
    end)
  end)

  worlds.each("leaves a parameter as it is while it is frozen, whatever moved it before", function(world, device, n)
    local model, x = peri.nn.Module(), peri.full({ 1, 3 }, world.rank_number + 1, "f32", device)
    model.a = peri.nn.Linear { in_features = 3, out_features = 2, device = device }
    model.b = peri.nn.Linear { in_features = 2, out_features = 1, device = device }
    local dmp = peri.DistributedModelParallel { module = model, group = world, device = device }
    local optimizer = peri.nn.optim.Adam { params = dmp:parameters(), lr = 0.1, weight_decay = 0.1 }
    local seen
    for step = 1, 4 do
      model.a.weight:requires_grad(step % 2 == 1)
      optimizer:zero_grad()
      model.b(model.a(x)):sum():backward()
      optimizer:step()
      local now = model.a.weight:detach():to("f32", "cpu"):to_table()
      if step % 2 == 0 then assert.same(seen, now) else assert.not_same(seen, now) end
      seen = now
    end
    local both = peri.tensor(seen[1], "f32", "cpu")
    world:all_reduce(both, "max"):wait()
    assert.same(seen[1], both:to_list(), n)
  end, { sizes = { 1, 2, 3 } })

  it_alone("refuses a pass while averages of the last one are on their way", function()
    sim.run(2, function(_, world)
      local p = peri.ones { 4 }:requires_grad()
      local reducer = dist.Reducer { group = world, params = { p } }
      reducer:defer(true)
      p:reshape(-1):backward(peri.ones { 4 })
      local ok, err = pcall(function() p:reshape(-1):backward(peri.ones { 4 }) end)
      assert.is_false(ok)
      assert.matches("parameter 0 got a gradient while the average of another backward pass was on its way",
        err.message)
    end)
  end)

  worlds.each("leaves a gradient that somebody has kept as it was", function(world, device, n)
    local p, q = peri.ones({ 4 }, "f32", device):requires_grad(), peri.ones({ 3 }, "f32", device):requires_grad()
    local reducer = dist.Reducer { group = world, params = { p, q } }
    local kept, average = {}, (n - 1) / 2
    for pass = 1, 4 do
      p:set_grad(nil)
      q:set_grad(nil)
      local scaled = p * (world.rank_number * pass)
      scaled:sum():backward()
      kept[pass] = pass % 2 == 1 and p:grad() or p:grad():slice(1, 1, 3) -- a part of it is enough
    end
    for pass = 1, 4 do
      for _, x in ipairs(kept[pass]:to_list()) do assert.equal(pass * average, x) end
    end
    p:reshape(-1):backward(peri.full({ 4 }, world.rank_number, "f32", device))
    assert.equal(5 * average, p:grad():item(3)) -- the averages of the pass before are averaged along
    reducer:release()
  end)

  worlds.each("averages what layers write straight to its place, used once or twice, and leaves what was kept",
    function(world, device, n)
    local linear = peri.nn.functional.linear
    -- Eighths: gradients and their sums are exact in f32, whatever the order in which a transport adds up.
    local function eighths(shape, seed, stream)
      local list = peri.Tensor.uniform(shape, -8, 8, seed, stream, "f32"):reshape(-1):to_list()
      return peri.tensor(peri.util.map(list, function(x) return math.floor(x) / 8 end), "f32", device):reshape(shape)
    end
    local function parameters()
      local list = {}
      for i, shape in ipairs { { 4, 4 }, { 4 }, { 3, 4 }, { 3 } } do list[i] = eighths(shape, 12, i):requires_grad() end
      return list
    end
    local function pass(p, rank, number)
      for i = 1, #p do p[i]:set_grad(nil) end
      local x = eighths({ 6, 4 }, 13, 10 * rank + number)
      linear(linear(linear(x, p[1], p[2]), p[1], p[2]), p[3], p[4]):sum():backward() -- the first layer twice
    end
    local params, plain, kept = parameters(), parameters(), {}
    local reducer = dist.Reducer { group = world, params = params }
    for number = 1, 3 do
      pass(params, world.rank_number, number)
      kept[number] = {}
      for i = 1, #params do kept[number][i] = (number + i) % 2 == 0 and params[i]:grad() or params[i]:grad() * 1 end
    end
    for number = 1, 3 do
      local sums = {}
      for rank = 0, n - 1 do
        pass(plain, rank, number)
        for i, q in ipairs(plain) do sums[i] = sums[i] and sums[i] + q:grad() or q:grad() * 1 end
      end
      for i, sum in ipairs(sums) do
        local means = peri.util.map(sum:reshape(-1):to_list(), function(x) return x / n end)
        assert.same(peri.tensor(means, "f32"):to_list(), kept[number][i]:reshape(-1):to_list(), number .. " " .. i)
      end
    end
    reducer:release()
  end, { sizes = { 1, 2, 3 } })

  worlds.each("takes a parameter without gradient for zeros where another rank has one", function(world, device, n)
    local params = leaves(device, "f32")
    local reducer = dist.Reducer { group = world, params = params, bucket_bytes = 64 }
    if world.rank_number == 0 then
      params[1]:reshape(-1):backward(peri.full({ 12 }, n, "f32", device))
    else
      reducer:finish()
    end
    if n > 1 or world.rank_number == 0 then assert.equal(1, params[1]:grad():item(5)) end
    assert.is_nil(params[2]:grad()) -- nobody has one
  end, { sizes = { 1, 3 } })

  worlds.each("accumulates several passes and sends after the last", function(world, device, n)
    local p = peri.ones({ 4 }, "f32", device):requires_grad()
    local reducer = dist.Reducer { group = world, params = { p } }
    reducer:enable(false)
    p:reshape(-1):backward(peri.full({ 4 }, 1, "f32", device))
    p:reshape(-1):backward(peri.full({ 4 }, 2, "f32", device))
    reducer:enable(true)
    p:reshape(-1):backward(peri.full({ 4 }, world.rank_number, "f32", device))
    assert.equal(3 + (n - 1) / 2, p:grad():item(0))
    reducer:enable(false)
    p:reshape(-1):backward(peri.full({ 4 }, world.rank_number, "f32", device))
    reducer:enable(true)
    reducer:finish()
    assert.equal(3 + (n - 1), p:grad():item(0))
  end, { sizes = { 1, 2, 4 } })

  worlds.each("accumulates means over passes", function(world, device, n)
    local p = peri.ones({ 4 }, "f32", device):requires_grad()
    local reducer = dist.Reducer { group = world, params = { p } }
    for pass = 1, 3 do
      (p * peri.full({ 4 }, world.rank_number, "f32", device)):sum():backward()
      assert.equal(pass * (n - 1) / 2, p:grad():item(0))
    end
    reducer:release()
  end, { sizes = { 1, 2, 4 } })

  worlds.each("ends a pass that starts at a parameter", function(world, device, n)
    local p = peri.ones({}, "f32", device):requires_grad()
    local reducer = dist.Reducer { group = world, params = { p } }
    p:backward(peri.full({}, world.rank_number, "f32", device))
    assert.equal((n - 1) / 2, p:grad():item(0))
    reducer:release()
  end, { sizes = { 1, 2, 4 } })

  worlds.each("ends a pass that reaches what it watches, and no parameter", function(world, device, n)
    local p, q = peri.ones({ 4 }, "f32", device):requires_grad(), peri.ones({ 4 }, "f32", device):requires_grad()
    local reducer = dist.Reducer { group = world, params = { p } }
    local out = world.rank_number == 0 and p * 8 or q * 2
    reducer:watch(out)
    reducer:watch(q) -- nothing made it
    reducer:release() -- the tape has it
    out:sum():backward()
    assert.equal(8 / n, p:grad():item(0))
    if world.rank_number > 0 then assert.equal(2, q:grad():item(0)) end
  end, { sizes = { 1, 2, 4 } })

  worlds.each("of several end together, in whatever order the ranks reach them", function(world, device, n)
    local params = leaves(device, "f32")
    local reducers = {}
    for i, p in ipairs(params) do reducers[i] = dist.Reducer { group = world, params = { p } } end
    local loss
    for k = 1, #params do
      local part = params[(k + world.rank_number) % #params + 1]:sum() * world.rank_number
      loss = loss and loss + part or part
    end
    loss:backward()
    for _, p in ipairs(params) do assert.equal((n - 1) / 2, p:grad():item(0)) end
    for _, r in ipairs(reducers) do r:release() end
  end, { sizes = { 2, 3 } })

  worlds.each("may watch one operation alone", function(world, device)
    local p, q = peri.ones({ 4 }, "f32", device):requires_grad(), peri.ones({ 4 }, "f32", device):requires_grad()
    local first, second = dist.Reducer { group = world, params = { p } }, dist.Reducer { group = world, params = { q } }
    local out = p * q
    first:watch(out)
    first:watch(out)
    assert.error_matches(function() second:watch(out) end, "another reducer watches")
  end, { sizes = { 2 } })

  worlds.each("refuses what it cannot do, by name", function(world, device)
    local p = peri.ones({ 4 }, "f32", device):requires_grad()
    local reducer = dist.Reducer { group = world, params = { p } }
    assert.error_matches(function() dist.Reducer { group = world, params = { p } } end, "already belongs to a reducer")
    assert.error_matches(function() dist.Reducer { group = world, params = { p:reshape(2, 2) } } end, "not a leaf")
    local whole = peri.ones({ 2 }, "i64", device)
    assert.error_matches(function() dist.Reducer { group = world, params = { whole } } end, "i64, allowed: f32, f64")
    local q = peri.ones({ 4 }, "f32", device)
    assert.error_matches(function() dist.Reducer { group = world, params = { q, q } } end, "are the same")
    assert.error_matches(function() dist.Reducer { group = world, params = {}, bucket_bytes = -1 } end, "%-1 bytes")
    reducer:release()
    dist.Reducer { group = world, params = { p } }:release() -- free again
  end, { sizes = { 2 } })
end)
