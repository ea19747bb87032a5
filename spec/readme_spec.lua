-- The README's example runs as it stands there, and does what the README says of it: what is learned is the same on any
-- number of ranks.
-- deadline: 360 s
-- takes: 10 s
local json = require "dkjson"
local shell = require "spec.support.shell"

-- Small tables and few samples, in batches of 53 rows and a last one of 3: of 2 or 4 ranks some have a row more than
-- others, and of 4 one has none of the last batch.
local SAMPLES, BATCH, ROWS = 53 * 9 + 3, 53, 40

--- Appended to the script: every rank writes what it has learned and all losses.
local report = [[

local json = require "dkjson"
local learned = { losses = losses, dense = {}, tables = {} }
for _, p in ipairs(model.module:named_parameters()) do learned.dense[p.name] = p.tensor:to_list() end
for _, s in ipairs(model.sharded[1]:local_shards()) do
  for _, name in ipairs(s.names()) do
    table.insert(learned.tables, { table = s.table, state = name, row = s.row_offset, rows = s.rows, col = s.col_offset, cols = s.cols,
      numbers = s.state(name):to_list() })
  end
end
local file = assert(io.open(("learned-%d-%d.json"):format(peri.world_size(), peri.rank()), "w"))
file:write(json.encode(learned))
file:close()
]]

local function replaced(text, pattern, by)
  local result, n = text:gsub(pattern, by)
  assert.equal(1, n, ("the README's example has no '%s', or two"):format(pattern))
  return result
end

