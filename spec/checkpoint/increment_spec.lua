-- Increments of checkpoints: a chain replays to the bits of the model, under any plan and number of ranks; what is
-- missing, there twice, out of order or damaged is named; nothing mixes two futures, and nobody loses what an increment
-- stands on.
local ffi = require "ffi"
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local text = require "spec.support.facts"
local shell = require "spec.support.shell"
local small = require "spec.support.small_net"
local nn = peri.nn
local C, check = peri.ffi.C, peri.ffi.check

local folder, clean = shell.temporary()
teardown(clean)

local batch, entries = small.batch, peri.util.copy(small.entries)
entries.column_wise = nil -- a block of columns has row-wise states of its own, which other ways have not

local function build(world, entry, options)
  local model = small.build(world, entry, options)
  local optimizer = world and nn.optim.Adam { params = model:named_parameters(), lr = 0.05 }
    or nn.optim.Adam { params = { model.over.weight, model.over.bias }, lr = 0.05 }
  return { model = model, optimizer = optimizer, schedule = nn.optim.StepLR { optimizer = optimizer, step_size = 2,
    gamma = 0.5 } }
end

local function train(p, from, last)
  for i = from, last do
    peri.scope(function()
      p.optimizer:zero_grad()
      p.model(batch(i)):backward()
      p.optimizer:step()
      p.schedule:step()
    end)
  end
end

local function state(p)
  local tables = p.model.fused_optimizer and p.model:fused_optimizer() or p.model.ebc:fused_optimizer()
  return text(peri.shard.gather_state_dict { model = p.model:state_dict(), tables = tables:state_dict(),
    optimizer = p.optimizer:state_dict(), schedule = p.schedule:state_dict() })
end

local function same(want, got, what) assert.is_true(want == got, what or "the states differ") end

local function save(path, p, options) return peri.checkpoint.save(folder .. "/" .. path, p, options) end
local function load(path, p, options) return peri.checkpoint.load(folder .. "/" .. path, p, options) end

--- What keeps it from being opened, in words.
local function refusal(path)
  local ok, err = pcall(peri.checkpoint.open, path)
  return not ok and tostring(err) or "it opened"
end

--- A full checkpoint `name`, and two increments of it; rows of the last one.
local function chain(name, p, group)
  train(p, 1, 3)
  save(name .. "-0", p, { group = group, increments = true })
  train(p, 4, 4)
  save(name .. "-1", p, { group = group, increment_of = folder .. "/" .. name .. "-0" })
  train(p, 5, 6)
  save(name .. "-2", p, { group = group, increment_of = folder .. "/" .. name .. "-1" })
end

