-- docs/parity.md: every name of torchrec.distributed has a row, whose symbol exists and whose spec says what it proves.
local peri = require "perilune"
local shell = require "spec.support.shell"
local page = dofile "tests/parity/page.lua"

local sections = dofile "tests/parity/names.lua"
local headers = shell.read "build/lua/perilune/cdef.lua"

local function exists(path)
  local file = io.open(path)
  if file then file:close() end
  return file ~= nil
end

--- Whether there is such a C function, file, or "peri.a.C" or "peri.a.C:method".
local function there(symbol)
  if symbol:match "^peri_" then return headers:find(symbol .. "%(") ~= nil end
  if symbol:match "/" then return exists(symbol) end
  local x = peri
  local path, method = symbol:match "^peri([%w_%.]*):?([%w_]*)$"
  for name in path:gmatch "[%w_]+" do
    local ok, value = pcall(function() return x[name] end) -- faces say that they do not have it
    if not ok or value == nil then return false end
    x = value
  end
  return method == "" or (x[method] or x.methods and x.methods[method]) ~= nil
end

local rows = {}
for _, section in ipairs(sections) do
  for i = 2, #section do rows[#rows + 1] = { section = section[1], row = section[i] } end
end

describe("docs/parity.md", function()
  it("names symbols that exist", function()
    local missing = {}
    for _, r in ipairs(rows) do
      local symbol = r.row[2]
      if symbol then
        if not there(symbol) then missing[#missing + 1] = ("%s.%s: %s"):format(r.section, r.row[1], symbol) end
      end
    end
    assert.same({}, missing)
  end)

  it("names specs that say what they prove", function()
    local missing = {}
    for _, r in ipairs(rows) do
      if r.row[2] then
        local file, words = r.row[3]:match "^([^:]+): (.+)$"
        if not exists(file) then missing[#missing + 1] = ("%s: no %s"):format(r.row[1], file)
        elseif not shell.read(file):find(words, 1, true) then
          missing[#missing + 1] = ("%s: %s does not have '%s'"):format(r.row[1], file, words)
        end
      end
    end
    assert.same({}, missing)
  end)

  it("says of few names that they make no sense here, and of none that is built that it is not", function()
    local _, counts = page.make(sections)
    assert.is_true(counts.never <= 15)
    for _, r in ipairs(rows) do
      for _, place in ipairs { peri, peri.shard, peri.plan, peri.dist } do
        local ok, value = pcall(function() return place[r.row[1]] end)
        assert.is_true(not (r.row.later or r.row.never) or not ok or value == nil, r.row[1])
      end
    end
  end)

  it("is what `make parity` makes", function() assert.equal((page.make(sections)), shell.read "docs/parity.md") end)
end)
