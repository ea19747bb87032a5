-- mc_collection.lua: managed collision of several tables: ManagedCollisionCollection, TorchRec's.
--
--   local mcc = embed.ManagedCollisionCollection {
--     managed_collision_modules = { users = embed.MCHManagedCollisionModule { ... } },
--     embedding_configs = { peri.EmbeddingBagConfig { name = "users", num_embeddings = 1000, ... } },
--   }
--   local remapped = mcc(kjt)     -- rows for ids; keys in the order of the configurations
local P = require "perilune.ffi"
local util = require "perilune.util"
local jagged = require "perilune.jagged"
local Module = require "perilune.nn.module"
local config = require "perilune.embed.config"
local mc_state = require "perilune.embed.mc_state"
local ManagedCollisionModule = require("perilune.embed.mc_modules").ManagedCollisionModule
local signature = require "perilune.signature"
local C = P.C

local Keys, KeyedJaggedTensor = jagged.Keys, jagged.KeyedJaggedTensor

local ManagedCollisionCollection = Module:extend "ManagedCollisionCollection"
ManagedCollisionCollection.sharder = "ManagedCollisionCollectionSharder" -- in peri.shard

local arguments = {
  managed_collision_modules = util.required.table, -- table's name -> module
  embedding_configs = util.required.list,          -- of the same tables: their order and that of their features are
                                                   -- those of the output
  need_preprocess = true,                          -- false: ids come hashed, modules' input_hash_func are left out
}

--- Names of all features in order; those of a table are neighbours.
local function features_of(self, configs, modules)
  local f, names, tables = self.class_name, {}, {}
  for i, t in ipairs(configs) do
    if not config.BaseEmbeddingConfig.is(t) then
      P.fail(("%s: embedding_configs[%d] is %s, wanted an EmbeddingBagConfig or EmbeddingConfig"):format(f, i,
        signature.text(t)))
    end
    if tables[t.name] then P.fail(("%s: two tables are named '%s'"):format(f, t.name)) end
    local module = modules[t.name]
    if not ManagedCollisionModule.is(module) then
      P.fail(("%s: managed_collision_modules has %s for table '%s', wanted a ManagedCollisionModule"):format(f,
        module == nil and "nothing" or signature.text(module), t.name))
    end
    if module:output_size() ~= t.num_embeddings then
      P.fail(("%s: the module of table '%s' gives %d rows, the table has %d"):format(f, t.name, module:output_size(),
        t.num_embeddings))
    end
    tables[t.name] = true
    for _, name in ipairs(t.feature_names) do
      if self._feature_to_table[name] then
        P.fail(("%s: feature '%s' is of tables '%s' and '%s'; its ids can have rows of one only"):format(f, name,
          self._feature_to_table[name], t.name))
      end
      names[#names + 1], self._feature_to_table[name] = name, t.name
    end
  end
  for name in util.ordered(modules) do
    if not tables[name] then
      P.fail(("%s: managed_collision_modules names table '%s', which has no configuration"):format(f, name))
    end
  end
  return names
end

function ManagedCollisionCollection:init(args)
  local a = util.named(self.class_name, args, arguments)
  local configs, modules = a.embedding_configs, {}
  self._embedding_configs, self._feature_to_table, self.need_preprocess = configs, {}, a.need_preprocess
  self._features = features_of(self, configs, a.managed_collision_modules)
  for _, t in ipairs(configs) do
    local module = a.managed_collision_modules[t.name]
    module:_belongs_to(t.name, t.feature_names)
    if not a.need_preprocess then module.input_hash_func = false end
    modules[t.name] = module
  end
  self._managed_collision_modules = modules
  self._seen, self._order = false, false
end

--- The keys of a batch in order of the features; nil: they are. An error if one is missing.
local function order_of(self, keys)
  local order, same = {}, C.peri_keys_count(keys) == #self._features
  for i, name in ipairs(self._features) do
    local at = C.peri_keys_find(keys, name)
    if at < 0 then
      P.fail(("%s: the batch has no feature '%s' (of table '%s'); those are: %s"):format(self.class_name, name,
        self._feature_to_table[name], table.concat(Keys._list(keys), ", ")))
    end
    order[i], same = at, same and at == i - 1
  end
  return not same and order
end

local function arranged_by_table(self, features)
  local keys = C.peri_kjt_keys(KeyedJaggedTensor.ptr(features))
  if not self._seen or self._seen.ptr ~= keys then
    -- kept, so that its address stays its own
    self._order, self._seen = order_of(self, keys), P.lasting(Keys._share, keys)
  end
  return self._order and features:permute(self._order) or features
end

--- Rows for the ids of a KeyedJaggedTensor: its features in the order of the configurations, further keys left out;
--- weights, samples and inverse indices stay. An id without a row is what the table's module says of on_miss; -1 stays
--- in its bag. One step of every table in training mode.
function ManagedCollisionCollection:forward(features)
  if not KeyedJaggedTensor.is(features) then
    P.fail(("%s: features is %s, wanted a KeyedJaggedTensor"):format(self.class_name, signature.text(features)))
  end
  features = util.resolve(features)
  local batch = arranged_by_table(self, features)
  local values, edges, rows, key = batch:values(), batch:offset_per_key(), {}, 0
  for t = 1, #self._embedding_configs do
    local table_config, ids = self._embedding_configs[t], {}
    for i = 1, #table_config.feature_names do ids[i] = values:slice(1, edges[key + i], edges[key + i + 1]) end
    local found = self._managed_collision_modules[table_config.name]:_remap_values(ids)
    for i = 1, #ids do rows[key + i] = found[i] end
    key = key + #ids
  end
  return batch:with_values(mc_state.join(rows))
end

--- Rows that got another id since the last call: table's name -> i64 tensor; tables without any are left out.
function ManagedCollisionCollection:evict()
  local evicted = {}
  for _, t in ipairs(self._embedding_configs) do evicted[t.name] = self._managed_collision_modules[t.name]:evict() end
  return evicted
end

--- What time it is for all tables that have times to live: see HashZchManagedCollisionModule:set_time.
function ManagedCollisionCollection:set_time(now)
  local any = false
  for _, module in util.ordered(self._managed_collision_modules) do
    if module.set_time then
      module:set_time(now)
      any = true
    end
  end
  if not any then
    P.fail(self.class_name .. ":set_time: no table has a HashZchManagedCollisionModule, whose ids have times to live")
  end
end

local function call_each_module(self, method)
  local result = {}
  for name, module in util.ordered(self._managed_collision_modules) do result[name] = module[method](module) end
  return result
end
--- By table: rows that are free, numbers of buckets, counts and rates.
function ManagedCollisionCollection:open_slots() return call_each_module(self, "open_slots") end
function ManagedCollisionCollection:table_to_number_buckets() return call_each_module(self, "buckets") end
function ManagedCollisionCollection:statistics() return call_each_module(self, "statistics") end

--- The tables' configurations, in order; the modules by table; the features, in the order of outputs.
function ManagedCollisionCollection:embedding_configs() return self._embedding_configs end
function ManagedCollisionCollection:managed_collision_modules() return self._managed_collision_modules end
function ManagedCollisionCollection:_module_of(name) return self._managed_collision_modules[name] end
function ManagedCollisionCollection:feature_names() return self._features end

return ManagedCollisionCollection
