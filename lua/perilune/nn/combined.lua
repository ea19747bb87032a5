-- combined.lua: optimizers made of others: TorchRec's wrappers, and several optimizers as one.
local P = require "perilune.ffi"
local util = require "perilune.util"
local keyed = require "perilune.nn.keyed"
local clip = require "perilune.nn.clip"
local param_groups = require "perilune.nn.groups"
local signature = require "perilune.signature"
local KeyedOptimizer, OptimizerWrapper = keyed.KeyedOptimizer, keyed.OptimizerWrapper

local M = {}

signature.kind("optimizer", "an optimizer", function(x) return type(x) == "table" and type(x.step) == "function" end)

--- Clips gradients before each step. clipping: "none", "norm" (of all gradients together) or "value".
local GradientClippingOptimizer = util.class("GradientClippingOptimizer", OptimizerWrapper)
M.GradientClippingOptimizer = GradientClippingOptimizer
function GradientClippingOptimizer:init(args)
  local a = util.named("GradientClippingOptimizer", args,
    { optimizer = util.required, clipping = "none", max_gradient = 0.1, norm_type = 2, sharded = util.optional,
      group = util.optional })
  OptimizerWrapper.init(self, a.optimizer)
  self.clipping = util.one_of("GradientClippingOptimizer", "clipping", a.clipping, { "none", "norm", "value" })
  for _, name in ipairs { "max_gradient", "norm_type" } do
    if self.clipping ~= "none" and not (a[name] > 0 and a[name] <= math.huge) then
      P.fail(("GradientClippingOptimizer: %s is %g, allowed: above 0"):format(name, a[name]))
    end
    self[name] = a[name]
  end
  if a.sharded and not a.group then P.fail "GradientClippingOptimizer: sharded parameters need a group" end
  if a.sharded and self.clipping == "value" then
    P.fail "GradientClippingOptimizer: clipping by value takes no sharded parameters"
  end
  if a.sharded then signature.value("GradientClippingOptimizer", "sharded", a.sharded, "tensors") end
  self._options, self._alike, self._parts, self._rebound = a.sharded and { sharded = a.sharded, group = a.group }
    or false, {}, nil, nil
  if self.clipping == "norm" then self:_sort() end
end
--- Which parameters are whole, and which are parts.
function GradientClippingOptimizer:_sort()
  self._alike, self._parts = clip.parts_of("GradientClippingOptimizer", self.params, self._options or nil)
  self._rebound = self.params.rebound
end
function GradientClippingOptimizer:step()
  self:_check_kept()
  if self.clipping == "norm" and self._rebound ~= self.params.rebound then self:_sort() end
  if self.clipping == "norm" then clip.clip(self._alike, self._parts, self.max_gradient, self.norm_type)
  elseif self.clipping == "value" then clip.clip_grad_value(self.params, self.max_gradient) end
  self.optimizer:step()
end

--- Those that are made of the optimizer with this list of parameters: list -> set of CombinedOptimizers.
local made_of = setmetatable({}, { __mode = "k" })

--- Note that `whole` is made of the optimizers that it has, and `gone` (or nil) is no longer.
function M.register(whole, gone)
  for _, o in ipairs(whole.optimizers) do
    local params = o.optimizer.params
    made_of[params] = made_of[params] or setmetatable({}, { __mode = "k" })
    made_of[params][whole] = true
    if gone then made_of[params][gone] = nil end
  end
end

--- An optimizer's list of parameters has changed: what is made of it lists all again.
function M.changed(params)
  for whole in pairs(made_of[params] or {}) do whole:_collect() end -- any order: each lists its own
end

