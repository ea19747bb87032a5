-- step.lua: one training step of a DLRM, in all and in parts: 13 dense features, bottom MLP 512-256-64, 26 tables of
-- 100,000 x 64 under row-wise Adagrad, pairwise dot products, top MLP 512-512-256-1, the dense part under Adagrad;
-- 2,048 samples a rank.
--
-- The whole step is timed as pipelines run it. The parts come from further steps that are taken apart: what a part
-- waits for (another rank, an exchange) is in its time, so the parts of a step that overlaps its exchanges add up to
-- more than the step.
--
-- With --cache the tables are in files; then the step is also timed with the next batch's rows prefetched before the
-- backward pass.
local argparse = require "argparse"
local json = require "dkjson"
local peri = require "perilune"
package.path = "tests/bench/?.lua;" .. package.path
local dlrm_of = require "dlrm"
local nn, C = peri.nn, peri.ffi.C
local median = peri.util.median

local parser = dlrm_of.options(argparse("tests/bench/step.lua", "Time of a DLRM training step."))
parser:option("--ids", "Ids of a bag (several: 1,20).", "1,20")
parser:option("--sharding", "Sharding types (several: table_wise,row_wise).", "table_wise,row_wise")
parser:option("--cache", "Tables in files, this share of their rows in memory; 0: in memory.", 0, tonumber)
parser:option("--steps", "Timed steps of each kind.", 15, tonumber)
local options = parser:parse(arg)

local function now() return tonumber(C.peri_time_ns()) / 1e6 end

--- Milliseconds since this process began (the kernel knows its start to 10 ms).
local function process_age()
  local file = assert(io.open "/proc/self/stat")
  local fields, i = {}, 0
  for word in file:read("*a"):match "%) (.*)":gmatch "%S+" do
    i = i + 1
    fields[i] = word
  end
  file:close()
  return now() - tonumber(fields[20]) * 10
end

local world = peri.dist.init()
local rank, ranks = world:rank(), world:size()
local out = options.out and rank == 0 and assert(io.open(options.out, "a"))

-- -- the parts of a step ----------------------------------------------------------------------------------------------

local names = {
  "input_dist", "lookup", "dense_arch", "output_dist", "over_arch", "dense_backward", "sparse_backward", "all_reduce",
  "optimizer",
}

