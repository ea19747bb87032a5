-- parameter.lua: leaves that are trained, and their first values.
--
-- Numbers come from the counter-based generator: element i of the n-th parameter that a rank draws is a function of
-- (seed, n, i). The count n lives in the rank's state, so ranks that build the same model from the same seed get the
-- same parameters, whatever else they do in between, also under `sim`. nn.manual_seed(seed) sets the seed and starts
-- counting anew.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local signature = require "perilune.signature"
local state = P.state
P.own { parameters_drawn = 0, dropouts_made = 0 } -- of random numbers, beside those of tensor/elements.lua

local M = {}

-- Streams of the generator: parameters use 0, 1, ...; peri.rand and randn those from 2^51 on (tensor/elements.lua);
-- dropout layers DROPOUT * 2^32 + step, one block of 2^32 for each layer.
local DROPOUT = 2 ^ 20

--- Seed of all parameters and dropout masks that are made from now on by this rank; counting starts anew.
function M.manual_seed(seed)
  if type(seed) ~= "number" or seed ~= math.floor(seed) or seed < 0 or seed >= 2 ^ 53 then
    P.fail(("manual_seed: seed is %s, allowed: whole numbers 0..2^53 - 1"):format(
      require("perilune.errors").kind(seed)))
  end
  state.seed, state.parameters_drawn, state.dropouts_made, state.numbers_drawn = seed, 0, 0, 0
  state.batch = false -- left there by a module that raised an error
end

--- The stream of the next parameter that this rank draws.
function M._next_stream()
  local n = state.parameters_drawn
  state.parameters_drawn = n + 1
  return n
end

--- First stream of a new dropout layer.
function M._dropout_stream()
  local n = state.dropouts_made
  state.dropouts_made = n + 1
  return (DROPOUT + n) * 2 ^ 32
end

--- Parameters of which each rank has its own part, a shard of a table: tensor -> true. Lists of parameters that hold
--- some say so by `elsewhere` (some rank has such parameters) and `group` (of those ranks), as
--- DistributedModelParallel's do.
M.own_parts = setmetatable({}, { __mode = "k" })

-- Who keeps numbers for the rows of parameters (optimizers): keeper -> list of parameters. Keepers have a method
-- restart_rows(position in the list, first row, rows).
local keepers = setmetatable({}, { __mode = "k" })
signature.object("keeper_of_rows", "an object with a method restart_rows", { restart_rows = "callable" })

local changes = 0

--- From now on `keeper` is told when rows of one of `parameters` start again; nil: of none.
function M.keep_rows(keeper, parameters)
  keepers[keeper], changes = parameters, changes + 1
end

--- A number that is another one after keepers, or lists of theirs, have changed.
function M._kept_changes() return changes end

