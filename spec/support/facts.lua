-- facts.lua: everything that a table of tensors says, as one text: two are alike if their texts are.
local peri = require "perilune"

local function facts(x)
  if peri.Tensor.is(x) then return table.concat(peri.util.map(x:reshape(-1):to_list(), function(n)
    return type(n) == "number" and ("%.17g"):format(n) or tostring(n)
  end), " ") end
  if type(x) ~= "table" then return tostring(x) end
  local parts = {}
  for key, value in peri.util.ordered(x) do parts[#parts + 1] = tostring(key) .. "=" .. facts(value) end
  return "{" .. table.concat(parts, ",\n") .. "}"
end

return facts
