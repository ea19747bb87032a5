-- plans.lua: `perilune plan`: a model's file and a machine in, a plan, its reasons and its picture out.
local P = require "perilune.ffi"
local errors = require "perilune.errors"
local util = require "perilune.util"
local plan = require "perilune.plan"
local topologies = require "perilune.plan.topology"
local text = require "perilune.text"
local Progress = require "perilune.progress"

local M = {}

local MOST_SIMULATED = 65536 -- ranks

--- What an error says, behind "perilune: ".
local function said(err) return (errors.describe(err):gsub("^perilune plan", "plan")) end

local function lines(stream, list) stream:write(table.concat(list, "\n"), "\n") end

--- f(x), whose errors tell where they are from.
local function within(where, f, x)
  local ok, result = pcall(f, x)
  if ok then return result end
  if getmetatable(result) == P.Error then result.message = ("%s: %s"):format(where, result.message) end
  error(result, 0)
end

--- What a model's file says: the model (plan/describe.lua), or { model =, constraints =, relations =, cost =, objective
--- = }. Returns the described model and a table of the rest.
local function load_model(path)
  local chunk, err = loadfile(path)
  if not chunk then
    local message, place = errors.syntax(err)
    P.fail(("perilune plan: %s%s"):format(message, place and (" (%s)"):format(place) or ""))
  end
  local given, rest = errors.run(chunk), {}
  if type(given) == "table" and rawget(given, "model") ~= nil then
    rest = util.named(("'%s' returns a table"):format(path), given,
      { model = util.required, constraints = util.optional.table, relations = util.optional.list, cost = util.optional,
        objective = util.optional })
    given = rest.model
  elseif type(given) == "table" and getmetatable(given) == nil then
    for _, name in ipairs { "constraints", "relations", "cost", "objective" } do
      if given[name] ~= nil then
        P.fail(("'%s': %s stands beside the model: return { model = { tables = ... }, %s = ... }"):format(path, name,
          name))
      end
    end
  end
  local constraints = {}
  for name, c in util.ordered(rest.constraints or {}) do
    constraints[name] = plan.ParameterConstraints.is(c) and c
      or within(("'%s': constraints of table '%s'"):format(path, tostring(name)), plan.ParameterConstraints, c)
  end
  local model = within(("'%s'"):format(path), plan.describe.of, given)
  if #model == 0 then
    P.fail(("'%s': the model has no collections of tables: there is nothing to plan"):format(path))
  end
  require("perilune.plan.constraints").check(("'%s'"):format(path), constraints, model)
  return model, { constraints = constraints, relations = rest.relations, cost = rest.cost, objective = rest.objective }
end

--- The tables that the demonstration makes of data: one for each category.
local function tables_for_data(options)
  local tables = {}
  for i = 1, 26 do
    tables[i] = { name = "t_c" .. i, num_embeddings = options.rows or 100000, embedding_dim = options.dim or 32,
      feature_names = { "c" .. i } }
  end
  return plan.describe.of { tables = tables, optimizer = "adagrad" }
end

--- Count what data say of the features of a model. A line tells how far it is.
local function counted(options, model, stream)
  local progress
  local function show(done, all)
    if not progress then
      progress = Progress { total = math.max(options.samples and math.min(options.samples, all) or all, 1),
        samples_per_step = 1, stream = stream, delay = 0.5 }
      function progress:line(step) return self:bar(step, "reading " .. options.data) end
    end
    progress:update(math.min(done, progress.total))
  end
  local ok, statistics = xpcall(plan.statistics.count, errors.locate,
    { path = options.data, tables = plan.statistics.tables_of(model), batch_size = options.batch_size,
      samples = options.samples, progress = show })
  if progress then progress:close() end
  if not ok then error(statistics, 0) end
  return statistics
end

