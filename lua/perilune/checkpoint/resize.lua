-- resize.lua: tables of raw ids (managed collision) into tables of other sizes, or of other buckets. What is loaded
-- then is, in place of what the checkpoint has, what this file makes of it: a map of the new size, and rows of weights
-- and states at the places of their ids.
--
-- Which ids fit: those that the table's own eviction policy would evict last. MCH: in each new bucket the ids with the
-- best scores, of equal ones the smaller id. Hash: ids get rows as new ones do (the first free one from their home row
-- on, at most max_probe away), in the order of their times, the longest first (tables without times: in the order of
-- their rows). Ids that do not fit are left out and counted. Rows without an id begin as ever when an id gets them. The
-- row that ids without a row share is that of the bucket at the same place.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local StoredTensor = require "perilune.tensor.stored"
local Fit = require "perilune.checkpoint.fit"
local maps = require "perilune.checkpoint.maps"
local mc_map = require "perilune.embed.mc_map"

local M = {}

local MAPPING = "_mch_remapped_ids_mapping"

--- The numbers of a small state, as an array and how many.
local function array_of(x)
  local n, copy
  P.scope(function()
    local memory
    memory, n = (Tensor.is(x) and x:to(nil, "cpu") or x:tensor "cpu"):to("i64"):contiguous():read()
    copy = ffi.new("int64_t[?]", math.max(n, 1))
    ffi.copy(copy, memory, 8 * n)
  end)
  return copy, n
end

local function size_of(x) return Tensor.is(x) and x:shape() or x:size() end

-- -- what is loaded ---------------------------------------------------------------------------------------------------

