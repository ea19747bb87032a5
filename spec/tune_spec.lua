-- perilune calibrate, the file that it keeps, and the variable that goes before it.
-- deadline: 240 s
local shell = require "spec.support.shell"
local perilune = shell.perilune

local folder, clean
setup(function() folder, clean = shell.temporary() end)
teardown(function() clean() end)

local function run(words, env)
  env = env or {}
  env.XDG_CACHE_HOME = env.XDG_CACHE_HOME or folder .. "/cache"
  env.PERI_CACHE_BYTES = tostring(32 * 2 ^ 20) -- else this takes as long as the machine's caches are large
  return shell.run(perilune .. " " .. words, env)
end

describe("perilune calibrate", function()
  if shell.no_launcher() then return it("is there", function() pending(shell.no_launcher()) end) end

  it("measures, shows, keeps; later processes use what is kept", function()
    local out, status = run "calibrate --only choices --rounds 1"
    assert.equal(0, status)
    local path = out:match "kept in (%S+)"
    assert(path and path:find(folder .. "/cache/perilune/", 1, true) == 1, out)
    local way = out:match "lookup_prefetch%s+(%S+)"
    assert.matches("%*" .. way:gsub("%p", "%%%0") .. " %d+", out) -- the way in use, with its time
    assert.matches("copy_near%s+16000.*not measured", out)
    local info = run "info"
    local disturbed = out:find("passes of one way differed", 1, true) -- what other programs disturbed is not kept
    if not disturbed then assert.matches("lookup_prefetch%s+" .. way:gsub("%p", "%%%0") .. "%s+kept", info) end
    assert.matches("copy_near%s+16000%s+default", info)
    assert(info:find(path, 1, true), info)
  end)

  it("PERI_TUNE goes before the file, and off forgets it", function()
    local info = run("info", { PERI_TUNE = "lookup_prefetch=l1-4k copy_near=4000" })
    assert.matches("lookup_prefetch%s+l1%-4k%s+given; default l2%-32k", info)
    assert.matches("copy_near%s+4000%s+given; default 16000", info)
    info = run("info", { PERI_TUNE = "off" })
    assert.matches("lookup_prefetch%s+l2%-32k%s+default", info)
    assert.matches("kept in%s+no file", info)
    info = run("info", { PERI_TUNE = "lookup_prefetch=far" })
    assert.matches("PERI_TUNE: 'lookup_prefetch=far', allowed ways of lookup_prefetch: off, l1%-4k", info)
    assert.equal(1, select(2, info:gsub("allowed ways of lookup_prefetch", "")))
  end)

  it("updates have the same bits whether they keep rows of the gradient or not", function()
    local script = os.tmpname()
    local f = assert(io.open(script, "w"))
    f:write [[
local peri = require "perilune"
local nn, Tensor = peri.nn, peri.Tensor
-- a gradient of 4 MiB, rows of a table's 32 KiB apart, so that few sets of a cache have them
local B, FEATURES, most = 128, 66, 12
local lengths, values, n = {}, {}, 0
for i = 1, FEATURES * B do
  lengths[i] = i * 7919 % most
  for _ = 1, lengths[i] do
    n = n + 1
    values[n] = n * 104729 % 100
  end
end
local weights, keys = {}, {}
for i = 1, FEATURES do keys[i] = "f" .. i end
for i = 1, n do weights[i] = i % 9 / 4 end
for _, dtype in ipairs { "FP32", "FP16" } do
  for _, case in ipairs { { "SUM", false }, { "MEAN", false }, { "SUM", true } } do
    local configs = {}
    for i = 1, FEATURES - 1 do
      configs[i] = peri.EmbeddingBagConfig { name = "t" .. i, embedding_dim = i > 61 and 64 or 128,
        num_embeddings = 100, pooling = case[1], data_type = dtype, feature_names = i == 1 and { "f1", "f2" } or { "f" .. (i + 1) } }
    end
    nn.manual_seed(1)
    local ebc = peri.EmbeddingBagCollection { tables = configs, is_weighted = case[2],
      fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 } }
    local kjt = peri.KeyedJaggedTensor { keys = keys, values = values, lengths = lengths,
      weights = case[2] and weights or nil }
    for _ = 1, 2 do
      local out = ebc(kjt):values()
      ;(out * out):sum():backward()
    end
    for i = 1, FEATURES - 1, 21 do
      local t = ebc:state_dict()["embedding_bags.t" .. i .. ".weight"]
      print(dtype, case[1], case[2], i, ("%.17g"):format(t:to "f64":pow(2):sum():item()))
    end
  end
end
]]
    f:close()
    local kept, apart = run("run " .. script), run("run " .. script, { PERI_TUNE = "update_kept=off" })
    os.remove(script)
    assert.matches("FP16%s+SUM%s+true%s+64", kept)
    assert.equal(apart, kept)
  end)

  it("a damaged file is named, not used, and replaced", function()
    local path = run("info"):match "kept in%s+(%S+)"
    local file = assert(io.open(path, "a"))
    file:write "lookup_order lines 1 1\n"
    file:close()
    local info = run "info"
    assert.matches("is damaged %(its last line is not the hash of those before%): not used; perilune calibrate", info)
    assert.matches("lookup_order%s+scattered%s+default", info)
    assert.equal(0, select(2, run "calibrate --only choices --rounds 1"))
    assert.not_matches("damaged", (run "info"))
  end)

  it("goes on where nothing can be kept", function()
    local out, status = run("calibrate --only choices --rounds 1", { XDG_CACHE_HOME = "/dev/null/none" })
    assert.equal(0, status)
    assert.matches("not kept: .*/dev/null/none", out)
  end)

  it("refuses other words", function()
    local out, status = run "calibrate --rounds 0"
    assert.equal(2, status)
    assert.matches("%-%-rounds: '0' is not a whole number above 0", out)
  end)
