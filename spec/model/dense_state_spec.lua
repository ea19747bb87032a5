-- State of optimizers of the dense part over dense tables: whole under the unsharded model's names, and loaded under
-- any plan.
local peri = require "perilune"
local golden = require "spec.support.golden"
local worlds = require "spec.support.worlds"
local nn, plan, gather = peri.nn, peri.plan, peri.shard.gather_state_dict

local dense = { compute_kernel = "dense" }
local plans = {
  row_wise = function() return plan.row_wise(dense) end,
  table_wise = function(n) return plan.table_wise(n - 1, dense) end,
  column_wise = function(n)
    return plan.column_wise { ranks = { 0, n - 1, 0 }, sizes = { 4, 8, 4 }, compute_kernel = "dense" }
  end, data_parallel = function() return plan.data_parallel(dense) end,
}
local optimizers = { Adam = { lr = 0.1, amsgrad = true }, RowWiseAdagrad = { lr = 0.1, cut = "rows" },
  SGD = { lr = 0.1, momentum = 0.9 }, Adagrad = { lr = 0.1 } }

local Net = nn.Module:extend "Net"
function Net:init(seed)
  self.tower = { nn.Module() }
  self.tower[1].ebc = peri.EmbeddingBagCollection { seed = seed, tables = peri.util.map({ "a", "b" }, function(name)
    return peri.EmbeddingBagConfig { name = name, num_embeddings = 11, embedding_dim = 16, feature_names = { name } }
  end) }
  self.over = nn.Linear { in_features = 32, out_features = 1, bias = false }
end
function Net:forward(kjt) return self.over(self.tower[1].ebc(kjt):values()):square():mean() end

local function wrap(world, device, kind, seed)
  local entry = plans[kind](world:size())
  return peri.DistributedModelParallel { module = Net(seed), group = world, device = device,
    plan = { ["tower.0.ebc"] = { a = entry, b = plan.row_wise(dense) } } }
end

local function make(model, class)
  local options = peri.util.copy(optimizers[class])
  options.cut, options.params = nil, model:named_parameters()
  return nn.optim[class](options)
end

-- All ranks have the same samples, so that means over the ranks are what one rank has.
local function train(model, optimizer, device, from, to)
  for step = from, to do
    optimizer:zero_grad()
    model(peri.KeyedJaggedTensor { keys = { "a", "b" }, values = { step, 10, 3, step + 1, 9 }, lengths = { 2, 1, 1, 1 },
      device = device })
      :backward()
    optimizer:step()
  end
end

local function numbers(dict)
  local copy = {}
  for name, x in peri.util.ordered(dict) do
    copy[name] = peri.Tensor.is(x) and table.concat(x:to_list(), " ") or type(x) == "table" and numbers(x) or x
  end
  return copy
end

local function assert_near(want, got, where)
  for name, x in peri.util.ordered(want) do
    if peri.Tensor.is(x) then golden.assert_near(x:to_list(), got[name]:to_list(), { abs = 1e-6, rel = 1e-4 },
      where .. name)
    elseif type(x) == "table" then assert_near(x, got[name], where .. name .. ".")
    else assert.equal(x, got[name], where .. name) end
  end
  assert.same(peri.util.keys(want), peri.util.keys(got))
end

describe("the state of an optimizer of dense tables", function()
  for class, options in peri.util.ordered(optimizers) do
    for kind in peri.util.ordered(plans) do
      if not (options.cut and kind == "column_wise") then
        worlds.each(class .. ", " .. kind .. ": is the unsharded one's, and moves to other plans",
          function(world, device)
          peri.ffi.state.device = device
          local plain, model = Net(3), wrap(world, device, kind, 3)
          local of_plain, of_model = make(plain, class), make(model, class)
          plain:load_state_dict(gather(model:state_dict()))
          train(plain, of_plain, device, 1, 2)
          train(model, of_model, device, 1, 2)
          local state = gather(of_model:state_dict())
          assert_near(of_plain:state_dict(), state, "")
          assert_near(plain:state_dict(), gather(model:state_dict()), "")

          -- another plan
          local other = wrap(world, device, kind == "row_wise" and not options.cut and "column_wise" or "row_wise", 4)
          local of_other = make(other, class)
          other:load_state_dict(gather(model:state_dict()))
          of_other:load_state_dict(state)
          assert.same(numbers(state), numbers(gather(of_other:state_dict())))
          of_plain:load_state_dict(state) -- and no plan
          plain:load_state_dict(gather(model:state_dict()))
          assert.same(numbers(state), numbers(of_plain:state_dict()))
          for _, x in ipairs { { plain, of_plain }, { model, of_model }, { other, of_other } } do
            train(x[1], x[2], device, 3, 4)
          end
          for _, x in ipairs { { model, of_model }, { other, of_other } } do
            assert_near(plain:state_dict(), gather(x[1]:state_dict()), "")
            assert_near(of_plain:state_dict(), gather(x[2]:state_dict()), "")
          end
        end, { sizes = { 1, 3 }, devices = class == "Adam" and { "cpu", "opaque" } or { "cpu" } })
      end
    end
  end

  worlds.each("says what another plan lacks", function(world, device)
    local model, other = wrap(world, device, "row_wise", 3), wrap(world, device, "column_wise", 3)
    local a, b = make(model, "Adam"), make(other, "Adam")
    assert.error_matches(function() b:load_state_dict(a:state_dict()) end,
      "'tower.0.ebc.embedding_bags.a.weight.exp_avg' has, as piece 1 of this rank, .-: it is of another plan; "
        .. "ShardedTensor:gather")
    local state = gather(a:state_dict())
    state.state["tower.0.ebc.embedding_bags.b.weight"].step = nil
    assert.error_matches(function() b:load_state_dict(state) end,
      "'step' of parameter 'tower.0.ebc.embedding_bags.b.weight' is missing")
    state = gather(a:state_dict())
    if world:rank() == 1 then state.state["tower.0.ebc.embedding_bags.b.weight"].exp_avg = peri.zeros { 3 } end
    local before = numbers(gather(b:state_dict()))
    assert.error_matches(function() b:load_state_dict(state) end,
      "Adam:load_state_dict: rank 1 of .-'tower.0.ebc.embedding_bags.b.weight.exp_avg' has shape %[11, 16%] here, and "
        .. "%[3%]")
    assert.same(before, numbers(gather(b:state_dict())))
  end, { sizes = { 2, 3 }, devices = { "cpu" } })

  worlds.each("goes through clipping and combining", function(world, device)
    local model = wrap(world, device, "table_wise", 3)
    local function combined()
      return nn.optim.GradientClippingOptimizer { clipping = "norm", max_gradient = 0.5,
        optimizer = nn.optim.CombinedOptimizer { { name = "", optimizer = make(model, "Adam") } } }
    end
    local a, b = combined(), combined()
    train(model, a, device, 1, 1)
    local state = gather(a:state_dict())
    b:load_state_dict(state)
    assert.same(numbers(state), numbers(gather(b:state_dict())))
    assert.same({ "over.weight", "tower.0.ebc.embedding_bags.a.weight", "tower.0.ebc.embedding_bags.b.weight" },
      peri.util.keys(state.state))
  end, { sizes = { 1, 3 }, devices = { "cpu" } })
end)
