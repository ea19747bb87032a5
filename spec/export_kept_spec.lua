-- Model files of earlier versions of the format open, and answer what they answered: tests/kept has one of samples and
-- one of lists, made by tests/kept/model.lua and lists.lua at that time on a processor with AVX-512. Others may round
-- the interaction, sums along a dimension, and functions otherwise (docs/model_file.md).
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
  ["lists-1.peri"] = {
    attended = { -0.219820499, -0.455825806, -1.01463294, -1.03696895, -0.532585025, -3.13550949, -0.838004291,
      1.38333297, 1.72815633, 0.0804997087, 0.831776977, 3.18510556, 0.963173628, 1.01893055, 0.109601676,
      0.580952048, 0.52921325, 0.599583447, -0.217630982, -0.078473419, -1.47489631, -1.72024536, -2.52039266,
      0.87571913, 2.50635648, -0.223181859, -0.94696188, 2.19676542, 0.455531001, -1.09609234, -0.88915062,
      1.44306767, -1.29810369, 0.181005597, -0.433854401, 1.775388, 0.0102148326, -1.29754901, -0.392197818,
      1.64162111, -0.517323256, -1.61058497, -0.387120694, 1.57476044 },
    ["attended.lengths"] = { 2, 1, 5, 3 },
    list = { 0.0704372451, 0.764197946, -0.0491228923, -0.137031496, 0.329834461, 0.750375628 },
    ["list.lengths"] = { 0, 1, 4, 1 },
    sums = { 0, -0.376558959, -1.79871941, -0.920437872, 0.25376451, -0.753117919, -3.59743881, -1.84087574,
      0.50752902, -0.0379721001, -0.646776438, -0.147075713, 0.490537524, 0.955499709, 1.72815633, 0.0804997087,
      0.831776977, 3.18510556, 0, 0, 0, 0, 0.0605690479, -0.489713788, -0.356992602, 0.488369405, 0.181524158,
      1.78630638, -0.796700418, -0.5238626, 2.1810205, 2.06462812, -3.35344338, -3.60417867, 5.25163651,
      -0.0211449265, -0.646205723, -0.200554684, 0.51849705, -2.00075126, -0.122621402, -1.64981556,
      -0.321620345, 1.34830165, -0.435263902, -1.79887974, -0.310575485, 1.2461524, 0.336807936, -0.465085924,
      -0.448626399, 0.540832579 },
  },
}
local scripts = { model = "tests/kept/model.lua", lists = "tests/kept/lists.lua" }
-- by how much answers may differ
local most = ffi.string(require("perilune.ffi").C.peri_cpu_isa()) == "avx512" and 0 or 1e-6

describe("model files that are kept", function()
  for name, kind in shell.run "ls tests/kept":gmatch "((%a+)%-%d+%.peri)\n" do
    it("open and answer what they did: " .. name, function()
      local batch = dofile(scripts[kind])
      local file = peri.export.open("tests/kept/" .. name, { verify = true })
      assert.equal("perilune 0.2.0", file:describe().producer)
      local found = file:predict(batch(4, 99))
      for output, list in peri.util.ordered(answers[name]) do
        local numbers, n = found[output]:read()
        assert.equal(#list, n)
        for i = 1, n do
          local wanted, got = tonumber(ffi.cast("float", list[i])), tonumber(numbers[i - 1])
          assert.is_true(math.abs(wanted - got) <= most, ("%s, number %d: %.9g, wanted %.9g"):format(
            output, i, got, wanted))
        end
      end
    end)
  end

  it("are there", function()
    for name in peri.util.ordered(answers) do assert.is_truthy(shell.run "ls tests/kept":find(name, 1, true), name) end
  end)
end)
