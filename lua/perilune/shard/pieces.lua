-- pieces.lua: the pieces of tables that a sharded module has on this rank: looked at, and filled from an unsharded
-- module.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor"
local tbes = require "perilune.embed.tbe"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local M = {}
local tensor_out = Tensor.out

local piece = ffi.new "peri_local_shard"
local function state_name(x) return signature.value("local_shards", "the state's name", x, "string") end
local function row_number(x) return signature.value("local_shards", "row", x, "integer") end
local COPY_ROWS = 65536

--- The table batch of a piece, which keeps the module and asks whether it was released.
local function tbe_of(p)
  p._module_ptr(p._ref)
  return p._batch
end

--- What pieces do: name -> function(piece) -> the function of that name. They are made when somebody asks for them: a
--- rank may have 100,000 pieces.
local functions = {
  read = function(p)
    return function(name, row, result)
      check(C.peri_tbe_read(tbe_of(p), p._number, state_name(name), row_number(row), Tensor.ptr(result)))
      return result
    end
  end,
  write = function(p)
    return function(name, row, source)
      check(C.peri_tbe_write(tbe_of(p), p._number, state_name(name), row_number(row), Tensor.ptr(source)))
    end
  end,
  source = function(p) -- for peri_moment_add_table
    return function(name) return tbe_of(p), p._number, state_name(name) end
  end,
  shape = function(p)
    return function(name)
      local dims = ffi.new "int64_t[2]"
      local n = check(C.peri_tbe_state_shape(tbe_of(p), p._number, state_name(name), dims))
      return { tonumber(dims[0]), n == 2 and tonumber(dims[1]) or nil }
    end
  end,
  geometry = function(p) return function(name) return tbes._geometry_of(tbe_of(p), state_name(name)) end end,
  iteration = function(p) return function() return tonumber(C.peri_tbe_iteration(tbe_of(p))) end end,
  set_iteration = function(p) return function(n) check(C.peri_tbe_iteration_set(tbe_of(p), n)) end end,
  file = function(p) return function() return tbes._file_of(tbe_of(p), tonumber(p._number)) end end,
  cache_statistics = function(p)
    return function() return tbes._cache_statistics_of(tbe_of(p), tonumber(p._number)) end
  end,
  state = function(p)
    return function(name)
      check(C.peri_tbe_state(tbe_of(p), p._number, state_name(name), tensor_out))
      return Tensor.wrap(tensor_out[0])
    end
  end,
  leaf = function(p)
    return p.dense and function()
      check(C.peri_tbe_leaf(tbe_of(p), p._number, tensor_out))
      return Tensor.wrap(tensor_out[0])
    end or nil
  end,
  names = function(p)
    return function()
      local names, k = {}, 0
      while true do
        local name = C.peri_tbe_state_name(tbe_of(p), k)
        if name == nil then return names end
        k = k + 1
        names[k] = ffi.string(name)
      end
    end
  end,
}

local Piece = { __index = function(p, key)
  local make = functions[key]
  return make and make(p)
end }

--- The pieces of tables on this rank: a list of { table = name, rank, place (of one process), row_offset, rows,
--- col_offset, cols, dense, replica, state = function(name), read = function(name, row, tensor), write = function(name,
--- row, tensor), cached, cache_statistics, file = function() -> what tbe._file_of says }.
--- state("weight") and so on give live views of shards in memory; rows of shards in files (cached) are read and
--- written.
--- ref: the handle of the C module; module_ptr(ref): its pointer, or an error when it was released; tables: their
--- configurations.
function M.list(ref, module_ptr, tables)
  local list = {}
  for i = 1, C.peri_sharded_local_shards(module_ptr(ref)) do
    check(C.peri_sharded_local_shard(module_ptr(ref), i - 1, piece))
    list[i] = setmetatable({
      table = tables[piece.table + 1].name, rank = piece.shard.rank, place = piece.place,
      row_offset = tonumber(piece.shard.row_offset), rows = tonumber(piece.shard.rows),
      col_offset = tonumber(piece.shard.col_offset), cols = tonumber(piece.shard.cols),
      dense = piece.dense, replica = piece.replica, cached = C.peri_tbe_cache_io(piece.tbe) ~= nil,
      _ref = ref, _module_ptr = module_ptr, _batch = piece.tbe, _number = piece.tbe_table,
    }, Piece)
  end
  return list
