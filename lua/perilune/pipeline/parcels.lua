-- parcels.lua: batches on their way from one state of Lua to another, in the same process: plain values as bytes (dist/serial.lua), tensors
-- as references to the same memory.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local Batch = require("perilune.data.batch").Batch
local serial = require "perilune.dist.serial"
local errors = require "perilune.errors"
local C = P.C

local M = {}

local KJT, JT, KT = jagged.KeyedJaggedTensor, jagged.JaggedTensor, jagged.KeyedTensor

--- Kinds of objects: { is =, ptr =, wrap =, type =, retain =, number = (C's) }, by the letter that stands for them.
local kinds = {
  t = { is = Tensor.is, ptr = Tensor.ptr, wrap = Tensor.wrap, type = ffi.typeof "peri_tensor *", retain = C.peri_tensor_retain,
    number = C.PERI_FEED_TENSOR },
  k = { is = KJT.is, ptr = KJT.ptr, wrap = KJT.wrap, type = ffi.typeof "peri_kjt *", retain = C.peri_kjt_retain,
    number = C.PERI_FEED_KJT },
  j = { is = JT.is, ptr = JT.ptr, wrap = JT.wrap, type = ffi.typeof "peri_jt *", retain = C.peri_jt_retain, number = C.PERI_FEED_JT },
  e = { is = KT.is, ptr = KT.ptr, wrap = KT.wrap, type = ffi.typeof "peri_kt *", retain = C.peri_kt_retain, number = C.PERI_FEED_KT },
}

local function device_of(x) return x:device() end

local function pack_object(x, kind, path, objects)
  local device = device_of(util.resolve(x))
  if device ~= "cpu" then
    P.fail(("%s is on device '%s', allowed: cpu; what takes the batch moves it"):format(path, tostring(device)))
  end
  objects[#objects + 1] = { kind = kinds[kind], ptr = kinds[kind].ptr(x) }
  return { kind, #objects }
end

local MOST_DEEP = 16

--- What stands for x: itself, or { letter, number of the object }, { "T", table }, { "B", fields of a data.Batch }.
local function pack(x, path, objects, depth)
  for letter, kind in util.ordered(kinds) do
    if kind.is(x) then return pack_object(x, letter, path, objects) end
  end
  local t = type(x)
  if t == "nil" or t == "boolean" or t == "number" or t == "string" then return x end
  if depth > MOST_DEEP then
    P.fail(("%s is nested deeper than %d tables, or contains itself"):format(path, MOST_DEEP))
  end
  if t ~= "table" or not Batch.is(x) and getmetatable(x) ~= nil then
    P.fail(("%s is %s, allowed: tensors, KeyedJaggedTensors, data.Batch, plain tables, numbers, texts"):format(path, errors.kind(x)))
  end
  local fields = {}
  for key, value in util.ordered(x) do fields[key] = pack(value, ("%s.%s"):format(path, tostring(key)), objects, depth + 1) end
  return { Batch.is(x) and "B" or "T", fields }
end

local objects_type = ffi.typeof "peri_feed_object[?]"
local parcel_out = ffi.new "peri_feed_parcel"

--- Hand `batch` over. Blocks while enough are waiting; false: nobody wants more.
function M.put(feed, batch)
  local objects = {}
  local bytes = serial.encode(pack(batch, "the batch", objects, 1), "DataLoadingThread")
  local list = objects_type(math.max(#objects, 1))
  for i, o in ipairs(objects) do
    o.kind.retain(o.ptr)
    list[i - 1].ptr, list[i - 1].kind = o.ptr, o.kind.number
  end
  parcel_out.bytes, parcel_out.n_bytes, parcel_out.objects, parcel_out.n_objects = bytes, #bytes, list, #objects
  local status = C.peri_feed_put(feed, parcel_out)
  if status == C.PERI_ECLOSED then return false end
  P.check(status)
  return true
end

local function unpack_value(x, objects)
  if type(x) ~= "table" then return x end
  local letter, content = x[1], x[2]
  local kind = kinds[letter]
  if kind then return objects[content] end
  local out = {}
  for key, value in util.ordered(content) do out[key] = unpack_value(value, objects) end
  if letter == "B" then return setmetatable(out, Batch) end
  return out
end

--- Letters of the objects in `x`, by number.
local function letters(x, list)
  if type(x) ~= "table" then return list end
  if kinds[x[1]] then list[x[2]] = x[1] return list end
  for _, value in util.ordered(x[2]) do letters(value, list) end
  return list
end

--- The batch of a parcel (peri_feed_parcel), whose references it takes over.
function M.batch_of(parcel)
  local x = serial.decode(ffi.string(parcel.bytes, parcel.n_bytes), "DataLoadingThread")
  local objects = {}
  for i, letter in ipairs(letters(x, {})) do
    local kind = kinds[letter]
    objects[i] = kind.wrap(ffi.cast(kind.type, parcel.objects[i - 1].ptr))
  end
  return unpack_value(x, objects)
end

return M
