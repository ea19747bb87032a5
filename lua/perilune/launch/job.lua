-- launch/job.lua: mpirun as a child: what it says is passed on or put into one line, signals reach it, and its end is
-- told.
--
-- Ranks say themselves why they fail (reports.lua), and their watchers (rank_watch.c) say how they died. mpirun
-- explains the same in boxes of dashes (openmpi.lua knows them), which are dropped here, unless nobody else has said
-- anything.
local openmpi = require "perilune.launch.openmpi"
local reports = require "perilune.launch.reports"

local M = {}

local INT, HUP, QUIT, KILL, TERM, USR1, USR2 = 2, 1, 3, 9, 15, 10, 12
local END = HUP     -- by which mpirun is told to end the ranks: it blocks what else it would heed (runtime/host/job.c)
local STOPPED = 75  -- exit code (EX_TEMPFAIL) of a job that stopped because it was asked to: it can be started again
local NAMES = { [INT] = "interrupted (Ctrl-C)", [TERM] = "ended by signal 15 (SIGTERM)",
  [HUP] = "ended by signal 1 (SIGHUP)", [QUIT] = "ended by signal 3 (SIGQUIT)", [USR1] = "ended by signal 10 (SIGUSR1)",
  [USR2] = "ended by signal 12 (SIGUSR2)" }
-- those that scripts may heed
local SHORT = { [INT] = "Ctrl-C", [TERM] = "SIGTERM", [USR1] = "SIGUSR1", [USR2] = "SIGUSR2" }
local PATIENCE = 10 -- seconds that mpirun has to end the ranks: it needs more only where it cannot reach them
local REST = 3      -- seconds that it has to end when they have: it hangs there at times

-- -- what mpirun says -------------------------------------------------------------------------------------------------

--- The first entry of a list of openmpi.lua that knows a box or a line, and what its pattern finds there.
local function first(list, text)
  text = text:gsub("%s+", " ")
  for _, entry in ipairs(list) do
    local found = { text:match(entry[1]) }
    if found[1] then return entry, found end
  end
end

