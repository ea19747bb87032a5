-- launch/openmpi.lua: what versions of Open MPI do differently: the words that mpirun takes, and those in which it
-- tells how ranks ended.
--
-- Up to version 4 mpirun is a program of its own (ORTE). Since version 5 it becomes another program, prterun (PRRTE),
-- which has other parameters and other boxes. `find` says which one this machine has. What both write may stand in one
-- list: no text of the one means something else in the other. Boxes are matched with every run of white space made one
-- space, as they are wrapped at some column.
local M = {}

-- -- the words that mpirun takes --------------------------------------------------------------------------------------

--- By the first number of a version:
---   isolated  words that keep mpirun from looking for ssh, of which it complains where there is none
---   apart     words that keep ranks from copying from each other's memory, for where that is forbidden
---   folders   options that take a folder for the files that mpirun and ranks make
---   bindings  what ranks can be bound to
local facts = {
  [4] = {
    isolated = { "--mca", "plm", "isolated" },
    apart = { "--mca", "btl_vader_single_copy_mechanism", "none" },
    folders = { { "--mca", "orte_tmpdir_base" }, { "--mca", "btl_vader_backing_directory" } },
    bindings = { "none", "hwthread", "core", "l1cache", "l2cache", "l3cache", "socket", "numa", "board", "cpu-list" },
  },
  [5] = {
    isolated = {}, -- it looks when it needs it
    apart = { "--mca", "smsc", "^cma" },
    folders = { { "--prtemca", "prte_tmpdir_base" }, { "--mca", "btl_sm_backing_directory" } },
    bindings = { "none", "hwthread", "core", "l1cache", "l2cache", "l3cache", "package", "socket", "numa" },
  },
}

--- Facts of a version, by what `mpirun --version` prints; nil and why not.
function M.version_facts(text)
  local version = ("\n" .. text):match "\nmpirun %(Open MPI%) (%d+[%w.]*)"
  if version and text:find("unable to find network interfaces", 1, true) then
    return nil, "it finds no network interface, and ranks of one machine, too, meet through the loopback interface "
      .. "(as root: ip link set lo up)"
  end
  if not version then
    return nil, ("mpirun is another one: it says that it is '%s'"):format(text:match "[^\n]+" or "nothing")
  end
  local major = tonumber(version:match "^%d+")
  local f = { version = version }
  for key, value in pairs(facts[major < 5 and 4 or 5]) do f[key] = value end -- any order: a copy
  return f
end

--- The facts of this machine's mpirun; nil and why there are none.
function M.find()
  local pipe = io.popen "command -v mpirun >/dev/null 2>&1 && exec mpirun --version 2>&1"
  local text = pipe:read "*a"
  pipe:close()
  if text == "" then return nil, "mpirun: No such file or directory" end
  return M.version_facts(text)
end

--- All that some version binds ranks to.
M.bindings = { "none", "hwthread", "core", "l1cache", "l2cache", "l3cache", "package", "socket", "numa", "board",
  "cpu-list" }

--- How many words follow options of mpirun, so that `--mpi --mca btl tcp,self` needs no quotes.
M.values = { mca = 2, gmca = 2, omca = 2, gomca = 2, prtemca = 2, pmixmca = 2, gpmixmca = 2, x = 1, prefix = 1,
  wdir = 1, npernode = 1, ["map-by"] = 1, ["rank-by"] = 1, ["bind-to"] = 1, ["runtime-options"] = 1,
  ["output-filename"] = 1, output = 1, tune = 1 }

--- Words by which mpirun is told to let the others live when a rank fails: --enable-recovery is known to all versions.
local tolerant = { ["orte_enable_recovery"] = true, ["orte_abort_on_non_zero_status"] = true,
  ["state_base_recoverable"] = true, ["state_base_error_non_zero_exit"] = true, ["state_base_continuous"] = true,
  ["--runtime-options"] = true, ["--enable-recovery"] = true, ["-enable-recovery"] = true, ["--continuous"] = true,
  ["-continuous"] = true }

--- Is one of the words of a command such a word?
function M.tolerates(command)
  for _, word in ipairs(command) do
    if tolerant[word] then return true end
  end
  return false
end

