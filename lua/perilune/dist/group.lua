-- group.lua: groups of ranks and their collective operations. Every operation returns an Awaitable; every rank of the
-- group calls the same operations in the same order.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local awaitable = require "perilune.dist.awaitable"
local serial = require "perilune.serial"
local signature = require "perilune.signature"
local C, check, state = P.C, P.check, P.state
local WorkAwaitable, work_out, tensor_ptr = awaitable.WorkAwaitable, awaitable.work_out, Tensor.ptr

local wrap = P.handle("peri_group", {}, nil, "a group")
local group_pointer = ffi.typeof "peri_group *"
local group_out = ffi.new "peri_group *[1]"

local channels, channel_of = {}, {} -- names and numbers, from 0
for i = 0, C.PERI_CHANNEL_COUNT - 1 do
  channels[i] = ffi.string(C.peri_channel_name(i))
  channel_of[channels[i]] = i
end

local Group = util.class "peri.Group"
-- What a group is, which nothing changes: fields that can be read only.
local facts = { name = true, rank_number = true, world_size = true, local_rank = true, local_size = true,
  transport = true }
function Group.__index(self, key)
  if facts[key] then return rawget(self, "_" .. key) end
  return Group[key]
end
function Group.__newindex(self, key, value)
  if facts[key] then P.fail(("group '%s': %s cannot be set; it is %s"):format(self.name, key, tostring(self[key]))) end
  util.check_assign(self, key, value)
  rawset(self, key, value)
end
util.seal(Group)
--- A misspelt method is an error that tells the name that may have been meant; names with a line in front are other
--- modules' notes.
getmetatable(Group).__index = function(_, name)
  if type(name) == "string" and name:sub(1, 1) ~= "_" then
    util.unknown("a group of ranks", name, { Group }, "method ")
  end
end
--- What dist.new_group gives to ranks outside the group.
local NON_GROUP_MEMBER = setmetatable({}, { __tostring = function() return "NON_GROUP_MEMBER" end })
local M = { Group = Group, NON_GROUP_MEMBER = NON_GROUP_MEMBER }

--- An error of `func`, which wants a world.
function M.no_world(func, text)
  if not state.place then P.fail(func .. ": " .. text) end
  P.fail(func .. ": a DataLoadingThread is in no world, so there are no exchanges on it; peri.rank() and "
    .. "peri.world_size() are those of the rank that began it")
end

--- `group`, or the world if it is nil; anything else is an error of `func`.
function M.group_of(func, group)
  if group == nil then return state.world or M.no_world(func, "no group, and no world yet: call peri.init() first") end
  if Group.is(group) then return group end
  if rawequal(group, NON_GROUP_MEMBER) then P.fail(func .. ": this rank is not in the group (NON_GROUP_MEMBER)") end
  P.fail(("%s: group is a %s"):format(func, type(group)))
end

--- Group(pointer of a peri_group, new). Made by dist.init, Group:new_group and their like.
function Group:init(ptr)
  if type(ptr) ~= "cdata" or not ffi.istype(group_pointer, ptr) or ptr == nil then
    P.fail(("Group: it is made of what C made, not of %s; groups come from peri.init, dist.new_group and "
      .. "group:new_group"):format(
      errors.kind(ptr)))
  end
  if rawget(self, "_ref") then P.fail(("Group: '%s' is made already"):format(self.name)) end
  self._ref = P.lasting(wrap, ptr)
  self._name = ffi.string(C.peri_group_name(ptr))
  self._rank_number = C.peri_group_rank(ptr)
  self._world_size = C.peri_group_size(ptr)
  self._local_rank = C.peri_group_local_rank(ptr)
  self._local_size = C.peri_group_local_size(ptr)
  self._transport = ffi.string(C.peri_group_transport(ptr))
end

function Group:__tostring()
  return ("group '%s' (rank %d of %d, %s)"):format(self.name, self.rank_number, self.world_size, self.transport)
end

--- The C group, or an error after release.
function Group:ptr()
  if not self._ref then P.fail "a group is wanted, got the class of groups" end
  local p = self._ref.ptr
  if p == nil then P.fail(("group '%s': it was released"):format(self.name)) end
  return p
end

