-- A call on files that fails, each in turn, while checkpoints and increments are saved and old ones are removed:
-- what is newest afterwards is the new one if saving raised no error, else the one before, and each that is there is
-- whole. What could not be removed is removed later.
-- takes: 4 s
local shell = require "spec.support.shell"

describe("a call on files that fails", function()
  local cc = shell.has "cc" and "cc" or shell.has "gcc" and "gcc"
  if shell.sanitizer ~= "" then return pending "the sanitizers have calls of their own" end
  if not cc then return pending "no C compiler was found" end
  local folder, clean = shell.temporary()
  local library = folder .. "/io_faults.so"
  setup(function()
    local out, status = shell.run(("%s -shared -fPIC -o %s spec/support/io_faults.c -ldl"):format(cc, library))
    assert.equal(0, status, out)
  end)
  teardown(clean)

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
