-- fault_matrix.lua: what rank 1 can do wrong, and where, in two scripts of a training step's exchanges.
-- spec/dist/fault_matrix_spec.lua runs each cell on each transport; as a script this file runs cells under mpirun:
--   luajit spec/support/fault_matrix.lua SCRIPT,FAULT,PLACE,DEADLINE...
--                                                prints "SCRIPT,FAULT,PLACE|rank|seconds|error name|message" lines
local peri = require "perilune"
local P = require "perilune.ffi"
local C = P.C

local MANY, KEYS, OTHER_KEYS = 6000, 0xabc, 0xcba

local function ones(n, dtype, device) return peri.ones({ n }, dtype or "f32", device) end

--- A script: `phases` (names), `faults`, and post(group, k, fault, device), which posts phase k in the form that the
--- fault gives it (nil: the right one); a phase without a call of its own (`follows`) is what the phase before results
--- in.
local collectives = {
  faults = { "dies", "late", "operation", "dtype", "splits", "keys" },
  phases = { "splits", "values", "gradients", "barrier" },
  follows = {},
}

--- Splits, keys' hash as tag; values (large enough to be copied between processes); gradients; then a barrier.
function collectives.post(group, k, fault, device)
  local n = group.world_size
  if fault == "operation" then
    if k == 4 then return group:all_reduce(ones(3, "f32", device)) end
    return group:broadcast(ones(n, "f32", device), 0)
  elseif k == 1 then
    local count = fault == "splits" and 2 * n or n
    return group:all_to_all(ones(count, fault == "dtype" and "i32" or "i64", device), nil, fault == "keys"
      and OTHER_KEYS or KEYS)
  elseif k == 2 then
    local send, recv, total = {}, {}, 0
    for r = 1, n do send[r], recv[r] = MANY, MANY end
    if fault == "splits" then send[1], send[3] = MANY - 1000, MANY + 1000 end
    for r = 1, n do total = total + send[r] end
    return group:all_to_all_v(ones(total, fault == "dtype" and "f64" or "f32", device), send, recv, nil,
      fault == "keys" and OTHER_KEYS or KEYS)
  elseif k == 3 then
    return group:all_reduce(ones(fault == "splits" and MANY + 7 or MANY, fault == "dtype" and "f64" or "f32", device),
      "sum", fault == "keys" and OTHER_KEYS or KEYS)
  end
  if fault == "dtype" or fault == "splits" then return group:broadcast(ones(4, "f64", device), 0) end
  return group:barrier(fault == "keys" and OTHER_KEYS or 0)
end

--- KJTAllToAll of two batches, with weights: an equal batch, then one that differs between keys; then a barrier. The
--- tensors of a batch follow its sizes by themselves: what goes wrong before or in them is the call after them, posted
--- while they travel.
local kjt = {
  faults = { "dies", "late", "operation", "dtype", "dtype of weights", "no weights", "splits", "keys",
    "kind of batch" },
  phases = { "sizes", "tensors", "second sizes", "second tensors", "barrier" },
  follows = { [2] = true, [4] = true },
}

local function batch(fault, variable, device)
  local rows, bag = 16, 300
  local function strides() return { { rows }, { rows }, { rows - 5 }, { rows } } end
  if fault == "kind of batch" then variable = not variable end
  local bags = variable and 4 * rows - 5 or 4 * rows
  local weights
  if fault ~= "no weights" then weights = ones(bags * bag, fault == "dtype of weights" and "f64" or "f32", device) end
  return peri.KeyedJaggedTensor {
    keys = fault == "keys" and { "a", "c", "b", "d" } or { "a", "b", "c", "d" }, weights = weights,
    values = peri.full({ bags * bag }, 7, fault == "dtype" and "i32" or "i64", device),
    lengths = peri.full({ bags }, bag, "i32", device), stride_per_key_per_rank = variable and strides() or nil,
  }
end

function kjt.post(group, k, fault, device)
  if fault == "operation" then
    if k == 5 then return group:all_reduce(ones(3, "f32", device)) end
    return group:all_to_all(ones(group.world_size, "i64", device))
  end
  if k == 5 and not fault then return group:barrier() end
  return peri.dist.KJTAllToAll(group, fault == "splits" and { 2, 1, 1 } or { 1, 2, 1 })(batch(fault, k == 3, device))
end

local M = { scripts = { collectives = collectives, kjt = kjt }, order = { "collectives", "kjt" } }

