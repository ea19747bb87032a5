-- Keyed optimizers: state_dict and load_state_dict under the names of parameters, through wrappers and combinations;
-- groups of parameters.
local peri = require "perilune"
local nn = peri.nn
local optim = nn.optim

local function params(prefix)
  local p = { name = prefix .. "w", tensor = nn.Parameter(peri.tensor { 1, 2 }) }
  return { p, { name = prefix .. "b", tensor = nn.Parameter(peri.tensor { 3 }) } }
end

local function train(list, optimizer, steps)
  for step = 1, steps do
    for i, p in ipairs(list) do p.tensor:set_grad(peri.full(p.tensor:shape(), step * i)) end
    optimizer:step()
  end
end

local function numbers(list) return peri.util.map(list, function(p) return p.tensor:to_list() end) end

--- Each way of an optimizer: what makes it of parameters, and the keys that its state has beside those of Adam.
local ways = {
  plain = function(p) return optim.Adam { params = p, lr = 0.1 } end,
  wrapped = function(p) return optim.OptimizerWrapper(optim.Adam { params = p, lr = 0.1 }) end,
  clipped = function(p)
    return optim.GradientClippingOptimizer { optimizer = optim.Adam { params = p, lr = 0.1 }, clipping = "norm" }
  end, warm = function(p) return optim.WarmupOptimizer { optimizer = optim.Adam { params = p, lr = 0.1 },
    stages = { { policy = "linear", max_iters = 3, value = 0.5 } } } end,
  combined = function(p) return optim.CombinedOptimizer { { name = "x",
    optimizer = optim.Adam { params = { p[1] }, lr = 0.1 } },
      { name = "y", optimizer = optim.Adam { params = { p[2] }, lr = 0.1 } } } end,
  keyed = function(p) return optim.KeyedOptimizerWrapper({ [p[1].name] = p[1].tensor, [p[2].name] = p[2].tensor },
    function(list) return optim.Adam { params = list, lr = 0.1 } end) end,
}

