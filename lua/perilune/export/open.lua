-- export/open.lua: model files, opened (perilune/model.h): what a script asks one.
--
--   local model = peri.export.open "model.peri"
--   -- answers.logits: a tensor [samples, columns]
--   local answers = model:predict { dense_features = tensor, sparse_features = kjt }
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local methods, meta = {}, {}
local wrap, _, ptr = P.handle("peri_model", methods, meta, "a model file")
local wrap_context = P.handle("peri_model_context", {}, {}, "the memory of a model file's calls")

local M = { methods = methods }
local out, context_out, number = ffi.new "peri_model *[1]", ffi.new "peri_model_context *[1]", ffi.new "int32_t[1]"

--- How to open, as C takes it.
local function flags_of(o)
  return (o.verify and C.PERI_MODEL_VERIFY or 0) + (o.copy and C.PERI_MODEL_COPY or 0)
    + (o.guard and C.PERI_MODEL_GUARD or 0)
end

--- Open a model file. options: verify = true reads it all and compares its checksums; copy = true reads it into memory
--- of its own; guard = true survives that somebody cuts the file while a call reads it, by a handler for SIGBUS in this
--- process.
function M.open(path, options)
  local o = util.named("export.open", options, { verify = false, copy = false, guard = false })
  check(C.peri_model_open(path, flags_of(o), out))
  return wrap(out[0])
end

local follower_methods, follower_meta = {}, {}
local wrap_follower, _, follower_ptr = P.handle("peri_model_follower", follower_methods, follower_meta,
  "a model file that follows a run")
local follower_out = ffi.new "peri_model_follower *[1]"

--- Open a model file for following the checkpoints that a trainer saves into `folder`. options: saved = what the model
--- is called there, as in peri.checkpoint.save(path, { model = model }) ("model"); verify, guard: as for open.
function M.follow(path, folder, options)
  local o = util.named("export.follow", options, { saved = "model", verify = false, guard = false })
  check(C.peri_model_follower_new(path, folder, o.saved, flags_of(o), follower_out))
  return wrap_follower(follower_out[0])
end

--- Take the newest checkpoint. Returns the model that has it, as export.open gives one, which never changes; nil:
--- nothing newer is there, or the model before the last one is still open (release it); nil and a text: what is there
--- cannot be had, and why.
function follower_methods:poll()
  local status = C.peri_model_follower_poll(follower_ptr(self), out)
  if status == C.PERI_PENDING then return nil end
  if status < 0 then return nil, ffi.string(C.peri_error_message()) end
  return wrap(out[0])
end

--- The newest model, at first as the file has it.
function follower_methods:model()
  local model = C.peri_model_follower_model(follower_ptr(self))
  C.peri_model_retain(model)
  return wrap(model)
end

--- The path of the checkpoint that it has; nil: none yet.
function follower_methods:path()
  local path = C.peri_model_follower_path(follower_ptr(self))
  return path ~= nil and ffi.string(path) or nil
end

--- What is known about it: { path =, name =, producer =, digest =, format = (version of the format), bytes =,
--- table_bytes =, step = (of the training; -1: not known), operations = }.
function methods:describe()
  local info = P.struct "peri_model_info"
  check(C.peri_model_describe(ptr(self), info))
  local d = {}
  for _, key in ipairs { "path", "name", "producer", "digest" } do d[key] = ffi.string(info[key]) end
  for _, key in ipairs { "operations", "bytes", "table_bytes", "step" } do d[key] = tonumber(info[key]) end
  d.format = info.version
  return d
end

local kinds = { [C.PERI_MODEL_DENSE] = "dense", [C.PERI_MODEL_IDS] = "ids", [C.PERI_MODEL_WHOLE] = "whole",
  [C.PERI_MODEL_NUMBERS] = "numbers" }

