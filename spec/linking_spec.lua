-- Every way in which a host can link the library, as an outsider would with the installed pkg-config file: shared,
-- static, fully static, loaded late by a program that knows nothing of it, twice in one process; and a program that was
-- built when this version came out.
-- deadline: 300 s
-- takes: 15 s
local shell = require "spec.support.shell"

describe("linking", function()
  local root, clean, prefix
  setup(function()
    root, clean = shell.temporary()
    prefix = root .. "/opt/moon"
    if shell.build ~= "build" then return end
    local out, status = shell.run(("make --no-print-directory install DESTDIR=%s PREFIX=/opt/moon"):format(root))
    assert.equal(0, status, out)
  end)
  teardown(function() clean() end)

  local function need() return shell.build ~= "build" and "a sanitizer's library is for tests only" end
  local function flags(words)
    return (shell.run(("pkg-config %s perilune"):format(words), { PKG_CONFIG_PATH = prefix .. "/lib/pkgconfig",
      PKG_CONFIG_SYSROOT_DIR = root }):gsub("\n", " "))
  end
  --- Compile `source` of tests/linking to `name`; the words that come after it are for the linker.
  local function compile(source, name, before, after)
    local out, status = shell.run(("${CC:-cc} -std=c11 -O1 -Wall -Wextra -Werror -D_GNU_SOURCE %s %s "
      .. "tests/linking/%s.c -o %s/%s %s")
      :format(before, flags "--cflags", source, root, name, after or ""))
    assert.equal(0, status, out)
    return ("%s/%s"):format(root, name)
  end
  local function static()
    return (flags "--static --libs":gsub("%-lperilune", "-Wl,-Bstatic -lperilune -Wl,-Bdynamic"))
  end
  local shared_library = function() return { LD_LIBRARY_PATH = prefix .. "/lib" } end
  local function runs(command, want)
    local out, status = shell.run(command, shared_library())
    assert.matches(want or "^ok", out)
    assert.equal(0, status, out)
  end

  local function mpirun(n)
    return ("mpirun --oversubscribe --allow-run-as-root --mca btl ^tcp -n %d "):format(n)
  end

  it("goes shared, and static with the rest dynamic", function()
    if need() then return pending(need()) end
    runs(compile("use", "shared", "-DPROGRAM", flags "--libs"), "^ok %d+%.%d+%.%d+, 0 objects\n$")
    local path = compile("use", "static", "-DPROGRAM", static())
    assert.not_matches("libperilune", (shell.run("ldd " .. path)))
    runs(path)
    -- Lua looks for all functions, of which a linker takes those that the program calls.
    if shell.no_launcher() then return end
    local out, status = shell.run(("${CC:-cc} examples/hosts/threads.c -rdynamic %s %s -lpthread -o %s/part")
      :format(flags "--cflags", static(), root))
    assert.equal(0, status, out)
    out = shell.run(root .. "/part examples/hosts/score.lua 1", { PERI_PLUGIN_PATH = prefix .. "/lib/perilune" })
    assert.matches("this program holds the library and does not export all of its functions.*whole%-archive", out)
  end)

  it("goes fully static, with the OpenBLAS that the program was linked with", function()
    if need() then return pending(need()) end
    if shell.run "${CC:-cc} -print-file-name=libopenblas.a" == "libopenblas.a\n" then
      return pending "there is no libopenblas.a"
    end
    local path = compile("use", "whole", "-DPROGRAM -static", "-u cblas_sgemm -u cblas_dgemm "
      .. flags "--static --libs"
      .. "-lopenblas -lpthread -lm 2>/dev/null")
    assert.matches("not a dynamic executable", (shell.run("ldd " .. path)))
    runs(path)
  end)

  it("goes into plugins that are loaded late, used by threads and closed a hundred times before these end", function()
    if need() then return pending(need()) end
    local load = compile("load", "load", "", "-ldl -lpthread")
    local shared = compile("use", "shared.so", "-shared -fPIC", flags "--libs")
    local own = "-Wl,--exclude-libs,libperilune.a " .. static()
    local first, second = compile("use", "first.so", "-shared -fPIC", own),
      compile("use", "second.so", "-shared -fPIC", own)
    runs(("%s 100 %s"):format(load, shared), "^ok, no mapping is left\n$")
    runs(("%s 10 %s %s"):format(load, first, second), "^ok, no mapping is left\n$") -- twice in one process
    runs(("%s 10 %s %s"):format(load, first, shared))
    -- without being told to keep its functions: the first one's are then not the second one's either (RTLD_LOCAL)
    runs(("%s 3 %s %s"):format(load, compile("use", "open.so", "-shared -fPIC", static()), shared))
  end)

  it("has a transport for one of two copies in one process, and refuses the other", function()
    if need() then return pending(need()) end
    if not shell.read "build/config.mk":match "MPI_LIBS" then return pending "Open MPI was not found" end
    local words = "-Wl,--exclude-libs,libperilune.a " .. static()
    local first, second = compile("copies", "one.so", "-shared -fPIC -DPLUGIN", words),
      compile("copies", "two.so", "-shared -fPIC -DPLUGIN", words)
    assert.equal("0 1\n", (shell.run(table.concat({ compile("copies", "copies", "", "-ldl"), first, second }, " "),
      { PERI_PLUGIN_PATH = prefix .. "/lib/perilune" })))
  end)

  it("goes with the program's own MPI communicator, in which some ranks have no part", function()
    if need() then return pending(need()) end
    local config = shell.read "build/config.mk"
    local cflags, libs = config:match "MPI_CFLAGS := ([^\n]*)", config:match "MPI_LIBS := ([^\n]*)"
    if not libs or not shell.has "mpirun" then return pending "Open MPI was not found" end
    local ranks = compile("ranks", "ranks", cflags, flags "--libs" .. libs)
    local function run(words) return shell.run(mpirun(4) .. ranks .. " " .. words, shared_library()) end
    local out, status = run ""
    assert.equal("0 wrong, sum 6\n", out)
    assert.equal(0, status)
    out = run "refused" -- a sandbox means a slower way, and no line
    assert.equal("0 wrong, sum 6\n", (out:gsub("ranks: there are no filters here\n", "")))
    out = run "low"
    assert.matches("EUNSUPPORTED: mpi: the program has initialised MPI for MPI_THREAD_SINGLE; wanted: "
      .. "MPI_THREAD_SERIALIZED or more", out)
    out = run "late"
    assert.matches("ETIMEOUT: mpi: joining the world took longer than 1 s: not all ranks of the program's "
      .. "communicator have come", out)
  end)

  it("leaves environment and signal handlers as they were when it starts MPI itself", function()
    if need() then return pending(need()) end
    if not shell.read "build/config.mk":match "MPI_LIBS" or not shell.has "mpirun" then
      return pending "Open MPI was not found"
    end
    local world = compile("world", "world", "", flags "--libs")
    for _, words in ipairs { "", " own" } do
      runs(world .. words, "^ok 0 wrong\n$")
      runs(mpirun(2) .. world .. words, "^ok 0 wrong\nok 0 wrong\n$")
    end
  end)

  it("refuses calls by functions that the program has given it, and ends where these throw", function()
    if need() then return pending(need()) end
    if not shell.has "c++" then return pending "there is no C++ compiler" end
    local calls, n = {}, 0
    for path in shell.run "ls runtime/include/perilune/*.h":gmatch "%S+" do
      local text = shell.read(path):gsub("/%*.-%*/", ""):gsub("\n#[^\n]*", "")
      for result, name, arguments in text:gmatch "PERI_API%s+([^;(]-)%s*(peri_[%w_]+)%s*(%b())%s*;" do
        local _, more = arguments:sub(2, -2):gsub("%b()", ""):gsub(",", "")
        local zeros = arguments == "(void)" and "" or "0" .. (", 0"):rep(more)
        local release = result == "void" and name:match "_release$" and arguments:match "^%([%w_]+ %*[%w_]+%)$"
        calls[#calls + 1] = release and ("RELEASE(%s)"):format(name)
          or ("%s(%s%s)"):format(result == "peri_status" and "STATUS" or "OTHER", name,
            zeros == "" and "" or ", " .. zeros)
        n = n + (result == "peri_status" and 1 or 0)
      end
    end
    assert.is_true(n > 400, n)
    shell.write(root .. "/calls.h", table.concat(calls, "\n"))
    local out, status = shell.run(("c++ -std=c++17 -O1 -Wall -Wextra -Werror -I%s %s tests/linking/borders.cc "
      .. "-o %s/borders %s"):format(root, flags "--cflags", root, flags "--libs"))
    assert.equal(0, status, out)
    runs(root .. "/borders", "^ok 0 wrong\n$")
  end)

  it("does what the code on docs/embedding_c.md says", function()
    if need() then return pending(need()) end
    local blocks = {}
    for language, block in shell.read "docs/embedding_c.md":gmatch "\n```(%w*)\n(.-\n)```\n" do
      local statements, calls = block:gsub("%f[%w_]peri_[%w_]+%b();", function(call)
        return ("check(%s);"):format(call:sub(1, -2))
      end)
      if language == "" and (calls > 0 or block:find("peri_kjt_config", 1, true)) then
        blocks[#blocks + 1] = "{" .. statements .. "}"
      end
    end
    assert.equal(5, #blocks)
    -- in the page's order: a structure, an optimizer's state, Lua, metrics, a plan
    shell.write(root .. "/model.lua", "return { score = function(a, b) return a * b end }")
    shell.write(root .. "/plan.lua", ([[
      local plan = require "perilune".plan
      local cut = { items = plan.row_wise() }
      plan.save_json(plan.ShardingPlan { ["sparse.ebc"] = cut }, "%s/plan.json")]]):format(root))
    shell.write(root .. "/page.c", ([[
      #include <perilune/host.h>
      #include <perilune/perilune.h>
      #include <stdio.h>
      #include <stdlib.h>
      static void check(peri_status status)
      {
          if (status < 0) exit((puts(peri_error_message()), 1));
      }
      int main(void)
      {
          static const char *const names[] = {"f"};
          static const int64_t one = 1;
          static const int32_t first = 0;
          peri_device *cpu;
          peri_tensor *values, *lengths;
          peri_keys *keys;
          peri_kjt *batch;
          check(peri_device_get("cpu", &cpu));
          check(peri_keys_new(names, 1, &keys));
          check(peri_tensor_full(cpu, PERI_I64, 1, &one, 1, &lengths));
          check(peri_tensor_full(cpu, PERI_I64, 1, &one, 7, &values));
          peri_tensor *ids = values;
          %s
          {
              peri_checkpoint_state *state;
              peri_optim *optim;
              peri_optim_config adagrad = {.size = sizeof adagrad};
              peri_tensor *weight, *sum, *steps;
              int64_t n = 3;
              check(peri_tensor_full(cpu, PERI_F32, 1, &one, 1, &weight));
              check(peri_tensor_full(cpu, PERI_I64, 1, &one, 3, &steps));
              check(peri_optim_default(PERI_OPTIM_ADAGRAD, &adagrad));
              check(peri_optim_new(&adagrad, &weight, 1, &optim));
              check(peri_checkpoint_state_new(0, &state));
              %s
              printf("steps %%lld\n", (long long)peri_optim_steps(optim, 0));
          }
          if (%d) {
              peri_lua *lua;
              peri_lua_object *model;
              peri_lua_value in[2] = {{.kind = PERI_LUA_NUMBER, .number = 6}, {.kind = PERI_LUA_NUMBER, .number = 7}};
              peri_lua_value out[1];
              %s
              printf("score %%g\n", out[0].number);
          }
          const double predictions[] = {0.5, 0.5}, labels[] = {1, 0};
          const int64_t n = 2;
          const int minute = 61;
          double values_of[2];
          %s
          printf("ne %%g, calibration %%g\n", values_of[0], values_of[1]);
          peri_group *world;
          peri_plan *plan;
          peri_sharded *module;
          const int32_t n_tables = 1;
          peri_tbe_optimizer_config sgd = {.size = sizeof sgd};
          check(peri_tbe_optimizer_default(PERI_TBE_SGD, &sgd));
          sgd.learning_rate = 1;
          peri_sharded_table tables[1] = {{.size = sizeof tables[0], .name = "items", .rows = 10, .cols = 4,
                                           .features = &first, .n_features = 1}};
          peri_sharded_config config = {.size = sizeof config, .device = cpu, .tables = tables, .n_tables = 1,
                                        .features = names, .n_features = 1, .optimizers = &sgd, .n_optimizers = 1};
          check(peri_comm_open(NULL, &world));
          config.group = world;
          %s
          printf("type %%d\n", tables[0].sharding_type == PERI_ROW_WISE);
      }]]):format(blocks[1]:gsub("}$", "check(peri_kjt_new(&config, &batch)); }"), blocks[2],
      shell.no_launcher() and 0 or 1, blocks[3]:gsub("model%.lua\"", root .. "/%0"),
      blocks[4]:gsub("}$", "values_of[0] = ne, values_of[1] = calibration; }"),
      (blocks[5]:gsub("plan%.json\"", root .. "/%0"))))
    local out, status = shell.run(("%s run %s/plan.lua"):format(shell.perilune, root))
    assert.equal(0, status, out)
    out, status = shell.run(("${CC:-cc} -std=c11 -Wall -Wextra -Werror %s %s/page.c -o %s/page %s"):format(
      flags "--cflags", root, root, flags "--libs"))
    assert.equal(0, status, out)
    runs(root .. "/page", "^steps 3\nscore 42\nne 1, calibration 1\ntype 1\n$")
  end)

  it("goes with two files that the program compiles itself, in one call", function()
    if need() then return pending(need()) end
    local out, status = shell.run "make --no-print-directory amalgamation"
    assert.equal(0, status, out)
    -- Whether it compiles: the program itself takes a minute, and is `make check-amalgamation`. To look for misleading
    -- indentation takes gcc 20 s of 22 here.
    out, status = shell.run("${CC:-cc} -std=gnu11 -Wall -Wno-unused-function -Wno-misleading-indentation -Werror "
      .. "-fsyntax-only build/amalgamation/perilune.c")
    assert.equal(0, status, out)
    -- Whatever the program's flags are, a product and a sum are rounded one after the other, as in the library.
    if jit.arch ~= "x64" then return end
    local head = shell.read "build/amalgamation/perilune.c":match "^(.-)\n#ifndef PERI_ISA_MOST"
    shell.write(root .. "/fused.c", head .. "\ndouble fused(double a, double b, double c) { return a * b + c; }\n")
    for _, compiler in ipairs { "${CC:-cc}", shell.has "clang" and "clang" or nil } do
      out, status = shell.run(("%s -std=gnu11 -O2 -mfma -Ibuild/amalgamation -S -o - %s/fused.c")
        :format(compiler, root))
      assert.equal(0, status, out)
      assert.matches("mulsd", out)
      assert.not_matches("vfn?madd", out)
    end
  end)

  it("keeps functions whose names or parameters are others now, for programs that were built with these", function()
    local ffi, peri = require "ffi", require "perilune"
    local C, check = peri.ffi.C, peri.ffi.check
    pcall(ffi.cdef, "void *dlopen(const char *, int); void *dlvsym(void *, const char *, const char *);")
    local library = ffi.C.dlopen(shell.build .. "/libperilune.so", 2)
    local function of_then(name, kind)
      local found = ffi.C.dlvsym(library, name, "PERILUNE_0.2")
      assert.is_true(found ~= nil, name)
      return ffi.cast(kind, found)
    end
    local grad = of_then("peri_grad_enable", "bool (*)(bool)")
    assert.is_true(grad(false))
    assert.is_false(C.peri_grad_enabled())
    assert.is_false(grad(true))
    assert.is_true(C.peri_grad_enabled())
    local products = of_then("peri_ordered_products", "bool (*)(bool)")
    assert.is_false(products(true))
    assert.is_true(C.peri_products_ordered())
    assert.is_true(products(false))
    local swap = of_then("peri_autocast_swap", "peri_autocast *(*)(peri_autocast *)")
    local region = ffi.new "peri_autocast *[1]"
    check(C.peri_autocast_new("cpu", C.PERI_BF16, true, region))
    check(C.peri_autocast_enter(region[0]))
    assert.is_true(swap(nil) == region[0] and C.peri_autocast_current() == nil and swap(region[0]) == nil)
    check(C.peri_autocast_exit(region[0]))
    C.peri_autocast_release(region[0])
    assert.equal(C.PERI_OK, of_then("peri_set_float32_matmul_precision", "int32_t (*)(const char *)") "high")
    assert.equal("high", ffi.string(of_then("peri_get_float32_matmul_precision", "const char *(*)(void)")()))
    check(C.peri_float32_matmul_precision_set "highest")
    -- Numbers of entries were int64_t: one that is too large now is refused, and not cut.
    local blocks = of_then("peri_tbe_blocks_new",
      "int32_t (*)(const peri_tbe *, const peri_tbe_block *, int64_t, peri_tbe_blocks **)")
    local config, tbe, out = peri.ffi.struct "peri_tbe_config", ffi.new "peri_tbe *[1]", ffi.new "peri_tbe_blocks *[1]"
    local rows = peri.ffi.struct("peri_table_config", { name = "t", rows = 5, cols = 4 })
    local device = ffi.new "peri_device *[1]"
    check(C.peri_device_get("cpu", device))
    config.device, config.n_tables, config.tables = device[0], 1, rows
    check(C.peri_tbe_new(config, tbe))
    local list = ffi.new("peri_tbe_block[1]", { { bags = 1, out_stride = 4, feature = -1 } })
    assert.equal(C.PERI_OK, blocks(tbe[0], list, 1, out))
    C.peri_tbe_blocks_release(out[0])
    assert.equal(C.PERI_EINVAL, blocks(tbe[0], list, 2 ^ 32 + 1, out))
    C.peri_tbe_release(tbe[0])
    local n = ffi.new("int64_t[1]", -1)
    assert.is_true(of_then("peri_model_inputs", "const peri_model_input *(*)(const peri_model *, int64_t *)")(nil, n)
      == nil)
    assert.equal(0, tonumber(n[0]))
  end)

  it("goes on for programs that were built with an earlier library", function()
    if need() then return pending(need()) end
    local contract = shell.read "runtime/include/perilune/base.h":match "PERI_ABI_VERSION = (%d+)"
    local machine = shell.run "uname -m":match "%S+"
    local function kept(name) return ("tests/kept/%s-%s-%s"):format(name, contract, machine) end
    if not shell.exists(kept "lookup") then
      return pending("no programs are kept for " .. machine .. " and contract " .. contract)
    end
    local env = { LD_LIBRARY_PATH = shell.build }
    local out, status = shell.run(kept "lookup" .. " 3 7 999", env) -- peri_tbe_blocks_new counted by int64_t then
    if out:match "GLIBC_" then return pending "the C library is older than the one with which they were built" end
    assert.equal("clicked: 1009 1009.75 1010.5 1011.25\ntags: 3.5 3.75 4 4.25\n", out)
    assert.equal(0, status)
    out, status = shell.run(kept "lookup" .. " 1000", env)
    assert.matches("id 1000 at place 0 of the bag, allowed: 0%.%.999", out)
    assert.equal(1, status)
    out, status = shell.run(kept "train", env)
    assert.equal(0, status, out)
    assert.is_true(tonumber(out:match "step 200: loss ([%d.]+)") < 0.05, out)
    if shell.no_launcher() then return end
    out, status = shell.run(kept "lua" .. " examples/hosts/score.lua 1,2,3", env)
    assert.equal("14.5\na linear model, 4 parameters\n2 buffers are the program's again\n", out)
    assert.equal(0, status)
  end)
end)
