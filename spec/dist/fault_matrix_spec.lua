-- The fault matrix: what rank 1 of 3 does wrong x where x transport, in collectives and in exchanges of
-- KeyedJaggedTensors. Every cell ends in an error that names rank and operation, on every surviving rank, within the
-- deadline. The cells are in spec/support/fault_matrix.lua. (mpirun: none: it starts its own; nccl: too)
-- deadline: 300 s
-- takes: 35 s, mostly waits
local sim = require "perilune.dist.sim"
local P = require "perilune.ffi"
local matrix = require "spec.support.fault_matrix"
local shell = require "spec.support.shell"

local found = io.popen("command -v mpirun"):read "*l"
local RANKS = 3
--- Seconds: a cell whose operations wait for them ends after them (ranks that wait for a late one keep their processors
--- busy meanwhile); a death is seen before, however busy the machine is.
local DEADLINE = setmetatable({ dies = 5, ["dies uncollected"] = 2, late = 0.2 }, { __index = function() return 1 end })

local function on_sim(script, device, fault, place)
  local function act()
    if fault == "dies" then error("killed", 0) end
    for _ = 1, 1000 do coroutine.yield() end -- more rounds than a device of the test takes to finish anything
  end
  local function body(_, world) matrix.run(script, world, fault, place, device, act) end
  local _, errors = sim.run(RANKS, body, { device = device, catch = true })
  for rank = 0, RANKS - 1 do
    local wrong = not (rank == 1 and fault == "dies") and matrix.judge(fault, rank, errors[rank + 1])
    assert.is_nil(wrong or nil, ("rank %d: %s"):format(rank, tostring(wrong)))
  end
end

local function cell_name(script, fault, place) return ("%s,%s,%g"):format(script, fault, place) end

--- Run cells { script, fault, place } in one mpirun, each in a group of its own; a death needs a run of its own.
--- Returns results by the cell's name and rank.
local function mpirun(cells)
  local results, log, words = {}, {}, {}
  for i, c in ipairs(cells) do words[i] = ("'%s,%g'"):format(cell_name(unpack(c)), DEADLINE[c[2]]) end
  local folder, clean = shell.temporary()
  local pipe = assert(io.popen(("PERI_TEST_FOLDER='%s' LUA_PATH='%s' PERI_NUM_THREADS=1 timeout -k 3 100 %s "
    .. "--enable-recovery -n %d %s spec/support/fault_matrix.lua %s 2>&1"):format(
    folder, package.path, shell.mpirun, RANKS, shell.rank, table.concat(words, " "))))
  for line in pipe:lines() do
    local cell, rank, seconds, name, message = line:match "^([%w ]+,[%w ]+,[%d.]+)|(%d+)|([%d.]+)|(%w+)|(.*)$"
    if cell then
      results[cell] = results[cell] or {}
      results[cell][tonumber(rank)] = { seconds = tonumber(seconds), err = name ~= "ok"
        and { name = name, message = message } or nil }
    end
    log[#log + 1] = line
  end
  pipe:close()
  clean()
  return results, table.concat(log, "\n")
end

local together, log_of_all
--- All cells in which no rank dies, in one mpirun.
local function without_deaths()
  if not together then
    local cells = {}
    for _, name in ipairs(matrix.order) do
      for _, fault in ipairs(matrix.scripts[name].faults) do
        for _, place in ipairs(fault ~= "dies" and matrix.scripts[name].places or {}) do
          cells[#cells + 1] = { name, fault, place }
        end
      end
    end
    together, log_of_all = mpirun(cells)
  end
  return together, log_of_all
end

local function on_mpi(script, fault, place, results, log)
  local cell = results[cell_name(script, fault, place)] or {}
  for rank = 0, RANKS - 1 do
    local got = cell[rank]
    if rank == 1 and fault == "dies" then
      assert.is_nil(got, "the dead speak: " .. log)
    else
      assert.is_truthy(got, ("rank %d said nothing:\n%s"):format(rank, log))
      local wrong = matrix.judge(fault, rank, got.err)
      assert.is_nil(wrong, ("rank %d: %s\n%s"):format(rank, tostring(wrong), log))
      -- 2 s: other work on the machine
      local most = DEADLINE[fault] + (fault == "late" and rank == 1 and matrix.LATE or 2)
      assert.is_true(got.seconds <= most, ("rank %d after %.2f s"):format(rank, got.seconds))
    end
  end
end

describe("the fault matrix", function()
  setup(function() P.C.peri_log_level_set(P.C.PERI_LOG_ERROR) end)
  teardown(function() P.C.peri_log_level_set(P.C.PERI_LOG_WARN) end)

  local function cells(name, script, fault)
    for _, place in ipairs(script.places) do
      for _, device in ipairs { "cpu", "opaque" } do
        it(("sim, %s: %s: rank 1, %s: %s"):format(device, name, script.place_names[place], fault), function()
          on_sim(name, device, fault, place)
        end)
      end
    end

    for _, place in ipairs(script.places) do
      it(("mpi: %s: rank 1, %s: %s"):format(name, script.place_names[place], fault), function()
        if not found then return pending "Open MPI was not found" end
        if fault ~= "dies" then return on_mpi(name, fault, place, without_deaths()) end
        -- a process for each place: in batches one dies with something posted; before, as between collectives
        if name == "kjt" and place % 1 == 0 then return end
        on_mpi(name, fault, place, mpirun { { name, fault, place } })
      end)
    end
  end

  it("mpi: a rank that has died is seen to be gone before its parent collects it", function()
    if not found then return pending "Open MPI was not found" end
    local results, log = mpirun { { "collectives", "dies uncollected", 1 } }
    for _, rank in ipairs { 0, 2 } do
      local got = (results[cell_name("collectives", "dies uncollected", 1)] or {})[rank]
      assert.is_truthy(got, ("rank %d said nothing:\n%s"):format(rank, log))
      assert.is_nil(matrix.judge("dies", rank, got.err), log)
    end
  end)

  for _, name in ipairs(matrix.order) do
    local script = matrix.scripts[name]
    for _, fault in ipairs(script.faults) do cells(name, script, fault) end
  end
end)
