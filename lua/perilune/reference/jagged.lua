-- jagged.lua: Jagged tensors.
--
-- A batch of recommendation data has a *bag* of ids for each feature and each sample: the products that a person looked
-- at, say. Bags differ in length. A `KeyedJaggedTensor` keeps all bags of a batch in two flat tensors, values and
-- lengths. A `JaggedTensor` is one feature of it. A `KeyedTensor` is what tables make of it: a matrix whose columns
-- have the features' names. The names are TorchRec's.
--
-- In shapes, N is the number of ids, B the number of samples, and K the number of keys. Positions of keys count from 0,
-- as in TorchRec.
---@meta

---@class peri
local peri = {}

---The ids of a batch: for every key (feature) and every sample a bag. With the keys `f`, `g` and two samples,
---
---```
---values  = { 1, 2,   3,   4,   5, 6, 7 }  the ids, all bags one after the other
---lengths = { 2,      1,   1,   3 }        f of sample 0, f of sample 1, g of sample 0, g of 1
---```
---
---`#kjt` is the number of keys, and `kjt["f"]` the JaggedTensor of a key (`kjt:get` for a key that has the name of a
---method). A variable batch has another number of samples for each key: `stride_per_key_per_rank`. The tensors are
---kept, not copied.
---
---Errors: an argument that is missing, unknown or of a wrong kind; neither lengths nor offsets; lengths that do not sum
---up to the number of values; a number of lengths that the keys do not divide. What lies on a device is checked when
---the host first asks for sizes (`sync`).
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f", "g" }, values = { 1, 2, 3, 4, 5, 6, 7 },
---  lengths = { 2, 1, 1, 3 } }
---print(#kjt, kjt:stride(), kjt:device(), kjt:is_weighted()) --> 2 2 cpu false
---print(table.concat(kjt:length_per_key(), " ")) --> 3 4
---print(table.concat(kjt["g"]:values():to_list(), " ")) --> 4 5 6 7
---```
---@class peri.KeyedJaggedTensor
---@overload fun(args: peri.KeyedJaggedTensor.args): peri.KeyedJaggedTensor
peri.KeyedJaggedTensor = {}

---@class peri.KeyedJaggedTensor.args
---@field keys string[] Names of the features.
---@field values peri.Tensor|integer[] Ids of all bags, key by key: `[N]`. A list becomes `i64`.
---@field lengths? peri.Tensor|integer[] Number of ids of each bag: `[K * B]`, key by key (default: what the offsets say).
---@field offsets? peri.Tensor|integer[] Where each bag begins, and the end of the last one: `[K * B + 1]` (default: what the lengths say).
---@field weights? peri.Tensor|number[] A weight for each id: `[N]` (default: none). A list becomes `f32`.
---@field stride? integer Samples of the batch, B (default: the number of bags divided by that of keys).
---@field stride_per_key_per_rank? integer[][] A variable batch: samples of each key from each rank (default: none).
---@field inverse_indices? table `{ keys, tensor }`, the tensor `[K, full B]`: places in the variable batch (default: none).
---@field device? string Where lists go (default: the rank's device).

---Make one of nested lists: for each key a list of bags. Keys with unequally many bags make a variable batch.
---
---Errors: another number of lists than keys; weights that do not nest as the ids do; an argument of another name.
---
---```lua
---local kjt = peri.KeyedJaggedTensor.from_lists { keys = { "user", "items" }, { { 7 }, { 8 } },
---  { { 1, 2 }, {} } }
---print(table.concat(kjt:lengths():to_list(), " ")) --> 1 1 2 0
---```
---@param args table `{ keys = { names }, bags of the first key, bags of the second, ..., weights = { the same nesting }, device = "cpu" }`.
---@return peri.KeyedJaggedTensor
function peri.KeyedJaggedTensor.from_lists(args) end

---As the constructor, from `lengths`, which must be given, and `sync` at once: everything is checked. Waits for the
---device.
---
---Errors: no lengths; as of the constructor.
---
---```lua
---local kjt = peri.KeyedJaggedTensor.from_lengths_sync { keys = { "f" }, values = { 5, 6 },
---  lengths = { 0, 2 } }
---print(table.concat(kjt:offset_per_key(), " "), kjt:longest()) --> 0 2 2
---```
---@param args peri.KeyedJaggedTensor.args The constructor's arguments; `lengths` must be among them.
---@return peri.KeyedJaggedTensor
function peri.KeyedJaggedTensor.from_lengths_sync(args) end

---As the constructor, from `offsets`, which must be given, and `sync` at once: everything is checked. Waits for the
---device.
---
---Errors: no offsets; as of the constructor.
---
---```lua
---local kjt = peri.KeyedJaggedTensor.from_offsets_sync { keys = { "f" }, values = { 5, 6 },
---  offsets = { 0, 0, 2 } }
---print(table.concat(kjt:lengths():to_list(), " ")) --> 0 2
---```
---@param args peri.KeyedJaggedTensor.args The constructor's arguments; `offsets` must be among them.
---@return peri.KeyedJaggedTensor
function peri.KeyedJaggedTensor.from_offsets_sync(args) end

---Make one of JaggedTensors by name. Equally many rows make a fixed batch, others a variable one.
---
---Errors: a value that is no JaggedTensor; a name of `keys` that the table does not have.
---
---```lua
---local f = peri.JaggedTensor { values = peri.tensor({ 1, 2, 3 }, "i64"), lengths = { 2, 1 } }
---local g = peri.JaggedTensor { values = peri.tensor({ 9 }, "i64"), lengths = { 0, 1 } }
---local kjt = peri.KeyedJaggedTensor.from_jt_dict({ f = f, g = g }, { "g", "f" })
---print(table.concat(kjt:keys(), " "), kjt:stride()) --> g f 2
---```
---@param dict table<string, peri.JaggedTensor> JaggedTensors by name, on one device.
---@param keys? string[] Their order (default: the sorted names).
---@return peri.KeyedJaggedTensor
function peri.KeyedJaggedTensor.from_jt_dict(dict, keys) end

---Join along keys: all keys of the first one, then those of the second, and so on.
---
---Errors: an entry that is no KeyedJaggedTensor; other numbers of samples; a key that repeats; weights in some only.
---
---```lua
---local f = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2 }, lengths = { 1, 1 } }
---local g = peri.KeyedJaggedTensor { keys = { "g" }, values = { 3 }, lengths = { 0, 1 } }
---print(table.concat(peri.KeyedJaggedTensor.concat({ f, g }):keys(), " ")) --> f g
---```
---@param kjts peri.KeyedJaggedTensor[] Of equally many samples.
---@return peri.KeyedJaggedTensor
function peri.KeyedJaggedTensor.concat(kjts) end

---One without keys.
---
---Errors: an unknown argument or dtype.
---
---```lua
---print(#peri.KeyedJaggedTensor.empty { is_weighted = true }) --> 0
---```
---@param args? peri.KeyedJaggedTensor.empty.args By default there are no weights.
---@return peri.KeyedJaggedTensor
function peri.KeyedJaggedTensor.empty(args) end

---Room for a copy of another one, for `copy_`: the same keys and counts, with values that are not set.
---
---Errors: a device that cannot be used.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2 }, lengths = { 2, 0 } }
---local room = peri.KeyedJaggedTensor.empty_like(kjt):copy_(kjt)
---print(room:equal(kjt)) --> true
---```
---@param kjt peri.KeyedJaggedTensor The one that is to be copied later.
---@param device? string Where the room is (default: the device of `kjt`).
---@return peri.KeyedJaggedTensor
function peri.KeyedJaggedTensor.empty_like(kjt, device) end

---The names of the keys.
---@return string[]
function peri.KeyedJaggedTensor:keys() end

---The keys as one shared object, which is cheap to pass on: `keys` makes a new list each time.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f", "g" }, values = { 1 }, lengths = { 1, 0 } }
---local other = peri.KeyedJaggedTensor { keys = kjt:key_list(), values = { 2 },
---  lengths = { 0, 1 } }
---print(other) --> KeyedJaggedTensor {f, g}: 1 values, batch 1, i64 on cpu
---```
---@return peri.jagged.Keys
function peri.KeyedJaggedTensor:key_list() end

---The device's name.
---@return string
function peri.KeyedJaggedTensor:device() end

---Samples of the batch, B; of a variable batch: of the full one.
---@return integer
function peri.KeyedJaggedTensor:stride() end

---The ids, key by key.
---@return peri.Tensor # `[N]`
function peri.KeyedJaggedTensor:values() end

---How many ids each bag has.
---@return peri.Tensor # `[K * B]`, key by key; `i32`, or the dtype of the offsets.
function peri.KeyedJaggedTensor:lengths() end

---Where each bag begins, and the end of the last one.
---@return peri.Tensor # `[K * B + 1]`; `i64` (in TorchRec the dtype of the lengths), or the dtype of the offsets that were given.
function peri.KeyedJaggedTensor:offsets() end

---The lengths, if they are known already.
---@return peri.Tensor|nil # `[K * B]`; nil: only the offsets are.
function peri.KeyedJaggedTensor:lengths_or_none() end

---The offsets, if they are known already.
---@return peri.Tensor|nil # `[K * B + 1]`; nil: only the lengths are.
function peri.KeyedJaggedTensor:offsets_or_none() end

---The weight of each id; an error if there are none.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2 }, lengths = { 2 },
---  weights = { 0.5, 2 } }
---print(table.concat(kjt:weights():to_list(), " ")) --> 0.5 2
---print(kjt:offsets_or_none():numel(), kjt:lengths_or_none():numel(), #kjt:keys()) --> 2 1 1
---```
---@return peri.Tensor # `[N]`
function peri.KeyedJaggedTensor:weights() end

---The weight of each id.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2 }, lengths = { 2 } }
---print(kjt:weights_or_none(), kjt:with_weights(peri.ones { 2 }):weights_or_none():numel())
-----> nil 2
---```
---@return peri.Tensor|nil # `[N]`; nil: there are none.
function peri.KeyedJaggedTensor:weights_or_none() end

---Whether ids have weights.
---@return boolean
function peri.KeyedJaggedTensor:is_weighted() end

---Whether the keys have different numbers of samples.
---
---```lua
---local kjt = peri.KeyedJaggedTensor.from_lists { keys = { "user", "items" }, { { 7 } },
---  { { 1, 2 }, {}, { 3 } } }
---print(kjt:variable_stride_per_key(), table.concat(kjt:stride_per_key(), " ")) --> true 1 3
---print(table.concat(kjt:lengths_offset_per_key(), " "), kjt:stride_per_key_per_rank()[2][1])
-----> 0 1 4 3
---```
---@return boolean
function peri.KeyedJaggedTensor:variable_stride_per_key() end

---Samples of each key.
---@return integer[] # K numbers.
function peri.KeyedJaggedTensor:stride_per_key() end

---Samples of each key from each rank. A fixed batch has one rank.
---@return integer[][] # For each key a list.
function peri.KeyedJaggedTensor:stride_per_key_per_rank() end

---Where the lengths of each key begin among all lengths, and the end of the last one.
---@return integer[] # K + 1 numbers.
function peri.KeyedJaggedTensor:lengths_offset_per_key() end

---Ids of each key. The host must know it: the first call may wait for the device.
---@return integer[] # K numbers.
function peri.KeyedJaggedTensor:length_per_key() end

---Ids of each key, if the host knows it already (after `sync`, or after what needs it).
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f", "g" }, values = { 1, 2, 3 },
---  lengths = { 1, 2 } }
---kjt:sync()
---print(kjt:length_per_key_or_none()[2], kjt:offset_per_key_or_none()[2]) --> 2 1
---print(kjt:unsync():length_per_key_or_none() == nil) --> true
---```
---@return integer[]|nil
function peri.KeyedJaggedTensor:length_per_key_or_none() end

