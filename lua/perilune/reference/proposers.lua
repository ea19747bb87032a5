-- proposers.lua: Proposers, memory that is kept free, offloading.
--
-- A proposer says which proposals the planner tries. Its methods: `load(space, enumerator)`, `propose()`,
-- `feedback(...)`; some have `begin(proposal, rating)`, the best that the proposers before found, or
-- `within(topology)`, what is left of the machine. The example of GreedyProposer runs them.
---@meta

---@class peri.plan
local plan = {}

---The fastest option of every table first; then, step by step, the next one of the table that takes most memory.
---
---Errors: an argument out of its range; a search space that is no list of estimated options.
---
---```lua
---local model = plan.describe.of { tables = { { name = "a", num_embeddings = 1000,
---  embedding_dim = 16 }, { name = "b", num_embeddings = 500, embedding_dim = 16 } } }
---local topology = plan.Topology { world_size = 2 }
---local enumerator = plan.EmbeddingEnumerator { topology = topology, batch_size = 64 }
---local space, best = enumerator:enumerate(model), nil
---for _, name in ipairs { "GreedyProposer", "UniformProposer", "GridSearchProposer",
---  "DynamicProgrammingProposer", "WeighingProposer", "RefiningProposer" } do
---  local proposer = plan[name] {}
---  proposer:load(space, enumerator)
---  if proposer.within then proposer:within(topology) end
---  if proposer.begin then proposer:begin(best, 10) end
---  best = proposer:propose()
---  assert(#best == 2)
---  proposer:feedback(true, best, 9, topology)
---end
---```
---@class peri.plan.GreedyProposer
---@overload fun(args?: peri.plan.GreedyProposer.args): peri.plan.GreedyProposer
plan.GreedyProposer = {}

---@class peri.plan.GreedyProposer.args
---@field use_depth? boolean An option is as fast as its slowest shard, else as all of them (default: true).
---@field threshold? integer Stop after so many proposals that were no better (default: none).

---Begin with a search space.
---@param space peri.plan.ShardingOption[] All options of all tables, with estimates.
---@param enumerator? any The EmbeddingEnumerator (default: none).
function plan.GreedyProposer:load(space, enumerator) end

---The next proposal.
---@return peri.plan.ShardingOption[]|nil # nil: there is no more.
function plan.GreedyProposer:propose() end

---What became of a proposal.
---@param partitionable? boolean Whether it fits (default: unknown).
---@param proposal? peri.plan.ShardingOption[] The proposal (default: none).
---@param rating? number Its score (default: none, it does not fit).
---@param topology? peri.plan.Topology The machine (default: none).
function plan.GreedyProposer:feedback(partitionable, proposal, rating, topology) end

---For each sharding type that all tables have, the plan in which all use it.
---
---Errors: an argument out of its range; a search space that is no list of estimated options.
---
---```lua
---local proposer = plan.UniformProposer { use_depth = false }
---proposer:load({}, plan.EmbeddingEnumerator { topology = plan.Topology { world_size = 1 } })
---print(proposer:propose() == nil) --> true
---```
---@class peri.plan.UniformProposer
---@overload fun(args?: peri.plan.UniformProposer.args): peri.plan.UniformProposer
plan.UniformProposer = {}

---@class peri.plan.UniformProposer.args
---@field use_depth? boolean As in GreedyProposer (default: true).

---Begin with a search space.
---@param space peri.plan.ShardingOption[] All options of all tables, with estimates.
---@param enumerator? any The EmbeddingEnumerator (default: none).
function plan.UniformProposer:load(space, enumerator) end

---The next proposal.
---@return peri.plan.ShardingOption[]|nil # nil: there is no more.
function plan.UniformProposer:propose() end

---What became of a proposal.
---@param partitionable? boolean Whether it fits (default: unknown).
---@param proposal? peri.plan.ShardingOption[] The proposal (default: none).
---@param rating? number Its score (default: none, it does not fit).
---@param topology? peri.plan.Topology The machine (default: none).
function plan.UniformProposer:feedback(partitionable, proposal, rating, topology) end

---Every combination; none at all if there are too many.
---
---Errors: an argument out of its range; a search space that is no list of estimated options.
---
---```lua
---local proposer = plan.GridSearchProposer { max_proposals = 100 }
---proposer:load({}, plan.EmbeddingEnumerator { topology = plan.Topology { world_size = 1 } })
---print(proposer:propose() == nil) --> true
---```
---@class peri.plan.GridSearchProposer
---@overload fun(args?: peri.plan.GridSearchProposer.args): peri.plan.GridSearchProposer
plan.GridSearchProposer = {}

