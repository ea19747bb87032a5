-- dedup.lua: index dedup: of the ids that this rank asks for in one batch, each travels once, and one row of it comes
-- back (TorchRec's use_index_dedup). It happens at home, in front of input_dist and behind output: to the module in
-- between the batch is a shorter one. What copies of a row get as gradient is added up before it travels. A bag of one
-- id is sent once too; bags of several ids become bags of one id each, which are pooled when their rows are back.
local P = require "perilune.ffi"
local util = require "perilune.util"
local jagged = require "perilune.jagged"
local nn = require "perilune.nn"
local sparse = require "perilune.sparse"
local embedding_bag = require("perilune.nn.embedding").embedding_bag
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
local state = P.state
P.own { ec_index_dedup = false }

local M = {}

--- Whether collections that are sharded from now on, by this rank's script, look each id up once; see use_index_dedup
--- of EmbeddingCollectionSharder, which counts where it is given.
function M.set_ec_index_dedup(on)
  signature.value("set_ec_index_dedup", "the argument", on, "boolean")
  state.ec_index_dedup = on
end
function M.get_ec_index_dedup() return state.ec_index_dedup or false end

--- What the argument use_index_dedup of `func` says; nil: what was set.
function M.wanted(func, given)
  if given == nil then return M.get_ec_index_dedup() end
  return signature.value(func, "use_index_dedup", given, "boolean")
end

--- Whether adding the gradients of equal ids up at home would change what a module with these arguments learns.
function M.changes(a)
  local function differs(params) return params and (params.exact or params.gradient_clipping) end
  local any = differs(a.fused_params)
  for _, params in util.ordered(a.table_fused_params or {}) do any = any or differs(params) end
  return any or false
end

--- Whether rows that come home are rounded, so that none is to be pooled there.
local function rounds(a)
  local function given(params) return params and params.output_dtype and params.output_dtype ~= "FP32" end
  local any = given(a.fused_params)
  for _, params in util.ordered(a.table_fused_params or {}) do any = any or given(params) end
  return any or false
end

--- Features that look into the same tables, and so may share rows: a list of { features =, rows = of the smallest of
--- their tables }.
local function groups_of(tables)
  local users, order = {}, {}
  for i, t in ipairs(tables) do
    for _, f in ipairs(t.feature_names) do
      if not users[f] then
        users[f] = { rows = t.num_embeddings }
        order[#order + 1] = f
      end
      users[f].rows = math.min(users[f].rows, t.num_embeddings)
      users[f][#users[f] + 1] = i
    end
  end
  local groups, of = {}, {}
  for _, f in ipairs(order) do
    local key = table.concat(users[f], ",")
    if not of[key] then
      of[key] = { features = {}, rows = users[f].rows }
      groups[#groups + 1] = of[key]
    end
    table.insert(of[key].features, f)
  end
  return groups
end

local Dedup = util.class "Dedup"
M.Dedup = Dedup

--- Dedup(tables): of an EmbeddingCollection.
function Dedup:init(tables)
  self.groups, self.keys = groups_of(tables), {}
  self.leader = {} -- feature -> that of its group whose key has the ids of all
  self.asked, self.sent = 0, 0 -- ids so far
  for _, g in ipairs(self.groups) do
    for _, f in ipairs(g.features) do
      self.keys[#self.keys + 1] = f
      self.leader[f] = g.features[1]
    end
  end
end

--- The batch with the keys in the order of the groups; nil: one is missing, which the module has words for.
local function arranged(self, features)
  local at, order = features:index_per_key(), {}
  for i, key in ipairs(self.keys) do
    order[i] = at[key]
    if not order[i] then return nil end
  end
  return features:permute(order)
end

--- A group's ids, each once, and where each went; nil: some are out of range, which the module says of the ids as they
--- came.
local function distinct(ids, rows)
  if ids:numel() == 0 then return ids, ids:to "i64" end
  local unique, places = sparse.unique(ids, true)
  local n = unique:numel()
  if unique:slice(1, 0, 1):item() < -1 or unique:slice(1, n - 1, n):item() >= rows then return nil end
  return unique, places
end

--- A batch that has each id of `features` once, and by feature where its ids went among those of its leader; or
--- `features` itself and nil.
function Dedup:shorten(features)
  local batch = arranged(self, features)
  if not batch then return features, nil end
  local offsets, values, parts, lengths, places, at = batch:offset_per_key(), batch:values(), {}, {}, {}, 0
  for i, g in ipairs(self.groups) do
    local first = offsets[at + 1]
    local unique, went = distinct(values:slice(1, first, offsets[at + #g.features + 1]), g.rows)
    if not unique then return features, nil end
    parts[i] = unique
    for k, f in ipairs(g.features) do
      places[f] = went:slice(1, offsets[at + k] - first, offsets[at + k + 1] - first)
      lengths[at + k] = k == 1 and unique:numel() or 0
    end
    at = at + #g.features
  end
  local ids = nn.functional.cat(parts, 1)
  self.asked, self.sent = self.asked + values:numel(), self.sent + ids:numel()
  return jagged.KeyedJaggedTensor { keys = self.keys, values = ids, stride = 1,
    lengths = Tensor.tensor(lengths, "i32", values:device(), { #lengths }) }, places
end

-- -- bags -------------------------------------------------------------------------------------------------------------

local BagDedup = util.class "BagDedup"
M.BagDedup = BagDedup

--- BagDedup(args): of an EmbeddingBagCollection with these arguments. To the module in between, a feature's bags are
--- those of a variable batch: each id of bags of one id is one, whose row goes to all of its samples (its inverse
--- indices). Where bags have several ids, or weights, each id is one too if that makes fewer rows, and home pools them
--- (`pool`); else the bags travel as they are.
function BagDedup:init(args)
  self.features, self.weighted, self.pools = {}, args.is_weighted or false, not rounds(args)
  self.asked, self.sent = 0, 0
  for _, g in ipairs(groups_of(args.tables)) do
    for _, f in ipairs(g.features) do self.features[#self.features + 1] = { name = f, rows = g.rows } end
  end
  self.keys = util.map(self.features, function(f) return f.name end)
  self.outputs = {} -- in the order of the module's: { feature =, mean = }
  for _, t in ipairs(args.tables) do
    for _, f in ipairs(t.feature_names) do
      self.outputs[#self.outputs + 1] = { feature = f, mean = t.pooling == "MEAN" }
    end
  end
end

--- The bag of each sample among `n` bags of one id, and the empty one behind them. went: the bag of each id; lengths: 0
--- or 1.
local function bags_of(went, lengths, n)
  local list, from, at = lengths:to_list(), went:to_list(), 0
  for b, length in ipairs(list) do
    at = at + length
    list[b] = length == 1 and from[at] or n
  end
  return Tensor.tensor(list, "i64", lengths:device(), { #list })
end

local function range(n, device) return sparse.lengths_range(Tensor.full({ 1 }, n, "i64", device)) end

--- What is sent of a feature: { ids =, lengths =, inverse = the bag of each sample, weights =, pool = how its bags are
--- made of the rows at home, or nil }.
function BagDedup:_shorten(jt, rows, samples)
  local ids, lengths, device = jt:values(), jt:lengths():to "i32", jt:values():device()
  local several, weights = jt:longest() > 1 or self.weighted, jt:weights_or_none()
  local unique, went
  if jt:longest() > 0 and (self.pools or not several) then unique, went = distinct(ids, rows) end
  local n = unique and unique:numel()
  if not unique or several and n >= samples then
    return { ids = ids, lengths = lengths, inverse = range(samples, device), weights = weights }
  end
  local ones = Tensor.ones({ n }, "i32", device)
  if several then
    local factors = self.weighted and Tensor.ones({ n }, "f32", device)
    -- all ranks say alike what wants one
    if factors and weights:describe().requires_grad then factors = factors:requires_grad() end
    return { ids = unique, lengths = ones, weights = factors, pool = { places = went, jt = jt },
      inverse = nn.functional.cat({ range(n, device), Tensor.zeros({ samples - n }, "i64", device) }, 1) }
  elseif ids:numel() == samples then return { ids = unique, lengths = ones, inverse = went } end
  return { ids = unique, lengths = nn.functional.cat({ ones, Tensor.zeros({ 1 }, "i32", device) }, 1),
    inverse = bags_of(went, lengths, n) }
end

--- A variable batch of the distinct bags of `features`, whose inverse indices put their rows where they belong; and
--- what `pool` takes, if some are to be pooled here.
function BagDedup:shorten(features)
  if features:variable_stride_per_key() then return features end
  local samples, values, lengths, strides, inverse, weights, pools = features:stride(), {}, {}, {}, {}, {}, nil
  for i, f in ipairs(self.features) do
    local jt = features:get(f.name)
    local s = self:_shorten(jt, f.rows, samples)
    values[i], lengths[i], inverse[i], weights[i], strides[i] = s.ids, s.lengths, s.inverse, s.weights,
      { s.lengths:numel() }
    if s.pool then
      pools = pools or {}
      pools[f.name] = s.pool
    end
    self.asked, self.sent = self.asked + jt:values():numel(), self.sent + s.ids:numel()
  end
  return jagged.KeyedJaggedTensor { keys = self.keys, values = nn.functional.cat(values, 1),
    lengths = nn.functional.cat(lengths, 1), weights = self.weighted and nn.functional.cat(weights, 1) or nil,
    stride_per_key_per_rank = strides, inverse_indices = { self.keys, nn.functional.stack(inverse, 1) } }, pools
end

--- The bags of an output, of the rows of their ids.
local function pooled(rows, p, mean, weighted)
  local offsets, jt = p.jt:offsets(), p.jt
  if not weighted then return embedding_bag(rows, p.places, offsets, mean and "mean" or "sum", nil, true) end
  local sums = embedding_bag(rows, p.places, offsets, "sum", jt:weights():to "f32", true)
  if not mean then return sums end
  local lengths = jt:lengths():to "f32"
  return sums * nn.functional.reciprocal((lengths - 1):relu() + 1):reshape(-1, 1) -- empty bags stay zeros
end

--- The module's result, of one whose columns have in their first rows, for the features in `pools`, the rows of their
--- ids. dims: columns of each output.
function BagDedup:pool(values, pools, dims)
  local parts = values:split(dims, 2)
  for i, o in ipairs(self.outputs) do
    local p = pools[o.feature]
    if p then parts[i] = pooled(parts[i]:contiguous(), p, o.mean, self.weighted) end
  end
  return nn.functional.cat(parts, 2)
end

return M
