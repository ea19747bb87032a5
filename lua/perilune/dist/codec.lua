-- codec.lua: quantised communication: what the numbers of an exchange are on the wire, forward and backward, per
-- operation.
--
--   local registry = codec.get_qcomm_codecs_registry { forward = "FP16", backward = "BF16", backward_loss_scale = 1024
--     }
--   registry.POOLED_EMBEDDINGS_ALL_TO_ALL.forward          -- a QuantizedCommCodec
--
--   local c = codec.QuantizedCommCodec { comm_precision = "INT8" }
--   local ctx = c:create_context { 100, 7 }                -- a message of two splits, of any sizes
--   local back = c:decode(c:encode(x, ctx), ctx)
--
-- The formats and their error bounds are those of perilune/codec.h.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local M = {}

local wrap_codec = P.handle("peri_codec", {})
local wrap_context = P.handle("peri_codec_context", {})
local codec_out, context_out = ffi.new "peri_codec *[1]", ffi.new "peri_codec_context *[1]"
local config = P.struct "peri_codec_config"

--- The exchanges that a codec may be chosen for.
M.CommOp = util.face("peri.dist.codec.CommOp", {
  POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all",
  POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter",
  POOLED_EMBEDDINGS_ALL_GATHER = "pooled_embeddings_all_gather",
  SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all",
})

M.precisions = { "FP32", "FP16", "BF16", "FP8", "INT8", "MX4" }
local formats = P.options "codec"
M.rounding_modes = { "NEAREST", "FLOOR", "EVEN", "STOCHASTIC", "CEIL" }
local roundings = util.index_of(M.rounding_modes)

-- -- contexts ---------------------------------------------------------------------------------------------------------

--- A codec on one message: how the message is cut.
local Context = util.class "QuantizationContext"
M.QuantizationContext = Context

function Context:init(codec, splits)
  self.codec = codec
  self.splits = splits
  if splits then self:cut(splits) end
end

--- Set the splits (numbers of each). Messages of this context have that many numbers from then on.
function Context:cut(splits)
  local n = #splits
  local array = ffi.new("int64_t[?]", math.max(n, 1))
  for i = 1, n do array[i - 1] = util.integer("create_context", "a split", splits[i], 0) end
  check(C.peri_codec_context_new(self.codec.ptr, array, n, context_out))
  self._ref = P.lasting(wrap_context, context_out[0])
  self.splits = splits
end

--- Elements of the wire's dtype for each split.
function Context:wire_splits()
  if not self._ref then P.fail "QuantizationContext:wire_splits: it has no splits; they are given to create_context" end
  local sizes, list = C.peri_codec_context_wire_splits(self._ref.ptr), {}
  for i = 1, #self.splits do list[i] = tonumber(sizes[i - 1]) end
  return list
end

-- -- codecs -----------------------------------------------------------------------------------------------------------

--- QuantizedCommCodec { comm_precision = (one of codec.precisions), loss_scale (FP16, BF16), row_dim (FP8: none, INT8
--- and MX4: 32), is_fwd = true (FP8 in rows: 4 exponent bits forward, 5 backward, unless exponent_bits says otherwise),
--- exponent_bits, exponent_bias, rounding_mode = "EVEN" (MX4), seed = 0 }
local Codec = util.seal(util.class "QuantizedCommCodec")
M.QuantizedCommCodec = Codec

