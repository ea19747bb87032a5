-- functions.lua: functions of Lua on their way to another thread, which has a state of Lua of its own: as code, or as
-- the name of a module.
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"

local M = {}

--- { code = } of a function without upvalues, or { module = } of a module's name. what: the argument; form: what is
--- wanted of it.
function M.sent(func, what, f, form)
  if type(f) == "string" then return { module = f } end
  if type(f) ~= "function" then
    P.fail(("%s: %s is %s, wanted %s, or the name of a module that is one"):format(func, what, errors.kind(f), form))
  end
  local name = debug.getupvalue(f, 1)
  if name and name ~= "" then
    P.fail(("%s: %s uses '%s' of what surrounds it; its thread has a state of Lua of its own: require it inside, or "
      .. "give it as arguments")
      :format(func, what, name))
  end
  local ok, code = pcall(string.dump, f)
  if not ok then
    P.fail(("%s: %s is a function of C, wanted one of Lua, or the name of a module"):format(func, what))
  end
  return { code = code }
end

--- The function again.
function M.received(sent)
  if sent.code then return assert(loadstring(sent.code)) end
  local ok, found = pcall(require, sent.module)
  if not ok then P.fail(tostring(found)) end
  if not util.is_callable(found) then
    P.fail(("module '%s' is %s, wanted a function(arguments)"):format(sent.module, errors.kind(found)))
  end
  return found
end

return M
