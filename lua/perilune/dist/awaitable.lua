-- awaitable.lua: results that are still on their way.
--
--   Awaitable       wait() returns the result; waiting again returns the same one. `callbacks` run in order on the
--                   first wait, each gets
--                   what the one before returned. The result may be an awaitable itself (splits first,
--                     then tensors): wait():wait().
--   LazyAwaitable   the same, and it also stands for its result: the first use of a field, method or operator waits.
--   NoWait, LazyNoWait  a result that is there already.
--   GetItemLazyAwaitable  one element of the result of another awaitable.
local ffi = require "ffi"
local P = require "perilune.ffi"
local errors = require "perilune.errors"
local util = require "perilune.util"
local signature = require "perilune.signature"
local C, check, state = P.C, P.check, P.state

local M = {}

-- -- works ------------------------------------------------------------------------------------------------------------

local _, _, _, wrap_work = P.handle("peri_work", {}, nil, "an operation")

local work_type = ffi.typeof "peri_work *"

--- A handle of a work that lives until it is waited for or collected, whatever scope is open. `ptr` is a new reference.
function M.wrap_work(ptr)
  if type(ptr) ~= "cdata" or not ffi.istype(work_type, ptr) then
    P.fail(("an operation is wanted (made by the functions that post one), not a %s"):format(type(ptr)))
  end
  return wrap_work(ptr)
end

--- Wait for a C work. Ranks of a sim world take turns; others block in C, within the deadlines.
local function wait_work(ptr)
  if ptr == nil then P.fail "an operation: it was released, or waited for already" end
  if not state.yield then
    check(C.peri_work_wait(ptr))
    return
  end
  local round = 0
  while check(C.peri_work_test(ptr)) == C.PERI_PENDING do
    if state.watched then C.peri_work_waits(ptr) end
    P.pause(round)
    round = round + 1
  end
end
M.wait_work = wait_work

--- Wait for the work of a handle; if it fails, release it, as nobody is going to ask it for results.
function M.finish_work(work)
  local ok, err = xpcall(wait_work, P.locate, work.ptr)
  if ok then return end
  work:release()
  error(err, 0)
end

-- -- Awaitable --------------------------------------------------------------------------------------------------------

local Awaitable = util.class "Awaitable"
M.Awaitable = Awaitable

--- Fields come as they are needed: `callbacks` with the first one, `_state` ("waiting", then "done" with _result, or
--- "failed") with wait().
function Awaitable:init() end -- luacheck: ignore 212

--- What a class of awaitables defines: wait (through other awaitables, or P.pause) and return the result. Called once.
function Awaitable:_wait_impl() -- luacheck: ignore 212
  P.fail(tostring(getmetatable(self).class_name) .. ": _wait_impl is not defined")
end

--- Optionally defined too: true when _wait_impl would not have to wait. Must not wait itself.
function Awaitable:_test_impl() -- luacheck: ignore 212
  return false
end

local function settle_with(self, ok, result)
  if ok then
    local callbacks = rawget(self, "callbacks")
    for i = 1, callbacks and #callbacks or 0 do
      ok, result = xpcall(callbacks[i], P.locate, result)
      if not ok then break end
    end
  end
  rawset(self, "_state", ok and "done" or "failed")
  rawset(self, "_result", result)
  if not ok then error(result, 0) end
  return result
end

--- The result, once it is there. Waiting again returns the same result, or raises the same error.
function Awaitable:wait()
  local now = rawget(self, "_state")
  if now == "done" then return rawget(self, "_result") end
  if now == "failed" then error(rawget(self, "_result"), 0) end
  if now == "waiting" then P.fail "Awaitable:wait: it waits for itself" end
  rawset(self, "_state", "waiting")
  return settle_with(self, xpcall(self._wait_impl, P.locate, self))
end

--- True when wait() would return (or raise) at once. Never waits.
function Awaitable:test()
  local now = rawget(self, "_state")
  return now == "done" or now == "failed" or (now == nil and self:_test_impl()) or false
end

