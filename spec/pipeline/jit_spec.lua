-- Steps of every schedule compile: no aborted traces, no stitches. In processes of their own: LuaJIT gives functions up
-- for good that it often met in the coroutines of a sim world.
local peri = require "perilune"
local shell = require "spec.support.shell"

--- Steps of schedules (names, or { name, the number that it takes }) of models with these options.
local cases = {
  memory = { { "base", "sparse_dist", "sparse_dist_lite", "fused_sparse_dist", "prefetch_sparse_dist" }, "{}" },
  others = { { { "semi_sync", 3 }, "eval_sparse_dist", "eval_fused_sparse_dist", { "semi_sync", 100000 } }, "{}" },
  waiting = { { "wire_first" }, "{}" },
  accumulation = { { { "accumulate", 2 } }, "{ no_replica = true }" },
  ["tables in files"] = { { "base", "sparse_dist", "prefetch_sparse_dist" }, "{ files = 0.5 }" },
  ["two dimensions"] = { { { "prefetch_fused_2d", 2 } }, "{ two_d = 1, sync_interval = 0 }" },
}

local program = [[
  local peri = require "perilune"
  local support = require "spec.support.pipeline"
  local world = peri.dist.init { transport = "self" }
  local model = support.model(world, "cpu", %s)
  local list, k = {}, 0
  for batch in support.batches(0, "cpu", 4) do list[#list + 1] = batch end
  local function batches()
    k = k %% 4 + 1
    return list[k]
  end
  for _, x in ipairs { %s } do
    local schedule = peri.pipeline.schedules[x[1] ]
    if x[2] then schedule = schedule(x[2]) end
    local pipeline = peri.pipeline.Pipeline { model = model, optimizer = schedule.grad and support.optimizer(model) or nil,
      schedule = schedule }
    local function step()
      local loss, logits = pipeline:progress(batches)
      loss:release()
      logits:release()
    end
    for _ = 1, 6 do step() end
    require("spec.support.jit").assert_compiles(schedule.name, step)
    pipeline:close()
  end
  print "compiled"
]]

describe("a step of a schedule", function()
  for title, case in peri.util.ordered(cases) do
    it("is compiled: " .. title, function()
      local names = {}
      for i, x in ipairs(case[1]) do
        names[i] = type(x) == "string" and ("{ %q }"):format(x) or ("{ %q, %d }"):format(x[1], x[2])
      end
      local out, status = shell.luajit(program:format(case[2], table.concat(names, ", ")))
      assert.equals("compiled\n", out)
      assert.equals(0, status)
    end)
  end

  it("is there for every schedule", function()
    local known = { one_f_one_b = true } -- in stages, on several ranks: its operations are exchanges
    for _, case in peri.util.ordered(cases) do
      for _, x in ipairs(case[1]) do known[type(x) == "table" and x[1] or x] = true end
    end
    for _, name in ipairs(peri.pipeline.schedules.names) do assert.is_true(known[name] == true, name) end
  end)
end)
