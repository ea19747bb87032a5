-- The Lua examples of the documents run as they stand there. (The README's has a spec of its own.)
local shell = require "spec.support.shell"

describe("the examples of", function()
  for _, document in ipairs { "docs/embedding_tables.md", "docs/sharded_tables.md", "docs/sparse_operators.md" } do
    it(document, function()
      local count = 0
      for block in shell.read(document):gmatch "```lua\n(.-)```" do
        assert(loadstring(block, "=" .. document))()
        count = count + 1
      end
      assert.equal(1, count)
    end)
  end
end)
