-- luacheck's settings: LuaJIT's globals, busted's in spec/.
std = "luajit"
max_line_length = false -- lint says it, and leaves out what strings quote
unused_args = false
self = false
files["spec"] = { std = "+busted" }
files["lua/perilune/reference"] = { ignore = { "241", "431" } } -- definition files: their tables are only described
