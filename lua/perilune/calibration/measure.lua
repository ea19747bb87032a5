-- measure.lua: steps of a plan, run: what `perilune calibrate` finds prices by, and what `perilune plan --verify`
-- compares with.
local ffi = require "ffi"
local bit = require "bit"
local peri = require "perilune"
local config_of = require "perilune.embed.config"
local constraints_of = require "perilune.plan.constraints"
local Tensor, util, C = peri.Tensor, peri.util, peri.ffi.C

local M = {}

local WARM = 16 -- numbers that are thrown away

local function now() return tonumber(C.peri_time_ns()) / 1e6 end

--- Whole numbers in [0, rows), the same in every run: a shift register of 32 bits (quick: as much time goes into ids as
--- into steps).
local function draw(values, first, n, rows, seed)
  local x = bit.bor(bit.tobit(seed * 48271 % 2 ^ 32), 1)
  local scale = rows / 2 ^ 32
  for i = first - WARM, first + n - 1 do -- seeds that are near each other begin alike
    x = bit.bxor(x, bit.lshift(x, 13))
    x = bit.bxor(x, bit.rshift(x, 17))
    x = bit.bxor(x, bit.lshift(x, 5))
    if i >= first then values[i] = math.floor((x + 2 ^ 31) * scale) end
  end
end

--- Wait until @device has done all that was queued on the current stream; nil: the processor, which has.
local function wait_for(device)
  if device then peri.stream.current(device):synchronize() end
end

