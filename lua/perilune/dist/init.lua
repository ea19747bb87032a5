-- dist/init.lua: joining a world of ranks, and the faces of the comm layer.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local awaitable = require "perilune.dist.awaitable"
local group = require "perilune.dist.group"
local all_to_all = require "perilune.dist.all_to_all"
local signature = require "perilune.signature"
local C, check, state = P.C, P.check, P.state

--- world: the joined world, or false; failed_world: the error of a world that was left after it, or false.
P.own({ world = false }, true)
P.own { failed_world = false }
function errors.rank() return state.world and state.world.rank_number or nil end

local M = {
  Group = group.Group,
  Awaitable = awaitable.Awaitable, LazyAwaitable = awaitable.LazyAwaitable,
  NoWait = awaitable.NoWait, LazyNoWait = awaitable.LazyNoWait,
  ListAwaitable = awaitable.ListAwaitable, WorkAwaitable = awaitable.WorkAwaitable,
  GetItemLazyAwaitable = awaitable.GetItemLazyAwaitable,
  resolve = awaitable.resolve, lazy_class = awaitable.lazy_class,
  all_to_all = all_to_all.all_to_all, tpu_all_to_all = all_to_all.tpu_all_to_all,
  NON_GROUP_MEMBER = group.NON_GROUP_MEMBER, functional = { all_to_all = all_to_all.functional_all_to_all },
}

local lazy = {
  sim = "perilune.dist.sim", Reducer = "perilune.dist.reducer", codec = "perilune.dist.codec",
  ops = "perilune.dist.ops", exchange = "perilune.dist.exchange", collective_utils = "perilune.dist.collective_utils",
  comm = "perilune.dist.comm", jagged = "perilune.dist.jagged",
}
--- Everyday names of those faces.
local names = {
  KJTAllToAll = "exchange", SparseFeatures = "exchange", SparseFeaturesAllToAll = "exchange",
  FusedKJTListSplitsAwaitable = "exchange", PooledEmbeddingsAllToAll = "exchange",
  VariableBatchPooledEmbeddingsAllToAll = "exchange", PooledEmbeddingsReduceScatter = "exchange",
  VariableBatchPooledEmbeddingsReduceScatter = "exchange", PooledEmbeddingsAllGather = "exchange",
  SequenceEmbeddingsAllToAll = "exchange", KJTOneToAll = "exchange", EmbeddingsAllToOne = "exchange",
  EmbeddingsAllToOneReduce = "exchange", SeqEmbeddingsAllToOne = "exchange", JaggedTensorAllToAll = "jagged",
  TensorAllToAll = "jagged", QuantizedCommCodec = "codec", QuantizedCommCodecs = "codec",
  get_qcomm_codecs_registry = "codec", set_gradient_division = "ops", get_gradient_division = "ops",
}
util.face("peri.dist", M, lazy, names)

local group_out = ffi.new "peri_group *[1]"

--- `world`, which this rank is in already, unless `args` ask for other transports.
local function same_world(world, args)
  local function same(name, wanted, has)
    if wanted == has then return end
    P.fail(("dist.init: %s is '%s', but this rank is in a world by '%s' already: see peri.finish()"):format(name,
      wanted, has))
  end
  if args.transport ~= "auto" then same("transport", args.transport, world.transport) end
  if args.device_transport and args.device_transport ~= "auto" and args.device then
    same("device_transport", args.device_transport, (world:transport_of(args.device)))
  end
  return world
end

