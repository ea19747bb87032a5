-- export/budget.lua: dtypes of tables so that a model file is no larger than it may be, and its answers lose as little
-- as can be.
--
-- For each table, and each dtype that is smaller than its own, a small file is written in which that table alone is
-- rounded, with just the rows that some held-out samples use; the mean square by which its answers differ is what that
-- dtype loses. Then, from what the tables are, the step that loses least for each byte that it saves is taken, again
-- and again, until the file is small enough.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local F = require "perilune.nn.functional"
local file = require "perilune.export.file"
local opened = require "perilune.export.open"

local M = {}

local MOST_SAMPLES = 1024
local CANDIDATES = { "f16", "int8", "fp8", "int4" } -- of tables of numbers

local numbers = { f32 = true, f16 = true, bf16 = true }

-- -- small files ------------------------------------------------------------------------------------------------------

--- Which tables share ids: feature -> its group; table's number -> its group. A group is { features and tables that are
--- joined by bags }.
local function groups_of(operations)
  local of_table, of_feature = {}, {}
  local function join(a, b)
    if a == b then return a end
    for _, from in ipairs { of_table, of_feature } do
      for key, group in pairs(from) do -- luacheck: ignore
        if group == b then from[key] = a end
      end
    end
    return a
  end
  for _, o in ipairs(operations) do
    for _, b in ipairs(o.bags or {}) do
      local group = of_table[b.index] or of_feature[b.feature] or {}
      if of_feature[b.feature] then group = join(group, of_feature[b.feature]) end
      of_table[b.index], of_feature[b.feature] = group, group
      group.raw = group.raw or b.map ~= nil
    end
  end
  return of_table, of_feature
end

--- f(key, values as a list, first, last) for the features of the KeyedJaggedTensors of a batch.
local function each_feature(batch, f)
  for _, value in util.ordered(batch) do
    if jagged.KeyedJaggedTensor.is(value) then
      local kjt = util.resolve(value):sync()
      local ids, edges = kjt:values():to_list(), kjt:offset_per_key()
      for k, key in ipairs(kjt:keys()) do f(key, ids, edges[k] + 1, edges[k + 1]) end
    end
  end
end

