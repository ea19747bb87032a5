-- lines.lua: what readers of files of lines (criteo.lua, csv.lua) have in common: the source around a reader of C, and
-- which files a rank reads.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local Tensor = require "perilune.tensor"
local Loader = require "perilune.data.loader"
local batch = require "perilune.data.batch"
local C, check = P.C, P.check

local M = {}

local wrap = P.handle("peri_criteo", {}, nil, "a reader of lines")
local out, words = ffi.new "peri_criteo *[1]", ffi.new "void *[1]"
local rows_out = ffi.new "int64_t[1]"

-- -- the source -------------------------------------------------------------------------------------------------------

local Source = util.seal(util.class "LineSource")

--- dense, keys, rows, tables, raw: as a source has them; open(out): opens the reader.
function Source:init(fields, open)
  self.dense, self.keys, self.rows, self.tables = fields.dense, fields.keys, fields.rows, fields.tables
  self.raw = fields.raw or {}
  check(open(out))
  self._reader = P.lasting(wrap, out[0])
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

--- What workers share: an index of the lines of this part of the files; nothing where packed files are read, which have
--- none.
function Source:shared()
  local n = check(tonumber(C.peri_criteo_index_words(self._reader.ptr)))
  if n == 0 then return {} end
  local index = Tensor.empty({ n }, "i64", "cpu")
  check(C.peri_criteo_index(self._reader.ptr, words_of(index)))
  return { index }
end

--- Use what workers share, from the first line on.
function Source:share(shared)
  if not shared[1] then return end
  self._index = shared[1] -- alive as long as the reader
  check(C.peri_criteo_share(self._reader.ptr, words_of(self._index)))
end

--- Lines of this part of the files.
function Source:count() return check(tonumber(C.peri_criteo_count(self._reader.ptr))) end

-- -- files ------------------------------------------------------------------------------------------------------------

--- Arguments of loaders of files.
M.spec = {
  path = util.required,  -- of a file, or a list of those of files
  split = util.any "rows", -- rows: a rank reads its rows of each batch; files: rank r of w reads files r + 1, r + 1 +
                           -- w, ... for itself; { rank, ranks }, of workers: these are the files of that rank
}

--- Check a path or a list of paths; returns the list.
function M.paths(func, path)
  local list = type(path) == "string" and { path } or path
  if type(list) ~= "table" or #list == 0 then
    P.fail(("%s: path is %s, wanted the path of a file, or a list of paths"):format(func, errors.kind(path)))
  end
  for i, p in ipairs(util.whole_list(func, "path", list, "paths")) do
    if type(p) ~= "string" then
      P.fail(("%s: path[%d] is %s, wanted the path of a file"):format(func, i, errors.kind(p)))
    end
  end
  return list
end

--- Arguments as one rank's loader takes them. Where files are split, that is a loader of this rank's files, which is
--- alone in its world; its share of batch_size rows is rounded up.
function M.of_rank(func, a)
  local paths, rank, size = M.paths(func, a.path), Loader._place(func, a)
  local own = util.copy(a)
  own.path = paths
  if type(a.split) == "table" then return own end
  own.split = nil -- where lines come from does not depend on it
  if util.one_of(func, "split", a.split, { "rows", "files" }) == "rows" then return own end
  if size > #paths then
    P.fail(("%s: %s for %d ranks, allowed: as many files as ranks, or more, or split = \"rows\""):format(func,
      util.number_of(#paths, "file"), size))
  end
  own.path, own.rank, own.world_size = {}, 0, 1
  own.split = { rank, size } -- a position in these files is none in those of another rank
  own.batch_size = math.ceil(a.batch_size / size)
  for i = rank + 1, #paths, size do own.path[#own.path + 1] = paths[i] end
  return own
end

--- C's list of paths.
function M.strings(paths)
  local list = ffi.new("const char *[?]", #paths)
  for i, p in ipairs(paths) do list[i - 1] = p end
  return list
end

--- The loader of arguments that of_rank returned. fields: as a source has them; open(out): opens the reader; module:
--- the loader's, which workers call; shared: in one of them, what they share.
function M.loader(func, a, fields, module, shared, open)
  local source = Source(fields, open)
  if shared then source:share(shared) end
  local worker = { module = module, arguments = a }
  if a.num_workers ~= 1 then worker.shared = function() return source:shared() end end
  return Loader(func, source, a, worker)
end

return M
