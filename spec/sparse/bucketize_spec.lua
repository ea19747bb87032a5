-- Buckets: the worked example of TorchRec's row-wise input distribution, KJTs of both kinds, random ids against plain
-- Lua, bad input.
-- cuda: always
local peri = require "perilune"
local KJT, sparse = peri.KeyedJaggedTensor, peri.sparse

for _, device in ipairs(require "spec.support.devices") do
  local function t(data, dtype) return peri.tensor(data, dtype, device) end

  describe("bucketize on " .. device, function()
    -- f0 has 10 rows in blocks of 3, f1 has 5 rows in blocks of 2, over 4 ranks.
    local function example(weights)
      return KJT { keys = { "f0", "f1" }, values = t({ 0, 9, 4, 4, 0, 3, 2 }, "i64"),
        lengths = t({ 2, 1, 1, 3 }, "i32"), weights = weights }
    end

    it("cuts a KJT as TorchRec does", function()
      local kjt, permute = sparse.bucketize_kjt_before_all2all(example(),
        { num_buckets = 4, block_sizes = { 3, 2 }, output_permute = true, bucketize_pos = true })
      assert.same({ "f0", "f1", "f0", "f1", "f0", "f1", "f0", "f1" }, kjt:keys())
      assert.same({ 1, 0, 0, 1, 0, 1, 0, 2, 0, 0, 1, 0, 1, 0, 0, 0 }, kjt:lengths():to_list())
      assert.same({ 0, 0, 1, 1, 0, 0, 0 }, kjt:values():to_list())
      assert.same({ 0, 0, 0, 1, 2, 0, 1 }, kjt:weights():to_list())
      assert.equal("i64", kjt:weights():dtype())
      assert.same({ 0, 6, 2, 5, 1, 3, 4 }, permute:to_list())
      assert.same({ 1, 1, 1, 2, 0, 1, 1, 0 }, kjt:length_per_key())
      assert.equal(2, kjt:stride())
      kjt:validate()
      assert.equal(1, kjt:longest() - 1)
    end)

    it("keeps weights with their ids", function()
      local weighted = example(t { 1, 2, 3, 4, 5, 6, 7 })
      local kjt, permute = sparse.bucketize_kjt_before_all2all(weighted, { num_buckets = 2, block_sizes = { 5, 3 } })
      assert.is_nil(permute)
      assert.same({ 0, 4, 0, 2, 4, 1, 0 }, kjt:values():to_list())
      assert.same({ 1, 3, 5, 7, 2, 4, 6 }, kjt:weights():to_list())
      local kept = sparse.bucketize_kjt_before_all2all(example(),
        { num_buckets = 2, block_sizes = { 5, 3 }, keep_original_indices = true })
      assert.same({ 0, 4, 0, 2, 9, 4, 3 }, kept:values():to_list())
    end)

    it("cuts variable batches", function()
      local kjt = KJT { keys = { "f0", "f1" }, values = t({ 0, 9, 4, 4, 0, 3, 2 }, "i32"),
        lengths = t({ 2, 1, 4 }, "i64"), stride_per_key_per_rank = { { 1, 1 }, { 0, 1 } } }
      local cut = sparse.bucketize_kjt_before_all2all(kjt, { num_buckets = 2, block_sizes = { 5, 3 } })
      assert.same({ { 1, 1 }, { 0, 1 }, { 1, 1 }, { 0, 1 } }, cut:stride_per_key_per_rank())
      assert.same({ 2, 2, 1, 2 }, cut:length_per_key())
      assert.same({ 0, 4, 0, 2, 4, 1, 0 }, cut:values():to_list())
      assert.equal("i32", cut:values():dtype())
      assert.equal("i64", cut:lengths():dtype())
    end)

    it("is what plain Lua says for random ids", function()
      local state = 11
      local function draw(below)
        state = (state * 16807) % 2147483647
        return state % below
      end
      for _, p in ipairs { 1, 2, 3, 8, 100 } do
        for _, dtype in ipairs { "i64", "i32" } do
          local features, bags = 3, 40
          local blocks, bounds, lengths, ids = { 7, 1000003, 0 }, { false, false, false }, {}, {}
          if p > 1 then
            bounds[1] = { 0 }
            for b = 1, p do bounds[1][b + 1] = bounds[1][b] + draw(9) end
          end
          for bag = 1, features * bags do
            lengths[bag] = draw(4) == 0 and draw(60) or draw(4)
            if p == 8 and dtype == "i64" and bag % 15 == 0 then lengths[bag] = draw(5000) end -- as far as 4,096 ids
            local f = math.ceil(bag / bags)
            for _ = 1, lengths[bag] do
              local most = f == 1 and 5 * p + 9 or f == 2 and math.min(1000003 * p * 1.2, 2 ^ 31 - 1) or 2 ^ 31 - 1
              ids[#ids + 1] = draw(math.floor(most))
            end
          end
          local slots, want = {}, { {}, {}, {} }
          local unbucketize, i = {}, 0
          for bag = 1, features * bags do
            local f = math.ceil(bag / bags)
            for k = 1, lengths[bag] do
              i = i + 1
              local u = ids[i]
              local bucket, id = u % p, math.floor(u / p)
              if bounds[f] and u < bounds[f][p + 1] then
                bucket = 0
                while u >= bounds[f][bucket + 2] do bucket = bucket + 1 end
                id = u - bounds[f][bucket + 1]
              elseif not bounds[f] and u < blocks[f] * p then
                bucket, id = math.floor(u / blocks[f]), u % blocks[f]
              end
              local slot = bucket * features * bags + bag
              slots[slot] = slots[slot] or {}
              table.insert(slots[slot], { id, k - 1, i })
            end
          end
          for slot = 1, p * features * bags do
            want[3][slot] = slots[slot] and #slots[slot] or 0
            for _, entry in ipairs(slots[slot] or {}) do
              table.insert(want[1], entry[1])
              table.insert(want[2], entry[2])
              unbucketize[entry[3]] = #want[1] - 1
            end
          end
          local r = sparse.block_bucketize_sparse_features { lengths = t(lengths, "i32"), indices = t(ids, dtype),
            block_sizes = blocks, my_size = p, block_bucketize_pos = bounds, sequence = true, bucketize_pos = true }
          assert.same(want[3], r.lengths:to_list())
          assert.same(want[1], r.indices:to_list())
          assert.same(want[2], r.positions:to_list())
          assert.same(unbucketize, r.unbucketize_permute:to_list())
        end
      end
    end)

    it("refuses lengths that are wrong when its work has been queued, and goes on", function()
      local case = 0
      local function draw(n)
        case = case + 1
        return math.floor(peri.Tensor.uniform({ 1 }, 0, n, case):item())
      end
      for round = 1, 24 do
        local n, lengths, sum, ids = draw(round % 4 == 0 and 2000 or 40), {}, 0, {}
        for i = 1, 2 * draw(20) do lengths[i] = draw(10) - 2 end
        for _, length in ipairs(lengths) do sum = length < 0 and math.huge or sum + length end
        for i = 1, n do ids[i] = draw(1000) end
        local all = { lengths = t(lengths, "i32"), indices = t(ids, round % 2 == 0 and "i64" or "i32"),
          block_sizes = { draw(500), draw(3) }, my_size = ({ 1, 7, 60, 700 })[1 + round % 4], sequence = round % 3 == 0,
          bucketize_pos = round % 5 == 0, weights = round % 7 == 0 and t(ids) or nil }
        assert.equal(n == sum, (pcall(sparse.block_bucketize_sparse_features, all)))
      end
      local r = sparse.block_bucketize_sparse_features { lengths = t({ 1, 1 }, "i32"), indices = t({ 3, 4 }, "i64"),
        block_sizes = { 2, 3 }, my_size = 2 }
      assert.same({ { 0, 0, 1, 1 }, { 1, 1 } }, { r.lengths:to_list(), r.indices:to_list() })
    end)

    it("names what is wrong", function()
      local function bad(pattern, a)
        local all = { lengths = t({ 1, 1 }, "i32"), indices = t({ 3, 4 }, "i64"), block_sizes = { 2, 2 }, my_size = 2 }
        for k, v in pairs(a) do all[k] = v end
        assert.error_matches(function() sparse.block_bucketize_sparse_features(all) end, pattern)
      end
      bad("feature 1, sample 0: length %-1", { lengths = t({ 1, -1 }, "i32") })
      bad("sum to 3, but there are 2", { lengths = t({ 2, 1 }, "i32") })
      bad("sum to 1, but there are 2", { lengths = t({ 1, 0 }, "i32"), my_size = 600 })
      bad("sum to 0, but there are 2", { lengths = t({}, "i32"), my_size = 600 })
      bad("3 lengths for 2 features", { lengths = t({ 1, 1, 0 }, "i32") })
      bad("and other batch sizes", { batch_size_per_feature = { 2, 1 } })
      bad("and other batch sizes", { batch_size_per_feature = { -1, 3 } })
      bad("1 batch sizes for 2", { batch_size_per_feature = { 2 } })
      bad("ids are f32", { indices = t { 1, 2 } })
      bad("0 buckets", { my_size = 0 })
      bad("block size %-1", { block_sizes = { 2, -1 } })
      bad("less than 2%^63", { block_sizes = { 2, 2LL ^ 62 } })
      bad("3 blocks of 2 for 2 buckets, wanted a multiple", { total_num_blocks = { 2, 3 } })
      bad("1 total_num_blocks for 2", { total_num_blocks = { 2 } })
      bad("2 bounds of feature 0 for 2 buckets", { block_bucketize_pos = { { 0, 3 } } })
      bad("bound 0 is 1, wanted: 0 first", { block_bucketize_pos = { { 1, 3, 4 } } })
      bad("feature 1: bound 2 is 2", { block_bucketize_pos = { false, { 0, 3, 2 } } })
      bad("weights of other ids", { weights = t { 1 } })
      assert.error_matches(function()
        sparse.bucketize_kjt_before_all2all(example(), { num_buckets = 2, block_sizes = { 3 } })
      end,
        "1 block sizes for 2 keys")
    end)
  end)
end
