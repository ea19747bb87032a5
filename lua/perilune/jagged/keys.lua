-- keys.lua: lists of key names as counted C objects, which containers share and compare by one hash.
local ffi = require "ffi"
local P = require "perilune.ffi"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local M = {}
local methods, meta = {}, {}
local wrap, ctype, live = P.handle("peri_keys", methods, meta, "a list of keys")
signature.handle("Keys", ctype)
M.wrap, M.methods = wrap, methods

local out = ffi.new "peri_keys *[1]"

function M.is(x) return ffi.istype(ctype, x) end

local function new(names)
  local n, fault = #names, P.util.list_fault(names)
  if fault then P.fail("keys: the list of names " .. fault) end
  local array = ffi.new("const char *[?]", math.max(n, 1))
  for i = 1, n do
    if type(names[i]) ~= "string" then P.fail(("keys: entry %d is a %s, wanted a string"):format(i, type(names[i]))) end
    array[i - 1] = names[i]
  end
  check(C.peri_keys_new(array, n, out))
  return out[0]
end

-- A Lua list of names that was seen before gives the same C list, as long as its entries are still the same.
local seen = setmetatable({}, { __mode = "k" })

local function names_unchanged(entry, names)
  local n = #names
  if entry.n ~= n then return false end
  for i = 1, n do
    if entry[i] ~= names[i] then return false end
  end
  return true
end

local function remember_names(names)
  local handle = P.lasting(wrap, new(names)) -- lives as long as the Lua list, not as long as a scope
  local entry = { n = #names, handle = handle }
  for i = 1, #names do entry[i] = names[i] end
  seen[names] = entry
  return handle
end

--- The key list of a Lua list of names; a key list passes through.
function M.of(names)
  if ffi.istype(ctype, names) then
    live(names)
    return names
  end
  if type(names) ~= "table" then P.fail(("keys: a list of names wanted, got a %s"):format(type(names))) end
  local entry = seen[names]
  if entry and names_unchanged(entry, names) then return entry.handle end
  return remember_names(names)
end

--- The names in a C list as a Lua list.
function M._list(ptr)
  local list = {}
  for i = 1, C.peri_keys_count(ptr) do list[i] = ffi.string(C.peri_keys_name(ptr, i - 1)) end
  return list
end

--- A handle of a C list that something else owns.
function M._share(ptr)
  C.peri_keys_retain(ptr)
  return (wrap(ptr))
end

--- Names as a Lua list.
function methods:list() return M._list(live(self)) end
--- Position of a name (1 is the first; the last one if it repeats), or nil.
function methods:find(name)
  local i = C.peri_keys_find(live(self), name)
  if i >= 0 then return i + 1 end
end
function methods:unique() return C.peri_keys_unique(live(self)) end
--- Same names in the same order; `other` may be a Lua list.
function methods:equal(other) return C.peri_keys_equal(live(self), M.of(other).ptr) end

meta.__len = function(self) return C.peri_keys_count(live(self)) end
meta.__tostring = function(self)
  return self.ptr == nil and "keys (released)" or "keys {" .. table.concat(self:list(), ", ") .. "}"
end

signature.pointer("KeysPointer", "peri_keys")
signature.check("jagged.Keys.", M, { _list = "keys: KeysPointer", _share = "keys: KeysPointer" })
signature.check("keys:", methods, { list = "self: Keys", find = "self: Keys, name: string", unique = "self: Keys",
  equal = "self: Keys, other: any" })

return M
