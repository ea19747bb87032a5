-- export: trained models as files that answer (docs/model_file.md).
--
--   local report = model:export("model.peri", { batches = held_out, tables = "int8" })
--   local file = peri.export.open "model.peri"
--   local answers = file:predict(batch)
local P = require "perilune.ffi"
local errors = require "perilune.errors"
local util = require "perilune.util"
local F = require "perilune.nn.functional"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local signature = require "perilune.signature"
local Module = require "perilune.nn.module"
local record = require "perilune.export.record"
local Lowering = require "perilune.export.lower"
local operations = require "perilune.export.operations"
local file = require "perilune.export.file"
local opened = require "perilune.export.open"
local compare = require "perilune.export.compare"

local M = { open = opened.open, follow = opened.follow, ordered = compare.ordered }

local arguments = {
  batches = util.required.list,       -- held-out batches, tables as the model is called with; of at least SAMPLES[2] samples the first
  call = util.optional,               -- function(model, batch) -> a tensor, or tensors by name; default: logits(batch), else model(batch)
  tables = "as they are",             -- dtype of all tables in the file, or { name = dtype, default = dtype }
  dense = "f32",                      -- dtype of the matrices of linear layers in the file: "f32" or "bf16"
  unknown = "refuse",                 -- ids without a row: "refuse" or "skip"
  optional = util.optional.list,      -- names of inputs that may be missing: an empty list, or zeros
  finite = true,                      -- NaN and infinities of dense inputs are refused
  name = "",                          -- of the model
  step = util.optional.number,        -- of its training
  allowed_ne = 0.001,                 -- how much larger the file's NE may be, as a part of the model's, where tables are rounded
  allowed_difference = util.optional.number, -- the largest difference of an answer that is allowed; default where nothing is rounded: 0
  probabilities = false,              -- the first output is a probability, not a logit
}

local SAMPLES = { 5, 11 } -- of the two batches that are recorded

-- -- batches ------------------------------------------------------------------------------------------------------------------------------

