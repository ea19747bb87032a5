-- serving.lua: a trainer that saves at every step, and `perilune serve --follow`, of which one or the other is killed
-- (SIGKILL) at random moments and started again, while somebody asks. The law: every answer is of a state that was
-- saved, as a whole: after step n every row and the bias are -n, so that an answer of two states shows; a server that
-- is started again serves such a state too, and no older one than an answer before said; and in the end it has the
-- trainer's last step.
--
--   luajit tests/fuzz/serving.lua [KILLS [SEED]]   as `make test` runs it; a failure prints the answer
--   luajit tests/fuzz/serving.lua SECONDSs [SEED]  as `make fuzz` runs it
--   luajit tests/fuzz/serving.lua load [STEPS [RELOADS]]   no kills, but two clients that ask as fast as they can,
--                                                          while the trainer makes STEPS (100) increments and the
--                                                          model file is replaced RELOADS (10) times
-- inputs: 3
-- takes: 4 s, mostly waits
local here, build = io.popen("pwd"):read "*l", os.getenv "PERI_BUILD" or "build"
package.path = ("%s/?.lua;%s/%s/lua/?.lua;%s/lua/?.lua;%s/lua/?/init.lua;%s"):format(here, here, build, here, here,
  package.path)
local ffi = require "ffi"
local shell = require "spec.support.shell"
local serving = require "spec.support.serving"
ffi.cdef "int usleep(unsigned);"

local missing = serving.missing() or shell.no_launcher()
if missing then return print("nothing was tried: " .. missing) end
local folder, clean = shell.temporary()

local ROWS, DIM, PAUSE = 64, 4, 4000 -- PAUSE: microseconds between steps
local script = shell.write(folder .. "/trainer.lua", ([[
local ffi = require "ffi"
ffi.cdef "int getpid(void); int usleep(unsigned);"
local peri = require "perilune"
peri.init()
local nn, ROWS, DIM = peri.nn, %d, %d
local Model = nn.Module:extend "Model"
function Model:init()
  self.ebc = peri.EmbeddingBagCollection { fused_params = { optimizer = "sgd", learning_rate = 1 },
    tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = ROWS, embedding_dim = DIM, feature_names = { "id" },
      init_fn = peri.embed.constant(0) } } }
  self.bias = nn.Parameter(peri.zeros { DIM })
end
function Model:forward(b)
  local rows = self.ebc(b.ids):values()
  return { rows = rows, bias = rows * 0 + self.bias }
end
local values, lengths = {}, {}
for i = 1, ROWS do values[i], lengths[i] = i - 1, 1 end
local function batch() return { ids = peri.KeyedJaggedTensor { keys = { "id" }, values = values, lengths = lengths } } end
local model, folder = Model(), arg[1]
if arg[2] == "export" then
  model:export(folder .. "/model.peri", { batches = { batch() }, name = "m", step = 0 })
  return
end
local file = assert(io.open(folder .. "/trainer.pid", "w"))
file:write(ffi.C.getpid())
file:close()
local optimizer = nn.optim.SGD { params = model:parameters(), lr = 1 / ROWS }
local saver = peri.checkpoint.Saver { folder = folder .. "/run", parts = { model = model, optimizer = optimizer }, every = 1,
  full_every = 7, keep = 30 }
for step = (saver:resume() or 0) + 1, 1e9 do
  peri.scope(function()
    optimizer:zero_grad()
    local out = model(batch())
    local loss = out.rows:sum() + out.bias:sum()
    loss:backward()
    optimizer:step()
  end)
  saver:step(step)
  ffi.C.usleep(%d)
  if io.open(folder .. "/stop") then break end
end
saver:close()
]]):format(ROWS, DIM, PAUSE))

local function start_trainer()
  os.remove(folder .. "/trainer.pid")
  os.execute(("%s run %s %s >%s/trainer.log 2>&1 &"):format(shell.perilune, script, folder, folder))
  for _ = 1, 400 do
    local file = io.open(folder .. "/trainer.pid")
    local pid = file and file:read "*n"
    if file then file:close() end
    if pid then return pid end
    ffi.C.usleep(20000)
  end
  error("the trainer does not start: " .. shell.read(folder .. "/trainer.log"))
end
local function start_server()
  return serving.start(folder .. "/model.peri", ("--watch 20ms --follow %s/run"):format(folder))
end

local newest, answers = 0, 0
--- One question; the answer is of one state, and of none that is older than another answer's.
local function ask(server)
  local id = math.random(0, ROWS - 1)
  local text = server:post("v1/models/m:predict", ('{"instances":[{"id":%d}]}'):format(id))
  local bias, rows = text:match '"bias":%[([^%]]*)%]', text:match '"rows":%[([^%]]*)%]'
  local step
  for x in ((bias or "") .. "," .. (rows or "")):gmatch "[^,]+" do
    local n = -tonumber(x)
    step = step or n
    assert(n == step and n == math.floor(n), "an answer of no state: " .. text)
  end
  assert(step, "no answer: " .. text)
  assert(step >= newest, ("an older state than before, %d after %d: %s"):format(step, newest, text))
  newest, answers = step, answers + 1
