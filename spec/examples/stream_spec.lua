-- The stream of new ids: managed collision is worth its memory; the picture; the arguments.
-- deadline: 300 s
local shell = require "spec.support.shell"

local folder, clean
setup(function() folder, clean = shell.temporary() end)
teardown(function() clean() end)

--- The AUC of both models in the second half, what was printed, and the picture.
local function run(ranks, out, steps)
  local text, status = shell.run(("%s run -n %d -t 1 examples/stream.lua --data synthetic:12000 --steps %d "
    .. "--batch-size 800 --rows 2048 --dim 8 --out %s/%s"):format(shell.perilune, ranks, steps or 150, folder, out))
  assert.equal(0, status, text)
  local managed = tonumber(text:match "managed collision.-AUC (%d%.%d+)")
  local modulo = tonumber(text:match "modulo rows.-AUC (%d%.%d+)")
  return managed, modulo, text, shell.read(("%s/%s/stream.svg"):format(folder, out))
end

describe("examples/stream.lua", function()
  if shell.no_launcher() then return it("runs", function() pending(shell.no_launcher()) end) end

  it("is better with managed collision than with ids modulo rows", function()
    local managed, modulo, text, picture = run(1, "one")
    assert.is_true(managed > modulo + 0.01, text)
    assert.matches("120,000 samples of %d+,%d+ packages", text)
    assert.matches("^<svg", picture)
    local _, lines = picture:gsub("<polyline", "")
    assert.equal(2, lines)
  end)

  it("does the same on two ranks, with the same two lines and picture", function()
    if not shell.has "mpirun" then return pending "Open MPI was not found" end
    local one, one_modulo, one_text = run(1, "one_small", 40)
    local two, two_modulo, text, picture = run(2, "two_small", 40)
    assert.near(one, two, 0.005, one_text .. text)
    assert.near(one_modulo, two_modulo, 0.005, one_text .. text)
    local _, lines = picture:gsub("<polyline", "")
    assert.equal(2, lines)
  end)

  it("says what it takes", function()
    local text, status = shell.run(shell.perilune .. " run -n 1 examples/stream.lua --help")
    assert.equal(0, status)
    for _, option in ipairs { "%-%-data", "%-%-rows", "%-%-interval", "%-%-out" } do assert.matches(option, text) end
    text, status = shell.run(shell.perilune .. " run -n 1 examples/stream.lua --rows none")
    assert.equal(2, status)
    assert.matches("%-%-rows is 'none', allowed: whole numbers, 64 to", text)
    for words, said in pairs { ["--data synthetic:0"] = "synthetic:0: allowed: synthetic:PACKAGES with 1 to",
      ["--data synthetic"] = "synthetic: allowed", ["--data synthetic:x"] = "synthetic:x: allowed",
      ["--data synthetic:100 --out /dev/null/x"] = "--out /dev/null/x: .*; allowed: a folder to write to" } do
      text, status = shell.run(("%s run -n 1 examples/stream.lua %s"):format(shell.perilune, words))
      assert.equal(1, status)
      assert.matches(said:gsub("%-", "%%-"), text)
    end
  end)
end)
