-- embed/kept.lua: the fields from which tables were made. A script may change them later, but the tables go on with
-- what they were made of, so the next use of the tables says which field has another value now.
local P = require "perilune.ffi"
local util = require "perilune.util"

local M = {}

--- Fields that are looked at with each batch: all of a collection of one table, 0.4 us.
M.WITH_EACH_BATCH = 48
local DEPTH = 3 -- how far tables within tables are followed: tables[1].feature_names[1]

--- Keys of a table that it has or may get: of a list its positions and the next one, of an object what can be set.
local function keys_of(x, more)
  local keys, class = {}, getmetatable(x)
  local others = more or type(class) == "table" and rawget(class, "settable") or {}
  for _, key in ipairs(util.keys(x) or {}) do keys[key] = true end
  for _, key in ipairs(util.keys(others)) do keys[key] = true end
  if #x > 0 then keys[#x + 1] = true end
  return util.keys(keys) or {}
end

local function note_field(kept, owner, key, depth, more)
  local value, n = rawget(owner, key), kept.n + 1
  kept.n, kept.owners[n], kept.keys[n], kept.values[n] = n, owner, key, value == nil and kept or value
  if type(value) ~= "table" or depth == 0 then return end
  for _, inner in ipairs(keys_of(value, more)) do note_field(kept, value, inner, depth - 1) end
end

--- What `owner` has now in its fields `names`, and in the tables in these; more[name]: a set of keys that the table in
--- field `name` may get.
function M.snapshot(owner, names, more)
  -- a metatable: no place to look for modules (nn/module.lua), which would take long in those of 10,000 tables
  local kept = setmetatable({ n = 0, at = 0, owners = {}, keys = {}, values = {} }, {})
  for _, name in ipairs(names) do
    local plain = type(owner[name]) == "table" and getmetatable(owner[name]) == nil
    note_field(kept, owner, name, plain and DEPTH or 0, more and more[name])
  end
  return kept
end

--- Where field i is, as a script would write it: "tables[1].name". It is made for errors only, since the paths of
--- 10,000 tables would take a quarter of the memory that Lua has for them.
local function path_of(kept, i)
  local owner, key = kept.owners[i], kept.keys[i]
  for outer = i - 1, 1, -1 do
    if rawequal(kept.values[outer], owner) then
      return path_of(kept, outer) .. (type(key) == "number" and ("[%d]"):format(key) or "." .. tostring(key))
    end
  end
  return key
end

local function text(value)
  if type(value) == "table" then return "another table" end
  return type(value) == "string" and ("'%s'"):format(value) or tostring(value)
end

local function refuse_assignment(kept, i, class_name, advice)
  local now, was, path = rawget(kept.owners[i], kept.keys[i]), kept.values[i], path_of(kept, i)
  if was == kept then was = nil end
  P.fail(("%s: %s is now %s, but was %s when the tables were made, and they go on with that; %s"):format(class_name,
    path, text(now), type(was) == "table" and "a table" or text(was), advice[path]
    or "to change it, make a new collection"))
end

--- An error unless the fields are what they were: all of them, or (most) so many, the next time the next ones, which is
--- cheap enough for each batch. advice[path]: what to do instead.
function M.check(kept, class_name, advice, most)
  local owners, keys, values, n, at = kept.owners, kept.keys, kept.values, kept.n, kept.at
  for _ = 1, math.min(most or n, n) do
    at = at < n and at + 1 or 1
    local value = rawget(owners[at], keys[at])
    if value == nil then value = kept end
    if value ~= values[at] then refuse_assignment(kept, at, class_name, advice) end
  end
  kept.at = at
end

return M