function Codec:init(args)
  local func = "QuantizedCommCodec"
  local a = util.named(func, args, {
    comm_precision = "FP32", loss_scale = 1, row_dim = util.whole(0, 0, 2 ^ 20), is_fwd = true,
    exponent_bits = 0, exponent_bias = 0,
    rounding_mode = "EVEN", seed = util.seed(0),
  })
  self.comm_precision = util.one_of(func, "comm_precision", a.comm_precision, M.precisions)
  util.one_of(func, "rounding_mode", a.rounding_mode, M.rounding_modes)
  if type(a.loss_scale) ~= "number" or a.loss_scale ~= a.loss_scale or a.loss_scale <= 0 then
    P.fail(("%s: loss_scale is %s, allowed: positive numbers"):format(func, tostring(a.loss_scale)))
  end
  config.format = formats[a.comm_precision]
  config.rounding = roundings[a.rounding_mode] - 1
  config.exponent_bits = 0
  if a.comm_precision == "FP8" then
    local backward_rows = a.row_dim > 0 and not a.is_fwd
    config.exponent_bits = a.exponent_bits > 0 and a.exponent_bits or backward_rows and 5 or 4
  end
  config.exponent_bias = a.exponent_bias
  config.row_dim = a.row_dim
  config.loss_scale, config.seed = a.loss_scale, a.seed
  check(C.peri_codec_new(config, codec_out))
  self._ref = P.lasting(wrap_codec, codec_out[0])
  self.ptr = codec_out[0]
  C.peri_codec_describe(self.ptr, config)
  self.row_dim, self.loss_scale = tonumber(config.row_dim), a.loss_scale
end

function Codec:__tostring()
  return ("QuantizedCommCodec %s%s%s"):format(self.comm_precision, self.row_dim > 0
    and (" rows of %d"):format(self.row_dim) or "", self.loss_scale ~= 1 and (" loss scale %g"):format(self.loss_scale)
    or "")
end

--- Dtype of encoded messages.
function Codec:quantized_dtype() return P.dtype_names[C.peri_codec_wire_dtype(self.ptr)] end

--- Elements of that dtype for n numbers that go to one rank.
function Codec:calc_quantized_size(n)
  local size = tonumber(C.peri_codec_size(self.ptr, util.integer("calc_quantized_size", "the number of elements", n,
    0)))
  if size < 0 then P.fail(("calc_quantized_size: %g elements are too many"):format(n)) end
  return size
end

--- n rounded up to whole rows: the size to which a split is padded on the wire. Callers need not pad.
function Codec:padded_size(n)
  util.integer("padded_size", "the number of elements", n, 0)
  local row = math.max(self.row_dim, 1)
  return math.ceil(n / row) * row
end

--- A context for messages of the given splits (default: one split, as long as the first message that is encoded with
--- it).
function Codec:create_context(splits) return Context(self, splits) end

local function context_of(codec, func, ctx, n)
  if not ctx then return Context(codec, { n }) end
  if ctx.codec ~= codec then
    P.fail(("%s: the context is of %s, not of %s"):format(func, tostring(ctx.codec), tostring(codec)))
  end
  if not ctx.splits then ctx:cut { n } end
  return ctx
end

--- The f32 tensor x, in the order of its elements, as it travels: one dimension. Not recorded.
function Codec:encode(x, ctx)
  local flat = x:detach():contiguous()
  ctx = context_of(self, "encode", ctx, flat:numel())
  check(C.peri_codec_encode(ctx._ref.ptr, Tensor.ptr(flat), Tensor.out))
  return Tensor.wrap(Tensor.out[0])
end

--- The way back: f32, one dimension. Without a context (or with one that has no splits) the message is one split of
--- whole rows.
function Codec:decode(wire, ctx)
  if not (ctx and ctx.splits) then
    local row, n = math.max(self.row_dim, 1), wire:numel()
    local whole = self:calc_quantized_size(row)
    if n % whole ~= 0 then
      P.fail(("decode: %d elements, allowed: multiples of %d, or a context with splits"):format(n, whole))
    end
    ctx = context_of(self, "decode", ctx, n / whole * row)
  end
  context_of(self, "decode", ctx)
  check(C.peri_codec_decode(ctx._ref.ptr, Tensor.ptr(wire), Tensor.out))
  return Tensor.wrap(Tensor.out[0])
end

-- -- both directions, by operation ------------------------------------------------------------------------------------

--- QuantizedCommCodecs { forward, backward }: codecs of activations and of gradients; nil: f32.
local Codecs = util.seal(util.class "QuantizedCommCodecs")
M.QuantizedCommCodecs = Codecs

