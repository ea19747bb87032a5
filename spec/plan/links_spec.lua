-- Steps across hosts: what ranks compute while links work. Expectations are derived by hand from what each rank has and
-- what a link moves.
local peri = require "perilune"
local plan = peri.plan
local step = require "perilune.plan.step"
local alike = require "spec.support.alike"
local links = require "perilune.plan.links"

local BATCH, IDS, DIM = alike.BATCH, alike.IDS, alike.DIM
local model_of = alike.model_of
-- of a table, to or from the other host
local ROWS_MS, IDS_MS = 2 * BATCH * DIM * 4 / 1000, 2 * BATCH * (IDS + 1) * 4 / 1000

--- Four ranks on two hosts, whose links move 1000 bytes a millisecond and host; a burst: milliseconds of that.
local function topology_of(args)
  return plan.Topology { world_size = 4, local_world_size = 2, inter_host_bw = 500,
    inter_host_burst = (args.burst or 0) * 500, processors = args.processors, hosts_sharing = args.hosts_sharing }
end

local function counts(places, topology)
  local model, constraints = model_of(#places)
  local entries = {}
  for i, at in ipairs(places) do entries["t" .. i] = type(at) == "number" and plan.table_wise(at) or at end
  local options, placement = step.of_plan(plan.ShardingPlan { [""] = entries }, model, topology, BATCH, constraints)
  return step.by_rank(options, placement, topology)
end

--- Milliseconds of the passes of a step with tables on these ranks (or under these entries). args: of topology_of, and
--- forward, backward: what all ranks compute when nothing is on its way, looked_up, applied: lists by rank.
local function passes(places, args)
  local topology = topology_of(args)
  local nothing = { 0, 0, 0, 0 }
  local ms = links.passes(counts(places, topology), topology,
    { forward = { before = args.forward or 0, own = args.looked_up or nothing },
      backward = { before = args.backward or 0, own = args.applied or nothing } })
  return ms.forward, ms.backward
end

describe("links that rest while ranks compute", function()
  local long = 10 * ROWS_MS

  it("make up for it with a burst, and for no more than there is to exchange", function()
    local burst = 0.25 * ROWS_MS
    -- before ids, and before rows
    local ahead, back = passes({ 0, 2 }, { burst = burst, forward = long, backward = long })
    assert.near(long + math.max(0, IDS_MS - burst) + ROWS_MS - burst, ahead, 1e-6)
    assert.near(long + ROWS_MS, back, 1e-6)
    ahead, back = passes({ 0, 2 }, { burst = 1000 * ROWS_MS, forward = long, backward = long })
    assert.near(2 * long, ahead + back, 1e-6)
    ahead, back = passes({ 0, 2 }, { forward = long, backward = long })
    assert.near(long + ROWS_MS + IDS_MS, ahead, 1e-6)
    assert.near(long + ROWS_MS, back, 1e-6)
  end)

  it("never move more in a step than they can while it lasts, and never take longer than one thing after the other",
    function()
    local seed = 7
    local function random(n)
      seed = (seed * 1103515245 + 12345) % 2 ^ 31
      return math.floor(seed / 65536) % n
    end
    local function list(unit)
      local own = {}
      for r = 1, 4 do own[r] = unit * random(4) end
      return own
    end
    for _ = 1, 500 do
      local places, here = {}, 0
      for i = 1, 1 + random(9) do
        places[i] = random(4)
        if places[i] < 2 then here = here + 1 end
      end
      local there, unit = #places - here, ({ 0, 0.2, 1, 4 })[1 + random(4)] * ROWS_MS
      local args = { burst = ({ 0, 0.1, 0.5, 1, 3, 50 })[1 + random(6)] * ROWS_MS, forward = 0.3 * unit,
        backward = unit, looked_up = list(unit), applied = list(unit), processors = ({ 1, 2, 4 })[1 + random(3)],
        hosts_sharing = 1 + random(2) }
      local ahead, back = passes(places, args)
      local function most(own) return math.max(unpack(own)) end
      local function sum(own) return own[1] + own[2] + own[3] + own[4] end
      assert.is_true(ahead >= args.forward + most(args.looked_up) - 1e-6 and back >= args.backward + most(args.applied)
        - 1e-6)
      local busiest = math.max(here * ROWS_MS + there * (IDS_MS + ROWS_MS), there * ROWS_MS + here * (IDS_MS + ROWS_MS))
      assert.is_true(ahead + back >= busiest - 1e-6)
      local full = math.max(here, there)
      assert.is_true(ahead <= full * (IDS_MS + ROWS_MS) + args.forward + sum(args.looked_up) + 1e-6)
      assert.is_true(back <= full * ROWS_MS + args.backward + 2 * sum(args.applied) + 1e-6)
      args.burst = 0
      local bare, bare_back = passes(places, args)
      assert.is_true(ahead + back <= bare + bare_back + 1e-6)
    end
  end)

  it("are part of a step", function()
    local limited = plan.Topology { world_size = 4, local_world_size = 2, inter_host_bw = 1000,
      inter_host_burst = 2000 }
    local free = plan.Topology { world_size = 4, local_world_size = 2, inter_host_bw = 1000 }
    local model, constraints = model_of(4)
    local function ms(topology)
      local options, placement = step.of_plan(plan.table_wise_by_size({ [""] = model[1].tables }, { world_size = 4 }),
        model, topology, BATCH, constraints)
      return step.ms(step.by_rank(options, placement, topology), topology)
    end
    local saved = ms(free) - ms(limited)
    assert.is_true(saved > 0 and saved <= 4)
  end)
end)

describe("ranks that compute while links work", function()
  local eight = { 0, 0, 0, 0, 0, 0, 0, 0 } -- tables of rank 0: eight parts
  local ids, rows = 8 * IDS_MS, 8 * ROWS_MS

  it("have rows of a part on their way while they look up the next", function()
    local little, much = 0.5 * rows, 3 * rows
    -- the link is never idle
    assert.near(ids + little / 8 + rows, (passes(eight, { looked_up = { little, 0, 0, 0 } })), 1e-6)
    -- it waits for each part
    assert.near(ids + much + rows / 8, (passes(eight, { looked_up = { much, 0, 0, 0 } })), 1e-6)
  end)

  it("apply gradients of a part while the next is on its way", function()
    local little, much = 0.5 * rows, 3 * rows
    local _, back = passes(eight, { applied = { little, 0, 0, 0 } })
    assert.near(rows + little / 8, back, 1e-6)
    _, back = passes(eight, { applied = { much, 0, 0, 0 } })
    assert.near(rows / 8 + much, back, 1e-6)
  end)

  it("have all of it in one part where rows are summed within a host first, and where there is one table", function()
    for _, places in ipairs { { plan.table_row_wise(0), plan.table_row_wise(0) }, { 0, 1 } } do
      local bare, bare_back = passes(places, {})
      local ahead, back = passes(places, { looked_up = { 5, 5, 0, 0 }, applied = { 7, 7, 0, 0 } })
      assert.near(bare + 5, ahead, 1e-6)
      assert.near(bare_back + 7, back, 1e-6)
    end
  end)

  it("have no more parts than the table with most ids leaves: its time is not split", function()
    local topology = topology_of {}
    local ranks = counts({ 0, 0, 0, 0 }, topology)
    local function passes_of(share)
      ranks[1].most_ids = share * ranks[1].id
      local own, nothing = { 4 * ROWS_MS, 0, 0, 0 }, { 0, 0, 0, 0 }
      local ms = links.passes(ranks, topology,
        { forward = { before = 0, own = own }, backward = { before = 0, own = nothing } })
      return ms.forward - 4 * IDS_MS
    end
    assert.near(4 * ROWS_MS + ROWS_MS, passes_of(0.25), 1e-6)     -- four parts, of which the last one's rows are left
    assert.near(4 * ROWS_MS + 2 * ROWS_MS, passes_of(0.5), 1e-6)  -- two
    assert.near(4 * ROWS_MS + 4 * ROWS_MS, passes_of(0.95), 1e-6) -- one
  end)

  it("send rows while another rank of their host still looks up", function()
    local long = 3 * ROWS_MS -- rank 1's rows are there before rank 0's set out
    assert.near(2 * IDS_MS + long + ROWS_MS, (passes({ 0, 1 }, { looked_up = { long, 0, 0, 0 } })), 1e-6)
  end)

  it("move no messages on: rows wait for the ranks that get them, and gradients for those that send them", function()
    local long = 3 * ROWS_MS
    assert.near(IDS_MS + long + ROWS_MS, (passes({ 0 }, { looked_up = { 0, 0, 0, long } })), 1e-6)
    -- two tables each: what all ranks apply meanwhile holds up what they send
    local _, back = passes({ 0, 0, 2, 2 }, { applied = { 6, 0, 6, 0 } })
    assert.near(2 * ROWS_MS + 6, back, 1e-6)
    _, back = passes({ 0, 0, 2, 2 }, { applied = { 6, 0, 0, 0 } })
    assert.near(2 * ROWS_MS + 3, back, 1e-6)
  end)

  it("have processors between them as they share them", function()
    local function ends(args, ready, ms)
      args.world_size, args.local_world_size = #ms, args.local_world_size or #ms
      return links.ends(plan.Topology(args), ready, ms)
    end
    assert.same({ 3, 1, 2 }, ends({}, { 1, 0, 0 }, { 2, 1, 2 }))
    assert.same({ 3, 4 }, ends({ processors = 1 }, { 0, 1 }, { 2, 2 }))
    assert.same({ 3, 5, 5 }, ends({ processors = 2 }, { 0, 0, 0 }, { 2, 4, 4 }))
    assert.same({ 2, 5, 1, 1 }, ends({ local_world_size = 2, processors = 1 }, { 0, 4, 0, 0 }, { 2, 1, 0.5, 0.5 }))
    assert.same({ 2, 2, 2, 2 }, ends({ local_world_size = 2, processors = 2, hosts_sharing = 2 }, { 0, 0, 0, 0 },
      { 1, 1, 1, 1 }))
  end)
end)

describe("kinds of exchanges whose rows go opposite ways", function()
  --- Milliseconds that these would take longer one after the other.
  local function apart(places)
    local topology = topology_of {}
    local amounts = step.amounts(counts(places, topology), topology)
    for _, unit in ipairs { "far_mixed", "far_sums" } do assert.equal(amounts.forward[unit], amounts.backward[unit]) end
    return amounts.forward.far_mixed, amounts.forward.far_sums
  end

  it("are counted by what the fullest links of each have, less what the fullest link of all does", function()
    local within = plan.table_row_wise
    -- 1 of host 0, 2 of host 1: 3 after one another, 2 at once
    assert.near(ROWS_MS, (apart { within(0), 2, 3 }), 1e-9)
    assert.near(0, (apart { within(0), 0, 1 }), 1e-9)               -- the same way
    assert.near(0, (apart { within(0), within(1), 0, 2 }), 1e-9)    -- both ways as much of each
    assert.near(2 * ROWS_MS, (apart { within(0), within(0), 2, 3 }), 1e-9)
    assert.near(0, (apart { 0, 2, 3 }), 1e-9)
  end)

  it("are counted apart where rows are summed within a host first: the fullest link's", function()
    local within = plan.table_row_wise
    -- any order
    for tables, places in pairs { [0] = { 0, 2, 3 }, { within(0), 2, 3 }, { within(0), within(1), within(1), 0 } } do
      local _, sums = apart(places)
      assert.near(tables * ROWS_MS, sums, 1e-9)
    end
  end)
end)
