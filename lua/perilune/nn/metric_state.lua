-- metric_state.lua: what metrics have seen, as state dicts. Each rank has its own (`of_ranks`), and a checkpoint keeps
-- them all.
--
-- On as many ranks as before each rank goes on with its own, bit for bit. On others the ranks share out what all have
-- seen: lifetime sums of old rank i go to rank i mod n; entries of the windows, from the newest back, go to whoever has
-- fewest samples (of equally old ones that of the last rank counts as the newest). No entry is left out, so what all
-- ranks together say is what it was, whatever the sizes of ranks' windows: a rank forgets what is too old for its
-- window when it next sees samples.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local Tensor = require "perilune.tensor"
local StoredTensor = require "perilune.tensor.stored"

local M = {}

-- -- tensors and lists ------------------------------------------------------------------------------------------------

local function is_tensor(x) return Tensor.is(x) or StoredTensor.is(x) end
local function cpu_tensor(x) return Tensor.is(x) and x or x:tensor "cpu" end
local function shape_of(x) return Tensor.is(x) and x:shape() or x:size() end

--- The numbers of a tensor, or of one that is stored, as a list.
local function numbers(x)
  return P.scope(function() return cpu_tensor(x):to_list() end)
end

--- n entries of a list, those behind the first `from`.
local function slice(list, from, n)
  local part = {}
  for i = 1, n do part[i] = list[from + i] end
  return part
end

--- A copy of an array of n doubles as a tensor.
local function of_array(array, n) return Tensor.from_memory(ffi.cast("const double *", array), { n }, "f64", "cpu") end

--- An array of doubles from a tensor, with room for at least one.
local function to_array(x)
  local n = shape_of(x)[1]
  local array = ffi.new("double[?]", n + 1)
  P.scope(function() ffi.copy(array, (cpu_tensor(x):read()), n * 8) end)
  return array, n
end

-- -- what all have ----------------------------------------------------------------------------------------------------

--- Options on which the meaning of the numbers depends, and the class.
local function head(metric)
  local options = util.copy(metric.options)
  options.window_size, options.group = nil, nil
  return { class = metric.class_name, options = options }
end

local function check_field(metric, dict, field, ...)
  local x = dict[field]
  if x == nil then return nil end
  local wanted, shape = { ... }, is_tensor(x) and shape_of(x)
  local fits = shape and #shape == #wanted and x:dtype() == "f64"
  for d = 1, fits and #wanted or 0 do fits = fits and (wanted[d] < 0 or wanted[d] == shape[d]) end
  if fits then return nil end
  return ("'%s' of a state of %s is no f64 tensor [%s]"):format(field, metric.class_name,
    table.concat(util.map(wanted, function(n) return n < 0 and "any number" or tostring(n) end), ", "))
end

--- Why a dict is no state of this metric, as far as all metrics go; nil: it may be one.
local function check_head(metric, dict)
  local own = head(metric)
  if type(dict) ~= "table" or dict.class ~= own.class then
    return ("it is a state of %s, wanted one of %s"):format(type(dict) == "table" and tostring(dict.class)
      or "no metric", own.class)
  end
  local options = type(dict.options) == "table" and dict.options or {}
  for _, name in ipairs(util.keys(own.options)) do
    if options[name] ~= own.options[name] then
      return ("its %s is %s, that of this metric %s"):format(name, tostring(options[name]), tostring(own.options[name]))
    end
  end
end

local function same(x, y)
  for _, t in ipairs { x, y } do
    for _, field in ipairs(util.keys(t)) do
      local a, b = x[field], y[field]
      if a == nil or b == nil then return false end
      if field ~= "options" and field ~= "class" then
        local u, v = numbers(a), numbers(b)
        if #u ~= #v then return false end
        for i = 1, #u do
          if u[i] ~= v[i] then return false end
        end
      end
    end
  end
  return true
end

