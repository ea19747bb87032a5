-- index.lua: t[i], t[{ i, { start, stop } }], t[ids], and assignments to them. Elements count from 0, as in slice, item
-- and ids; negative numbers count from the end; stops are not among the elements.
local ffi = require "ffi"
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor.core"
local errors = require "perilune.errors"

local methods = Tensor.methods
local unknown = getmetatable(methods) -- complains of names that no method has

local function whole(x) return type(x) == "number" and x == math.floor(x) end

local function refuse(t, i, at)
  P.fail(("%s: index %s%s, wanted a whole number (from 0, or from -1 for the end), { start, stop, step } or {}, a "
    .. "list of these, or a tensor of ids"):format(Tensor._text(t), errors.kind(i), at and " of dimension " .. at
    or ""))
end

--- The place that `i` names among n elements and the one behind them: negative numbers count from the end.
local function bound(t, d, i, n, default)
  if i == nil then return default end
  if not whole(i) then refuse(t, i, d) end
  local at = i < 0 and i + n or i
  if at < 0 or at > n then
    P.fail(("%s: bound %d of dimension %d, allowed: %d..%d"):format(Tensor._text(t), i, d, -n, n))
  end
  return at
end

--- By the method, which whoever records a model hears of.
local function select(t, d, i) return (methods.select(t, d, i)) end

--- One entry of a list for each of the first dimensions: a number takes its dimension away, a list { start, stop, step
--- } keeps a part.
local function several(t, list)
  local view, d = t, 1
  for k = 1, #list do
    local entry = list[k]
    if d > view:dim() then P.fail(("%s: %d indices, allowed: %d"):format(Tensor._text(t), #list, t:dim())) end
    if whole(entry) then
      view = select(view, d, entry)
    elseif type(entry) == "table" and getmetatable(entry) == nil then
      local n = view:size(d)
      local start, stop = bound(t, k, entry[1], n, 0), bound(t, k, entry[2], n, n)
      view = view:slice(d, math.min(start, stop), stop, entry[3])
      d = d + 1
    else
      refuse(t, entry, k)
    end
  end
  return view
end

local function by_ids(t, ids)
  if t:dim() == 0 then P.fail(("%s: it has no dimension to index"):format(Tensor._text(t))) end
  if ids:dtype() == "bool" then return (Tensor._by_mask(t, ids)) end
  local shape, rest = ids:shape(), t:shape()
  local rows = methods.index_select(t, 1, #shape == 1 and ids or ids:reshape(-1))
  if #shape == 1 then return rows end
  for d = 2, #rest do shape[#shape + 1] = rest[d] end
  return rows:reshape(shape)
end

local function at(t, i)
  if whole(i) then return select(t, 1, i) end
  if type(i) == "cdata" and ffi.istype("int64_t", i) then return select(t, 1, tonumber(i)) end
  if type(i) == "table" and getmetatable(i) == nil then return several(t, i) end
  if Tensor.is(i) then return by_ids(t, i) end
  refuse(t, i)
end

setmetatable(methods, nil)
--- t.name of a method, or t[i].
function Tensor.meta.__index(t, key)
  local method = methods[key]
  if method ~= nil then return method end
  if type(key) == "string" then return unknown.__index(methods, key) end
  return at(t, key)
end

--- t[i] = a number, or a tensor that broadcasts to it. Not recorded on the tape, so it is refused where that would lose
--- a gradient.
function Tensor.meta.__newindex(t, i, value)
  if type(i) == "string" then
    P.fail(("a tensor has no field %s that could be set%s"):format(errors.kind(i), rawget(Tensor.methods, i)
      and ("; it is a method: t:%s(...)"):format(i) or ""))
  end
  local tensor = Tensor.is(value)
  if not tensor and not Tensor._is_number(value) then
    P.fail(("%s: [%s] = %s, wanted a number or a tensor"):format(Tensor._text(t), tostring(i), errors.kind(value)))
  end
  if P.state.grad and (t:describe().requires_grad or tensor and value:describe().requires_grad) then
    P.fail(("%s: [%s] = ... is not recorded, and its gradients are wanted; use where or masked_fill, or "
      .. "peri.no_grad"):format(
      Tensor._text(t), errors.kind(i)))
  end
  if Tensor.is(i) then
    P.fail(("%s: [ids] = ... is not there; t[{ i, j }] and slices can be set; masked_fill, scatter and index_add make "
      .. "another tensor"):format(Tensor._text(t)))
  end
  local view = at(t, i)
  if tensor then view:copy(value) else view:fill(value) end
end

return Tensor
