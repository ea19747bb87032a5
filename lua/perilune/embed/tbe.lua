-- tbe.lua: table batches: embedding tables of one device, looked up and updated together (perilune/embed.h). Modules
-- are built on it.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local config = require "perilune.embed.config"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local M = {}
local methods = {}
local wrap, ctype, ptr, wrap_lasting = P.handle("peri_tbe", methods, nil, "a table batch")
local block_methods = {}
local wrap_blocks, block_type, blocks_ptr = P.handle("peri_tbe_blocks", block_methods, nil, "a block list")
local batch_methods = {}
local wrap_batch, batch_type, batch_ptr = P.handle("peri_tbe_batch", batch_methods, nil, "a batch of lookups")
signature.handle("TableBatch", ctype)
signature.handle("BlockList", block_type)
signature.handle("LookupBatch", batch_type)

local out = ffi.new "peri_tbe *[1]"
local blocks_out = ffi.new "peri_tbe_blocks *[1]"
local batch_out = ffi.new "peri_tbe_batch *[1]"
local tensor_out = ffi.new "peri_tensor *[1]"
local input = ffi.new "peri_tbe_input"
local stats = P.struct "peri_tbe_stats"
local sparse = ffi.new "peri_tbe_sparse"
local dims = ffi.new "int64_t[2]"

function M.is(x) return ffi.istype(ctype, x) end

local arguments = {
  tables = util.required.list, -- list of { name, rows, cols, row_offset, col_offset, total_rows, total_cols, pooling,
                               -- init }
  fused_params = util.required.table,
  features = util.optional,     -- names for messages
  data_type = "FP32",           -- FP32, FP16, BF16; INT8, INT8_HALF, FP8, INT4, INT2: rows of bytes, which start as
                                -- zeros
  output_dtype = util.optional, -- of lookup(): FP32, FP16, BF16; default: that of fused_params, or FP32
  seed = util.optional.seed,    -- default: that of the running rank
  device = util.optional,
  mapped = false,               -- rows in the host's memory, where the device's kernels reach them (fused_uvm)
}
local poolings = P.options "pooling"
local table_arguments = {
  name = util.required.string, rows = util.required, cols = util.required, row_offset = 0, col_offset = 0,
  total_rows = 0, total_cols = 0, pooling = "SUM", init = util.optional, raw_ids = false,
}

