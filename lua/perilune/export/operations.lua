-- export/operations.lua: how each recorded function becomes operations of a model file (docs/model_file.md has their
-- formulas).
local rules = require "perilune.export.rules"
local util = require "perilune.util"
local Lowering = require "perilune.export.lower"
local lists = require "perilune.export.lists"
local tables = require "perilune.export.tables"
local order = require "perilune.export.order"

local product, strides_of, joined, text_of = Lowering.product, Lowering.strides_of, Lowering.joined, Lowering.text_of

--- function name -> f(lowering): makes the operations of the current entry, and sets its results.
local M = {}

-- -- functions of one number ------------------------------------------------------------------------------------------

local function unary(l, x, name, a, b)
  local inputs = { l:sample(x, "the tensor").index }
  if type(a or 0) ~= "number" or type(b or 0) ~= "number" then l:fail "a tensor where a number is wanted" end
  l:set(l:op("unary", l:result_shape(), { ["function"] = name, inputs = inputs, numbers = { a or 0, b or 0 } }))
end

for _, name in ipairs { "relu", "sigmoid", "tanh", "silu", "gelu", "softplus", "logsigmoid", "exp", "log", "sqrt",
  "abs", "square", "log1p", "expm1", "rsqrt", "sin", "cos", "erf", "floor", "ceil", "round", "trunc", "sign" } do
  M[name] = function(l) unary(l, l:arguments()[1], name) end
end
function M._root(l) unary(l, l:arguments()[1], "sqrt") end
function M.leaky_relu(l) local a = l:arguments() unary(l, a[1], "leaky_relu", a[2] or 0.01) end
function M.affine(l) local a = l:arguments() unary(l, a[1], "affine", a[2], a[3] or 0) end
function M.neg(l) unary(l, l:arguments()[1], "affine", -1, 0) end
function M.reciprocal(l) local a = l:arguments() unary(l, a[1], "reciprocal", a[2] or 1) end

-- -- functions of two -------------------------------------------------------------------------------------------------

--- With a number, each is a function of one (perilune.tensor.ops): `right` of the number on the right, `left` of one on
--- the left.
local function arithmetic(name, right, left)
  M[name] = function(l)
    local a = l:arguments()
    if type(a[2]) == "number" then return unary(l, a[1], right(a[2])) end
    if type(a[1]) == "number" then return unary(l, a[2], left(a[1])) end
    l:binary(name, a[1], a[2])
  end
end
arithmetic("add", function(x) return "affine", 1, x end, function(x) return "affine", 1, x end)
arithmetic("sub", function(x) return "affine", 1, -x end, function(x) return "affine", -1, x end)
arithmetic("mul", function(x) return "affine", x, 0 end, function(x) return "affine", x, 0 end)
arithmetic("div", function(x) return "affine", 1 / x, 0 end, function(x) return "reciprocal", x end)

--- Functions of two numbers, either of which may be one of the program's.
local function of_two(l, name, a, b)
  l:binary(name, type(a) == "number" and l:number(a) or a, type(b) == "number" and l:number(b) or b)
end
for _, name in ipairs { "floor_divide", "remainder", "fmod" } do
  M[name] = function(l) local a = l:arguments() of_two(l, name, a[1], a[2]) end
end
function M.pow(l)
  local a = l:arguments()
  if type(a[2]) == "number" then return unary(l, a[1], "pow", a[2]) end
  of_two(l, "pow", a[1], a[2])
end

function M.maximum(l) local a = l:arguments() l:binary("maximum", a[1], a[2]) end
function M.minimum(l) local a = l:arguments() l:binary("minimum", a[1], a[2]) end
function M.clamp(l)
  local a = l:arguments()
  unary(l, a[1], "clamp", a[2] or -math.huge, a[3] or math.huge)
end

for _, name in ipairs { "eq", "ne", "lt", "le", "gt", "ge" } do
  M[name] = function(l)
    local a = l:arguments()
    local number = type(a[2]) == "number"
    l:elements("compare", number and { a[1] } or { a[1], a[2] },
      { ["function"] = name, numbers = { number and a[2] or 0, 0 } })
  end
