-- plan/statistics.lua: what training data say about features: ids of a sample, distinct ids, how much the most frequent
-- rows serve; and constraints with these numbers in the place of guesses.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local kinds = require "perilune.plan.kinds"
local data = require "perilune.data"
local constraints_of = require "perilune.plan.constraints"
local offload = require "perilune.plan.offload"

local M = {}

local COUNTERS = 2 ^ 22 -- of a feature: rows beyond share them, and distinct ones are estimated
local BINS = 100        -- of a curve of cache sizes

--- What is known of a feature: name, table, rows (of the table), samples, ids, mean_length, longest (bag), distinct
--- (rows that came), batch_distinct (mean of the batches of the size of the largest: the last one may be a part), curve
--- = list of { rows =, lookups = }: the so many most frequent rows served so many lookups, by frequency; exact =
--- whether each row has a counter of its own.
local Feature = util.class "FeatureStatistics"
M.FeatureStatistics = Feature

function Feature:init(name, table_name, rows)
  self.name, self.table, self.rows = name, table_name, rows
  self.samples, self.ids, self.longest, self.distinct, self.batches = 0, 0, 0, 0, 0
  -- samples of the largest batch, how many were so large, their distinct ids
  self.whole, self.whole_batches, self.batch_sum = 0, 0, 0
  self.buckets = math.min(rows, COUNTERS)
  self.exact = self.buckets == rows
  self.count, self.seen = ffi.new("int32_t[?]", self.buckets), ffi.new("int32_t[?]", self.buckets)
end

--- Add a batch: n bags of `lengths`, whose ids begin at values[at]. Returns the place behind them.
function Feature:_add(lengths, n, values, at)
  local count, seen, buckets, batch, fresh, from = self.count, self.seen, self.buckets, self.batches + 1, 0, at
  for i = 0, n - 1 do
    local length = lengths[i]
    if length > self.longest then self.longest = length end
    for _ = 1, length do
      local bucket = tonumber(values[at]) % buckets
      count[bucket] = count[bucket] + 1
      if seen[bucket] ~= batch then
        seen[bucket] = batch
        fresh = fresh + 1
      end
      at = at + 1
    end
  end
  self.batches = batch
  if n > self.whole then self.whole, self.whole_batches, self.batch_sum = n, 0, 0 end
  if n == self.whole then self.whole_batches, self.batch_sum = self.whole_batches + 1, self.batch_sum + fresh end
  self.samples, self.ids = self.samples + n, self.ids + at - from
  return at
end

--- Distinct ids of which `used` of n shared counters were hit.
local function estimated(used, n) return used < n and -n * math.log(1 - used / n) or n * math.log(n) end

function Feature:_finish()
  local of_count, used = {}, 0
  for b = 0, self.buckets - 1 do
    local c = self.count[b]
    if c > 0 then used, of_count[c] = used + 1, (of_count[c] or 0) + 1 end
  end
  self.curve = {}
  local counts, rows, lookups = util.keys(of_count), 0, 0
  for i = #counts, 1, -1 do
    rows, lookups = rows + of_count[counts[i]], lookups + of_count[counts[i]] * counts[i]
    table.insert(self.curve, { rows = rows, lookups = lookups })
  end
  self.distinct = self.exact and used or math.min(self.rows, math.floor(estimated(used, self.buckets)))
  self.mean_length = self.ids / math.max(self.samples, 1)
  self.batch_distinct = self.batch_sum / math.max(self.whole_batches, 1)
  self.count, self.seen = nil, nil
end

--- The share of lookups that the `rows` most frequent rows served.
function Feature:share(rows)
  local before = { rows = 0, lookups = 0 }
  for _, point in ipairs(self.curve) do
    if point.rows >= rows then
      local part = (rows - before.rows) / (point.rows - before.rows)
      return (before.lookups + part * (point.lookups - before.lookups)) / self.ids
    end
    before = point
  end
  return self.ids > 0 and 1 or 0
end

--- The fewest rows that served a share of the lookups.
function Feature:hot(share)
  if not (share >= 0 and share <= 1) then
    P.fail(("FeatureStatistics:hot: share is %s, allowed: 0..1"):format(tostring(share)))
  end
  local before = { rows = 0, lookups = 0 }
  for _, point in ipairs(self.curve) do
    if point.lookups >= share * self.ids then
      local part = (share * self.ids - before.lookups) / (point.lookups - before.lookups)
      return math.ceil(before.rows + part * (point.rows - before.rows))
    end
    before = point
  end
  return before.rows
end

--- What caches of the table's rows would serve, for planners: lookups of all ranks' batches.
function Feature:cache_statistics(world_size)
  local counts, area, before = {}, 0, 0
  for bin = 1, BINS do
    local share = self:share(bin / BINS * self.rows)
    counts[bin] = (share - before) * self.ids
    area, before = area + (1 - share) / BINS, share
  end
  return offload.EmbeddingOffloadStats { cacheability = area,
    expected_lookups = math.min(self.batch_distinct * world_size, self.distinct), mrc_hist_counts = counts,
    height = self.rows }
end

-- -- reading ----------------------------------------------------------------------------------------------------------

local arguments = { path = util.required.string, tables = util.required.list, batch_size = 512,
  samples = util.optional.number, progress = util.optional, sparse_features = 26, dense_features = 13 }

