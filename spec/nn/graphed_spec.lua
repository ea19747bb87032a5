-- nn.graphed on the pretended GPU (tests/cuda_host): training with graphs is training without them, to the last bit,
-- and what cannot be captured is refused by its name. The cases are those of spec/support/graphed_cases.lua.
-- deadline: 120 s
local shell = require "spec.support.shell"
local here = io.popen("pwd"):read "*l"
local folder = ("%s/%s/cuda_host"):format(here, shell.build)

--- What cannot be captured, and what is said of it.
local REFUSED = {
  { "an item", "a wait of the host for the device cannot be captured" },
  { "a tensor of the host", "a copy from the host cannot be captured" },
  { "a wait", "a wait of the host for the device cannot be captured" },
  { "dropout", "calls dropout, whose numbers would be the same in each replay; allowed: nn.Dropout" },
  { "random numbers", "the drawing of random numbers" },
  { "a count", "field 'calls' of a Counter changes in each call" },
  { "an input in place", "the function changes input 1 in place" },
  { "a parameter of nobody", "a leaf (f32 [2, 3]) that wants a gradient and is not among the tensors" },
  { "a table", "result 1 of the function is a table, wanted tensors" },
  { "tables", "cannot be captured" },
  { "an optimizer's step", "an optimizer's step or the clipping of gradients" },
  { "a hook", "a hook on a gradient, or an exchange in a backward pass, cannot be captured" },
  { "a change before the backward pass", "that was changed in place after it" },
  { "a change within a cross network", "that was changed in place after it" },
}

describe("nn.graphed", function()
  it("trains as without it, keeps results, follows what changes, and refuses what cannot be captured", function()
    local there = io.open(folder .. "/libperilune_cuda_host.so")
    if not there then return pending "no C++ compiler was found" end
    there:close()
    if shell.no_launcher() then return pending(shell.no_launcher()) end
    local out, status = shell.run(("%s run -n 1 spec/support/graphed_cases.lua cuda_host"):format(shell.perilune),
      { PERI_PLUGIN_PATH = folder .. ":" .. here .. "/" .. shell.build })
    assert.equal(0, status, out)
    local same, refused = 0, 0
    for line in out:gmatch "[^\n]+" do
      if line:find "^same " then same = same + 1
      elseif line:find "^refused " then
        refused = refused + 1
        local name, words = unpack(REFUSED[refused])
        assert.equal("refused " .. name .. ": ", line:sub(1, #name + 10))
        assert.is_truthy(line:find(words, 1, true), line)
      else assert.equal("Graphed(captures=0, replays=0, eager=3: device cpu captures nothing 3)", line) end
    end
    assert.equal(28, same, out)
    assert.equal(#REFUSED, refused, out)
  end)
end)
