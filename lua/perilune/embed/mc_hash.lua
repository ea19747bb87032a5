-- mc_hash.lua: managed collision by probing (TorchRec's HashZchManagedCollisionModule): an id lives in the first free
-- row from its home row on, at most max_probe rows of its bucket away; it has it from the first batch on.
local P = require "perilune.ffi"
local util = require "perilune.util"
local modules = require "perilune.embed.mc_modules"
local signature = require "perilune.signature"
local C = P.C

local M = {}

--- When rows are taken from ids: those of TorchRec.
M.HashZchEvictionPolicyName = util.face("peri.embed.HashZchEvictionPolicyName",
  { SINGLE_TTL_EVICTION = "SINGLE_TTL_EVICTION", PER_FEATURE_TTL_EVICTION = "PER_FEATURE_TTL_EVICTION",
    LRU_EVICTION = "LRU_EVICTION" })
local policies = { SINGLE_TTL_EVICTION = C.PERI_FORGET_TTL, PER_FEATURE_TTL_EVICTION = C.PERI_FORGET_TTL,
  LRU_EVICTION = C.PERI_FORGET_PROBE_LRU }

--- The longest time to live: maps count the time with 32 bits.
local LONGEST = 2 ^ 31 - 1

local config_arguments = {
  features = util.required.list,      -- of the table
  single_ttl = util.whole(nil, 0, LONGEST), -- in steps, or in the unit of set_time
  per_feature_ttl = util.optional.list, -- one for each of features
}

--- How long ids are remembered.
local HashZchEvictionConfig = util.seal(util.class "HashZchEvictionConfig")
M.HashZchEvictionConfig = HashZchEvictionConfig
function HashZchEvictionConfig:init(args)
  local f = "HashZchEvictionConfig"
  local a = util.named(f, args, config_arguments)
  signature.value(f, "features", a.features, "strings")
  util.distinct(f, "feature", a.features)
  if a.per_feature_ttl then
    if #a.per_feature_ttl ~= #a.features then
      P.fail(("%s: per_feature_ttl has %d entries for %d features"):format(f, #a.per_feature_ttl, #a.features))
    end
    for i, ttl in ipairs(a.per_feature_ttl) do util.integer(f, ("per_feature_ttl[%d]"):format(i), ttl, 0, LONGEST) end
  end
  self.features, self.single_ttl, self.per_feature_ttl = a.features, a.single_ttl or false, a.per_feature_ttl or false
end

local HashZchManagedCollisionModule = modules.ManagedCollisionModule:extend "HashZchManagedCollisionModule"
M.HashZchManagedCollisionModule = HashZchManagedCollisionModule

local arguments = util.copy(modules.arguments)
local own = {
  total_num_buckets = util.required.number,
  max_probe = util.whole(128, 1, 2 ^ 31 - 1), -- rows that are looked at for an id
  input_hash_size = util.any(0),          -- spread "range": ids are below it
  eviction_policy_name = util.optional.string, -- SINGLE_TTL_EVICTION, PER_FEATURE_TTL_EVICTION, LRU_EVICTION; nil: rows
                                               -- stay
  eviction_config = util.optional,        -- HashZchEvictionConfig, or a table of its arguments
  disable_fallback = false,               -- on_miss = "drop": an id without a row has none (-1); else it looks at its
                                          -- home row
  read_only_suffix = "_readonly",         -- features whose names end so are looked up only
  is_inference = false, tb_logging_frequency = 0, inference_dispatch_div_train_world_size = false, start_bucket = 0,
  end_bucket = util.optional.number, opt_in_prob = -1, percent_reserved_slots = 0, track_id_freq = false,
  enable_per_feature_lookups = false, no_bag = false, write_runtime_meta_dim = 0, persist_hash_zch_bucket = true,
}
for name, default in util.ordered(own) do arguments[name] = default end

--- Arguments of TorchRec that have another place here, or none: the one value that is allowed, and why.
local refusals = {
  is_inference = { false, "eval() is the mode without inserts" },
  tb_logging_frequency = { 0, "statistics() has the numbers at any time" },
  inference_dispatch_div_train_world_size = { false, "ids are never divided" },
  start_bucket = { 0, "shards are made by the sharder" }, end_bucket = { nil, "shards are made by the sharder" },
  opt_in_prob = { -1, "see MCHManagedCollisionModule and its threshold filters" },
  percent_reserved_slots = { 0, "there are no reserved rows" },
  track_id_freq = { false, "see MCHManagedCollisionModule, which counts ids" },
  enable_per_feature_lookups = { false, "features have their own names in every call" },
  no_bag = { false, "an id without a row is -1 in its place, for bags and sequences" },
  write_runtime_meta_dim = { 0, "maps keep no other numbers of ids" },
  persist_hash_zch_bucket = { true, "the state always has it" },
}

--- The eviction policy: a PERI_FORGET_ constant, and a list of times to live.
local function policy_of(f, a)
  local name, c = a.eviction_policy_name, a.eviction_config
  if not name then
    if c ~= nil then P.fail(f .. ": eviction_config without eviction_policy_name") end
    return C.PERI_FORGET_NONE, false
  end
  util.one_of(f, "eviction_policy_name", name, { "SINGLE_TTL_EVICTION", "PER_FEATURE_TTL_EVICTION", "LRU_EVICTION" })
  if c ~= nil and not HashZchEvictionConfig.is(c) then c = HashZchEvictionConfig(c) end
  if name == "LRU_EVICTION" then
    if c and c.single_ttl and c.per_feature_ttl then
      P.fail(f .. ": eviction_config has single_ttl and per_feature_ttl; allowed with LRU_EVICTION: one of them, or "
        .. "none")
    end
    return policies[name], c
  end
  local field = name == "SINGLE_TTL_EVICTION" and "single_ttl" or "per_feature_ttl"
  local other = field == "single_ttl" and "per_feature_ttl" or "single_ttl"
  if c and c[other] then
    P.fail(("%s: eviction_config has %s, which %s does not go by; allowed: %s"):format(f, other, name, field))
  end
  if not c or not c[field] then P.fail(("%s: %s needs eviction_config with %s"):format(f, name, field)) end
  return policies[name], c
end

function HashZchManagedCollisionModule:init(args)
  local f = "HashZchManagedCollisionModule"
  local a = util.named(f, args, arguments)
  modules.refuse(f, a, refusals)
  util.integer(f, "total_num_buckets", a.total_num_buckets, 1, math.min(a.zch_size, 1024))
  signature.value(f, "read_only_suffix", a.read_only_suffix, "string")
  if not a.output_segments and a.zch_size % a.total_num_buckets ~= 0 then
    P.fail(("%s: zch_size is %d, total_num_buckets is %d; allowed: buckets of equal size (a divisor), or "
      .. "output_segments"):format(
      f, a.zch_size, a.total_num_buckets))
  end
  if a.disable_fallback and a.on_miss ~= "default" and a.on_miss ~= "drop" then
    P.fail(("%s: disable_fallback and on_miss = '%s' exclude each other"):format(f, a.on_miss))
  end
  if a.disable_fallback then a.on_miss = "drop" end
  modules.setup(self, a, a.total_num_buckets)
  if a.input_hash_size ~= 0 and a.spread ~= "range" then
    P.fail(("%s: input_hash_size, and spread is '%s', which does not go by it; allowed: spread = 'range' (TorchRec's "
      .. "rule), or no input_hash_size"):format(f, a.spread))
  end
  self.input_hash_func, self.asks = false, false
  self._arguments, self.max_probe, self.disable_fallback = a, a.max_probe, a.disable_fallback
  self.read_only_suffix = a.read_only_suffix
  self.eviction_policy_name = a.eviction_policy_name or false
  self.policy, self.eviction_config = policy_of(f, a)
end

--- Features of the table are those of the configuration.
function HashZchManagedCollisionModule:_check_features(names)
  local c = self.eviction_config
  if c and table.concat(c.features, "\n") ~= table.concat(names, "\n") then
    P.fail(("%s: eviction_config is for the features %s, the table's are %s"):format(self.class_name,
      table.concat(c.features, ", "), table.concat(names, ", ")))
  end
end

local function is_read_only(self, name)
  local suffix = self.read_only_suffix
  return suffix ~= "" and name:lower():sub(-#suffix) == suffix
end
function HashZchManagedCollisionModule:_has_read_only(features)
  for _, name in ipairs(features) do
    if is_read_only(self, name) then return true end
  end
  return false
end

--- The time that times to live are compared with from now on, in their unit (TorchRec: hours); -1, and at first: the
--- number of steps.
function HashZchManagedCollisionModule:set_time(now)
  self:_own_map():set_time(now)
  self._now = now -- of copies and shards too
end

function HashZchManagedCollisionModule:_describe_map(list, features)
  local c = self.eviction_config
  features = features or self._features or c and c.features or {}
  list.kind, list.evict, list.max_probe, list.n_features = "hash", self.policy, self.max_probe, #features
  if c then list.ttl = c.per_feature_ttl or c.single_ttl and { c.single_ttl } or nil end
  if not (list.ttl and #list.ttl > 1) and not self:_has_read_only(features) then list.n_features = 0 end
  if self:_has_read_only(features) then
    list.read_only = util.map(features, function(name) return is_read_only(self, name) end)
  end
end

function HashZchManagedCollisionModule:_agreement()
  local list, c = modules.ManagedCollisionModule._agreement(self), self.eviction_config
  for _, line in ipairs { { "max_probe", ("%d"):format(self.max_probe) },
    { "eviction_policy_name", self.eviction_policy_name or "none" },
    { "single_ttl", tostring(c and c.single_ttl or "none") },
    { "per_feature_ttl", c and c.per_feature_ttl and table.concat(c.per_feature_ttl, ", ") or "none" },
    { "read_only_suffix", self.read_only_suffix } } do
    list[#list + 1] = line
  end
  return list
end

--- No row is set aside, unless ids without a row share one.
function HashZchManagedCollisionModule:_reserved() return self.on_miss == "row" and self._buckets or 0 end

return M
