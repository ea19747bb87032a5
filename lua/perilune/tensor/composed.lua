-- composed.lua: everyday functions that are made of other functions, with PyTorch's names: members of nn.functional and
-- methods of tensors.
local P = require "perilune.ffi"
local Tensor = require "perilune.tensor.core"
local F = require "perilune.tensor.ops"
local signature = require "perilune.signature"

--- t divided by its p-norm (2) along dim (2); norms below eps (1e-12) count as eps.
function F.normalize(t, p, dim, eps)
  return F.div(t, F.clamp(F.norm(t, p or 2, dim or 2, true), eps or 1e-12))
end

--- The logarithm of the sum of exp(t) over dim (as in sum).
function F.logsumexp(t, dim, keepdim)
  local most = F.amax(t:detach(), dim, true)
  most = F.masked_fill(most, F.eq(F.abs(most), math.huge), 0) -- infinite ones would leave NaN behind
  local sum = F.log(F.sum(F.exp(F.sub(t, most)), dim, keepdim))
  return F.add(sum, most:reshape(sum:shape()))
end

--- Whether any element over dim (as in sum) is true, or not 0: bool.
function F.any(t, dim, keepdim) return F.gt(F.sum(F.ne(t, 0), dim, keepdim), 0) end
--- Whether all of them are.
function F.all(t, dim, keepdim) return F.eq(F.sum(F.eq(t, 0), dim, keepdim), 0) end

--- Views of t cut along dim (1) into n parts of one size, the last of which may be smaller, or missing.
function F.chunk(t, n, dim)
  if n < 1 then P.fail(("chunk: n is %d, allowed: 1 and more"):format(n)) end
  local total, sizes = t:size(dim or 1), {}
  local each = math.max(1, math.ceil(total / n))
  for at = 0, total - 1, each do sizes[#sizes + 1] = math.min(each, total - at) end
  if total == 0 then
    for i = 1, n do sizes[i] = 0 end
  end
  return F.split(t, sizes, dim)
end

--- t with the dimensions from `first` (1) to `last` (-1) as one.
function F.flatten(t, first, last)
  local n, shape, product = t:dim(), {}, 1
  if n == 0 then return t:reshape(1) end
  first, last = first or 1, last or -1
  local from, to = first < 0 and first + n + 1 or first, last < 0 and last + n + 1 or last
  if from < 1 or to > n or from > to then
    P.fail(("flatten: dimensions %d to %d of %s, wanted first <= last of its %d"):format(first, last, Tensor._text(t),
      n))
  end
  for d = 1, n do
    if d < from or d > to then shape[#shape + 1] = t:size(d)
    else
      product = product * t:size(d)
      if d == to then shape[#shape + 1] = product end
    end
  end
  return t:reshape(shape)
end

--- For each id a row of `classes` numbers, 1 at its place and 0 elsewhere: i64. Waits for the ids, to check them.
function F.one_hot(ids, classes)
  if ids:numel() > 0 then
    local least, most = F.amin(ids):item(), F.amax(ids):item()
    if least < 0 or most >= classes then
      P.fail(("one_hot: ids from %d to %d of %s, allowed: 0..%d"):format(tonumber(least), tonumber(most),
        Tensor._text(ids), classes - 1))
    end
  end
  return F.eq(F.unsqueeze(ids, -1), Tensor.arange(0, classes, 1, "i64", ids:device())):to "i64"
end

signature.check("", F, {
  normalize = "t: tensor, p: number?, dim: dims?, eps: number?", logsumexp = "t: tensor, dim: dims?, keepdim: boolean?",
  any = "t: tensor, dim: dims?, keepdim: boolean?", all = "t: tensor, dim: dims?, keepdim: boolean?",
  chunk = "t: tensor, n: count, dim: dim?", flatten = "t: tensor, first: dim?, last: dim?",
  one_hot = "ids: tensor, classes: count",
})
for _, name in ipairs { "normalize", "logsumexp", "any", "all", "chunk", "flatten", "one_hot" } do
  Tensor.methods[name] = F[name]
end

return F
