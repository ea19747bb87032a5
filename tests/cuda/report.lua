-- report.lua: what nvcc made of kernels/cuda, by architecture (`make cuda-report`; docs/benchmarks/gpu_kernels.md says
-- how to read it). Nothing runs here.
--
--   luajit tests/cuda/report.lua --nvdisasm nvdisasm --doc docs/benchmarks/gpu_kernels.md 80:build/cuda/sm_80 \
--     90:build/cuda/sm_90
--
-- Folders hold <file>.cubin and <file>.log (of ptxas -v). All kernels go to <folder>/report.txt; the hot ones
-- (tests/cuda/hot.lua) to the page, between its two marks. Exit status 1: a hot kernel fails the check, or is not
-- there.
package.path = arg[0]:gsub("[^/]*$", "") .. "?.lua;" .. package.path
local sass, hot = require "sass", require "hot"

-- Limits of a multiprocessor (CUDA C++ Programming Guide, technical specifications by compute capability; the block's 1
-- KiB of shared memory is the system's). Bandwidth and multiprocessors: A100 80 GB SXM, H100 SXM.
local ARCHS = {
  ["80"] = { name = "A100", shared = 164 * 1024, bandwidth = 2.0e12, processors = 108 },
  ["90"] = { name = "H100", shared = 228 * 1024, bandwidth = 3.3e12, processors = 132 },
}
local WARPS, BLOCKS, REGISTERS, THREADS = 64, 32, 65536, 256
local LATENCY, PART = 800e-9, 0.9

local function up(x, step) return math.ceil(x / step) * step end

--- Warps that are resident: the least of what registers (256 at a time to a warp, four warps at a time), shared memory,
--- blocks and warps allow.
local function resident(arch, registers, shared)
  local per = THREADS / 32
  local by_registers = math.floor(math.floor(REGISTERS / up(registers * 32, 256) / 4) * 4 / per)
  local by_shared = math.floor(arch.shared / up(shared + 1024, 128))
  return math.min(by_registers, by_shared, BLOCKS, math.floor(WARPS / per)) * per
end

local function needed(arch) return PART * arch.bandwidth * LATENCY / arch.processors end

local function run(command)
  local pipe = assert(io.popen(command))
  local text = pipe:read "*a"
  return text, pipe:close()
end

--- What ptxas said: { [mangled name] = { registers, spills, stack, shared } }.
local function resources(path)
  local out, name = {}, nil
  for line in io.lines(path) do
    name = line:match "Function properties for (%S+)" or name
    local stack, stores, loads = line:match "(%d+) bytes stack frame, (%d+) bytes spill stores, (%d+) bytes spill loads"
    if stack then out[name] = { stack = tonumber(stack), spills = stores + loads } end
    local registers = line:match "Used (%d+) registers"
    if registers and out[name] then
      out[name].registers, out[name].shared = tonumber(registers), tonumber(line:match "(%d+) bytes smem" or 0)
    end
  end
  return out
end

--- { [mangled name] = short name }: without namespaces, arguments and the kernels around functors.
local function short_names(names)
  local path, out = os.tmpname(), {}
  local file = assert(io.open(path, "w"))
  file:write(table.concat(names, "\n"), "\n")
  file:close()
  local n = 0
  for line in run("c++filt <" .. path):gmatch "[^\n]+" do
    n = n + 1
    local x = line:gsub("%(anonymous namespace%)::", ""):gsub("^void ", ""):gsub("%(.*", ""):gsub(" >", ">")
    x = x:gsub("unsigned char", "uint8_t"):gsub("unsigned short", "uint16_t"):gsub("unsigned int", "uint32_t")
    x = x:gsub("peri_tbe_shape", "shape"):gsub("(shape<%d+, %d+), false>", "%1>"):gsub("peri_tbe_rows_kernel",
      "tbe_rows")
    out[names[n]] = x:match "^peri_%w+_kernel<peri_by_lanes<(.*)>>$" or x:match "^peri_each_kernel<(.*)>$" or
      x:match "^peri_%w+_kernel<%d+, (.*)>$" or x
  end
  os.remove(path)
  return out
end

--- Kernels of a folder, by file and short name; those of CUB are not ours.
local function read(folder, nvdisasm, arch)
  local list = {}
  for path in run("ls " .. folder .. "/*.cubin"):gmatch "[^\n]+" do
    local file = path:match "([%w_]+)%.cubin$"
    local used, names = resources((path:gsub("cubin$", "log"))), {}
    local text = run(("%s -c %s 2>&1"):format(nvdisasm, path))
    local kernels = sass.parse((text))
    for name in pairs(used) do names[#names + 1] = name end
    if #names > 0 and not next(kernels) then
      error(("'%s' does not disassemble %s: %s\nGive its path, NVDISASM=...: it comes with the CUDA toolkit, or from "
        .. "PyPI as nvidia-cuda-nvdisasm"):format(nvdisasm, path, text:match "[^\n]*"), 0)
    end
    local short = short_names(names)
    for _, name in ipairs(names) do
      local r, code = used[name], kernels[name]
      if code and r.registers and not short[name]:match "cub::" then
        r.file, r.name, r.code, r.warps = file, short[name], code, resident(arch, r.registers, r.shared)
        list[#list + 1] = r
      end
    end
  end
  table.sort(list, function(a, b) return a.file < b.file or a.file == b.file and a.name < b.name end)
  return list
end

local HEAD = ("%-12s %-64s %4s %6s %6s %6s %4s  %-22s %-22s %5s %8s"):format("file", "kernel", "regs", "spills",
  "stack", "shared", "occ.", "loads of inner loop", "stores", "bytes", "in flight")

local function write_all(list, path)
  local file = assert(io.open(path, "w"))
  file:write(HEAD, "\n")
  for _, r in ipairs(list) do
    local inner = sass.inner(r.code)
    file:write(("%-12s %-64s %4d %6d %6d %6d %3d%%  %-22s %-22s %5d %8d\n"):format(r.file, r.name, r.registers,
      r.spills, r.stack, r.shared, 100 * r.warps / WARPS, inner.loads, inner.stores, inner.bytes,
      inner.bytes * 32 * r.warps))
  end
  file:close()
end

--- What is wrong with a hot kernel: a list of words.
local function wrongs(h, r, inner, flight, arch)
  local out = {}
  if r.spills > 0 then out[#out + 1] = ("spills %d bytes"):format(r.spills) end
  if r.stack > 0 then out[#out + 1] = ("%d bytes of local memory a thread"):format(r.stack) end
  if h.wide == true and math.max(inner.width, inner.widest_store) < 16 then out[#out + 1] = "no 128-bit accesses" end
  if not h.flight and flight < needed(arch) then
    out[#out + 1] = ("%d bytes in flight of %d"):format(flight, needed(arch))
  end
  return out
end

--- Lines of the hot table, and complaints.
local function hot_table(list, arch)
  local lines, complaints, by_name = {}, {}, {}
  for _, r in ipairs(list) do by_name[r.file .. " " .. r.name] = r end
  for _, h in ipairs(hot) do
    local r = by_name[h.file .. " " .. h.kernel]
    if not r then
      complaints[#complaints + 1] = ("%s: no kernel %s in %s.cu"):format(h.name, h.kernel, h.file)
    else
      local inner = sass.inner(r.code, h.load and h.load / 8, h.with)
      local warps = resident(arch, r.registers, r.shared + (h.shared or 0))
      local flight = inner.bytes * 32 * warps * (h.part or 1)
      local wrong = wrongs(h, r, inner, flight, arch)
      for _, why in ipairs(wrong) do
        complaints[#complaints + 1] = ("%s (%s.cu, %s): %s"):format(h.name, h.file, h.kernel, why)
      end
      lines[#lines + 1] = ("| %s | %d | %d | %d | %d %% | %s | %s | %.0f | %.0f | %.1f%s |"):format(h.name, r.registers,
        r.spills, r.shared + (h.shared or 0), 100 * warps / WARPS, inner.loads, inner.stores, h.row.floor, h.row.moved,
        flight / 1000, #wrong > 0 and " **(fails)**" or h.flight and " (not held to it)" or "")
    end
  end
  return lines, complaints
end

local COLUMNS = [[
| kernel | registers | spills | shared memory | occupancy | loads of the inner loop | stores | bytes a row: floor | moved | kB in flight |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |]]

local function page_table(arch, number, lines)
  return ("\nsm_%s (%s: %.1f TB/s, %d multiprocessors; asked for: %.1f kB in flight on each)\n\n%s\n%s\n"):format(
    number, arch.name, arch.bandwidth / 1e12, arch.processors, needed(arch) / 1000, COLUMNS, table.concat(lines, "\n"))
end

local function put(path, text)
  local file = assert(io.open(path))
  local old = file:read "*a"
  file:close()
  local first, last = "<!-- cuda-report -->\n", "<!-- end of cuda-report -->"
  local from, to = old:find(first, 1, true), old:find(last, 1, true)
  assert(from and to, path .. ": the marks of the table are not there")
  local new = old:sub(1, from + #first - 1) .. text .. "\n" .. old:sub(to)
  if new == old then return end
  file = assert(io.open(path, "w"))
  file:write(new)
  file:close()
end

local function main()
  local options, folders = { nvdisasm = "nvdisasm" }, {}
  local i = 1
  while arg[i] do
    local option = arg[i]:match "^%-%-(%w+)$"
    if option then options[option], i = arg[i + 1], i + 1 else folders[#folders + 1] = arg[i] end
    i = i + 1
  end
  local text, failed = {}, 0
  for _, entry in ipairs(folders) do
    local number, folder = entry:match "^(%d+):(.+)$"
    local arch = ARCHS[number] or error("no limits are known of sm_" .. tostring(number), 0)
    local list = read(folder, options.nvdisasm, arch)
    write_all(list, folder .. "/report.txt")
    local lines, complaints = hot_table(list, arch)
    text[#text + 1] = page_table(arch, number, lines)
    for _, why in ipairs(complaints) do print(("FAILED sm_%s: %s"):format(number, why)) end
    failed = failed + #complaints
    print(("sm_%s: %d kernels in %s/report.txt, %d hot ones"):format(number, #list, folder, #lines))
  end
  if options.doc then put(options.doc, table.concat(text)) else print(table.concat(text)) end
  return failed
end

local ok, failed = pcall(main)
if not ok then
  io.stderr:write("cuda-report: ", tostring(failed), "\n")
  os.exit(2)
end
os.exit(failed == 0 and 0 or 1)
