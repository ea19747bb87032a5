-- plans.lua: Plans and planners.
--
-- A plan says for each table of each embedding collection how it is cut and which ranks have the parts. It is data:
-- write it by hand, let a planner make it, keep it in a file. docs/plans.md tells how planners think,
-- docs/sharded_tables.md what the ways to cut cost.
---@meta

---@class peri
local peri = {}
---@class peri.plan
local plan = {}

---How one table is cut. The functions `plan.table_wise`, `plan.row_wise` and so on make one with fewer words.
---
---The types are `table_wise`, `row_wise`, `column_wise`, `table_row_wise`, `table_column_wise`, `grid_shard` and
---`data_parallel`.
---
---Errors: an unknown type or kernel; ranks or sizes that the type does not take.
---
---```lua
---local sharding = peri.ParameterSharding { sharding_type = "row_wise", ranks = { 0, 1 } }
---print(sharding.sharding_type, sharding.ranks[2]) --> row_wise 1
---local shards = sharding:shards({ name = "t", num_embeddings = 10, embedding_dim = 4 },
---  { world_size = 2 })
---print(shards[2].rank, shards[2].row_offset, shards[2].rows, sharding:ranks_on({ 0, 0 })[1])
-----> 1 5 5 0
---```
---@class peri.ParameterSharding
---@overload fun(args: peri.ParameterSharding.args): peri.ParameterSharding
peri.ParameterSharding = {}

