-- inputs_of_all_kinds.lua: a model file with an input of each kind, written by hand, and in plain Lua what does not fit
-- it, and what it answers. A request is { n = samples, fields = { name = a list of each sample }, weights = { name =
-- lists } }; an id is an int64_t, or an uint64_t from 2^63 on.
local ffi = require "ffi"
local peri = require "perilune"
local P = require "perilune.ffi"
local C, check = P.C, P.check

local M = {}

--- Raw ids that have a row.
local KNOWN = { 0LL, 5LL, -1LL, ffi.cast("int64_t", 0x8000000000000000ULL), 0x7fffffffffffffffLL, 123456789012345LL }
local FREE = -77LL

-- In the order of the file. rows: ids below have one; raw: the map's row of unknown ids; of: lists are as long as its.
local FEATURES = {
  { name = "x", kind = "dense", columns = 2, finite = 1 },
  { name = "y", kind = "dense", columns = 1, optional = 1 },
  { name = "a", kind = "ids", rows = 50, unknown = "refuse" },
  { name = "b", kind = "ids", rows = 9, unknown = "skip" },
  { name = "w", kind = "ids", rows = 20, unknown = "refuse", weighted = 1, finite = 1 },
  { name = "v", kind = "ids", rows = 20, unknown = "skip", weighted = 1, optional = 1 },
  { name = "r", kind = "ids", rows = #KNOWN, raw = "drop" },
  { name = "e", kind = "ids", rows = #KNOWN, raw = "error" },
  { name = "l", kind = "ids", rows = 30, unknown = "refuse", length = 2 },
  { name = "t", kind = "whole", of = "a" },
  { name = "p", kind = "numbers", of = "a", finite = 1 },
  { name = "c", kind = "dense", columns = 1, counts = 2, finite = 1, of = "a" },
}
local LOOKUPS = { "a", "b", "w", "v", "r", "e", "l" }
local feature = {}
for i, f in ipairs(FEATURES) do feature[f.name], f.index = f, i - 1 end

--- What row `row` of a feature's table has: numbers whose sums are exact in f32.
local function value_of(f, row) return f.index * 8 + (row * 3 % 16) / 4 end

--- Write the file; `path`: where.
function M.write(path)
  local out, section, place = ffi.new "peri_model_writer *[1]", ffi.new "int32_t[1]", ffi.new "peri_model_writer_place"
  check(C.peri_model_writer_new(path, out))
  local w, sections = out[0], {}
  local function put(ctype, list)
    local data = ffi.new(ctype .. "[?]", #list, list)
    check(C.peri_model_writer_begin(w, section))
    check(C.peri_model_writer_put(w, data, ffi.sizeof(data)))
    sections[#sections + 1] = true
    return #sections - 1
  end
  local ids = put("int64_t", KNOWN)
  check(C.peri_model_writer_begin(w, section))
  check(C.peri_model_writer_index(w, ffi.new("int64_t[?]", #KNOWN, KNOWN), #KNOWN, FREE))
  sections[#sections + 1] = true
  local inputs, tables, maps, bags = {}, {}, {}, {}
  for i, f in ipairs(FEATURES) do
    local words = { ('"name":"%s","kind":"%s"'):format(f.name, f.kind) }
    for _, key in ipairs { "columns", "rows", "optional", "finite", "weighted", "length", "counts" } do
      if f[key] then words[#words + 1] = ('"%s":%d'):format(key, f[key]) end
    end
    if f.unknown then words[#words + 1] = ('"unknown":"%s"'):format(f.unknown) end
    if f.name == "y" then words[#words + 1] = '"missing":"3fd0000000000000"' end -- 0.25
    inputs[i] = "{" .. table.concat(words, ",") .. "}"
  end
  for i, name in ipairs(LOOKUPS) do
    local f, rows = feature[name], {}
    for row = 0, f.rows - 1 do rows[row + 1] = value_of(f, row) end
    tables[i] = ('{"name":"t_%s","dtype":"f32","rows":%d,"columns":1,"section":%d}'):format(name, f.rows,
      put("float", rows))
    if f.raw then
      maps[#maps + 1] = ('{"ids":%d,"index":%d,"free":"%s","segments":[0,%d],"spread":"hash","unknown":"%s"}'):format(
        ids, ids + 1, bit.tohex(FREE, 16), f.rows, f.raw)
    end
    bags[i] = ('{"input":%d,"table":%d,"pooling":"sum"%s}'):format(f.index, i - 1, f.raw and (',"map":%d'):format(
      #maps - 1) or "")
  end
  for i = 1, #sections do
    check(C.peri_model_writer_section(w, i - 1, place))
    sections[i] = ('{"offset":%d,"bytes":%d,"checksum":"%s"}'):format(tonumber(place.offset), tonumber(place.bytes),
      bit.tohex(place.checksum, 16))
  end
  local copy = '{"op":"copy","in":[%d],"out":%d,"sizes":[1,0,%d,1]}'
  local header = ('{"name":"doors","inputs":[%s],"lists":[{"inputs":[%d,%d,%d]}],"tables":[%s],"maps":[%s],"values":['
    .. '{"columns":2,"input":0},{"columns":1,"input":1},{"columns":1,"input":%d},{"columns":1,"list":0,"input":%d},'
    .. '{"columns":%d},{"columns":2},{"columns":1},{"columns":1},{"columns":1,"list":0}],"operations":['
    .. '{"op":"lookup","in":[],"out":4,"bags":[%s]},%s,%s,%s,'
    .. '{"op":"binary","function":"add","in":[3,3],"out":8,"sizes":[1,1,1,1]}],"outputs":[{"name":"sums","value":4},'
    .. '{"name":"x","value":5},{"name":"y","value":6},{"name":"c","value":7},{"name":"p","value":8}],"sections":[%s]}')
    :format(table.concat(inputs, ","), feature.a.index, feature.t.index, feature.p.index, table.concat(tables, ","),
      table.concat(maps, ","), feature.c.index, feature.p.index, #LOOKUPS, table.concat(bags, ","),
      copy:format(0, 5, 2), copy:format(1, 6, 1), copy:format(2, 7, 1), table.concat(sections, ","))
  check(C.peri_model_writer_finish(w, header, #header))
  check(C.peri_model_writer_publish(w))
  C.peri_model_writer_release(w)
end
--- Outputs: a name, columns, and whether a sample has a list.
M.OUTPUTS = { { "sums", #LOOKUPS }, { "x", 2 }, { "y", 1 }, { "c", 1 }, { "p", 1, true } }
M.FEATURES, M.KNOWN, M.feature = FEATURES, KNOWN, feature

local function is_finite(x) return x - x == 0 end
M.is_finite = is_finite
local function known(id)
  for row, k in ipairs(KNOWN) do if ffi.cast("int64_t", id) == k then return row - 1 end end
end
local function below(id, rows) return ffi.cast("uint64_t", id) < ffi.cast("uint64_t", rows) end

--- What does not fit: names of features -> true.
function M.wrong(q)
  local wrong = {}
  for _, f in ipairs(FEATURES) do
    local lists = q.fields[f.name]
    if not lists and not f.optional then wrong[f.name] = true end
    for b = 1, q.n do
      local list, of = lists and lists[b] or {}, f.of and q.fields[f.of] and #q.fields[f.of][b] or 0
      if lists and f.name == "c" then
        local x = list[1]
        if not (x >= 0 and x <= of and x == math.floor(x)) then wrong.c = true end
      elseif f.of and #list ~= of then wrong[f.name] = true end
      if lists and f.length and #list ~= f.length then wrong[f.name] = true end
      for k, x in ipairs(list) do
        if f.kind == "dense" or f.kind == "numbers" then
          if f.finite and not is_finite(x) then wrong[f.name] = true end
        elseif f.unknown == "refuse" and not below(x, f.rows) or f.raw == "error" and not known(x) then
          wrong[f.name] = true
        end
        if f.weighted and not q.weights[f.name] then wrong[f.name] = true
        elseif f.weighted and f.finite and not is_finite(q.weights[f.name][b][k]) then wrong[f.name] = true end
      end
    end
  end
  return wrong
end

--- The answer in plain Lua: { sums = { { ... } a sample }, ... }; p: the lists of samples.
function M.answer(q)
  local out = { sums = {}, x = {}, y = {}, c = {}, p = {} }
  for b = 1, q.n do
    local sums = {}
    for i, name in ipairs(LOOKUPS) do
      local f, sum = feature[name], 0
      for k, id in ipairs(q.fields[name] and q.fields[name][b] or {}) do
        local row = id
        if f.raw then row = known(id) elseif not below(id, f.rows) then row = nil end
        if row then sum = sum + value_of(f, tonumber(row)) * (f.weighted and q.weights[name][b][k] or 1) end
      end
      sums[i] = sum
    end
    out.sums[b], out.x[b], out.c[b] = sums, q.fields.x[b], q.fields.c[b]
    out.y[b] = q.fields.y and q.fields.y[b] or { 0.25 }
    out.p[b] = peri.util.map(q.fields.p[b], function(x) return 2 * x end)
  end
  return out
end

return M
