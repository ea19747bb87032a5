-- collision_world.lua: random maps of ids beside their plain models, and operations that are done to both.
local ffi = require "ffi"
local peri = require "perilune"
local collision = require "spec.support.collision"

local embed = peri.embed
local M = {}

-- -- random maps ------------------------------------------------------------------------------------------------------

local function pick(r, list) return list[r(#list)] end

--- Rows, buckets and the ids of a test: what both kinds of maps have.
local function world(r)
  local w = { rows = r(30), features = r(3) }
  w.buckets = math.min(r(5), w.rows)
  w.spread = pick(r, { "hash", "modulo" })
  if r(3) == 1 then -- uneven segments
    w.segments = { 0 }
    for b = 1, w.buckets - 1 do
      w.segments[b + 1] = math.max(w.segments[b] + 1, math.floor(b * w.rows / w.buckets) - (b % 2))
    end
    w.segments[w.buckets + 1] = w.rows
  end
  local kind = r(12)
  w.pool = collision.random_pool(r, r(3 * w.rows), kind <= 3 and kind or kind == 4 and 4 or nil)
  w.ids = w.pool.ids
  local bucket = {}
  for i, id in ipairs(w.ids) do bucket[i] = collision.bucket(id, w.buckets, w.spread) end
  w.bucket_of = function(i) return bucket[i] end
  return w
end

local function segments_of(w)
  if w.segments then return w.segments end
  local list = {}
  for b = 0, w.buckets do list[b + 1] = math.floor(b * w.rows / w.buckets) end
  return list
end

local scores = {
  LFU = function() return embed.LFU_EvictionPolicy end, LRU = function() return embed.LRU_EvictionPolicy end,
  DistanceLFU = function() return embed.DistanceLFU_EvictionPolicy end,
}
local function own_score(count, last, now) return (count * 5 + last * 3) % 7 - (now - last) / 4 end

--- A random sorted map and its model.
function M.mch(r, device)
  local w = world(r)
  local name = pick(r, { "LFU", "LRU", "DistanceLFU", "own" })
  local decay, filter = name ~= "LFU" and name ~= "own" and pick(r, { 0.5, 1, 2 }) or nil,
    pick(r, { false, false, "average", "dynamic" })
  local skew, interval, on_miss = pick(r, { 0.5, 1, 1.5 }), r(4), pick(r, { "row", "drop", "default" })
  local capacity = r(4) == 1 and r(30) or nil
  local lua_filter = filter == "average" and embed.average_threshold_filter
    or filter == "dynamic" and embed.dynamic_threshold_filter { threshold_skew_multiplier = skew } or nil
  local class = name == "own" and embed.MCHEvictionPolicy or scores[name]()
  local policy = class { threshold_filtering_func = lua_filter, decay_exponent = decay, score = name == "own"
    and own_score or nil }
  w.new = function()
    return embed.MCHManagedCollisionModule { zch_size = w.rows, buckets = w.buckets, spread = w.spread,
      output_segments = w.segments, device = device, eviction_policy = policy, eviction_interval = interval,
      on_miss = on_miss, history_capacity = capacity or 0, name = "t" }
  end
  w.model = collision.Model { segments = segments_of(w), policy = name == "own" and own_score or name, decay = decay,
    interval = interval, filter = filter or nil, filter_arg = skew, on_miss = on_miss, capacity = capacity,
    bucket_of = w.bucket_of, never = function(i) return w.ids[i] == collision.MAX end }
  w.text = ("%s, decay %s, filter %s, interval %d, on_miss %s, capacity %s"):format(name, decay, filter, interval,
    on_miss, capacity)
  return w
end

--- A random probing map and its model.
function M.hash(r, device)
  local w = world(r)
  local policy = pick(r, { "none", "single", "feature", "lru", "lru single", "lru feature" })
  local on_miss, max_probe = pick(r, { "hash", "drop", "row" }), r(w.rows + 3)
  local names, ttl, memory = {}, {}, ffi.new("int64_t[?]", #w.ids)
  for i, id in ipairs(w.ids) do memory[i - 1] = id end
  for f = 1, w.features do names[f], ttl[f] = "f" .. f, r(5) - 1 end
  local murmur = peri.sparse.murmur_hash3(peri.Tensor.from_memory(memory, { #w.ids }, "i64", "cpu"), 0, 0):read()
  local home = {} -- number by number: a cast pointer would not keep the array
  for i = 1, #w.ids do home[i] = ffi.cast("uint64_t", murmur[i - 1]) end
  local single, feature, lru = policy:match "single", policy:match "feature", policy:match "lru"
  local eviction = lru and "LRU_EVICTION" or single and "SINGLE_TTL_EVICTION" or feature and "PER_FEATURE_TTL_EVICTION"
    or nil
  w.new = function()
    local module = embed.HashZchManagedCollisionModule { zch_size = w.rows, total_num_buckets = w.buckets,
      spread = w.spread, output_segments = w.segments or segments_of(w), device = device, max_probe = max_probe,
      on_miss = on_miss, name = "t", eviction_policy_name = eviction, eviction_config = (single or feature)
        and { features = names, single_ttl = single and ttl[1] or nil, per_feature_ttl = feature and ttl or nil }
        or nil }
    module:_belongs_to("t", names)
    return module
  end
  w.model = collision.HashModel { segments = segments_of(w), bucket_of = w.bucket_of, on_miss = on_miss,
    max_probe = max_probe, policy = lru or policy ~= "none" and "ttl" or nil,
    ttl = feature and ttl or single and { ttl[1] } or nil, never = function(i) return w.ids[i] == -1 end,
    home = function(i, rows) return tonumber(home[i] % rows) end,
    before = function(a, b)
      if home[a] ~= home[b] then return home[a] < home[b] end
      return w.ids[a] < w.ids[b]
    end }
  w.text = ("probing, %s, on_miss %s, max_probe %d"):format(policy, on_miss, max_probe)
  return w
end

-- -- operations -------------------------------------------------------------------------------------------------------

local function same(want, got, what, w, step)
  if #want == #got then
    local equal = true
    for i = 1, #want do equal = equal and want[i] == got[i] end
    if equal then return end
  end
  error(("%s at operation %d: %s; wanted %s (%s; %d rows, %d buckets, %s, %d ids)"):format(what, step,
    table.concat(got, " "), table.concat(want, " "), w.text, w.rows, w.buckets, w.spread, #w.ids), 0)
end

function M.batch(w, module, lists, training, device, step)
  module.training = training
  local tensors = {}
  for f, list in ipairs(lists) do tensors[f] = w.pool:tensor(list, device) end
  local want, got = w.model:remap(lists, training), module:_remap_values(tensors)
  for f in ipairs(lists) do same(want[f], got[f]:to_list(), ("rows of feature %d"):format(f), w, step) end
end

function M.evicted(w, module, step)
  local got = module:evict()
  same(w.model:evicted() or {}, got and got:to_list() or {}, "evicted rows", w, step)
end

--- A new module with the state of another.
function M.reload(w, module)
  local other = w.new()
  other:load_state_dict(module:state_dict())
  module:_own_map():release()
  w.model:forget_window()
  return other
end

--- The ids of a step by its number: the same in every process.
function M.features(seed, step, w)
  return collision.random_features(collision.random(seed * 100000 + step), w.pool, w.features, 8)
end

--- So many operations on a new map; the map at the end.
function M.play(r, w, device, operations)
  local module = w.new()
  for step = 1, operations do
    peri.scope(function()
      local dice = r(100)
      if dice <= 70 then M.batch(w, module, collision.random_features(r, w.pool, w.features, 5), true, device, step)
      elseif dice <= 85 then M.batch(w, module, collision.random_features(r, w.pool, w.features, 5), false, device,
        step)
      elseif dice <= 99 then M.evicted(w, module, step)
      else module = M.reload(w, module) end
    end)
  end
  return module
end

return M
