-- pipeline.lua: the whole training step of a DLRM (tests/bench/dlrm.lua) under each schedule, beside the plain loop,
-- its computation alone and its exchanges alone. Cases take turns, a block of steps each; a block's time is that of its
-- slowest rank.
--
--   compute    the same step on a model of which this rank has all tables, while the other ranks do that too: as much
--              work, no exchange
--   exchange   the bytes of a step's ids, rows, gradients of rows, and averages, in bare exchanges one after the other
--   exposed    what a step takes longer than its computation; hidden share: what is missing of the exchange
--   over plain the median of the rounds' ratios to the plain loop in the same round; so with the share of reads that
--              --cache shows
--   ids        the exchange of ids: alone, and what of it a pipeline's operations `input_dist` and `wait_dist` show
--   bound      what a step takes at least where no row is stale: the longest of computation, exchange, and the chain of
--              what needs one another: rows, what is computed from them up to their gradients, gradients, and of
--              lookup and update the first and the last part (row_parts); all measured here, alone
--
-- With --cache the tables are in files: beside the plain loop on tables in memory and in files, schedules on tables in
-- files; what is hidden is missing of the time that the plain loop waits for files. What a cache costs besides (whose
-- row leaves, copies) nobody hides.
local argparse = require "argparse"
local json = require "dkjson"
local peri = require "perilune"
package.path = "tests/bench/?.lua;" .. package.path
local dlrm = require "dlrm"
local C, nn = peri.ffi.C, peri.nn
local median = peri.util.median

local parser = dlrm.options(argparse("tests/bench/pipeline.lua", "Time of a training step under each schedule."))
parser:option("--ids", "Ids of a bag (default: 20; 1 with --cache, so that reading does not take longer than "
  .. "computing).", nil, tonumber)
parser:option("--schedules", "Schedules.", "base,sparse_dist,sparse_dist_lite,fused_sparse_dist,wire_first,semi_sync")
parser:option("--cache", "Tables in files, this share of their rows in memory; 0: in memory.", 0, tonumber)
parser:option("--rounds", "Blocks of each case.", 7, tonumber)
parser:option("--steps", "Timed steps of a block.", 5, tonumber)
parser:option("--link", "What joins the machines, for the report.", "memory")
local options = parser:parse(arg)
options.ids = options.ids or options.cache > 0 and 1 or 20

local ROW_PARTS = tonumber((os.getenv "PERI_TUNE" or ""):match "row_parts=(%d)") or 8
local AHEAD = 3 -- steps before the timed ones of a block: a pipeline fills

local world = peri.dist.init()
local rank, ranks = world:rank(), world:size()
local nodes = ranks / math.max(1, world.local_size)
local out = options.out and rank == 0 and assert(io.open(options.out, "a"))

local function now() return tonumber(C.peri_time_ns()) / 1e6 end

local function report(line)
  if out then out:write(json.encode(line), "\n") end
end

--- The largest of the ranks' numbers.
local function slowest(x)
  local t = peri.tensor({ x }, "f64")
  world:all_reduce(t, "max"):wait()
  return t:item()
end

-- rows in files: as many are read in each block
local batches = dlrm.batches(options, rank, options.ids, options.cache > 0 and 128 or 3)
local k = 0
local function next_batch()
  k = k % #batches + 1
  return batches[k]
end

-- -- cases: function(steps) -> ms a step, and more --------------------------------------------------------------------

local function plain_step(model, optimizer, batch)
  optimizer:zero_grad()
  local loss = model(batch)
  model:backward(loss)
  optimizer:step()
end

local function plain(model, optimizer)
  return function(steps)
    local from
    for i = 1 - AHEAD, steps do
      if i == 1 then from = now() end
      peri.scope(plain_step, model, optimizer, next_batch())
    end
    return (now() - from) / steps
  end
end

--- Milliseconds a step in operations of that name.
local function time_in(measured, names, steps)
  local sum = 0
  for _, x in ipairs(measured) do
    if names[x.operation.name] then sum = sum + (x.to - x.from) * 1e-6 end
  end
  return sum / steps
end

