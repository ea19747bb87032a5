-- drawing.lua: what fuzzers of whole models share: whole numbers by a seed alone, and a folder and files for what they
-- keep.
local ffi = require "ffi"
local util = require "perilune.util"

local M = {}

--- A function of n that gives whole numbers below n, by `seed` alone.
function M.generator(seed)
  local x = seed * 48271 % 2147483647 + 1
  for _ = 1, 4 do x = x * 16807 % 2147483647 end
  return function(n)
    x = x * 16807 % 2147483647
    return math.floor(x / 2147483647 * n)
  end
end

--- One of a list. draw: of `generator`.
function M.pick(draw, list) return list[draw(#list) + 1] end

--- The bits of tensors by name, as a text.
function M.bits(tensors)
  local parts = {}
  for name, t in util.ordered(tensors) do
    local buffer, n = t:to("f32", "cpu"):contiguous():read()
    parts[#parts + 1] = name .. ffi.string(buffer, 4 * n)
  end
  return table.concat(parts)
end

--- What a file has; nil: there is none.
function M.read(path)
  local file = io.open(path)
  local text = file and file:read "*a"
  if file then file:close() end
  return text
end

--- Write a file that nobody sees before it is whole.
function M.write(path, text)
  local file = assert(io.open(path .. ".new", "w"))
  file:write(text)
  file:close()
  os.rename(path .. ".new", path)
end

--- A path of a folder that does not exist yet: in memory if possible, since a disk syncs slowly.
function M.folder(name)
  local memory, path = io.open("/dev/shm/.", "r"), os.tmpname()
  os.remove(path)
  if memory then memory:close() end
  return ("%s/peri-%s-%s"):format(memory and "/dev/shm" or "/tmp", name, path:match "[^/]*$")
end

return M
