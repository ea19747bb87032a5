-- What does not fit is one rule: C, Lua, rows, columns, v2 in JSON and v2 in binary refuse the same values, by the name
-- of the feature, and answer all others alike, bit for bit; and the server counts what it refuses.
local ffi = require "ffi"
local peri = require "perilune"
local json = require "dkjson"
local serving = require "spec.support.serving"
local nn, F, C = peri.nn, peri.nn.functional, peri.ffi.C

local NAMES = { "d", "u", "u.weights", "w", "w.weights", "x" } -- in the order in which requests have them
local unsigned, signed = function(text) return loadstring("return " .. text .. "ULL")() end, function(text)
  return loadstring("return " .. text .. "LL")()
end
local function id_of(x) return type(x) ~= "string" and x or (x:find "^%-" and signed or unsigned)(x) end

local Model = nn.Module:extend "Model"
function Model:init()
  local function collection(name, rows, weighted)
    return peri.EmbeddingBagCollection { is_weighted = weighted, tables = { peri.EmbeddingBagConfig {
      name = "t" .. name, num_embeddings = rows, embedding_dim = 4, feature_names = { name } } } }
  end
  self.plain, self.weighed = collection("u", 100, false), collection("w", 50, true)
end
function Model:logits(b)
  return F.sum(F.cat({ b.d, self.plain(b.p):values(), self.weighed(b.q):values() }, 2), 2)
end

local function two()
  return { { d = { 0.5, 1, 2 }, u = { 1, 99 }, w = { 3 }, ["w.weights"] = { 0.5 } },
    { d = { 1, 0, -1 }, u = { 0 }, w = { 49, 2 }, ["w.weights"] = { 1, 2 } } }
end

-- -- the forms --------------------------------------------------------------------------------------------------------

