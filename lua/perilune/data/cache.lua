-- cache.lua: samples of any loader, written once into a folder of arrays (perilune/io.h), and read from there: mapped
-- into memory, in any order, by any number of ranks and workers.
--
--   peri.data.cache.write { path = "clicks.samples", loader = peri.data.csv { ... } }
--   local loader = peri.data.cache { path = "clicks.samples", batch_size = 4096, shuffle = true, num_workers = 2 }
--
-- samples.txt says what the arrays have, a line each, its words with tabs between them:
--
--   perilune samples 1
--   dense TAB age
--   ids TAB history TAB t_history TAB 100000      key, table, rows of the table; TAB raw where ids are any 64 bits
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local Loader = require "perilune.data.loader"
local lines = require "perilune.data.lines"
local batch = require "perilune.data.batch"
local arrays = require "perilune.data.arrays"
local C, check = P.C, P.check

local M = {}

local FIRST = "perilune samples 1"
local wrap = P.handle("peri_columns_writer", {}, nil, "a writer of samples")
local out = ffi.new "peri_columns_writer *[1]"

-- -- writing ----------------------------------------------------------------------------------------------------------

local function describe_source(func, loader)
  local text = { FIRST }
  for _, name in ipairs(loader.dense) do text[#text + 1] = ("dense\t%s"):format(name) end
  for i, key in ipairs(loader.keys) do
    text[#text + 1] = ("ids\t%s\t%s\t%.0f%s"):format(key, loader.tables[i], loader.rows[i],
      loader.raw[i] and "\traw" or "")
    if (key .. loader.tables[i]):find "[\t\n\r]" then
      P.fail(("%s: key '%s' has a tab or a line end in its name"):format(func, key))
    end
  end
  for _, name in ipairs(loader.dense) do
    if name:find "[\t\n\r]" then
      P.fail(("%s: dense feature '%s' has a tab or a line end in its name"):format(func, name))
    end
  end
  return table.concat(text, "\n") .. "\n"
end

--- Write the samples that a loader still gives into a new folder, and return how many they are. It has no workers, and
--- is this rank's
---alone.
function M.write(args)
  local func = "data.cache.write"
  local a = util.named(func, args, { path = util.required.string, loader = util.required })
  local loader = a.loader
  if not Loader.is(loader) then
    P.fail(("%s: loader is %s, wanted one of peri.data"):format(func, errors.kind(loader)))
  end
  if loader.world_size > 1 then
    P.fail(("%s: the loader is one of %d ranks; make it with rank = 0, world_size = 1"):format(func, loader.world_size))
  end
  local text, wide, rows = describe_source(func, loader), false, 0
  for i, r in ipairs(loader.rows) do wide = wide or r > 2 ^ 31 or loader.raw[i] or false end
  check(C.peri_columns_writer_new(a.path, #loader.dense, #loader.keys, wide, out))
  local writer = P.lasting(wrap, out[0])
  for host in function() return loader:next_host() end do
    check(C.peri_columns_writer_add(writer.ptr, batch.host_ptr(host)))
    rows = rows + tonumber(host.ptr.rows)
  end
  check(C.peri_columns_writer_finish(writer.ptr, text))
  writer:release()
  return rows
end

-- -- reading ----------------------------------------------------------------------------------------------------------

--- What samples.txt says, as a source has it.
local function read_description(func, folder)
  local path = folder .. "/samples.txt"
  local text, why = util.read_file(path)
  if not text then P.fail(("%s: %s: no folder of samples, as data.cache.write makes: %s"):format(func, folder, why)) end
  local fields, number = { dense = {}, keys = {}, tables = {}, rows = {}, raw = {} }, 0
  for line in text:gmatch "([^\n]*)\n" do
    number = number + 1
    local plain, raw = line:gsub("^(ids\t.*)\traw$", "%1")
    local dense, key, in_table, rows = line:match "^dense\t(.+)$", plain:match "^ids\t([^\t]+)\t([^\t]+)\t(%d+)$"
    if dense then fields.dense[#fields.dense + 1] = dense
    elseif key and tonumber(rows) >= 1 and tonumber(rows) <= 2 ^ 53 then
      local n = #fields.keys + 1
      fields.keys[n], fields.tables[n], fields.rows[n], fields.raw[n] = key, in_table, tonumber(rows), raw == 1
    elseif number > 1 or line ~= FIRST then
      P.fail(("%s: %s:%d: '%s', wanted %s"):format(func, path, number, line:sub(1, 40), number == 1 and "'" .. FIRST
        .. "'"
        or "dense and a name, or ids, key, table and rows, with tabs between them"))
    end
  end
  if number == 0 then P.fail(("%s: %s is empty"):format(func, path)) end
  return fields
end

--- The arrays of a folder, as a part.
local function part_of(func, folder, fields)
  local found, keep = {}, {}
  for _, name in ipairs { "labels", "dense", "lengths", "offsets", "ids" } do
    local list = arrays.open(("%s/%s.npy"):format(folder, name))
    found[name], keep[#keep + 1] = list[1], list.handle
  end
  local rows = found.labels.shape[1] or 0
  arrays.expect(func, found.labels, "labels", false, rows, 1)
  arrays.expect(func, found.dense, "dense features", false, rows, #fields.dense)
  arrays.expect(func, found.lengths, "lengths", true, rows, #fields.keys)
  arrays.expect(func, found.offsets, "offsets", true, rows + 1, 1)
  arrays.expect(func, found.ids, "ids", true, nil, 1)
  if found.offsets.dtype ~= "i64" then
    P.fail(("%s: %s/offsets.npy is %s, wanted i64"):format(func, folder, found.offsets.dtype))
  end
  local function cut(from, to)
    if #fields.dense > 0 then to.dense = arrays.rows_of(found.dense, from) end
    to.labels, to.lengths, to.values = arrays.rows_of(found.labels, from), arrays.rows_of(found.lengths, from),
      arrays.rows_of(found.ids, 0)
    to.offsets = ffi.cast("const int64_t *", found.offsets.array.data) + from
    to.total = found.ids.array.elements
  end
  return { name = folder, rows = rows, keep = keep, cut = cut }
end

local spec = { path = util.required } -- of a folder, or a list of those of folders that are read as one
for name, default in util.ordered(arrays.spec) do spec[name] = default end
for name, default in util.ordered(Loader.common) do spec[name] = default end

--- A loader over folders that `write` made; see `spec` for the arguments.
function M.loader(args)
  local func = "data.cache"
  local a = util.named(func, args, spec)
  local fields, parts
  for i, folder in ipairs(lines.paths(func, a.path)) do
    local own = read_description(func, folder)
    fields, parts = fields or own, parts or {}
    for _, what in ipairs { "dense", "keys", "tables", "rows", "raw" } do
      if table.concat(util.map(own[what], tostring), "\n") ~= table.concat(util.map(fields[what], tostring), "\n") then
        P.fail(("%s: %s has other %s than %s"):format(func, folder, what, parts[1].name))
      end
    end
    parts[i] = part_of(func, folder, fields)
  end
  -- they are as they were written
  return arrays.loader(func, a, fields, parts, "perilune.data.cache", { dense = "raw", ids = "exact" })
end

return setmetatable(M, { __call = function(_, args) return M.loader(args) end })
