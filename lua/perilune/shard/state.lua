-- state.lua: the state of sharded modules under the names of the unsharded ones: tables as ShardedTensors (whole
-- tensors, where every rank has a replica), and the optimizer of the fused tables.
local P = require "perilune.ffi"
local util = require "perilune.util"
local sharding_types = require "perilune.plan.sharding_types"
local Tensor = require "perilune.tensor"
local sharded = require "perilune.tensor.sharded"
local row_format = require "perilune.tensor.row_format"
local embed_config = require "perilune.embed.config"
local tbes = require "perilune.embed.tbe"
local FusedOptimizer = require("perilune.embed.fused").FusedOptimizer
local ShardingEnv = require "perilune.plan.env"

local M = {}
local ShardedTensor = sharded.ShardedTensor

--- Sizes of the whole of a state, by its geometry.
local sizes = {
  full = function(t) return { t.num_embeddings, t.embedding_dim } end,
  row = function(t) return { t.num_embeddings } end,
  square = function(t) return { t.embedding_dim, t.embedding_dim } end,
  scalar = function() return { 1 } end,
}

--- What the piece `s` of a table has of a state.
local places = {
  full = function(s) return { s.row_offset, s.col_offset }, { s.rows, s.cols } end,
  row = function(s) return { s.row_offset }, { s.rows } end,
  square = function(s) return { s.col_offset, s.col_offset }, { s.cols, s.cols } end,
  scalar = function() return { 0 }, { 1 } end,
}

local placements = setmetatable({}, { __index = function(list, rank)
  list[rank] = "rank:" .. rank
  return list[rank]
end })

local function metadata_of(t, s, geometry)
  local offsets, lengths = places[geometry](s)
  local m = { shard_offsets = offsets, shard_sizes = lengths, placement = placements[s.rank] }
  if geometry == "row" and s.cols ~= t.embedding_dim then m.columns = { s.col_offset, s.cols, t.embedding_dim } end
  return m
end

