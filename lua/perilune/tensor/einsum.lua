-- einsum.lua: sums of products by names of dimensions: einsum("bij,bjk->bik", a, b).
--
-- Operands are joined from left to right. Of two, dimensions that both have and that are wanted later are batches of
-- one matrix product; those that both have and nobody wants are summed by it; the others are its rows and columns.
--
-- What is to be done follows from the equation and the operands' numbers of dimensions, so it is written down once, as
-- a Lua function without loops or tables, and kept. That of "bd,kd->bk":
--
--   return function(x1, x2)
--     local d = x1:describe()
--     local s1, s2 = tonumber(d.shape[0]), tonumber(d.shape[1])
--     d = x2:describe()
--     local s3 = tonumber(d.shape[0])
--     if tonumber(d.shape[1]) ~= s2 then mismatch(x1, x2) end
--     local t1 = ops.matmul(x1, x2:transpose(1, 2))
--     return t1
--   end
local ffi = require "ffi"
local P = require "perilune.ffi"
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

--- An error if a letter has two sizes. inputs: the operands' letters.
local function check_sizes(equation, tensors, inputs)
  local size = {}
  for i, list in ipairs(inputs) do
    for d, c in ipairs(list) do
      local n = tensors[i]:size(d)
      if size[c] and size[c] ~= n then fail(equation, "'%s' has the sizes %d and %d", c, size[c], n) end
      size[c] = n
    end
  end
end

--- Letters of the result are of some operand, and there once.
local function check_result(equation, inputs, result)
  local there, seen = {}, {}
  for _, list in ipairs(inputs) do
    for _, c in ipairs(list) do there[c] = true end
  end
  for _, c in ipairs(result) do
    if not there[c] then fail(equation, "'%s' of the result is in no operand", c) end
    if seen[c] then fail(equation, "the result has '%s' twice", c) end
    seen[c] = true
  end
end

-- -- writing the function ---------------------------------------------------------------------------------------------

--- lines: of the function; lists: constants that it needs; size: letter -> the local variable that has its size; n:
--- local variables that were made.
local Text = {}
Text.__index = Text

