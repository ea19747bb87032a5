-- A call on files that fails, each in turn, while checkpoints and increments are saved, made full, loaded and removed:
-- what is newest afterwards is the new one if saving raised no error, else the one before, and each that is there is
-- whole. What could not be removed is removed later.
-- takes: 5 s
local peri = require "perilune"
local shell = require "spec.support.shell"

describe("a call on files that fails", function()
  local folder, clean = shell.temporary()
  local compile, why = shell.preloaded(folder, "io_faults")
  teardown(clean)
  if not compile then return pending(why) end
  local library
  setup(function() library = compile() end)

  -- What each call of fails: with which errno (0: it reads or writes half), and how far apart the calls are that do;
  -- PERI_TEST_KILLS has all of them.
  local all = os.getenv "PERI_TEST_KILLS"
  for what, how in peri.util.ordered { increments = { 5, 13 }, keep = { 5, 11 }, replace = { 5, 13 }, full = { 28, 13 },
    compact = { 5, 19 }, compact_into = { 5, 23 }, remove = { 5, 3 }, remove_read = { 5, 1 }, load = { 5, 5 },
    short = { 0, 23 }, absent = { 2, 1 } } do
    local errno, every = how[1], all and 1 or how[2]
    it("leaves the old checkpoint or the new one: " .. what, function()
      local env = shell.luajit_env()
      env.LD_PRELOAD = library
      local of = folder .. "/" .. what
      local out, status = shell.run(("mkdir %s; exec luajit spec/support/io_faults.lua %s %s %d %d"):format(of, of,
        ({ short = "compact_into", absent = "remove", full = "increments" })[what] or what, errno, every), env, 600)
      assert.equal(0, status, out)
      local calls, errors = out:match "(%d+) calls, (%d+) errors\n$"
      assert.is_true(tonumber(calls) > 5 and (tonumber(errors) > 1) == (errno > 0), out)
    end)
  end
end)
