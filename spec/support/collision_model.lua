-- collision_model.lua: managed collision in plain Lua, written from the definitions of the policies: what the C maps
-- are compared with. It knows nothing of them. Ids are numbers here: the places of raw ids in an ascending list of all
-- that a test uses, so that their order is that of the ids; which bucket an id belongs to, the test says.
--
--   local model = Model { rows = 5, policy = "LFU", interval = 1 }
--   model:remap({ { 3, 4, 5 }, { 5 } }, true)  -- rows of the ids of two features, as one training step
--   model:evicted()                            -- rows that got another id since the last call, or nil
--   -- { ids =, rows =, counts =, last = }, by bucket, ascending by id within
--   model:state()
local ffi = require "ffi"

local EMPTY = math.huge -- the id of a free entry: after all others

local single = ffi.new "float[1]"
--- Rounded to 32 bits, in which scores are computed.
local function f32(x)
  single[0] = x
  return single[0]
end

local Model = {}
Model.__index = Model

--- An order of 1..n by `better(a, b)`; equal ones keep their order.
local function stable_order(n, score)
  local order = {}
  for i = 1, n do order[i] = i end
  table.sort(order, function(a, b)
    local x, y = score[a], score[b]
    if x ~= y then return x > y end
    return a < b
  end)
  return order
end

local scores = {}
function scores.LFU(count) return count end
function scores.LRU(_, last, now, decay) return -f32((now - last + 1) ^ decay) end
function scores.DistanceLFU(count, last, now, decay) return f32(f32(count) / f32((now - last + 1) ^ decay)) end

