-- pieces.lua: PiecewiseEmbeddingBagCollection: bags of tables that are cut by rows into pieces, each a table of its own
-- for plans: hot rows replicated, warm ones sharded, cold ones in files.
--
--   local bags = peri.PiecewiseEmbeddingBagCollection {
--     tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 1e6, embedding_dim = 16,
--       feature_names = { "f" } } },
--     -- tables "t:0" (rows 0..999), "t:1000", "t:50000", of the collection at `pieces`
--     cuts = { t = { 1000, 50000 } },
--     fused_params = { optimizer = "rowwise_adagrad" },
--   }
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local jagged = require "perilune.jagged"
local nn = require "perilune.nn"
local sparse = require "perilune.sparse"
local config = require "perilune.embed.config"
local EmbeddingBagCollection = require "perilune.embed.bag"

local C = P.C

local BEYOND = 2 ^ 53 - 1 -- the end of the last piece, so that it sees, and refuses, ids that no row has

local Piecewise = nn.Module:extend "PiecewiseEmbeddingBagCollection"

local arguments = {
  tables = util.required.list,        -- EmbeddingBagConfigs, pooling SUM
  cuts = util.required.table,         -- table -> first rows of its pieces but the first, rising
  fused_params = util.optional.table, -- as of EmbeddingBagCollection
  is_weighted = false,
}

