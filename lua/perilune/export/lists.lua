-- export/lists.lua: values of the members of lists: of each sample as many as it pleases. A list is known by the
-- features whose ids are its members; lists of several features are one where an operation joins their members, if they
-- are equally long in both recordings (the file then refuses samples in which they are not). operations.lua has the
-- functions below beside its own.
--
--   list = { features = { "item", "action" }, field = "sparse_features", totals = members in the two recordings,
--     whole = { "timestamps" }, numbers = { "prices" }, of = the list of which this one's members are a part }
local P = require "perilune.ffi"
local util = require "perilune.util"
local Lowering = require "perilune.export.lower"

local C = P.C

--- operations: function name -> f(lowering), as those of operations.lua.
local M = { operations = {} }
local made = M.operations

-- -- which list a value is of -----------------------------------------------------------------------------------------

local init = Lowering.init
function Lowering:init(...)
  init(self, ...)
  self.features, self.lists, self.whole, self.whole_values = {}, {}, {}, {}
  self.numbers, self.weights, self.kept = {}, {}, {}
end

--- A feature of a batch: its ids in the two recordings, and a function that returns the lengths of its lists in all
--- batches.
function Lowering:note_feature(key, field, totals, lengths)
  self.features[key] = { field = field, totals = totals, lengths = lengths, key = key }
end

--- The lengths of a feature's lists in all batches, once.
function Lowering:lengths_of(key)
  local f = self.features[key] or self:fail("no feature '%s' in the batches", key)
  if type(f.lengths) == "function" then f.lengths = f.lengths() end
  return f.lengths
end

--- The list that a list has become a part of, by joins.
local function root(list)
  while list.joined do list = list.joined end
  return list
end

--- The list of a bag's feature.
function Lowering:list_of(bag)
  local key = bag.feature
  self.lists[key] = self.lists[key] or { features = { key }, field = bag.kjt, totals = self.features[key].totals,
    whole = {}, numbers = {} }
  return root(self.lists[key])
end

--- One list for two, if their members are the same ones; nil: they are not.
function Lowering:join(a, b)
  a, b = root(a), root(b)
  if a == b then return a end
  if a.of or b.of then -- the same part of lists that are one
    local one = a.of and b.of and a.key == b.key and self:join(a.of, b.of)
    return one and root(a) == root(b) and root(a) or nil
  end
  local x, y = self:lengths_of(a.features[1]), self:lengths_of(b.features[1])
  for i = 1, math.max(#x, #y) do
    if x[i] ~= y[i] then return nil end
  end
  for _, key in ipairs(b.features) do table.insert(a.features, key) end
  for _, field in ipairs { "whole", "numbers" } do
    for _, name in ipairs(b[field]) do table.insert(a[field], name) end
  end
  b.joined = a
  for key, part in util.ordered(self.kept[b] or {}) do -- the same parts of both
    self.kept[a] = self.kept[a] or {}
    if self.kept[a][key] then part.joined = self.kept[a][key] else self.kept[a][key] = part end
  end
  return a
end

local function text_of(list)
  if not list then return "the samples" end
  local source = list
  while source.of do source = root(source.of) end
  return (list.of and "a selection of the members of '%s'" or "the members of '%s'"):format(
    table.concat(source.features, "', '"))
end

--- A field of f32 numbers, one for each member of some list: of that feature that has as many ids as it has numbers in
--- every batch. field: { name =, shapes = in the two recordings, rows = function() -> its length in all batches }.
function Lowering:note_numbers(id, field) self.numbers[id] = field end

local function sum(list, from, to)
  local n = 0
  for i = from, to do n = n + list[i] end
  return n
end

--- Whether a feature has as many ids in each batch as a field has numbers.
function Lowering:as_many(feature, field)
  local lengths, at = self:lengths_of(feature.key), 0
  for _, batch in ipairs(field.batches()) do
    if sum(lengths, at + 1, at + batch.samples) ~= batch.rows then return false end
    at = at + batch.samples
  end
  return true
end

--- The value of a field of numbers, whose list is found when it is first used.
function Lowering:value_of_numbers(field)
  if field.value then return field.value end
  local found, list = {}, nil
  for key, feature in util.ordered(self.features) do
    if self:as_many(feature, field) then
      table.insert(found, self.lists[key] and 1 or #found + 1, key) -- those that the model has asked about first
    end
  end
  for i, key in ipairs(found) do
    local own = self:list_of { feature = key, kjt = self.features[key].field }
    list = i == 1 and own or self:join(list, own) or self:fail(
      "'%s' has as many numbers as '%s' has ids, and as '%s' has: whose they are is not known", field.name, found[1],
      key)
  end
  local shape = util.copy(field.shapes[1])
  if list and (list.totals[1] ~= shape[1] or list.totals[2] ~= field.shapes[2][1]) then
    self:fail("the first batch has as many numbers '%s' as ids of '%s' and of another feature; begin with another one",
      field.name, found[1])
  end
  table.remove(shape, 1)
  if not list or #shape > 1 or shape[1] and shape[1] ~= 1 then
    self:fail("'%s' has the shape %s, allowed: a row for each sample, or one number for each id of a feature",
      field.name, "[" .. table.concat(field.shapes[1], ", ") .. "]")
  end
  table.insert(shape, 1, 1)
  table.insert(list.numbers, field.name)
  field.value = self:value(shape, { list = list, given = field.name })
  field.value.list = list
  return field.value
end

--- An argument is this value: the entry's values are of its list.
function Lowering:meet(value, what)
  if not value.index or self.free then return value end
  local own = value.list and root(value.list) or false
  if self.list == nil or self.list == own then self.list = own
  else
    local joined = self.list and own and self:join(self.list, own)
    if not joined then
      self:fail("%s is of %s, beside something of %s; sparse.index_select_dim0 with sparse.sequence_numbers gives "
        .. "each member what its sample has", what, text_of(own), text_of(self.list))
    end
    self.list = joined
  end
  return value
end

--- The bag whose rows a JaggedTensor has.
function Lowering:bag(x)
  return type(x) == "table" and x.bag or self:fail "a JaggedTensor that no collection of the model made"
end

--- The list whose offsets an argument is.
function Lowering:offsets(x, what)
  return type(x) == "table" and x.offsets and root(x.offsets)
    or self:fail("%s are no offsets of a JaggedTensor that a collection of the model made", what)
end

--- The arguments by name of a function that takes a table, of which `skip` (a set) are not looked at.
function Lowering:named(skip)
  local a, b, found = self.entry.args[1].named or {}, self.other.args[1].named or {}, {}
  self.free = true
  for name, x in util.ordered(a) do
    if not skip[name] then found[name] = self:resolve(x, b[name], name) end
  end
  return found
end

--- A number for each sample that counts members of a list (targets, say): a tensor of whole numbers of the batch. nil:
--- there are none.
function Lowering:counts(item, name, list)
  if item == nil then return nil end
  local field = type(item) == "table" and item.id and self.whole[item.id]
  if not field then self:fail("%s are no tensor of whole numbers of the batch", name) end
  if list.of then self:fail("%s beside a selection of members", name) end
  local known = self.whole_values[field]
  if known and (not known.counts or root(known.counts) ~= list) then
    self:fail("%s count members of two lists", name)
  end
  if not known then
    known = self:value({ 1 }, { dense = field, counts = list })
    known.counts, self.whole_values[field] = list, known
  end
  return known
end

function Lowering:targets(list)
  return self:counts((self.entry.args[1].named or {}).num_targets, "num_targets", list)
end

-- -- functions --------------------------------------------------------------------------------------------------------

--- A feature of which each sample has one id is a row of the sample: the file then wants one of everybody.
local function single(l, bag)
  if l.features[bag.feature].totals[1] ~= l.batch[1] then return false end
  for _, n in ipairs(l:lengths_of(bag.feature)) do
    if n ~= 1 then return false end
  end
  return true
end

--- What map made of the values.
made["JaggedTensor:_with_values"] = function(l)
  local a = l:arguments(nil, true)
  l:set { bag = l:bag(a[1]), mapped = l:sample(a[2], "what map's function made of the values") }
end

made["JaggedTensor:values"] = function(l)
  local of = l:arguments()[1]
  local bag = l:bag(of)
  if of.mapped then return l:set(of.mapped) end
  if single(l, bag) then
    l.list, bag.length = false, 1
    return l:set(l:op("rows", l:result_shape(), { inputs = {}, bags = { bag }, sizes = { 1, bag.out.columns },
      numbers = { 0, 0 } }))
  end
  l.list = l:list_of(bag)
  l:set(l:op("members", l:result_shape(), { inputs = {}, bags = { bag } }))
end

made["JaggedTensor:offsets"] = function(l) l:set { offsets = l:list_of(l:bag(l:arguments()[1])) } end

--- A feature as the batch has it: its lists, and the weights of its ids.
made["KeyedJaggedTensor:get"] = function(l)
  local a = l.entry.args
  local field = a[1].id and l.kjts[a[1].id] or l:fail "a KeyedJaggedTensor that is none of the batch's fields"
  l:set { bag = { feature = a[2], kjt = field } }
end

--- Weights of ids, a number for each member.
made["JaggedTensor:weights"] = function(l)
  local bag = l:bag(l:arguments()[1])
  l.list = l:list_of(bag)
  local v = l.weights[bag.feature] or l:value({ 1 }, { list = l.list, given = bag.feature, weight = true })
  l.weights[bag.feature] = v
  l:set { index = v.index, shape = l:result_shape(), list = l.list }
end
made["JaggedTensor:weights_or_none"] = made["JaggedTensor:weights"]

--- Whole numbers in Lua; where they become f32 the file's number is used.
made["JaggedTensor:lengths"] = function(l)
  local bag = l:bag(l:arguments()[1])
  l.list = false
  if not bag.out then return l:set { lengths = l:list_of(bag) } end
  local v = l:op("lengths", { 1 }, { inputs = {}, bags = { bag } })
  v.lengths = l:list_of(bag)
  l:set(v)
end

--- Offsets of lists whose lengths are known.
made["sparse.asynchronous_complete_cumsum"] = function(l)
  local x = l:arguments(nil, true)[1]
  l:set { offsets = x.lengths and root(x.lengths) or l:fail "numbers, allowed: the lengths of lists" }
end

made["sparse.sequence_numbers"] = function(l) l:set { numbers = l:offsets(l:arguments(1)[1], "seq_offsets") } end

made["sparse.index_select_dim0"] = function(l)
  local a = l:arguments(nil, true)
  local x, list = l:sample(a[1], "values"), a[2].numbers
  if not list then
    l:fail "indices that are none of sparse.sequence_numbers, which leads from the members of lists to their samples"
  end
  if x.list then l:fail("values of %s, wanted: those of samples", text_of(root(x.list))) end
  l.list = root(list)
  l:set(l:op("spread", l:result_shape(), { inputs = { x.index } }))
end

--- Whether a recording's tensor of ids is 0, 1, ..., n - 1.
local function counts_up(item, n)
  local list = type(item) == "table" and item.constant and item.constant:to("i64"):to_list()
  if not list or #list ~= n then return false end
  for i, x in ipairs(list) do
    if tonumber(x) ~= i - 1 then return false end
  end
  return true
end

local poolings = { [C.PERI_POOLING_SUM] = "sum", [C.PERI_POOLING_MEAN] = "mean" }

--- nn.Embedding: rows of a parameter by numbers that were computed. embedding_bag of every row in its order: a sum of
--- members.
made["embedding.look_up"] = function(l)
  local a, b = l.entry.args, l.other.args
  local mode, last, padding, norm = a[2], a[6], a[7], a[8]
  l.free = true
  local weight = l:resolve(a[1], b[1], "weight")
  if padding or norm then l:fail "a padding_idx or a max_norm" end
  if mode == C.PERI_POOLING_NONE then
    local ids = l:sample(l:resolve(a[3], b[3], "ids"), "ids")
    if not weight.constant then l:fail "rows that depend on the batch" end
    l.list = ids.list and root(ids.list) or false
    return l:set(l:op("take", l:result_shape(), { inputs = { ids.index, l:constant(weight).index },
      sizes = { weight.shape[1], weight.shape[2] } }))
  end
  local pooling = poolings[mode] or l:fail "the largest elements of bags"
  if not weight.list or a[5] or not last then l:fail "bags of rows that are not the members of a list" end
  local list = root(weight.list)
  if not counts_up(a[3], list.totals[1]) or not counts_up(b[3], list.totals[2]) then
    l:fail "ids, allowed: 0, 1, ... for all members of a list" end
  if l:offsets(l:resolve(a[4], b[4], "offsets"), "offsets") ~= list then
    l:fail "offsets that are not those of the members' list"
  end
  l.list = false
  l:set(l:op("pool", l:result_shape(), { inputs = { weight.index }, ["function"] = pooling }))
end

local function attention(l, form, most)
  local a = l:named { num_targets = true }
  local list = l:offsets(a.seq_offsets, "seq_offsets")
  local inputs, shape = {}, nil
  for i, name in ipairs { "q", "k", "v" } do
    local x = l:sample(a[name], name)
    local own = x.list and l:join(x.list, list)
    if not own then
      l:fail("%s is of %s, its offsets are those of %s", name, text_of(x.list and root(x.list)), text_of(list))
    end
    list = own
    inputs[i], shape = x.index, shape and { shape[1], shape[2], x.shape[3] } or x.shape
  end
  local targets = l:targets(list)
  if targets then inputs[4] = targets.index end
  l.list = list
  local longest = most or 0
  if list.of and most then
    if (list.most or math.huge) > most then
      l:fail("max_seq_len %d beside a selection of members, allowed: none, or one of slices of up to so many", most)
    end
    longest = 0 -- none can be longer
  end
  local dim = l.entry.args[1].named.q.shape[3]
  local sizes = { shape[2], dim, shape[3], a.max_attn_len or 0, a.causal == false and 0 or 1, longest }
  local contextual, full = a.contextual_seq_len or 0, a.min_full_attn_seq_len or 0
  if contextual > 0 or full > 0 then sizes[7] = contextual end
  if full > 0 then sizes[8] = full end
  l:set(l:op("attention", l:result_shape(), { inputs = inputs, ["function"] = form, sizes = sizes,
    numbers = { a.alpha or 1 / math.sqrt(dim), most and form == "hstu" and 1 / most or 0 } }))
end
made["sparse.jagged_attention"] = function(l) attention(l, "softmax", l.entry.args[1].named.max_seq_len) end
made["sparse.hstu_mha"] = function(l) attention(l, "hstu", l.entry.args[1].named.max_seq_len) end

made["sparse.sequence_positions"] = function(l)
  local a = l:named { num_targets = true, rows = true }
  local list = l:offsets(a.seq_offsets, "seq_offsets")
  local targets = l:targets(list)
  l.list = list
  l:set(l:op("places", l:result_shape(1, nil, true),
    { inputs = targets and { targets.index } or {}, sizes = { a.max_positions } }))
end

made["sparse.time_buckets"] = function(l)
  local a = l:named { timestamps = true }
  local list, item = l:offsets(a.seq_offsets, "seq_offsets"), l.entry.args[1].named.timestamps
  local field = type(item) == "table" and item.id and l.whole[item.id]
  if not field then l:fail "timestamps, allowed: a tensor of whole numbers of the batch" end
  if list.of then l:fail "timestamps of a selection of members" end
  l.list = list
  if not l.whole_values[field] then table.insert(list.whole, field) end
  if l.whole_values[field] and root(l.whole_values[field]) ~= list then l:fail "timestamps of two lists" end
  l.whole_values[field] = list
  l:set(l:op("times", l:result_shape(1, nil, true), { inputs = {}, ["function"] = a.time_bucket_fn or "sqrt",
    sizes = { a.num_buckets or 2048 }, numbers = { a.increment or 60, 0 }, whole = field }))
end

--- Some members of a list as a list of their own. key: which members these are; operations that keep the same ones of
--- several values make one list. fields: of the operation. Sets its values, and their lengths.
local function keep(l, list, key, fields)
  local first, second = l.entry.results[1], l.other.results[1]
  l.kept[list] = l.kept[list] or {}
  local kept = l.kept[list][key] or { of = list, key = key, most = fields.sizes and fields.sizes[1],
    totals = { first.shape[1], second.shape[1] } }
  l.kept[list][key], l.list = kept, kept
  l:set(l:op(fields.op, l:result_shape(), fields))
  if l.entry.results[2] then l:set({ lengths = kept }, 2) end
end

--- The list that values and lengths are of.
local function list_with(l, x, lengths)
  local list = type(lengths) == "table" and lengths.lengths and root(lengths.lengths)
  local own = list and x.list and l:join(x.list, list)
  return own or l:fail "values and lengths, allowed: those of one list of a collection's JaggedTensor"
end

made["sparse.masked_select_jagged_1d"] = function(l)
  local a = l:arguments(nil, true)
  local x, mask = l:sample(a[1], "values"), l:sample(a[3], "mask")
  local list = list_with(l, x, a[2])
  local own = mask.list and l:join(mask.list, list)
    or l:fail("a mask of %s, beside values of %s", text_of(mask.list and root(mask.list)), text_of(list))
  keep(l, own, "mask " .. mask.index, { op = "select", inputs = { x.index, mask.index } })
end

local function slice(l, x, lengths, n, part, start)
  local list = list_with(l, x, lengths)
  keep(l, list, ("%s %d %s"):format(part, n, start and start.index or "-"),
    { op = "slice", ["function"] = part, sizes = { n }, inputs = { x.index, start and start.index } })
end

--- The number that a recording's tensor of whole numbers has everywhere; nil: it has several, or depends on the batch.
local function everywhere(item)
  local list = type(item) == "table" and item.constant and item.constant:to("i64"):to_list() or {}
  for _, x in ipairs(list) do
    if x ~= list[1] then return nil end
  end
  return list[1] and tonumber(list[1])
end

made["sparse.jagged_slice"] = function(l)
  local a, b = l.entry.args, l.other.args
  l.free = true
  local x, lengths = l:sample(l:resolve(a[1], b[1], "x_values"), "x_values"), l:resolve(a[2], b[2], "x_lengths")
  local from, n = everywhere(a[3]), l:resolve(a[4], b[4], "slice_length")
  local start
  if from and from == everywhere(b[3]) then start = from > 0 and l:number(from) or nil
  elseif a[3].id and l.whole[a[3].id] then start = l:counts(a[3], "start", list_with(l, x, lengths))
  else
    start = l:sample(l:resolve(a[3], b[3], "start"), "start")
    if start.list then l:fail("start is of %s, wanted: a number for each sample", text_of(root(start.list))) end
  end
  slice(l, x, lengths, n, "first", start)
end
made["sparse.truncate_jagged"] = function(l)
  local a = l:arguments(nil, true)
  slice(l, l:sample(a[1], "values"), a[2], a[3], a[4] or "last")
end
made["sparse.jagged_1d_to_truncated_values"] = function(l)
  local a = l:arguments(nil, true)
  slice(l, l:sample(a[1], "values"), a[2], a[3], "first")
end

-- -- what the file has of them ----------------------------------------------------------------------------------------

--- The lists of the values of a file, { inputs = numbers } or { of = number } each: fills in the numbers that values
--- have for them, and for the inputs that they are. number(name): of the input that a feature or a field is, or nil;
--- add(name, kind): of a new input of whole numbers, or of numbers. Returns the lists, and a function that returns the
--- first input of one.
function M.numbered(values, number, add)
  local found, of = {}, {}
  local function note(list)
    list = root(list)
    if of[list] then return of[list] end
    local entry
    if list.of then entry = { of = note(list.of) }
    else
      local inputs = {}
      for _, name in ipairs(list.features) do inputs[#inputs + 1] = number(name) end
      if #inputs == 0 then inputs[1] = add(list.features[1], "whole") end -- whose ids nobody looks up, but counts
      for _, names in ipairs { list.whole, list.numbers } do
        for _, name in ipairs(names) do inputs[#inputs + 1] = number(name) end
      end
      entry = { inputs = inputs }
    end
    found[#found + 1] = entry
    of[list] = #found - 1
    return of[list]
  end
  for _, v in util.ordered(values) do
    if v.given then v.input = number(v.given) or add(v.given, "numbers") end
  end
  for _, v in util.ordered(values) do
    if v.list then v.list = note(v.list) end
    if v.counts then note(v.counts) end
  end
  return found, function(list) return found[of[root(list)] + 1].inputs[1] end
end

return M
