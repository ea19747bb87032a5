-- groups.lua: groups of the parameters of an optimizer: the numbers that they share (learning rate, betas, ...), and
-- how these are saved and loaded. They are loaded by the names of the parameters, never by the position of a group: an
-- optimizer under another plan may have other groups.
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local signature = require "perilune.signature"

local M = {}

--- Numbers that some parameters share, as fields ("lr", ...); `params`: the names of the parameters. Reading asks the
--- optimizer, and an assignment holds at once. Other fields say what cannot be changed any more (`optimizer`: the
--- class).
local ParamGroup = {}
M.ParamGroup = ParamGroup
function ParamGroup.__index(group, name)
  local own = rawget(group, "_group")
  if name == "params" then return own.params end
  if own.fixed[name] ~= nil then return own.fixed[name] end
  return own.get(name)
end
function ParamGroup.__newindex(group, name, value)
  local own = rawget(group, "_group")
  if not util.index_of(own.numbers)[name] then
    P.fail(("param_groups: it has no number '%s'; those are: %s"):format(tostring(name),
      table.concat(own.numbers, ", ")))
  end
  own.set(name, signature.value("param_groups", name, value, "number"))
end

--- A group: the names of its parameters, the names of its numbers, functions that read and set one, and what is fixed:
--- name -> value.
function M.group(params, numbers, get, set, fixed)
  return setmetatable({ _group = { params = params, numbers = numbers, get = get, set = set, fixed = fixed or {} } },
    ParamGroup)
end

