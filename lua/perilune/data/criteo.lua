-- criteo.lua: files in the Criteo layout (perilune/io.h): label, 13 integers, 26 hexadecimal categories, tab-separated.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local Loader = require "perilune.data.loader"
local batch = require "perilune.data.batch"
local C, check = P.C, P.check

local wrap = P.handle("peri_criteo", {}, nil, "a Criteo reader")
local out, words = ffi.new "peri_criteo *[1]", ffi.new "void *[1]"
local rows_out = ffi.new "int64_t[1]"

local Source = util.seal(util.class "CriteoSource")

function Source:init(dense_features, sparse_features, rows)
  self.dense, self.keys = Loader.numbered("i", dense_features), Loader.numbered("c", sparse_features)
  self.tables, self.rows = Loader.numbered("t_c", sparse_features), rows
end

function Source:fill(host) check(C.peri_criteo_next(self._reader.ptr, batch.host_ptr(host))) end
function Source:skip()
  check(C.peri_criteo_skip(self._reader.ptr, rows_out))
  return tonumber(rows_out[0])
end
function Source:rewind() C.peri_criteo_rewind(self._reader.ptr) end
--- The words of an index of lines (perilune/io.h), which are a tensor that readers of several threads share.
local function words_of(index)
  check(C.peri_tensor_data(Tensor.ptr(index), words))
  return ffi.cast("int64_t *", words[0])
end

--- A new index of the lines of this part of the file.
function Source:index()
  local index = Tensor.empty({ check(tonumber(C.peri_criteo_index_words(self._reader.ptr))) }, "i64", "cpu")
  check(C.peri_criteo_index(self._reader.ptr, words_of(index)))
  return index
end

--- Use one, from the first line on.
function Source:share(index)
  self._index = index -- alive as long as the reader
  check(C.peri_criteo_share(self._reader.ptr, words_of(index)))
end

--- Lines of this part of the file.
function Source:count() return check(tonumber(C.peri_criteo_count(self._reader.ptr))) end

local enums = {
  dense = { raw = C.PERI_DENSE_RAW, log = C.PERI_DENSE_LOG, signed_log = C.PERI_DENSE_SIGNED_LOG },
  ids = { hash = C.PERI_IDS_HASH, mod = C.PERI_IDS_MOD },
  missing = { empty = C.PERI_MISSING_EMPTY, zero = C.PERI_MISSING_ZERO },
}


local spec = {
  path = util.required.string,
  rows = util.any(100000), -- rows of every category's table, or a list
  dense_features = 13,
  sparse_features = 26,
  dense = "log",         -- integers x: raw = x, log = ln(1 + max(x, 0)), signed_log = sign(x) ln(1 + |x|)
  ids = "hash",          -- categories x: hash = XXH3_64bits(x) mod rows, mod = x mod rows
  missing = "empty",     -- missing categories: empty = an empty bag, zero = id 0, kept for them
  part = "all",          -- all, train (the head of the file), test (its tail); fit and validation are the two parts of train
  holdout = 0.1,         -- share of the file, by bytes, that is the test part
  validation = 0.05,     -- share of the train part that is the validation part
}
for name, default in util.ordered(Loader.common) do spec[name] = default end

--- A loader over a file; see `spec` for the arguments. Keys are c1..c26, dense features i1..i13, tables t_c1..t_c26. shared: in one of
--- several workers, the index of lines that they share.
return function(args, shared)
  local func = "data.criteo"
  local a = util.named(func, args, spec)
  local n = util.integer(func, "sparse_features", a.sparse_features, 0, 4096)
  for name in util.ordered(enums) do util.one_of(func, name, a[name], util.keys(enums[name])) end
  local rows = {}
  for i = 1, n do
    local r = type(a.rows) == "table" and a.rows[i] or a.rows
    if type(r) ~= "number" then P.fail(("%s: rows has no number for category %d"):format(func, i)) end
    rows[i] = util.integer(func, ("rows of category %d"):format(i), r, 0)
  end
  local source = Source(util.integer(func, "dense_features", a.dense_features, 0, 4096), n, rows)
  local options = P.struct "peri_criteo_config"
  local table_rows = ffi.new("int64_t[?]", math.max(n, 1))
  for i = 1, n do table_rows[i - 1] = rows[i] end
  options.path, options.table_rows = a.path, table_rows
  options.dense_features, options.sparse_features = a.dense_features, n
  options.dense, options.ids, options.missing = enums.dense[a.dense], enums.ids[a.ids], enums.missing[a.missing]
  options.rank, options.world = Loader._place(func, a)
  options.batch_rows = util.integer(func, "batch_size", a.batch_size, 1, 2 ^ 31)
  options.begin, options["end"] = Loader.bounds(func, a.part, a.holdout, a.validation)
  check(C.peri_criteo_open(options, out))
  source._reader = P.lasting(wrap, out[0])
  if shared and shared[1] then source:share(shared[1]) end
  local worker = { module = "perilune.data.criteo", arguments = a }
  if a.num_workers ~= 1 then worker.shared = function() return { source:index() } end end
  return Loader(func, source, a, worker)
end
