-- environment.lua: environment(name), a variable's text or nil. A program that runs with other rights than whoever
-- started it has (setuid, capabilities: AT_SECURE) has none: they would choose the libraries that it loads. C's files
-- go by secure_getenv for the same reason.
local ffi = require "ffi"

ffi.cdef "char *secure_getenv(const char *name);"

return function(name)
  local text = ffi.C.secure_getenv(name)
  return text ~= nil and ffi.string(text) or nil
end
