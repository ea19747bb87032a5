-- module.lua: what all sharded modules are: nn.Modules whose tables are in pieces on the ranks of a group, and who work
-- in stages.
--
--   stage         what it does                                               in TorchRec
--   input_dist    send ids to the ranks that own their rows                  input_dist; its two waits are one here
--   prefetch      bring rows that are in files into memory (optional)        prefetch
--   lookup        look up what arrived, and post what goes back              compute, and the first half of output_dist
--   output        make the result of what came back                          what the awaitable of output_dist becomes
--
-- A class fills in the stages; all else is here: compute is lookup, output_dist is output as soon as somebody uses the
-- result, compute_and_output_dist is both, and forward is input_dist and that. input_dist and lookup return Awaitables;
-- the stage that follows gets their result. Every rank of the group goes through the stages of its modules in the same
-- order.
local P = require "perilune.ffi"
local errors = require "perilune.errors"
local nn = require "perilune.nn"
local awaitable = require "perilune.dist.awaitable"
local signature = require "perilune.signature"
local util = require "perilune.util"

local state = P.state
P.own { deferring = false } -- ids of sharded modules do not set out yet

local ShardedModule = nn.Module:extend "ShardedModule"

--- What a lookup becomes: stands for what `output` makes of it, which lives in the scope of the lookup.
local OutputAwaitable = awaitable.lazy_class("OutputAwaitable", awaitable.Awaitable)
ShardedModule.OutputAwaitable = OutputAwaitable
function OutputAwaitable:init(module, exchange)
  awaitable.Awaitable.init(self)
  rawset(self, "_module", module)
  rawset(self, "_exchange", exchange)
  rawset(self, "_scope", P.state.scope)
end
function OutputAwaitable:_wait_impl()
  local module, arrived = rawget(self, "_module"), rawget(self, "_exchange"):wait()
  return P.within(rawget(self, "_scope"), module.output, module, arrived)
end
function OutputAwaitable:_test_impl() return rawget(self, "_exchange"):test() end

-- -- stages -----------------------------------------------------------------------------------------------------------

local function missing(self, stage) P.fail(("%s: no stage '%s'"):format(self.class_name, stage)) end

--- What a stage returned, which must be an Awaitable.
local function awaited(self, stage, x)
  if awaitable.Awaitable.is(x) then return x end
  P.fail(("%s:%s returned %s, wanted an Awaitable"):format(self.class_name, stage, errors.kind(x)))
end

--- Ids, in whatever arguments the unsharded module takes (at most three), to their owners. Collective. Returns an
--- Awaitable.
function ShardedModule:input_dist() missing(self, "input_dist") end
--- The same, but ids do not set out before FusedKJTListSplitsAwaitable { what this returns, ... }, which announces
--- those of several modules in one message. (A class whose input_dist is its own sends them at once.) All else that
--- input_dist does is done.
function ShardedModule:defer(a, b, c, d)
  state.deferring = true
  local ok, stage = xpcall(self.input_dist, P.locate, self, a, b, c, d)
  state.deferring = false
  if not ok then error(stage, 0) end
  return awaited(self, "input_dist", stage)
end
--- A later batch's rows into memory, in the background; `dist`: the result of input_dist. Local.
function ShardedModule:prefetch(dist) end -- luacheck: ignore 212
--- What peri.shard.explain prints of `dist`. Local.
function ShardedModule:_explain(dist) missing(self, "_explain") end -- luacheck: ignore 212
--- Look up `dist` and post what goes back. Collective. Returns an Awaitable.
function ShardedModule:lookup(dist) missing(self, "lookup") end -- luacheck: ignore 212
--- What the unsharded module would return, of the result of lookup's Awaitable. Local.
function ShardedModule:output(arrived) missing(self, "output") end -- luacheck: ignore 212

--- Look up what arrived and send the rows back, which set out at once. Collective. Uses `dist`, the result of
--- input_dist, up. Returns what output_dist takes.
function ShardedModule:compute(dist)
  self:settle()
  return awaited(self, "lookup", self:lookup(dist))
end
--- Of what compute returned, a LazyAwaitable of what the unsharded module would return: an OutputAwaitable, or the
--- subclass of it that the class has under that name. Local.
function ShardedModule:output_dist(rows) return self.OutputAwaitable(self, awaited(self, "compute", rows)) end
--- Both.
function ShardedModule:compute_and_output_dist(dist) return self:output_dist(self:compute(dist)) end

