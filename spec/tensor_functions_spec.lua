-- Everyday functions of tensors: values and gradients as PyTorch's (spec/golden/tensor.py), gradients by finite
-- differences, indexing, printing, errors; on both devices.
-- cuda: always
local peri = require "perilune"
local F = require "perilune.nn.functional"
local devices = require "spec.support.devices"
local golden = require "spec.support.golden"
local gradcheck = require "spec.support.gradcheck"

local document = golden.document "ops/tensor/everyday"

--- Numbers that JSON has as texts: NaN, infinities, and whole ones from 2^53 on.
local function numbers(list, dtype)
  local out = {}
  for i, x in ipairs(list) do
    if type(x) ~= "string" then out[i] = x
    elseif dtype == "i64" then out[i] = loadstring("return " .. x .. "LL")()
    else out[i] = x == "nan" and 0 / 0 or x == "inf" and math.huge or -math.huge end
  end
  return out
end
local function load(entry, device) return peri.tensor(numbers(entry[3], entry[1]), entry[1], device, entry[2]) end

local comparisons = { eq = 1, ne = 1, lt = 1, le = 1, gt = 1, ge = 1 }
local inf = math.huge
local minus_zero = tonumber "-0" -- the literal -0.0 is 0 where LuaJIT keeps whole numbers as integers (ARM)

--- case name -> function of the inputs
local functions = {
  isnan = F.isnan, isfinite = F.isfinite, where = F.where, ["where broadcast"] = F.where,
  ["where number"] = function(m, t) return F.where(m, t, 0.5) end,
  masked_fill = function(t, m) return t:masked_fill(m, -2) end,
  ["masked_fill of a row"] = function(t, m) return t:masked_fill(m, -2) end,
  clamp = function(t) return t:clamp(-0.5, 0.75) end, ["clamp min"] = function(t) return t:clamp(0) end,
  ["clamp max"] = function(t) return t:clamp(nil, 1) end,
  ["clamp at the bounds"] = function(t) return t:clamp(2, 3) end,
  ["clamp crossed"] = function(t) return t:clamp(1, -1) end, maximum = F.maximum, ["maximum nan and ties"] = F.max,
  minimum = F.minimum, ["minimum nan"] = F.min, clone = function(t) return t:clone() * 2 end,
  ["gather 1"] = function(t, i) return t:gather(1, i) end, ["gather 2"] = function(t, i) return t:gather(2, i) end,
  ["gather -1"] = function(t, i) return t:gather(-1, i) end,
  ["index_select 1"] = function(t, i) return t:index_select(1, i) end,
  ["index_select 2"] = function(t, i) return t:index_select(2, i) end,
  ["index_select -1"] = function(t, i) return t:index_select(-1, i) end,
  ["index by ids"] = function(t, i) return t[i] end, index = function(t) return t[1] * 2 end,
  ["index -1"] = function(t) return t[-1] * 2 end,
  ["index several"] = function(t) return t[{ 1, { 0, 3, 2 }, -1 }] * 2 end,
  ["index part"] = function(t) return t[{ {}, { 1 } }] * 2 end,
  squeeze = function(t) return t:reshape(3, 1, 4):squeeze(2) * 2 end,
  ["squeeze all"] = function(t) return t:reshape(1, 3, 1, 4):squeeze() * 2 end,
  unsqueeze = function(t) return t:unsqueeze(2) * 2 end, ["unsqueeze -1"] = function(t) return t:unsqueeze(-1) * 2 end,
  permute = function(t) return t:permute { 3, 1, 2 } * 2 end, ["max of all"] = F.max, ["min of all"] = F.min,
  ["max along 2"] = function(t) return t:max(2) end, ["min along 1, kept"] = function(t) return t:min(1, true) end,
  ["max of whole numbers"] = function(t) return (t:max(2)) end,
  ["amax of two dimensions"] = function(t) return t:amax { 1, 3 } end,
  ["var correction 0"] = function(t) return t:var(2, false, 0) end,
  ["var of two dimensions"] = function(t) return t:var { 1, 3 } end, ["var of one"] = function(t) return t:var(2) end,
  ["std of equal numbers"] = function(t) return t:std(2) end, ["norm of zeros"] = function(t) return t:norm(2, 2) end,
  ["norm 3 of zeros"] = function(t) return t:norm(3, 2) end,
  ["norm inf of ties"] = function(t) return t:norm(inf, 2) end, ["cumsum 1"] = function(t) return t:cumsum(1) end,
  ["cumsum -1"] = function(t) return t:cumsum(-1) end, ["cumsum of whole numbers"] = function(t) return t:cumsum(2) end,
  ["cumsum of bool"] = function(t) return t:cumsum(1) end, ["sum of bool"] = function(t) return t:sum(2) end,
  ["sum of whole numbers"] = function(t) return t:sum() end, argsort = function(t) return t:argsort(2) end,
  topk = function(t) return t:topk(2) end, ["topk along 1, smallest"] = function(t) return t:topk(2, 1, false) end,
  ["topk of nan"] = function(t) return (t:topk(1, 2)) end,
  power = F.pow, ["power broadcast"] = F.pow, ["power of whole numbers"] = F.pow,
  ["power of a float and whole numbers"] = F.pow, ["power of numbers"] = function(t) return 2 ^ t end,
  ["power of 0"] = function(t) return 0 ^ t end, prod = F.prod, ["prod of one zero"] = F.prod,
  ["prod along 1"] = function(t) return t:prod(1) end, ["prod along 2"] = function(t) return t:prod(2) end,
  ["prod along -1"] = function(t) return t:prod(-1) end, ["prod kept"] = function(t) return t:prod(2, true) end,
  ["prod of nothing"] = function(t) return t:prod(2) end, ["prod of bool"] = function(t) return t:prod(1) end,
  ["prod of whole numbers"] = function(t) return t:prod(2) end,
}
for _, name in ipairs { "remainder", "fmod", "floor_divide" } do
  for i = 1, 4 do functions[name .. " " .. i] = F[name] end
  functions[name .. " of whole numbers"] = F[name]
  functions[name .. " by a number"] = function(t) return F[name](t, -0.75) end
  functions[name .. " of a number"] = function(t) return F[name](5, t) end
