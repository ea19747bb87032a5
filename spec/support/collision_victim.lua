-- collision_victim.lua: a process that trains a map and saves its state from time to time, until it is killed. Words:
-- kind ("mch", "hash"), seed, operations between saves, file. It prints "saved N" after each save.
local ffi = require "ffi"
local peri = require "perilune"
local collision = require "spec.support.collision"
local worlds = require "spec.support.collision_world"

local kind, seed, every, path = arg[1], tonumber(arg[2]), tonumber(arg[3]), arg[4]
local r = collision.random(seed)
local w = worlds[kind](r, "cpu")
local module = w.new()

local function save()
  local file = assert(io.open(path .. ".new", "wb"))
  for name, state in peri.util.ordered(module:state_dict()) do
    local t = state:gather()
    local memory = t:read()
    local bytes = ffi.string(memory, t:numel() * (t:dtype() == "i32" and 4 or 8))
    file:write(("%s %s %s %d\n"):format(name, t:dtype(), table.concat(t:shape(), "x"), #bytes), bytes)
  end
  file:close()
  assert(os.rename(path .. ".new", path))
end

for step = 1, math.huge do
  worlds.batch(w, module, worlds.features(seed, step, w), true, "cpu", step)
  if step % every == 0 then
    save()
    print("saved " .. step)
    io.stdout:flush()
  end
end
