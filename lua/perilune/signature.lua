-- signature.lua: what public functions take: one line each, from which a check is made that runs before every call.
--
--   signature.check("", M, { pow = "t: tensor, exponent: number", sum = "t: tensor, dim: dims?, keepdim: boolean?" })
--
-- replaces M.pow and M.sum by functions that look at their arguments and then call what was there. "?": may be nil (or
-- false). A wrong argument is an
-- error that names the function, the argument, the value, and what is allowed. The checks are compiled with their
-- callers.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"

local M = {}

--- Every signature: { name = "pow", arguments = { { name =, kind =, optional = } }, table = M, key = "pow" }. For
--- tests.
M.all = {}

--- watch.call: false but while a model is recorded (export/record.lua); then function(func, f, ...), which is called in
--- the place of each checked function f, and calls it.
M.watch = { call = false }

local wide, unsigned, pointer = ffi.typeof "int64_t", ffi.typeof "uint64_t", ffi.typeof "peri_device *"
local RELEASED = "was released (did it outlive its scope? keep it with peri.keep)"
M.RELEASED = RELEASED

local istype, type = ffi.istype, type
local is_whole = util.is_whole
--- Whole numbers that are what was written: a Lua number from 2^53 on may have been rounded, a 64-bit integer was not.
local function any_whole(x)
  return is_whole(x) or type(x) == "cdata" and (istype(wide, x) or istype(unsigned, x))
end
local function dimension(x) return x ~= 0 and is_whole(x, -8, 8) end

--- Kinds of arguments: what they are called in messages, and whether a value is one. `lua`: those that are plain Lua
--- types.
local kinds = {
  number = { text = "a number", lua = "number" },
  string = { text = "a string", lua = "string" },
  boolean = { text = "true or false", lua = "boolean" },
  table = { text = "a table", lua = "table" },
  list = {
    text = "a list",
    is = function(x) return type(x) == "table" and not util.list_fault(x) end,
    why = function(x) return type(x) == "table" and util.list_fault(x) end,
  },
  ["function"] = { text = "a function", lua = "function" },
  integer = {
    text = "a whole number",
    is = any_whole,
    why = function(x)
      return type(x) == "number" and math.abs(x) >= 2 ^ 53
        and ("is %.17g, wanted a whole number below 2^53, or a 64-bit one (9007199254740993LL)"):format(x)
    end,
  },
  count = { text = "a whole number 0..2^53 - 1", is = function(x) return is_whole(x, 0) end },
  int = { text = "a whole number below 2^31", is = function(x) return is_whole(x, -2 ^ 31, 2 ^ 31 - 1) end },
  dim = { text = "a dimension: 1, 2, ..., or -1, -2, ... from the end", is = dimension },
  dims = {
    text = "a dimension (1, 2, ..., or -1, -2, ... from the end) or a list of dimensions",
    is = function(x)
      if type(x) ~= "table" then return dimension(x) end
      for i = 1, #x do
        if not dimension(x[i]) then return false end
      end
      return #x <= 8 and not util.list_fault(x)
    end,
  },
  dtype = {
    text = "a dtype such as 'f32'",
    is = function(x) return type(x) == "string" or type(x) == "number" and P.dtype_names[x] ~= nil end,
  },
  device = {
    text = "a device's name",
    is = function(x) return type(x) == "string" or type(x) == "cdata" and istype(pointer, x) and x ~= nil end,
  },
  callable = { text = "a function", is = util.is_callable },
  object = { -- "self: table": a method called on its class would complain of a field that is nil
    text = "an object",
    is = function(x) return type(x) == "table" and rawget(x, "class_name") == nil end,
    why = function(x)
      return type(x) == "table"
        and ("is the class %s, wanted an object of it"):format(tostring(rawget(x, "class_name")))
    end,
  },
}

--- Add a kind: `text` for messages, `is` the test, and (optional) `why(x)`: the words for a value that is of the kind
--- but cannot be used.
function M.kind(name, text, is, why)
  if kinds[name] and kinds[name].text ~= text then
    error(("signature.kind: '%s' is %s already, and cannot be %s"):format(name, kinds[name].text, text), 2)
  end
  kinds[name] = { text = text, is = is, why = why }
end

--- The words for the first field of a table that is wrong, or nil.
local function wrong_field(x, fields)
  for i = 1, #fields do
    local f = fields[i]
    local value = x[f.name]
    if not (f.optional and not value) and not M.is(f.kind, value) then
      return ("has %s = %s, wanted %s"):format(f.name, M.text(value), kinds[f.kind].text)
    end
  end
end

