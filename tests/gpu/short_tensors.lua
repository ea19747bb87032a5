-- short_tensors.lua: the part of short.lua that calls tensors' everyday functions. Whole numbers, whose results are
-- equal everywhere.
local peri = require "perilune"
local F = peri.nn.functional

return function(same, ids_on)
  same("tensor functions", function(d)
    local x = ids_on(d, 60, 9, 201):to("f32"):reshape(5, 12)
    local ids, places = ids_on(d, 4, 5, 202), ids_on(d, 5 * 6, 12, 203):reshape(5, 6)
    local leaf = x:clone():detach():requires_grad()
    local best = leaf:topk(3)
    local sum = F.where(leaf:gt(4), leaf, leaf * 2):sum() + leaf:gather(2, places):sum()
      + leaf:index_select(1, ids):sum() + best:sum()
    sum = sum + (leaf:slice(2, 0, 3) ^ (leaf:slice(2, 3, 6) % 3)):sum() + leaf:prod(1):sum()
    sum:backward()
    local sorted, order = x:sort(2, true)
    return { x:eq(3), x:le(x:transpose(1, 2):contiguous():reshape(5, 12)), sorted, order, x:cumsum(1), x:argmax(2),
      x:amin(1), peri.arange(0, 40, 3, "i64", d), x:masked_fill(x:lt(2), -7), x:clamp(2, 5), ids % 3,
      ids:floor_divide(2) * ids - 1, places * x:slice(2, 0, 6), places:to("i32"):clamp(2, 7), leaf:grad(),
      ids:to("f32") % 3, ids:fmod(3), (x + 1):floor_divide(2), ids ^ (ids % 3), places:transpose(1, 2):matmul(places) }
  end)
end
