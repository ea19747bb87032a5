-- fused.lua: the optimizer of tables that are updated in the backward pass, as a keyed optimizer (TorchRec's
-- FusedOptimizer): step and zero_grad have nothing to do, rates and states are the tables'.
--
--   local fused = model:fused_optimizer()
--   fused.param_groups[1].lr = 0.02       -- the next backward pass has it
--   fused:state_dict().state["ebc.embedding_bags.users.weight"]["users.momentum1"]
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local keyed = require "perilune.nn.keyed"
local param_groups = require "perilune.nn.groups"
local spread = require "perilune.nn.spread"
local ShardedTensor = require("perilune.tensor.sharded").ShardedTensor

local M = {}

local FusedOptimizer = util.class("FusedOptimizer", keyed.KeyedOptimizer)
M.FusedOptimizer = FusedOptimizer

--- FusedOptimizer { parameter_name = function(table name) -> "embedding_bags.t.weight", groups = list of { tables =
--- names, optimizer = its name, rate = function(), set_rate = function(lr) }, states = function(table name) -> list of
--- { name =, tensor =, alike = }, iteration = function(table name) -> what holds the number of updates (a tensor or
--- ShardedTensor), set_iteration = function(n), group = the ranks that share the tables }. Tables of one group of
--- parameters share a rate.
function FusedOptimizer:init(args)
  local a = util.named("FusedOptimizer", args, { parameter_name = util.required, groups = util.required.list,
    states = util.required, iteration = util.required, set_iteration = util.required, group = util.optional })
  self._a, self.params, self.names, self.tables, self.param_groups = a, {}, {}, {}, {}
  self._trained = {} -- by table
  for i, group in ipairs(a.groups) do
    local names = util.map(group.tables, function(name) return a.parameter_name(name) end)
    for k, name in ipairs(names) do
      self.names[#self.names + 1], self.tables[#self.tables + 1] = name, group.tables[k]
      self._trained[group.tables[k]] = group.optimizer ~= "none"
    end
    self.param_groups[i] = keyed.group(names, { "lr" }, function() return group.rate() end,
      function(_, lr) group.set_rate(lr) end, { optimizer = group.optimizer })
  end
end

--- Be the optimizer `made`, which is of the same tables under another plan. The list of groups and its groups stay the
--- objects that they were: schedules, wrappers and scripts have them.
function FusedOptimizer:_renew(made)
  local list = self.param_groups
  for i, group in ipairs(list) do param_groups.renew(group, made.param_groups[i]) end
  util.exchange(self, made)
  self.param_groups = list
end

function FusedOptimizer:step() end -- luacheck: ignore 212
function FusedOptimizer:zero_grad() end -- luacheck: ignore 212
--- Of Adam's kind they keep the betas that they were made with.
function FusedOptimizer:set_momentum()
  P.fail "FusedOptimizer: the momentum of fused tables is what fused_params say; use a schedule without cycle_momentum"
end

--- States by the names of TorchRec, "embedding_bags.t.weight.momentum1", under the keys "t.momentum1"; and "t.step",
--- the number of updates; of tables that are frozen (optimizer none) neither.
function FusedOptimizer:named_state() return keyed.once(self, self._list_state) end
--- See load_state: tables that are trained together count together.
local function leave() end
function FusedOptimizer:_list_state()
  local list = {}
  local function add(parameter, table_name, key, tensor, alike)
    -- Lua keeps four fields in 160 bytes and five to eight in 256.
    local s = { name = parameter .. "." .. key, tensor = tensor, parameter = parameter, key = table_name .. "." .. key }
    if alike then s.alike = alike end
    list[#list + 1] = s
  end
  for i, parameter in ipairs(self.names) do
    local name = self.tables[i]
    for _, s in ipairs(self._a.states(name)) do add(parameter, name, s.name, s.tensor, s.alike) end
    if self._trained[name] then
      add(parameter, name, "step", self._a.iteration(name))
      list[#list].load = leave
    end
  end
  return list
end

--- The number of updates that a state_dict's states (`map`: "users.step" -> tensor) say, which must be one for all
--- tables; nil: no piece of them is on this rank. And what is wrong.
local function steps_of(self, map)
  local steps, first
  for i, parameter in ipairs(self.names) do
    local source = map[parameter .. ".step"]
    local of_steps = Tensor.is(source) or ShardedTensor.is(source)
    local n, why = of_steps and spread.number_of(source), of_steps and spread.steps_refusal(source)
    if why then return steps, ("state '%s.step' %s"):format(parameter, why) end
    if n and steps and n ~= steps then
      return steps, ("table '%s' was updated %d times and table '%s' %d times; those of one module are updated "
        .. "together"):format(
        self.tables[i], n, first, steps)
    end
    if n then steps, first = n, self.tables[i] end
  end
  return steps
end

function FusedOptimizer:state_groups() return { self._a.group } end
function FusedOptimizer:check_state(map, prefix)
  local wrong = keyed.KeyedOptimizer.check_state(self, map, prefix)
  if #wrong == 0 then wrong[1] = select(2, steps_of(self, map)) end
  return wrong
end
function FusedOptimizer:assign_state(map)
  keyed.KeyedOptimizer.assign_state(self, map)
  local steps = steps_of(self, map)
  if steps then self._a.set_iteration(steps) end
end
keyed.check_maps(FusedOptimizer)

return M
