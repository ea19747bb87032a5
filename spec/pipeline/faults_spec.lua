-- Processes that die, stop or run out of data while they train, in each slot of a schedule: every other rank gets an
-- error that names them, by its deadline; without data, all ranks end together, and well.
-- PERI_TEST_SCHEDULES: which ("sparse_dist prefetch_sparse_dist one_f_one_b"; "all"). PERI_TEST_FAULTS: ("dies dry
-- stalls"). Unless one of them is set, processes die in every other slot and stop in those between: the same waits
-- notice both. PERI_TEST_RANKS: how many train together (2, stages 4). Within tests/net/nodes they are spread over its
-- machines.
-- (mpirun: none: it starts its own)
-- deadline: 240 s
-- takes: 55 s, mostly waits
-- takes: 40 s
local peri = require "perilune"
local shell = require "spec.support.shell"
local support = require "spec.support.pipeline_faults"

local found = shell.has "mpirun"
local names = os.getenv "PERI_TEST_SCHEDULES" or "sparse_dist prefetch_sparse_dist one_f_one_b"
if names == "all" then names = table.concat(peri.pipeline.schedules.names, " ") end
local wanted = os.getenv "PERI_TEST_FAULTS" or "dies dry stalls"
local every = os.getenv "PERI_TEST_FAULTS" or os.getenv "PERI_TEST_SCHEDULES"
local machines = os.getenv "PERI_TEST_SLOTS" ~= nil
local function ranks_of(name) return tonumber(os.getenv "PERI_TEST_RANKS" or name == "one_f_one_b" and 4 or 2) end

--- Slots of a schedule in which a fault happens, the first one's number, and how far their numbers are apart.
local function chosen(slots, fault)
  local first, step = fault == "stalls" and not every and 2 or 1, fault ~= "dry" and not every and 2 or 1
  local list = {}
  for number = first, #slots, step do list[#list + 1] = slots[number] end
  return list, first, step
end

--- Start an mpirun of a group of ranks for each slot; where nobody is lost and all are on one machine, of one group for
--- all slots. The function that is returned waits for its end: what each rank of the groups said, by slot and rank, and
--- the log. Ranks write to files of their own, so that none of them waits for what another makes mpirun carry. (On
--- several machines Open MPI 4's mpirun that is to survive a killed process never ends: it is ended when all have said
--- what they have to say; and where a rank is caught within Open MPI, which the kill of a process of another machine
--- does now and then, its last word is what the guard of such calls says.)
local function start(name, fault, deadline, slots, first, step)
  local n, ranks = #slots, ranks_of(name)
  local one_group = fault == "dry" and not machines
  local size = one_group and ranks or ranks * n
  local left = machines and n * (fault == "dry" and ranks or ranks - 1) or math.huge
  local folder, clean = shell.temporary()
  local own_file = ("sh -c 'exec \"$@\" >%s/$OMPI_COMM_WORLD_RANK 2>&1' sh"):format(folder)
  local command = "export LUA_PATH='%s' PERI_NUM_THREADS=1; exec timeout %d %s --enable-recovery -n %d %s %s "
    .. "spec/support/pipeline_fault.lua %s %s %g %d %d %d >%s/mpirun 2>&1 & echo $!"
  local pipe = assert(io.popen(command:format(package.path, 50 * ranks, shell.mpirun, size, own_file, shell.rank, name,
    fault, deadline, ranks, first, step, folder)))
  local process = pipe:read "*n"
  pipe:close()

  --- The last lines of a rank's file, or of mpirun's: one that is caught writes hundreds of megabytes.
  local function last(file, bytes)
    local handle = io.open(("%s/%s"):format(folder, file), "rb")
    if not handle then return "" end
    handle:seek("set", math.max(handle:seek "end" - bytes, 0))
    local text = handle:read "*a"
    handle:close()
    return text
  end

  local ends, places, said, counts = {}, {}, {}, {}
  local each = one_group and n or 1 -- slots of a process
  local function say(rank, slot, member, got)
    ends[slot] = ends[slot] or {}
    if ends[slot][member] then return end
    ends[slot][member], left = got, left - 1
    counts[rank] = (counts[rank] or 0) + 1
    said[rank] = counts[rank] == each
  end
  local function look(rank)
    local text = "\n" .. last(rank, 8192)
    local group, member = text:match "\nat|(%d+)|(%d+)|%d+\n"
    if group then places[rank] = { slot = slots[tonumber(group)], member = tonumber(member) } end
    for slot, own, troubled, seconds, kind,
      message in text:gmatch "%f[^\n](%d+)|(%d+)|(%d+)|([%d.]+)|(%w+)|([^\n]*)\n" do
      say(rank, tonumber(slot), tonumber(own),
        { troubled = tonumber(troubled), seconds = tonumber(seconds), name = kind, message = message })
    end
    local place = not said[rank] and machines and fault == "dies" and places[rank]
    if place and text:match "\nperilune: rank %d+ of the world %b(): a call of MPI [^\n]* not come back" then
      say(rank, place.slot, place.member, { caught = true })
    end
  end

  return function()
    local running = true
    while running and left > 0 do
      os.execute "sleep 0.2"
      running = os.execute(("kill -0 %d 2>/dev/null"):format(process)) == 0
      for rank = 0, size - 1 do
        if not said[rank] then look(rank) end
      end
    end
    while running do
      os.execute(("kill %d 2>/dev/null; sleep 0.1"):format(process))
      running = os.execute(("kill -0 %d 2>/dev/null"):format(process)) == 0
    end
    local log = { last("mpirun", 4000) }
    for rank = 0, size - 1 do
      if not said[rank] then log[#log + 1] = ("rank %d of the world: %s"):format(rank, last(rank, 2000)) end
    end
    clean()
    return ends, table.concat(log, "\n")
  end
end

--- deadline: of exchanges, from the fault on (seconds a rank: all slots' processes share the cores); most: seconds
--- until a rank has ended, its start among others with it; names: of errors. That a process of another machine is gone
--- is seen by those on its own; an exchange in which none of them takes part ends by its deadline.
local faults = {
  dies = { deadline = machines and 5 or 15, most = 40, names = { ETIMEOUT = machines, EPEER = true, EABORTED = true } },
  stalls = { deadline = 1.25, most = 40, names = { ETIMEOUT = true, EPEER = true, EABORTED = true } },
  dry = { deadline = 15, most = 40, names = { ok = true } },
}

--- Whether an error says to whom it happened: by its rank in the group, or in the world where the exchange was one of
--- fewer.
local function names_rank(got, victim)
  local message = got.message
  return message:match(("rank %d%%f[%%D]"):format(victim)) ~= nil
    or message:match(("rank %d of the world"):format(got.troubled)) ~= nil
end

--- Where a rank has no more data, the others go on to the end of theirs; stages of a model load the same batches, which
--- it says.
local function check_dry(name, slot, got, is_victim)
  if name == "one_f_one_b" then
    assert.matches("there is no batch %d on some stages, where others have one", got.message)
    return
  end
  assert.equal("ok", got.name, ("slot %d: %s"):format(slot, got.message))
  local steps, given = got.message:match "^(%d+) of (%d+)$"
  assert.equal(7, tonumber(steps), ("slot %d"):format(slot))
  if is_victim then assert.is_true(tonumber(given) >= 2 and tonumber(given) < 7,
    ("slot %d: %s"):format(slot, got.message))
  else assert.equal(7, tonumber(given), ("slot %d"):format(slot)) end
end

describe("a process that", function()
  local stalled, n = {}, 0
  local function deadline_of(name, fault) return faults[fault].deadline * ranks_of(name) end
  setup(function() -- most of their time they wait
    if not wanted:match "stalls" or not found then return end
    for name in names:gmatch "%S+" do
      if ranks_of(name) == 2 and n < 2 then
        n, stalled[name] = n + 1, start(name, "stalls", deadline_of(name, "stalls"),
          chosen(support.slots(name, 2), "stalls"))
      end
    end
  end)

  for fault, expected in peri.util.ordered(faults) do
    for name in names:gmatch "%S+" do
      local title = fault == "dry" and "has no more data from any slot of %s on lets the others end" or fault
        .. " in any slot of %s is an error on the other ranks"
      if wanted:match(fault) then it(title:format(name), function()
        if not found then return pending "Open MPI was not found" end
        local ranks = ranks_of(name)
        local victim = support.victim(ranks)
        local slots, operations = support.slots(name, ranks)
        assert.is_true(#slots >= operations)
        local picked, first, step = chosen(slots, fault)
        local finish = fault == "stalls" and stalled[name] or start(name, fault, deadline_of(name, fault), picked,
          first, step)
        local ends, log = finish()
        for _, slot in ipairs(picked) do
          for rank = 0, ranks - 1 do
            local got = ends[slot] and ends[slot][rank]
            if rank == victim and fault ~= "dry" then
              assert.is_nil(got)
            else
              local where = ("slot %d, rank %d"):format(slot, rank)
              assert.is_truthy(got, ("%s said nothing:\n%s"):format(where, log))
              if fault == "dry" then check_dry(name, slot, got, rank == victim)
              elseif not got.caught then
                assert.is_true(expected.names[got.name] == true, ("%s: %s: %s"):format(where, got.name, got.message))
                assert.is_true(names_rank(got, victim), where .. ": " .. got.message)
              end
              if not got.caught then
                assert.is_true(got.seconds <= expected.most, ("%s after %.1f s"):format(where, got.seconds))
              end
            end
          end
        end
      end) end
    end
  end
end)
