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
local longs, doubles, places = ffi.typeof "int64_t[?]", ffi.typeof "double[?]", ffi.typeof "uint32_t[?]"

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

--- Scores of MCH ids by the policy, into `scores` (double [n]).
local function fill_scores(scores, policy, counts, last, n, now, name)
  local d, kind = policy.decay_exponent, policy.kind
  if kind == C.PERI_EVICT_LFU then for k = 0, n - 1 do scores[k] = tonumber(counts[k]) end
  elseif kind == C.PERI_EVICT_LRU then for k = 0, n - 1 do scores[k] = tonumber(last[k]) end
  elseif kind == C.PERI_EVICT_DISTANCE_LFU then
    for k = 0, n - 1 do scores[k] = tonumber(counts[k]) / (now - tonumber(last[k]) + 1) ^ d end
  else
    P.scope(function()
      local function tensor(array) return Tensor.from_memory(ffi.cast("const int64_t *", array), { n }, "i64", "cpu") end
      local made = policies.scores(policy, tensor(counts), tensor(last), now, name):to("f64", "cpu"):contiguous()
      ffi.copy(scores, made:read(), 8 * n)
    end)
  end
end

--- Sort the first n of `list` (uint32_t) by before(x, y); those that are equal keep their order. Returns the array that has them.
local function sort(list, n, before)
  local from, to, width = list, places(math.max(n, 1)), 1
  while width < n do
    for low = 0, n - 1, 2 * width do
      local middle, high = math.min(low + width, n), math.min(low + 2 * width, n)
      local i, j = low, middle
      for k = low, high - 1 do
        if i < middle and (j >= high or not before(from[j], from[i])) then to[k], i = from[i], i + 1
        else to[k], j = from[j], j + 1 end
      end
    end
    from, to, width = to, from, 2 * width
  end
  return from
end

--- What the checkpoint's map knows, as arrays by entry: n =, ids =, at = place in the states, to = the new row, -1 where there is none;
--- rows = those of the whole table by place (nil: the places are the rows); order = the entries, best first.
local function entries_of(kind, module, states, name, now)
  local ids, all = array_of(states[kind == "mch" and "_mch_sorted_raw_ids" or "_hash_zch_identities"])
  local free, n = kind == "mch" and INFINITE or -1LL, 0
  local e = { ids = longs(math.max(all, 1)), at = places(math.max(all, 1)), to = longs(math.max(all, 1)) }
  local scores = doubles(math.max(all, 1))
  if kind == "mch" then
    fill_scores(scores, module.eviction_policy, array_of(states._mch_counts), array_of(states._mch_last_access_iter), all, now, name)
  else
    local times = array_of(states._hash_zch_metadata)
    for k = 0, all - 1 do scores[k] = times and tonumber(times[k]) or -k end
  end
  for k = 0, all - 1 do
    if ids[k] ~= free then
      e.ids[n], e.at[n], e.to[n], scores[n] = ids[k], k, -1, scores[k]
      n = n + 1
    end
  end
  e.n, e.rows = n, kind == "mch" and array_of(states._mch_remapped_ids_mapping) or nil
  local order = places(math.max(n, 1))
  for k = 0, n - 1 do order[k] = k end
  e.order = sort(order, n, function(x, y)
    if scores[x] ~= scores[y] then return scores[x] > scores[y] end
    return e.ids[x] < e.ids[y]
  end)
  return e
end

--- Give rows to entries, best first. Returns how many got none.
local function place_mch(module, segments, e)
  local buckets, n = #segments - 1, 0
  local taken, filled = places(math.max(e.n, 1)), {}
  for b = 1, buckets do filled[b] = 0 end
  for i = 0, e.n - 1 do
    local k = e.order[i]
    local b = tonumber(C.peri_collision_bucket(e.ids[k], mc_map.spreads[module.spread], buckets, module.input_hash_size)) + 1
    local room = b >= 1 and segments[b + 1] - segments[b] - 1 or 0
    if b >= 1 and filled[b] < room then
      filled[b], e.to[k], taken[n], n = filled[b] + 1, b, k, n + 1
    end
  end
  taken = sort(taken, n, function(x, y)
    if e.to[x] ~= e.to[y] then return e.to[x] < e.to[y] end
    return e.ids[x] < e.ids[y]
  end)
  local bucket, at = 0, 0
  for i = 0, n - 1 do -- in the order of ids within their bucket
    local k = taken[i]
    local b = tonumber(e.to[k])
    at, bucket = b == bucket and at + 1 or 0, b
    e.to[k] = segments[b] + at
  end
  return e.n - n
