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
local collections = require "perilune.export.collections"
local file = require "perilune.export.file"
local opened = require "perilune.export.open"
local compare = require "perilune.export.compare"
local budget = require "perilune.export.budget"

local M = { open = opened.open, follow = opened.follow, ordered = compare.ordered }

local arguments = {
  batches = util.required,            -- held-out batches, a list or a loader; of at least SAMPLES[2] samples the first
  call = util.optional,               -- function(model, batch) -> a tensor, or tensors by name; default: logits(batch),
                                      -- else model(batch)
  tables = "as they are",             -- dtype of all tables in the file, or { name = dtype, default = dtype }
  dense = "f32",                      -- dtype of the matrices of linear layers in the file: "f32", "bf16", "int8";
                                      -- "bf16_products", "int8_products": what they are multiplied with is rounded, too
  size = util.optional,               -- the file has at most so many bytes: dtypes of tables are chosen for it; 2e9,
                                      -- "2G"
  unknown = "refuse",                 -- ids without a row: "refuse" or "skip"
  optional = util.optional.list,      -- names of inputs that may be missing: an empty list, or zeros
  finite = true,                      -- NaN and infinities of dense inputs are refused
  name = "",                          -- of the model
  step = util.optional.number,        -- of its training
  allowed_ne = 0.001,                 -- how much larger the file's NE may be, as a part of the model's, where tables
                                      -- are rounded
  allowed_difference = util.optional.number, -- the largest difference of an answer that is allowed; default where
                                             -- nothing is rounded: 0
  probabilities = false,              -- the first output is a probability, not a logit
}

local SAMPLES = { 5, 11 } -- of the two batches that are recorded

-- -- batches ----------------------------------------------------------------------------------------------------------

--- How many ids the first n samples of each key of a KeyedJaggedTensor have, and how many the key has in all.
local function counts_of(kjt, n)
  kjt = util.resolve(kjt):sync()
  local stride, offsets, list = kjt:stride(), kjt:offsets():to("i64"):to_list(), {}
  for k, key in ipairs(kjt:keys()) do
    local from = tonumber(offsets[(k - 1) * stride + 1])
    list[k] = { key = key, first = tonumber(offsets[(k - 1) * stride + n + 1]) - from,
      all = tonumber(offsets[k * stride + 1]) - from }
  end
  return list
end

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

-- numbers of a loader's batch that say how many samples it has (data/batch.lua)
local COUNTS = { rows = true, global_rows = true }

local samples_of

--- The first n samples of a batch. A tensor that is as long as the ids of a key are many, and not as samples are, has a
--- row for each id.
local function take(batch, n)
  local out, counts, samples = {}, {}, samples_of("export", batch)
  for _, value in util.ordered(batch) do
    if jagged.KeyedJaggedTensor.is(value) then
      for _, c in ipairs(counts_of(value, n)) do counts[c.all] = counts[c.all] or c.first end
    end
  end
  for key, value in pairs(batch) do -- luacheck: ignore
    if Tensor.is(value) then
      local t = util.resolve(value)
      local rows = t:dim() > 0 and t:size(1)
      local left = rows and rows ~= samples and counts[rows] or n
      out[key] = rows and rows >= left and t:slice(1, 0, left):contiguous() or t
    elseif jagged.KeyedJaggedTensor.is(value) then out[key] = first_of(value, n)
    else out[key] = COUNTS[key] and n or value end
  end
  return out
end

signature.kind("batches", "a list of batches or a loader", function(x)
  return type(x) == "table" or util.is_callable(x)
end)