--- Lists of { name =, ... }.
function methods:inputs()
  local list, inputs = {}, C.peri_model_inputs(ptr(self), number)
  for i = 0, number[0] - 1 do
    local x, rules = inputs[i], P.struct "peri_model_input_rules"
    check(C.peri_model_input_describe(ptr(self), i, rules))
    list[i + 1] = { name = ffi.string(x.name), kind = kinds[x.kind], columns = tonumber(x.columns),
      rows = tonumber(x.rows), weighted = x.weighted, optional = x.optional, finite = x.finite,
      missing = tonumber(x.missing), unknown = x.unknown == C.PERI_MODEL_ID_SKIP and "skip" or "refuse",
      mapped = x.mapped, length = tonumber(rules.length), like = rules.like >= 0
      and ffi.string(inputs[rules.like].name) or nil, counts = rules.counts >= 0
      and ffi.string(inputs[rules.counts].name) or nil }
  end
  return list
end
function methods:outputs()
  local list, outputs = {}, C.peri_model_outputs(ptr(self), number)
  for i = 0, number[0] - 1 do
    local o, at = outputs[i], tonumber(C.peri_model_output_list(ptr(self), i))
    list[i + 1] = { name = ffi.string(o.name), columns = tonumber(o.columns),
      list = at >= 0 and ffi.string(C.peri_model_inputs(ptr(self), nil)[at].name) or nil }
  end
  return list
end
function methods:tables()
  local list, tables = {}, C.peri_model_tables(ptr(self), number)
  for i = 0, number[0] - 1 do
    local t = tables[i]
    list[i + 1] = { name = ffi.string(t.name), dtype = ffi.string(t.dtype), rows = tonumber(t.rows),
      columns = tonumber(t.columns), bytes = tonumber(t.bytes) }
  end
  return list
end

--- Read all of it and compare its checksums.
function methods:verify() check(C.peri_model_verify(ptr(self))) end
--- An error if the file was cut or written to since it was opened.
function methods:check_unchanged() check(C.peri_model_changed(ptr(self))) end

-- -- answers ----------------------------------------------------------------------------------------------------------

--- A tensor's whole numbers in host memory.
local function whole_of(input, t)
  if t:dtype() ~= "i32" and t:dtype() ~= "i64" then
    P.fail(("predict: input '%s' is %s, wanted whole numbers, i64 or i32"):format(input.name, Tensor._text(t)))
  end
  return (t:to("i64", "cpu"):contiguous():read())
end

local LARGEST = 3.4028235677973366e38 -- f64 of this size and more are infinite as f32

--- A tensor's numbers as f32 in host memory; an error if one of them is too large for it.
local function numbers_of(input, t)
  if t:dtype() == "f64" then
    local x, n = t:read()
    for i = 0, n - 1 do
      if math.abs(x[i]) >= LARGEST and math.abs(x[i]) < math.huge then
        P.fail(("predict: input '%s', number %d is %g, which is too large for f32"):format(input.name, i, x[i]))
      end
    end
  end
  return (t:to("f32", "cpu"):contiguous():read())
end

--- A dense input's numbers in host memory, and the number of samples.
local function dense_of(input, value)
  local t = Tensor.is(value) and util.resolve(value) or P.fail(("predict: input '%s' is no tensor"):format(input.name))
  local shape, columns = t:shape(), 1
  for d = 2, #shape do columns = columns * shape[d] end
  if #shape == 0 or columns ~= input.columns then
    P.fail(("predict: input '%s' is %s, wanted [samples, %d]"):format(input.name, Tensor._text(t), input.columns))
  end
  return numbers_of(input, t), shape[1]
end

--- One key's ids, offsets and weights in host memory, of a KeyedJaggedTensor's parts on the host.
local function key_of(input, parts, key)
  local first, n = key * parts.stride, parts.stride
  local from, to = tonumber(parts.offsets[first]), tonumber(parts.offsets[first + n])
  parts.ids = parts.ids or whole_of(input, parts.values)
  local ids, offsets = ffi.new("int64_t[?]", math.max(to - from, 1)), ffi.new("int64_t[?]", n + 1)
  local weights = parts.weights and ffi.new("float[?]", math.max(to - from, 1))
  for i = 0, n do offsets[i] = parts.offsets[first + i] - from end
  for i = from, to - 1 do
    ids[i - from] = parts.ids[i]
    if weights then weights[i - from] = parts.weights[i] end
  end
  return ids, offsets, weights
