-- Rows and bags to ranks of the caller's choice: TorchRec's vector, every split against a plain computation, what is
-- refused.
local dist = require "perilune.dist"
local golden = require "spec.support.golden"
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local JaggedTensor = peri.JaggedTensor

describe("JaggedTensorAllToAll and TensorAllToAll give TorchRec's vectors", function()
  local case = golden.load "sharded/jagged_all_to_all_w3"
  worlds.each(case.name, function(world, device)
    local at, items = ("rank%d/"):format(world.rank_number), case.items[world.rank_number + 1]
    local jt = JaggedTensor { values = case:tensor(at .. "input/values", device),
      lengths = case:tensor(at .. "input/lengths", device), weights = case:tensor(at .. "input/weights", device) }
    local bags = dist.JaggedTensorAllToAll(world)(jt, items)
    local rows = dist.TensorAllToAll(world)(case:tensor(at .. "tensor/input", device), items)
    local got = bags:wait()
    for _, what in ipairs { "values", "lengths", "weights" } do
      case:assert_near(at .. "output/" .. what, got[what](got))
    end
    case:assert_near(at .. "tensor/output", rows:wait())
    assert.equal(got, bags:wait())
  end, { sizes = { case.world_size } })
end)

describe("bags between ranks", function()
  local function items(from, to) return (from * 2 + to * 3 + 1) % 4 end
  local function length(from, to, i) return (from + to + i) % 3 end

  worlds.each("of any number, dtype and length", function(world, device, n)
    local rank = world.rank_number
    for _, dtype in ipairs { "f32", "i64", "bf16" } do
      local function draw(collect)
        local values, lengths, weights, send = {}, {}, {}, {}
        collect(function(from, to)
          for i = 1, items(from, to) do
            lengths[#lengths + 1] = length(from, to, i)
            for k = 1, lengths[#lengths] do
              values[#values + 1], weights[#weights + 1] = (from * 7 + to * 5 + i + k) % 50, k / 4
            end
          end
          send[#send + 1] = items(from, to)
        end)
        return values, lengths, weights, send
      end
      local values, lengths, weights, send = draw(function(add) for r = 0, n - 1 do add(rank, r) end end)
      local want, want_lengths, want_weights = draw(function(add) for r = 0, n - 1 do add(r, rank) end end)
      local jt = JaggedTensor { values = peri.tensor(values, dtype, device),
        lengths = peri.tensor(lengths, "i32", device), weights = dtype ~= "i64" and peri.tensor(weights, "f32", device)
          or nil }
      local got = dist.JaggedTensorAllToAll(world)(jt, send):wait()
      assert.same(want, got:values():to_list(), dtype)
      assert.same(want_lengths, got:lengths():to_list(), dtype)
      assert.equal(dtype, got:values():dtype())
      if dtype ~= "i64" then
        assert.same(want_weights, got:weights():to_list())
      else
        assert.is_nil(got:weights_or_none())
      end
    end
  end)

  worlds.each("that cannot be are refused, and the ranks go on", function(world, device, n)
    local jt = JaggedTensor { values = peri.ones({ 2 * n }, "f32", device),
      lengths = peri.full({ n }, 2, "i32", device) }
    local ones, few, half = {}, {}, {}
    for r = 1, n do ones[r], few[r], half[r] = 1, r > 1 and 1 or 0, r < n and 1 or 0.5 end
    local bags, rows = dist.JaggedTensorAllToAll(world), dist.TensorAllToAll(world)
    local function bad(pattern, f, ...)
      local args = { ... }
      assert.error_matches(function() f(unpack(args)) end, pattern)
    end
    bad("num_items_to_send sum to " .. n - 1 .. ", there are " .. n, bags, jt, few)
    bad("num_items_to_send%[1%] is %-1", bags, jt, { -1, unpack(ones, 2) })
    bad("num_items_to_send needs one number for each", bags, jt, 1)
    bad("a number, wanted a JaggedTensor", bags, 5, ones)
    bad("input_splits sum to " .. n - 1, rows, jt:lengths(), few)
    bad("input_splits%[" .. n .. "%] is 0.5", rows, jt:lengths(), half)
    bad("a table, wanted a tensor", rows, {}, ones)
    bad("no dimensions", rows, peri.full({}, 1, "f32", device), ones)
    bad("group is a number", dist.TensorAllToAll, 5)
    assert.same({ n }, rows(jt:lengths(), ones):wait():shape())
    local got = bags(jt, ones):wait()
    assert.equal(2 * n, got:values():numel())
  end, { sizes = { 1, 2, 3 } })
end)
