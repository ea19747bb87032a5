-- kt.lua: KeyedTensor: a matrix whose columns have names; regrouping columns of several of them.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local Keys = require "perilune.jagged.keys"
local signature = require "perilune.signature"
local A = require "perilune.jagged.arguments"
local C, check = P.C, P.check

local M = {} -- the class
local methods, meta = {}, {}
local wrap, ctype, ptr

M.methods, M.meta = methods, meta

local out = ffi.new "peri_kt *[1]"
local tensor_out = Tensor.out
local widths = ffi.typeof "int64_t[?]"

--- True for KeyedTensors.
function M.is(x) return ffi.istype(ctype, x) or (type(x) == "table" and ffi.istype(ctype, util.resolve(x))) end

-- -- making -----------------------------------------------------------------------------------------------------------

local allowed = { keys = true, length_per_key = true, values = true, key_dim = true }

local function key_dim(func, value)
  if value == nil then return 1 end
  if value ~= 0 and value ~= 1 then P.fail(("%s: key_dim is %s, allowed: 0, 1"):format(func, tostring(value))) end
  return value
end

local function new_kt(_, a)
  A.check("KeyedTensor", a, allowed)
  for _, name in ipairs { "keys", "length_per_key", "values" } do
    if a[name] == nil then P.fail(("KeyedTensor: argument '%s' is missing"):format(name)) end
  end
  local keys = Keys.of(a.keys)
  local values = A.tensor("KeyedTensor", "values", a.values, "f32")
  local lengths, _, n = A.matrix("KeyedTensor", "length_per_key", { a.length_per_key })
  if n ~= #keys then P.fail(("KeyedTensor: %d entries of length_per_key for %d keys"):format(n, #keys)) end
  check(C.peri_kt_new(keys.ptr, lengths, key_dim("KeyedTensor", a.key_dim), Tensor.ptr(values), out))
  return (wrap(out[0]))
end

--- A KeyedTensor of { keys, length_per_key = { columns of each key }, values = tensor [rows, columns], key_dim = 1 }
--- (0: the keys divide the rows).
setmetatable(M, { __call = new_kt, __tostring = function() return "class KeyedTensor" end })

--- `of` for the library's modules, which know that their arguments are right: LuaJIT does not compile what `of` asks of
--- an array.
function M._of(keys, lengths, values)
  check(C.peri_kt_new(keys.ptr, lengths, 1, Tensor.ptr(values), out))
  return (wrap(out[0]))
end
--- As the constructor, for modules that make one in each step: keys a Keys, lengths an int64_t array of their columns
--- (copied).
function M.of(keys, lengths, values)
  if not Keys.is(keys) or not ffi.istype(widths, lengths) or ffi.sizeof(lengths) < 8 * #keys then
    P.fail("KeyedTensor.of: wanted Keys, and an array int64_t[?] with a number for each; KeyedTensor { ... } takes "
      .. "lists")
  end
  return M._of(keys, lengths, values)
end

--- The tensors (2 dimensions each) of the keys joined along key_dim (1 or 0).
function M.from_tensor_list(keys, tensors, dim)
  local list = Keys.of(keys)
  local n = #list
  if #tensors ~= n then P.fail(("KeyedTensor.from_tensor_list: %d tensors for %d keys"):format(#tensors, n)) end
  local array = ffi.new("peri_tensor *[?]", n > 0 and n or 1)
  for i = 1, n do array[i - 1] = Tensor.ptr(tensors[i]) end
  check(C.peri_kt_from_tensors(list.ptr, array, key_dim("KeyedTensor.from_tensor_list", dim), out))
  return (wrap(out[0]))
end

-- -- looking ----------------------------------------------------------------------------------------------------------

function methods:keys() return Keys._list(C.peri_kt_keys(ptr(self))) end
--- The keys as one shared object, cheap to pass on.
function methods:key_list() return Keys._share(C.peri_kt_keys(ptr(self))) end
function methods:values()
  check(C.peri_kt_values(ptr(self), tensor_out))
  return Tensor.wrap(tensor_out[0])
end
function methods:key_dim() return C.peri_kt_key_dim(ptr(self)) end
function methods:device() return self:values():device() end
-- No #self in methods: a lazy awaitable that stands for a KeyedTensor is a Lua table, whose length is its own.
local function count(self) return C.peri_keys_count(C.peri_kt_keys(ptr(self))) end
function methods:length_per_key() return A.list(C.peri_kt_length_per_key(ptr(self)), count(self)) end
function methods:offset_per_key() return A.list(C.peri_kt_offset_per_key(ptr(self)), count(self) + 1) end

--- The columns of a key: a view. kt["name"] is the same, unless the name is that of a method.
function methods:get(key)
  local i = C.peri_keys_find(C.peri_kt_keys(ptr(self)), key)
  if i < 0 then
    P.fail(("KeyedTensor: no key '%s'; keys: %s"):format(tostring(key), table.concat(self:keys(), ", ")))
  end
  check(C.peri_kt_get(ptr(self), i, tensor_out))
  return Tensor.wrap(tensor_out[0])
end

--- name -> tensor.
function methods:to_dict()
  local dict, keys = {}, self:keys()
  local parts = #keys > 0 and self:values():split(self:length_per_key(), self:key_dim() + 1) or {}
  for i, key in ipairs(keys) do dict[key] = parts[i] end
  return dict
end

local function of_values(self, values)
  check(C.peri_kt_new(C.peri_kt_keys(ptr(self)), C.peri_kt_length_per_key(ptr(self)), self:key_dim(),
    Tensor.ptr(values), out))
  return (wrap(out[0]))
