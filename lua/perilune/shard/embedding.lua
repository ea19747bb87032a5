-- embedding.lua: what sharded modules of embedding tables share, whatever they make of the rows: optimizers, codecs,
-- caches, start values, pieces, copying, and the stages, which C does (perilune/shard.h). TorchRec's
-- ShardedEmbeddingModule.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local jagged = require "perilune.jagged"
local awaitable = require "perilune.dist.awaitable"
local group_of = require("perilune.dist.group").group_of
local copies = require "perilune.embed.copies"
local embed_config = require "perilune.embed.config"
local kept = require "perilune.embed.kept"
local sharding_types = require "perilune.plan.sharding_types"
local types = require "perilune.plan.types"
local ShardingEnv = require "perilune.plan.env"
local config = require "perilune.shard.config"
local files = require "perilune.shard.files"
local pieces = require "perilune.shard.pieces"
local states = require "perilune.shard.state"
local ShardedModule = require "perilune.shard.module"
local signature = require "perilune.signature"
local C, check, state = P.C, P.check, P.state

local wrap, _, module_ptr = P.handle("peri_sharded", {}, nil, "a sharded module")
local out, text_out = ffi.new "peri_sharded *[1]", ffi.new "char *[1]"
local work_out, tensor_out = awaitable.work_out, Tensor.out
local kjt_ptr = jagged.KeyedJaggedTensor.ptr

--- A stage of `module` on its way: the exchange of ids, or of rows. Its result is itself, with the work that the next
--- stage takes.
local StageAwaitable = util.class("StageAwaitable", awaitable.Awaitable)
function StageAwaitable:init(module, work)
  awaitable.Awaitable.init(self)
  self.module, self.work, self.deferred = module, work and awaitable.wrap_work(work), false
end
local IdsAwaitable, RowsAwaitable = util.class("IdsAwaitable", StageAwaitable),
  util.class("RowsAwaitable", StageAwaitable)
function StageAwaitable:_wait_impl()
  awaitable.wait_work(self.work.ptr)
  return self
end
function StageAwaitable:_test_impl()
  return self.work.ptr == nil or C.peri_work_test(self.work.ptr) ~= C.PERI_PENDING
end

-- What defer returns has no work, but its batch, before post_deferred.
function IdsAwaitable:_wait_impl()
  if not self.work then
    P.fail(self.module.class_name .. ": these ids are deferred; FusedKJTListSplitsAwaitable sends them")
  end
  return StageAwaitable._wait_impl(self)
end
--- Nobody is going to look these ids up: what maps and caches hold for them is given back now, not when they are
--- collected.
function IdsAwaitable:give_up()
  if self.work and self.work.ptr ~= nil then self.work:release() end
end
function IdsAwaitable:_test_impl() return self.work and StageAwaitable._test_impl(self) or false end

local inputs, works, room = nil, nil, 0 -- of post_deferred

--- The ids of `list` (of what defer returned), n of them, set out: what ranks tell each other before is one message a
--- group. Those that have set out already are left alone. Collective: all ranks list the same modules in the same
--- order.
function IdsAwaitable._post_deferred(list, n)
  if n > #list then P.fail(("post_deferred: n is %d, and the list has %d"):format(n, #list)) end
  if n > room then
    room = 2 * n
    inputs, works = ffi.new("peri_sharded_input[?]", room), ffi.new("peri_work *[?]", room)
  end
  local k = 0
  for i = 1, n do
    local stage = list[i]
    if type(stage) ~= "table" then
      P.fail(("post_deferred: list[%d] is %s, wanted what defer returned"):format(i, signature.text(stage)))
    end
    if rawget(stage, "deferred") then
      inputs[k].module, inputs[k].kjt = module_ptr(stage.module._ref), kjt_ptr(stage.deferred)
      k = k + 1
    end
  end
  if k == 0 then return end
  check(C.peri_sharded_input_dists(inputs, k, works))
  k = 0
  for i = 1, n do
    local stage = list[i]
    if rawget(stage, "deferred") then
      stage.work, stage.deferred = awaitable.wrap_work(works[k]), false
      k = k + 1
    end
  end
end

-- -- making -----------------------------------------------------------------------------------------------------------

