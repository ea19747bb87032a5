-- debian.lua: does this package depend on (or recommend) that one? Samples from the package lists that every Debian
-- machine has.
--
-- A sample is (package s, candidate c, target p). p is a dependency of s that is hidden: s is shown with its *other*
-- dependencies. The positive sample has c = p; for each, `negatives` samples have a c that s does not need, drawn from
-- the targets of the same part's dependencies, that is by popularity. So neither s nor c alone tells the label, and the
-- features of s are the same in both. The parts are split by package: no package of the test part is ever seen as s in
-- training.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Loader = require "perilune.data.loader"
local batch = require "perilune.data.batch"
local packages = require "perilune.data.packages"
local signature = require "perilune.signature"
local C = P.C
local floor, log = math.floor, math.log

-- Streams of the counter-based generator.
local SPLIT, ORDER, NEGATIVE = 1, 2, 1000

-- -- features of pairs ------------------------------------------------------------------------------------------------

local Features = util.seal(util.class "DebianFeatures")

Features.dense = { "name_name", "name_description", "description_name", "description_description", "tags",
  "same_section", "same_maintainer", "same_source", "common_dependencies", "dependencies", "candidate_dependencies",
  "popularity" }

--- Of parsed lists; `popularity` counts the training part's dependencies on each package; at most `most` dependencies
--- go into a bag.
function Features:init(lists, popularity, most)
  local l = lists
  self.lists, self.popularity, self.most = l, popularity, most
  -- key, table, rows, kind, list: which package's (s or c), whole list or one number per package
  self.sparse = {
    { "name", "words", l.words, "s_list", l.name_words },
    { "description", "words", l.words, "s_list", l.description_words },
    { "tags", "tags", l.tag_count, "s_list", l.tags },
    { "section", "sections", l.section_count, "s_one", l.section },
    { "maintainer", "maintainers", l.maintainer_count, "s_one", l.maintainer },
    { "dependencies", "packages", l.n, "others" },
    { "candidate", "candidates", l.n, "itself" },
    { "candidate_name", "candidate_words", l.words, "c_list", l.name_words },
    { "candidate_description", "candidate_words", l.words, "c_list", l.description_words },
    { "candidate_tags", "candidate_tags", l.tag_count, "c_list", l.tags },
    { "candidate_section", "candidate_sections", l.section_count, "c_one", l.section },
    { "candidate_maintainer", "candidate_maintainers", l.maintainer_count, "c_one", l.maintainer },
    { "candidate_dependencies", "packages", l.n, "c_list", l.dependencies, most },
  }
  self.keys = util.map(self.sparse, function(f) return f[1] end)
  self.tables = util.map(self.sparse, function(f) return f[2] end)
  self.rows = util.map(self.sparse, function(f) return math.max(f[3], 1) end)
  self.longest = 5 + 2 * most + 2 * (self.widest(l.name_words, l.n) + self.widest(l.description_words, l.n)
    + self.widest(l.tags, l.n))
  self.mark, self.stamp = ffi.new("int32_t[?]", math.max(l.n, 1)), 0
end

--- Length of the longest of n lists.
function Features.widest(list, n)
  local most = 0
  for i = 0, n - 1 do most = math.max(most, list.offsets[i + 1] - list.offsets[i]) end
  return most
end

-- The bags of one feature for all rows; each returns the place behind the last id. Bags are copied whole: loops over
-- two or three ids, inside a loop, are what the compiler is worst at.
local function put_list(list, who, rows, values, lengths, at, most)
  local offsets, ids = list.offsets, list.wide
  for i = 0, rows - 1 do
    local first = offsets[who[i]]
    local n = math.min(offsets[who[i] + 1] - first, most)
    ffi.copy(values + at, ids + first, n * 8)
    lengths[i] = n
    at = at + n
  end
  return at
end

local function write_bags_of_one(of, who, rows, values, lengths, at)
  for i = 0, rows - 1 do
    values[at + i] = of[who[i]]
    lengths[i] = 1
  end
  return at + rows
