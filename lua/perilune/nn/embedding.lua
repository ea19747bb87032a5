-- embedding.lua: Embedding and EmbeddingBag: rows of one matrix that is an ordinary parameter. Names, arguments and
-- results are torch.nn's; sizes, ids and offsets count as they do there. Gradients are dense, so an optimizer visits
-- every row in every step: tables of which a batch touches few rows are EmbeddingBagCollection's, with fused_params.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local Module = require "perilune.nn.module"
local parameter = require "perilune.nn.parameter"
local signature = require "perilune.signature"
local C, check, ptr = P.C, P.check, Tensor.ptr

local M = {}
local modes = { sum = C.PERI_POOLING_SUM, mean = C.PERI_POOLING_MEAN, max = C.PERI_POOLING_MAX }
local call = P.struct "peri_embedding_bag_args"

local function arguments(more)
  local list = {
    num_embeddings = util.required.number, embedding_dim = util.required.number,
    padding_idx = util.optional, -- from 0, or negative from the end: a row that adds nothing and stays as it is, zeros
                                 -- at first
    max_norm = util.optional,    -- rows whose norm is larger are scaled down when they are looked up
    norm_type = 2,
    sparse = false,              -- allowed: false
    _weight = util.optional,     -- a tensor [num_embeddings, embedding_dim] to start with, whose memory the parameter
                                 -- shares
    device = util.optional,
  }
  for name, default in util.ordered(more) do list[name] = default end
  return list
end

local function padding_of(class, a)
  local rows, padding = a.num_embeddings, a.padding_idx
  if padding == nil then return false end
  if type(padding) ~= "number" or padding ~= math.floor(padding) or padding < -rows or padding >= rows then
    P.fail(("%s: padding_idx is %s, allowed: whole numbers %d..%d"):format(class, tostring(padding), -rows, rows - 1))
  end
  return padding < 0 and padding + rows or padding
end

local function weight_of(class, a, padding)
  local shape = { a.num_embeddings, a.embedding_dim }
  if a._weight ~= nil then
    if not Tensor.is(a._weight) then P.fail(("%s: _weight is a %s, wanted a tensor"):format(class, type(a._weight))) end
    local given = a._weight:shape()
    if #given ~= 2 or given[1] ~= shape[1] or given[2] ~= shape[2] or a._weight:dtype() ~= "f32" then
      P.fail(("%s: _weight is %s, wanted f32 [%d, %d]"):format(class, Tensor._text(a._weight), shape[1], shape[2]))
    end
    return parameter.Parameter(a._weight)
  end
  local weight = parameter.normal(shape, 0, 1, "f32", a.device)
  if padding then weight:detach():slice(1, padding, padding + 1):fill(0) end
  return weight
end

local function start(self, a)
  local class = self.class_name
  util.integer(class, "num_embeddings", a.num_embeddings, 0, 2 ^ 43)
  util.integer(class, "embedding_dim", a.embedding_dim, 1, 2 ^ 20)
  if a.sparse then
    P.fail(class .. ": sparse is true, allowed: false; tables of which a batch touches few rows are "
      .. "EmbeddingBagCollection's")
  end
  if a.max_norm ~= nil and not (type(a.max_norm) == "number" and a.max_norm > 0 and a.max_norm < math.huge) then
    P.fail(("%s: max_norm is %s, allowed: finite numbers > 0"):format(class, tostring(a.max_norm)))
  end
  if type(a.norm_type) ~= "number" or a.norm_type ~= a.norm_type or a.norm_type <= 0 then
    P.fail(("%s: norm_type is %s, allowed: numbers > 0"):format(class, tostring(a.norm_type)))
  end
  self.num_embeddings, self.embedding_dim = a.num_embeddings, a.embedding_dim
  self.padding_idx, self.max_norm, self.norm_type = padding_of(class, a), a.max_norm or false, a.norm_type
  self.weight = weight_of(class, a, self.padding_idx)
end

local own = {}
--- One function for exporters to watch; padding: a row's number or false.
function own.look_up(weight, mode, ids, offsets, weights, include_last, padding, max_norm, norm_type)
  call.weight, call.ids = ptr(weight), ptr(ids)
  call.offsets, call.weights = offsets and ptr(offsets) or nil, weights and ptr(weights) or nil
  call.padded, call.padding_idx = padding and true or false, padding or 0
  call.max_norm, call.norm_type = max_norm or 0, norm_type
  call.mode, call.include_last_offset = mode, include_last
  check(C.peri_embedding_bag(call, Tensor.out))
  return Tensor.wrap(Tensor.out[0])
