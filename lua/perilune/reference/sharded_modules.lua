-- sharded_modules.lua: Sharded modules.
--
-- A sharded module has its tables in pieces on the ranks of a group, as a plan says, and does what the unsharded module
-- does. DistributedModelParallel makes them. It works in stages, which pipelines run one by one: `input_dist` sends ids
-- to the ranks that have their rows, `compute` looks them up and sends rows back, `output_dist` stands for the result.
-- Every rank of the group goes through the stages of its modules in the same order. docs/sharded_tables.md tells more.
--
-- In the stages, TorchRec's contexts may come before the other arguments; nothing is done with them.
---@meta

---@class peri.shard
local shard = {}

---What all sharded modules have. A class of your own below it fills in the stages `input_dist`, `lookup` and `output`;
---the rest is here.
---
---Errors: a stage that the class does not have; a stage that returns something other than an Awaitable.
---
---```lua
---local Half = peri.shard.ShardedModule:extend "Half"
---function Half:input_dist(x) return peri.NoWait(x) end
---function Half:lookup(dist) return peri.NoWait(dist * 0.5) end
---function Half:output(arrived) return arrived end
---local half = Half()
---print(half:forward(peri.ones { 1 }):item()) --> 0.5
---local ids = half:defer(peri.ones { 1 }):wait()
---half:prefetch(ids)
---print(half:compute_and_output_dist(half:create_context() and ids):item(),
---  half:output_dist(half:compute(ids)):item()) --> 0.5 0.5
---print(half:in_files(), half:sends_early(), #half:local_shards(), #half:replicas(),
---  half:fused_optimizer() == nil) --> false true 0 0 true
---half:own_parameter("part", nn.Parameter(peri.ones { 2 }))
---print(half:own_parameters()[1], half:sharded_parameter_names("path")[1], half:changes())
-----> part path.part 0 0
---half:tables_changed()
---half:settle()
---half:set_learning_rate(0.1)
---half:accumulate(false)
---half:apply_accumulated()
---half:try_copy_from(half)
---half:copy_from(half)
---print((pcall(half.copy, half)), peri.shard.ShardedModule.Context.class_name)
-----> false ShardedModuleContext
---print(peri.shard.ShardedModule.OutputAwaitable.is(half(peri.ones { 1 }))) --> true
---half:release()
---```
---@class peri.shard.ShardedModule: peri.nn.Module
shard.ShardedModule = {}

---Send ids to the ranks that have their rows. Collective. It takes what the unsharded module takes.
---@return peri.Awaitable # Its result is what `compute` takes.
function shard.ShardedModule:input_dist() end

---The same, but ids set out later, with those of other modules in one message: give what it returns to
---`FusedKJTListSplitsAwaitable`.
---@param a any As `input_dist`, at most four arguments.
---@param b? any The second (default: none).
---@param c? any The third (default: none).
---@param d? any The fourth (default: none).
---@return peri.Awaitable
function shard.ShardedModule:defer(a, b, c, d) end

---Bring the rows that a later batch needs from files into memory, in the background. Local.
---@param dist any The result of `input_dist`.
function shard.ShardedModule:prefetch(dist) end

---Look up what arrived and send rows back. Collective. For classes below; others call `compute`.
---@param dist any The result of `input_dist`.
---@return peri.Awaitable # Its result is what `output` takes.
function shard.ShardedModule:lookup(dist) end

---What the unsharded module would return, made of what came back. Local.
---@param arrived any The result of what `lookup` returned.
---@return any
function shard.ShardedModule:output(arrived) end

---Look up what arrived and send rows back, which set out at once. Collective. It uses `dist` up.
---@param dist any The result of `input_dist`.
---@return peri.Awaitable # What `output_dist` takes.
function shard.ShardedModule:compute(dist) end

---The result of the module, which waits when it is used. Local.
---@param rows peri.Awaitable What `compute` returned.
---@return peri.LazyAwaitable
function shard.ShardedModule:output_dist(rows) end

---`compute` and `output_dist`. Collective.
---@param dist any The result of `input_dist`.
---@return peri.LazyAwaitable
function shard.ShardedModule:compute_and_output_dist(dist) end

