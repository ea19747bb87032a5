-- io_faults.lua: a run of spec/checkpoint/io_fault_spec.lua, with io_faults.c before the C library. Arguments: a
-- folder, and what is done there, of which each call on files fails in turn.
local ffi = require "ffi"
local peri = require "perilune"
ffi.cdef "long io_faults_arm(const char *, long);"
local folder, what = arg[1], arg[2]
local nn = peri.nn
local parts = { model = nn.Linear { in_features = 3, out_features = 2 } }
local step, failed = 0, 0

local function of(path)
  local c = peri.checkpoint.open(path)
  c:verify()
  local weights = c:read("model/weight"):reshape(-1):to_list()
  c:close()
  for _, x in ipairs(weights) do assert(x == weights[1], path .. " is a mixture") end
  return weights[1]
end

--- The steps of the checkpoints in the folder: all of them are whole.
local function saved()
  local steps = {}
  for _, entry in ipairs(peri.checkpoint.Saver.list(folder)) do
    assert(of(entry.path) == entry.step, entry.path .. " is of another step")
    steps[#steps + 1] = entry.step
  end
  return steps
end

local function fill()
  step = step + 1
  parts.model.weight:detach():fill(step)
end

--- What could not be removed is removed by the next save, when it is older than a minute.
local function age() os.execute(("touch -c -d '2 minutes ago' %s/.*.saving-*"):format(folder)) end

local saver = what ~= "replace" and peri.checkpoint.Saver { folder = folder, parts = parts, every = 1, keep = 1,
  full_every = what == "increments" and 2 or 1 }
local model = folder .. "/model"
local function save()
  if saver then return saver:save(step) end
  return peri.checkpoint.save(model, parts, { replace = true })
end

fill()
save()
local before, n = step, 0

--- A save of which call n fails; returns how many calls it made.
local function try()
  age()
  fill()
  ffi.C.io_faults_arm(folder, n)
  local ok, err = pcall(save)
  local calls = tonumber(ffi.C.io_faults_arm("", 0))
  assert(ok or tostring(err):find(folder, 1, true), ("call %d: the error names no file: %s"):format(n, tostring(err)))
  failed = failed + (ok and 0 or 1)
  before = ok and step or before
  local newest = saver and saved()[1] or not saver and of(model)
  assert(newest == before, ("call %d %s, the newest is of step %s, wanted %d"):format(n, ok and "went on"
    or "failed: " .. tostring(err), newest, before))
  return calls
end

repeat
  n = n + 1
  local calls = math.max(try(), try()) -- one of them is an increment
  age()
  fill()
  save() -- and removes what was left
  before = step
until calls < n
age()
fill()
save()
local left = io.popen("ls -A " .. folder):read "*a"
local names = select(2, left:gsub("\n", ""))
assert(names == (saver and (what == "increments" and #saved() or 1) + 1 or 1), "what is left is: " .. left)
print(("%d calls, %d errors"):format(n - 1, failed))