end

--- The same on another device. non_blocking: from pinned memory without waiting (see Tensor:to).
function methods:to(device, non_blocking) return of_values(self, self:values():to(nil, device, non_blocking)) end
--- A copy of this one, of cpu, in memory that is pinned for `device` (default: the rank's).
function methods:pin_memory(device) return of_values(self, self:values():pin_memory(device)) end

--- Bytes of its tensor.
function methods:size_in_bytes()
  local d = self:values():describe()
  return tonumber(d.numel * C.peri_dtype_size(d.dtype))
end

-- -- regrouping -------------------------------------------------------------------------------------------------------

local plan_methods = {}
local wrap_plan, _, plan_ptr = P.handle("peri_regroup", plan_methods, nil, "a regrouping plan")
local plan_out = ffi.new "peri_regroup *[1]"
local kt_array, kt_room = ffi.new "peri_kt *[8]", 8
local tensor_array, tensor_room = ffi.new "peri_tensor *[8]", 8

local function fill_kts(func, kts)
  local n = #kts
  util.settle(kts)
  if n > kt_room then kt_array, kt_room = ffi.new("peri_kt *[?]", n), n end
  for i = 1, n do
    if not M.is(kts[i]) then P.fail(("%s: entry %d is a %s, wanted a KeyedTensor"):format(func, i, type(kts[i]))) end
    kt_array[i - 1] = ptr(kts[i])
  end
  return n
end

local function plan_regroup(func, kts, groups)
  local n, m = fill_kts(func, kts), #groups
  local lists, array = {}, ffi.new("peri_keys *[?]", m > 0 and m or 1)
  for g = 1, m do
    lists[g] = Keys.of(groups[g])
    array[g - 1] = lists[g].ptr
  end
  check(C.peri_regroup_new(kt_array, n, array, m, plan_out))
  return wrap_plan(plan_out[0])
end

local function run_regroup(func, made, kts, m)
  local n = fill_kts(func, kts)
  if m > tensor_room then tensor_array, tensor_room = ffi.new("peri_tensor *[?]", m), m end
  check(C.peri_regroup_run(plan_ptr(made), kt_array, n, tensor_array))
  local list = {}
  for g = 1, m do list[g] = Tensor.wrap(tensor_array[g - 1]) end
  return list
end

--- One tensor per group: the columns of its keys, from whichever KeyedTensor has them. A key may be used several times,
--- or not at all.
function M.regroup(kts, groups)
  return run_regroup("KeyedTensor.regroup", plan_regroup("KeyedTensor.regroup", kts, groups), kts, #groups)
end

--- The tensors of regroup by the names of their groups: name -> tensor.
function M.regroup_as_dict(kts, groups, names)
  if #names ~= #groups then P.fail(("KeyedTensor.regroup_as_dict: %d names for %d groups"):format(#names, #groups)) end
  local dict = {}
  for g, t in ipairs(M.regroup(kts, groups)) do dict[names[g]] = t end
  return dict
end

-- A plan that is made once, for KeyedTensors of the same keys and columns.
local Regroup = P.util.class "KTRegroupAsDict"
M.KTRegroupAsDict = Regroup

--- KTRegroupAsDict(groups, names): call it with a list of KeyedTensors.
function Regroup:init(groups, names)
  if #groups == 0 then P.fail "KTRegroupAsDict: a list of groups wanted" end
  if #names ~= #groups then P.fail(("KTRegroupAsDict: %d names for %d groups"):format(#names, #groups)) end
  self._groups, self._names, self._plan = groups, names, false
end

function Regroup:forward(kts)
  if not self._plan then
    self._plan = P.lasting(plan_regroup, "KTRegroupAsDict", kts, self._groups)
  end
  local names, dict = self._names, {}
  local list = run_regroup("KTRegroupAsDict", self._plan, kts, #names)
  for g = 1, #names do dict[names[g]] = list[g] end
  return dict
end
Regroup.__call = function(self, kts) return self:forward(kts) end

meta.__index = function(self, name)
  return methods[name] or self:get(name)
end
meta.__len = function(self) return C.peri_keys_count(C.peri_kt_keys(ptr(self))) end
meta.__tostring = function(self)
  if self.ptr == nil then return "KeyedTensor (released)" end
  return ("KeyedTensor {%s}: %s"):format(table.concat(self:keys(), ", "), tostring(self:values()))
end

wrap, ctype, ptr = P.handle("peri_kt", methods, meta, "a KeyedTensor")
M.wrap = wrap
--- The pointer of a live KeyedTensor, or an error.
M.ptr = ptr
signature.handle("KeyedTensor", ctype)

signature.check("KeyedTensor.", M, { from_tensor_list = "keys: any, tensors: list, dim: any",
  regroup = "kts: list, groups: list", regroup_as_dict = "kts: list, groups: list, names: list" })
signature.check("KTRegroupAsDict:", Regroup, { init = "self: table, groups: list, names: list",
  forward = "self: table, kts: list" })
signature.check_each("KeyedTensor:", methods, { "keys", "key_list", "values", "key_dim", "device", "length_per_key",
  "offset_per_key", "to_dict", "size_in_bytes" }, "self: KeyedTensor")
signature.check("KeyedTensor:", methods, { get = "self: KeyedTensor, key: string",
  to = "self: KeyedTensor, device: device?, non_blocking: boolean?",
  pin_memory = "self: KeyedTensor, device: device?" })

return M
