-- process.lua: child processes with a log file, an environment and a deadline, for tests/run.lua.
local ffi = require "ffi"

ffi.cdef [[
int fork(void);
int execvp(const char *file, const char *const argv[]);
int setenv(const char *name, const char *value, int overwrite);
int unsetenv(const char *name);
int setpgid(int pid, int group);
int dup2(int from, int to);
int open(const char *path, int flags, ...);
int kill(int pid, int signal);
int poll(void *fds, unsigned long n, int timeout_ms);
int prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d);
int isatty(int fd);
void _exit(int code);
typedef struct harness_time { long seconds, nanoseconds; } harness_time;
typedef struct harness_usage { long user_s, user_us, system_s, system_us, rest[14]; } harness_usage;
int wait4(int pid, int *status, int options, harness_usage *usage);
int clock_gettime(int clock, harness_time *out);
]]

local C = ffi.C
local M = {}

local SIGKILL, SIGTERM, WNOHANG, PR_SET_PDEATHSIG = 9, 15, 1, 1
local WRITE_CREATE_TRUNCATE = 1 + 64 + 512
local GRACE = 5 -- seconds from the polite signal to the other one, and from that until it is left alone

local time = ffi.new "harness_time"
--- Seconds of a monotonic clock.
function M.now()
  C.clock_gettime(1, time)
  return tonumber(time.seconds) + tonumber(time.nanoseconds) * 1e-9
end

function M.sleep(seconds) C.poll(nil, 0, seconds * 1000) end
function M.is_terminal() return C.isatty(1) == 1 end

--- Start a program in a process group of its own. argv: list; env: variables to set (false: unset); log: path for
--- stdout and stderr;
--- deadline: seconds. Returns a handle for `poll`.
function M.start(argv, env, log, deadline)
  local list = ffi.new("const char *[?]", #argv + 1)
  for i, word in ipairs(argv) do list[i - 1] = word end
  list[#argv] = nil
  io.stdout:flush()
  io.stderr:flush()
  local pid = C.fork()
  if pid == 0 then
    C.prctl(PR_SET_PDEATHSIG, SIGTERM, 0, 0, 0) -- nobody outlives an interrupted run
    C.setpgid(0, 0)
    local out = C.open(log, WRITE_CREATE_TRUNCATE, ffi.cast("int", 420))
    C.dup2(out, 1)
    C.dup2(out, 2)
    C.dup2(C.open("/dev/null", 0), 0)
    for name, value in pairs(env) do
      if value then C.setenv(name, value, 1) else C.unsetenv(name) end
    end
    C.execvp(argv[1], list)
    C._exit(127)
  end
  assert(pid > 0, "fork failed")
  C.setpgid(pid, pid) -- here too: whichever comes first
  local start = M.now()
  return { pid = pid, log = log, start = start, ends = start + deadline, deadline = deadline }
end

local status, usage = ffi.new "int[1]", ffi.new "harness_usage"
--- Has it ended? Past its deadline it is told to stop, then made to; one that cannot be (it waits within a driver) is
--- left behind. Sets seconds, code (exit status) or signal, late, left, and cpu_seconds: of the program and of all
--- descendants that were waited for.
function M.poll(p)
  if p.done then return true end
  if C.wait4(p.pid, status, WNOHANG, usage) == p.pid then
    local s = status[0]
    p.cpu_seconds = tonumber(usage.user_s + usage.system_s) + tonumber(usage.user_us + usage.system_us) * 1e-6
    if s % 128 == 0 then p.code = math.floor(s / 256) % 256 else p.signal = s % 128 end
    p.done, p.seconds = true, M.now() - p.start
    C.kill(-p.pid, SIGKILL) -- what it left behind in its group
    return true
  end
  local now = M.now()
  if now > p.ends and not p.late then
    p.late = true
    C.kill(-p.pid, SIGTERM)
  elseif p.late and now > p.ends + GRACE then
    C.kill(-p.pid, SIGKILL)
    if now > p.ends + 2 * GRACE then p.done, p.left, p.seconds = true, true, now - p.start end
  end
  return p.done == true
end

--- "exit status 1", "signal 11", "no end within 60 s".
function M.how(p)
  if p.late then
    return ("it did not end within %g s"):format(p.deadline) .. (p.left and ", nor when it was killed" or "")
  end
  if p.signal then return "it died of signal " .. p.signal end
  return "it left with exit status " .. p.code
end

return M
