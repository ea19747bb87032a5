-- handles.lua: the life of what C made: handles, which are released by the scope in which they were made, or by the
-- garbage collector. And memory pressure: the collector does not see how large they are.
local ffi = require "ffi"
local errors = require "perilune.errors"
local util = require "perilune.util"
local C = require("perilune.library").C
local state = require("perilune.state").now

local M = {}
local locate, fail = errors.locate, errors.fail
-- Functions as upvalues are constants of compiled code; those that are looked up in a table, or among the globals, are
-- six more instructions each time, and most of a trace is calls of what stands here.
local istype, gc, type = ffi.istype, ffi.gc, type

-- -- sparing memory ---------------------------------------------------------------------------------------------------

-- The garbage after which the collector begins again while memory is spared: so many KiB, or this share (%) of Lua's
-- heap if that is more. A collection visits the whole heap, so a fixed amount would make its costs grow with the square
-- of the number of tables.
local GARBAGE, SHARE = 16 * 1024, 25
local sparing, pause, stepmul = 0, nil, nil

local function spared(ok, ...)
  sparing = sparing - 1
  if sparing == 0 then
    collectgarbage("setpause", pause)
    collectgarbage("setstepmul", stepmul)
  end
  if not ok then error((...), 0) end
  return ...
end

--- Run f(...), which makes much garbage, such that there is little of it at any time: LuaJIT's collector begins when
--- there is as much garbage as there are objects, and a model of 10,000 tables has 50 MiB of them. Returns what f
--- returns.
function M.sparing(f, ...)
  sparing = sparing + 1
  if sparing == 1 then
    local share = math.max(SHARE, math.min(100, math.ceil(100 * GARBAGE / collectgarbage "count")))
    pause = collectgarbage("setpause", 200)
    collectgarbage("setpause", math.min(pause, 100 + share))
    stepmul = collectgarbage("setstepmul", 1000000) -- a cycle ends within some KiB of new garbage
    if share < 100 then collectgarbage("step", 0) end -- begin a cycle, which goes on as garbage comes
  end
  return spared(xpcall(f, locate, ...))
end

-- -- handles ----------------------------------------------------------------------------------------------------------

local PRESSURE = 128 * 1024 * 1024 -- bytes of garbage outside Lua's heap after which a collection is forced
local made, least, in_use = 0, math.huge, 0

--- Collect what the collector cannot see the size of. `least` is the fewest bytes that were live since the last
--- collection: a step that releases what it makes never waits for a collection, however much that is. `in_use` is by
--- how much memory had grown beyond that when the last collection ended, which could not release it: a step that holds
--- as much again at the same time would force a collection each time, in vain.
local function relieve()
  if state.capturing then return end -- what is collected could ask the device something
  local live = tonumber(C.peri_mem_live())
  least = math.min(least, live)
  if live - least > in_use + PRESSURE then
    collectgarbage()
    collectgarbage()
    live = tonumber(C.peri_mem_live())
    in_use, least = math.max(0, live - least), live
  end
end

local operators = { __add = "+", __sub = "-", __mul = "*", __div = "/", __mod = "%", __pow = "^", __concat = "..",
  __lt = "<", __le = "<=" }
local refusals = { __unm = "operator '-'", __len = "length '#'", __call = "call: it is no function",
  __pairs = "pairs: it is no table", __ipairs = "ipairs: it is no table" }

local methods_of = {} -- list of { ctype, methods } of all handles

--- The methods of a handle; nil: x is none.
function M.methods_of(x)
  for _, entry in ipairs(methods_of) do
    if istype(entry[1], x) then return entry[2] end
  end
end

--- Give a handle's metatable our words for all that it does not do: LuaJIT's own would be those of the C struct.
local function refuse(meta, text)
  local function add(event, words)
    meta[event] = meta[event] or function(a, b) fail(words(a, b)) end
  end
  for event, operator in util.ordered(operators) do
    add(event, function(a, b)
      return ("no operator '%s' for %s and %s"):format(operator, errors.kind(a), errors.kind(b))
    end)
  end
  for event, words in util.ordered(refusals) do
    add(event, function() return ("%s has no %s"):format(text, words) end)
  end
  add("__newindex", function(_, key) return ("%s has no field %s that could be set"):format(text, errors.kind(key)) end)
end

--- The methods, and our words for a name that is not among them: LuaJIT's own would be those of the C struct.
local function or_refused(methods, text)
  return setmetatable(methods, { __index = function(_, key)
    if type(key) == "string" then util.unknown(text, key, { methods }, "method ") end
    fail(("%s is not indexed with %s; its elements: to_table(), to_list(), item(position from 0)"):format(text,
      errors.kind(key)))
  end })
end

--- function(x): an error unless x is what C made: a handle instead would have two owners, and be freed twice.
local function pointer_check(name, ctype, text)
  local pointer_type = ffi.typeof(name .. " *")
  return function(x)
    if type(x) == "cdata" and not istype(ctype, x) and istype(pointer_type, x) then return end
    fail(("%s is made of what C made (%s *), not of %s"):format(text, name, errors.kind(x)))
  end
end

