-- names.lua: which checkpoints a folder has. The launcher asks here too.
local ffi = require "ffi"
local P = require "perilune.ffi"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local M = {}
local out = ffi.new "char *[1]"

--- The names of all checkpoints in a folder, sorted. Local.
function M.all(folder)
  check(C.peri_checkpoint_names(folder, out))
  local list, text = {}, ffi.string(out[0])
  C.peri_checkpoint_names_release(out[0])
  for name in text:gmatch "[^\n]+" do list[#list + 1] = name end
  return list
end

--- Those that a Saver has made, newest first: a list of { name =, number =, step =, path = }. Local.
function M.list(folder)
  local list = {}
  for _, name in ipairs(M.all(folder)) do
    local number, step = name:match "^save%-(%d+)%-step%-(%d+)$"
    if number then
      list[#list + 1] = { name = name, number = tonumber(number), step = tonumber(step), path = folder .. "/" .. name }
    end
  end
  table.sort(list, function(x, y) return x.number > y.number end)
  return list
end

signature.check("Saver.", M, { list = "folder: string" })

return M
