-- tbe_reference.lua: table-batched embedding in double precision and plain Lua: what the specs hold the kernels
-- against. Written from the formulas of kernels/tbe.h, sharing no code with them.
local M = {}

local function zeros(n)
  local t = {}
  for i = 1, n do t[i] = 0 end
  return t
end

--- Optimizers with one first moment for a row.
local first_by_row = {
  rowwise_adagrad = true, rowwise_rmsprop_ar = true, emainplace_rowwise_adagrad = true,
  rowwise_adagrad_with_counter = true,
}

--- tables: list of { rows, cols, weight = flat list, pooling = "SUM" | "MEAN" | "NONE" };
--- optimizer: { kind =, learning_rate =, eps =, ... }.
function M.new(tables, optimizer)
  local self = { tables = {}, optimizer = optimizer, iteration = 0 }
  for i, t in ipairs(tables) do
    local n = t.rows * t.cols
    local copy = { rows = t.rows, cols = t.cols, pooling = t.pooling, weight = {}, momentum1 = {}, momentum2 = {},
      row_counter = {} }
    for k = 1, n do copy.weight[k] = t.weight[k] end
    copy.momentum1 = zeros(first_by_row[optimizer.kind] and t.rows or n)
    copy.momentum2 = zeros(optimizer.kind:find "^partial" and t.rows or n)
    copy.row_counter, copy.prev_iter, copy.max_counter = zeros(t.rows), zeros(t.rows), { 1 }
    self.tables[i] = copy
  end
  return setmetatable(self, { __index = M })
end

--- Visit every item: f(block, bag, place in ids (from 1), table, row (from 0), factor). blocks as for tbe:blocks.
--- Invalid ids are skipped.
local function each(self, input, f)
  for _, b in ipairs(input.blocks) do
    local t = self.tables[b.table]
    for j = 0, b.bags - 1 do
      local bag = b.first_bag + j
      local from, to = input.offsets[bag + 1], input.offsets[bag + 2]
      local factor = (t.pooling == "MEAN" and to > from) and 1 / (to - from) or 1
      if input.scale then factor = factor * input.scale[bag + 1] end
      for i = from + 1, to do
        local id = input.ids[i]
        if id >= 0 and id < t.rows then f(b, t.pooling == "NONE" and i - 1 or j, i, t, id, factor) end
      end
    end
  end
end

--- EMA in place, before the lookup of a training step: every row's right half follows its left one.
local function average(self)
  local o, step = self.optimizer, self.iteration + 1
  local mode = o.emainplace_mode or {}
  if o.kind ~= "emainplace_rowwise_adagrad" or self.averaged == step then return end
  if step < (mode.step_start or 0) or step % (mode.step_ema or 10) ~= 0 then return end
  self.averaged = step
  local coef = mode.step_ema_coef or 0.6
  for _, t in ipairs(self.tables) do
    for row = 0, t.rows - 1 do
      for d = 1, t.cols / 2 do
        local fast = row * t.cols + d
        local slow = fast + t.cols / 2
        t.weight[slow] = (1 - coef) * t.weight[slow] + coef * t.weight[fast]
      end
    end
  end
end

--- Flat output of n numbers of a lookup in training.
function M.forward(self, input, n)
  average(self)
  local out = zeros(n)
  each(self, input, function(b, j, i, t, row, factor)
    local w = (input.weights and input.weights[i] or 1) * factor
    for d = 1, t.cols do
      local at = b.out_offset + j * b.out_stride + d
      out[at] = out[at] + w * t.weight[row * t.cols + d]
    end
  end)
  return out
end

