-- kills.lua: a process that writes checkpoints is killed at a random moment: of a full save that replaces the one
-- before, of an increment, both at once or behind the training, of `compact`, into another path, in the place of
-- another full one, of the newest, or in the middle of a chain, and of `export`. The law: what was there before is
-- there, or what was to come, each whole; never neither, and never a mixture of two.
--
--   luajit tests/fuzz/kills.lua [KILLS [SEED]]      as `make test` runs it; a failure prints what was killed, and the
--                                                   seed
--   luajit tests/fuzz/kills.lua SECONDSs [SEED]     as `make fuzz` runs it
-- inputs: 12
-- takes: 5 s
local here, build = io.popen("pwd"):read "*l", os.getenv "PERI_BUILD" or "build"
package.path = ("%s/%s/lua/?.lua;%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;%s"):format(here, build, here, here, here,
  package.path)
local ffi = require "ffi"
local peri = require "perilune"
ffi.cdef "int usleep(unsigned); int kill(int, int); int getpid(void);"

local ROWS, STRIDE = 6000, 5
local NAME = "model/embedding_bags.t.weight"

-- -- what is saved ----------------------------------------------------------------------------------------------------

--- A table that begins with zeros; step n takes 1 from each number of the rows r with r mod STRIDE = n mod STRIDE.
local function model()
  local ebc = peri.EmbeddingBagCollection { seed = 1, fused_params = { optimizer = "sgd", learning_rate = 1 },
    tables = {
    peri.EmbeddingBagConfig { name = "t", num_embeddings = ROWS, embedding_dim = 8, feature_names = { "f" } } } }
  local m = peri.DistributedModelParallel { module = ebc, plan = { [""] = { t = peri.plan.row_wise() } } }
  m:state_dict()["embedding_bags.t.weight"]:local_shards()[1].tensor:fill(0)
  return m
end

local function train(m, n)
  peri.scope(function()
    local ids = peri.arange(n % STRIDE, ROWS, STRIDE, "i64")
    m(peri.KeyedJaggedTensor { keys = { "f" }, values = ids,
      lengths = { ids:numel() } }):wait():values():sum():backward()
  end)
end

--- An error unless these are the numbers that the table has after so many steps.
local function compare(what, step, memory)
  for k = 0, ROWS * 8 - 1 do
    local row = math.floor(k / 8)
    local first = (row - 1) % STRIDE + 1 -- the first step that takes from this row
    local want = -(step >= first and math.floor((step - first) / STRIDE) + 1 or 0)
    if memory[k] ~= want then
      error(("%s is of step %d: row %d is %g, wanted %d"):format(what, step, row, memory[k], want), 0)
    end
  end
end

--- An error unless an open checkpoint is what the law says of the step that it says.
local function check(c)
  local step = c:values().values.step
  c:verify()
  peri.scope(function()
    local memory, n = c:read(NAME):read()
    assert(n == ROWS * 8)
    compare(c.path, step, memory)
  end)
  return step
end

--- The step of the checkpoint at `path`; nil: there is none. An error if it is damaged.
local function step_at(path)
  local ok, c = pcall(peri.checkpoint.open, path)
  if not ok then
    if type(c) == "table" and c.name == "ENOTFOUND" then return nil end
    error(c, 0)
  end
  local step = check(c)
  c:close()
  return step
end

-- -- who is killed ----------------------------------------------------------------------------------------------------

local function say(folder, name)
  local file = assert(io.open(folder .. "/" .. name, "w"))
  file:write(ffi.C.getpid())
  file:close()
end

local function finish(save, m, step)
  for n = step + 1, step + 3 do train(m, n) end -- what comes later is not in it
  save:wait()
end