--- The feature and rows of each category of the data; tables: list of { name =, rows =, features = { "c3", ... } }.
local function categories(a)
  local rows, features = {}, {}
  for i = 1, a.sparse_features do rows[i] = 1 end
  for k, given in ipairs(a.tables) do
    local where = ("plan.statistics.count: tables[%d]"):format(k)
    local t = util.named(where, given, { name = util.required.string, rows = util.whole(util.required, 1),
      features = util.required.list })
    signature.value(where, "features", t.features, "strings")
    for _, name in ipairs(t.features) do
      local i = tonumber(name:match "^c(%d+)$")
      if not i or i < 1 or i > a.sparse_features then
        P.fail(("'%s' has no feature '%s' of table '%s', but c1 to c%d"):format(a.path, name, t.name,
          a.sparse_features))
      end
      rows[i], features[i] = t.rows, Feature(name, t.name, t.rows)
    end
  end
  return rows, features
end

--- statistics.count { path =, tables =, batch_size = 512, samples = nil or how many are read, progress = nil or
--- function(samples, all), dense_features = 13, sparse_features = 26 }: read a file in the Criteo layout, once. tables:
--- list of { name =, rows =, features = names of categories, c1 ... }. Returns a list of FeatureStatistics, in the
--- order of the file's columns. Errors name file, line and column.
function M.count(args)
  local a = util.named("plan.statistics.count", args, arguments)
  if #a.tables == 0 then P.fail "plan.statistics.count: tables is empty, wanted tables whose features are counted" end
  local file, why = io.open(a.path)
  if not file then P.fail("plan.statistics.count: " .. why) end
  file:close()
  local rows, features = categories(a)
  local loader = data.criteo { path = a.path, batch_size = util.integer("plan.statistics.count", "batch_size",
    a.batch_size, 1, 2 ^ 24), rows = rows, rank = 0, world_size = 1, dense_features = a.dense_features,
      sparse_features = a.sparse_features, limit = a.samples }
  local all, done = a.progress and loader:count() or 0, 0
  local host = loader:next_host()
  while host do
    local b, at = host.ptr, 0
    local n = tonumber(b.rows)
    for i = 1, a.sparse_features do
      if features[i] then at = features[i]:_add(b.lengths + (i - 1) * n, n, b.values, at)
      else
        for k = (i - 1) * n, i * n - 1 do at = at + b.lengths[k] end
      end
    end
    done = done + n
    if a.progress then a.progress(done, all) end
    host = loader:next_host()
  end
  if done == 0 then P.fail(("'%s' has no samples"):format(a.path)) end
  local list = {}
  for i = 1, a.sparse_features do
    if features[i] then
      features[i]:_finish()
      list[#list + 1] = features[i]
    end
  end
  return list
end

-- -- for planners -----------------------------------------------------------------------------------------------------

local by_name_of = function(statistics)
  local by_name = {}
  for _, f in ipairs(statistics) do by_name[f.name] = f end
  return by_name
end

--- Constraints with numbers of data for the tables of a model (enumerators.lua): pooling_factors where the user says
--- none, and for tables of one feature what caches would serve; the rest is the user's. world_size: ranks of the plan.
function M.constrain(statistics, model, given, world_size)
  util.integer("plan.statistics.constrain", "world_size", world_size, 1)
  local by_name, out = by_name_of(statistics), util.copy(given or {})
  for _, collection in ipairs(model) do
    for _, config in ipairs(collection.tables) do
      local key = constraints_of.fqn(collection.path, config.name)
      local user = constraints_of.for_table(given, collection.path, config.name)
      local fields, lengths = util.copy(user), {}
      for i, name in ipairs(config.feature_names) do lengths[i] = by_name[name] and by_name[name].mean_length or 1 end
      fields.pooling_factors = fields.pooling_factors or lengths
      local f = #config.feature_names == 1 and by_name[config.feature_names[1]]
      if f and not (user.cache_params and user.cache_params.stats) then
        local cache = user.cache_params or {}
        fields.cache_params = { stats = f:cache_statistics(world_size) }
        for name, value in util.ordered(cache) do
          if value then fields.cache_params[name] = value end
        end
      end
      out[key] = constraints_of.ParameterConstraints(fields)
    end
  end
  return out
end

--- Tables of a model as `count` takes them.
function M.tables_of(model)
  local list = {}
  for _, collection in ipairs(model) do
    for _, config in ipairs(collection.tables) do
      list[#list + 1] = { name = config.name, rows = config.num_embeddings, features = config.feature_names }
    end
  end
  return list
end

--- Rows of text about features, heads first.
function M._cells(statistics)
  local rows = { { "feature", "table", "ids a sample", "longest bag", "distinct", "of rows", "in a batch",
    "top 1 % serve" } }
  for i, f in ipairs(statistics) do
    rows[i + 1] = { f.name, f.table, ("%.3f"):format(f.mean_length), tostring(f.longest),
      (f.exact and "%d" or "~%d"):format(f.distinct), tostring(f.rows), ("%.1f"):format(f.batch_distinct),
      ("%.1f %%"):format(100 * f:share(f.rows / 100)) }
  end
  return rows
end

kinds.methods(Feature, { share = "rows: number", hot = "share: number", cache_statistics = "world_size: count" })
signature.list_of("statistics", "a list of FeatureStatistics", "FeatureStatistics")
signature.check("FeatureStatistics:", Feature, { init = "self: table, name: string, table_name: string, rows: count" })
signature.check("plan.statistics.", M,
  { constrain = "statistics: statistics, model: model, given: constraints?, world_size: count",
    tables_of = "model: model", _cells = "statistics: statistics" })

return M