local ShardedEmbeddingModule = ShardedModule:extend "ShardedEmbeddingModule"

signature.check("post_deferred:", IdsAwaitable, { _post_deferred = "list: list, n: count" })
ShardedEmbeddingModule._post_deferred = IdsAwaitable._post_deferred

--- Its kind in C, PERI_SHARDED_*. Classes have their own.
ShardedEmbeddingModule.kind = C.PERI_SHARDED_EBC
--- Operations for which a class looks up codecs -> the place in C's configuration. Classes have their own.
ShardedEmbeddingModule.codec_slots = {}
--- Where the names of parameters begin.
ShardedEmbeddingModule.parameter_prefix = "embeddings"
--- The name of a table's weights in the unsharded module.
function ShardedEmbeddingModule:_parameter_name(name) return ("%s.%s.weight"):format(self.parameter_prefix, name) end

local arguments = {
  tables = util.required.list,              -- list of table configurations
  plan = util.required,                     -- EmbeddingModuleShardingPlan, or a table of ParameterShardings
  group = util.required,                    -- the ranks that share the module
  fused_params = util.optional.table,       -- optimizer of the fused tables, as in the unsharded module
  table_fused_params = util.optional.table, -- table name -> fused_params of its own
  is_weighted = false,
  device = util.optional,
  seed = util.optional.seed,             -- default: the rank state's
  gradient_division = util.optional,     -- whether gradients of tables are means over ranks; default: as dist.ops has
                                         -- it for the group
  qcomm_codecs_registry = util.optional, -- operation -> QuantizedCommCodecs (dist/codec.lua); default: rows travel as
                                         -- f32
  collisions = util.optional,            -- whose maps raw ids go through (mc_collection.lua)
  returns_rows = false,                  -- their rows come home too
  name = "",                             -- path of the module, for messages
}

--- What the class takes. Classes below it take more (util.extended).
ShardedEmbeddingModule.allowed_arguments = arguments

--- index_dedup: whether the class was told to shorten batches at home, which ranks must agree on.
function ShardedEmbeddingModule:init(args, index_dedup)
  local func = self.class_name
  local a = util.named(func, args, self.allowed_arguments)
  a.index_dedup = index_dedup or false
  if a.device == "meta" then
    P.fail(func .. ": device 'meta' has no shards; a plan is checked without them by "
      .. "EmbeddingModuleShardingPlan:validate")
  end
  local plan = types.EmbeddingModuleShardingPlan.is(a.plan) and a.plan or types.EmbeddingModuleShardingPlan(a.plan)
  group_of(func, a.group)
  local env = self:_env(a.group)
  plan:validate(a.tables, env, a.name)
  self.tables, self.plan, self.group, self.is_weighted = a.tables, plan, a.group, a.is_weighted
  local cfg, anchors, optimizers = self:_configure(func, a, plan, env)
  self.optimizers, self.device = optimizers, a.device or false
  self:_make(cfg, anchors)
  self:_register_dense()
  self._kept = kept.snapshot(self, { "tables" })
end

--- Over what a plan cuts the tables of a module of this group.
function ShardedEmbeddingModule:_env(group) return ShardingEnv.from_process_group(group) end -- luacheck: ignore 212

--- What C is told: see config.lua.
function ShardedEmbeddingModule:_configure(func, a, plan, env)
  return config.sharded_config(func, a, plan, env, self.kind, self.codec_slots)
end

--- Make the C module. With tables in files, ranks tell each other what came of it.
function ShardedEmbeddingModule:_make(cfg, anchors) -- luacheck: ignore 212
  self._in_files = false
  for _, t in ipairs(self.tables) do
    self._in_files = self._in_files or self.plan.tables[t.name].compute_kernel == "fused_uvm_caching"
  end
  local ok, err = pcall(check, C.peri_sharded_new(cfg, out))
  if not ok and not self._in_files then error(err, 0) end
  if ok then self._ref = P.lasting(wrap, out[0]) end
  if not self._in_files then return end -- no rank has any
  files.agree(self.group, self.class_name, { self }, not ok and err or nil)
end

