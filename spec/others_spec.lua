-- Other users of the machine, and programs that have other rights than whoever starts them: they neither end a job nor
-- choose what is loaded or written. (mpirun: none: it starts its own)
-- deadline: 120 s
local shell = require "spec.support.shell"

local root = shell.run("id -u"):match "^0"
local folder, clean = shell.temporary()
teardown(clean)
local here = shell.run("pwd"):match "^[^\n]*"
local build = here .. "/" .. shell.build

--- Words that run a command as the user nobody.
local nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups "

local function why_not()
  if not root then return "another user can be played by root only" end
  if not shell.has "setpriv" then return "setpriv was not found" end
  return shell.no_launcher() or (not shell.has "mpirun" and "Open MPI was not found" or nil)
end

describe("another user who knows the job's name", function()
  -- binds the names by which ranks see each other, for a second
  local squatter = [[
    local ffi = require "ffi"
    ffi.cdef "int socket(int, int, int); int bind(int, const void *, unsigned); int listen(int, int); unsigned sleep(unsigned);"
    for i = 2, #arg do
      for kind = 1, 2 do
        local text = ("perilune/0/%%s/%%s"):format(arg[1]:sub(1, 60), arg[i])
        local address = ffi.new("char[110]")
        ffi.cast("unsigned short *", address)[0] = 1
        ffi.copy(address + 3, text, #text)
        local fd = ffi.C.socket(1, kind, 0)
        if ffi.C.bind(fd, address, 3 + #text) == 0 and kind == 1 then ffi.C.listen(fd, 10) end
      end
    end
    ffi.C.sleep(1)]]

  it("takes the name of a rank first, and goes: the job goes on", function()
    if why_not() then return pending(why_not()) end
    local path = shell.write(folder .. "/squatter.lua", (squatter:gsub("%%%%", "%%")))
    os.execute(("chmod 755 %s; chmod 644 %s"):format(folder, path))
    local script = shell.write(folder .. "/script.lua", ([[
      local rank, job = os.getenv "PMIX_RANK", os.getenv "PMIX_NAMESPACE"
      if rank == "1" then
        os.execute("%s luajit %s " .. job .. " 0/1 &")
        os.execute "sleep 2.5"
      else
        os.execute "sleep 0.3"
      end
      local peri = require "perilune"
      peri.init { timeout = 30 }
      print("sum", peri.world():all_reduce(peri.ones { 1 }):wait():item())]]):format(nobody, path))
    local out, status = shell.run(("%s run -n 2 %s"):format(shell.perilune, script))
    assert.equal(0, status, out)
    assert.equal(2, select(2, out:gsub("sum\t2\n", "")), out)
  end)
end)

describe("a run on one machine", function()
  it("listens to nobody else: no port of a rank or of mpirun is open on other addresses than the loopback's", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    if not shell.has "mpirun" then return pending "Open MPI was not found" end
    if shell.sanitizer ~= "" then return pending "sanitizers come first among the libraries" end
    -- sockets that listen, of processes of this job: by /proc
    local script = shell.write(folder .. "/ports.lua", [[
      local peri = require "perilune"
      peri.init()
      local world = peri.world()
      world:all_reduce(peri.ones { 100000 }):wait()
      if peri.rank() == 0 then
        local listening = {}
        for _, kind in ipairs { "tcp", "tcp6", "udp", "udp6" } do
          for line in io.lines("/proc/net/" .. kind) do
            local address, state, inode = line:match "^%s*%d+: (%x+):%x+ %x+:%x+ (%x%x) %S+ %S+ %S+ +%d+ +%d+ (%d+)"
            if state == "0A" or state == "07" then listening["socket:[" .. inode .. "]"] = address end
          end
        end
        local job = os.getenv "PMIX_NAMESPACE"
        local parents = io.popen "p=$PPID; while [ $p -gt 1 ]; do echo $p; p=$(sed 's/.*) . //; s/ .*//' /proc/$p/stat); done"
        local own, n, launchers = {}, 0, {}
        for pid in parents:lines() do own[pid] = true end
        for pid in io.popen("grep -lsz PMIX_NAMESPACE=" .. job .. " /proc/[0-9]*/environ"):lines() do own[pid:match "%d+"] = true end
        for pid in pairs(own) do
          local name = (io.open("/proc/" .. pid .. "/comm") or { read = function() return "" end }):read "*l"
          if name:match "perilune" or name:match "mpirun" or name:match "prterun" then
            for link in io.popen("readlink /proc/" .. pid .. "/fd/* 2>/dev/null"):lines() do
              local address = listening[link]
              n = n + (address and 1 or 0)
              if address and address ~= "0100007F" and address ~= "00000000000000000000000001000000" then print("open", name, address) end
            end
          end
        end
        print("seen", n > 0)
      end
      world:barrier():wait()]])
    local out, status = shell.run(("%s run -n 2 %s"):format(shell.perilune, script))
    assert.equal(0, status, out)
    assert.equal("seen\ttrue\n", out)
  end)

  it("leaves nothing behind, and ranks inherit nothing of it", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    if not shell.has "mpirun" then return pending "Open MPI was not found" end
    local script = shell.write(folder .. "/env.lua", [[
      local peri = require "perilune"
      peri.init()
      print(os.getenv "LD_PRELOAD")
      peri.world():barrier():wait()]])
    local out, status = shell.run(("mkdir -p %s/tmp; TMPDIR=%s/tmp %s run -n 2 %s; ls -A %s/tmp"):format(folder, folder,
      shell.perilune, script, folder))
    assert.equal(0, status, out)
    assert.equal("nil\nnil\n", out)
  end)
end)

describe("peri_file_write", function()
  local peri = require "perilune"
  local C = peri.ffi.C
  local function write(path) return C.peri_file_write(path, "new", 3, false) end
  local shared = folder .. "/shared"
  setup(function() os.execute(("mkdir %s && chmod 1777 %s"):format(shared, shared)) end)

  it("follows a link of this user, which stays", function()
    shell.write(folder .. "/there", "old")
    os.execute(("ln -s ../there %s/own && ln -s own %s/second"):format(shared, shared))
    assert.equal(0, write(shared .. "/second"))
    assert.equal("new", shell.read(folder .. "/there"))
    assert.equal(0, os.execute(("test -h %s/own -a -h %s/second"):format(shared, shared)))
  end)

  it("refuses a file without a name, as do its two halves", function()
    local fresh = require "ffi".new("char[?]", C.PERI_PATH_MOST)
    for name, status in pairs { peri_file_write = write "", peri_file_begin = C.peri_file_begin("", fresh),
      peri_file_end = C.peri_file_end("", "") } do
      assert.equal(C.PERI_EINVAL, status, name)
    end
    assert.matches("the name of the file is empty", require("ffi").string(C.peri_error_message()))
  end)

  it("refuses another user's link in a folder in which everybody may make files", function()
    if not root then return pending "another user can be played by root only" end
    shell.write(folder .. "/mine", "old")
    os.execute(("ln -s %s/mine %s/planted && chown -h 65534 %s/planted"):format(folder, shared, shared))
    assert.is_true(write(shared .. "/planted") < 0)
    assert.matches("planted: a link of another user's", require("ffi").string(C.peri_error_message()), 1, true)
    assert.equal("old", shell.read(folder .. "/mine"))
  end)

  it("takes no rights from another user's file that let others write, or that make it a program of this user's",
    function()
    if not root then return pending "another user can be played by root only" end
    for mode, after in pairs { ["4777"] = "755", ["2666"] = "644", ["600"] = "600" } do
      local path = ("%s/given%s"):format(shared, mode)
      shell.write(path, "old")
      os.execute(("chown 65534 %s && chmod %s %s"):format(path, mode, path))
      assert.equal(0, write(path))
      assert.equal(after .. " 0\n", (shell.run(("stat -c '%%a %%u' %s"):format(path))))
    end
    local own = shared .. "/mode"
    shell.write(own, "old")
    os.execute("chmod 666 " .. own)
    assert.equal(0, write(own))
    assert.equal("666\n", (shell.run("stat -c %a " .. own)))
  end)

  it("tables in files open no row file that another user has put into a folder of all", function()
    if not root then return pending "another user can be played by root only" end
    local function open()
      local e = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 8,
        embedding_dim = 4, feature_names = { "f" } } }, fused_params = { optimizer = "sgd", learning_rate = 1,
        cache_params = { directory = shared .. "/rows" } } }
      e:materialise()
      e:flush()
    end
    os.execute(("mkdir %s/rows && chmod 1777 %s/rows"):format(shared, shared))
    open()
    local file = shell.run(("ls %s/rows/*.peri"):format(shared)):match "[^\n]+"
    collectgarbage()
    collectgarbage()
    open() -- its own
    collectgarbage()
    collectgarbage()
    os.execute("chown 65534 " .. file)
    assert.error_matches(open, "is another user's, in a folder in which everybody may make files: it is not opened")
    os.execute(("mv %s %s/kept.peri && ln -s %s/kept.peri %s && chown -h 65534 %s"):format(file, folder, folder, file,
      file))
    os.execute(("chown 0 %s/kept.peri"):format(folder))
    assert.error_matches(open, "is another user's")
  end)

  it("data is written into no folder and through no link that another user has put there", function()
    if not root then return pending "another user can be played by root only" end
    shell.write(folder .. "/mine", "old")
    local function link(name)
      os.execute(("ln -s %s/mine %s/%s && chown -h 65534 %s/%s"):format(folder, shared, name, shared, name))
    end
    os.execute(("mkdir %s/set.part && chown 65534 %s/set.part"):format(shared, shared))
    link "set.part/labels.npy"
    link "train.txt"
    assert.error_matches(function() peri.data.synthetic.write { path = shared .. "/train.txt", num_rows = 3 } end,
      "train.txt: Permission denied")
    local out = require "ffi".new "peri_columns_writer *[1]"
    assert.is_true(C.peri_columns_writer_new(shared .. "/set", 1, 1, false, out) < 0)
    assert.matches("/set.part' is another user's, in a folder in which everybody may make files",
      require("ffi").string(C.peri_error_message()), 1, true)
    assert.equal("old", shell.read(folder .. "/mine"))
  end)

  it("goes through no file whose name can be guessed", function()
    local ffi = require "ffi"
    ffi.cdef "int getpid(void);"
    shell.write(folder .. "/victim", "old")
    os.execute(("ln -s %s/victim %s/out.%d"):format(folder, shared, ffi.C.getpid()))
    assert.equal(0, write(shared .. "/out"))
    assert.equal("new", shell.read(shared .. "/out"))
    assert.equal("old", shell.read(folder .. "/victim"))
  end)

  it("writes into devices and pipes", function()
    assert.equal(0, write "/dev/null")
    local out = shell.luajit [[
      local C = require("perilune").ffi.C
      assert(C.peri_file_write("/dev/stdout", "through a link to a pipe", 24, false) == 0)]]
    assert.equal("through a link to a pipe", out)
  end)
