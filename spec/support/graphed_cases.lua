-- graphed_cases.lua: training with and without nn.graphed on a device that captures:
--   perilune run -n 1 spec/support/graphed_cases.lua DEVICE
-- Prints a line for each case: "same NAME", when all numbers of both are equal to the last bit, or what is wrong.
local peri = require "perilune"
local nn, F, T = peri.nn, peri.nn.functional, peri.Tensor
local device = arg[1]
peri.ffi.state.device = device

local function drawn(shape, seed, stream) return T.uniform(shape, -1, 1, seed, stream or 0, "f32", device) end

--- All numbers of tensors, as they are.
local function numbers(out, tensors)
  for _, t in ipairs(tensors) do
    for _, x in ipairs(t:detach():reshape(-1):to("f64", "cpu"):to_list()) do out[#out + 1] = ("%.17g"):format(x) end
  end
end

--- body(graphed) both ways. graphed(f, options): nn.graphed, or f itself. body returns a list of texts, and a pattern
--- of the first graph's tostring.
local function same(name, body)
  local graphs = {}
  local function with(f, options)
    local g = nn.graphed(f, options)
    graphs[#graphs + 1] = g
    return nn.Module.is(f) and f or g
  end
  local function without(f) return f end
  local expected = body(without)
  local got, pattern = body(with)
  local a, b = table.concat(expected, " "), table.concat(got, " ")
  local text = tostring(graphs[1])
  if #expected == 0 then print(("%s: no numbers"):format(name))
  elseif a ~= b then
    for i = 1, math.max(#expected, #got) do
      if expected[i] ~= got[i] then
        print(("%s: number %d is %s, wanted %s (%s)"):format(name, i, tostring(got[i]), tostring(expected[i]), text))
        break
      end
    end
  elseif not text:find(pattern) then print(("%s: %s, wanted '%s'"):format(name, text, pattern))
  else print("same " .. name) end
end

local function refused(name, f, ...)
  local ok, err = pcall(f, ...)
  print(ok and "not refused: " .. name or "refused " .. name .. ": " .. tostring(err):gsub("\n.*", ""))
end

--- What a capture launches is launched there for the first time: this has to be the first that the process does.
do
  nn.manual_seed(1)
  local linear, gradients = nn.Linear { in_features = 3, out_features = 2, device = device }, {}
  local function f(x) return F.sigmoid(linear(x)) end
  local g = nn.graphed(f, { modules = { linear } })
  g(drawn({ 2, 3 }, 1)) -- and no backward pass
  for i, call in ipairs { g, f } do
    linear:zero_grad()
    F.mean(call(drawn({ 2, 3 }, 2))):backward()
    gradients[i] = {}
    numbers(gradients[i], { linear.weight:grad(), linear.bias:grad() })
  end
  print(g.captures == 1 and table.concat(gradients[1], " ") == table.concat(gradients[2], " ")
    and "same kernels that nobody has launched" or "kernels that nobody has launched: other gradients")
end

-- -- models -----------------------------------------------------------------------------------------------------------

local B, DIM = 6, 4
local function collection()
  return peri.EmbeddingBagCollection { device = device, tables = {
    peri.EmbeddingBagConfig { name = "t1", num_embeddings = 10, embedding_dim = DIM, feature_names = { "f1" } },
    peri.EmbeddingBagConfig { name = "t2", num_embeddings = 12, embedding_dim = DIM, feature_names = { "f2" } } } }
end
local models = {
  DLRM = function()
    return nn.DLRM { embedding_bag_collection = collection(), dense_in_features = 3, over_arch_layer_sizes = { 6, 1 },
      dense_arch_layer_sizes = { 5, DIM }, dense_device = device }
  end,
  DCN = function()
    return nn.DLRM_DCN { embedding_bag_collection = collection(), dense_in_features = 3, dcn_num_layers = 2,
      dcn_low_rank_dim = 3, dense_arch_layer_sizes = { 5, DIM }, over_arch_layer_sizes = { 6, 1 },
      dense_device = device }
  end,
}
local function batch(i, rows)
  rows = rows or B
  local ids, lengths = {}, {}
  for k = 1, 2 * rows do ids[k], lengths[k] = (i * 7 + k * 3) % 10, 1 end
  return { dense_features = drawn({ rows, 3 }, i), labels = T.uniform({ rows }, 0, 1, i, 1, "f32", device),
    sparse_features = peri.KeyedJaggedTensor { keys = { "f1", "f2" }, values = peri.tensor(ids, "i64", device),
      lengths = peri.tensor(lengths, "i32", device) } }
end

for _, kind in ipairs { "DLRM", "DCN" } do
  for _, optim in ipairs { "SGD", "Adagrad", "Adam" } do
    for _, autocast in ipairs { false, true } do
      same(("%s %s%s"):format(kind, optim, autocast and " autocast" or ""), function(graphed)
        nn.manual_seed(3)
        local model = models[kind]()
        graphed(model.dense_arch)
        graphed(model.inter_arch)
        graphed(model.over_arch)
        local train, out = nn.DLRMTrain(model), {}
        local optimizer = nn.optim[optim] { params = train:parameters(), lr = 0.05 }
        for i = 1, 5 do
          peri.scope(function()
            optimizer:zero_grad()
            local loss
            if autocast then loss = peri.autocast({ device = device:match "^[^:]*" }, train, batch(i))
            else loss = train(batch(i)) end
            loss:backward()
            if i == 2 then nn.optim.clip_grad_norm(train:parameters(), 0.1) end
            if i > 2 then optimizer:set_lr(0.1 / i) end
            optimizer:step()
            numbers(out, { loss })
          end)
        end
        numbers(out, train:parameters())
        return out, "captures=1, replays=4, eager=1: first call of its kind 1"
      end)
    end
  end
end

--- A function of a layer, its parameters, and SGD.
local function layer()
  nn.manual_seed(5)
  local linear = nn.Linear { in_features = 3, out_features = 2, device = device }
  return linear, nn.optim.SGD { params = linear:parameters(), lr = 0.5 }
end
local function input(i, rows) return drawn({ rows or B, 3 }, i) end

-- -- results and gradients --------------------------------------------------------------------------------------------

same("results that are kept", function(graphed)
  local linear = layer()
  graphed(linear)
  local kept, out = {}, {}
  for i = 1, 5 do kept[i] = peri.no_grad(linear, input(i)) end
  numbers(out, kept)
  return out, "captures=1, replays=4"
end)

same("calls before the backward passes of earlier ones", function(graphed)
  local linear, optimizer = layer()
  graphed(linear)
  local out = {}
  for i = 1, 4 do
    local loss = F.mean(F.square(linear(input(i)))) + F.mean(linear(input(9 + i)))
    optimizer:zero_grad()
    loss:backward()
    optimizer:step()
    numbers(out, { loss })
    loss:release()
    collectgarbage() -- the tape of the first call goes
  end
  numbers(out, linear:parameters())
  return out, "the call before awaits its backward pass"
end)

same("gradients that are added up, and kept", function(graphed)
  local linear, optimizer = layer()
  graphed(linear)
  local out, kept = {}, {}
  for i = 1, 6 do
    local x = input(i):requires_grad()
    F.mean(F.square(linear(x))):backward()
    kept[i] = x:grad()
    if i % 3 == 0 then
      optimizer:step()
      optimizer:zero_grad()
    end
  end
  numbers(out, kept)
  numbers(out, linear:parameters())
  return out, "captures=1, replays=5, eager=1"
end)

same("several results, some of them not used", function(graphed)
  local linear = layer()
  local f = graphed(function(x, k) -- a result that is a part of another, and one that is the input's
    local y = linear(x)
    return F.mean(y), y:slice(2, 0, 1), y:detach(), x:slice(1, 0, 2), F.affine(y, k)
  end, { modules = { linear } })
  local out = {}
  for i = 1, 5 do
    local a, b, c, d, e = f(input(i), 2)
    local loss = i % 2 == 0 and a + F.sum(b) or F.mean(e)
    loss:backward()
    numbers(out, { a, b, c, d, e, linear.weight:grad(), linear.bias:grad() })
  end
  return out, "captures=1, replays=4, eager=1"
end)

same("other shapes, arguments, and recording or not", function(graphed)
  local linear, optimizer = layer()
  local f = graphed(function(x, scale, negate)
    local y = F.affine(linear(x), scale)
    return negate and F.neg(y) or y
  end, { modules = { linear }, max_graphs = 3 })
  local out = {}
  for i = 1, 12 do
    local x = input(i, i % 4 == 0 and 2 or B)
    if i % 3 == 0 then numbers(out, { peri.no_grad(f, x, 2) })
    else
      local y = f(x, 2, i > 8)
      optimizer:zero_grad()
      F.mean(F.square(y)):backward()
      optimizer:step()
      numbers(out, { y })
    end
  end
  numbers(out, linear:parameters())
  return out, "too many kinds"
end)

same("batch norm, whose buffers move on, in training and not", function(graphed)
  nn.manual_seed(1)
  local norm, out = nn.BatchNorm1d { num_features = 3, device = device }, {}
  graphed(norm)
  for i = 1, 8 do
    norm:train(i < 6)
    local y = norm(input(i))
    F.mean(F.square(y)):backward()
    numbers(out, { y, norm.running_mean, norm.running_var })
  end
  numbers(out, { norm.weight:grad() })
  return out, "captures=2"
end)

same("modes in turns, each with a graph of its own", function(graphed)
  local linear, optimizer = layer()
  local net, out = nn.Sequential { linear, nn.Dropout { p = 0.4 } }, {}
  graphed(net, { max_graphs = 2 })
  for i = 1, 14 do
    local training = i % 3 > 0
    net:train(training)
    if i == 8 then linear.weight:requires_grad(false) end -- both captures are others now
    local y = net(input(i, i > 12 and 5 or 2)) -- at last a kind that has to make room
    optimizer:zero_grad()
    F.mean(F.square(y)):backward()
    if training then optimizer:step() end
    numbers(out, { y, linear.bias })
  end
  return out, "captures=5, replays=12, eager=2: first call of its kind 2"
end)

same("dropout, whose masks are others in each call", function(graphed)
  local linear, optimizer = layer()
  local net = nn.Sequential { nn.Dropout { p = 0.4 }, linear, nn.Dropout { p = 0.5 } }
  graphed(net)
  local out, seen, x = {}, {}, input(1)
  for i = 1, 7 do
    if i == 6 then net[1]:set_extra_state { seed = 3, stream = 99, step = 0 } end
    local y = net(x)
    optimizer:zero_grad()
    F.mean(F.square(y)):backward()
    numbers(out, { y, linear.weight:grad() })
    optimizer:set_lr(0)
    optimizer:step()
    local result = table.concat(out, " ", #out - 2 * B - 5, #out - 6) -- what came of one input, and no other rate
    assert(not seen[result], "the masks repeat")
    seen[result] = true
  end
  return out, "captures=2, replays=6, eager=1"
end)

same("another stream", function(graphed)
  local linear, optimizer = layer()
  graphed(linear)
  local out, side = {}, peri.stream.Stream(device)
  for i = 1, 6 do
    local function step()
      optimizer:zero_grad()
      F.mean(F.square(linear(input(i)))):backward()
      optimizer:step()
    end
    if i % 2 == 0 then
      side:wait_stream(peri.stream.current(device))
      peri.stream.run(side, step)
      peri.stream.current(device):wait_stream(side)
    else step() end
    numbers(out, linear:parameters())
  end
  return out, "captures=1, replays=5, eager=1"
end)

--- A cross network keeps more for its backward pass than other operations, which others may change meanwhile.
local function cross_layers()
  nn.manual_seed(2)
  return nn.LowRankCrossNet { in_features = 3, num_layers = 2, low_rank = 2, device = device }
end
same("a cross network, whose backward pass is captured after a step that followed its forward pass", function(graphed)
  local cross, out = cross_layers(), {}
  local optimizer = nn.optim.SGD { params = cross:parameters(), lr = 0.5 }
  graphed(cross)
  for i = 1, 5 do
    local y = cross(input(i))
    optimizer:zero_grad()
    if i ~= 2 then F.mean(F.square(y)):backward() end
    optimizer:step()
    numbers(out, { y })
    y:release()
  end
  numbers(out, cross:parameters())
  return out, "captures=1, replays=4, eager=1"
end)

local Own = nn.Module:extend "Own"
function Own:init(linear) self.linear = linear end
function Own:forward(x, columns) return self.linear(x) + x:slice(2, 0, columns) end
same("mistakes of a module, also while it is captured, by the same words", function(graphed)
  local own, out = Own(layer()), {}
  graphed(own)
  for i = 1, 9 do
    local ok, y = pcall(own, input(i), i % 3 == 0 and 3 or 2)
    local wide, narrow = pcall(own, input(i):slice(2, 0, 2), 2)
    if ok then numbers(out, { y }) else out[#out + 1] = tostring(y) end
    if ok then F.mean(y):backward() end
    out[#out + 1] = wide and "no mistake" or tostring(narrow)
  end
  numbers(out, { own.linear.weight:grad() })
  return out, "captures=1, replays=5, eager=3"
end)

-- -- what changes between calls ---------------------------------------------------------------------------------------

same("parameters that are loaded, replaced, frozen, and another field", function(graphed)
  local linear, optimizer = layer()
  local other = nn.Linear { in_features = 3, out_features = 2, device = device }
  graphed(linear)
  local out = {}
  for i = 1, 14 do
    if i == 4 then linear:load_state_dict(other:state_dict()) end
    if i == 6 then linear.weight = nn.Parameter(drawn({ 2, 3 }, 77)) end
    if i == 8 then linear.weight:requires_grad(false) end
    if i == 10 then linear.bias = false end
    if i == 12 then linear.weight:requires_grad(true) end
    collectgarbage()
    local y = linear(input(i))
    optimizer:zero_grad()
    if i < 10 or i >= 12 then F.mean(F.square(y)):backward() end
    if linear.weight:grad() then numbers(out, { linear.weight:grad() }) end
    optimizer:step()
    numbers(out, { y })
  end
  return out, "captures=5"
end)

same("a capture that is forgotten, with results and a tape that live on", function(graphed)
  local linear = layer()
  local out, y, z = {}, nil, nil
  local f = graphed(function(x) return F.square(linear(x)) end, { modules = { linear } })
  for i = 1, 3 do
    z = y
    y = f(input(i))
    if i < 3 then F.mean(y):backward() end
  end
  if type(f) == "table" then f:reset() end
  collectgarbage()
  collectgarbage()
  drawn({ 64, 64 }, 1) -- takes memory that was freed
  F.mean(y):backward()
  numbers(out, { y, z, linear.weight:grad() })
  return out, "captures=1, replays=2"
end)

-- -- what is refused --------------------------------------------------------------------------------------------------

local function twice(f, modules)
  return function()
    local g = nn.graphed(f, { modules = modules })
    for i = 1, 2 do g(input(i)) end
  end
end
local linear = layer()
local Counter = nn.Module:extend "Counter"
function Counter:init() self.calls = 0 end
function Counter:forward(x)
  self.calls = self.calls + 1
  return x * self.calls
end
refused("an item", twice(function(x) return x * F.sum(x):item() end))
refused("a tensor of the host", twice(function(x) return x + peri.tensor({ 1, 2, 3 }, "f32", device) end))
refused("a wait", twice(function(x)
  peri.stream.current(device):synchronize()
  return x * 2
end))
refused("dropout", twice(function(x) return F.dropout(x, 0.5, 1, 2) end))
refused("random numbers", twice(function(x) return x + drawn({ B, 3 }, 1) end))
refused("a count", function()
  local counter = Counter()
  nn.graphed(counter)
  for i = 1, 2 do counter(input(i)) end
end)
refused("an input in place", twice(function(x) return x:fill(1) end))
refused("a parameter of nobody", twice(function(x) return linear(x) end))
refused("a table", twice(function(x) return { x } end))
refused("tables", function()
  local ebc, given = collection(), batch(1)
  local g = nn.graphed(function(x) return ebc(given.sparse_features):values() + F.sum(x) end)
  for i = 1, 2 do g(input(i)) end
end)
refused("an optimizer's step", function()
  local own, optimizer = layer()
  local g = nn.graphed(function(x)
    local loss = F.mean(own(x))
    loss:backward()
    optimizer:step()
    return loss
  end, { modules = { own } })
  for i = 1, 2 do g(input(i)) end
end)
refused("a hook", function()
  local hook = T.Hook(function(g) return g end)
  local g = nn.graphed(function(x) return F.square(hook(linear(x))) end, { modules = { linear } })
  for i = 1, 2 do F.mean(g(input(i))):backward() end
end)
refused("a change before the backward pass", function()
  local g = nn.graphed(function(x) return linear(x) end, { modules = { linear } })
  for i = 1, 4 do
    local y = g(input(i):requires_grad())
    if i == 4 then peri.no_grad(function() linear.weight:fill(0) end) end
    F.mean(F.square(y)):backward()
  end
end)
refused("a change within a cross network", function()
  local cross = cross_layers()
  nn.graphed(cross)
  for i = 1, 3 do
    local y = cross(input(i))
    if i == 3 then peri.no_grad(function() cross.bias[1]:fill(1) end) end
    F.mean(y):backward()
  end
end)
-- A refusal leaves nothing behind: the next is captured and right.
same("what comes after refusals", function(graphed)
  local own, out = layer(), {}
  graphed(own)
  for i = 1, 3 do numbers(out, { peri.no_grad(own, input(i)) }) end
  return out, "captures=1, replays=2, eager=1"
end)

-- -- devices without graphs, and memory -------------------------------------------------------------------------------

do
  local gone = setmetatable({}, { __mode = "k" })
  local function use()
    local own = layer()
    gone[own], gone[nn.graphed(own)] = true, true
    for i = 1, 3 do F.mean(own(input(i))):backward() end
  end
  use()
  collectgarbage()
  collectgarbage()
  print(next(gone) and "a graphed module that nobody has is still there"
    or "same module and graph that nobody has, gone")
end
do
  local on_cpu = nn.Linear { in_features = 3, out_features = 2, device = "cpu" }
  local graph = nn.graphed(on_cpu)
  for i = 1, 3 do on_cpu(T.uniform({ 2, 3 }, 0, 1, i, 0, "f32", "cpu")) end
  print(graph)
end
linear, Counter = nil, nil
collectgarbage()
collectgarbage()
