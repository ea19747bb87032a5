-- collision_rank.lua: a rank that trains a sharded map and saves its state from time to time, until somebody kills one
-- of them. Words: kind ("mch", "hash"), seed, operations between saves, file. Rank 0 prints "saved N" after each save;
-- each rank its process first.
local ffi = require "ffi"
local peri = require "perilune"
local ranks = require "spec.support.collision_ranks"
ffi.cdef "int getpid(void);"

local kind, seed, every, path = arg[1], tonumber(arg[2]), tonumber(arg[3]), arg[4]
local world = peri.dist.init { timeout = 20 }
local w = ranks.table_of(kind, seed)
local module, names = ranks.sharded_of(w, world, "cpu")

local function say(text)
  io.stdout:write(text, "\n")
  io.stdout:flush()
end
say(("rank %d is process %d"):format(world:rank(), ffi.C.getpid()))
world:barrier():wait()

local sizes = { i32 = 4, f32 = 4, i64 = 8 }
local function save(step, dict)
  local file = assert(io.open(path .. ".new", "wb"))
  file:write(("step %d\n"):format(step))
  for name, t in peri.util.ordered(dict) do
    local memory, n = t:read()
    local bytes = ffi.string(memory, n * sizes[t:dtype()])
    file:write(("%s %s %s %d\n"):format(name, t:dtype(), table.concat(t:shape(), "x"), #bytes), bytes)
  end
  file:close()
  assert(os.rename(path .. ".new", path))
end

for step = 1, math.huge do
  peri.scope(ranks.operation, w, module, names, world, "cpu", step)
  if step % every == 0 then
    local dict = peri.shard.gather_state_dict(module:state_dict())
    if world:rank() == 0 then
      save(step, dict)
      say("saved " .. step)
    end
  end
end
