-- launch.lua: running a script as one rank, or handing it over to mpirun as many. Used by the launcher's command line
-- (cli.lua).
--
-- A rank that fails prints its message once, ends the group so that no other rank waits for it, and leaves with a
-- non-zero code.
local errors = require "perilune.errors"
local util = require "perilune.util"
local reports = require "perilune.launch.reports"

local M = {}

local GRACE = 25   -- seconds: less than the 30 that Slurm and others leave before they kill
local STOPPED = 75 -- exit code (EX_TEMPFAIL): see launch/job.lua, which gives it to a job

--- Numbers of signals by their names.
local function signals(names)
  local numbers = { SIGUSR1 = 10, SIGUSR2 = 12 }
  local list = {}
  for i, name in ipairs(names or {}) do list[i] = numbers[name] end
  return list
end

-- -- the world around this process ------------------------------------------------------------------------------------

--- Launchers of processes and the variables by which they tell a process its place. Slurm sets SLURM_PROCID in batch
--- scripts too; only a step (srun) of several tasks is a world.
local launchers = {
  { name = "mpirun", size = "OMPI_COMM_WORLD_SIZE", rank = "OMPI_COMM_WORLD_RANK", least = 1 },
  { name = "PMI", size = "PMI_SIZE", rank = "PMI_RANK", least = 1 },
  { name = "srun", size = "SLURM_STEP_NUM_TASKS", rank = "SLURM_PROCID", least = 2 },
}

--- The world that mpirun or srun has put this process in: { size =, rank =, launcher = }; nil when it stands alone.
function M.world()
  for _, l in ipairs(launchers) do
    local size, rank = tonumber(os.getenv(l.size)), tonumber(os.getenv(l.rank))
    if size and rank and size >= l.least then return { size = size, rank = rank, launcher = l.name } end
  end
end

-- -- handing over to mpirun -------------------------------------------------------------------------------------------

--- Variables that ranks on other nodes need too.
local exported = { "LUA_PATH", "LUA_CPATH", "PERI_BLAS", "PERI_CHECKPOINT", "PERI_CHECKPOINT_ASYNC",
  "PERI_CHECKPOINT_EVERY", "PERI_CHECKPOINT_FULL_EVERY", "PERI_CHECKPOINT_KEEP", "PERI_CHECKPOINT_RESUME",
  "PERI_CPU_ISA", "PERI_COMM_TIMEOUT_S", "PERI_LAUNCHER", "PERI_LIBRARY", "PERI_LOG",
  "PERI_LUA_PATH", "PERI_MPI_NEAR", "PERI_NUM_THREADS", "PERI_PLUGIN_PATH", "PERI_PROGRESS", "PERI_TRACEBACK",
  "PERI_TUNE" }

local FILES_PER_RANK = 8     -- pipes and a socket that mpirun holds for a rank of its machine
local MEMORY_PER_RANK = 32   -- MiB: what an empty script needs
local RANKS_PER_CPU = 64
local SEGMENT = 8            -- MiB: twice what Open MPI takes in shared memory for a rank, and its other files

local NETWORKS = "^tcp,openib,usnic,ofi,uct"

