-- managed_collision.lua: Raw ids as rows: managed collision.
--
-- Raw 64-bit ids become rows of a table: an id that is learned gets a row of its own, and loses it to a better one. In
-- training mode a batch is a step: ids are counted, learned and forgotten; in evaluation mode (`eval()`) they are only
-- looked up. docs/managed_collision.md tells more.
---@meta

---@class peri
local peri = {}
---@class peri.embed
local embed = {}

---What the modules of one table have. Called with JaggedTensors by name, or with a KeyedJaggedTensor, of all features
---of the table, it returns the same with rows in place of ids.
---
---Errors: features that are neither; a batch with other features than those of the table; an id without a row with
---`on_miss = "error"`.
---
---```lua
---local policy = peri.embed.LFU_EvictionPolicy {}
---local mch = peri.MCHManagedCollisionModule { zch_size = 8, eviction_policy = policy,
---  eviction_interval = 1, buckets = 1 }
---local batch = peri.KeyedJaggedTensor.from_lists { keys = { "f" },
---  { { 1000000007, 1000000007, 5 } } }
---local rows = mch:forward(batch):values():to_list()
---print(rows[1] == rows[2], mch:remap(batch):values():numel(), mch:open_slots(),
---  mch:extra_text()) --> true 3 5 8 rows, 1 bucket
---print(mch:output_size(), tostring(mch:input_size()), mch:buckets(),
---  mch:output_segments()[2]) --> 8 9223372036854775807LL 1 8
---print(peri.embed.ManagedCollisionModule.is(mch)) --> true
---print(mch:statistics().ids > 0, mch:evict() ~= nil, mch:copy():statistics().rows)
-----> true true 8
---```
---@class peri.embed.ManagedCollisionModule: peri.nn.Module
embed.ManagedCollisionModule = {}

---Rows for ids; one step in training mode. Calling the module calls it.
---@param features peri.KeyedJaggedTensor|table<string, peri.JaggedTensor> The ids of all features of the table.
---@return peri.KeyedJaggedTensor|table<string, peri.JaggedTensor> # The same bags and weights with rows.
function embed.ManagedCollisionModule:forward(features) end

---Rows for known ids; nothing is learned, whatever the mode.
---@param features peri.KeyedJaggedTensor|table<string, peri.JaggedTensor> The ids.
---@return peri.KeyedJaggedTensor|table<string, peri.JaggedTensor> # The same bags and weights with rows.
function embed.ManagedCollisionModule:remap(features) end

---Rows that have got another id since the last call. Who calls it lets these rows start again.
---@return peri.Tensor|nil # i64 `[n]`, ascending; nil: none.
function embed.ManagedCollisionModule:evict() end

---The rows of the table.
---@return integer
function embed.ManagedCollisionModule:output_size() end

---The range of ids (`input_hash_size`).
---@return integer
function embed.ManagedCollisionModule:input_size() end

---The number of buckets. An id belongs to one of them, and each is whole on one rank.
---@return integer
function embed.ManagedCollisionModule:buckets() end

---Rows where buckets begin, and the end.
---@return integer[]
function embed.ManagedCollisionModule:output_segments() end

---Counts since the map was made: `ids` that were asked for, each time it was; of these `hits` have a row of their own,
---of which `inserted` got it just then, and `missed` have none; `evicted` ids lost their row to another one;
---`collisions` are ids that found a row of another id where they looked first; `occupied` of the `rows` have an id;
---`iterations` is the number of steps. And shares: `hit_rate`, `insert_rate`, `miss_rate`, `collision_rate` of the
---ids, `eviction_rate`: evicted by inserted ids, `occupancy` of the rows.
---@return table<string, number>
function embed.ManagedCollisionModule:statistics() end

---Rows that no id has, and that one can get.
---@return integer
function embed.ManagedCollisionModule:open_slots() end

---A module that knows the same and learns for itself.
---@param device? string Where it is (default: as this one).
---@return peri.embed.ManagedCollisionModule
function embed.ManagedCollisionModule:copy(device) end

---Zero collision: ids are counted in windows; at the end of each, the best among those with a row and the new ones have
---rows. The last row of each bucket is shared by ids without a row.
---
---Errors: a size out of range; an unknown policy; arguments of TorchRec that have another place here.
---
---```lua
---local policy = function(count, last_access, now) return count end
---print(peri.MCHManagedCollisionModule({ zch_size = 8, eviction_policy = policy,
---  eviction_interval = 4 }):output_size()) --> 8
---```
---@class peri.MCHManagedCollisionModule: peri.embed.ManagedCollisionModule
---@overload fun(args: peri.MCHManagedCollisionModule.args): peri.MCHManagedCollisionModule
peri.MCHManagedCollisionModule = {}

