-- export/order.lua: elements by their order and by their places, as operations of a model file: the largest along
-- dimensions, sorted ones, running sums, elements that are picked, places among others.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local Lowering = require "perilune.export.lower"

local product, strides_of, joined, slice = util.product, Lowering.strides_of, Lowering.joined, Lowering.slice
local text_of = Lowering.text_of

--- function name -> f(lowering), as in operations.lua.
local M = {}

-- -- the largest ------------------------------------------------------------------------------------------------------

local function refuse_all(l)
  l:fail "of all numbers it goes across samples: an answer would depend on the others of its batch"
end

--- The largest or smallest along dimension d, the first of equal ones (0 and -0): each element with an odd place beside
--- the one in front of it, until there is one.
local function extreme_along(l, name, x, d)
  local shape = x.shape
  while shape[d] > 1 do
    local half, rest, whole = util.copy(shape), util.copy(shape), util.copy(shape)
    half[d], rest[d], whole[d] = math.floor(shape[d] / 2), shape[d] % 2, math.ceil(shape[d] / 2)
    local later, earlier = l:slice(x, d, 1, 2, half), l:slice(x, d, 0, 2, half)
    local best = l:op("binary", half, { ["function"] = name, inputs = { later.index, earlier.index },
      sizes = { 1, product(half), 1, 1 } })
    if rest[d] == 1 then -- the last one has nobody beside it
      local last = l:slice(x, d, shape[d] - 1, 1, rest)
      best = l:op("cat", whole, { inputs = { best.index, last.index },
        sizes = { product(shape, 1, d - 1), product(shape, d + 1), half[d], 1 } })
    end
    x, shape = best, whole
  end
  return x
end

