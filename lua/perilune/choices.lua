-- choices.lua: what processors differ about (perilune/tune.h), and the ways in use.
local P = require "perilune.ffi"
local ffi = require "ffi"
local C = P.C

local M = {}

local sources = { [0] = "default", "measured", "kept", "given" }

--- All choices: lists of { name, text, ways = { { word, ns } }, way, usual, source, measured, noise }; way and usual
--- are words.
function M.list()
  local list, c = {}, P.struct "peri_tune_info"
  for i = 0, C.peri_tune_count() - 1 do
    P.check(C.peri_tune_describe(i, c))
    local ways = {}
    for w = 0, C.PERI_TUNE_WAYS - 1 do
      if c.ways[w] ~= nil then ways[w + 1] = { word = ffi.string(c.ways[w]), ns = tonumber(c.ns[w]) } end
    end
    list[i + 1] = { name = ffi.string(c.name), text = ffi.string(c.text), ways = ways, way = ways[c.way + 1].word,
      usual = ways[c.usual + 1].word, source = sources[c.source], measured = c.measured, noise = c.noise }
  end
  return list
end

--- Name -> the way in use.
function M.ways()
  local ways = {}
  for _, c in ipairs(M.list()) do ways[c.name] = c.way end
  return ways
end

return M
