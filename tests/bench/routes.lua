-- routes.lua: what a step of a sharded collection costs before anything is looked up: layouts, headers, routes. Many
-- ranks in one process (sim), one feature a table, row-wise, batches of a few samples with one id a bag, no gradients:
-- so nearly all of the time is work that grows with features x ranks. Columns: case, microseconds of a step on one rank
-- for each feature and rank: best, median.
--
--   single     batches of one sample: next to nothing is looked up
--   fixed      batches of three samples: the layouts of the first step serve all
--   sizes      the batch size is another one in each step, of four that come again
--   variable   a variable batch per feature, of sizes that were never seen
local ffi = require "ffi"
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local sim = require "perilune.dist.sim"
local C = peri.ffi.C

local parser = argparse("tests/bench/routes.lua", "The cost of routes, layouts and headers.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--ranks", "Ranks of the world.", 64, tonumber)
parser:option("--features", "Features, each with a table of its own.", 200, tonumber)
parser:option("--steps", "Measured steps of a case.", 9, tonumber)
parser:option("--only", "Cases whose name has this in it.", "")
local options = parser:parse(arg)
peri.ffi.check(C.peri_threads_set(1))

local names, tables, plan = {}, {}, {}
for i = 1, options.features do
  names[i] = "f" .. i
  tables[i] = peri.EmbeddingBagConfig { name = "t" .. i, num_embeddings = options.ranks, embedding_dim = 4,
    feature_names = { names[i] } }
  plan[tables[i].name] = peri.plan.row_wise()
end

--- A batch of `size` samples with one id a bag; sizes: bags by feature, for a variable batch.
local function batch(size, sizes)
  local bags = 0
  for i = 1, options.features do bags = bags + (sizes and sizes[i] or size) end
  local values, lengths = ffi.new("int64_t[?]", bags), ffi.new("int64_t[?]", bags)
  for i = 0, bags - 1 do values[i], lengths[i] = i * 7 % options.ranks, 1 end
  local function tensor(x, n) return peri.Tensor.from_memory(x, { n }, "i64", "cpu") end
  if not sizes then
    return peri.KeyedJaggedTensor { keys = names, values = tensor(values, bags), lengths = tensor(lengths, bags) }
  end
  local strides, inverse = {}, {}
  for i = 1, options.features do
    strides[i], inverse[i] = { sizes[i] }, {}
    for s = 1, size do inverse[i][s] = (s - 1) % sizes[i] end
  end
  return peri.KeyedJaggedTensor { keys = names, values = tensor(values, bags), lengths = tensor(lengths, bags),
    stride_per_key_per_rank = strides, inverse_indices = { names, peri.tensor(inverse, "i64") } }
end

local function varying(step)
  local sizes, x = {}, step
  for i = 1, options.features do
    x = (x * 48271 + 11) % 2147483647
    sizes[i] = 1 + math.floor(x / 65536) % 4
  end
  return batch(4, sizes)
end

local cases = {
  { "single", function() return batch(1) end },
  { "fixed", function() return batch(3) end },
  { "sizes", function(step) return batch(1 + step % 4) end },
  { "variable", varying },
}

local function now() return tonumber(C.peri_time_ns()) end

local function measure(make)
  local times, marks = {}, {}
  sim.run(options.ranks, function(rank, world)
    local ebc = peri.shard.ShardedEmbeddingBagCollection { tables = tables, plan = plan, group = world,
      fused_params = { optimizer = "sgd", learning_rate = 0.1 } }
    for step = 1, options.steps + 8 do
      local kjt = make(step)
      world:barrier():wait()
      if rank == 0 then marks[step] = now() end
      peri.no_grad(function() ebc:forward(kjt):values():numel() end)
      world:barrier():wait()
      if rank == 0 then
        times[step] = (now() - marks[step]) / 1000 / options.ranks / options.ranks / options.features
      end
      kjt:release()
      if rank == 0 and step % 4 == 0 then collectgarbage() end
    end
  end)
  local list = {}
  for step = 9, options.steps + 8 do list[#list + 1] = times[step] end -- the first eight meet each size once
  table.sort(list)
  return list[1], list[math.ceil(#list / 2)]
end

print(("%d ranks, %d features; us a feature and rank"):format(options.ranks, options.features))
for _, case in ipairs(cases) do
  if case[1]:find(options.only, 1, true) then
    local best, median = measure(case[2])
    print(("%-10s best %6.3f  median %6.3f"):format(case[1], best, median))
    if options.out then
      local file = assert(io.open(options.out, "a"))
      file:write(json.encode({ case = case[1], ranks = options.ranks, features = options.features, best_us = best,
        median_us = median }), "\n")
      file:close()
    end
  end
end
