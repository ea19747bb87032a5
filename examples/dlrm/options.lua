-- options.lua: the command line of the demonstration, and the defaults that depend on the data.
local peri = require "perilune"
local command_line = require "command_line"

local M = {}

-- name, text, default, and for numbers the least, the most, whether whole. argparse shows defaults that are strings.
local OPTIONS = {
  { "--data", "debian (this machine's package lists), synthetic:SAMPLES, or a file in the Criteo layout.", "debian" },
  { "--epochs", "At most so many passes over the training samples (default: 1 to 10, some 2,500,000 samples).", nil, 1,
    math.huge, true },
  { "--steps", "At most so many training steps, instead of --epochs.", nil, 1, math.huge, true },
  { "--batch-size", "Samples of a step, of all ranks together (default: 16 to 2048, some 160 steps a pass).", nil, 1,
    2 ^ 31, true },
  { "--learning-rate --lr", "Learning rate of the tables.", "0.05", 0, math.huge },
  { "--dense-learning-rate --dense-lr", "Learning rate of the dense part.", "0.01", 0, math.huge },
  { "--eps", "Added to Adagrad's roots. Far below it gradients make no steps: without that, Adagrad's first steps "
    .. "would have full size even where gradients are rounding errors, and curves on different numbers of ranks would "
    .. "part.", "1e-5", 0, math.huge },
  { "--validation", "Share of the training samples, their tail, that is looked at to keep the best weights.", "0.1", 0,
    0.9 },
  { "--patience", "Stop after so many looks without a lower validation loss; 0: never, last weights.", "10", 0,
    math.huge, true },
  { "--eval-every", "Steps between looks at the validation samples (default: a tenth of a pass); 0: none.", nil, 0,
    math.huge, true },
  { "--eval-samples", "Validation samples of a look.", "20000", 1, math.huge, true },
  { "--plan", "Lua or JSON file that says where the tables live, such as examples/plans/mixed.lua (default: what the "
    .. "planner finds)." },
  { "--trace", "Write a timeline of 20 steps of all ranks into this file (Chrome trace JSON), and say where they "
    .. "wait, and for whom." },
  { "--schedule", "Training schedule: a name of the library's (base, sparse_dist, ...), or a Lua file that returns "
    .. "one.", "sparse_dist" },
  { "--model", "Lua file that makes the model.", "models/dlrm.lua" },
  { "--device", "cpu, cuda, ...; PERI_DEVICE names the default", os.getenv "PERI_DEVICE" or "cpu" },
  { "--precision", "Products of the dense part: highest (f32), high (TF32 where a GPU has it), bf16 (autocast).",
    "highest" },
  { "--num-workers", "Threads of each rank that make batches ahead (default: on a GPU all processors of the rank but "
    .. "one, 8 at most; else a quarter of them).", nil, 0, 1024, true },
  { "--dim", "Columns of the embedding tables.", "32", 4, 4096, true },
  { "--rows", "Rows of each table (Criteo and synthetic).", "100000", 1, 2 ^ 31, true },
  { "--seed", "Everything random depends on it.", "1", 0, 2 ^ 53 - 1, true },
  { "--log-every", "Steps between lines of the log (default: a fiftieth of a pass).", nil, 1, math.huge, true },
  { "--out", "Folder for log.jsonl, curve.png, summary.json, and tensorboard (an event file).", "build/demo" },
}

--- A schedule that trains, by name or file.
local function schedule_of(text)
  local ok, schedule = pcall(peri.pipeline.schedules.load, text)
  local fine, plan = ok, nil
  if ok then fine, plan = pcall(schedule.check, schedule) end
  if not fine then return nil, ("--schedule: %s"):format(((ok and plan or schedule).message)) end
  if not plan.first.backward then
    return nil, ("--schedule is '%s', which trains nothing: it has no 'backward'"):format(text)
  end
  return schedule
end

--- Threads that make batches: a GPU leaves the rank's processors to them; on the CPU training uses those, and leaves
--- some idle for moments.
local function default_workers(device)
  local C = peri.ffi.C
  local processors = C.peri_threads()
  if C.peri_device_host_access(peri.ffi.device(device)) then return math.min(math.floor(processors / 4), 8) end
  return math.min(processors - 1, 8)
end

--- Parse the words of the command line; `here`: the folder of the examples.
function M.parse(words, here)
  for _, o in ipairs(OPTIONS) do
    if o[1] == "--model" then o[3] = here .. o[3] end
  end
  local parser, made = command_line("examples/dlrm.lua",
    "Train a DLRM with sharded embedding tables, and say what it is worth.", OPTIONS)
  made["--schedule"]:convert(schedule_of)
  made["--precision"]:choices { "highest", "high", "bf16" }
  parser:mutex(made["--epochs"], made["--steps"])
  parser:flag("--hold-out-validation",
    "Never train on the validation samples: else the best weights are, once, at the end.")
  parser:flag("--no-baseline", "Leave the logistic regression out.")
  parser:flag("--no-recommend", "Leave the recommendations out.")
  local options = parser:parse(words)
  options.num_workers = options.num_workers or default_workers(options.device)
  if options.eval_every == 0 then options.validation = 0 end -- nobody looks at them
  return options
end

local PASS_STEPS, LEAST, MOST = 160, 16, 2048 -- of a default batch: steps that a pass should have; samples
local SAMPLES, EPOCHS = 2500000, 10           -- of a default run
local LOOKS, LINES = 10, 50                   -- per pass

--- Fill in what depends on the number of training samples: batch_size, epochs, steps, steps_per_pass, eval_every,
--- log_every.
function M.fit(options, samples)
  if not options.batch_size then -- the power of two that comes nearest to the wanted number of steps
    local power = math.floor(math.log(samples / PASS_STEPS) / math.log(2) + 0.5)
    options.batch_size = math.min(samples, math.max(LEAST, math.min(MOST, 2 ^ power)))
  end
  if options.batch_size > samples then
    peri.ffi.fail(("--batch-size is %d, but there are %d training samples; give a smaller one, or none for the "
      .. "default"):format(
      options.batch_size, samples))
  end
  options.steps_per_pass = math.floor(samples / options.batch_size)
  options.epochs = options.epochs or math.max(1, math.min(EPOCHS, math.floor(SAMPLES / samples)))
  options.steps = options.steps or options.epochs * options.steps_per_pass
  options.eval_every = options.eval_every or math.ceil(options.steps_per_pass / LOOKS)
  options.log_every = options.log_every or math.ceil(options.steps_per_pass / LINES)
end

return M
