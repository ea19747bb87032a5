-- pipeline_tools.lua: Pipelines: schedules by name, showing them, stages, operations of your own.
--
-- What belongs to the pipelines of the page `training`. docs/pipelines.md tells more.
---@meta

---@class peri.pipeline
local pipeline = {}
---@class peri.pipeline.schedules
local schedules = {}
---@class peri.pipeline.show
local show = {}
---@class peri.pipeline.cluster
local cluster = {}

---A schedule by its name in the library, or by the path of a file that returns one (or a function that does).
---
---Errors: a file that is not there, or that returns something else.
---
---```lua
---local schedules = peri.pipeline.schedules
---print(schedules.load("semi_sync").name, schedules.semi_sync(900):check().staleness.tables)
-----> semi_sync 1
---print(schedules.accumulate(4).name, schedules.prefetch_fused_2d(10).name)
-----> accumulate prefetch_fused_2d
---local first, last = schedules.one_f_one_b { stages = 2, micro_batches = 4 },
---  schedules.one_f_one_b { stages = 2, stage = 1,
---  micro_batches = 4 }
---peri.pipeline.check_stages { first, last }
---print(first:check().live.loss, last:check().live.loss) --> 2 1
---```
---@param path string The name or the path.
---@return peri.Schedule
function schedules.load(path) end

---The schedule `sparse_dist`, whose updates of tables and dense part are those of several batches, as of one large one.
---A last group of fewer is applied at the end of the data.
---
---Errors: a number below 1.
---@param num_steps? integer How many batches (default: 4).
---@return peri.Schedule
function schedules.accumulate(num_steps) end

---The schedule in which rows of the next batch are looked up before this one has updated the tables: they are one
---update old.
---
---Errors: a number below 0.
---@param start_batch? integer Up to this batch they are looked up after the update, and exact (default: 0).
---@return peri.Schedule
function schedules.semi_sync(start_batch) end

---The schedule for a DMPCollection (with its own `sync_interval = 0`): rows first in the step, rows in files fetched
---ahead, and averages over the replicas every few batches.
---
---Errors: a number below 1.
---@param sync_interval? integer Batches between two averages (default: 10).
---@return peri.Schedule
function schedules.prefetch_fused_2d(sync_interval) end

---The schedule of one stage of a model that is cut into stages: forward and backward passes of micro-batches in turn.
---In place of the table it takes a number: so many stages, of which this is the first.
---
---Errors: a stage that is not there; more than 16 stages, or 4096 micro-batches.
---@param args? peri.pipeline.schedules.one_f_one_b.args A number: so many stages, the first of them (default: all defaults).
---@return peri.Schedule
function schedules.one_f_one_b(args) end

---@class peri.pipeline.schedules.one_f_one_b.args
---@field stages? integer How many stages (default: 4).
---@field stage? integer Which one this is, from 0 (default: 0).
---@field micro_batches? integer How many batches are one step of the optimizer (default: 8).

---Check whether the schedules of all stages go together. A pipeline with a Stage does it by itself.
---
---Errors: stages that would wait for one another for ever, or would take batches for others; what is no list of
---Schedules.
---@param list peri.Schedule[] From the first stage to the last.
function pipeline.check_stages(list) end

---Make a kind of operation of your own, which schedules then use by its name. Within a schedule, `{ "name", run = ...,
---... }` is the same without a name for all.
---
---Errors: a name of the library's; an unknown field; a `makes` that is not a word of its own.
---
---```lua
---local pipeline, seen = peri.pipeline, 0
---pipeline.register("count", { run = function() seen = seen + 1 end, needs = { "grad" } })
---local train = nn.Module()
---train.linear = nn.Linear { in_features = 2, out_features = 1 }
---function train:forward(batch) return self.linear(batch):square():mean() end
---local ema, average_of, averages = pipeline.ema { params = train:named_parameters(),
---  decay = 0.5 }
---local schedule = pipeline.schedules.base:insert({ "count" }, { last = true }):insert(ema,
---  { last = true })
---local runner = pipeline.Pipeline { model = train,
---  optimizer = nn.optim.SGD { params = train:parameters(), lr = 0.1 }, schedule = schedule }
---for _ = 1, 2 do runner:progress(function() return peri.ones { 4, 2 } end) end
---print(seen, average_of(train.linear.weight):numel(),
---  averages:state_dict()["linear.bias"]:numel())
-----> 2 2 1
---```
---@param name string Its name.
---@param fields table `run` (function(context, pipeline)), lists `needs`, `makes`, `reads`, `changes`, and `posts` (`own1` to `own11`).
function pipeline.register(name, fields) end

