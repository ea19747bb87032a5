-- changes.lua: which rows of tables changed (perilune/embed.h, peri_row_marks), for what a state_dict has of a table: a
-- live view, or a shard of a ShardedTensor whose rows are in a file. Its *source* is the table batch, the table, and
-- which state it is.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local tbes = require "perilune.embed.tbe"
local C, check = P.C, P.check

local M = {}

local _, _, _, wrap_marks = P.handle("peri_row_marks", {}, nil, "marks of changed rows")
local marks_out, tensor_out = ffi.new "peri_row_marks *[1]", Tensor.out
local tbe_out, table_out, name_out = ffi.new "peri_tbe *[1]", ffi.new "int64_t[1]", ffi.new "const char *[1]"

--- The table batches of sources, each once while somebody has it: a model of 100,000 tables has few.
local batches = setmetatable({}, { __mode = "v" })

--- A handle of a table batch, of which the caller gives a reference away.
local function lasting(batch)
  local key = tostring(ffi.cast("uintptr_t", batch))
  if batches[key] then C.peri_tbe_release(batch) else batches[key] = tbes._lasting(batch) end
  return batches[key]
end

--- The source of a tensor, or (nil) of a shard of a ShardedTensor; nil: no rows of table batches, or a state without
--- rows. It keeps the table batch.
function M.source(tensor, shard)
  tensor = tensor or shard.tensor
  if tensor then
    check(C.peri_tbe_of_view(Tensor.ptr(tensor), tbe_out, table_out, name_out))
    if tbe_out[0] == nil then return nil end
    return { batch = lasting(tbe_out[0]), table = tonumber(table_out[0]), name = ffi.string(name_out[0]) }
  end
  if not shard.source then return nil end
  local batch, number, name = shard.source()
  local geometry = tbes._geometry_of(batch, name)
  if geometry ~= "full" and geometry ~= "row" then return nil end
  C.peri_tbe_retain(batch)
  return { batch = lasting(batch), table = tonumber(number), name = name }
end

local function batch_of(source) return tbes._pointer(source.batch) end

--- A name of its own for a source's table batch, as long as that lives.
function M.key(source) return tostring(ffi.cast("uintptr_t", batch_of(source))) end

--- Marks of the rows of a source's table batch, from now on.
function M.marks(source)
  check(C.peri_row_marks_new(batch_of(source), marks_out))
  return wrap_marks(marks_out[0])
end

function M.alive(marks) return C.peri_row_marks_alive(marks.ptr) end

--- The bits so far, which are 0 afterwards.
function M.take(marks)
  check(C.peri_row_marks_take(marks.ptr, tensor_out))
  return Tensor.wrap(tensor_out[0])
end

--- Bits of marks that are all 0.
function M.none(marks)
  local bits = M.take(marks)
  bits:fill(0)
  return bits
end

function M.join(bits, more) check(C.peri_row_bits_join(Tensor.ptr(bits), Tensor.ptr(more))) end

--- The rows of a source's table whose bits are set: i64, ascending, counted from first_row on.
function M.rows(source, bits, first_row)
  check(C.peri_row_bits_list(batch_of(source), source.table, Tensor.ptr(bits), first_row, tensor_out))
  return Tensor.wrap(tensor_out[0])
end

--- These rows (i64) of a source, one after the other.
function M.read(source, rows)
  check(C.peri_tbe_read_rows(batch_of(source), source.table, source.name, Tensor.ptr(rows), tensor_out))
  return Tensor.wrap(tensor_out[0])
end

--- Overwrite these rows (i64, ascending) of a source.
function M.write(source, rows, values)
  if tbes._geometry_of(batch_of(source), source.name) == "row" then values = values:reshape { rows:numel() } end
  check(C.peri_tbe_write_rows(batch_of(source), source.table, source.name, Tensor.ptr(rows), Tensor.ptr(values)))
end

return M
