-- batch.lua: batches on the host (which sources fill again and again) and the tensors made of them.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local signature = require "perilune.signature"
local C, check = P.C, P.check
-- in a worker of a loader: the device (a name) for which batches are made in pinned memory, or false
P.own { pin = false }

local M = {}

-- -- in host memory ---------------------------------------------------------------------------------------------------

local methods = {}
local wrap, host_type, host_ptr = P.handle("peri_batch", methods, nil, "a host batch")
local out = ffi.new "peri_batch *[1]"

--- The pointer of a live host batch, or an error.
M.host_ptr = host_ptr

--- Room in host memory for a batch of `rows` rows and (at first) `ids` ids. It outlives any scope. host.ptr is the
--- peri_batch of io.h: rows, ids, dense, labels, values, lengths, global_row, global_rows.
function M.host_batch(dense_features, sparse_features, rows, ids)
  check(C.peri_batch_new(dense_features, sparse_features, rows, ids, out))
  return P.lasting(wrap, out[0])
end

--- Room for at least n ids; host.ptr.values may move.
function methods:reserve(n) check(C.peri_batch_reserve(host_ptr(self), n)) end

local first, last = ffi.new "int64_t[1]", ffi.new "int64_t[1]"
--- The rows [first, last) that `rank` of `world` ranks takes of a global batch of `rows` rows.
function M.share(rows, rank, world)
  util.integer("data.share", "world", world, 1, 2 ^ 31 - 1)
  util.integer("data.share", "rank", rank, 0, world - 1)
  C.peri_batch_share(rows, rank, world, first, last)
  return tonumber(first[0]), tonumber(last[0])
end

-- -- as tensors -------------------------------------------------------------------------------------------------------

--- A batch as a model takes it: dense_features f32 [rows, dense], sparse_features (KeyedJaggedTensor), labels f32
--- [rows]. Numbers: rows (of this rank), global_rows (of all ranks together), global_row (place of the first row in the
--- pass), loss_scale: times the *sum* of this rank's losses it gives numbers whose mean over the ranks is the mean loss
--- of the global batch, however unevenly its rows are shared.
local Batch = util.class "Batch"
M.Batch = Batch

function Batch:init(dense, sparse, labels, rows, global_rows, global_row, loss_scale)
  self.dense_features, self.sparse_features, self.labels = dense, sparse, labels
  self.rows, self.global_rows, self.global_row, self.loss_scale = rows, global_rows, global_row, loss_scale
end

--- What print shows: how many samples there are, and what its tensors are, without their numbers.
function Batch:__tostring()
  local lines = { ("Batch of %d samples (%d of all ranks together, from sample %d on)"):format(self.rows,
    self.global_rows, self.global_row) }
  for _, name in ipairs { "dense_features", "sparse_features", "labels" } do
    lines[#lines + 1] = ("  %s: %s"):format(name, tostring(self[name]):match "^[^\n]*")
  end
  return table.concat(lines, "\n")
end

local function of_parts(self, dense, sparse, labels)
  return Batch(dense, sparse, labels, self.rows, self.global_rows, self.global_row, self.loss_scale)
end

--- The same batch on another device. non_blocking: from pinned memory without waiting (see Tensor:to).
function Batch:to(device, non_blocking)
  return of_parts(self, self.dense_features:to(nil, device, non_blocking),
    self.sparse_features:to(device, non_blocking), self.labels:to(nil, device, non_blocking))
end

--- A copy of this batch of cpu in memory that is pinned for `device` (default: the rank's).
function Batch:pin_memory(device)
  return of_parts(self, self.dense_features:pin_memory(device), self.sparse_features:pin_memory(device),
    self.labels:pin_memory(device))
end

--- Give its tensors up now instead of at the garbage collector's convenience.
function Batch:release()
  self.dense_features:release()
  self.sparse_features:release()
  self.labels:release()
end

local shape = ffi.new "int64_t[2]"
local tensor_out, kjt_out, kjt_args = Tensor.out, ffi.new "peri_kjt *[1]", P.struct "peri_kjt_config"

-- A new tensor pointer of cpu, of `shape`, with the bytes of host memory. pin: the device for which its memory is
-- pinned, or nil.
local function tensor_of(pin, dtype, ndim, memory, bytes)
  if pin then check(C.peri_tensor_new_pinned(pin, dtype, ndim, shape, tensor_out))
  else check(C.peri_tensor_new(P.device "cpu", dtype, ndim, shape, tensor_out)) end
  local t = tensor_out[0]
  local status = C.peri_tensor_write(t, memory, bytes)
  if status < 0 then C.peri_tensor_release(t) end
  check(status)
  return t
end

--- The ids of a host batch as a KeyedJaggedTensor: the constructor's C call by itself, since this runs for every batch.
local function sparse_of(b, keys, pin, rows, ids)
  shape[0] = ids
  local values = tensor_of(pin, C.PERI_I64, 1, b.values, ids * 8)
  shape[0] = b.sparse_features * rows
  local lengths = tensor_of(pin, C.PERI_I32, 1, b.lengths, b.sparse_features * rows * 4)
  kjt_args.keys, kjt_args.values, kjt_args.lengths, kjt_args.stride = keys.ptr, values, lengths, rows
  local status = C.peri_kjt_new(kjt_args, kjt_out)
  C.peri_tensor_release(values) -- the KeyedJaggedTensor has its own references
  C.peri_tensor_release(lengths)
  check(status)
  return jagged.KeyedJaggedTensor.wrap(kjt_out[0])
end

--- A host batch as a Batch of cpu. pin: the device for which its memory is pinned, or nil.
local function batch_of(b, keys, pin, world_size)
  local rows, global_rows = tonumber(b.rows), tonumber(b.global_rows)
  shape[0], shape[1] = rows, b.dense_features
  local dense = Tensor.wrap(tensor_of(pin, C.PERI_F32, 2, b.dense, rows * b.dense_features * 4))
  local labels = Tensor.wrap(tensor_of(pin, C.PERI_F32, 1, b.labels, rows * 4))
  local sparse = sparse_of(b, jagged.Keys.of(keys), pin, rows, tonumber(b.ids))
  return Batch(dense, sparse, labels, rows, global_rows, tonumber(b.global_row),
    (world_size or 1) / math.max(global_rows, 1))
end

--- Copy a host batch to `device` (nil: the default one). `keys` names the sparse features (a list, or jagged.Keys);
--- world_size (1): ranks that share the global batch. On its way to a device that copies it is in pinned memory: nobody
--- waits for the copy, and the host knows the sizes of its keys.
function M.upload(host, keys, device, world_size)
  local b, to, pin = host_ptr(host), P.device(device), P.state.pin
  local away = not C.peri_device_host_access(to)
  local batch = batch_of(b, keys, away and to or pin and P.device(pin) or nil, world_size)
  if not away then return batch end
  local there = batch:to(to, true)
  batch:release()
  return there
end

signature.handle("HostBatch", host_type)
signature.check("data.", M, { host_batch = "dense_features: int, sparse_features: int, rows: count, ids: count",
  share = "rows: count, rank: int, world: int" })
signature.check("host batch:", methods, { reserve = "self: HostBatch, n: count" })
signature.check("Batch:", Batch, { to = "self: table, device: device, non_blocking: boolean?",
  pin_memory = "self: table, device: device?",
  init = "self: table, dense: tensor, sparse: KeyedJaggedTensor, labels: tensor, rows: integer, "
    .. "global_rows: integer, global_row: integer, loss_scale: number" })

return M
