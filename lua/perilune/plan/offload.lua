-- plan/offload.lua: caches of tables in slower memory, made larger as long as memory is left (TorchRec's
-- EmbeddingOffloadScaleupProposer).
local P = require "perilune.ffi"
local util = require "perilune.util"
local kinds = require "perilune.plan.kinds"
local signature = require "perilune.signature"

local M = {}

-- -- statistics
-- ---------------------------------------------------------------------------------------------------------------------

--- What is known of a table's ids (TorchRec's CacheStatistics): CacheParams.stats.
local EmbeddingOffloadStats = util.seal(util.class "EmbeddingOffloadStats")
M.EmbeddingOffloadStats = EmbeddingOffloadStats

--- EmbeddingOffloadStats { cacheability =, expected_lookups =, mrc_hist_counts =, height = }: the area under the curve
--- of miss ratios (the less, the easier to cache), distinct ids of a batch of all ranks, how many lookups a cache of
--- 1/n, 2/n, ... of the rows serves beyond the one before it, rows of the table.
function EmbeddingOffloadStats:init(args)
  local f = "EmbeddingOffloadStats"
  local a = util.named(f, args, { cacheability = util.required.number, expected_lookups = util.required.number,
    mrc_hist_counts = util.required.list, height = util.required.number })
  if #a.mrc_hist_counts == 0 then P.fail(f .. ": mrc_hist_counts is empty, wanted at least 1 number") end
  signature.value(f, "mrc_hist_counts", a.mrc_hist_counts, "numbers")
  for name, value in util.ordered(a) do self[name] = value end
end