---@class peri.MCHManagedCollisionModule.args
---@field zch_size integer Rows of the table.
---@field name? string Of the table, for messages (default: what the collection says).
---@field device? string Where the map is; `meta`: it gets no memory, to be sharded (default: that of the rank).
---@field output_global_offset? integer Added to rows (default: 0).
---@field output_segments? integer[] Rows where buckets begin, and the end (default: even).
---@field spread? string Which bucket an id belongs to: `hash`, `modulo`, `range` (default: hash).
---@field on_miss? string An id without a row gets: `row` (one that all share), `hash`, `drop` (-1), `error`, `default` (default: default).
---@field eviction_policy peri.embed.MCHEvictionPolicy|function Which ids keep their rows.
---@field eviction_interval integer Steps of a window.
---@field input_hash_size? integer The range of ids, for `input_hash_func` and spread `range` (default: all of 64 bits).
---@field input_hash_func? function `f(ids, input_hash_size)` -> ids, before all else (default: none).
---@field buckets? integer Buckets (default: by the number of rows).
---@field history_capacity? integer Only the first so many ids of a window count; 0: all (default: 0).
---@field mch_size? any Not used; only nil is allowed (default: none).
---@field mch_hash_func? any Not used; only nil is allowed (default: none).

---Probing: an id lives in the first free row from its home row on, at most `max_probe` rows away, and has it from its
---first batch on. Arguments of TorchRec that have another place here are taken with their usual value only; the error
---tells the place.
---
---Errors: a size out of range; buckets that do not divide the rows; a policy without its configuration.
---
---```lua
---local hash = peri.HashZchManagedCollisionModule { zch_size = 8, total_num_buckets = 2,
---  eviction_policy_name = "SINGLE_TTL_EVICTION",
---  eviction_config = peri.embed.HashZchEvictionConfig { features = { "f" }, single_ttl = 10 } }
---hash:set_time(100)
---print(hash:forward(peri.KeyedJaggedTensor.from_lists { keys = { "f" },
---  { { 77 } } }):values():numel(),
---  hash:open_slots()) --> 1 7
---```
---@class peri.HashZchManagedCollisionModule: peri.embed.ManagedCollisionModule
---@overload fun(args: peri.HashZchManagedCollisionModule.args): peri.HashZchManagedCollisionModule
peri.HashZchManagedCollisionModule = {}

---@class peri.HashZchManagedCollisionModule.args
---@field zch_size integer Rows of the table.
---@field name? string Of the table, for messages (default: what the collection says).
---@field device? string Where the map is; `meta`: it gets no memory, to be sharded (default: that of the rank).
---@field output_global_offset? integer Added to rows (default: 0).
---@field output_segments? integer[] Rows where buckets begin, and the end (default: even).
---@field spread? string Which bucket an id belongs to: `hash`, `modulo`, `range` (default: hash).
---@field on_miss? string An id without a row gets: `row` (one that all share), `hash`, `drop` (-1), `error`, `default` (default: default).
---@field total_num_buckets integer Buckets.
---@field max_probe? integer Rows that are looked at for an id (default: 128).
---@field input_hash_size? integer With spread `range`: ids are below it (default: 0).
---@field eviction_policy_name? string `SINGLE_TTL_EVICTION`, `PER_FEATURE_TTL_EVICTION`, `LRU_EVICTION` (default: none, rows stay).
---@field eviction_config? peri.embed.HashZchEvictionConfig|table How long ids are remembered (default: none).
---@field disable_fallback? boolean `on_miss = "drop"` (default: false).
---@field read_only_suffix? string Features whose names end so are looked up only (default: _readonly).
---@field is_inference? boolean TorchRec's; only the default is taken (default: false).
---@field tb_logging_frequency? integer TorchRec's; only the default is taken (default: 0).
---@field inference_dispatch_div_train_world_size? boolean TorchRec's; only the default is taken (default: false).
---@field start_bucket? integer TorchRec's; only the default is taken (default: 0).
---@field end_bucket? integer TorchRec's; only the default is taken (default: none).
---@field opt_in_prob? integer TorchRec's; only the default is taken (default: -1).
---@field percent_reserved_slots? number TorchRec's; only the default is taken (default: 0).
---@field track_id_freq? boolean TorchRec's; only the default is taken (default: false).
---@field enable_per_feature_lookups? boolean TorchRec's; only the default is taken (default: false).
---@field no_bag? boolean TorchRec's; only the default is taken (default: false).
---@field write_runtime_meta_dim? integer TorchRec's; only the default is taken (default: 0).
---@field persist_hash_zch_bucket? boolean TorchRec's; only the default is taken (default: true).

---The time that times to live are compared with from now on, in their unit; -1, and at first: the number of the step.
---@param now integer The time.
function peri.HashZchManagedCollisionModule:set_time(now) end

