-- data.lua: Data loaders.
--
-- Where batches come from. A loader is called for the next batch, so `for batch in loader do ... end` goes over all of
-- them; any function that returns batches and at last nil does as well. docs/data.md tells about workers, positions and
-- devices. In shapes, B is `batch.rows`: the samples of this rank.
---@meta

---@class peri.data
local data = {}

---A loader over a source of samples: what `data.criteo`, `data.synthetic` and `data.debian` return. Its fields: `keys`,
---`rows` and `tables` (by key: rows and name of its table), `dense` (names), `batch_size`, `rank`, `world_size`.
---
---```lua
---local loader = peri.data.synthetic { num_rows = 100, batch_size = 32, sparse_features = 2,
---  dense_features = 3, rows = 50 }
---print(loader:count(), table.concat(loader.keys, " "), loader:table_list()[1].rows)
-----> 100 c1 c2 50
---local batches, samples = 0, 0
---for batch in loader do batches, samples = batches + 1, samples + batch.rows end
---print(batches, samples) --> 4 100
---print(loader:rewind():skip(1):next().global_row) --> 32
---local position = loader:state_dict()
---loader:load_state_dict(position)
---print(loader:next().global_row, loader:check_state_dict(position) == nil) --> 64 true
---loader:stop()
---```
---@class peri.data.Loader
data.Loader = {}

---The next batch on the loader's device; `loader()` is the same.
---@return peri.data.Batch|nil # nil: the last epoch is over.
function data.Loader:next() end

---Samples of one pass, over all ranks: as many as the batches of a pass have together. Of a file whose lines have to be
---counted it reads the file.
---@return integer
function data.Loader:count() end

---The tables that the features look into, in the order of their first feature.
---@return table[] # `{ name =, rows =, features = { ... } }`
function data.Loader:table_list() end

---Leave the next batches out. Behind the last epoch there are none.
---
---Errors: a number that is not whole, or below 0.
---@param n integer How many.
---@return peri.data.Loader # Itself.
function data.Loader:skip(n) end

---Begin again with the first epoch.
---@return peri.data.Loader # Itself.
function data.Loader:rewind() end

---The position: batches that were given, or, where a pipeline takes them ahead, those that it has trained. Checkpoints
---keep it.
---@return table
function data.Loader:state_dict() end

---Go on behind a position, which holds on any number of ranks and workers.
---
---Errors: a position in other data; the error names what differs.
---@param dict table What `state_dict` returned.
function data.Loader:load_state_dict(dict) end

---Why a position does not fit this loader.
---
---Errors: none.
---@param dict table What `state_dict` returned.
---@return string|nil # nil: it fits.
function data.Loader:check_state_dict(dict) end

---End the workers. The garbage collector does so too.
function data.Loader:stop() end

---What a batch is. Fields: `dense_features` `[B, dense features]` `f32`, `sparse_features` (a KeyedJaggedTensor),
---`labels` `[B]` `f32`; `rows` (B), `global_rows` (of all ranks), `global_row` (the number of this rank's first one in
---the pass), `loss_scale`.
---
---```lua
---local batch = peri.data.synthetic { num_rows = 8, batch_size = 8, sparse_features = 2,
---  rows = 50 }:next()
---print(batch.rows, batch.dense_features:size(2), batch.sparse_features:stride(),
---  batch.labels:numel())
-----> 8 13 8 8
---print(batch:to("cpu").rows) --> 8
---batch:release()
---```
---@class peri.data.Batch
---@field dense_features peri.Tensor Numbers: `[B, dense features]`, `f32`.
---@field sparse_features peri.KeyedJaggedTensor Ids.
---@field labels peri.Tensor What was right: `[B]`, `f32`.
---@field rows integer Samples of this rank, B.
---@field global_rows integer Samples of all ranks.
---@field global_row integer Number of this rank's first sample in the pass, from 0.
---@field loss_scale number World size / global_rows: the factor of a sum of losses that makes the mean over all ranks.
data.Batch = {}

---The same batch on another device.
---
---Errors: a device that cannot be used.
---@param device string Name of the device.
---@param non_blocking? boolean Copy from pinned memory without waiting (default: false).
---@return peri.data.Batch
function data.Batch:to(device, non_blocking) end

