-- Whose line an error names: the script's, whatever of Perilune lies between, under the launcher (packed Lua files) and
-- plain luajit.
local shell = require "spec.support.shell"
local errors = require "perilune.errors"
local peri = require "perilune"
local P, nn = peri.ffi, peri.nn

local folder, clean
setup(function() folder, clean = shell.temporary() end)
teardown(function() clean() end)

--- What a script prints that fails: its last lines from the message on, with the folder's name left out.
local function run(text, command, env)
  shell.write(folder .. "/script.lua", text)
  local out, status = shell.run(("cd %s && %s script.lua"):format(folder, command), env)
  assert.equal(1, status, out)
  return (out:gsub("^luajit: ", "perilune: "))
end

local here = shell.run("pwd"):match "^[^\n]*"

local model = [[
local peri = require "perilune"
local nn = peri.nn
local Model = nn.Module:extend "Model"
function Model:init()
  self.over_arch = nn.Module:extend "Over" ()
  self.over_arch.model = nn.Sequential { nn.Linear { in_features = 15, out_features = 3 } }
  function self.over_arch.forward(over, x)
    return over.model(x)
  end
end
function Model:forward(x)
  if type(x) == "number" then
    local t
    return t.field + x
  end
  return (self.over_arch(x))
end
local model = Model()
]]

local shape = "over_arch.model.0: Linear: x is [4, 16], wanted [*, 15] (script.lua:8)\n"
local cases = {
  { "C", "local peri = require 'perilune'\nperi.empty { -3 }",
    "peri_tensor_new: the size -3 of the 1st dimension is negative (script.lua:2)\n" },
  { "named arguments", model .. "nn.Linear { in_feature = 1 }",
    "Linear: no argument 'in_feature'; allowed: bias, device, dtype, in_features, out_features (script.lua:19)\n" },
  { "a module", model .. "model(peri.zeros { 4, 16 })", shape },
  { "a module in a scope", model .. "peri.scope(function() model(peri.zeros { 4, 16 }) end)", shape },
  { "a module in a pipeline", model .. [[
local n = 0
local pipeline = peri.TrainPipelineBase { model = peri.DistributedModelParallel { module = model, plan = {} }, optimizer = false }
for _ in pipeline:run(function() n = n + 1 return peri.zeros { 4, n + 15 } end) do end]], shape },
  { "no_grad", model .. "peri.no_grad(function() model(peri.zeros { 4, 16 }) end)", shape },
  { "an awaitable's callback", model .. "peri.NoWait(peri.zeros { 4, 16 }):and_then(model):wait()", shape },
  { "a plan's file", model .. [[
local file = io.open("plan.lua", "w")
file:write "local plan = require 'perilune.plan'\nreturn plan.ParameterSharding {}"
file:close()
peri.DistributedModelParallel { module = model, plan = "plan.lua" }]],
    "ParameterSharding: argument 'sharding_type' is missing (plan.lua:2)\n" },
  { "tail calls of scopes", "local peri = require 'perilune'\nperi.scope(function()\n  return peri.empty { -3 }\nend)",
    "peri_tensor_new: the size -3 of the 1st dimension is negative (script.lua:3)\n" },
  { "a plan's syntax", model .. [[
local file = io.open("plan.lua", "w")
file:write "return {\n t = = 1 }"
file:close()
peri.DistributedModelParallel { module = model, plan = "plan.lua" }]], "plan: unexpected symbol near '=' (plan.lua:2)\n" },
}

-- A function of Perilune that forgot to check its arguments.
local unforeseen = [[
local peri = require "perilune"
local measure = loadstring("local function measure(a, b) local n = a.size + b return n end return measure", "=perilune/example.lua")()
peri.scope(function()
  local _ = measure("x", nil)
end)
]]

--- Errors of the script itself: Perilune's handler adds the path and the place, so these need one.
local own = {
  { "a field of nil, in a module", model .. "peri.scope(function() peri.nn.Sequential { model, model }(1) end)",
    "0: attempt to index local 't' (a nil value) (script.lua:14)\n" },
  { "error with a text", "local peri = require 'perilune'\nperi.scope(function()\n  error 'stop'\nend)",
    "stop (script.lua:3)\n" },
  { "an argument that no check foresees", unforeseen,
    "measure('x', nil): these arguments do not fit (PERI_TRACEBACK=1 tells where) (script.lua:4)\n" },
}