---How long a HashZchManagedCollisionModule remembers ids.
---
---Errors: a list without an entry for each feature; a time out of range.
---
---```lua
---print(peri.embed.HashZchEvictionConfig({ features = { "f" }, single_ttl = 10 }).single_ttl)
-----> 10
---```
---@class peri.embed.HashZchEvictionConfig
---@overload fun(args: peri.embed.HashZchEvictionConfig.args): peri.embed.HashZchEvictionConfig
embed.HashZchEvictionConfig = {}

---@class peri.embed.HashZchEvictionConfig.args
---@field features string[] Features of the table.
---@field single_ttl? integer Time to live, in steps or in the unit of `set_time` (default: none).
---@field per_feature_ttl? integer[] One for each feature (default: none).

---The base of policies, and with `score` one of your own. At the end of a window the ids with the best scores have
---rows. Or a class below it (`extend`) with a method `score(self, count, last_access, now)`.
---
---Errors: a score that is no function, or returns no number; an unknown filter.
---
---```lua
---local Mine = peri.embed.MCHEvictionPolicy:extend "Mine"
---function Mine:score(count, last_access) return count + last_access end
---print(Mine({}):score(2, 3),
---  peri.embed.MCHEvictionPolicy({ score = function(count) return count end }):score(4)) --> 5 4
---```
---@class peri.embed.MCHEvictionPolicy
---@overload fun(args?: peri.embed.MCHEvictionPolicy.args): peri.embed.MCHEvictionPolicy
embed.MCHEvictionPolicy = {}

---@class peri.embed.MCHEvictionPolicy.args
---@field score? function `score(count, last_access, now)` -> a number, higher is better (default: the class has one).
---@field threshold_filtering_func? function Which new ids count (default: all).

---Make a class of policies.
---@param base peri.embed.MCHEvictionPolicy The class to build on, written before the colon.
---@param name string Its name.
---@return peri.embed.MCHEvictionPolicy # The class.
function embed.MCHEvictionPolicy.extend(base, name) end

---Ids that were seen most often keep their rows.
---
---Errors: an unknown filter.
---
---```lua
---print(peri.embed.LFU_EvictionPolicy({}).threshold_filtering_func) --> false
---```
---@class peri.embed.LFU_EvictionPolicy: peri.embed.MCHEvictionPolicy
---@overload fun(args?: peri.embed.LFU_EvictionPolicy.args): peri.embed.LFU_EvictionPolicy
embed.LFU_EvictionPolicy = {}

---@class peri.embed.LFU_EvictionPolicy.args
---@field threshold_filtering_func? function Which new ids count (default: all).

---Ids that were seen last keep their rows: the score is `-(now - last access + 1) ^ decay_exponent`.
---
---Errors: a decay_exponent that is not above 0; an unknown filter.
---
---```lua
---print(peri.embed.LRU_EvictionPolicy({ decay_exponent = 2 }).decay_exponent) --> 2
---```
---@class peri.embed.LRU_EvictionPolicy: peri.embed.MCHEvictionPolicy
---@overload fun(args?: peri.embed.LRU_EvictionPolicy.args): peri.embed.LRU_EvictionPolicy
embed.LRU_EvictionPolicy = {}

---@class peri.embed.LRU_EvictionPolicy.args
---@field decay_exponent? number The exponent (default: 1).
---@field threshold_filtering_func? function Which new ids count (default: all).

---Ids that were seen often and lately keep their rows: the score is `count / (now - last access + 1) ^ decay_exponent`.
---
---Errors: a decay_exponent that is not above 0; an unknown filter.
---
---```lua
---print(peri.embed.DistanceLFU_EvictionPolicy({ decay_exponent = 2 }).decay_exponent) --> 2
---```
---@class peri.embed.DistanceLFU_EvictionPolicy: peri.embed.MCHEvictionPolicy
---@overload fun(args?: peri.embed.DistanceLFU_EvictionPolicy.args): peri.embed.DistanceLFU_EvictionPolicy
embed.DistanceLFU_EvictionPolicy = {}

---@class peri.embed.DistanceLFU_EvictionPolicy.args
---@field decay_exponent? number The exponent (default: 1).
---@field threshold_filtering_func? function Which new ids count (default: all).