---Give the memory back now, without waiting for the collector.
function data.Batch:release() end

---Lines `label TAB integers TAB hexadecimal categories` of files, or once of a pipe: Criteo's layout. Keys are `c1` ..
---`c26`, dense features `i1` .. `i13`, tables `t_c1` .. `t_c26`. Lines end with LF or CR LF, a byte order mark is left
---out, and files may be packed by gzip, which are then read as a whole, in order, by every rank and worker.
---
---Errors: a file that cannot be read, is empty, no text or damaged; a line of another form, with its file and number; a
---part of a packed file; fewer files than ranks where files are split; an argument out of its range.
---
---```lua
---local path = os.tmpname()
---peri.data.synthetic.write { path = path, num_rows = 10, dense_features = 2, sparse_features = 3,
---  rows = 100 }
---local loader = peri.data.criteo { path = path, batch_size = 4, dense_features = 2,
---  sparse_features = 3, rows = 100, ids = "mod" }
---print(loader:next().rows, loader:count()) --> 4 10
---os.remove(path)
---```
---@param args peri.data.criteo.args
---@return peri.data.Loader
function data.criteo(args) end

---@class peri.data.criteo.args
---@field path string|string[] The file, or a list of files that are read as one.
---@field batch_size integer Samples of all ranks together; rank r of w gets its part of each batch.
---@field split? string `rows`: a rank reads its rows of each batch; `files`: rank r of w reads files r + 1, r + 1 + w, ... (default: rows).
---@field rows? integer|integer[] Rows of every category's table, or a list of them (default: 100000).
---@field dense_features? integer Integers of a line (default: 13).
---@field sparse_features? integer Categories of a line (default: 26).
---@field dense? string Integers x become `log`: ln(1 + max(x, 0)), `signed_log`: sign(x) ln(1 + |x|), or `raw` (default: log).
---@field ids? string Categories x become `hash`: XXH3(x) mod rows, or `mod`: x mod rows (default: hash).
---@field missing? string A missing category is `empty`: an empty bag, or `zero`: id 0, kept for them (default: empty).
---@field part? string `all`, `train` (the head of the file), `test` (its tail), `fit` and `validation` (the two of train) (default: all).
---@field holdout? number The share of the file, by bytes, that is the test part (default: 0.1).
---@field validation? number The share of the train part that is the validation part (default: 0.05).
---@field epochs? integer Passes; `math.huge`: for ever (default: 1).
---@field limit? integer Samples of a pass, rounded up to whole batches (default: all).
---@field drop_last? boolean Leave a last batch out that is not full (default: false).
---@field rank? integer This rank (default: the world's).
---@field world_size? integer The number of ranks (default: the world's).
---@field device? string Where batches go (default: the rank's device).
---@field num_workers? integer Threads that make batches ahead; 0: the caller's makes them (default: 0).
---@field prefetch_factor? integer Batches that are made ahead for each of them, at most (default: 2).
---@field pin_memory? boolean They make them in pinned memory (default: where batches are copied to a device).
---@field timeout? number Seconds that a batch of theirs is waited for (default: 300).

---Made-up samples: ids by a power law, labels of a hidden model, so there is something to learn. Sample i is the same
---in every loader of the same shape and seed. `data.synthetic` is callable, and `data.synthetic.loader` is the same
---function.
---
---Errors: an argument that is missing, unknown or out of its range.
---
---```lua
---local loader = peri.data.synthetic { num_rows = 6, batch_size = 3, sparse_features = 1,
---  rows = 10, ids_per_bag = { 0, 2 } }
---print(loader:next().sparse_features:keys()[1], loader:next().rows, loader:next()) --> c1 3 nil
---local first = peri.data.synthetic.loader { num_rows = 6, batch_size = 3, sparse_features = 1,
---  rows = 10 }
---print(first:count()) --> 6
---```
---@param args peri.data.synthetic.args
---@return peri.data.Loader
function data.synthetic(args) end

---@class peri.data.synthetic.args
---@field num_rows integer Samples.
---@field batch_size integer Samples of all ranks together; rank r of w gets its part of each batch.
---@field first_row? integer The number of the first sample (default: 0).
---@field dense_features? integer Numbers of a sample (default: 13).
---@field sparse_features? integer Features with ids (default: 26).
---@field rows? integer|integer[] Rows of every feature's table, or a list of them (default: 100000).
---@field ids_per_bag? integer|table A number, for all features; or a list with an entry for each feature, a number or `{ least, most }`; or `{ least, most }` for all, unless there are two features, of which it is the list (default: 1).
---@field seed? integer Of the samples: the same seed and shape give the same ones (default: 1).
---@field alpha? number Of the power law of ids; 0: uniform (default: 1.05).
---@field signal? number Of the first-order part of the hidden model, in units of the logit (default: 1).
---@field interaction? number Of its second-order part (default: 1.5).
---@field bias? number Its constant (default: -1).
---@field epochs? integer Passes; `math.huge`: for ever (default: 1).
---@field limit? integer Samples of a pass, rounded up to whole batches (default: all).
---@field drop_last? boolean Leave a last batch out that is not full (default: false).
---@field rank? integer This rank (default: the world's).
---@field world_size? integer The number of ranks (default: the world's).
---@field device? string Where batches go (default: the rank's device).
---@field num_workers? integer Threads that make batches ahead; 0: the caller's makes them (default: 0).
---@field prefetch_factor? integer Batches that are made ahead for each of them, at most (default: 2).
---@field pin_memory? boolean They make them in pinned memory (default: where batches are copied to a device).
---@field timeout? number Seconds that a batch of theirs is waited for (default: 300).

---The same as `data.synthetic`.
---
---Errors: as there.
---@param args peri.data.synthetic.args
---@return peri.data.Loader
function data.synthetic.loader(args) end

---Write made-up samples, with 0 or 1 ids a bag, as a file in Criteo's layout. `data.criteo` with `ids = "mod"` reads
---the same samples.
---
---Errors: a file that cannot be written.
---@param args peri.data.synthetic.write.args
function data.synthetic.write(args) end

---@class peri.data.synthetic.write.args
---@field path string The file.
---@field num_rows integer Samples.
---@field first_row? integer The number of the first sample (default: 0).
---@field dense_features? integer Numbers of a sample (default: 13).
---@field sparse_features? integer Features with ids (default: 26).
---@field rows? integer|integer[] Rows of every feature's table, or a list of them (default: 100000).
---@field ids_per_bag? integer|table 0, 1, or `{ 0, 1 }` (default: 1).
---@field seed? integer Of the samples: the same seed and shape give the same ones (default: 1).
---@field alpha? number Of the power law of ids; 0: uniform (default: 1.05).
---@field signal? number Of the first-order part of the hidden model, in units of the logit (default: 1).
---@field interaction? number Of its second-order part (default: 1.5).
---@field bias? number Its constant (default: -1).

---Batches of a Lua function of your own, with a position that checkpoints keep. Call it for the next batch.
---
---Errors: `make` that is no function.
---
---```lua
---local batches = peri.data.Generator { make = function(first)
---  local k = first
---  return function()
---    k = k + 1
---    return k <= 3 and { number = k } or nil
---  end
---end }
---print(batches().number, batches:next().number, batches:given()) --> 1 2 2
---print(batches:rewind():skip(2):next().number) --> 3
---```
---@class peri.data.Generator
---@overload fun(args: peri.data.Generator.args): peri.data.Generator
data.Generator = {}

---@class peri.data.Generator.args
---@field make fun(first: integer): fun(): any Returns an iterator that begins with batch number `first`, from 0.
---@field global_batches? boolean Batch k of all ranks together is the same on any number of ranks (default: false).

---The next batch.
---@return any # nil: the end.
function data.Generator:next() end

---How many batches were given, those that were left out among them.
---@return integer
function data.Generator:given() end

---Leave the next batches out.
---
---Errors: a number that is not whole, or below 0.
---@param n integer How many.
---@return peri.data.Generator # Itself.
function data.Generator:skip(n) end

---Begin again with the first batch.
---@return peri.data.Generator # Itself.
function data.Generator:rewind() end