--- A table batch. `init` of a table: embed.uniform and its like; nil: uniform in +-sqrt(1 / total_rows).
function M.new(args)
  local a = util.named("table batch", args, arguments)
  local tables = P.structs("peri_table_config", math.max(#a.tables, 1))
  for i, given in ipairs(a.tables) do
    local t, slot = util.named("table batch: a table", given, table_arguments), tables[i - 1]
    slot.name = t.name
    for _, field in ipairs { "rows", "cols", "row_offset", "col_offset", "total_rows", "total_cols" } do
      signature.value("table batch", ("%s of table '%s'"):format(field, t.name), t[field], "integer")
    end
    slot.rows, slot.cols, slot.row_offset, slot.col_offset = t.rows, t.cols, t.row_offset, t.col_offset
    slot.total_rows, slot.total_cols = t.total_rows, t.total_cols
    slot.pooling = poolings[util.one_of("table batch", "pooling", t.pooling, { "SUM", "MEAN", "NONE" })]
    slot.raw_ids = t.raw_ids
    if t.init then slot.init, slot.init_a, slot.init_b = t.init.kind, t.init.a, t.init.b end
  end
  local features = a.features or {}
  local names = ffi.new("const char *[?]", math.max(#features, 1))
  for i, name in ipairs(features) do names[i - 1] = name end
  local c = P.struct "peri_tbe_config"
  local caches -- lives until the end of this function
  c.device = P.device(a.device)
  local format = config.row_formats[a.data_type]
  c.dtype = format or P.dtype(config.data_types[a.data_type] or a.data_type)
  for i = 1, format and #a.tables or 0 do
    if not a.tables[i].init then tables[i - 1].init = C.PERI_INIT_NONE end
  end
  c.n_tables, c.tables, c.n_features, c.features = #a.tables, tables, #features, names
  local optimizer, bounds, _, cache, output = config.fused_params("table batch: fused_params", a.fused_params)
  output = a.output_dtype or output or "FP32"
  c.output_dtype = P.dtype(config.data_types[output] or output)
  c.optimizer, c.bounds_check = optimizer, bounds
  if cache then
    caches = P.structs("peri_cache_config", math.max(#a.tables, 1))
    for i in ipairs(a.tables) do config._fill_cache_params("table batch", caches[i - 1], cache, a.data_type) end
    c.caches = caches
  end
  c.seed, c.mapped = a.seed or P.state.seed, a.mapped
  check(C.peri_tbe_new(c, out))
  return (wrap(out[0]))
end

--- The states that the optimizer of `params` keeps for a table of `data_type`, without the weights: a list of { name =,
--- geometry =, dtype = }, the same on every rank.
function M.states_of(params, data_type)
  local own, list = util.copy(params), {}
  own.cache_params = nil -- a table in memory has the same states
  local small = M.new { tables = { { name = "states", rows = 1, cols = 4 } }, fused_params = own, data_type = data_type,
    device = "cpu" }
  for _, name in ipairs(small:state_names()) do
    if name ~= "weight" then
      list[#list + 1] = { name = name, geometry = small:state_geometry(name), dtype = small:state(1, name):dtype() }
    end
  end
  small:release()
  return list
end

local function block_number(i, block, name)
  if type(block) ~= "table" then P.fail(("blocks: entry %d is a %s, wanted a table"):format(i, type(block))) end
  return util.integer("blocks", ("%s of block %d"):format(name, i), block[name], -2 ^ 53)
end

--- A block list. Each block: { table (from 1), first_bag, bags, out_offset, out_stride, feature (from 1, optional) }.
function methods:blocks(list)
  local blocks = ffi.new("peri_tbe_block[?]", math.max(#list, 1))
  for i, b in ipairs(list) do
    local slot = blocks[i - 1]
    slot.table, slot.feature = block_number(i, b, "table") - 1, (b.feature and block_number(i, b, "feature") or 0) - 1
    slot.first_bag, slot.bags = block_number(i, b, "first_bag"), block_number(i, b, "bags")
    slot.out_offset, slot.out_stride = block_number(i, b, "out_offset"), block_number(i, b, "out_stride")
  end
  check(C.peri_tbe_blocks_new(ptr(self), blocks, #list, blocks_out))
  return wrap_blocks(blocks_out[0])
end

local function fill(ids, offsets, blocks, weights, scale)
  input.ids, input.offsets, input.blocks = Tensor.ptr(ids), Tensor.ptr(offsets), blocks_ptr(blocks)
  input.weights = weights and Tensor.ptr(weights) or nil
  input.scale = scale and Tensor.ptr(scale) or nil
  return input
end

--- A batch: what prefetch, lookup and backward pass of the same input share. Its methods are those below without the
--- input.
function methods:batch(ids, offsets, blocks, weights, scale)
  check(C.peri_tbe_batch_new(ptr(self), fill(ids, offsets, blocks, weights, scale), batch_out))
  return wrap_batch(batch_out[0])
end

function batch_methods:prefetch() check(C.peri_tbe_batch_prefetch(batch_ptr(self))) end
--- Do now what is else part of the backward pass: sort the ids by row.
function batch_methods:sort() check(C.peri_tbe_batch_sort(batch_ptr(self))) end
function batch_methods:lookup(rows, cols)
  dims[0], dims[1] = rows, cols or 0
  check(C.peri_tbe_batch_lookup(batch_ptr(self), cols and 2 or 1, dims, tensor_out))
  return Tensor.wrap(tensor_out[0])
end
--- Rows of the ids of a batch (a KeyedJaggedTensor, whose values they are), by key, into jts.
function batch_methods:lookup_jagged(features, indices, jts)
  check(C.peri_tbe_batch_lookup_jagged(batch_ptr(self), features.ptr, indices, jts))
end
function batch_methods:forward(result)
  check(C.peri_tbe_batch_forward(batch_ptr(self), Tensor.ptr(result)))
  return result
end
function batch_methods:backward(grad, grad_weights)
  check(C.peri_tbe_batch_backward(batch_ptr(self), Tensor.ptr(grad), grad_weights and Tensor.ptr(grad_weights) or nil))
end
function batch_methods:gradient(grad, grad_weights)
  check(C.peri_tbe_batch_gradient(batch_ptr(self), Tensor.ptr(grad), grad_weights and Tensor.ptr(grad_weights) or nil,
    tensor_out))
  return Tensor.wrap(tensor_out[0])
end

-- Batches that methods:prefetch made, until their lookup: by table batch a list of { ids, offsets, blocks, batch }, the
-- oldest first. Not more than cached tables hold rows for.
local MOST_AHEAD = 8
local ahead, any_ahead = setmetatable({}, { __mode = "k" }), false

--- The place of the prefetched batch of these handles; nil: there is none.
local function find(list, ids, offsets, blocks)
  for i = 1, list and #list or 0 do
    local x = list[i]
    if rawequal(x.ids, ids) and rawequal(x.offsets, offsets) and rawequal(x.blocks, blocks) then return i end
  end
end

local function take_ahead(self, ids, offsets, blocks)
  local list = ahead[self]
  local i = find(list, ids, offsets, blocks)
  return i and table.remove(list, i).batch
end

--- Pooled rows of shape {rows, cols} (or {rows} if cols is nil) on the tape: its backward pass updates the tables.
function methods:lookup(ids, offsets, blocks, rows, cols, weights, scale)
  local batch = any_ahead and take_ahead(self, ids, offsets, blocks)
  if batch then return batch:lookup(rows, cols) end
  dims[0], dims[1] = rows, cols or 0
  check(C.peri_tbe_lookup(ptr(self), fill(ids, offsets, blocks, weights, scale), cols and 2 or 1, dims, tensor_out))
  return Tensor.wrap(tensor_out[0])
end

--- Pooled rows into an existing tensor; not recorded.
function methods:forward(ids, offsets, blocks, result, weights, scale)
  local batch = any_ahead and take_ahead(self, ids, offsets, blocks)
  if batch then return batch:forward(result) end
  check(C.peri_tbe_forward(ptr(self), fill(ids, offsets, blocks, weights, scale), Tensor.ptr(result)))
  return result
end

--- Bring the rows of a later lookup of the same handles in the background; tables in memory have nothing to do. See
--- batch().
function methods:prefetch(ids, offsets, blocks, weights, scale)
  if not self:is_cached() or find(ahead[self], ids, offsets, blocks) then return end
  local batch = P.lasting(self.batch, self, ids, offsets, blocks, weights, scale)
  batch:prefetch()
  local list = ahead[self] or {}
  ahead[self], any_ahead = list, true
  if #list == MOST_AHEAD then table.remove(list, 1).batch:release() end
  list[#list + 1] = { ids = ids, offsets = offsets, blocks = blocks, batch = batch }
end

local release = methods.release
function methods:release()
  for _, x in ipairs(ahead[self] or {}) do x.batch:release() end -- they would keep the files open
  ahead[self] = nil
  release(self)
end

--- Write changed rows of tables in files; see peri_tbe_flush.
function methods:flush() check(C.peri_tbe_flush(ptr(self))) end

--- Update the tables with the gradient of a lookup's output. `grad_weights` (optional) receives the gradient of the
--- ids' weights.
function methods:backward(ids, offsets, blocks, grad, weights, scale, grad_weights)
  check(C.peri_tbe_backward(ptr(self), fill(ids, offsets, blocks, weights, scale), Tensor.ptr(grad),
    grad_weights and Tensor.ptr(grad_weights) or nil))
end

--- While on, backward passes are kept; apply_accumulated updates the tables with all of them as with one large batch,
--- to the last bit.
function methods:accumulate(on) check(C.peri_tbe_accumulate_set(ptr(self), on)) end
function methods:apply_accumulated() check(C.peri_tbe_accumulated_apply(ptr(self))) end
function methods:accumulated() return tonumber(C.peri_tbe_accumulated(ptr(self))) end

--- The dense gradient of all tables and their marks, as one flat tensor; see peri_tbe_gradient.
function methods:gradient(ids, offsets, blocks, grad, weights, scale, grad_weights)
  check(C.peri_tbe_gradient(ptr(self), fill(ids, offsets, blocks, weights, scale), Tensor.ptr(grad),
    grad_weights and Tensor.ptr(grad_weights) or nil, tensor_out))
  return Tensor.wrap(tensor_out[0])
end
--- The gradient as sparse rows: for each table { rows (i64 [n], ascending, each once), values (f32 [n, cols]) }.
--- Nothing is updated.
function methods:sparse_gradient(ids, offsets, blocks, grad, weights, scale, grad_weights)
  check(C.peri_tbe_gradient_sparse(ptr(self), fill(ids, offsets, blocks, weights, scale), Tensor.ptr(grad),
    grad_weights and Tensor.ptr(grad_weights) or nil, sparse))
  local rows, values, first = Tensor.wrap(sparse.rows), Tensor.wrap(sparse.values), Tensor.wrap(sparse.first)
  local edges, result = first:to_list(), {}
  for t = 1, #edges - 1 do
    local from, past = edges[t], edges[t + 1]
    local cols = methods.state(self, t, "weight"):size(2)
    result[t] = { rows:slice(1, from, past), values:slice(1, from, past):slice(2, 0, cols) }
  end
  return result
end
function methods:apply_gradient(gradient) check(C.peri_tbe_gradient_apply(ptr(self), Tensor.ptr(gradient))) end
--- Table t's (from 1) part of it.
function methods:gradient_table(gradient, t)
  check(C.peri_tbe_gradient_table(ptr(self), Tensor.ptr(gradient), t - 1, tensor_out))
  return Tensor.wrap(tensor_out[0])
end

--- A view of the state `name` ("weight", "momentum1", ...) of table t (from 1).
function methods:state(t, name)
  check(C.peri_tbe_state(ptr(self), t - 1, name or "weight", tensor_out))
  return Tensor.wrap(tensor_out[0])
end
--- Whether the weights have leaves: optimizer none, f32.
function methods:has_leaves()
  if C.peri_tbe_leaf(ptr(self), 0, tensor_out) < 0 then return false end
  C.peri_tensor_release(tensor_out[0])
  return true
end
--- The leaf of table t's weights (optimizer none).
function methods:leaf(t)
  check(C.peri_tbe_leaf(ptr(self), t - 1, tensor_out))
  return Tensor.wrap(tensor_out[0])
end
--- Copy rows from `row` (from 0) on into `result`, or overwrite them.
function methods:read(t, name, row, result)
  check(C.peri_tbe_read(ptr(self), t - 1, name, row, Tensor.ptr(result)))
  return result
end
function methods:write(t, name, row, source)
  check(C.peri_tbe_write(ptr(self), t - 1, name, row, Tensor.ptr(source)))
end
--- What peri_moment_add_table takes: the table batch, the table and the state's name.
function methods:source(t, name) return ptr(self), t - 1, name end
--- Rows (i64) of table t (from 1) start again, weights and states; see peri_tbe_rows_reset.
function methods:reset_rows(t, rows) check(C.peri_tbe_rows_reset(ptr(self), t - 1, Tensor.ptr(rows))) end
local described = P.struct "peri_table_config"
local pooling_names = { [C.PERI_POOLING_SUM] = "SUM", [C.PERI_POOLING_MEAN] = "MEAN", [C.PERI_POOLING_NONE] = "NONE" }
--- What table t (from 1) is: { name =, rows =, cols =, pooling = }; nil: there is no such table.
function methods:table(t)
  if C.peri_tbe_table(ptr(self), t - 1, described) < 0 then return nil end
  return { name = ffi.string(described.name), rows = tonumber(described.rows), cols = tonumber(described.cols),
    pooling = pooling_names[described.pooling] }
end
--- Shape of the state `name` of table t (from 1): { rows, cols } or { rows }.
function methods:state_shape(t, name)
  local n = check(C.peri_tbe_state_shape(ptr(self), t - 1, name, dims))
  return { tonumber(dims[0]), n == 2 and tonumber(dims[1]) or nil }
end
--- Names of the states that the optimizer keeps, "weight" first.
function methods:state_names()
  local names, i = {}, 0
  local name = C.peri_tbe_state_name(ptr(self), 0)
  while name ~= nil do
    i = i + 1
    names[i] = ffi.string(name)
    name = C.peri_tbe_state_name(ptr(self), i)
  end
  return names
end

local geometries = { [C.PERI_STATE_FULL] = "full", [C.PERI_STATE_ROW] = "row", [C.PERI_STATE_SQUARE] = "square",
  [C.PERI_STATE_SCALAR] = "scalar" }
--- What the state `name` of a peri_tbe * has numbers for: "full" (each element of a table), "row", "square" (each pair
--- of columns), "scalar" (the table).
--- The peri_tbe * of a table batch; an error after its release.
M._pointer = ptr
--- A handle of a peri_tbe * (taken) that no scope releases.
M._lasting = wrap_lasting
M.wrap, M.ptr = wrap, ptr

function M._geometry_of(tbe, name) return geometries[check(C.peri_tbe_state_geometry(tbe, name))] end
function methods:state_geometry(name) return M._geometry_of(ptr(self), name) end

function methods:learning_rate() return C.peri_tbe_learning_rate(ptr(self)) end
function methods:set_learning_rate(rate) check(C.peri_tbe_learning_rate_set(ptr(self), rate)) end
--- An error while weights and iteration are of different moments; see peri_tbe_settled.
function methods:settled() check(C.peri_tbe_settled(ptr(self))) end
function methods:iteration() return tonumber(C.peri_tbe_iteration(ptr(self))) end
function methods:set_iteration(iteration) check(C.peri_tbe_iteration_set(ptr(self), iteration)) end

local counts = {
  "lookups", "updates", "ids", "bags", "rows_updated", "bad_ids", "bad_bags", "weight_bytes", "state_bytes",
  "workspace_bytes",
}
--- Counts since the table batch was made; waits for queued work.
function methods:statistics()
  check(C.peri_tbe_statistics(ptr(self), stats))
  local result = {}
  for _, name in ipairs(counts) do result[name] = tonumber(stats[name]) end
  return result
end

local cache_stats = P.struct "peri_tbe_cache_stats"
local cache_counts = {
  "slots", "resident", "hits", "misses", "prefetched", "prefetch_hits", "conflict_misses", "set_conflicts", "evictions",
  "initialised", "rows_read", "rows_written", "bytes_read", "bytes_written", "wait_ns",
}
--- Counts of the cache of table t (from 1), or of all tables together; nil for tables in memory. `io` says how files
--- are read.
function methods:cache_statistics(t) return M._cache_statistics_of(ptr(self), (t or 0) - 1) end

--- The same for a peri_tbe * and a table from 0, or -1.
function M._cache_statistics_of(tbe, t)
  local io = C.peri_tbe_cache_io(tbe)
  if io == nil then return nil end
  check(C.peri_tbe_cache_statistics(tbe, t, cache_stats))
  local result = { io = ffi.string(io) }
  for _, name in ipairs(cache_counts) do result[name] = tonumber(cache_stats[name]) end
  return result
end

local file_info, ids_mark = ffi.new "peri_table_file", ffi.new "peri_ids_mark"
--- What the file of table t (from 0) of a peri_tbe * says: { path, flush, iteration, sum, ids_iteration }; nil: it has
--- none with a name.
function M._file_of(tbe, t)
  check(C.peri_tbe_table_file(tbe, t, file_info))
  if file_info.path == nil then return nil end
  return { path = ffi.string(file_info.path), flush = tonumber(file_info.flush),
    iteration = tonumber(file_info.iteration), sum = file_info.ids.sum,
    ids_iteration = tonumber(file_info.ids.iteration) }
end
--- What the file of table t (from 1) says, as M._file_of.
function methods:file(t) return M._file_of(ptr(self), t - 1) end
--- The map of raw ids whose rows table t (from 1) has, for the next flush.
function methods:mark_ids(t, sum, iteration)
  ids_mark.sum, ids_mark.iteration = sum, iteration
  check(C.peri_tbe_ids_mark_set(ptr(self), t - 1, ids_mark))
end

--- Whether the rows are behind a cache.
function methods:is_cached() return C.peri_tbe_cache_io(ptr(self)) ~= nil end

signature.pointer("TablesPointer", "peri_tbe")
signature.check("embed.tbe.", M, { states_of = "params: table, data_type: string?",
  _geometry_of = "tables: TablesPointer, name: string", _cache_statistics_of = "tables: TablesPointer, t: integer",
  _file_of = "tables: TablesPointer, t: int" })
signature.check("a batch of lookups:", batch_methods, {
  prefetch = "self: LookupBatch", sort = "self: LookupBatch",
  lookup = "self: LookupBatch, rows: integer, cols: integer?", forward = "self: LookupBatch, result: tensor",
  backward = "self: LookupBatch, grad: tensor, grad_weights: tensor?",
  gradient = "self: LookupBatch, grad: tensor, grad_weights: tensor?",
})
local input_of = "ids: tensor, offsets: tensor, blocks: BlockList"
local factors = "weights: tensor?, scale: tensor?"
local of_states = "self: TableBatch, t: int, name: string?"
signature.check_each("table batch:", methods, { "flush", "apply_accumulated", "accumulated", "state_names",
  "learning_rate", "iteration", "settled", "statistics", "is_cached" }, "self: TableBatch")
signature.check("table batch:", methods, {
  blocks = "self: TableBatch, list: list", lookup = "self: TableBatch, " .. input_of
  .. ", rows: integer, cols: integer?, " .. factors, forward = "self: TableBatch, " .. input_of .. ", result: tensor, "
  .. factors, prefetch = "self: TableBatch, " .. input_of .. ", " .. factors, batch = "self: TableBatch, " .. input_of
  .. ", " .. factors, backward = "self: TableBatch, " .. input_of .. ", grad: tensor, " .. factors
  .. ", grad_weights: tensor?", gradient = "self: TableBatch, " .. input_of .. ", grad: tensor, " .. factors
  .. ", grad_weights: tensor?", sparse_gradient = "self: TableBatch, " .. input_of .. ", grad: tensor, " .. factors
  .. ", grad_weights: tensor?", accumulate = "self: TableBatch, on: boolean",
  apply_gradient = "self: TableBatch, gradient: tensor", gradient_table = "self: TableBatch, gradient: tensor, t: int",
  state = of_states, leaf = "self: TableBatch, t: int",
  read = "self: TableBatch, t: int, name: string, row: integer, result: tensor",
  write = "self: TableBatch, t: int, name: string, row: integer, source: tensor",
  reset_rows = "self: TableBatch, t: int, rows: tensor", state_shape = "self: TableBatch, t: int, name: string",
  state_geometry = "self: TableBatch, name: string", file = "self: TableBatch, t: int",
  mark_ids = "self: TableBatch, t: int, sum: any, iteration: integer",
  set_learning_rate = "self: TableBatch, rate: number", set_iteration = "self: TableBatch, iteration: integer",
  cache_statistics = "self: TableBatch, t: int?",
})

return util.face("peri.embed.tbe", M)
