-- ffi.lua: the only file that declares and loads C. It checks that library and Lua files belong together, turns statuses into errors,
-- and owns the handles' life: scopes, finalizers, memory pressure, and the state that belongs to the running rank.
local ffi = require "ffi"
local errors = require "perilune.errors"
local getenv = require "perilune.environment"
local util = require "perilune.util"

require("perilune.compiler").settle()
ffi.cdef(require "perilune.cdef")

-- The launcher holds the library in itself; plain `luajit script.lua` loads it: PERI_LIBRARY, or where the tree (lua/perilune/ffi.lua,
-- build/libperilune.so) or an installation (share/lua/5.1/perilune/ffi.lua, lib/libperilune.so) has it, or wherever the system finds it.
local core = package.loaded["perilune.core"] -- in a C program that runs Lua: { path = of the library, or nil: the program holds it }
local function load_library()
  if package.preload["perilune.launcher"] then return ffi.C end
  if core then
    if core.path then return ffi.load(core.path) end
    if pcall(function() return ffi.C.peri_abi_version end) then return ffi.C end
    error("perilune: this program holds the library and does not export its functions, so Lua cannot call them. Link it with -rdynamic "
      .. "and -Wl,--whole-archive -lperilune, or with the shared library", 0)
  end
  local name = getenv "PERI_LIBRARY"
  if name then return ffi.load(name) end
  local own = debug.getinfo(1, "S").source
  local tree, prefix = own:match "^@(.*)lua/perilune/ffi%.lua$", own:match "^@(.*)share/lua/5%.1/perilune/ffi%.lua$"
  local places = { "perilune" }
  if tree then table.insert(places, 1, (tree == "" and "./" or tree) .. "build/libperilune.so") end -- "": LUA_PATH is relative
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
  error(("perilune: the library (contract %d) and the Lua files (contract %d) are from different builds; run `make`"):format(
    C.peri_abi_version(), C.PERI_ABI_VERSION), 0)
end

-- A training step is one long trace: LuaJIT's default limits would give it up. (loopunroll: where a step waits in a loop, or goes through
-- a list, its functions stayed interpreted; with 30 rounds loaders had traces of more values than registers, one start in seven.)
if jit.status() then
  jit.opt.start("maxrecord=40000", "maxirconst=4000", "maxsnap=4000", "maxtrace=4000", "sizemcode=256", "maxmcode=16384", "loopunroll=20")
end

local M = { C = C }

-- -- errors ----------------------------------------------------------------------------------------------------------------------

--- What failing calls raise: see errors.lua.
M.Error = errors.Error
--- The handler of protected calls that pass errors on: xpcall(f, P.locate, ...) instead of pcall(f, ...).
local locate = errors.locate
M.locate = locate

--- The state of the running rank. Under `sim` the scheduler exchanges it when it switches ranks, so nothing else may cache it.
--- scope: open scope or nil; device: default device name; grad: recording; world: the joined world or nil; pause: how to wait;
--- seed, parameters_drawn, dropouts_made, numbers_drawn: of random numbers (nn/parameter.lua); batch: that a module runs with, if it says
--- which samples it has, or false (nn/module.lua); failed_world: the error of a world that was left after it, or false; ec_index_dedup:
--- of shard/dedup.lua; place: { rank, world size } where there is no world (in a loader's thread); streams: { device =, stream =, outer
--- = }, the current streams that are not the default ones; deferring: ids of sharded modules do not set out yet (shard/module.lua);
--- pin: in a worker of a loader, the device (a name) for which batches are made in pinned memory, or false; autocast: the innermost
--- region (a pointer), or false; stop: what this rank knows of a request to stop (stop.lua), or false; saves: the last asynchronous
--- save of this rank, { progress = function(), finish = function(), last = } (checkpoint/async.lua), or false; watched: the group (a
--- pointer) whose world notes what this rank waits for, or false; anomaly: what looks for NaN (nn/anomaly.lua), or false.
local state = {
  scope = false, device = getenv "PERI_DEVICE" or "cpu", streams = false, grad = true, autocast = false,
  world = false, seed = 0, parameters_drawn = 0, dropouts_made = 0, numbers_drawn = 0, batch = false,
  ec_index_dedup = false, failed_world = false, place = false, deferring = false,
  watched = false, pin = false, stop = false, saves = false, anomaly = false,
}
M.state = state

