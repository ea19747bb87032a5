-- best.lua: the weights at the lowest validation loss, kept as a checkpoint: FOLDER/best-STEP. A run that is resumed needs the one that its
-- checkpoint knew, so that one stays until the next checkpoint is saved, also when a better one has come.
local peri = require "perilune"

local Best = peri.util.class "Best"

--- model: a DistributedModelParallel; folder: where the weights are kept.
function Best:init(model, folder)
  self.folder, self.step, self.saved = folder, false, false
  self.parts = { model = { -- the weights alone, without the states of the tables' optimizers
    state_dict = function() return model:state_dict() end,
    check_state_dict = function(_, dict) return model:check_state_dict(dict) end,
    load_state_dict = function(_, dict) model:load_state_dict(dict) end,
  } }
end

local function path_of(self, step) return ("%s/best-%d"):format(self.folder, step) end

local function remove(self, step)
  if step and peri.rank() == 0 then peri.checkpoint.remove(path_of(self, step)) end
end

--- Remember the weights as they are now, after `step` steps. Collective.
function Best:keep(step)
  peri.checkpoint.save(path_of(self, step), self.parts, { replace = true })
  if self.step ~= self.saved and self.step ~= step then remove(self, self.step) end
  self.step = step
end

--- A checkpoint of the run was saved, which knows the weights that are remembered now.
function Best:was_saved()
  if self.saved ~= self.step then remove(self, self.saved) end
  self.saved = self.step
end

--- The run goes on from a checkpoint that knew the best weights to be those of `step` (nil: none yet).
function Best:resume(step) self.step, self.saved = step or false, step or false end

--- Give the model the remembered weights. Collective.
function Best:restore() peri.checkpoint.load(path_of(self, self.step), self.parts) end

--- The run is over; what its last checkpoint knows stays.
function Best:close()
  if self.step ~= self.saved then remove(self, self.step) end
  self.step = self.saved
end

return Best
