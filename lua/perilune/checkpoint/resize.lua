-- resize.lua: tables of raw ids (managed collision) into tables of other sizes, or of other buckets. What is loaded then is, in place of
-- what the checkpoint has, what this file makes of it: a map of the new size, and rows of weights and states at the places of their ids.
--
-- Which ids fit: those that the table's own eviction policy would evict last. MCH: in each new bucket the ids with the best scores, of
-- equal ones the smaller id. Hash: ids get rows as new ones do (the first free one from their home row on, at most max_probe away), in the
-- order of their times, the longest first (tables without times: in the order of their rows). Ids that do not fit are left out and counted.
-- Rows without an id begin as ever when an id gets them. The row that ids without a row share is that of the bucket at the same place.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local StoredTensor = require "perilune.tensor.stored"
local mc_map = require "perilune.embed.mc_map"
local policies = require "perilune.embed.mc_policies"
local C = P.C

local M = {}

local INFINITE = 9223372036854775807LL -- MCH: no id
local longs = ffi.typeof "int64_t[?]"

local function cpu_tensor(x) return Tensor.is(x) and x:to(nil, "cpu") or x:tensor "cpu" end

--- The i64 numbers of a state as an array, and how many; nil: there is none. (i32 become i64.)
local function array_of(x)
  if x == nil then return nil end
  local n, copy
  P.scope(function()
    local memory
    memory, n = cpu_tensor(x):to("i64"):contiguous():read()
    copy = longs(math.max(n, 1))
    ffi.copy(copy, memory, 8 * n)
  end)
  return copy, n
end

local function size_of(x) return Tensor.is(x) and x:shape() or x:size() end

-- -- which ids ------------------------------------------------------------------------------------------------------------------------

--- Scores of MCH ids by the policy: a function(k) of the k-th entry (from 0).
local function score_of(policy, counts, last, n, now, name)
  local d, kind = policy.decay_exponent, policy.kind
  if kind == C.PERI_EVICT_LFU then return function(k) return tonumber(counts[k]) end end
  if kind == C.PERI_EVICT_LRU then return function(k) return tonumber(last[k]) end end
  if kind == C.PERI_EVICT_DISTANCE_LFU then
    return function(k) return tonumber(counts[k]) / (now - tonumber(last[k]) + 1) ^ d end
  end
  local scores = longs(1)
  P.scope(function()
    local function tensor(array) return Tensor.from_memory(ffi.cast("const int64_t *", array), { n }, "i64", "cpu") end
    local list = policies.scores(policy, tensor(counts), tensor(last), now, name):to("f64", "cpu"):to_list()
    scores = list
  end)
  return function(k) return scores[k + 1] end
end

