-- mc_collection.lua: ManagedCollisionCollection over ranks: each rank has the maps of the buckets whose rows it has.
-- Raw ids go there, and become rows where these are (perilune/shard.h); this file makes the maps, and reaches their
-- state and their numbers.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local nn = require "perilune.nn"
local ShardedTensor = require("perilune.tensor.sharded").ShardedTensor
local ManagedCollisionCollection = require "perilune.embed.mc_collection"
local mc_map = require "perilune.embed.mc_map"
local mc_state = require "perilune.embed.mc_state"
local policies = require "perilune.embed.mc_policies"
local mc_remap = require "perilune.shard.mc_remap"
local buckets = require "perilune.plan.buckets"
local sharding_types = require "perilune.plan.sharding_types"
local types = require "perilune.plan.types"
local ShardingEnv = require "perilune.plan.env"
local ModuleSharder = require("perilune.shard.sharder").ModuleSharder
local signature = require "perilune.signature"
local C, check = P.C, P.check

local M = {}

--- The plan's entry `sharding` of a table of raw ids (its managed-collision `module`), cut between buckets.
function M.create_mc_sharding(sharding, module, env)
  signature.value("create_mc_sharding", "sharding", sharding, "ParameterSharding")
  signature.value("create_mc_sharding", "module", module, "module")
  return buckets.cut(sharding, module, env)
end

--- The same for all tables of a ManagedCollisionCollection: a plan.
function M.plan_of(plan, mcc, env)
  local tables, entries = types.EmbeddingModuleShardingPlan.is(plan) and plan.tables or plan, {}
  for name, sharding in util.ordered(tables) do
    local module = mcc:managed_collision_modules()[name]
    entries[name] = module and M.create_mc_sharding(sharding, module, env) or sharding
  end
  for _, t in ipairs(mcc:embedding_configs()) do
    if not entries[t.name] then
      P.fail(("table '%s' is not in the plan; planned tables: %s"):format(t.name,
        table.concat(util.keys(entries), ", ")))
    end
  end
  return types.EmbeddingModuleShardingPlan(entries)
end

-- -- the maps of this rank --------------------------------------------------------------------------------------------

--- ShardedManagedCollisionCollection { managed_collision_collection =, plan = (of M.plan_of), group =, device = }.
local Sharded = nn.Module:extend "ShardedManagedCollisionCollection"
M.ShardedManagedCollisionCollection = Sharded

--- TorchRec's contexts hold what stages hand on; here stages do.
local Context = util.class "ManagedCollisionCollectionContext"
M.ManagedCollisionCollectionContext = Context
function Context:init() end

local whole_states = { _output_segments_tensor = true, _current_iter_tensor = true, _hash_zch_bucket = true }

--- The piece of a table that this rank has: { map =, first =, n =, row_offset =, rows =, state = }; nil: none.
local function piece_of(self, t, module, segments)
  local found
  for _, s in ipairs(self._plan.tables[t.name]:shards(t, ShardingEnv.from_process_group(self._group))) do
    if s.rank == self._group:rank() and s.rows > 0 then found = s end
  end
  if not found then return nil end
  local index = util.index_of(segments)
  local first, past = index[found.row_offset], index[found.row_offset + found.rows]
  if not first or not past then return nil end -- C says what is wrong with the plan
  local map = P.lasting(module._new_map, module, { device = self._device, first_bucket = first - 1, n_buckets = past
    - first, features = t.feature_names })
  return { map = map, first = first - 1, n = past - first, row_offset = found.row_offset, rows = found.rows,
    state = mc_state.State(map, first - 1, past - first, {}) }
end

