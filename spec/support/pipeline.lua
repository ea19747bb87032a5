-- pipeline.lua: a model with pooled and sequence collections and its batches, for specs of pipelines; and the plain
-- loop, their oracle.
local ffi = require "ffi"
local peri = require "perilune"
local nn, plan = peri.nn, peri.plan

local M = {}

local ROWS = 30

local Model = nn.Module:extend "PipelineModel"
function Model:init(device, options)
  local function tables(class, names, features)
    local list = {}
    for i, name in ipairs(names) do
      list[i] = class { name = name, num_embeddings = ROWS, embedding_dim = 4, feature_names = { features[i] } }
    end
    return list
  end
  local fused = { optimizer = "rowwise_adagrad", learning_rate = 0.3 }
  self.bags = peri.EmbeddingBagCollection { tables = tables(peri.EmbeddingBagConfig, { "a", "b", "c" },
    { "f1", "f2", "f3" }), fused_params = fused }
  if not options.bags_only then
    self.rows = peri.EmbeddingCollection { tables = tables(peri.EmbeddingConfig, { "s" }, { "f3" }),
      fused_params = fused }
  end
  self.dense = nn.Linear { in_features = 3, out_features = 4, device = device }
  self.final = nn.Linear { in_features = 16, out_features = 1, device = device }
  self.loss = nn.BCEWithLogitsLoss { reduction = "global_mean" }
  self._cast = options.autocast and { device = device, dtype = options.autocast }
end
function Model:forward(batch)
  if self._cast then return peri.autocast(self._cast, self.compute, self, batch) end
  return self:compute(batch)
end
function Model:compute(batch)
  local pooled = self.bags(batch.sparse_features):values()
  local rows = self.rows and self.rows(batch.sparse_features)
  local dense = self.dense(batch.dense_features)
  local logits = self.final(nn.functional.cat({ dense, pooled }, 2)):reshape(-1)
  local loss = self.loss(logits, batch.labels)
  if rows then
    -- from where numbers are tiny: tables in files divide gradients before they are added up
    local far = rows.f3:values() + 0.5
    loss = loss + (far * far):sum() * 0.01
  end
  return loss, logits:detach(), batch.labels -- a field of the batch, as models return it for metrics
end

--- The model over a world: options: bags_only, two_d (a DMPCollection of sharding groups of this size), sync_interval,
--- autocast (the dtype of a region that its forward runs in), dense (table b is trained by the dense optimizer),
--- no_replica, files (all tables but the replica are in files, this share of their rows in memory).
function M.model(world, device, options)
  options = options or {}
  nn.manual_seed(7)
  local in_files = options.files
    and { compute_kernel = "fused_uvm_caching", cache_params = { load_factor = options.files } } or nil
  local kernel = options.dense and { compute_kernel = "dense" } or in_files
  local entries = {
    a = plan.table_wise(options.two_d and 0 or world:size() - 1, in_files), b = plan.row_wise(kernel),
    c = options.no_replica and plan.table_wise(0) or plan.data_parallel { compute_kernel = "fused" },
  }
  return peri[options.two_d and "DMPCollection" or "DistributedModelParallel"] {
    module = Model(device, options), device = device,
    group = not options.two_d and world or nil, global_pg = options.two_d and world or nil,
    sharding_group_size = options.two_d, sync_interval = options.sync_interval,
    plan = { bags = entries, rows = not options.bags_only and { s = plan.row_wise(in_files) } or nil },
  }
end

function M.optimizer(model) return nn.optim.Adam { params = model:dense_parameters(), lr = 0.05 } end

--- An iterator over `n` batches of a rank: other ids, lengths and numbers of rows in each. Every one is made anew.
function M.batches(rank, device, n)
  local k = 0
  return function()
    if k >= n then return nil end
    k = k + 1
    local rows = 1 + (k * 3 + rank) % 4
    local values, lengths, labels = {}, {}, {}
    for bag = 1, 3 * rows do
      lengths[bag] = (bag * k + rank) % 4
      for j = 1, lengths[bag] do values[#values + 1] = (bag * 7 + j * 3 + k * 5 + rank) % ROWS end
    end
    for i = 1, rows do labels[i] = (i + k + rank) % 2 end
    return {
      dense_features = peri.Tensor.normal({ rows, 3 }, 0, 1, k, rank, "f32", device),
      labels = peri.tensor(labels, "f32", device),
      sparse_features = peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3" }, values = values, lengths = lengths,
        stride = rows, device = device },
    }
  end
