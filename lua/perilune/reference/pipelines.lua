-- pipelines.lua: Pipelines with names, and their parts.
--
-- Each of TorchRec's pipelines is a Pipeline (page `training`) that runs a schedule of the library. All take the same
-- arguments; docs/pipelines.md tells what each overlaps with what, and when it helps.
---@meta

---@class peri
local peri = {}
---@class peri.pipeline
local pipeline = {}

---Runs `sparse_dist`: while a batch is trained, ids of the next one travel, and the one after it is loaded.
---
---Errors: an argument that is unknown or of a wrong kind; as of Pipeline.
---
---```lua
---peri.init()
---local train = nn.Module()
---train.linear = nn.Linear { in_features = 2, out_features = 1 }
---function train:forward(batch) return self.linear(batch):square():mean() end
---local optimizer = nn.optim.SGD { params = train:parameters(), lr = 0.1 }
---local function batches(n)
---  return function() n = n - 1 return n >= 0 and peri.ones { 4, 2 } or nil end
---end
---local names = {}
---for i, name in ipairs { "TrainPipelineSparseDist", "TrainPipelineSparseDistLite",
---  "TrainPipelineFusedSparseDist", "PrefetchTrainPipelineSparseDist", "EvalPipelineSparseDist",
---  "EvalPipelineFusedSparseDist" } do
---  names[i] = peri[name] { model = train, optimizer = not name:match "Eval" and optimizer
---    or nil }.schedule.name
---end
---print(table.concat(names, " ", 1, 3)) --> sparse_dist sparse_dist_lite fused_sparse_dist
---print(table.concat(names, " ", 4))
-----> prefetch_sparse_dist eval_sparse_dist eval_fused_sparse_dist
---local steps = 0
---for _ in peri.TrainPipelineSparseDist({ model = train,
---  optimizer = optimizer }):run(batches(2)) do
---  steps = steps + 1
---end
---for _ in peri.TrainPipelineSemiSync({ model = train, optimizer = optimizer,
---  start_batch = 1 }):run(batches(2)) do
---  steps = steps + 1
---end
---local group = peri.GradientAccumulationPipeline { model = train, optimizer = optimizer,
---  num_steps = 2 }
---for _ in group:run(batches(2)) do steps = steps + 1 end
---print(steps) --> 6
---```
---@class peri.TrainPipelineSparseDist: peri.pipeline.Pipeline
---@overload fun(args: peri.TrainPipelineSparseDist.args): peri.TrainPipelineSparseDist
peri.TrainPipelineSparseDist = {}

---@class peri.TrainPipelineSparseDist.args
---@field model peri.nn.Module A DistributedModelParallel or a module; called with a batch, it returns the loss first.
---@field optimizer? peri.nn.optim.Optimizer|false Of the dense part; `false`: it is not trained (default: it has no parameters).
---@field device? string Where batches are moved (default: they stay).
---@field schedule? fun(step:integer) Called before each step, which count from 1: sets learning rates (default: none).
---@field inputs? table<string, any> Module's path -> function(batch) that makes its input; `false`: not pipelined (default: found out).
---@field vote? boolean Ranks may have different numbers of batches; false: all have as many (default: true).
---@field empty_batch? fun():any Makes a batch without samples (default: made of the first batch).

---Runs `sparse_dist_lite`: one batch in flight, the next is loaded meanwhile. It takes no more memory than a plain
---loop.
---
---Errors: as of TrainPipelineSparseDist.
---@class peri.TrainPipelineSparseDistLite: peri.pipeline.Pipeline
---@overload fun(args?: peri.TrainPipelineSparseDist.args): peri.TrainPipelineSparseDistLite
peri.TrainPipelineSparseDistLite = {}

---Runs `fused_sparse_dist`: as `sparse_dist`, with lookups on a stream of their own.
---
---Errors: as of TrainPipelineSparseDist.
---@class peri.TrainPipelineFusedSparseDist: peri.pipeline.Pipeline
---@overload fun(args?: peri.TrainPipelineSparseDist.args): peri.TrainPipelineFusedSparseDist
peri.TrainPipelineFusedSparseDist = {}

