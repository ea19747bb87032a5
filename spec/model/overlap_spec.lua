-- Exchange and computation overlap, in whatever order the lines of a model stand: what one rank has done while the
-- others hold back.
local ffi = require "ffi"
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local P = require "perilune.ffi"
local nn, plan = peri.nn, peri.plan
local C = P.C

local ROWS, DIM, BATCH = 8, 4, 3

local function collection(name, sharding)
  return peri.EmbeddingBagCollection {
    tables = { peri.EmbeddingBagConfig { name = name, num_embeddings = ROWS, embedding_dim = DIM,
      feature_names = { name } } },
    fused_params = { optimizer = "sgd", learning_rate = 0.5 },
  }, sharding
end

--- A dense part and a collection that meet in a last layer; `order`: which of the lines come first.
local Model = nn.Module:extend "Model"
function Model:init(order)
  self.order = order
  self.ebc = collection "f"
  self.dense = nn.Linear { in_features = 2, out_features = DIM }
  self.final = nn.Linear { in_features = 2 * DIM, out_features = 1 }
end
function Model:forward(kjt, x)
  local dense, sparse
  if self.order == "dense first" then dense = self.dense(x) end
  sparse = self.ebc(kjt):values():reshape(-1, DIM)
  if self.order == "dense last" then dense = self.dense(x) end
  return self.final(nn.functional.cat({ dense, sparse }, 2))
end

local function batch(rank, device, name)
  local values, lengths = {}, {}
  for i = 1, BATCH do values[i], lengths[i] = (rank + 3 * i) % ROWS, 1 end
  return peri.KeyedJaggedTensor { keys = { name or "f" }, values = values, lengths = lengths, device = device }
end
local function features(rank, device) return peri.Tensor.normal({ BATCH, 2 }, 0, 1, 7, rank, "f32", device) end

local function make(world, device, order)
  P.state.device = device
  return peri.DistributedModelParallel { module = Model(order), plan = { ebc = { f = plan.row_wise() } }, group = world,
    device = device }
end