end)

describe("a program that has other rights than its caller (AT_SECURE)", function()
  local program = folder .. "/program"
  local function why_not_secure()
    if not root then return "a program with other rights can be made by root only" end
    if shell.sanitizer ~= "" then return "sanitizers choose libraries by the environment" end
  end

  setup(function()
    if why_not_secure() then return end
    local cc = os.getenv "CC" or "cc"
    shell.write(folder .. "/evil.c", [[
      #include <stdio.h>
      __attribute__((constructor)) static void run(void) { puts("loaded"); }]])
    shell.write(folder .. "/program.c", [[
      #include <perilune/perilune.h>
      #include <stdio.h>
      int main(void)
      {
          char why[512];
          peri_device_probe("evil", why, sizeof why);
          printf("threads %d\nfile '%s'\n", peri_threads() == 7, peri_tune_path());
          peri_device *cpu; /* libraries that multiply matrices */
          peri_tensor *a, *product;
          int64_t sizes[2] = {64, 64};
          peri_device_get("cpu", &cpu), peri_tensor_new(cpu, PERI_F32, 2, sizes, &a), peri_tensor_fill(a, 1);
          printf("product %d\n", peri_op_matmul(a, a, &product));
          if (!peri_comm_probe("mpi", why, sizeof why)) puts(why);
          else { /* MPI's libraries load what HOME and variables name */
              peri_comm_config config = {sizeof config, "mpi"};
              peri_group *world;
              printf("world %d\n", peri_comm_open(&config, &world));
          }
          return 0;
      }]])
    local out, status = shell.run(("cd %s && %s -shared -fPIC evil.c -o libperilune_evil.so && "
      .. "%s -I%s/runtime/include program.c -o program %s/libperilune.so -Wl,-rpath,%s"):format(folder, cc, cc, here,
      build, build))
    assert.equal(0, status, out)
  end)

  local evil = folder .. "/libperilune_evil.so"
  local env = { PERI_PLUGIN_PATH = folder, XDG_CACHE_HOME = folder .. "/cache", PERI_NUM_THREADS = "7" }
  local of_libraries = { INTEL_JIT_PROFILER64 = evil, OMPI_MCA_mca_base_component_path = folder }

  it("is not told by the environment what to load, where to write, how to run", function()
    if why_not_secure() then return pending(why_not_secure()) end
    os.execute(("cp %s %s/mca_btl_evil.so"):format(evil, folder))
    assert.matches("loaded\nthreads 1\nfile '" .. folder .. "/cache/", (shell.run(program, env)), 1, false)
    assert.matches("loaded\n", (shell.run(program, of_libraries)), 1, true)
    os.execute(("chgrp 65534 %s && chmod g+s %s"):format(program, program))
    local pattern = "^threads 0\nfile ''\nproduct 0\n[^\n]* loads no plugins: [^\n]*\n$"
    assert.matches(pattern, (shell.run(program, env)))
    assert.matches(pattern, (shell.run(program, of_libraries)))
  end)

  it("which is the launcher, neither", function()
    if why_not_secure() or shell.no_launcher() then return pending(why_not_secure() or shell.no_launcher()) end
    local launcher = folder .. "/launcher"
    local script = shell.write(folder .. "/env.lua",
      "print(os.getenv 'HOME', (package.path:find('evil', 1, true)), pcall(require, 'evil'))")
    shell.write(folder .. "/evil.lua", "print 'loaded'")
    local paths = { LUA_PATH = folder .. "/?.lua", PERI_LUA_PATH = folder .. "/evil" }
    os.execute(("cp %s %s && chgrp 65534 %s"):format(shell.perilune, launcher, launcher))
    assert.matches("loaded\n/", (shell.run(launcher .. " run " .. script, paths)))
    os.execute("chmod g+s " .. launcher)
    local out = shell.run(launcher .. " run " .. script, paths)
    assert.matches("^nil\tnil\tfalse", out)
    assert.not_matches("loaded\n", out)
    local free = here .. "/" .. shell.perilune
    assert.matches("loaded\n/", (shell.run("cd " .. folder .. " && " .. free .. " run " .. script)))
    out = shell.run("cd " .. folder .. " && " .. launcher .. " run " .. script) -- a folder of the caller's
    assert.matches("^nil\tnil\tfalse", out)
    assert.not_matches("loaded\n", out)
    -- nor which programs it runs
    local events = shell.write(folder .. "/events.lua",
      ("require('perilune').nn.metrics.SummaryWriter { folder = '%s/a/b' } print 'made'"):format(folder))
    shell.write(folder .. "/mkdir", "#!/bin/sh\necho loaded")
    os.execute(("chmod a+x %s/mkdir && cp %s/mkdir %s/mpirun"):format(folder, folder, folder))
    local before = { PATH = folder .. ":" .. os.getenv "PATH" }
    assert.equal("made\n", (shell.run(launcher .. " run " .. events, before)))
    assert.not_matches("loaded\n", (shell.run(launcher .. " info; " .. launcher .. " run -n 2 " .. events, before)))
  end)
end)
