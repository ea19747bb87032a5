-- codecs.lua: Numbers on the wire.
--
-- A codec says how embeddings and their gradients travel between ranks: in f32, or in fewer bits. Plans and sharders
-- take a registry of them, by operation. The formats, and how far numbers may be off, are described with
-- [perilune/codec.h](c_codec.md).
---@meta

---@class peri.dist
local dist = {}
---@class peri.dist.codec
local codec = {}

---The format in which f32 numbers travel between ranks. `tostring` shows it.
---
---Errors: a format, rounding mode or size that is not among those; a loss_scale that is not above 0.
---
---```lua
---local c = peri.dist.QuantizedCommCodec { comm_precision = "INT8", row_dim = 4 }
---local context = c:create_context { 3, 4 }
---local wire = c:encode(peri.tensor { 0, 255, 51, 0, 0, 0, 0 }, context)
---print(c:quantized_dtype(), c:padded_size(3),
---  c:calc_quantized_size(4) == context:wire_splits()[2])
-----> u8 4 true
---print(c:decode(wire, context):item(1)) --> 255
---```
---@class peri.dist.QuantizedCommCodec
---@overload fun(args?: peri.dist.QuantizedCommCodec.args): peri.dist.QuantizedCommCodec
dist.QuantizedCommCodec = {}

---@class peri.dist.QuantizedCommCodec.args
---@field comm_precision? string `FP32`, `FP16`, `BF16`, `FP8`, `INT8` or `MX4` (default: FP32). `FP8` without row_dim has no scale: larger numbers become 0.9375, unless exponent_bias says otherwise.
---@field loss_scale? number With FP16 and BF16: numbers are multiplied by it on the wire, against small ones that vanish (default: 1).
---@field row_dim? integer How many numbers share a scale, with FP8, INT8 and MX4; 0: none with FP8, 32 with INT8 and MX4 (default: 0).
---@field is_fwd? boolean With FP8 in rows: 4 bits of exponent for activations, 5 for gradients (default: true).
---@field exponent_bits? integer With FP8, other numbers of bits; 0: as above (default: 0).
---@field exponent_bias? integer With FP8; 0: that of the format (default: 0).
---@field rounding_mode? string With MX4: `NEAREST`, `FLOOR`, `EVEN`, `STOCHASTIC`, `CEIL` (default: EVEN).
---@field seed? integer Of stochastic rounding (default: 0).

---The dtype of encoded messages: `f32`, `f16` or `bf16`, and `u8` with FP8, INT8 and MX4.
---@return string
function dist.QuantizedCommCodec:quantized_dtype() end

---Elements of that dtype for numbers that go to one rank.
---@param n integer How many numbers.
---@return integer
function dist.QuantizedCommCodec:calc_quantized_size(n) end

---A number of elements rounded up to whole rows of `row_dim`, as it is on the wire. `encode` fills up by itself.
---@param n integer How many numbers.
---@return integer
function dist.QuantizedCommCodec:padded_size(n) end

---A context for messages that are cut in a certain way.
---@param splits? integer[] Numbers for each rank (default: one split, as long as the first message).
---@return peri.dist.codec.QuantizationContext
function dist.QuantizedCommCodec:create_context(splits) end

---Numbers as they travel. Not recorded on the tape.
---@param x peri.Tensor f32, any shape.
---@param ctx? peri.dist.codec.QuantizationContext Of this codec (default: one split).
---@return peri.Tensor # One dimension: `[n]`, of the wire's dtype.
function dist.QuantizedCommCodec:encode(x, ctx) end

---The numbers of a message that `encode` made, as f32 again.
---@param wire peri.Tensor What `encode` returned: `[n]`.
---@param ctx? peri.dist.codec.QuantizationContext Of this codec (default: none; then the numbers that fill up the last row come back, too).
---@return peri.Tensor # f32, one dimension: `[N]`.
function dist.QuantizedCommCodec:decode(wire, ctx) end

