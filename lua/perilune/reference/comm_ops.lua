-- comm_ops.lua: Exchanges of embeddings as functions.
--
-- TorchRec's `comm_ops`. Each takes named arguments and returns an Awaitable. Results are on the gradient tape;
-- gradients travel back in the backward pass. All are collective. Arguments that all of them take: `group`, the ranks
-- (default: the world); `codecs`, a QuantizedCommCodecs (default: f32 on the wire); `gradient_division`, whether the
-- gradient that comes back is divided by the number of ranks (default: see `set_gradient_division`); `tag`, a number on
-- which the ranks must agree.
--
-- In shapes, W is the number of ranks, B this rank's samples, D a number of columns. In the examples the world is one
-- rank.
---@meta

---@class peri.dist
local dist = {}
---@class peri.dist.ops
local ops = {}

---Pooled embeddings to the ranks whose samples they are. The tensor is [samples of all ranks, columns of this rank].
---
---Errors: an argument that is missing or unknown; lists that have not one entry a rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.alltoall_pooled { a2a_pooled_embs_tensor = peri.ones { 2, 3 },
---  batch_size_per_rank = { 2 },
---  dim_sum_per_rank = { 3 } }:wait():numel()) --> 6
---```
---@param args table `a2a_pooled_embs_tensor`, `batch_size_per_rank`, `dim_sum_per_rank`; optional: those above.
---@return peri.Awaitable # Of `[B, columns of all ranks]`.
function ops.alltoall_pooled(args) end

---As `alltoall_pooled`, with different numbers of samples for each feature; the tensor has one dimension. The lists are
---`batch_size_per_rank_per_feature`, `batch_size_per_feature_pre_a2a`, `emb_dim_per_rank_per_feature`, as in
---VariableBatchPooledEmbeddingsAllToAll.
---
---Errors: an argument that is missing or unknown; lists that have not one entry a rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.variable_batch_alltoall_pooled { a2a_pooled_embs_tensor = peri.ones { 6 },
---  batch_size_per_rank_per_feature = { { 3 } }, batch_size_per_feature_pre_a2a = { 3 },
---  emb_dim_per_rank_per_feature = { { 2 } } }:wait():numel()) --> 6
---```
---@param args table `a2a_pooled_embs_tensor`, the lists named below; optional: those above.
---@return peri.Awaitable # Of one dimension.
function ops.variable_batch_alltoall_pooled(args) end

---Matrices whose rows are dealt to the ranks as evenly as possible. `inputs` is a list of [rows, columns]; `out_split`
---says how many columns each rank has. Gradients are not divided unless it is said.
---
---Errors: an argument that is missing or unknown; lists that have not one entry a rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.alltoallv { inputs = { peri.ones { 2, 3 } }, out_split = { 3 } }:wait()[1]:numel())
-----> 6
---```
---@param args table `inputs`, `out_split` or `per_rank_split_lengths`; optional: those above.
---@return peri.Awaitable # Of a list with `[this rank's rows, columns of a rank]` for each rank.
function ops.alltoallv(args) end

---The sum over ranks of the tensors for this rank.
---
---Errors: an argument that is missing or unknown; lists that have not one entry a rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.reduce_scatter_pooled { inputs = { peri.ones { 2, 3 } } }:wait():numel()) --> 6
---```
---@param args table `inputs`: a tensor for each rank, alike on all ranks; optional: those above.
---@return peri.Awaitable # Of the shape of one.
function ops.reduce_scatter_pooled(args) end

---This rank's rows of the sum over ranks.
---
---Errors: an argument that is missing or unknown; lists that have not one entry a rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.reduce_scatter_base_pooled { input = peri.ones { 2, 3 } }:wait():numel()) --> 6
---```
---@param args table `input`: `[W * B, ...]`; optional: those above.
---@return peri.Awaitable # Of `[B, ...]`.
function ops.reduce_scatter_base_pooled(args) end

---As `reduce_scatter_base_pooled`, with a number of rows for each rank.
---
---Errors: an argument that is missing or unknown; lists that have not one entry a rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.reduce_scatter_v_pooled { input = peri.ones { 2, 3 },
---  input_splits = { 2 } }:wait():numel())
-----> 6
---```
---@param args table `input`, `input_splits`: rows of each rank; optional: those above.
---@return peri.Awaitable # Of `[B, ...]`.
function ops.reduce_scatter_v_pooled(args) end

---The same with different numbers of samples for each feature; the tensor has one dimension: by rank, feature, sample,
---column.
---
---Errors: an argument that is missing or unknown; lists that have not one entry a rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.reduce_scatter_v_per_feature_pooled { input = peri.ones { 6 },
---  batch_size_per_rank_per_feature = { { 3 } },
---  embedding_dims = { 2 } }:wait():numel()) --> 6
---```
---@param args table `input`, `batch_size_per_rank_per_feature`, `embedding_dims`; optional: those above.
---@return peri.Awaitable # Of one dimension.
function ops.reduce_scatter_v_per_feature_pooled(args) end

---The tensors of all ranks, one after the other.
---
---Errors: an argument that is missing or unknown; lists that have not one entry a rank; sizes that do not fit the
---tensor.
---
---```lua
---peri.init()
---local ops = peri.dist.ops
---print(ops.all_gather_base_pooled { input = peri.ones { 2, 3 } }:wait():numel()) --> 6
---```
---@param args table `input`: `[B, ...]`; optional: those above.
---@return peri.Awaitable # Of `[W * B, ...]`.
function ops.all_gather_base_pooled(args) end

---A row for each id, back to the rank that sent the id. Needed: `a2a_sequence_embs_tensor` [ids received, D],
---`lengths_after_sparse_data_all2all`, `input_splits` (ids sent to each rank), `output_splits` (ids received from
---each), and `batch_size_per_rank` or, for a variable batch, `stride_per_key_per_rank`; optional: `num_features`,
---`stagger`.
---
---Errors: an argument that is missing or unknown; lists that have not one entry a rank; sizes that do not fit the
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
---@param args table the names above; optional: those above.
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

---Whether gradients that exchanges bring back are divided by the number of ranks. They are at first: then the gradient
---of a table is that of the mean of the ranks' losses.
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
---@param group? peri.dist.Group For exchanges of this group (default: for this rank's script).
function ops.set_gradient_division(on, group) end

---What `set_gradient_division` has set.
---
---Errors: what is no group.
---@param group? peri.dist.Group Of exchanges of this group (default: of this rank's script).
---@return boolean
function dist.get_gradient_division(group) end

---Averages gradients over ranks, in buckets that travel during the backward pass. DistributedModelParallel has its own;
---this is for scripts without it. Every backward pass that reaches a parameter ends when all gradients are averages.
---Making it is collective.
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

---Average at the end of backward passes, or not: for several passes before a step. All ranks alike.
---@param on? boolean On or off (default: true).
function dist.Reducer:enable(on) end

---Let backward passes end when the averages have set out; `finish` waits for them, before the next pass. All ranks
---alike.
---@param on? boolean On or off (default: false).
function dist.Reducer:defer(on) end

---Let go of all parameters, which may be another reducer's from now on. Between two passes, on all ranks alike.
function dist.Reducer:detach() end

---Give its memory back now.
function dist.Reducer:release() end
