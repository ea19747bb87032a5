-- device.lua: opens a device, says what it is and how many like it there are, and computes a sum on it.
local peri = require "perilune"
local device = arg[1] or "cuda"
local x = peri.full({ 1000 }, 2, "f32", device)
assert(x:sum():item() == 2000, "1,000 twos do not make 2,000")
local count = 1
while count < 64 and pcall(peri.zeros, { 1 }, "f32", ("%s:%d"):format(device, count)) do count = count + 1 end
print(("%s: %s"):format(x:device(), "computes"))
print(("%d device%s"):format(count, count == 1 and "" or "s"))