--- Gradient of the ids' weights.
function M.weight_gradient(self, input, grad)
  local out = zeros(#input.ids)
  each(self, input, function(b, j, i, t, row, factor)
    for d = 1, t.cols do
      out[i] = out[i] + factor * grad[b.out_offset + j * b.out_stride + d] * t.weight[row * t.cols + d]
    end
  end)
  return out
end

--- Summed gradients: by table, a map from row to a list of numbers.
function M.gradient(self, input, grad)
  local sums = {}
  for _, t in ipairs(self.tables) do sums[t] = {} end
  local most = self.optimizer.max_gradient
  each(self, input, function(b, j, i, t, row, factor)
    local g = sums[t][row] or zeros(t.cols)
    sums[t][row] = g
    local w = (input.weights and input.weights[i] or 1) * factor
    for d = 1, t.cols do
      local x = grad[b.out_offset + j * b.out_stride + d]
      if most then x = math.max(-most, math.min(most, x)) end
      g[d] = g[d] + w * x
    end
  end)
  return sums
end

local rules = {}

local function norm(list, from, n)
  local sum = 0
  for d = 1, n do sum = sum + list[from + d] ^ 2 end
  return math.sqrt(sum)
end

--- The gradient as decay L2 makes it, and what decoupled decay leaves of the weights.
local function decayed(o, t, row, g)
  local decay, mode, x = o.weight_decay or 0, o.weight_decay_mode or "none", {}
  for d = 1, t.cols do x[d] = g[d] + (mode == "l2" and decay * t.weight[row * t.cols + d] or 0) end
  return x, mode == "decouple" and 1 - o.learning_rate * decay or 1
end

function rules.sgd(o, t, row, g)
  local x, keep = decayed(o, t, row, g)
  for d = 1, t.cols do
    local at = row * t.cols + d
    t.weight[at] = keep * t.weight[at] - o.learning_rate * x[d]
  end
end

function rules.adagrad(o, t, row, g)
  local x, keep = decayed(o, t, row, g)
  for d = 1, t.cols do
    local at = row * t.cols + d
    t.momentum1[at] = t.momentum1[at] + x[d] ^ 2
    t.weight[at] = keep * t.weight[at] - o.learning_rate * x[d] / (math.sqrt(t.momentum1[at]) + o.eps)
  end
end

function rules.rowwise_adagrad(o, t, row, g)
  local x, keep = decayed(o, t, row, g)
  t.momentum1[row + 1] = t.momentum1[row + 1] + norm(x, 0, t.cols) ^ 2 / t.cols
  local rate = o.learning_rate / (math.sqrt(t.momentum1[row + 1]) + o.eps)
  if o.weight_decay_mode == "l2" then keep = 1 - rate * o.weight_decay end
  for d = 1, t.cols do
    local at = row * t.cols + d
    t.weight[at] = keep * t.weight[at] - rate * g[d]
  end
end

rules.emainplace_rowwise_adagrad = rules.rowwise_adagrad

--- Steps since a row was touched.
local function steps_since(t, row, iteration)
  local before = t.prev_iter[row + 1]
  t.prev_iter[row + 1] = iteration
  return before == 0 and 1 or iteration - before
end

local function shrink_and_step(t, row, g, keep, rate)
  for d = 1, t.cols do
    local at = row * t.cols + d
    t.weight[at] = keep * t.weight[at] - rate * g[d]
  end
end

function rules.rowwise_rmsprop_ar(o, t, row, g, iteration)
  local gap, beta = steps_since(t, row, iteration), o.ema_beta or 0.99
  t.momentum1[row + 1] = beta * t.momentum1[row + 1] + (1 - beta) * norm(g, 0, t.cols) ^ 2 / t.cols
  local lambda = math.min(1, o.learning_rate * (o.ar_alpha or 0) * gap)
  shrink_and_step(t, row, g, math.max(o.min_shrinkage or 0.1, 1 - lambda),
    o.learning_rate / (math.sqrt(t.momentum1[row + 1]) + o.eps))
end

local function clamp(x, low, high) return math.max(low, math.min(high, x)) end

--- The rate of a row whose counter is c, relative to plain row-wise Adagrad's `mult`.
local function counted_rate(o, k, c, top, mult)
  local tail = k.tail_id_threshold or {}
  local threshold = tail.is_ratio and math.floor(tail.val * top) or tail.val or 0
  local mode, bound = (k.learning_rate_mode or "equal"):lower(), k.adjustment_ub or 1
  if mode == "equal" or c <= threshold then return mult end
  if mode == "tail_id_lr_increase" then return mult * clamp((top / (c + 1)) ^ bound, 1, 10) end
  if mode == "tail_id_lr_decrease" then return mult * clamp(((c + 1) / top) ^ bound, 0.1, 1) end
  return o.learning_rate / (math.sqrt(bound * c) + o.eps)
end

local function counter_step(o, k, t, c, gap, iteration, m, mult)
  local start, decay, half, wd = k.adjustment_iter or -1, k.counter_weight_decay_mode or "none", k.counter_halflife
    or -1, o.weight_decay or 0
  if start > 0 and iteration <= start then return 1, mult end
  local keep, rate = 1, counted_rate(o, k, c, t.max_counter[1], mult)
  if decay == "l2" then keep = 1 - half / c * wd * mult end
  if decay == "decouple" then keep = 1 - half / c * wd * o.learning_rate end
  if decay == "adagradw" then
    if half == -1 then rate = mult * math.sqrt(c) end
    if half == -2 then rate = math.min(o.learning_rate * c, k.adjustment_ub or 1) / (math.sqrt(m) + o.eps) end
    local missed = math.min(gap, iteration - start) - 1
    keep = (1 - wd * o.learning_rate) ^ (1 + missed)
    rate = rate * (1 - wd * o.learning_rate) ^ missed
  end
  return keep, rate
end

function rules.rowwise_adagrad_with_counter(o, t, row, g, iteration)
  local k = o.counter_based_regularization or o.cowclip_regularization or {}
  local decay, half, wd, x = k.counter_weight_decay_mode or "none", k.counter_halflife or -1, o.weight_decay or 0, {}
  local gap, c = steps_since(t, row, iteration), t.row_counter[row + 1]
  if half > 0 then c = 1 + math.exp(-gap * math.log(2) / half) * c
  elseif half == 0 then c = 1
  else c = c + 1 end
  t.row_counter[row + 1] = c
  for d = 1, t.cols do x[d] = g[d] + (decay == "l2" and wd * t.weight[row * t.cols + d] or 0) end
  local m = t.momentum1[row + 1] + norm(x, 0, t.cols) ^ 2 / t.cols
  t.momentum1[row + 1] = m
  local mult = o.learning_rate / (math.sqrt(m) + o.eps)
  if o.weight_decay_mode == "counter" then
    local keep, rate = counter_step(o, k, t, c, gap, iteration, m, mult)
    return shrink_and_step(t, row, g, keep, rate)
  end
  local size, bound = norm(x, 0, t.cols),
    c * math.max((k.weight_norm_coefficient or 0) * norm(t.weight, row * t.cols, t.cols), k.lower_bound or 0)
  local rate = size > 0 and mult * math.min(1, bound / size) or mult
  local keep = decay == "l2" and 1 - wd * rate or decay == "decouple" and 1 - wd * o.learning_rate or 1
  shrink_and_step(t, row, g, keep, rate)
end

--- The largest counter of each table, before the update of a step at which it is due.
local function refresh_counters(self)
  local o = self.optimizer
  local every = (o.counter_based_regularization or {}).max_counter_update_freq or 1000
  if o.kind ~= "rowwise_adagrad_with_counter" or every == 0 or self.iteration % every ~= 0 then return end
  for _, t in ipairs(self.tables) do t.max_counter[1] = 1 + math.max(0, unpack(t.row_counter)) end
end

--- Adam's step of a row before the learning rate and the decay; `partial`: one second moment for the row.
local function adam_step(o, t, row, g, iteration, partial)
  if o.use_rowwise_bias_correction then
    t.row_counter[row + 1] = t.row_counter[row + 1] + 1
    iteration = t.row_counter[row + 1]
  end
  if partial then
    t.momentum2[row + 1] = o.beta2 * t.momentum2[row + 1] + (1 - o.beta2) * norm(g, 0, t.cols) ^ 2 / t.cols
  end
  local u = {}
  for d = 1, t.cols do
    local at = row * t.cols + d
    t.momentum1[at] = o.beta1 * t.momentum1[at] + (1 - o.beta1) * g[d]
    if not partial then t.momentum2[at] = o.beta2 * t.momentum2[at] + (1 - o.beta2) * g[d] ^ 2 end
    local m, v = t.momentum1[at] / (1 - o.beta1 ^ iteration),
      t.momentum2[partial and row + 1 or at] / (1 - o.beta2 ^ iteration)
    u[d] = m / (math.sqrt(v) + o.eps)
  end
  return u
end

local function adam(partial)
  return function(o, t, row, g, iteration)
    local u = adam_step(o, t, row, g, iteration, partial)
    for d = 1, t.cols do
      local at = row * t.cols + d
      t.weight[at] = t.weight[at] - o.learning_rate * (u[d] + (o.weight_decay or 0) * t.weight[at])
    end
  end
end
rules.adam, rules.partial_rowwise_adam = adam(false), adam(true)

local function lamb(partial)
  return function(o, t, row, g, iteration)
    local u = adam_step(o, t, row, g, iteration, partial)
    for d = 1, t.cols do u[d] = u[d] + (o.weight_decay or 0) * t.weight[row * t.cols + d] end
    local size, step = norm(t.weight, row * t.cols, t.cols), norm(u, 0, t.cols)
    local ratio = size > 0 and step > 0 and size / step or 1
    for d = 1, t.cols do
      local at = row * t.cols + d
      t.weight[at] = t.weight[at] - o.learning_rate * ratio * u[d]
    end
  end
end
rules.lamb, rules.partial_rowwise_lamb = lamb(false), lamb(true)

function rules.lars_sgd(o, t, row, g)
  local decay, size = o.weight_decay or 0, norm(t.weight, row * t.cols, t.cols)
  local below = norm(g, 0, t.cols) + decay * size
  local rate = o.learning_rate * (size > 0 and below > 0 and o.eta * size / below or 1)
  for d = 1, t.cols do
    local at = row * t.cols + d
    t.momentum1[at] = o.momentum * t.momentum1[at] + rate * (g[d] + decay * t.weight[at])
    t.weight[at] = t.weight[at] - t.momentum1[at]
  end
end

function rules.lion(o, t, row, g)
  for d = 1, t.cols do
    local at = row * t.cols + d
    local c = o.beta1 * t.momentum1[at] + (1 - o.beta1) * g[d]
    local sign = c > 0 and 1 or c < 0 and -1 or 0
    t.weight[at] = t.weight[at] - o.learning_rate * (sign + (o.weight_decay or 0) * t.weight[at])
    t.momentum1[at] = o.beta2 * t.momentum1[at] + (1 - o.beta2) * g[d]
  end
end

--- Inverse square root of a symmetric matrix of n x n numbers plus eps on the diagonal, by the coupled Newton iteration
--- (Guo, Higham 2006): another way than the kernel's.
local function inverse_root(m, n, eps)
  local function multiply(a, b)
    local c = {}
    for i = 1, n do
      c[i] = {}
      for j = 1, n do
        local sum = 0
        for k = 1, n do sum = sum + a[i][k] * b[k][j] end
        c[i][j] = sum
      end
    end
    return c
  end
  local size = 0
  for i = 1, n * n do size = size + m[i] ^ 2 end
  local scale = 1 / (math.sqrt(size) + eps * n)
  local x, y = {}, {} -- y -> identity, x -> the root
  for i = 1, n do
    x[i], y[i] = {}, {}
    for j = 1, n do
      x[i][j] = i == j and 1 or 0
      y[i][j] = (m[(i - 1) * n + j] + (i == j and eps or 0)) * scale
    end
  end
  for _ = 1, 60 do
    local t = {}
    for i = 1, n do
      t[i] = {}
      for j = 1, n do t[i][j] = ((i == j and 3 or 0) - y[i][j]) / 2 end
    end
    x, y = multiply(x, t), multiply(t, multiply(t, y))
    local rest = 0
    for i = 1, n do
      for j = 1, n do rest = math.max(rest, math.abs(y[i][j] - (i == j and 1 or 0))) end
    end
    if rest < 1e-12 then break end
  end
  for i = 1, n do
    for j = 1, n do x[i][j] = x[i][j] * math.sqrt(scale) end
  end
  return x
end

--- Gradients of a table's rows, preconditioned.
local function shampoo(o, t, rows)
  local n = t.cols
  t.preconditioner = t.preconditioner or zeros(n * n)
  if next(rows) == nil then return rows end
  for _, g in pairs(rows) do
    for i = 1, n do
      for j = 1, n do t.preconditioner[(i - 1) * n + j] = t.preconditioner[(i - 1) * n + j] + g[i] * g[j] end
    end
  end
  local root, result = inverse_root(t.preconditioner, n, o.eps), {}
  for row, g in pairs(rows) do
    local u = {}
    for j = 1, n do
      u[j] = 0
      for i = 1, n do u[j] = u[j] + g[i] * root[i][j] end
    end
    result[row] = u
  end
  return result
end
rules.shampoo = rules.sgd

--- Scale rows down to the largest norm that is allowed.
local function limit(t, row, most)
  local size = norm(t.weight, row * t.cols, t.cols)
  if not most or size <= most then return end
  for d = 1, t.cols do t.weight[row * t.cols + d] = t.weight[row * t.cols + d] * most / size end
end

function M.backward(self, input, grad)
  average(self)
  self.iteration = self.iteration + 1
  refresh_counters(self)
  local sums = self:gradient(input, grad)
  for _, t in ipairs(self.tables) do
    for row, g in pairs(self.optimizer.kind == "shampoo" and shampoo(self.optimizer, t, sums[t]) or sums[t]) do
      rules[self.optimizer.kind](self.optimizer, t, row, g, self.iteration)
      limit(t, row, self.optimizer.max_norm)
    end
  end
end

return M
