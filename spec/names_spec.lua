-- docs/parity.md: every public name of TorchRec (tests/parity/torchrec.txt) has one answer, whose symbol exists and
-- whose spec says what it proves.
local peri = require "perilune"
local shell = require "spec.support.shell"
local page = dofile "tests/parity/page.lua"

local sections, asked, listed = page.sections()
local headers = shell.read "build/lua/perilune/cdef.lua"

local function exists(path)
  local file = io.open(path)
  if file then file:close() end
  return file ~= nil
end

local texts = {}
local function text_of(path)
  texts[path] = texts[path] or shell.read(path)
  return texts[path]
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
  it("answers every public name of TorchRec once, and no other", function()
    local answers, wrong = {}, {}
    for _, r in ipairs(rows) do
      local full = r.section .. "." .. r.row[1]
      answers[full] = (answers[full] or 0) + 1
      if answers[full] == 2 then wrong[#wrong + 1] = full .. ": answered twice" end
    end
    local names = 0
    for _, module in ipairs(listed.modules) do
      names = names + #listed.names[module]
      for _, name in ipairs(asked[module]) do
        local full = module .. "." .. name
        if not answers[full] then wrong[#wrong + 1] = full .. ": no answer" end
        answers[full] = nil
      end
    end
    for module, older in pairs(listed.older) do
      for _, name in ipairs(older) do
        local full = module .. "." .. name
        if not answers[full] then wrong[#wrong + 1] = full .. ": no answer" end
        answers[full] = nil
      end
    end
    local pipelines = "torchrec.distributed.train_pipeline"
    for _, module in ipairs(listed.modules) do
      if module:sub(1, #pipelines + 1) == pipelines .. "." then
        for _, name in ipairs(listed.names[module]) do answers[pipelines .. "." .. name] = nil end
      end
    end
    for full in pairs(answers) do wrong[#wrong + 1] = full .. ": not a name of TorchRec" end
    table.sort(wrong)
    assert.same({}, wrong)
    assert.is_true(names > 1200)
    for _, package in ipairs { "distributed", "modules", "sparse", "metrics" } do
      assert.is_truthy(shell.read("tests/parity/torchrec.txt"):find("\ntorchrec." .. package .. ".", 1, true))
    end
  end)

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
        if not file or not exists(file) then missing[#missing + 1] = ("%s: no %s"):format(r.row[1], r.row[3])
        elseif not text_of(file):find(words, 1, true) then
          missing[#missing + 1] = ("%s: %s does not have '%s'"):format(r.row[1], file, words)
        end
      end
    end
    assert.same({}, missing)
  end)

  it("says of none that is here that it is not", function()
    local wrong = {}
    -- Asked of what is there and of what would be loaded: the error for a name that is not there looks for like ones.
    local function has(face, name)
      if rawget(face, name) ~= nil then return true end
      for _, names in ipairs(getmetatable(face).__names()) do
        if rawget(names, name) ~= nil then return true end
      end
      return false
    end
    local function face(path) return path == "" and peri or peri[path] end
    assert.is_true(has(peri, "KeyedJaggedTensor") and has(peri.nn, "DeepFM") and has(peri.plan, "Topology"))
    for _, r in ipairs(rows) do
      -- functions of other modules may have a short name too
      if page.kind(r.row) ~= "here" and r.row[1]:match "^%u" then
        for _, path in ipairs { "", "nn", "embed", "plan", "shard", "model", "pipeline", "dist", "jagged", "sparse" } do
          if has(face(path), r.row[1]) then
            wrong[#wrong + 1] = ("%s.%s: peri.%s has it"):format(r.section, r.row[1], path)
          end
        end
      end
    end
    assert.same({}, wrong)
  end)

  it("is what `make parity` makes", function() assert.equal((page.make()), shell.read "docs/parity.md") end)
end)
