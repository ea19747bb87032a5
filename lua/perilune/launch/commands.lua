-- launch/commands.lua: the words of the launcher's command line: its commands and their options, as a parser. What each
-- command does is in cli.lua.
local argparse = require "argparse"
local openmpi = require "perilune.launch.openmpi"

local M = {}

--- Options of `run`: flags, whether a value follows, and the help. The script's own options begin after its name.
local run_options = {
  { "-n", "--ranks", value = "RANKS",
    help = "Number of ranks (processes); default 1, or mpirun's world when already inside one." },
  { "-t", "--threads", value = "THREADS",
    help = "Worker threads of each rank; default: the node's processors shared among its ranks." },
  { "--host", value = "LIST", help = "Nodes for mpirun, such as a:4,b:4." },
  { "--hostfile", value = "FILE", help = "File of nodes for mpirun." },
  { "--bind", value = "POLICY", help = "Bind ranks: none (default), hwthread, core, l1cache, l2cache, l3cache, "
    .. "package, socket, numa, board, cpu-list, as the version of Open MPI has them (mpirun's --bind-to, with its "
    .. "qualifiers, such as core:overload-allowed)." },
  { "--mpi", value = "WORDS", many = true,
    help = "More arguments for mpirun, as one word or quoted: --mpi --oversubscribe, "
    .. "--mpi \"--mca btl tcp,self\"; may be repeated." },
  { "--checkpoint", value = "FOLDER", help = "Where the script's Saver keeps checkpoints (docs/checkpoints.md)." },
  { "--every", value = "TIME", help = "With --checkpoint: save so often: 10m (default), 90s, 2h, 1000steps." },
  { "--full-every", value = "N",
    help = "With --checkpoint: every N-th save is a full checkpoint, those between are increments: rows "
      .. "that changed (default: 1, all are full)." },
  { "--keep", value = "N", help = "With --checkpoint: keep the newest N (default: 3)." },
  { "--async", help = "With --checkpoint: go on with the next step while a checkpoint is written." },
  { "--resume", value = "WHICH",
    help = "With --checkpoint: go on from the newest good checkpoint (auto, the default), from none "
      .. "(no), or from that of a path." },
  { "--max-restarts", value = "RESTARTS",
    help = "Start a job that failed, or ended with exit code 75, again from its newest "
    .. "checkpoint, on the hosts that are left: at most so many times. Of scripts that have a Saver." },
  { "--grace", value = "GRACE",
    help = "How long a script that has called peri.on_stop may take to stop when SIGTERM or Ctrl-C asks: "
      .. "25s (default), 2m; a Ctrl-C after that ends it at once." },
  { "--stop-on", value = "SIGNAL", many = true,
    help = "SIGUSR1 or SIGUSR2: it asks to stop too, as Slurm's --signal=USR1@120 does." },
  { "--traceback", help = "Print where an error came from (also PERI_TRACEBACK=1)." },
}

local MOST_THREADS = 256 -- of a rank

--- What makes a whole number of the text of an option; most: the largest (nil: 2^31 - 1).
local function whole(option, most)
  return function(text)
    local n = tonumber(text)
    if n and n == math.floor(n) and n >= 1 and n <= (most or 2 ^ 31 - 1) then return n end
    if not n or n < 1 or n ~= math.floor(n) then
      return nil, ("%s: '%s' is not a whole number above 0"):format(option, text)
    end
    return nil, ("%s: %s, allowed: whole numbers 1..%d"):format(option, text, most or 2 ^ 31 - 1)
  end
end

local qualifiers = { ["overload-allowed"] = true, ["if-supported"] = true }

local function binding(text)
  local policy, rest = text:match "^([^:]*)(.*)$"
  local good = false
  for _, known in ipairs(openmpi.bindings) do good = good or known == policy end
  for qualifier in rest:gmatch ":([^:]*)" do good = good and qualifiers[qualifier] end
  if good then return text end
  return nil, ("--bind: '%s', allowed: %s, and behind it :overload-allowed or :if-supported"):format(text,
    table.concat(openmpi.bindings, ", "))
end

--- Nodes as mpirun takes them, which explains in a page what is wrong with others.
local function nodes(text)
  for entry in (text .. ","):gmatch "([^,]*)," do
    local name, slots = entry:match "^([^:]*):?(.*)$"
    local known = name:match "^[%w._%-]+$" or name:match "^%+[en]%d*$" -- relative ones: +e, +n0
    local n = tonumber(slots)
    if not known or not (entry == name or slots == "*" or slots:match "^%d+$" and n > 0) then
      return nil, ("--host: '%s' in '%s', allowed: names of nodes, each with the number of its ranks if it has "
        .. "several, and a comma between two: a:4,b:4"):format(entry, text)
    end
  end
  return text
