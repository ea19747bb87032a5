-- kjt.lua: KeyedJaggedTensor: the ids of a batch, for every key and row a bag.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local Keys = require "perilune.jagged.keys"
local A = require "perilune.jagged.arguments"
local C, check = P.C, P.check

local M = {} -- the class
local methods, meta = {}, {}
local wrap, ctype

local out = ffi.new "peri_kjt *[1]"
local desc = ffi.new "peri_kjt_desc"
local numbers = ffi.new "const int64_t *[1]"
local number = ffi.new "int64_t[1]"

--- True for KeyedJaggedTensors.
function M.is(x) return ffi.istype(ctype, x) end

local function ptr(kjt)
  local p = kjt.ptr
  if p == nil then P.fail "KeyedJaggedTensor: it was released (did it outlive its scope? keep it with peri.keep)" end
  return p
end
M.ptr = ptr
M.methods, M.meta, M.out = methods, meta, out

-- -- making ------------------------------------------------------------------------------------------------------------------------

local allowed = { keys = true, values = true, weights = true, lengths = true, offsets = true, stride = true, stride_per_key_per_rank = true,
  inverse_indices = true, device = true }
local args = ffi.new "peri_kjt_args"

local function make(func, a)
  A.check(func, a, allowed)
  if a.keys == nil then P.fail(func .. ": argument 'keys' is missing") end
  if a.values == nil then P.fail(func .. ": argument 'values' is missing") end
  local keys = Keys.of(a.keys)
  local values = A.tensor(func, "values", a.values, "i64", a.device)
  local weights = A.tensor(func, "weights", a.weights, "f32", a.device)
  local lengths = A.tensor(func, "lengths", a.lengths, "i32", a.device)
  local offsets = A.tensor(func, "offsets", a.offsets, "i64", a.device)
  local strides, ranks, inverse_keys, inverse = nil, 0, nil, nil
  if a.stride_per_key_per_rank ~= nil then
    local rows
    strides, rows, ranks = A.matrix(func, "stride_per_key_per_rank", a.stride_per_key_per_rank)
    if rows ~= #keys then P.fail(("%s: stride_per_key_per_rank has %d rows for %d keys"):format(func, rows, #keys)) end
    ranks = math.max(ranks, rows == 0 and 1 or 0)
  end
  if a.inverse_indices ~= nil then
    if type(a.inverse_indices) ~= "table" then P.fail(func .. ": inverse_indices are { keys, tensor }") end
    inverse_keys = Keys.of(a.inverse_indices[1])
    inverse = A.tensor(func, "inverse_indices", a.inverse_indices[2], "i64", a.device)
  end
  args.keys, args.values, args.weights = keys.ptr, A.ptr(values), A.ptr(weights)
  args.lengths, args.offsets = A.ptr(lengths), A.ptr(offsets)
  args.stride, args.ranks, args.stride_per_key_per_rank = a.stride or -1, ranks, strides
  args.inverse_keys, args.inverse_indices = inverse_keys and inverse_keys.ptr, A.ptr(inverse)
  check(C.peri_kjt_new(args, out))
  return wrap(out[0])
end

--- A KJT of tensors or lists: keys, values, weights, lengths or offsets, stride, stride_per_key_per_rank, inverse_indices = { keys, tensor }.
--- Lists become i64 values and offsets, f32 weights, i32 lengths, on `device`.
setmetatable(M, { __call = function(_, a) return make("KeyedJaggedTensor", a) end, __tostring = function() return "class KeyedJaggedTensor" end })

--- The same from lengths, with the sizes of keys brought to the host (and everything checked) at once.
function M.from_lengths_sync(a)
  local kjt = make("KeyedJaggedTensor.from_lengths_sync", a)
  if a.lengths == nil then P.fail "KeyedJaggedTensor.from_lengths_sync: argument 'lengths' is missing" end
  return kjt:sync()
end

--- The same from offsets.
function M.from_offsets_sync(a)
  local kjt = make("KeyedJaggedTensor.from_offsets_sync", a)
  if a.offsets == nil then P.fail "KeyedJaggedTensor.from_offsets_sync: argument 'offsets' is missing" end
  return kjt:sync()
end

-- -- looking -----------------------------------------------------------------------------------------------------------------------

--- Bring the sizes of keys to the host, and check lengths and offsets. Returns the KJT.
function methods:sync()
  check(C.peri_kjt_sync(ptr(self)))
  return self
end
--- Forget what the host knows.
function methods:unsync()
  C.peri_kjt_unsync(ptr(self))
  return self