end

local function put_itself(who, rows, values, lengths, at)
  for i = 0, rows - 1 do
    values[at + i] = who[i]
    lengths[i] = 1
  end
  return at + rows
end

-- Dependencies of s without p: at most `most`, those that follow p in the list (as a circle), so that long lists show
-- varying parts.
local function put_others(list, s, p, rows, values, lengths, at, most)
  local offsets, ids, wide = list.offsets, list.values, list.wide
  for i = 0, rows - 1 do
    local first, last, hidden = offsets[s[i]], offsets[s[i] + 1], p[i]
    local place = first - 1 -- of p
    for j = first, last - 1 do
      if ids[j] == hidden then place = j end
    end
    local after = math.min(last - place - 1, most)
    local before = math.min(math.max(place - first, 0), most - after)
    ffi.copy(values + at, wide + place + 1, after * 8)
    ffi.copy(values + at + after, wide + first, before * 8)
    lengths[i] = after + before
    at = at + after + before
  end
  return at
end

-- The dense features, one column after the other: `column` is the first row's number, rows are WIDE apart. Small loops,
-- each with few values alive, are what the compiler keeps in registers.
local WIDE = #Features.dense

-- ln(1 + how many ids of list a of package s are in list b of package c).
local function put_overlap(column, a, s, b, c, rows)
  local a_offsets, a_values, b_offsets, b_values = a.offsets, a.values, b.offsets, b.values
  for row = 0, rows - 1 do
    local n, first, last = 0, b_offsets[c[row]], b_offsets[c[row] + 1] - 1
    for i = a_offsets[s[row]], a_offsets[s[row] + 1] - 1 do
      local id = a_values[i]
      for j = first, last do
        if b_values[j] == id then n = n + 1 end
      end
    end
    column[row * WIDE] = log(1 + n)
  end
end

-- 1 where both packages have the same section (maintainer, source).
local function put_same(column, of, s, c, rows)
  for row = 0, rows - 1 do column[row * WIDE] = of[s[row]] == of[c[row]] and 1 or 0 end
end

-- ln(1 + how many dependencies of s without p are dependencies of c).
local function put_common(self, column, s, c, p, rows)
  local offsets, values = self.lists.dependencies.offsets, self.lists.dependencies.values
  local mark, stamp = self.mark, self.stamp
  for row = 0, rows - 1 do
    stamp = stamp + 1
    for i = offsets[s[row]], offsets[s[row] + 1] - 1 do mark[values[i]] = stamp end
    if p[row] >= 0 then mark[p[row]] = 0 end
    local n = 0
    for i = offsets[c[row]], offsets[c[row] + 1] - 1 do
      if mark[values[i]] == stamp then n = n + 1 end
    end
    column[row * WIDE] = log(1 + n)
  end
  self.stamp = stamp
end

-- ln of the number of dependencies + plus (at least 1) of each package in `who`.
local function put_length(column, list, who, plus, rows)
  local offsets = list.offsets
  for row = 0, rows - 1 do column[row * WIDE] = log(math.max(offsets[who[row] + 1] - offsets[who[row]] + plus, 1)) end
end

local function put_popularity(column, popularity, c, rows)
  for row = 0, rows - 1 do column[row * WIDE] = log(1 + popularity[c[row]]) / 4 end
end

local function put_dense(self, x, s, c, p, rows)
  local l = self.lists
  put_overlap(x, l.name_words, s, l.name_words, c, rows)
  put_overlap(x + 1, l.name_words, s, l.description_words, c, rows)
  put_overlap(x + 2, l.description_words, s, l.name_words, c, rows)
  put_overlap(x + 3, l.description_words, s, l.description_words, c, rows)
  put_overlap(x + 4, l.tags, s, l.tags, c, rows)
  put_same(x + 5, l.section, s, c, rows)
  put_same(x + 6, l.maintainer, s, c, rows)
  put_same(x + 7, l.source, s, c, rows)
  put_common(self, x + 8, s, c, p, rows)
  put_length(x + 9, l.dependencies, s, 0, rows)
  put_length(x + 10, l.dependencies, c, 1, rows)
  put_popularity(x + 11, self.popularity, c, rows)