---TorchRec's: an object that schedules hand to the stages. What a batch needs is in what the stages return.
---@return any
function shard.ShardedModule:create_context() end

---All stages. Calling the module calls it. It waits for ids; rows are on their way when it returns. Collective.
---@param a any What the unsharded module takes, up to three arguments.
---@param b? any The second (default: none).
---@param c? any The third (default: none).
---@return any # What the unsharded module returns.
function shard.ShardedModule:forward(a, b, c) end

---Whether ids of a batch may leave before the batches before it are trained.
---@return boolean
---@return string|nil # Why not.
function shard.ShardedModule:sends_early() end

---Say that somebody wrote to the tables, beside a backward pass or loading: rows that were looked up before are old. On
---all ranks. Local.
function shard.ShardedModule:tables_changed() end

---Two counts that differ after the tables have changed: by what all ranks do alike, and on this rank by whatever.
---Local.
---@return integer
---@return integer
function shard.ShardedModule:changes() end

---Wait for whoever changes the tables in the background.
function shard.ShardedModule:settle() end

---While on, backward passes change no table until `apply_accumulated`; then all of them do, as one of a large batch
---would. All ranks alike.
---@param on? boolean On or off (default: off).
function shard.ShardedModule:accumulate(on) end

---Train the tables with all passes since `accumulate`. All ranks alike.
function shard.ShardedModule:apply_accumulated() end

---Register a parameter of which other ranks have other parts, or none.
---@param name string Its name.
---@param tensor peri.Tensor Any shape.
function shard.ShardedModule:own_parameter(name, tensor) end

---Names of such parameters.
---@return string[]
function shard.ShardedModule:own_parameters() end

---Tensors beside parameters that are equal on all ranks: they start with rank 0's numbers.
---@return peri.Tensor[] # Of any shapes, in the same order on all ranks.
function shard.ShardedModule:replicas() end

---Raise an error unless `copy_from` can take the unsharded module. Local; on all ranks before any copies.
---@param module peri.nn.Module The unsharded module.
function shard.ShardedModule:try_copy_from(module) end

---Take over this rank's part of what the unsharded module has learned. Local.
---@param module peri.nn.Module The unsharded module.
function shard.ShardedModule:copy_from(module) end

---The pieces of tables on this rank: `table`, `rows`, `cols`, `row_offset`, `col_offset`, `dense`, `cached`, `replica`,
---and functions such as `state(name)`, `read` and `write`.
---@return table[]
function shard.ShardedModule:local_shards() end

---The learning rate of tables that train themselves, from now on.
---@param learning_rate number The rate.
function shard.ShardedModule:set_learning_rate(learning_rate) end

---The optimizer of tables that train themselves.
---@return peri.nn.optim.KeyedOptimizer|nil # nil: there are none.
function shard.ShardedModule:fused_optimizer() end

---Whether some table is in files, on whatever rank.
---@return boolean
function shard.ShardedModule:in_files() end

---A module of the same plan with the same numbers. Collective.
---@param device? string Where it is (default: the same device).
---@return peri.shard.ShardedModule
function shard.ShardedModule:copy(device) end

---Names of what is sharded, as `state_dict` has them.
---@param prefix? string Put before the names, with a dot (default: none).
---@return string[]
function shard.ShardedModule:sharded_parameter_names(prefix) end

---Give memory and files back now; the module is of no use afterwards. Local.
function shard.ShardedModule:release() end

---TorchRec's context, of which nothing is used here. `create_context` makes it.
---
---Errors: nothing is raised.
---@class peri.shard.ShardedModule.Context
---@overload fun(): peri.shard.ShardedModule.Context
shard.ShardedModule.Context = {}

---Stands for the result of a sharded module. `output_dist` makes it.
---
---Errors: what is no Awaitable.
---@class peri.shard.ShardedModule.OutputAwaitable: peri.Awaitable
---@param module peri.shard.ShardedModule The module.
---@param exchange peri.Awaitable What `compute` returned.
---@overload fun(module: peri.shard.ShardedModule, exchange: peri.Awaitable): peri.shard.ShardedModule.OutputAwaitable
shard.ShardedModule.OutputAwaitable = {}
