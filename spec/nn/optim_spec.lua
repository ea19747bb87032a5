-- Optimizers, clipping and schedules: the golden cases of PyTorch and TorchRec on both devices, states, bad arguments.
-- cuda: always
local peri = require "perilune"
local nn = peri.nn
local optim = nn.optim
local golden = require "spec.support.golden"
local worlds = require "spec.support.worlds"

local handled = { ["ops/optim/clip_grad_value"] = true }

--- Numbered tensors of a case ("in.param0", "in.param1", ...) as leaves.
local function leaves_of(case, prefix, device)
  local list = {}
  while case:has(prefix .. #list) do list[#list + 1] = case:tensor(prefix .. #list, device):requires_grad() end
  return list
end

local function is_optimizer(case) return case.args.optimizer ~= nil end

local function make_optimizer(case, params)
  local args = { params = params }
  for key, value in peri.util.ordered(case.args) do
    if key ~= "optimizer" and key ~= "steps" then args[key] = value end
  end
  return optim[case.args.optimizer](args)
end

describe("golden optimizers", function()
  for _, name in ipairs(golden.names "ops/optim") do
    local head = golden.load(name)
    if is_optimizer(head) then
      handled[name] = true
      for _, device in ipairs { "cpu", "opaque" } do
        it(head.name .. " on " .. device, function()
          local case = golden.load(name)
          local params = leaves_of(case, "in.param", device)
          local optimizer = make_optimizer(case, params)
          for step = 1, case.args.steps do
            for i, p in ipairs(params) do p:set_grad(case:tensor(("step%d.in.grad%d"):format(step, i - 1), device)) end
            optimizer:step()
            for i, p in ipairs(params) do case:assert_near(("step%d.out.param%d"):format(step, i - 1), p) end
          end
          local checked = 0
          for _, s in ipairs(optimizer:named_state()) do
            local param, state = s.name:match "^(%d+)%.(.*)$"
            local key = ("step%d.state.param%s.%s"):format(case.args.steps, param, state)
            if case:has(key) then
              case:assert_near(key, s.tensor:to "f32")
              checked = checked + 1
            else
              assert.equal("SGD", case.args.optimizer)
              assert.equal("step", state)
            end
          end
          assert.equal(#case:tensor_names "%.state%.", checked)
        end)
      end
    end
  end
end)

local function infinite(x) return x == "inf" and math.huge or x end

describe("golden clipping", function()
  for _, name in ipairs(golden.names("ops/optim", "clip_grad_norm")) do
    handled[name] = true
    it(name, function()
      for _, device in ipairs { "cpu", "opaque" } do
        local case = golden.load(name)
        local grads, params = leaves_of(case, "in.grad", device), {}
        for i, g in ipairs(grads) do
          params[i] = peri.zeros(g:shape(), "f32", device):requires_grad()
          params[i]:set_grad(g:detach())
        end
        params[#params + 1] = peri.zeros({ 3 }, "f32", device):requires_grad() -- has no gradient
        local norm = optim.clip_grad_norm(params, case.args.max_norm, infinite(case.args.norm_type))
        case:assert_near("out.total_norm", norm)
        for i = 1, #grads do case:assert_near("out.grad" .. i - 1, params[i]:grad()) end
      end
    end)
  end

  it("clip_grad_value", function()
    for _, device in ipairs { "cpu", "opaque" } do
      local case = golden.load "ops/optim/clip_grad_value"
      local p = peri.zeros(case:shape "in.grad0", "f32", device):requires_grad()
      p:set_grad(case:tensor("in.grad0", device))
      optim.clip_grad_value({ p }, case.args.clip_value)
      case:assert_near("out.grad0", p:grad())
    end
  end)

  for _, name in ipairs(golden.names("ops/optim", "gradient_clipping_optimizer")) do
    handled[name] = true
    it(name, function()
      for _, device in ipairs { "cpu", "opaque" } do
        local case = golden.load(name)
        local a = case.args
        local params = { { name = "a" }, { name = "b" } }
        for _, p in ipairs(params) do p.tensor = case:tensor("in.param." .. p.name, device):requires_grad() end
        local optimizer = optim.GradientClippingOptimizer { optimizer = optim.SGD { params = params, lr = a.lr,
          momentum = a.momentum }, clipping = a.clipping, max_gradient = a.max_gradient, norm_type = a.norm_type }
        for step = 1, a.steps do
          for _, p in ipairs(params) do
            p.tensor:set_grad(case:tensor(("step%d.in.grad.%s"):format(step, p.name), device))
          end
          case:assert_near(("step%d.out.total_norm"):format(step), optim.grad_norm(optimizer.params, a.norm_type))
          optimizer:step()
          for _, p in ipairs(params) do case:assert_near(("step%d.out.param.%s"):format(step, p.name), p.tensor) end
        end
      end
    end)
  end
end)

it("every golden case of the optimizers is reproduced", function()
  for _, name in ipairs(golden.names "ops/optim") do assert.is_true(handled[name], name .. " is not covered") end
end)

-- -- schedules --------------------------------------------------------------------------------------------------------

local function some_parameter() return peri.ones({ 1 }):requires_grad() end
local function close(want, got, tolerance, what)
  assert.is_true(math.abs(want - got) <= tolerance * math.abs(want), what)
end

describe("golden schedules", function()
  local document = golden.document "ops/optim/lr_schedulers"
  for _, schedule in ipairs(document.schedules) do
    it(schedule.scheduler, function()
      local cycles = type(schedule.momentum) == "table"
      local optimizer = optim.SGD { params = { some_parameter() }, lr = schedule.base_lr, momentum = cycles and 0.9
        or 0 }
      local args = { optimizer = optimizer }
      for key, value in peri.util.ordered(schedule.args) do args[key] = value end
      local class = optim[schedule.scheduler:match "^%w+"]
      local scheduler = class(args)
      for k, want in ipairs(schedule.lr) do
        close(want, optimizer:lr(), document.tolerance_relative,
          ("step %d: %.17g, wanted %.17g"):format(k - 1, optimizer:lr(), want))
        if cycles then
          close(schedule.momentum[k], optimizer:get "momentum", document.tolerance_relative, "momentum of step " .. k
            - 1)
        end
        if k < #schedule.lr then
          optimizer:step()
          scheduler:step()
        end
      end
      scheduler:seek(7)
      close(schedule.lr[8], scheduler:get_last_lr(), document.tolerance_relative, "seek")
    end)
  end

  local warmup = golden.document "ops/optim/warmup"
  for _, schedule in ipairs(warmup.schedules) do
    it("WarmupOptimizer: " .. schedule.name, function()
      local inner = optim.SGD { params = { some_parameter() } }
      local stages = peri.util.map(schedule.stages, function(s)
        local stage = {}
        for key, value in peri.util.ordered(s) do
          if type(value) ~= "table" and type(value) ~= "userdata" then stage[key] = value end -- dkjson's null
        end
        return stage
      end)
      local optimizer = optim.WarmupOptimizer { optimizer = inner, stages = stages, lr = schedule.lr_base }
      local halfway
      for k, want in ipairs(schedule.lr) do
        close(want, inner:lr(), warmup.tolerance_relative, ("step %d: %.17g, wanted %.17g"):format(k - 1, inner:lr(),
          want))
        if k == 11 then halfway = optimizer:state_dict():clone() end
        optimizer:step()
      end
      optimizer:load_state_dict(halfway)
      close(schedule.lr[11], inner:lr(), warmup.tolerance_relative, "restored")
    end)
  end
end)

-- -- the rest ---------------------------------------------------------------------------------------------------------

describe("optimizers", function()
  it("pass over parameters without a gradient, and count steps for each", function()
    local a, b = peri.ones({ 2 }):requires_grad(), peri.ones({ 2 }):requires_grad()
    local optimizer = optim.Adam { params = { a, b } }
    a:set_grad(peri.ones { 2 })
    optimizer:step()
    b:set_grad(peri.ones { 2 })
    optimizer:step()
    assert.equal(2, optimizer:state()["0.step"]:item())
    assert.equal(1, optimizer:state()["1.step"]:item())
    assert.near(1 - 1e-3, b:item(0), 1e-6)
    optimizer:zero_grad()
    assert.is_nil(a:grad())
  end)

  -- More parameters than one launch takes, of two dtypes, some empty, some without a gradient in some steps, one of
  -- them twice.
  for class, options in peri.util.ordered { SGD = { momentum = 0.9 }, Adagrad = { lr_decay = 0.1 },
    Adam = { amsgrad = true }, AdamW = {}, RMSprop = { centered = true, momentum = 0.5 }, RowWiseAdagrad = {} } do
    for _, device in ipairs { "cpu", "opaque" } do
      it("update many parameters as each by itself: " .. class .. " on " .. device, function()
        local N, together, alone = 150, {}, {}
        local function optimizer(params)
          local args = { params = params, lr = 0.1 }
          for name, value in peri.util.ordered(options) do args[name] = value end
          return optim[class](args)
        end
        local function new(i)
          local dtype = i % 7 == 0 and "f64" or "f32"
          return peri.Tensor.uniform({ i % 11 == 0 and 0 or i % 4 + 1, i % 9 + 1 }, -1, 1, i, 0, dtype,
            device):requires_grad()
        end
        for i = 1, N do
          local p = new(i)
          together[i], alone[i] = p, { tensor = new(i) }
          alone[i].optimizer = optimizer { alone[i].tensor }
        end
        for i = 1, N do together[i] = { name = "p" .. i, tensor = together[i] } end
        local all = optimizer(together)
        for step = 1, 3 do
          for i = 1, N do
            local p, q = together[i].tensor, alone[i].tensor
            local g = (i + step) % 5 > 0 and peri.Tensor.uniform(p:shape(), -1, 1, i, step, p:dtype(), device) or nil
            p:set_grad(g)
            q:set_grad(g)
          end
          all:step()
          for i = 1, N do alone[i].optimizer:step() end
        end
        for i = 1, N do assert.same(alone[i].tensor:to_list(), together[i].tensor:to_list(), "parameter " .. i) end
      end)
    end
  end

  it("clip many gradients as if they were one", function()
    for _, device in ipairs { "cpu", "opaque" } do
      local params, squares, largest = {}, 0, 0
      for i = 1, 140 do
        local dtype = i % 7 == 0 and "f64" or "f32"
        params[i] = peri.zeros({ i % 50 }, dtype, device):requires_grad()
        if i % 6 > 0 then params[i]:set_grad(peri.Tensor.uniform({ i % 50 }, -1, 1, i, 0, dtype, device)) end
        for _, x in ipairs(i % 6 > 0 and params[i]:grad():to_list() or {}) do
          squares, largest = squares + x * x, math.max(largest, math.abs(x))
        end
      end
      local before = params[10]:grad():to_list()
      assert.near(largest, optim.grad_norm(params, math.huge):item(), 0)
      assert.near(math.sqrt(squares), optim.clip_grad_norm(params, 1):item(), 1e-9)
      for i, x in ipairs(params[10]:grad():to_list()) do
        assert.near(before[i] / (math.sqrt(squares) + 1e-6), x, 1e-7)
      end
      optim.clip_grad_value(params, 0.01)
      assert.near(0.01, optim.grad_norm(params, math.huge):item(), 1e-9)
    end
  end)

  it("take gradients that are views, and f64", function()
    local p = peri.ones({ 2, 3 }, "f64"):requires_grad()
    p:set_grad(peri.tensor({ { 1, 2 }, { 3, 4 }, { 5, 6 } }, "f64"):transpose(1, 2))
    assert.near(math.sqrt(91), optim.clip_grad_norm({ p }, 1e9):item(), 1e-12)
    optim.SGD({ params = { p }, lr = 1 }):step()
    assert.same({ { 0, -2, -4 }, { -1, -3, -5 } }, p:to_table())
  end)

  for _, class in ipairs { "SGD", "Adagrad", "Adam", "AdamW", "RMSprop", "RowWiseAdagrad" } do
    it(class .. " continues from a saved state", function()
      local options = { SGD = { momentum = 0.9 }, Adam = { amsgrad = true },
        RMSprop = { centered = true, momentum = 0.5 } }
      local function new()
        local model = nn.Linear { in_features = 3, out_features = 2, bias = false }
        local args = { params = model, lr = 0.1 }
        for key, value in peri.util.ordered(options[class] or {}) do args[key] = value end
        return model, optim[class](args)
      end
      local function train(model, optimizer, from, to)
        for k = from, to do
          optimizer:zero_grad()
          model(peri.tensor { { k, 1, -k } }):square():sum():backward()
          optimizer:step()
        end
      end
      local model, optimizer = new()
      train(model, optimizer, 1, 3)
      local copy, resumed = new()
      copy:load_state_dict(model:state_dict())
      resumed:load_state_dict(optimizer:state_dict())
      train(model, optimizer, 4, 6)
      train(copy, resumed, 4, 6)
      assert.same(model.weight:to_list(), copy.weight:to_list())
    end)
  end

  it("combine under names", function()
    local a, b = some_parameter(), some_parameter()
    local both = optim.CombinedOptimizer { { name = "x",
      optimizer = optim.SGD { params = { { name = "w", tensor = a } }, lr = 1 } },
        { name = "y", optimizer = optim.Adagrad { params = { { name = "w", tensor = b } }, lr = 1 } } }
    assert.same({ "x.w", "y.w" }, both.names)
    a:set_grad(peri.ones { 1 })
    b:set_grad(peri.full({ 1 }, 4))
    both:step()
    assert.equal(0, a:item())
    assert.near(0, b:item(), 1e-6)
    assert.equal(16, both:state()["y.w.sum"]:item())
    both:set_lr(0.5)
    assert.equal(0.5, both:lr())
    both:load_state_dict(both:state_dict())
    local more = both:state_dict()
    more.state["x.w"].z = a
    assert.error_matches(function() both:load_state_dict(more) end, "parameter 'x.w' has no state 'z'")
    assert.error_matches(function() optim.CombinedOptimizer { optim.SGD { params = { a } },
      optim.SGD { params = { b } } } end, "named '0'")
    both:zero_grad()
    assert.is_nil(a:grad())
  end)

  worlds.each("clip the norm of sharded parameters over a group", function(world, device, n)
    for norm_type, largest in peri.util.ordered { [2] = false, [math.huge] = true } do
      -- one replicated gradient of 3 and, on rank r, an own one of 4 + r
      local total = 9
      for r = 0, n - 1 do total = largest and math.max(3, 4 + r) or total + (4 + r) ^ 2 end
      local norm = largest and total or math.sqrt(total)
      local shared, own = peri.ones({ 1 }, "f32", device):requires_grad(),
        peri.ones({ 1 }, "f32", device):requires_grad()
      shared:set_grad(peri.full({ 1 }, 3, "f32", device))
      own:set_grad(peri.full({ 1 }, 4 + world:rank(), "f32", device))
      local optimizer = optim.GradientClippingOptimizer { optimizer = optim.SGD { params = { shared, own }, lr = 1 },
        clipping = "norm", max_gradient = 1, norm_type = norm_type, sharded = { own }, group = world }
      optimizer:step()
      assert.near(1 - 3 / norm, shared:item(), 1e-6)
      assert.near(1 - (4 + world:rank()) / norm, own:item(), 1e-6)
    end
  end)

  it("go down to the rate 0, and not below by rounding", function()
    for steps = 1, 12 do
      for _, start in ipairs { 0.1, 1 / 3, 1 } do
        local o = optim.SGD { params = { peri.zeros { 1 } }, lr = 0.7 }
        local linear = optim.LinearLR { optimizer = o, start_factor = start, end_factor = 0, total_iters = steps }
        for _ = 1, steps + 1 do linear:step() end
        assert.is_true(o:lr() >= 0 and o:lr() < 1e-15)
      end
      local o = optim.SGD { params = { peri.zeros { 1 } }, lr = 0 }
      local cosine = optim.CosineAnnealingLR { optimizer = o, T_max = steps, eta_min = 0.01 }
      for step = 1, 3 * steps do
        cosine:step()
        assert.near(0.005 - 0.005 * math.cos(math.pi * step / steps), o:lr(), 1e-12)
      end
    end
  end)

  it("leave infinite numbers infinite, and their states without NaN", function()
    for _, class in ipairs { "SGD", "Adam", "AdamW", "Adagrad", "RMSprop" } do
      for _, device in ipairs { "cpu", "opaque" } do
        for _, dtype in ipairs { "f32", "f64" } do
          local p = peri.tensor({ { -math.huge, 2, math.huge } }, dtype, device):requires_grad()
          local o = optim[class] { params = { p }, lr = 0.1, momentum = (class == "SGD" or class == "RMSprop") and 0.5
            or nil }
          for _ = 1, 2 do
            p:set_grad(peri.tensor({ { 1, 1, -1 } }, dtype, device))
            o:step()
          end
          local got = p:to_list()
          assert.same({ class, -math.huge, true, math.huge }, { class, got[1], got[2] < 2, got[3] })
          for _, state in ipairs(o:named_state()) do
            assert.is_true(peri.nn.functional.all(peri.nn.functional.isfinite(state.tensor)):item() == 1)
          end
        end
      end
    end
  end)

  it("change their numbers from step to step", function()
    local optimizer = optim.SGD { params = { some_parameter() }, lr = 0.5, momentum = 0.9 }
    assert.equal(0.5, optimizer:lr())
    optimizer:set_lr(0.25)
    assert.equal(0.25, optimizer:get "lr")
    optimizer:set_momentum(0.5)
    assert.equal(0.5, optimizer:get "momentum")
    local adam = optim.Adam { params = { some_parameter() } }
    adam:set_momentum(0.8)
    assert.equal(0.8, adam:get "beta1")
  end)

  it("name what is wrong", function()
    local p = some_parameter()
    local function fails(pattern, f) assert.error_matches(f, pattern) end
    fails("argument 'params' is missing", function() optim.SGD { lr = 1 } end)
    fails("no argument 'momentun'", function() optim.SGD { params = { p }, momentun = 1 } end)
    fails("params%[1%] is no tensor", function() optim.SGD { params = { 3 } } end)
    fails("params must be a list", function() optim.SGD { params = p } end)
    fails("lr is %-1, allowed: 0 <= lr < inf", function() optim.SGD { params = { p }, lr = -1 } end)
    fails("beta1 is 1, allowed: 0 <= beta1 < 1", function() optim.Adam { params = { p }, betas = { 1, 0.9 } } end)
    fails("nesterov needs a momentum", function() optim.SGD { params = { p }, nesterov = true } end)
    fails("parameter 0 %(f32 %[2%]%) must be a contiguous leaf",
      function() optim.SGD { params = { peri.ones({ 4 }):slice(1, 0, 4, 2) } } end)
    fails("a row%-wise optimizer needs two dimensions", function() optim.RowWiseAdagrad { params = { p } } end)
    fails("a parameter is i64", function() optim.SGD { params = { peri.ones({ 2 }, "i64") } } end)
    fails("no number 'rate'", function() optim.SGD({ params = { p } }):set("rate", 1) end)
    fails("made without momentum", function() optim.SGD({ params = { p } }):set("momentum", 0.9) end)
    fails("'sum' of parameter '0' is missing; 'step' of parameter '0' is missing; param_groups",
      function() optim.Adagrad({ params = { p } }):load_state_dict { state = {} } end)
    fails("clipping is 'both', allowed: none, norm, value", function()
      optim.GradientClippingOptimizer { optimizer = optim.SGD { params = { p } }, clipping = "both" }
    end)
    p:set_grad(peri.ones { 1 })
    fails("limit 0, allowed: above 0", function() optim.clip_grad_norm({ p }, 0) end)
    fails("limit %-1", function() optim.clip_grad_value({ p }, -1) end)
    fails("a norm of order 0", function() optim.grad_norm({ p }, 0) end)
    fails("no parameters", function() optim.grad_norm({}) end)
    fails("policy 'fast', allowed: constant, cosine", function()
      optim.WarmupOptimizer { optimizer = optim.SGD { params = { p } }, stages = { { policy = "fast" } } }
    end)
    fails("stage 2 ends at step 3, the one before it at 5", function()
      optim.WarmupOptimizer { optimizer = optim.SGD { params = { p } },
        stages = { { max_iters = 5 }, { max_iters = 3 } } }
    end)
    for text, stage in peri.util.ordered {
      ["'inv_sqrt', has the factor inf at step 0"] = { policy = "inv_sqrt", max_iters = 5 },
      ["'poly', has the factor %-?nan at step 5"] = { policy = "poly", max_iters = 5, decay_iters = 4, value = 0.5 },
      ["'interpolate', has the factor %-0.5 at step 0"] = { policy = "interpolate", max_iters = 4, value = 0,
        end_value = 0.5, start_interpolating_iters = 2 },
      ["'interpolate', has the factor .* at step 0"] = { policy = "interpolate", max_iters = 4, value = 0,
        end_value = 0.5, start_interpolating_iters = 4 } } do
      fails("stage 1, " .. text, function()
        optim.WarmupOptimizer { optimizer = optim.SGD { params = { p } }, stages = { stage } }
      end)
    end
    fails("OneCycleLR: step 4 of 3", function() -- step 3 there is, as in PyTorch: a loop of 3 steps ends with it
      optim.OneCycleLR({ optimizer = optim.SGD { params = { p }, momentum = 0.9 }, max_lr = 1,
        total_steps = 3 }):seek(4) end)
  end)
end)

it("stages that a WarmupOptimizer is made of are walked to their end", function()
  local function draw(list) return list[math.random(#list)] end
  local refused, made = 0, 0
  for _ = 1, 200 do
    local stages, last = {}, 0
    for i = 1, math.random(3) do
      last = last + math.random(5)
      stages[i] = { policy = draw { "none", "linear", "constant", "poly", "step", "inv_sqrt", "interpolate",
        "cosine_annealing_warm_restarts" }, max_iters = last, value = draw { 0, 0.5, 1, 2, 3 },
        lr_scale = draw { 0, 1 }, decay_iters = draw { -1, 1, 3, last, last + 2 }, sgdr_period = math.random(4),
        end_value = draw { 0, 0.5, 2 }, start_interpolating_iters = math.random(0, last + 1) }
    end
    local inner = optim.SGD { params = { peri.zeros { 1 } } }
    local fine, optimizer = pcall(optim.WarmupOptimizer, { optimizer = inner, stages = stages })
    if fine then
      made = made + 1
      for _ = 1, last + 2 do optimizer:step() end
      assert.equal(0.1, inner:lr())
    else
      refused = refused + 1
      assert.matches("WarmupStage: stage %d, '[%w_]+', has the factor", tostring(optimizer))
    end
  end
  assert.is_true(made > 50 and refused > 20)
end)

it("a stage of a WarmupOptimizer that interpolates ends at its end_value, to the bit", function()
  for last = 1, 20 do
    local inner = optim.SGD { params = { peri.zeros { 1 } } }
    local optimizer = optim.WarmupOptimizer { optimizer = inner, lr = 1, stages = { { policy = "interpolate",
      max_iters = last, value = 0.1, end_value = 0, start_interpolating_iters = 0 } } }
    for _ = 1, last do optimizer:step() end
    assert.equal(0, inner:lr())
  end
end)

describe("options of schedules out of their range are refused:", function()
  for name, options in peri.util.ordered {
    StepLR = { step_size = -1, "step_size" }, ["StepLR "] = { step_size = 1.5, "step_size" },
    ["StepLR  "] = { step_size = 0, "step_size" }, CosineAnnealingLR = { T_max = 0, "T_max" },
    ExponentialLR = { gamma = -1, "gamma" }, LinearLR = { total_iters = 0, "total_iters" },
    ConstantLR = { factor = math.huge, "factor" }, MultiStepLR = { milestones = { 1 }, gamma = -0.1, "gamma" },
  } do
    it(name .. options[1], function()
      local class, what = name:match "%w+", options[1]
      local args = { optimizer = peri.nn.optim.SGD { params = { peri.zeros({ 1 }):requires_grad() }, lr = 0.1 } }
      for option, value in peri.util.ordered(options) do
        if option ~= 1 then args[option] = value end
      end
      assert.error_matches(function() peri.nn.optim[class](args) end, class .. ": " .. what .. " is .*, allowed")
    end)
  end
end)
