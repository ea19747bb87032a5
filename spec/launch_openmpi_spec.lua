-- What launch/openmpi.lua knows of versions of Open MPI, and what the launcher makes of mpirun's words.
local launch = require "perilune.launch"
local openmpi = require "perilune.launch.openmpi"
local job = require "perilune.launch.job"

describe("facts of Open MPI", function()
  it("are told by what mpirun says of its version", function()
    for version, apart in pairs { ["4.1.4"] = "vader", ["3.1.6"] = "vader", ["5.0.7"] = "smsc", ["5.1.0rc1"] = "smsc",
      ["6.0.0"] = "smsc" } do
      local f = openmpi.version_facts(
        ("mpirun (Open MPI) %s\n\nReport bugs to http://www.open-mpi.org/community/help/\n"):format(
        version))
      assert.equal(version, f.version)
      assert.matches(apart, table.concat(f.apart, " "))
    end
    local f, why = openmpi.version_facts "HYDRA build details:\n    Version: 4.0.2\n"
    assert.is_nil(f)
    assert.equal("mpirun is another one: it says that it is 'HYDRA build details:'", why)
  end)

  it("say what is missing where there is no network interface", function() -- as under `unshare -n`
    local f, why = openmpi.version_facts("[vm:1] opal_ifinit: unable to find network interfaces.\nmpirun (Open MPI) "
      .. "4.1.4\n")
    assert.is_nil(f)
    assert.matches("no network interface", why)
    assert.equal("4.1.4", openmpi.version_facts("a warning\nmpirun (Open MPI) 4.1.4\n").version)
  end)

  it("say what ranks can be bound to", function()
    local function refusal(version, bind)
      return launch.refusal({ ranks = 2, bind = bind },
        { openmpi = openmpi.version_facts(("mpirun (Open MPI) %s\n"):format(version)), files = 1000, memory = 1000,
          cpus = 4 })
    end
    assert.is_nil(refusal("4.1.4", "board"))
    assert.is_nil(refusal("5.0.7", "package:if-supported"))
    assert.equal("--bind: 'board', which Open MPI 5.0.7 does not know, allowed: none, hwthread, core, l1cache, "
      .. "l2cache, l3cache, package, socket, numa", refusal("5.0.7", "board:overload-allowed"))
    assert.matches("'package', which Open MPI 4.1.4 does not know", refusal("4.1.4", "package"))
  end)
end)

describe("what mpirun says", function()
  it("of a rank that was killed within MPI_Init is its watcher's line alone, behind a zero byte too, and that "
    .. "signal's code", function()
    local out = ""
    local F = job.filter(function(text) out = out .. text end)
    local edge = ("-"):rep(74) .. "\n"
    F.feed(edge .. "It looks like MPI_INIT failed for some reason; your parallel process is\nlikely to abort.\n" .. edge
      .. "[vm:00000] *** An error occurred in MPI_Init_thread\n[vm:00000] *** Unknown error\n")
    local line = "perilune: rank 1 (process 7 on vm, 0.6 s old) was killed by signal 9 (SIGKILL); not by the "
      .. "out-of-memory killer\n"
    F.feed("\0" .. line)
    F.flush()
    F.finish(false)
    assert.equal(line, out)
    assert.equal(137, F.killed)
    assert.is_true(F.spoke and F.gone)
  end)

  it("stays, with a last line, where it is in a box that nobody knows", function()
    local said = {}
    local F = job.filter(function(text) said[#said + 1] = text end)
    local box = ("-"):rep(74) .. "\nThe moon is full.\n" .. ("-"):rep(74) .. "\n"
    F.feed(box)
    F.flush()
    assert.equal(box, table.concat(said))
    assert.is_true(F.boxed)
    assert.is_false(F.spoke)
  end)

  it("is put into a line of ours, however it is wrapped, whichever version says it", function()
    local line = ("-"):rep(74) .. "\n"
    local function said(text)
      local out = ""
      local F = job.filter(function(t) out = out .. t end)
      F.feed(line .. text .. line)
      F.flush()
      F.finish(false)
      return F.ending or out
    end
    assert.equal("rank 1 on moon was killed by signal 9 (Killed)",
      said "mpirun noticed that process rank 1 with PID 0 on node moon exited on signal 9 (Killed).\n")
    assert.equal("rank 1 on moon was killed by signal 11 (Segmentation fault)",
      said("prterun noticed that process rank 1 with PID 1641 on "
        .. "node moon exited on\nsignal 11 (Segmentation fault).\n"))
    local exited = "processes exited with non-zero status,\nthus causing the job to be terminated. The first process "
      .. "to do so was:\n\n"
    assert.equal("rank 1 ended with exit code 5", said("mpirun detected that one or more " .. exited
      .. "  Process name: [[23110,1],1]\n  Exit code:    5\n"))
    assert.equal("rank 1 ended with exit code 5", said("prterun detected that one or more " .. exited
      .. "   Process name: [prterun-moon-16385@1,1]\n   Exit code:    5\n"))
    assert.equal("perilune: mpirun: unknown option \"--no-such\": see --mpi\n",
      said("An unrecognized option was included on the mpirun " .. "command line:\n\n  Option: --no-such\n\nPlease "
        .. "use the \"mpirun --help\" command to obtain a list of\nall supported options.\n"))
    assert.matches("^perilune: mpirun does not reach node mars, or has lost it: [^\n]*\n$",
      said("PRTE has lost communication with a " .. "remote daemon.\n\n  HNP daemon   : [prterun-moon-16@0,0] on node "
      .. "moon\n  Remote daemon: [prterun-moon-16@0,1] on node mars\n\nThis is usually due to either a failure of the "
      .. "TCP network\n"))
  end)

  it("about an order to end is left out, with the empty line behind it", function()
    local out = ""
    local F = job.filter(function(t) out = out .. t end)
    F.feed "Abort is in progress...hit ctrl-c again to forcibly terminate\n\n\na\n"
    F.flush()
    assert.equal("\na\n", out)
  end)

  it("leaves no zero byte behind a box, and every other one", function()
    local out = ""
    local F = job.filter(function(t) out = out .. t end)
    F.feed(("-"):rep(74) .. "\nThe moon is full.\n" .. ("-"):rep(74) .. "\n")
    F.feed "\0"
    F.feed "a\0b\n\n\0\n"
    F.flush()
    assert.equal("a\0b\n\n\0\n", out:sub(-7))
    assert.matches("%-\n$", out:sub(1, -8))
  end)

  it("about a rank that is gone waits until somebody says more", function()
    local line = ("-"):rep(74) .. "\n"
    local lost = line .. "An MPI communication peer process has unexpectedly disconnected.\n" .. line
    local unreachable = line
      .. "WARNING: Open MPI failed to TCP connect to a peer MPI process.\n  Error: No route to host\n" .. line
    local function said(words, good)
      local text = ""
      local F = job.filter(function(t) text = text .. t end)
      F.feed(lost .. unreachable)
      F.flush()
      assert.equal("", text)
      F.feed(words)
      F.flush()
      F.finish(good)
      return text, F.boxed
    end
    local killed = "perilune: rank 2 (process 7 on moon) was killed by signal 9 (SIGKILL)\n"
    assert.equal(killed, said(killed))
    local late = "[ranks 0-1] no end after 5 s\n" -- they may not have reached each other
    assert.equal(late .. unreachable, said(late))
    assert.same({ lost .. unreachable, true }, { said "" })
    assert.equal("", (said("", true)))
  end)
end)
