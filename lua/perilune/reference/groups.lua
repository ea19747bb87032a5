-- groups.lua: Ranks: groups and collective operations.
--
-- All ranks of a job run the same script. A group is a set of ranks; the world is all of them. A collective operation
-- is called by every rank of its group, in the same order, and returns an Awaitable: `wait()` gives the result.
-- docs/collectives.md tells more. In shapes, W is the number of ranks, and n, d are any sizes, alike on all ranks. In
-- the examples the world is one rank, or `dist.sim.run` makes several in one process.
--
-- Ranks count from 0, entries of lists from 1: `rows[1]` is that of rank 0. `tag` is a number on which the ranks must
-- agree, so that mistakes show.
---@meta

---@class peri.dist
local dist = {}
---@class peri.dist.sim
local sim = {}
---@class peri.dist.functional
local functional = {}
---@class peri.dist.collective_utils
local collective_utils = {}
---@class peri.dist.comm
local comm = {}

---Ranks that work together. Groups come from `peri.init`, `dist.new_group` and the methods here. Scripts read its
---fields, and do not assign them.
---
---Errors: what was released; operations after the group has failed; ranks that meet in different operations, or with
---other sizes or tags.
---
---```lua
---local group = peri.init()
---print(group:rank(), group:size(), group:global_rank(0), group:node(0), group:is_healthy())
-----> 0 1 0 0 true
---local x = peri.ones { 2, 3 }
---group:barrier():wait()
---print(group:all_reduce(x):wait():item(0), group:broadcast(x, 0):wait():numel(),
---  group:all_gather(x):wait():size(1)) --> 1 6 2
---print(group:all_gather_v(x, { 2 }):wait():size(1), group:reduce_scatter(x):wait():size(1))
-----> 2 2
---print(group:reduce_scatter_v(x, { 2 }):wait():size(1), group:all_to_all(x):wait():size(1))
-----> 2 2
---print(group:all_to_all_v(x, { 2 }, { 2 }):wait():size(1),
---  group:all_gather_object({ a = 5 })[1].a)
-----> 2 5
---print(group:channel(), group:transport_of("cpu"), #group:transports() > 0,
---  #group:record() > 0) --> dense self true true
---group:check_healthy()
---group:fingerprints(true)
---local some = group:new_group({ 0 }, "some")
---print(some:timeout(30), group:intra_node():size(),
---  group:cross_node():size(), tostring(some)) --> 30 1 1 group 'some' (rank 0 of 1, self)
---some:abort("no more")
---print(some:is_healthy()) --> false
---group:new_group({ 0 }, "other"):close()
---some:release()
---```
---@class peri.dist.Group
---@field name string Its name.
---@field rank_number integer This rank's number in it.
---@field world_size integer Its number of ranks.
---@field local_rank integer This rank's number on its node.
---@field local_size integer Ranks on its node.
---@field transport string The transport: `self`, `mpi`, `sim`.
dist.Group = {}

---This rank's number in the group, from 0.
---@return integer
function dist.Group:rank() end

---The number of ranks.
---@return integer
function dist.Group:size() end

---The number in the world of a rank of this group.
---@param r integer A rank of the group.
---@return integer
function dist.Group:global_rank(r) end

---The node on which a rank of this group runs, from 0.
---@param r integer A rank of the group.
---@return integer
function dist.Group:node(r) end

---How many seconds operations of the group may wait for other ranks before they fail. With an argument it is changed
---for later operations.
---@param seconds? number The time from now on, above 0 and at most 1e9 (default: it stays).
---@return number # The time that holds now, in seconds: 300, unless `peri.init` was told another.
function dist.Group:timeout(seconds) end

---The channel on which this rank's operations go. Operations of one channel run in the order of their calls; those of
---two channels may overtake each other. Modules use `ids`, `rows`, `control` and `reports` themselves; `own1` to
---`own11` are a schedule's. All ranks alike.
---@param name? string From now on (default: it stays).
---@return string # The channel so far; `dense` at first.
function dist.Group:channel(name) end

---The transport that carries tensors of a device.
---@param device string The device.
---@return string # Its name.
---@return boolean # Whether it adds in the order of ranks, so that sums have the same bits each time.
function dist.Group:transport_of(device) end

---The transports of the world in words.
---@return string
function dist.Group:transports() end

---Whether the group works. It does not wait.
---@return boolean
function dist.Group:is_healthy() end

---Raise the failure of the group, if it has failed.
function dist.Group:check_healthy() end

---Let the group, and those made from it, fail on all ranks.
---@param message string What their errors say.
function dist.Group:abort(message) end

---Whether operations carry a fingerprint by which ranks that meet in different ones find out. All ranks alike.
---@param on? boolean On or off (default: true).
function dist.Group:fingerprints(on) end