local function under(schedule, model, optimizer)
  local pipeline = peri.pipeline.Pipeline { model = model, optimizer = optimizer, schedule = schedule }
  pipeline:detach()
  pipeline:measure(true)
  return function(steps)
    local from
    for i = 1 - AHEAD, steps do
      if i == 1 then from, pipeline.measured = now(), {} end
      dlrm.release(pipeline:progress(next_batch))
    end
    local ms = (now() - from) / steps
    local ids = time_in(pipeline.measured, { input_dist = true, wait_dist = true }, steps)
    pipeline:close()
    return ms, ids
  end
end

--- Only the ids of a batch, and no computation but what belongs to that.
local function ids_alone(model)
  local ebc = model.module.model.sparse_arch.embedding_bag_collection
  return function(steps)
    local from = now()
    for _ = 1, steps do
      peri.scope(function() ebc:input_dist(next_batch().sparse_features):wait() end)
    end
    return (now() - from) / steps
  end
end

--- Elements to (or from) each rank, `of` for each table that it has.
local function splits(of)
  local list = {}
  for r = 1, ranks do list[r] = 0 end
  for t = 1, options.tables do list[(t - 1) % ranks + 1] = list[(t - 1) % ranks + 1] + of end
  return list
end

local function total(list)
  local sum = 0
  for _, n in ipairs(list) do sum = sum + n end
  return sum
end

--- Milliseconds of the lookup, of what needs all rows up to their gradients, and of the update: f(steps) -> their sum,
--- and the time that `share` of lookup and update takes with the second. `model` has all tables here.
local function chain(model, share)
  local net = model.module.model
  local ebc = net.sparse_arch.embedding_bag_collection
  local function pass(batch)
    local dist = ebc:input_dist(batch.sparse_features):wait()
    local dense = peri.no_grad(function() return net.dense_arch:forward(batch.dense_features) end)
    local from = now()
    local values = ebc:compute_and_output_dist(dist):values()
    local looked_up = now()
    local leaf = values:detach():requires_grad()
    local sparse = leaf:reshape(-1, options.tables, options.dim)
    local logits = net.over_arch:forward(net.inter_arch:forward(dense, sparse)):reshape(-1)
    nn.functional.binary_cross_entropy_with_logits(logits, batch.labels):backward()
    local made = now()
    values:backward(leaf:grad())
    return looked_up - from, made - looked_up, now() - made
  end
  return function(steps)
    local lookup, over, update = 0, 0, 0
    for _ = 1, steps do
      local a, b, c = peri.scope(pass, next_batch())
      lookup, over, update = lookup + a / steps, over + b / steps, update + c / steps
    end
    return lookup + over + update, over + share * (lookup + update)
  end
end

--- The bytes of a step's exchanges as f32 numbers (ids and lengths have 4 bytes on the wire), one exchange after the
--- other; and of it only those of rows and their gradients.
local function bare(model)
  local dense = 0
  for _, p in ipairs(model:dense_parameters()) do dense = dense + p:numel() end
  local mine = splits(1)[rank + 1]
  local function exchange(of)
    local send, recv = splits(of), {}
    for r = 1, ranks do recv[r] = mine * of end
    return { peri.ones { total(send) }, send, recv }, { peri.ones { total(recv) }, recv, send }
  end
  local lengths, ids = exchange(options.batch), exchange(options.batch * options.ids)
  local rows, gradients = exchange(options.batch * options.dim)
  local sums = peri.ones { dense }
  local function timed(list, sum)
    return function(steps)
      local from = now()
      for _ = 1, steps do
        peri.scope(function()
          for _, x in ipairs(list) do world:all_to_all_v(x[1], x[2], x[3]):wait() end
          if sum then world:all_reduce(sum):wait() end
        end)
      end
      return (now() - from) / steps
    end
  end
  return timed({ lengths, ids, gradients, rows }, sums), timed { gradients, rows }
end

-- -- the engine by itself ---------------------------------------------------------------------------------------------

local Idle = peri.nn.Module:extend "Idle"
function Idle:init(group) self.loss, self.dense_env = peri.ones { 1 }, group and { pg = group } end
function Idle:forward() return self.loss end
function Idle:backward() end -- luacheck: ignore 212

