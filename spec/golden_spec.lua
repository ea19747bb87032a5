-- The golden vectors themselves: spec/golden/README.md says what lies there, and the comparison with them accepts what
-- it should.
local golden = require "spec.support.golden"
local shell = require "spec.support.shell"

local text = shell.read "spec/golden/README.md"

--- Names of the files of a folder, without their ends.
local function names_in(folder)
  local list = {}
  local pipe = io.popen("ls spec/golden/" .. folder)
  for file in pipe:lines() do list[#list + 1] = file:gsub("%.[a-z]+$", "") end
  pipe:close()
  return list
end

--- The lines from a heading up to the next one of its depth.
local function section(heading)
  local level = heading:match "^#+"
  local from = assert(text:find("\n" .. heading, 1, true), heading)
  return text:sub(from, (text:find("\n" .. level .. " ", from + 2, true) or #text))
end

describe("spec/golden/README.md", function()
  it("counts the files of every kind of ops, and describes no other", function()
    local kinds, total = {}, 0
    for kind, n in section("## ops"):gmatch "\n### (%l+)[^\n(]* %((%d+)[^\n]*%)" do
      assert.equal(tonumber(n), #names_in("ops/" .. kind), kind)
      kinds[#kinds + 1], total = kind, total + tonumber(n)
    end
    table.sort(kinds)
    assert.same(names_in "ops", kinds)
    assert.matches(("%d files of twelve kinds"):format(total), section "## ops")
    assert.equal(12, #kinds)
  end)

  it("names patterns and cases of sharded that exist, and covers all", function()
    local names, covered = names_in "sharded", {}
    local function find(pattern)
      local found = false
      for _, name in ipairs(names) do
        if name:find("^" .. pattern:gsub("%*", ".*") .. "$") then covered[name], found = true, true end
      end
      return found
    end
    for files in section("### Format"):gmatch "\n| [%l_0-9]+ | (`[^|]*`) |" do
      for pattern in files:gmatch "`([^`]*)`" do assert.is_true(find(pattern), pattern) end
    end
    for _, name in ipairs(names) do assert.is_true(covered[name], name .. " is of no kind") end
    for name in section("## sharded"):gmatch "`(%l+_[%l%d_]*w%d[%l%d_]*)`" do assert.is_true(find(name), name) end
  end)

  it("names no index that is not there", function() assert.is_nil(text:find "index%.json") end)
end)

describe("assert_near", function()
  local inf, tol = math.huge, { abs = 1e-6, rel = 1e-5 }
  local function accepts(want, got, t) return (pcall(golden.assert_near, { want }, { got }, t or tol)) end

  it("wants an infinity for an infinity, and a NaN for a NaN", function()
    for _, t in ipairs { tol, { abs = 0, rel = 0 }, { abs = inf, rel = 1 } } do
      assert.is_true(accepts(inf, inf, t))
      assert.is_true(accepts(-inf, -inf, t))
      assert.is_true(accepts(0 / 0, 0 / 0, t))
      for _, got in ipairs { 0, 1e38, -inf, 0 / 0 } do assert.is_false(accepts(inf, got, t)) end
      for _, got in ipairs { 0, -1e38, inf, 0 / 0 } do assert.is_false(accepts(-inf, got, t)) end
      for _, got in ipairs { 0, inf, -inf } do assert.is_false(accepts(0 / 0, got, t)) end
    end
    assert.is_false(accepts(1, inf))
    assert.is_false(accepts(1, 0 / 0))
  end)

  it("accepts what is within abs + rel * |want|, and no more", function()
    assert.is_true(accepts(1000, 1000.01))
    assert.is_false(accepts(1000, 1000.011))
    assert.is_true(accepts(0, -1e-6))
    assert.is_false(accepts(0, -1.1e-6))
    assert.is_false(accepts(3, 3.0000001, { abs = 0, rel = 0 }))
    assert.is_false((pcall(golden.assert_near, { 1, 2 }, { 1 }, tol)))
  end)
end)
