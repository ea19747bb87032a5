-- util.lua: what every other module may use: classes, named arguments, ordered iteration.
local ffi = require "ffi"
local table_new = require "table.new"
local errors = require "perilune.errors"
local fail, kind = errors.fail, errors.kind

local M = {}

local FIELDS = 8 -- that an object has room for from the start: a table that grows is made again at 1, 2 and 4

-- Objects of sealed classes whose `init` runs now: until it has returned, fields can be added.
local making = setmetatable({}, { __mode = "k" })

--- Fields of an object that a script may assign: those that it has, and those that its class names (some may be nil
--- now).
local function fields_of(object, class)
  local names = {}
  for key in next, object do
    if type(key) == "string" and key:sub(1, 1) ~= "_" then names[key] = true end
  end
  for key in pairs(class.settable) do names[key] = true end -- any order: a set
  return M.keys(names)
end

--- What a class has under a name, itself or from its bases; the __index of some classes raises an error where there is
--- nothing.
local function own_or_inherited(class, key)
  while class do
    local value = rawget(class, key)
    if value ~= nil then return value end
    class = rawget(class, "super")
  end
end

--- An error unless an object of a sealed class takes `value` as its field `key`. A name with "_" in front is a note of
--- Perilune's own, and a function in place of a method replaces it.
function M.check_assign(object, key, value)
  local class = getmetatable(object)
  if making[object] or class.settable[key] or type(key) == "string" and key:sub(1, 1) == "_" then return end
  local method = M.is_callable(own_or_inherited(class, key))
  if method and M.is_callable(value) then return end
  local advice = class.set_advice and class.set_advice(object, key)
  fail(("%s: no field '%s' can be set%s; allowed: %s%s"):format(class.class_name, tostring(key), method
    and ", it is a method" or "", table.concat(fields_of(object, class), ", "), advice and "; " .. advice or ""))
end

local function assign(object, key, value)
  M.check_assign(object, key, value)
  rawset(object, key, value)
end

--- Seal a class, and those that Perilune makes below it: an assignment to a name that `init` gave no field is an error,
--- which tells the names that there are. The arguments are sets whose keys can be assigned too: some fields are nil at
--- first. Scripts' own classes below it are open. Returns the class.
function M.seal(class, ...)
  local base = rawget(class, "super")
  local settable = M.copy(base and base.settable or {})
  for _, set in ipairs { ... } do
    for name in pairs(set) do settable[name] = true end -- any order: a set
  end
  class.settable, class._sealed, class.__newindex = settable, true, rawget(class, "__newindex") or assign
  class.set_advice = rawget(class, "set_advice") or base and base.set_advice or false
  return class
end

-- How many arguments the `init` of a class takes, by that function: asked once, since the question is slow and cuts
-- LuaJIT's traces. Scripts' own, and those that take any number, have math.huge.
local taken = setmetatable({}, { __mode = "k" })

local function most_of(init)
  local n = taken[init]
  if n == nil then
    local info = debug.getinfo(init, "uS")
    n = (info.isvararg or not errors.of_library(info.source)) and math.huge or info.nparams - 1
    taken[init] = n
  end
  return n
end