--- Make parameters of dense tables: "embedding_bags.NAME.weight"; the k-th of the pieces of a table on this rank has
--- ".k" behind it.
function ShardedEmbeddingModule:_register_dense()
  local seen = {}
  -- "table:row:column" -> its parameter; a metatable: no place to look for parameters
  self._dense = setmetatable({}, {})
  for _, s in ipairs(self:local_shards()) do
    if s.dense then
      local name = self:_parameter_name(s.table)
      seen[name] = (seen[name] or -1) + 1
      if seen[name] > 0 then name = name .. "." .. seen[name] end
      local register = s.replica and self.register_parameter or self.own_parameter
      register(self, name, P.lasting(s.leaf))
      self._dense[states.place_of(s.table, s.row_offset, s.col_offset)] = rawget(self, name)
    end
  end
end

function ShardedEmbeddingModule:_frozen_tables()
  local tables = {}
  for place, p in util.ordered(self._dense) do
    local name, is = states.table_at(place), p:describe().requires_grad and "trained" or "frozen"
    tables[name] = (tables[name] or is) == is and is or "frozen in part"
  end
  return tables
end
function ShardedEmbeddingModule:_freeze(tables)
  for place, p in util.ordered(self._dense) do
    if tables[states.table_at(place)] == "frozen" then p:requires_grad(false) end
  end
end

function ShardedEmbeddingModule:_spread_parameters() return states._spread_parameters(self, self._dense) end

-- -- stages -----------------------------------------------------------------------------------------------------------

--- The work of what input_dist returned, until it is used.
local function arrived(self, method, dist)
  local work = dist.work
  if work.ptr == nil then P.fail(("%s:%s: this input_dist is already used"):format(self.class_name, method)) end
  return work
end

--- What f(a, b, c, d) makes of an input before its ids leave; its error is one on all ranks. Alone there is nobody to
--- tell, and the next input is welcome.
function ShardedEmbeddingModule:_at_home(f, a, b, c, d)
  local ok, result, more = pcall(f, a, b, c, d)
  if ok then return result, more end
  if self.group:size() > 1 then
    self.group:abort(tostring(type(result) == "table" and result.message or result):match "^[^\n]*")
  end
  error(result, 0)
end

function ShardedEmbeddingModule:input_dist(features)
  kept.check(self._kept, self.class_name, {}, kept.WITH_EACH_BATCH)
  if state.deferring then
    local stage = IdsAwaitable(self, false)
    kjt_ptr(features)
    stage.deferred = features
    return stage
  end
  check(C.peri_sharded_input_dist(module_ptr(self._ref), kjt_ptr(features), work_out))
  return IdsAwaitable(self, work_out[0])
end

--- Bring the rows that `dist` (waited for, not yet looked up) will need from files into memory, in the background.
function ShardedEmbeddingModule:prefetch(dist)
  local work = arrived(self, "prefetch", dist)
  while check(C.peri_sharded_prefetch(module_ptr(self._ref), work.ptr)) == C.PERI_PENDING do
    self:_at_home(self._give_scores, self)
  end
end

--- How the rows of `dist` (waited for, not yet looked up) go between buffers and results on this rank, as text:
--- peri.shard.explain. Local.
function ShardedEmbeddingModule:_explain(dist)
  check(C.peri_sharded_explain(module_ptr(self._ref), arrived(self, "_explain", dist).ptr, text_out))
  local text = ffi.string(text_out[0])
  C.peri_sharded_explain_release(text_out[0])
  return text
end

--- What `dist` holds lives on in the gradient tape only.
function ShardedEmbeddingModule:lookup(dist)
  local work = arrived(self, "compute_and_output_dist", dist)
  while check(C.peri_sharded_compute_and_output_dist(module_ptr(self._ref), work.ptr, work_out)) == C.PERI_PENDING do
    self:_at_home(self._give_scores, self)
  end
  work:release()
  return RowsAwaitable(self, work_out[0])
end

--- Scores that maps of raw ids wait for: of modules that have such maps (mc_embedding.lua).
function ShardedEmbeddingModule:_give_scores() P.fail(self.class_name .. ": no map of raw ids") end

