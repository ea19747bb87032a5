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

local function metadata_of(t, s, geometry)
  local offsets, lengths = places[geometry](s)
  local m = { shard_offsets = offsets, shard_sizes = lengths, placement = "rank:" .. s.rank }
  if geometry == "row" and s.cols ~= t.embedding_dim then m.columns = { s.col_offset, s.cols, t.embedding_dim } end
  return m
end

--- Shards of all ranks that hold something. They are listed once: every state of the optimizer asks for them, of every
--- table.
local function shards_of(module, t)
  local entry = module.plan.tables[t.name]
  module._shards = module._shards or setmetatable({}, {}) -- a metatable: no place to look for parameters
  local known = module._shards[t.name]
  if known and known.entry == entry then return known.list end
  local list = {}
  for _, s in ipairs(entry:shards(t, ShardingEnv.from_process_group(module.group))) do
    if s.rows > 0 and s.cols > 0 then list[#list + 1] = s end
  end
  module._shards[t.name] = { entry = entry, list = list }
  return list
end

local none = { pieces = {} }

--- The pieces of a table on this rank: "row_offset:col_offset" -> piece, and one of them. They are listed once.
local function local_pieces(module, t)
  module:settle()
  if not module._pieces then
    module._pieces = setmetatable({}, {}) -- a metatable: no place to look for parameters
    for _, s in ipairs(module:local_shards()) do
      if s.rows > 0 then
        local own = module._pieces[s.table] or { pieces = {}, some = s }
        own.pieces[s.row_offset .. ":" .. s.col_offset] = s
        module._pieces[s.table] = own
      end
    end
  end
  local own = module._pieces[t.name] or none
  return own.pieces, own.some
end

--- A ShardedTensor for table `t`: metadata of all shards, and make(piece, metadata) -> what local_shards has for one of
--- this rank.
local function spread(module, t, geometry, dtype, make)
  local pieces, metadata, own = local_pieces(module, t), {}, {}
  for i, s in ipairs(shards_of(module, t)) do
    metadata[i] = metadata_of(t, s, geometry)
    local piece = s.rank == module.group:rank() and pieces[s.row_offset .. ":" .. s.col_offset]
    if piece then own[#own + 1] = make(piece, metadata[i]) end
  end
  return ShardedTensor { size = sizes[geometry](t), dtype = dtype, shards_metadata = metadata, local_shards = own,
    group = module.group, device = module.device or nil, settle = function() module:check_moment() end,
    stored = module:in_files(), mark = function() return module:_map_mark(t.name) end }
end

--- State `name` of table `t`, "weight" or one of its optimizer, and the group that has it alike (nil: nobody else has
--- it). Of a replica it is a tensor.
local function state_of(module, t, name, geometry, dtype)
  local _, some = local_pieces(module, t)
  if some and some.replica then
    return P.lasting(some.state, name), rawget(module, "_all_group") or module.group
  end
  local whole = spread(module, t, geometry, dtype, function(piece, metadata)
    return { metadata = metadata, tensor = not piece.cached and P.lasting(piece.state, name) or nil,
      source = piece.cached and function() return piece.source(name) end or nil,
      read = function(row, result) return piece.read(name, row, result) end,
      write = function(row, source) piece.write(name, row, source) end }
  end)
  return whole, rawget(module, "_pieces_group") or nil
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
  local pieces, blocks, of_column = local_pieces(module, t), {}, {}
  for _, s in ipairs(shards_of(module, t)) do
    local block = of_column[s.col_offset]
    if not block then
      block = { first = s.col_offset, metadata = {}, own = {}, bytes = embed_config._row_bytes(data_type, s.cols),
        format = embed_config._row_format(data_type, s.cols) }
      of_column[s.col_offset], blocks[#blocks + 1] = block, block
    end
    local piece = s.rank == module.group:rank() and pieces[s.row_offset .. ":" .. s.col_offset]
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
  local _, some = local_pieces(module, t)
  if some and some.replica then
    return P.lasting(Tensor.tensor, { some.iteration() }, "i64", "cpu"), rawget(module, "_all_group") or module.group
  end
  local whole = spread(module, t, "scalar", "i64", function(piece, metadata)
    local n = P.lasting(Tensor.tensor, { piece.iteration() }, "i64", module.device or nil)
    return { metadata = metadata, tensor = n, read = function(_, result) return result:copy(n) end,
      write = function() end }
  end)
  return whole, rawget(module, "_pieces_group") or nil
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
