-- A model file that follows a run answers, after each save, with the bits of a file that is exported from the trainer
-- at that moment: all dtypes of tables, all ways to cut them, over increments, full checkpoints and compacted chains;
-- what is damaged changes nothing; and while the trainer is resharded, starts again on other ranks, and removes saves.
-- takes: 4 s
local peri = require "perilune"
local bits_of = require "spec.support.bits"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
local small = require "spec.support.small_net"
local nn, plan = peri.nn, peri.plan

local folder, clean = shell.temporary()
teardown(clean)

local Net = small.Net:extend "Net"
function Net:init(options)
  small.Net.init(self, options)
  self.last = nn.Parameter(peri.Tensor.uniform({ 40, 3 }, -1, 1, 5)) -- its transpose is what a file has
  self.shift = nn.Parameter(peri.Tensor.uniform({ 3 }, -1, 1, 6))
end
function Net:forward(kjt) return self.over(self.ebc(kjt):values()):matmul(self.last) + self.shift end

local ROWS = 500
local function build(world, entry)
  return small.build(world, entry, { rows = ROWS, outputs = 40, exact = false }, Net)
end

local function train(model, optimizer, from, last)
  for i = from, last do
    peri.scope(function()
      optimizer:zero_grad()
      model(small.batch(i, ROWS)):mean():backward()
      optimizer:step()
    end)
  end
end

