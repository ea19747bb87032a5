-- plan/types.lua: what a sharding plan is: per table a ParameterSharding, per module an EmbeddingModuleShardingPlan,
-- per model a ShardingPlan. Plans are data: they are written by hand or made by a planner, and sharded modules are
-- built from them.
--
-- A plan file is a Lua file that returns a ShardingPlan, or a function(env) that does (a ShardingEnv: plan/env.lua says
-- what it has):
--
--   local plan = require "perilune.plan"
--   return function(env)
--     return plan.ShardingPlan {
--       ["sparse.ebc"] = { users = plan.row_wise(), items = plan.table_wise(1 % env.world_size),
--         tags = plan.data_parallel() },
--     }
--   end
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local embed = require "perilune.embed.config"
local signature = require "perilune.signature"
local ShardingEnv = require "perilune.plan.env"
local sharding_types = require "perilune.plan.sharding_types"
local C = P.C

local M = {}

--- TorchRec's names of sharding types: ROW_WISE = "row_wise", ...
local type_of, names = sharding_types.of, {}
for name in util.ordered(type_of) do names[name:upper()] = name end
M.ShardingType = util.face("peri.plan.ShardingType", names)

--- dense: gradients go to an optimizer outside; fused: the optimizer runs in the backward of the lookup; fused_uvm: the
--- same, in the host's memory, which on a CPU is where all tables are; fused_uvm_caching: the same for tables larger
--- than the device's memory, in the host's (on a CPU, or with a directory, in a file), with a cache of rows in the
--- device's (cache_params). quant, quant_uvm: rows that are looked up only; so is "fused" in the plan of a quantized
--- module.
M.EmbeddingComputeKernel = util.face("peri.plan.EmbeddingComputeKernel", {
  DENSE = "dense", FUSED = "fused", FUSED_UVM = "fused_uvm", FUSED_UVM_CACHING = "fused_uvm_caching",
  QUANT = "quant", QUANT_UVM = "quant_uvm",
})
--- Those of modules that are trained, and of those that are not.
M.trained_kernels, M.quant_kernels = { "dense", "fused", "fused_uvm", "fused_uvm_caching" },
  { "fused", "fused_uvm", "quant", "quant_uvm" }
local kernels = { "dense", "fused", "fused_uvm", "fused_uvm_caching", "quant", "quant_uvm" }
M.kernels = kernels
M.CacheParams, M.CacheAlgorithm = embed.CacheParams, embed.CacheAlgorithm

local function fail(format, ...) P.fail(format:format(...)) end

-- -- ParameterSharding ------------------------------------------------------------------------------------------------

--- How one table is sharded.
---   sharding_type   "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard",
---                   "data_parallel"
---   compute_kernel  "fused" (default), "dense", "fused_uvm", "fused_uvm_caching", "quant" or "quant_uvm"; unlike
---                   TorchRec's, data_parallel tables are fused too if nobody says "dense": every sharding type is
---                   trained by the same optimizer
---   cache_params    CacheParams, with fused_uvm_caching only; default: those of the module's fused_params, else
---                   CacheParams {}
---   ranks           list of ranks, see runtime/plan/types/<type>.c; default: the type's own
---   sizes           rows (row_wise, table_row_wise, grid_shard) or columns (column_wise, table_column_wise) of each
---                   shard, beside ranks; default: even
---   hosts           instead of ranks: for table_row_wise and table_column_wise the node, for grid_shard the node of
---                   each block of columns, by number from 0 in order of their first ranks; all ranks of the nodes hold
---                   their part
local ParameterSharding = util.seal(util.class "ParameterSharding")
M.ParameterSharding = ParameterSharding

