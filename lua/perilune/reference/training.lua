-- training.lua: Training: the world, sharded models, pipelines, schedules.
--
-- `peri.init` joins the other ranks. A DistributedModelParallel puts a model's tables where a plan says. A pipeline
-- takes batches and makes steps by a schedule: a list of operations that says what overlaps with what.
-- docs/pipelines.md and docs/sharded_tables.md tell more.
---@meta

---@class peri
local peri = {}

---Join the world of all ranks; alone, a process is a world of one. A second call returns the same world.
---
---Errors: ranks that do not meet within the timeout; a transport that cannot be used, with the reason.
---
---```lua
---local world = peri.init()
---print(world:size(), peri.rank(), peri.world_size(), peri.world() == world) --> 1 0 1 true
---```
---@param args? peri.init.args By default whatever launched the process decides.
---@return peri.dist.Group
function peri.init(args) end

---@class peri.init.args
---@field transport? string `auto`: mpi when launched as one of several ranks, else `self` (default: auto).
---@field device_transport? string Carries tensors of a device without copies through the host (default: nccl where ranks have GPUs).
---@field device? string The device of `device_transport` (default: the rank's).
---@field timeout? number Seconds that an exchange may take; 0: the usual (default: 0).
---@field local_size? integer Ranks of a host, imposed; 0: those that there are (default: 0).
---@field job? string Of the transport `sim`: the name of the world (default: none).
---@field rank? integer Of `sim`: this rank (default: 0).
---@field size? integer Of `sim`: ranks (default: 0).

---This rank's number in the world, from 0; without a world 0.
---@return integer
function peri.rank() end

---Ranks of the world; without a world 1.
---@return integer
function peri.world_size() end

---The group of all ranks; an error before `peri.init`.
---@return peri.dist.Group
function peri.world() end

---A model whose embedding collections are sharded over ranks by a plan, and whose other parameters are equal on all of
---them. Call it as the model: its result is the model's. A backward pass from it trains the tables and averages the
---dense gradients. All ranks make it, with the same model. Values depend neither on the plan nor on the number of
---ranks.
---
---Errors: a plan that does not go with the tables, or that ranks do not agree about; the error names the table.
---
---```lua
---peri.init()
---local inner = nn.Module()
---inner.ebc = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t",
---  num_embeddings = 10, embedding_dim = 4, feature_names = { "f" } } },
---  fused_params = { optimizer = "sgd", learning_rate = 1 }, device = "meta" }
---inner.last = nn.Linear { in_features = 4, out_features = 1 }
---function inner:forward(features) return self.last(self.ebc(features):values()) end
---local model = peri.DistributedModelParallel { module = inner,
---  plan = peri.ShardingPlan { ebc = { t = plan.row_wise() } } }
---local y = model(peri.KeyedJaggedTensor.from_lists { keys = { "f" }, { { 1, 2 }, { 9 } } })
---model:backward(y:sum())
---print(#model:dense_parameters(), #model:replicated_parameters(), model:fused_optimizer():lr())
-----> 2 2 1
---model:set_fused_learning_rate(0.5)
---print(model:fused_optimizer():lr()) --> 0.5
---local folder = os.tmpname() .. "-model"
---model:save(folder, { values = { step = 7 } })
---print(model:load(folder).step) --> 7
---peri.checkpoint.remove(folder)
---local copy = model:copy()
---copy:load_state_dict(model:state_dict())
---print(copy ~= model, #copy:bare_named_parameters()) --> true 2
---model:flush()
---```
---@class peri.DistributedModelParallel: peri.nn.Module
---@overload fun(args: peri.DistributedModelParallel.args): peri.DistributedModelParallel
peri.DistributedModelParallel = {}

---@class peri.DistributedModelParallel.args
---@field module peri.nn.Module The model; its embedding collections are replaced in place.
---@field plan? any A ShardingPlan, what `plan.load` takes, or a planner (default: the library makes one).
---@field device? string Where the model is (default: the rank's device).
---@field group? peri.dist.Group The ranks (default: the world).
---@field env? peri.ShardingEnv The ranks with their hosts (default: of `group`).
---@field sharders? table[] ModuleSharders, and nothing else is sharded (default: those that the modules' classes name).
---@field bucket_bytes? integer Of gradients that are averaged together (default: 25 MiB).
---@field gradient_division? boolean Whether gradients of tables are divided by the number of ranks, as those of the dense part are (default: what `dist.ops.set_gradient_division` says; it is true until somebody sets it).
---@field qcomm_codecs_registry? table Fewer bits on the way between ranks (default: none).
---@field init_data_parallel? boolean false: you call `model:init_data_parallel()` before training (default: true).
---@field data_parallel_wrapper? table What averages dense gradients (default: DefaultDataParallelWrapper).

---What an optimizer of the dense part trains: dense parameters and this rank's shards of tables with the kernel
---`dense`. Fused tables are none.
---@return peri.Tensor[] # Of any shape.
function peri.DistributedModelParallel:dense_parameters() end

---Parameters that are equal on all ranks.
---@return peri.Tensor[] # Of any shape.
function peri.DistributedModelParallel:replicated_parameters() end

---Parameters that belong to no sharded module.
---
---Errors: a prefix that is no string.
---@param prefix? string Put before the names (default: none).
---@return table[] # `{ name =, tensor = }` each.
function peri.DistributedModelParallel:bare_named_parameters(prefix) end

---The optimizer of all fused tables: its learning rates hold at once, its states have the names of the unsharded
---model's tables.
---@return peri.nn.optim.CombinedOptimizer
function peri.DistributedModelParallel:fused_optimizer() end

---The learning rate of the fused tables from now on.
---
---Errors: what is no number.
---@param learning_rate number The rate.
function peri.DistributedModelParallel:set_fused_learning_rate(learning_rate) end

---Go back through what the model returned: afterwards fused tables are updated, and dense gradients are averages over
---the ranks. The same as `loss:backward(grad)`. Collective.
---@param loss peri.Tensor What the gradient is of: a scalar, or any shape with `grad`.
---@param grad? peri.Tensor The gradient of `loss`, of its shape (default: 1).
function peri.DistributedModelParallel:backward(loss, grad) end

---The names and tensors of everything that is trained; tables over ranks are ShardedTensors.
---
---Errors: within a pipeline's step, where tables and dense part are of different moments.
---@param prefix? string Put before the names (default: none).
---@return table
function peri.DistributedModelParallel:state_dict(prefix) end

---Take the numbers of a state dict, of any plan and number of ranks. Collective: all ranks load, or none.
---
---Errors: names or shapes that do not fit, all of them named.
---@param map table What `state_dict` returned.
---@param strict? boolean false: names may be missing (default: true).
function peri.DistributedModelParallel:load_state_dict(map, strict) end

---Save the model and the optimizers of its fused tables as a checkpoint. Collective.
---
---Errors: a path that is taken (unless `replace = true`) or cannot be written; nothing is left then.
---@param path string The checkpoint's folder.
---@param options? table `parts` (what else is saved), and the options of `peri.checkpoint.save` (default: none).
---@return string # The checkpoint's digest; with `async = true` a handle.
function peri.DistributedModelParallel:save(path, options) end

---Load a checkpoint, of any plan and number of ranks. Collective.
---
---Errors: a checkpoint that is damaged, or of another model; the error names what differs.
---@param path string The checkpoint's folder.
---@param options? table `parts`, and the options of `peri.checkpoint.load` (default: none).
---@return any # The `values` that were saved.
function peri.DistributedModelParallel:load(path, options) end

---A copy that shares nothing with the model, in evaluation mode. Collective.
---
---Errors: a device that cannot be used.
---@param device? string Where the copy is (default: where the model is).
---@return peri.DistributedModelParallel
function peri.DistributedModelParallel:copy(device) end

---Write changed rows of tables in files; afterwards the files are whole. Collective.
function peri.DistributedModelParallel:flush() end

---Runs a schedule: each step trains the next batch. Before the first step ranks compare their schedules, plans and
---modules. The pipelines with names of TorchRec's are this one with a schedule of that name:
---`peri.TrainPipelineSparseDist` and others take the same arguments but `schedule`.
---
---Errors: a schedule that breaks a rule (the error says which operations, over what, and what would help); a model that
---it does not go with.
---
---```lua
---peri.init()
---local model = nn.Linear { in_features = 2, out_features = 1 }
---local train = nn.Module()
---train.linear = model
---function train:forward(batch) return self.linear(batch):square():mean() end
---local optimizer = nn.optim.SGD { params = model:parameters(), lr = 0.1 }
---local pipeline = peri.pipeline.Pipeline { model = train, optimizer = optimizer,
---  schedule = peri.pipeline.schedules.base,
---  on_step = function(step) optimizer:set_lr(0.1 / step) end }
---local k = 0
---local function batches()
---  k = k + 1
---  return k <= 3 and peri.ones { 4, 2 } or nil
---end
---for loss, step in pipeline:run(batches) do assert(loss >= 0 and step <= 3) end
---print(optimizer:lr() == 0.1 / 3, pipeline:progress(batches)) --> true nil
---print(#pipeline:not_pipelined()) --> 0
---pipeline:set_schedule(peri.pipeline.schedules.base)
---pipeline:measure(true)
---pipeline:stop()
---pipeline:detach()
---pipeline:attach()
---print(pipeline:close()) --> 0
---local simple = peri.TrainPipelineBase { model = train, optimizer = optimizer }
---```
---@class peri.pipeline.Pipeline
---@overload fun(args: peri.pipeline.Pipeline.args): peri.pipeline.Pipeline
peri.pipeline.Pipeline = {}

---@class peri.pipeline.Pipeline.args
---@field model peri.nn.Module A DistributedModelParallel or a module; called with a batch, it returns the loss first.
---@field schedule peri.Schedule The schedule.
---@field optimizer? peri.nn.optim.Optimizer|false Of the dense part; `false`: it is not trained (default: it has no parameters).
---@field device? string Where batches are moved (default: they stay).
---@field on_step? fun(step: integer) Called before each step, which count from 1: sets learning rates (default: none).
---@field inputs? table<string, any> Module's path -> function(batch) that makes its input; `false`: not pipelined (default: found out).
---@field vote? boolean Ranks may have different numbers of batches; false: all have as many (default: true).
---@field empty_batch? fun(): any Makes a batch without samples (default: made of the first batch).
---@field stage? peri.pipeline.Stage If the model is one of several (default: none).

---Train on the next batch. Collective.
---
---Errors: what the model, the loader or another rank raises; the pipeline cannot go on then.
---@param batches fun(): any Returns the next batch, or nil.
---@return any # What the model returned: the loss, and up to two more, each a tensor or a table of tensors; nil: there are no more batches.
function peri.pipeline.Pipeline:progress(batches) end

---An iterator over steps, for a `for`: `for loss, step in pipeline:run(batches) do`.
---
---Errors: as of `progress`.
---@param batches fun(): any Returns the next batch, or nil.
---@return fun(): number, integer # The loss as a number, and the number of the step.
function peri.pipeline.Pipeline:run(batches) end

---Run this schedule from the next step on; what is in flight is trained first.
---
---Errors: a schedule that does not go with the model.
---@param schedule peri.Schedule The schedule.
function peri.pipeline.Pipeline:set_schedule(schedule) end

---Note when operations begin and end; `peri.pipeline.show.trace(pipeline)` makes JSON of it that Perfetto opens.
---
---Errors: what is no boolean.
---@param on? boolean Whether it is noted (default: false).
function peri.pipeline.Pipeline:measure(on) end

---Modules that run whole in the forward pass, and why. Known after the first step.
---@return table[] # `{ path =, reason = }` each.
function peri.pipeline.Pipeline:not_pipelined() end

---Ask for no more batches: what is loaded is trained by the next steps. For early stopping; one rank is enough.
function peri.pipeline.Pipeline:stop() end

---Forget batches that are loaded and not yet trained. All ranks alike.
---@return integer # How many.
function peri.pipeline.Pipeline:close() end

---Put the pipeline before the sharded modules of its model, which it is from the beginning.
function peri.pipeline.Pipeline:attach() end

---Let the model be as it was, until the next step.
function peri.pipeline.Pipeline:detach() end

---The simplest pipeline: load, forward, backward, optimizer, one batch after the other.
---
---Errors: as of Pipeline.
---@class peri.TrainPipelineBase: peri.pipeline.Pipeline
---@overload fun(args: table): peri.TrainPipelineBase
peri.TrainPipelineBase = {}

---A schedule: a list of operations in the order of a step, `{ "forward" }`, `{ "input_dist", ahead = 1, on = "dist" }`.
---An operation with `ahead = k` acts on the batch that is trained k steps later. Schedules are values: what changes one
---returns another. The library's are in `peri.pipeline.schedules` (`base`, `sparse_dist`, `fused_sparse_dist`,
---`prefetch_sparse_dist`, `semi_sync`, ...).
---
---Errors: an unknown operation or field; two operations of one name.
---
---```lua
---local schedule = peri.pipeline.schedules.sparse_dist
---local mine = schedule:set({ load = { ahead = 3 },
---  to_device = { ahead = 3 } }):with({ depth = 4 }):called("mine")
---print(mine.name, mine:check().staleness.tables, mine:hash() == schedule:hash(),
---  #mine:text() > 0) --> mine 0 false true
---local moved = schedule:move("zero_grad", { first = true }):retime({ load = 2 })
---print(moved.operations[1].name, #moved:facts() > 3) --> zero_grad true
---local clipped = schedule:insert({ "clip", run = function() end, reads = { "grads" },
---  changes = { "grads" } },
---  { before = "optimizer" })
---print(#clipped.operations - #schedule.operations,
---  #clipped:drop("clip").operations == #schedule.operations) --> 1 true
---print(peri.Schedule { name = "plain", { "load" }, { "forward" } }.name) --> plain
---```
---@class peri.Schedule
---@overload fun(source: table): peri.Schedule
peri.Schedule = {}

---What follows from the schedule: how old tables and dense part are when they are read, how many batches are in flight.
---
---Errors: two operations that do not go together, and over what.
---@param facts? table `dense_tables = true`: an optimizer of the dense part trains tables (default: none).
---@return table
function peri.Schedule:check(facts) end

---The schedule with an operation at another place.
---
---Errors: an operation or a place that is not there.
---@param name string Name of the operation.
---@param where table `{ first = true }`, `{ last = true }`, `{ before = name }` or `{ after = name }`.
---@param changes? table Fields of the operation that change too (default: none).
---@return peri.Schedule
function peri.Schedule:move(name, where, changes) end

---The schedule with a further operation.
---
---Errors: an operation whose name is taken; a place that is not there.
---@param o table The operation.
---@param where? table `{ first = true }`, `{ last = true }`, `{ before = name }` or `{ after = name }` (default: last).
---@return peri.Schedule
function peri.Schedule:insert(o, where) end

---The schedule without some operations.
---
---Errors: an operation that is not there.
---@param ... string Names of operations.
---@return peri.Schedule
function peri.Schedule:drop(...) end

---The schedule with other fields of operations.
---
---Errors: an operation or a field that is not there.
---@param changes table<string, table> Name of an operation -> fields.
---@return peri.Schedule
function peri.Schedule:set(changes) end

---The schedule whose operations act other numbers of batches ahead.
---
---Errors: an operation that is not there.
---@param aheads table<string, integer> Name of an operation -> how many batches ahead.
---@return peri.Schedule
function peri.Schedule:retime(aheads) end

---The schedule with other options: `depth`, `flush`, `staleness`, `live`, `grad`.
---
---Errors: an unknown option.
---@param changes table The options.
---@return peri.Schedule
function peri.Schedule:with(changes) end

---The schedule under another name.
---
---Errors: what is no name.
---@param name string The name.
---@return peri.Schedule
function peri.Schedule:called(name) end

---Everything that ranks must agree on.
---@return table[] # `{ what it is, text }` each.
function peri.Schedule:facts() end

---The schedule as text.
---@return string
function peri.Schedule:text() end

---16 hexadecimal digits, equal on ranks that run the same schedule.
---@return string
function peri.Schedule:hash() end