---Where the ids of each key begin among all values, and the end of the last one. May wait for the device.
---@return integer[] # K + 1 numbers.
function peri.KeyedJaggedTensor:offset_per_key() end

---Where the ids of each key begin, if the host knows it already.
---@return integer[]|nil
function peri.KeyedJaggedTensor:offset_per_key_or_none() end

---Number of ids of the longest bag. May wait for the device.
---@return integer
function peri.KeyedJaggedTensor:longest() end

---The position of each key: 0 is the first. Of a key that stands there twice, after `permute`, it is the last.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f", "g" }, values = { 1, 2, 3 },
---  lengths = { 1, 2 } }
---print(kjt:index_per_key().g) --> 1
---```
---@return table<string, integer>
function peri.KeyedJaggedTensor:index_per_key() end

---For each sample of the full batch its place in the variable batch; an error if there are none.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 4, 5 }, lengths = { 1, 1 },
---  stride_per_key_per_rank = { { 2 } },
---  inverse_indices = { { "f" }, peri.tensor({ { 0, 1, 1 } }, "i64") } }
---local inverse = kjt:inverse_indices()
---print(inverse[1][1], table.concat(inverse[2]:to_list(), " ")) --> f 0 1 1
---```
---@return table # `{ keys, tensor }`
function peri.KeyedJaggedTensor:inverse_indices() end

