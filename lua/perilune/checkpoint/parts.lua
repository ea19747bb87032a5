-- parts.lua: what a checkpoint has of a running program: its parts (a model, optimizers, schedules, ...), each a
-- state_dict, taken apart into named tensors and everything else.
--
-- A tensor's name is the part's and the keys that lead to it, with "/" between: "model/over.weight",
-- "optimizer/over.weight/exp_avg". "/" and "%" in a key are "%2F" and "%25"; a key that is a number n is "#n".
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local serial = require "perilune.serial"
local signature = require "perilune.signature"
local nn = require "perilune.nn"
local ranks = require "perilune.nn.ranks"
local named = require "perilune.checkpoint.named"
local values = require "perilune.checkpoint.values"
local Windows = require "perilune.checkpoint.windows"
local Tensor = require "perilune.tensor"
local ShardedTensor = require("perilune.tensor.sharded").ShardedTensor

local M = {}

M.LATE_SECONDS = 30 -- that a name may take to appear on another host's network file system

-- -- parts ------------------------------------------------------------------------------------------------------------

--- The optimizer of the tables that a model updates in its backward passes; nil: it has none.
local function tables_of(model)
  if model.fused_optimizer then return model:fused_optimizer() end
  local list = {}
  for _, m in ipairs(model:named_modules()) do
    local optimizer = m.module.fused_optimizer and m.module:fused_optimizer()
    if optimizer then list[#list + 1] = { name = m.path, optimizer = optimizer } end
  end
  return #list > 0 and nn.optim.CombinedOptimizer(list) or nil
end

--- What a module keeps beside tensors must find its way back.
local function check_extra(func, name, model)
  for _, m in ipairs((model.wraps and model.module or model):named_modules()) do
    if (m.module.get_extra_state == nil) ~= (m.module.set_extra_state == nil) then
      P.fail(("%s: part '%s': module '%s' (%s) has one of get_extra_state and set_extra_state, wanted both or "
        .. "none"):format(func, name, m.path, m.module.class_name))
    end
  end
end

--- The ranks that save or load together: `group`, or the world if one was joined; nil: this rank alone.
function M.group(func, group)
  group = ranks.group_of(func, group)
  if group and not group.all_gather_object then
    P.fail(("%s: group is %s, wanted a group of ranks"):format(func, errors.kind(group)))
  end
  return group
end

--- For so many seconds a rank of `group` (nil: this one alone) waits for such a name: at most for half of the group's
--- deadline, within which the other ranks wait for this one, so that all of them hear what is missing.
function M.patience(group)
  return group and math.min(M.LATE_SECONDS, group:timeout() / 2) or M.LATE_SECONDS
end

--- Run f; then all ranks of `group` (nil: this one alone) raise what one of them met. met (or nil): a function of this
--- rank's error, before that. Returns what f returned.
function M.together(group, func, f, met)
  local ok, result = xpcall(f, P.locate)
  if not ok and met then met(result) end
  ranks.all_or_none(group and { group } or {}, func, not ok and result or nil)
  return result
end

--- Run f on rank 0 of `group` (nil: this rank alone); what it returns, on all ranks. What it raises is raised on all.
--- One exchange, in which each rank tells the others `own` too: the second value is the list of these.
function M.on_first(group, func, f, own)
  local ok, result = true, nil
  if not group or group:rank() == 0 then ok, result = xpcall(f, P.locate) end
  if not group then
    if not ok then error(result, 0) end
    return result or false, { own }
  end
  local said = not ok and errors.said(result):gsub("^" .. func .. ": ", "")
  local list = group:all_gather_object({ error = said, result = ok and result or false, own = own }, func)
  if not ok then error(result, 0) end
  if list[1].error then P.fail(("%s: rank 0 of group '%s': %s"):format(func, group.name, list[1].error)) end
  return list[1].result, util.map(list, function(x) return x.own end)
end

--- An error unless all ranks have found the same checkpoint at `path`. Collective.
function M.one_digest(group, func, path, digest)
  local digests = group and group:all_gather_object(digest, func) or {}
  for r, other in ipairs(digests) do
    if other ~= digests[1] then
      P.fail(("%s: '%s' is checkpoint %s on rank 0 and %s on rank %d: all hosts must share the folder of "
        .. "checkpoints"):format(func, path, digests[1], other, r - 1))
    end
  end
end

local function wait_for(work) return work:wait() end

--- `value` of every rank, as a list on rank 0; nil on the others. What ranks tell about 100,000 tables is for rank 0
--- only. arrive(work) (or nil): waits for an exchange and returns its result. Collective.
function M.to_first(group, func, value, arrive)
  arrive = arrive or wait_for
  if not group then return { value } end
  local bytes, n, first = serial.encode(value, func), group:size(), group:rank() == 0
  local lengths = arrive(group:all_gather(Tensor.tensor({ #bytes }, "i64", "cpu"))):to_list()
  local send, receive = {}, {}
  for r = 1, n do send[r], receive[r] = r == 1 and #bytes or 0, first and lengths[r] or 0 end
  local buffer = arrive(group:all_to_all_v(Tensor.from_memory(bytes, { #bytes }, "u8", "cpu"), send,
    receive)):read()
  if not first then return nil end
  local list, at = {}, ffi.cast("const char *", buffer)
  for r = 1, n do
    list[r] = serial.decode(ffi.string(at, lengths[r]), func)
    at = at + lengths[r]
  end
  return list
end

--- The other way round: entry r of rank 0's list to rank r - 1. Collective.
function M.from_first(group, func, list)
  if not group then return list[1] end
  local n, first, texts, lengths = group:size(), group:rank() == 0, {}, {}
  for r = 1, n do
    texts[r] = first and serial.encode(list[r], func) or ""
    lengths[r] = #texts[r]
  end
  local sizes = Tensor.tensor(lengths, "i64", "cpu")
  group:broadcast(sizes, 0):wait()
  local receive, bytes = {}, table.concat(texts)
  for r = 1, n do receive[r] = r == 1 and sizes:to_list()[group:rank() + 1] or 0 end
  local buffer, total = group:all_to_all_v(Tensor.from_memory(bytes, { #bytes }, "u8", "cpu"), lengths,
    receive):wait():read()
  return serial.decode(ffi.string(buffer, total), func)
end

--- An error unless `path` is one that the system can have as it is.
function M.check_path(func, path)
  if path == "" or path:find("\0", 1, true) then
    P.fail(("%s: the path is empty, or has a zero byte in it"):format(func))
  end
end

--- The parts of a program: a list of { name =, object =, module = (whether it is one) }, models first, each followed by
--- the optimizer of its tables under the name "<model>.tables" and the windows of its maps of raw ids (windows.lua).
--- Every object has state_dict and load_state_dict.
function M.list(func, given)
  local models, modules, others = {}, {}, {}
  signature.value(func, "parts", given, "table")
  if getmetatable(given) ~= nil then
    P.fail(("%s: parts is %s, wanted a table of parts by name: { model = ... }"):format(func, errors.kind(given)))
  end
  for name, object in util.ordered(given) do
    if type(name) ~= "string" or not name:match "^[%w_]+$" then
      P.fail(("%s: part %s: names of parts are letters, digits and _"):format(func, errors.kind(name)))
    end
    if type(object) ~= "table"
      or not (util.is_callable(object.state_dict) and util.is_callable(object.load_state_dict)) then
      P.fail(("%s: part '%s' is %s, wanted an object with methods state_dict and load_state_dict, such as a module, "
        .. "an optimizer or a schedule; plain numbers and texts go into `values`"):format(func, name,
        errors.kind(object)))
    end
    if nn.Module.is(object) then
      check_extra(func, name, object)
      models[#models + 1] = { name = name, object = object, module = true }
      modules[#modules + 1] = models[#models]
      local tables = tables_of(object)
      if tables and #tables.names > 0 then models[#models + 1] = { name = name .. ".tables", object = tables } end
      local windows = Windows.of(object)
      if windows then models[#models + 1] = { name = name .. ".windows", object = windows } end
    else
      others[#others + 1] = { name = name, object = object }
    end
  end
  for _, part in ipairs(others) do
    part.object = named.by_names(part.object, modules)
    models[#models + 1] = part
  end
  if #models == 0 then P.fail(func .. ": parts is empty; for example { model = model, optimizer = optimizer }") end
  return models
end

--- An error while a pipeline has batches in flight for a sharded module of `model`; why: what they have of what is to
--- change, a format for the module's name. Local.
function M.check_flights(func, model, why)
  for _, m in ipairs((model.wraps and model.module or model):named_modules()) do
    if next(m.module._flights or {}) then
      P.fail(("%s: a pipeline has batches in flight, %s; allowed: after pipeline:stop() and its last step (progress "
        .. "has returned nil), or after pipeline:close()"):format(func, why:format(m.path)))
    end
  end
end

--- What modules keep beside tensors: see nn/extra.lua.
M.extra_of, M.extra_refusal, M.set_extra = nn.extra.extra_state, nn.extra.extra_refusal, nn.extra.set_extra_state

-- -- random numbers ---------------------------------------------------------------------------------------------------

-- Where each of this rank's generators is (nn/parameter.lua): what a checkpoint has, by the names in P.state.
local generators = { seed = "seed", parameters = "parameters_drawn", dropouts = "dropouts_made",
  numbers = "numbers_drawn" }

--- Where this rank's generators are: plain numbers.
function M.random_state()
  local list = {}
  for name, key in util.ordered(generators) do list[name] = P.state[key] end
  return list
end

--- Go on from what ranks had (a list): rank r from what rank r had; ranks that were not there from what rank 0 had.
function M.set_random_state(list, rank)
  local own = type(list) == "table" and (list[rank + 1] or list[1])
  for name, key in util.ordered(type(own) == "table" and generators or {}) do
    if type(own[name]) == "number" then P.state[key] = own[name] end
  end
end

-- -- names ------------------------------------------------------------------------------------------------------------

local function component(key)
  if type(key) == "number" then return ("#%.17g"):format(key) end
  return (key:gsub("[%%/]", { ["%"] = "%25", ["/"] = "%2F" }):gsub("^#", "%%23"))
end

local function key_of(text)
  if text:sub(1, 1) == "#" then return tonumber(text:sub(2)) end
  return (text:gsub("%%(%x%x)", function(h) return string.char(tonumber(h, 16)) end))
end

-- -- parts of which each rank has its own -----------------------------------------------------------------------------

-- Metrics and positions in data say `of_ranks`: each rank has a state of its own, and a checkpoint has all of them, in
-- the order of the ranks: the part's dict is { ranks = { of rank 0, of rank 1, ... } }.

--- A plain value as bytes; nil: there are tensors in it.
local function plain_text(x)
  local ok, bytes = pcall(serial.encode, x, "state")
  return ok and bytes or nil
end

--- Of such a part, what this rank takes of the states of those ranks that saved it: a dict, or nil and why there is
--- none. On as many ranks each takes its own. On others the object says by merge_state_dicts(list, rank, size) -> dict,
--- or nil and why; objects without it take what all ranks had alike.
function M.own_dict(object, dict, rank, size)
  local list = type(dict) == "table" and rawget(dict, "ranks")
  if type(list) ~= "table" or #list == 0 then
    return nil, "it was saved as one state, and wanted is one of each rank"
  end
  if #list == size and not object.always_merge then return list[rank + 1] end
  if object.merge_state_dicts then return object:merge_state_dicts(list, rank, size) end
  local first = plain_text(list[1])
  for _, other in ipairs(list) do
    if not first or plain_text(other) ~= first then
      return nil, ("it was saved on %s, each with a state of its own, allowed: as many ranks"):format(
        util.number_of(#list, "rank"))
    end
  end
  return list[1]
end

local function is_tensor(x) return Tensor.is(x) or ShardedTensor.is(x) end

--- Take a state_dict apart: append { name =, tensor = } to `tensors`, and return a copy without tensors.
function M.flatten(dict, name, tensors, depth)
  local rest, class = {}, getmetatable(dict)
  depth = (depth or 0) + 1
  if depth > values.DEPTH then
    P.fail(("checkpoint.save: '%s...' of a state_dict is nested deeper than %d tables, or contains itself"):format(
      name:sub(1, 60), values.DEPTH))
  end
  if depth > 1 and type(class) == "table" and rawget(class, "class_name") then
    P.fail(("checkpoint.save: '%s' of a state_dict is %s, wanted tensors, booleans, numbers, strings and plain tables "
      .. "of them"):format(name, errors.kind(dict)))
  end
  for key, value in util.ordered(dict) do
    if is_tensor(value) then tensors[#tensors + 1] = { name = M.name_of(name, key), tensor = value }
    elseif type(value) == "table" then rest[key] = M.flatten(value, M.name_of(name, key), tensors, depth)
    else rest[key] = value end
  end
  return rest
end

--- The name of what is under `key` within `name`.
function M.name_of(name, key) return name .. "/" .. component(key) end

--- The keys of such a name, behind its part's.
function M.keys_of(name)
  local keys = {}
  for text in (name:match "^[^/]*/(.*)$" .. "/"):gmatch "([^/]*)/" do keys[#keys + 1] = key_of(text) end
  return keys
end

--- Put a tensor where its name says into what flatten returned for its part.
function M.place(rest, name, tensor)
  local keys = M.keys_of(name)
  for i = 1, #keys - 1 do
    rest[keys[i]] = type(rest[keys[i]]) == "table" and rest[keys[i]] or {}
    rest = rest[keys[i]]
  end
  rest[keys[#keys]] = tensor
end

--- What is at the place of such a name; nil: there is none.
function M.at(rest, name)
  for _, key in ipairs(M.keys_of(name)) do rest = type(rest) == "table" and rest[key] end
  return rest
end

return M
