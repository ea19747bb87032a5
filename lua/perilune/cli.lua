-- cli.lua: what the commands of the launcher do: run, plan, schedule, checkpoint, info, doctor, calibrate, help,
-- completion, version, and interactive sessions. Their options are in launch/commands.lua. Returns exit codes; 2: the
-- line is wrong.
local commands = require "perilune.launch.commands"

local M = {}

function M.version_text()
  local C = require("perilune").ffi.C
  return ("perilune %s (contract %d, %s)"):format(require("ffi").string(C.peri_version()), C.peri_abi_version(),
    jit.version)
end

function M.version()
  print(M.version_text())
  return 0
end

local function info()
  M.version()
  require("perilune.launch.info").print()
  print("choices (perilune calibrate measures them)")
  print(table.concat(require("perilune.calibration.choices").lines(), "\n"))
  return 0
end

local function set_threads(options)
  if options.threads then require("perilune.launcher").setenv("PERI_NUM_THREADS", tostring(options.threads)) end
end

--- Say why a command is not done. Returns the exit code.
local function refuse(why, code)
  io.stderr:write("perilune: ", why, "\n")
  return code
end

--- Tell the script's Saver, on all ranks, what the command line says. Returns what is wrong; nil: nothing.
local function set_checkpoint(options)
  local launcher = require "perilune.launcher"
  for _, name in ipairs { "every", "full_every", "keep", "async", "resume" } do
    if options[name] and not options.checkpoint then
      return ("run: --%s goes with --checkpoint FOLDER"):format((name:gsub("_", "-")))
    end
  end
  if not options.checkpoint then return nil end
  local ok, err = pcall(require "perilune.checkpoint.interval", "run", options.every or "10m")
  if not ok then return (require("perilune.errors").describe(err)) end
  launcher.setenv("PERI_CHECKPOINT", options.checkpoint)
  for name, value in require("perilune.util").ordered { EVERY = options.every, FULL_EVERY = options.full_every,
    KEEP = options.keep, RESUME = options.resume, ASYNC = options.async and "1" or nil } do
    launcher.setenv("PERI_CHECKPOINT_" .. name, tostring(value))
  end
end

--- What is wrong with options of `calibrate`; nil: nothing that is seen without its ranks.
local function calibrate_refused(options)
  if options.output and not (options.host or options.hostfile) then
    local ok, err = pcall(require("perilune.text").probe, options.output, "calibrate: --output")
    if not ok then return (require("perilune.errors").describe(err)) end
  end
  if options.only ~= "choices" then return nil end
  for _, name in ipairs { "ranks", "host", "hostfile", "output", "dry_run" } do
    if options[name] then
      return ("calibrate: --%s does not go with --only choices, which are measured by one process and kept in a file "
        .. "of their own"):format(
        (name:gsub("_", "-")))
    end
  end
end