---@class peri.plan.GridSearchProposer.args
---@field max_proposals? integer The most (default: 10000).

---Begin with a search space.
---@param space peri.plan.ShardingOption[] All options of all tables, with estimates.
---@param enumerator? any The EmbeddingEnumerator (default: none).
function plan.GridSearchProposer:load(space, enumerator) end

---The next proposal.
---@return peri.plan.ShardingOption[]|nil # nil: there is no more.
function plan.GridSearchProposer:propose() end

---What became of a proposal.
---@param partitionable? boolean Whether it fits (default: unknown).
---@param proposal? peri.plan.ShardingOption[] The proposal (default: none).
---@param rating? number Its score (default: none, it does not fit).
---@param topology? peri.plan.Topology The machine (default: none).
function plan.GridSearchProposer:feedback(partitionable, proposal, rating, topology) end

---Begins with the best proposal of the proposers before it, and gives one table (or all that are alike) another option;
---goes on from what is better.
---
---Errors: an argument out of its range; a search space that is no list of estimated options.
---
---```lua
---local proposer = plan.RefiningProposer { max_proposals = 100 }
---proposer:load({}, plan.EmbeddingEnumerator { topology = plan.Topology { world_size = 1 } })
---print(proposer:propose() == nil) --> true
---```
---@class peri.plan.RefiningProposer
---@overload fun(args?: peri.plan.RefiningProposer.args): peri.plan.RefiningProposer
plan.RefiningProposer = {}

---@class peri.plan.RefiningProposer.args
---@field max_proposals? integer The most (default: 1000).

---Begin with a search space.
---@param space peri.plan.ShardingOption[] All options of all tables, with estimates.
---@param enumerator? any The EmbeddingEnumerator (default: none).
function plan.RefiningProposer:load(space, enumerator) end

---The next proposal.
---@return peri.plan.ShardingOption[]|nil # nil: there is no more.
function plan.RefiningProposer:propose() end

---What became of a proposal.
---@param partitionable? boolean Whether it fits (default: unknown).
---@param proposal? peri.plan.ShardingOption[] The proposal (default: none).
---@param rating? number Its score (default: none, it does not fit).
---@param topology? peri.plan.Topology The machine (default: none).
function plan.RefiningProposer:feedback(partitionable, proposal, rating, topology) end

---The best proposal so far. The planner calls it where the proposers before it found a plan.
---@param proposal peri.plan.ShardingOption[] The proposal.
---@param rating number Its score.
function plan.RefiningProposer:begin(proposal, rating) end

---The least sum of all shards' times for each amount of memory, in steps.
---
---Errors: an argument out of its range; a search space that is no list of estimated options.
---
---```lua
---local proposer = plan.DynamicProgrammingProposer { hbm_bins_per_device = 10 }
---proposer:load({}, plan.EmbeddingEnumerator { topology = plan.Topology { world_size = 1 } })
---print(proposer:propose() == nil) --> true
---```
---@class peri.plan.DynamicProgrammingProposer
---@overload fun(args?: peri.plan.DynamicProgrammingProposer.args): peri.plan.DynamicProgrammingProposer
plan.DynamicProgrammingProposer = {}

---@class peri.plan.DynamicProgrammingProposer.args
---@field hbm_bins_per_device? integer Steps of a rank's memory (default: 100).

---Begin with a search space.
---@param space peri.plan.ShardingOption[] All options of all tables, with estimates.
---@param enumerator? any The EmbeddingEnumerator (default: none).
function plan.DynamicProgrammingProposer:load(space, enumerator) end

---The next proposal.
---@return peri.plan.ShardingOption[]|nil # nil: there is no more.
function plan.DynamicProgrammingProposer:propose() end

---What became of a proposal.
---@param partitionable? boolean Whether it fits (default: unknown).
---@param proposal? peri.plan.ShardingOption[] The proposal (default: none).
---@param rating? number Its score (default: none, it does not fit).
---@param topology? peri.plan.Topology The machine (default: none).
function plan.DynamicProgrammingProposer:feedback(partitionable, proposal, rating, topology) end

