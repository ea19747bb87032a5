-- Optimizers of the dense part on several ranks: the ranks do the same with the same averages, or are told who does
-- what, with the next gradients.
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local nn = peri.nn
local optim = nn.optim

--- A model of two layers, the optimizer that `make` makes of its parameters, and a function that takes a step.
local function begin(world, device, make)
  nn.manual_seed(5)
  local module, rank = nn.Module(), world:rank()
  module.a = nn.Linear { in_features = 3, out_features = 2, device = device }
  module.b = nn.Linear { in_features = 2, out_features = 1, device = device }
  local model = peri.DistributedModelParallel { module = module, group = world, device = device }
  local optimizer = make(model)
  local x = peri.full({ 2, 3 }, rank + 1, "f32", device)
  return optimizer, function(leave_out)
    optimizer:zero_grad()
    module.b(module.a(x)):sum():backward()
    if not leave_out then optimizer:step() end
  end, model
end

local function adam(model) return optim.Adam { params = model:named_parameters() } end

--- What `change(optimizer, i)` makes of the last rank alone after its second step is told to all with the gradients
--- after the next step; `texts`: what the message has; `own`: that of the last rank.
local function told(title, change, texts, make, own)
  worlds.each("are told: " .. title, function(world, device, n)
    local optimizer, step = begin(world, device, make or adam)
    local odd = world:rank() == n - 1
    step()
    step()
    local leave_out = odd and change(optimizer, n)
    step(leave_out)
    local ok, err = pcall(step)
    assert.is_false(ok)
    assert.matches("optimizers or weights of the ranks differ, which would train different models: rank", err.message)
    for _, text in ipairs(texts) do assert.matches(text, err.message) end
    if odd and own then assert.matches(own, err.message) end
  end, { sizes = { 2, 3 } })
end

describe("optimizers that differ between ranks", function()
  told("another rate", function(o) o.param_groups[1].lr = 0.125 end,
    { "rank %d posted [^(]+Adam %(step 3, lr 0.001,", "rank %d posted [^(]+Adam %(step 3, lr 0.125," })
  told("a momentum", function(o) o:set_momentum(0.5) end, { "beta1 0.5", "beta1 0.9" })
  told("a step that was left out", function() return true end, { "%(step 2, ", "%(step 3, " })
  told("a state that was loaded", function(o)
    local state = o:state_dict():clone()
    state.state["a.weight"].exp_avg:slice(1, 1, 2):fill(3)
    o:load_state_dict(state)
  end, { "history %d+.*history %d+.*; history: of steps, loaded states and weights" })
  told("steps that were loaded", function(o)
    local state = o:state_dict():clone()
    for _, name in ipairs(o.names) do state.state[name].step:fill(7) end
    o:load_state_dict(state)
  end, { "%(step 3, ", "%(step 8, " })
  told("a rate for a while", function(o)
    local step = o.step
    rawset(o, "step", function(self)
      self:set_lr(0.25)
      step(self)
      self:set_lr(0.001)
      rawset(self, "step", nil)
    end)
  end, { "lr 0.25", "lr 0.001" })
  told("another rate of one group", function(o) o.param_groups[2].lr = 0.125 end, { "history %d+.*history %d+" },
    function(model)
      local all = model:named_parameters()
      return optim.SGD { lr = 0.5,
        params = { { params = optim.select(all, "^b") }, { params = optim.select(all, "^a") } } }
    end, "; here parameter 1 by SGD %(step 3, lr 0.125")

  worlds.each("are told when they are of other kinds, or one rank has none", function(world, device, n)
    for _, of_last in ipairs { function(model) return optim.SGD { params = model:parameters() } end, false } do
      local last = world:rank() == n - 1
      local _, step = begin(world, device, function(model)
        return last and of_last and of_last(model) or adam(model)
      end)
      step(last and not of_last)
      assert.error_matches(step, of_last and "optimizers or weights of the ranks differ" or "rank %d posted")
    end
  end, { sizes = { 2 } })
end)

--- Steps that a script takes by itself: an optimizer of its own.
local function by_hand(model, lr)
  peri.no_grad(function()
    for _, p in ipairs(model:parameters()) do p:copy(p - p:grad() * lr) end
  end)
end

describe("weights that differ between ranks", function()
  -- the host reads them where it need not wait for a device
  local function each(title, f) worlds.each(title, f, { sizes = { 2, 3 }, devices = { "cpu" } }) end

  each("are told of an optimizer that is the script's own", function(world, device, n)
    local _, step, model = begin(world, device, adam) -- which takes no steps
    local odd = world:rank() == n - 1
    for _ = 1, 3 do
      step(true)
      by_hand(model, 0.1)
    end
    by_hand(model, odd and 0.2 or 0.1)
    assert.error_matches(function() step(true) end, "weights of the ranks differ, which would train different "
      .. "models: rank %d posted [^(]+by this pass %(weight %S+, history %d+%)[^;]+; weight: number %d+ of parameter "
      .. "%d+, before that step")
  end)

  each("are told of a write on one rank, once its parameter's turn has come", function(world, device, n)
    for k = 1, 4 do
      local _, step, model = begin(world, device, adam)
      step()
      if world:rank() == n - 1 then peri.no_grad(function() local p = model:parameters()[k]; p:copy(p + 0.5) end) end
      local ok, err
      for _ = 1, #model:parameters() do
        ok, err = pcall(step)
        if not ok then break end
      end
      assert.is_false(ok)
      assert.matches("weights of the ranks differ.*weight: number %d+ of parameter " .. k - 1, err.message)
    end
  end)
end)

describe("optimizers that do the same on all ranks", function()
  worlds.each("are told nothing", function(world, device)
    local optimizer, step, model = begin(world, device, adam)
    local schedule = optim.CosineAnnealingLR { optimizer = optimizer, T_max = 4 }
    local before
    for i = 1, 8 do
      step(i == 4) -- a step that all leave out
      schedule:step()
      if i == 3 then before = optimizer:state_dict():clone() end
      if i == 6 then optimizer:load_state_dict(before) end
      if i == 7 then model:load_state_dict(model:state_dict():clone()) end
    end
    -- what was done before ranks were made alike is not compared
    local other = optim.Adam { params = model:parameters(), lr = world:rank() + 1 }
    other:step()
    model.module.c = nn.Linear { in_features = 1, out_features = 1, device = device }
    model:init_data_parallel()
    step(true)
    step(true)
  end, { sizes = { 1, 2, 3 } })
end)
