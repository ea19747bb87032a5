-- io_faults.lua: a run of spec/checkpoint/io_fault_spec.lua, with io_faults.c before the C library. Arguments: a
-- folder, what is done there, of which each call on files fails in turn, with which errno (0: it is a short read or
-- write), and how far apart the calls are that do.
local ffi = require "ffi"
local peri = require "perilune"
ffi.cdef "long io_faults_arm(const char *, long, int);"
local folder, what, how, every = arg[1], arg[2], tonumber(arg[3]), tonumber(arg[4] or 1)
local nn, checkpoint = peri.nn, peri.checkpoint
local step, failed, saver = 0, 0, nil

--- A layer whose weights are the step, and a table of 9 rows of which each step takes 1 off rows 0 and 1.
local function build()
  local m = nn.Module()
  m.layer = nn.Linear { in_features = 3, out_features = 2 }
  m.bags = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 9,
    embedding_dim = 4, feature_names = { "f" }, weight_init_min = 0, weight_init_max = 0 } },
    fused_params = { optimizer = "sgd", learning_rate = 1 } }
  return { model = peri.DistributedModelParallel { module = m } }
end
local parts = build()

local function fill()
  step = step + 1
  parts.model.module.layer.weight:detach():fill(step)
  peri.scope(function()
    parts.model.module.bags(peri.KeyedJaggedTensor { keys = { "f" }, lengths = { 2 },
      values = peri.tensor({ 0, 1 }, "i64") }):values():sum():backward()
  end)
end

--- The step that weights and rows are of.
local function step_of(where, weights, rows)
  weights, rows = weights:reshape(-1):to_list(), rows:reshape(-1):to_list()
  for _, x in ipairs(weights) do assert(x == weights[1], where .. " is a mixture") end
  for i, x in ipairs(rows) do assert(x == (i <= 8 and -weights[1] or 0), where .. " is a mixture") end
  return weights[1]
end

local function of(path)
  local c = checkpoint.open(path)
  c:verify()
  local is = step_of(path, c:read "model/layer.weight", c:read "model/bags.embedding_bags.t.weight")
  c:close()
  return is
end

--- The step of the newest checkpoint of the Saver; all of them are whole.
local function newest()
  local list = checkpoint.Saver.list(folder)
  for _, entry in ipairs(list) do assert(of(entry.path) == entry.step, entry.path .. " is of another step") end
  return list[1].step
end

--- What could not be removed is removed by the next save, when it is older than a minute.
local function age() os.execute(("touch -c -d '2 minutes ago' %s/.*.saving-*"):format(folder)) end

local function saves(full_every)
  saver = checkpoint.Saver { folder = folder, parts = parts, every = 1, keep = 1, full_every = full_every }
  return { act = function() saver:save(step) end, now = newest,
    left = function() return #checkpoint.Saver.list(folder) + 1 end, most = full_every + 1 }
end

local function path(name) return folder .. "/" .. name end
local function remove(...)
  for _, name in ipairs { ... } do os.execute(("rm -rf %s"):format(path(name))) end
end

--- A full checkpoint of the step before, and an increment of it of this one.
local function chain()
  remove("full", "next")
  checkpoint.save(path "full", parts, { increments = true })
  fill()
  checkpoint.save(path "next", parts, { increment_of = path "full" })
end

--- Make a full checkpoint of "next". A checkpoint that stays open keeps its folder from being swept.
local function compact(name)
  local c = checkpoint.open(path "next")
  local ok, err = pcall(c.compact, c, path(name), true)
  c:close()
  if not ok then error(err, 0) end
end

--- What each kind does: act() is what fails; now() the step that is there; left() how many names the folder should have
--- in the end; before() is done before each try.
local kinds = {
  increments = function() return saves(2) end,
  keep = function() return saves(1) end,
  replace = function()
    return { act = function() checkpoint.save(path "model", parts, { replace = true }) end,
      now = function() return of(path "model") end, left = function() return 1 end }
  end,
  compact = function() -- in its place: the same step in any case
    return { before = chain, act = function() compact "next" end,
      now = function() return of(path "next") end, same = true, left = function() return 2 end }
  end,
  compact_into = function()
    return { before = chain, act = function() compact "all" end,
      now = function() return of(path "all") end, left = function() return 3 end }
  end,
  remove = function()
    return { before = function()
        remove "full"
        checkpoint.save(path "full", parts)
      end, act = function() checkpoint.remove(path "full") end, now = function()
        return os.execute("test -e " .. path "full") == 0 and of(path "full") or step
      end, same = true, left = function() return 0 end }
  end,
  remove_read = function() -- somebody reads it
    local reader
    return { before = function()
        if reader then reader:close() end
        remove("full", "next")
        checkpoint.save(path "full", parts)
        reader = checkpoint.open(path "full")
      end, act = function()
        local ok, err = pcall(checkpoint.remove, path "full")
        assert(not ok, "it was removed")
        if not tostring(err):find "is open elsewhere" then error(err, 0) end
      end, now = function()
        return of(path "full")
      end, same = true, left = function() return 1 end }
  end,
  load = function()
    local other = build()
    return { before = chain, act = function() checkpoint.load(path "next", other) end,
      now = function() return of(path "next") end, same = true, left = function() return 2 end }
  end,
}

local kind = kinds[what]()
fill()
if kind.before then kind.before() end
kind.act()
local before, n = step, 0

--- A try of which call n fails; returns how many calls it made.
local function try()
  age()
  fill()
  if kind.before then kind.before() end
  ffi.C.io_faults_arm(folder, n, how)
  local ok, err = pcall(kind.act)
  local calls = tonumber(ffi.C.io_faults_arm("", 0, 0))
  assert(ok or tostring(err):find(folder, 1, true), ("call %d: the error names no file: %s"):format(n, tostring(err)))
  failed = failed + (ok and 0 or 1)
  assert(ok or how > 0, ("call %d is short, and an error: %s"):format(n, tostring(err)))
  before = (ok or kind.same) and step or before
  local is = kind.now()
  assert(is == before, ("call %d %s, the newest is of step %s, wanted %d"):format(n, ok and "went on"
    or "failed: " .. tostring(err), is, before))
  return calls
end

repeat
  n = n + every
  local calls = math.max(try(), try()) -- one of them is an increment
  age()
  fill()
  if kind.before then kind.before() end
  kind.act() -- and removes what was left
  before = step
until calls < n
age()
fill()
if kind.before then kind.before() end
kind.act()
local left = io.popen("ls -A " .. folder):read "*a"
local names = select(2, left:gsub("\n", ""))
assert(names == kind.left(), "what is left is: " .. left)
print(("%d calls, %d errors"):format(n / every - 1, failed))
