-- The functions of a training step compile: no aborted traces, no stitches (style J2). The harness is
-- spec/support/jit.lua.
local peri = require "perilune"
local support = require "spec.support.jit"

describe("the JIT harness", function()
  local function complaint(f)
    local ok, err = pcall(support.assert_compiles, "this", f)
    return not ok and err
  end

  it("accepts plain loops, inner loops and FFI calls", function()
    local sum, C = 0, peri.ffi.C
    if not jit.status() then return pending(support.OFF) end
    assert.is_false(complaint(function(i) sum = sum + i end))
    assert.is_false(complaint(function(i) for k = 1, i % 7 do sum = sum + k end end))
    assert.is_false(complaint(function() sum = sum + C.peri_abi_version() end))
  end)

  it("sees closures, stitches and code that is switched off", function()
    if not jit.status() then return pending(support.OFF) end
    assert.matches("NYI: bytecode", complaint(function(i) return function() return i end end))
    assert.matches("stitched at", complaint(function(i) return ("x%d"):format(i):gsub("x", "y") end))
    local function interpreted(i) return i end
    jit.off(interpreted)
    local told = complaint(function(i) return interpreted(i) end)
    assert.is_truthy(told and (told:match "JIT compilation disabled" or told:match "blacklisted"))
  end)

  it("passes an error of the function on", function()
    assert.error_matches(function() support.watch(function(i) if i == 5 then error("at five", 0) end end) end,
      "^at five$")
  end)
end)

describe("tensor functions", function()
  local calls = require "spec.support.calls"

  it("are all called in spec/support/calls.lua", function()
    local names, missing = peri.util.copy(peri.ffi.methods_of(peri.ones { 1 })), {}
    for _, part in ipairs(getmetatable(peri.nn.functional).__names()) do
      for name in pairs(part) do names[name] = true end
    end
    for name in pairs(peri.nn.functional) do names[name] = true end
    names.activations, names.reductions, names.pin_memory = nil, nil, nil -- lists of names; what CUDA alone has
    for name in peri.util.ordered(names) do
      if name:match "^%l" and not calls[name] then missing[#missing + 1] = name end
    end
    assert.same({}, missing)
  end)

  --- Where a trace begins is a matter of chance, and from some places on it gets too long. What does not compile, does
  --- not at any time. A trace cannot begin in a function that calls a C function that returns a bool (is_leaf and the
  --- like); one that begins outside has it.
  local function compiles(name, f)
    local ok, err
    for _ = 1, 4 do
      ok, err = pcall(support.assert_compiles, name, f, name:match "^is_" and "unsupported C function type")
      if ok then return end
    end
    error(err, 0)
  end

  it("compile, with and without a gradient", function()
    if not jit.status() then return pending(support.OFF) end
    local plain = peri.Tensor.uniform({ 4, 4 }, 0.1, 0.9, 1, 0)
    for name, f in peri.util.ordered(calls) do
      for kind, x in pairs { plain = plain, recorded = plain:clone():requires_grad() } do
        compiles(name .. ", " .. kind, function() peri.scope(f, x) end)
      end
    end
    local ok = pcall(compiles, "a closure", function(i) return function() return i end end)
    assert.is_false(ok)
  end)
end)

describe("calls of a training loop", function()
  local nn = peri.nn
  local x, labels = peri.Tensor.uniform({ 4 }, 0.1, 0.9, 1, 0), peri.tensor { 0, 1, 1, 0 }
  local sequence = peri.Tensor.uniform({ 2, 3, 8 }, -1, 1, 1, 0)
  local lengths, values = peri.tensor({ 1, 0, 2, 1 }, "i64"), peri.tensor({ 7, 8, 9, 7 }, "i64")
  local layer, attention = nn.Linear { in_features = 4, out_features = 2 },
    nn.MultiheadAttention { embed_dim = 8, num_heads = 2, batch_first = true }
  local optimizer = nn.optim.Adam { params = layer:parameters(), lr = 0.1 }
  local scheduler = nn.optim.StepLR { optimizer = optimizer, step_size = 10 }
  local metric = nn.metrics.NEMetric {}
  for name, f in pairs {
    ["a step"] = function()
      optimizer:zero_grad()
      layer(x):sum():backward()
      optimizer:step()
      scheduler:step()
    end,
    ["a metric"] = function() metric:update(x, labels) end,
    ["attention"] = function() attention(sequence, sequence, sequence) end,
    ["a KeyedJaggedTensor of new names"] = function()
      peri.KeyedJaggedTensor { keys = { "a", "b" }, lengths = lengths, values = values }
    end,
  } do
    it("compile: " .. name, function()
      f() -- the first call loads parts of the library
      support.assert_compiles(name, function() peri.scope(f) end)
    end)
  end
end)

for _, device in ipairs { "cpu", "opaque" } do
  describe("compiled on " .. device, function()
    local a = peri.Tensor.uniform({ 4, 6 }, -1, 1, 1, 0, "f32", device)
    local b = peri.zeros({ 4, 6 }, "f32", device)

    local hot = {
      { "copy and fill", function() b:copy(a):fill(1) end },
      { "item", function(i) return b:item(i % 24) end },
      { "shape queries", function() return a:dim() + a:numel() + a:size(-1) end },
      { "views, released by hand", function()
        local s = a:slice(2, 1, 3)
        local t = s:transpose(1, 2)
        t:release()
        s:release()
      end },
      { "reshape, left to the collector", function() a:reshape(24) end },
      { "casts", function() a:to("f64"):release() end },
      { "detach and requires_grad", function() a:detach():requires_grad():release() end },
      { "new tensors", function()
        peri.empty({ 2, 3 }, "f32", device):release()
        peri.zeros({ 2, 3 }, "f32", device):release()
      end },
    }
    for _, case in ipairs(hot) do
      it(case[1], function() support.assert_compiles(case[1], case[2]) end)
    end

    local function work(x)
      local s = x:slice(1, 0, 2)
      return s:numel()
    end
    it("scopes", function() support.assert_compiles("scope", function() return peri.scope(work, a) end) end)
    it("no_grad", function() support.assert_compiles("no_grad", function() return peri.no_grad(work, a) end) end)
  end)
end
