-- States of optimizers follow from their geometry: sizes, bytes, files. Batches that are looked up, sorted and updated
-- as objects.
local peri = require "perilune"
local support = require "spec.support.tbe"
local embed = require "perilune.embed"

local ffi, C = require "ffi", peri.ffi.C

local ROWS, COLS = 7, 4
-- What the formulas of kernels/tbe.h keep.
local keeps = {
  sgd = {}, adagrad = { momentum1 = "full" }, rowwise_adagrad = { momentum1 = "row" },
  adam = { momentum1 = "full", momentum2 = "full" }, partial_rowwise_adam = { momentum1 = "full", momentum2 = "row" },
  lamb = { momentum1 = "full", momentum2 = "full" }, partial_rowwise_lamb = { momentum1 = "full", momentum2 = "row" },
  lars_sgd = { momentum1 = "full" }, lion = { momentum1 = "full" }, shampoo = { preconditioner = "square" },
  rowwise_rmsprop_ar = { momentum1 = "row", prev_iter = "row" }, emainplace_rowwise_adagrad = { momentum1 = "row" },
}
local shapes = { full = { ROWS, COLS }, row = { ROWS }, square = { COLS, COLS }, scalar = { 1 } }

local function make(device, params)
  return embed.tbe.new { tables = { { name = "a", rows = ROWS, cols = COLS } }, fused_params = params, device = device,
    seed = 2 }
end

describe("optimizers", function()
  it("have the names and numbers of C", function()
    for i, name in ipairs { "none", "sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb",
      "partial_rowwise_lamb", "lars_sgd", "lion", "shampoo", "rowwise_rmsprop_ar", "emainplace_rowwise_adagrad",
      "rowwise_adagrad_with_counter" } do
      assert.equal(name, ffi.string(C.peri_tbe_optimizer_name(i - 1)))
      assert.equal(i - 1, C["PERI_TBE_" .. name:upper()])
    end
    assert.is_true(C.peri_tbe_optimizer_name(14) == nil and C.peri_tbe_optimizer_name(-1) == nil)
  end)
end)

for _, device in ipairs { "cpu", "opaque" } do
  describe("states on " .. device, function()
    it("are no leaves, nor are rows that a fused optimizer updates: nothing is frozen or gets a gradient", function()
      for optimizer, states in peri.util.ordered(keeps) do
        local b = make(device, { optimizer = optimizer, learning_rate = 0.1 })
        local views = { weight = b:state(1), rows = b:state(1):slice(1, 2, 5), detached = b:state(1):detach() }
        for name in peri.util.ordered(states) do views[name] = b:state(1, name) end
        for name, view in peri.util.ordered(views) do
          for _, on in ipairs { true, false } do
            local ok, err = pcall(view.requires_grad, view, on)
            assert.is_false(ok, optimizer .. ": " .. name)
            if states[name] ~= "full" and name == "prev_iter" and on then assert.matches("i64", err.message)
            else
              assert.matches("of table 'a', which its fused optimizer updates in the backward pass: it is no parameter",
                err.message, 1, true)
            end
            assert.is_false(view:describe().requires_grad)
          end
        end
        assert.is_true(b:state(1):clone():requires_grad():describe().requires_grad)
      end
      local dense = make(device, { optimizer = "none" })
      local leaf = dense:leaf(1)
      assert.is_true(leaf:describe().requires_grad)
      assert.is_false(leaf:requires_grad(false):describe().requires_grad)
    end)

    for optimizer, states in pairs(keeps) do -- any order: each is a test of its own
      it(optimizer .. " has those of its formula, of their geometry", function()
        local b, bytes, n = make(device, { optimizer = optimizer }), 0, 0
        for _, name in ipairs(b:state_names()) do
          local geometry = name == "weight" and "full" or states[name]
          assert.equal(geometry, b:state_geometry(name))
          assert.same(shapes[geometry], b:state_shape(1, name))
          assert.same(shapes[geometry], b:state(1, name):shape())
          if name ~= "weight" then
            local size = name == "prev_iter" and 8 or 4
            -- Tables begin at multiples of 16 elements.
            local elements = geometry == "full" and 32 or geometry == "row" and ROWS or geometry == "square"
              and COLS * COLS or 1
            bytes, n = bytes + size * elements, n + 1
          end
        end
        for _ in pairs(states) do n = n - 1 end -- any order: counted
        assert.equal(0, n)
        assert.equal(bytes, b:statistics().state_bytes)
      end)
    end

    it("with options have theirs", function()
      local b = make(device, { optimizer = "adam", use_rowwise_bias_correction = true })
      assert.same({ "weight", "momentum1", "momentum2", "row_counter" }, b:state_names())
      assert.equal("row", b:state_geometry "row_counter")
      assert.error_matches(function() b:state_geometry "max_counter" end, "optimizer adam has no state 'max_counter'")
    end)
  end)

  describe("batches on " .. device, function()
    it("share what their calls compute, with the bits of calls with inputs", function()
      local ids, offsets = peri.tensor({ 1, 3, 3, 6, 0, 5 }, "i64", device), peri.tensor({ 0, 2, 2, 6 }, "i64", device)
      local weights = peri.tensor(support.numbers(6, support.generator(3)), "f32", device)
      local grad = peri.tensor(support.numbers(3 * COLS, support.generator(4)), "f32", device, { 3, COLS })
      local results = {}
      for way = 1, 3 do -- with inputs; a batch; a batch that is sorted first
        local b = make(device, { optimizer = "adam", learning_rate = 0.3 })
        local list = b:blocks { { table = 1, first_bag = 0, bags = 3, out_offset = 0, out_stride = COLS } }
        local of_weights = peri.zeros({ 6 }, "f32", device)
        for _ = 1, 3 do
          if way == 1 then
            b:forward(ids, offsets, list, peri.zeros({ 3, COLS }, "f32", device), weights)
            b:backward(ids, offsets, list, grad, weights, nil, of_weights)
          else
            local batch = b:batch(ids, offsets, list, weights)
            if way == 3 then batch:sort() end
            batch:prefetch() -- nothing to do
            batch:forward(peri.zeros({ 3, COLS }, "f32", device))
            batch:backward(grad, of_weights)
          end
        end
        local last = b:batch(ids, offsets, list, weights)
        local out = last:lookup(3, COLS)
        local dense = last:gradient(grad)
        out:backward(grad)
        results[way] = { of_weights:to_list(), out:to_list(), dense:to_list(), b:state(1):to_list(),
          b:state(1, "momentum2"):to_list() }
        assert.equal(4, b:iteration())
        assert.equal(4, b:statistics().lookups)
        assert.equal(4 * 6, b:statistics().ids)
      end
      assert.same(results[1], results[2])
      assert.same(results[1], results[3])
    end)
  end)
end
