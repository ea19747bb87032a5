-- model_parallel.lua: Models over ranks: 2D parallelism, wrappers, other plans.
--
-- More of the DistributedModelParallel of the page `training`. Collective: all ranks of the group call it, in the same
-- order. docs/sharded_tables.md tells more.
---@meta

---@class peri
local peri = {}
---@class peri.model
local model = {}

---2D parallelism: the ranks are cut into sharding groups, each of which has the whole model in shards. Ranks that have
---the same shards are a replica group: every few steps, their fused tables are set to the average. The dense part is
---the same on all ranks at any time. Most arguments are those of DistributedModelParallel; the plan is for the ranks of
---one sharding group.
---
---Errors: a sharding_group_size that does not divide the ranks; env, group or allreduce_comm_precision; ranks that give
---other numbers; managed collision; tables in files.
---
---```lua
---peri.init()
---local inner = nn.Module()
---inner.ebc = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t",
---  num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } } },
---  fused_params = { optimizer = "sgd", learning_rate = 1 }, device = "meta" }
---function inner:forward(features) return self.ebc(features):values() end
---local model = peri.DMPCollection { module = inner,
---  plan = peri.ShardingPlan { ebc = { t = peri.plan.row_wise() } }, sharding_group_size = 1,
---  sync_interval = 10 }
---model:init_data_parallel()
---local y = model:forward(peri.KeyedJaggedTensor.from_lists { keys = { "f" },
---  { { 1, 2 }, { 9 } } })
---model:backward(y:sum())
---model:sync()
---model:wait()
---model:check_moment()
---print(model:load_state_dict(model:state_dict()) ~= nil, (pcall(model.copy, model)))
-----> true false
---```
---@class peri.DMPCollection: peri.DistributedModelParallel
---@overload fun(args: peri.DMPCollection.args): peri.DMPCollection
peri.DMPCollection = {}