---For each sample of the full batch its place in the variable batch.
---@return table|nil # `{ keys, tensor }`; nil: there are none.
function peri.KeyedJaggedTensor:inverse_indices_or_none() end

---Bring the sizes of keys to the host, and check lengths and offsets. Waits for the device.
---@return peri.KeyedJaggedTensor # Itself.
function peri.KeyedJaggedTensor:sync() end

---Forget what the host knows of sizes.
---@return peri.KeyedJaggedTensor # Itself.
function peri.KeyedJaggedTensor:unsync() end

---Check lengths, offsets and inverse indices now. Waits for the device. The error names key, sample and value.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f", "g" }, values = { 1, 2, 3 },
---  lengths = { 1, 2 } }
---print(#kjt:validate()) --> 2
---```
---@return peri.KeyedJaggedTensor # Itself.
function peri.KeyedJaggedTensor:validate() end

---The bags of one key. `kjt["name"]` is the same, unless a method has that name.
---
---Errors: a key that is not there; the error lists the keys.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "values", "g" }, values = { 1, 2, 3 },
---  lengths = { 1, 2 } }
---print(#kjt:get("values"), kjt:to_dict().g:longest()) --> 1 2
---```
---@param key string Name of the key.
---@return peri.JaggedTensor # Its tensors are views.
function peri.KeyedJaggedTensor:get(key) end

---The bags of every key by name.
---@return table<string, peri.JaggedTensor>
function peri.KeyedJaggedTensor:to_dict() end

---Key i of the result is key `indices[i]`. Keys may repeat and may be left out; weights and inverse indices go with
---them.
---
---Errors: a position outside of 0 .. K - 1.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f", "g" }, values = { 1, 2, 3 },
---  lengths = { 1, 2 } }
---print(table.concat(kjt:permute({ 1, 0 }):values():to_list(), " ")) --> 2 3 1
---```
---@param indices integer[] Positions of keys; 0 is the first.
---@return peri.KeyedJaggedTensor
function peri.KeyedJaggedTensor:permute(indices) end

---Cut into several along keys. Their tensors are views.
---
---Errors: numbers that do not sum up to K, or that are negative.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f", "g", "h" }, values = { 1, 2, 3 },
---  lengths = { 1, 1, 1 } }
---print(table.concat(kjt:split({ 1, 2 })[2]:keys(), " ")) --> g h
---```
---@param segments integer[] How many keys each part has.
---@return peri.KeyedJaggedTensor[]
function peri.KeyedJaggedTensor:split(segments) end

