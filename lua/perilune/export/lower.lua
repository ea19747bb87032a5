-- export/lower.lua: two recordings of one model, on batches of different sizes, become the operations of a model file.
--
-- In a model file every value is, for each sample, so many numbers; what the samples have in common is not written
-- down. A tensor of the recording whose first size is m times the number of samples becomes such a value of shape { m,
-- the other sizes }. Values lie in row-major order, so reshapes cost nothing. Samples may be another dimension, the
-- value's `axis`: of a tensor [steps, samples, columns] the value's shape is { steps, 1, columns } with axis 2, which
-- has the same numbers in the same order as { 1, steps, columns } with axis 1. Values of the members of lists
-- (lists.lua) are the same with the number of members; these are the first dimension.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"

local rules = require "perilune.export.rules"

local Lowering = util.class "ExportLowering"

local function text_of(list) return "[" .. table.concat(list, ", ") .. "]" end
local product = util.product

function Lowering:init(first, second, sizes)
  self.first, self.second, self.batch = first, second, sizes
  self.values, self.operations, self.of, self.constants = {}, {}, {}, {}
  self.entry, self.why = false, {}
  self.made = {} -- results by what their operations compute
  self.axis = 1 -- which dimension of the entry's results the samples are
  self.alone = false -- whether there are no samples (formulas.lua)
  self.list = nil -- the list whose members the entry's values are of; false: samples; nil: not known yet
end

--- The line and the function whose form is made: "model.lua:12: 'add'"; nil: none is.
function Lowering:place()
  local e = self.entry
  return e and ("%s: '%s'"):format(e.where, (e.func:gsub("^%a+:", ""))) or nil
end

function Lowering:fail(format, ...)
  local place = self:place()
  P.fail("export: " .. (place and place .. ": " or "") .. format:format(...))
end

-- -- values -----------------------------------------------------------------------------------------------------------