end

signature.check_none("embedding.", own, { "look_up" })

local function look_up(self, mode, ids, offsets, weights, include_last)
  return own.look_up(self.weight, mode, ids, offsets, weights, include_last, self.padding_idx, self.max_norm,
    self.norm_type)
end

--- torch.nn.functional.embedding_bag: of rows `weight` (f32 [rows, cols], contiguous), [bags, cols]; mode "sum", "mean"
--- or "max", and the rest as EmbeddingBag.forward takes it.
function M.embedding_bag(weight, ids, offsets, mode, per_sample_weights, include_last_offset)
  mode = util.one_of("embedding_bag", "mode", mode, { "sum", "mean", "max" })
  return look_up({ weight = weight, norm_type = 2 }, modes[mode], ids, offsets, per_sample_weights, include_last_offset
    or false)
end

local function extra_text(self)
  local text = ("%d, %d"):format(self.num_embeddings, self.embedding_dim)
  if self.padding_idx then text = ("%s, padding_idx=%d"):format(text, self.padding_idx) end
  if self.max_norm then text = ("%s, max_norm=%g"):format(text, self.max_norm) end
  return text
end

--- A module whose weights are `weight` [rows, cols] (f32; its memory is shared): a buffer, or with freeze = false a
--- parameter; other arguments as in the constructor.
local function from_pretrained(class, weight, args)
  if not Tensor.is(weight) or weight:dim() ~= 2 then
    P.fail(("%s.from_pretrained: %s, wanted a tensor of 2 dimensions"):format(class.class_name, Tensor._text(weight)))
  end
  local a = {}
  for name, value in util.ordered(args or {}) do a[name] = value end
  a.freeze, a.num_embeddings, a.embedding_dim, a._weight = nil, weight:size(1), weight:size(2), weight
  local self = class(a)
  if not args or args.freeze ~= false then
    table.remove(self._parameters) -- the weights
    self:register_buffer("weight", weight:detach():share())
  end
  return self
end

-- -- modules ----------------------------------------------------------------------------------------------------------

--- Each id's row: ids of any shape give that shape and embedding_dim. The weights start normal, mean 0, deviation 1.
local Embedding = Module:extend "Embedding"
M.Embedding = Embedding
local embedding_arguments = arguments {}
function Embedding:init(args) start(self, util.named("Embedding", args, embedding_arguments)) end
function Embedding:forward(ids) return look_up(self, C.PERI_POOLING_NONE, ids, nil, nil, false) end
function Embedding.from_pretrained(weight, args) return from_pretrained(Embedding, weight, args) end
Embedding.extra_text = extra_text

--- Bags of rows: their sum, mean, or largest elements. The weights start normal, mean 0, deviation 1.
local EmbeddingBag = Module:extend "EmbeddingBag"
M.EmbeddingBag = EmbeddingBag
local bag_arguments = arguments { mode = "mean", include_last_offset = false }
function EmbeddingBag:init(args)
  local a = util.named("EmbeddingBag", args, bag_arguments)
  self.mode, self.include_last_offset = util.one_of("EmbeddingBag", "mode", a.mode, { "sum", "mean", "max" }),
    a.include_last_offset
  start(self, a)
end
--- [bags, embedding_dim] of ids [bags, length], or of ids [n] and offsets: bag b begins at offsets[b] and ends where
--- the next one begins, the last one with the ids, or with include_last_offset at the last offset. per_sample_weights,
--- with mode "sum" only: a factor for each id.
function EmbeddingBag:forward(ids, offsets, per_sample_weights)
  if per_sample_weights and self.mode ~= "sum" then
    P.fail(("EmbeddingBag: per_sample_weights with mode '%s', allowed: sum"):format(self.mode))
  end
  return look_up(self, modes[self.mode], ids, offsets, per_sample_weights, self.include_last_offset)
end
function EmbeddingBag.from_pretrained(weight, args) return from_pretrained(EmbeddingBag, weight, args) end
function EmbeddingBag:extra_text() return ("%s, mode=%s"):format(extra_text(self), self.mode) end

return M