---Runs `prefetch_sparse_dist`, for tables in files: rows of the next batch come into memory while this one is trained.
---
---Errors: as of TrainPipelineSparseDist.
---@class peri.PrefetchTrainPipelineSparseDist: peri.pipeline.Pipeline
---@overload fun(args?: peri.TrainPipelineSparseDist.args): peri.PrefetchTrainPipelineSparseDist
peri.PrefetchTrainPipelineSparseDist = {}

---Runs `eval_sparse_dist`: nothing is trained, nothing recorded for a backward pass.
---
---Errors: as of TrainPipelineSparseDist.
---@class peri.EvalPipelineSparseDist: peri.pipeline.Pipeline
---@overload fun(args?: peri.TrainPipelineSparseDist.args): peri.EvalPipelineSparseDist
peri.EvalPipelineSparseDist = {}

---Runs `eval_fused_sparse_dist`: as `eval_sparse_dist`, with rows of the next batch on their way while this one
---computes.
---
---Errors: as of TrainPipelineSparseDist.
---@class peri.EvalPipelineFusedSparseDist: peri.pipeline.Pipeline
---@overload fun(args?: peri.TrainPipelineSparseDist.args): peri.EvalPipelineFusedSparseDist
peri.EvalPipelineFusedSparseDist = {}

---Runs `semi_sync`: rows of the next batch are looked up before this one has updated the tables, and are one update
---old.
---
---Errors: as of TrainPipelineSparseDist.
---@class peri.TrainPipelineSemiSync: peri.pipeline.Pipeline
---@overload fun(args: peri.TrainPipelineSemiSync.args): peri.TrainPipelineSemiSync
peri.TrainPipelineSemiSync = {}

---@class peri.TrainPipelineSemiSync.args
---@field model peri.nn.Module As of TrainPipelineSparseDist, with all that follows.
---@field optimizer? peri.nn.optim.Optimizer|false Of the dense part (default: it has no parameters).
---@field device? string Where batches are moved (default: they stay).
---@field schedule? fun(step:integer) Called before each step (default: none).
---@field inputs? table<string, any> Module's path -> function(batch) (default: found out).
---@field vote? boolean Ranks may have different numbers of batches (default: true).
---@field empty_batch? fun():any Makes a batch without samples (default: made of the first batch).
---@field start_batch? integer Up to this batch rows are looked up after the update, and exact (default: 900).

---Runs `accumulate`: tables and dense part are updated once for `num_steps` batches, as by one large batch.
---
---Errors: as of TrainPipelineSparseDist; num_steps below 1.
---@class peri.GradientAccumulationPipeline: peri.pipeline.Pipeline
---@overload fun(args: peri.GradientAccumulationPipeline.args): peri.GradientAccumulationPipeline
peri.GradientAccumulationPipeline = {}

---@class peri.GradientAccumulationPipeline.args
---@field model peri.nn.Module As of TrainPipelineSparseDist, with all that follows.
---@field optimizer? peri.nn.optim.Optimizer|false Of the dense part (default: it has no parameters).
---@field device? string Where batches are moved (default: they stay).
---@field schedule? fun(step:integer) Called before each step (default: none).
---@field inputs? table<string, any> Module's path -> function(batch) (default: found out).
---@field vote? boolean Ranks may have different numbers of batches (default: true).
---@field empty_batch? fun():any Makes a batch without samples (default: made of the first batch).
---@field num_steps? integer How many batches one update is of (default: 1).

---Where in a batch an argument of a module comes from: `{ "sparse_features" }`, `{ "x", 2 }`, `{}` (the batch itself).
---As text: `batch.x[2]`.
---
---Errors: a path that is no list; a batch that lacks a field which the first one had.
---
---```lua
---local ArgInfo = peri.pipeline.ArgInfo
---local batch = { x = { 1, { y = peri.ones { 2 } } } }
---local info = ArgInfo.find(batch, batch.x[2].y)
---print(tostring(info), info:of(batch) == batch.x[2].y, ArgInfo.find(batch, {}),
---  ArgInfo(nil, 5):of(batch)) --> batch.x[2].y true nil 5
---```
---@class peri.pipeline.ArgInfo
---@param steps? any[] Names of fields and places in lists, from the batch on (default: a constant).
---@param constant? any The argument, if it is always this (default: nil).
---@overload fun(steps?: any[], constant?: any): peri.pipeline.ArgInfo
pipeline.ArgInfo = {}