---A codec on messages that are cut in a certain way. `create_context` makes it.
---
---Errors: what is no codec; splits that are no whole numbers from 0 on; `wire_splits` without splits.
---
---```lua
---local context = peri.dist.codec.QuantizationContext(
---  peri.dist.QuantizedCommCodec { comm_precision = "FP16" })
---context:cut { 5 }
---print(context:wire_splits()[1]) --> 5
---```
---@class peri.dist.codec.QuantizationContext
---@param codec peri.dist.QuantizedCommCodec The codec.
---@param splits? integer[] Numbers for each rank (default: set later by `cut`).
---@overload fun(codec: peri.dist.QuantizedCommCodec, splits?: integer[]): peri.dist.codec.QuantizationContext
codec.QuantizationContext = {}

---Set the splits.
---@param splits integer[] Numbers for each rank.
function codec.QuantizationContext:cut(splits) end

---Elements of the wire's dtype for each split.
---@return integer[]
function codec.QuantizationContext:wire_splits() end

---The codecs of an operation, for activations and for gradients.
---
---Errors: what is no QuantizedCommCodec.
---
---```lua
---local half = peri.dist.QuantizedCommCodec { comm_precision = "FP16" }
---print(tostring(peri.dist.QuantizedCommCodecs { forward = half }.forward))
-----> QuantizedCommCodec FP16
---```
---@class peri.dist.QuantizedCommCodecs
---@overload fun(args?: peri.dist.QuantizedCommCodecs.args): peri.dist.QuantizedCommCodecs
dist.QuantizedCommCodecs = {}

---@class peri.dist.QuantizedCommCodecs.args
---@field forward? peri.dist.QuantizedCommCodec Of activations (default: none, f32).
---@field backward? peri.dist.QuantizedCommCodec Of gradients (default: none, f32).

---The codecs of both directions, of a configuration with TorchRec's names (`QCommsConfig`).
---
---Errors: an unknown argument or format; a loss scale with a format other than FP16 and BF16.
---
---```lua
---local both = peri.dist.codec.get_qcomm_codecs { forward = "FP16", backward = "BF16",
---  backward_loss_scale = 1024 }
---print(both.backward.loss_scale) --> 1024
---```
---@param args peri.dist.codec.get_qcomm_codecs.args The configuration.
---@return peri.dist.QuantizedCommCodecs
function codec.get_qcomm_codecs(args) end

---@class peri.dist.codec.get_qcomm_codecs.args
---@field forward? string Format of activations, as `comm_precision` (default: FP32).
---@field backward? string Format of gradients (default: FP32).
---@field forward_loss_scale? number With FP16 and BF16 (default: 1).
---@field backward_loss_scale? number With FP16 and BF16 (default: 1).
---@field fp8_quantize_dim? integer How many numbers share a scale, with FP8 (default: none, numbers beyond 0.9375 are cut).
---@field fp8_quantize_dim_bwd? integer The same of gradients (default: as forward).
---@field fp8_bwd_uses_143? boolean FP8 gradients with 4 bits of exponent (default: false).
---@field mx4_quantize_dim? integer Numbers that share a scale, with MX4 (default: 32).
---@field mx4_quantize_dim_bwd? integer The same of gradients (default: as forward).
---@field mx4_rounding_mode? string With MX4, as `rounding_mode` (default: EVEN).

---The same codecs for each operation, by its name: what sharders take as `qcomm_codecs_registry`.
---
---Errors: as `get_qcomm_codecs`; an operation that there is not.
---
---```lua
---local registry = peri.dist.codec.get_qcomm_codecs_registry({ forward = "FP16" },
---  { "POOLED_EMBEDDINGS_ALL_TO_ALL" })
---print(registry.POOLED_EMBEDDINGS_ALL_TO_ALL.forward.comm_precision) --> FP16
---```
---@param args peri.dist.codec.get_qcomm_codecs.args The configuration.
---@param comm_ops? string[] Keys of `codec.CommOp` (default: all of them).
---@return table<string, peri.dist.QuantizedCommCodecs>|nil # nil: both directions are FP32.
function codec.get_qcomm_codecs_registry(args, comm_ops) end
