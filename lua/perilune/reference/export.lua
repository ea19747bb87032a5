-- export.lua: Model files.
--
-- A trained model as one file that answers, also without Lua: what it is, what can be exported, and what is promised,
-- is in [model_file.md](../model_file.md); the C side is [perilune/model.h](c_model.md).
---@meta

---@class peri.export
local export = {}

---@class peri.nn
local nn = {}

---A trained model as a file that answers. It runs twice on a part of the first batch, which is recorded; then the
---file's answers for all batches are compared with the model's, and the file gets its name. Collective if the model's
---tables are spread over ranks: rank 0 writes.
---
---Errors: what depends on the numbers of a batch, what goes across samples, and what has no form for inference, with
---the line that called it; answers that differ by more than is allowed.
---
---```lua
---local Model = peri.nn.Module:extend "Model"
---function Model:init() self.linear = peri.nn.Linear { in_features = 3, out_features = 1 } end
---function Model:forward(batch) return self.linear(batch.x):sigmoid() end
---local path, held_out = os.tmpname(), { x = peri.Tensor.uniform({ 20, 3 }, -1, 1, 7) }
---local report = peri.export.save(Model(), path, { batches = { held_out }, probabilities = true })
---print(report) --> 0 of 20 numbers for 20 samples differ, by up to 0
---local file = peri.export.open(path, { verify = true })
---print(table.concat(file:predict(held_out).logits:shape(), " ")) --> 20 1
---os.remove(path)
---```
---@param model peri.nn.Module The model, sharded or not.
---@param path string Where the file will be.
---@param options? table Named options, of which [model_file.md](../model_file.md) has a table; `batches` is required (default: none).
---@return table # On rank 0: `{ samples =, numbers =, differ =, difference =, model = { auc =, ne = }, file = likewise, judged =, unjudged = }`, the last two by outputs.
function export.save(model, path, options) end

---Open a model file. What it has are `describe()`, `inputs()`, `outputs()`, `tables()`, `verify()`, `check_unchanged()`
---and `predict(batch)`: a table of tensors by the names of the outputs. Of an output that is a list of each sample the
---tensor has all members, and `NAME.lengths` how many each sample has. A name of the batch (or a key of its features)
---that the model has no input for is an error, but for the labels and the counts of a loader's batch.
---
---Errors: no such file; one that is no model file, is damaged, or is not whole; one of a later version.
---@param path string The file.
---@param options? table `verify = true`: compare all checksums; `copy = true`: read it into memory; `guard = true`: the process survives that the file is cut while a call reads it, by a handler for SIGBUS (default: none).
---@return any # The file, open (a `peri_model` of C).
function export.open(path, options) end

---Open a model file for following the checkpoints that a trainer saves into a folder, increments too. What it returns
---has `poll()`, `model()`, `path()` and `release()`. A poll takes the newest checkpoint and returns the model that has
---it, which is like one of `peri.export.open` and never changes; nil: nothing newer is there, or the model before the
---last one was not released yet; nil and a text: what is there cannot be had, and why. What is damaged, or does not fit
---the model, is passed over.
---
---Errors: those of `peri.export.open`; a file that does not say which parameters it was made of.
---
---```lua
---local path, folder = os.tmpname(), os.tmpname() .. ".d"
---local model = peri.nn.Sequential { peri.nn.Linear { in_features = 3, out_features = 1 } }
---local x = peri.ones { 11, 3 }
---model:export(path, { batches = { { x = x } }, call = function(m, batch) return m(batch.x) end })
---peri.checkpoint.save(folder .. "/save-000001-step-50", { model = model })
---local follower = peri.export.follow(path, folder)
---print(follower:poll():describe().step) --> 50
---os.remove(path)
---os.execute("rm -r " .. folder)
---```
---@param path string The model file.
---@param folder string Of checkpoints, such as a Saver's; it may be missing yet.
---@param options? table `saved`: what the model is called in the checkpoints (default: "model"); `verify` and `guard` as for `open`.
---@return table # The follower.
function export.follow(path, folder, options) end

---Call a function with products of f32 whose sums have one order, as model files have them: the model then gives the
---bits of its file, whatever the size of the batch.
---
---Errors: those of the function.
---
---```lua
---local x, w = peri.Tensor.uniform({ 50, 9 }, -1, 1, 1), peri.Tensor.uniform({ 4, 9 }, -1, 1, 2)
---peri.export.ordered(function()
---  local whole, one = peri.nn.functional.linear(x, w),
---  peri.nn.functional.linear(x:slice(1, 7, 8), w)
---  print(whole:slice(1, 7, 8):item(0) == one:item(0)) --> true
---end)
---```
---@param call function The function.
---@param ... any Its arguments.
---@return any # What it returned.
function export.ordered(call, ...) end

---The same as `peri.export.save(model, path, options)`.
---
---Errors: those of `peri.export.save`.
---
---```lua
---local model, path = peri.nn.Sequential { peri.nn.Linear { in_features = 3, out_features = 2 } },
---  os.tmpname()
---local report = model:export(path, { batches = { { x = peri.ones { 11, 3 } } },
---  call = function(m, batch)
---  return m(batch.x)
---end })
---print(report.differ) --> 0
---os.remove(path)
---```
---@param path string Where the file will be.
---@param options? table As there (default: none).
---@return table # What `peri.export.save` returns.
function nn.Module:export(path, options) end