--- See ShardedModule:output_dist. What cannot become a result is refused here, not when somebody uses it.
function ShardedEmbeddingModule:output_dist(rows)
  if not rawequal(rows.module, self) then
    P.fail(("%s:output_dist: rows are what compute of another module (%s) returned"):format(self.class_name,
      rows.module.class_name))
  end
  if rows.given then
    P.fail(self.class_name .. ":output_dist: these rows already have a result; compute makes new ones")
  end
  rows.given = true
  return ShardedModule.output_dist(self, rows)
end

function ShardedEmbeddingModule:output(rows)
  local work = rows.work
  local status = C.peri_sharded_output(module_ptr(self._ref), work.ptr, tensor_out)
  work:release()
  check(status)
  return self:_result(Tensor.wrap(tensor_out[0]), rows)
end

--- What the unsharded module would return, made of the values that came back (a tensor) at the end of the stage `rows`.
function ShardedEmbeddingModule:_result(values, rows) return values end -- luacheck: ignore 212

-- -- files ------------------------------------------------------------------------------------------------------------

--- Of which map of raw ids the rows of a table are, on this rank, as Moment:mark says it; nil: ids are rows
--- (mc_embedding.lua).
function ShardedEmbeddingModule:_map_mark(name) end -- luacheck: ignore 212

--- The C module, or an error after release.
function ShardedEmbeddingModule:_pointer() return module_ptr(self._ref) end
function ShardedEmbeddingModule:in_files() return self._in_files end

--- Write the changed rows of tables in files; afterwards all files of all ranks are whole and of one flush. Collective.
function ShardedEmbeddingModule:flush()
  if self._in_files then files.flush(self.group, self.class_name .. ":flush", { self }) end
end

--- Give the memory and files back now; the module is of no use afterwards. Tables in files: flush first.
function ShardedEmbeddingModule:release()
  if self._ref then self._ref:release() end -- else it was made half: see _remake
end

-- -- state ------------------------------------------------------------------------------------------------------------

--- The pieces of tables on this rank: see pieces.lua.
function ShardedEmbeddingModule:local_shards()
  self:settle()
  return pieces.list(self._ref, module_ptr, self.tables)
end