local function held_out()
  local values, lengths = {}, {}
  for i = 0, 499 do values[#values + 1], lengths[#lengths + 1] = i, 1 end
  for i = 0, 499 do values[#values + 1], lengths[#lengths + 1] = i % 37, 1 end
  return { ids = peri.KeyedJaggedTensor { keys = { "fa", "fb" }, values = values, lengths = lengths } }
end
local function call(model, batch) return model(batch.ids) end

local function bits(file, keep)
  local answers = bits_of(file:predict(held_out()).logits)
  if not keep then file:release() end
  return answers
end

-- By the dtype of tables.
local matrices = { f16 = "bf16_products", int8 = "bf16", int4 = "int8_products", fp8 = "int8" }

--- A run whose saves follow each other; each(rank, step, export) comes after each: export(tables) is the path of a file
--- of that moment.
local function run(of, entry, ranks, steps, full_every, each)
  sim.run(ranks, function(rank, world)
    local model = build(ranks > 1 and world, entry)
    local optimizer = nn.optim.SGD { params = model:parameters(), lr = 0.05 }
    local saver = peri.checkpoint.Saver { folder = of, parts = { model = model }, every = 1, full_every = full_every,
      keep = 100, group = world }
    local function export(tables)
      local path = ("%s/%s.peri"):format(folder, tables)
      model:export(path, { batches = { held_out() }, call = call, tables = tables, allowed_difference = 10,
        dense = matrices[tables] or "f32" })
      return path
    end
    for step = 1, steps do
      each(rank, step - 1, export)
      train(model, optimizer, step, step)
      saver:step(step)
    end
    each(rank, steps, export)
    saver:close()
  end)
end

local function copy_of(path, name)
  local to = folder .. "/" .. name
  shell.run(("cp %s %s"):format(path, to))
  return to
end

describe("a model file that follows", function()
  local cuts = { alone = { 1 }, row_wise = { 2, function() return plan.row_wise() end },
    column_wise = { 2, function() return plan.column_wise { ranks = { 0, 1 } } end } }
  for cut, how in peri.util.ordered(cuts) do
    it(("a run whose tables are %s has its bits, in all dtypes"):format(cut), function()
      local of, followers, seen = folder .. "/" .. cut, {}, 0
      run(of, how[2] and how[2](), how[1], 5, 4, function(rank, step, export)
        for _, dtype in ipairs { "f32", "f16", "bf16", "int8", "int4", "fp8" } do
          local path = export(dtype)
          if rank == 0 and step == 0 then
            followers[dtype] = peri.export.follow(copy_of(path, cut .. dtype .. ".peri"), of)
            assert.equal(bits(peri.export.open(path)), bits(followers[dtype]:model()))
            assert.is_nil(followers[dtype]:poll())
          elseif rank == 0 and step ~= 2 then -- two increments at once at step 3
            local model, why = followers[dtype]:poll()
            assert.is_truthy(model, why)
            assert.equal(step, model:describe().step)
            assert.equal(bits(peri.export.open(path)), bits(model), ("%s, step %d"):format(dtype, step))
            seen = seen + 1
          end
        end
      end)
      assert.equal(24, seen)
    end)
  end

  it("takes parts of parameters: of the gates of a GRU, projections of an attention, experts, slices", function()
    local Parts = nn.Module:extend "Parts"
    function Parts:init()
      self.gru = nn.GRU { input_size = 8, hidden_size = 4, num_layers = 2, bidirectional = true, batch_first = true }
      self.attention = nn.MultiheadAttention { embed_dim = 8, num_heads = 2, batch_first = true }
      self.cross = nn.LowRankMixtureCrossNet { in_features = 8, num_layers = 2, num_experts = 3, low_rank = 2 }
      self.list = nn.Parameter(peri.Tensor.uniform({ 5, 7, 8 }, -1, 1, 5))
    end
    function Parts:forward(b)
      local x = b.x:reshape(-1, 3, 8)
      local y = self.attention(x, x, x) + self.gru(x)
      local z = self.cross(y:select(2, 1)) + self.list:select(1, 3):select(1, 5)
      return nn.functional.linear(z, self.list:select(1, 2), self.list:reshape(-1):slice(1, 13, 20))
    end
    local of, x = folder .. "/parts", peri.Tensor.uniform({ 30, 24 }, -1, 1, 8)
    local function answers(file)
      local buffer, n = file:predict({ x = x }).logits:read()
      return require("ffi").string(buffer, 4 * n)
    end
    nn.manual_seed(7)
    local model, followers, seen = Parts(), {}, {}
    local optimizer = nn.optim.SGD { params = model:parameters(), lr = 0.2 }
    local saver = peri.checkpoint.Saver { folder = of, parts = { model = model }, every = 1 }
    local function export(dense)
      local path = ("%s/parts-%s.peri"):format(folder, dense)
      local report = model:export(path, { batches = { { x = x } }, dense = dense, allowed_difference = 10 })
      assert.not_matches("follow", tostring(report))
      return path
    end
    for step = 0, 2 do
      if step > 0 then
        peri.scope(function()
          optimizer:zero_grad()
          nn.functional.square(model { x = x }):mean():backward()
          optimizer:step()
        end)
        saver:step(step)
      end
      for _, dense in ipairs { "f32", "bf16", "int8_products" } do
        local path = export(dense)
        if step == 0 then followers[dense] = peri.export.follow(copy_of(path, dense .. ".parts.peri"), of)
        else assert(followers[dense]:poll()) end
        local now = answers(peri.export.open(path))
        assert.is_true(now == answers(followers[dense]:model()), ("%s, step %d"):format(dense, step))
        assert.is_nil(seen[now])
        seen[now] = true
      end
    end
    saver:close()
  end)

  it("is not changed where somebody has it, and passes over what is damaged", function()
    local of, follower, want = folder .. "/damage", nil, {}
    run(of, nil, 1, 6, 5, function(_, step, export)
      local path = export "f32"
      follower = follower or peri.export.follow(copy_of(path, "damage.peri"), of)
      want[step] = bits(peri.export.open(path))
      if step == 1 then
        local first = assert(follower:poll())
        assert.equal(want[1], bits(first, true))
        want.first = first
      elseif step == 2 then
        local second = assert(follower:poll())
        assert.equal(want[1], bits(want.first, true)) -- still
        assert.is_true(want[1] ~= want[2])
        want.second = second
      elseif step == 3 then
        assert.is_nil((follower:poll())) -- both are in use
        want.first:release()
        shell.run(("cd %s/save-000003-step-3 && f=$(ls *.safetensors | head -1) && printf x | dd of=$f bs=1 "
          .. "conv=notrunc seek=$(($(stat -c %%s $f) - 1))"):format(of))
        local model, why = follower:poll()
        assert.is_nil(model)
        assert.is_truthy(why:find("save-000003-step-3", 1, true), why)
        assert.equal(want[2], bits(follower:model()))
        assert.is_nil((select(2, follower:poll())))
      elseif step == 4 then
        assert.is_truthy(select(2, follower:poll())) -- an increment of the damaged one
      elseif step == 6 then -- step 6 is full
        want.second:release()
        local model, why = follower:poll()
        assert.is_truthy(model, why)
        assert.equal(want[6], bits(model))
      end
    end)
  end)

  it("reads nothing that it has had already", function()
    local of, follower = folder .. "/once", nil
    run(of, nil, 1, 4, 1e9, function(_, step, export)
      local path = export "int8"
      follower = follower or peri.export.follow(copy_of(path, "once.peri"), of)
      if step == 0 then return end
      local model, why = follower:poll()
      assert.is_truthy(model, why)
      assert.equal(step, model:describe().step)
      assert.equal(bits(peri.export.open(path)), bits(model))
      if step == 1 then -- both models of the follower have the full one when there was nothing else to do
        assert.is_nil(follower:poll())
        shell.run(("cd %s/save-000001-step-1 && f=$(ls *.safetensors | head -1) && printf xxxx | dd of=$f bs=1 "
          .. "conv=notrunc seek=$(($(stat -c %%s $f) - 4))"):format(of))
      end
    end)
  end)

  it("a compacted chain, and says what does not fit", function()
    local of, follower = folder .. "/compacted", nil
    run(of, nil, 1, 3, 1e9, function(_, step, export)
      local path = export "int8"
      follower = follower or peri.export.follow(copy_of(path, "compacted.peri"), of)
      if step == 2 then
        assert(follower:poll()):release()
        local out, status = shell.run(("%s checkpoint compact %s/save-000002-step-2"):format(shell.perilune, of))
        assert.equal(0, status, out)
      elseif step == 3 then
        local model, why = follower:poll()
        assert.is_truthy(model, why)
        assert.equal(bits(peri.export.open(path)), bits(model))
        local other = peri.export.follow(path, of, { saved = "other" })
        local none, words = other:poll()
        assert.is_nil(none)
        assert.is_truthy(words:find("has no tensor 'other/", 1, true), words)
        assert.error_matches(function() peri.export.follow(path, "") end, "the folder has no name")
      end
    end)
  end)
end)

-- -- a trainer that changes while it is followed ----------------------------------------------------------------------

local Maps = nn.Module:extend "Maps"
function Maps:init()
  local function config(name, rows)
    return peri.EmbeddingBagConfig { name = name, num_embeddings = rows, embedding_dim = 8,
      feature_names = { "f" .. name } }
  end
  local params = { optimizer = "rowwise_adagrad", learning_rate = 0.1, exact = true }
  self.ebc = peri.EmbeddingBagCollection { seed = 5, fused_params = params, tables = { config("a", 50),
    config("b", 37) } }
  local raw = { config("lfu", 12), config("ttl", 12) } -- fewer rows than ids: many are evicted
  self.mc = peri.ManagedCollisionEmbeddingBagCollection {
    embedding_bag_collection = peri.EmbeddingBagCollection { seed = 6, tables = raw, fused_params = params },
    managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = raw,
      managed_collision_modules = {
      lfu = peri.MCHManagedCollisionModule { zch_size = 12, eviction_interval = 2, buckets = 6,
        eviction_policy = peri.embed.LFU_EvictionPolicy {} },
      ttl = peri.HashZchManagedCollisionModule { zch_size = 12, total_num_buckets = 6, max_probe = 2,
        disable_fallback = true, eviction_policy_name = "SINGLE_TTL_EVICTION",
        eviction_config = { features = { "fttl" }, single_ttl = 1 } } } } }
  self.over = nn.Linear { in_features = 32, out_features = 2 }
end
function Maps:forward(b)
  local raw = self.mc(b.raw)
  return self.over(nn.functional.cat({ self.ebc(b.ids):values(), raw:values() }, 2))
end

--- Samples `from` to `from` + n - 1: an id of each feature, three raw ones.
local function mapped(from, n)
  local ids, ones, raw, threes = {}, {}, {}, {}
  for t, rows in ipairs { 50, 37 } do
    for i = from, from + n - 1 do
      ids[#ids + 1], ones[#ones + 1], threes[#threes + 1] = i * 7 * t % rows, 1, 3
      for k = 1, 3 do raw[#raw + 1] = (i * 5 + k * 13 * t) % 61 * 1000003 end
    end
  end
  return { ids = peri.KeyedJaggedTensor { keys = { "fa", "fb" }, values = ids, lengths = ones },
    raw = peri.KeyedJaggedTensor { keys = { "flfu", "fttl" }, values = raw, lengths = threes } }
end

local function in_file()
  return plan.row_wise { compute_kernel = "fused_uvm_caching", cache_params = plan.CacheParams { load_factor = 0.8 } }
end
local whole, rows, last = function() return plan.table_wise(0) end, function() return plan.row_wise() end,
  function(ranks) return plan.table_wise(ranks - 1) end
local function plan_of(ranks, a, b, lfu, ttl)
  return { ebc = { a = a(ranks), b = b(ranks) }, mc = { lfu = lfu(ranks), ttl = ttl(ranks) } }
end

-- The trainer starts again with each of these, on so many ranks, and is resharded meanwhile.
local lives = {
  { ranks = 2, keep = 2, full_every = 3, from = { rows, whole, rows, last }, to = { last, in_file, whole, rows } },
  { ranks = 3, keep = 1, full_every = 100, from = { in_file, rows, last, rows }, to = { rows, last, rows, whole } },
  { ranks = 1, keep = 9, full_every = 2, from = { whole, whole, whole, whole }, name = "other" },
  { ranks = 2, keep = 3, full_every = 4, from = { last, in_file, rows, whole }, to = { in_file, in_file, last, rows } },
}

describe("a model file", function()
  it("follows a run that is resharded and started again on other ranks, with evicted ids, rows in files, compacted and "
    .. "removed saves, and modules by another name", function()
    local of, step, follower, seen, kept = folder .. "/lives", 0, nil, {}, nil
    shell.run("mkdir " .. of)
    local function answers(file)
      local buffer, n = file:predict(mapped(1000, 11)).logits:read()
      file:release()
      return require("ffi").string(buffer, 4 * n)
    end
    for number, life in ipairs(lives) do
      local from = kept
      sim.run(life.ranks, function(rank, world)
        nn.manual_seed(3)
        local model = peri.DistributedModelParallel { module = Maps(), group = world,
          plan = plan_of(life.ranks, unpack(life.from)) }
        local optimizer = nn.optim.Adam { params = model:named_parameters(), lr = 0.02 }
        local saver = peri.checkpoint.Saver { folder = of, group = world, every = 1, keep = life.keep,
          full_every = life.full_every, parts = { [life.name or "model"] = model, optimizer = optimizer },
          resume = life.name and "no" or from or "auto" }
        local at = saver:resume() or step
        local path = folder .. "/lives.peri"
        local function export()
          model:export(path, { batches = { mapped(1000, 11) }, call = function(m, b) return m(b) end,
            allowed_difference = 10, step = at })
        end
        if number == 1 then
          export()
          if rank == 0 then follower = peri.export.follow(copy_of(path, "served.peri"), of) end
        end
        for save = 1, 4 do
          if save == 2 and life.to then model:reshard(plan_of(life.ranks, unpack(life.to))) end
          at = at + 1
          peri.scope(function()
            optimizer:zero_grad()
            model(mapped(at * 6 + rank * 3, 3)):mean():backward()
            optimizer:step()
          end)
          saver:step(at)
          export()
          if rank == 0 then
            local newest = peri.checkpoint.Saver.list(of)[1].path
            local c = peri.checkpoint.open(newest)
            if save == 3 and c:parent() then c:compact(newest, true) end
            c:close()
            local before = answers(follower:model())
            local got, why = follower:poll()
            if life.name then
              assert.is_nil(got)
              assert.is_truthy(not why or why:find("has no tensor 'model/", 1, true), why)
              assert.equal(before, answers(follower:model()))
            else
              assert.is_truthy(got, why)
              assert.equal(at, got:describe().step)
              local now = answers(got)
              assert.equal(answers(peri.export.open(path)), now, ("life %d, step %d"):format(number, at))
              seen[#seen + 1], seen[now], kept = now, true, newest
            end
          end
        end
        step = at
        saver:close()
      end)
    end
    assert.equal(12, #seen)
    for i = 2, #seen do assert.is_true(seen[i] ~= seen[i - 1]) end
  end)
end)
