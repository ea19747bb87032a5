-- plan_tools.lua: Around plans: relations, predictions, reasons, statistics.
--
-- What a planner can be told (relations between tables and ranks), where it gets its numbers from (descriptions of
-- models, statistics of data, prices of the dense part), and how its plans are shown. docs/plans.md tells more. In the
-- examples `plan` is `peri.plan`.
---@meta

---@class peri.plan
local plan = {}
---@class peri
local peri = {}
---@class peri.plan.describe
local describe = {}
---@class peri.plan.dense
local dense = {}
---@class peri.plan.html
local html = {}
---@class peri.plan.reasons
local reasons = {}
---@class peri.plan.report
local report = {}
---@class peri.plan.statistics
local statistics = {}
---@class peri.plan.torchrec_sharder
local torchrec_sharder = {}
---@class peri.plan.perilune_sharder
local perilune_sharder = {}

---The plan of one module: the ParameterSharding of each table, in the field `tables`. `tostring` shows it.
---
---Errors: an entry that is no ParameterSharding; tables that the plan does not have, or has besides; shards that are
---not legal.
---
---```lua
---local module = peri.EmbeddingModuleShardingPlan { t = plan.row_wise() }
---local config = peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 4,
---  feature_names = { "f" } }
---print(#module:validate({ config }, peri.ShardingEnv.from_local(2)).t) --> 2
---local checked = plan.construct_module_sharding_plan({ config }, { t = plan.table_wise(1) },
---  peri.ShardingEnv.from_local(2))
---print(checked.tables.t.ranks[1]) --> 1
---```
---@class peri.EmbeddingModuleShardingPlan
---@param tables? table<string, peri.ParameterSharding> Table -> how it is sharded (default: none).
---@overload fun(tables?: table<string, peri.ParameterSharding>): peri.EmbeddingModuleShardingPlan
peri.EmbeddingModuleShardingPlan = {}

---Check the plan against tables and ranks. Errors name the file that it is from.
---@param configs table[] Configurations of the tables.
---@param env peri.ShardingEnv The ranks.
---@param module_name? string For messages (default: none).
---@return table<string, table[]> # Table -> its shards.
function peri.EmbeddingModuleShardingPlan:validate(configs, env, module_name) end

---The plan of one module, checked against its tables at once.
---
---Errors: what `EmbeddingModuleShardingPlan` and its `validate` refuse.
---@param configs table[] Configurations of the tables.
---@param per_param_sharding table<string, peri.ParameterSharding> Table -> how it is sharded.
---@param env peri.ShardingEnv The ranks.
---@return peri.EmbeddingModuleShardingPlan
function plan.construct_module_sharding_plan(configs, per_param_sharding, env) end

---Whole tables over ranks, the largest first, each to the rank that has the fewest bytes.
---
---Errors: what is no table of lists of configurations.
---
---```lua
---local config = peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 4,
---  feature_names = { "f" } }
---print(plan.table_wise_by_size({ ebc = { config } },
---  peri.ShardingEnv.from_local(2)):get_plan_for_module("ebc").tables.t.ranks[1]) --> 0
---```
---@param modules table<string, table[]> Path -> configurations of its tables.
---@param env peri.ShardingEnv The ranks.
---@return peri.ShardingPlan
function plan.table_wise_by_size(modules, env) end

---What a plan's function gets: `ShardingEnv.of`.
---
---Errors: what is no table.
---
---```lua
---print(plan.environment({ world_size = 2 }).world_size) --> 2
---```
---@param env? peri.ShardingEnv|table A ShardingEnv, or a table of its fields (default: none).
---@return peri.ShardingEnv
function plan.environment(env) end

---Write a plan into a file as JSON.
---
---Errors: what is no ShardingPlan; a file that cannot be written.
---
---```lua
---local path = os.tmpname()
---plan.save_json(peri.ShardingPlan { ebc = { t = plan.row_wise() } }, path)
---print(plan.load_json(path):get_plan_for_module("ebc").tables.t.sharding_type) --> row_wise
---os.remove(path)
---```
---@param plan peri.ShardingPlan The plan.
---@param path string The file.
function plan.save_json(plan, path) end