function ShardedEmbeddingModule:replicas()
  local list = {}
  for _, s in ipairs(self:local_shards()) do
    for _, name in ipairs(s.replica and not s.dense and s.names() or {}) do list[#list + 1] = s.state(name) end
  end
  return list
end

--- The pieces of tables that a flush left in files, and all others.
local function by_flush(self)
  local left, others = {}, {}
  for _, s in ipairs(self:local_shards()) do
    local file = s.rows > 0 and s.cached and s.file()
    local list = file and file.flush > 0 and left or others
    list[#list + 1] = s
  end
  return left, others
end

--- An error unless the tables can take over an unsharded collection. What a flush left in files goes on, so the
--- collection, which may have been looked at, has nothing to say of these tables: its numbers are those they start
--- with.
local function check_takeover(self, collection)
  if not self:in_files() or not collection:is_materialised() then return end
  local batch, left = collection:materialise(), by_flush(self)
  local updates = #left > 0 and collection:_trains_itself() and batch:iteration() or 0
  for _, s in ipairs(left) do
    local own = collection.tables[collection:_table_index(s.table)]
    local file, changed = s.file(), not pieces.starts(s, collection, own)
    if updates > 0 or changed then
      P.fail(("%s: table '%s': the collection %s, and row file '%s' has flush %d, iteration %d; one of them would be "
        .. "lost. Make the collection anew to go on from the files, or remove them (or name another directory) to go "
        .. "on from the collection"):format(
        self.class_name, s.table, updates > 0 and ("was trained (%d updates)"):format(updates)
        or "has other numbers than it starts with", file.path, file.flush, file.iteration))
    end
  end
end

function ShardedEmbeddingModule:try_copy_from(collection) check_takeover(self, collection) end

--- Tables of an unsharded module that are frozen are frozen here too; an error where a backward pass would train them.
--- is_frozen(name): whether one is.
function ShardedEmbeddingModule:_take_frozen(is_frozen)
  local frozen, optimizer_of = {}, {}
  for _, o in ipairs(self.optimizers) do
    for _, name in ipairs(o.tables) do optimizer_of[name] = o.name end
  end
  for _, t in ipairs(self.tables) do
    local optimizer = optimizer_of[t.name] or "none"
    frozen[t.name] = is_frozen(t.name) and "frozen" or nil
    if frozen[t.name] and optimizer ~= "none" then
      P.fail(("%s: table '%s' is frozen (requires_grad(false)), and with compute_kernel '%s' backward passes would "
        .. "train it by %s; allowed: compute_kernel 'dense', or optimizer = 'none' for it (table_fused_params)"):format(
        self.class_name, t.name, self.plan.tables[t.name].compute_kernel, optimizer))
    end
  end
  self:_freeze(frozen)
end

--- Take this rank's parts of the weights and optimizer states of an unsharded collection that has memory (one that is a
--- mere description is left alone: both start from the same numbers), and of a trained one its iteration, and its
--- learning rate if that was changed. Rows that a flush left in files stay: see check_takeover.
function ShardedEmbeddingModule:copy_from(collection)
  if not collection:is_materialised() then return end
  collection:_check_kept()
  self:_take_frozen(function(name) return collection:_is_frozen(name) end)
  check_takeover(self, collection)
  local batch, params, left, others = collection:materialise(), collection.fused_params, by_flush(self)
  if collection:_trains_itself() then
    if #left == 0 then self:set_iteration(batch:iteration()) end
    local rate, given = batch:learning_rate(), embed_config.fused_params(collection.class_name .. ": fused_params",
      params)
    if rate ~= given.learning_rate then self:set_learning_rate(rate) end
  end
  pieces.copy(others, collection, collection:_trains_itself())
end

function ShardedEmbeddingModule:changes()
  local ref = module_ptr(self._ref)
  return self._changed + tonumber(C.peri_sharded_passes(ref)), tonumber(C.peri_sharded_changes(ref))
end

--- See ShardedModule. Tables in files and fused replicas update with every pass; dense tables leave accumulating to
--- their optimizer.
function ShardedEmbeddingModule:_check_accumulates(name, entry)
  local kernel = entry.compute_kernel
  if kernel == "fused_uvm_caching" or sharding_types.of[entry.sharding_type].replica and kernel ~= "dense" then
    P.fail(("%s: updates of table '%s' (%s, compute_kernel %s) cannot be accumulated; allowed: dense, or sharded "
      .. "tables in memory"):format(self.class_name, name, entry.sharding_type, kernel))
  end
end
function ShardedEmbeddingModule:accumulate(on)
  for _, t in ipairs(on and self.tables or {}) do self:_check_accumulates(t.name, self.plan.tables[t.name]) end
  self._accumulates = on and true or false
  pieces.accumulate(self._ref, module_ptr, self._accumulates)
end
function ShardedEmbeddingModule:apply_accumulated()
  pieces.apply_accumulated(self._ref, module_ptr)
  self:tables_changed()
end

--- A module of the same plan with the same numbers: weights, states of optimizers, rates, iteration. On another device,
--- or (nil) the same one. Collective.
function ShardedEmbeddingModule:copy(device)
  if self._in_files then
    P.fail(("%s:copy: it has tables in files, which two modules cannot share; make another one in a directory of its "
      .. "own, and load its state_dict"):format(self.class_name))
  end
  local a = util.copy(self._made_of)
  a.device, a.plan = device or self.device or nil, self.plan
  if a.feature_processors then a.feature_processors = copies.copy_to_device(a.feature_processors, device) end
  self:check_moment()
  local other = getmetatable(self)(a)
  other:_freeze(self:_frozen_tables())
  pieces.copy_all(self:local_shards(), other:local_shards())
  for i, o in ipairs(self.optimizers) do other:set_learning_rate(o.learning_rate, i) end
  return other:train(self.training)
end

--- Keep the arguments that the class was called with, for copy; called at the end of init.
function ShardedEmbeddingModule:_keep_arguments(args)
  self._made_of = setmetatable(util.copy(args), {}) -- a metatable: no place to look for modules
end

--- Learning rate of the fused tables from now on; of those with the i-th of the module's optimizers, if i is given.
function ShardedEmbeddingModule:set_learning_rate(learning_rate, i)
  for k, o in ipairs(self.optimizers) do
    if i == nil or i == k then
      check(C.peri_sharded_learning_rate_set(module_ptr(self._ref), k - 1, learning_rate))
      o.learning_rate = learning_rate
    end
  end
end

--- Updates that all fused tables count as made so far; on all ranks alike. Local.
function ShardedEmbeddingModule:set_iteration(iteration)
  check(C.peri_sharded_iteration_set(module_ptr(self._ref), iteration))
end

function ShardedEmbeddingModule:own_state() return states.list_state(self) end

--- See ShardedModule. How a group's rows travel decides no numbers, and follows from the machines that the group is on.
function ShardedEmbeddingModule:_identity()
  local list, text = {}, ffi.string(C.peri_sharded_identity(module_ptr(self._ref)))
  for subject, property, value in text:gmatch "([^\t\n]*)\t([^\t\n]*)\t([^\n]*)" do
    if subject ~= "the exchange" then list[#list + 1] = { ("%s (%s)"):format(property, subject), value } end
  end
  return list
end

--- See Module:check_moment.
function ShardedEmbeddingModule:check_moment() check(C.peri_sharded_settle(module_ptr(self._ref))) end

--- The keyed optimizer of the fused tables (embed/fused.lua); nil: it has none.
function ShardedEmbeddingModule:fused_optimizer()
  if #self.optimizers > 0 and not self._fused_optimizer then self._fused_optimizer = states.fused_optimizer(self) end
  return self._fused_optimizer
end

--- See ShardedModule:_remake. The optimizer is the object that it was.
function ShardedEmbeddingModule:_remake(plan)
  ShardedModule._remake(self, plan)
  if self._accumulates then self:accumulate(true) end
  local optimizer = self._fused_optimizer
  self._fused_optimizer = nil
  if not optimizer then return end
  optimizer:_renew(self:fused_optimizer())
  self._fused_optimizer = optimizer
end

function ShardedEmbeddingModule:__tostring() return ("%s\n%s"):format(self.class_name, tostring(self.plan)) end

signature.object("Collection", "an EmbeddingBagCollection", { is_materialised = "callable", materialise = "callable" })
signature.kind("InputDist", "what input_dist returned", IdsAwaitable.is,
  function(x) return RowsAwaitable.is(x) and "is what compute returned, wanted what input_dist returned" end)
signature.kind("Rows", "what compute returned", RowsAwaitable.is,
  function(x) return IdsAwaitable.is(x) and "is what input_dist returned, wanted what compute made of it" end)

--- Check the arguments of the methods of a class, under its name: those of forward, and of the stages.
function ShardedEmbeddingModule._check_arguments(class, names)
  local line = "self: table, " .. names
  for _, name in ipairs { "input_dist", "forward", "compute", "output_dist", "compute_and_output_dist", "prefetch",
    "lookup", "output", "copy_from", "set_learning_rate", "set_iteration" } do
    class[name] = class[name] -- a copy of its own
  end
  signature.check(class.class_name .. ":", class, {
    input_dist = line, forward = line, compute = "self: table, dist: InputDist",
    output_dist = "self: table, rows: Rows", compute_and_output_dist = "self: table, dist: InputDist",
    prefetch = "self: table, dist: InputDist", lookup = "self: table, dist: InputDist",
    output = "self: table, rows: Rows", copy_from = "self: table, collection: Collection",
    set_learning_rate = "self: table, learning_rate: number, i: count?",
    set_iteration = "self: table, iteration: count",
  })
  for _, name in ipairs { "input_dist", "prefetch", "compute", "output_dist", "compute_and_output_dist" } do
    local stage = class[name]
    class[name] = function(self, a, b, c, d)
      if ShardedModule.Context.is(a) then return stage(self, b, c, d) end
      return stage(self, a, b, c)
    end
  end
end

signature.check("ShardedEmbeddingModule:", ShardedEmbeddingModule,
  { _keep_arguments = "self: table, args: table", accumulate = "self: table, on: boolean?",
    _at_home = "self: table, f: callable, a: any, b: any, c: any, d: any" })
signature.check("ShardedEmbeddingModule.", ShardedEmbeddingModule, { _check_arguments = "class: table, names: string" })
ShardedEmbeddingModule:_check_arguments "features: any"

return ShardedEmbeddingModule
