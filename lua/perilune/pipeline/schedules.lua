-- schedules.lua: the schedules of the library by name. Those that take a number are functions, as are their files.
local P = require "perilune.ffi"
local util = require "perilune.util"
local errors = require "perilune.errors"
local signature = require "perilune.signature"

local modules = {}
local names = { "base", "sparse_dist", "sparse_dist_lite", "fused_sparse_dist", "semi_sync", "prefetch_sparse_dist",
  "eval_sparse_dist", "eval_fused_sparse_dist", "accumulate", "prefetch_fused_2d", "one_f_one_b", "wire_first" }
for _, name in ipairs(names) do modules[name] = "perilune.pipeline.schedules." .. name end

local M = { names = names }

--- A schedule by a name of the library's, or by the path of a file that returns it (or a function that does).
function M.load(path)
  local value
  if modules[path] then value = require(modules[path])
  else
    local chunk, err = loadfile(path)
    if not chunk then
      local meant = util.nearest(path, { modules })
      P.fail(("schedule: %s; %sor a name of the library: %s"):format(err, meant and ("is '%s' meant? "):format(meant)
        or "", table.concat(names, ", ")))
    end
    value = chunk()
  end
  if type(value) == "function" then value = value() end
  if not require("perilune.pipeline.schedule").is(value) then
    P.fail(("schedule: '%s' returns %s, wanted a Schedule"):format(path, errors.kind(value)))
  end
  return value
end

signature.check("pipeline.schedules.", M, { load = "path: string" })

return util.face("peri.pipeline.schedules", M, modules)
