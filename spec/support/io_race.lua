-- io_race.lua: a run of spec/checkpoint/race_spec.lua, with io_faults.c before the C library. Arguments: a folder, what
-- this process does there, and what another process does before each call that changes a name, in turn. With "other" in
-- front, it is that other process.
local ffi = require "ffi"
local peri = require "perilune"
local checkpoint = peri.checkpoint

--- A table of 9 rows; step n has n in rows 0 and 1.
local function build()
  local bags = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 9,
    embedding_dim = 4, feature_names = { "f" }, weight_init_min = 0, weight_init_max = 0 } },
    fused_params = { optimizer = "sgd", learning_rate = 1 } }
  return peri.DistributedModelParallel { module = bags }
end
local NAME = "model/embedding_bags.t.weight"

local function train(model, n)
  for _ = 1, n do
    peri.scope(function()
      model(peri.KeyedJaggedTensor { keys = { "f" }, lengths = { 2 }, values = peri.tensor({ 0, 1 }, "i64") }):wait()
        :values():sum():backward()
    end)
  end
end

--- The step of the checkpoint at `path`, and whether it is full; nil and why: there is none that can be read.
local function step_of(path)
  local ok, c = pcall(checkpoint.open, path)
  if not ok then return nil, tostring(c) end
  c:verify()
  local rows, full = c:read(NAME):reshape(-1):to_list(), not c:parent()
  c:close()
  for i, x in ipairs(rows) do assert(x == (i <= 8 and rows[1] or 0), path .. " is a mixture") end
  return -rows[1], full
end

local function write(name, text)
  local file = assert(io.open(name, "w"))
  file:write(text)
  file:close()
end

-- -- the other process ------------------------------------------------------------------------------------------------

--- Each returns the step that it saved.
local others = {
  --- A newer full checkpoint at `path`.
  replace = function(_, path)
    local model = build()
    train(model, 9)
    checkpoint.save(path, { model = model }, { replace = true })
    return 9
  end,
  --- An increment of the one at `path`.
  increment = function(folder, path)
    local model, step = build(), step_of(path)
    checkpoint.load(path, { model = model }, { increments = true })
    train(model, 1)
    checkpoint.save(folder .. "/child", { model = model }, { increment_of = path })
    return step + 1
  end,
}
if arg[1] == "other" then
  return write(arg[3] .. "/../saved", others[arg[2]](arg[3], arg[4]))
end

-- -- this process -----------------------------------------------------------------------------------------------------

ffi.cdef "long io_faults_arm(const char *, long, int); void io_faults_command(const char *);"
local folder, what, other = arg[1], arg[2], arg[3]
local done, saved = folder .. "/../done", folder .. "/../saved"
local function path(name) return folder .. "/" .. name end
local function read(name)
  local file = io.open(name)
  local text = file and file:read "*a"
  if file then file:close() end
  return text
end

--- What this process does: to which checkpoint (`of`); open: "next" is open before it begins.
local acts = {
  compact = { of = "next", open = true, act = function(c) c:compact(path "next", true) end },
  compact_into = { of = "all", open = true, act = function(c) c:compact(path "all", true) end },
  remove = { of = "next", act = function() checkpoint.remove(path "next") end },
  replace = { of = "next", act = function(_, model)
    checkpoint.save(path "next", { model = model }, { replace = true })
  end },
}
local act = acts[what]

--- "full" of step 1, "next", an increment of it, of step 2; for who wants it "all", full, of step 1.
local function chain()
  os.execute(("rm -rf %s/* %s/.*.saving-* %s %s"):format(folder, folder, done, saved))
  local model = build()
  train(model, 1)
  checkpoint.save(path "full", { model = model }, { increments = true })
  if act.of == "all" then checkpoint.save(path "all", { model = model }) end
  train(model, 1)
  checkpoint.save(path "next", { model = model }, { increment_of = path "full" })
  return model
end

local raced, refused, n = 0, 0, 0
ffi.C.io_faults_command(([[unset LD_PRELOAD; { luajit %s other %s %s %s; echo $? >%s; } >>%s.log 2>&1 &
  i=0; while [ ! -e %s ] && [ $i -lt 25 ]; do sleep 0.01; i=$((i+1)); done]]):format(arg[0], other, folder,
  path(act.of), done, done, done))
local calls
repeat
  n = n + 1
  local model = chain()
  local c = act.open and checkpoint.open(path "next")
  ffi.C.io_faults_arm(folder, n, -1)
  local ok, err = pcall(act.act, c, model)
  calls = tonumber(ffi.C.io_faults_arm("", 0, 0))
  if c then c:close() end
  if calls >= n then
    while not read(done) do os.execute "sleep 0.01" end
    local other_saved = tonumber(read(saved) or "")
    local where = ("call %d, which %s, "):format(n, ok and "went on" or tostring(err))
    local is, full = step_of(path(act.of))
    if other == "replace" and other_saved and what ~= "replace" then
      assert(is == other_saved, where .. "the newer checkpoint was lost: " .. tostring(is or full))
    end
    if other == "increment" and other_saved then
      local step, why = step_of(path "child")
      assert(step == other_saved, where .. "the increment cannot be read: " .. tostring(step or why))
    end
    assert(ok or tostring(err):find(path(act.of), 1, true), where .. "the error names no checkpoint")
    assert(not ok or is ~= 2 or full or what == "remove", where .. "nothing was done")
    assert(step_of(path "full"), where .. "what the chain begins with cannot be read")
    raced, refused = raced + (other_saved and 1 or 0), refused + (ok and 0 or 1)
  end
until calls < n
print(("%d times, %d refused"):format(raced, refused))
