-- Lookups and updates give the same bits under every way of every choice (perilune/tune.h), one at a time and all
-- changed at once.
local ffi = require "ffi"
local peri = require "perilune"
local choices = require "perilune.choices"
local C, Tensor = peri.ffi.C, peri.Tensor

local BAGS, LENGTH, ROWS = 1000, 20, 3000
local threads = C.peri_threads()

local function set(name, word) peri.ffi.check(C.peri_tune_set(name, word)) end

local function forget()
  for _, c in ipairs(choices.list()) do set(c.name, nil) end
  peri.ffi.check(C.peri_threads_set(threads))
end

--- The bytes of a tensor.
local function bits(t)
  local data, n = t:read()
  return ffi.string(data, n * peri.ffi.C.peri_dtype_size(C.peri_dtype_parse(t:dtype())))
end

--- What two steps on tables of `widths` give: outputs, weights, states.
local function results(widths, dtype, optimizer, weighted)
  return peri.scope(function()
    local tables, blocks, width = {}, {}, 0
    for i, cols in ipairs(widths) do
      tables[i] = { name = "t" .. i, rows = ROWS, cols = cols }
      blocks[i] = { table = i, first_bag = (i - 1) * BAGS, bags = BAGS, out_offset = width, out_stride = 0 }
      width = width + cols
    end
    for _, b in ipairs(blocks) do b.out_stride = width end
    local batch = peri.embed.tbe.new { tables = tables, data_type = dtype, seed = 7,
      fused_params = { optimizer = optimizer, learning_rate = 0.1, bounds_check_mode = "IGNORE" } }
    local n = #widths * BAGS * LENGTH
    local ids = Tensor.uniform({ n }, -1, ROWS + 2, 3, 0, "f64"):to "i64" -- some are no rows
    local offsets = {}
    for b = 0, #widths * BAGS do offsets[b + 1] = b * LENGTH end
    local at, list = peri.tensor(offsets, "i64"), batch:blocks(blocks)
    local out, grad = peri.zeros { BAGS, width }, Tensor.uniform({ BAGS, width }, -1, 1, 5)
    local weights = weighted and Tensor.uniform({ n }, 0, 1, 6) or nil
    local found = {}
    for step = 1, 2 do
      batch:forward(ids, at, list, out, weights)
      found[#found + 1] = { "outputs of step " .. step, bits(out) }
      if optimizer ~= "none" then batch:backward(ids, at, list, grad, weights) end
    end
    for i = 1, #widths do
      for _, name in ipairs(optimizer ~= "none" and batch:state_names() or {}) do
        found[#found + 1] = { ("%s of %d columns"):format(name, widths[i]), bits(batch:state(i, name):contiguous()) }
      end
    end
    return found
  end)
end

local function same(want, got, what)
  assert.equal(#want, #got)
  for i, pair in ipairs(want) do assert(pair[2] == got[i][2], ("%s: other bits with %s"):format(pair[1], what)) end
end

describe("the same bits under every way:", function()
  after_each(forget)
  local every = { 256, 128, 64, 32, 200, 40 } -- with all of them a call reads more than 32 MiB
  local cases = {
    { "FP32", "rowwise_adagrad", every }, { "FP16", "rowwise_adagrad", { 128, 64, 48 } },
    { "BF16", "sgd", { 256, 128, 32 } }, { "FP32", "adam", { 128, 40 } }, { "FP32", "sgd", { 128 }, true },
  }
  for _, case in ipairs(cases) do
    local dtype, optimizer, widths, weighted = unpack(case)
    it(("%s, %s"):format(dtype, optimizer), function()
      peri.ffi.check(C.peri_threads_set(4))
      local want = results(widths, dtype, optimizer, weighted)
      for _, c in ipairs(choices.list()) do
        for _, way in ipairs(c.name:match "^copy" and {} or c.ways) do
          set(c.name, way.word)
          same(want, results(widths, dtype, optimizer, weighted), c.name .. "=" .. way.word)
        end
        set(c.name, nil)
      end
      for last = 0, 1 do -- the first way of all, the last way of all
        for _, c in ipairs(choices.list()) do set(c.name, c.ways[last == 1 and #c.ways or 1].word) end
        same(want, results(widths, dtype, optimizer, weighted), "all at once")
      end
    end)
  end
end)
