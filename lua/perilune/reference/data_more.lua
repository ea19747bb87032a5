-- data_more.lua: Data: parts of loaders, batches by hand, package lists, a baseline.
--
-- More of the loaders of the page `data`. In shapes, B is the number of samples. docs/data.md tells more.
---@meta

---@class peri.data
local data = {}

---The next batch in host memory, which the next call overwrites. For what needs no tensors. `host.ptr` is the
---`peri_batch` of perilune/io.h: rows, ids, dense, labels, values, lengths, global_row, global_rows.
---
---Errors: a loader with workers.
---
---```lua
---local loader = peri.data.synthetic { num_rows = 64, batch_size = 32, sparse_features = 2,
---  dense_features = 3, rows = 50 }
---local baseline = peri.data.LogisticRegression { rows = loader.rows,
---  dense_features = #loader.dense }
---local first = baseline:train(loader:next_host())
---local host = loader:next_host()
---local probabilities = require("ffi").new("float[?]", host.ptr.rows)
---baseline:predict(host, probabilities)
---print(first > 0, probabilities[31] > 0 and probabilities[31] < 1, loader:next_host())
-----> true true nil
---```
---@return any|nil # nil: the last epoch is over.
function data.Loader:next_host() end

---The row that a word, or a raw id, has in a table whose column says `ids = "text"`, or `ids = "hash"`, as `data.csv`,
---`data.criteo` and `data.npy` find it: XXH3_64bits of the word's bytes, or of the id's 8 bytes (little-endian), mod
---`rows`. Who asks a server about such a model sends this number. In Python:
---`xxhash.xxh3_64_intdigest("Lisbon".encode()) % rows` (xxhash of PyPI).
---
---Errors: an id that is neither a text nor a whole number from 0 on; rows below 1.
---
---```lua
---print(peri.data.hash("Lisbon", 1000), peri.data.hash(42, 1000)) --> 590 720
---```
---@param id string|integer The word, or the id.
---@param rows integer Rows of the table.
---@return integer
function data.hash(id, rows) end

---Which share of all data a part is, as data.criteo and data.debian cut it, for a source of your own.
---
---Errors: a part that is not there; a share out of 0..1.
---
---```lua
---local from, to = peri.data.Loader.bounds("mine", "test", 0.25, 0)
---print(from, to, table.concat(peri.data.Loader.numbered("c", 2), " ")) --> 0.75 1 c1 c2
---```
---@param func string Who asks, for error messages.
---@param part string `all`, `train`, `test`, `fit` or `validation`.
---@param holdout number The share that is the test part.
---@param validation number The share of the train part that is the validation part.
---@return number # Where the part begins, of 0..1.
---@return number # Where it ends.
function data.Loader.bounds(func, part, holdout, validation) end

---Names of features: the letters with 1, 2, ...
---
---Errors: a number that is no count.
---@param letter string What all names begin with.
---@param n number How many.
---@return string[]
function data.Loader.numbered(letter, n) end