---Options that take least time together in the memory that is there, and in less.
---
---Errors: an argument out of its range; a search space that is no list of estimated options.
---
---```lua
---local proposer = plan.WeighingProposer {}
---proposer:load({}, plan.EmbeddingEnumerator { topology = plan.Topology { world_size = 1 } })
---print(proposer:propose() == nil) --> true
---```
---@class peri.plan.WeighingProposer
---@overload fun(args?: peri.plan.WeighingProposer.args): peri.plan.WeighingProposer
plan.WeighingProposer = {}

---@class peri.plan.WeighingProposer.args

---Begin with a search space.
---@param space peri.plan.ShardingOption[] All options of all tables, with estimates.
---@param enumerator? any The EmbeddingEnumerator (default: none).
function plan.WeighingProposer:load(space, enumerator) end

---The next proposal.
---@return peri.plan.ShardingOption[]|nil # nil: there is no more.
function plan.WeighingProposer:propose() end

---What became of a proposal.
---@param partitionable? boolean Whether it fits (default: unknown).
---@param proposal? peri.plan.ShardingOption[] The proposal (default: none).
---@param rating? number Its score (default: none, it does not fit).
---@param topology? peri.plan.Topology The machine (default: none).
function plan.WeighingProposer:feedback(partitionable, proposal, rating, topology) end

---What is left of the machine for tables. The planner calls it after `load`.
---@param topology peri.plan.Topology The machine.
function plan.WeighingProposer:within(topology) end

---Tables behind caches: first with the caches that their constraints say, then with larger ones, as long as memory is
---left. For tables whose `cache_params` have `stats`.
---
---Errors: an argument out of its range; a search space that is no list of estimated options.
---
---```lua
---local proposer = plan.EmbeddingOffloadScaleupProposer { use_depth = false }
---proposer:load({}, plan.EmbeddingEnumerator { topology = plan.Topology { world_size = 1 } })
---print(proposer:propose() == nil) --> true
---```
---@class peri.plan.EmbeddingOffloadScaleupProposer
---@overload fun(args?: peri.plan.EmbeddingOffloadScaleupProposer.args): peri.plan.EmbeddingOffloadScaleupProposer
plan.EmbeddingOffloadScaleupProposer = {}

---@class peri.plan.EmbeddingOffloadScaleupProposer.args
---@field use_depth? boolean As in GreedyProposer (default: true).

---Begin with a search space.
---@param space peri.plan.ShardingOption[] All options of all tables, with estimates.
---@param enumerator peri.plan.EmbeddingEnumerator The enumerator.
function plan.EmbeddingOffloadScaleupProposer:load(space, enumerator) end

---The next proposal.
---@return peri.plan.ShardingOption[]|nil # nil: there is no more.
function plan.EmbeddingOffloadScaleupProposer:propose() end

---What became of a proposal.
---@param partitionable boolean|nil Whether it fits.
---@param proposal peri.plan.ShardingOption[] The proposal.
---@param rating? number Its score (default: none, it does not fit).
---@param topology peri.plan.Topology The machine.
function plan.EmbeddingOffloadScaleupProposer:feedback(partitionable, proposal, rating, topology) end

---What is known of a table's ids, for the size of its cache: TorchRec's CacheStatistics, the field `stats` of
---CacheParams.
---
---Errors: a list without numbers.
---
---```lua
---local stats = plan.EmbeddingOffloadStats { cacheability = 0.5, expected_lookups = 10,
---  mrc_hist_counts = { 3, 1 }, height = 100 }
---print(stats:expected_miss_rate(0.5), stats:expected_miss_rate(1)) --> 0.25 0
---```
---@class peri.plan.EmbeddingOffloadStats
---@overload fun(args: peri.plan.EmbeddingOffloadStats.args): peri.plan.EmbeddingOffloadStats
plan.EmbeddingOffloadStats = {}

---@class peri.plan.EmbeddingOffloadStats.args
---@field cacheability number The area under the curve of miss ratios: the less, the easier to cache.
---@field expected_lookups number Distinct ids of a batch of all ranks.
---@field mrc_hist_counts number[] Lookups that a cache of 1/n, 2/n, ... of the rows serves beyond the one before it.
---@field height integer Rows of the table.

---The share of lookups that a cache misses.
---@param load_factor number Rows in the cache, as a share of the table's.
---@return number
function plan.EmbeddingOffloadStats:expected_miss_rate(load_factor) end

