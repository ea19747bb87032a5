-- interval.lua: how often a run is saved, as people say it. The launcher asks here too, before a script has begun.
local P = require "perilune.ffi"

--- "500steps", "500 steps" or 500 -> nil, 500; "90s", "10m", "2h" -> seconds, nil.
return function(func, text)
  local number, unit = tostring(text):match "^%s*([%d.]+)%s*(%a*)%s*$"
  local n = tonumber(number)
  local seconds = ({ s = 1, m = 60, h = 3600 })[unit]
  if n and n > 0 and seconds then return n * seconds, nil end
  if n and n >= 1 and n == math.floor(n) and (unit == "" or unit == "steps" or unit == "step") then return nil, n end
  P.fail(("%s: every is '%s', allowed: a number of steps (1000, 1000steps) or a time (90s, 10m, 2h)"):format(func,
    tostring(text)))
end
