-- extra.lua: what modules keep beside tensors: a module with methods get_extra_state() (plain values) and
-- set_extra_state(state), as in PyTorch. Dropout's masks are functions of a seed, a stream and the number of its calls
-- (parameter.lua); who resumes with these goes on with the same masks. A state_dict has tensors only, so this is a dict
-- of its own, by the paths of modules.
--
--   local kept = { model = model:state_dict():clone(), extra = nn.extra_state(model), ... }
--   nn.load_extra_state(model, kept.extra)
local P = require "perilune.ffi"
local util = require "perilune.util"
local signature = require "perilune.signature"

local M = {}

--- The modules of a model, under the paths that they have in its state_dict.
local function modules_of(model) return (model.wraps and model.module or model):named_modules() end

--- path -> what the module there keeps beside tensors. A copy, if modules give one. Local.
function M.extra_state(module)
  local extra = {}
  for _, m in ipairs(modules_of(module)) do
    if m.module.get_extra_state then extra[m.path] = m.module:get_extra_state() end
  end
  return extra
end

--- Paths that `extra` has and the model's modules do not take, or the other way round, in words; nil: none.
function M.extra_refusal(module, extra)
  local known, wrong = {}, {}
  for _, m in ipairs(modules_of(module)) do
    if m.module.set_extra_state then
      known[m.path] = true
      if extra[m.path] == nil then wrong[#wrong + 1] = ("'%s' is missing"):format(m.path) end
    end
  end
  for path in util.ordered(extra) do
    if not known[path] then wrong[#wrong + 1] = ("it has no '%s'"):format(path) end
  end
  return #wrong > 0 and "state of modules beside tensors: " .. table.concat(wrong, ", ") or nil
end

--- Let the modules have what `extra` has for them; nothing for the others.
function M.set_extra_state(module, extra)
  for _, m in ipairs(modules_of(module)) do
    if m.module.set_extra_state and extra[m.path] ~= nil then m.module:set_extra_state(extra[m.path]) end
  end
end

--- Take over what extra_state returned: of all modules that have some, or nothing, and an error. Local.
function M.load_extra_state(module, extra)
  local why = M.extra_refusal(module, extra)
  if why then P.fail("load_extra_state: " .. why) end
  M.set_extra_state(module, extra)
end

signature.check("", M, { extra_state = "module: Module", load_extra_state = "module: Module, extra: table",
  extra_refusal = "module: Module, extra: table", set_extra_state = "module: Module, extra: table" })

return M
