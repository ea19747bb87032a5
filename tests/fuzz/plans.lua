-- plans.lua: legal plans drawn at random: worlds of 1 to 8 ranks on nodes that may differ in size, tables of all
-- shapes, every sharding type in any mixture, uneven and empty shards. On each the law is checked: outputs and, after
-- two steps, weights and optimizer states are those of the unsharded collection on the batches of all ranks; with exact
-- sums, bit for bit. Half of the plans are saved as a checkpoint after the first step, half of them behind the next
-- one, and go on under another plan, on another number of ranks. Of these half take up to two more steps before, and
-- save an increment after each; they save one more under the other plan, and are loaded, or followed one by one. Of
-- those that are not saved half are resharded, on the same ranks.
--
--   luajit tests/fuzz/plans.lua [PLANS [SEED]]     as `make test` runs it; a failure prints the plan and how to repeat
--                                                  it
--   luajit tests/fuzz/plans.lua SECONDSs [SEED]    as `make fuzz` runs it
--   luajit tests/fuzz/plans.lua once SEED          one plan of it, printed first
-- inputs: 150
-- takes: 8 s
local here, build = io.popen("pwd"):read "*l", os.getenv "PERI_BUILD" or "build"
package.path = ("%s/%s/lua/?.lua;%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;%s"):format(here, build, here, here, here,
  package.path)
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local drawing = require "spec.support.drawing"
local plan = peri.plan
local generator, pick = drawing.generator, drawing.pick

local STEPS = 2
local kept = drawing.folder "plans" -- the checkpoint
local map = peri.util.map

-- -- drawing ----------------------------------------------------------------------------------------------------------

--- The number of the world that makes a step.
local function world_of(case, step) return case.worlds[2] and step > 1 + case.increments and 2 or 1 end