end

--- The loop that a pipeline stands for. Returns the losses.
function M.plain(model, optimizer, batches)
  local losses = {}
  for batch in batches do
    optimizer:zero_grad()
    local loss = model(batch)
    model:backward(loss)
    optimizer:step()
    losses[#losses + 1] = loss:item()
  end
  return losses
end

--- A schedule with an operation more that runs act(context), in each slot where that is legal: before each of its
--- operations, on the same batch, and last. Returns function(i): the i-th such schedule and its slot; nil: there are no
--- more.
function M.slots(schedule, act)
  local found = {}
  for slot = 1, #schedule.operations + 1 do
    local before = schedule.operations[slot]
    local edited = schedule:insert({ "trouble", ahead = before and before.ahead or 0, run = act },
      before and { before = before.name } or { last = true })
    if pcall(edited.check, edited) then found[#found + 1] = { edited, slot } end
  end
  return function(i)
    if found[i] then return found[i][1], found[i][2] end
  end
end

--- Everything that was learned, as bytes: name -> string. Of replicas that have learned apart, this rank's. Collective.
function M.learned(model)
  local out = {}
  if model.sync then model = model.module end
  -- any order: each is compared by itself
  for name, tensor in pairs(peri.shard.gather_state_dict(model:state_dict())) do
    local buffer = tensor:to(nil, "cpu"):contiguous():read()
    out[name] = ffi.string(buffer, ffi.sizeof(buffer))
  end
  return out
end

--- Two models have learned the same, bit for bit.
function M.assert_same(expected, model, what)
  local got = M.learned(model)
  for name, bytes in pairs(expected) do -- any order: the first that differs is enough
    if got[name] ~= bytes then error(("%s: '%s' differs from the plain loop's"):format(what, name), 0) end
  end
end

-- -- a model in stages ------------------------------------------------------------------------------------------------

local LAYERS, WIDTH = 6, 5

--- Layers [first, last] of the whole model; the last one's result is the loss.
local Part = nn.Module:extend "Part"
function Part:init(first, last, device)
  nn.manual_seed(11)
  self.first, self.last = first, last
  for i = 1, LAYERS do -- all are drawn, so that all parts begin with the same numbers
    local layer = nn.Linear { in_features = i == 1 and 3 or WIDTH, out_features = i == LAYERS and 1 or WIDTH,
      device = device }
    if i >= first and i <= last then self["layer" .. i] = layer end
  end
  self.loss = nn.BCEWithLogitsLoss { reduction = "mean" }
end
function Part:forward(batch, x)
  x = x or batch.dense_features
  for i = self.first, self.last do
    x = self["layer" .. i](x)
    if i < LAYERS then x = x:tanh() end
  end
  return self.last < LAYERS and x or self.loss(x:reshape(-1), batch.labels)
end
M.Part, M.LAYERS, M.WIDTH = Part, LAYERS, WIDTH

--- The Stage of this rank, where each is one.
function M.stage(world, device)
  return peri.pipeline.Stage { stages = world:size(), group = world, device = device,
    shape = function(batch) return { batch.dense_features:size(1), WIDTH } end }
end

--- The part of the model that is this stage.
function M.part(stage, device)
  return Part(math.floor(LAYERS * stage.index / stage.stages) + 1,
    math.floor(LAYERS * (stage.index + 1) / stage.stages), device)
end

--- Run a pipeline class over n batches. Returns the model, the losses, the pipeline.
function M.run_class(class, world, device, n, options, more)
  local model = M.model(world, device, options)
  local args = { model = model, optimizer = M.optimizer(model) }
  for key, value in pairs(more or {}) do args[key] = value end -- any order: named arguments
  local p = class(args)
  local losses = {}
  for loss in p:run(M.batches(world:rank(), device, n)) do losses[#losses + 1] = loss end
  return model, losses, p
end

--- The same by the plain loop: what was learned, and the losses.
function M.plain_run(world, device, n, options)
  local model = M.model(world, device, options)
  local losses = M.plain(model, M.optimizer(model), M.batches(world:rank(), device, n))
  return M.learned(model), losses
end

return M
