-- doors.lua: requests drawn at random, right and wrong, through all doors of a model file: C, Lua, and HTTP as rows, as
-- columns, in v2 with data as JSON and in binary. The file has an input of each kind (inputs_of_all_kinds.lua). The
-- law, from a model in plain Lua: a request that fits has that answer, bit for bit, at each door that can say it,
-- whoever waits beside it; one that does not fit is refused at each, and the error names one of the features that do
-- not fit.
--
--   luajit tests/fuzz/doors.lua [REQUESTS [SEED]]   as `make test` runs it; a failure prints the request
--   luajit tests/fuzz/doors.lua SECONDSs [SEED]     as `make fuzz` runs it
-- inputs: 100
-- takes: 2 s
local here, build = io.popen("pwd"):read "*l", os.getenv "PERI_BUILD" or "build"
package.path = ("%s/%s/lua/?.lua;%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;%s"):format(here, build, here, here, here,
  package.path)
local ffi = require "ffi"
local peri = require "perilune"
local P = require "perilune.ffi"
local shell = require "spec.support.shell"
local serving = require "spec.support.serving"
local drawing = require "spec.support.drawing"
local kinds = require "spec.support.inputs_of_all_kinds"
local json = require "dkjson"
local C, check, pick = P.C, P.check, drawing.pick

local folder, clean = shell.temporary()
local path = folder .. "/doors.peri"
local FEATURES, KNOWN, OUTPUTS, feature, is_finite = kinds.FEATURES, kinds.KNOWN, kinds.OUTPUTS, kinds.feature,
  kinds.is_finite

-- -- requests ---------------------------------------------------------------------------------------------------------

local ODD = { 50LL, 20LL, 9LL, 0x100000003LL, -1LL, ffi.cast("int64_t", 0x8000000000000000ULL), 0x7fffffffffffffffLL,
  0x8000000000000000ULL, 0xffffffffffffffffULL, 30LL, 6LL }
local INF, NAN = math.huge, 0 / 0

