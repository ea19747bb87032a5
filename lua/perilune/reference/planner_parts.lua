-- planner_parts.lua: Parts of the planner.
--
-- EmbeddingShardingPlanner lists what each table could be (enumerator, estimators), tries proposals (proposers), places
-- each (partitioner) and rates it (performance model). Each part can be given, also one of your own with the same
-- methods: parts are asked for their methods, not for their class. docs/plans.md tells more.
--
-- A *model* is what `plan.describe.of` makes of it. A *proposal* is a list of ShardingOptions, one for each table; its
-- *placement* is a list beside it: for each option the ranks of its shards, or true: shard k on rank k.
---@meta

---@class peri.plan
local plan = {}

---All ways to shard the tables of a model, with estimates.
---
---Errors: a table whose constraints leave nothing; estimators that leave no bytes or milliseconds.
---
---```lua
---local model = plan.describe.of { tables = { { name = "a", num_embeddings = 1000,
---  embedding_dim = 16 }, { name = "b", num_embeddings = 500, embedding_dim = 16 } } }
---local topology = plan.Topology { world_size = 2 }
---local enumerator = plan.EmbeddingEnumerator { topology = topology, batch_size = 64 }
---local space = enumerator:enumerate(model)
---print(#space > 4, plan.ShardingOption.is(space[1]), #space[1]:shards() > 0) --> true true true
---space[1]:sum_storage()
---space[1]:sum_perf()
---enumerator:populate_estimates(space)
---local first = {} -- the fastest option of each table
---for _, option in ipairs(space) do
---  if not first[option.name] or option.total_perf < first[option.name].total_perf then
---    first[option.name] = option
---  end
---end
---local proposal = { first.a, first.b }
---for _, partitioner in ipairs { plan.GreedyPerfPartitioner {},
---  plan.MemoryBalancedPartitioner {} } do
---  local placement = partitioner:partition(proposal, topology)
---  local ms = plan.NoopPerfModel({ topology = topology }):rate(proposal, placement)
---  assert(ms > 0 and plan.NoopStorageModel({ topology = topology }):rate(proposal,
---    placement) > 0)
---end
---print(#plan.GreedyPerfPartitioner({}):order(proposal)) --> 2
---print(plan.UniformPartitioner({}):partition(proposal, topology) == nil) --> true
---local estimator = plan.EmbeddingPerfEstimator { topology = topology }
---estimator:estimate(space)
---print(estimator:of_run(space[1], space[1].runs[1]).total > 0) --> true
---local storage = plan.EmbeddingStorageEstimator { topology = topology }
---storage:estimate(space)
---local bytes = storage:of_run(space[1], space[1].runs[1])
---print(bytes.hbm + bytes.ddr > 0) --> true
---```
---@class peri.plan.EmbeddingEnumerator
---@overload fun(args: peri.plan.EmbeddingEnumerator.args): peri.plan.EmbeddingEnumerator
plan.EmbeddingEnumerator = {}

---@class peri.plan.EmbeddingEnumerator.args
---@field topology peri.plan.Topology The machine.
---@field batch_size? integer Samples of a rank (default: 512).
---@field constraints? table<string, peri.plan.ParameterConstraints> By table, or path.table (default: none).
---@field estimators? table[] Who fills the options' bytes and times (default: TorchRec's formulas).
---@field sharder? table What can be chosen: `torchrec_sharder` or `perilune_sharder` (default: torchrec_sharder).
---@field cost? function `cost(perf, option, shard, topology)`, called for each shard after the estimators: it may change the times in `perf`, in milliseconds, and returns nothing (default: none).

---All options of a model's tables, in a fixed order, with their estimates.
---@param collections table[] The model.
---@return peri.plan.ShardingOption[]
function plan.EmbeddingEnumerator:enumerate(collections) end

---Estimate options again, after a change of theirs.
---@param list peri.plan.ShardingOption[] The options.
function plan.EmbeddingEnumerator:populate_estimates(list) end

---One way to shard one table. Equal shards that follow one another are a run of `runs`: `{ n =, rows =, cols =,
---row_offset =, col_offset = }`; estimators add `storage = { hbm =, ddr =, ssd = }` (bytes of one shard) and `perf`
---(milliseconds of one shard).
---
---Errors: a field that is missing or of another kind; an unknown sharding type; runs without storage or times where
---they are summed.
---@class peri.plan.ShardingOption
---@param fields table `path`, `name`, `rows`, `dim`, `sharding_type`, `compute_kernel`, `runs`, and others.
---@overload fun(fields: table): peri.plan.ShardingOption
plan.ShardingOption = {}

