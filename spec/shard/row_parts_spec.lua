-- Rows travel between machines in parts (row_parts of docs/tuning.md): the bits are those of one part, with tables of
-- one width or of many, more parts than tables or fewer; and ranks have to agree. (Parity with unsharded tables, on
-- several machines: parity_spec.lua.)
-- mpirun: none
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local support = require "spec.support.pipeline"
local check, C = peri.ffi.check, peri.ffi.C

local function parts(way) check(C.peri_tune_set("row_parts", way)) end
after_each(function() parts "4" end)

--- What `tables` pooled tables on `n` ranks, `per` of them on each machine (the last one may have fewer), learn in
--- three batches; sharded over all of them or, where `two_d` says so, over groups of a DMPCollection.
local function learned(way, n, per, tables, two_d)
  parts(way)
  return sim.run(n, function(rank, world)
    peri.nn.manual_seed(3)
    local list, entries, keys = {}, {}, {}
    local size = two_d and two_d.sharding_group_size or n
    for t = 1, tables do
      keys[t] = "f" .. t
      list[t] = peri.EmbeddingBagConfig { name = "t" .. t, num_embeddings = 20, embedding_dim = 4 * (1 + t % 3),
        feature_names = { "f" .. t } }
      entries["t" .. t] = t % 4 == 3 and peri.plan.row_wise() or t % 4 == 2
        and peri.plan.row_wise { compute_kernel = "dense" }
        or peri.plan.table_wise((t * t) % size)
    end
    local args = { plan = { [""] = entries }, module = peri.EmbeddingBagCollection { tables = list,
      fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.5 } } }
    args[two_d and "global_pg" or "group"] = world
    for name, value in pairs(two_d or {}) do args[name] = value end
    local model = peri[two_d and "DMPCollection" or "DistributedModelParallel"](args)
    local optimizer = peri.nn.optim.SGD { params = model:dense_parameters(), lr = 0.5 }
    local seen = {}
    for k = 1, 3 do
      local values, lengths = {}, {}
      for bag = 1, 3 * tables do
        lengths[bag] = (bag + k) % 3
        for j = 1, lengths[bag] do values[#values + 1] = (bag * 7 + j * 3 + k + rank) % 20 end
      end
      optimizer:zero_grad()
      local out = model(peri.KeyedJaggedTensor { keys = keys, values = values, lengths = lengths, stride = 3 }):values()
      model:backward((out * out):sum())
      optimizer:step()
      seen[k] = table.concat(out:to_list(), " ")
    end
    return { seen, support.learned(model) }
  end, { local_size = per })
end

describe("rows in parts", function()
  for _, tables in ipairs { 2, 3, 11 } do
    it(("have the bits of rows in one: %d tables"):format(tables), function()
      for _, world in ipairs { { 2, 1 }, { 3, 1 }, { 4, 2 } } do
        local expected = learned("1", world[1], world[2], tables)
        for _, way in ipairs { "2", "4", "8" } do assert.same(expected, learned(way, world[1], world[2], tables)) end
      end
    end)
  end

  it("are those of each group of a DMPCollection, some on one machine and some on two", function()
    for _, world in ipairs { { 4, 3, 2 }, { 6, 4, 3 }, { 6, 5, 2 } } do
      for _, contiguous in ipairs { false, true } do
        local two_d = { sharding_group_size = world[3], sync_interval = 2, use_inter_host_allreduce = contiguous }
        assert.same(learned("1", world[1], world[2], 7, two_d), learned("8", world[1], world[2], 7, two_d))
      end
    end
  end)

  it("are refused where ranks have others", function()
    local ok, err = pcall(sim.run, 2, function(rank, world)
      parts(rank == 0 and "4" or "2")
      local model = support.model(world, "cpu")
      support.plain(model, support.optimizer(model), support.batches(rank, "cpu", 1))
    end, { local_size = 1 })
    assert.is_false(ok)
    assert.matches("rank 1 runs another module or plan than rank 0: rank 1 has row_parts %(PERI_TUNE%) 2 where rank 0 "
      .. "has 4", err.message)
  end)
end)
