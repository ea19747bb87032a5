-- short.lua: a few calls of every family of kernels on a device, each compared with the device cpu: what `make gpu-check` runs under
-- compute-sanitizer, where whole specs would take hours.
local peri = require "perilune"
local ffi = require "ffi"
local Tensor, sparse, nn = peri.Tensor, peri.sparse, peri.nn
local device = arg[1] or "cuda"
local compared = 0

--- Compare what f(device) returns, a list of tensors, with what f "cpu" does: equal, or within `tolerance` of the largest number.
local function same(name, f, tolerance)
  peri.scope(function()
    local expected, got = f "cpu", f(device)
    for i, want in ipairs(expected) do
      local a, b = want:to "f64":to_list(), got[i]:to(nil, "cpu"):to "f64":to_list()
      local function flat(list, out)
        for _, x in ipairs(list) do
          if type(x) == "table" then flat(x, out) else out[#out + 1] = x end
        end
        return out
      end
      a, b = flat(a, {}), flat(b, {})
      local largest = 1
      for _, x in ipairs(a) do largest = math.max(largest, math.abs(x)) end
      if #a ~= #b then error(("%s: result %d has %d numbers, on cpu %d"):format(name, i, #b, #a), 0) end
      for k = 1, #a do
        local close = math.abs(a[k] - b[k]) <= (tolerance or 0) * largest -- a NaN is not
        if not close then
          error(("%s: result %d, number %d is %.9g, on cpu %.9g"):format(name, i, k, b[k], a[k]), 0)
        end
      end
      compared = compared + 1
    end
  end)
end

local function ids_on(d, n, rows, seed) return Tensor.uniform({ n }, 0, rows, seed, 0, "f64", "cpu"):to("i64"):to(nil, d) end
local function floats_on(d, shape, seed) return Tensor.uniform(shape, -1, 1, seed, 0, "f32", "cpu"):to(nil, d) end

-- Tables: forward, backward, forward again.
for _, c in ipairs { { "FP32", "rowwise_adagrad" }, { "FP32", "adam" }, { "FP32", "sgd" }, { "FP16", "rowwise_adagrad" },
  { "INT8", "none" }, { "INT4", "none" } } do
  same(("table batch %s %s"):format(c[1], c[2]), function(d)
    local B, L, D = 7, 5, 36
    local tables, blocks = {}, {}
    for t = 1, 2 do
      tables[t] = { name = "t" .. t, rows = 50, cols = D, init = c[2] ~= "none" and peri.embed.constant(0.5) or nil }
      blocks[t] = { table = t, first_bag = (t - 1) * B, bags = B, out_offset = (t - 1) * D, out_stride = 2 * D }
    end
    local batch = peri.embed.tbe.new { tables = tables, data_type = c[1], seed = 1, device = d, fused_params = { optimizer = c[2] } }
    local offsets = ffi.new("int64_t[?]", 2 * B + 1)
    for b = 0, 2 * B do offsets[b] = b * L end
    offsets = Tensor.from_memory(offsets, { 2 * B + 1 }, "i64", d)
    local ids = ids_on(d, 2 * B * L, 50, 3)
    local out = peri.zeros({ B, 2 * D }, "f32", d)
    blocks = batch:blocks(blocks)
    if c[2] ~= "none" then batch:backward(ids, offsets, blocks, floats_on(d, { B, 2 * D }, 4)) end
    batch:forward(ids, offsets, blocks, out)
    return { out }
  end, 1e-5)
end

-- Jagged and sparse.
same("sparse operators", function(d)
  local F, B = 3, 9
  local lengths = ids_on(d, F * B, 6, 5):to "i32"
  local n = lengths:to("f64"):sum():item()
  local ids, order = ids_on(d, n, 1000, 6), peri.tensor({ 2, 0, 1 }, "i32", d)
  local offsets = sparse.asynchronous_complete_cumsum(lengths:to "i64")
  local l, v = sparse.permute_2D_sparse_data(order, lengths:reshape(F, B), ids)
  local rows = floats_on(d, { n, 8 }, 7)
  local dense = sparse.jagged_2d_to_dense(rows, offsets, 4)
  return { l, v, offsets, dense, (sparse.unique(ids)) }
end)
same("bucketize", function(d)
  local lengths = ids_on(d, 18, 6, 5):to "i32"
  local n = lengths:to("f64"):sum():item()
  local r = sparse.block_bucketize_sparse_features { lengths = lengths, indices = ids_on(d, n, 1000, 6), block_sizes = { 250, 250 },
    my_size = 4 }
  return { r.lengths, r.indices }
end)
same("rows of int8", function(d)
  local format = sparse.quantize.format { codes = "int8" }
  local rows = sparse.quantize.rows(floats_on(d, { 5, 40 }, 8), format)
  return { sparse.quantize.restore(rows, format, 40) }
end, 1e-6)

-- The dense part: forward, backward, a step.
for _, name in ipairs { "SGD", "Adam", "Adagrad" } do
  same("a training step, " .. name, function(d)
    nn.manual_seed(2)
    local model = nn.MLP { in_size = 13, layer_sizes = { 17, 1 }, device = d }
    local optimizer = nn.optim[name] { params = model:parameters(), lr = 0.1 }
    for _, p in ipairs(model:parameters()) do p:detach():copy(floats_on(d, p:shape(), 9)) end
    for step = 1, 2 do
      optimizer:zero_grad()
      local logits = model(floats_on(d, { 33, 13 }, step)):reshape(-1)
      local loss = nn.functional.binary_cross_entropy_with_logits(logits, peri.full({ 33 }, 1, "f32", d))
      loss:backward()
      optimizer:step()
    end
    return peri.util.map(model:parameters(), function(p) return p:detach() end)
  end, 1e-4)
end

print(("%d tensors on %s are those of cpu"):format(compared, device))
