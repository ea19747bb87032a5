-- load.lua: a checkpoint into a program, under whatever plan and number of ranks. Tensors are found by name; every rank
-- reads what it has a place for, and nothing else. What does not fit is one error that lists it all, on all ranks,
-- before anything changes.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"
local listing_once = require("perilune.nn.keyed").listing_once
local all_or_none = require("perilune.nn.ranks").all_or_none
local parts_of = require "perilune.checkpoint.parts"
local resize = require "perilune.checkpoint.resize"
local maps = require "perilune.checkpoint.maps"
local named = require "perilune.checkpoint.named"
local states = require "perilune.checkpoint.states"
local Checkpoint = require "perilune.checkpoint.reader"

local M = {}
local SMALL = 2 -- elements of tensors that are counters: whoever loads one wants its value

local of_files = { EFORMAT = true, ENOTFOUND = true, EIO = true }

--- Note in `met` whether an error is the checkpoint's fault.
local function note(met, err)
  local name = type(err) == "table" and err.name
  met.damaged = met.damaged or name and of_files[name] or false
  met.kind = met.kind or name or false
end

--- parts.together, which notes in `met` whose fault an error is.
local function together(group, func, met, f)
  return parts_of.together(group, func, f, function(err) note(met, err) end)
end

--- Open a checkpoint that another rank has opened, until time `deadline`: its folder, its manifest or its parents may
--- be late on this rank's network file system.
local function open_late(path, deadline)
  while true do
    P.C.peri_pause(50000)
    local left = deadline - tonumber(P.C.peri_time_ns())
    local ok, c = xpcall(Checkpoint, P.locate, path, false, math.max(left / 1e9, 0))
    if ok or left < 0 then return ok, c end
  end
end

local function line_of(path)
  local file = io.open(path)
  local line = file and file:read "*l"
  if file then file:close() end
  return line or ""
end

--- Which machine and process this is, and a name that nobody else has.
local function whereabouts()
  return { machine = line_of "/proc/sys/kernel/random/boot_id", process = line_of("/proc/self/stat"):match "^%d*",
    name = line_of "/proc/sys/kernel/random/uuid" }
end

--- Processes of one machine share what all of them read. all: the whereabouts of all ranks.
local function share_with(c, own, all)
  local processes = {}
  for _, other in ipairs(all) do
    if other.machine == own.machine then processes[other.process] = true end
  end
  local n = #util.keys(processes)
  if n > 1 and own.machine ~= "" and all[1].name ~= "" then c:_share(all[1].name, n) end
end

--- All ranks have the same checkpoint open. late: for how many seconds a rank waits for what comes late; 0: who follows
--- a run looks again anyway.
local function open_together(group, func, met, path, late)
  local began = tonumber(P.C.peri_time_ns())
  local ok, c = xpcall(Checkpoint, P.locate, path, false, late)
  local waited = tonumber(P.C.peri_time_ns()) - began
  local there, own = false, group and group:size() > 1 and whereabouts()
  local all = own and group:all_gather_object({ ok = ok, own = own }, func) or {}
  for _, told in ipairs(all) do there = there or told.ok end
  if not ok and there then ok, c = open_late(path, tonumber(P.C.peri_time_ns()) + late * 1e9 - waited) end
  if ok and own then share_with(c, own, util.map(all, function(told) return told.own end)) end
  together(group, func, met, function()
    if not ok then error(c, 0) end
  end)
  parts_of.one_digest(group, func, path, c:digest())
  return c
end

--- Compare all that an open checkpoint consists of, an increment with its parents, with its checksums. levels (or nil:
--- all): only so many of its chain, the newest. Ranks share the pieces among them.
local function verify_together(c, group, func, met, levels)
  together(group, func, met, function()
    for i, path in ipairs(c:levels()) do
      if levels and i > levels then break end
      local level = Checkpoint(path, true)
      local ok, err = xpcall(level.verify, P.locate, level, group and group:rank(), group and group:size())
      level:close()
      if not ok then error(err, 0) end
    end
  end)
end

-- -- choosing ---------------------------------------------------------------------------------------------------------

