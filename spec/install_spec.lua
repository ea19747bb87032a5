-- `make install`: what a C program, plain luajit and the launcher find afterwards, and that `make uninstall` takes all
-- of it away.
-- deadline: 180 s
-- takes: 15 s
local shell = require "spec.support.shell"

describe("an installation", function()
  local root, clean, prefix
  setup(function()
    root, clean = shell.temporary()
    prefix = root .. "/opt/moon"
  end)
  teardown(function() clean() end)

  local function make(target)
    return shell.run(("make --no-print-directory %s DESTDIR=%s PREFIX=/opt/moon"):format(target, root))
  end

  local installed
  local function need()
    if shell.build ~= "build" then return "a sanitizer's library is for tests only" end
    if not installed then
      local out, status = make "install"
      assert.equal(0, status, out)
      installed = true
    end
  end

  local function pkg_config(words)
    local out = shell.run("pkg-config " .. words,
      { PKG_CONFIG_PATH = prefix .. "/lib/pkgconfig", PKG_CONFIG_SYSROOT_DIR = root })
    return (out:gsub("\n", " "))
  end

  local program = [[
    #include <perilune/perilune.h>
    #include <stdio.h>
    int main(void)
    {
        peri_device *cpu;
        peri_tensor *t;
        double x = 0;
        if (peri_device_get("cpu", &cpu) < 0 || peri_tensor_full(cpu, PERI_F32, 1, (int64_t[]){3}, 2.5, &t) < 0) return 1;
        if (peri_tensor_item(t, 2, &x) < 0) return 2;
        peri_tensor_release(t);
        printf("%s %g\n", peri_version(), x);
        return 0;
    }
  ]]

  it("has a library with a SONAME, and a pkg-config file that names no place of the build", function()
    if need() then return pending(need()) end
    assert.matches("libperilune%.so%.1%s",
      (shell.run(("objdump -p %s/lib/libperilune.so | grep SONAME"):format(prefix))))
    local pc = shell.read(prefix .. "/lib/pkgconfig/perilune.pc")
    assert.matches("prefix=/opt/moon\n", pc)
    local here = io.popen("pwd"):read "*l"
    assert.equal("", (shell.run(("grep -rlF %s/ %s --include=*.pc --include=*.lua --include=*.h"):format(here, root))))
    assert.matches("%-lperilune", pkg_config "--libs perilune")
    assert.matches("%-lxxhash", pkg_config "--static --libs perilune")
  end)

  it("serves a C program, shared and static", function()
    if need() then return pending(need()) end
    shell.write(root .. "/t.c", program)
    local flags = pkg_config "--cflags perilune"
    local out, status = shell.run(("${CC:-cc} -std=c11 -Wall -Werror -Wpedantic %s %s/t.c -o %s/shared %s"):format(
      flags, root, root, pkg_config "--libs perilune"))
    assert.equal(0, status, out)
    out = shell.run(root .. "/shared", { LD_LIBRARY_PATH = prefix .. "/lib" })
    assert.matches("^%d+%.%d+%.%d+ 2%.5\n$", out)
    out, status = shell.run(("${CC:-cc} -std=c11 %s %s/t.c -o %s/static %s/lib/libperilune.a %s"):format(flags, root,
      root, prefix, pkg_config("--static --libs perilune"):gsub("%-lperilune", "")))
    assert.equal(0, status, out)
    assert.matches(" 2%.5\n$", (shell.run(root .. "/static")))
    assert.not_matches("libperilune", (shell.run(("ldd %s/static"):format(root))))
  end)

  it("has headers that C++ reads", function()
    if need() then return pending(need()) end
    if not shell.has "c++" then return pending "there is no C++ compiler" end
    shell.write(root .. "/t.cc", "#include <perilune/perilune.h>\nint main() { return peri_abi_version() == 0; }\n")
    local out, status = shell.run(("c++ -Wall -Werror %s %s/t.cc -o %s/cxx %s"):format(pkg_config "--cflags perilune",
      root, root, pkg_config "--libs perilune"))
    assert.equal(0, status, out)
  end)

  --- An example host, as somebody who has the installation only would build it.
  local function host(name, compiler)
    local path = ("%s/%s-%s"):format(root, name, compiler:match "c%+%+" and "cxx" or "c")
    local out, status = shell.run(("%s -Wall -Wextra -Wpedantic -Werror %s %s/share/perilune/examples/hosts/%s.c -o "
      .. "%s %s"):format(compiler, pkg_config "--cflags perilune", prefix, name, path, pkg_config "--libs perilune"))
    assert.equal(0, status, out)
    return path
  end
  local compilers = { "${CC:-cc} -std=c11", "c++ -x c++ -std=c++17" }
  local function library() return { LD_LIBRARY_PATH = prefix .. "/lib" } end

  it("serves a host that looks rows up, in C11 and C++17", function()
    if need() then return pending(need()) end
    for _, compiler in ipairs(compilers) do
      if not compiler:match "^c%+%+" or shell.has "c++" then
        local lookup = host("lookup", compiler)
        -- Row r is r, r + 1/4, r + 1/2, r + 3/4: the sum of rows 3, 7 and 999, the mean of rows 2 and 5.
        local out, status = shell.run(lookup .. " 3 7 999", library())
        assert.equal("clicked: 1009 1009.75 1010.5 1011.25\ntags: 3.5 3.75 4 4.25\n", out)
        assert.equal(0, status)
        out, status = shell.run(lookup .. " 3 1000", library())
        assert.matches("table 'items', feature 'clicked', sample 0: id 1000 at place 1 of the bag, allowed: 0%.%.999",
          out)
        assert.equal(1, status)
        assert.equal(2, select(2, shell.run(lookup, library())))
        assert.equal(2, select(2, shell.run(lookup .. " 3x", library())))
      end
    end
  end)

  it("serves a host that answers with a model file, in C11 and C++17", function()
    if need() then return pending(need()) end
    local peri = require "perilune"
    local linear = peri.nn.Linear { in_features = 3, out_features = 1 }
    linear.weight:detach():copy(peri.tensor { { 1, 2, 3 } })
    linear.bias:detach():fill(0.5)
    linear:export(root .. "/linear.peri", { batches = { { x = peri.ones { 11, 3 } } }, call = function(m, b)
      return m(b.x)
    end })
    for _, compiler in ipairs(compilers) do
      if not compiler:match "^c%+%+" or shell.has "c++" then
        local serve = host("serve", compiler) .. " " .. root .. "/linear.peri"
        assert.equal("input x: 3 numbers\noutput logits: 1 numbers\n", (shell.run(serve, library())))
        assert.equal("logits: 14.5\n", (shell.run(serve .. " x=1,2,3", library())))
        local out, status = shell.run(serve .. " x=1,2,nan", library())
        assert.matches("input 'x', sample 0, number 2 is NaN", out)
        assert.equal(1, status)
        assert.equal(2, select(2, shell.run(serve .. " x=1,2", library())))
        assert.equal(1, select(2, shell.run(serve .. "x", library())))
      end
    end
  end)

  it("serves a host whose model is a script, and one whose threads run it over a shared table, in C11 and C++17",
    function()
    if need() then return pending(need()) end
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local script = prefix .. "/share/perilune/examples/hosts/score.lua"
    for _, compiler in ipairs(compilers) do
      if not compiler:match "^c%+%+" or shell.has "c++" then
        local run = host("lua", compiler) .. " "
        local out, status = shell.run(run .. script .. " 1,2,3 4,5,6", library())
        assert.equal("14.5\n32.5\na linear model, 4 parameters\n2 buffers are the program's again\n", out)
        assert.equal(0, status)
        out, status = shell.run(run
          .. shell.write(root .. "/bad.lua", "return { score = function(x) return x + nil end }") .. " 1,2,3",
          library())
        assert.matches("^lua: peri_lua_call: .*bad.lua:1%)\n$", out)
        assert.equal(1, status)
        assert.equal(2, select(2, shell.run(run .. script .. " 1,2", library())))
        out, status = shell.run(host("threads", compiler) .. " " .. script .. " 4", library())
        assert.equal("4 threads made 200 calls each, 0 numbers were wrong, 0 objects are left\n", out)
        assert.equal(0, status)
      end
    end
  end)

  it("serves a host that trains sharded tables on any number of ranks, in C11 and C++17", function()
    if need() then return pending(need()) end
    local first
    for _, compiler in ipairs(compilers) do
      if not compiler:match "^c%+%+" or shell.has "c++" then
        local train = host("train", compiler)
        local out, status = shell.run(train, library())
        assert.equal(0, status, out)
        local losses = {}
        for loss in out:gmatch "loss ([%d.]+)\n" do losses[#losses + 1] = tonumber(loss) end
        assert.equal(4, #losses)
        assert.is_true(losses[4] < 0.05 and losses[4] < losses[1]) -- a coin has log 2 = 0.693
        first = first or out
        assert.equal(first, out)
        -- how the host was compiled is of no matter to the transport: the first one's ranks
        local many = train:match "-c$" and shell.has "mpirun"
          and shell.exists(prefix .. "/lib/perilune/libperilune_mpi.so")
        for _, ranks in ipairs(many and { 2, 3 } or {}) do
          -- Without TCP, of which Open MPI 5 complains where a machine's own address leads through its loopback.
          out, status = shell.run(("mpirun --oversubscribe --allow-run-as-root --mca btl ^tcp -n %d %s"):format(ranks,
            train), library())
          assert.equal(0, status, out)
          assert.equal(first, out)
        end
      end
    end
  end)

  it("serves a host that saves and loads checkpoints, which Lua reads and writes too, on other numbers of ranks",
    function()
    if need() then return pending(need()) end
    local path, script = host("checkpoint", compilers[1]), shell.write(root .. "/model.lua", [[
      local peri = require "perilune"
      local Net = peri.nn.Module:extend "Net"
      function Net:init()
        self.ebc = peri.EmbeddingBagCollection { fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.5 }, tables = {
          peri.EmbeddingBagConfig { name = "t", num_embeddings = 100, embedding_dim = 8, feature_names = { "f" } } } }
        self.over = peri.nn.Linear { in_features = 8, out_features = 1, bias = false }
      end
      local model = Net()
      peri.checkpoint.load(arg[1], { model = model })
      for i = 1, 3 do
        local rows = model.ebc(peri.KeyedJaggedTensor { keys = { "f" }, values = { i, 7 }, lengths = { 2 } }):values()
        model.over(rows):mean():backward()
      end
      peri.checkpoint.save(arg[2], { model = model })
      print(model.ebc:fused_optimizer().param_groups[1].lr, model.over.weight:item(0))]])
    local ranks = shell.has "mpirun" and shell.exists(prefix .. "/lib/perilune/libperilune_mpi.so") and 2 or nil
    local function run(n, words)
      local before = n and ("mpirun --oversubscribe --allow-run-as-root -n %d "):format(n) or ""
      local out, status = shell.run(before .. path .. " " .. words, library())
      assert.equal(0, status, out)
    end
    run(ranks, "save " .. root .. "/c-1")
    -- docs/embedding_c.md, "From a training to answers"
    local page = shell.read "docs/embedding_c.md"
    shell.write(root .. "/over.lua", page:match "```lua\n(.-)```")
    local out, status = shell.run(("%s export %s/c-1 --model %s/over.lua -o %s/over.peri"):format(shell.perilune, root,
      root, root))
    assert.equal(0, status, out)
    shell.write(root .. "/rank.c", page:match "```c\n(.-)```")
    out, status = shell.run(("%s -Wall -Wextra -Werror %s %s/rank.c -o %s/rank %s -lpthread"):format(compilers[1],
      pkg_config "--cflags perilune", root, root, pkg_config "--libs perilune"))
    assert.equal(0, status, out)
    local answers = shell.run(("%s/rank %s/over.peri"):format(root, root), library())
    local rows = require("perilune").checkpoint.open(root .. "/c-1"):read "model/ebc.embedding_bags.t.weight"
    for t = 0, 3 do -- the layer's weights are 0.5
      local own, other = rows[t]:sum():item() / 2, rows[t + 10]:sum():item() / 2
      local first, second = answers:match(("%d: (%%S+) (%%S+)\n"):format(t))
      assert.near(own + other, tonumber(first), 1e-4)
      assert.near(own, tonumber(second), 1e-4)
    end
    assert.equal("0.1\t0.5\n", (shell.run(("%s run %s %s/c-1 %s/lua-1"):format(shell.perilune, script, root, root))))
    shell.run(("cp -r %s/lua-1 %s/lua-2"):format(root, root))
    run(ranks and 3, "load " .. root .. "/lua-2") -- and saves it again
    assert.not_matches("elements differ", -- where generators of Lua are C does not save
      (shell.run(("%s checkpoint diff %s/lua-1 %s/lua-2"):format(shell.perilune, root, root))))
  end)

  it("has documents and examples, which run from there", function()
    if need() then return pending(need()) end
    local function there(path) assert.is_true(shell.exists(prefix .. "/share/" .. path), path) end
    there "doc/perilune/README.md"
    there "doc/perilune/LICENSE"
    for path in shell.run("find docs -type f; ls kernels/*.h"):gmatch "[^\n]+" do there("doc/perilune/" .. path) end
    for path in shell.run("find examples -type f"):gmatch "[^\n]+" do there("perilune/" .. path) end
    local links, dead = 0, {} -- links of documents lead to what is installed
    for page in shell.run(("cd %s/share/doc/perilune && find . -name '*.md'"):format(prefix)):gmatch "[^\n]+" do
      local text = shell.read(("%s/share/doc/perilune/%s"):format(prefix, page)):gsub("\n```.-\n```", "")
      for target in text:gmatch "%]%(([^)#%s]+)" do
        local path = ("%s/share/doc/perilune/%s/%s"):format(prefix, page:match "^(.*)/", target)
        links = links + 1
        if not (target:match "^https?:" or shell.exists(path)) then dead[#dead + 1] = page .. ": " .. target end
      end
    end
    assert.same({}, dead)
    assert.is_true(links > 500)
    if shell.no_launcher() then return end
    local out, status = shell.run(("cd %s && bin/perilune run share/perilune/examples/dlrm.lua --help"):format(prefix))
    assert.equal(0, status, out)
    assert.matches("Usage: examples/dlrm.lua", out)
  end)

  it("serves plain luajit from any folder", function()
    if need() then return pending(need()) end
    local path = ("%s/share/lua/5.1/?.lua;%s/share/lua/5.1/?/init.lua"):format(prefix, prefix)
    local out, status = shell.run("cd / && luajit -e 'print(require(\"perilune\").tensor({1, 2, 3}):to_list()[3])'",
      { LUA_PATH = path })
    assert.equal("3\n", out)
    assert.equal(0, status)
  end)

  it("has a launcher that runs by itself", function()
    if need() then return pending(need()) end
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    shell.write(root .. "/s.lua", "print(require('perilune').tensor({1, 2, 3}):to_list()[3])")
    assert.equal("3\n", (shell.run(("cd / && %s/bin/perilune run %s/s.lua"):format(prefix, root))))
  end)

  it("finds its plugins", function()
    if need() then return pending(need()) end
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    if not shell.exists(prefix .. "/lib/perilune/libperilune_mpi.so") then return pending "Open MPI was not found" end
    local text = "local peri = require 'perilune' peri.init() print(peri.world_size())"
    shell.write(root .. "/world.lua", text)
    assert.equal("2\n2\n", (shell.run(("cd / && %s/bin/perilune run -n 2 %s/world.lua"):format(prefix, root))))
    assert.matches("mpi +usable", (shell.run(("cd / && %s/bin/perilune info"):format(prefix))))
    local path = ("%s/share/lua/5.1/?.lua;%s/share/lua/5.1/?/init.lua"):format(prefix, prefix)
    local out = shell.run(("cd / && luajit -e 'print(require(\"perilune\").dist.probe \"mpi\")'"), { LUA_PATH = path })
    assert.equal("true\n", out)
  end)

  it("writes whole places into its pkg-config file, however they were given", function()
    if shell.build ~= "build" then return pending "a sanitizer's library is for tests only" end
    local own, clean_own = shell.temporary()
    local here = shell.run "pwd":match "^[^\n]*"
    local function prefix_of(word)
      local out, status = shell.run(("make --no-print-directory install DESTDIR=%s PREFIX='%s'"):format(own, word),
        { HOME = "/opt/luna" })
      assert.equal(0, status, out)
      local path = shell.run(("find %s -name perilune.pc"):format(own)):match "^[^\n]*"
      local text = shell.read(path)
      os.execute(("rm -rf %s/*"):format(own))
      return text:match "prefix=([^\n]*)", text:match "libdir=([^\n]*)"
    end
    assert.same({ "/opt/luna/moon", "/opt/luna/moon/lib" }, { prefix_of "~/moon" })
    assert.same({ here .. "/build/moon", here .. "/build/moon/lib" }, { prefix_of "build/./moon" })
    local out, status = shell.run "make install PREFIX='/opt/two words'"
    assert.not_equal(0, status)
    assert.matches("PREFIX=/opt/two words: one folder, without spaces", out)
    clean_own()
  end)

  it("says that there is no launcher where it could not be built", function()
    if shell.build ~= "build" then return pending "a sanitizer's library is for tests only" end
    local own, clean_own = shell.temporary()
    shell.write(own .. "/config.mk",
      (shell.read("build/config.mk"):gsub("HAVE_ARGPARSE := [^\n]*", "HAVE_ARGPARSE :=")))
    local out = shell.run(("make -n install DESTDIR=%s CONFIG=%s/config.mk"):format(own, own))
    assert.matches("without the launcher, `perilune`: lua%-argparse was not found%. Run: make setup install", out)
    clean_own()
  end)

  it("goes away without a trace", function()
    if shell.build ~= "build" then return pending "a sanitizer's library is for tests only" end
    local own, clean_own = shell.temporary()
    local words = (" DESTDIR=%s PREFIX=/opt/moon"):format(own)
    local out, status = shell.run("make --no-print-directory install" .. words)
    assert.equal(0, status, out)
    assert.not_equal("", (shell.run(("find %s -type f"):format(own))))
    out, status = shell.run("make --no-print-directory install" .. words) -- what the first one made is still known
    assert.equal(0, status, out)
    os.execute(("mkdir %s/opt/moon/lib/others"):format(own)) -- somebody else's
    out, status = shell.run("make --no-print-directory uninstall" .. words)
    assert.equal(0, status, out)
    assert.equal(own .. "/opt/moon/lib/others\n", (shell.run(("find %s -type f -o -type l -o -empty"):format(own))))
    clean_own()
    own, clean_own = shell.temporary()
    words = (" DESTDIR=%s PREFIX=/opt/moon"):format(own)
    shell.run("make --no-print-directory install" .. words)
    shell.run("make --no-print-directory uninstall" .. words)
    assert.equal(own .. "\n", (shell.run("find " .. own)))
    clean_own()
  end)
end)
