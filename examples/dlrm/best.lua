-- best.lua: the weights at the lowest validation loss, kept as a checkpoint: FOLDER/best-STEP. A run may go on from any
-- checkpoint that is in the folder, so those that one of them knows stay too.
local peri = require "perilune"
local names = require "perilune.checkpoint.names"

local Best = peri.util.class "Best"

--- model: a DistributedModelParallel; folder: where the weights are kept.
function Best:init(model, folder)
  -- names: of the best; of that which the last save of this run knows
  self.folder, self.name, self.saved = folder, false, false
  self.parts = { model = { -- the weights alone, without the states of the tables' optimizers
    state_dict = function() return model:state_dict() end,
    check_state_dict = function(_, dict) return model:check_state_dict(dict) end,
    load_state_dict = function(_, dict) model:load_state_dict(dict) end,
  } }
end

--- The best weights that a checkpoint of the folder knows; nil: none, or it cannot be read.
local function known_by(path)
  local ok, name = pcall(function()
    local c = peri.checkpoint.open(path)
    local values = c:values().values
    c:close()
    return values.user.lowest.kept
  end)
  return ok and name or nil
end

--- The names that checkpoints of the folder know, as a set.
local function known(self)
  local set = {}
  local there, list = pcall(peri.checkpoint.Saver.list, self.folder)
  for _, entry in ipairs(there and list or {}) do -- the first save makes the folder
    local name = known_by(entry.path)
    if name then set[name] = true end
  end
  return set
end

--- Remove what nothing can go on with.
local function sweep(self)
  if peri.rank() > 0 then return end
  local kept = known(self)
  for _, name in ipairs(names.all(self.folder)) do
    if name:match "^best%-" and not kept[name] and name ~= self.name and name ~= self.saved then
      peri.checkpoint.remove(self.folder .. "/" .. name)
    end
  end
end

--- Remember the weights as they are now, after `step` steps; returns their name. Collective.
function Best:keep(step)
  local name = ("best-%d"):format(step)
  if peri.rank() == 0 then
    local taken, number = known(self), 1 -- by a checkpoint of another run, or of another future of this one
    while taken[name] do
      number = number + 1
      name = ("best-%d-%d"):format(step, number)
    end
  end
  if peri.world_size() > 1 then name = peri.world():all_gather_object(name, "Best:keep")[1] end
  peri.checkpoint.save(self.folder .. "/" .. name, self.parts, { replace = true })
  self.name = name
  sweep(self)
  return name
end

--- A checkpoint of the run was saved, which knows the weights that are remembered now.
function Best:was_saved()
  self.saved = self.name
  sweep(self)
end

--- The run goes on from a checkpoint that knew the best weights by this name (nil: none yet).
function Best:resume(name) self.name, self.saved = name or false, name or false end

--- Give the model the remembered weights. Collective.
function Best:restore() peri.checkpoint.load(self.folder .. "/" .. self.name, self.parts) end

--- The run is over; what its last checkpoint knows stays.
function Best:close()
  local name = self.name
  self.name = self.saved
  if name then sweep(self) end
end

return Best
