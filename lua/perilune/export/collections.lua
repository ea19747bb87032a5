-- export/collections.lua: the modules of tables that a model has, and what a model file needs of them: inputs, tables,
-- maps of raw ids.
--
--   local used = collections.list_collections("export", model)    -- what the recording watches (record.lua)
--   local inputs, tables, maps, lists, fields = collections.inputs("export", arguments, operations, values, state_dict)
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local embed_config = require "perilune.embed.config"
local Tensor = require "perilune.tensor"
local file = require "perilune.export.file"
local lists = require "perilune.export.lists"

local M = {}

-- -- which there are --------------------------------------------------------------------------------------------------

local function joined_path(path, name) return path == "" and name or path .. "." .. name end

--- The collection that has the tables of a module that stands before one, its path, and how its parameters are called;
--- of a collection by itself, that.
local function tables_of(m, path)
  local prefix = m.parameter_prefix or "embedding_bags"
  if rawget(m, "_embedding_module") then
    local inner = m._embedding_module
    return inner, joined_path(path, "_embedding_module"), inner.parameter_prefix
  end
  local bags = rawget(m, "_embedding_bag_collection")
  if bags then return bags, joined_path(path, "_embedding_bag_collection"), bags.parameter_prefix end
  return m, path, prefix
end

--- The weights of places of a feature: a parameter, or nil: there are none.
local function positions_of(func, m, path, feature)
  local p = rawget(m, "_feature_processors")
  if not p then return nil end
  if p.max_feature_lengths then return rawget(p, "position_weights." .. feature) end
  local one = rawget(p, feature)
  if p.class_name ~= "FeatureProcessorDictWrapper" or one and one.class_name ~= "PositionWeightedModule" then
    P.fail(("%s: module '%s': the processor %s has no form for inference, allowed: those that weigh places"):format(
      func, path, (one or p).class_name))
  end
  return one and one.position_weight
end

--- The map of a table's raw ids: { key =, module =, states = the path of its states }; nil: ids are rows.
local function map_of(func, m, path, name)
  local mcc = rawget(m, "_managed_collision_collection")
  if not mcc then return nil end
  local module = mcc:_module_of(name)
  if module.input_hash_func then
    P.fail(("%s: module '%s': table '%s' has an input_hash_func, a function of Lua, of which a model file knows "
      .. "nothing; allowed: none, with ids that are hashed before they are asked about"):format(func, path, name))
  end
  local states = joined_path(path, "_managed_collision_collection._managed_collision_modules." .. name)
  return { key = states, module = module, states = states }
end

local function is_true(m, field) -- of sharded collections a field, else a method
  local x = m[field]
  return type(x) == "function" and m[field](m) or x == true
end

