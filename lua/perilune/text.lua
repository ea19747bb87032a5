-- text.lua: data as text: tables, strings, numbers, true and false, written as Lua or JSON write them, and read from
-- Lua text, which may have comments. Reading runs nothing: this is a parser of constructors, and whatever else Lua
-- could say is refused.
--
--   return {
--     perilune_plan = 1,
--     modules = { ["sparse.ebc"] = { items = { sharding_type = "table_wise", compute_kernel = "fused",
--       ranks = { 1 } } } },
--   }
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"

local DEPTH = 32         -- of tables within tables
local LONGEST = 64 * 2 ^ 20 -- bytes of a text

local M = { DEPTH = DEPTH }

local escapes = { n = "\n", t = "\t", r = "\r", a = "\a", b = "\b", f = "\f", v = "\v", ["\\"] = "\\", ['"'] = '"',
  ["'"] = "'", ["\n"] = "\n" }

local function fail(s, format, ...)
  local _, lines = s.text:sub(1, s.at):gsub("\n", "\n")
  P.fail(("%s, line %d: %s"):format(s.from, lines + 1, format:format(...)))
end

--- What stands at the reader, for a message.
local function here(s)
  local word = s.text:match("^[%w_.]+", s.at) or s.text:sub(s.at, s.at)
  return word == "" and "the end" or ("'%s'"):format((word:sub(1, 40):gsub("%c", "?")))
end

--- Go over blanks and comments.
local function skip(s)
  while true do
    local at = s.text:match("^%s*()", s.at)
    local comment = s.text:match("^%-%-[^\n]*()", at)
    if s.text:find("^%-%-%[=*%[", at) then fail(s, "a long comment, allowed: comments of one line") end
    s.at = comment or at
    if not comment then return end
  end
end

