-- The progress line: rates without pauses, time left, in place on terminals and line by line elsewhere.
local Progress = require "perilune.progress"

local function stream()
  local parts = {}
  return { write = function(_, ...) for _, s in ipairs { ... } do parts[#parts + 1] = s end end, flush = function() end,
    text = function() return table.concat(parts) end }
end

describe("progress", function()
  local now, clock = Progress.now, 100
  setup(function() Progress.now = function() return clock end end)
  teardown(function() Progress.now = now end)

  it("tells step, share, loss, rate and time left", function()
    local out = stream()
    local p = Progress { total = 100, samples_per_step = 2048, style = "lines", stream = out }
    clock = clock + 10
    p:pause(function() clock = clock + 1000 end)
    assert.equal(10, p:seconds())
    assert.equal(10 * 204.8, p:rate(10))
    p:update(10, 0.25)
    assert.equal("step 10/100   10 %  loss 0.2500  2,048 samples/s  1 min 30 s left\n", out.text())
    p:update(11, 0.2) -- too soon
    assert.equal(1, select(2, out.text():gsub("\n", "")))
    p:update(100, 0.2)
    assert.matches("step 100/100  100 %%  loss 0%.2000  20,480 samples/s  0 s left\n$", out.text())
  end)

  it("says what it is of, and shows nothing of what is soon done", function()
    local out = stream()
    local p = Progress { total = 10, samples_per_step = 1, style = "lines", stream = out, label = "baseline: ",
      delay = 3 }
    clock = clock + 2
    p:update(5, 1)
    p:update(10, 1)
    assert.equal("", out.text())
    clock = clock + 2
    p:update(5, 1, "validation 0.5")
    assert.equal("baseline: step 5/10   50 %  loss 1.0000  validation 0.5  1 samples/s  4 s left\n", out.text())
  end)

  it("rewrites the line on a terminal", function()
    local out = stream()
    local p = Progress { total = 10, samples_per_step = 1, style = "live", stream = out }
    clock = clock + 1
    p:update(1, 1)
    p:say "note"
    clock = clock + 1
    p:update(10, 1)
    local text = out.text()
    assert.matches("^\rstep 1/10.-\27%[K\r\27%[Knote\n\rstep 10/10.-\27%[K\n$", text)
  end)

  it("is silent when told so, and refuses other styles", function()
    local out = stream()
    local p = Progress { total = 10, samples_per_step = 1, style = "off", stream = out }
    clock = clock + 100
    p:update(10, 1)
    assert.equal("", out.text())
    assert.error_matches(function() Progress { total = 1, samples_per_step = 1, style = "loud" } end,
      "style is 'loud', allowed: live, lines, off")
  end)

  it("is a bar where there is no loss to show", function()
    local progress = Progress { total = 8, samples_per_step = 1, style = "off" }
    progress.seconds = function() return 6 end
    assert.equal("[##################......]  75 % reading, 2 s left", progress:bar(6, "reading"))
    assert.equal("[########################] 100 % reading, 0 s left", progress:bar(8, "reading"))
  end)

  it("groups digits and names durations", function()
    assert.equal("1", Progress.grouped(1))
    assert.equal("999", Progress.grouped(999))
    assert.equal("1,000", Progress.grouped(1000))
    assert.equal("12,345,678", Progress.grouped(12345678))
    assert.equal("5 s", Progress.duration(4.2))
    assert.equal("2 min 05 s", Progress.duration(125))
    assert.equal("1 h 01 min", Progress.duration(3700))
  end)
end)