--- A metric that no rank shares: on other numbers of ranks it can go on if all ranks saw the same, or only the first
--- saw something.
local function merge_alone(metric, list, rank)
  local alike, first_only, empty = true, true, head(metric)
  for i = 2, #list do
    alike = alike and same(list[1], list[i])
    first_only = first_only and same(empty, list[i])
  end
  if alike or first_only and rank == 0 then return list[1] end
  if first_only then return empty end
  return nil, ("each of %d ranks had seen samples of its own (group = false), allowed: as many ranks"):format(#list)
end

--- An error unless these are arguments of a class's merge_state_dicts.
function M.check_merge(class_name, list, rank, size)
  local func = class_name .. ":merge_state_dicts"
  signature.value(func, "list", list, "list")
  util.integer(func, "size", size, 1)
  util.integer(func, "rank", rank, 0, size - 1)
end

--- merge_state_dicts of a class whose states are put together by merge(metric, list, rank, size).
local function merging(merge)
  return function(metric, list, rank, size)
    M.check_merge(metric.class_name, list, rank, size)
    for _, dict in ipairs(list) do
      local why = metric:check_state_dict(dict)
      if why then return nil, why end
    end
    if metric.options.group == false then return merge_alone(metric, list, rank) end
    if metric.options.group and metric.options.group:size() ~= size then
      return nil, "its group has other ranks than the checkpoint is loaded on, allowed: as many ranks as it was saved "
        .. "on"
    end
    return merge(metric, list, rank, size)
  end
end

--- The sum of a field over the states that fall to this rank; nil: none has it.
local function sum_of(list, field, rank, size)
  local total
  for i = rank + 1, #list, size do
    local part = list[i][field] and numbers(list[i][field])
    for k = 1, part and #part or 0 do
      total = total or {}
      total[k] = (total[k] or 0) + part[k]
    end
  end
  return total and Tensor.tensor(total, "f64", "cpu")
end

-- -- metrics of sums --------------------------------------------------------------------------------------------------

--- The entries of all windows that fall to this rank, oldest first: a list of { old rank (from 1), row (from 1),
--- samples }.
local function shared_out(counts, rank, size)
  local mine, has, most = {}, {}, 0
  for r = 0, size - 1 do has[r] = 0 end
  for _, list in ipairs(counts) do most = math.max(most, #list) end
  for age = 0, most - 1 do
    for i = #counts, 1, -1 do
      local list = counts[i]
      local row = #list - age
      if row >= 1 then
        local to = 0
        for r = 1, size - 1 do
          if has[r] < has[to] then to = r end
        end
        has[to] = has[to] + list[row]
        if to == rank then table.insert(mine, { i, row, list[row] }) end
      end
    end
  end
  local reversed = {}
  for k = #mine, 1, -1 do reversed[#reversed + 1] = mine[k] end
  return reversed
end

local function window_tensors(parts, counts, width)
  if #counts == 0 then return nil, nil end
  local flat = {}
  for _, part in ipairs(parts) do
    for k = 1, width do flat[#flat + 1] = part[k] end
  end
  return Tensor.tensor(flat, "f64", "cpu"):reshape(#counts, width), Tensor.tensor(counts, "f64", "cpu")
end

local function merge_sums(metric, list, rank, size)
  local result, width, counts = head(metric), metric.width, {}
  result.lifetime = sum_of(list, "lifetime", rank, size)
  for i, dict in ipairs(list) do counts[i] = dict.counts and numbers(dict.counts) or {} end
  local mine, by_old = shared_out(counts, rank, size), {}
  for k, entry in ipairs(mine) do
    by_old[entry[1]] = by_old[entry[1]] or {}
    table.insert(by_old[entry[1]], { k, entry[2] })
  end
  local parts = {}
  for i, entries in util.ordered(by_old) do
    local all = numbers(list[i].window)
    for _, e in ipairs(entries) do parts[e[1]] = slice(all, (e[2] - 1) * width, width) end
  end
  result.window, result.counts = window_tensors(parts, util.map(mine, function(entry) return entry[3] end), width)
  return result
end

--- Give the base of metrics of sums its state. Window: as in metrics.lua; place: this rank's size of the window.
function M.of_sums(class, Window, place)
  class.of_ranks, class.reads_stored, class.merge_state_dicts = true, true, merging(merge_sums)

  --- What this rank has seen: copies. Fields lifetime [width], window [entries, width], counts [entries]; none before
  --- the first sample.
  function class:state_dict()
    local dict, w = head(self), self.window
    if #self.lifetime > 0 then dict.lifetime = Tensor.tensor(self.lifetime, "f64", "cpu") end
    local parts, counts = {}, {}
    for i = w and w.first or 1, w and w.last or 0 do
      parts[#parts + 1], counts[#counts + 1] = w.parts[i], w.counts[i]
    end
    dict.window, dict.counts = window_tensors(parts, counts, self.width)
    return dict
  end

  --- What keeps load_state_dict(dict) from loading, in words; nil: nothing does. Changes nothing; not collective.
  function class:check_state_dict(dict)
    local entries = type(dict) == "table" and is_tensor(dict.counts) and shape_of(dict.counts)[1] or -1
    return check_head(self, dict) or check_field(self, dict, "lifetime", self.width)
      or check_field(self, dict, "counts", entries) or check_field(self, dict, "window", entries, self.width)
  end

  --- Go on with what such a dict says. Sums of a window that is smaller here lose what is oldest with the next samples.
  function class:load_state_dict(dict)
    local why = self:check_state_dict(dict)
    if why then P.fail(("%s:load_state_dict: %s"):format(self.class_name, why)) end
    self.lifetime, self.window = dict.lifetime and numbers(dict.lifetime) or {}, false
    if not (dict.lifetime or dict.counts) then return end
    self.window = Window(place(self))
    local counts, flat, width = dict.counts and numbers(dict.counts) or {}, dict.window and numbers(dict.window) or {},
      self.width
    for i, count in ipairs(counts) do self.window:restore(slice(flat, (i - 1) * width, width), count) end
  end
end

-- -- metrics of samples -----------------------------------------------------------------------------------------------

local FIELDS = { "predictions", "labels", "weights" }

local function merge_samples(metric, list, rank, size)
  local result, numbers_of, total = head(metric), {}, 0
  for _, field in ipairs(metric.sums) do result[field] = sum_of(list, field, rank, size) end
  for i, dict in ipairs(list) do
    numbers_of[i] = dict.predictions and shape_of(dict.predictions)[1] or 0
    total = total + numbers_of[i]
  end
  -- The samples of all, from the newest back in turns of the old ranks: the j-th falls to rank j mod size. Of this
  -- rank's: which old rank had them (from 1), and at which place.
  local mine, age, j, k = math.max(0, math.ceil((total - rank) / size)), 0, 0, 0
  local old, at = ffi.new("int32_t[?]", mine + 1), ffi.new("int32_t[?]", mine + 1)
  while j < total do
    for i = #list, 1, -1 do
      if age < numbers_of[i] then
        if j % size == rank then old[k], at[k], k = i, numbers_of[i] - 1 - age, k + 1 end
        j = j + 1
      end
    end
    age = age + 1
  end
  for _, field in ipairs(mine > 0 and FIELDS or {}) do
    local array = ffi.new("double[?]", mine)
    for i = 1, #list do -- one old rank after the other: no more than its window is in memory beside this rank's
      local from = numbers_of[i] > 0 and to_array(list[i][field])
      for s = 0, from and mine - 1 or -1 do
        if old[s] == i then array[mine - 1 - s] = from[at[s]] end
      end
    end
    result[field] = of_array(array, mine)
  end
  return result
end

--- Give the base of metrics that keep samples its state.
function M.of_samples(class, Samples, place)
  class.of_ranks, class.reads_stored, class.merge_state_dicts, class.sums = true, true, merging(merge_samples), {}

  --- What this rank has seen: copies. The samples of the window, oldest first, and sums of all samples (`sums` of the
  --- class names them).
  function class:state_dict()
    local dict, s = head(self), self.samples
    for k, field in ipairs(s and s.used > 0 and FIELDS or {}) do dict[field] = of_array(s:in_order(k), s.used) end
    for _, field in ipairs(s and self.sums or {}) do dict[field] = of_array(self[field], self.bins) end
    return dict
  end

  --- What keeps load_state_dict(dict) from loading, in words; nil: nothing does. Changes nothing; not collective.
  function class:check_state_dict(dict)
    local why, n = check_head(self, dict), -1
    if not why and is_tensor(dict.predictions) then n = shape_of(dict.predictions)[1] end
    for _, field in ipairs(FIELDS) do why = why or check_field(self, dict, field, n) end
    for _, field in ipairs(self.sums) do why = why or check_field(self, dict, field, self.bins) end
    return why
  end

  --- Go on with what such a dict says. A window that is smaller here has the newest samples from the next update on.
  function class:load_state_dict(dict)
    local why = self:check_state_dict(dict)
    if why then P.fail(("%s:load_state_dict: %s"):format(self.class_name, why)) end
    self.samples = false
    for _, field in ipairs(self.sums) do
      local values = dict[field] and numbers(dict[field]) or {}
      for bin = 0, self.bins - 1 do self[field][bin] = values[bin + 1] or 0 end
    end
    if not dict.predictions then return end
    self.samples = Samples(place(self), shape_of(dict.predictions)[1])
    local s, arrays = ffi.new "peri_metric_samples", {}
    for k, field in ipairs(FIELDS) do arrays[k] = to_array(dict[field]) end
    s.predictions, s.labels, s.weights, s.n = arrays[1], arrays[2], arrays[3], shape_of(dict.predictions)[1]
    self.samples:push(s)
  end
end

return M
