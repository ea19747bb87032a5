-- export/file.lua: the operations of a lowering, the tables and the constants, as a model file (docs/model_file.md).
local bit = require "bit"
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local config = require "perilune.embed.config"
local Formulas = require "perilune.export.formulas"
local Tensor = require "perilune.tensor"
local ShardedTensor = require("perilune.tensor.sharded").ShardedTensor
local C, check = P.C, P.check

local M = {}

-- -- JSON -------------------------------------------------------------------------------------------------------------

local function quoted(text)
  return '"' .. text:gsub('[%c"\\\127]', function(c) return ("\\u%04x"):format(c:byte()) end) .. '"'
end

--- A value as JSON: texts, whole numbers, true and false as 1 and 0, lists, and { { key, value }, ... } with ordered =
--- true.
local function json(x)
  if type(x) == "string" then return quoted(x) end
  if type(x) == "boolean" then return x and "1" or "0" end
  if type(x) == "number" then return ("%.0f"):format(x) end
  local parts = {}
  for i, y in ipairs(x) do parts[i] = x.ordered and ("%s:%s"):format(quoted(y[1]), json(y[2])) or json(y) end
  return (x.ordered and "{%s}" or "[%s]"):format(table.concat(parts, ","))
end

local function object(...) return { ordered = true, ... } end

local bits = ffi.new "union { double number; uint32_t word[2]; }"
--- A double as the 16 hexadecimal digits of its bits: exact, whatever the locale.
local function hex(x)
  bits.number = x
  return bit.tohex(bits.word[1]) .. bit.tohex(bits.word[0])
end
--- The number whose 16 hexadecimal digits these are, as an int64.
local function bits_of(digits)
  return ffi.cast("int64_t", tonumber(digits:sub(1, 8), 16) * 4294967296ULL + tonumber(digits:sub(9), 16))
end
local function hex_of(u64) return bit.tohex(tonumber(u64 / 2 ^ 32)) .. bit.tohex(tonumber(u64 % 2 ^ 32)) end

-- -- rows of tables ---------------------------------------------------------------------------------------------------

--- Formats of rows of bytes by the names that files have for them, and all dtypes of tables.
local row_formats = {}
M.table_dtypes = { f32 = true, f16 = true, bf16 = true }
for name, format in util.ordered(config.row_formats) do
  row_formats[name:lower()], M.table_dtypes[name:lower()] = format, true
end

local out = ffi.new "peri_tensor *[1]"

--- Rows of table `name` as they lie in a file; nil and why, if `dtype` does not hold their numbers. first: the number
--- of the first of them.
local function encoded(name, rows, dtype, first)
  if rows:dtype() == "u8" then return rows end -- as they are
  local status = C.peri_rows_encode(name, row_formats[dtype] or P.dtype(dtype), first, Tensor.ptr(rows), out)
  if status == C.PERI_ERANGE then return nil, ffi.string(C.peri_error_message()) end
  check(status)
  return Tensor.wrap(out[0])
end

local format = ffi.new "peri_row_format"
local bytes = ffi.new "int64_t[1]"
--- Bytes of a row of n numbers of a dtype of tables.
function M.row_bytes(dtype, n)
  if not row_formats[dtype] then return n * tonumber(C.peri_dtype_size(P.dtype(dtype))) end
  check(C.peri_row_format_of(row_formats[dtype], format))
  check(C.peri_quantize_row_bytes(format, n, bytes))
  return tonumber(bytes[0])
end

local BLOCK_BYTES = 16 * 2 ^ 20

--- Call f(tensor, first row) with blocks of a table's rows, in their order. weight: a function(row, n) -> tensor, a
--- tensor, or a ShardedTensor, which is collective, and then f is called on all ranks.
local function by_rows(weight, rows, columns, f)
  local whole = ShardedTensor.is(weight) and weight:gather() or Tensor.is(weight) and weight or nil
  local step = math.max(1, math.floor(BLOCK_BYTES / (4 * columns)))
  for from = 0, rows - 1, step do
    local n = math.min(step, rows - from)
    P.scope(function()
      local block = whole and whole:slice(1, from, from + n) or weight(from, n)
      f(block:detach():to(nil, "cpu"):contiguous(), from)
    end)
  end
end