---The last operations of this rank in the group, one a line.
---@return string
function dist.Group:record() end

---Leave the group. Collective.
function dist.Group:close() end

---Give the group's memory back now. Local.
function dist.Group:release() end

---Make a group of some of the ranks. Collective over these.
---@param ranks integer[] Ranks of this group, from 0, each once.
---@param name? string Its name in messages (default: group).
---@return peri.dist.Group|nil # nil on the other ranks.
function dist.Group:new_group(ranks, name) end

---A group of the ranks on this rank's node. Collective.
---@return peri.dist.Group
function dist.Group:intra_node() end

---A group of the ranks with this rank's number on their nodes. Collective.
---@return peri.dist.Group
function dist.Group:cross_node() end

---Done when all ranks have called it.
---@param tag? integer See above (default: 0).
---@return peri.Awaitable
function dist.Group:barrier(tag) end

---Copy one rank's tensor to all ranks, in place.
---@param tensor peri.Tensor `[...]`: the same shape on all ranks.
---@param root integer The rank that has the numbers.
---@param tag? integer See above (default: 0).
---@return peri.Awaitable # Of the tensor.
function dist.Group:broadcast(tensor, root, tag) end

---Combine tensors of all ranks element by element, in place.
---@param tensor peri.Tensor `[...]`: the same shape on all ranks.
---@param op? string `sum`, `min` or `max` (default: sum).
---@param tag? integer See above (default: 0).
---@return peri.Awaitable # Of the tensor.
function dist.Group:all_reduce(tensor, op, tag) end

---The tensors of all ranks one after the other.
---@param input peri.Tensor `[n, ...]`, of one shape on all ranks; a scalar counts as `[1]`.
---@param output? peri.Tensor Where they go: `[W * n, ...]` (default: a new tensor).
---@param tag? integer See above (default: 0).
---@return peri.Awaitable # Of the output.
function dist.Group:all_gather(input, output, tag) end

---The tensors of all ranks one after the other, each with its own number of rows.
---@param input peri.Tensor `[rows of this rank, ...]`.
---@param rows integer[] Rows of each rank; the same list on all ranks.
---@param output? peri.Tensor Where they go: `[sum of rows, ...]` (default: a new tensor).
---@param tag? integer See above (default: 0).
---@return peri.Awaitable # Of the output.
function dist.Group:all_gather_v(input, rows, output, tag) end

---Combine the tensors of all ranks; each rank gets one of W equal parts.
---@param input peri.Tensor `[W * n, ...]`.
---@param op? string `sum`, `min` or `max` (default: sum).
---@param output? peri.Tensor Where the part goes: `[n, ...]` (default: a new tensor).
---@param tag? integer See above (default: 0).
---@return peri.Awaitable # Of the output.
function dist.Group:reduce_scatter(input, op, output, tag) end

---Combine the tensors of all ranks; each rank gets a part of its own size.
---@param input peri.Tensor `[sum of rows, ...]`.
---@param rows integer[] Rows that each rank gets; the same list on all ranks.
---@param op? string `sum`, `min` or `max` (default: sum).
---@param output? peri.Tensor Where the part goes: `[rows of this rank, ...]` (default: a new tensor).
---@param tag? integer See above (default: 0).
---@return peri.Awaitable # Of the output.
function dist.Group:reduce_scatter_v(input, rows, op, output, tag) end

---Cut a tensor into W equal parts and send part i to rank i; the result has the parts that came, in the order of ranks.
---@param input peri.Tensor `[W * n, ...]`.
---@param output? peri.Tensor Where they go: `[W * n, ...]` (default: a new tensor).
---@param tag? integer See above (default: 0).
---@return peri.Awaitable # Of the output.
function dist.Group:all_to_all(input, output, tag) end

---As `all_to_all`, with parts of any size.
---@param input peri.Tensor `[sum of send_rows, ...]`.
---@param send_rows integer[] Rows for each rank.
---@param recv_rows integer[] Rows from each rank.
---@param output? peri.Tensor Where they go: `[sum of recv_rows, ...]` (default: a new tensor).
---@param tag? integer See above (default: 0).
---@return peri.Awaitable # Of the output.
function dist.Group:all_to_all_v(input, send_rows, recv_rows, output, tag) end