---@class peri.ParameterSharding.args
---@field sharding_type string `table_wise`, `row_wise`, `column_wise`, `table_row_wise`, `table_column_wise`, `grid_shard`, ...
---@field compute_kernel? string `fused`, `dense`, `fused_uvm`, `fused_uvm_caching`, `quant`, `quant_uvm` (default: `fused`).
---@field ranks? integer[] The ranks that hold the parts, from 0 (default: the type's own).
---@field sizes? integer[] Rows or columns of each part, beside `ranks` (default: even).
---@field hosts? integer[] Hosts in place of ranks, for the types that know hosts (default: those of `ranks`).
---@field cache_params? peri.CacheParams For `fused_uvm_caching` (default: those of the module).

---The parts of a table.
---
---Errors: ranks or sizes that do not fit the table or the ranks; the error names the table.
---@param config table A table: `name`, `num_embeddings`, `embedding_dim`.
---@param env table The ranks: `world_size`, and `local_size` or `nodes` where hosts matter.
---@return table[] # `{ rank =, row_offset =, rows =, col_offset =, cols = }` each; none of `data_parallel`.
function peri.ParameterSharding:shards(config, env) end

---The ranks that the plan names, as a list or by their hosts.
---
---Errors: a host that is not there.
---@param nodes integer[] The host of each rank, from 0.
---@param table_name? string Named in errors (default: none is).
---@return integer[]|nil # nil: the type's own.
function peri.ParameterSharding:ranks_on(nodes, table_name) end

---The plan of a model: path of a module -> table -> ParameterSharding. The path of the model itself is "".
---
---Errors: what is no table of ParameterShardings. Whether tables and ranks fit is checked when a model is made of it.
---
---```lua
---local places = peri.ShardingPlan { ["sparse.ebc"] = { user = plan.row_wise(),
---  product = plan.table_wise(1) } }
---print(places:get_plan_for_module("sparse.ebc").tables.product.ranks[1]) --> 1
---print(places:get_plan_for_module("dense")) --> nil
---```
---@class peri.ShardingPlan
---@overload fun(modules?: table): peri.ShardingPlan
peri.ShardingPlan = {}

---The plan of one module.
---
---Errors: none.
---@param path string Path of the module.
---@return peri.EmbeddingModuleShardingPlan|nil # nil: the plan has none.
function peri.ShardingPlan:get_plan_for_module(path) end

---The whole table on one rank.
---
---Errors: a rank that is no number; an unknown option.
---
---```lua
---print(plan.table_wise(3).ranks[1], plan.row_wise().sharding_type,
---  plan.column_wise({ ranks = { 0, 1 } }).ranks[2]) --> 3 row_wise 1
---print(plan.table_row_wise(1).hosts[1], plan.table_column_wise(0).hosts[1],
---  plan.grid_shard({ 0, 1 }).hosts[2]) --> 1 0 1
---print(plan.data_parallel({ compute_kernel = "dense" }).compute_kernel) --> dense
---```
---@param rank? integer The rank (default: 0).
---@param options? table `compute_kernel`, `cache_params` (default: none).
---@return peri.ParameterSharding
function plan.table_wise(rank, options) end

---Blocks of rows, one on each rank.
---
---Errors: an unknown option.
---@param options? table `ranks`, `sizes` (rows of each), `compute_kernel`, `cache_params` (default: all ranks, even).
---@return peri.ParameterSharding
function plan.row_wise(options) end

---Blocks of columns, one on each rank: as even as multiples of 4 columns can be.
---
---Errors: an unknown option.
---@param options? table `ranks`, `sizes` (columns of each), `compute_kernel`, `cache_params` (default: all ranks, even).
---@return peri.ParameterSharding
function plan.column_wise(options) end

---Blocks of rows over the ranks of one host: the sums of bags are made there, and one sum crosses the network.
---
---Errors: a host and ranks both; an unknown option.
---@param host_index? integer The host, from 0 (default: 0).
---@param options? table `ranks` in place of the host, `sizes`, `compute_kernel`, `cache_params` (default: even).
---@return peri.ParameterSharding
function plan.table_row_wise(host_index, options) end

---Blocks of columns over the ranks of one host.
---
---Errors: a host and ranks both; an unknown option.
---@param host_index? integer The host, from 0 (default: 0).
---@param options? table `ranks` in place of the host, `sizes`, `compute_kernel`, `cache_params` (default: even).
---@return peri.ParameterSharding
function plan.table_column_wise(host_index, options) end

---Blocks of columns, one on each host, each cut by rows over the ranks of its host.
---
---Errors: hosts and ranks both; an unknown option.
---@param host_indexes? integer|integer[] The hosts, from 0 (default: all).
---@param options? table `ranks` in place of hosts, `sizes`, `compute_kernel`, `cache_params` (default: even).
---@return peri.ParameterSharding
function plan.grid_shard(host_indexes, options) end

---A copy on every rank, whose gradients are summed up over the ranks.
---
---Errors: an unknown option.
---@param options? table `compute_kernel`: `fused`, or `dense`: trained by the optimizer of the dense part (default: `fused`).
---@return peri.ParameterSharding
function plan.data_parallel(options) end

---The plan that a value says: a ShardingPlan, a table, the path of a `.plan`, `.json` or `.lua` file. Lua files are
---run: load those that you trust.
---
---Errors: a file that cannot be read, or says no plan; the error names the file and the place.
---
---```lua
---local path = os.tmpname() .. ".plan"
---plan.save(peri.ShardingPlan { ebc = { t = plan.table_wise(0) } }, path, "made by hand")
---print(plan.load(path):get_plan_for_module("ebc").tables.t.sharding_type) --> table_wise
---print(plan.load_text(path):get_plan_for_module("ebc").tables.t.ranks[1]) --> 0
---os.remove(path)
---```
---@param source any A plan, or where it is.
---@param env? peri.ShardingEnv The ranks, given to a function that a Lua file returns (default: none).
---@return peri.ShardingPlan
function plan.load(source, env) end

---Write a plan into a file: Lua text, or JSON if the name ends in `.json`.
---
---Errors: a file that cannot be written.
---@param plan peri.ShardingPlan The plan.
---@param path string The file; its name should end in `.plan`.
---@param note? string A comment above the plan (default: none).
function plan.save(plan, path, note) end

---The plan in a file of `plan.save`, which is only read, never run.
---
---Errors: a file that says no plan, with the place.
---@param path string The file.
---@return peri.ShardingPlan
function plan.load_text(path) end

---A plan as Lua text, the same for the same plan; and a plan of such a text, which is only read. `to_json` and
---`from_json`: as JSON.
---
---Errors: what is no ShardingPlan.
---
---```lua
---local text = plan.to_text(peri.ShardingPlan { ebc = { t = plan.row_wise() } })
---print(plan.from_text(text):get_plan_for_module("ebc").tables.t.sharding_type) --> row_wise
---local json = plan.to_json(peri.ShardingPlan { ebc = { t = plan.row_wise() } })
---print(plan.from_json(json):get_plan_for_module("ebc").tables.t.sharding_type) --> row_wise
---```
---@param sharding_plan peri.ShardingPlan The plan.
---@param note? string A comment above the plan (default: none).
---@return string
function plan.to_text(sharding_plan, note) end

---The plan that a Lua text says. Nothing is run.
---
---Errors: a text that says no plan, with the place.
---@param text string What `plan.to_text` made.
---@param from? string Names the text in errors (default: none).
---@return peri.ShardingPlan
function plan.from_text(text, from) end

---A plan as JSON text.
---
---Errors: what is no ShardingPlan.
---@param sharding_plan peri.ShardingPlan The plan.
---@return string
function plan.to_json(sharding_plan) end

---The plan that a JSON text says.
---
---Errors: a text that says no plan, with the place.
---@param text string What `plan.to_json` made.
---@param from? string Names the text in errors (default: none).
---@return peri.ShardingPlan
function plan.from_json(text, from) end

---A machine: how many ranks it has, how much memory each of them, and how fast memories and links are. Sizes are in
---bytes, times in milliseconds, bandwidths in bytes a millisecond (GB/s times 1e6). `tostring` shows it. Its arguments
---are its fields; the field `devices` lists the memory of each rank, `{ hbm =, ddr =, ssd = }`.
---
---`threads`, `rates`, `dense`, `costs` and `choices` are what was measured: `perilune calibrate -o FILE` measures it,
---and `Topology.load` reads it.
---
---Errors: an unknown argument; a number that is negative, not finite, or 0 where it divides.
---
---```lua
---local topology = plan.Topology { world_size = 2, compute_device = "cpu", ddr_cap = 2 ^ 30 }
---print(#topology.devices, topology.devices[1].ddr, topology:own_tier()) --> 2 1073741824 ddr
---print(plan.Topology.preset("dgx_a100_80gb", { world_size = 16 }).world_size) --> 16
---local path = os.tmpname()
---topology:save(path)
---print(plan.Topology.load(path, { world_size = 4 }).world_size) --> 4
---os.remove(path)
---```
---@class peri.plan.Topology
---@overload fun(args: peri.plan.Topology.args): peri.plan.Topology
plan.Topology = {}

---@class peri.plan.Topology.args
---@field world_size integer Ranks.
---@field compute_device? string `cpu`, `cuda`, `mtia` or `tpu` (default: cpu).
---@field local_world_size? integer Ranks of a host (default: all of them).
---@field pod_size? integer Hosts that are linked to each other as fast as the ranks of a host are (default: 1).
---@field hbm_cap? integer A device's own memory; a `cpu` has none (default: 34359738368), 32 GiB.
---@field ddr_cap? integer The host's memory, for each rank (default: 137438953472), 128 GiB.
---@field ssd_cap? integer Files, for each rank (default: 2199023255552), 2 TiB.
---@field hbm_mem_bw? number Bandwidth of the device's own memory (default: 963146416.128), 897 GiB/s.
---@field ddr_mem_bw? number Of the host's memory (default: 54760833.024), 51 GiB/s.
---@field ssd_mem_bw? number Of files (default: 104857.6), 100 MiB/s.
---@field hbm_to_ddr_mem_bw? number Between device and host (default: 34359738.368), 32 GiB/s.
---@field intra_host_bw? number Of a rank, to others of its host (default: 644245094.4), 600 GiB/s.
---@field inter_host_bw? number Of a rank, to other hosts (default: 13421772.8), 12.5 GiB/s.
---@field intra_host_latency? number Milliseconds of an exchange within a host that moves nothing (default: 0).
---@field inter_host_latency? number The same between hosts (default: 0).
---@field inter_host_burst? number Bytes of a rank that pass at once after a limited link has rested (default: 0).
---@field bwd_compute_multiplier? number Time of a backward pass, as a multiple of the forward pass (default: 2).
---@field weighted_feature_bwd_compute_multiplier? number One more factor, of features with weights (default: 1).
---@field processors? integer Processors of a host (default: one for each of its ranks).
---@field hosts_sharing? integer Hosts that are parts of one machine, and share its processors (default: 1).
---@field cache_bytes? integer Caches of a host's processors (default: 33554432), 32 MiB.
---@field core_cache_bytes? integer Of these, the caches that a processor has to itself (default: 1048576), 1 MiB.
---@field threads? integer Worker threads of a rank while it was measured (default: not known).
---@field rates? table `{ copy =, gather =, update =, products = }` of a rank while all are busy: bytes, of products operations, a millisecond (default: none).
---@field dense? table Precision -> `{ forward =, backward =, optimizer = }`, each a price by unit (default: none).
---@field costs? table `{ forward =, backward = }`: for the work on tables, a price by unit (default: none).
---@field choices? table Choice -> the way that was fastest (default: none).
---@field custom_topology_data? table `{ hbm_cap =, ddr_cap =, ssd_cap = }`: lists with a number for each rank (default: all ranks are alike).

---A known machine by its name; `perilune plan --topology` takes the same names.
---
---Errors: an unknown name; the error lists the known ones.
---@param name string `torchrec` (TorchRec's defaults), `cpu_ethernet_10g`, `cpu_ethernet_100g`, `dgx_v100_32gb`, `dgx_a100_40gb`, `dgx_a100_80gb`, `dgx_h100_80gb`, or `h100`, whose prices were measured.
---@param args? table Arguments of Topology that go before the machine's (default: none).
---@return peri.plan.Topology
function plan.Topology.preset(name, args) end

---The kind of memory in which tables of the device's own kernels are: `ddr` of the cpu, `hbm` of GPUs.
---@return string
function plan.Topology:own_tier() end

---Write the machine into a file, as Lua text.
---
---Errors: a file that cannot be written.
---@param path string The file.
---@param folders? boolean Make missing folders above it (default: false).
function plan.Topology:save(path, folders) end

---The machine that a file says, such as one of `perilune calibrate -o`. It is read, not run.
---
---Errors: a file that cannot be read or says no topology.
---@param path string The file.
---@param args? table Arguments of Topology that go before the file's (default: none).
---@return peri.plan.Topology
function plan.Topology.load(path, args) end

---What a planner must know about one table. Its arguments are its fields.
---
---Errors: an unknown name of a type or kernel; an empty list.
---
---```lua
---local constraints = { product = plan.ParameterConstraints { sharding_types = { "row_wise" },
---  pooling_factors = { 20 } } }
---print(constraints.product.sharding_types[1]) --> row_wise
---```
---@class peri.plan.ParameterConstraints
---@overload fun(args?: peri.plan.ParameterConstraints.args): peri.plan.ParameterConstraints
plan.ParameterConstraints = {}

---@class peri.plan.ParameterConstraints.args
---@field sharding_types? string[] The types that are allowed (default: all but `grid_shard`).
---@field compute_kernels? string[] The kernels that are allowed (default: those of the sharder).
---@field min_partition? integer Least columns of a part that is cut by columns (default: 128).
---@field pooling_factors? number[] Mean ids of a sample, one number for each feature (default: 1).
---@field num_poolings? number[] Bags of a sample, one number for each feature (default: 1).
---@field batch_sizes? integer[] Samples of a rank, one number for each feature (default: the planner's).
---@field is_weighted? boolean Whether ids have weights (default: what the module says).
---@field cache_params? peri.CacheParams The cache of `fused_uvm_caching` (default: none).
---@field output_dtype? string `FP32`, `FP16`, `BF16` of what is looked up (default: the collection's, or the table's).
---@field device_group? string `cpu`, `cuda`: planners for other devices leave the table out (default: none).
---@field feature_names? string[] Kept for you (default: none).

---Looks for the plan whose slowest rank is fastest among those that fit. `planner.last` is the search: `num_proposals`,
---`num_plans`, and `best` with `rating` (estimated milliseconds of a step), `proposal` (a ShardingOption for each
---table: `name`, `sharding_type`, `compute_kernel`) and `placement` (for each option the rank of each part).
---
---Errors: an unknown argument; parts that do not go together.
---
---```lua
---local tables = {}
---for i = 1, 4 do
---  tables[i] = peri.EmbeddingBagConfig { name = "t" .. i, num_embeddings = 1000 * i,
---    embedding_dim = 16, feature_names = { "f" .. i } }
---end
---local model = nn.Module()
---model.ebc = peri.EmbeddingBagCollection { tables = tables, device = "meta" }
---local planner = plan.EmbeddingShardingPlanner { topology = plan.Topology { world_size = 2 },
---  batch_size = 64, constraints =
---    { t1 = plan.ParameterConstraints { sharding_types = { "table_wise" } } } }
---local made = planner:plan(model)
---print(made:get_plan_for_module("ebc").tables.t1.sharding_type) --> table_wise
---print(#planner.last.best.proposal, planner.last.num_plans > 0) --> 4 true
---print(planner:collective_plan(model):get_plan_for_module("ebc").tables.t1.sharding_type)
-----> table_wise
---print(planner:search(model).best.rating > 0) --> true
---```
---@class peri.plan.EmbeddingShardingPlanner
---@overload fun(args: peri.plan.EmbeddingShardingPlanner.args): peri.plan.EmbeddingShardingPlanner
plan.EmbeddingShardingPlanner = {}

---@class peri.plan.EmbeddingShardingPlanner.args
---@field topology peri.plan.Topology The machine.
---@field batch_size? integer Samples of a rank (default: 512).
---@field constraints? table<string, peri.plan.ParameterConstraints> By table, or path.table (default: none).
---@field relations? table[] Of tables and ranks: `plan.colocate`, `spread`, `at_most`, `at_most_bytes`, `forbid`, `pin` (default: none).
---@field estimates? string `torchrec`: TorchRec's formulas; `step`: our own, of a whole step (default: torchrec).
---@field storage_reservation? table What the rest of the model needs (default: HeuristicalStorageReservation).
---@field proposers? table[] Who proposes (default: grid search, two greedy ones, uniform; of our own estimates also changes of the best).
---@field partitioner? table Who places (default: GreedyPerfPartitioner).
---@field enumerator? table Who lists what each table could be (default: EmbeddingEnumerator).
---@field sharder? table What can be chosen: `torchrec_sharder` or `perilune_sharder` (default: the former).
---@field performance_model? table Rates whole plans (default: NoopPerfModel).
---@field cost? function `cost(perf, option, shard, topology)`, called for each shard after the estimators: it may change the times in `perf`, in milliseconds, and returns nothing (default: none).
---@field objective? fun(load: table): number What a plan is rated by, the less the better. `load` has lists with a number for each rank: `ms`, the parts of it (`fwd_compute`, `fwd_comms`, `bwd_compute`, `bwd_comms`, `prefetch_compute`), and bytes in `hbm`, `ddr`, `ssd`; and `proposal`, `placement`, `topology` (default: the slowest rank).
---@field max_placements? integer Parts that the search places before it keeps the best plan so far (default: 2e7).

---The best plan of a model. Local: every rank that calls it makes its own; `collective_plan` gives all of them the
---same.
---
---Errors: nothing fits; the error says what came nearest and what would fit.
---@param model any A module, or a list of collections.
---@return peri.ShardingPlan
function plan.EmbeddingShardingPlanner:plan(model) end

---The same plan on all ranks of a group: rank 0 makes it. Collective.
---
---Errors: what `plan` refuses, on all ranks; ranks that ask for different tables or machines.
---@param model any A module, or a list of collections.
---@param group? peri.dist.Group The ranks (default: none, this process alone).
---@return peri.ShardingPlan
function plan.EmbeddingShardingPlanner:collective_plan(model, group) end

---The search itself, whether something fits or not.
---
---Errors: constraints of tables that the model does not have.
---@param model any A module, or a list of collections.
---@return table # See EmbeddingShardingPlanner; `best` is nil where nothing fits.
function plan.EmbeddingShardingPlanner:search(model) end

---@class peri.shard
local shard = {}

---Print where the rows of a batch lie in a sharded module, on this rank: for each block of columns whose rows they are,
---how many, where in which buffer, where in the results, and who takes them there (the lookup, the transport, or a copy
---through a buffer); then the same of their gradients. docs/architecture.md has an example. The ids travel, but nothing
---is looked up. Collective.
---
---Errors: a module that has no tables of its own; a batch that its forward refuses.
---
---```lua
---local sharded = peri.shard.ShardedEmbeddingBagCollection { group = peri.init(),
---  plan = { t = plan.table_wise(0) },
---  tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 4,
---    feature_names = { "f" } } },
---  fused_params = { optimizer = "sgd", learning_rate = 1 } }
---local text = peri.shard.explain(sharded,
---  peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2, 3 }, lengths = { 1, 2 } })
---print(text:match "%d+ of %d+ bytes are copied") --> 0 of 32 bytes are copied
---```
---@param module any A sharded module.
---@param a any What its forward takes.
---@param b? any The same (default: none).
---@param c? any The same (default: none).
---@return string # What was printed.
function shard.explain(module, a, b, c) end
