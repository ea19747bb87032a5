-- lua.lua: globals, the ban of pairs where order matters, the one door to the FFI, luacheck.
local bit = require "bit"
local jit_util, vmdef = require "jit.util", require "jit.vmdef"

local standard = {}
for name in ([[_G _VERSION arg assert collectgarbage coroutine debug dofile error getfenv getmetatable io ipairs load loadfile loadstring
  math next os package pairs pcall print rawequal rawget rawset require select setfenv setmetatable string table tonumber tostring type
  unpack xpcall bit jit]]):gmatch "%S+" do
  standard[name] = true
end

--- The name of each global that a function, or one within it, reads or sets: f("GGET" or "GSET", name).
local function each_global(of, f)
  local pc, constants = 1, jit_util.funcinfo(of).gcconsts
  while true do
    local word = jit_util.funcbc(of, pc)
    if not word then break end
    local at = 6 * bit.band(word, 0xff) -- names have six characters each
    local op = vmdef.bcnames:sub(at + 1, at + 6):match "%S+"
    if op == "GGET" or op == "GSET" then f(op, jit_util.funck(of, -bit.rshift(word, 16) - 1)) end
    pc = pc + 1
  end
  for i = 1, constants do
    local constant = jit_util.funck(of, -i)
    if type(constant) == "proto" then each_global(constant, f) end
  end
end

local function globals(ctx)
  local complaints = {}
  for _, path in ipairs(ctx.files("lua examples runtime", "lua")) do
    local chunk, wrong = loadfile(path)
    if not chunk then complaints[#complaints + 1] = wrong
    else
      each_global(chunk, function(op, name)
        if op == "GSET" or not standard[name] then
          complaints[#complaints + 1] = ("%s: the global '%s' is %s"):format(path, name, op == "GSET" and "set"
            or "used")
        end
      end)
    end
  end
  return complaints
end

local function code_lines(text, f)
  local n = 0
  for line in text:gmatch "([^\n]*)\n" do
    n = n + 1
    f(n, (line:gsub("%-%-.*", "")))
  end
end

-- Order that reaches a wire, a plan or a file is a function of the plan: util.ordered (style J6).
local function no_pairs(ctx)
  local complaints = {}
  for _, path in ipairs(ctx.files("lua/perilune", "lua")) do
    local part = path:match "^lua/perilune/([%w_]+)"
    if part == "dist" or part == "embed" or part == "plan" or part == "shard" or part == "pipeline"
      or part == "checkpoint" then
      code_lines(ctx.read(path), function(n, line)
        if line:match "%f[%w_]pairs%s*%(" or line:match "%sin%s+next%s*," then
          complaints[#complaints + 1] = ("%s:%d: %s"):format(path, n, line)
        end
      end)
    end
  end
  return complaints
end

local function one_door(ctx)
  local complaints = {}
  local doors = { ["lua/perilune/library.lua"] = true, ["lua/perilune/environment.lua"] = true }
  for _, path in ipairs(ctx.files("lua examples", "lua")) do
    code_lines(ctx.read(path), function(n, line)
      if not doors[path] and (line:match "%f[%w]cdef%s*[%[%(\"]" or line:match "ffi%.load%f[%W]") then
        complaints[#complaints + 1] =
          ("%s:%d: ffi.cdef and ffi.load belong to lua/perilune/library.lua: %s"):format(path, n, line)
      end
    end)
  end
  return complaints
end

--- Variables of the environment are read where a program with other rights than its caller has none.
local function environment(ctx)
  local complaints = {}
  local function look(path, pattern, instead)
    code_lines(ctx.read(path), function(n, line)
      if line:match(pattern) then complaints[#complaints + 1] = ("%s:%d: %s: %s"):format(path, n, instead, line) end
    end)
  end
  for _, path in ipairs(ctx.files("runtime kernels", "c", "h", "cu", "cuh")) do
    look(path, "%f[%w_]getenv%s*%(", "secure_getenv is wanted")
  end
  for _, path in ipairs(ctx.files("lua", "lua")) do -- the launcher's states have another os.getenv: runtime/host/main.c
    local started = path:match "^lua/perilune/launch" or path:match "^lua/perilune/calibration/"
    if not started then look(path, "os%.getenv", "perilune.environment is wanted") end
  end
  return complaints
end

local function luacheck(ctx)
  if ctx.luacheck == "" then return {}, "luacheck was not found" end
  local words = "--no-color --quiet --codes --ranges $(ls -d lua examples spec tests runtime/gen 2>/dev/null) 2>&1"
  -- LuaJIT's interpreter takes less than half the time of the Lua that distributions have luacheck run by
  local faster = #ctx.lines "luajit -e 'require \"luacheck.version\"' 2>&1" == 0 and ctx.lines("command -v luacheck")[1]
  local script = faster and ctx.read(faster):match "^#![^\n]*lua" and "luajit -joff " .. faster or "luacheck"
  local out = ctx.lines(script .. " " .. words)
  if #out > 0 and out[#out]:match "^Total: 0 warnings / 0 errors" then return {} end
  return out
end

return {
  { "no accidental globals", globals }, { "no pairs where order matters", no_pairs },
  { "one door to the FFI", one_door }, { "the environment of programs with other rights", environment },
  { "luacheck", luacheck },
}
