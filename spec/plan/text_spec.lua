-- Plans and topologies as Lua text: what is written is read back, nothing that is read runs, and no text breaks the
-- reader.
local peri = require "perilune"
local text = require "perilune.text"
local shell = require "spec.support.shell"
local plan = peri.plan

local function example()
  return plan.ShardingPlan {
    [""] = { only = plan.data_parallel() },
    ["towers.0.ebc"] = {
      users = plan.row_wise { ranks = { 2, 0 }, sizes = { 7, 3 } },
      ["end"] = plan.table_wise(1, { compute_kernel = "dense" }),
      ["odd \"name\"\n\0\127\\ 'x'"] = plan.column_wise { ranks = { 0, 1, 0 } },
      cached = plan.row_wise { compute_kernel = "fused_uvm_caching",
        cache_params = { algorithm = "LFU", load_factor = 0.1 } },
      grid = plan.grid_shard { 0, 1 },
    },
  }
end

--- f while everything that could run a text is an error.
local function without_code(f)
  local names, saved = { "load", "loadstring", "loadfile", "dofile", "setfenv" }, {}
  for _, name in ipairs(names) do
    saved[name] = _G[name]
    _G[name] = function() error("the reader ran something: " .. name, 0) end
  end
  local ok, err = pcall(f)
  for _, name in ipairs(names) do _G[name] = saved[name] end
  if not ok then error(err, 0) end
end