--- Some of a list (at least one), in any order.
local function some(below, list)
  local left, result = peri.util.copy(list), {}
  for i = 1, below(#list) + 1 do result[i] = table.remove(left, below(#left) + 1) end
  return result
end

--- n parts of a total, multiples of `step` and each at least `least`.
local function parts(below, total, n, step, least)
  local sizes, left = {}, total - n * least
  for i = 1, n do
    local take = i == n and left or below(math.floor(left / step) + 1) * step
    sizes[i], left = least + take, left - take
  end
  return sizes
end

--- A number of even blocks that `cols` columns can have, at most `most`.
local function blocks_of(below, cols, most)
  local allowed = { 1 }
  for k = 2, math.min(most, cols / 4) do
    if cols % k == 0 and cols / k % 4 == 0 then allowed[#allowed + 1] = k end
  end
  return pick(below, allowed)
end

local function several(below, n, from)
  local list = {}
  for i = 1, n do list[i] = pick(below, from) end
  return list
end

--- Column blocks over `ranks`, each of which may have several: even ones, or ones of their own sizes.
local function columns(below, t, ranks)
  if below(2) == 0 then return { ranks = several(below, blocks_of(below, t.cols, 4), ranks) } end
  local n = below(math.min(4, t.cols / 4)) + 1
  return { ranks = several(below, n, ranks), sizes = parts(below, t.cols, n, 4, 4) }
end

--- Rows over some of `ranks`: evenly, or in parts, of which some have none.
local function rows(below, t, ranks)
  local chosen = some(below, ranks)
  return { ranks = chosen, sizes = below(2) == 0 and parts(below, t.rows, #chosen, 1, 0) or nil }
end

--- By type: an entry of a plan for table t in world w. Where it cuts columns, it counts them in t.blocks.
local draw_entry = {}
function draw_entry.table_wise(below, _, w) return plan.table_wise(below(w.size)) end
function draw_entry.data_parallel() return plan.data_parallel() end
function draw_entry.row_wise(below, t, w)
  if below(3) == 0 then return plan.row_wise() end
  return plan.row_wise(rows(below, t, w.ranks))
end
function draw_entry.column_wise(below, t, w)
  if below(3) == 0 then return plan.column_wise() end
  return plan.column_wise(columns(below, t, w.ranks))
end
function draw_entry.table_row_wise(below, t, w)
  if below(3) == 0 then return plan.table_row_wise(below(#w.nodes)) end
  return plan.table_row_wise(nil, rows(below, t, pick(below, w.nodes)))
end
function draw_entry.table_column_wise(below, t, w)
  local node = below(#w.nodes)
  local blocks = #w.nodes[node + 1]
  if below(2) == 0 and (blocks == 1 or t.cols % (4 * blocks) == 0) then return plan.table_column_wise(node) end
  return plan.table_column_wise(nil, columns(below, t, pick(below, w.nodes)))
end
function draw_entry.grid_shard(below, t, w)
  local n = blocks_of(below, t.cols, 4)
  local hosts = {}
  for i = 1, n do hosts[i] = below(#w.nodes) end
  if below(5) == 0 and t.cols % 4 == 0 then return plan.grid_shard() end
  if below(2) == 0 then return plan.grid_shard(hosts) end
  local ranks, sizes = {}, {}
  for i = 1, n do
    local chosen = hosts[i] == hosts[i - 1] and peri.util.copy(w.nodes[hosts[i] + 1])
      or some(below, w.nodes[hosts[i] + 1])
    local again = {} -- the block before on this node must have ended: it begins with a rank that this one has
    for _, r in ipairs(chosen) do
      if r == ranks[#ranks] then table.insert(again, 1, r) else again[#again + 1] = r end
    end
    local own = parts(below, t.rows, #again, 1, 0)
    for k, r in ipairs(again) do
      ranks[#ranks + 1], sizes[#sizes + 1] = r, own[k]
    end
  end
  return plan.grid_shard(nil, { ranks = ranks, sizes = sizes })
end

local kinds = peri.util.keys(draw_entry)
--- eps is large: gradients that nearly cancel would show their rounding divided by it.
local optimizers = {
  { optimizer = "sgd" }, { optimizer = "adagrad", eps = 0.1 },
  { optimizer = "rowwise_adagrad", eps = 0.1, by_row = true }, { optimizer = "adam", eps = 0.1 },
  { optimizer = "partial_rowwise_adam", eps = 0.1, by_row = true },
}

--- A world: { size =, local_size =, ranks =, nodes = lists of ranks }.
local function draw_world(below)
  local w = { size = pick(below, { 1, 2, 2, 3, 4, 5, 6, 8 }), ranks = {}, nodes = {} }
  w.local_size = below(w.size) + 1
  for r = 0, w.size - 1 do
    local node = math.floor(r / w.local_size) + 1
    w.ranks[r + 1], w.nodes[node] = r, w.nodes[node] or {}
    table.insert(w.nodes[node], r)
  end
  return w
end

local function draw_tables(below, case)
  local cols = 4 * (below(6) + 1)
  for i = 1, below(4) + 1 do
    local t = { name = "t" .. i, rows = below(below(4) == 0 and 4 or 40) + 1, cols = case.sequence and cols
      or 4 * (below(6) + 1), features = some(below, case.features), pooling = pick(below, { "SUM", "MEAN" }) }
    t.shardings = map(case.worlds, function(w) return draw_entry[pick(below, kinds)](below, t, w) end)
    case.tables[i] = t
    for _, f in ipairs(t.features) do case.limit[f] = math.min(case.limit[f] or t.rows, t.rows) end
  end
end

--- The batch of a rank: by key its bags (lists of ids, and of weights), and the bag of each sample.
local function draw_batch(below, case)
  local batch = { samples = below(4), bags = {}, inverse = {} }
  for k, f in ipairs(case.features) do
    local bags, inverse, n = {}, {}, batch.samples
    if case.variable then n = batch.samples > 0 and below(batch.samples) + 1 or 0 end
    for b = 1, n do
      bags[b] = { ids = {}, weights = {} }
      for i = 1, below(5) do
        bags[b].ids[i] = below(9) == 0 and -1 or below(case.limit[f] or 1)
        bags[b].weights[i] = (below(200) - 50) / 100
      end
    end
    for s = 1, batch.samples do inverse[s] = case.variable and below(n) or s - 1 end
    batch.bags[k], batch.inverse[k] = bags, inverse
  end
  return batch
end

--- All of a case by its seed.
local function draw(seed)
  local below = generator(seed)
  local case = { tables = {}, limit = {}, worlds = { draw_world(below) } }
  if below(2) == 0 then case.worlds[2] = draw_world(below) end
  case.increments = case.worlds[2] and below(2) == 0 and 1 + below(2) or 0
  case.sequence, case.exact, case.device = below(3) == 0, below(2) == 0, pick(below, { "cpu", "opaque" })
  case.weighted, case.variable = not case.sequence and below(3) == 0, below(4) == 0
  case.features = {}
  for k = 1, below(4) + 1 do case.features[k] = "f" .. k end
  draw_tables(below, case)
  local replicas, blocks = false, false
  for _, t in ipairs(case.tables) do
    for i, sharding in ipairs(t.shardings) do
      local w = case.worlds[i]
      replicas = replicas or sharding.sharding_type == "data_parallel"
      blocks = blocks or #sharding:shards({ name = t.name, num_embeddings = t.rows, embedding_dim = t.cols },
        { world_size = w.size, local_size = w.local_size }) > 1 and not sharding.sharding_type:find "row"
    end
  end
  case.params = peri.util.copy(pick(below, optimizers))
  -- with blocks there are several states for a row
  if case.params.by_row and blocks then case.params = peri.util.copy(optimizers[4]) end
  case.params.by_row, case.params.learning_rate, case.params.exact = nil, 0.1, case.exact
  case.division = replicas or below(2) == 0 -- the gradients of replicas are means in any case
  case.bits = case.exact
  case.data_type = case.bits and pick(below, { "FP32", "FP16", "BF16" }) or "FP32"
  if #case.worlds == 1 and below(2) == 0 then
    case.resharded = map(case.tables, function(t)
      local entry = draw_entry[pick(below, kinds)](below, t, case.worlds[1])
      local by_row = case.params.optimizer:find "rowwise"
      local block = by_row and entry.sharding_type:find "column" or entry.sharding_type == "grid_shard"
      local replica = entry.sharding_type == "data_parallel" and not case.division
      return (block and by_row or replica) and plan.row_wise() or entry
    end)
  end
  case.slopes, case.steps = case.weighted and below(2) == 0, {} -- slopes: the weights want a gradient
  for step = 1, STEPS + case.increments do
    case.steps[step] = map(case.worlds[world_of(case, step)].ranks, function() return draw_batch(below, case) end)
  end
  case.async = case.worlds[2] and below(2) == 0
  return case
end

local function text_of(case)
  local worlds = map(case.worlds, function(w) return ("%d ranks, %d per node"):format(w.size, w.local_size) end)
  local lines = { ("%s, %d increments, %s, %s, %s%s%s%s, gradients %s"):format(table.concat(worlds, ", then "),
    case.increments, case.device,
    case.sequence and "sequences" or "bags", case.params.optimizer, case.exact and ", exact" or "",
    case.slopes and ", weights with gradient" or case.weighted and ", weighted" or "",
    case.variable and ", variable batch" or "", case.division and "divided" or "added up") }
  if case.async then lines[1] = lines[1] .. ", saved behind a step" end
  for _, t in ipairs(case.tables) do
    lines[#lines + 1] = ("  %s: %d x %d %s of %s, %s: %s"):format(t.name, t.rows, t.cols, case.data_type,
      table.concat(t.features, ", "), t.pooling, table.concat(map(t.shardings, tostring), ", then "))
  end
  for i, entry in ipairs(case.resharded or {}) do
    lines[#lines + 1] = ("  resharded: %s: %s"):format(case.tables[i].name, tostring(entry))
  end
  return table.concat(lines, "\n")
end

-- -- running ----------------------------------------------------------------------------------------------------------

local function tables_of(case)
  return map(case.tables, function(t)
    return (case.sequence and peri.EmbeddingConfig or peri.EmbeddingBagConfig) { name = t.name, num_embeddings = t.rows,
      embedding_dim = t.cols, feature_names = t.features, pooling = not case.sequence and t.pooling or nil,
      data_type = case.data_type }
  end)
end

--- The batches of some ranks, one after the other.
local function features_of(case, batches)
  local values, weights, lengths, strides, inverse, ids, bags = {}, {}, {}, {}, {}, 0, 0
  local samples = 0
  for _, batch in ipairs(batches) do samples = samples + batch.samples end
  for k in ipairs(case.features) do
    local first, before = bags, bags
    inverse[k] = {}
    for _, batch in ipairs(batches) do
      for _, bag in ipairs(batch.bags[k]) do
        bags = bags + 1
        lengths[bags] = #bag.ids
        for i = 1, #bag.ids do
          ids = ids + 1
          values[ids], weights[ids] = bag.ids[i], bag.weights[i]
        end
      end
      for _, b in ipairs(batch.inverse[k]) do table.insert(inverse[k], before - first + b) end
      before = bags
    end
    strides[k] = { bags - first }
  end
  local leaf = case.weighted and peri.tensor(weights, "f32", case.device, { ids }) or nil
  if leaf and case.slopes then leaf:requires_grad() end
  return peri.KeyedJaggedTensor {
    keys = case.features, values = peri.tensor(values, "i64", case.device, { ids }),
    lengths = peri.tensor(lengths, "i32", case.device, { bags }),
    weights = leaf, stride = not case.variable and samples or nil,
    stride_per_key_per_rank = case.variable and strides or nil,
    inverse_indices = case.variable and not case.sequence and { case.features, peri.tensor(inverse, "i64", case.device,
      { #case.features, samples }) } or nil,
  }, samples, ids, case.slopes and leaf
end

--- Gradients of rows by the rank and what they belong to, the same wherever they are made, divided as f32.
local function gradient_of(step, rank, what, shape, divisor)
  local n, x = 1, step * 7919 + rank * 104729 + what * 31
  for _, d in ipairs(shape) do n = n * d end
  local list = {}
  for i = 1, n do
    x = (x * 16807 + 1) % 2147483647
    list[i] = (x % 2000 - 1000) / 512 / divisor
  end
  return list
end

--- Rows [from, from + n) of a flat list.
local function cut(list, from, n, cols)
  local result = {}
  for i = 1, n * cols do result[i] = list[from * cols + i] end
  return result
end

--- The gradient of each batch's weights behind its output: that of its own rank's loss, so not divided.
local function add_weights(case, batches, weights, divisor, outputs)
  local all, at = weights:grad():to_list(), 0
  for i in ipairs(batches) do outputs[i][2] = {} end
  for k in ipairs(case.features) do
    for i, batch in ipairs(batches) do
      for _, bag in ipairs(batch.bags[k]) do
        for _ = 1, #bag.ids do
          at = at + 1
          table.insert(outputs[i][2], all[at] * divisor)
        end
      end
    end
  end
end

--- Forward and backward of `batches` (of `ranks`) with the gradients of each; returns by rank its outputs, a list of
--- flat lists.
local function step_of(case, module, step, batches, ranks, divisor)
  local features, _, _, weights = features_of(case, batches)
  local outputs = map(batches, function() return {} end)
  if not case.sequence then
    local kt = module:forward(features)
    local values = kt:values()
    local all, cols, grad, first = values:to_list(), values:size(2), {}, 0
    for i, batch in ipairs(batches) do
      outputs[i][1] = cut(all, first, batch.samples, cols)
      for _, g in ipairs(gradient_of(step, ranks[i], 0, { batch.samples, cols }, divisor)) do grad[#grad + 1] = g end
      first = first + batch.samples
    end
    values:backward(peri.tensor(grad, "f32", case.device, values:shape()))
    if weights then add_weights(case, batches, weights, divisor, outputs) end
    return outputs
  end
  local result, loss = module:forward(features), nil
  for what, name in ipairs(module:embedding_names()) do
    local values, f = result[name]:values(), name:match "^[^@]*"
    local all, cols, grad, first = values:to_list(), values:size(2), {}, 0
    local k = peri.util.index_of(case.features)[f]
    for i, batch in ipairs(batches) do
      local n = 0
      for _, bag in ipairs(batch.bags[k]) do n = n + #bag.ids end
      outputs[i][what] = cut(all, first, n, cols)
      for _, g in ipairs(gradient_of(step, ranks[i], what, { n, cols }, divisor)) do grad[#grad + 1] = g end
      first = first + n
    end
    local term = (values * peri.tensor(grad, "f32", case.device, values:shape())):sum()
    loss = loss and loss + term or term
  end
  loss:backward()
  return outputs
end

--- All steps without ranks: the outputs by step and rank, and the collection.
local function unsharded(case)
  local module = peri[case.sequence and "EmbeddingCollection" or "EmbeddingBagCollection"] {
    tables = tables_of(case), fused_params = case.params, seed = 5, device = case.device,
    is_weighted = not case.sequence and case.weighted or nil,
  }
  local outputs = {}
  for step = 1, STEPS + case.increments do
    local w = case.worlds[world_of(case, step)]
    outputs[step] = step_of(case, module, step, case.steps[step], w.ranks, case.division and w.size or 1)
  end
  return outputs, module
end

local function compare(what, want, got, exact)
  if #want ~= #got then error(("%s: %d numbers, wanted %d"):format(what, #got, #want), 0) end
  for i = 1, #want do
    local a, b = want[i], got[i]
    if not (a == b or not exact and math.abs(a - b) <= 5e-6 + 5e-5 * math.abs(a)) then
      error(("%s: number %d is %.9g, wanted %.9g%s"):format(what, i, b, a, exact and ", bit for bit" or ""), 0)
    end
  end
end

--- A shard's part of a state.
local function check_shard(case, s, whole)
  for _, name in ipairs(s.names()) do
    local w = whole:table_state(s.table, name)
    w = w:slice(1, s.row_offset, s.row_offset + s.rows)
    if w:dim() == 2 then w = w:slice(2, s.col_offset, s.col_offset + s.cols) end
    compare(("table %s, %s"):format(s.table, name), w:to_list(), s.state(name):to_list(), case.bits)
  end
end

local powers = { true, true, false, true, [8] = true }

--- A sharded collection under the plan of one of the worlds.
local function sharded(case, i, world)
  local entries = {}
  for _, t in ipairs(case.tables) do entries[t.name] = t.shardings[i] end
  return peri.shard[case.sequence and "ShardedEmbeddingCollection"
    or "ShardedEmbeddingBagCollection"] { tables = tables_of(case), plan = entries, group = world, device = case.device,
    fused_params = case.params, seed = 5, gradient_division = case.division, is_weighted = not case.sequence
      and case.weighted or nil }
end

--- The module goes on under another plan, on the same ranks.
local function reshard(case, module, world)
  local entries = {}
  for k, t in ipairs(case.tables) do entries[t.name] = case.resharded[k] end
  local err = require("perilune.model.reshard").modules { modules = { module },
    plans = { plan.EmbeddingModuleShardingPlan(entries) }, keepers = {}, group = world, shared = world,
    folder = kept:match "^(.*)/" }
  if err then error(err, 0) end
end

--- Steps [from, last] in world i, on whose ranks begin(module) comes before, finish(module) afterwards, and
--- after(module, world, step), if it is given, behind each step.
local function train(case, i, want, from, last, begin, finish, after)
  local w = case.worlds[i]
  sim.run(w.size, function(rank, world)
    local module = sharded(case, i, world)
    begin(module, world)
    for step = from, last do
      if step == 2 and case.resharded then reshard(case, module, world) end
      local got = step_of(case, module, step, { case.steps[step][rank + 1] }, { rank }, 1)[1]
      for what, list in ipairs(want[step][rank + 1]) do
        -- The second output of bags are the gradients of weights: here divided before they are multiplied by rows.
        local bits = case.bits and (case.sequence or what == 1 or not case.division or powers[w.size])
        compare(("rank %d, step %d, output %d"):format(rank, step, what), list, got[what], bits)
      end
      if after then after(module, world, step) end
    end
    finish(module, world)
  end, { device = case.device, local_size = w.local_size })
end

local function nothing() end
local function check(case)
  local want, whole = unsharded(case)
  local function states(module)
    for _, s in ipairs(module:local_shards()) do check_shard(case, s, whole) end
  end
  if not case.worlds[2] then return train(case, 1, want, 1, STEPS, nothing, states) end
  local function path_of(n) return n == 0 and kept or ("%s-%d"):format(kept, n) end
  local last = case.increments
  local function save(module, world, n, async)
    return peri.checkpoint.save(path_of(n), { model = module },
      { group = world, replace = n == 0, values = { step = 1 + n }, increments = n == 0 and last > 0,
        increment_of = n > 0 and path_of(n - 1) or nil, async = async })
  end
  train(case, 1, want, 1, 1 + last, nothing, nothing, function(module, world, step)
    local pending = save(module, world, step - 1, case.async)
    if not case.async or step <= last then return end
    step_of(case, module, 1, { case.steps[1][world:rank() + 1] }, { world:rank() }, 1) -- which no checkpoint has
    pending:done()
    pending:wait()
  end)
  local function load(module, world, n)
    local values = peri.checkpoint.load(path_of(n), { model = module }, { group = world, increments = last > 0 })
    if values.step ~= 1 + n then error("the values that were saved are others", 0) end
  end
  local function follow(module, world, n) -- one checkpoint after the other
    local follower = peri.checkpoint.follow(kept .. "-seen", { model = module }, { group = world })
    for i = 0, n do
      if world:rank() == 0 then os.execute(("mkdir -p %s-seen; cp -r %s %s-seen"):format(kept, path_of(i), kept)) end
      world:barrier():wait()
      local path, why = follower:poll()
      if not path then error(("checkpoint %d was not followed: %s"):format(i, tostring(why)), 0) end
    end
    follower:close()
  end
  train(case, 2, want, 2 + last, STEPS + last, function(module, world) load(module, world, last) end,
    function(module, world)
    states(module)
    if last == 0 then return end
    save(module, world, last + 1)
    local again = sharded(case, 2, world)
    if case.async and last > 1 then follow(again, world, last + 1) else load(again, world, last + 1) end
    states(again)
  end)
  if last > 1 and case.async then os.execute(("rm -rf %s-seen"):format(kept)) end
  for n = last > 0 and last + 1 or 0, 0, -1 do peri.ffi.check(peri.ffi.C.peri_checkpoint_remove(path_of(n))) end
end

-- -- the runs ---------------------------------------------------------------------------------------------------------

local once = arg[1] == "once"
local length, seed = once and "1" or arg[1] or "1000", tonumber(arg[2]) or 1
local seconds = tonumber(length:match "^([%d.]+)s$")
local most, begin, n = not seconds and assert(tonumber(length), "a number of plans, or seconds as in 30s"), os.time(), 0
repeat
  -- Seeds of a run are far apart, so that runs of neighbouring seeds share no plan.
  local own = once and seed or seed * 1000003 + n
  local drawn, case = pcall(draw, own)
  if once and drawn then print(text_of(case)) end
  local ok, err = drawn, case
  if drawn then ok, err = pcall(check, case) end
  if not ok then
    print(drawn and text_of(case) or "no plan was drawn")
    print("FAILED: " .. tostring(type(err) == "table" and err.message or err))
    print(("repeat with: luajit tests/fuzz/plans.lua once %d"):format(own))
    print("the checkpoint stays as " .. kept)
    os.exit(1)
  end
  n = n + 1
until seconds and os.time() - begin >= seconds or n == most
print(("%d plans, seed %d"):format(n, seed))
