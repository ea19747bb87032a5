-- choices.lua: the first part of `perilune calibrate`: measure what processors differ about (perilune/tune.h), show it,
-- and keep it for the next runs.
local P = require "perilune.ffi"
local ffi = require "ffi"
local choices = require "perilune.choices"
local C = P.C

local M = {}

--- The file in which choices are kept; "" if there is none.
function M.path() return ffi.string(C.peri_tune_path()) end

--- Lines for `perilune info`: each choice, the way in use, and where it comes from.
function M.lines()
  local lines = {}
  for i, c in ipairs(choices.list()) do
    local note = c.way ~= c.usual and ("%s; default %s"):format(c.source, c.usual) or c.source
    lines[i] = ("  %-16s %-10s %s"):format(c.name, c.way, note)
  end
  lines[#lines + 1] = ("  %-16s %s"):format("kept in", M.path() ~= "" and M.path() or "no file")
  return lines
end

--- A line of a choice with its times: "lookup_order     lines      scattered 912, *lines 844".
local function times(c)
  local words = {}
  for i, w in ipairs(c.ways) do
    words[i] = ("%s%s%s"):format(w.word == c.way and "*" or "", w.word, w.ns > 0 and (" %.0f"):format(w.ns / 1000)
      or "")
  end
  local noise = c.noise > 0 and (" (+-%.0f %%)"):format(100 * c.noise) or ""
  return ("%-16s %-10s %s%s"):format(c.name, c.way, table.concat(words, ", "), noise)
end

--- The bar over n of all steps.
local function bar(n, all, name)
  local width = 24
  local full = math.floor(width * n / all)
  return ("[%s%s] %d/%d %s"):format(("#"):rep(full), ("."):rep(width - full), n, all, name)
end

local BESIDE, NOISY = 0.3, 0.25 -- processors of others, and noise, of which is told

--- What disturbed a measurement: others: processors that other programs had; list: the choices. Lines, or none.
function M.disturbed(others, list)
  local worst, lines = { noise = 0 }, {}
  for _, c in ipairs(list) do
    if c.noise > worst.noise then worst = c end
  end
  if others > BESIDE then
    lines[1] = ("other programs had %.1f processors meanwhile; measure again when they have ended"):format(others)
  end
  if worst.noise > NOISY then
    lines[#lines + 1] = ("passes of one way differed by up to %.0f %% (%s): where that was more than %.0f %%, the "
      .. "default is in use, and nothing new is kept"):format(
      100 * worst.noise, worst.name, 100 * NOISY)
  end
  return lines
end

--- Measure everything that can be measured, `rounds` times in turns, write the file, print a table to `stream`.
--- others_of(f): runs f, and returns how many processors other programs had meanwhile (calibration/beside.lua). Returns
--- an exit code.
function M.run(rounds, others_of, stream)
  stream = stream or io.stdout
  local live = os.execute "test -t 1" == 0
  local list, refused = choices.list(), {}
  local others = others_of(function()
    for i, c in ipairs(list) do
      if live then stream:write("\r", bar(i - 1, #list, c.name), "\27[K") end
      stream:flush()
      if c.measured and C.peri_tune_measure(c.name, rounds) < 0 then
        refused[#refused + 1] = ffi.string(C.peri_error_message())
      end
    end
  end)
  if live then stream:write "\r\27[K" end
  stream:write("choice           in use     ways, microseconds of a pass (* in use)\n")
  for _, c in ipairs(choices.list()) do
    stream:write(times(c), c.source == "given" and "   given by PERI_TUNE" or not c.measured and "   not measured"
      or "", "\n")
  end
  for _, text in ipairs(refused) do stream:write(text, "\n") end
  for _, text in ipairs(M.disturbed(others, choices.list())) do stream:write(text, "\n") end
  if M.path() == "" then stream:write("not kept: there is no file (PERI_TUNE=off, or no home)\n")
  elseif C.peri_tune_save() >= 0 then stream:write("kept in ", M.path(), "\n")
  else stream:write("not kept: ", ffi.string(C.peri_error_message()), "\n") end
  return 0
end

return M