describe("a plan as Lua text", function()
  it("says what the plan says, and is Lua", function()
    local written = plan.to_text(example(), "made by hand\nfor a test")
    assert.matches("^%-%- made by hand\n%-%- for a test\nreturn {\n  perilune_plan = 1,\n", written)
    without_code(function() assert.equal(tostring(example()), tostring(plan.from_text(written))) end)
    assert.equal(written:gsub("^%-%-[^\n]*\n%-%-[^\n]*\n", ""), plan.to_text(plan.from_text(written)))
    local as_lua = assert(loadstring(written))()
    assert.equal("row_wise", as_lua.modules["towers.0.ebc"].users.sharding_type)
    assert.same({ 2, 0 }, as_lua.modules["towers.0.ebc"].users.ranks)
  end)

  it("is loaded from a .plan file", function()
    local path = os.tmpname() .. ".plan"
    plan.save(example(), path)
    without_code(function() assert.equal(tostring(example()), tostring(plan.load(path))) end)
    os.remove(path)
  end)

  it("refuses what is not data, with its line", function()
    local function refused(words, body)
      assert.error_matches(function() plan.from_text("return {\n  perilune_plan = 1,\n  modules = " .. body
        .. "\n}") end, words)
    end
    refused("line 3: 'os.execute' where a value is wanted", "os.execute 'true'")
    refused("line 3: '%(' where a value is wanted", "(function() end)()")
    refused("line 3: 'function' where a value is wanted", "function() end")
    refused("line 3: '%.%.' where ',' or '}' is wanted", '{ ["m"] = { t = "a" .. "b" } }')
    refused("with keys and with values", "{ a = 1, 2 }")
    refused("the key 'a' comes twice", "{ a = {}, a = {} }")
    refused("a string without an end", '{ ["m')
    refused("'%[' as a key", "{ [[m]] = 1 }")
    refused("a long comment", "--[[ x ]] {}")
    refused("module 'm', table 't': no key 'rank'", '{ m = { t = { sharding_type = "table_wise", rank = 1 } } }')
    refused("tables within tables", ("{ a = "):rep(40) .. "1" .. (" }"):rep(40))
    assert.error_matches(function() plan.from_text "return { perilune_plan = 1, modules = {} } os.exit()" end,
      "'os.exit' after the data")
    assert.error_matches(function() plan.from_text "return { perilune_plan = 2, modules = {} }" end,
      "version of the format%) is 2")
  end)

  it("survives texts that are broken at random: each is a plan or a named error", function()
    local base, state = plan.to_text(example()), 7
    local function draw(n)
      state = 16807 * state % 2147483647
      return state % n + 1
    end
    local pieces = { "{", "}", "=", ",", '"', "'", "\\", "[", "]", "--", "return", "nil", "1e999", "-", "0x",
      "function", "\0", "\255", "(", "..", "{ { } }", "true", "sharding_type", "ranks = { -1 }", "\n" }
    local plans, errors = 0, 0
    without_code(function()
      for _ = 1, 3000 do
        local t = base
        for _ = 1, draw(4) do
          local from, n = draw(#t), draw(12) - 1
          t = t:sub(1, from) .. (draw(2) == 1 and pieces[draw(#pieces)] or "") .. t:sub(from + n)
        end
        local ok, result = pcall(plan.from_text, t)
        if ok then
          assert(plan.ShardingPlan.is(result))
          plans = plans + 1
        else
          assert(getmetatable(result) == peri.ffi.Error, tostring(result))
          assert(#result.message < 2000 and result.message:match "^plan%.from_text", result.message)
          errors = errors + 1
        end
      end
    end)
    assert.is_true(plans > 10 and errors > 1000, plans .. " plans, " .. errors .. " errors")
  end)
end)

describe("data as text", function()
  it("reads numbers, strings and lists as Lua does", function()
    for _, t in ipairs { '{ 1, -2.5, 1e-3, 0x10, 1E+5, .5 }', [[{ "a\tb\065\"", 'it"s', "\
" }]], "{ a = { { 1 }, { } }; b = true }",
      "{ -- note\n 1; --[ no long one\n}" } do
      assert.same(assert(loadstring("return " .. t))(), (text.decode(t, "text")), t)
    end
  end)

  it("keeps topologies, over presets and arguments", function()
    local path = os.tmpname()
    local t = plan.Topology { world_size = 8, local_world_size = 4, compute_device = "cuda", hbm_cap = 2 ^ 33,
      inter_host_bw = 1e6 / 3 }
    t:save(path)
    local back = plan.Topology.load(path)
    assert.same(t:arguments(), back:arguments())
    assert.same(t.devices, back.devices)
    assert.equal(4, plan.Topology.load(path, { world_size = 4 }).world_size)
    local file = assert(io.open(path, "w"))
    file:write 'return { perilune_topology = 1, preset = "dgx_h100_80gb", world_size = 16 }'
    file:close()
    assert.equal(80 * 2 ^ 30, plan.Topology.load(path).devices[16].hbm)
    os.remove(path)
  end)

  --- What plan.Topology.load says of a file of 4 ranks, 2 a host, with these fields over it.
  local function loaded(fields, over)
    local says = { perilune_topology = "1", world_size = "4", local_world_size = "2" }
    for name, value in pairs(fields) do says[name] = value or nil end
    local words = {}
    for name, value in peri.util.ordered(says) do words[#words + 1] = ("%s = %s"):format(name, value) end
    local path = shell.write(os.tmpname(), ("return { %s }"):format(table.concat(words, ", ")))
    local ok, found = pcall(plan.Topology.load, path, over)
    os.remove(path)
    return ok and found or tostring(found)
  end

  it("refuses fields of files by their names and ranges, also those that arguments go over", function()
    local ranks, hosts = "whole numbers 1..1048576", "whole numbers 1..2"
    for _, case in ipairs {
      { "hosts_sharing", '"x"', "is 'x', wanted a number" }, { "hosts_sharing", "true", "is true, wanted a number" },
      { "hosts_sharing", "{}", "is a table, wanted a number" }, { "hosts_sharing", "3", "is 3, allowed: " .. hosts },
      { "hosts_sharing", "1e400", "is inf, allowed: " .. hosts },
      { "hosts_sharing", "1.5", "is 1.5, allowed: " .. hosts },
      { "local_world_size", '"x"', "is 'x', wanted a number" },
      { "local_world_size", "{}", "is a table, wanted a number" },
      { "local_world_size", "1e400", "is inf, allowed: whole numbers 1..4" },
      { "local_world_size", "0", "is 0, allowed: whole numbers 1..4" },
      { "world_size", '"x"', "is 'x', wanted a number" }, { "world_size", "-1", "is -1, allowed: " .. ranks },
      { "world_size", "1.5", "is 1.5, allowed: " .. ranks }, { "world_size", "0", "is 0, allowed: " .. ranks },
      { "inter_host_bw", "{}", "is a table, wanted a number" },
      { "compute_device", "{}", "is a table, allowed: cpu, cuda" },
      { "rates", "{ copy = {} }", "rates.copy is a table, allowed: finite numbers > 0" },
      { "rates", "{ copy = 0 }", "rates.copy is 0, allowed: finite numbers > 0" },
      { "rates", "{ cop = 1 }", "a key of rates is 'cop', allowed: copy, gather, update, products" },
      { "costs", "{ forward = { step = {} }, backward = {} }", "costs.forward.step is a table, allowed: finite" },
      { "costs", "{ forward = { step = 1 } }", "costs.backward is missing" },
      { "costs", "{}", "costs.forward is missing" },
      { "choices", '{ copy_by = "nobody" }', "choices.copy_by is 'nobody', allowed: receiver, sender" },
      { "choices", "{ copy_by = 3 }", "choices.copy_by is 3, allowed: receiver, sender" },
      { "choices", '{ none = "on" }', "choices.none: there is no such choice, but copy_block, " },
    } do
      for _, over in ipairs { {}, { world_size = 2 } } do
        local said = loaded({ [case[1]] = case[2] }, over)
        assert.matches("Topology: " .. ((case[3]:find "^%l+%." or case[3]:find "^a key") and "" or case[1] .. " "),
          said, 1, true)
        assert.matches(case[3], said, 1, true)
      end
    end
    local six = loaded({ world_size = "6", hosts_sharing = "2" })
    assert.matches("hosts_sharing is 2 of 3 hosts, allowed: what divides them", six, 1, true)
  end)

  it("keeps what hosts share when other numbers of ranks are asked for", function()
    for ranks, sharing in pairs { 1, 1, [4] = 2, [8] = 4 } do
      assert.equal(sharing, loaded({ hosts_sharing = "2" }, { world_size = ranks }).hosts_sharing)
    end
    assert.equal(1, loaded({}, { world_size = 8 }).hosts_sharing)
  end)

  it("takes no default for what was measured with prices", function()
    local prices = {}
    for i, unit in ipairs(require("perilune.plan.topology").units) do prices[i] = unit .. " = 1" end
    local all = ("{ %s }"):format(table.concat(prices, ", "))
    local whole = { costs = ("{ forward = %s, backward = %s }"):format(all, all), ddr_mem_bw = "1e6",
      cache_bytes = "1e6", core_cache_bytes = "1e5",
      intra_host_bw = "1e6", intra_host_latency = "0", inter_host_bw = "1e5", inter_host_latency = "0" }
    assert.is_true(plan.Topology.is(loaded(whole)))
    whole.local_world_size = "2"
    for name in pairs(whole) do
      if name ~= "costs" then
        local fields = peri.util.copy(whole)
        fields[name] = false
        local said = loaded(fields)
        assert.matches(("costs were measured, and %s is missing for 4 ranks"):format(name), said, 1, true)
      end
    end
    local fewer = peri.util.copy(whole)
    fewer.costs = fewer.costs:gsub("row = 1, ", "", 1)
    assert.matches("costs.forward.row is missing: measure again", loaded(fewer), 1, true)
    -- nor for links that were not measured, because there were none
    local alone = { world_size = "1", local_world_size = "1", costs = whole.costs, ddr_mem_bw = "1e6",
      cache_bytes = "1e6", core_cache_bytes = "1e5" }
    assert.is_true(plan.Topology.is(loaded(alone)))
    assert.matches("intra_host_bw is missing for 4 ranks, 4 a host: measure them (perilune calibrate -n 4), or say it",
      loaded(alone, { world_size = 4, local_world_size = 4 }), 1, true)
    assert.matches("inter_host_bw is missing for 4 ranks, 1 a host", loaded(alone, { world_size = 4 }), 1, true)
    assert.is_true(plan.Topology.is(loaded(alone, { world_size = 4, inter_host_bw = 1e5, inter_host_latency = 0.1 })))
    local path = os.tmpname() -- and what is measured is written, also where it is what a default is
    local t = plan.Topology { world_size = 4, local_world_size = 2, costs = loaded(whole).costs }
    t:save(path)
    assert.same(t:arguments(), plan.Topology.load(path):arguments())
    os.remove(path)
  end)

  it("refuses prices of what is not priced, as files of other builds have them", function()
    local path = os.tmpname()
    local file = assert(io.open(path, "w"))
    file:write("return { perilune_topology = 1, world_size = 2, costs = { forward = { sorted_id = 1e-6 }, backward = "
      .. "{ step = 1 } } }")
    file:close()
    local ok, err = pcall(plan.Topology.load, path)
    os.remove(path)
    assert.is_false(ok)
    assert.matches("costs%.forward%.sorted_id: there is no such unit, but step, table, .*, far_mixed; .*measure again",
      tostring(err))
  end)

  it("names the machines that there are where a name is none", function()
    local ok, err = pcall(plan.report._topology, "dgx_h100_80g")
    assert.is_false(ok)
    assert.matches("topology 'dgx_h100_80g': there is no such file, nor a machine of that name, but "
      .. "cpu_ethernet_100g, .*dgx_h100_80gb", tostring(err))
    ok, err = pcall(plan.report._topology, "./none.topology")
    assert.is_false(ok)
    assert.matches("./none.topology: No such file or directory", tostring(err))
  end)
end)

describe("files that are written", function()
  local folder, clean
  setup(function() folder, clean = shell.temporary() end)
  teardown(function() clean() end)
  local function names() return (shell.run("ls -A " .. folder):gsub("%s+", " ")) end

  it("are there whole or as they were, and leave nothing beside them", function()
    local path = folder .. "/a"
    text.write(path, "first", "f")
    assert.equal("first", text.read(path, "f"))
    assert.equal("a ", names())
    text.probe(path, "f")
    text.probe(folder .. "/none", "f")
    assert.equal("first", text.read(path, "f"))
    assert.equal("a ", names())
    -- a file that cannot grow: what was there stays
    local script = ("require('perilune.text').write('%s', ('x'):rep(99999), 'f')"):format(path)
    shell.write(path .. ".lua", script)
    local out = shell.run(("ulimit -f 1; trap '' XFSZ; luajit %s.lua; rm %s.lua"):format(path, path),
      shell.luajit_env())
    assert.matches("f: [^\n]*/a: File too large", out)
    assert.equal("first", text.read(path, "f"))
    assert.equal("a ", names())
    os.remove(path)
  end)

  it("say where they cannot be", function()
    assert.error_matches(function() text.write(folder .. "/no/a", "x", "f") end,
      "^f: .*/no/a: No such file or directory")
    assert.error_matches(function() text.probe(folder .. "/no/a", "f") end, "^f: .*/no/a: No such file or directory")
    assert.error_matches(function() text.probe(folder, "f") end, "Is a directory")
    text.write(folder .. "/made/for/a", "x", "f", true)
    assert.equal("x", text.read(folder .. "/made/for/a", "f"))
    shell.run(("rm -r %s/made"):format(folder))
  end)

  it("follow links, and go into what is no plain file", function()
    shell.run(("cd %s; mkdir d; ln -s d/a l"):format(folder))
    text.write(folder .. "/l", "one", "f") -- of a link that points at nothing, the link
    shell.run(("cd %s; rm l; echo old > d/a; chmod 600 d/a; ln -s d/a l"):format(folder))
    text.write(folder .. "/l", "two", "f")
    assert.equal("two", text.read(folder .. "/d/a", "f"))
    assert.matches("^l%S+ .*%-> d/a", shell.run(("ls -l %s/l"):format(folder)))
    assert.matches("^%-rw%-%-%-%-%-%-%-", shell.run(("ls -l %s/d/a"):format(folder)))
    text.write("/dev/null", "x", "f")
    assert.matches("^c", shell.run "ls -l /dev/null")
  end)
end)

describe("a plan that is saved", function()
  it("is what plan.load reads, by the end of the name", function()
    local folder, clean = shell.temporary()
    for _, name in ipairs { "a.plan", "a.json" } do
      plan.save(example(), folder .. "/" .. name, "a note")
      assert.equal(tostring(example()), tostring(plan.load(folder .. "/" .. name)))
    end
    assert.matches("^{\n  \"perilune_plan\": 1", text.read(folder .. "/a.json", "spec"))
    clean()
  end)
end)

describe("a kept topology", function()
  local script = [[
    local peri = require "perilune"
    local function bags() return peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 10, embedding_dim = 4,
      feature_names = { "f" } } }, fused_params = { optimizer = "sgd", learning_rate = 0.1 } } end
    for _ = 1, 2 do print(peri.DistributedModelParallel { module = bags() }.plan) end
    print(peri.plan.Topology.kept_path(1, 1))]]
  local folder, clean
  setup(function() folder, clean = shell.temporary() end)
  teardown(function() clean() end)

  local function run(more)
    local env = shell.luajit_env()
    env.XDG_CACHE_HOME, env.PERI_NUM_THREADS = folder, 1
    return shell.run("luajit " .. shell.write(folder .. "/script.lua", script .. (more or "")), env)
  end

  local function kept_path()
    local out = run()
    return out:match "\n(/%S+)%s*$" or error(out)
  end

  it("that cannot be read stops no plan, is told once, and says who measures it again", function()
    local path = kept_path()
    text.write(path, "", "spec", true)
    local out, status = run()
    assert.equal(0, status, out)
    local told = "perilune: plans go by default prices: topology '[^\n]*line 1: [^\n]*perilune calibrate %-n 1 "
      .. "measures it again"
    local _, times = out:gsub(told, "")
    assert.equal(1, times, out)
    assert.matches("table_wise", out)
    out, status = run "\nperi.plan.Topology.kept(1, 1)"
    assert.is_true(status ~= 0)
    assert.matches("perilune calibrate has kept it of this machine: perilune calibrate %-n 1 measures it again", out)
  end)

  it("of other numbers of threads is used, and told once", function()
    local path = kept_path()
    plan.Topology({ world_size = 1, threads = 3 }):save(path)
    local out, status = run()
    assert.equal(0, status, out)
    local _, times = out:gsub("measured with 3 worker threads a rank, here is 1: perilune calibrate %-n 1 %-t 1 "
      .. "measures those", "")
    assert.equal(1, times, out)
    plan.Topology({ world_size = 1, threads = 1 }):save(path)
    assert.is_nil(run():find("perilune:", 1, true))
  end)
end)
