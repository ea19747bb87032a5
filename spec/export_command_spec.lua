-- `perilune export`: a run's newest checkpoint, or a named one, as a file that says what it is of; refusals leave what
-- was there.
local peri = require "perilune"
local nn = peri.nn
local shell = require "spec.support.shell"

local SCRIPT = [[
local peri = require "perilune"
local nn = peri.nn
local Model = nn.Module:extend "Model"
function Model:init()
  self.tables = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "users", num_embeddings = 9,
    embedding_dim = 4, feature_names = { "user" } } } }
  self.out = nn.Linear { in_features = 4, out_features = 1 }
end
function Model:logits(b) return self.out(self.tables(b.ids):values()):reshape(-1) end
local ids, lengths, labels = {}, {}, {}
for i = 1, 40 do ids[i], lengths[i], labels[i] = i % 9, 1, i % 2 end
return { model = Model(), allowed_ne = LOSS, batches = { { labels = peri.tensor(labels),
  ids = peri.KeyedJaggedTensor { keys = { "user" }, values = peri.tensor(ids, "i64"), lengths = lengths } } } }
]]

describe("perilune export", function()
  if shell.no_launcher() then return pending(shell.no_launcher()) end
  local folder, clean = shell.temporary()
  teardown(clean)
  local function script(name, loss)
    local path = ("%s/%s.lua"):format(folder, name)
    local f = assert(io.open(path, "w"))
    f:write((SCRIPT:gsub("LOSS", tostring(loss))))
    f:close()
    return path
  end
  local function export(words) return shell.run(("%s export %s"):format(shell.perilune, words)) end
  local path, same, strict = folder .. "/model.peri", script("same", 0.001), script("strict", 0)
  setup(function()
    local made, rows = dofile(same), {}
    -- Each row adds up to -5, which the bias makes 0, and each id has both labels: nothing is better than 0. As int2
    -- the rows add up to 0, and the answer is 5.
    for i = 1, 9 do rows[i] = { 10, -10, 1, -6 } end
    rows = peri.tensor(rows)
    for step = 3, 5, 2 do
      made.model.out.bias:fill(step)
      made.model.out.weight:fill(1)
      made.model:load_state_dict({ ["tables.embedding_bags.users.weight"] = rows }, false)
      peri.checkpoint.save(("%s/run/save-%06d-step-%d"):format(folder, step, step), { model = made.model },
        { values = { step = step } })
    end
  end)

  it("takes the newest checkpoint of a run, or the named one, and its step", function()
    for from, step in peri.util.ordered { run = 5, ["run/save-000003-step-3"] = 3 } do
      local out, status = export(("%s/%s --model %s -o %s"):format(folder, from, same, path))
      assert.equal(0, status, out)
      assert.matches("0 of 40 numbers for 40 samples differ.*AUC .* of the model; AUC .* of the file", out)
      local empty = { ids = peri.KeyedJaggedTensor { keys = { "user" }, values = peri.Tensor.zeros({ 0 }, "i64"),
        lengths = { 0 } } }
      assert.equal(step, peri.export.open(path):predict(empty).logits:item())
      assert.matches(("whole; step %d, format 1, by perilune"):format(step), (export("--verify " .. path)))
    end
    shell.run(("head -c 1000 %s > %s/cut.peri"):format(path, folder))
    assert.equal(1, select(2, export(("--verify %s/cut.peri"):format(folder)))) -- damaged
    assert.equal(2, select(2, export(("--verify %s/none.peri"):format(folder)))) -- not known
  end)

  it("takes tables that are described on device meta, and says which states it leaves out", function()
    local tables = [[{ device = "meta", tables = { peri.EmbeddingBagConfig { name = "users", num_embeddings = 9,
      embedding_dim = 4, feature_names = { "user" } } }, fused_params = { optimizer = "adagrad" } }]]
    local meta = folder .. "/meta.lua"
    shell.write(meta, (shell.read(same):gsub("{ tables = .- } } } }", function() return tables end)))
    local m = peri.DistributedModelParallel { module = dofile(meta).model }
    local optimizer = nn.optim.Adam { params = m:named_parameters(), lr = 0.1 }
    peri.checkpoint.save(folder .. "/sharded", { model = m, optimizer = optimizer }, {})
    local out, status = export(("%s/sharded --model %s -o %s/meta.peri"):format(folder, meta, folder))
    assert.equal(0, status, out)
    assert.matches("'[^']*/sharded': loaded: model; not loaded: optimizer states of model's tables, optimizer\n", out)
    assert.matches("0 of 40 numbers for 40 samples differ", out)
  end)

  it("refuses what loses more than is allowed, and what means nothing", function()
    local before = peri.export.open(path):describe().digest
    for words, message in peri.util.ordered {
      [("%s/run --model %s -o %s --tables int2"):format(folder, strict, path)] =
        "loses more than allowed_ne = 0 allows: the NE of its output 'logits' is larger",
      [("%s/run --model %s -o %s --tables user=int8"):format(folder, same, path)] = "tables names 'user'",
      [("%s/none --model %s -o %s"):format(folder, same, path)] = "No such file",
      [("--verify %s --dense int8"):format(path)] = "stands alone, without --dense",
    } do
      local out, status = export(words)
      assert.is_true(status ~= 0, words)
      assert.matches(message, out, 1, true)
    end
    assert.equal(before, peri.export.open(path):describe().digest)
  end)
end)
