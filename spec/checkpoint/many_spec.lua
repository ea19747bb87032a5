-- A model of many tables: what saving it, loading it and putting it under another plan allocates grows as their number
-- does, and its state_dict holds little of each. (Allocations are counted, since they are the same in every run.)
local peri = require "perilune"
local shell = require "spec.support.shell"
collectgarbage("setpause", 200) -- as in programs (tests/harness/busted_main.lua): memory is measured here

local folder, clean = shell.temporary()
teardown(function() clean() end)

local function model_of(n)
  local tables, plans = {}, { {}, {} }
  for i = 1, n do
    local name = "t" .. i
    tables[i] = peri.EmbeddingBagConfig { name = name, num_embeddings = 4, embedding_dim = 8,
      feature_names = { "f" .. i } }
    plans[1][name] = peri.plan.table_wise(0)
    plans[2][name] = i % 2 == 0 and peri.plan.row_wise() or peri.plan.column_wise { ranks = { 0, 0 } }
  end
  local ebc = peri.EmbeddingBagCollection { fused_params = { optimizer = "rowwise_adagrad" }, tables = tables }
  return peri.DistributedModelParallel { module = ebc, plan = { [""] = plans[1] } }, { [""] = plans[2] }
end

local collect = collectgarbage

--- KiB that f() allocates in Lua: nothing is collected meanwhile.
local function allocated(f)
  collect()
  collect()
  collect "stop"
  rawset(_G, "collectgarbage", function() return collect "count" end)
  local before = collect "count"
  local ok, err = pcall(f)
  local n = collect "count" - before
  rawset(_G, "collectgarbage", collect)
  collect "restart"
  assert.is_true(ok, err)
  return n
end

--- KiB that what f() returns holds.
local function held(f)
  collect()
  collect()
  local before, result = collect "count", f()
  collect()
  collect()
  return collect "count" - before, result
end

it("takes as much of everything for a table as a small one", function()
  local function of(n)
    local model, other = model_of(n)
    local path, kib = ("%s/%d"):format(folder, n), {}
    local function all() return { model:state_dict(), model:fused_optimizer():state_dict() } end
    all() -- what is listed once
    kib.state_dict = held(all)
    kib.save = allocated(function() model:save(path, { increments = true }) end)
    kib.increment = allocated(function() model:save(path .. "-1", { increment_of = path }) end)
    kib.async = allocated(function() model:save(path .. "-2", { async = true }):wait() end)
    kib["async, when it has ended"] = held(function()
      local save = model:save(path .. "-3", { async = true })
      save:wait()
      return save
    end)
    kib.load = allocated(function() model:load(path) end)
    kib.reshard = allocated(function() model:reshard(other, { folder = folder }) end)
    kib["load under another plan"] = allocated(function() model:load(path) end)
    return kib
  end
  of(10) -- what is made once, for all models
  local few, many = of(100), of(400)
  for case, kib in peri.util.ordered(many) do
    if os.getenv "PERI_SHOW" then print(case, few[case] / 100, kib / 400) end
    local rest = case:find "ended" and 36 or 0 -- what is not of tables
    assert.is_true(kib < 4.1 * few[case] + rest, ("%s: %d KiB for 400 tables, %d for 100"):format(case, kib,
      few[case]))
  end
  assert.is_true(many.state_dict / 400 < 1, ("%g KiB a table"):format(many.state_dict / 400))
  local ended = many["async, when it has ended"]
  -- Code that was compiled meanwhile counts, too; what it had of 400 tables would be hundreds.
  assert.is_true(ended < 40, ("an asynchronous save that has ended holds %g KiB"):format(ended))
end)

it("takes as much of everything for a piece of a table in many pieces as in few", function()
  local function of(n)
    local ranks = {}
    for i = 1, n do ranks[i] = 0 end
    local ebc = peri.EmbeddingBagCollection { fused_params = { optimizer = "rowwise_adagrad" }, tables = {
      peri.EmbeddingBagConfig { name = "t", num_embeddings = 4, embedding_dim = 4 * n, feature_names = { "f" } } } }
    local plan = { [""] = { t = peri.plan.column_wise { ranks = ranks } } }
    local model = peri.DistributedModelParallel { module = ebc, plan = plan }
    local path, kib = ("%s/columns-%d"):format(folder, n), {}
    kib.save = allocated(function() model:save(path) end)
    kib.load = allocated(function() model:load(path) end)
    kib.reshard = allocated(function() model:reshard({ [""] = { t = peri.plan.row_wise() } }, { folder = folder }) end)
    return kib
  end
  of(4)
  local few, many = of(40), of(160)
  for case, kib in peri.util.ordered(many) do
    if os.getenv "PERI_SHOW" then print(case, few[case] / 40, kib / 160) end
    assert.is_true(kib < 4.4 * few[case], ("%s: %d KiB for 160 pieces, %d for 40"):format(case, kib, few[case]))
  end
end)