end
for _, name in ipairs { "any", "all" } do
  functions[name], functions[name .. " along 2"] = F[name], function(t) return F[name](t, 2) end
  functions[name .. " of nothing"], functions[name .. " kept"] = functions[name .. " along 2"],
    function(t) return F[name](t, 1, true) end
end
for _, n in ipairs { 1, 2, 3, 5 } do
  functions["chunk " .. n] = function(t) return unpack(t:chunk(n, 2)) end
end
for _, how in ipairs { "mean", "sum", "none" } do
  functions["l1_loss " .. how] = function(a, b) return F.l1_loss(a, b, how) end
  functions["huber_loss " .. how] = function(a, b) return F.huber_loss(a, b, 1.5, how) end
  functions["smooth_l1_loss " .. how] = function(a, b) return F.smooth_l1_loss(a, b, 0.5, how) end
end
functions["smooth_l1_loss 0"] = function(a, b) return F.smooth_l1_loss(a, b, 0) end
functions.normalize, functions["normalize 1 along 1"] = F.normalize, function(t) return t:normalize(1, 1, 0.5) end
functions["logsumexp along 1"], functions["logsumexp along -1"] = function(t) return t:logsumexp(1) end,
  function(t) return t:logsumexp(-1, true) end
functions["logsumexp of infinities"] = function(t) return t:logsumexp(2) end
functions.flatten, functions["flatten 2 -1"], functions["flatten 1 2"] = function(t) return t:flatten() * 2 end,
  function(t) return t:flatten(2) * 2 end, function(t) return t:flatten(1, 2) * 2 end
functions.one_hot = function(t) return t:one_hot(4) end
for _, dtype in ipairs { "int64", "int32", "uint8" } do
  for _, text in ipairs { "", " of a batch", " of rows" } do
    functions["matmul" .. text .. " torch." .. dtype] = F.matmul
  end
  functions["matmul transposed torch." .. dtype] = function(a, b) return a:transpose(1, 2):matmul(b) end
end
for name in pairs(comparisons) do
  functions[name .. " tensors"], functions[name .. " broadcast"], functions[name .. " whole numbers"] = F[name],
    F[name], F[name]
  functions[name .. " number"] = function(t) return F[name](t, 2.5) end
  functions[name .. " whole and 2"] = function(t) return F[name](t, 2) end
  functions[name .. " whole and 1.5"] = function(t) return F[name](t, 1.5) end
end
for _, d in ipairs { "", " along 1", " along 2", " along -1" } do
  local dim = tonumber(d:match "%-?%d+")
  functions["amax" .. d] = function(t) return t:amax(dim) end
  functions["amin kept" .. d] = function(t) return t:amin(dim, dim ~= nil) end
  functions["argmax" .. d] = function(t) return t:argmax(dim) end
  functions["argmin" .. d] = function(t) return t:argmin(dim) end
  functions["var" .. d] = function(t) return t:var(dim) end
  functions["std kept" .. d] = function(t) return t:std(dim, dim ~= nil) end
  functions["norm" .. d] = function(t) return t:norm(nil, dim) end
end
for text, p in pairs { ["0"] = 0, ["1"] = 1, ["1.5"] = 1.5, ["3"] = 3, inf = inf, ["-inf"] = -inf } do
  functions["norm " .. text] = function(t) return t:norm(p, 2) end
end
for _, falling in ipairs { "", " falling" } do
  local down = falling ~= ""
  functions["sort" .. falling] = function(t) return t:sort(-1, down) end
  functions["sort with nan" .. falling] = function(t) return t:sort(2, down) end
  functions["sort of ties along 1" .. falling] = function(t) return t:sort(1, down) end
  functions["sort of whole numbers" .. falling] = function(t) return t:sort(nil, down) end
end

local function compare(name, entry, got)
  assert.equal(entry[1], got:dtype(), name)
  assert.same(entry[2], got:shape(), name)
  golden.assert_near(numbers(entry[3], entry[1]), got:to_list(), entry[1]:match "^f" and document.tolerance or nil,
    name)
end

--- What a case's name says behind `= `: the call in Lua, of the inputs a, b, c.
local function call_of(name, device)
  local text = name:match "^= (.*)"
  if not text then return end
  return assert(loadstring("local peri, F, device = ... return function(a, b, c) return " .. text .. " end"))(peri, F,
    device)
