-- golden.lua: vectors computed by TorchRec, FBGEMM and PyTorch (spec/golden; how they were made:
-- spec/golden/README.md).
--
--   local golden = require "spec.support.golden"
--   local case = golden.load "ops/dense/bce"       -- a .safetensors file of spec/golden
--   case.args, case.tol, case.kind ...             -- the JSON text of the case
--   case:list "in.x"                               -- flat list of numbers of a tensor; nil if it is not there
--   case:tensor("in.x", "cpu")                     -- a Perilune tensor
--   case:shape "in.x"
--   case:assert_near("out.output", tensor)         -- within case.tol (or the tolerances given)
local ffi = require "ffi"
local assert = require "luassert"
local json = require "dkjson"
local peri = require "perilune"

local M = {}
local Case = {}
Case.__index = Case

local root = "spec/golden/"
local dtypes = {
  F64 = "f64", F32 = "f32", F16 = "f16", BF16 = "bf16", I64 = "i64", I32 = "i32", I16 = "i16", I8 = "i8", U8 = "u8",
  BOOL = "bool",
}

--- Whoever runs all specs wants to know what they read.
local function note(name)
  local path = os.getenv "PERI_GOLDEN_READ"
  local file = path and io.open(path, "a")
  if not file then return end
  file:write(name .. "\n")
  file:close()
end

--- Load one case.
function M.load(name)
  note(name)
  local file = assert(io.open(root .. name .. ".safetensors", "rb"))
  local text = file:read "*a"
  file:close()
  local n = tonumber(ffi.cast("const uint64_t *", text)[0])
  local header = assert(json.decode(text:sub(9, 8 + n)))
  local case = assert(json.decode(header.__metadata__.case))
  case.tensors, case.data = header, text:sub(9 + n)
  header.__metadata__ = nil
  return setmetatable(case, Case)
end

--- Names ("ops/dense/bce") of all cases in a folder whose file name matches a Lua pattern, sorted.
function M.names(folder, pattern)
  local names = {}
  local pipe = assert(io.popen("ls " .. root .. folder))
  for file in pipe:lines() do
    local name = file:match "^(.*)%.safetensors$"
    if name and (not pattern or name:match(pattern)) then names[#names + 1] = folder .. "/" .. name end
  end
  pipe:close()
  assert(#names > 0, "no golden case matches " .. tostring(pattern) .. " in " .. folder)
  table.sort(names)
  return names
end

--- A JSON document of spec/golden.
function M.document(name)
  note(name)
  local file = assert(io.open(root .. name .. ".json", "rb"))
  local document = assert(json.decode(file:read "*a", 1, nil, nil)) -- plain tables
  file:close()
  return document
end

function Case:has(name) return self.tensors[name] ~= nil end

--- Names of the case's tensors that match a pattern, sorted.
function Case:tensor_names(pattern)
  local names = {}
  for _, name in ipairs(peri.util.keys(self.tensors)) do
    if name:match(pattern or "") then names[#names + 1] = name end
  end
  return names
end

function Case:shape(name)
  local t = self.tensors[name]
  return t and t.shape
end

--- The bytes of a tensor, and its dtype.
function Case:bytes(name)
  local t = assert(self.tensors[name], name)
  return self.data:sub(t.data_offsets[1] + 1, t.data_offsets[2]), assert(dtypes[t.dtype], t.dtype)
end

function Case:tensor(name, device)
  if not self.tensors[name] then return nil end
  local bytes, dtype = self:bytes(name)
  return peri.Tensor.from_memory(bytes, self:shape(name), dtype, device)
end

function Case:list(name)
  local t = self:tensor(name, "cpu")
  return t and t:to_list()
end

--- got (a tensor or flat list) equals the case's tensor `name` within abs + rel * |want|.
function Case:assert_near(name, got, tol)
  local want, shape = assert(self:list(name), name), self:shape(name)
  if type(got) ~= "table" then
    assert.same(shape, got:shape(), name .. ": shape")
    got = got:to_list()
  end
  M.assert_near(want, got, tol or self.tol, self.name .. " " .. name)
end

--- The part of a whole table's tensor (rows, or rows x columns) that a shard holds, on the CPU. A state with one number
--- for each row that was kept by column block ([blocks, rows], by the table's `shards`) gives those of the shard's
--- block.
function Case:part_of(name, shard, by_row)
  local whole = self:tensor(name, "cpu")
  if not by_row then
    return whole:slice(1, shard.row_offset, shard.row_offset + shard.rows):slice(2, shard.col_offset, shard.col_offset
      + shard.cols)
  end
  if whole:dim() == 2 then
    local first, blocks = {}, 0
    for _, t in ipairs(self.tables) do
      for _, s in ipairs(t.name == shard.table and t.shards or {}) do
        if s.offsets[1] == 0 then
          first[s.offsets[2]] = blocks
          blocks = blocks + 1
        end
      end
    end
    local block = assert(first[shard.col_offset], name .. ": no block of these columns")
    whole = whole:slice(1, block, block + 1):reshape(-1)
  end
  return whole:slice(1, shard.row_offset, shard.row_offset + shard.rows)
end

--- Every state of a fused shard that the case has after `step` is its part of the whole; returns how many there were.
function Case:assert_states(shard, step, tol)
  local n = 0
  for _, name in ipairs(shard.names()) do
    local key = ("table/%s/optimizer/step%d/%s"):format(shard.table, step, name)
    if name ~= "weight" and self:has(key) then
      local got = shard.state(name)
      M.assert_near(self:part_of(key, shard, got:dim() == 1):to_list(), got:to_list(), tol, self.name .. " " .. key)
      n = n + 1
    end
  end
  return n
end

--- Two flat lists are equal within tol = { abs =, rel = }; NaN equals NaN, and an infinity only itself.
function M.assert_near(want, got, tol, what)
  what = what or "list"
  assert(#want == #got, ("%s: %d elements, wanted %d"):format(what, #got, #want))
  local abs, rel = tol and tol.abs or 0, tol and tol.rel or 0
  for i = 1, #want do
    local w, g = want[i], got[i]
    local same = w == g or (w ~= w and g ~= g)
      or (math.abs(w) < math.huge and math.abs(w - g) <= abs + rel * math.abs(w))
    if not same then
      error(("%s: element %d is %.9g, wanted %.9g (tolerance %g + %g relative)"):format(what, i - 1, g, w, abs, rel), 2)
    end
  end
end

return M
