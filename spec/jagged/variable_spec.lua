-- The law of variable batches: each operation on a batch whose samples share bags by inverse indices does what it does
-- on the batch that has each sample's bags written out. Random batches, with and without weights, on both devices.
-- cuda: always
local peri = require "perilune"
local draw = require("spec.support.tbe").generator(19)
local KJT = peri.KeyedJaggedTensor

local NAMES = { "a", "b", "c", "d", "e" }

--- A random variable batch, and what it stands for: by key the list of its samples' bags of { id, weight }.
local function random(device, weighted, first, count)
  local keys, values, weights, lengths, strides, rows, whole = {}, {}, {}, {}, {}, {}, {}
  local samples, ranks = 1 + draw(5), 1 + draw(2)
  for k = 1, count do
    local bags = {}
    keys[k], strides[k] = NAMES[first + k - 1], {}
    for r = 1, ranks do
      strides[k][r] = (r == 1 and 1 or 0) + draw(3)
      for _ = 1, strides[k][r] do
        local bag = {}
        for i = 1, draw(4) do bag[i] = { draw(50), weighted and draw(64) / 8 or 1 } end
        for _, x in ipairs(bag) do values[#values + 1], weights[#weights + 1] = x[1], x[2] end
        bags[#bags + 1], lengths[#lengths + 1] = bag, #bag
      end
    end
    rows[k], whole[keys[k]] = {}, {}
    for s = 1, samples do
      rows[k][s] = draw(#bags)
      whole[keys[k]][s] = bags[rows[k][s] + 1]
    end
  end
  local order, list = {}, {} -- the rows of the inverse indices are in an order of their own
  for k = 1, count do table.insert(order, draw(k) + 1, k) end
  for i, k in ipairs(order) do list[i] = rows[k] end
  local names = peri.util.map(order, function(k) return keys[k] end)
  local kjt = KJT { keys = keys, values = peri.tensor(values, "i64", device),
    lengths = peri.tensor(lengths, draw(2) == 1 and "i32" or "i64", device),
    weights = weighted and peri.tensor(weights, "f32", device) or nil, stride_per_key_per_rank = strides,
    inverse_indices = { names, peri.tensor(list, draw(2) == 1 and "i32" or "i64", device) } }
  return kjt, whole, samples
end

--- What a batch stands for, by key: each key's bags as they are, put where its inverse indices say.
local function expanded(kjt)
  local inverse, result = kjt:inverse_indices(), {}
  local rows, bags = inverse[2]:to_table(), kjt:to_dict()
  assert.equal(kjt:stride(), inverse[2]:size(2))
  for i, name in ipairs(inverse[1]) do
    local ids, weights = bags[name]:to_dense(), kjt:is_weighted() and bags[name]:to_dense_weights()
    local list = {}
    for b = 1, #ids do
      local own, factors = ids[b]:to_list(), weights and weights[b]:to_list()
      list[b] = {}
      for k, id in ipairs(own) do list[b][k] = { id, factors and factors[k] or 1 } end
    end
    result[name] = peri.util.map(rows[i], function(row) return list[row + 1] end)
  end
  return result
end

local function some(whole, names)
  local result = {}
  for _, name in ipairs(names) do result[name] = whole[name] end
  return result
end

for _, device in ipairs(require "spec.support.devices") do
  local other = device == "cpu" and "opaque" or "cpu"
  for _, weighted in ipairs { false, true } do
    describe(("Operations on variable batches on %s, %s"):format(device, weighted and "weighted" or "unweighted"),
      function()
      local function each(f)
        for _ = 1, 15 do
          local count = 1 + draw(4)
          local kjt, whole, samples = random(device, weighted, 1, count)
          assert.same(whole, expanded(kjt))
          f(kjt, whole, count, samples)
        end
      end

      it("permute, with repeats and some keys alone, and twice as once", function()
        each(function(kjt, whole, count, samples)
          local index, again, both = {}, {}, {}
          for i = 1, draw(count + 2) do index[i] = draw(count) end
          local once = kjt:permute(index)
          assert.same(some(whole, once:keys()), expanded(once))
          assert.equal(samples, once:stride())
          for i = 1, #index > 0 and draw(4) or 0 do
            again[i] = draw(#index)
            both[i] = index[again[i] + 1]
          end
          assert.is_true(once:permute(again):equal(kjt:permute(both)))
          once:validate()
        end)
      end)

      it("split, and joined again", function()
        each(function(kjt, whole, count)
          local segments, left = {}, count
          while left > 0 do
            segments[#segments + 1] = draw(left + 1)
            left = left - segments[#segments]
          end
          local parts, inverse = kjt:split(segments), kjt:inverse_indices()
          for _, part in ipairs(parts) do
            assert.same(some(whole, part:keys()), expanded(part))
            part:validate()
          end
          local joined = KJT.concat(parts)
          assert.same(whole, expanded(joined))
          assert.same(kjt:keys(), joined:keys())
          assert.equal(inverse[2]:size(1), joined:inverse_indices()[2]:size(1))
        end)
      end)

      it("join with others of as many samples", function()
        each(function(kjt, whole, count)
          local more, there
          repeat more, there = random(device, weighted, count + 1, 1) until more:stride() == kjt:stride()
            and #more:stride_per_key_per_rank()[1] == #kjt:stride_per_key_per_rank()[1]
          there = some(there, more:keys())
          for name, bags in pairs(whole) do there[name] = bags end
          assert.same(there, expanded(KJT.concat { more, kjt }))
        end)
      end)

      it("move, pin, share and copy", function()
        each(function(kjt, whole)
          for _, batch in ipairs { kjt:to(other), kjt:to(other, true), kjt:to(device), kjt:share(),
            kjt:to(other):to(device), KJT.empty_like(kjt):copy_(kjt), KJT.empty_like(kjt, other):copy_(kjt),
            kjt:unsync():sync(), kjt:flatten_lengths(), device == "cpu" and kjt:pin_memory("opaque") or kjt } do
            assert.same(whole, expanded(batch))
            assert.equal(kjt:stride(), batch:stride())
            assert.is_true(batch:equal(kjt))
            batch:validate()
          end
        end)
      end)

      it("take other ids and weights", function()
        each(function(kjt, whole)
          local n = kjt:values():numel()
          local ids, factors = {}, {}
          for i = 1, n do ids[i], factors[i] = 50 + i, i / 4 end
          local changed = kjt:with_values(peri.tensor(ids, "i64", device)):with_weights(peri.tensor(factors, "f32",
            device))
          assert.is_true(changed:with_values(kjt:values()):permute({}):equal(
            kjt:with_weights(changed:weights()):permute({})))
          local old, at = kjt:values():to_list(), {}
          for i, id in ipairs(changed:values():to_list()) do at[id] = i end
          for name, bags in pairs(expanded(changed)) do -- any order
            for s, bag in ipairs(bags) do
              assert.equal(#whole[name][s], #bag)
              for i, x in ipairs(bag) do
                assert.equal(whole[name][s][i][1], old[at[x[1]]])
                assert.equal(at[x[1]] / 4, x[2])
              end
            end
          end
          assert.equal(kjt:stride(), changed:stride())
          local part = kjt:split({ 1, #kjt:keys() - 1 })[1]
          assert.is_true(part:equal(part:with_values(part:values())))
        end)
      end)

      it("deal ids to buckets", function()
        each(function(kjt, whole, count)
          local blocks = {}
          for k = 1, count do blocks[k] = 25 end
          local cut = peri.sparse.bucketize_kjt_before_all2all(kjt, { num_buckets = 2, block_sizes = blocks })
          for bucket = 0, 1 do
            local want = {}
            for name, bags in pairs(whole) do -- any order
              want[name] = peri.util.map(bags, function(bag)
                local own = {}
                for _, x in ipairs(bag) do
                  if math.floor(x[1] / 25) == bucket then own[#own + 1] = { x[1] % 25, x[2] } end
                end
                return own
              end)
            end
            local part = cut:split({ count, count })[bucket + 1]
            assert.same(want, expanded(part))
          end
        end)
      end)

      it("are looked up as the batch that is written out, in any order of keys", function()
        local ebc = peri.EmbeddingBagCollection { device = device, is_weighted = weighted, tables = {
          peri.EmbeddingBagConfig { name = "t", num_embeddings = 50, embedding_dim = 4,
            feature_names = { "b", "a" } } },
          fused_params = { optimizer = "sgd", learning_rate = 0 } }
        for _ = 1, 10 do
          local kjt, whole = random(device, weighted, 1, 3)
          local plain = { keys = { "a", "b" }, weights = weighted and {} or nil, device = device }
          for k, name in ipairs(plain.keys) do
            plain[k] = peri.util.map(whole[name], function(bag)
              return peri.util.map(bag, function(x) return x[1] end)
            end)
            if weighted then
              plain.weights[k] = peri.util.map(whole[name], function(bag)
                return peri.util.map(bag, function(x) return x[2] end)
              end)
            end
          end
          local want = ebc(KJT.from_lists(plain)):values():to_table()
          assert.same(want, ebc(kjt):values():to_table())
          assert.same(want, ebc(kjt:permute { 2, 0, 1 }):values():to_table())
          assert.same(want, ebc(kjt:split({ 2, 1 })[1]):values():to_table())
        end
      end)
    end)
  end
end
