-- A state that is taken between two steps of a pipeline is that of the plain loop after as many batches, or an error
-- that says when to take it; then it is: after stop() and the steps that are left, or after close(), or, for who waits
-- as a Saver does, some steps later. So are flushes. Ahead are rows of files, and lookups.
-- deadline: 240 s
-- mpirun: 2
local ffi = require "ffi"
local peri = require "perilune"
local collision = require "spec.support.collision"
local collective_utils = require "perilune.dist.collective_utils"
local moments = require "spec.support.collision_moments"
local tier = require "spec.support.tier"
local worlds = require "spec.support.worlds"
local plan, schedules = peri.plan, peri.pipeline.schedules

local STEPS = 12
local AHEAD = "ahead of training"

--- whole: all rows are on the last rank, and the others have none.
local function model_of(world, kind, sequence, directory, whole)
  local options = directory ~= nil and { compute_kernel = "fused_uvm_caching",
    cache_params = { load_factor = 1, directory = directory or nil } } or {}
  local entry = whole and plan.table_wise(world:size() - 1, options) or plan.row_wise(options)
  return peri.DistributedModelParallel { group = world, plan = plan.ShardingPlan { mc = { t = entry } },
    module = moments.Model(kind, sequence, { optimizer = "adagrad", learning_rate = 0.5 }) }
end

--- A state_dict as texts: name -> the bytes of all numbers, without those that a stale schedule may have otherwise.
local function texts_of(state, maps_only)
  local texts = {}
  for name, t in pairs(state) do
    if not maps_only or name:find("_managed_collision_modules", 1, true) then
      local memory = t:contiguous():read()
      texts[name] = ffi.string(memory, ffi.sizeof(memory))
    end
  end
  return texts
end

local function attempt(f)
  local ok, result = pcall(f)
  if ok then return true, result end
  assert.truthy(tostring(result):find(AHEAD, 1, true), tostring(result))
  return false
end

local cases = {
  { "base" }, { "sparse_dist" }, { "sparse_dist_lite" }, { "fused_sparse_dist" },
  { "prefetch_sparse_dist", ahead = "files" }, { "wire_first", ahead = "all" },
  { "semi_sync", ahead = "all", stale = true }, { "prefetch_sparse_dist", ahead = "files", whole = true },
}

describe("a state that is taken in a pipeline", function()
  setup(function() peri.ffi.C.peri_log_level_set(peri.ffi.C.PERI_LOG_ERROR) end)
  teardown(function() peri.ffi.C.peri_log_level_set(peri.ffi.C.PERI_LOG_WARN) end)

  for number, case in ipairs(cases) do
    for _, stored in ipairs(case.whole and { true } or { false, true }) do
      local kind = moments.kinds[(number + (stored and 1 or 0)) % #moments.kinds + 1]
      worlds.each(("of %s, tables in %s%s, %s"):format(case[1], stored and "files" or "memory",
        case.whole and " of one rank" or "", kind), function(world)
        local r, sequence = collision.random(number * 2 + (stored and 1 or 0)), number % 2 == 0
        local folder = stored and collective_utils.invoke_on_rank_and_broadcast_result(world, 0, tier.folder)
        local function batch(s) return s <= STEPS and moments.batch(number, s, world:rank(), world:size()) or nil end
        local plain, states = model_of(world, kind, sequence), {}
        for s = 1, STEPS do
          plain(batch(s)):backward()
          states[s] = texts_of(plain:state_dict():gather(), case.stale)
        end
        local model = model_of(world, kind, sequence, folder or nil, case.whole)
        local schedule = case.stale and schedules.semi_sync(2) or schedules[case[1]]
        local pipeline = peri.pipeline.Pipeline { model = model, optimizer = false, schedule = schedule }
        local loaded, trained, refusals, taken, waiting = 0, 0, 0, 0, false
        local function next_batch()
          loaded = loaded + 1
          return batch(loaded)
        end
        local function look(must)
          local ok, state = attempt(function() return model:state_dict():gather() end)
          if must then assert.is_true(ok) end
          if stored and r(3) == 1 then assert.equal(ok, (attempt(function() model:flush() end))) end
          refusals, taken = refusals + (ok and 0 or 1), taken + (ok and 1 or 0)
          if not ok then return end
          assert.same(states[trained], texts_of(state, case.stale))
          if r(4) > 1 then return end
          local copy = model_of(world, kind, sequence)
          copy:load_state_dict(state)
          assert.same(moments.answers(model), moments.answers(copy))
        end
        while trained < STEPS do
          local drain = trained > 2 and r(6) == 1
          if drain then pipeline:stop() end
          repeat
            local loss = pipeline:progress(next_batch)
            trained = trained + (loss and 1 or 0)
          until not loss or not drain
          look(drain or trained == STEPS and not pipeline.next)
          waiting = (waiting or r(4) == 1) and (waiting or 0) + 1
          if waiting and not model:_unfinished() then
            waiting = false
            look(true)
          end
          assert.is_true(not waiting or waiting < 5)
          if drain then loaded = trained end
        end
        while pipeline:progress(next_batch) do trained = trained + 1 end
        look(true)
        assert.equal(STEPS, trained)
        assert.equal(case.ahead == "all" or case.ahead == "files" and stored, refusals > 0)
        assert.is_true(taken > 0)
        pipeline:detach()
        loaded = 0 -- batches that are given up leave what goes together
        pipeline = peri.pipeline.Pipeline { model = model, optimizer = false, schedule = schedule }
        for _ = 1, 4 do pipeline:progress(next_batch) end
        pipeline:close()
        local state = model:state_dict():gather()
        local copy = model_of(world, kind, sequence)
        copy:load_state_dict(state)
        assert.same(moments.answers(model), moments.answers(copy))
        for _, s in ipairs(model.sharded) do s:release() end
        world:barrier():wait()
        if folder and world:rank() == 0 then tier.remove(folder) end
        -- beside mpirun, which has two ranks: one and two in turn
      end, { sizes = { worlds.mpirun and 2 or (number + (stored and 1 or 0)) % 2 + 1 }, devices = { "cpu" } })
    end
  end
end)