end

--- Seconds of "25s", "2m", "1h", "25".
local function duration(text)
  local number, unit = text:match "^(%d+%.?%d*)([smh]?)$"
  local seconds = tonumber(number) and tonumber(number) * ({ s = 1, m = 60, h = 3600, [""] = 1 })[unit]
  if seconds and seconds > 0 and seconds <= 1e6 then return seconds end
  return nil, ("--grace: '%s', allowed: times above 0 such as 25s, 2m, 1h"):format(text)
end

local function warning(text)
  if text == "SIGUSR1" or text == "SIGUSR2" then return text end
  return nil, ("--stop-on: '%s', allowed: SIGUSR1, SIGUSR2"):format(text)
end

--- What makes a value of the text of an option, by its name or what stands for it in the help.
local converters = {
  ["--full-every"] = whole "--full-every", ["--keep"] = whole "--keep", GRACE = duration, SIGNAL = warning,
  RANKS = whole "-n", THREADS = whole("-t", MOST_THREADS), POLICY = binding, LIST = nodes,
  RESTARTS = whole "--max-restarts",
}

local function add_plan(parser)
  local plan = parser:command("plan",
    "Plan where the tables of a model live, and say why; needs no ranks and no weights.")
    :epilog("The Lua file returns an nn.Module, or { tables = { { name =, num_embeddings =, embedding_dim = }, ... } "
      .. "}, or one of these as { model =, constraints = { table = { sharding_types = ... } }, relations = { ... }, "
      .. "cost =, objective = } (docs/plans.md).")
  plan:argument("model", "The Lua file; without one, --data decides: a table for each category, as the demonstration "
    .. "makes them."):args "?"
  plan:option("--topology", "A file that plan.Topology:save wrote, or the name of a machine: torchrec, "
    .. "cpu_ethernet_10g, cpu_ethernet_100g, dgx_v100_32gb, dgx_a100_40gb, dgx_a100_80gb, dgx_h100_80gb, h100.")
  plan:option("--machine",
    "The same as --topology NAME -n RANKS: h100:8 is a host of 8 GPUs, h100:512 are 64 of them."):argname(
    "NAME:RANKS")
  plan:option("--precision",
    "Of the dense part, where the machine has prices of it: highest (f32), high (TF32), bf16 (autocast).")
    :choices { "highest", "high", "bf16" }
  plan:option("-n --ranks", "Ranks; default: those of the topology."):argname "RANKS":convert(whole "-n")
  plan:option("--memory", "Memory of a rank, such as 16G; default: that of the topology.")
  plan:option("--batch-size", "Samples of a rank; default: 512.", 512, whole "--batch-size")
  plan:option("--data", "A file in the Criteo layout: its ids are counted, and the plan is made for what they are "
    .. "like."):argname "FILE"
  plan:option("--samples", "With --data: read so many samples, rounded up to whole batches; default: all."):argname "N"
    :convert(whole "--samples")
  plan:option("--rows", "With --data and no model: rows of each table (100000)."):argname "N":convert(whole "--rows")
  plan:option("--dim", "With --data and no model: columns of each table (32)."):argname "N":convert(whole "--dim")
  plan:option("--save", "Write the plan to a file (name.plan), which DistributedModelParallel takes."):argname "FILE"
  plan:option("--html", "Draw the plan on a page of its own, which any browser shows, also without a "
    .. "network."):argname "FILE"
  plan:option("--simulate",
    "Simulate steps of the plan under a schedule: a name such as sparse_dist, or a Lua file."):argname "SCHEDULE"
  plan:option("--times", "With --simulate: milliseconds of what tables do not decide, such as "
    .. "forward=1,backward=2."):argname "TIMES"
  plan:option("--scale", "With --simulate: plan and simulate other numbers of ranks too, such as "
    .. "8,64,512."):argname "LIST"
  plan:option("--trace", "With --simulate: write a timeline, Chrome trace JSON."):argname "FILE"
  plan:flag("--verify", "Run steps of the plan's collections on as many ranks, with made-up ids, and print what they "
    .. "take beside what was predicted; perilune calibrate goes before.")
  plan:flag("--no-reasons", "Do not say why other ways lost.")
end

