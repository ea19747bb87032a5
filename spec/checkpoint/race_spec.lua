-- Another process saves a checkpoint, or an increment of one, while this one compacts, replaces or removes that one,
-- just before any call that changes a name: what either of them said that it saved is there, and can be read.
-- takes: 5 s
local shell = require "spec.support.shell"

describe("a checkpoint that another process saves meanwhile", function()
  local folder, clean = shell.temporary()
  local compile, why = shell.preloaded(folder, "io_faults")
  teardown(clean)
  if not compile then return pending(why) end
  local library
  setup(function() library = compile() end)

  -- What this process does, and the other one meanwhile.
  for _, pair in ipairs { "compact replace", "compact_into replace", "remove replace", "replace increment" } do
    it("is not lost: " .. pair, function()
      local env = shell.luajit_env()
      env.LD_PRELOAD = library
      local of = ("%s/%s/in"):format(folder, pair:gsub(" ", "-"))
      local out, status = shell.run(("mkdir -p %s; exec luajit spec/support/io_race.lua %s %s"):format(of, of, pair),
        env)
      assert.equal(0, status, out)
      assert.is_true(tonumber(out:match "^(%d+) times, %d+ refused\n$") > 0, out)
    end)
  end
end)
