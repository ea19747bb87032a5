-- The Lua examples of the documents run as they stand there. (The README's has a spec of its own.)
local peri = require "perilune"
local shell = require "spec.support.shell"

describe("the examples of", function()
  local documents = { cuda = 1, data = 7, embedding_tables = 6, managed_collision = 3, model_file = 2, models = 7,
    pipelines = 6, plans = 5, precision = 2, quantized_tables = 4, sequences = 4, serving = 1,
    sharded_tables = 6, sparse_operators = 1, streams = 1, tables_in_files = 2, tensors = 3,
    tutorial_from_torchrec = 1, tutorial_plan_and_schedule = 2 }
  for document, examples in peri.util.ordered(documents) do
    document = "docs/" .. document .. ".md"
    it(document, function()
      local count = 0
      for block in shell.read(document):gmatch "```lua\n(.-)```" do
        assert(loadstring(block, "=" .. document))()
        count = count + 1
      end
      assert.equal(examples, count)
    end)
  end

  it("docs/tensors.md: names of PyTorch that are here, and those that are not", function()
    local F, Tensor = peri.nn.functional, peri.Tensor
    local function has(table, name) return (pcall(function() return assert(table[name]) end)) end
    local function is_here(name)
      local class, loss = name:match "^nn%.(.*)", name:match "^F%.(.*)"
      if class then return has(peri.nn, class) end
      return has(F, loss or name) or not loss and (has(peri, name) or rawget(Tensor.methods, name) ~= nil)
    end
    local text, wrong, n = shell.read "docs/tensors.md", {}, { [true] = 0, [false] = 0 }
    for line in text:match "## Names of PyTorch, here\n(.-)\n## ":gmatch "[^\n]+" do
      local there, here = line:match "^| (.-) | ?(.-) ?|$"
      for name in (there or ""):gmatch "`([%a.][%w_.]*)`" do
        local wanted = here == ""
        n[wanted] = n[wanted] + 1
        if is_here(name) ~= wanted then wrong[#wrong + 1] = name .. (wanted and " is not here" or " is here") end
      end
    end
    assert.same({}, wrong)
    assert.is_true(n[true] > 180 and n[false] > 50)
  end)

  --- The examples of a page from number `first` on as one program of n ranks, run in an empty folder; what it prints.
  local function program(document, first, examples, n)
    local blocks, folder, clean = {}, shell.temporary()
    for block in shell.read(document):gmatch "```lua\n(.-)```" do blocks[#blocks + 1] = block end
    assert.equal(examples, #blocks)
    shell.write(folder .. "/page.lua", table.concat(blocks, "\n", first))
    local perilune = shell.run("pwd"):match "^[^\n]*" .. "/" .. shell.perilune
    local out, status = shell.run(("cd %s && %s run -n %d page.lua"):format(folder, perilune, n))
    assert.equal(0, status, out)
    clean()
    return out
  end

  it("docs/checkpoints.md, running.md, collectives.md and two tutorials: each of them a program", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    assert.matches("now answering from .*run%-7/save%-000001%-step%-10", program("docs/checkpoints.md", 1, 7, 1))
    assert.matches("%d\n", program("docs/running.md", 1, 1, 1))
    if not shell.has "mpirun" then return pending "mpirun was not found" end
    program("docs/collectives.md", 2, 6, 2)
    assert.matches("AUC 0.%d+; 0.5 is guessing\n", program("docs/tutorial_first_model.md", 1, 3, 2))
    local small, large = program("docs/tutorial_own_data.md", 1, 4, 2):match "small: AUC (0.%d+).-large: AUC (0.%d+)"
    assert.is_true(tonumber(small) > 0.6 and tonumber(large) > tonumber(small)) -- as the page says of them
  end)

  it("docs/tutorial_serve.md, and its commands up to the model file", function()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local text, perilune = shell.read "docs/tutorial_serve.md", shell.run("pwd"):match "^[^\n]*" .. "/"
      .. shell.perilune
    local folder, clean = shell.temporary()
    for block in text:gmatch "```lua\n(.-)```" do shell.write(folder .. "/" .. block:match "^%-%- (%S+)", block) end
    for command in text:gmatch "\nperilune (%l+ [^\n]+)" do
      if command:match "^serve" then break end
      local out, status = shell.run(("cd %s && %s %s"):format(folder, perilune, command))
      assert.equal(0, status, command .. "\n" .. out)
    end
    local file = peri.export.open(folder .. "/clicks.peri")
    assert.equal("dense_features c1 c2 c3", table.concat(peri.util.map(file:inputs(), function(i) return i.name end),
      " "))
    clean()
  end)
end)
