-- lua_states.lua: other states of Lua, for threads.
local ffi = require "ffi"
local P = require "perilune.ffi"
local lua = require("perilune.library").lua

local M = {}

--- A state of Lua with the standard libraries and on its stack the function of `text` and its arguments (strings): {
--- ptr, pcall, close (C functions) }. It shares nothing with this one but the C library, and belongs to the caller. For
--- threads.
function M.new(name, text, ...)
  local has, L = pcall(function() return lua.peri__lua_newstate() end)
  if not has then
    P.fail(name .. ": this program does not export Lua's C functions, so it can have no other state of Lua")
  end
  if L == nil then P.fail(name .. ": no memory for a state of Lua") end
  local launcher = package.preload["perilune.launcher"] and require "perilune.launcher"
  if launcher then lua.peri__lua_cpcall(L, ffi.cast("int (*)(void *)", launcher.prepare), nil)
  else lua.peri__lua_openlibs(L) end
  if lua.peri__lua_load(L, text, #text, "=perilune/" .. name) ~= 0 then P.fail(("%s: %s"):format(name, M.text(L))) end
  for i = 1, select("#", ...) do
    local x = select(i, ...)
    lua.peri__lua_push(L, x, #x)
  end
  return { ptr = L, pcall = lua.peri__lua_pcall, close = lua.peri__lua_close }
end

--- The text on top of the stack of such a state, which nobody runs now: the error that its function ended with.
function M.text(ptr)
  local text = lua.peri__lua_text(ptr, -1, nil)
  return text ~= nil and ffi.string(text) or "an error without a message"
end

return M
