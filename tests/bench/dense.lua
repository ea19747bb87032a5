-- dense.lua: the dense part of a DLRM step beside its bare matrix products, which are the roofline: forward, backward,
-- optimizer; then single operations. The shape is that of `make bench-step`. Columns: name, milliseconds (best,
-- median), GFLOP/s or GB/s.
local peri = require "perilune"
local argparse = require "argparse"
local json = require "dkjson"
local nn, C = peri.nn, peri.ffi.C
local F = nn.functional

local parser = argparse("tests/bench/dense.lua", "Speed of the dense part.")
parser:option("--out", "Append results as JSON lines to this file.")
parser:option("--batch", "Samples.", 2048, tonumber)
parser:option("--tables", "Sparse features.", 26, tonumber)
parser:option("--dim", "Embedding dimension.", 64, tonumber)
parser:option("--steps", "Steps to time.", 30, tonumber)
local options = parser:parse(arg)
peri.init()
local out = options.out and assert(io.open(options.out, "a"))
local batch, tables, dim, steps = options.batch, options.tables, options.dim, options.steps

local function now() return tonumber(C.peri_time_ns()) * 1e-6 end

local function report(name, times, flops, bytes)
  table.sort(times)
  local best = times[1]
  local r = { name = name, best_ms = best, median_ms = times[math.ceil(#times / 2)], gflop_per_s = flops
    and flops / best * 1e-6, gb_per_s = bytes and bytes / best * 1e-6 }
  local rate = flops and ("%8.1f GFLOP/s"):format(r.gflop_per_s) or bytes and ("%8.1f GB/s"):format(r.gb_per_s) or ""
  print(("%-34s %8.3f %8.3f ms %s"):format(name, r.best_ms, r.median_ms, rate))
  if out then out:write(json.encode(r), "\n") end
  return best
end

--- Times of f, each run in a scope of its own, after two runs that do not count.
local function times_of(f)
  local times = {}
  for i = -1, steps do
    local from = now()
    peri.scope(f)
    if i > 0 then times[i] = now() - from end
  end
  return times
end

-- -- the step ---------------------------------------------------------------------------------------------------------

local bottom = nn.MLP { in_size = 13, layer_sizes = { 512, 256, dim } }
local inter = nn.InteractionArch { num_sparse_features = tables }
local top = nn.OverArch { in_features = dim + tables * (tables + 1) / 2, layer_sizes = { 512, 512, 256, 1 } }
local params, linears, products = {}, {}, 0
for _, module in ipairs { bottom, top } do
  for _, p in ipairs(module:parameters()) do params[#params + 1] = p end
  for _, m in ipairs(module:modules()) do
    if nn.Linear.is(m) then linears[#linears + 1] = m end
  end
end
local optimizer = nn.optim.Adagrad { params = params, lr = 0.01 }
local x, labels = peri.Tensor.normal({ batch, 13 }, 0, 1, 1, 0), peri.zeros { batch }
local sparse = peri.Tensor.normal({ batch, tables, dim }, 0, 0.1, 1, 1):requires_grad()

-- The bare products: y = x W^T, dx = dy W (but of the first layer), dW = dy^T x.
local bare, flops = 0, 0
for i, m in ipairs(linears) do
  local a, w, g = peri.ones { batch, m.in_features }, peri.ones { m.out_features, m.in_features },
    peri.ones { batch, m.out_features }
  local one = 2 * batch * m.in_features * m.out_features
  local name = ("%d -> %d "):format(m.in_features, m.out_features)
  bare = bare + report(name .. "x W^T", times_of(function() F.matmul(a, w:transpose(1, 2)) end), one)
  if i > 1 then bare = bare + report(name .. "dy W", times_of(function() F.matmul(g, w) end), one) end
  bare = bare + report(name .. "dy^T x", times_of(function() F.matmul(g:transpose(1, 2), a) end), one)
  flops = flops + (i > 1 and 3 or 2) * one
  products = products + (i > 1 and 3 or 2)
end

local parts = { forward = {}, backward = {}, optimizer = {} }
local whole = times_of(function()
  local from = now()
  optimizer:zero_grad()
  sparse:set_grad(nil)
  local logits = top:forward(inter:forward(bottom:forward(x), sparse)):reshape(-1)
  local loss = F.binary_cross_entropy_with_logits(logits, labels)
  local forward = now()
  loss:backward()
  local backward = now()
  optimizer:step()
  table.insert(parts.forward, forward - from)
  table.insert(parts.backward, backward - forward)
  table.insert(parts.optimizer, now() - backward)
end)
for _, part in ipairs { "forward", "backward", "optimizer" } do report("step: " .. part, parts[part]) end
local best = report(("step, %d samples"):format(batch), whole, flops)
print(("%-34s %8.3f ms: the step takes %.3f times as long"):format(("its %d bare products"):format(products), bare,
  best / bare))
if out then
  out:write(json.encode { name = "step over bare products", step_ms = best, products_ms = bare, ratio = best / bare },
    "\n")
end

-- -- single operations ------------------------------------------------------------------------------------------------

local a, b = peri.Tensor.normal({ batch, 512 }, 0, 1, 2, 0), peri.Tensor.normal({ batch, 512 }, 0, 1, 2, 1)
local row, bytes = peri.ones { 512 }, batch * 512 * 4
local function op(name, f, traffic) report(name .. " " .. batch .. " x 512", times_of(f), nil, traffic * bytes) end
op("relu", function() a:relu() end, 2)
op("sigmoid", function() a:sigmoid() end, 2)
op("tanh", function() a:tanh() end, 2)
op("gelu", function() a:gelu() end, 2)
op("add", function() F.add(a, b) end, 3)
op("add a row", function() F.add(a, row) end, 2)
op("sum over rows", function() a:sum(1) end, 1)
op("sum over columns", function() a:sum(2) end, 1)
op("softmax", function() a:softmax(2) end, 2)
op("layer_norm", function() F.layer_norm(a, 1, row, row) end, 2)
op("dropout", function() F.dropout(a, 0.1, 1, 1) end, 2)
report("interaction", times_of(function()
  F.interaction(x:slice(2, 0, 1):expand { batch, dim }:contiguous(), sparse)
end))