end

local function run(kills, seconds, seed)
  math.randomseed(seed)
  local said, status = shell.run(("%s run %s %s export"):format(shell.perilune, script, folder))
  assert(status == 0, said)
  local trainer, server, n, until_ = start_trainer(), start_server(), 0, os.time() + (seconds or 0)
  while seconds and os.time() < until_ or kills and n < kills do
    n = n + 1
    for _ = 1, math.random(0, 8) do ask(server) end
    ffi.C.usleep(math.random(0, 60000))
    if math.random(2) == 1 then
      server:stop "KILL"
      server = start_server()
    else
      os.execute("kill -KILL " .. trainer)
      for _ = 1, math.random(0, 3) do ask(server) end
      trainer = start_trainer()
    end
    ask(server)
  end
  io.open(folder .. "/stop", "w"):close()
  for _ = 1, 400 do
    if os.execute(("kill -0 %d 2>/dev/null"):format(trainer)) ~= 0 then break end
    ffi.C.usleep(20000)
  end
  local last = 0
  for name in shell.run("ls " .. folder .. "/run"):gmatch "step%-(%d+)" do last = math.max(last, tonumber(name)) end
  for _ = 1, 200 do
    ask(server)
    if newest == last then break end
    ffi.C.usleep(20000)
  end
  assert(newest == last and last > 0, ("the server ends at step %d, the trainer at %d"):format(newest, last))
  server:stop()
  print(("%d kills, %d answers, each of one state that was saved; %d steps"):format(n, answers, last))
end

--- Check what a client was told, a line each; returns how many lines.
local function check_answers(path)
  local n, before = 0, 0
  for line in io.lines(path) do
    local step
    for x in (line:match '"predictions":(.*)' or error("no answer: " .. line)):gmatch "%-?[%d.]+" do
      step = step or -tonumber(x)
      assert(step == -tonumber(x) and step >= before, "an answer of two states, or of an older one: " .. line)
    end
    n, before = n + 1, step
  end
  return n
end

--- A client: one connection at a time, of which each makes 500 requests. Its answers are in a file.
local CLIENT = [[(while [ ! -e %s/done ]; do
  curl -s -S --data-binary @%s "%sv1/models/m:predict?[1-500]" >>%s/answers%d 2>&1 || { echo "curl ended with $?" >>%s/answers%d; break; }
done; touch %s/ended%d) &]]

local function load(steps, reloads)
  local said, status = shell.run(("%s run %s %s export"):format(shell.perilune, script, folder))
  assert(status == 0, said)
  local server, trainer = start_server(), start_trainer()
  local body = shell.write(folder .. "/body", '{"instances":[{"id":3},{"id":9},{"id":63}]}')
  for i = 1, 2 do os.execute(CLIENT:format(folder, body, server.url, folder, i, folder, i, folder, i)) end
  local last, replaced = 0, 0
  while last < steps or replaced < reloads do
    if replaced < reloads then
      os.execute(("cd %s && cp model.peri fresh && mv fresh model.peri"):format(folder))
      replaced = replaced + 1
    end
    ffi.C.usleep(250000)
    for name in shell.run("ls " .. folder .. "/run"):gmatch "step%-(%d+)" do last = math.max(last, tonumber(name)) end
    assert(os.execute("kill -0 " .. trainer) == 0, "the trainer has ended")
  end
  for _, name in ipairs { "done", "stop" } do io.open(folder .. "/" .. name, "w"):close() end
  local n = 0
  for i = 1, 2 do
    while not io.open(("%s/ended%d"):format(folder, i)) do ffi.C.usleep(20000) end
    n = n + check_answers(("%s/answers%d"):format(folder, i))
  end
  server:stop()
  print(("%d answers, none refused, each of one state that was saved; %d steps, the file replaced %d times"):format(n,
    last, replaced))
end

local count, seconds = tonumber((arg[1] or "3"):match "^(%d+)$"), tonumber((arg[1] or ""):match "^([%d.]+)s$")
local ok, why
if arg[1] == "load" then ok, why = xpcall(load, debug.traceback, tonumber(arg[2] or 100), tonumber(arg[3] or 10))
else ok, why = xpcall(run, debug.traceback, count, seconds, tonumber(arg[2] or 1)) end
if not ok then
  os.execute(("touch %s/stop; cat %s/trainer.log"):format(folder, folder))
  print(why)
  print(("FAILED: repeat with: luajit tests/fuzz/serving.lua %s %s"):format(arg[1] or "3", arg[2] or "1"))
  os.exit(1)
end
clean()