--- One step in pieces; adds the time of each to times[name].
local function take_apart(model, optimizer, batch, times)
  local dlrm = model.module.model
  local ebc = dlrm.sparse_arch.embedding_bag_collection
  local at, name = now(), 0
  local function lap()
    local t = now()
    name = name + 1
    local list = times[names[name]]
    list[#list + 1] = t - at
    at = t
  end
  optimizer:zero_grad()
  local dist = ebc:input_dist(batch.sparse_features):wait()
  lap()
  local pooled = ebc:compute_and_output_dist(dist)
  lap()
  local dense = dlrm.dense_arch:forward(batch.dense_features)
  lap()
  local values = pooled:values()
  lap()
  local leaf = values:detach():requires_grad()
  local sparse = leaf:reshape(-1, options.tables, options.dim)
  local logits = dlrm.over_arch:forward(dlrm.inter_arch:forward(dense, sparse)):reshape(-1)
  local loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
  lap()
  if model._reducer then model._reducer:enable(false) end -- for a time of its own
  loss:backward()
  lap()
  values:backward(leaf:grad())
  lap()
  if model._reducer then
    model._reducer:enable(true)
    model._reducer:finish()
  end
  lap()
  optimizer:step()
  lap()
end

--- One step whose tables' input is `dist`. The next batch's ids go out, and its rows are brought, before the backward
--- pass. Returns the next dist.
local function step_ahead(model, optimizer, dist, batch, following)
  local dlrm = model.module.model
  local ebc = dlrm.sparse_arch.embedding_bag_collection
  optimizer:zero_grad()
  local pooled = ebc:compute_and_output_dist(dist)
  local dense = dlrm.dense_arch:forward(batch.dense_features)
  local ahead = ebc:input_dist(following.sparse_features):wait()
  ebc:prefetch(ahead)
  local sparse = pooled:values():reshape(-1, options.tables, options.dim)
  local logits = dlrm.over_arch:forward(dlrm.inter_arch:forward(dense, sparse)):reshape(-1)
  model:backward(nn.functional.binary_cross_entropy_with_logits(logits, batch.labels))
  optimizer:step()
  return ahead
end

--- Counts of the caches of this rank: hits and rows that were there because they had been prefetched.
local function cache_counts(model)
  local hits, misses, prefetched = 0, 0, 0
  for _, s in ipairs(model.sharded[1]:local_shards()) do
    local c = s.cache_statistics()
    hits, misses, prefetched = hits + c.hits, misses + c.misses, prefetched + c.prefetch_hits
  end
  return hits, misses, prefetched
end

--- Times of steps with prefetches, and the share of rows that were in memory when they were looked up; of the plain
--- steps before too.
local function run_ahead(model, optimizer, next_batch)
  local ebc = model.module.model.sparse_arch.embedding_bag_collection
  local times, batch = {}, next_batch()
  local hits, misses = cache_counts(model)
  local plain = hits / math.max(1, hits + misses)
  local dist = ebc:input_dist(batch.sparse_features):wait()
  for i = 1, options.steps do
    local following = next_batch()
    world:barrier():wait()
    local from = now()
    dist = peri.scope(step_ahead, model, optimizer, dist, batch, following)
    times[i], batch = now() - from, following
  end
  local more, missed = cache_counts(model)
  return median(times), plain, (more - hits) / math.max(1, more - hits + missed - misses)
end

-- -- timing -----------------------------------------------------------------------------------------------------------

--- `first`: report how long the process took to its first step, without making tables and data.
local function run(sharding, ids, first)
  local from_setup, k = now(), 0
  local model, optimizer = dlrm_of.model(options, world, sharding, options.cache)
  -- caches shall not hold the rows of all batches
  local batches = dlrm_of.batches(options, rank, ids, options.cache > 0 and 12 or 3)
  world:barrier():wait() -- the other ranks' tables are no part of the step either
  local setup_ms = now() - from_setup
  local function next_batch()
    k = k % #batches + 1
    return batches[k]
  end
  local pipeline = peri.TrainPipelineBase { model = model, optimizer = optimizer }
  local function step() dlrm_of.release(pipeline:progress(next_batch)) end
  step()
  local first_ms = first and process_age() - setup_ms
  local times, apart = {}, {}
  for _, name in ipairs(names) do apart[name] = {} end
  step()
  for i = 1, options.steps do
    world:barrier():wait()
    local from = now()
    step()
    times[i] = now() - from
  end
  for i = 1, options.steps + 1 do
    world:barrier():wait()
    peri.scope(take_apart, model, optimizer, next_batch(), apart)
    if i == 1 then -- the first one warms up
      for _, name in ipairs(names) do apart[name] = {} end
    end
  end
  local result = {
    ranks = ranks, ids = ids, sharding = sharding, dtype = peri.embed.config.data_types[options.data_type],
    qcomm = options.qcomm, cache = options.cache, batch = options.batch, threads = C.peri_threads(), parts = {},
  }
  result.median_ms, result.best_ms = median(times)
  result.samples_per_s = options.batch * ranks / result.median_ms * 1e3
  result.first_step_s = first_ms and first_ms / 1e3 or nil
  for _, name in ipairs(names) do result.parts[name] = median(apart[name]) end
  if options.cache > 0 then
    result.prefetch_ms, result.hit_rate, result.prefetch_hit_rate = run_ahead(model, optimizer, next_batch)
  end
  if rank == 0 then
    local parts = {}
    for i, name in ipairs(names) do parts[i] = ("%s %.1f"):format(name, result.parts[name]) end
    print(("%d rank%s, %-10s %2d ids: %7.1f ms (best %.1f), %6.0f samples/s%s\n    %s"):format(ranks, ranks > 1 and "s"
      or "", sharding, ids, result.median_ms, result.best_ms, result.samples_per_s,
      result.first_step_s and (", first step after %.2f s"):format(result.first_step_s) or "",
      table.concat(parts, ", ")))
    if result.prefetch_ms then
      print(("    rows in files: %.0f %% of the looked-up rows in memory; with prefetches %.1f ms and %.0f %%"):format(
        100 * result.hit_rate, result.prefetch_ms, 100 * result.prefetch_hit_rate))
    end
    if out then out:write(json.encode(result), "\n") end
  end
end

local first = true
for sharding in options.sharding:gmatch "[%w_]+" do
  for ids in options.ids:gmatch "%d+" do
    run(sharding, tonumber(ids), first)
    first = false
    collectgarbage()
    collectgarbage()
  end
end
peri.dist.finish()