---The plan in a file of JSON.
---
---Errors: a file that cannot be read, or says no plan, with the place.
---@param path string The file.
---@return peri.ShardingPlan
function plan.load_json(path) end

---A relation for a planner: tables that are cut alike, and are shard by shard on the same ranks. In relations a table
---is named by its name, by path.name, or by a pattern with `*`.
---
---Errors: fewer than two tables; what is no name.
---
---```lua
---print(tostring(plan.colocate { "a", "b" }),
---  tostring(plan.spread({ "big*" }, "host"))) --> colocate { a, b } spread { big* } over hosts
---print(tostring(plan.at_most(2, { "big*" }))) --> at most 2 of { big* } on a rank
---print(tostring(plan.at_most_bytes(100, "a"))) --> at most 100 bytes of { a } on a rank
---print(tostring(plan.forbid("a", { 0, 1 })),
---  tostring(plan.pin("a", 3))) --> forbid { a } on ranks 0, 1 pin { a } to ranks 3
---```
---@param tables string[] Their names.
---@param more? any Only nil: names come in one list (default: none).
---@return table
function plan.colocate(tables, more) end

---A relation: no rank has shards of two of the tables.
---
---Errors: fewer than two tables; what is no name; an unknown `per`.
---@param tables string[] Their names.
---@param per? string `rank` or `host` (default: rank).
---@return table
function plan.spread(tables, per) end

---A relation: no rank has shards of more than so many of the tables.
---
---Errors: a number below 1; what is no name; an unknown `per`.
---@param count integer So many.
---@param tables string|string[] Their names.
---@param per? string `rank` or `host` (default: rank).
---@return table
function plan.at_most(count, tables, per) end

---A relation: no rank has more than so many bytes of the tables' shards.
---
---Errors: a number below 0; what is no name; an unknown `per`.
---@param bytes integer So many, of all kinds of memory.
---@param tables string|string[] Their names.
---@param per? string `rank` or `host` (default: rank).
---@return table
function plan.at_most_bytes(bytes, tables, per) end

---A relation: the tables have no shard on these ranks.
---
---Errors: what is no name, or no rank; an unknown `per`.
---@param tables string|string[] Their names.
---@param units integer|integer[] Ranks, or hosts.
---@param per? string `rank` or `host` (default: rank).
---@return table
function plan.forbid(tables, units, per) end

---A relation: the tables have shards on these ranks only.
---
---Errors: what is no name, or no rank; an unknown `per`.
---@param tables string|string[] Their names.
---@param units integer|integer[] Ranks, or hosts.
---@param per? string `rank` or `host` (default: rank).
---@return table
function plan.pin(tables, units, per) end

---A copy with other memory.
---
---Errors: what is no function.
---
---```lua
---local topology = plan.Topology { world_size = 2, compute_device = "cpu", ddr_cap = 1000 }
---print(topology:with_devices(function(device) device.ddr = device.ddr / 2 end).devices[1].ddr)
-----> 500
---print(topology:bandwidth("all_to_all", 2, 2) > 0, topology:arguments().world_size) --> true 2
---local path = plan.Topology.kept_path(2, 2)
---print(path == nil or type(path) == "string", type(plan.Topology.kept) == "function")
-----> true true
---```
---@param change function `change(device)`, called with a copy of each device.
---@return peri.plan.Topology
function plan.Topology:with_devices(change) end

---Bytes a millisecond of a rank in a collective operation, by the bandwidths of the links.
---
---Errors: an unknown operation; what is no number.
---@param collective string `all_to_all`, `reduce_scatter`, `all_gather`, `all_reduce`.
---@param world_size integer Ranks that take part.
---@param local_size integer Of these on a host.
---@return number
function plan.Topology:bandwidth(collective, world_size, local_size) end

---The arguments that made it, those that are not defaults.
---@return table
function plan.Topology:arguments() end

---Where `perilune calibrate` keeps the topology of this machine.
---
---Errors: what is no number of ranks.
---@param ranks integer Ranks.
---@param host integer Ranks of a host.
---@param device? string Kind of device (default: the processor).
---@return string|nil # nil: nowhere.
function plan.Topology.kept_path(ranks, host, device) end