--- What the checkpoint's map knows: a list of { id =, row = (of the whole table), score =, at = place in the states }.
local function entries_of(kind, module, states, name, now)
  local list = {}
  if kind == "mch" then
    local ids, n = array_of(states._mch_sorted_raw_ids)
    local rows, counts, last = array_of(states._mch_remapped_ids_mapping), array_of(states._mch_counts),
      array_of(states._mch_last_access_iter)
    local score = score_of(module.eviction_policy, counts, last, n, now, name)
    for k = 0, n - 1 do
      if ids[k] ~= INFINITE then list[#list + 1] = { id = ids[k], row = tonumber(rows[k]), score = score(k), at = k } end
    end
  else
    local ids, n = array_of(states._hash_zch_identities)
    local times = array_of(states._hash_zch_metadata)
    for k = 0, n - 1 do
      if ids[k] ~= -1 then list[#list + 1] = { id = ids[k], row = k, score = times and tonumber(times[k]) or -k, at = k } end
    end
  end
  table.sort(list, function(x, y)
    if x.score ~= y.score then return x.score > y.score end
    return x.id < y.id
  end)
  return list
end

--- Give rows to entries, best first: sets `to`, where there is one. Returns how many got none.
local function place_mch(module, segments, list)
  local buckets, left = #segments - 1, 0
  local taken = {}
  for b = 1, buckets do taken[b] = {} end
  for _, e in ipairs(list) do
    local b = tonumber(C.peri_collision_bucket(e.id, mc_map.spreads[module.spread], buckets, module.input_hash_size)) + 1
    local room = b >= 1 and segments[b + 1] - segments[b] - 1 or 0
    if b >= 1 and #taken[b] < room then table.insert(taken[b], e) else left = left + 1 end
  end
  for b = 1, buckets do
    table.sort(taken[b], function(x, y) return x.id < y.id end)
    for k, e in ipairs(taken[b]) do e.to = segments[b] + k - 1 end
  end
  return left
end

local function place_hash(module, segments, list)
  local description, left = { name = module:_title(), rows = module.zch_size, buckets = #segments - 1, segments = segments,
    spread = module.spread, input_hash_size = module.input_hash_size, on_miss = module.on_miss == "row" and "row" or "drop",
    device = "cpu" }, 0
  module:_describe_map(description, {})
  description.evict, description.ttl, description.read_only, description.n_features = C.PERI_EVICT_NONE, nil, nil, 0
  local map, by_id = mc_map.new(description), {}
  for _, e in ipairs(list) do
    P.scope(function() map:remap({ Tensor.tensor({ e.id }, "i64", "cpu") }, true) end)
    by_id[tostring(e.id)] = e
  end
  local index = util.index_of(map:state_names())
  local ids, n = array_of(map:state(index._hash_zch_identities))
  for row = 0, n - 1 do
    local e = ids[row] ~= -1 and by_id[tostring(ids[row])]
    if e then e.to = row end
  end
  for _, e in ipairs(list) do left = left + (e.to and 0 or 1) end
  map:release()
  return left
end

-- -- what is loaded --------------------------------------------------------------------------------------------------------------------

--- The states of the new map, by name: those of one that knows nothing, with the entries that have a row.
local function new_states(kind, module, states, list)
  local map, result = module:_new_map { device = "cpu" }, {}
  local index = util.index_of(map:state_names())
  local shapes, arrays, dtypes = {}, {}, {}
  for name, i in util.ordered(index) do
    local t = map:state(i)
    shapes[name], dtypes[name], arrays[name] = t:shape(), t:dtype(), array_of(t)
  end
  local function copy(name, from, to, old)
    if arrays[name] and old[name] then arrays[name][to] = old[name][from] end
  end
  local old = {}
  for name in util.ordered(index) do old[name] = array_of(states[name]) end
  for _, e in ipairs(list) do
    if e.to and kind == "mch" then
      arrays._mch_sorted_raw_ids[e.to], arrays._mch_remapped_ids_mapping[e.to] = e.id, e.to
      copy("_mch_counts", e.at, e.to, old)
      copy("_mch_last_access_iter", e.at, e.to, old)
    elseif e.to then
      arrays._hash_zch_identities[e.to] = e.id
      copy("_hash_zch_metadata", e.at, e.to, old)
    end
  end
  for name in util.ordered(index) do
    local n = 1
    for _, size in ipairs(shapes[name]) do n = n * size end
    result[name] = P.lasting(function()
      return Tensor.from_memory(ffi.cast("const int64_t *", arrays[name]), { n }, "i64", "cpu"):reshape(shapes[name]):to(dtypes[name])
    end)
  end
  if states._current_iter_tensor then result._current_iter_tensor = states._current_iter_tensor end
  map:release()
  return result
end

--- from[new row] = old row, or -1.
local function rows_from(module, list, segments, old_segments)
  local from = longs(math.max(module.zch_size, 1))
  for row = 0, module.zch_size - 1 do from[row] = -1 end
  for _, e in ipairs(list) do
    if e.to then from[e.to] = e.row end
  end
  if module:_reserved() > 0 then -- the last row of each bucket is shared by ids without a row
    local buckets, before = #segments - 1, #old_segments - 1
    for b = 0, buckets - 1 do
      local twin = math.floor(b * before / buckets)
      from[segments[b + 2] - 1] = old_segments[twin + 2] - 1
    end
  end
  return from
end

--- A stored tensor of rows with other rows: row i is row from[i] of `stored`, zeros if that is -1.
local function moved(stored, from, rows)
  local size = size_of(stored)
  size[1] = rows
  return StoredTensor { size = size, dtype = stored:dtype(), read = function(region, tensor)
    local n, r = region.size[1], 0
    while r < n do
      local first, past = from[region.offset[1] + r], r + 1
      while past < n and from[region.offset[1] + past] == (first < 0 and first or first + (past - r)) do past = past + 1 end
      local target = tensor:slice(1, r, past)
      if first < 0 then target:fill(0)
      elseif Tensor.is(stored) then target:copy(stored:slice(1, tonumber(first), tonumber(first) + past - r))
      else
        local offset = util.copy(region.offset)
        offset[1] = tonumber(first)
        stored:read(offset, target, region.columns)
      end
      r = past
    end
  end }
end

-- -- the checkpoint's dicts ------------------------------------------------------------------------------------------------------------

--- The module of a table, and its rows where buckets begin, of a collection of maps (unsharded, or over ranks); nil: it has no such table.
local function module_of(collection, name)
  local x = collection._tables and collection._tables[name]
  local module = x and x.module or collection.managed_collision_modules and collection:managed_collision_modules()[name]
  if not module then return nil end
  local offset = module.output_global_offset
  return module, util.map(module:output_segments(), function(row) return row - offset end)
end

local function segments_of(states)
  local memory, n = array_of(states._output_segments_tensor)
  local list = {}
  for i = 0, n - 1 do
    if memory[i] >= 0 then list[#list + 1] = tonumber(memory[i]) end
  end
  return list
end

--- One table: change the entries of the dicts of all parts. Returns what is to be said; nil: sizes and buckets are the same.
local function resize(dicts, dict, path, name, collection)
  local prefix, states = ("%s._managed_collision_modules.%s."):format(path, name), {}
  for key, value in util.ordered(dict) do
    if type(key) == "string" and key:sub(1, #prefix) == prefix then states[key:sub(#prefix + 1)] = value end
  end
  local module, segments = module_of(collection, name)
  local kind = states._mch_sorted_raw_ids and "mch" or states._hash_zch_identities and "hash"
  if module and kind and (kind == "hash") ~= (module.max_probe ~= nil) then return nil end -- other states: an error of its own
  if not module or not kind or not states._output_segments_tensor then return nil end
  local old_segments = segments_of(states)
  if table.concat(old_segments, " ") == table.concat(segments, " ") then return nil end
  local now = states._current_iter_tensor and tonumber((array_of(states._current_iter_tensor))[0]) or 0
  local list = entries_of(kind, module, states, name, now)
  local left = (kind == "mch" and place_mch or place_hash)(module, segments, list)
  for state, tensor in util.ordered(new_states(kind, module, states, list)) do dict[prefix .. state] = tensor end
  local before, from = old_segments[#old_segments], rows_from(module, list, segments, old_segments)
  local parameter = "%." .. name:gsub("%p", "%%%0") .. "%.weight$"
  local root = path:match "^(.*)_managed_collision_collection$" or ""
  local function is_table(key)
    return type(key) == "string" and key:sub(1, #root) == root and key:sub(#root + 1):find "^_embedding_module" and key:find(parameter)
  end
  local function replace(map)
    for key, value in util.ordered(map) do
      local is = Tensor.is(value) or StoredTensor.is(value)
      if is and size_of(value)[1] == before then map[key] = moved(value, from, module.zch_size) end
    end
  end
  for _, d in util.ordered(dicts) do
    for key, value in util.ordered(d.dict) do
      if is_table(key) then
        local one = { value }
        replace(one)
        d.dict[key] = one[1]
      end
    end
    for key, value in util.ordered(type(d.dict.state) == "table" and d.dict.state or {}) do
      if is_table(key) and type(value) == "table" then replace(value) end
    end
  end
  return ("table '%s' had %d rows and has %d: %d of %d ids are in it%s"):format(name, before, module.zch_size, #list - left, #list,
    left > 0 and (", %d did not fit and are left out (docs/checkpoints.md)"):format(left) or "")
end

--- Fit the tables of raw ids of the models among `parts` to the sizes that they have here. Returns a list of what is to be said. Local.
function M.fit(parts, dicts)
  local said = {}
  for _, part in ipairs(parts) do
    local d = dicts[part.name]
    for _, m in ipairs(d and part.module and (part.object.wraps and part.object.module or part.object):named_modules() or {}) do
      local collection = m.module
      local configs = (collection._tables and collection._configs or collection.managed_collision_modules) and collection.embedding_configs
      for _, t in ipairs(configs and collection:embedding_configs() or {}) do
        said[#said + 1] = resize(dicts, d.dict, m.path, t.name, collection)
      end
    end
  end
  return said
end

return M