---An operation that keeps a moving average of parameters: average = decay average + (1 - decay) parameter, after each
---update that it follows in a schedule. Averages begin with the numbers of the parameters.
---
---Errors: a decay out of 0..1; what is no list of tensors.
---@param args peri.pipeline.ema.args What to average.
---@return table # The operation, for `schedule:insert`.
---@return function # `function(parameter)`: its average.
---@return table # The averages, with `state_dict`, `check_state_dict` and `load_state_dict`.
function pipeline.ema(args) end

---@class peri.pipeline.ema.args
---@field params (peri.Tensor|table)[] Parameters of any shape, or `{ name =, tensor = }` as of `named_parameters`.
---@field decay? number How much stays of the average in a step (default: 0.999).
---@field name? string Name of the operation (default: `ema`).

---A model cut into stages, each on its own ranks, one behind the other. `stage.index` says which one this rank is of;
---the model of a stage is called as `model(batch, input)`, and the last one returns the loss. All stages load the same
---batches. All ranks make it together.
---
---Errors: ranks that cannot be cut into so many equal stages; a shape that is no function.
---
---```lua
---peri.init()
---local stage = peri.pipeline.Stage { stages = 1,
---  shape = function(batch) return { batch:size(1), 2 } end }
---local train = nn.Module()
---train.linear = nn.Linear { in_features = 2, out_features = 1 }
---function train:forward(batch) return self.linear(batch):square():mean() end
---local pipeline = peri.pipeline.Pipeline { model = train, stage = stage,
---  optimizer = nn.optim.SGD { params = train:parameters(),
---  lr = 0.1 }, schedule = peri.pipeline.schedules.one_f_one_b { stages = 1, micro_batches = 2 } }
---local n = 0
---for _ in pipeline:run(function() n = n + 1 return n <= 4 and peri.ones { 4, 2 }
---  or nil end) do end
---print(stage.index, n) --> 0 5
---```
---@class peri.pipeline.Stage
---@overload fun(args: peri.pipeline.Stage.args): peri.pipeline.Stage
pipeline.Stage = {}