function Group:rank() return self.rank_number end
function Group:size() return self.world_size end
--- The rank in the world of rank r of this group.
function Group:global_rank(r)
  local g = C.peri_group_global_rank(self:ptr(), r)
  if g < 0 then P.fail(("group '%s': rank %s, allowed: 0..%d"):format(self.name, tostring(r), self.world_size - 1)) end
  return g
end
--- The node of rank r of this group.
function Group:node(r)
  self:global_rank(r)
  return C.peri_group_node(self:ptr(), r)
end
--- The deadline of operations in seconds; with an argument sets it.
function Group:timeout(seconds)
  if seconds then check(C.peri_group_timeout_set(self:ptr(), seconds)) end
  return C.peri_group_timeout(self:ptr())
end
--- The channel on which this rank's operations are posted ("dense" at first); with a name sets it and returns the one
--- before. Operations of one channel are posted in the order of their calls, those of two channels may overtake each
--- other. All ranks alike. Modules use "ids", "rows", "control" and "reports" themselves; "own1" to "own11" are a
--- schedule's.
function Group:channel(name)
  local before = channels[C.peri_group_channel(self:ptr())]
  if name ~= nil then
    if not channel_of[name] then
      P.fail(("Group:channel: name is '%s', allowed: %s"):format(name, table.concat(channels, ", ", 0)))
    end
    check(C.peri_group_channel_set(self:ptr(), channel_of[name]))
  end
  return before
end
--- Name of the transport that carries tensors of a device (a device name), and whether it sums in rank order.
function Group:transport_of(device)
  local p = P.device(device)
  return ffi.string(C.peri_group_transport_of(self:ptr(), p)), C.peri_group_rank_order(self:ptr(), p)
end
--- The transports of the world in words: "mpi, and nccl for tensors of cuda: each of the 8 ranks has a GPU of its own".
function Group:transports() return ffi.string(C.peri_group_transports(self:ptr())) end
--- PERI_OK, or that the group has failed: by now, with what it has queued on devices.
local function health(group)
  C.peri_group_progress(group:ptr())
  return C.peri_group_healthy(group:ptr())
end
--- Raises the failure that poisoned the group, if one did.
function Group:check_healthy() check(health(self)) end
function Group:is_healthy() return health(self) == C.PERI_OK end
--- Poison the group and those made from it on all ranks.
function Group:abort(message) C.peri_group_abort(self:ptr(), tostring(message)) end
--- Let operations carry fingerprints (the default) or not: for measuring what they cost. All ranks alike.
function Group:fingerprints(on) check(C.peri_group_fingerprints_set(self:ptr(), on ~= false)) end
--- The last operations of this rank in the group, one a line.
function Group:record()
  local text = ffi.new("char[?]", 65536)
  C.peri_group_record(self:ptr(), text, 65536)
  return ffi.string(text)
end
--- Leave the group. Collective.
function Group:close() check(C.peri_group_close(self:ptr())) end
function Group:release() self._ref:release() end

-- -- groups of some ranks ---------------------------------------------------------------------------------------------

local function new_group_or_nil()
  return group_out[0] ~= nil and Group(group_out[0]) or nil
end

--- A group of the given ranks (a list of numbers from 0); nil on ranks outside. Collective over the members.
function Group:new_group(ranks, name)
  local n = #ranks
  local list = ffi.new("int32_t[?]", math.max(n, 1))
  for i = 1, n do list[i - 1] = util.integer("Group:new_group", "a rank", ranks[i], 0, 2 ^ 31 - 1) end
  check(C.peri_group_new(self:ptr(), list, n, name or "group", group_out))
  return new_group_or_nil()
end
--- The ranks on this rank's node.
function Group:intra_node()
  check(C.peri_group_intra_node(self:ptr(), group_out))
  return new_group_or_nil()
end
--- The ranks with this rank's place on their nodes.
function Group:cross_node()
  check(C.peri_group_cross_node(self:ptr(), group_out))
  return new_group_or_nil()
end

-- -- collective operations --------------------------------------------------------------------------------------------

local function posted(status, result)
  check(status)
  return WorkAwaitable(work_out[0], result)
end

local reduces = { sum = C.PERI_REDUCE_SUM, min = C.PERI_REDUCE_MIN, max = C.PERI_REDUCE_MAX }
local function reduce_of(op)
  local code = reduces[op or "sum"]
  if not code then P.fail(("reduce operator '%s', allowed: sum, min, max"):format(tostring(op))) end
  return code
