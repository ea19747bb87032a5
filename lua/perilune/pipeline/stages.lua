-- stages.lua: a model cut into stages that lie on groups of ranks, one behind the other (pipeline parallelism). What a
-- stage makes goes to the rank with the same place in the next one, its gradient comes back the same way, on a pair's
-- own groups, in the order of batches.
--
--   local stage = peri.pipeline.Stage { stages = 2, shape = function(batch) return { batch.rows, 64 } end }
--   local pipeline = peri.pipeline.Pipeline { model = models[stage.index], stage = stage, optimizer = ...,
--     schedule = peri.pipeline.schedules.one_f_one_b { stages = 2, stage = stage.index, micro_batches = 8 } }
--
-- model(batch, input) of a stage gets what the stage before made; the last one returns the loss. All stages load the
-- same batches (each uses what it needs of them), so their loaders give as many.
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local Schedule = require "perilune.pipeline.schedule"
local contexts = require "perilune.pipeline.context"
local unroll = require "perilune.pipeline.unroll"
local group_of = require("perilune.dist.group").group_of
local kind_of = require("perilune.errors").kind
local signature = require "perilune.signature"

local M = {}

local Stage = util.seal(util.class "Stage")
M.Stage = Stage

local arguments = {
  stages = util.required.number, -- how many; the ranks are cut into as many equal runs
  group = util.optional,         -- the ranks of all stages; default: the world
  shape = util.required,         -- function(batch) -> the shape of what the stage before makes of it; not asked on the
                                 -- first stage
  dtype = "f32",
  device = util.optional,
}

--- The two groups of this rank and its neighbour; nil: it has none there.
local function pair(world, first, second)
  local function make(what) return world:new_group({ first, second }, ("%s %d-%d"):format(what, first, second)) end
  local activations, gradients = make "activations", make "gradients"
  return activations and { activations = activations, gradients = gradients }
end

--- Collective over the group.
function Stage:init(args)
  local a = util.named("Stage", args, arguments)
  local world = group_of("Stage", a.group)
  self.world, self.stages = world, util.integer("Stage", "stages", a.stages, 1, world:size())
  if world:size() % self.stages ~= 0 then
    P.fail(("Stage: %d ranks cannot be %d stages of as many ranks each"):format(world:size(), self.stages))
  end
  if not util.is_callable(a.shape) then
    P.fail(("Stage: shape is %s, wanted a function(batch)"):format(kind_of(a.shape)))
  end
  local each = world:size() / self.stages
  self.index, self.shape, self.dtype, self.device = math.floor(world:rank() / each), a.shape, a.dtype, a.device
  self.group, self.before, self.after, self.sent = false, false, false, {}
  for s = 0, self.stages - 1 do
    local ranks = {}
    for r = 1, each do ranks[r] = s * each + r - 1 end
    self.group = world:new_group(ranks, "stage " .. s) or self.group
  end
  for first = 0, world:size() - each - 1 do
    local made = pair(world, first, first + each)
    if made and world:rank() == first then self.after = made
    elseif made then self.before = made end
  end
end

local function neighbour(self, where, o)
  if not self[where] then
    P.fail(("operation '%s': stage %d of %d has no stage %s"):format(o.name, self.index, self.stages,
      where == "before" and "before it" or "after it"))
  end
  return self[where]
end