end

--- Fill a host batch with the features of `rows` samples: arrays of packages s, candidates c and hidden dependencies p
--- (-1: none). Labels are 1 where c is p.
function Features:assemble(host, rows, s, c, p)
  host:reserve(rows * self.longest)
  local b = host.ptr
  for i = 0, rows - 1 do b.labels[i] = c[i] == p[i] and 1 or 0 end
  put_dense(self, b.dense, s, c, p, rows)
  local at, values = 0, b.values
  for f = 1, #self.sparse do
    local feature = self.sparse[f]
    local kind, list, lengths = feature[4], feature[5], b.lengths + (f - 1) * rows
    if kind == "s_list" then at = put_list(list, s, rows, values, lengths, at, feature[6] or 2 ^ 30)
    elseif kind == "c_list" then at = put_list(list, c, rows, values, lengths, at, feature[6] or 2 ^ 30)
    elseif kind == "s_one" then at = write_bags_of_one(list, s, rows, values, lengths, at)
    elseif kind == "c_one" then at = write_bags_of_one(list, c, rows, values, lengths, at)
    elseif kind == "itself" then at = put_itself(c, rows, values, lengths, at)
    else at = put_others(self.lists.dependencies, s, p, rows, values, lengths, at, self.most) end
  end
  b.rows, b.ids = rows, at
end

-- -- samples ----------------------------------------------------------------------------------------------------------

local Source = util.seal(util.class "DebianSource")

-- The dependencies (s, c) of a part's packages: each package has a number in [0, 1) by the seed.
local function edges_of(lists, part, a)
  local from, to = Loader.bounds("data.debian", part, a.holdout, a.validation)
  local d = lists.dependencies
  local s, c, n = ffi.new("int32_t[?]", math.max(d.n, 1)), ffi.new("int32_t[?]", math.max(d.n, 1)), 0
  for i = 0, lists.n - 1 do
    local u = C.peri_random_uniform(a.seed, SPLIT, i)
    if u >= from and u < to then
      for j = d.offsets[i], d.offsets[i + 1] - 1 do
        s[n], c[n] = i, d.values[j]
        n = n + 1
      end
    end
  end
  return s, c, n
end

function Source:init(lists, a)
  self.lists, self.seed, self.negatives = lists, a.seed, a.negatives
  self._s, self._c, self._n = edges_of(lists, a.part, a)
  if self._n == 0 then
    P.fail(("data.debian: the part '%s' has no dependencies (%d packages in all)"):format(a.part, lists.n))
  end
  local popularity = ffi.new("int32_t[?]", math.max(lists.n, 1))
  local _, targets, n = edges_of(lists, "train", a)
  for i = 0, n - 1 do popularity[targets[i]] = popularity[targets[i]] + 1 end
  self.features = Features(lists, popularity, a.max_dependencies)
  self.keys, self.tables, self.rows, self.dense = self.features.keys, self.features.tables, self.features.rows,
    Features.dense
  self._last = self._n * (1 + a.negatives)
  self._order = ffi.new("int32_t[?]", self._last)
  self._room = 0
end

--- Samples in one pass.
function Source:count() return self._last end

--- Another order and other negatives in every epoch.
function Source:rewind(epoch)
  local order, n, seed, stream = self._order, self._last, self.seed, ORDER + epoch
  for i = 0, n - 1 do order[i] = i end
  for i = n - 1, 1, -1 do
    local j = floor(C.peri_random_uniform(seed, stream, i) * (i + 1))
    order[i], order[j] = order[j], order[i]
  end
  self._epoch, self._at = epoch, 0
end