--- First rows of a table's pieces, and its rows at the end: { 0, 1000, 50000, 1000000 }.
local function bounds_of(func, t, cuts)
  local bounds = { 0 }
  if cuts ~= nil and type(cuts) ~= "table" then
    P.fail(("%s: cuts['%s'] is %s, wanted a list of rows"):format(func, t.name, errors.kind(cuts)))
  end
  if not util.is_whole_list(cuts or {}) then
    P.fail(("%s: cuts['%s'] has entries behind a nil, or keys that are no positions; wanted a list of rows"):format(
      func, t.name))
  end
  for i, row in ipairs(cuts or {}) do
    bounds[i + 1] = util.integer(func, ("cuts['%s'][%d]"):format(t.name, i), row, bounds[i] + 1, t.num_embeddings - 1)
  end
  bounds[#bounds + 1] = t.num_embeddings
  return bounds
end

--- The configuration of one piece: what the table says, for fewer rows.
local function piece_of(t, first, rows)
  local args = { name = ("%s:%d"):format(t.name, first), num_embeddings = rows, embedding_dim = t.embedding_dim,
    data_type = t.data_type, pooling = t.pooling, feature_names = util.map(t.feature_names, function(f)
      return ("%s:%d"):format(f, first)
    end) }
  if t.init_fn then args.init_fn = t.init_fn
  else args.weight_init_min, args.weight_init_max = t:get_weight_init_min(), t:get_weight_init_max() end
  return config.EmbeddingBagConfig(args)
end

--- An error for optimizers that look at more of a table than the rows that a batch has, so that pieces would not learn
--- what the whole does, and for sums that pieces cannot be added up in.
local function check_params(func, params)
  if params == nil then return end
  local o, _, name, _, output = config.fused_params(func, params)
  if name == "shampoo" then
    P.fail(func .. ": optimizer shampoo has one preconditioner for all rows of a table, and pieces would have one "
      .. "each; allowed: optimizers that treat rows apart, such as rowwise_adagrad")
  end
  local up, down = C.PERI_RATES_TAIL_ID_INCREASE, C.PERI_RATES_TAIL_ID_DECREASE
  local k = name == "rowwise_adagrad_with_counter" and tostring(params.weight_decay_mode):lower() == "counter"
    and o.counter
  if k and (k.tail_id_is_ratio or k.learning_rate_mode == up or k.learning_rate_mode == down) then
    P.fail(func .. ": counter_based_regularization with tail_id_threshold.is_ratio, or learning_rate_mode "
      .. "tail_id_lr_increase or _decrease, goes by the largest counter of all rows of a table, and pieces would have "
      .. "one each; allowed: the other modes, without is_ratio")
  end
  if output and output ~= "FP32" then
    P.fail(("%s: output_dtype is %s, allowed: FP32 (rows of pieces are added up)"):format(func, tostring(output)))
  end
end

function Piecewise:init(args)
  local func = self.class_name
  local a = util.named(func, args, arguments)
  check_params(func, a.fused_params)
  local known, pieces = {}, {}
  self.tables, self._bounds, self._most, self._names, self._dims = a.tables, {}, 1, {}, {}
  for i, t in ipairs(a.tables) do
    if not config.EmbeddingBagConfig.is(t) then
      P.fail(("%s: tables[%d] is %s, wanted an EmbeddingBagConfig"):format(func, i, errors.kind(t)))
    end
    if t.pooling ~= "SUM" then
      P.fail(("%s: table '%s' has pooling %s, allowed: SUM (its pieces are added up)"):format(func, t.name, t.pooling))
    end
    known[t.name] = true
    local bounds = bounds_of(func, t, a.cuts[t.name])
    self._most = math.max(self._most, #bounds - 1)
    for k = 1, #bounds - 1 do pieces[#pieces + 1] = piece_of(t, bounds[k], bounds[k + 1] - bounds[k]) end
    for _, f in ipairs(t.feature_names) do
      if self._bounds[f] then P.fail(("%s: feature '%s' is of two tables; give it two names"):format(func, f)) end
      self._bounds[f], self._names[#self._names + 1], self._dims[#self._dims + 1] = bounds, f, t.embedding_dim
    end
  end
  for name in util.ordered(a.cuts) do
    if not known[name] then P.fail(("%s: cuts has table '%s', which does not exist"):format(func, tostring(name))) end
  end
  self.pieces = EmbeddingBagCollection { tables = pieces, fused_params = a.fused_params, is_weighted = a.is_weighted }
  self._layout = false
end

--- How batches with these keys are cut: rows of each feature's pieces, and the names of the features that come out,
--- piece after piece.
local function layout_of(self, keys)
  local text = table.concat(keys, "\n")
  if self._layout and self._layout.text == text then return self._layout end
  local layout = { text = text, bounds = {}, blocks = {}, names = {} }
  local there = util.index_of(keys)
  for _, f in ipairs(self._names) do
    if not there[f] then
      P.fail(("%s: the batch has no feature '%s'; it has: %s"):format(self.class_name, f, table.concat(keys, ", ")))
    end
  end
  for i, key in ipairs(keys) do
    local bounds, own = self._bounds[key] or { 0 }, {}
    for p = 1, self._most + 1 do own[p] = p < #bounds and bounds[p] or p == 1 and 0 or BEYOND end
    layout.bounds[i], layout.blocks[i] = own, BEYOND
  end
  for p = 1, self._most do
    for _, key in ipairs(keys) do
      local bounds = self._bounds[key]
      local real = bounds and bounds[p + 1]
      layout.names[#layout.names + 1] = real and ("%s:%d"):format(key, bounds[p]) or ("%s:-%d"):format(key, p)
    end
  end
  self._layout = layout
  return layout
end

--- The batch with each feature's ids dealt to the pieces that have their rows, counted from the pieces' first rows.
function Piecewise:cut(features)
  if not jagged.KeyedJaggedTensor.is(features) then
    P.fail(("%s: features is %s, wanted a KeyedJaggedTensor"):format(self.class_name, errors.kind(features)))
  end
  if features:variable_stride_per_key() then
    P.fail(self.class_name .. ": a variable batch per feature cannot be cut")
  end
  local weights = features:weights_or_none()
  if weights and weights:describe().requires_grad then
    P.fail(self.class_name .. ": weights that require a gradient get none through pieces; allowed: weights that "
      .. "require none")
  end
  local layout = layout_of(self, features:keys())
  local cut = sparse.bucketize_kjt_before_all2all(features, { num_buckets = self._most, block_sizes = layout.blocks,
    block_bucketize_row_pos = layout.bounds })
  return jagged.KeyedJaggedTensor { keys = layout.names, values = cut:values(), lengths = cut:lengths(),
    weights = cut:weights_or_none() }
end

--- What a lookup failed for: where the batch has ids that no row has, these, as the batch has them, not as pieces count
--- them.
local function blame(self, features, err)
  if type(err) ~= "table" or not tostring(err.message):find(": id %d") then return end
  local offset, lengths, values = 0, features:lengths():to_list(), features:values():to_list()
  local stride = #lengths / #features:keys()
  for k, key in ipairs(features:keys()) do
    local bounds = self._bounds[key]
    for sample = 0, stride - 1 do
      for i = offset + 1, offset + lengths[(k - 1) * stride + sample + 1] do
        local id, most = values[i], bounds and bounds[#bounds] - 1
        if bounds and (id < 0 or id > most) then
          P.fail(("%s: feature '%s', sample %d: id %d, allowed: 0..%d"):format(self.class_name, key, sample, id, most))
        end
        offset = i
      end
    end
  end
end

--- Sums of the rows of each feature's bags as a KeyedTensor [batch, columns], features in the order of tables.
function Piecewise:forward(features)
  local cut, sums = self:cut(features), {}
  local ok, parts = xpcall(function() return self.pieces(cut):to_dict() end, P.locate)
  if not ok then
    blame(self, features, parts)
    error(parts, 0)
  end
  for i, f in ipairs(self._names) do
    local bounds = self._bounds[f]
    local sum = parts[("%s:0"):format(f)]
    for p = 2, #bounds - 1 do sum = sum + parts[("%s:%d"):format(f, bounds[p])] end
    sums[i] = sum
  end
  return jagged.KeyedTensor { keys = self._names, length_per_key = self._dims, values = nn.functional.cat(sums, 2) }
end

return Piecewise