---Find out where an argument comes from, at most three fields deep. It is looked for by its identity; numbers, strings
---and booleans are taken for constants.
---
---Errors: none.
---@param batch any The batch.
---@param value any The argument.
---@return peri.pipeline.ArgInfo|nil # nil: it does not come from the batch.
function pipeline.ArgInfo.find(batch, value) end

---The argument, of another batch.
---
---Errors: a field that this batch lacks.
---@param batch any The batch.
---@return any
function pipeline.ArgInfo:of(batch) end

---What a pipeline puts before a sharded module: it finds out what of a batch the module is called with, by the first
---call. A pipeline makes them; `pipeline.forwards` is the list.
---
---Errors: what is no sharded module.
---
---```lua
---local ShardedModule, pipeline = peri.shard.ShardedModule, peri.pipeline
---local Half = ShardedModule:extend "Half"
---function Half:input_dist(x) return peri.NoWait(x) end
---function Half:lookup(dist) return peri.NoWait(dist * 0.5) end
---function Half:output(arrived) return arrived end
---local before = pipeline.PrefetchPipelinedForward(Half(), "half", 1)
---print(pipeline.BaseForward.is(before), before.path,
---  pipeline.PipelinedForward(Half(), "half", 1):forward(peri.ones { 1 }):item())
-----> true half 0.5
---print(pipeline.TrainPipelineContext(1).index, #pipeline.PrefetchTrainPipelineContext(2).dists)
-----> -1 2
---```
---@class peri.pipeline.BaseForward
---@param module peri.shard.ShardedModule The module.
---@param path string Its path within the model.
---@param index integer Its number among those of the pipeline, from 1.
---@param given? function `function(batch)` that makes what the module is called with (default: found out).
---@overload fun(module: peri.shard.ShardedModule, path: string, index: integer, given?: function): peri.pipeline.BaseForward
pipeline.BaseForward = {}

---The same of a module whose ids, and perhaps rows, are on their way before its forward pass.
---
---Errors: what is no sharded module.
---@class peri.pipeline.PipelinedForward: peri.pipeline.BaseForward
---@param module peri.shard.ShardedModule The module.
---@param path string Its path within the model.
---@param index integer Its number among those of the pipeline, from 1.
---@param given? function `function(batch)` that makes what the module is called with (default: found out).
---@overload fun(module: peri.shard.ShardedModule, path: string, index: integer, given?: function): peri.pipeline.PipelinedForward
pipeline.PipelinedForward = {}

---The module's result: of what arrived in a step of the pipeline; outside of one, it runs whole. A pipelined module
---calls it.
---
---Errors: an argument other than what was sent.
---@param a any The first argument.
---@param b? any The second (default: none).
---@param c? any The third (default: none).
---@return any
function pipeline.PipelinedForward:forward(a, b, c) end

---As `PipelinedForward`, of a module whose rows a schedule brings into memory.
---
---Errors: what is no sharded module.
---@class peri.pipeline.PrefetchPipelinedForward: peri.pipeline.PipelinedForward
---@param module peri.shard.ShardedModule The module.
---@param path string Its path within the model.
---@param index integer Its number among those of the pipeline, from 1.
---@param given? function `function(batch)` that makes what the module is called with (default: found out).
---@overload fun(module: peri.shard.ShardedModule, path: string, index: integer, given?: function): peri.pipeline.PrefetchPipelinedForward
pipeline.PrefetchPipelinedForward = {}

---What a pipeline keeps of a batch in flight: `index` (its number, from 0), `batch`, `loss`, `own` (for operations of
---your own), and others. A pipeline makes them.
---
---Errors: a number that is no count.
---@class peri.pipeline.TrainPipelineContext
---@param modules integer How many modules are pipelined.
---@overload fun(modules: integer): peri.pipeline.TrainPipelineContext
pipeline.TrainPipelineContext = {}

---As `TrainPipelineContext`, for schedules with a prefetch.
---
---Errors: a number that is no count.
---@class peri.pipeline.PrefetchTrainPipelineContext: peri.pipeline.TrainPipelineContext
---@param modules integer How many modules are pipelined.
---@overload fun(modules: integer): peri.pipeline.PrefetchTrainPipelineContext
pipeline.PrefetchTrainPipelineContext = {}
