-- jagged_parts.lua: Parts of jagged tensors: JaggedTensor, KeyedTensor, Keys.
--
-- What a KeyedJaggedTensor consists of, and what tables make of it. In shapes, N is the number of values, B the number
-- of bags or samples.
---@meta

---@class peri
local peri = {}

---Values cut into bags: the ids of one feature, or rows that were looked up for them. `#jt` is the number of bags.
---
---Errors: an argument that is missing, unknown or of a wrong kind; neither lengths nor offsets; counts that do not fit.
---
---```lua
---local jt = peri.JaggedTensor { values = { 1, 2, 3 }, lengths = { 2, 0, 1 } }
---print(#jt, jt:longest(), table.concat(jt:offset_list(), " ")) --> 3 2 0 2 2 3
---print(jt:values():numel(), jt:lengths():numel(), jt:offsets():numel(), jt:device())
-----> 3 3 4 cpu
---```
---@class peri.JaggedTensor
---@overload fun(args: peri.JaggedTensor.args): peri.JaggedTensor
peri.JaggedTensor = {}

---@class peri.JaggedTensor.args
---@field values peri.Tensor|number[] All bags one after the other: `[N]` or `[N, ...]`. A list becomes `f32`.
---@field lengths? peri.Tensor|integer[] How many values each bag has: `[B]` (default: what the offsets say).
---@field offsets? peri.Tensor|integer[] Where each bag begins, and the end of the last one: `[B + 1]` (default: what the lengths say).
---@field weights? peri.Tensor|number[] A weight for each value: `[N]` (default: none).
---@field device? string Where lists go (default: the rank's device).

---Make one of a list of bags.
---
---Errors: another number of weights than bags; rows of unequal shapes.
---
---```lua
---local jt = peri.JaggedTensor.from_dense({ { 1, 2 }, { 3 } }, { { 0.5, 0.5 }, { 1 } })
---print(jt:to_dense()[1]:numel(), jt:to_dense_weights()[2]:item()) --> 2 1
---```
---@param values (peri.Tensor|number[])[] The values of each bag: `[n]` or `[n, ...]`. Lists of numbers become `f32`.
---@param weights? (peri.Tensor|number[])[] The weights of each bag: `[n]` (default: none).
---@param device? string Where lists go (default: the rank's device).
---@return peri.JaggedTensor
function peri.JaggedTensor.from_dense(values, weights, device) end

---Make one of a padded matrix: bag i has the first `lengths[i]` columns of row i.
---
---Errors: lengths that are negative, or above the number of columns.
---
---```lua
---local padded = peri.tensor { { 1, 2, 0 }, { 3, 0, 0 } }
---print(table.concat(peri.JaggedTensor.from_dense_lengths(padded, { 2, 1 }):values():to_list(),
---  " "))
-----> 1 2 3
---```
---@param values peri.Tensor The padded rows: `[B, columns, ...]`.
---@param lengths peri.Tensor|integer[] How many columns of each row belong to the bag: `[B]`.
---@param weights? peri.Tensor A weight for each column: `[B, columns]` (default: none).
---@return peri.JaggedTensor
function peri.JaggedTensor.from_dense_lengths(values, lengths, weights) end

---One without bags.
---
---Errors: an unknown argument or dtype.
---
---```lua
---print(#peri.JaggedTensor.empty { values_dtype = "i64" }) --> 0
---```
---@param args? peri.JaggedTensor.empty.args By default there are no weights.
---@return peri.JaggedTensor
function peri.JaggedTensor.empty(args) end

---@class peri.JaggedTensor.empty.args
---@field is_weighted? boolean Whether it has (no) weights (default: false).
---@field device? string Name of the device (default: the rank's).
---@field values_dtype? string dtype of the values (default: `f32`).
---@field weights_dtype? string dtype of the weights (default: `f32`).
---@field lengths_dtype? string dtype of the lengths (default: `i32`).

---Room for a copy of another one, for `copy_`.
---
---Errors: a device that cannot be used.
---
---```lua
---local jt = peri.JaggedTensor { values = { 1, 2, 3 }, lengths = { 2, 0, 1 } }
---print(peri.JaggedTensor.empty_like(jt):copy_(jt):equal(jt)) --> true
---```
---@param jt peri.JaggedTensor The one that is to be copied later.
---@param device? string Where the room is (default: the device of `jt`).
---@return peri.JaggedTensor
function peri.JaggedTensor.empty_like(jt, device) end

---All values, bag by bag.
---@return peri.Tensor # `[N]` or `[N, ...]`
function peri.JaggedTensor:values() end

---How many values each bag has.
---@return peri.Tensor # `[B]`
function peri.JaggedTensor:lengths() end

---Where each bag begins, and the end of the last one.
---@return peri.Tensor # `[B + 1]`
function peri.JaggedTensor:offsets() end

---The offsets as a list of numbers. May wait for the device.
---@return integer[]
function peri.JaggedTensor:offset_list() end

---A weight for each value; an error if there are none.
---
---```lua
---local jt = peri.JaggedTensor { values = { 1, 2, 3 }, lengths = { 2, 0, 1 } }
---local weighted = jt:with_weights(peri.tensor { 1, 2, 4 })
---print(jt:weights_or_none(), weighted:weights():item(2)) --> nil 4
---print(table.concat(weighted:to_padded_dense_weights(2):to_list(), " ")) --> 1 2 0 0 4 0
---```
---@return peri.Tensor # `[N]`
function peri.JaggedTensor:weights() end

---A weight for each value.
---@return peri.Tensor|nil # `[N]`; nil: there are none.
function peri.JaggedTensor:weights_or_none() end

---The same bags of what a function makes of the values: any layer that works row by row, such as `Linear`, `LayerNorm`
---and `Dropout`. Weights stay.
---
---Errors: a result that is no tensor, or has other rows.
---
---```lua
---local jt = peri.JaggedTensor { values = peri.ones { 3, 4 }, lengths = { 2, 0, 1 } }
---print(#jt:map(peri.nn.Linear { in_features = 4, out_features = 2 })) --> 3
---print(jt:map(peri.nn.LayerNorm { normalized_shape = 4 }):longest()) --> 2
---```
---@param f fun(values: peri.Tensor): peri.Tensor Gets the values `[n, ...]`, returns as many rows.
---@return peri.JaggedTensor
function peri.JaggedTensor:map(f) end

---The same bags with other weights.
---
---Errors: another number of weights than values.
---@param weights peri.Tensor A weight for each value: `[N]`.
---@return peri.JaggedTensor
function peri.JaggedTensor:with_weights(weights) end

---Check lengths and offsets now. Waits for the device.
---@return peri.JaggedTensor # Itself.
function peri.JaggedTensor:validate() end

---Number of values of the longest bag. May wait for the device.
---@return integer
function peri.JaggedTensor:longest() end

---One tensor for each bag.
---@return peri.Tensor[] # Views of the values: `[n]` or `[n, ...]` each.
function peri.JaggedTensor:to_dense() end

---The weights of each bag.
---@return peri.Tensor[] # Views of the weights: `[n]` each.
function peri.JaggedTensor:to_dense_weights() end

---A matrix with a row for each bag: short bags are padded, long ones cut. Gradients go through it.
---
---Errors: a length that is no whole number from 0 on.
---
---```lua
---local jt = peri.JaggedTensor { values = { 1, 2, 3 }, lengths = { 2, 0, 1 } }
---print(table.concat(jt:to_padded_dense(2, -1):to_list(), " ")) --> 1 2 -1 -1 3 -1
---```
---@param desired_length? integer Columns of the matrix (default: the longest bag).
---@param padding_value? number What stands where there is no value (default: 0).
---@return peri.Tensor # `[B, length, ...]`
function peri.JaggedTensor:to_padded_dense(desired_length, padding_value) end

---As `to_padded_dense`, of the weights in place of the values.
---
---Errors: a JaggedTensor without weights.
---@param desired_length? integer Columns of the matrix (default: the longest bag).
---@param padding_value? number What stands where there is no weight (default: 0).
---@return peri.Tensor # `[B, length]`
function peri.JaggedTensor:to_padded_dense_weights(desired_length, padding_value) end

---This JaggedTensor on another device; itself if it is there already.
---
---Errors: a device that cannot be used.
---
---```lua
---local jt = peri.JaggedTensor { values = { 1, 2, 3 }, lengths = { 2, 0, 1 } }
---print(jt:to("cpu"):validate():share():equal(jt), jt:size_in_bytes() >= 12,
---  (pcall(jt.pin_memory, jt, "cpu"))) --> true true false
---```
---@param device? string Name of the device (default: the rank's).
---@param non_blocking? boolean Copy from pinned memory without waiting (default: false).
---@return peri.JaggedTensor
function peri.JaggedTensor:to(device, non_blocking) end

---A copy in memory of the host that is pinned for a device, from which copies to it need not wait.
---
---Errors: a JaggedTensor that is not on the host.
---@param device? string Name of the device (default: the rank's).
---@return peri.JaggedTensor
function peri.JaggedTensor:pin_memory(device) end

---Overwrite this one with another of the same counts.
---
---Errors: other counts.
---@param src peri.JaggedTensor What is copied.
---@return peri.JaggedTensor # Itself.
function peri.JaggedTensor:copy_(src) end

---Whether lengths, values and weights are the same, bit for bit. Waits for the device.
---
---Errors: another that is no JaggedTensor.
---@param other peri.JaggedTensor The one to compare with.
---@return boolean
function peri.JaggedTensor:equal(other) end

---Bytes of its tensors.
---@return integer
function peri.JaggedTensor:size_in_bytes() end

---The device's name.
---@return string
function peri.JaggedTensor:device() end

---Give the memory back now, without waiting for the collector. The handle cannot be used afterwards.
---
---```lua
---local jt = peri.JaggedTensor { values = { 1, 2, 3 }, lengths = { 2, 0, 1 } }
---jt:release()
---print(jt) --> JaggedTensor (released)
---```
function peri.JaggedTensor:release() end

---Another handle of the same JaggedTensor, which outlives the scope that it is made in.
---@return peri.JaggedTensor
function peri.JaggedTensor:share() end

---A matrix whose columns have names: what an EmbeddingBagCollection makes of a KeyedJaggedTensor, with the columns of
---each feature. `#kt` is the number of keys; `kt["f"]` are the columns of a key.
---
---Errors: an argument that is missing or unknown; columns that do not sum up to those of the values.
---
---```lua
---local kt = peri.KeyedTensor { keys = { "f", "g" }, length_per_key = { 2, 1 },
---  values = peri.tensor { { 1, 2, 3 }, { 4, 5, 6 } } }
---print(#kt, kt:values():size(2), kt["g"]:item(1), kt:device()) --> 2 3 6 cpu
---print(table.concat(kt:keys(), " "), table.concat(kt:offset_per_key(), " "), kt:key_dim())
-----> f g 0 2 3 1
---print(kt:length_per_key()[1], #kt:key_list(), kt:size_in_bytes(), kt:to("cpu"):get("f"):size(2))
-----> 2 2 24 2
---```
---@class peri.KeyedTensor
---@overload fun(args: peri.KeyedTensor.args): peri.KeyedTensor
peri.KeyedTensor = {}

---@class peri.KeyedTensor.args
---@field keys string[] Names of the keys.
---@field length_per_key integer[] How many columns each key has.
---@field values peri.Tensor|number[][] The matrix: `[B, sum of length_per_key]`.
---@field key_dim? integer 1: the keys divide the columns; 0: the rows (default: 1).

---Join one matrix for each key.
---
---Errors: another number of tensors than keys; other numbers of rows.
---
---```lua
---local kt = peri.KeyedTensor.from_tensor_list({ "f", "g" },
---  { peri.ones { 3, 2 }, peri.zeros { 3, 4 } })
---print(kt:values():size(2), kt:to_dict().g:size(2), (pcall(kt.pin_memory, kt, "cpu")))
-----> 6 4 false
---```
---@param keys string[] Names of the keys.
---@param tensors peri.Tensor[] The matrix of each key: `[B, D]`.
---@param dim? integer 1: side by side; 0: one below the other (default: 1).
---@return peri.KeyedTensor
function peri.KeyedTensor.from_tensor_list(keys, tensors, dim) end

---The names of the keys.
---@return string[]
function peri.KeyedTensor:keys() end

---The keys as one shared object, which is cheap to pass on.
---@return peri.jagged.Keys
function peri.KeyedTensor:key_list() end

---The whole matrix.
---@return peri.Tensor # `[B, columns of all keys]`
function peri.KeyedTensor:values() end

---The dimension that keys divide: 1 or 0.
---@return integer
function peri.KeyedTensor:key_dim() end

---The device's name.
---@return string
function peri.KeyedTensor:device() end

---Columns of each key.
---@return integer[]
function peri.KeyedTensor:length_per_key() end

---The first column of each key, and the end of the last one.
---@return integer[]
function peri.KeyedTensor:offset_per_key() end

---The columns of a key. `kt["name"]` is the same, unless a method has that name.
---
---Errors: a key that is not there; the error lists the keys.
---@param key string Name of the key.
---@return peri.Tensor # A view: `[B, D]`.
function peri.KeyedTensor:get(key) end

---The columns of every key by name.
---@return table<string, peri.Tensor> # `[B, D]` each.
function peri.KeyedTensor:to_dict() end

---This KeyedTensor on another device.
---
---Errors: a device that cannot be used.
---@param device? string Name of the device (default: the rank's).
---@param non_blocking? boolean Copy from pinned memory without waiting (default: false).
---@return peri.KeyedTensor
function peri.KeyedTensor:to(device, non_blocking) end

---A copy in memory of the host that is pinned for a device.
---
---Errors: a KeyedTensor that is not on the host.
---@param device? string Name of the device (default: the rank's).
---@return peri.KeyedTensor
function peri.KeyedTensor:pin_memory(device) end

---Give the memory back now, without waiting for the collector. The handle cannot be used afterwards.
function peri.KeyedTensor:release() end

---Bytes of its values.
---@return integer
function peri.KeyedTensor:size_in_bytes() end

---For each group the columns of its keys side by side, from whichever KeyedTensor has them. A key may be in several
---groups, or in none.
---
---Errors: a key that no KeyedTensor has; other numbers of rows.
---
---```lua
---local a = peri.KeyedTensor { keys = { "f", "g" }, length_per_key = { 1, 1 },
---  values = peri.tensor { { 1, 2 } } }
---local b = peri.KeyedTensor { keys = { "h" }, length_per_key = { 1 },
---  values = peri.tensor { { 3 } } }
---local parts = peri.KeyedTensor.regroup({ a, b }, { { "h", "f" }, { "g" } })
---print(table.concat(parts[1]:to_list(), " "), parts[2]:item()) --> 3 1 2
---print(peri.KeyedTensor.regroup_as_dict({ a, b }, { { "h", "f" } }, { "left" }).left:size(2))
-----> 2
---```
---@param kts peri.KeyedTensor[] Where the columns are.
---@param groups string[][] For each result the names of its keys.
---@return peri.Tensor[] # `[B, D]` each.
function peri.KeyedTensor.regroup(kts, groups) end

---As `regroup`, by name.
---
---Errors: another number of names than groups; what `regroup` refuses.
---@param kts peri.KeyedTensor[] Where the columns are.
---@param groups string[][] For each result the names of its keys.
---@param names string[] The name of each result.
---@return table<string, peri.Tensor> # `[B, D]` each.
function peri.KeyedTensor.regroup_as_dict(kts, groups, names) end

---@class peri.jagged
local jagged = {}

---A list of names that many containers share: comparing two of them is comparing a number. `#keys` is how many.
---
---```lua
---local keys = peri.jagged.Keys.of { "f", "g" }
---print(#keys, keys:find("g"), keys:unique(), keys:equal { "f", "g" }, keys:list()[1])
-----> 2 2 true true f
---keys:release()
---```
---@class peri.jagged.Keys
jagged.Keys = {}

---Make one of a list of names. The same Lua list gives the same object, as long as its entries stay.
---
---Errors: an entry that is no string, or empty.
---@param names string[]|peri.jagged.Keys Names; what is a list of keys already passes through.
---@return peri.jagged.Keys
function jagged.Keys.of(names) end

---The names, as a list of strings.
---@return string[] # A new list.
function jagged.Keys:list() end

---The place of a name.
---
---Errors: what is no string.
---@param name string The name.
---@return integer|nil # From 1; nil: it is not there.
function jagged.Keys:find(name) end

---Whether no name stands there twice.
---@return boolean
function jagged.Keys:unique() end

---Whether another list has the same names in the same order.
---
---Errors: entries that are no strings.
---@param other string[]|peri.jagged.Keys The other one.
---@return boolean
function jagged.Keys:equal(other) end

---Give it up before the garbage collector does. It cannot be used afterwards.
function jagged.Keys:release() end