--- Whether `name` is within one of the prefixes: a part ("optimizer"), or the begin of names ("model/over.").
local function within(prefixes, name)
  for _, prefix in ipairs(prefixes) do
    if name:sub(1, #prefix) == prefix and (prefix:find("/", 1, true) or name:sub(#prefix + 1, #prefix + 1) == "/") then
      return prefix
    end
  end
end

--- `as`, the new name of `name`. States of a table have its name, too: "users.momentum1" of
--- "embedding_bags.users.weight" becomes "people.momentum1" where only the parameter's name was renamed.
local function with_table(name, as)
  if not as:find "/state/" then return as end
  local old, new = parts_of.keys_of(name), parts_of.keys_of(as)
  if #old ~= 3 or #new ~= 3 or old[1] ~= "state" or old[3] ~= new[3] or old[2] == new[2] then return as end
  local was, key = tostring(old[3]):match "^(.+)(%.[^.]+)$"
  local is = new[2]:match "^.*embedding_bags%.(.+)%.weight$" or new[2]:match "^.*embeddings%.(.+)%.weight$"
  if not was or not is or old[2]:sub(-#was - 8) ~= "." .. was .. ".weight" then return as end
  return parts_of.name_of(parts_of.name_of(as:match "^[^/]*" .. "/state", new[2]), is .. key)
end

--- The name here of a tensor, and the begin that was renamed, of several that fit the longest (nil: none was). States
--- of a table follow its name.
local function renamed(rename, name)
  local begin = nil
  for from in util.ordered(rename or {}) do -- what others begin with comes before them
    if name:sub(1, #from) == from then begin = from end
  end
  if not begin then return name, nil end
  return with_table(name, rename[begin] .. name:sub(#begin + 1)), begin
end

local function check_rename(func, rename)
  if rename == nil then return end
  for from, to in util.ordered(signature.value(func, "rename", rename, "table")) do
    if type(from) ~= "string" or type(to) ~= "string" or from == "" then
      P.fail(("%s: rename has %s = %s, wanted begins of names: { ['model/old.'] = 'model/new.' }"):format(func,
        tostring(from), tostring(to)))
    end
  end
end

--- The names of what a part that is a module has here and `dict` lacks, with the part's name before them.
local function missing_of(part, dict)
  local model = part.object.wraps and part.object.module or part.object
  return util.map(model:_missing(dict), function(name) return part.name .. "/" .. name end)
end

--- Whether a module of the program, or averages of its parameters, have state whose name begins with `prefix`.
local function is_here(parts, prefix)
  local function begins(names)
    for _, name in ipairs(names) do
      if within({ prefix }, name) then return true end
    end
    return false
  end
  for _, part in ipairs(parts) do
    if part.module and begins(missing_of(part, {})) then return true end
    if part.object.by_parameter and begins(util.map(util.keys(part.object:state_dict()), function(name)
      return part.name .. "/" .. name
    end)) then return true end
  end
  return false
end

--- Whether the tensor of this name, or the part whose name is in front of a "/", is loaded. used: which options decide
--- is noted there.
local function is_chosen(a, name, used)
  local only, except = a.only and within(a.only, name), a.except and within(a.except, name)
  if only then used[only] = true end
  if except then used[except] = true end
  return not except and (not a.only or only ~= nil)
end

--- Call f(name, part) for the parameters of the optimizers in a checkpoint, with the name that begins those of their
--- states ("optimizer/state/over.weight/"). Some have no state: tables that are frozen.
local function each_parameter(saved, f)
  for part, tree in util.ordered(saved.parts or {}) do
    for _, group in ipairs(type(tree) == "table" and type(tree.param_groups) == "table" and tree.param_groups or {}) do
      for _, name in ipairs(type(group) == "table" and type(group.params) == "table" and group.params or {}) do
        f(parts_of.name_of(part .. "/state", name) .. "/", part)
      end
    end
  end
end

--- The names that are loaded: a list of { name = in the checkpoint, as = here }, whether some were left out on purpose,
--- and which (such a list).
local function choose(func, c, saved, parts, a)
  local list, left, used, taken, from, any = {}, {}, {}, {}, {}, false
  for _, name in ipairs(c:names()) do
    local as, begin = renamed(a.rename, name)
    if begin then from[begin] = true end
    if not as:find "^[%w_.]+/" then
      P.fail(("%s: rename makes '%s' of '%s', wanted a part's name and '/' in front"):format(func, as, name))
    end
    if taken[as] then P.fail(("%s: rename makes '%s' of both '%s' and '%s'"):format(func, as, taken[as], name)) end
    taken[as] = name
    table.insert(is_chosen(a, as, used) and list or left, { name = name, as = as })
  end
  for part in util.ordered(saved.parts or {}) do -- one may have no tensors: a schedule
    any = is_chosen(a, part .. "/", used) or any
  end
  each_parameter(saved, function(name)
    local _, begin = renamed(a.rename, name)
    if begin then from[begin] = true end
  end)
  for begin in util.ordered(a.rename or {}) do
    if not from[begin] then
      P.fail(("%s: rename: checkpoint '%s' has no tensor whose name begins with '%s'"):format(func, c.path, begin))
    end
  end
  for _, option in ipairs { "only", "except" } do
    for _, prefix in ipairs(a[option] or {}) do
      if not used[prefix] and not (option == "except" and is_here(parts, prefix)) then
        P.fail(("%s: %s: checkpoint '%s' has no tensor whose name begins with '%s'"):format(func, option, c.path,
          prefix))
      end
    end
  end
  if #list == 0 and not any and (a.only or a.except) then
    P.fail(("%s: only and except leave nothing of checkpoint '%s' to load"):format(func, c.path))
  end
  return list, #left > 0, left
end

--- Names of optimizers' parameters: part's name -> name in the checkpoint -> name here. Where rename has whole names of
--- states, their parameter is renamed with them, so all of its states have to get the same. all: the lists that choose
--- returns.
local function parameters_of(func, saved, rename, all)
  local names = {}
  local function remember(part, name, as, stated)
    if as:sub(1, #part + 7) ~= part .. "/state/" then return end
    local own, was, is = names[part] or {}, parts_of.keys_of(name)[2], parts_of.keys_of(as)[2]
    names[part] = own
    if stated and own[was] and own[was] ~= is then
      P.fail(("%s: rename makes both '%s' and '%s' of parameter '%s' of '%s', whose states are of one parameter; "
        .. "allowed: one name for all of them, such as ['%s/state/%s/'] = '%s/state/%s/'"):format(func, own[was], is,
        was, part, part, was, part, is))
    end
    own[was] = is
  end
  for _, list in ipairs(rename and all or {}) do
    for _, entry in ipairs(list) do
      local part = entry.name:match "^([^/]*)/state/[^/]*/[^/]*$"
      local tree = part and saved.parts and saved.parts[part]
      if type(tree) == "table" and tree.param_groups then remember(part, entry.name, entry.as, true) end
    end
  end
  each_parameter(rename and saved or {}, function(name, part)
    if not (names[part] or {})[parts_of.keys_of(name)[2]] then remember(part, name, renamed(rename, name), false) end
  end)
  return names
end

--- What is loaded of tensor `name` of the checkpoint, `as` its name here: counters, and what parts of the user's own
--- have (whole), as tensors, all others as sources. known: counters of optimizers of tables by their bytes; each table
--- has one, and most are equal, so these are one tensor, which such optimizers only read.
local function value_of(c, name, as, patch, known, whole)
  local stored = c:stored(name, patch)
  if stored:numel() > SMALL and not whole then return stored end
  local t = P.lasting(stored.tensor, stored, "cpu")
  if not as:find "^[^/]*%.tables/state/" then return t end
  local dtype, shape = t:dtype(), t:shape()
  local memory, n = t:read()
  local key = ("%s %s %s"):format(dtype, table.concat(shape, ","),
    ffi.string(memory, n * tonumber(P.C.peri_dtype_size(P.dtype(dtype)))))
  if known[key] then t:release() end
  known[key] = known[key] or t
  return known[key]
end

--- The dict of each part that is to be loaded: part's name -> { dict, extra }. Parts that were left out are not there.
--- left: the tensors that are not loaded. patch (or nil): a function of a tensor's name, see StoredTensor.
local function dicts_of(func, c, saved, parts, list, left, a, patch)
  local dicts, known, parameters, whole = {}, {}, parameters_of(func, saved, a.rename, { list, left }), {}
  for _, part in ipairs(parts) do whole[part.name] = not (part.module or part.object.reads_stored) end
  local function have(part)
    if not dicts[part] then
      local tree = util.copy(saved.parts and saved.parts[part] or {})
      if parameters[part] then tree = named.renamed(tree, parameters[part]) end
      dicts[part] = { dict = tree, extra = saved.extra and saved.extra[part] }
    end
    return dicts[part].dict
  end
  for part in util.ordered(saved.parts or {}) do
    if is_chosen(a, part .. "/", {}) then have(part) end
  end
  for _, entry in ipairs(list) do
    local part = entry.as:match "^([^/]*)/" or ""
    entry.value = value_of(c, entry.name, entry.as, patch and patch(entry.name), known, whole[part])
    parts_of.place(have(part), entry.as, entry.value)
  end
  local beside = {}
  for _, entry in ipairs(left) do
    local part = entry.as:match "^([^/]*)/" or ""
    beside[part] = beside[part] or {}
    if maps.is_of_mch(entry.as) then parts_of.place(beside[part], entry.as, c:stored(entry.name)) end
  end
  for part, d in util.ordered(dicts) do maps.order_by_id(d.dict, beside[part] or {}) end
  return dicts
end

--- Names of what is loaded as the checkpoint has it, under its own name: neither renamed, nor made to fit (resize.lua).
--- A set.
local function as_it_is(list, dicts)
  local set = {}
  for _, entry in ipairs(list) do
    local d = dicts[entry.as:match "^([^/]*)/" or ""]
    set[entry.as] = entry.name == entry.as and rawequal(parts_of.at(d.dict, entry.as), entry.value) or nil
  end
  return set
end

--- In a load in part, let optimizers and averages have what fits the weights that are here (states.lua).
local function fit_states(parts, dicts, list, left, a)
  local here, saved, models = {}, {}, {}
  for _, part in ipairs(parts) do
    models[part.name] = part.module and dicts[part.name] or nil
    for _, name in ipairs(models[part.name] and missing_of(part, {}) or {}) do here[#here + 1] = name end
  end
  for _, entries in ipairs { list, left } do
    for _, entry in ipairs(entries) do saved[#saved + 1] = models[entry.as:match "^[^/]*"] and entry.as end
  end
  for _, part in ipairs(parts) do
    local d = dicts[part.name]
    if d then d.dict = states.fit(part, d.dict, here, saved, function(name) return is_chosen(a, name, {}) end) end
  end
end

-- -- loading ----------------------------------------------------------------------------------------------------------

--- Of parts of which each rank has its own, what this rank takes. Returns, by part, why there is nothing for it.
local function take_own(parts, dicts, group)
  local refusals = {}
  for _, part in ipairs(parts) do
    local d = dicts[part.name]
    if d and part.object.of_ranks then
      local dict, why = parts_of.own_dict(part.object, d.dict, group and group:rank() or 0, group and group:size() or 1)
      d.dict, refusals[part.name] = dict, why
      if dict and part.object.leave_out then
        local model = dicts[part.name:match "^(.*)%.windows$"]
        part.object:leave_out(dict, model and model.dict or {})
      end
    end
  end
  return refusals
end

--- Of a load in part: why a module lacks something that the options do not leave out; nil: it lacks nothing.
local function lacks(part, dict, a)
  local list = {}
  for _, name in ipairs(missing_of(part, dict)) do
    if (not a.only or within(a.only, name)) and not (a.except and within(a.except, name)) then
      list[#list + 1] = ("'%s'"):format(name)
    end
  end
  if #list == 0 then return nil end
  return ("the checkpoint has no %s; give its names there by rename, or leave it as it is here: "
    .. "except = { %s }"):format(table.concat(list, ", "), list[1])
end

--- What does not fit, as one text; nil: all does. refused: what take_own returned.
local function refusal(func, parts, dicts, partial, refused, a)
  local wrong, given = {}, {}
  for _, part in ipairs(parts) do
    local d = dicts[part.name]
    given[part.name] = true
    if refused[part.name] then
      wrong[#wrong + 1] = ("part '%s': %s"):format(part.name, refused[part.name])
    elseif not d and not partial and not part.object.optional then
      wrong[#wrong + 1] = ("part '%s' is not in it; those are: %s"):format(part.name,
        table.concat(util.keys(dicts), ", "))
    elseif d and part.object.check_state_dict then
      local why = part.object:check_state_dict(d.dict, not partial)
        or partial and part.module and lacks(part, d.dict, a) or nil
      local of_names = why and (why:find("missing: ", 1, true) or why:find("it has no ", 1, true))
      if of_names and part.module and not partial then
        why = ("%s; names that have changed go by rename = { ['%s/old.'] = '%s/new.' }, and what has no place is left "
          .. "out by except = { '%s/name.' }"):format(why, part.name, part.name, part.name)
      end
      if why and d.dict.state then
        why = ("%s; states that have no place here are left out by name: except = { '%s/state/NAME.' }"):format(why,
          part.name)
      end
      if why then wrong[#wrong + 1] = ("part '%s': %s"):format(part.name, why) end
    end
    if d and part.module and not partial then
      local why = parts_of.extra_refusal(part.object, d.extra or {})
      if why then wrong[#wrong + 1] = ("part '%s': %s"):format(part.name, why) end
    end
  end
  for name in util.ordered(dicts) do
    local of = name:match "^(.*)%.windows$"
    if not given[name] and not (of and given[of]) then -- maps whose windows are one step here have none
      wrong[#wrong + 1] = ("part '%s' has no object here; give it, or leave it out: except = { '%s' }"):format(name,
        name)
    end
  end
  if #wrong > 0 then P.fail(("%s: %s"):format(func, table.concat(wrong, "; "))) end
end

--- What a load in part takes, and what not, in words. left: tensors that were left out. Only parts that have tensors
--- are named.
local function taken(c, dicts, parts, left)
  local of, loaded, others = {}, {}, {}
  for _, entry in ipairs(left) do of[entry.as:match "^[^/]*"] = true end
  for _, part in ipairs(parts) do
    if dicts[part.name] then loaded[#loaded + 1] = part.name .. (of[part.name] and " (in part)" or "") end
  end
  for name in util.ordered(of) do
    local model = name:match "^(.*)%.tables$"
    if not dicts[name] then
      others[#others + 1] = model and dicts[model] and ("optimizer states of %s's tables"):format(model) or name
    end
  end
  return ("checkpoint '%s': loaded: %s%s"):format(c.path, table.concat(loaded, ", "),
    #others > 0 and "; not loaded: " .. table.concat(others, ", ") or "")
end

local function take(part, d, partial)
  if part.module then
    part.object:load_state_dict(d.dict, not partial)
    if d.extra then parts_of.set_extra(part.object, d.extra) end
  else
    part.object:load_state_dict(d.dict)
  end
end

local arguments = {
  only = util.optional,    -- list of parts ("model") and begins of names ("model/over."): nothing else is loaded
  except = util.optional,  -- likewise: what is left out
  rename = util.optional,  -- begins of names: as they are in the checkpoint -> as they are here
  increments = false,      -- whether increments of this checkpoint will be saved: from now on the rows that change are
                           -- marked
  group = util.optional,   -- the ranks that load together; default: the world, if one was joined
}

local function load_parts(c, func, given, a, group, met, quiet, patch)
  local parts, dicts, partial, saved, said, kept, not_taken
  together(group, func, met, function()
    local list, left
    parts, saved = parts_of.list(func, given), c:values()
    saved.models = nil -- the plans that it was saved under, of which nothing is loaded
    list, partial, left = choose(func, c, saved, parts, a)
    dicts = dicts_of(func, c, saved, parts, list, left, a, patch)
    not_taken = left
    partial = partial or a.only ~= nil or a.except ~= nil
    if partial then fit_states(parts, dicts, list, left, a) end
    said = resize.fit(parts, dicts, left)
    kept = a.increments and as_it_is(list, dicts)
    list = nil -- luacheck: ignore 311 (nothing more is asked of it, and it has an entry for each tensor)
    for _, part in ipairs(parts) do
      local why = "taken before this load and with ids for module '%s', which would be trained after it"
      if part.module and dicts[part.name] then parts_of.check_flights(func, part.object, why) end
    end
    if partial and a.increments then
      P.fail(func .. ": increments = true with a part of a checkpoint: what is loaded is no state that increments "
        .. "could begin with")
    end
    refusal(func, parts, dicts, partial, take_own(parts, dicts, group), a)
  end)
  if partial then table.insert(said, 1, taken(c, dicts, parts, not_taken)) end
  for _, text in ipairs((not group or group:rank() == 0) and not quiet and said or {}) do
    io.stderr:write("perilune: ", text, "\n")
  end
  met.begun = true
  for _, part in ipairs(parts) do
    local d = dicts[part.name]
    local ok, err = true, nil
    if d then ok, err = xpcall(take, P.locate, part, d, partial) end
    if not ok then
      local half = ("part '%s' is loaded in part only: "):format(part.name)
      note(met, err)
      if type(err) == "string" then err = half .. err
      elseif type(err) == "table" and err.message then err.message = half .. err.message end
    end
    all_or_none(group and { group } or {}, func, not ok and err or nil)
  end
  if not partial then parts_of.set_random_state(saved.random, group and group:rank() or 0) end
  if a.increments then
    together(group, func, met, function() require("perilune.checkpoint.save").mark(parts, c:digest(), kept) end)
  end
  return saved.values
end

--- Load from an open checkpoint. quiet: a load in part says nothing; patch (or nil): see dicts_of.
local function load_from(...) return listing_once(load_parts, ...) end

--- The options of a load, checked.
local function options_of(func, options)
  local a = util.named(func, options or {}, arguments)
  for _, name in ipairs { "only", "except" } do
    if a[name] ~= nil and #signature.value(func, name, a[name], "strings") == 0 then
      P.fail(("%s: %s is empty, which would load nothing or leave nothing out; leave it away"):format(func, name))
    end
  end
  check_rename(func, a.rename)
  return a
end

--- For who follows a run (follow.lua).
M.options_of, M.open_together, M.verify_together, M.load_from, M.together = options_of, open_together, verify_together,
  load_from, together

--- As checkpoint.load, but returns whether it succeeded, what was saved as `values` or the error, and, on all ranks
--- alike, whether an error is the checkpoint's fault: another one might do; and whether something changed before it.
--- verified (true): all bytes are compared with their checksums first. Collective.
function M.attempt(path, given, options, verified)
  local func, met = "checkpoint.load", {}
  signature.value(func, "path", path, "string")
  local a = options_of(func, options)
  parts_of.check_path(func, path)
  local group = parts_of.group(func, a.group)
  local opened, c = xpcall(open_together, P.locate, group, func, met, path, parts_of.patience(group))
  local ok, result = opened, c
  if opened then
    ok, result = xpcall(function()
      if verified then verify_together(c, group, func, met) end
      return load_from(c, func, given, a, group, met)
    end, P.locate)
    c:close()
  end
  -- Afterwards nobody has it open any more: it may be removed.
  for _, damaged in ipairs(group and group:all_gather_object(met.damaged or false, func) or {}) do
    met.damaged = met.damaged or damaged
  end
  return ok, result, met.damaged, met.begun
end

--- Raise what attempt met, with what to do where something changed (begun).
function M.give_up(err, begun)
  if begun and type(err) == "table" and err.message then
    err.message = err.message .. "; load a good checkpoint before going on"
  end
  error(err, 0)
end

--- See checkpoint.load.
function M.load(path, given, options)
  local ok, result, _, begun = M.attempt(path, given, options)
  if not ok then M.give_up(result, begun) end
  return result
end

return M
