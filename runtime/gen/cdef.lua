-- cdef.lua: preprocessed public headers on stdin -> a Lua module that declares them to the FFI.
--
-- Usage: cc -E -DPERI_CDEF_PASS perilune.h | luajit cdef.lua <folder of our headers> > cdef.lua
-- Only lines whose line marker names a file of that folder are kept; runs of white space become one blank.
local folder = assert(arg[1], "usage: cdef.lua <folder of the public headers>")
local keep, kept = false, {}
for line in io.lines() do
  local file = line:match '^#%s+%d+%s+"(.-)"'
  if file then
    keep = file:find(folder, 1, true) ~= nil
  elseif keep and not line:match "^%s*$" then
    kept[#kept + 1] = (line:gsub("%s+", " "):gsub("^ ", ""):gsub(" $", ""))
  end
end
if #kept == 0 then
  io.stderr:write("cdef.lua: no declarations from " .. folder .. "\n")
  os.exit(1)
end
local text = table.concat(kept, "\n")
-- Declarations that the FFI cannot parse must fail the build here, not a user's run.
local ok, err = pcall(require("ffi").cdef, text)
if not ok then
  io.stderr:write("cdef.lua: the public headers are not cdef-clean: " .. tostring(err) .. "\n")
  os.exit(1)
end
io.write("-- Generated from runtime/include/perilune by runtime/gen/cdef.lua. Do not edit.\nreturn [==[\n", text,
  "\n]==]\n")
