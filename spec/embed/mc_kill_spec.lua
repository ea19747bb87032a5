-- A process that trains a map dies at some moment; what it saved last is taken up by another, and goes on as the model
-- does.
local peri = require "perilune"
local collision = require "spec.support.collision"
local shell = require "spec.support.shell"
local worlds = require "spec.support.collision_world"

local folder, clean
setup(function() folder, clean = shell.temporary() end)
teardown(function() clean() end)

local EVERY = 7

--- The state in a file of collision_victim.lua.
local function read_state(path)
  local map, text, at = {}, shell.read(path), 1
  while at <= #text do
    local name, dtype, shape, bytes, past = text:match("^(%S+) (%S+) (%S+) (%d+)\n()", at)
    local sizes = {}
    for n in shape:gmatch "%d+" do sizes[#sizes + 1] = tonumber(n) end
    map[name] = peri.Tensor.from_memory(text:sub(past, past + bytes - 1), sizes, dtype, "cpu")
    at = past + tonumber(bytes)
  end
  return map
end

--- Start a victim and kill it after so many saves; the last step that it has saved.
local function kill_after(kind, seed, saves, path)
  local env, words = shell.luajit_env(), {}
  for name, value in pairs(env) do words[#words + 1] = ("%s='%s'"):format(name, value) end
  local pipe = io.popen(("env %s sh -c 'echo $$; exec luajit spec/support/collision_victim.lua %s %d %d %s' "
    .. "2>&1"):format(
    table.concat(words, " "), kind, seed, EVERY, path))
  local pid, last = assert(tonumber(pipe:read "*l")), nil
  for _ = 1, saves do
    local line = pipe:read "*l"
    last = tonumber((line or ""):match "^saved (%d+)$")
    assert(last, line)
  end
  os.execute(("kill -9 %d"):format(pid))
  local rest = pipe:read "*a"
  pipe:close()
  for step in rest:gmatch "saved (%d+)" do last = tonumber(step) end -- saved before it died
  return last
end

for _, kind in ipairs { "mch", "hash" } do
  describe(("a map that died (%s)"):format(kind), function()
    for seed = 21, 23 do
      it("goes on from what was saved, seed " .. seed, function()
        local path = ("%s/%s%d"):format(folder, kind, seed)
        local last = kill_after(kind, seed, seed % 5 + 1, path)
        local w = worlds[kind](collision.random(seed), "cpu")
        local state = read_state(path) -- of `last`, or of a save that was done and not yet printed
        local now = state._current_iter_tensor:item()
        assert.is_true(now == last or now == last + EVERY)
        for step = 1, now do w.model:remap(worlds.features(seed, step, w), true) end
        w.model:forget_window()
        local module = w.new()
        module:load_state_dict(state)
        for step = now + 1, now + 60 do
          worlds.batch(w, module, worlds.features(seed, step, w), step % 4 ~= 0, "cpu", step)
          worlds.evicted(w, module, step)
        end
      end)
    end
  end)
end