---The same keys, samples and ids with other weights, or without any.
---
---Errors: another number of weights than ids.
---@param weights? peri.Tensor A weight for each id: `[N]` (default: none, the result has no weights).
---@return peri.KeyedJaggedTensor
function peri.KeyedJaggedTensor:with_weights(weights) end

---The same keys, samples and weights with other ids.
---
---Errors: another number of ids.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 11, 12 }, lengths = { 1, 1 } }
---print(table.concat(kjt:with_values(peri.tensor({ 1, 2 }, "i64")):values():to_list(), " "))
-----> 1 2
---```
---@param values peri.Tensor An id for each one that there is: `[N]`.
---@return peri.KeyedJaggedTensor
function peri.KeyedJaggedTensor:with_values(values) end

---This KeyedJaggedTensor on another device; itself if it is there already.
---
---Errors: a device that cannot be used.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2 }, lengths = { 1, 1 } }
---print(kjt:to("cpu"):device(), kjt:size_in_bytes() >= 16) --> cpu true
---print((pcall(kjt.pin_memory, kjt, "cpu"))) --> false
---```
---@param device? string Name of the device (default: the rank's).
---@param non_blocking? boolean Copy from pinned memory without waiting (default: false).
---@return peri.KeyedJaggedTensor
function peri.KeyedJaggedTensor:to(device, non_blocking) end

---A copy in memory of the host that is pinned for a device, from which copies to it need not wait: what `to` with
---`non_blocking` asks for. For the device `cpu` there is nothing to pin, which is an error.
---
---Errors: a KeyedJaggedTensor that is not on the host.
---@param device? string Name of the device (default: the rank's).
---@return peri.KeyedJaggedTensor
function peri.KeyedJaggedTensor:pin_memory(device) end

---Overwrite this one with another of the same keys, strides and counts.
---
---Errors: other keys, strides or counts.
---@param src peri.KeyedJaggedTensor What is copied.
---@return peri.KeyedJaggedTensor # Itself.
function peri.KeyedJaggedTensor:copy_(src) end

---Whether keys, strides, lengths, values, weights and inverse indices are the same, bit for bit. Waits for the device.
---
---Errors: another that is no KeyedJaggedTensor.
---@param other peri.KeyedJaggedTensor The one to compare with.
---@return boolean
function peri.KeyedJaggedTensor:equal(other) end

---Bytes of its tensors.
---@return integer
function peri.KeyedJaggedTensor:size_in_bytes() end

---Give the memory back now, without waiting for the collector. The handle cannot be used afterwards.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2 }, lengths = { 1, 1 } }
---print(kjt:inverse_indices_or_none() == nil) --> true
---kjt:release()
---print(kjt) --> KeyedJaggedTensor (released)
---```
function peri.KeyedJaggedTensor:release() end

---Another handle of the same KeyedJaggedTensor, which outlives the scope that it is made in.
---
---```lua
---local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 2 }, lengths = { 1, 1 } }
---print(kjt:share():equal(kjt)) --> true
---```
---@return peri.KeyedJaggedTensor
function peri.KeyedJaggedTensor:share() end

---@class peri.KeyedJaggedTensor.empty.args
---@field is_weighted? boolean Whether it has (no) weights (default: false).
---@field device? string Name of the device (default: the rank's).
---@field values_dtype? string dtype of the values (default: `i64`).
---@field weights_dtype? string dtype of the weights (default: `f32`).
---@field lengths_dtype? string dtype of the lengths (default: `i32`).
