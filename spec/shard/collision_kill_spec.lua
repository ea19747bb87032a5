-- A rank of a world that trains maps is killed: the others end and say who is gone; what was saved last is taken up by
-- a world of another size, and goes on as the model does.
-- mpirun: none
local peri = require "perilune"
local ranks = require "spec.support.collision_ranks"
local shell = require "spec.support.shell"

local folder, clean
setup(function() folder, clean = shell.temporary() end)
teardown(function() clean() end)

local EVERY, WORLD = 5, 3

--- The state in a file of collision_rank.lua, and the last step behind it.
local function read_state(path)
  local map, text = {}, shell.read(path)
  local last, at = text:match "^step (%d+)\n()"
  while at <= #text do
    local name, dtype, shape, bytes, past = text:match("^(%S+) (%S+) (%S+) (%d+)\n()", at)
    local sizes = {}
    for n in shape:gmatch "%d+" do sizes[#sizes + 1] = tonumber(n) end
    map[name] = peri.Tensor.from_memory(text:sub(past, past + bytes - 1), sizes, dtype, "cpu")
    at = past + tonumber(bytes)
  end
  return map, tonumber(last)
end

--- Run a world, and kill rank `victim` after so many saves: all that was printed, and the exit status.
local function kill_one(kind, seed, saves, path, victim)
  local words = {}
  for name, value in pairs(shell.luajit_env()) do words[#words + 1] = ("%s='%s'"):format(name, value) end
  local pipe = io.popen(("env %s timeout 60 %s run -n %d spec/support/collision_rank.lua %s %d %d %s 2>&1; echo "
    .. "\"status $?\""):format(
    table.concat(words, " "), shell.perilune, WORLD, kind, seed, EVERY, path))
  local process, seen, text = {}, 0, {}
  for line in pipe:lines() do
    text[#text + 1] = line
    local rank, pid = line:match "rank (%d+) is process (%d+)"
    if rank then process[tonumber(rank)] = tonumber(pid) end
    if line:find "saved %d+$" then seen = seen + 1 end
    if seen == saves and process[victim] then
      os.execute(("kill -9 %d"):format(process[victim]))
      process = {}
    end
  end
  pipe:close()
  return table.concat(text, "\n")
end

describe("a world of maps of which a rank was killed", function()
  for kind, victims in pairs { mch = { 1, 0 }, hash = { 2 } } do
    for _, victim in ipairs(victims) do
      it(("ends, and goes on from what was saved: %s, rank %d"):format(kind, victim), function()
        if shell.no_launcher() then return pending(shell.no_launcher()) end
        if not shell.has "mpirun" then return pending "Open MPI is not there" end
        local seed, path = 31 + victim, ("%s/%s%d"):format(folder, kind, victim)
        local text = kill_one(kind, seed, 4 + victim, path, victim)
        assert.is_truthy(text:find("rank " .. victim, 1, true), text)
        assert.is_nil(text:find("status 0", 1, true), text)
        assert.is_nil(text:find("status 124", 1, true), "it hung: " .. text)
        peri.dist.sim.run(2, function(_, world)
          local w = ranks.table_of(kind, seed)
          local state, last = read_state(path)
          for step = 1, last do ranks.by_model(w, step, WORLD) end
          w.model:forget_window()
          local module, names = ranks.sharded_of(w, world, "cpu")
          module:load_state_dict(state)
          for step = last + 1, last + 40 do peri.scope(ranks.operation, w, module, names, world, "cpu", step) end
        end, { device = "cpu" })
      end)
    end
  end
end)