--- Those that keep something for one of `tensors` (a set), or for tables of sharded modules that are in it too, of
--- which this rank may have no rows (spread.lua): a list, in no order.
function M._keepers_of(tensors)
  local list = {}
  for keeper, parameters in pairs(keepers) do -- any order: whoever asks sorts them
    local has = false
    for i = 1, #parameters do has = has or tensors[parameters[i]] end
    for _, e in ipairs(parameters.spread or {}) do has = has or tensors[e.of] end
    if has then list[#list + 1] = keeper end
  end
  return list
end

--- f(keeper, position, parameter) for all that are kept, in no order.
function M._each_kept(f)
  for keeper, parameters in pairs(keepers) do
    for i = 1, #parameters do f(keeper, i, parameters[i]) end
  end
end

--- Tensors that are parameters of nothing any more: tensor -> why, in words for an optimizer that has them.
M.retired = setmetatable({}, { __mode = "k" })

--- These tensors (a list) are trained no more: who keeps something for them (optimizers) is told by its method
--- retire(position, why).
function M.retire(tensors, why)
  local gone = {}
  for _, t in ipairs(tensors) do gone[t], M.retired[t] = true, why end
  for keeper, parameters in pairs(keepers) do -- any order: each is told by itself
    for i = 1, #parameters do
      if gone[parameters[i]] and keeper.retire then keeper:retire(i, why) end
    end
  end
end

local function address(t) return tonumber(ffi.cast("intptr_t", Tensor.ptr(t))) end

--- Call f(first, n) for runs of neighbours in ascending rows (a tensor, i64).
local function each_run(rows, f)
  local list, n = rows:read()
  local from = 0
  while from < n do
    local past = from + 1
    while past < n and list[past] == list[past - 1] + 1 do past = past + 1 end
    f(tonumber(list[from]), past - from)
    from = past
  end
end

--- Rows (i64, ascending, each once) of a parameter stand for something else from now on, and whoever changed them says
--- so: what optimizers keep for them (nn.optim's) starts again too, and a gradient that was gathered goes.
function M.restart_rows(parameter, rows)
  local grad = parameter:grad()
  if grad then each_run(rows, function(first, n) grad:slice(1, first, first + n):fill(0) end) end
  for keeper, parameters in pairs(keepers) do
    for i = 1, #parameters do
      if address(parameters[i]) == address(parameter) then
        signature.value("parameter.restart_rows", "who keeps numbers for the rows", keeper, "keeper_of_rows")
        each_run(rows, function(first, n) keeper:restart_rows(i, first, n) end)
      end
    end
  end
end

--- A leaf that requires grad and outlives the current scope, made of a tensor (whose memory it shares).
function M.Parameter(tensor)
  if not Tensor.is(tensor) then P.fail(("Parameter: a tensor is wanted, not a %s"):format(type(tensor))) end
  if not tensor:is_leaf() then tensor = tensor:detach() end
  return tensor:share():requires_grad()
end

function M.uniform(shape, low, high, dtype, device)
  return P.lasting(Tensor.uniform, shape, low, high, state.seed, M._next_stream(), dtype, device):requires_grad()
end
function M.normal(shape, mean, deviation, dtype, device)
  return P.lasting(Tensor.normal, shape, mean, deviation, state.seed, M._next_stream(), dtype, device):requires_grad()
end
function M.full(shape, value, dtype, device)
  return P.lasting(Tensor.full, shape, value, dtype, device):requires_grad()
end
function M.zeros(shape, dtype, device) return M.full(shape, 0, dtype, device) end
function M.ones(shape, dtype, device) return M.full(shape, 1, dtype, device) end
--- A tensor that is not trained but outlives scopes.
function M.buffer(shape, value, dtype, device) return P.lasting(Tensor.full, shape, value, dtype, device) end

--- Glorot's normal numbers, deviation sqrt(2 / (fan in + fan out)); fans as PyTorch counts them: sizes 2 and 1, times
--- the later sizes.
function M.xavier_normal(shape, dtype, device)
  local field = 1
  if #shape < 2 then P.fail(("parameter.xavier_normal: a shape of %d sizes, at least 2 are wanted"):format(#shape)) end
  for i = 1, #shape do signature.value("parameter.xavier_normal", "a size", shape[i], "count") end
  for i = 3, #shape do field = field * shape[i] end
  return M.normal(shape, 0, math.sqrt(2 / ((shape[1] + shape[2]) * field)), dtype, device)
end

signature.check("parameter.", M, {
  _keepers_of = "tensors: table", _each_kept = "f: callable", _kept_changes = "",
  retire = "tensors: list, why: string", restart_rows = "parameter: tensor, rows: tensor",
  keep_rows = "keeper: table, parameters: list?",
  uniform = "shape: list, low: number, high: number, dtype: dtype?, device: device?",
  normal = "shape: list, mean: number, deviation: number, dtype: dtype?, device: device?",
  full = "shape: list, value: number, dtype: dtype?, device: device?",
  zeros = "shape: list, dtype: dtype?, device: device?", ones = "shape: list, dtype: dtype?, device: device?",
  buffer = "shape: list, value: number, dtype: dtype?, device: device?",
  xavier_normal = "shape: list, dtype: dtype?, device: device?",
})

return M
