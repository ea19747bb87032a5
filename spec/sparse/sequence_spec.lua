-- Sequences in jagged tensors: attention against padded dense attention by PyTorch (spec/golden/sequences.py) and
-- central differences, places and times, joining and cutting; on both devices.
-- cuda: always
local peri = require "perilune"
local sparse = peri.sparse
local devices = require "spec.support.devices"
local golden = require "spec.support.golden"
local gradcheck = require "spec.support.gradcheck"
local sequences = require "spec.support.sequences"

local document = sequences.document

local function load(entry, device) return peri.tensor({ unpack(entry[3]) }, entry[1], device, { unpack(entry[2]) }) end
local function i64(list, device) return peri.tensor(list, "i64", device) end
local function list(t) return table.concat(t:to_list(), " ") end

for _, device in ipairs(devices) do
  describe("on " .. device, function()
    it("attention is padded dense attention, and so are its gradients", function()
      for _, case in ipairs(document.cases) do
        local f, inputs = sequences.attention(case.args, device), {}
        for i, entry in ipairs(case["in"]) do inputs[i] = load(entry, device):requires_grad() end
        local out = f(unpack(inputs))
        assert.same(case.out[2], out:shape(), case.name)
        golden.assert_near(case.out[3], out:to_list(), document.tolerance, case.name)
        out:backward(load(case.up, device))
        for i, entry in ipairs(case.grad) do
          golden.assert_near(entry[3], inputs[i]:grad():to_list(), document.tolerance,
            ("%s: gradient %d"):format(case.name, i))
        end
      end
    end)

    it("its gradients are central differences, whatever the layout of q, k and v", function()
      for at, case in ipairs(document.cases) do
        local f, rows = sequences.attention(case.args, device)
        local heads, dim, v_dim = case["in"][1][2][2], case["in"][1][2][3], case["in"][3][2][3]
        if rows <= 14 then
          gradcheck.check(f, { { rows, heads, dim }, { rows, heads, dim }, { rows, heads, v_dim } },
            { device = device, layout = gradcheck.layouts[at % 3 + 1], tolerance = 1e-6 })
        end
      end
    end)

    it("reads columns of one product where they lie, and leaves out what wants no gradient", function()
      local case = document.cases[2]
      local f, rows = sequences.attention(case.args, device)
      local all = peri.Tensor.normal({ rows, 24 }, 0, 1, 3, 0, "f32", device):requires_grad()
      local parts = {}
      for i = 1, 3 do parts[i] = all:slice(2, 8 * (i - 1), 8 * i):reshape(rows, 2, 4) end
      local apart = peri.util.map(parts, function(t) return t:detach():clone():requires_grad() end)
      local got, want = f(unpack(parts)), f(unpack(apart))
      golden.assert_near(want:to_list(), got:to_list(), nil, "columns")
      got:sum():backward()
      want:sum():backward()
      for i = 1, 3 do
        golden.assert_near(apart[i]:grad():reshape(rows, 8):to_list(),
          all:grad():slice(2, 8 * (i - 1), 8 * i):to_list(), nil, "gradient")
      end
      local values = apart[3]:detach():clone():requires_grad()
      f(apart[1]:detach(), apart[2]:detach(), values):sum():backward()
      golden.assert_near(apart[3]:grad():to_list(), values:grad():to_list(), nil, "values alone")
    end)

    it("has places and times", function()
      for _, case in ipairs(document.places.positions) do
        local offsets, rows = sequences.offsets_of(case.lengths, device)
        local targets = type(case.targets) == "table" and i64({ unpack(case.targets) }, device) or nil
        assert.same({ unpack(case.out) }, sparse.sequence_positions { seq_offsets = offsets, rows = rows,
          max_positions = case.max_positions, num_targets = targets }:to_list())
      end
      assert.equal("0 0 2 3 3", list(sparse.sequence_numbers(i64({ 0, 2, 2, 3, 5 }, device), 5)))
      for _, case in ipairs(document.places.buckets) do
        local offsets, times = sequences.offsets_of(case.lengths, device), load(case.times, device)
        for _, dtype in ipairs { "i64", "i32", "f64", "f32" } do
          assert.same({ unpack(case.out) }, sparse.time_buckets { timestamps = times:to(dtype), seq_offsets = offsets,
            num_buckets = case.num_buckets, increment = case.increment, time_bucket_fn = case.fn }:to_list(), dtype)
        end
      end
      -- 2^53 + 1 is no f64, but the difference of two such times is one
      local far = peri.tensor({ 9007199254740993LL, 9007199254741002LL }, "i64", device)
      assert.equal("3 0", list(sparse.time_buckets { timestamps = far, seq_offsets = i64({ 0, 2 }, device),
        increment = 1 }))
    end)

    it("joins and cuts", function()
      local left, right = sequences.offsets_of({ 1, 0, 2 }, device), sequences.offsets_of({ 2, 1, 0 }, device)
      local a = peri.tensor({ { 1, 10 }, { 2, 20 }, { 3, 30 } }, "f32", device):requires_grad()
      local b = peri.tensor({ { 4, 40 }, { 5, 50 }, { 6, 60 } }, "f32", device):requires_grad()
      local joined, offsets = sparse.concat_2D_jagged { values_left = a, offsets_left = left, values_right = b,
        offsets_right = right }
      assert.equal("1 10 4 40 5 50 6 60 2 20 3 30", list(joined))
      assert.equal("0 3 4 6", list(offsets))
      joined:backward(peri.tensor({ 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 }, "f32", device, { 6, 2 }))
      assert.equal("1 2 9 10 11 12", list(a:grad()))
      assert.equal("3 4 5 6 7 8", list(b:grad()))
      local first, second = sparse.split_2D_jagged { values = joined:detach(), offsets_left = left,
        offsets_right = right }
      assert.equal(list(a), list(first))
      assert.equal(list(b), list(second))
      local x = peri.tensor({ 1, 2, 3, 4, 5, 6 }, "f32", device):requires_grad()
      local lengths = i64({ 4, 0, 2 }, device)
      local last, kept = sparse.truncate_jagged(x, lengths, 3)
      assert.equal("2 3 4 5 6", list(last))
      assert.equal("3 0 2", list(kept))
      last:sum():backward()
      assert.equal("0 1 1 1 1 1", list(x:grad()))
      assert.equal("1 5", list((sparse.truncate_jagged(x, lengths, 1, "first"))))
      assert.equal(0, (sparse.truncate_jagged(x, lengths, 0)):numel())
    end)

    it("remembers that offsets were checked until they, targets or the question change", function()
      local offsets, targets = i64({ 0, 2, 5 }, device), i64({ 1, 1 }, device)
      local function places(given, rows, contextual)
        local q = peri.zeros({ rows or 5, 1, 1 }, "f32", device)
        sparse.jagged_attention { q = q, k = q, v = q, seq_offsets = given or offsets, num_targets = targets,
          contextual_seq_len = contextual }
        return list(sparse.sequence_positions { seq_offsets = given or offsets, rows = rows or 5, max_positions = 9,
          num_targets = targets })
      end
      local function fails(text, ...)
        for _ = 1, 2 do
          local ok, err = pcall(places, ...)
          assert.is_false(ok)
          assert.matches(text, tostring(err), 1, true)
        end
      end
      assert.equal("1 0 2 1 0", places())
      assert.equal("1 0 2 1 0", places(nil, nil, 1))
      fails("sequence 0 has 1 members before its targets", nil, nil, 2)
      fails("allowed: 0..4", nil, 4)
      assert.equal("1 0 2 1 0", places())
      targets:copy(i64({ 0, 3 }, device))
      assert.equal("2 1 0 0 0", places())
      targets:fill(3)
      fails "num_targets[0] is 3, allowed: 0..2"
      targets:fill(0)
      offsets:copy(i64({ 0, 4, 5 }, device))
      assert.equal("4 3 2 1 1", places())
      offsets:slice(1, 1, 2):fill(7)
      fails "bag 0: it ends at offset 7"
      offsets:slice(1, 1, 2):fill(1)
      assert.equal("1 4 3 2 1", places())
      -- targets and offsets in one storage, and offsets that lie apart
      local all = i64({ 0, 1, 1, 0, 2, 5, 2, 1, 5 }, device)
      targets = all:slice(1, 2, 4)
      assert.equal("1 0 3 2 1", places(all:slice(1, 3, 6)))
      all:slice(1, 2, 3):fill(0)
      assert.equal("2 1 3 2 1", places(all:slice(1, 3, 6)))
      assert.equal("2 1 3 2 1", places(all:slice(1, 0, 9, 4):copy(i64({ 0, 2, 5 }, device))))
    end)

    it("has nothing to do without members and without sequences", function()
      for _, offsets in ipairs { i64({ 0, 0 }, device), i64({ 0 }, device) } do
        local q = peri.zeros({ 0, 2, 3 }, "f32", device):requires_grad()
        local y = sparse.jagged_attention { q = q, k = q, v = q, seq_offsets = offsets }
        assert.same({ 0, 2, 3 }, y:shape())
        y:sum():backward()
        assert.same({ 0, 2, 3 }, q:grad():shape())
        assert.equal(0, sparse.sequence_positions { seq_offsets = offsets, rows = 0, max_positions = 4 }:numel())
        local values = peri.zeros({ 0 }, "f32", device)
        local joined, ends = sparse.concat_2D_jagged { values_left = values, offsets_left = offsets,
          values_right = values, offsets_right = offsets }
        assert.equal(0, joined:numel())
        assert.equal(offsets:numel(), ends:numel())
      end
    end)
  end)