---A copy of a batch of cpu in memory that is pinned for a device, from which copies need not wait.
---
---Errors: a batch that is on a device; `cpu`, whose memory nothing is copied to.
---
---```lua
---local host = peri.data.host_batch(1, 1, 2, 3)
---local b = host.ptr
---b.rows, b.global_rows, b.ids, b.lengths[0], b.lengths[1] = 2, 2, 3, 1, 2
---for i = 0, 2 do b.values[i] = 10 * i end
---b.dense[0], b.dense[1], b.labels[0], b.labels[1] = 0.5, 1.5, 0, 1
---local batch = peri.data.upload(host, { "f" }, "cpu")
---print(batch.rows, batch.loss_scale, batch.sparse_features.f:lengths():item(1),
---  batch.dense_features:item(0)) --> 2 0.5 2 0.5
---print((pcall(batch.pin_memory, batch, "cpu"))) --> false
---print(peri.data.share(10, 1, 3)) --> 3 6
---```
---@param device? string The device (default: the rank's).
---@return peri.data.Batch
function data.Batch:pin_memory(device) end

---Room in host memory for a batch, which a source of your own fills again and again. `host.ptr` is a `peri_batch` (see
---`next_host`); `host:reserve(n)` makes room for more ids.
---
---Errors: numbers that are negative.
---@param dense_features integer Numbers of a sample.
---@param sparse_features integer Features with ids.
---@param rows integer Samples, at most.
---@param ids integer Ids of all features, to begin with.
---@return any # The host batch.
function data.host_batch(dense_features, sparse_features, rows, ids) end

---Which samples of a global batch a rank takes: those from the first number on, up to and without the second.
---
---Errors: a rank that is not there.
---@param rows integer Samples of the global batch.
---@param rank integer The rank, from 0.
---@param world integer How many ranks.
---@return integer # The first sample, from 0.
---@return integer # The end.
function data.share(rows, rank, world) end

---Make tensors of a host batch. On its way to a device that copies, it is in pinned memory, and nobody waits.
---
---Errors: what is no host batch; keys that are not as many as its features.
---@param host any A host batch.
---@param keys any Names of the sparse features: a list, or `peri.jagged.Keys`.
---@param device? string Where the batch goes (default: the rank's device).
---@param world_size? integer How many ranks share the global batch (default: 1).
---@return peri.data.Batch
function data.upload(host, keys, device, world_size) end

---The baseline that a model should beat: logistic regression over dense features and ids, on host batches.
---
---Errors: a number of rows below 1; what is no number.
---@class peri.data.LogisticRegression
---@overload fun(args: peri.data.LogisticRegression.args): peri.data.LogisticRegression
data.LogisticRegression = {}

---@class peri.data.LogisticRegression.args
---@field rows integer[] Rows of every feature's table.
---@field dense_features integer How many dense features.
---@field lr? number The learning rate (default: 0.05).
---@field l2? number Weight of the squares of what is learned (default: 0).

---Train on a batch, one sample after the other.
---
---Errors: a batch with other features; an id outside of its table.
---@param host any A host batch.
---@return number # The mean loss, each sample's before it was learned.
function data.LogisticRegression:train(host) end

---The probabilities of a batch's samples.
---
---Errors: as of `train`; an array that is too short.
---@param host any A host batch.
---@param probabilities any A C array `float[?]`, which is filled.
function data.LogisticRegression:predict(host, probabilities) end

---A loader of samples from the package lists that every Debian machine has: does this package depend on that one? The
---positive sample has a true dependency, which is hidden from the package's features; the negative ones have others.
---
---Errors: a machine without package lists; a part without dependencies.
---
---```lua
---local path = os.tmpname()
---local file = io.open(path, "w")
---file:write("Package: a\nDepends: b\n\nPackage: b\n\nPackage: c\nDepends: b\n\n")
---file:close()
---local packages = peri.data.debian.read(path)
---os.remove(path)
---local loader = peri.data.debian { packages = packages, negatives = 1, holdout = 0,
---  batch_size = 4 }
---print(loader:count(), loader().rows,
---  peri.data.debian.loader({ packages = packages, batch_size = 1 }).batch_size) --> 4 4 1
---```
---@param args peri.data.debian.args The lists, the part and how batches are made.
---@return peri.data.Loader
function data.debian(args) end

---@class peri.data.debian.args
---@field batch_size integer Samples of all ranks together; rank r of w gets its part of each batch.
---@field packages? table What `data.debian.read` returned (default: read here).
---@field path? string A file in the format of `apt-cache dumpavail` (default: the machine's own lists).
---@field part? string `all`, `train`, `test`, `fit` and `validation` (the two of train) (default: all).
---@field holdout? number The share of the packages that is the test part (default: 0.1).
---@field validation? number The share of the train part's packages that is the validation part (default: 0.05).
---@field negatives? integer Negative samples for each positive one (default: 4).
---@field max_dependencies? integer Dependencies of a bag, at most (default: 32).
---@field seed? integer Of everything (default: 1).
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

---The same as `data.debian`.
---
---Errors: as of `data.debian`.
---@param args peri.data.debian.args The lists, the part and how batches are made.
---@param shared? any Of a worker: the arrays of the packages (default: none).
---@return peri.data.Loader
function data.debian.loader(args, shared) end

---Parse package lists once, for several loaders.
---
---Errors: a machine without package lists; a file that has no packages.
---@param path? string A file in the format of `apt-cache dumpavail` (default: the machine's own lists).
---@return table
function data.debian.read(path) end

---The position: batches that were given, or, where a pipeline takes them ahead, those that it has trained. Checkpoints
---keep it.
---
---```lua
---local function generator()
---  return peri.data.Generator { global_batches = true, make = function(first)
---    local k = first
---    return function()
---      k = k + 1
---      return k
---    end
---  end }
---end
---local batches, again = generator(), generator()
---batches:skip(4)
---local position = batches:state_dict()
---print(position.batches, again:check_state_dict(position),
---  again:check_state_dict {}) --> 4 nil it is no position in a Generator
---again:load_state_dict(again:merge_state_dicts { position, position })
---print(again()) --> 5
---again:go_to(1)
---print(again()) --> 2
---```
---@return table
function data.Generator:state_dict() end

---What keeps a position from being loaded.
---
---Errors: none.
---@param dict any What `state_dict` returned.
---@return string|nil # The reason in words; nil: it can be loaded.
function data.Generator:check_state_dict(dict) end

---Go on behind a position.
---
---Errors: what is no position in a Generator.
---@param dict table What `state_dict` returned.
function data.Generator:load_state_dict(dict) end

---One position of those of several ranks, to go on with on another number of ranks. Checkpoints ask for it.
---
---Errors: what is no list.
---@param list table[] Positions, one for each rank.
---@return table|nil # The position; nil and why: there is none, as with `global_batches = false`.
function data.Generator:merge_state_dicts(list) end

---Go on behind so many batches. What is in flight in a pipeline counts no more.
---
---Errors: a number that is no count.
---@param n integer How many batches from the first one on are left out.
function data.Generator:go_to(n) end
