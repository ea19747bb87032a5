-- jagged.lua: rows of tensors, and bags of JaggedTensors, to ranks of the caller's choice (TorchRec's TensorAllToAll
-- and JaggedTensorAllToAll), for what is written to tables or moved between them. No gradients. The call sends how many
-- there are; waiting sends them, so waits of these stand in the same order on all ranks as other calls do.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local JaggedTensor = require "perilune.jagged.jt"
local awaitable = require "perilune.dist.awaitable"
local signature = require "perilune.signature"
local group_of = require("perilune.dist.group").group_of

local M = {}

local RowsAwaitable = util.class("RowsAwaitable", awaitable.Awaitable)
M.RowsAwaitable = RowsAwaitable

--- parts: a list of { tensor, rows for each rank }; `finish` makes the result of the tensors that arrived.
function RowsAwaitable:init(group, parts, finish)
  awaitable.Awaitable.init(self)
  local numbers, k = {}, #parts
  for r = 1, group.world_size do
    for i = 1, k do numbers[(r - 1) * k + i] = parts[i][2][r] end
  end
  self._group, self._parts, self._finish = group, parts, finish
  self._numbers = group:all_to_all(Tensor.tensor(numbers, "i64", "cpu"))
end

function RowsAwaitable:_wait_impl()
  local numbers, parts, works, arrived = self._numbers:wait():to_list(), self._parts, {}, {}
  for i = 1, #parts do
    local rows = {}
    for r = 1, self._group.world_size do rows[r] = numbers[(r - 1) * #parts + i] end
    works[i] = self._group:all_to_all_v(parts[i][1], parts[i][2], rows)
  end
  for i = 1, #parts do arrived[i] = works[i]:wait() end
  self._parts, self._numbers = nil, nil
  return self._finish(arrived)
end

--- One whole number for each rank; their sum is `total`.
local function counts(func, what, list, group, total)
  local n, sum, copy = group.world_size, 0, {}
  if type(list) ~= "table" or #list ~= n then
    P.fail(("%s: %s needs one number for each of %d ranks"):format(func, what, n))
  end
  for r = 1, n do
    copy[r] = util.integer(func, ("%s[%d]"):format(what, r), list[r], 0, 2 ^ 48)
    sum = sum + copy[r]
  end
  if sum ~= total then P.fail(("%s: %s sum to %d, there are %d"):format(func, what, sum, total)) end
  return copy
end

--- TensorAllToAll(pg)(tensor [n, ...], input_splits): the first input_splits[1] rows go to rank 0, and so on. An
--- awaitable of the rows that come, by rank.
local TensorAllToAll = util.class "TensorAllToAll"
M.TensorAllToAll = TensorAllToAll
function TensorAllToAll:init(pg) self.pg = group_of("TensorAllToAll", pg) end
function TensorAllToAll:__call(tensor, input_splits)
  tensor = awaitable.resolve(tensor)
  if not Tensor.is(tensor) then P.fail(("TensorAllToAll: a %s, wanted a tensor"):format(type(tensor))) end
  if tensor:dim() < 1 then P.fail "TensorAllToAll: a tensor of no dimensions has no rows" end
  local rows = counts("TensorAllToAll", "input_splits", input_splits, self.pg, tensor:size(1))
  return RowsAwaitable(self.pg, { { tensor, rows } }, function(arrived) return arrived[1] end)
end

--- JaggedTensorAllToAll(pg)(jt, num_items_to_send): the first num_items_to_send[1] bags go to rank 0, and so on. An
--- awaitable of the JaggedTensor of the bags that come, by rank; weights travel along.
local JaggedTensorAllToAll = util.class "JaggedTensorAllToAll"
M.JaggedTensorAllToAll = JaggedTensorAllToAll
function JaggedTensorAllToAll:init(pg) self.pg = group_of("JaggedTensorAllToAll", pg) end
function JaggedTensorAllToAll:__call(jt, num_items_to_send)
  local func = "JaggedTensorAllToAll"
  jt = awaitable.resolve(jt)
  if not JaggedTensor.is(jt) then P.fail(("%s: a %s, wanted a JaggedTensor"):format(func, type(jt))) end
  local lengths, weights, offsets = jt:lengths(), jt:weights_or_none(), jt:offset_list()
  local items = counts(func, "num_items_to_send", num_items_to_send, self.pg, lengths:numel())
  local rows, at = {}, 0
  for r = 1, #items do
    rows[r] = offsets[at + items[r] + 1] - offsets[at + 1]
    at = at + items[r]
  end
  local parts = { { lengths, items }, { jt:values(), rows }, weights and { weights, rows } or nil }
  return RowsAwaitable(self.pg, parts, function(arrived)
    return JaggedTensor { lengths = arrived[1], values = arrived[2], weights = arrived[3] }
  end)
end

signature.object("part_of_rows", "a { tensor, rows for each rank }", { "tensor", "numbers" })
signature.list_of("parts_of_rows", "a list of { tensor, rows for each rank }", "part_of_rows")
signature.check("RowsAwaitable:", RowsAwaitable,
  { init = "self: table, group: Group, parts: parts_of_rows, finish: callable" })

return M
