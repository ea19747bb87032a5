-- short_tensors.lua: the part of short.lua that calls tensors' everyday functions. Whole numbers, whose results are
-- equal everywhere.
local peri = require "perilune"
local nn, F = peri.nn, peri.nn.functional

local function more(same, ids_on)
  same("more tensor functions", function(d)
    local x = ids_on(d, 60, 5, 204):to("f32"):reshape(5, 12)
    local ids, places = ids_on(d, 5, 5, 205), ids_on(d, 5 * 6, 12, 206):reshape(5, 6)
    local leaf, other = x:clone():detach():requires_grad(), x:slice(2, 0, 6):clone():detach():requires_grad()
    local sum = leaf:slice(2, 0, 4):cumprod(2):sum() + leaf:scatter_add(2, places, other):square():sum()
      + leaf:scatter(2, places:slice(2, 0, 1), other:slice(2, 0, 1)):square():sum()
      + leaf:index_add(1, ids, leaf * 2):square():sum()
    sum:backward()
    local values, inverse, counts = (x / 2):unique(true, true)
    return { leaf:grad(), other:grad(), values, inverse, counts, x:median(2), x[x:gt(2)], x:nonzero(), x:roll(3, 2),
      x:flip(1), x:quantile({ 0.3, 0.5 }, 2),
      (x / 2):floor() + (x / 2):ceil() + (x / 4):round() + (x / 4):trunc() + (x - 2):sign(), x:triu(1),
      F.searchsorted(x:sort(2), x, true), ids:bincount(nil, 9), ids:isin(places), places:cumprod(1),
      (x:cummax(2)), select(2, x:cummin(1)), select(2, x:kthvalue(3, 2)),
      places:scatter_add(1, places % 5, places), places:scatter(1, places % 5, places),
      peri.zeros({ 7 }, "f32", d):scatter_add(1, ids_on(d, 900, 7, 208), ids_on(d, 900, 5, 209):to "f32") }
  end)
  same("counts, choices and items of a batch", function(d)
    local x = ids_on(d, 60, 5, 210):to("f32"):reshape(5, 12)
    local leaf = x:clone():detach():requires_grad()
    local most, place = leaf:mode(2)
    local log_q = (ids_on(d, 5, 5, 212):to "f32"):requires_grad()
    local queries = x:slice(2, 0, 4):clone():detach():requires_grad()
    local loss = F.in_batch_softmax_loss(queries, x:slice(2, 4, 8), { ids = ids_on(d, 5, 3, 211), log_q = log_q,
      temperature = 2 })
    local sum = most:sum() + leaf:masked_select(x:select(1, 0):gt(2)):square():sum()
    sum:backward()
    loss:backward()
    return { most:detach(), place, leaf:grad(), x:histc(6), (x - 2):histc(4, -1, 1), x:to("i64"):histc(3), x:nonzero(),
      x:reshape(-1):nonzero(), x:to("i32"):unique(), ids_on(d, 10, 7, 213):one_hot(7), loss:detach(), queries:grad(),
      log_q:grad() }
  end, 1e-6)
  same("borders, triangles and sums of integers", function(d)
    local x = ids_on(d, 60, 5, 220):to("f32"):reshape(3, 4, 5)
    local leaf = x:clone():detach():requires_grad()
    local sum = leaf:pad({ 1, -2, 0, 3 }, 2):square():sum() + leaf:triu(-1):square():sum() + leaf:tril():square():sum()
    sum:backward()
    local ids = ids_on(d, 6000, 90, 221):reshape(3, 2000)
    return { sum:detach(), leaf:grad(), ids:sum(), ids:sum(1), ids:sum(2, true), ids:gt(7):count_nonzero(2),
      ids:to("i8"):sum { 1, 2 }, ids:pad({ 1, 1 }, -4), ids:isin(ids_on(d, 9, 90, 222)), (x / 2):isin(x),
      ids:tile { 2, 1, 2 } }
  end)
  same("cosines and attention", function(d)
    local x, y = ids_on(d, 48, 5, 223):to("f32"):reshape(2, 4, 6), ids_on(d, 48, 7, 224):to("f32"):reshape(2, 4, 6)
    local a, b = x:clone():detach():requires_grad(), y:clone():detach():requires_grad()
    local loss = F.cosine_similarity(a, b):sum() + F.cosine_similarity(a, b, 2):square():sum()
      + F.cosine_embedding_loss(a:select(1, 0), b:select(1, 1), ids_on(d, 4, 2, 225):to "f32" * 2 - 1)
      + F.scaled_dot_product_attention(a, b, b, nil, true):square():sum()
    loss:backward()
    return { loss:detach(), a:grad(), b:grad() }
  end, 1e-5)
  same("logarithms and circles", function(d)
    local x = ids_on(d, 40, 9, 207):to("f32"):requires_grad()
    local sum = (x / 9):log1p() + (x / 9):expm1() + (x + 1):rsqrt() + x:sin() + x:cos() + (x / 4):erf()
    sum:sum():backward()
    return { sum:detach(), x:grad() }
  end, 1e-6)
end

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

  more(same, ids_on)

  -- What the host would queue in dozens of launches, captured and replayed; on cpu as ever.
  same("graphs", function(d)
    nn.manual_seed(4)
    local mlp, last = nn.MLP { in_size = 8, layer_sizes = { 16, 4 }, device = d },
      nn.Linear { in_features = 8, out_features = 1, device = d }
    local function loss_of(x, y) return F.binary_cross_entropy_with_logits(last(F.cat({ mlp(x), y }, 2)):reshape(-1),
      x:select(2, 0):detach()) end
    local graph = nn.graphed(loss_of, { modules = { mlp, last } })
    local params = mlp:parameters()
    for _, p in ipairs(last:parameters()) do params[#params + 1] = p end
    local optimizer, out = nn.optim.Adam { params = params, lr = 0.01 }, {}
    for i = 1, 6 do
      local x, y = peri.Tensor.uniform({ 32, 8 }, 0, 1, i, 0, "f32", "cpu"):to(nil, d),
        peri.Tensor.uniform({ 32, 4 }, 0, 1, i, 1, "f32", "cpu"):to(nil, d):requires_grad()
      optimizer:zero_grad()
      out[#out + 1] = graph(x, y)
      out[#out]:backward()
      out[#out + 1] = y:grad()
      optimizer:step()
    end
    if d ~= "cpu" and graph.replays ~= 5 then error(tostring(graph), 0) end
    for _, p in ipairs(params) do out[#out + 1] = p:detach() end
    return out
  end, 1e-4)
end
