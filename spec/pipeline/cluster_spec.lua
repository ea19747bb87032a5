-- Plans and schedules on ranks that are not there: what is exchanged, what a step takes, the table and the timeline.
local peri = require "perilune"
local json = require "dkjson"
local shell = require "spec.support.shell"
local simulate = require "perilune.simulation.simulate"
local traffic = require "perilune.simulation.traffic"
local plan, cluster, schedules = peri.plan, peri.pipeline.cluster, peri.pipeline.schedules

local function planner_of(args)
  local model = plan.describe.of { tables = args.tables, optimizer = "rowwise_adagrad", kind = args.kind }
  local planner = plan.EmbeddingShardingPlanner { topology = args.topology, batch_size = args.batch_size or 64,
    constraints = args.constraints, sharder = plan.perilune_sharder, max_placements = args.max_placements or 1e5 }
  planner:plan(model)
  return planner
end

local function pinned(kinds)
  local tables, constraints = {}, {}
  for i, kind in ipairs(kinds) do
    tables[i] = { name = "t" .. i, num_embeddings = 1000 * i + 3, embedding_dim = 256 }
    constraints["t" .. i] = plan.ParameterConstraints { sharding_types = { kind }, pooling_factors = { i },
      output_dtype = "FP16" }
  end
  return tables, constraints
end

