-- timeline.lua: Chrome trace JSON, which Perfetto opens: a process for each rank, in it a thread for each stream or
-- link, in it what took some time.
local util = require "perilune.util"

local Timeline = util.class "Timeline"

local function quoted(text)
  return '"' .. text:gsub('[%c"\\]', function(c) return ("\\u%04x"):format(c:byte()) end) .. '"'
end

local function named(what, name, pid, tid)
  return ('{"name":"%s","ph":"M","pid":%d,"tid":%d,"args":{"name":%s}}'):format(what, pid, tid, quoted(name))
end

--- The process of number n (from 0 on, a number of its own), as it is called. Its id in the text is n + 1: readers take
--- 0 for the idle process of a kernel.
function Timeline:init(n, name)
  self.pid, self.threads, self.n = n + 1, {}, 0
  self.lines = { named("process_name", name, self.pid, 0) }
end

--- Its thread of that name; threads are shown in the order in which they come here.
function Timeline:thread(name)
  if not self.threads[name] then
    self.n = self.n + 1
    self.threads[name] = self.n
    self.lines[#self.lines + 1] = named("thread_name", name, self.pid, self.n)
  end
  return self.threads[name]
end

--- Something took from `from` to `to` (in us); what: a number that is known of it, under the name `key`. In whole
--- nanoseconds, as readers keep them: what ends where the next one begins does so in the text, too.
function Timeline:add(thread, name, kind, from, to, key, what)
  local tid = self:thread(thread)
  local begin = math.floor(from * 1000 + 0.5)
  local length = math.max(0, math.floor(to * 1000 + 0.5) - begin)
  self.lines[#self.lines + 1] =
    ('{"name":%s,"cat":"%s","ph":"X","ts":%.3f,"dur":%.3f,"pid":%d,"tid":%d,"args":{"%s":%d}}'):format(
    quoted(name), kind, begin / 1000, length / 1000, self.pid, tid, key, what)
end

--- All of it, as what `document` takes.
function Timeline:text() return table.concat(self.lines, ",\n") end

--- The JSON of a list of texts.
function Timeline.document(texts)
  return '{"traceEvents":[\n' .. table.concat(texts, ",\n") .. '\n],"displayTimeUnit":"ms"}\n'
end

return Timeline