--- The states of the new map by name. like: a map of the same table.
local function new_states(fit, like, states)
  local result, by_row, rows = {}, {}, fit.segments[#fit.segments]
  for name, i in util.ordered(util.index_of(like:state_names())) do
    if not mc_map._is_by_row(name) then result[name] = P.lasting(like.state, like, i)
    else
      local size, dtype = like:_describe(i)
      local old = fit.stored[name]
      size[1] = rows
      by_row[name] = name == MAPPING and StoredTensor { size = size, dtype = "i64", read = function(region, tensor)
        local first = region.offset[1]
        P.scope(function()
          tensor:copy(Tensor.arange(first, first + region.size[1], 1, "i64", "cpu"):reshape(region.size))
        end)
      end } or fit.gather:stored(mc_map._initial[name] and name or "ids", size, dtype, function()
        if old then old:verify(0, old:size(1)) end
      end)
    end
  end
  for name, x in util.ordered(maps.of_rows(by_row, fit.kind == "mch" and fit.segments or nil)) do result[name] = x end
  if states._current_iter_tensor then result._current_iter_tensor = states._current_iter_tensor
  elseif result._current_iter_tensor then result._current_iter_tensor:fill(0) end
  return result
end

--- A stored tensor of rows with other rows: each is that of `stored` which its id had, and zeros where no id had one.
local function moved(stored, fit)
  local size = size_of(stored)
  size[1] = fit.segments[#fit.segments]
  return StoredTensor { size = size, dtype = stored:dtype(), read = function(region, tensor)
    local n, r = region.size[1], 0
    while r < n do
      local w = fit.gather:window(region.offset[1] + r)
      local from = w.from + (region.offset[1] + r - w.first)
      local first, last, count = tonumber(from[0]), math.min(n - r, w.past - region.offset[1] - r), 1
      while count < last and from[count] == (first < 0 and -1 or first + count) do count = count + 1 end
      local target = tensor:slice(1, r, r + count)
      if first < 0 then target:fill(0)
      elseif Tensor.is(stored) then target:copy(stored:slice(1, first, first + count))
      else
        local offset = util.copy(region.offset)
        offset[1] = first
        stored:read(offset, target, region.columns)
      end
      r = r + count
    end
  end }
end

-- -- the checkpoint's dicts -------------------------------------------------------------------------------------------

--- A map of a table: what it has of the table here, or, on ranks without rows, a new one of a bucket.
local function map_of(collection, module, name)
  local x = collection._tables and collection._tables[name]
  if not x then return module:_own_map() end
  return x.piece and x.piece.map or P.lasting(module._new_map, module, { device = "cpu", first_bucket = 0,
    n_buckets = 1 })
end

--- The module of a table, and its rows where buckets begin, of a collection of maps (unsharded, or over ranks); nil: it
--- has no such table.
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

--- The fit of a table whose map, `states`, was one of other rows; nil: it was of these, or of another kind, which is an
--- error of its own. The second value is a map of the table.
local function fit_of(collection, module, segments, states, name)
  local kind = states[Fit.ids_of.mch] and "mch" or states[Fit.ids_of.hash] and "hash"
  if not module or not kind or (kind == "hash") ~= (module.max_probe ~= nil) or not states._output_segments_tensor then
    return nil
  end
  local old, stored = segments_of(states), {}
  if table.concat(old, " ") == table.concat(segments, " ") then return nil end
  local like = map_of(collection, module, name)
  local names = util.index_of(like:state_names())
  for state in util.ordered(names) do
    local x = states[state]
    if mc_map._is_by_row(state) then
      stored[state] = StoredTensor.is(x) and x:size(1) == old[#old] and x:by_row() or nil
      if not stored[state] and (kind == "mch" or x) then return nil end
    end
  end
  return Fit { kind = kind, module = module, stored = stored, segments = segments, old = old, name = name,
    names = names, now = states._current_iter_tensor and tonumber((array_of(states._current_iter_tensor))[0]) or 0 },
      like
end

--- One table: change the entries of the dicts of all parts. Returns what is to be said; nil: sizes and buckets are the
--- same.
local function resize(dicts, dict, path, name, collection)
  local prefix, states = ("%s._managed_collision_modules.%s."):format(path, name), {}
  for key, value in util.ordered(dict) do
    if type(key) == "string" and key:sub(1, #prefix) == prefix then states[key:sub(#prefix + 1)] = value end
  end
  local module, segments = module_of(collection, name)
  local fit, like = fit_of(collection, module, segments, states, name)
  if not fit then return nil end
  local before, after, kept = fit.old[#fit.old], module.zch_size, fit:count()
  for state, tensor in util.ordered(new_states(fit, like, states)) do dict[prefix .. state] = tensor end
  local parameter = "%." .. name:gsub("%p", "%%%0") .. "%.weight$"
  local root = path:match "^(.*)_managed_collision_collection$" or ""
  local function is_table(key)
    return type(key) == "string" and key:sub(1, #root) == root and key:sub(#root + 1):find "^_embedding_module"
      and key:find(parameter)
  end
  local function replace(map, key)
    local x = map[key]
    if (Tensor.is(x) or StoredTensor.is(x)) and size_of(x)[1] == before then map[key] = moved(x, fit) end
  end
  for _, d in util.ordered(dicts) do
    for key in util.ordered(d.dict) do
      if is_table(key) then replace(d.dict, key) end
    end
    for key, value in util.ordered(type(d.dict.state) == "table" and d.dict.state or {}) do
      for state in util.ordered(is_table(key) and type(value) == "table" and value or {}) do replace(value, state) end
    end
  end
  return ("table '%s' had %d rows and has %d: %d of %d ids are in it%s"):format(name, before, after, kept, fit.total,
    kept < fit.total and (", %d did not fit and are left out (docs/checkpoints.md)"):format(fit.total - kept) or "")
end

--- Fit the tables of raw ids of the models among `parts` to the sizes that they have here. Returns a list of what is to
--- be said. Local.
function M.fit(parts, dicts)
  local said = {}
  for _, part in ipairs(parts) do
    local d = dicts[part.name]
    for _, m in ipairs(d and part.module and (part.object.wraps and part.object.module or part.object):named_modules()
      or {}) do
      local collection = m.module
      local configs = (collection._tables and collection._configs or collection.managed_collision_modules)
        and collection.embedding_configs
      for _, t in ipairs(configs and collection:embedding_configs() or {}) do
        said[#said + 1] = resize(dicts, d.dict, m.path, t.name, collection)
      end
    end
  end
  return said
end

return M
