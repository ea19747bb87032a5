-- What a parity spec needs: batches of all ranks for a few steps, drawn alike on every rank; the unsharded tables on
-- the concatenated batch in doubles (tbe_reference.lua); and the comparison of a module's shards with them.
--
-- `case` says what is sharded: configs = a list of { name, rows, cols, features, pooling }; features = their names;
-- limit = by feature, the ids that all its tables have; keys = the features in the order of the inputs.
local peri = require "perilune"
local golden = require "spec.support.golden"

local M = {}

--- Ranks of column blocks: as many blocks of 4 columns or more as there are ranks, round robin.
function M.ranks_of_blocks(t, n)
  local count, ranks = 1, {}
  for k = 1, t.cols / 4 do
    if t.cols % k == 0 and t.cols / k % 4 == 0 and k <= n + 1 then count = k end
  end
  for k = 1, count do ranks[k] = (k * 2 + t.rows) % n end
  return ranks
end

--- A generator of whole numbers below n, the same on every rank.
local function generator(seed)
  local x = seed
  return function(n)
    x = (x * 16807) % 2147483647
    return x % n
  end
end

--- The batches of all ranks for one step: by rank, { size, ids by feature = list of bags, weights likewise, grad by
--- output row }.
function M.draw(case, step, n, columns, seed)
  local below, ranks = generator(1000 * step + 17 * n + seed), {}
  for r = 1, n do
    local batch = { size = (r * 2 + step) % 4, ids = {}, weights = {}, grad = {} }
    for _, f in ipairs(case.features) do
      batch.ids[f], batch.weights[f] = {}, {}
      for b = 1, batch.size do
        local ids, weights = {}, {}
        for i = 1, below(5) do
          ids[i] = below(11) == 0 and -1 or below(case.limit[f])
          weights[i] = (below(200) - 50) / 100
        end
        batch.ids[f][b], batch.weights[f][b] = ids, weights
      end
    end
    for i = 1, batch.size * columns do batch.grad[i] = (below(2000) - 1000) / 500 end
    ranks[r] = batch
  end
  return ranks
end

--- Columns of the output.
function M.columns_of(case)
  local n = 0
  for _, t in ipairs(case.configs) do n = n + t.cols * #t.features end
  return n
end

--- Reference tables: each table, or (split) each of its column blocks.
function M.reference_tables(case, weights, n, split)
  local list = {}
  for i, t in ipairs(case.configs) do
    local count = split and #M.ranks_of_blocks(t, n) or 1
    local cols = t.cols / count
    for k = 0, count - 1 do
      local w = {}
      for row = 0, t.rows - 1 do
        for c = 1, cols do w[#w + 1] = weights[t.name][row * t.cols + k * cols + c] end
      end
      list[#list + 1] = { rows = t.rows, cols = cols, weight = w, pooling = t.pooling, config = i, column = k * cols }
    end
  end
  return list
end

--- The global batch as one stream for tbe_reference: ids by feature, all ranks' bags after each other; output [all
--- rows, columns].
function M.stream(case, ranks, tables, columns, weighted)
  local input = { ids = {}, offsets = { 0 }, weights = weighted and {} or nil, blocks = {} }
  local first, rows = {}, 0
  for _, batch in ipairs(ranks) do rows = rows + batch.size end
  for _, f in ipairs(case.features) do
    first[f] = #input.offsets - 1
    for _, batch in ipairs(ranks) do
      for b = 1, batch.size do
        for i, id in ipairs(batch.ids[f][b]) do
          input.ids[#input.ids + 1] = id
          if weighted then input.weights[#input.weights + 1] = batch.weights[f][b][i] end
        end
        input.offsets[#input.offsets + 1] = #input.ids
      end
    end
  end
  local column = 0
  for i, t in ipairs(case.configs) do
    for _, f in ipairs(t.features) do
      for k, x in ipairs(tables) do
        if x.config == i then
          input.blocks[#input.blocks + 1] = { table = k, first_bag = first[f], bags = rows, out_offset = column
            + x.column, out_stride = columns }
        end
      end
      column = column + t.cols
    end
  end
  return input, rows
end

--- The ids of one rank. (Counters instead of #list: compiled appends to lists of changing length were once one too
--- many, in one of some thirty runs of a spec under Debian's LuaJIT.)
function M.kjt_of(case, batch, weighted, device)
  local values, weights, lengths, n_ids, n_bags = {}, {}, {}, 0, 0
  for _, f in ipairs(case.keys) do
    for b = 1, batch.size do
      local ids, own = batch.ids[f][b], batch.weights[f][b]
      n_bags = n_bags + 1
      lengths[n_bags] = #ids
      for i = 1, #ids do
        n_ids = n_ids + 1
        values[n_ids], weights[n_ids] = ids[i], own[i]
      end
    end
  end
  return peri.KeyedJaggedTensor {
    keys = case.keys, values = values, lengths = lengths, weights = weighted and weights or nil, stride = batch.size,
    device = device,
  }
end

--- Start values do not depend on the plan: they are those of a table batch that holds the whole tables.
function M.start_weights(case)
  local tables, weights = {}, {}
  for i, t in ipairs(case.configs) do tables[i] = { name = t.name, rows = t.rows, cols = t.cols } end
  local tbe = peri.embed.tbe.new { tables = tables, fused_params = { optimizer = "none" }, seed = 5, device = "cpu" }
  for i, t in ipairs(case.configs) do weights[t.name] = tbe:state(i, "weight"):to_list() end
  return weights
end

--- Compare this rank's shards with the reference tables `parts`, whose weights are in `ref`, at a step.
function M.check_shards(case, module, ref, parts, split, step)
  for _, s in ipairs(module:local_shards()) do
    local x, list
    for k, p in ipairs(parts) do
      if case.configs[p.config].name == s.table and (not split or p.column == s.col_offset) then x = ref.tables[k] end
    end
    list = {}
    for row = s.row_offset, s.row_offset + s.rows - 1 do
      for c = 1, s.cols do list[#list + 1] = x.weight[row * x.cols + (split and 0 or s.col_offset) + c] end
    end
    golden.assert_near(list, s.state("weight"):to_list(), { abs = 5e-6, rel = 5e-5 },
      ("step %d, table %s"):format(step, s.table))
  end
end

return M