end

local function place_hash(module, segments, e)
  local description, n = { name = module:_title(), rows = module.zch_size, buckets = #segments - 1, segments = segments,
    spread = module.spread, input_hash_size = module.input_hash_size, on_miss = module.on_miss == "row" and "row" or "drop",
    device = "cpu" }, 0
  module:_describe_map(description, {})
  description.evict, description.ttl, description.read_only, description.n_features = C.PERI_EVICT_NONE, nil, nil, 0
  local map, by_id = mc_map.new(description), places(math.max(e.n, 1))
  for i = 0, e.n - 1 do
    local id = e.ids[e.order[i]]
    P.scope(function() map:remap({ Tensor.tensor({ id }, "i64", "cpu") }, true) end)
    by_id[i] = i
  end
  by_id = sort(by_id, e.n, function(x, y) return e.ids[x] < e.ids[y] end)
  local index = util.index_of(map:state_names())
  local ids, rows = array_of(map:state(index._hash_zch_identities))
  for row = 0, rows - 1 do
    local low, high = 0, e.n
    while low < high do
      local middle = math.floor((low + high) / 2)
      if e.ids[by_id[middle]] < ids[row] then low = middle + 1 else high = middle end
    end
    if ids[row] ~= -1 and low < e.n and e.ids[by_id[low]] == ids[row] then e.to[by_id[low]], n = row, n + 1 end
  end
  map:release()
  return e.n - n
end

-- -- what is loaded --------------------------------------------------------------------------------------------------------------------

-- Numbers of a state that an entry brings along.
local brought = util.index_of { "_mch_counts", "_mch_last_access_iter", "_hash_zch_metadata" }

--- The states of the new map, by name: those of one that knows nothing, with the entries that have a row.
local function new_states(module, states, e)
  local map, result = module:_new_map { device = "cpu" }, {}
  for name, i in util.ordered(util.index_of(map:state_names())) do
    local shape, dtype, numbers
    P.scope(function()
      local t = map:state(i)
      shape, dtype, numbers = t:shape(), t:dtype(), array_of(t)
    end)
    local old, n = brought[name] and states[name] and array_of(states[name]), 1
    for k = 0, e.n - 1 do
      local to = e.to[k]
      if to >= 0 then
        if name == "_mch_sorted_raw_ids" or name == "_hash_zch_identities" then numbers[to] = e.ids[k]
        elseif name == "_mch_remapped_ids_mapping" then numbers[to] = to
        elseif old then numbers[to] = old[e.at[k]] end
      end
    end
    for _, size in ipairs(shape) do n = n * size end
    result[name] = P.lasting(function()
      return Tensor.from_memory(ffi.cast("const int64_t *", numbers), { n }, "i64", "cpu"):reshape(shape):to(dtype)
    end)
  end
  if states._current_iter_tensor then result._current_iter_tensor = states._current_iter_tensor end
  map:release()
  return result
end

--- from[new row] = old row, or -1.
local function rows_from(module, e, segments, old_segments)
  local from = longs(math.max(module.zch_size, 1))
  for row = 0, module.zch_size - 1 do from[row] = -1 end
  for k = 0, e.n - 1 do
    if e.to[k] >= 0 then from[e.to[k]] = e.rows and e.rows[e.at[k]] or e.at[k] end
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
  for state, tensor in util.ordered(new_states(module, states, list)) do dict[prefix .. state] = tensor end
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
  return ("table '%s' had %d rows and has %d: %d of %d ids are in it%s"):format(name, before, module.zch_size, list.n - left, list.n,
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