--- TorchRec's schedules make a context for each batch and hand it to all stages. What a batch needs is in what the
--- stages return here; so that such schedules run as they are, the library's modules take a context before the other
--- arguments, and do nothing with it.
local ShardedModuleContext = util.class "ShardedModuleContext"
ShardedModule.Context = ShardedModuleContext
function ShardedModuleContext:init() end
function ShardedModule:create_context() return self.Context() end -- luacheck: ignore 212

--- All stages. Waits for the ids; rows are on their way when it returns, until the result is used. A pipeline that did
--- some of the stages before gives what they became.
function ShardedModule:forward(a, b, c)
  local pipelined = self._pipelined
  if pipelined then return pipelined:forward(a, b, c) end
  return self:_whole_forward(a, b, c)
end
function ShardedModule:_whole_forward(a, b, c)
  return self:compute_and_output_dist(awaited(self, "input_dist", self:input_dist(a, b, c)):wait())
end

--- What a pipeline put in front of this module: an object with forward(a, b, c); false: nothing.
ShardedModule._pipelined = false
function ShardedModule:_set_pipelined(object) rawset(self, "_pipelined", object) end
--- Whether ids of a batch may leave before the batches before it are trained; if not, why.
function ShardedModule:sends_early() return true end -- luacheck: ignore 212

--- Rows that were looked up before are old: somebody has changed the tables, beside a backward pass or load_state_dict.
--- Call it on all ranks after shards were written to while a pipeline had looked up rows of a later batch. Local.
function ShardedModule:tables_changed() rawset(self, "_changed", self._changed + 1) end
ShardedModule._changed = 0

--- Pipelines' forwards that have batches in flight, and where these come from.
ShardedModule._flights = {}
function ShardedModule:_in_flight(forward, supply)
  if not rawget(self, "_flights") then rawset(self, "_flights", setmetatable({}, { __mode = "k" })) end
  self._flights[forward] = supply or nil
end
--- Whether the module has learned from batches that are yet to be trained. On all ranks alike.
function ShardedModule:_ahead() return false end -- luacheck: ignore 212
--- Two numbers that are others after the tables have changed: by what all ranks do alike, and on this rank, by
--- whatever. Local.
function ShardedModule:changes() return self._changed, 0 end

ShardedModule._accumulates = false
--- An error if updates of a table cannot be accumulated where the plan has such an entry for it.
function ShardedModule:_check_accumulates(name, entry) end -- luacheck: ignore 212
--- While on, backward passes change no table, until apply_accumulated: then all of them do as one of a large batch
--- would. All ranks alike.
function ShardedModule:accumulate(on) -- luacheck: ignore 212
  if on then P.fail(("%s: its updates cannot be accumulated"):format(self.class_name)) end
end
function ShardedModule:apply_accumulated() end -- luacheck: ignore 212

-- -- what DistributedModelParallel asks of it -------------------------------------------------------------------------
-- Parameters of which each rank has its own part are noted in nn.parameter.own_parts (own_parameter does that); the
-- others are replicas, whose gradients are averaged.

--- Call f() before tables are looked up or looked at: somebody changes them in the background.
function ShardedModule:_settle_with(f) self._settle = f end
--- Other modules are its replicas, on other ranks: `pieces` are the ranks that have the same pieces of its tables as
--- this one, `all` those of all replicas.
function ShardedModule:_replicate(pieces, all) self._pieces_group, self._all_group = pieces, all end
function ShardedModule:settle()
  if self._settle then self._settle() end
end

--- Register a parameter of which other ranks have other parts, or none.
function ShardedModule:own_parameter(name, tensor)
  self:register_parameter(name, tensor)
  nn.parameter.own_parts[tensor] = true
end

--- The parameters that such parts make up, as nn/spread.lua has them; names are the module's own. The same on all
--- ranks.
function ShardedModule:_spread_parameters() return {} end -- luacheck: ignore 212

--- Tables with parameters on this rank: name -> "frozen" (requires_grad(false)), "trained", or "frozen in part". Local.
function ShardedModule:_frozen_tables() return {} end -- luacheck: ignore 212
--- Freeze the parameters of the tables that are "frozen" in such a map. Local.
function ShardedModule:_freeze(tables) end -- luacheck: ignore 212