--- The pieces of a table on this rank: a list. They are listed once.
local none = {}
local function local_pieces(module, t)
  module:settle()
  if not module._pieces then
    module._pieces = setmetatable({}, {}) -- a metatable: no place to look for parameters
    for _, s in ipairs(module:local_shards()) do
      if s.rows > 0 then
        local list = module._pieces[s.table] or {}
        list[#list + 1], module._pieces[s.table] = s, list
      end
    end
  end
  return module._pieces[t.name] or none
end

--- Of a list of shards those that are on this rank: their numbers, and the pieces that they are here.
local function shards_here(module, pieces, shards)
  local at, numbers, here = {}, {}, {}
  for _, piece in ipairs(pieces) do
    local row = at[piece.row_offset] or {}
    at[piece.row_offset], row[piece.col_offset] = row, row[piece.col_offset] or piece
  end
  for i, s in ipairs(shards) do
    local row = s.rank == module.group:rank() and at[s.row_offset]
    local piece = row and row[s.col_offset]
    if piece then numbers[#numbers + 1], here[#here + 1] = i, piece end
  end
  return numbers, here
end

local first = { 1 }

--- Shards of all ranks that hold something, and of those on this rank what shards_here returns. A piece of this rank
--- that is a whole table is the only one: the plan is not asked. Of other tables those of the last one are kept: who
--- asks for one state of a table, or for one piece of it, often asks for the next, too.
local function shards_of(module, t)
  local pieces, entry, known = local_pieces(module, t), module.plan.tables[t.name], rawget(module, "_shards")
  local only = pieces[1]
  if only and not only.replica and only.rows == t.num_embeddings and only.cols == t.embedding_dim then
    return pieces, first, pieces
  end
  if not known then
    known = setmetatable({ env = ShardingEnv.from_process_group(module.group) }, {})
    rawset(module, "_shards", known) -- a metatable: no place to look for parameters
  end
  if known.entry ~= entry or known.t ~= t or known.pieces ~= pieces then
    local list = {}
    for _, s in ipairs(entry:shards(t, known.env)) do
      if s.rows > 0 and s.cols > 0 then list[#list + 1] = s end
    end
    known.list, known.numbers, known.here = list, shards_here(module, pieces, list)
    known.entry, known.t, known.pieces = entry, t, pieces
  end
  return known.list, known.numbers, known.here
end

--- What local_shards has for a piece of this rank. All but the metadata is made when somebody asks for it.
local Shard = { __index = function(shard, key)
  local make = rawget(shard, "_kind").shard[key]
  local value = make and make(rawget(shard, "_piece"), rawget(shard, "_kind"), rawget(shard, "_module"))
  rawset(shard, key, value)
  return value
end }

--- The ShardedTensor of a state of a table: { module, table's configuration, kind }. All that it says it asks the
--- module for: a model may have 100,000 tables with several states each, and a state_dict has all of them.
--- A kind: { name =, geometry =, dtype =, shard = field of a shard -> function(piece, kind, module) -> its value }.
local TableState = util.class("ShardedTensor", ShardedTensor)

local function shard_with(self, piece, metadata)
  return setmetatable({ metadata = metadata, _piece = piece, _kind = self[3], _module = self[1] }, Shard)
end

--- The metadata of all shards, and the shards of this rank.
function TableState:_layout()
  local metadata, own = {}, {}
  local shards, numbers, pieces = shards_of(self[1], self[2])
  for i, s in ipairs(shards) do metadata[i] = metadata_of(self[2], s, self[3].geometry) end
  for k, piece in ipairs(pieces) do own[k] = shard_with(self, piece, metadata[numbers[k]]) end
  return metadata, own
end

--- Shard `k` of this rank alone: a save asks for each of the shards of a table.
function TableState:_local_shard(k)
  local shards, numbers, pieces = shards_of(self[1], self[2])
  return shard_with(self, pieces[k], metadata_of(self[2], shards[numbers[k]], self[3].geometry))
end

--- The tensor of that shard alone; nil: its rows are in a file.
function TableState:_local_tensor(k)
  local _, _, pieces = shards_of(self[1], self[2])
  local make = self[3].shard.tensor
  return make and make(pieces[k], self[3], self[1])
end

local fields = {
  _size = function(self) return sizes[self[3].geometry](self[2]) end,
  _dtype = function(self) return self[3].dtype end,
  _group = function(self) return self[1].group end,
  _device = function(self) return self[1].device or nil end,
  _stored = function(self) return self[1]:in_files() end,
  _mark = function(self) return function() return self[1]:_map_mark(self[2].name) end end,
  _settle = function(self) return function() self[1]:check_moment() end end,
  _shards_metadata = function(self) return (self:_layout()) end,
  _local_shards = function(self) return select(2, self:_layout()) end,
}
function TableState:__index(key)
  local field = fields[key]
  if field then return field(self) end
  return TableState[key]
end

local of_state = {
  tensor = function(piece, kind) return not piece.cached and P.lasting(piece.state, kind.name) or nil end,
  source = function(piece, kind) return piece.cached and function() return piece.source(kind.name) end or nil end,
  read = function(piece, kind) return function(row, result) return piece.read(kind.name, row, result) end end,
  write = function(piece, kind) return function(row, source) piece.write(kind.name, row, source) end end,
}

--- The kinds of states that there are, each once.
local kinds = {}
local function kind_of(name, geometry, dtype)
  local key = name .. " " .. geometry .. " " .. dtype
  kinds[key] = kinds[key] or { name = name, geometry = geometry, dtype = dtype, shard = of_state }
  return kinds[key]
end

local function number_tensor(piece, _, module)
  return P.lasting(Tensor.tensor, { piece.iteration() }, "i64", module.device or nil)
end
--- The number of updates: a state of one number, which is the table batch's.
local ITERATION = { name = "step", geometry = "scalar", dtype = "i64", shard = { tensor = number_tensor,
  read = function(...)
    local n = number_tensor(...)
    return function(_, result) return result:copy(n) end
  end, write = function() return function() end end } }

--- A state of table `t` that is spread over ranks, and the group that has it alike (nil: nobody else has it).
local function spread(module, t, kind)
  return setmetatable({ module, t, kind }, TableState), rawget(module, "_pieces_group") or nil
end

--- State `name` of table `t`, "weight" or one of its optimizer, and the group that has it alike (nil: nobody else has
--- it). Of a replica it is a tensor.
local function state_of(module, t, name, geometry, dtype)
  local some = local_pieces(module, t)[1]
  if some and some.replica then
    return P.lasting(some.state, name), rawget(module, "_all_group") or module.group
  end
  return spread(module, t, kind_of(name, geometry, dtype))
end

--- What a state_dict has of a sharded module: a list of { name =, tensor = }.
function M.list_state(module)
  return util.map(module.tables, function(t)
    local tensor, alike = state_of(module, t, "weight", "full", embed_config.data_types[t.data_type])
    return { name = module:_parameter_name(t.name), tensor = tensor, alike = alike }
  end)
end

--- The blocks of columns into which table `t` is cut, from the first column on, each a ShardedTensor of its own.
local function blocks_of(module, t, data_type)
  local shards, numbers, pieces = shards_of(module, t)
  local blocks, of_column, here = {}, {}, {}
  for k, piece in ipairs(pieces) do here[numbers[k]] = piece end
  for i, s in ipairs(shards) do
    local block = of_column[s.col_offset]
    if not block then
      block = { first = s.col_offset, metadata = {}, own = {}, bytes = embed_config._row_bytes(data_type, s.cols),
        format = embed_config._row_format(data_type, s.cols) }
      of_column[s.col_offset], blocks[#blocks + 1] = block, block
    end
    local piece = here[i]
    local m = { shard_offsets = { s.row_offset, 0 }, shard_sizes = { s.rows, block.bytes },
      placement = "rank:" .. s.rank }
    table.insert(block.metadata, m)
    if piece then table.insert(block.own, sharded.shard_of(m, P.lasting(piece.state, "weight"))) end
  end
  table.sort(blocks, function(a, b) return a.first < b.first end)
  return util.map(blocks, function(block)
    return row_format.note(ShardedTensor { size = { t.num_embeddings, block.bytes }, dtype = "u8",
      shards_metadata = block.metadata, local_shards = block.own, group = module.group,
      device = module.device or nil }, block.format)
  end)
end

--- What a state_dict has of a sharded module of quantized tables. Parts of rows of bytes, each with its scale and bias,
--- do not add up to whole ones, so blocks of columns stay apart: the k-th has ".k" behind its name.
function M.of_quantized(module)
  local list = {}
  for _, t in ipairs(module.tables) do
    local name, data_type = module:_parameter_name(t.name), t.data_type
    local tensors = embed_config.data_types[data_type]
      and { state_of(module, t, "weight", "full", embed_config.data_types[data_type]) }
      or blocks_of(module, t, data_type)
    for k, tensor in ipairs(tensors) do
      list[#list + 1] = { name = k > 1 and ("%s.%d"):format(name, k - 1) or name, tensor = tensor }
    end
  end
  return list
end

-- -- dense tables -----------------------------------------------------------------------------------------------------

function M.place_of(name, row, column) return ("%s:%d:%d"):format(name, row, column) end
function M.table_at(place) return place:match "^(.*):%d+:%d+$" end

--- Dense tables whose pieces are parameters: see nn/spread.lua. parameters: place_of(a piece) -> it.
function M._spread_parameters(module, parameters)
  local list = {}
  for _, t in ipairs(module.tables) do
    local sharding, metadata, pieces = module.plan.tables[t.name], {}, {}
    if sharding.compute_kernel == "dense" and not sharding_types.of[sharding.sharding_type].replica then
      for i, s in ipairs(shards_of(module, t)) do
        metadata[i] = metadata_of(t, s, "full")
        local own = s.rank == module.group:rank() and parameters[M.place_of(t.name, s.row_offset, s.col_offset)]
        if own then pieces[#pieces + 1] = { tensor = own, metadata = metadata[i] } end
      end
      list[#list + 1] = { name = module:_parameter_name(t.name), size = sizes.full(t), shards_metadata = metadata,
        pieces = pieces, group = module.group, device = module.device or nil, of = module }
    end
  end
  return list
end

-- -- the fused optimizer ----------------------------------------------------------------------------------------------

--- The number of updates of table `t`: like a state of one number.
local function iteration_of(module, t)
  local some = local_pieces(module, t)[1]
  if some and some.replica then
    return P.lasting(Tensor.tensor, { some.iteration() }, "i64", "cpu"), rawget(module, "_all_group") or module.group
  end
  return spread(module, t, ITERATION)
end

--- The FusedOptimizer of a sharded module: a group for each optimizer of its tables.
function M.fused_optimizer(module)
  local by_name, states, groups = {}, {}, {}
  for _, t in ipairs(module.tables) do by_name[t.name] = t end
  for i, o in ipairs(module.optimizers) do
    groups[i] = { tables = o.tables, optimizer = o.name, rate = function() return o.learning_rate end,
      set_rate = function(rate) module:set_learning_rate(rate, i) end }
    local of_type = {}
    for _, name in ipairs(o.tables) do
      local data_type = by_name[name].data_type
      of_type[data_type] = of_type[data_type] or tbes.states_of(o.params, data_type)
      states[name] = of_type[data_type]
    end
  end
  return FusedOptimizer {
    parameter_name = function(name) return module:_parameter_name(name) end, groups = groups,
    states = function(name)
      return util.map(states[name], function(s)
        local tensor, alike = state_of(module, by_name[name], s.name, s.geometry, s.dtype)
        return { name = s.name, tensor = tensor, alike = alike }
      end)
    end,
    iteration = function(name) return iteration_of(module, by_name[name]) end,
    set_iteration = function(n) module:set_iteration(n) end, group = module.group,
  }
end

return M
