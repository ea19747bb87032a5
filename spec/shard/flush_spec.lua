-- A flush is one event of a model: all its files, of all collections, table batches and ranks, carry its number, and
-- only files of one flush open together. Kills at any moment leave files that open as one flush, or are refused by all
-- ranks.
-- deadline: 240 s
-- mpirun: 3
local peri = require "perilune"
local collective_utils = require "perilune.dist.collective_utils"
local flushes = require "spec.support.flushes"
local shell = require "spec.support.shell"
local sim = require "perilune.dist.sim"
local tier = require "spec.support.tier"
local worlds = require "spec.support.worlds"
local plan = peri.plan
local C, check = peri.ffi.C, peri.ffi.check

--- What `f` returns on rank 0, on all ranks.
local function once(world, f, ...) return collective_utils.invoke_on_rank_and_broadcast_result(world, 0, f, ...) end

--- Fails on this rank, and with the same error on all.
local function refused(world, name, patterns, f, ...)
  local ok, err = pcall(f, ...)
  assert.is_false(ok)
  assert.equal(name, err.name, tostring(err))
  for _, pattern in ipairs(patterns) do
    assert.truthy(err.message:find(pattern), ("'%s' in: %s"):format(pattern, err.message))
  end
  assert.equal(once(world, function() return err.message end), err.message)
end

local function read_all(folder)
  local copies = {}
  for _, path in ipairs(tier.files(folder)) do copies[path] = tier.read_file(path) end
  return copies
end
local function write_all(copies)
  for path, bytes in pairs(copies) do tier.write_file(path, bytes) end
  return true
end

