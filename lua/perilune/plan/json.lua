-- plan/json.lua: plans as data: JSON, or Lua text (text.lua), that says what a plan says and nothing else. Reading it
-- runs nothing and opens no file but itself, so that a plan may come from somebody else.
--
--   {
--     "perilune_plan": 1,
--     "modules": {
--       "sparse.ebc": {
--         "items": {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [1]},
--         "users": {"sharding_type": "row_wise", "compute_kernel": "fused"}
--       }
--     }
--   }
--
-- The keys of a table are the arguments of ParameterSharding; cache_params are those of CacheParams, but for the
-- directory: a plan that came as data does not say where files are written.
local P = require "perilune.ffi"
local util = require "perilune.util"
local types = require "perilune.plan.types"
local signature = require "perilune.signature"
local text_data = require "perilune.text"

local M = {}

local VERSION = 1

local function fail(format, ...) P.fail(format:format(...)) end

local function dkjson(func)
  local ok, json = pcall(require, "dkjson")
  if not ok then fail("%s: lua-dkjson is not installed (on Debian: apt install lua-dkjson)", func) end
  return json
end

-- -- writing ----------------------------------------------------------------------------------------------------------

local entry_keys = { "sharding_type", "compute_kernel", "ranks", "sizes", "hosts", "cache_params" }
local cache_keys = { "algorithm", "load_factor", "ways", "reserved_memory", "precision", "prefetch_pipeline" }

--- An error unless `plan` is one that data can say.
local function check_plan(func, plan)
  if not types.ShardingPlan.is(plan) then fail("%s: a %s, wanted a ShardingPlan", func, type(plan)) end
  for path, module_plan in util.ordered(plan.plan) do
    for name, sharding in util.ordered(module_plan.tables) do
      for _, key in ipairs { "directory", "stats" } do
        if sharding.cache_params and sharding.cache_params[key] then
          fail("%s: module '%s', table '%s': cache_params have a %s, which plans in files of data do not", func, path,
            name, key)
        end
      end
    end
  end
end

--- Those of `keys` that a table has and that say something.
local function said(value, keys)
  local out = {}
  for _, key in ipairs(keys) do
    if value[key] then out[key] = value[key] end
  end
  if out.cache_params then out.cache_params = said(out.cache_params, cache_keys) end
  return out
end

--- What a plan says, as plain data.
local function data_of(plan)
  local modules = {}
  for path, module_plan in util.ordered(plan.plan) do
    modules[path] = {}
    for name, sharding in util.ordered(module_plan.tables) do modules[path][name] = said(sharding, entry_keys) end
  end
  return { perilune_plan = VERSION, modules = modules }
end

