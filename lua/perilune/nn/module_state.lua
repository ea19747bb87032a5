-- module_state.lua: state_dicts of modules: everything that must be saved, by name, and loading it. nn/module.lua has
-- these functions as methods. Of a module they use named_modules() and own_state() only.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local sharded = require "perilune.tensor.sharded"
local live = require("perilune.tensor.state_dict").live
local signature = require "perilune.signature"
local ranks = require "perilune.nn.ranks"

local M = {}

--- The state of this module and all below it: a list of { name =, tensor =, alike = }; what is shared comes once, under
--- its first name. Returns also the other names of tensors and modules -> the first.
local function whole_state(module, prefix)
  local list, seen, modules = {}, {}, module:named_modules(prefix)
  local also = modules.also or {}
  for _, m in ipairs(modules) do
    for _, s in ipairs(m.module:own_state()) do
      local key = Tensor.is(s.tensor) and tonumber(ffi.cast("intptr_t", Tensor.ptr(s.tensor))) or s.tensor
      local name = m.path == "" and s.name or m.path .. "." .. s.name
      if not seen[key] then list[#list + 1] = { name = name, tensor = s.tensor, alike = s.alike }
      else also[name] = seen[key] end
      seen[key] = seen[key] or name
    end
  end
  return list, also
end

--- Everything that must be saved: a map from names to live tensors (copying into one changes the module, and the next
--- step changes them) and, for tables over ranks, ShardedTensors; its methods clone() and gather() make copies
--- (tensor/state_dict.lua). The names are those of the unsharded module. Local.
function M:state_dict(prefix)
  local map = {}
  for _, module in ipairs(self:modules()) do module:check_moment() end
  for _, s in ipairs((whole_state(self, prefix))) do map[s.name] = s.tensor end
  return live(map)
end

--- The name under which whole_state lists what is shared here and is called `name`, too; nil: it is not.
local function first_name(name, also)
  for other, own in util.ordered(also) do
    if name == other or name:sub(1, #other + 1) == other .. "." then
      own = own .. name:sub(#other + 1)
      return also[own] or own
    end
  end
end

--- A map in which what is shared here stands under its first name only: PyTorch's state_dicts have it under each. Adds
--- to `wrong` where two names are given different tensors.
local function by_first_name(state, also, map, wrong)
  local known, result = util.index_of(util.map(state, function(s) return s.name end)), nil
  for _, name in ipairs(next(also) and util.keys(map) or {}) do
    local first = not known[name] and type(name) == "string" and first_name(name, also)
    if first and known[first] then
      result = result or util.copy(map)
      local here, there = rawget(result, first), rawget(map, name)
      if here ~= nil and not sharded.equal(here, there) then
        wrong[#wrong + 1] = ("'%s' and '%s' are one tensor here, and differ"):format(first, name)
      end
      result[first], result[name] = here == nil and there or here, nil
    end
  end
  return result or map
end

local function in_quotes(names)
  return table.concat(util.map(names, function(name) return ("'%s'"):format(tostring(name)) end), ", ")
end

local MOST_COMPARED = 50 -- names of each kind: a comparison takes some microseconds

--- Which of the names that a map has besides may be one that it lacks, in words: the nearest ones, if no more than one
--- letter in four differs; or nil.
local function perhaps(missing, unexpected)
  local here, there, least
  for i = 1, math.min(#missing, MOST_COMPARED) do
    local name = missing[i]
    for k = 1, math.min(#unexpected, MOST_COMPARED) do
      local d = util.distance(name, tostring(unexpected[k]))
      if d <= #name / 4 and d < (least or math.huge) then here, there, least = name, unexpected[k], d end
    end
  end
  return here and ("'%s' may be what is '%s' here"):format(tostring(there), here)
end

--- The names of `map` that the state of whole_state lacks, and those that it has besides; and the map by first names.
--- Raises where the map does not fit.
local function check_state(func, state, also, map, strict)
  local known, missing, unexpected, wrong = {}, {}, {}, {}
  signature.value(func, "map", map, "table")
  if strict ~= nil then signature.value(func, "strict", strict, "boolean") end
  if not util.keys(map) then P.fail(func .. ": map has keys that are no names") end
  map = by_first_name(state, also, map, wrong)
  for _, s in ipairs(state) do
    known[s.name] = true
    local given = rawget(map, s.name) -- a state_dict has methods, which are no entries
    local why = given ~= nil and sharded.refusal(s.tensor, given)
    if given == nil then missing[#missing + 1] = s.name
    elseif why then wrong[#wrong + 1] = ("'%s' %s"):format(s.name, why) end
  end
  for _, name in ipairs(util.keys(map)) do
    if not known[name] then unexpected[#unexpected + 1] = name end
  end
  if strict ~= false and #missing > 0 then wrong[#wrong + 1] = "missing: " .. in_quotes(missing) end
  if strict ~= false and #unexpected > 0 then
    wrong[#wrong + 1] = "it has no " .. in_quotes(unexpected)
    wrong[#wrong + 1] = perhaps(missing, unexpected)
  end
  if #wrong > 0 then P.fail(("%s: %s"):format(func, table.concat(wrong, "; "))) end
  return { missing_keys = missing, unexpected_keys = unexpected }, map
end

--- An error while this module's own state is of no one moment, which says when it is. Local.
function M:check_moment() end
--- load_state_dict has copied what `map` has under `path` for this module. Local.
function M:took_state(map, path) end -- luacheck: ignore 212

--- The ranks that load their parts of this module's own state together; nil: it is this rank's alone.
function M:state_group() end -- luacheck: ignore 212

--- An error if this module itself, without its sub-modules, cannot take what `map` has under `path` for other reasons
--- than names and shapes; changes nothing. Local.
function M:try_state(map, path) end -- luacheck: ignore 212

local function try_all(self, func, state, also, map, strict)
  local keys, known = check_state(func, state, also, map, strict)
  for _, m in ipairs(self:named_modules()) do m.module:try_state(known, m.path) end
  return keys, known
end

--- What keeps load_state_dict(map, strict) from loading, in words; nil: nothing does. Changes nothing; not collective.
function M:check_state_dict(map, strict)
  local state, also = whole_state(self)
  return errors.refusal(pcall(try_all, self, "", state, also, map, strict))
end

--- The names of the state that `map` lacks. Local.
function M:_missing(map)
  local missing, state, also = {}, whole_state(self)
  map = by_first_name(state, also, map, {})
  for _, s in ipairs(state) do
    if rawget(map, s.name) == nil then missing[#missing + 1] = s.name end
  end
  return missing
end

--- Copy the tensors of a state_dict (whole ones, or pieces of the same plan) into the state; they are of the same
--- shapes. Every name must be there, and no other, unless strict is false. Returns { missing_keys =, unexpected_keys =
--- }: lists of names. If something is wrong nothing is copied; collective where modules are sharded (and over `groups`,
--- a list): nothing is copied on any rank then. alike: function({ name =, tensor =, alike = } of the state) -> the
--- group whose ranks train it alike, or nil; what one of them is given otherwise is such an error too.
function M:load_state_dict(map, strict, groups, alike)
  local func, all = self.class_name .. ":load_state_dict", util.copy(groups or {})
  for i, group in ipairs(all) do
    local class = type(group) == "table" and getmetatable(group)
    if type(class) ~= "table" or rawget(class, "class_name") ~= "peri.Group" then
      P.fail(("%s: groups[%d] is %s, wanted a Group"):format(func, i, errors.kind(group)))
    end
  end
  for _, module in ipairs(self:modules()) do all[#all + 1] = module:state_group() end
  local state, also = whole_state(self)
  local ok, keys, known = pcall(try_all, self, func, state, also, map, strict)
  ranks.all_or_none(all, func, not ok and keys or nil)
  map = known
  for _, s in ipairs(alike and state or {}) do s.alike = alike(s) or s.alike end
  local same, differ = pcall(ranks.given_alike, func, state, map)
  ranks.all_or_none(all, func, not same and differ or nil) -- groups that are told nothing would load
  for _, s in ipairs(state) do
    if rawget(map, s.name) ~= nil then sharded.assign(s.tensor, map[s.name]) end
  end
  for _, m in ipairs(self:named_modules()) do
    m.module:took_state(map, m.path)
    rawset(m.module, "_loads", m.module._loads + 1)
  end
  return keys
end

return M
