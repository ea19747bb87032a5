-- mc_modules.lua: managed collision of one table: raw 64-bit ids in, rows out (TorchRec's ManagedCollisionModule and
-- its two kinds). A module is a description until its first batch; what it knows is a map of mc_map.lua.
--
--   local mch = embed.MCHManagedCollisionModule { zch_size = 1000, eviction_policy = embed.LFU_EvictionPolicy {},
--     eviction_interval = 2 }
--   local rows = mch { f = jagged }   -- { f = the same with rows instead of ids }
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local Module = require "perilune.nn.module"
local mc_map = require "perilune.embed.mc_map"
local mc_state = require "perilune.embed.mc_state"
local policies = require "perilune.embed.mc_policies"
local signature = require "perilune.signature"
local C = P.C

local JaggedTensor, KeyedJaggedTensor = jagged.JaggedTensor, jagged.KeyedJaggedTensor

local M = {}

-- -- what both kinds share --------------------------------------------------------------------------------------------

local ManagedCollisionModule = Module:extend "ManagedCollisionModule"
M.ManagedCollisionModule = ManagedCollisionModule

--- input_hash_size: a number below 2^53 or an int64; spread "range" divides by it.
local function check_hash_size(f, size, spread)
  local low, whole = spread == "range" and 1 or 0, ffi.istype("int64_t", size)
  if type(size) == "number" then whole = size == math.floor(size) and size < 2 ^ 53 end
  if not whole or size < low then
    P.fail(("%s: input_hash_size is %s, allowed: whole numbers %d..2^53 - 1%s, and 64-bit ones "
      .. "(0x7fffffffffffffffLL)"):format(f, signature.text(size), low, spread == "range" and " (spread by range)"
      or ""))
  end
end