--- A ShardingPlan as JSON text, the same for the same plan.
function M.to_json(plan)
  dkjson "plan.to_json"
  check_plan("plan.to_json", plan)
  local keys = { "perilune_plan", unpack(entry_keys) }
  for _, key in ipairs(cache_keys) do keys[#keys + 1] = key end
  return text_data.encode(data_of(plan), keys, 3, text_data.json) .. "\n"
end

--- The same as a table, which does not say where files are written either, nor statistics.
M._data = data_of

--- Write the JSON of a plan (to_json) into a file.
function M.save_json(plan, path) text_data.write(path, M.to_json(plan), "plan.save_json") end

--- A ShardingPlan as Lua text, which plan.from_text reads without running it; the same for the same plan. `note`
--- (optional): comments above it.
function M.to_text(sharding_plan, note)
  check_plan("plan.to_text", sharding_plan)
  local head = note and "-- " .. note:gsub("\n", "\n-- ") .. "\n" or ""
  return head .. "return " .. text_data.encode(data_of(sharding_plan),
    { "perilune_plan", unpack(entry_keys) }, 3) .. "\n"
end

--- The same into a file, whose name should end in ".plan"; JSON, without the note, if it ends in ".json", as plan.load
--- reads it.
function M.save(plan, path, note)
  if path:match "%.json$" then return M.save_json(plan, path) end
  text_data.write(path, M.to_text(plan, note), "plan.save")
end

-- -- reading ----------------------------------------------------------------------------------------------------------

--- A name out of the text, or (longer) a message about it, for a message.
local function shown(name, most)
  name, most = tostring(name):gsub("%c", "?"), most or 80
  return #name > most and name:sub(1, most) .. "..." or name
end

local ends_value, begins_value = { ['"'] = true, ["]"] = true, ["}"] = true },
  { ['"'] = true, ["["] = true, ["{"] = true }

--- Whether a comma is missing between the character `before` (the end of a text, or one of ,[]{}) and the next one,
--- `c`, that begins a text or is one of these. `between` is what stands between them: a colon, a number, true, false,
--- or nothing.
local function lacks_comma(before, between, c)
  local after_colon = before == '"' and between:match "^%s*:(.*)"
  local value = (after_colon or between):match "^%s*(.-)%s*$"
  local follows = ends_value[before] and not after_colon
  return value:find "%s" ~= nil or follows and value ~= "" or begins_value[c] and (follows or value ~= "")
end

--- An error for lists and objects within each other beyond a depth that no plan has: the decoder calls itself for each.
--- Returns what the decoder takes though it is no JSON: nil, or words for a comment, a comma before the end of a list,
--- or a comma that is missing.
local function check_nesting(text, from)
  local depth, at, before, odd = 0, 1, "", nil
  while true do
    local place, c = text:match('()(["/,%[%]{}])', at)
    if not place then return odd end
    if depth > 0 and lacks_comma(before, text:sub(at, place - 1), c) then
      odd = odd or ("a comma is missing before byte %d"):format(place)
    end
    at, before = place + 1, c
    if c == '"' then
      local stop = text:match('^[^"\\]*()', at)
      while text:sub(stop, stop) == "\\" do stop = text:match('^[^"\\]*()', stop + 2) end
      at = stop + 1
    elseif c == "/" then odd = odd or ("a comment at byte %d, which JSON has not"):format(place)
    elseif c == "," then
      if text:find("^%s*[%]}]", at) then
        odd = odd or ("a comma at byte %d, before the end of a list or an object"):format(place)
      end
    else
      depth = depth + ((c == "[" or c == "{") and 1 or -1)
      if depth > text_data.DEPTH then
        fail("%s: lists and objects within each other, %d deep; allowed: %d", from, depth, text_data.DEPTH)
      end
    end
  end
end

--- Decoded objects and lists stay empty: what they hold is kept beside them, so that a key that comes twice is seen.
--- Returns the decoded value, kind (by table: "object" or "list") and held (by table: what it holds).
local function decode(text, from)
  local json, null, kind, held = dkjson(from), {}, {}, {}
  local function meta(what)
    return { __newindex = function(t, key, value)
      local own = held[t] or {}
      held[t], kind[t] = own, what
      if what == "object" and type(key) ~= "string" then fail("%s: a value without a key in an object", from) end
      if what == "list" and type(key) ~= "number" then fail("%s: the key '%s' in a list", from, shown(key)) end
      if own[key] ~= nil then fail("%s: the key '%s' comes twice", from, shown(key)) end
      if value == null then fail("%s: %s is null", from, shown(key)) end
      own[key] = value
    end }
  end
  local odd = check_nesting(text, from)
  local object, list = meta "object", meta "list"
  local ok, value, at, err = pcall(json.decode, text, 1, null, object, list)
  if not ok then
    if type(value) == "table" then error(value, 0) end
    fail("%s: %s", from, shown(value))
  end
  if value == nil then fail("%s: %s", from, shown(err or "it is empty")) end
  if value == null then fail("%s: the plan is null, wanted an object", from) end
  if odd then fail("%s: %s", from, odd) end
  local rest = text:match("%S+", at)
  if rest then fail("%s: there is more after the plan: '%s'", from, shown(rest)) end
  local function unfold(x)
    if type(x) ~= "table" then return x end
    kind[x] = kind[x] or (getmetatable(x) == object and "object" or "list")
    local plain = {}
    for key, inner in util.ordered(held[x] or {}) do plain[key] = unfold(inner) end
    kind[plain] = kind[x]
    return plain
  end
  return unfold(value), kind
end

local function kind_of(kind, value)
  local name = kind[value] or type(value)
  return (name == "object" and "an " or "a ") .. name
end

--- `value` is an object that has all keys in `required` (a list) and no others but those in `optional`; nil: any keys.
local function check_object(where, kind, value, required, optional)
  if kind[value] ~= "object" then fail("%s is %s, wanted an object", where, kind_of(kind, value)) end
  if not required then return value end
  local known = util.index_of(required)
  for _, key in ipairs(optional) do known[key] = true end
  for key in util.ordered(value) do
    if not known[key] then
      fail("%s: no key '%s'; allowed: %s", where, shown(key), table.concat(util.keys(known), ", "))
    end
  end
  for _, key in ipairs(required) do
    if value[key] == nil then fail("%s: the key '%s' is missing", where, key) end
  end
  return value
end

local function check_list(where, kind, value)
  if value ~= nil and kind[value] ~= "list" then
    fail("%s is %s, wanted a list of numbers", where, kind_of(kind, value))
  end
end

local function sharding_of(where, kind, entry)
  check_object(where, kind, entry, { "sharding_type" }, { "compute_kernel", "ranks", "sizes", "hosts", "cache_params" })
  check_list(where .. ": ranks", kind, entry.ranks)
  check_list(where .. ": hosts", kind, entry.hosts)
  check_list(where .. ": sizes", kind, entry.sizes)
  local cache = entry.cache_params
  if cache ~= nil then
    check_object(where .. ": cache_params", kind, cache, {}, cache_keys)
    if cache.prefetch_pipeline ~= nil and type(cache.prefetch_pipeline) ~= "boolean" then
      fail("%s: cache_params: prefetch_pipeline is %s, wanted true or false", where,
        kind_of(kind, cache.prefetch_pipeline))
    end
  end
  local ok, result = pcall(types.ParameterSharding, entry)
  if ok then return result end
  fail("%s: %s", where, shown(type(result) == "table" and result.message or result, 1000))
end

--- The ShardingPlan that decoded data say.
local function from_data(value, kind, from)
  check_object(from .. ": the plan", kind, value, { "perilune_plan", "modules" }, {})
  if value.perilune_plan ~= VERSION then
    fail("%s: perilune_plan (the version of the format) is %s, allowed: %d", from,
      shown(signature.text(value.perilune_plan)), VERSION)
  end
  local modules = {}
  for path, tables in util.ordered(check_object(from .. ": modules", kind, value.modules)) do
    local where = ("%s: module '%s'"):format(from, shown(path))
    modules[path] = {}
    for name, entry in util.ordered(check_object(where, kind, tables)) do
      modules[path][name] = sharding_of(("%s, table '%s'"):format(where, shown(name)), kind, entry)
    end
  end
  return types.ShardingPlan(modules)
end

--- The ShardingPlan that a JSON text says; `from` names it in messages.
function M.from_json(text, from)
  from = from or "plan.from_json"
  if type(text) ~= "string" then fail("%s: a %s, wanted a text", from, type(text)) end
  local value, kind = decode(text, from)
  return from_data(value, kind, from)
end

--- The ShardingPlan that a Lua text says (plan.to_text). Runs nothing.
function M.from_text(text, from)
  from = from or "plan.from_text"
  local value, kind = text_data.decode(text, from)
  return from_data(value, kind, from)
end

--- The ShardingPlan of a file of JSON, or of Lua text.
function M.load_json(path) return M.from_json(text_data.read(path, "plan.load_json"), ("plan '%s'"):format(path)) end
function M.load_text(path) return M.from_text(text_data.read(path, "plan.load_text"), ("plan '%s'"):format(path)) end

signature.check("plan.", M, { to_text = "sharding_plan: any, note: string?",
  load_json = "path: string", save_json = "plan: any, path: string",
  load_text = "path: string", save = "plan: any, path: string, note: string?" })

return M
