-- criteo.lua: files in the Criteo layout (perilune/io.h): label, 13 integers, 26 hexadecimal categories, tab-separated.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Loader = require "perilune.data.loader"
local lines = require "perilune.data.lines"
local C = P.C

local enums = {
  dense = { raw = C.PERI_DENSE_RAW, log = C.PERI_DENSE_LOG, signed_log = C.PERI_DENSE_SIGNED_LOG },
  ids = { hash = C.PERI_IDS_HASH, mod = C.PERI_IDS_MOD },
  missing = { empty = C.PERI_MISSING_EMPTY, zero = C.PERI_MISSING_ZERO },
}

local spec = {
  rows = util.any(100000), -- rows of every category's table, or a list
  dense_features = util.whole(13, 0, 4096),
  sparse_features = util.whole(26, 0, 4096),
  dense = "log",         -- integers x: raw = x, log = ln(1 + max(x, 0)), signed_log = sign(x) ln(1 + |x|)
  ids = "hash",          -- categories x: hash = XXH3_64bits(x) mod rows, mod = x mod rows
  missing = "empty",     -- missing categories: empty = an empty bag, zero = id 0, kept for them
  part = "all",          -- all, train (the head of the files), test (their tail); fit and validation are the two parts
                         -- of train
  holdout = 0.1,         -- share of the files, by bytes, that is the test part
  validation = 0.05,     -- share of the train part that is the validation part
}
for name, default in util.ordered(lines.spec) do spec[name] = default end
for name, default in util.ordered(Loader.common) do spec[name] = default end

--- A loader over files; see `spec` for the arguments. Keys are c1..c26, dense features i1..i13, tables t_c1..t_c26.
--- shared: in one of several workers, the index of lines that they share.
return function(args, shared)
  local func = "data.criteo"
  local a = lines.of_rank(func, util.named(func, args, spec))
  local n, dense = a.sparse_features, a.dense_features
  for name in util.ordered(enums) do util.one_of(func, name, a[name], util.keys(enums[name])) end
  local options, rows = P.struct "peri_criteo_config", {}
  local table_rows, paths = ffi.new("int64_t[?]", math.max(n, 1)), lines.strings(a.path)
  for i = 1, n do
    local r = type(a.rows) == "table" and a.rows[i] or a.rows
    if type(r) ~= "number" then P.fail(("%s: rows has no number for category %d"):format(func, i)) end
    rows[i] = util.integer(func, ("rows of category %d"):format(i), r, 0)
    table_rows[i - 1] = rows[i]
  end
  options.path, options.table_rows = paths[0], table_rows
  options.more, options.n_more = paths + 1, #a.path - 1
  options.dense_features, options.sparse_features = dense, n
  options.dense, options.ids, options.missing = enums.dense[a.dense], enums.ids[a.ids], enums.missing[a.missing]
  options.rank, options.world = Loader._place(func, a)
  options.batch_rows = a.batch_size
  options.begin, options["end"] = Loader.bounds(func, a.part, a.holdout, a.validation)
  local fields = { dense = Loader.numbered("i", dense), keys = Loader.numbered("c", n),
    tables = Loader.numbered("t_c", n), rows = rows }
  return lines.loader(func, a, fields, "perilune.data.criteo", shared, function(out)
    return C.peri_criteo_open(options, out)
  end)
end
