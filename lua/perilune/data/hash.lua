-- hash.lua: the row of a word or a raw id in a table whose column says `ids = "text"` or `ids = "hash"`: what whoever
-- asks a server about such a model has to send.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local Tensor = require "perilune.tensor"

local MOST_ROWS = 2 ^ 53
local int64, uint64 = ffi.typeof "int64_t", ffi.typeof "uint64_t"
local word = ffi.new "uint64_t[1]"

--- The bytes that are hashed: of a word its own, of an id 8 bytes, little-endian.
local function bytes_of(id)
  if type(id) == "string" then return id end
  local whole = type(id) == "number" and id == math.floor(id) and id >= 0 and id < 2 ^ 53
    or ffi.istype(uint64, id) or ffi.istype(int64, id) and id >= 0
  if not whole then
    P.fail(("data.hash: id is %s, allowed: a text, whole numbers 0..2^53 - 1, or 64-bit ones from 0 on (12LL)")
      :format(errors.said(id)))
  end
  word[0] = id
  return ffi.string(word, 8)
end

--- XXH3_64bits of a word's bytes, or of an id, mod rows.
return function(id, rows)
  util.integer("data.hash", "rows", rows, 1, MOST_ROWS)
  local bytes = bytes_of(id)
  local row = P.scope(function()
    return tonumber(Tensor._checksum(Tensor.from_memory(bytes, { #bytes }, "u8", "cpu")) % ffi.cast(uint64, rows))
  end)
  return row
end