---A filter of new ids: those that were seen more often than `threshold_skew_multiplier` (10) times the mean of the
---window. Called with `{ threshold_skew_multiplier = x }` it returns a filter with that number, for a policy.
---
---Errors: an argument out of its range.
---
---```lua
---local counts = peri.tensor({ 1, 1, 4 }, "i64")
---local mask = peri.embed.dynamic_threshold_filter(counts, 1.5)
---print(table.concat(mask:to_list(), " ")) --> 0 0 1
---print(tostring(peri.embed.dynamic_threshold_filter {
---  threshold_skew_multiplier = 2 })) --> dynamic_threshold_filter(2)
---print(table.concat((peri.embed.average_threshold_filter(counts)):to_list(), " ")) --> 0 0 1
---print((peri.embed.probabilistic_threshold_filter(counts, 1)):to_list()[3]) --> 1
---```
---@param counts peri.Tensor|table How often each id of a window was seen, i64 `[n]`; or the argument.
---@param value? number Another number for this call (default: that of the filter).
---@return peri.Tensor # bool: which stay: `[n]`.
---@return peri.Tensor # The threshold: a scalar.
function embed.dynamic_threshold_filter(counts, value) end

---A filter of new ids: those that were seen more often than the mean of the window. It takes no argument.
---
---Errors: an argument.
---@param counts peri.Tensor|table How often each id of a window was seen, i64 `[n]`; or `{}`.
---@return peri.Tensor # bool: which stay: `[n]`.
---@return peri.Tensor # The threshold: a scalar.
function embed.average_threshold_filter(counts) end

---A filter of new ids: one that was seen n times stays with probability `1 - (1 - per_id_probability) ^ n` (0.01).
---Called with `{ per_id_probability = x }` it returns a filter with that number.
---
---Errors: a probability that is not in 0..1.
---@param counts peri.Tensor|table How often each id of a window was seen, i64 `[n]`; or the argument.
---@param value? number Another probability for this call (default: that of the filter).
---@return peri.Tensor # bool: which stay: `[n]`.
---@return peri.Tensor # The random numbers: `[n]`.
function embed.probabilistic_threshold_filter(counts, value) end

---A map of raw ids to rows, on which the modules are built. Methods: `remap(ids, training)` (a list of i64 tensors, one
---for each feature), `evicted()`, `statistics()`, `state_names()`, `state(i)`, `load(states, first_bucket, n_buckets)`,
---`window()`, `set_window(start, entries)`, `set_time(now)`.
---
---Errors: an argument that is missing or unknown; a kind, spread or on_miss that is not there.
---
---```lua
---local maps = peri.embed.mc_map
---local map = maps.new { name = "t", rows = 8, kind = "mch",
---  policy = peri.embed.LFU_EvictionPolicy {}, buckets = 2 }
---local rows = map:remap({ peri.tensor({ 1000000007, 1000000007 }, "i64") }, true)[1]
---print(rows:numel(), map:statistics().ids, maps.buckets(8),
---  table.concat(maps.segments(8, 2), " "))
-----> 2 2 1 0 4 8
---```
---@param args peri.embed.mc_map.new.args As of the modules; perilune/collision.h says more.
---@return any # The map.
function embed.mc_map.new(args) end

---@class peri.embed.mc_map.new.args
---@field name string Of the table, for messages.
---@field rows integer Rows of the table.
---@field kind string `mch` or `hash`.
---@field device? string Where ids are (default: the rank's device).
---@field buckets? integer How many buckets; 0: by the number of rows (default: 0).
---@field segments? integer[] Rows where buckets begin, and the end (default: what `segments` says).
---@field spread? string Which bucket an id goes to: `hash`, `modulo` or `range` (default: hash).
---@field input_hash_size? any With the spread `range`: ids are below it, at least 1 (default: 0).
---@field on_miss? string Ids without a row: `default`, `row`, `hash`, `drop` or `error` (default: default).
---@field first_bucket? integer The first bucket of this map (default: 0).
---@field n_buckets? integer How many buckets it has; 0: all (default: 0).
---@field policy? peri.embed.MCHEvictionPolicy Who loses a row (default: none).
---@field eviction_interval? integer Steps between two evictions (default: 1).
---@field seed? integer Of draws (default: that of `manual_seed`).
---@field evict? integer Of `hash`: the policy, a PERI_FORGET_ constant (default: none).
---@field history_capacity? integer Of `mch`: ids of a window that count, at most; 0: all (default: 0).
---@field max_probe? integer Of `hash`: rows that an id may be in; 0: 128 (default: 0).
---@field ttl? integer[] Of `hash`: how long rows of each feature live (default: for ever).
---@field n_features? integer Features of the table; 0: any number (default: 0).
---@field read_only? boolean[] Features whose ids learn nothing (default: none).

---How many buckets a table has, unless somebody says another number.
---
---Errors: what is no count.
---@param rows integer Rows of the table.
---@return integer
function embed.mc_map.buckets(rows) end

---The rows where buckets of a table begin, and their end.
---
---Errors: no bucket, or more than 2^24.
---@param rows integer Rows of the table.
---@param buckets integer How many buckets.
---@return integer[]
function embed.mc_map.segments(rows, buckets) end
