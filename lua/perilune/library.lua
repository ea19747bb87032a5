-- library.lua: the only file that declares and loads C: the library, whose version it compares with that of the Lua
-- files, and Lua's own functions, by which a thread gets a state of Lua. What fails in C becomes an error. Others call
-- C through ffi.lua.
local ffi = require "ffi"
local errors = require "perilune.errors"
local getenv = require "perilune.environment"

require("perilune.compiler").settle()
local declarations = require "perilune.cdef"
ffi.cdef(declarations)
-- What handles.lua keeps of each object that C can release: no part of the C interface. A pattern of the whole
-- declaration would try each name of the text, which takes as long as all that C is declared by.
local at, last = declarations:find("_release(", 1, true)
while at do
  local of = declarations:match("^peri_[%w_]+", last + 1)
  if of and declarations:sub(at - #of - 5, at - 1) == "void " .. of then
    ffi.cdef(("typedef struct %s_ref { %s *ptr; } %s_ref;"):format(of, of, of))
  end
  at, last = declarations:find("_release(", last, true)
end

-- The launcher holds the library in itself; plain `luajit script.lua` loads it: PERI_LIBRARY, or where the tree
-- (lua/perilune/library.lua, build/libperilune.so) or an installation (share/lua/5.1/perilune/library.lua,
-- lib/libperilune.so) has it, or wherever the system finds it.
-- in a C program that runs Lua: { path = of the library, or nil: the program holds it }
local core = package.loaded["perilune.core"]

--- Whether all functions can be found in `lib`. Of an archive a linker takes what C calls, so not the second one.
local function exports_all(lib)
  return (pcall(function() return lib.peri_abi_version, lib.peri_op_pow end))
end

--- The library that a C program brings.
local function library_of_program()
  local lib = core.path and ffi.load(core.path) or ffi.C
  if exports_all(lib) then return lib end
  error(("perilune: %s holds the library and does not export all of its functions, so Lua cannot call them. Link it "
    .. "with %s, or with the shared library"):format(core.path and ("'%s'"):format(core.path) or "this program",
      core.path and "-Wl,--whole-archive -lperilune, and without -Wl,--exclude-libs"
        or "-rdynamic and -Wl,--whole-archive -lperilune"), 0)
end

local function load_library()
  if package.preload["perilune.launcher"] then return ffi.C end
  if core then return library_of_program() end
  local name = getenv "PERI_LIBRARY"
  if name then return ffi.load(name) end
  local own = debug.getinfo(1, "S").source
  local tree, prefix = own:match "^@(.*)lua/perilune/library%.lua$",
    own:match "^@(.*)share/lua/5%.1/perilune/library%.lua$"
  local places = { "perilune" }
  -- "": LUA_PATH is relative
  if tree then table.insert(places, 1, (tree == "" and "./" or tree) .. "build/libperilune.so") end
  if prefix then table.insert(places, 1, prefix .. "lib/libperilune.so") end
  local tried = {}
  for _, path in ipairs(places) do
    local ok, lib = pcall(ffi.load, path)
    if ok then return lib end
    tried[#tried + 1] = tostring(lib)
  end
  error("perilune: the library was not found. Run `make`, or set PERI_LIBRARY to libperilune.so. Tried:\n  "
    .. table.concat(tried, "\n  "), 0)
end

local C = load_library()
if C.peri_abi_version() ~= C.PERI_ABI_VERSION then
  error(("perilune: the library (contract %d) and the Lua files (contract %d) are from different builds; run "
    .. "`make`"):format(
    C.peri_abi_version(), C.PERI_ABI_VERSION), 0)
end

-- A training step is one long trace: LuaJIT's default limits would give it up. (loopunroll: where a step waits in a
-- loop, or goes through a list, its functions stayed interpreted; with 30 rounds loaders had traces of more values than
-- registers, one start in seven.) Code has to lie within 1 GiB of LuaJIT's own: hosts that map much later would leave
-- no room there. So all addresses that code may take are taken at once, by the first trace, which is this loop; memory
-- is taken as code comes. A host may have left smaller gaps only: then code takes them piece by piece. What was
-- compiled before this file ran is dropped first: otherwise the loop could go into what is left of that code's memory,
-- and would not tell whether there is room for more.
if jit.status() then
  jit.opt.start("maxrecord=40000", "maxirconst=4000", "maxsnap=4000", "maxtrace=4000", "maxmcode=16384",
    "loopunroll=20")
  for _, kib in ipairs { 16384, 64, 32 } do -- nothing between: where few gaps are larger, they would soon be used up
    jit.flush()
    jit.opt.start("sizemcode=" .. kib)
    assert(loadstring "for _ = 1, 200 do end")() -- a new loop: one that was given up is not compiled again
    if require "jit.util".traceinfo(1) then break end
  end
end

-- Of the program that runs this (luajit, or the launcher) and of the C library, under names that no other binding has
-- declared.
ffi.cdef [[
void *peri__lua_newstate(void) __asm__("luaL_newstate");
int peri__lua_cpcall(void *L, int (*f)(void *), void *x) __asm__("lua_cpcall");
void peri__lua_openlibs(void *L) __asm__("luaL_openlibs");
int peri__lua_load(void *L, const char *text, size_t n, const char *name) __asm__("luaL_loadbuffer");
void peri__lua_push(void *L, const char *text, size_t n) __asm__("lua_pushlstring");
const char *peri__lua_text(void *L, int at, size_t *n) __asm__("lua_tolstring");
int32_t peri__lua_pcall(void *L, int32_t n_args, int32_t n_results, int32_t handler) __asm__("lua_pcall");
void peri__lua_close(void *L) __asm__("lua_close");
int peri__process(void) __asm__("getpid");
]]

--- Pass a status through, or raise the error that it stands for.
local function check(status)
  if status < 0 then
    errors.raise { code = status, name = ffi.string(C.peri_status_name(status)),
      message = ffi.string(C.peri_error_message()), where = ffi.string(C.peri_error_where()) }
  end
  return status
end

return { C = C, check = check, lua = core and core.luajit and ffi.load(core.luajit) or ffi.C }
