-- What goes wrong between ranks of a sim world: every case ends in an error that names ranks and operations, on every
-- rank. The same cases between processes: spec/dist/mpi_fault_spec.lua. (mpirun: none)
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local P = require "perilune.ffi"
local shell = require "spec.support.shell"
local C = P.C

--- Errors by rank + 1 of a run that may fail.
local function errors_of(n, body, options)
  options = options or {}
  options.catch = true
  local _, errors = sim.run(n, body, options)
  return errors
end

local function assert_error(err, code, ...)
  assert.is_truthy(err, "no error where " .. code .. " was expected")
  assert.equal(code, err.name, tostring(err))
  for _, pattern in ipairs { ... } do assert.matches(pattern, err.message) end
end

for _, device in ipairs { "cpu", "opaque" } do
  describe("ranks that disagree, on " .. device, function()
    setup(function() C.peri_log_level_set(C.PERI_LOG_ERROR) end)
    teardown(function() C.peri_log_level_set(C.PERI_LOG_WARN) end)
    local function ones(n, dtype) return peri.ones({ n }, dtype or "f32", device) end
    local function case(title, odd, text)
      it(title, function()
        local errors = errors_of(3, function(rank, world)
          local work = rank == 1 and odd(world) or rank ~= 1 and world:all_reduce(ones(3))
          work:wait()
        end)
        for i = 1, 3 do
          assert_error(errors[i], "EMISMATCH", "the ranks disagree", "rank 1 posted operation 1: " .. text,
            "rank [02] posted operation 1")
        end
      end)
    end
    case("about the operation", function(w) return w:barrier() end, "barrier")
    case("about the dtype", function(w) return w:all_reduce(ones(3, "f64")) end, "all_reduce sum f64 %[3%]")
    case("about the size", function(w) return w:all_reduce(ones(4)) end, "all_reduce sum f32 %[4%]")
    case("about the operator", function(w) return w:all_reduce(ones(3), "max") end, "all_reduce max f32 %[3%]")
    case("about the tag", function(w) return w:all_reduce(ones(3), "sum", 255) end, "all_reduce sum f32 %[3%] tag ff")

    it("about the root", function()
      local errors = errors_of(2, function(rank, world) world:broadcast(ones(3), rank):wait() end)
      for i = 1, 2 do assert_error(errors[i], "EMISMATCH", "from rank 0", "from rank 1") end
    end)

    it("about splits", function()
      local errors = errors_of(3, function(rank, world)
        local send = rank == 2 and { 1, 4, 1 } or { 1, 1, 1 }
        world:all_to_all_v(ones(rank == 2 and 6 or 3), send, { 1, 1, 1 }):wait()
      end)
      for i = 1, 3 do assert_error(errors[i], "EMISMATCH", "rank 2 sends 4 elements to rank 1, which expects 1") end
    end)

    it("about the rows of a gather", function()
      local errors = errors_of(2, function(rank, world)
        world:all_gather_v(ones(2), rank == 0 and { 2, 3 } or { 3, 2 }):wait()
      end)
      for i = 1, 2 do assert_error(errors[i], "EMISMATCH", "%[2 3%]", "%[3 2%]") end
    end)

    it("only in one group: others stay usable, the group does not", function()
      local errors = errors_of(4, function(rank, world)
        local pair = world:new_group({ rank - rank % 2, rank - rank % 2 + 1 }, "pair " .. math.floor(rank / 2))
        local ok, err = pcall(function()
          if rank == 3 then pair:barrier():wait() else pair:all_reduce(ones(1)):wait() end
        end)
        assert.equal(rank < 2, ok)
        if not ok then
          assert_error(err, "EMISMATCH", "group 'pair 1'")
          local again, later = pcall(pair.barrier, pair)
          assert.is_false(again)
          assert_error(later, "EABORTED", "group 'pair 1' was given up", "the ranks disagree")
          assert.is_false(pair:is_healthy())
        end
        assert.equal(4, world:all_reduce(ones(1)):wait():item())
        world:check_healthy()
      end)
      assert.same({}, errors)
    end)
  end)

  describe("ranks that are missing, on " .. device, function()
    setup(function() C.peri_log_level_set(C.PERI_LOG_ERROR) end)
    teardown(function() C.peri_log_level_set(C.PERI_LOG_WARN) end)
    local function ones(n) return peri.ones({ n }, "f32", device) end

    it("because they return early", function()
      local errors = errors_of(3, function(rank, world)
        world:barrier():wait()
        if rank == 1 then return end
        world:all_reduce(ones(3)):wait()
      end)
      assert.is_nil(errors[2])
      for _, i in ipairs { 1, 3 } do
        assert_error(errors[i], "EPEER", "rank 1 has left after its operation 1 and will never post operation 2")
      end
    end)

    it("because they fail", function()
      local errors = errors_of(3, function(rank, world)
        if rank == 2 then error("the disk is full", 0) end
        world:all_reduce(ones(3)):wait()
      end)
      assert.equal("the disk is full", errors[3])
      for i = 1, 2 do assert_error(errors[i], "EPEER", "rank 2 gave up: the disk is full") end
    end)

    it("in a step, as their ids were bad: also where the script goes on, and none is averaged with another step's",
      function()
        local BAD, LAST = 3, 5
        for _, kind in ipairs { "ids", "offsets", "weights", "max" } do
          --- @id: what rank 2 looks up in step BAD; on a device that lags the step may end before it is known that the
          --- id is bad: then it has learned as from -1, which is none.
          local function train(rank, world, id)
            local model = peri.nn.Module()
            model.rows = peri.nn.EmbeddingBag { num_embeddings = 10, embedding_dim = 4, device = device,
              mode = kind == "max" and "max" or "sum", _weight = peri.full({ 10, 4 }, 0.5, "f32", device) }
            local dmp = peri.DistributedModelParallel { module = model, group = world, device = device }
            local optimizer = peri.nn.optim.SGD { params = dmp:parameters(), lr = 0.1 }
            local states, why = {}, nil
            local function ids(second) return peri.tensor({ 1, second, 2 + rank }, "i64", device) end
            local function offsets(at) return peri.tensor({ 0, at }, "i64", device) end
            local factors = kind == "weights" and peri.tensor({ 1, 2, 3 }, "f32", device):requires_grad() or nil
            peri.no_grad(function() -- where nothing is trained only who asks is told
              assert.is_false(pcall(function() model.rows(ids(rank == 2 and 10 or 11), offsets(1)):sum():item() end))
            end)
            for step = 1, LAST do
              local wrong = step == BAD and rank == 2
              optimizer:zero_grad()
              local ok, err = pcall(function()
                model.rows(ids(wrong and kind ~= "offsets" and id or step),
                  offsets(wrong and kind == "offsets" and id == 77 and 4 or 1), factors):sum():backward()
                optimizer:step()
                states[step] = table.concat(model.rows.weight:detach():to("f32", "cpu"):reshape(-1):to_list(), " ")
              end)
              why = why or not ok and err or nil
            end
            return states, why
          end
          local good = sim.run(3, function(rank, world) return (train(rank, world, -1)) end)
          local got = sim.run(3, function(rank, world)
            local states, why = train(rank, world, 77)
            assert.is_truthy(why)
            assert.matches(kind == "offsets" and "offsets" or "id 77 at place 0 of the bag", why.message)
            if rank ~= 2 then assert.matches("rank 2 gave up: ", why.message) end
            assert.is_nil(states[LAST])
            return states
          end)
          for i = 1, 3 do
            for step = 1, LAST do
              if step < BAD - 1 or (got[i][step] and (step < BAD or kind ~= "offsets")) then
                assert.equal(good[i][step], got[i][step], kind .. step)
              end
            end
          end
        end
      end)

    it("in a step of sharded tables and dense ones, as an id of the latter was bad: all hear why, wherever they wait",
      function()
        local plan, F = peri.plan, peri.nn.functional
        for _, entry in ipairs { plan.row_wise(), plan.table_wise(0), plan.row_wise {
          compute_kernel = "fused_uvm_caching", cache_params = { load_factor = 1 } } } do
          local errors = errors_of(3, function(rank, world)
            local model = peri.nn.Module()
            model.ebc = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t",
              num_embeddings = 20, embedding_dim = 4, feature_names = { "f" } } }, device = device,
              fused_params = { optimizer = "sgd", learning_rate = 0.1 } }
            model.rows = peri.nn.Embedding { num_embeddings = 10, embedding_dim = 4, device = device }
            local dmp = peri.DistributedModelParallel { module = model, group = world, device = device,
              plan = { ebc = { t = entry } } }
            local failed
            for step = 1, 4 do
              local kjt = peri.KeyedJaggedTensor { keys = { "f" }, lengths = peri.tensor({ 2 }, "i64", device),
                values = peri.tensor({ step, 19 - rank }, "i64", device) }
              local id = peri.tensor({ step == 2 and rank == 1 and 10 or step }, "i64", device)
              local ok, err = pcall(function()
                F.cat({ dmp.module.ebc(kjt):values(), dmp.module.rows(id) }, 2):sum():backward()
              end)
              failed = failed or not ok and err or nil
              if failed and rank == 1 then pcall(function() world:barrier():wait() end) end -- the script goes on
            end
            error(failed, 0)
          end)
          for i = 1, 3 do assert.matches("id 10 at place 0 of the bag, allowed: 0%.%.9", errors[i].message) end
        end
      end)

    it("because everybody waits for somebody else", function()
      local errors = errors_of(3, function(rank, world)
        local pair = world:new_group(rank < 2 and { 0, 1 } or { 2 }, "pair")
        if rank == 1 then pair:barrier():wait() end
        world:barrier():wait()
        if rank == 0 then pair:barrier():wait() end
      end)
      for i = 1, 3 do assert.is_truthy(errors[i]) end
      assert_error(errors[1], "ETIMEOUT", "waiting for rank 1 %(its last operation: 0%)")
      assert.matches("group 'pair'", errors[2].message)
      assert_error(errors[3], "EPEER", "rank 0 gave up", "waiting for rank 1")
    end)

    it("because a post was lost (fault point)", function()
      local errors = errors_of(2, function(rank, world)
        if rank == 0 then P.check(C.peri_fault_arm("coll_drop", 1)) end
        world:all_reduce(ones(3)):wait()
      end)
      -- whoever passed the fault point first
      for i = 1, 2 do assert.matches("waiting for rank [01]", errors[i].message) end
      C.peri_fault_arm("coll_drop", 0)
    end)

    it("because an operation does not end here (fault point)", function()
      local errors = errors_of(2, function(rank, world)
        if rank == 1 then P.check(C.peri_fault_arm("coll_stall", 1)) end
        world:all_reduce(ones(3)):wait()
        world:barrier():wait()
      end)
      C.peri_fault_arm("coll_stall", 0)
      assert.is_true(errors[1] ~= nil or errors[2] ~= nil)
      for i = 1, 2 do
        if errors[i] then assert.is_true(errors[i].name == "ETIMEOUT" or errors[i].name == "EPEER") end
      end
    end)

    it("late, which is no error", function()
      local results = sim.run(3, function(rank, world)
        if rank == 1 then
          for _ = 1, 2 do coroutine.yield() end
        end
        return world:all_reduce(ones(1)):wait():item()
      end)
      assert.same({ 3, 3, 3 }, results)
    end)
  end)
