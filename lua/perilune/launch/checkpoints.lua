-- checkpoints.lua: what `perilune checkpoint` prints: what is in a checkpoint, whether it is whole, what differs
-- between two.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local util = require "perilune.util"
local checkpoint = require "perilune.checkpoint"
local listed = require "perilune.checkpoint.names"
local Checkpoint = checkpoint.Checkpoint
local C = P.C

local M = {}
local BLOCK = 2 ^ 20 -- elements that are compared or written at once
local PUT = 2 ^ 16 -- bytes that become a text at once

local function size_text(bytes)
  for _, unit in ipairs { { "GB", 1e9 }, { "MB", 1e6 }, { "kB", 1e3 } } do
    if bytes >= unit[2] then return ("%.1f %s"):format(bytes / unit[2], unit[1]) end
  end
  return ("%d bytes"):format(bytes)
end

local function print_table(rows)
  local widths = {}
  for _, row in ipairs(rows) do
    for i, text in ipairs(row) do widths[i] = math.max(widths[i] or 0, #text) end
  end
  for _, row in ipairs(rows) do
    print((table.concat(util.map(row, function(text, i) return text .. (" "):rep(widths[i] - #text) end),
      "  "):gsub("%s+$", "")))
  end
end

local function bytes_of(c)
  local sum = 0
  for _, name in ipairs(c:names()) do
    for _, piece in ipairs(c:tensor(name).pieces) do sum = sum + piece.bytes + (piece.listed or 0) * 8 end
  end
  return sum
end

local actions = {}

--- The step that its values say, a Saver's or of `values = { step = }`.
local function step_of(values)
  if type(values) ~= "table" then return "-" end
  local saver = type(values.saver) == "table" and values.saver or values
  return type(saver.step) == "number" and ("%.15g"):format(saver.step) or "-"
end

function actions.ls(paths)
  local rows = { { "name", "step", "tensors", "bytes", "ranks", "increment of", "digest" } }
  local by_digest, stands_for, identity = {}, {}, P.struct "peri_checkpoint_info"
  for _, name in ipairs(listed.all(paths[1])) do
    local ok, c = pcall(Checkpoint, paths[1] .. "/" .. name, true)
    if not ok then rows[#rows + 1] = { name, "-", "-", "-", "-", "-", "damaged: see perilune checkpoint show" }
    else
      local values = c:values()
      rows[#rows + 1] = { name, step_of(values.values),
        tostring(#c:names()), size_text(bytes_of(c)), tostring(values.ranks or "-"), c:parent() or "-", c:digest() }
      by_digest[c:digest()] = name
      local same = C.peri_checkpoint_identify(paths[1] .. "/" .. name, identity) >= 0 and ffi.string(identity.same_as)
        or ""
      stands_for[same] = name
      c:close()
    end
  end
  for i = 2, #rows do rows[i][6] = by_digest[rows[i][6]] or stands_for[rows[i][6]] or rows[i][6] end
  if #rows == 1 then
    local itself = C.peri_checkpoint_identify(paths[1], identity) >= 0
    print(itself and ("'%s' is a checkpoint itself: perilune checkpoint show %s"):format(paths[1], paths[1])
      or ("'%s': no checkpoints"):format(paths[1]))
  else
    print_table(rows)
  end
  return 0
end

--- Which rows an increment has of a tensor, and how many ids it lists as evicted.
local function rows_text(c, t)
  local rows, some, evicted = 0, false, 0
  for _, piece in ipairs(t.pieces) do
    local ids = piece.rows and piece.rows:gsub("^%%rows", "%%evicted")
    rows, some = rows + (piece.listed or piece.size[1] or 0), some or piece.listed ~= nil
    if ids and c:has(ids) then evicted = evicted + c:tensor(ids).shape[1] end
  end
  return (some and ("%d changed"):format(rows) or "all") .. (evicted > 0 and (", %d ids evicted"):format(evicted) or "")
end

function actions.show(paths)
  local c = checkpoint.open(paths[1])
  print(("%s\n  digest  %s\n  parent  %s\n  size    %s"):format(paths[1], c:digest() ~= "" and c:digest()
    or "none: a safetensors file", c:parent() and ("%s (this is increment %d)"):format(c:parent(), c:increment())
    or "none: it is whole by itself", size_text(bytes_of(c))))
  for i, level in ipairs(c:levels()) do
    if i > 1 then print("  on      " .. level) end
  end
  local rows = { { "tensor", "dtype", "shape", "pieces", c:parent() and "rows" or nil } }
  for _, name in ipairs(c:names()) do
    local t = c:tensor(name)
    rows[#rows + 1] = { name, t.dtype, table.concat(t.shape, " x "), tostring(#t.pieces), c:parent()
      and rows_text(c, t) or nil }
  end
  print_table(rows)
  local text, saved = require("perilune.text"), c:values()
  for name, of in util.ordered(saved.models or {}) do
    print(("model   %s: description %s, plan %s"):format(name, tostring(of.description), of.plan
      and text.encode(of.plan.modules, {}, 0) or "none"))
  end
  print("values  " .. text.encode(saved.values or {}, {}, 0))
  return 0
end

function actions.verify(paths)
  local levels, bytes = checkpoint.open(paths[1]):levels(), 0
  for _, level in ipairs(levels) do
    local c = Checkpoint(level, true)
    c:verify()
    bytes = bytes + bytes_of(c)
    c:close()
  end
  print(("%s: all checksums hold (%s%s)"):format(paths[1], size_text(bytes), #levels > 1
    and (" in %d checkpoints, of which it is the last " .. "increment"):format(#levels) or ""))
  return 0
end

--- A full checkpoint of a chain.
function actions.compact(paths, options)
  local c = checkpoint.open(#paths > 1 and paths or paths[1])
  local path = options.output or paths[#paths]
  local levels, digest = #c:levels(), c:compact(path, options.replace or options.output == nil)
  print(("%s: a full checkpoint of %d (%s)"):format(path, levels, digest))
  return 0
end

--- Call f(offset, size) for blocks of rows of a shape; once for a tensor without dimensions.
local function blocks(shape, f)
  if util.product(shape) == 0 then return end
  if #shape == 0 then return f({}, {}) end
  local step = math.max(1, math.floor(BLOCK / math.max(1, util.product(shape) / shape[1])))
  for row = 0, shape[1] - 1, step do
    local offset, size = util.map(shape, function() return 0 end), util.copy(shape)
    offset[1], size[1] = row, math.min(step, shape[1] - row)
    f(offset, size)
  end
end

--- Whether tensors x of a and y of b have the same bytes by what their manifests say; nil: the pieces are others, or on
--- different parents.
local function same_by_checksums(a, b, x, y)
  if #x.pieces ~= #y.pieces or (a:parent() or b:parent()) and a:digest() ~= b:digest() then return nil end
  local same = true
  for i, p in ipairs(x.pieces) do
    local q = y.pieces[i]
    local alike = table.concat(p.offset, " ") == table.concat(q.offset, " ")
      and table.concat(p.size, " ") == table.concat(q.size, " ")
      and table.concat(p.columns or {}, " ") == table.concat(q.columns or {}, " ")
    if not (alike and p.xxh3 and q.xxh3) then return nil end
    same = same and p.xxh3 == q.xxh3
  end
  return same
end

local widened = { bf16 = "f32", f16 = "f32" } -- what Lua does not read
local parts, out = { c64 = 2, c128 = 2 }, ffi.new "void *[1]"
local host_types = { f64 = "double*", f32 = "float*", i64 = "int64_t*", i32 = "int32_t*", i16 = "int16_t*",
  i8 = "int8_t*", u8 = "uint8_t*", bool = "uint8_t*", c64 = "float*", c128 = "double*" }

--- Reads blocks of a tensor of checkpoint `c`, all into the same memory: memory of its own for each block would cost
--- more than reading.
local function block_reader(c, x)
  local tensor, shape
  return function(offset, size)
    if not tensor or table.concat(size, " ") ~= shape then
      tensor, shape = Tensor.empty(size, x.dtype, "cpu"), table.concat(size, " ")
    end
    c:read(x.name, { offset = offset, size = size }, tensor)
    local wide = widened[x.dtype] and tensor:to(widened[x.dtype]) or tensor
    P.check(P.C.peri_tensor_data(Tensor.ptr(wide), out))
    return ffi.cast(host_types[wide:dtype()], out[0]), util.product(size) * (parts[x.dtype] or 1), wide
  end
end

--- Of `count` numbers how many elements differ, and by how much at most. A NaN is like another.
local function differences(u, v, count, width)
  local n, most, last = 0, 0, -1
  for i = 0, count - 1 do
    if u[i] ~= v[i] and (u[i] == u[i] or v[i] == v[i]) then
      local element = math.floor(i / width)
      if element ~= last then n, last = n + 1, element end
      most = math.max(most, math.abs(tonumber(u[i]) - tonumber(v[i])))
    end
  end
  return n, most
end

--- How many elements differ, and by how much at most.
local function count_differences(a, b, x, y)
  local n, most = 0, 0
  local of_a, of_b = block_reader(a, x), block_reader(b, y)
  blocks(x.shape, function(offset, size)
    local u, count, u_owner = of_a(offset, size)
    local v, _, v_owner = of_b(offset, size)
    local some, by = differences(u, v, count, parts[x.dtype] or 1)
    if u_owner:dtype() ~= x.dtype then
      u_owner:release()
      v_owner:release()
    end
    n, most = n + some, math.max(most, by)
  end)
  return n, most
end

--- What lies in plain tables, by its way there; nothing of what `left` names.
local function leaves(x, way, left, list)
  for key, value in util.ordered(x) do
    local there = way == "" and tostring(key) or ("%s.%s"):format(way, tostring(key))
    if type(value) == "table" and not left[there] then leaves(value, there, left, list)
    elseif not left[there] then
      local short = type(value) == "number" and ("%.15g"):format(value)
      list[there] = short and tonumber(short) == value and short or short and ("%.17g"):format(value) or tostring(value)
    end
  end
  return list
end

--- What a checkpoint has beside tensors that a step depends on: rates, positions, counts, where generators are (of rank
--- 0, since the others' number may be another one); not its place in a folder, and not the plan.
local function numbers_of(c)
  local v = c:values()
  return leaves({ parts = v.parts, extra = v.extra, values = v.values, random = v.random and v.random[1] }, "",
    { ["values.saver"] = true }, {})
end

--- Rows for what differs among these, at most so many.
local MOST_NUMBERS = 20
local function add_numbers(rows, paths, a, b)
  local all, n = {}, 0
  for _, list in ipairs { a, b } do
    for name in pairs(list) do all[name] = true end -- any order: a set
  end
  for _, name in ipairs(util.keys(all)) do
    if a[name] ~= b[name] then
      n = n + 1
      if n <= MOST_NUMBERS then
        rows[#rows + 1] = { name, a[name] and b[name] and ("%s, and %s"):format(a[name], b[name])
          or ("only in %s"):format(a[name] and paths[1] or paths[2]) }
      end
    end
  end
  if n > MOST_NUMBERS then rows[#rows + 1] = { ("and %d more values"):format(n - MOST_NUMBERS) } end
end

function actions.diff(paths)
  local a, b, rows, read = checkpoint.open(paths[1]), checkpoint.open(paths[2]), {}, 0
  local names = {}
  for _, c in ipairs { a, b } do
    for _, name in ipairs(c:names()) do names[name] = true end
  end
  for _, name in ipairs(util.keys(names)) do
    local x, y = a:has(name) and a:tensor(name), b:has(name) and b:tensor(name)
    if not (x and y) then rows[#rows + 1] = { name, ("only in %s"):format(x and paths[1] or paths[2]) }
    elseif x.dtype ~= y.dtype or table.concat(x.shape, " ") ~= table.concat(y.shape, " ") then
      rows[#rows + 1] = { name, ("%s %s, and %s %s"):format(x.dtype, table.concat(x.shape, " x "), y.dtype,
        table.concat(y.shape, " x ")) }
    elseif not same_by_checksums(a, b, x, y) then
      read = read + 1
      local n, most = P.scope(count_differences, a, b, x, y)
      if n > 0 then
        rows[#rows + 1] = { name, ("%d of %d elements differ, by %.3g at most"):format(n, util.product(x.shape), most) }
      end
    end
  end
  add_numbers(rows, paths, numbers_of(a), numbers_of(b))
  local all = #util.keys(names)
  if #rows > 0 then print_table(rows)
  else print(("all %s are equal%s, and so are rates, positions and other values"):format(util.number_of(all, "tensor"),
    read < all and (", %s by checksums (perilune checkpoint verify compares the bytes with these)"):format(
      read == 0 and "all" or tostring(all - read)) or "")) end
  return #rows == 0 and 0 or 1
end

local npy_types = { f64 = "<f8", f32 = "<f4", f16 = "<f2", i64 = "<i8", i32 = "<i4", i16 = "<i2", i8 = "|i1",
  u8 = "|u1", bool = "|b1", c64 = "<c8" }

--- Write file `path` by f(put), where put(bytes) writes some: beside, and then under its name; a pipe at once.
local function written(path, f)
  local function told(status)
    if status >= 0 then return end
    P.fail("checkpoint export: " .. ffi.string(C.peri_error_message()):gsub("^peri_file_%w+: ", ""))
  end
  local fresh = ffi.new("char[?]", C.PERI_PATH_MOST)
  told(C.peri_file_begin(path, fresh))
  fresh = ffi.string(fresh)
  local function whole(ok) return ok or P.fail(("checkpoint: '%s' could not be written as a whole"):format(path)) end
  local ok, err = xpcall(function()
    local file = whole(io.open(fresh, "wb"))
    f(function(bytes) whole(file:write(bytes)) end)
    whole(file:close())
  end, P.locate)
  if ok then return told(C.peri_file_end(path, fresh)) end
  if fresh ~= path then os.remove(fresh) end
  error(err, 0)
end

function actions.export(paths, options)
  local c, name = checkpoint.open(paths[1]), paths[2]
  local t = c:tensor(name)
  local dtype = t.dtype == "bf16" and "f32" or t.dtype -- numpy has no bf16
  local path = options.output or name:gsub("/", "_") .. ".npy"
  local shape = table.concat(t.shape, ", ") .. (#t.shape == 1 and "," or "")
  local header = ("{'descr': '%s', 'fortran_order': False, 'shape': (%s), }"):format(npy_types[dtype], shape)
  header = header .. (" "):rep(63 - (10 + #header) % 64) .. "\n"
  written(path, function(put)
    put("\147NUMPY\1\0" .. string.char(#header % 256, math.floor(#header / 256)) .. header)
    local most = collectgarbage "count" + 2 ^ 14 -- KiB
    blocks(t.shape, function(offset, size)
      P.scope(function()
        local block = c:read(name, { offset = offset, size = size }):to(dtype)
        P.check(P.C.peri_tensor_data(Tensor.ptr(block), out))
        local bytes, memory = block:numel() * tonumber(P.C.peri_dtype_size(P.C.peri_dtype_parse(dtype))),
          ffi.cast("char *", out[0])
        for at = 0, bytes - 1, PUT do put(ffi.string(memory + at, math.min(PUT, bytes - at))) end
        if collectgarbage "count" > most then collectgarbage() end -- by itself Lua waits for twice of what there was
      end)
    end)
  end)
  print(("%s: %s [%s]%s"):format(path, dtype, table.concat(t.shape, ", "), dtype ~= t.dtype and ", from " .. t.dtype
    or ""))
  return 0
end

--- What is wrong with the words behind `perilune checkpoint`; nil: nothing.
function M.refusal(options)
  local wanted = ({ ls = 1, show = 1, verify = 1, diff = 2, export = 2, compact = 1 })[options.action]
  if #options.paths ~= wanted and not (options.action == "compact" and #options.paths > 1) then
    return ("checkpoint %s: %s, wanted %s"):format(options.action, util.number_of(#options.paths, "word"),
      ({ ls = "a folder of checkpoints", diff = "two checkpoints",
        export = "a checkpoint and the name of a tensor" })[options.action]
      or "a checkpoint")
  end
  if options.output and options.action ~= "export" and options.action ~= "compact" then
    return ("checkpoint %s: --output is an option of export and compact"):format(options.action)
  end
  if options.replace and not (options.action == "compact" and options.output) then
    return ("checkpoint %s: --replace goes with compact -o PATH"):format(options.action)
  end
end

--- Do what the command line says. Returns the exit code.
function M.run(options) return actions[options.action](options.paths, options) end

--- The exit code after an error of this status. Where 1 is an answer (diff: they differ; verify: it is damaged), an
--- error that leaves the question open is 2, as with diff(1) and cmp(1).
function M.code(options, status)
  if options.action == "diff" then return 2 end
  if options.action ~= "verify" then return 1 end
  local lacks = status == "ENOTFOUND" -- not the checkpoint, but a file or a parent that it names
    and C.peri_checkpoint_identify(options.paths[1], P.struct "peri_checkpoint_info") >= 0
  return (status == "EFORMAT" or lacks) and 1 or 2
end

return M
