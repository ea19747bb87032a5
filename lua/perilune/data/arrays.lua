-- arrays.lua: samples in arrays: the source around C's peri_columns (perilune/io.h), and files that NumPy wrote, npy
-- and npz, in the layouts of MLPerf and TorchRec.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Loader = require "perilune.data.loader"
local batch = require "perilune.data.batch"
local C, check = P.C, P.check

local M = {}

local wrap_arrays = P.handle("peri_arrays", {}, nil, "arrays in a file")
local wrap_columns = P.handle("peri_columns", {}, nil, "samples in arrays")
local arrays_out, columns_out = ffi.new "peri_arrays *[1]", ffi.new "peri_columns *[1]"
local integers = { i64 = true, i32 = true, i16 = true, i8 = true, u8 = true, bool = true }
local dtype_names = { [C.PERI_F32] = "f32", [C.PERI_F64] = "f64", [C.PERI_F16] = "f16", [C.PERI_I64] = "i64",
  [C.PERI_I32] = "i32", [C.PERI_I16] = "i16", [C.PERI_I8] = "i8", [C.PERI_U8] = "u8", [C.PERI_BOOL] = "bool" }

-- -- files ------------------------------------------------------------------------------------------------------------

--- The arrays of a file: a list of { name =, shape =, dtype = (text), array = (peri_array), path = }, by position and
--- by name. The handle that keeps them alive is in the field `handle`.
function M.open(path)
  check(C.peri_arrays_open(path, arrays_out))
  local handle = P.lasting(wrap_arrays, arrays_out[0])
  local list = { handle = handle, path = path }
  for i = 1, C.peri_arrays_count(handle.ptr) do
    local array = P.struct "peri_array"
    check(C.peri_arrays_get(handle.ptr, i - 1, array))
    local shape = {}
    for d = 1, array.ndim do shape[d] = tonumber(array.shape[d - 1]) end
    local own = { name = ffi.string(array.name), shape = shape, dtype = dtype_names[array.dtype], array = array,
      path = path }
    list[i], list[own.name] = own, own
  end
  return list
end

local function text_of(a)
  return ("%s%s is %s [%s]"):format(a.path, a.name ~= "" and ": " .. a.name or "", a.dtype, table.concat(a.shape, ", "))
end

--- Bytes of an element.
local function width(a) return tonumber(C.peri_dtype_size(a.array.dtype)) end

--- peri_rows of columns [first, first + count) of an array, from its row `from` on. [n] is [n, 1].
local function rows_of(a, from, first, count)
  local stride = a.shape[2] or 1
  local at = ffi.cast("const char *", a.array.data) + (from * stride + (first or 0)) * width(a)
  return ffi.new("peri_rows", { data = at, stride = stride, dtype = a.array.dtype, count = count or stride })
end
M.rows_of = rows_of

--- An error unless an array has such elements and rows. whole: only whole numbers; rows: how many, or nil; columns:
--- likewise.
function M.expect(func, a, what, whole, rows, columns)
  local dims, own = #a.shape, a.shape[2] or 1
  local good = (dims == 1 or dims == 2) and (integers[a.dtype] or not whole and (a.dtype == "f32" or a.dtype == "f64"))
  if good and (not rows or a.shape[1] == rows) and (not columns or own == columns) then return a end
  P.fail(("%s: %s, wanted %s: %s [%s, %s]"):format(func, text_of(a), what, whole and "whole numbers"
    or "f32, f64 or whole numbers", rows or "samples", columns or "any"))
end

-- -- the source -------------------------------------------------------------------------------------------------------

local Source = util.seal(util.class "ArraySource")

--- Arguments of loaders of arrays.
M.spec = {
  shuffle = false,      -- each pass in an order of its own: blocks of samples that lie together, and the samples of
                        -- several blocks
  shuffle_block = 4096, -- samples of such a block
  shuffle_blocks = 16,  -- blocks whose samples are mixed
  seed = util.seed(1),  -- of the order
  part = "all", holdout = 0.1, validation = 0.05, -- as data.criteo's, in samples
}