end

--- Numbers of the members of lists whose offsets are known.
local function members_of(input, value, offsets, n)
  local t = Tensor.is(value) and util.resolve(value) or P.fail(("predict: input '%s' is no tensor"):format(input.name))
  local wanted = offsets and tonumber(offsets[n]) or 0
  if t:numel() ~= wanted or t:dim() > 1 and t:size(1) ~= wanted then
    P.fail(("predict: input '%s' is %s, wanted %d numbers, one for each id of '%s'"):format(input.name, Tensor._text(t),
      wanted, input.like or "?"))
  end
  if input.kind ~= "whole" then return numbers_of(input, t) end
  return whole_of(input, t)
end

--- Refuse lists of which each feature has another number of samples.
function M.refuse_variable(func, name, kjt)
  if kjt:variable_stride_per_key() then
    P.fail(("%s: the batch's field '%s' has another number of samples for each key; allowed: one number for all, as a "
      .. "model file has a list for each sample and feature"):format(func, name))
  end
end

--- What batches of loaders have beside features (data/batch.lua).
local BESIDE = { labels = true, rows = true, global_rows = true, global_row = true, loss_scale = true }

--- An error if a batch has a name that the model has no input for: one that is misspelt, say. fields: of fields_of.
local function refuse_others(inputs, fields)
  local names = {}
  for _, input in ipairs(inputs) do names[input.name] = true end
  for name in util.ordered(fields) do
    if not names[name] and not BESIDE[name] then
      P.fail(("predict: the model has no input '%s', it has: %s"):format(tostring(name),
        table.concat(util.keys(names), ", ")))
    end
  end
end

--- The fields of a batch by the names of the model's inputs: tensors, and { parts of a KeyedJaggedTensor, key }. And
--- the names that two fields have: both of them. inputs: of the model.
local function fields_of(inputs, batch)
  local found, from, twice, weighted = {}, {}, {}, {}
  for _, input in ipairs(inputs) do weighted[input.name] = input.weighted end
  local function note(key, field, value)
    if from[key] then twice[key] = { from[key], field } end
    found[key], from[key] = value, field
  end
  for name, value in util.ordered(batch) do
    if jagged.KeyedJaggedTensor.is(value) then
      local kjt = util.resolve(value):sync()
      M.refuse_variable("predict", name, kjt)
      local parts = { stride = kjt:stride(), values = kjt:values(), offsets = (kjt:offsets():to("i64"):read()),
        weights = kjt:is_weighted() and (kjt:weights():to("f32"):read()) or nil }
      for i, key in ipairs(kjt:keys()) do
        parts.asked = parts.asked or weighted[key]
        note(key, name, { parts = parts, key = i - 1 })
      end
    else note(name, name, value) end
  end
  return found, twice
end

