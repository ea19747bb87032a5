-- kjt.lua: KeyedJaggedTensor: the ids of a batch, for every key and row a bag.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local Keys = require "perilune.jagged.keys"
local signature = require "perilune.signature"
local A = require "perilune.jagged.arguments"
local JaggedTensor = require "perilune.jagged.jt"
local C, check = P.C, P.check

local M = {} -- the class
local methods, meta = {}, {}
local wrap, ctype, ptr, wrap_lasting

local out = ffi.new "peri_kjt *[1]"
local desc = P.struct "peri_kjt_info"
local numbers = ffi.new "const int64_t *[1]"
local number = ffi.new "int64_t[1]"
local bool_out = ffi.new "bool[1]"

--- True for KeyedJaggedTensors.
function M.is(x) return ffi.istype(ctype, x) or (type(x) == "table" and ffi.istype(ctype, util.resolve(x))) end

M.methods, M.meta, M.out = methods, meta, out

-- -- making -----------------------------------------------------------------------------------------------------------

local allowed = { keys = true, values = true, weights = true, lengths = true, offsets = true, stride = true,
  stride_per_key_per_rank = true, inverse_indices = true, device = true }
local args = P.struct "peri_kjt_config"

local function new_kjt(func, a)
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
  local stride = a.stride and signature.value(func, "stride", a.stride, "integer")
  args.stride, args.ranks, args.stride_per_key_per_rank = stride or 0, ranks, strides
  args.inverse_keys, args.inverse_indices = inverse_keys and inverse_keys.ptr, A.ptr(inverse)
  check(C.peri_kjt_new(args, out))
  return (wrap(out[0]))
end

--- A KJT of tensors or lists: keys, values, weights, lengths or offsets, stride, stride_per_key_per_rank,
--- inverse_indices = { keys, tensor }. Lists become i64 values and offsets, f32 weights, i32 lengths, on `device`.
setmetatable(M, {
  __call = function(_, a) return new_kjt("KeyedJaggedTensor", a) end,
  __tostring = function() return "class KeyedJaggedTensor" end,
})

--- The same from lengths, with the sizes of keys brought to the host (and everything checked) at once.
function M.from_lengths_sync(a)
  local kjt = new_kjt("KeyedJaggedTensor.from_lengths_sync", a)
  if a.lengths == nil then P.fail "KeyedJaggedTensor.from_lengths_sync: argument 'lengths' is missing" end
  return kjt:sync()
end

--- As from_lengths_sync, from offsets.
function M.from_offsets_sync(a)
  local kjt = new_kjt("KeyedJaggedTensor.from_offsets_sync", a)
  if a.offsets == nil then P.fail "KeyedJaggedTensor.from_offsets_sync: argument 'offsets' is missing" end
  return kjt:sync()
end

-- -- looking ----------------------------------------------------------------------------------------------------------

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
function methods:keys() return Keys._list(C.peri_kjt_keys(ptr(self))) end
--- The keys as one shared object, cheap to pass on.
function methods:key_list() return Keys._share(C.peri_kjt_keys(ptr(self))) end
function methods:device() return ffi.string(C.peri_device_name(self:describe().device)) end
--- Rows of the batch (variable batch: of the full batch).
function methods:stride() return tonumber(self:describe().stride) end
function methods:variable_stride_per_key() return self:describe().variable_stride end
function methods:is_weighted() return self:describe().weighted end

local tensor_out = Tensor.out

local function tensor_of_call(status)
  check(status)
  if tensor_out[0] ~= nil then return Tensor.wrap(tensor_out[0]) end
end

function methods:values() return tensor_of_call(C.peri_kjt_values(ptr(self), tensor_out)) end
function methods:weights_or_none() return tensor_of_call(C.peri_kjt_weights(ptr(self), tensor_out)) end
function methods:weights()
  local t = self:weights_or_none()
  if not t then P.fail "KeyedJaggedTensor: it has no weights" end
  return t
end
function methods:lengths() return tensor_of_call(C.peri_kjt_lengths(ptr(self), tensor_out)) end
function methods:lengths_or_none() if self:describe().has_lengths then return self:lengths() end end
function methods:offsets() return tensor_of_call(C.peri_kjt_offsets(ptr(self), tensor_out)) end
function methods:offsets_or_none() if self:describe().has_offsets then return self:offsets() end end

