-- launch/doctor.lua: `perilune doctor`: whether this machine has what Perilune uses, and what to do where it does not.
local ffi = require "ffi"
local util = require "perilune.util"

local M = {}

local function read(path) return util.read_file(path) or "" end

--- The first line that a command prints; nil: it printed none.
local function line_of(command)
  local pipe = io.popen(command .. " 2>/dev/null")
  local line = pipe and pipe:read "*l"
  if pipe then pipe:close() end
  return line ~= "" and line or nil
end

--- What a check finds: "ok", "note" (it works; something would be better) or "fail", the words, and what to do.
local function ok(...) return "ok", (...):format(select(2, ...)) end
local function note(words, advice) return "note", words, advice end
local function fail(words, advice) return "fail", words, advice end

local reason = ffi.new "char[512]"
local function probe(f, name)
  local usable = f(name, reason, 512)
  return usable, ffi.string(reason)
end

local function soft_limit(name)
  local soft = read("/proc/self/limits"):match(name .. "%s+(%S+)")
  return soft == "unlimited" and math.huge or tonumber(soft)
end

local GIB = 2 ^ 30
local function size_text(bytes)
  if bytes == math.huge then return "unlimited" end
  return bytes >= GIB and ("%.1f GiB"):format(bytes / GIB) or ("%.0f MiB"):format(bytes / 2 ^ 20)
end

