-- comm_kjt.lua: KJTAllToAll beside the bare MPI_Alltoallv calls that move its lengths and ids. Part of comm.lua, which hands over tools.
local peri = require "perilune"
local KJT = peri.KeyedJaggedTensor

local BATCH, KEYS, TABLE = 2048, 26, 1000000

local function batch_of(ids, rank, seed)
  local keys = {}
  for i = 1, KEYS do keys[i] = "f" .. i end
  local values = peri.Tensor.uniform({ KEYS * BATCH * ids }, 0, TABLE, seed, rank, "f64", "cpu"):to "i64"
  return KJT.from_lengths_sync { keys = keys, values = values, lengths = peri.full({ KEYS * BATCH }, ids, "i32", "cpu") }
end

--- t: { world, timed(slot, f), largest(n) (of the slots, over the ranks), times, median, bare(recv, send, floats), address, emit }
return function(t, ids, rounds)
  local world = t.world
  local ranks, rank = world.world_size, world.rank_number
  local splits, batches = {}, {}
  for r = 1, ranks do splits[r] = math.floor(KEYS / ranks) + (r <= KEYS % ranks and 1 or 0) end
  local dist = peri.dist.KJTAllToAll(world, splits)
  for i = 1, 3 do batches[i] = batch_of(ids, rank, i) end
  -- The bare calls move as many bytes in equal parts (floats for each peer), from three batches too: what is cold for one is cold for both.
  local lengths, values = math.floor(KEYS * BATCH / ranks), math.floor(2 * KEYS * BATCH * ids / ranks)
  local function buffers(floats) -- three to send, one to receive
    local list = {}
    for i = 1, 4 do list[i] = peri.zeros({ floats * ranks }, "f32", "cpu") end
    return peri.util.map(list, t.address), list
  end
  local at, kept = buffers(lengths)
  local at_values, kept_values = buffers(values)
  local function bare(i)
    t.bare(at[4], at[i % 3 + 1], lengths)
    t.bare(at_values[4], at_values[i % 3 + 1], values)
  end
  local function ours(i) peri.scope(function() dist(batches[i % 3 + 1]):wait():wait() end) end
  for i = 1, 3 do
    ours(i)
    bare(i)
  end
  local lists = { {}, {} }
  for k = 1, rounds do
    for slot = 0, 1 do
      if (k + slot) % 2 == 0 then t.timed(0, function() bare(k) end) else t.timed(1, function() ours(k) end) end
    end
    t.largest(2)
    lists[1][k], lists[2][k] = t.times[0], t.times[1]
  end
  for _, list in ipairs { kept, kept_values } do
    for _, b in ipairs(list) do b:release() end
  end
  local plain, own, best = t.median(lists[1]), t.median(lists[2]), lists[2][1] -- median sorts
  t.emit({ op = "kjt_all_to_all", ranks = ranks, bytes = 4 * (lengths + values), ids = ids, bare_us = plain, own_us = own,
    ratio = own / plain, added_us = own - plain, best_us = best, bare_best_us = lists[1][1] },
    ("%-15s %5d %10d %10.2f %10.2f %7.3f %9.2f   (%d ids a bag, through Lua; best %.2f beside %.2f)"):format("kjt_all_to_all", ranks,
    4 * (lengths + values), plain, own, own / plain, own - plain, ids, best, lists[1][1]))
end