--- { keys, tensor } of the inverse indices; inverse_indices_or_none returns nil when there are none.
function methods:inverse_indices_or_none()
  local keys = C.peri_kjt_inverse_keys(ptr(self))
  if keys ~= nil then return { Keys._list(keys), tensor_of_call(C.peri_kjt_inverse_indices(ptr(self), tensor_out)) } end
end
function methods:inverse_indices()
  local inverse = self:inverse_indices_or_none()
  if not inverse then P.fail "KeyedJaggedTensor: it has no inverse indices" end
  return inverse
end

function methods:stride_per_key() return A.list(C.peri_kjt_stride_per_key(ptr(self)), self:describe().keys) end
function methods:lengths_offset_per_key()
  return A.list(C.peri_kjt_lengths_offset_per_key(ptr(self)), self:describe().keys + 1)
end
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

-- -- operations -------------------------------------------------------------------------------------------------------

local jt_out = ffi.new "peri_jt *[1]"
local int32s = ffi.typeof "int32_t[?]"

local function integers(func, what, list)
  if type(list) ~= "table" then P.fail(("%s: %s are a %s, wanted a list of numbers"):format(func, what, type(list))) end
  local n = #list
  local array = int32s(n > 0 and n or 1)
  for i = 1, n do
    array[i - 1] = util.integer(func, ("entry %d of %s"):format(i, what), list[i], -2 ^ 31, 2 ^ 31 - 1)
  end
  return array, n
end

--- Key i of the result is key indices[i] (0 is the first); repeats and subsets are fine. Weights and inverse indices go
--- with the keys.
function methods:permute(indices)
  local array, n = integers("KeyedJaggedTensor.permute", "indices", indices)
  check(C.peri_kjt_permute(ptr(self), array, n, out))
  return (wrap(out[0]))
end

--- Cut into KJTs of segments[i] keys each, with their weights and inverse indices; their tensors are views.
function methods:split(segments)
  local array, n = integers("KeyedJaggedTensor.split", "segments", segments)
  local made = ffi.new("peri_kjt *[?]", n > 0 and n or 1)
  check(C.peri_kjt_split(ptr(self), array, n, made))
  local list = {}
  for i = 1, n do list[i] = wrap(made[i - 1]) end
  return list
end

--- Join KJTs along keys.
function M.concat(kjts)
  local n = #kjts
  local array = ffi.new("peri_kjt *[?]", n > 0 and n or 1)
  for i = 1, n do
    if not M.is(kjts[i]) then P.fail(("KeyedJaggedTensor.concat: entry %d is a %s"):format(i, type(kjts[i]))) end
    array[i - 1] = ptr(kjts[i])
  end
  check(C.peri_kjt_concat(array, n, out))
  return (wrap(out[0]))
end

--- The JaggedTensor of a key, by name. kjt["name"] is the same, unless the name is that of a method.
function methods:get(key)
  local i = C.peri_keys_find(C.peri_kjt_keys(ptr(self)), key)
  if i < 0 then
    P.fail(("KeyedJaggedTensor: no key '%s'; keys: %s"):format(tostring(key), table.concat(self:keys(), ", ")))
  end
  check(C.peri_kjt_get(ptr(self), i, jt_out))
  return JaggedTensor.wrap(jt_out[0])
end

local function like(func, kjt, values, weights)
  local variable = kjt:variable_stride_per_key()
  return new_kjt(func, { keys = kjt:key_list(), values = values, weights = weights,
    lengths = kjt:lengths(), stride = kjt:stride(),
    stride_per_key_per_rank = variable and kjt:stride_per_key_per_rank() or nil,
    inverse_indices = kjt:inverse_indices_or_none() })
end