local function package_depends_on(list, s, c)
  for i = list.offsets[s], list.offsets[s + 1] - 1 do
    if list.values[i] == c then return true end
  end
  return false
end

local TRIES = 64
-- A package that s does not need, by the popularity of targets in this part; `x` numbers the sample.
local function negative(self, s, x)
  local list, seed, stream, n = self.lists.dependencies, self.seed, NEGATIVE + self._epoch, self._n
  for try = 0, TRIES - 1 do
    local c = self._c[floor(C.peri_random_uniform(seed, stream, x * TRIES + try) * n)]
    if c ~= s and not package_depends_on(list, s, c) then return c end
  end
  for c = 0, self.lists.n - 1 do -- s needs nearly everything that is needed at all
    if c ~= s and not package_depends_on(list, s, c) then return c end
  end
  local names = self.lists.names -- workers have none
  P.fail(("data.debian: package %s depends on all others"):format(names and names[s + 1] or "number " .. s))
end

local function make_room(self, rows)
  if rows > self._room then
    self._pair_s, self._pair_c, self._pair_p = ffi.new("int32_t[?]", rows), ffi.new("int32_t[?]", rows),
      ffi.new("int32_t[?]", rows)
    self._room = rows
  end
  return self._pair_s, self._pair_c, self._pair_p
end

function Source:fill(host, batch_size, rank, world)
  local rows = math.min(batch_size, self._last - self._at)
  local first, last = batch.share(rows, rank, world)
  local s, c, p = make_room(self, last - first)
  local slots = 1 + self.negatives
  for i = 0, last - first - 1 do
    local x = self._order[self._at + first + i]
    local edge = floor(x / slots)
    s[i], p[i] = self._s[edge], self._c[edge]
    if x == edge * slots then c[i] = p[i] else c[i] = negative(self, s[i], x) end
  end
  self.features:assemble(host, last - first, s, c, p)
  host.ptr.global_row, host.ptr.global_rows = self._at + first, rows
  self._at = self._at + rows
end

--- Leave a batch out.
function Source:skip(batch_size)
  local rows = math.min(batch_size, self._last - self._at)
  self._at = self._at + rows
  return rows
end

-- -- the loader -------------------------------------------------------------------------------------------------------

local M = {}

local spec = {
  packages = util.optional,    -- what `read` returned; nil: read the machine's own lists
  path = util.optional.string, -- a file in the format of `apt-cache dumpavail` instead of the machine's own lists
  part = "all",                -- all, train, test; fit and validation are the two parts of train
  holdout = 0.1,               -- share of the packages that is the test part
  validation = 0.05,           -- share of the train part's packages that is the validation part
  negatives = util.whole(4, 1, 1000), -- per positive sample
  max_dependencies = util.whole(32, 1, 2 ^ 20), -- per bag
  seed = util.seed(1),
}
for name, default in util.ordered(Loader.common) do spec[name] = default end

--- Parse the machine's package lists, or those in the file `path`, for several loaders.
function M.read(path) return packages.parse(packages.text(path)) end

signature.kind("packages", "what data.debian.read returned", function(x)
  return type(x) == "table" and type(x.dependencies) == "table"
end)

signature.check("data.debian.", M, { read = "path: string?" })

--- A loader; see `spec` for the arguments. shared: in a worker, the arrays of the packages, of which `packages` are
--- then the counts only.
function M.loader(args, shared)
  local func = "data.debian"
  local a = util.named(func, args, spec)
  util.integer(func, "seed", a.seed, 0)
  if a.packages and not shared then signature.value(func, "packages", a.packages, "packages") end
  local lists = shared and packages.received(a.packages, shared) or a.packages or M.read(a.path)
  local arguments = util.copy(a)
  arguments.packages = packages.counts(lists)
  return Loader(func, Source(lists, a), a, { module = "perilune.data.debian", arguments = arguments,
    shared = function() return packages.shared(lists) end })
end

return setmetatable(M, { __call = function(_, args, shared) return M.loader(args, shared) end })