end
function M.where(l) l:elements("where", l:arguments(), {}) end
function M.masked_fill(l)
  local a = l:arguments()
  l:elements("where", { a[2], a[3], a[1] }, {})
end

function M.muladd(l)
  local a, inputs = l:arguments(), {}
  for i = 1, 3 do inputs[i] = l:sample(a[i], ("argument %d"):format(i)).index end
  l:set(l:op("muladd", l:result_shape(), { inputs = inputs, numbers = { 1 } }))
end

-- -- products ---------------------------------------------------------------------------------------------------------

--- x W^T (+ bias), W a constant [columns, inner]; transposed: [inner, columns].
local function linear(l, x, weight, bias, activation, shape, transposed)
  if not weight.constant then l:fail "a weight that depends on the batch" end
  if l.axis == #shape then l:fail "a product along the samples: an answer would depend on the others of its batch" end
  local inner, cols = weight.shape[2], weight.shape[1]
  if transposed then inner, cols = cols, inner end
  local inputs = { x.index }
  if bias then inputs[2] = l:constant(bias).index end
  return l:op("linear", shape, { inputs = inputs, ["function"] = rules.activations[activation or 0],
    sizes = { inner, cols },
    panels = { tensor = weight.constant, at = weight.at, transposed = transposed, used = l:place() } })
end

function M.linear(l)
  local a = l:arguments()
  if a[3] and not a[3].constant then l:fail "a bias that depends on the batch" end
  local shape = l:result_shape()
  l:set(linear(l, l:sample(a[1], "x"), a[2], a[3], a[4], shape))
end

