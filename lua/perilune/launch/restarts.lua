-- launch/restarts.lua: --max-restarts N: a job whose rank died starts again from its newest checkpoint, on the hosts
-- that are left.
--
-- The count is for the job. It ends for good where starting again would only repeat itself: a failure before the first
-- step, and a failure that is the one before over again, without a newer checkpoint. A job that was asked to stop by a
-- signal to the launcher has stopped; one that ends with 75 by itself (a signal to one of its ranks, peri.request_stop)
-- wants to be started again.
local util = require "perilune.util"
local names = require "perilune.checkpoint.names"

local M = {}

local STOPPED = 75     -- exit code (EX_TEMPFAIL): see launch/job.lua
local PROBE_SECONDS = 10

local function say(text, ...) io.stderr:write("perilune: ", text:format(...), "\n") end

--- The newest checkpoint of a folder that a Saver has made; nil: there is none.
local function newest(folder)
  if not folder then return nil end
  local ok, list = pcall(names.list, folder)
  return ok and list[1] and list[1].name or nil
end

-- -- hosts ------------------------------------------------------------------------------------------------------------

local function short(name) return (name:match "^[^.]*") end

--- The nodes of a run, in order: a list of { name =, slots = (nil: not said) }; nil: all ranks are here, or a batch
--- system knows.
function M.hosts_of(options)
  local list, by_name = {}, {}
  local function add(name, slots)
    local entry = by_name[name]
    if not entry then
      entry = { name = name }
      by_name[name], list[#list + 1] = entry, entry
    end
    if slots then entry.slots = (entry.slots or 0) + slots end
  end
  local file = options.hostfile or os.getenv "OMPI_MCA_orte_default_hostfile"
    or os.getenv "PRTE_MCA_prte_default_hostfile"
  if options.hosts then
    for entry in options.hosts:gmatch "[^,]+" do
      local name, slots = entry:match "^([^:]+):?(.*)$"
      add(name, slots == "" and 1 or tonumber(slots))
    end
  elseif file then
    for line in ((util.read_file(file) or "") .. "\n"):gmatch "([^\n]*)\n" do
      line = line:gsub("#.*", "")
      local name = line:match "^%s*(%S+)"
      if name then add(name, tonumber(line:match "slots%s*=%s*(%d+)")) end
    end
  end
  return #list > 0 and list or nil
end

local function quoted(word) return "'" .. word:gsub("'", "'\\''") .. "'" end

--- Whether a command that takes at most PROBE_SECONDS succeeds.
local function succeeds(command)
  return os.execute(("timeout %d %s >/dev/null 2>&1 </dev/null"):format(PROBE_SECONDS, command)) == 0
end

--- The name of this machine.
local function own_name()
  local file = io.open "/proc/sys/kernel/hostname"
  local name = file and file:read "*l" or ""
  if file then file:close() end
  return short(name)
end

--- Whether a node's network answers: who refuses a connection is there too. (The agent that starts programs there may
--- go another way.)
local function reached(name)
  local pipe = io.popen(("timeout %d bash -c 'exec 3<>/dev/tcp/%s/22; echo open' 2>&1 </dev/null"):format(PROBE_SECONDS,
    name))
  local text = pipe:read "*a"
  pipe:close()
  return text:find "open" ~= nil or text:find "refused" ~= nil
end

--- Whether a node can have ranks. silent: its ranks were not heard to end, so its network is asked too.
local function answers(name, silent)
  if short(name) == own_name() or name == "localhost" or not name:match "^[%w._%-]+$" then return true end
  local agent = os.getenv "OMPI_MCA_plm_rsh_agent" or os.getenv "PRTE_MCA_plm_ssh_agent"
    or "ssh -o BatchMode=yes -o ConnectTimeout=5"
  if not succeeds(("%s %s true"):format(agent, quoted(name))) then return false end
  return not silent or reached(name)
end

--- Of the nodes of a run that failed, those that are left, as options for the next; nil: all are. story: of
--- launch/job.lua.
local function without_lost(options, story)
  local hosts = M.hosts_of(options)
  if not hosts then return nil end
  local ranks_on, silent, left, lost, ranks = {}, {}, {}, {}, 0
  for rank = 0, options.ranks - 1 do
    local host = story.started[rank] and short(story.started[rank]:match " on (%S+)$" or "")
    if host then
      ranks_on[host] = (ranks_on[host] or 0) + 1
      silent[host] = silent[host] or not story.ended[rank]
    end
  end
  for _, host in ipairs(hosts) do
    local name = short(host.name)
    if answers(host.name, silent[name] or not ranks_on[name]) then
      local slots = host.slots or ranks_on[name] or 1
      left[#left + 1], ranks = ("%s:%d"):format(host.name, slots), ranks + slots
    else lost[#lost + 1] = host.name end
  end
  if #lost == 0 or #left == 0 then return nil end
  say("without %s, which %s not answer", table.concat(lost, ", "), #lost == 1 and "does" or "do")
  local again = util.copy(options)
  again.hosts, again.hostfile, again.ranks = table.concat(left, ","), nil, math.min(options.ranks, ranks)
  return again
end

-- -- again and again --------------------------------------------------------------------------------------------------

--- Why a job that ended with such a code is not started again; nil: it is.
local function over(code, story, last, at, lost)
  if code ~= STOPPED and not story.stepped and not lost then
    return "the job failed before its first step, so it is not started again"
  end
  if last and last.way == story.way and last.at == at then
    return code == STOPPED and "the job has stopped again without a newer checkpoint, so it is not started again"
      or "the job failed twice in the same way without a newer checkpoint, so it is not started again"
  end
end

--- Run a job, again and again. run(options) -> exit code, story (nil: it could not be started). Returns the last exit
--- code.
function M.run(options, run)
  local most, last, count = options.max_restarts, nil, 0
  local folder = options.checkpoint
  local first = newest(folder)
  while true do
    local code, story = run(options)
    if not story or code == 0 or story.asked then return code end
    folder = story.saves or folder
    local at = newest(folder)
    local again = count < most and without_lost(options, story) or nil
    local why = over(code, story, last, at, again)
    if why or count == most then
      say("%s", why or ("the job was started again %s (--max-restarts)"):format(util.number_of(count, "time")))
      return code
    end
    last, count, options = { way = story.way, at = at }, count + 1, again or options
    if at and at ~= first then require("perilune.launcher").setenv("PERI_CHECKPOINT_RESUME", "auto") end
    say("start %d of %d again%s, %s", count, most, at and (", from '%s/%s'"):format(folder, at) or "",
      util.number_of(options.ranks, "rank"))
  end
end

return M