--- A box: what it tells the filter F is kept there, put in our words, or passed on; what may follow from an end that
--- nobody has told yet is laid by.
local function judge(F, text, emit)
  local entry, found = first(openmpi.endings, text)
  if entry then
    if entry[2] then F.ending = entry[2]:format(unpack(found)) end
  elseif first(openmpi.consequences, text) then
    if not F.spoke then F.later[#F.later + 1] = text end
  else
    entry, found = first(openmpi.refusals, text)
    F.spoke, F.boxed = F.spoke or entry ~= nil, F.boxed or not entry
    emit(entry and ("perilune: %s\n"):format(entry[2]:format(unpack(found))) or text)
  end
end

--- The text of those boxes laid by that are no consequence of what F has heard since.
local function untold(F)
  local list = {}
  for _, text in ipairs(F.later) do
    local told = F.spoke
    if first(openmpi.consequences, text).causes then told = F.gone end
    if not (told or F.ending) then list[#list + 1] = text end
  end
  return table.concat(list)
end

--- Returns what tells lines that are left out: noise, an empty line that belongs to it, and what mpirun says of its own
--- end.
local function dropper(F)
  local blank = false
  return function(text)
    local noise = first(openmpi.noise, text)
    local dropped = noise or blank and text == "\n" or F.crashed and text:match(F.crashed)
    blank = noise and noise.blank
    return dropped
  end
end

--- What Perilune itself says of ranks: whether somebody spoke, whether a rank is gone, what killed the first.
local function heed(F, text)
  if not (text:match "^%[ranks? " or text:match "^perilune: ") then return end
  F.spoke, F.gone = true, F.gone or text:match "^perilune: rank %d" ~= nil
  local signal = text:match "^perilune: rank %d+ %(process [^\n]* was killed by signal (%d+)"
  F.killed = F.killed or signal and 128 + signal
end

--- A filter of mpirun's standard error: `feed(text)`, `flush()`, `finish(good)` at the end of a job, and what it knows:
--- `spoke` (somebody has said why it ends), `gone` (a rank has ended before its script), `killed` (the exit code of the
--- first that a signal killed), `ending` (how a rank ended, as mpirun tells it). `crashed`, if set, matches lines about
--- mpirun's own end. `emit(text)` gets what is passed on: at once, but for lines of dashes and what they enclose.
function M.filter(emit)
  local F = { spoke = false, gone = false, ending = nil, later = {} }
  local line, box = "", nil -- what is held back: the unfinished line, and the lines of an open box
  local open = false        -- the beginning of the unfinished line was passed on
  local boxed = false       -- a box has just ended: prterun writes a zero byte behind some
  local dropped = dropper(F)

  local function pass(text)
    if text == "" then return end
    text = text:gsub("^mpirun: Error: ", "perilune: mpirun: ")
    if not open then heed(F, text) end
    emit(text)
  end

  local function whole(text)
    text = text:gsub("^%z+(perilune: )", "%1")
    local border = #text > 70 and text:match "^%-+\n$"
    if border and not box then box = { text }
    elseif box then
      box[#box + 1] = text
      if border then
        judge(F, table.concat(box), emit)
        box, boxed = nil, true
      elseif #box > 60 then F.flush() end -- no box of mpirun's
    elseif first(openmpi.consequences, text) then judge(F, text, emit)
    elseif not dropped(text) then pass(text) end
  end

  --- Pass on what is held back.
  function F.flush()
    pass(box and table.concat(box) or "")
    pass(line)
    open = open or line ~= ""
    box, line = nil, ""
  end

  function F.finish(good)
    local text = good and "" or untold(F)
    F.boxed = F.boxed or text ~= ""
    emit(text)
  end

  function F.feed(text)
    local from = 1
    while from <= #text do
      local stop = text:find("\n", from, true)
      line = line .. text:sub(from, stop or #text)
      if boxed then line, boxed = line:gsub("^%z", ""), false end
      if stop then
        if open then pass(line) else whole(line) end
        line, open = "", false
      elseif not box and #line >= 10 and not line:match "^%-+$" and not line:match "^mpirun: "
        and not (F.crashed and line:match "^%[") then
        pass(line)
        line, open = "", true
      end
      from = (stop or #text) + 1
    end
  end

  return F
end

-- -- running it -------------------------------------------------------------------------------------------------------

local function say(text) io.stderr:write("perilune: ", text, "\n") end

--- Which ranks have started where, and how they ended, by the notes of their watchers: `take(text)` returns the text
--- without the notes.
function M.roll(ranks)
  local R = { ranks = ranks, started = {}, ended = {}, n_started = 0, n_ended = 0, n_heed = 0, code = 0,
    reports = reports.new(ranks) }
  local held = ""

  local function note(kind, rank, number, text)
    rank = tonumber(rank)
    if kind == "start" and not R.started[rank] then
      R.started[rank] = ("process %s on %s"):format(number, text)
      R.n_started = R.n_started + 1
    elseif kind == "end" and not R.ended[rank] then
      R.ended[rank] = tonumber(number)
      R.n_ended = R.n_ended + 1
      if R.code == 0 then R.code, R.failed = R.ended[rank], rank end
    elseif kind == "quit" then R.quit = R.quit or tonumber(number)
    elseif kind == "job" then R.job = text
    elseif kind == "heeds" then R.n_heed = R.n_heed + 1
    elseif kind == "stopped" then R.stopped = text
    elseif kind == "saves" then R.saves = text
    elseif kind == "stepped" then R.stepped = true
    elseif kind == "error" then R.reports.take(rank, text) end
    return ""
  end

  function R.take(text)
    text = held .. text
    local from = text:find "\30[^\n]*$"
    held = from and text:sub(from) or ""
    if from then text = text:sub(1, from - 1) end
    return (text:gsub("\30(%a+) (%d+) (%d+) ([^\n]*)\n", note))
  end

  --- "rank 2, rank 3": those that are not in `known`, n of them (R.started, R.ended); with their processes where these
  --- are known.
  function R.missing(known, n)
    local list = {}
    for rank = 0, ranks - 1 do
      if not known[rank] then
        list[#list + 1] = "rank " .. rank .. (R.started[rank] and (" (%s)"):format(R.started[rank]) or "")
      end
      if #list == 8 and ranks - n > 8 then
        list[9] = ("and %d more"):format(ranks - n - 8)
        break
      end
    end
    return table.concat(list, ", ")
  end

  return R
end

--- What is still to be said about a job that has ended, and its exit code. asked: the signal that came; ended: the
--- launcher had it ended.
local function verdict(F, R, code, signal, asked, ended)
  if R.stopped and code == 0 and R.code == 0 and not ended then
    return ("stopped after a step, as it was asked to (%s): it can be started again"):format(SHORT[asked] or R.stopped),
      STOPPED
  end
  if asked and code == 0 and not (signal or ended) then return nil, 0 end -- it came to its end
  local stop = asked or R.quit -- a signal to one rank is enough
  if SHORT[stop] and R.saves and not R.stepped then -- nothing was learned that is not saved
    return ("asked to stop (%s) before the first saver:step: it can be started again"):format(SHORT[stop]), STOPPED
  end
  if asked then return ("%s; all %d ranks were ended"):format(NAMES[asked], R.ranks), 128 + asked end
  if signal and R.n_ended == R.ranks and R.code == 0 then
    return ("mpirun itself ended by signal %d, after all ranks had ended well"):format(signal), 0
  elseif signal and F.spoke then return nil, R.code ~= 0 and R.code or 128 + signal
  elseif signal then
    return ("mpirun was killed by signal %d; its %d ranks were ended"):format(signal, R.ranks), 128 + signal
  -- others may have called MPI_Abort for it
  elseif code == 0 or F.spoke then return nil, code ~= 0 and F.killed or code end
  local ending = F.ending and F.ending:gsub("^(rank (%d+)) on %S+", function(head, rank)
    return R.started[tonumber(rank)] and ("%s (%s)"):format(head, R.started[tonumber(rank)])
  end)
  if not ending and F.boxed then return ("mpirun ended with exit code %d; what it says is above"):format(code), code end
  ending = ending or R.n_started == 0 and openmpi.codes[code]
  return ending or ("mpirun ended with exit code %d and gave no reason (with --mpi --verbose it says more)"):format(
    code), code
end

--- Words without their numbers, also hexadecimal ones: processes, addresses, sizes and random names are others each
--- time.
local function without_numbers(text) return (text:gsub("%x*%d%x*", "#")) end

--- How a job has ended, as text that is the same when it ends so again.
local function way_of(R, code, text)
  -- whose error comes first among ranks that fail alike is a matter of time
  local who = R.code > 128 and R.failed or "some"
  return ("%d|%s|%d|%s|%s"):format(code, tostring(who), R.code, without_numbers(text or ""),
    without_numbers(R.reports.first or ""))
end

--- What signals to the launcher come to: `take(signal, now)` one that has come; `late(now)` when the grace time may be
--- over. `asked`: the first; `dying`: since when mpirun should end the ranks.
local function orders(R, grace)
  local launcher = require "perilune.launcher"
  local O, stopping = { asked = nil, dying = nil }, nil

  function O.finish(now)
    O.dying = O.dying or now
    launcher.signal(END)
  end

  function O.take(signal, now)
    local warning = signal == USR1 or signal == USR2
    local heeded = SHORT[signal] and R.n_heed == R.ranks and R.n_ended == 0
    if O.dying then
      if signal == INT then launcher.signal(KILL) end
    elseif stopping and warning then return
    elseif heeded and not stopping then
      O.asked, stopping = signal, now
      say(("%s: the script is asked to stop, and has %g s for it (--grace)"):format(SHORT[signal], grace))
      launcher.signal(signal == INT and USR2 or USR1)
    elseif warning and not (R.saves and not R.stepped) then
      say(("%s is not heeded: not all ranks have called peri.on_stop"):format(SHORT[signal]))
    elseif not (stopping and signal == TERM) then -- a Ctrl-C, or the script does not heed it
      O.asked = signal
      O.finish(now)
    end
  end

  function O.late(now)
    local signal = not O.asked and launcher.sought()
    if signal then O.take(signal, now) end
    if not stopping or O.dying or now - stopping < grace then return end
    say(("the script has not stopped within %g s (--grace): it is ended"):format(grace))
    O.finish(now)
  end

  return O
end

--- Run `command` (a list of words) with so many ranks, all of which must have started after `deadline` seconds. grace:
--- seconds that a script has to stop when a signal asks for it; saves: the folder into which the script is to save, if
--- that is known, which it may say itself; warnings: further signals that do (numbers); preload:
--- of `command` (LD_PRELOAD). Returns the exit code and a story: { asked = the signal to the launcher for which it
--- ended, or nil; stepped, saves: what a Saver said of it (checkpoint/saver.lua); started, ended: of its ranks, as in
--- roll; way: how it ended }. nil and why: it could not be started.
function M.run(command, ranks, deadline, grace, saves, warnings, preload)
  local launcher = require "perilune.launcher"
  local pid, why = launcher.start(command, warnings or {}, preload)
  if not pid then return nil, why end
  local R, F = M.roll(ranks), M.filter(function(text) io.stderr:write(text) end)
  R.saves = saves
  F.crashed = ("^%%[[^:]*:0*%d%%]"):format(pid)
  local began = launcher.seconds()
  local O, quiet = orders(R, grace or 0), nil -- quiet: since when mpirun has no ranks
  local told -- since when reports wait
  local announced = false
  -- since when mpirun should end the ranks by itself, because one has failed
  local failed, strict = nil, not openmpi.tolerates(command)
  local function tell()
    if R.reports.count > 0 then F.feed(R.reports.flush()) end
    told = nil
  end
  while true do
    local event, value, detail = launcher.next(told and 0.1 or 1)
    local now = launcher.seconds()
    if R.reports.count == ranks or told and now - told >= reports.COMPLETE or event == "end" then tell() end
    if event == "text" then F.feed(R.take(value))
    elseif event == "signal" then O.take(value, now)
    elseif event == "time" then F.flush()
    else
      F.flush()
      F.finish(value == 0)
      launcher.sweep()
      local heard = R.reports
      if heard.blind and heard.n_said < ranks then say("no word from " .. R.missing(heard.said, heard.n_said)) end
      local text, code = verdict(F, R, value, detail, O.asked, O.dying)
      if text then say(text) end
      return code, { asked = O.asked, stepped = R.stepped, saves = R.saves, started = R.started, ended = R.ended,
        way = way_of(R, code, text) }
    end
    if R.reports.count > 0 then told = told or now end
    if R.n_started == ranks and not announced then
      announced = true
      if R.job ~= "" then launcher.started(R.job) end
    end
    quiet = (R.n_ended == ranks or (R.n_started > 0 and launcher.children() == 0)) and (quiet or now) or nil
    O.late(now)
    if not O.dying and R.n_started < ranks and R.n_ended == 0 and now - began >= deadline then
      say(("%d of %d ranks did not start within %d s (PERI_START_TIMEOUT_S): %s"):format(ranks - R.n_started, ranks,
        deadline, R.missing(R.started, R.n_started)))
      F.spoke = true
      O.finish(now)
    end
    failed = failed or strict and R.code ~= 0 and now
    if failed and not O.dying and now - failed > PATIENCE then
      if R.n_ended < ranks then
        say(("mpirun has not ended %s within %d s: it is ended, and what runs on machines that it cannot reach ends "
          .. "by itself"):format(
          R.missing(R.ended, R.n_ended), PATIENCE))
      end
      F.spoke = true
      O.finish(now)
    end
    if now - (O.dying or now) > PATIENCE or now - (quiet or now) > REST then launcher.signal(KILL) end
  end
end

return M
