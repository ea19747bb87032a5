-- step_counts.lua: what a training step of the demonstration asks of a device, as the pretended GPU counts it:
--   perilune run -n N spec/support/step_counts.lua FOLDER-OF-THE-PRETENDED-GPU [plain]
-- Rank 0 prints a line "name count" for each kind of call: the mean of four steps in the middle of training, none of
-- which reads a loss; and "read_waited", "read_blocked", "read_awaited": the same of four steps after which the script
-- reads the loss. plain: of the model as it is, not sharded, on a device that has run a step when the next one begins.
-- "graphed_launches" and others, of fewer than four ranks: of one step with nn.graphed for what is dense.
package.path = "examples/?.lua;" .. package.path
local ffi = require "ffi"
local peri = require "perilune"
local settings = require "dlrm.options"
local sources = require "dlrm.sources"

ffi.cdef "int peri_cuda_host_counts(int64_t *out, int most); void peri_cuda_host_catch_up(void);"
local NAMES = { "launches", "products", "exchanges", "copies_on_device", "copies_up_pageable", "copies_up_pinned",
  "copies_down", "records", "stream_waits", "events_made", "allocations", "frees", "pinned_made", "blocked", "awaited",
  "asked", "waited", "graphs", "last" }
local WARM, STEPS = 4, 4
local plain = arg[2] == "plain"

peri.init()
local options = settings.parse({ "--data", "synthetic:1000", "--batch-size", "16", "--dim", "4", "--rows", "100",
  "--device", "cuda_host" }, "examples/")
local data = sources.open(options, function() end)
settings.fit(options, data.samples)
peri.ffi.state.seed, peri.ffi.state.device = options.seed, options.device
local module = dofile(options.model) { tables = data.tables, dense_features = data.dense_features,
  embedding_dim = options.dim }
local model = plain and module or peri.DistributedModelParallel { module = module, device = options.device }
local optimizer = peri.nn.optim.Adagrad { params = plain and model:parameters() or model:dense_parameters(), lr = 0.01 }
local pipeline = plain and peri.TrainPipelineBase { model = model, optimizer = optimizer, device = options.device }
  or peri.TrainPipelineSparseDist { model = model, optimizer = optimizer }
local batches = data.loader { part = data.training_part, batch_size = options.batch_size, epochs = math.huge,
  drop_last = true }
local gpu = ffi.load(arg[1] .. "/libperilune_cuda_host.so")

local function counts()
  local numbers = ffi.new("int64_t[?]", #NAMES)
  assert(gpu.peri_cuda_host_counts(numbers, #NAMES) == #NAMES, "the pretended GPU counts other things than this script")
  return numbers
end

local function steps(n, read)
  for _ = 1, n do
    if plain then gpu.peri_cuda_host_catch_up() end
    local loss, logits, labels = pipeline:progress(batches)
    if read then loss:item() end
    loss:release()
    logits:release()
    labels:release()
  end
end

--- The mean of each count over n steps (default: four).
local function measure(read, n)
  local before, mean = counts(), {}
  n = n or STEPS
  steps(n, read)
  local after = counts()
  for i, name in ipairs(NAMES) do mean[name] = tonumber(after[i - 1] - before[i - 1]) / n end
  return mean
end

steps(WARM)
local silent, read = measure(false), measure(true)
local graphed
if peri.world_size() < 4 then -- few ranks, few steps: what is captured is the same in each
  for _, part in ipairs { "dense_arch", "inter_arch", "over_arch" } do peri.nn.graphed(module.model[part]) end
  steps(2)
  graphed = measure(false, 1)
end
if peri.rank() == 0 then
  for _, name in ipairs(NAMES) do print(("%s %g"):format(name, silent[name])) end
  for _, name in ipairs { "waited", "blocked", "awaited" } do print(("read_%s %g"):format(name, read[name])) end
  for _, name in ipairs { "launches", "products", "graphs", "copies_on_device", "waited", "blocked", "awaited" } do
    if graphed then print(("graphed_%s %g"):format(name, graphed[name])) end
  end
end
pipeline:close()
peri.finish()