describe("the README's example", function()
  local folder, clean, here
  setup(function()
    folder, clean = shell.temporary()
    here = io.popen("pwd"):read "*l"
    local count = 0
    for block in shell.read("README.md"):gmatch "```lua\n(.-)```" do
      local name = block:match "^%-%- ([%w_]+%.lua): "
      assert.is_truthy(name, "a Lua block of the README does not open with its file's name")
      shell.write(folder .. "/" .. name, block)
      count = count + 1
    end
    assert.equal(1, count)
    local script = shell.read(folder .. "/experiment.lua")
    script = replaced(script, "num_rows = %d+, batch_size = %d+ }%s*%-%-",
      ("num_rows = %d, batch_size = %d, rows = %d } --"):format(SAMPLES, BATCH, ROWS))
    script = replaced(script, "\nfor loss, step in", "\nlocal losses = {}%0")
    script = replaced(script, "  if step %% 10 == 0", "  losses[step] = loss\n%0")
    shell.write(folder .. "/small.lua", script .. report)
  end)
  teardown(function() clean() end)

  local function run(ranks, script)
    local out, status = shell.run(("cd %s && %s/%s run -n %d %s"):format(folder, here, shell.perilune, ranks, script))
    assert.equal(0, status, out)
    return out
  end

  --- What `ranks` ranks learned from a script: losses, dense parameters by name, tables by "name.state": a list of rows
  --- * columns numbers. What several ranks have must be the same to the last bit.
  local function learned(ranks, script)
    run(ranks, script)
    local all = { tables = {} }
    for rank = 0, ranks - 1 do
      local got = assert(json.decode(shell.read(("%s/learned-%d-%d.json"):format(folder, ranks, rank))))
      all.losses, all.dense = all.losses or got.losses, all.dense or got.dense
      assert.same(all.losses, got.losses, "losses of rank " .. rank)
      assert.same(all.dense, got.dense, "the dense part of rank " .. rank)
      for _, s in ipairs(got.tables) do
        -- a state of one number for each row, of each block of columns
        local by_row = #s.numbers == s.rows and s.cols > 1
        local name = s.table .. "." .. s.state .. (by_row and s.col > 0 and " of column " .. s.col or "")
        local whole = all.tables[name] or {}
        all.tables[name] = whole
        local cols, col, width = by_row and 1 or s.cols, by_row and 0 or s.col, by_row and 1 or 16
        for i, x in ipairs(s.numbers) do
          local at = (s.row + math.floor((i - 1) / cols)) * width + col + (i - 1) % cols + 1
          assert.is_true(whole[at] == nil or whole[at] == x, ("%s: replicas differ"):format(name))
          whole[at] = x
        end
      end
    end
    return all
  end

  --- Equal to the rounding of f32, but for `share` of the numbers: Adagrad divides gradients by their own size, so that
  --- those which are 0 but for rounding make steps of their own, far below a whole one (0.05).
  local function near(want, got, what, share)
    assert.equal(#want, #got, what)
    local off = 0
    for i, x in ipairs(want) do
      local difference = math.abs(x - got[i])
      assert.is_true(difference < 1e-3, ("%s, number %d: %.9g, wanted %.9g"):format(what, i, got[i], x))
      if difference > 2e-6 + 2e-5 * math.abs(x) then off = off + 1 end
    end
    assert.is_true(off <= share * #want, ("%s: %d of %d numbers differ"):format(what, off, #want))
  end

  --- What one rank and several learned is the same. `state` is how many numbers for each row the optimizer keeps (16:
  --- one for each column). With one for each row it is whole rows whose gradients are 0 but for rounding, sixteen
  --- numbers at once.
  local function compare(one, many, state)
    assert.equal(10, #many.losses)
    near(one.losses, many.losses, "losses", 0)
    local compared = 0
    for name, numbers in pairs(one.dense) do near(numbers, many.dense[name], name, 0.02) end
    for name, numbers in pairs(one.tables) do
      near(numbers, many.tables[name], name, name:match "weight" and (state == 1 and 0.25 or 0.05) or 0)
      compared = compared + #numbers
    end
    assert.equal(26 * ROWS * (16 + (state or 16)), compared) -- weights and the optimizer's sums
  end

  it("learns", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local script = replaced(shell.read(folder .. "/experiment.lua"), "num_rows = %d+, batch_size = %d+",
      "num_rows = 20480, batch_size = 1024")
    shell.write(folder .. "/short.lua", (replaced(script, "step %% 10 == 0", "step %% 1 == 0")))
    local printed, losses = run(1, "short.lua"), {}
    for step, loss in printed:gmatch "step (%d+): loss (%d%.%d+)\n" do losses[tonumber(step)] = tonumber(loss) end
    assert.equal(20, #losses, printed)
    assert.is_true(losses[18] + losses[19] + losses[20] < losses[1] + losses[2] + losses[3] - 0.03, printed)
  end)

  local one
  it("learns on 4 ranks what it learns on one, also where their shares differ", function() -- on others: below
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    if not shell.has "mpirun" then return pending "mpirun was not found" end
    one = one or learned(1, "small.lua")
    compare(one, learned(4, "small.lua"))
  end)

  it("learns the same by the library's own plan", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    if not shell.has "mpirun" then return pending "mpirun was not found" end
    shell.write(folder .. "/no_plan.lua", (replaced(shell.read(folder .. "/small.lua"), ", plan = spread", "")))
    one = one or learned(1, "small.lua")
    compare(one, learned(2, "no_plan.lua"))
  end)

  it("learns the same under an optimizer with a number for each row, where no row is cut", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    if not shell.has "mpirun" then return pending "mpirun was not found" end
    local script = replaced(shell.read(folder .. "/small.lua"), 'optimizer = "adagrad"',
      'optimizer = "rowwise_adagrad"')
    shell.write(folder .. "/by_rows.lua", (replaced(script, "plan%.column_wise%(%)", "plan.table_wise(0)")))
    local whole = learned(1, "by_rows.lua")
    compare(whole, learned(2, "by_rows.lua"), 1)
    -- The exception: a row that is cut by columns has a number for each part, and its weights are others.
    shell.write(folder .. "/by_columns.lua", script)
    local cut, apart, most = learned(2, "by_columns.lua").tables["t_c2.weight"], 0, 0
    for i, x in ipairs(whole.tables["t_c2.weight"]) do
      apart, most = math.max(apart, math.abs(x - cut[i])), math.max(most, math.abs(x))
    end
    assert.is_true(apart > 0.001 * most, ("weights are at most %.3g apart, of %.3g"):format(apart, most))
  end)

  it("is short", function()
    local lines = 0
    for line in shell.read(folder .. "/experiment.lua"):gmatch "[^\n]+" do
      assert.is_true(#line <= 105, line) -- as wide as a page shows it
      if not line:match "^%s*%-%-" then lines = lines + 1 end
    end
    assert.is_true(lines <= 32)
    assert.is_true(#shell.read "README.md" <= 9 * 1024)
  end)
end)