local function lower_extreme(l, name)
  local a = l:arguments()
  local x, dims = l:sample(a[1], "the tensor"), {}
  if not a[2] then refuse_all(l) end
  for _, d in ipairs(type(a[2]) == "table" and a[2] or { a[2] }) do
    dims[#dims + 1] = l:dim(tonumber(d), #x.shape, l.entry.func, x.axis)
  end
  table.sort(dims, function(p, q) return p > q end)
  for _, d in ipairs(dims) do x = extreme_along(l, name, x, d) end
  l:set({ index = x.index, shape = l:result_shape(), list = x.list, axis = l.axis })
end
function M.amax(l) lower_extreme(l, "maximum") end
function M.amin(l) lower_extreme(l, "minimum") end

-- -- in order ---------------------------------------------------------------------------------------------------------

--- The elements along dimension d of ranks `first` to first + k - 1, and their places. how: "rising", "falling",
--- "rising_or_nan". The results have the shapes of the recording's.
local function ordered(l, t, dim, how, first, k)
  local x, shape = l:sample(t, "the tensor"), l:result_shape(1, nil, true)
  local n = #x.shape
  local d = l:dim(dim, n, l.entry.func, x.axis)
  local turned, from = util.copy(x.shape), strides_of(x.shape) -- lines that lie together
  turned[d], turned[n], from[d], from[n] = turned[n], turned[d], from[n], from[d]
  local lines, length = l:view(x, turned, from), turned[n]
  k = k or length
  turned[n] = k
  local found, back = product(turned), strides_of(turned)
  local v = l:op("order", { 2 * found }, { inputs = { lines.index }, ["function"] = how, sizes = { length, first, k } })
  back[d], back[n] = back[n], back[d]
  if #shape < n then table.remove(back, d) end
  l:set(l:view(v, shape, back, 0))
  if l.entry.results[2] then l:set(l:view(v, shape, back, found), 2) end
end

function M.sort(l)
  local a = l:arguments()
  ordered(l, a[1], a[2] or -1, a[3] and "falling" or "rising", 0)
end
function M.topk(l)
  local a = l:arguments()
  ordered(l, a[1], a[3] or -1, a[4] ~= false and "falling" or "rising", 0, tonumber(a[2]))
end
function M.kthvalue(l)
  local a = l:arguments()
  ordered(l, a[1], a[3] or -1, "rising", tonumber(a[2]) - 1, 1)
end

function M.mode(l)
  local a = l:arguments()
  ordered(l, a[1], a[2] or -1, "mode", 0, 1)
end
--- Elements of some ranks along a dimension (quantile).
function M._ranks(l)
  local a = l:arguments()
  ordered(l, a[1], a[2], "rising_or_nan", tonumber(a[3]), tonumber(a[4]))
end

function M.median(l)
  local a = l:arguments()
  if not a[2] then refuse_all(l) end
  local x = l:sample(a[1], "the tensor")
  local n = x.shape[l:dim(a[2], #x.shape, "median", x.axis)]
  ordered(l, x, a[2], "rising_or_nan", math.floor((n - 1) / 2), 1)
end

--- Three functions, as in PyTorch: of all elements, along a dimension, and of two tensors.
local function most(name, how)
  return function(l)
    local a = l:arguments()
    if not a[2] then refuse_all(l) end
    if type(a[2]) == "table" then return l:binary(name, a[1], a[2]) end
    ordered(l, a[1], a[2], how, 0, 1)
  end
end
M.max, M.min = most("maximum", "falling"), most("minimum", "rising_or_nan")

-- -- running ----------------------------------------------------------------------------------------------------------

local function lower_running(l, x, dim, name)
  local dtype = l.entry.args[1].dtype
  if dtype ~= "f32" and dtype ~= "bool" then l:fail("%s of %s, allowed: of f32 and of bool", l.entry.func, dtype) end
  local d = l:dim(dim, #x.shape, l.entry.func, x.axis)
  return l:op("running", util.copy(x.shape), { ["function"] = name, inputs = { x.index },
    sizes = { product(x.shape, 1, d - 1), x.shape[d], product(x.shape, d + 1) } }), d
end
function M.cumsum(l)
  local a = l:arguments()
  l:result_shape(1, nil, true)
  l:set((lower_running(l, l:sample(a[1], "the tensor"), a[2], "sum")))
end
function M.cumprod(l)
  local a = l:arguments()
  l:result_shape(1, nil, true)
  l:set((lower_running(l, l:sample(a[1], "the tensor"), a[2], "product")))
end
--- The last of the running products.
function M.prod(l)
  local a, shape = l:arguments(), l:result_shape(1, nil, true)
  if not a[2] then refuse_all(l) end
  local x = l:sample(a[1], "the tensor")
  local all, d = lower_running(l, x, a[2], "product")
  local own = util.copy(x.shape)
  own[d] = 1
  l:set { index = slice(l, all, d, x.shape[d] - 1, 1, own).index, shape = shape, list = x.list, axis = l.axis }
end

--- The largest or smallest so far, and its place.
local function running_extreme(how)
  return function(l)
    local a = l:arguments()
    local x, shape = l:sample(a[1], "the tensor"), l:result_shape()
    local d, all = l:dim(a[2], #shape, l.entry.func, x.axis), product(shape)
    local v = l:op("extreme", { 2 * all }, { ["function"] = how, inputs = { x.index },
      sizes = { product(shape, 1, d - 1), shape[d], product(shape, d + 1) } })
    l:set(l:view(v, shape, strides_of(shape), 0))
    l:set(l:view(v, shape, strides_of(shape), all), 2)
  end
end
M.cummax, M.cummin = running_extreme "largest", running_extreme "smallest"

-- -- by places --------------------------------------------------------------------------------------------------------

--- Elements of a dimension by their numbers: neighbours go together.
function M.index_select(l)
  local a, shape = l:arguments(), l:result_shape(1, nil, true)
  local x, ids, parts = l:sample(a[1], "the tensor"), a[3], {}
  local d = l:dim(a[2], #shape, "index_select", x.axis)
  if not ids.constant then l:fail "places that depend on the batch" end
  local list, taken, i = ids.constant:to_list(), l.first.taken, 1
  taken[#taken + 1] = { where = l.entry.where, x = { constant = ids.constant, at = ids.at, dtype = "i64" } }
  while i <= #list do
    local own, n = util.copy(shape), 1
    while i + n <= #list and list[i + n] == list[i] + n do n = n + 1 end
    own[d] = n
    parts[#parts + 1] = slice(l, x, d, tonumber(list[i]), 1, own)
    i = i + n
  end
  l:set(#parts == 1 and parts[1] or l:cat(parts, d, shape))
end

function M.gather(l)
  local a, shape = l:arguments(), l:result_shape(1, nil, true)
  local x, places = l:refuse_whole_numbers(l:constant(a[1]), "the tensor"), l:constant(a[3])
  local d, strides = l:dim(a[2], #shape, "gather", l.axis), strides_of(x.shape)
  if not x.fixed and x.shape[l.axis] ~= shape[l.axis] or x.fixed and x.shape[l.axis] ~= 1 then
    l:fail("a tensor of shape %s a sample, and places of shape %s: samples would meet others", text_of(x.shape),
      text_of(shape))
  end
  local n, stride = x.shape[d], strides[d]
  strides[d] = 0
  if x.fixed then strides[l.axis] = 0 end
  if places.fixed then places = l:view(places, shape, l:strides_to(places, shape)) end
  l:set(l:op("pick", shape, { inputs = { x.index, places.index },
    sizes = joined({ n, stride, #shape }, shape, strides) }))
end

--- A tensor of this shape, with elements of src put, or added, at places along dimension d. own: the shape of places
--- and src.
local function put(l, how, shape, d, own, x, places, src)
  local given, strides = { x, places, src }, strides_of(shape)
  local n, stride, inputs = shape[d], strides[d], {}
  strides[d] = 0
  for i, v in ipairs(given) do
    local wanted = i == 1 and shape or own
    inputs[i] = (v.fixed and l:copy(v, wanted, l:strides_to(v, wanted)) or v).index
  end
  return l:op("put", shape, { ["function"] = how, inputs = inputs, sizes = joined({ n, stride, #own }, own, strides) })
end

local function lower_scatter(how)
  return function(l)
    local a, shape = l:arguments(), l:result_shape()
    local axis, rows = l.axis, l.entry.results[1].shape[l.axis]
    local d, src = l:dim(a[2], #shape, l.entry.func, axis), a[4]
    src = type(src) == "number" and l:number(src) or l:constant(src)
    local x, places = l:constant(a[1]), l:constant(a[3])
    for _, v in ipairs { x, places, src } do
      if not v.fixed and (v.axis or 1) ~= axis then l:fail "samples are another dimension of one argument" end
    end
    if l.entry.args[3].shape[axis] ~= rows then
      l:fail("places of %d samples, of %d: an answer would depend on where in its batch a sample is",
        l.entry.args[3].shape[axis], rows)
    end
    l:set(put(l, how, shape, d, places.shape, x, places, src))
  end
end
M.scatter, M.scatter_add = lower_scatter "last", lower_scatter "sum"

function M.index_add(l)
  local a, shape = l:arguments(), l:result_shape()
  local d, x, src, places = l:dim(a[2], #shape, "index_add", l.axis), l:constant(a[1]), l:sample(a[4], "src"), {}
  if not a[3].constant then l:fail "places that depend on the batch" end
  local taken = l.first.taken
  taken[#taken + 1] = { where = l.entry.where, x = { constant = a[3].constant, at = a[3].at, dtype = "i64" } }
  if a[5] then
    src = { index = l:op("unary", util.copy(src.shape), { ["function"] = "affine", inputs = { src.index },
      numbers = { tonumber(a[5]), 0 } }).index, shape = src.shape }
  end
  for i = 1, #shape do places[i] = i == d and src.shape[d] or 1 end
  local ids = l:constant { constant = a[3].constant, shape = places, at = a[3].at, number = true }
  local sums = put(l, "sum", shape, d, src.shape, l:number(0), ids, src)
  l:set(l:op("binary", shape, { ["function"] = "add", inputs = { x.index, sums.index },
    sizes = joined({ #shape }, shape, l:strides_to(x, shape), l:strides_to(sums, shape)) }))
end

--- A constant of the program's numbers. at: the same for all that are alike.
local function constant(l, list, shape, at)
  return l:constant { constant = P.lasting(Tensor.tensor, list, "f32"), shape = shape, at = at, number = true }
end

--- Zeros beyond the diagonal k of the last two dimensions.
local function triangle(l, keeps, name)
  local a = l:arguments()
  local x, k, mask = l:sample(a[1], "the tensor"), tonumber(a[2] or 0), {}
  local n = #x.shape
  l:dim(-1, n, name, x.axis)
  l:dim(-2, n, name, x.axis)
  local rows, columns = x.shape[n - 1], x.shape[n]
  for i = 0, rows * columns - 1 do
    mask[i + 1] = keeps(i % columns, math.floor(i / columns) + k) and 1 or 0
  end
  local at = ("%s %d %d %d"):format(name, rows, columns, k)
  l:elements("where", { constant(l, mask, { rows, columns }, at), x, 0 }, {})
end
function M.tril(l) triangle(l, function(column, last) return column <= last end, "tril") end
function M.triu(l) triangle(l, function(column, first) return column >= first end, "triu") end

-- -- among others -----------------------------------------------------------------------------------------------------

--- The places of x's numbers among those of a constant, which rise.
local function search(l, x, among, right)
  return l:op("search", util.copy(x.shape), { ["function"] = right and "right" or "left",
    inputs = { x.index, l:constant(among).index } })
end
function M.searchsorted(l)
  local a = l:arguments()
  if not a[1].constant or #a[1].shape ~= 1 then l:fail "places among several lists, or among numbers of the batch" end
  l:result_shape(1, nil, true)
  l:set(search(l, l:sample(a[2], "the tensor"), a[1], a[3]))
end

--- Whether some of the constant's numbers are not smaller, and not larger.
function M.isin(l)
  local a, shape = l:arguments(), l:result_shape(1, nil, true)
  local x, tests = l:sample(a[1], "the tensor"), a[2]
  if not tests.constant then l:fail "whether it is among numbers of the batch" end
  l.first.taken[#l.first.taken + 1] = { where = l.entry.where,
    x = { constant = tests.constant, at = tests.at, dtype = tests.constant:dtype() } }
  local list = {}
  for _, number in ipairs(tests.constant:reshape(-1):to("f32"):to_list()) do
    if number == number then list[#list + 1] = number end
  end
  if #list == 0 then l:fail "nothing to be among" end
  table.sort(list)
  local among = constant(l, list, { #list }, "tests " .. table.concat(list, " "))
  local left, right = search(l, x, among, false), search(l, x, among, true)
  l:set(l:op("compare", shape, { ["function"] = "lt", inputs = { left.index, right.index },
    sizes = { 1, product(shape), 1, 1 }, numbers = { 0, 0 } }))
end

function M.one_hot(l)
  local a, shape, classes = l:arguments(), l:result_shape(1, nil, true), {}
  local x = l:sample(a[1], "ids")
  if x.whole then x = l:op("unary", x.shape, { ["function"] = "trunc", inputs = { x.index }, numbers = { 0, 0 } }) end
  for i = 1, tonumber(a[2]) do classes[i] = i - 1 end
  local n = #classes
  local row = constant(l, classes, { n }, "classes " .. n)
  l:set(l:op("compare", shape, { ["function"] = "eq", inputs = { x.index, row.index },
    sizes = { 2, product(x.shape), n, 1, 0, 0, 1 }, numbers = { 0, 0 } }))
end

function M.isnan(l)
  local x = l:sample(l:arguments()[1], "the tensor")
  l:elements("compare", { x, x }, { ["function"] = "ne", numbers = { 0, 0 } })
end
function M.isfinite(l)
  local x = l:sample(l:arguments()[1], "the tensor")
  local apart = l:op("binary", util.copy(x.shape), { ["function"] = "sub", inputs = { x.index, x.index },
    sizes = { 1, product(x.shape), 1, 1 } })
  apart.shape = x.shape
  l:elements("compare", { apart }, { ["function"] = "eq", numbers = { 0, 0 } })
end

return M
