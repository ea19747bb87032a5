-- csv.lua: files of lines of columns, which a description names: labels, numbers and bags of ids (perilune/io.h).
--
--   local loader = peri.data.csv { path = "clicks.csv", header = true, batch_size = 4096, columns = {
--     { name = "clicked", kind = "label" }, { name = "age", kind = "dense", transform = "log" },
--     { name = "history", kind = "ids", rows = 100000, separator = "|" },
--   } }
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local Loader = require "perilune.data.loader"
local lines = require "perilune.data.lines"
local C = P.C

local kinds = { label = C.PERI_COLUMN_LABEL, dense = C.PERI_COLUMN_DENSE, ids = C.PERI_COLUMN_IDS,
  skip = C.PERI_COLUMN_SKIP }
local transforms = { raw = C.PERI_DENSE_RAW, log = C.PERI_DENSE_LOG, signed_log = C.PERI_DENSE_SIGNED_LOG }
local ids = { exact = C.PERI_IDS_EXACT, mod = C.PERI_IDS_MOD, hash = C.PERI_IDS_HASH, text = C.PERI_IDS_TEXT,
  raw = C.PERI_IDS_EXACT } -- with 0 rows

-- What each kind of column takes beside name and kind.
local of_kind = {
  label = {}, skip = {},
  dense = { transform = "raw", fallback = 0 },
  ids = {
    rows = util.required.number, -- of its table
    table = util.optional,       -- the table's name: columns of one name share it (default: "t_" and the column's name)
    ids = "exact",               -- ids x: exact = x, below rows; mod = x mod rows; hash = XXH3_64bits(x) mod rows; text
                                 -- = of its bytes; raw = x, any 64 bits, for a map of raw ids
    separator = util.optional,   -- between the ids of a bag; nil: one id, or none
    base = 10,                   -- 10, or 16: hexadecimal numbers
    most = 0,                    -- so many ids of a bag are kept, the first ones; 0: all
  },
}

local spec = {
  columns = util.required.list, -- a list of { name =, kind = "label", "dense", "ids" or "skip", ... }
  delimiter = ",",
  header = false,          -- the first line of each file names the columns; those that are not described are left out
  part = "all", holdout = 0.1, validation = 0.05, -- as data.criteo's
}
for name, default in util.ordered(lines.spec) do spec[name] = default end
for name, default in util.ordered(Loader.common) do spec[name] = default end

--- The code of a character, 0 for nil.
local function character(func, what, value)
  if value == nil then return 0 end
  if type(value) ~= "string" or #value ~= 1 then
    P.fail(("%s: %s is %s, wanted one character"):format(func, what, errors.kind(value)))
  end
  return value:byte()
end

--- Check the description of column i, and add its feature to `fields`. Returns its arguments.
local function check_column(func, given, i, fields, by_name)
  local what = ("%s: columns[%d]"):format(func, i)
  if type(given) ~= "table" or type(given.name) ~= "string" then
    P.fail(what .. (" is %s, wanted { name =, kind =, ... }"):format(errors.kind(given)))
  end
  what = ("%s: column '%s'"):format(func, given.name)
  if by_name[given.name] then P.fail(what .. " is described twice") end
  by_name[given.name] = true
  util.one_of(what, "kind", given.kind, util.keys(kinds))
  local own = { name = util.required.string, kind = util.required.string }
  for name, default in util.ordered(of_kind[given.kind]) do own[name] = default end
  local c = util.named(what, given, own)
  if c.kind == "dense" then
    fields.dense[#fields.dense + 1] = c.name
    util.one_of(what, "transform", c.transform, util.keys(transforms))
  elseif c.kind == "ids" then
    local n = #fields.keys + 1
    fields.keys[n], fields.tables[n] = c.name, c.table or "t_" .. c.name
    fields.rows[n] = util.integer(what, "rows", c.rows, 1)
    for k = 1, n - 1 do
      if fields.tables[k] == fields.tables[n] and fields.rows[k] ~= fields.rows[n] then
        P.fail(("%s: table '%s' has %d rows here and %d for column '%s'"):format(what, c.table, fields.rows[n],
          fields.rows[k], fields.keys[k]))
      end
    end
    util.one_of(what, "ids", c.ids, util.keys(ids))
    fields.raw[n] = c.ids == "raw"
    util.integer(what, "most", c.most, 0)
    util.one_of(what, "base", c.base, { 10, 16 })
  end
  return c
end

--- C's description of a column.
local function fill_column(func, to, c)
  to.name, to.kind = c.name, kinds[c.kind]
  if c.kind == "dense" then to.dense, to.fallback = transforms[c.transform], c.fallback end
  if c.kind ~= "ids" then return end
  to.ids, to.base, to.most, to.table_rows = ids[c.ids], c.base, c.most, c.ids == "raw" and 0 or c.rows
  to.separator = character(func, ("column '%s': separator"):format(c.name), c.separator)
end

--- A loader over files; see `spec` for the arguments. Keys are the names of the columns of ids. shared: in one of
--- several workers, the index of lines that they share.
return function(args, shared)
  local func = "data.csv"
  local a = lines.of_rank(func, util.named(func, args, spec))
  if #a.columns == 0 then P.fail(("%s: columns is empty, wanted a list of descriptions"):format(func)) end
  local fields, by_name, checked = { dense = {}, keys = {}, rows = {}, tables = {}, raw = {} }, {}, {}
  for i, given in ipairs(a.columns) do checked[i] = check_column(func, given, i, fields, by_name) end
  local options, columns, paths = P.struct "peri_csv_config", P.structs("peri_csv_column", #checked),
    lines.strings(a.path)
  for i, c in ipairs(checked) do fill_column(func, columns[i - 1], c) end
  options.paths, options.n_paths, options.columns, options.n_columns = paths, #a.path, columns, #checked
  options.delimiter, options.header = character(func, "delimiter", a.delimiter), a.header
  options.rank, options.world = Loader._place(func, a)
  options.batch_rows = a.batch_size
  options.begin, options["end"] = Loader.bounds(func, a.part, a.holdout, a.validation)
  return lines.loader(func, a, fields, "perilune.data.csv", shared, function(out)
    return C.peri_csv_open(options, out)
  end)
end
