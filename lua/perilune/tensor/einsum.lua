-- einsum.lua: sums of products by names of dimensions: einsum("bij,bjk->bik", a, b).
--
-- Operands are joined from left to right. Of two, dimensions that both have and that are wanted later are batches of
-- one matrix product; those that both have and nobody wants are summed by it; the others are its rows and columns.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor.core"
local ops = require "perilune.tensor.ops"
local signature = require "perilune.signature"

local function fail(equation, message, ...) P.fail(("einsum '%s': " .. message):format(equation, ...)) end

--- The letters of one operand as a list; `...` becomes "1", "2", ... for the dimensions that it stands for, counted
--- from the last one.
local function letters(equation, text, dims)
  local list, before, after = {}, text, nil
  local at = text:find("...", 1, true)
  if at then before, after = text:sub(1, at - 1), text:sub(at + 3) end
  for c in before:gmatch "." do list[#list + 1] = c end
  if at then
    for k = dims - #before - #after, 1, -1 do list[#list + 1] = tostring(k) end
    for c in after:gmatch "." do list[#list + 1] = c end
  end
  for _, c in ipairs(list) do
    if not c:match "^[%a%d]$" then fail(equation, "'%s' names a dimension, allowed: letters and '...'", c) end
  end
  return list
end

local function set_of(list)
  local set = {}
  for _, c in ipairs(list) do set[c] = true end
  return set
end

--- The operands' letters and those of the result.
local function parse(equation, tensors)
  local text = equation:gsub("%s", "")
  local left, right = text:match "^(.-)%->(.*)$"
  local terms, inputs = {}, {}
  for term in ((left or text) .. ","):gmatch "(.-)," do terms[#terms + 1] = term end
  if #terms ~= #tensors then fail(equation, "%d operands, given %d tensors", #terms, #tensors) end
  local times, widest = {}, 0
  for i, term in ipairs(terms) do
    inputs[i] = letters(equation, term, tensors[i]:dim())
    if #inputs[i] ~= tensors[i]:dim() then fail(equation, "'%s' names %s", term, Tensor._text(tensors[i])) end
    local seen = {}
    for _, c in ipairs(inputs[i]) do
      if seen[c] then fail(equation, "'%s' has '%s' twice; a diagonal is not supported", term, c) end
      seen[c], times[c] = true, (times[c] or 0) + 1
      if tonumber(c) then widest = math.max(widest, tonumber(c)) end
    end
  end
  if right then
    local dots = right:find("...", 1, true) and #right - 3 + widest or #right
    return inputs, letters(equation, right, dots)
  end
  local result, once = {}, {}
  for k = widest, 1, -1 do result[#result + 1] = tostring(k) end
  for c, n in pairs(times) do -- sorted below
    if n == 1 and not tonumber(c) then once[#once + 1] = c end
  end
  table.sort(once)
  for _, c in ipairs(once) do result[#result + 1] = c end
  return inputs, result
end

--- Every letter has one size; those of the result are of some operand.
local function check_sizes(equation, tensors, inputs, result)
  local size, seen = {}, {}
  for i, list in ipairs(inputs) do
    for d, c in ipairs(list) do
      local n = tensors[i]:size(d)
      if size[c] and size[c] ~= n then fail(equation, "'%s' has the sizes %d and %d", c, size[c], n) end
      size[c] = n
    end
  end
  for _, c in ipairs(result) do
    if not size[c] then fail(equation, "'%s' of the result is in no operand", c) end
    if seen[c] then fail(equation, "the result has '%s' twice", c) end
    seen[c] = true
  end
  return size
end

--- t, of dimensions `list`, without those that are not in `wanted`, which are summed.
local function reduced(t, list, wanted)
  local kept, gone = {}, {}
  for d, c in ipairs(list) do
    if wanted[c] then kept[#kept + 1] = c else gone[#gone + 1] = d end
  end
  return #gone > 0 and ops.sum(t, gone) or t, kept
end

--- t as a tensor [product of sizes of each group], one dimension for each of the groups of letters.
local function grouped(t, list, groups, size)
  local place, order, shape = {}, {}, {}
  for d, c in ipairs(list) do place[c] = d end
  for g, group in ipairs(groups) do
    shape[g] = 1
    for _, c in ipairs(group) do
      order[#order + 1] = place[c]
      shape[g] = shape[g] * size[c]
    end
  end
  return (#order > 1 and ops.permute(t, order) or t):reshape(shape)
end

--- The product of a and b element by element: the dimensions of a, and behind them those that only b has (`columns`).
local function spread(a, in_a, b, in_b, columns, size)
  local list, place, order = {}, {}, {}
  local shape_a, shape_b = {}, {}
  for d, c in ipairs(in_b) do place[c] = d end
  for _, c in ipairs(in_a) do
    list[#list + 1], order[#order + 1] = c, place[c]
    shape_a[#list], shape_b[#list] = size[c], place[c] and size[c] or 1
  end
  for _, c in ipairs(columns) do
    list[#list + 1], order[#order + 1] = c, place[c]
    shape_a[#list], shape_b[#list] = 1, size[c]
  end
  b = #order > 1 and ops.permute(b, order) or b
  return ops.mul(#columns > 0 and a:reshape(shape_a) or a, b:reshape(shape_b)), list
end

--- The product of a and b, and its letters; `wanted`: those that somebody asks for later.
local function joined(a, in_a, b, in_b, wanted, size)
  local has_a, has_b = set_of(in_a), set_of(in_b)
  local keep_a, keep_b = {}, {}
  for c in pairs(wanted) do keep_a[c], keep_b[c] = true, true end -- a set
  for _, c in ipairs(in_a) do keep_b[c] = true end
  for _, c in ipairs(in_b) do keep_a[c] = true end
  a, in_a = reduced(a, in_a, keep_a)
  b, in_b = reduced(b, in_b, keep_b)
  local batch, summed, rows, columns = {}, {}, {}, {}
  for _, c in ipairs(in_a) do
    local to = not has_b[c] and rows or wanted[c] and batch or summed
    to[#to + 1] = c
  end
  for _, c in ipairs(in_b) do
    if not has_a[c] then columns[#columns + 1] = c end
  end
  if #summed == 0 then return spread(a, in_a, b, in_b, columns, size) end
  local product
  if #batch == 0 then -- b is one matrix
    if #rows == 0 then a, in_a, rows, b, in_b, columns = b, in_b, columns, a, in_a, rows end
    local groups = util.map(rows, function(c) return { c } end)
    groups[#groups + 1] = summed
    product = ops.matmul(grouped(a, in_a, groups, size), grouped(b, in_b, { summed, columns }, size))
  else
    product = ops.matmul(grouped(a, in_a, { batch, rows, summed }, size),
      grouped(b, in_b, { batch, summed, columns }, size))
  end
  local list, shape = {}, {}
  for _, group in ipairs { batch, rows, columns } do
    for _, c in ipairs(group) do list[#list + 1], shape[#shape + 1] = c, size[c] end
  end
  return product:reshape(shape), list
end

--- einsum(equation, ...): the tensors named by the equation multiplied, and summed over the names that the result has
--- not: "ij,jk->ik", "bd,bd->b", "...i,i->...". Without "->" the result has the names that stand once, in alphabetical
--- order.
function ops.einsum(equation, ...)
  local tensors = { ... }
  if type(equation) ~= "string" then
    P.fail(("einsum: the equation is %s, wanted a text such as 'ij,jk->ik'"):format(signature.text(equation)))
  end
  for i = 1, math.max(1, #tensors) do tensors[i] = signature.value("einsum", "operand " .. i, tensors[i], "tensor") end
  local inputs, result = parse(equation, tensors)
  local size = check_sizes(equation, tensors, inputs, result)
  local t, list = tensors[1], inputs[1]
  for i = 2, #tensors do
    local wanted = set_of(result)
    for k = i + 1, #tensors do
      for _, c in ipairs(inputs[k]) do wanted[c] = true end
    end
    t, list = joined(t, list, tensors[i], inputs[i], wanted, size)
  end
  t, list = reduced(t, list, set_of(result))
  local place, order, moves = {}, {}, false
  for d, c in ipairs(list) do place[c] = d end
  for k, c in ipairs(result) do
    order[k] = place[c]
    moves = moves or place[c] ~= k
  end
  return moves and ops.permute(t, order) or t
end

return ops
