-- mc_embedding.lua: embedding collections that take raw ids: ManagedCollisionEmbeddingBagCollection and
-- ManagedCollisionEmbeddingCollection, TorchRec's. Not sharded.
--
--   local mc = peri.ManagedCollisionEmbeddingBagCollection {
--     embedding_bag_collection = ebc, managed_collision_collection = mcc, return_remapped_features = true,
--   }
--   local pooled, remapped = mc(kjt)
local P = require "perilune.ffi"
local util = require "perilune.util"
local Module = require "perilune.nn.module"
local ManagedCollisionCollection = require "perilune.embed.mc_collection"
local Moment = require "perilune.embed.mc_moment"
local signature = require "perilune.signature"

local M = {}

local Base = Module:extend "BaseManagedCollisionEmbeddingCollection"
M.BaseManagedCollisionEmbeddingCollection = Base
--- What its two subclasses share; there are no objects of itself.
function Base:init()
  P.fail(("%s: allowed: its subclasses, ManagedCollisionEmbeddingBagCollection and "
    .. "ManagedCollisionEmbeddingCollection"):format(
    self.class_name))
end

--- The collections' configurations are the same tables.
local function check_tables(self, tables, configs)
  local f = self.class_name
  if #tables ~= #configs then
    P.fail(("%s: the collection has %d tables, managed_collision_collection %d"):format(f, #tables, #configs))
  end
  for i, t in ipairs(tables) do
    local c = configs[i]
    if t.name ~= c.name or t.num_embeddings ~= c.num_embeddings
      or table.concat(t.feature_names, "\n") ~= table.concat(c.feature_names, "\n") then
      P.fail(("%s: table %d of the collection is '%s' (%d rows; features %s), that of managed_collision_collection "
        .. "'%s' (%d; %s)"):format(f, i, t.name, t.num_embeddings, table.concat(t.feature_names, ", "), c.name,
        c.num_embeddings, table.concat(c.feature_names, ", ")))
    end
  end
end

--- The CollisionMoment of a collection's rows and of the maps of `mcc`.
local function moment_of(title, collection, mcc)
  local modules = mcc:managed_collision_modules()
  local moment = Moment(title, util.map(mcc:embedding_configs(), function(t)
    return { name = t.name, weight = ("_embedding_module.%s.%s.weight"):format(collection.parameter_prefix, t.name),
      map = function() return modules[t.name]:_settled_map() end,
      buckets = function() return 0, modules[t.name]:buckets() end,
      file = function() return collection._goes_with and collection:_file(t.name) or nil end }
  end), true)
  for _, module in util.ordered(modules) do module:_goes_with(moment) end
  if collection._goes_with then collection:_goes_with(moment) end -- quantized tables have no files
  return moment
end

local function define_class(name, argument, class_name, configs)
  local class = Base:extend(name)
  M[name] = class
  class.sharder = name .. "Sharder" -- in peri.shard
  local arguments = {
    [argument] = util.required, managed_collision_collection = util.required,
    return_remapped_features = false,           -- the second result: the batch with rows instead of ids
    allow_in_place_embed_weight_update = false, -- rows are always reset in place, beneath the tape: a note
  }
  function class:init(args)
    local a = util.named(name, args, arguments)
    local collection, mcc = a[argument], a.managed_collision_collection
    if type(collection) ~= "table" or type(collection[configs]) ~= "function" then
      P.fail(("%s: %s is %s, wanted an %s"):format(name, argument, signature.text(collection), class_name))
    end
    if not ManagedCollisionCollection.is(mcc) then
      P.fail(("%s: managed_collision_collection is %s, wanted a ManagedCollisionCollection"):format(name,
        signature.text(mcc)))
    end
    check_tables(self, collection[configs](collection), mcc:embedding_configs())
    self._managed_collision_collection, self._embedding_module = mcc, collection
    self._moment = moment_of(name, collection, mcc)
    self.return_remapped_features = a.return_remapped_features
    self.allow_in_place_embed_weight_update = a.allow_in_place_embed_weight_update
  end
end

--- Make rows start again that got another id: their weights, and what optimizers know of them.
local function reset_rows(self)
  local collection, mcc = self._embedding_module, self._managed_collision_collection
  local configs, modules = mcc:embedding_configs(), mcc:managed_collision_modules()
  for i = 1, #configs do
    local name = configs[i].name
    local rows = modules[name]:evict()
    if rows then collection:reset_rows(name, rows) end
  end
end

--- What the collection gives for the rows of the ids, and the batch with rows instead of ids or nil. In training mode
--- ids are learned first, and rows that get another id start again before they are looked up.
function Base:forward(features)
  local collection = self._embedding_module
  if self.training and (not collection.reset_rows or collection.data_types) then -- data_types: rows are looked up only
    P.fail(("%s: it is in training mode, and %s cannot make rows that get other ids start again; in evaluation mode "
      .. "(:eval()) no id is learned"):format(self.class_name, collection.class_name))
  end
  if self._moment.open then
    self._moment:check()
    self._moment:used()
  end
  local remapped = self._managed_collision_collection(features)
  if self.training then reset_rows(self) end
  local embeddings = self._embedding_module(remapped)
  return embeddings, self.return_remapped_features and remapped or nil
end

--- See Module:check_moment.
function Base:check_moment() self._moment:check() end

--- What time it is for all tables that have times to live: see HashZchManagedCollisionModule:set_time.
function Base:set_time(now) self._managed_collision_collection:set_time(now) end
--- By table, rows that an id could have.
function Base:open_slots() return self._managed_collision_collection:open_slots() end
--- Counts and rates by table.
function Base:statistics() return self._managed_collision_collection:statistics() end
function Base:embedding_module() return self._embedding_module end
function Base:managed_collision_collection() return self._managed_collision_collection end

define_class("ManagedCollisionEmbeddingBagCollection", "embedding_bag_collection", "EmbeddingBagCollection",
  "embedding_bag_configs")
define_class("ManagedCollisionEmbeddingCollection", "embedding_collection", "EmbeddingCollection", "embedding_configs")

return M
