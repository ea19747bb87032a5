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
local Gather = require "perilune.checkpoint.gather"
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

-- Rows of a table of which so many are read at once (bytes), where one of NEAR of them is wanted at least.
local BLOCK_BYTES, NEAR = 2 ^ 21, 16
local data_out = ffi.new "void *[1]"

--- Rows [row, row + n) of `stored` into `target`, which has as many. region: what of them is wanted.
local function copy_rows(stored, row, n, target, region)
  if Tensor.is(stored) then return target:copy(stored:slice(1, row, row + n)) end
  local offset = util.copy(region.offset)
  offset[1] = row
  stored:read(offset, target, region.columns)
end

--- Rows [first, past) of `target`, of which row r lay at from[r] (-1: nowhere), run by run of rows that lay one after
--- the other.
local function fill_by_runs(stored, from, first, past, target, region)
  while first < past do
    local row, n = tonumber(from[first]), 1
    while first + n < past and from[first + n] == (row < 0 and -1 or row + n) do n = n + 1 end
    P.scope(function()
      local rows = target:slice(1, first, first + n)
      if row < 0 then rows:fill(0) else copy_rows(stored, row, n, rows, region) end
    end)
    first = first + n
  end
end

--- Sort the new rows [0, n) by the block of `each` stored rows that has their contents; from[r] is the stored row of
--- new row r, -1 if it has none, and then r is left out. Returns a list `order` of new rows and a list `starts`: those
--- of block b are order[starts[b]] to order[starts[b + 1] - 1]; and a function that gives their memory back.
local function by_block(from, n, each, blocks)
  local memory, room = Gather.room_for(math.ceil(n / 2))
  local order, starts = ffi.cast("int32_t *", room), ffi.new("int32_t[?]", blocks + 1)
  for r = 0, n - 1 do
    local b = math.floor(tonumber(from[r]) / each)
    if b >= 0 then starts[b] = starts[b] + 1 end
  end
  for b = 1, blocks do starts[b] = starts[b] + starts[b - 1] end
  for r = n - 1, 0, -1 do
    local b = math.floor(tonumber(from[r]) / each)
    if b >= 0 then
      starts[b] = starts[b] - 1
      order[starts[b]] = r
    end
  end
  return order, starts, function() memory:release() end
end

--- Fill rows of a window with the numbers that the ids of these rows have in `stored`, a state in the order of rows.
--- to: the window's numbers of it, from row `row` on, n of them, which are in the span.
local function fill_numbers(span, stored, to, row, n)
  local from, there = span.from + (row - span.first), stored:size(1)
  local blocks = math.ceil(there / Gather.BLOCK)
  local order, starts, release = by_block(from, n, Gather.BLOCK, blocks)
  for b = 0, blocks - 1 do
    local first = b * Gather.BLOCK
    if starts[b + 1] > starts[b] then
      local t, numbers = Gather.numbers_of(stored, first, math.min(first + Gather.BLOCK, there))
      for i = starts[b], starts[b + 1] - 1 do to[order[i]] = numbers[from[order[i]] - first] end
      t:release()
    end
  end
  release()
end

