-- Memory that runs out in a sharded module, from its making to an update: whatever request is refused, on whichever
-- rank, both ranks have an error that says so (not a deadline's), nothing is left, and the process goes on. Some
-- requests of each case are drawn; PERI_TEST_REQUESTS=all takes each in its turn. (mpirun: none: a rank of another
-- process cannot count its neighbour's requests)
-- deadline: 240 s
local peri = require "perilune"
local sharded = require "spec.support.sharded"
local sim = require "perilune.dist.sim"
local support = require "spec.support.tbe"
local codec = require "perilune.dist.codec"
local C, embed, plan = peri.ffi.C, peri.embed, peri.plan

local MOST = os.getenv "PERI_TEST_REQUESTS" == "all" and math.huge or 12 -- requests of a case, by rank and kind

local function backward(out, rank)
  out:backward(peri.Tensor.uniform(out:shape(), -1, 1, 1, rank, "f32", out:device()))
end

--- A step of a collection of spec/support/sharded.lua.
local function pooled(args)
  return function(rank, world, device)
    local own = peri.util.copy(args)
    own.world, own.device = world, device
    local module = sharded.make(own)
    local ids = module:input_dist(sharded.batch(1, rank, device)):wait()
    if args.cache then module:prefetch(ids) end
    local out = module:compute_and_output_dist(ids):values()
    backward(out, rank)
    if args.cache then module:flush() end
    module:release()
    return out:to_list()
  end
end

local function batch(ids, device)
  return peri.KeyedJaggedTensor { keys = { "f" }, values = peri.tensor(ids, "i64", device), lengths = { #ids },
    device = device }
end

local cases = {
  { "tables cut in several ways", pooled { kind = "mixed" } },
  { "columns, sent by codecs", pooled { kind = "column_wise",
    qcomm_codecs_registry = codec.get_qcomm_codecs_registry { forward = "FP16", backward = "BF16" },
    fused_params = { optimizer = "adam", learning_rate = 0.1 } } },
  { "rows in files, prefetched", pooled { kind = "row_wise", cache = { load_factor = 0.6 } }, hints = true },
  { "sequences", function(rank, world, device)
    local tables = { peri.EmbeddingConfig { name = "t", num_embeddings = 16, embedding_dim = 4,
      feature_names = { "f" } } }
    local module = peri.shard.ShardedEmbeddingCollection { tables = tables, plan = { t = plan.row_wise() }, seed = 1,
      group = world, device = device, fused_params = { optimizer = "sgd", learning_rate = 0.5 } }
    backward(module:forward(batch({ 1, 15, 3, rank }, device)).f:values(), rank)
    module:release()
  end },
  { "raw ids", function(rank, world, device)
    local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 16, embedding_dim = 4,
      feature_names = { "f" } } }
    local map = embed.MCHManagedCollisionModule { zch_size = 16, buckets = 4, eviction_interval = 1,
      eviction_policy = embed.LFU_EvictionPolicy {} }
    local module = peri.shard.ShardedManagedCollisionEmbeddingBagCollection { tables = tables,
      plan = { t = plan.row_wise() }, seed = 1, group = world, device = device,
      fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.5 },
      managed_collision_collection = embed.ManagedCollisionCollection { managed_collision_modules = { t = map },
        embedding_configs = tables } }
    for step = 1, 2 do
      local out = peri.util.resolve((module(batch({ 7e9 + step, 5, rank, 7e9 }, device))))
      backward(out:values(), rank)
    end
    module:release()
  end },
}

local function objects()
  collectgarbage()
  collectgarbage()
  return tonumber(C.peri_mem_objects())
end

--- Run a case on 2 ranks; the k-th request of kind `point` gets nothing (0: each gets what it wants). Errors by
--- rank + 1, the requests, and what the ranks got.
local function run(case, point, k)
  local passed
  local results, errors = sim.run(2, function(rank, world)
    world:barrier():wait()
    if rank == 0 then peri.ffi.check(C.peri_fault_arm(point, k)) end
    world:barrier():wait()
    local got = case[2](rank, world, "cpu")
    world:barrier():wait()
    passed = tonumber(C.peri_fault_passed(point))
    return got
  end, { device = "cpu", catch = true })
  C.peri_fault_arm(point, 0)
  return errors, passed, results
end

--- Both ranks have an error that tells what happened, and none of them had to wait for a deadline.
local function check_told(errors, what)
  for rank = 0, 1 do
    local err = errors[rank + 1]
    local text = ("%s, rank %d: %s"):format(what, rank, tostring(err))
    assert.is_truthy(err and err.name, text)
    assert.is_true(err.name == "ENOMEM" or err.name == "EPEER" or err.name == "EABORTED", text)
    assert.is_truthy(err.message:match "no memory", text)
  end
end

describe("out of memory in a sharded module:", function()
  setup(function() C.peri_log_level_set(C.PERI_LOG_ERROR) end)
  teardown(function() C.peri_log_level_set(C.PERI_LOG_WARN) end)

  for number, case in ipairs(cases) do
    for _, point in ipairs { "alloc", "device_alloc" } do
      it(("%s, %s"):format(case[1], point), function()
        local draw = support.generator(number)
        assert.same({}, (run(case, point, 0))) -- what is made once in a process
        local before = objects()
        local errors, passed, want = run(case, point, 0)
        assert.same({}, errors)
        local each = math.max(1, math.floor(passed / MOST))
        for first = 1, passed, each do
          local k = math.min(passed, first + draw(each))
          local _, got
          errors, _, got = run(case, point, k)
          -- A prefetch that has no memory is left to the lookup, which then reads the rows itself.
          if case.hints and not errors[1] and not errors[2] then assert.same(want, got)
          else check_told(errors, ("request %d of %d"):format(k, passed)) end
        end
        assert.same({}, (run(case, point, 0)))
        assert.equal(before, objects())
      end)
    end
  end
end)
