-- util.lua: what every other module may use: named arguments, checks of values, faces of modules, lazy values; and what
-- tables.lua and classes.lua have, under their names there: util.keys, util.class.
local ffi = require "ffi"
local errors = require "perilune.errors"
local fail, kind = errors.fail, errors.kind

local M = {}
for _, module in ipairs { "perilune.tables", "perilune.classes" } do
  for name, f in pairs(require(module)) do M[name] = f end -- any order: a set
end

local function list(names)
  local out = {}
  for i, name in ipairs(M.keys(names)) do out[i] = tostring(name) end
  return table.concat(out, ", ")
end

-- Types of arguments, as messages call them.
local type_text = { number = "a number", string = "a string", boolean = "true or false", table = "a table",
  list = "a list", seed = "a whole number 0..2^53 - 1, or a 64-bit one (9007199254740993LL)" }

local marks = {} -- what stands in a spec instead of a default -> { needed =, type =, default = }

local function mark(fields)
  local m = {}
  marks[m] = fields
  return m
end

local function marks_of_types(needed)
  local all = mark { needed = needed }
  for name in pairs(type_text) do all[name] = mark { needed = needed, type = name } end
  return setmetatable(all, { __index = function(_, name) error(("util: no type '%s'"):format(tostring(name)), 0) end })
end

--- In a spec of named arguments: one that must be given, and one that may be nil. Of any type, or of the type whose
--- name follows: util.required.number, util.optional.list, util.optional.seed.
M.required, M.optional = marks_of_types(true), marks_of_types(false)

--- In a spec: a default beside which values of other types are fine too.
function M.any(default) return mark { default = default } end

--- In a spec: a seed, which is a whole number of 64 bits, and its default.
function M.seed(default) return mark { type = "seed", default = default } end

--- In a spec: a number in a range and its default; util.required in the default's place: it must be given; nil: it may
--- be left out. `text` says what is allowed.
local function ranged(default, text, is)
  local needed = default == M.required
  return mark { needed = needed, type = "number", default = not needed and default or nil, text = text, is = is }
end

local function is_finite(x) return x > -math.huge and x < math.huge end -- NaN is not

local EXACT = 2 ^ 53 -- a Lua number from here on may have been rounded

--- Whether x is a whole number below 2^53 in size, from low (nil: any) to high (nil: any).
function M.is_whole(x, low, high)
  return type(x) == "number" and x == math.floor(x) and x > -EXACT and x < EXACT and x >= (low or x)
    and x <= (high or x)
end
--- What messages call such numbers, which `value` is none of.
local function whole_text(low, high, value)
  local last = high and ("%d"):format(high) or type(value) == "number" and value >= EXACT and "2^53 - 1" or ""
  return "whole numbers" .. (low and (" %d..%s"):format(low, last) or "")
end

--- In a spec: a finite number; one above `low`; one from `low` on, up to `high` (nil: any); one from `low` to below
--- `high`; a whole number from `low` (nil: any) to `high` (nil: any). Each with its default, as in ranged.
function M.finite(default) return ranged(default, "finite numbers", is_finite) end
function M.over(default, low)
  return ranged(default, ("finite numbers above %g"):format(low), function(x) return x > low and is_finite(x) end)
end
function M.from(default, low, high)
  return ranged(default, high and ("numbers %g..%g"):format(low, high) or ("finite numbers >= %g"):format(low),
    function(x) return x >= low and x <= (high or x) and is_finite(x) end)
end
function M.below(default, low, high)
  return ranged(default, ("numbers from %g to below %g"):format(low, high),
    function(x) return x >= low and x < high end)
end
function M.whole(default, low, high)
  return ranged(default, function(x) return whole_text(low, high, x) end,
    function(x) return M.is_whole(x, low, high) end)
end

--- The default that a spec has for an argument, or nil.
function M.default_of(default)
  local m = marks[default]
  if m then return m.default end
  return default
end

--- True where a spec says that the argument must be given.
function M.is_required(default) return marks[default] ~= nil and marks[default].needed == true end

local wide, unsigned = ffi.typeof "int64_t", ffi.typeof "uint64_t"
local function is_64_bit(value)
  return type(value) == "cdata" and (ffi.istype(wide, value) or ffi.istype(unsigned, value))
end

--- The type that a default asks for: a string can stand beside objects and codes, and tables are lists.
local of_default = { number = "number", boolean = "boolean", table = "lists" }

