-- core.lua: tensors: making, reading, views, the gradient tape. Dense operations are in ops.lua.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local lists = require "perilune.tensor.lists"
local C, check = P.C, P.check
local istype, type = ffi.istype, type

local M = {}
local methods = {}
local meta = {}
local wrap, ctype, ptr, wrap_lasting = P.handle("peri_tensor", methods, meta, "a tensor")
M.wrap = wrap
--- The pointer of a live tensor, or an error.
M.ptr = ptr
M.ctype = ctype
signature.handle("tensor", ctype)

local out = ffi.new "peri_tensor *[1]"
M.out = out -- for other modules of this layer: check(C.f(..., out)); return (wrap(out[0]))
local desc = P.struct "peri_tensor_info"
local MOST_DIMS = 8 -- PERI_MAX_DIMS
local dims = ffi.new "int64_t[8]"
local number = ffi.new "double[1]"
local sum_out = ffi.new "uint64_t[1]"

--- XXH3-64 of t's elements in row-major order, as checkpoints have it: uint64_t. Waits.
function M._checksum(t)
  check(C.peri_checkpoint_checksum(ptr(t), sum_out))
  return sum_out[0]
end

local int64, uint64 = ffi.typeof "int64_t", ffi.typeof "uint64_t"
--- True for Lua's numbers and 64-bit integers.
function M._is_number(x) return type(x) == "number" or istype(int64, x) or istype(uint64, x) end
signature.kind("scalar", "a number", M._is_number)

--- True for tensors that were not released.
function M.is_live(x) return istype(ctype, x) and x.ptr ~= nil end
--- True for tensors.
function M.is(x) return istype(ctype, x) or (type(x) == "table" and istype(ctype, util.resolve(x))) end

local function size_of(func, i, x)
  if type(x) == "cdata" then x = tonumber(x) end
  if type(x) == "number" and x == math.floor(x) and x >= -2 ^ 53 and x <= 2 ^ 53 then return x end
  P.fail(("%s: size %d of the shape is %s, allowed: whole numbers 0..2^53"):format(func, i, signature.text(x)))
end

--- Copy a shape to dims; returns its length. C says which of the numbers are sizes.
local function fill_dims(func, shape)
  local n = #shape
  if n > MOST_DIMS then P.fail(("%s: a shape of %d sizes, at most %d"):format(func, n, MOST_DIMS)) end
  for i = 1, n do dims[i - 1] = size_of(func, i, shape[i]) end
  return n
end

M._fill_dims, M._dims = fill_dims, dims -- of this layer: until the next call that takes a shape

-- -- making -----------------------------------------------------------------------------------------------------------

--- An uninitialised tensor of a shape (list of sizes).
function M.empty(shape, dtype, device)
  check(C.peri_tensor_new(P.device(device), P.dtype(dtype or "f32"), fill_dims("empty", shape), dims, out))
  return (wrap(out[0]))
end

function M.full(shape, value, dtype, device)
  if type(value) == "cdata" then return (M.empty(shape, dtype, device):fill(value)) end -- a 64-bit integer
  local n = fill_dims("full", shape)
  check(C.peri_tensor_full(P.device(device), P.dtype(dtype or "f32"), n, dims, value, out))
  return (wrap(out[0]))
end

--- The number x as a tensor without dimensions where `t` is, of the dtype with this code (t's own).
function M._scalar(x, t, code)
  local d = t:describe()
  check(C.peri_tensor_full(d.device, code or d.dtype, 0, nil, x, out))
  return (wrap(out[0]))
end
--- A tensor of t's shape, where t is, with the number x everywhere, of the dtype with this code (t's own).
function M._filled(t, x, code)
  local d = t:describe()
  if signature.watch.call then return (M.full(t:shape(), x, code or d.dtype, d.device)) end -- a recording knows full
  check(C.peri_tensor_full(d.device, code or d.dtype, d.ndim, d.shape, x, out))
  return (wrap(out[0]))
end
function M.zeros(shape, dtype, device) return (M.full(shape, 0, dtype, device)) end
function M.ones(shape, dtype, device) return (M.full(shape, 1, dtype, device)) end

--- Uniform numbers in [low, high): element i depends on (seed, stream, i) only.
function M.uniform(shape, low, high, seed, stream, dtype, device)
  local n = fill_dims("uniform", shape)
  check(C.peri_tensor_uniform(P.device(device), P.dtype(dtype or "f32"), n, dims, low, high, seed, stream or 0, out))
  return (wrap(out[0]))
end

