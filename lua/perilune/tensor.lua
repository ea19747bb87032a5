-- tensor.lua: tensors: making, reading, views, the gradient tape. Dense operations are in nn/functional.lua.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local C, check = P.C, P.check

local M = {}
local methods = {}
local meta = {}
local wrap, ctype = P.handle("peri_tensor", methods, meta)
M.wrap = wrap

local out = ffi.new "peri_tensor *[1]"
M.out = out -- for other modules of this layer: check(C.f(..., out)); return wrap(out[0])
local desc = ffi.new "peri_tensor_desc"
local dims = ffi.new "int64_t[8]"
local number = ffi.new "double[1]"

--- True for tensors.
function M.is(x) return ffi.istype(ctype, x) or (type(x) == "table" and ffi.istype(ctype, util.resolve(x))) end

--- The pointer of a live tensor, or an error.
local function ptr(t)
  local p = t.ptr
  if p == nil then P.fail "tensor: it was released (did it outlive its scope? keep it with peri.keep)" end
  return p
end
M.ptr = ptr

local function fill_dims(shape)
  for i = 1, #shape do dims[i - 1] = shape[i] end
  return #shape
end

-- -- making ------------------------------------------------------------------------------------------------------------------------

--- An uninitialised tensor of a shape (list of sizes).
function M.empty(shape, dtype, device)
  check(C.peri_tensor_new(P.device(device), P.dtype(dtype or "f32"), fill_dims(shape), dims, out))
  return wrap(out[0])
end

function M.full(shape, value, dtype, device)
  check(C.peri_tensor_full(P.device(device), P.dtype(dtype or "f32"), fill_dims(shape), dims, value, out))
  return wrap(out[0])
end

function M.zeros(shape, dtype, device) return M.full(shape, 0, dtype, device) end
function M.ones(shape, dtype, device) return M.full(shape, 1, dtype, device) end

--- Uniform numbers in [low, high): element i depends on (seed, stream, i) only.
function M.uniform(shape, low, high, seed, stream, dtype, device)
  check(C.peri_tensor_uniform(P.device(device), P.dtype(dtype or "f32"), fill_dims(shape), dims, low, high, seed, stream or 0, out))
  return wrap(out[0])
end

function M.normal(shape, mean, deviation, seed, stream, dtype, device)
  check(C.peri_tensor_normal(P.device(device), P.dtype(dtype or "f32"), fill_dims(shape), dims, mean, deviation, seed, stream or 0, out))
  return wrap(out[0])
end

-- C element types for the host side of reads and writes.
local host_types = { f64 = "double", f32 = "float", f16 = "uint16_t", bf16 = "uint16_t", i64 = "int64_t", i32 = "int32_t", i16 = "int16_t",
  i8 = "int8_t", u8 = "uint8_t", bool = "uint8_t", c64 = "float", c128 = "double" }
local parts = { c64 = 2, c128 = 2 }

local function measure(data, shape, depth)
  if type(data) ~= "table" then return end
  shape[depth] = shape[depth] or #data
  if shape[depth] ~= #data then P.fail(("tensor: a row of %d elements beside one of %d"):format(#data, shape[depth])) end
  for i = 1, #data do measure(data[i], shape, depth + 1) end
end

local function flatten(data, buffer, at)
  if type(data) == "table" then
    for i = 1, #data do at = flatten(data[i], buffer, at) end
    return at
  end
  buffer[at] = data == true and 1 or data or 0
  return at + 1
end