--- The value, if it is of the wanted type (nil: any); 64-bit integers that fit into numbers become numbers.
local function check_type(func, name, value, wanted)
  if type(value) == "table" and (wanted == "list" or wanted == "lists" and value[1] ~= nil) then
    local fault = M.list_fault(value)
    if not fault then return value end
    fail(("%s: %s %s"):format(func, name, fault))
  end
  if wanted == nil or type(value) == (wanted == "lists" and "table" or wanted) then return value end
  if wanted == "number" and is_64_bit(value) then
    local n = tonumber(value)
    if math.abs(n) < 2 ^ 53 then return n end
    fail(("%s: %s is %s, wanted a number below 2^53"):format(func, name, tostring(value)))
  end
  if wanted == "seed" and (is_64_bit(value) or M.is_whole(value, 0)) then
    return value
  end
  fail(("%s: %s is %s, wanted %s"):format(func, name, kind(value), type_text[wanted == "lists" and "list" or wanted]))
end

local sorted_names = setmetatable({}, { __mode = "k" }) -- a spec -> its names in order: not sorted for each call
local function names_of(spec)
  sorted_names[spec] = sorted_names[spec] or M.keys(spec)
  return sorted_names[spec]
end

--- An error that names an argument that the spec does not have.
local function refuse_unknown(func, args, spec)
  for name in M.ordered(args) do
    if spec[name] == nil then
      local words = type(name) == "number" and "%s: argument %s has no name; they go by name: %s"
        or "%s: no argument '%s'; allowed: %s"
      fail(words:format(func, tostring(name), next(spec) and list(spec) or "none"))
    end
  end
end

