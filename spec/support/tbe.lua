-- tbe.lua: what the specs of table batches share: repeatable random numbers and bags, and making batches.
local peri = require "perilune"

local M = {}

local seed = tonumber(os.getenv "PERI_TEST_SEED") or 4711
print("seed of the table batch specs: PERI_TEST_SEED=" .. seed)

--- Numbers that depend on `seed` only.
function M.generator(salt)
  local state = (seed * 7919 + salt * 104729) % 2147483647
  return function(n)
    state = state * 48271 % 2147483647
    return n and state % n or state / 2147483647 * 2 - 1
  end
end

function M.numbers(n, draw)
  local list = {}
  for i = 1, n do list[i] = draw() end
  return list
end

--- d f / d list[i] for all i, where f(list) is a number.
function M.differences(list, f, step)
  local d, moved = {}, {}
  for i = 1, #list do moved[i] = list[i] end
  for i = 1, #list do
    moved[i] = list[i] + step
    local high = f(moved)
    moved[i] = list[i] - step
    d[i] = (high - f(moved)) / (2 * step)
    moved[i] = list[i]
  end
  return d
end

--- Random ids for blocks over `bags` bags: { ids, offsets } with ids of every row count in `rows` (the smallest).
function M.bags_of(bags, longest, rows, draw)
  local ids, offsets = {}, { 0 }
  for _ = 1, bags do
    for _ = 1, draw(longest + 1) do ids[#ids + 1] = draw(rows) end
    offsets[#offsets + 1] = #ids
  end
  return ids, offsets
end

--- A function that makes table batches on a device: make(tables, fused_params, more).
function M.maker(device)
  return function(tables, fused, more)
    local args = { tables = tables, fused_params = fused or { optimizer = "sgd", learning_rate = 1 }, device = device,
      seed = 3 }
    for key, value in pairs(more or {}) do args[key] = value end
    return peri.embed.tbe.new(args)
  end
end

return M