--- Take the arguments `a`: rows, buckets or segments, and what becomes of ids without a row.
local function setup(self, a, buckets)
  local f = self.class_name
  if a.name then f = ("%s '%s'"):format(f, a.name) end
  util.integer(f, "output_global_offset", a.output_global_offset, 0)
  util.one_of(f, "spread", a.spread, { "hash", "modulo", "range" })
  util.one_of(f, "on_miss", a.on_miss, { "default", "row", "hash", "drop", "error" })
  check_hash_size(f, a.input_hash_size, a.spread)
  if a.device ~= nil and a.device ~= "meta" then P.device(a.device) end
  local n = buckets and util.integer(f, "buckets", buckets, 1, math.min(a.zch_size, 1024)) or mc_map.buckets(a.zch_size)
  local segments, offset = a.output_segments, a.output_global_offset
  if segments then
    if #segments < 2 then P.fail(("%s: output_segments has %d entries, allowed: 2 or more"):format(f, #segments)) end
    for i, row in ipairs(segments) do
      util.integer(f, ("output_segments[%d]"):format(i), row, i == 1 and offset or segments[i - 1] + 1,
        offset + a.zch_size)
    end
    if segments[1] ~= offset or segments[#segments] ~= offset + a.zch_size then
      P.fail(("%s: output_segments go from %d to %d, wanted %d to %d"):format(f, segments[1], segments[#segments],
        offset, offset + a.zch_size))
    end
    if buckets and n ~= #segments - 1 then
      P.fail(("%s: output_segments are %d buckets, given %d"):format(f, #segments - 1, n))
    end
    n = #segments - 1
  end
  self.zch_size, self.name, self.spread, self.on_miss = a.zch_size, a.name or false, a.spread, a.on_miss
  self.input_hash_size, self.output_global_offset = a.input_hash_size, offset
  self._buckets, self._segments, self._device = n, segments or false, a.device or false
  rawset(self, "_map", false)
end

--- The table and the features that it is for, as its collection says.
function ManagedCollisionModule:_belongs_to(name, features)
  if self._table and self._table ~= name then
    P.fail(("%s: it is of table '%s', and cannot be of '%s' too"):format(self.class_name, self._table, name))
  end
  self._table, self._features, self.name = name, features, self.name or name
  self:_check_features(features)
end

--- Rows of the table; the range of ids that spread "range" cuts; buckets; rows where buckets begin, and the end, as a
--- list.
function ManagedCollisionModule:output_size() return self.zch_size end
function ManagedCollisionModule:input_size() return self.input_hash_size end
function ManagedCollisionModule:buckets() return self._buckets end
function ManagedCollisionModule:output_segments()
  if self._segments then return util.copy(self._segments) end
  return util.map(mc_map.segments(self.zch_size, self._buckets), function(row)
    return row + self.output_global_offset
  end)
end

--- What mc_map.new is told of the map of buckets [first_bucket, first_bucket + n_buckets) (default: all) on a device.
function ManagedCollisionModule:_map_arguments(args)
  local a = util.named(self.class_name .. ":new_map", args, { device = util.optional, first_bucket = 0, n_buckets = 0,
    features = util.optional.list })
  local list = { name = self.name or self.class_name, rows = self.zch_size, buckets = self._buckets,
    spread = self.spread, input_hash_size = self.input_hash_size, on_miss = self.on_miss, device = a.device
    or self._device ~= "meta" and self._device or nil, first_bucket = a.first_bucket, n_buckets = a.n_buckets }
  if self._segments then
    list.segments = util.map(self._segments, function(row) return row - self.output_global_offset end)
  end
  self:_describe_map(list, a.features)
  return list
end

--- That map: what the shards of a table have.
function ManagedCollisionModule:_new_map(args)
  local map = mc_map.new(self:_map_arguments(args))
  if self._now then map:set_time(self._now) end
  return map
end

--- Bytes of the map that a shard of rows [row, row + rows) of the table has; rows are whole buckets, or fewer: then
--- those of the buckets that they touch.
function ManagedCollisionModule:_map_bytes(row, rows)
  if rows == 0 then return 0 end
  local segments, first, past = self:output_segments(), 0, 0
  for b = 1, self._buckets do
    if segments[b] - self.output_global_offset <= row then first = b - 1 end
    if segments[b] - self.output_global_offset < row + rows then past = b end
  end
  return mc_map._bytes_of(self:_map_arguments { first_bucket = first, n_buckets = past - first,
    features = self._features or nil })
end

--- See TableCollection:_leave_meta.
function ManagedCollisionModule:_leave_meta()
  if self._device == "meta" then self._device = false end
end

--- Its own map, made when it is first needed.
function ManagedCollisionModule:_own_map()
  if not self._map then
    if self._device == "meta" then
      P.fail(self.class_name .. ": it is on device 'meta', a description without memory; shard it "
        .. "(DistributedModelParallel), or make it without device = 'meta'")
    end
    self._map = P.lasting(self._new_map, self, { features = self._features or nil })
    self._state = mc_state.State(self._map, 0, self._buckets,
      { ["_mch_remapped_ids_mapping"] = self.output_global_offset })
  end
  return self._map
end

--- The same, with what load_state_dict wrote.
function ManagedCollisionModule:_settled_map()
  self:_own_map()
  self._state:settle()
  return self._map
end

--- What input_hash_func makes of ids (a tensor): as many ids.
function ManagedCollisionModule:_hashed(ids)
  local made = self.input_hash_func(ids, self.input_hash_size)
  local is_tensor = Tensor.is(made)
  if not is_tensor or made:dim() ~= 1 or made:size(1) ~= ids:size(1) or made:dtype() ~= "i64"
    and made:dtype() ~= "i32" then
    P.fail(("%s: input_hash_func returned %s, wanted a tensor of %d ids (i64 or i32)"):format(self:_title(),
      is_tensor and Tensor._text(made) or signature.text(made), ids:size(1)))
  end
  return made
end

--- What messages call it.
function ManagedCollisionModule:_title()
  return self.name and ("%s of table '%s'"):format(self.class_name, self.name) or self.class_name
end

--- Rows (i64, from output_global_offset on) of the raw ids of this table's features: a list of i64 tensors, and of
--- results. In training mode that is a step: ids are counted, learned and forgotten.
function ManagedCollisionModule:_remap_values(ids)
  local map = self:_own_map()
  self._state:settle()
  for i = 1, #ids do
    if self.input_hash_func then ids[i] = self:_hashed(ids[i]) end
  end
  local rows = self.asks and map:remap_scored(ids, self.training, self.eviction_policy, self.name or self.class_name)
    or map:remap(ids, self.training)
  for i = 1, self.output_global_offset == 0 and 0 or #rows do
    rows[i] = mc_state.shift(rows[i], self.output_global_offset)
  end
  return rows
end

local function named_features(self, features)
  if KeyedJaggedTensor.is(features) then return util.resolve(features), features:keys() end
  local names = type(features) == "table" and util.is_plain(features) and util.keys(features)
  for _, name in ipairs(names or {}) do
    if not JaggedTensor.is(features[name]) then
      P.fail(("%s: feature '%s' is %s, wanted a JaggedTensor"):format(self.class_name, tostring(name),
        signature.text(features[name])))
    end
  end
  if names then return features, names end
  P.fail(("%s: features is %s, wanted a KeyedJaggedTensor or a table of JaggedTensors by name"):format(self.class_name,
    signature.text(features)))
end

--- Another map in the place of the module's own, with its state: one that is told the features. State that was handed
--- out is read from it, too.
local function make_again(self)
  self._state:settle()
  local old = self._map
  self._map = P.lasting(self._new_map, self, { features = self._features })
  self._map:take(old, 0, self._buckets)
  self._state:moved(self._map)
  old:release()
end

--- The features that batches have, in order: known from the first batch on, unless a collection said them. A map that
--- was needed earlier (for a state, or the time) was made without them.
local function note_features(self, names)
  if not self._features then
    self:_check_features(names)
    self._features = names
    if self._map and (self:_map_arguments { features = names }.n_features or 0) > 0 then make_again(self) end
  end
  if self.training and table.concat(names, "\n") ~= table.concat(self._features, "\n") then
    P.fail(("%s: the batch has the features %s, wanted %s"):format(self.class_name, table.concat(names, ", "),
      table.concat(self._features, ", ")))
  end
end

--- A table of JaggedTensors by name (in the order of names), or a KeyedJaggedTensor, with rows for ids: the same bags
--- and weights. All features of a table belong into one call: in training mode one call is one step.
function ManagedCollisionModule:forward(features)
  local given, names = named_features(self, features)
  local is_kjt = KeyedJaggedTensor.is(given)
  note_features(self, names)
  local ids = util.map(names, function(name) return (is_kjt and given:get(name) or given[name]):values() end)
  local rows, out = self:_remap_values(ids), {}
  if is_kjt then return given:with_values(mc_state.join(rows)) end
  for i, name in ipairs(names) do
    local jt = given[name]
    out[name] = JaggedTensor { values = rows[i], lengths = jt:lengths(), weights = jt:weights_or_none() }
  end
  return out
end

--- What ranks that share the table must have alike, beside its rows and buckets: a list of { name, value as text }.
function ManagedCollisionModule:_agreement()
  return { { "managed_collision_module", self.class_name }, { "on_miss", self.on_miss } }
end

--- The rows of known ids; nothing is learned, whatever the mode.
function ManagedCollisionModule:remap(features)
  local before = self.training
  self.training = false
  local ok, result = xpcall(self.forward, P.locate, self, features)
  self.training = before
  if not ok then error(result, 0) end
  return result
end

--- Rows that got another id since the last call (i64, ascending); nil: none. Who calls it makes them start again.
function ManagedCollisionModule:evict()
  local rows = self:_own_map():evicted()
  if not rows then return nil end
  return self.output_global_offset == 0 and rows or mc_state.shift(rows, self.output_global_offset)
end

--- Counts since the map was made, and shares: hit_rate, insert_rate, miss_rate of the ids, eviction_rate: evicted rows
--- by inserted ids, occupancy of the rows. Waits for nothing but what was queued before.
function ManagedCollisionModule:statistics()
  local s = self:_own_map():statistics()
  local ids = math.max(s.ids, 1)
  s.hit_rate, s.insert_rate, s.miss_rate, s.collision_rate = s.hits / ids, s.inserted / ids, s.missed / ids,
    s.collisions / ids
  s.eviction_rate, s.occupancy = s.evicted / math.max(s.inserted, 1), s.occupied / math.max(s.rows, 1)
  return s
end

--- Rows that no id has, and that one can have.
function ManagedCollisionModule:open_slots()
  local s = self:_own_map():statistics()
  return s.rows - self:_reserved() - s.occupied
end

function ManagedCollisionModule:own_state()
  self:_own_map()
  return self._state:entries()
end

--- Its rows are those of a table: a CollisionMoment compares them.
function ManagedCollisionModule:_goes_with(moment) rawset(self, "_moment", moment) end

local BELOW = "_managed_collision_collection._managed_collision_modules."

--- The name of its table's weights in a state_dict that has this module at `path`.
local function weight_name(self, path) return self._moment:weight_name(self._table, path, BELOW .. self._table) end

function ManagedCollisionModule:try_state(map, path)
  local given, prefix, any = {}, path == "" and "" or path .. ".", false
  for _, name in ipairs(self:_own_map():state_names()) do
    given[name] = rawget(map, prefix .. name)
    any = any or given[name] ~= nil
  end
  if any and self._state:streams(given) then
    local mark = self._state:check(given, 0)
    if self._moment then self._moment:try(self._table, mark, rawget(map, weight_name(self, path))) end
    return
  end
  local copy = mc_state.try(self, map, path, function(copy) copy._state:settle() end)
  if copy and self._moment then self._moment:try(self._table, copy._map, rawget(map, weight_name(self, path))) end
end

function ManagedCollisionModule:took_state(map, path)
  if self._state then self._state:fetch() end
  if not self._moment then return end
  local any, prefix = false, path == "" and "" or path .. "."
  for _, name in ipairs(self:_own_map():state_names()) do any = any or rawget(map, prefix .. name) ~= nil end
  self._moment:took(self._table, any, rawget(map, weight_name(self, path)))
end

--- A module that knows the same and learns for itself.
function ManagedCollisionModule:copy(device)
  local args = util.copy(self._arguments)
  args.device = device or args.device
  local copy = getmetatable(self)(args)
  copy.training, copy._features, copy.name, copy._now = self.training, self._features, self.name, self._now
  copy.input_hash_func = self.input_hash_func -- false where its collection takes hashed ids
  if not self._map then return copy end
  self._state:settle()
  copy:_own_map():take(self._map, 0, self._buckets)
  return copy
end

--- An error unless a table's features are what its policy asks for.
function ManagedCollisionModule:_check_features() end -- luacheck: ignore 212

function ManagedCollisionModule:extra_text()
  if not self.zch_size then return "" end -- the base itself
  return ("%d rows, %d %s"):format(self.zch_size, self._buckets, self._buckets == 1 and "bucket" or "buckets")
end

local function refuse_arguments(func, a, reasons)
  for name, reason in util.ordered(reasons) do
    if a[name] ~= nil and a[name] ~= reason[1] then
      P.fail(("%s: %s is %s, allowed: %s; %s"):format(func, name, signature.text(a[name]), tostring(reason[1]),
        reason[2]))
    end
  end
end

-- -- sorted maps with policies ----------------------------------------------------------------------------------------

--- Zero collision: ids that are learned have a row of their own until the policy gives it to a better one. Windows of
--- eviction_interval steps; the last row of each bucket is nobody's own: ids without a row share it (on_miss = "row").
local MCHManagedCollisionModule = ManagedCollisionModule:extend "MCHManagedCollisionModule"
M.MCHManagedCollisionModule = MCHManagedCollisionModule

local common = {
  zch_size = util.whole(util.required, 1, 2 ^ 32 - 2),
  device = util.optional,               -- a device's name, or "meta": never take memory
  name = util.optional.string,          -- of the table, for messages
  output_global_offset = 0,             -- added to rows
  output_segments = util.optional.list, -- rows where buckets begin, and the end; default: even
  spread = "hash",                      -- which bucket an id belongs to: hash, modulo, range (perilune/collision.h);
                                        -- not TorchRec's
  on_miss = "default",                  -- row, hash, drop, error; not TorchRec's
}

local mch_arguments = util.copy(common)
mch_arguments.eviction_policy = util.required
mch_arguments.eviction_interval = util.whole(util.required, 1, 2 ^ 31 - 1) -- steps of a window
mch_arguments.input_hash_size = util.any(0x7fffffffffffffffLL) -- for input_hash_func and spread "range"
mch_arguments.input_hash_func = util.optional          -- function(ids, input_hash_size) -> ids, before all else
mch_arguments.buckets = util.optional.number           -- default: by the number of rows (mc_map.buckets)
-- Ids of a window that count, the first ones; 0: all (TorchRec: 1.25 * interval * ids of the first batch).
mch_arguments.history_capacity = util.whole(0, 0)
mch_arguments.mch_size, mch_arguments.mch_hash_func = util.optional, util.optional

function MCHManagedCollisionModule:init(args)
  local f = "MCHManagedCollisionModule"
  local a = util.named(f, args, mch_arguments)
  local old = { nil, "TorchRec ignores it too; ids without a row: see on_miss" }
  refuse_arguments(f, a, { mch_size = old, mch_hash_func = old })
  setup(self, a, a.buckets)
  if a.input_hash_func ~= nil and not util.is_callable(a.input_hash_func) then
    P.fail(("%s: input_hash_func is %s, wanted a function(ids, input_hash_size)"):format(f,
      signature.text(a.input_hash_func)))
  end
  self.history_capacity = a.history_capacity
  self._arguments, self.eviction_interval, self.input_hash_func = a, a.eviction_interval, a.input_hash_func or false
  self.eviction_policy = policies.policy(f, a.eviction_policy)
  self.asks = self.eviction_policy.kind == C.PERI_FORGET_USER
end

function MCHManagedCollisionModule:_describe_map(list)
  list.kind, list.policy, list.eviction_interval = "mch", self.eviction_policy, self.eviction_interval
  list.history_capacity = self.history_capacity
end
function MCHManagedCollisionModule:_agreement()
  local list, policy = ManagedCollisionModule._agreement(self), self.eviction_policy
  for _, line in ipairs { { "eviction_policy", policy.class_name },
    { "decay_exponent", tostring(policy.decay_exponent) },
    { "threshold_filtering_func", tostring(policy.threshold_filtering_func or "none") },
    { "eviction_interval", ("%d"):format(self.eviction_interval) },
    { "history_capacity", ("%d"):format(self.history_capacity) },
    { "input_hash_func", self.input_hash_func and "a function" or "none" },
    { "input_hash_size", tostring(self.input_hash_size) } } do
    list[#list + 1] = line
  end
  return list
end

--- Rows that no id can have: the last one of each bucket.
function MCHManagedCollisionModule:_reserved() return self._buckets end

-- For mc_hash.lua.
M.arguments, M.setup, M.refuse = common, setup, refuse_arguments
signature.check("ManagedCollisionModule:", ManagedCollisionModule,
  { try_state = "self: table, map: table, path: string" })
signature.check("mc_modules.", M, { setup = "self: table, a: table, buckets: count?",
  refuse = "func: string, a: table, reasons: table" })

return M