--- The ids of each group, ascending, and where each stands there.
local function note_ids(batches, of_feature)
  for _, batch in ipairs(batches) do
    each_feature(batch, function(key, ids, first, last)
      local group = of_feature[key]
      if not group or group.raw then return end
      group.ids, group.at = group.ids or {}, group.at or {}
      for i = first, last do
        local id = tonumber(ids[i])
        if id >= 0 and not group.at[id] then
          group.at[id] = true
          group.ids[#group.ids + 1] = id
        end
      end
    end)
  end
  for _, group in pairs(of_feature) do -- luacheck: ignore
    if group.ids and not group.sorted then
      table.sort(group.ids)
      for i, id in ipairs(group.ids) do group.at[id] = i - 1 end
      group.sorted = true
    end
  end
end

--- A copy of the batch in which each id is replaced by its row in the small file: its index, from 0, among the group's
--- ids (note_ids). Features without a group, and ids that are not in it, stay as they are.
local function with_small_ids(batch, of_feature)
  local result = util.copy(batch)
  for name, value in util.ordered(batch) do
    if jagged.KeyedJaggedTensor.is(value) then
      local kjt, list = util.resolve(value):sync(), {}
      each_feature({ value }, function(key, ids, first, last)
        local group = of_feature[key]
        for i = first, last do list[i] = group and group.at and group.at[tonumber(ids[i])] or ids[i] end
      end)
      result[name] = kjt:with_values(Tensor.tensor(list, "i64", kjt:device()))
    end
  end
  return result
end

--- The rows of a table that a list of ids (ascending) names, f32.
local function gathered(weight, ids)
  local parts, from = {}, 1
  while from <= #ids do
    local past = from + 1
    while past <= #ids and ids[past] == ids[past - 1] + 1 do past = past + 1 end
    local row, n = ids[from], past - from
    parts[#parts + 1] = (Tensor.is(weight) and weight:slice(1, row, row + n) or weight(row, n)):detach():to("f32",
      "cpu"):contiguous()
    from = past
  end
  return P.no_grad(F.cat, parts, 1)
end

--- The tables and inputs of the small files.
local function small_parts(p, of_table, of_feature)
  local rows_of = {}
  local tables = util.map(p.tables, function(t, i)
    local group, small = of_table[i - 1], util.copy(t)
    if not group or not group.ids or not numbers[t.dtype] then return small end
    local ids = {}
    for _, id in ipairs(group.ids) do
      if id < t.rows then ids[#ids + 1] = id end
    end
    local rows = #ids > 0 and gathered(t.weight, ids) or Tensor.zeros({ 1, t.columns }, "f32", "cpu")
    P.keep(rows)
    small.rows, small.weight = rows:size(1), rows
    return small
  end)
  for _, o in ipairs(p.operations) do
    for _, b in ipairs(o.bags or {}) do
      rows_of[b.feature] = math.min(rows_of[b.feature] or math.huge, tables[b.index + 1].rows)
    end
  end
  local inputs = util.map(p.inputs, function(fields)
    local copy, name = { ordered = true }, nil
    for i, field in ipairs(fields) do
      if field[1] == "name" then name = field[2] end
      copy[i] = field[1] == "rows" and of_feature[name] and { "rows", rows_of[name] } or field
    end
    return copy
  end)
  return tables, inputs
end

--- Answers, as lists of numbers, of a small file with these tables, and the file's bytes beside tables.
local function answers_of(p, tables, inputs, batches)
  local writer = file.Writer(p.path, 0, p.dense, p.names, p.trace)
  local ok, result, others = pcall(function()
    local model = opened.open(file.write { writer = writer, operations = p.operations, values = p.values,
      inputs = inputs, outputs = p.outputs, tables = tables, maps = p.maps, lists = p.lists, name = "", step = 0 })
    local list = {}
    for _, batch in ipairs(batches) do
      for name, t in util.ordered((opened.answers(model, batch, true))) do
        list[name] = list[name] or {}
        -- no lengths of lists
        for _, x in ipairs(t:dtype() == "f32" and t:reshape(-1):to_list() or {}) do table.insert(list[name], x) end
      end
    end
    local d = model:describe()
    model:release()
    return list, d.bytes - d.table_bytes
  end)
  writer:release()
  if not ok then error(result, 0) end
  return result, others
end

--- The mean square of differences, for each output in units of its own spread.
local function loss_of(exact, other)
  local loss = 0
  for name, x in util.ordered(exact) do
    local sum, mean, spread, y = 0, 0, 0, other[name]
    for _, v in ipairs(x) do mean = mean + v / #x end
    for i, v in ipairs(x) do sum, spread = sum + (v - y[i]) ^ 2, spread + (v - mean) ^ 2 end
    loss = loss + sum / math.max(spread, 1e-30)
  end
  return loss == loss and loss or math.huge
end

--- For each table { dtype = { bytes =, loss = } } of all that it can be.
local function options_of(p, batches)
  local of_table, of_feature = groups_of(p.operations)
  note_ids(batches, of_feature)
  local tables, inputs = small_parts(p, of_table, of_feature)
  local small = util.map(batches, function(b) return with_small_ids(b, of_feature) end)
  local exact, others = answers_of(p, tables, inputs, small)
  return util.map(p.tables, function(t, i)
    local own = t.rows * file.row_bytes(t.dtype, t.columns)
    local list = { [t.dtype] = { bytes = own, loss = 0 } }
    for _, dtype in ipairs(numbers[t.dtype] and CANDIDATES or {}) do
      local bytes = t.rows * file.row_bytes(dtype, t.columns)
      if bytes < own and not file.refusal(tables[i], dtype) then
        local rounded = util.copy(tables)
        rounded[i] = util.copy(tables[i])
        rounded[i].dtype = dtype
        list[dtype] = { bytes = bytes, loss = loss_of(exact, (answers_of(p, rounded, inputs, small))) }
      end
    end
    return list
  end), others
end

-- -- choosing ---------------------------------------------------------------------------------------------------------

--- The step that loses least for each byte that it saves: table's number and dtype; nil: there is none.
local function best_step(options, now)
  local best, which, to
  for i, list in ipairs(options) do
    for dtype, o in util.ordered(list) do
      local saved = list[now[i]].bytes - o.bytes
      local price = saved > 0 and (o.loss - list[now[i]].loss) / saved
      if price and (not best or price < best) then best, which, to = price, i, dtype end
    end
  end
  return which, to
end

--- Choose the dtypes of p.tables so that the file has at most p.size bytes. p: what file.write takes, and batches =,
--- names =, trace =, dense =, path = (of small files, which are not published). Returns what was chosen, in words.
function M.choose(func, p)
  local options, others = options_of(p, p.batches)
  local most = p.size - others - 128 * #p.tables - 1024 -- alignment, and a header that is longer
  local now, bytes = util.map(p.tables, function(t) return t.dtype end), 0
  for i, list in ipairs(options) do bytes = bytes + list[now[i]].bytes end
  while bytes > most do
    local i, dtype = best_step(options, now)
    if not i then
      P.fail(("%s: size %d bytes, but with all tables as small as can be the file has some %d"):format(func, p.size,
        bytes + p.size - most))
    end
    if file.refusal(p.tables[i], dtype) then options[i][dtype] = nil -- rows that the samples have not
    else
      bytes = bytes - options[i][now[i]].bytes + options[i][dtype].bytes
      now[i] = dtype
    end
  end
  local lines = {}
  for i, t in ipairs(p.tables) do
    local own, o = t.dtype, options[i][now[i]]
    t.rounded, t.dtype = t.rounded or now[i] ~= own, now[i]
    lines[i] = ("table %s: %s, %d bytes%s"):format(t.name, t.dtype, o.bytes, now[i] ~= own
      and (", not %s; by itself that changes answers by %.2g of their spread"):format(own, math.sqrt(o.loss)) or "")
  end
  return table.concat(lines, "\n")
end

M.MOST_SAMPLES = MOST_SAMPLES

return M