---The topology that `perilune calibrate` has kept of this machine.
---
---Errors: one that cannot be read.
---@param ranks integer Ranks.
---@param host integer Ranks of a host.
---@param device? string Kind of device (default: the processor).
---@return peri.plan.Topology|nil # nil: there is none.
function plan.Topology.kept(ranks, host, device) end

---The number by which plans are chosen, the less the better: the rating. With `estimates = "step"` it is 1 % more for
---each further sharding type that the plan uses: each type costs exchanges of its own.
---
---Errors: what is no number, or no list of options.
---
---```lua
---local topology = plan.Topology { world_size = 2, compute_device = "cpu" }
---local model = plan.describe.of { tables = { { name = "a", num_embeddings = 1000,
---  embedding_dim = 16 } } }
---local planner = plan.EmbeddingShardingPlanner { topology = topology, batch_size = 64,
---  estimates = "step" }
---planner:plan(model)
---print(planner:score(10, planner.last.best.proposal), #plan.report.lines(planner) > 2)
-----> 10 true
---local why = plan.reasons.of(planner, model)
---local page = plan.html.page(planner, { title = "mine", reasons = why })
---print(why[1].table, #why[1].others > 0, page:match "<title>(.-)</title>") --> a true mine
---print(plan.dense.predict(model, topology, 64) == nil) --> true
---```
---@param rating number The rating of a placement.
---@param proposal peri.plan.ShardingOption[] The options.
---@return number
function plan.EmbeddingShardingPlanner:score(rating, proposal) end

---A model as planners take it, of an `nn.Module`, or of plain tables: no weights are needed. A plain model is `{ tables
---= { { name =, num_embeddings =, embedding_dim = }, ... } }`, or a list of collections with `path`, `kind`, `tables`;
---optional: `dense_bytes`, `buffer_bytes`, `matrices`.
---
---Errors: a model without tables; tables of one name; an unknown kind or data type.
---
---```lua
---print(plan.describe.of({ tables = { { name = "a", num_embeddings = 10,
---  embedding_dim = 4 } } })[1].tables[1].name) --> a
---```
---@param source any A module, such a table, or a function that returns one.
---@return table[]
function describe.of(source) end

---Milliseconds of the dense part of a step.
---
---Errors: a precision that the machine has no prices of.
---@param model table[] Of `plan.describe.of`, with `matrices`.
---@param topology peri.plan.Topology The machine.
---@param batch_size integer Samples of a rank.
---@param precision? string `highest` (f32), `high` (TF32), `bf16` (default: the first that there are prices of).
---@return table|nil # `{ forward =, backward =, optimizer =, ms = }`; nil: there are no prices.
function dense.predict(model, topology, batch_size, precision) end

---A page (HTML, in one piece) about a plan that a planner has made.
---
---Errors: what is no planner; a planner that has made no plan.
---@param planner peri.plan.EmbeddingShardingPlanner The planner, after `plan`.
---@param args? table `title`, `reasons` (of `plan.reasons.of`) (default: no reasons).
---@return string
function html.page(planner, args) end

---Lines of text about a plan that a planner has made: tables, then ranks.
---
---Errors: a planner that has made no plan.
---@param planner peri.plan.EmbeddingShardingPlanner The planner, after `plan`.
---@return string[]
function report.lines(planner) end

---Why tables have not other options.
---
---Errors: a planner that has made no plan; another model than it was made for.
---@param planner peri.plan.EmbeddingShardingPlanner The planner, after `plan`.
---@param model any The model.
---@param most? integer Tables that are looked at (default: all).
---@return table[] # `{ table =, tables =, chosen =, ranks =, others = { { option =, kind =, text =, rating = }, ... } }` each.
function reasons.of(planner, model, most) end

