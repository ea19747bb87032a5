-- A run that is asked to stop: whichever rank is, and however its loop ends, the newest checkpoint is of the step at
-- which the run left, and the run that goes on from it has the bits of one that never stopped.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local drawing = require "spec.support.drawing"
local shell = require "spec.support.shell"
local stop = require "perilune.stop"
local nn = peri.nn

local folder = drawing.folder "saver-stop"
local source = stop.source
setup(function() shell.run("mkdir " .. folder) end)
teardown(function()
  stop.source = source
  shell.run("rm -r " .. folder)
end)

local LAST = 15 -- steps of a run that is not stopped
local LEFT = {} -- raised where `perilune run` would end the process

local Net = nn.Module:extend "Net"
function Net:init()
  self.ebc = peri.EmbeddingBagCollection { fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 },
    tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 30, embedding_dim = 4,
      feature_names = { "f" } } } }
  self.over = nn.Linear { in_features = 4, out_features = 1 }
end
function Net:forward(kjt) return nn.global_mean(self.over(self.ebc(kjt):values()):pow(2):sum()) end

local function batch(step)
  return peri.KeyedJaggedTensor { keys = { "f" }, values = { step * 7 % 30, step * 3 % 30 }, lengths = { 1, 1 } }
end

local function parts_of(world, seed)
  nn.manual_seed(seed)
  local model = peri.DistributedModelParallel { module = Net(), group = world,
    plan = { ebc = { t = peri.plan.row_wise() } } }
  return { model = model, optimizer = nn.optim.Adam { params = model:dense_parameters(), lr = 0.01 } }
end

--- Signals, by rank: the step from which on the rank is asked, and the step that it is at.
local asked_from, at_step = {}, {}

--- Ways to write a loop: each calls each(step) after each step, and ends when the steps are made, or when it is asked.
local loops = {}
function loops.own(p, step, each)
  local group = p.model._accumulates and 3 or 1
  while step < LAST do
    step = step + 1
    p.optimizer:zero_grad()
    p.model(batch(step)):backward()
    if step % group == 0 then
      p.optimizer:step()
      if group > 1 then p.model:apply_accumulated() end
    end
    each(step)
  end
end
function loops.own_that_asks(p, step, each)
  while step < LAST and not peri.stopping() do
    step = step + 1
    p.optimizer:zero_grad()
    p.model(batch(step)):backward()
    p.optimizer:step()
    each(step)
  end
end
local function by(class, vote)
  return function(p, step, each)
    local pipeline = peri.pipeline[class] { model = p.model, optimizer = p.optimizer, vote = vote }
    local given = step
    for _ in pipeline:run(function()
      given = given + 1
      return given <= LAST and batch(given) or nil
    end) do
      step = step + 1
      each(step)
    end
  end
end
loops.base, loops.sparse_dist = by("TrainPipelineBase", true), by("TrainPipelineSparseDist", true)
loops.without_votes = by("TrainPipelineSparseDist", false)