--- Let `f(result)` replace the result when it comes. Returns self.
function Awaitable:and_then(f)
  if rawget(self, "_state") then P.fail "Awaitable:and_then: it was already waited for" end
  local callbacks = rawget(self, "callbacks") or {}
  callbacks[#callbacks + 1] = f
  rawset(self, "callbacks", callbacks)
  return self
end

-- -- kinds ------------------------------------------------------------------------------------------------------------

--- NoWait(result)
local NoWait = util.class("NoWait", Awaitable)
M.NoWait = NoWait
function NoWait:init(result)
  Awaitable.init(self)
  rawset(self, "_given", result)
end
function NoWait:_wait_impl() return rawget(self, "_given") end
function NoWait:_test_impl() return true end -- luacheck: ignore 212

--- WorkAwaitable(pointer of a peri_work (new), result): of one C operation. Keeps what the operation uses through the
--- work itself.
local WorkAwaitable = util.class("WorkAwaitable", Awaitable)
M.WorkAwaitable = WorkAwaitable
function WorkAwaitable:init(ptr, result)
  Awaitable.init(self)
  self._work = M.wrap_work(ptr)
  self._given = result
end
function WorkAwaitable:_wait_impl()
  local work = self._work
  M.finish_work(work)
  work:release()
  return self._given
end
function WorkAwaitable:_test_impl() return C.peri_work_test(self._work.ptr) ~= C.PERI_PENDING end

--- ListAwaitable(list of awaitables): the list of their results.
local ListAwaitable = util.class("ListAwaitable", Awaitable)
M.ListAwaitable = ListAwaitable
function ListAwaitable:init(list)
  Awaitable.init(self)
  self.list = list
end
function ListAwaitable:_wait_impl()
  local results = {}
  for i = 1, #self.list do results[i] = self.list[i]:wait() end
  return results
end
function ListAwaitable:_test_impl()
  local all = true
  for i = 1, #self.list do all = self.list[i]:test() and all end
  return all
end

-- -- lazy -------------------------------------------------------------------------------------------------------------

local resolve = util.resolve
M.resolve = resolve

local function get(x, key) return x[key] end
local function get_ptr(x) return x.ptr end
local function set(x, key, value) x[key] = value end

--- f(result, ...) for a result that is cdata: what LuaJIT says of plain C data (an int64_t, a struct) names neither
--- class nor key.
local function forward(name, f, result, key, value)
  local ok, got = pcall(f, result, key, value)
  if ok then return got end
  if type(got) ~= "string" then error(got, 0) end
  P.fail(("%s: its result is a %s, which has no '%s'"):format(name, tostring(ffi.typeof(result)):match "^ctype<(.*)>$",
    tostring(key)))
end

--- The metamethod of an operator of lazy awaitables: f of the results. What Lua says of values that have no such
--- operator names neither of them.
local function operator(symbol, f)
  return function(a, b)
    a, b = resolve(a), resolve(b)
    local ok, result = pcall(f, a, b)
    if ok then return result end
    if type(result) ~= "string" or not result:find("attempt to ", 1, true) then error(result, 0) end
    P.fail(("no operator '%s' for %s and %s"):format(symbol, errors.kind(a), errors.kind(b)))
  end
end

--- A class of lazy awaitables. Its methods and those of `base` are found first; every other name is the result's.
function M.lazy_class(name, base)
  local class = util.class(name, base)
  class._lazy = true
  class.__index = function(self, key)
    local own = class[key]
    if own ~= nil then return own end
    -- The only real field of handles, apart: LuaJIT 2.1.0-beta3 compiles an index of cdata that ended in a metamethod
    -- for all keys, and would take this one there as well.
    local result = resolve(self)
    if type(result) == "table" or type(result) == "string" then return result[key] end
    if type(result) ~= "cdata" then
      P.fail(("%s: its result is %s, which has no '%s'"):format(name, tostring(result), tostring(key)))
    end
    if key == "ptr" then return forward(name, get_ptr, result, "ptr") end
    return forward(name, get, result, key)
  end
  class.__newindex = function(self, key, value)
    local result = resolve(self)
    if type(result) == "table" then result[key] = value
    elseif type(result) == "cdata" then forward(name, set, result, key, value)
    else P.fail(("%s: its result is %s, which has no '%s'"):format(name, tostring(result), tostring(key))) end
  end
  class.__tostring = function(self) return tostring(resolve(self)) end
  class.__call = function(self, ...) return resolve(self)(...) end
  class.__len = function(self) return #resolve(self) end
  class.__unm = operator("-", function(a) return -a end) -- Lua passes the operand twice
  class.__add = operator("+", function(a, b) return a + b end)
  class.__sub = operator("-", function(a, b) return a - b end)
  class.__mul = operator("*", function(a, b) return a * b end)
  class.__div = operator("/", function(a, b) return a / b end)
  class.__mod = operator("%", function(a, b) return a % b end)
  class.__pow = operator("^", function(a, b) return a ^ b end)
  class.__concat = operator("..", function(a, b) return a .. b end)
  return class
end

local LazyAwaitable = M.lazy_class("LazyAwaitable", Awaitable)
M.LazyAwaitable = LazyAwaitable
--- LazyAwaitable(awaitable): stands for the awaitable's result.
function LazyAwaitable:init(awaitable)
  Awaitable.init(self)
  rawset(self, "_awaitable", awaitable)
end
function LazyAwaitable:_wait_impl() return rawget(self, "_awaitable"):wait() end
function LazyAwaitable:_test_impl() return rawget(self, "_awaitable"):test() end

local LazyNoWait = M.lazy_class("LazyNoWait", Awaitable)
M.LazyNoWait = LazyNoWait
function LazyNoWait:init(result)
  Awaitable.init(self)
  rawset(self, "_given", result)
end
function LazyNoWait:_wait_impl() return rawget(self, "_given") end
function LazyNoWait:_test_impl() return true end -- luacheck: ignore 212

--- GetItemLazyAwaitable(parent, key): stands for element `key` of the parent's result. The parent is waited for once,
--- however many elements stand for parts of it.
local GetItemLazyAwaitable = M.lazy_class("GetItemLazyAwaitable", Awaitable)
M.GetItemLazyAwaitable = GetItemLazyAwaitable
function GetItemLazyAwaitable:init(parent, key)
  Awaitable.init(self)
  rawset(self, "_parent", parent)
  rawset(self, "_key", key)
end
function GetItemLazyAwaitable:_wait_impl()
  local result, key = resolve(rawget(self, "_parent"):wait()), rawget(self, "_key")
  if type(result) ~= "table" and type(result) ~= "cdata" then
    P.fail(("GetItemLazyAwaitable: the result is %s, wanted one with elements, for the key %s"):format(
      errors.kind(result), errors.kind(key)))
  end
  return result[key]
end
function GetItemLazyAwaitable:_test_impl() return rawget(self, "_parent"):test() end

--- MethodLazyAwaitable(parent, name, a, b, c, d): stands for what parent:name(a, b, c, d) returns, for views wanted
--- before their numbers are needed. It lives in the scope in which it was asked for. `reshape` and `slice` of it wait
--- no more than it does.
local MethodLazyAwaitable = M.lazy_class("MethodLazyAwaitable", Awaitable)
M.MethodLazyAwaitable = MethodLazyAwaitable
function MethodLazyAwaitable:init(parent, name, a, b, c, d)
  Awaitable.init(self)
  rawset(self, "_parent", parent)
  rawset(self, "_name", name)
  if a ~= nil then rawset(self, "_a", a) end -- a nil would take the room of a field
  if b ~= nil then rawset(self, "_b", b) end
  if c ~= nil then rawset(self, "_c", c) end
  if d ~= nil then rawset(self, "_d", d) end
  rawset(self, "_scope", state.scope)
end
local function call(object, name, a, b, c, d)
  if d ~= nil then return object[name](object, a, b, c, d) end -- nil behind the last argument would be one
  if c ~= nil then return object[name](object, a, b, c) end
  if b ~= nil then return object[name](object, a, b) end
  if a ~= nil then return object[name](object, a) end
  return object[name](object)
end
function MethodLazyAwaitable:_wait_impl()
  return P.within(rawget(self, "_scope"), call, resolve(rawget(self, "_parent"):wait()), rawget(self, "_name"),
    rawget(self, "_a"), rawget(self, "_b"), rawget(self, "_c"), rawget(self, "_d"))
end
function MethodLazyAwaitable:_test_impl() return rawget(self, "_parent"):test() end
function MethodLazyAwaitable:reshape(a, b, c, d, more)
  if more ~= nil then return resolve(self):reshape(a, b, c, d, more) end -- to_table() of five dimensions is rare
  return MethodLazyAwaitable(self, "reshape", a, b, c, d)
end
function MethodLazyAwaitable:slice(dim, first, past, step)
  return MethodLazyAwaitable(self, "slice", dim, first, past, step)
end

M.work_out = ffi.new "peri_work *[1]"
signature.kind("awaitable", "an awaitable", Awaitable.is)
signature.check("Awaitable:", Awaitable, { and_then = "self: awaitable, f: callable", wait = "self: awaitable",
  test = "self: awaitable" })
signature.list_of("awaitables", "a list of awaitables", "awaitable")
signature.check("ListAwaitable:", ListAwaitable, { init = "self: table, list: awaitables" })
signature.check("LazyAwaitable:", LazyAwaitable, { init = "self: table, awaitable: awaitable" })
signature.check("GetItemLazyAwaitable:", GetItemLazyAwaitable, { init = "self: table, parent: awaitable, key: any" })

return M
