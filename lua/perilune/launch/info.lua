-- launch/info.lua: what `perilune info` prints: the machine as Perilune sees and uses it, and the libraries that it
-- runs on.
local util = require "perilune.util"

local M = {}

local function read(path) return util.read_file(path) or "" end

local function line(name, format, ...) print(("  %-16s %s"):format(name, format:format(...))) end

--- Extensions of x86 that kernels, BLAS libraries or readers of benchmarks ask about.
local EXTENSIONS = { "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
  "avx512_fp16", "amx_bf16", "amx_int8" }

--- "32K data, 32K instruction, 1024K level 2, 33792K level 3 of 2": of the first processor.
local function caches()
  local list = {}
  for i = 0, 9 do
    local at = ("/sys/devices/system/cpu/cpu0/cache/index%d/"):format(i)
    local size, level, kind = read(at .. "size"):match "%S+", read(at .. "level"):match "%d+",
      read(at .. "type"):match "%a+"
    if not size then break end
    local shared = select(2, read(at .. "shared_cpu_list"):gsub("%d+", ""))
    list[#list + 1] = ("%s %s%s"):format(size, level == "1" and kind:lower() or "level " .. level,
      shared > 1 and " shared" or "")
  end
  return #list > 0 and table.concat(list, ", ") or "unknown"
end

local function machine(peri, C, launcher)
  local cpuinfo = read "/proc/cpuinfo"
  local flags, has = " " .. (cpuinfo:match "flags%s*:([^\n]*)" or "") .. " ", {}
  for _, name in ipairs(EXTENSIONS) do
    if flags:find(" " .. name .. " ", 1, true) then has[#has + 1] = name end
  end
  local memory, available = peri.ffi.host_memory()
  local nodes = 0
  while read(("/sys/devices/system/node/node%d/cpulist"):format(nodes)) ~= "" do nodes = nodes + 1 end
  print "machine"
  line("processor", "%s, %d of %d processors, %d NUMA node%s", cpuinfo:match "model name%s*:%s*([^\n]*)" or jit.arch,
    launcher.cpus(), select(2, cpuinfo:gsub("processor%s*:", "")), math.max(nodes, 1), nodes > 1 and "s" or "")
  line("instructions", "%s", #has > 0 and table.concat(has, " ") or "none beyond " .. jit.arch)
  line("kernels", "%s (PERI_CPU_ISA)", require("ffi").string(C.peri_cpu_isa()))
  line("caches", "%s", caches())
  line("memory", "%.1f GiB, %.1f GiB available, huge pages %s", memory / 2 ^ 30, available / 2 ^ 30,
    read("/sys/kernel/mm/transparent_hugepage/enabled"):match "%[(%a+)%]" or "unknown")
  line("open files", "%d (ulimit -n)", launcher.files(0))
  line("peer memory", launcher.peer_memory() and "ranks may copy from memory to memory"
    or "forbidden here (container, or ptrace_scope): ranks exchange through messages")
  local shared = read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"):match "%[([%a_]+)%]"
  if shared then
    local major, minor = read("/proc/sys/kernel/osrelease"):match "^(%d+)%.(%d+)"
    local demanded = shared ~= "deny" and major and tonumber(major) * 1000 + tonumber(minor) >= 6001
    local huge = demanded or shared == "advise" or shared == "always" or shared == "within_size" or shared == "force"
    line("shared memory", "huge pages %s%s", shared, demanded and " (ranks ask for theirs)" or huge and ""
      or "; 'advise' would make exchanges of rows on one machine faster")
  end
end

--- `refused`: why no matrix product can be made; nil.
local function libraries(launcher, refused)
  print "libraries"
  line("LuaJIT", "%s", (jit.version:gsub("^LuaJIT ", "")))
  local found = {}
  for _, l in ipairs(launcher.libraries()) do
    line(l.name, "%s (%s)", (l.version:gsub("^" .. l.name .. "%s+", "")), l.path)
    found[l.name] = true
  end
  line("matrix products", "%s", refused or ("%s, cut among the worker threads (PERI_BLAS)"):format(
    found.oneDNN and "oneDNN, small and 64-bit ones OpenBLAS" or "OpenBLAS"))
  if not found.liburing then line("liburing", "not used: rows of tables in files are read by pread") end
  if not found["Open MPI"] then line("Open MPI", "not loaded: see transport mpi") end
end

--- Print it all.
function M.print()
  local peri = require "perilune"
  local C, ffi, launcher = peri.ffi.C, require "ffi", require "perilune.launcher"
  local world = require("perilune.launch").world()
  line("threads", "%d in each rank (PERI_NUM_THREADS)", C.peri_threads())
  line("world", "%s", world and ("rank %d of %d, by %s"):format(world.rank, world.size, world.launcher)
    or "this process alone")
  local reason = ffi.new "char[512]"
  local function list(title, probe, names)
    print(title)
    for _, name in ipairs(names) do
      local usable = probe(name, reason, 512)
      local said = ffi.string(reason)
      line(name, "%s", (usable and "usable" or "not usable") .. (said ~= "" and ": " .. said or ""))
    end
  end
  machine(peri, C, launcher)
  local own = peri.ffi.state.device -- "cuda:1" of cuda
  local devices, backend = { "cpu", "opaque", "cuda" }, own:match "^[^:]*"
  local listed = util.index_of(devices)
  if backend ~= "" and not listed[backend] then devices[#devices + 1] = backend end
  list("devices", function(...) return C.peri_device_probe(...) end, devices)
  --- Why something fails, but for what a warning has said: once is enough.
  local function why_not(err) return (tostring(err):gsub("^PERI_TUNE.*", "no such PERI_TUNE: see the warning")) end
  local opens, found = pcall(peri.ffi.device)
  line("default", "%s (PERI_DEVICE)",
    opens and ffi.string(C.peri_device_name(found)) or ("'%s', not usable: %s"):format(own, why_not(found)))
  list("transports", function(...) return C.peri_comm_probe(...) end, { "self", "sim", "mpi", "nccl" })
  local gpu = backend:match "^cuda" and backend or "cuda"
  local missing = not C.peri_device_probe(gpu, reason, 512) and "device " .. gpu
    or not C.peri_comm_probe("nccl", reason, 512) and "nccl"
  line("of ranks on GPUs", "%s", missing and ("mpi, through the host's memory: %s is not usable"):format(missing)
    or "mpi, and nccl for tensors of GPUs where each rank has one of its own")
  local works, err = pcall(function() -- finds out who makes matrix products
    local x = peri.ones({ 64, 64 }, "f32", "cpu")
    peri.nn.functional.linear(x, x)
  end)
  local refused = not works and why_not(err) or nil
  libraries(launcher, refused)
end

return M
