-- The language of schedules, and what its checker derives and refuses: without running anything.
local peri = require "perilune"
local Schedule, schedules = peri.pipeline.Schedule, peri.pipeline.schedules

local function refused(text, f, ...)
  local ok, err = pcall(f, ...)
  assert.is_false(ok)
  assert.equals(text, (err.message))
end
--- The schedule is refused with these words (behind its name).
local function check_refuses(text, s) refused("schedule 'x': " .. text, function() s:called "x":check() end) end

--- An order in which the forward pass looks up.
local sdd = Schedule { name = "sparse_dist", depth = 3,
  { "zero_grad" },
  { "input_dist", ahead = 1, on = "dist" },
  { "load", ahead = 2 },
  { "to_device", ahead = 2, on = "copy" },
  { "forward" },
  { "wait_dist", ahead = 1, on = "dist" },
  { "backward" },
  { "optimizer" },
}

describe("a schedule", function()
  it("says what follows from it", function()
    local depths = { base = 2, sparse_dist = 3, sparse_dist_lite = 2, fused_sparse_dist = 3, prefetch_sparse_dist = 3,
      eval_sparse_dist = 3, eval_fused_sparse_dist = 3, wire_first = 3 }
    for name, depth in pairs(depths) do -- any order: each by itself
      local plan = schedules[name]:check()
      assert.same({ depth, 0, 0 }, { plan.depth, plan.staleness.tables, plan.staleness.dense })
    end
    local plan = schedules.semi_sync(0):check()
    assert.same({ 4, 1, 0 }, { plan.depth, plan.staleness.tables, plan.staleness.dense })
    assert.same({ 3, 0 }, { plan.ahead, plan.behind })
    assert.equals(1, plan.live.rows) -- this batch's are taken before the next are looked up
    assert.equals(3, sdd:check().live.batch) -- one computes, one's ids travel, one comes
    assert.equals(1, schedules.fused_sparse_dist:check().live.rows)
  end)

  it("has the event edges that its streams need", function()
    local function edges(s)
      local list = {}
      for _, e in ipairs(s:check().edges) do
        list[#list + 1] = ("%s>%s %s"):format(e.from.name, e.to.name, table.concat(peri.util.keys(e.over), ","))
      end
      table.sort(list)
      return list
    end
    local function has(list, wanted)
      for _, e in ipairs(list) do
        if e == wanted then return true end
      end
      return false
    end
    local fused = edges(schedules.fused_sparse_dist)
    -- The lookup comes after the last batch's update of the tables, on another stream; nothing but an event orders
    -- them.
    assert.is_true(has(fused, "backward>lookup cache,tables"), table.concat(fused, "; "))
    assert.is_true(has(fused, "lookup>forward rows"))
    assert.is_true(has(fused, "wait_dist>lookup ids"))
    local one = sdd:set { input_dist = { on = "main" }, wait_dist = { on = "main" }, to_device = { on = "main" } }
    assert.same({}, edges(one))
  end)

  it("is stale once where it begins to be", function()
    assert.equals(1, schedules.semi_sync(900):check().staleness.tables)
    local s = schedules.semi_sync(900)
    refused("schedule 'semi_sync': 'lookup' (ahead 1, place 5) reads tables without the last 1 update, which "
      .. "'backward' (ahead 0, place 7) makes later: staleness 1, the schedule allows 0", function()
        s:with { staleness = {} }:check()
      end)
    assert.equals(0, s:drop("lookup"):set { exact_lookup = { until_step = 10 ^ 6 } }:insert { "lookup", name = "late",
      from_step = 10 ^ 6, ahead = 1 }:check().staleness.tables)
  end)

  it("is edited, and the one before stays", function()
    local before = sdd:text()
    local s = sdd:move("load", { first = true }):insert({ "lookup" }, { after = "zero_grad" }):retime { load = 3,
      to_device = 3 }
      :drop "wait_dist"
    local names = {}
    for i, o in ipairs(s.operations) do names[i] = o.name .. o.ahead end
    assert.same({ "load3", "zero_grad0", "lookup0", "input_dist1", "to_device3", "forward0", "backward0",
      "optimizer0" }, names)
    assert.equals(before, sdd:text())
    assert.not_equals(sdd:hash(), s:hash())
    assert.equals(sdd:hash(), sdd:move("load", { last = true }):move("load", { before = "to_device" }):hash())
    assert.equals(4, s:with { depth = 4 }:check().depth)
    refused("schedule 'sparse_dist' has no operation 'lookup', but zero_grad, input_dist, load, to_device, forward, "
      .. "wait_dist, backward, optimizer", sdd.move, sdd, "lookup", { first = true })
  end)

  it("has the hash of its text", function() -- FNV-1a of "", "a" and "foobar" from its authors' tables
    assert.equals("cbf29ce484222325", Schedule._hash_of {})
    assert.equals("f80c2942b22a23a9", Schedule._hash_of { { "foo", "bar" }, { "a", "b" } }) -- of "foo: bar\na: b"
    assert.equals(Schedule._hash_of(sdd:facts()), sdd:hash())
  end)
end)

describe("a schedule is refused", function()
  it("whose fields were assigned to", function()
    local function assigned(text, change)
      local s = sdd:called "x"
      change(s)
      text = ("schedule 'x': its %s; a Schedule stays as it is: with, set, move, insert, drop and retime make new "
        .. "ones"):format(text)
      refused(text, s.check, s)
      refused(text, s.with, s, { depth = 9 })
    end
    assigned("depth was assigned to, and is 1", function(s) s.depth = 1 end)
    assigned("schedule was assigned to, and is y", function(s) s.name = "y" end)
    assigned("staleness of tables was assigned to, and is 1", function(s) s.staleness.tables = 1 end)
    assigned("ahead of 'load' was assigned to, and is 3", function(s) s.operations[3].ahead = 3 end)
    assigned("order of operations was assigned to, and is zero_grad, input_dist, load, to_device, forward, wait_dist, "
      .. "backward", function(s) table.remove(s.operations) end)
  end)

  it("for what its table says", function()
    refused("Schedule: no argument 'ahead'; allowed: depth, flush, grad, live, name, staleness", Schedule,
      { ahead = 1 })
    refused("schedule 's': no operation 'lokup'; allowed: load, to_device, input_dist, wait_dist, prefetch, lookup, "
      .. "receive, forward, send, zero_grad, receive_grad, backward, send_grad, wait_grads, update, sync, optimizer, "
      .. "or one with run = function(context, pipeline)",
      Schedule, { name = "s", { "lokup" } })
    refused("schedule 's': two operations are called 'forward', at places 1 and 2; give one a name", Schedule,
      { name = "s", { "forward" }, { "forward" } })
    refused("schedule 's': operation 'load': ahead is 1.5, allowed: whole numbers -16..16", Schedule, { name = "s",
      { "load", ahead = 1.5 } })
    refused("schedule 's': operation 'mine': posts is 'dense', allowed: own1 to own11, channels of schedules", Schedule,
      { name = "s", { "mine", run = print, posts = "dense" } })
    refused("schedule 's': operation 'load': on is 3, wanted the name of a stream, such as 'main'", Schedule,
      { name = "s", { "load", on = 3 } })
    refused("schedule 'sparse_dist': where has after and before, allowed: one of first, last, before, after", sdd.move,
      sdd, "load", { before = "forward", after = "zero_grad" })
    refused("schedule 'sparse_dist': 'load' is to be moved before or after itself", sdd.move, sdd, "load",
      { after = "load" })
    refused("schedule 's': operation 'load': name is \"a\\\nb\", wanted a line of text", Schedule, { name = "s",
      { "load", name = "a\nb" } })
    refused("schedule 's': operation 'load' is one of the library, and cannot have 'run'", Schedule, { name = "s",
      { "load", run = print } })
    -- any order
    for field, value in pairs { needs = {}, makes = {}, reads = "dense", changes = { "dense" }, posts = { "own1" } } do
      refused(("schedule 'sparse_dist': operation 'forward' is one of the library, and cannot have '%s'"):format(field),
        sdd.set, sdd, { forward = { [field] = value } })
    end
    peri.pipeline.register("spec_registered", { run = print })
    refused("schedule 's': operation 'spec_registered' has what it was registered with, and cannot have 'reads'",
      Schedule, { name = "s", { "spec_registered", reads = { "tables" } } })
    for what, name in pairs { ["5"] = 5, ['"a\\\nb"'] = "a\nb", ['""'] = "" } do -- any order
      refused(("Schedule: name is %s, wanted a line of text"):format(what), sdd.with, sdd, { name = name })
    end
  end)

  it("for batches on which an operation never acts", function()
    local function own(fields)
      fields[1], fields.run = "own", print
      return sdd:insert(fields)
    end
    local text = "schedule 'sparse_dist': operation 'own': it acts on no batch: those from %d (from_step) on and "
      .. "before %d (until_step)%s are none"
    refused(text:format(5, 3, ""), own, { from_step = 5, until_step = 3 })
    refused(text:format(5, 5, ""), own, { from_step = 5, until_step = 5 })
    refused(text:format(0, 0, ""), own, { until_step = 0 })
    refused(text:format(4, 7, " with b % 4 == 3 (every, at)"), own, { from_step = 4, until_step = 7, every = 4 })
    own { from_step = 5, until_step = 6 }:check()
    own { from_step = 4, until_step = 8, every = 4 }:check()
  end)

  it("for what misses", function()
    check_refuses("it has no operation 'load'", Schedule { { "forward" } })
    check_refuses("it has no operation 'forward'", Schedule { { "load", ahead = 1 } })
    check_refuses("'wait_dist' (ahead 1, place 5) needs 'sent' of its batch, which no operation makes",
      sdd:drop "input_dist")
    check_refuses("'optimizer' (ahead 0, place 7) needs 'grad' of its batch, which no operation makes",
      sdd:drop "backward")
  end)

  it("for an order that cannot be", function()
    check_refuses("'wait_dist' (ahead 1, place 1) needs 'sent' of its batch before 'input_dist' (ahead 1, place 3) "
      .. "makes it: it would wait for ever (deadlock)", sdd:move("wait_dist", { first = true }))
    check_refuses("'forward' (ahead 0, place 2) needs 'ids' of its batch before 'wait_dist' (ahead 0, place 6) makes "
      .. "it", sdd:retime { wait_dist = 0 }:move("forward", { before = "input_dist" }))
    check_refuses("'input_dist' (ahead 3, place 2) acts on a batch that 'load' (ahead 2, place 3) has not loaded yet",
      sdd:retime { input_dist = 3 })
    check_refuses("'optimizer' (ahead 0, place 7) needs 'grad' of its batch before 'backward' (ahead 0, place 8) "
      .. "makes it", sdd:move("optimizer", { before = "backward" }))
    check_refuses("'forward' (ahead 0, place 5) needs 'batch' of batch 0, which 'to_device' (ahead 2, place 4) does "
      .. "not make for every batch",
      sdd:set { to_device = { every = 2 }, input_dist = { every = 2 }, wait_dist = { every = 2 } })
    check_refuses("'lookup' (ahead 0, place 1) and 'again' (ahead 0, place 2) both make 'rows' of batch 0",
      schedules.fused_sparse_dist:insert({ "lookup", name = "again" }, { after = "lookup" }))
  end)

  it("for gradients that are lost, old or taken twice", function()
    check_refuses("'zero_grad' (ahead 0, place 7) drops the grads of batch 0, of 'backward' (ahead 0, place 6), "
      .. "before 'optimizer' (ahead 0, place 8) has applied them", sdd:move("zero_grad", { after = "backward" }))
    check_refuses("'optimizer' (ahead 0, place 7) applies the grads of batch 0, of 'backward' (ahead 0, place 6), a "
      .. "second time: no 'zero_grad' has dropped them", sdd:drop "zero_grad")
    check_refuses("'optimizer' (ahead 0, place 8) changes dense between 'forward' (ahead 1, place 6) and 'backward' "
      .. "(ahead 0, place 7) of batch 1",
      sdd:retime { forward = 1 }:move("input_dist", { first = true }):move("wait_dist", { after = "input_dist" })
      :with { staleness = { tables = 1, dense = 1 } })
    check_refuses("'optimizer' (ahead -1, place 6) changes dense between 'forward' (ahead 0, place 4) and 'backward' "
      .. "(ahead 0, place 8) of batch 1", sdd:retime { optimizer = -1, zero_grad = -1 }:move("zero_grad",
        { after = "optimizer" })
      :move("backward", { last = true }):with { depth = 4 })
    -- The end of the data is known to a group's last operation only if the next batch was asked for before it.
    local late = schedules.accumulate(2):drop("input_dist", "wait_dist", "to_device"):move("load", { first = true },
      { ahead = 0 })
    check_refuses("the grads of batch 0, of 'backward' (ahead 0, place 5), are never applied by 'optimizer' (ahead 0, "
      .. "place 7) when there are 1 batches", late)
  end)

  it("for gradients that nobody applies, unless an operation of one's own reads them", function()
    check_refuses("'zero_grad' (ahead 0, place 3) drops the grads of batch 0, of 'backward' (ahead 0, place 5), which "
      .. "nobody has applied: there is no 'optimizer', nor an operation of one's own that reads grads; where they are "
      .. "not wanted, leave out 'zero_grad' too", schedules.base:drop("optimizer"))
    schedules.base:drop("optimizer", "zero_grad"):check()
    schedules.base:drop("optimizer"):insert({ "mine", run = print, reads = { "grads" } },
      { after = "backward" }):check()
    check_refuses("'mine' (ahead 0, place 5) reads or changes grads, of which there are none when it acts: 'backward' "
      .. "(ahead 0, place 6) makes them, and 'zero_grad' (ahead 0, place 3) drops them",
      schedules.base:insert({ "mine", run = print, reads = { "grads" } }, { before = "backward" }))
  end)

  it("for gradients whose averages nobody has waited for", function()
    local s = schedules.wire_first
    check_refuses("'optimizer' (ahead 0, place 9) reads grads of batch 0 before 'wait_grads' (ahead 0, place 10) has "
      .. "waited for their averages", s:move("wait_grads", { last = true }))
    check_refuses("'backward' (ahead 0, place 5) makes grads of batch 1 before 'wait_grads' (ahead -1, place 6) has "
      .. "waited for the averages of batch 0",
      s:retime { wait_grads = -1, optimizer = -1, zero_grad = -1 }:move("forward", { first = true })
      :move("zero_grad", { last = true }):with { depth = 4, staleness = { dense = 1 } }:move("wait_grads",
        { after = "backward" })
      :move("lookup", { last = true }):move("optimizer", { before = "zero_grad" }))
    check_refuses("'wait_grads' (ahead 0, place 9) must act on every batch", s:set { wait_grads = { every = 2 } })
    check_refuses("'wait_grads' (ahead 0, place 10): averages are taken, and waited for, by 'update' (ahead 0, place "
      .. "7)", s:insert({ "update" }, { after = "backward" }))
    check_refuses("'zero_grad' (ahead 0, place 8) drops the grads of batch 0, of 'backward' (ahead 0, place 5), "
      .. "before 'wait_grads' (ahead 0, place 9) has waited for their averages",
      s:drop("optimizer"):move("zero_grad", { before = "wait_grads" }))
    refused("schedule 'wire_first': 'lookup' (ahead 1, place 8) reads dense without the last 1 update, which "
      .. "'optimizer' (ahead 0, place 10) makes later: staleness 1, the schedule allows 0", s.check, s,
      { dense_tables = true })
  end)

  it("for an operation of one's own on gradients whose averages have not come", function()
    local kept = schedules.accumulate(2)
    for _, what in ipairs { "reads", "changes" } do
      local own = { "clip", run = print, [what] = { "grads" } }
      check_refuses(("'clip' (ahead 0, place 7) %s grads of batch 0, of 'backward' (ahead 0, place 6), before "
        .. "'wait_grads' (ahead 0, place 10) has waited for their averages"):format(what),
          schedules.wire_first:insert(own, { after = "backward" }))
      check_refuses(("'clip' (ahead 0, place 8) %s grads of batch 0, of 'backward' (ahead 0, place 7), before "
        .. "'update' (ahead 0, place 9) has averaged them"):format(what), kept:insert(own, { after = "backward" }))
      own.every = 2
      kept:insert(own, { after = "update" }):check()
      -- In every other place of either schedule gradients are those of all ranks; from zero_grad to backward there are
      -- none to find.
      for _, s in ipairs { schedules.wire_first, schedules.sparse_dist } do
        local within
        for i, o in ipairs(s.operations) do
          local edited = s:insert({ "clip", run = print, [what] = { "grads" } }, { before = o.name })
          assert.equal(not within, (pcall(edited.check, edited)), ("%s, place %d"):format(s.name, i))
          if o.kind == "backward" then within = s == schedules.wire_first
          elseif o.kind == "wait_grads" then within = false
          elseif o.kind == "zero_grad" then within = true end
        end
      end
    end
  end)

  it("for an operation of one's own that changes the dense part between the passes of a batch, or reads what nobody "
    .. "changes", function()
    local function with(where, fields)
      fields[1], fields.run = "clip", function() end
      return schedules.sparse_dist:insert(fields, where)
    end
    check_refuses("'clip' (ahead 0, place 7) changes dense between 'forward' (ahead 0, place 6) and 'backward' (ahead "
      .. "0, place 8) of batch 0", with({ after = "forward" }, { changes = { "dense" } }))
    assert.is_table(with({ after = "optimizer" }, { changes = { "dense" } }):check())
    assert.is_table(with({ last = true }, { reads = { "dense" } }):check())
    check_refuses("'clip' (ahead 0, place 10) reads 'tabels', which no operation changes; the library has source, "
      .. "cache, tables, table_grads, grads, dense",
      with({ last = true }, { reads = { "tabels" } }))
    check_refuses("'clip' (ahead 0, place 10) changes 'tabels', which no other operation reads or changes; the "
      .. "library has source, cache, tables, table_grads, grads, dense",
      with({ last = true }, { changes = { "tabels" } }))
    assert.is_table(with({ last = true }, { reads = { "count" }, changes = { "count" } }):check())
    assert.is_table(with({ last = true }, { reads = { "average" } }):insert({ "mean", run = function() end,
      changes = { "average" } }, { first = true }):check())
    assert.error_matches(function() with({ last = true }, { posts = "own12" }) end,
      "posts is 'own12', allowed: own1 to own11")
    assert.is_table(with({ last = true }, { posts = "own11" }):check())
  end)

  it("for rows that are looked up before an operation of one's own has changed the tables", function()
    local function with(s, where, fields)
      fields[1], fields.run, fields.changes = "decay", function() end, { "tables" }
      return s:insert(fields, where)
    end
    local ahead = schedules.semi_sync(0)
    local behind = with(ahead, { last = true }, { ahead = -1 })
    assert.equal(1, with(ahead, { last = true }, {}):check().staleness.tables) -- as old as what backward does
    check_refuses("'lookup' (ahead 1, place 5) reads tables without the last 2 updates, which 'decay' (ahead -1, "
      .. "place 10) makes later: staleness 2, the schedule allows 1", behind)
    assert.equal(2, behind:with { depth = 5, staleness = { tables = 2 } }:check().staleness.tables)
    check_refuses("'lookup' (ahead 0, place 1) reads tables without the last 1 update, which 'decay' (ahead -1, place "
      .. "10) makes later: staleness 1, the schedule allows 0",
      with(schedules.sparse_dist, { last = true }, { ahead = -1 }))
    assert.equal(0, with(schedules.sparse_dist, { last = true }, {}):check().staleness.tables)
    -- before the lookup of its batch
    assert.equal(0, with(schedules.base, { first = true }, { every = 3 }):check().staleness.tables)
    check_refuses("'lookup' (ahead 0, place 1) reads tables for batch 0, when 'decay' (ahead 2, place 10) has already "
      .. "changed them with batch 1", with(schedules.sparse_dist, { last = true }, { ahead = 2 }))
  end)

  it("for averages over replicas that come too late", function()
    local s = schedules.prefetch_fused_2d(1)
    assert.same({ 0, 0 }, { s:check().staleness.tables, s:check().staleness.dense })
    check_refuses("'backward' (ahead 0, place 8) changes tables with batch 1 before 'sync' (ahead -1, place 11) has "
      .. "averaged them after batch 0", s:move("sync", { last = true }, { ahead = -1 }):with { depth = 4 })
    check_refuses("'lookup' (ahead 1, place 8) reads tables without the last 1 update, which 'sync' (ahead 0, place "
      .. "11) makes later: staleness 1, the schedule allows 0",
      s:move("lookup", { after = "backward" }, { ahead = 1 }):move("sync", { last = true }))
  end)

  it("for promises that it does not keep", function()
    check_refuses("4 batches are in flight from 'load' (ahead 3, place 3) to 'optimizer' (ahead 0, place 8), the "
      .. "schedule allows 3 (depth)", sdd:retime { load = 3, to_device = 3 })
    check_refuses("2 batches have 'rows' at once, from 'lookup' (ahead 1, place 2) to 'forward' (ahead 0, place 3), "
      .. "the schedule allows 1 (live)",
      schedules.semi_sync(0):move("lookup", { before = "forward" }):with { live = { rows = 1 } })
  end)
end)
