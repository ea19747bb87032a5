-- jit.lua: does a function compile? Drives it in a hot loop and looks at the traces that LuaJIT makes (style J2).
--
--   local jit_support = require "spec.support.jit"
--   jit_support.assert_compiles("tensor:slice", function(i) return t:slice(1, 0, 2) end)
--
-- The function is called with 1, 2, ... It must be compiled (one trace or more), without an aborted trace and without a
-- stitch, which is a piece that LuaJIT runs in the interpreter between two traces. Aborts that belong to LuaJIT's
-- search for the right loop do not count. Garbage is not collected meanwhile: a finalizer that runs while a trace is
-- recorded aborts it, by chance.
local util = require "jit.util"
local vmdef = require "jit.vmdef"
local compiler = require "perilune.compiler"

local M = {}

local ROUNDS = 300

--- How LuaJIT looks for the loop to compile; not a reason why code cannot be compiled.
local searching = {
  ["inner loop in root trace"] = true,
  ["leaving loop in root trace"] = true,
  ["retry recording"] = true,
  ["NYI: return to lower frame"] = true, -- a trace began in a function that pcall had called (hot counters are few and
                                         -- shared)
  ["symbol not in cache"] = true, -- the first use of a C function looks it up, which cannot be compiled
  ["guard would always fail"] = true, -- a condition turned while the loop was being unrolled
  ["loop unroll limit reached"] = true, -- a short inner loop of changing length gets a trace of its own
}

-- Where LuaJIT must not compile `next`, Perilune's own is called through table.sort (compiler.lua): a stitch there is
-- how loops compile that ask it.
local asking = compiler.wrong(jit.arch, jit.version) == "traversal" and util.funcinfo(table.sort).addr

local function place(func, pc)
  local info = util.funcinfo(func, pc)
  return info.loc or info.addr and ("C function at 0x%x"):format(info.addr) or "?"
end

--- Drive f and return { traces =, aborts = { "place: reason" }, stitches = { "place" } }.
function M.watch(f)
  local seen = { traces = 0, aborts = {}, stitches = {} }
  local function event(what, number, func, pc, code, info)
    if what == "stop" then
      seen.traces = seen.traces + 1
      local stitch = util.traceinfo(number).linktype == "stitch" and util.funcinfo(func, pc)
      if stitch and stitch.addr ~= asking then seen.stitches[#seen.stitches + 1] = place(func, pc) end
    elseif what == "abort" then
      if type(info) == "function" then info = place(info) end
      local reason = type(code) == "number" and vmdef.traceerr[code]:format(info) or tostring(code)
      if not searching[reason] then seen.aborts[#seen.aborts + 1] = ("%s: %s"):format(place(func, pc), reason) end
    end
  end
  -- A fresh loop for every run: LuaJIT remembers, in the bytecode itself, which loops it gave up.
  local drive = assert(loadstring "local f, rounds = ... for i = 1, rounds do f(i) end")
  f(1) -- what the library asks once and keeps (classes.lua), in case a trace begins in the first round, by chance
  collectgarbage()
  collectgarbage "stop"
  jit.off(event)
  jit.flush()
  jit.opt.start("hotloop=10", "hotexit=5")
  jit.attach(event, "trace")
  local ok, err = pcall(drive, f, ROUNDS)
  jit.attach(event)
  jit.opt.start("hotloop=56", "hotexit=10")
  collectgarbage "restart"
  if not ok then error(err, 0) end
  return seen
end

--- Why nothing is looked at where the compiler is off (lua/perilune/compiler.lua).
M.OFF = "LuaJIT makes wrong code here, so nothing is compiled"

--- Fail unless f, a function of a spec, compiles. `allowed` (optional): a pattern of aborts that a comment at the call
--- explains.
function M.assert_compiles(name, f, allowed)
  if not jit.status() then return getfenv(f).pending(M.OFF) end
  local seen, problems = M.watch(f), {}
  if seen.traces == 0 then problems[1] = "no trace was compiled" end
  for _, abort in ipairs(seen.aborts) do
    if not (allowed and abort:match(allowed)) then problems[#problems + 1] = "aborted at " .. abort end
  end
  for _, stitch in ipairs(seen.stitches) do problems[#problems + 1] = "stitched at " .. stitch end
  if #problems == 0 then return end
  error(("%s does not compile:\n  %s"):format(name, table.concat(problems, "\n  ")), 2)
end

return M