---Give each rank a plain value of every rank: nil, booleans, numbers, strings, tables of them. What comes are copies,
---also on one rank. Waits. Collective.
---@param value any This rank's value.
---@param func? string Whose call it is: two calls that differ and meet are an error (default: this method's name).
---@return any[] # The values in the order of ranks.
function dist.Group:all_gather_object(value, func) end

---A group of some ranks of the world. Collective over these.
---
---Errors: no world yet; a rank that the world does not have.
---
---```lua
---peri.init()
---print(peri.dist.new_group({ 0 }, "mine"):size()) --> 1
---```
---@param ranks integer[] Ranks of the world, from 0.
---@param name? string Its name in messages (default: group).
---@return peri.dist.Group # `dist.NON_GROUP_MEMBER` on the other ranks.
function dist.new_group(ranks, name) end

---Leave the world. It waits for an asynchronous save and for this rank's operations. Without a world it does nothing.
---
---Errors: an operation that nobody waited for has failed; the save has failed.
---
---```lua
---print(peri.dist.sim.run(2, function(rank) peri.dist.finish() return rank end)[2]) --> 1
---```
function dist.finish() end

---Say that ranks are going to exchange tensors of a device. Where that is a GPU, each rank has one of its own, and
---nobody has named a transport for it, NCCL is chosen now. Without a world it does nothing. Collective.
---
---Errors: an unknown device.
---
---```lua
---peri.dist.use_device "cpu"
---```
---@param device? string The device (default: that of the rank).
function dist.use_device(device) end

---Whether a transport could run here.
---
---Errors: what is no string.
---
---```lua
---print(peri.dist.probe "self") --> true
---```
---@param transport string `self`, `sim`, `mpi` or `nccl`.
---@return boolean|nil # true, or nil.
---@return string|nil # Why not.
function dist.probe(transport) end

---Run a function on several ranks in this process: they take turns wherever one waits. For tests and examples; scripts
---and library run unchanged.
---
---Errors: what a rank raises, with its number (unless `catch`); ranks that wait for nothing.
---
---```lua
---local sums = peri.dist.sim.run(3, function(rank, world)
---  return world:all_reduce(peri.full({}, rank)):wait():item()
---end)
---print(table.concat(sums, " ")) --> 3 3 3
---```
---@param n integer Ranks, 1 to 4096.
---@param body function `body(rank, world)`.
---@param options? table `local_size`, `timeout`, `device`, `device_transport`, `catch` (default: one node, no catch).
---@return any[] # What the ranks returned.
---@return any[]|nil # With `catch`: errors by rank + 1.
function sim.run(n, body, options) end

---Send a tensor to each rank and receive one from each: `torch.distributed.all_to_all`. It is not recorded on the tape.
---
---Errors: lists without a tensor for each rank; sizes that do not fit those sent.
---
---```lua
---peri.init()
---local got = { peri.zeros { 2 } }
---peri.dist.all_to_all(got, { peri.ones { 2 } })
---print(got[1]:item(0)) --> 1
---```
---@param output_tensor_list peri.Tensor[] Where they go, one a rank: any sizes `[...]`.
---@param input_tensor_list peri.Tensor[] What is sent, one a rank: any sizes `[...]`, of one dtype.
---@param group? peri.dist.Group The ranks (default: the world).
---@param async_op? boolean Return an Awaitable of the output list at once (default: false).
---@param tag? integer See above (default: 0).
---@return peri.Awaitable|nil
function dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op, tag) end