function errors.rank() return state.world and state.world.rank_number or nil end

local function raise(status)
  errors.raise {
    code = status,
    name = ffi.string(C.peri_status_name(status)),
    message = ffi.string(C.peri_error_message()),
    where = ffi.string(C.peri_error_where()),
  }
end

--- Pass a status through, or raise the error that it stands for.
local function check(status)
  if status < 0 then raise(status) end
  return status
end
M.check = check

--- An error of the same kind for misuse found in Lua.
M.fail = errors.fail

-- -- waiting -----------------------------------------------------------------------------------------------------------------------

--- Give other ranks a chance. `round` counts the calls of one wait. Under `sim` it switches to the next rank.
function M.pause(round)
  if state.watched then C.peri_group_waits(state.watched) end
  if state.yield then return state.yield(round) end
  C.peri_pause(round)
end

-- -- handles -----------------------------------------------------------------------------------------------------------------------

local PRESSURE = 128 * 1024 * 1024 -- off-heap bytes that came since there were fewest, before a collection is forced
local made, least = 0, math.huge

--- Collect what the collector cannot see the size of. What was released since does not count: a step that releases what it makes never
--- waits for a collection, however much that is.
local function relieve()
  local live = tonumber(C.peri_mem_live())
  least = math.min(least, live)
  if live - least > PRESSURE then
    collectgarbage()
    collectgarbage()
    least = tonumber(C.peri_mem_live())
  end
end

local operators = { __add = "+", __sub = "-", __mul = "*", __div = "/", __mod = "%", __pow = "^", __concat = "..", __lt = "<", __le = "<=" }
local refusals = { __unm = "operator '-'", __len = "length '#'", __call = "call: it is no function", __pairs = "pairs: it is no table",
  __ipairs = "ipairs: it is no table" }

local methods_of = {} -- list of { ctype, methods } of all handles

--- The methods of a handle; nil: x is none.
function M.methods_of(x)
  for _, entry in ipairs(methods_of) do
    if ffi.istype(entry[1], x) then return entry[2] end
  end
end

--- Give a handle's metatable our words for all that it does not do: LuaJIT's own would be those of the C struct.
local function refuse(meta, text)
  local function add(event, words)
    meta[event] = meta[event] or function(a, b) M.fail(words(a, b)) end
  end
  for event, operator in util.ordered(operators) do
    add(event, function(a, b) return ("no operator '%s' for %s and %s"):format(operator, errors.kind(a), errors.kind(b)) end)
  end
  for event, words in util.ordered(refusals) do add(event, function() return ("%s has no %s"):format(text, words) end) end
  add("__newindex", function(_, key) return ("%s has no field %s that could be set"):format(text, errors.kind(key)) end)
end

--- The methods, and our words for a name that is not among them: LuaJIT's own would be those of the C struct.
local function or_refused(methods, text)
  return setmetatable(methods, { __index = function(_, key)
    if type(key) == "string" then util.unknown(text, key, { methods }, "method ") end
    M.fail(("%s is not indexed with %s; its elements: to_table(), to_list(), item(position from 0)"):format(text, errors.kind(key)))
  end })
end

--- function(x): an error unless x is what C made: a handle instead would have two owners, and be freed twice.
local function pointer_check(name, ctype, text)
  local pointer_type = ffi.typeof(name .. " *")
  return function(x)
    if type(x) == "cdata" and not ffi.istype(ctype, x) and ffi.istype(pointer_type, x) then return end
    M.fail(("%s is made of what C made (%s *), not of %s"):format(text, name, errors.kind(x)))
  end