--- The share of lookups that a cache of load_factor * height rows misses.
function EmbeddingOffloadStats:expected_miss_rate(load_factor)
  local hist, all = self.mrc_hist_counts, 0
  for _, n in ipairs(hist) do all = all + n end
  if all == 0 then return 0 end
  local last = load_factor * self.height - 1
  if last < 0 then return 1 end
  local bin = math.floor(last / self.height * #hist) + 1
  if bin > #hist then return 0 end
  local hits = 0
  for i = 1, bin do hits = hits + hist[i] end
  return 1 - hits / all
end

-- -- a search on an interval
-- ---------------------------------------------------------------------------------------------------------------------

--- Luus and Jaakola's random search for the least of a function in [left, right]; its numbers are the same in every
--- run.
local Search = util.class "LuusJaakolaSearch"
M.LuusJaakolaSearch = Search

local TRIES = 1000 -- draws that may fall on an end whose value is known

function Search:init(left, right, iterations, left_cost)
  for name, x in util.ordered { left = left or false, right = right or false, iterations = iterations or false } do
    util.number("LuusJaakolaSearch", name, x)
  end
  self.left, self.right, self.iterations, self.state = left, right, iterations, 42
  self.left_known, self.right_known, self.step, self.width = left_cost ~= nil, false, -1, right - left
  self.x = self:uniform(left, right)
end

function Search:uniform(a, b)
  self.state = 16807 * self.state % 2147483647
  return a + (b - a) * (self.state / 2147483647)
end

function Search:clamp(x) return math.max(self.left, math.min(self.right, x)) end

--- No point above `right` is of use.
function Search:shrink_right(right)
  self.right, self.right_known = math.max(right, self.left), true
  self.width, self.x = self.right - self.left, self:clamp(self.x)
end

--- cost: of the point given last. Returns the next one, or nil at the end.
function Search:next(cost)
  self.step = self.step + 1
  if self.step == 0 then return self.x end
  if self.step >= self.iterations or self.right <= self.left then return nil end
  if self.step == 1 then self.cost = cost
  elseif cost <= self.cost then self.x, self.cost, self.width = self.y, cost, 0.95 * self.width end
  self.left_known, self.right_known = self.left_known or self.y == self.left, self.right_known or self.y == self.right
  for _ = 1, TRIES do
    local y = self:clamp(self.x + self:uniform(-self.width, self.width))
    if not (y == self.left and self.left_known) and not (y == self.right and self.right_known) then
      self.y = y
      return y
    end
  end
end

-- -- options with other caches
-- ---------------------------------------------------------------------------------------------------------------------

--- A copy of a cached option with another load factor; nil: without a cache, in its own memory. Not estimated yet.
local function with_cache(option, load_factor)
  local copy = setmetatable(util.copy(option), getmetatable(option))
  copy.runs = util.map(option.runs, util.copy)
  if load_factor then
    copy.cache_params = setmetatable(util.copy(option.cache_params), getmetatable(option.cache_params))
    copy.cache_params.load_factor = load_factor
  else
    copy.cache_params, copy.compute_kernel = nil, "fused"
  end
  copy.key = ("%d@%s"):format(option.id, load_factor and ("%.17g"):format(load_factor) or "fused")
  return copy
end

local function bytes_of(list)
  local sum = 0
  for _, option in ipairs(list) do sum = sum + option.total_storage.hbm end
  return sum
end

--- How much a table gains from a larger cache; nil: nothing is known of it, or it has none.
local function priority(option)
  local stats = option.compute_kernel == "fused_uvm_caching" and option.cache_params and option.cache_params.stats
  local p = stats and stats.cacheability * stats.expected_lookups or 0
  return p > 0 and p or nil
end

local EmbeddingOffloadScaleupProposer = util.class "EmbeddingOffloadScaleupProposer"
M.EmbeddingOffloadScaleupProposer = EmbeddingOffloadScaleupProposer

--- EmbeddingOffloadScaleupProposer { use_depth = true }: one plan, a cached option for each table that has one, then
--- the same with larger caches, as the search on the memory that they may take goes. For tables whose cache_params have
--- stats; constraints should leave one option of the others.
function EmbeddingOffloadScaleupProposer:init(args)
  self.use_depth = util.named("EmbeddingOffloadScaleupProposer", args, { use_depth = true }).use_depth
  self.start = {}
end

--- The options of a list with others in the place of some, all estimated. change(option) returns the other one, or nil.
function EmbeddingOffloadScaleupProposer:_replaced(list, change)
  local out, changed = {}, {}
  for i, option in ipairs(list) do
    local other = change(option)
    out[i] = other or option
    changed[#changed + 1] = other
  end
  self.enumerator:populate_estimates(changed)
  return out
end

function EmbeddingOffloadScaleupProposer:load(space, enumerator)
  self.enumerator, self.search, self.proposal = enumerator, nil, nil
  local start, at = {}, {}
  local field = self.use_depth and "max_perf" or "total_perf"
  for _, option in ipairs(space) do
    local i = at[option.fqn] or #start + 1
    local now = start[i]
    at[option.fqn] = i
    local cached, has = option.compute_kernel == "fused_uvm_caching", now and now.compute_kernel == "fused_uvm_caching"
    if not now or cached and not has or cached == has and option[field] < now[field] then start[i] = option end
  end
  local plain = self:_replaced(start, function(o)
    return o.compute_kernel == "fused_uvm_caching" and with_cache(o) or nil
  end)
  self.start = {} -- a cache whose bookkeeping is larger than the table is none
  for i, option in ipairs(start) do
    self.start[i] = plain[i].total_storage.hbm < option.total_storage.hbm and plain[i] or option
  end
  if #self.start > 0 then self.proposal = self.start end
end

function EmbeddingOffloadScaleupProposer:propose() return self.proposal end

--- Bytes a cache takes as a * load_factor + b, and bytes without one, of each option of the list that can grow.
function EmbeddingOffloadScaleupProposer:_models(list)
  local low = self:_replaced(list, function(o) return with_cache(o, 0.1) end)
  local high = self:_replaced(list, function(o) return with_cache(o, 0.9) end)
  local plain = self:_replaced(list, function(o) return with_cache(o) end)
  return util.map(list, function(option, i)
    local a = (high[i].total_storage.hbm - low[i].total_storage.hbm) / 0.8
    local least = low[i].total_storage.hbm - a * 0.1
    return { least = least, most = least + a, span = a, plain = plain[i].total_storage.hbm,
      cache = a * option.cache_params.load_factor, priority = priority(option) }
  end)
end

--- Hand `budget` bytes out by priority; a table whose cache would take more than the table itself is promoted, and
--- gives the difference back.
local function allocate(models, budget)
  for _ = 1, 128 do
    local all = 0
    for _, m in ipairs(models) do
      m.open = m.cache < m.span
      if m.open then all = all + m.priority end
    end
    if budget <= 1 or all == 0 then break end
    local share = budget / all
    for _, m in ipairs(models) do
      if m.open then
        local larger = math.min(m.cache + share * m.priority, m.span)
        budget, m.cache = budget - (larger - m.cache), larger
        if m.least + m.cache > m.plain then budget, m.cache = budget + m.least + m.cache - m.plain, m.span end
      end
    end
  end
end

--- The starting proposal with `budget` bytes more of caches; nil: no table can grow.
function EmbeddingOffloadScaleupProposer:_scaled(budget)
  local growing = {}
  for _, option in ipairs(self.start) do
    if priority(option) then growing[#growing + 1] = option end
  end
  if #growing == 0 then return nil end
  local models, factor = self:_models(growing), {}
  allocate(models, budget)
  for i, option in ipairs(growing) do factor[option] = models[i].cache / models[i].span end
  return self:_replaced(self.start, function(option)
    local f = factor[option]
    return f and with_cache(option, f <= 0.9999 and f or nil) or nil
  end)
end

function EmbeddingOffloadScaleupProposer:feedback(partitionable, proposal, rating, topology)
  local used = bytes_of(proposal)
  if not self.search then
    if not partitionable then
      self.proposal = nil
      return
    end
    local room = -used
    for _, device in ipairs(topology.devices) do room = room + device.hbm end
    local ceiling = bytes_of(self:_replaced(proposal, function(o) return priority(o) and with_cache(o) or nil end))
      - used
    self.search = Search(0, math.max(0, math.min(room, ceiling)), 16, rating)
  end
  if not partitionable then self.search:shrink_right(used - bytes_of(self.start)) end
  local budget = self.search:next(rating or 1e99)
  self.proposal = budget and self:_scaled(math.floor(budget)) or nil
end

kinds.methods(EmbeddingOffloadStats, { expected_miss_rate = "load_factor: number" })
kinds.methods(EmbeddingOffloadScaleupProposer, { load = "space: proposal, enumerator: enumerator", propose = "" })

signature.kind("loaded_offload", "an EmbeddingOffloadScaleupProposer that options were loaded into", function(x)
  return EmbeddingOffloadScaleupProposer.is(x) and x.enumerator ~= nil
end)
signature.check("EmbeddingOffloadScaleupProposer:", EmbeddingOffloadScaleupProposer, {
  feedback = "self: loaded_offload, partitionable: any, proposal: proposal, rating: number?, topology: Topology",
  _replaced = "self: loaded_offload, list: options, change: function", _models = "self: loaded_offload, list: proposal",
  _scaled = "self: loaded_offload, budget: number" })
kinds.methods(Search, { uniform = "a: number, b: number", clamp = "x: number", shrink_right = "right: number",
  next = "cost: number?" })

return M
