-- npy.lua: samples in files that NumPy wrote: npy and npz, as DLRM, MLPerf and TorchRec preprocess Criteo's data.
--
--   -- X_int, X_cat, y (DLRM)
--   peri.data.npy { files = { "kaggle_processed.npz" }, dense = "log", rows = counts, ... }
--   peri.data.npy { files = { { dense = "day_0_dense.npy", labels = "day_0_labels.npy", sparse = "day_0_sparse.npy" },
--     ... }, ... }
--   ... sparse = "day_0_sparse_multi_hot.npz" ...              -- an array a feature: "0", "1", ... (MLPerf's DLRM v2)
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local Loader = require "perilune.data.loader"
local arrays = require "perilune.data.arrays"

local spec = {
  files = util.required,          -- a list: paths of npz files with X_int, X_cat and y, or { dense =, labels =, sparse
                                  -- = }: paths
  rows = util.required,           -- of every feature's table, or a list
  dense = "raw", ids = "exact",   -- as data.criteo's and data.csv's
  padding = util.optional.number, -- ids that are this number are none
}
for name, default in util.ordered(arrays.spec) do spec[name] = default end
for name, default in util.ordered(Loader.common) do spec[name] = default end

--- The one array of an npy file, or the one of an npz that is called `name`.
local function one(func, path, name)
  if type(path) ~= "string" then
    P.fail(("%s: %s is %s, wanted the path of a file"):format(func, name, errors.kind(path)))
  end
  local list = arrays.open(path)
  local found = list[name] or #list == 1 and list[1]
  if not found then
    P.fail(("%s: %s has no array '%s'; it has: %s"):format(func, path, name, table.concat(util.map(list, function(x)
      return x.name
    end), ", ")))
  end
  return found, list.handle
end

--- The features of an array that has a column for each, as sparse_of gives them.
local function columns_of(func, a)
  local features = {}
  arrays.expect(func, a, "ids", true)
  for i = 1, a.shape[2] or 1 do features[i] = { a, i - 1, 1 } end
  return features
end

--- A list of { array, first column, columns } a feature, of a file whose one array has a column a feature, of one with
--- an array a feature, or of several files with one array each.
local function sparse_of(func, sparse, keep)
  local features = {}
  local function add(a)
    arrays.expect(func, a, "ids", true)
    features[#features + 1] = { a, 0, a.shape[2] or 1 }
  end
  if type(sparse) == "table" then
    for _, path in ipairs(sparse) do
      local a
      a, keep[#keep + 1] = one(func, path, "sparse")
      add(a)
    end
    return features
  end
  if type(sparse) ~= "string" then
    P.fail(("%s: sparse is %s, wanted a path or a list of paths"):format(func, errors.kind(sparse)))
  end
  local list = arrays.open(sparse)
  keep[#keep + 1] = list.handle
  if list[1].name ~= "" then -- npz: arrays are called 0, 1, ..., in whatever order they lie there
    for i = 1, #list do
      if not list[tostring(i - 1)] then
        P.fail(("%s: %s has %d arrays, and none is called '%d'"):format(func, sparse, #list, i - 1))
      end
      add(list[tostring(i - 1)])
    end
    return features
  end
  return columns_of(func, list[1])
end

--- The arrays of one entry of `files`: { name =, dense = or nil, labels = or nil, sparse = features, rows =, keep = }.
local function arrays_of(func, entry)
  local keep, dense, labels, sparse = {}, nil, nil, {}
  if type(entry) == "string" then
    local list = arrays.open(entry)
    keep[1] = list.handle
    for _, name in ipairs { "X_int", "X_cat", "y" } do
      if not list[name] then
        P.fail(("%s: %s has no array '%s', wanted: X_int, X_cat, y; it has: %s"):format(func, entry, name,
          table.concat(util.map(list, function(x) return x.name ~= "" and x.name or "one without a name (npy)" end),
            ", ")))
      end
    end
    dense, labels, sparse = list.X_int, list.y, columns_of(func, list.X_cat)
  elseif type(entry) == "table" then
    local e = util.named(func .. ": an entry of files", entry, { dense = util.optional, labels = util.optional,
      sparse = util.optional })
    if e.dense then dense, keep[#keep + 1] = one(func, e.dense, "dense") end
    if e.labels then labels, keep[#keep + 1] = one(func, e.labels, "labels") end
    if e.sparse then sparse = sparse_of(func, e.sparse, keep) end
  else P.fail(("%s: an entry of files is %s, wanted a path or { dense =, labels =, sparse = }"):format(func,
    errors.kind(entry))) end
  local first = dense or labels or sparse[1] and sparse[1][1]
  if not first then P.fail(func .. ": an entry of files names no file") end
  local rows = first.shape[1] or 0
  if dense then arrays.expect(func, dense, "dense features", false, rows) end
  if labels then arrays.expect(func, labels, "labels", false, rows, 1) end
  for _, f in ipairs(sparse) do arrays.expect(func, f[1], "ids", true, rows) end
  return { name = first.path, dense = dense, labels = labels, sparse = sparse, rows = rows, keep = keep }
end

--- What peri_columns gets of such arrays, from row `from` on.
local function cut(p, from, to)
  local ids, names = ffi.new("peri_rows[?]", math.max(#p.sparse, 1)), ffi.new("const char *[?]", math.max(#p.sparse, 1))
  for i, f in ipairs(p.sparse) do
    ids[i - 1], names[i - 1] = arrays.rows_of(f[1], from, f[2], f[3]), f[1].path
  end
  if p.dense then to.dense = arrays.rows_of(p.dense, from) end
  if p.labels then to.labels, to.labels_name = arrays.rows_of(p.labels, from), p.labels.path end
  to.ids, to.ids_names = ids, names
  return { ids, names, p } -- p has the texts of the names
end

--- A loader over such files; see `spec` for the arguments. Keys are c1, c2, ..., dense features i1, i2, ..., tables
--- t_c1, ...
return function(args)
  local func = "data.npy"
  local a = util.named(func, args, spec)
  local files = type(a.files) == "table" and util.whole_list(func, "files", a.files, "files") or { a.files }
  local parts = {}
  for i, entry in ipairs(files) do
    local p = arrays_of(func, entry)
    p.cut = function(from, to) return cut(p, from, to) end
    parts[i] = p
    p.columns = p.dense and (p.dense.shape[2] or 1) or 0
    if p.columns ~= parts[1].columns or #p.sparse ~= #parts[1].sparse then
      P.fail(("%s: %s has %d dense and %d sparse features, and %s has %d and %d"):format(func, p.name, p.columns,
        #p.sparse, parts[1].name, parts[1].columns, #parts[1].sparse))
    end
  end
  local first = parts[1] or P.fail(func .. ": files is an empty list")
  local n, rows = #first.sparse, {}
  for i = 1, n do
    local r = type(a.rows) == "table" and a.rows[i] or a.rows
    if type(r) ~= "number" then P.fail(("%s: rows has no number for feature %d of %d"):format(func, i, n)) end
    rows[i] = util.integer(func, ("rows of feature %d"):format(i), r, 1)
  end
  local fields = { dense = Loader.numbered("i", first.columns), keys = Loader.numbered("c", n),
    tables = Loader.numbered("t_c", n), rows = rows }
  return arrays.loader(func, a, fields, parts, "perilune.data.npy", a)
end
