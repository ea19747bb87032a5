-- arranged.lua: elements in other places: rolled, repeated, cut to a triangle, padded, picked by a mask, added at
-- places; with PyTorch's names, made of views, joins and picks.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor.core"
local F = require "perilune.tensor.ops"
local signature = require "perilune.signature"
local spelled = require "perilune.tensor.spelled"
local watch = signature.watch
local C, check, wrap, ptr, out = P.C, P.check, Tensor.wrap, Tensor.ptr, Tensor.out

--- dim as a number from 1 on.
local function counted(t, dim) return dim < 0 and dim + t:dim() + 1 or dim end

--- A list of what is one number, or a list of them.
local function listed(x) return type(x) == "table" and x or { x } end

local function roll_one(t, shift, dim)
  local n = t:size(dim)
  shift = n > 0 and tonumber(shift) % n or 0
  if shift == 0 then return t end
  return (F.cat({ t:slice(dim, n - shift, n), t:slice(dim, 0, n - shift) }, dim))
end
--- Elements moved `shifts` places up along dim; those that leave at the end come in at the front. Lists of both: one
--- after the other; no dim: in row-major order.
function F.roll(t, shifts, dim)
  if not dim and type(shifts) == "table" then
    P.fail(("roll: a list of %d shifts without the dimensions, wanted one shift, or as many of both"):format(#shifts))
  end
  if not dim then
    local line = t:reshape(-1)
    local moved = roll_one(line, shifts, 1)
    return (moved == line and F.clone(t) or moved:reshape(t:shape()))
  end
  dim, shifts = listed(dim), listed(shifts)
  if #shifts ~= #dim then
    P.fail(("roll: %d shifts of %d dimensions, wanted as many"):format(#shifts, #dim))
  end
  local moved = t
  for i = 1, #dim do moved = roll_one(moved, shifts[i], dim[i]) end
  return moved == t and F.clone(t) or moved
end

--- Elements in reverse order along a dimension, or a list of them.
function F.flip(t, dim)
  dim = listed(dim)
  if t:dim() == 0 then return (F.clone(F.squeeze(t, tonumber(dim[1]) or 1))) end -- squeeze refuses other dimensions
  for i = 1, #dim do
    local falling = Tensor.arange(t:size(dim[i]) - 1, -1, -1, "i64", t:describe().device)
    t = F.index_select(t, counted(t, tonumber(dim[i])), falling)
  end
  return t
end

--- t `times` times over along dimension d: a new dimension before it, for the whole, or (`each`) behind it, for each of
--- its elements.
local function repeated(t, d, times, each)
  local shape, wide = t:shape(), {}
  local new = each and d + 1 or d
  for k = 1, #shape + 1 do wide[k] = k == new and times or shape[k > new and k - 1 or k] end
  local view = F.unsqueeze(t, new):expand(wide)
  shape[d] = shape[d] * times
  return view:reshape(shape)
end
--- t `times[i]` times over along each of n dimensions; sizes: its own. Each that changes is repeated along a new
--- dimension in front of it; where there would be more than 8 dimensions, the rest is left to another round.
local function tiled(t, sizes, times, n)
  local split, wide, shape, left, more = {}, {}, {}, {}, false
  for i = 1, n do
    local size, many = sizes[i], times[i]
    local later = many ~= 1 and #split + 2 + n - i > 8
    left[i], more = later and many or 1, more or later
    if later then many = 1 end
    if many ~= 1 then split[#split + 1], wide[#wide + 1] = 1, many end
    split[#split + 1], wide[#wide + 1], shape[i] = size, size, many * size
  end
  local y = t:reshape(split):expand(wide):reshape(shape)
  if more then return (tiled(y, shape, left, n)) end
  return y
end
--- t as often as a list says along each dimension: of fewer numbers than dimensions the last ones are meant, for more
--- the result has more dimensions.
function F.tile(t, times)
  local own, sizes, each, changes = t:shape(), {}, {}, false
  local n = math.max(#own, #times)
  for i = 1, n do
    sizes[i], each[i] = own[i - n + #own] or 1, times[i - n + #times] or 1
    changes = changes or each[i] ~= 1
  end
  if not changes then return (F.clone(n == #own and t or t:reshape(sizes))) end
  return (tiled(t, sizes, each, n))
end

--- Each element along dim as often as a number, or for each its own of a tensor of one dimension, says, one beside the
--- other; no dim: of all elements in row-major order. A tensor is waited for.
function F.repeat_interleave(t, times, dim)
  if not dim then t, dim = t:reshape(-1), 1 end
  local d = counted(t, dim)
  if type(times) == "number" then return times == 1 and (F.clone(t)) or repeated(t, d, times, true) end
  if times:dim() ~= 1 or times:size(1) ~= t:size(d) then
    P.fail(("repeat_interleave: times are %s, wanted one number for each of %d elements"):format(Tensor._text(times),
      t:size(d)))
  end
  local ends, total = F.cumsum(times, 1), 0
  local sums, n = ends:read()
  for i = 0, n - 1 do
    local sum = tonumber(sums[i])
    if sum < total then P.fail "repeat_interleave: a negative number of times, allowed: from 0" end
    total = sum
  end
  return (F.index_select(t, d, F.searchsorted(ends, Tensor.arange(0, total, 1, "i64", t:describe().device), true)))
end

--- t with zeros below the diagonal of the last two dimensions, or, with k, the diagonal k places right of it.
function F.triu(t, k)
  check(C.peri_op_triangle(ptr(t), k or 0, true, out))
  return (wrap(out[0]))
end
--- t with zeros above it.
function F.tril(t, k)
  check(C.peri_op_triangle(ptr(t), k or 0, false, out))
  return (wrap(out[0]))
end

--- Of a matrix the elements on the diagonal k (0) places right of the main one; of a row the matrix that has it there.
function F.diag(t, k)
  k = tonumber(k or 0)
  if t:dim() == 1 then
    local n = t:size(1)
    local square = F.unsqueeze(t, 2):expand { n, n }
    square = F.triu(F.tril(square))
    if k == 0 then return square end
    return (F.pad(square, k > 0 and { k, 0, 0, k } or { 0, -k, -k, 0 }))
  end
  if t:dim() ~= 2 then P.fail(("diag: %s, wanted one or two dimensions"):format(Tensor._text(t))) end
  local rows, columns = t:size(1), t:size(2)
  local n = math.max(0, k >= 0 and math.min(rows, columns - k) or math.min(rows + k, columns))
  local first = k >= 0 and k or -k * columns
  if n == 0 then return t:reshape(-1):slice(1, 0, 0) end
  return t:reshape(-1):slice(1, first, first + (n - 1) * (columns + 1) + 1, columns + 1)
end
--- The sum of a matrix's diagonal.
function F.trace(t)
  if t:dim() ~= 2 then P.fail(("trace: %s, wanted two dimensions"):format(Tensor._text(t))) end
  return (F.sum(F.diag(t)))
end

--- The product of each element of a with each of b, both of one dimension: [size of a, size of b].
function F.outer(a, b)
  if a:dim() ~= 1 or b:dim() ~= 1 then
    P.fail(("outer: %s and %s, wanted one dimension each"):format(Tensor._text(a), Tensor._text(b)))
  end
  return (F.mul(F.unsqueeze(a, 2), b))
end

local pads_type = ffi.typeof "int64_t[?]"
--- t with `value` (0) around it: a list of how many before and behind it along the last dimension, then along the one
--- before, and so on. Negative: so many elements are cut off.
function F.pad(t, pads, value)
  if watch.call then return (spelled.pad(t, pads, value or 0)) end
  local n = #pads
  local array = pads_type(n)
  for i = 1, n do array[i - 1] = pads[i] end
  local number = type(value) == "number" and value or 0
  local wide = value and type(value) ~= "number" and Tensor.tensor({ value }, t:dtype(), t:device(), {})
  check(C.peri_op_pad(ptr(t), array, n, wide and ptr(wide) or nil, number, out))
  return (wrap(out[0]))
end

--- A list of views, one for each element along dim (1), which they do not have.
function F.unbind(t, dim)
  local list = {}
  for i = 1, t:size(dim or 1) do list[i] = F.select(t, dim or 1, i - 1) end
  return list
end

--- t with dimension `dim` as several of these sizes, whose product is its size; one of them may be -1, "what is left".
function F.unflatten(t, dim, sizes)
  local d, shape, known, open = counted(t, dim), {}, 1, nil
  for i = 1, #sizes do
    local size = tonumber(sizes[i])
    if size ~= -1 then known = known * size
    elseif open then P.fail "unflatten: two sizes are -1, allowed: one"
    else open = i end
  end
  local own = t:size(d)
  local rest = open and known > 0 and own / known or open and 0 or 1
  if rest % 1 ~= 0 or known * rest ~= own or known < 0 then
    P.fail(("unflatten: sizes { %s } of dimension %d of %s, wanted those whose product is %d"):format(
      table.concat(sizes, ", "), dim, Tensor._text(t), own))
  end
  for k = 1, d - 1 do shape[k] = t:size(k) end
  for i = 1, #sizes do shape[#shape + 1] = i == open and rest or tonumber(sizes[i]) end
  for k = d + 1, t:dim() do shape[#shape + 1] = t:size(k) end
  return (t:reshape(shape))
end

--- t with the dimensions `from` (a number or a list) at the places `to`; the others keep their order.
function F.movedim(t, from, to)
  from, to = listed(from), listed(to)
  local n, order, taken = t:dim(), {}, {}
  if #from ~= #to then P.fail(("movedim: %d dimensions to %d places, wanted as many"):format(#from, #to)) end
  for i = 1, #from do
    local d, place = counted(t, from[i]), counted(t, to[i])
    if d < 1 or d > n or place < 1 or place > n or taken[d] or order[place] then
      P.fail(("movedim: dimension %d to place %d of %s, wanted each once"):format(from[i], to[i], Tensor._text(t)))
    end
    taken[d], order[place] = true, d
  end
  local rest = 1
  for place = 1, n do
    if not order[place] then
      while taken[rest] do rest = rest + 1 end
      order[place], rest = rest, rest + 1
    end
  end
  return (F.permute(t, order))
end

--- Tensors side by side: joined along dimension 2, those of fewer dimensions along 1.
function F.hstack(tensors)
  local list, most = {}, 0
  for i = 1, #tensors do
    local t = tensors[i]
    if not Tensor.is(t) then P.fail(("hstack: entry %d is %s, wanted a tensor"):format(i, signature.text(t))) end
    list[i], most = t:dim() == 0 and t:reshape(1) or t, math.max(most, t:dim())
  end
  return (F.cat(list, most < 2 and 1 or 2))
end
--- Tensors one below the other: joined along dimension 1; one of a single dimension is a row.
function F.vstack(tensors)
  local list = {}
  for i = 1, #tensors do
    local t = tensors[i]
    if not Tensor.is(t) then P.fail(("vstack: entry %d is %s, wanted a tensor"):format(i, signature.text(t))) end
    list[i] = t:dim() < 2 and t:reshape(1, -1) or t
  end
  return (F.cat(list, 1))
end

-- -- by places and masks ----------------------------------------------------------------------------------------------

--- A number as a tensor of t's dtype, without dimensions.
local function one_of(src, t)
  if type(src) == "number" then return (Tensor._scalar(src, t)) end
  return Tensor.is(src) and src or Tensor.tensor({ src }, t:dtype(), t:device(), {})
end
--- t with src (a number, or a tensor of index's shape) put at the places that index names along dim: the way back of
--- gather. Of several at one place the last one along dim stays.
function F.scatter(t, dim, index, src)
  check(C.peri_op_scatter(ptr(t), dim > 0 and dim - 1 or dim, ptr(index), ptr(one_of(src, t)), false, out))
  return (wrap(out[0]))
end
--- As scatter, but src is added to what is at those places.
function F.scatter_add(t, dim, index, src)
  check(C.peri_op_scatter(ptr(t), dim > 0 and dim - 1 or dim, ptr(index), ptr(one_of(src, t)), true, out))
  return (wrap(out[0]))
end
--- t with each slice i of src along dim, times alpha (1), added to its slice ids[i].
function F.index_add(t, dim, ids, src, alpha)
  local d = counted(t, dim)
  if alpha then src = F.affine(src, alpha, 0) end
  if not Tensor._is_float(t) then
    local each = Tensor._ones_shape(src)
    each[d] = ids:numel()
    return (F.scatter_add(t, dim, ids:reshape(each):expand(src:shape()), src))
  end
  check(C.peri_sparse_sum_by_id(ptr(d == 1 and src or src:transpose(1, d)), ptr(ids), t:size(d), out))
  local sums = wrap(out[0])
  return (F.add(t, d == 1 and sums or sums:transpose(1, d)))
end
--- ids [n] as an index for scatter: of the shape that n slices of t along d have.
local function index_of_slices(func, t, d, ids)
  if ids:dim() ~= 1 then P.fail(("%s: ids are %s, wanted one dimension"):format(func, Tensor._text(ids))) end
  local n, shape = ids:size(1), t:shape()
  local column = { n }
  for i = 2, #shape - d + 1 do column[i] = 1 end
  shape[d] = n
  return (#column > 1 and ids:reshape(column) or ids):expand(shape)
end
--- t with its slices ids[i] along dim replaced by the slices i of src. Of several for one place the last one stays.
function F.index_copy(t, dim, ids, src)
  local index = index_of_slices("index_copy", t, counted(t, dim), ids)
  if not Tensor._same_shape(index, src) then
    P.fail(("index_copy: src is %s, wanted the shape [%s]"):format(Tensor._text(src),
      table.concat(index:shape(), ", ")))
  end
  return (F.scatter(t, dim, index, src))
end
--- t with `value` in its slices ids[i] along dim.
function F.index_fill(t, dim, ids, value)
  return (F.scatter(t, dim, index_of_slices("index_fill", t, counted(t, dim), ids), value))
end

--- The mean of what src has for each place, and with `own` of what is there.
local function scatter_mean(t, dim, index, src, own)
  local dtype = t:describe().dtype -- counts are of it where none is rounded: then the division makes no copy of them
  local exact = (dtype == C.PERI_F32 or dtype == C.PERI_F64) and index:numel() < 2 ^ 24
  local counts = F.scatter_add(Tensor._filled(t, own and 1 or 0, exact and dtype or C.PERI_I64), dim, index, 1)
  if not own then counts = F.clamp(counts, 1) end -- places that nothing is for keep their element
  local sums = F.scatter_add(own and t or F.scatter(t, dim, index, 0), dim, index, src)
  if Tensor._is_float(t) then return (F.div(sums, counts)) end
  return (F.floor_divide(sums, counts):to(t:dtype()))
end
--- values, whose gradients go through those only that scatter leaves at their places: the last one of each.
local function last_ones(t, dim, index, values)
  if t:dim() == 0 then return values end -- a single place, and a single value for it
  local d = counted(t, dim)
  local each, device = Tensor._ones_shape(index), t:describe().device
  each[d] = index:size(d)
  local numbers = Tensor.arange(0, each[d], 1, "i64", device):reshape(each):expand(index:shape())
  local last = F.scatter(Tensor.full(t:shape(), 0, "i64", device), dim, index, numbers)
  return (F.where(F.eq(F.gather(last, dim, index), numbers), values, values:detach()))
end
--- The largest that src has for each place: sorted, it is put there last, as are NaN. falling: the smallest.
local scatter_extreme
function scatter_extreme(t, dim, index, src, own, falling)
  if falling and Tensor._is_float(t) then -- NaN are last in rising order only
    return (F.neg(scatter_extreme(F.neg(t), dim, index, F.neg(src), own, false)))
  end
  local values, places = F.sort(src, dim, falling)
  index = F.gather(index, dim, places)
  if src:describe().requires_grad then values = last_ones(t, dim, index, values) end
  local extremes = F.scatter(t, dim, index, values)
  if not own then return extremes end
  return ((falling and F.minimum or F.maximum)(t, extremes))
end
local reduces = {
  sum = function(t, dim, index, src, own)
    return (F.scatter_add(own and t or F.scatter(t, dim, index, 0), dim, index, src))
  end,
  mean = scatter_mean,
  amax = function(t, dim, index, src, own) return (scatter_extreme(t, dim, index, src, own, false)) end,
  amin = function(t, dim, index, src, own) return (scatter_extreme(t, dim, index, src, own, true)) end,
}
--- t with what src (of index's shape) has for the places that index names along dim, taken together with what is there
--- (include_self, true) or without: reduce: "sum", "mean", "amax" or "amin". Of equal elements of src one has the
--- gradient.
function F.scatter_reduce(t, dim, index, src, reduce, include_self)
  local f = reduces[reduce]
    or P.fail(("scatter_reduce: reduce is %s, allowed: sum, mean, amax, amin"):format(signature.text(reduce)))
  if not Tensor._same_shape(index, src) then
    P.fail(("scatter_reduce: index %s and src %s, wanted one shape"):format(Tensor._text(index), Tensor._text(src)))
  end
  return (f(t, dim, index, src, include_self ~= false))
end

--- gather of an index whose other sizes broadcast with t's; no dim: of all elements in row-major order.
function F.take_along_dim(t, index, dim)
  if not dim then return (F.gather(t:reshape(-1), 1, index:reshape(-1))) end
  local d, own, other = counted(t, dim), t:shape(), index:shape()
  for k = 1, #own do
    if k ~= d and other[k] ~= own[k] then
      if other[k] == 1 then other[k] = own[k] else own[k] = other[k] end
    end
  end
  return (F.gather(t:expand(own), d, index:expand(other)))
end

--- The elements of t where the bool tensor `mask`, which broadcasts with it, is true, in row-major order: one
--- dimension. Waits for the mask.
function F.masked_select(t, mask)
  check(C.peri_sparse_masked_elements(ptr(t), ptr(mask), out))
  return (wrap(out[0]))
end
--- t[mask]: the mask has the first sizes of t; the result has one dimension in their place. Waits.
function Tensor._by_mask(t, mask)
  check(C.peri_sparse_masked_parts(ptr(t), ptr(mask), out))
  return (wrap(out[0]))
end
--- The places of elements that are not 0: i64 [number of them, dimensions], from 0. Waits.
function F.nonzero(t)
  check(C.peri_sparse_nonzero(ptr(t), out))
  return (wrap(out[0]))
end

signature.list_of("integers", "a list of whole numbers", "integer")
signature.kind("integer_or_integers", "a whole number or a list of them", function(x)
  return signature.is("integer", x) or signature.is("integers", x)
end)
signature.kind("count_or_tensor", "a whole number from 0 on, or a tensor", function(x)
  return Tensor.is_live(x) or signature.is("count", x)
end)
signature.check_one("", F, {
  roll = "t: tensor, shifts: integer_or_integers, dim: dims?", flip = "t: tensor, dim: dims",
  tile = "t: tensor, times: counts", repeat_interleave = "t: tensor, times: count_or_tensor, dim: dim?",
  diag = "t: tensor, k: integer?", trace = "t: tensor", outer = "a: tensor, b: tensor",
  pad = "t: tensor, pads: integers, value: scalar?", unbind = "t: tensor, dim: dim?",
  index_add = "t: tensor, dim: dim, ids: tensor, src: tensor, alpha: number?",
  take_along_dim = "t: tensor, index: tensor, dim: dim?", masked_select = "t: tensor, mask: tensor",
  nonzero = "t: tensor", unflatten = "t: tensor, dim: dim, sizes: integers",
  movedim = "t: tensor, from: dims, to: dims",
  hstack = "tensors: list", vstack = "tensors: list", index_copy = "t: tensor, dim: dim, ids: tensor, src: tensor",
  index_fill = "t: tensor, dim: dim, ids: tensor, value: scalar",
  scatter_reduce = "t: tensor, dim: dim, index: tensor, src: tensor, reduce: string, include_self: boolean?",
})
signature.check_each_one("", F, { "triu", "tril" }, "t: tensor, k: integer?")
signature.check_each_one("", F, { "scatter", "scatter_add" }, "t: tensor, dim: dim, index: tensor, src: operand")
for _, name in ipairs { "roll", "flip", "tile", "repeat_interleave", "triu", "tril", "diag", "trace", "outer", "pad",
  "unbind", "scatter", "scatter_add", "index_add", "take_along_dim", "masked_select", "nonzero", "unflatten", "movedim",
  "index_copy", "index_fill", "scatter_reduce" } do
  Tensor.methods[name] = F[name]
end

return F