--- Let `list` have what `new` has.
local function replace(list, new)
  for i = 1, math.max(#list, #new) do list[i] = new[i] end
end

--- Several optimizers as one: a list of optimizers or of { name =, optimizer = }; the name, with a dot, comes before
--- those of the states.
local CombinedOptimizer = util.class("CombinedOptimizer", KeyedOptimizer)
M.CombinedOptimizer = CombinedOptimizer
function CombinedOptimizer:init(optimizers)
  self.optimizers, self.params, self.names, self.param_groups = {}, {}, {}, {}
  signature.value("CombinedOptimizer", "the list of optimizers", optimizers, "list")
  if #optimizers == 0 then P.fail "CombinedOptimizer: a list of optimizers is wanted, with one or more" end
  for i, o in ipairs(optimizers) do
    signature.value("CombinedOptimizer", ("optimizers[%d]"):format(i), type(o) == "table" and o.optimizer or o,
      "optimizer")
    if not o.optimizer or KeyedOptimizer.is(o) then o = { name = "", optimizer = o } end
    signature.value("CombinedOptimizer", ("optimizers[%d].name"):format(i), o.name, "string")
    self.optimizers[i] = o
  end
  self:_collect()
  M.register(self)
end

--- List parameters, names and groups of all. The lists stay the objects that they are, since wrappers have them too.
function CombinedOptimizer:_collect()
  local all, names, groups, seen, at = self.params, {}, {}, {}, {}
  local params = {}
  all.unnamed = {}
  for _, o in ipairs(self.optimizers) do
    for _, group in ipairs(o.optimizer.param_groups or {}) do groups[#groups + 1] = group end
    all.elsewhere, all.group = all.elsewhere or o.optimizer.params.elsewhere, all.group or o.optimizer.params.group
    for _, name in ipairs(o.optimizer.names) do
      local full = o.name == "" and name or o.name .. "." .. name
      if seen[full] then P.fail(("CombinedOptimizer: two parameters are named '%s'"):format(full)) end
      seen[full] = true
      names[#names + 1] = full
    end
    for _, p in ipairs(o.optimizer.params.unnamed or {}) do
      all.unnamed[#all.unnamed + 1] = { tensor = p.tensor, name = o.name == "" and p.name or o.name .. "." .. p.name }
    end
    for _, p in ipairs(o.optimizer.params) do
      params[#params + 1] = p
      clip.once("CombinedOptimizer", "the parameters of all, params", at, p, #params)
    end
  end
  replace(all, params)
  replace(self.names, names)
  replace(self.param_groups, groups)
  self._kept, self._kept_params, self._kept_names = groups, params, names
  all.rebound = (all.rebound or 0) + 1
  M.changed(all)
end
for _, name in ipairs { "step", "zero_grad", "set_lr", "set_momentum" } do
  CombinedOptimizer[name] = function(self, value)
    param_groups.check_kept(self.class_name, self.param_groups, #self._kept, self._kept)
    param_groups.check_list(self.class_name, "params", self.params, self._kept_params)
    param_groups.check_list(self.class_name, "names", self.names, self._kept_names)
    for _, o in ipairs(self.optimizers) do o.optimizer[name](o.optimizer, value) end
  end
end
function CombinedOptimizer:add_param_group()
  P.fail(("%s: a group is added to one of its optimizers: "
    .. "combined.optimizers[i].optimizer:add_param_group(group)"):format(self.class_name))
end
function CombinedOptimizer:lr() return self.optimizers[1].optimizer:lr() end
function CombinedOptimizer:named_state()
  local list = {}
  for _, o in ipairs(self.optimizers) do
    for _, s in ipairs(o.optimizer:named_state()) do
      local prefix = o.name == "" and "" or o.name .. "."
      list[#list + 1] = { name = prefix .. s.name, tensor = s.tensor, parameter = s.parameter and prefix .. s.parameter,
        key = s.key, optional = s.optional, alike = s.alike }
    end
  end
  return list
end
function CombinedOptimizer:named_groups()
  local list = {}
  for _, o in ipairs(self.optimizers) do
    for _, entry in ipairs(o.optimizer:named_groups()) do
      local names = util.map(entry.params, function(name) return o.name == "" and name or o.name .. "." .. name end)
      list[#list + 1] = { params = names, group = entry.group }
    end
  end
  return list
end
--- Of `map`, a state by the combined names ("name.state"), what belongs to o, { name =, optimizer = }, by the names
--- that o.optimizer itself uses.
local function part_of(o, map)
  local part = {}
  for _, s in ipairs(o.optimizer:named_state()) do
    part[s.name] = map[o.name == "" and s.name or o.name .. "." .. s.name]
  end
  return part
end
function CombinedOptimizer:state_groups()
  local list = {}
  for _, o in ipairs(self.optimizers) do
    for _, group in ipairs(o.optimizer:state_groups()) do list[#list + 1] = group end
  end
  return list
end
--- Copy the state of all optimizers in, which check_state has found to fit.
function CombinedOptimizer:assign_state(map)
  for _, o in ipairs(self.optimizers) do o.optimizer:assign_state(part_of(o, map)) end
end
--- What is wrong with `map` as the state of all optimizers: a list of texts, empty if it fits. prefix: before the names
--- in them.
function CombinedOptimizer:check_state(map, prefix)
  local wrong = {}
  for _, o in ipairs(self.optimizers) do
    local before = (prefix or "") .. (o.name == "" and "" or o.name .. ".")
    for _, text in ipairs(o.optimizer:check_state(part_of(o, map), before)) do wrong[#wrong + 1] = text end
  end
  return wrong
end

keyed.check_maps(CombinedOptimizer)
signature.check("OptimizerWrapper:", OptimizerWrapper, { init = "self: table, optimizer: optimizer" })

return M
