-- jt.lua: JaggedTensor: values cut into bags.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
local A = require "perilune.jagged.arguments"
local C, check = P.C, P.check

local M = {} -- the class
local methods, meta = {}, {}
local wrap, ctype, ptr, wrap_lasting

local out = ffi.new "peri_jt *[1]"
local tensor_out = Tensor.out
local numbers = ffi.new "const int64_t *[1]"
local number = ffi.new "int64_t[1]"
local bool_out = ffi.new "bool[1]"

--- True for JaggedTensors.
function M.is(x) return ffi.istype(ctype, x) or (type(x) == "table" and ffi.istype(ctype, util.resolve(x))) end

M.methods, M.meta = methods, meta

-- -- making -----------------------------------------------------------------------------------------------------------

local allowed = { values = true, weights = true, lengths = true, offsets = true, device = true }
local args = P.struct "peri_jt_config"

local function new_jt(func, a)
  A.check(func, a, allowed)
  if a.values == nil then P.fail(func .. ": argument 'values' is missing") end
  local values = A.tensor(func, "values", a.values, "f32", a.device)
  local weights = A.tensor(func, "weights", a.weights, "f32", a.device)
  local lengths = A.tensor(func, "lengths", a.lengths, "i32", a.device)
  local offsets = A.tensor(func, "offsets", a.offsets, "i64", a.device)
  args.values, args.weights, args.lengths, args.offsets = A.ptr(values), A.ptr(weights), A.ptr(lengths), A.ptr(offsets)
  check(C.peri_jt_new(args, out))
  return (wrap(out[0]))
end

--- A JaggedTensor of tensors or lists: values, weights, lengths or offsets. Lists become f32 values and weights, i32
--- lengths, i64 offsets.
setmetatable(M, { __call = function(_, a) return new_jt("JaggedTensor", a) end,
  __tostring = function() return "class JaggedTensor" end })