local function append(list, ...)
  for i = 1, select("#", ...) do list[#list + 1] = (select(i, ...)) end
end

--- Whether the list `words` (of arguments, or nil) has the word `name`.
local function mentions(words, name)
  for _, word in ipairs(words or {}) do
    if word == name then return true end
  end
  return false
end

--- The mpirun command for a run: a list of arguments.
--- options: ranks, script, arguments (list), hosts, hostfile, bind, mpi (list of further mpirun arguments), traceback,
--- grace (seconds that the script has to stop), stop_on (list of names of signals that ask for it, beside SIGTERM and
--- SIGINT); words: the launcher's command line on every rank, if it is not to run a script.
--- machine: program (of the launcher), cpus, root, peer_memory, ssh, allocation (of a batch system: it may span
--- machines), nodes (Open MPI's own settings name some), folder (of this job, for files of Open MPI's; nil: where it
--- likes), openmpi (facts of its mpirun: launch/openmpi.lua): what is known of this machine.
function M.command(options, machine)
  local c = { "mpirun", "-n", tostring(options.ranks) }
  local remote = options.hosts or options.hostfile
  if machine.root then append(c, "--allow-run-as-root") end
  if options.hosts then append(c, "--host", options.hosts) end
  if options.hostfile then append(c, "--hostfile", options.hostfile) end
  if remote then
    for _, name in ipairs(exported) do
      if os.getenv(name) then append(c, "-x", name) end
    end
  else
    -- Slots are counted in cores, and a container may own less than it sees: the ranks asked for are the ranks wanted.
    append(c, "--oversubscribe")
    if options.ranks > machine.cpus then append(c, "--mca", "mpi_yield_when_idle", "1") end
    if not machine.ssh then append(c, unpack(machine.openmpi.isolated)) end
    -- with threads, mpirun at times never ends when hundreds of ranks are short
    append(c, "--mca", "odls_base_num_threads", "0")
    -- Looking for a network takes Open MPI 0.2 s; shared memory is all that ranks of one machine need.
    local chosen = machine.allocation or os.getenv "OMPI_MCA_pml" or mentions(options.mpi, "pml")
    if not chosen then append(c, "--mca", "pml", "ob1") end
    -- Transports of networks would listen to everybody for the other ranks, which are here.
    local networks = chosen or machine.nodes or os.getenv "OMPI_MCA_btl" or mentions(options.mpi, "btl")
    if not networks then append(c, "--mca", "btl", NETWORKS) end
    -- What Open MPI makes in /tmp and /dev/shm has names that can be guessed: they go into a folder of this job.
    for _, option in ipairs(machine.folder and machine.openmpi.folders or {}) do
      append(c, option[1], option[2], machine.folder)
    end
  end
  append(c, "--bind-to", options.bind or "none") -- ranks share the node's processors among them: see peri_threads
  if not machine.peer_memory then append(c, unpack(machine.openmpi.apart)) end
  append(c, "--mca", "btl_base_warn_component_unused", "0", "--mca", "opal_warn_on_missing_libcuda", "0")
  for _, word in ipairs(options.mpi or {}) do append(c, word) end
  append(c, machine.program)
  if not options.words then
    append(c, "run")
    if options.traceback then append(c, "--traceback") end
    if options.grace then append(c, "--grace", tostring(options.grace)) end
    for _, name in ipairs(options.stop_on or {}) do append(c, "--stop-on", name) end
    append(c, options.script)
  end
  for _, word in ipairs(options.words or options.arguments) do append(c, word) end
  return c
end

local function on_path(program)
  for folder in (os.getenv "PATH" or ""):gmatch "[^:]+" do
    local file = io.open(folder .. "/" .. program)
    if file then
      file:close()
      return true
    end
  end
  return false
end

--- Whether Open MPI gets nodes otherwise than by our options: by its variables, words for mpirun, or its default file.
local function names_nodes(words)
  for _, name in ipairs { "OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile",
    "PRTE_MCA_default_hostfile" } do
    if os.getenv(name) then return true end
  end
  for _, word in ipairs(words or {}) do
    if word:find("host", 1, true) or word == "-H" or word:find("machinefile", 1, true) then return true end
  end
  return ("\n" .. (util.read_file "/etc/openmpi/openmpi-default-hostfile" or "")):find "\n%s*[^%s#]" ~= nil
end

--- What `command` and `refusal` want to know of this machine, whose mpirun is of such facts.
function M.machine(options, facts)
  local launcher = require "perilune.launcher"
  return { openmpi = facts, program = launcher.program, cpus = launcher.cpus(), root = launcher.root(),
    peer_memory = launcher.peer_memory(), ssh = on_path "ssh" or on_path "rsh", memory = launcher.memory(),
    files = launcher.files(100 + FILES_PER_RANK * options.ranks), nodes = names_nodes(options.mpi),
    allocation = os.getenv "SLURM_JOB_ID" or os.getenv "PBS_JOBID" or os.getenv "LSB_JOBID" or os.getenv "PE_HOSTFILE" }
end

--- What is wrong with a file of nodes; nil: nothing that is seen without mpirun.
local function hostfile_refused(name)
  local text, why = util.read_file(name)
  if not text then return ("--hostfile: '%s': %s"):format(name, (why:gsub("^.*: ", ""))) end
  if not ("\n" .. text):find "\n%s*[^%s#]" then return ("--hostfile: '%s' names no host"):format(name) end
  local number = 0
  for line in (text .. "\n"):gmatch "([^\n]*)\n" do
    number = number + 1
    for key, value in line:gsub("#.*", ""):gmatch "([%w_%-]*slots[%w_%-]*)%s*=%s*(%S*)" do
      if not value:match "^%d+$" then
        return ("--hostfile: '%s', line %d: %s is '%s', allowed: whole numbers"):format(name, number, key, value)
      end
    end
  end
end

--- Why such a run cannot go well; nil if nothing speaks against it. `options`, `machine`: as for `command`;
--- machine.files: how many files mpirun may open, machine.memory: MiB that are available.
function M.refusal(options, machine)
  local refused = options.hostfile and hostfile_refused(options.hostfile)
  if refused then return refused end
  local policy = (options.bind or "none"):match "^[^:]*"
  if not mentions(machine.openmpi.bindings, policy) then
    return ("--bind: '%s', which Open MPI %s does not know, allowed: %s"):format(policy, machine.openmpi.version,
      table.concat(machine.openmpi.bindings, ", "))
  end
  if options.hosts or options.hostfile or machine.allocation then return end
  local files = math.floor((machine.files - 100) / FILES_PER_RANK)
  if options.ranks > files then -- mpirun hangs rather than say so
    local enough = files > 1 and ("; enough for %d ranks"):format(files) or ""
    return ("-n %d: this process and its children may open %d files (ulimit -n), wanted %d or more%s"):format(
      options.ranks, machine.files, 100 + FILES_PER_RANK * options.ranks, enough)
  end
  local most = tonumber(os.getenv "PERI_MOST_RANKS")
  local memory, processors = math.floor(machine.memory / MEMORY_PER_RANK), machine.cpus * RANKS_PER_CPU
  if options.ranks <= (most or math.min(memory, processors)) then return end
  if most then return ("-n %d: PERI_MOST_RANKS is %d"):format(options.ranks, most) end
  local why = memory < processors and ("%d MiB of memory are free, enough for %d ranks"):format(machine.memory, memory)
    or ("%d processors are for %d ranks at most, more would take minutes only to meet"):format(machine.cpus, processors)
  return ("-n %d: %s (PERI_MOST_RANKS=%d tries it all the same)"):format(options.ranks, why, options.ranks)
end

-- -- one rank ---------------------------------------------------------------------------------------------------------

local function say(text) io.stderr:write(text, "\n") end

--- Why a script could not be loaded.
local function unloaded(problem, script)
  local file = io.open(script, "rb")
  local head = file and file:read(4)
  if file then file:close() end
  if head == "\127ELF" then
    return ("'%s' is a compiled program, no Lua script; it is started by itself: mpirun -n RANKS %s"):format(script,
      script:find "/" and script or "./" .. script)
  end
  local message, place = errors.syntax(problem)
  return message .. (place and (" (%s)"):format(place) or "")
end

--- Leave the world, if one was joined: in good order with code 0, else telling the others why.
local function leave_world(code, message)
  local P = package.loaded["perilune.ffi"]
  local world, saves = P and P.state.world, P and P.state.saves
  -- What is being saved gets to the disk first. After an error other ranks may not come to that: then it is not
  -- finished.
  if saves and code == 0 then saves.finish()
  elseif saves and (not world or world:size() == 1) then pcall(saves.finish) end
  if not world then return end
  if code ~= 0 then return world:abort(message) end
  require("perilune.dist").finish()
end

--- The same at the end of a script. A world that had failed cannot be left in good order, which the user must hear if
--- the script has caught the error.
local function end_world(code)
  local P = package.loaded["perilune.ffi"]
  leave_world(code)
  local err = code == 0 and P and P.state.failed_world
  if err then
    errors.raise { code = err.code, name = err.name, where = "",
      message = "the script went on to its end after an error that it caught, or that another rank met: "
        .. err.message:gsub("^peri_group_healthy: ", "") }
  end
end

--- How the world of this rank has failed, in words; nil: it has not.
local function failure_of_world()
  local P = package.loaded["perilune.ffi"]
  if not (P and P.state.world) then return end
  local sound, failure = pcall(P.check, P.C.peri_group_healthy(P.state.world:ptr()))
  return not sound and errors.describe(failure):gsub("^peri_group_healthy: ", "") or nil
end

local SECONDARY = { EABORTED = true, EPEER = true }

local function sleep_for(seconds)
  local C = require("perilune.ffi").C
  local stop = C.peri_time_ns() + seconds * 1000000000LL
  while C.peri_time_ns() < stop do C.peri_pause(100000) end
end

--- Tell the launcher, which puts the same words of several ranks together, or, without one, the user.
local function tell(world, message, details)
  if world and world.launched then
    io.stderr:write(reports.note(world.rank, message, details))
    return sleep_for(reports.MOMENT)
  end
  say((world and world.size > 1 and ("[rank %d] "):format(world.rank) or "perilune: ") .. message)
  if details ~= "" then say(details) end
end

local function report(err, world)
  local message, name, trace, where = errors.describe(err)
  -- Another rank failed first and is telling why; its message comes before ours, and mostly its end is ours too.
  -- Nobody ends it under srun, where each rank has a moment to end by itself.
  if world and world.size > 1 and SECONDARY[name] then sleep_for(world.launcher == "srun" and reports.MOMENT or 3) end
  local in_c = errors.tracing and where ~= "" and ("%s in %s\n"):format(name, where) or ""
  tell(world, message, in_c .. (trace or ""))
  return message
end

--- Somebody who asked for checkpoints, of a script that knows nothing of them, is told.
local function tell_unsaved(world)
  local folder, saver = os.getenv "PERI_CHECKPOINT", package.loaded["perilune.checkpoint.saver"]
  if not folder or world and world.rank > 0 or saver and saver.made then return end
  say(("perilune: nothing was saved in '%s': the script made no peri.checkpoint.Saver (docs/checkpoints.md)"):format(
    folder))
end

--- Let the script heed signals once it calls peri.on_stop (stop.lua). leave: ends the script.
local function offer_stops(options, world, leave)
  package.preload["perilune.stop.source"] = function()
    local launcher, launched = require "perilune.launcher", world and world.launched
    return {
      grace = options.grace or GRACE, asked = launcher.stop_asked, leave = leave,
      open = function()
        launcher.stops(options.grace or GRACE, launched, signals(options.stop_on))
        if launched then io.stderr:write(("\30heeds %d 0 \n"):format(world.rank)) end
      end,
    }
  end
end

--- Let a Saver of the script tell the launcher what it needs to start the job again (launch/restarts.lua).
local function offer_notes(world)
  if not (world and world.launched) then return end
  package.preload["perilune.checkpoint.note"] = function()
    return function(kind, text)
      io.stderr:write(("\30%s %d 0 %s\n"):format(kind, world.rank, (text:gsub("[%c]", " "))))
    end
  end
end

--- The exit code of a script that has come to its end, after it was asked to stop or not.
local function code_of(world)
  local stop = package.loaded["perilune.stop"]
  local reason = stop and stop.stopped()
  if not reason then return 0 end
  if world and world.launched then -- mpirun would end the other ranks for another code than 0
    io.stderr:write(("\30stopped %d 0 %s\n"):format(world.rank, reason))
    return 0
  end
  if not world or world.rank == 0 then
    say(("perilune: stopped after a step, as it was asked to (%s): it can be started again"):format(reason))
  end
  return STOPPED
end

--- End the process; exit: os.exit as it was before the script.
local function quit(exit, code, close)
  io.stdout:flush()
  require("perilune.launcher").settled()
  exit(code, close ~= false) -- closing the state gives up what its handles hold
end

--- A function that ends the script as its own end does, from wherever it is called.
local function leaver(world)
  local exit = os.exit
  return function()
    local ok, err = xpcall(end_world, errors.locate, 0)
    if not ok then pcall(leave_world, 1, report(err, world)) end
    quit(exit, ok and code_of(world) or 1)
  end
end

--- Run a script (its path, or a function) in this process with `arg` as plain luajit sets it. options: as of `command`.
--- Returns the exit code; os.exit in the script ends the process after leaving the world.
function M.run_here(options, launched)
  local world, script, arguments = M.world(), options.script, options.arguments
  if world then world.launched = launched end
  if os.getenv "PERI_CHECKPOINT" and not launched then require("perilune.launcher").stops_early() end
  offer_stops(options, world, leaver(world))
  offer_notes(world)
  local chunk, problem = script, nil
  if type(script) ~= "function" then chunk, problem = loadfile(script) end
  if not chunk then
    tell(world, unloaded(problem, script), "")
    return 1
  end
  local args = { [0] = script, [-1] = "perilune" }
  for i, a in ipairs(arguments) do args[i] = a end
  _G.arg = args
  io.stdout:setvbuf "line"
  if options.traceback then errors.tracing = true end

  local exit = os.exit
  os.exit = function(code, close) -- luacheck: ignore 122
    local number = (code == nil or code == true) and 0 or code == false and 1 or code
    local leave, words = number == 0 and end_world or leave_world,
      ("the script called os.exit(%s)"):format(tostring(code))
    local failure = number ~= 0 and failure_of_world()
    if failure then tell(world, ("%s; before that %s"):format(words, failure), "") end
    local ok, err = xpcall(leave, errors.locate, number, words)
    if not ok and number == 0 then
      report(err, world)
      number = 1
    end
    quit(exit, number, close)
  end

  local ok, err = xpcall(errors.run, errors.locate, chunk, unpack(arguments))
  if ok then ok, err = xpcall(end_world, errors.locate, 0) end
  os.exit = exit -- luacheck: ignore 122
  if ok then
    tell_unsaved(world)
    return code_of(world)
  end
  io.stdout:flush()
  local message = report(err, world)
  pcall(leave_world, 1, message)
  return 1
end

--- What is wrong with the variables that the launcher itself reads; nil: nothing.
local function variables_refused()
  for name, whole in pairs { PERI_START_TIMEOUT_S = false, PERI_MOST_RANKS = true } do
    local text = os.getenv(name) or ""
    local n = tonumber(text)
    if text ~= "" and not (n and n > 0 and n < math.huge and not (whole and n ~= math.floor(n))) then
      return ("%s is '%s', allowed: %s above 0"):format(name, text, whole and "whole numbers" or "numbers")
    end
  end
end

--- Let mpirun run the ranks. Returns an exit code and, if they were started, the story of the job (launch/job.lua).
function M.launch(options)
  local launcher = require "perilune.launcher"
  options.ranks = options.ranks or 1
  local function no_mpirun(why)
    say(("perilune: %d ranks need Open MPI's mpirun (Debian: openmpi-bin): %s"):format(options.ranks, why))
    return 1
  end
  local facts, lacking = require("perilune.launch.openmpi").find()
  if not facts then return no_mpirun(lacking) end
  local machine = M.machine(options, facts)
  local refusal = variables_refused() or M.refusal(options, machine)
  if refusal then
    say("perilune: " .. refusal)
    return 2
  end
  if not os.getenv "PERI_PROGRESS" then -- ranks write into pipes: only this process knows whether somebody is looking
    launcher.setenv("PERI_PROGRESS", launcher.terminal() and "live" or "lines")
  end
  launcher.setenv("PERI_LAUNCHER", "1")
  -- Ranks of one machine are one user's, and know each other without MUNGE, which Open MPI tries for 2 s where its
  -- service is down.
  if not (options.hosts or options.hostfile or machine.allocation or os.getenv "PMIX_MCA_psec") then
    launcher.setenv("PMIX_MCA_psec", "^munge")
  end
  local preload
  -- all ranks are here: nobody else reaches them
  if not (options.hosts or options.hostfile or machine.allocation or machine.nodes) then
    machine.folder, preload = launcher.folder(options.ranks * SEGMENT), launcher.loopback()
  end
  local code, story = require("perilune.launch.job").run(M.command(options, machine), options.ranks,
    tonumber(os.getenv "PERI_START_TIMEOUT_S") or 300, options.grace or GRACE, options.checkpoint,
    signals(options.stop_on), preload)
  if machine.folder then launcher.remove(machine.folder) end
  if not code then return no_mpirun(story) end
  return code, story
end

--- Run a script, or a function with `words` that let other processes come to it, with the options of `command`. Returns
--- an exit code.
function M.run(options)
  local world = M.world()
  if world and options.ranks and options.ranks ~= world.size then
    say(("perilune: -n %d inside a world of %d ranks that %s has made"):format(options.ranks, world.size,
      world.launcher))
    return 2
  end
  local launched = os.getenv "PERI_LAUNCHER" ~= nil -- its standard error is read by the launcher: see launch/job.lua
  if world then require("perilune.launcher").watch(world.rank) end
  if not world and (options.ranks or 1) == 1 and not options.max_restarts then
    require("perilune.launcher").interruptible()
  end
  local again = not world and options.max_restarts
  if world or ((options.ranks or 1) == 1 and not options.hosts and not options.hostfile and not again) then
    local code = M.run_here(options, launched)
    require("perilune.launcher").settled()
    return code
  end
  if not options.words then
    local chunk, problem = loadfile(options.script) -- once here, rather than by every rank
    if not chunk then
      say("perilune: " .. unloaded(problem, options.script))
      return 1
    end
  end
  if again then return require("perilune.launch.restarts").run(options, M.launch) end
  return (M.launch(options))
end

return M