if arg[1] == "child" then
  local folder, what, from, to, async = arg[2], arg[3], arg[4], arg[5], arg[6] == "async"
  if what == "compact" then
    local c = peri.checkpoint.open(from)
    say(folder, "ready")
    c:compact(to, true)
  elseif what == "export" then
    say(folder, "ready")
    require("perilune.launch.checkpoints").run { action = "export", paths = { from, NAME }, output = to }
  else
    local m = model()
    local step = peri.checkpoint.load(from, { model = m }, { increments = true }).step + 1
    train(m, step)
    say(folder, "ready")
    local save = m:save(to, { values = { step = step }, replace = from == to, increments = true, async = async,
      file_bytes = 50000, increment_of = what == "increment" and from or nil })
    if async then finish(save, m, step) end
  end
  say(folder, "done")
  return
end

-- -- killing ----------------------------------------------------------------------------------------------------------

local folder = io.popen("mktemp -d"):read "*l"
local state = tonumber(arg[2]) or 1
local function draw(n) -- 0 to n - 1
  state = (state * 1103515245 + 12345) % 2147483648
  return math.floor(state / 65536) % n
end
draw(1)

local function exists(name)
  local file = io.open(folder .. "/" .. name)
  local text = file and file:read "*a"
  if file then file:close() end
  return text
end

local usual = {} -- microseconds that each takes from "ready" to "done", as last seen
--- Start one; kill it (unless it has no usual time yet) at a random moment after it is ready. Returns whether it was
--- killed.
local function child(key, ...)
  os.remove(folder .. "/ready")
  os.remove(folder .. "/done")
  local words = { ("PERI_BUILD='%s' luajit tests/fuzz/kills.lua child"):format(build), folder, ... }
  local pipe = io.popen(table.concat(words, " ") .. " 2>&1; echo status $?")
  local began = peri.ffi.C.peri_time_ns()
  local function since() return tonumber(peri.ffi.C.peri_time_ns() - began) / 1000 end
  while not (exists "ready" and exists "ready" ~= "") and since() < 30e6 do ffi.C.usleep(100) end
  began = peri.ffi.C.peri_time_ns()
  local pid, killed = tonumber(exists "ready"), false
  if pid and usual[key] then
    local most = math.floor(1.2 * usual[key])
    -- names are given at the end
    ffi.C.usleep(draw(2) == 0 and draw(most + 1) or math.floor(most / 2) + draw(math.floor(most / 2) + 1))
    killed = not exists "done" and ffi.C.kill(pid, 9) == 0
  end
  local out = pipe:read "*a"
  pipe:close()
  if not killed then
    usual[key] = math.max(500, since())
    if not out:find "status 0" then error(("%s: %s"):format(key, out), 0) end
  end
  return killed
end

--- What must be at a path afterwards: what was there before (nil: nothing), or `new`. Returns it.
local function either(path, before, new, killed)
  local now = step_at(path)
  if now ~= new and not (killed and now == before) then
    error(("%s is of step %s; it was of %s, and %s was to come"):format(path, tostring(now), tostring(before),
      tostring(new)), 0)
  end
  return now
end

local saves, number = folder .. "/saves", 0
local chain = {} -- paths of the chain, the full one first; all are there
local counts = { killed = 0, kept = 0, new = 0 }

local function count(killed, is_new)
  counts.killed = counts.killed + (killed and 1 or 0)
  if killed then counts[is_new and "new" or "kept"] = counts[is_new and "new" or "kept"] + 1 end
end

--- Begin a chain: a full one, and two increments.
local function begin()
  os.execute(("rm -rf %s; mkdir -p %s"):format(saves, saves))
  local m = model()
  chain = {}
  for n = 0, 2 do
    if n > 0 then train(m, n) end
    chain[n + 1] = ("%s/%d"):format(saves, n)
    m:save(chain[n + 1], { values = { step = n }, increments = true, file_bytes = 50000, increment_of = chain[n] })
  end
  number = 2
end

local kinds = {}

--- A full one that replaces the newest full one that nothing depends on.
function kinds.save(async)
  local path = saves .. "/model"
  local before = step_at(path)
  if not before then
    local m = model()
    m:save(path, { values = { step = 0 }, increments = true })
    before = 0
  end
  local killed = child("save " .. async, "save", path, path, async)
  count(killed, either(path, before, before + 1, killed) ~= before)