---The shards one by one.
---@return table[] # `{ rows =, cols =, row_offset =, col_offset =, storage =, perf = }` each.
function plan.ShardingOption:shards() end

---Fill `total_storage` and `max_storage`, once runs have their storage.
function plan.ShardingOption:sum_storage() end

---Fill `total_perf` and `max_perf`, once runs have their times.
function plan.ShardingOption:sum_perf() end

---TorchRec's formulas for the time of a shard.
---
---Errors: what is no Topology; a kernel that the device does not have.
---@class peri.plan.EmbeddingPerfEstimator
---@overload fun(args: peri.plan.EmbeddingPerfEstimator.args): peri.plan.EmbeddingPerfEstimator
plan.EmbeddingPerfEstimator = {}

---@class peri.plan.EmbeddingPerfEstimator.args
---@field topology peri.plan.Topology The machine.
---@field is_inference? boolean Only forward passes count (default: false).

---Fill the times of options.
---@param options peri.plan.ShardingOption[] The options.
function plan.EmbeddingPerfEstimator:estimate(options) end

---The times of one shard of a run.
---@param option peri.plan.ShardingOption The option.
---@param run table One of its runs.
---@return table<string, number> # Milliseconds by part, and `total`.
function plan.EmbeddingPerfEstimator:of_run(option, run) end

---The bytes of a shard: weights, states of optimizers, caches, ids and results of batches.
---
---Errors: what is no Topology; an unknown pipeline.
---@class peri.plan.EmbeddingStorageEstimator
---@overload fun(args: peri.plan.EmbeddingStorageEstimator.args): peri.plan.EmbeddingStorageEstimator
plan.EmbeddingStorageEstimator = {}

---@class peri.plan.EmbeddingStorageEstimator.args
---@field topology peri.plan.Topology The machine.
---@field pipeline_type? string `none`, `train_sparse_dist`, `train_prefetch_sparse_dist` (default: none).
---@field run_embedding_at_peak_memory? boolean The embedding's peak is the step's (default: false).
---@field is_inference? boolean Nothing is trained (default: false).

---Fill the storage of options.
---@param options peri.plan.ShardingOption[] The options.
function plan.EmbeddingStorageEstimator:estimate(options) end

---The storage of one shard of a run.
---@param option peri.plan.ShardingOption The option.
---@param run table One of its runs.
---@return table # `{ hbm =, ddr =, ssd = }`: bytes.
function plan.EmbeddingStorageEstimator:of_run(option, run) end

---What one shard adds to the step of its rank, by prices that were measured (`perilune calibrate`).
---
---Errors: what is no Topology.
---
---```lua
---local topology = plan.Topology { world_size = 2, compute_device = "cpu" }
---local step = plan.StepEstimator { topology = topology }
---local enumerator = plan.EmbeddingEnumerator { topology = topology,
---  estimators = { step, plan.EmbeddingStorageEstimator {
---  topology = topology } }, sharder = plan.perilune_sharder }
---local space = enumerator:enumerate(
---  plan.describe.of { tables = { { name = "a", num_embeddings = 1000, embedding_dim = 16 } } })
---step:estimate(space)
---print(step:of_run(space[1], space[1].runs[1]).total > 0) --> true
---print(plan.StepModel({ topology = topology }):rate({ space[1] }, { true }) > 0) --> true
---```
---@class peri.plan.StepEstimator
---@overload fun(args: peri.plan.StepEstimator.args): peri.plan.StepEstimator
plan.StepEstimator = {}

---@class peri.plan.StepEstimator.args
---@field topology peri.plan.Topology The machine.

---Fill the times of options.
---@param options peri.plan.ShardingOption[] The options.
function plan.StepEstimator:estimate(options) end

---The times of one shard of a run.
---@param option peri.plan.ShardingOption The option.
---@param run table One of its runs.
---@return table<string, number> # Milliseconds by part, and `total`.
---@return table # What was counted.
function plan.StepEstimator:of_run(option, run) end

---Rates a placement by the time of its step, by prices that were measured.
---
---Errors: what is no Topology; a placement that does not fit the proposal.
---@class peri.plan.StepModel
---@overload fun(args: peri.plan.StepModel.args): peri.plan.StepModel
plan.StepModel = {}

---@class peri.plan.StepModel.args
---@field topology peri.plan.Topology The machine.

