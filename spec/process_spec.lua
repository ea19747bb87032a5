-- What a process is given may change or be short: clocks that are set, addresses that are limited, signals that are
-- blocked. (mpirun: none: it starts its own)
-- deadline: 120 s
-- takes: 8 s, mostly waits
local shell = require "spec.support.shell"

local folder, clean = shell.temporary()
teardown(clean)
local here = shell.run("pwd"):match "^[^\n]*"
local build = here .. "/" .. shell.build
local cc = os.getenv "CC" or "cc"

describe("the wall clock", function()
  it("may be set by a day while a job runs, forward or back", function()
    local missing = shell.no_launcher() or not shell.has "mpirun" and "mpirun was not found"
      or shell.sanitizer ~= "" and "a sanitizer comes first among the libraries" or nil
    if missing then return pending(missing) end
    -- in place of the C library's: from a tenth of a second after its start on, another day
    shell.write(folder .. "/clock.c", [[
      #define _GNU_SOURCE
      #include <dlfcn.h>
      #include <stdlib.h>
      #include <sys/syscall.h>
      #include <sys/time.h>
      #include <time.h>
      #include <unistd.h>
      static void look(clockid_t which, struct timespec *t)
      {
          static struct timespec begin;
          struct timespec now;
          syscall(SYS_clock_gettime, which, t);
          syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
          if (!begin.tv_sec) begin = now;
          if (which == CLOCK_REALTIME && now.tv_sec - begin.tv_sec + (now.tv_nsec - begin.tv_nsec) * 1e-9 > 0.1)
              t->tv_sec += atoi(getenv("JUMP"));
      }
      int clock_gettime(clockid_t which, struct timespec *t) { look(which, t); return 0; }
      int gettimeofday(struct timeval *v, void *zone)
      {
          struct timespec t;
          look(CLOCK_REALTIME, &t);
          v->tv_sec = t.tv_sec; v->tv_usec = t.tv_nsec / 1000;
          return 0;
      }
      time_t time(time_t *at)
      {
          struct timespec t;
          look(CLOCK_REALTIME, &t);
          return at ? *at = t.tv_sec : t.tv_sec;
      }]])
    local out, status = shell.run(("%s -shared -fPIC -o %s/clock.so %s/clock.c -ldl"):format(cc, folder, folder))
    assert.equal(0, status, out)
    -- ranks start late, which has a deadline of five minutes
    local mpirun = shell.run("command -v mpirun"):match "^[^\n]*"
    shell.write(folder .. "/mpirun", ('#!/bin/sh\n[ "$1" = --version ] || sleep 1.3\nexec %s "$@"\n'):format(mpirun))
    os.execute(("chmod +x %s/mpirun"):format(folder))
    local script = shell.write(folder .. "/script.lua", [[
      local peri = require "perilune"
      peri.init()
      for _ = 1, 5 do
        os.execute "sleep 0.2"
        peri.world():barrier():wait()
      end
      print "well"]])
    for _, jump in ipairs { 86400, -86400 } do
      out, status = shell.run(("PATH=%s:$PATH JUMP=%d LD_PRELOAD=%s/clock.so %s run -n 2 %s"):format(folder, jump,
        folder, shell.perilune, script))
      assert.equal(0, status, out)
      assert.equal("well\nwell\n", out)
    end
  end)
end)

describe("addresses that a process does not get (ulimit -v)", function()
  it("are an error of matrix products, never a wait", function()
    if shell.sanitizer ~= "" then return pending "sanitizers need more addresses" end
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local script = shell.write(folder .. "/script.lua", [[
      local peri = require "perilune"
      local a = peri.ones { 300, 300 }
      print(a:matmul(a):sum():item())]])
    local last
    for kib = 100000, 900000, 100000 do
      local out, status = shell.run(("ulimit -v %d; exec timeout 20 %s run %s"):format(kib, shell.perilune, script),
        { PERI_NUM_THREADS = 3, PERI_BLAS = "openblas" })
      assert.is_true(status == 0 or status == 1, out)
      if status == 0 then assert.equal("27000000\n", out) else assert.matches("MiB of addresses", out) end
      last = status
    end
    assert.equal(0, last)
  end)
end)

describe("a signal that a C program blocks in order to wait for it", function()
  it("stays its own, whatever threads the library has", function()
    if shell.sanitizer ~= "" then return pending "sanitizers come first among the libraries" end
    shell.write(folder .. "/program.c", [[
      #include <perilune/perilune.h>
      #include <pthread.h>
      #include <signal.h>
      #include <stdio.h>
      #include <time.h>
      #include <unistd.h>
      int main(void)
      {
          sigset_t set;
          peri_device *cpu;
          peri_tensor *a, *b;
          int64_t shape[2] = {600, 600};
          sigemptyset(&set);
          sigaddset(&set, SIGTERM);
          pthread_sigmask(SIG_BLOCK, &set, NULL);
          if (peri_threads_set(2) < 0 || peri_device_get("cpu", &cpu) < 0 || peri_tensor_full(cpu, PERI_F32, 2, shape, 1, &a) < 0) return 1;
          if (peri_op_matmul(a, a, &b) < 0) return 2;
          kill(getpid(), SIGTERM);
          for (int i = 0; i < 20; i++) usleep(5000);
          struct timespec limit = {3, 0};
          printf("waited for %d\n", sigtimedwait(&set, NULL, &limit));
          return 0;
      }]])
    local out, status = shell.run(("%s -std=gnu11 -I%s/runtime/include %s/program.c -o %s/program %s/libperilune.so "
      .. "-Wl,-rpath,%s"):format(
      cc, here, folder, folder, build, build))
    assert.equal(0, status, out)
    for _, library in ipairs { "openblas", "" } do
      out, status = shell.run(folder .. "/program", { PERI_BLAS = library })
      assert.equal("waited for 15\n", out)
      assert.equal(0, status)
    end
  end)
end)