describe("a chain of increments", function()
  for from, make in peri.util.ordered(entries) do
    it(("of tables %s replays to the bits of the model, under other plans and on 1 to 3 ranks"):format(from), function()
      local want, later
      sim.run(2, function(rank, world)
        local p = build(world, make())
        chain(from, p, world)
        local now = state(p)
        train(p, 7, 8)
        local after = state(p)
        if rank == 0 then want, later = now, after end
      end)
      local rows = 0
      local c = peri.checkpoint.open(folder .. "/" .. from .. "-2")
      for _, piece in ipairs(c:tensor("model/ebc.embedding_bags.a.weight").pieces) do rows = rows + piece.listed end
      c:close()
      assert.is_true(rows > 0 and rows <= 4, "it has the rows that two steps change")
      for to, other in peri.util.ordered(entries) do
        for _, ranks in ipairs(to == from and { 1, 2, 3 } or { 2 }) do
          sim.run(ranks, function(_, world)
            local p = build(world, other())
            load(from .. "-2", p, { group = world })
            same(want, state(p), from .. " as " .. to)
            train(p, 7, 8)
            if ranks < 3 then same(later, state(p), from .. " as " .. to) end -- the mean of three gradients is rounded
          end)
        end
      end
    end)
  end

  for _, optimizer in ipairs { "adam", "sgd", "shampoo", "emainplace_rowwise_adagrad" } do
    it(("trained by %s, without ranks, goes on as if it had never stopped"):format(optimizer), function()
      local params = { optimizer = optimizer, learning_rate = 0.1 }
      if optimizer:find "ema" then params.emainplace_mode = { step_ema = 3, step_ema_coef = 0.5 } end
      local p, q = build(nil, nil, { params = params }), build(nil, nil, { params = params })
      chain(optimizer, p)
      load(optimizer .. "-2", q, { increments = true })
      same(state(p), state(q))
      for _, x in ipairs { p, q } do train(x, 7, 8) end
      same(state(p), state(q))
      save(optimizer .. "-3", q, { increment_of = folder .. "/" .. optimizer .. "-2" })
      local r = build(nil, nil, { params = params })
      load(optimizer .. "-3", r)
      same(state(p), state(r))
    end)
  end

  it("has what was written by hand, and what a load of a part wrote", function()
    local p, other = build(), build()
    train(other, 1, 5)
    save("other", other)
    chain("hand", p)
    p.model.ebc:weight("b"):slice(1, 30, 32):fill(0.25)
    load("other", { model = p.model }, { only = { "model/ebc.embedding_bags.a" } })
    save("hand-3", p, { increment_of = folder .. "/hand-2" })
    local q = build()
    load("hand-3", q)
    same(state(p), state(q))
    assert.equal(0.25, q.model.ebc:weight("b"):slice(1, 31, 32):to_list()[16])
  end)

  it("is saved behind the training, each the state of its moment", function()
    local p, q, want = build(), build(), nil
    chain("behind", p)
    for i = 3, 5 do
      train(p, 2 * i + 1, 2 * i + 1)
      want = state(p)
      local handle = save(("behind-%d"):format(i), p, { increment_of = ("%s/behind-%d"):format(folder, i - 1),
        async = true })
      train(p, 2 * i + 2, 2 * i + 2)
      handle:wait()
    end
    load("behind-5", q)
    same(want, state(q))
  end)

  it("after a save that failed has the rows of that one too", function()
    local p, q = build(), build()
    chain("failed", p)
    train(p, 7, 7)
    check(C.peri_fault_arm("checkpoint_write", 1))
    local ok = pcall(save, "failed-3", p, { increment_of = folder .. "/failed-2" })
    check(C.peri_fault_arm("checkpoint_write", 0))
    assert.is_false(ok)
    train(p, 8, 8)
    save("failed-4", p, { increment_of = folder .. "/failed-2" })
    load("failed-4", q)
    same(state(p), state(q))
  end)
end)

describe("a map of raw ids", function()
  it("that learns and evicts, and its rows that start again, replay", function()
    local function made()
      nn.manual_seed(3)
      local tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 64, embedding_dim = 4,
        feature_names = { "f" } } }
      return peri.ManagedCollisionEmbeddingBagCollection {
        embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables, seed = 4,
          fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 } },
        managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = tables,
          managed_collision_modules = {
          t = peri.HashZchManagedCollisionModule { zch_size = 64, total_num_buckets = 2, max_probe = 8,
            eviction_policy_name = "SINGLE_TTL_EVICTION",
            eviction_config = { features = { "f" }, single_ttl = 3 } } } } }
    end
    local function steps(m, from, last)
      for i = from, last do
        local ids = {}
        for k = 1, 12 do ids[k] = (i * 1000 + k * 7) % 1237 end
        local pooled = m(peri.KeyedJaggedTensor { keys = { "f" }, lengths = { 6, 6 },
          values = peri.tensor(ids, "i64") })
        pooled:values():sum():backward()
      end
    end
    local function all(m) return text(peri.shard.gather_state_dict (m:state_dict())) end
    local m = made()
    steps(m, 1, 4)
    save("map-0", { model = m }, { increments = true })
    steps(m, 5, 6)
    save("map-1", { model = m }, { increment_of = folder .. "/map-0" })
    steps(m, 7, 12)
    save("map-2", { model = m }, { increment_of = folder .. "/map-1" })
    assert.is_true(m:statistics().t.evicted > 0)
    local q = made()
    load("map-2", { model = q })
    same(all(m), all(q))
    for _, x in ipairs { m, q } do steps(x, 13, 15) end
    same(all(m), all(q))
  end)
end)