--- Kinds of the operations that this rank has posted in a group, in order, and whether the last is still pending.
local function posts(world)
  local kinds, pending = {}, false
  for line in world:record():gmatch "[^\n]+" do
    kinds[#kinds + 1] = line:match "all_[%w_]+" or line:match "broadcast" or line
    pending = line:match "pending$" ~= nil
  end
  return kinds, pending
end

--- Wait until a condition holds, while other ranks go on.
local function hold(condition)
  local round = 0
  while not condition() do
    assert(round < 100000, "the other rank never came as far")
    P.pause(round)
    round = round + 1
  end
end

local pass_out = ffi.new "peri_backward *[1]"

--- The demonstration's model, as nn.DLRM of its tables; its dense part calls `seen` when it begins.
local function demonstration(seen)
  local model = dofile "examples/models/dlrm.lua" {
    tables = { { name = "a", rows = ROWS, features = { "a" } }, { name = "b", rows = ROWS, features = { "b" } } },
    dense_features = 2, embedding_dim = DIM, dense_layers = { 3 }, over_layers = { 5 },
  }
  local dense_arch = model.model.dense_arch
  local forward = dense_arch.forward
  rawset(dense_arch, "forward", function(self, x)
    seen()
    return forward(self, x)
  end)
  return model
end

describe("the demonstration's model", function()
  for _, device in ipairs { "cpu", "opaque" } do
    it("has its rows on their way while the dense part is computed, on " .. device, function()
      local under_way = 0
      sim.run(2, function(rank, world)
        P.state.device = device
        local function seen()
          local kinds, pending = posts(world)
          assert.equal("all_to_all", kinds[#kinds])
          if pending then under_way = under_way + 1 end
        end
        local sharding = { a = plan.row_wise(), b = plan.table_wise(0) }
        local model = peri.DistributedModelParallel { module = demonstration(seen), group = world, device = device,
          plan = { ["model.sparse_arch.embedding_bag_collection"] = sharding } }
        local a, b = batch(rank, device, "a"), batch(rank, device, "b")
        local input = { dense_features = features(rank, device), sparse_features = peri.KeyedJaggedTensor.concat { a,
          b }, labels = peri.ones({ BATCH }, "f32", device) }
        local loss, logits = model(input)
        assert.same({ BATCH }, logits:shape())
        local seen_before = under_way
        peri.no_grad(function() assert.same(logits:to_list(), model.module:logits(input):to_list()) end)
        under_way = seen_before
        loss:backward()
      end, { device = device })
      assert.is_true(under_way > 0) -- the rank that comes first does not wait there
    end)
  end
end)

describe("forward", function()
  for _, device in ipairs { "cpu", "opaque" } do
    it("does not wait for rows before their numbers are needed, on " .. device, function()
      local dense_done, sums = false, {}
      sim.run(2, function(rank, world)
        P.state.device = device
        local model = peri.DistributedModelParallel { module = Model "dense last",
          plan = { ebc = { f = plan.row_wise() } }, group = world }
        local m, kjt = model.module, batch(rank, device)
        local dist = m.ebc:input_dist(kjt):wait()
        -- its rows set out when rank 0 can do no more without them
        if rank == 1 then hold(function() return dense_done end) end
        local sparse = m.ebc:compute_and_output_dist(dist):values():reshape(-1, DIM)
        local dense = m.dense(features(rank, device))
        if rank == 0 then
          local kinds, pending = posts(world)
          assert.is_true(pending)
          assert.equal("all_to_all", kinds[#kinds])
          assert.is_false(sparse:test())
          dense_done = true
        end
        sums[rank] = m.final(nn.functional.cat({ dense, sparse }, 2)):sum():item()
        assert.is_true(sparse:test())
      end, { device = device, timeout = 20 })
      local alone = {}
      sim.run(2, function(rank, world) -- the same numbers as when nobody holds back
        alone[rank] = make(world, device, "dense first")(batch(rank, device), features(rank, device)):sum():item()
      end, { device = device })
      assert.same(sums, alone)
    end)
  end
end)

for _, device in ipairs { "cpu", "opaque" } do
  for _, order in ipairs { "dense first", "dense last" } do
    describe(("backward on %s, %s:"):format(device, order), function()
      it("the dense part is differentiated while the gradient of the rows is on its way", function()
        local done, gradients = false, {}
        sim.run(2, function(rank, world)
          local model = make(world, device, order)
          local loss = model(batch(rank, device), features(rank, device)):sum()
          if rank == 1 then -- holds back: its gradients set out when rank 0 can do no more without them
            hold(function() return done end)
            loss:backward()
          else
            local before = #posts(world)
            P.check(C.peri_backward_new(ffi.new("peri_tensor *[1]", peri.Tensor.ptr(loss)), nil, 1, pass_out))
            local pass = pass_out[0]
            for _ = 1, 50 do assert.equal(C.PERI_PENDING, P.check(C.peri_backward_step(pass))) end
            local kinds, pending = posts(world)
            assert.is_true(pending) -- the exchange of the gradient is posted, and waits for rank 1,
            assert.equal("all_to_all", kinds[#kinds])
            assert.equal(before + 1, #kinds)
            assert.is_truthy(model.module.dense.weight:grad()) -- while all that is dense is done
            assert.is_truthy(model.module.final.weight:grad())
            done = true
            local round = 0
            while P.check(C.peri_backward_step(pass)) == C.PERI_PENDING do
              P.pause(round)
              round = round + 1
            end
            C.peri_backward_release(pass)
          end
          gradients[rank] = model.module.dense.weight:grad():to_list()
        end, { device = device, timeout = 20 })
        assert.same(gradients[0], gradients[1]) -- the means over the ranks
      end)
    end)
  end
end

--- Three collections that are cut within nodes and called in one order; what they return is used in another.
local Several = nn.Module:extend "Several"
function Several:init(order)
  self.order, self.parts = order, {}
  for i = 1, 3 do self.parts[i] = collection("f" .. i) end
end
function Several:forward(kjts)
  local rows, all = {}, {}
  for i = 1, 3 do rows[i] = self.parts[i](kjts[i]) end
  for _, i in ipairs(self.order) do all[i] = rows[i]:values():square():sum() end
  return all[1] + all[2] + all[3]
end

describe("collections cut within nodes", function()
  it("may be used in any order, whatever the order that they were called in", function()
    local entries, want = {}, nil
    for i = 1, 3 do
      entries["parts." .. i - 1] = { ["f" .. i] = i == 2 and plan.grid_shard { 1 } or plan.table_row_wise(i % 2) }
    end
    for _, order in ipairs { { 1, 2, 3 }, { 1, 3, 2 }, { 2, 1, 3 }, { 2, 3, 1 }, { 3, 1, 2 }, { 3, 2, 1 } } do
      local learned = sim.run(4, function(rank, world)
        nn.manual_seed(5)
        local model = peri.DistributedModelParallel { module = Several(order), group = world, plan = entries }
        for _ = 1, 2 do
          model:backward(model { batch(rank, "cpu", "f1"), batch(rank, "cpu", "f2"), batch(rank, "cpu", "f3") })
        end
        local lists = {}
        for name, tensor in peri.util.ordered(peri.shard.gather_state_dict(model:state_dict())) do
          lists[name] = tensor:to_list()
        end
        return lists
      end, { local_size = 2, timeout = 20 })
      want = want or learned
      assert.same(want, learned)
    end
  end)
end)
