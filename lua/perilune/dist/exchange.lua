-- exchange.lua: modules that move KeyedJaggedTensors and embeddings between ranks (TorchRec's dist_data). They are made
-- once and called for every batch: KJTAllToAll(pg, splits)(kjt). All calls are collective: every rank of the group
-- makes the same ones in the same order. `pg` is the group; nil: the world. Awaitables go on by themselves whenever
-- anything of this rank waits or is tested.
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local Tensor = require "perilune.tensor"
local KJT = require "perilune.jagged.kjt"
local Keys = require "perilune.jagged.keys"
local A = require "perilune.jagged.arguments"
local awaitable = require "perilune.dist.awaitable"
local ops = require "perilune.dist.ops"
local group_of = require("perilune.dist.group").group_of
local signature = require "perilune.signature"
local C, check = P.C, P.check
local Awaitable, finish_work = awaitable.Awaitable, awaitable.finish_work

local M = {}

--- A class whose instances can be called like functions.
local function module(name)
  local class = util.class(name)
  class.__call = function(self, ...) return self:forward(...) end
  M[name] = class
  return class
end

--- One whole number >= 0 for each rank.
local function check_per_rank(func, what, list, n)
  if type(list) ~= "table" or #list ~= n then
    P.fail(("%s: %s needs one number for each of %d ranks, got %s"):format(func, what, n,
      type(list) == "table" and #list or tostring(list)))
  end
  for i = 1, n do util.integer(func, ("%s[%d]"):format(what, i), list[i], 0, 2 ^ 31 - 1) end
  return list
end

-- -- KeyedJaggedTensors -----------------------------------------------------------------------------------------------

local args_type, works_type = ffi.typeof "peri_kjt_exchange_args[?]", ffi.typeof "peri_work *[?]"
local splits_out, sizes = ffi.new "peri_work *[1]", ffi.typeof "int64_t[?]"

--- A KJT on its way; knows the sizes once the splits are there.
local TensorsAwaitable = util.class("KJTAllToAllTensorsAwaitable", Awaitable)
M.KJTAllToAllTensorsAwaitable = TensorsAwaitable

function TensorsAwaitable:init(ptr, group)
  Awaitable.init(self)
  self._work = awaitable.wrap_work(ptr)
  self._ranks = group.world_size
end

--- { stride_per_rank = rows of each rank's batch, input_splits = ids sent to each rank, output_splits = ids that come
--- from each }: what the way back of sequence embeddings needs. Not before the splits are there, nor after wait.
function TensorsAwaitable:splits()
  local n = self._ranks
  if self._work.ptr == nil then P.fail "KJTAllToAll: the splits are gone: ask for them before the KJT" end
  local a, b, c = sizes(n), sizes(n), sizes(n)
  check(C.peri_exchange_kjt_splits(self._work.ptr, a, b, c))
  local t = { stride_per_rank = {}, input_splits = {}, output_splits = {} }
  for i = 1, n do
    t.stride_per_rank[i], t.input_splits[i], t.output_splits[i] = tonumber(a[i - 1]), tonumber(b[i - 1]),
      tonumber(c[i - 1])
  end
  return t
end

function TensorsAwaitable:_wait_impl()
  local work = self._work
  finish_work(work)
  check(C.peri_exchange_kjt_result(work.ptr, KJT.out))
  work:release()
  return KJT.wrap(KJT.out[0])
end

function TensorsAwaitable:_test_impl() return C.peri_work_test(self._work.ptr) ~= C.PERI_PENDING end

--- The sizes of one KJT, or of several that travel in one message; its result is the awaitable of the KJT, or the list
--- of them.
local SplitsAwaitable = util.class("KJTAllToAllSplitsAwaitable", Awaitable)
M.KJTAllToAllSplitsAwaitable = SplitsAwaitable

function SplitsAwaitable:init(ptr, result)
  Awaitable.init(self)
  self._work = awaitable.wrap_work(ptr)
  self._given = result
end

SplitsAwaitable._wait_impl = awaitable.WorkAwaitable._wait_impl
SplitsAwaitable._test_impl = awaitable.WorkAwaitable._test_impl

--- Post the exchanges of metas of one group; returns the awaitable of the list of awaitables.
local function post(group, metas)
  local n = #metas
  local args, works = args_type(n), works_type(n)
  for i = 1, n do
    local a, meta = args[i - 1], metas[i]
    a.kjt, a.key_splits, a.stagger, a.keys = KJT.ptr(meta.kjt), meta.dist._splits, meta.dist.stagger,
      meta.dist:_keys_of(meta.kjt)
  end
  check(C.peri_exchange_kjts(group:ptr(), args, n, splits_out, works))
  local list = {}
  for i = 1, n do list[i] = TensorsAwaitable(works[i - 1], group) end
  return SplitsAwaitable(splits_out[0], list)
end

--- KJTAllToAll(pg, splits, stagger = 1): the first splits[1] keys of a KJT go to rank 0, the next splits[2] to rank 1,
--- ...; each rank gets its keys with the rows of all ranks, in the order of ranks, or with stagger s in the order 0,
--- W/s, 2W/s, ..., 1, W/s + 1, ...
local KJTAllToAll = module "KJTAllToAll"

function KJTAllToAll:init(pg, splits, stagger)
  local func = "KJTAllToAll"
  self.pg = group_of(func, pg)
  local n = self.pg.world_size
  self.splits = check_per_rank(func, "splits", splits, n)
  self.stagger = util.integer(func, "stagger", stagger or 1, 1, n)
  if n % self.stagger ~= 0 then
    P.fail(("%s: stagger %d, allowed: divisors of the %d ranks"):format(func, self.stagger, n))
  end
  self._splits = ffi.new("int32_t[?]", n)
  self._first, self._count = 0, splits[self.pg.rank_number + 1]
  for r = 1, n do
    self._splits[r - 1] = splits[r]
    if r <= self.pg.rank_number then self._first = self._first + splits[r] end
  end
  self._input_keys, self._keys = false, false
end

--- The C list of this rank's keys of a KJT: the same one as long as KJTs have the same keys.
function KJTAllToAll:_keys_of(kjt)
  local all = C.peri_kjt_keys(KJT.ptr(kjt))
  if self._keys and C.peri_keys_equal(all, self._input_keys.ptr) then return self._keys.ptr end
  if self._first + self._count > C.peri_keys_count(all) then return nil end -- the C call says what is wrong
  local names = {}
  for i = 1, self._count do names[i] = ffi.string(C.peri_keys_name(all, self._first + i - 1)) end
  self._names, self._keys, self._input_keys = names, Keys.of(names), P.lasting(Keys._share, all)
  return self._keys.ptr
end

local function kjt_of(func, kjt)
  kjt = awaitable.resolve(kjt)
  if not KJT.is(kjt) then P.fail(("%s: a %s, wanted a KeyedJaggedTensor"):format(func, type(kjt))) end
  return kjt
end

--- An awaitable of an awaitable of the KJT: the first is there when the sizes are known.
function KJTAllToAll:forward(kjt)
  local splits = post(self.pg, { { dist = self, kjt = kjt_of("KJTAllToAll", kjt) } })
  splits._given = splits._given[1]
  return splits
end

--- The same exchange, not yet begun: for FusedKJTListSplitsAwaitable.
local Meta = util.class "KJTSplitsAllToAllMeta"
M.KJTSplitsAllToAllMeta = Meta
function Meta:init(dist, kjt)
  self.dist, self.kjt = dist, kjt
end
function KJTAllToAll:defer(kjt) return Meta(self, kjt_of("KJTAllToAll.defer", kjt)) end

--- FusedKJTListSplitsAwaitable(requests): the sizes of all deferred exchanges of each group in one message: of those of
--- KJTAllToAlls, and of those of sharded modules (ShardedModule:defer). Other awaitables among the requests stay what
--- they are. Its result: the list of what follows each request (awaitables of KJTs, results of awaitables). All ranks
--- list the same requests.
local Fused = util.class("FusedKJTListSplitsAwaitable", Awaitable)
M.FusedKJTListSplitsAwaitable = Fused

function Fused:init(requests)
  Awaitable.init(self)
  local groups, metas = {}, {}
  local deferred, post_deferred = {}, nil
  self._requests, self._posted = requests, {}
  for i = 1, #requests do
    local request = requests[i]
    if rawget(request, "deferred") then
      deferred[#deferred + 1], post_deferred = request, request._post_deferred
    elseif Meta.is(request) then
      local group = request.dist.pg
      if not metas[group] then
        metas[group] = {}
        groups[#groups + 1] = group
      end
      local list = metas[group]
      list[#list + 1] = request
      self._posted[i] = { group = group, at = #list }
    end
  end
  for _, group in ipairs(groups) do metas[group] = post(group, metas[group]) end
  if post_deferred then post_deferred(deferred, #deferred) end
  for i = 1, #requests do
    if self._posted[i] then self._posted[i].splits = metas[self._posted[i].group] end
  end
end

function Fused:_wait_impl()
  local results = {}
  for i = 1, #self._requests do
    local p = self._posted[i]
    results[i] = p and p.splits:wait()[p.at] or not p and self._requests[i]:wait()
  end
  return results
end

function Fused:_test_impl()
  for i = 1, #self._requests do
    local p = self._posted[i]
    if not (p and p.splits or self._requests[i]):test() then return false end
  end
  return true
end

--- SparseFeatures { id_list_features = KJT without weights, id_score_list_features = KJT with weights }; either may be
--- missing.
local SparseFeatures = util.class "SparseFeatures"
M.SparseFeatures = SparseFeatures
local both_kinds = { id_list_features = true, id_score_list_features = true }
function SparseFeatures:init(args)
  A.check("SparseFeatures", args, both_kinds)
  for name in util.ordered(both_kinds) do
    if args[name] then signature.value("SparseFeatures", name, args[name], "KeyedJaggedTensor") end
  end
  self.id_list_features, self.id_score_list_features = args.id_list_features or false, args.id_score_list_features
    or false
end

local SparseFeaturesAwaitable = util.class("SparseFeaturesAwaitable", Awaitable)
function SparseFeaturesAwaitable:init(splits, has_list, has_scores)
  Awaitable.init(self)
  self._splits, self._has_list, self._has_scores = splits, has_list, has_scores
end
--- Wait for the splits, then for the tensors.
function SparseFeaturesAwaitable:_wait_impl()
  local tensors = self._splits:wait()
  return SparseFeatures {
    id_list_features = self._has_list and tensors[1]:wait() or nil,
    id_score_list_features = self._has_scores and tensors[#tensors]:wait() or nil,
  }
end
function SparseFeaturesAwaitable:_test_impl()
  if not self._splits:test() then return false end
  for _, t in ipairs(self._splits:wait()) do
    if not t:test() then return false end
  end
  return true
end

--- SparseFeaturesAllToAll { pg, id_list_features_per_rank, id_score_list_features_per_rank, device, stagger = 1 }: both
--- KJTs of SparseFeatures as KJTAllToAll moves them, with one message for the sizes of both.
local SparseFeaturesAllToAll = module "SparseFeaturesAllToAll"
function SparseFeaturesAllToAll:init(args)
  local func = "SparseFeaturesAllToAll"
  local a = util.named(func, args, { pg = util.optional, id_list_features_per_rank = util.required,
    id_score_list_features_per_rank = util.required, device = util.optional, stagger = 1 })
  self.pg = group_of(func, a.pg)
  self.id_list_dist = KJTAllToAll(self.pg, a.id_list_features_per_rank, a.stagger)
  self.id_score_list_dist = KJTAllToAll(self.pg, a.id_score_list_features_per_rank, a.stagger)
end

--- An awaitable of the SparseFeatures of this rank.
function SparseFeaturesAllToAll:forward(features)
  local func, metas = "SparseFeaturesAllToAll", {}
  local list, scores = features.id_list_features, features.id_score_list_features
  if list then metas[1] = { dist = self.id_list_dist, kjt = kjt_of(func, list) } end
  if scores then
    metas[#metas + 1] = { dist = self.id_score_list_dist, kjt = kjt_of(func, scores) }
    if not scores:is_weighted() then P.fail(func .. ": id_score_list_features have no weights") end
  end
  if #metas == 0 then P.fail(func .. ": neither id_list_features nor id_score_list_features") end
  return SparseFeaturesAwaitable(post(self.pg, metas), list and true, scores and true)
end

-- -- embeddings -------------------------------------------------------------------------------------------------------

--- Stands for the tensor that an exchange brings, after the callbacks.
local PooledEmbeddingsAwaitable = awaitable.lazy_class("PooledEmbeddingsAwaitable", awaitable.LazyAwaitable)
M.PooledEmbeddingsAwaitable = PooledEmbeddingsAwaitable
function PooledEmbeddingsAwaitable:init(tensor_awaitable, callbacks)
  awaitable.LazyAwaitable.init(self, tensor_awaitable)
  for i = 1, callbacks and #callbacks or 0 do self:and_then(callbacks[i]) end
end

local function common_arguments(func, args, spec)
  spec.pg, spec.device, spec.codecs = util.optional, util.optional, util.optional
  local a = util.named(func, args, spec)
  return a, group_of(func, a.pg), a.codecs or false
end

--- PooledEmbeddingsAllToAll { pg, dim_sum_per_rank, device, callbacks, codecs }(local_embs [all rows, dims of this
--- rank], batch_size_per_rank = equal parts): [this rank's rows, dims of all ranks], after the callbacks (a list of
--- functions of the tensor).
local PooledEmbeddingsAllToAll = module "PooledEmbeddingsAllToAll"
function PooledEmbeddingsAllToAll:init(args)
  local func = "PooledEmbeddingsAllToAll"
  local a
  a, self.pg, self.codecs = common_arguments(func, args,
    { dim_sum_per_rank = util.required.list, callbacks = util.optional.list })
  self.dim_sum_per_rank = check_per_rank(func, "dim_sum_per_rank", a.dim_sum_per_rank, self.pg.world_size)
  self.callbacks = a.callbacks or {}
end

function PooledEmbeddingsAllToAll:forward(local_embs, batch_size_per_rank)
  if not batch_size_per_rank then
    local embs = signature.value("PooledEmbeddingsAllToAll", "local_embs", awaitable.resolve(local_embs), "tensor")
    local n, rows = self.pg.world_size, embs:size(1)
    if rows % n ~= 0 then
      P.fail(("PooledEmbeddingsAllToAll: %d rows for %d ranks, and no batch_size_per_rank"):format(rows, n))
    end
    batch_size_per_rank = {}
    for i = 1, n do batch_size_per_rank[i] = rows / n end
  end
  return PooledEmbeddingsAwaitable(ops.alltoall_pooled {
    a2a_pooled_embs_tensor = local_embs, batch_size_per_rank = batch_size_per_rank,
    dim_sum_per_rank = self.dim_sum_per_rank, group = self.pg, codecs = self.codecs,
  }, self.callbacks)
end

--- VariableBatchPooledEmbeddingsAllToAll { pg, emb_dim_per_rank_per_feature, device, callbacks, codecs }(local_embs
--- (one dimension), batch_size_per_rank_per_feature, batch_size_per_feature_pre_a2a): see
--- ops.variable_batch_alltoall_pooled.
local VariableBatchAllToAll = module "VariableBatchPooledEmbeddingsAllToAll"
function VariableBatchAllToAll:init(args)
  local a
  a, self.pg, self.codecs = common_arguments("VariableBatchPooledEmbeddingsAllToAll", args,
    { emb_dim_per_rank_per_feature = util.required.list, callbacks = util.optional.list })
  self.emb_dim_per_rank_per_feature, self.callbacks = a.emb_dim_per_rank_per_feature, a.callbacks or {}
end

function VariableBatchAllToAll:forward(local_embs, batch_size_per_rank_per_feature, batch_size_per_feature_pre_a2a)
  return PooledEmbeddingsAwaitable(ops.variable_batch_alltoall_pooled {
    a2a_pooled_embs_tensor = local_embs, batch_size_per_rank_per_feature = batch_size_per_rank_per_feature,
    batch_size_per_feature_pre_a2a = batch_size_per_feature_pre_a2a,
    emb_dim_per_rank_per_feature = self.emb_dim_per_rank_per_feature, group = self.pg, codecs = self.codecs,
  }, self.callbacks)
end

--- PooledEmbeddingsReduceScatter { pg, codecs }(local_embs [all rows, dims], input_splits = equal parts): this rank's
--- rows of the sum.
local ReduceScatter = module "PooledEmbeddingsReduceScatter"
function ReduceScatter:init(args)
  local a
  a, self.pg, self.codecs = common_arguments("PooledEmbeddingsReduceScatter", args, { callbacks = util.optional.list })
  self.callbacks = a.callbacks or {}
end

function ReduceScatter:forward(local_embs, input_splits)
  local result
  if input_splits then
    result = ops.reduce_scatter_v_pooled { input = local_embs, input_splits = input_splits, group = self.pg,
      codecs = self.codecs }
  else
    result = ops.reduce_scatter_base_pooled { input = local_embs, group = self.pg, codecs = self.codecs }
  end
  return PooledEmbeddingsAwaitable(result, self.callbacks)
end

--- VariableBatchPooledEmbeddingsReduceScatter { pg, codecs }(local_embs (one dimension),
--- batch_size_per_rank_per_feature, embedding_dims).
local VariableReduceScatter = module "VariableBatchPooledEmbeddingsReduceScatter"
function VariableReduceScatter:init(args)
  local a
  a, self.pg, self.codecs = common_arguments("VariableBatchPooledEmbeddingsReduceScatter", args,
    { callbacks = util.optional.list })
  self.callbacks = a.callbacks or {}
end

function VariableReduceScatter:forward(local_embs, batch_size_per_rank_per_feature, embedding_dims)
  return PooledEmbeddingsAwaitable(ops.reduce_scatter_v_per_feature_pooled {
    input = local_embs, batch_size_per_rank_per_feature = batch_size_per_rank_per_feature,
    embedding_dims = embedding_dims, group = self.pg, codecs = self.codecs,
  }, self.callbacks)
end

--- PooledEmbeddingsAllGather { pg, codecs }(local_emb [n, dims]): [W n, dims].
local AllGather = module "PooledEmbeddingsAllGather"
function AllGather:init(args)
  local a
  a, self.pg, self.codecs = common_arguments("PooledEmbeddingsAllGather", args, { callbacks = util.optional.list })
  self.callbacks = a.callbacks or {}
end

function AllGather:forward(local_emb)
  return PooledEmbeddingsAwaitable(ops.all_gather_base_pooled { input = local_emb, group = self.pg,
    codecs = self.codecs }, self.callbacks)
end

--- SequenceEmbeddingsAllToAll { pg, features_per_rank, device, codecs } { local_embs [ids received, D], lengths,
--- input_splits, output_splits, batch_size_per_rank or stride_per_key_per_rank, unbucketize_permute_tensor, stagger = 1
--- }: a row for each id that this rank sent, in the order of sending; with a permutation p, row i is that of the
--- p[i]-th.
local SequenceAllToAll = module "SequenceEmbeddingsAllToAll"
function SequenceAllToAll:init(args)
  local func = "SequenceEmbeddingsAllToAll"
  local a
  a, self.pg, self.codecs = common_arguments(func, args, { features_per_rank = util.required })
  self.features_per_rank = check_per_rank(func, "features_per_rank", a.features_per_rank, self.pg.world_size)
end

local sequence = {
  local_embs = true, lengths = true, input_splits = true, output_splits = true, batch_size_per_rank = true,
  stride_per_key_per_rank = true, unbucketize_permute_tensor = true, stagger = true,
}
local needed = { "local_embs", "lengths", "input_splits", "output_splits" }

--- Stands for the rows, in the order that the permutation (false: none) gives them.
local SequenceEmbeddingsAwaitable = awaitable.lazy_class("SequenceEmbeddingsAwaitable", awaitable.LazyAwaitable)
M.SequenceEmbeddingsAwaitable = SequenceEmbeddingsAwaitable
function SequenceEmbeddingsAwaitable:init(tensor_awaitable, permutation)
  awaitable.LazyAwaitable.init(self, tensor_awaitable)
  if permutation then signature.value("SequenceEmbeddingsAwaitable", "permutation", permutation, "tensor") end
  rawset(self, "_permutation", permutation)
end
function SequenceEmbeddingsAwaitable:_wait_impl()
  local rows, permutation = rawget(self, "_awaitable"):wait(), rawget(self, "_permutation")
  return permutation and ops.unbucketize(rows, permutation) or rows
end

function SequenceAllToAll:forward(a)
  A.check_all("SequenceEmbeddingsAllToAll", a, sequence, needed)
  local batch = a.batch_size_per_rank
  if not batch and not a.stride_per_key_per_rank then
    local count, n = self.features_per_rank[self.pg.rank_number + 1], self.pg.world_size
    local rows = count > 0 and a.lengths:numel() / count / n or 0
    if rows ~= math.floor(rows) then
      P.fail "SequenceEmbeddingsAllToAll: batches are not equal, and there is no batch_size_per_rank"
    end
    batch = {}
    for r = 1, n do batch[r] = rows end
  end
  local result = ops.alltoall_sequence {
    a2a_sequence_embs_tensor = a.local_embs, lengths_after_sparse_data_all2all = a.lengths,
    input_splits = a.input_splits, output_splits = a.output_splits, batch_size_per_rank = batch,
    stride_per_key_per_rank = a.stride_per_key_per_rank, num_features = self.features_per_rank[self.pg.rank_number + 1],
    stagger = a.stagger or 1, group = self.pg, codecs = self.codecs,
  }
  return SequenceEmbeddingsAwaitable(result, a.unbucketize_permute_tensor or false)
end

-- -- one process, several devices -------------------------------------------------------------------------------------

--- The device of part i: a list gives one each, "cuda" stands for "cuda:0", "cuda:1", ..., any other name for itself.
local function device_of(device, i)
  if type(device) == "table" then return device[i] end
  return device == "cuda" and ("cuda:%d"):format(i - 1) or device
end

--- KJTOneToAll(splits, world_size, device)(kjt): a list of KJTs: the first splits[1] keys on the first device, and so
--- on.
local KJTOneToAll = module "KJTOneToAll"
function KJTOneToAll:init(splits, world_size, device)
  self.world_size = util.integer("KJTOneToAll", "world_size", world_size, 1, 2 ^ 20)
  self.splits, self.device = check_per_rank("KJTOneToAll", "splits", splits, world_size), device or false
end

local devices_type, splits_type, kjts_type = ffi.typeof "peri_device *[?]", ffi.typeof "int32_t[?]",
  ffi.typeof "peri_kjt *[?]"

function KJTOneToAll:forward(kjt)
  local n, devices = self.world_size, nil
  local splits, made = splits_type(n, self.splits), kjts_type(n)
  if self.device then
    devices = devices_type(n)
    for i = 1, n do devices[i - 1] = P.device(device_of(self.device, i)) end
  end
  check(C.peri_exchange_kjt_one_to_all(KJT.ptr(kjt_of("KJTOneToAll", kjt)), splits, devices, n, made))
  local parts = {}
  for i = 1, n do parts[i] = KJT.wrap(made[i - 1]) end
  return parts
end

local tensors_type = ffi.typeof "peri_tensor *[?]"

--- A class of merges: what the tensors of all devices become on one. arguments: further ones, with their defaults.
local function all_to_one(name, merge, arguments)
  local class = module(name)
  function class:init(args)
    local spec = { device = util.optional, world_size = util.whole(util.required, 1, 2 ^ 20) }
    for key, value in util.ordered(arguments) do spec[key] = value end
    local a = util.named(name, args, spec)
    self.device, self.world_size = a.device or false, a.world_size
    self.cat_dim = a.cat_dim and util.integer(name, "cat_dim", a.cat_dim, 1, 8) or 1
  end
  function class:set_device(device) self.device = device end
  function class:_merge(tensors, results)
    local n = self.world_size
    if type(tensors) ~= "table" or #tensors ~= n then
      P.fail(("%s: %s tensors, wanted a list of %d"):format(name, type(tensors) == "table" and #tensors
        or type(tensors), n))
    end
    local list, pointers, made = {}, tensors_type(n), tensors_type(results)
    for i = 1, n do
      list[i] = signature.value(name, ("tensor %d"):format(i), awaitable.resolve(tensors[i]), "tensor")
      pointers[i - 1] = Tensor.ptr(list[i])
    end
    check(C.peri_exchange_all_to_one(pointers, n, self.device and P.device(self.device) or nil, merge, self.cat_dim - 1,
      made))
    return made
  end
  function class:forward(tensors) return Tensor.wrap(self:_merge(tensors, 1)[0]) end
  return class
end

--- EmbeddingsAllToOne { device, world_size, cat_dim = 2 }(tensors): the tensors of all devices side by side on one.
all_to_one("EmbeddingsAllToOne", C.PERI_MERGE_CAT, { cat_dim = 2 })
--- EmbeddingsAllToOneReduce { device, world_size }(tensors): their sum on one device.
all_to_one("EmbeddingsAllToOneReduce", C.PERI_MERGE_SUM, {})
--- SeqEmbeddingsAllToOne { device, world_size }(tensors): the list of them on one device.
local SeqEmbeddingsAllToOne = all_to_one("SeqEmbeddingsAllToOne", C.PERI_MERGE_EACH, {})
function SeqEmbeddingsAllToOne:forward(tensors)
  local made, list = self:_merge(tensors, self.world_size), {}
  for i = 1, self.world_size do list[i] = Tensor.wrap(made[i - 1]) end
  return list
end

signature.kind("KJTAllToAll", "a KJTAllToAll", KJTAllToAll.is)
signature.check("KJTSplitsAllToAllMeta:", Meta, { init = "self: table, dist: KJTAllToAll, kjt: KeyedJaggedTensor" })
signature.kind("request", "an awaitable, or what KJTAllToAll:defer or ShardedModule:defer returns",
  function(x) return Meta.is(x) or Awaitable.is(x) end)
signature.list_of("requests", "a list of awaitables, or of what KJTAllToAll:defer or ShardedModule:defer returns",
  "request")
signature.check("FusedKJTListSplitsAwaitable:", Fused, { init = "self: table, requests: requests" })
signature.check("SparseFeaturesAllToAll:", SparseFeaturesAllToAll, { forward = "self: table, features: table" })
signature.check("PooledEmbeddingsAwaitable:", PooledEmbeddingsAwaitable,
  { init = "self: table, tensor_awaitable: awaitable, callbacks: list?" })

return M