--- An error where a class of Perilune's gets more arguments than it takes. Lua would drop them, and `Adagrad({ params =
--- p }, 0.5)` would train with another rate than the one that it says.
local function check_count(class, allowed, ...)
  for i = allowed + 1, select("#", ...) do
    local extra = select(i, ...)
    if extra ~= nil then
      local first = (...)
      local named = type(first) == "table" and getmetatable(first) == nil
      fail(("%s: argument %d is %s, but it takes %d%s"):format(class.class_name, i, kind(extra), allowed, named
        and allowed == 1 and ", a table with all options by name" or ""))
    end
  end
end

--- Run the `init` of a new object, in which a sealed one takes fields. Arguments are counted when it is over, since it
--- has better words for those that it knows.
function M.construct(object, class, ...)
  if class._sealed then making[object] = true end
  object:init(...)
  if class._sealed then making[object] = nil end
  local n = select("#", ...)
  if n > 1 and n > most_of(class.init) then check_count(class, most_of(class.init), ...) end
end

--- A value in what an object shows of itself; nil: it is left out.
local function shown(value)
  local t = type(value)
  if t == "string" then return ("'%s'"):format(#value > 40 and value:sub(1, 40) .. "..." or value) end
  if t == "number" or t == "boolean" then return tostring(value) end
  if t == "table" and getmetatable(value) == nil and #value > 0 and #value <= 8 then
    local parts = {}
    for i, x in ipairs(value) do
      if type(x) == "table" or type(x) == "cdata" then return end
      parts[i] = shown(x) or "?"
    end
    return "{ " .. table.concat(parts, ", ") .. " }"
  end
end

--- What tostring shows of an object whose class has nothing better: its class and its plain fields: "StepLR { gamma =
--- 0.5, ... }".
local function show(object)
  local parts = {}
  for _, key in ipairs(M.keys(object) or {}) do
    local text = type(key) == "string" and key:sub(1, 1) ~= "_" and shown(rawget(object, key))
    if text then parts[#parts + 1] = key .. " = " .. text end
  end
  local name = getmetatable(object).class_name
  return #parts == 0 and name or ("%s { %s }"):format(name, table.concat(parts, ", "))
end

--- A class: call it to make an instance, which runs `init`. `base` (optional) is inherited from. Instances know `class`
--- and `is`.
function M.class(name, base)
  if type(name) ~= "string" then fail(("the name of a class is %s, wanted a string"):format(kind(name))) end
  if type(base) ~= "nil" and not (type(base) == "table" and rawget(base, "class_name")) then
    fail(("class %s: its base is %s, wanted a class"):format(name, kind(base)))
  end
  local class = {}
  class.__index = class
  class.class_name = name
  class.super = base
  class.__tostring = base and base.__tostring or show
  -- What objects of the class are: itself and its bases. Asked in every step, so there is no walk (a loop cuts LuaJIT's
  -- traces).
  local ancestry = { [class] = true }
  for c in pairs(base and rawget(base, "ancestry") or {}) do ancestry[c] = true end -- any order: a set
  class.ancestry = ancestry
  -- scripts' classes are theirs
  class._sealed = base and base._sealed and errors.of_library(debug.getinfo(2, "S").source) or false
  if class._sealed then class.__newindex = rawget(base, "__newindex") end
  function class.is(object)
    local c = type(object) == "table" and getmetatable(object)
    local its = type(c) == "table" and rawget(c, "ancestry")
    return its and its[class] or false
  end
  return setmetatable(class, {
    __index = base,
    __tostring = function() return "class " .. name end,
    __call = function(_, ...)
      local object = setmetatable(table_new(0, FIELDS), class)
      if not class.init then fail(("%s: the base of other classes, of which objects are made"):format(name)) end
      M.construct(object, class, ...)
      return object
    end,
  })
end

local function numbers_first(a, b)
  local ta, tb = type(a), type(b)
  if ta ~= tb then return ta < tb end
  return a < b
end

--- Keys of a table in a fixed order: numbers ascending, then strings ascending. For everything whose order reaches a
--- wire, a plan or a file (style J6). Keys of other kinds have no order: then nil, and the kind of one.
function M.keys(t)
  local keys, n, numbers, odd = {}, 0, 0, nil
  for k in pairs(t) do
    n = n + 1
    keys[n] = k
    if type(k) == "number" then numbers = numbers + 1
    elseif type(k) ~= "string" then odd = type(k) end
  end
  if odd then return nil, odd end
  table.sort(keys, numbers > 0 and numbers < n and numbers_first or nil)
  return keys
end

--- for key, value in util.ordered(t): pairs in the order of `keys`.
function M.ordered(t)
  if type(t) ~= "table" then fail(("%s where a table is wanted"):format(kind(t))) end
  local keys, odd = M.keys(t)
  local i = 0
  if odd then fail(("a %s as key, allowed: strings and numbers"):format(odd)) end
  return function()
    i = i + 1
    local k = keys[i]
    if k ~= nil then return k, t[k] end
  end
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

--- True where a spec says that the argument must be given.
function M.is_required(default) return marks[default] ~= nil and marks[default].needed == true end

local wide, unsigned = ffi.typeof "int64_t", ffi.typeof "uint64_t"
local function is_whole(value)
  return type(value) == "cdata" and (ffi.istype(wide, value) or ffi.istype(unsigned, value))
end

--- The type that a default asks for: a string can stand beside objects and codes, and tables are lists.
local of_default = { number = "number", boolean = "boolean", table = "lists" }

--- Why a table is no whole list, in words; nil: it is one. A list ends before its first nil: what stands behind it
--- would be left out, as would what has a name. (A list of parameters has names beside its entries, `elsewhere` and
--- others, if it has any entries here.)
function M.list_fault(x)
  if getmetatable(x) ~= nil or x.elsewhere ~= nil then return nil end
  local n = #x
  for i = 1, n do
    if x[i] == nil then return ("has an entry [%d], and no entry [%d]"):format(n, i) end
  end
  local key = next(x, n > 0 and n or nil)
  if key == nil then return nil end
  if n == 0 and type(key) ~= "number" then
    return ("is a table with the key '%s', wanted a list"):format(tostring(key))
  end
  for other in next, x do
    if type(other) == "number" and (other < 1 or other > n) then
      return ("has an entry [%s], and no entry [%d]"):format(other, n + 1)
    end
  end
end

--- The value, if it is of the wanted type (nil: any); 64-bit integers that fit into numbers become numbers.
local function check_type(func, name, value, wanted)
  if type(value) == "table" and (wanted == "list" or wanted == "lists" and value[1] ~= nil) then
    local fault = M.list_fault(value)
    if not fault then return value end
    fail(("%s: %s %s"):format(func, name, fault))
  end
  if wanted == nil or type(value) == (wanted == "lists" and "table" or wanted) then return value end
  if wanted == "number" and is_whole(value) then
    local n = tonumber(value)
    if math.abs(n) < 2 ^ 53 then return n end
    fail(("%s: %s is %s, wanted a number below 2^53"):format(func, name, tostring(value)))
  end
  if wanted == "seed" and (is_whole(value) or type(value) == "number" and value == math.floor(value) and value >= 0
    and value < 2 ^ 53) then
    return value
  end
  fail(("%s: %s is %s, wanted %s"):format(func, name, kind(value), type_text[wanted == "lists" and "list" or wanted]))
end

--- Check a table of named arguments. `spec` maps a name to its default, or to util.required / util.optional. Returns a
--- new table with all defaults filled in; unknown or missing names are errors that name the function, and so are values
--- of another type than the spec says or the default has.
function M.named(func, args, spec)
  if args == nil then args = {} end
  local meta = type(args) == "table" and getmetatable(args)
  if type(args) ~= "table" or meta and type(rawget(meta, "class_name")) == "string" then
    fail(("%s: named arguments in a table wanted, got %s"):format(func, kind(args)))
  end
  local out = {}
  for name in M.ordered(args) do
    if spec[name] == nil then
      fail(("%s: no argument '%s'; allowed: %s"):format(func, tostring(name), next(spec) and list(spec) or "none"))
    end
  end
  for name, default in M.ordered(spec) do
    local value, m = args[name], marks[default]
    if value ~= nil then
      value = check_type(func, name, value, m and m.type or not m and of_default[type(default)] or nil)
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

--- True for tables that are no lazy awaitables.
function M.is_plain(x)
  if type(x) ~= "table" then return false end
  local meta = getmetatable(x)
  return not (type(meta) == "table" and rawget(meta, "_lazy"))
end

--- True for functions and for what can be called like one.
function M.is_callable(x)
  local meta = type(x) == "table" and getmetatable(x)
  return type(x) == "function" or type(meta) == "table" and meta.__call ~= nil
end

--- A number or an error.
function M.number(func, what, value)
  if type(value) == "number" then return value end
  fail(("%s: %s is %s, wanted a number"):format(func, what, kind(value)))
end

--- A whole number in [low, high] or an error.
function M.integer(func, what, value, low, high)
  if type(value) ~= "number" or value ~= math.floor(value) or value < low or value > (high or 2 ^ 53) then
    local too_large = type(value) == "number" and value > 2 ^ 53
    fail(("%s: %s is %s, allowed: whole numbers %d..%s"):format(func, what, kind(value), low, high
      and ("%d"):format(high)
      or too_large and "2^53" or ""))
  end
  return value
end

--- Whether a value is a list from 1 on without gaps, and nothing beside.
function M.is_whole_list(value)
  local keys = type(value) == "table" and M.keys(value)
  return keys and #keys == #value or false
end

--- A list from 1 on without gaps, or an error. of: what its entries are.
function M.whole_list(func, what, value, of)
  if not M.is_whole_list(value) then
    fail(("%s: %s is no list of %s: it has entries behind a nil, or keys that are no positions"):format(func, what, of))
  end
  return value
end

--- So many of what a word says: "1 rank", "2 ranks".
function M.number_of(n, word) return ("%d %s%s"):format(n, word, n == 1 and "" or "s") end

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
local of_pytorch = { view = "reshape", flatten = "reshape", cuda = "to", cpu = "to", float = "to", long = "to",
  half = "to", numpy = "to_table", tolist = "to_list", zero_ = "fill", fill_ = "fill", copy_ = "copy",
  requires_grad_ = "requires_grad" }
--- TorchRec's names of what is no object here.
local of_torchrec = { PoolingType = 'pooling = "SUM" or "MEAN"', DataType = 'data_type = "FP16", say',
  apply_optimizer_in_backward = "fused_params = { optimizer = ..., learning_rate = ... } of the collection" }

--- An error for a name that `what` does not have; it tells the name among the keys of `tables` that may have been
--- meant. noun: "method ".
function M.unknown(what, name, tables, noun)
  local own = of_pytorch[name]
  for _, t in ipairs(own and tables or {}) do
    if rawget(t, own) then fail(("%s has no %s'%s'; here it is '%s'"):format(what, noun or "", name, own)) end
  end
  if what == "peri" and of_torchrec[name] then
    fail(("%s has no '%s'; here it is %s"):format(what, name, of_torchrec[name]))
  end
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

--- The positions of a list's values: { "a", "b" } -> { a = 1, b = 2 }.
function M.index_of(values)
  local index = {}
  for i, v in ipairs(values) do index[v] = i end
  return index
end

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

--- The text of a file; or nil, and why there is none.
function M.read_file(path)
  local file, why = io.open(path, "rb")
  if not file then return nil, why end
  local text
  text, why = file:read(MOST)
  if text == nil and not why then text = "" end
  if text and #text == MOST then
    text, why = nil, ("it has %d MiB or more, which no text has that is read here"):format(MOST / 2 ^ 20)
  end
  file:close()
  return text, why and (why:find(path, 1, true) and why or ("'%s': %s"):format(path, why))
end

--- Exchange all fields of two tables.
function M.exchange(a, b)
  local from_a = {}
  for k, v in pairs(a) do from_a[k] = v end
  for k in pairs(from_a) do rawset(a, k, nil) end
  for k, v in pairs(b) do rawset(a, k, v) end
  for k in pairs(a) do rawset(b, k, nil) end
  for k, v in pairs(from_a) do rawset(b, k, v) end
end

--- A module of a layer above, for a method of a class below that opens a door to it (nn.Module:export). It loads when
--- the method is called.
function M.above(name) return require(name) end

--- A new table with the fields of `t`.
function M.copy(t)
  local out = {}
  for k, v in pairs(t) do out[k] = v end
  return out
end

--- The median of a list of numbers (of two in the middle the lesser), and the least. The list stays as it is; an empty
--- one has none.
function M.median(numbers)
  local sorted = M.copy(numbers)
  table.sort(sorted)
  return sorted[math.ceil(#sorted / 2)], sorted[1]
end

--- A new list of f(value, position).
function M.map(values, f)
  local out = {}
  for i, v in ipairs(values) do out[i] = f(v, i) end
  return out
end

return M