end

--- f(table batch) of each piece on this rank whose updates are not a dense optimizer's; pieces may share one.
local function each_fused(ref, module_ptr, f, on)
  for i = 1, C.peri_sharded_local_shards(module_ptr(ref)) do
    check(C.peri_sharded_local_shard(module_ptr(ref), i - 1, piece))
    if not piece.dense then check(f(piece.tbe, on)) end
  end
end
local function set_accumulate(tbe, on) return C.peri_tbe_accumulate_set(tbe, on) end
local function apply_accumulated(tbe) return C.peri_tbe_accumulated_apply(tbe) end

--- Let backward passes be kept (or not any more), and update the tables with those that were.
function M.accumulate(ref, module_ptr, on) each_fused(ref, module_ptr, set_accumulate, on) end
function M.apply_accumulated(ref, module_ptr) each_fused(ref, module_ptr, apply_accumulated) end

--- All states of the pieces `from` into those of a module of the same plan, on whatever device; none are in files.
function M.copy_all(from, to)
  for i, s in ipairs(from) do
    for _, name in ipairs(s.rows > 0 and s.names() or {}) do to[i].state(name):copy(s.state(name)) end
    if not s.dense then to[i].set_iteration(s.iteration()) end
  end
end

--- Write a shard's part of a state that has no rows: a matrix of columns, a number of the table.
local function copy_whole(collection, s, name)
  local whole = collection:table_state(s.table, name)
  if whole:dim() == 2 then
    whole = whole:slice(1, s.col_offset, s.col_offset + s.cols):slice(2, s.col_offset, s.col_offset + s.cols)
  end
  s.write(name, 0, whole)
end

--- Write a shard's rows of weights or of a state.
local function copy_rows(collection, s, name)
  for row = 0, s.rows - 1, COPY_ROWS do
    local from = collection:table_rows(s.table, name, s.row_offset + row, math.min(COPY_ROWS, s.rows - row))
    if from:dim() == 2 then from = from:slice(2, s.col_offset, s.col_offset + s.cols) end
    s.write(name, row, from)
  end
end

--- The elements of a tensor as f32, as a string of their bytes: two strings are equal when all bits are.
local function bytes_of(t)
  local host = t:to("f32", "cpu"):contiguous()
  local memory, n = host:read()
  return ffi.string(memory, 4 * n)
end

--- Whether the collection's weights of a piece of its table `t` (a configuration) are those that the table starts with.
function M.starts(s, collection, t)
  for row = 0, s.rows - 1, COPY_ROWS do
    local n = math.min(COPY_ROWS, s.rows - row)
    local from = collection:table_rows(s.table, "weight", s.row_offset + row, n):slice(2, s.col_offset, s.col_offset
      + s.cols)
    local fresh = tbes.new { data_type = t.data_type, seed = collection.seed or nil, device = "cpu",
      fused_params = { optimizer = "none" },
      tables = { { name = t.name, rows = n, cols = s.cols, row_offset = s.row_offset + row, col_offset = s.col_offset,
        total_rows = t.num_embeddings, total_cols = t.embedding_dim, init = t:initialiser() } } }
    local same = bytes_of(from) == bytes_of(fresh:state(1, "weight"))
    fresh:release()
    if not same then return false end
  end
  return true
end

--- Copy the parts that pieces have of an unsharded collection that has memory: weights and, if it has `states` of
--- optimizers, these. (It has none where the sharder gave the optimizer, or tables have their own.)
function M.copy(list, collection, states)
  for _, s in ipairs(list) do
    for _, name in ipairs(states and s.names() or { "weight" }) do
      local geometry = s.geometry(name)
      local copy = (geometry == "full" or geometry == "row") and copy_rows or copy_whole
      copy(collection, s, name)
    end
  end
end

return M