describe("the place of an error from", function()
  for _, case in ipairs(cases) do
    it(case[1] .. ", plain luajit", function()
      local out = run(case[2], "luajit", shell.luajit_env())
      assert.equal("perilune: " .. case[3], out:sub(1, #case[3] + 10))
    end)
    it(case[1] .. ", launcher", function()
      if shell.no_launcher() then return pending(shell.no_launcher()) end
      assert.equal("perilune: " .. case[3], run(case[2], here .. "/" .. shell.perilune .. " run"))
    end)
  end
  for _, case in ipairs(own) do
    it(case[1], function()
      local out = run(case[2], "luajit", shell.luajit_env())
      assert.equal("perilune: " .. case[3], out:sub(1, #case[3] + 10))
    end)
  end

  it("ranks that take turns", function()
    local ok, err = pcall(require("perilune.dist.sim").run, 3, function(rank)
      if rank == 1 then peri.empty { -1 } end
    end)
    assert.is_false(ok)
    local line = debug.getinfo(1, "l").currentline - 3
    assert.equal(("rank 1 of 3: peri_tensor_new: the size -1 of the 1st dimension is negative "
      .. "(spec/errors_spec.lua:%d)"):format(line), tostring(err))
    assert.equal(1, err.rank)
  end)
end)

describe("the launcher's report", function()
  if shell.no_launcher() then return it("is there", function() pending(shell.no_launcher()) end) end
  local function launch(text, env) return run(text, here .. "/" .. shell.perilune .. " run", env) end

  it("adds the place to what scripts raise, and shows values as they are", function()
    assert.equal("perilune: stop (script.lua:1)\n", launch "error('stop', 0)")
    local head = "local peri = require 'perilune'\n"
    assert.equal("perilune: stop (script.lua:3)\n", launch(head .. "pcall(error, 'stop', 0)\nerror('stop', 0)"))
    assert.equal("perilune: stop (script.lua:3)\n", launch(head .. "peri.scope(function()\nerror('stop', 0) end)"))
    assert.equal("perilune: the script raised a table: {} (script.lua:1)\n", launch "error {}")
    assert.equal("perilune: the script raised a table: { code = 5 } (script.lua:1)\n", launch "error { code = 5 }")
    assert.equal("perilune: the script raised a table (script.lua:1)\n", launch "error { 1, 2 }")
    assert.equal("perilune: an error without a message (script.lua:1)\n", launch "error()")
    assert.equal("perilune: '=' expected near 'bad' (script.lua:2)\n", launch "\nvery bad")
  end)

  it("shows the stack through scopes and pipelines", function()
    local out = launch(model .. [[
local function batches() return 1 end
local pipeline = peri.TrainPipelineBase { model = model, optimizer = false }
for _ in pipeline:run(batches) do end]], { PERI_TRACEBACK = "1" })
    assert.matches("^perilune: attempt to index local 't' %(a nil value%) %(script.lua:14%)\nstack traceback:\n", out)
    assert.matches("\n\tscript.lua:14: in function 'forward'\n.*\n\tperilune/pipeline/pipeline.lua:%d+: ", out)
    assert.matches("\n\tscript.lua:21: in function", out)
    out = launch(model .. "peri.no_grad(function()\nmodel(peri.zeros { 4, 16 })\nend)", { PERI_TRACEBACK = "1" })
    assert.matches("\nEINVAL in runtime/tensor/ops_matmul%.c:%d+\nstack traceback:\n.*\n\tscript.lua:20: in function",
      out)
    out = launch(unforeseen, { PERI_TRACEBACK = "1" })
    assert.matches("^perilune: measure%('x', nil%): these arguments do not fit "
      .. "%(script.lua:4%)\nperilune/example.lua:1: attempt to ", out)
  end)
end)

describe("errors", function()
  it("of scripts keep their values inside scopes", function()
    local thrown = { "mine" }
    for _, value in ipairs { thrown, "stop", 7 } do
      local ok, err = pcall(peri.scope, function() peri.scope(error, value, 0) end)
      assert.is_false(ok)
      assert.is_true(rawequal(value, err))
    end
  end)

  it("join texts", function()
    local ok, err = pcall(peri.empty, { -1 })
    assert.is_false(ok)
    assert.matches("^it failed: peri_tensor_new: .*spec/errors_spec%.lua:%d+%)!$", "it failed: " .. err .. "!")
  end)

  it("name the line of the only tail call, or where the function begins", function()
    local Model = nn.Module:extend "Model"
    function Model:init(sub) self.sub = sub end
    local head = debug.getinfo(1, "l").currentline + 1
    function Model:forward(x)
      if x:dim() == 1 then
        return self.sub(x)
      end
      return self.sub(x)
    end
    local layer = nn.Linear { in_features = 2, out_features = 2 }
    local _, err = pcall(Model(layer), peri.zeros { 3 })
    assert.equal(("sub: Linear: x is [3], wanted [*, 2] (spec/errors_spec.lua:%d)"):format(head), tostring(err))
    function Model:forward(x)
      return self.sub(x)
    end
    _, err = pcall(Model(layer), peri.zeros { 3 })
    assert.equal(("sub: Linear: x is [3], wanted [*, 2] (spec/errors_spec.lua:%d)"):format(head + 10), tostring(err))
  end)

  it("cost nothing before they are raised, and are found in compiled code", function()
    local layer = nn.Linear { in_features = 2, out_features = 2 }
    local good, bad = peri.zeros { 1, 2 }, peri.zeros { 1, 3 }
    local ok, err = pcall(function()
      for i = 1, 300 do
        layer(i == 290 and bad or good)
      end
    end)
    assert.is_false(ok)
    local line = debug.getinfo(1, "l").currentline - 4
    assert.equal(("Linear: x is [1, 3], wanted [*, 2] (spec/errors_spec.lua:%d)"):format(line), tostring(err))
  end)

  it("look at no more than the end of a stack that has overflowed", function()
    local function deep() return deep() .. "x" end
    local began = os.clock()
    assert.is_false((pcall(peri.scope, errors.run, deep)))
    assert.is_true(os.clock() - began < 1, "it took 3 s where all levels were looked at")
  end)

  it("keep the stack when asked", function()
    errors.tracing = true
    local _, err = pcall(peri.empty, { -1 })
    errors.tracing = false
    assert.matches("^stack traceback:\n.*spec/errors_spec%.lua", err.trace)
    _, err = pcall(P.fail, "x")
    assert.is_nil(err.trace)
  end)
end)
