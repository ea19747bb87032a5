-- Being asked to stop, by a signal or by the script: all ranks stop after the same step, on_stop is called once on
-- each, and whoever does not stop is ended when the grace time is over. (mpirun: none: it starts its own)
-- deadline: 240 s
-- takes: 22 s, mostly waits
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"

local Net = peri.nn.Module:extend "Net"
function Net:init()
  self.ebc = peri.EmbeddingBagCollection { tables = {
    peri.EmbeddingBagConfig { name = "t", num_embeddings = 100, embedding_dim = 8, feature_names = { "f" } } },
    fused_params = { optimizer = "sgd", learning_rate = 0.1 } }
end
function Net:forward(batch) return peri.nn.global_mean(self.ebc(batch):values():sum()) end

local function batch() return peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 60, 99 }, lengths = { 2, 1 } } end

describe("a rank that is asked to stop", function()
  it("trains its own share of every step, also of the last one", function()
    for asked = 0, 2 do
      local given = sim.run(3, function(rank)
        local model = peri.DistributedModelParallel { module = Net(), plan = { ebc = { t = peri.plan.row_wise() } } }
        local pipeline, loaded, steps = peri.TrainPipelineSparseDist { model = model, optimizer = false }, 0, 0
        peri.on_stop()
        for _ in pipeline:run(function() loaded = loaded + 1 return batch() end) do
          steps = steps + 1
          if steps == 4 and rank == asked then peri.request_stop() end
        end
        assert.equal(steps, loaded) -- an empty batch would stand for one that this rank has not loaded
        return steps
      end)
      assert.same({ given[1], given[1], given[1] }, given)
      assert.is_true(given[1] < 12)
    end
  end)

  for _, class in ipairs { "TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSemiSync" } do
    it("stops all of them after the same step, with every batch that was loaded trained: " .. class, function()
      for n = 1, 3 do
        for odd = 0, n - 1 do
          local results = sim.run(n, function(rank)
            local model = peri.DistributedModelParallel { module = Net(),
              plan = { ebc = { t = peri.plan.row_wise() } } }
            local pipeline = peri.pipeline[class] { model = model, optimizer = false }
            local told, given, steps, runs = {}, 0, 0, 0
            peri.on_stop(function(reason, left) told[#told + 1] = { "first", reason, left, steps } end)
            peri.on_stop(function() told[#told + 1] = "second" end)
            assert.is_nil(peri.stopped())
            for _ = 1, 3 do
              runs = runs + 1
              local k = 0
              for _ in pipeline:run(function()
                k = k + 1
                if k > 20 then return nil end
                given = given + 1
                if rank == odd and given == 5 then peri.request_stop() end
                return batch()
              end) do steps = steps + 1 end
            end
            assert.equal("script", (peri.stopped()))
            assert.same({ { "first", "script", math.huge, steps }, "second" }, told)
            assert.equal(3, runs)
            assert.equal(given, steps)
            return steps
          end)
          for rank = 1, n do assert.equal(results[1], results[rank]) end
          assert.is_true(results[1] >= 5 and results[1] < 12, results[1])
        end
      end
    end)
  end

  it("ends a group of micro-batches, as the run that never stops does", function()
    for n = 1, 2 do
      sim.run(n, function(rank)
        local model = peri.DistributedModelParallel { module = Net(), plan = { ebc = { t = peri.plan.row_wise() } } }
        local pipeline = peri.pipeline.Pipeline { model = model, optimizer = false,
          schedule = peri.pipeline.schedules.accumulate(5) }
        local steps = 0
        peri.on_stop()
        for _ in pipeline:run(batch) do
          steps = steps + 1
          if steps == 6 and rank == n - 1 then peri.request_stop() end
        end
        assert.equal(10, steps)
      end)
    end
  end)

  it("stops loops of one's own too, after the same step", function()
    for n = 1, 3 do
      local results = sim.run(n, function(rank)
        local told = 0
        peri.on_stop(function() told = told + 1 end)
        for step = 1, 20 do
          if rank == n - 1 and step == 7 then peri.request_stop() end
          local reason = peri.stopping()
          if reason then
            assert.equal("script", reason)
            assert.equal(1, told)
            assert.equal("script", (peri.stopping()))
            return step
          end
        end
      end)
      for rank = 1, n do assert.equal(n == 1 and 7 or 8, results[rank]) end
    end
  end)

  it("may be asked for where on_stop or stopping was called before", function()
    sim.run(1, function()
      assert.error_matches(peri.request_stop, "request_stop: peri.on_stop%(f%) or peri.stopping%(%) goes before it")
      assert.error_matches(function() peri.on_stop(7) end, "on_stop: 7, wanted a function")
      assert.is_nil(peri.stopped())
      assert.is_nil(peri.stopping())
      peri.request_stop()
      assert.equal("script", (peri.stopping()))
    end)
  end)
end)

describe("a signal", function()
  if shell.no_launcher() then return it("is sent", function() pending(shell.no_launcher()) end) end
  local folder, clean = shell.temporary()
  teardown(clean)
  local script = shell.write(folder .. "/script.lua", [[
    local ffi = require "ffi"
    ffi.cdef "int usleep(unsigned); int kill(int, int); int getpid(void); int getppid(void);"
    local peri = require "perilune"
    local how, who, signal, again = arg[1], arg[2], tonumber(arg[3]), tonumber(arg[4])
    local rank = tonumber(os.getenv "OMPI_COMM_WORLD_RANK" or 0)
    if os.getenv "OMPI_COMM_WORLD_RANK" then peri.init() end
    io.stdout:setvbuf "line"
    peri.on_stop(function(reason, left)
      for _ = 1, how == "hangs" and 2000 or 0 do ffi.C.usleep(10000) end
      print("told", rank, reason, left > 0 and left <= 25)
    end)
    local function send(number)
      if who == "launcher" then ffi.C.kill(tonumber(io.open("LAUNCHER"):read "*a"), number) end
      if who == tostring(rank) then ffi.C.kill(ffi.C.getpid(), number) end
    end
    for step = 1, 400 do
      ffi.C.usleep(step < 20 and 20000 or 10000)
      if step == 20 and (rank == 0 or who ~= "launcher") then send(signal) end
      if again and step == 80 then send(again) end
      if how ~= "ignores" and peri.stopping() then break end
    end
    print("out", rank)]])

  --- Output and exit code. The script finds the launcher's process in a file.
  local function run(words, arguments)
    return shell.run(("cd %s; echo $$ >LAUNCHER; exec env --default-signal=INT %s run %s %s %s"):format(folder,
      (shell.run("pwd"):match "^[^\n]*") .. "/" .. shell.perilune, words, script, arguments))
  end
  local function count(out, pattern) return select(2, out:gsub(pattern, "")) end
  local mpirun = shell.has "mpirun"

  for name, number in peri.util.ordered { SIGTERM = 15, SIGINT = 2 } do
    it(name .. " to a script on its own is one that it can heed", function()
      local out, status = run("", ("heeds launcher %d"):format(number))
      assert.equal(75, status, out)
      assert.equal(1, count(out, "told\t0\t" .. name .. "\ttrue\nout\t0\n"), out)
      assert.matches("stopped after a step, as it was asked to %(" .. name .. "%)", out)
    end)

    it(name .. " to the launcher reaches all ranks", function()
      if not mpirun then return pending "Open MPI was not found" end
      local out, status = run("-n 2", ("heeds launcher %d"):format(number))
      assert.equal(75, status, out)
      for rank = 0, 1 do assert.equal(1, count(out, ("told\t%d\t%s\ttrue\n"):format(rank, name)), out) end
      assert.equal(2, count(out, "out\t%d\n"), out)
    end)
  end

  it("to one rank stops all", function()
    if not mpirun then return pending "Open MPI was not found" end
    local out, status = run("-n 3", "heeds 1 15")
    assert.equal(75, status, out)
    for rank = 0, 2 do assert.equal(1, count(out, ("told\t%d\tSIGTERM\ttrue\n"):format(rank)), out) end
  end)

  it("that warns is one where it was asked for", function()
    local out, status = run("--stop-on SIGUSR1", "heeds launcher 10")
    assert.equal(75, status, out)
    assert.matches("told\t0\tSIGUSR1\ttrue", out)
    if not mpirun then return end
    out, status = run("-n 2 --stop-on SIGUSR2", "heeds launcher 12")
    assert.equal(75, status, out)
    assert.equal(2, count(out, "told\t%d\t"), out)
  end)

  it("ends the script when the grace time is over", function()
    for _, how in ipairs { "hangs", "ignores" } do
      local out, status = run("--grace 0.5s", how .. " launcher 15")
      assert.equal(143, status, out)
      assert.matches("has not stopped within its grace time %(%-%-grace%)", out)
      if mpirun then
        out, status = run("-n 2 --grace 0.5s", how .. " launcher 15")
        assert.equal(143, status, out)
        assert.matches("the script has not stopped within 0.5 s %(%-%-grace%): it is ended", out)
      end
      assert.not_matches("told", out)
    end
  end)

  it("that is a Ctrl-C ends it at once when it was asked before, by whichever signal", function()
    for _, signals in ipairs { "2 2", "15 2" } do
      for _, options in ipairs { "", mpirun and "-n 2" or nil } do
        local out, status = run(options, "ignores launcher " .. signals)
        assert.equal(130, status, out)
        assert.not_matches("out\t", out)
      end
    end
  end)

  it("to a script that has not called on_stop ends it, as ever", function()
    local path = shell.write(folder .. "/plain.lua", "require 'perilune' os.execute 'kill -15 $PPID; sleep 5'")
    local out, status = shell.run(("%s run %s"):format(shell.perilune, path))
    assert.equal(143, status, out)
  end)

  it("is heard by no script that plain luajit runs, and on_stop says so once", function()
    local out = shell.luajit [[
      local peri = require "perilune"
      peri.on_stop(function(reason) print("stopped by " .. reason) end)
      peri.on_stop()
      peri.request_stop()
      print(peri.stopping())]]
    assert.matches("^perilune: on_stop: no signal is heard, as `perilune run` has not started this script[^\n]*\n"
      .. "stopped by script\nscript\t", out)
  end)

  it("and its options are checked", function()
    for words, text in peri.util.ordered { ["--grace soon"] = "%-%-grace: 'soon', allowed: times above 0 such as 25s",
      ["--grace 0s"] = "%-%-grace: '0s'", ["--stop-on TERM"] = "%-%-stop%-on: 'TERM', allowed: SIGUSR1, SIGUSR2" } do
      local out, status = shell.run(("%s run %s script.lua"):format(shell.perilune, words))
      assert.is_true(status ~= 0)
      assert.matches(text, out)
    end
  end)
end)
