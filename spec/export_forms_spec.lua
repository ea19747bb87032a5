-- Functions of ranking and retrieval models in model files: elements in order, by places, among others, running sums,
-- angles. The file has the model's bits for each form, whatever stands beside a sample, also of ties and of numbers
-- at the edges.
local peri = require "perilune"
local bits = require "spec.support.bits"
local shell = require "spec.support.shell"
local nn, F = peri.nn, peri.nn.functional

local folder, clean = shell.temporary()
teardown(clean)

local edges = { 0 / 0, 1 / 0, -1 / 0, 0, -0.0, 0.5, -0.5, 2, 2, 1e-40, 3e-20, 1e30, -1e30 }
local function batch(n, seed, wild)
  local state = seed
  local function random(most) -- a generator of its own: the same numbers everywhere
    state = (state * 1103515245 + 12345) % 2 ^ 31
    return 1 + math.floor(state / 2 ^ 31 * most)
  end
  local function numbers(columns)
    local list = {}
    for i = 1, n * columns do
      list[i] = wild and random(3) == 1 and edges[random(#edges)] or (random(4001) - 2001) / 500
    end
    return peri.tensor(list):reshape(n, columns)
  end
  return { x = numbers(12), y = numbers(12), z = numbers(4) }
end

local vector = peri.Tensor.uniform({ 4 }, -1, 1, 3)
local bounds = peri.tensor { -1, 0, 0.5, 0.5, 2 }
local ids, square = peri.tensor({ 2, 0, 2, 1 }, "i64"), peri.Tensor.uniform({ 3, 3 }, -1, 1, 4)
local function number(t) return t:to "f32" end

-- name -> f(c [n, 3, 4], e likewise, z [n, 4])
local forms = {
  sort = function(c) return (F.sort(c)) end,
  sort_places = function(c) return number((select(2, F.sort(c, 2, true)))) end,
  argsort = function(c) return number(F.argsort(c, -1)) end,
  topk = function(c) return (F.topk(c, 2)) end, topk_2 = function(c) return (F.topk(c, 2, 2, false)) end,
  topk_places = function(c) return number((select(2, F.topk(c, 3)))) end,
  kthvalue = function(c) return (F.kthvalue(c, 2, 2)) end, median = function(c) return (F.median(c, 3, true)) end,
  max = function(c) return (F.max(c, 2)) end, min = function(c) return (F.min(c, 3, true)) end,
  max_of = function(c, e) return (F.max(c, e)) end,
  argmax = function(c) return number(F.argmax(c, 3)) end, argmin = function(c) return number(F.argmin(c, 2)) end,
  cumsum = function(c) return F.cumsum(c, 2) end, cumsum_of_truth = function(c) return number(F.cumsum(c:gt(0), 3)) end,
  cumprod = function(c) return F.cumprod(c, 3) end, prod = function(c) return F.prod(c, 2) end,
  tril = function(c) return F.tril(c) end, triu = function(c) return F.triu(c, 1) end,
  best_rows = function(c, e, z)
    local _, places = F.topk(z:slice(2, 0, 3), 2)
    return F.gather(c, 2, F.unsqueeze(places, 3):expand { c:size(1), 2, 4 }) + F.gather(e, 2,
      F.unsqueeze(places, 3):expand { c:size(1), 2, 4 })
  end,
  taken = function(c, _, z) return F.take_along_dim(c, F.argsort(z):unsqueeze(2), 3) end,
  embedded = function(c) return F.one_hot(F.argmax(c, 3), 5):to "f32" end,
  searchsorted = function(c) return number(F.searchsorted(bounds, c)) end,
  bucketize = function(c) return number(F.bucketize(c, bounds, true)) end,
  isin = function(c) return number(F.isin(c, peri.tensor { 2, -1, 0, 2 })) end,
  isnan = function(c) return number(F.isnan(c)) end, isfinite = function(c) return number(F.isfinite(c)) end,
  any = function(c) return number(F.any(c:gt(1), 3)) end, count = function(c) return number(F.count_nonzero(c, 2)) end,
  nanmean = function(c) return F.nanmean(c, 3) end, normalize = function(c) return F.normalize(c, 2, 3) end,
  cosine = function(c, e) return F.cosine_similarity(c, e) end,
  cosine_2 = function(c, e) return F.cosine_similarity(c, e, 2, 0.7) end,
  cosine_fixed = function(c) return F.cosine_similarity(c, vector, -1) end,
  cosine_wide = function(c, _, z) return F.cosine_similarity(c, F.unsqueeze(z, 2), 2) end,
  pow = function(c, e) return c ^ e end, power = function(c) return 2 ^ c end,
  remainder = function(c, e) return c % e end, remainder_by = function(c) return c % 0.7 end,
  fmod = function(c, e) return F.fmod(c, e) end, floor_divide = function(c) return F.floor_divide(3, c) end,
  cummax = function(c) return (F.cummax(c, 2)) end, cummin = function(c) return (F.cummin(c, 3)) end,
  cummax_places = function(c) return number((select(2, F.cummax(c, 3)))) end,
  mode = function(c) return (F.mode(F.round(c), 3)) end,
  mode_places = function(c) return number((select(2, F.mode(F.round(c), 2, true)))) end,
  quantile = function(c) return F.quantile(c, 0.3, 2) end,
  quantile_7 = function(c) return F.quantile(c, 0.7, 3, true) end,
  quantiles = function(c) return F.quantile(c, { 0, 0.25, 0.5, 0.9, 1 }, 3):permute { 2, 1, 3 } end,
  isclose = function(c, e) return number(F.isclose(c, e, 0.3, 0.2)) end,
  isclose_nan = function(c) return number(F.isclose(c, F.round(c), 0.1, 0, true)) end,
  scatter = function(c, e) return F.scatter(c, 3, F.argsort(e), c * 2) end,
  scatter_fewer = function(c, e) return F.scatter(c, 2, F.argmax(e, 2, true), 7) end,
  scatter_alike = function(c, e) return F.scatter(c, 3, F.cat({ F.argmax(e, 3, true), F.argmin(c, 3, true) }, 3),
    e:slice(3, 0, 2)) end,
  scatter_add = function(c, e) return F.scatter_add(c, 3, F.cat({ F.argmax(e, 3, true), F.argmax(c, 3, true) }, 3)
    , e:slice(3, 0, 2)) end,
  scatter_fixed = function(_, e) return F.scatter_add(peri.zeros { e:size(1), 3, 4 }, 2, F.argsort(e, 2), e) end,
  index_add = function(c, e) return F.index_add(c, 3, ids, e, -2) end,
  index_add_rows = function(c, e) return F.index_add(c, 2, ids:slice(1, 0, 3), e) end,
  diag = function(_, _, z) return F.matmul(z, F.diag(vector)) + F.diag(square, 1):sum() end,
  addmm = function(_, _, z) return F.addmm(vector, z, peri.ones { 4, 4 }, 0, 2) end,
}

local Forms = nn.Module:extend "Forms"
function Forms:forward(b)
  local c, e, made = b.x:reshape(-1, 3, 4), b.y:reshape(-1, 3, 4), {}
  for name, f in pairs(forms) do made[name] = f(c, e, b.z) end
  return made
end

describe("forms of model files", function()
  it("have the model's bits, alone and in batches", function()
    local path, batches = folder .. "/forms.peri", {}
    for i, n in ipairs { 64, 1, 2, 7, 33 } do batches[i] = batch(n, i, i > 3) end
    local report = Forms():export(path, { batches = batches, finite = false })
    assert.same({ 0, 107 }, { report.differ, report.samples })
    local file = peri.export.open(path)
    local whole = file:predict(batches[1])
    for _, i in ipairs { 0, 40, 63 } do
      local one = {}
      for name, t in pairs(batches[1]) do one[name] = t:slice(1, i, i + 1):contiguous() end
      for name, t in pairs(file:predict(one)) do
        assert.equal(bits(whole[name]:slice(1, i, i + 1):contiguous()), bits(t), name)
      end
    end
  end)

  it("are refused where samples would meet", function()
    local function refused(f, message)
      local Model = nn.Module:extend "Model"
      function Model:forward(b) return f(b.x, b.y) end -- luacheck: ignore self
      local ok, err = pcall(Model().export, Model(), folder .. "/no.peri", { batches = { batch(20, 1) } })
      assert.is_false(ok)
      assert.matches(message, tostring(err))
    end
    refused(function(x) return (F.sort(x, 1)) end, "'sort': sort goes across samples")
    refused(function(x) return (F.topk(x, 2, 1)) end, "'topk': the shape is")
    refused(function(x) return F.cumsum(x, 1) end, "'cumsum': cumsum goes across samples")
    refused(function(x) return F.triu(x) end, "'triu': triu goes across samples")
    refused(function(x) return F.max(x) + x end, "'max': of all numbers it goes across samples")
    refused(function(x, y) return F.isin(x, y):to "f32" end, "among numbers of the batch")
    refused(function(x) return (F.cummax(x, 1)) end, "'cummax': cummax goes across samples")
    refused(function(x) return (F.mode(x, 1)) end, "'mode': the shape is")
    refused(function(x) return F.quantile(x, 0.5) end, "samples")
    refused(function(x, y) return F.scatter(x, 1, F.argsort(y:slice(2, 0, 4), 2), y:slice(2, 0, 4)) end,
      "'scatter': scatter goes across samples")
    refused(function(x) return F.scatter(x, 2, peri.tensor({ { 1, 2 } }, "i64"), 3) end, "places of 1 samples, of 5")
    refused(function(x, y) return F.index_add(x, 2, F.argmax(y, 1), y) end, "the shape is")
    refused(function(x) return F.diag(x):unsqueeze(1) end, "must not depend on their number")
  end)
end)