--- The number of samples is that of the input before, if there was one: { n =, name =, the input's }.
local function check_count(samples, n, name)
  if samples and samples.n ~= n then
    P.fail(("predict: input '%s' has %d samples, '%s' has %d"):format(name, n, samples.name, samples.n))
  end
  return samples or { n = n, name = name }
end

--- The values of all inputs as C takes them: returns them, the number of samples, the longest list, and the numbers of
--- each input's ids. fields, twice: of fields_of; others: the batch may have what the model does not read; kept: what
--- has to stay alive meanwhile.
local function values_of(inputs, fields, twice, others, kept)
  local samples, longest, offsets_of = nil, 1, {}
  local values = ffi.new("peri_model_values[?]", math.max(#inputs, 1))
  for i, input in ipairs(inputs) do
    local field, v = fields[input.name], values[i - 1]
    local two = twice[input.name]
    if two then
      P.fail(("predict: input '%s' is in the batch's fields '%s' and '%s', allowed: one of them"):format(input.name,
        two[1], two[2]))
    end
    if field ~= nil and input.kind == "dense" then
      local numbers, n = dense_of(input, field)
      samples = check_count(samples, n, input.name)
      kept[#kept + 1], v.dense = numbers, numbers
    elseif field ~= nil and input.kind ~= "numbers" and not (input.kind == "whole" and Tensor.is(field)) then
      if type(field) ~= "table" or not field.parts then
        P.fail(("predict: input '%s' is no key of a KeyedJaggedTensor"):format(input.name))
      end
      local ids, offsets, weights = key_of(input, field.parts, field.key)
      samples = check_count(samples, field.parts.stride, input.name)
      for k = 1, field.parts.stride do longest = math.max(longest, tonumber(offsets[k] - offsets[k - 1])) end
      kept[#kept + 1] = { ids, offsets, weights }
      -- a KeyedJaggedTensor has weights for all its keys, so those for which no key asks are too many
      local wanted = input.weighted or not others and not field.parts.asked
      v.ids, v.offsets, v.weights, offsets_of[input.name] = ids, offsets, wanted and weights or nil, offsets
    end
  end
  for i, input in ipairs(inputs) do
    local field, v = fields[input.name], values[i - 1]
    if (input.kind == "whole" or input.kind == "numbers") and field ~= nil and v.offsets == nil then
      local offsets = offsets_of[input.like]
      local numbers = members_of(input, field, offsets, samples and samples.n)
      kept[#kept + 1], v.offsets = numbers, offsets
      v[input.kind == "whole" and "ids" or "weights"] = numbers
    end
  end
  for _, input in ipairs(samples and {} or inputs) do
    if not input.optional then P.fail(("predict: input '%s' is missing"):format(input.name)) end
  end
  return values, samples and samples.n or 0, longest, offsets_of
end

--- predict; others: the batch may have other fields, too. The second result is to be kept until the first is there.
function M.answers(self, batch, others)
  local inputs, outputs, kept = self:inputs(), self:outputs(), {}
  local fields, twice = fields_of(inputs, batch)
  if not others then refuse_others(inputs, fields) end
  local values, samples, longest, offsets_of = values_of(inputs, fields, twice, others, kept)
  local answers, results, offsets = {}, ffi.new("float *[?]", #outputs), ffi.new("int64_t *[?]", #outputs)
  for i, o in ipairs(outputs) do
    local ids = o.list and offsets_of[o.list]
    local t = Tensor.empty({ o.list and (ids and tonumber(ids[samples]) or 0) or samples, o.columns }, "f32", "cpu")
    local own, data = o.list and ffi.new("int64_t[?]", samples + 1), ffi.new "void *[1]"
    answers[o.name], kept[#kept + 1], kept[#kept + 2] = t, t, own
    check(C.peri_tensor_data(t.ptr, data))
    results[i - 1], offsets[i - 1] = ffi.cast("float *", data[0]), own or nil
    if o.list then answers[o.name .. ".lengths"] = own end
  end
  check(C.peri_model_context_new(ptr(self), math.max(samples, 1), longest, context_out))
  local context = wrap_context(context_out[0])
  local status = C.peri_model_predict_lists(context.ptr, samples, values, results, offsets)
  context:release()
  check(status)
  for _, o in ipairs(outputs) do
    local own = o.list and answers[o.name .. ".lengths"]
    if own then
      local lengths = {}
      for b = 1, samples do lengths[b] = tonumber(own[b] - own[b - 1]) end
      answers[o.name .. ".lengths"] = Tensor.tensor(lengths, "i64", "cpu")
      answers[o.name] = answers[o.name]:slice(1, 0, tonumber(own[samples])):contiguous()
    end
  end
  return answers, kept
end

--- Answers for a batch, a table of tensors and KeyedJaggedTensors whose names (of KeyedJaggedTensors: keys) are those
--- of the inputs; a name that is none's is an error, but for the labels and the counts of a loader's batch. Returns a
--- table of tensors [samples, columns] by the names of the outputs; outputs that are lists of samples are [all members,
--- columns], and how many each sample has is beside them by the name with ".lengths" behind.
function methods:predict(batch)
  signature.value("predict", "the batch", batch, "table")
  return (M.answers(self, batch))
end

signature.check("export.", M,
  { open = "path: string, options: table?", follow = "path: string, folder: string, options: table?" })

return M