it("keeps little of each table while an increment of it is saved behind the training", function()
  local model, n = model_of(200), 200
  local path = folder .. "/behind"
  model:save(path, { increments = true })
  model:save(path .. "-1", { increment_of = path })
  collect() -- garbage that went while the increment is saved would hide as much of what that keeps
  collect()
  local before, kib = tonumber(peri.ffi.C.peri_mem_live()), nil
  local lua, save = held(function()
    local save = model:save(path .. "-2", { increment_of = path .. "-1", async = true })
    kib = (tonumber(peri.ffi.C.peri_mem_live()) - before) / 1024
    return save
  end)
  save:wait()
  -- The names of a table's three tensors and their pieces in the parent's manifest and in the writer's, twice as much
  -- where arrays grow; no piece, row or list is kept beside them.
  assert.is_true(kib < 5.6 * n, ("%g KiB for %d tables"):format(kib, n))
  assert.is_true(lua < 0.5 * n, ("%g KiB of Lua for %d tables"):format(lua, n))
end)

it("has of the increments below an open one little in memory, read or not", function()
  local model, n = model_of(50), 3
  local function save(i)
    model:save(("%s/chain-%d"):format(folder, i), { increments = i == 0, values = { ("x"):rep(2 ^ 20) },
      increment_of = i > 0 and ("%s/chain-%d"):format(folder, i - 1) or nil })
  end
  for i = 0, 4 * n do save(i) end
  local function live(levels)
    local before, tensors = tonumber(peri.ffi.C.peri_mem_live()), 0
    local c = peri.checkpoint.open(("%s/chain-%d"):format(folder, levels))
    local opened = tonumber(peri.ffi.C.peri_mem_live()) - before
    for _, name in ipairs(c:names()) do
      tensors = tensors + 1
      c:read(name)
    end
    collect()
    collect()
    local read = tonumber(peri.ffi.C.peri_mem_live()) - before
    c:close()
    return opened, read, tensors
  end
  live(n)
  local opened, read, tensors = live(n)
  local opened_4, read_4 = live(4 * n)
  -- Where the manifest has a tensor takes 12 bytes; a level by itself, and the tensor that was read last, a few KiB.
  assert.is_true(opened_4 - opened < 3 * n * (12 * tensors + 2 ^ 12),
    ("%d bytes for %d levels of %d tensors"):format(opened_4 - opened, 3 * n, tensors))
  assert.is_true(read_4 - read < 3 * n * (12 * tensors + 2 ^ 13),
    ("%d bytes for %d levels of %d tensors, after reading"):format(read_4 - read, 3 * n, tensors))
end)

it("has little of each tensor in memory that is about to be loaded", function()
  local model = model_of(200)
  model:save(folder .. "/stored")
  local c = peri.checkpoint.open(folder .. "/stored")
  local names, list = c:names(), {}
  for i = 1, #names do list[i] = false end
  local kib = held(function()
    for i, name in ipairs(names) do list[i] = c:stored(name) end
  end)
  assert.is_true(kib < #names / 8, ("%d bytes for a tensor"):format(kib * 1024 / #names))
  for i, name in ipairs(names) do
    assert.same({ c:tensor(name).shape, c:tensor(name).dtype }, { list[i]:size(), list[i]:dtype() }, name)
  end
  c:close()
  assert.error_matches(function() list[1]:tensor "cpu" end, "was closed")
end)

it("collects as little in a large program as in a small one, for each byte of garbage", function()
  local program, cycles, seen = { ("x"):rep(160 * 2 ^ 20) }, 0, setmetatable({}, { __mode = "v" })
  collect()
  collect()
  peri.ffi.sparing(function()
    for i = 100001, 140000 do
      program[2] = tostring(i):rep(2 ^ 11) -- 12 KiB
      if not seen[1] then cycles, seen[1] = cycles + 1, {} end
    end
  end)
  assert.equal(2, #program)
  assert.is_true(cycles <= 16, ("%d collections for 469 MiB"):format(cycles)) -- a quarter of 160 MiB is 40
end)
