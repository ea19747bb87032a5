-- calibration/dense.lua: prices of the dense part of a step on a device (plan/dense.lua), found as those of tables are:
-- networks of several shapes run forward, backward and through an optimizer, and the prices are those whose sums are
-- nearest to what they took.
local peri = require "perilune"
local fit = require "perilune.calibration.fit"
local counted = require "perilune.plan.dense"
local Tensor, nn, util, C = peri.Tensor, peri.nn, peri.util, peri.ffi.C

local M = {}

--- Shapes: batch, columns in, layers; or cross layers (low rank) of as many columns.
local probes = {
  { batch = 8192, columns = 3456, layers = { 1024, 1024, 512, 256, 1 } },
  { batch = 8192, columns = 13, layers = { 512, 256, 128 } },
  { batch = 2048, columns = 512, layers = { 512, 512, 512 } },
  { batch = 16384, columns = 2048, layers = { 2048, 2048 } },
  { batch = 1024, columns = 256, layers = { 256, 256, 256, 256, 256 } },
  { batch = 32768, columns = 1024, layers = { 1024, 64, 1 } },
  { batch = 4096, columns = 4096, layers = { 4096, 1024 } },
  { batch = 65536, columns = 128, layers = { 256, 128, 64, 1 } },
  { batch = 8192, columns = 3456, rank = 512, cross = 2 }, { batch = 4096, columns = 1024, rank = 128, cross = 3 },
  { batch = 16384, columns = 2048, rank = 256, cross = 2 },
}

local TURNS = 7

local function network(probe, device, scale)
  local function scaled(n) return math.max(1, math.floor(n * scale)) end
  local columns, matrices = scaled(probe.columns), {}
  local module
  if probe.cross then
    local rank = scaled(probe.rank)
    module = nn.LowRankCrossNet { in_features = columns, num_layers = probe.cross, low_rank = rank, device = device }
    for _ = 1, probe.cross do
      matrices[#matrices + 1] = { rank, columns }
      matrices[#matrices + 1] = { columns, rank }
    end
  else
    local sizes, from = util.map(probe.layers, scaled), columns
    module = nn.MLP { in_size = columns, layer_sizes = sizes, device = device }
    for i, out in ipairs(sizes) do matrices[i], from = { out, from }, out end
  end
  return module, matrices, scaled(probe.batch), columns
end

--- Milliseconds of a probe: { forward =, backward =, optimizer = }, medians of TURNS.
local function run(probe, device, scale, around)
  local module, matrices, batch, columns = network(probe, device, scale)
  local optimizer = nn.optim.Adagrad { params = module:parameters(), lr = 1e-3 }
  local x = Tensor.uniform({ batch, columns }, -1, 1, 7, 0, "f32", device):requires_grad()
  local stream, times = peri.stream.current(device), { forward = {}, backward = {}, optimizer = {} }
  local function lap(way, from)
    stream:synchronize()
    local now = tonumber(C.peri_time_ns()) / 1e6
    if way then table.insert(times[way], now - from) end
    return now
  end
  local function once(turn)
    local way = turn > 0 or nil
    optimizer:zero_grad()
    x:set_grad(nil)
    local at, y = lap(), nil
    around(function() y = module:forward(x) end)
    at = lap(way and "forward", at)
    Tensor.backward({ y }, { Tensor.full(y:shape(), 1e-3, y:dtype(), device) })
    at = lap(way and "backward", at)
    optimizer:step()
    lap(way and "optimizer", at)
  end
  for turn = -1, TURNS do peri.scope(once, turn) end
  local ms = {}
  for _, way in ipairs(counted.ways) do ms[way] = util.median(times[way]) end
  return ms, counted._amounts(matrices, batch)
end

--- How a forward pass runs in a precision: around(f). A backward pass has the dtypes of its forward pass; how products
--- of f32 are made is the process's, in both.
local function within(precision, device)
  if precision ~= "bf16" then return function(f) f() end end
  return function(f) peri.autocast({ device = device:match "^[%a_]+", dtype = "bf16" }, f) end
end

--- Prices of the dense part on @device: precision -> way -> unit -> ms; and by precision the mean relative error over
--- the probes. scale: of the probes' sizes. Local.
function M.prices(device, scale, tell)
  local prices, off = {}, {}
  local before = peri.get_float32_matmul_precision()
  for _, precision in ipairs(counted.precisions) do
    local rows, sum = {}, 0
    peri.set_float32_matmul_precision(precision == "high" and "high" or "highest")
    for _, way in ipairs(counted.ways) do rows[way] = {} end
    for i, probe in ipairs(probes) do
      tell(i, #probes, ("dense part, %s"):format(precision))
      peri.scope(function()
        local ms, amounts = run(probe, device, scale, within(precision, device))
        for _, way in ipairs(counted.ways) do rows[way][i] = { amounts = amounts[way], ms = ms[way] } end
      end)
    end
    prices[precision] = {}
    for _, way in ipairs(counted.ways) do
      local error_of
      prices[precision][way], error_of = fit.least(rows[way], counted.units)
      sum = sum + error_of / #counted.ways
    end
    off[precision] = sum
  end
  peri.set_float32_matmul_precision(before)
  return prices, off
end

return M
