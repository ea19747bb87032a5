-- quant.lua: quantized collections in shards (TorchRec's quant_embeddingbag and quant_embedding): over the ranks of a
-- group, or over the places of one process (ShardingEnv.from_local), whose tables are looked up side by side. Either
-- way a batch takes the routes of the trained modules, and means are those of whole bags.
--
--   local sharder = peri.shard.QuantEmbeddingBagCollectionSharder {}
--   -- quant: a QuantEmbeddingBagCollection
--   local served = sharder:shard(quant, plan, peri.ShardingEnv.from_local(2))
--   local kt = served(kjt)
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local nn = require "perilune.nn"
local dist_group = require "perilune.dist.group"
local embed_config = require "perilune.embed.config"
local Remap = require "perilune.embed.remap"
local row_format = require "perilune.tensor.row_format"
local quant = require "perilune.embed.quant"
local copies = require "perilune.embed.copies"
local fp_quant = require "perilune.embed.fp_quant"
local plans = require "perilune.plan"
local sharding_types = require "perilune.plan.sharding_types"
local types = require "perilune.plan.types"
local ShardingEnv = require "perilune.plan.env"
local bag = require "perilune.shard.bag"
local config = require "perilune.shard.config"
local FeatureProcessorsCollection = require("perilune.embed.processor").FeatureProcessorsCollection
local sequence = require "perilune.shard.sequence"
local states = require "perilune.shard.state"
local ModuleSharder = require("perilune.shard.sharder").ModuleSharder
local signature = require "perilune.signature"
local C, check = P.C, P.check

local M = {}
local KeyedJaggedTensor = jagged.KeyedJaggedTensor
local kjt_ptr = KeyedJaggedTensor.ptr

-- -- making -----------------------------------------------------------------------------------------------------------

local arguments = {
  tables = util.required.list,   -- configurations, as of the quantized collection
  plan = util.required,          -- EmbeddingModuleShardingPlan, or a table of ParameterShardings
  env = util.optional,           -- a ShardingEnv with a process group: over its ranks; without one: over so many places
                                 -- of this process
  group = util.optional,         -- instead of env: the ranks
  device = util.optional,
  output_dtype = "FP32",         -- FP32, FP16, BF16
  bounds_check_mode = "WARNING",
  pruned = util.optional.table,  -- as in the quantized collection
  is_weighted = false,
  need_indices = false,
  qcomm_codecs_registry = util.optional,
  name = "",
}

local group_out = ffi.new "peri_group *[1]"

--- A group of this process alone, whatever world it is in.
local function alone()
  local c = P.struct "peri_comm_config"
  c.transport = "self"
  check(C.peri_comm_open(c, group_out))
  return dist_group.Group(group_out[0])
end

--- The group that a module is for, and its places.
local function ranks_of(func, a)
  if a.env ~= nil and a.group ~= nil then
    P.fail(func .. ": env and group both say which ranks share the module; give one of them")
  end
  if a.env == nil then return dist_group.group_of(func, a.group), 1 end
  if not ShardingEnv.is(a.env) then
    P.fail(("%s: env is %s, wanted a ShardingEnv"):format(func, signature.text(a.env)))
  end
  if a.env.pg then return a.env.pg, 1 end
  return alone(), a.env.world_size
end

--- The tables as they are stored: rows that pruning left out are not; ids of pruned tables come by the names of the
--- outputs.
local function stored(tables, outputs, names, remap)
  if not remap then return tables end
  local keys = util.map(tables, function() return {} end)
  for i, output in ipairs(outputs) do table.insert(keys[output.table], names[i]) end
  return util.map(tables, function(t, i)
    local class = t.pooling and embed_config.EmbeddingBagConfig or embed_config.EmbeddingConfig
    return class { name = t.name, num_embeddings = math.max(remap.rows[i] or t.num_embeddings, 1),
      embedding_dim = t.embedding_dim, feature_names = keys[i], pooling = t.pooling, data_type = t.data_type }
  end)
end

local function check_kernels(func, plan, device)
  for name, sharding in util.ordered(plan.tables) do
    if not util.index_of(types.quant_kernels)[sharding.compute_kernel] then
      P.fail(("%s: table '%s' has compute_kernel '%s', allowed: %s"):format(func, name, sharding.compute_kernel,
        table.concat(types.quant_kernels, ", ")))
    end
  end
  if type(device) == "table" then
    P.fail(func .. ": device is a list, but the places of one process are on one device; allowed: its name")
  end
  if device == "meta" then P.fail(func .. ": device 'meta' has no shards; allowed: a device that takes memory") end
end

--- What is the same for both kinds: a class over `base`, a trained sharded module's, of which C is told another
--- configuration.
local function class_of(class_name, base)
  local class = base:extend(class_name)

  function class:init(args)
    local name = self.class_name -- a subclass's own
    local a = util.named(name, args, arguments)
    util.one_of(name, "output_dtype", a.output_dtype, util.keys(embed_config.data_types))
    util.one_of(name, "bounds_check_mode", a.bounds_check_mode, util.keys(embed_config.bounds_checks))
    local group, places = ranks_of(name, a)
    self.places, self.output_dtype, self.bounds_check_mode = places, a.output_dtype, a.bounds_check_mode
    self.configs = a.tables
    signature.value(name, "tables", a.tables, "embedding_configs")
    local names, outputs = embed_config.output_names(a.tables), {}
    for t, of in ipairs(a.tables) do
      for _, f in ipairs(of.feature_names) do outputs[#outputs + 1] = { table = t, name = f } end
    end
    self._outputs = outputs
    self._remap = a.pruned and P.lasting(Remap, name, a.tables, outputs, a.pruned, a.device) or false
    self._seen_keys, self._order = false, ffi.new("int32_t[?]", #outputs)
    self._output_keys = jagged.Keys.of(names)
    local plan = types.EmbeddingModuleShardingPlan.is(a.plan) and a.plan or types.EmbeddingModuleShardingPlan(a.plan)
    check_kernels(name, plan, a.device)
    local own = { tables = stored(a.tables, outputs, names, self._remap), plan = plan, group = group, device = a.device,
      is_weighted = a.is_weighted, qcomm_codecs_registry = a.qcomm_codecs_registry, name = a.name }
    if base == sequence.ShardedEmbeddingCollection then
      if a.is_weighted then P.fail(name .. ": is_weighted, but rows of ids are not weighted; allowed: false") end
      own.need_indices = a.need_indices
    end
    base.init(self, own)
    self:_keep_arguments(a)
    self:_register()
  end

  function class:_env(group)
    return self.places > 1 and ShardingEnv.from_local(self.places) or ShardingEnv.from_process_group(group)
  end
  function class:_configure(func, a, plan, env)
    return config.quantized(func, a, plan, env, self.kind, self.codec_slots, self)
  end

  --- Buffers "embedding_bags.NAME.weight"; the k-th of the pieces of a table on this rank has ".k" behind it.
  function class:_register()
    local seen, types_of = {}, {}
    for _, t in ipairs(self.configs) do types_of[t.name] = t.data_type end
    for _, s in ipairs(self:local_shards()) do
      local key = ("%s.%s.weight"):format(self.parameter_prefix, s.table)
      seen[key] = (seen[key] or -1) + 1
      self:register_buffer(seen[key] > 0 and key .. "." .. seen[key] or key,
        row_format.note(P.lasting(s.state, "weight"), embed_config._row_format(types_of[s.table], s.cols)))
    end
  end

  --- Over places the buffers. Over ranks what all ranks have, so that a checkpoint has it.
  function class:own_state()
    return self.places > 1 and nn.Module.own_state(self) or states.of_quantized(self)
  end

  return class
end

-- -- batches ----------------------------------------------------------------------------------------------------------

local kjt_out, desc = ffi.new "peri_kjt *[1]", P.struct "peri_kjt_info"
local kjt_args = P.struct "peri_kjt_config"

--- The place of an output's feature among keys.
local function key_of(self, output, keys, what)
  local key = C.peri_keys_find(keys, output.name)
  if key >= 0 then return key end
  P.fail(("%s: the batch has no %s '%s' (of table '%s'); those are: %s"):format(self.class_name, what, output.name,
    self.configs[output.table].name, table.concat(jagged.Keys._list(keys), ", ")))
end

--- The inverse indices of a batch, a row for each output; nil: it has none.
local function inverse_of(self, features)
  local keys = C.peri_kjt_inverse_keys(kjt_ptr(features))
  if keys == nil then return nil end
  check(C.peri_kjt_inverse_indices(kjt_ptr(features), Tensor.out))
  local inverse = Tensor.wrap(Tensor.out[0])
  local rows = Tensor.empty({ #self._outputs, inverse:size(2) }, inverse:dtype(), inverse:device())
  for i, output in ipairs(self._outputs) do
    local row = key_of(self, output, keys, "inverse indices of")
    rows:slice(1, i - 1, i):copy(inverse:slice(1, row, row + 1))
  end
  return rows
end

--- A batch with one key for each output, of its name: with the ids themselves, and with the rows that they mean in
--- pruned tables.
local function remapped(self, features)
  local kjt = kjt_ptr(features)
  local keys = C.peri_kjt_keys(kjt)
  if not (self._seen_keys and self._seen_keys.ptr == keys) then
    for i, output in ipairs(self._outputs) do self._order[i - 1] = key_of(self, output, keys, "feature") end
    self._seen_keys = P.lasting(jagged.Keys._share, keys)
  end
  check(C.peri_kjt_permute(kjt, self._order, #self._outputs, kjt_out))
  local arranged = KeyedJaggedTensor.wrap(kjt_out[0])
  local ids, lengths, weights = arranged:values(), arranged:lengths(), arranged:weights_or_none()
  local inverse = inverse_of(self, features)
  local function named(values)
    C.peri_kjt_describe(kjt_ptr(arranged), desc)
    P.clear(kjt_args)
    kjt_args.keys, kjt_args.values, kjt_args.lengths = self._output_keys.ptr, values.ptr, lengths.ptr
    kjt_args.weights, kjt_args.stride = weights and weights.ptr or nil, desc.stride
    if desc.variable_stride then
      kjt_args.ranks = desc.ranks
      kjt_args.stride_per_key_per_rank = C.peri_kjt_stride_per_key_per_rank(kjt_ptr(arranged))
    end
    if inverse then kjt_args.inverse_keys, kjt_args.inverse_indices = self._output_keys.ptr, inverse.ptr end
    check(C.peri_kjt_new(kjt_args, kjt_out))
    return KeyedJaggedTensor.wrap(kjt_out[0])
  end
  return named(ids), named(self._remap:rows_of_ids(arranged, ids))
end

local Bags = class_of("ShardedQuantEmbeddingBagCollection", bag.ShardedEmbeddingBagCollection)
M.ShardedQuantEmbeddingBagCollection = Bags

--- ShardedQuantEmbeddingBagCollection { tables =, plan =, env = or group =, ... }: its rows are zeros until copy_from
--- or load_state_dict. The result is a KeyedTensor [batch, columns], as of the collection in one piece.
function Bags:input_dist(features)
  if not self._remap then return bag.ShardedEmbeddingBagCollection.input_dist(self, features) end
  local _, rows = remapped(self, features)
  return bag.ShardedEmbeddingBagCollection.input_dist(self, rows)
end
function Bags:embedding_bag_configs() return self.configs end

local Rows = class_of("ShardedQuantEmbeddingCollection", sequence.ShardedEmbeddingCollection)
M.ShardedQuantEmbeddingCollection = Rows

--- ShardedQuantEmbeddingCollection { tables =, plan =, env = or group =, need_indices = false, ... }: likewise; the
--- result has a JaggedTensor for each feature.
function Rows:input_dist(features)
  if not self._remap then return sequence.ShardedEmbeddingCollection.input_dist(self, features) end
  local ids, rows = remapped(self, features)
  local stage = sequence.ShardedEmbeddingCollection.input_dist(self, rows)
  stage.features = ids
  return stage
end
function Rows:embedding_configs() return self.configs end

-- -- rows -------------------------------------------------------------------------------------------------------------

local COPY_ROWS = 65536

--- The part of stored rows that a shard of some columns has; each row's scale and bias go with every part of it.
local function columns_of(rows, shard, t, whole)
  if rows:dtype() ~= "u8" then return rows:slice(2, shard.col_offset, shard.col_offset + shard.cols) end
  if whole then return rows end
  local each = embed_config.data_bytes[t.data_type] -- blocks of columns begin where a byte does
  local header = rows:size(2) - math.ceil(t.embedding_dim * each) -- scale and bias
  local from, bytes = header + shard.col_offset * each, math.ceil(shard.cols * each)
  local part = Tensor.empty({ rows:size(1), header + bytes }, "u8", rows:device())
  if header > 0 then part:slice(2, 0, header):copy(rows:slice(2, 0, header)) end
  part:slice(2, header, header + bytes):copy(rows:slice(2, from, from + bytes))
  return part
end

--- An error unless a collection stores as many rows of table `t`, in the same way.
local function check_same(f, t, rows, collection)
  local i = collection:_table_index(t.name)
  local other = collection.tables[i]
  local function text(n, x) return ("%d x %d %s"):format(n, x.embedding_dim, x.data_type) end
  local here, there = text(rows, t), text(collection:_rows_of(i), other)
  if here ~= there then
    P.fail(("%s: table '%s' is %s in the collection, and %s here"):format(f, t.name, there, here))
  end
end

--- Take this rank's part of the rows of a quantized collection; a mere description leaves them as they are.
local function copy_from(self, collection)
  local f = self.class_name .. ":copy_from"
  if not quant.QuantCollection.is(collection) then
    P.fail(("%s: collection is %s, wanted a quantized collection"):format(f, signature.text(collection)))
  end
  if collection.device == "meta" or not collection:is_materialised() then return end
  local of = {}
  for i, t in ipairs(self.configs) do
    of[t.name] = t
    check_same(f, t, self._remap and self._remap.rows[i] or t.num_embeddings, collection)
  end
  for _, s in ipairs(self:local_shards()) do
    local t, state = of[s.table], collection:table_state(s.table)
    local rows = math.min(s.rows, state:size(1) - s.row_offset) -- a table of which nothing is left has one row here
    for row = 0, rows - 1, COPY_ROWS do
      P.scope(function()
        local past = math.min(row + COPY_ROWS, rows)
        local part = state:slice(1, s.row_offset + row, s.row_offset + past)
        s.write("weight", row, columns_of(part, s, t, s.cols == t.embedding_dim))
      end)
    end
  end
end

--- A module with the same rows and ranks on another device (nil: the same one), which shares nothing with this one.
--- Collective, over ranks.
local function copy(self, device)
  local a = util.copy(self._made_of)
  a.device, a.plan = device or a.device, self.plan
  if self._feature_processors then a.feature_processors = copies.copy_to_device(self._feature_processors, device) end
  local other = getmetatable(self)(a)
  local to = other:local_shards()
  for i, s in ipairs(self:local_shards()) do to[i].write("weight", 0, s.state "weight") end
  return other
end

-- -- behind processors ------------------------------------------------------------------------------------------------

--- ShardedQuantFeatureProcessedEmbeddingBagCollection { feature_processors = a FeatureProcessorsCollection, tables =,
--- plan =, ... }: the processors run at home, where whole bags are, and the weights that they make travel with the ids.
--- It is_weighted.
local Processed = Bags:extend "ShardedQuantFeatureProcessedEmbeddingBagCollection"
M.ShardedQuantFeatureProcessedEmbeddingBagCollection = Processed
Processed.parameter_prefix = "_embedding_bag_collection.embedding_bags"

function Processed:init(args)
  local own = type(args) == "table" and util.copy(args) or {}
  local processors = own.feature_processors
  if not FeatureProcessorsCollection.is(processors) then
    P.fail(("%s: feature_processors is %s, wanted a FeatureProcessorsCollection"):format(self.class_name,
      signature.text(processors)))
  end
  own.feature_processors, own.is_weighted = nil, true
  Bags.init(self, own)
  self._feature_processors, self._made_of.feature_processors = processors, processors
end

function Processed:input_dist(features)
  return Bags.input_dist(self, self:_at_home(fp_quant.QuantFeatureProcessedEmbeddingBagCollection.process, self,
    features))
end

function Processed:feature_processors() return self._feature_processors end

--- Take the rows of a collection, or of the one behind processors.
local function copy_rows_from(self, module)
  local Quant = fp_quant.QuantFeatureProcessedEmbeddingBagCollection
  return copy_from(self, Quant.is(module) and module:embedding_bag_collection() or module)
end

for _, class in ipairs { Bags, Rows, Processed } do
  class.copy_from, class.copy = copy_rows_from, copy
  function class:set_learning_rate()
    P.fail(self.class_name .. ": its rows are not trained, and have no learning rate")
  end
  class:_check_arguments "features: KeyedJaggedTensor"
  signature.check(class.class_name .. ":", class, { copy = "self: table, device: device?" })
end
Processed.copy_from = copy_rows_from -- it takes what is behind processors with them, too, and looks at it itself

-- -- sharders ---------------------------------------------------------------------------------------------------------

--- What the sharders of quantized collections share.
local BaseQuantEmbeddingSharder = util.class("BaseQuantEmbeddingSharder", ModuleSharder)
M.BaseQuantEmbeddingSharder = BaseQuantEmbeddingSharder
function BaseQuantEmbeddingSharder:compute_kernels() return types.quant_kernels end -- luacheck: ignore 212

--- processed: there are feature processors before the collection.
local function sharder_of(name, module_type, class, processed)
  local sharder = util.class(name, BaseQuantEmbeddingSharder)
  M[name] = sharder
  sharder.module_type = module_type
  local function collection_of(module) return processed and module:embedding_bag_collection() or module end
  function sharder:shardable_parameters(module) return collection_of(module).tables end -- luacheck: ignore 212
  --- The sharded module, with the rows of `module`. env: with a process group, over its ranks (collective); without
  --- one, over so many places of this process.
  function sharder:shard(module, plan, env, device, path)
    local from = collection_of(module)
    -- a description has shards where the others have theirs
    local own = device or from.device ~= "meta" and from.device or nil
    local sharded = class {
      tables = from.tables, plan = plan, env = env, device = own, output_dtype = from.output_dtype,
      bounds_check_mode = from.bounds_check_mode, pruned = from.pruned or nil, name = path,
      is_weighted = from.is_weighted and from:is_weighted(), need_indices = from.need_indices and from:need_indices(),
      qcomm_codecs_registry = self.qcomm_codecs_registry,
      feature_processors = processed and copies.copy_to_device(module:feature_processors(), own) or nil,
    }
    sharded:copy_from(from)
    return sharded
  end
  local kind = module_type.class_name
  signature.kind(kind, "a " .. kind, module_type.is)
  signature.check(name .. ":", sharder, { shardable_parameters = "self: Sharder, module: " .. kind,
    shard = "self: Sharder, module: " .. kind .. ", plan: table, env: table, device: any, path: string?" })
end

sharder_of("QuantEmbeddingBagCollectionSharder", quant.QuantEmbeddingBagCollection, Bags)
sharder_of("QuantEmbeddingCollectionSharder", quant.QuantEmbeddingCollection, Rows)
sharder_of("QuantFeatureProcessedEmbeddingBagCollectionSharder", fp_quant.QuantFeatureProcessedEmbeddingBagCollection,
  Processed, true)

-- -- one type ---------------------------------------------------------------------------------------------------------

local infer_types = sharding_types.names(function(t) return not (t.replica or t.in_node) end)
table.sort(infer_types)

--- A sharded module, without rows yet, of the tables of `infos` (a list of { embedding_config =, param_sharding = }),
--- all sharded by one type: table_wise, column_wise or row_wise. options: further arguments of the module.
local function infer_sharding(func, class, sharding_type, infos, env, device, options)
  util.one_of(func, "sharding_type", sharding_type, infer_types)
  local a, entries = util.copy(options or {}), {}
  a.tables, a.plan, a.env, a.device = {}, entries, env, device
  for i, info in ipairs(infos) do
    local given = util.named(("%s: infos[%d]"):format(func, i), info,
      { embedding_config = util.required, param_sharding = util.required })
    local t = signature.value(func, ("embedding_config of infos[%d]"):format(i), given.embedding_config,
      "embedding_config")
    local sharding = signature.value(func, ("param_sharding of infos[%d]"):format(i), given.param_sharding,
      "ParameterSharding")
    if sharding.sharding_type ~= sharding_type then
      P.fail(("%s: table '%s' is %s, allowed: %s"):format(func, t.name, sharding.sharding_type, sharding_type))
    end
    a.tables[i], entries[t.name] = t, sharding
  end
  return class(a)
end

function M.create_infer_embedding_bag_sharding(sharding_type, infos, env, device, options)
  return infer_sharding("create_infer_embedding_bag_sharding", Bags, sharding_type, infos, env, device, options)
end
function M.create_infer_embedding_sharding(sharding_type, infos, env, device, options)
  return infer_sharding("create_infer_embedding_sharding", Rows, sharding_type, infos, env, device, options)
end

--- The lengths of a batch are flat here: the batch itself.
function M.flatten_feature_lengths(features) return features:flatten_lengths() end

-- -- whole models -----------------------------------------------------------------------------------------------------

--- A copy of a model (copy_to_device).
function M.sharded_model_copy(module, device) return copies.copy_to_device(module, device) end

local model_arguments = {
  module = util.required,        -- a model with quantized collections, which are replaced in place
  env = util.required,           -- as of the sharders
  plan = util.optional,          -- what plan.load takes; default: whole tables, spread by size
  sharders = util.optional.list, -- default: the three above
  device = util.optional,
}

--- Shard the quantized collections of a model; returns it, and the plan. TorchRec's shard_quant_model.
function M.shard_quant_model(args)
  local func = "shard_quant_model"
  local a = util.named(func, args, model_arguments)
  if not nn.Module.is(a.module) then
    P.fail(("%s: module is %s, wanted an nn.Module"):format(func, signature.text(a.module)))
  end
  if not ShardingEnv.is(a.env) then
    P.fail(("%s: env is %s, wanted a ShardingEnv"):format(func, signature.text(a.env)))
  end
  local found, tables, within = {}, {}, {}
  local sharders = a.sharders or { M.QuantFeatureProcessedEmbeddingBagCollectionSharder {},
    M.QuantEmbeddingBagCollectionSharder {}, M.QuantEmbeddingCollectionSharder {} }
  for _, entry in ipairs(a.module:named_modules()) do
    for _, sharder in ipairs(sharders) do
      if not within[entry.module] and sharder.module_type.is(entry.module) then
        for _, inner in ipairs(entry.module:modules()) do within[inner] = true end
        found[#found + 1] = { path = entry.path, module = entry.module, sharder = sharder }
        tables[entry.path] = sharder:shardable_parameters(entry.module)
      end
    end
  end
  if #found == 0 then P.fail(func .. ": the model has no quantized collection (see quantize_embeddings)") end
  local env = a.env:with_modules(tables)
  local plan = a.plan ~= nil and plans.load(a.plan, env) or plans.table_wise_by_size(tables, env)
  for path in util.ordered(plan.plan) do
    if not tables[path] then
      P.fail(("%s: the plan names module '%s', which is no quantized collection of the model; those are: %s"):format(
        func, path, table.concat(util.keys(tables), ", ")))
    end
  end
  local model = a.module
  for _, f in ipairs(found) do
    local own = plan:get_plan_for_module(f.path)
    if not own then P.fail(("%s: module '%s' has no entry in the plan"):format(func, f.path)) end
    f.sharder:check_plan(own, a.device, f.path, "the plan")
    local sharded = f.sharder:shard(f.module, own, a.env, a.device, f.path)
    if f.path == "" then model = sharded else model:substitute(f.module, sharded) end
  end
  return model, plan
end

signature.check("shard.", M, { flatten_feature_lengths = "features: KeyedJaggedTensor",
  sharded_model_copy = "module: any, device: device?", create_infer_embedding_bag_sharding =
  "sharding_type: string, infos: list, env: table, device: any, options: table?", create_infer_embedding_sharding =
    "sharding_type: string, infos: list, env: table, device: any, options: table?" })

return M
