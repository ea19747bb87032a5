-- perilune calibrate: what it measures of the machine, and the file that plans read.
-- deadline: 200 s
-- takes: 14 s
local shell = require "spec.support.shell"
local peri = require "perilune"
local fit = require "perilune.calibration.fit"
local beside = require "perilune.calibration.beside"
local plan = peri.plan

describe("fit.least", function()
  it("finds the prices that sums were made of", function()
    local prices = { a = 2, b = 0.5, c = 0 }
    local rows = {}
    for i = 1, 12 do
      local amounts = { a = i % 4 + 1, b = i * 3 % 7 + 2, c = i % 3 }
      rows[i] = { amounts = amounts, ms = amounts.a * prices.a + amounts.b * prices.b }
    end
    local found, off = fit.least(rows, { "a", "b", "c" })
    for unit, price in pairs(prices) do assert.near(price, found[unit], 1e-3) end
    assert.near(0, off, 1e-3)
  end)

  it("leaves those that are known", function()
    local rows = {}
    for i = 1, 6 do rows[i] = { amounts = { a = i, b = 7 - i }, ms = 3 * i + 2 * (7 - i) } end
    local found, off = fit.least(rows, { "a", "b" }, { a = 3 })
    assert.equal(3, found.a)
    assert.near(2, found.b, 1e-6)
    assert.near(0, off, 1e-6)
    found, off = fit.least(rows, { "a", "b" }, { a = 1 })
    assert.equal(1, found.a)
    assert.is_true(off > 0.01)
  end)

  it("finds none below 0", function()
    local found = fit.least({ { amounts = { a = 1, b = 1 }, ms = 1 }, { amounts = { a = 1, b = 2 }, ms = 0.5 } },
      { "a", "b" })
    assert.is_true(found.a >= 0 and found.b >= 0)
  end)
end)