---Read a file in the Criteo layout once, and count its ids. Named arguments: `path` and `tables` (a list of `{ name =,
---rows =, features = { "c1", ... } }`) are needed; optional: `batch_size` (512), `samples`, `progress`,
---`dense_features` (13), `sparse_features` (26).
---
---Errors: an argument that is missing or unknown; a feature that the file does not have; what is wrong in the file,
---with line and column.
---
---```lua
---local path = os.tmpname()
---peri.data.synthetic.write { path = path, num_rows = 64, rows = 100, seed = 1 }
---local counted = plan.statistics.count { path = path,
---  tables = { { name = "t", rows = 100, features = { "c1" } } } }
---local f = counted[1]
---print(plan.statistics.FeatureStatistics.is(f), f.samples, f:share(100), f:hot(0))
-----> true 64 1 0
---print(f:cache_statistics(2).height) --> 100
---os.remove(path)
---local model = plan.describe.of { tables = { { name = "t", num_embeddings = 100,
---  embedding_dim = 4, feature_names = { "c1" } } } }
---print(plan.statistics.constrain(counted, model, nil, 2)["t"].pooling_factors[1],
---  plan.statistics.tables_of(model)[1].rows) --> 1 100
---```
---@param args table The named arguments.
---@return peri.plan.statistics.FeatureStatistics[]
function statistics.count(args) end

---What is known of a feature: `name`, `table`, `rows`, `samples`, `ids`, `mean_length`, `longest`, `distinct`,
---`batch_distinct`, `curve`, `exact`. `statistics.count` makes it.
---
---Errors: a share outside of 0..1.
---@class peri.plan.statistics.FeatureStatistics
---@param name string The feature.
---@param table_name string Its table.
---@param rows integer Rows of the table.
---@overload fun(name: string, table_name: string, rows: integer): peri.plan.statistics.FeatureStatistics
statistics.FeatureStatistics = {}

---The share of lookups that the most frequent rows served.
---@param rows number So many rows.
---@return number
function statistics.FeatureStatistics:share(rows) end

---The fewest rows that served a share of the lookups.
---@param share number The share, 0 to 1.
---@return integer
function statistics.FeatureStatistics:hot(share) end

---What caches of the table's rows would serve, for planners.
---@param world_size integer Ranks of the plan.
---@return peri.plan.EmbeddingOffloadStats
function statistics.FeatureStatistics:cache_statistics(world_size) end

---Constraints with numbers of data: mean lengths of bags where the user says none, and what caches would serve.
---
---Errors: what are no statistics, or no model.
---@param statistics peri.plan.statistics.FeatureStatistics[] Of `statistics.count`.
---@param model table[] Of `plan.describe.of`.
---@param given? table<string, peri.plan.ParameterConstraints> The user's (default: none).
---@param world_size integer Ranks of the plan.
---@return table<string, peri.plan.ParameterConstraints>
function statistics.constrain(statistics, model, given, world_size) end

---The tables of a model as `statistics.count` takes them.
---
---Errors: what is no model.
---@param model table[] Of `plan.describe.of`.
---@return table[]
function statistics.tables_of(model) end

---TorchRec's matrix: the sharding types that the planner may choose. `perilune_sharder` has those of Perilune's
---modules.
---
---Errors: an unknown kind of collection.
---
---```lua
---print(#plan.torchrec_sharder:sharding_types("cuda", "EmbeddingBagCollection")) --> 7
---print(table.concat(plan.torchrec_sharder:compute_kernels("data_parallel", "cpu"), " "))
-----> dense
---print(#plan.perilune_sharder:sharding_types("cpu", "EmbeddingCollection")) --> 4
---print(table.concat(plan.perilune_sharder:compute_kernels("row_wise", "cpu"), " ")) --> fused
---```
---@param device string Kind of device: `cpu`, `cuda`.
---@param kind string Class of the collection.
---@return string[]
function torchrec_sharder:sharding_types(device, kind) end

---The compute kernels that the planner may choose.
---
---Errors: nothing is raised.
---@param sharding_type string The type.
---@param device string Kind of device.
---@return string[]
function torchrec_sharder:compute_kernels(sharding_type, device) end

---What Perilune's modules can do on every device.
---
---Errors: nothing is raised.
---@param device string Kind of device.
---@param kind string Class of the collection.
---@return string[]
function perilune_sharder:sharding_types(device, kind) end

---The compute kernels that Perilune's modules have.
---
---Errors: nothing is raised.
---@param sharding_type string The type.
---@param device string Kind of device.
---@return string[]
function perilune_sharder:compute_kernels(sharding_type, device) end