-- -- what mpirun says -------------------------------------------------------------------------------------------------

--- Boxes that only repeat how a rank ended: a pattern, and what to say if nobody has.
M.endings = {
  { "Primary job terminated normally" },
  { "noticed that process rank (%d+) with PID %d+ on node (%S+) exited on signal (%d+ %b())",
    "rank %s on %s was killed by signal %s" },
  { "processes exited with non%-zero status.-%[%S*,(%d+)%] Exit code: (%d+)", "rank %s ended with exit code %s" },
  { "exited due to process rank (%d+) with PID %d+ on node (%S+) exiting improperly",
    "rank %s on %s ended without leaving the world, or never joined it" },
  { "exited due to process rank (%d+) with PID %d+ on node (%S+) calling \"abort\"", "rank %s on %s called MPI_Abort" },
}

--- Boxes that say in many lines what fits in one: a pattern, and the line.
M.refusals = {
  { "not enough slots available",
    "the nodes offer fewer slots than there are ranks: say how many (--host a:4,b:4), or allow more ranks "
      .. "than slots with --mpi --oversubscribe" },
  { "unable to reliably start one or more daemons",
    "mpirun could not start on every node, or has lost one: each must be reachable by ssh without a "
      .. "password, and have perilune and Open MPI where this one has them" },
  { "lost communication with a remote daemon.-Remote daemon: %S+ on node (%S+)",
    "mpirun does not reach node %s, or has lost it: each must "
      .. "be reachable by ssh without a password, and have perilune and Open MPI where this one has them" },
  { "All nodes which are allocated for this job are already filled",
    "the nodes offer no slots: say how many (--host a:4,b:4)" },
  { "No nodes are available for this job", "mpirun has no nodes for these ranks: see --host and --hostfile" },
  { "does not match the expected format: Option: (%S+) Param: (%S+)",
    "mpirun cannot read its option '%s', which got '%s': see --mpi" },
  { "unrecognized option was included on the mpirun command line: Option: (%S+)",
    "mpirun: unknown option \"%s\": see --mpi" },
  { "unable to find the specified executable file.-first unrecognized command line token.-Executable: (%S+)",
    "mpirun takes '%s' for the program to run: an option before it got too few words, or too many: see --mpi" },
  { "bind%-to directive is not recognized: Directive: (%S+) Valid directives: (%S+)",
    "mpirun cannot bind ranks to '%s', allowed: %s" },
  { "was unable to allocate.-hostfile", "mpirun cannot use these nodes: see --host and --hostfile" },
}

--- Exit codes of an mpirun that has said nothing on its standard error: prterun writes about its command line to the
--- standard output.
M.codes = { [213] = "mpirun: its command line is refused, and its standard output says why: see --mpi" }

--- Lines that tell what the launcher tells, or nothing on which a user could act. blank: an empty line belongs to it.
M.noise = { { "^mpirun: Forwarding signal" }, { "^mpirun: abort is already in progress" }, { "^mpirun: killing job" },
  { "^Type 'mpirun %-%-help' for usage" }, { "^%[[^%]]+%] plm:ssh: Warning: setpgid" },
  { "^%[warn%] Epoll " }, -- of libevent, when a node is lost
  { "^Abort is in progress%.%.%.hit ctrl%-c again", blank = true } }

--- Boxes and lines that follow from the end of another rank; they may come before anybody has said that it ended.
--- causes: or they tell why ranks do not reach each other.
M.consequences = { { "peer process has unexpectedly disconnected" },
  { "failed to TCP connect to a peer", causes = true }, { "[OP]RR?TE does not know how to route a message" },
  { "system call failed during shared memory initialization" }, { "^%[[^%]]+%]%[%[[^%]]+%],%d+%]%[%S*btl_tcp" },
  { "^%[[^%]]+%] PMIX ERROR: " },
  -- of Open MPI 5, where a rank dies within MPI_Init
  { "It looks like MPI_INIT failed for some reason" }, { "^%[[^%]]+%] %*%*%* " },
  { "unable to reach each other for MPI communications", causes = true },
  { "MPI_INIT has failed because at least one", causes = true },
  { "^Unable to find reachable pairing between local and remote interfaces", causes = true } }

return M