--- The same keys, ids and samples with other weights, one for each id (a tensor), or without any (nil).
function methods:with_weights(weights) return like("KeyedJaggedTensor:with_weights", self, self:values(), weights) end
--- The same keys, samples and weights with other ids (a tensor), one for each. Every batch of managed collision comes
--- by here.
function methods:with_values(values)
  local d = self:describe()
  if d.variable_stride or C.peri_kjt_inverse_keys(ptr(self)) ~= nil then
    return like("KeyedJaggedTensor:with_values", self, values, self:weights_or_none())
  end
  local stride, lengths, weights = d.stride, self:lengths(), self:weights_or_none()
  args.keys, args.values, args.lengths, args.weights = C.peri_kjt_keys(ptr(self)), Tensor.ptr(values),
    Tensor.ptr(lengths), nil
  if weights then args.weights = Tensor.ptr(weights) end
  args.offsets, args.stride, args.ranks, args.stride_per_key_per_rank = nil, stride, 0, nil
  args.inverse_keys, args.inverse_indices = nil, nil
  check(C.peri_kjt_new(args, out))
  return (wrap(out[0]))
end

--- name -> JaggedTensor.
function methods:to_dict()
  local dict = {}
  for _, key in ipairs(self:keys()) do dict[key] = self:get(key) end
  return dict
end

--- A KJT of JaggedTensors by name: in the order of the list `keys`, else of the sorted names. Equally many rows make a
--- fixed batch, others a variable one.
function M.from_jt_dict(dict, keys)
  local names = keys or P.util.keys(dict)
  local list = Keys.of(names)
  local n = #list
  local array = ffi.new("peri_jt *[?]", n > 0 and n or 1)
  for i, name in ipairs(list:list()) do
    local jt = dict[name]
    if not JaggedTensor.is(jt) then
      P.fail(("KeyedJaggedTensor.from_jt_dict: '%s' is a %s, wanted a JaggedTensor"):format(name, type(jt)))
    end
    array[i - 1] = JaggedTensor.ptr(jt)
  end
  check(C.peri_kjt_from_jts(list.ptr, array, out))
  return (wrap(out[0]))
end

