-- busted_report.lua: a busted output handler: failures as text for people, everything as report lines for
-- tests/run.lua. PERI_TEST_TIMES=1: the processor seconds of each test, and of the programs that it ran, which other
-- work on the machine changes least.
local pretty = require "pl.pretty"
local report = require "tests.harness.report"

local times = os.getenv "PERI_TEST_TIMES"

--- Processor seconds of this process and of its children that have ended.
local function seconds()
  local file = assert(io.open "/proc/self/stat")
  local fields = file:read("*a"):match "%) (.*)"
  file:close()
  local sum, at = 0, 2 -- after the name: the third field of the line
  for field in fields:gmatch "%S+" do
    at = at + 1
    if at >= 14 and at <= 17 then sum = sum + tonumber(field) end
  end
  return sum / 100
end

return function()
  local busted = require "busted"
  local handler = require "busted.outputHandlers.base"()
  local write = report.writer()

  local function text_of(t)
    local message = t.message
    if message == nil then message = "an error without a message" end
    if type(message) == "table" then
      message = getmetatable(message) and getmetatable(message).__tostring and tostring(message)
        or pretty.write(message)
    end
    local trace = t.trace or {}
    return ("%s\n  at %s:%s%s"):format(tostring(message), trace.short_src or "?", trace.currentline or "?",
      t.isError and trace.traceback and trace.traceback:gsub("\n", "\n  ") or "")
  end

  local function failed(t)
    local text = text_of(t)
    io.write("FAILED ", t.name, "\n", text, "\n")
    io.flush()
    write("fail", t.name, text)
  end

  local before

  function handler.testStart(element)
    write("start", handler.getFullName(element))
    before = times and seconds()
    return nil, true
  end

  function handler.testEnd(element, _, status)
    if before then io.write(("%7.2f s  %s\n"):format(seconds() - before, handler.getFullName(element))) end
    if status == "success" then write("pass", handler.successes[#handler.successes].name)
    elseif status == "pending" then
      local t = handler.pendings[#handler.pendings]
      write("skip", t.name, type(t.message) == "string" and t.message:gsub("^[^:%s]+:%d+: ", "")
        or "pending, without a reason")
    elseif status == "failure" then failed(handler.failures[#handler.failures])
    else failed(handler.errors[#handler.errors]) end
    return nil, true
  end

  -- A failure outside any test: loading a file, setup and teardown.
  function handler.errorOutside(element)
    if element.descriptor ~= "it" then failed(handler.errors[#handler.errors]) end
    return nil, true
  end

  function handler.suiteEnd()
    write "end"
    return nil, true
  end

  busted.subscribe({ "test", "start" }, handler.testStart)
  busted.subscribe({ "test", "end" }, handler.testEnd)
  busted.subscribe({ "error" }, handler.errorOutside)
  busted.subscribe({ "failure" }, handler.errorOutside)
  busted.subscribe({ "suite", "end" }, handler.suiteEnd)
  return handler
end
