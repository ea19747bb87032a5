-- comm_ops.lua: Exchanges of embeddings as functions.
--
-- TorchRec's `comm_ops`. Each takes a table of named arguments and returns an Awaitable of its result. Results are
-- recorded on the gradient tape; gradients travel back in the backward pass. All are collective: every rank of the
-- group calls them, in the same order. Tensors are f32. Arguments that all of them take beside their own:
--
-- - `group`: the ranks (default: the world);
-- - `codecs`: a QuantizedCommCodecs, how numbers travel (default: as f32);
-- - `gradient_division`: whether the gradient that comes back is divided by the number of ranks (default: what
--   `set_gradient_division` says);
-- - `tag`: a whole number on which the ranks must agree, so that mistakes show (default: 0).
--
-- In shapes, W is the number of ranks, B this rank's samples, D a number of columns. In the examples the world is one
-- rank.
---@meta

---@class peri.dist
local dist = {}
---@class peri.dist.ops
local ops = {}

---Send pooled embeddings to the ranks whose samples they are. `a2a_pooled_embs_tensor` is [samples of all ranks,
---columns of this rank]; `batch_size_per_rank` says how many samples, `dim_sum_per_rank` how many columns each rank
---has.
---
---Errors: an argument that is missing or unknown; lists without an entry for each rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.alltoall_pooled { a2a_pooled_embs_tensor = peri.ones { 2, 3 },
---  batch_size_per_rank = { 2 },
---  dim_sum_per_rank = { 3 } }:wait():numel()) --> 6
---```
---@param args table `a2a_pooled_embs_tensor`, `batch_size_per_rank`, `dim_sum_per_rank`; optional: `group`, `codecs`, `gradient_division`, `tag`, as said at the top of the page.
---@return peri.Awaitable # Of `[B, columns of all ranks]`.
function ops.alltoall_pooled(args) end

---As `alltoall_pooled`, with different numbers of samples for each feature. `a2a_pooled_embs_tensor` has one dimension:
---by rank, feature, sample, column. The lists are `batch_size_per_rank_per_feature` (for each rank its samples of each
---feature of this rank), `batch_size_per_feature_pre_a2a` (this rank's samples of each feature of all ranks) and
---`emb_dim_per_rank_per_feature` (for each rank the columns of its features).
---
---Errors: an argument that is missing or unknown; lists without an entry for each rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.variable_batch_alltoall_pooled { a2a_pooled_embs_tensor = peri.ones { 6 },
---  batch_size_per_rank_per_feature = { { 3 } }, batch_size_per_feature_pre_a2a = { 3 },
---  emb_dim_per_rank_per_feature = { { 2 } } }:wait():numel()) --> 6
---```
---@param args table `a2a_pooled_embs_tensor` and the three lists; optional: `group`, `codecs`, `gradient_division`, `tag`, as said at the top of the page.
---@return peri.Awaitable # Of one dimension.
function ops.variable_batch_alltoall_pooled(args) end