local checks = {}
local function check(name, f) checks[#checks + 1] = { name, f } end

check("processor", function(C)
  local isa = ffi.string(C.peri_cpu_isa())
  local flags = read("/proc/cpuinfo"):match "flags%s*:([^\n]*)" or ""
  if isa == "ref" then
    return note(("kernels '%s': portable C"):format(isa), jit.arch ~= "x64"
      and "there are no vector kernels for this kind of processor; Perilune is several times slower here"
      or not flags:find " avx2" and "this processor has no AVX2; Perilune is several times slower here"
      or "is PERI_CPU_ISA set? Unset it, and the fastest is chosen")
  end
  if isa ~= "avx512" and flags:find " avx512bw" and flags:find " avx512vl" then
    return note(("kernels '%s', the processor has AVX-512"):format(isa),
      "is PERI_CPU_ISA set? Unset it, and the fastest is chosen")
  end
  return ok("kernels '%s' (PERI_CPU_ISA)", isa)
end)

check("compiled Lua", function()
  local traversal = require("perilune.compiler").wrong(jit.arch, jit.version) == "traversal"
  if jit.status() then
    return ok("%s compiles%s", jit.version, traversal and ", but for pairs and next, which it gets wrong" or "")
  end
  return note(jit.version .. " does not compile",
    "on 64-bit ARM, LuaJIT from November 2023 on is wanted: scripts are several times slower")
end)

check("threads", function(C, launcher)
  local threads, cpus = C.peri_threads(), launcher.cpus()
  if threads > cpus then
    return note(("%d threads for %d processors"):format(threads, cpus),
      "set PERI_NUM_THREADS, or -t, to at most the processors of a rank")
  end
  return ok("%d in each rank, %d processors (PERI_NUM_THREADS)", threads, cpus)
end)

check("memory", function(_, _, peri)
  local total, available = peri.ffi.host_memory()
  local machine = (tonumber((read "/proc/meminfo"):match "MemTotal:%s*(%d+)") or 0) * 1024
  local words = ("%s available of %s%s"):format(size_text(available), size_text(total),
    total < machine and (", which this container or job may have of the machine's %s"):format(size_text(machine)) or "")
  if available < GIB then
    return note(words, "tables live in memory: close other programs, or keep tables in files (docs/tables_in_files.md)")
  end
  return ok("%s", words)
end)

check("huge pages", function()
  local mode = read("/sys/kernel/mm/transparent_hugepage/enabled"):match "%[(%a+)%]"
  if mode == "never" then
    return note("off", "lookups in large tables are faster with them; as root: echo madvise "
      .. ">/sys/kernel/mm/transparent_hugepage/enabled")
  end
  return ok("%s", mode or "unknown")
end)

check("shared memory", function(_, launcher)
  local room = launcher.room "/dev/shm"
  if not room then
    return note("/dev/shm is not there", "ranks of one machine meet there: mount a tmpfs at /dev/shm")
  end
  if room < 2 ^ 28 then
    return note("/dev/shm has " .. size_text(room),
      "ranks of one machine exchange through it; in a container: docker run --shm-size=2g")
  end
  return ok("/dev/shm has %s", size_text(room))
end)

check("locked memory", function()
  local bytes = soft_limit "Max locked memory"
  if bytes and bytes < 2 ^ 26 then
    return note(size_text(bytes) .. " (ulimit -l)",
      "InfiniBand, pinned batches for GPUs and io_uring need more: ulimit -l unlimited "
        .. "(/etc/security/limits.conf: memlock); in a container: docker run --ulimit memlock=-1")
  end
  return ok("%s (ulimit -l)", size_text(bytes or math.huge))
end)

check("open files", function(_, launcher)
  local files = launcher.files(0)
  if files < 1024 then
    return note(("%d (ulimit -n)"):format(files), "many ranks, or tables in files, need more: ulimit -n 4096")
  end
  return ok("%d (ulimit -n)", files)
end)

check("peer memory", function(_, launcher)
  if launcher.peer_memory() then return ok "ranks may copy from memory to memory" end
  return note("forbidden: ranks of one machine exchange through messages",
    "in a container: docker run --cap-add=SYS_PTRACE; elsewhere "
      .. "as root: echo 0 >/proc/sys/kernel/yama/ptrace_scope")
end)

check("matrix products", function(_, launcher, peri)
  local works, err = pcall(function()
    local x = peri.ones({ 64, 64 }, "f32", "cpu")
    peri.nn.functional.linear(x, x)
  end)
  if not works then
    return fail(tostring(err), "install OpenBLAS (Debian: libopenblas0), and build again: make probe all")
  end
  local found = {}
  for _, l in ipairs(launcher.libraries()) do
    found[l.name] = l.version:gsub("^" .. l.name .. "%s+", ""):match "^%S+"
  end
  if found.oneDNN then return ok("oneDNN %s, OpenBLAS %s", found.oneDNN, found.OpenBLAS or "") end
  return note(("OpenBLAS %s"):format(found.OpenBLAS or ""),
    "oneDNN is some 10 % faster over a step (Debian: libdnnl-dev), then: make probe all")
end)

check("files", function(_, launcher)
  for _, l in ipairs(launcher.libraries()) do
    if l.name == "liburing" then return ok("liburing %s", l.version) end
  end
  return note("without liburing", "tables in files are read slower (Debian: liburing-dev), then: make probe all")
end)

check("several ranks", function(C)
  local usable, why = probe(C.peri_comm_probe, "mpi")
  local mpirun = line_of "command -v mpirun"
  if not usable then
    return note("transport mpi: " .. why,
      "for more than one process install Open MPI (Debian: openmpi-bin libopenmpi-dev)")
  end
  if not mpirun then
    return note("mpirun is not in PATH",
      "perilune run -n starts ranks with it (Debian: openmpi-bin); under srun it is not needed")
  end
  local version = line_of(mpirun .. " --version") or mpirun
  if not version:find "Open MPI" and not version:find "OpenRTE" then
    return note(("%s is not Open MPI's: %s"):format(mpirun, version),
      "the transport mpi is made for Open MPI, which comes first in PATH then (Debian: openmpi-bin)")
  end
  return ok("%s", version)
end)

check("GPUs", function(C)
  local gpu = line_of "nvidia-smi -L"
  local usable, why = probe(C.peri_device_probe, "cuda")
  if usable then
    local nccl, why_not = probe(C.peri_comm_probe, "nccl")
    if not nccl then
      return note("cuda is usable, nccl is not: " .. why_not,
        "several GPUs exchange through the host's memory: install NCCL; make cuda")
    end
    return ok("cuda and nccl are usable%s", gpu and ": " .. gpu or "")
  end
  if gpu then
    return note(gpu .. ", but the device cuda is not usable: " .. why,
      "build the plugin, with the CUDA Toolkit: make cuda")
  end
  return ok "none on this machine"
end)

check("JSON", function()
  if pcall(require, "dkjson") then return ok "dkjson" end
  return note("without dkjson", "logs, reports and plans as data need it (Debian: lua-dkjson), then: make probe all")
end)

check("calibration", function(C, _, peri)
  local described = peri.ffi.struct "peri_tune_info"
  for i = 0, C.peri_tune_count() - 1 do
    if C.peri_tune_describe(i, described) == 0 and described.source > 0 then
      return ok "choices of this processor are measured"
    end
  end
  return note("not done on this machine",
    "perilune calibrate measures which ways are fast here, and rates for plans (docs/tuning.md)")
end)

--- The command: prints a line for each check. Returns the exit code: 1 if something fails.
function M.run()
  local peri = require "perilune"
  local launcher, failed, notes = require "perilune.launcher", 0, 0
  for _, c in ipairs(checks) do
    local worked, state, words, advice = pcall(c[2], peri.ffi.C, launcher, peri)
    if not worked then state, words, advice = "fail", tostring(state), nil end
    print(("%-5s %-16s %s"):format(state, c[1], words))
    if advice then print(("%22s %s"):format("->", advice)) end
    failed, notes = failed + (state == "fail" and 1 or 0), notes + (state == "note" and 1 or 0)
  end
  print(failed > 0 and ("%d of %d checks failed"):format(failed, #checks)
    or notes > 0 and ("everything works; %d of %d could be better"):format(notes, #checks) or "everything is fine")
  return failed > 0 and 1 or 0
end

return M