--- Why a table (an entry of M.write's `tables`) cannot be `dtype`, in words; nil: it can. Reads all of it.
function M.refusal(t, dtype)
  local why
  by_rows(t.weight, t.rows, t.columns, function(block, first)
    if not why then why = select(2, encoded(t.name, block, dtype, first)) end
  end)
  return why
end

-- -- writing ----------------------------------------------------------------------------------------------------------

local Writer = util.class "ExportWriter"
local Handle = P.handle("peri_model_writer", {}, {}, "the writer of a model file")
local writer_out, number, place = ffi.new "peri_model_writer *[1]", ffi.new "int32_t[1]",
  ffi.new "peri_model_writer_place"

local data_out = ffi.new "void *[1]"
--- Where the elements of a contiguous tensor begin; nil: of another one.
local function begin_of(t)
  if not t:is_contiguous() or C.peri_tensor_data(t.ptr, data_out) < 0 then return nil end
  return ffi.cast("char *", data_out[0])
end

--- Which tensors of a model's state constants are made of. list: of { name =, tensor = }.
local Names = util.class "ExportNames"
M.Names = Names
function Names:init(list)
  self.by_handle, self.places = {}, {}
  for _, entry in ipairs(list) do
    local t = util.resolve(entry.tensor)
    local begin, n = begin_of(t), t:numel()
    self.by_handle[util.address(t)] = entry.name
    if begin and n > 0 then
      -- tensor: its memory is nobody else's meanwhile
      self.places[#self.places + 1] = { name = entry.name, begin = begin, n = n, dtype = t:dtype(), shape = t:shape(),
        element = tonumber(C.peri_dtype_size(P.dtype(t:dtype()))), tensor = t }
    end
  end
end

--- The tensor of the state that `t` is: a table of the fields of a section (`source`; of some of its elements, which
--- follow each other, `first` and `of` too), or nil. at: the address of what its handle points to. matrix: its shape
--- matters.
function Names:find(t, at, matrix)
  if self.by_handle[at] then return { source = self.by_handle[at] } end
  local begin, part = begin_of(t), nil
  for _, p in ipairs(begin and t:numel() > 0 and self.places or {}) do
    local first = tonumber(begin - p.begin) / p.element
    if p.dtype == t:dtype() and first >= 0 and first + t:numel() <= p.n then
      local all = t:numel() == p.n and (not matrix or #p.shape == 2 and p.shape[1] == t:size(1))
      if all then return { source = p.name } end
      part = part or { source = p.name, first = first, of = p.n }
    end
  end
  return part
end

--- rank: only rank 0 writes; the others take part in what is collective. dense: dtype of matrices. names: of the
--- model's parameters and buffers (Names). trace: the recording that the constants are of.
function Writer:init(path, rank, dense, names, trace)
  self.rank, self.sections, self.panels, self.dense, self.sources = rank, 0, {}, dense, {}
  self.formulas = Formulas(names, trace)
  self.names = names
  self.loose = {} -- who uses constants of which nobody knows whether they come from parameters
  for _, taken in ipairs(trace.taken) do
    if self.formulas:origin(taken.x) ~= "fixed" then
      self.loose[#self.loose + 1] = taken.where .. ": what takes numbers of a tensor into Lua"
    end
  end
  if rank ~= 0 then return end
  check(C.peri_model_writer_new(path, writer_out))
  self.handle = Handle(writer_out[0])
end

--- Begin a section. of: what it is made of (Names:find), where that is in the model's state; turned: of its transpose.
function Writer:begin(of, turned)
  self.sections = self.sections + 1
  local fields = {}
  for _, name in ipairs { "source", "first", "of", "formula" } do
    if of and of[name] then fields[#fields + 1] = { name, of[name] } end
  end
  if of and turned then fields[#fields + 1] = { "turned", 1 } end
  self.sources[self.sections] = fields
  if self.handle then check(C.peri_model_writer_begin(self.handle.ptr, number)) end
  return self.sections - 1
end

function Writer:put(tensor)
  if not self.handle then return end
  local buffer, n = tensor:read()
  check(C.peri_model_writer_put(self.handle.ptr, buffer, n * tonumber(C.peri_dtype_size(P.dtype(tensor:dtype())))))
end

--- What a constant's section is made of, as fields of it; nil: nobody knows, and then the file follows no trainer. x: {
--- constant = tensor, at =, ... } of the recording; used: who uses it, in words; matrix: its shape matters; undivided:
--- it may be no part of a tensor.
function Writer:origin_of(x, used, matrix, undivided)
  local of = self.names:find(x.constant, x.at, matrix)
  if of and not (undivided and of.of) then return of end
  if self.formulas:origin(x) == "fixed" then return { source = "" } end
  local output = self.formulas:find(x)
  if output then return { formula = output } end
  self.loose[#self.loose + 1] = used or "the model"
end

--- A constant (as origin_of takes it), as f32.
function Writer:constant(x, used)
  local tensor = x.constant
  local of = x.number and { source = "" } or self:origin_of(x, used)
  local section = self:begin(of)
  for _, n in ipairs((tensor:dtype() == "i32" or tensor:dtype() == "i64") and tensor:reshape(-1):to_list() or {}) do
    if math.abs(tonumber(n)) > 2 ^ 24 then
      P.fail(("export: a constant has the whole number %s, allowed: up to 2^24, which f32 holds"):format(tostring(n)))
    end
  end
  self:put(tensor:detach():to("f32", "cpu"):contiguous())
  return section
end

--- The dtype of matrices in a file: what `dense` says without its _products.
local function matrix_dtype(dense) return (dense:match "^[^_]+") end

--- The matrix of a linear layer; each once.
function Writer:matrix(p)
  local key = ("%s %s"):format(p.at, tostring(p.transposed))
  if self.panels[key] then return self.panels[key] end
  local of = self:origin_of({ constant = p.tensor, at = p.at, dtype = p.tensor:dtype(), shape = p.tensor:shape() },
    p.used, true)
  local t = p.tensor:detach():to("f32", "cpu")
  if p.transposed then t = t:transpose(1, 2) end
  t = t:contiguous()
  local shape, section = t:shape(), self:begin(of, p.transposed)
  if self.handle then
    local dtype, buffer = matrix_dtype(self.dense), t:read()
    local status = C.peri_model_writer_matrix(self.handle.ptr, buffer, shape[1], shape[2],
      P.dtype(dtype == "int8" and "i8" or dtype))
    if status == C.PERI_ERANGE then
      P.fail(("export: matrix %s, of %s: %s; or another `dense`"):format(of and of.source and ("'%s'"):format(of.source)
        or "computed of the model's state", p.used or "the model", ffi.string(C.peri_error_message())))
    end
    check(status)
  end
  self.panels[key] = section
  return section
end

--- The table `name` (see by_rows) in `dtype`. source: name of its tensor in the model's state; items: the constant that
--- its rows are, as origin_of takes it.
function Writer:table(name, weight, rows, columns, dtype, source, items)
  local section = self:begin(source and { source = source } or items and self:origin_of(items, items.used, true,
    true))
  by_rows(weight, rows, columns, function(block, first)
    local made, why = encoded(name, block, dtype, first)
    if not made then P.fail(("export: %s; or another dtype for it in `tables`"):format(why)) end
    self:put(made)
  end)
  return section
end

--- A map of raw ids (collections.lua) as JSON: the ids of its rows, and the index that leads to them.
function Writer:map(map)
  local n = map.ids:numel()
  local ids = self:begin { source = map.source }
  self:put(map.ids)
  local index = self:begin()
  if self.handle then check(C.peri_model_writer_index(self.handle.ptr, (map.ids:read()), n, bits_of(map.free))) end
  return object({ "ids", ids }, { "index", index }, { "free", map.free }, { "segments", map.segments },
    { "spread", map.spread }, { "block", map.block }, { "unknown", map.unknown }, { "aside", map.aside })
end

--- Sections as JSON.
function Writer:places()
  local list = {}
  for i = 1, self.sections do
    check(C.peri_model_writer_section(self.handle.ptr, i - 1, place))
    list[i] = object({ "offset", tonumber(place.offset) }, { "bytes", tonumber(place.bytes) },
      { "checksum", hex_of(place.checksum) })
    for _, field in ipairs(self.sources[i]) do table.insert(list[i], field) end
  end
  return list
end

function Writer:finish(header)
  if not self.handle then return end
  local text = json(header)
  check(C.peri_model_writer_finish(self.handle.ptr, text, #text))
  return ffi.string(C.peri_model_writer_path(self.handle.ptr))
end

function Writer:publish()
  if self.handle then check(C.peri_model_writer_publish(self.handle.ptr)) end
end

function Writer:release()
  if self.handle then self.handle:release() end
end

-- -- the header -------------------------------------------------------------------------------------------------------

local function operation_json(o, index, weight, dense, bags)
  local fields = object({ "op", o.op })
  local function add(key, value) fields[#fields + 1] = { key, value } end
  if o["function"] then add("function", o["function"]) end
  add("in", util.map(o.inputs, index))
  add("out", index(o.out))
  if o.sizes then add("sizes", o.sizes) end
  if o.numbers then add("numbers", util.map(o.numbers, hex)) end
  if weight then
    add("weight", weight)
    add("weight_dtype", matrix_dtype(dense))
    if dense ~= matrix_dtype(dense) then add("products", matrix_dtype(dense)) end
  end
  if o.table then add("table", o.table) end
  if o.input then add("input", o.input) end
  if bags then add("bags", bags) end
  return fields
end

--- The operations in the order in which the file has them: each lookup stands in front of what first reads it, so that
--- its rows come from memory while the operations before it run.
local function ordered(operations)
  local list = {}
  for i = #operations, 1, -1 do
    local o, at = operations[i], 1
    for k = o.op == "lookup" and #list or 0, 1, -1 do
      for _, x in ipairs(list[k].inputs) do
        if x == o.out then at = k end
      end
    end
    table.insert(list, at, o)
  end
  return list
end

--- The values, operations and outputs of p (below) as JSON: a list of { key, list }.
local function body(w, p)
  local renumbered, values = {}, {}
  local function index(old) return renumbered[old] end
  for old, v in util.ordered(p.values) do
    renumbered[old] = #values
    local fields = object({ "columns", v.columns })
    if v.input then fields[#fields + 1] = { "input", v.input } end
    if v.list then fields[#fields + 1] = { "list", v.list } end
    if v.constant then fields[#fields + 1] = { "section", w:constant(v, v.used) } end
    values[#values + 1] = fields
  end
  local operations = util.map(ordered(p.operations), function(o)
    local bags = o.bags and util.map(o.bags, function(b)
      local fields = object({ "input", b.input }, { "table", b.index })
      if o.op == "lookup" then fields[#fields + 1] = { "pooling", b.pooling } end
      if b.positions then fields[#fields + 1] = { "positions", index(b.positions) } end
      if b.map then fields[#fields + 1] = { "map", b.map } end
      return fields
    end)
    return operation_json(o, index, o.panels and w:matrix(o.panels), w.dense, bags)
  end)
  local outputs = util.map(p.outputs, function(o) return object({ "name", o.name }, { "value", index(o.value) }) end)
  return { "values", values }, { "operations", operations }, { "outputs", outputs }
end

--- The formulas of constants as JSON; nil: there are none.
local function formulas_of(w)
  local program = w.formulas:program()
  if not program then return nil end
  local inputs = util.map(program.inputs, function(i)
    return object({ "name", i.name }, { "kind", "dense" }, { "columns", i.columns })
  end)
  return object({ "inputs", inputs }, body(w, program))
end

--- Write everything but the name. p: { writer =, operations =, values = (of the lowering, those that are used), inputs
--- =, outputs =, tables = { { name =, weight =, rows =, columns =, dtype =, source =, items = } }, maps =, lists = (of
--- collections.lua), name =, step = }. Returns the path of the finished file, on rank 0.
function M.write(p)
  local w = p.writer
  local tables = util.map(p.tables, function(t)
    return object({ "name", t.name }, { "dtype", t.dtype }, { "rows", t.rows }, { "columns", t.columns },
      { "section", w:table(t.name, t.weight, t.rows, t.columns, t.dtype, t.source, t.items) })
  end)
  local maps = util.map(p.maps, function(map) return w:map(map) end)
  local values, operations, outputs = body(w, p)
  local formulas = formulas_of(w)
  if not w.handle then return end
  local header = object({ "name", p.name }, { "producer", "perilune " .. ffi.string(C.peri_version()) })
  if p.step then header[#header + 1] = { "step", p.step } end
  if w.loose[1] then header[#header + 1] = { "loose", (w.loose[1]:sub(1, 190):gsub("[\128-\255]", "?")) } end
  for _, part in ipairs {
    { "inputs", p.inputs }, outputs, { "tables", tables }, { "maps", maps }, { "lists", util.map(p.lists, function(l)
      return l.of and object({ "of", l.of }) or object({ "inputs", l.inputs })
    end) }, values, operations, { "sections", w:places() } } do
    header[#header + 1] = part
  end
  if formulas then header[#header + 1] = { "formulas", formulas } end
  return w:finish(header)
end

M.Writer, M.object, M.hex = Writer, object, hex

return M
