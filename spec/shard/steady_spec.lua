-- A step of a sharded collection whose batches are of one size uses the memory of the steps before it: no page is new
-- to the process, but for those of Lua's own heap.
local ffi = require "ffi"
local peri = require "perilune"
local shell = require "spec.support.shell"
local worlds = require "spec.support.worlds"
collectgarbage("setpause", 200) -- as in programs (tests/harness/busted_main.lua): memory is measured here
local plan = peri.plan

-- rows of a table 1 MiB, those of a feature's ids as many
local TABLES, ROWS, DIM, BATCH, IDS, STEPS = 3, 4096, 64, 512, 8, 200

--- Pages that this process has touched for the first time.
local function new_pages()
  local file = assert(io.open "/proc/self/stat")
  local fields = file:read("*l"):match "%) (.*)$"
  file:close()
  return tonumber(select(8, fields:match "(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+)"))
end

local function batch(salt)
  local n = TABLES * BATCH * IDS
  local values = ffi.new("int64_t[?]", n)
  for i = 0, n - 1 do values[i] = (i * 7919 + salt * 104729) % ROWS end
  return peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3" }, stride = BATCH,
    values = peri.Tensor.from_memory(values, { n }, "i64"), lengths = peri.full({ TABLES * BATCH }, IDS, "i32") }
end

local kinds = {
  EmbeddingBagCollection = { config = peri.EmbeddingBagConfig, rows = function(result) return { result:values() } end },
  EmbeddingCollection = { config = peri.EmbeddingConfig,
    rows = function(result) return { result.f1:values(), result.f2:values(), result.f3:values() } end },
}

describe("a step in a steady state", function()
  if shell.sanitizer ~= "" then return pending "a sanitizer keeps what was freed" end
  for name, kind in peri.util.ordered(kinds) do
    worlds.each("of a sharded " .. name .. " takes no new memory", function(world)
      local tables, entries = {}, {}
      for t = 1, TABLES do
        tables[t] = kind.config { name = "t" .. t, num_embeddings = ROWS, embedding_dim = DIM,
          feature_names = { "f" .. t } }
        entries["t" .. t] = t == 1 and plan.data_parallel { compute_kernel = "fused" } or plan.row_wise()
      end
      local module = peri.shard["Sharded" .. name] { tables = tables, plan = entries, group = world,
        fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 } }
      local batches, grads = { batch(1), batch(2), batch(3) }, {}
      local function step(i)
        local rows = kind.rows(module:forward(batches[i % 3 + 1]))
        for k, x in ipairs(rows) do grads[k] = grads[k] or peri.keep(peri.full(x:shape(), 0.1, "f32")) end
        peri.backward(rows, grads)
      end
      for i = 1, 20 do peri.scope(step, i) end
      collectgarbage()
      -- what the steps make in Lua's own heap can be counted then: it takes new pages too until it is collected
      collectgarbage "stop"
      local before, kilobytes = new_pages(), collectgarbage "count"
      for i = 1, STEPS do peri.scope(step, i) end
      local pages = new_pages() - before
      local of_lua = (collectgarbage "count" - kilobytes) / 4
      collectgarbage "restart"
      -- A buffer that is made anew costs a page a step at least, LuaJIT's machine code some pages at first.
      assert.is_true(pages < of_lua + 50,
        ("%d new pages in %d steps, of which Lua's heap can have taken %d"):format(pages, STEPS, of_lua))
    end, { sizes = { 1 }, devices = { "cpu" } })
  end
end)

-- What is kept for the next batches of a size is kept for a few sizes.
describe("steps of many sizes", function()
  worlds.each("leave no more memory and objects than those of a few", function(world)
    local tables, entries = {}, {}
    for t, kind in ipairs { plan.row_wise, plan.table_wise, plan.data_parallel } do
      tables[t] = peri.EmbeddingBagConfig { name = "t" .. t, num_embeddings = 50, embedding_dim = 8,
        feature_names = { "f" .. t } }
      entries["t" .. t] = kind(kind == plan.table_wise and 0 or nil)
    end
    local module = peri.shard.ShardedEmbeddingBagCollection { tables = tables, plan = entries, group = world,
      fused_params = { optimizer = "rowwise_adagrad", learning_rate = 0.1 } }
    local mlp = peri.nn.MLP { in_size = 24, layer_sizes = { 4, 1 } }
    local function step(size)
      local kjt = peri.KeyedJaggedTensor { keys = { "f1", "f2", "f3" }, stride = size,
        values = peri.Tensor.arange(0, 6 * size, 1, "i64"):remainder(50), lengths = peri.full({ 3 * size }, 2, "i32") }
      mlp(module:forward(kjt):values()):sum():backward()
      mlp:zero_grad()
    end
    local function held(first, last)
      for size = first, last do peri.scope(step, size) end
      for size = 1, 20 do peri.scope(step, size) end
      collectgarbage()
      collectgarbage()
      return { bytes = tonumber(peri.ffi.C.peri_mem_live()), objects = tonumber(peri.ffi.C.peri_mem_objects()) }
    end
    held(650, 700) -- buffers are as long as the longest batch so far
    assert.same(held(650, 700), held(1, 700))
  end, { sizes = { 1 }, devices = { "cpu" } })
end)