---@class peri.pipeline.Stage.args
---@field stages integer How many stages: the ranks are cut into as many equal runs.
---@field group? peri.dist.Group The ranks of all stages (default: the world).
---@field shape function `function(batch)`: the shape of what the stage before makes of a batch. Not asked on the first stage.
---@field dtype? string Of what goes from stage to stage (default: f32).
---@field device? string Where it is (default: the rank's device).

---Makes batches on threads of their own, while steps compute. It is called for the next batch. Loaders of `peri.data`
---have such threads already (`num_workers`); this is for a loader of your own.
---
---Errors: a loader that uses what surrounds it; a loader's own errors, after the batches that it made before; a
---timeout.
---
---```lua
---local batches = peri.pipeline.DataLoadingThread { arguments = { n = 4 },
---  loader = function(arguments)
---  local peri, k = require "perilune", 0
---  return function()
---    k = k + 1
---    return k <= arguments.n and peri.full({ 1 }, k) or nil
---  end
---end }
---print(batches():item(), batches:skip(1):get_next_batch():item()) --> 1 3
---local position = batches:merge_state_dicts { batches:state_dict() }
---batches:go_to(1)
---print(batches:next():item(), batches:given(), position) --> 2 2 nil
---batches:load_state_dict(batches:state_dict())
---print(batches:check_state_dict {}) --> it is no position in a DataLoadingThread
---batches:stop()
---```
---@class peri.pipeline.DataLoadingThread
---@overload fun(args: peri.pipeline.DataLoadingThread.args): peri.pipeline.DataLoadingThread
pipeline.DataLoadingThread = {}

---@class peri.pipeline.DataLoadingThread.args
---@field loader any A function(arguments) that returns an iterator, without upvalues, or the name of a module that is such a function.
---@field arguments? any Plain values that it is called with (default: nil).
---@field num_workers? integer Threads; each calls the loader (default: 1).
---@field prefetch_factor? integer How many batches wait for each thread that there is, at most (default: 2).
---@field pin_memory? boolean In memory pinned for the device (default: true where batches are copied to one).
---@field device? string Where batches are moved when they are taken (default: they stay).
---@field timeout? number Seconds that taking a batch waits, at most (default: 300).
---@field global_batches? boolean Batches of all ranks together are the same on any number of ranks (default: false).

---The next batch. Calling the object calls it.
---@return any # nil: there are no more.
function pipeline.DataLoadingThread:get_next_batch() end

---The next batch; calling the object does the same.
---@return any # nil: there are no more.
function pipeline.DataLoadingThread:next() end

---How many batches were given, those that were left out among them.
---@return integer
function pipeline.DataLoadingThread:given() end

---Go on behind so many batches: what is on its way is given up.
---
---Errors: a number that is no count.
---@param n integer How many batches from the first one on are left out.
function pipeline.DataLoadingThread:go_to(n) end

---Where it is, for checkpoints.
---@return table
function pipeline.DataLoadingThread:state_dict() end

---What keeps a position from being loaded.
---
---Errors: none.
---@param dict any What `state_dict` returned.
---@return string|nil # The reason in words; nil: it can be loaded.
function pipeline.DataLoadingThread:check_state_dict(dict) end

---Go on behind a position.
---
---Errors: what is no position in one.
---@param dict table What `state_dict` returned.
function pipeline.DataLoadingThread:load_state_dict(dict) end

---One position of those of several ranks, to go on with on another number of ranks. Checkpoints ask for it.
---
---Errors: what is no list.
---@param list table[] Positions, one for each rank.
---@return table|nil # The position; nil and why: there is none, as with `global_batches = false`.
function pipeline.DataLoadingThread:merge_state_dicts(list) end

---Leave batches out.
---
---Errors: a number that is no count.
---@param n integer How many.
---@return peri.pipeline.DataLoadingThread # Itself.
function pipeline.DataLoadingThread:skip(n) end

---Want no more: batches that wait are given up, and the threads end.
---
---Errors: a thread that does not end in time.
---@param timeout? number Seconds to wait for them (default: 5).
function pipeline.DataLoadingThread:stop(timeout) end

---The operations of a schedule as a table: place, operation, batch, stream, when.
---
---Errors: what is no Schedule.
---
---```lua
---local show, schedule = peri.pipeline.show, peri.pipeline.schedules.base
---print(show.table_of(schedule):match "schedule '(%w+)'",
---  show.check(schedule):match "batches in flight +%d") --> base batches in flight  2
---local times = { load = 3, forward = 1, backward = 2 }
---print(#show.simulate(schedule, times, 4) > 20,
---  show.simulation(schedule, times):match "a step takes %d") --> true a step takes 5
---print(#show.hints(schedule, times, true)) --> 0
---```
---@param schedule peri.Schedule The schedule.
---@return string
function show.table_of(schedule) end

---What follows from a schedule, as text: batches in flight, staleness, events, what is live at once.
---
---Errors: a schedule that breaks a rule.
---@param schedule peri.Schedule The schedule.
---@return string
function show.check(schedule) end

---A schedule as it would run if its operations took given times: each begins when its stream is free, and all that it
---waits for is done.
---
---Errors: an operation that the schedule has not; a time below 0.
---@param schedule peri.Schedule The schedule.
---@param times table<string, number> Operation -> milliseconds; 1 for those that are not there.
---@param steps integer How many steps.
---@return table[] # `{ operation =, batch =, step =, from =, to =, waits_for = }` each.
function show.simulate(schedule, times, steps) end

---A simulated step as text, with what it waits for and what would make it shorter.
---
---Errors: as of `simulate`.
---@param schedule peri.Schedule The schedule.
---@param times table<string, number> Operation -> milliseconds; 1 for those that are not there.
---@param alone? boolean true: all operations share one stream, as on a CPU (default: false).
---@return string
function show.simulation(schedule, times, alone) end

---What would make a simulated step shorter: operations that act further ahead, or beside the rest.
---
---Errors: as of `simulate`.
---@param schedule peri.Schedule The schedule.
---@param times table<string, number> Operation -> milliseconds; 1 for those that are not there.
---@param alone? boolean true: all operations share one stream, as on a CPU (default: false).
---@return table[] # `{ words =, step = milliseconds, stale = }` each, the best first.
function show.hints(schedule, times, alone) end

---The mean time of each operation of a pipeline that was measured.
---
---Errors: what is no Pipeline.
---
---```lua
---peri.init()
---local train, show = nn.Module(), peri.pipeline.show
---train.linear = nn.Linear { in_features = 2, out_features = 1 }
---function train:forward(batch) return self.linear(batch):square():mean() end
---local pipeline = peri.TrainPipelineBase { model = train,
---  optimizer = nn.optim.SGD { params = train:parameters(), lr = 0.1 } }
---pipeline:measure(true)
---for _ = 1, 3 do pipeline:progress(function() return peri.ones { 4, 2 } end) end
---print(show.times(pipeline).forward > 0, show.compare(pipeline).measured > 0,
---  #show.trace(pipeline) > 100) --> true true true
---local path = os.tmpname()
---local found = show.write(pipeline, path)
---os.remove(path)
---print(found.steps > 0, #show.waits_text(found) > 0, show.waits(pipeline).steps) --> true true 3
---```
---@param pipeline peri.pipeline.Pipeline The pipeline.
---@return table<string, number> # Operation -> milliseconds.
function show.times(pipeline) end

---How long measured steps took beside what is predicted of the times of their operations.
---
---Errors: what is no Pipeline.
---@param pipeline peri.pipeline.Pipeline The pipeline.
---@return table|nil # Milliseconds: `measured`, `operations` (their sum), `predicted`, `apart` (no stream waits); nil before two steps.
function show.compare(pipeline) end

---What this rank has measured, as JSON that Perfetto opens.
---
---Errors: a pipeline of which nothing was measured.
---@param pipeline peri.pipeline.Pipeline The pipeline.
---@return string
function show.trace(pipeline) end

---The same of all ranks, with their waits, into a file that rank 0 writes. Ends the measurement. Collective.
---
---Errors: a pipeline of which nothing was measured; a file that cannot be written.
---@param pipeline peri.pipeline.Pipeline The pipeline.
---@param path string The file.
---@return table # What `waits` returns.
function show.write(pipeline, path) end

---Where the measured steps waited, and for which rank. Ends the measurement. Collective.
---
---Errors: a pipeline of which nothing was measured.
---@param pipeline peri.pipeline.Pipeline The pipeline.
---@return table # `steps`, `step_ms`, `clocks_ms` (how far clocks may be wrong), `ranks` (lists of `{ operation =, ms =, hint =, ... }`).
function show.waits(pipeline) end

---What `show.waits` returns, as text.
---
---Errors: what `waits` did not return.
---@param found table What `waits` returned.
---@param least? number Shortest wait that is told, as a part of a step (default: 0.01).
---@param most? integer Rows for each rank, at most (default: 6).
---@return string
function show.waits_text(found, least, most) end

---How long a step would take on the ranks of a planner's topology, which need not be there.
---
---Errors: a planner that has not planned; an operation that the schedule has not; steps out of 4..1000.
---
---```lua
---local plan, cluster = peri.plan, peri.pipeline.cluster
---local planner = plan.EmbeddingShardingPlanner { topology = plan.Topology { world_size = 2 },
---  batch_size = 64 }
---planner:plan(plan.describe.of { tables = { { name = "t", num_embeddings = 1000,
---  embedding_dim = 16 } } })
---local found = cluster.simulate { planner = planner, schedule = peri.pipeline.schedules.base,
---  times = { forward = 1 }, steps = 4 }
---print(found.ranks, found.step_ms >= 1, cluster.cells({ found })[1][2],
---  #cluster.trace(found) > 100) --> 2 true ms a step true
---```
---@param args peri.pipeline.cluster.simulate.args The plan, the schedule and times.
---@return table # `step_ms`, `samples_per_s`, `busy_ms`, `exposed_ms` (waits for exchanges), `imbalance`, `slowest` (a rank), `links`, ...
function cluster.simulate(args) end

---@class peri.pipeline.cluster.simulate.args
---@field planner peri.plan.EmbeddingShardingPlanner One that has planned.
---@field schedule peri.Schedule The schedule.
---@field times? table<string, number> Operation -> milliseconds that tables do not decide (default: 0 each).
---@field dense_bytes? integer Bytes of the dense part's gradients (default: 0).
---@field steps? integer How many steps (default: 12).

---Several simulations as rows of text, heads first.
---
---Errors: what `simulate` did not return.
---@param list table[] What `simulate` returned, of several worlds.
---@return string[][]
function cluster.cells(list) end

---A simulation as JSON that Perfetto opens: up to 64 ranks, with their streams and links.
---
---Errors: what `simulate` did not return.
---@param simulation table What `simulate` returned.
---@return string
function cluster.trace(simulation) end