--- The first n samples of a KeyedJaggedTensor.
local function first_of(kjt, n)
  kjt = util.resolve(kjt):sync()
  local stride, keys = kjt:stride(), kjt:keys()
  local values, offsets = kjt:values(), kjt:offsets():to("i64"):to_list()
  local weights, parts, lengths = kjt:weights_or_none(), { {}, {} }, {}
  for k = 0, #keys - 1 do
    local from = k * stride
    for i = 1, n do lengths[#lengths + 1] = offsets[from + i + 1] - offsets[from + i] end
    local a, b = offsets[from + 1], offsets[from + n + 1]
    parts[1][k + 1] = values:slice(1, a, b)
    if weights then parts[2][k + 1] = weights:slice(1, a, b) end
  end
  local function joined(list) return #list > 0 and P.no_grad(F.cat, list, 1) or nil end
  return jagged.KeyedJaggedTensor { keys = keys, values = joined(parts[1]), weights = joined(parts[2]),
    lengths = Tensor.tensor(lengths, "i32", kjt:device()), stride = n }
end

--- The first n samples of a batch.
local function take(batch, n)
  local out = {}
  for key, value in pairs(batch) do -- luacheck: ignore
    if Tensor.is(value) then
      local t = util.resolve(value)
      out[key] = t:dim() > 0 and t:size(1) >= n and t:slice(1, 0, n):contiguous() or t
    elseif jagged.KeyedJaggedTensor.is(value) then out[key] = first_of(value, n)
    else out[key] = value end
  end
  return out
end

local function samples_of(func, batch)
  local n
  for _, value in util.ordered(signature.value(func, "a batch", batch, "table")) do
    if Tensor.is(value) and util.resolve(value):dim() > 0 then n = n or util.resolve(value):size(1) end
    if jagged.KeyedJaggedTensor.is(value) then n = n or util.resolve(value):stride() end
  end
  return n or P.fail(func .. ": a batch without tensors")
end

-- -- what the model is made of ------------------------------------------------------------------------------------------------------------

--- The module that is in a DistributedModelParallel, whose state has that module's names; else the model itself.
local function inner_of(model)
  local inner = rawget(model, "module")
  return rawget(model, "sharded") and Module.is(inner) and inner or model
end

local function default_call(model, batch)
  local inner = inner_of(model)
  if type(inner.logits) == "function" then return inner:logits(batch) end
  return model(batch)
end

--- The pooled collections of a model: { module =, path =, outputs = list of { name =, feature =, table =, pooling =, columns =, weighted =
--- } }, by the order of their columns.
local function collections_of(func, model)
  local list = {}
  for _, entry in ipairs(model:named_modules()) do
    local m = entry.module
    if type(m.embedding_bag_configs) == "function" then
      local names, outputs, weighted = m:embedding_names(), {}, m.is_weighted -- of sharded ones, a field
      if type(weighted) == "function" then weighted = m:is_weighted() end
      for _, config in ipairs(m:embedding_bag_configs()) do
        for _, feature in ipairs(config.feature_names) do
          local name = names[#outputs + 1]
          if name ~= feature and name ~= feature .. "@" .. config.name then
            P.fail(("%s: module '%s' orders its outputs in a way that is not known"):format(func, entry.path))
          end
          outputs[#outputs + 1] = { name = name, feature = feature, table = config.name, pooling = config.pooling:lower(),
            columns = config.embedding_dim, rows = config.num_embeddings, weighted = weighted, path = entry.path,
            module = m }
        end
      end
      list[#list + 1] = { module = m, path = entry.path, outputs = outputs }
    elseif type(m.embedding_configs) == "function" then
      P.fail(("%s: module '%s' is a %s, whose rows of ids have no form for inference yet"):format(func, entry.path, m.class_name))
    end
  end
  return list
end

--- Lower two recordings.
local function lower(first, second)
  local l = Lowering(first, second, SAMPLES)
  l.kjts = {}
  for i, input in ipairs(first.inputs) do
    local item, other = input.item, second.inputs[i].item
    if jagged.KeyedJaggedTensor.is(input.value) then
      l.kjts[item.id] = input.name
    elseif item.dtype == "f32" and item.shape[1] == SAMPLES[1] then
      l.of[item.id] = l:value(l:sample_shape(item.shape, other.shape), { dense = input.name })
    end
  end
  for i = 1, math.max(#first.entries, #second.entries) do
    local a, b = first.entries[i], second.entries[i]
    l.entry = a or b
    if not a or not b or a.func ~= b.func then
      l:fail("for %d samples the model does something else than for %d here ('%s')", SAMPLES[1], SAMPLES[2], b and b.func or "nothing")
    end
    l.other = b
    local make = operations[a.func]
    if make == nil then l:fail "has no form for inference" end
    l:attempt(make)
  end
  l.entry = false
  return l
end

--- Lower an entry. One that fails is an error only if something uses its result: losses, say, go across samples, and nobody asks for them.
function Lowering:attempt(make)
  local entry = self.entry
  local ok, why = pcall(make, self)
  if ok then return end
  if getmetatable(why) ~= P.Error then error(why, 0) end
  local function blame(item)
    if type(item) ~= "table" then return end
    if item.id then self.why[item.id] = why end
    for _, x in ipairs(item.list or {}) do blame(x) end
  end
  for _, r in ipairs(entry.results) do blame(r) end
end

--- The operations that the outputs need, in order, and the values that they use.
local function needed(l, outputs)
  local used, kept = {}, {}
  for _, o in ipairs(outputs) do used[o.value] = true end
  for i = #l.operations, 1, -1 do
    local o = l.operations[i]
    if used[o.out] then
      table.insert(kept, 1, o)
      for _, x in ipairs(o.inputs) do used[x] = true end
    end
  end
  local values = {}
  for old in pairs(used) do values[old] = l.values[old + 1] end -- luacheck: ignore
  return kept, values
end

--- How the rows of an output's table are read (file.lua), and their dtype.
local function weight_of(func, out, state, key)
  local m = out.module
  if type(m.table_rows) == "function" then
    return function(row, n) return m:table_rows(out.table, "weight", row, n) end, m:table_rows(out.table, "weight", 0, 0):dtype()
  end
  local weight = state()[key] or P.fail(("%s: the model's state has no '%s'"):format(func, key))
  return weight, weight:dtype()
end

--- The inputs of the file, and the tables: fills in the numbers that operations and values have for them.
local function inputs_of(func, a, kept, values, state_dict)
  local inputs, tables, by_name, by_table, rows = {}, {}, {}, {}, {}
  local optional = {}
  for _, name in ipairs(a.optional or {}) do optional[name] = true end
  local function input(name, key, fields)
    if by_name[name] and by_name[name].key ~= key then P.fail(("%s: two inputs of the name '%s'"):format(func, name)) end
    if not by_name[name] then
      inputs[#inputs + 1] = fields
      by_name[name] = { index = #inputs - 1, key = key, fields = fields }
      if optional[name] then fields[#fields + 1] = { "optional", true } end
      optional[name] = nil
    end
    return by_name[name]
  end
  for _, v in util.ordered(values) do
    if v.dense then
      v.input = input(v.dense, v.dense, file.object({ "name", v.dense }, { "kind", "dense" }, { "columns", v.columns },
        { "finite", a.finite })).index
    end
  end
  for _, o in ipairs(kept) do
    for _, b in ipairs(o.bags or {}) do
      local out = b.out
      rows[b.feature] = math.min(rows[b.feature] or math.huge, out.rows)
      local key = ("%s.embedding_bags.%s.weight"):format(out.path, out.table)
      if out.path == "" then key = key:sub(2) end
      if not by_table[key] then
        local weight, own = weight_of(func, out, state_dict, key)
        local dtype = type(a.tables) == "table" and (a.tables[out.table] or a.tables.default) or a.tables
        if dtype == nil or dtype == "as they are" or type(dtype) == "table" then dtype = own end
        if not file.table_dtypes[dtype] then
          P.fail(("%s: table '%s' as '%s', allowed: f32, f16, bf16, int8, int4, fp8"):format(func, out.table, tostring(dtype)))
        end
        tables[#tables + 1] = { name = out.table, weight = weight, rows = out.rows, columns = out.columns, dtype = dtype, source = key,
          rounded = dtype ~= own and dtype ~= "f32" }
        by_table[key] = #tables - 1
      end
      b.index = by_table[key]
    end
  end
  for _, o in ipairs(kept) do
    for _, b in ipairs(o.bags or {}) do
      b.input = input(b.feature, b.kjt, file.object({ "name", b.feature }, { "kind", "ids" }, { "rows", rows[b.feature] },
        { "unknown", a.unknown }, { "weighted", b.out.weighted }, { "finite", a.finite })).index
    end
  end
  local left = next(optional)
  if left then P.fail(("%s: optional names '%s', which is no input of the model"):format(func, tostring(left))) end
  return inputs, tables
end

-- -- exporting ----------------------------------------------------------------------------------------------------------------------------

local function allowed(func, a, report, tables)
  local rounded = a.dense ~= "f32"
  for _, t in ipairs(tables) do rounded = rounded or t.rounded end
  local most = a.allowed_difference or (not rounded and 0) or nil
  local equal = not most or report.difference <= most
  if not equal then
    P.fail(("%s: the file would answer otherwise than the model, by up to %.3g, allowed_difference: %.3g. Nothing was written\n%s")
      :format(func, report.difference, most, tostring(report)))
  end
  local good = not report.model or not report.file or report.file.ne <= report.model.ne * (1 + a.allowed_ne)
  if not good then
    P.fail(("%s: the file loses more than allowed_ne = %g allows. Nothing was written\n%s"):format(func, a.allowed_ne,
      tostring(report)))
  end
end

local function outputs_of(l, trace)
  return util.map(trace.outputs, function(o)
    local value = l.of[o.item.id]
    if not value then
      if l.why[o.item.id] then error(l.why[o.item.id], 0) end
      l:fail("the model's result '%s' has no form for inference", o.name)
    end
    return { name = o.name, value = value.index }
  end)
end

local function recorded(model, call, a, collections)
  local traces = {}
  for i, n in ipairs(SAMPLES) do traces[i] = record(model, call, take(a.batches[1], n), collections) end
  local l = lower(traces[1], traces[2])
  local outputs = outputs_of(l, traces[1])
  local kept, values = needed(l, outputs)
  return kept, values, outputs, traces
end

--- The names of a model's parameters and buffers, by the addresses of what their handles point to.
local function names_of(model)
  local names = {}
  for _, entry in ipairs(model:named_state()) do names[util.address(util.resolve(entry.tensor))] = entry.name end
  return names
end

local function export(func, model, path, a)
  local call = a.call or default_call
  local collections = collections_of(func, inner_of(model))
  local kept, values, outputs, traces = recorded(model, call, a, collections)
  local inputs, tables = inputs_of(func, a, kept, values, function() return model:state_dict() end)
  local rank = P.state.world and P.state.world:rank() or 0
  local writer = file.Writer(path, rank, a.dense, names_of(inner_of(model)))
  local ok, report = pcall(function()
    local fresh = file.write { writer = writer, operations = kept, values = values, inputs = inputs, outputs = outputs, tables = tables,
      name = a.name, step = a.step }
    for _, t in ipairs(traces) do t:forget() end
    local function answers(batch)
      local result = util.resolve(P.no_grad(call, model, batch))
      return Tensor.is(result) and { logits = result } or result
    end
    if rank ~= 0 then
      for _, batch in ipairs(a.batches) do compare.ordered(answers, batch) end
      return nil
    end
    local r = compare.run(answers, M.open(fresh, { verify = true }), a.batches, a.probabilities)
    allowed(func, a, r, tables)
    writer:publish()
    return r
  end)
  writer:release()
  local world = P.state.world
  if world and world:size() > 1 then -- what rank 0 refuses is refused on all
    for r, said in ipairs(world:all_gather_object(not ok and errors.describe(report), func)) do
      if said and ok then P.fail(("%s: rank %d: %s"):format(func, r - 1, said)) end
    end
  end
  if not ok then error(report, 0) end
  return report
end

--- Write `model` as a model file, on rank 0; collective where it is spread over ranks. Its answers for the held-out batches are compared
--- with the model's before the file gets its name. Returns the report of compare.run, on rank 0.
function M.save(model, path, options)
  local func = "export"
  local a = util.named(func, options, arguments)
  if a.unknown ~= "refuse" and a.unknown ~= "skip" then
    P.fail(("%s: unknown is '%s', allowed: refuse, skip"):format(func, tostring(a.unknown)))
  end
  util.one_of(func, "dense", a.dense, { "f32", "bf16" })
  if #a.batches == 0 or samples_of(func, a.batches[1]) < SAMPLES[2] then
    P.fail(("%s: batches are the held-out batches to compare on; the first one needs at least %d samples"):format(func, SAMPLES[2]))
  end
  if P.state.autocast then P.fail(func .. ": in an autocast region; a model file computes in f32") end
  local training = model.training
  model:eval()
  local ok, report = pcall(function() return P.scope(export, func, model, path, a) end)
  model:train(training)
  if not ok then error(report, 0) end
  return report
end

signature.check("export.", M, { save = "model: Module, path: string, options: table?" })

return util.face("peri.export", M)
