-- Model files of earlier versions of the format open, and answer what they answered: tests/kept has one of each, made
-- by tests/kept/model.lua at that time, with all its operations whose bits are the same on all processors.
local ffi = require "ffi"
local peri = require "perilune"
local shell = require "spec.support.shell"

local answers = {
  ["model-1.peri"] = {
    norm = { 1.70960057, -0.314542443, -0.74816668, -0.646891356, 1.68088138, -0.320069999, -0.410092294, -0.950719178,
      1.50441396, 0.307420105, -0.89166081, -0.920173228, 0.668294013, 0.260791957, 0.770950139, -1.70003629 },
    pairs = { -0.130246401, -0.185961574, -0.280684829, -0.0739018396, -0.032756567, -0.279641926, -0.134722933,
      -0.144953638 },
  },
}

describe("model files that are kept", function()
  local batch = dofile "tests/kept/model.lua"
  for name in shell.run "ls tests/kept":gmatch "(model%-%d+%.peri)\n" do
    it("open and answer what they did: " .. name, function()
      local file = peri.export.open("tests/kept/" .. name, { verify = true })
      assert.equal("perilune 0.2.0", file:describe().producer)
      local found = file:predict(batch(4, 99))
      for output, list in peri.util.ordered(answers[name]) do
        local numbers, n = found[output]:read()
        assert.equal(#list, n)
        for i = 1, n do
          assert.equal(tonumber(ffi.cast("float", list[i])), numbers[i - 1], ("%s, number %d"):format(output, i))
        end
      end
    end)
  end

  it("are there", function() assert.is_truthy(shell.run "ls tests/kept":find("model-1.peri", 1, true)) end)
end)