--- What gathers the states of the new map that have a number a row: that which the row's id had, and the number of
--- `initial` (by the state's name) where there is no id, or the checkpoint has no such state.
local function gather_of(fit, initial)
  local rows, bounds = fit.segments[#fit.segments], {}
  for row = 0, rows - 1, 2 * Gather.ROWS do bounds[#bounds + 1] = row end
  bounds[#bounds + 1] = rows
  return Gather(bounds, initial, function(w)
    local row = w.first
    while row < w.past do
      local span = fit:span(row)
      local n = math.min(w.past, span.past) - row
      for name in util.ordered(initial) do
        if fit.stored[name] then fill_numbers(span, fit.stored[name], w[name] + (row - w.first), row, n) end
      end
      row = row + n
    end
    for b = 2, fit.reserved and #fit.segments or 1 do -- the last row of a bucket is no id's
      local last = fit.segments[b] - 1
      for name, number in util.ordered(last >= w.first and last < w.past and initial or {}) do
        w[name][last - w.first] = number
      end
    end
  end)
end

--- The states of the new map by name. like: a map of the same table; is_left: name -> whether the state is left as it
--- is here.
local function new_states(fit, like, states, is_left)
  local result, by_row, rows, initial = {}, {}, fit.segments[#fit.segments], {}
  for _, name in ipairs(like:state_names()) do
    if mc_map._is_by_row(name) and name ~= MAPPING and not is_left(name) then
      initial[name] = mc_map._initial[name] or fit.initial.ids
    end
  end
  local gather = gather_of(fit, initial)
  for name, i in util.ordered(util.index_of(like:state_names())) do
    local left = is_left(name)
    if not left and not mc_map._is_by_row(name) then result[name] = P.lasting(like.state, like, i)
    elseif not left then
      local size, dtype = like:_describe(i)
      local old = fit.stored[name]
      size[1] = rows
      by_row[name] = name == MAPPING and StoredTensor { size = size, dtype = "i64", read = function(region, tensor)
        local first = region.offset[1]
        P.scope(function()
          tensor:copy(Tensor.arange(first, first + region.size[1], 1, "i64", "cpu"):reshape(region.size))
        end)
      end } or gather:stored(name, size, dtype, function()
        if old then old:verify(0, old:size(1)) end
      end)
    end
  end
  for name, x in util.ordered(maps.of_rows(by_row, fit.kind == "mch" and fit.segments or nil)) do result[name] = x end
  if states._current_iter_tensor then result._current_iter_tensor = states._current_iter_tensor
  elseif result._current_iter_tensor then result._current_iter_tensor:fill(0) end
  return result
end

--- Fill all n rows of `target`, whose memory on the host begins at `to`, where their stored rows lie far apart: a block
--- of `stored` is read as a whole, unless few of its rows are wanted.
local function fill_by_blocks(stored, from, n, target, to, region)
  local size, there = target:shape(), size_of(stored)[1]
  local bytes = target:numel() / n * tonumber(P.C.peri_dtype_size(P.dtype(target:dtype())))
  local each = math.max(1, math.floor(BLOCK_BYTES / bytes))
  local order, starts, release = by_block(from, n, each, math.ceil(there / each))
  target:fill(0) -- who watches the rows is told that all of them change
  for b = 0, math.ceil(there / each) - 1 do
    local first, begin, past = b * each, starts[b], starts[b + 1]
    size[1] = math.min(each, there - first)
    if (past - begin) * NEAR < size[1] then
      for i = begin, past - 1 do fill_by_runs(stored, from, order[i], order[i] + 1, target, region) end
    else
      P.scope(function()
        local block = Tensor.empty(size, target:dtype(), "cpu")
        copy_rows(stored, first, size[1], block, region)
        P.check(P.C.peri_tensor_data(Tensor.ptr(block), data_out))
        local data = ffi.cast("char *", data_out[0])
        for i = begin, past - 1 do
          local r = order[i]
          ffi.copy(to + r * bytes, data + (tonumber(from[r]) - first) * bytes, bytes)
        end
      end)
    end
  end
  release()
end

--- Fill all n rows of `target` from `stored`: run by run or, if there are many short runs, by blocks.
local function fill_rows(stored, from, n, target, region)
  local runs = 1
  for r = 1, n - 1 do
    if from[r] ~= from[r - 1] + 1 then runs = runs + 1 end
  end
  if runs * NEAR > n and target:numel() > 0 and target:is_contiguous()
    and P.C.peri_tensor_data(Tensor.ptr(target), data_out) >= 0 then
    return fill_by_blocks(stored, from, n, target, ffi.cast("char *", data_out[0]), region)
  end
  fill_by_runs(stored, from, 0, n, target, region)
end

--- A stored tensor of rows with other rows: each is that of `stored` which its id had, and zeros where no id had one.
local function moved(stored, fit)
  local size = size_of(stored)
  size[1] = fit.segments[#fit.segments]
  return StoredTensor { size = size, dtype = stored:dtype(), read = function(region, tensor)
    local n, r = region.size[1], 0
    while r < n do
      local span = fit:span(region.offset[1] + r)
      local count = math.min(n - r, span.past - region.offset[1] - r)
      P.scope(function()
        fill_rows(stored, span.from + (region.offset[1] + r - span.first), count, tensor:slice(1, r, r + count), region)
      end)
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
    now = states._current_iter_tensor and tonumber((array_of(states._current_iter_tensor))[0]) or 0 },
      like
end

--- One table: change the entries of the dicts of all parts. Returns what is to be said; nil: sizes and buckets are the
--- same. left: a set of names of tensors, of which `begin` is in front of the dict's.
local function resize(dicts, dict, path, name, collection, left, begin)
  local prefix, states = ("%s._managed_collision_modules.%s."):format(path, name), {}
  for key, value in util.ordered(dict) do
    if type(key) == "string" and key:sub(1, #prefix) == prefix then states[key:sub(#prefix + 1)] = value end
  end
  local module, segments = module_of(collection, name)
  local fit, like = fit_of(collection, module, segments, states, name)
  if not fit then return nil end
  local before, after, kept = fit.old[#fit.old], module.zch_size, fit:count()
  for state, tensor in util.ordered(new_states(fit, like, states, function(state)
    return left[begin .. prefix .. state]
  end)) do dict[prefix .. state] = tensor end
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

--- Fit the tables of raw ids of the models among `parts` to the sizes that they have here. left: a list of { as = name
--- of a tensor that is left as it is here }. Returns a list of what is to be said. Local.
function M.fit(parts, dicts, left)
  local said, set = {}, {}
  for _, entry in ipairs(left) do set[entry.as] = true end
  for _, part in ipairs(parts) do
    local d = dicts[part.name]
    for _, m in ipairs(d and part.module and (part.object.wraps and part.object.module or part.object):named_modules()
      or {}) do
      local collection = m.module
      local configs = (collection._tables and collection._configs or collection.managed_collision_modules)
        and collection.embedding_configs
      for _, t in ipairs(configs and collection:embedding_configs() or {}) do
        said[#said + 1] = resize(dicts, d.dict, m.path, t.name, collection, set, part.name .. "/")
      end
    end
  end
  return said
end

return M