local filters = {}
--- Keep what is seen more often than k times the average; k is rounded as a 32-bit number is.
function filters.dynamic(counts, k)
  local sum = 0
  for i = 1, #counts do sum = sum + counts[i] end
  local limit = f32(f32(k / #counts) * f32(sum))
  return function(count) return f32(count) > limit end
end
function filters.average(counts)
  local sum = 0
  for i = 1, #counts do sum = sum + counts[i] end
  local limit = f32(sum / #counts)
  return function(count) return f32(count) > limit end
end

--- rows; segments: rows where buckets begin, and the number of rows, default one bucket; bucket_of(id) -> 1, 2, ...;
--- policy: "LFU", "LRU", "DistanceLFU" or a function(count, last, now) -> score; decay; interval; filter: "dynamic",
--- "average" or nil; filter_arg; on_miss: "row" or "drop"; never(id): the id cannot be stored; capacity: how many ids
--- of a window count, the first ones.
function Model.new(a)
  local m = setmetatable({ interval = a.interval or 1, decay = a.decay or 1, on_miss = a.on_miss or "row", now = 0,
    since = 0, filter = a.filter, filter_arg = a.filter_arg, bucket_of = a.bucket_of or function() return 1 end,
    never = a.never or function() return false end, capacity = a.capacity or math.huge, seen = 0, buckets = {},
    pending = nil }, Model)
  m.own = type(a.policy) == "function" -- a policy of one's own is not asked about free rows, which go first
  m.score = m.own and a.policy or scores[a.policy]
  local segments = a.segments or { 0, a.rows }
  for b = 1, #segments - 1 do
    local first, n = segments[b], segments[b + 1] - segments[b]
    local bucket = { first = first, n = n, entries = {}, history = {}, at = {} }
    for i = 1, n do bucket.entries[i] = { id = EMPTY, row = first + i - 1, count = 0, last = 0 } end
    m.buckets[b] = bucket
  end
  return m
end

--- What happened to the ids of a window: a list of { id, count, last }, ascending by id, without those that the filter
--- leaves out.
local function gather(model, bucket)
  local by_id, list = {}, {}
  for _, h in ipairs(bucket.history) do
    local u = by_id[h.id]
    if not u then
      u = { id = h.id, count = 0, last = 0 }
      by_id[h.id], list[#list + 1] = u, u
    end
    u.count, u.last = u.count + 1, math.max(u.last, h.now)
  end
  table.sort(list, function(a, b) return a.id < b.id end)
  if not model.filter or #list == 0 then return list end
  local counts, kept = {}, {}
  for i, u in ipairs(list) do counts[i] = u.count end
  local keep = filters[model.filter](counts, model.filter_arg)
  for _, u in ipairs(list) do
    if keep(u.count) then kept[#kept + 1] = u end
  end
  return kept
end

--- The end of a window: known ids are counted, the best of the new ones take the places of the worst.
local function update(model, bucket)
  local seen, entries, n = gather(model, bucket), bucket.entries, bucket.n
  bucket.history = {}
  local by_count = {}
  for i, u in ipairs(seen) do by_count[i] = u.count end
  local fresh = {}
  for _, i in ipairs(stable_order(#seen, by_count)) do
    local u = seen[i]
    local entry = bucket.at[u.id]
    if entry then entry.count, entry.last = entry.count + u.count, u.last else fresh[#fresh + 1] = u end
  end
  entries[n].count, entries[n].last = 2 ^ 63, model.now
  local score = {}
  for i, e in ipairs(entries) do
    score[i] = e.id == EMPTY and model.own and -math.huge or model.score(e.count, e.last, model.now, model.decay)
  end
  score[n] = math.huge -- never leaves
  for i, u in ipairs(fresh) do score[n + i] = model.score(u.count, u.last, model.now, model.decay) end
  local order, chosen, losers = stable_order(n + #fresh, score), {}, {}
  for place, i in ipairs(order) do
    if place <= n and i > n then chosen[#chosen + 1] = fresh[i - n] end
    if place > n and i <= n then losers[#losers + 1] = entries[i] end
  end
  assert(#chosen == #losers)
  for k, entry in ipairs(losers) do
    local u = chosen[k]
    if entry.id ~= EMPTY then bucket.at[entry.id] = nil end
    entry.id, entry.count, entry.last = u.id, u.count, u.last
    bucket.at[u.id] = entry
    model.pending = model.pending or {}
    model.pending[entry.row] = true
  end
  local reserved = table.remove(entries)
  local place = {}
  for i, e in ipairs(entries) do place[e] = i end
  table.sort(entries, function(a, b)
    if a.id ~= b.id then return a.id < b.id end
    return place[a] < place[b]
  end)
  entries[n] = reserved
end

local function learn(model, features)
  model.now = model.now + 1
  for _, list in ipairs(features) do
    for _, id in ipairs(list) do
      local bucket = model.buckets[model.bucket_of(id)]
      if model.seen < model.capacity and not model.never(id) then
        bucket.history[#bucket.history + 1] = { id = id, now = model.now }
      end
      model.seen = model.seen + 1
    end
  end
  model.since = model.since + 1
  if model.since == model.interval then
    model.since, model.seen = 0, 0
    for _, bucket in ipairs(model.buckets) do update(model, bucket) end
  end
end

--- Rows of the ids of some features, a list of lists; -1: none.
function Model:remap(features, training)
  if training then learn(self, features) end
  local out = {}
  for f, list in ipairs(features) do
    local rows = {}
    for i, id in ipairs(list) do
      local bucket = self.buckets[self.bucket_of(id)]
      local entry = bucket.at[id]
      rows[i] = entry and entry.row or self.on_miss == "drop" and -1 or bucket.first + bucket.n - 1
    end
    out[f] = rows
  end
  return out
end

--- Rows that got another id since the last call, ascending; nil: none.
function Model:evicted()
  local pending = self.pending
  if not pending then return nil end
  self.pending = nil
  local list = {}
  for row in pairs(pending) do list[#list + 1] = row end
  table.sort(list)
  return list
end

--- A state that is loaded begins a new window.
function Model:forget_window()
  self.since, self.seen, self.pending = 0, 0, nil
  for _, bucket in ipairs(self.buckets) do bucket.history = {} end
end

--- Entries that no id has, without those that none can have.
function Model:open_slots()
  local open = 0
  for _, bucket in ipairs(self.buckets) do
    for i = 1, bucket.n - 1 do
      if bucket.entries[i].id == EMPTY then open = open + 1 end
    end
  end
  return open
end

--- Lists by place: ids (false: free), rows, counts, last.
function Model:state()
  local s = { ids = {}, rows = {}, counts = {}, last = {} }
  for _, bucket in ipairs(self.buckets) do
    for _, e in ipairs(bucket.entries) do
      local i = #s.ids + 1
      s.ids[i], s.rows[i], s.counts[i], s.last[i] = e.id ~= EMPTY and e.id, e.row, e.count, e.last
    end
  end
  return s
end

return setmetatable(Model, { __call = function(_, a) return Model.new(a) end })
