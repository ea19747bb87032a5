-- remap.lua: tables of which some rows were left out (pruned), and the way from ids to the rows that are left. A
-- collection's `pruned` names such tables:
--
--   pruned = { t = remapping }                              an array: by id the row among those that are left, -1: left
--                                                           out
--   pruned = { t = { remapping = remapping,
--     hash = true } } the same kept as a hash table of the ids that are left: few of many
--
-- remapping: a tensor, i32 or i64 [num_embeddings], as sparse.embedding_bag_rowwise_prune makes it; the rows that are
-- left have the numbers 0, 1, ..., each once. By an array an id outside the table is an error; by a hash table it is as
-- one that was left out.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local KeyedJaggedTensor = require("perilune.jagged").KeyedJaggedTensor
local pruned_tables = require "perilune.sparse.pruned"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local Remap = util.class "Remap"

--- By id the row (host memory, i64), and how many rows are left.
local function read_mapping(func, t, given)
  local what = ("%s: pruned: table '%s'"):format(func, t.name)
  local mapping = signature.value(what, "the remapping", given, "tensor")
  local dtype = mapping:dtype()
  if mapping:dim() ~= 1 or mapping:size(1) ~= t.num_embeddings or (dtype ~= "i32" and dtype ~= "i64") then
    P.fail(("%s: the remapping is %s [%s], wanted i32 or i64 [%d], a row for each id"):format(what, dtype,
      table.concat(mapping:shape(), ", "), t.num_embeddings))
  end
  local rows, left = mapping:to("i64", "cpu"):contiguous():read(), 0
  for id = 0, t.num_embeddings - 1 do
    if rows[id] ~= -1 then left = left + 1 end
  end
  local seen = ffi.new("uint8_t[?]", left + 1)
  for id = 0, t.num_embeddings - 1 do
    local row = tonumber(rows[id])
    if row ~= -1 and (row < 0 or row >= left or seen[row] == 1) then
      P.fail(("%s: the remapping gives id %d row %d%s, allowed: -1, and each of 0..%d once"):format(what, id, row,
        row >= 0 and row < left and " again" or "", left - 1))
    end
    if row >= 0 then seen[row] = 1 end
  end
  return rows, left
end

--- Remap(func, tables, outputs, pruned, device): outputs: { table = } in order of tables; what a batch has one key each
--- for.
function Remap:init(func, tables, outputs, pruned, device)
  -- rows: number of table -> rows left
  self.rows, self._mapping, self._tables, self._device = {}, {}, tables, device or false
  self._hashed, self._any_array, self._any_hash = {}, false, false
  local known = {}
  for i, t in ipairs(tables) do known[t.name] = i end
  for name, given in util.ordered(pruned) do
    local i = known[name]
    if not i then
      P.fail(("%s: pruned names table '%s', which does not exist; tables: %s"):format(func, tostring(name),
        table.concat(util.keys(known), ", ")))
    end
    local plain = type(given) == "table" and util.is_plain(given)
    local a = plain and util.named(("%s: pruned: table '%s'"):format(func, name), given,
      { remapping = util.required, hash = false })
    self._mapping[i], self.rows[i] = read_mapping(func, tables[i], plain and a.remapping or given)
    if plain and a.hash then self._hashed[i], self._any_hash = true, true else self._any_array = true end
  end
  local n = #tables
  -- first output of each table; scratch
  self._first, self._ends = ffi.new("int32_t[?]", n + 1), ffi.new("int64_t[?]", n + 1)
  for k = #outputs, 1, -1 do self._first[outputs[k].table - 1] = k - 1 end
  self._first[n] = #outputs
  if device == "meta" then return end
  self._offsets = Tensor.empty({ n + 1 }, "i64", device)
  self._by_dtype = {}
end

--- Call f(from, n, to) for runs of ids [row + from, row + from + n) of table i, within n_rows ids from `row`, whose
--- rows are left and lie one after the other from `to` on.
function Remap:each_kept(i, row, n_rows, f)
  local mapping, from = self._mapping[i], 0
  while from < n_rows do
    local to, n = tonumber(mapping[row + from]), 1
    if to >= 0 then
      while from + n < n_rows and mapping[row + from + n] == to + n do n = n + 1 end
      f(from, n, to)
    end
    from = from + n
  end