--- Define a handle class over `struct <name>_ref { <name> *ptr; }`: returns wrap(pointer) -> handle, its ctype, and
--- ptr(handle) -> pointer, which is an error unless it gets a live handle, or a lazy awaitable that stands for one;
--- `text` names the class in that error. A handle made inside a scope is released when the scope ends; one made outside
--- is released by the garbage collector; handle:release() does it at once. Fourth, a wrap whose handles no scope
--- releases, wherever they are made. `meta` (optional) is the metatable; its __index, if it has one, must look methods
--- up itself. Functions that make a handle end with `return (wrap(out[0]))`: in parentheses it is no tail call, of
--- which compiled code has few (signature.lua, guard).
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
    if not istype(ctype, y) then fail(("%s is wanted, got %s"):format(text, errors.kind(y))) end
    if y.ptr == nil then fail(text .. ": it was released (did it outlive its scope? keep it with peri.keep)") end
    return y.ptr
  end
  local function pointer(x)
    if istype(ctype, x) then
      local p = x.ptr
      if p ~= nil then return p end
    end
    return unusable(x)
  end
  function methods.release(h)
    if not istype(ctype, h) then
      pointer(h) -- an error unless a lazy awaitable stands for one
      h = util.resolve(h)
    end
    finalize(h)
  end
  local function wrap_lasting(ptr)
    check_pointer(ptr)
    local h = ctype(ptr)
    gc(h, finalize)
    made = made + 1
    if made >= 64 then
      made = 0
      relieve()
    end
    return h
  end
  local function wrap(ptr)
    local scope = state.scope
    if not scope then return (wrap_lasting(ptr)) end
    check_pointer(ptr)
    local h = ctype(ptr)
    local n = scope.n + 1
    scope.n = n
    scope[n] = h
    return h
  end
  return wrap, ctype, pointer, wrap_lasting
end

-- -- scopes -----------------------------------------------------------------------------------------------------------

local Scope = {}
Scope.__index = Scope
local spare = {}
--- stays: nothing releases it at its end; call: a call from C runs in it.
local function new_scope(stays)
  return setmetatable({ n = 0, outer = false, unfinished = false, stays = stays, call = false }, Scope)
end
local unfinished = false -- the scope whose end was begun last and is not over; its `unfinished`: the one before it

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
        gc(h, h.release)
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

--- Release what is left in scopes whose end failed: where Lua has no memory, reading a handle's pointer fails.
local function finish_all()
  while unfinished do
    local scope = unfinished
    release_all(scope)
    unfinished = scope.unfinished
    scope.unfinished, scope.outer = false, false
    spare[#spare + 1] = scope
  end
end

local function leave(scope)
  state.scope = scope.outer
  scope.call = false
  if scope.stays then
    scope.outer = false
    return
  end
  scope.unfinished, unfinished = unfinished, scope
  finish_all()
end

--- A call from C (hosted.lua), which comes from no other one, runs in the current scope.
function M._begin_call() state.scope.call = true end
--- End the scope of a call from C, with all that were opened in it, if Lua had no memory to do so then.
function M._end_call()
  local of = state.scope
  while of and not of.call do of = of.outer end
  while of and of.call do leave(state.scope) end
end

-- When the state is closed, nothing runs in its scopes.
M._guard = gc(ffi.new "char[1]", function()
  while state.scope do leave(state.scope) end
  finish_all()
end)

local function finish(scope, ok, a, b, c, d)
  leave(scope)
  if not ok then error(a, 0) end
  return a, b, c, d
end

--- Run f(...) with up to six arguments; handles made meanwhile are released at its end, also when it fails. Returns
--- what f returns, up to four values (handles among them only if they were kept: f can reach the scope as
--- peri.ffi.state.scope, or use peri.keep). Not as `...`: that is not compiled.
function M.scope(f, a, b, c, d, e, g)
  if not util.is_callable(f) then fail(("scope: f is %s, wanted a function"):format(errors.kind(f))) end
  if unfinished then finish_all() end
  local scope = table.remove(spare) or new_scope(false)
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
--- Run f(...) outside any scope: handles that it makes live until they are released or collected. Returns what f
--- returns.
function M.lasting(f, ...)
  local scope = state.scope
  state.scope = false
  return outside(scope, xpcall(f, locate, ...))
end

--- Run f(a, b, ...) in the scope that was open when something was begun (state.scope then), so that the handles that it
--- makes live as long as if it had been finished then. A scope that is over: in the current one. Returns what f
--- returns, one value; at most six arguments.
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

--- A scope that is open now and then: `inside` runs a function in it, `close_scope` releases what was made there. It
--- can be used again.
function M.new_scope() return new_scope(true) end

local function come_out(scope, ok, a, b, c)
  state.scope = scope.outer
  scope.outer = false
  if not ok then error(a, 0) end
  return a, b, c
end
--- Run f(a, b, c) in a scope of new_scope, which stays; keep() moves a handle to the scope that was open before.
--- Returns what f returns, up to three values.
function M.inside(scope, f, a, b, c)
  scope.outer = state.scope
  state.scope = scope
  return come_out(scope, xpcall(f, locate, a, b, c))
end
errors.runners[M.inside] = true

--- Release what was made in a scope of new_scope, unless it was kept.
M.close_scope = release_all

--- Keep a handle beyond the end of all scopes, until the garbage collector finds that nobody has it: for what an
--- object needs as long as it lives. Returns it.
function M.keep_for_good(h)
  local scope = state.scope
  while scope do
    for i = scope.n, 1, -1 do
      if rawequal(scope[i], h) then
        scope[i] = false
        return gc(h, h.release)
      end
    end
    scope = scope.outer
  end
  return h
end

--- Keep a handle beyond the end of the current scope. Returns it.
function M.keep(h)
  local scope = state.scope
  return scope and scope:keep(h) or h
end

return M
