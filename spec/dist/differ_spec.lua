-- Ranks that do not make the same calls: said as soon as it is certain, by the numbers that they give to their
-- operations; and a group of some ranks that failed, whose error the script has caught. (mpirun: none: it starts its
-- own)
-- deadline: 120 s
-- takes: 10 s, mostly waits
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
local C = peri.ffi.C

--- What a rank may do that the others do not: with the model, the batch and the rank's world.
local extras = {
  ["a forward in training mode"] = function(model, batch) model(batch):item() end,
  ["a forward without gradients"] = function(model, batch) peri.no_grad(function() model(batch):item() end) end,
  ["a barrier"] = function(_, _, world) world:barrier():wait() end,
  ["a reduction"] = function(_, _, world) world:all_reduce(peri.ones { 3 }):wait() end,
}

--- Three steps of training; after the second one rank @odd calls @extra.
local function train(rank, world, odd, extra)
  local Net = peri.nn.Module:extend "Net"
  function Net:init()
    self.ebc = peri.EmbeddingBagCollection { tables = {
      peri.EmbeddingBagConfig { name = "t", num_embeddings = 100, embedding_dim = 8, feature_names = { "f" } } },
      fused_params = { optimizer = "sgd", learning_rate = 0.1 } }
  end
  function Net:forward(batch) return peri.nn.global_mean(self.ebc(batch):values():sum()) end
  local model = peri.DistributedModelParallel { module = Net(), plan = { ebc = { t = peri.plan.row_wise() } } }
  local batch = peri.KeyedJaggedTensor { keys = { "f" }, values = { 1, 60, 99 }, lengths = { 2, 1 } }
  for step = 1, 3 do
    model(batch):backward()
    if rank == odd and step == 2 then extra(model, batch, world) end
  end
end

describe("a call that one rank alone makes", function()
  setup(function() C.peri_log_level_set(C.PERI_LOG_ERROR) end)
  teardown(function() C.peri_log_level_set(C.PERI_LOG_WARN) end)
  for name, extra in peri.util.ordered(extras) do
    it(name .. ": the ranks disagree, and the first operation in which they do is named", function()
      for n = 2, 3 do
        for odd = 0, n - 1 do
          local _, errors = sim.run(n, function(rank, world) train(rank, world, odd, extra) end, { catch = true })
          for rank = 1, n do
            assert.equal("EMISMATCH", errors[rank] and errors[rank].name, tostring(errors[rank]))
            assert.matches("the ranks disagree: rank %d posted operation %d+: .*, rank %d ", errors[rank].message)
          end
        end
      end
    end)
  end
end)

--- A loop of one's own: a rank does something after the last pass (%s: which, by name), and leaves.
local ending = [[
  local peri = require "perilune"
  local nn = peri.nn
  local function train(what, odd)
    local world = peri.init()
    nn.manual_seed(1)
    local layer = nn.Linear { in_features = 2, out_features = 3 }
    local model = peri.DistributedModelParallel { module = nn.Sequential { layer } }
    local optimizer = nn.optim.Adam { params = model:dense_parameters(), lr = 0.1 }
    for step = 1, 2 do
      optimizer:zero_grad()
      model(peri.full({ 1, 2 }, world:rank() + step)):sum():backward()
      optimizer:step()
    end
    if what == "all" or world:rank() ~= odd then return model end
    if what == "step" then optimizer:step()
    elseif what == "write" then layer.bias:detach():slice(1, 2, 3):fill(7) end
    return model
  end
  %s
  kept = train("%s", 1) -- a global: it is there when the world is left
  %s
]]

describe("ranks that leave with models that differ", function()
  it("are told, those that have another one than the first to leave", function()
    local out = shell.luajit(ending:format([[
      local kinds, list = { "all", "none", "step", "write" }, {}
      for n = 2, 3 do
        for _, what in ipairs(kinds) do
          for odd = 0, n - 1 do
            io.stderr:write(("%s of %d by %d:\n"):format(what, n, odd))
            peri.dist.sim.run(n, function(rank) list[rank + 1] = train(what, odd) end)
          end
        end
      end
      os.exit(0)]], "", ""))
    local told, now = {}
    for line in out:gmatch "[^\n]+" do
      local what, n, odd = line:match "^(%w+) of (%d) by (%d):$"
      if what then
        now = what .. n .. odd
        told[now] = 0
      elseif line:match "rank %d: this rank ends with another model than rank %d: " then told[now] = told[now] + 1
      else error(line) end
    end
    for n = 2, 3 do
      for odd = 0, n - 1 do
        for _, what in ipairs { "all", "none" } do assert.equal(0, told[what .. n .. odd]) end
        for _, what in ipairs { "step", "write" } do
          assert.is_true(told[what .. n .. odd] > 0, what .. n .. odd)
        end
      end
    end
  end)
end)