--- Join the world of all ranks; returns its group. In a world already: that one; asking for other transports than it
--- has is an error. Named arguments: transport ("auto": mpi when launched as one of several ranks, else self),
--- device_transport and device (a second transport, which carries tensors of that device without copies through host
--- memory; by default, beside mpi, nccl for the tensors of PERI_DEVICE, or of the device that is named here, if that is
--- a GPU and each rank has one of its own), timeout (seconds), local_size (imposed ranks per node), and for sim: job,
--- rank, size.
function M.init(args)
  args = util.named("dist.init", args, {
    transport = "auto", device_transport = util.optional, device = util.optional, timeout = 0, local_size = 0,
    job = util.optional, rank = 0, size = 0,
  })
  for _, name in ipairs { "job", "device_transport", "device" } do
    if args[name] ~= nil then signature.value("dist.init", name, args[name], "string") end
  end
  for _, name in ipairs { "local_size", "rank", "size" } do signature.value("dist.init", name, args[name], "int") end
  if state.world then return same_world(state.world, args) end
  if state.place then group.no_world "dist.init" end
  local config = P.struct "peri_comm_config"
  config.transport, config.job = args.transport, args.job -- args anchors the bytes that the struct points at
  local device_transport, device = args.device_transport, args.device
  if device_transport == nil or device_transport == "auto" then
    if device then P.device(device) end -- one that there is not is an error before anything is joined
    device_transport, device = "auto", device or state.device
  end
  config.device_transport, config.device = device_transport, device
  config.rank, config.world_size, config.local_size, config.timeout_s = args.rank, args.size, args.local_size,
    args.timeout
  check(C.peri_comm_open(config, group_out))
  state.world = group.Group(group_out[0])
  return state.world
end

--- All ranks are going to exchange tensors of a device (a name; nil: the default device): where that is a GPU and
--- nobody has named a transport for it, the one of GPUs is chosen now, if each rank has a GPU of its own. Collective.
function M.use_device(device)
  local world = state.world
  if not world then return end
  if device ~= nil then P.device(device) end -- one that there is not is an error
  check(C.peri_comm_use_device(world:ptr(), device or state.device))
end

--- The world's group; an error before init.
function M.world()
  return state.world or group.no_world("dist", "no world yet, call peri.init() first")
end
--- A group of the given ranks of the world; dist.NON_GROUP_MEMBER on the others. Collective over the members.
function M.new_group(ranks, name) return M.world():new_group(ranks, name) or M.NON_GROUP_MEMBER end

--- What the world says, or whoever began this thread (a DataLoadingThread).
local function of_rank(field, i)
  if state.place and not state.world then return state.place[i] end
  return M.world()[field]
end
--- This rank's number in the world, from 0.
function M.rank() return of_rank("rank_number", 1) end
function M.world_size() return of_rank("world_size", 2) end

--- Leave the world: waits for an asynchronous save that is under way and until this rank's operations are done; what
--- fails now, and nobody waited for, is an error. Without a world it does nothing. That the world had failed before
--- stays in state.failed_world.
function M.finish()
  local world = state.world
  if not world then return end
  local sound, failure = pcall(check, C.peri_group_healthy(world:ptr()))
  local round = 0
  state.failed_world = not sound and failure
  local saved, unsaved = true, nil
  if sound and state.saves then saved, unsaved = xpcall(state.saves.finish, P.locate) end
  C.peri_group_progress(world:ptr())
  while C.peri_group_pending(world:ptr()) > 0 do
    P.pause(round)
    round = round + 1
    C.peri_group_progress(world:ptr())
  end
  local status = sound and C.peri_group_healthy(world:ptr()) or 0
  local lost = status < 0 and ffi.string(C.peri_error_message()):gsub("^peri_group_healthy: ", "")
  local closed = C.peri_group_close(world:ptr())
  state.world = false
  if lost then
    errors.raise { code = status, name = ffi.string(C.peri_status_name(status)), where = "",
      message = "finish: an operation that nobody waited for has failed: " .. lost }
  end
  if not saved then error(unsaved, 0) end
  check(closed)
end

--- Whether a transport could run here; if not, why.
function M.probe(transport)
  local reason = ffi.new "char[256]"
  local ok = C.peri_comm_probe(transport, reason, 256)
  if ok then return true end
  return nil, ffi.string(reason)
end

signature.check("dist.", M, { probe = "transport: string", use_device = "device: string?",
  new_group = "ranks: list, name: string?" })

return M
