-- random.lua: where the generators of random numbers stand, as a state_dict: masks of dropout are functions of a layer's seed, its stream
-- and the number of its calls (parameter.lua), and a run that is resumed goes on with the same masks. PyTorch keeps that apart from a
-- model's state_dict, too (torch.get_rng_state).
--
--   local kept = { model = model:state_dict():clone(), random = nn.random_state(model), ... }
--   nn.load_random_state(model, kept.random)
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"

local M = {}

--- Modules that draw numbers: a list of { path =, module = }. Paths within a DistributedModelParallel are those of its model.
local function drawing(module)
  local list = {}
  if module.wraps then module = module.module end
  for _, m in ipairs(module:named_modules()) do
    if m.module.random_numbers then list[#list + 1] = m end
  end
  return list
end

--- By the paths of the modules that draw random numbers, a table of numbers each. A copy. Local.
function M.random_state(module)
  local dict = {}
  for _, m in ipairs(drawing(module)) do
    dict[m.path] = {}
    for _, name in ipairs(m.module.random_numbers) do dict[m.path][name] = m.module[name] end
  end
  return dict
end

--- Go on where random_state was taken. What does not fit is one error that lists it all, and nothing is changed. Local.
function M.load_random_state(module, dict)
  local func, wrong, known = "load_random_state", {}, {}
  for _, m in ipairs(drawing(module)) do
    known[m.path] = true
    for _, name in ipairs(m.module.random_numbers) do
      local given = dict[m.path]
      local value = type(given) == "table" and given[name]
      if type(value) ~= "number" or value < 0 or value ~= math.floor(value) then
        wrong[#wrong + 1] = ("'%s' of module '%s' is %s, wanted a whole number"):format(name, m.path, errors.kind(value or nil))
      end
    end
  end
  for path in util.ordered(dict) do
    if not known[path] then wrong[#wrong + 1] = ("it has no module '%s' that draws random numbers"):format(tostring(path)) end
  end
  if #wrong > 0 then P.fail(("%s: %s"):format(func, table.concat(wrong, "; "))) end
  for _, m in ipairs(drawing(module)) do
    for _, name in ipairs(m.module.random_numbers) do m.module[name] = dict[m.path][name] end
  end
end

signature.check("", M, { random_state = "module: Module", load_random_state = "module: Module, dict: table" })

return M