--- Microseconds of a step whose operations do nothing: alone, and with the ranks' vote.
local function engine(vote)
  local idle, model = { zero_grad = function() end, step = function() end }, Idle(vote and world or nil)
  local pipeline = peri.pipeline.Pipeline { model = model, optimizer = idle,
    schedule = peri.pipeline.schedules.sparse_dist, vote = vote }
  local batch, best, steps = {}, math.huge, 5000
  local function source() return batch end
  for _ = 1, 7 do
    local from = now()
    for _ = 1, steps do assert(pipeline:progress(source)) end
    best = math.min(best, (now() - from) / steps * 1e3)
  end
  pipeline:close()
  return slowest(best)
end

-- -- turns ------------------------------------------------------------------------------------------------------------

local PARTS_ROUNDS = 7 -- in which what is no whole step takes part

--- Run cases { { name, f, part = it is no whole step }, ... } in turns, each round beginning with another. Returns by
--- name the medians of what they return first and second, and the least; waits: all that they return second; over: the
--- median of the rounds' ratios to the plain loop in the same round.
local function in_turns(cases)
  local times, seconds = {}, {}
  for _, case in ipairs(cases) do times[case[1]], seconds[case[1]] = {}, {} end
  for round = 0, options.rounds do
    for i = 1, #cases do
      local case = cases[(i + round) % #cases + 1]
      if not case.part or round <= PARTS_ROUNDS then
        world:barrier():wait()
        local ms, more = case[2](round == 0 and 1 or options.steps)
        ms, more = slowest(ms), slowest(more or 0)
        if round > 0 then times[case[1]][round], seconds[case[1]][round] = ms, more end
      end
    end
  end
  local result = {}
  for _, case in ipairs(cases) do
    local ms, best = median(times[case[1]])
    local over = {}
    for round, t in ipairs(case.part and {} or times[case[1]]) do over[round] = t / times.plain[round] end
    result[case[1]] = { ms = ms, best = best, more = (median(seconds[case[1]])), waits = seconds[case[1]],
      over = over[1] and (median(over)) }
  end
  return result
end

local function names_of_schedules()
  local list = {}
  for name in options.schedules:gmatch "[^,]+" do list[#list + 1] = name end
  return list
end

local function line_of(name, r)
  return { schedule = name, ranks = ranks, nodes = nodes, link = options.link, ids = options.ids, batch = options.batch,
    threads = C.peri_threads(), median_ms = r.ms, best_ms = r.best, cache = options.cache }
end

local function say(...)
  if rank == 0 then print((...):format(select(2, ...))) end
end

local function in_memory()
  local model, optimizer = dlrm.model(options, world, "table_wise", 0)
  local own = world:new_group({ rank }, "own")
  local alone, alone_optimizer = dlrm.model(options, own, "table_wise", 0)
  local exchanges, both_rows = bare(model)
  local share = nodes > 1 and 1 / ROW_PARTS or 1 -- of lookup and update that nothing can hide
  local cases = { { "compute", plain(alone, alone_optimizer) }, { "ids here", ids_alone(alone) },
    { "ids", ids_alone(model) }, { "exchange", exchanges }, { "rows", both_rows }, { "chain", chain(alone, share) } }
  for _, case in ipairs(cases) do case.part = true end
  cases[#cases + 1] = { "plain", plain(model, optimizer) }
  local schedules = names_of_schedules()
  for _, name in ipairs(schedules) do
    cases[#cases + 1] = { name, under(peri.pipeline.schedules.load(name), model, optimizer) }
  end
  local r = in_turns(cases)
  local compute, exchange, ids = r.compute.ms, r.exchange.ms, r.ids.ms - r["ids here"].ms
  say("%d ranks, %d machines, %s, %d ids: computation %.1f ms (best %.1f), exchange %.1f (%.1f), of it ids %.2f (%.2f "
    .. "to prepare)", ranks, nodes, options.link, options.ids, compute, r.compute.best, exchange, r.exchange.best, ids,
    r["ids here"].ms)
  local longer = math.max(compute, exchange)
  local bound = math.max(longer, r.rows.ms + r.chain.more)
  say("  without stale rows at least %.1f ms, %.2f times the longer: rows and gradients %.1f, what is computed "
    .. "between, with %.0f %% of lookup and update, %.1f", bound, bound / longer, r.rows.ms, 100 * share, r.chain.more)
  table.insert(schedules, 1, "plain")
  for _, name in ipairs(schedules) do
    local x, line = r[name], line_of(name, r[name])
    line.bound_ms, line.over_bound = bound, x.ms / bound
    line.compute_ms, line.exchange_ms, line.ids_ms = compute, exchange, ids
    line.exposed_ms = x.ms - compute
    line.hidden_share = 1 - line.exposed_ms / exchange
    line.ratio, line.over_plain, line.best_over_plain = x.ms / longer, x.over, x.best / r.plain.best
    if x.more > 0 then line.ids_hidden_share = 1 - (x.more - r["ids here"].ms) / ids end
    report(line)
    say("  %-17s %7.1f ms (best %.1f), exposed %.1f, hidden %3.0f %%, %.2f times the longer, %.2f the bound, %.3f of "
      .. "plain (best %.3f)%s", name, x.ms, x.best, line.exposed_ms, 100 * line.hidden_share, line.ratio,
      line.over_bound, line.over_plain, line.best_over_plain, line.ids_hidden_share
        and (", ids hidden %.0f %%"):format(100 * line.ids_hidden_share) or "")
  end
end

--- A case that returns second how long calls have waited for files, in ms a step.
local function waiting(model, f)
  local function waited()
    local sum = 0
    for _, s in ipairs(model.sharded[1]:local_shards()) do
      sum = sum + (s.cached and s.cache_statistics().wait_ns or 0)
    end
    return sum * 1e-6
  end
  return function(steps)
    local before = waited()
    local ms = f(steps)
    return ms, (waited() - before) / (steps + AHEAD)
  end
end

local function in_files()
  local memory, memory_optimizer = dlrm.model(options, world, "table_wise", 0)
  local model, optimizer = dlrm.model(options, world, "table_wise", options.cache)
  local cases = { { "memory", plain(memory, memory_optimizer) }, { "plain", plain(model, optimizer) } }
  local schedules = names_of_schedules()
  for _, name in ipairs(schedules) do
    cases[#cases + 1] = { name, under(peri.pipeline.schedules.load(name), model, optimizer) }
  end
  for i = 2, #cases do cases[i][2] = waiting(model, cases[i][2]) end
  local r = in_turns(cases)
  local function hidden(name) -- a round's share
    local list = {}
    for i, ms in ipairs(r[name].waits) do list[i] = 1 - ms / r.plain.waits[i] end
    return (median(list))
  end
  say("%d ranks, %d ids, %.0f %% of the rows in memory: %.1f ms; all: %.1f ms (best %.1f)", ranks, options.ids,
    100 * options.cache, r.plain.ms, r.memory.ms, r.memory.best)
  table.insert(schedules, 1, "plain")
  for _, name in ipairs(schedules) do
    local x, line = r[name], line_of(name, r[name])
    line.memory_ms, line.reads_ms, line.exposed_ms, line.waits_ms = r.memory.ms, r.plain.more, x.ms - r.memory.ms,
      x.more
    line.hidden_share, line.over_plain = hidden(name), x.over
    report(line)
    say("  %-20s %7.1f ms (best %.1f), %.1f more than in memory, %.1f of it waiting for files: %3.0f %% hidden; %.3f "
      .. "times the plain loop", name, x.ms, x.best, line.exposed_ms, x.more, 100 * line.hidden_share, line.over_plain)
  end
end

local alone, voting = engine(false), ranks > 1 and engine(true) or nil
say("the engine: %.1f us a step%s", alone, voting and (", %.1f with the ranks' vote"):format(voting) or "")
report { schedule = "sparse_dist", ranks = ranks, nodes = nodes, link = options.link, engine_us = alone,
  engine_and_vote_us = voting }
if options.cache > 0 then in_files() else in_memory() end
if out then out:close() end
peri.dist.finish()