--- Choices first, in one process; then the machine, by all ranks. That these can meet is seen before.
local function calibrate(options, words)
  local launch, choices = require "perilune.launch", require "perilune.choices"
  local refused = not launch.world() and calibrate_refused(options)
  if refused then return refuse(refused, 2) end
  set_threads(options)
  local function on_all_ranks(dry_run)
    local list = { unpack(words) }
    if dry_run and not options.dry_run then list[#list + 1] = "--dry-run" end
    return launch.run { ranks = options.ranks, hosts = options.host, hostfile = options.hostfile, words = list,
      arguments = {}, script = function()
        require("perilune.calibration.machine").run { output = options.output, seconds = options.seconds,
          choices = choices.ways(), device = options.device, dry_run = dry_run }
      end }
  end
  if launch.world() or options.dry_run then return on_all_ranks(options.dry_run) end
  local code = options.only == "choices" and 0 or on_all_ranks(true)
  if code == 0 and options.only ~= "machine" then
    code = require("perilune.calibration.choices").run(options.rounds,
      require("perilune.calibration.beside").others_of_process)
  end
  if code ~= 0 or options.only == "choices" then return code end
  return on_all_ranks(false)
end

--- --machine h100:8 as --topology h100 -n 8. Returns what is wrong with it; nil: nothing.
local function settle_machine(options)
  if not options.machine then return nil end
  local name, ranks = options.machine:match "^([^:]+):(%d+)$"
  name = name or options.machine:match "^[^:]+$"
  if not name or ranks and tonumber(ranks) < 1 then
    return ("--machine: '%s', allowed: NAME or NAME:RANKS, such as h100:8"):format(options.machine)
  end
  if options.topology then return "--machine and --topology: one of them says the machine" end
  if ranks and options.ranks then return "--machine with ranks and -n: one of them says how many" end
  options.topology, options.ranks = name, tonumber(ranks) or options.ranks
end

local function plans(options, words)
  local command = require "perilune.launch.plans"
  local wrong = settle_machine(options)
  if wrong then return refuse(wrong, 2) end
  if not options.verify then return command.run(options) end
  local refusal = command.refusal(options)
  if refusal then return refuse(refusal, 1) end
  local launch = require "perilune.launch"
  local ranks = options.ranks
  if not launch.world() then
    local ok, found = pcall(command.ranks, options)
    if not ok then return refuse(require("perilune.errors").describe(found), 1) end
    ranks = found
  end
  return launch.run { ranks = ranks, words = words, arguments = {}, script = function() command.verify(options) end }
end

local function say(text)
  print(text)
  return 0
end

--- Commands that need no ranks: functions of the options and the parser, which return the exit code.
local simple = {
  version = function() return M.version() end,
  doctor = function() return require("perilune.launch.doctor").run() end,
  compare = function(options)
    local code, why = require("perilune.launch.compare").run(options.logs, options.fields)
    return why and refuse(why, code) or code
  end,
  completion = function(options, parser) return say(require("perilune.launch.words").script(parser, options.shell)) end,
  help = function(options)
    if options.names then return say(require("perilune.launch.words").names()) end
    return require("perilune.launch.help").run(#options.name > 0 and table.concat(options.name, " ") or nil,
      commands.list())
  end,
}

--- An interactive session, if the words ask for one: none on a terminal, or -e, -i, -l. Returns the exit code; nil:
--- they do not.
local function session(words)
  local first = words[1] and words[1]:sub(1, 2)
  if words[1] and first ~= "-e" and first ~= "-i" and first ~= "-l" then return nil end
  if not words[1] and not require("perilune.launcher").interactive() then return nil end
  local repl = require "perilune.launch.repl"
  local options, wrong = repl.parse(words)
  if not options then return refuse(wrong, 2) end
  return repl.run(options, M.version_text())
end

--- A line that names what a word of the list may have meant, if argparse's message lists choices ('a', 'b'); or "".
local function nearest_choice(message, list)
  local known = {}
  for choice in (message:match "must be one of (.*)$" or ""):gmatch "'([^']*)'" do known[choice] = true end
  for i = 2, #list do
    local best = not known[list[i]] and require("perilune.util").nearest(list[i]:match "[^=]*$", { known })
    if best then return ("\nDid you mean '%s'?"):format(best) end
  end
  return ""
end

--- Run the command line in `words` (a list with the program's name at 0). Returns the exit code.
function M.main(words)
  require("perilune.compiler").settle()
  local list = {}
  for i = 1, #words do list[i] = words[i] end
  local code = session(list)
  if code then return code end
  if list[1] == "run" then
    local rest = {}
    for i = 2, #list do rest[#rest + 1] = list[i] end
    list = { "run", unpack(commands.separate(rest)) }
  end
  local parser = commands.parser(M.version)
  parser.error = function(self, message)
    local hint = nearest_choice(message, list)
    message = message:gsub("^unknown option '(%-%d[%d.]*)'.*$",
      "'%1' is no option, and no number that an option takes: none is below 0")
    local file = list[1] and list[1]:match "%.lua$" and io.open(list[1])
    if file then
      file:close()
      hint = ("\nDid you mean 'perilune run %s'?"):format(list[1])
    end
    io.stderr:write(("%s\n\nperilune: %s%s\n"):format(self:get_usage(), message, hint))
    os.exit(2)
  end
  local options = parser:parse(list)
  if simple[options.command] then return simple[options.command](options, parser) end
  if options.command == "plan" then return plans(options, list) end
  if options.command == "calibrate" then return calibrate(options, list) end
  if options.command == "schedule" then
    local refusal = require("perilune.launch.schedules").settle(options)
    if refusal then return refuse(refusal, 2) end
    if options.action ~= "trace" or options.ranks == 1 and not require("perilune.launch").world() then
      return require("perilune.launch.schedules").run(options)
    end
    return require("perilune.launch").run { script = function() require("perilune.launch.schedules").trace(options) end,
      words = list, ranks = options.ranks, arguments = {} }
  end
  if options.command == "serve" then return require("perilune.launch.serve").run(options) end
  if options.command == "checkpoint" or options.command == "export" then
    local command = require("perilune.launch." .. options.command .. "s")
    local refusal = command.refusal(options)
    if refusal then return refuse(refusal, 2) end
    local ok, result = pcall(command.run, options)
    if ok then return result end
    local why, status = require("perilune.errors").describe(result)
    return refuse(why, command.code(options, status))
  end
  if options.command ~= "run" then return info() end
  local wrong = set_checkpoint(options)
  if wrong then return refuse(wrong, 2) end
  set_threads(options)
  local mpi = {}
  for _, words_of in ipairs(options.mpi or {}) do
    for word in words_of:gmatch "%S+" do mpi[#mpi + 1] = word end
  end
  return require("perilune.launch").run {
    ranks = options.ranks, script = options.script, arguments = options.arguments, hosts = options.host,
    hostfile = options.hostfile, bind = options.bind, mpi = mpi, traceback = options.traceback, grace = options.grace,
    stop_on = options.stop_on, max_restarts = options.max_restarts, checkpoint = options.checkpoint,
  }
end

return M
