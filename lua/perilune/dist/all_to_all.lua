-- all_to_all.lua: all-to-all of lists of tensors (torch.distributed.all_to_all) and of blocks along a dimension (TPU
-- AllToAll).
local ffi = require "ffi"
local P = require "perilune.ffi"
local signature = require "perilune.signature"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local A = require "perilune.jagged.arguments"
local awaitable = require "perilune.dist.awaitable"
local membership = require "perilune.dist.group"
local C, check = P.C, P.check
local group_of, NON_GROUP_MEMBER = membership.group_of, membership.NON_GROUP_MEMBER
local WorkAwaitable, work_out = awaitable.WorkAwaitable, awaitable.work_out

local M = {}

-- Pointers of the two lists: grow with the largest group.
local room, to, from = 64, ffi.new "peri_tensor *[64]", ffi.new "peri_tensor *[64]"
local function reserve_pointers(n)
  if n <= room then return end
  room = n
  to, from = ffi.new("peri_tensor *[?]", n), ffi.new("peri_tensor *[?]", n)
end

local function fill_pointers(func, what, list, group, pointers)
  if type(list) ~= "table" then P.fail(("%s: %s is a %s, wanted a list of tensors"):format(func, what, type(list))) end
  if #list ~= group.world_size then
    P.fail(("%s: %d tensors in %s for the %d ranks of group '%s'"):format(func, #list, what, group.world_size,
      group.name))
  end
  for i = 1, #list do
    local t = awaitable.resolve(list[i])
    if not Tensor.is(t) then P.fail(("%s: %s[%d] is a %s, wanted a tensor"):format(func, what, i, type(t))) end
    pointers[i - 1] = Tensor.ptr(t)
  end
end

local function post_lists(func, outputs, inputs, group, recorded, tag)
  reserve_pointers(group.world_size)
  if type(outputs) == "table" then util.settle(outputs) end
  if type(inputs) == "table" then util.settle(inputs) end
  fill_pointers(func, "output_tensor_list", outputs, group, to)
  fill_pointers(func, "input_tensor_list", inputs, group, from)
  check(C.peri_coll_all_to_all_list(group:ptr(), to, from, recorded, tag or 0, work_out))
  return WorkAwaitable(work_out[0], outputs)
end

--- Send input_tensor_list[i] to rank i - 1 of the group (default: the world); output_tensor_list[i] gets what it has
--- for this rank. One dtype, any dtype, any sizes. Waits, and returns nil; with async_op returns an Awaitable of the
--- output list at once. Does nothing on ranks outside the group. Not recorded: see functional_all_to_all.
function M.all_to_all(output_tensor_list, input_tensor_list, group, async_op, tag)
  if rawequal(group, NON_GROUP_MEMBER) then return nil end
  group = group_of("all_to_all", group)
  local work = post_lists("all_to_all", output_tensor_list, input_tensor_list, group, false, tag)
  if async_op then return work end
  work:wait()
end

--- The same on the gradient tape: an Awaitable of output_tensor_list, whose tensors (f32 or f64) become results of the
--- exchange. Without output_tensor_list they are made like the inputs: equal sizes on all ranks.
function M.functional_all_to_all(output_tensor_list, input_tensor_list, group, tag)
  if rawequal(group, NON_GROUP_MEMBER) then return nil end
  group = group_of("functional.all_to_all", group)
  if not output_tensor_list then
    output_tensor_list = {}
    signature.value("functional.all_to_all", "input_tensor_list", input_tensor_list, "tensors")
    for i, t in ipairs(input_tensor_list) do output_tensor_list[i] = Tensor.empty(t:shape(), t:dtype(), t:device()) end
  end
  return post_lists("functional.all_to_all", output_tensor_list, input_tensor_list, group, true, tag)
end

local tpu_args = ffi.new "peri_tpu_all_to_all_args"
local needed = { "input", "group_assignment", "concat_dimension", "split_dimension", "split_count" }
local named = { group = true, tag = true }
for _, name in ipairs(needed) do named[name] = true end

--- tpu_all_to_all { input =, group_assignment = (rows of ranks), concat_dimension =, split_dimension = (from 1),
--- split_count =, group =, tag = }: cut the input into split_count blocks along split_dimension, block k goes to the
--- k-th rank of this rank's row of group_assignment; the Awaitable's result has the blocks received along
--- concat_dimension. All ranks give the same arguments and shapes.
function M.tpu_all_to_all(args)
  local func = "tpu_all_to_all"
  A.check_all(func, args, named, needed)
  local group = group_of(func, args.group)
  local rows = args.group_assignment
  if type(rows) ~= "table" or type(rows[1]) ~= "table" then
    P.fail(func .. ": group_assignment is no list of rows of ranks")
  end
  local groups, replicas = #rows, #rows[1]
  local assignment = ffi.new("int32_t[?]", math.max(1, groups * replicas))
  for g, row in ipairs(rows) do
    if #row ~= replicas then
      P.fail(("%s: row %d of group_assignment has %d ranks, the first has %d"):format(func, g, #row, replicas))
    end
    for k, rank in ipairs(row) do
      assignment[(g - 1) * replicas + k - 1] = util.integer(func, "a rank of group_assignment", rank, 0,
        group.world_size - 1)
    end
  end
  local input = awaitable.resolve(args.input)
  if not Tensor.is(input) then P.fail(("%s: input is a %s, wanted a tensor"):format(func, type(input))) end
  local most = input:dim()
  tpu_args.group_assignment, tpu_args.groups, tpu_args.replicas = assignment, groups, replicas
  tpu_args.concat_dimension = util.integer(func, "concat_dimension", args.concat_dimension, 1, most) - 1
  tpu_args.split_dimension = util.integer(func, "split_dimension", args.split_dimension, 1, most) - 1
  tpu_args.split_count = util.integer(func, "split_count", args.split_count, 1, 2 ^ 31 - 1)
  tpu_args.tag = args.tag or 0
  local out = Tensor.out
  check(C.peri_coll_tpu_all_to_all(group:ptr(), Tensor.ptr(input), tpu_args, out, work_out))
  return WorkAwaitable(work_out[0], Tensor.wrap(out[0]))
end

return M
