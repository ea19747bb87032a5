-- options.lua: the command line of the stream.
local peri = require "perilune"
local command_line = require "command_line"

local M = {}

local OPTIONS = {
  { "--data", "debian (this machine's package lists), synthetic:PACKAGES, or a file in the format of apt-cache "
    .. "dumpavail.", "debian" },
  { "--steps", "Training steps.", "600", 2, 2 ^ 31, true },
  { "--batch-size", "Samples of a step, of all ranks together.", "1024", 1, 2 ^ 31, true },
  { "--rows", "Rows of the table under managed collision; the other has as many more as the map takes memory.", "8192",
    64, 2 ^ 31, true },
  { "--dim", "Columns of the tables.", "32", 4, 4096, true },
  { "--life", "Steps from a package's first day to its last (default: a sixth of the stream).", nil, 1, 2 ^ 31, true },
  { "--interval", "Steps between evictions.", "1", 1, 2 ^ 31, true },
  { "--learning-rate --lr", "Learning rate of the tables.", "0.1", 0, math.huge },
  { "--dense-learning-rate --dense-lr", "Learning rate of the dense part.", "0.02", 0, math.huge },
  { "--points", "Steps between points of the curve (default: a thirtieth of the stream).", nil, 1, 2 ^ 31, true },
  { "--plan", "Lua or JSON file that says where the tables live.", "plans/row_wise.lua" },
  { "--seed", "Everything random depends on it.", "1", 0, 2 ^ 53 - 1, true },
  { "--out", "Folder for stream.svg.", "build/stream" },
}

--- Parse the words of the command line; `here`: the folder of the examples.
function M.parse(words, here)
  for _, o in ipairs(OPTIONS) do
    if o[1] == "--plan" then o[3] = here .. o[3] end
  end
  local options = command_line("examples/stream.lua",
    "Ids that no one has seen before arrive all the time: managed collision beside "
      .. "ids modulo rows, at equal memory.", OPTIONS):parse(words)
  local n = options.data:match "^synthetic:?(.*)$"
  if n and not (n:match "^%d+$" and tonumber(n) >= 1 and tonumber(n) <= 2 ^ 31) then
    peri.ffi.fail(("--data %s: allowed: synthetic:PACKAGES with 1 to 2147483648 packages"):format(options.data))
  end
  options.life = options.life or math.max(1, math.floor(options.steps / 6))
  options.points = options.points or math.max(1, math.floor(options.steps / 30))
  return options
end

return M