describe("perilune calibrate --only machine", function()
  if shell.no_launcher() then return it("is there", function() pending(shell.no_launcher()) end) end
  local folder, clean
  setup(function() folder, clean = shell.temporary() end)
  teardown(function() clean() end)

  it("keeps nothing of what did not come to its end", function()
    local env = { XDG_CACHE_HOME = folder .. "/other" }
    local function files() return (shell.run(("find %s -type f"):format(env.XDG_CACHE_HOME))) end
    shell.run("mkdir " .. env.XDG_CACHE_HOME)
    local out, status = shell.run(shell.perilune .. " calibrate --only machine -t 99999", env)
    assert.is_true(status ~= 0, out)
    assert.equal("", files())
    out = shell.run(("timeout -s INT 1 %s calibrate --only machine"):format(shell.perilune), env)
    assert.is_nil(out:find "kept in")
    assert.equal("", files())
  end)

  it("measures across slow links, makes the folder, and writes a topology that plans use", function()
    local env, hosts = { XDG_CACHE_HOME = folder .. "/made", PERI_BUILD = shell.build }, 2
    -- small tables: clearing gigabytes of pages would be most of the work, and what is asked below is not of memory
    env.PERI_CACHE_BYTES = tostring(2 * 2 ^ 20)
    -- Every third step that prices are found by: to make the tables of all 75 takes 8 s of a processor.
    os.execute(("mkdir -p %s/perilune/calibration"):format(folder))
    shell.write(folder .. "/perilune/calibration/machine.lua", [[
      local machine = dofile "lua/perilune/calibration/machine.lua"
      local function within(f, wanted)
        for i = 1, 60 do
          local name, value = debug.getupvalue(f, i)
          if name == wanted then return value end
        end
      end
      local probes = within(within(machine.counted, "probes_of"), "probes")
      for i = #probes, 1, -1 do if i % 3 ~= 1 then table.remove(probes, i) end end
      return machine]])
    env.PERI_LUA_PATH = folder
    local words = shell.perilune .. " calibrate --only machine --seconds 1 "
    local out, status = shell.run(("tests/net/nodes -r 1gbit 1,1 %s -n 2 -t 1"):format(words), env, 150)
    if status == 125 then -- no pretended machines, or no Open MPI
      hosts, out, status = 1, shell.run(words, env, 150)
    end
    assert.equal(0, status, out)
    local path = assert(out:match "kept in (%S+)")
    assert.equal(path .. "\n", (shell.run(("find %s -name '*.topology' -type f"):format(env.XDG_CACHE_HOME))))
    assert.equal((".%dx1.topology"):format(hosts), path:sub(-13))
    local t = plan.Topology.load(path)
    assert.same({ hosts, 1 }, { t.world_size, t.local_world_size })
    for _, name in ipairs { "copy", "gather", "update", "products" } do assert.is_true(t.rates[name] > 1e4, name) end
    assert.is_string(t.choices.lookup_prefetch)
    -- a link carries 125 MB/s each way; a burst of 256 KiB goes beyond that
    if hosts == 2 then assert.is_true(t.inter_host_bw > 40e3 and t.inter_host_bw < 170e3, tostring(t.inter_host_bw)) end
    -- twice the samples take longer, by these prices
    local function rating(batch)
      local planner = plan.EmbeddingShardingPlanner { topology = t, estimates = "step", batch_size = batch,
        sharder = plan.perilune_sharder }
      return planner:search(plan.describe.of { tables = { { name = "t", num_embeddings = 1e5,
        embedding_dim = 64 } } }).best.rating
    end
    assert.is_true(rating(4096) > 1.5 * rating(2048))
  end)

  it("measures exchanges of ranks", function()
    local script = shell.write(folder .. "/bare.lua", [[
      local peri, rates = require "perilune", require "perilune.calibration.rates"
      local world, t = peri.init(), { world_size = 2, local_world_size = 2, rates = {} }
      rates.bare(world, t, nil, function() end, rates.target_of(nil, 0))
      if world:rank() == 0 then
        print(t.intra_host_latency > 0 and t.intra_host_bw > 1e4 and t.intra_host_bw < 1e9, t.rates.copy > 1e4, t.rates.products > 1e4)
      end]])
    local out, status = shell.run(("%s run -n 2 -t 1 %s"):format(shell.perilune, script))
    if status ~= 0 and out:find "need Open MPI" then return pending "Open MPI was not found" end
    assert.same({ "true\ttrue\ttrue\n", 0 }, { out, status })
  end)

  it("knows how many processors other programs had meanwhile", function()
    local function at(busy, idle) return { busy = busy, idle = idle } end
    -- 10 s of 2.5 processors, of which 4 s were ours
    assert.near(1.5, beside.processors_of_others(at(10, 5), at(20, 5), 4, 4), 1e-9)
    assert.equal(0, beside.processors_of_others(at(10, 5), at(20, 9), 4, 4)) -- a processor was idle: all had room
    assert.equal(0, beside.processors_of_others(at(10, 5), at(14, 5), 4, 4))
    assert.equal(0, beside.processors_of_others(nil, nil, 4, 4))
    local script = shell.write(folder .. "/beside.lua", [[
      print(require("perilune.calibration.beside").others_of_process(function() os.execute "sleep 0.4" end))]])
    local spin = shell.write(folder .. "/spin.sh", "while :; do :; done\n")
    local out = shell.run(('for i in $(seq $(nproc)); do sh %s & pids="$pids $!"; done; %s run %s; kill $pids'):format(
      spin, shell.perilune, script))
    assert.is_true(tonumber(out) > 0.5, out)
  end)

  it("sees before all the work whether ranks meet, and are as many on each host", function()
    local out, status = shell.run(shell.perilune .. " calibrate --only machine -n 2 --dry-run",
      { XDG_CACHE_HOME = folder })
    if status ~= 0 and out:find "need Open MPI" then return pending "Open MPI was not found" end
    assert.same({ "", 0 }, { out, status })
    local words = ("tests/net/nodes 2,1,1 %s calibrate --seconds 1 -n 4 -t 1"):format(shell.perilune)
    out, status = shell.run(words, { PERI_BUILD = shell.build, XDG_CACHE_HOME = folder })
    if status == 125 then return pending(out:match "nodes: [^\n]*") end
    assert.is_true(status ~= 0)
    assert.matches("calibrate: 4 ranks, 2 on one host and 1 on another, wanted as many on each", out, 1, true)
    assert.is_nil(out:find "in use", nil, out)
  end)

  it("takes the rate of copies where the price of a byte says nothing", function()
    local script = shell.write(folder .. "/rate.lua", [[local rate = require("perilune.calibration.machine").rate
      print(rate(0, 5e6), rate(1e-12, 5e6), rate(1e-7, 5e6))]])
    assert.equal("5000000\t5000000\t10000000\n", (shell.run(("%s run %s"):format(shell.perilune, script))))
  end)

  --- Prices of simulated timings, on a machine of caches of so many bytes: what script(machine, t, target, list, times)
  --- prints. times: of each probe as true prices have it, the bytes of rows in memory at `memory` GB/s, those in the
  --- caches for nothing.
  local function simulated(cache, words)
    local script = shell.write(folder .. "/simulated.lua", ([[
      local machine, rates = require "perilune.calibration.machine", require "perilune.calibration.rates"
      local plan, step = require "perilune.plan", require "perilune.plan.step"
      local cache, copy = %d, 5e6 -- bytes a millisecond
      local t = { world_size = 1, local_world_size = 1, rates = { copy = copy, products = 1e7 }, ddr_cap = 2 ^ 40, cache_bytes = cache,
        core_cache_bytes = 2 ^ 20 }
      local target = rates.target_of(nil, cache)
      local list = machine.counted(t, {}, target)
      local state = 1
      local function noise(share)
        state = (state * 16807) %% 2147483647
        return 1 + share * state / 2147483647
      end
      --- cold: milliseconds of a byte of a row from memory; share: of noise, which makes times longer
      local function times(cold, share)
        local out = {}
        for i, p in ipairs(list) do
          local amounts, ms = step.amounts(p.ranks, plan.Topology(t)), { ms = 0 }
          for _, way in ipairs { "forward", "backward" } do
            local sum = 0
            for unit, n in pairs(amounts[way]) do
              sum = sum + n * (unit == "cold_row_byte" and cold or unit == "cold_row" and 0 or step.usual[way][unit] or 0)
            end
            ms[way] = sum * noise(share)
            ms.ms = ms.ms + ms[way]
          end
          out[i] = ms
        end
        return out
      end
      %s]]):format(cache, words))
    return (shell.run(("%s run %s 2>&1"):format(shell.perilune, script)))
  end

  it("measures of memory what caches of any size do not hold", function()
    for _, cache in ipairs { 8e6, 32 * 2 ^ 20, 300e6, 1.2e9 } do
      assert.equal("ok\n", simulated(cache, [[
        assert(target.copied >= cache)
        local cold = 0
        for _, p in ipairs(list) do
          local least = (p.probe.tables or 8) * p.probe.rows * p.probe.dim * 4
          if least >= 48 * 2 ^ 20 then
            cold = cold + 1
            assert(least * target.cold >= 1.5 * math.max(cache, 1), p.probe.rows)
          end
        end
        assert(cold > 8)
        print "ok"]]), tostring(cache))
    end
  end)

  it("never gives a price of rows that memory cannot keep, however noisy the timings", function()
    for _, cache in ipairs { 32 * 2 ^ 20, 300e6 } do
      assert.equal("ok\n", simulated(cache, [[
        for _, share in ipairs { 0, 0.1, 0.5, 2 } do
          local found = machine.prices(t, times(1 / (2 * copy), share), target)
          for _, way in ipairs { "forward", "backward" } do
            local rate = 1 / found.costs[way].cold_row_byte
            assert(rate <= 3.001 * copy, rate)
            if share == 0 then assert(math.abs(rate / (2 * copy) - 1) < 0.2, rate) end
          end
        end
        print "ok"]]))
    end
  end)

  it("refuses timings of rows that came faster than memory gives them", function()
    local words = [[
      local tries, best, wrong = 0, machine.prices(t, all, target)
      print(pcall(machine.agreed, function() return best, wrong end, function() tries = tries + 1 end))
      assert(tries == 5, tries)]]
    for _, cache in ipairs { 32 * 2 ^ 20, 300e6 } do -- 203 GB/s where copies take 5
      local out = simulated(cache, "local all = times(1 / 203e6, 0)" .. words)
      assert.matches("^false.*calibrate: by these timings rows that no cache holds are %l+.- at [%d.e+]+ GB/s; copies "
        .. "take 5 GB/s, so memory cannot .*, also measured again: nothing is kept; measure again", out)
      out = simulated(cache, [[
        local all = times(1 / 203e6, 0)
        for i, p in ipairs(list) do all[i].backward = all[i].backward / 20 end]] .. words)
      assert.matches("^false.*calibrate: updates of %d+ ids of %d+ columns took .* ms, in which [%d.e+]+ GB/s of rows "
        .. "would have come that no cache holds; copies take 5 GB/s, so memory cannot, also measured again: nothing "
        .. "is kept; measure again", out)
    end
  end)

  it("measures again where copies were slow by chance", function()
    assert.equal("2\tok\n", simulated(32 * 2 ^ 20, [[
      local all, tries = times(1 / (2 * copy), 0), 0
      t.rates.copy = copy / 13
      local found = machine.agreed(function() return machine.prices(t, all, target) end, function(try)
        tries = tries + 1
        if try == 3 then t.rates.copy = copy end
      end)
      assert(math.abs(1 / found.costs.forward.cold_row_byte / (2 * copy) - 1) < 0.2)
      print(tries, "ok")]]))
  end)

  it("says what is wrong before anything is measured", function()
    local function refused(words, want, code)
      local began = os.time()
      local out, status = shell.run(("%s calibrate %s"):format(shell.perilune, words), { XDG_CACHE_HOME = folder })
      assert.equal(code, status, out)
      assert.matches(want, out)
      assert.is_nil(out:find "in use", nil, out) -- of the table of choices
      assert.is_true(os.time() - began < 10)
    end
    refused("-o /none/such.topology", "calibrate: %-%-output: /none/such.topology: No such file", 2)
    refused("-n 2 -o /none/such.topology", "calibrate: %-%-output: /none/such.topology: No such file", 2)
    refused("-o ''", "calibrate: %-%-output: the name of the file is empty", 2)
    refused("-o " .. folder, "calibrate: %-%-output: .*Is a directory", 2)
    refused("--only choices -o x", "%-%-output does not go with %-%-only choices", 2)
    refused("--only choices -n 2", "%-%-ranks does not go with %-%-only choices", 2)
    refused("--rounds 1e9", "%-%-rounds: 1e9, allowed: whole numbers 1%.%.1000", 2)
    refused("--seconds 1e9", "%-%-seconds: 1e9, allowed: whole numbers 1%.%.3600", 2)
    refused("-n 99999", "%-n 99999: ", 2)
    refused("-n 2 --dry-run --only choices", "does not go with", 2)
    local out, status = shell.run(shell.perilune .. " calibrate --only nothing", {})
    assert.equal(2, status)
    assert.matches("choices", out)
  end)
end)
