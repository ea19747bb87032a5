-- Sharded collections whose rows and gradients travel in fewer bits. Rows that a rank owns itself stay f32; what codecs
-- do to numbers is in spec/dist/codec_spec.lua; here is where they do it, and that nothing else changes.
-- mpirun: 3
-- machines: 2,2
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local sharded = require "spec.support.sharded"
local sim = require "perilune.dist.sim"
local codec = require "perilune.dist.codec"
local ops = require "perilune.dist.ops"
local BATCH, WIDTH = sharded.BATCH, sharded.WIDTH
local kinds = { "table_wise", "row_wise", "column_wise", "mixed", "within_nodes" }
local sizes = { sizes = { 1, 2, 3 }, local_size = 2 }

local function registry(args, comm_ops) return codec.get_qcomm_codecs_registry(args, comm_ops) end

local function make(kind, world, device, args)
  local a = { kind = kind, world = world, device = device, fused_params = { optimizer = "sgd", learning_rate = 0.5 },
    pooling = "SUM" }
  for name, value in peri.util.ordered(args or {}) do a[name] = value end
  return sharded.make(a)
end

--- Columns [first, last) of each table in the output, and their owners under table_wise.
local function column_table(n)
  local list, column = {}, 0
  for i, t in ipairs(sharded.configs) do
    list[t.name] = { first = column, last = column + t.cols * #t.features, owner = i % n }
    column = list[t.name].last
  end
  return list
end

--- A list [rows, WIDTH] whose columns of tables that `travels(table, place)` picks went through codec c.
local function through(c, list, n, travels)
  local result, coded = {}, c:decode(c:encode(peri.tensor(list, "f32", "cpu"))):to_list()
  for i, x in ipairs(list) do result[i] = x end
  for name, place in peri.util.ordered(column_table(n)) do
    for row = 0, #list / WIDTH - 1 do
      for k = row * WIDTH + place.first + 1, row * WIDTH + place.last do
        if travels(name, place) then result[k] = coded[k] end
      end
    end
  end
  return result
end

local function gradient(step, rank, device, quantum)
  local g = peri.Tensor.uniform({ BATCH, WIDTH }, -1, 1, step, rank, "f32", "cpu"):to_list()
  for i, x in ipairs(g) do g[i] = quantum and math.floor(x / quantum) * quantum or x end
  return peri.tensor(g, "f32", device, { BATCH, WIDTH }), g
end

local function largest_difference(a, b)
  local d = 0
  for i = 1, #a do d = math.max(d, math.abs(a[i] - b[i])) end
  return d
end

describe("quantised communication of a sharded collection:", function()
  for _, kind in ipairs(kinds) do
    for _, format in ipairs { "FP16", "BF16" } do
      worlds.each(("%s, %s: numbers that the format holds arrive as they are"):format(kind, format),
        function(world, device)
        local args = { init_fn = peri.embed.constant(0.25), gradient_division = false }
        local want = make(kind, world, device, args)
        args.qcomm_codecs_registry = registry { forward = format, backward = format, forward_loss_scale = 4,
          backward_loss_scale = 1024 }
        local got = make(kind, world, device, args)
        for step = 1, 2 do
          local x = want:forward(sharded.batch(step, world:rank(), device)):values()
          local y = got:forward(sharded.batch(step, world:rank(), device)):values()
          assert.same(x:to_list(), y:to_list())
          local g = gradient(step, world:rank(), device, 0.5)
          x:backward(g)
          y:backward(g)
        end
        sharded.assert_same(want, got, device)
      end, sizes)
    end

    -- Rows are below 3 / sqrt(170) < 0.24; the bounds are those of perilune/codec.h.
    for format, bound in peri.util.ordered { FP16 = 2e-4, BF16 = 1e-3, FP8 = 0.02, INT8 = 1e-3, MX4 = 0.07 } do
      worlds.each(("%s, %s: rows and gradients are as close as the format allows"):format(kind, format),
        function(world, device, n)
        local want = make(kind, world, device)
        local got = make(kind, world, device, { qcomm_codecs_registry = registry { forward = format, backward = format,
          fp8_quantize_dim = format == "FP8" and 16 or nil } })
        local input = sharded.batch(1, world:rank(), device)
        local x, y = want:forward(input):values(), got:forward(input):values()
        local d = largest_difference(x:to_list(), y:to_list())
        assert.is_true(d <= n * bound, tostring(d))
        assert.equal(n == 1, d == 0)
        local g = gradient(1, world:rank(), device)
        x:backward(g)
        y:backward(g)
        -- A row is in at most 3 bags of each of 2 features of 6 samples of n ranks; gradients are below 1, the rate is
        -- 1 / 2.
        for i, s in ipairs(want:local_shards()) do
          d = largest_difference(s.state("weight"):to_list(), got:local_shards()[i].state("weight"):to_list())
          assert.is_true(d <= 0.5 * 12 * bound / 0.24, tostring(d))
        end
      end, sizes)
    end
  end

  worlds.each("table_wise: exactly what the codec makes of other ranks' rows", function(world, device, n)
    local rank = world:rank()
    local fp16 = codec.get_qcomm_codecs { forward = "FP16", backward = "FP16", backward_loss_scale = 64 }
    local want = make("table_wise", world, device)
    local got = make("table_wise", world, device, { qcomm_codecs_registry = { POOLED_EMBEDDINGS_ALL_TO_ALL = fp16 } })
    local function travels(_, place) return place.owner ~= rank end
    for step = 1, 3 do
      local input = sharded.batch(step, rank, device)
      local x, y = want:forward(input):values(), got:forward(input):values()
      assert.same(through(fp16.forward, x:to_list(), n, travels), y:to_list())
      local g, list = gradient(step, rank, device)
      y:backward(g)
      -- The division comes after the decoding, so f32 gradients that went through the codec give the same bits.
      x:backward(peri.tensor(through(fp16.backward, list, n, travels), "f32", device, { BATCH, WIDTH }))
      sharded.assert_same(want, got, device)
    end
  end, sizes)

  worlds.each("mixed: operations have codecs of their own", function(world, device, n)
    local rank = world:rank()
    local bf16, int8 = codec.get_qcomm_codecs { forward = "BF16" },
      codec.get_qcomm_codecs { forward = "INT8", backward = "INT8" }
    local registers = {
      { POOLED_EMBEDDINGS_ALL_TO_ALL = bf16 },
      { POOLED_EMBEDDINGS_REDUCE_SCATTER = int8 },
      { POOLED_EMBEDDINGS_ALL_TO_ALL = bf16, POOLED_EMBEDDINGS_REDUCE_SCATTER = int8,
        SEQUENCE_EMBEDDINGS_ALL_TO_ALL = int8 },
    }
    for k, given in ipairs(registers) do
      local want, got = make("mixed", world, device), make("mixed", world, device, { qcomm_codecs_registry = given })
      local input = sharded.batch(k, rank, device)
      local x, y = want:forward(input):values(), got:forward(input):values()
      local list = through(bf16.forward, x:to_list(), n,
        function(name, place) return k ~= 2 and name == "c" and place.owner ~= rank end) -- "b" is a replica
      local result, places = y:to_list(), column_table(n)
      local far = 0
      for i = 1, #list do
        local column = (i - 1) % WIDTH
        if k > 1 and column < places.a.last then
          far = math.max(far, math.abs(list[i] - result[i]))
        else
          assert.equal(list[i], result[i])
        end
      end
      assert.is_true(far <= n * 1e-3)
      assert.equal(k > 1 and n > 1, far > 0)
      local g = gradient(k, rank, device)
      x:backward(g)
      y:backward(g)
      for i, s in ipairs(want:local_shards()) do
        local w, v = s.state("weight"):to_list(), got:local_shards()[i].state("weight"):to_list()
        if s.table ~= "a" or k == 1 then assert.same(w, v) else assert.is_true(largest_difference(w, v) <= 0.05) end
      end
    end
  end, sizes)

  worlds.each("a loss scale saves small gradients, and numbers that are too large are clamped", function(world, device)
    local other = (world:rank() + 1) % 2
    local function run(scale, value, start)
      local ebc = peri.shard.ShardedEmbeddingBagCollection {
        tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 4, embedding_dim = 4, feature_names = { "f" },
          init_fn = peri.embed.constant(start) } },
        plan = { t = peri.plan.row_wise() }, group = world, device = device,
        fused_params = { optimizer = "sgd", learning_rate = 1 }, qcomm_codecs_registry = registry { forward = "FP16",
          backward = "FP16", backward_loss_scale = scale }, gradient_division = false,
      }
      -- the other rank's
      local kjt = peri.KeyedJaggedTensor { keys = { "f" }, values = { 2 * other }, lengths = { 1 }, device = device }
      local out = ebc:forward(kjt):values()
      local rows = out:to_list()
      out:backward(peri.full({ 1, 4 }, value, "f32", device))
      return rows[1], ebc:local_shards()[1].state("weight"):to_list()[1]
    end
    local _, w = run(nil, 1e-9, 0)
    assert.equal(0, w)
    _, w = run(2 ^ 16, 1e-9, 0)
    assert.is_true(math.abs(w + 1e-9) < 1e-12, tostring(w))
    local row
    row, w = run(nil, 1e6, 1e6)
    assert.equal(65504, row)
    assert.equal(1e6 - 65504, w)
  end, { sizes = { 2 } })
