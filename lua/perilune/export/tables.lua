-- export/tables.lua: what a recorded model has from embedding tables, as operations of a model file.
local util = require "perilune.util"
local Lowering = require "perilune.export.lower"

local slice = Lowering.slice

--- function name -> f(lowering), as in operations.lua.
local M = {}

--- An embedding bag collection's KeyedTensor, or the JaggedTensors of an embedding collection, which are no values of
--- the file: what is made of them is.
function M.lookup(l)
  local e, columns, bags = l.entry, 0, {}
  local kjt = e.args[1]
  local input = kjt.id and l.kjts[kjt.id]
  if not input then l:fail "its KeyedJaggedTensor is none of the batch's fields" end
  for i, out in ipairs(e.collection.outputs) do
    bags[i] = { feature = out.feature, pooling = out.pooling, kjt = input, out = out }
    if out.positions then
      local at = util.address(out.positions)
      bags[i].positions = l:constant({ constant = out.positions, shape = out.positions:shape(), at = at }).index
    end
    columns = columns + out.columns
    if e.collection.rows then l:set({ bag = bags[i] }, 1, i) end
  end
  if e.collection.rows then return end
  l.list = false
  local v = l:op("lookup", { 1, columns }, { inputs = {}, bags = bags })
  v.collection = e.collection
  l:set(v)
end

M["JaggedTensor:to_padded_dense"] = function(l)
  local a = l:arguments()
  if not a[2] then l:fail "without a desired_length, the longest list of a batch would say how long all are" end
  local bag = l:bag(a[1])
  if a[1].mapped then l:fail "of what JaggedTensor:map made; pad the collection's rows, then call the layer" end
  l.list = false
  local shape, length = l:result_shape(), tonumber(a[2])
  l:set(l:op("rows", shape, { inputs = {}, bags = { bag }, sizes = { length, shape[3] },
    numbers = { a[3] or 0, 0 } }))
end

--- The items are a table of the file, of which collections.lua knows nothing.
M["sparse.top_products"] = function(l)
  local a = l:arguments()
  local queries, items, k = l:sample(a[1], "the tensor of queries"), a[2], tonumber(a[3])
  if a[4] then l:fail "items of codes; allowed: numbers, which `tables` rounds for the file" end
  if not items.constant then l:fail "items that depend on the batch" end
  if items.shape[1] > 2 ^ 24 then l:fail("%d items, allowed: up to 2^24, whose numbers f32 holds", items.shape[1]) end
  if queries.shape[1] ~= 1 then l:fail("%d queries a sample, wanted 1", queries.shape[1]) end
  local v = l:op("top", { 1, 2 * k }, { inputs = { queries.index }, sizes = { k }, items = items })
  l:set(l:view(v, { 1, k }, { 2 * k, 1 }, 0))
  l:set(l:view(v, { 1, k }, { 2 * k, 1 }, k), 2)
end

M["KeyedTensor:values"] = function(l)
  local x = l:arguments()[1]
  l:set({ index = x.index, shape = l:result_shape() })
end

--- The columns of a collection's output `name`; nil: it has none.
local function columns_of(l, x, name)
  local at = 0
  for _, out in ipairs(x.collection and x.collection.outputs or {}) do
    if out.name == name then return slice(l, x, 2, at, 1, { 1, out.columns }) end
    at = at + out.columns
  end
end

M["KeyedTensor:get"] = function(l)
  local a = l:arguments()
  l:set(columns_of(l, a[1], a[2]) or l:fail("no key '%s' of a collection of the model", tostring(a[2])))
end

M["KeyedTensor.regroup"] = function(l)
  local a = l:arguments()
  for g, names in ipairs(a[2]) do
    local inputs, sizes = {}, { 1, 1 }
    for i, name in ipairs(names) do
      local part
      for _, x in ipairs(a[1]) do part = part or columns_of(l, x, name) end
      if not part then l:fail("no key '%s' of a collection of the model", tostring(name)) end
      inputs[i], sizes[i + 2] = part.index, part.shape[2]
    end
    l:set(l:op("cat", l:result_shape(1, g), { inputs = inputs, sizes = sizes }), 1, g)
  end
end

return M