end
--- Check lengths, offsets and inverse indices now. Returns the KJT.
function methods:validate()
  check(C.peri_kjt_validate(ptr(self)))
  return self
end

function methods:describe()
  C.peri_kjt_describe(ptr(self), desc)
  return desc
end
function methods:keys() return Keys.list(C.peri_kjt_keys(ptr(self))) end
--- The keys as one shared object, cheap to pass on.
function methods:key_list() return Keys.share(C.peri_kjt_keys(ptr(self))) end
function methods:device() return ffi.string(C.peri_device_name(self:describe().device)) end
--- Rows of the batch (variable batch: of the full batch).
function methods:stride() return tonumber(self:describe().stride) end
function methods:variable_stride_per_key() return self:describe().variable_stride end
function methods:is_weighted() return self:describe().weighted end

local tensor_out = Tensor.out

local function tensor(status)
  check(status)
  if tensor_out[0] ~= nil then return Tensor.wrap(tensor_out[0]) end
end

function methods:values() return tensor(C.peri_kjt_values(ptr(self), tensor_out)) end
function methods:weights_or_none() return tensor(C.peri_kjt_weights(ptr(self), tensor_out)) end
function methods:weights()
  local t = self:weights_or_none()
  if not t then P.fail "KeyedJaggedTensor: it has no weights" end
  return t
end
function methods:lengths() return tensor(C.peri_kjt_lengths(ptr(self), tensor_out)) end
function methods:lengths_or_none() if self:describe().has_lengths then return self:lengths() end end
function methods:offsets() return tensor(C.peri_kjt_offsets(ptr(self), tensor_out)) end
function methods:offsets_or_none() if self:describe().has_offsets then return self:offsets() end end

--- { keys, tensor } of the inverse indices; inverse_indices_or_none returns nil when there are none.
function methods:inverse_indices_or_none()
  local keys = C.peri_kjt_inverse_keys(ptr(self))
  if keys ~= nil then return { Keys.list(keys), tensor(C.peri_kjt_inverse_indices(ptr(self), tensor_out)) } end
end
function methods:inverse_indices()
  local inverse = self:inverse_indices_or_none()
  if not inverse then P.fail "KeyedJaggedTensor: it has no inverse indices" end
  return inverse
end

function methods:stride_per_key() return A.list(C.peri_kjt_stride_per_key(ptr(self)), self:describe().keys) end
function methods:lengths_offset_per_key() return A.list(C.peri_kjt_lengths_offset_per_key(ptr(self)), self:describe().keys + 1) end
--- Rows by key and rank as a list of rows; a fixed batch has one rank.
function methods:stride_per_key_per_rank()
  local d = self:describe()
  local n, ranks, rows = d.keys, d.ranks, {}
  local array = C.peri_kjt_stride_per_key_per_rank(ptr(self))
  for i = 1, n do
    rows[i] = ranks > 0 and A.list(array + (i - 1) * ranks, ranks) or { tonumber(d.stride) }
  end
  return rows
end
--- Ids of each key (known to the host: this may wait for the device).
function methods:length_per_key()
  check(C.peri_kjt_length_per_key(ptr(self), numbers))
  return A.list(numbers[0], self:describe().keys)
end
--- The same, nil when the host does not know it yet.
function methods:length_per_key_or_none() if self:describe().synced then return self:length_per_key() end end
function methods:offset_per_key()
  check(C.peri_kjt_offset_per_key(ptr(self), numbers))
  return A.list(numbers[0], self:describe().keys + 1)
end
function methods:offset_per_key_or_none() if self:describe().synced then return self:offset_per_key() end end
--- Ids in the longest bag.
function methods:longest()
  check(C.peri_kjt_longest(ptr(self), number))
  return tonumber(number[0])
end
--- Positions of the keys (0 is the first; the last position of a key that repeats).
function methods:index_per_key()
  local index = {}
  for i, name in ipairs(self:keys()) do index[name] = i - 1 end
  return index
end

meta.__len = function(self) return self:describe().keys end
meta.__tostring = function(self)
  if self.ptr == nil then return "KeyedJaggedTensor (released)" end
  local d = self:describe()
  return ("KeyedJaggedTensor {%s}: %d values, %s, %s%s on %s"):format(table.concat(self:keys(), ", "), tonumber(d.values),
    d.ranks > 0 and "variable batch" or ("batch %d"):format(tonumber(d.stride)), P.dtype_names[d.values_dtype],
    d.weighted and ", weighted" or "", self:device())
end

wrap, ctype = P.handle("peri_kjt", methods, meta)
M.wrap = wrap

return M