--- A new value of the file: { index =, shape = of a sample }.
function Lowering:value(shape, fields)
  local v = fields or {}
  v.columns = product(shape)
  if v.columns < 1 then self:fail("a tensor without elements, of shape %s a sample", text_of(shape)) end
  self.values[#self.values + 1] = v
  return { index = #self.values - 1, shape = shape }
end

--- The dimension in which two shapes differ; 1: none, or several.
local function axis_of(a, b)
  local axis
  for i = 1, #a do
    if a[i] ~= b[i] then
      if axis then return 1 end
      axis = i
    end
  end
  return axis or 1
end

--- The shape of a sample, or of a member where the entry's values are of a list, of a tensor that has these shapes in
--- the two recordings.
function Lowering:sample_shape(a, b)
  local rows, other = self.batch[1], self.batch[2]
  if #a ~= #b then self:fail("a tensor of %d dimensions for %d samples, and of %d for %d", #a, rows, #b, other) end
  if self.list then rows, other = self.list.totals[1], self.list.totals[2] end
  local axis = self.list and 1 or axis_of(a, b)
  -- of lists without members: one row each
  local m = a[axis] and (rows > 0 and a[axis] / rows or other > 0 and b[axis] / other or 1)
  if not m or m % 1 ~= 0 or m * rows ~= a[axis] or m * other ~= b[axis] or m < 1 then
    self:fail("the shape is %s for %d %s and %s for %d: one size must be a multiple of the number of %s, so that each "
      .. "%s keeps its own part", text_of(a), rows, self.list and "members of lists" or "samples", text_of(b), other,
      self.list and "members" or "samples", self.list and "member" or "sample")
  end
  local shape = util.copy(a)
  shape[axis] = m
  for i = 1, #a do
    if i ~= axis and a[i] ~= b[i] then
      self:fail("size %d of the shape is %d for %d samples and %d for %d, but only one may depend on their number", i,
        a[i], rows, b[i], other)
    end
  end
  self.axis = axis
  return shape
end

--- The n-th argument, or an entry of a list, of both recordings: a number or the like, a value, or { constant = tensor,
--- shape = }.
function Lowering:resolve(a, b, what)
  if type(a) ~= "table" or type(b) ~= "table" then
    if type(a) ~= type(b) or a ~= b then
      self:fail("%s is %s for %d samples and %s for %d; it must not depend on their number", what, tostring(a),
        self.batch[1], tostring(b), self.batch[2])
    end
    return a
  end
  if a.list then
    local list = {}
    if not b.list or #a.list ~= #b.list then
      self:fail("%s has other entries for %d samples than for %d", what, self.batch[1], self.batch[2])
    end
    for i, x in ipairs(a.list) do list[i] = self:resolve(x, b.list[i], ("%s, entry %d,"):format(what, i)) end
    return list
  end
  if a.id ~= b.id then
    self:fail("%s is something else for %d samples than for %d", what, self.batch[1], self.batch[2])
  end
  if a.id then
    local value = self.of[a.id] or self.numbers[a.id] and self:value_of_numbers(self.numbers[a.id])
    if value and (value.axis or 1) > 1 and rules.samples_first[self.entry.func] then
      self:fail("%s has samples as its dimension %d, wanted: as the first", what, value.axis)
    end
    if value then return self:meet(self:refuse_whole_numbers(value, what, rules.whole[self.entry.func]), what) end
    if self.why[a.id] then error(self.why[a.id], 0) end -- that has no form for inference either
    self:fail("%s is not a tensor of f32 of the batch", what)
  end
  if a.at ~= b.at and not self.equal(a.constant, b.constant) then
    local row = self:row_of(a, b)
    if row then return row end
    self:fail("%s is made anew for each batch, and not by an operation that can be recorded", what)
  end
  if not self.kinds[a.dtype] then self:fail("%s is %s, wanted f32", what, tostring(a.dtype)) end
  return { constant = a.constant, shape = a.shape, at = a.at }
end

--- Return `value`, but refuse one whose numbers the model cuts to whole ones (x:to "i64" of f32): the file keeps their
--- fractions, which would be seen here. allowed: what takes it leaves them out, too.
function Lowering:refuse_whole_numbers(value, what, allowed)
  if value.whole and not allowed then
    self:fail("%s has whole numbers that were made of f32 (%s), and a model file keeps the fractions; allowed: as the "
      .. "ids of nn.Embedding, as the start of sparse.jagged_slice", what, value.whole)
  end
  return value
end

--- Dtypes of constants, which are f32 in the file: whole numbers that it cannot hold are found where a constant is
--- written.
Lowering.kinds = { f32 = true, f16 = true, bf16 = true, i32 = true, i64 = true, bool = true }

--- Whether two constants hold the same numbers.
function Lowering.equal(a, b)
  if not Tensor.is(a) or not Tensor.is(b) or text_of(a:shape()) ~= text_of(b:shape()) or a:dtype() ~= b:dtype() then
    return false
  end
  local x, y = a:to_list(), b:to_list()
  for i = 1, #x do
    if x[i] ~= y[i] and (x[i] == x[i] or y[i] == y[i]) then return false end -- NaN is one
  end
  return true
end

--- What stands for constants of the program's numbers that have a row for each sample, all rows alike (ones { n, 1 }):
--- one row, which repeats. nil: they are none.
function Lowering:row_of(a, b)
  if not (Tensor.is(a.constant) and self.first:is_own(a) and self.second:is_own(b)) or #a.shape ~= #b.shape then
    return nil
  end
  local axis = axis_of(a.shape, b.shape)
  if a.shape[axis] == b.shape[axis] then return nil end
  local row = P.lasting(function() return a.constant:slice(axis, 0, 1):clone() end)
  for _, x in ipairs { a, b } do
    if not self.equal(x.constant, row:expand(x.shape):contiguous()) then return nil end
  end
  return { constant = row, shape = row:shape(), at = a.at }
end

--- All arguments of the entry that is being lowered. free: they may be of samples and of members side by side.
function Lowering:arguments(skip, free)
  local a, b, list = self.entry.args, self.other.args, {}
  self.free = free
  for i = 1, self.entry.n do
    if i <= (skip or 1 / 0) then list[i] = self:resolve(a[i], b[i], ("argument %d"):format(i)) end
  end
  return list
end

--- The shape of a sample of the n-th result, or of an entry of it. any: of other dtypes than f32, too, whose numbers a
--- file has as f32: truth as 0 and 1, and the lengths of lists.
function Lowering:result_shape(n, entry, any)
  local a, b = self.entry.results[n or 1], self.other.results[n or 1]
  if entry then a, b = a.list[entry], b.list[entry] end
  if a.dtype ~= "f32" and not any then self:fail("the result is %s, wanted f32", tostring(a.dtype)) end
  return self:sample_shape(a.shape, b.shape)
end

--- The n-th result (or an entry of it) is this value.
function Lowering:set(value, n, entry)
  local item = self.entry.results[n or 1]
  if entry then item = item.list[entry] end
  self.of[item.id] = value
end

--- A value of this argument, which has to be one of samples.
function Lowering:sample(x, what)
  if type(x) == "table" and x.index then return x end
  if type(x) == "table" and not x.constant then self:fail "lengths or offsets of lists, where numbers are wanted" end
  self:fail("%s does not depend on the batch, where that is wanted", what)
end

--- The file's value of a constant: its numbers in row-major order.
function Lowering:constant(x)
  if x.index then return x end
  if not x.constant then self:fail "lengths or offsets of lists, where numbers are wanted" end
  local known = self.constants[x.at]
  if known then return { index = known.index, shape = x.shape, fixed = true } end
  local v = self:value({ math.max(product(x.shape), 1) }, { constant = x.constant, number = x.number, at = x.at,
    dtype = x.constant:dtype(), shape = x.constant:shape(), used = self:place() })
  self.constants[x.at] = v
  return { index = v.index, shape = x.shape, fixed = true }
end

--- A number as a value.
function Lowering:number(x)
  local at = ("number %.17g"):format(x)
  return self:constant { constant = Tensor.full({ 1 }, x, "f32", "cpu"), shape = {}, at = at, number = true }
end

--- What an operation computes, as a text: two with one text have one result. nil: it reads more than values.
local function text_of_operation(list, name, fields)
  if fields.bags or fields.items or fields.whole then return nil end
  local parts = { name, fields["function"] or "", tostring(list), text_of(fields.inputs), text_of(fields.sizes or {}) }
  for _, x in ipairs(fields.numbers or {}) do parts[#parts + 1] = ("%.17g"):format(x) end
  local p = fields.panels
  return table.concat(parts, " ") .. (p and (" %s %s"):format(p.at, tostring(p.transposed)) or "")
end

--- Append an operation, unless the same one is there; returns its result, of this shape a sample.
function Lowering:op(name, shape, fields)
  local text = text_of_operation(self.list, name, fields)
  local known = text and self.made[text]
  if known then return { index = known.index, shape = shape, list = known.list, axis = self.axis } end
  local v = self:value(shape, { list = self.list or nil })
  v.list, v.axis = self.list or nil, self.axis
  fields.op, fields.out = name, v.index
  fields.where = self.entry and self.entry.where
  if text then self.made[text] = v end
  self.operations[#self.operations + 1] = fields
  return v
end

--- Strides of a contiguous array.
local function strides_of(shape)
  local strides, n = {}, 1
  for i = #shape, 1, -1 do strides[i], n = n, n * shape[i] end
  return strides
end

local function joined_lists(...)
  local out = {}
  for _, list in ipairs { ... } do
    for _, x in ipairs(list) do out[#out + 1] = x end
  end
  return out
end

--- A copy of a view of x.
function Lowering:view(x, shape, strides, offset)
  if #shape > 7 then self:fail("a view of %d dimensions, allowed: up to 7", #shape) end
  local own, whole = strides_of(shape), product(shape) == product(x.shape)
  for i, size in ipairs(shape) do whole = whole and (size == 1 or strides[i] == own[i]) end
  if whole then return { index = x.index, shape = shape, list = self.list or nil, axis = self.axis } end
  return self:copy(x, shape, strides, offset)
end
function Lowering:copy(x, shape, strides, offset)
  return self:op("copy", shape, { inputs = { x.index }, sizes = joined_lists({ #shape, offset or 0 }, shape, strides) })
end

--- Entries start..stop-1 of dimension d.
function Lowering:slice(x, d, start, step, shape)
  local strides = strides_of(x.shape)
  local offset = start * strides[d]
  strides[d] = strides[d] * (step or 1)
  return self:view(x, shape, strides, offset)
end

--- Strides of an operand that broadcasts to `shape`, the result's; 0 repeats.
function Lowering:strides_to(x, shape)
  local own, strides, out = x.shape, strides_of(x.shape), {}
  local skip = #shape - #own
  if not x.fixed and not self.alone and skip + (x.axis or 1) ~= self.axis then
    self:fail("a tensor of shape %s a sample beside one of %s: samples would meet others", text_of(own), text_of(shape))
  end
  for i = 1, #shape do
    local size = own[i - skip]
    if size and size ~= 1 and size ~= shape[i] then
      self:fail("shapes %s and %s a sample do not fit", text_of(own), text_of(shape))
    end
    if x.fixed and i == self.axis and size and size ~= 1 then self:fail "a constant with a number for each sample" end
    out[i] = size and size ~= 1 and strides[i - skip] or 0
  end
  return out
end

local OF_TRUTH = { add = "maximum", mul = "mul", maximum = "maximum" } -- which is 0 and 1 in a file: or, and
--- A function of two tensors, element by element.
function Lowering:binary(name, a, b)
  local truth = self.entry.results[1].dtype == "bool" and OF_TRUTH[name]
  local shape = self:result_shape(1, nil, truth)
  name = truth or name
  local x, y = self:constant(a), self:constant(b)
  if #shape > 7 then self:fail("%d dimensions, allowed: up to 7", #shape) end
  local sizes = joined_lists({ #shape }, shape, self:strides_to(x, shape), self:strides_to(y, shape))
  self:set(self:op("binary", shape, { ["function"] = name, inputs = { x.index, y.index }, sizes = sizes }))
end

--- Element by element, of operands that broadcast to the result.
function Lowering:elements(name, operands, fields)
  local shape = self:result_shape(1, nil, true)
  if #shape > 7 then self:fail("%d dimensions, allowed: up to 7", #shape) end
  fields.inputs, fields.sizes = {}, joined_lists({ #shape }, shape)
  for i, x in ipairs(operands) do
    local v = type(x) == "number" and self:number(x) or self:constant(x)
    fields.inputs[i], fields.sizes = v.index, joined_lists(fields.sizes, self:strides_to(v, shape))
  end
  self:set(self:op(name, shape, fields))
end

--- Values and constants side by side along dimension d.
function Lowering:cat(list, d, shape)
  local inputs, sizes = {}, { product(shape, 1, d - 1), product(shape, d + 1) }
  for i, x in ipairs(list) do
    local v = self:constant(x)
    if v.fixed then
      if product(v.shape) ~= 1 and v.shape[self.axis] ~= 1 then self:fail "a constant with a row for each sample" end
    end
    inputs[i], sizes[i + 2] = v.index, v.shape[d] or 1
  end
  return self:op("cat", shape, { inputs = inputs, sizes = sizes })
end

--- A dimension, counted from 1, of n ones of which number `axis` are the samples: not this one.
function Lowering:dim(d, n, what, axis)
  d = d < 0 and d + n + 1 or d
  if d == (axis or 1) then
    self:fail("%s goes across samples: an answer would depend on the others of its batch", what)
  end
  return d
end

--- The operations that the outputs need, in order, and the values that they use.
function Lowering:needed(outputs)
  local used, kept = {}, {}
  for _, o in ipairs(outputs) do used[o.value] = true end
  for i = #self.operations, 1, -1 do
    local o = self.operations[i]
    if used[o.out] then
      table.insert(kept, 1, o)
      for _, x in ipairs(o.inputs) do used[x] = true end
      for _, b in ipairs(o.bags or {}) do
        if b.positions then used[b.positions] = true end
      end
    end
  end
  local values = {}
  for old in pairs(used) do values[old] = self.values[old + 1] end -- luacheck: ignore
  return kept, values
end

Lowering.text_of, Lowering.product, Lowering.strides_of, Lowering.joined = text_of, product, strides_of, joined_lists

return Lowering