describe("a child that is forked while other threads multiply matrices", function()
  it("finds no lock of the library for products taken, and gets the program's number of its threads back", function()
    if shell.sanitizer ~= "" then return pending "sanitizers come first among the libraries" end
    -- in place of OpenBLAS: each product holds a lock for a millisecond, as its allocator does for a moment
    shell.write(folder .. "/blas.c", [[
      #include <pthread.h>
      #include <unistd.h>
      static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
      static int threads = 7;
      int openblas_get_num_threads(void) { return threads; }
      void openblas_set_num_threads(int n) { threads = n; }
      void cblas_dgemm(void) {}
      void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                       const float *b, int ldb, float beta, float *c, int ldc)
      {
          pthread_mutex_lock(&lock);
          usleep(1000);
          c[0] = a[0] * b[0];
          pthread_mutex_unlock(&lock);
          if (threads != 1) c[0] = -1;
      }]])
    shell.write(folder .. "/forks.c", [[
      #include <perilune/perilune.h>
      #include <pthread.h>
      #include <stdatomic.h>
      #include <stdio.h>
      #include <stdlib.h>
      #include <sys/wait.h>
      #include <unistd.h>
      int openblas_get_num_threads(void);
      static peri_tensor *two;
      static atomic_bool stop;
      static int product(void)
      {
          peri_tensor *out;
          double first;
          if (peri_op_matmul(two, two, &out) < 0 || peri_tensor_item(out, 0, &first) < 0) return 1;
          peri_tensor_release(out);
          return first == 4 ? 0 : 2;
      }
      static void *multiply(void *unused)
      {
          while (!stop)
              if (product() != 0) exit(3);
          return unused;
      }
      int main(void)
      {
          const int64_t shape[2] = {1, 1};
          peri_device *cpu;
          pthread_t threads[2];
          if (peri_device_get("cpu", &cpu) < 0 || peri_tensor_full(cpu, PERI_F32, 2, shape, 2, &two) < 0) return 1;
          for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, multiply, NULL);
          usleep(5000);
          for (int i = 0; i < 20; i++) {
              const pid_t child = fork();
              if (child == 0) {
                  alarm(20);
                  const int problem = product();
                  _exit(problem ? problem : openblas_get_num_threads() == 7 ? 0 : 4);
              }
              int status;
              waitpid(child, &status, 0);
              if (status) return printf("child %d: %#x\n", i, status), 2;
              usleep(700);
          }
          stop = true;
          for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
          return puts("well"), openblas_get_num_threads() != 7;
      }]])
    local out, status = shell.run(("cd %s && %s -shared -fPIC -w -Wl,-soname,libopenblas.so.0 blas.c "
      .. "-o libopenblas.so.0"):format(folder, cc))
    assert.equal(0, status, out)
    out, status = shell.run(("cd %s && %s -std=gnu11 -I%s/runtime/include forks.c -o forks -Wl,-rpath,%s "
      .. "-Wl,--no-as-needed ./libopenblas.so.0 %s/libperilune.so -Wl,-rpath,%s -lpthread"):format(folder, cc, here,
      folder, build, build))
    assert.equal(0, status, out)
    out, status = shell.run(folder .. "/forks", { PERI_BLAS = "openblas", PERI_NUM_THREADS = 2 })
    assert.equal("well\n", out)
    assert.equal(0, status)
  end)
end)

describe("a control group that allows less memory than the machine has", function()
  it("bounds what is kept of tensors that are gone", function()
    if shell.run "unshare -m true 2>&1" ~= "" then return pending "mounts cannot be of a process's own here" end
    local groups = folder .. "/groups"
    local own = shell.read "/proc/self/cgroup":match "%d+:memory:([^\n]*)"
    local at = groups .. "/memory" .. (own or "")
    shell.run("mkdir -p " .. at)
    if own then
      shell.write(at .. "/memory.limit_in_bytes", "629145600\n")
    else -- one tree of groups
      shell.write(groups .. "/memory.max", "629145600\n")
    end
    shell.write(folder .. "/kept.lua", [[
      local peri = require "perilune"
      for mib = 100, 200, 25 do
        collectgarbage()
        peri.zeros { mib * 2 ^ 18 }
        collectgarbage()
      end
      local kib = io.open "/proc/self/status":read "*a":match "VmHWM:%s*(%d+)"
      print(tonumber(kib) / 1024 < 450 and "bounded" or kib)
      local list = {}
      for i = 1, 25 do list[i] = peri.zeros { 16 * 2 ^ 18 } end -- 400 MiB in blocks that are always kept elsewhere
      list = nil -- luacheck: ignore
      collectgarbage()
      kib = io.open "/proc/self/status":read "*a":match "VmRSS:%s*(%d+)"
      print(tonumber(kib) / 1024 < 300 and "bounded" or kib)]])
    local out = shell.run(("unshare -m sh -c 'mount --bind %s /sys/fs/cgroup && %s/perilune run %s/kept.lua' 2>&1")
      :format(groups, build, folder))
    assert.equal("bounded\nbounded\n", out)
  end)
end)
