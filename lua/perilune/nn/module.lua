-- module.lua: Module: parameters, buffers and sub-modules under stable names, in the order in which the constructor
-- assigned them.
--
--   local Net = nn.Module:extend "Net"
--   function Net:init(args)
--     self.hidden = nn.Linear { in_features = 13, out_features = 8 }   -- registered: a sub-module
--     self.scale = nn.Parameter(peri.ones { 8 })                       -- registered: a parameter
--   end
--   function Net:forward(x) return self.hidden(x) * self.scale end
--   local net = Net {}
--   local y = net(x)
--
-- A Module, or a leaf tensor that requires grad, is registered when it is assigned to a new field. What plain tables in
-- fields hold (lists, maps, tables of tables), and what was assigned to a field that was something else before, is
-- found when somebody asks for modules or parameters: after what is registered, in the order of names; elements of a
-- list are named from "0", as in nn.ModuleList. Tables with a metatable are not looked into.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
local module_state = require "perilune.nn.module_state"
P.own({ batch = false }, true) -- that a module runs with, if it says which samples it has, or false

local Module = util.class "Module"

local function listed(list, name)
  for i = 1, #list do
    if list[i] == name then return true end
  end
  return false
end

local function note(list, name)
  if not listed(list, name) then list[#list + 1] = name end
end

local function is_parameter(value)
  if not Tensor.is(value) or value.ptr == nil then return false end
  local d = value:describe()
  return d.requires_grad and d.leaf
end

-- -- what fields hold without being registered ------------------------------------------------------------------------

local bookkeeping = { _parameters = true, _buffers = true, _children = true }

local function join(prefix, name) return prefix == "" and name or prefix .. "." .. name end

local function is_plain(value) return type(value) == "table" and getmetatable(value) == nil end

--- The name of a table's key in paths, and back: the element that a name in a path means.
local function name_of(key)
  return type(key) == "string" and key or tostring(key % 1 == 0 and key >= 1 and key - 1 or key)
end
local function element(at, name)
  if rawget(at, name) ~= nil then return name, rawget(at, name) end
  local n = tonumber(name)
  if not n then return name, nil end
  local key = n % 1 == 0 and n >= 0 and n + 1 or n
  return key, rawget(at, key)
end

--- The keys of a table that search looks at, in order: those whose values can be or hold what is looked for, since a
--- table may have many others. nil: the table's keys have no order.
local function searched_keys(module, at, wanted, seen)
  local keys, left_out = {}, at == module and bookkeeping or {}
  for key, value in next, at do
    if type(key) ~= "string" and type(key) ~= "number" then return nil end
    if not seen[value] and not left_out[key] and (is_plain(value) or wanted(value)) then keys[#keys + 1] = key end
  end
  return #keys < 2 and keys or util.keys(util.index_of(keys))
end

--- The name of the field to which trail[1], ..., trail[depth] lead. (A walk meets many fields and names few of them.)
local function name_at(trail, depth)
  local name = ""
  for d = 1, depth do name = join(name, name_of(trail[d])) end
  return name
end

--- Append { name =, value = } of all that wanted(value) is true for in a table and the plain tables in it to `list`;
--- `seen`: tables and values that are left out. trail[1], ..., trail[depth]: the keys that lead to the table.
local search
function search(module, at, trail, depth, wanted, seen, list)
  seen[at] = true
  local keys = searched_keys(module, at, wanted, seen)
  for key, value in next, keys and {} or at do
    local inner = is_plain(value) and not seen[value] and search(module, value, trail, depth, wanted, seen, {}) or {}
    if inner[1] or wanted(value) or wanted(key) then
      P.fail(("%s: field '%s' has keys that are no strings or numbers, so that its modules and parameters have no "
        .. "order; allowed: lists, and maps from names"):format(module.class_name, name_at(trail, depth)))
    end
  end
  for _, key in ipairs(keys or {}) do
    local value = rawget(at, key)
    if not seen[value] and not (at == module and bookkeeping[key]) then
      trail[depth + 1] = key
      if is_plain(value) then search(module, value, trail, depth + 1, wanted, seen, list)
      elseif wanted(value) then
        seen[value] = true
        list[#list + 1] = { name = name_at(trail, depth + 1), value = value }
      end
    end
  end
  return list
end

--- The same of a module's fields, but for those with the names in the list `registered`.
local function found(module, wanted, registered)
  local seen = {}
  for _, name in ipairs(registered) do
    local value = rawget(module, name)
    if value ~= nil then seen[value] = true end
  end
  return search(module, module, {}, 0, wanted, seen, {})
end

-- -- classes ----------------------------------------------------------------------------------------------------------

--- __newindex of modules: runs for fields that do not exist yet.
local function register(self, key, value)
  local class = getmetatable(self)
  if class._sealed then util.check_assign(self, key, value) end
  if type(key) == "string" then
    if Module.is(value) then note(self._children, key)
    elseif is_parameter(value) then note(self._parameters, key) end
  end
  rawset(self, key, value)
end

--- What runs when a module is called. Not a tail call: errors.lua finds the paths of modules by these frames. Each
--- class has its own copy of the code: to LuaJIT a module within a module would otherwise be a recursion, which
--- compiles badly. While a module runs that is called with a batch that says which samples it has (global_row),
--- P.state.batch is that batch: Dropout asks. P.state.anomaly: see anomaly.lua.
local function new_call()
  local text = [[
    local state, rawget, type = ...
    local function enter(batch)
      local outer = state.batch
      if type(batch) == "table" and rawget(batch, "global_row") then state.batch = batch end
      return outer
    end
    local function leave(self, outer, ...)
      state.batch = outer
      if state.anomaly then return state.anomaly:results(self, ...) end
      return ...
    end
    return function(self, ...) return leave(self, enter((...)), self:forward(...)) end]]
  local call = loadstring(text, "=perilune/nn/call.lua")(P.state, rawget, type)
  errors.module_calls[call] = true
  return call
end

local function construct(class, ...)
  local object = setmetatable({ training = true, _parameters = {}, _buffers = {}, _children = {} }, class)
  util.construct(object, class, ...)
  return object
end

local function prepare(class)
  class.__newindex, class.__call = register, new_call()
  getmetatable(class).__call = construct
  return class
end
prepare(Module)

--- A subclass: nn.Module:extend "Name", or another module class's :extend.
function Module.extend(base, name)
  if type(name) ~= "string" then
    P.fail(("Module:extend: the name of the class is %s, wanted a string"):format(errors.kind(name)))
  end
  local class = util.class(name, base)
  class.__tostring = base.__tostring
  class._sealed = false -- scripts' classes, and Module itself, are open
  prepare(class)
  return errors.of_library(debug.getinfo(2, "S").source) and util.seal(class) or class
end

Module._moving = false -- or fields that a call changes (graphed.lua): { step = true }
function Module:init() end
function Module:forward() P.fail(("%s: no forward method"):format(self.class_name)) end

local shown = {} -- modules whose text is being made

local function describe(module)
  local lines = {}
  for _, c in ipairs(module:named_children()) do
    lines[#lines + 1] = "  (" .. c.name .. "): " .. tostring(c.module):gsub("\n", "\n  ")
  end
  local text = module.class_name .. "(" .. module:extra_text()
  return #lines == 0 and text .. ")" or text .. "\n" .. table.concat(lines, "\n") .. "\n)"
end

--- Its class, what extra_text says, and its sub-modules; one that holds itself, "..." there.
function Module:__tostring()
  if shown[self] then return self.class_name .. "(...)" end
  shown[self] = true
  local ok, text = pcall(describe, self)
  shown[self] = nil
  if not ok then error(text, 0) end
  return text
end
--- What tostring shows between the parentheses.
function Module:extra_text() return "" end

-- -- registration -----------------------------------------------------------------------------------------------------

--- Register a parameter under a name that need not be an identifier.
function Module:register_parameter(name, tensor)
  if not is_parameter(tensor) then
    P.fail(("%s: parameter '%s' must be a leaf tensor that requires grad"):format(self.class_name, name))
  end
  note(self._parameters, name)
  rawset(self, name, tensor)
end

--- Register a tensor that belongs to the state but is not trained.
function Module:register_buffer(name, tensor)
  if not Tensor.is(tensor) then P.fail(("%s: buffer '%s' must be a tensor"):format(self.class_name, name)) end
  note(self._buffers, name)
  rawset(self, name, tensor)
end

--- Register a sub-module under a name that need not be an identifier.
function Module:add_module(name, module)
  if not Module.is(module) then
    P.fail(("%s: sub-module '%s' must be a Module, not a %s"):format(self.class_name, name, type(module)))
  end
  note(self._children, name)
  rawset(self, name, module)
end

-- -- walking ----------------------------------------------------------------------------------------------------------

--- Append a sub-module to a list of them. names: name -> true for those that the list has.
local function add_child(self, list, names, name, module)
  if names[name] then P.fail(("%s: two sub-modules are named '%s'"):format(self.class_name, name)) end
  names[name] = true
  list[#list + 1] = { name = name, module = module }
end

--- Direct sub-modules, those in plain tables included: a list of { name =, module = }.
function Module:named_children()
  local list, names = {}, {}
  for _, name in ipairs(self._children) do
    local module = rawget(self, name)
    if Module.is(module) then add_child(self, list, names, name, module) end
  end
  for _, f in ipairs(found(self, Module.is, self._children)) do add_child(self, list, names, f.name, f.value) end
  return list
end
function Module:children() return util.map(self:named_children(), function(c) return c.module end) end

--- list.also: the other names of modules that have several -> the name under which they are listed.
local function walk(module, path, seen, list)
  if seen[module] then
    list.also = list.also or {}
    list.also[path] = seen[module]
    return list
  end
  seen[module] = path
  list[#list + 1] = { path = path, module = module }
  for _, c in ipairs(module:named_children()) do walk(c.module, join(path, c.name), seen, list) end
  return list
end

--- This module (path "" or `prefix`) and all below it, parents first: a list of { path =, module = }; a shared module
--- comes once.
function Module:named_modules(prefix) return walk(self, prefix or "", {}, {}) end
function Module:modules() return util.map(self:named_modules(), function(m) return m.module end) end

--- Append a tensor to a list, unless it is none or was seen before.
local function add_tensor(list, seen, path, name, t)
  local key = Tensor.is(t) and tonumber(ffi.cast("intptr_t", Tensor.ptr(t)))
  if not key or seen[key] then return end
  seen[key] = true
  list[#list + 1] = { name = join(path, name), tensor = t }
end

--- An error where a module of this library does not have its tensors yet.
local function check_made(module, path)
  local awaits = rawget(module, "_awaits")
  if not awaits then return end
  P.fail(("%s%s has no parameters yet: it waits for %s; call the model with a batch before you ask for its parameters "
    .. "or state"):format(module.class_name, path == "" and "" or (" '%s'"):format(path), awaits))
end

--- Tensors that the field lists `kinds` name, and parameters that are found beside them, each once: a list of { name =,
--- tensor = }.
local function tensors(module, prefix, kinds)
  local list, seen = {}, {}
  for _, m in ipairs(module:named_modules(prefix)) do
    check_made(m.module, m.path)
    for _, kind in ipairs(kinds) do
      for _, name in ipairs(m.module[kind]) do add_tensor(list, seen, m.path, name, rawget(m.module, name)) end
      for _, f in ipairs(kind == "_parameters" and found(m.module, is_parameter, m.module._parameters) or {}) do
        add_tensor(list, seen, m.path, f.name, f.value)
      end
    end
  end
  return list
end

--- Parameters, this module's own first, then those of its sub-modules in order: a list of { name =, tensor = }. A
--- shared one comes once.
function Module:named_parameters(prefix) return tensors(self, prefix, { "_parameters" }) end
local function tensor_of(p) return p.tensor end
function Module:parameters() return util.map(self:named_parameters(), tensor_of) end
function Module:named_buffers(prefix) return tensors(self, prefix, { "_buffers" }) end

--- Parameters and buffers: a list of { name =, tensor = }.
function Module:named_state(prefix) return tensors(self, prefix, { "_parameters", "_buffers" }) end

-- -- state ------------------------------------------------------------------------------------------------------------

--- What this module itself, without its sub-modules, has in a state_dict: a list of { name =, tensor =, alike = (the
--- group whose ranks have it alike, or nil) } with live tensors (or ShardedTensors). Classes whose state is not in
--- parameters and buffers have their own.
function Module:own_state()
  local list = {}
  check_made(self, "")
  for _, kind in ipairs { "_parameters", "_buffers" } do
    for _, name in ipairs(self[kind]) do
      if Tensor.is(rawget(self, name)) then list[#list + 1] = { name = name, tensor = rawget(self, name) } end
    end
  end
  for _, f in ipairs(found(self, is_parameter, self._parameters)) do
    list[#list + 1] = { name = f.name, tensor = f.value }
  end
  return list
end

-- Their descriptions: module_state.lua.
Module.state_dict, Module.load_state_dict = module_state.state_dict, module_state.load_state_dict
Module.check_state_dict, Module._missing = module_state.check_state_dict, module_state._missing
Module.check_moment, Module.state_group = module_state.check_moment, module_state.state_group
Module.try_state, Module.took_state = module_state.try_state, module_state.took_state
--- How often state was loaded into this module: what was made of it before is old.
Module._loads = 0

-- -- paths ------------------------------------------------------------------------------------------------------------

--- The module at a path, the module or plain table that holds it, and its key there.
local function resolve(module, path)
  local at, owner, holder, key = module, module, nil, nil
  for name in path:gmatch "[^.]+" do
    holder = at
    key, at = element(holder, name)
    if not Module.is(at) and not is_plain(at) then
      local names = util.map(owner:named_children(), function(c) return c.name end)
      P.fail(("%s: no sub-module at '%s': '%s' has %s"):format(module.class_name, path, owner.class_name,
        #names > 0 and table.concat(names, ", ") or "none"))
    end
    if Module.is(at) then owner = at end
  end
  if not Module.is(at) then P.fail(("%s: no sub-module at '%s', but a table"):format(module.class_name, path)) end
  return at, holder, key
end

--- The sub-module at a path such as "over_arch.model.0"; "" is the module itself.
function Module:get_module(path) return (resolve(self, path)) end

--- Replace the sub-module at a path.
function Module:set_module(path, module)
  if not Module.is(module) then P.fail(("%s: set_module '%s': a Module is wanted, not a %s"):format(self.class_name,
    path, type(module))) end
  local _, holder, key = resolve(self, path)
  if not holder then P.fail(("%s: set_module: the path of a sub-module is wanted, not ''"):format(self.class_name)) end
  if Module.is(holder) then holder:replace(key, module) else holder[key] = module end
end

--- Put `new` wherever a field of this module or of one below it, or a plain table in such a field, holds `old`.
function Module:substitute(old, new)
  local seen = {}
  local function visit(at)
    if seen[at] then return end
    seen[at] = true
    for key, value in next, at do
      if rawequal(value, old) then rawset(at, key, new) elseif is_plain(value) then visit(value) end
    end
  end
  for _, m in ipairs(self:modules()) do visit(m) end
end

--- Replace a direct sub-module. Lists override it.
function Module:replace(name, module)
  if not Module.is(rawget(self, name)) then
    local names = util.map(self:named_children(), function(c) return c.name end)
    P.fail(("%s: replace: no sub-module is named '%s', allowed: %s"):format(self.class_name, name,
      #names > 0 and table.concat(names, ", ") or "none"))
  end
  if not Module.is(module) then
    P.fail(("%s: replace '%s': a Module is wanted, not %s"):format(self.class_name, name, errors.kind(module)))
  end
  rawset(self, name, module)
end

-- -- modes ------------------------------------------------------------------------------------------------------------

--- Training mode for this module and all below it, or, with false, evaluation mode. Returns the module.
function Module:train(on)
  for _, m in ipairs(self:modules()) do m.training = on ~= false end
  return self
end
function Module:eval() return self:train(false) end

--- Write this model as a file that answers; options, and what it returns: peri.export.save. Collective if its tables
--- are.
function Module:export(path, options) return util.above("perilune.export").save(self, path, options) end

--- Drop the gradients of all parameters.
function Module:zero_grad()
  for _, p in ipairs(self:parameters()) do p:set_grad(nil) end
end

signature.kind("Module", "an nn.Module", Module.is)
signature.kind("module", "a module or a function", util.is_callable)
signature.check("Module:", Module,
  { get_module = "self: table, path: string", set_module = "self: table, path: string, module: any",
    load_state_dict = "self: table, map: any, strict: any, groups: list?, alike: callable?",
    named_state = "self: table, prefix: string?",
    state_dict = "self: table, prefix: string?", register_buffer = "self: table, name: string, tensor: any",
  register_parameter = "self: table, name: string, tensor: any", add_module = "self: table, name: string, module: any",
  named_modules = "self: table, prefix: string?", named_parameters = "self: table, prefix: string?",
  named_buffers = "self: table, prefix: string?", replace = "self: table, name: string, module: any" })

return Module