end)

describe("a registry of codecs", function()
  it("is taken by a model", function()
    sim.run(2, function(rank, world)
      local function outputs(given)
        local model = peri.DistributedModelParallel { group = world, qcomm_codecs_registry = given,
          module = peri.EmbeddingBagCollection { tables = sharded.tables {}, fused_params = { optimizer = "sgd" },
            device = "meta" },
          plan = { [""] = { a = peri.plan.row_wise(), b = peri.plan.table_wise(0),
            c = peri.plan.column_wise { ranks = { 1 } } } } }
        return model(sharded.batch(1, rank)):values():to_list()
      end
      local d = largest_difference(outputs(nil), outputs(registry { forward = "BF16", backward = "FP32" }))
      assert.is_true(d > 0 and d < 2e-3)
    end)
  end)
  local function fails(given, pattern)
    sim.run(2, function(_, world)
      assert.error_matches(function() make("row_wise", world, "cpu", { qcomm_codecs_registry = given }) end, pattern)
    end)
  end
  it("knows the operations", function()
    fails({ POOLED = codec.get_qcomm_codecs { forward = "FP16" } },
      "qcomm_codecs_registry: an operation is 'POOLED', allowed: POOLED_")
  end)
  it("holds pairs of codecs", function()
    fails({ POOLED_EMBEDDINGS_ALL_TO_ALL = codec.QuantizedCommCodec { comm_precision = "FP16" } },
      "POOLED_EMBEDDINGS_ALL_TO_ALL is a table, wanted QuantizedCommCodecs")
    fails("FP16", "qcomm_codecs_registry is a string")
  end)
  it("is the same on all ranks", function()
    for _, device in ipairs { "cpu", "opaque" } do
      local _, errors = sim.run(2, function(rank, world)
        local given = registry { forward = "FP16", forward_loss_scale = rank + 1 }
        make("row_wise", world, device, { qcomm_codecs_registry = given }):forward(sharded.batch(1, rank,
          device)):wait()
      end, { catch = true, timeout = 20, device = device })
      for r = 1, 2 do
        local text = tostring(errors[r] and errors[r].message or errors[r])
        assert.is_truthy(text:find("runs another module or plan", 1, true), text)
      end
    end
  end)
end)

