-- Checkpoints of whole programs: the run that goes on after a load is the run that never stopped, under any plan; what
-- does not fit is one error that lists it all, and nothing changes.
local bit = require "bit"
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local text = require "spec.support.facts"
local shell = require "spec.support.shell"
local nn, plan = peri.nn, peri.plan

local folder, clean = shell.temporary()
teardown(clean)

local Net = nn.Module:extend "Net"
function Net:init(options)
  self.ebc = peri.EmbeddingBagCollection { seed = 5,
    fused_params = { optimizer = options.optimizer or "rowwise_adagrad", learning_rate = options.rate or 0.1,
      exact = true }, tables = {
    peri.EmbeddingBagConfig { name = "a", num_embeddings = 50, embedding_dim = 8, feature_names = { "fa" } },
    peri.EmbeddingBagConfig { name = "b", num_embeddings = 37, embedding_dim = 16, feature_names = { "fb" } } } }
  self.drop, self.over = nn.Dropout { p = 0.3 }, nn.Linear { in_features = 24, out_features = 1 }
  self:register_buffer("seen", peri.zeros { 2 })
end
function Net:forward(kjt)
  self.seen:copy(self.seen + 1)
  return self.over(self.drop(self.ebc(kjt):values())):mean()
end

local function build(world, entry, options)
  nn.manual_seed(3)
  local net = Net(options or {})
  local model = world and peri.DistributedModelParallel { module = net, group = world,
    plan = { ebc = { a = entry, b = entry } } } or net
  local optimizer = nn.optim.Adam { params = model:named_parameters(), lr = 0.05 }
  if not world then optimizer = nn.optim.Adam { params = { net.over.weight, net.over.bias }, lr = 0.05 } end
  return { model = model, optimizer = optimizer, schedule = nn.optim.StepLR { optimizer = optimizer, step_size = 2,
    gamma = 0.5 } }
end

--- The batch of step i, the same on all ranks, so that what is trained does not depend on their number.
local function batch(i)
  return peri.KeyedJaggedTensor { keys = { "fa", "fb" }, values = { i * 7 % 50, i * 3 % 50, i * 5 % 37, i % 37 },
    lengths = { 1, 1, 2, 0 } }
end

local function train(p, from, last)
  for i = from, last do
    peri.scope(function()
      p.optimizer:zero_grad()
      p.model(batch(i)):backward()
      p.optimizer:step()
      p.schedule:step()
    end)
  end
end

--- Everything that the next step depends on.
local function state(p)
  return text(peri.shard.gather_state_dict { model = p.model:state_dict(), tables = p.model.fused_optimizer and
    p.model:fused_optimizer():state_dict() or {}, optimizer = p.optimizer:state_dict(),
      schedule = p.schedule:state_dict() })
end

local entries = {
  table_wise = function() return plan.table_wise(0) end, row_wise = function() return plan.row_wise() end,
  data_parallel = function() return plan.data_parallel() end,
}