--- Bag i has the rows of values[i]; weights (optional) is a list alike. Plain lists of numbers become f32.
function M.from_dense(values, weights, device)
  local n = #values
  local tensors, row_weights = {}, weights and {}
  local array = ffi.new("peri_tensor *[?]", n > 0 and n or 1)
  local weight_array = weights and ffi.new("peri_tensor *[?]", n > 0 and n or 1) or nil
  if weights and #weights ~= n then
    P.fail(("JaggedTensor.from_dense: %d weights for %d values"):format(#weights, n))
  end
  for i = 1, n do
    tensors[i] = A.tensor("JaggedTensor.from_dense", "an entry of values", values[i], "f32", device)
    array[i - 1] = Tensor.ptr(tensors[i])
    if weights then
      row_weights[i] = A.tensor("JaggedTensor.from_dense", "an entry of weights", weights[i], "f32", device)
      weight_array[i - 1] = Tensor.ptr(row_weights[i])
    end
  end
  check(C.peri_jt_from_dense(array, weight_array, n, out))
  return (wrap(out[0]))
end

--- Bag i has the first lengths[i] columns of row i of values; weights [rows, columns] (optional) alike.
function M.from_dense_lengths(values, lengths, weights)
  lengths = A.tensor("JaggedTensor.from_dense_lengths", "lengths", lengths, "i32", values:device())
  check(C.peri_jt_from_dense_lengths(Tensor.ptr(values), Tensor.ptr(lengths), A.ptr(weights), out))
  return (wrap(out[0]))
end

--- No bag: { is_weighted, device, values_dtype = "f32", weights_dtype = "f32", lengths_dtype = "i32" }.
function M.empty(a)
  a = P.util.named("JaggedTensor.empty", a, { is_weighted = false, device = P.util.optional, values_dtype = "f32",
    weights_dtype = "f32", lengths_dtype = "i32" })
  return M { values = Tensor.empty({ 0 }, a.values_dtype, a.device),
    lengths = Tensor.empty({ 0 }, a.lengths_dtype, a.device), weights = a.is_weighted
      and Tensor.empty({ 0 }, a.weights_dtype, a.device) or nil }
end

--- Room for a copy of a JaggedTensor, on its device or another: for copy_.
function M.empty_like(jt, device)
  check(C.peri_jt_empty_like(ptr(jt), device and P.device(device) or nil, out))
  return (wrap(out[0]))
end

-- -- looking ----------------------------------------------------------------------------------------------------------

local function tensor_of_call(status)
  check(status)
  if tensor_out[0] ~= nil then return Tensor.wrap(tensor_out[0]) end
end

function methods:values() return tensor_of_call(C.peri_jt_values(ptr(self), tensor_out)) end
function methods:weights_or_none() return tensor_of_call(C.peri_jt_weights(ptr(self), tensor_out)) end
function methods:weights()
  local t = self:weights_or_none()
  if not t then P.fail "JaggedTensor: it has no weights" end
  return t
end
function methods:lengths() return tensor_of_call(C.peri_jt_lengths(ptr(self), tensor_out)) end
function methods:offsets() return tensor_of_call(C.peri_jt_offsets(ptr(self), tensor_out)) end
--- The same bags with other weights, one for each value (a tensor).
function methods:with_weights(weights)
  return new_jt("JaggedTensor:with_weights", { values = self:values(), lengths = self:lengths(), weights = weights })
end
--- The same bags of what f makes of the values: any layer that works row by row, as Linear and LayerNorm do. f(values)
--- has as many rows.
function methods:map(f)
  local values = self:values()
  local made = f(values)
  if not Tensor.is(made) or made:dim() < 1 or made:size(1) ~= values:size(1) then
    P.fail(("JaggedTensor:map: the function made %s of %d rows of values, wanted a tensor of as many rows"):format(
      Tensor.is(made) and Tensor._text(made) or "a " .. type(made), values:size(1)))
  end
  return (self:_with_values(made))
end
--- The same bags with these values: what a recording knows of map (export/lists.lua).
function methods:_with_values(values)
  return new_jt("JaggedTensor:map", { values = values, lengths = self:lengths(), weights = self:weights_or_none() })
end
--- Check lengths and offsets now. Returns the JaggedTensor.
function methods:validate()
  check(C.peri_jt_validate(ptr(self)))
  return self
end
--- Rows in the longest bag (known to the host: this may wait for the device).
function methods:longest()
  check(C.peri_jt_longest(ptr(self), number))
  return tonumber(number[0])
end
--- Offsets as a list of numbers.
function methods:offset_list()
  check(C.peri_jt_offsets_on_host(ptr(self), numbers))
  return A.list(numbers[0], tonumber(C.peri_jt_bags(ptr(self))) + 1)
end

-- -- operations -------------------------------------------------------------------------------------------------------

local function rows(jt, t)
  local offsets, list = jt:offset_list(), {}
  for i = 1, #offsets - 1 do list[i] = t:slice(1, offsets[i], offsets[i + 1]) end
  return list
end

--- One tensor per bag: views of values, of weights.
function methods:to_dense() return rows(self, self:values()) end
function methods:to_dense_weights() return rows(self, self:weights()) end

local function padded_dense(jt, length, padding, weights)
  check(C.peri_jt_to_padded_dense(ptr(jt), length or -1, padding or 0, weights, tensor_out))
  return Tensor.wrap(tensor_out[0])
end

--- [bags, length, ...]: padded with `padding_value` (0), cut to `desired_length` (default: the longest bag).
function methods:to_padded_dense(desired_length, padding_value)
  return padded_dense(self, desired_length, padding_value, false)
end
function methods:to_padded_dense_weights(desired_length, padding_value)
  return padded_dense(self, desired_length, padding_value, true)
end

--- The same on another device (this one itself if it is there). non_blocking: from pinned memory without waiting (see
--- Tensor:to).
function methods:to(device, non_blocking)
  check((non_blocking and C.peri_jt_upload or C.peri_jt_to)(ptr(self), P.device(device), out))
  return (wrap(out[0]))
end
--- A copy of this one, of cpu, in memory that is pinned for `device` (default: the rank's).
function methods:pin_memory(device)
  check(C.peri_jt_pin(ptr(self), P.device(device), out))
  return (wrap(out[0]))
end
--- Overwrite this JaggedTensor with another of the same counts. Returns this one.
function methods:copy_(src)
  check(C.peri_jt_copy(ptr(self), ptr(src)))
  return self
end
--- Same lengths, values and weights, bit for bit.
function methods:equal(other)
  check(C.peri_jt_equal(ptr(self), ptr(other), bool_out))
  return bool_out[0]
end
--- Bytes of its tensors.
function methods:size_in_bytes() return tonumber(C.peri_jt_bytes(ptr(self))) end
function methods:device() return self:values():device() end
--- Another handle of the same JaggedTensor, outside any scope.
function methods:share()
  C.peri_jt_retain(ptr(self))
  return wrap_lasting(self.ptr)
end

meta.__len = function(self) return tonumber(C.peri_jt_bags(ptr(self))) end
meta.__tostring = function(self)
  if self.ptr == nil then return "JaggedTensor (released)" end
  local values = self:values()
  return ("JaggedTensor: %d bags of %s"):format(tonumber(C.peri_jt_bags(ptr(self))), tostring(values))
end

wrap, ctype, ptr, wrap_lasting = P.handle("peri_jt", methods, meta, "a JaggedTensor")
M.wrap = wrap
--- The pointer of a live JaggedTensor, or an error.
M.ptr = ptr
signature.handle("JaggedTensor", ctype)

signature.check("JaggedTensor.", M, { from_dense = "values: list, weights: list?, device: device?",
  from_dense_lengths = "values: tensor, lengths: any, weights: tensor?",
  empty_like = "jt: JaggedTensor, device: device?" })
signature.check_each("JaggedTensor:", methods, { "values", "weights_or_none", "weights", "lengths", "offsets",
  "validate", "longest", "offset_list", "to_dense", "to_dense_weights", "size_in_bytes", "device", "share" },
    "self: JaggedTensor")
signature.check("JaggedTensor:", methods, {
  to_padded_dense = "self: JaggedTensor, desired_length: count?, padding_value: number?",
  to_padded_dense_weights = "self: JaggedTensor, desired_length: count?, padding_value: number?",
  to = "self: JaggedTensor, device: device?, non_blocking: boolean?",
  pin_memory = "self: JaggedTensor, device: device?", copy_ = "self: JaggedTensor, src: JaggedTensor",
  equal = "self: JaggedTensor, other: JaggedTensor", with_weights = "self: JaggedTensor, weights: tensor",
  _with_values = "self: JaggedTensor, values: tensor",
  map = "self: JaggedTensor, f: callable",
})

return M