end

local function check(case, device)
  local equation = case.name:match "^einsum (.*)"
  local numbers_of_range = { case.name:match "^arange (%S+) ?(%S*) ?(%S*)" }
  local start, stop, step = tonumber(numbers_of_range[1]), tonumber(numbers_of_range[2]), tonumber(numbers_of_range[3])
  local f = functions[case.name] or call_of(case.name, device)
    or equation and function(...) return F.einsum(equation, ...) end
    or start and function() return peri.arange(start, stop, step, nil, device) end
  assert.is_truthy(f, "no function for the case " .. case.name)
  local inputs = {}
  for i, entry in ipairs(case["in"]) do
    inputs[i] = load(entry, device)
    if entry[1] == "f32" or entry[1] == "f64" then inputs[i]:requires_grad() end
  end
  local out = { f(unpack(inputs)) }
  assert.equal(#case.out, #out, case.name)
  for i, entry in ipairs(case.out) do compare(case.name, entry, out[i]) end
  if not case.up then return end
  out[1]:backward(load(case.up, device))
  for i, t in ipairs(inputs) do
    local want = case.grad[i]
    if type(want) == "table" then compare(case.name .. ": gradient " .. i, want, t:grad()) end
  end
end

local dtypes = golden.document "ops/tensor/dtypes"

--- The right operand of a case of dtypes.json: a number, or "i64", or "i64 []": a tensor without dimensions.
local function right_operand(what, device)
  if type(what) ~= "string" then return what end
  local name, single = what:match "^(%w+)( ?)"
  if single ~= "" then return peri.full({}, name == "bool" and 1 or dtypes.single, name, device) end
  return load({ name, { 3 }, dtypes.right[name] }, device)
end

local choices = {
  where = function(a, b) return F.where(peri.tensor({ 1, 0, 1 }, "bool", a:device()), a, b) end,
  cat = function(a, b) return F.cat { a, b } end, sqrt = function(t) return F.sqrt(t:abs()) end,
  clamp = function(t) return t:clamp(1, 4) end, pow = function(t) return t ^ 3 end,
  cumsum = function(t) return t:cumsum(1) end, power = F.pow,
}

local function check_pair(case, device)
  local name, left, right, dtype, want, grads = unpack(case)
  local text = ("%s of %s and %s"):format(name, left, tostring(right))
  local operands = { load({ left, { 3 }, dtypes.left[left] }, device), right_operand(right, device) }
  local leaf = {} -- the operands that can be leaves
  for i, t in ipairs(operands) do
    local real = type(t) == "cdata" and (t:dtype() == "f32" or t:dtype() == "f64")
    leaf[i] = real and t:requires_grad()
  end
  local got = (choices[name] or F[name])(unpack(operands))
  assert.equal(dtype, got:dtype(), text)
  local tolerance = dtypes.tolerance[dtype]
  golden.assert_near(numbers(want, dtype), got:to_list(), tolerance and { rel = tolerance }, text)
  if not grads or not (leaf[1] or leaf[2]) then return end
  got:backward(peri.full(got:shape(), 1, dtype, device))
  for i, t in ipairs(operands) do
    local grad = grads[i]
    if leaf[i] then
      local rel = 4 * math.max(dtypes.tolerance[dtype], dtypes.tolerance[t:dtype()])
      golden.assert_near(numbers(grad, t:dtype()), t:grad():to_list(), { rel = rel }, text .. ": gradient " .. i)
    end
  end
end

local function check_dtypes(device)
  for _, case in ipairs(dtypes.cases) do peri.scope(check_pair, case, device) end
end

for _, device in ipairs(devices) do
  describe("functions of tensors on " .. device, function()
    it("give what PyTorch gives", function()
      for _, case in ipairs(document.cases) do peri.scope(check, case, device) end
    end)

    it("make of two dtypes what PyTorch makes of them", function() check_dtypes(device) end)

    it("have the gradients of finite differences", function()
      local mask = peri.tensor({ { 1, 0, 1 }, { 0, 0, 1 } }, "bool", device)
      local ids, places = peri.tensor({ 1, 0, 1 }, "i64", device), peri.tensor({ { 1, 0, 1 }, { 0, 0, 1 } }, "i64",
        device)
      local seen = peri.tensor({ { 1, 1, 0 }, { 1, 0, 1 } }, "u8", device):ne(0)
      local cases = {
        { function(x, y) return F.where(mask, x, y) end, { { 2, 3 }, { 3 } } },
        { function(x) return x:masked_fill(mask, 3) end, { { 2, 3 } } },
        { function(x) return x:clamp(-0.4, 0.5) end, { { 2, 3 } } }, { F.maximum, { { 2, 3 }, { 2, 1 } } },
        { F.minimum, { { 3 }, { 2, 3 } } },
        { function(x, y) return F.pow(x * x + 0.5, y) end, { { 2, 3 }, { 2, 1 } } },
        { function(x, y) return F.remainder(2 * x, y * y + 1) end, { { 3 }, { 2, 3 } } },
        { function(x, y) return F.fmod(2 * x, y * y + 1) end, { { 2, 3 }, { 3 } } },
        { function(x) return x:prod(1) end, { { 3, 4 } } },
        { function(x) return x:masked_fill(mask, 0):prod() + x:prod(-1):sum() end, { { 2, 3 } } },
        { function(x) return x:gather(1, places) end, { { 2, 3 } } }, { function(x) return x:index_select(1, ids) end,
          { { 2, 3 } } },
        { function(x) return (x:sort(1)) end, { { 4, 3 } } }, { function(x) return (x:topk(2, 2)) end, { { 2, 5 } } },
        { function(x) return (x:min(2)) end, { { 2, 3, 4 } } },
        { function(x) return x:amax { 1, 3 } end, { { 2, 3, 4 } } },
        { function(x) return x:var { 1, 2 } end, { { 2, 3, 4 } } }, { function(x) return x:std(2) end, { { 2, 4 } } },
        { function(x) return x:norm() end, { { 2, 3 } } }, { function(x) return x:norm(3, -1) end, { { 2, 3 } } },
        { function(x) return x:cumsum(1) end, { { 5, 3 } } }, { function(x) return x:cumsum(-1) end, { { 2, 40 } } },
        { function(x) return x:cumprod(1) end, { { 4, 3 } } },
        { function(x) return x:cummax(1):sum() + x:cummin(-1):square():sum() + x:mode():sum() end, { { 3, 4 } } },
        { function(x, y) return F.tensordot(x, y, { { 2, -1 }, { 2, 1 } }) end, { { 2, 3, 4 }, { 4, 3, 2 } } },
        { function(x) return x:cumprod(-1) end, { { 2, 5 } } },
        { function(x) return x:masked_fill(mask, 0):cumprod(2) end, { { 2, 3 } } },
        { function(x, y) return x:scatter_add(1, places, y) end, { { 2, 3 }, { 2, 3 } } },
        { function(x, y) return x:scatter(2, ids:reshape(3, 1), y) end, { { 3, 2 }, { 3, 1 } } },
        { function(x, y) return x:index_add(2, ids, y) end, { { 2, 3 }, { 2, 3 } } },
        { function(x) return (x * 3):sin() + x:cos() + x:erf() + x:expm1() + (x * x):log1p() end, { { 2, 3 } } },
        { function(x) return (x * x + 0.5):rsqrt() + x:elu(0.5) + (x * 0.4 + 0.5):logit() end, { { 2, 3 } } },
        { function(x) return x:nansum(1):square() + x:nanmean(2, true) end, { { 2, 3 } } },
        { F.cdist, { { 2, 3 }, { 4, 3 } } }, { F.cdist, { { 27, 2 }, { 2, 2 } } },
        { function(x, w) return F.rms_norm(x, 1, w, 0.1) end, { { 2, 4 }, { 4 } } },
        { function(q, k, v) return F.scaled_dot_product_attention(q, k, v, nil, true) end,
          { { 2, 3, 2 }, { 2, 3, 2 }, { 2, 3, 2 } } },
        { function(q, k, v) return F.scaled_dot_product_attention(q, k, v, seen, true, 0.5) end,
          { { 2, 2, 2 }, { 3, 2 }, { 2, 3, 4 } } },
        { function(x) return x:pad({ 1, -1, 0, 2 }, 3) end, { { 2, 3, 4 } } },
        { function(x) return x:triu(1):square() + x:tril(-1) end, { { 2, 3, 4 } } },
        { function(x, y) return F.cosine_similarity(x, y, 1) end, { { 3, 4 }, { 3, 1 } } },
        { function(x, y) return F.cosine_similarity(x, y, 2) end, { { 2, 3, 2 }, { 2, 3, 2 } } },
        { function(x) return x:median() + x:quantile(0.3, 2):sum() + x:roll(1):flip(1)[mask]:sum() end, { { 2, 3 } } },
        { function(x) return x[{ 1, { 0, 3, 2 } }] * x[0][1] end, { { 2, 3 } } },
        { function(x) return x:clone():squeeze():unsqueeze(1) end,
          { { 2, 1, 3 } } },
        { function(a, b) return F.einsum("bij,bkj->bik", a, b) end, { { 2, 2, 3 }, { 2, 4, 3 } } },
        { function(a, b, c) return F.einsum("bi,ij,bj->b", a, b, c) end, { { 2, 3 }, { 3, 2 }, { 2, 2 } } },
      }
      for _, layout in ipairs { "contiguous", "transposed" } do
        for _, c in ipairs(cases) do gradcheck.check(c[1], c[2], { device = device, layout = layout }) end
      end
    end)

    it("take 16-bit floats", function()
      local x = peri.tensor({ { 1, -2, 3 }, { 0.5, 4, -1 } }, "bf16", device)
      local values, places = x:sort(2)
      assert.same({ { -2, 1, 3 }, { -1, 0.5, 4 } }, values:to_table())
      assert.same({ { 1, 0, 2 }, { 2, 0, 1 } }, places:to_table())
      assert.equal("bf16", x:cumsum(2):dtype())
      assert.same({ { 1, -1, 2 }, { 0.5, 4.5, 3.5 } }, x:cumsum(2):to_table())
      assert.same({ 3, 4 }, x:amax(2):to_list())
      assert.same({ 1, 0, 1, 1, 1, 0 }, x:gt(0):to_list())
      assert.same({ 1, -1, 3, 0.5, 4, -1 }, x:clamp(-1):to_list())
      assert.same({ { 1, -2, -6 }, { 0.5, 2, -2 } }, x:cumprod(2):to_table())
      local at = peri.tensor({ { 2, 2, 0 }, { 1, 0, 1 } }, "i32", device)
      local zeros = peri.zeros_like(x)
      assert.same({ { 3, 0, -1 }, { 4, -0.5, 0 } }, zeros:scatter_add(2, at, x):to_table())
      assert.same({ { 3, 0, -2 }, { 4, -1, 0 } }, zeros:scatter(2, at, x):to_table())
      assert.same({ "bf16", "bf16" }, { zeros:scatter(2, at, x):dtype(), x:unique():dtype() })
      assert.same({ -2, -1, 0.5, 1, 3, 4 }, x:unique():to_list())
      assert.same({ 0, 1, 3 }, F.searchsorted(x:unique(), peri.tensor({ -2, -1.5, 0.75 }, "bf16", device)):to_list())
      assert.same({ 1, -2, 3, 1, 4, -1 }, x:ceil():to_list())
      assert.same({ { 4.5, -3, 0 }, { 0.5, 4, -1 } }, x:index_add(1, peri.tensor({ 0, 0 }, "i64", device),
        peri.tensor({ { 0, 0, 0 }, { 3.5, -1, -3 } }, "bf16", device)):to_table())
    end)

    it("sum integers of any size and layout as additions one after the other would", function()
      for _, shape in ipairs { { 0 }, { 3, 0, 2 }, { 2500 }, { 2, 1100, 3 }, { 5, 4, 3, 2 } } do
        local n = peri.util.product(shape)
        local t = (peri.arange(n, nil, nil, "i64", device) % 7 - 3):reshape(shape)
        local strided = #shape > 1 and t:transpose(1, 2) or t
        local f64 = strided:to "f64"
        for _, dtype in ipairs { "i64", "i32", "i16", "i8" } do
          local x = #shape > 1 and t:to(dtype):transpose(1, 2) or t:to(dtype)
          assert.same({ "i64", f64:sum():item() }, { x:sum():dtype(), x:sum():item() })
          assert.same(f64:sum(1):to_list(), x:sum(1):to_list())
          assert.same(f64:sum(-1, true):shape(), x:sum(-1, true):shape())
          if #shape > 2 then assert.same(f64:sum({ 1, 3 }):to_list(), x:sum({ 3, 1 }):to_list()) end
        end
        assert.equal(strided:gt(0):to("f64"):sum():item(), strided:gt(0):sum():item())
      end
      assert.same({ 1, 0, 1 }, peri.tensor({ 1, 0, 0, 1 }, "u8", device):ne(0):diff():to_list())
      local one = peri.tensor(5LL, "i64", device)
      one:sum():fill(7)
      assert.equal(5, one:item()) -- the sum is another tensor
    end)

    it("take what PyTorch takes of zeros", function()
      for _, dtype in ipairs { "f32", "f64" } do
        for _, n in ipairs { 1, 37 } do
          for _, case in ipairs { { 0, -inf }, { minus_zero, inf } } do
            local x = peri.full({ n }, case[1], dtype, device):requires_grad()
            x:rsqrt():sum():backward()
            assert.same(peri.full({ n }, case[2], dtype):to_list(), x:grad():to_list())
          end
        end
      end
      local none, zeros = peri.empty({ 0, 2 }, "i64", device), peri.zeros({ 2 }, "i64", device)
      for _, f in ipairs { F.fmod, F.remainder, F.floor_divide } do
        assert.same({ 0, 2 }, f(none, 0):shape())
        assert.same({ 0, 2 }, f(none, zeros):shape())
        assert.error_matches(function() f(peri.ones({ 2 }, "i64", device), zeros) end, "2 of 2 divisors are 0")
      end
    end)

    it("keep the sign of a zero where PyTorch does", function()
      for _, dtype in ipairs { "f32", "f64", "f16", "bf16" } do
        for _, n in ipairs { 1, 37 } do -- one at a time, and by vectors
          local zeros = peri.full({ n }, minus_zero, dtype, device)
          for name, y in pairs { relu = zeros:relu(), clamp = zeros:clamp(0, 1) } do
            assert.equal(-inf, (1 / y:to "f64"):amax():item(), name .. dtype)
          end
        end
      end
    end)

    it("take empty tensors", function()
      local x = peri.empty({ 0, 3 }, "f32", device)
      assert.same({ 0, 3 }, x:gt(0):shape())
      assert.same({ 0, 2 }, (x:topk(2)):shape())
      assert.same({ 0, 3 }, (x:sort(1)):shape())
      assert.same({ 0, 3 }, x:cumsum(1):shape())
      assert.same({ 0, 0, 0 }, x:gt(0):sum(1):to_list())
      assert.same({}, peri.arange(3, 3, 1, nil, device):to_list())
      local none = peri.empty({ 0 }, "i64", device)
      assert.same({ 0, 3 }, x:cumprod(1):shape())
      assert.same({ 0, 3 }, x:scatter_add(1, none:reshape(0, 3), x):shape())
      assert.same({ { 1, 1 } }, peri.ones({ 1, 2 }, "f32", device):index_add(1, none, x:slice(2, 0, 2)):to_table())
      assert.same({ 0, 0 }, F.searchsorted(none, peri.tensor({ 1, 2 }, "i64", device)):to_list())
      assert.same({ {}, { 0, 0 }, { 0, 2 }, { 0, 3 }, { 0, 3 }, {} }, { none:bincount():to_list(),
        none:bincount(nil, 2):to_list(), x:nonzero():shape(), x:roll(1):shape(), x:flip(1):shape(),
        none:unique():to_list() })
      assert.same({ {}, {}, { 0, 0 }, {} }, { x[x:gt(0)]:to_list(), none:isin(none):to_list(),
        peri.tensor({ 1, 2 }, "i64", device):isin(none):to_list(), peri.randperm(0, device):to_list() })
    end)

    it("are set by index", function()
      local x = peri.zeros({ 2, 3 }, "f32", device)
      x[0] = 1
      x[{ 1, { 1 } }] = peri.tensor({ 5, 6 }, "f32", device)
      x[{ -1, 0 }] = 7
      assert.same({ { 1, 1, 1 }, { 7, 5, 6 } }, x:to_table())
      x:requires_grad()
      assert.error_matches(function() x[0] = 2 end,
        "is not recorded, and its gradients are wanted; use where or masked_fill, or peri.no_grad")
      peri.no_grad(function() x[0] = 2 end)
      assert.same({ 2, 2, 2 }, x[0]:to_list())
    end)

    it("refuse what they cannot do, and say what they take", function()
      local x = peri.zeros({ 2, 3 }, "f32", device)
      local function refuses(text, f, ...)
        local ok, err = pcall(f, ...)
        assert.is_false(ok)
        assert.matches(text, tostring(err))
      end
      refuses("element 2 of the 1st dimension of f32 %[2, 3%], allowed: %-2%.%.1", function() return x[2] end)
      refuses("element %-3 of the 1st dimension", function() return x[-3] end)
      refuses("3 indices, allowed: 2", function() return x[{ 0, 0, 0 }] end)
      refuses("index 0.5, wanted a whole number", function() return x[0.5] end)
      refuses("no method 'foo'", function() return x.foo end)
      refuses("no method 'mm'; here it is 'matmul'", function() return x.mm end)
      refuses("no method 'repeat'; here it is 'tile'", function() return x["repeat"] end)
      refuses("peri has no 'cat'; it is peri.nn.functional.cat", function() return peri.cat end)
      refuses("a mask bool %[3%], wanted the first sizes of it", function() return x[x[0]:gt(0)] end)
      refuses("index 3 at flat position 1, allowed: 0%.%.2", x.gather, x, 2, peri.tensor({ { 0, 3 } }, "i64", device))
      refuses("may not be larger in the 1st dimension", x.gather, x, 2, peri.zeros({ 3, 1 }, "i64", device))
      refuses("the first 4 of the 2nd dimension of f32 %[2, 3%], allowed: 0%.%.3", x.topk, x, 4)
      local ids = peri.tensor({ 3, 0, 7 }, "i64", device)
      refuses("dtypes differ: f32 %[2, 3%] and c64 %[3%]", F.where, x:gt(0), x, peri.zeros({ 3 }, "c64", device))
      refuses('x is i64, allowed: f32, f64; cast it %(in Lua t:to "f32"%)', ids.mean, ids)
      local yes = ids:gt(0)
      refuses("a and b are bool %[3%] and bool %[3%], allowed: integers and floats", function() return yes % yes end)
      refuses("x is bool", function() return yes ^ yes end)
      refuses("a is bool", F.matmul, yes, yes)
      refuses("b is f32 %[2, 3%], wanted i64", F.matmul, ids, x)
      refuses("1 of 3 divisors are 0: i64 %[3%]", function() return ids:fmod(ids) end)
      refuses("the 2nd dimension of f32 %[2%], which has 1", x.prod, peri.zeros({ 2 }, "f32", device), 2)
      refuses("peri_op_floor_divide: the divisor is 0", function() return ids:floor_divide(0) end)
      for _, name in ipairs { "add", "div", "floor_divide", "remainder", "fmod", "pow" } do
        refuses("both numbers, wanted at least one tensor", function() return F[name](5LL, 2LL) end)
      end
      refuses("both numbers, wanted at least one tensor", function() return F.div(5LL, 2) end)
      refuses("the exponent %-1 of i64, allowed: 0%.%.2%^53 %- 1", function() return ids ^ -1 end)
      refuses("9007199254740992 does not fit i64, .* in Lua 64%-bit ones: 9007199254740993LL", function()
        return ids + 2 ^ 53
      end)
      refuses("does not fit i32", function() return ids:to "i32" * 3000000000LL end)
      refuses("does not fit i32", function() return ids:to "i32" * 3000000000 end)
      refuses('neg: t is bool', function() return -ids:gt(0) end)
      refuses("write it with LL", function() return peri.zeros({ 1 }, "i64", device):eq(2 ^ 53) end)
      refuses("condition is f32", F.where, x, x, x)
      refuses("min and max are nil", x.clamp, x)
      refuses("the 1st dimension of f32 %[0, 3%] is empty", function()
        return peri.empty({ 0, 3 }, "f32", device):amax()
      end)
      refuses("'j' has the sizes 3 and 2", F.einsum, "ij,jk->ik", x, x)
      refuses("'ii' has 'i' twice", F.einsum, "ii->i", x)
      refuses("norm: p is %-1, allowed", x.norm, x, -1)
      refuses("step is 0, allowed", peri.arange, 0, 5, 0)
      refuses("index 3 at flat position 0, allowed: 0%.%.2", x.scatter, x, 2, peri.tensor({ { 3 } }, "i64", device), 1)
      refuses("src and the index are f32 %[2, 3%] and i64 %[1, 1%], wanted one shape", x.scatter_add, x, 2,
        peri.zeros({ 1, 1 }, "i64", device), x)
      refuses("sorted and x are f32 %[3, 1%] and f32 %[2, 3%]", F.searchsorted, peri.zeros({ 3, 1 }, "f32", device), x)
      refuses("a row for each of 3 ids", x.index_add, x, 1, ids, x)
      refuses("the number %-1, allowed: 0 and more", F.bincount, peri.tensor({ 2, -1 }, "i64", device))
      local far = peri.tensor({ 9007199254740993LL }, "i64", device)
      refuses("the number 9007199254740993L?L?, allowed: 0 and more, below 2%^40", F.bincount, far)
      refuses("index 9007199254740993 at flat position 0, allowed: 0%.%.2", F.one_hot, far, 3)
      refuses("elements that are no whole numbers", F.one_hot, peri.tensor({ 1, 0.5 }, "f32", device), 3)
      refuses("elements that are no whole numbers", F.bincount, peri.tensor({ 1, 0 / 0 }, "f32", device))
      refuses("from 0LL to 9LL by %-1LL, wanted a stop in the direction", peri.arange, 0, 9LL, -1)
      refuses("step is 0.5, allowed beside 64%-bit integers: whole", peri.arange, 0LL, 9, 0.5)
      refuses("stop is 18446744073709551615ULL, allowed", peri.arange, 0, 18446744073709551615ULL)
      refuses("4000000001LL in i32", peri.arange, 4000000000LL, 4000000002LL, 1, "i32", device)
      refuses("k is 4 of .*, allowed: 1%.%.3", x.kthvalue, x, 4)
      refuses("0 elements of a tensor without dimensions, allowed: 1", x.topk, peri.tensor(1, "f32", device), 0)
      refuses("a bound of i64 is NaN, allowed: numbers", x.clamp, ids, 0 / 0)
      refuses("inf does not fit i64", x.clamp, ids, inf)
      refuses("4 bins from 0 to inf, wanted", x.histc, x, 4, 0, inf)
      refuses("mask is f32", F.masked_select, x, x)
      refuses("q is 1.5, allowed: 0%.%.1", x.quantile, x, 1.5)
      refuses("1st dimension of .* is empty", F.median, peri.empty({ 0, 3 }, "f32", device), 1)
      refuses("to a size of %-1 beside 0: it may be any number", x.reshape, peri.empty({ 0, 3 }, "f32", device), 0, -1)
      refuses("tensordot: dimension 2 of .* and 1 of .*, wanted equal sizes", F.tensordot, x, x, 1)
      refuses("mode: the 1st dimension of .* is empty", F.mode, peri.empty({ 0, 3 }, "f32", device), 1)
      refuses("2 shifts of 1 dimensions", x.roll, x, { 1, 2 }, 1)
      refuses("5 numbers for f32 %[2, 3%], wanted two for each of at most 2", x.pad, x, { 1, 1, 1, 1, 1 })
      refuses("from 3 to below 3, wanted 1 to 2%^53", peri.randint, 3, 3, { 2 })
      refuses("a row with only 0 above 0, wanted finite ones from 0 on, 1 or more", F.multinomial, x, 1, true)
      refuses("a row with only 2 above 0, wanted finite ones from 0 on, 3 or more", F.multinomial,
        peri.tensor({ 1, 0, 2 }, "f32", device), 3)
      refuses("dtype is 'i64', allowed: f32, f64", peri.linspace, 0, 1, 5, "i64")
      refuses("wanted rows of one size", F.cdist, x, peri.zeros({ 2, 2 }, "f32", device))
      refuses("%-9007199254740992%.%.9007199254740992", peri.arange, 2 ^ 53 - 1, 2 ^ 53 + 9, 1, "i64")
    end)

    it("take no notice of what is added 0 times", function()
      local a, b = peri.randn({ 2, 3 }, nil, device), peri.randn({ 3, 4 }, nil, device)
      local harmed = peri.tensor({ 0 / 0, inf, 1, 2 }, "f32", device)
      assert.same((a:matmul(b) * 2):to_list(), F.addmm(harmed, a, b, 0, 2):to_list())
      a, b = a:unsqueeze(1), b:unsqueeze(1)
      assert.same(a:bmm(b):to_list(), F.baddbmm(harmed, a, b, 0):to_list())
      assert.has_error(function() F.addmm(harmed, a:select(1, 0), b:select(1, 0):slice(2, 0, 3), 0) end)
    end)

    it("compare ids that a Lua number cannot hold", function()
      local ids = peri.tensor({ 9007199254740993LL, 9007199254740992LL }, "i64", device)
      assert.same({ 1, 0 }, ids:eq(9007199254740993LL):to_list())
      assert.same({ 1, 1 }, peri.full({ 2 }, 9007199254740993LL, "i64", device):eq(ids[0]):to_list())
      assert.same({ 0, 1 }, ids:clamp(nil, 9007199254740992LL):eq(ids):to_list())
      assert.same({ 1, 1 }, ids:clamp(-inf, inf):eq(ids):to_list())
      assert.same({ 1, 1 }, ids:clamp(9007199254740993LL, 9007199254740993LL):eq(ids[0]):to_list())
      assert.same({ 1, 1, 1 }, peri.arange(9007199254740993LL, 9007199254740999LL, 2LL, "i64", device):eq(
        peri.tensor({ 9007199254740993LL, 9007199254740995LL, 9007199254740997LL }, "i64", device)):to_list())
      local least, most = -9223372036854775807LL - 1, 9223372036854775807LL
      assert.same({ 1, 1 }, peri.arange(most, least, least, nil, device):eq(
        peri.tensor({ most, -1 }, "i64", device)):to_list())
      assert.same({ 5, 3, 1 }, peri.arange(5, 0LL, -2, "f32", device):to_list())
      assert.same({ 1, 0, 1 }, ids:slice(1, 1):pad({ 1, 1 }, 9007199254740993LL):eq(9007199254740993LL):to_list())
      assert.same({ 1, 0 }, ids:gt(9007199254740992LL):to_list())
      assert.same({ 0, 0 }, ids:to("i32"):gt(9007199254740993LL):to_list())
    end)

    it("make tensors of their own of integers, also where nothing changes", function()
      for _, dtype in ipairs { "u8", "i8", "i16", "i32", "i64" } do
        local x = peri.tensor({ 1, 100 }, dtype, device)
        local least, most = dtype == "u8" and 0 or -128, dtype == "u8" and 255 or 127
        local same = { x:clamp(least, most), x:clamp(least), x:clamp(nil, most), x:abs(), x:relu(), x ^ 1, x * 1 }
        for _, y in ipairs(same) do
          assert.same({ 1, 100 }, y:to "i32":to_list())
          y:fill(7)
        end
        assert.same({ 1, 100 }, x:to "i32":to_list())
      end
    end)

    it("calculate with ids that a Lua number cannot hold", function()
      local ids = peri.tensor({ 9007199254740993LL, -5 }, "i64", device)
      assert.same({ 9007199254740995LL, -3 }, (ids + 2):to_list())
      assert.same({ 0, -9007199254740998LL }, (ids - 9007199254740993LL):to_list())
      assert.same({ 3, 5 }, (ids % 10):to_list())
      assert.same({ 900719925474099LL, -1 }, ids:floor_divide(10):to_list())
      assert.same({ 9007199254740993LL, 0 }, ids:clamp(0):to_list())
      assert.same({ 9007199254740993LL, 1 }, F.where(ids:gt(0), ids, 1):to_list())
      ids[1] = 9007199254740995LL
      assert.same({ 9007199254740993LL, 9007199254740995LL }, ids:to_list())
    end)

    it("show their elements", function()
      local function shows(text, t) assert.equal(text, tostring(t)) end
      local on = " on " .. peri.zeros({ 1 }, "f32", device):device() .. "\n"
      shows("tensor f32 [2, 3]" .. on .. "[[ 1.0000, -2.5000,     nan],\n [ 0.0000,     inf,  3.2500]]",
        peri.tensor({ { 1, -2.5, 0 / 0 }, { 0, inf, 3.25 } }, "f32", device))
      shows("tensor f32 [3]" .. on .. "[1., 2., 3.]", peri.tensor({ 1, 2, 3 }, "f32", device))
      shows("tensor i64 [2]" .. on .. "[123456789012345678,    123456789012345]",
        peri.tensor({ 123456789012345678LL, 123456789012345 }, "i64", device))
      shows("tensor i64 [2]" .. on .. "[9007199254740993,               -1]",
        peri.tensor({ 9007199254740993LL, -1 }, "i64", device))
      shows("tensor bool [2]" .. on .. "[ true, false]", peri.tensor({ true, false }, "bool", device))
      shows("tensor f32 []" .. on .. "0.5000", peri.tensor(0.5, "f32", device))
      shows("tensor f32 [2]" .. on .. "[1.0000e+10, 1.0000e+00]", peri.tensor({ 1e10, 1 }, "f32", device))
      shows("tensor i64 [2000]" .. on .. "[   0,    1,    2, ..., 1997, 1998, 1999]",
        peri.arange(2000, nil, nil, nil, device))
      shows("tensor i64 [2, 2, 1]" .. on .. "[[[0],\n  [1]],\n\n [[2],\n  [3]]]",
        peri.arange(4, nil, nil, nil, device):reshape(2, 2, 1))
      assert.equal(9, select(2, tostring(peri.zeros({ 500, 500 }, "f32", device)):gsub("\n", "\n")) + 2)
      shows("tensor f32 [0, 3] on " .. peri.zeros({ 1 }, "f32", device):device(), peri.empty({ 0, 3 }, "f32", device))
    end)
  end)
end
