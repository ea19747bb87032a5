-- attention.lua: layers for sequences of equal length: MultiheadAttention, GRU, LSTM. Arguments, parameters and results
-- are PyTorch's.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local F = require "perilune.nn.functional"
local Module = require "perilune.nn.module"
local parameter = require "perilune.nn.parameter"
local layers = require "perilune.nn.layers"
local initial = require "perilune.nn.initial"
local signature = require "perilune.signature"

local M = {}

-- -- attention --------------------------------------------------------------------------------------------------------

--- Each query's mean of values, weighted by the softmax of its products with the keys, for num_heads parts of the
--- vectors.
local MultiheadAttention = Module:extend "MultiheadAttention"
M.MultiheadAttention = MultiheadAttention
function MultiheadAttention:init(args)
  local a = util.named("MultiheadAttention", args, { embed_dim = util.whole(util.required, 1),
    num_heads = util.whole(util.required, 1), dropout = util.below(0, 0, 1), bias = true, batch_first = false,
    dtype = "f32", device = util.optional })
  local name, e = "MultiheadAttention", a.embed_dim
  if e % a.num_heads ~= 0 then
    P.fail(("%s: embed_dim %d in %d heads, wanted a multiple of num_heads"):format(name, e, a.num_heads))
  end
  self.embed_dim, self.num_heads, self.batch_first = e, a.num_heads, a.batch_first
  self.in_proj_weight = parameter.zeros({ 3 * e, e }, a.dtype, a.device)
  initial.xavier_uniform_(self.in_proj_weight)
  self.in_proj_bias = a.bias and parameter.zeros({ 3 * e }, a.dtype, a.device)
  self.out_proj = layers.Linear { in_features = e, out_features = e, bias = a.bias, dtype = a.dtype, device = a.device }
  if a.bias then initial.zeros_(self.out_proj.bias) end
  self.drop = layers.Dropout { p = a.dropout }
end

--- [B, L, E] -> [B, heads, L, E / heads], projected by part k of the weights.
local function heads_of(self, x, k)
  local e, b, l = self.embed_dim, x:size(1), x:size(2)
  local weight, bias = self.in_proj_weight:slice(1, k * e, (k + 1) * e), self.in_proj_bias
  local y = F.linear(x, weight, bias and bias:slice(1, k * e, (k + 1) * e) or nil)
  return y:reshape(b, l, self.num_heads, e / self.num_heads):transpose(2, 3)
end

--- Scores [B, heads, L, S] with a mask: bool (true: left out), or numbers that are added.
local function masked(scores, mask)
  return mask:dtype() == "bool" and scores:masked_fill(mask, -math.huge) or scores + mask
end

local function check_input(self, name, x)
  if x:dim() ~= 3 or x:size(3) ~= self.embed_dim then
    P.fail(("MultiheadAttention: %s is %s, wanted three dimensions, the last one %d"):format(name, Tensor._text(x),
      self.embed_dim))
  end
end

local forward_options = { key_padding_mask = util.optional, attn_mask = util.optional, average_attn_weights = true }
local no_options = util.named("MultiheadAttention:forward", {}, forward_options)