end

--- Define a handle class over `struct <name>_ref { <name> *ptr; }`: returns wrap(pointer) -> handle, its ctype, and ptr(handle) -> pointer,
--- which is an error unless it gets a live handle, or a lazy awaitable that stands for one; `text` names the class in that error.
--- A handle made inside a scope is released when the scope ends; one made outside is released by the garbage collector; handle:release()
--- does it at once. Fourth, a wrap whose handles no scope releases, wherever they are made. `meta` (optional) is the metatable; its
--- __index, if it has one, must look methods up itself.
function M.handle(name, methods, meta, text)
  text, meta = text or (name:gsub("^peri_", "")), meta or {}
  local release_name = name .. "_release"
  local release = function(ptr) C[release_name](ptr) end
  local function finalize(h)
    if h.ptr ~= nil then
      release(h.ptr)
      h.ptr = nil
    end
  end
  meta.__index = meta.__index or or_refused(methods, text)
  refuse(meta, text)
  local ctype = ffi.metatype(name .. "_ref", meta)
  methods_of[#methods_of + 1] = { ctype, methods }
  local check_pointer = pointer_check(name, ctype, text)
  local function unusable(x)
    local y = util.resolve(x)
    if not ffi.istype(ctype, y) then M.fail(("%s is wanted, got %s"):format(text, errors.kind(y))) end
    if y.ptr == nil then M.fail(text .. ": it was released (did it outlive its scope? keep it with peri.keep)") end
    return y.ptr
  end
  local function pointer(x)
    if ffi.istype(ctype, x) then
      local p = x.ptr
      if p ~= nil then return p end
    end
    return unusable(x)
  end
  function methods.release(h)
    if not ffi.istype(ctype, h) then
      pointer(h) -- an error unless a lazy awaitable stands for one
      h = util.resolve(h)
    end
    finalize(h)
  end
  local function wrap_lasting(ptr)
    check_pointer(ptr)
    local h = ctype(ptr)
    ffi.gc(h, finalize)
    made = made + 1
    if made >= 64 then
      made = 0
      relieve()
    end
    return h
  end
  local function wrap(ptr)
    local scope = state.scope
    if not scope then return wrap_lasting(ptr) end
    check_pointer(ptr)
    local h = ctype(ptr)
    local n = scope.n + 1
    scope.n = n
    scope[n] = h
    return h
  end
  return wrap, ctype, pointer, wrap_lasting
end

-- -- scopes ------------------------------------------------------------------------------------------------------------------------

local Scope = {}
Scope.__index = Scope
local spare = {}

--- Keep a handle beyond the scope's end: it moves to the outer scope or to the garbage collector. Returns it.
function Scope:keep(h)
  for i = self.n, 1, -1 do
    if rawequal(self[i], h) then
      self[i] = false
      local outer = self.outer
      if outer then
        outer.n = outer.n + 1
        outer[outer.n] = h
      else
        ffi.gc(h, h.release)
      end
      return h
    end
  end
  return h
end

local function release_all(scope)
  for i = 1, scope.n do
    local h = scope[i]
    if h then h:release() end
    scope[i] = false
  end
  scope.n = 0
end

local function leave(scope)
  state.scope = scope.outer
  release_all(scope)
  scope.outer = false
  spare[#spare + 1] = scope
end

local function finish(scope, ok, a, b, c, d)
  leave(scope)
  if not ok then error(a, 0) end
  return a, b, c, d
end

--- Run f(...) with up to six arguments; handles made meanwhile are released at its end, also when it fails. Returns what f returns, up to
--- four values (handles among them only if they were kept: f can reach the scope as peri.ffi.state.scope, or use peri.keep). Not as `...`:
--- that is not compiled.
function M.scope(f, a, b, c, d, e, g)
  if not util.is_callable(f) then M.fail(("scope: f is %s, wanted a function"):format(errors.kind(f))) end
  local scope = table.remove(spare) or setmetatable({ n = 0, outer = false }, Scope)
  scope.outer = state.scope
  state.scope = scope
  return finish(scope, xpcall(f, locate, a, b, c, d, e, g))
end
errors.runners[M.scope] = true

local function outside(scope, ok, ...)
  state.scope = scope
  if not ok then error((...), 0) end
  return ...
end
--- Run f(...) outside any scope: handles that it makes live until they are released or collected. Returns what f returns.
function M.lasting(f, ...)
  local scope = state.scope
  state.scope = false
  return outside(scope, xpcall(f, locate, ...))
end

--- Run f(a, b, ...) in the scope that was open when something was begun (state.scope then), so that the handles that it makes live as long
--- as if it had been finished then. A scope that is over: in the current one. Returns what f returns, one value; at most six arguments.
function M.within(scope, f, a, b, c, d, e, g)
  local now = state.scope
  local at = now
  while at and at ~= scope do at = at.outer end
  if at == now or at ~= scope then return f(a, b, c, d, e, g) end
  state.scope = scope
  local ok, result = xpcall(f, locate, a, b, c, d, e, g)
  state.scope = now
  if not ok then error(result, 0) end
  return result
end

--- A scope that is open now and then: `inside` runs a function in it, `close_scope` releases what was made there. It can be used again.
function M.new_scope() return setmetatable({ n = 0, outer = false }, Scope) end

local function come_out(scope, ok, a, b, c)
  state.scope = scope.outer
  scope.outer = false
  if not ok then error(a, 0) end
  return a, b, c
end
--- Run f(a, b, c) in a scope of new_scope, which stays; keep() moves a handle to the scope that was open before. Returns what f returns, up
--- to three values.
function M.inside(scope, f, a, b, c)
  scope.outer = state.scope
  state.scope = scope
  return come_out(scope, xpcall(f, locate, a, b, c))
end
errors.runners[M.inside] = true

--- Release what was made in a scope of new_scope, unless it was kept.
M.close_scope = release_all

--- Keep a handle beyond the end of the current scope. Returns it.
function M.keep(h)
  local scope = state.scope
  return scope and scope:keep(h) or h
end

--- Run f(...) without recording gradients.
local function restore_grad(before, ok, ...)
  state.grad = before
  C.peri_grad_enable(before)
  if not ok then error((...), 0) end
  return ...
end
function M.no_grad(f, ...)
  if not util.is_callable(f) then M.fail(("no_grad: f is %s, wanted a function"):format(errors.kind(f))) end
  local before = state.grad
  state.grad = false
  C.peri_grad_enable(false)
  return restore_grad(before, xpcall(f, locate, ...))
end
errors.runners[M.no_grad] = true

--- Tell C the current stream of a device, after state.streams has changed.
function M.set_stream(device)
  local at = state.streams
  while at and at.device ~= device do at = at.outer end
  check(C.peri_stream_set_current(device, at and at.stream.ptr or nil))
end

local function set_streams(at)
  while at do
    M.set_stream(at.device)
    at = at.outer
  end
end

--- Exchange `state` with that of another rank, and what C keeps for each thread with it.
function M.exchange_state(other)
  local before = state.streams
  util.exchange(state, other)
  C.peri_grad_enable(state.grad)
  C.peri_autocast_swap(state.autocast or nil)
  set_streams(before)
  set_streams(state.streams)
end

-- -- other states of Lua -----------------------------------------------------------------------------------------------------------

-- Of the program that runs this (luajit, or the launcher), under names that no other binding has declared.
ffi.cdef [[
void *peri__lua_newstate(void) __asm__("luaL_newstate");
int peri__lua_cpcall(void *L, int (*f)(void *), void *x) __asm__("lua_cpcall");
void peri__lua_openlibs(void *L) __asm__("luaL_openlibs");
int peri__lua_load(void *L, const char *text, size_t n, const char *name) __asm__("luaL_loadbuffer");
void peri__lua_push(void *L, const char *text, size_t n) __asm__("lua_pushlstring");
const char *peri__lua_text(void *L, int at, size_t *n) __asm__("lua_tolstring");
int32_t peri__lua_pcall(void *L, int32_t n_args, int32_t n_results, int32_t handler) __asm__("lua_pcall");
void peri__lua_close(void *L) __asm__("lua_close");
]]

--- A state of Lua with the standard libraries and on its stack the function of `text` and its arguments (strings): { ptr, pcall, close (C
--- functions) }. It shares nothing with this one but the C library, and belongs to the caller. For threads.
function M.new_lua(name, text, ...)
  local lua = core and core.luajit and ffi.load(core.luajit) or ffi.C
  local has, L = pcall(function() return lua.peri__lua_newstate() end)
  if not has then M.fail(name .. ": this program does not export Lua's C functions, so it can have no other state of Lua") end
  if L == nil then M.fail(name .. ": no memory for a state of Lua") end
  local launcher = package.preload["perilune.launcher"] and require "perilune.launcher"
  if launcher then lua.peri__lua_cpcall(L, ffi.cast("int (*)(void *)", launcher.prepare), nil)
  else lua.peri__lua_openlibs(L) end
  if lua.peri__lua_load(L, text, #text, "=perilune/" .. name) ~= 0 then M.fail(("%s: %s"):format(name, M.lua_text(L))) end
  for i = 1, select("#", ...) do
    local x = select(i, ...)
    lua.peri__lua_push(L, x, #x)
  end
  return { ptr = L, pcall = lua.peri__lua_pcall, close = lua.peri__lua_close }
end

--- The text on top of the stack of such a state, which nobody runs now: the error that its function ended with.
function M.lua_text(ptr)
  local lua = core and core.luajit and ffi.load(core.luajit) or ffi.C
  local text = lua.peri__lua_text(ptr, -1, nil)
  return text ~= nil and ffi.string(text) or "an error without a message"
end

-- -- structures that begin with their size ------------------------------------------------------------------------------------------

--- A structure of C's, such as "peri_kjt_args": zeros, or `init`, and its size, which every such structure begins with.
function M.struct(name, init)
  local s = init and ffi.new(name, init) or ffi.new(name)
  s.size = ffi.sizeof(name)
  return s
end

--- An array of n of them.
function M.structs(name, n)
  local list = ffi.new(name .. "[?]", n)
  for i = 0, n - 1 do list[i].size = ffi.sizeof(name) end
  return list
end

--- Zeros in all of structure `s` but its size.
function M.clear(s)
  local size = s.size
  ffi.fill(s, size)
  s.size = size
end

-- -- small conversions -------------------------------------------------------------------------------------------------------------

M.dtype_names = {}
for code = 0, C.PERI_DTYPE_COUNT - 1 do M.dtype_names[code] = ffi.string(C.peri_dtype_name(code)) end

local dtype_codes = {}
--- "f32" -> C.PERI_F32. Numbers pass through.
function M.dtype(name)
  local code = dtype_codes[name]
  if code then return code end
  if type(name) == "number" and M.dtype_names[name] then return name end
  code = check(C.peri_dtype_parse(tostring(name)))
  dtype_codes[name] = code
  return code
end

local devices, device_out, device_type = {}, ffi.new "peri_device *[1]", ffi.typeof "peri_device *"
--- A device by name (nil: the default one of this rank). Devices live as long as the process.
function M.device(name)
  name = name or state.device
  if type(name) ~= "string" then
    if type(name) == "cdata" and ffi.istype(device_type, name) and name ~= nil then return name end
    M.fail(("device: %s, wanted a device's name"):format(errors.kind(name)))
  end
  local d = devices[name]
  if not d then
    check(C.peri_device_get(name, device_out))
    d = device_out[0]
    devices[name] = d
  end
  return d
end

M.util = util
return M