--- Names of such parameters.
function ShardedModule:own_parameters()
  local list = {}
  for _, name in ipairs(self._parameters) do
    if nn.parameter.own_parts[rawget(self, name)] then list[#list + 1] = name end
  end
  return list
end

--- Tensors, beside parameters, that are equal on all ranks: they start with rank 0's numbers. A list, in the same order
--- on all ranks.
function ShardedModule:replicas() return {} end -- luacheck: ignore 212
function ShardedModule:state_group() return self.group or nil end
--- An error unless copy_from can take the unsharded module. Local, on all ranks before any copies.
function ShardedModule:try_copy_from(module) end -- luacheck: ignore 212
--- Take over what the unsharded module has learned. Local; called once, when the modules of all ranks are made.
function ShardedModule:copy_from(module) end -- luacheck: ignore 212
--- What all its ranks must have alike: a list of { what, value as text }.
function ShardedModule:_identity() return {} end -- luacheck: ignore 212
--- The pieces of tables on this rank; see ShardedEmbeddingModule:local_shards.
function ShardedModule:local_shards() return {} end -- luacheck: ignore 212
--- Learning rate of tables that train themselves, from now on.
function ShardedModule:set_learning_rate(learning_rate) end -- luacheck: ignore 212
--- The KeyedOptimizer of tables that train themselves; nil: there are none.
function ShardedModule:fused_optimizer() end -- luacheck: ignore 212
--- Whether some table is in files, on whatever rank (files.lua says what such modules have besides).
function ShardedModule:in_files() return false end -- luacheck: ignore 212
--- The same on another device (nil: the same one). Collective.
function ShardedModule:copy() -- luacheck: ignore 212
  P.fail(("%s: it has no copies; make another one, and load its state_dict"):format(self.class_name))
end
--- Names of what is sharded, as state_dict has them.
function ShardedModule:sharded_parameter_names(prefix)
  local list = {}
  for i, s in ipairs(self:own_state()) do list[i] = prefix and prefix ~= "" and prefix .. "." .. s.name or s.name end
  return list
end
--- Give memory and files back now; the module is of no use afterwards. Local.
function ShardedModule:release() end -- luacheck: ignore 212

-- What others have put on a module, and of what and where it is made, which stay when it is made again, also where that
-- fails half way.
local KEPT = { "training", "_pipelined", "_flights", "_settle", "_pieces_group", "_all_group", "_loads", "_changed",
  "_fused_optimizer", "_made_of", "device", "_accumulates", "forward", "_managed_collision_collection" }

--- Make a module that was released again, in the same object, under another plan: with its start values. Collective.
--- (It is init that does it, with the arguments that the module was made of.)
function ShardedModule:_remake(plan)
  local a, kept = rawget(self, "_made_of") and util.copy(self._made_of), {}
  if not a then
    P.fail(self.class_name .. ": it does not say what it was made of (_keep_arguments), so it cannot be made again")
  end
  a.plan, a.device = plan, self.device or nil
  for _, name in ipairs(KEPT) do kept[name] = rawget(self, name) end
  for key in util.ordered(util.copy(self)) do rawset(self, key, nil) end
  for _, name in ipairs { "_parameters", "_buffers", "_children" } do rawset(self, name, {}) end
  for name, value in util.ordered(kept) do rawset(self, name, value) end
  util.construct(self, getmetatable(self), a)
end
--- It was made again, and has its state.
function ShardedModule:_remade() self:tables_changed() end

signature.check("OutputAwaitable:", OutputAwaitable, { init = "self: table, module: table, exchange: awaitable" })
signature.object("pipelined", "an object with a method forward", { forward = "callable" })
signature.check("ShardedModule:", ShardedModule, { _set_pipelined = "self: table, object: pipelined?",
  accumulate = "self: table, on: boolean?", _remake = "self: table, plan: any",
  _in_flight = "self: table, forward: table, supply: any",
  _settle_with = "self: table, f: callable", _replicate = "self: table, pieces: Group, all: Group",
  sharded_parameter_names = "self: table, prefix: string?",
  own_parameter = "self: table, name: string, tensor: tensor" })

return ShardedModule
