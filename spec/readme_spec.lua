-- The README's example runs as it stands there, and does what the README says of it.
-- deadline: 240 s
local shell = require "spec.support.shell"

describe("the README's example", function()
  local folder, clean
  setup(function()
    folder, clean = shell.temporary()
    local count = 0
    for block in shell.read("README.md"):gmatch "```lua\n(.-)```" do
      local name = block:match "^%-%- ([%w_]+%.lua): "
      assert.is_truthy(name, "a Lua block of the README does not open with its file's name")
      -- Fewer samples, and every rank prints: the mean over ranks is the loss of the whole batch.
      shell.write(folder .. "/" .. name, (block:gsub("num_rows = %d+", "num_rows = 40960"):gsub(" and peri%.rank%(%) == 0", "")))
      count = count + 1
    end
    assert.equal(2, count)
  end)
  teardown(function() clean() end)

  local function losses(ranks)
    local here = io.popen("pwd"):read "*l"
    local out, status = shell.run(("cd %s && %s/%s run -n %d experiment.lua"):format(folder, here, shell.perilune, ranks))
    assert.equal(0, status, out)
    local sums, lines = { ["10"] = 0, ["20"] = 0 }, 0
    for step, loss in out:gmatch "step (%d+): loss (%d+%.%d+)\n" do
      sums[step], lines = sums[step] + tonumber(loss) / ranks, lines + 1
    end
    assert.equal(2 * ranks, lines, out)
    return { sums["10"], sums["20"] }
  end

  it("learns, and learns the same on one rank and on two", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local one = losses(1)
    assert.is_true(one[2] < one[1], ("loss %g, then %g"):format(one[1], one[2]))
    if not shell.has "mpirun" then return pending "mpirun was not found" end
    local two = losses(2)
    for i = 1, 2 do assert.near(one[i], two[i], 2e-4) end
  end)

  it("is short", function()
    assert.is_true(select(2, shell.read(folder .. "/experiment.lua"):gsub("\n", "")) <= 36)
  end)
end)
