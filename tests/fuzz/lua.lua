-- lua.lua: the whole Lua API called at random: arguments of right and wrong types, released handles, huge shapes. A
-- crash, a report of a sanitizer, a hang, or an error that shows the inside ("attempt to index", "cannot convert",
-- "struct peri_") is a failure.
--
--   luajit tests/fuzz/lua.lua [CHILDREN [SEED]]       as `make test` runs it; a failure prints the call and how to
--                                                     repeat it
--   luajit tests/fuzz/lua.lua SECONDSs [SEED]         as `make fuzz` runs it
--   luajit tests/fuzz/lua.lua once SEED               one child of it, which prints every call before it makes it
--
-- Functions are found by walking `require "perilune"`, its classes, and the methods of what the calls return; none is
-- listed. What a named argument is called is learnt from the checks of the functions themselves.
local CALLS = 1500 -- of a child; its seed is that of the run plus its number
local HANG = 90    -- seconds of one child
-- inputs: 6             children of a run whose length is not given in seconds

-- -- the parent -------------------------------------------------------------------------------------------------------

local api = require "spec.support.api"

--- `length`: a number of children, or "30s".
local function parent(length, seed)
  local folder, command = api.children "tests/fuzz/lua.lua"
  local begin, children, seconds = os.time(), 0, tonumber(length:match "^([%d.]+)s$")
  local most = not seconds and assert(tonumber(length), "a number of children, or seconds as in 30s")
  repeat
    local own = seed + children
    local last = api.lines_of(command("once " .. own))
    if last[#last] ~= "ended with 0" then
      for i = math.max(1, #last - 60), #last do print(last[i]) end
      print(("FAILED: repeat with: luajit tests/fuzz/lua.lua once %d   (142: it hung for %d s)"):format(own, HANG))
      os.execute("rm -rf " .. folder)
      os.exit(1)
    end
    children = children + 1
  until seconds and os.time() - begin >= seconds or children == most
  os.execute("rm -rf " .. folder)
  print(("%d times %d calls, seed %d"):format(children, CALLS, seed))
end

if arg[1] ~= "once" then
  parent(arg[1] or "6", tonumber(arg[2]) or 1)
  return
end

-- -- choices ----------------------------------------------------------------------------------------------------------

local ffi = require "ffi"
ffi.cdef "unsigned alarm(unsigned seconds);"
ffi.C.alarm(HANG)
io.stdout:setvbuf "line"

local state = tonumber(arg[2])
local function draw(n) -- 1..n
  state = (state * 1103515245 + 12345) % 2147483648
  return math.floor(state / 65536) % n + 1
end
draw(1)
local function one_of(list) return list[draw(#list)] end
local sorted, show = api.sorted, api.show
local function chance(percent) return draw(100) <= percent end

-- -- what functions take, learnt by listening -------------------------------------------------------------------------

local util = require "perilune.util"
local names_of = {} -- name in messages -> { argument = its default, util's mark, or true }
local heard
local named = util.named
util.named = function(func, args, spec)
  names_of[func], heard = spec, func
  return named(func, args, spec)
end
local A = require "perilune.jagged.arguments"
local check, check_all = A.check, A.check_all
A.check = function(func, args, allowed)
  names_of[func], heard = allowed, func
  return check(func, args, allowed)
end
A.check_all = function(func, args, allowed, required)
  names_of[func], heard = allowed, func
  return check_all(func, args, allowed, required)
end

local peri = require "perilune"
local signature = require "perilune.signature"
local world = peri.init()

-- -- values -----------------------------------------------------------------------------------------------------------

local pool = {} -- objects, handles, and what calls returned

local function tensor()
  local make = {
    function() return peri.tensor { { 1, 2, 3 }, { 4, 5, 6 } } end,
    function() return peri.tensor { 1, 2, 3, 4, 5, 6 } end, function() return peri.tensor({ 0, 2, 1 }, "i64") end,
    function() return peri.tensor({ 0, 2, 3, 6 }, "i64") end, function() return peri.tensor({ 2, 1, 3 }, "i32") end,
    function() return peri.tensor({ 1, -1, 2 ^ 40 }, "i64") end, function() return peri.tensor({ 1, 0, 1 }, "bool") end,
    function() return peri.tensor({ { 1, 2 } }, "c64") end, function() return peri.tensor({ 1, 2, 250 }, "u8") end,
    function() return peri.zeros({ 0, 3 }) end, function() return peri.ones({ 2, 3 }):transpose(1, 2) end,
    function() return peri.ones({ 1, 3 }):expand { 2, 3 } end,
    function() return peri.ones({ 2, 3 }, "f32", "opaque") end,
    function() return peri.ones({ 2, 3 }):requires_grad() end,
    function() return peri.ones({ 3, 3 }):requires_grad() * 2 end, function() return peri.ones({ 2, 3, 4 }) end,
    function() return peri.ones({ 6 }, "f64") end, function() return peri.full({}, 0.5) end,
    function() return peri.tensor({ 1, 2 }, "f16") end,
  }
  return one_of(make)()
end

local KJT = peri.KeyedJaggedTensor
local function kjt()
  return one_of {
    function() return KJT { keys = { "f", "g" }, values = { 1, 2, 3 }, lengths = { 1, 0, 1, 1 } } end,
    function()
      return KJT { keys = { "f", "g" }, values = { 1, 2, 3 }, offsets = { 0, 1, 2, 2, 3 }, weights = { 1, 2, 3 } }
    end, function() return KJT.from_lists { keys = { "f", "g" }, { { 1 }, { 2 } }, { { 3 } } } end,
    function() return KJT { keys = {}, values = {}, lengths = {} } end,
    function() return KJT { keys = { "f" }, values = { 2 ^ 40, -1 }, lengths = { 2 } } end,
  }()
end

local function config()
  return peri.EmbeddingBagConfig { name = one_of { "t", "u" }, embedding_dim = one_of { 4, 8 },
    num_embeddings = one_of { 1, 10 }, feature_names = { "f", "g" } }
end

local function ebc()
  return peri.EmbeddingBagCollection { tables = { config() }, fused_params = chance(50)
    and { optimizer = "rowwise_adagrad" } or nil }
end

local function sharded()
  local c = config()
  return peri.shard.ShardedEmbeddingBagCollection { tables = { c }, group = world, fused_params = { optimizer = "sgd" },
    plan = { [c.name] = peri.ParameterSharding { sharding_type = one_of { "table_wise", "row_wise", "data_parallel" },
      compute_kernel = "fused", ranks = { 0 } } } }
end

local objects = {
  kjt, kjt, ebc, sharded,
  function() return peri.JaggedTensor { values = { 1, 2, 3 }, lengths = { 1, 2 } } end,
  function() return peri.KeyedTensor { keys = { "a", "b" }, length_per_key = { 1, 2 }, values = tensor() } end,
  function() return peri.nn.Linear { in_features = 3, out_features = 2 } end,
  function() return peri.nn.optim.Adam { params = { peri.ones({ 2 }):requires_grad() } } end,
  function() return peri.LazyNoWait(tensor()) end, function() return peri.NoWait(tensor()) end,
  function() return world end, function() return world:all_reduce(peri.ones { 2 }) end,
  function() return peri.dist.QuantizedCommCodec { comm_precision = "INT8" } end,
  function() return peri.jagged.Keys.of { "f", "g" } end,
  function() return ebc():materialise() end,
  function() return sharded():input_dist(kjt()) end,
  function() return peri.sparse.quantize.format { codes = "int8" } end,
}

local function add(x)
  if #pool < 60 then pool[#pool + 1] = x else pool[draw(60)] = x end
end

local plain = {
  function() return nil end, function() return true end, function() return false end,
  function() return one_of { 0, 1, 2, 3, 4, -1, -2, 0.5, 1.5, 7, 8, 9, 100 } end,
  function()
    return one_of { 0 / 0, 1 / 0, -1 / 0, 1e300, 2 ^ 31, -2 ^ 31 - 1, 2 ^ 32, 2 ^ 53, 2 ^ 62, 2 ^ 63, -2 ^ 63, 2 ^ 64,
      1e8 }
  end, function()
    return one_of { "", "a", "f", "f32", "i64", "cpu", "opaque", "meta", "sum", "mean", "weight", "t", "3",
      ("x"):rep(5000), "\0" }
  end,
  function()
    return one_of { {}, { 1, 2, 3 }, { 0, 1 }, { 2, 3 }, { 1e5, 1e5, 1e5 }, { 1, 1, 1, 1, 1, 1, 1, 1, 1 }, { -1 },
      { 0.5 }, { "f", "g" }, { { 1, 2 }, { 3 } }, { { 1, 2 }, { 3, 4 } }, { 1, 2, {} }, { a = 1 }, { 0, 2, 3, 6 },
      { {} }, { true } }
  end,
  function() return one_of { function() end, function(x) return x end, function() error("of the script", 0) end } end,
  function()
    return one_of { 1LL, -1LL, 5ULL, ffi.new "int[3]", ffi.new "void *", ffi.new "int64_t[2]", ffi.typeof "int",
      io.stdout }
  end,
}

--- What f makes; 1 where it cannot: in a world that a call has closed or poisoned, on a device that a call has used up.
local function made(f)
  local ok, x = pcall(f)
  if ok then return x end
  return 1
end
local function object() return #pool > 0 and chance(70) and one_of(pool) or made(one_of(objects)) end

local any
local function list_of(f)
  local list = {}
  for i = 1, draw(3) do list[i] = made(f) end
  return list
end
any = function()
  local n = draw(10)
  if n <= 4 then return one_of(plain)() end
  if n <= 7 then return made(tensor) end
  if n == 8 then return list_of(chance(50) and tensor or any) end
  return object()
end

--- Values for argument names that say what they want.
local by_name = {
  tables = function() return list_of(config) end, keys = function() return { "f", "g" } end, values = tensor,
  lengths = tensor, offsets = tensor, weights = tensor, group = function() return world end,
  pg = function() return world end,
  params = function() return list_of(function() return peri.ones({ 2, 2 }):requires_grad() end) end, kjt = kjt,
  features = kjt, fused_params = function()
    return { optimizer = one_of { "sgd", "adam", "rowwise_adagrad", "none" } }
  end, in_features = function() return 3 end, out_features = function() return 2 end,
  splits = function() return { 2 } end, feature_names = function() return { "f", "g" } end,
  name = function() return "t" end, dtype = function() return "f32" end,
  data_type = function() return one_of { "FP32", "FP16", "INT8" } end,
  device = function() return one_of { "cpu", "opaque", "meta" } end, path = function() return "a-file" end,
}
local small = { "num", "dim", "size", "rows", "cols", "layers", "rank", "first", "last", "count", "n", "batch",
  "steps" }

local function by_hint(name, default)
  if by_name[name] and chance(80) then return made(by_name[name]) end
  if type(default) == "number" then return one_of { default, 1, 2, 0, -1, 0.5, 1e9 } end
  if type(default) == "boolean" then return chance(50) end
  if type(default) == "string" and chance(70) then return default end
  for _, word in ipairs(small) do
    if name:find(word, 1, true) and chance(70) then return draw(4) end
  end
  return any()
end

local function named_arguments(spec)
  local args = {}
  for _, name in ipairs(sorted(spec)) do
    local default = spec[name]
    local want = util.is_required(default) and 97 or default == true and 60 or 30
    if chance(want) then args[name] = by_hint(tostring(name), default) end
  end
  if chance(3) then args.nonsense = 1 end
  return args
end

--- A value of a kind of signature.lua, mostly.
local by_kind = {
  tensor = tensor, KeyedJaggedTensor = kjt, number = function() return one_of { 0, 1, -1, 0.5, 1e300, 0 / 0 } end,
  integer = function() return one_of { 0, 1, 2, 3, -1, 7, 2 ^ 31, 2 ^ 53, 2 ^ 62, 2LL } end,
  count = function() return one_of { 0, 1, 2, 3, 2 ^ 53 } end,
  int = function() return one_of { 0, 1, 2, 3, -1, 2 ^ 31 - 1 } end,
  dim = function() return one_of { 1, 2, 3, -1, -2, 8, -8 } end,
  dims = function() return one_of { 1, 2, -1, { 1, 2 }, { 1, 1 }, {}, { -1, 1 } } end,
  boolean = function() return chance(50) end,
  dtype = function() return one_of { "f32", "f64", "i64", "i32", "u8", "bool", "f16", "bf16", "c64", "nonsense" } end,
  device = function() return one_of { "cpu", "opaque", "meta" } end,
  operand = function() return chance(50) and tensor() or 2 end,
  string = function() return one_of { "f", "g", "t", "weight", "momentum1", "mean", "sum" } end, list = function()
    return one_of { function() return list_of(tensor) end, function() return { draw(3), draw(3) } end,
      function() return list_of(any) end, function() return { "f", "g" } end }()
  end,
}

local signed = {} -- functions that have a signature -> it

local function arguments(f, learnt)
  local s = signed[f]
  if s then
    local args, n = {}, #s.arguments
    for i, a in ipairs(s.arguments) do
      if a.optional and chance(40) then args[i] = nil
      elseif by_kind[a.kind] and chance(85) then args[i] = made(by_kind[a.kind])
      else args[i] = any() end
    end
    return args, chance(5) and draw(n + 1) - 1 or n
  end
  if learnt and chance(85) then return { named_arguments(learnt), any() }, draw(2) end
  local n = draw(5) - 1
  local args = {}
  for i = 1, n do args[i] = any() end
  return args, n
end

-- -- functions --------------------------------------------------------------------------------------------------------

--- Not called: what ends the process or waits for a person; and what reads all package lists of the machine, which
--- takes seconds (and machines differ).
local inside = { check = true, fail = true, class = true, C = true, lib = true, pause = true, raise = true,
  handle = true }
local takes_long = { ["data.debian.read"] = true, ["data.debian.loader"] = true, ["data.debian"] = true }
local machinery = { util = true, ffi = true, signature = true }

local functions, classes, found = api.walk(peri, function(key, name)
  return inside[key] or takes_long[name] or machinery[name]
end)
for _, s in ipairs(signature.all) do
  local f = s.table[s.key]
  signed[f] = s
  local first = s.arguments[1]
  local private = tostring(s.key):find "^_" -- what the library's own parts give it is checked before
  local method = first and first.name == "self" and first.kind == "object" -- of Lua classes: of objects only
  if not private and not method and not found[f] then
    found[f] = true
    functions[#functions + 1] = { name = s.name, f = f }
  end
end

-- -- calls ------------------------------------------------------------------------------------------------------------

--- Words of an error that no user should see. Only functions that say what they take (signature.lua) must never let
--- them out.
local raw = { "struct peri_", "attempt to ", "cannot convert", "bad argument #", "bad callback", "stack overflow",
  "invalid C type", "size of C type", "loop or previous error" }

local function judge(text, err, strict)
  local message = type(err) == "table" and rawget(err, "message") or err
  message = tostring(message):gsub("cdata<[^>]*>", "cdata") -- a value that a caller gave, shown to him
  if message:find "not enough memory" then return end
  for _, words in ipairs(raw) do
    if message:find(words, 1, true) then
      print("RAW MESSAGE: " .. message:sub(1, 300))
      if strict and not os.getenv "FUZZ_ALL" then os.exit(3) end
      print("of " .. text)
      return
    end
  end
end

local function call(name, f, args, n)
  local text = api.call_text(name, args, n)
  print(text)
  heard = nil
  local results = { pcall(f, unpack(args, 1, n)) }
  if not results[1] then judge(text, results[2], signed[f])
  else
    for i = 2, #results do
      local kind = type(results[i])
      if kind == "cdata" or kind == "table" and getmetatable(results[i]) then add(results[i]) end
    end
  end
end

local learnt = {} -- function -> names of its named arguments
for _, entry in ipairs(classes) do
  heard = nil
  pcall(entry.f, {})
  learnt[entry.f] = heard and names_of[heard]
end
for _, entry in ipairs(functions) do
  if not entry.class and not signed[entry.f] then
    heard = nil
    pcall(entry.f, {})
    learnt[entry.f] = heard and names_of[heard]
  end
end

--- A method of an object in the pool, with the object as self.
local function method_call()
  local x = object()
  local methods = {}
  if type(x) == "table" then
    local class = getmetatable(x)
    while type(class) == "table" do
      for _, key in ipairs(sorted(class)) do
        local shown = key == "__tostring" or not key:find "^_" and key ~= "init" and key ~= "is" and not inside[key]
        if type(key) == "string" and shown and type(rawget(class, key)) == "function" then
          methods[#methods + 1] = { key, rawget(class, key) }
        end
      end
      class = rawget(class, "super")
    end
    if #methods == 0 then return end
    local m = one_of(methods)
    local args, n = arguments(m[2])
    if not signed[m[2]] then
      table.insert(args, 1, x)
      n = n + 1
    else args[1] = x end
    call(("%s:%s"):format(tostring(rawget(getmetatable(x), "class_name")), m[1]), m[2], args, n)
  elseif type(x) == "cdata" and chance(15) then
    local ok, release = pcall(function() return x.release end)
    if ok and release then call("release", release, { x }, 1) end
  end
end

local operators = {
  function(a, b) return a + b end, function(a, b) return a * b end, function(a, b) return a - b end,
  function(a, b) return a / b end, function(a) return -a end, function(a) return #a end,
  function(a) return tostring(a) end, function(a, b) return a[b] end,
}

for i = 1, CALLS do
  local n = draw(100)
  if n <= 60 then
    local entry = one_of(functions)
    if not entry.class then
      call(entry.name, entry.f, arguments(entry.f, learnt[entry.f]))
    end
  elseif n <= 75 then
    local entry = one_of(classes)
    call(entry.name, entry.f, arguments(entry.f, learnt[entry.f]))
  elseif n <= 95 then method_call()
  else
    local x = chance(50) and made(tensor) or object()
    local is_ours = type(x) == "cdata" and signature.name_of(x) or type(x) == "table"
    if is_ours then
      local y = any()
      print("an operator on " .. show(x, 0) .. " and " .. show(y, 0))
      local ok, err = pcall(one_of(operators), x, y)
      -- Lua's own words for an operator that a class does not have
      if not ok and not tostring(err):find "attempt to" then judge("an operator", err, true) end
    end
  end
  if i % 100 == 0 then collectgarbage() end
end
pcall(peri.finish) -- a call may have poisoned the world
