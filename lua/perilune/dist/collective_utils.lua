-- collective_utils.lua: control flow over ranks (torchrec.distributed.collective_utils). A group that is nil stands for
-- a single process.
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local serial = require "perilune.serial"
local signature = require "perilune.signature"
local awaitable = require "perilune.dist.awaitable"
local group_of = require("perilune.dist.group").group_of

local M = {}
local FUNC = "invoke_on_rank_and_broadcast_result"
local OK, FAILED = 0, 1

--- True on the rank of the group that leads (its rank 0 unless said otherwise).
function M.is_leader(group, leader_rank)
  local own = group ~= nil and group_of("is_leader", group) or nil
  leader_rank = util.integer("is_leader", "leader_rank", leader_rank or 0, 0, own and own:size() - 1)
  return (own and own:rank() or 0) == leader_rank
end

--- The bytes of rank `rank` on all ranks, with a number beside them. Waits.
local function broadcast_bytes(group, rank, status, bytes)
  local own = group:rank() == rank
  local head = Tensor.tensor({ own and status or 0, own and #bytes or 0 }, "i64", "cpu")
  local numbers = group:broadcast(head, rank):wait():to_list()
  if numbers[2] == 0 then return numbers[1], "" end
  local body = own and Tensor.from_memory(bytes, { #bytes }, "u8", "cpu") or Tensor.empty({ numbers[2] }, "u8", "cpu")
  local buffer, n = group:broadcast(body, rank):wait():read()
  return numbers[1], require("ffi").string(buffer, n)
end

--- Run func(...) on rank `rank` of the group; every rank returns its result (nil, booleans, numbers, strings, tables of
--- them). What it raises is raised on every rank, in the same words (`rank` of the error: where it comes from), and so
--- is a result that cannot be sent. Collective.
function M.invoke_on_rank_and_broadcast_result(group, rank, func, ...)
  if type(func) ~= "function" then P.fail(("%s: func is a %s"):format(FUNC, type(func))) end
  if group == nil then return func(...) end
  group_of(FUNC, group)
  util.integer(FUNC, "rank", rank, 0, group:size() - 1)
  local own = group:rank() == rank
  local status, bytes, raised = OK, "", nil
  if own then
    local ok, result = xpcall(func, P.locate, ...)
    if ok then ok, result = xpcall(serial.encode, P.locate, awaitable.resolve(result), FUNC) end
    if ok then bytes = result
    else
      raised = result
      local own_error = getmetatable(result) == P.Error
      local message, name = errors.describe(result)
      status, bytes = FAILED, serial.encode { message = own_error and result.message or message, place = own_error
        and result.place or nil, path = own_error and result.path or nil, rank = errors.rank(), name = name,
        code = type(result) == "table" and result.code or nil }
    end
  end
  status, bytes = broadcast_bytes(group, rank, status, bytes)
  if raised ~= nil then error(raised, 0) end
  local value = serial.decode(bytes, FUNC)
  if status == OK then return value end
  error(setmetatable({ code = value.code or P.C.PERI_EPEER, name = value.name or "EPEER", where = "",
    message = value.message, place = value.place, path = value.path, rank = value.rank }, P.Error), 0)
end

--- run_on_leader(group, rank)(func): func as a function that runs on that rank and returns its result on all. Calls of
--- it are collective.
function M.run_on_leader(group, rank)
  return function(func)
    return function(...) return M.invoke_on_rank_and_broadcast_result(group, rank or 0, func, ...) end
  end
end

--- `value` (nil, booleans, numbers, strings, tables of them) of every rank, as a list in their order. Collective;
--- waits.
function M.all_gather_object(group, value, func) return group:all_gather_object(value, func) end

--- Facts that must be the same on all ranks: a list of { name, text or number }. An error on all ranks names the first
--- that is not. Collective; waits.
function M.agree(group, func, facts)
  local lists = M.all_gather_object(group, facts, func)
  local function differs(r, what, a, b)
    errors.raise { code = P.C.PERI_EMISMATCH, name = "EMISMATCH", where = "", rank = group:rank(),
      message = ("%s: %s %s on rank 0 of group '%s' and %s on rank %d; allowed: the same on all ranks"):format(func,
        what, tostring(a), group.name, tostring(b), r - 1) }
  end
  for r = 2, #lists do
    for i, fact in ipairs(lists[1]) do
      local other = lists[r][i]
      if not other or other[1] ~= fact[1] then differs(r, "there is", fact[1], other and other[1] or "nothing more") end
      if other[2] ~= fact[2] then differs(r, fact[1] .. " is", fact[2], other[2]) end
    end
    local more = lists[r][#lists[1] + 1]
    if more then differs(r, "there is", "nothing more", more[1]) end
  end
end

signature.check("", M, { all_gather_object = "group: Group, value: any, func: string?",
  agree = "group: Group, func: string, facts: list" })

return M
