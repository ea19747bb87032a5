-- run.lua: the lint. Each rule is a function(ctx) that returns a list of complaints; an empty list passes. `make lint`,
-- `make test`.
package.path = "./?.lua;" .. package.path
local report = require "tests.harness.report"

local ctx = { build = "build", luacheck = "" }
for _, word in ipairs(arg) do
  local name, value = word:match "^%-%-(%w+)=(.*)$"
  if not name or not ctx[name] then error("lint: unknown argument " .. word) end
  ctx[name] = value
end

--- Output lines of a command.
function ctx.lines(command)
  local out, pipe = {}, assert(io.popen(command))
  for line in pipe:lines() do out[#out + 1] = line end
  pipe:close()
  return out
end

function ctx.read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read "*a"
  file:close()
  return text
end

function ctx.exists(path)
  local file = io.open(path)
  if file then file:close() end
  return file ~= nil
end

--- Files below folders whose name ends so, sorted. ctx.files("lua examples", "lua", "c", ...)
function ctx.files(folders, ...)
  local tests = {}
  for _, suffix in ipairs { ... } do tests[#tests + 1] = ("-name '*.%s'"):format(suffix) end
  local there = {}
  for folder in folders:gmatch "%S+" do
    if #ctx.lines("ls -d " .. folder .. " 2>/dev/null") > 0 then there[#there + 1] = folder end
  end
  if #there == 0 then return {} end
  return ctx.lines(("find %s \\( %s \\) -type f | LC_ALL=C sort"):format(table.concat(there, " "),
    table.concat(tests, " -o ")))
end

local write = report.writer()
local failures = 0
for _, file in ipairs { "layers", "faces", "boundary", "shape", "lua", "documents", "reference" } do
  for _, rule in ipairs(require("tests.lint." .. file)) do
    local name, check = rule[1], rule[2]
    write("start", name)
    local complaints, skipped = check(ctx)
    if skipped then write("skip", name, skipped)
    elseif #complaints == 0 then write("pass", name)
    else
      failures = failures + 1
      write("fail", name, table.concat(complaints, "\n"))
      print(name .. ":\n  " .. table.concat(complaints, "\n  "))
    end
  end
end
write "end"
os.exit(failures == 0 and 0 or 1)
