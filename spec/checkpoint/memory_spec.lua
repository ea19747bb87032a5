-- Memory that runs out in what serves and saves a model: whatever request is refused, the error is ENOMEM, nothing
-- is left, and the same call goes well afterwards. Some requests of each case are drawn; PERI_TEST_REQUESTS=all takes
-- each in its turn. Sharded models: spec/shard/memory_spec.lua.
local peri = require "perilune"
local shell = require "spec.support.shell"
local small = require "spec.support.small_net"
local support = require "spec.support.tbe"
local C, nn = peri.ffi.C, peri.nn

local MOST = os.getenv "PERI_TEST_REQUESTS" == "all" and math.huge or 5 -- requests of a case, by kind
local folder, clean = shell.temporary()
teardown(clean)

local Net = small.Net:extend "Net"
function Net:forward(kjt) return self.over(self.ebc(kjt):values()) end

local function held_out()
  local values, lengths = {}, {}
  for i = 0, 39 do values[#values + 1], lengths[#lengths + 1] = i % 20, 1 end
  return { ids = peri.KeyedJaggedTensor { keys = { "fa", "fb" }, values = values, lengths = lengths } }
end
local function call(model, batch) return model(batch.ids) end

local made = 0
local function fresh()
  made = made + 1
  return ("%s/%d"):format(folder, made)
end

--- A model that has trained for a step, its file, its answers, and a checkpoint from which increments go on.
local function trained()
  nn.manual_seed(3)
  local t = { model = Net {}, file = fresh() .. ".peri", full = fresh(), run = fresh() }
  function t.step(i) peri.scope(function() t.model(small.batch(i)):mean():backward() end) end
  function t.export(path) t.model:export(path, { batches = { held_out() }, call = call }) end
  function t.save(path, options) return peri.checkpoint.save(path, { model = t.model }, options) end
  t.step(1)
  t.export(t.file)
  t.save(t.full, { increments = true })
  return t
end

--- What is done, of which every request for memory may be refused; `before` each, none is. may_go_well: something in it
--- may go without (what an old save left is removed later, rows of marks are found another way).
local cases = {
  { "a model is exported", function(t) t.export(fresh()) end },
  { "a model file is opened and asked", function(t)
    local file = peri.export.open(t.file, { copy = true, verify = true })
    local list = file:predict(held_out()).logits:to_list()
    file:release()
    t.want = t.want or list
    assert.same(t.want, list)
  end },
  { "a checkpoint is saved", function(t) t.save(fresh()) end, may_go_well = true },
  { "a checkpoint is saved in the background", function(t) t.save(fresh(), { async = true }):wait() end,
    may_go_well = true },
  { "an increment is saved", function(t) t.save(fresh(), { increment_of = t.last }) end, may_go_well = true,
    before = function(t)
      t.last = fresh()
      t.save(t.last, { increments = true })
      t.step(2)
    end },
  { "a checkpoint is loaded", function(t)
    peri.checkpoint.load(t.full, { model = t.model }, { increments = true })
  end, may_go_well = true },
}

local function objects()
  collectgarbage()
  collectgarbage()
  return tonumber(C.peri_mem_objects())
end

--- f() with the k-th request of kind `point` refused: whether it went well, its error, and the requests.
local function refused(point, k, f, t)
  peri.ffi.check(C.peri_fault_arm(point, k))
  local ok, err = pcall(f, t)
  local passed = tonumber(C.peri_fault_passed(point))
  C.peri_fault_arm(point, 0)
  return ok, err, passed
end

--- each(k) for requests that are drawn.
local function requests(passed, salt, each)
  local draw, step = support.generator(salt), math.max(1, math.floor(passed / MOST))
  for first = 1, passed, step do each(math.min(passed, first + draw(step))) end
end

describe("out of memory where", function()
  for number, case in ipairs(cases) do
    for _, point in ipairs { "alloc", "device_alloc" } do
      it(("%s, %s"):format(case[1], point), function()
        local t = trained()
        local before = case.before or function() end
        local function once(k)
          before(t)
          return refused(point, k, case[2], t)
        end
        once(1e9)
        local _, _, passed = once(1e9)
        local failures, had = 0, {}
        for round = 1, 2 do -- the same requests twice: what is kept for later calls is made once
          requests(passed, number, function(k)
            local ok, err = once(k)
            if not ok then
              failures = failures + 1
              assert.equal("ENOMEM", err.name, tostring(err))
              assert.is_truthy(err.message:match "no memory", err.message)
            end
            assert.is_true(not ok or case.may_go_well == true, ("request %d of %d is not told"):format(k, passed))
          end)
          assert.is_true((once(1e9)))
          had[round] = objects()
        end
        assert.is_true(failures > 0)
        assert.equal(had[1], had[2])
      end)
    end
  end

  it("a model file follows a run: the checkpoint is tried again", function()
    local t = trained()
    t.save(t.run .. "/save-000001-step-1")
    local function poll()
      local model, why = t.follower:poll()
      if not model then error(why or "there is nothing new", 0) end
      t.model = model
    end
    local function answers()
      local list = t.model:predict(held_out()).logits:to_list()
      t.model:release()
      t.follower:release()
      return list
    end
    local function once(k)
      t.follower = peri.export.follow(t.file, t.run)
      return refused("alloc", k, poll)
    end
    local _, _, passed = once(1e9)
    local want, had = answers(), objects()
    requests(passed, 20, function(k)
      local ok, why = once(k)
      assert.is_false(ok)
      assert.is_truthy(why:match "no memory", why)
      poll()
      assert.same(want, answers())
    end)
    assert.equal(had, objects())
  end)

  it("what an increment stands on is asked to be removed, or replaced: it stays", function()
    local t, alone = trained(), fresh() -- beside no other checkpoint of the same digest, which would do as well
    local full, increment = alone .. "/full", alone .. "/increment"
    t.save(full, { increments = true })
    t.step(2)
    t.save(increment, { increment_of = full })
    local function remove() peri.checkpoint.remove(full) end
    local function replace() t.save(full) end
    for salt, f in ipairs { remove, replace } do
      local ok, _, passed = refused("alloc", 1e9, f)
      assert.is_false(ok)
      requests(passed, 30 + salt, function(k) assert.is_false((refused("alloc", k, f))) end)
    end
    peri.checkpoint.load(increment, { model = t.model })
  end)
end)
