-- fault_rank.lua: one rank of a world in which rank 1 does something wrong: luajit fault_rank.lua FAULT[,FAULT...]. Of
-- several faults each is in a group of its own. Prints one line "FAULT|rank|seconds|error name|message" for each. Run
-- by spec/dist/mpi_fault_spec.lua under mpirun.
local peri = require "perilune"
local P = require "perilune.ffi"

local faults = {}
for fault in arg[1]:gmatch "[^,]+" do faults[#faults + 1] = fault end
local the_world = peri.init { timeout = arg[1] == "stuck" and 5 or 30 } -- joining may take its time
the_world:timeout(1.5)
local rank, n = the_world.rank_number, the_world.world_size
if arg[1] ~= "lost" then P.C.peri_log_level_set(P.C.PERI_LOG_ERROR) end -- there the record of operations is printed

--- One fault in a group of all ranks.
local function meet(fault, world)
  local function same(k)
    local list = {}
    for i = 1, n do list[i] = k end
    return list
  end

  --- What rank 1 does while the others post all_reduce of 3 numbers.
  local odd = {
    none = function() world:all_reduce(peri.ones { 3 }):wait() end,
    operation = function() world:all_gather(peri.ones { 3 }):wait() end,
    dtype = function() world:all_reduce(peri.ones({ 3 }, "f64")):wait() end,
    size = function() world:all_reduce(peri.ones { 4 }):wait() end,
    tag = function() world:all_reduce(peri.ones { 3 }, "sum", 7):wait() end,
    -- one operation too many before it
    more = function() world:barrier():wait() world:all_reduce(peri.ones { 3 }):wait() end,
    making = function() world:new_group({ 0, 1 }, "nobody else makes it") end,
    late = function() os.execute "sleep 0.5" world:all_reduce(peri.ones { 3 }):wait() end,
    absent = function() os.execute "sleep 3" end,
    leaves = function() end,
    exits = function() os.exit(3) end,
    dies = function() os.execute "kill -9 $PPID" end,
    fails = function() error("the disk is full", 0) end,
    lost = function()
      P.check(P.C.peri_fault_arm("coll_drop", 1))
      world:all_reduce(peri.ones { 3 }):wait()
    end,
  }
  odd.splits = function()
    local send = same(2)
    send[3] = 5
    world:all_to_all_v(peri.ones { 2 * n + 3 }, send, same(2)):wait()
    world:barrier():wait()
  end

  --- Wait for @work with a test now and then only, as on a machine that has much else to do.
  local function wait(work)
    while fault == "rarely" and not work:test() do os.execute "sleep 0.1" end
    return work:wait()
  end
  function odd.stuck() -- spec/support/stuck.c sees it
    require "ffi".cdef "int setenv(const char *, const char *, int);"
    require "ffi".C.setenv("STUCK", fault, 1)
    world:all_reduce(peri.ones { 3 }):wait()
  end
  odd.spins = odd.stuck
  function odd.rarely() wait(world:all_reduce(peri.ones { 4 })) end

  -- A group in which rank 1 of the world is rank 0.
  local pair = (fault == "group" or fault == "elsewhere") and rank > 0 and world:new_group({ 1, 2 }, "pair")
  odd.group = odd.dies
  function odd.elsewhere() pair:all_reduce(peri.ones { 4 }):wait() end -- rank 0 hears of it only that the two have left
  local start = tonumber(P.C.peri_time_ns())
  local ok, err = pcall(function()
    world:barrier():wait() -- that rank 1 has given up may be known before its last message is
    start = tonumber(P.C.peri_time_ns())
    if rank == 1 then odd[fault]()
    elseif fault == "splits" then
      world:all_to_all_v(peri.ones { 2 * n }, same(2), same(2)):wait()
      world:barrier():wait()
    else
      if fault == "group" and rank == 0 then os.execute "sleep 1" end -- or its error would be the first
      wait((pair or world):all_reduce(peri.ones { 3 }))
    end
    if #faults == 1 then peri.finish() end
  end)
  local text = not ok and tostring(err):gsub("\n.*", "") or ""
  io.stdout:write(("%s|%d|%.2f|%s|%s\n"):format(fault, rank, (tonumber(P.C.peri_time_ns()) - start) / 1e9,
    ok and "ok" or err.name or "Lua", text))
  io.stdout:flush()
  if not ok and fault == "fails" and rank == 1 then world:abort(text) end
  -- Open MPI 5's mpirun that is to survive failures counts a rank that failed twice: it takes the job for finished, and
  -- ends the third rank, when the second one ends. Here the third hears of the failure a little later.
  if not ok and (fault == "stuck" or fault == "spins") then os.execute "sleep 2" end
end

local all = {}
for r = 1, n do all[r] = r - 1 end
for _, fault in ipairs(faults) do meet(fault, #faults == 1 and the_world or the_world:new_group(all, fault)) end
os.exit(0, true) -- Open MPI 5 at times loses the last words of a rank that ends with another code while others go on