--- Keep what is on its way until it is there; the oldest first, when there are many.
local function keep(self, work)
  local sent = self.sent
  sent[#sent + 1] = work
  if #sent > 2 * self.stages then table.remove(sent, 1):wait() end
end

--- What `shape` says of a batch.
local function shape_of(self, batch)
  local shape = self.shape(batch)
  local sound = type(shape) == "table" and #shape > 0
  for i = 1, sound and #shape or 0 do
    sound = sound and type(shape[i]) == "number" and shape[i] >= 0 and shape[i] % 1 == 0
  end
  if sound then return shape end
  P.fail(("Stage: shape, asked on stage %d, returned %s, wanted a list of sizes such as { batch.rows, 64 }"):format(
    self.index, type(shape) == "table" and "a list with something else" or kind_of(shape)))
end

local function room(self, shape) return Tensor.empty(shape, self.dtype, self.device) end

--- What the stage before makes of a batch is wanted: { work, tensor }. Posts only.
function Stage:_receive(context, o)
  local x = room(self, shape_of(self, context.batch))
  return { work = neighbour(self, "before", o).activations:broadcast(x, 0), tensor = x }
end
--- A copy is sent: a broadcast counts as a change of its tensor, which the backward pass still needs.
function Stage:_send(context, o)
  local y = context.loss:detach()
  keep(self, neighbour(self, "after", o).activations:broadcast(Tensor.empty(y:shape(), y:dtype(), y:device()):copy(y),
    0))
end
--- The gradient of what this stage made is wanted. Posts only.
function Stage:_receive_grad(context, o)
  local g = room(self, context.loss:shape())
  return { work = neighbour(self, "after", o).gradients:broadcast(g, 1), tensor = g }
end
function Stage:_send_grad(context, o)
  local x = context.input.tensor
  keep(self, neighbour(self, "before",
    o).gradients:broadcast((x:grad() or Tensor.zeros(x:shape(), x:dtype(), x:device())):contiguous(), 1))
end
--- Wait for all that was sent.
function Stage:_settle()
  for _, work in ipairs(self.sent) do work:wait() end
  self.sent = {}
end

--- The groups of this rank: of its stage, and with its neighbours.
function Stage:_groups()
  local groups = { self.group }
  for _, beside in ipairs { self.before or {}, self.after or {} } do
    groups[#groups + 1] = beside.activations
    groups[#groups + 1] = beside.gradients
  end
  return groups
end

-- -- whether stages go together ---------------------------------------------------------------------------------------

--- What other stages must know of a checked schedule: plain values.
function M.summary(plan)
  return { name = plan.name, ahead = plan.ahead, behind = plan.behind, batches = plan.flush or plan.depth + 2,
    operations = util.map(plan.operations, function(o)
      return { kind = o.kind, name = o.name, ahead = o.ahead, place = o.place, every = o.every, at = o.at,
        from_step = o.from_step, until_step = o.until_step }
    end) }
end

--- The operations of a stage in the order in which it runs them: a list of { o, batch }.
local function runs_of(stage, batches)
  local list = {}
  for n = -stage.ahead, batches - 1 + stage.behind do
    for _, o in ipairs(stage.operations) do
      local b = n + o.ahead
      if b >= 0 and b < batches and unroll.acts_at(o, b) then list[#list + 1] = { o = o, batch = b } end
    end
  end
  return list
end

local function has(stage, kind)
  for _, o in ipairs(stage.operations) do
    if o.kind == kind then return true end
  end
  return false
end

--- In what waits: which operation of which stage beside it lets it go on.
local waits = { forward = { "receive", -1, "send" }, backward = { "receive_grad", 1, "send_grad" } }

local function check_neighbours(stages)
  for s, stage in ipairs(stages) do
    for _, w in util.ordered(waits) do
      local other, theirs = stages[s + w[2]], w[3]
      if has(stage, w[1]) and not (other and has(other, theirs)) then
        P.fail(("schedule '%s': stage %d has '%s', but %s"):format(stage.name, s - 1, w[1], other
          and ("stage %d has no '%s'"):format(s - 1 + w[2], theirs) or "there is no stage beside it"))
      end
      if other and has(other, theirs) and not has(stage, w[1]) then
        P.fail(("schedule '%s': stage %d has '%s', but stage %d has no '%s'"):format(other.name, s - 1 + w[2], theirs,
          s - 1, w[1]))
      end
    end
  end
end

--- Schedules (summaries of them) of all stages, from the first to the last: refused where stages would wait for one
--- another for ever, or batches would be taken for others.
function M.check(stages)
  check_neighbours(stages)
  local batches, runs, at, done, order = stages[1].batches, {}, {}, {}, {}
  for s, stage in ipairs(stages) do
    if stage.batches ~= batches then
      P.fail(("schedule '%s': %d batches are together on stage %d, %d on stage 0"):format(stage.name, stage.batches,
        s - 1, batches))
    end
    runs[s], at[s], done[s], order[s] = runs_of(stage, batches), 1, {},
      { send = 0, send_grad = 0, receive = 0, receive_grad = 0 }
  end
  local function blocked(s)
    local x = runs[s][at[s]]
    local w = x and waits[x.o.kind]
    if w and has(stages[s], w[1]) and not done[s + w[2]][w[3] .. x.batch] then return x, w end
  end
  local moved = true
  while moved do
    moved = false
    for s in ipairs(stages) do
      while at[s] <= #runs[s] and not blocked(s) do
        local x = runs[s][at[s]]
        local kind = x.o.kind
        done[s][kind .. x.batch], at[s], moved = true, at[s] + 1, true
        if order[s][kind] then
          if order[s][kind] ~= x.batch then
            P.fail(("schedule '%s': stage %d has '%s' of batch %d when batch %d is next: stages take them in their "
              .. "order"):format(
              stages[s].name, s - 1, x.o.name, x.batch, order[s][kind]))
          end
          order[s][kind] = x.batch + 1
        end
      end
    end
  end
  local stuck = {}
  for s in ipairs(stages) do
    local x, w = blocked(s)
    if x then
      stuck[#stuck + 1] = ("stage %d at '%s' of batch %d for '%s' of stage %d"):format(s - 1, x.o.name, x.batch, w[3],
        s - 1 + w[2])
    end
  end
  if #stuck > 0 then
    P.fail(("schedule '%s': stages wait for ever: %s"):format(stages[1].name, table.concat(stuck, ", ")))
  end
end

--- Check (M.check) that the stages of a list of Schedules fit together.
function M.check_stages(list) M.check(util.map(list, function(schedule) return M.summary(schedule:check()) end)) end

signature.kind("Schedules", "a list of Schedules, of the first stage to the last", function(x)
  if type(x) ~= "table" or #x == 0 then return false end
  for i = 1, #x do
    if not Schedule.is(x[i]) then return false end
  end
  return true
end)
signature.kind("Stage", "a Stage", Stage.is)
signature.kind("Context", "a TrainPipelineContext", contexts.TrainPipelineContext.is)
signature.object("operation", "an operation of a schedule", { name = "string" })
signature.check("pipeline.", M, { check_stages = "list: Schedules" })
signature.check("Stage:", Stage, { init = "self: table, args: table" })
signature.check_each("Stage:", Stage, { "_receive", "_send", "_receive_grad", "_send_grad" },
  "self: Stage, context: Context, o: operation")
signature.check_each("Stage:", Stage, { "_settle", "_groups" }, "self: Stage")

return M
