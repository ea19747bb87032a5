-- tensor/state_dict.lua: what state_dict() of modules, optimizers and schedules returns: a table that says whether it
-- is live or a copy.
--
--   -- live tensors (of tables over ranks, ShardedTensors), as in PyTorch: the next step changes them
--   local live = model:state_dict()
--   live:is_live()                    -- true
--   local best = live:clone()         -- a copy of this rank's part, as it is now; local
--   local whole = live:gather()       -- a copy with whole tensors instead of ShardedTensors; collective
--   model:load_state_dict(best)
--
-- Several of them, in a plain table, are cloned and gathered together: gather_state_dict { model = model:state_dict(),
-- dense = optimizer:state_dict() }. Numbers and texts in them are copies from the start.
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local P = require "perilune.ffi"
local ShardedTensor = require("perilune.tensor.sharded").ShardedTensor
local row_format = require "perilune.tensor.row_format"
local signature = require "perilune.signature"

local M = {}

-- Methods are reached where the dict itself has no entry of their name: a parameter that is named "clone" comes first.
local Live, Copied = {}, {}

--- Mark a new dict as live. Returns it.
function M.live(dict) return setmetatable(dict, Live) end

local function is_dict(x)
  local class = type(x) == "table" and getmetatable(x)
  return class == Live or class == Copied or type(x) == "table" and class == nil
end

--- True for what state_dict() returns, its copies, and plain tables.
M.is_dict = is_dict

local function copy_tensor(t)
  return row_format.note(Tensor.empty(t:shape(), t:dtype(), t:device()):copy(t:detach()), row_format.noted_format(t))
end
local function cloned(t) return t:clone() end
local function gathered(t) return t:gather() end

local DEEPEST = 100 -- dicts within dicts; more is one inside itself

--- A copy of a dict and the dicts in it; of_sharded(ShardedTensor) is what stands for one there.
local function copied(dict, of_sharded, depth)
  if depth > DEEPEST then P.fail "state_dict: a table of dicts that holds itself, or is nested deeper than 100" end
  local result = setmetatable({}, getmetatable(dict) and Copied)
  for name, value in util.ordered(dict) do
    if ShardedTensor.is(value) then rawset(result, name, of_sharded(value))
    elseif Tensor.is(value) then rawset(result, name, copy_tensor(value))
    elseif is_dict(value) then rawset(result, name, copied(value, of_sharded, depth + 1))
    else rawset(result, name, value) end
  end
  return result
end

--- A copy of a state_dict, or of a table of several: what it holds is of this moment, whatever is trained later.
--- ShardedTensors stay such, with copies of this rank's pieces. Local.
function M.clone_state_dict(dict) return P.lasting(copied, dict, cloned, 1) end

--- The same with whole tensors in place of ShardedTensors. Collective: every rank has the same names.
function M.gather_state_dict(dict) return P.lasting(copied, dict, gathered, 1) end

for class, live in pairs { [Live] = true, [Copied] = false } do -- any order
  class.__index = { clone = M.clone_state_dict, gather = M.gather_state_dict, is_live = function() return live end }
  class.__tostring = function(dict)
    local n = 0
    for _ in next, dict do n = n + 1 end
    return ("state_dict, %s, of %s"):format(live and "live" or "a copy",
      util.number_of(n, "entry"):gsub("entrys", "entries"))
  end
end

signature.check("", M, { clone_state_dict = "dict: table", gather_state_dict = "dict: table" })

return M
