-- command_line.lua: a parser of an example's command line on all ranks.
local argparse = require "argparse"
local peri = require "perilune"

--- A converter for numbers in [low, high], whole ones if asked; argparse shows what it says.
local function number(name, low, high, whole)
  return function(text)
    local x = tonumber(text)
    if x and x >= low and x <= high and (not whole or x == math.floor(x)) then return x end
    local most = high == 2 ^ 53 - 1 and "2^53 - 1" or ("%.14g"):format(high)
    local allowed = high == math.huge and ("%g or more"):format(low) or ("%g to %s"):format(low, most)
    return nil, ("%s is '%s', allowed: %s%s"):format(name, text, whole and "whole numbers, " or "", allowed)
  end
end

--- A parser, and its options by name. options: a list of { name, text, default, and for numbers the least, the most,
--- whether whole }; argparse shows defaults that are strings. Rank 0 alone speaks: the others wait for it, so that
--- nobody ends the run before it has spoken.
return function(name, text, options)
  local first = peri.rank() == 0
  local function leave(stream, words, code)
    if first then
      stream:write(words, "\n")
      stream:flush()
    end
    if peri.world_size() > 1 then peri.world():barrier():wait() end
    os.exit(code, true)
  end
  local parser, made = argparse(name, text):add_help(false), {}
  parser.error = function(self, message) leave(io.stderr, ("%s\n\nError: %s"):format(self:get_usage(), message), 2) end
  parser:flag("-h --help", "Show this text."):action(function() leave(io.stdout, parser:get_help(), 0) end)
  for _, o in ipairs(options) do
    local option, words, default, low, high, whole = unpack(o, 1, 6)
    made[option] = parser:option(option, words, default, low and number(option:match "%S+", low, high, whole) or nil)
  end
  return parser, made
end
