-- busted_main.lua: busted in this interpreter (luajit, or the launcher as one rank of a world): arguments as busted's.
--
-- Two functions of luassert, which every assertion calls, are replaced by quicker ones that answer the same.
local util = require "luassert.util"
local next, getinfo = next, debug.getinfo -- LuaJIT's own: the library sets _G.next (lua/perilune/compiler.lua)

--- The level of the function that called luassert. luassert asks debug.getinfo for all that it knows of each level.
function util.errorlevel(level) -- luacheck: ignore 122
  level = (level or 1) + 1
  local own = getinfo(level, "S")
  local source = own and own.source
  local info = own
  while info and (info.source == source or info.source == "=(tail call)") do
    level = level + 1
    info = getinfo(level, "S")
  end
  return level - 1
end

--- Have two tables the same keys, with the same values, none of which is a table? Not compiled, for `next`'s sake.
local function same_and_flat(a, b)
  for key, value in next, a do
    if type(value) == "table" or value ~= b[key] then return false end
  end
  for key in next, b do
    if a[key] == nil then return false end
  end
  return true
end
jit.off(same_and_flat)

local deepcompare = util.deepcompare
function util.deepcompare(a, b, ...) -- luacheck: ignore 122
  local flat = type(a) == "table" and type(b) == "table" and not debug.getmetatable(a) and not debug.getmetatable(b)
  if flat and same_and_flat(a, b) then return true end
  return deepcompare(a, b, ...)
end

-- Half as many collections as usual, which were a fifth of the time of specs. Those about what is freed ask for theirs.
collectgarbage("setpause", 400)
require "busted.runner" { standalone = false }