describe("a simulated exchange", function()
  -- By hand: two operations, an exchange between them.
  local schedule = peri.Schedule { name = "two", grad = false, { "load" }, { "forward" } }
  local function by_rank(link) -- lists count from 0
    local out = {}
    for i, x in ipairs(link) do out[i - 1] = x end
    return out
  end

  it("begins when the last rank comes, and ends when the slowest link is done", function()
    local r = simulate.run(schedule:check(), { ranks = 3, steps = 1,
      work = function(o, rank)
        return o.kind == "load" and {} or { { "run", ({ 1, 5, 2 })[rank + 1] }, { "post", "x" }, { "wait", "x" },
          { "run", 1 } }
      end,
      links = function() return { { name = "wire", ms = by_rank { 2, 0, 3 } }, latency = 0.5 } end })
    for rank = 0, 2 do assert.equal(5 + 3 + 0.5 + 1, r.to[rank * #r.list + 1]) end
    assert.same({ 2, 6, 3 }, { r.busy[0], r.busy[1], r.busy[2] })
  end)

  it("waits for a link that is busy, and leaves the processor to others meanwhile", function()
    local both = peri.Schedule { name = "both", grad = false, { "load" }, { "to_device", on = "copy" }, { "forward" } }
    local r = simulate.run(both:check(), { ranks = 1, steps = 1, shown = { [0] = true },
      work = function(o)
        if o.kind == "load" then return {} end
        if o.kind == "to_device" then return { { "post", "a" }, { "post", "b" }, { "run", 4 } } end
        return { { "wait", "b" }, { "run", 1 } }
      end,
      links = function() return { { name = "wire", ms = { [0] = 3 } } } end })
    -- a: 0..3, b: 3..6; the processor: 0..4, then the forward pass after both
    assert.equal(7, r.to[2])
    local spans = {}
    for i, c in ipairs(r.exchanges) do spans[i] = { c.name, c.spans[1].from, c.spans[1].to } end
    assert.same({ { "a", 0, 3 }, { "b", 3, 6 } }, spans)
  end)

  it("that never ends is an error", function()
    assert.error_matches(function()
      simulate.run(schedule:check(), { ranks = 2, steps = 1, links = function() return {} end,
        work = function(_, rank) return rank == 0 and { { "post", "x" }, { "wait", "x" } } or {} end })
    end, "schedule 'two' comes to a stop after 2 of 4 operations")
  end)
end)

describe("traffic", function()
  it("is what pairs of ranks send each other", function()
    local kinds = { "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "data_parallel" }
    local tables, constraints = pinned(kinds)
    local W, L, B = 8, 4, 64
    local topology = plan.Topology { world_size = W, local_world_size = L, compute_device = "cuda",
      intra_host_latency = 0.25, inter_host_latency = 0.5 }
    local planner = planner_of { tables = tables, constraints = constraints, topology = topology, batch_size = B }
    local got, best = traffic.traffic_of_plan(planner, 1000), planner.last.best
    local sent = { ids = {}, rows = {} }
    for a = 0, W - 1 do sent.ids[a], sent.rows[a] = {}, {} end
    local function add(what, from, to, bytes)
      if from ~= to then sent[what][from][to] = (sent[what][from][to] or 0) + bytes end
    end
    local replicated = 1000
    for i, option in ipairs(best.proposal) do
      local length, kind, ranks = option.input_lengths[1], option.sharding_type, best.placement[i]
      if kind == "data_parallel" then replicated = replicated + option.rows * option.dim * 4 else
        for k, shard in ipairs(option:shards()) do
          local q = ranks == true and k - 1 or ranks[k]
          for r = 0, W - 1 do
            add("ids", r, q, B * length * shard.rows / option.rows * 4 + B * 4) -- and lengths
            if kind ~= "table_row_wise" then add("rows", q, r, B * shard.cols * 2)
            -- parts of sums
            elseif math.floor(r / L) == math.floor(q / L) then add("rows", q, r, W * B / L * shard.cols * 2)
            else add("rows", q, r, B / L * shard.cols * 2) end -- sums of the host, of this rank's share of the samples
          end
        end
      end
    end
    for _, what in ipairs { "ids", "rows" } do
      local of_host = {} -- out and in, of all ranks of a host: they share its link
      for r = 0, W - 1 do
        local near, far = { 0, 0 }, of_host[math.floor(r / L)] or { 0, 0 }
        of_host[math.floor(r / L)] = far
        for s = 0, W - 1 do
          local to = math.floor(r / L) == math.floor(s / L) and near or far
          to[1], to[2] = to[1] + (sent[what][r][s] or 0), to[2] + (sent[what][s][r] or 0)
        end
        local links = got.links[what]
        local function close(a, b)
          assert.is_true(math.abs(a - b) <= 1e-9 * math.max(b, 1e-9), ("%s %d: %g %g"):format(what, r, a, b))
        end
        close(links[1].ms[r] * topology.intra_host_bw, math.max(near[1], near[2]))
        assert.equal(0.5, links.latency)
      end
      for r = 0, W - 1 do
        local far = of_host[math.floor(r / L)]
        local ms = math.max(far[1], far[2]) / (L * topology.inter_host_bw)
        assert.is_true(math.abs(got.links[what][2].ms[r] - ms) <= 1e-9 * ms, ("%s %d"):format(what, r))
      end
    end
    local dense = got.links.dense
    assert.is_true(math.abs(dense[1].ms[3] * topology.intra_host_bw / (2 * replicated * 3 / 4) - 1) < 1e-9)
    assert.is_true(math.abs(dense[2].ms[3] * topology.inter_host_bw / (2 * replicated / 4 / 2) - 1) < 1e-9)
  end)
end)

describe("a simulated step", function()
  local tables, constraints = pinned { "table_wise", "row_wise", "column_wise", "data_parallel" }

  it("of one rank is the sum of its work, of several no less than what the busiest does", function()
    local times = { forward = 1, backward = 2, optimizer = 0.5, load = 0.25 }
    local planner = planner_of { tables = tables, constraints = constraints, topology = plan.Topology { world_size = 1,
      compute_device = "cuda" } }
    local work = 0
    for _, option in ipairs(planner.last.best.proposal) do
      for _, shard in ipairs(option:shards()) do work = work + shard.perf.fwd_compute + shard.perf.bwd_compute end
    end
    local on_main = schedules.base:set { load = { on = "main" } } -- not made by threads of the loader
    local one = cluster.simulate { planner = planner, schedule = on_main, times = times }
    assert.is_true(math.abs(one.step_ms - (work + 3.75)) < 1e-9, one.step_ms)
    assert.equal(1, one.imbalance)
    local topology = plan.Topology { world_size = 8, local_world_size = 4, compute_device = "cuda" }
    planner = planner_of { tables = tables, constraints = constraints, topology = topology }
    local plain = cluster.simulate { planner = planner, schedule = schedules.base, times = times, dense_bytes = 2 ^ 20 }
    local overlapped = cluster.simulate { planner = planner, schedule = schedules.sparse_dist, times = times,
      dense_bytes = 2 ^ 20 }
    assert.is_true(overlapped.step_ms < plain.step_ms)
    for _, s in ipairs { plain, overlapped } do
      assert.is_true(s.step_ms >= s.busy_ms and s.busy_ms >= s.mean_busy_ms and s.imbalance >= 1)
      assert.equal(s.step_ms - s.busy_ms, s.exposed_ms)
      assert.is_true(math.abs(s.samples_per_s - 8 * 64 / s.step_ms * 1000) < 1e-6)
    end
    -- What the schedule does not hide is there in full: ids, rows, gradients, and the dense part's reduction behind the
    -- update.
    local links = {}
    for _, link in ipairs(plain.links) do links[link.name] = link.ms end
    assert.is_true(plain.exposed_ms >= links.ids + links.rows + links.grads - 1e-9)
  end)

  it("of every schedule of the library comes to an end", function()
    local planner = planner_of { tables = tables, constraints = constraints, topology = plan.Topology { world_size = 4,
      compute_device = "cuda" } }
    for _, name in ipairs(schedules.names) do
      local schedule = schedules[name]
      if type(schedule) == "function" then schedule = schedule(2) end
      local s = cluster.simulate { planner = planner, schedule = schedule, times = {}, steps = 8 }
      assert.is_true(s.step_ms > 0 and s.step_ms < 1e3, name)
    end
  end)

  it("of 4,096 ranks is found within seconds, and is the same again", function()
    local planner = planner_of { tables = tables, constraints = constraints,
      topology = plan.Topology.preset("dgx_h100_80gb", { world_size = 4096 }), max_placements = 1 }
    local started = os.clock()
    local s = cluster.simulate { planner = planner, schedule = schedules.sparse_dist, steps = 4,
      times = { forward = 1 } }
    assert.is_true(os.clock() - started < 10)
    assert.equal(s.step_ms, cluster.simulate({ planner = planner, schedule = schedules.sparse_dist, steps = 4,
      times = { forward = 1 } }).step_ms)
    assert.equal(64, #s.shown)
  end)

  it("refuses what it cannot simulate", function()
    local planner = planner_of { tables = tables, constraints = constraints, topology = plan.Topology { world_size = 2,
      compute_device = "cuda" } }
    local function refused(words, args)
      local a = { planner = planner, schedule = schedules.base }
      for key, value in pairs(args) do a[key] = value end -- any order
      assert.error_matches(function() cluster.simulate(a) end, words, 1, true)
    end
    refused("planner is none that has planned", { planner = {} })
    refused("schedule is no Schedule", { schedule = {} })
    refused("no operation 'lookup' in schedule 'base'", { times = { lookup = 1 } })
    refused("the time of 'forward' is -1", { times = { forward = -1 } })
    refused("steps is 1, allowed", { steps = 1 })
  end)
end)

--- What the format (Trace Event Format, the JSON object form) asks of every event, told by its phase, and what readers
--- of it ask beyond: ids of processes and threads above 0, complete events of a thread that do not overlap unless one
--- holds the other.
local function check_trace(text)
  local trace, position, why = json.decode(text)
  assert.is_table(trace, why)
  assert.is_true(text:find("^%s*$", position) ~= nil, "text after the object")
  assert.is_true(trace.displayTimeUnit == "ms" or trace.displayTimeUnit == "ns")
  local function whole(e, key, least)
    local x = e[key]
    assert.is_true(type(x) == "number" and x % 1 == 0 and x >= least and x < 2 ^ 31, key .. " of " .. json.encode(e))
  end
  local processes, threads, used = {}, {}, {}
  local metadata = { process_name = { "name", "string" }, thread_name = { "name", "string", true } }
  for _, e in ipairs(trace.traceEvents) do
    assert.is_string(e.name)
    whole(e, "pid", 1)
    if e.ph == "M" then
      local m = assert(metadata[e.name], e.name)
      assert.equal(m[2], type(e.args[m[1]]))
      whole(e, "tid", m[3] and 1 or 0)
      if e.name == "process_name" then
        assert.is_nil(processes[e.pid])
        processes[e.pid] = e.args.name
      elseif e.name == "thread_name" then
        threads[e.pid .. ":" .. e.tid] = e.args.name
      end
    else
      assert.equal("X", e.ph) -- complete events: a beginning and a length in microseconds
      whole(e, "tid", 1)
      for _, key in ipairs { "ts", "dur" } do
        local ns = e[key] * 1000 -- readers keep whole nanoseconds
        assert.is_true(type(e[key]) == "number" and e[key] >= 0 and math.abs(ns - math.floor(ns + 0.5)) < 1e-3, key)
      end
      assert.is_string(e.cat)
      local thread = e.pid .. ":" .. e.tid
      used[thread] = used[thread] or {}
      table.insert(used[thread], { math.floor(e.ts * 1000 + 0.5), math.floor(e.ts * 1000 + 0.5)
        + math.floor(e.dur * 1000 + 0.5), e.name })
    end
  end
  for thread, list in pairs(used) do -- any order
    assert.is_string(threads[thread], thread)
    assert.is_string(processes[tonumber(thread:match "^%d+")])
    table.sort(list, function(a, b) return a[1] < b[1] or a[1] == b[1] and a[2] > b[2] end)
    local open = {}
    for _, span in ipairs(list) do
      while #open > 0 and open[#open][2] <= span[1] do open[#open] = nil end
      assert.is_true(#open == 0 or open[#open][2] >= span[2],
        ("%s overlaps %s"):format(span[3], #open > 0 and open[#open][3] or ""))
      open[#open + 1] = span
    end
  end
  return trace, processes, used
end

describe("a timeline", function()
  it("is Chrome trace JSON whose events of a thread follow one another", function()
    local tables, constraints = pinned { "table_wise", "row_wise", "column_wise" }
    local planner = planner_of { tables = tables, constraints = constraints, topology = plan.Topology { world_size = 4,
      local_world_size = 2, compute_device = "cuda" } }
    local s = cluster.simulate { planner = planner, schedule = schedules.sparse_dist,
      times = { forward = 1 / 3, backward = 2 / 3 } }
    local _, processes, used = check_trace(cluster.trace(s))
    local count = 0
    for _, list in pairs(used) do -- any order
      count = count + 1
      table.sort(list, function(a, b) return a[1] < b[1] or a[1] == b[1] and a[2] < b[2] end)
      for i = 2, #list do assert.is_true(list[i][1] >= list[i - 1][2]) end
    end
    -- four streams (one of them the lane of the loader's threads) and two links of four ranks
    assert.equal(4 * 6, count)
    assert.same({ "rank 0", "rank 1", "rank 2", "rank 3" }, processes)
  end)

  it("keeps the format with every schedule of the library", function()
    local tables, constraints = pinned { "table_wise", "row_wise" }
    local planner = planner_of { tables = tables, constraints = constraints,
      topology = plan.Topology { world_size = 2 } }
    local count = 0
    for name, schedule in pairs(schedules) do -- any order
      if peri.Schedule.is(schedule) then
        count = count + 1
        local text = cluster.trace(cluster.simulate { planner = planner, schedule = schedule })
        assert.is_true(#check_trace(text).traceEvents > 20, name)
      end
    end
    assert.is_true(count >= 5)
  end)

  it("is refused by this check where it is wrong", function()
    local good = '{"traceEvents":[{"name":"process_name","ph":"M","pid":1,"tid":0,"args":{"name":"p"}},'
      .. '{"name":"thread_name","ph":"M","pid":1,"tid":1,"args":{"name":"t"}},'
      .. '{"name":"a","cat":"c","ph":"X","ts":0.5,"dur":2,"pid":1,"tid":1},{"name":"b","cat":"c",'
      .. '"ph":"X","ts":2.5,"dur":1,"pid":1,"tid":1}],"displayTimeUnit":"ms"}'
    check_trace(good)
    for was, is in pairs { -- any order
      ['"ts":2.5'] = '"ts":2.499', ['"dur":2,'] = '"dur":-1,', ['"ph":"X","ts":0.5'] = '"ph":"Z","ts":0.5',
      ['"pid":1,"tid":0'] = '"pid":0,"tid":0', ['"tid":1,"args"'] = '"tid":2,"args"',
      ['"displayTimeUnit":"ms"'] = '"displayTimeUnit":"s"', ['"ts":0.5'] = '"ts":"0.5"',
      ['"args":{"name":"p"}'] = '"args":{}' } do
      local from, to = good:find(was, 1, true)
      assert.is_false((pcall(check_trace, good:sub(1, from - 1) .. is .. good:sub(to + 1))), was)
    end
  end)
end)

-- What MLPerf's tables and steps are made of: DLRM-DCNv2; hotness and rows of its 26 tables, 96 MFLOP of dense
-- mathematics a sample.
local HOTNESS = { 3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1 }
local ROWS = { 4e7, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 4e7, 3067956, 405282, 10, 2209, 11938, 155, 4, 976,
  14, 4e7, 4e7, 4e7, 590152, 12973, 108, 36 }

local function dcn(ranks, batch, flops)
  local tables, constraints = {}, {}
  for i = 1, 26 do
    tables[i] = { name = "t" .. i, num_embeddings = ROWS[i], embedding_dim = 128 }
    constraints["t" .. i] = plan.ParameterConstraints { pooling_factors = { HOTNESS[i] }, output_dtype = "FP16" }
  end
  local planner = planner_of { tables = tables, constraints = constraints, batch_size = batch / ranks,
    max_placements = 2e6, topology = plan.Topology.preset("dgx_h100_80gb", { world_size = ranks }) }
  local ms = 96e6 * batch / ranks / flops * 1000
  return cluster.simulate { planner = planner, schedule = schedules.sparse_dist, dense_bytes = 16e6 * 4,
    times = { forward = ms / 3, backward = 2 * ms / 3 } }
end

describe("published scaling", function()
  it("is as far off as the document says", function()
    local document, n = shell.read "docs/plans.md", 0
    for ranks, batch, published, said in document:gmatch "\n| (%d+) x H100 | ([%d,]+) | ([%d.]+) | ([%d.]+) |" do
      n = n + 1
      local s = dcn(tonumber(ranks), tonumber((batch:gsub(",", ""))), 600e12)
      assert.equal(said, ("%.1f"):format(s.samples_per_s / 1e6), ranks)
      assert.is_true(tonumber(published) < s.samples_per_s / 1e6 and s.samples_per_s / 1e6 < 2.1 * published)
    end
    assert.equal(3, n)
  end)
end)

describe("perilune plan --simulate", function()
  if shell.no_launcher() then return it("waits for the launcher", function() pending(shell.no_launcher()) end) end
  local folder, clean = shell.temporary()
  teardown(clean)
  local model = shell.write(folder .. "/m.lua",
    "return { tables = { { name = 't', num_embeddings = 1e6, embedding_dim = 64 } } }")
  local function run(words) return shell.run(("%s plan %s --no-reasons %s"):format(shell.perilune, model, words)) end

  it("prints a line for each number of ranks, and writes a timeline", function()
    local output, code = run(("--topology dgx_a100_40gb --simulate sparse_dist --times forward=1,backward=2 --scale "
      .. "32,8,16 --trace %s/t.json"):format(folder))
    assert.equal(0, code, output)
    assert.matches("ranks +ms a step.*\n +8 .*\n +16 .*\n +32 ", output)
    assert.is_true(#json.decode(shell.read(folder .. "/t.json")).traceEvents > 100)
  end)

  it("says in a line what is wrong, before it plans", function()
    for words, want in pairs { -- any order
      ["--trace x.json"] = "--trace, --scale and --times go with --simulate SCHEDULE",
      ["--simulate nope"] = "or a name of the library: base, ",
      ["--simulate base --times x=1"] = "no operation 'x' in schedule 'base'",
      ["--simulate base --times forward"] = "--times has 'forward', wanted name=milliseconds",
      ["--simulate base --scale 8,x"] = "--scale is 'x'",
      ["--simulate base --scale 0"] = "--scale is 0, allowed: whole numbers 1..65536",
      ["--simulate base --scale ,"] = "--scale ',', wanted numbers of ranks",
    } do
      local output, code = run(words)
      assert.equal(1, code)
      assert.matches(want, output, 1, true)
      assert.not_matches("1 table on", output, 1, true)
    end
    assert.matches("t.json: No such file", (run("--simulate base --trace no/t.json")), 1, true)
    assert.matches("Topology: 5 ranks of groups of 2", (run("--topology cpu_ethernet_100g --simulate base --scale 5")),
      1, true)
  end)
end)
