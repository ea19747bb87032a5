-- Autocast and the precision of products, as PyTorch has them: which operation runs in which dtype, values, gradients,
-- regions.
-- cuda: always
local ffi = require "ffi"
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local F = peri.nn.functional
local C = peri.ffi.C

local function random(shape, seed, device) return peri.Tensor.uniform(shape, -1, 1, seed, 0, "f32", device) end
local function bf16(t) return t:to "bf16" end
local function list(t) return t:to("f64", "cpu"):reshape(-1):to_list() end
local function same(a, b, what)
  assert.equal(a:dtype(), b:dtype(), what)
  assert.same(list(a), list(b), what)
end
local function close(want, got, tolerance, what)
  want, got = list(want), list(got)
  assert.equal(#want, #got)
  for i = 1, #want do
    if math.abs(want[i] - got[i]) > tolerance * (1 + math.abs(want[i])) then
      error(("%s: element %d is %.9g, wanted %.9g"):format(what, i, got[i], want[i]))
    end
  end
end

for _, device in ipairs(require "spec.support.devices") do
  local function region(f, ...) return peri.autocast({ device = device, dtype = "bf16" }, f, ...) end

  describe("autocast on " .. device, function()
    it("runs operations in the dtypes of PyTorch's lists", function()
      peri.scope(function()
        local x, y, w, b = random({ 6, 8 }, 1, device), random({ 6, 8 }, 2, device), random({ 8, 8 }, 3, device),
          random({ 8 }, 4, device)
        local positive, ids = x:affine(0.4, 0.6), peri.tensor({ 0, 1, 2, 3, 4, 5 }, "i64", device)
        local h, hp = bf16(y), bf16(positive)
        local low = {
          linear = function() return F.linear(x, w, b) end, ["linear of both"] = function() return F.linear(h, w) end,
          ["linear and relu"] = function() return F.linear(x, w, b, F.activations.relu) end,
          ["linear and sigmoid"] = function() return F.linear(x, w, b, F.activations.sigmoid) end,
          matmul = function() return F.matmul(x, w) end,
          bmm = function() return F.bmm(x:reshape(1, 6, 8), w:reshape(1, 8, 8)) end,
          interaction = function() return F.interaction(x, random({ 6, 2, 8 }, 5, device)) end,
          cross_net = function() return F.cross_net(h, nil, { w }, { b }) end, relu = function() return h:relu() end,
          sigmoid = function() return h:sigmoid() end, tanh = function() return h:tanh() end,
          silu = function() return h:silu() end, gelu = function() return h:gelu() end,
          abs = function() return h:abs() end, affine = function() return h * 2 + 1 end,
          add = function() return h + h end, mul = function() return h * h end, div = function() return h / hp end,
          cat = function() return F.cat { h, h } end, stack = function() return F.stack { h, h } end,
          mean = function() return h:mean() end, max = function() return (h:max(2)) end,
          dropout = function() return F.dropout(h, 0.5, 1, 2) end, transpose = function() return h:transpose(1, 2) end,
          split = function() return F.split(h, { 2, 4 })[2] end, muladd = function() return F.muladd(h, h, h) end,
        }
        local wide = {
          exp = function() return h:exp() end, log = function() return hp:log() end,
          pow = function() return hp:pow(1.5) end, square = function() return h:square() end,
          reciprocal = function() return hp:reciprocal() end, softplus = function() return h:softplus() end,
          prod = function() return h:prod(2) end, cumsum = function() return h:cumsum(2) end,
          cumprod = function() return h:cumprod(2) end, norm = function() return h:norm() end,
          sum = function() return h:sum() end, softmax = function() return h:softmax(2) end,
          log_softmax = function() return h:log_softmax(2) end,
          layer_norm = function() return F.layer_norm(h, 1, b, b) end,
          bce_with_logits = function() return F.binary_cross_entropy_with_logits(h, positive) end,
          bce = function() return F.binary_cross_entropy(h:sigmoid(), positive) end,
          mse = function() return F.mse_loss(h, y) end, cross_entropy = function() return F.cross_entropy(h, ids) end,
          ["cross_net of f32"] = function() return F.cross_net(x, nil, { w }, { b }) end,
          ["add of both"] = function() return h + x end, ["mul of both"] = function() return x * h end,
          ["muladd of both"] = function() return F.muladd(x, h, x) end,
          ["cat of both"] = function() return F.cat({ h, x }, 2) end,
          ["stack of both"] = function() return F.stack { x, h } end, ["relu of f32"] = function() return x:relu() end,
        }
        for name, f in peri.util.ordered(low) do assert.equal("bf16", region(f):dtype(), name) end
        for name, f in peri.util.ordered(wide) do assert.equal("f32", region(f):dtype(), name) end
        local d = x:to "f64"
        assert.equal("f64", region(F.linear, d, w:to "f64"):dtype())
        assert.equal("f64", region(F.matmul, d, w:to "f64"):dtype())
        assert.equal("f32", F.linear(x, w):dtype()) -- after it
      end)
    end)

    it("keeps 16-bit floats outside of a region, and joins them with f32 to f32", function()
      peri.scope(function()
        local x, h = random({ 3, 4 }, 1, device), bf16(random({ 3, 4 }, 2, device))
        for name, f in peri.util.ordered { exp = function() return h:exp() end, sum = function() return h:sum() end,
          softmax = function() return h:softmax(2) end, linear = function() return F.linear(h, h) end,
          matmul = function() return F.matmul(h, h:transpose(1, 2)) end } do
          assert.equal("bf16", f():dtype(), name)
        end
        assert.equal("f32", (h + x):dtype())
        assert.error_matches(function() F.linear(x, h) end, "x is f32 %[3, 4%], wanted bf16")
        assert.error_matches(function() F.matmul(x, h:transpose(1, 2)) end, "b is bf16")
      end)
    end)

    it("multiplies what bf16 has, adds in f32 and rounds once", function()
      peri.scope(function()
        for i, s in ipairs { { 5, 7, 3 }, { 1, 1, 1 }, { 64, 130, 33 }, { 3, 0, 2 }, { 0, 4, 2 } } do
          local x, w, b = random({ s[1], s[2] }, i, device), random({ s[3], s[2] }, 10 + i, device),
            random({ s[3] }, 20 + i, device)
          local exact = F.linear(bf16(x):to "f64", bf16(w):to "f64", bf16(b):to "f64")
          local got = region(F.linear, x, w, b)
          close(exact, got, 2 ^ -8 + 1e-6, "linear")
          close(exact:to("f32"):to("bf16"), got, 2 ^ -7, "rounded")
          close(exact:relu(), region(F.linear, x, w, b, F.activations.relu), 2 ^ -8 + 1e-6, "relu")
          close(exact:tanh(), region(F.linear, x, w, b, F.activations.tanh), 2 ^ -8 + 1e-6, "tanh")
          close(F.matmul(bf16(x):to "f64", bf16(w):to("f64"):transpose(1, 2)), region(F.matmul, x, w:transpose(1, 2)),
            2 ^ -8 + 1e-6, "matmul")
        end
        local a, b = random({ 3, 1, 4, 5 }, 1, device), random({ 2, 5, 6 }, 2, device) -- batches that broadcast
        close(F.matmul(bf16(a):to "f64", bf16(b):to "f64"), region(F.matmul, a, b), 2 ^ -8 + 1e-6, "batches")
        local one = random({ 5, 6 }, 3, device) -- one matrix for a batch
        close(F.matmul(bf16(a):to "f64", bf16(one):to "f64"), region(F.matmul, a, one), 2 ^ -8 + 1e-6, "one for all")
      end)
    end)

    it("gives f32 leaves f32 gradients, those of the products of bf16", function()
      peri.scope(function()
        local x, w, b = random({ 9, 6 }, 1, device):requires_grad(), random({ 5, 6 }, 2, device):requires_grad(),
          random({ 5 }, 3, device):requires_grad()
        local up = random({ 9, 5 }, 4, device)
        for _, act in ipairs { "none", "relu", "sigmoid", "tanh" } do
          for _, t in ipairs { x, w, b } do t:set_grad(nil) end
          local y = region(F.linear, x, w, b, F.activations[act])
          y:backward(bf16(up))
          local wx, ww, wb = bf16(x):to("f64"):detach():requires_grad(), bf16(w):to("f64"):detach():requires_grad(),
            bf16(b):to("f64"):detach():requires_grad()
          F.linear(wx, ww, wb, F.activations[act]):backward(bf16(up):to "f64")
          for name, pair in peri.util.ordered { x = { x, wx }, weight = { w, ww }, bias = { b, wb } } do
            assert.equal("f32", pair[1]:grad():dtype(), name)
            close(pair[2]:grad(), pair[1]:grad(), 0.02, act .. " " .. name)
          end
        end
      end)
    end)

    it("adds the gradients of a weight that is used twice, in f32", function()
      peri.scope(function()
        local x, w = random({ 9, 6 }, 1, device), random({ 6, 6 }, 2, device):requires_grad()
        region(function() return F.linear(F.linear(x, w), w):sum() end):backward()
        local twice = list(w:grad())
        local half = false
        for _, g in ipairs(twice) do half = half or ffi.cast("uint32_t *", ffi.new("float[1]", g))[0] % 65536 ~= 0 end
        assert.is_true(half) -- some of it is finer than bf16
        local leaf = bf16(x):to("f32"):detach():requires_grad() -- and of a bf16 number that is used twice
        region(function()
          local h = bf16(leaf)
          return (h:relu() + h * h):sum()
        end):backward()
        local values, grads = list(leaf), list(leaf:grad())
        for i, v in ipairs(values) do assert.is_true(math.abs(grads[i] - (v > 0 and 1 or 0) - 2 * v) < 0.02) end
      end)
    end)

    it("casts a weight once in a region, and anew after it was changed", function()
      peri.scope(function()
        local x, w = random({ 1, 6 }, 1, device), random({ 200, 6 }, 2, device):requires_grad()
        local r = peri.autocast { device = device }
        r:enter()
        local first = F.linear(x, w)
        local live = tonumber(C.peri_mem_live())
        local second = F.linear(x, w)
        local more = tonumber(C.peri_mem_live()) - live -- memory of "opaque" is freed late
        -- the result, and what the node keeps of x: no 200 x 6 weight
        if device == "cpu" then assert.is_true(more < 2000) end
        same(first, second)
        peri.no_grad(function() w:copy(random({ 200, 6 }, 3, device)) end)
        local third = F.linear(x, w)
        same(F.linear(bf16(x), bf16(w)), third)
        r:exit()
        r:enter() -- again
        same(third, F.linear(x, w))
        r:exit()
        r:release()
      end)
    end)

    it("of f16 is the same", function()
      peri.scope(function()
        local x, w = random({ 4, 6 }, 1, device), random({ 5, 6 }, 2, device):requires_grad()
        local y = peri.autocast({ device = device, dtype = "f16" }, F.linear, x, w)
        assert.equal("f16", y:dtype())
        close(F.linear(x:to("f16"):to "f64", w:to("f16"):to "f64"), y, 2 ^ -11 + 1e-6, "f16")
        y:sum():backward()
        assert.equal("f32", w:grad():dtype())
      end)
    end)
  end)
end

describe("a region of autocast", function()
  local x, w = random({ 2, 3 }, 1), random({ 4, 3 }, 2)
  local function dtype() return F.linear(x, w):dtype() end
  local cpu = { device = "cpu" }

  it("ends with its function, whatever happens there", function()
    assert.equal("bf16", peri.autocast(cpu, dtype))
    assert.equal("f32", dtype())
    assert.error_matches(function() peri.autocast(cpu, function()
      peri.autocast(cpu):enter()
      error "trouble"
    end) end, "trouble")
    assert.equal("f32", dtype())
    assert.same({ 1, nil, 3 }, { peri.autocast(cpu, function(...) return ... end, 1, nil, 3) })
  end)

  it("lies in others, off or on", function()
    peri.autocast(cpu, function()
      assert.equal("f32", peri.autocast({ device = "cpu", enabled = false }, dtype))
      assert.equal("f16", peri.autocast({ device = "cpu", dtype = "f16" }, dtype))
      assert.equal("bf16", peri.autocast({ device = "cuda", enabled = false }, dtype)) -- of another kind of device
      assert.equal("bf16", dtype())
    end)
    assert.equal("f32", peri.autocast({ device = "cuda" }, dtype))
    assert.equal("bf16", peri.autocast({ device = "cpu:0" }, dtype))
    assert.equal("bf16", peri.autocast({}, dtype)) -- the rank's device
  end)

  it("says what is wrong", function()
    assert.error_matches(function() peri.autocast { dtype = "f32" } end, "dtype f32, allowed: bf16, f16")
    assert.error_matches(function() peri.autocast { dtyp = "bf16" } end, "dtyp")
    assert.error_matches(function() peri.autocast { device = "" } end, "wanted the name of a kind of device")
    assert.error_matches(function() peri.autocast(cpu, 3) end, "f is 3, wanted a function")
    local outer, inner = peri.autocast(cpu), peri.autocast(cpu)
    assert.error_matches(function() outer:exit() end, "was not entered")
    outer:enter()
    assert.error_matches(function() outer:enter() end, "entered already")
    inner:enter()
    assert.error_matches(function() outer:exit() end, "inside of this one was not left")
    inner:exit()
    outer:exit()
  end)

  it("is of one rank", function()
    sim.run(3, function(rank, world)
      if rank == 1 then
        peri.autocast(cpu, function()
          world:barrier():wait()
          assert.equal("bf16", dtype())
          world:barrier():wait()
        end)
      else
        for _ = 1, 2 do
          world:barrier():wait()
          assert.equal("f32", dtype())
        end
      end
      assert.equal("f32", dtype())
    end)
    peri.autocast(cpu, function()
      sim.run(2, function() assert.equal("f32", dtype()) end)
      assert.equal("bf16", dtype())
    end)
  end)

  it("leaves nothing behind", function()
    local before = tonumber(C.peri_mem_objects())
    for _ = 1, 3 do
      peri.scope(function()
        local leaf = random({ 4, 3 }, 2):requires_grad()
        peri.autocast(cpu, function() return F.linear(x, leaf):sum() end):backward()
      end)
    end
    collectgarbage()
    collectgarbage()
    assert.is_true(tonumber(C.peri_mem_objects()) <= before)
  end)
end)

describe("the precision of products of f32", function()
  after_each(function() peri.set_float32_matmul_precision "highest" end)

  it("has PyTorch's names", function()
    assert.equal("highest", peri.get_float32_matmul_precision())
    for _, name in ipairs { "high", "medium", "highest" } do
      peri.set_float32_matmul_precision(name)
      assert.equal(name, peri.get_float32_matmul_precision())
    end
    assert.error_matches(function() peri.set_float32_matmul_precision "low" end,
      "'low', allowed: highest, high, medium")
    assert.error_matches(function() peri.set_float32_matmul_precision(1) end, "precision")
  end)

  it("is f32 on processors, and TF32 on GPUs where that is allowed", function()
    for _, device in ipairs { "cpu", "opaque" } do
      peri.scope(function()
        local x, w = random({ 16, 40 }, 1, device), random({ 8, 40 }, 2, device)
        local exact = F.linear(x:to "f64", w:to "f64")
        local function worst()
          local most, got = 0, list(F.linear(x, w))
          for i, want in ipairs(list(exact)) do most = math.max(most, math.abs(want - got[i])) end
          return most
        end
        assert.is_true(worst() < 1e-5)
        for _, name in ipairs { "high", "medium" } do
          peri.set_float32_matmul_precision(name)
          local gpu = device == "opaque" and os.getenv "PERI_OPAQUE_DEVICE"
          if gpu then assert.is_true(worst() > 1e-5 and worst() < 1e-2)
          else assert.is_true(worst() < 1e-5) end
        end
        peri.set_float32_matmul_precision "highest"
      end)
    end
  end)
end)