---Deal the rows of matrices to the ranks, as evenly as possible: the first ranks get one row more. `inputs` is a list
---of matrices [rows of all ranks, columns], which lie side by side. Which columns each rank has is said by `out_split`
---(one number for each rank), or by `per_rank_split_lengths` (for each rank the list of the columns of its inputs).
---Here gradients are not divided unless `gradient_division` is given.
---
---Errors: an argument that is missing or unknown; lists without an entry for each rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.alltoallv { inputs = { peri.ones { 2, 3 } }, out_split = { 3 } }:wait()[1]:numel())
-----> 6
---```
---@param args table `inputs`, `out_split` or `per_rank_split_lengths`; optional: `group`, `codecs`, `gradient_division`, `tag`, as said at the top of the page.
---@return peri.Awaitable # Of a list with a tensor for each rank: `[this rank's rows, columns of that rank]`.
function ops.alltoallv(args) end

---Each rank has a tensor for every rank; this rank gets the sum of those that are for it.
---
---Errors: an argument that is missing or unknown; lists without an entry for each rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.reduce_scatter_pooled { inputs = { peri.ones { 2, 3 } } }:wait():numel()) --> 6
---```
---@param args table `inputs`: a tensor for each rank, alike on all ranks; optional: `group`, `codecs`, `gradient_division`, `tag`, as said at the top of the page.
---@return peri.Awaitable # Of the shape of one.
function ops.reduce_scatter_pooled(args) end

---Add up one tensor of each rank; this rank gets its rows of the sum: B of them, the same number on all ranks.
---
---Errors: an argument that is missing or unknown; lists without an entry for each rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.reduce_scatter_base_pooled { input = peri.ones { 2, 3 } }:wait():numel()) --> 6
---```
---@param args table `input`: `[W * B, ...]`; optional: `group`, `codecs`, `gradient_division`, `tag`, as said at the top of the page.
---@return peri.Awaitable # Of `[B, ...]`.
function ops.reduce_scatter_base_pooled(args) end

---As `reduce_scatter_base_pooled`, with a number of rows for each rank: `input_splits`.
---
---Errors: an argument that is missing or unknown; lists without an entry for each rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.reduce_scatter_v_pooled { input = peri.ones { 2, 3 },
---  input_splits = { 2 } }:wait():numel())
-----> 6
---```
---@param args table `input`, `input_splits`: rows of each rank; optional: `group`, `codecs`, `gradient_division`, `tag`, as said at the top of the page.
---@return peri.Awaitable # Of `[B, ...]`.
function ops.reduce_scatter_v_pooled(args) end

---As `reduce_scatter_v_pooled`, with different numbers of samples for each feature. `input` has one dimension: by rank,
---feature, sample, column. `batch_size_per_rank_per_feature` has for each rank its samples of each feature,
---`embedding_dims` the columns of each feature.
---
---Errors: an argument that is missing or unknown; lists without an entry for each rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.reduce_scatter_v_per_feature_pooled { input = peri.ones { 6 },
---  batch_size_per_rank_per_feature = { { 3 } },
---  embedding_dims = { 2 } }:wait():numel()) --> 6
---```
---@param args table `input`, `batch_size_per_rank_per_feature`, `embedding_dims`; optional: `group`, `codecs`, `gradient_division`, `tag`, as said at the top of the page.
---@return peri.Awaitable # Of one dimension.
function ops.reduce_scatter_v_per_feature_pooled(args) end

---The tensors of all ranks, one after the other.
---
---Errors: an argument that is missing or unknown; lists without an entry for each rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.all_gather_base_pooled { input = peri.ones { 2, 3 } }:wait():numel()) --> 6
---```
---@param args table `input`: `[B, ...]`; optional: `group`, `codecs`, `gradient_division`, `tag`, as said at the top of the page.
---@return peri.Awaitable # Of `[W * B, ...]`.
function ops.all_gather_base_pooled(args) end

---Send a row for each id back to the rank that sent the id. Needed are `a2a_sequence_embs_tensor` [ids received, D];
---`lengths_after_sparse_data_all2all`, how many ids each bag has that was received, i32 or i64 [features, samples of
---all ranks] or flat; `input_splits`, ids sent to each rank; `output_splits`, ids received from each rank; and
---`batch_size_per_rank`, the samples of each rank, or, for a variable batch, `stride_per_key_per_rank`, for each
---feature the samples of each rank. Optional are `num_features` (default: the rows of the lengths; needed where they
---are flat and the batch is fixed) and `stagger` (default: 1), as in `KJTAllToAll`.
---
---Errors: an argument that is missing or unknown; lists without an entry for each rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.alltoall_sequence { a2a_sequence_embs_tensor = peri.ones { 3, 2 },
---  lengths_after_sparse_data_all2all = peri.tensor({ 1, 2 }, "i32"),
---  input_splits = { 3 }, output_splits = { 3 }, batch_size_per_rank = { 2 },
---  num_features = 1 }:wait():numel())
---  --> 6
---```
---@param args table The names above; optional: `group`, `codecs`, `gradient_division`, `tag`, as said at the top of the page.
---@return peri.Awaitable # Of `[ids sent, D]`.
function ops.alltoall_sequence(args) end