---As `dist.all_to_all`, on the gradient tape: gradients travel back.
---
---Errors: lists without a tensor for each rank; lists of several dtypes. Gradients travel for floats only.
---
---```lua
---peri.init()
---print(peri.dist.functional.all_to_all(nil, { peri.ones { 2 } }):wait()[1]:item(0)) --> 1
---```
---@param output_tensor_list? peri.Tensor[] Where they go (default: tensors of the inputs' shapes `[...]`).
---@param input_tensor_list peri.Tensor[] What is sent, one a rank: any sizes `[...]`.
---@param group? peri.dist.Group The ranks (default: the world).
---@param tag? integer See above (default: 0).
---@return peri.Awaitable # Of the output list.
function functional.all_to_all(output_tensor_list, input_tensor_list, group, tag) end

---TensorFlow's AllToAll of TPUs: cut the input into blocks along a dimension; block k goes to the k-th rank of this
---rank's row of `group_assignment`; the blocks that come are joined along another dimension.
---
---Errors: an argument that is missing; rows of different lengths; dimensions that the input does not have.
---
---```lua
---peri.init()
---local y = peri.dist.tpu_all_to_all { input = peri.ones { 2, 3 }, group_assignment = { { 0 } },
---  concat_dimension = 1, split_dimension = 2, split_count = 1 }
---print(y:wait():numel()) --> 6
---```
---@param args table `input`, `group_assignment`, `concat_dimension`, `split_dimension`, `split_count`; optional: `group`, `tag`.
---@return peri.Awaitable # Of the result.
function dist.tpu_all_to_all(args) end

---Whether this rank leads the group.
---
---Errors: what is no group.
---
---```lua
---print(peri.dist.collective_utils.is_leader(nil)) --> true
---```
---@param group? peri.dist.Group The ranks (default: none, a single process).
---@param leader_rank? integer The leader's number in the group (default: 0).
---@return boolean
function collective_utils.is_leader(group, leader_rank) end

---Run a function on one rank; all ranks get its result: nil, booleans, numbers, strings, tables of them. Collective.
---
---Errors: what the function raises, on all ranks in the same words; a result that cannot be sent.
---
---```lua
---local utils = peri.dist.collective_utils
---print(utils.invoke_on_rank_and_broadcast_result(peri.init(), 0, function(x) return x + 1 end,
---  4))
-----> 5
---print(utils.run_on_leader(peri.init(), 0)(function(x) return x * 2 end)(4)) --> 8
---```
---@param group? peri.dist.Group The ranks (default: none, a single process).
---@param rank integer Who runs it.
---@param func function The function.
---@param ... any Its arguments.
---@return any # Its result.
function collective_utils.invoke_on_rank_and_broadcast_result(group, rank, func, ...) end

---Wrap functions so that one rank runs them and all ranks get the result: `run_on_leader(group, rank)(func)`.
---
---Errors: as `invoke_on_rank_and_broadcast_result`.
---@param group? peri.dist.Group The ranks (default: none, a single process).
---@param rank? integer Who runs them (default: 0).
---@return function # Takes a function, returns the wrapped one.
function collective_utils.run_on_leader(group, rank) end

---`group:all_gather_object(value, func)`.
---
---Errors: what is no group; a value that cannot be sent.
---
---```lua
---print(peri.dist.collective_utils.all_gather_object(peri.init(), "x")[1]) --> x
---```
---@param group peri.dist.Group The ranks.
---@param value any This rank's value.
---@param func? string Whose call it is (default: the method's name).
---@return any[] # The values in the order of ranks.
function collective_utils.all_gather_object(group, value, func) end

---Check that facts are the same on all ranks. Collective; waits.
---
---Errors: a fact that is not the same: on all ranks, with its name and both values.
---
---```lua
---peri.dist.collective_utils.agree(peri.init(), "train", { { "batch_size", 32 } })
---```
---@param group peri.dist.Group The ranks.
---@param func string Whose call it is, for the message.
---@param facts table[] `{ name, text or number }` each.
function collective_utils.agree(group, func, facts) end

---Ranks on a node: of the joined world, else as the launcher's variables say (torchrun, Open MPI, Intel MPI, MVAPICH,
---Slurm); without any, all ranks.
---
---Errors: a variable that is no whole number.
---
---```lua
---local comm, env = peri.dist.comm, { WORLD_SIZE = "4", RANK = "3", LOCAL_WORLD_SIZE = "2" }
---print(comm.get_local_size(nil, env), comm.get_local_rank(nil, nil, env),
---  comm.get_group_rank(nil, nil, env)) --> 2 1 1
---print(comm.get_num_groups(nil, env)) --> 2
---```
---@param world_size? integer Ranks of all (default: those of the world).
---@param environment? table<string, string> Variables (default: those of the process).
---@return integer
function comm.get_local_size(world_size, environment) end

---This rank's number on its node.
---
---Errors: a variable that is no whole number.
---@param world_size? integer Ranks of all (default: those of the world).
---@param rank? integer The rank (default: this one).
---@param environment? table<string, string> Variables (default: those of the process).
---@return integer
function comm.get_local_rank(world_size, rank, environment) end

---The number of this rank's node.
---
---Errors: a variable that is no whole number.
---@param world_size? integer Ranks of all (default: those of the world).
---@param rank? integer The rank (default: this one).
---@param environment? table<string, string> Variables (default: those of the process).
---@return integer
function comm.get_group_rank(world_size, rank, environment) end

---The number of nodes.
---
---Errors: a variable that is no whole number.
---@param world_size? integer Ranks of all (default: those of the world).
---@param environment? table<string, string> Variables (default: those of the process).
---@return integer
function comm.get_num_groups(world_size, environment) end

---The group of this rank's node, and that of the ranks with its number on all nodes. Later calls return the same
---groups. Collective.
---
---Errors: nodes with different numbers of ranks.
---
---```lua
---local intra, cross = peri.dist.comm.intra_and_cross_node_pg { group = peri.init() }
---print(intra:size(), cross:size()) --> 1 1
---```
---@param args? peri.dist.comm.intra_and_cross_node_pg.args Which ranks, and which nodes.
---@return peri.dist.Group # Within the node.
---@return peri.dist.Group # Across nodes.
function comm.intra_and_cross_node_pg(args) end

---@class peri.dist.comm.intra_and_cross_node_pg.args
---@field group? peri.dist.Group The ranks (default: the world).
---@field topology? integer[] A node's number for each rank (default: where the ranks run).
---@field local_size? integer So many ranks in a row are a node (default: where the ranks run).
