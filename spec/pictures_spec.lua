-- The pictures of the documents: what is drawn from numbers is drawn from those that docs/benchmarks.md gives, and is
-- the drawing that is kept.
local shell = require "spec.support.shell"

local charts = dofile "tests/pictures/figures.lua"

describe("docs/pictures", function()
  local folder, clean
  setup(function() folder, clean = shell.temporary() end)
  teardown(function() clean() end)

  it("has the charts of figures.lua, and the drawing of built.lua, as they are drawn now (make pictures)", function()
    for _, chart in ipairs(charts) do
      local path = ("%s/%s.svg"):format(folder, chart.name)
      dofile "tests/pictures/bars.lua"(chart, path)
      assert.equal(shell.read(path), shell.read(("docs/pictures/%s.svg"):format(chart.name)), chart.name)
    end
    dofile "tests/pictures/built.lua"(folder .. "/built.svg")
    assert.equal(shell.read(folder .. "/built.svg"), shell.read "docs/pictures/built.svg")
  end)

  it("is shown by the documents, each with words for those who cannot see it", function()
    local texts = {}
    for path in shell.run("ls README.md docs/*.md"):gmatch "%S+" do texts[#texts + 1] = shell.read(path) end
    local text = table.concat(texts)
    for name in shell.run("ls docs/pictures"):gmatch "%S+" do
      local words = text:match("!%[([^%]]*)%]%([%w/]*pictures/" .. name:gsub("%.", "%%.") .. "%)")
      assert.is_truthy(words, name .. " is not shown")
      assert.is_true(#words > 20, name)
    end
  end)

  it("shows numbers that docs/benchmarks.md has in words, below the chart", function()
    local page, missing = shell.read "docs/benchmarks.md", {}
    for _, chart in ipairs(charts) do
      local below = page:match("pictures/" .. chart.name .. "%.svg%)(.-)\n## ")
        or page:match("pictures/" .. chart.name .. "%.svg%)(.*)$")
      for _, panel in ipairs(chart.panels) do
        for _, row in ipairs(panel.rows) do
          for i = 2, #row do
            local number = ("%g"):format(row[i])
            if not (" " .. (below or "") .. " "):find("[^%d.]" .. number:gsub("%.", "%%.") .. "[^%d]") then
              missing[#missing + 1] = ("%s, %s: %s"):format(chart.name, row[1], number)
            end
          end
        end
      end
    end
    assert.same({}, missing)
  end)
end)
