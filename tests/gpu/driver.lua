-- driver.lua: whether a driver and a GPU are here, asked before `make gpu-check` builds for minutes. Nothing of
-- Perilune is needed.
--
--   luajit tests/gpu/driver.lua [cuda|cuda:N|cuda_host]     (cuda_host, the pretended GPU, needs no driver)
local device = arg[1] or "cuda"
if device == "cuda_host" then os.exit(0) end

local ffi = require "ffi"
ffi.cdef "int cuInit(unsigned flags); int cuDeviceGetCount(int *n);"

local function reason()
  if device ~= "cuda" and not device:match "^cuda:%d+$" then
    return ("GPU is '%s', allowed: cuda, cuda:<number>, cuda_host"):format(device)
  end
  local there, driver = pcall(ffi.load, "libcuda.so.1")
  if not there then return "no driver is here: " .. driver end
  local status, n = driver.cuInit(0), ffi.new "int[1]"
  if status == 0 then status = driver.cuDeviceGetCount(n) end
  if status == 100 or (status == 0 and n[0] == 0) then -- CUDA_ERROR_NO_DEVICE
    return "the driver sees no GPU (CUDA_VISIBLE_DEVICES hides them, if it is set)"
  end
  if status ~= 0 then return ("the driver cannot be used: its cuInit returned %d"):format(status) end
end

local why = reason()
if why then
  print(("gpu-check: %s\nnothing was built or checked; GPU=cuda_host runs the same on a pretended GPU"):format(why))
  print "0 passed, 1 failed, 0 skipped"
  os.exit(1)
end