describe("a keyed optimizer", function()
  for way, make in peri.util.ordered(ways) do
    it(way .. ": goes on from a state_dict as if it had not stopped", function()
      local a = params ""
      local first = make(a)
      train(a, first, 2)
      local dict, b = first:state_dict(), params ""
      for i, p in ipairs(b) do p.tensor:detach():copy(a[i].tensor:detach()) end
      local second = make(b)
      second:load_state_dict(dict)
      train(a, first, 2)
      train(b, second, 2)
      assert.same(numbers(a), numbers(b))
      local w, y = way == "combined" and "x.w" or "w", way == "combined" and "y.b" or "b"
      assert.same({ "exp_avg", "exp_avg_sq", "step" }, peri.util.keys(dict.state[w]))
      assert.same({ 2 }, dict.state[w].exp_avg:shape())
      local names = way == "warm" and { "__warmup", y, w } or { w, y }
      table.sort(names)
      assert.same(names, peri.util.keys(dict.state))
      assert.same(way == "combined" and { { "x.w" }, { "y.b" } } or way == "keyed" and { { "b", "w" } }
        or { { "w", "b" } }, peri.util.map(dict.param_groups, function(group) return group.params end))
    end)

    it(way .. ": is part of a CombinedOptimizer without a name, under its own names", function()
      local first, second = make(params ""), optim.CombinedOptimizer { make(params "") }
      assert.same(first.names, second.names)
      assert.same(peri.util.keys(first:state_dict().state), peri.util.keys(second:state_dict().state))
    end)
  end

  it("saves the numbers of its groups and restores them, unless it is told not to", function()
    local p = params ""
    local optimizer = optim.Adam { params = p, lr = 0.1, weight_decay = 0.5 }
    optimizer:init_state()
    local dict = optimizer:state_dict()
    assert.same({ { params = { "w", "b" }, lr = 0.1, weight_decay = 0.5, beta1 = 0.9, beta2 = 0.999, eps = 1e-8,
      optimizer = "Adam", amsgrad = false, maximize = false } }, dict.param_groups)
    local group = optimizer.param_groups[1]
    group.lr, group.beta1 = 0.3, 0.5
    assert.same({ 0.3, 0.5 }, { optimizer:lr(), optimizer:get "beta1" })
    optimizer:load_state_dict(dict)
    assert.same({ 0.1, 0.9 }, { group.lr, group.beta1 })
    optimizer:save_param_groups(false)
    assert.is_nil(optimizer:state_dict().param_groups)
    group.lr = 0.7
    optimizer:load_state_dict(dict)
    assert.equal(0.7, group.lr)
    assert.error_matches(function() group.rate = 1 end,
      "it has no number 'rate'; those are: beta1, beta2, eps, lr, weight_decay")
    assert.error_matches(function() optimizer:add_param_group {} end, "Adam: the group has no 'params'")
  end)

  it("finds the numbers of its groups by the names of parameters, whatever groups another optimizer has", function()
    local p = params ""
    local function one(name, lr) return { name = "", optimizer = optim.SGD { params = { p[name] }, lr = lr } } end
    local both, whole = optim.CombinedOptimizer { one(2, 0.5), one(1, 0.25) }, optim.SGD { params = p, lr = 1 }
    whole:load_state_dict(optim.SGD { params = { p[2], p[1] }, lr = 0.125 }:state_dict())
    assert.equal(0.125, whole:lr())
    both:load_state_dict(optim.CombinedOptimizer { one(1, 3), one(2, 2) }:state_dict())
    assert.same({ 2, 3 }, peri.util.map(both.param_groups, function(group) return group.lr end))
    assert.error_matches(function() whole:load_state_dict(both:state_dict()) end,
      "param_groups: 'lr' is 3 for parameter 'w' and 2 for 'b', which share one number here")
    both:load_state_dict(whole:state_dict())
    assert.same({ 0.125, 0.125 }, peri.util.map(both.param_groups, function(group) return group.lr end))
  end)

  it("lists all that does not fit, before anything changes", function()
    local optimizer = optim.Adam { params = params "", lr = 0.1 }
    local before = optimizer:state_dict():clone()
    local dict = optim.AdamW { params = params "", lr = 0.2 }:state_dict():clone()
    dict.state.w.exp_avg:fill(7)
    dict.state.b.exp_avg, dict.state.w.step = peri.zeros { 5 }, nil
    dict.param_groups[1].beta1, dict.param_groups[1].eps, dict.param_groups[1].speed = 2, nil, 1
    local ok, err = pcall(optimizer.load_state_dict, optimizer, dict)
    assert.is_false(ok)
    for _, text in ipairs { "'step' of parameter 'w' is missing",
      "state 'b.exp_avg' has 1 elements here, and 5 in the state that is given",
      "param_groups: 'eps' of parameter 'w' is nil, wanted a number", "'beta1' of parameter 'w': .*beta1 is 2",
      "'optimizer' of parameter 'w' is Adam here, and 'AdamW' in the state that is given",
      "parameter 'w' has no number 'speed'" } do
      assert.matches(text, err.message)
    end
    assert.same(0, optimizer:state_dict().state.w.exp_avg:item(0))
    assert.same(before.param_groups, optimizer:state_dict().param_groups)
    local none = optimizer:state_dict()
    none.param_groups = nil
    assert.error_matches(function() optimizer:load_state_dict(none) end,
      "param_groups, with the learning rates, are missing")
  end)

  it("lets a schedule keep the proportions of its groups", function()
    local p = params ""
    local both = optim.CombinedOptimizer { { name = "x", optimizer = optim.SGD { params = { p[1] }, lr = 0.5 } },
      { name = "y", optimizer = optim.SGD { params = { p[2] }, lr = 0.25 } } }
    local schedule = optim.ExponentialLR { optimizer = both, gamma = 0.5 }
    schedule:step()
    assert.same({ 0.25, 0.125 }, { both.param_groups[1].lr, both.optimizers[2].optimizer:lr() })
  end)

  it("of several has a name for each, or none", function()
    local one = optim.SGD { params = { params ""[1] } }
    for _, name in ipairs { true, {}, 3 } do
      assert.error_matches(function() optim.CombinedOptimizer { { name = name, optimizer = one } } end,
        "CombinedOptimizer: optimizers%[1%].name is .+, wanted a string")
    end
    assert.error_matches(function() optim.CombinedOptimizer { { optimizer = one } } end,
      "optimizers%[1%].name is nil, wanted a string")
  end)

  it("says what does not fit, by parameter and key", function()
    local optimizer = optim.Adam { params = params "", lr = 0.1 }
    local function refused(change, text)
      local dict = optimizer:state_dict()
      change(dict.state)
      assert.error_matches(function() optimizer:load_state_dict(dict) end, text)
    end
    refused(function(s) s.w.exp_avg = nil end, "Adam:load_state_dict: 'exp_avg' of parameter 'w' is missing")
    refused(function(s) s.w = nil end, "of parameter 'w' is missing")
    refused(function(s) s.z = {} end, "it has no parameter 'z'; those are: w, b")
    refused(function(s) s.b.sum = peri.zeros { 1 } end, "parameter 'b' has no state 'sum'")
    refused(function(s) s.b.exp_avg = peri.zeros { 2 } end,
      "Adam:load_state_dict: state 'b.exp_avg' has 1 elements here, and 2 in the state that is given")
    refused(function(s) s.b.exp_avg = 3 end, "state 'b.exp_avg' is 3, wanted a tensor")
    assert.error_matches(function() optimizer:load_state_dict {} end, "dict.state is nil, wanted a table")
    assert.error_matches(function()
      optim.KeyedOptimizerWrapper({ w = params("")[1].tensor }, function() return 3 end)
    end,
      "KeyedOptimizerWrapper: factory returned 3, wanted an optimizer of nn.optim")
    assert.error_matches(function() optim.KeyedOptimizerWrapper({ w = 3 }, function() end) end,
      "params%['w'%] is 3, wanted a tensor")
  end)

  for way, make in peri.util.ordered(ways) do
    it(way .. ": checks and assigns whole maps of names", function()
      local optimizer = make(params "")
      for kind, value in peri.util.ordered { ["nil"] = false, ["3"] = 3, ["'x'"] = "x", ["true"] = true } do
        for _, method in ipairs { "check_state", "assign_state" } do
          assert.error_matches(function() optimizer[method](optimizer, value or nil) end,
            ("^[%%w]+:%s: map is %s, wanted a table"):format(method, kind))
        end
      end
      assert.error_matches(function() optimizer:check_state({}, {}) end, "check_state: prefix is a table")
      assert.same({}, optimizer:check_state {})
      assert.error_matches(function() optimizer:assign_state {} end, "assign_state: state '[^']+' is missing")
    end)
  end

  it("may be one's own", function()
    local p = params ""
    local Own = peri.util.class("Own", optim.KeyedOptimizer)
    local loaded = 0
    function Own:step() -- momentum without decay
      for i, name in ipairs(self.names) do
        local sum = self._state[name].sum
        sum:copy(sum + self.params[i]:grad())
        self.params[i]:detach():copy(self.params[i]:detach() - sum * self.param_groups[1].lr)
      end
    end
    function Own.post_load_state_dict() loaded = loaded + 1 end
    local function make(list)
      return Own { params = { w = list[1].tensor, b = list[2].tensor }, param_groups = { { lr = 0.5 } },
        state = { w = { sum = peri.zeros { 2 } }, b = { sum = peri.zeros { 1 } } } }
    end
    local own = make(p)
    train(p, own, 2)
    assert.same({ { 1 - 0.5 * 1 - 0.5 * 3, 2 - 2 }, { 3 - 0.5 * 2 - 0.5 * 6 } }, numbers(p))
    local other = make(params "")
    other:load_state_dict(own:state_dict())
    assert.equal(1, loaded)
    assert.same({ 3, 3 }, other:state_dict().state.w.sum:to_list())
    own:set_lr(2)
    assert.equal(2, own:lr())
    own:zero_grad()
    assert.is_nil(p[1].tensor:grad())
    assert.error_matches(function()
      own:load_state_dict { state = { w = { sum = peri.zeros { 3 } }, b = { sum = peri.zeros { 1 } } } }
    end,
      "Own:load_state_dict: state 'w.sum' has shape %[2%] here, and %[3%] in the state that is given")
    assert.error_matches(function() optim.KeyedOptimizer({ params = {} }):step() end, "KeyedOptimizer: no step method")
    assert.error_matches(function() optim.KeyedOptimizer { params = {}, state = { z = {} } } end,
      "state of 'z', which is no parameter")
    assert.error_matches(function() optim.KeyedOptimizer { params = { w = 3 } } end,
      "params%['w'%] is 3, wanted a tensor")
  end)
end)