describe("a checkpoint", function()
  for from, make in peri.util.ordered(entries) do
    it("of tables " .. from .. " goes on bit for bit on 1, 2 and 3 ranks, under other plans", function()
      local path, want = folder .. "/" .. from, {}
      sim.run(2, function(rank, world)
        local p = build(world, make())
        train(p, 1, 3)
        local digest = peri.checkpoint.save(path, p, { group = world, values = { step = 3, at = { 1.5, "x" } } })
        assert.equal(32, #digest)
        train(p, 4, 6)
        want[rank] = state(p)
      end)
      for n, to in ipairs { "row_wise", "table_wise", "data_parallel" } do
        sim.run(n, function(_, world)
          local p = build(world, entries[to]())
          train(p, 1, 1) -- whatever it was before
          assert.same({ step = 3, at = { 1.5, "x" } }, peri.checkpoint.load(path, p, { group = world }))
          train(p, 4, 6)
          local got = state(p)
          -- Adagrad's rows are summed exactly; means over another number of equal gradients are equal for 1 and 2
          -- ranks.
          if n < 3 then assert.equal(want[0], got) end
        end)
      end
    end)
  end

  it("of a model without ranks loads into one that is sharded, and back", function()
    local path = folder .. "/plain"
    local p = build()
    train(p, 1, 2)
    p.optimizer, p.schedule = nil, nil
    peri.checkpoint.save(path, p)
    sim.run(2, function(_, world)
      local q = { model = build(world, plan.row_wise()).model }
      peri.checkpoint.load(path, q, { group = world })
      assert.equal(text(p.model:state_dict()), text(q.model:state_dict():gather()))
      peri.checkpoint.save(path .. "2", q, { group = world })
    end)
    local again = { model = build().model }
    peri.checkpoint.load(path .. "2", again)
    assert.equal(text(p.model:state_dict()), text(again.model:state_dict()))
  end)

  it("finds what optimizers remember by the names that parameters have in the models, in whatever order they were "
    .. "given", function()
    local function parts_in(order, grouped)
      local parts, params = { m = nn.Module(), n = nn.Module() }, {}
      for _, model in ipairs(order.models) do
        for _, name in ipairs(order.layers) do
          nn.manual_seed(#name) -- all layers begin alike
          parts[model][name] = nn.Linear { in_features = 2, out_features = 2 }
          local own = parts[model][name]:parameters()
          if grouped then params[#params + 1] = { params = own, lr = 0.1 * (model .. name):byte(1, 2) } end
          for _, p in ipairs(grouped and {} or own) do params[#params + 1] = p end
        end
      end
      local adam = nn.optim.Adam { params = params, lr = 0.1 }
      parts.optimizer = nn.optim.GradientClippingOptimizer { optimizer = adam, clipping = "value", max_gradient = 50 }
      parts.schedule = nn.optim.StepLR { optimizer = parts.optimizer, step_size = 2, gamma = 0.5 }
      return parts
    end
    local function steps(p, n)
      for _ = 1, n do
        local x = peri.ones { 1, 2 }
        local loss = (p.m.a(x) * 3 + p.m.b(x) * 5 + p.n.a(x) * 7 + p.n.b(x) * 11):sum()
        p.optimizer:zero_grad();
        (loss * loss):backward()
        p.optimizer:step()
        p.schedule:step()
      end
      return text { p.m:state_dict(), p.n:state_dict() }
    end
    local forth = { models = { "m", "n" }, layers = { "a", "b" } }
    local back = { models = { "n", "m" }, layers = { "b", "a" } }
    for _, grouped in ipairs { false, true } do
      local path = ("%s/order-%s"):format(folder, tostring(grouped))
      local p, q = parts_in(forth, grouped), parts_in(back, grouped)
      steps(p, 3)
      peri.checkpoint.save(path, p)
      peri.checkpoint.load(path, q)
      assert.equal(steps(p, 2), steps(q, 2))
      local _, err = pcall(peri.checkpoint.load, path, { m = q.m, n = q.n, optimizer = nn.optim.SGD {
        params = q.m:parameters(), lr = 1 } }, { except = { "schedule" } })
      assert.truthy(tostring(err):find("parameter 'm.a.bias' has no state 'exp_avg'", 1, true), tostring(err))
    end
    -- a checkpoint that has no names, as of an optimizer alone, is loaded by position
    local p, q = parts_in(forth), parts_in(forth)
    steps(p, 1)
    peri.checkpoint.save(folder .. "/numbers", { optimizer = p.optimizer })
    peri.checkpoint.load(folder .. "/numbers", q, { only = { "optimizer" } })
    assert.equal(text(p.optimizer:state_dict()), text(q.optimizer:state_dict()))
  end)

  it("of quantized tables has the rows of all ranks, for other plans that do not cut rows", function()
    local function quantized(seed, data_type, world, entry)
      local net = peri.quantize_embeddings { dtype = data_type, module = peri.EmbeddingBagCollection { seed = seed,
        tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 5, embedding_dim = 8,
          feature_names = { "f" } } } } }
      if not world then return net end
      return peri.DistributedModelParallel { module = net, group = world, plan = { [""] = { t = entry } } }
    end
    local by_columns = plan.column_wise { ranks = { 1, 0 } }
    for data_type in peri.util.ordered { INT8 = true, INT2 = true, FP16 = true } do
      local path, whole = ("%s/quantized-%s"):format(folder, data_type), quantized(1, data_type)
      sim.run(2, function(_, world)
        quantized(1, data_type, world, plan.row_wise()):save(path)
        quantized(1, data_type, world, by_columns):save(path .. "-columns", { async = true }):wait()
      end)
      local plain = quantized(2, data_type)
      peri.checkpoint.load(path, { model = plain })
      assert.equal(text(whole:state_dict()), text(plain:state_dict()))
      sim.run(3, function(_, world)
        local other = quantized(2, data_type, world, plan.table_wise(2))
        other:load(path)
        assert.equal(text(whole:state_dict()), text(other:state_dict():gather()))
        local halves = quantized(2, data_type, world, by_columns)
        if data_type == "FP16" then halves:load(path) else assert.error_matches(function() halves:load(path) end,
          "'embedding_bags.t.weight' has shape %[5, %d+%] here, and") end
        halves:load(path .. "-columns")
        local same = quantized(1, data_type, world, by_columns)
        assert.equal(text(same:state_dict():gather()), text(halves:state_dict():gather()))
      end)
    end
  end)

  it("has one path on all ranks", function()
    sim.run(2, function(_, world)
      local ok, err = pcall(peri.checkpoint.save, folder .. "/path-" .. world:rank(), build(world, plan.row_wise()),
        { group = world })
      assert.is_false(ok)
      assert.matches("the path is '[^']*path%-0' on rank 0 and '[^']*path%-1' on rank 1", tostring(err))
    end)
  end)

  it("that does not fit is one error that lists it all, on all ranks, and nothing changes", function()
    local path = folder .. "/other"
    sim.run(2, function(_, world)
      local p = build(world, plan.row_wise())
      p.model:save(path, { parts = { optimizer = p.optimizer } })
      local q = build(world, plan.table_wise(0), { optimizer = "adam" })
      local before = state(q)
      local ok, err = pcall(peri.checkpoint.load, path, q, { group = world })
      assert.is_false(ok)
      for _, words in ipairs { "part 'model.tables'",
        "a.momentum2' of parameter 'ebc.embedding_bags.a.weight' is missing", "part 'schedule' is not in it" } do
        assert.truthy(tostring(err):find(words, 1, true), words .. " in " .. tostring(err))
      end
      assert.equal(before, state(q))
      ok, err = pcall(peri.checkpoint.load, path, { model = p.model }, { group = world })
      assert.is_false(ok)
      assert.truthy(tostring(err):find("part 'optimizer' has no object here", 1, true), tostring(err))
    end)
  end)

  it("of two equal layers loads where they are one layer with two names, and is refused where they differ", function()
    local function net(shared)
      local of = nn.Module()
      of.a = nn.Linear { in_features = 3, out_features = 2 }
      of.b = shared and of.a or nn.Linear { in_features = 3, out_features = 2 }
      return of
    end
    local path, two, one = folder .. "/two-names", net(), net(true)
    two.b:load_state_dict(two.a:state_dict())
    peri.checkpoint.save(path, { model = two })
    peri.checkpoint.load(path, { model = one })
    assert.same(two.a.weight:to_list(), one.b.weight:to_list())
    peri.checkpoint.load(path, { model = net(true) }, { only = { "model/b." } })
    peri.checkpoint.load(path, { model = one }, { rename = { ["model/b."] = "model/c." }, except = { "model/c." } })
    two.b.bias:detach():fill(5)
    peri.checkpoint.save(path, { model = two }, { replace = true })
    assert.error_matches(function() peri.checkpoint.load(path, { model = one }) end,
      "part 'model': 'a.bias' and 'b.bias' are one tensor here, and differ", 1, true)
    assert.same(two.a.weight:to_list(), one.b.weight:to_list())
  end)

  it("brings its rates along; those that the script sets after loading win, and are saved", function()
    local function set(p)
      p.optimizer.param_groups[1].lr = 0.3
      local fused = p.model:fused_optimizer()
      for i = 1, #fused.param_groups do fused.param_groups[i].lr = 0.7 end
    end
    local function new(world, rate)
      local p = build(world, plan.row_wise(), { rate = rate })
      p.schedule = { step = function() end } -- which would set the rate again
      return p
    end
    local function parts(p) return { model = p.model, optimizer = p.optimizer } end
    for n = 1, 2 do
      sim.run(n, function(_, world)
        local path = ("%s/rates-%d"):format(folder, n)
        local function rates(p)
          return { p.optimizer.param_groups[1].lr, p.model:fused_optimizer().param_groups[1].lr }
        end
        local straight = new(world, 0.1)
        train(straight, 1, 3)
        peri.checkpoint.save(path, parts(straight), { group = world })
        set(straight)
        train(straight, 4, 6)
        peri.checkpoint.save(path .. "-then", parts(straight), { group = world })
        local want = text(peri.shard.gather_state_dict { straight.model:state_dict(), straight.optimizer:state_dict(),
          straight.model:fused_optimizer():state_dict() })
        local again = new(world, 0.9)
        peri.checkpoint.load(path, parts(again), { group = world })
        assert.same({ 0.05, 0.1 }, rates(again)) -- not the constructor's
        set(again)
        train(again, 4, 6)
        assert.equal(want, text(peri.shard.gather_state_dict { again.model:state_dict(), again.optimizer:state_dict(),
          again.model:fused_optimizer():state_dict() }))
        local third = new(world, 0.9)
        peri.checkpoint.load(path .. "-then", parts(third), { group = world })
        assert.same({ 0.3, 0.7 }, rates(third))
      end)
    end
  end)

  it("is loaded in part on purpose", function()
    local path = folder .. "/part"
    local p = build()
    p.optimizer, p.schedule = nil, nil
    train(build(), 1, 1)
    peri.checkpoint.save(path, p)
    local q = { model = Net {} }
    local weight = q.model.over.weight:to_list()
    peri.checkpoint.load(path, q, { only = { "model/ebc." } })
    assert.same(weight, q.model.over.weight:to_list())
    assert.same(p.model.ebc:table_state("a", "weight"):to_list(), q.model.ebc:table_state("a", "weight"):to_list())
    peri.checkpoint.load(path, q, { except = { "model.tables", "model/ebc." } })
    assert.same(p.model.over.weight:to_list(), q.model.over.weight:to_list())
    -- Under other names, and what is settled afterwards wins.
    local Other = nn.Module:extend "Other"
    function Other:init() self.top = nn.Linear { in_features = 24, out_features = 1 } end
    local other = { model = Other() }
    peri.checkpoint.load(path, other, { rename = { ["model/over."] = "model/top." }, only = { "model/top." } })
    assert.same(p.model.over.weight:to_list(), other.model.top.weight:to_list())
    -- With its states an optimizer, too, knows the parameters by their new names.
    local function both(name)
      local model = nn.Module()
      model[name] = nn.Linear { in_features = 3, out_features = 1 }
      return { model = model, optimizer = nn.optim.Adam { params = model:named_parameters(), lr = 0.25 } }
    end
    local old, new = both "old", both "new"
    old.model.old.weight:sum():backward()
    old.optimizer:step()
    peri.checkpoint.save(path .. "-names", old)
    assert.error_matches(function() peri.checkpoint.load(path .. "-names", new) end,
      "part 'model': missing: .*it has no 'old.bias'.*; names that have changed go by rename = ")
    new.optimizer.param_groups[1].lr = 1
    peri.checkpoint.load(path .. "-names", new, { rename = { ["model/old."] = "model/new.",
      ["optimizer/state/old."] = "optimizer/state/new." } })
    assert.equal(0.25, new.optimizer.param_groups[1].lr)
    for name, both_of in pairs { old = old, new = new } do
      both_of.optimizer:zero_grad()
      both_of.model[name].weight:sum():backward()
      both_of.optimizer:step()
    end
    assert.same(old.model.old.weight:to_list(), new.model.new.weight:to_list())
    -- A table trains on under another name, its states with it: as it would have under the first.
    local function trained(table_name, steps, load_from)
      local model, prefix = nn.Module(), "embeddings.embedding_bags."
      model.embeddings = peri.EmbeddingBagCollection { fused_params = { optimizer = "adagrad", learning_rate = 0.5 },
        tables = peri.util.map({ "kept", table_name }, function(t, i)
          return peri.EmbeddingBagConfig { name = t, num_embeddings = 3, embedding_dim = 4,
            feature_names = { "f" .. i }, init_fn = peri.embed.constant(i) }
        end) }
      model = peri.DistributedModelParallel { module = model }
      local rename = { ["model/" .. prefix .. "was."] = "model/" .. prefix .. "is.",
        ["model.tables/state/" .. prefix .. "was."] = "model.tables/state/" .. prefix .. "is." }
      if load_from then peri.checkpoint.load(load_from, { model = model }, { rename = rename }) end
      for _ = 1, steps do
        model.module.embeddings(peri.KeyedJaggedTensor { keys = { "f1", "f2" }, values = { 0, 1, 2, 1 },
          lengths = { 2, 2 } }):values():square():sum():backward()
      end
      return model, model:state_dict()[prefix .. table_name .. ".weight"]:gather():to_list()
    end
    peri.checkpoint.save(path .. "-table", { model = (trained("was", 2)) })
    local _, as_was = trained("was", 3)
    local _, as_is = trained("is", 1, path .. "-table")
    assert.same(as_was, as_is)
    -- Those of frozen tables, which have no state, too.
    for _, second in ipairs { "sgd", "none" } do
      local function tables(name, rate)
        local model = nn.Module()
        model[name] = peri.EmbeddingBagCollection { fused_params = { optimizer = "adagrad", learning_rate = rate },
          table_fused_params = { t1 = { optimizer = "none" }, t2 = { optimizer = second } },
          tables = peri.util.map({ "t1", "t2" }, function(t)
            return peri.EmbeddingBagConfig { name = t, num_embeddings = 3, embedding_dim = 4, feature_names = { t } }
          end) }
        return peri.DistributedModelParallel { module = model }
      end
      local there, here = tables("old", 0.5), tables("new", 0.25)
      peri.checkpoint.save(path .. "-frozen-" .. second, { model = there })
      peri.checkpoint.load(path .. "-frozen-" .. second, { model = here }, { rename = { ["model/old."] = "model/new.",
        ["model.tables/state/old."] = "model.tables/state/new." } })
      for i = 1, 2 do
        local name = ("%s.embedding_bags.t%d.weight"):format("%s", i)
        assert.same(there:state_dict()[name:format "old"]:gather():to_list(),
          here:state_dict()[name:format "new"]:gather():to_list())
      end
    end
    local function layers(...)
      local model = nn.Module()
      for i, name in ipairs { ... } do
        model[name] = nn.Linear { in_features = 1, out_features = 1 }
        model[name].weight:detach():fill(i)
      end
      return model
    end
    peri.checkpoint.save(path .. "-begins", { model = layers("l1", "l10", "l2") })
    local moved = layers("m10", "n2", "top") -- layer l1 is the top now, and the longest begin that fits counts
    peri.checkpoint.load(path .. "-begins", { model = moved }, { rename = { ["model/l"] = "model/n",
      ["model/l1"] = "model/m1", ["model/l1."] = "model/top." } })
    assert.same({ 2, 3, 1 }, { moved.m10.weight:item(0), moved.n2.weight:item(0), moved.top.weight:item(0) })
    assert.error_matches(function()
      peri.checkpoint.load(path, other, { rename = { ["model/none."] = "model/top." } })
    end,
      "rename: checkpoint '[^']*' has no tensor whose name begins with 'model/none%.'")
    assert.error_matches(function() peri.checkpoint.load(path, q, { only = { "modle" } }) end,
      "has no tensor whose name begins with 'modle'")
    -- What is asked for has to be there: a layer of another name would keep its first values without a word.
    local before = other.model.top.weight:to_list()
    for _, options in ipairs { { only = { "model" } }, { except = { "model.tables" } } } do
      assert.error_matches(function() peri.checkpoint.load(path, other, options) end,
        "part 'model': the checkpoint has no 'model/top.weight', 'model/top.bias'; .*except = { 'model/top.weight' }")
    end
    assert.same(before, other.model.top.weight:to_list())
    peri.checkpoint.load(path, other, { only = { "model" }, except = { "model/top." } })
    assert.same(before, other.model.top.weight:to_list())
  end)

  it("says of a model which tensors it has, the same under any plan, and the plan", function()
    local lines = "ebc.embedding_bags.a.weight f32 [50, 8]\nebc.embedding_bags.b.weight f32 [37, 16]\n"
      .. "over.bias f32 [1]\nover.weight f32 [1, 24]\nseen f32 [2]\n"
    local sum = require("ffi").new "uint64_t[1]"
    local bytes = peri.Tensor.from_memory(lines, { #lines }, "u8", "cpu")
    peri.ffi.check(peri.ffi.C.peri_checkpoint_checksum(peri.Tensor.ptr(bytes), sum))
    for n = 1, 2 do
      local path, made = ("%s/facts-%d"):format(folder, n), nil
      sim.run(n, function(_, world)
        local p = build(world, n == 1 and plan.table_wise(0) or plan.row_wise())
        peri.checkpoint.save(path, p, { group = world })
        made = plan.to_text(p.model.plan)
      end)
      local c = peri.checkpoint.open(path)
      local facts = c:values().models.model
      c:close()
      assert.equal(bit.tohex(tonumber(sum[0] / 2 ^ 32))
        .. bit.tohex(tonumber(sum[0] % 2 ^ 32)), facts.description)
      assert.equal(made, plan.to_text(plan.from_text("return " .. require("perilune.text").encode(facts.plan, {}, 0))))
    end
  end)

  it("has parts without tensors, which are taken and left out as others are", function()
    local path, p, q = folder .. "/schedule", build(), build()
    train(p, 1, 3)
    peri.checkpoint.save(path, p)
    local before = state(q)
    peri.checkpoint.load(path, q, { only = { "schedule" } })
    assert.same(p.schedule:state_dict(), q.schedule:state_dict())
    assert.not_equal(before, state(q))
    q.schedule = nil
    assert.error_matches(function() peri.checkpoint.load(path, q) end, "leave it out: except = { 'schedule' }")
    peri.checkpoint.load(path, q, { except = { "schedule" } })
    assert.same(p.model.over.weight:to_list(), q.model.over.weight:to_list())
    assert.error_matches(function() peri.checkpoint.load(path, q, { except = { "model", "model.tables", "optimizer",
      "schedule" } }) end, "only and except leave nothing of checkpoint")
  end)

  it("is not made where replicas have drifted apart", function()
    local path = folder .. "/drift"
    sim.run(3, function(rank, world)
      local p = build(world, plan.row_wise())
      if rank == 1 then p.model.module.over.weight:detach():fill(7) end
      local ok, err = pcall(peri.checkpoint.save, path, p, { group = world })
      assert.is_false(ok)
      assert.truthy(tostring(err):find("'model/over.weight' differs between rank 0 and rank 1", 1, true), tostring(err))
      p.model.module.over.weight:detach():fill(0) -- alike again: ranks that leave with different ones would say so
    end)
    assert.equal("", (shell.run(("ls -A %s | grep drift"):format(folder))))
  end)

  it("says that an optimizer of pieces of tables wants names", function()
    sim.run(2, function(rank, world)
      local ebc = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "a", num_embeddings = 50,
        embedding_dim = 8, feature_names = { "fa" } } } }
      local model = peri.DistributedModelParallel { module = ebc, group = world,
        plan = { [""] = { a = plan.row_wise { compute_kernel = "dense" } } } }
      local adam = nn.optim.Adam { params = model:parameters(), lr = 0.1 }
      model(peri.KeyedJaggedTensor { keys = { "fa" }, values = { rank, 40 },
        lengths = { 2 } }):wait():values():sum():backward()
      adam:step()
      local ok, err = pcall(peri.checkpoint.save, folder .. "/unnamed", { model = model, adam = adam },
        { group = world })
      assert.is_false(ok)
      assert.truthy(tostring(err):find("is made of model:named_parameters()", 1, true), tostring(err))
    end)
  end)

  it("has where random numbers are, of each rank", function()
    local layer, want = nn.Linear { in_features = 2, out_features = 2 }, {}
    local path = folder .. "/random"
    for _, ranks in ipairs { 2, 3 } do
      sim.run(ranks, function(rank, world)
        nn.manual_seed(ranks == 2 and 100 + rank or 5)
        if ranks == 2 then
          for _ = 1, rank + 3 do peri.rand { 2 } end
          peri.checkpoint.save(path, { layer = layer }, { group = world })
          want[rank] = peri.rand { 4 }:to_list()
        else
          -- a part: they stay
          peri.checkpoint.load(path, { layer = layer }, { group = world, only = { "layer/weight" } })
          local own = peri.rand { 4 }:to_list()
          nn.manual_seed(5)
          assert.same(peri.rand { 4 }:to_list(), own)
          peri.checkpoint.load(path, { layer = layer }, { group = world })
          assert.same(want[rank] or want[0], peri.rand { 4 }:to_list())
        end
      end)
    end
  end)

  it("has the modes that the umask allows, and says once where folders cannot be synced", function()
    local script = shell.write(folder .. "/modes.lua", [[
      local peri = require "perilune"
      local C, check = peri.ffi.C, peri.ffi.check
      for i = 1, 2 do
        check(C.peri_fault_arm("checkpoint_unsynced", 1))
        peri.checkpoint.save(arg[1] .. i, { model = peri.nn.Linear { in_features = 2, out_features = 2 } })
      end]])
    local out = shell.run(("umask 027; %s run %s %s/modes"):format(shell.perilune, script, folder))
    assert.equal(1, select(2, out:gsub("cannot be synced on this file system", "")), out)
    assert.equal("750\n640\n640\n", (shell.run(("stat -c %%a %s/modes2 %s/modes2/*"):format(folder, folder))))
  end)

  for _, fault in ipairs { "checkpoint_write", "checkpoint_sync" } do
    it(("whose save fails (%s) leaves the one that was there, and nothing beside it"):format(fault), function()
      local path = folder .. "/" .. fault
      sim.run(2, function(rank, world)
        local p = build(world, plan.row_wise())
        peri.checkpoint.save(path, p, { group = world })
        train(p, 1, 1)
        local before = state(p)
        world:barrier():wait()
        if rank == 1 then peri.ffi.check(peri.ffi.C.peri_fault_arm(fault, 1)) end
        local ok = pcall(peri.checkpoint.save, path, p, { group = world, replace = true })
        peri.ffi.check(peri.ffi.C.peri_fault_arm(fault, 0))
        assert.is_false(ok)
        assert.equal(before, state(p))
        local q = build(world, plan.row_wise())
        peri.checkpoint.load(path, q, { group = world })
        assert.equal(state(build(world, plan.row_wise())), state(q))
      end)
      assert.equal("", (shell.run(("ls -A %s | grep saving"):format(folder))))
    end)
  end
end)

describe("values beside tensors", function()
  local values = require "perilune.checkpoint.values"
  it("come back as they were", function()
    for _, x in ipairs { 0.1, 1e300, -0.0, math.huge, -math.huge, "\0\255 x", "\"\\\n\tä",
      { 1, 2, { a = true, b = false } }, { [2] = "x", [1.5] = "y" }, { ["$int"] = 5 }, {}, { a = {} },
      { nil, 2, nil, 4, a = 1, b = 2 } } do -- as many keys as # says, and no list
      assert.same(x, values.decode(values.encode(x, "spec"), "spec"))
    end
    local nan = values.decode(values.encode(0 / 0, "spec"), "spec")
    assert.is_true(nan ~= nan)
    assert.equal(1 / -0.0, 1 / values.decode(values.encode(-0.0, "spec"), "spec"))
    for _, x in ipairs { "9007199254740993LL", "-9223372036854775807LL", "18446744073709551615ULL" } do
      local number = loadstring("return " .. x)()
      assert.equal(x, tostring(values.decode(values.encode(number, "spec"), "spec")))
    end
    for _, json in ipairs { '{"$number":"x"}', '{"$number":5}', '{"$int":"1.5"}', '{"$uint":"-1"}', '{"$bytes":"0"}',
      '{"$bytes":"xx"}', '{"$map":5}', '{"$map":[5]}', '{"$map":[[null,1]]}', '{"$map":[[{"$number":"nan"},1]]}' } do
      assert.error_matches(function() values.decode(json, "spec") end,
        "^spec: '%$%a+' of its values is nothing that a checkpoint has", nil, json)
    end
    assert.error_matches(function() values.encode({ f = print }, "spec") end, "spec: values%.f is a function")
    assert.error_matches(function() values.encode({ { ["a b"] = print } }, "spec") end,
      'spec: values%[1%]%["a b"%] is a function')
  end)
end)
