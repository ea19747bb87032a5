-- launch/complete.lua: what may stand at the cursor of an interactive session: globals, fields, methods, arguments of
-- what is called with braces, names in help "", files in other strings.
local util = require "perilune.util"

local M = {}

local keywords = { "and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in", "local",
  "nil", "not", "or", "repeat", "return", "then", "true", "until", "while" }

--- Add the names among the keys of a table to a set.
local function add(set, t)
  for key in next, t do -- any order: a set
    if type(key) == "string" and key:match "^[%a][%w_]*$" then set[key] = true end
  end
end

--- The set of names that can follow a value.
local function names_of(value, depth)
  local set = {}
  local methods = type(value) == "cdata" and require("perilune.ffi").methods_of(value)
  if methods then add(set, methods) end
  if type(value) == "string" then add(set, string) end
  while type(value) == "table" and depth > 0 do
    add(set, value)
    local meta = debug.getmetatable(value)
    if type(meta) ~= "table" then break end
    if type(meta.__names) == "function" then -- a face: parts that are not loaded yet
      for _, t in ipairs(meta.__names()) do add(set, t) end
    end
    if type(rawget(value, "methods")) == "table" then add(set, value.methods) end
    local index = rawget(meta, "__index")
    value, depth = type(index) == "table" and index or rawget(meta, "ancestry") and meta or nil, depth - 1
  end
  return set
end

--- The value of "a.b.c" among the globals; fields are looked up, nothing is called.
local function value_of(path)
  local value = _G
  for name in path:gmatch "[%a_][%w_]*" do
    local ok, found = pcall(function() return value[name] end)
    if not ok or found == nil then return nil end
    value = found
  end
  return value
end

local function matching(set, prefix)
  local list = {}
  for _, name in ipairs(util.keys(set)) do
    if name:sub(1, #prefix) == prefix then list[#list + 1] = name end
  end
  return list
end

--- Names of the reference, for help "...": with the whole name that is typed, or what it may stand for without "peri.".
local function helped(prefix)
  local set = {}
  for name in next, require("perilune.manual").texts do -- any order: a set
    set[name] = true
    set[name:match "^peri%.(.*)" or name] = true
  end
  return matching(set, prefix)
end

--- The text before the cursor without its strings and the brackets that are closed; and what there is of a string that
--- is open, or nil.
local function open_parts(before)
  local text, at = "", 1
  while true do
    local plain, quote, inside = before:match("^([^\"']*)([\"'])()", at)
    if not plain then break end
    text, at = text .. plain, inside
    local behind_escape = inside
    while behind_escape do
      at, behind_escape = behind_escape, before:match("^[^\\\n" .. quote .. "]*\\.()", behind_escape)
    end
    at = before:match("[\n" .. quote .. "]()", at) -- at the end of a line a string ends, or was an apostrophe
    if not at then return text, before:sub(inside) end
  end
  text = text .. before:sub(at)
  repeat
    local n, m
    text, n = text:gsub("%([^(){}]*%)", "")
    text, m = text:gsub("{[^(){}]*}", "")
  until n + m == 0
  return text
end

--- The arguments that the reference names for what is called with the braces around the cursor, `nn.Linear { in`, where
--- one can begin; else nil.
local function arguments_of(text)
  local name, given = text:match "([%a_][%w_%.:]*)%s*%(?%s*{([^{]*)$"
  if not name or not ("," .. given):match "[,;]%s*[%w_]*$" then return nil end
  local found = require("perilune.launch.help").find(name)
  local list = #found == 1 and require("perilune.manual").texts[found[1]]:match "^  [%w_.:]+ {([^}]*)}"
  if not list then return nil end
  local set = {}
  for argument in list:gmatch "[%w_]+" do set[argument] = true end
  return set
end

--- Files and folders whose paths begin with a text.
local function files(path)
  local folder, prefix = path:match "^(.*/)([^/]*)$"
  local set = {}
  for _, name in ipairs(require("perilune.launcher").names(folder or ".")) do
    if name:sub(1, 1) ~= "." or (prefix or path):sub(1, 1) == "." then set[(folder or "") .. name] = true end
  end
  return matching(set, path)
end

--- For a text that ends at the cursor: where its last word begins, and the list of words that may stand there.
function M.complete(before)
  local quoted = before:match "help%s*%(?%s*[\"']([%w_%.:]*)$"
  if quoted then return #before - #quoted + 1, helped(quoted) end
  local text, string_begun = open_parts(before)
  if string_begun then return #before - #string_begun + 1, files(string_begun) end
  local path, prefix = before:match "([%a_][%w_%.]*)[%.:]([%w_]*)$"
  if path then
    local value = value_of(path)
    return #before - #prefix + 1, value ~= nil and matching(names_of(value, 8), prefix) or {}
  end
  prefix = before:match "[%a_][%w_]*$" or ""
  local set = arguments_of(text)
  if not set then
    set = names_of(_G, 1)
    for _, word in ipairs(keywords) do set[word] = true end
  end
  return #before - #prefix + 1, matching(set, prefix)
end

return M
