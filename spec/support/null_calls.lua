-- Run by spec/null_spec.lua in processes of its own: luajit null_calls.lua FIRST. Calls every C function that takes a
-- pointer with pointers that are missing: with NULL for all and 0 for all numbers, then once for each of its pointers
-- and each of `numbers` and `dtypes`, that pointer NULL and the others whole objects, or rooms of zeros. Then once with
-- -1 for each number of things, and with each structure that begins with its size having nothing but its size, a wrong
-- one, or something of a later header. Then with each member of the structures that objects were made with, and of
-- those that they point to, missing, below 0, or a constant that there is not. Functions are found in the headers.
--
-- From call number FIRST on it prints "call NUMBER FUNCTION without WHAT", calls, and prints "STATUS MESSAGE", or "0 "
-- for a function that says no error. The last line is "end".
local ffi = require "ffi"
local plain = require "perilune.ffi"
local C = plain.C

local samples = {} -- by type, the last structure with which an object was made
local P = setmetatable({
  struct = function(name, init)
    samples[name] = plain.struct(name, init)
    return samples[name]
  end,
  structs = function(name, n)
    samples[name] = plain.structs(name, n)
    return samples[name]
  end,
}, { __index = plain })

local numbers, dtypes = { 0, 1, 2 }, { C.PERI_F32, C.PERI_I64 }
local ROOM = 65536 -- bytes for a structure, an array, or what a function returns
local kept = {}

