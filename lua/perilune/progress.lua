-- progress.lua: one line that tells how far a run is: step, share, loss, samples/s, time left.
--
-- On a terminal the line is rewritten in place; elsewhere (files, pipes) a new one appears from time to time. Ranks of
-- mpirun have no terminal of their own: PERI_PROGRESS=live|lines|off tells them (the launcher's caller knows).
local P = require "perilune.ffi"
local getenv = require "perilune.environment"
local util = require "perilune.util"
local C = P.C

local Progress = util.seal(util.class "Progress")

--- total: steps; first: those that an earlier run has made (default 0); samples_per_step: of all ranks; style: live,
--- lines, off (default: PERI_PROGRESS, else what stdout is); stream; interval: seconds between lines (default 0.2 live,
--- 5 otherwise); label: what every line begins with; delay: seconds until the first line, so that what is done sooner
--- shows none.
function Progress:init(args)
  self.open = false -- a line that is being rewritten
  local a = util.named("Progress", args, {
    total = util.required, samples_per_step = util.required.number, style = util.optional, stream = io.stdout,
    interval = util.optional, label = "", delay = 0, first = 0,
  })
  self.total, self.samples_per_step, self.stream = a.total, a.samples_per_step, a.stream
  self.style = util.one_of("Progress", "style", a.style or getenv "PERI_PROGRESS" or
    (os.execute "test -t 1" == 0 and "live" or "lines"), { "live", "lines", "off" })
  self.label, self.delay, self.first = a.label, a.delay, a.first
  self.interval = a.interval or (self.style == "live" and 0.2 or 5)
  self.started = self.now()
  self.shown, self.paused = self.started - self.interval, 0
end

function Progress.now() return tonumber(C.peri_time_ns()) * 1e-9 end

--- Seconds since the start, without pauses.
function Progress:seconds() return self.now() - self.started - self.paused end
--- Samples per second so far, without pauses, after `step` steps.
function Progress:rate(step) return (step - self.first) * self.samples_per_step / math.max(self:seconds(), 1e-9) end

--- Run f(...) without counting its time. Returns what f returns.
function Progress:pause(f, ...)
  local from = self.now()
  local function resume(...)
    self.paused = self.paused + self.now() - from
    return ...
  end
  return resume(f(...))
end

local function duration(s)
  if s >= 3600 then return ("%d h %02d min"):format(math.floor(s / 3600), math.floor(s % 3600 / 60)) end
  if s >= 60 then return ("%d min %02d s"):format(math.floor(s / 60), math.floor(s % 60)) end
  return ("%d s"):format(math.ceil(s))
end
Progress.duration = duration

--- 123456 -> "123,456"
function Progress.grouped(n)
  local text = ("%.0f"):format(n)
  local rest = #text % 3
  return (text:sub(1, rest) .. text:sub(rest + 1):gsub("%d%d%d", ",%0")):gsub("^,", "")
end

--- The line for a step, as text; `note` (optional) follows the loss.
function Progress:line(step, loss, note)
  local left = self:seconds() / math.max(step - self.first, 1) * (self.total - step)
  return ("%sstep %d/%d  %3.0f %%  loss %.4f  %s%s samples/s  %s left"):format(self.label, step, self.total,
    100 * step / math.max(self.total, 1), loss, note and note .. "  " or "", self.grouped(self:rate(step)),
    duration(left))
end

--- A bar over what is done: "[####....] 50 % text, 3 s left".
function Progress:bar(step, text)
  local width, share = 24, math.min(step / math.max(self.total, 1), 1)
  local full = math.floor(width * share)
  local left = self:seconds() / math.max(step - self.first, 1) * (self.total - step)
  return ("[%s%s] %3.0f %% %s, %s left"):format(("#"):rep(full), ("."):rep(width - full), 100 * share, text,
    duration(left))
end

--- Whether a line is due: ask before computing what it needs.
function Progress:due(step)
  if self.style == "off" or self.now() - self.started < self.delay then return false end
  return step == self.total or self.now() - self.shown >= self.interval
end

--- Show the line if one is due.
function Progress:update(step, loss, note)
  if not self:due(step) then return end
  self.shown = self.now()
  local line = self:line(step, loss, note)
  if self.style == "live" then
    self.stream:write("\r", line, "\27[K")
    self.open = true
    if step == self.total then self:close() end
  else
    self.stream:write(line, "\n")
  end
  self.stream:flush()
end

--- A message between the lines.
function Progress:say(text)
  if self.open then self.stream:write "\r\27[K" end
  self.stream:write(text, "\n")
  self.stream:flush()
end

--- End a line that is being rewritten.
function Progress:close()
  if self.open then
    self.stream:write "\n"
    self.open = false
  end
end

return Progress
