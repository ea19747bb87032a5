-- shard.lua: the sparse part of a training step (input dist, lookup, output dist, backward pass, update) of sharded
-- collections, beside the sum of its floors, measured in turns with it in the same run: 26 tables of 64 columns under
-- row-wise Adagrad, 2,048 samples a rank.
--
-- The floors are what the step cannot do without, each as fast as this library does it alone, all ranks at once, in the
-- order of the step:
--   lookup, update  the unsharded collection's forward and backward pass over this rank's shards, on the ids that
--                   arrive here; of replicas, which every rank updates by what all ranks' ids did: the dense gradient
--                   of this rank's ids, and an update by it
--   exchange        the bare collective operations on buffers of the sizes that travel: ids and lengths (all_to_all_v);
--                   rows and gradients, each with the operations of the sharding type (all_to_all_v; reduce_scatter and
--                   all_gather where rows are cut, within a node for table-row-wise; all_reduce for replicas)
-- A rank's part needs what all ranks made in the part before (rows of every owner, gradients of every home), so the
-- step takes at least the sum of the parts' times, and a part takes the time from when the first rank begins it to when
-- the last one has done it. (A rank's own time in a part leaves out what others do on its processor before: where four
-- ranks take turns on two, it may be half of the part's.) The step's time is from the first rank's begin to the last
-- one's end too. `empty_us` is a step of batches without samples: all that does not grow with them, Lua's part among
-- it. `lua_kb` is what a step leaves to Lua's collector. `variable` is the time of a step with a variable batch per
-- feature and as many ids, whose sizes were never seen, over that with a fixed one.
local ffi = require "ffi"
local argparse = require "argparse"
local json = require "dkjson"
local peri = require "perilune"
local plan, C = peri.plan, peri.ffi.C

local parser = argparse("tests/bench/shard.lua", "The sparse part of a step beside its floors.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--module", "Several: ebc,ec.", "ebc,ec")
parser:option("--sharding", "Sharding types.",
  "table_wise,row_wise,column_wise,table_row_wise,table_column_wise,grid_shard,data_parallel")
parser:option("--batch", "Samples of a rank; of sequences less where ids or ranks are many.", 2048, tonumber)
parser:option("--ids", "Ids of a bag.", "1,20")
parser:option("--sequence-ids", "Ids of a sequence.", "20,200")
parser:option("--tables", "Embedding tables.", 26, tonumber)
parser:option("--rows", "Rows of a table; replicas have a hundredth.", 100000, tonumber)
parser:option("--dim", "Columns of a table.", 64, tonumber)
parser:option("--steps", "Timed steps.", 9, tonumber)
local options = parser:parse(arg)

local function now() return tonumber(C.peri_time_ns()) / 1e6 end

local world = peri.dist.init { local_size = 2 } -- nodes of two ranks, all on this machine
local rank, ranks = world:rank(), world:size()
local intra, cross = peri.dist.comm.intra_and_cross_node_pg { group = world }
local node_size, nodes = intra:size(), cross:size()
local out = options.out and rank == 0 and assert(io.open(options.out, "a"))

local median = peri.util.median

--- Spans of time, { begin, end } on this rank: from when the first rank began to when the last one ended, of each. The
--- ranks are on one machine, so they have one clock.
local function spanned(spans)
  local times = {}
  for i, s in ipairs(spans) do times[2 * i - 1], times[2 * i] = -s[1], s[2] end
  local t, list = peri.tensor(times, "f64"), {}
  world:all_reduce(t, "max"):wait()
  times = t:to_list()
  for i = 1, #spans do list[i] = times[2 * i - 1] + times[2 * i] end
  return list
end

--- Run f after a barrier; appends its span.
local function timed(spans, f, ...)
  world:barrier():wait()
  local span = { now() }
  spans[#spans + 1] = span
  local result = f(...)
  span[2] = now()
  return result
end

-- -- the case ---------------------------------------------------------------------------------------------------------

local function draw(values, n, rows, seed)
  local x = seed * 2654435761 % 2147483647 + 1
  for i = 0, n - 1 do
    x = x * 48271 % 2147483647
    values[i] = x % rows
  end
end

--- The ids of one table that rank r asks for in batch k.
local function ids_of(case, k, t, r)
  local n = case.batch * case.ids
  local values = ffi.new("int64_t[?]", math.max(n, 1))
  draw(values, n, case.rows, k * 7919 + t * 104729 + r * 31)
  return values, n
end

local entries = {
  table_wise = function(t) return plan.table_wise((t - 1) % ranks) end,
  row_wise = function() return plan.row_wise() end,
  column_wise = function() return plan.column_wise() end,
  table_row_wise = function(t) return plan.table_row_wise((t - 1) % nodes) end,
  table_column_wise = function(t) return plan.table_column_wise((t - 1) % nodes) end,
  grid_shard = function() return plan.grid_shard() end,
  data_parallel = function() return plan.data_parallel() end,
}

local fused = { optimizer = "rowwise_adagrad", learning_rate = 0.01 }
local parts = {
  ebc = { config = peri.EmbeddingBagConfig, unsharded = peri.EmbeddingBagCollection,
    sharded = peri.shard.ShardedEmbeddingBagCollection },
  ec = { config = peri.EmbeddingConfig, unsharded = peri.EmbeddingCollection,
    sharded = peri.shard.ShardedEmbeddingCollection },
}

local function keys_of(n, letter)
  local keys = {}
  for i = 1, n do keys[i] = letter .. i end
  return keys
end

local function make(case)
  local tables, plans = {}, {}
  for t = 1, options.tables do
    tables[t] = parts[case.module].config { name = "t" .. t, num_embeddings = case.rows, embedding_dim = options.dim,
      feature_names = { "f" .. t } }
    plans["t" .. t] = entries[case.sharding](t)
  end
  return parts[case.module].sharded { tables = tables, plan = plans, group = world, fused_params = fused }
end

local function batch_of(case, k, empty)
  local bags, ids = options.tables * case.batch, {}
  local values = ffi.new("int64_t[?]", bags * case.ids)
  local n = case.batch * case.ids
  for t = 1, options.tables do
    ids[t] = ids_of(case, k, t, rank)
    ffi.copy(values + (t - 1) * n, ids[t], n * 8)
  end
  if empty then bags = 0 end
  return peri.KeyedJaggedTensor { keys = keys_of(options.tables, "f"), stride = empty and 0 or case.batch,
    values = peri.Tensor.from_memory(values, { bags * case.ids }, "i64"),
    lengths = peri.full({ bags }, case.ids, "i32") }
end

local VARIABLE = 12 -- batches of other sizes each: more than layouts are kept

--- A variable batch: a feature has three quarters of the samples' number of bags or more, and as many ids as in a fixed
--- batch. Bags that pool are repeated for the samples that remain.
local function variable_of(case, k)
  local n, strides, inverse, first = case.batch * case.ids, {}, {}, 0
  local lengths, values = ffi.new("int32_t[?]", options.tables * case.batch), ffi.new("int64_t[?]", options.tables * n)
  for t = 1, options.tables do
    local bags = case.batch - (k * 7919 + t * 31 + rank * 17) % math.max(1, math.floor(case.batch / 4))
    for b = 0, bags - 1 do lengths[first + b] = math.floor((b + 1) * n / bags) - math.floor(b * n / bags) end
    first, strides[t] = first + bags, { bags }
    ffi.copy(values + (t - 1) * n, ids_of(case, k, t, rank), n * 8)
    inverse[t] = {}
    for b = 1, case.batch do inverse[t][b] = (b - 1) % bags end
  end
  local keys = keys_of(options.tables, "f")
  return peri.KeyedJaggedTensor { keys = keys, stride_per_key_per_rank = strides,
    values = peri.Tensor.from_memory(values, { options.tables * n }, "i64"),
    lengths = peri.Tensor.from_memory(lengths, { first }, "i32"), inverse_indices = case.module == "ebc"
      and { keys, peri.tensor(inverse, "i64") } or nil }
end

--- The ids of batch k that come to shard s, as values and lengths of bags of all ranks (a replica's: of this rank).
local function arrivals(case, k, s, values, lengths)
  local table_number, n_ids, n_bags = tonumber(s.table:match "%d+"), 0, 0
  for r = 0, ranks - 1 do
    if not s.replica or r == rank then
      local ids = ids_of(case, k, table_number, r)
      for b = 0, case.batch - 1 do
        local from = n_ids
        for i = b * case.ids, (b + 1) * case.ids - 1 do
          local id = ids[i] - s.row_offset
          values[n_ids] = id
          n_ids = n_ids + (id >= 0 and id < s.rows and 1 or 0)
        end
        lengths[n_bags + b] = n_ids - from
      end
      n_bags = n_bags + case.batch
    end
  end
  return n_ids, n_bags
end

-- -- floors -----------------------------------------------------------------------------------------------------------

--- Forward pass of `module` on a batch: the rows.
local function ahead_of(module, features)
  local rows = {}
  local result = module:forward(features)
  if module.embedding_dims then rows[1] = result:values()
  else
    for i, name in ipairs(module:embedding_names()) do rows[i] = result[name]:values() end
  end
  rows[1]:shape() -- waits
  return rows
end

--- Upstream gradients of rows, from `grads` if they were made before.
local function ups_of(rows, grads)
  local ups = {}
  for i, x in ipairs(rows) do
    local n = x:numel()
    grads[n] = grads[n] or {}
    grads[n][i] = grads[n][i] or peri.keep(peri.full(x:shape(), 1e-3, "f32"))
    ups[i] = grads[n][i]
  end
  return ups
end

local function both(module, features, grads)
  local rows = ahead_of(module, features)
  peri.backward(rows, ups_of(rows, grads))
end

--- A function that makes the dense gradient of a batch of n replicas and updates all their rows by it.
local function replica_update(case, tbe, features, n)
  local blocks, pooled, cols, bags = {}, case.module == "ebc", options.dim, case.batch
  local ids, offsets = features:values(), features:offsets()
  for i = 1, n do -- sequences: a row at the place of each id
    blocks[i] = { table = i, first_bag = (i - 1) * bags, bags = bags, out_offset = pooled and (i - 1) * cols or 0,
      out_stride = pooled and n * cols or cols }
  end
  local list, grad = tbe:blocks(blocks), peri.full({ n * bags * (pooled and 1 or case.ids) * cols }, 1e-3, "f32")
  return function() tbe:apply_gradient(tbe:gradient(ids, offsets, list, grad)) end
end

--- The unsharded collection of this rank's shards, and what arrives for it: a function that looks it up, and returns
--- one that updates; or false without shards.
local function local_floor(case, shards)
  local tables, mine, n_ids, n_bags = {}, {}, 0, 0
  for _, s in ipairs(shards) do
    if s.rows > 0 and s.cols > 0 then mine[#mine + 1] = s end
  end
  if #mine == 0 then return false end
  local most = case.batch * case.ids * ranks
  local all, all_lengths = ffi.new("int64_t[?]", most * #mine + 1), ffi.new("int32_t[?]", case.batch * ranks * #mine)
  local bags
  for i, s in ipairs(mine) do
    tables[i] = parts[case.module].config { name = "s" .. i, num_embeddings = s.rows, embedding_dim = s.cols,
      feature_names = { "g" .. i } }
    local more
    more, bags = arrivals(case, 1, s, all + n_ids, all_lengths + n_bags)
    n_ids, n_bags = n_ids + more, n_bags + bags
  end
  local module = parts[case.module].unsharded { tables = tables, fused_params = fused }
  local features = peri.KeyedJaggedTensor { keys = keys_of(#mine, "g"), stride = bags,
    values = peri.Tensor.from_memory(all, { n_ids }, "i64"), lengths = peri.Tensor.from_memory(all_lengths, { n_bags },
      "i32") }
  local grads = {}
  local replicas = case.sharding == "data_parallel" and replica_update(case, module:materialise(), features, #mine)
  return function()
    local rows = ahead_of(module, features)
    return replicas or function() peri.backward(rows, ups_of(rows, grads)) end
  end
end

--- numbers[r]: f32 numbers that travel from this rank to rank r - 1 of a group; and back.
local function exchange(group, numbers)
  local n, own = group:size(), 0
  local recv = group:all_to_all(peri.tensor(numbers, "i64")):wait():to_list()
  local total = 0
  for i = 1, n do own, total = own + numbers[i], total + recv[i] end
  local a, b = peri.zeros({ own }, "f32"), peri.zeros({ total }, "f32")
  return function() group:all_to_all_v(a, numbers, recv, b):wait() end,
    function() group:all_to_all_v(b, recv, numbers, a):wait() end
end

--- `numbers` of each rank's part of a sum over the group; and the copy of what belongs to it.
local function sum(group, numbers)
  local a, b = peri.zeros({ numbers * group:size() }, "f32"), peri.zeros({ numbers }, "f32")
  return function() group:reduce_scatter(a, "sum", b):wait() end, function() group:all_gather(b, a):wait() end
end

--- Bare operations of a step: of ids, of rows, of gradients, as lists of functions in their order.
local function exchanges(case, module)
  local pooled = case.module == "ebc"
  local samples = case.batch * options.dim
  if case.sharding == "data_parallel" then
    local whole = peri.zeros({ options.tables * case.rows * options.dim }, "f32")
    return {}, {}, { function() world:all_reduce(whole):wait() end }
  end
  -- Ids and lengths; and of rows that are not added up, one for each id.
  local ids, rows = {}, {}
  for r = 1, ranks do ids[r], rows[r] = 0, 0 end
  for t = 1, options.tables do
    local own = ids_of(case, 1, t, rank)
    for _, s in ipairs(module.plan.tables["t" .. t]:shards({ name = "t" .. t, num_embeddings = case.rows,
      embedding_dim = options.dim }, { world_size = ranks, local_size = node_size })) do
      local n, r = 0, s.rank + 1
      for i = 0, case.batch * case.ids - 1 do
        if own[i] >= s.row_offset and own[i] < s.row_offset + s.rows then n = n + 1 end
      end
      ids[r] = ids[r] + 2 * n + case.batch
      rows[r] = rows[r] + (pooled and case.batch or n) * s.cols
    end
  end
  local send = exchange(world, ids)
  rows[rank + 1] = 0 -- a rank's own rows lie where the lookup wrote them
  local cut = case.sharding == "row_wise" or case.sharding == "table_row_wise" or case.sharding == "grid_shard"
  if not pooled or not cut then
    local back, there = exchange(world, rows) -- they were counted by who owns them
    return { send }, { there }, { back }
  end
  if case.sharding == "row_wise" then
    local there, back = sum(world, samples * options.tables)
    return { send }, { there }, { back }
  end
  local here = 0 -- columns that lie on this node
  for t = 1, options.tables do
    if case.sharding == "grid_shard" then here = here + options.dim / nodes
    elseif (t - 1) % nodes == cross:rank() then here = here + options.dim end
  end
  local parts_of_nodes = {}
  -- the sum of this node's is in its place
  for i = 1, nodes do parts_of_nodes[i] = i == cross:rank() + 1 and 0 or case.batch * here end
  local add, copy = sum(intra, case.batch * here * nodes)
  if nodes == 1 then return { send }, { add }, { copy } end
  local there, back = exchange(cross, parts_of_nodes)
  return { send }, { add, there }, { back, copy }
end

-- -- timing -----------------------------------------------------------------------------------------------------------

local function nothing() end

--- A round of the floors, part after part: the sum of their times, and that of the lookup, of the update, of the
--- exchanges.
local function floors_of(floor, ids, rows, gradients)
  local spans = {}
  for _, f in ipairs(ids) do timed(spans, f) end
  local update = timed(spans, floor or nothing)
  local lookup = #spans
  for _, f in ipairs(rows) do timed(spans, f) end
  for _, f in ipairs(gradients) do timed(spans, f) end
  timed(spans, update or nothing)
  local times, all = spanned(spans), 0
  for _, t in ipairs(times) do all = all + t end
  return all, times[lookup], times[#times], all - times[lookup] - times[#times]
end

local function run(case)
  local module = make(case)
  local batches = { batch_of(case, 1), batch_of(case, 2), batch_of(case, 3) }
  local grads, empty_grads, empty = {}, {}, batch_of(case, 1, true)
  local floor, ids, rows, gradients = local_floor(case, module:local_shards()), exchanges(case, module)
  local steps, floors, lookups, updates, moved, empties, others = {}, {}, {}, {}, {}, {}, {}
  local variable = {}
  for k = 1, VARIABLE do variable[k] = variable_of(case, k) end
  collectgarbage()
  for i = -2, options.steps do
    local spans = {}
    peri.scope(timed, spans, both, module, batches[i % 3 + 1], grads)
    local least, lookup, update, exchanged = peri.scope(floors_of, floor, ids, rows, gradients)
    peri.scope(timed, spans, both, module, empty, empty_grads)
    peri.scope(timed, spans, both, module, variable[i % VARIABLE + 1], grads)
    local all = spanned(spans)
    if i > 0 then
      floors[i], lookups[i], updates[i], moved[i] = least, lookup, update, exchanged
      steps[i], empties[i], others[i] = unpack(all)
    end
  end
  collectgarbage()
  collectgarbage "stop"
  local before = collectgarbage "count"
  for i = 1, 3 do peri.scope(both, module, batches[i], grads) end
  local lua_kb = (collectgarbage "count" - before) / 3
  collectgarbage "restart"
  local ratios, more = {}, {}
  for i = 1, options.steps do ratios[i], more[i] = steps[i] / floors[i], others[i] / steps[i] end
  local r = { module = case.module, sharding = case.sharding, ranks = ranks, ids = case.ids, batch = case.batch,
    median_ms = median(steps), floor_ms = median(floors), ratio = median(ratios), lookup_ms = median(lookups),
    update_ms = median(updates), exchange_ms = median(moved), empty_us = 1000 * median(empties), lua_kb = lua_kb,
    variable_ms = median(others), variable = median(more) }
  if rank == 0 then
    local times = ("%7.1f ms, floor %7.1f (lookup %.1f, update %.1f, exchange %.1f)"):format(r.median_ms, r.floor_ms,
      r.lookup_ms, r.update_ms, r.exchange_ms)
    print(("%d ranks %-3s %-18s %3d ids %s, ratio %.2f; variable %.2f; empty %.0f us"):format(ranks, case.module,
      case.sharding, case.ids, times, r.ratio, r.variable, r.empty_us))
    if out then
      out:write(json.encode(r), "\n")
      out:flush()
    end
  end
  module:release()
end

for module in options.module:gmatch "%w+" do
  for ids in (module == "ec" and options.sequence_ids or options.ids):gmatch "%d+" do
    for sharding in options.sharding:gmatch "[%w_]+" do
      local n = tonumber(ids)
      peri.scope(run, { module = module, sharding = sharding, ids = n,
        rows = sharding == "data_parallel" and options.rows / 100 or options.rows,
        -- so that all ranks' rows are together in 24 GiB
        batch = module == "ec" and math.floor(options.batch * math.min(1, 20 / n) * math.min(1, 2 / ranks))
          or options.batch })
      collectgarbage()
      collectgarbage()
    end
  end
end
peri.dist.finish()