end

function kinds.increment(async)
  local tip = chain[#chain]
  number = number + 1
  local path, before = ("%s/%d"):format(saves, number), step_at(tip)
  local killed = child("increment " .. async, "increment", tip, path, async)
  local now = either(path, nil, before + 1, killed)
  if now then chain[#chain + 1] = path end
  count(killed, now)
  either(tip, before, before)
end

function kinds.compact()
  local at = draw(2) == 0 and #chain or 2 + draw(#chain - 1) -- the newest, or one in the middle
  local from, in_place = chain[at], draw(2) == 0
  number = number + 1
  local to, before, tip = in_place and from or ("%s/%d"):format(saves, number), step_at(from), step_at(chain[#chain])
  local killed = child("compact " .. tostring(in_place), "compact", from, to)
  local now = either(to, in_place and before or nil, before, killed)
  local c = now and peri.checkpoint.open(to)
  local full = c and not c:parent()
  if c then c:close() end
  if not killed and not full then error(to .. " is no full checkpoint", 0) end
  count(killed, full)
  either(from, before, before)
  either(chain[#chain], tip, tip) -- increments of what was compacted are still there
  if full then -- what it stands for is not needed any more: go on with it in the place of all before
    for i = 1, at do
      if chain[i] ~= to then os.execute(("rm -rf %s"):format(chain[i])) end
    end
    for _ = 1, at do table.remove(chain, 1) end
    table.insert(chain, 1, to)
    either(chain[#chain], tip, tip)
  end
end

--- Into the place of a full one of another step.
function kinds.replace()
  local from, to = chain[#chain], saves .. "/other"
  local before, new = step_at(to), step_at(from)
  if not before or before == new then
    model():save(to, { values = { step = 0 }, replace = true })
    before = 0
  end
  local killed = child("replace", "compact", from, to)
  count(killed, either(to, before, new, killed) == new)
  either(from, new, new)
end

--- Into a file, in the place of what was exported of another step.
local exported = 0
function kinds.export()
  local path, from = folder .. "/exported.npy", chain[#chain]
  if not exists "exported.npy" then child("export first", "export", chain[1], path) exported = step_at(chain[1]) end
  local new = step_at(from)
  local killed = child("export", "export", from, path)
  local text = exists "exported.npy"
  local memory = ffi.cast("const float *", ffi.cast("const char *", text) + #text - ROWS * 8 * 4)
  local is_new = pcall(compare, path, new, memory)
  if not is_new then compare(path, exported, memory) end
  if not (is_new or killed) then error(path .. " is what was exported before", 0) end
  exported = is_new and new or exported
  if #text ~= 128 + ROWS * 8 * 4 then error(("%s has %d bytes"):format(path, #text), 0) end
  count(killed, is_new)
end

local length = arg[1] or "24"
local seconds, most, began = tonumber(length:match "^([%d.]+)s$"), tonumber(length), os.time()
local seed = tonumber(arg[2]) or 1
begin()
local n, last = 0, ""
local ok, err = xpcall(function()
  while seconds and os.time() - began < seconds or not seconds and counts.killed < most do
    local async = draw(2) == 0 and "async" or "-"
    local kind = #chain < 2 and "increment" or ({ "save", "increment", "compact", "compact", "replace",
      "export" })[draw(6) + 1]
    n, last = n + 1, kind .. " " .. async
    kinds[kind](async)
    if #chain > 6 then begin() end
  end
end, function(e) return type(e) == "table" and e.message or debug.traceback(tostring(e)) end)
os.execute("rm -rf " .. folder)
if not ok then
  print(("FAILED: number %d, %s: %s\nrepeat with: luajit tests/fuzz/kills.lua %s %d"):format(n, last, err, length,
    seed))
  os.exit(1)
end
print(("%d kills: %d left what was there before, %d what was to come; seed %d"):format(counts.killed, counts.kept,
  counts.new, seed))