--- Batches as a list: it is one, or gives the next one when it is called, as loaders do.
local function listed(batches)
  if not util.is_callable(batches) then return batches end
  local list = {}
  for batch in batches do list[#list + 1] = batch end
  return list
end

--- KeyedJaggedTensors know how many samples there are; tensors may have a row for each id, or each target.
function samples_of(func, batch)
  local n, rows
  for name, value in util.ordered(signature.value(func, "a batch", batch, "table")) do
    if Tensor.is(value) and util.resolve(value):dim() > 0 then rows = rows or util.resolve(value):size(1) end
    if jagged.KeyedJaggedTensor.is(value) then
      opened.refuse_variable(func, name, util.resolve(value))
      n = n or util.resolve(value):stride()
    end
  end
  return n or rows or P.fail(func .. ": a batch without tensors")
end

-- -- what the model is made of ----------------------------------------------------------------------------------------

--- The module that is in a DistributedModelParallel, whose state has that module's names; else the model itself.
local function inner_of(model)
  local inner = rawget(model, "module")
  return rawget(model, "sharded") and Module.is(inner) and inner or model
end

--- What a file answers for a batch when the user gave no `call`: the logits of the model, as a tensor or a table of
--- tensors. They come from its method `logits`, or else from its call, behind a loss if there is one.
local function call_for_logits(model, batch)
  local inner = inner_of(model)
  if type(inner.logits) == "function" then
    local answers, more = inner:logits(batch)
    if more ~= nil then
      P.fail("export: logits returns more than one result, of which a file would have the first only; wanted a tensor, "
        .. "or a table of tensors by name: { click = a, buy = b }")
    end
    return answers
  end
  local first, second = model(batch) -- models for pipelines return the loss first, and the logits behind it
  local function is_loss(x) return Tensor.is(x) and util.resolve(x):dim() == 0 end
  return is_loss(first) and Tensor.is(second) and second or first
end

--- A function that returns the lengths of a key's lists in all batches, as one list.
local function lengths_of(batches, field, k)
  return function()
    local list = {}
    for _, batch in ipairs(batches) do
      local kjt = util.resolve(batch[field]):sync()
      local stride, offsets = kjt:stride(), kjt:offsets():to("i64"):to_list()
      for i = (k - 1) * stride + 1, k * stride do list[#list + 1] = tonumber(offsets[i + 1] - offsets[i]) end
    end
    return list
  end
end

--- A function that returns, for each batch, its number of samples and the number of rows of its tensor batch[field].
local function rows_of(batches, field)
  return function()
    return util.map(batches, function(batch)
      return { samples = samples_of("export", batch), rows = util.resolve(batch[field]):size(1) }
    end)
  end
end

--- Turns two recordings of the model, with SAMPLES[1] and SAMPLES[2] samples, into the operations of a file. Two are
--- needed to see which sizes grow with the samples. Raises what has no form for inference. Returns the Lowering.
local function lower_recordings(first, second, batches)
  local l = Lowering(first, second, SAMPLES)
  l.kjts = {}
  for i, input in ipairs(first.inputs) do
    local item, other = input.item, second.inputs[i].item
    if jagged.KeyedJaggedTensor.is(input.value) then
      l.kjts[item.id] = input.name
      for k, c in ipairs(counts_of(input.value, SAMPLES[1])) do
        l:note_feature(c.key, input.name, { c.all, counts_of(second.inputs[i].value, SAMPLES[2])[k].all },
          lengths_of(batches, input.name, k))
      end
    elseif item.dtype == "i32" or item.dtype == "i64" then
      l.whole[item.id] = input.name
    elseif item.dtype == "f32" and item.shape[1] == SAMPLES[1] and util.product(item.shape) == 0 then
      -- a matrix without columns, as loaders give it whose data have no numbers: no answer depends on it
      l.why[item.id] = ("export: field '%s' has no columns, and a file takes nothing of it; leave it out of the model")
        :format(input.name)
    elseif item.dtype == "f32" and item.shape[1] == SAMPLES[1] and other.shape[1] == SAMPLES[2] then
      l.of[item.id] = l:value(l:sample_shape(item.shape, other.shape), { dense = input.name })
    elseif item.dtype == "f32" and #item.shape > 0 then
      l:note_numbers(item.id, { name = input.name, shapes = { item.shape, other.shape },
        batches = rows_of(batches, input.name) })
    end
  end
  for i = 1, math.max(#first.entries, #second.entries) do
    local a, b = first.entries[i], second.entries[i]
    l.entry = a or b
    if not a or not b or a.func ~= b.func then
      l:fail("for %d samples the model does something else than for %d here ('%s')", SAMPLES[1], SAMPLES[2], b
        and b.func or "nothing")
    end
    l.other, l.list, l.axis = b, nil, 1
    local make = operations[a.func]
    if make == nil then l:fail "has no form for inference" end
    l:attempt(make)
  end
  l.entry = false
  return l
end

--- Lower an entry. One that fails is an error only if something uses its result: losses, say, go across samples, and
--- nobody asks for them.
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

-- -- exporting --------------------------------------------------------------------------------------------------------

local PLACE = "an option of model:export, and a field of what the script of `perilune export --model` returns"

--- Refuse a file whose answers differ from the model's by more than allowed_difference, or whose NE is larger by more
--- than allowed_ne at any output that has labels.
local function check_report(func, a, report, tables)
  local rounded = a.dense ~= "f32"
  for _, t in ipairs(tables) do rounded = rounded or t.rounded end
  local most = a.allowed_difference or (not rounded and 0) or nil
  local equal = not most or report.difference <= most
  if not equal then
    P.fail(("%s: the file would answer otherwise than the model, by up to %.3g, allowed_difference: %.3g (%s%s). "
      .. "Nothing was written\n%s"):format(func, report.difference, most, PLACE,
      rounded and "; without it, a file that is rounded is judged by its NE alone" or "", tostring(report)))
  end
  for _, j in ipairs(report.judged) do
    local good = j.file.ne <= j.model.ne * (1 + a.allowed_ne)
    if not good then
      P.fail(("%s: the file loses more than allowed_ne = %g allows: the NE of its output '%s' is larger than the "
        .. "model's by %.3g of it; allowed: another dtype of tables or matrices, or a larger allowed_ne (%s). Nothing "
        .. "was written\n%s"):format(func, a.allowed_ne, j.name, j.file.ne / j.model.ne - 1, PLACE, tostring(report)))
    end
  end
end

local function outputs_of(l, trace)
  local made = {}
  for _, o in ipairs(l.operations) do made[o.out] = true end
  return util.map(trace.outputs, function(o)
    local value = l.of[o.item.id]
    if not value then
      if l.why[o.item.id] then error(l.why[o.item.id], 0) end
      l:fail("the model's result '%s' has no form for inference", o.name)
    end
    if (value.axis or 1) > 1 then
      l:fail("the model's result '%s' has samples as its dimension %d, wanted: as the first (transpose)", o.name,
        value.axis)
    end
    l:refuse_whole_numbers(value, ("the model's result '%s'"):format(o.name))
    if not made[value.index] then -- a field of the batch as it is: outputs are results of operations
      local columns = l.values[value.index + 1].columns
      l.list, l.axis = value.list or false, 1
      value = l:op("copy", { 1, columns }, { inputs = { value.index }, sizes = { 1, 0, columns, 1 } })
    end
    return { name = o.name, value = value.index }
  end)
end

--- What the model does with two batches, lowered. traces: takes the recordings, which the caller forgets.
local function recorded(model, call, a, used, traces)
  local inner = inner_of(model)
  local own = a.call or type(inner.logits) == "function" and inner.logits or inner.forward
  if type(own) ~= "function" then own = call end -- an object that can be called
  for _, n in ipairs(SAMPLES) do
    compare.ordered(record, model, call, take(a.batches[1], n), used, own, traces)
  end
  local l = lower_recordings(traces[1], traces[2], a.batches)
  local outputs = outputs_of(l, traces[1])
  local kept, values = l:needed(outputs)
  return kept, values, outputs
end

--- The first samples of the batches, for choosing dtypes.
local function some_of(batches)
  local list, n = {}, 0
  for _, batch in ipairs(batches) do
    local samples = math.min(samples_of("export", batch), budget.MOST_SAMPLES - n)
    if samples > 0 then list[#list + 1] = take(batch, samples) end
    n = n + samples
  end
  return list
end

--- A batch without those KeyedJaggedTensors of which the model asks for nothing: another field may have features of the
--- same names. fields: the field that each input is of, by its name.
local function given(batch, fields)
  local out = {}
  for field, value in util.ordered(batch) do
    local used = not jagged.KeyedJaggedTensor.is(value)
    for _, key in ipairs(used and {} or util.resolve(value):keys()) do
      used = used or fields[key] == field or fields[key] == key
    end
    out[field] = used and value or nil
  end
  return out
end

local function export(func, model, path, a, traces)
  local call = a.call or call_for_logits
  local used = collections.list_collections(func, inner_of(model))
  local kept, values, outputs = recorded(model, call, a, used, traces)
  local inputs, tables, maps, lists, fields = collections.inputs(func, a, kept, values, function()
    return model:state_dict()
  end)
  local names = file.Names(inner_of(model):named_state())
  collections.items(func, a, kept, tables, names)
  local rank = P.state.world and P.state.world:rank() or 0
  local writer = file.Writer(path, rank, a.dense, names, traces[1])
  local function asked(batch) return given(batch, fields) end
  local ok, report = pcall(function()
    local chosen = a.size and budget.choose(func, { size = util.bytes(func, a.size), operations = kept,
      values = values, inputs = inputs, outputs = outputs, tables = tables, maps = maps, lists = lists,
      batches = util.map(some_of(a.batches), asked), path = path, dense = a.dense, names = names,
      trace = traces[1] })
    local fresh = file.write { writer = writer, operations = kept, values = values, inputs = inputs, outputs = outputs,
      tables = tables, maps = maps, lists = lists, name = a.name, step = a.step }
    for _, t in ipairs(traces) do t:forget() end
    local function answers(batch)
      local result = util.resolve(P.no_grad(call, model, batch))
      return Tensor.is(result) and { logits = result } or result
    end
    if rank ~= 0 then
      for _, batch in ipairs(a.batches) do compare.ordered(answers, batch) end
      return nil
    end
    local r = compare.run(answers, M.open(fresh, { verify = true }), a.batches, a.probabilities, asked)
    r.chosen, r.loose = chosen or false, writer.loose
    check_report(func, a, r, tables)
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

--- Refuse options of other kinds and out of range.
local function check_options(func, a)
  if a.unknown ~= "refuse" and a.unknown ~= "skip" then
    P.fail(("%s: unknown is '%s', allowed: refuse, skip"):format(func, tostring(a.unknown)))
  end
  if a.size and (P.state.world and P.state.world:size() > 1) then
    P.fail(func .. ": size with a model over ranks, allowed: on one rank, of a checkpoint (perilune export)")
  end
  if a.size and a.tables ~= "as they are" then P.fail(func .. ": size and tables, allowed: one of them") end
  util.one_of(func, "dense", a.dense, { "f32", "bf16", "bf16_products", "int8", "int8_products" })
  signature.value(func, "name", a.name, "string")
  signature.value(func, "step", a.step or 0, "count")
  for _, name in ipairs { "finite", "probabilities" } do signature.value(func, name, a[name], "boolean") end
  for _, name in ipairs { "allowed_ne", "allowed_difference" } do
    local most = signature.value(func, name, a[name] or 0, "number")
    if most < 0 or most ~= most then
      P.fail(("%s: %s is %g, allowed: 0 and more"):format(func, name, a[name]))
    end
  end
end

--- Write `model` as a model file, on rank 0; collective where it is spread over ranks. Its answers for the held-out
--- batches are compared with the model's before the file gets its name. Returns the report of compare.run, on rank 0.
function M.save(model, path, options)
  local func = "export"
  local a = util.named(func, options, arguments)
  check_options(func, a)
  a.batches = listed(signature.value(func, "batches", a.batches, "batches"))
  if #a.batches == 0 or samples_of(func, a.batches[1]) < SAMPLES[2] then
    P.fail(("%s: batches are the held-out batches to compare on; the first one needs at least %d samples"):format(func,
      SAMPLES[2]))
  end
  if P.state.autocast then P.fail(func .. ": in an autocast region; a model file computes in f32") end
  local training = model.training
  model:eval()
  local traces = {}
  local ok, report = pcall(function() return P.scope(export, func, model, path, a, traces) end)
  for _, t in ipairs(traces) do t:forget() end -- of an export that was refused; others have done so, to have the memory
  model:train(training)
  if not ok then error(report, 0) end
  return report
end

signature.check("export.", M, { save = "model: Module, path: string, options: table?" })

return util.face("peri.export", M)