--- A request: { n =, fields = { name = list of lists }, weights = { name = lists }, json = { name = what is odd there,
--- of what only JSON can say }, wrong = { name = true }: what does not fit }. All fits at first.
local function drawn(draw)
  local q = { n = draw(3) + 1, fields = {}, weights = {}, wrong = {}, json = {} }
  local function lists(of)
    local all = {}
    for b = 1, q.n do all[b] = of(b) end
    return all
  end
  local function some(n, of)
    local list = {}
    for i = 1, n do list[i] = of() end
    return list
  end
  local function number() return (draw(64) - 32) / 8 end
  for _, f in ipairs(FEATURES) do
    q.fields[f.name] = lists(function(b)
      if f.name == "c" then return { draw(#q.fields.a[b] + 1) } end
      local n = f.columns or f.length or f.of and #q.fields.a[b] or draw(4)
      return some(n, function()
        if f.kind == "dense" or f.kind == "numbers" then return number() end
        if f.raw then return KNOWN[draw(#KNOWN) + 1] end
        return ffi.cast("int64_t", draw(f.rows or 1000))
      end)
    end)
    if f.weighted then
      q.weights[f.name] = lists(function(b) return some(#q.fields[f.name][b], function() return draw(16) / 4 end) end)
    end
  end
  for _ = 1, draw(3) do
    local f, b = FEATURES[draw(#FEATURES) + 1], draw(q.n) + 1
    local list = q.fields[f.name] and q.fields[f.name][b]
    local what = draw(6)
    if what == 0 then q.fields[f.name], q.weights[f.name] = nil, nil
    elseif list and what == 1 and f.kind ~= "dense" then -- another length
      local k = draw(2) == 0 and #list or 0
      if k > 0 then list[k] = nil else list[#list + 1] = f.kind == "numbers" and 1 or 0LL end
      if q.weights[f.name] then q.weights[f.name][b] = some(#list, function() return 0.5 end) end
    elseif list and what == 2 and #list > 0 then
      local k = draw(#list) + 1
      if f.kind == "dense" or f.kind == "numbers" then list[k] = pick(draw, { NAN, INF, -INF, 0.5, -1, 2, 1e38 })
      else list[k] = ODD[draw(#ODD) + 1] end
    elseif what == 3 and q.weights[f.name] and #list > 0 then
      q.weights[f.name][b][draw(#list) + 1] = pick(draw, { NAN, INF, -INF })
    elseif what == 4 and f.weighted then q.weights[f.name] = nil
    elseif what == 5 then q.json[f.name] = pick(draw, { "twice", "extra", "null", "no number" }) end
  end
  return q
end

--- An answer, or the oracle's, as one text of bits.
local function bits(out)
  local parts, one = {}, ffi.new "float[1]"
  for _, o in ipairs(OUTPUTS) do
    for b, list in ipairs(out[o[1]]) do
      parts[#parts + 1] = ("%s/%d:"):format(o[1], b)
      for _, x in ipairs(list) do
        one[0] = x
        parts[#parts + 1] = x ~= x and "nan" or bit.tohex(ffi.cast("uint32_t *", one)[0])
      end
    end
  end
  return table.concat(parts, " ")
end

-- -- the doors --------------------------------------------------------------------------------------------------------

--- One list of all samples' values, and where samples begin.
local function flat(lists)
  local all, offsets = {}, { 0 }
  for b, list in ipairs(lists) do
    for _, x in ipairs(list) do all[#all + 1] = x end
    offsets[b + 1] = #all
  end
  return all, offsets
end

--- Values that C takes have 63 bits and a sign.
local function beyond_c(q)
  for _, list in ipairs(q.fields.t or {}) do
    for _, x in ipairs(list) do if ffi.istype("uint64_t", x) then return true end end
  end
end

local function split(data, columns, offsets, n)
  local lists, at = {}, 0
  for b = 1, n do
    local list = {}
    for _ = 1, offsets and tonumber(offsets[b] - offsets[b - 1]) * columns or columns do
      list[#list + 1], at = data[at], at + 1
    end
    lists[b] = list
  end
  return lists
end

--- Lua takes numbers beside ids without lengths: that some are at another sample's cannot be said.
local function only_moved(q)
  local p, a = q.fields.p, q.fields.a
  if not p or not a or #flat(p) ~= #flat(a) then return false end
  for b = 1, q.n do if #p[b] ~= #a[b] then return true end end
end

local model, file
local function ask_c(q)
  local values, kept = ffi.new("peri_model_values[?]", #FEATURES), {}
  for i, f in ipairs(FEATURES) do
    local lists, v = q.fields[f.name], values[i - 1]
    if lists then
      local all, offsets = flat(lists)
      local function array(ctype, list)
        local a = ffi.new(ctype .. "[?]", #list + 1)
        for k, x in ipairs(list) do a[k - 1] = x end
        kept[#kept + 1] = a
        return a
      end
      if f.kind == "dense" then v.dense = array("float", all)
      else
        v.offsets = array("int64_t", offsets)
        if f.kind == "numbers" then v.weights = array("float", all) else v.ids = array("int64_t", all) end
        if f.weighted and q.weights[f.name] then v.weights = array("float", (flat(q.weights[f.name]))) end
      end
    end
  end
  local context, data, offsets = ffi.new "peri_model_context *[1]", {}, ffi.new("int64_t *[?]", #OUTPUTS)
  local outputs, ends = ffi.new("float *[?]", #OUTPUTS), ffi.new("int64_t[?]", q.n + 1)
  for i, o in ipairs(OUTPUTS) do
    data[i] = ffi.new("float[?]", 64)
    outputs[i - 1], offsets[i - 1] = data[i], o[3] and ends or nil
  end
  check(C.peri_model_context_new(model, q.n, 0, context))
  local status = C.peri_model_check(model, q.n, values, nil)
  local again = C.peri_model_predict_lists(context[0], q.n, values, outputs, offsets)
  C.peri_model_context_release(context[0])
  assert(status == again, "peri_model_check and peri_model_predict_lists do not say the same")
  if again < 0 then return nil, ffi.string(C.peri_error_message()) end
  local out = {}
  for i, o in ipairs(OUTPUTS) do out[o[1]] = split(data[i], o[2], o[3] and ends, q.n) end
  return out
end

local function ask_lua(q)
  local batch = {}
  for _, f in ipairs(FEATURES) do
    local lists = q.fields[f.name]
    if lists then
      local all, lengths, odd = flat(lists), peri.util.map(lists, function(list) return #list end), q.json[f.name]
      if f.kind == "dense" or f.kind == "numbers" then
        local t = f.kind == "dense" and peri.tensor(lists) or #all > 0 and peri.tensor(all) or peri.zeros { 0 }
        batch[f.name] = t
        if odd == "extra" then batch[f.name .. "_"] = t end
      else
        local ids = #all > 0 and peri.tensor(peri.util.map(all, function(x) return ffi.cast("int64_t", x) end), "i64")
          or peri.zeros({ 0 }, "i64")
        local weights = f.weighted and q.weights[f.name] and flat(q.weights[f.name])
        local function field(key)
          return peri.KeyedJaggedTensor { keys = { key }, values = ids, lengths = lengths,
            weights = weights and (#weights > 0 and peri.tensor(weights) or peri.zeros { 0 }) or nil }
        end
        batch["field_" .. f.name] = field(f.name)
        if odd == "extra" then batch["other_" .. f.name] = field(f.name .. "_") end
        if odd == "twice" then batch["other_" .. f.name] = field(f.name) end
      end
    end
  end
  local ok, answers = pcall(file.predict, file, batch)
  if not ok then return nil, tostring(answers) end
  local out = {}
  for _, o in ipairs(OUTPUTS) do
    local ends
    if o[3] then
      ends = ffi.new("int64_t[?]", q.n + 1)
      for b, length in ipairs(answers[o[1] .. ".lengths"]:to_list()) do ends[b] = ends[b - 1] + length end
    end
    out[o[1]] = split(answers[o[1]]:read(), o[2], ends, q.n)
  end
  return out
end

--- What does not fit in Lua, where a batch can have extra names, and lists of ids twice.
local function wrong_lua(q, wrong)
  local all = peri.util.copy(wrong)
  for _, f in ipairs(FEATURES) do
    local odd = q.fields[f.name] and q.json[f.name]
    if odd == "extra" or odd == "twice" and f.kind ~= "dense" and f.kind ~= "numbers" then all[f.name] = true end
  end
  return all
end

local function text_of(x, quoted)
  if type(x) == "number" then
    return x ~= x and "NaN" or x == INF and "Infinity" or x == -INF and "-Infinity" or ("%.17g"):format(x)
  end
  local digits = tostring(x):match "%-?%d+"
  return quoted and '"' .. digits .. '"' or digits
end
local function list_text(list, quoted)
  return "[" .. table.concat(peri.util.map(list, function(x) return text_of(x, quoted) end), ",") .. "]"
end

--- All names that HTTP has: { name, lists, feature }.
local function named(q)
  local all = {}
  for _, f in ipairs(FEATURES) do
    if q.fields[f.name] then all[#all + 1] = { f.name, q.fields[f.name], f } end
    if q.weights[f.name] then all[#all + 1] = { f.name .. ".weights", q.weights[f.name], f, true } end
  end
  return all
end

--- A member of a JSON object, with what only JSON can say wrongly. value: of the feature `name`, n such samples.
local function member(q, name, value, n)
  local odd, text = q.json[name], ('"%s":%s'):format(name, value)
  if odd == "no number" then
    local f = feature[name]
    local list = (f.kind == "ids" or f.kind == "whole") and "[1.5]" or "[1e39]"
    return ('"%s":%s'):format(name, n and "[" .. (list .. ","):rep(n - 1) .. list .. "]" or list)
  end
  if odd == "twice" then return text .. "," .. text end
  if odd == "extra" then return text .. (',"%s_":%s'):format(name, value) end
  if odd == "null" then return ('"%s":null'):format(name) end
  return text
end

local function rows(q, quoted)
  local list = {}
  for b = 1, q.n do
    local parts = {}
    for i, x in ipairs(named(q)) do parts[i] = member(q, x[1], list_text(x[2][b], quoted)) end
    list[b] = "{" .. table.concat(parts, ",") .. "}"
  end
  return '{"instances":[' .. table.concat(list, ",") .. "]}"
end

local function columns(q, quoted)
  local parts = {}
  for i, x in ipairs(named(q)) do
    parts[i] = member(q, x[1], "[" .. table.concat(peri.util.map(x[2], function(list)
      return list_text(list, quoted)
    end), ",") .. "]", q.n)
  end
  return '{"inputs":{' .. table.concat(parts, ",") .. "}}"
end

--- v2, with data as JSON or behind it. Returns the body, and how many bytes are JSON.
local function v2(q, quoted, binary)
  local parts, data = {}, {}
  local function add(name, shape, datatype, ctype, list)
    if binary then
      local bytes = ffi.new(ctype .. "[?]", #list + 1)
      for i, x in ipairs(list) do bytes[i - 1] = x end
      local size = #list * ffi.sizeof(ctype)
      data[#data + 1] = ffi.string(bytes, size)
      parts[#parts + 1] = ('{"name":"%s","shape":%s,"datatype":"%s","parameters":{"binary_data_size":%d}}'):format(name,
        shape, datatype, size)
    else
      parts[#parts + 1] = ('{"name":"%s","shape":%s,"datatype":"%s","data":%s}'):format(name, shape, datatype,
        list_text(list, quoted))
    end
  end
  local function add_feature(name, lists, f, weights)
    local all, unsigned = flat(lists), false
    for _, id in ipairs(all) do unsigned = unsigned or ffi.istype("uint64_t", id) end
    if f.kind == "dense" then
      add(name, ("[%d,%d]"):format(q.n, f.columns), "FP32", "float", all)
    elseif weights or f.kind == "numbers" then
      add(name, ("[%d]"):format(#all), "FP64", "double", all)
    else
      add(name, ("[%d]"):format(#all), unsigned and "UINT64" or "INT64", unsigned and "uint64_t" or "int64_t", all)
      add(name .. ".lengths", ("[%d]"):format(q.n), "INT32", "int32_t",
        peri.util.map(lists, function(list) return #list end))
    end
  end
  for _, x in ipairs(named(q)) do
    add_feature(unpack(x))
    local odd = q.json[x[1]]
    if odd == "twice" or odd == "extra" then add_feature(odd == "extra" and x[1] .. "_" or x[1], x[2], x[3], x[4]) end
  end
  local head = '{"inputs":[' .. table.concat(parts, ",") .. "]}"
  return head .. table.concat(data), #head
end

--- What an answer over HTTP says, as the doors above do.
local function read_http(q, text, form)
  local said = json.decode(text, nil, nil, nil)
  assert(type(said) == "table", "no JSON: " .. text)
  if said.error then return nil, said.error end
  local out = {}
  for _, o in ipairs(OUTPUTS) do out[o[1]] = {} end
  local function as_list(x) return type(x) == "table" and x or { x } end
  if form == "rows" then
    for b, p in ipairs(said.predictions) do for _, o in ipairs(OUTPUTS) do out[o[1]][b] = as_list(p[o[1]]) end end
  elseif form == "columns" then
    for _, o in ipairs(OUTPUTS) do for b, p in ipairs(said.outputs[o[1]]) do out[o[1]][b] = as_list(p) end end
  else
    local by = {}
    for _, t in ipairs(said.outputs) do by[t.name] = t end
    for _, o in ipairs(OUTPUTS) do
      local ends
      local data = ffi.new("float[?]", #by[o[1]].data + 1, by[o[1]].data)
      if o[3] then
        ends = ffi.new("int64_t[?]", q.n + 1)
        for b, length in ipairs(by[o[1] .. ".lengths"].data) do ends[b] = ends[b - 1] + length end
      end
      out[o[1]] = split(data, o[2], ends, q.n)
    end
  end
  return out
end

-- -- the law ----------------------------------------------------------------------------------------------------------

local function names(set)
  local list = {}
  for name in peri.util.ordered(set) do list[#list + 1] = name end
  return table.concat(list, ", ")
end

local answered, refused = 0, 0
--- `wrong`: what does not fit at this door.
local function judge(q, door, out, why, wrong)
  if not next(wrong) then
    assert(out, ("%s refuses what fits: %s\n%s"):format(door, tostring(why), rows(q, true)))
    local want, got = bits(kinds.answer(q)), bits(out)
    assert(want == got, ("%s answers\n  %s, wanted\n  %s\n%s"):format(door, got, want, rows(q, true)))
    answered = answered + 1
    return
  end
  assert(not out, ("%s answers, though this does not fit: %s\n%s"):format(door, names(wrong), rows(q, true)))
  local named_one = false
  for name in pairs(wrong) do named_one = named_one or why:find(("'%s[.'_]"):format(name)) ~= nil end
  assert(named_one, ("%s names none of what does not fit (%s): %s\n%s"):format(door, names(wrong), why, rows(q, true)))
  refused = refused + 1
end

--- What HTTP refuses beside: answers that are not finite, and in JSON all that it has no word for.
local function wrong_http(q, wrong, as_json)
  local all = {}
  for name in pairs(wrong) do all[name] = true end
  for name, lists in pairs(q.fields) do
    for _, list in ipairs(lists) do
      for _, x in ipairs(list) do
        if name == "y" and not is_finite(x) then all.y = true end
        if as_json and type(x) == "number" and not is_finite(x) then all[name] = true end
        if name == "t" and ffi.istype("uint64_t", x) then all.t = true end
      end
    end
  end
  for name, lists in pairs(q.weights) do
    for _, list in ipairs(lists) do
      for _, x in ipairs(list) do
        if as_json and not is_finite(x) then all[name] = true end
      end
    end
  end
  for _, sums in ipairs(next(wrong) and {} or kinds.answer(q).sums) do
    for _, x in ipairs(sums) do if not is_finite(x) then all.sums = true end end
  end
  return all
end

local server
local function try(requests, draw)
  local config, asked = { "silent" }, {}
  for _, q in ipairs(requests) do
    q.wrong = kinds.wrong(q)
    if not beyond_c(q) then
      local out, why = ask_c(q)
      judge(q, "C", out, why, q.wrong)
      if not only_moved(q) then
        out, why = ask_lua(q)
        judge(q, "Lua", out, why, wrong_lua(q, q.wrong))
      end
    end
    for _, form in ipairs { "rows", "columns", "v2", "binary" } do
      local quoted = draw(2) == 0
      local body, head
      if form == "rows" then body = rows(q, quoted) elseif form == "columns" then body = columns(q, quoted)
      else body, head = v2(q, quoted, form == "binary") end
      local name = ("%s/%d"):format(folder, #asked + 1)
      local f = assert(io.open(name, "wb"))
      f:write(body)
      f:close()
      if #asked > 0 then config[#config + 1] = "next\nsilent" end
      config[#config + 1] = ('url = "%s%s"\ndata-binary = "@%s"\noutput = "%s.out"%s'):format(server.url,
        head and "v2/models/doors/infer" or "v1/models/doors:predict", name, name, form == "binary"
        and ('\nheader = "Inference-Header-Content-Length: %d"'):format(head) or "")
      asked[#asked + 1] = { q = q, form = form, name = name, body = body }
    end
  end
  local said, status = serving.run(("curl -Z --parallel-max 16 -K %s"):format(shell.write(folder .. "/config",
    table.concat(config, "\n") .. "\n")))
  assert(status == 0, said)
  for _, a in ipairs(asked) do
    local wrong = wrong_http(a.q, a.q.wrong, a.form ~= "binary")
    local v1 = a.form == "rows" or a.form == "columns"
    for _, f in ipairs(FEATURES) do
      local odd, there = a.q.json[f.name], a.q.fields[f.name]
      if there and (v1 and odd or odd == "twice" or odd == "extra") then wrong[f.name] = true end
      -- in v2 the lengths of its lists are missing, too
      if there and not v1 and f.of and not a.q.fields[f.of] then wrong[f.name] = true end
    end
    local out, why = read_http(a.q, shell.read(a.name .. ".out"), a.form == "binary" and "v2" or a.form)
    judge(a.q, a.form, out, why, wrong)
  end
end

local function run(count, seconds, seed)
  kinds.write(path)
  peri.init()
  local out = ffi.new "peri_model *[1]"
  check(C.peri_model_open(path, C.PERI_MODEL_VERIFY, out))
  model, file = out[0], peri.export.open(path)
  server = serving.start(path, "--delay 2ms")
  local draw, n, until_ = drawing.generator(seed), 0, os.time() + (seconds or 0)
  while count and n < count or seconds and os.time() < until_ do
    local requests = {}
    for i = 1, math.min(25, (count or 25) - (count and n or 0)) do requests[i] = drawn(draw) end
    local ok, why = xpcall(try, debug.traceback, requests, draw)
    if not ok then
      server:stop()
      error(why, 0)
    end
    n = n + #requests
  end
  server:stop()
  C.peri_model_release(model)
  print(("%d requests: %d answers, %d refusals"):format(n, answered, refused))
end

local missing = serving.missing() or shell.no_launcher()
if missing then return print("nothing was tried: " .. missing) end
local count, seconds = tonumber((arg[1] or "200"):match "^(%d+)$"), tonumber((arg[1] or ""):match "^([%d.]+)s$")
local ok, why = pcall(run, count, seconds, tonumber(arg[2] or 1))
clean()
if not ok then
  print(why)
  print(("FAILED: repeat with: luajit tests/fuzz/doors.lua %s %s"):format(arg[1] or "200", arg[2] or "1"))
  os.exit(1)
end
