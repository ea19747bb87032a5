-- drawn.lua: calls of tensor functions that tests/parity/drawn.py has drawn, beside what PyTorch made of them:
--
--   build/perilune run tests/parity/drawn.lua FILE [DEVICE]
--
-- prints the first three calls of each kind that differ (MOST=n: n of them), and how many there are of each.
local peri = require "perilune"
local Tensor = peri.Tensor
local F = peri.nn.functional

local device, most = arg[2] or "cpu", tonumber(os.getenv "MOST") or 3
local tolerances = { f32 = 2e-5, f64 = 1e-10, f16 = 4e-3, bf16 = 3e-2 }

--- Put an argument of a case together; its tensors are appended to `leaves`.
local function argument(a, leaves)
  if type(a) ~= "table" then return a end
  if not a.t then
    local list = {}
    for i = 1, #a do list[i] = argument(a[i], leaves) end
    return list
  end
  local dtype, shape, numbers = unpack(a.t)
  local t = peri.tensor(numbers, dtype, device, shape)
  if (dtype == "f32" or dtype == "f64") and not a.nograd then t:requires_grad() end
  leaves[#leaves + 1] = t
  for _, view in ipairs(a.views) do t = t[view[1]](t, unpack(view, 2)) end
  return t
end

--- The first twenty elements of what stands for a tensor, for people.
local function text(dtype, shape, numbers)
  local words = {}
  for i = 1, math.min(20, #numbers) do
    words[i] = type(numbers[i]) == "number" and ("%.9g"):format(numbers[i]) or tostring(numbers[i])
  end
  return ("%s[%s]{%s}"):format(dtype, table.concat(shape, ","), table.concat(words, " "))
end
local function wanted_text(x) return type(x) == "table" and text(unpack(x)) or tostring(x) end
local function got_text(x) return Tensor.is(x) and text(x:dtype(), x:shape(), x:to_list()) or tostring(x) end
local function argument_text(a)
  if type(a) ~= "table" then return tostring(a) end
  local words = {}
  if a.t then
    for i, view in ipairs(a.views) do words[i] = "." .. view[1] end
    return wanted_text(a.t) .. table.concat(words)
  end
  for i = 1, #a do words[i] = argument_text(a[i]) end
  return ("{%s}"):format(table.concat(words, ", "))
end

--- Whether two numbers of a dtype are near, or both NaN.
local function near(x, y, tolerance, scale)
  if x == y or x ~= x and y ~= y then return true end
  if not tolerance or type(x) ~= "number" or type(y) ~= "number" then return false end
  return math.abs(x - y) <= tolerance * (math.max(math.abs(x), math.abs(y)) + scale) and x - y == x - y
    and math.abs(x) < math.huge and math.abs(y) < math.huge
end

--- What differs of a result, or nil. scale: what the tolerance of f32 is relative to beside the numbers.
local function difference(want, got, scale)
  if type(want) ~= "table" then return got ~= want and "value" or nil end
  if not Tensor.is(got) then return "missing" end
  local shape, list = got:shape(), got:to_list()
  if table.concat(shape, ",") ~= table.concat(want[2], ",") then return "shape" end
  if got:dtype() ~= want[1] then return "dtype" end
  for i = 1, #list do
    if not near(list[i], want[3][i], tolerances[want[1]], scale) then return "values" end
  end
end

--- What differs of a call, in words, or nil.
local function compare(case)
  local leaves, arguments = {}, {}
  for i = 1, case.n do arguments[i] = argument(case.args[i], leaves) end
  local got = { (rawget(F, case.name) or Tensor.methods[case.name])(unpack(arguments, 1, case.n)) }
  if case.list then got = got[1] end
  if case.err then return "torch refuses: " .. case.err end
  for i, want in ipairs(case.out) do
    local what = difference(want, got[i], 1)
    if what then return ("result %d %s: %s, here %s"):format(i, what, wanted_text(want), got_text(got[i])) end
  end
  if not case.up then return end
  local first = 1
  while not tolerances[got[first]:dtype()] do first = first + 1 end
  got[first]:backward(peri.tensor(case.up[3], case.up[1], device, case.up[2]))
  for i, want in ipairs(case.grads) do
    local gradient = want and leaves[i]:grad()
    local what = want and difference(want, gradient, 2)
    if what then
      return ("gradient %d %s: %s, here %s"):format(i, what, wanted_text(want), got_text(gradient))
    end
  end
end

local count, kinds = 0, {}
for line in io.lines(arg[1]) do
  local case, found = assert(loadstring(line))(), nil
  local ok, err = pcall(peri.scope, function() found = compare(case) end)
  if not ok then found = not case.err and "refused here: " .. tostring(err):match "^[^\n]*" or nil end
  count = count + 1
  if found then
    local kind = case.name .. ": " .. found:match "^[%w ]+"
    kinds[kind] = (kinds[kind] or 0) + 1
    if kinds[kind] <= most then
      local words = {}
      for i = 1, case.n do words[i] = argument_text(case.args[i]) end
      print(("#%d %s(%s)\n    %s"):format(case.k, case.name, table.concat(words, ", "), found))
    end
  end
end
for kind, n in peri.util.ordered(kinds) do print(n, kind) end
print(count .. " calls")
