-- Maps of raw ids are loaded some rows at a time. What no map can have is an error that names the row, and changes
-- nothing; an id with two rows is found when all rows are there, and leaves a map that knows nothing. States in the
-- order of ids, which TorchRec writes, load too.
local ffi = require "ffi"
local peri = require "perilune"
local Tensor = require "perilune.tensor"
local shell = require "spec.support.shell"

local folder, clean = shell.temporary()
teardown(clean)

local ROWS = 64

local function model(kind, policy)
  local module = kind == "hash"
    and peri.HashZchManagedCollisionModule { zch_size = ROWS, total_num_buckets = 2, max_probe = 6,
      eviction_policy_name = "SINGLE_TTL_EVICTION", eviction_config = { features = { "f" }, single_ttl = 3 } }
    or peri.MCHManagedCollisionModule { zch_size = ROWS, buckets = 2, device = "cpu", eviction_interval = 1,
      eviction_policy = policy or peri.embed.DistanceLFU_EvictionPolicy { decay_exponent = 1 } }
  local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = ROWS, embedding_dim = 2,
    feature_names = { "f" } } }
  return peri.ManagedCollisionEmbeddingBagCollection {
    embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables, seed = 4,
      fused_params = { optimizer = "sgd" } },
    managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
      managed_collision_modules = { t = module } } }
end