--- Add the kind of a table with certain fields and methods (kind "callable"); it may have others. fields: name -> kind,
--- with "?" behind it where the field may be nil or false.
function M.object(name, text, fields)
  local list = {}
  for field, kind in util.ordered(fields) do
    list[#list + 1] = { name = field, kind = (kind:gsub("%?$", "")), optional = kind:find "%?$" ~= nil }
  end
  M.kind(name, text, function(x) return util.is_plain(x) and not wrong_field(x, list) end,
    function(x) return util.is_plain(x) and wrong_field(x, list) or nil end)
end

--- Add the kind of a list of values of one kind.
function M.list_of(name, text, kind)
  local function wrong(x)
    if x[1] == nil and next(x) ~= nil then return ("has the key '%s', wanted %s"):format(tostring((next(x))), text) end
    for i = 1, #x do
      if not M.is(kind, x[i]) then
        local why = kinds[kind].why and kinds[kind].why(x[i])
        return ("[%d] %s"):format(i, why or ("is %s, wanted %s"):format(M.text(x[i]), kinds[kind].text))
      end
    end
  end
  M.kind(name, text, function(x) return util.is_plain(x) and not wrong(x) end,
    function(x) return util.is_plain(x) and wrong(x) or nil end)
end

--- Add the kind of a pointer to a C object that is not NULL: for functions between the library's own parts, which
--- scripts can reach too.
function M.pointer(name, ctype)
  local of = ffi.typeof(ctype .. " *")
  M.kind(name, ("what C made (%s *)"):format(ctype), function(x)
    return type(x) == "cdata" and istype(of, x) and x ~= nil
  end)
end

--- Add the kind of a handle: a live one, or a lazy awaitable that stands for one.
function M.handle(name, ctype)
  M.kind(name, (name:match "^[AEIOUaeiou]" and "an " or "a ") .. name, function(x)
    return istype(ctype, x) and x.ptr ~= nil
  end,
    function(x) return istype(ctype, x) and RELEASED end)
end

--- A value for a message: numbers and short strings themselves, else what it is.
function M.text(x)
  if type(x) == "string" then return ("'%s'"):format(#x > 40 and x:sub(1, 40) .. "..." or x) end
  if type(x) == "number" then return P.numeral(x) end
  if type(x) == "boolean" or x == nil then return tostring(x) end
  if type(x) ~= "cdata" then return "a " .. type(x) end
  if istype(wide, x) or istype(unsigned, x) then return tostring(x) end
  local meta = kinds[M.name_of(x)]
  return meta and meta.text or "a cdata"
end

--- The name of the kind that a handle is of, or nil.
function M.name_of(x)
  local found -- the plainest: not "a tensor or a number"
  for name, kind in pairs(kinds) do
    local fits = kind.why and (kind.is(x) or kind.why(x))
    if fits and (not found or #kind.text < #kinds[found].text) then found = name end
  end
  return found
end

--- Why a value is not of a kind, if the kind knows; nil or false: it does not.
function M.why(kind, x) return kinds[kind].why and kinds[kind].why(x) end

local function test(kind, x)
  if kind.lua then return type(x) == kind.lua end
  return kind.is(x)
end

--- Whether a value is of a kind. Lazy awaitables are not of the kind of their result: `value` resolves them.
function M.is(kind, x) return test(kinds[kind], x) end

--- Methods that are functions, too (those of tensors): their first argument is not called self.
M.methods = {}

--- The words for a method that was called with a dot (x.sum(), x.sum(2)): its object is missing, and what stands in its
--- place is the next argument, or nothing.
local function with_dot(func, a, x)
  local name = func:match "[%w_]+$"
  if not a.first or type(x) == "table" or type(x) == "cdata" then return "" end
  if a.name ~= "self" and (func:find(".", 1, true) or not rawget(M.methods, name)) then return "" end -- "data.share"
  return (" (a method is called with a colon: x:%s(...))"):format(name)
end

--- Complain about argument `a` of `func`, unless what it stands for is right: then return that.
local function bad(func, a, x)
  local kind = kinds[a.kind]
  local y = util.resolve(x)
  if not rawequal(y, x) and test(kind, y) then return y end
  local why = kind.why and kind.why(y)
  if why then P.fail(("%s: %s %s"):format(func, a.name == "self" and "this " .. a.kind or a.name, why)) end
  P.fail(("%s: %s is %s, wanted %s%s"):format(func, a.name, M.text(y), kind.text, with_dot(func, a, y)))
end

--- Complain about an argument behind those that there are, which Lua would drop without a word.
local function beyond(func, list, x)
  local n = #list - (list[1] and list[1].name == "self" and 1 or 0)
  P.fail(("%s: an argument more than the %d that it takes: %s"):format(func, n, M.text(x)))
end

--- "t: tensor, dim: dims?" -> { { name = "t", kind = "tensor", first = true },
--- { name = "dim", kind = "dims", optional = true } }. "..., and more": it is called with arguments behind these, which
--- others that are called in its place take.
local function parse(line)
  local list = { open = line:find "and more$" ~= nil }
  for name, kind, mark in line:gmatch "([%w_]+):%s*([%w_]+)(%??)" do
    if kind ~= "any" and not kinds[kind] then error(("signature: no kind '%s' in '%s'"):format(kind, line), 0) end
    list[#list + 1] = { name = name, kind = name == "self" and kind == "table" and "object" or kind,
      optional = mark == "?", first = #list == 0 }
  end
  return list
end

--- The text that returns the results of a call.
local function handing_on(call, results)
  if not results then return "return " .. call end
  if results == 1 then return ("return (%s)"):format(call) end
  local names, lines = {}, {}
  for i = 1, results do
    names[i] = "r" .. i
    local all = table.concat(names, ", ")
    table.insert(lines, 1, i == 1 and "return r1" or ("if type(r%d) ~= 'nil' then return %s end"):format(i, all))
  end
  return ("local %s = %s\n%s"):format(table.concat(names, ", "), call, table.concat(lines, "\n"))
end

local bytecode = {} -- a checking function's text -> what it was compiled to

--- A chunk of this text. Each has code of its own, since LuaJIT counts calls and keeps traces by code; but a text is
--- compiled once: 234 functions of tensors have 63 different ones.
local function chunk_of(text)
  bytecode[text] = bytecode[text] or string.dump(assert(loadstring(text, "=perilune.signature")))
  return loadstring(bytecode[text])
end

--- The checking function around f, made of text so that it has as many parameters as there are: `...` is not compiled.
--- `results`: how many f has at most (those that are nil at the end are left out); they are handed on without a tail
--- call: LuaJIT counts tail calls as rounds of a loop, and gives a trace up that has more than `loopunroll` of them
--- (library.lua), which would be one of as many functions. nil: any number, by a tail call.
local function guard(func, f, list, results)
  local names, lines, tests, locals = {}, {}, {}, {}
  for i, a in ipairs(list) do
    names[i] = "a" .. i
    local kind = kinds[a.kind]
    if kind then
      local wrong = kind.lua and ("type(a%d) ~= '%s'"):format(i, kind.lua) or ("not is%d(a%d)"):format(i, i)
      local unless = not a.optional and "" or (a.kind == "boolean" and "type(a%d) ~= 'nil' and "
        or "a%d and "):format(i)
      lines[#lines + 1] = ("if %s%s then a%d = bad(func, list[%d], a%d) end"):format(unless, wrong, i, i, i)
      tests[i] = kind.is
      if kind.is then locals[#locals + 1] = ("local is%d = is[%d]"):format(i, i) end
    end
  end
  if not list.open then lines[#lines + 1] = "if more ~= nil then beyond(func, list, more) end" end
  local parameters, comma = table.concat(names, ", "), #names > 0 and ", " or ""
  local text = ("local f, func, list, is, bad, beyond, type, watch = ...\n%s\nreturn function(%s%smore)\n%s\n"
    .. "if watch.call then return watch.call(func, f%s%s) end\n%s\nend"):format(table.concat(locals, "\n"), parameters,
    comma, table.concat(lines, "\n"), comma, parameters, handing_on(("f(%s)"):format(parameters), results))
  return chunk_of(text)(f, func, list, tests, bad, beyond, type, M.watch)
end

--- The value `x` of argument `name` of `func`, if it is of the kind; else an error as for arguments.
function M.value(func, name, x, kind)
  if test(kinds[kind], x) then return x end
  return bad(func, { name = name, kind = kind }, x)
end

--- The kind of objects of a class, for `self`: a method called on its class, or on something else, would complain of a
--- field that is nil.
local function self_of(class)
  local name = "object of " .. class.class_name
  kinds[name] = kinds[name] or { text = "an object of " .. class.class_name, is = class.is, why = kinds.object.why }
  return name
end

--- Put checks in front of functions of a table: `signatures` maps their names to their arguments; messages begin with
--- `prefix` and the name. `results` (any number): how many results each has at most, others are dropped: then loops of
--- many of them are compiled (guard).
function M.check(prefix, functions, signatures, results)
  local class = rawget(functions, "class_name") and functions
  for name, line in util.ordered(signatures) do
    local list = parse(line)
    if class and list[1] and list[1].kind == "object" then list[1].kind = self_of(class) end
    M.all[#M.all + 1] = { name = prefix .. name, arguments = list, table = functions, key = name }
    functions[name] = guard(prefix .. name, functions[name] or error("signature: no function " .. prefix .. name, 0),
      list, results)
  end
end
--- The same of functions that have one result.
function M.check_one(prefix, functions, signatures) M.check(prefix, functions, signatures, 1) end

--- Functions of any number of arguments, which check them themselves: they are watched as the others are.
function M.check_none(prefix, functions, names)
  local watch = M.watch
  for _, name in ipairs(names) do
    local f, func = functions[name], prefix .. name
    functions[name] = function(...)
      if watch.call then return watch.call(func, f, ...) end
      return f(...)
    end
  end
end

--- check and check_one with one line of arguments for all functions of a list of names.
function M.check_each(prefix, functions, names, line, results)
  local signatures = {}
  for _, name in ipairs(names) do signatures[name] = line end
  M.check(prefix, functions, signatures, results)
end
function M.check_each_one(prefix, functions, names, line) M.check_each(prefix, functions, names, line, 1) end

M.list_of("strings", "a list of strings", "string")
M.list_of("numbers", "a list of numbers", "number")

return M
