-- jt.lua: JaggedTensor: values cut into bags.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local A = require "perilune.jagged.arguments"
local C, check = P.C, P.check

local M = {} -- the class
local methods, meta = {}, {}
local wrap, ctype

local out = ffi.new "peri_jt *[1]"
local tensor_out = Tensor.out
local numbers = ffi.new "const int64_t *[1]"
local number = ffi.new "int64_t[1]"

--- True for JaggedTensors.
function M.is(x) return ffi.istype(ctype, x) end

local function ptr(jt)
  local p = jt.ptr
  if p == nil then P.fail "JaggedTensor: it was released (did it outlive its scope? keep it with peri.keep)" end
  return p
end
M.ptr = ptr
M.methods, M.meta = methods, meta

-- -- making ------------------------------------------------------------------------------------------------------------------------

local allowed = { values = true, weights = true, lengths = true, offsets = true, device = true }
local args = ffi.new "peri_jt_args"

local function make(func, a)
  A.check(func, a, allowed)
  if a.values == nil then P.fail(func .. ": argument 'values' is missing") end
  local values = A.tensor(func, "values", a.values, "f32", a.device)
  local weights = A.tensor(func, "weights", a.weights, "f32", a.device)
  local lengths = A.tensor(func, "lengths", a.lengths, "i32", a.device)
  local offsets = A.tensor(func, "offsets", a.offsets, "i64", a.device)
  args.values, args.weights, args.lengths, args.offsets = A.ptr(values), A.ptr(weights), A.ptr(lengths), A.ptr(offsets)
  check(C.peri_jt_new(args, out))
  return wrap(out[0])
end

--- A JaggedTensor of tensors or lists: values, weights, lengths or offsets. Lists become f32 values and weights, i32 lengths, i64 offsets.
setmetatable(M, { __call = function(_, a) return make("JaggedTensor", a) end, __tostring = function() return "class JaggedTensor" end })

-- -- looking -----------------------------------------------------------------------------------------------------------------------

local function tensor(status)
  check(status)
  if tensor_out[0] ~= nil then return Tensor.wrap(tensor_out[0]) end
end

function methods:values() return tensor(C.peri_jt_values(ptr(self), tensor_out)) end
function methods:weights_or_none() return tensor(C.peri_jt_weights(ptr(self), tensor_out)) end
function methods:weights()
  local t = self:weights_or_none()
  if not t then P.fail "JaggedTensor: it has no weights" end
  return t
end
function methods:lengths() return tensor(C.peri_jt_lengths(ptr(self), tensor_out)) end
function methods:offsets() return tensor(C.peri_jt_offsets(ptr(self), tensor_out)) end
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

meta.__len = function(self) return tonumber(C.peri_jt_bags(ptr(self))) end
meta.__tostring = function(self)
  if self.ptr == nil then return "JaggedTensor (released)" end
  local values = self:values()
  return ("JaggedTensor: %d bags of %s"):format(#self, tostring(values))
end

wrap, ctype = P.handle("peri_jt", methods, meta)
M.wrap = wrap

return M