end

-- Two count arrays that grow with the largest group.
local room, counts_a, counts_b = 64, ffi.new "int64_t[64]", ffi.new "int64_t[64]"
local function reserve_counts(n)
  if n <= room then return end
  room = n
  counts_a, counts_b = ffi.new("int64_t[?]", n), ffi.new("int64_t[?]", n)
end

local MOST_ROWS = 2 ^ 48

--- Copy row counts to `buffer`; returns their sum.
local function fill(group, what, rows, buffer)
  local n, sum = group.world_size, 0
  if type(rows) ~= "table" then P.fail(("%s is a %s, wanted a list of numbers"):format(what, type(rows))) end
  if #rows ~= n then P.fail(("%s: %d entries for the %d ranks of group '%s'"):format(what, #rows, n, group.name)) end
  for i = 1, n do
    local x = rows[i]
    if type(x) ~= "number" or not (x >= 0 and x <= MOST_ROWS) or x ~= math.floor(x) then
      P.fail(("%s: %s rows for rank %d of group '%s', allowed: whole numbers from 0 to 2^48"):format(what, tostring(x),
        i - 1, group.name))
    end
    buffer[i - 1] = x
    sum = sum + x
  end
  return sum
end

--- Rows of `input`, which a collective of this name cuts or puts together along dimension 1.
local function rows_of(func, input)
  if input:dim() == 0 then P.fail(func .. ": input is one number, wanted a tensor with a dimension: [n, ...]") end
  return input:size(1)
end
--- A new tensor like `t` with another number of rows.
local function with_rows(func, t, rows)
  rows_of(func, t)
  local shape = t:shape()
  shape[1] = rows
  return Tensor.empty(shape, t:dtype(), t:device())
end

--- Done when all ranks have posted it. `tag` (in all operations): a number on which the ranks must agree.
function Group:barrier(tag) return posted(C.peri_coll_barrier(self:ptr(), tag or 0, work_out)) end
--- `tensor` of rank `root` to all ranks, in place.
function Group:broadcast(tensor, root, tag)
  return posted(C.peri_coll_broadcast(self:ptr(), tensor_ptr(tensor), root, tag or 0, work_out), tensor)
end
--- Combine `tensor` over the ranks ("sum", "min", "max"), in place.
function Group:all_reduce(tensor, op, tag)
  return posted(C.peri_coll_all_reduce(self:ptr(), tensor_ptr(tensor), reduce_of(op), tag or 0, work_out), tensor)
end
--- The inputs of all ranks one after the other; all of one shape.
function Group:all_gather(input, output, tag)
  output = output or (input:dim() == 0 and Tensor.empty({ self.world_size }, input:dtype(), input:device()) or
    with_rows("all_gather", input, input:size(1) * self.world_size))
  return posted(C.peri_coll_all_gather(self:ptr(), tensor_ptr(output), tensor_ptr(input), tag or 0, work_out), output)
end
--- The same with rows[i] rows of rank i - 1.
function Group:all_gather_v(input, rows, output, tag)
  reserve_counts(self.world_size)
  local sum = fill(self, "all_gather_v: rows", rows, counts_a)
  output = output or with_rows("all_gather_v", input, sum)
  return posted(C.peri_coll_all_gather_v(self:ptr(), tensor_ptr(output), tensor_ptr(input), counts_a, tag or 0,
    work_out), output)
end
--- This rank's part of the combined input, which is cut into equal parts along dimension 1.
function Group:reduce_scatter(input, op, output, tag)
  if not output then
    local rows = rows_of("reduce_scatter", input)
    if rows % self.world_size ~= 0 then
      P.fail(("reduce_scatter: %d rows for %d ranks of group '%s', allowed: multiples"):format(rows, self.world_size,
        self.name))
    end
    output = with_rows("reduce_scatter", input, rows / self.world_size)
  end
  return posted(C.peri_coll_reduce_scatter(self:ptr(), tensor_ptr(output), tensor_ptr(input), reduce_of(op), tag or 0,
    work_out), output)