local function add_checkpoint(parser)
  local command = parser:command("checkpoint", "Look at what was saved.")
    :usage("Usage: perilune checkpoint ls FOLDER\n       perilune checkpoint show PATH\n"
      .. "       perilune checkpoint verify PATH\n       perilune checkpoint diff A B\n"
      .. "       perilune checkpoint export PATH TENSOR [-o FILE]\n"
      .. "       perilune checkpoint compact PATH ... [-o FILE] [--replace]")
    :epilog("ls: the checkpoints of a folder. show: tensors and values. verify: compare all bytes with their"
      .. " checksums (exit code 1: damaged; 2: any other error). diff: which tensors and values differ, and by"
      .. " how much (exit code 1: some do; 2: an error). export: one tensor as a file for numpy. "
      .. "compact: a full checkpoint of an increment and what it is an increment of, in its place or (-o) "
      .. "elsewhere; several paths: a full one and its increments in their order, wherever they lie. PATH of an "
      .. "increment means what it is an increment of, too.")
  command:argument("action", "What to do, as below."):choices { "ls", "show", "verify", "diff", "export", "compact" }
  command:argument("paths", "Checkpoints, or what the action wants."):args "*"
  command:option("-o --output",
    "export: the file (default: the tensor's name, with .npy); compact: the checkpoint that is made (default: "
      .. "PATH is replaced)."):argname "FILE"
  command:flag("--replace", "compact -o: replace a checkpoint that is there; the old one stays whole until the new "
    .. "one is.")
end

local function add_export(parser)
  local command = parser:command("export", "Write a trained model as one file that answers (docs/model_file.md).")
    :epilog("SCRIPT returns { model = an nn.Module, batches = { held-out batches } }, and whatever else "
      .. "peri.export.save takes. The answers of the file are compared with the model's; AUC and NE of both, and the "
      .. "largest difference, are printed.")
  command:argument("checkpoint",
    "A checkpoint that is loaded into the model first, or the folder of a run: its newest one."):args "?"
  command:option("--model", "The Lua file that makes the model."):argname "SCRIPT"
  command:option("-o --output", "The model file."):argname "FILE"
  command:option("--tables",
    "How tables are stored: f32, f16, bf16, int8, int8_half, int4, int2, fp8, or NAME=DTYPE,...,default=DTYPE.")
    :argname "DTYPE"
  command:option("--size",
    "The file has at most so many bytes: dtypes of tables are chosen for it, those that change answers least, and "
      .. "printed; 2G, 512M."):argname "BYTES"
  command:option("--dense",
    "How the matrices of linear layers are stored: f32 (default); bf16: half as large, and faster where a batch is "
      .. "small; int8: a quarter. bf16_products, int8_products: the same, and numbers are rounded to that dtype before "
      .. "they are multiplied: several times as fast on processors with AMX, int8 also with AVX-512 VNNI.")
    :argname("DTYPE"):choices { "f32", "bf16", "bf16_products", "int8", "int8_products" }
  command:option("--verify",
    "Compare a model file with its checksums, and print what it takes and gives (exit code 1: damaged; 2: any other "
      .. "error)."):argname "FILE"
end

local function add_calibrate(parser)
  local calibrate = parser:command("calibrate",
    "Measure this machine: what processors differ about, for the next runs, and rates and " .. "prices, for plans.")
    :epilog("PERI_TUNE=\"name=way,...\" goes before what is kept; PERI_TUNE=off uses the defaults, and keeps nothing "
      .. "but in --output. The topology is that of so many ranks as measure: perilune calibrate -n 4, or under "
      .. "mpirun; plans for as many use it (docs/plans.md).")
  calibrate:option("--rounds", "How often each way of a choice is timed.", 15, whole("--rounds", 1000))
  calibrate:option("-n --ranks", "Ranks (processes) that measure together; default 1."):argname "RANKS":convert(
    whole "-n")
  calibrate:option("-t --threads", "Worker threads of each rank."):argname "THREADS":convert(whole("-t", MOST_THREADS))
  calibrate:option("--host", "Nodes for mpirun, such as a:4,b:4."):argname "LIST":convert(nodes)
  calibrate:option("--hostfile", "File of nodes for mpirun."):argname "FILE"
  calibrate:option("--seconds", "About so many for the prices of a step (default: 15; across hosts 10).", nil,
    whole("--seconds", 3600))
  calibrate:option("-o --output",
    "The topology's file; default: beside the choices, where plans find it."):argname "FILE"
  calibrate:option("--only", "Measure one part: choices, machine."):choices { "choices", "machine" }
  calibrate:option("--device",
    "Measure this device (cuda) in place of the processor, for plans of models on it."):argname "DEVICE"
  calibrate:flag("--dry-run", "Measure nothing: only see that the ranks meet and that the file can be written.")
end

