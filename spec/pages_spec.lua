-- Facts that have a page of their own are all on it: environment variables (docs/running.md), dependencies
-- (docs/dependencies.md); and the pages are those that the README leads to.
local shell = require "spec.support.shell"

--- Variables that are no user's: between processes of one run, and of tests. PERI_CUDA_TF32 is refused with words that
--- say what to set.
local ours = { PERI_LAUNCHER = true, PERI_CUDA_TF32 = true, PERI_OPAQUE_DEVICE = true, PERI_OPAQUE_SEED = true,
  PERI_TEST_COUNT_LIMIT = true, PERI_TEST_PATCH = true }

describe("docs/running.md", function()
  it("has every environment variable that is read, and no other", function()
    local page, read, wrong = shell.read "docs/running.md", {}, {}
    for path in shell.run("find runtime lua -name '*.c' -o -name '*.lua'"):gmatch "%S+" do
      for name in shell.read(path):gmatch "getenv%W+(PERI_[%u%d_]+)" do read[name] = path end
    end
    for name, path in pairs(read) do
      if not ours[name] and not page:find("\n| `" .. name, 1, true) then
        wrong[#wrong + 1] = ("%s, of %s, is not there"):format(name, path)
      end
    end
    for name in page:gmatch "\n| `(PERI_[%u%d_]+)" do
      if not read[name] and #shell.run(("grep -rl '%s' runtime lua"):format(name)) == 0 then
        wrong[#wrong + 1] = name .. " is not read"
      end
    end
    table.sort(wrong)
    assert.same({}, wrong)
    assert.is_truthy(read.PERI_LOG)
  end)
end)

describe("docs/dependencies.md", function()
  it("has whatever the build looks for", function()
    local page, missing, found = shell.read("docs/dependencies.md"):lower(), {}, 0
    -- in the build's table, and on the page
    local called = { compiler = "c11 compiler", libluajit = "luajit", ["c++"] = "g++" }
    for name in shell.read("Makefile"):gmatch "%$%(call row,([^,]+),HAVE_" do
      found = found + 1
      name = name:lower()
      if not page:find(called[name] or name, 1, true) then missing[#missing + 1] = name end
    end
    assert.same({}, missing)
    assert.is_true(found > 15)
  end)

  it("gives each a reason, and says what is without it", function()
    for line in shell.read("docs/dependencies.md"):gmatch "\n(| [^\n]+)" do
      local cells = {}
      for cell in line:gmatch "|([^|]*)" do cells[#cells + 1] = cell:match "^%s*(.-)%s*$" end
      assert.is_true(#cells >= 4 and #cells[2] > 0 and #cells[3] > 3, line)
    end
  end)
end)

describe("docs/models.md", function()
  --- Names that others use, not users: how handles are made, parts of optimizers and of collective metrics.
  local inner = { ptr = true, wrap = true, meta = true, methods = true, embedding_bag = true, keep_rows = true,
    own_parts = true, restart_rows = true, retire = true, retired = true, all_or_none = true, gather = true,
    group_of = true, given_alike = true }

  it("has every name of tensors, nn and KeyedJaggedTensors", function()
    local peri = require "perilune"
    local page, missing = shell.read "docs/models.md", {}
    local faces = { tensor = peri.Tensor.methods, KeyedJaggedTensor = peri.KeyedJaggedTensor,
      ["a KeyedJaggedTensor"] = peri.KeyedJaggedTensor.methods, JaggedTensor = peri.JaggedTensor,
      ["a JaggedTensor"] = peri.JaggedTensor.methods, KeyedTensor = peri.KeyedTensor }
    for _, name in ipairs { "functional", "layers", "losses", "models", "interaction", "embedding", "module",
      "parameter", "ranks", "metrics", "optim", "schedule" } do
      faces["nn." .. name] = require("perilune.nn." .. name)
    end
    local names = 0
    for face, list in pairs(faces) do
      for name in pairs(list) do
        if type(name) == "string" and not name:match "^_" and not inner[name] then
          names = names + 1
          if not page:find("[^%w_]" .. name .. "[^%w_]") then missing[#missing + 1] = face .. ": " .. name end
        end
      end
    end
    table.sort(missing)
    assert.same({}, missing)
    assert.is_true(names > 250)
  end)
end)

describe("the pages", function()
  local pages = {}
  for path in shell.run("ls README.md docs/*.md docs/benchmarks/*.md"):gmatch "%S+" do
    pages[#pages + 1] = { path = path, text = shell.read(path) }
  end

  it("name functions of Lua and C, constants and variables that there are", function()
    require("perilune").init()
    local names, help, wrong, looked = dofile "tests/reference/names.lua", require "perilune.launch.help", {}, 0
    local words = {} -- of all sources
    for path in shell.run("find runtime kernels lua spec tests -name '*.[ch]' -o -name '*.cu*' -o -name '*.lua'")
      :gmatch "%S+" do
      for word in shell.read(path):gmatch "%f[%w_][Pp][Ee][Rr][Ii]_[%w_]+" do words[word] = true end
    end
    for _, page in ipairs(pages) do
      for name in page.text:gmatch "%f[%w_%.:/](peri[%.:][%w_%.:]*[%w_])" do
        looked = looked + 1
        if names.value(name) == nil and #help.find(name) ~= 1 then wrong[#wrong + 1] = page.path .. ": " .. name end
      end
      for word in page.text:gmatch "%f[%w_]([Pp][Ee][Rr][Ii]_[%w_]*[%w])%f[^%w_%*]" do
        looked = looked + 1
        if not words[word] then wrong[#wrong + 1] = page.path .. ": " .. word end
      end
    end
    assert.same({}, wrong)
    assert.is_true(looked > 1000)
  end)

  it("name options that the launcher's commands have", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local options, wrong, looked = {}, {}, 0
    local function of(command)
      if not options[command] then
        options[command] = {}
        for o in shell.run(shell.perilune .. " " .. command .. " --help"):gmatch "%-%-?%a[%w%-]*" do
          options[command][o] = true
        end
      end
      return options[command]
    end
    for _, page in ipairs(pages) do
      local function look(line)
        local command, rest = line:match "perilune (%l+)(.*)"
        rest = command == "run" and rest:match "^(.-)%s[%w_/%.]+%.lua" or rest or "" -- behind it: the script's own
        for o in rest:gmatch "%s(%-%-?%a[%w%-]*)" do
          looked = looked + 1
          if not of(command)[o] then wrong[#wrong + 1] = ("%s: %s %s"):format(page.path, command, o) end
        end
      end
      for line in page.text:gmatch "\n%s*([build/]*perilune %l[^\n]*)" do look(line) end
      for line in page.text:gmatch "`([build/]*perilune %l[^`\n]*)`" do look(line) end
    end
    assert.same({}, wrong)
    assert.is_true(looked > 50)
  end)
end)

describe("the README", function()
  it("leads to every page, or the index of the documents does", function()
    local text, index, lost = shell.read "README.md", shell.read "docs/README.md", {}
    for path in shell.run("ls docs/*.md"):gmatch "%S+" do
      if not text:find("](" .. path .. ")", 1, true) and not index:find("](" .. path:gsub("^docs/", "") .. ")", 1,
        true) then
        lost[#lost + 1] = path
      end
    end
    assert.same({}, lost)
  end)

  it("is read in three minutes", function()
    -- without code and addresses
    local text, words = shell.read("README.md"):gsub("```.-```", ""):gsub("%]%([^)]*%)", "]"), 0
    for word in text:gmatch "%S+" do
      if word:match "%w" then words = words + 1 end
    end
    assert.is_true(words <= 1000, words .. " words")
  end)
end)