end)

describe("a process", function()
  if shell.no_launcher() then return it("waits for the launcher", function() pending(shell.no_launcher()) end) end

  it("measures nothing by itself, not for exchanges past the caches either", function()
    if not shell.has "mpirun" then return pending "Open MPI was not found" end
    local script = shell.write(folder .. "/exchange.lua", [[
      local peri = require "perilune"
      local world = peri.init()
      world:all_gather(peri.full({ 4 * 2 ^ 20 }, 1)):wait() -- 32 MiB on each rank
      for _, c in ipairs(require("perilune.choices").list()) do
        if c.source ~= "default" then print(c.name .. " is " .. c.source) end
      end
      if world:rank() == 0 then print "all there" end
    ]])
    local out, status = run("run -n 2 " .. script, { XDG_CACHE_HOME = folder .. "/none" })
    assert.matches("all there", out)
    assert.not_matches("measured", out)
    assert.equal(0, status)
    assert.is_nil(io.open(folder .. "/none"))
  end)
end)

describe("copy_near", function()
  if shell.no_launcher() then return it("waits for the launcher", function() pending(shell.no_launcher()) end) end

  it("is that of rank 0 for all, whatever the others chose", function()
    if not shell.has "mpirun" then return pending "Open MPI was not found" end
    local script = shell.write(folder .. "/near.lua", [[
      local peri = require "perilune"
      local ways = { "4000", "16000", "64000" }
      peri.ffi.check(peri.ffi.C.peri_tune_set("copy_near", ways[(tonumber(os.getenv "OMPI_COMM_WORLD_RANK") + tonumber(arg[1])) % 3 + 1]))
      peri.init()
      local world = peri.world()
      for _, count in ipairs { 900, 1100, 3999, 4001, 15900, 16100 } do
        local got = world:all_gather(peri.full({ count }, world.rank_number + 1)):wait():to_list()
        for i, x in ipairs(got) do assert(x == math.floor((i - 1) / count) + 1) end
      end
      if world.rank_number == 0 then print "all there" end
    ]])
    for first = 0, 2 do
      local out, status = run(("run -n 3 %s %d"):format(script, first))
      assert.matches("all there", out)
      assert.equal(0, status)
    end
  end)
end)
