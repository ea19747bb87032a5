-- report.lua: the lines by which a test program tells tests/run.lua what happened: "status<TAB>name<TAB>message", where
-- status is start, pass, fail or skip; the last line is "end". A report without it tells that the program died, and in
-- which test.
local M = {}

local function escape(text) return (text:gsub("[\\\n\t]", { ["\\"] = "\\\\", ["\n"] = "\\n", ["\t"] = "\\t" })) end
local function unescape(text) return (text:gsub("\\(.)", { ["\\"] = "\\", n = "\n", t = "\t" })) end

--- A writer of the report that PERI_TEST_REPORT names; each rank of a world has its own. Without the variable it writes
--- nothing.
function M.writer()
  local path = os.getenv "PERI_TEST_REPORT"
  local file = path and assert(io.open(path .. "." .. (os.getenv "OMPI_COMM_WORLD_RANK" or "0"), "w"))
  return function(status, name, message)
    if not file then return end
    file:write(status, "\t", escape(name or ""), "\t", escape(message or ""), "\n")
    file:flush()
  end
end

--- Read a report: list of { status =, name =, message = } of finished tests; the name of the test that was running at
--- the end (nil); whether the report is complete.
function M.read(path)
  local tests, running, complete = {}, nil, false
  local file = io.open(path)
  if not file then return tests, nil, false end
  for line in file:lines() do
    local status, name, message = line:match "^(%a+)\t(.-)\t(.*)$"
    if status == "start" then running = unescape(name)
    elseif status == "end" then complete = true
    elseif status then
      tests[#tests + 1] = { status = status, name = unescape(name), message = unescape(message) }
      running = nil
    end
  end
  file:close()
  return tests, running, complete
end

--- The results of a cmocka program, from the TAP text that it prints: as `read`.
function M.read_tap(text)
  local tests, planned = {}, nil
  for line in (text .. "\n"):gmatch "(.-)\n" do
    local plan = line:match "^1%.%.(%d+)"
    if plan then planned = (planned or 0) + tonumber(plan) end
    local bad, rest = line:match "^(n?o?t? ?)ok %d+ ?%-? ?(.*)$"
    if bad then
      local skip = rest:match "^# SKIP ?(.*)" or rest:match "^(.*) # SKIP"
      if skip then tests[#tests + 1] = { status = "skip", name = skip, message = "" }
      else tests[#tests + 1] = { status = bad == "" and "pass" or "fail", name = rest, message = "" } end
    end
  end
  return tests, nil, planned ~= nil and #tests >= planned
end

return M