end

it("16-bit numbers are computed in f32", function()
  local f, rows = sequences.attention(document.cases[1].args, "cpu")
  local x = peri.Tensor.normal({ rows, 2, 4 }, 0, 1, 5):to "bf16"
  local y = f(x, x, x)
  assert.equal("bf16", y:dtype())
  golden.assert_near(f(x:to "f32", x:to "f32", x:to "f32"):to_list(), y:to_list(), { abs = 0, rel = 2 ^ -8 }, "bf16")
end)

it("what is masked does not matter: not even NaN", function()
  local q = peri.Tensor.normal({ 4, 1, 3 }, 0, 1, 6)
  local function run(x)
    return sparse.jagged_attention { q = x, k = x, v = x, seq_offsets = i64 { 0, 4 }, num_targets = i64 { 2 } }
  end
  local want, spoilt = run(q), q:clone()
  spoilt:slice(1, 2, 3):fill(0 / 0)
  local got = run(spoilt)
  for _, row in ipairs { 0, 1, 3 } do
    for d = 0, 2 do assert.equal(want:item(3 * row + d), got:item(3 * row + d)) end
  end
end)

describe("errors name what is wrong and what is allowed", function()
  local q, offsets = peri.zeros { 5, 2, 3 }, i64 { 0, 2, 5 }
  local function fails(text, f, args)
    local a = { q = q, k = q, v = q, seq_offsets = offsets }
    for name, value in pairs(args) do a[name] = value or nil end
    local ok, err = pcall(f, a)
    assert.is_false(ok)
    assert.matches(text, tostring(err), 1, true)
  end
  local attention = sparse.jagged_attention
  for text, args in pairs {
    ["num_targets[1] is 4, allowed: 0..3"] = { num_targets = i64 { 0, 4 } },
    ["num_targets[0] is -1, allowed: 0..2"] = { num_targets = i64 { -1, 0 } },
    ["1 num_targets for 2 sequences"] = { num_targets = i64 { 0 } },
    ["a sequence of 3 members, allowed: max_seq_len, 2"] = { max_seq_len = 2 },
    ["alpha is 0, wanted: a factor"] = { alpha = 0 },
    ["q and k are"] = { k = peri.zeros { 4, 2, 3 } },
    ["q and v are"] = { v = peri.zeros({ 5, 2, 3 }, "f64") },
    ["wanted [rows, heads, size]"] = { q = peri.zeros { 5, 6 } },
    ["max_attn_len is -1"] = { max_attn_len = -1 },
    ["contextual_seq_len is -1"] = { contextual_seq_len = -1 },
    ["min_full_attn_seq_len is -1"] = { min_full_attn_seq_len = -1 },
    ["sequence 0 has 2 members before its targets, wanted: none at all, or contextual_seq_len (3) and more"] = {
      contextual_seq_len = 3 },
    ["sequence 1 has 1 members before its targets"] = { contextual_seq_len = 2, num_targets = i64 { 0, 2 } },
    ["bag 1"] = { seq_offsets = i64 { 0, 3, 2 } },
    ["no argument 'window'"] = { window = 3 },
  } do
    it(text, function() fails(text, attention, args) end)
  end
  it("hstu_mha wants max_seq_len", function() fails("max_seq_len is nil", sparse.hstu_mha, {}) end)
  it("times and places", function()
    local t = peri.zeros { 5 }
    for text, args in pairs {
      ["num_buckets 0, allowed: 1 and more"] = { num_buckets = 0 }, ["increment -1, allowed"] = { increment = -1 },
      ["'cube'"] = { time_bucket_fn = "cube" }, ["timestamps are bool"] = { timestamps = peri.zeros({ 5 }, "bool") },
    } do
      local a = { timestamps = t, seq_offsets = offsets }
      for name, value in pairs(args) do a[name] = value end
      local ok, err = pcall(sparse.time_buckets, a)
      assert.is_false(ok)
      assert.matches(text, tostring(err), 1, true)
    end
    local ok, err = pcall(sparse.sequence_positions, { seq_offsets = offsets, rows = 5, max_positions = 0 })
    assert.is_false(ok)
    assert.matches("max_positions 0, allowed: 1 and more", tostring(err))
  end)
end)