function M.matmul(l)
  local a = l:arguments()
  local x, y, shape = a[1], a[2], l:result_shape()
  if y.constant and x.index and #y.shape >= 2 and product(y.shape, 1, #y.shape - 2) == 1 then
    local rows, columns = y.shape[#y.shape - 1], y.shape[#y.shape]
    local matrix = { constant = y.constant:reshape(rows, columns), shape = { rows, columns }, at = y.at }
    return l:set(linear(l, x, matrix, nil, 0, shape, true))
  end
  if y.constant and x.index and #y.shape == 1 then -- a vector of the model: a matrix of one column
    local matrix, columns = { constant = y.constant:reshape(-1, 1), shape = { y.shape[1], 1 }, at = y.at },
      util.copy(shape)
    columns[#columns + 1] = 1
    local made = linear(l, x, matrix, nil, 0, columns, true)
    made.shape = shape
    return l:set(made)
  end
  if #(x.shape or {}) < 2 or #(y.shape or {}) < 2 then
    l:fail "a product with a vector, allowed: on the right a vector of the model; :reshape(-1, 1) makes a matrix of one"
  end
  x, y = l:constant(x), l:constant(y)
  local n = #shape
  if l.axis > math.max(n - 2, 1) then
    l:fail("a product of matrices whose rows or columns are samples, as einsum makes one where a weight and the batch "
      .. "share a letter that the result keeps, beside one that is summed; wanted: a weight of two dimensions")
  end
  --- Strides from matrix to matrix, of rows and of columns, of an operand [samples, ..., rows, columns] or a constant
  --- matrix.
  local function strides(z)
    local s, batch, whole = strides_of(z.shape), 0, not z.fixed and #z.shape == n
    for d = 1, n - 2 do whole = whole and z.shape[d] == shape[d] end
    if whole then batch = z.shape[n - 1] * z.shape[n]
    elseif product(z.shape, 1, #z.shape - 2) ~= 1 then
      l:fail("a factor of shape %s a sample, where the product has %s", text_of(z.shape), text_of(shape))
    end
    return { batch, s[#s - 1], s[#s] }
  end
  l:set(l:op("matmul", shape, { inputs = { x.index, y.index },
    sizes = joined({ product(shape, 1, n - 2), shape[n - 1], shape[n], x.shape[#x.shape] }, strides(x), strides(y)) }))
end
M.bmm = M.matmul

--- Along the last dimension of operands that broadcast and are turned so that theirs is the last.
function M.cosine_similarity(l)
  local a, shape = l:arguments(), l:result_shape()
  local x, y, full, axis = l:constant(a[1]), l:constant(a[2]), {}, nil
  local n, own = math.max(#x.shape, #y.shape), l.axis
  for _, z in ipairs { x, y } do
    local skip = n - #z.shape
    for i, size in ipairs(z.shape) do full[skip + i] = (full[skip + i] or 1) == 1 and size or full[skip + i] end
    if not z.fixed then axis = skip + (z.axis or 1) end
  end
  local d = l:dim(a[3] or -1, n, "cosine_similarity", axis)
  l.axis = axis
  local inputs, turned = {}, util.copy(full)
  turned[d], turned[n] = full[n], full[d]
  for i, z in ipairs { x, y } do
    local strides = l:strides_to(z, full)
    strides[d], strides[n] = strides[n], strides[d]
    inputs[i] = (z.fixed and l:copy(z, turned, strides) or l:view(z, turned, strides)).index
  end
  l.axis = own
  local length = table.remove(turned)
  local v = l:op("cosine", turned, { inputs = inputs, sizes = { length }, numbers = { a[4] or 1e-8, 0 } })
  local back = strides_of(turned)
  if d < n then table.insert(back, table.remove(back, d)) end
  l:set(l:view(v, shape, back))
end

function M.interaction(l)
  local a = l:arguments()
  local dense, sparse = l:sample(a[1], "dense"), l:sample(a[2], "sparse")
  if dense.shape[1] ~= 1 then l:fail("%d rows of dense features a sample, wanted 1", dense.shape[1]) end
  l:set(l:op("interaction", l:result_shape(),
    { inputs = { dense.index, sparse.index }, sizes = { sparse.shape[2], sparse.shape[3] } }))
end

function M.cross_net(l)
  local a = l:arguments()
  local x0, v, w, bias = l:sample(a[1], "x0"), a[2], a[3], a[4]
  l:result_shape()
  local x, cols = x0, x0.shape[#x0.shape]
  local function with(last)
    local shape = util.copy(x0.shape)
    shape[#shape] = last
    return shape
  end
  for i = 1, #w do
    local t = v and linear(l, x, v[i], nil, 0, with(v[i].shape[1])) or x
    local u = linear(l, t, w[i], nil, 0, with(cols))
    local inputs = { x0.index, u.index, x.index }
    if bias then inputs[4] = l:constant(bias[i]).index end
    x = l:op("cross", util.copy(x0.shape), { inputs = inputs, sizes = { cols } })
  end
  l:set(x)
end

-- -- joining, views ---------------------------------------------------------------------------------------------------

function M.cat(l)
  local a, shape = l:arguments(), l:result_shape(1, nil, true)
  l:set(l:cat(a[1], l:dim(a[2] or 1, #shape, "cat", l.axis), shape))
end

function M.stack(l)
  local a, shape, list = l:arguments(), l:result_shape(1, nil, true), {}
  local d = l:dim(a[2] or 1, #shape, "stack", l.axis)
  for i, x in ipairs(a[1]) do
    local own = util.copy(x.shape)
    table.insert(own, d, 1)
    list[i] = { index = x.index, constant = x.constant, at = x.at, shape = own, list = x.list }
  end
  l:set(l:cat(list, d, shape))
end

local slice = Lowering.slice

function M.split(l)
  local a = l:arguments()
  local x, at = l:sample(a[1], "the tensor"), 0
  local d = l:dim(a[3] or 1, #x.shape, "split", x.axis)
  for i, size in ipairs(a[2]) do
    l:set(slice(l, x, d, at, 1, l:result_shape(1, i, true)), 1, i)
    at = at + size
  end
end

M["tensor:slice"] = function(l)
  local a = l:arguments()
  local x = l:sample(a[1], "the tensor")
  local d, step = l:dim(a[2], #x.shape, "slice", x.axis), a[5] and tonumber(a[5])
  local start = tonumber(a[3])
  l:set(slice(l, x, d, start < 0 and start + x.shape[d] or start, step, l:result_shape(1, nil, true)))
end

function M.select(l)
  local a = l:arguments()
  local x, index = l:sample(a[1], "the tensor"), tonumber(a[3])
  local d, strides = l:dim(a[2], #x.shape, "select", x.axis), strides_of(x.shape)
  local offset = (index < 0 and index + x.shape[d] or index) * table.remove(strides, d)
  l:set(l:view(x, l:result_shape(1, nil, true), strides, offset))
end

M["tensor:transpose"] = function(l)
  local a = l:arguments()
  local x = l:sample(a[1], "the tensor")
  local first = l.list and 1 or 0 -- members of lists stay the first dimension, samples need not
  local p, q = l:dim(a[2], #x.shape, "transpose", first), l:dim(a[3], #x.shape, "transpose", first)
  local strides = strides_of(x.shape)
  strides[p], strides[q] = strides[q], strides[p]
  l:set(l:view(x, l:result_shape(1, nil, true), strides))
end

M["tensor:expand"] = function(l)
  local x, shape = l:sample(l:arguments(1)[1], "the tensor"), l:result_shape(1, nil, true)
  l:set(l:view(x, shape, l:strides_to(x, shape)))
end

--- The same elements in the same order.
local function same(l)
  local x = l:sample(l:arguments(1)[1], "the tensor")
  local shape = l:result_shape(1, nil, true)
  if product(shape) ~= product(x.shape) or product(shape, 1, l.axis - 1) ~= product(x.shape, 1, (x.axis or 1) - 1) then
    l:fail "the elements of a sample would go to others"
  end
  local value = { index = x.index, shape = shape, list = x.list, axis = l.axis, whole = x.whole }
  l:set(value)
  return value
end
for _, name in ipairs { "reshape", "contiguous", "detach", "share" } do M["tensor:" .. name] = same end
M.unsqueeze, M.squeeze, M.clone = same, same, same

-- from -> to: dtypes that hold all numbers which a file has, as f32, of tensors of another
local wide = { i32 = true, i64 = true, f32 = true, f64 = true }
local floats = { f32 = true, f64 = true }
local holds = { i32 = wide, i64 = wide, f32 = floats, f64 = floats, f16 = { f16 = true, f32 = true, f64 = true },
  bf16 = { bf16 = true, f32 = true, f64 = true } }

--- Another dtype, which leaves the numbers what they are; or whole ones of f32, of which the file has the fractions.
M["tensor:to"] = function(l)
  local from, to = l.entry.args[1].dtype, l.entry.results[1].dtype
  local x = l:sample(l:arguments(1)[1], "the tensor")
  local kept = from == "bool" or holds[from] and holds[from][to] and not (x.whole and floats[to])
  if not kept and (not floats[from] or to ~= "i32" and to ~= "i64") then
    l:fail("%s of %s would be other numbers, and a model file has them as they are, in f32", to, x.whole
      and "whole numbers that were made of f32" or from)
  end
  local value = same(l)
  if not kept then value.whole = l:place() end
end

function M.permute(l)
  local a = l:arguments()
  local x, strides = l:sample(a[1], "the tensor"), {}
  local own = strides_of(x.shape)
  for i, d in ipairs(a[2]) do
    if l.list and i == 1 and d ~= 1 then l:fail "members of lists would be no longer the first dimension" end
    strides[i] = own[d < 0 and d + #x.shape + 1 or d]
  end
  l:set(l:view(x, l:result_shape(1, nil, true), strides))
end

-- -- along dimensions -------------------------------------------------------------------------------------------------

-- of runtime/tensor/ops_parts.c, where the order of a sum's additions is laid down
local BLOCK_ELEMENTS, BLOCK_ROWS = 4096, 128

--- One sum over the middle of [outer][n][inner], in passes over blocks.
local function sum_once(l, x, outer, n, inner, scale)
  local block = inner == 1 and BLOCK_ELEMENTS or BLOCK_ROWS
  repeat
    local blocks = math.ceil(n / block)
    x = l:op("sum", { outer * blocks * inner }, { inputs = { x.index }, sizes = { outer, n, inner, block },
      numbers = { blocks == 1 and scale or 1 } })
    n = blocks
  until n == 1
  return x
end

--- Of a function along dimension d, whose numbers are added in another order where nothing is behind it: steps that
--- samples follow have to have several numbers each, so that one sample alone has the order that many have.
local function along(l, x, d, what)
  if d < (x.axis or 1) and product(x.shape, d + 1) == 1 then
    l:fail("%s along dimension %d of single numbers in front of the samples, allowed: behind them (transpose)", what, d)
  end
end

--- As peri__reduce: neighbours that are summed are one dimension, and the last such group comes first.
local function reduce(l, mean)
  local a = l:arguments()
  local x, summed, groups = l:sample(a[1], "the tensor"), {}, {}
  if not a[2] and l.alone then
    a[2] = util.map(x.shape, function(_, i) return i end)
  elseif not a[2] then
    l:fail "a sum over everything goes across samples: an answer would depend on the others of its batch"
  end
  local axis, sides = x.axis or 1, {}
  for _, dim in ipairs(type(a[2]) == "table" and a[2] or { a[2] }) do
    local d = l:dim(dim, #x.shape, "a sum", axis)
    along(l, x, d, "a sum")
    summed[d], sides[d < axis] = true, true
  end
  if sides[true] and sides[false] then l:fail "a sum along dimensions in front of the samples and behind them" end
  local shape = l:result_shape(1, nil, l.entry.args[1].dtype == "bool") -- of truth: how many are true
  local scale = 1
  for i, size in ipairs(x.shape) do
    if summed[i] and mean then scale = scale * size end
    local last = groups[#groups]
    if i == axis then groups[#groups + 1] = { size = size, summed = false }
    elseif size > 1 and last and last.summed == (summed[i] or false) then last.size = last.size * size
    elseif size > 1 then groups[#groups + 1] = { size = size, summed = summed[i] or false } end
  end
  scale = 1 / scale
  local done = false
  for g = #groups, 1, -1 do
    if groups[g].summed then
      local outer, inner = 1, 1
      for i = 1, g - 1 do outer = outer * groups[i].size end
      for i = g + 1, #groups do inner = inner * groups[i].size end
      x = sum_once(l, x, outer, groups[g].size, inner, scale)
      groups[g].size, scale, done = 1, 1, true
    end
  end
  if not done and scale ~= 1 then
    x = l:op("unary", shape, { ["function"] = "affine", inputs = { x.index }, numbers = { scale, 0 } })
  end
  l:set({ index = x.index, shape = shape, list = x.list, axis = l.axis })
end
function M.sum(l) reduce(l, false) end
function M.mean(l) reduce(l, true) end

local function softmax(l)
  local a = l:arguments()
  local x = l:sample(a[1], "the tensor")
  local d = l:dim(a[2], #x.shape, "softmax", x.axis)
  along(l, x, d, "a softmax")
  l:set(l:op("softmax", l:result_shape(), { ["function"] = l.entry.func, inputs = { x.index },
    sizes = { product(x.shape, 1, d - 1), x.shape[d], product(x.shape, d + 1) } }))
end
M.softmax, M.log_softmax = softmax, softmax

function M.layer_norm(l)
  local a = l:arguments()
  local x = l:sample(a[1], "the tensor")
  local n, inputs = a[2] or 1, { x.index }
  if n > #x.shape - (x.axis or 1) then
    l:fail "it goes across samples: an answer would depend on the others of its batch"
  end
  if a[4] and not a[3] then l:fail "a bias without a weight" end
  for i = 3, 4 do
    if a[i] then inputs[i - 1] = l:constant(a[i]).index end
  end
  local cols = product(x.shape, #x.shape - n + 1)
  l:set(l:op("layer_norm", l:result_shape(), { inputs = inputs, sizes = { product(x.shape) / cols, cols },
    numbers = { a[5] or 1e-5 } }))
end

for _, more in ipairs { lists.operations, tables, order } do
  for name, make in util.ordered(more) do M[name] = make end
end

return M
