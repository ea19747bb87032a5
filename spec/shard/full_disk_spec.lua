-- A disk that is full, or fails, on one rank: the step that meets it is an error on all ranks, in the words of the one
-- that met it. No update is lost, no group is given up, and when there is room again the same step, and a flush, go on
-- to the bits of tables in memory.
-- deadline: 240 s
-- mpirun: 3
local peri = require "perilune"
local collision = require "spec.support.collision"
local sharded = require "spec.support.sharded"
local tier = require "spec.support.tier"
local worlds = require "spec.support.worlds"
local collective_utils = require "perilune.dist.collective_utils"
local batch, compare = sharded.batch, sharded.assert_same
local BATCH, WIDTH = sharded.BATCH, sharded.WIDTH
local C, check = peri.ffi.C, peri.ffi.check

--- Let the k-th access of a row file fail, on one of the ranks (in a sim world on whichever comes to it).
local function arm(world, r, point)
  local k, rank = r(6), r(world:size()) - 1
  if worlds.mpirun and rank ~= world:rank() then return end
  if not worlds.mpirun and world:rank() > 0 then return end
  check(C.peri_fault_arm(point, k))
end
local function disarm()
  for _, point in ipairs { "row_write", "row_read" } do check(C.peri_fault_arm(point, 0)) end
end

--- f() on all ranks: whether it went well, which is the same on all, as is what they say if not.
local function together(world, f)
  local ok, err = pcall(f)
  local text = ok and "fine" or tostring(err.message or err)
  local function words(said) return said:match "rank %d+: .*" or said end
  for _, said in ipairs(world:all_gather_object(text)) do assert.equal(words(text), words(said)) end
  assert.is_true(world:is_healthy())
  if not ok then assert.truthy(text:find "row file '", text) end
  return ok
end

describe("a disk without room, on one rank", function()
  after_each(disarm)

  for case, kind in ipairs { "table_wise", "row_wise", "column_wise", "mixed" } do
    for _, prefetch in ipairs { false, true } do
      worlds.each(kind .. (prefetch and ", prefetched" or ""), function(world, device)
        local r = collision.random(case * 2 + (prefetch and 1 or 0)) -- the same on all ranks
        local params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 }
        local folder = collective_utils.invoke_on_rank_and_broadcast_result(world, 0, tier.folder)
        local want = sharded.make { kind = kind, world = world, device = device, fused_params = params }
        local got = sharded.make { kind = kind, world = world, device = device, fused_params = params,
          cache = { load_factor = prefetch and 0.6 or 0.35, directory = folder } }
        local failed = 0
        local function step(module, s)
          local dist = module:input_dist(batch(s, world:rank(), device)):wait()
          if prefetch then module:prefetch(dist) end
          local out = module:compute_and_output_dist(dist):values()
          out:backward(peri.Tensor.uniform({ BATCH, WIDTH }, -1, 1, s, world:rank(), "f32", device))
          return out:to_list()
        end
        for s = 1, 14 do
          if s > 3 then arm(world, r, r(3) == 1 and "row_read" or "row_write") end
          local out
          local function once() out = step(got, s) end
          for _ = 1, 4 do
            if together(world, once) then break end
            failed = failed + 1
            disarm()
          end
          assert.same(step(want, s), out)
          if s % 5 == 0 then
            arm(world, r, "row_write")
            for _ = 1, 4 do
              if together(world, function() got:flush() end) then break end
              failed = failed + 1
              disarm()
            end
          end
        end
        local _, weight = next(peri.util.map(got:own_state(), function(x) return x.tensor end))
        for _ = 1, 6 do -- a state that cannot be read is told to all, too
          arm(world, r, "row_read")
          together(world, function() weight:gather() end)
          world:barrier():wait()
          disarm()
        end
        world:barrier():wait()
        assert.is_true(failed > 0)
        pcall(got.flush, got) -- tells of a write of the last step that failed
        got:flush()
        compare(want, got, device)
        got:release()
        collectgarbage() -- what steps that failed have left
        collectgarbage()
        world:barrier():wait()
        local again = kind ~= "mixed" and sharded.make { kind = kind, world = world, device = device,
          fused_params = params, cache = { load_factor = 1, directory = folder } }
        if again then compare(want, again, device) again:release() end -- mixed ones have replicas in memory
        world:barrier():wait()
        if world:rank() == 0 then tier.remove(folder) end
      end, { sizes = kind == "row_wise" and { 1, 2, 3 } or { 2 } })
    end
  end
end)