describe("gradient division", function()
  --- Whether a module of this rank's script divides.
  local function divides(world, given)
    local ebc = make("table_wise", world, "cpu", { gradient_division = given, init_fn = peri.embed.constant(0) })
    local kt = ebc:forward(peri.KeyedJaggedTensor { keys = sharded.features, values = { 0, 0, 0 },
      lengths = { 1, 1, 1 } })
    kt:values():backward(peri.ones { 1, WIDTH })
    local s = ebc:local_shards()[1]
    local n = s.table == "a" and 4 or 2 -- two ranks, and two features look into "a"
    local got = -s.state("weight"):to_list()[1] / 0.5
    assert.is_true(got == n or got == n / 2)
    return got == n / 2
  end
  it("is that of the exchanges of the group, unless the module says otherwise", function()
    sim.run(2, function(_, world)
      local function check(default, on, off)
        local list = {}
        for i, given in ipairs { "default", true, false } do
          if given == "default" then given = nil end
          list[i] = divides(world, given)
        end
        assert.same({ default, on, off }, list)
      end
      check(true, true, false)
      ops.set_gradient_division(false)
      check(false, true, false)
      ops.set_gradient_division(true, world)
      check(true, true, false)
      ops.set_gradient_division(false, world)
      check(false, true, false)
    end)
  end)
end)
