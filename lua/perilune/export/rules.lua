-- export/rules.lua: which functions a model may call while it is recorded, by the names that signature.lua has for
-- them.
local M = {}

local function set_of_words(text)
  local names = {}
  for name in text:gmatch "%S+" do names[name] = true end
  return names
end

--- Functions that may be recorded as formulas, too (formulas.lua).
M.formulas = set_of_words [[
  relu sigmoid tanh silu gelu softplus logsigmoid leaky_relu exp log sqrt _root abs square pow affine neg reciprocal
  log1p expm1 rsqrt sin cos erf floor ceil round trunc sign
  add sub mul div muladd linear matmul bmm cat stack split sum mean softmax log_softmax layer_norm
  floor_divide remainder fmod cosine_similarity prod cumsum cumprod tril triu isnan isfinite
  embedding.look_up eq ne lt le gt ge where masked_fill clamp maximum minimum unsqueeze squeeze permute select clone
  tensor:reshape tensor:transpose tensor:slice tensor:expand tensor:contiguous tensor:detach tensor:share tensor:to
]]

--- Functions that become operations of a model file, or views and copies; lower.lua says how.
M.known = set_of_words [[
  interaction cross_net index_select amax amin sort topk kthvalue median max min gather searchsorted isin one_hot
  cummax cummin mode _ranks scatter scatter_add index_add
  KeyedTensor:values KeyedTensor:get KeyedTensor.regroup JaggedTensor:to_padded_dense JaggedTensor:lengths
  sparse.top_products JaggedTensor:values JaggedTensor:offsets
  sparse.sequence_numbers sparse.index_select_dim0 sparse.jagged_attention sparse.hstu_mha sparse.sequence_positions
  sparse.time_buckets sparse.masked_select_jagged_1d sparse.jagged_slice sparse.truncate_jagged
  sparse.jagged_1d_to_truncated_values sparse.asynchronous_complete_cumsum KeyedJaggedTensor:get JaggedTensor:weights
  JaggedTensor:weights_or_none JaggedTensor:_with_values
]]
for name in pairs(M.formulas) do M.known[name] = true end -- any order: a set

--- The activations of a linear function, by its number for each.
M.activations = { [0] = "identity", "relu", "sigmoid", "tanh" }

--- Functions whose values have to have samples as their first dimension.
M.samples_first = set_of_words [[
  interaction sparse.top_products embedding.look_up sparse.index_select_dim0 sparse.jagged_attention sparse.hstu_mha
  sparse.sequence_positions sparse.time_buckets sparse.masked_select_jagged_1d sparse.jagged_slice
  sparse.truncate_jagged sparse.jagged_1d_to_truncated_values
]]

--- Functions that may take whole numbers that `to` made of f32. The file still has the fractions: these leave them out
--- by themselves, or hand the numbers on.
M.whole = set_of_words [[
  tensor:reshape tensor:contiguous tensor:detach tensor:share tensor:to clone unsqueeze squeeze sparse.jagged_slice
  embedding.look_up one_hot gather
]]

--- Functions that make a tensor of nothing but numbers of the program.
M.sources = set_of_words "full zeros ones eye arange linspace tensor _named_tensor"

--- Functions that take elements of a tensor, or how long the lists of a batch are, into Lua.
M.reads = set_of_words [[
  tensor:item tensor:read tensor:to_list tensor:to_table
  JaggedTensor:offset_list JaggedTensor:longest JaggedTensor:equal
  KeyedJaggedTensor:length_per_key KeyedJaggedTensor:length_per_key_or_none KeyedJaggedTensor:offset_per_key
  KeyedJaggedTensor:offset_per_key_or_none KeyedJaggedTensor:longest KeyedJaggedTensor:equal
]]

--- Functions that change a tensor in place.
M.writes = set_of_words "tensor:copy tensor:fill tensor:write"

return M