end

--- One tensor of the parts of all tables, and where each begins. part(i): the tensor of table i, or nil: it has none.
local function join(self, n, dtype, width, part)
  local parts, ends, at = {}, { 0 }, 0
  for i = 1, n do
    parts[i] = part(i) or false
    at = at + (parts[i] and parts[i]:size(1) or 0)
    ends[i + 1] = at
  end
  local shape = width and { at, width } or { at }
  local whole = Tensor.empty(shape, dtype, self._device or nil)
  for i = 1, n do
    if parts[i] and parts[i]:size(1) > 0 then whole:slice(1, ends[i], ends[i + 1]):copy(parts[i]) end
  end
  return { entries = whole, starts = Tensor.tensor(ends, "i64", self._device or nil) }
end

local function array_part(self, i)
  local mapping = self._mapping[i]
  if not mapping or self._hashed[i] then return nil end
  return Tensor.from_memory(mapping, { self._tables[i].num_embeddings }, "i64", "cpu")
end

--- The hash table of table i: twice as many slots as ids that are left.
local function hash_part(self, i, dtype)
  if not self._hashed[i] then return nil end
  local mapping, left, n = self._mapping[i], self.rows[i], 0
  local ids, rows = ffi.new("int64_t[?]", left + 1), ffi.new("int64_t[?]", left + 1)
  for id = 0, self._tables[i].num_embeddings - 1 do
    if mapping[id] >= 0 then
      ids[n], rows[n] = id, mapping[id]
      n = n + 1
    end
  end
  local function tensor(list) return Tensor.from_memory(list, { left }, "i64", "cpu"):to(dtype) end
  local slots = 2 * left + 1 -- never none: that would be a table that is not pruned
  return pruned_tables.pruned_hashmap_insert(tensor(ids), tensor(rows), Tensor.tensor({ 0, left }, "i64", "cpu"),
    Tensor.full({ slots, 2 }, -1, dtype, "cpu"), Tensor.tensor({ 0, slots }, "i64", "cpu"))
end

local function make_array_or_index(self, dtype)
  local n = #self._tables
  return {
    array = self._any_array and join(self, n, dtype, nil, function(i) return array_part(self, i) end),
    hash = self._any_hash and join(self, n, dtype, 2, function(i) return hash_part(self, i, dtype) end),
  }
end

local numbers = ffi.new "const int64_t *[1]"
local out = Tensor.out

--- The array lookup's words, for the user's tables.
local function not_there(self)
  local message = ffi.string(C.peri_error_message())
  local id, number, allowed = message:match "is (%-?%d+) %(table (%d+), sample %d+%), (.*)$"
  local t = number and self._tables[tonumber(number) + 1]
  P.fail(t and ("table '%s': id %s, %s"):format(t.name, id, allowed) or message)
end

--- The rows of the ids of a batch with one key for each output: -1 for those that were left out, and for -1.
function Remap:rows_of_ids(batch, ids)
  local dtype, n = ids:dtype(), #self._tables
  local made = self._by_dtype[dtype]
  if not made then
    if dtype ~= "i64" and dtype ~= "i32" then P.fail(("ids are %s, allowed: i64, i32"):format(dtype)) end
    made = P.lasting(make_array_or_index, self, dtype)
    self._by_dtype[dtype] = made
  end
  check(C.peri_kjt_offset_per_key(KeyedJaggedTensor.ptr(batch), numbers))
  for i = 0, n do self._ends[i] = numbers[0][self._first[i]] end
  check(C.peri_tensor_write(self._offsets.ptr, self._ends, 8 * (n + 1)))
  local array, hash = made.array, made.hash
  if array then
    if C.peri_sparse_pruned_array_lookup(ids.ptr, self._offsets.ptr, array.entries.ptr, array.starts.ptr, out) < 0 then
      not_there(self)
    end
    ids = Tensor.wrap(out[0])
  end
  if hash then
    check(C.peri_sparse_pruned_hashmap_lookup(ids.ptr, self._offsets.ptr, hash.entries.ptr, hash.starts.ptr, out))
    ids = Tensor.wrap(out[0])
  end
  return ids
end

return Remap
