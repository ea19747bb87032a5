-- fault_matrix.lua: what rank 1 can do wrong, and where, in a script of three exchanges like those of a training step: splits, keys'
-- hash as tag; values (large enough to be copied between processes); gradients; then a barrier. spec/dist/fault_matrix_spec.lua runs each
-- cell on each transport; as a script this file runs cells under mpirun:
--   luajit spec/support/fault_matrix.lua FAULT PLACE[,PLACE...] DEADLINE     prints "PLACE|rank|seconds|error name|message" lines
local peri = require "perilune"
local P = require "perilune.ffi"
local C = P.C

local M = {}

M.faults = { "dies", "late", "operation", "dtype", "splits", "keys" }
--- Before phase k: k; in it (posted, not waited for): k + 0.5; 4 is after the last one.
M.places = { 1, 1.5, 2, 2.5, 3, 3.5, 4 }
M.place_names = { [1] = "before the splits", [1.5] = "in the splits", [2] = "before the values", [2.5] = "in the values",
  [3] = "before the gradients", [3.5] = "in the gradients", [4] = "after the gradients" }

local MANY, KEYS, OTHER_KEYS = 6000, 0xabc, 0xcba

local function ones(n, dtype, device) return peri.ones({ n }, dtype or "f32", device) end

--- Post phase k, in the form that the fault gives it (nil: the right one).
local function post(group, k, fault, device)
  local n = group.world_size
  if fault == "operation" then
    if k == 4 then return group:all_reduce(ones(3, "f32", device)) end
    return group:broadcast(ones(n, "f32", device), 0)
  elseif k == 1 then
    local count = fault == "splits" and 2 * n or n
    return group:all_to_all(ones(count, fault == "dtype" and "i32" or "i64", device), nil, fault == "keys" and OTHER_KEYS or KEYS)
  elseif k == 2 then
    local send, recv, total = {}, {}, 0
    for r = 1, n do send[r], recv[r] = MANY, MANY end
    if fault == "splits" then send[1], send[3] = MANY - 1000, MANY + 1000 end
    for r = 1, n do total = total + send[r] end
    return group:all_to_all_v(ones(total, fault == "dtype" and "f64" or "f32", device), send, recv, nil,
      fault == "keys" and OTHER_KEYS or KEYS)
  elseif k == 3 then
    return group:all_reduce(ones(fault == "splits" and MANY + 7 or MANY, fault == "dtype" and "f64" or "f32", device), "sum",
      fault == "keys" and OTHER_KEYS or KEYS)
  end
  if fault == "dtype" or fault == "splits" then return group:broadcast(ones(4, "f64", device), 0) end
  return group:barrier(fault == "keys" and OTHER_KEYS or 0)
end

--- One rank's part of a cell. `act(fault)` does what a rank does that dies or is late.
function M.run(group, fault, place, device, act)
  local odd, works = group.rank_number == 1, {}
  local acts = fault == "dies" or fault == "late"
  for k = 1, 4 do
    if odd and acts and place == k then act(fault) end
    works[k] = works[k] or post(group, k, odd and not acts and place == k and fault or nil, device)
    if odd and place == k + 0.5 then
      if acts then act(fault) else works[k + 1] = post(group, k + 1, fault, device) end
    end
    works[k]:wait()
  end
end

--- What is wrong with the end of a surviving rank (err: its error or nil), or nil.
function M.judge(fault, rank, err)
  if not err then return rank == 1 and fault == "late" and nil or "no error" end
  local allowed = {
    dies = { EPEER = true }, late = { ETIMEOUT = true, EPEER = true, EABORTED = true },
  }
  local names = allowed[fault] or { EMISMATCH = true, EPEER = true, EABORTED = true }
  local message = err.message or tostring(err)
  if not names[err.name] then return ("a %s: %s"):format(tostring(err.name), message) end
  if not message:match "rank %d" or not message:match "operation %d" then return "an error that names no rank or operation: " .. message end
  if fault ~= "late" and not message:match "rank 1" then return "an error that does not name rank 1: " .. message end
  if not allowed[fault] and not message:match "disagree" and not message:match "expects" then
    return "an error that does not say who disagrees: " .. message
  end
end

-- -- under mpirun ---------------------------------------------------------------------------------------------------------------------

local function main(fault, places, deadline)
  C.peri_log_level_set(C.PERI_LOG_ERROR)
  local world = peri.init { timeout = 20 }
  local ranks = {}
  for r = 1, world.world_size do ranks[r] = r - 1 end
  local function act()
    if fault == "dies" then os.execute "kill -9 $PPID" end
    os.execute(("sleep %g"):format(deadline * 1.5))
  end
  for text in places:gmatch "[^,]+" do
    local group = world:new_group(ranks, "cell " .. text)
    group:timeout(deadline)
    group:barrier():wait()
    local start = tonumber(C.peri_time_ns())
    local ok, err = pcall(M.run, group, fault, tonumber(text), "cpu", act)
    io.stdout:write(("%s|%d|%.2f|%s|%s\n"):format(text, world.rank_number, (tonumber(C.peri_time_ns()) - start) * 1e-9, ok and "ok" or
      err.name or "Lua", ok and "" or tostring(err):gsub("\n.*", "")))
    io.stdout:flush()
  end
  os.exit(0, true)
end

if arg and arg[0] and arg[0]:match "fault_matrix%.lua$" then main(arg[1], arg[2], tonumber(arg[3])) end

return M
