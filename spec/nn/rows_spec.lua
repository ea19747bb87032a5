-- Rows of parameters that stand for something else from now on: what optimizers know of them is forgotten, of other
-- rows nothing.
local peri = require "perilune"
local nn = peri.nn
local parameter = require "perilune.nn.parameter"

local optimizers = {
  { "SGD", { lr = 0.1, momentum = 0.9 } }, { "Adagrad", { lr = 0.1, initial_accumulator_value = 0.5 } },
  { "Adam", { amsgrad = true } }, { "AdamW", {} }, { "RMSprop", { momentum = 0.5, centered = true } },
  { "RowWiseAdagrad", { initial_accumulator_value = 0.25 } },
}

for _, device in ipairs { "cpu", "opaque" } do
  describe("rows that start again on " .. device, function()
    local function make(name, options)
      local weight = parameter.Parameter(peri.Tensor.uniform({ 5, 3 }, -1, 1, 1, 0, "f32", device))
      local args = peri.util.copy(options)
      args.params = { weight }
      return weight, nn.optim[name](args)
    end
    local function step(weight, optimizer, k)
      optimizer:zero_grad()
      nn.functional.sum(weight * peri.Tensor.uniform({ 5, 3 }, -1, 1, 2, k * 2 ^ 32, "f32", device)):backward()
      optimizer:step()
    end
    local function states(optimizer)
      local by_name = {}
      for _, s in ipairs(optimizer:named_state()) do by_name[s.key] = s.tensor:to_table() end
      return by_name
    end

    for _, case in ipairs(optimizers) do
      it("have the states of a new " .. case[1], function()
        local weight, optimizer = make(case[1], case[2])
        local _, fresh = make(case[1], case[2])
        for k = 1, 3 do step(weight, optimizer, k) end
        local before, new = states(optimizer), states(fresh)
        parameter.restart_rows(weight, peri.tensor({ 1, 2, 4 }, "i64", device))
        local after, compared = states(optimizer), 0
        for key, rows in pairs(after) do
          if key == "step" then assert.equal(before.step, rows)
          else
            assert.same({ before[key][1], new[key][2], new[key][3], before[key][4], new[key][5] }, rows, key)
            assert.not_same(before[key], rows)
            compared = compared + 1
          end
        end
        assert.is_true(compared > 0)
        assert.same({ 0, 0, 0 }, weight:grad():to_table()[3])
        assert.not_same({ 0, 0, 0 }, weight:grad():to_table()[4])
      end)
    end

    it("of one parameter leave others alone", function()
      local weight, optimizer = make("Adagrad", {})
      local other, second = make("Adagrad", {})
      step(weight, optimizer, 1)
      step(other, second, 1)
      local before = states(second)
      parameter.restart_rows(weight, peri.tensor({ 0 }, "i64", device))
      assert.same(before, states(second))
    end)
  end)
end