--- A tensor of numbers from a nested list; dtype f32 unless said otherwise; an empty list has shape {0}. `shape` (optional) reshapes.
--- 16-bit floats are rounded from f32. Complex numbers are pairs in the innermost lists.
function M.tensor(data, dtype, device, shape)
  dtype = type(dtype) == "number" and P.dtype_names[dtype] or dtype or "f32"
  if type(data) ~= "table" then data, shape = { data }, shape or {} end
  if dtype == "f16" or dtype == "bf16" then return M.tensor(data, "f32", device, shape):to(dtype) end
  local found = {}
  measure(data, found, 1)
  local n = 1
  for i = 1, #found do n = n * found[i] end
  if parts[dtype] then found[#found] = nil end
  local buffer = ffi.new(host_types[dtype] .. "[?]", math.max(n, 1))
  flatten(data, buffer, 0)
  if dtype == "bool" then
    for i = 0, n - 1 do buffer[i] = buffer[i] ~= 0 and 1 or 0 end
  end
  local t = M.empty(shape or found, dtype, device)
  check(C.peri_tensor_write(ptr(t), buffer, n * ffi.sizeof(host_types[dtype])))
  return t
end

--- A tensor from host memory (cdata or string) of numel elements.
function M.from_memory(data, shape, dtype, device)
  local t = M.empty(shape, dtype, device)
  return t:write(data)
end

-- -- looking ---------------------------------------------------------------------------------------------------------------------

function methods:describe()
  C.peri_tensor_describe(ptr(self), desc)
  return desc
end

--- Number of dimensions.
function methods:dim() return self:describe().ndim end
--- Sizes as a list.
function methods:shape()
  local d, shape = self:describe(), {}
  for i = 1, d.ndim do shape[i] = tonumber(d.shape[i - 1]) end
  return shape
end
--- Size of dimension d (1 is the first, -1 the last).
function methods:size(d)
  local x = self:describe()
  local i = d < 0 and d + x.ndim or d - 1
  if i < 0 or i >= x.ndim then P.fail(("tensor: dimension %d of %d"):format(d, x.ndim)) end
  return tonumber(x.shape[i])
end
function methods:numel() return tonumber(self:describe().numel) end
function methods:dtype() return P.dtype_names[self:describe().dtype] end
function methods:device() return ffi.string(C.peri_device_name(self:describe().device)) end
function methods:is_contiguous() return self:describe().contiguous end
function methods:is_leaf() return self:describe().leaf end

--- Host memory with all elements in row-major order (waits for them), its element count, and its C element type.
function methods:read()
  local d = self:describe()
  local name, n = P.dtype_names[d.dtype], tonumber(d.numel)
  local count = n * (parts[name] or 1)
  local buffer = ffi.new(host_types[name] .. "[?]", math.max(count, 1))
  check(C.peri_tensor_read(ptr(self), buffer, n * tonumber(C.peri_dtype_size(d.dtype))))
  return buffer, count
end

--- Overwrite all elements from host memory (cdata or string) of the same dtype.
function methods:write(data)
  local d = self:describe()
  check(C.peri_tensor_write(ptr(self), data, d.numel * C.peri_dtype_size(d.dtype)))
  return self
end

--- The element at flat position i (0 is the first) as a number.
function methods:item(i)
  check(C.peri_tensor_item(ptr(self), i or 0, number))
  return number[0]
end

local u32 = ffi.typeof "uint32_t *"

--- Like read, for numbers that become Lua's: every NaN is the plain one (LuaJIT takes some NaN bits for other types).
local function numbers(t, name)
  local buffer, n = t:read()
  local words = ffi.cast(u32, buffer)
  if name == "f32" or name == "c64" then
    for i = 0, n - 1 do
      if bit.band(words[i], 0x7fffffff) > 0x7f800000 then words[i] = 0x7fc00000 end
    end
  elseif name == "f64" or name == "c128" then
    for i = 0, n - 1 do
      local high = bit.band(words[2 * i + 1], 0x7fffffff)
      if high > 0x7ff00000 or high == 0x7ff00000 and words[2 * i] ~= 0 then words[2 * i], words[2 * i + 1] = 0, 0x7ff80000 end
    end
  end
  return buffer, n
end

local function nest(buffer, at, shape, depth, width)
  local list = {}
  if depth > #shape then return buffer[at], at + 1 end
  for i = 1, shape[depth] do list[i], at = nest(buffer, at, shape, depth + 1, width) end
  return list, at
end

--- All elements as a flat list of numbers.
function methods:to_list()
  local name = self:dtype()
  if name == "f16" or name == "bf16" then return self:to("f32"):to_list() end
  local buffer, n = numbers(self, name)
  local list = {}
  for i = 1, n do list[i] = tonumber(buffer[i - 1]) end
  return list
end

--- All elements as nested lists; a 0-dimensional tensor gives its number.
function methods:to_table()
  local name = self:dtype()
  if name == "f16" or name == "bf16" then return self:to("f32"):to_table() end
  local buffer, n = numbers(self, name)
  local flat = {}
  for i = 0, n - 1 do flat[i] = tonumber(buffer[i]) end
  local shape = self:shape()
  if parts[name] then shape[#shape + 1] = 2 end
  return (nest(flat, 0, shape, 1))
end

meta.__tostring = function(t)
  if t.ptr == nil then return "tensor (released)" end
  return ("tensor %s [%s] on %s"):format(t:dtype(), table.concat(t:shape(), ", "), t:device())
end

-- -- copies and views --------------------------------------------------------------------------------------------------------------

--- self[...] = src[...], cast and repeated as needed. Not recorded.
function methods:copy(src)
  check(C.peri_tensor_copy(ptr(self), ptr(src)))
  return self
end
function methods:fill(value)
  check(C.peri_tensor_fill(ptr(self), value))
  return self
end
--- Another dtype and/or device: t:to "f64", t:to("f32", "opaque"), t:to(nil, "cpu").
function methods:to(dtype, device)
  check(C.peri_tensor_to(ptr(self), dtype and P.dtype(dtype) or -1, device and P.device(device) or nil, out))
  return wrap(out[0])
end
function methods:reshape(...)
  local n = select("#", ...)
  if n == 1 and type((...)) == "table" then
    n = fill_dims((...))
  else
    for i = 1, n do dims[i - 1] = (select(i, ...)) end
  end
  check(C.peri_tensor_reshape(ptr(self), n, dims, out))
  return wrap(out[0])
end
--- Exchange dimensions a and b (1 is the first, -1 the last).
function methods:transpose(a, b)
  check(C.peri_tensor_transpose(ptr(self), a > 0 and a - 1 or a, b > 0 and b - 1 or b, out))
  return wrap(out[0])
end
--- Elements start..stop-1 of dimension d (d counts from 1; start and stop count from 0, as offsets do).
function methods:slice(d, start, stop, step)
  check(C.peri_tensor_slice(ptr(self), d > 0 and d - 1 or d, start, stop, step or 1, out))
  return wrap(out[0])
end
function methods:expand(shape)
  check(C.peri_tensor_expand(ptr(self), fill_dims(shape), dims, out))
  return wrap(out[0])
end
function methods:contiguous()
  check(C.peri_tensor_contiguous(ptr(self), out))
  return wrap(out[0])
end
function methods:detach()
  check(C.peri_tensor_detach(ptr(self), out))
  return wrap(out[0])
end
--- Another handle of the same tensor, outside any scope.
function methods:share()
  C.peri_tensor_retain(ptr(self))
  local scope = P.state.scope
  P.state.scope = false
  local h = wrap(self.ptr)
  P.state.scope = scope
  return h
end

-- -- gradients ---------------------------------------------------------------------------------------------------------------------

--- Make a leaf want a gradient (or not). Returns it.
function methods:requires_grad(on)
  check(C.peri_tensor_requires_grad(ptr(self), on ~= false))
  return self
end
--- The accumulated gradient, or nil.
function methods:grad()
  check(C.peri_tensor_grad(ptr(self), out))
  if out[0] ~= nil then return wrap(out[0]) end
end
--- Replace the gradient; nil drops it.
function methods:set_grad(grad)
  check(C.peri_tensor_grad_set(ptr(self), grad and ptr(grad) or nil))
  return self
end

local pass = ffi.new "peri_backward *[1]"
--- Run the backward pass from this tensor; `grad` is the upstream gradient (default 1, for one-element tensors). Waits for exchanges.
function methods:backward(grad)
  check(C.peri_backward_new(ptr(self), grad and ptr(grad) or nil, pass))
  local p, round = pass[0], 0
  local status = C.peri_backward_step(p)
  while status == C.PERI_PENDING do
    P.pause(round)
    round = round + 1
    status = C.peri_backward_step(p)
  end
  if status < 0 then -- releasing must not lose the message: it never touches the error record (style E5)
    C.peri_backward_release(p)
    check(status)
  end
  C.peri_backward_release(p)
end

M.methods = methods
M.meta = meta
return M
