-- A model file that follows a run answers, after each save, with the bits of a file that is exported from the trainer
-- at that moment: all dtypes of tables, all ways to cut them, over increments, full checkpoints and compacted chains;
-- what is damaged changes nothing.
-- takes: 3 s
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local shell = require "spec.support.shell"
local small = require "spec.support.small_net"
local nn, plan = peri.nn, peri.plan

local folder, clean = shell.temporary()
teardown(clean)

local Net = small.Net:extend "Net"
function Net:init(options)
  small.Net.init(self, options)
  self.last = nn.Parameter(peri.Tensor.uniform({ 40, 3 }, -1, 1, 5)) -- its transpose is what a file has
  self.shift = nn.Parameter(peri.Tensor.uniform({ 3 }, -1, 1, 6))
end
function Net:forward(kjt) return self.over(self.ebc(kjt):values()):matmul(self.last) + self.shift end

local ROWS = 500
local function build(world, entry)
  return small.build(world, entry, { rows = ROWS, outputs = 40, exact = false }, Net)
end

local function train(model, optimizer, from, last)
  for i = from, last do
    peri.scope(function()
      optimizer:zero_grad()
      model(small.batch(i, ROWS)):mean():backward()
      optimizer:step()
    end)
  end
end

local function held_out()
  local values, lengths = {}, {}
  for i = 0, 499 do values[#values + 1], lengths[#lengths + 1] = i, 1 end
  for i = 0, 499 do values[#values + 1], lengths[#lengths + 1] = i % 37, 1 end
  return { ids = peri.KeyedJaggedTensor { keys = { "fa", "fb" }, values = values, lengths = lengths } }
end
local function call(model, batch) return model(batch.ids) end

local function bits(file, keep)
  local answers = file:predict(held_out()).logits
  local buffer, n = answers:read()
  if not keep then file:release() end
  return require("ffi").string(buffer, 4 * n)
end

local matrices = { int8 = "bf16", int4 = "int8_products", fp8 = "int8" } -- by the dtype of tables

--- A run whose saves follow each other; each(rank, step, export) comes after each: export(tables) is the path of a file
--- of that moment.
local function run(of, entry, ranks, steps, full_every, each)
  sim.run(ranks, function(rank, world)
    local model = build(ranks > 1 and world, entry)
    local optimizer = nn.optim.SGD { params = model:parameters(), lr = 0.05 }
    local saver = peri.checkpoint.Saver { folder = of, parts = { model = model }, every = 1, full_every = full_every,
      keep = 100, group = world }
    local function export(tables)
      local path = ("%s/%s.peri"):format(folder, tables)
      model:export(path, { batches = { held_out() }, call = call, tables = tables, allowed_difference = 10,
        dense = matrices[tables] or "f32" })
      return path
    end
    for step = 1, steps do
      each(rank, step - 1, export)
      train(model, optimizer, step, step)
      saver:step(step)
    end
    each(rank, steps, export)
    saver:close()
  end)
end

local function copy_of(path, name)
  local to = folder .. "/" .. name
  shell.run(("cp %s %s"):format(path, to))
  return to
end

describe("a model file that follows", function()
  local cuts = { alone = { 1 }, row_wise = { 2, function() return plan.row_wise() end },
    column_wise = { 2, function() return plan.column_wise { ranks = { 0, 1 } } end } }
  for cut, how in peri.util.ordered(cuts) do
    it(("a run whose tables are %s has its bits, in all dtypes"):format(cut), function()
      local of, followers, seen = folder .. "/" .. cut, {}, 0
      run(of, how[2] and how[2](), how[1], 5, 4, function(rank, step, export)
        for _, dtype in ipairs { "f32", "f16", "bf16", "int8", "int4", "fp8" } do
          local path = export(dtype)
          if rank == 0 and step == 0 then
            followers[dtype] = peri.export.follow(copy_of(path, cut .. dtype .. ".peri"), of)
            assert.equal(bits(peri.export.open(path)), bits(followers[dtype]:model()))
            assert.is_nil(followers[dtype]:poll())
          elseif rank == 0 and step ~= 2 then -- two increments at once at step 3
            local model, why = followers[dtype]:poll()
            assert.is_truthy(model, why)
            assert.equal(step, model:describe().step)
            assert.equal(bits(peri.export.open(path)), bits(model), ("%s, step %d"):format(dtype, step))
            seen = seen + 1
          end
        end
      end)
      assert.equal(24, seen)
    end)
  end

  it("is not changed where somebody has it, and passes over what is damaged", function()
    local of, follower, want = folder .. "/damage", nil, {}
    run(of, nil, 1, 6, 5, function(_, step, export)
      local path = export "f32"
      follower = follower or peri.export.follow(copy_of(path, "damage.peri"), of)
      want[step] = bits(peri.export.open(path))
      if step == 1 then
        local first = assert(follower:poll())
        assert.equal(want[1], bits(first, true))
        want.first = first
      elseif step == 2 then
        local second = assert(follower:poll())
        assert.equal(want[1], bits(want.first, true)) -- still
        assert.is_true(want[1] ~= want[2])
        want.second = second
      elseif step == 3 then
        assert.is_nil((follower:poll())) -- both are in use
        want.first:release()
        shell.run(("cd %s/save-000003-step-3 && f=$(ls *.safetensors | head -1) && printf x | dd of=$f bs=1 "
          .. "conv=notrunc seek=$(($(stat -c %%s $f) - 1))"):format(of))
        local model, why = follower:poll()
        assert.is_nil(model)
        assert.is_truthy(why:find("save-000003-step-3", 1, true), why)
        assert.equal(want[2], bits(follower:model()))
        assert.is_nil((select(2, follower:poll())))
      elseif step == 4 then
        assert.is_truthy(select(2, follower:poll())) -- an increment of the damaged one
      elseif step == 6 then -- step 6 is full
        want.second:release()
        local model, why = follower:poll()
        assert.is_truthy(model, why)
        assert.equal(want[6], bits(model))
      end
    end)
  end)

  it("a compacted chain, and says what does not fit", function()
    local of, follower = folder .. "/compacted", nil
    run(of, nil, 1, 3, 1e9, function(_, step, export)
      local path = export "int8"
      follower = follower or peri.export.follow(copy_of(path, "compacted.peri"), of)
      if step == 2 then
        assert(follower:poll()):release()
        local out, status = shell.run(("%s checkpoint compact %s/save-000002-step-2"):format(shell.perilune, of))
        assert.equal(0, status, out)
      elseif step == 3 then
        local model, why = follower:poll()
        assert.is_truthy(model, why)
        assert.equal(bits(peri.export.open(path)), bits(model))
        local other = peri.export.follow(path, of, { saved = "other" })
        local none, words = other:poll()
        assert.is_nil(none)
        assert.is_truthy(words:find("has no tensor 'other/", 1, true), words)
        assert.error_matches(function() peri.export.follow(path, "") end, "the folder has no name")
      end
    end)
  end)
end)