end

describe("a sim world", function()
  it("raises the first rank's error and names it", function()
    local ok, err = pcall(sim.run, 3, function(rank) if rank == 1 then error "broken" end end)
    assert.is_false(ok)
    assert.matches("^rank 1 of 3: .*broken", err)
    ok, err = pcall(sim.run, 2, function(rank) if rank == 1 then peri.tensor({ 1 }):reshape(7) end end)
    assert.is_false(ok)
    assert.equal("EINVAL", err.name)
    assert.equal(1, err.rank)
    assert.matches("^rank 1 of 2: peri_tensor_reshape", err.message)
  end)

  it("keeps each rank's state apart", function()
    local before = P.state.device
    require("perilune.state").own({ mark = false }, true)
    sim.run(3, function(rank, world)
      assert.equal(rank, peri.rank())
      assert.equal(3, peri.world_size())
      assert.equal(world, peri.world())
      P.state.mark = rank
      peri.scope(function()
        local t = peri.ones { 1 }
        world:all_reduce(t):wait()
        assert.equal(3, t:item())
        peri.no_grad(function()
          world:barrier():wait()
          assert.is_false(P.state.grad)
        end)
        assert.is_true(P.state.grad)
      end)
      assert.equal(rank, P.state.mark)
      assert.equal("opaque", P.state.device)
    end, { device = "opaque" })
    assert.is_false(P.state.world)
    assert.is_false(P.state.mark)
    assert.equal(before, P.state.device)
  end)

  it("leaves nothing behind", function()
    local function run() sim.run(3, function(_, world) world:all_reduce(peri.ones { 10 }):wait() end) end
    run()
    collectgarbage()
    collectgarbage()
    local before = tonumber(C.peri_mem_objects())
    for _ = 1, 3 do run() end
    collectgarbage()
    collectgarbage()
    assert.equal(before, tonumber(C.peri_mem_objects()))
  end)

  it("has a smaller last node, if nodes do not come out even", function()
    local found = sim.run(4, function(_, world)
      return { world:node(0), world:node(2), world:node(3), world.local_size }
    end, { local_size = 3 })
    assert.same({ { 0, 0, 1, 3 }, { 0, 0, 1, 3 }, { 0, 0, 1, 3 }, { 0, 0, 1, 1 } }, found)
  end)

  it("nests in no other and needs sane arguments", function()
    assert.error_matches(function() sim.run(0, print) end, "number of ranks is 0")
    assert.error_matches(function() sim.run(4, print, { local_size = -1 }) end,
      "nodes of %-1 ranks, allowed: 0 and more")
    assert.error_matches(function() sim.run(1, print, { localsize = 1 }) end, "localsize")
    assert.error_matches(function() peri.init { transport = "sim", job = "x", rank = 2, size = 2 } end, "rank 2 of 2")
    assert.error_matches(function() peri.init { transport = "sim" } end, "job name")
    assert.error_matches(function() peri.init { transport = "telepathy" } end, "telepathy")
    assert.error_matches(function() peri.init { timeout = -1 } end, "timeout of %-1 s")
    assert.error_matches(function() peri.rank() end, "peri.init")
  end)
end)