--- The module's arguments as lines of peri_sharded_collision.agreed.
local function agreed_of(module, returns_rows)
  local lines = util.map(module:_agreement(), function(line) return line[1] .. "\t" .. line[2]:gsub("%c", " ") end)
  lines[#lines + 1] = "return_remapped_features\t" .. tostring(returns_rows)
  return table.concat(lines, "\n")
end

--- What C is told of table t.
local function fill(entry, x, module, returns_rows)
  local segments = ffi.new("int64_t[?]", #x.segments, x.segments)
  entry.segments, entry.buckets, entry.spread = segments, #x.segments - 1, mc_map.spreads[module.spread]
  entry.input_hash_size = module.spread == "range" and module.input_hash_size or 0
  entry.map = x.piece and mc_map.ptr(x.piece.map) or nil
  x.agreed = agreed_of(module, returns_rows)
  entry.agreed = x.agreed
  return segments
end

function Sharded:init(args)
  local a = util.named(self.class_name, args, { managed_collision_collection = util.required, plan = util.required,
    group = util.required, device = util.optional, returns_rows = false })
  local mcc = signature.value(self.class_name, "managed_collision_collection", a.managed_collision_collection,
    "collision_collection")
  self._plan, self._group, self._device, self._features = a.plan, a.group, a.device, mcc:feature_names()
  -- a metatable: no place to look for modules
  self._moment, self._agreed, self._made_of = false, false, setmetatable(util.copy(a), {})
  self._times = rawget(self, "_times") or {} -- table's name -> what time it is for its map; of before: see _remake
  -- a metatable: no place to look for modules
  self._configs, self._tables = mcc:embedding_configs(), setmetatable({}, {})
  for _, t in ipairs(self._configs) do
    local module = mcc:managed_collision_modules()[t.name]
    if module.output_global_offset ~= 0 then
      P.fail(("%s: table '%s': output_global_offset %d, allowed: 0"):format(self.class_name, t.name,
        module.output_global_offset))
    end
    local x = { segments = buckets.segments(module), module = module, config = t, told = -1 }
    x.piece = piece_of(self, t, module, x.segments)
    self._times[t.name] = self._times[t.name] or module._now or -1
    if x.piece and module.set_time then x.piece.map:set_time(self._times[t.name]) end
    x.c = P.structs("peri_sharded_collision", 1)
    x.kept = fill(x.c[0], x, module, a.returns_rows)
    self._tables[t.name] = x
  end
end

--- Make it again, in the same object, of other arguments: with empty maps. What time it is stays.
function Sharded:_remake(args) util.construct(self, getmetatable(self), args) end

--- peri_sharded_collision of a table; nil: it has none.
function Sharded:_entry(name)
  local x = self._tables[name]
  return x and x.c
end

local function copy_of(t) return Tensor.empty(t:shape(), t:dtype(), t:device()):copy(t) end

--- The batch with ids as the modules' input_hash_func make them.
function Sharded:_hashed(features)
  local batch, values = features, nil
  for _, t in ipairs(self._configs) do
    local module = self._tables[t.name].module
    if module.input_hash_func then
      local keys, edges = util.index_of(features:keys()), features:offset_per_key()
      values = values or copy_of(features:values():to "i64")
      for _, name in ipairs(t.feature_names) do
        local k = keys[name]
        if k and edges[k + 1] > edges[k] then
          local part = values:slice(1, edges[k], edges[k + 1])
          part:copy(module:_hashed(copy_of(part)))
        end
      end
    end
  end
  if values then batch = features:with_values(values) end
  return batch
end

--- Rows of the whole tables for the ids of a KeyedJaggedTensor (this rank's samples), as the unsharded collection gives
--- them. In training mode one step of every table; who has the weights makes the rows of evict() start again before
--- they are looked up. Waits. Collective: all ranks are in training or all in evaluation. Within sharded embedding
--- collections, which look up and start again by themselves, call it in evaluation mode only.
function Sharded:forward(features) return mc_remap.remap(self, features) end

--- Rows of the whole table, of this rank's buckets, that got another id since the last call: table's name -> i64
--- tensor. Local.
function Sharded:evict()
  local evicted = {}
  for name, x in util.ordered(self._tables) do
    local rows = x.piece and x.piece.map:evicted()
    evicted[name] = rows and mc_state.shift(rows, x.piece.row_offset) or nil
  end
  return evicted
end

--- The module that describes a table's map.
function Sharded:_module_of(name) return self._tables[name].module end

--- Features in the order of results.
function Sharded:feature_names() return self._features end
function Sharded:embedding_configs() return self._configs end

local counts_out, last_out = ffi.new "peri_tensor *[1]", ffi.new "peri_tensor *[1]"
--- Give the maps that ask for them the scores of their policies of Lua.
function Sharded:_give_scores()
  for _, t in ipairs(self._configs) do
    local x = self._tables[t.name]
    if x.piece and x.module.asks then
      local map = mc_map.ptr(x.piece.map)
      check(C.peri_collision_candidates(map, counts_out, last_out))
      if counts_out[0] ~= nil then
        local counts, last = Tensor.wrap(counts_out[0]), Tensor.wrap(last_out[0])
        local now = x.piece.map:statistics().iterations
        check(C.peri_collision_scores(map,
          Tensor.ptr(policies.scores(x.module.eviction_policy, counts, last, now, t.name))))
      end
    end
  end
end

--- Let the maps take what load_state_dict wrote. Before the next batch.
function Sharded:_settle_maps()
  for _, t in ipairs(self._configs) do
    local piece = self._tables[t.name].piece
    if piece then piece.state:settle() end
  end
end

--- Take this rank's part of the maps of an unsharded ManagedCollisionCollection that has learned.
function Sharded:copy_from(mcc)
  for name, module in util.ordered(mcc:managed_collision_modules()) do
    local x = self._tables[name]
    local map = x.piece and module._map
    if map then
      module._state:settle()
      x.piece.map:take(map, 0, #x.segments - 1)
    end
  end
end

--- Take the maps of another sharded collection of the same tables and plan.
function Sharded:_copy_maps(other)
  other:_settle_maps()
  for name, x in util.ordered(self._tables) do
    local from = other._tables[name].piece
    self._times[name] = other._times[name]
    if from then
      x.piece.map:take(from.map, from.first, from.n)
      if x.module.set_time then x.piece.map:set_time(self._times[name]) end
    end
  end
end

--- A collection that knows the same and learns for itself; on another device, or (nil) the same one.
function Sharded:copy(device)
  local a = util.copy(self._made_of)
  a.device = device or a.device
  local copy = getmetatable(self)(a)
  copy:_copy_maps(self)
  return copy:train(self.training)
end

--- What time it is for tables that have times to live (HashZchManagedCollisionModule:set_time); the same on all ranks,
--- which compare it with the next batch. Local.
function Sharded:set_time(now)
  local any = false
  for name, x in util.ordered(self._tables) do
    if x.module.set_time then
      signature.value(self.class_name .. ":set_time", "now", now, "integer")
      if now < -1 or now > 2 ^ 31 - 1 then
        P.fail(("%s:set_time: now is %s, allowed: 0 to 2147483647, and -1 for the number of steps"):format(
          self.class_name, tostring(now)))
      end
      if x.piece then x.piece.map:set_time(now) end
      self._times[name], any = now, true
    end
  end
  if not any then
    P.fail(self.class_name .. ":set_time: no table has a HashZchManagedCollisionModule, whose ids have times to live")
  end
end

--- Tell the module of C (a pointer) what time it is.
function Sharded:_tell_time(ptr)
  for _, t in ipairs(self._configs) do
    local x = self._tables[t.name]
    local now = self._times[t.name]
    if now ~= x.told then
      check(C.peri_sharded_time_set(ptr, t.name, now))
      x.told = now
    end
  end
end

-- -- state ------------------------------------------------------------------------------------------------------------

--- Shards of a table on all ranks that have rows.
local function shards_of(self, t)
  local list = {}
  for _, s in ipairs(self._plan.tables[t.name]:shards(t, ShardingEnv.from_process_group(self._group))) do
    if s.rows > 0 then list[#list + 1] = s end
  end
  return list
end

--- What the states of a table are, on every rank alike: a list of { name =, dtype =, shape = (of one bucket) }.
local function states_of(x)
  if not x.states then
    local map = x.piece and x.piece.map or P.lasting(x.module._new_map, x.module, { first_bucket = 0, n_buckets = 1,
      device = "cpu", features = x.config.feature_names })
    x.states = util.map(map:state_names(), function(name, i)
      local shape, dtype = map:_describe(i)
      return { name = name, dtype = dtype, shape = shape }
    end)
  end
  return x.states
end

local function state_tensor(self, t, x, state)
  local metadata, own, size = {}, {}, util.copy(state.shape)
  local by_row = not whole_states[state.name]
  if by_row then size[1] = t.num_embeddings end
  for i, s in ipairs(shards_of(self, t)) do
    local offsets, sizes = util.map(size, function() return 0 end), util.copy(size)
    if by_row then offsets[1], sizes[1] = s.row_offset, s.rows end
    metadata[i] = { shard_offsets = offsets, shard_sizes = sizes, placement = "rank:" .. s.rank }
    if s.rank == self._group:rank() then
      own[#own + 1] = { metadata = metadata[i],
        read = function(row, result) x.piece.state:read(state.name, row, result) end,
        write = function(row, source) x.piece.state:write(state.name, row, source) end,
        by_row = by_row and function(row, result) x.piece.state:read_by_row(state.name, row, result) end or nil,
        take = function(source) return by_row and x.piece.state:take(state.name, source, s.row_offset) end }
    end
  end
  return ShardedTensor { size = size, dtype = state.dtype, shards_metadata = metadata, local_shards = own,
    group = self._group, device = self._device }
end

function Sharded:own_state()
  local list = {}
  for name, x in util.ordered(self._tables) do
    for _, state in ipairs(states_of(x)) do
      list[#list + 1] = { name = ("_managed_collision_modules.%s.%s"):format(name, state.name),
        tensor = state_tensor(self, x.config, x, state) }
    end
  end
  return list
end

function Sharded:state_group() return self._group end

--- The rows that a sharded collection looks up are those of these maps: its CollisionMoment compares them.
function Sharded:_goes_with(moment) self._moment = moment end
--- The map of a table's rows on this rank, with what load_state_dict wrote; nil: there are none.
function Sharded:_map_of(name)
  local piece = self._tables[name].piece
  if piece then piece.state:settle() end
  return piece and piece.map
end

--- Those of its buckets: the first one, and how many.
function Sharded:_buckets_of(name)
  local piece = self._tables[name].piece
  if piece then return piece.first, piece.n end
end

--- Which of the tables `map` has something for, under `prefix`: their maps, and their rows.
local function given_of(self, name, x, map, path)
  local maps, prefix = false, path == "" and "" or path .. "."
  for _, state in ipairs(states_of(x)) do
    maps = maps or rawget(map, ("%s_managed_collision_modules.%s.%s"):format(prefix, name, state.name)) ~= nil
  end
  return maps, self._moment and rawget(map, self._moment:weight_name(name, path, "_managed_collision_collection"))
    or nil
end

--- Whether all that `map` has for the tables under `prefix` can be read some rows at a time: by table, what it has;
--- nil: no.
local function streamed(self, map, path)
  local all, prefix = {}, path == "" and "" or path .. "."
  for name, x in util.ordered(self._tables) do
    if given_of(self, name, x, map, path) then
      local given = {}
      for _, state in ipairs(states_of(x)) do
        given[state.name] = rawget(map, ("%s_managed_collision_modules.%s.%s"):format(prefix, name, state.name))
      end
      if x.piece and not x.piece.state:streams(given) then return nil end
      all[name] = given
    end
  end
  return all
end

function Sharded:try_state(map, path)
  local all = streamed(self, map, path)
  for name, given in util.ordered(all or {}) do
    local x = self._tables[name]
    local mark = x.piece and x.piece.state:check(given, x.piece.row_offset)
    if mark and self._moment then self._moment:try(name, mark, select(2, given_of(self, name, x, map, path))) end
  end
  if all then return end
  local copy = mc_state.try(self, map, path, self._settle_maps)
  for name, x in util.ordered(copy and self._moment and self._tables or {}) do
    local maps, rows = given_of(self, name, x, map, path)
    if maps and x.piece then self._moment:try(name, copy._tables[name].piece.map, rows) end
  end
end

function Sharded:took_state(map, path)
  for _, x in util.ordered(self._tables) do
    if x.piece then x.piece.state:fetch() end
  end
  for name, x in util.ordered(self._moment and self._tables or {}) do
    self._moment:took(name, given_of(self, name, x, map, path))
  end
end

-- -- numbers ----------------------------------------------------------------------------------------------------------

local counts = { "ids", "hits", "inserted", "missed", "evicted", "collisions", "occupied", "rows" }

--- Shares of counts, as ManagedCollisionModule:statistics has them.
local function with_rates(s)
  local ids = math.max(s.ids, 1)
  s.hit_rate, s.insert_rate, s.miss_rate, s.collision_rate = s.hits / ids, s.inserted / ids, s.missed / ids,
    s.collisions / ids
  s.eviction_rate, s.occupancy = s.evicted / math.max(s.inserted, 1), s.occupied / math.max(s.rows, 1)
  return s
end

--- Counts and rates of the maps of this rank by table. Local.
function Sharded:local_statistics()
  local result = {}
  for name, x in util.ordered(self._tables) do
    local s = x.piece and x.piece.map:statistics() or { iterations = 0 }
    for _, k in ipairs(counts) do s[k] = s[k] or 0 end
    result[name] = with_rates(s)
  end
  return result
end

--- The same over all ranks. Collective.
function Sharded:statistics()
  local own, list, names = self:local_statistics(), {}, util.keys(self._tables)
  for _, name in ipairs(names) do
    for _, k in ipairs(counts) do list[#list + 1] = own[name][k] end
  end
  local sums = Tensor.tensor(list, "i64", self._device)
  self._group:all_reduce(sums):wait()
  local steps = Tensor.tensor(util.map(names, function(name) return own[name].iterations end), "i64", self._device)
  self._group:all_reduce(steps, "max"):wait() -- a rank without rows of a table has counted none
  steps = steps:to_list()
  local values, at, result = sums:to_list(), 0, {}
  for i_table, name in ipairs(names) do
    local s = { iterations = steps[i_table] }
    for i, k in ipairs(counts) do s[k] = tonumber(values[at + i]) end
    at = at + #counts
    result[name] = with_rates(s)
  end
  return result
end

--- By table, rows over all ranks that an id could have. Collective.
function Sharded:open_slots()
  local result = {}
  for name, s in util.ordered(self:statistics()) do
    result[name] = s.rows - self._tables[name].module:_reserved() - s.occupied
  end
  return result
end

-- -- its sharder ------------------------------------------------------------------------------------------------------

local Sharder = util.class("ManagedCollisionCollectionSharder", ModuleSharder)
M.ManagedCollisionCollectionSharder = Sharder
Sharder.module_type = ManagedCollisionCollection
--- Why it is no part of a DistributedModelParallel, which starts rows again for who looks them up.
Sharder.by_itself = "looks nothing up; give it to a ManagedCollisionEmbeddingBagCollection or "
  .. "ManagedCollisionEmbeddingCollection, together with the collection that looks its rows up, or shard it by "
  .. "yourself (peri.shard.ManagedCollisionCollectionSharder {}:shard) and keep it outside of the model"
function Sharder:sharding_types() -- luacheck: ignore 212
  local names = sharding_types.names(function(t) return not (t.replica or t.cuts_columns or t.in_node) end)
  table.sort(names)
  return names
end
function Sharder:compute_kernels() return { "fused", "fused_uvm_caching" } end -- luacheck: ignore 212
function Sharder:shardable_parameters(module) return module:embedding_configs() end -- luacheck: ignore 212
function Sharder:shard(module, plan, env, device) -- luacheck: ignore 212
  return Sharded { managed_collision_collection = module, plan = M.plan_of(plan, module, env), group = env.pg,
    device = device }
end

signature.kind("collision_collection", "a ManagedCollisionCollection", ManagedCollisionCollection.is)
signature.check("ShardedManagedCollisionCollection:", Sharded, { forward = "self: table, features: KeyedJaggedTensor",
  copy_from = "self: table, mcc: collision_collection", try_state = "self: table, map: table, path: string" })
signature.check("ManagedCollisionCollectionSharder:", Sharder, {
  shard = "self: Sharder, module: collision_collection, plan: table, env: env_of_group, device: any",
  shardable_parameters = "self: Sharder, module: collision_collection" })

return M