--- All values of a feature one after the other, and how many each sample has.
local function flat(samples, name)
  local list, lengths = {}, {}
  for i, s in ipairs(samples) do
    lengths[i] = #(s[name] or {})
    for _, x in ipairs(s[name] or {}) do list[#list + 1] = x end
  end
  return list, lengths
end
local function array(ctype, list)
  local out = ffi.new(ctype .. "[?]", #list + 1)
  for i, x in ipairs(list) do out[i - 1] = ffi.cast(ctype, id_of(x)) end
  return out, #list * ffi.sizeof(ctype)
end
local function text_of(list)
  return "[" .. table.concat(peri.util.map(list, function(x)
    return type(x) == "string" and x or x ~= x and "NaN" or ("%.17g"):format(x)
  end), ",") .. "]"
end

local function kjt(samples, name, dtype)
  local ids, lengths = flat(samples, name)
  local weights = flat(samples, name .. ".weights")
  return peri.KeyedJaggedTensor { keys = { name }, lengths = lengths, weights = samples[1][name .. ".weights"]
    and peri.tensor(weights) or nil, values = peri.tensor(peri.util.map(ids, function(x)
      return ffi.cast("int64_t", id_of(x))
    end), dtype or "i64") }
end
local function batch(samples, options)
  local s = samples[1]
  local b = { d = s.d and peri.tensor(peri.util.map(samples, function(x) return x.d end), options and options.d),
    p = s.u and kjt(samples, "u", options and options.ids), q = s.w and kjt(samples, "w"),
    x = s.x and peri.tensor { 1 } }
  if options and options.twice then b.r = kjt(samples, "u") end
  return b
end

local ask = {}
function ask.Lua(model, samples, options) return model.file:predict(batch(samples, options)).logits:to_list() end
function ask.C(model, samples)
  local values, kept, context = ffi.new "peri_model_values[3]", {}, ffi.new "peri_model_context *[1]"
  local out, outs = ffi.new "float[8]", ffi.new "float *[1]"
  for i, input in ipairs(samples[1] and model.file:inputs() or {}) do
    local name, v = input.name, values[i - 1]
    local ids, lengths = flat(samples, name)
    if samples[1][name] and name == "d" then kept[i] = array("float", ids) v.dense = kept[i]
    elseif samples[1][name] then
      local offsets, weights = ffi.new "int64_t[8]", array("float", (flat(samples, name .. ".weights")))
      for b, n in ipairs(lengths) do offsets[b] = offsets[b - 1] + n end
      kept[i] = { offsets, weights, array("int64_t", ids) }
      v.ids, v.offsets, v.weights = kept[i][3], offsets, samples[1][name .. ".weights"] and weights or nil
    end
  end
  peri.ffi.check(C.peri_model_context_new(model.file.ptr, 8, 8, context))
  outs[0] = out
  local status = C.peri_model_predict(context[0], #samples, values, outs)
  C.peri_model_context_release(context[0])
  peri.ffi.check(status)
  return peri.util.map(samples, function(_, i) return out[i - 1] end)
end

local function answer(model, where, body, headers)
  local text = model.server:post(where, body, headers)
  local said = json.decode(text)
  if said.error then error(said.error, 0) end
  return said.predictions or said.outputs[1] and type(said.outputs[1]) == "table" and said.outputs[1].data
    or said.outputs
end
function ask.rows(model, samples, options)
  return answer(model, "v1/models/m:predict", '{"instances":[' .. table.concat(peri.util.map(samples, function(s)
    local parts = {}
    for _, name in ipairs(NAMES) do parts[#parts + 1] = s[name] and ("%q:%s"):format(name, text_of(s[name])) end
    parts[#parts + 1] = options.twice and '"u":[1]'
    return "{" .. table.concat(parts, ",") .. "}"
  end), ",") .. "]}")
end
function ask.columns(model, samples, options)
  local parts = {}
  for _, name in ipairs(NAMES) do
    parts[#parts + 1] = samples[1][name] and ("%q:[%s]"):format(name, table.concat(peri.util.map(samples, function(s)
      return text_of(s[name])
    end), ","))
  end
  parts[#parts + 1] = options.twice and '"u":[[1],[2]]'
  return answer(model, "v1/models/m:predict", '{"inputs":{' .. table.concat(parts, ",") .. "}}")
end
local function v2(model, samples, options, binary)
  local parts, data, bytes = {}, {}, { FP32 = "float", FP64 = "double", INT64 = "int64_t", UINT64 = "uint64_t" }
  local function tensor(name, shape, datatype, list)
    local numbers, size = nil, nil
    if binary then numbers, size = array(bytes[datatype], list) end
    data[#data + 1] = binary and ffi.string(numbers, size) or ""
    parts[#parts + 1] = ('{"name":"%s","shape":%s,"datatype":"%s",%s}'):format(name, text_of(shape), datatype, binary
      and ('"parameters":{"binary_data_size":%d}'):format(size) or '"data":' .. text_of(list))
  end
  local dense = { i64 = "INT64", f64 = "FP64" }
  for _, name in ipairs(options.twice and { "d", "u", "w", "w.weights", "u" } or NAMES) do
    local list, lengths = flat(samples, name)
    if not samples[1][name] then -- luacheck: ignore
    elseif name == "d" then tensor(name, { #samples, #list / #samples }, dense[options.d] or "FP32", list)
    elseif name:find "weights" or name == "x" then tensor(name, { #list }, "FP64", list)
    else
      tensor(name, { #list }, options.ids and "FP32" or options.signed and "INT64" or "UINT64", list)
      if not (options.twice and parts.had) then tensor(name .. ".lengths", { #samples }, "INT64", lengths) end
      parts.had = true
    end
  end
  local head = '{"inputs":[' .. table.concat(parts, ",") .. "]}"
  return answer(model, "v2/models/m/infer", head .. table.concat(data), binary
    and ("-H 'Inference-Header-Content-Length: %d'"):format(#head) or nil)
end
function ask.v2(model, samples, options) return v2(model, samples, options, false) end
function ask.binary(model, samples, options) return v2(model, samples, options, true) end

-- -- the rule ---------------------------------------------------------------------------------------------------------

local ALL, NOT_C, JSON = "C Lua rows columns v2 binary", "Lua rows columns v2 binary", "rows columns v2"
local cases = {}
--- what: in words; name: the feature that is named (nil: none, since it fits); kind: as it is counted; edit: makes it
--- of two good samples; forms: those that can say it.
local function case(what, name, kind, edit, forms, options)
  cases[#cases + 1] = { what = what, name = name, kind = kind, edit = edit, forms = forms or ALL, options = options
    or {} }
end
local function each(name, value)
  return function(samples)
    for _, s in ipairs(samples) do s[name] = value end
  end
end
local function second(name, value) return function(samples) samples[2][name] = value end end

case("all", nil, nil, function() end)
for _, name in ipairs { "d", "u", "w", "w.weights" } do case("no " .. name, name, "missing", each(name, nil)) end
case("another", "x", "extra", each("x", { 1 }), NOT_C)
case("weights that nobody reads", "u.weights", "extra", function(samples)
  samples[1]["u.weights"], samples[2]["u.weights"] = { 1, 1 }, { 1 }
end)
case("one twice", "u", "repeated", function() end, NOT_C, { twice = true })
for _, id in ipairs { "100", "9223372036854775808", "18446744073709551615" } do
  case("id " .. id, "u", "range", second("u", { 1, id }))
end
for _, id in ipairs { "-1", "-9223372036854775807" } do
  case("id " .. id, "u", "range", second("u", { id }), ALL, { signed = true })
end
case("id 2^64", "u", "range", second("u", { "18446744073709551616" }), JSON)
case("ids that are no whole numbers", "u", "kind", second("u", { "1.5" }), JSON)
case("ids of f32", "u", "kind", function() end, "Lua v2 binary", { ids = "f32" })
case("ids that are words", "u", "kind", second("u", { '"one"' }), JSON)
case("empty lists", nil, nil, function(samples)
  for _, s in ipairs(samples) do s.u, s.w, s["w.weights"] = {}, {}, {} end
end)
for _, x in ipairs { 0 / 0, 1 / 0, -1 / 0 } do
  local forms, word = x == x and "C Lua binary" or ALL, tostring(x)
  case("a number " .. word, "d", "nan", second("d", { 1, x, 0 }), forms)
  case("a weight " .. word, "w", "nan", second("w.weights", { 1, x }), forms)
end
case("a number beyond f32", "d", "range", second("d", { 0, -1e39, 0 }), NOT_C, { d = "f64" })
case("whole numbers", nil, nil, each("d", { 1, 16777217, 3 }), NOT_C, { d = "i64" })
case("two numbers of three", "d", "kind", each("d", { 1, 2 }), NOT_C)
case("a number too many", "d", "kind", each("d", { 1, 2, 3, 4 }), NOT_C)
case("a weight too many", "w.weights", "kind", second("w.weights", { 1, 2, 3 }), "rows columns v2 binary")

describe("what does not fit", function()
  if serving.missing() then return pending(serving.missing()) end
  local model, path, counted = {}, os.tmpname() .. ".peri", {}
  setup(function()
    local many = {}
    for i = 1, 12 do many[i] = two()[i % 2 + 1] end
    Model():export(path, { batches = { batch(many) }, name = "m" })
    model.file, model.server = peri.export.open(path), serving.start(path)
  end)
  teardown(function()
    model.server:stop()
    os.remove(path)
  end)

  for _, c in ipairs(cases) do
    it("is refused, or answered alike, in all forms: " .. c.what, function()
      local wanted
      for form in c.forms:gmatch "%w+" do
        local samples = two()
        c.edit(samples)
        local ok, said = pcall(ask[form], model, samples, c.options)
        assert.equal(c.name == nil, ok, form .. ": " .. tostring(said))
        if ok then
          local bits = ffi.string(array("float", said))
          wanted = wanted or bits
          assert.equal(wanted, bits, form)
        else
          said = tostring(said)
          local own = (form == "C" or form == "Lua") and c.name:gsub("%.weights", "") or c.name
          assert.matches("'" .. own, said, 1, true, form .. ": " .. said)
          local key = not own:find "^x" and own ~= "u.weights" and own or ""
          if form ~= "C" and form ~= "Lua" then
            if c.kind == "nan" and key == "w" then key = "w.weights" end
            key = ('{feature="%s",what="%s"}'):format(key, c.kind)
            counted[key] = (counted[key] or 0) + 1
          end
        end
      end
    end)
  end

  it("is counted", function()
    local metrics = model.server:get "metrics"
    for key, n in peri.util.ordered(counted) do
      assert.matches(("perilune_feature_values_total%s %d\n"):format(key, n), metrics, 1, true, key)
    end
  end)

  it("is not a batch without samples: it has no answers", function()
    local b = batch(two())
    b.d, b.q = b.d:slice(1, 0, 0), nil
    b.p = peri.KeyedJaggedTensor { keys = { "u", "w" }, values = peri.Tensor.zeros({ 0 }, "i64"),
      lengths = peri.Tensor.zeros({ 0 }, "i32"), weights = peri.Tensor.zeros({ 0 }, "f32") }
    assert.same({}, model.file:predict(b).logits:to_list())
    assert.same({}, ask.C(model, {}))
    assert.same({}, ask.rows(model, {}, {}))
    assert.same({}, answer(model, "v1/models/m:predict", '{"inputs":{"d":[],"u":[],"w":[],"w.weights":[]}}'))
  end)
end)