describe("the recorder", function()
  it("keeps the last operations in words", function()
    sim.run(2, function(rank, world)
      for _ = 1, 300 do world:barrier():wait() end
      world:all_to_all_v(peri.ones({ 3 }), { 1, 2 }, rank == 0 and { 1, 1 } or { 2, 2 },
        peri.empty { rank == 0 and 2 or 4 })
      local text = world:record()
      assert.is_nil(text:match "operation 45:")
      assert.matches("operation 46: barrier, posted .* s ago, done after", text)
      assert.matches("operation 301: all_to_all f32 .*3 out, [24] in, posted .* s ago, pending", text)
      local _, lines = text:gsub("\n", "")
      assert.equal(256, lines)
      if rank == 1 then error("enough", 0) end
    end, { catch = true })
  end)

  it("is printed on a timeout", function()
    local text = shell.luajit [[
      local peri = require "perilune"
      require("perilune.dist.sim").run(2, function(rank, world)
        world:barrier():wait()
        if rank == 0 then world:new_group({ 0 }, "alone"):barrier():wait() world:all_reduce(peri.ones { 2 }):wait()
        else world:new_group({ 1, 0 }, "two"):barrier():wait() end
      end, { catch = true })
    ]]
    assert.matches("the last operations of rank 0 in group 'world'", text)
    assert.matches("operation 1: barrier, posted", text)
    assert.matches("operation 2: all_reduce sum f32 %[2%], .*pending", text)
  end)

  it("is printed to the last operations and those without an end, whole on level info", function()
    local code = [[
      local peri = require "perilune"
      require("perilune.dist.sim").run(2, function(rank, world)
        for _ = 1, 20 do world:barrier():wait() end
        if rank == 1 then world:new_group({ 1, 0 }, "two"):barrier():wait() end
        local works = {}
        for i = 21, 32 do works[i] = world:all_reduce(peri.ones { i }) end
        works[21]:wait()
      end, { catch = true })
    ]]
    local folder, clean = shell.temporary()
    local script = shell.write(folder .. "/script.lua", code)
    local function printed(level)
      local env = shell.luajit_env()
      env.PERI_LOG = level
      local text, lines, all = shell.run("luajit " .. script, env), {}, 0
      for line in text:gmatch "[^\n]+" do
        local number = line:match "^perilune.* warning:   operation (%d+):"
        if number then all = all + 1 end
        if number and line:match ": all_reduce.* pending$" then lines[#lines + 1] = tonumber(number) end
      end
      return text, all, lines
    end
    local pending = {}
    for i = 21, 32 do pending[#pending + 1] = i end
    local text, all, lines = printed "warn"
    assert.matches("the last operations of rank 0 in group 'world': 12 of 32 %(PERI_LOG=info prints all, "
      .. "group:record%(%) has them%)", text)
    assert.equal(12, all)
    assert.same(pending, lines)
    text, all, lines = printed "info"
    clean()
    assert.matches("the last operations of rank 0 in group 'world':\n", text)
    assert.equal(32, all)
    assert.same(pending, lines)
  end)
end)

describe("a world of one", function()
  it("needs no launcher, opens, closes and opens again", function()
    for _ = 1, 2 do
      local world = peri.init { transport = "self" }
      assert.equal("self", world.transport)
      assert.equal(world, peri.init())
      assert.equal(0, peri.rank())
      assert.equal(1, peri.world_size())
      assert.equal(5, world:all_reduce(peri.full({ 2 }, 5)):wait():item(0))
      peri.finish()
      assert.error_matches(function() world:barrier() end, "was closed")
      world:release()
      assert.error_matches(function() world:barrier() end, "released")
      peri.finish() -- without a world: nothing
    end
    assert.is_true(peri.dist.probe "self")
    local ok, why = peri.dist.probe "telepathy"
    assert.is_nil(ok)
    assert.matches("telepathy", why)
  end)

  it("closes only when nothing is in flight", function()
    sim.run(2, function(rank, world)
      local work = rank == 0 and world:barrier()
      if rank == 0 then assert.error_matches(function() world:close() end,
        "1 operations of this rank in group 'world' are in flight")
      else work = world:barrier() end
      work:wait()
    end)
  end)
end)
