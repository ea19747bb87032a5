-- mc_map.lua: maps of raw ids to rows (perilune/collision.h): one object for a table, or for some of its buckets.
-- Modules are built on it.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local policies = require "perilune.embed.mc_policies"
local signature = require "perilune.signature"
local C, check = P.C, P.check

local M = {}
local methods = {}
local wrap, ctype, ptr = P.handle("peri_collision", methods, nil, "a map of ids")
signature.handle("CollisionMap", ctype)
M.ptr = ptr
function M.is(x) return ffi.istype(ctype, x) end

local out = ffi.new "peri_collision *[1]"
local tensor_out = Tensor.out
local stats = P.struct "peri_collision_stats"

M.kinds = { mch = C.PERI_COLLISION_MCH, hash = C.PERI_COLLISION_HASH }
M.spreads = { hash = C.PERI_SPREAD_HASH, modulo = C.PERI_SPREAD_MODULO, range = C.PERI_SPREAD_RANGE }
M.misses = { default = C.PERI_MISS_DEFAULT, row = C.PERI_MISS_ROW, hash = C.PERI_MISS_HASH, drop = C.PERI_MISS_DROP,
  error = C.PERI_MISS_ERROR }

--- The number of buckets of a table of so many rows, unless somebody says another.
function M.buckets(rows) return C.peri_collision_buckets(rows) end

local arguments = {
  name = util.required.string, rows = util.required.number, kind = util.required.string, device = util.optional,
  -- see collision.h
  buckets = 0, segments = util.optional.list, spread = "hash", input_hash_size = util.any(0), on_miss = "default",
  first_bucket = 0, n_buckets = 0,
  policy = util.optional,          -- a MCHEvictionPolicy
  eviction_interval = 1, seed = util.optional.seed,
  evict = util.optional.number,    -- hash: a PERI_FORGET_ constant
  history_capacity = 0, max_probe = 0, ttl = util.optional.list, n_features = 0, read_only = util.optional.list,
}