--- A KJT from nested lists: { keys = {...}, bags of the first key, bags of the second, ..., weights = { the same
--- nesting } }. Keys with unequally many bags make a variable batch.
function M.from_lists(a)
  local func = "KeyedJaggedTensor.from_lists"
  signature.value(func, "the argument", a, "table")
  local n = #signature.value(func, "keys", a.keys, "list")
  for name in pairs(a) do
    if type(name) ~= "number" and name ~= "keys" and name ~= "weights" and name ~= "device" then
      P.fail(("%s: no argument '%s'; allowed: keys, a list of bags for each key, weights, device"):format(func,
        tostring(name)))
    end
  end
  if a.weights ~= nil then signature.value(func, "weights", a.weights, "list") end
  if #a ~= n then P.fail(("%s: bags of %d keys for %d keys"):format(func, #a, n)) end
  local values, lengths, strides, weights, equal = {}, {}, {}, a.weights and {}, true
  for k = 1, n do
    if a.weights and type(a.weights[k]) ~= "table" then
      P.fail(("%s: key '%s' has no list of weights"):format(func, tostring(a.keys[k])))
    end
    for b, bag in ipairs(signature.value(func, ("entry %d"):format(k), a[k], "list")) do
      signature.value(func, ("bag %d of key '%s'"):format(b - 1, tostring(a.keys[k])), bag, "list")
      for i, id in ipairs(bag) do
        values[#values + 1] = id
        if weights then
          local row = a.weights[k][b]
          if type(row) ~= "table" or #row ~= #bag then
            P.fail(("%s: key '%s', sample %d: %s weights for %d ids"):format(func, tostring(a.keys[k]), b - 1,
              type(row) == "table" and #row or "no", #bag))
          end
          weights[#weights + 1] = row[i]
        end
      end
      lengths[#lengths + 1] = #bag
    end
    strides[k] = { #a[k] }
    equal = equal and #a[k] == #a[1]
  end
  return new_kjt(func, { keys = a.keys, values = values, lengths = lengths, weights = weights, device = a.device,
    stride_per_key_per_rank = not equal and strides or nil })
end

--- The same on another device (this KJT itself if it is there). non_blocking: from pinned memory without waiting (see
--- Tensor:to).
function methods:to(device, non_blocking)
  check((non_blocking and C.peri_kjt_upload or C.peri_kjt_to)(ptr(self), P.device(device), out))
  return (wrap(out[0]))
end
--- A copy of this one, of cpu, in memory that is pinned for `device` (default: the rank's).
function methods:pin_memory(device)
  check(C.peri_kjt_pin(ptr(self), P.device(device), out))
  return (wrap(out[0]))
end
--- Overwrite this KJT with another of the same keys, strides and counts. Returns this one.
function methods:copy_(src)
  check(C.peri_kjt_copy(ptr(self), ptr(src)))
  return self
end
--- No keys: { is_weighted, device, values_dtype = "i64", weights_dtype = "f32", lengths_dtype = "i32" }.
function M.empty(a)
  a = P.util.named("KeyedJaggedTensor.empty", a, { is_weighted = false, device = P.util.optional, values_dtype = "i64",
    weights_dtype = "f32", lengths_dtype = "i32" })
  local weights = a.is_weighted and P.dtype(a.weights_dtype) or -1
  check(C.peri_kjt_empty(P.device(a.device), P.dtype(a.values_dtype), P.dtype(a.lengths_dtype), weights, out))
  return (wrap(out[0]))
end
--- Room for a copy of a KJT, on its device or another: for copy_.
function M.empty_like(kjt, device)
  check(C.peri_kjt_empty_like(ptr(kjt), device and P.device(device) or nil, out))
  return (wrap(out[0]))
end
--- Same keys, strides, lengths, values, weights (bit for bit) and inverse indices.
function methods:equal(other)
  check(C.peri_kjt_equal(ptr(self), ptr(other), bool_out))
  return bool_out[0]
end
--- Bytes of its tensors.
function methods:size_in_bytes() return tonumber(C.peri_kjt_bytes(ptr(self))) end
--- Lengths are kept flat here: the KJT itself.
function methods:flatten_lengths() return self end
--- Another handle of the same KJT, outside any scope.
function methods:share()
  C.peri_kjt_retain(ptr(self))
  return wrap_lasting(self.ptr)
end

-- -- exchanges --------------------------------------------------------------------------------------------------------

local label_names = { [0] = "lengths", "values", "strides", "weights" }
local labels = ffi.new "int32_t[4]"

--- Names of the tensors that an exchange sends.
function methods:dist_labels()
  local list = {}
  for i = 1, C.peri_kjt_dist_labels(ptr(self), labels) do list[i] = label_names[labels[i - 1]] end
  return list
end
--- For each label the number of elements for each rank; key_splits[i] keys go to rank i.
function methods:dist_splits(key_splits)
  local array, n = integers("KeyedJaggedTensor.dist_splits", "key_splits", key_splits)
  local count = C.peri_kjt_dist_labels(ptr(self), labels)
  local buffer = ffi.new("int64_t[?]", math.max(n * count, 1))
  check(C.peri_kjt_dist_splits(ptr(self), array, n, buffer))
  local list = {}
  for i = 1, count do list[i] = A.list(buffer + (i - 1) * n, n) end
  return list
end
local tensors_out = ffi.new "peri_tensor *[4]"
--- The tensors, in the order of the labels.
function methods:dist_tensors()
  check(C.peri_kjt_dist_tensors(ptr(self), tensors_out))
  local list, n = {}, C.peri_kjt_dist_labels(ptr(self), labels)
  for i = 1, n do list[i] = Tensor.wrap(tensors_out[i - 1]) end
  return list
end

local dist_args = ffi.new "peri_kjt_dist_args"

--- Received buffers as a KJT: { keys, lengths, values, weights, num_workers, stagger = 1, and stride_per_rank = { rows
--- of each rank } or (variable batch) strides = { [rank] = { rows of each key } } }.
function M.dist_init(a)
  local func = "KeyedJaggedTensor.dist_init"
  local r = P.util
  a = r.named(func, a, { keys = r.required, lengths = r.required, values = r.required, weights = r.optional,
    stride_per_rank = r.optional, strides = r.optional, num_workers = r.required, stagger = 1 })
  for _, name in ipairs { "num_workers", "stagger" } do signature.value(func, name, a[name], "int") end
  local keys, rows, columns = Keys.of(a.keys), nil, nil
  local strides, per_rank
  if a.strides then strides, rows, columns = A.matrix(func, "strides", a.strides) end
  if a.stride_per_rank then per_rank, rows, columns = A.matrix(func, "stride_per_rank", { a.stride_per_rank }) end
  if strides and (rows ~= a.num_workers or columns ~= #keys) or per_rank and columns ~= a.num_workers then
    P.fail(("%s: strides of %d x %d for %d workers and %d keys"):format(func, rows, columns, a.num_workers, #keys))
  end
  dist_args.keys, dist_args.lengths, dist_args.values = keys.ptr, Tensor.ptr(a.lengths), Tensor.ptr(a.values)
  dist_args.weights, dist_args.stride_per_rank, dist_args.strides = A.ptr(a.weights), per_rank, strides
  dist_args.ranks, dist_args.stagger = a.num_workers, a.stagger
  check(C.peri_kjt_dist_init(dist_args, out))
  return (wrap(out[0]))
end

--- Order of the received (rank, key) segments in the result of an exchange.
function M.recat(keys, ranks, stagger)
  if keys * ranks >= 2 ^ 28 then
    P.fail(("KeyedJaggedTensor.recat: %d keys of %d ranks are too many"):format(keys, ranks))
  end
  local buffer = ffi.new("int32_t[?]", math.max(keys * ranks, 1))
  check(C.peri_kjt_recat(keys, ranks, stagger or 1, buffer))
  return A.list(buffer, keys * ranks)
end

meta.__index = function(self, name)
  return methods[name] or self:get(name)
end
meta.__len = function(self) return self:describe().keys end
meta.__tostring = function(self)
  if self.ptr == nil then return "KeyedJaggedTensor (released)" end
  local d = self:describe()
  return ("KeyedJaggedTensor {%s}: %d values, %s, %s%s on %s"):format(table.concat(self:keys(), ", "),
    tonumber(d.values), d.ranks > 0 and "variable batch" or ("batch %d"):format(tonumber(d.stride)),
    P.dtype_names[d.values_dtype], d.weighted and ", weighted" or "", self:device())
end

wrap, ctype, ptr, wrap_lasting = P.handle("peri_kjt", methods, meta, "a KeyedJaggedTensor")
M.wrap = wrap
--- The pointer of a live KeyedJaggedTensor, or an error.
M.ptr = ptr
signature.handle("KeyedJaggedTensor", ctype)

signature.check("KeyedJaggedTensor.", M, { concat = "kjts: list", from_jt_dict = "dict: table, keys: any",
  empty_like = "kjt: KeyedJaggedTensor, device: device?", recat = "keys: count, ranks: count, stagger: int?" })
signature.check_each("KeyedJaggedTensor:", methods, { "sync", "unsync", "validate", "describe", "keys", "key_list",
  "device", "stride", "variable_stride_per_key", "is_weighted", "values", "weights_or_none", "weights", "lengths",
  "lengths_or_none", "offsets", "offsets_or_none", "inverse_indices_or_none", "inverse_indices", "stride_per_key",
  "lengths_offset_per_key", "stride_per_key_per_rank", "length_per_key", "length_per_key_or_none", "offset_per_key",
  "offset_per_key_or_none", "longest", "index_per_key", "to_dict", "size_in_bytes", "flatten_lengths", "share",
  "dist_labels", "dist_tensors" }, "self: KeyedJaggedTensor")
signature.check("KeyedJaggedTensor:", methods, {
  permute = "self: KeyedJaggedTensor, indices: list", split = "self: KeyedJaggedTensor, segments: list",
  get = "self: KeyedJaggedTensor, key: string", to = "self: KeyedJaggedTensor, device: device?, non_blocking: boolean?",
  pin_memory = "self: KeyedJaggedTensor, device: device?",
  copy_ = "self: KeyedJaggedTensor, src: KeyedJaggedTensor",
  equal = "self: KeyedJaggedTensor, other: KeyedJaggedTensor",
  dist_splits = "self: KeyedJaggedTensor, key_splits: list", with_weights = "self: KeyedJaggedTensor, weights: tensor?",
  with_values = "self: KeyedJaggedTensor, values: tensor",
})

return M
