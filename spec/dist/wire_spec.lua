-- Codecs inside exchanges: what arrives is, bit for bit, what encoding and decoding each rank's part would give,
-- forward and backward, for parts of any size; reduced parts are decoded, then summed in f32 in rank order. And ranks
-- whose codecs differ are told.
local codec = require "perilune.dist.codec"
local ops = require "perilune.dist.ops"
local peri = require "perilune"
local worlds = require "spec.support.worlds"

local formats = {
  { comm_precision = "FP16" }, { comm_precision = "FP16", loss_scale = 24 }, { comm_precision = "BF16" },
  { comm_precision = "FP8" }, { comm_precision = "FP8", row_dim = 5 }, { comm_precision = "INT8" },
  { comm_precision = "INT8", row_dim = 7 }, { comm_precision = "MX4" }, { comm_precision = "MX4", row_dim = 6 },
}

--- Numbers of rank r that all ranks know, as a list.
local function numbers(seed, r, n)
  return n > 0 and peri.Tensor.uniform({ n }, -1, 1, seed, r, "f32", "cpu"):to_list() or {}
end

--- A part of a message as it comes out at the other end.
local function through(c, part)
  if #part == 0 then return {} end
  return c:decode(c:encode(peri.tensor(part, "f32", "cpu"), c:create_context { #part }),
    c:create_context { #part }):to_list()
end

local function tensor(list, rows, cols, device)
  if rows * cols == 0 then return peri.empty({ rows, cols }, "f32", device) end
  return peri.tensor(list, "f32", device, { rows, cols })
end

local function f32(list) return #list > 0 and peri.tensor(list, "f32", "cpu"):to_list() or {} end

--- Rows [from, from + n) of `cols` columns of a list, columns [first, first + count) of them.
local function cut(list, cols, from, n, first, count)
  local out = {}
  for row = from, from + n - 1 do
    for c = first, first + count - 1 do out[#out + 1] = list[row * cols + c + 1] end
  end
  return out
end

local function sum(list, last)
  local s = 0
  for i = 1, last or #list do s = s + list[i] end
  return s
end

local function each_format(world, body)
  for i, forward in ipairs(formats) do
    local backward = formats[i % #formats + 1]
    local c = codec.QuantizedCommCodecs { forward = codec.QuantizedCommCodec(forward),
      backward = codec.QuantizedCommCodec(backward) }
    body(c, 100 * i, ("%s, %s, %d ranks"):format(tostring(c.forward), tostring(c.backward), world.world_size))
  end
end

describe("through codecs", function()
  worlds.each("alltoall_pooled", function(world, device, n)
    local rank = world.rank_number
    local batch, dims = {}, {}
    for r = 1, n do batch[r], dims[r] = (r * 5 + n) % 4, (r * 3) % 5 end -- some of both are 0
    local rows, cols, mine = sum(batch), dims[rank + 1], batch[rank + 1]
    each_format(world, function(c, seed, what)
      local x = tensor(numbers(seed, rank, rows * cols), rows, cols, device):requires_grad()
      local out = ops.alltoall_pooled { a2a_pooled_embs_tensor = x, batch_size_per_rank = batch,
        dim_sum_per_rank = dims, codecs = c, gradient_division = false }:wait()
      local function sent(owner) -- by `owner` for this rank's rows
        local part = cut(numbers(seed, owner, rows * dims[owner + 1]), dims[owner + 1], sum(batch, rank), mine, 0,
          dims[owner + 1])
        return n == 1 and part or through(c.forward, part)
      end
      local want = {}
      for b = 0, mine - 1 do
        for owner = 0, n - 1 do
          local part, d = sent(owner), dims[owner + 1]
          for k = 1, d do want[#want + 1] = part[b * d + k] end
        end
      end
      assert.same(want, out:to_list(), what)
      local total = sum(dims)
      out:backward(tensor(numbers(seed + 1, rank, mine * total), mine, total, device))
      local back = {}
      for r = 0, n - 1 do -- rank r's gradients of this rank's columns
        local part = cut(numbers(seed + 1, r, batch[r + 1] * total), total, 0, batch[r + 1], sum(dims, rank), cols)
        for _, g in ipairs(n == 1 and part or through(c.backward, part)) do back[#back + 1] = g end
      end
      if rows * cols > 0 then assert.same(back, x:grad():to_list(), what .. ", back") end
    end)
  end)

  worlds.each("reduce_scatter_v_pooled, all_gather_base_pooled", function(world, device, n)
    local rank, cols = world.rank_number, 3
    local splits = {}
    for r = 1, n do splits[r] = (r * 7 + 1) % 4 end
    local rows, mine = sum(splits), splits[rank + 1]
    each_format(world, function(c, seed, what)
      local x = tensor(numbers(seed, rank, rows * cols), rows, cols, device):requires_grad()
      local out = ops.reduce_scatter_v_pooled { input = x, input_splits = splits, codecs = c,
        gradient_division = false }:wait()
      local want
      for r = 0, n - 1 do
        local part = cut(numbers(seed, r, rows * cols), cols, sum(splits, rank), mine, 0, cols)
        if n > 1 then part = through(c.forward, part) end
        for i = 1, want and #part or 0 do part[i] = want[i] + part[i] end
        want = f32(part)
      end
      assert.same(want, out:to_list(), what)
      out:backward(tensor(numbers(seed + 1, rank, mine * cols), mine, cols, device))
      local back = {}
      for r = 0, n - 1 do
        local part = numbers(seed + 1, r, splits[r + 1] * cols)
        for _, g in ipairs(n == 1 and part or through(c.backward, part)) do back[#back + 1] = g end
      end
      if rows > 0 then assert.same(back, x:grad():to_list(), what .. ", back") end

      local y = tensor(numbers(seed + 2, rank, 2 * cols), 2, cols, device):requires_grad()
      local all, gathered, summed = ops.all_gather_base_pooled { input = y, codecs = c,
        gradient_division = false }:wait(), {}, nil
      for r = 0, n - 1 do
        local part = numbers(seed + 2, r, 2 * cols)
        for _, v in ipairs(n == 1 and part or through(c.forward, part)) do gathered[#gathered + 1] = v end
      end
      assert.same(gathered, all:to_list(), what)
      all:backward(tensor(numbers(seed + 3, rank, 2 * n * cols), 2 * n, cols, device))
      for r = 0, n - 1 do
        local part = cut(numbers(seed + 3, r, 2 * n * cols), cols, 2 * rank, 2, 0, cols)
        if n > 1 then part = through(c.backward, part) end
        for i = 1, summed and #part or 0 do part[i] = summed[i] + part[i] end
        summed = f32(part)
      end
      assert.same(summed, y:grad():to_list(), what .. ", back")
    end)
  end)

  worlds.each("alltoall_sequence", function(world, device, n)
    local rank, cols = world.rank_number, 3
    -- looked up on `to` for `from`, one feature, one bag each
    local function ids(from, to) return (from * 3 + to * 5 + n) % 4 end
    local sent, received, lengths = {}, {}, {}
    for r = 0, n - 1 do
      sent[r + 1], received[r + 1] = ids(rank, r), ids(r, rank)
      lengths[r + 1] = ids(r, rank)
    end
    each_format(world, function(c, seed, what)
      local x = tensor(numbers(seed, rank, sum(received) * cols), sum(received), cols, device):requires_grad()
      local out = ops.alltoall_sequence { a2a_sequence_embs_tensor = x, num_features = 1, codecs = c,
        gradient_division = false, lengths_after_sparse_data_all2all = peri.tensor(lengths, "i32", device),
        input_splits = sent, output_splits = received,
        batch_size_per_rank = (function() local ones = {} for r = 1, n do ones[r] = 1 end return ones end)() }:wait()
      local want, back = {}, {}
      for owner = 0, n - 1 do
        local before, all = 0, 0
        for r = 0, n - 1 do
          if r < rank then before = before + ids(r, owner) end
          all = all + ids(r, owner)
        end
        local part = cut(numbers(seed, owner, all * cols), cols, before, ids(rank, owner), 0, cols)
        for _, v in ipairs(n == 1 and part or through(c.forward, part)) do want[#want + 1] = v end
      end
      assert.same(want, out:to_list(), what)
      out:backward(tensor(numbers(seed + 1, rank, sum(sent) * cols), sum(sent), cols, device))
      for r = 0, n - 1 do
        local before, all = 0, 0
        for owner = 0, n - 1 do
          if owner < rank then before = before + ids(r, owner) end
          all = all + ids(r, owner)
        end
        local part = cut(numbers(seed + 1, r, all * cols), cols, before, ids(r, rank), 0, cols)
        for _, v in ipairs(n == 1 and part or through(c.backward, part)) do back[#back + 1] = v end
      end
      if #back > 0 then assert.same(back, x:grad():to_list(), what .. ", back") end
    end)
  end)
end)

describe("codecs that differ", function()
  local pairs_of = {
    { "8-bit formats", { comm_precision = "FP8" }, { comm_precision = "INT8" } },
    { "rows", { comm_precision = "INT8", row_dim = 4 }, { comm_precision = "INT8", row_dim = 8 } },
    { "scales", { comm_precision = "FP16", loss_scale = 2 }, { comm_precision = "FP16" } },
    { "exponent bits", { comm_precision = "FP8", exponent_bits = 4 }, { comm_precision = "FP8", exponent_bits = 5 } },
    { "16-bit formats", { comm_precision = "FP16" }, { comm_precision = "BF16" } },
    { "one and none", { comm_precision = "FP16" }, { comm_precision = "FP32" } },
  }
  for _, case in ipairs(pairs_of) do
    for _, direction in ipairs { "forward", "backward" } do
      worlds.each(("in their %s, %s, are an error on all ranks"):format(case[1], direction), function(world, device)
        local c = codec.QuantizedCommCodecs { [direction] = codec.QuantizedCommCodec(case[world.rank_number == 1 and 3
          or 2]) }
        local ok, err = pcall(function()
          return ops.reduce_scatter_base_pooled { input = peri.ones({ 6, 8 }, "f32", device), codecs = c }:wait()
        end)
        assert.is_false(ok)
        assert.equal("EMISMATCH", err.name)
        assert.matches("rank 1 posted", err.message)
        assert.is_false(world:is_healthy())
      end, { sizes = { 2, 3 }, devices = { "cpu" }, timeout = 2, only = "sim" })
    end
  end
end)
