-- Exchanges give what they should under every way to copy (perilune/tune.h), also where ranks choose differently; on 2
-- ranks and on 4 in turn, so that each choice is made on both.
-- (mpirun: 2 3 4)
local peri = require "perilune"
local choices = require "perilune.choices"
local worlds = require "spec.support.worlds"
local F, C, dist = peri.nn.functional, peri.ffi.C, peri.dist

local function set(name, word) peri.ffi.check(C.peri_tune_set(name, word)) end
local function forget() for _, c in ipairs(choices.list()) do set(c.name, nil) end end

--- Numbers of rank r, made once: every way sends the same.
local made = {}
local function numbers(count, r, device)
  local key = ("%d %d %s"):format(count, r, device)
  made[key] = made[key] or peri.ffi.lasting(peri.Tensor.uniform, { count }, -1, 1, 3, r, "f32", device)
  return made[key]
end

--- Equal element by element, compared in bulk.
local function same(want, got, what)
  assert.same(want:shape(), got:shape())
  local difference = F.sub(want, got)
  assert.equal(0, F.mul(difference, difference):sum():item(), what)
end

--- Exchanges of about `rows` numbers for each rank, whose results are known.
local function exchanges(world, device, n, rows, what)
  local rank, send, recv, at = world.rank_number, {}, {}, 0
  for r = 0, n - 1 do send[r + 1], recv[r + 1] = rows + 3 * rank + r, rows + 3 * r + rank end
  local function of(r) return numbers(n * rows + 3 * n * r + n * (n - 1) / 2, r, device) end
  local flying, gathered = world:all_to_all_v(of(rank), send, recv), world:all_gather(numbers(rows, rank, device))
  local sent = world:broadcast(numbers(rows, rank, device):clone(), n - 1)
  local got = flying:wait()
  for r = 0, n - 1 do
    local first = rank * (rows + 3 * r) + rank * (rank - 1) / 2
    same(of(r):slice(1, first, first + recv[r + 1]), got:slice(1, at, at + recv[r + 1]), what .. ": all_to_all_v")
    same(numbers(rows, r, device), gathered:wait():slice(1, r * rows, (r + 1) * rows), what .. ": all_gather")
    at = at + recv[r + 1]
  end
  same(numbers(rows, n - 1, device), sent:wait(), what .. ": broadcast")
  local batch, dims, total = {}, {}, 0
  for r = 0, n - 1 do
    batch[r + 1], dims[r + 1] = math.floor(rows / 300) + 5 * r, ({ 300, 257, 128, 513 })[r + 1]
    total = total + batch[r + 1]
  end
  local function input(r) return numbers(total * dims[r + 1], r, device):reshape(total, dims[r + 1]) end
  local pooled = dist.ops.alltoall_pooled { a2a_pooled_embs_tensor = input(rank), batch_size_per_rank = batch,
    dim_sum_per_rank = dims }
  local out = pooled:wait()
  local before, column = 0, 0
  for r = 0, rank - 1 do before = before + batch[r + 1] end
  for r = 0, n - 1 do
    same(input(r):slice(1, before, before + batch[rank + 1]), out:slice(2, column, column + dims[r + 1]),
      what .. ": alltoall_pooled")
    column = column + dims[r + 1]
  end
end

describe("ways to copy:", function()
  teardown(function() made = {} end)
  after_each(forget)
  for _, c in ipairs(choices.list()) do
    for i, way in ipairs(c.name:match "^copy" and c.name ~= "copy_near" and c.ways or {}) do
      worlds.each(("%s=%s"):format(c.name, way.word), function(world, device, n)
        if c.name == "copy_block" then set("copy_past", "24m") end
        if c.name == "copy_by" then -- for those that are received in their places
          set("copy_past", "off")
          set("copy_rows", "direct")
        end
        for _, mixed in ipairs { false, true } do
          local mine = mixed and c.ways[(i + world.rank_number - 1) % #c.ways + 1] or way
          set(c.name, mine.word)
          exchanges(world, device, n, 60000, c.name .. "=" .. mine.word)
          exchanges(world, device, n, math.ceil(1.7 * 2 ^ 20 / n), c.name .. "=" .. mine.word)
        end
      end, { sizes = { i % 2 == 0 and 2 or 4 }, devices = { "cpu" }, only = "mpi" })
    end
  end
end)
