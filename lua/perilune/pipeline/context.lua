-- context.lua: what a pipeline keeps of a batch that is in flight: TorchRec's contexts. A pipeline has a ring of them,
-- which are used again and again; tensors that operations make for a batch live in its context's scope, and die with
-- the batch.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Flight = require "perilune.pipeline.flight"
local signature = require "perilune.signature"

local M = {}

--- index: the batch's number, from 0, -1: none; exists: its number, once it is known that some rank has it; batch:
--- false where only other ranks have one; given: the sources that made it, each by its `ahead`, which counts batches
--- that are not trained yet (data/position.lua), or false; dists, rows: by pipelined module, what its input_dist and
--- its lookup returned, until they are used; sent: by module, the arguments whose ids were sent; input, upstream:
--- { work, tensor } from the stages beside this one; loss, second, third: what the model returned; own: for operations
--- of the user's; gradient: while one with a hook runs, that of the module's output (nil: none flowed back); noted:
--- what the batch was when it was loaded (flight.lua); events: by place of an operation, of its last run for a batch
--- that was here.
local TrainPipelineContext = util.class "TrainPipelineContext"
M.TrainPipelineContext = TrainPipelineContext

function TrainPipelineContext:init(modules)
  util.integer("TrainPipelineContext", "modules", modules, 0, 2 ^ 20)
  self.index, self.exists, self.batch, self.vote, self.dists, self.rows = -1, -1, false, false, {}, {}
  self.loss, self.second, self.third, self.own, self.events = false, false, false, {}, {}
  self.input, self.upstream, self.noted, self.given = false, false, Flight.new_note(), false
  self.sent = {}
  for i = 1, modules do self.dists[i], self.rows[i], self.sent[i] = false, false, { false, false, false } end
  self.scope = P.new_scope()
end

--- Take a batch's place.
function TrainPipelineContext:_open(index)
  self.index = index
  self.own = {}
end

--- The batch is done with: give back what it has.
function TrainPipelineContext:_close()
  self.index, self.exists, self.batch, self.vote, self.given = -1, -1, false, false, false
  self.loss, self.second, self.third, self.input, self.upstream = false, false, false, false, false
  for i = 1, #self.dists do
    local sent, dist = self.sent[i], self.dists[i]
    local give_up = dist and rawget(getmetatable(dist) or {}, "give_up") -- the library's have one
    if give_up then give_up(dist) end
    self.dists[i], self.rows[i], sent[1], sent[2], sent[3] = false, false, false, false, false
  end
  self.noted.flight, self.noted.batch = false, false
  P.close_scope(self.scope)
end

signature.check("TrainPipelineContext:", TrainPipelineContext, { init = "self: table, modules: count",
  _open = "self: table, index: integer" })

--- Of schedules with a prefetch. prefetched: by module, whether its rows are being brought into memory.
local PrefetchTrainPipelineContext = util.class("PrefetchTrainPipelineContext", TrainPipelineContext)
M.PrefetchTrainPipelineContext = PrefetchTrainPipelineContext

function PrefetchTrainPipelineContext:init(modules)
  TrainPipelineContext.init(self, modules)
  self.prefetched = {}
  for i = 1, modules do self.prefetched[i] = false end
end

function PrefetchTrainPipelineContext:_close()
  TrainPipelineContext._close(self)
  for i = 1, #self.prefetched do self.prefetched[i] = false end
end

return M
