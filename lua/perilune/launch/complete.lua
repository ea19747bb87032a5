-- launch/complete.lua: what may stand at the cursor of an interactive session: globals, fields, methods, names in help
-- "".
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

--- For a text that ends at the cursor: where its last word begins, and the list of words that may stand there.
function M.complete(before)
  local quoted = before:match "help%s*%(?%s*[\"']([%w_%.:]*)$"
  if quoted then return #before - #quoted + 1, helped(quoted) end
  local path, prefix = before:match "([%a_][%w_%.]*)[%.:]([%w_]*)$"
  if path then
    local value = value_of(path)
    return #before - #prefix + 1, value ~= nil and matching(names_of(value, 8), prefix) or {}
  end
  prefix = before:match "[%a_][%w_]*$" or ""
  local set = names_of(_G, 1)
  for _, word in ipairs(keywords) do set[word] = true end
  return #before - #prefix + 1, matching(set, prefix)
end

return M
