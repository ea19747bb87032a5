-- einsum: random equations against sums written down, twice each: when their function is written, and when it is kept.
-- cuda: always
local peri = require "perilune"
local F = require "perilune.nn.functional"
local devices = require "spec.support.devices"
collectgarbage("setpause", 200) -- as in programs (tests/harness/busted_main.lua): memory is measured here

for _, device in ipairs(devices) do
  describe("einsum on " .. device, function()
    it("sums products over the dimensions that an equation leaves out", function()
      local names, sizes = { "a", "b", "c", "d", "e" }, { a = 2, b = 3, c = 1, d = 2, e = 4 }
      local seed = 77
      local function draw(n)
        seed = (seed * 1103515245 + 12345) % 2 ^ 31
        return math.floor(seed / 2 ^ 16) % n
      end
      --- Each of the letters by chance, in an order by chance, as a text.
      local function some(letters)
        local list = {}
        for _, c in ipairs(letters) do
          if draw(2) == 0 then table.insert(list, 1 + draw(#list + 1), c) end
        end
        return list
      end
      --- The element of t, of dimensions `list`, at the places of the letters.
      local function element(t, list, at)
        for _, c in ipairs(list) do t = t[at[c] + 1] end
        return t
      end
      for _ = 1, 60 do
        local operands, nested, used, terms = {}, {}, {}, {}
        for i = 1, 1 + draw(4) do
          terms[i] = some(names)
          local shape, numbers, n = {}, {}, 1
          for k, c in ipairs(terms[i]) do shape[k], used[c], n = sizes[c], true, n * sizes[c] end
          for k = 1, n do numbers[k] = draw(7) - 3 end
          operands[i] = peri.tensor(numbers, "f32", device, shape)
          nested[i] = operands[i]:to_table()
        end
        local result = some(peri.util.keys(used))
        local equation = peri.util.map(terms, function(list) return table.concat(list) end)
        equation = table.concat(equation, ",") .. "->" .. table.concat(result)
        local want, at = {}, {}
        local function visit(d, letters, f)
          if d > #letters then return f() end
          for x = 0, sizes[letters[d]] - 1 do
            at[letters[d]] = x
            visit(d + 1, letters, f)
          end
        end
        local rest = {}
        for _, c in ipairs(peri.util.keys(used)) do
          local kept = false
          for _, r in ipairs(result) do kept = kept or r == c end
          if not kept then rest[#rest + 1] = c end
        end
        visit(1, result, function()
          local sum = 0
          visit(1, rest, function()
            local product = 1
            for i, list in ipairs(terms) do product = product * element(nested[i], list, at) end
            sum = sum + product
          end)
          want[#want + 1] = sum
        end)
        for _ = 1, 2 do -- the second time by what was kept
          peri.scope(function()
            local got = F.einsum(equation, unpack(operands))
            assert.same(peri.util.map(result, function(c) return sizes[c] end), got:shape(), equation)
            assert.same(want, got:to_list(), equation)
          end)
        end
      end
    end)
  end)
end

describe("einsum's functions", function()
  it("are kept in bounded memory", function()
    local t, letters = peri.ones { 2, 3 }, "abcdefghijklmnopqrstuvwxyz"
    --- KiB of Lua's after equations of one form with all pairs of letters in the place of a and b.
    local function after(form)
      for i = 1, 26 do
        for k = 1, 26 do
          local names = { a = letters:sub(i, i), b = letters:sub(k, k) }
          if i ~= k then F.einsum(form:gsub("[ab]", names), t):release() end
        end
      end
      collectgarbage()
      collectgarbage()
      return collectgarbage "count"
    end
    local first = after "ab->a"
    after "ab->b"
    after "ab->ba"
    local growth = after "ab->" - first -- those of all would be 1,000 KiB more
    assert.is_true(growth < 500, ("%d KiB"):format(growth))
  end)
end)
