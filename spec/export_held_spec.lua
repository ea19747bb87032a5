-- Numbers that the dtypes of a model file do not hold are refused by name where the file is exported, and where it
-- follows its trainer: the last good state answers on, and the next save that has none of them is taken.
-- takes: 1 s
local peri = require "perilune"
local bits_of = require "spec.support.bits"
local shell = require "spec.support.shell"
local small = require "spec.support.small_net"
local nn = peri.nn

local folder, clean = shell.temporary()
teardown(clean)

local ROWS = 50
--- A sample for each of these rows of both tables.
local function rows_from(first, last)
  local values, lengths = {}, {}
  for f = 1, 2 do
    for row = first, last do values[#values + 1], lengths[#lengths + 1] = f == 1 and row or row % 37, 1 end
  end
  return { ids = peri.KeyedJaggedTensor { keys = { "fa", "fb" }, values = values, lengths = lengths } }
end

local Net = small.Net:extend "Net"
function Net:init(options)
  small.Net.init(self, options)
  self:register_buffer("count", peri.tensor({ 3 }, "i64"))
end
function Net:forward(kjt) return self.over(self.ebc(kjt):values()) + self.count end

local function bits(file)
  local answers = bits_of(file:predict(rows_from(0, ROWS - 1)).logits)
  file:release()
  return answers
end

--- Three saves of a run, and a file that follows it. The first has number `good` in an element of the state, the second
--- `bad`, the third none of them. element(model, row): that element; row: one that the saves have. words: what the
--- refusals name, of the export and of the save.
local function life(name, options, element, good, bad, words)
  local of, path, step = folder .. "/" .. name, ("%s/%s.peri"):format(folder, name), 0
  local model = small.build(nil, nil, { outputs = 4, exact = false }, Net)
  local optimizer = nn.optim.SGD { params = model:parameters(), lr = 0.05 }
  local saver = peri.checkpoint.Saver { folder = of, parts = { model = model }, every = 1, full_every = 1e9,
    keep = 100 }
  local function export()
    model:export(path, { tables = options.tables, dense = options.dense, allowed_difference = 1 / 0, -- of huge numbers
      batches = { rows_from(30, 49) }, call = function(m, batch) return m(batch.ids) end })
  end
  saver:step(0)
  export()
  shell.run(("cp '%s' '%s.served'"):format(path, path))
  local follower = peri.export.follow(path .. ".served", of)
  bits(follower:poll())

  --- Train and save with the element as `number`. Returns the bits of an export, or nil and why there is none, and the
  --- same of the follower.
  local function save(number)
    step = step + 1
    peri.scope(function()
      optimizer:zero_grad()
      model(small.batch(step, ROWS)):mean():backward()
      optimizer:step()
    end)
    local row = step * 7 % ROWS
    local at = element(model, row)
    local before = at:clone()
    if number then at:fill(number) end
    saver:step(step)
    local exported, why = pcall(export)
    local followed, problem = follower:poll()
    at:copy(before)
    return exported and bits(peri.export.open(path)), why, followed and bits(followed), problem, row
  end

  local want, why, got, problem = save(good)
  assert.is_truthy(want, tostring(why))
  assert.equal(want, got, problem)
  local kept = bits(follower:model())
  local exported, refusal, followed, refused, row = save(bad)
  assert.is_false(exported)
  assert.is_nil(followed)
  for _, word in ipairs { "save-000003-step-2", unpack(words) } do
    word = word:format(row)
    assert.is_truthy(refused:find(word, 1, true), refused)
    assert.is_truthy(word:match "^save" or tostring(refusal):find(word, 1, true), tostring(refusal))
  end
  assert.equal(kept, bits(follower:model()))
  want, why, got, problem = save(nil)
  assert.is_truthy(want, tostring(why))
  assert.equal(want, got, problem)
  follower:release()
  saver:close()
end

describe("what a model file does not hold", function()
  local function element(model, row)
    return model.ebc:weight("a"):detach():slice(1, row, row + 1):slice(2, 5, 6)
  end
  for dtype, x in peri.util.ordered { f16 = { 65519, 65520 }, bf16 = { 3.38e38, 3.4e38 }, fp8 = { 240, 241 },
    int8 = { 3e38, 1 / 0 }, int4 = { 5e5, 1e6 }, int2 = { 1e5, 0 / 0 } } do
    it(("is refused in rows of %s"):format(dtype), function()
      life(dtype, { tables = dtype }, element, x[1], x[2], { "table 'a'", "row %d", "allowed: " })
    end)
  end

  local function weight(model) return model.over.weight:detach():slice(1, 2, 3):slice(2, 6, 7) end
  for dense, x in peri.util.ordered { bf16 = { 3.38e38, -3.4e38 }, bf16_products = { 1 / 0, 3.4e38 },
    int8 = { 3e38, 1 / 0 }, int8_products = { 1e-30, 0 / 0 } } do
    it(("is refused in matrices of %s"):format(dense), function()
      life("matrices " .. dense, { dense = dense }, weight, x[1], x[2],
        { "over.weight", "output 2, input 6 is ", "allowed: " })
    end)
  end

  it("is refused in whole numbers, which are f32 there", function()
    local function count(model) return model.count end
    life("whole", {}, count, 2 ^ 24, 2 ^ 24 + 1, { "16777217", "allowed: " })
  end)
end)
