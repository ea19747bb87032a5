-- What a quantized table cannot hold is refused, with table, row and number, and nothing else is: what it holds comes
-- back to its precision.
local peri = require "perilune"
local draw = require("spec.support.tbe").generator(29)

local ROWS, COLS, CODES = 5, 6, { INT8 = 255, INT4 = 15, INT2 = 3 }

local function collection(device, list, data_type)
  local ebc = peri.EmbeddingBagCollection { device = device,
    tables = { peri.EmbeddingBagConfig { name = "users", num_embeddings = ROWS, embedding_dim = COLS,
      feature_names = { "f" }, data_type = data_type } }, fused_params = { optimizer = "sgd", learning_rate = 1 } }
  ebc:weight("users"):copy(peri.tensor(list, "f32", device, { ROWS, COLS }):to(ebc:weight("users"):dtype()))
  return ebc
end

--- Whether `dtype` holds a row of numbers, by its formula; nil: too near the edge to be told here.
local function held(dtype, row)
  local least, most, finite = math.huge, -math.huge, true
  for _, x in ipairs(row) do
    finite = finite and x == x and math.abs(x) < math.huge
    least, most = math.min(least, x), math.max(most, x)
  end
  if dtype == "FP32" or dtype == "BF16" then return true end
  local large = math.max(math.abs(least), math.abs(most))
  if dtype == "FP16" then return not finite or large <= 65504 end -- of rows that have one kind of odd number
  if not finite then return false end
  if dtype == "FP8" then return large <= 240 end
  local step = (most - least) / CODES[dtype]
  if math.abs(step - 65510) < 100 or math.abs(math.abs(least) - 65510) < 100 then return nil end
  return math.abs(least) <= 65504 and step <= 65504
end

for _, device in ipairs { "cpu", "opaque" } do
  describe("rows of quantized tables on " .. device, function()
    for _, dtype in ipairs { "INT8", "INT4", "INT2", "FP8", "FP16", "BF16", "FP32" } do
      it("hold what " .. dtype .. " can, or say what they cannot", function()
        local seen = {}
        for case = 1, 40 do
          local list, bad, unsure = {}, nil, false
          local odd = ({ 0 / 0, math.huge, -math.huge, 300, -300, 7e4, -7e4, 2e5, 3e5, 2e7, -1e30, 239, 65000, -65000,
            1 })[case % 15 + 1]
          for i = 1, ROWS * COLS do list[i] = draw() end
          list[draw(ROWS * COLS) + 1] = odd
          local ebc = collection(device, list, case % 2 == 0 and "BF16" or "FP32")
          list = ebc:weight("users"):to("f32"):reshape(ROWS * COLS):to_list()
          for r = 0, ROWS - 1 do
            local fits = held(dtype, { unpack(list, r * COLS + 1, (r + 1) * COLS) })
            unsure = unsure or fits == nil
            if fits == false then bad = bad or r end
          end
          local ok, made = pcall(peri.quantize_embeddings, { module = ebc, dtype = dtype })
          if not unsure then
            assert.equal(bad == nil, ok, ("%s of %g: %s"):format(dtype, odd, tostring(made)))
            if not ok then
              assert.truthy(tostring(made):find(("table 'users', row %d: its number"):format(bad), 1, true),
                tostring(made))
              assert.truthy(tostring(made):find(("rows of %s do not hold; allowed: "):format(dtype), 1, true),
                tostring(made))
            end
            seen[ok] = true
          end
          local back = ok and made:table_rows("users", "weight", 0, ROWS):to_list() or {}
          for r = 0, #back / COLS - 1 do
            local least, most = math.huge, -math.huge
            for c = 1, COLS do least, most = math.min(least, list[r * COLS + c]), math.max(most, list[r * COLS + c]) end
            for c = 1, COLS do
              local x, y = list[r * COLS + c], back[r * COLS + c]
              local near = CODES[dtype] and (most - least) / CODES[dtype] + 0.002 * (math.abs(least) + math.abs(most))
                or math.abs(x) * (dtype == "FP8" and 1 / 15 or 1 / 200) + 1 / 500
              assert.is_true(x == y or x ~= x and y ~= y or math.abs(x - y) <= near,
                ("%s: %g for %g"):format(dtype, y, x))
            end
          end
        end
        assert.is_true(seen[true])
        assert.equal(dtype ~= "BF16" and dtype ~= "FP32" or nil, seen[false])
      end)
    end

    it("stay as they were where one of a block is refused", function()
      local q = peri.quantize_embeddings { module = collection(device, peri.zeros({ ROWS * COLS }):to_list()),
        dtype = "INT8" }
      assert.error_matches(function() q:write_rows("users", 3, peri.full({ 1, COLS }, 0 / 0, "f32", device)) end,
        "table 'users', row 3: its number 0 is nan")
      assert.same(peri.zeros({ ROWS * COLS }):to_list(), q:table_rows("users", "weight", 0, ROWS):to_list())
    end)
  end)
end