---@class peri.DMPCollection.args
---@field module peri.nn.Module The model; its embedding collections are replaced in place.
---@field sharding_group_size integer How many ranks shard the model together; it divides the number of ranks.
---@field plan? any A ShardingPlan of as many ranks, what `plan.load` takes, or a planner (default: the library makes one).
---@field device? string Where the model is (default: the rank's device).
---@field world_size? integer How many ranks there are, to have it checked (default: unchecked).
---@field global_pg? peri.dist.Group All ranks (default: the world).
---@field use_inter_host_allreduce? boolean true: ranks that follow each other are a sharding group; false: a replica one (default: false).
---@field sync_interval? integer Steps between two averages; 0: only `sync` makes them (default: 1).
---@field custom_all_reduce? function `function(tensors, group)`: set each tensor to its average over the group (default: the library's).
---@field sharders? table[] ModuleSharders, and nothing else is sharded (default: those that the modules' classes name).
---@field bucket_bytes? integer Bytes of dense gradients that are averaged together (default: 25 MiB).
---@field gradient_division? boolean Whether gradients of tables are divided by the number of ranks, as those of the dense part are (default: what `dist.ops.set_gradient_division` says; it is true until somebody sets it).
---@field qcomm_codecs_registry? table Fewer bits on the way between ranks (default: none).
---@field init_data_parallel? boolean false: you call `model:init_data_parallel()` before training (default: true).
---@field data_parallel_wrapper? peri.model.DataParallelWrapper What averages dense gradients (default: DefaultDataParallelWrapper).

---Set fused tables to their averages over the replica group. It returns at once; the next lookup waits, and so does
---whoever reads a table. Collective.
---@param include_optimizer_state? boolean false: only the weights, and not what optimizers keep (default: true).
function peri.DMPCollection:sync(include_optimizer_state) end

---Wait until averages that set out have arrived. Nobody has to call it.
function peri.DMPCollection:wait() end

---Always an error: replicas are averaged together. Copy `model.module` with `peri.shard.sharded_model_copy`.
---
---Errors: always.
---@param device? string The device of a copy (default: the same).
function peri.DMPCollection:copy(device) end

---An error where the replicas have learned apart since their last average, so that a state dict would be of one of them
---alone.
---
---Errors: the number of steps since the last average.
function peri.DMPCollection:check_moment() end

---Call the model. Calling the object calls it.
---
---Errors: a model that is not ready to be trained (`init_data_parallel = false`); more than 6 results.
---
---```lua
---peri.init()
---local inner = nn.Module()
---inner.ebc = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t",
---  num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } } },
---  fused_params = { optimizer = "sgd", learning_rate = 1 } }
---function inner:forward(features) return self.ebc(features):values() end
---local batch = peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 }, { 9 } } }
---local model = peri.DistributedModelParallel { module = inner, init_data_parallel = false }
---model:init_data_parallel()
---model:accumulate(true)
---for _ = 1, 2 do model:backward(model:forward(batch):sum() * 0.5) end
---model:apply_accumulated()
---model:accumulate(false)
---local plan = peri.ShardingPlan { ebc = { t = peri.plan.table_wise(0) } }
---model:check_plan(plan)
---model:reshard(plan)
---print(#model:sparse_grad_parameter_names(), peri.model.get_module(model) == inner) --> 0 true
---```
---@param ... any What the model takes.
---@return any # What the model returns.
function peri.DistributedModelParallel:forward(...) end

---Give the dense part to the wrapper: it starts from rank 0's numbers, and its gradients are averaged from now on.
---Later calls do it again where the model got other parameters, and otherwise nothing. Collective.
---
---Errors: ranks whose parameters have other names, shapes or dtypes.
function peri.DistributedModelParallel:init_data_parallel() end

---Keep gradients of several backward passes: until `apply_accumulated`, none changes a table or averages anything. For
---large batches in parts; scale each loss by 1 / parts. Alike on all ranks.
---
---Errors: a wrapper whose result has no methods `enable` and `finish`.
---@param on? boolean true: from now on; false: no longer (default: false).
function peri.DistributedModelParallel:accumulate(on) end

---Update tables with the gradients that were kept, and average those of the dense part. Collective.
function peri.DistributedModelParallel:apply_accumulated() end

---Check whether the model could be put under a plan.
---
---Errors: modules or tables that the plan lacks or that the model has not; a table whose kernel `dense` comes or goes.
---@param plan peri.ShardingPlan The plan.
function peri.DistributedModelParallel:check_plan(plan) end

---Put the live model under another plan, between two steps. Modules, fused optimizers and pipelines stay the same
---objects; numbers stay the same bit for bit. Tables are in a folder meanwhile. Collective.
---
---Errors: a plan that does not fit, with the model as it was; a batch that is under way; several hosts without
---`folder`.
---@param plan any A ShardingPlan, what `plan.load` takes, or a planner.
---@param options? peri.DistributedModelParallel.reshard.args Where tables are meanwhile (default: see there).
function peri.DistributedModelParallel:reshard(plan, options) end

---@class peri.DistributedModelParallel.reshard.args
---@field folder? string A folder that all hosts share (default: TMPDIR or /var/tmp; on one host only).

---Names of parameters whose gradients are sparse: none, as in TorchRec's.
---@return string[] # An empty list.
function peri.DistributedModelParallel:sparse_grad_parameter_names() end

---How the dense part is kept the same on all ranks. A class of your own below it has a method `wrap(model, env,
---device)`, which all ranks call in `init_data_parallel`. It returns nil, or an object with `watch(tensor)`, called
---with each tensor that the model returns.
---
---Errors: a class without `wrap`.
---
---```lua
---local Alone = peri.util.class("Alone", peri.model.DataParallelWrapper)
---function Alone:wrap() end
---peri.init()
---local model = peri.DistributedModelParallel { module = nn.Linear { in_features = 2,
---  out_features = 1 }, data_parallel_wrapper = Alone() }
---print(peri.model.get_unwrapped_module(model).class_name) --> Linear
---```
---@class peri.model.DataParallelWrapper
model.DataParallelWrapper = {}

---Averages gradients of the dense part over the ranks in buckets, while the backward pass runs.
---
---Errors: a bucket_cap_mb that is not above 0; ranks whose parameters differ.
---
---```lua
---peri.init()
---local model = peri.DistributedModelParallel { module = nn.Linear { in_features = 2,
---  out_features = 1 },
---  data_parallel_wrapper = peri.model.DefaultDataParallelWrapper { bucket_cap_mb = 1,
---    broadcast = false } }
---model:backward(model(peri.ones { 3, 2 }):sum())
---print(#model:replicated_parameters()) --> 2
---```
---@class peri.model.DefaultDataParallelWrapper: peri.model.DataParallelWrapper
---@overload fun(args?: peri.model.DefaultDataParallelWrapper.args): peri.model.DefaultDataParallelWrapper
model.DefaultDataParallelWrapper = {}

---@class peri.model.DefaultDataParallelWrapper.args
---@field bucket_cap_mb? number MiB of gradients that are averaged together (default: 25).
---@field broadcast? boolean Whether all ranks start from rank 0's numbers (default: true).

---The model within a DistributedModelParallel; any other module itself.
---
---Errors: what is no module.
---@param module peri.nn.Module The one or the other.
---@return peri.nn.Module
function model.get_module(module) end

---The same as `get_module`.
---
---Errors: what is no module.
---@param module peri.nn.Module A DistributedModelParallel, or any other module.
---@return peri.nn.Module
function model.get_unwrapped_module(module) end
