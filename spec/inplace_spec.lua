-- Changes in place: copies within one tensor, and changes between an operation and its backward pass.
local peri = require "perilune"
local F = peri.nn.functional

local function fails(pattern, f, ...)
  local ok, err = pcall(f, ...)
  assert.is_false(ok, "no error: " .. pattern)
  assert.truthy(err.message:find(pattern), ("'%s' is not like '%s'"):format(err.message, pattern))
end

for _, device in ipairs { "cpu", "opaque" } do
  describe("in place on " .. device, function()
    local function t(data, dtype) return peri.tensor(data, dtype, device) end

    it("a tensor takes its own transpose", function()
      local a = t { { 1, 2, 3 }, { 4, 5, 6 }, { 7, 8, 9 } }
      a:copy(a:transpose(1, 2))
      assert.same({ { 1, 4, 7 }, { 2, 5, 8 }, { 3, 6, 9 } }, a:to_table())
    end)

    it("a tensor takes parts of itself that overlap, in both directions", function()
      local a = t { 1, 2, 3, 4, 5 }
      a:slice(1, 1, 5):copy(a:slice(1, 0, 4))
      assert.same({ 1, 1, 2, 3, 4 }, a:to_list())
      local b = t { 1, 2, 3, 4, 5 }
      b:slice(1, 0, 4):copy(b:slice(1, 1, 5))
      assert.same({ 2, 3, 4, 5, 5 }, b:to_list())
      local c = t { { 1, 2 }, { 3, 4 } }
      c:copy(c:slice(1, 1, 2)) -- a row of itself, repeated
      assert.same({ { 3, 4 }, { 3, 4 } }, c:to_table())
      c:copy(c)
      assert.same({ { 3, 4 }, { 3, 4 } }, c:to_table())
    end)

    it("an expanded tensor is not written to", function()
      local wide = t({ 1 }):expand { 3 }
      fails("peri_tensor_copy: elements of the 1st dimension of f32 %[3%] are all one place", wide.copy, wide,
        t { 1, 2, 3 })
      fails("peri_tensor_write: elements of the 1st dimension", wide.write, wide, string.rep("\0", 12))
    end)

    -- x -> operation -> a change of what the operation saved -> backward
    local saved = {
      { "peri_op_mul", function(x, y) return x * y, y end },
      { "peri_op_div", function(x, y) return x / y, y end },
      { "peri_op_sigmoid", function(x) local s = x:sigmoid() return s:sum(), s end },
      { "peri_op_log", function(x, y) local z = x + y return z:log(), z end },
      { "muladd", function(x, y) return F.muladd(x, y, y), y end },
      { "matmul", function(x, y) return x:matmul(y), y end },
      { "linear", function(x, y) return F.linear(x, y), y end },
      { "cross_net", function(x, y) return F.cross_net(x, nil, { y }), y end },
      { "softmax", function(x) local s = x:softmax(1) return s:sum(), s end },
      { "peri_op_mse", function(x, y) return F.mse_loss(x, y), y end },
    }
    local changes = {
      fill = function(z) z:fill(7) end, copy = function(z) z:copy(t { { 5, 6 }, { 7, 8 } }) end,
      write = function(z) z:write(string.rep("\0", 16)) end,
      ["through a view"] = function(z) z:slice(1, 0, 1):fill(3) end,
      ["by detached"] = function(z) z:detach():fill(3) end,
    }
    for _, case in ipairs(saved) do
      it("spoils the gradient of " .. case[1] .. ", which says so", function()
        for how, change in pairs(changes) do
          local x, y = t({ { 1, 2 }, { 3, 4 } }):requires_grad(), t { { 5, 6 }, { 7, 8 } }
          local z, operand = case[2](x, y)
          change(operand)
          fails("peri_backward_step: " .. case[1] .. " needs a tensor %(f32 %[2, 2%]%) that was changed in place",
            function()
            z:sum():backward()
          end)
          assert.is_nil(x:grad(), how)
        end
      end)
    end

    it("leaves gradients alone that do not need what changed", function()
      local x, y = t({ 1, 2 }):requires_grad(), t { 3, 4 }
      local z = x + y
      y:fill(9)
      z:sum():backward()
      assert.same({ 1, 1 }, x:grad():to_list())
      local m = (x * y):sum()
      m:backward()
      y:fill(1) -- after the pass nobody needs it
      assert.same({ 10, 10 }, x:grad():to_list())
    end)

    it("is refused by what would give old elements' gradients to what a tensor was computed from", function()
      for how, change in pairs(changes) do
        for name, view in pairs {
          itself = function(y) return y end, ["a part"] = function(y) return y:slice(2, 1, 2) end,
          ["another shape"] = function(y) return y:reshape(4) end,
          ["the transpose"] = function(y) return y:transpose(1, 2) end,
        } do
          local x, w = t({ { 1, 2 }, { 3, 4 } }):requires_grad(), t({ { 1, 1 }, { 1, 1 } }):requires_grad()
          local y = x * 2
          local before = view(y)
          change(y)
          for _, z in ipairs { before, y } do
            fails("an input %(f32 %[[%d, ]+%]%) was changed in place after %S+ had computed it", function() z:sum() end)
          end
          peri.no_grad(y.sum, y)
          local product = y:detach() * w
          product:sum():backward() -- its new elements are numbers like others
          assert.same(y:to_table(), w:grad():to_table(), how .. name)
          local leaf = t({ { 1, 2 }, { 3, 4 } }) -- a view of a leaf has what is written into it
          leaf:requires_grad()
          local part = view(leaf)
          leaf:detach():fill(5)
          part:sum():backward()
          assert.equal(part:numel(), leaf:grad():sum():item())
          assert.is_nil(x:grad())
        end
      end
    end)

    it("sees an optimizer's step between forward and backward", function()
      local x, w = t({ { 1, 2 } }):requires_grad(), t({ { 3, 4 } }):requires_grad()
      local optimizer = peri.nn.optim.SGD { params = { w }, lr = 0.5 }
      w:set_grad(t { { 1, 1 } })
      local y = F.linear(x, w)
      optimizer:step()
      fails("linear needs a tensor", function() y:sum():backward() end)
      F.linear(x, w):sum():backward()
      optimizer:step()
    end)

    it("refuses probabilities outside 0..1, and says which", function()
      local labels = t { 1, 0, 1 }
      for _, reduction in ipairs { "mean", "sum", "none" } do
        fails("peri_op_bce: element 1 of x is 1.5, allowed: probabilities 0..1", F.binary_cross_entropy,
          t { 0.5, 1.5, 0.5 }, labels, nil, reduction)
        fails("element 2 of x is %-0.25", F.binary_cross_entropy, t { 0.5, 0.5, -0.25 }, labels, nil, reduction)
        fails("element 0 of x is nan", F.binary_cross_entropy, t { 0 / 0, 0.5, 0 }, labels, nil, reduction)
        fails("element 1 of x is 1.5", F.binary_cross_entropy, t({ 0.5, 1.5, 0.5 }, "f64"), labels:to "f64", nil,
          reduction)
      end
      assert.near(100 * 2 / 3, F.binary_cross_entropy(t { 0, 1, 1 }, labels):item(), 1e-4) -- logarithms end at -100
      assert.equal(0, F.binary_cross_entropy(t {}, t {}, nil, "sum"):item())
    end)
  end)
