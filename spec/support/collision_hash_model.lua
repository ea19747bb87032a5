-- collision_hash_model.lua: managed collision by probing in plain Lua, from its definition: what the C maps are
-- compared with. Ids are places in a list, as in collision_model.lua.
--
-- An id lives in its home row or in one of the max_probe - 1 rows after it, round and round in its bucket. A step: all
-- ids are looked up; those that are found are touched. Then the new ones, in an order of their own, take the first row
-- in reach that is free or may be given up. Then these are looked up again.
local Model = {}
Model.__index = Model

--- rows; segments: as in collision_model.lua; bucket_of(id); home(id, rows) -> 0..rows - 1; before(a, b): the order of
--- new ids; never(id): cannot be stored; max_probe; policy: nil, "ttl" or "lru"; ttl: a number for each feature;
--- frozen: a list, features that teach nothing; on_miss: "hash", "drop" or "row"; reserve: the last row of a bucket is
--- no id's.
function Model.new(a)
  local m = setmetatable({ a = a, now = 0, buckets = {}, at = {}, changed = nil }, Model)
  local segments = a.segments or { 0, a.rows }
  for b = 1, #segments - 1 do
    local bucket = { first = segments[b], rows = segments[b + 1] - segments[b], entries = {} }
    bucket.usable = a.on_miss == "row" and bucket.rows - 1 or bucket.rows
    for i = 0, bucket.usable - 1 do bucket.entries[i] = { row = bucket.first + i } end
    m.buckets[b] = bucket
  end
  return m
end

--- The rows that an id may have, nearest first.
local function reach(model, id)
  local bucket, list = model.buckets[model.a.bucket_of(id)], {}
  if bucket.usable == 0 then return list end
  local home = model.a.home(id, bucket.usable)
  for k = 0, math.min(model.a.max_probe, bucket.usable) - 1 do
    list[k + 1] = bucket.entries[(home + k) % bucket.usable]
  end
  return list
end

local function insert(model, id, expiry, time)
  local chosen
  for _, e in ipairs(reach(model, id)) do
    if not e.id then chosen = e break end
    if model.a.policy == "ttl" and e.expiry < time and e.touched ~= model.now then chosen = e break end
  end
  if not chosen and model.a.policy == "lru" then
    for _, e in ipairs(reach(model, id)) do
      if e.touched ~= model.now and (not chosen or e.expiry < chosen.expiry) then chosen = e end
    end
  end
  if not chosen then return end
  if chosen.id then model.at[chosen.id] = nil end
  chosen.id, chosen.expiry, chosen.touched = id, expiry, model.now
  model.at[id] = chosen
  model.changed = model.changed or {}
  model.changed[chosen.row] = true
end

--- time: what lies behind ids is compared with (nil: the number of the step).
local function learn(model, features, time)
  model.now = model.now + 1
  time = time or model.now
  local news, order, a = {}, {}, model.a
  for f, list in ipairs(features) do
    local expiry = time + (a.ttl and (a.ttl[f] or a.ttl[1]) or 0)
    for _, id in ipairs(a.frozen and a.frozen[f] and {} or list) do
      local e = model.at[id]
      if e then e.touched, e.expiry = model.now, math.max(e.expiry, expiry)
      elseif not a.never(id) then
        if not news[id] then order[#order + 1] = id end
        news[id] = math.max(news[id] or expiry, expiry)
      end
    end
  end
  table.sort(order, a.before)
  for _, id in ipairs(order) do insert(model, id, news[id], time) end
end

function Model:remap(features, training, time)
  if training then learn(self, features, time) end
  local out = {}
  for f, list in ipairs(features) do
    local rows = {}
    for i, id in ipairs(list) do
      local e, bucket = self.at[id], self.buckets[self.a.bucket_of(id)]
      if e then rows[i] = e.row
      elseif self.a.on_miss == "drop" then rows[i] = -1
      elseif self.a.on_miss == "row" then rows[i] = bucket.first + bucket.rows - 1
      else rows[i] = bucket.first + self.a.home(id, math.max(bucket.usable, 1)) end
    end
    out[f] = rows
  end
  return out
end

--- As in collision_model.lua.
function Model:evicted()
  local changed = self.changed
  if not changed then return nil end
  self.changed = nil
  local list = {}
  for row in pairs(changed) do list[#list + 1] = row end
  table.sort(list)
  return list
end

--- A state that is loaded has no changed rows.
function Model:forget_window() self.changed = nil end

return setmetatable(Model, { __call = function(_, a) return Model.new(a) end })