---Keeps a share of memory free for the rest of the model.
---
---Errors: a share outside of 0..1; an unknown kind of memory.
---
---```lua
---local topology = plan.Topology { world_size = 2, compute_device = "cpu", ddr_cap = 1000 }
---local model = plan.describe.of { tables = { { name = "a", num_embeddings = 10,
---  embedding_dim = 4 } }, dense_bytes = 10 }
---local kept = plan.FixedPercentageStorageReservation { percentage = 0.5, tiers = { "ddr" } }
---print(kept:reserve(topology).devices[1].ddr) --> 500
---print(plan.FixedAbsoluteStorageReservation({ bytes = 100 }):reserve(topology).devices[1].ddr)
-----> 900
---local heuristic = plan.HeuristicalStorageReservation { percentage = 0,
---  dense_tensor_estimate = 100 }
---print(heuristic:reserve(topology, model, 1).devices[1].ddr < 900) --> true
---print(plan.InferenceStorageReservation({ percentage = 0 }):reserve(topology, model,
---  1).devices[1].ddr < 1000) --> true
---```
---@class peri.plan.FixedPercentageStorageReservation
---@overload fun(args?: peri.plan.FixedPercentageStorageReservation.args): peri.plan.FixedPercentageStorageReservation
plan.FixedPercentageStorageReservation = {}

---@class peri.plan.FixedPercentageStorageReservation.args
---@field percentage? number The share, 0 to 1 (default: 0.15).
---@field tiers? string[] Which memory: `hbm`, `ddr`, `ssd` (default: { "hbm" }).

---The machine that is left for tables.
---@param topology peri.plan.Topology The machine.
---@return peri.plan.Topology
function plan.FixedPercentageStorageReservation:reserve(topology) end

---Keeps so many bytes of each device's own memory free.
---
---Errors: a number that is no whole number from 0 on.
---@class peri.plan.FixedAbsoluteStorageReservation
---@overload fun(args: peri.plan.FixedAbsoluteStorageReservation.args): peri.plan.FixedAbsoluteStorageReservation
plan.FixedAbsoluteStorageReservation = {}

---@class peri.plan.FixedAbsoluteStorageReservation.args
---@field bytes integer The bytes.

---The machine that is left for tables.
---@param topology peri.plan.Topology The machine.
---@return peri.plan.Topology
function plan.FixedAbsoluteStorageReservation:reserve(topology) end

---Keeps free what the dense part and the ids of batches are estimated to need, and a share.
---
---Errors: a share outside of 0..1; a machine that is too small for the dense part.
---@class peri.plan.HeuristicalStorageReservation
---@overload fun(args?: peri.plan.HeuristicalStorageReservation.args): peri.plan.HeuristicalStorageReservation
plan.HeuristicalStorageReservation = {}

---@class peri.plan.HeuristicalStorageReservation.args
---@field percentage? number The share, 0 to 1 (default: 0.15).
---@field parameter_multiplier? number Copies of the dense parameters: gradients, states of optimizers (default: 6).
---@field dense_tensor_estimate? integer Bytes of the dense part (default: what the model says).
---@field tiers? string[] Of which memory the share is (default: { "hbm" }).

---The machine that is left for tables.
---@param topology peri.plan.Topology The machine.
---@param model table[] The model.
---@param batch_size integer Samples of a rank.
---@param constraints? table<string, peri.plan.ParameterConstraints> By table (default: none).
---@return peri.plan.Topology
function plan.HeuristicalStorageReservation:reserve(topology, model, batch_size, constraints) end

---As `HeuristicalStorageReservation`, for models that are not trained: one copy of everything.
---
---Errors: a share outside of 0..1; a machine that is too small for the dense part.
---@class peri.plan.InferenceStorageReservation: peri.plan.HeuristicalStorageReservation
---@overload fun(args?: peri.plan.InferenceStorageReservation.args): peri.plan.InferenceStorageReservation
plan.InferenceStorageReservation = {}

---@class peri.plan.InferenceStorageReservation.args
---@field percentage? number The share, 0 to 1 (default: 0.15).
---@field parameter_multiplier? number Not used: it is 1 (default: 6).
---@field dense_tensor_estimate? integer Bytes of the dense part (default: what the model says).
---@field tiers? string[] Of which memory the share is (default: { "hbm" }).