---The rating of a placement, the less the better.
---@param proposal peri.plan.ShardingOption[] The options.
---@param placement table Their ranks.
---@return number # Milliseconds of a step.
function plan.StepModel:rate(proposal, placement) end

---Rates a placement by the milliseconds of its slowest rank (TorchRec's).
---
---Errors: what is no Topology; a placement that does not fit the proposal.
---@class peri.plan.NoopPerfModel
---@overload fun(args: peri.plan.NoopPerfModel.args): peri.plan.NoopPerfModel
plan.NoopPerfModel = {}

---@class peri.plan.NoopPerfModel.args
---@field topology peri.plan.Topology The machine.

---The rating of a placement, the less the better.
---@param proposal peri.plan.ShardingOption[] The options.
---@param placement table Their ranks.
---@return number # Milliseconds.
function plan.NoopPerfModel:rate(proposal, placement) end

---Rates a placement by the bytes of its fullest rank.
---
---Errors: what is no Topology; a placement that does not fit the proposal.
---@class peri.plan.NoopStorageModel
---@overload fun(args: peri.plan.NoopStorageModel.args): peri.plan.NoopStorageModel
plan.NoopStorageModel = {}

---@class peri.plan.NoopStorageModel.args
---@field topology peri.plan.Topology The machine.

---The rating of a placement, the less the better.
---@param proposal peri.plan.ShardingOption[] The options.
---@param placement table Their ranks.
---@return number # Bytes.
function plan.NoopStorageModel:rate(proposal, placement) end

---Places tables that go to all ranks first, then the others, the largest (or slowest) first, each shard on the least
---busy rank that it fits.
---
---Errors: an unknown sort_by.
---@class peri.plan.GreedyPerfPartitioner
---@overload fun(args?: peri.plan.GreedyPerfPartitioner.args): peri.plan.GreedyPerfPartitioner
plan.GreedyPerfPartitioner = {}

---@class peri.plan.GreedyPerfPartitioner.args
---@field sort_by? string `storage` or `perf` (default: storage).
---@field balance_modules? boolean Tables of modules with few tables come first (default: false).

---Place a proposal.
---@param proposal peri.plan.ShardingOption[] The options.
---@param topology peri.plan.Topology The machine.
---@param most? integer Bytes of its own memory that a rank may use (default: all).
---@return table|nil # The placement; nil: it does not fit.
---@return table|nil # Why not: `option`, `run`, `rank`, `tier`, `left`, ...
function plan.GreedyPerfPartitioner:partition(proposal, topology, most) end

---In which order tables that do not go to all ranks are placed.
---@param proposal peri.plan.ShardingOption[] The options.
---@param rules any Of relations: what has a method `pinned(option)`; nil: none.
---@return integer[] # Positions in the proposal.
function plan.GreedyPerfPartitioner:order(proposal, rules) end

---Places what goes to all ranks, and nothing else.
---
---Errors: an argument.
---@class peri.plan.UniformPartitioner
---@overload fun(args?: peri.plan.UniformPartitioner.args): peri.plan.UniformPartitioner
plan.UniformPartitioner = {}

---@class peri.plan.UniformPartitioner.args

---Place a proposal.
---@param proposal peri.plan.ShardingOption[] The options.
---@param topology peri.plan.Topology The machine.
---@param most? integer Not used (default: none).
---@return table|nil # The placement; nil: it does not fit.
---@return table|nil # Why not.
function plan.UniformPartitioner:partition(proposal, topology, most) end

---A greedy placement whose fullest rank has as little as a search finds, and that is no slower than the plain one by
---more than the tolerance.
---
---Errors: a number out of its range.
---@class peri.plan.MemoryBalancedPartitioner
---@overload fun(args?: peri.plan.MemoryBalancedPartitioner.args): peri.plan.MemoryBalancedPartitioner
plan.MemoryBalancedPartitioner = {}

---@class peri.plan.MemoryBalancedPartitioner.args
---@field max_search_count? integer Steps of the search (default: 10).
---@field tolerance? number Share of the time (default: 0.02).
---@field balance_modules? boolean As in GreedyPerfPartitioner (default: false).

---Place a proposal.
---@param proposal peri.plan.ShardingOption[] The options.
---@param topology peri.plan.Topology The machine.
---@param most? integer Not used (default: none).
---@return table|nil # The placement; nil: it does not fit.
---@return table|nil # Why not.
function plan.MemoryBalancedPartitioner:partition(proposal, topology, most) end