--- query [L, B, E], key and value [S, B, E]; with batch_first [B, L, E] and [B, S, E]. options: key_padding_mask [B, S]
--- and attn_mask [L, S] or [B * heads, L, S]: bool (true is left out) or numbers that are added to the scores;
--- average_attn_weights (true). Returns the result, of query's shape, and the weights [B, L, S], or [B, heads, L, S]
--- where they are not averaged.
function MultiheadAttention:forward(query, key, value, options)
  local o = options and util.named("MultiheadAttention:forward", options, forward_options) or no_options
  check_input(self, "query", query)
  check_input(self, "key", key)
  check_input(self, "value", value)
  if not self.batch_first then query, key, value = query:transpose(1, 2), key:transpose(1, 2), value:transpose(1, 2) end
  local b, l, s, h = query:size(1), query:size(2), key:size(2), self.num_heads
  local q, k, v = heads_of(self, query, 0), heads_of(self, key, 1), heads_of(self, value, 2)
  local scores = F.matmul(q * (1 / math.sqrt(self.embed_dim / h)), k:transpose(3, 4))
  if o.attn_mask then
    scores = masked(scores, o.attn_mask:dim() == 3 and o.attn_mask:reshape(b, h, l, s) or o.attn_mask)
  end
  if o.key_padding_mask then scores = masked(scores, o.key_padding_mask:reshape(b, 1, 1, s)) end
  local weights = self.drop(scores:softmax(-1))
  local y = self.out_proj(F.matmul(weights, v):transpose(2, 3):reshape(b, l, self.embed_dim))
  if not self.batch_first then y = y:transpose(1, 2) end
  return y, o.average_attn_weights and weights:mean(2) or weights
end
function MultiheadAttention:extra_text()
  return ("embed_dim=%d, num_heads=%d"):format(self.embed_dim, self.num_heads)
end

--- A layer of a transformer: attention of a sequence to itself and two linear layers, each added to what it was called
--- with and normalised (norm_first: normalised before).
local TransformerEncoderLayer = Module:extend "TransformerEncoderLayer"
M.TransformerEncoderLayer = TransformerEncoderLayer
local feed_forward = { relu = F.relu, gelu = F.gelu }
function TransformerEncoderLayer:init(args)
  local name = "TransformerEncoderLayer"
  local a = util.named(name, args, { d_model = util.whole(util.required, 1), nhead = util.whole(util.required, 1),
    dim_feedforward = util.whole(2048, 1), dropout = util.below(0.1, 0, 1), activation = util.any "relu",
    layer_norm_eps = util.from(1e-5, 0), batch_first = false, norm_first = false, bias = true, dtype = "f32",
    device = util.optional })
  local function linear(from, to)
    return layers.Linear { in_features = from, out_features = to, bias = a.bias, dtype = a.dtype, device = a.device }
  end
  local function norm()
    return layers.LayerNorm { normalized_shape = a.d_model, eps = a.layer_norm_eps, bias = a.bias, dtype = a.dtype,
      device = a.device }
  end
  self.activation = feed_forward[a.activation] or a.activation
  if not util.is_callable(self.activation) then
    P.fail(("%s: activation is %s, allowed: relu, gelu, a function or a Module"):format(name,
      signature.text(a.activation)))
  end
  self.self_attn = MultiheadAttention { embed_dim = a.d_model, num_heads = a.nhead, dropout = a.dropout, bias = a.bias,
    batch_first = a.batch_first, dtype = a.dtype, device = a.device }
  self.linear1 = linear(a.d_model, a.dim_feedforward) -- in PyTorch's order, which is that of their first values
  self.dropout = layers.Dropout { p = a.dropout }
  self.linear2 = linear(a.dim_feedforward, a.d_model)
  self.norm_first, self.norm1 = a.norm_first, norm()
  self.norm2 = norm()
  self.dropout1 = layers.Dropout { p = a.dropout }
  self.dropout2 = layers.Dropout { p = a.dropout }
end

local function attend(self, x, options)
  local y = self.self_attn(x, x, x, options)
  return self.dropout1(y)
end
local function feed(self, x)
  return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))
end

local encoder_options = { src_mask = util.optional, src_key_padding_mask = util.optional }

--- src [L, B, E], with batch_first [B, L, E]. options: src_mask and src_key_padding_mask, which are the attention's
--- attn_mask and key_padding_mask.
function TransformerEncoderLayer:forward(src, options)
  local o = util.named("TransformerEncoderLayer:forward", options or {}, encoder_options)
  local masks = { attn_mask = o.src_mask, key_padding_mask = o.src_key_padding_mask }
  if self.norm_first then
    local x = src + attend(self, self.norm1(src), masks)
    return x + feed(self, self.norm2(x))
  end
  local x = self.norm1(src + attend(self, src, masks))
  return self.norm2(x + feed(self, x))