--- What the C call reads of the arguments beside numbers: kept until it returns.
local function fill_lists(c, a)
  local kept = {}
  if a.segments then
    kept.segments = ffi.new("int64_t[?]", #a.segments, a.segments)
    c.segments = kept.segments
  end
  if a.ttl then
    kept.ttl = ffi.new("int64_t[?]", #a.ttl, a.ttl)
    c.ttl, c.n_ttl = kept.ttl, #a.ttl
  end
  if a.read_only then
    kept.read_only = ffi.new("bool[?]", #a.read_only, a.read_only)
    c.read_only = kept.read_only
  end
  return kept
end

--- Rows where the buckets of a table begin, and their end, unless somebody says others.
function M.segments(rows, buckets)
  util.integer("embed.mc_map.segments", "buckets", buckets, 1, 2 ^ 24)
  local memory, list = ffi.new("int64_t[?]", buckets + 1), {}
  C.peri_collision_segments(rows, buckets, memory)
  for b = 0, buckets do list[b + 1] = tonumber(memory[b]) end
  return list
end

--- The arguments of a map as C takes them, and what these read beside numbers, which is to be kept until then.
local function config_of(args)
  local a = util.named("map of ids", args, arguments)
  local c, policy = P.struct "peri_collision_config", a.policy
  for name, allowed in util.ordered { kind = M.kinds, spread = M.spreads, on_miss = M.misses } do
    util.one_of("map of ids", name, a[name], util.keys(allowed))
  end
  c.name, c.rows, c.kind, c.buckets, c.spread = a.name, a.rows, M.kinds[a.kind], a.buckets, M.spreads[a.spread]
  c.input_hash_size, c.on_miss, c.first_bucket, c.n_buckets = a.input_hash_size, M.misses[a.on_miss], a.first_bucket,
    a.n_buckets
  c.eviction_interval, c.seed, c.max_probe, c.n_features = a.eviction_interval, a.seed or P.state.seed, a.max_probe,
    a.n_features
  c.history_capacity = a.history_capacity
  c.policy = a.evict or policy and policy.kind or C.PERI_FORGET_NONE
  if policy then
    c.decay_exponent = policy.decay_exponent
    if policy.threshold_filtering_func then
      c.filter, c.filter_arg = policy.threshold_filtering_func.kind, policy.threshold_filtering_func.value
    end
  end
  return c, fill_lists(c, a), a
end

--- A map.
function M.new(args)
  local c, kept, a = config_of(args)
  check(C.peri_collision_new(P.device(a.device), c, out))
  kept.segments = nil
  return (wrap(out[0]))
end

local bytes_out = ffi.new "int64_t[1]"

--- Bytes that such a map keeps on its device.
function M._bytes_of(args)
  local c, kept = config_of(args)
  check(C.peri_collision_bytes_of(c, bytes_out))
  kept.segments = nil
  return tonumber(bytes_out[0])
end

-- -- ids --------------------------------------------------------------------------------------------------------------

local sent, got, room = ffi.new "peri_tensor *[8]", ffi.new "peri_tensor *[8]", 8

local function result_tensors(n)
  local list = {}
  for f = 1, n do list[f] = Tensor.wrap(got[f - 1]) end
  return list
end

local function fill_pointers(ids)
  local n = #ids
  if n > room then sent, got, room = ffi.new("peri_tensor *[?]", n), ffi.new("peri_tensor *[?]", n), n end
  for f = 1, n do sent[f - 1] = Tensor.ptr(ids[f]) end
  return n
end

--- Rows of the ids (a list of i64 tensors, one for each feature of the table), counted from the first of this map; -1:
--- none. `training`: the ids are counted and learned first: one call is one step.
function methods:remap(ids, training)
  local n = fill_pointers(ids)
  check(C.peri_collision_remap(ptr(self), sent, n, training, got))
  return result_tensors(n)
end

local counts_out, last_out = ffi.new "peri_tensor *[1]", ffi.new "peri_tensor *[1]"

local asked = {} -- addresses of the maps whose policies are running

--- Scores of the candidates of a map; while its policy runs the map takes no ids.
local function scores_of(map, policy, name)
  local address = tostring(ptr(map))
  check(C.peri_collision_candidates(ptr(map), counts_out, last_out))
  local now = methods.statistics(map).iterations
  asked[address] = true
  local ok, scores = pcall(policies.scores, policy, Tensor.wrap(counts_out[0]), Tensor.wrap(last_out[0]), now, name)
  asked[address] = nil
  if not ok then error(scores, 0) end
  return scores
end

--- The same for a policy of Lua, which is asked when a window ends. `name`: of the table, for its errors.
function methods:remap_scored(ids, training, policy, name)
  if asked[tostring(ptr(self))] then
    P.fail(("table '%s': its eviction policy gives ids to the map that asks it for scores; allowed: maps of other "
      .. "tables"):format(name))
  end
  local n = fill_pointers(ids)
  while check(C.peri_collision_remap(ptr(self), sent, n, training, got)) == C.PERI_PENDING do
    check(C.peri_collision_scores(ptr(self), Tensor.ptr(scores_of(self, policy, name))))
    fill_pointers(ids) -- the policy may have used maps itself
  end
  return result_tensors(n)
end

--- Rows that got another id since the last call, ascending, each once (i64); nil: none.
function methods:evicted()
  check(C.peri_collision_evicted(ptr(self), tensor_out))
  if tensor_out[0] == nil then return nil end
  return Tensor.wrap(tensor_out[0])
end

local counts = { "ids", "hits", "inserted", "missed", "evicted", "collisions", "occupied", "rows", "iterations" }
--- Numbers since the map was made; see peri_collision_stats.
function methods:statistics()
  check(C.peri_collision_statistics(ptr(self), stats))
  local result = {}
  for _, name in ipairs(counts) do result[name] = tonumber(stats[name]) end
  return result
end

-- -- state ------------------------------------------------------------------------------------------------------------

--- Names of the parts of its state, as TorchRec's buffers.
function methods:state_names()
  local names = {}
  for i = 1, C.peri_collision_states(ptr(self)) do
    names[i] = ffi.string(C.peri_collision_state_name(ptr(self), i - 1))
  end
  return names
end

--- A copy of part i (from 1) of its state.
function methods:state(i)
  check(C.peri_collision_state(ptr(self), i - 1, tensor_out))
  return Tensor.wrap(tensor_out[0])
end

--- Take the state of buckets [first_bucket, first_bucket + n_buckets) of the table: name -> tensor, all parts.
function methods:load(map, first_bucket, n_buckets)
  local names = util.keys(map)
  local n = #names
  local c_names, tensors = ffi.new("const char *[?]", math.max(n, 1)), ffi.new("peri_tensor *[?]", math.max(n, 1))
  for i, name in ipairs(names) do c_names[i - 1], tensors[i - 1] = name, Tensor.ptr(map[name]) end
  check(C.peri_collision_load(ptr(self), first_bucket, n_buckets, n, c_names, tensors))
end

-- Some rows of its states at a time, in the order of rows (peri_collision_block).

local block, mark_out, iteration_out = P.struct "peri_collision_block", ffi.new "uint64_t[1]", ffi.new "int64_t[1]"
local data_out = ffi.new "void *[1]"
local pointers = { ids = ffi.typeof "int64_t *", mapping = ffi.typeof "int64_t *", counts = ffi.typeof "int64_t *",
  last = ffi.typeof "int64_t *", expiries = ffi.typeof "int32_t *" }
local members = { _mch_sorted_raw_ids = "ids", _mch_remapped_ids_mapping = "mapping", _mch_counts = "counts",
  _mch_last_access_iter = "last", _hash_zch_identities = "ids", _hash_zch_metadata = "expiries" }

--- Numbers of a row whose id is new, of states that a checkpoint lacks.
M._initial = { _mch_counts = 0, _mch_last_access_iter = 0, _hash_zch_metadata = -1 }

--- Whether a state has a number for each row.
function M._is_by_row(name) return members[name] ~= nil end
--- The dtype of such a state.
function M._dtype_of(name) return members[name] == "expiries" and "i32" or "i64" end

--- Say where `n` numbers of each state in `parts` (name -> tensor on the CPU, i64 or i32 as the state is) are, of rows
--- from `row` on.
local function fill_block(row, n, parts)
  block.ids, block.mapping, block.counts, block.last, block.expiries = nil, nil, nil, nil, nil
  block.row, block.n = row, n
  for name, t in util.ordered(parts) do
    check(C.peri_tensor_data(Tensor.ptr(t), data_out))
    block[members[name]] = ffi.cast(pointers[members[name]], data_out[0])
  end
  return block
end

--- Rows [row, row + n) of state `name` into `result`, a tensor of n rows on the CPU.
function methods:read_rows(name, row, result)
  check(C.peri_collision_rows_read(ptr(self), fill_block(row, result:size(1), { [name] = result })))
end

--- An error unless a state can be loaded that says `words` (name -> tensor: states without rows) and the rows that
--- `each` brings: each(f) calls f(row, n, parts) for all blocks of rows. Returns its mark as perilune/collision.h has
--- it, and its iteration; -1: none said.
function methods:check_rows(words, each)
  local names = util.keys(words)
  local c_names, tensors = ffi.new("const char *[?]", math.max(#names, 1)),
    ffi.new("peri_tensor *[?]", math.max(#names, 1))
  for i, name in ipairs(names) do c_names[i - 1], tensors[i - 1] = name, Tensor.ptr(words[name]) end
  check(C.peri_collision_words_check(ptr(self), #names, c_names, tensors, iteration_out))
  local iteration = tonumber(iteration_out[0])
  local sum = 0ULL
  each(function(row, n, parts)
    fill_block(row, n, parts)
    block.iteration, mark_out[0] = math.max(iteration, 0), sum
    check(C.peri_collision_rows_check(ptr(self), block, mark_out))
    sum = mark_out[0]
  end)
  return C.peri_collision_mark_sum(sum, iteration >= 0 and iteration or methods.statistics(self).iterations), iteration
end

--- Take such a state, which check_rows found sound. If something fails the map knows nothing. some: `each` reads rows
--- of this map (read_rows) before it brings them.
function methods:load_rows(iteration, each, some)
  check((some and C.peri_collision_rows_change or C.peri_collision_rows_begin)(ptr(self)))
  local ok, err = xpcall(each, P.locate, function(row, n, parts)
    check(C.peri_collision_rows_put(ptr(self), fill_block(row, n, parts)))
  end)
  if not ok then
    C.peri_collision_rows_begin(ptr(self))
    error(err, 0)
  end
  check(C.peri_collision_rows_end(ptr(self), iteration))
end

--- Shape, dtype and device of part i (from 1) of its state, of whose rows none is copied.
function methods:_describe(i)
  local name = ffi.string(C.peri_collision_state_name(ptr(self), i - 1))
  if not members[name] then
    return P.scope(function()
      local t = methods.state(self, i)
      return t:shape(), t:dtype(), t:device()
    end)
  end
  local rows = tonumber(C.peri_collision_rows(ptr(self)))
  local _, _, device = methods._describe(self, util.index_of(methods.state_names(self))._output_segments_tensor)
  return name:find "^_hash" and { rows, 1 } or { rows }, M._dtype_of(name), device
end

local start_out = ffi.new "int64_t[1]"
--- What was seen since the last eviction (MCH): the step before the window's first, and i64 [ids, 3]: id, times, the
--- last step.
function methods:window()
  check(C.peri_collision_window(ptr(self), start_out, tensor_out))
  return tonumber(start_out[0]), Tensor.wrap(tensor_out[0])
end
--- Go on with such a window; ids of other buckets are passed over.
function methods:set_window(start, entries)
  check(C.peri_collision_window_set(ptr(self), start, Tensor.ptr(entries)))
end

--- Know what another map of the table does, of the ids in buckets that are here: also what it has seen since its last
--- eviction. It has the buckets [first_bucket, first_bucket + n_buckets), and may be on another device.
function methods:take(other, first_bucket, n_buckets)
  local states, device = {}, select(3, methods._describe(self, 1))
  for i, name in ipairs(methods.state_names(other)) do states[name] = methods.state(other, i):to(nil, device) end
  methods.load(self, states, first_bucket, n_buckets)
  if not states._mch_sorted_raw_ids then return end
  local start, entries = methods.window(other)
  methods.set_window(self, start, entries:to(nil, "cpu"))
end

--- The time that times to live are compared with from now on, in their unit; -1: the number of the iteration, as at
--- first.
function methods:set_time(now) check(C.peri_collision_time_set(ptr(self), now)) end

signature.check("embed.mc_map.", M, { buckets = "rows: count", segments = "rows: count, buckets: int" })
signature.check("map of ids:", methods, { remap = "self: CollisionMap, ids: list, training: boolean",
  evicted = "self: CollisionMap", statistics = "self: CollisionMap", state_names = "self: CollisionMap",
  state = "self: CollisionMap, i: int", read_rows = "self: CollisionMap, name: string, row: int, result: tensor",
  check_rows = "self: CollisionMap, words: table, each: callable",
  load_rows = "self: CollisionMap, iteration: integer, each: callable, some: boolean?",
  load = "self: CollisionMap, map: table, first_bucket: int, n_buckets: int",
  take = "self: CollisionMap, other: CollisionMap, first_bucket: int, n_buckets: int", window = "self: CollisionMap",
  set_window = "self: CollisionMap, start: integer, entries: tensor", set_time = "self: CollisionMap, now: integer" })

return M
