-- mc_remap.lua: ShardedManagedCollisionCollection by itself: rows of the whole tables for raw ids, without a lookup.
-- Ids go to the ranks that have their buckets, become rows there, and these come home. On the host: within sharded
-- embedding collections C does it.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local mc_state = require "perilune.embed.mc_state"
local ShardingEnv = require "perilune.plan.env"
local C = P.C

local M = {}

local int64s = ffi.typeof "int64_t[?]"

--- rank_of[b]: the rank that has bucket b of a table.
local function owners(collection, x)
  local rank_of, segments = {}, x.segments
  local env = ShardingEnv.from_process_group(collection._group)
  for _, s in ipairs(collection._plan.tables[x.config.name]:shards(x.config, env)) do
    for b = 0, #segments - 2 do
      if segments[b + 1] >= s.row_offset and segments[b + 1] < s.row_offset + s.rows then rank_of[b] = s.rank end
    end
  end
  return rank_of
end

--- The features in order: a list of { name =, table = (of the collection) }.
local function slots_of(collection)
  local slots = {}
  for _, t in ipairs(collection:embedding_configs()) do
    local x = collection._tables[t.name]
    x.rank_of = x.rank_of or owners(collection, x)
    for _, name in ipairs(t.feature_names) do slots[#slots + 1] = { name = name, table = x } end
  end
  return slots
end

--- The batch as the modules' input_hash_func make it, its features in the order of `slots`; ids on the host, and where
--- those of each end.
local function taken(collection, slots, features)
  local batch, order = collection:_hashed(features), {}
  local keys = util.index_of(batch:keys())
  for k, slot in ipairs(slots) do
    if not keys[slot.name] then
      P.fail(("%s: the batch has no feature '%s' (of table '%s'); those are: %s"):format(collection.class_name,
        slot.name, slot.table.config.name, table.concat(batch:keys(), ", ")))
    end
    order[k] = keys[slot.name] - 1
  end
  batch = batch:permute(order)
  return batch, batch:values():to("i64", "cpu"), batch:offset_per_key()
end

--- The rank of each of the ids (i32 array).
local function ranks_of(collection, slots, ids, edges)
  local memory, n = ids:read()
  local ranks = ffi.new("int32_t[?]", math.max(n, 1))
  for k, slot in ipairs(slots) do
    local x = slot.table
    local rank_of, c = x.rank_of, x.c[0]
    local spread, buckets, size = c.spread, c.buckets, c.input_hash_size
    for i = edges[k], edges[k + 1] - 1 do
      local rank = rank_of[tonumber(C.peri_collision_bucket(memory[i], spread, buckets, size))]
      if not rank then
        P.fail(("%s: table '%s': id %s of feature '%s' lies outside [0, input_hash_size)"):format(collection.class_name,
          x.config.name, tostring(memory[i]):gsub("LL$", ""), slot.name))
      end
      ranks[i] = rank
    end
  end
  return ranks
end

--- Ids sorted by rank and feature: place[i], where id i goes; counts[r][k], how many of feature k go to rank r - 1.
local function dealt(slots, ranks, edges, world_size)
  local counts, place, at, n = {}, int64s(math.max(edges[#slots + 1], 1)), {}, 0
  for r = 1, world_size do
    counts[r] = {}
    for k = 1, #slots do counts[r][k] = 0 end
  end
  for k = 1, #slots do
    for i = edges[k], edges[k + 1] - 1 do
      local own = counts[ranks[i] + 1]
      own[k] = own[k] + 1
    end
  end
  for r = 1, world_size do
    at[r] = {}
    for k = 1, #slots do at[r][k], n = n, n + counts[r][k] end
  end
  for k = 1, #slots do
    for i = edges[k], edges[k + 1] - 1 do
      local own = at[ranks[i] + 1]
      place[i], own[k] = own[k], own[k] + 1
    end
  end
  return counts, place
end

local function total(list)
  local sum = 0
  for _, n in ipairs(list) do sum = sum + n end
  return sum
end

--- What all ranks send each other of their counts, modes and times; received[r][k]: how many ids of feature k rank r -
--- 1 has sent.
local function tell(collection, counts)
  local group, flat = collection._group, {}
  local times = util.map(collection:embedding_configs(), function(t) return collection._times[t.name] end)
  local features = #counts[1]
  local width = features + 1 + #times
  for r, list in ipairs(counts) do
    for _, n in ipairs(list) do flat[#flat + 1] = n end
    flat[#flat + 1] = collection.training and 1 or 0
    for _, now in ipairs(times) do flat[#flat + 1] = now end
  end
  local got, received = group:all_to_all(Tensor.tensor(flat, "i64", "cpu", { #flat })):wait():to_list(), {}
  for r = 1, group:size() do
    received[r] = {}
    local at = (r - 1) * width
    for k = 1, features do received[r][k] = tonumber(got[at + k]) end
    if (tonumber(got[at + features + 1]) == 1) ~= collection.training then
      P.fail(("%s: rank %d is in %s mode, rank %d in %s"):format(collection.class_name, group:rank(),
        collection.training and "training" or "evaluation", r - 1, collection.training and "evaluation" or "training"))
    end
    for i, now in ipairs(times) do
      local theirs = tonumber(got[at + features + 1 + i])
      if theirs ~= now then
        P.fail(("%s: table '%s': rank %d has time %d, rank %d has %d (set_time; -1: the number of steps)"):format(
          collection.class_name, collection:embedding_configs()[i].name, group:rank(), now, r - 1, theirs))
      end
    end
  end
  return received
end

--- Rows (of the whole table) of the ids of one table that came here, into `rows`; first[r][k]: where those of rank r -
--- 1 and feature k are.
local function map_rows(collection, x, places, ids, rows, first, received)
  local lists, map = {}, x.piece.map
  for i, k in ipairs(places) do
    local n, at = 0, 0
    for r = 1, #received do n = n + received[r][k] end
    local memory = int64s(math.max(n, 1))
    for r = 1, #received do
      ffi.copy(memory + at, ids + first[r][k], 8 * received[r][k])
      at = at + received[r][k]
    end
    lists[i] = Tensor.from_memory(memory, { n }, "i64", collection._device)
  end
  local found = x.module.asks and map:remap_scored(lists, collection.training, x.module.eviction_policy, x.config.name)
    or map:remap(lists, collection.training)
  for i, k in ipairs(places) do
    local memory, at = mc_state.shift(found[i]:to(nil, "cpu"), x.piece.row_offset):read(), 0
    for r = 1, #received do
      ffi.copy(rows + first[r][k], memory + at, 8 * received[r][k])
      at = at + received[r][k]
    end
  end
end

--- The rows of the ids that came here (i64 array).
local function rows_of(collection, slots, ids, received)
  local first, n = {}, 0
  for r = 1, #received do
    first[r] = {}
    for k = 1, #slots do first[r][k], n = n, n + received[r][k] end
  end
  local rows, k = int64s(math.max(n, 1)), 1
  while k <= #slots do
    local x, places = slots[k].table, {}
    while k <= #slots and slots[k].table == x do places[#places + 1], k = k, k + 1 end
    if x.piece then map_rows(collection, x, places, ids, rows, first, received) end
  end
  return rows, n
end

--- Modules of all ranks follow the same rules; told once.
local function agree(collection)
  local group, own = collection._group, {}
  for name, x in util.ordered(collection._tables) do
    own[name] = ("%s\nspread\t%s\nbuckets at rows\t%s"):format(x.agreed, x.module.spread, table.concat(x.segments, " "))
  end
  for r, theirs in ipairs(group:all_gather_object(own, collection.class_name)) do
    for name, text in util.ordered(own) do
      local lines, i = {}, 0
      for line in (theirs[name] or ""):gmatch "[^\n]+" do lines[#lines + 1] = line end
      for line in text:gmatch "[^\n]+" do
        i = i + 1
        if line ~= lines[i] then
          P.fail(("%s: table '%s': rank %d has %s, rank %d has %s"):format(collection.class_name, name, group:rank(),
            (line:gsub("\t", " ")), r - 1, (tostring(lines[i]):gsub("\t", " "))))
        end
      end
    end
  end
end

--- f(...) of every rank; an error of one is one on all, and the group stays of use.
local function together(collection, f, ...)
  local group = collection._group
  local ok, result, more = pcall(f, ...)
  local text = not ok and tostring(type(result) == "table" and result.message or result):match "^[^\n]*"
  for r, theirs in ipairs(group:all_gather_object(text, collection.class_name)) do
    if theirs then P.fail(("%s; rank %d"):format(theirs, r - 1)) end
  end
  return result, more
end

--- See ShardedManagedCollisionCollection:forward.
function M.remap(collection, features)
  local group = collection._group
  if not collection._agreed then
    agree(collection)
    collection._agreed = true
  end
  collection:_settle_maps()
  local slots = slots_of(collection)
  local batch, counts, place, ids
  together(collection, function()
    local edges
    batch, ids, edges = taken(collection, slots, util.resolve(features))
    counts, place = dealt(slots, ranks_of(collection, slots, ids, edges), edges, group:size())
  end)
  local received = tell(collection, counts)
  local memory, n = ids:read()
  local sent = int64s(math.max(n, 1))
  for i = 0, n - 1 do sent[place[i]] = memory[i] end
  local there, here = util.map(counts, total), util.map(received, total)
  local came = group:all_to_all_v(Tensor.from_memory(sent, { n }, "i64", "cpu"), there, here):wait()
  local rows, m = together(collection, rows_of, collection, slots, came:read(), received)
  local back = group:all_to_all_v(Tensor.from_memory(rows, { m }, "i64", "cpu"), here, there):wait():read()
  for i = 0, n - 1 do sent[i] = back[place[i]] end
  return batch:with_values(Tensor.from_memory(sent, { n }, "i64", features:values():device()))
end

return M
