-- A call on files that fails, each in turn, while checkpoints and increments are saved and old ones are removed:
-- what is newest afterwards is the new one if saving raised no error, else the one before, and each that is there is
-- whole. What could not be removed is removed later.
-- takes: 4 s
local shell = require "spec.support.shell"

describe("a call on files that fails", function()
  local folder, clean = shell.temporary()
  local compile, why = shell.preloaded(folder, "io_faults")
  teardown(clean)
  if not compile then return pending(why) end
  local library
  setup(function() library = compile() end)

  for _, what in ipairs { "increments", "keep", "replace" } do
    it("leaves the old checkpoint or the new one: " .. what, function()
      local env = shell.luajit_env()
      env.LD_PRELOAD = library
      local of = folder .. "/" .. what
      local out, status = shell.run(("mkdir %s; exec luajit spec/support/io_faults.lua %s %s"):format(of, of, what),
        env, 60)
      assert.equal(0, status, out)
      local calls, errors = out:match "(%d+) calls, (%d+) errors\n$"
      assert.is_true(tonumber(calls) > 20 and tonumber(errors) > 5, out)
    end)
  end
end)
