-- checkpoint: what is learned outlives the process: folders of safetensors files with a manifest (docs/checkpoints.md).
--
--   peri.checkpoint.save("model-1000", { model = model, optimizer = optimizer, schedule = schedule },
--     { values = { step = 1000 } })
--   local values = peri.checkpoint.load("model-1000", { model = model, optimizer = optimizer, schedule = schedule })
local P = require "perilune.ffi"
local util = require "perilune.util"
local Checkpoint = require "perilune.checkpoint.reader"
local signature = require "perilune.signature"

local M = { Checkpoint = Checkpoint }

--- Open a checkpoint to look into it, an increment with all that it is an increment of; or a list of paths, a full
--- checkpoint and its increments in their order: see checkpoint/reader.lua. Local.
function M.open(path) return Checkpoint(path) end

--- Save the state of some objects as the checkpoint `path`: parts: name -> an object with state_dict and
--- load_state_dict (a model, an optimizer, a schedule, ...); the optimizers of a model's fused tables go with the
--- model. options: values =, replace =, group =, file_bytes =, increment_of =, increments =, async =, see
--- checkpoint/save.lua. Returns the checkpoint's digest. Collective; blocks until it is on the disk, or with async =
--- true returns a handle at once (checkpoint/async.lua).
function M.save(path, parts, options)
  return P.sparing(require("perilune.checkpoint.save").save, path, parts, options)
end

--- Load the checkpoint `path` into such objects, which may have other plans and be on other numbers of ranks.
--- Everything that was saved must have its place and everything here must have been saved; options: only =, except =,
--- rename =, group = take a part on purpose, see checkpoint/load.lua. Returns `values` as saved. Collective.
function M.load(path, parts, options)
  return P.sparing(require("perilune.checkpoint.load").load, path, parts, options)
end

--- Follow a run that saves into `folder`, in another process or in this one: its checkpoints, increments among them,
--- come into the objects `parts` when poll() is called; see checkpoint/follow.lua. options: only =, except =, rename =,
--- group =, as for load. Local; its methods are collective.
function M.follow(folder, parts, options) return require "perilune.checkpoint.follow"(folder, parts, options) end

--- Remove the checkpoint `path`: its files, and nothing that is not of it. Local: one rank does it.
function M.remove(path) P.check(P.C.peri_checkpoint_remove(path)) end

signature.kind("checkpoint_path", "a path, or a list of paths", function(x)
  if type(x) ~= "table" then return type(x) == "string" end
  for _, path in ipairs(x) do
    if type(path) ~= "string" then return false end
  end
  return #x > 0
end)
signature.check("checkpoint.", M, { remove = "path: string", open = "path: checkpoint_path",
  follow = "folder: string, parts: table, options: table?",
  save = "path: string, parts: table, options: table?", load = "path: string, parts: table, options: table?" })

return util.face("peri.checkpoint", M, { Saver = "perilune.checkpoint.saver", Follower = "perilune.checkpoint.follow" })
