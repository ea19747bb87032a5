-- collision.lua: what the specs of managed collision share: raw ids, which do not fit into Lua's numbers, as places in
-- an ascending list, and the plain model (collision_model.lua) of a map over them.
local ffi = require "ffi"
local peri = require "perilune"

local M = { Model = require "spec.support.collision_model", HashModel = require "spec.support.collision_hash_model" }

M.MAX = 0x7fffffffffffffffLL
M.MIN = -M.MAX - 1

--- Elements of an i64 tensor: C's array, and how many.
function M.read(tensor) return tensor:reshape(-1):read() end

--- A pool of the raw ids in some arrays { memory, n }: ids[1..n] ascending, `place` of each.
local Pool = {}
Pool.__index = Pool
function M.pool(arrays)
  local seen, ids = {}, {}
  for _, a in ipairs(arrays) do
    for i = 0, a[2] - 1 do
      local text = tostring(a[1][i])
      if not seen[text] then
        seen[text] = true
        ids[#ids + 1] = a[1][i]
      end
    end
  end
  table.sort(ids, function(a, b) return a < b end)
  local places = {}
  for i, id in ipairs(ids) do places[tostring(id)] = i end
  return setmetatable({ ids = ids, places = places }, Pool)
end

--- Places of the elements of an i64 tensor.
function Pool:of(tensor)
  local memory, n = M.read(tensor)
  local list = {}
  for i = 1, n do list[i] = assert(self.places[tostring(memory[i - 1])], "an id that is not in the pool") end
  return list
end

--- The ids at some places as an i64 tensor.
function Pool:tensor(places, device)
  local memory = ffi.new("int64_t[?]", math.max(#places, 1))
  for i, p in ipairs(places) do memory[i - 1] = self.ids[p] end
  return peri.Tensor.from_memory(memory, { #places }, "i64", device)
end

--- All i64 tensors of a golden case whose names match.
function M.pool_of_case(case, pattern)
  local arrays = {}
  for _, name in ipairs(case:tensor_names(pattern)) do arrays[#arrays + 1] = { M.read(case:tensor(name, "cpu")) } end
  return M.pool(arrays)
end

local policies = { LFU_EvictionPolicy = "LFU", LRU_EvictionPolicy = "LRU", DistanceLFU_EvictionPolicy = "DistanceLFU" }
local filters = { average_threshold_filter = "average", dynamic_threshold_filter = "dynamic" }

--- The model of an mch_ case, its ids as places of a pool.
function M.model_of_case(case)
  local a = case.args
  return M.Model { rows = a.zch_size, policy = policies[a.policy], decay = a.decay_exponent,
    interval = a.eviction_interval, filter = filters[a.threshold_filter], filter_arg = a.threshold_arg,
    capacity = a.history_buffer_size }
end


-- -- random tests -----------------------------------------------------------------------------------------------------

--- Numbers that only depend on the seed: random(n) gives 1..n.
function M.random(seed)
  local drawn = 0
  return function(n)
    drawn = drawn + 1
    return math.floor(peri.ffi.C.peri_random_uniform(seed, 77, drawn) * n) + 1
  end
end

--- The finalizer of MurmurHash3.
local function fmix64(x)
  local h = ffi.cast("uint64_t", x)
  h = bit.bxor(h, bit.rshift(h, 33)) * 0xff51afd7ed558ccdULL
  h = bit.bxor(h, bit.rshift(h, 33)) * 0xc4ceb9fe1a85ec53ULL
  return bit.bxor(h, bit.rshift(h, 33))
end

--- Which of n buckets an id belongs to, from 1: by what collision.h says.
function M.bucket(id, n, spread, input_hash_size)
  if spread == "modulo" then
    local rest = id % n
    return tonumber(rest < 0 and rest + n or rest) + 1
  end
  if spread == "range" then return tonumber(id / math.ceil(input_hash_size / n)) + 1 end
  local h = fmix64(id)
  local high, low = bit.rshift(h, 32) * n, bit.band(h, 0xffffffffULL) * n
  return tonumber(bit.rshift(high + bit.rshift(low, 32), 32)) + 1
end

--- Kinds of ids that a test may meet: n of them.
local kinds = {
  function(r, n) -- small ones
    local ids = {}
    for i = 1, n do ids[i] = ffi.new("int64_t", r(3 * n) - n) end
    return ids
  end,
  function(r, n) -- of all sizes, the ends of the range among them
    local ids = { M.MIN, M.MAX, M.MAX - 1, M.MIN + 1, 0LL, -1LL }
    for i = #ids + 1, n do ids[i] = ffi.cast("int64_t", fmix64(ffi.new("int64_t", r(2 ^ 31)))) end
    return ids
  end,
  function(_, n) -- multiples of a power of two: one bucket under modulo, equal low bits everywhere
    local ids = {}
    for i = 1, n do ids[i] = ffi.new("int64_t", i - 1) * 0x100000000LL end
    return ids
  end,
  function(r) return { ffi.new("int64_t", r(100)) } end, -- all equal
}

--- A pool of n random ids (or of one kind: 1..4).
function M.random_pool(r, n, kind)
  local ids = kinds[kind or r(3)](r, n)
  local memory = ffi.new("int64_t[?]", #ids)
  for i, id in ipairs(ids) do memory[i - 1] = id end
  return M.pool { { memory, #ids } }
end

--- Lists of places of ids for so many features: the first ids are asked for more often than the last ones.
function M.random_features(r, pool, features, most)
  local lists = {}
  for f = 1, features do
    local list = {}
    for i = 1, r(most + 1) - 1 do list[i] = math.ceil(#pool.ids * (r(1000) / 1000) ^ 2) end
    lists[f] = list
  end
  return lists
end

return M
