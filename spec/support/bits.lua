-- bits.lua: the bits of all numbers of an f32 tensor, as a string: two are equal where all numbers are, signs of zero
-- and NaN included.
local ffi = require "ffi"

return function(t)
  local buffer, n = t:read()
  return ffi.string(buffer, 4 * n)
end
