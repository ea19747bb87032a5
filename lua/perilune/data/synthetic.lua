-- synthetic.lua: Criteo-shaped samples of any number, with power-law ids and a planted signal (perilune/io.h).
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Loader = require "perilune.data.loader"
local batch = require "perilune.data.batch"
local C, check = P.C, P.check

local Source = util.seal(util.class "SyntheticSource")

function Source:init(dense_features, sparse_features, rows)
  self.dense, self.keys = Loader.numbered("i", dense_features), Loader.numbered("c", sparse_features)
  self.tables, self.rows = Loader.numbered("t_c", sparse_features), rows
end

function Source:fill(host, batch_size, rank, world)
  local rows = math.min(batch_size, self._last - self._at)
  local first, last = batch.share(rows, rank, world)
  check(C.peri_synthetic_fill(self._options, self._at + first, last - first, batch.host_ptr(host)))
  host.ptr.global_row, host.ptr.global_rows = self._at - self._first + first, rows
  self._at = self._at + rows
end
function Source:skip(batch_size)
  local rows = math.min(batch_size, self._last - self._at)
  self._at = self._at + rows
  return rows
end
function Source:rewind() self._at = self._first end
function Source:count() return self._last - self._first end

local M = {}

local shape = {
  dense_features = 13, sparse_features = 26,
  rows = util.any(100000),   -- rows of every feature's table, or a list
  ids_per_bag = util.any(1), -- a number, { least, most }, or a list of those by feature
  seed = util.seed(1),
  alpha = 1.05,      -- of the power law of ids; 0: uniform
  signal = 1,        -- of the first-order part of the hidden model, in units of the logit
  interaction = 1.5, -- of its second-order part
  bias = -1,         -- its constant
}
local spec = { first_row = util.whole(0, 0), num_rows = util.whole(util.required, 0) }
for name, default in util.ordered(shape) do spec[name] = default end
for name, default in util.ordered(Loader.common) do spec[name] = default end

local function per_feature(func, what, value, i, n)
  if type(value) ~= "table" then return value end
  if #value ~= n then P.fail(("%s: %s has %d entries for %d features"):format(func, what, #value, n)) end
  return value[i]
end

--- peri_synthetic_args of checked arguments; the second value keeps their arrays alive.
local function options_of(func, a)
  local n = util.integer(func, "sparse_features", a.sparse_features, 0, 4096)
  local o = P.struct "peri_synthetic_args"
  local keep = { rows = ffi.new("int64_t[?]", math.max(n, 1)), least = ffi.new("int32_t[?]", math.max(n, 1)),
    most = ffi.new("int32_t[?]", math.max(n, 1)), list = {} }
  -- { least, most } for all features is a pair of numbers; a list by feature holds numbers or pairs.
  local bags = a.ids_per_bag
  local pair = type(bags) == "table" and #bags == 2 and type(bags[1]) == "number" and n ~= 2 and bags
  for i = 1, n do
    local bag = pair or per_feature(func, "ids_per_bag", bags, i, n)
    local least, most = bag, bag
    if type(bag) == "table" then least, most = bag[1], bag[2] end
    keep.list[i] = util.integer(func, "rows", per_feature(func, "rows", a.rows, i, n), 1, 2 ^ 31)
    keep.rows[i - 1] = keep.list[i]
    keep.least[i - 1] = util.integer(func, "ids_per_bag", least, 0, 2 ^ 20)
    keep.most[i - 1] = util.integer(func, "ids_per_bag", most, least, 2 ^ 20)
  end
  o.table_rows, o.bag_min, o.bag_max = keep.rows, keep.least, keep.most
  o.dense_features = util.integer(func, "dense_features", a.dense_features, 0, 4096)
  o.sparse_features, o.seed = n, a.seed
  o.alpha, o.signal, o.interaction, o.bias = a.alpha, a.signal, a.interaction, a.bias
  return o, keep
end


--- A loader of rows [first_row, first_row + num_rows): row i is the same in every loader with the same shape and seed.
function M.loader(args)
  local func = "data.synthetic"
  local a = util.named(func, args, spec)
  local options, keep = options_of(func, a)
  local none = batch.host_batch(a.dense_features, a.sparse_features, 1, 0) -- what is wrong is said now, not later
  check(C.peri_synthetic_fill(options, 0, 0, batch.host_ptr(none)))
  local source = Source(a.dense_features, a.sparse_features, keep.list)
  source._options, source._keep = options, keep
  source._first, source._last = a.first_row, a.first_row + a.num_rows
  return Loader(func, source, a, { module = "perilune.data.synthetic", arguments = a })
end

local file_spec = { path = util.required.string, first_row = util.whole(0, 0), num_rows = util.whole(util.required, 0) }
for name, default in util.ordered(shape) do file_spec[name] = default end

--- Write such rows (bags of 0 or 1 id) as a file in the Criteo layout. data.criteo with ids = "mod" reads the same
--- samples back.
function M.write(args)
  local func = "data.synthetic.write"
  local a = util.named(func, args, file_spec)
  local o, keep = options_of(func, a)
  check(C.peri_synthetic_write(o, a.first_row, a.num_rows, a.path))
  return keep and a.path
end

return setmetatable(M, { __call = function(_, args) return M.loader(args) end })