end

-- -- GRU, LSTM ------------------------------------------------------------------------------------------------------

--- The class above both: layers over one another, with bidirectional each in both directions.
local Recurrent = Module:extend "Recurrent"

--- `gates`: how many rows of the weights each number of a state has.
function Recurrent:_make(gates, args)
  local name = self.class_name
  local a = util.named(name, args, { input_size = util.whole(util.required, 1),
    hidden_size = util.whole(util.required, 1), num_layers = util.whole(1, 1, 4096), bias = true, batch_first = false,
    dropout = util.below(0, 0, 1), bidirectional = false, dtype = "f32", device = util.optional })
  self.input_size, self.hidden_size, self.num_layers = a.input_size, a.hidden_size, a.num_layers
  self.bias, self.batch_first, self.directions = a.bias, a.batch_first, a.bidirectional and 2 or 1
  self.drop = layers.Dropout { p = a.dropout }
  local bound, h = 1 / math.sqrt(a.hidden_size), a.hidden_size
  for layer = 0, a.num_layers - 1 do
    local size = layer == 0 and a.input_size or h * self.directions
    for direction = 1, self.directions do
      local suffix = ("_l%d%s"):format(layer, direction == 2 and "_reverse" or "")
      local function add(parameter_name, shape)
        self:register_parameter(parameter_name .. suffix, parameter.uniform(shape, -bound, bound, a.dtype, a.device))
      end
      add("weight_ih", { gates * h, size })
      add("weight_hh", { gates * h, h })
      if a.bias then
        add("bias_ih", { gates * h })
        add("bias_hh", { gates * h })
      end
    end
  end
  self.parts = {}
  for k = 1, gates do self.parts[k] = h end
end

--- All steps of one direction of a layer: x [L, B, size] -> [L, B, hidden] and the last states [B, hidden]; with
--- batch_first all are [B, L, ...], so that samples stay the first dimension, as model files want them. h, c: the first
--- states, or nil: zeros, of which no product is made. The products with the inputs are made for all steps at once.
local function run(self, x, h, c, suffix, backwards)
  local time = self.batch_first and 2 or 1
  local n, size = x:size(time), self.hidden_size
  local weight, bias = self["weight_hh" .. suffix], self.bias and self["bias_hh" .. suffix] or nil
  local inputs = F.linear(x, self["weight_ih" .. suffix], self.bias and self["bias_ih" .. suffix] or nil)
  local steps = {}
  -- of a single step the weight of states has a gradient, too: zeros, as in PyTorch, on which its decay works
  if not h and n == 1 and P.state.grad then h = Tensor.zeros({ x:size(3 - time), size }, inputs:dtype(), x:device()) end
  for i = 1, n do
    local at = backwards and n - i or i - 1
    h, c = self:_step(inputs:select(time, at), weight, bias, h, c)
    steps[at + 1] = h
  end
  return F.stack(steps, time), h, c
end

--- The first states that are given have a matrix for each layer and direction.
local function check_first(self, what, t, x)
  local states, batch = self.num_layers * self.directions, x:size(self.batch_first and 1 or 2)
  if not t or t:dim() == 3 and t:size(1) == states and t:size(2) == batch and t:size(3) == self.hidden_size then
    return
  end
  P.fail(("%s: %s is %s, wanted [%d, %d, %d]: layers times directions, samples, hidden_size"):format(self.class_name,
    what, Tensor._text(t), states, batch, self.hidden_size))
end