--- What is planned for: { model =, rest = of the model's file, statistics = of data or nil }.
local function given(options, stream)
  local g = {}
  if options.model then
    g.model, g.rest = load_model(options.model)
  else
    g.model, g.rest = tables_for_data(options), {}
  end
  if options.data then
    g.statistics = counted(options, g.model, stream)
    lines(stream, { ("%s: %s samples"):format(options.data, Progress.grouped(g.statistics[1].samples)),
      unpack(plan.report._columns(plan.statistics._cells(g.statistics),
        { false, false, true, true, true, true, true, true })) })
  end
  return g
end

--- A planner for so many ranks (nil: as the machine has), which has planned, its plan, and a line that says of what
--- machine, where the user has named none.
local function planned(options, g, ranks)
  local topology, which = plan.report._topology(options.topology, ranks)
  if options.memory then
    local args, cap = topology:arguments(), topology:own_tier() .. "_cap"
    local of_ranks = util.copy(args.custom_topology_data or {})
    args[cap], of_ranks[cap] = util.bytes("perilune plan: --memory", options.memory), nil
    args.custom_topology_data = next(of_ranks) and of_ranks or nil
    topology = plan.Topology(args)
  end
  local constraints = g.rest.constraints
  if g.statistics then
    constraints = plan.statistics.constrain(g.statistics, g.model, constraints, topology.world_size)
  end
  local planner = plan.EmbeddingShardingPlanner { topology = topology, batch_size = options.batch_size,
    constraints = constraints, relations = g.rest.relations, cost = g.rest.cost, objective = g.rest.objective,
    sharder = plan.perilune_sharder, estimates = topology.costs and "step" or "torchrec" }
  return planner, planner:plan(g.model), which
end

--- "8,64,512" -> { 8, 64, 512 }.
local function scale_of(list)
  local out = {}
  for part in (list .. ","):gmatch "([^,]*)," do
    if part == "" then P.fail(("perilune plan: --scale '%s', wanted numbers of ranks: 8,64,512"):format(list)) end
    out[#out + 1] = util.integer("perilune plan", "--scale", tonumber(part) or part, 1, MOST_SIMULATED)
  end
  return out
end

--- What options ask to simulate: { schedule =, times =, scale = }; nil: nothing.
local function asked(options)
  if not options.simulate then
    if not (options.trace or options.scale or options.times) then return nil end
    P.fail "perilune plan: --trace, --scale and --times go with --simulate SCHEDULE"
  end
  local schedule = require("perilune.pipeline.schedules").load(options.simulate)
  local times = options.times and require("perilune.launch.schedules").times_of(options.times) or {}
  require("perilune.simulation.simulate").check_times(times, schedule:check())
  return { schedule = schedule, times = times, scale = options.scale and scale_of(options.scale) or {} }
end

--- Times of a schedule's operations: those that are given, and those of the dense part where the machine has prices of
--- it.
local function times_of(what, dense)
  local times = util.copy(what.times)
  for _, o in ipairs(dense and what.schedule:check().operations or {}) do
    if dense[o.name] and not times[o.name] then times[o.name] = dense[o.name] end
  end
  return times
end

--- A line about the dense part of a step.
local function dense_line(dense, precision)
  return ("dense part (%s): %.3g ms a step: forward %.3g, backward %.3g, optimizer %.3g"):format(precision or "highest",
    dense.ms, dense.forward, dense.backward, dense.optimizer)
end

--- Simulate the plan under a schedule, and plans for other numbers of ranks; a table of them, and a timeline of the
--- plan.
local function simulate(options, what, g, planner, stream)
  local cluster = require "perilune.simulation.cluster"
  local dense = plan.dense.predict(g.model, planner.topology, options.batch_size, options.precision)
  local function run(p)
    util.integer("perilune plan", "ranks with --simulate", p.topology.world_size, 1, MOST_SIMULATED)
    return cluster.simulate { planner = p, schedule = what.schedule, times = times_of(what, dense),
      dense_bytes = g.model.dense_bytes }
  end
  local list, machines = { run(planner) }, {}
  if options.trace then
    text.write(options.trace, cluster.trace(list[1]), "perilune plan --trace")
  end
  for _, ranks in ipairs(what.scale) do
    if ranks ~= planner.topology.world_size then
      local other, _, which = planned(options, g, ranks)
      list[#list + 1], machines[#machines + 1] = run(other), which
    end
  end
  if #machines > 0 then lines(stream, machines) end
  table.sort(list, function(a, b) return a.ranks < b.ranks end)
  local right = {}
  for i = 1, 11 do right[i] = true end
  lines(stream, { ("simulated under the schedule '%s'; links in ms on the slowest rank:"):format(what.schedule.name),
    unpack(plan.report._columns(cluster.cells(list), right)) })
  if options.trace then stream:write("timeline in ", options.trace, ": open it in https://ui.perfetto.dev\n") end
end

--- What is wrong with options is said before all the work.
local function check_options(options)
  if not (options.model or options.data) then P.fail "perilune plan: neither a model nor --data; give one of them" end
  if options.samples and not options.data then P.fail "perilune plan: --samples goes with --data FILE" end
  for _, name in ipairs { "rows", "dim" } do
    if options[name] and (options.model or not options.data) then
      P.fail(("perilune plan: --%s goes with --data FILE and no model, which says it of its tables"):format(name))
    end
  end
  if options.save and not (options.save:match "%.plan$" or options.save:match "%.json$") then
    P.fail(("perilune plan: --save '%s', allowed: names that end in .plan or .json; others are read as "
      .. "programs"):format(options.save))
  end
  for _, name in ipairs(options.verify and { "save", "html", "simulate", "times", "scale", "trace" } or {}) do
    if options[name] then
      P.fail(("perilune plan: --%s does not go with --verify, which writes no plan"):format(name))
    end
  end
  local of_path = {}
  for _, name in ipairs { "save", "html", "trace" } do
    local path = options[name]
    if path and of_path[path] then
      P.fail(("perilune plan: --%s and --%s are both '%s'"):format(of_path[path], name, path))
    end
    of_path[path or ""] = name
    if options[name] then text.probe(options[name], "perilune plan --" .. name) end
  end
end

--- The words for options that do not go together, nil if they do.
function M.refusal(options)
  local ok, err = pcall(check_options, options)
  return not ok and said(err) or nil
end

--- options: { model = path or nil (with data), data = path, samples =, rows =, dim =, topology = name or path, ranks =,
--- batch_size =, save = path, html = path, no_reasons =, simulate = a schedule, times =, scale =, trace = path }.
--- Prints; returns an exit code. An error is one line.
function M.run(options, stream)
  stream = stream or io.stdout
  local ok, err = xpcall(function()
    check_options(options)
    local what, g = asked(options), given(options, stream)
    local planner, plan_made, which = planned(options, g, options.ranks)
    lines(stream, plan.report.lines(planner))
    if which then lines(stream, { which }) end
    local dense = plan.dense.predict(g.model, planner.topology, options.batch_size, options.precision)
    if dense then lines(stream, { dense_line(dense, options.precision) })
    elseif options.precision then
      P.fail("perilune plan: --precision goes with a machine that has prices of the dense part, and with a model's "
        .. "module or matrices")
    end
    local why = not options.no_reasons and plan.report._reasons(planner, g.model) or nil
    if why then lines(stream, plan.report._reason_lines(why, #planner.last.best.proposal)) end
    if options.save then
      plan.save(plan_made, options.save, ("perilune plan %s"):format(options.model or "--data " .. options.data))
      stream:write("kept in ", options.save, "\n")
    end
    if options.html then
      text.write(options.html, plan.html.page(planner, { title = options.model or options.data, reasons = why }),
        "perilune plan --html")
      stream:write("drawn in ", options.html, "\n")
    end
    if what then simulate(options, what, g, planner, stream) end
  end, errors.locate)
  if ok then return 0 end
  io.stderr:write("perilune: ", said(err), "\n")
  return 1
end

--- Where --verify runs the steps of a topology's plans: nil, on the processor; else the name of a device, PERI_DEVICE
--- or the first GPU. An error if that is not here.
local function device_of(topology)
  if topology.compute_device == "cpu" then return nil end
  local device = P.state.device ~= "cpu" and P.state.device or topology.compute_device
  local ok, err = pcall(P.device, device)
  if ok then return device end
  P.fail(("plan --verify: the topology is of GPUs, and its steps run on one, but here: %s"):format(said(err)))
end

--- Ranks that --verify runs on: those that are asked for, else those of a topology that is named; nil: one. An error if
--- these cannot run here.
function M.ranks(options)
  if not options.topology then return options.ranks end
  local topology = plan.report._topology(options.topology, options.ranks)
  device_of(topology)
  return options.ranks or topology.world_size
end

--- The topology that --verify goes by, and the device of its steps (nil: the processor): one that is named, or what was
--- measured of these ranks of PERI_DEVICE.
local function verified_topology(options, n, host)
  if options.topology then
    local topology = plan.report._topology(options.topology, options.ranks)
    return topology, device_of(topology)
  end
  local device = P.state.device ~= "cpu" and P.state.device or nil
  local topology = plan.Topology.kept(n, host, device and topologies.device_kind(device))
  if topology then return topology, device end
  P.fail(("plan --verify: nothing was measured of %d ranks, %d a host; run: perilune calibrate -n %d%s"):format(n, host,
    n, device and " --device " .. device or ""))
end

--- plan --verify: a rank's part. Prints on rank 0.
function M.verify(options)
  local peri = require "perilune"
  local world = peri.init()
  local n, host = world:size(), world.local_size
  local topology, device = verified_topology(options, n, host)
  if device then peri.dist.use_device(device) end
  if topology.world_size ~= n or topology.local_world_size ~= host then
    P.fail(("plan --verify: the topology has %d ranks, %d a host; here are %d and %d"):format(topology.world_size,
      topology.local_world_size, n, host))
  end
  local threads = P.C.peri_threads()
  if topology.threads and topology.threads ~= threads then
    P.fail(("plan --verify: the topology was measured with PERI_NUM_THREADS=%d, here a rank has %d threads; run with "
      .. "as many, or: perilune calibrate -n %d -t %d"):format(topology.threads, threads, n, threads))
  end
  local g = given(options, world:rank() == 0 and io.stdout or { write = function() end })
  local constraints = g.rest.constraints
  for _, t in ipairs(require("perilune.plan.constraints").left_out(constraints, g.model, topology.compute_device)) do
    P.fail(("plan --verify: table '%s' is left out by its constraint device_group = '%s': steps of its model need "
      .. "it"):format(t.fqn, t.device_group))
  end
  if g.statistics then constraints = plan.statistics.constrain(g.statistics, g.model, constraints, n) end
  local planner = plan.EmbeddingShardingPlanner { topology = topology, batch_size = options.batch_size,
    constraints = constraints, relations = g.rest.relations, cost = g.rest.cost, objective = g.rest.objective,
    sharder = plan.perilune_sharder, estimates = topology.costs and "step" or "torchrec" }
  local made = planner:collective_plan(g.model, world)
  local verify = require "perilune.launch.verify"
  local entry = verify.compare({ { plan = made } },
    { model = g.model, topology = topology, batch_size = options.batch_size, constraints = constraints, group = world,
      device = device, seconds = 3 })[1]
  if world:rank() ~= 0 then return end
  lines(io.stdout, plan.report.lines(planner))
  if not topology.costs then
    print(("the topology has no measured prices: predictions compare plans, and are no times of this machine; "
      .. "perilune calibrate -n %d%s measures them"):format(n, device and " --device " .. device or ""))
  end
  lines(io.stdout, verify.lines(entry))
end

return M