local function step(mc, first)
  local ids = {}
  for i = 1, 40 do ids[i] = (first + i) * 7919 end
  peri.scope(function()
    mc(peri.KeyedJaggedTensor { keys = { "f" }, values = peri.tensor(ids, "i64"),
      lengths = { #ids } }):values():sum():backward()
  end)
end

local function trained(kind)
  local mc = model(kind)
  for i = 0, 4 do step(mc, 10 * i) end
  return mc
end

--- Everything that a model's maps say, as one text.
local function text_of(mc)
  local list = {}
  for name, t in peri.util.ordered(mc:state_dict()) do
    list[#list + 1] = name .. " " .. table.concat(peri.util.map((Tensor.is(t) and t or t:gather()):to_list(), tostring),
      ",")
  end
  return table.concat(list, "\n")
end

--- What a checkpoint of `mc` has, changed by `change` (of numbers by name of state), saved again as `path`.
local function changed(mc, path, change)
  peri.checkpoint.save(path .. "-sound", { mc = mc })
  local c = peri.checkpoint.open(path .. "-sound")
  local dict, memory = {}, {}
  for _, name in ipairs(c:names()) do
    local t = c:read(name)
    if name:find "^mc/" then dict[name:sub(4)] = t end
    local out = ffi.new "void *[1]"
    peri.ffi.check(peri.ffi.C.peri_tensor_data(Tensor.ptr(t), out))
    memory[name:match "([^.]*)$"] = ffi.cast(t:dtype() == "i32" and "int32_t *" or "int64_t *", out[0])
  end
  c:close()
  change(memory)
  peri.checkpoint.save(path, { mc = { state_dict = function() return dict end, load_state_dict = function() end } })
end

--- Load the maps and weights of such a checkpoint.
local function load(path, mc) peri.checkpoint.load(path, { mc = mc }, { only = { "mc" } }) end

local function first_id(ids, free, from)
  for k = from or 0, ROWS - 1 do
    if ids[k] ~= free then return k end
  end
end

local FREE = { mch = 9223372036854775807LL, hash = -1LL }
local cases = {
  { "mch", "it belongs to another bucket", function(m)
    local a, b = first_id(m._mch_sorted_raw_ids, FREE.mch), first_id(m._mch_sorted_raw_ids, FREE.mch, ROWS / 2)
    m._mch_sorted_raw_ids[a] = m._mch_sorted_raw_ids[b]
  end },
  { "mch", "_mch_counts is %-1, allowed: 0 to", function(m) m._mch_counts[3] = -1 end },
  { "mch", "_mch_last_access_iter is 6, allowed: 0 to 5", function(m) m._mch_last_access_iter[3] = 6 end },
  { "mch", "the bucket's last row is nobody's", function(m)
    m._mch_sorted_raw_ids[ROWS - 1] = m._mch_sorted_raw_ids[first_id(m._mch_sorted_raw_ids, FREE.mch, ROWS / 2)]
  end },
  { "hash", "_hash_zch_metadata is %-2, allowed: %-1 to", function(m) m._hash_zch_metadata[5] = -2 end },
  { "hash", "the row is further from the id's home than max_probe", function(m)
    local ids = m._hash_zch_identities -- from anywhere else it is too far for some row of the bucket
    for k = 0, ROWS / 2 - 1 do
      ids[k], m._hash_zch_metadata[k] = k == 0 and ids[first_id(ids, FREE.hash, 16)] or -1, -1
    end
  end },
}

it("what no map can have is named, and changes nothing", function()
  for i, case in ipairs(cases) do
    local kind, message, change = case[1], case[2], case[3]
    changed(trained(kind), folder .. "/bad" .. i, change)
    local target = model(kind)
    step(target, 500)
    local before = text_of(target)
    local ok, err = pcall(load, folder .. "/bad" .. i, target)
    assert.is_false(ok, message)
    assert.matches(message, tostring(err))
    assert.equal(before, text_of(target))
  end
end)

it("what is stored is checked once in a load, though two ask; what is stored elsewhere is checked anew", function()
  local StoredTensor = require "perilune.tensor.stored"
  for _, kind in ipairs { "hash", "mch" } do
    local source, target, reads = trained(kind), model(kind), 0
    local function dict()
      local map = {}
      for name, t in peri.util.ordered(source:state_dict()) do
        if Tensor.is(t) then map[name] = t
        else
          local shard = t:local_shards()[1]
          local function stored(read, by_row)
            return StoredTensor { size = t:size(), dtype = t:dtype(), by_row = by_row, read = function(region, x)
              if name:find "_identities" or name:find "_raw_ids" then reads = reads + region.size[1] end
              read(region.offset[1], x)
            end }
          end
          map[name] = stored(shard.read, shard.by_row and stored(shard.by_row))
        end
      end
      return map
    end
    local map = dict()
    assert.is_nil(target:check_state_dict(map))
    target:load_state_dict(map)
    assert.equal(2 * ROWS, reads, kind) -- checked, and put into the map
    assert.equal(text_of(source), text_of(target))
    reads = 0
    target:load_state_dict(map)
    assert.equal(2 * ROWS, reads, kind)
    reads = 0
    assert.is_nil(target:check_state_dict(dict()))
    target:load_state_dict(map)
    assert.equal(3 * ROWS, reads, kind)
  end
end)

it("an id with two rows is found; the map knows nothing then, and takes a sound state", function()
  for _, kind in ipairs { "mch", "hash" } do
    local source, path = trained(kind), folder .. "/twice-" .. kind
    local free = FREE[kind]
    changed(source, path, function(m)
      local ids = m._mch_sorted_raw_ids or m._hash_zch_identities
      for k = 0, ROWS / 2 - 3 do -- a neighbour is within reach of the same home, but for the ends of buckets
        if ids[k] ~= free and ids[k + 1] ~= free then
          ids[k + 1] = ids[k]
          return
        end
      end
    end)
    local target = model(kind)
    step(target, 500)
    local ok, err = pcall(load, path, target)
    assert.is_false(ok)
    assert.matches("the id has two rows", tostring(err))
    assert.matches("load a good checkpoint before going on", tostring(err))
    assert.equal(0, target:managed_collision_collection():managed_collision_modules().t:statistics().occupied)
    peri.checkpoint.load(path .. "-sound", { mc = target })
    assert.equal(text_of(source), text_of(target))
    step(source, 30)
    step(target, 30)
    assert.equal(text_of(source), text_of(target))
  end
end)

it("a free row between an id and its home stops no look", function()
  local source, path = trained "hash", folder .. "/hole"
  local probes
  changed(source, path, function(m)
    local ids = m._hash_zch_identities
    probes = {}
    for k = 0, ROWS - 1 do -- every other id is forgotten
      if ids[k] ~= FREE.hash and k % 2 == 0 then ids[k], m._hash_zch_metadata[k] = -1, -1
      elseif ids[k] ~= FREE.hash then probes[#probes + 1] = { ids[k], k } end
    end
  end)
  local target = model "hash"
  load(path, target)
  local map = target:managed_collision_collection():managed_collision_modules().t
  map:eval()
  for _, probe in ipairs(probes) do
    peri.scope(function()
      local ids = peri.JaggedTensor { values = peri.tensor({ probe[1] }, "i64"), lengths = { 1 } }
      assert.equal(probe[2], tonumber(map { f = ids }.f:values():to_list()[1]))
    end)
  end
end)

it("states in the order of ids load as well, a window of rows at a time; a row that is not there is named", function()
  local Gather = require "perilune.checkpoint.gather"
  local source, usual, dict = trained "mch", Gather.ROWS, {}
  finally(function() Gather.ROWS = usual end)
  for name, t in peri.util.ordered(source:state_dict()) do dict[name] = Tensor.is(t) and t or t:gather() end
  local part = { state_dict = function() return dict end, load_state_dict = function() end }
  peri.checkpoint.save(folder .. "/sorted", { mc = part })
  for _, rows in ipairs { usual, 1, 10, ROWS / 2 } do
    Gather.ROWS = rows
    local target = model "mch"
    step(target, 500)
    load(folder .. "/sorted", target)
    assert.equal(text_of(source), text_of(target))
  end
  local mapping = dict["_managed_collision_collection._managed_collision_modules.t._mch_remapped_ids_mapping"]
  mapping:slice(1, 7, 8):copy(mapping:slice(1, 8, 9))
  peri.checkpoint.save(folder .. "/no-row", { mc = part })
  local target = model "mch"
  step(target, 500)
  local before = text_of(target)
  local ok, err = pcall(load, folder .. "/no-row", target)
  assert.is_false(ok)
  assert.matches("_mch_remapped_ids_mapping' has no id for row %d+, wanted each of 64 rows once", tostring(err))
  assert.equal(before, text_of(target))
end)

-- Some states of a map: a row keeps the numbers that are not loaded, unless it has another id now.
describe("some states of a map", function()
  local PATH = "mc/_managed_collision_collection._managed_collision_modules.t."
  local of_kind = { mch = { ids = "_mch_sorted_raw_ids", rows = "_mch_remapped_ids_mapping",
    numbers = { _mch_counts = 0, _mch_last_access_iter = 0 } },
    hash = { ids = "_hash_zch_identities", numbers = { _hash_zch_metadata = -1 } } }

  --- By row of the table: the number that a model has in each state.
  local function by_row(mc, kind)
    local module = mc:managed_collision_collection():managed_collision_modules().t
    local names, all = of_kind[kind], {}
    local rows = names.rows and module:state_dict()[names.rows]:gather():to_list()
    for _, name in ipairs(peri.util.keys(names.numbers)) do all[name] = {} end
    all[names.ids] = {}
    for name, list in peri.util.ordered(all) do
      for k, x in ipairs(module:state_dict()[name]:gather():reshape(-1):to_list()) do
        list[rows and tonumber(rows[k]) + 1 or k] = tostring(x)
      end
    end
    return all
  end

  for kind, names in peri.util.ordered(of_kind) do
    it("of kind " .. kind .. " are of the rows that they had", function()
      local source, path = trained(kind), folder .. "/some-" .. kind
      peri.checkpoint.save(path, { mc = source })
      local states = peri.util.keys(names.numbers)
      table.insert(states, names.ids)
      for set = 1, 2 ^ #states - 1 do -- every choice of states
        local only, loaded = { "mc/_embedding_module." }, {}
        for i, name in ipairs(states) do
          loaded[name] = math.floor(set / 2 ^ (i - 1)) % 2 == 1
          if loaded[name] then only[#only + 1] = PATH .. name end
        end
        local target = model(kind)
        for i = 0, 2 do step(target, 10 * i) end -- some ids and their rows are the source's
        step(target, 500)
        step(target, 500)
        local before, want, from = by_row(target, kind), {}, by_row(source, kind)
        for name, initial in peri.util.ordered(names.numbers) do
          want[name] = {}
          for row = 1, ROWS do
            local same = not loaded[names.ids] or from[names.ids][row] == before[names.ids][row]
            want[name][row] = loaded[name] and from[name][row] or same and before[name][row]
              or tostring(initial)
          end
        end
        want[names.ids] = (loaded[names.ids] and from or before)[names.ids]
        peri.checkpoint.load(path, { mc = target }, { only = only })
        local got = by_row(target, kind)
        for name, list in peri.util.ordered(want) do
          assert.equal(table.concat(list, " "), table.concat(got[name], " "), name .. " of " .. table.concat(only, " "))
        end
      end
    end)
  end
end)