function M.normal(shape, mean, deviation, seed, stream, dtype, device)
  local n = fill_dims("normal", shape)
  check(C.peri_tensor_normal(P.device(device), P.dtype(dtype or "f32"), n, dims, mean, deviation, seed, stream or 0,
    out))
  return (wrap(out[0]))
end

-- C element types for the host side of reads and writes.
local host_types = { f64 = "double", f32 = "float", f16 = "uint16_t", bf16 = "uint16_t", i64 = "int64_t",
  i32 = "int32_t", i16 = "int16_t", i8 = "int8_t", u8 = "uint8_t", bool = "uint8_t", c64 = "float", c128 = "double" }
local parts = { c64 = 2, c128 = 2 }

local function write_list(func, data, dtype, device, found, shape, n)
  local name = (dtype == "f16" or dtype == "bf16") and "f32" or dtype
  local buffer = ffi.new(host_types[name] .. "[?]", math.max(n, 1))
  if n > 0 then lists.flatten(func, data, buffer, 0, found, 1, dtype) end
  if parts[dtype] and (n > 0 or #found > 1) then found[#found] = nil end
  local t = M.empty(shape or found, name, device)
  check(C.peri_tensor_write(ptr(t), buffer, n * ffi.sizeof(host_types[name])))
  return name == dtype and t or t:to(dtype)
end

--- A tensor of numbers from a nested list; dtype f32 unless said otherwise; an empty list has shape {0}. `shape`
--- (optional) reshapes. A number that does not fit the dtype is an error: 300 in u8, 1.5 in i64, 1e300 in f32. 16-bit
--- floats are rounded from f32; of bool everything but 0 and false is true. Complex numbers are pairs in the innermost
--- lists.
function M.tensor(data, dtype, device, shape) return (M._named_tensor("tensor", data, dtype, device, shape)) end

--- The same; errors begin with `func`.
function M._named_tensor(func, data, dtype, device, shape)
  dtype = P.dtype_names[P.dtype(dtype or "f32")]
  data = util.resolve(data)
  if type(data) == "table" and getmetatable(data) ~= nil or istype(ctype, data) then
    P.fail(("%s: an object (%s), wanted a number or nested lists of numbers"):format(func,
      M.is(data) and M._text(data) or tostring(data):match "^[^\n]*"))
  end
  if data == nil then P.fail(func .. ": the data are nil, wanted a number or a list") end
  if type(data) ~= "table" then data, shape = { data }, shape or {} end
  local found = {}
  lists.measure(func, data, found, 1, MOST_DIMS + (parts[dtype] and 1 or 0))
  found.numbers = nil
  local n = 1
  for i = 1, #found do n = n * found[i] end
  if parts[dtype] and n > 0 and found[#found] ~= 2 then
    P.fail(("%s: %s from innermost lists of %d numbers, wanted pairs (real and imaginary part)"):format(func, dtype,
      found[#found]))
  end
  return write_list(func, data, dtype, device, found, shape, n)
end

-- C elements that are numbers of a dtype, beside host_types: the other names of the same number.
local also = { bool = "bool", c64 = "complex float", c128 = "complex" }

--- What is known of a C type: { array =, pointer =, element = its name }; by the text of the C type.
local known = {}
local function memory_of(data)
  local text = tostring(ffi.typeof(data))
  local type_of = known[text]
  if not type_of then
    local plain = text:match "^ctype<(.*)>$":gsub("const ", ""):gsub("volatile ", ""):gsub("%(&%)", "")
    local element, rest = plain:match "^([%w_ ]-) ?([%[%*%(].*)$"
    type_of = { array = rest and rest:find "^%[[%d%?]" ~= nil, pointer = rest and rest:find "^%*$" ~= nil,
      element = element }
    known[text] = type_of
  end
  return type_of
end

local names = {}
for _, name in ipairs { "double", "float", "uint16_t", "int64_t", "int32_t", "int16_t", "int8_t", "uint8_t" } do
  names[name] = tostring(ffi.typeof(name)):match "^ctype<(.*)>$" -- as LuaJIT calls it
end

--- Bytes that a string or an array has for a tensor of dtype `dtype`; math.huge for a pointer, whose room only the
--- caller knows. The elements of C memory are numbers of that dtype; those of a string, a `char` array, and behind a
--- `void *` are bytes of any. `exact`: there must be no more.
local function room_of(func, data, dtype)
  if type(data) == "string" then return #data, true end
  local memory = type(data) == "cdata" and not istype(ctype, data) and memory_of(data)
  -- an object of Perilune's is no numbers
  if memory and memory.element and memory.element:find "^struct peri_" then memory = false end
  if not memory or not memory.array and (not memory.pointer or data == nil) then
    P.fail(("%s: data is %s, wanted a string, or a C array or pointer"):format(func, data == nil and "nil"
      or signature.text(data)))
  end
  local bytes = memory.element == "char" and dtype ~= "i8"
  if not bytes and memory.element ~= names[host_types[dtype]] and memory.element ~= also[dtype]
    and memory.element ~= "void" then
    P.fail(("%s: data is C memory of '%s' for elements of %s, wanted '%s' (or bytes: a string, a 'char' array, a "
      .. "'void *')"):format(func, memory.element, dtype, host_types[dtype]))
  end
  return memory.pointer and math.huge or ffi.sizeof(data), bytes and not memory.pointer
end
M._room_of = room_of

--- A tensor from host memory: a C array or pointer whose elements are of the dtype's type (those that `read` gives: f32
--- of float, f16 and bf16 of uint16_t, complex numbers of pairs), or bytes of any dtype (a string, a `char` array, a
--- `void *`). Exactly as many bytes, no fewer elements in an array; what a pointer points at is not known here.
function M.from_memory(data, shape, dtype, device)
  room_of("from_memory", data, P.dtype_names[P.dtype(dtype or "f32")])
  local t = M.empty(shape, dtype, device)
  return t:write(data)
end

-- -- looking ----------------------------------------------------------------------------------------------------------

--- A peri_tensor_info of the tensor, which the next call fills again.
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
  local x = methods.describe(self)
  local i = d < 0 and d + x.ndim or d - 1
  if i < 0 or i >= x.ndim then P.fail(("tensor: dimension %d of %d"):format(d, x.ndim)) end
  return tonumber(x.shape[i])
end
--- Elements of its memory from one of dimension d to the next; without d a list of them all.
function methods:stride(d)
  local x, list = self:describe(), {}
  if d then
    local i = d < 0 and d + x.ndim or d - 1
    if i < 0 or i >= x.ndim then P.fail(("tensor: dimension %d of %d"):format(d, x.ndim)) end
    return tonumber(x.stride[i])
  end
  for i = 1, x.ndim do list[i] = tonumber(x.stride[i - 1]) end
  return list
end
--- Bytes of an element.
function methods:element_size() return tonumber(C.peri_dtype_size(self:describe().dtype)) end
function methods:numel() return tonumber(self:describe().numel) end
function methods:dtype() return P.dtype_names[self:describe().dtype] end
function methods:device() return ffi.string(C.peri_device_name(self:describe().device)) end
function methods:is_contiguous() return self:describe().contiguous end
--- Whether a tensor of a device lies in the host's memory, where the device's kernels reach it: rows of tables with
--- fused_uvm.
function methods:is_mapped() return self:describe().mapped end
function methods:is_leaf() return self:describe().leaf end

local MOST_BYTES = 0x7fffff00 -- of a C array that LuaJIT makes

--- Host memory with all elements in row-major order (waits for them), its element count, and its C element type.
function methods:read()
  local d = self:describe()
  local name, n = P.dtype_names[d.dtype], tonumber(d.numel)
  local count, bytes = n * (parts[name] or 1), n * tonumber(C.peri_dtype_size(d.dtype))
  if bytes > MOST_BYTES then
    P.fail(("read: %s is %.0f bytes, allowed: %.0f, the largest array of LuaJIT; read slices of it"):format(
      M._text(self), bytes, MOST_BYTES))
  end
  local buffer = ffi.new(host_types[name] .. "[?]", math.max(count, 1))
  check(C.peri_tensor_read(ptr(self), buffer, bytes))
  return buffer, count
end

--- Overwrite all elements from host memory, as in from_memory.
function methods:write(data)
  local d = self:describe()
  local bytes, room, exact = tonumber(d.numel * C.peri_dtype_size(d.dtype)),
    room_of("write", data, P.dtype_names[d.dtype])
  if room < bytes or exact and room ~= bytes then
    P.fail(("write: %d bytes of data for %s, which has %d"):format(room, M._text(self), bytes))
  end
  check(C.peri_tensor_write(ptr(self), data, bytes))
  return self
end

--- A number of a tensor's memory as Lua's; whole numbers that Lua's do not hold exactly (from 2^53 on) stay 64-bit
--- integers.
local function exact(x)
  local y = tonumber(x)
  if y <= lists.EXACT and y >= -lists.EXACT or type(x) == "number" then return y end
  return x
end

--- The element at flat position i (0 is the first) as a number (i64 from 2^53 on: a 64-bit integer); without i that of
--- a tensor of one element.
function methods:item(i)
  if not i and self:numel() ~= 1 then
    P.fail(("item: %s has %d elements, wanted one; say which: item(0) is the first"):format(M._text(self),
      self:numel()))
  end
  check(C.peri_tensor_item(ptr(self), i or 0, number))
  local x = number[0]
  if (x > lists.EXACT or x < -lists.EXACT) and methods.dtype(self) == "i64" then return methods.read(self)[i or 0] end
  return x
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
      if high > 0x7ff00000 or high == 0x7ff00000 and words[2 * i] ~= 0 then
        words[2 * i], words[2 * i + 1] = 0, 0x7ff80000
      end
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

--- All elements as a flat list of numbers (i64 from 2^53 on: 64-bit integers).
function methods:to_list()
  local name = self:dtype()
  if name == "f16" or name == "bf16" then return self:to("f32"):to_list() end
  local buffer, n = numbers(self, name)
  local list = {}
  for i = 1, n do list[i] = exact(buffer[i - 1]) end
  return list
end

--- All elements as nested lists; a 0-dimensional tensor gives its number.
function methods:to_table()
  local name = self:dtype()
  if name == "f16" or name == "bf16" then return self:to("f32"):to_table() end
  local buffer, n = numbers(self, name)
  local flat = {}
  for i = 0, n - 1 do flat[i] = exact(buffer[i]) end
  local shape = self:shape()
  if parts[name] then shape[#shape + 1] = 2 end
  return (nest(flat, 0, shape, 1))
end

--- "tensor f32 [2, 3] on cpu": what messages call a tensor. tostring(t) shows its elements, too (print.lua).
function M._text(t)
  if not istype(ctype, t) then return require("perilune.errors").kind(t) end
  if t.ptr == nil then return "tensor (released)" end
  return ("tensor %s [%s] on %s"):format(methods.dtype(t), table.concat(methods.shape(t), ", "), methods.device(t))
end
require("perilune.errors").handle_text = function(x) return istype(ctype, x) and M._text(x) end

-- -- copies and views -------------------------------------------------------------------------------------------------

--- self[...] = src[...], cast and repeated as needed. Not recorded.
function methods:copy(src)
  check(C.peri_tensor_copy(ptr(self), ptr(src)))
  return self
end
--- All elements become a number, which may be a 64-bit integer: 9007199254740993LL.
function methods:fill(value)
  if type(value) ~= "number" then return self:copy(M.tensor({ value }, self:dtype(), self:device(), {})) end
  check(C.peri_tensor_fill(ptr(self), value))
  return self
end
-- How devices begin, for those who write one in PyTorch's place. No dtype begins so.
local devices = { cpu = true, cud = true, gpu = true, opa = true }

--- Another dtype and/or device: t:to "f64", t:to("f32", "opaque"), t:to(nil, "cpu"). non_blocking: from pinned memory
--- without waiting; nobody may change this tensor until the device's current stream has come past the copy.
function methods:to(dtype, device, non_blocking)
  local move = non_blocking and C.peri_tensor_upload or C.peri_tensor_to
  if devices[type(dtype) == "string" and dtype:sub(1, 3)] then -- sub, not match: this is compiled
    P.fail(("to: dtype is '%s'; a device is the second argument: t:to(nil, '%s')"):format(dtype, dtype))
  end
  check(move(ptr(self), dtype and P.dtype(dtype) or -1, device and P.device(device) or nil, out))
  return (wrap(out[0]))
end
--- A copy of this tensor of cpu in memory that is pinned for `device` (default: the rank's), which can copy from it
--- without waiting.
function methods:pin_memory(device)
  check(C.peri_tensor_pin(ptr(self), P.device(device), out))
  return (wrap(out[0]))
end
--- Whether it is in pinned memory.
function methods:is_pinned() return C.peri_tensor_is_pinned(ptr(self)) end
function methods:reshape(...)
  local n = select("#", ...)
  if n == 1 and type((...)) == "table" then
    n = fill_dims("reshape", (...))
  else
    if n > MOST_DIMS then P.fail(("reshape: a shape of %d sizes, at most %d"):format(n, MOST_DIMS)) end
    for i = 1, n do dims[i - 1] = size_of("reshape", i, (select(i, ...))) end
  end
  check(C.peri_tensor_reshape(ptr(self), n, dims, out))
  return (wrap(out[0]))
end
--- Exchange dimensions a and b (1 is the first, -1 the last).
function methods:transpose(a, b)
  check(C.peri_tensor_transpose(ptr(self), a > 0 and a - 1 or a, b > 0 and b - 1 or b, out))
  return (wrap(out[0]))
end
--- The place that a negative number names among n elements: -1 is the last one.
local function from_end(t, what, x, n)
  if x >= -n then return x + n end
  P.fail(("slice: %s is %d of %s, allowed: %d..%d"):format(what, tonumber(x), M._text(t), -n, n))
end

--- Elements start..stop-1 of dimension d, each step-th of them: a view. Dimensions count from 1 (-1 the last); elements
--- count from 0 (-1 the last), and stop (nil: the end) is not among them, as in offsets: t:slice(1, 0, 2) are the first
--- two rows, t:slice(1, -2) the last two, and t:slice(1, a, a) is empty.
function methods:slice(d, start, stop, step)
  if not stop or stop < 0 or start < 0 then
    local n = methods.size(self, d)
    if start < 0 then start = from_end(self, "start", start, n) end
    if not stop then stop = n elseif stop < 0 then stop = from_end(self, "stop", stop, n) end
  end
  check(C.peri_tensor_slice(ptr(self), d > 0 and d - 1 or d, start, stop, step or 1, out))
  return (wrap(out[0]))
end
--- So many elements of dimension d from `start` on.
function methods:narrow(d, start, length)
  local n = methods.size(self, d)
  if start < 0 then start = from_end(self, "start", start, n) end
  return (methods.slice(self, d, start, start + length))
end
function methods:expand(shape)
  check(C.peri_tensor_expand(ptr(self), fill_dims("expand", shape), dims, out))
  return (wrap(out[0]))
end
function methods:contiguous()
  check(C.peri_tensor_contiguous(ptr(self), out))
  return (wrap(out[0]))
end
function methods:detach()
  check(C.peri_tensor_detach(ptr(self), out))
  return (wrap(out[0]))
end
--- Another handle of the same tensor, outside any scope.
function methods:share()
  C.peri_tensor_retain(ptr(self))
  return wrap_lasting(self.ptr)
end

-- -- gradients --------------------------------------------------------------------------------------------------------

--- Make a leaf want a gradient (or not). Returns it.
function methods:requires_grad(on)
  check(C.peri_tensor_requires_grad_set(ptr(self), on ~= false))
  return self
end
--- The accumulated gradient, or nil.
function methods:grad()
  check(C.peri_tensor_grad(ptr(self), out))
  if out[0] ~= nil then return (wrap(out[0])) end
end
--- Replace the gradient; nil drops it.
function methods:set_grad(grad)
  check(C.peri_tensor_grad_set(ptr(self), grad and ptr(grad) or nil))
  return self
end

signature.check_one("", M, {
  empty = "shape: list, dtype: dtype?, device: device?",
  zeros = "shape: list, dtype: dtype?, device: device?",
  ones = "shape: list, dtype: dtype?, device: device?",
  full = "shape: list, value: scalar, dtype: dtype?, device: device?",
  uniform = "shape: list, low: number, high: number, seed: integer, stream: integer?, dtype: dtype?, device: device?",
  normal = "shape: list, mean: number, deviation: number, seed: integer, stream: integer?, dtype: dtype?, device: "
    .. "device?",
  tensor = "data: any, dtype: dtype?, device: device?, shape: list?",
  _named_tensor = "func: string, data: any, dtype: dtype?, device: device?, shape: list?",
  from_memory = "data: any, shape: list, dtype: dtype?, device: device?",
})
signature.check_each_one("tensor:", methods, { "describe", "dim", "shape", "numel", "dtype", "device", "is_contiguous",
  "is_mapped", "is_leaf", "element_size", "is_pinned", "to_list", "to_table", "contiguous",
  "detach", "share", "grad" },
    "self: tensor")
signature.check_one("tensor:", methods, {
  size = "self: tensor, d: dim", stride = "self: tensor, d: dim?",
  write = "self: tensor, data: any", item = "self: tensor, i: count?",
  copy = "self: tensor, src: tensor", fill = "self: tensor, value: scalar",
  to = "self: tensor, dtype: dtype?, device: device?, non_blocking: boolean?",
  pin_memory = "self: tensor, device: device?", transpose = "self: tensor, a: dim, b: dim",
  slice = "self: tensor, d: dim, start: integer, stop: integer?, step: integer?",
  narrow = "self: tensor, d: dim, start: integer, length: count", expand = "self: tensor, shape: list",
  requires_grad = "self: tensor, on: boolean?", set_grad = "self: tensor, grad: tensor?",
})

signature.check("tensor:", methods, { read = "self: tensor" })
signature.check_none("tensor:", methods, { "reshape" })

signature.methods = methods
M.methods = methods
M.meta = meta
return M
