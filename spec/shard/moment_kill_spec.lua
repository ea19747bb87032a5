-- A process that is killed at any moment, in the middle of a flush too, leaves files that go on with the map of exactly
-- one flush, or that are refused.
-- deadline: 120 s
-- mpirun: none
local peri = require "perilune"
local moments = require "spec.support.collision_moments"
local shell = require "spec.support.shell"
local sim = require "perilune.dist.sim"
local tier = require "spec.support.tier"
local victim = require "spec.support.moment_victim"

local C = peri.ffi.C

--- Start a victim, wait for its third flush, and kill it `delay` seconds later.
local function strike(kind, folder, delay)
  local words = { "env" }
  for name, value in pairs(shell.luajit_env()) do
    if value ~= "" then words[#words + 1] = ("%s='%s'"):format(name, value) end
  end
  local ready = folder .. "/ready"
  os.execute(([[rm -rf %s/* ; %s luajit spec/support/moment_victim.lua %s %s >%s/log 2>&1 & child=$!
    for i in $(seq 1500); do test -s %s && break; sleep 0.02; done
    sleep %.3f; kill -9 $(cat %s); wait $child 2>/dev/null]]):format(folder, table.concat(words, " "), folder, kind, folder, ready, delay,
    ready))
  assert.is_true(os.execute("test -s " .. ready) == 0, shell.read(folder .. "/log"))
end

--- The maps of a model that trained so many steps, and what it answers.
local function after(world, kind, steps)
  local model, maps = victim.model(world, kind), {}
  for s = 1, steps do victim.step(model, s) end
  for name, t in pairs(model:state_dict():gather()) do
    if name:find("_managed_collision_modules", 1, true) then maps[name] = t end
  end
  return maps, moments.answers(model)
end

describe("a kill at any moment", function()
  setup(function() C.peri_log_level_set(C.PERI_LOG_ERROR) end)
  teardown(function() C.peri_log_level_set(C.PERI_LOG_WARN) end)

  for k, kind in ipairs { "lru", "lfu", "ttl", "lru", "lfu", "mine" } do
    it(("leaves the map's own rows, or what is refused: %d, %s"):format(k, kind), function()
      local folder = tier.folder()
      strike(kind, folder, k * 0.017)
      sim.run(2, function(_, world)
        local ok, model = pcall(victim.model, world, kind, folder)
        if not ok then
          assert.truthy(model.message:find "must be of the same flush" or model.message:find "was not flushed",
            model.message)
          return
        end
        local shard = model.sharded[1]:local_shards()[1]
        local flush = shard.file().flush
        assert.is_true(flush >= 3)
        for _, other in ipairs { flush - 1, flush + 1 } do
          local refused, err = pcall(model.load_state_dict, model, after(world, kind, other), false)
          assert.is_false(refused)
          assert.truthy(tostring(err):find(("since flush %d"):format(flush), 1, true), tostring(err))
        end
        local maps, answers = after(world, kind, flush)
        model:load_state_dict(maps, false)
        assert.same(answers, moments.answers(model))
        model.sharded[1]:release()
      end)
      tier.remove(folder)
    end)
  end
end)
