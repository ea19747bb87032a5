-- api.lua: the whole Lua API as a program finds it: for the fuzzers tests/fuzz/lua.lua and kinds.lua, which call it.
local M = {}

--- The names and numbers among the keys of a table. Other keys have no order that is the same the next time.
function M.sorted(t)
  local list = {}
  for k in pairs(t) do
    if type(k) == "string" or type(k) == "number" then list[#list + 1] = k end
  end
  table.sort(list, function(a, b) return tostring(a) < tostring(b) end)
  return list
end

--- Touch what a lazy table has not loaded yet: the keys of the tables that its __index knows.
local function load_lazy(t)
  local util = require "perilune.util"
  local meta = getmetatable(t)
  local index = type(meta) == "table" and rawget(meta, "__index")
  if type(index) ~= "function" then return end
  for i = 1, 10 do
    local name, value = debug.getupvalue(index, i)
    if not name then return end
    -- a name that is not there costs a search for one that may be meant
    if type(value) == "table" and value ~= util then
      for _, key in ipairs(M.sorted(value)) do
        if type(key) == "string" then pcall(function() return t[key] end) end
      end
    end
  end
end

--- Functions and classes that can be reached from `root`: lists of { name =, f =, class = (of a method) }.
--- left_out(key, name): is it?
function M.walk(root, left_out)
  local functions, classes, found = {}, {}, {}
  local function walk(t, path, depth)
    if found[t] or depth > 4 then return end
    found[t] = true
    load_lazy(t)
    for _, key in ipairs(M.sorted(t)) do
      local value, name = rawget(t, key), path == "" and tostring(key) or path .. "." .. tostring(key)
      if type(key) == "string" and not key:find "^_" and not left_out(key, name) then
        if type(value) == "function" and not found[value] then
          found[value] = true
          functions[#functions + 1] = { name = name, f = value, class = rawget(t, "class_name") and t }
        elseif type(value) == "table" and key ~= "super" and key ~= "class" and key ~= "methods" and key ~= "meta" then
          local meta = getmetatable(value)
          if type(meta) == "table" and rawget(meta, "__call") and not found[value] then
            classes[#classes + 1] = { name = name, f = value }
          end
          walk(value, name, depth + 1)
        end
      end
    end
  end
  walk(root, "", 1)
  return functions, classes, found
end

--- A value, for the line that says which call it was.
function M.show(x, depth)
  depth = depth or 0
  local ffi = require "ffi"
  if type(x) == "string" then return ("%q"):format(#x > 30 and x:sub(1, 30) .. "..." or x) end
  if type(x) == "cdata" and ffi.istype("peri_tensor_ref", x) then return (tostring(x):gsub("tensor ", "")) end
  if type(x) ~= "table" or depth > 3 then return (tostring(x):gsub("\n.*", "")) end
  local meta = getmetatable(x)
  if meta then return type(meta) == "table" and tostring(rawget(meta, "class_name")) or "object" end
  local parts = {}
  for _, key in ipairs(M.sorted(x)) do
    parts[#parts + 1] = (type(key) == "number" and "" or tostring(key) .. " = ") .. M.show(x[key], depth + 1)
  end
  return "{" .. table.concat(parts, ", ") .. "}"
end

--- "name(arguments)"
function M.call_text(name, args, n)
  local parts = {}
  for i = 1, n do
    local ok, text = pcall(M.show, args[i])
    parts[i] = ok and text or "?"
  end
  return ("%s(%s)"):format(name, table.concat(parts, ", "))
end

--- The lines that a command prints, the last 400 of them.
function M.lines_of(command)
  local pipe, last = assert(io.popen(command)), {}
  for line in pipe:lines() do
    last[#last + 1] = line
    if #last > 400 then table.remove(last, 1) end
  end
  pipe:close()
  return last
end

--- What children of a fuzzer are started with: their folder, which is to be removed, and function(words): the command
--- of one.
function M.children(script)
  local here = M.lines_of("pwd")[1]
  local build = os.getenv "PERI_BUILD" or "build"
  local folder = M.lines_of("mktemp -d")[1] -- functions that write files write them here
  local path = ("%s/%s/lua/?.lua;%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;;"):format(here, build, here, here, here)
  -- Huge shapes are out of memory, here and everywhere. Two sanitizers need more addresses than a limit leaves, and
  -- have one of their own.
  local sanitizer = os.getenv "PERI_SAN"
  local limit = (sanitizer == "address" or sanitizer == "thread") and "" or "ulimit -v 2500000;"
  local preload = os.getenv "PERI_FUZZ_PRELOAD" -- the sanitizer's library, for the children alone
  if preload then limit = limit .. (" LD_PRELOAD='%s'"):format(preload) end
  for _, name in ipairs { "ASAN", "TSAN" } do
    limit = limit .. (" %s_OPTIONS=\"$%s_OPTIONS:max_allocation_size_mb=512\""):format(name, name)
  end
  return folder, function(words)
    return ("cd %s && %s LUA_PATH='%s' luajit %s/%s %s 2>&1; echo \"ended with $?\""):format(folder, limit, path, here,
      script, words)
  end
end

return M
