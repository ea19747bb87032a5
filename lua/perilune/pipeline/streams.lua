-- streams.lua: the streams of a pipeline on a device that has some: "main" is the current one, each other name is one
-- of its own. "load" is the lane of the loader's threads: what the loader gives is ready on the current stream (loaders
-- copy on one of their own). What is released later than its use on another stream is freed after it: see
-- docs/streams.md.
local util = require "perilune.util"
local stream = require "perilune.tensor.stream"

local Streams = util.class "Streams"

function Streams:init(device, names)
  self.device, self.own = device, {}
  for _, name in ipairs(names) do
    if name ~= "main" and name ~= "load" then self.own[name] = stream.Stream(device) end
  end
end

--- The stream of that name; get: nil for the current one.
function Streams:get(name) return self.own[name] end
function Streams:current(name) return self.own[name] or stream.current(self.device) end

--- The batch of a context is done with: the current stream, on which its tensors are released, comes after all that was
--- queued for it.
function Streams:retire(context)
  local main = stream.current(self.device)
  for _, event in util.ordered(context.events) do main:wait_event(event) end
end

--- Wait for what is queued on the current stream: what the device has to tell of the last batches (bad ids) is an
--- error.
function Streams:hear() stream.current(self.device):synchronize() end

return Streams