--- Check a table of named arguments. `spec` maps a name to its default, or to util.required / util.optional. Returns a
--- new table with all defaults filled in; unknown or missing names are errors that name the function, and so are values
--- of another type than the spec says or the default has.
function M.named(func, args, spec)
  if args == nil then args = {} end
  local meta = type(args) == "table" and getmetatable(args)
  if type(args) ~= "table" or meta and type(rawget(meta, "class_name")) == "string" then
    local needed = {}
    for name, default in M.ordered(spec) do
      if marks[default] and marks[default].needed then needed[#needed + 1] = name .. " = ..." end
    end
    fail(("%s: named arguments in a table wanted%s, got %s"):format(func, needed[1] and ": { " ..
      table.concat(needed, ", ") .. " }" or "", kind(args)))
  end
  local out, unknown = {}, false
  for name in pairs(args) do unknown = unknown or spec[name] == nil end -- any order
  if unknown then refuse_unknown(func, args, spec) end
  for _, name in ipairs(names_of(spec)) do
    local default = spec[name]
    local value, m = args[name], marks[default]
    if value ~= nil then
      value = check_type(func, name, value, m and m.type or not m and of_default[type(default)] or nil)
      if m and m.is and not m.is(value) then
        fail(("%s: %s is %s, allowed: %s"):format(func, name, kind(value), type(m.text) == "function" and m.text(value)
          or m.text))
      end
    elseif m then
      if m.needed then fail(("%s: argument '%s' is missing"):format(func, name)) end
      value = m.default
    else
      value = default
    end
    out[name] = value
  end
  return out
end

--- The spec of a class's arguments with those of a class below it.
function M.extended(spec, more)
  local all = M.copy(spec)
  for name, default in pairs(more) do all[name] = default end -- any order: a set
  return all
end

--- An error unless `value` is one of the strings in `allowed` (a list).
function M.one_of(func, what, value, allowed)
  for _, a in ipairs(allowed) do
    if a == value then return value end
  end
  fail(("%s: %s is %s, allowed: %s"):format(func, what, kind(value), table.concat(allowed, ", ")))
end

--- An error if a name is in a list of names twice; noun: what it names.
function M.distinct(func, noun, names)
  local seen = {}
  for _, name in ipairs(names) do
    if seen[name] then fail(("%s: %s '%s' is listed twice"):format(func, noun, name)) end
    seen[name] = true
  end
end

--- True for tables that are no lazy awaitables.
function M.is_plain(x)
  if type(x) ~= "table" then return false end
  local meta = getmetatable(x)
  return not (type(meta) == "table" and rawget(meta, "_lazy"))
end

--- A number or an error.
function M.number(func, what, value)
  if type(value) == "number" then return value end
  fail(("%s: %s is %s, wanted a number"):format(func, what, kind(value)))
end

--- A whole number in [low, high] or an error: what util.whole says of a named argument, of any value.
function M.integer(func, what, value, low, high)
  if M.is_whole(value, low, high) then return value end
  fail(("%s: %s is %s, allowed: %s"):format(func, what, kind(value), whole_text(low, high, value)))
end

--- So many of what a word says: "1 rank", "2 ranks".
function M.number_of(n, word) return ("%d %s%s"):format(n, word, n == 1 and "" or "s") end

local units = { [""] = 1, K = 2 ^ 10, M = 2 ^ 20, G = 2 ^ 30, T = 2 ^ 40 }
--- Bytes of "2G", "512M", or a number.
function M.bytes(func, size)
  local number, unit = tostring(size):match "^([%d.]+)([KMGT]?)i?B?$"
  local n = tonumber(number) and math.floor(tonumber(number) * units[unit])
  if not n or n < 1 then
    fail(("%s: size '%s', wanted bytes, such as 2G, 512M or 1000000"):format(func, tostring(size)))
  end
  return n
end

--- How many letters must be added, left out, replaced, or exchanged with their neighbours to make `a` of `b`.
local function distance(a, b)
  local d = {} -- d[i][j]: of the first i letters of a and the first j of b
  for i = 0, #a do
    d[i] = { [0] = i }
    for j = 1, #b do
      if i == 0 then d[i][j] = j
      else
        local x, y = a:byte(i), b:byte(j)
        d[i][j] = math.min(d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (x == y and 0 or 1))
        if i > 1 and j > 1 and x == b:byte(j - 1) and y == a:byte(i - 1) then
          d[i][j] = math.min(d[i][j], d[i - 2][j - 2] + 1)
        end
      end
    end
  end
  return d[#a][#b]
end

M.distance = distance

--- PyTorch's names of what is called otherwise here.
local of_pytorch = { view = "reshape", flatten = "reshape", cuda = "to(nil, 'cuda')", cpu = "to(nil, 'cpu')",
  float = "to('f32')", long = "to('i64')", half = "to('f16')", double = "to('f64')", int = "to('i32')",
  bool = "to('bool')", type = "to", astype = "to", type_as = "to", view_as = "reshape", expand_as = "expand",
  t = "transpose(1, 2)", T = "transpose(1, 2)", mT = "transpose(-2, -1)", mm = "matmul", mv = "matmul", dot = "matmul",
  ["repeat"] = "tile", SequentialLR = "LambdaLR", -- a function of the step says what comes after what
  masked_fill_ = "masked_fill", scatter_ = "scatter", scatter_add_ = "scatter_add", index_add_ = "index_add",
  clamp_ = "clamp", concat = "cat", embedding = "index_select", numpy = "to_table", tolist = "to_list",
  zero_ = "fill", fill_ = "fill", copy_ = "copy", requires_grad_ = "requires_grad", absolute = "abs", subtract = "sub",
  multiply = "mul", divide = "div", true_divide = "div", negative = "neg", greater = "gt", less = "lt", clip = "clamp",
  concatenate = "cat", swapaxes = "transpose", swapdims = "transpose", moveaxis = "movedim", ravel = "flatten",
  broadcast_to = "expand", argwhere = "nonzero", nelement = "numel", ndim = "dim", ger = "outer", inner = "matmul",
  index_reduce = "scatter_reduce", clip_grad_norm_ = "clip_grad_norm", clip_grad_value_ = "clip_grad_value",
  get_submodule = "get_module", buffers = "named_buffers" }
--- TorchRec's names of what is no object here.
local of_torchrec = { PoolingType = 'pooling = "SUM" or "MEAN"', DataType = 'data_type = "FP16", say',
  apply_optimizer_in_backward = "fused_params = { optimizer = ..., learning_rate = ... } of the collection; of single "
    .. "tables table_fused_params" }

--- The faces of the library in which people look for names.
local faces = { "peri", "peri.nn", "peri.nn.functional", "peri.nn.optim", "peri.nn.metrics", "peri.nn.init",
  "peri.plan", "peri.data", "peri.sparse", "peri.checkpoint", "peri.pipeline", "peri.embed", "peri.dist" }
local looking = false

--- The face that has the name, or nil.
local function elsewhere(name)
  looking = true
  local found
  for _, path in ipairs(faces) do
    local has = pcall(function()
      local face = M.above "perilune"
      for part in path:gmatch "%.([%w_]+)" do face = face[part] end
      assert(face[name] ~= nil)
    end)
    if has then
      found = path
      break
    end
  end
  looking = false
  return found
end

--- The key of the tables that may have been meant by `name`, or nil: at most a quarter of its letters differ.
function M.nearest(name, tables)
  local best, least, most = nil, math.huge, math.max(1, math.floor(#name / 4))
  for _, t in ipairs(tables) do
    for key in pairs(t) do
      -- nobody means a name of the library's own
      local open = type(key) == "string" and (key:sub(1, 1) ~= "_" or name:sub(1, 1) == "_")
      local near = open and math.abs(#key - #name) <= most -- each letter more or less is a step
      local d = near and distance(name:lower(), key:lower())
      if d and d <= most then
        d = d + distance(name, key) / 1000 -- capitals decide between equals
        if d < least or d == least and key < best then best, least = key, d end
      end
    end
  end
  return best
end

--- An error for a name that `what` does not have; it tells the name among the keys of `tables` that may have been
--- meant. noun: "method ".
function M.unknown(what, name, tables, noun)
  if looking then error("not here", 0) end -- asked by elsewhere, which wants no words
  local own, in_place = of_pytorch[name], type(name) == "string" and name .. "_"
  for _, t in ipairs(in_place and tables or {}) do
    if rawget(t, in_place) ~= nil then
      fail(("%s has no %s'%s'; is '%s' meant?"):format(what, noun or "", name, in_place))
    end
  end
  for _, t in ipairs(own and tables or {}) do
    if rawget(t, own:match "^[%w_]+") then
      local call = own:find "%(" and own or "'" .. own .. "'"
      fail(("%s has no %s'%s'; here it is %s"):format(what, noun or "", name, call))
    end
  end
  for _, called in ipairs((what .. "."):match "^peri%." and { name, own } or {}) do
    local path = elsewhere(called)
    if path then fail(("%s has no '%s'; it is %s.%s"):format(what, name, path, called)) end
  end
  if what == "peri" and of_torchrec[name] then
    fail(("%s has no '%s'; here it is %s"):format(what, name, of_torchrec[name]))
  end
  local best = M.nearest(name, tables)
  fail(("%s has no %s'%s'%s"):format(what, noun or "", name, best and ("; is '%s' meant?"):format(best) or ""))
end

--- A face of the library: `content`, and parts that load when they are first used. modules: key -> the module that is
--- loaded; names: key -> the key of the part that has it; whole: modules all of whose names are those of the face too.
--- Any other name is an error, which tells the name that may have been meant.
function M.face(what, content, modules, names, whole)
  modules, names, whole = modules or {}, names or {}, whole or {}
  return setmetatable(content, {
    -- for completion: names that are not loaded yet
    __names = function() return { modules, names, unpack(M.map(whole, require)) } end,
    __index = function(face, key)
      local value
      if modules[key] then value = require(modules[key])
      elseif names[key] then value = face[names[key]][key]
      elseif type(key) == "string" then
        local known = { content, modules, names }
        for _, module in ipairs(whole) do
          local part = require(module)
          known[#known + 1] = part
          if value == nil then value = rawget(part, key) end
        end
        if value == nil then M.unknown(what, key, known) end
      end
      rawset(face, key, value)
      return value
    end,
  })
end

--- The address of what a handle points to, as a number.
function M.address(x) return tonumber(ffi.cast("uintptr_t", x.ptr)) end

--- The value that an object stands for: the result of a lazy awaitable (a table whose class says _lazy), anything else
--- itself.
local function resolve(x)
  if type(x) ~= "table" then return x end
  local meta = getmetatable(x)
  if type(meta) ~= "table" or not rawget(meta, "_lazy") then return x end
  x = x:wait()
  if type(x) ~= "table" then return x end
  return M.resolve(x) -- a lazy result of a lazy one
end
M.resolve = resolve

--- Wait for all lazy awaitables in a list: before an array that others fill too is filled with what they stand for.
function M.settle(values)
  for i = 1, #values do resolve(values[i]) end
end

local MOST = 2 ^ 28 -- bytes; /dev/zero has no end
local PIECE = 2 ^ 16 -- LuaJIT keeps a buffer of what was asked for, not of what there was

--- The text of a file; or nil, and why there is none.
function M.read_file(path)
  local file, why = io.open(path, "rb")
  if not file then return nil, why end
  local pieces, size, piece = {}, 0
  repeat
    piece, why = file:read(PIECE)
    pieces[#pieces + 1], size = piece, size + (piece and #piece or 0)
  until not piece or size >= MOST
  file:close()
  if size >= MOST then why = ("it has %d MiB or more, which no text has that is read here"):format(MOST / 2 ^ 20) end
  if why then return nil, why:find(path, 1, true) and why or ("'%s': %s"):format(path, why) end
  return table.concat(pieces)
end

--- A module of a layer above, for a method of a class below that opens a door to it (nn.Module:export). It loads when
--- the method is called.
function M.above(name) return require(name) end

return M