describe("between processes", function()
  if shell.no_launcher() or not shell.has "mpirun" then
    return it("is tried", function() pending(shell.no_launcher() or "Open MPI was not found") end)
  end
  local folder, clean = shell.temporary()
  teardown(clean)
  local function run(n, text, env)
    return shell.run(("%s run -n %d %s"):format(shell.perilune, n, shell.write(folder .. "/script.lua", text)), env)
  end

  it("a call that one rank alone makes is told before the deadline, on every rank", function()
    local out, status = run(2, [[
      local peri = require "perilune"
      peri.init { timeout = 50 }
      local world, rank = peri.world(), peri.rank()
      local kjt = peri.KeyedJaggedTensor { keys = { "f", "g" }, values = { 1, 2, 3, 4 }, lengths = { 1, 1, 1, 1 } }
      local exchange = peri.dist.KJTAllToAll(world, { 1, 1 })
      if rank == 0 then world:barrier():wait() end
      exchange(kjt):wait():wait()
      world:barrier():wait()]])
    assert.equal(1, status, out)
    for rank = 0, 1 do
      assert.matches(("%%[rank %d%%] [^\n]*the ranks disagree: rank %%d posted operation %%d+: [^\n]*, rank "
        .. "%%d"):format(rank), out)
    end
  end)

  it("a last step that one rank alone makes is told when the ranks leave", function()
    local out, status = run(2, ending:format("", "step", ""))
    assert.equal(0, status, out)
    assert.matches("perilune%[1%] warning: this rank ends with another model than rank 0: ", out)
  end)

  it("ranks that wait for each other in different groups find out before the deadline", function()
    local out, status = run(3, [[
      local peri = require "perilune"
      peri.init { timeout = 50 }
      local world, rank = peri.world(), peri.rank()
      local pair = rank > 0 and world:new_group({ 1, 2 }, "pair")
      world:barrier():wait()
      for _ = 1, 50 do -- as many small ones as it takes: nobody is suspected wrongly
        if pair then pair:all_reduce(peri.ones { 4 }):wait() end
        world:all_reduce(peri.ones { 3 }):wait()
      end
      if rank == 1 then pair:barrier():wait() else world:barrier():wait() end]])
    assert.equal(1, status, out)
    assert.matches("the ranks disagree: rank %d waits for rank %d in operation %d+: barrier, and rank %d for it in "
      .. "another group", out)
  end)

  it("a rank that waits in one group while others compute is no mistake", function()
    local out, status = run(2, [[
      local peri = require "perilune"
      peri.init { timeout = 50 }
      local world, rank = peri.world(), peri.rank()
      local sub = world:new_group({ 0, 1 }, "sub")
      world:barrier():wait()
      local first = sub:all_reduce(peri.ones { 4 }) -- posted, and waited for later
      if rank == 0 then os.execute "sleep 1.5" end
      world:all_reduce(peri.ones { 3 }):wait()
      first:wait()
      print "sound"]])
    assert.equal(0, status, out)
    assert.equal("sound\nsound\n", out)
  end)

  for name, env in peri.util.ordered { ["by messages"] = { PERI_MPI_NEAR = "0" }, ["by copies"] = {} } do
    it("a failed group whose error was caught leaves the world sound, and the job ends well: " .. name, function()
      for size = 10, 1000000, 999990 do
        local out, status = run(3, ([[
          local peri = require "perilune"
          peri.init()
          local world, rank = peri.world(), peri.rank()
          local sub = world:new_group({ 0, 1, 2 }, "sub")
          local recv = rank == 1 and { 1, 1, 2 } or { 1, 1, 1 }
          print(pcall(function() return sub:all_to_all_v(peri.zeros { 3, %d }, { 1, 1, 1 }, recv):wait() end))
          world:barrier():wait()
          assert(world:all_reduce(peri.ones { 1 }):wait():item() == 3)
          print "sound"]]):format(size), env)
        assert.equal(0, status, out)
        assert.equal(3, select(2, out:gsub("sound\n", "")), out)
        assert.matches("rank 1 of 3 in group 'sub', operation 1: all_to_all", out)
        assert.not_matches("perilune: ", out)
      end
    end)
  end
end)
