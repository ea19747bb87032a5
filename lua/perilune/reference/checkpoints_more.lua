-- checkpoints_more.lua: Checkpoints: chains of increments, lists.
--
-- More of the checkpoints of the page `optimizers`. docs/checkpoints.md tells more.
---@meta

---@class peri.checkpoint
local checkpoint = {}

---The checkpoints that this one consists of: itself, what it is an increment of, and so on to a full one.
---
---```lua
---local model, folder = nn.Linear { in_features = 2, out_features = 1 }, os.tmpname() .. "-run"
---local saver = peri.checkpoint.Saver { parts = { model = model }, folder = folder, every = 1,
---  full_every = 2 }
---for step = 1, 2 do saver:step(step) end
---saver:close()
---local list = peri.checkpoint.Saver.list(folder)
---local opened = peri.checkpoint.open(list[1].path)
---print(#list, list[1].step, #opened:levels(), opened:stored("model/weight"):numel()) --> 2 2 2 2
---local whole = os.tmpname() .. "-whole"
---print(#opened:compact(whole), #peri.checkpoint.open(whole):levels()) --> 32 1
---opened:close()
---os.execute(("rm -r %s %s"):format(folder, whole))
---```
---@return string[] # Their folders.
function checkpoint.Checkpoint:levels() end

---Make a full checkpoint of an increment and all that it is an increment of. It stands for it: later increments go on
---from either.
---
---Errors: a path that is taken, unless it may be replaced; a disk that is full, with nothing left.
---@param path string The folder of the new one.
---@param replace? boolean Whether the path may be its own: this object reads nothing more then (default: false).
---@return string # The digest of the new one.
function checkpoint.Checkpoint:compact(path, replace) end

---A tensor as a source for `load_state_dict`, which reads only what it needs.
---
---Errors: a name that is not there.
---@param name string Such as `model/over.weight`.
---@param patch? function `function(shard)`: brings a shard up to date by itself, and returns true, or false: it is read (default: none).
---@return table # The source, of the tensor's shape `[...]`.
function checkpoint.Checkpoint:stored(name, patch) end

---The checkpoints that a Saver has made in a folder, the newest first. Local.
---
---Errors: a folder that cannot be read.
---@param folder string The folder.
---@return table[] # `{ name =, number =, step =, path = }` each.
function checkpoint.Saver.list(folder) end