---Rows in another order: row i of the result is row `permutation[i]`. Recorded on the tape.
---
---Errors: a permutation that has not each row once.
---
---```lua
---print(peri.dist.ops.unbucketize(peri.tensor { { 5 }, { 6 } },
---  peri.tensor({ 1, 0 }, "i64")):item(0))
-----> 6
---```
---@param rows peri.Tensor `[n, D]`.
---@param permutation peri.Tensor i64 `[n]`: each of 0 .. n - 1 once.
---@return peri.Tensor # `[n, D]`.
function ops.unbucketize(rows, permutation) end

---Set whether gradients that exchanges bring back are divided by the number of ranks. At first they are: then the
---gradient of a table is that of the mean of the ranks' losses. Local; all ranks must set the same.
---
---Errors: what is neither true nor false.
---
---```lua
---peri.dist.sim.run(1, function()
---  peri.dist.ops.set_gradient_division(false)
---  print(peri.dist.get_gradient_division()) --> false
---end)
---```
---@param on boolean Whether they are.
---@param group? peri.dist.Group For exchanges of this group (default: for exchanges of all groups that nothing is set for).
function ops.set_gradient_division(on, group) end

---What `set_gradient_division` has set.
---
---Errors: what is no group.
---@param group? peri.dist.Group Of exchanges of this group (default: of this rank's script).
---@return boolean
function dist.get_gradient_division(group) end

---Averages the gradients of parameters over ranks, in buckets that travel during the backward pass.
---DistributedModelParallel has one of its own; this class is for scripts without it. Every backward pass that reaches a
---parameter ends when all gradients are averages. Making it is collective.
---
---Errors: a parameter that is no leaf, or comes twice; parameters that differ between ranks.
---
---```lua
---local x = peri.ones({ 2 }):requires_grad()
---local reducer = peri.dist.Reducer { group = peri.init(), params = { x } }
---local y = x * 3
---reducer:watch(y)
---reducer:enable(true)
---y:sum():backward()
---reducer:defer(false)
---reducer:finish()
---reducer:detach()
---reducer:release()
---print(x:grad():item(0)) --> 3
---```
---@class peri.dist.Reducer
---@overload fun(args: peri.dist.Reducer.args): peri.dist.Reducer
dist.Reducer = {}

---@class peri.dist.Reducer.args
---@field group peri.dist.Group The ranks.
---@field params peri.Tensor[] Leaves of any shape, in the same order on all ranks.
---@field bucket_bytes? integer The most bytes of a bucket; 0: 25 MiB, at most a quarter of all (default: 0).

---Let passes through the operation that made a tensor end with the averages, too, whether or not they reach a
---parameter.
---@param tensor peri.Tensor Any shape.
function dist.Reducer:watch(tensor) end

---Take part in the averages without a backward pass, on a rank that has none while others have one; and wait for
---averages that `defer` has let set out. Collective.
function dist.Reducer:finish() end

---Set whether backward passes end with averages. Switch it off for all passes before a step but the last, whose
---gradients are then added up without being sent. On all ranks alike.
---@param on? boolean On or off (default: true).
function dist.Reducer:enable(on) end

---Let backward passes end when the averages have set out; `finish` waits for them, before the next pass. All ranks
---alike.
---@param on? boolean On or off (default: false).
function dist.Reducer:defer(on) end

---Let go of all parameters: their gradients are averaged no more, and another Reducer may take them. Call it between
---two passes, on all ranks.
function dist.Reducer:detach() end

---Give its memory back now. It cannot be used afterwards.
function dist.Reducer:release() end