--- A batch of a collection: f.length ids a bag on average of feature f, of which there are f.bags, with ids below
--- f.rows; on @device.
local function batch_of(features, seed, device)
  local total, bags, keys, strides, varied = 0, 0, {}, {}, false
  for i, f in ipairs(features) do
    keys[i], strides[i], varied = f.name, { f.bags }, varied or f.bags ~= features[1].bags
    total, bags = total + math.floor(f.length * f.bags + 0.5), bags + f.bags
  end
  local values = not device and ffi.new("int64_t[?]", math.max(total, 1))
  local lengths, drawn = ffi.new("int32_t[?]", math.max(bags, 1)), {}
  local at, bag = 0, 0
  for i, f in ipairs(features) do
    local n = math.floor(f.length * f.bags + 0.5)
    local own = seed * 7919 + i * 104729
    if values then draw(values, at, n, f.rows, own)
    -- a GPU draws millions sooner than they travel
    else drawn[i] = Tensor.uniform({ n }, 0, f.rows, own, 0, "f64", device):to "i64" end
    for b = 0, f.bags - 1 do lengths[bag + b] = math.floor((b + 1) * n / f.bags) - math.floor(b * n / f.bags) end
    at, bag = at + n, bag + f.bags
  end
  local inverse -- pooled rows of features with fewer bags than others serve several samples
  if varied then
    local samples = 0
    for _, f in ipairs(features) do samples = math.max(samples, f.bags) end
    local places = ffi.new("int64_t[?]", #features * samples)
    for i, f in ipairs(features) do
      for s = 0, samples - 1 do places[(i - 1) * samples + s] = s % math.max(f.bags, 1) end
    end
    inverse = { keys, Tensor.from_memory(places, { #features, samples }, "i64", device or "cpu") }
  end
  return peri.KeyedJaggedTensor { keys = keys, inverse_indices = inverse, stride = not varied and features[1].bags
    or nil, stride_per_key_per_rank = varied and strides or nil,
    values = values and Tensor.from_memory(values, { total }, "i64", "cpu") or peri.nn.functional.cat(drawn, 1),
    lengths = Tensor.from_memory(lengths, { bags }, "i32", device or "cpu") }
end

--- The sharded module of one collection of a model (plan/describe.lua) under its part of a plan, with its features. One
--- of several tables has ids that all of them have, and as many as the first says.
local function sharded_of(collection, module_plan, constraints, group, batch_size, device)
  local pooled = collection.kind ~= "EmbeddingCollection"
  local tables, features, known = {}, {}, {}
  local start = peri.embed.constant(0.01) -- quicker than to draw numbers; lookups and updates take no longer for any
  for i, t in ipairs(collection.tables) do
    local config = pooled and peri.EmbeddingBagConfig or peri.EmbeddingConfig
    tables[i] = config { name = t.name, num_embeddings = t.num_embeddings, embedding_dim = t.embedding_dim,
      feature_names = t.feature_names, data_type = t.data_type or "FP32", init_fn = start }
    local constraint = constraints_of.for_table(constraints, collection.path, t.name)
    local function numbers(key, default)
      return constraints_of.per_feature(constraint, key, t.name, #t.feature_names, default)
    end
    local lengths, poolings, batches = numbers("pooling_factors", 1), numbers("num_poolings", 1),
      numbers("batch_sizes", batch_size)
    for k, name in ipairs(t.feature_names) do
      local f = known[name]
      if not f then
        f = { name = name, length = lengths[k], rows = t.num_embeddings,
          bags = math.floor(batches[k] * poolings[k] + 0.5) }
        known[name], features[#features + 1] = f, f
      end
      f.rows = math.min(f.rows, t.num_embeddings)
    end
  end
  local class = pooled and peri.shard.ShardedEmbeddingBagCollection or peri.shard.ShardedEmbeddingCollection
  return class { tables = tables, plan = module_plan, group = group, device = device,
    fused_params = config_of.usual_params(collection.optimizer or "sgd") }, features
end

--- What comes out of a module, as tensors.
local function rows_of(module, result)
  if result.values then return { result:values() } end
  return util.map(module:embedding_names(), function(name) return result[name]:values() end)
end

--- One forward and backward pass. Returns the milliseconds of each; on a device these are its own only if `apart`: it
--- is waited for then.
local function step(part, batch, apart)
  local from = now()
  local rows = rows_of(part.module, util.resolve(part.module:forward(batch)))
  rows[1]:shape() -- waits for other ranks
  if apart then wait_for(part.device) end
  local between = now()
  for i, x in ipairs(rows) do
    local n = x:numel()
    local kept = part.gradients[i]
    if not kept or kept:numel() ~= n then
      if kept then kept:release() end
      part.gradients[i] = peri.ffi.lasting(Tensor.full, x:shape(), 1e-3, "f32", x:device())
    end
  end
  if apart then wait_for(part.device) end
  local begin = now()
  Tensor.backward(rows, part.gradients)
  if apart then wait_for(part.device) end
  return between - from, now() - begin
end

--- The sharded collections of a model under a plan. Returns an object for M.time. Collective.
--- args: { model =, plan = ShardingPlan, constraints =, batch_size = (of a rank), group =, beside = the group whose
--- other ranks do the same at the same times (nil: group), device = where tables are (nil: the processor) }
function M.prepare(args)
  local before, parts = tonumber(C.peri_mem_live()), {}
  for i, collection in ipairs(args.model) do
    local module, features = sharded_of(collection, args.plan:get_plan_for_module(collection.path), args.constraints,
      args.group, args.batch_size, args.device or "cpu")
    parts[i] = { module = module, features = features, gradients = {}, device = args.device }
  end
  return { parts = parts, group = args.group, beside = args.beside or args.group, bytes = tonumber(C.peri_mem_live())
    - before, number = 0, before = 1, in_a_row = 1 }
end

local MOST, LONG = 8, 10          -- steps in a row; milliseconds that are enough of them
local MOST_BEFORE, BEFORE = 4, 3  -- the same of those before

--- Run steps in a row, as training does: first some that are not timed, for they find caches as other work left them,
--- and a link with a limit rested; then as many as take LONG milliseconds. On a device those before tell forward and
--- backward apart, and those that are timed follow each other without a wait, as in training. Each on ids that no step
--- before had: those would be in the caches. Returns milliseconds of one: of all (the slowest rank), forward, backward
--- (their parts of it: ranks that wait for others do so in either). Collective.
function M.time(prepared)
  local group, before, n = prepared.group, prepared.before, prepared.in_a_row
  local elapsed, ahead, back = 0, 0, 0
  peri.scope(function()
    local batches = {}
    for k = 1, before + n do
      prepared.number = prepared.number + 1
      batches[k] = util.map(prepared.parts, function(part)
        return batch_of(part.features, prepared.number * group:size() + group:rank(), part.device)
      end)
    end
    local device = prepared.parts[1] and prepared.parts[1].device
    local function one(k)
      for i, part in ipairs(prepared.parts) do
        local a, b = step(part, batches[k][i], k <= before)
        ahead, back = ahead + a, back + b
      end
    end
    collectgarbage "stop" -- what is to be collected are batches, which training would not make here
    prepared.beside:barrier():wait()
    for k = 1, before do peri.scope(one, k) end
    if not device then ahead, back = 0, 0 end
    prepared.beside:barrier():wait()
    local from, kept_ahead, kept_back = now(), ahead, back
    for k = before + 1, before + n do peri.scope(one, k) end
    wait_for(device)
    elapsed = now() - from
    if device then ahead, back = kept_ahead, kept_back end
    collectgarbage "restart"
  end)
  local slowest, sums = Tensor.tensor({ elapsed }, "f64"), Tensor.tensor({ ahead, back }, "f64")
  prepared.beside:all_reduce(slowest, "max"):wait()
  prepared.beside:all_reduce(sums):wait()
  local ms, parts = slowest:item() / n, sums:to_list()
  prepared.in_a_row = math.max(1, math.min(MOST, math.ceil(LONG / ms)))
  prepared.before = math.max(1, math.min(MOST_BEFORE, math.ceil(BEFORE / ms)))
  return ms, ms * parts[1] / (parts[1] + parts[2]), ms * parts[2] / (parts[1] + parts[2])
end

function M.release(prepared)
  for _, part in ipairs(prepared.parts) do
    part.module:release()
    for _, gradient in ipairs(part.gradients) do gradient:release() end
  end
  prepared.parts = {}
  collectgarbage()
end

return M