end
--- The same with parts of rows[i] rows for rank i - 1.
function Group:reduce_scatter_v(input, rows, op, output, tag)
  reserve_counts(self.world_size)
  fill(self, "reduce_scatter_v: rows", rows, counts_a)
  output = output or with_rows("reduce_scatter_v", input, rows[self.rank_number + 1])
  return posted(
    C.peri_coll_reduce_scatter_v(self:ptr(), tensor_ptr(output), tensor_ptr(input), counts_a, reduce_of(op), tag or 0,
      work_out), output)
end
--- Equal parts of the input, part i to rank i - 1; the result has the parts received.
function Group:all_to_all(input, output, tag)
  output = output or with_rows("all_to_all", input, rows_of("all_to_all", input))
  return posted(C.peri_coll_all_to_all(self:ptr(), tensor_ptr(output), tensor_ptr(input), tag or 0, work_out), output)
end
--- Parts of any size: send_rows[i] rows to rank i - 1, recv_rows[i] rows from it.
function Group:all_to_all_v(input, send_rows, recv_rows, output, tag)
  reserve_counts(self.world_size)
  fill(self, "all_to_all_v: send_rows", send_rows, counts_a)
  local sum = fill(self, "all_to_all_v: recv_rows", recv_rows, counts_b)
  output = output or with_rows("all_to_all_v", input, sum)
  return posted(C.peri_coll_all_to_all_v(self:ptr(), tensor_ptr(output), tensor_ptr(input), counts_b, counts_a, tag
    or 0, work_out), output)
end

local function met_another(group, func, rank, theirs)
  errors.raise { code = C.PERI_EMISMATCH, name = "EMISMATCH", where = "", rank = group:rank(),
    message = ("%s: rank %d of group '%s' came to %s instead; all ranks make the same calls in the same order, of the "
      .. "same model and plan")
      :format(func, rank, group.name, tostring(theirs)) }
end

--- `value` (nil, booleans, numbers, strings, tables of them) of every rank, as a list in their order; func: whose it
--- is, for messages, and the same on all ranks: where two that differ meet, that is an error on all. Collective; waits.
function Group:all_gather_object(value, func)
  local n = self:size()
  func = func or "Group:all_gather_object"
  local bytes = serial.encode({ func, value }, func)
  if n == 1 then return { serial.decode(bytes, func)[2] } end
  local lengths = self:all_gather(Tensor.tensor({ #bytes }, "i64", "cpu")):wait():to_list()
  local buffer, total = self:all_gather_v(Tensor.from_memory(bytes, { #bytes }, "u8", "cpu"), lengths):wait():read()
  local all, list, at = ffi.string(buffer, total), {}, 1
  for r = 1, n do
    local theirs = serial.decode(all:sub(at, at + lengths[r] - 1), func)
    if theirs[1] ~= func then met_another(self, func, r - 1, theirs[1]) end
    list[r] = theirs[2]
    at = at + lengths[r]
  end
  return list
end

signature.kind("Group", "a group of ranks", Group.is)
signature.check_each("Group:", Group, { "rank", "size", "transports", "check_healthy", "is_healthy", "record", "close",
  "release", "intra_node", "cross_node" }, "self: table")
signature.check("Group:", Group, { abort = "self: table, message: any",
  all_gather_object = "self: table, value: any, func: string?",
  global_rank = "self: table, r: int", node = "self: table, r: int", timeout = "self: table, seconds: number?",
  channel = "self: table, name: string?", transport_of = "self: table, device: device",
  fingerprints = "self: table, on: boolean?", new_group = "self: table, ranks: list, name: string?",
  barrier = "self: table, tag: integer?", broadcast = "self: table, tensor: tensor, root: int, tag: integer?",
  all_reduce = "self: table, tensor: tensor, op: string?, tag: integer?",
  all_gather = "self: table, input: tensor, output: tensor?, tag: integer?",
  all_gather_v = "self: table, input: tensor, rows: any, output: tensor?, tag: integer?",
  reduce_scatter = "self: table, input: tensor, op: string?, output: tensor?, tag: integer?",
  reduce_scatter_v = "self: table, input: tensor, rows: any, op: string?, output: tensor?, tag: integer?",
  all_to_all = "self: table, input: tensor, output: tensor?, tag: integer?",
  all_to_all_v = "self: table, input: tensor, send_rows: any, recv_rows: any, output: tensor?, tag: integer?",
})

return M