local enums = {
  dense = { raw = C.PERI_DENSE_RAW, log = C.PERI_DENSE_LOG, signed_log = C.PERI_DENSE_SIGNED_LOG },
  ids = { exact = C.PERI_IDS_EXACT, raw = C.PERI_IDS_EXACT, mod = C.PERI_IDS_MOD, hash = C.PERI_IDS_HASH },
}

--- fields: as a source has them. modes: what becomes of numbers and ids: { dense =, ids =, padding = }. parts: a list
--- of { name =, rows
---=, keep =, cut = function(from, part) }, where cut fills in the arrays of
--- the peri_columns_part `part`, from row `from` of the part on, and returns what must stay alive.
function Source:init(func, a, fields, parts, modes)
  self.dense, self.keys, self.rows, self.tables = fields.dense, fields.keys, fields.rows, fields.tables
  self.raw = fields.raw or {}
  local o, n = P.struct "peri_columns_config", #fields.keys
  local table_rows = ffi.new("int64_t[?]", math.max(n, 1))
  for i = 1, n do
    if modes.ids == "raw" then self.raw[i] = true end
    table_rows[i - 1] = self.raw[i] and 0 or fields.rows[i]
  end
  o.table_rows, o.dense_features, o.sparse_features = table_rows, #fields.dense, n
  o.dense = enums.dense[util.one_of(func, "dense", modes.dense, util.keys(enums.dense))]
  o.ids = enums.ids[util.one_of(func, "ids", modes.ids, util.keys(enums.ids))]
  if modes.padding then o.padded, o.padding = true, util.integer(func, "padding", modes.padding, -2 ^ 53) end
  if a.shuffle then
    o.block_rows = util.integer(func, "shuffle_block", a.shuffle_block, 1, 2 ^ 31)
    o.blocks = util.integer(func, "shuffle_blocks", a.shuffle_blocks, 1, 2 ^ 31)
  end
  o.seed = a.seed
  check(C.peri_columns_new(o, columns_out))
  self._columns, self._at, self._keep = P.lasting(wrap_columns, columns_out[0]), 0, {}
  self:_add(parts, Loader.bounds(func, a.part, a.holdout, a.validation))
end

--- Give C the samples from share `from` to share `to` of all parts.
function Source:_add(parts, from, to)
  local total, at = 0, 0
  for _, p in ipairs(parts) do total = total + p.rows end
  local first, last = math.floor(total * from), math.floor(total * to)
  for _, p in ipairs(parts) do
    local own_first, own_last = math.max(first - at, 0), math.min(last - at, p.rows)
    if own_first < own_last then
      local c = P.struct "peri_columns_part"
      c.name, c.rows, c.first_row = p.name, own_last - own_first, own_first
      local keep = p.cut(own_first, c)
      check(C.peri_columns_add(self._columns.ptr, c))
      self._keep[#self._keep + 1] = { p.keep, keep }
    end
    at = at + p.rows
  end
  self._rows = tonumber(C.peri_columns_rows(self._columns.ptr))
end

function Source:fill(host, batch_size, rank, world)
  local rows = math.min(batch_size, self._rows - self._at)
  local first, last = batch.share(rows, rank, world)
  check(C.peri_columns_fill(self._columns.ptr, self._at + first, last - first, batch.host_ptr(host)))
  host.ptr.global_row, host.ptr.global_rows = self._at + first, rows
  self._at = self._at + rows
end
function Source:skip(batch_size)
  local rows = math.min(batch_size, self._rows - self._at)
  self._at = self._at + rows
  return rows
end
function Source:rewind(epoch)
  self._at = 0
  check(C.peri_columns_epoch(self._columns.ptr, epoch))
end
function Source:count() return self._rows end

--- A loader over such parts; module: the loader's, which workers call.
function M.loader(func, a, fields, parts, module, modes)
  if #parts == 0 then P.fail(func .. ": no files") end
  return Loader(func, Source(func, a, fields, parts, modes), a, { module = module, arguments = a })
end

return M
