-- What goes wrong between processes: in a short mpirun of three ranks rank 1 misbehaves (spec/support/fault_rank.lua),
-- which ends in an error that names it, on every surviving rank, before the deadline of 1.5 s. Faults that leave all
-- ranks alive have one mpirun together. (mpirun: none: it starts its own)
-- deadline: 120 s
-- takes: 35 s, mostly waits
local peri = require "perilune"
local shell = require "spec.support.shell"

local found = io.popen("command -v mpirun"):read "*l"

local function mpirun(words, environment)
  return assert(io.popen(("echo $$; export LUA_PATH='%s' PERI_NUM_THREADS=1 %s; exec timeout -k 3 40 %s %s "
    .. "2>&1"):format(package.path, environment or "", shell.mpirun, words)))
end

--- Lines by fault and rank: { seconds =, name =, message = }. Open MPI 4's mpirun that is to survive failures does not
--- always end: where some are expected it is ended when @speak lines have said what ranks have to say, and the log has
--- what it is to have.
local function run(faults, speak, printed, preload)
  local rank_command = preload and shell.rank:gsub("LD_PRELOAD='(.-)'", ("LD_PRELOAD='%%1 %s'"):format(preload))
    or shell.rank
  local found_of, log, said = {}, {}, 0
  for fault in faults:gmatch "[^,]+" do found_of[fault] = {} end
  local pipe = mpirun(("--enable-recovery -n 3 %s spec/support/fault_rank.lua %s"):format(rank_command, faults))
  local process = pipe:read "*n"
  for line in pipe:lines() do
    local fault, rank, seconds, name, message = line:match "^(%w+)|(%d+)|([%d.]+)|(%w+)|(.*)$"
    if rank then found_of[fault][tonumber(rank)] = { seconds = tonumber(seconds), name = name, message = message } end
    said = said + (rank and 1 or 0)
    log[#log + 1] = line
    if said == speak and (not printed or table.concat(log, "\n"):match(printed)) then os.execute("kill " .. process) end
  end
  pipe:close()
  return found_of, table.concat(log, "\n")
end

-- faults that all ranks survive
local SURVIVED = { "none", "late", "operation", "dtype", "size", "rarely", "tag", "splits", "more" }
local together, log_of_all
local survived = {}
for _, fault in ipairs(SURVIVED) do survived[fault] = true end

--- `printed`: a pattern of what else the ranks must have printed.
local function case(fault, expected, least, most, printed, preload)
  it(fault, function()
    if not found then return pending "Open MPI was not found" end
    local ranks, log
    if survived[fault] then
      if not together then together, log_of_all = run(table.concat(SURVIVED, ","), 3 * #SURVIVED) end
      ranks, log = together[fault], log_of_all
    else
      local speak = 0
      for _, want in ipairs(expected) do speak = speak + (want == "gone" and 0 or 1) end
      ranks, log = run(fault, speak, printed, preload and preload())
      ranks = ranks[fault]
    end
    if printed then assert.matches(printed, log) end
    for rank = 0, 2 do
      local want, got = expected[rank + 1], ranks[rank]
      if want == "gone" then assert.is_nil(got, log)
      else
        assert.is_truthy(got, ("rank %d said nothing:\n%s"):format(rank, log))
        local names, pattern = want:match "^(%S+) ?(.*)$"
        assert.is_true(("|" .. names .. "|"):find("|" .. got.name .. "|", 1, true) ~= nil,
          ("rank %d: %s, wanted %s\n%s"):format(
          rank, got.name, names, log))
        assert.is_truthy(got.message:match(pattern), ("rank %d: '%s' lacks '%s'"):format(rank, got.message, pattern))
        assert.is_true(got.seconds <= (most or 1) and got.seconds >= (least or 0),
          ("rank %d after %.2f s"):format(rank, got.seconds))
      end
    end
  end)
end

local function all(text) return { text, text, text } end

describe("mpirun, rank 1", function()
  case("none", all "ok")
  case("operation", all "EMISMATCH the ranks disagree: .*rank 1 posted operation 2: all_gather f32 %[3 3 3%]")
  case("dtype", all "EMISMATCH the ranks disagree: .*rank 1 posted operation 2: all_reduce sum f64 %[3%]")
  case("size", all "EMISMATCH the ranks disagree: .*rank 1 posted operation 2: all_reduce sum f32 %[4%]")
  case("rarely", all "EMISMATCH the ranks disagree: .*rank 1 posted operation 2: all_reduce sum f32 %[4%]")
  case("tag", all "EMISMATCH the ranks disagree: .*rank 1 posted operation 2: all_reduce sum f32 %[3%] tag 7")
  case("splits", all "EMISMATCH rank 1 sent more than the 8 bytes that rank 2 expects")
  case("more", all "EMISMATCH the ranks disagree: .*rank 1 posted operation 2: barrier")
  case("making", all("EMISMATCH the ranks disagree: rank 1 of the world makes a group of 2 ranks, and rank 0, one of "
    .. "them, waits for it elsewhere %(.*operation 2: all_reduce sum f32 %[3%]"))
  case("late", all "ok", 0.4)
  case("absent", { "ETIMEOUT|EPEER waiting for rank 1 %(no answer", "ok|EPEER",
    "ETIMEOUT|EPEER waiting for rank 1 %(no answer" }, 1.4, 6)
  case("leaves", { "EPEER rank 1 has left the world", "ok|EPEER", "EPEER rank 1 has left the world" })
  case("exits", { "EPEER rank 1 has left the world", "gone", "EPEER rank 1 has left the world" })
  case("dies", { "EPEER rank 1 %(process %d+%) is gone", "gone", "EPEER rank 1 %(process %d+%) is gone" })
  case("group", { "EPEER rank 1 %(process %d+%) is gone", "gone",
    "EPEER rank 0 %(rank 1 of the world, process %d+%) is gone" }, 0, 2.5)
  case("elsewhere", { "EPEER rank [12] has left the world and will never post it, after: the ranks disagree: "
    .. ".*all_reduce sum f32 %[4%]", "EMISMATCH the ranks disagree: .*all_reduce sum f32 %[4%]",
    "EMISMATCH the ranks disagree: .*all_reduce sum f32 %[4%]" })
  case("fails", { "EPEER rank 1 gave up: the disk is full", "Lua the disk is full",
    "EPEER rank 1 gave up: the disk is full" })
  case("lost", all "ETIMEOUT|EPEER waiting for", 1.4, 3,
    "the last operations of rank %d in group 'world':.*operation 2: all_reduce sum f32 %[3%], [^\n]*posted "
      .. "[^\n]*pending")
end)

describe("mpirun, rank 1", function()
  local folder, clean = shell.temporary()
  teardown(clean)
  local function stuck()
    local library = folder .. "/stuck.so"
    local out, status = shell.run(("%s -shared -fPIC -o %s spec/support/stuck.c -ldl"):format(os.getenv "CC" or "cc",
      library))
    assert.equal(0, status, out)
    return library
  end
  -- spins: of a world of 30 s; processor time comes as other work on the machine lets it
  for fault, limit in peri.util.ordered { stuck = { "5 s", 8 }, spins = { "4 s of processor time", 20 } } do
    case(fault, { "ETIMEOUT|EPEER rank 1 %(", "gone", "ETIMEOUT|EPEER rank 1 %(" }, 1.4, limit[2],
      ("perilune: rank 1 of the world %%([^ ]+, process %%d+%%): a call of MPI that never waits "
        .. "has not come back for %s during operation 2: ")
        :format(limit[1]), stuck)
  end
end)

describe("mpirun, SIGPIPE", function()
  it("is an error of the write in a rank, and the default in its children", function()
    if not found then return pending "Open MPI was not found" end
    local pipe = mpirun(("-n 2 %s spec/support/broken_pipe.lua"):format(shell.rank))
    local text = pipe:read "*a"
    pipe:close()
    for rank = 0, 1 do
      assert.is_truthy(text:find(("rank %d: write -1, children end by 13"):format(rank), 1, true), text)
    end
  end)
end)

describe("mpirun, messages in pieces", function()
  for _, pieces in ipairs { { 100, 1 }, { 4099, 1 }, { 100, 0 }, { 4099, 0 }, { 2 ^ 30, 0 } } do
    local limit, near = unpack(pieces)
    it(("of at most %d bytes, %s"):format(limit, near == 1 and "large data copied" or "messages only"), function()
      if not found then return pending "Open MPI was not found" end
      local pipe = mpirun(("-n 3 %s spec/support/pieces_rank.lua"):format(shell.rank),
        ("PERI_TEST_COUNT_LIMIT=%d PERI_MPI_NEAR=%d"):format(limit, near))
      local text = pipe:read "*a"
      pipe:close()
      for rank = 0, 2 do assert.is_truthy(("\n" .. text):find(("\n%d ok\n"):format(rank), 1, true), text) end
    end)
  end
end)