--- Before phase k: k; in it (posted, not waited for): k + 0.5; the last one is waited for at once.
for _, name in ipairs(M.order) do
  local script = M.scripts[name]
  script.places, script.place_names = {}, {}
  for k, phase in ipairs(script.phases) do
    for place = k, k < #script.phases and k + 0.5 or k, 0.5 do
      script.places[#script.places + 1] = place
      script.place_names[place] = ("%s the %s"):format(place == k and "before" or "in", phase)
    end
  end
end

--- Faults in which rank 1 posts what it should, or nothing.
M.acts = { dies = true, ["dies uncollected"] = true, late = true }
M.LATE = 10 -- seconds by which rank 1 is late at most, on mpi: it goes on when another rank has given up

--- One rank's part of a cell. `act(fault)` does what a rank does that dies or is late.
function M.run(name, group, fault, place, device, act)
  local script = M.scripts[name]
  local odd, works, result = group.rank_number == 1, {}, nil
  local acts = M.acts[fault]
  for k = 1, #script.phases do
    if odd and acts and place == k then act(fault) end
    local wrong = odd and not acts and fault or nil
    if script.follows[k] then works[k] = result
    else works[k] = works[k] or script.post(group, k, place == k and wrong or nil, device) end
    if script.follows[k] and wrong and place == k then works[k + 1] = script.post(group, k + 1, wrong, device) end
    if odd and place == k + 0.5 then
      if script.follows[k] then works[k]:test() end
      local next_call = script.follows[k + 1] and k + 2 or k + 1
      if acts then act(fault) else works[next_call] = script.post(group, next_call, wrong, device) end
    end
    result = works[k]:wait()
  end
  peri.stream.current(device):synchronize() -- by now, if not before, what was promised on a device is there or an error
end

--- What is wrong with the end of a surviving rank (err: its error or nil), or nil.
function M.judge(fault, rank, err)
  if not err then return "no error" end
  local allowed = { -- EABORTED: an operation that was not on its way yet repeats the failure of another one
    dies = { EPEER = true, EABORTED = true }, late = { ETIMEOUT = true, EPEER = true, EABORTED = true },
  }
  local names = allowed[fault] or { EMISMATCH = true, EPEER = true, EABORTED = true }
  local message = err.message or tostring(err)
  if not names[err.name] then return ("a %s: %s"):format(tostring(err.name), message) end
  if not message:match "rank %d" or not message:match "operation %d" then
    return "an error that names no rank or operation: " .. message
  end
  if fault ~= "late" and not message:match "rank 1" then return "an error that does not name rank 1: " .. message end
  if not allowed[fault] and not message:match "disagree" and not message:match "expects" then
    return ("an error that does not tell rank %d who disagrees: %s"):format(rank, message)
  end
end

-- -- under mpirun -----------------------------------------------------------------------------------------------------

--- One rank's part of all cells ("SCRIPT,FAULT,PLACE,DEADLINE"), one after the other, each in a group of its own.
local function main(cells)
  C.peri_log_level_set(C.PERI_LOG_ERROR)
  local transport = os.getenv "PERI_TEST_DEVICE_TRANSPORT"
  local device = transport and "opaque" or "cpu"
  local world = peri.init { timeout = 20, device_transport = transport, device = transport and device }
  local ranks = {}
  for r = 1, world.world_size do ranks[r] = r - 1 end
  local folder = os.getenv "PERI_TEST_FOLDER" -- of all ranks
  local function act(fault, deadline, gave_up)
    if fault == "dies" then os.execute "kill -9 $PPID" end
    -- its parent, mpirun, is stopped for longer than the deadline: what has ended stays a zombie
    if fault == "dies uncollected" then
      os.execute(("P=$(awk '/^PPid/ { print $2 }' /proc/$PPID/status); kill -STOP $P; "
        .. "(sleep %g; kill -CONT $P) > /dev/null 2>&1 & kill -9 $PPID"):format(2 * deadline))
    end
    -- what a rank that waits loses to other work does not count, so a fixed time may be too short
    os.execute(("i=0; until test -e '%s' || test $i = %d; do sleep 0.05; i=$((i + 1)); done"):format(gave_up,
      20 * M.LATE))
  end
  for _, cell in ipairs(cells) do
    local name, script, fault, place, deadline = cell:match "^(([%w ]+),([%w ]+),([%d.]+)),([%d.]+)$"
    local group = world:new_group(ranks, "cell " .. name)
    local start, gave_up = tonumber(C.peri_time_ns()), ("%s/%s"):format(folder, name)
    local ok, err = pcall(function()
      -- until rank 1, too, is done with the cell before; a rank may still be in it when another has found the fault
      group:barrier():wait()
      group:timeout(tonumber(deadline))
      start = tonumber(C.peri_time_ns())
      M.run(script, group, fault, tonumber(place), device, function() act(fault, deadline, gave_up) end)
    end)
    if not ok then
      io.open(gave_up, "w"):close()
      -- results that the group had promised are no second error of somebody who does not use it any more
      local once, second = pcall(function() peri.stream.current(device):synchronize() end)
      if not once then err = ("a second error, %s, after %s"):format(second, err) end
    end
    io.stdout:write(("%s|%d|%.2f|%s|%s\n"):format(name, world.rank_number, (tonumber(C.peri_time_ns()) - start) * 1e-9,
      ok and "ok" or type(err) == "table" and err.name or "Lua", ok and "" or tostring(err):gsub("\n.*", "")))
    io.stdout:flush()
  end
  os.exit(0, true)
end

if arg and arg[0] and arg[0]:match "fault_matrix%.lua$" then main(arg) end

return M