--- `list` checked: whole numbers of at most +-most, one after the other from 1; false for nil.
local function whole_numbers(name, list, most)
  if list == nil then return false end
  if type(list) ~= "table" then fail("ParameterSharding: %s is a %s, wanted a list of numbers", name, type(list)) end
  for i, x in ipairs(list) do
    if type(x) ~= "number" or x ~= math.floor(x) or math.abs(x) > most then
      fail("ParameterSharding: %s[%d] is %s, wanted a whole number", name, i, signature.text(x))
    end
  end
  for key in util.ordered(list) do
    if type(key) ~= "number" or key < 1 or key > #list or key ~= math.floor(key) then
      fail("ParameterSharding: %s has the key %s, wanted a list of numbers", name, tostring(key))
    end
  end
  return util.copy(list)
end

--- Whether a type's blocks of columns may lie on several nodes.
local function on_several(sharding_type) return type_of[sharding_type].partition_by == "multi_host" end

local function check_hosts(self)
  if not self.hosts then return end
  if not type_of[self.sharding_type].in_node then
    local allowed = sharding_types.names(function(t) return t.in_node end)
    table.sort(allowed)
    fail("ParameterSharding: hosts with sharding_type '%s', allowed with: %s", self.sharding_type,
      table.concat(allowed, ", "))
  end
  if self.ranks then fail "ParameterSharding: hosts and ranks; give one of them" end
  local several = on_several(self.sharding_type)
  if #self.hosts < 1 or #self.hosts > 1 and not several then
    fail("ParameterSharding: %d hosts for %s, allowed: %s", #self.hosts, self.sharding_type, several and "1 and more"
      or "1")
  end
end

--- A list that came out empty says nothing about where the table is; leaving it out is another matter.
local function check_ranks(self)
  if self.ranks and #self.ranks == 0 then
    fail("ParameterSharding: 0 ranks for %s, allowed: 1 and more, or no list", self.sharding_type)
  end
end

