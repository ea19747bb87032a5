-- timeline.lua: Chrome trace JSON, which Perfetto opens: a process for each rank, in it a thread for each stream or link, in it what took
-- some time.
local util = require "perilune.util"

local Timeline = util.class "Timeline"

local function quoted(text)
  return '"' .. text:gsub('[%c"\\]', function(c) return ("\\u%04x"):format(c:byte()) end) .. '"'
end

local function named(what, name, pid, tid)
  return ('{"name":"%s","ph":"M","pid":%d,"tid":%d,"args":{"name":%s}}'):format(what, pid, tid, quoted(name))
end

--- Process `pid` (a number of its own), as it is called.
function Timeline:init(pid, name)
  self.pid, self.threads, self.n = pid, {}, 0
  self.lines = { named("process_name", name, pid, 0) }
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

--- Something took from `from` to `to` (in us); what: a number that is known of it, under the name `key`.
function Timeline:add(thread, name, kind, from, to, key, what)
  local tid = self:thread(thread)
  self.lines[#self.lines + 1] = ('{"name":%s,"cat":"%s","ph":"X","ts":%.3f,"dur":%.3f,"pid":%d,"tid":%d,"args":{"%s":%d}}'):format(
    quoted(name), kind, from, math.max(0, to - from), self.pid, tid, key, what)
end

--- All of it, as what `document` takes.
function Timeline:text() return table.concat(self.lines, ",\n") end

--- The JSON of a list of texts.
function Timeline.document(texts) return '{"traceEvents":[\n' .. table.concat(texts, ",\n") .. '\n],"displayTimeUnit":"ms"}\n' end

return Timeline