local function outputs_of(func, m, path, configs, pooled)
  local inner, inner_path, prefix = tables_of(m, path)
  local names, outputs, weighted = inner:embedding_names(), {}, is_true(inner, "is_weighted")
  for _, config in ipairs(configs) do
    for _, feature in ipairs(config.feature_names) do
      local name = names[#outputs + 1]
      if name ~= feature and name ~= feature .. "@" .. config.name then
        P.fail(("%s: module '%s' orders its outputs in a way that is not known"):format(func, path))
      end
      outputs[#outputs + 1] = { name = name, feature = feature, table = config.name, pooling = pooled
        and config.pooling:lower(), columns = config.embedding_dim, rows = config.num_embeddings, weighted = weighted
        and not rawget(m, "_feature_processors"), module = inner, positions = positions_of(func, m, path, feature),
        data_type = config.data_type, bytes = config.data_type:find "INT" ~= nil or config.data_type == "FP8",
        key = joined_path(inner_path, ("%s.%s.weight"):format(prefix, config.name)),
        map = map_of(func, m, path, config.name) }
    end
  end
  return outputs
end

--- The collections of a model, by the order of their columns: { module =, path =, rows = not pooled, outputs = list of
--- { name =, feature =, table =, pooling =, columns =, rows =, weighted =, module = that has the table, data_type =,
--- bytes = rows are bytes, key = of the table in the state, map = } }. What is inside of one is left out.
function M.list_collections(func, model)
  local list, within = {}, nil
  for _, entry in ipairs(model:named_modules()) do
    local m, path = entry.module, entry.path
    local inside = within and (within == "" or path:sub(1, #within + 1) == within .. ".")
    local embedding = rawget(m, "_embedding_module") or m
    local pooled, rows = embedding.embedding_bag_configs, embedding.embedding_configs
    if not inside and type(pooled) == "function" then
      if rawget(m, "_feature_processors") and not rawget(m, "_embedding_bag_collection") then
        P.fail(("%s: module '%s' is a %s, which has no form for inference over ranks"):format(func, path, m.class_name))
      end
      list[#list + 1] = { module = m, path = path,
        outputs = outputs_of(func, m, path, embedding:embedding_bag_configs(), true) }
      within = path
    elseif not inside and type(rows) == "function" and type(m.forward) == "function"
      and not rawget(m, "_managed_collision_modules") then
      list[#list + 1] = { module = m, path = path, outputs = outputs_of(func, m, path, embedding:embedding_configs(),
        false), rows = true }
      within = path
    end
  end
  return list
end

-- -- what the file has of them ----------------------------------------------------------------------------------------

--- What a model file calls the data types of tables.
local data_types = {}
for name, held_as in util.ordered(embed_config.table_types) do
  data_types[name] = embed_config.data_types[name] or held_as:lower()
end

--- How the rows of an output's table are read (file.lua) for a file that has them as `dtype`: as numbers, or as bytes
--- that are those of the file already.
local function weight_of(func, out, state, dtype)
  local m = out.module
  if m.pruned then P.fail(("%s: table '%s' is pruned, which has no form for inference"):format(func, out.table)) end
  if m.table_state and out.bytes and data_types[out.data_type] == dtype then
    return function(row, n) return m:table_state(out.table):slice(1, row, row + n) end
  end
  if type(m.table_rows) == "function" then
    return function(row, n) return m:table_rows(out.table, "weight", row, n) end
  end
  return state()[out.key] or P.fail(("%s: the model's state has no '%s'"):format(func, out.key))
end

local MCH_FREE, HASH_FREE = "7fffffffffffffff", "ffffffffffffffff"
local spreads = { range = function(module) return (module.input_hash_size - 1) / module:buckets() + 1 end }

--- All of a state of a map, i64. Collective where it is spread over ranks.
local function whole_state(state, name)
  local t = state()[name]
  if not t then return nil end
  return (Tensor.is(t) and t or t:gather()):to("i64", "cpu"):reshape(-1):contiguous()
end

--- A map as file.lua writes it: { ids = tensor by row, free =, source =, segments =, spread =, block =, unknown =,
--- aside = }.
local function read_map(map, state)
  local module, mch = map.module, true
  local source = map.states .. "._mch_sorted_raw_ids"
  local ids, rows = whole_state(state, source), whole_state(state, map.states .. "._mch_remapped_ids_mapping")
  if not ids then
    mch, source = false, map.states .. "._hash_zch_identities"
    ids = whole_state(state, source)
  else
    local sorted, n, at = ids:read(), ids:numel(), rows:read()
    local by_row, offset = ffi.new("int64_t[?]", n), module.output_global_offset
    for i = 0, n - 1 do by_row[at[i] - offset] = sorted[i] end
    ids = Tensor.from_memory(by_row, { n }, "i64", "cpu")
  end
  local unknown = module.on_miss
  if unknown == "default" then unknown = mch and "row" or "hash" end
  local block = spreads[module.spread] and spreads[module.spread](module) or 0
  return { ids = ids, free = mch and MCH_FREE or HASH_FREE, source = source, unknown = unknown, spread = module.spread,
    block = tonumber(block) - tonumber(block) % 1, aside = mch or unknown == "row",
    segments = util.map(module:output_segments(), function(row) return row - module.output_global_offset end) }
end

--- The dtype of an output's table in the file, and whether its numbers are rounded for it.
local function dtype_of(func, out, wanted)
  local own = data_types[out.data_type]
  local dtype = type(wanted) == "table" and (wanted[out.table] or wanted.default) or wanted
  if dtype == nil or dtype == "as they are" or type(dtype) == "table" then dtype = own end
  if not file.table_dtypes[dtype] then
    P.fail(("%s: table '%s' as '%s', allowed: %s"):format(func, out.table, tostring(dtype),
      table.concat(util.keys(file.table_dtypes), ", ")))
  end
  return dtype, dtype ~= own and dtype ~= "f32"
end

--- Number of `key` in a list that knows its entries by keys; new ones are made by make().
local function number_of(list, key, make)
  if not list[key] then
    list[#list + 1] = make()
    list[key] = #list - 1
  end
  return list[key]
end

--- Refuse dtypes for tables that the file does not have, such as a misspelt one: the table that was meant would stay as
--- it is.
local function check_names(func, wanted, tables)
  if type(wanted) ~= "table" then return end
  local names = {}
  for i, t in ipairs(tables) do names[i], names[t.name] = ("'%s'"):format(t.name), true end
  for name in util.ordered(wanted) do
    if name ~= "default" and not names[name] then
      P.fail(("%s: tables names '%s', which is no table of the model; those are: %s"):format(func, tostring(name),
        #names > 0 and table.concat(names, ", ") or "none"))
    end
  end
end

--- The tables of items that operations search, behind those of collections. names: of the model's state (file.Writer).
function M.items(func, a, kept, tables, names)
  for _, o in ipairs(kept) do
    if o.items then
      local t = util.resolve(o.items.constant):detach()
      local of = names:find(t, o.items.at, true)
      local source = of and not of.of and of.source or nil
      local name = source or ("items%d"):format(#tables)
      o.table = number_of(tables, source or o.items.at, function()
        local own = t:dtype()
        local dtype = type(a.tables) == "table" and (a.tables[name] or a.tables.default) or a.tables
        if type(dtype) ~= "string" or dtype == "as they are" then dtype = own end
        if not file.table_dtypes[dtype] then P.fail(("%s: items '%s' as '%s'"):format(func, name, dtype)) end
        return { name = name, weight = t, rows = t:size(1), columns = t:size(2), dtype = dtype, source = source,
          rounded = dtype ~= own and dtype ~= "f32", items = { constant = t, at = o.items.at, dtype = own,
            shape = t:shape(), used = ("%s: 'top_products'"):format(o.where or "the model") } }
      end)
    end
  end
  check_names(func, a.tables, tables)
end

--- Inputs as they are found, each once by its name.
local Inputs = util.class "ExportInputs"

function Inputs:init(func, optional)
  self.func, self.list, self.by_name, self.optional = func, {}, {}, {}
  for _, name in ipairs(optional or {}) do self.optional[name] = true end
end

--- The number of the input `name`; key: what it is part of, so that two of one name are found.
function Inputs:number(name, key, fields)
  local known = self.by_name[name]
  if known and known.key ~= key then
    P.fail(("%s: two inputs of the name '%s', of the batch's fields '%s' and '%s'; allowed: a name for each, as "
      .. "requests know inputs by their names"):format(self.func, name, known.key, key))
  end
  if not known then
    known = { index = #self.list, key = key }
    self.list[#self.list + 1], self.by_name[name] = fields, known
    if self.optional[name] then fields[#fields + 1] = { "optional", true } end
    self.optional[name] = nil
  end
  return known.index
end

--- The number of an input of whole numbers, or (kind "numbers") of f32.
function Inputs:members(name, kind, finite)
  local fields = file.object({ "name", name }, { "kind", kind })
  if kind == "numbers" then fields[3] = { "finite", finite } end
  return self:number(name, name, fields)
end

--- The features whose weights are values of the file, as a set. A collection that pools them takes their weights, too,
--- or none are given to it.
local function weights_asked(func, values, bags)
  local asked, known = {}, {}
  for _, v in util.ordered(values) do
    if v.weight then asked[v.given] = true end
  end
  for _, b in ipairs(bags) do
    known[b.feature] = true
    if asked[b.feature] and b.out.pooling and not b.out.weighted then
      P.fail(("%s: the model asks for the weights of feature '%s', which table '%s' pools without them; allowed: two "
        .. "features"):format(func, b.feature, b.out.table))
    end
  end
  for feature in util.ordered(asked) do
    if not known[feature] then
      P.fail(("%s: the model asks for the weights of feature '%s', whose ids no collection of it looks up"):format(func,
        feature))
    end
  end
  return asked
end

--- The inputs, the tables, the maps and the lists of the file: fills in the numbers that operations and values have for
--- them. And the batch's field that each input is of, by its name.
function M.inputs(func, a, kept, values, state)
  local inputs, tables, maps, rows, raw = Inputs(func, a.optional), {}, {}, {}, {}
  for _, v in util.ordered(values) do
    if v.dense then
      v.input = inputs:number(v.dense, v.dense, file.object({ "name", v.dense }, { "kind", "dense" },
        { "columns", v.columns }, { "finite", a.finite }))
    end
  end
  for _, o in ipairs(kept) do
    if o.whole then o.input = inputs:members(o.whole, "whole") end
  end
  local bags, length = {}, {}
  for _, o in ipairs(kept) do
    for _, b in ipairs(o.bags or {}) do bags[#bags + 1] = b end
  end
  local asked = weights_asked(func, values, bags)
  for _, b in ipairs(bags) do
    local out = b.out
    rows[b.feature] = math.min(rows[b.feature] or math.huge, out.rows)
    if raw[b.feature] ~= nil and raw[b.feature] ~= (out.map ~= nil) then
      P.fail(("%s: the ids of feature '%s' are rows of one table, and raw for another"):format(func, b.feature))
    end
    raw[b.feature], length[b.feature] = out.map ~= nil, b.length or length[b.feature]
    b.index = number_of(tables, out.key, function()
      local dtype, rounded = dtype_of(func, out, a.tables)
      return { name = out.table, weight = weight_of(func, out, state, dtype), rows = out.rows, columns = out.columns,
        dtype = dtype, source = out.key, rounded = rounded }
    end)
    b.map = out.map and number_of(maps, out.map.key, function() return read_map(out.map, state) end)
  end
  for _, b in ipairs(bags) do
    b.input = inputs:number(b.feature, b.kjt, file.object({ "name", b.feature }, { "kind", "ids" },
      { "rows", rows[b.feature] }, { "unknown", a.unknown },
      { "weighted", b.out.weighted or asked[b.feature] or false }, { "finite", a.finite },
      length[b.feature] and { "length", length[b.feature] } or nil))
  end
  local of_values, first_of = lists.numbered(values, function(name) return (inputs.by_name[name] or {}).index end,
    function(name, kind) return inputs:members(name, kind, a.finite) end)
  for _, v in util.ordered(values) do
    if v.counts then table.insert(inputs.list[v.input + 1], { "counts", first_of(v.counts) }) end
  end
  local left = next(inputs.optional)
  if left then P.fail(("%s: optional names '%s', which is no input of the model"):format(func, tostring(left))) end
  local fields = {}
  for name, known in util.ordered(inputs.by_name) do fields[name] = known.key end
  return inputs.list, tables, maps, of_values, fields
end

return M
