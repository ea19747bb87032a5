-- clip.lua: norms of gradients and their limits, over ranks too, as PyTorch's clip_grad_norm_ and clip_grad_value_.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local F = require "perilune.nn.functional"
local leaves = require "perilune.nn.parameter"
local signature = require "perilune.signature"
local C, check, ptr, tensor_out = P.C, P.check, Tensor.ptr, Tensor.out

local M = {}

local function address_of(tensor) return tonumber(ffi.cast("intptr_t", ptr(tensor))) end

--- An error if a tensor is in a list twice: an optimizer would step it twice, a norm count it twice. at: address ->
--- position so far.
function M.once(func, what, at, tensor, position)
  local address = address_of(tensor)
  if at[address] then
    P.fail(("%s: %s[%d] is the same tensor as %s[%d]; each may be there once"):format(func, what, position, what,
      at[address]))
  end
  at[address] = position
end

--- C's array of tensors.
function M.pointers(tensors)
  local array = ffi.new("peri_tensor *[?]", math.max(#tensors, 1))
  for i = 1, #tensors do array[i - 1] = ptr(tensors[i]) end
  return array
end

local function power_of(array, n, p)
  check(C.peri_grad_norm_power(array, n, p, tensor_out))
  return Tensor.wrap(tensor_out[0])
end

local function tensor_of(p) return p.tensor end

--- The parameters of a list that may have their names, and what it says of ranks. An error if one of them is trained no
--- more: no gradient reaches it, so it would be left out without a word.
local function tensors_of(func, params)
  local list = params
  if type(params[1]) == "table" and not Tensor.is(params[1]) then
    list = util.map(params, tensor_of)
    list.elsewhere, list.group = params.elsewhere, params.group
  end
  for i, p in ipairs(list) do
    if leaves.retired[p] then P.fail(("%s: parameter %d %s"):format(func, i - 1, leaves.retired[p])) end
  end
  return list
end

--- What a norm is made of: parameters that all ranks have alike, and of which each has its own part: { sharded = list,
--- group = }, or nil. The list of parameters tells them apart, unless `options` does.
function M.parts_of(func, params, options)
  local at = {}
  params = tensors_of(func, params)
  for i, p in ipairs(params) do M.once(func, "params", at, p, i) end
  local own, alike, chosen = {}, {}, options and options.sharded
  if chosen and not options.group then P.fail(func .. ": sharded parameters need a group") end
  for _, p in ipairs(chosen or {}) do own[address_of(p)] = true end
  local parts = {}
  for i, p in ipairs(params) do
    local mine = own[address_of(p)]
    if not chosen and leaves.own_parts[p] then
      if not params.elsewhere then
        P.fail(("%s: parameter %d is this rank's shard of a dense table, so the norm is of all ranks: give "
          .. "model:dense_parameters() as it is, or sharded = and group ="):format(func, i - 1))
      end
      parts[#parts + 1], mine = p, true
    end
    if not mine then alike[#alike + 1] = p end
  end
  if chosen then return alike, #chosen > 0 and options or nil end
  return alike, params.elsewhere and { sharded = parts, group = params.group } or nil
end

--- The sum (largest, if p is infinite) of both over all ranks of a group, for parameters of which each rank holds its
--- own part. Collective.
local function with_sharded(power, sharded, group, p)
  local own = #sharded > 0 and power_of(M.pointers(sharded), #sharded, p)
    or Tensor.full({}, 0, "f64", power and power:device())
  group:all_reduce(own, p == math.huge and "max" or "sum"):wait()
  if not power then return own end
  if p == math.huge then return (F.max(F.stack({ power, own }, 1), 1)) end
  return F.add(power, own)
end

local function norm_of(alike, parts, p)
  local power
  if #alike > 0 then power = power_of(M.pointers(alike), #alike, p) end
  if parts then power = with_sharded(power, parts.sharded, parts.group, p) end
  if not power then P.fail "grad_norm: no parameters" end
  check(C.peri_grad_norm_finish(ptr(power), p, tensor_out))
  return Tensor.wrap(tensor_out[0])
end

function M.clip(alike, parts, max_norm, norm_type)
  local norm = norm_of(alike, parts, norm_type)
  check(C.peri_grad_clip_norm(M.pointers(alike), #alike, ptr(norm), max_norm))
  if parts then check(C.peri_grad_clip_norm(M.pointers(parts.sharded), #parts.sharded, ptr(norm), max_norm)) end
  return norm
end

--- Norm of all gradients of a list of parameters: an f64 scalar tensor. Collective where the list
--- (model:dense_parameters()) holds shards of dense tables, on this rank or on another; `options` says which they are
--- in other lists: sharded = a list of parameters of which each rank of `group` holds its own part.
function M.grad_norm(params, norm_type, options)
  local alike, parts = M.parts_of("grad_norm", params, options)
  return norm_of(alike, parts, norm_type or 2)
end

--- Scale all gradients in place so that their norm is at most max_norm. Returns the norm that they had. Collective as
--- grad_norm is.
function M.clip_grad_norm(params, max_norm, norm_type, options)
  local alike, parts = M.parts_of("clip_grad_norm", params, options)
  return M.clip(alike, parts, max_norm, norm_type or 2)
end

--- Limit every element of all gradients to +-clip_value, in place.
function M.clip_grad_value(params, clip_value)
  params = tensors_of("clip_grad_value", params)
  check(C.peri_grad_clip_value(M.pointers(params), #params, clip_value))
end

signature.check("", M, {
  grad_norm = "params: list, norm_type: number?, options: table?",
  clip_grad_norm = "params: list, max_norm: number, norm_type: number?, options: table?",
  clip_grad_value = "params: list, clip_value: number",
})

return M
