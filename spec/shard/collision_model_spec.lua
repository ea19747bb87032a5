-- Managed collision over ranks beside the plain models: random tables, ids, batches and operations; each batch is
-- shared among the ranks, and the model sees all of it. States go from one number of ranks to another in between (sim).
-- OPERATIONS= as many as wanted, of all worlds together (the whole run: 100000).
-- mpirun: 3
-- deadline: 300 s
local peri = require "perilune"
local ranks = require "spec.support.collision_ranks"
local worlds = require "spec.support.worlds"
local util = require "perilune.util"

local SEED = tonumber(os.getenv "SEED" or "") or 1
local OPERATIONS = tonumber(os.getenv "OPERATIONS" or "") or (worlds.mpirun and 240 or 1200)
local OPAQUE = os.getenv "PERI_OPAQUE_DEVICE" and 0.2 or 1 -- the share of the device opaque; a pretended GPU is slow
local STRETCH = 30 -- operations on one world

--- A stretch of operations from a state (nil: none) on; the whole state at its end. Every rank has a model of its own,
--- made by repeating.
local function stretch(kind, seed, world, device, from, past, state)
  local w = ranks.table_of(kind, seed)
  for step = 1, from - 1 do
    ranks.by_model(w, step, state.ranks[step])
    if state.reloads[step] then w.model:forget_window() end
  end
  local module, names = ranks.sharded_of(w, world, device)
  if state.dict then module:load_state_dict(state.dict) end
  for step = from, past - 1 do
    peri.scope(ranks.operation, w, module, names, world, device, step)
  end
  local s = module:statistics().t
  assert(s.occupied <= s.rows)
  local dict = peri.shard.gather_state_dict(module:state_dict())
  module:release()
  return dict
end

local function cases(kind, worlds_of, operations)
  local n = math.max(1, math.floor(operations / 2 / STRETCH / #worlds_of))
  for c = 1, n do
    local seed, state = SEED * 1000 + c, { ranks = {}, reloads = {} }
    for i, size in ipairs(worlds_of) do
      local ok, why = pcall(worlds_of.run, size, function(world, device)
        local from = (i - 1) * STRETCH + 1
        local dict = stretch(kind, seed, world, device, from, from + STRETCH, state)
        if world:rank() == 0 then state.next = dict end
        world:barrier():wait()
      end)
      if not ok then
        error(("seed %d, case %d, world %d of %d ranks: %s"):format(SEED, c, i, size, tostring(why)), 0)
      end
      state.dict = state.next
      for step = (i - 1) * STRETCH + 1, i * STRETCH do
        state.ranks[step], state.reloads[step] = size, step == i * STRETCH
      end
    end
  end
end

describe("random operations over ranks agree with the model:", function()
  for kind, title in util.ordered { mch = "sorted maps", hash = "probing maps" } do
    if worlds.mpirun then
      worlds.each(title, function(world, device)
        for c = 1, math.max(1, math.floor(OPERATIONS / 2 / STRETCH)) do
          stretch(kind, SEED * 1000 + c, world, device, 1, STRETCH + 1, { ranks = {}, reloads = {} })
        end
      end, { sizes = { 2, 3, 4 }, devices = { "cpu" } })
    else
      for _, device in ipairs { "cpu", "opaque" } do
        it(("%s, on %s"):format(title, device), function()
          local sizes = device == "cpu" and { 3, 1, 8, 2, 5 } or { 2, 3 }
          cases(kind, setmetatable(sizes, { __index = { run = function(n, body)
            peri.dist.sim.run(n, function(_, world) body(world, device) end, { device = device })
          end } }), device == "opaque" and OPERATIONS * OPAQUE or OPERATIONS)
        end)
      end
    end
  end
end)
