-- driver.lua: whether a driver and a GPU are here, asked before `make gpu-check` and `make demo DEVICE=cuda` build for
-- minutes. Nothing of Perilune is needed.
--
--   luajit tests/gpu/driver.lua [cuda|cuda:N|cuda_host [demo]]   (cuda_host, the pretended GPU, needs no driver)
--   luajit tests/gpu/driver.lua count     prints how many GPUs the driver gives this process; 0: none, or no driver
local device, whose = arg[1] or "cuda", arg[2] or "gpu-check"
if device == "cuda_host" then os.exit(0) end

local ffi = require "ffi"
ffi.cdef "int cuInit(unsigned flags); int cuDeviceGetCount(int *n);"

local n = ffi.new "int[1]"

local function reason()
  if device ~= "cuda" and device ~= "count" and not device:match "^cuda:%d+$" then
    return ("%s is '%s', allowed: cuda, cuda:<number>, cuda_host"):format(whose == "demo" and "DEVICE" or "GPU", device)
  end
  local there, driver = pcall(ffi.load, "libcuda.so.1")
  if not there then return "no driver is here: " .. driver end
  local status = driver.cuInit(0)
  if status == 0 then status = driver.cuDeviceGetCount(n) end
  if status == 100 or (status == 0 and n[0] == 0) then -- CUDA_ERROR_NO_DEVICE
    return "the driver sees no GPU (CUDA_VISIBLE_DEVICES hides them, if it is set)"
  end
  if status ~= 0 then return ("the driver cannot be used: its cuInit returned %d"):format(status) end
end

local why = reason()
if device == "count" then
  print(why and 0 or n[0])
elseif why and whose == "demo" then
  print(("make demo: %s\nnothing was built; without DEVICE=%s the demonstration trains on processors, with "
    .. "DEVICE=cuda_host on a pretended GPU"):format(why, device))
  os.exit(1)
elseif why then
  print(("gpu-check: %s\nnothing was built or checked; GPU=cuda_host runs the same on a pretended GPU"):format(why))
  print "0 passed, 1 failed, 0 skipped"
  os.exit(1)
end