--- The rate that schedulers begin with: `value`, if given, else the one that the first scheduler of the group set here
--- or found (PyTorch's "initial_lr").
function M.initial_lr(group, value)
  local own = rawget(group, "_group")
  own.initial_lr = value or own.initial_lr or own.get "lr"
  return own.initial_lr
end

--- A group with the names of numbers that `group` has, and what is fixed there.
function M.like(group, params, get, set)
  local own = rawget(group, "_group")
  return M.group(params, own.numbers, get, set, own.fixed)
end

--- Let `group`, which stays the object that it is, be of the optimizer that `made` is of; what schedulers began with
--- stays. params: the list of its names, where that is another one than that of `made`.
function M.renew(group, made, params)
  local own = rawget(made, "_group")
  own.initial_lr, own.params = rawget(group, "_group").initial_lr, params or own.params
  util.exchange(group, made)
end

--- An error unless `list` is an optimizer's n groups (those in `kept`, if that is given): a script that puts other
--- tables there changes nothing.
function M.check_kept(func, list, n, kept)
  for i = 1, n + 1 do
    local group = list[i]
    local same = kept and group == kept[i] or not kept and getmetatable(group) == ParamGroup
    if i <= n and not same or i > n and group ~= nil then
      P.fail(("%s: param_groups[%d] is %s, which no step heeds; allowed: numbers of its %s (param_groups[1].lr = x), "
        .. "add_param_group(group)"):format(func, i, errors.kind(group), util.number_of(n, "group")))
    end
  end
end

--- An error unless `list`, an optimizer's field `field`, has the entries of `kept`: a script that puts others there
--- changes nothing.
function M.check_list(func, field, list, kept)
  for i = 1, #kept + 1 do
    local entry = type(list) == "table" and list[i] or nil
    if not rawequal(entry, kept[i]) then
      P.fail(("%s: %s[%d] is %s, which no step heeds, as the optimizer was made of %s; allowed: "
        .. "add_param_group(group), or a new optimizer"):format(func, field, i, errors.kind(entry),
        kept[i] ~= nil and "another one" or util.number_of(#kept, "parameter")))
    end
  end
end

local SHARED = { "params", "names", "param_groups" }
--- The lists of an optimizer, which one that is made of it shows as its own.
function M.shared(optimizer)
  local kept = {}
  for _, field in ipairs(SHARED) do kept[field] = optimizer[field] end
  return kept
end
--- An error unless an optimizer still shows the lists `kept`.
function M.check_shared(optimizer, kept)
  for _, field in ipairs(SHARED) do
    if not rawequal(optimizer[field], kept[field]) then
      P.fail(("%s: %s is another list than that of the optimizer in it, and no step heeds it; allowed: "
        .. "add_param_group(group), or a new optimizer"):format(optimizer.class_name, field))
    end
  end
end

--- Names of a group's numbers.
function M.numbers_of(group) return rawget(group, "_group").numbers end

-- In what follows `named` is a list of { params = names of the parameters as the whole optimizer has them, group = a
-- ParamGroup }.

--- What of such groups is saved.
function M.saved(named)
  return util.map(named, function(entry)
    local own = rawget(entry.group, "_group")
    local copy = util.copy(own.fixed)
    copy.params = util.copy(entry.params)
    for _, name in ipairs(own.numbers) do copy[name] = own.get(name) end
    return copy
  end)
end

--- Saved entries by the names of their parameters. What is no such list is said in `wrong`.
local function by_parameter(what, saved, wrong)
  local entries = {}
  if type(saved) ~= "table" then
    wrong[#wrong + 1] = ("%s is %s, wanted a list, as state_dict has it"):format(what, errors.kind(saved))
    return entries
  end
  for i, entry in ipairs(saved) do
    local params = type(entry) == "table" and entry.params
    if type(params) ~= "table" then
      wrong[#wrong + 1] = ("%s[%d] has no list 'params' of names of parameters"):format(what, i)
    end
    for _, name in ipairs(type(params) == "table" and params or {}) do
      if entries[name] then wrong[#wrong + 1] = ("%s has parameter '%s' twice"):format(what, tostring(name)) end
      entries[name] = entry
    end
  end
  return entries
end

--- Entries of one group: each once, with the first of the parameters that have it; parameters that are in none are
--- listed in `missing`.
local function entries_of(entry, entries, known, missing)
  local list, seen = {}, {}
  for _, name in ipairs(entry.params) do
    local given = entries[name]
    known[name] = true
    if not given then missing[#missing + 1] = ("'%s'"):format(name)
    elseif not seen[given] then
      seen[given] = true
      list[#list + 1] = { name = name, entry = given }
    end
  end
  return list
end

--- The value of `name` that all entries of a group have; nil: something is wrong.
local function common(what, list, name, wrong)
  local first
  for _, x in ipairs(list) do
    local value = x.entry[name]
    if type(value) ~= "number" then
      wrong[#wrong + 1] = ("%s: '%s' of parameter '%s' is %s, wanted a number"):format(what, name, x.name,
        errors.kind(value))
      return nil
    end
    if first and value ~= first.entry[name] then
      wrong[#wrong + 1] = ("%s: '%s' is %.17g for parameter '%s' and %.17g for '%s', which share one number "
        .. "here"):format(what, name, first.entry[name], first.name, value, x.name)
      return nil
    end
    first = first or x
  end
  return first and first.entry[name]
end

--- Whether a number can be set: it is, and set back.
local function settable(own, name, value)
  local before = own.get(name)
  local ok, err = pcall(own.set, name, value)
  own.set(name, before)
  return not ok and tostring(type(err) == "table" and err.message or err) or nil
end

--- What saved entries have for each group: a list of { numbers = name -> value, given = the entries: { name = of a
--- parameter, entry = } }. fields(group): the names of these numbers. `what`: the list's name in messages, of which
--- `wrong` gets one for everything that does not fit. Changes nothing.
function M.find(what, named, saved, fields, wrong)
  local entries, known, missing, found = by_parameter(what, saved, wrong), {}, {}, {}
  for i, entry in ipairs(named) do
    local list = entries_of(entry, entries, known, missing)
    found[i] = { numbers = {}, given = list }
    for _, name in ipairs(fields(entry.group)) do found[i].numbers[name] = common(what, list, name, wrong) end
  end
  if #missing > 0 then wrong[#wrong + 1] = ("%s: missing: %s"):format(what, table.concat(missing, ", ")) end
  for name in util.ordered(entries) do
    if not known[name] then wrong[#wrong + 1] = ("%s: it has no parameter '%s'"):format(what, tostring(name)) end
  end
  return found
end

--- What saved() has for each group, by number; `wrong` gets what does not fit, also what a group cannot be set to.
function M.check(named, saved, wrong)
  local what = "param_groups"
  local found = M.find(what, named, saved, M.numbers_of, wrong)
  for i, entry in ipairs(named) do
    local own, known = rawget(entry.group, "_group"), { params = true }
    for _, name in ipairs(own.numbers) do
      known[name] = true
      local value = found[i].numbers[name]
      local why = value and settable(own, name, value)
      if why then wrong[#wrong + 1] = ("%s: '%s' of parameter '%s': %s"):format(what, name, entry.params[1], why) end
    end
    for _, x in ipairs(found[i].given) do
      for name, value in util.ordered(own.fixed) do
        known[name] = true
        if x.entry[name] ~= value then
          wrong[#wrong + 1] = ("%s: '%s' of parameter '%s' is %s here, and %s in the state that is given"):format(what,
            name, x.name, tostring(value), errors.kind(x.entry[name]))
        end
      end
      for name in util.ordered(x.entry) do
        if not known[name] then
          wrong[#wrong + 1] = ("%s: parameter '%s' has no number '%s'"):format(what, x.name, tostring(name))
        end
      end
    end
  end
  return found
end

--- Let the groups have what check found.
function M.assign(named, found)
  for i, entry in ipairs(named) do
    for _, name in ipairs(M.numbers_of(entry.group)) do entry.group[name] = found[i].numbers[name] end
  end
end

return M