function Text:add(line, ...) self.lines[#self.lines + 1] = line:format(...) end
--- A new local variable with this value; returns its name.
function Text:variable(value, ...)
  self.n = self.n + 1
  self:add("local t%d = " .. value, self.n, ...)
  return "t" .. self.n
end
--- A list as a constant; returns its name.
function Text:list(list)
  self.lists[#self.lists + 1] = ("local c%d = { %s }"):format(#self.lists + 1, table.concat(list, ", "))
  return "c" .. #self.lists
end
--- The product of sizes of letters.
function Text:product(letters_)
  local sizes = {}
  for i, c in ipairs(letters_) do sizes[i] = self.size[c] end
  return #sizes == 0 and "1" or table.concat(sizes, " * ")
end

--- The sizes of the operands' dimensions, and what notices those that differ.
function Text:sizes(inputs, operands)
  local n = 0
  for i, list in ipairs(inputs) do
    if #list > 0 then self:add("%sd = x%d:describe()", i == 1 and "local " or "", i) end
    if i == 1 and #list == 0 then self:add "local d" end
    for k, c in ipairs(list) do
      local value = ("tonumber(d.shape[%d])"):format(k - 1)
      if self.size[c] then self:add("if %s ~= %s then mismatch(%s) end", value, self.size[c], operands)
      else
        n = n + 1
        self.size[c] = "s" .. n
        self:add("local s%d = %s", n, value)
      end
    end
  end
end

--- `name` with its dimensions `list` in another order.
function Text.permuted(_, name, list, order)
  local now = { unpack(list) }
  for k, c in ipairs(order) do
    local from = k
    while now[from] ~= c do from = from + 1 end
    if from ~= k then
      name = ("%s:transpose(%d, %d)"):format(name, k, from)
      now[k], now[from] = now[from], now[k]
    end
  end
  return name
end

--- `name` in a shape: a list of texts.
function Text:reshaped(name, shape)
  if #shape == 0 then return ("%s:reshape(%s)"):format(name, self:list {}) end
  return ("%s:reshape(%s)"):format(name, table.concat(shape, ", "))
end

--- `name`, of dimensions `list`, without those that are not in `wanted`, which are summed.
function Text:reduced(name, list, wanted)
  local kept, gone = {}, {}
  for d, c in ipairs(list) do
    if wanted[c] then kept[#kept + 1] = c else gone[#gone + 1] = d end
  end
  if #gone == 0 then return name, kept end
  return self:variable("ops.sum(%s, %s)", name, #gone == 1 and gone[1] or self:list(gone)), kept
end

--- `name` as a tensor with one dimension for each of the groups of letters.
function Text:grouped(name, list, groups)
  local order, shape, alone = {}, {}, true
  for g, group in ipairs(groups) do
    shape[g], alone = self:product(group), alone and #group == 1
    for _, c in ipairs(group) do order[#order + 1] = c end
  end
  name = self:permuted(name, list, order)
  return alone and name or self:reshaped(name, shape)
end

--- The product of a and b element by element: the dimensions of a, and behind them those that only b has (`columns`).
function Text:spread(a, in_a, b, in_b, columns)
  local list, place, order = {}, set_of(in_b), {}
  local shape_a, shape_b = {}, {}
  for _, c in ipairs(in_a) do
    list[#list + 1] = c
    if place[c] then order[#order + 1] = c end
    shape_a[#list], shape_b[#list] = self.size[c], place[c] and self.size[c] or "1"
  end
  for _, c in ipairs(columns) do
    list[#list + 1], order[#order + 1] = c, c
    shape_a[#list], shape_b[#list] = "1", self.size[c]
  end
  b = self:permuted(b, in_b, order)
  if #columns > 0 then a = self:reshaped(a, shape_a) end
  if #order < #list then b = self:reshaped(b, shape_b) end
  return self:variable("ops.mul(%s, %s)", a, b), list
end

--- The product of a and b, and its letters; `wanted`: those that somebody asks for later.
function Text:joined(a, in_a, b, in_b, wanted)
  local has_a, has_b = set_of(in_a), set_of(in_b)
  local keep_a, keep_b = {}, {}
  for c in pairs(wanted) do keep_a[c], keep_b[c] = true, true end -- a set
  for _, c in ipairs(in_a) do keep_b[c] = true end
  for _, c in ipairs(in_b) do keep_a[c] = true end
  a, in_a = self:reduced(a, in_a, keep_a)
  b, in_b = self:reduced(b, in_b, keep_b)
  local batch, summed, rows, columns = {}, {}, {}, {}
  for _, c in ipairs(in_a) do
    local to = not has_b[c] and rows or wanted[c] and batch or summed
    to[#to + 1] = c
  end
  for _, c in ipairs(in_b) do
    if not has_a[c] then columns[#columns + 1] = c end
  end
  if #summed == 0 then return self:spread(a, in_a, b, in_b, columns) end
  local product, shape
  if #batch == 0 then -- b is one matrix
    if #rows == 0 then a, in_a, rows, b, in_b, columns = b, in_b, columns, a, in_a, rows end
    local groups = {}
    for k, c in ipairs(rows) do groups[k] = { c } end
    groups[#groups + 1] = summed
    shape = #columns == 1
    product = self:variable("ops.matmul(%s, %s)", self:grouped(a, in_a, groups),
      self:grouped(b, in_b, { summed, columns }))
  else
    shape = #batch == 1 and #rows == 1 and #columns == 1
    product = self:variable("ops.matmul(%s, %s)", self:grouped(a, in_a, { batch, rows, summed }),
      self:grouped(b, in_b, { batch, summed, columns }))
  end
  local list, sizes = {}, {}
  for _, group in ipairs { batch, rows, columns } do
    for _, c in ipairs(group) do list[#list + 1], sizes[#sizes + 1] = c, self.size[c] end
  end
  return shape and product or self:variable(self:reshaped(product, sizes):gsub("%%", "%%%%")), list
end

--- The function that does what the equation says of tensors with so many dimensions as these have.
local function written(equation, tensors)
  local inputs, result = parse(equation, tensors)
  check_result(equation, inputs, result)
  local text, operands = setmetatable({ lines = {}, lists = {}, size = {}, n = 0 }, Text), {}
  for i = 1, #inputs do operands[i] = "x" .. i end
  text:sizes(inputs, table.concat(operands, ", "))
  local t, list = "x1", inputs[1]
  for i = 2, #inputs do
    local wanted = set_of(result)
    for k = i + 1, #inputs do
      for _, c in ipairs(inputs[k]) do wanted[c] = true end
    end
    t, list = text:joined(t, list, operands[i], inputs[i], wanted)
  end
  t, list = text:reduced(t, list, set_of(result))
  local whole = ("local ops, mismatch = ...\n%s\nreturn function(%s)\n%s\nreturn %s\nend"):format(
    table.concat(text.lists, "\n"), table.concat(operands, ", "), table.concat(text.lines, "\n"),
    text:permuted(t, list, result))
  local function mismatch(...) check_sizes(equation, { ... }, inputs) end
  return assert(loadstring(whole, "=perilune/tensor/einsum.lua"))(ops, mismatch)
end

-- -- keeping it -------------------------------------------------------------------------------------------------------

-- Equations that a script puts together (of so many operands, or names) may be as many as its data: when so many
-- functions are kept, all are forgotten, and those that are in use are written anew.
local MOST_KEPT = 1000
local n_kept = 0
local kept = {} -- equation -> numbers of dimensions of all operands, a number or (of many) a text -> function
local ctype = Tensor.ctype

--- t, if it is a tensor; for `i`, its place, in what is said otherwise.
local function operand(t, i)
  if ffi.istype(ctype, t) and t.ptr ~= nil then return t end
  return signature.value("einsum", "operand " .. i, t, "tensor")
end

local function first_time(equation, key, ...)
  local f = written(equation, { ... })
  if n_kept >= MOST_KEPT then
    for other in pairs(kept) do kept[other] = nil end -- any order: all of them
    n_kept = 0
  end
  n_kept = n_kept + 1
  kept[equation] = kept[equation] or {}
  kept[equation][key] = f
  return f
end

--- More operands than three, or none.
local function of_many(equation, ...)
  local tensors, dims = { ... }, {}
  for i = 1, math.max(1, #tensors) do
    tensors[i] = operand(tensors[i], i)
    dims[i] = tensors[i]:dim()
  end
  local key = table.concat(dims, " ") -- as digits of a number they would be rounded, of sixteen and more
  local f = kept[equation] and kept[equation][key] or first_time(equation, key, unpack(tensors))
  return f(unpack(tensors))
end

--- einsum(equation, ...): the tensors named by the equation multiplied, and summed over the names that the result has
--- not: "ij,jk->ik", "bd,bd->b", "...i,i->...". Without "->" the result has the names that stand once, in alphabetical
--- order.
function ops.einsum(equation, a, b, c, ...)
  if type(equation) ~= "string" then
    P.fail(("einsum: the equation is %s, wanted a text such as 'ij,jk->ik'"):format(signature.text(equation)))
  end
  if a == nil or select("#", ...) > 0 then return of_many(equation, a, b, c, ...) end
  a = operand(a, 1)
  local key = a:dim() + 1
  if b ~= nil or c ~= nil then
    b = operand(b, 2)
    key = 10 * key + b:dim() + 1
    if c ~= nil then
      c = operand(c, 3)
      key = 10 * key + c:dim() + 1
    end
  end
  local of = kept[equation]
  local f = of and of[key] or first_time(equation, key, a, b, c)
  local result = f(a, b, c)
  return result
end

return ops
