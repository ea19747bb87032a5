-- The same error of several ranks is told once, with the ranks.
-- deadline: 120 s
-- takes: 10 s, mostly waits
local shell = require "spec.support.shell"
local reports = require "perilune.launch.reports"

--- What the launcher prints of errors that ranks send: a list of { rank, message, details }.
local function told(ranks, list)
  local R = reports.new(ranks)
  for _, e in ipairs(list) do
    local rank, text = reports.note(e[1], e[2], e[3] or ""):match "^\30error (%d+) 0 ([^\n]*)\n$"
    R.take(tonumber(rank), text)
  end
  return R.flush(), R
end

describe("reports of ranks", function()
  it("are put together", function()
    assert.equal("[ranks 0-3] x (s.lua:1)\n",
      (told(4, { { 2, "x (s.lua:1)" }, { 0, "x (s.lua:1)" }, { 3, "x (s.lua:1)" },
      { 1, "x (s.lua:1)" } })))
    assert.equal("[ranks 0, 2, 4-6] low\n[rank 1] high\n",
      (told(8, { { 4, "low" }, { 1, "high" }, { 0, "low" }, { 2, "low" }, { 6, "low" }, { 5, "low" } })))
    assert.equal("perilune: alone\n", (told(1, { { 0, "alone" } })))
  end)

  it("keep the lines of messages, and the stack of the first", function()
    assert.equal("[ranks 0-1] one\ntwo\nstack traceback:\n\ta\n", (told(2, { { 1, "one\ntwo", "stack traceback:\n\ta" },
      { 0, "one\ntwo", "stack traceback:\n\tb" } })))
    local text = told(2, { { 0, "long", ("x"):rep(10000) } })
    assert.is_true(#reports.note(0, "long", ("x"):rep(10000)) < 4096 and #text > 1000)
  end)

  it("are the same when each rank names itself only", function()
    local function message(r)
      return ("rank %d of 3 in group 'world', operation 2: barrier: waiting for rank 1 (s.lua:4)"):format(r)
    end
    assert.equal("[ranks 0, 2] one rank of 3 in group 'world', operation 2: barrier: waiting for rank 1 (s.lua:4)\n",
      (told(3, { { 0, message(0) }, { 2, message(2) } })))
    assert.equal("[rank 2] " .. message(2) .. "\n", (told(3, { { 2, message(2) } })))
  end)

  it("are told once", function()
    local _, R = told(2, { { 0, "x" } })
    assert.equal("", R.flush())
    assert.equal(0, R.count)
  end)
end)

describe("the launcher", function()
  local missing = shell.no_launcher() or not shell.has "mpirun" and "mpirun was not found"
  if missing then return it("runs", function() pending(missing) end) end
  local folder, clean
  setup(function() folder, clean = shell.temporary() end)
  teardown(function() clean() end)

  local function run(n, text, env)
    local path = shell.write(folder .. "/script.lua",
      "local peri = require 'perilune'\nperi.init()\nlocal rank = peri.rank()\n" .. text)
    local out, status = shell.run(("%s run -n %d %s"):format(shell.perilune, n, path), env)
    assert.equal(1, status)
    return (out:gsub(folder:gsub("%p", "%%%0") .. "/", ""))
  end

  it("tells an error of all ranks once, and those of some with their ranks", function()
    assert.equal("[ranks 0-2] Linear: argument 'in_features' is missing (script.lua:4)\n",
      run(3, "peri.world():barrier():wait() peri.nn.Linear { out_features = 3 }"))
    local out = run(3, "peri.world():barrier():wait() error(rank == 1 and 'high' or 'low')")
    assert.matches("[ranks 0, 2] low (script.lua:4)\n", out, 1, true)
    assert.matches("[rank 1] high (script.lua:4)\n", out, 1, true)
    assert.equal(2, select(2, out:gsub("\n", "")), out)
  end)

  it("does so with stacks", function()
    local out = run(2, "peri.world():barrier():wait()\nperi.scope(function() error 'x' end)", { PERI_TRACEBACK = "1" })
    assert.matches("^%[ranks 0%-1%] x %(script.lua:5%)\nstack traceback:\n", out)
    assert.equal(1, select(2, out:gsub("stack traceback", "")), out)
  end)

  it("tells the error of one rank, and who died, at once", function()
    local started = os.time()
    local said = run(3, "if rank == 1 then error 'only me' end peri.world():barrier():wait()")
    local first, others = said:match "^(.-\n)(.*)$"
    assert.equal("[rank 1] only me (script.lua:4)\n", first)
    -- on a busy machine the others learn that it gave up before they are ended
    if others ~= "" then assert.matches("^%[ranks? [02, ]+%] [^\n]*rank 1 gave up: only me [^\n]*\n$", others) end
    assert.is_true(os.time() - started < 20)
    local path = shell.write(folder .. "/dies.lua", [[
      local peri = require "perilune"
      peri.init()
      if peri.rank() == 1 then os.execute "kill -9 $PPID" end
      os.execute "sleep 1"
      error "with one rank dead"]])
    local out = shell.run(shell.perilune .. " run -n 3 " .. path)
    assert.matches("perilune: rank 1 %(process [^\n]*was killed by signal 9", out)
  end)
end)