--- What a model and its optimizer have learned, bit for bit.
local function state_of(p)
  local function words(of)
    if type(of) ~= "table" then return tostring(of) end
    if of.to_list then return table.concat(of:to_list(), " ") end
    local list = {}
    for k, v in peri.util.ordered(of) do list[#list + 1] = k .. "=" .. words(v) end
    return table.concat(list, "\n")
  end
  return words(peri.shard.gather_state_dict { p.model:state_dict(), p.model:fused_optimizer():state_dict(),
    p.optimizer:state_dict() })
end

--- A run: its last step, whether the Saver ended it, how many saves its folder has seen, and its state. ask: { rank =,
--- at =, accumulate =, before = function(saver, step) } or nil.
local function run(world, loop, args, ask)
  local p, own, rank = parts_of(world, 5), peri.util.copy(args), peri.rank()
  own.parts, own.group, ask = p, world, ask or {}
  local saver = peri.checkpoint.Saver(own)
  if ask.accumulate then p.model:accumulate(true) end
  local step, values = saver:resume() or 0, nil
  asked_from[rank], at_step[rank] = ask.rank == rank and ask.at or math.huge, 0
  local ok, err = pcall(loop, p, step, function(now)
    step, at_step[rank] = now, now
    if ask.before then values = ask.before(saver, now) end
    saver:step(step, values)
  end)
  if not ok and err ~= LEFT then error(err, 0) end
  if ok then saver:close(step) end
  return { step = step, left = not ok, saves = saver.number, state = state_of(p) }
end

local function newest(path)
  local list = peri.checkpoint.Saver.list(path)
  return list[1] and list[1].step
end

describe("a Saver of a run that is asked to stop", function()
  setup(function()
    stop.source = { open = function() end, grace = 25, leave = function() error(LEFT, 0) end,
      asked = function()
        local rank = peri.rank()
        if (at_step[rank] or 0) >= (asked_from[rank] or math.huge) then return 1, 0 end
      end }
  end)

  local made = 0
  --- Run on n ranks, of which one is asked; then go on to the end: what the first run was.
  local function stopped(n, loop, args, ask)
    made = made + 1
    local path = ("%s/%d"):format(folder, made)
    local function on_ranks(asks)
      return sim.run(n, function(_, world)
        return run(world, loop, { folder = path, every = args.every or 100, async = args.async,
          full_every = args.full_every }, asks)
      end)
    end
    local first = on_ranks(ask)
    for r = 2, n do
      assert.equal(first[1].step, first[r].step)
      assert.equal(first[1].left, first[r].left)
    end
    assert.equal(first[1].step, newest(path))
    local again = on_ranks { accumulate = ask.accumulate }
    assert.is_false(again[1].left)
    assert.equal(LAST, again[1].step)
    return first[1], again[1].state
  end
  local function whole(n, loop, ask)
    local args = { folder = ("%s/whole-%d"):format(folder, made), every = 100, resume = "no" }
    return sim.run(n, function(_, world) return run(world, loop, args, ask) end)[1].state
  end

  for n = 1, 3 do
    it(("leaves with the step saved that it is at, to the bits of one that never stopped: ranks " .. n), function()
      for name, loop in peri.util.ordered(loops) do
        local wanted = whole(n, loop)
        for at = n < 3 and 3 or 5, 5, 2 do
          local first, state = stopped(n, loop, { async = at > 3, full_every = at > 3 and 2 or nil,
            every = at == 5 and 2 or nil }, { rank = at % n, at = at })
          assert.equal(name == "own" or n > 1 and name == "without_votes", first.left, name)
          assert.is_true(first.step >= at and first.step < LAST, ("%s %d %d"):format(name, at, first.step))
          if n == 1 and name:find "^own" then assert.equal(at, first.step) end
          if at ~= 5 then assert.equal(1, first.saves) end -- one, whatever a pipeline has loaded ahead
          assert.equal(wanted, state)
        end
      end
    end)
  end

  it("leaves after the last micro-batch of a group", function()
    for n = 1, 2 do
      local wanted = whole(n, loops.own, { accumulate = true })
      local first, state = stopped(n, loops.own, {}, { rank = n - 1, at = 4, accumulate = true })
      assert.equal(0, first.step % 3)
      assert.equal(wanted, state)
    end
  end)

  it("leaves after the save within which it was asked, or with the one that there is of this step", function()
    for n = 1, 3 do
      local first = stopped(n, loops.own, { every = 4 }, { rank = n - 1, before = function()
        return function() asked_from[n - 1] = 0 end -- values: asked for by a save
      end })
      assert.same({ 4, 1, true }, { first.step, first.saves, first.left })
      first = stopped(n, loops.own, {}, { rank = n - 1, at = 4, before = function(saver, step)
        if step > 3 then saver:save(step) end
      end })
      assert.equal(first.step - 3, first.saves)
    end
  end)

  it("leaves when another one of the same loop has saved, too", function()
    for n = 1, 2 do
      local steps = sim.run(n, function(rank, world)
        local savers, step = {}, 0
        for i = 1, 3 do
          savers[i] = peri.checkpoint.Saver { folder = ("%s/both-%d-%d"):format(folder, n, i), every = 100,
            group = world, parts = { m = nn.Linear { in_features = 2, out_features = 2 } } }
        end
        asked_from[rank], at_step[rank] = rank == 0 and 3 or math.huge, 0
        local ok, err = pcall(function()
          while true do
            step, at_step[rank] = step + 1, step + 1
            savers[1]:step(step)
            savers[2]:step(step)
          end
        end)
        assert.is_false(ok)
        assert.equal(LEFT, err)
        for i = 1, 3 do savers[i]:close() end
        return step
      end)
      assert.same({ steps[1], steps[1] }, { newest(folder .. "/both-" .. n .. "-1"),
        newest(folder .. "/both-" .. n .. "-2") })
      assert.is_nil(newest(folder .. "/both-" .. n .. "-3")) -- it was told no step
    end
  end)

  it("leaves without a folder, too; where nobody can end the script it saves once, and the loop goes on", function()
    local leave = stop.source.leave
    for _, path in ipairs { false, folder .. "/goes-on" } do
      stop.source.leave = not path and leave or nil
      sim.run(1, function(rank)
        local saver = peri.checkpoint.Saver { folder = path or nil, every = 100,
          parts = { m = nn.Linear { in_features = 2, out_features = 2 } } }
        asked_from[rank] = 3
        local ok, err = pcall(function()
          for step = 1, 9 do
            at_step[rank] = step
            saver:step(step)
          end
        end)
        assert.equal(path ~= false, ok)
        if not ok then assert.equal(LEFT, err) end
        assert.equal(path and 9 or 3, at_step[rank])
        assert.equal(path and 3 or false, saver.last_step)
        saver:close()
      end)
    end
    stop.source.leave = leave
  end)
end)
