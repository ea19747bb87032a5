-- comm_kjt.lua: KJTAllToAll and SparseFeaturesAllToAll beside the bare MPI_Alltoallv calls that move their lengths, ids
-- and weights. Part of comm.lua, which hands over tools.
local peri = require "perilune"
local KJT = peri.KeyedJaggedTensor

local BATCH, KEYS, TABLE = 2048, 26, 1000000

local function batch_of(prefix, count, ids, rank, seed, weighted)
  local keys = {}
  for i = 1, count do keys[i] = prefix .. i end
  local values = peri.Tensor.uniform({ count * BATCH * ids }, 0, TABLE, seed, rank, "f64", "cpu"):to "i64"
  local weights = weighted and peri.Tensor.uniform({ count * BATCH * ids }, 0, 1, seed, rank, "f32", "cpu") or nil
  return KJT.from_lengths_sync { keys = keys, values = values, weights = weights,
    lengths = peri.full({ count * BATCH }, ids, "i32", "cpu") }
end

local function splits_of(count, ranks)
  local splits = {}
  for r = 1, ranks do splits[r] = math.floor(count / ranks) + (r <= count % ranks and 1 or 0) end
  return splits
end

--- t: { world, timed(slot, f), largest(n) (of the slots, over the ranks), times, median, bare(recv, send, floats),
--- address, emit }. sparse: half of the keys with weights, as SparseFeaturesAllToAll moves them.
return function(t, ids, rounds, sparse)
  local world = t.world
  local ranks, rank = world.world_size, world.rank_number
  local count = sparse and KEYS / 2 or KEYS
  local splits, batches = splits_of(count, ranks), {}
  local dist = sparse and peri.dist.SparseFeaturesAllToAll { pg = world, id_list_features_per_rank = splits,
    id_score_list_features_per_rank = splits } or peri.dist.KJTAllToAll(world, splits)
  for i = 1, 3 do
    batches[i] = batch_of("f", count, ids, rank, i)
    if sparse then
      batches[i] = peri.dist.SparseFeatures { id_list_features = batches[i],
        id_score_list_features = batch_of("s", count, ids, rank, 3 + i, true) }
    end
  end
  -- The bare calls move as many bytes in equal parts (floats for each peer), from three batches too: what is cold for
  -- one is cold for both.
  local bags = count * BATCH / ranks
  local sizes = sparse and { bags, 2 * bags * ids, bags, 2 * bags * ids, bags * ids } or { bags, 2 * bags * ids }
  local kept, at, floats = {}, {}, 0
  for k, size in ipairs(sizes) do
    sizes[k] = math.floor(size)
    floats = floats + sizes[k]
    kept[k] = {}
    for i = 1, 4 do kept[k][i] = peri.zeros({ sizes[k] * ranks }, "f32", "cpu") end -- three to send, one to receive
    at[k] = peri.util.map(kept[k], t.address)
  end
  local function bare(i)
    for k, size in ipairs(sizes) do t.bare(at[k][4], at[k][i % 3 + 1], size) end
  end
  local function ours(i)
    peri.scope(function()
      local result = dist(batches[i % 3 + 1]):wait()
      if not sparse then result:wait() end
    end)
  end
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
  for _, list in ipairs(kept) do
    for _, b in ipairs(list) do b:release() end
  end
  local name = sparse and "sparse_features_all_to_all" or "kjt_all_to_all"
  local plain, own, best = t.median(lists[1]), t.median(lists[2])
  t.emit({ op = name, ranks = ranks, bytes = 4 * floats, ids = ids, bare_us = plain, own_us = own, ratio = own / plain,
    added_us = own - plain, best_us = best, bare_best_us = lists[1][1] },
    ("%-35s %5d %10d %10.2f %10.2f %7.3f %9.2f   (%d ids a bag, through Lua; best %.2f beside %.2f)"):format(name,
      ranks, 4 * floats, plain,
    own, own / plain, own - plain, ids, best, lists[1][1]))
end