--- x, and the first states of all layers and directions -> the states at all steps, the last states.
function Recurrent:_forward(x, h0, c0)
  local name = self.class_name
  if x:dim() ~= 3 or x:size(3) ~= self.input_size then
    P.fail(("%s: x is %s, wanted three dimensions, the last one %d"):format(name, Tensor._text(x), self.input_size))
  end
  if x:size(self.batch_first and 2 or 1) == 0 then
    P.fail(("%s: a sequence without steps, wanted at least one"):format(name))
  end
  local last, cells, d = {}, {}, self.directions
  check_first(self, "h0", h0, x)
  check_first(self, "c0", c0, x)
  for layer = 0, self.num_layers - 1 do
    local outs = {}
    for direction = 1, d do
      local k = layer * d + direction
      local suffix = ("_l%d%s"):format(layer, direction == 2 and "_reverse" or "")
      outs[direction], last[k], cells[k] = run(self, x, h0 and h0:select(1, k - 1), c0 and c0:select(1, k - 1), suffix,
        direction == 2)
    end
    x = d == 2 and F.cat(outs, 3) or outs[1]
    if layer < self.num_layers - 1 then x = self.drop(x) end
  end
  return x, F.stack(last, 1), cells[1] and F.stack(cells, 1) or nil
end
function Recurrent:extra_text()
  return ("%d, %d, num_layers=%d"):format(self.input_size, self.hidden_size, self.num_layers)
end

--- Gated recurrent units.
local GRU = Recurrent:extend "GRU"
M.GRU = GRU
function GRU:init(args) self:_make(3, args) end

--- What a step makes of its input's products, and of the state before it.
function GRU:_step(inputs, weight, bias, h)
  local from, own = F.split(inputs, self.parts, 2), nil
  if h then own = F.split(F.linear(h, weight, bias), self.parts, 2)
  elseif bias then own = F.split(bias:to(inputs:dtype()), self.parts, 1) end
  local reset = F.sigmoid(own and from[1] + own[1] or from[1])
  local update = F.sigmoid(own and from[2] + own[2] or from[2])
  local new = F.tanh(own and from[3] + reset * own[3] or from[3])
  return h and new + update * (h - new) or new - update * new
end

--- x [L, B, input_size] (batch_first: [B, L, input_size]); h0 [layers * directions, B, hidden_size], or nil: zeros.
--- Returns the last layer's states at all steps, [L, B, directions * hidden_size], and those of all layers at the last
--- step, of h0's shape.
function GRU:forward(x, h0)
  local states, last = self:_forward(x, h0)
  return states, last
end

--- Long short-term memory.
local LSTM = Recurrent:extend "LSTM"
M.LSTM = LSTM
function LSTM:init(args) self:_make(4, args) end

function LSTM:_step(inputs, weight, bias, h, c)
  local sum = inputs
  if h then sum = inputs + F.linear(h, weight, bias) elseif bias then sum = inputs + bias:to(inputs:dtype()) end
  local gates = F.split(sum, self.parts, 2) -- what is let in, what is kept, what is new, what is let out
  local new = F.sigmoid(gates[1]) * F.tanh(gates[3])
  c = c and F.sigmoid(gates[2]) * c + new or new
  return F.sigmoid(gates[4]) * F.tanh(c), c
end

--- x as GRU's; h0 and c0 (both or none): the first states and cells, [layers * directions, B, hidden_size], or nil:
--- zeros. Returns the last layer's states at all steps, and the states and the cells of all layers at the last step.
function LSTM:forward(x, h0, c0)
  if (h0 == nil) ~= (c0 == nil) then P.fail "LSTM: one of h0 and c0 is nil, wanted both or none" end
  local states, last, cells = self:_forward(x, h0, c0)
  return states, last, cells
end

signature.check("MultiheadAttention:", MultiheadAttention, {
  forward = "self: table, query: tensor, key: tensor, value: tensor, options: table?",
})
signature.check("GRU:", GRU, { forward = "self: table, x: tensor, h0: tensor?" })
signature.check("LSTM:", LSTM, { forward = "self: table, x: tensor, h0: tensor?, c0: tensor?" })

return M
