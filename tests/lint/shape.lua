-- shape.lua: sizes of files, functions and lines; white space; the comment that opens a file.

local C_FILES, LUA_FILES = "runtime kernels tests examples", "lua examples spec tests runtime"
local COLUMNS, C_LINES, LUA_LINES, FUNCTION_LINES = 120, 880, 550, 60

local function each_line(text, f)
  local n = 0
  for line in text:gmatch "([^\n]*)\n" do
    n = n + 1
    f(n, line)
  end
  return n
end

--- The lines of a Lua file that hold, or are within, a string between double brackets: text of somebody else's (pages,
--- scripts, programs), which may be as wide as it is.
local function quoted_lines(text)
  local within, line, at = {}, 1, 1
  local function pass(to) -- go on behind place @to
    for _ in text:sub(at, to):gmatch "\n" do line = line + 1 end
    at = to + 1
  end
  while true do
    local next_at = text:find("[%-\"'%[]", at)
    if not next_at then return within end
    pass(next_at - 1)
    local level = text:match("^%[(=*)%[", at) or text:match("^%-%-%[(=*)%[", at)
    local quote = text:match("^[\"']", at)
    if level then
      local first, _, stop = line, text:find("]" .. level .. "]", at, true)
      pass(stop or #text)
      for l = first, line do within[l] = true end
    elseif quote then
      local stop = at + 1
      while text:sub(stop, stop) ~= quote and stop <= #text do
        stop = stop + (text:sub(stop, stop) == "\\" and 2 or 1)
      end
      pass(stop)
    elseif text:match("^%-%-", at) then pass((text:find("\n", at, true) or #text + 1) - 1)
    else pass(at) end
  end
end

local function lines(ctx)
  local complaints = {}
  local function look(path, most)
    local text = ctx.read(path)
    local function complain(n, why) complaints[#complaints + 1] = ("%s:%d: %s"):format(path, n, why) end
    local quoted = path:match "%.lua$" and quoted_lines(text) or {}
    local count = each_line(text, function(n, line)
      local width = #line > COLUMNS and #line:gsub("[\128-\191]", "") or 0 -- characters, not bytes
      -- to LuaLS, which reads lines
      local said = width > COLUMNS and (line:match "^%-%-%-@" or line:match "^function [%w_.:]+%b() end$")
      if width > COLUMNS and not quoted[n] and not said then
        complain(n, ("%d columns, at most %d"):format(width, COLUMNS))
      end
      if line:find("\t", 1, true) then complain(n, "a tab") end
      if line:sub(-1):match "%s" then complain(n, "white space at the end") end
    end)
    if text ~= "" and text:sub(-1) ~= "\n" then complain(count + 1, "no newline at the end") end
    if count > most then complain(count, ("%d lines, at most %d"):format(count, most)) end
  end
  for _, path in ipairs(ctx.files(C_FILES, "c", "h", "cu", "cuh")) do look(path, C_LINES) end
  for _, path in ipairs(ctx.files(LUA_FILES, "lua")) do look(path, LUA_LINES) end
  return complaints
end

--- Functions of C begin with a brace in column 1. One that is a single switch may be longer: it says so by its shape.
local function c_functions(ctx)
  local complaints = {}
  for _, path in ipairs(ctx.files("runtime kernels", "c", "h", "cu", "cuh")) do
    local start, cases
    each_line(ctx.read(path), function(n, line)
      if line == "{" then start, cases = n, 0 end
      if line:match "^%s+case " then cases = (cases or 0) + 1 end
      if line:match "^}" and start then
        local size = n - start - 1
        if size > FUNCTION_LINES and cases < size / 4 then
          complaints[#complaints + 1] = ("%s:%d: a function of %d lines, at most %d"):format(path, start, size,
            FUNCTION_LINES)
        end
        start = nil
      end
    end)
  end
  return complaints
end

local function lua_functions(ctx)
  local complaints, util = {}, require "jit.util"
  local function look(path, f, depth)
    local info = util.funcinfo(f)
    local size = info.lastlinedefined - info.linedefined - 1
    if depth > 0 and size > FUNCTION_LINES then
      complaints[#complaints + 1] = ("%s:%d: a function of %d lines, at most %d"):format(path, info.linedefined, size,
        FUNCTION_LINES)
    end
    if not info.children then return end
    for i = -1, -65536, -1 do
      local k = util.funck(f, i)
      if k == nil then break end
      if type(k) == "proto" then look(path, k, depth + 1) end
    end
  end
  for _, path in ipairs(ctx.files("lua examples runtime tests", "lua")) do
    local f, problem = loadfile(path)
    if f then look(path, f, 0) else complaints[#complaints + 1] = problem end
  end
  return complaints
end

local function openings(ctx)
  local complaints = {}
  for _, path in ipairs(ctx.files(LUA_FILES, "lua")) do
    local first = ctx.read(path):match "^[^\n]*"
    if not first:match "^%-%- %S" then
      complaints[#complaints + 1] = path .. ": its first line does not say what it is for"
    end
  end
  for _, path in ipairs(ctx.files("runtime kernels tests", "c", "h", "cu", "cuh")) do
    local name = path:match "[^/]+$":gsub("%p", "%%%0")
    local head = ctx.read(path):match "^/%*.-%*/"
    local licence = head and head:match "SPDX%-License%-Identifier: Apache%-2%.0"
    if not licence or not head:match(name .. "[^:\n]*: ") and not head:match(name .. ":\n") then
      complaints[#complaints + 1] = path .. ": it does not open with the licence line and 'name: purpose'"
    end
  end
  return complaints
end

local function faults_sorted(ctx)
  local complaints, last = {}, ""
  for name in ctx.read("runtime/base/fault.def"):gmatch "\nFAULT%(([%w_]+)," do
    if name <= last then complaints[#complaints + 1] = ("fault.def: %s after %s"):format(name, last) end
    last = name
  end
  return complaints
end

return {
  { "lines and files are short", lines }, { "C functions are short", c_functions },
  { "Lua functions are short", lua_functions }, { "files say what they are for", openings },
  { "fault points are sorted", faults_sorted },
}