end

describe("the environment", function()
  local function under(variable, script)
    script = script or 'print(select(2, pcall(require("perilune").zeros, { 1 })))'
    local pipe = assert(io.popen(("%s luajit -e '%s' 2>&1"):format(variable, script)))
    local said = pipe:read "*a"
    pipe:close()
    return said
  end
  for variable, words in pairs {
    ["PERI_NUM_THREADS=abc"] = "PERI_NUM_THREADS is 'abc', allowed: whole numbers 1..256",
    ["PERI_NUM_THREADS=0"] = "'0', allowed", ["PERI_NUM_THREADS=4x"] = "'4x', allowed",
    ["PERI_NUM_THREADS=257"] = "'257', allowed",
    ["PERI_CPU_ISA=foo"] = "PERI_CPU_ISA is 'foo', allowed: ref, avx2, avx512",
    ["PERI_TUNE=x=y"] = "PERI_TUNE: 'x' is no choice, known: lookup_prefetch, ",
    ["PERI_TUNE=copy_by=foo"] = "PERI_TUNE: 'copy_by=foo', allowed ways of copy_by: receiver, sender",
    ["PERI_TUNE=off"] = "tensor f32 [1] on cpu", ["PERI_MPI_NEAR=7"] = "PERI_MPI_NEAR is '7', allowed: 0, 1",
    ["PERI_MPI_NEAR=1"] = "tensor f32 [1] on cpu",
    ["PERI_CACHE_BYTES=8M"] = "PERI_CACHE_BYTES is '8M', allowed: whole numbers 1..1099511627776",
    ["PERI_CACHE_BYTES=0"] = "'0', allowed", ["PERI_CACHE_BYTES=-1"] = "'-1', allowed",
    ["PERI_ROW_IO=foo"] = "PERI_ROW_IO is 'foo', allowed: auto, uring, threads",
    ["PERI_ROW_IO=uring"] = "tensor f32 [1] on cpu",
    ["PERI_CUDA_TF32=1"] = "call peri.set_float32_matmul_precision \"high\"",
    ["PERI_TRACEBACK=yes"] = "PERI_TRACEBACK is 'yes', allowed: 0, 1",
    ["PERI_BLAS=mkl"] = "PERI_BLAS is 'mkl', allowed: onednn, openblas",
    ["PERI_BLAS=open"] = "PERI_BLAS is 'open', allowed: onednn, openblas",
    ["PERI_LOG=loud"] = "PERI_LOG is 'loud', allowed: error, warn, info, debug",
    ["PERI_NUM_THREADS="] = "tensor f32 [1] on cpu", ["PERI_CPU_ISA=ref"] = "tensor f32 [1] on cpu",
  } do
    it("of " .. variable, function() assert.truthy(under(variable):find(words, 1, true), under(variable)) end)
  end

  it("says how large the caches are", function()
    local script = 'print(tonumber(require("perilune.ffi").C.peri_cache_bytes()))'
    assert.equal("12345678\n", under("PERI_CACHE_BYTES=12345678", script))
    assert.is_true(tonumber(under("PERI_CACHE_BYTES=", script)) >= 2 ^ 16)
  end)
end)