function ParameterSharding:init(args)
  local a = util.named("ParameterSharding", args, {
    sharding_type = util.required, compute_kernel = util.optional, ranks = util.optional, sizes = util.optional,
    hosts = util.optional, cache_params = util.optional,
  })
  if not type_of[a.sharding_type] then
    fail("ParameterSharding: sharding_type '%s', allowed: %s", tostring(a.sharding_type),
      table.concat(util.keys(type_of), ", "))
  end
  self.sharding_type = a.sharding_type
  self.compute_kernel = a.compute_kernel == nil and "fused" or a.compute_kernel
  if not util.index_of(kernels)[self.compute_kernel] then
    fail("ParameterSharding: compute_kernel '%s', allowed: %s", tostring(self.compute_kernel),
      table.concat(kernels, ", "))
  end
  local cached = self.compute_kernel == "fused_uvm_caching"
  if cached and type_of[a.sharding_type].replica then
    fail("ParameterSharding: %s tables are replicas in memory; allowed compute_kernel: dense, fused, fused_uvm",
      a.sharding_type)
  end
  if a.cache_params ~= nil and not cached then
    fail("ParameterSharding: cache_params with compute_kernel '%s', allowed with: fused_uvm_caching",
      self.compute_kernel)
  end
  self.cache_params = a.cache_params ~= nil and embed.cache_params("ParameterSharding", a.cache_params) or false
  self.ranks, self.sizes = whole_numbers("ranks", a.ranks, 2 ^ 31 - 1), whole_numbers("sizes", a.sizes, 2 ^ 53)
  self.hosts = whole_numbers("hosts", a.hosts, 2 ^ 31 - 1)
  check_hosts(self)
  check_ranks(self)
  if self.sizes and not self.ranks then
    fail("ParameterSharding: %d sizes without ranks; with sizes, say ranks too: a list of %d, one for each size",
      #self.sizes, #self.sizes)
  end
  if self.sizes and #self.ranks ~= #self.sizes then
    fail("ParameterSharding: %d sizes for %d ranks; give one size for each rank", #self.sizes, #self.ranks)
  end
end

function ParameterSharding:__tostring()
  local text = self.sharding_type .. " " .. self.compute_kernel
  if self.cache_params then text = ("%s (%s)"):format(text, tostring(self.cache_params)) end
  if self.hosts then text = text .. " hosts " .. table.concat(self.hosts, ",") end
  if self.ranks then text = text .. " ranks " .. table.concat(self.ranks, ",") end
  if self.sizes then text = text .. " sizes " .. table.concat(self.sizes, ",") end
  return text
end

local entry = P.struct "peri_sharding"
local count = ffi.new "int32_t[1]"

--- The ranks that the plan names, as a list or by their hosts, where rank r is on node nodes[r + 1]; nil: the type's
--- default. An error names the table, if one is given.
function ParameterSharding:ranks_on(nodes, table_name)
  if not self.hosts then return self.ranks or nil end
  local order, members, ranks = {}, {}, {}
  for i, node in ipairs(nodes) do
    if not members[node] then
      members[node] = {}
      order[#order + 1] = members[node]
    end
    table.insert(members[node], i - 1)
  end
  for _, host in ipairs(self.hosts) do
    if not order[host + 1] then
      local what = table_name and ("table '%s' (%s)"):format(table_name, self.sharding_type) or "ParameterSharding"
      fail("%s: host %d does not exist, allowed: 0..%d", what, host, #order - 1)
    end
    for _, rank in ipairs(order[host + 1]) do ranks[#ranks + 1] = rank end
  end
  return ranks
end

--- The shards of a table { name =, num_embeddings =, embedding_dim = } in env { world_size =, local_size =, nodes = }:
--- a list of { rank =, row_offset =, rows =, col_offset =, cols = } in order of offsets; empty for data_parallel. Bad
--- entries are errors.
function ParameterSharding:shards(config, env)
  util.integer("ParameterSharding:shards", "env.world_size", env.world_size, 1, 2 ^ 31 - 1)
  local nodes = ShardingEnv.of(env).nodes
  local ranks = self:ranks_on(nodes, config.name)
  local n_ranks = ranks and #ranks or 0
  local c_ranks, c_nodes = ffi.new("int32_t[?]", math.max(n_ranks, 1), ranks or {}),
    ffi.new("int32_t[?]", #nodes, nodes)
  local sizes = self.sizes and ffi.new("int64_t[?]", n_ranks, self.sizes) or nil
  entry.type, entry.world_size, entry.nodes = type_of[self.sharding_type].code, env.world_size, c_nodes
  entry.n_ranks, entry.ranks, entry.sizes = n_ranks, c_ranks, sizes
  entry.table, entry.rows, entry.cols = config.name, config.num_embeddings, config.embedding_dim
  P.check(C.peri_sharding_shards(entry, nil, 0, count))
  local out = ffi.new("peri_shard[?]", math.max(count[0], 1))
  P.check(C.peri_sharding_shards(entry, out, count[0], count))
  local list = {}
  for i = 1, count[0] do
    local s = out[i - 1]
    list[i] = { rank = s.rank, row_offset = tonumber(s.row_offset), rows = tonumber(s.rows),
      col_offset = tonumber(s.col_offset), cols = tonumber(s.cols) }
  end
  return list
end

-- -- shorthands (TorchRec's sharding_plan.py) -------------------------------------------------------------------------

--- What shorthands take, as a table, beside what they say themselves.
local anywhere = { compute_kernel = util.optional, cache_params = util.optional }
local in_blocks = { compute_kernel = util.optional, cache_params = util.optional, ranks = util.optional,
  sizes = util.optional }
local replicated = { compute_kernel = util.optional }

local function shorthand(sharding_type, options, spec)
  local a = util.named("plan." .. sharding_type, options, spec)
  a.sharding_type = sharding_type
  return ParameterSharding(a)
end

--- A type that knows nodes: on `hosts`, a number or a list, or on the ranks that the options name.
local function on_hosts(sharding_type, hosts, options)
  local func, several = "plan." .. sharding_type, on_several(sharding_type)
  local a = util.named(func, options, in_blocks)
  local named = type(hosts) == "table" and next(hosts) ~= nil and hosts[1] == nil -- options that came first
  if hosts ~= nil and type(hosts) ~= "number" and (not several or type(hosts) ~= "table" or named) then
    fail("%s: the node is a %s, wanted a number%s (options come second: %s(nil, { ... }))", func, type(hosts),
      several and " or a list of numbers" or "", sharding_type)
  end
  if hosts ~= nil and a.ranks ~= nil then
    fail("%s: a node and ranks; give one of them: %s(nil, { ranks = ... })", func, sharding_type)
  end
  if hosts == nil and a.ranks == nil and not several then hosts = 0 end
  a.sharding_type = sharding_type
  a.hosts = type(hosts) == "number" and { hosts } or hosts
  return ParameterSharding(a)
end

--- The whole table on `rank` (default 0).
function M.table_wise(rank, options)
  if rank ~= nil and type(rank) ~= "number" then
    fail("plan.table_wise: the rank is a %s, wanted a number (options come second: table_wise(0, { ... }))", type(rank))
  end
  local sharding = shorthand("table_wise", options, anywhere)
  sharding.ranks = whole_numbers("ranks", { rank or 0 }, 2 ^ 31 - 1)
  return sharding
end

--- Blocks of rows over all ranks, or over options.ranks (with options.sizes rows each).
function M.row_wise(options) return shorthand("row_wise", options, in_blocks) end

--- Blocks of columns over all ranks, as even as multiples of 4 columns can be, or over options.ranks (even, or of
--- options.sizes columns).
function M.column_wise(options) return shorthand("column_wise", options, in_blocks) end

--- Blocks of rows over the ranks of node host_index (default 0), or over options.ranks of one node (with options.sizes
--- rows each). The ranks of the node add their parts of a bag up, and one sum crosses the network.
function M.table_row_wise(host_index, options) return on_hosts("table_row_wise", host_index, options) end

--- Blocks of columns over the ranks of node host_index (default 0), or over options.ranks of one node (with
--- options.sizes columns each).
function M.table_column_wise(host_index, options) return on_hosts("table_column_wise", host_index, options) end

--- Blocks of columns, one on each of the nodes in host_indexes (default: all nodes), or over options.ranks: those of
--- the first block, then those of the second, ... Each block is cut by rows over its ranks (with options.sizes rows
--- each), as table_row_wise cuts.
function M.grid_shard(host_indexes, options) return on_hosts("grid_shard", host_indexes, options) end

--- A replica on every rank. compute_kernel "fused" (default): the module's own optimizer trains it, as it does all
--- others, on the gradient reduced over the ranks; "dense" (what TorchRec does): the optimizer of the dense part.
function M.data_parallel(options) return shorthand("data_parallel", options, replicated) end

-- -- plans ------------------------------------------------------------------------------------------------------------

--- The plan of one module: table name -> ParameterSharding.
local EmbeddingModuleShardingPlan = util.seal(util.class "EmbeddingModuleShardingPlan")
M.EmbeddingModuleShardingPlan = EmbeddingModuleShardingPlan

--- A copy of an entry: what the caller does with the entry later changes no plan.
local function copy_of(sharding)
  local copy = setmetatable(util.copy(sharding), getmetatable(sharding))
  for _, name in ipairs { "ranks", "sizes", "hosts" } do copy[name] = copy[name] and util.copy(copy[name]) end
  copy.cache_params = copy.cache_params and embed.cache_params("ParameterSharding", copy.cache_params)
  return copy
end

function EmbeddingModuleShardingPlan:init(tables)
  self.tables, self.from = {}, false
  for name, sharding in util.ordered(tables or {}) do
    if type(name) ~= "string" then fail("EmbeddingModuleShardingPlan: key %s, wanted a table name", tostring(name)) end
    if not ParameterSharding.is(sharding) then
      fail("EmbeddingModuleShardingPlan: table '%s' has a %s, wanted a ParameterSharding (plan.table_wise(0), "
        .. "plan.row_wise(), ...)", name, type(sharding))
    end
    self.tables[name] = copy_of(sharding)
  end
end

--- Check the plan against tables (list of { name =, num_embeddings =, embedding_dim = }) and env: every table has an
--- entry, no entry is without a table, and all shards are legal. Returns name -> list of shards. Errors name the file
--- that the plan is from.
function EmbeddingModuleShardingPlan:validate(configs, env, module_name)
  local from = self.from and ("plan '%s': "):format(self.from) or ""
  local where = from .. (module_name and module_name ~= "" and ("module '%s': "):format(module_name) or "")
  local known, shards = {}, {}
  for i, config in ipairs(configs) do
    known[config.name] = true
    local sharding = self.tables[config.name]
    if not sharding then
      fail("%stable '%s' is not in the plan; planned tables: %s", where, config.name,
        table.concat(util.keys(self.tables), ", "))
    end
    local ok, result = pcall(sharding.shards, sharding, config, env)
    if not ok then
      if self.from and getmetatable(result) == P.Error then
        result.message = where .. result.message:gsub("^peri_[%w_]+: ", "")
      end
      error(result, 0)
    end
    shards[config.name] = result
  end
  for name in util.ordered(self.tables) do
    if not known[name] then
      fail("%sthe plan has an entry for table '%s', which does not exist; tables: %s", where, name,
        table.concat(util.keys(known), ", "))
    end
  end
  return shards
end

function EmbeddingModuleShardingPlan:__tostring()
  local lines = {}
  for name, sharding in util.ordered(self.tables) do
    lines[#lines + 1] = ("  %-24s %s"):format(name, tostring(sharding))
  end
  return table.concat(lines, "\n")
end

--- The plan of a model: path of a module ("sparse.ebc"; "" for the model itself) -> EmbeddingModuleShardingPlan (or a
--- plain table of ParameterShardings).
local ShardingPlan = util.seal(util.class "ShardingPlan")
M.ShardingPlan = ShardingPlan

function ShardingPlan:init(modules)
  if modules ~= nil then signature.value("ShardingPlan", "modules", modules, "table") end
  self.plan, self.from = {}, false
  for path, module_plan in util.ordered(modules or {}) do
    if not EmbeddingModuleShardingPlan.is(module_plan) then
      if ParameterSharding.is(module_plan) then
        fail("ShardingPlan: '%s' has the entry of a table, wanted a list of such entries for each module: "
          .. "{ [path of the module] = { [table] = entry } }, \"\" being the model itself", tostring(path))
      end
      if type(module_plan) ~= "table" then
        fail("ShardingPlan: module '%s' has a %s, wanted an EmbeddingModuleShardingPlan", tostring(path),
          type(module_plan))
      end
      module_plan = EmbeddingModuleShardingPlan(module_plan)
    end
    self.plan[path] = module_plan
  end
end

--- Remember the file that the plan was read from: what is wrong with it is often seen only beside a model. Returns the
--- plan.
function ShardingPlan:_note_file(path)
  self.from = path
  for _, module_plan in util.ordered(self.plan) do module_plan.from = path end
  return self
end

--- The plan of the module at `path`, or nil.
function ShardingPlan:get_plan_for_module(path) return self.plan[path] end

function ShardingPlan:__tostring()
  local lines = {}
  for path, module_plan in util.ordered(self.plan) do
    lines[#lines + 1] = "module: " .. (path == "" and "(the model)" or path)
    lines[#lines + 1] = tostring(module_plan)
  end
  return table.concat(lines, "\n")
end

signature.object("table_config", "the configuration of a table",
  { name = "string", num_embeddings = "number", embedding_dim = "number" })
signature.list_of("table_configs", "a list of configurations of tables", "table_config")
signature.object("ranks_of_plan", "a ShardingEnv", { world_size = "int", local_size = "int?", nodes = "table?" })
signature.kind("ParameterSharding", "a ParameterSharding", ParameterSharding.is)
signature.check("ParameterSharding:", ParameterSharding, {
  ranks_on = "self: ParameterSharding, nodes: table, table_name: string?",
  shards = "self: ParameterSharding, config: table_config, env: ranks_of_plan" })
signature.check("EmbeddingModuleShardingPlan:", EmbeddingModuleShardingPlan, {
  init = "self: table, tables: table?",
  validate = "self: table, configs: table_configs, env: ranks_of_plan, module_name: string?",
})

return M
