-- JaggedTensor and KeyedTensor: TorchRec's results (spec/golden/ops/kjt), gradients by finite differences, bad input.
local peri = require "perilune"
local golden = require "spec.support.golden"
local JT, KT = peri.JaggedTensor, peri.KeyedTensor

--- d(sum(f(x) * g)) / dx against central differences, in f64. f takes a tensor and returns one.
local function assert_gradient(f, x, g)
  local leaf = x:to("f64"):detach():requires_grad()
  f(leaf):backward(g)
  local got, numbers, weights = leaf:grad():to_list(), x:to_list(), g:to_list()
  local function at(i, delta)
    local moved = {}
    for k, v in ipairs(numbers) do moved[k] = v + (k == i and delta or 0) end
    local y, sum = f(peri.tensor(moved, "f64", x:device(), x:shape())):to_list(), 0
    for k, v in ipairs(y) do sum = sum + v * weights[k] end
    return sum
  end
  for i = 1, #numbers do assert.near((at(i, 1e-3) - at(i, -1e-3)) / 2e-3, got[i], 1e-7) end
end

for _, device in ipairs { "cpu", "opaque" } do
  local function t(data, dtype) return peri.tensor(data, dtype, device) end
  local function random(shape, seed, dtype)
    return peri.Tensor.uniform(shape, -1, 1, seed, 0, dtype or "f64", device)
  end

  describe("JaggedTensor as TorchRec's on " .. device, function()
    for _, name in ipairs { "jagged_tensor_1d", "jagged_tensor_2d" } do
      it(name, function()
        local case = golden.load("ops/kjt/" .. name)
        local jt = JT { values = case:tensor("in.values", device), weights = case:tensor("in.weights", device),
          lengths = case:tensor("in.lengths", device) }
        case:assert_near("out.offsets", jt:offsets())
        local same, weighted = JT { values = jt:values(), weights = jt:weights_or_none(), offsets = jt:offsets() },
          case:has "in.weights"
        for _, j in ipairs { jt, same } do
          assert.equal(case:shape("in.lengths")[1], #j)
          case:assert_near("in.lengths", j:lengths())
          for i, row in ipairs(j:to_dense()) do case:assert_near("out.dense." .. i - 1, row) end
          for i, row in ipairs(weighted and j:to_dense_weights() or {}) do
            case:assert_near("out.dense_weights." .. i - 1, row)
          end
          for how, p in pairs(case.args.padded) do
            local length = type(p[1]) == "number" and p[1] or nil
            case:assert_near("out.padded_" .. how, j:to_padded_dense(length, p[2]))
            if weighted then case:assert_near("out.padded_weights_" .. how, j:to_padded_dense_weights(length, p[2])) end
          end
        end
      end)
    end
    it("from_dense", function()
      local case = golden.load "ops/kjt/jagged_tensor_from_dense"
      local values, weights = {}, {}
      for i = 1, 4 do
        values[i], weights[i] = case:tensor("in.values." .. i - 1, device), case:tensor("in.weights." .. i - 1, device)
      end
      local jt = JT.from_dense(values, weights)
      for _, what in ipairs { "values", "weights", "lengths", "offsets" } do
        case:assert_near("out." .. what, jt[what](jt))
      end
      assert.is_nil(JT.from_dense(values):weights_or_none())
    end)
    it("from_dense_lengths", function()
      local case = golden.load "ops/kjt/jagged_tensor_from_dense_lengths"
      local jt = JT.from_dense_lengths(case:tensor("in.values", device), case:tensor("in.lengths", device))
      for _, what in ipairs { "values", "offsets" } do case:assert_near("out." .. what, jt[what](jt)) end
    end)
  end)

  describe("JaggedTensor on " .. device, function()
    it("sends gradients through padding, rows and joins", function()
      local lengths = t({ 2, 0, 4, 1 }, "i32")
      for _, shape in ipairs { { 7 }, { 7, 3 } } do
        for _, length in ipairs { 0, 2, 4, 6 } do
          local out = { 4, length, shape[2] }
          assert_gradient(function(x) return JT({ values = x, lengths = lengths }):to_padded_dense(length, 5) end,
            random(shape, 1), random(out, 2))
        end
        local g = random({ 4, shape[2] }, 3)
        assert_gradient(function(x) return JT({ values = x, lengths = lengths }):to_dense()[3] end, random(shape, 1), g)
      end
      local columns = t({ 1, 3, 0 }, "i64")
      assert_gradient(function(x) return JT.from_dense_lengths(x, columns):values() end, random({ 3, 3 }, 4),
        random({ 4 }, 5))
      assert_gradient(function(x) return JT.from_dense_lengths(x, columns):values() end, random({ 3, 5, 2 }, 4),
        random({ 4, 2 }, 5))
      assert_gradient(function(x) return JT.from_dense({ x:slice(1, 0, 2), x, x:slice(1, 1, 4) }):values() end,
        random({ 4 }, 6), random({ 9 }, 7))
    end)

    it("takes all dtypes and empty bags", function()
      for _, dtype in ipairs { "i64", "i32", "i16", "u8", "f16", "bf16", "f64", "c64" } do
        local values = dtype == "c64" and t({ { 1, 0 }, { 2, 0 }, { 3, 0 } }, dtype) or t({ 1, 2, 3 }, dtype)
        local padded = JT({ values = values, lengths = t({ 2, 0, 1 }, "i64") }):to_padded_dense(nil, 7):to_list()
        if dtype == "c64" then assert.same({ 1, 0, 2, 0, 7, 0, 7, 0, 3, 0, 7, 0 }, padded)
        else assert.same({ 1, 2, 7, 7, 3, 7 }, padded) end
      end
      local empty = JT.empty { device = device, is_weighted = true }
      assert.same({ 0, 0, 0, 0 }, { #empty, empty:longest(), empty:values():numel(), empty:weights():numel() })
      assert.same({ 0, 0 }, empty:to_padded_dense():shape())
      assert.same({}, empty:to_dense())
      assert.same({ 2, 0 }, JT({ values = t {}, lengths = t({ 0, 0 }, "i32") }):to_padded_dense():shape())
      assert.same({ { 9 } }, JT({ values = t {}, offsets = t({ 0, 0 }, "i32") }):to_padded_dense(1, 9):to_table())
    end)

    it("is copied, moved and compared", function()
      local jt = JT { values = t { 1, 2, 3 }, weights = t { 4, 5, 6 }, lengths = t({ 1, 2 }, "i32") }
      local room = JT.empty_like(jt)
      assert.is_false(room:equal(jt))
      assert.is_true(room:copy_(jt):equal(jt))
      assert.same({ { 1, 0 }, { 2, 3 } }, room:to_padded_dense():to_table())
      local other = device == "cpu" and "opaque" or "cpu"
      local moved = jt:to(other)
      assert.equal(other, moved:device())
      assert.is_true(moved:to(device):equal(jt))
      assert.is_true(peri.jagged.jt_is_equal(JT.empty_like(jt, other):copy_(jt), moved))
      assert.equal(3 * 8 + 2 * 4,
        JT({ values = jt:values(), weights = jt:weights(), lengths = jt:lengths() }):size_in_bytes() -
        (device == "cpu" and 24 or 0)) -- where the check runs at once it leaves its offsets
      assert.error_matches(function() JT.empty_like(jt):copy_(JT { values = t { 1 }, lengths = t({ 1 }, "i32") }) end,
        "1 bags of 1 values")
    end)

    it("names what is wrong", function()
      local function content(pattern, a)
        assert.error_matches(function() JT(a):validate() end, pattern)
        assert.error_matches(function() JT(a):to_padded_dense() end, pattern)
      end
      content("bag 1: length %-2", { values = t { 1, 2 }, lengths = t({ 4 - 2, -2, 2 }, "i32") })
      content("sum to 3, but there are 2 values: bag 1 ends at 3",
        { values = t { 1, 2 }, lengths = t({ 1, 2 }, "i64") })
      content("bag 0: its offsets are 0 and %-1", { values = t { 1, 2 }, offsets = t({ 0, -1, 2 }, "i64") })
      local function structure(pattern, a) assert.error_matches(function() JT(a) end, pattern) end
      structure("values' is missing", { lengths = { 1 } })
      structure("neither lengths nor offsets", { values = { 1 } })
      structure("lengths are f32", { values = { 1 }, lengths = peri.ones { 1 } })
      structure("offsets are f64", { values = { 1 }, offsets = peri.zeros({ 2 }, "f64") })
      structure("wanted 1 dimension", { values = { 1 }, lengths = peri.ones({ 1, 1 }, "i32") })
      structure("weights are f32 %[2%] for 1 values", { values = { 1 }, weights = { 1, 2 }, lengths = { 1 } })
      structure("a scalar", { values = peri.tensor(1), lengths = { 1 } })
      structure("no argument 'length'", { values = { 1 }, length = { 1 } })
      assert.error_matches(function() JT.from_dense_lengths(t { { 1, 2 } }, t({ 3 }, "i32")) end,
        "row 0: length 3, allowed: 0%.%.2")
      assert.error_matches(function() JT.from_dense_lengths(t { { 1, 2 } }, t({ -1 }, "i32")) end, "row 0: length %-1")
      assert.error_matches(function() JT.from_dense_lengths(t { { 1, 2 } }, t({ 1, 1 }, "i32")) end,
        "2 lengths, wanted a row each")
      assert.error_matches(function() JT.from_dense {} end, "0 tensors")
      assert.error_matches(function() JT.from_dense { t { 1 }, t({ 1 }, "i32") } end, "part 1 is i32")
      assert.error_matches(function() JT.from_dense({ t { 1 } }, { t { 1, 2 } }) end, "1 rows and 2 weights")
      assert.error_matches(function() JT({ values = t { 1 }, lengths = t({ 1 }, "i32") }):to_padded_dense_weights() end,
        "no weights")
    end)
  end)

  describe("KeyedTensor on " .. device, function()
    it("from_tensor_list as TorchRec", function()
      local case = golden.load "ops/kjt/keyed_tensor"
      local tensors = { case:tensor("in.0", device), case:tensor("in.1", device), case:tensor("in.2", device) }
      local kt = KT.from_tensor_list(case.args.keys, tensors)
      case:assert_near("out.values", kt:values())
      assert.same({ 2, 3, 1 }, kt:length_per_key())
      assert.same({ 0, 2, 5, 6 }, kt:offset_per_key())
      assert.same({ "x", "y", "z" }, kt:keys())
      assert.equal(1, kt:key_dim())
      for _, key in ipairs { "x", "y", "z" } do
        case:assert_near("out." .. key, kt[key])
        case:assert_near("out." .. key, kt:to_dict()[key])
      end
      local turned = KT.from_tensor_list({ "x", "y" }, { t { { 1, 2 } }, t { { 3, 4 }, { 5, 6 } } }, 0)
      assert.same({ { 1, 2 }, { 3, 4 }, { 5, 6 } }, turned:values():to_table())
      assert.same({ { 3, 4 }, { 5, 6 } }, turned.y:to_table())
      local other = device == "cpu" and "opaque" or "cpu"
      assert.same({ { 3, 4 }, { 5, 6 } }, turned:to(other).y:to_table())
      assert.equal(24, turned:size_in_bytes())
    end)

    local function kts_of(case)
      local kts = {}
      for i, keys in ipairs(case.args.keys) do
        kts[i] = KT { keys = keys, length_per_key = case.args.length_per_key[i],
          values = case:tensor("in." .. i - 1 .. ".values", device) }
      end
      return kts
    end

    for _, name in ipairs { "regroup_all_once", "regroup_repeats", "regroup_unused" } do
      it(name .. " as TorchRec", function()
        local case = golden.load("ops/kjt/" .. name)
        local kts = kts_of(case)
        for _, kt in ipairs(kts) do kt:values():requires_grad() end
        local sum
        for g, out in ipairs(KT.regroup(kts, case.args.groups)) do
          case:assert_near("out." .. g - 1, out)
          sum = sum or {}
          sum[g] = out
        end
        -- one backward pass over all groups: the sum of products with the upstream gradients
        local all = KT.from_tensor_list(peri.util.map(sum, function(_, i) return "g" .. i end), sum):values()
        local upstream = {}
        for g = 1, #sum do upstream[g] = case:tensor("in.grad." .. g - 1, device) end
        all:backward(KT.from_tensor_list(peri.util.map(sum, function(_, i) return "g" .. i end), upstream):values())
        for i, kt in ipairs(kts) do
          local got = kt:values():grad()
          local gradient = "grad." .. i - 1 .. ".values"
          if case:has(gradient) then case:assert_near(gradient, got)
          else assert.same(peri.zeros(got:shape()):to_list(), got:to_list()) end -- nobody took its columns
        end
      end)
    end

    it("regroup_as_dict as TorchRec", function()
      local case = golden.load "ops/kjt/regroup_as_dict"
      local kts = kts_of(case)
      local module = peri.jagged.KTRegroupAsDict(case.args.groups, case.args.group_keys)
      for _, dict in ipairs { KT.regroup_as_dict(kts, case.args.groups, case.args.group_keys), module(kts),
        peri.scope(function()
        local d = module(kts)
        for _, tensor in pairs(d) do peri.keep(tensor) end
        return d
      end) } do
        case:assert_near("out.left", dict.left)
        case:assert_near("out.right", dict.right)
      end
    end)

    it("regroups views and 16-bit numbers, and sends gradients back", function()
      local wide = random({ 5, 9 }, 1, "f32")
      local kt = KT { keys = { "a", "b" }, length_per_key = { 2, 3 }, values = wide:slice(2, 1, 6) }
      local turned = KT { keys = { "c" }, length_per_key = { 5 }, values = random({ 5, 5 }, 2, "f32"):transpose(1, 2) }
      local groups = KT.regroup({ kt, turned }, { { "b", "c", "a" }, { "c" } })
      assert.same(turned:values():to_table(), groups[2]:to_table())
      assert.same(kt.a:to_table(), groups[1]:slice(2, 8, 10):to_table())
      for _, dtype in ipairs { "f16", "bf16" } do
        local half = KT { keys = { "a", "b" }, length_per_key = { 2, 3 }, values = kt:values():to(dtype) }
        assert.same(half.b:to_list(), KT.regroup({ half }, { { "b" } })[1]:to_list())
      end
      assert_gradient(function(x)
        local a = KT { keys = { "p", "q", "r" }, length_per_key = { 1, 2, 0 }, values = x:slice(2, 0, 3) }
        local b = KT { keys = { "s" }, length_per_key = { 2 }, values = x:slice(2, 2, 4) }
        return KT.regroup({ a, b }, { { "s", "q", "r", "q", "p", "q" } })[1]
      end, random({ 3, 4 }, 3), random({ 3, 9 }, 4))
    end)

    it("names what is wrong", function()
      local values = t { { 1, 2, 3 } }
      local function bad(pattern, a) assert.error_matches(function() KT(a) end, pattern) end
      bad("key 'b': 3 columns, 1 of f32 %[1, 3%] are left", { keys = { "a", "b" }, length_per_key = { 2, 3 },
        values = values })
      bad("1 columns more than the keys", { keys = { "a", "b" }, length_per_key = { 1, 1 }, values = values })
      bad("key 'a': %-1 columns", { keys = { "a", "b" }, length_per_key = { -1, 4 }, values = values })
      bad("a key repeats", { keys = { "a", "a" }, length_per_key = { 1, 2 }, values = values })
      bad("1 entries of length_per_key for 2 keys", { keys = { "a", "b" }, length_per_key = { 3 }, values = values })
      bad("key_dim is 2", { keys = { "a" }, length_per_key = { 3 }, values = values, key_dim = 2 })
      bad("wanted 2 dimensions", { keys = { "a" }, length_per_key = { 3 }, values = t { 1, 2, 3 } })
      bad("'values' is missing", { keys = { "a" }, length_per_key = { 3 } })
      local kt = KT { keys = { "a", "b" }, length_per_key = { 1, 2 }, values = values }
      assert.error_matches(function() return kt.c end, "no key 'c'; keys: a, b")
      assert.error_matches(function() KT.regroup({ kt, kt }, { { "a" } }) end, "key 'a' is in kt 0 and in kt 1")
      assert.error_matches(function() KT.regroup({ kt }, { { "z" } }) end, "no kt has key 'z'")
      assert.error_matches(function() KT.regroup({}, { { "z" } }) end, "0 kts")
      assert.error_matches(function() KT.regroup({ kt, 7 }, { { "a" } }) end, "entry 2 is a number")
      local other = KT { keys = { "c" }, length_per_key = { 1 }, values = t { { 1 }, { 2 } } }
      assert.error_matches(function() KT.regroup({ kt, other }, { { "a", "c" } }) end,
        "kt 1 is f32 %[2, 1%], kt 0 is f32 %[1, 3%]")
      local module = peri.jagged.KTRegroupAsDict({ { "a" } }, { "x" })
      module { kt }
      assert.error_matches(function() module { other } end, "other keys or columns")
    end)
  end)
end
