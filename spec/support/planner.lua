-- planner.lua: the golden cases of the planner (spec/golden/ops/planner) as what Perilune's planner takes.
local peri = require "perilune"
local golden = require "spec.support.golden"
local plan = peri.plan

local M = {}

M.names = {}
for _, model in ipairs { "small", "big", "sequence" } do
  for _, machine in ipairs { "cpu2", "cuda2", "cuda8", "cuda16" } do
    M.names[#M.names + 1] = ("plan_%s_%s"):format(model, machine)
  end
end

local function topology_of(t)
  local first = t.devices[1]
  for _, d in ipairs(t.devices) do assert(d.hbm == first.hbm and d.ddr == first.ddr and d.ssd == first.ssd) end
  return plan.Topology { world_size = t.world_size, local_world_size = t.local_world_size,
    compute_device = t.compute_device, hbm_cap = first.hbm, ddr_cap = first.ddr, ssd_cap = first.ssd,
    hbm_mem_bw = t.hbm_mem_bw, ddr_mem_bw = t.ddr_mem_bw, hbm_to_ddr_mem_bw = t.hbm_to_ddr_mem_bw,
    intra_host_bw = t.intra_host_bw, inter_host_bw = t.inter_host_bw, bwd_compute_multiplier = t.bwd_compute_multiplier,
    weighted_feature_bwd_compute_multiplier = t.weighted_feature_bwd_compute_multiplier }
end

local function constraints_of(given)
  local out = {}
  for name, c in peri.util.ordered(given) do
    local args = peri.util.copy(c)
    args.cache_params = c.cache_params and { load_factor = c.cache_params.load_factor }
    out[name] = plan.ParameterConstraints(args)
  end
  return out
end

--- The collections of a model, in the order in which the library names its modules: the search space has them from the
--- last.
local function collections_of(case)
  local list, seen = {}, {}
  for _, option in ipairs(case.options) do
    if not seen[option.module] then
      seen[option.module] = true
      local module = case.model[option.module]
      local tables = peri.util.map(module.tables, function(t)
        return { name = t.name, num_embeddings = t.rows, embedding_dim = t.dim, feature_names = t.features,
          data_type = t.data_type }
      end)
      table.insert(list, 1, { path = option.module, kind = module.class, is_weighted = module.is_weighted,
        tables = tables, optimizers = case.optimizers })
    end
  end
  return list
end

--- { case = the document, topology =, constraints =, collections =, enumerator = }
function M.load(name)
  local case = golden.document("ops/planner/" .. name)
  local loaded = { case = case, topology = topology_of(case.topology), constraints = constraints_of(case.constraints),
    collections = collections_of(case) }
  loaded.enumerator = plan.EmbeddingEnumerator { topology = loaded.topology, batch_size = case.batch_size,
    constraints = loaded.constraints }
  return loaded
end

return M