local function keep(x)
  kept[#kept + 1] = x
  return x
end

--- What `f(out)` puts into the room for a handle of this kind.
local function made(kind, f)
  local out = ffi.new(("peri_%s *[1]"):format(kind))
  if f(out) < 0 then error(kind .. ": " .. ffi.string(C.peri_error_message())) end
  return out[0]
end

local sizes = keep(ffi.new("int64_t[8]", 2, 2, 2, 2, 2, 2, 2, 2))
local names = keep(ffi.new "const char *[8]")
for i = 0, 7 do names[i] = "a" end

local folder = os.tmpname() -- for what lies in files
os.remove(folder)
os.execute("mkdir " .. folder)

local model -- one for all calls: models stay mapped

--- A model of one matrix.
local function the_model()
  if model then return model end
  local peri, path = require "perilune", folder .. "/model.peri"
  local Model = peri.nn.Module:extend "Model"
  function Model:init() self.linear = peri.nn.Linear { in_features = 2, out_features = 1 } end
  function Model:forward(batch) return self.linear(batch.x) end
  peri.export.save(Model(), path, { batches = { { x = peri.zeros { 20, 2 } } } })
  model = made("model", function(out) return C.peri_model_open(path, 0, out) end)
  return model
end

local made_names = 0
--- A path that is not there yet.
local function fresh(what)
  made_names = made_names + 1
  return ("%s/%s%d"):format(folder, what, made_names)
end

--- What lies in files, and what reads them.
local function add_files(add)
  add("checkpoint_folder", function(out) return C.peri_checkpoint_folder_new(fresh "save", out) end)
  add("checkpoint_lock", function(out)
    local own = fresh "locked"
    os.execute("mkdir " .. own)
    return C.peri_checkpoint_lock_new(own, out)
  end)
  add("checkpoint_writer", function(out)
    return C.peri_checkpoint_writer_new(folder, fresh "w":match "[^/]+$", 0, out)
  end)
  add("checkpoint_follower", function(out) return C.peri_checkpoint_follower_new(folder, out) end)
  add("checkpoint_state", function(out) return C.peri_checkpoint_state_new(0, out) end)
  add("checkpoint_publishing", function(out) -- its thread finds no such folder
    return C.peri_checkpoint_publishing_new(fresh "none", fresh "no", names, 1, nil, false, out)
  end)
  local saved = folder .. "/saved"
  add("checkpoint", function(out)
    if not io.open(saved .. "/manifest.json") then
      require("perilune").checkpoint.save(saved, { a = require("perilune").nn.Linear {
        in_features = 1, out_features = 1 } })
    end
    return C.peri_checkpoint_open(saved, out)
  end)
  add("model_writer", function(out) return C.peri_model_writer_new(fresh "model", out) end)
  add("model_follower", function(out)
    return C.peri_model_follower_new(folder .. "/model.peri", folder, nil, 0, out)
  end)
  add("columns", function(out)
    return C.peri_columns_new(P.struct("peri_columns_config",
      { table_rows = sizes, dense_features = 1, sparse_features = 1 }), out)
  end)
  add("columns_writer", function(out) return C.peri_columns_writer_new(fresh "columns", 1, 1, false, out) end)
  local lines = "1\t2\tff\n"
  add("criteo", function(out)
    return C.peri_criteo_open_memory(P.struct("peri_criteo_config",
      { path = "/dev/null", table_rows = sizes, dense_features = 1, sparse_features = 1, batch_rows = 1 }), lines,
      #lines, out)
  end)
  local npy = "\147NUMPY\1\0F\0{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"
  npy = npy .. (" "):rep(79 - #npy) .. "\n" .. ("\0"):rep(8)
  add("arrays", function(out) return C.peri_arrays_open_memory("null.npy", npy, #npy, out) end)
  add("feed", function(out) -- nobody wants more of it, so nothing waits
    local status = C.peri_feed_new(1, out)
    return status < 0 and status or C.peri_feed_stop(out[0], 0)
  end)
end

--- Objects beside tables, and modules of ranks.
local function add_modules(add, o)
  add("autocast", function(out) return C.peri_autocast_new("cpu", C.PERI_BF16, true, out) end)
  add("moment", function(out) return C.peri_moment_new(out) end)
  add("row_marks", function(out) return C.peri_row_marks_new(o.tbe, out) end)
  add("collision", function(out)
    return C.peri_collision_new(o.device, P.struct("peri_collision_config", { name = "t", rows = 4, n_features = 1,
      policy = C.PERI_FORGET_LFU }), out)
  end)
  local plan = [[{"perilune_plan": 1, "modules": {}}]]
  add("plan", function(out) return C.peri_plan_parse("null", plan, #plan, out) end)
  add("sharded", function(out)
    local table_, optimizer = keep(P.structs("peri_sharded_table", 1)), keep(P.struct "peri_tbe_optimizer_config")
    table_[0].name, table_[0].rows, table_[0].cols, table_[0].n_features = "t", 4, 4, 1
    table_[0].features = keep(ffi.new "int32_t[1]")
    assert(C.peri_tbe_optimizer_default(C.PERI_TBE_SGD, optimizer) == 0)
    return C.peri_sharded_new(P.struct("peri_sharded_config", { group = o.group, device = o.device, tables = table_,
      features = names, optimizers = optimizer, n_tables = 1, n_features = 1, n_optimizers = 1 }), out)
  end)
end

--- Objects by the name of their kind, each made when it is first asked for; tensors are [2, 2] of `dtype`.
local function objects(dtype)
  local makers = {}
  local o = setmetatable({}, { __index = function(o, kind)
    o[kind] = makers[kind] and made(kind, makers[kind]) or false
    return o[kind]
  end })
  local function add(kind, f) makers[kind] = f end
  local function tensor(type, ndim)
    return made("tensor", function(out) return C.peri_tensor_full(o.device, type, ndim, sizes, 1, out) end)
  end
  add("device", function(out) return C.peri_device_get("cpu", out) end)
  add("stream", function(out) return C.peri_stream_new(o.device, out) end)
  add("event", function(out) return C.peri_event_new(o.device, out) end)
  add("group", function(out)
    return C.peri_comm_open(P.struct("peri_comm_config", { transport = "self", world_size = 1 }), out)
  end)
  add("tensor", function(out) return C.peri_tensor_full(o.device, dtype, 2, sizes, 1, out) end)
  add("keys", function(out) return C.peri_keys_new(names, 1, out) end)
  local function jagged() return { values = tensor(C.PERI_I64, 1), lengths = tensor(C.PERI_I64, 1) } end
  add("kjt", function(out)
    local args = jagged()
    args.keys, args.stride = o.keys, 2
    return C.peri_kjt_new(P.struct("peri_kjt_config", args), out)
  end)
  add("jt", function(out) return C.peri_jt_new(P.struct("peri_jt_config", jagged()), out) end)
  add("kt", function(out) return C.peri_kt_new(o.keys, sizes, 1, tensor(C.PERI_F32, 2), out) end)
  add("regroup", function(out)
    local of, keys = ffi.new("peri_kt *[1]", o.kt), ffi.new("peri_keys *[1]", o.keys)
    return C.peri_regroup_new(of, 1, keys, 1, out)
  end)
  add("codec", function(out)
    return C.peri_codec_new(P.struct("peri_codec_config", { format = C.PERI_CODEC_FP16 }), out)
  end)
  add("codec_context", function(out) return C.peri_codec_context_new(o.codec, sizes, 1, out) end)
  local leaf = ffi.new("peri_tensor *[1]", tensor(C.PERI_F32, 2))
  assert(C.peri_tensor_requires_grad_set(leaf[0], true) == 0)
  local sgd = P.struct "peri_optim_config"
  assert(C.peri_optim_default(C.PERI_OPTIM_SGD, sgd) == 0)
  add("optim", function(out) return C.peri_optim_new(sgd, leaf, 1, out) end)
  add("reducer", function(out) return C.peri_reducer_new(o.group, leaf, 1, 1024, out) end)
  add("backward", function(out)
    local root = made("tensor", function(sum) return C.peri_op_sum(leaf[0], ffi.new "int32_t[1]", 0, false, sum) end)
    return C.peri_backward_new(ffi.new("peri_tensor *[1]", root), nil, 1, out)
  end)
  add("work", function(out) return C.peri_coll_barrier(o.group, 0, out) end)
  add("tbe", function(out)
    local table_, optimizer = keep(P.structs("peri_table_config", 1)), keep(P.struct "peri_tbe_optimizer_config")
    table_[0].name, table_[0].rows, table_[0].cols = "t", 4, 4
    local c = P.struct("peri_tbe_config", { device = o.device, dtype = C.PERI_F32, n_tables = 1, tables = table_,
      n_features = 1 })
    c.features, c.optimizer = names, optimizer
    assert(C.peri_tbe_optimizer_default(C.PERI_TBE_SGD, optimizer) == 0)
    return C.peri_tbe_new(c, out)
  end)
  add("tbe_blocks", function(out)
    return C.peri_tbe_blocks_new(o.tbe, ffi.new("peri_tbe_block[1]", { { bags = 1 } }), 1, out)
  end)
  add("tbe_batch", function(out)
    local input = ffi.new("peri_tbe_input", { ids = tensor(C.PERI_I64, 1), offsets = tensor(C.PERI_I64, 1),
      blocks = o.tbe_blocks })
    return C.peri_tbe_batch_new(o.tbe, input, out)
  end)
  add("batch", function(out) return C.peri_batch_new(1, 1, 2, 2, out) end)
  add("logistic", function(out)
    return C.peri_logistic_new(P.struct("peri_logistic_config",
      { table_rows = sizes, dense_features = 1, sparse_features = 1, learning_rate = 1 }), out)
  end)
  o.model = the_model()
  add("lua", function(out) return C.peri_lua_new(nil, out) end)
  local text = "return function() end"
  add("lua_object", function(out) return C.peri_lua_load_text(o.lua, "null.lua", text, #text, nil, 0, out) end)
  add_files(add)
  add_modules(add, o)
  add("model_context", function(out) return C.peri_model_context_new(o.model, 2, 2, out) end)
  return o
end

local function room() return ffi.cast("void *", keep(ffi.new("char[?]", ROOM))) end
local function fill(x) return { x, x, x, x, x, x, x, x } end

--- A value for an argument that is a pointer.
local function given(argument, have)
  local handle, stars = argument:match "peri_([%w_]+) (%*[%* const]*)"
  handle = handle or "" -- no object
  if have[handle] and stars:find "%*const %*" then
    return keep(ffi.new(("peri_%s *[8]"):format(handle), fill(have[handle])))
  end
  if have[handle] and not stars:find "%*%*" then return have[handle] end
  if argument:find "char %*const" then return names end
  if argument:find "const char %*[^%*]" then return "cpu" end
  return room()
end

--- Declarations of the functions that return a peri_status, and of the others that take pointers: { name =, says =
--- whether it returns a status, arguments = { text, ... } }.
local function declared()
  local text = require("perilune.cdef"):gsub("/%*.-%*/", "")
  local list = {}
  for result, name, inside in text:gmatch "\n%s*([%w_ %*]-)%f[%w_](peri_[%w_]+)%s*(%b())%s*;" do
    local arguments, says = {}, result:find "peri_status" ~= nil
    if result:find "typedef" or not says and not inside:find "%*" then goto next end
    if not inside:find "^%(%s*void%s*%)$" then
      for argument in inside:sub(2, -2):gmatch "[^,]+" do
        arguments[#arguments + 1] = argument:gsub("%s+", " "):gsub("([%w_]+) ?%b[]", "*%1") -- an array is a pointer
      end
    end
    list[#list + 1] = { name = name, arguments = arguments, says = says }
    ::next::
  end
  return list
end

local first, count = tonumber(arg[1]), 0
io.stdout:setvbuf "no"

local function call(f, without, values)
  count = count + 1
  if count < first then return nil end
  io.write(("call %d %s without %s\n"):format(count, f.name, without))
  local status = C[f.name](unpack(values, 1, #f.arguments))
  if not f.says then status = 0 end
  io.write(("%d %s\n"):format(status, status < 0 and ffi.string(C.peri_error_message()):gsub("\n", " ") or ""))
  return status
end

local functions = declared()
for _, f in ipairs(functions) do
  local values = {}
  for i, argument in ipairs(f.arguments) do
    if not argument:find "%*" then values[i] = 0 end
  end
  call(f, "anything", values)
end

for _, dtype in ipairs(dtypes) do
  for _, f in ipairs(functions) do
    local have
    for _, number in ipairs(numbers) do
      for missing, name in ipairs(f.arguments) do
        if name:find "%*" then
          have = have or count + 6 * #f.arguments >= first and objects(dtype)
          local values = {}
          for i, argument in ipairs(f.arguments) do
            if not argument:find "%*" then values[i] = number
            elseif i ~= missing and have then values[i] = given(argument, have) end
          end
          local what = ("%s, numbers %d, dtype %d"):format(name:match "[%w_]+%s*$", number, dtype)
          call(f, what, values)
          if name:find "%*%s*const%s*%*" then -- a list of nothing
            values[missing] = room()
            call(f, "entries of " .. what, values)
          end
        end
      end
    end
  end
end

-- -- numbers of things below 0, and structures of other sizes ---------------------------------------------------------

local whole = objects(C.PERI_F32)
--- Whether an argument is an object that nobody here makes.
local function strange(argument)
  local kind = argument:match "(peri_[%w_]+) %*%s*[%w_]*$"
  if not kind or whole[kind:match "^peri_(.*)"] then return false end
  local known, size = pcall(ffi.sizeof, kind)
  return not known or size == nil
end

--- Call with whole objects for all pointers, but argument `at`, which is `value`. refused: it must be. after(): what is
--- asked then.
local function call_with(f, at, value, what, refused, after)
  local values, have = {}, count + 1 >= first and objects(C.PERI_F32)
  for i, argument in ipairs(f.arguments) do
    if strange(argument) then return end
    if i == at then values[i] = value
    elseif not argument:find "%*" then values[i] = 1
    elseif have then values[i] = given(argument, have) end
  end
  local status = call(f, what, values)
  if refused and status and status >= 0 then print "it is taken" end
  if after and status then after() end
end

for _, f in ipairs(functions) do
  for i, argument in ipairs(f.arguments) do
    if f.says and (argument:find "int%d+_t n$" or argument:find "int%d+_t n_%w+$") then
      call_with(f, i, -1, "0 or more:" .. argument, true)
    end
  end
end

local sizes_of = {}
for body, name in require("perilune.cdef"):gmatch "typedef struct [%w_]* ?(%b{}) ([%w_]+);" do
  if body:gsub("/%*.-%*/", ""):find "^{%s*int64_t size;" then sizes_of[name] = ffi.sizeof(name) end
end
local FILL = 0x5a
for _, f in ipairs(functions) do
  for i, argument in ipairs(f.arguments) do
    local own = sizes_of[argument:match "(peri_[%w_]+) %*%s*[%w_]*$"]
    local input = argument:find "const" ~= nil
    for _, size in ipairs(own and { own, own + 64, 1, -1, 8 } or {}) do
      local block = ffi.new("char[?]", ROOM, input and 0 or FILL)
      ffi.cast("int64_t *", block)[0] = size
      if input and size > own then block[own] = 1 end -- of a later header, and not 0
      call_with(f, i, ffi.cast("void *", block), ("what%s has beside its size, %d"):format(argument, size),
        size ~= own and not (size > own and not input), function()
          for k = math.max(size, 8), input and 0 or ROOM - 1 do
            if block[k] ~= FILL then return print(("byte %d behind it is written"):format(k)) end
          end
        end)
    end
  end
end

-- -- members of structures with which objects are made ----------------------------------------------------------------

local members = {}
for _, s in ipairs(dofile("runtime/gen/contract.lua").structs((require("perilune.cdef"):gsub("/%*.-%*/", "")))) do
  members[s.name] = s.members
end
for _, f in ipairs(functions) do -- all objects, and so all samples, are there before the first call
  for _, argument in ipairs(f.arguments) do local _ = whole[argument:match "peri_([%w_]+) %*" or ""] end
end

--- What a member is made: nothing, numbers that nothing has, and of constants one that there is not. How many entries
--- an array has nobody can check.
local function wrong(m)
  if m.text:find "%*$" then return { [0] = "NULL" } end
  if m.text == "double" then return { 0 / 0, -1 } end
  if m.text == "int64_t" then return { -1, -2 ^ 63 } end
  if m.text ~= "int32_t" then return {} end
  return { -1, -2 ^ 31, not m.name:find "^n_?" and not m.name:find "features$" and 2 ^ 31 - 1 or nil }
end

--- Call `f` with each member of its argument `at`, a structure of type `name`, and of structures that lie in it or that
--- it points to, made wrong. path: members that lead there.
local function call_with_members(f, at, top, name, path)
  for _, m in ipairs(members[name]) do
    local inner = m.text:match "^const (peri_[%w_]+)%*$" or m.text:match "^(peri_[%w_]+)$"
    if inner and (samples[inner] or not m.text:find "%*") and members[inner] and #path < 2 then
      call_with_members(f, at, top, inner, { path[1] or m.name, path[1] and m.name })
    end
    for i, value in pairs(m.name == "size" and {} or wrong(m)) do
      local block = ffi.cast(top .. " *", room())
      ffi.copy(block, samples[top], ffi.sizeof(top))
      local s = block[0]
      for _, step in ipairs(path) do
        if type(s[step]) == "cdata" and tostring(ffi.typeof(s[step])):find "%*" then
          local own = tostring(ffi.typeof(s[step])):match "struct (peri_[%w_]+)"
          local copy = ffi.cast(own .. " *", room())
          ffi.copy(copy, samples[own], ffi.sizeof(own))
          s[step] = copy
          s = copy[0]
        else s = s[step] end
      end
      s[m.name] = i ~= 0 and value or nil
      call_with(f, at, block, ("%s = %s in %s"):format(table.concat({ path[1] or m.name, path[2] or path[1] and m.name,
        path[2] and m.name }, "."), tostring(value), f.arguments[at]))
    end
  end
end

for _, f in ipairs(functions) do
  for i, argument in ipairs(f.arguments) do
    local name = argument:match "const (peri_[%w_]+) %*%s*[%w_]*$"
    if samples[name] and members[name] then call_with_members(f, i, name, name, {}) end
  end
end
os.execute("rm -r " .. folder)
print(("end %d"):format(#functions))
