-- classes.lua: classes, the fields that their objects take, and the arguments that make them.
local table_new = require "table.new"
local errors = require "perilune.errors"
local tables = require "perilune.tables"
local fail, kind = errors.fail, errors.kind

local M = {}

local FIELDS = 8 -- that an object has room for from the start: a table that grows is made again at 1, 2 and 4

-- Objects of sealed classes whose `init` runs now: until it has returned, fields can be added.
local making = setmetatable({}, { __mode = "k" })

--- True for functions and for what can be called like one.
function M.is_callable(x)
  local meta = type(x) == "table" and getmetatable(x)
  return type(x) == "function" or type(meta) == "table" and meta.__call ~= nil
end

--- Fields of an object that a script may assign: those that it has, and those that its class names (some may be nil
--- now).
local function fields_of(object, class)
  local names = {}
  for key in next, object do
    if type(key) == "string" and key:sub(1, 1) ~= "_" then names[key] = true end
  end
  for key in pairs(class.settable) do names[key] = true end -- any order: a set
  return tables.keys(names)
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
  local settable = tables.copy(base and base.settable or {})
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
  for _, key in ipairs(tables.keys(object) or {}) do
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

return M
