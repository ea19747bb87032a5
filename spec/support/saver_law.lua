-- saver_law.lua: what a Saver has to leave in its folder and what it has to remove, for tests/fuzz/join.lua, whose runs
-- (`s`) it describes: it saves, closes and opens their Savers, and looks at the folder whenever one of these removes.
local peri = require "perilune"

local M = {}

--- An error that shows where two texts part.
function M.expect(want, got, what)
  if want == got then return end
  local from = 1
  while want:byte(from) == got:byte(from) do from = from + 1 end
  local function part(x) return x:sub(math.max(1, from - 60), from + 80) end
  error(("%s: wanted ...%s, got ...%s"):format(what, part(want), part(got)), 0)
end

function M.parts(p) return { model = p.model, optimizer = p.optimizer } end

--- What rank 0 does, and tells the others.
function M.of_first(s, f)
  s.world:barrier():wait()
  return s.world:all_gather_object(s.world:rank() == 0 and f() or false)[1]
end

function M.name_of(path) return path:match "[^/]*$" end

--- Names of the checkpoints that one stands on, itself too.
function M.stands_on(saved)
  local c, set = peri.checkpoint.open(saved.path), {}
  for _, path in ipairs(c:levels()) do set[M.name_of(path)] = true end
  c:close()
  return set
end

--- Names of what the Saver has to leave of s.saves (the oldest first), which stand on stood[saved]: the newest of its
--- run and those of certain steps, what it went on from, all of other runs, what is read, and what these stand on.
local function to_leave(s, stood)
  local names, own, keep = {}, 0, s.case.keep
  for k = #s.saves, 1, -1 do
    local one = s.saves[k]
    local of_step = keep.every and #one.history % keep.every == 0
    own = own + (one.run == s.run and 1 or 0)
    if one.run ~= s.run or own <= keep.newest or one.path == s.from or of_step then
      for name in pairs(stood[one]) do names[name] = true end -- luacheck: ignore 512
    end
  end
  for _, reader in pairs(s.open) do -- luacheck: ignore 512
    for name in pairs(reader.names) do names[name] = true end -- luacheck: ignore 512
  end
  return names
end

local function is_there(path)
  local file = io.open(path)
  if file then file:close() end
  return file ~= nil
end
M.strange = { "notes", "save-000002-step-1/rank-0.safetensors" } -- what is no checkpoint

--- In f the Saver removes what it does not keep, of s.saves and, if f adds one to them, that.
local function sweeping(s, f)
  local stood = {}
  M.of_first(s, function()
    for _, one in ipairs(s.saves) do stood[one] = M.stands_on(one) end
  end)
  f()
  local there = M.of_first(s, function()
    for _, one in ipairs(s.saves) do stood[one] = stood[one] or M.stands_on(one) end
    local leave, set = to_leave(s, stood), {}
    for _, one in ipairs(s.saves) do
      local name = M.name_of(one.path)
      set[name] = is_there(one.path .. "/manifest.json")
      if set[name] ~= (leave[name] or false) then
        error(("the Saver has %s %s"):format(set[name] and "left" or "removed", name), 0)
      end
    end
    for _, name in ipairs(M.strange) do assert(is_there(s.folder .. "/" .. name), name) end
    return set
  end)
  for k = #s.saves, 1, -1 do
    if not there[M.name_of(s.saves[k].path)] then table.remove(s.saves, k) end
  end
end

--- Save by the Saver, and let it remove what it does not keep: that is done when a save has ended, so with async it is
--- the save before that is looked at.
function M.save(s, new)
  local keep = s.case.keep
  local function act()
    new.path = s.saver:save(#s.history, { step = #s.history })
    if not keep.async then
      s.run = s.run or new.path
      new.run = s.run
      table.insert(s.saves, new)
    end
  end
  if not keep.async or s.unswept then sweeping(s, act) else act() end
  if not keep.async then return end
  s.run, s.unswept = s.run or new.path, true
  new.run, s.pending = s.run, s.saver.saving.handle
  table.insert(s.saves, new)
end

function M.close(s)
  local function act() s.saver:close() end
  if s.saver then
    if s.unswept then sweeping(s, act) else act() end
  end
  s.saver, s.run, s.from, s.unswept = nil, nil, nil, false
end

--- A Saver that goes on from `saved` (nil: nothing), into parts `p`; anew: it is not told what was loaded.
function M.open(s, p, saved, anew)
  local keep, newest = s.case.keep, s.saves[#s.saves]
  local auto = saved and saved == newest and not anew
  s.saver = peri.checkpoint.Saver { folder = s.folder, parts = M.parts(p), group = s.world, keep = keep.newest,
    keep_every = keep.every or nil, full_every = keep.full_every, async = keep.async, every = 1000,
    resume = not saved and "auto" or anew and "no" or auto and "auto" or saved.path }
  s.run, s.from = saved and not anew and saved.run or nil, saved and not anew and saved.path or nil
  local function act()
    local at, values = s.saver:resume()
    M.expect(tostring(saved and not anew and #saved.history or nil), tostring(at), "the step of resume")
    if at then M.expect(tostring(at), tostring(values.step), "what was saved beside") end
  end
  if auto then sweeping(s, act) else act() end
end

return M