describe("an increment of what was loaded", function()
  it("under other names has all rows of the tables that change places", function()
    local function made()
      local function config(name)
        return peri.EmbeddingBagConfig { name = name, num_embeddings = 20, embedding_dim = 4, feature_names = { name } }
      end
      local m = nn.Module:extend "Two"()
      m.x = peri.EmbeddingBagCollection { seed = 1, tables = { config "t" } }
      m.y = peri.EmbeddingBagCollection { seed = 2, tables = { config "t" } }
      return m
    end
    local function all(m) return text(peri.shard.gather_state_dict(m:state_dict())) end
    local m, q, r = made(), made(), made()
    save("swapped-0", { model = m })
    load("swapped-0", { model = q },
      { increments = true, rename = { ["model/x."] = "model/y.", ["model/y."] = "model/x." } })
    assert.is_false(all(m) == all(q))
    save("swapped-1", { model = q }, { increment_of = folder .. "/swapped-0" })
    load("swapped-1", { model = r })
    same(all(q), all(r))
  end)
end)

describe("an increment", function()
  local p
  setup(function()
    p = build()
    chain("own", p)
  end)
  local function copy(to, ...)
    shell.run(("mkdir -p %s/%s"):format(folder, to))
    for _, name in ipairs { ... } do shell.run(("cp -r %s/%s %s/%s/"):format(folder, name, folder, to)) end
    return folder .. "/" .. to
  end

  it("without its parents says which is missing", function()
    local digest = peri.checkpoint.open(folder .. "/own-1"):digest()
    local got = refusal(copy("lost", "own-0", "own-2") .. "/own-2")
    local says = "own-2' is increment 2 of a chain, and what it is an increment of is missing: checkpoint " .. digest
    assert.truthy(got:find(says, 1, true), got)
    assert.truthy(refusal(copy("base", "own-1", "own-2") .. "/own-2"):find("(the full one) is not in folder", 1, true))
  end)

  it("whose parent is incomplete or damaged says so", function()
    local at = copy("short", "own-0", "own-1", "own-2")
    shell.run(("truncate -s -1 %s/own-1/rank-0.safetensors"):format(at))
    local got = refusal(at .. "/own-2")
    assert.truthy(got:find("what it is an increment of, '" .. at .. "/own-1': file 'rank-0.safetensors' has", 1, true),
      got)
  end)

  it("is found under any name, and may be given as a list from anywhere", function()
    local at, there = copy("named", "own-1"), copy("there", "own-2")
    shell.run(("cp -r %s/own-0 %s/zz; mv %s/own-1 %s/aa"):format(folder, at, at, at))
    local c = peri.checkpoint.open(at .. "/aa")
    assert.same({ at .. "/aa", at .. "/zz" }, c:levels())
    c:close()
    c = peri.checkpoint.open { at .. "/zz", at .. "/aa", there .. "/own-2" }
    assert.equal(2, c:increment())
    c:close()
    for words, list in pairs { ["which is an increment of checkpoint %x+; that one is missing in front of it"] = { at
      .. "/aa" }, ["is there twice: checkpoint 2 of the list"] = { at .. "/zz", at .. "/aa", at .. "/aa" },
      ["missing, out of order, or of another run"] = { at .. "/zz", there .. "/own-2" },
      ["is a full checkpoint: only the first of a list is"] = { at .. "/zz", at .. "/zz" } } do
      local ok, err = pcall(peri.checkpoint.open, list)
      assert.is_false(ok)
      assert.truthy(tostring(err):find(words) or tostring(err):find "is there twice", tostring(err))
    end
  end)

  it("is neither parentless nor removed nor replaced while there are increments of it", function()
    local at = copy("kept", "own-0", "own-1")
    os.execute(("ln -s own-0 %s/first"):format(at)) -- the same one, no other that would do
    assert.error_matches(function() peri.checkpoint.save(at .. "/first", p, { replace = true }) end,
      "first' is a link, which is not replaced")
    assert.error_matches(function() peri.checkpoint.remove(at .. "/own-0") end,
      "own%-0' is not removed: '.*own%-1' is an increment of it")
    assert.error_matches(function() peri.checkpoint.save(at .. "/own-0", p, { replace = true }) end,
      "own%-0' is not replaced: '.*own%-1' is an increment of it")
    peri.checkpoint.remove(at .. "/own-1")
    peri.checkpoint.remove(at .. "/own-0")
  end)

  it("does not take the place of what it is an increment of", function()
    local q, at = build(), folder .. "/place"
    train(q, 1, 2)
    local want = state(q)
    save("place", q, { increments = true })
    train(q, 3, 3)
    for _, as in ipairs { false, true } do
      -- An error of the call, before anything is written.
      local function try() save("place", q, { replace = true, increment_of = at, async = as }) end
      assert.error_matches(try,
        "place' is not replaced: what is saved is an increment of it; take another name.*compact.*or save a full")
      assert.error_matches(function() save("place", q, { async = as }) end, "place' is there already")
    end
    load("place", q)
    same(want, state(q))
  end)

  it("finds its parents under every name that a checkpoint may have", function()
    for i, name in ipairs { "a b", "q'\"q", "-d", "ta\tb", "\255\254", "%s" } do
      save(name, p, { increments = true, values = i }) -- each another one
      save(name .. "+", p, { increment_of = folder .. "/" .. name })
      load(name .. "+", p)
      assert.error(function() peri.checkpoint.remove(folder .. "/" .. name) end)
    end
    for _, name in ipairs { ".hidden", "line\nfeed", "..", ("x"):rep(201) } do
      for _, async in ipairs { false, true } do
        assert.error_matches(function() save(name, p, { async = async }) end,
          "is no name for a checkpoint.*no line feed")
      end
    end
  end)

  it("of what is not marked is refused with what to do", function()
    save("plain", build())
    assert.error_matches(function() save("more", p, { increment_of = folder .. "/plain" }) end,
      "which rows changed since '.*plain' is not known; save or load a checkpoint with increments = true")
  end)

  it("and those before become one full checkpoint, which stands for it, and mixes no two futures", function()
    local q, r = build(), build()
    chain("fork", q)
    load("fork-1", r, { increments = true }) -- go back, and on another way
    train(r, 20, 21)
    save("fork-other", r, { increment_of = folder .. "/fork-1" })
    local c = peri.checkpoint.open(folder .. "/fork-other")
    c:compact(folder .. "/fork-full")
    c:close()
    local s = build()
    load("fork-full", s)
    same(state(r), state(s))
    c = peri.checkpoint.open(folder .. "/fork-1")
    c:compact(folder .. "/fork-1", true) -- in its place: its increments go on
    c:close()
    assert.equal("", (shell.run(("ls -A %s | grep saving"):format(folder)))) -- the old one is gone
    local alone = folder .. "/alone"
    peri.checkpoint.save(alone .. "/one", r, { values = { step = 1000 } })
    shell.run(("cp -r %s/fork-1 %s/fork-2 %s"):format(folder, folder, alone))
    local listed = shell.run(("%s checkpoint ls %s"):format(shell.perilune, alone))
    assert.matches("\nfork%-2 [^\n]* fork%-1  ", listed) -- by its name, as it stands for the parent
    assert.matches("\none +1000 ", listed)
    local elsewhere = ("%s checkpoint compact %s/fork-2 -o %s/one"):format(shell.perilune, alone, alone)
    assert.matches("one' is there already; .* compact: %-%-replace", (shell.run(elsewhere)))
    assert.equal(0, select(2, shell.run(elsewhere .. " --replace")))
    local replaced = build()
    load("alone/one", replaced)
    same(state(q), state(replaced))
    peri.checkpoint.remove(folder .. "/fork-0")
    for name, of in pairs { ["fork-2"] = q, ["fork-other"] = r } do
      local again = build()
      load(name, again)
      same(state(of), state(again))
    end
    -- Who saves on goes on, too, on top of what stands for its last increment.
    c = peri.checkpoint.open(folder .. "/fork-2")
    c:compact(folder .. "/fork-2", true)
    c:close()
    train(q, 9, 9)
    save("fork-3", q, { increment_of = folder .. "/fork-2" })
    local on = build()
    load("fork-3", on)
    same(state(q), state(on))
    assert.error_matches(function() peri.checkpoint.open(folder .. "/fork-1"):compact(folder .. "/x") end,
      "is no increment")
  end)

  it("with hostile lists of rows is refused", function()
    local digest = peri.checkpoint.open(folder .. "/own-0"):digest()
    local function forged(name, list, listed)
      local handle, out = ffi.new "peri_checkpoint_folder *[1]", ffi.new "peri_checkpoint_writer *[1]"
      check(C.peri_checkpoint_folder_new(folder .. "/" .. name, handle))
      local path = ffi.string(C.peri_checkpoint_folder_path(handle[0]))
      check(C.peri_checkpoint_writer_new(path, "rank-0", 0, out))
      local t, r = peri.ffi.struct "peri_checkpoint_tensor", peri.ffi.struct "peri_checkpoint_region"
      t.name, t.dtype, t.ndim, t.shape[0], r.extent[0] = "%rows/0/0", C.PERI_I64, 1, #list, #list
      check(C.peri_checkpoint_writer_add(out[0], t, r))
      t, r = peri.ffi.struct "peri_checkpoint_tensor", peri.ffi.struct "peri_checkpoint_region"
      t.name, t.dtype, t.ndim, t.shape[0], t.shape[1] = "model/ebc.embedding_bags.a.weight", C.PERI_F32, 2, 50, 8
      r.extent[0], r.extent[1] = 50, 8
      r.rows, r.listed = "%rows/0/0", listed or #list
      check(C.peri_checkpoint_writer_add(out[0], t, r))
      check(C.peri_checkpoint_writer_put(out[0], peri.Tensor.ptr(peri.tensor(list, "i64"))))
      check(C.peri_checkpoint_writer_put(out[0], peri.Tensor.ptr(peri.zeros { listed or #list, 8 })))
      check(C.peri_checkpoint_writer_finish(out[0]))
      local part, facts, sum = ffi.new "const char *[1]", peri.ffi.struct "peri_checkpoint_config", ffi.new "char[33]"
      check(C.peri_checkpoint_writer_part(out[0], part))
      facts.parent, facts.increment = digest, 1
      local status = C.peri_checkpoint_publish(path, folder .. "/" .. name, part, 1, facts, false, sum)
      local message = ffi.string(C.peri_error_message())
      C.peri_checkpoint_writer_release(out[0])
      C.peri_checkpoint_folder_release(handle[0])
      return status < 0 and message or folder .. "/" .. name
    end
    local function reads(path) return peri.checkpoint.open(path):read("model/ebc.embedding_bags.a.weight") end
    assert.equal(0, reads(forged("fine", { 3, 7, 49 })):slice(1, 49, 50):to_list()[8])
    for name, list in pairs { unordered = { 7, 3 }, twice = { 3, 3 }, beyond = { 3, 50 }, below = { -1, 3 } } do
      local ok, err = pcall(reads, forged(name, list))
      assert.is_false(ok)
      assert.truthy(tostring(err):find("the rows that it has of tensor 'model/ebc.embedding_bags.a.weight' are", 1,
        true), tostring(err))
    end
    assert.truthy(forged("longer", { 1, 2, 3 }, 2):find "has another form than 2 numbers of I64")
  end)
end)

describe("a Saver", function()
  it("with full_every saves increments, keeps what they stand on, and goes on from the newest chain", function()
    local at = folder .. "/saver"
    local function run(steps, resume)
      local p = build()
      local saver = peri.checkpoint.Saver { folder = at, parts = p, every = 1, full_every = 4, keep = 2,
        resume = resume }
      local step = saver:resume() or 0
      for i = step + 1, step + steps do
        train(p, i, i)
        saver:step(i)
      end
      saver:close(step + steps)
      return p
    end
    local function names() return (shell.run(("ls %s"):format(at))):gsub("\n", " ") end
    run(7)
    assert.equal("save-000005-step-5 save-000006-step-6 save-000007-step-7 ", names())
    local p = build()
    train(p, 1, 10)
    same(state(p), state(run(3)))
    assert.truthy(names():find("save-000009-step-9 save-000010-step-10", 1, true), names())
    -- Back to 9, and on another way: the newest is what went on.
    run(1, at .. "/save-000009-step-9")
    assert.equal(1, peri.checkpoint.open(at .. "/save-000011-step-10"):increment())
    assert.truthy(names():find("save-000009-step-9", 1, true), names())
  end)
end)
