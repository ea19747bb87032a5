-- kernels/cuda and the device backend of CUDA, on a pretended GPU (tests/cuda_host): how devices are found, named and
-- shared among ranks. What they compute: make check-cuda, and the programs of tests/kernels.
-- takes: 20 s, mostly waits

local shell = require "spec.support.shell"
local build = os.getenv "PERI_BUILD" or "build"
local here = io.popen("pwd"):read "*l"
local folder = ("%s/%s/cuda_host"):format(here, build)

--- What a script prints with the pretended GPUs; `env`: more variables.
local function run(env, script)
  local path = os.tmpname()
  local file = assert(io.open(path, "w"))
  file:write(script)
  file:close()
  local pipe = assert(io.popen(("PERI_PLUGIN_PATH=%s LUA_PATH='%s' %s luajit %s 2>&1"):format(folder, package.path, env,
    path)))
  local text = pipe:read "*a"
  pipe:close()
  os.remove(path)
  return text
end

describe("GPUs", function()
  local there = io.open(folder .. "/libperilune_cuda_host.so")
  if there then there:close() end
  local function test(title, body)
    it(title, function()
      if not there then return pending "no C++ compiler was found" end
      body()
    end)
  end

  test("are taken in turn by the ranks of a machine that name none", function()
    local script = 'local peri = require "perilune"; io.write(peri.full({ 1 }, 3, "f32", "cuda_host"):device())'
    for rank = 0, 4 do
      assert.equal("cuda_host:" .. rank % 3, run(("PERI_CUDA_HOST_GPUS=3 SLURM_LOCALID=%d"):format(rank), script))
    end
    assert.equal("cuda_host:0", run("", script))
  end)

  test("are one device, by number or without", function()
    assert.equal("cuda_host:1 cuda_host:1 7 7", run("PERI_CUDA_HOST_GPUS=2 LOCAL_RANK=1", [[
      local peri = require "perilune"
      local a, b = peri.full({ 2 }, 3, "f32", "cuda_host:1"), peri.full({ 2 }, 4, "f32", "cuda_host")
      io.write(a:device(), " ", b:device(), " ", table.concat((a + b):to_list(), " "))]]))
  end)

  test("are the default device when PERI_DEVICE says so", function()
    assert.equal("cuda_host:0 cpu", run("PERI_DEVICE=cuda_host", [[
      local peri = require "perilune"
      io.write(peri.ones { 2 }:device(), " ", peri.ones({ 2 }, "f32", "cpu"):device())]]))
    assert.matches("device 'smoke'", run("PERI_DEVICE=smoke", 'require("perilune").ones { 2 }'))
  end)

  test("that are not there are refused with the reason", function()
    local script = 'print(pcall(require("perilune").ones, { 1 }, "f32", arg and "cuda_host:2"))'
    assert.matches("device 2, allowed: 0 to 1", run("PERI_CUDA_HOST_GPUS=2", script))
    assert.matches("the driver sees no GPU", run("PERI_CUDA_HOST_GPUS=0", script) .. "")
    assert.matches("the driver serves CUDA", run("PERI_CUDA_HOST_GPUS=-1", script))
    for _, text in ipairs { "x", "2x", "-2", "65", "" } do
      assert.matches(("PERI_CUDA_HOST_GPUS is '%s', allowed: 0 to 64 GPUs, or %%-1"):format(text:gsub("%p", "%%%0")),
        run(("PERI_CUDA_HOST_GPUS='%s'"):format(text), script))
    end
    assert.matches("PERI_CUDA_HOST_SEED is 'y', allowed: 0 to", run("PERI_CUDA_HOST_SEED=y", script))
  end)

  -- What the program around does between two calls: another current device, an error that nobody took.
  local meddling = [[
    local peri, ffi = require "perilune", require "ffi"
    ffi.cdef "void peri_cuda_host_meddle(int); void peri_cuda_host_fail_sizes(int); void *peri_cuda_host_pinned(size_t);"
    local x = peri.full({ 1 }, 1, "f32", "cuda_host:1") -- loads the plugin
    local gpu = ffi.load(FOLDER .. "/libperilune_cuda_host.so")]]
  meddling = meddling:gsub("FOLDER", ("%q"):format(folder))

  test("work right whatever device the program around chose, and whatever error it left", function()
    assert.equal("3 9 9 9 0.5 0.5 0.5 1 2 7", run("PERI_CUDA_HOST_GPUS=3", meddling .. [[

      local results = {}
      for i, device in ipairs { "cuda_host:1", "cuda_host:2", "cuda_host" } do
        local function meddle(x) gpu.peri_cuda_host_meddle((i + 1) % 3) return x end
        meddle()
        local stream = peri.stream.Stream(device)
        meddle()
        local a = meddle(peri.full({ 3 }, 4, "f32", device))
        local b = meddle(meddle(peri.tensor({ 5, 5, 5 }, "f32", device)) + a)
        local ids = meddle(peri.tensor({ 7, 1, 7, 2 }, "i64", device))
        local unique = { meddle(peri.sparse.unique(ids)) } -- sorts: scratch
        local event = meddle(stream:record_event())
        meddle(peri.stream.current(device):wait_event(event))
        meddle(stream:synchronize())
        results[i] = ("%d %s %s %s"):format(b:numel(), table.concat(b:to_list(), " "), table.concat((a / 8):to_list(), " "),
          table.concat(unique[1]:to_list(), " "))
      end
      assert(results[1] == results[2] and results[2] == results[3])
      io.write(results[1])]]))
  end)

  test("say what a size of scratch failed for", function()
    assert.matches("cuda_host:1: unique: cudaErrorInvalidDevice", run("PERI_CUDA_HOST_GPUS=2", meddling .. [[

      local ids = peri.tensor({ 7, 1, 7, 2 }, "i64", "cuda_host:1")
      gpu.peri_cuda_host_fail_sizes(1)
      print(pcall(peri.sparse.unique, ids))]]))
  end)

  test("have read page-locked memory of the program around when a copy from it returns", function()
    assert.equal("right", run("PERI_CUDA_HOST_GPUS=2", meddling .. [[

      local n = 3 * 2 ^ 20 + 5 -- more than the backend's own page-locked memory holds at once
      local source = ffi.cast("float *", gpu.peri_cuda_host_pinned(4 * n))
      for round = 1, 3 do
        for i = 0, n - 1 do source[i] = i % 1024 + round end
        local there = peri.Tensor.from_memory(source, { n }, "f32", "cuda_host:1")
        for i = 0, n - 1 do source[i] = -1 end
        local data = there:read()
        for i = 0, n - 1 do if data[i] ~= i % 1024 + round then error(("element %d is %g"):format(i, data[i])) end end
      end
      io.write "right"]]))
  end)

  test("are used with queues for all streams, unless the user wants another number", function()
    local script = [[
      require("perilune").ones({ 1 }, "f32", "cuda_host")
      io.write(os.getenv "CUDA_DEVICE_MAX_CONNECTIONS")]]
    assert.equal("32", run("env -u CUDA_DEVICE_MAX_CONNECTIONS", script))
    assert.equal("8", run("CUDA_DEVICE_MAX_CONNECTIONS=8", script))
  end)

  test("give memory back to others that they keep for later", function()
    assert.equal("false true", run("", ([[
      local peri, ffi = require "perilune", require "ffi"
      ffi.cdef "bool peri_cuda_host_other_fits(size_t);"
      peri.empty({ 6e8 }, "f32", "cuda_host"):release() -- 2.4 of 3.2 GB
      local gpu = ffi.load(%q)
      peri.stream.current("cuda_host"):synchronize()
      io.write(tostring(gpu.peri_cuda_host_other_fits(2e9)), " ")
      peri.stream.empty_cache "cuda_host"
      io.write(tostring(gpu.peri_cuda_host_other_fits(2e9)))]]):format(folder .. "/libperilune_cuda_host.so")))
  end)

  test("are listed", function()
    local text = run("PERI_CUDA_HOST_GPUS=2", [[
      local peri, ffi = require "perilune", require "ffi"
      local text = ffi.new "char[512]"
      print(peri.ffi.C.peri_device_probe("cuda_host", text, 512), ffi.string(text))]])
    assert.matches("true\t0: pretended GPU, 3 GiB, compute capability 9.0; 1: pretended GPU", text)
  end)

  test("are in `perilune info` when PERI_DEVICE names them, with the device that it stands for", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local function info(device, gpus)
      local out, status = shell.run(shell.perilune .. " info", { PERI_DEVICE = device, PERI_CUDA_HOST_GPUS = gpus,
        PERI_PLUGIN_PATH = folder })
      assert.equal(0, status, out)
      return out:match "\ndevices\n(.-)\ntransports\n"
    end
    local text = info("cuda_host:1", 2)
    assert.matches("\n  cuda_host +usable: 0: pretended GPU, 3 GiB, [^\n]*; 1: pretended GPU", text)
    assert.matches("\n  default +cuda_host:1 %(PERI_DEVICE%)", text)
    assert.matches("\n  default +'cuda_host:1', not usable: cuda_host: device 1, allowed: 0 to 0",
      info("cuda_host:1", 1))
    assert.matches("\n  smoke +not usable: .*no libperilune_smoke.so", info("smoke", 1))
    local _, opaque = info("opaque", 1):gsub("opaque +usable", "") -- once
    assert.equal(1, opaque)
    assert.matches("\n  default +cpu %(PERI_DEVICE%)", info(nil, 1))
  end)

  test("that have too little memory for a table or a batch name it, and what would take less", function()
    local text = run("PERI_DEVICE=cuda_host", [[
      local peri = require "perilune"
      local function tables(more)
        local args = { tables = { { name = "small", rows = 10, cols = 64 }, { name = "users", rows = 8e6, cols = 64 } },
          fused_params = { optimizer = "adagrad" }, features = { "id" }, seed = 1 }
        for k, v in pairs(more or {}) do args[k] = v end
        return peri.embed.tbe.new(args)
      end
      print(pcall(tables)) -- 2 GB, and as much again of the optimizer's
      print(pcall(tables, { data_type = "INT8", fused_params = { optimizer = "none" }, tables = { { name = "codes", rows = 2 ^ 26,
        cols = 64 } } }))
      local b = tables { tables = { { name = "users", rows = 4, cols = 256 } } }
      local room = peri.empty({ 802e6 }, "f32") -- all but 13 MB
      local list = b:blocks { { table = 1, feature = 1, first_bag = 0, bags = 2e4, out_offset = 0, out_stride = 256 } }
      local ids, offsets = peri.zeros({ 1 }, "i64"), peri.zeros({ 2e4 + 1 }, "i64")
      print(pcall(b.lookup, b, ids, offsets, list, 2e4, 256)) -- 20 MB of rows
      room:release()
      print(b:lookup(ids, offsets, list, 2e4, 256):size(1))]])
    local short = "cuda_host:0: no memory for %d+ bytes %(%d+ of 3221225472 are free%)"
    local out = "compute_kernel fused_uvm has rows in the host's memory, fused_uvm_caching too, with a cache of them "
      .. "on the device"
    assert.matches("table 'users' of 8000000 x 64 takes 4096 MB with its states, the largest of 2, which take 4096 "
      .. "MB: " .. short .. "; " .. out, text)
    assert.matches("table 'codes' of 67108864 x 64 takes 4832 MB with its states: " .. short
      .. "; compute_kernel quant_uvm has rows in the host's memory", text)
    assert.matches("a batch of 1 ids, table 'users', feature 'id': " .. short .. "; the tables take 0 MB of it: "
      .. out, text)
    assert.matches("\n20000\n$", text)
  end)

  --- What rank 0 of two says of its transports after it has made a sum, of tensors of cuda_host. `join`: how it joins
  --- the world.
  local function chosen(title, env, join, wanted)
    test(title, function()
      if not shell.has "mpirun" then return pending "mpirun was not found" end
      if shell.no_launcher() then return pending(shell.no_launcher()) end
      local path, clean = shell.temporary()
      shell.write(path .. "/sum.lua", ([[
        local peri = require "perilune"
        %s
        local world = peri.world()
        local sum = world:all_reduce(peri.full({ 2 }, 3, "f32", "cuda_host")):wait():to_list()[1]
        local by = world:transport_of "cuda_host"
        if peri.rank() == 0 then io.write("sum ", sum, " by ", by, "; ", world:transports(), "\n") end
        peri.finish()]]):format(join))
      local all = { PERI_CUDA_HOST_GPUS = 2, PERI_PLUGIN_PATH = folder .. ":" .. here .. "/" .. build,
        PERI_LOG = "error" }
      for name, value in pairs(env) do all[name] = value end
      local out, status = shell.run(("%s run -n 2 %s/sum.lua"):format(shell.perilune, path), all)
      clean()
      assert.equal(0, status, out)
      assert.matches(wanted, out)
    end)
  end

  local by_nccl = "sum 6 by nccl; mpi, and nccl for tensors of cuda_host: each of the 2 ranks has a GPU of its own"
  chosen("exchange by NCCL where each rank has its own, which is its default device", { PERI_DEVICE = "cuda_host" },
    "peri.init()", by_nccl)
  chosen("exchange by NCCL where peri.init names them", {}, 'peri.init { device = "cuda_host" }', by_nccl)
  chosen("exchange by NCCL where a model is made for them", {}, [[
    peri.init()
    peri.DistributedModelParallel { device = "cuda_host", plan = {},
      module = peri.nn.Linear { in_features = 2, out_features = 2, device = "cuda_host" } }]], by_nccl)
  chosen("exchange through the host's memory where ranks share one, and say so",
    { PERI_DEVICE = "cuda_host", PERI_CUDA_HOST_GPUS = 1 }, "peri.init()",
    "sum 6 by mpi; mpi, also for tensors of cuda_host, through the host's memory: ranks 0 and 1 share a GPU "
      .. "%(0000:00:00.0%), and nccl wants one for each rank")
  chosen("exchange through the host's memory where nobody names them", {}, "peri.init()", "sum 6 by mpi; mpi\n")
  chosen("exchange as asked for", {}, 'peri.init { device_transport = "nccl", device = "cuda_host" }',
    "sum 6 by nccl; mpi, and nccl for tensors of cuda_host, as was asked for")

  chosen("launch in one order on all ranks, whatever the order in which these get there", { PERI_FAKE_NCCL_SERIAL = 1 }, [[
    local world = peri.init { device = "cuda_host", timeout = 20 }
    local exchange = peri.dist.KJTAllToAll(world, { 1, 1 })
    for round = 1, 12 do
      local kjt = peri.KeyedJaggedTensor { keys = { "a", "b" }, lengths = peri.tensor({ 1, 2 }, "i32", "cuda_host"),
        values = peri.tensor({ 5, 6, 7 }, "i64", "cuda_host"), stride = 1 }
      local first = peri.rank() == round % 2 -- its ids set out before its sum: when the sizes are there
      local ids = exchange(kjt)
      if first then ids = ids:wait() end
      local sum = world:all_reduce(peri.full({ 3 }, round, "f32", "cuda_host")):wait()
      if not first then ids = ids:wait() end
      ids:wait()
      assert(sum:to_list()[1] == 2 * round)
    end]], by_nccl)

  --- Two ranks, each of which makes three sums by NCCL, as a test; body(out, status) of what they print.
  local function summing(title, env, body)
    test(title, function()
      if not shell.has "mpirun" then return pending "mpirun was not found" end
      if shell.no_launcher() then return pending(shell.no_launcher()) end
      local path, clean = shell.temporary()
      shell.write(path .. "/sum.lua", [[
        local peri = require "perilune"
        peri.init { transport = "mpi", device_transport = "nccl", device = "cuda_host" }
        for i = 1, 3 do
          peri.world():all_reduce(peri.full({ 2 }, 1, "f32", "cuda_host")):wait()
          if i == 1 and peri.rank() == 0 then os.execute "ls -d /dev/shm/perilune-nccl-$PPID-*" end
        end
        io.write("all ", peri.world_size(), "\n")]])
      local all = { PERI_CUDA_HOST_GPUS = 2, PERI_PLUGIN_PATH = folder .. ":" .. here .. "/" .. build,
        LD_LIBRARY_PATH = folder }
      for name, value in pairs(env) do all[name] = value end
      local out, status = shell.run(("%s run -n 2 %s/sum.lua"):format(shell.perilune, path), all)
      clean()
      body(out, status)
    end)
  end

  summing("end an operation that NCCL reports an error of while it runs, on all ranks, with NCCL's words",
    { PERI_FAKE_NCCL = "fail:2", PERI_FAKE_NCCL_RANK = 1 }, function(out, status)
    assert.equal(1, status, out)
    -- Which rank speaks first is mpirun's choice, and where it hears of the error: at its next operation, or at its
    -- end.
    -- Where both hear of it at the same operation, their errors are one line.
    assert.matches("%[ranks? [01][-01]*%][^\n]*rank [^\n]*of 2 in group 'world', operation [123]: all_reduce sum f32 "
      .. "%[2%][^\n]*rank 1: ncclCommGetAsyncError: internal error", out)
    assert.not_matches("no end after", out)
  end)

  summing("that ranks share are refused by NCCL, with the way out", { PERI_CUDA_HOST_GPUS = 1 }, function(out, status)
    assert.equal(1, status, out)
    assert.matches(".-CommInitRankConfig: invalid usage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA "
      .. "device 0; NCCL wants a GPU for each rank: start no more ranks on a machine than it has GPUs, or leave "
      .. "device_transport out", out)
  end)

  -- any order: each by itself
  for text, said in pairs { nonsense = "PERI_FAKE_NCCL is 'nonsense', allowed: delay:N, fail:N, die:N",
    ["die:0"] = "PERI_FAKE_NCCL is 'die:0'", ["fail:2x"] = "PERI_FAKE_NCCL is 'fail:2x'" } do
    summing("are not run with a fault that there is not: " .. text, { PERI_FAKE_NCCL = text }, function(out, status)
      assert.equal(1, status, out)
      assert.matches("invalid argument: " .. said, out)
    end)
  end

  -- Kernels that are loaded now, the end of a stream, page-locked memory: the driver may wait for all that runs. In any
  -- order: each by itself.
  for what, call in pairs { kernel = 'peri.sparse.unique(peri.tensor({ 7, 1, 7 }, "i64", "cuda_host"))',
    stream = 'peri.stream.current("cuda_host"):synchronize()', memory = 'large:pin_memory "cuda_host"' } do
    test("do not keep a rank in the driver when another one has died: " .. what, function()
      if not shell.has "mpirun" then return pending "mpirun was not found" end
      local path, clean = shell.temporary()
      shell.write(path .. "/late.lua", [[
        local peri = require "perilune"
        local world = peri.init { device = "cuda_host", timeout = 60 }
        local x, large = peri.full({ 2 }, 1, "f32", "cuda_host"), peri.ones({ 4e6 }, "f32", "cpu")
        assert(world:all_reduce(x):wait():to_list()[1] == 2)
        if peri.rank() == 1 then os.execute "kill -9 $PPID" end
        world:all_reduce(x):wait() -- is queued, and never ends
        local ok, err = pcall(function()
          ]] .. call .. [[

          return x:to_list()
        end)
        print(ok, err)
        os.exit(3, true)]])
      local out = shell.run(("timeout -k 3 50 %s --enable-recovery -n 2 luajit %s/late.lua"):format(shell.mpirun, path),
        { PERI_CUDA_HOST_GPUS = 2, PERI_CUDA_HOST_LAZY = 1, PERI_PLUGIN_PATH = folder .. ":" .. here .. "/" .. build,
          LUA_PATH = package.path, PERI_LIBRARY = ("%s/%s/libperilune.so"):format(here, build) })
      clean()
      assert.matches("false\t[^\n]*operation 2: all_reduce sum f32 %[2%][^\n]*: rank 1 %(process %d+%) is gone", out)
    end)
  end

  --- Nothing is left in memory of the folder in which the ranks met.
  local function gone(out)
    local where = out:match "/dev/shm/perilune%-nccl[%w-]+"
    assert.is_truthy(where, out)
    for _ = 1, 100 do
      local left = io.open(where .. "/lock")
      if not left then return end
      left:close()
      os.execute "sleep 0.1"
    end
    error(where .. " is left")
  end
  summing("leave nothing of NCCL behind at their end", {}, function(out, status)
    assert.equal(0, status, out)
    local _, ranks = out:gsub("all 2\n", "") -- lines of two processes come in any order
    assert.equal(2, ranks, out)
    gone(out)
  end)
  summing("leave nothing of NCCL behind when they are killed", { PERI_FAKE_NCCL = "die:2" }, function(out, status)
    assert.not_equal(0, status, out)
    assert.matches("SIGKILL", out)
    gone(out)
  end)
end)