local function string_of(s, quote)
  local parts, at = {}, s.at + 1
  while true do
    local plain, next_at = s.text:match('^([^"\'\\\n]*)()', at)
    parts[#parts + 1], at = plain, next_at
    local c = s.text:sub(at, at)
    if c == quote then
      s.at = at + 1
      return table.concat(parts)
    elseif c == '"' or c == "'" then
      parts[#parts + 1], at = c, at + 1
    elseif c == "\\" then
      local code = s.text:match("^%d%d?%d?", at + 1)
      local plain_escape = escapes[s.text:sub(at + 1, at + 1)]
      s.at = at
      if code and tonumber(code) < 256 then parts[#parts + 1], at = string.char(tonumber(code)), at + 1 + #code
      elseif plain_escape then parts[#parts + 1], at = plain_escape, at + 2
      else fail(s, "an escape that is none of \\n \\t \\\\ \\\" \\' \\ddd and their like") end
    else
      fail(s, "a string without an end")
    end
  end
end

local value_of

--- The key of a field, if one stands here: name = or ["text"] =.
local function key_of(s)
  local name, after = s.text:match("^([%a_][%w_]*)%s*=()", s.at)
  if name and s.text:sub(after, after) ~= "=" then
    s.at = after
    return name
  end
  if s.text:sub(s.at, s.at) ~= "[" then return nil end
  s.at = s.at + 1
  skip(s)
  local quote = s.text:sub(s.at, s.at)
  if quote ~= '"' and quote ~= "'" then fail(s, "%s as a key, allowed: names and strings", here(s)) end
  local key = string_of(s, quote)
  skip(s)
  local rest = s.text:match("^%]%s*=()", s.at) or fail(s, "%s where ']=' is wanted", here(s))
  s.at = rest
  return key
end

local function table_of(s, depth)
  if depth > DEPTH then fail(s, "tables within tables, %d deep; allowed: %d", depth, DEPTH) end
  local out, kind = {}, nil
  s.at = s.at + 1
  while true do
    skip(s)
    if s.text:sub(s.at, s.at) == "}" then break end
    local key = key_of(s)
    local own = key and "object" or "list"
    if kind and kind ~= own then fail(s, "a table with keys and with values that have none") end
    kind = own
    if key and out[key] ~= nil then fail(s, "the key '%s' comes twice", (key:sub(1, 80):gsub("%c", "?"))) end
    out[key or #out + 1] = value_of(s, depth)
    skip(s)
    local separator = s.text:match("^[,;]", s.at)
    if separator then s.at = s.at + 1
    elseif s.text:sub(s.at, s.at) ~= "}" then fail(s, "%s where ',' or '}' is wanted", here(s)) end
  end
  s.at = s.at + 1
  s.kind[out] = kind or "object"
  return out
end

function value_of(s, depth)
  skip(s)
  local c = s.text:sub(s.at, s.at)
  if c == "{" then return table_of(s, depth + 1) end
  if c == '"' or c == "'" then return string_of(s, c) end
  local word = s.text:match("^%-?[%w_.]+", s.at) or ""
  local exponent = s.text:match("^%-?[%d.]+[eE][+-]%d+", s.at)
  word = exponent or word
  if word:match "^%-?%.?%d" then
    local number = tonumber(word)
    if number then
      s.at = s.at + #word
      return number
    end
  elseif word == "true" or word == "false" then
    s.at = s.at + #word
    return word == "true"
  end
  fail(s, "%s where a value is wanted: a table, a string, a number, true or false", here(s))
end

--- The value that a text says, and kind: by table "object" (keys are names) or "list". An empty table is an object.
--- `from` names the text in messages.
function M.decode(text, from)
  local s = { text = text, from = from, at = 1, kind = {} }
  if type(text) ~= "string" then P.fail(("%s: a %s, wanted a text"):format(from, type(text))) end
  if #text > LONGEST then P.fail(("%s: %d bytes, allowed: %d"):format(from, #text, LONGEST)) end
  skip(s)
  s.at = s.text:match("^return%f[^%w_]()", s.at) or s.at
  local value = value_of(s, 0)
  skip(s)
  if s.at <= #text then fail(s, "%s after the data", here(s)) end
  return value, s.kind
end

-- -- writing ----------------------------------------------------------------------------------------------------------

--- Words that Lua does not take as names.
M.reserved = util.index_of { "and", "break", "do", "else", "elseif", "end", "false", "for", "function", "goto", "if",
  "in", "local", "nil", "not", "or", "repeat", "return", "then", "true", "until", "while" }

--- How Lua and JSON write strings, keys, and what stands between brackets: on one line, and on several.
M.lua = { object = { "{ %s }", "{\n%s%s,\n%s}" }, list = { "{ %s }", "{\n%s%s,\n%s}" } }
function M.lua.string(s)
  return '"' .. s:gsub('[%c"\\\127]', function(c) return ("\\%03d"):format(c:byte()) end) .. '"'
end
function M.lua.key(s)
  return (s:match "^[%a_][%w_]*$" and not M.reserved[s] and s or "[" .. M.lua.string(s) .. "]") .. " = "
end

M.json = { object = { "{%s}", "{\n%s%s\n%s}" }, list = { "[%s]", "[\n%s%s\n%s]" } }
function M.json.string(s) return require("dkjson").quotestring(s) end
function M.json.key(s) return M.json.string(s) .. ": " end

--- A value as text: numbers, strings, booleans, and tables whose keys are strings, or lists; an empty table is an
--- object. `keys`: the first keys of tables, in order; the others follow sorted. Tables deeper than `wide` levels are
--- written on one line. notation: M.lua (default, which `decode` reads) or M.json.
function M.encode(value, keys, wide, notation, indent)
  notation = notation or M.lua
  if type(value) == "string" then return notation.string(value) end
  if type(value) == "number" then return ("%.17g"):format(value) end
  if type(value) ~= "table" then return tostring(value) end
  indent = indent or ""
  local inner, parts = wide > 0 and indent .. "  " or "", {}
  for i = 1, #value do parts[i] = M.encode(value[i], keys, wide - 1, notation, inner) end
  local first = util.index_of(keys)
  local names = #value == 0 and util.keys(value) or {}
  table.sort(names, function(a, b)
    local x, y = first[a] or math.huge, first[b] or math.huge
    if x ~= y then return x < y end
    return a < b
  end)
  for _, name in ipairs(names) do
    parts[#parts + 1] = notation.key(name) .. M.encode(value[name], keys, wide - 1, notation, inner)
  end
  if #parts == 0 then return "{}" end
  local brackets = #value > 0 and notation.list or notation.object
  if wide <= 0 then return brackets[1]:format(table.concat(parts, ", ")) end
  return brackets[2]:format(inner, table.concat(parts, ",\n" .. inner), indent)
end

-- -- files ------------------------------------------------------------------------------------------------------------

--- The text of a file.
function M.read(path, func)
  local text, why = util.read_file(path)
  return text or P.fail(("%s: %s"):format(func, why))
end

local function put(path, text, func, folders)
  if P.C.peri_file_write(path, text, text and #text or 0, folders or false) >= 0 then return end
  P.fail(("%s: %s"):format(func, (ffi.string(P.C.peri_error_message()):gsub("^peri_file_write: ", ""))))
end

--- A text into a file, which holds all of it, or what it held before. folders: make those that are missing.
function M.write(path, text, func, folders) put(path, text, func, folders) end

--- An error if no file can be written there, before all the work for it. Leaves none.
function M.probe(path, func, folders) put(path, nil, func, folders) end

signature.check("text.", M, { read = "path: string, func: string",
  write = "path: string, text: string, func: string, folders: boolean?",
  probe = "path: string, func: string, folders: boolean?" })

return M
