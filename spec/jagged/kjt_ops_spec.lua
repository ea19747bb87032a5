-- KeyedJaggedTensor: operations on random batches against plain Lua lists, gradients of weights, exchanges, bad input.
-- cuda: always
local peri = require "perilune"
local KJT = peri.KeyedJaggedTensor

--- A generator of whole numbers in [0, below), the same for the same seed.
local function numbers(seed)
  local state = seed
  return function(below)
    state = (state * 16807) % 2147483647
    return state % below
  end
end

--- Bags of random ids and weights: { keys =, [key] = { bags }, weights = { [key] = { bags } } }; rows[k] bags for key
--- k.
local function random_lists(draw, keys, rows)
  local lists = { keys = keys, weights = {} }
  for k = 1, #keys do
    lists[k], lists.weights[k] = {}, {}
    for b = 1, rows[k] do
      lists[k][b], lists.weights[k][b] = {}, {}
      for i = 1, draw(3) == 0 and 0 or draw(5) do
        lists[k][b][i] = draw(1000)
        lists.weights[k][b][i] = draw(1000) / 8
      end
    end
  end
  return lists
end

--- The content of a KJT as lists of bags per key.
local function content(kjt)
  local values, lengths, at = kjt:values():to_list(), kjt:lengths():to_list(), 1
  local weights = kjt:weights_or_none() and kjt:weights():to_list()
  local out, bag, strides = { weights = weights and {} }, 1, kjt:stride_per_key()
  for k = 1, #strides do
    out[k] = {}
    if weights then out.weights[k] = {} end
    for b = 1, strides[k] do
      local ids, own = {}, {}
      for i = 1, lengths[bag] do
        ids[i], own[i] = values[at], weights and weights[at]
        at = at + 1
      end
      out[k][b] = ids
      if weights then out.weights[k][b] = own end
      bag = bag + 1
    end
  end
  assert.equal(#values, at - 1)
  return out
end

local function pick(lists, index, weighted)
  local out = { weights = weighted and {} or nil }
  for i, k in ipairs(index) do
    out[i] = lists[k]
    if weighted then out.weights[i] = lists.weights[k] end
  end
  return out
end

local keys = { "a", "b", "c", "d" }

for _, device in ipairs(require "spec.support.devices") do
  for _, weighted in ipairs { false, true } do
    for _, rows in ipairs { { 3, 3, 3, 3 }, { 2, 0, 5, 1 }, { 0, 0, 0, 0 } } do
      local kind = weighted and "weighted" or "unweighted"
      describe(("KeyedJaggedTensor on %s, %s, rows %s"):format(device, kind, table.concat(rows, " ")), function()
        local lists = random_lists(numbers(rows[1] + 7), keys, rows)
        local function make(l)
          return KJT.from_lists { keys = l.keys, weights = weighted and l.weights or nil, device = device, unpack(l) }
        end

        it("permutes", function()
          for _, index in ipairs { { 3, 2, 1, 0 }, { 1 }, {}, { 2, 2, 0, 2 }, { 0, 1, 2, 3 } } do
            local want = pick(lists, peri.util.map(index, function(i) return i + 1 end), weighted)
            local kjt = make(lists):permute(index)
            assert.same(want, content(kjt))
            assert.same(peri.util.map(index, function(i) return keys[i + 1] end), kjt:keys())
            kjt:validate()
          end
        end)

        it("splits and joins", function()
          local kjt = make(lists)
          for _, segments in ipairs { { 4 }, { 1, 1, 1, 1 }, { 0, 3, 0, 1 }, { 2, 2 } } do
            local parts, first = kjt:split(segments), 0
            for i, part in ipairs(parts) do
              local index = {}
              for k = 1, segments[i] do index[k] = first + k end
              assert.same(pick(lists, index, weighted), content(part))
              part:validate()
              first = first + segments[i]
            end
            assert.is_true(KJT.concat(parts):equal(kjt))
          end
        end)

        it("goes through dictionaries", function()
          local kjt = make(lists)
          assert.is_true(KJT.from_jt_dict(kjt:to_dict()):equal(kjt))
          local turned = KJT.from_jt_dict(kjt:to_dict(), { "d", "a" })
          assert.same(pick(lists, { 4, 1 }, weighted), content(turned))
        end)

        it("moves and copies", function()
          local kjt, other = make(lists), device == "cpu" and "opaque" or "cpu"
          local there = kjt:to(other)
          assert.equal(other, there:device())
          assert.is_true(there:describe().synced)
          assert.is_true(there:equal(kjt))
          assert.is_true(peri.jagged.kjt_is_equal(there, kjt))
          assert.is_false(peri.jagged.kjt_is_equal(KJT.from_jt_dict(kjt:to_dict(), { "d", "a" }), kjt)) -- of other keys
          assert.is_true(there:to(device):validate():equal(kjt))
          assert.is_true(KJT.empty_like(kjt):copy_(kjt):equal(kjt))
          local room = KJT.empty_like(kjt, other)
          assert.is_true(room:copy_(kjt):equal(kjt))
          assert.same(kjt:length_per_key(), room:length_per_key())
          assert.same(kjt:offsets():to_list(), room:offsets():to_list())
          room:copy_(kjt):validate() -- into derived offsets too
        end)

        -- Every world size: rank s holds a batch of its own; what rank r gets of all is rebuilt and compared.
        it("is rebuilt after an exchange", function()
          for _, world in ipairs { { 1, 1 }, { 2, 1 }, { 3, 1 }, { 4, 2 }, { 6, 3 } } do
            local ranks, stagger, draw = world[1], world[2], numbers(world[1] + 3)
            local variable = rows[1] ~= rows[2]
            local batches, kjts = {}, {}
            for s = 1, ranks do
              local own = {}
              for k = 1, 4 do own[k] = variable and draw(4) or (s == 2 and 0 or rows[1] + s) end
              batches[s] = random_lists(draw, keys, own)
              kjts[s] = make(batches[s])
              if variable and kjts[s]:describe().ranks == 0 then -- equal by chance
                kjts[s] = KJT { keys = keys, values = kjts[s]:values(), lengths = kjts[s]:lengths(),
                  weights = kjts[s]:weights_or_none(), stride_per_key_per_rank = peri.util.map(own, function(n)
                    return { n }
                  end) }
              end
            end
            local splits = { 3, 1, 0, 0, 0, 0 }
            if ranks == 1 then splits = { 4 } end
            while #splits > ranks do splits[#splits] = nil end
            local first = 0
            for r = 1, ranks do
              local lengths, values, weights, strides, per_rank = {}, {}, {}, {}, {}
              for s = 1, ranks do
                local part = kjts[s]:split(splits)[r]
                for _, x in ipairs(part:lengths():to_list()) do lengths[#lengths + 1] = x end
                for _, x in ipairs(part:values():to_list()) do values[#values + 1] = x end
                if weighted then
                  for _, x in ipairs(part:weights():to_list()) do weights[#weights + 1] = x end
                end
                strides[s], per_rank[s] = part:stride_per_key(), kjts[s]:stride()
              end
              local own, want = {}, { weights = weighted and {} or nil }
              for k = 1, splits[r] do
                own[k], want[k] = keys[first + k], {}
                if weighted then want.weights[k] = {} end
                for x = 0, ranks / stagger - 1 do
                  for y = 0, stagger - 1 do
                    local s = x + ranks / stagger * y + 1
                    for b, bag in ipairs(batches[s][first + k]) do
                      table.insert(want[k], bag)
                      if weighted then table.insert(want.weights[k], batches[s].weights[first + k][b]) end
                    end
                  end
                end
              end
              local kjt = KJT.dist_init { keys = own, lengths = peri.tensor(lengths, "i32", device),
                values = peri.tensor(values, "i64", device), num_workers = ranks, stagger = stagger,
                weights = weighted and peri.tensor(weights, "f32", device) or nil,
                strides = variable and strides or nil, stride_per_rank = not variable and per_rank or nil }
              assert.same(want, content(kjt))
              assert.equal(variable, kjt:variable_stride_per_key())
              kjt:validate()
              first = first + splits[r]
            end
          end
        end)
      end)
    end
  end

  describe("KeyedJaggedTensor on " .. device, function()
    local function t(data, dtype) return peri.tensor(data, dtype, device) end
    local function example(weights)
      return KJT { keys = { "A", "B" }, values = t({ 0, 1, 2, 3, 4, 5, 6, 7 }, "i64"),
        lengths = t({ 2, 0, 1, 1, 1, 3 }, "i32"), weights = weights }
    end

    it("sends the gradients of weights back", function()
      local w = t({ 1, 2, 3, 4, 5, 6, 7, 8 }):requires_grad()
      local kjt = example(w)
      kjt:permute({ 1, 0, 1 }):weights():backward(t { 1, 2, 3, 4, 5, 6, 7, 8, 10, 20, 30, 40, 50 })
      assert.same({ 6, 7, 8, 11, 22, 33, 44, 55 }, w:grad():to_list())
      w:set_grad()
      kjt:permute({ 1 }):weights():backward(t { 1, 2, 3, 4, 5 })
      assert.same({ 0, 0, 0, 1, 2, 3, 4, 5 }, w:grad():to_list())
      w:set_grad()
      kjt.A:weights():backward(t { 1, 2, 3 })
      kjt:split({ 1, 1 })[2]:weights():backward(t { 4, 5, 6, 7, 8 })
      assert.same({ 1, 2, 3, 4, 5, 6, 7, 8 }, w:grad():to_list())
      w:set_grad()
      local other = KJT { keys = { "C" }, values = t({ 9 }, "i64"), lengths = t({ 0, 1, 0 }, "i32"), weights = t { 0 } }
      KJT.concat({ other, kjt }):weights():backward(t { 9, 1, 2, 3, 4, 5, 6, 7, 8 })
      assert.same({ 1, 2, 3, 4, 5, 6, 7, 8 }, w:grad():to_list())
    end)

    it("keeps inverse indices where they hold", function()
      local inverse = { { "B", "A" }, t({ { 0, 3, 1, 2, 2 }, { 1, 0, 0, 0, 0 } }, "i64") }
      local kjt = KJT { keys = { "A", "B" }, values = t({ 0, 1, 2, 3, 4, 5, 6, 7 }, "i64"),
        lengths = t({ 2, 0, 1, 1, 1, 3 }, "i32"), stride_per_key_per_rank = { { 2 }, { 4 } },
        inverse_indices = inverse }
      local other = device == "cpu" and "opaque" or "cpu"
      local moved = kjt:to(other)
      assert.equal(other, moved:inverse_indices()[2]:device())
      assert.is_true(moved:equal(kjt))
      local room = KJT.empty_like(kjt)
      room:copy_(kjt)
      assert.same(inverse[2]:to_table(), room:inverse_indices()[2]:to_table())
      inverse[2]:slice(1, 0, 1):fill(0)
      assert.is_false(room:equal(kjt)) -- compared, and not shared
      local offsets = kjt:offsets_or_none() and 7 * 8 or 0
      assert.equal(kjt:size_in_bytes(), KJT.empty_like(kjt):copy_(kjt):size_in_bytes() + offsets)
      assert.is_true(kjt:permute({ 0, 1 }):equal(kjt))
      assert.equal(5, kjt:permute({ 1 }):stride())
      local two = KJT.concat { kjt, KJT { keys = { "C" }, values = t({ 7 }, "i64"), lengths = t({ 1 }, "i32"),
        stride_per_key_per_rank = { { 1 } }, inverse_indices = { { "C" }, t({ { 0, 0, 0, 0, 0 } }, "i32") } } }
      assert.same({ "B", "A", "C" }, two:inverse_indices()[1])
      assert.same({ 3, 5 }, two:inverse_indices()[2]:shape())
    end)

    it("says what does not fit together", function()
      local kjt = example()
      local function bad(pattern, f) assert.error_matches(f, pattern) end
      bad("index 2 at position 1, allowed: 0%.%.1", function() kjt:permute { 0, 2 } end)
      bad("index %-1", function() kjt:permute { -1 } end)
      bad("sum to 3, but there are 2 keys", function() kjt:split { 1, 2 } end)
      bad("segment 1 has %-1 keys", function() kjt:split { 3, -1 } end)
      bad("0 kjts", function() KJT.concat {} end)
      bad("entry 2 is a number", function() KJT.concat { kjt, 3 } end)
      bad("key 'A' occurs twice", function() KJT.concat { kjt, kjt } end)
      local function other(a)
        a.keys, a.values = { "C" }, a.values or t({}, "i64")
        a.lengths = a.lengths or t({ 0, 0, 0 }, "i32")
        return KJT.concat { kjt, KJT(a) }
      end
      other {}
      assert.equal("i64", other({ lengths = t({ 0, 0, 0 }, "i64") }):lengths():dtype())
      bad("number 1 is weighted, number 0 is not", function() other { weights = t {} } end)
      bad("number 1 has stride 2, number 0 has 3", function() other { lengths = t({ 0, 0 }, "i32") } end)
      bad("number 1 has 1 ranks", function() other { stride_per_key_per_rank = { { 3 } } } end)
      bad("part 1 is i32 %[0%], part 0 i64 %[8%]", function() other { values = t({}, "i32") } end)
      bad("no key 'C'; keys: A, B", function() return kjt.C end)
      bad("no key 'C'", function() return kjt:get "C" end)
      bad("'B' is a nil", function() KJT.from_jt_dict({ A = kjt.A }, { "A", "B" }) end)
      local weighted = example(peri.ones({ 8 }, "f32", device))
      bad("key 'b' is weighted, key 'a' is not", function() KJT.from_jt_dict { a = kjt.A, b = weighted.A } end)
      bad("0 weights for 1 ids", function() KJT.from_lists { keys = { "a" }, { { 1 } }, weights = { { {} } } } end)
      bad("bags of 1 keys for 2", function() KJT.from_lists { keys = { "a", "b" }, { { 1 } } } end)
      bad("keys differ", function() KJT.empty_like(kjt):copy_(kjt:permute { 1, 0 }) end)
      bad("0 values into room for 8", function()
        KJT.empty_like(kjt):copy_(KJT { keys = { "A", "B" }, values = t({}, "i64"),
          lengths = peri.zeros({ 6 }, "i32", device) })
      end)
      bad("one is weighted", function() KJT.empty_like(kjt):copy_(weighted) end)
      bad("sum to 1, but there are 2 keys", function() kjt:dist_splits { 1 } end)
      bad("%-1 keys for rank 0", function() kjt:dist_splits { -1, 3 } end)
    end)

    it("does not believe received lengths", function()
      local function received(lengths, strides)
        return KJT.dist_init({ keys = { "A", "B" }, lengths = t(lengths, "i32"), values = t({ 0, 1, 2, 3 }, "i64"),
          num_workers = 2, stride_per_rank = strides }):sync()
      end
      assert.same({ 0, 2, 1, 3 }, received({ 1, 1, 1, 1 }, { 1, 1 }):values():to_list())
      assert.error_matches(function() received({ 1, 1, 1, 2 }, { 1, 1 }) end, "key 'B', sample 1 ends at 5")
      assert.error_matches(function() received({ 1, -1, 1, 3 }, { 1, 1 }) end, "key 'B', sample 0: length %-1")
      assert.error_matches(function() received({ 1, 2147483647, 1, 3 }, { 1, 1 }) end,
        "key 'B', sample 0: length 2147483647")
      assert.error_matches(function() received({ 1, 1, 1, 1 }, { 1, 2 }) end,
        "rank 1 sent 2 rows of key 'B', 0 lengths are left")
      assert.error_matches(function() received({ 1, 1, 1, 1 }, { 1, 0 }) end, "2 lengths more than the strides say")
      assert.error_matches(function() received({ 1, 1, 1, 1 }, { 3, -1 }) end, "rank 1 has a batch of %-1")
      assert.error_matches(function() received({ 1, 1, 1, 1 }, { 3, 0 }) end, "rank 0 sent 3 rows of key 'B'")
      assert.error_matches(function() received({ 1, 1, 1, 1 }, { 1 }) end, "strides of 1 x 1 for 2 workers")
    end)

    it("is empty without keys", function()
      local none = KJT.empty { device = device, is_weighted = true, values_dtype = "i32", lengths_dtype = "i64" }
      assert.same({ 0, 0, {}, { 0 } }, { #none, none:stride(), none:keys(), none:offset_per_key() })
      assert.equal("i32", none:values():dtype())
      assert.equal("f32", none:weights():dtype())
      assert.equal("i64", none:lengths():dtype())
      assert.is_true(none:permute({}):equal(none))
      assert.is_true(KJT.concat({ none, none }):equal(none))
    end)
  end)
end
