-- parcels.lua: batches on their way from one state of Lua to another, in the same process: plain values as bytes
-- (serial.lua), tensors as references to the same memory.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local Batch = require("perilune.data.batch").Batch
local serial = require "perilune.serial"
local errors = require "perilune.errors"
local C = P.C

local M = {}

local KJT, JT, KT = jagged.KeyedJaggedTensor, jagged.JaggedTensor, jagged.KeyedTensor

local function moved_to_device(x, device) return x:to(device, true) end
local function values_pinned(x) return x:values():is_pinned() end

--- Kinds of objects: { is =, ptr =, wrap =, type =, retain =, number = (C's), to = function(x, device), pinned =
--- function(x) }, by the letter that stands for them.
local kinds = {
  t = { is = Tensor.is, ptr = Tensor.ptr, wrap = Tensor.wrap, type = ffi.typeof "peri_tensor *",
    retain = C.peri_tensor_retain, number = C.PERI_FEED_TENSOR, to = function(x, device)
      return x:to(nil, device, true)
    end, pinned = function(x) return x:is_pinned() end },
  k = { is = KJT.is, ptr = KJT.ptr, wrap = KJT.wrap, type = ffi.typeof "peri_kjt *", retain = C.peri_kjt_retain,
    number = C.PERI_FEED_KJT, to = moved_to_device, pinned = values_pinned },
  j = { is = JT.is, ptr = JT.ptr, wrap = JT.wrap, type = ffi.typeof "peri_jt *", retain = C.peri_jt_retain,
    number = C.PERI_FEED_JT, to = moved_to_device, pinned = values_pinned },
  e = { is = KT.is, ptr = KT.ptr, wrap = KT.wrap, type = ffi.typeof "peri_kt *", retain = C.peri_kt_retain,
    number = C.PERI_FEED_KT, to = moved_to_device, pinned = values_pinned },
}
local letters = util.keys(kinds)

-- -- giving -----------------------------------------------------------------------------------------------------------

local function pack_object(x, kind, path, objects)
  local device = util.resolve(x):device()
  if device ~= "cpu" then
    P.fail(("%s is on device '%s', allowed: cpu; what takes the batch moves it"):format(path, tostring(device)))
  end
  objects[#objects + 1] = { kind = kinds[kind], x = x }
  return { kind, #objects }
end

local MOST_DEEP = 16

--- What stands for x: itself, or { letter, number of the object }, { "T", table }, { "B", fields of a data.Batch }.
local function pack(x, path, objects, depth)
  local t = type(x)
  if t == "nil" or t == "boolean" or t == "number" or t == "string" then return x end
  for _, letter in ipairs(letters) do
    if kinds[letter].is(x) then return pack_object(x, letter, path, objects) end
  end
  if depth > MOST_DEEP then
    P.fail(("%s is nested deeper than %d tables, or contains itself"):format(path, MOST_DEEP))
  end
  if t ~= "table" or not Batch.is(x) and getmetatable(x) ~= nil then
    P.fail(("%s is %s, allowed: tensors, KeyedJaggedTensors, data.Batch, plain tables, numbers, texts"):format(path,
      errors.kind(x)))
  end
  local fields = {}
  for key, value in util.ordered(x) do
    fields[key] = pack(value, ("%s.%s"):format(path, tostring(key)), objects, depth + 1)
  end
  return { Batch.is(x) and "B" or "T", fields }
end

local objects_type = ffi.typeof "peri_feed_object[?]"
local parcel_out = ffi.new "peri_feed_parcel"

local function put_parcel(feed, bytes, list, n)
  parcel_out.bytes, parcel_out.length, parcel_out.objects, parcel_out.n_objects = bytes, #bytes, list, n
  local status = C.peri_feed_put(feed, parcel_out)
  if status ~= C.PERI_ECLOSED then P.check(status) end
  return status
end

--- Put references of objects into `list`, a peri_feed_object[]; those that are not pinned, in memory that is pinned for
--- `device`.
local function refer(objects, list, device)
  for i, o in ipairs(objects) do
    local x, copy = o.x, nil
    if device and not o.kind.pinned(x) then
      copy = x:pin_memory(device)
      x = copy
    end
    local p = o.kind.ptr(x)
    o.kind.retain(p)
    list[i - 1].ptr, list[i - 1].kind = p, o.kind.number
    if copy then copy:release() end
  end
end

--- Hand `batch` over, in memory pinned for `device`, if that is given. Blocks while enough are waiting. PERI_OK;
--- PERI_ECLOSED: nobody wants more; PERI_PENDING: all are wanted again from the beginning.
function M.put(feed, batch, device)
  local objects = {}
  local bytes = serial.encode({ pack(batch, "the batch", objects, 1) }, "DataLoadingThread")
  local list = objects_type(math.max(#objects, 1))
  refer(objects, list, device)
  return put_parcel(feed, bytes, list, #objects)
end

-- What the library's own loaders make is the same each time, and is handed over in fewer words: the letter "L" and
-- these numbers.
local Loaded = ffi.typeof "struct { char letter[8]; double rows, global_rows, global_row, loss_scale; }"
local loaded = Loaded { letter = "L" }
local loaded_type, loaded_size, three = ffi.typeof("const $ *", Loaded), ffi.sizeof(Loaded), objects_type(3)

--- The same of a data.Batch that a loader of the library has just made, of which nobody else has any part: it is
--- released.
function M.put_loaded(feed, b)
  loaded.rows, loaded.global_rows, loaded.global_row, loaded.loss_scale = b.rows, b.global_rows, b.global_row,
    b.loss_scale
  three[0].ptr, three[0].kind = Tensor.ptr(b.dense_features), C.PERI_FEED_TENSOR
  three[1].ptr, three[1].kind = Tensor.ptr(b.labels), C.PERI_FEED_TENSOR
  three[2].ptr, three[2].kind = KJT.ptr(b.sparse_features), C.PERI_FEED_KJT
  C.peri_tensor_retain(three[0].ptr)
  C.peri_tensor_retain(three[1].ptr)
  C.peri_kjt_retain(three[2].ptr)
  local status = put_parcel(feed, ffi.string(loaded, loaded_size), three, 3)
  b:release()
  return status
end

--- Hand an error over in place of a batch.
function M.put_error(feed, text) return put_parcel(feed, serial.encode(text, "DataLoadingThread"), nil, 0) end

--- References to tensors as bytes, for a state that takes them over with `received`.
function M.sent(tensors)
  local list, n = ffi.new("peri_tensor *[?]", math.max(#tensors, 1)), #tensors
  for i, t in ipairs(tensors) do
    list[i - 1] = Tensor.ptr(t)
    C.peri_tensor_retain(list[i - 1])
  end
  return ffi.string(list, n * ffi.sizeof "peri_tensor *")
end

function M.received(bytes)
  local list, tensors = ffi.cast("peri_tensor **", ffi.cast("const char *", bytes)), {}
  for i = 1, #bytes / ffi.sizeof "peri_tensor *" do tensors[i] = Tensor.wrap(list[i - 1]) end
  return tensors
end

-- -- taking -----------------------------------------------------------------------------------------------------------

local function unpack_value(x, objects)
  if type(x) ~= "table" then return x end
  local letter, content = x[1], x[2]
  if kinds[letter] then return objects[content] end
  local out = {}
  for key, value in util.ordered(content) do out[key] = unpack_value(value, objects) end
  if letter == "B" then return setmetatable(out, Batch) end
  return out
end

--- Letters of the objects in `x`, by number.
local function letters_in(x, list)
  if type(x) ~= "table" then return list end
  if kinds[x[1]] then list[x[2]] = x[1] return list end
  for _, value in util.ordered(x[2]) do letters_in(value, list) end
  return list
end

local tensor_out, kjt_out = Tensor.out, ffi.new "peri_kjt *[1]"

--- A tensor of which the parcel had a reference: itself, or its copy on `device`.
local function tensor_at(ptr, device)
  if not device then return Tensor.wrap(ffi.cast(kinds.t.type, ptr)) end
  local status = C.peri_tensor_upload(ptr, -1, device, tensor_out)
  C.peri_tensor_release(ptr) -- its memory is kept until the copy has read it
  P.check(status)
  return Tensor.wrap(tensor_out[0])
end

--- The KeyedJaggedTensor at address `ptr`, of which it takes the reference; device: a copy of it there.
local function kjt_at(ptr, device)
  if not device then return KJT.wrap(ffi.cast(kinds.k.type, ptr)) end
  local status = C.peri_kjt_upload(ptr, device, kjt_out)
  C.peri_kjt_release(ptr)
  P.check(status)
  return KJT.wrap(kjt_out[0])
end

local LOADED = ("L"):byte()

--- What put_loaded has put.
local function open_loaded(parcel, device)
  local head, list = ffi.cast(loaded_type, parcel.bytes), parcel.objects
  local rows, global_rows, global_row, loss_scale = head.rows, head.global_rows, head.global_row, head.loss_scale
  local dense, labels = tensor_at(list[0].ptr, device), tensor_at(list[1].ptr, device)
  return Batch(dense, kjt_at(list[2].ptr, device), labels, rows, global_rows, global_row, loss_scale)
end

--- The batch of a parcel (peri_feed_parcel), whose references it takes over, moved to `device` if that is given; or nil
--- and an error.
function M.open(parcel, device)
  if parcel.bytes[0] == LOADED then return open_loaded(parcel, device) end
  local x = serial.decode(ffi.string(parcel.bytes, parcel.length), "DataLoadingThread")
  if type(x) == "string" then return nil, x end
  local objects = {}
  for i, letter in ipairs(letters_in(x[1], {})) do
    local kind = kinds[letter]
    local object = kind.wrap(ffi.cast(kind.type, parcel.objects[i - 1].ptr))
    if device then
      local there = kind.to(object, device)
      object:release() -- its memory is kept until the copy has read it
      object = there
    end
    objects[i] = object
  end
  return unpack_value(x[1], objects)
end

return M