--- The parser of the whole line. version: a function that prints the version.
function M.parser(version)
  local parser = argparse("perilune", "Train and serve recommendation models with sharded embeddings from Lua scripts.")
    :epilog("perilune COMMAND --help tells about one command. perilune alone, on a terminal, begins an interactive "
      .. "session; perilune -l MODULE -e TEXT -i SCRIPT loads a module, runs a text, and then begins one.")
    :command_target "command"
    :require_command(true)
    :help_max_width(80)
  parser:flag("-v --version", "Print the version and leave."):action(function() version() os.exit(0) end)

  local run = parser:command("run", "Run a Lua script on one rank or, through mpirun, on several.")
    :epilog("Everything after the script's name is the script's own. Under mpirun or srun the script runs inside the "
      .. "world they made.")
  for _, o in ipairs(run_options) do
    local flags = table.concat(o, " ")
    if not o.value then run:flag(flags, o.help)
    else
      local option = run:option(flags, o.help):argname(o.value)
      if o.many then option:count "*" else option:overwrite(false) end
      local converter = converters[o[1]] or converters[o.value]
      if converter then option:convert(converter) end
    end
  end
  run:argument("script", "The Lua file.")
  run:argument("arguments", "Arguments of the script (its `arg`)."):args "*"

  local schedule = parser:command("schedule",
    "Look at a training schedule: its slots, what follows from it, a step of it.")
    :epilog "FILE returns a Schedule (docs/pipelines.md), or is the name of one of the library's, such as sparse_dist."
  schedule:argument("action",
    "print: its slots; check: what follows, or why it is refused; sim: a step with given times; trace: a "
      .. "measured one."):choices { "print", "check", "sim", "trace" }
  schedule:argument("file", "The schedule.")
  schedule:option("--times", "sim: what operations take, such as forward=3,backward=6; others take 1."):argname "TIMES"
  schedule:option("-n --ranks", "trace: run on so many ranks (default: 1).", nil, whole "--ranks"):argname "RANKS"
  schedule:option("--steps", "trace: how many are measured (default: 20).", nil, whole "--steps"):argname "STEPS"
  schedule:option("-o --output", "trace: the file, Chrome trace JSON (default: trace.json)."):argname "FILE"
  add_plan(parser)

  parser:command("info devices", "Print what this machine offers: processor, memory, devices, transports, libraries.")
  parser:command("doctor", "Look whether this machine has what Perilune uses, and say what to do where it does not.")
  add_calibrate(parser)
  add_checkpoint(parser)
  require("perilune.launch.serve").add(parser)
  add_export(parser)
  local help = parser:command("help",
    "What the reference (docs/reference) says of a name, such as KeyedJaggedTensor or permute.")
  help:argument("name", "A name of Lua or C, a word, a command, or a page; without one: the pages."):args "*"
  help:flag("--names", "Print all names that it tells about.")
  local compare = parser:command("compare",
    "Draw the numbers of runs' logs (JSON lines, as of the demonstration) over steps.")
  compare:argument("logs", "The files, which SummaryWriter { log = } and the demonstration write."):args "+"
  compare:option("--fields", "Only these, such as loss,auc."):argname "NAMES"
  parser:command("completion",
    "Print a script with which a shell completes perilune's words: eval \"$(perilune completion bash)\"")
    :argument("shell", "The shell."):choices { "bash", "zsh" }
  parser:command("version", "Print the version.")
  return parser
end

--- What each command does, by its name.
function M.list()
  local list = {}
  for _, command in ipairs(M.parser()._commands) do
    for _, name in ipairs(command._aliases) do list[name] = command._description end
  end
  return list
end

--- Put "--" before the script's name, so that the options after it stay the script's, and the values of --mpi, which
--- look like options, into one word with it.
function M.separate(words)
  local takes_value = {}
  for _, o in ipairs(run_options) do
    for _, flag in ipairs(o) do takes_value[flag] = o.value ~= nil end
  end
  local out, i = {}, 1
  while i <= #words and words[i]:match "^%-." and words[i] ~= "--" do
    out[#out + 1] = words[i]
    if words[i] == "--mpi" and words[i + 1] then
      local more = openmpi.values[words[i + 1]:match "^%-%-?([%w-]+)$"] or 0
      out[#out] = "--mpi=" .. table.concat(words, " ", i + 1, math.min(i + 1 + more, #words))
      i = i + 1 + more
    elseif takes_value[words[i]] and words[i + 1] then
      i = i + 1
      out[#out + 1] = words[i]
    end
    i = i + 1
  end
  if words[i] and words[i] ~= "--" then out[#out + 1] = "--" end
  for k = i, #words do out[#out + 1] = words[k] end
  return out
end

return M
