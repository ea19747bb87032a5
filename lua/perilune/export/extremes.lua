-- export/extremes.lua: the largest and the smallest along dimensions, as operations of a model file: of two at a time.
local util = require "perilune.util"

local product = util.product

--- function name -> f(lowering), as in operations.lua.
local M = {}

--- The largest or smallest along dimension d, the first of equal ones (0 and -0): each element with an odd place beside
--- the one in front of it, until there is one.
local function extreme_along(l, name, x, d)
  local shape = x.shape
  while shape[d] > 1 do
    local half, rest, whole = util.copy(shape), util.copy(shape), util.copy(shape)
    half[d], rest[d], whole[d] = math.floor(shape[d] / 2), shape[d] % 2, math.ceil(shape[d] / 2)
    local later, earlier = l:slice(x, d, 1, 2, half), l:slice(x, d, 0, 2, half)
    local best = l:op("binary", half, { ["function"] = name, inputs = { later.index, earlier.index },
      sizes = { 1, product(half), 1, 1 } })
    if rest[d] == 1 then -- the last one has nobody beside it
      local last = l:slice(x, d, shape[d] - 1, 1, rest)
      best = l:op("cat", whole, { inputs = { best.index, last.index },
        sizes = { product(shape, 1, d - 1), product(shape, d + 1), half[d], 1 } })
    end
    x, shape = best, whole
  end
  return x
end

local function extreme(l, name)
  local a = l:arguments()
  local x, dims = l:sample(a[1], "the tensor"), {}
  if not a[2] then l:fail "of all numbers it goes across samples: an answer would depend on others of its batch" end
  for _, d in ipairs(type(a[2]) == "table" and a[2] or { a[2] }) do
    dims[#dims + 1] = l:dim(tonumber(d), #x.shape, l.entry.func, x.axis)
  end
  table.sort(dims, function(p, q) return p > q end)
  for _, d in ipairs(dims) do x = extreme_along(l, name, x, d) end
  l:set({ index = x.index, shape = l:result_shape(), list = x.list, axis = l.axis })
end
function M.amax(l) extreme(l, "maximum") end
function M.amin(l) extreme(l, "minimum") end

return M
