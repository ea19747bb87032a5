-- A step of a sharded collection whose batches are of one size uses the memory of the steps before it: no page is new
-- to the process, but for those of Lua's own heap.
local ffi = require "ffi"
local peri = require "perilune"
local shell = require "spec.support.shell"
local worlds = require "spec.support.worlds"
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