function Codecs:init(args)
  local a = util.named("QuantizedCommCodecs", args, { forward = util.optional, backward = util.optional })
  for _, direction in ipairs { "forward", "backward" } do
    if a[direction] ~= nil and not Codec.is(a[direction]) then
      P.fail(("QuantizedCommCodecs: %s is a %s, wanted a QuantizedCommCodec"):format(direction, type(a[direction])))
    end
    self[direction] = a[direction] or false
  end
end

local defaults = {
  forward = "FP32", backward = "FP32", forward_loss_scale = util.optional, backward_loss_scale = util.optional,
  fp8_quantize_dim = util.optional, fp8_quantize_dim_bwd = util.optional, fp8_bwd_uses_143 = false,
  mx4_quantize_dim = util.optional, mx4_quantize_dim_bwd = util.optional, mx4_rounding_mode = "EVEN",
}

local function loss_scale(func, direction, precision, given)
  if given == nil then return 1 end
  if precision ~= "FP16" and precision ~= "BF16" then
    P.fail(("%s: %s_loss_scale %s for %s, allowed: with FP16 and BF16"):format(func, direction, tostring(given),
      precision))
  end
  return given
end

local function row_dim(a, precision, suffix)
  local name = precision == "FP8" and "fp8_quantize_dim" or precision == "MX4" and "mx4_quantize_dim"
  return name and (a[name .. suffix] or a[name]) or 0
end

--- The codecs of both directions for a configuration with TorchRec's names (QCommsConfig): forward and backward
--- precision, forward_loss_scale, backward_loss_scale, fp8_quantize_dim(_bwd), fp8_bwd_uses_143,
--- mx4_quantize_dim(_bwd), mx4_rounding_mode.
function M.get_qcomm_codecs(args)
  local func = "get_qcomm_codecs"
  local a = util.named(func, args, defaults)
  util.one_of(func, "forward", a.forward, M.precisions)
  util.one_of(func, "backward", a.backward, M.precisions)
  local forward = Codec {
    comm_precision = a.forward, loss_scale = loss_scale(func, "forward", a.forward, a.forward_loss_scale),
    row_dim = row_dim(a, a.forward, ""), rounding_mode = a.mx4_rounding_mode,
  }
  local backward = Codec {
    comm_precision = a.backward, loss_scale = loss_scale(func, "backward", a.backward, a.backward_loss_scale),
    row_dim = row_dim(a, a.backward, "_bwd"), rounding_mode = a.mx4_rounding_mode, is_fwd = a.fp8_bwd_uses_143,
  }
  return Codecs { forward = forward, backward = backward }
end

--- Codecs by the name of the operation (a key of CommOp), for `comm_ops` (default: all); nil when both directions are
--- FP32. Every format works for every operation: a reduce-scatter decodes what it received and sums in f32.
function M.get_qcomm_codecs_registry(args, comm_ops)
  local a = util.named("get_qcomm_codecs_registry", args, defaults)
  if a.forward == "FP32" and a.backward == "FP32" then return nil end
  local registry, codecs = {}, M.get_qcomm_codecs(args)
  if comm_ops ~= nil then signature.value("get_qcomm_codecs_registry", "comm_ops", comm_ops, "list") end
  for _, op in ipairs(comm_ops or util.keys(M.CommOp)) do
    util.one_of("get_qcomm_codecs_registry", "an operation", op, util.keys(M.CommOp))
    registry[op] = codecs
  end
  return registry
end

signature.kind("Codec", "a QuantizedCommCodec", Codec.is)
signature.object("codecs", "QuantizedCommCodecs", { forward = "Codec?", backward = "Codec?" })
signature.check("QuantizationContext:", Context,
  { init = "self: table, codec: Codec, splits: list?", cut = "self: table, splits: list" })
signature.check("QuantizedCommCodec:", Codec, {
  quantized_dtype = "self: table", calc_quantized_size = "self: table, n: any", padded_size = "self: table, n: any",
  create_context = "self: table, splits: list?", encode = "self: table, x: tensor, ctx: table?",
  decode = "self: table, wire: tensor, ctx: table?",
})

return M