describe("flushes over ranks:", function()
  setup(function() C.peri_log_level_set(C.PERI_LOG_ERROR) end)
  teardown(function() C.peri_log_level_set(C.PERI_LOG_WARN) end)
  local agree = peri.shard._files.agree
  after_each(function() peri.shard._files.agree = agree end)

  --- Train some steps and flush; returns the files' bytes.
  local function flushed(world, folder, first, last)
    local model = flushes.model(world, folder)
    flushes.train(model, first, last)
    model:flush()
    local weights = flushes.weights(model)
    flushes.release(model)
    world:barrier():wait()
    return once(world, read_all, folder), weights
  end

  worlds.each("files of different flushes are refused by all ranks, whichever it is", function(world, _, n)
    local folder = once(world, tier.folder)
    local old = flushed(world, folder, 1, 11)
    local new, weights = flushed(world, folder, 12, 21)
    for _, path in ipairs(peri.util.keys(new)) do
      once(world, write_all, { [path] = old[path] })
      refused(world, "EMISMATCH", { "row files '.*%.peri' .*'.*%.peri'", "flush 1, iteration 11",
        "flush 2, iteration 21", "must be of the same flush" }, flushes.model, world, folder)
      once(world, os.remove, path)
      refused(world, "EMISMATCH", { "row files '.*%.peri' .*'.*%.peri'", "flush 0", "flush 2, iteration 21" },
        flushes.model, world, folder)
      once(world, write_all, { [path] = "" })
      refused(world, "EFORMAT", { path:match "[^/]*$":gsub("%p", "%%%0") .. "': 0 bytes" }, flushes.model, world,
        folder)
      once(world, write_all, new)
    end
    local model = flushes.model(world, folder)
    assert.equal(21, flushes.iteration(model))
    assert.same(weights, flushes.weights(model))
    flushes.release(model)
    world:barrier():wait()
    once(world, tier.remove, folder)
    assert.equal(3 * n, #peri.util.keys(new))
  end, { sizes = { 1, 2, 3 }, devices = { "cpu" } })

  worlds.each("files of each rank's own folder are compared too, also with those of shards that moved", function(world)
    local folder = once(world, tier.folder)
    local function own(rank) return folder .. "/" .. rank end
    os.execute("mkdir -p " .. own(world:rank()))
    local function placed(rank)
      return function(_, options) return plan.table_wise(rank, options) end
    end
    local model = flushes.model(world, own, placed(0))
    flushes.train(model, 1, 4)
    model:flush()
    flushes.release(model)
    refused(world, "EMISMATCH", { "flush 1, iteration 4", "never flushed", "rank 0", "rank 1" }, flushes.model, world,
      own, placed(1))
    refused(world, "EMISMATCH", { "rank 0: .*table '%w+'", "rows 0%.%.24 of columns 0%.%.8",
      "go on with what wrote them" }, flushes.model, world, own)
    model = flushes.model(world, own, placed(0))
    assert.equal(world:rank() == 0 and 4 or nil, flushes.iteration(model))
    flushes.release(model)
    world:barrier():wait()
    once(world, tier.remove, folder)
  end, { sizes = { 2, 3 }, devices = { "cpu" } })

  worlds.each("whoever does not ask when files are opened is told with the first batch", function(world)
    local folder = once(world, tier.folder)
    local function own(rank) return folder .. "/" .. rank end
    os.execute("mkdir -p " .. own(world:rank()))
    local model = flushes.model(world, own)
    flushes.train(model, 1, 2)
    model:flush()
    flushes.release(model)
    world:barrier():wait()
    once(world, function() tier.remove(own(1) .. "/*") end)
    peri.shard._files.agree = function() end -- a host in C that makes its modules alone
    model = flushes.model(world, own)
    local ok, err = pcall(flushes.step, model, 3)
    flushes.release(model)
    assert.is_false(ok)
    assert.truthy(tostring(err):find "the row files of rank %d were of another flush", tostring(err))
    os.execute("rm -rf " .. folder)
  end, { sizes = { 2 }, devices = { "cpu" }, only = "sim" })

  worlds.each("a rank whose disk fails fails the flush on all ranks, and the next flush heals", function(world, _, n)
    local folder = once(world, tier.folder)
    local model = flushes.model(world, folder)
    flushes.train(model, 1, 3)
    model:flush()
    flushes.train(model, 4, 6)
    world:barrier():wait()
    if world:rank() == n - 1 then check(C.peri_fault_arm("row_write", 1)) end
    refused(world, "EIO", { "DistributedModelParallel:flush: rank %d: row file '.*': writing %d+ bytes at byte %d+: "
      .. "No space left" }, model.flush, model)
    check(C.peri_fault_arm("row_write", 0))
    model:flush()
    local weights = flushes.weights(model)
    flushes.release(model)
    world:barrier():wait()
    model = flushes.model(world, folder)
    assert.equal(6, flushes.iteration(model))
    assert.same(weights, flushes.weights(model))
    flushes.release(model)
    world:barrier():wait()
    once(world, tier.remove, folder)
  end, { sizes = { 1, 2 }, devices = { "cpu" } })

  if worlds.mpirun then return end

  it("files of another number of ranks or another plan are refused, and named", function()
    local folder = tier.folder()
    local function train(n)
      sim.run(n, function(_, world) flushed(world, folder, 1, 2) end)
    end
    local function other(n, patterns, entry)
      local before = read_all(folder)
      sim.run(n, function(_, world) refused(world, "EMISMATCH", patterns, flushes.model, world, folder, entry) end)
      assert.same(before, read_all(folder))
    end
    train(2)
    other(3, { "rank 0: row files in '.*': table '%w+'", "wanted are rows 0%.%.8 of",
      "lie shards of another plan, number of ranks", "rows 0%.%.12 of columns 0%.%.8" })
    other(1, { "wanted are rows 0%.%.24 of", "rows 0%.%.12 of columns 0%.%.8", "rows 12%.%.24 of columns 0%.%.8" })
    other(2, { "rows 0%.%.12 of columns 0%.%.8", "rows 12%.%.24 of columns 0%.%.8" }, function(_, options)
      return plan.table_wise(0, options)
    end)
    other(2, { "wanted are rows 0%.%.24 of columns 0%.%.4" }, function(_, options)
      options.ranks = { 0, 1 }
      options.sizes = { 4, 4 }
      return plan.column_wise(options)
    end)
    tier.remove(folder)
  end)

  --- Open what a kill has left, on n ranks of a sim world: it is one flush, with the weights of that iteration, or all
  --- ranks refuse it.
  local function judge(n, folder, counts)
    sim.run(n, function(_, world)
      local ok, model = pcall(flushes.model, world, folder)
      counts[ok and "opened" or model.name] = (counts[ok and "opened" or model.name] or 0) + 1
      if not ok then
        assert.truthy(model.name == "EMISMATCH" or model.name == "EFORMAT", tostring(model))
        assert.truthy(model.message:find "must be of the same flush" or model.message:find "was not flushed",
          model.message)
        assert.equal(once(world, function() return model.message end), model.message)
        return
      end
      local iteration = flushes.iteration(model)
      assert.equal(once(world, function() return iteration end), iteration)
      assert.is_true(iteration >= 3)
      local weights = flushes.weights(model)
      flushes.release(model)
      world:barrier():wait()
      local fresh = tier.folder()
      local plain = flushes.model(world, function() return fresh end)
      flushes.train(plain, 1, iteration)
      assert.same(flushes.weights(plain), weights)
      flushes.release(plain)
      tier.remove(fresh)
    end)
  end

  --- Start `command`, wait until rank `rank` has flushed three times, and kill it `delay` seconds later.
  local function strike(command, folder, rank, delay)
    local ready = ("%s/ready-%d"):format(folder, rank)
    os.execute(([[rm -rf %s/* ; %s >%s/log 2>&1 & child=$!
      for i in $(seq 600); do test -s %s && break; sleep 0.02; done
      sleep %.3f; kill -9 $(cat %s); wait $child 2>/dev/null]]):format(folder, command, folder, ready, delay, ready))
    assert.is_true(os.execute("test -s " .. ready) == 0, shell.read(folder .. "/log"))
  end

  local function luajit()
    local words = { "env" }
    for name, value in pairs(shell.luajit_env()) do
      if value ~= "" then words[#words + 1] = ("%s='%s'"):format(name, value) end
    end
    return table.concat(words, " ") .. " "
  end

  it("kills of all ranks at any moment leave one flush, or files that are refused [sim]", function()
    local folder, counts = tier.folder(), {}
    for k = 1, 6 do
      strike(luajit() .. ("luajit spec/support/flushes.lua %s 2"):format(folder), folder, 0, k * 0.013)
      judge(2, folder, counts)
    end
    tier.remove(folder)
    assert.equal(12, (counts.opened or 0) + (counts.EMISMATCH or 0) + (counts.EFORMAT or 0))
  end)

  it("kills of one rank at any moment leave one flush, or files that are refused [mpirun]", function()
    if not shell.has "mpirun" then return pending "mpirun was not found" end
    local folder, counts = tier.folder(), {}
    for k = 1, 2 do
      strike(("env -u LD_PRELOAD %s run -n 2 spec/support/flushes.lua %s 0"):format(shell.perilune, folder), folder,
        k % 2, k * 0.031)
      judge(2, folder, counts)
    end
    tier.remove(folder)
    assert.equal(4, (counts.opened or 0) + (counts.EMISMATCH or 0) + (counts.EFORMAT or 0))
  end)
end)
