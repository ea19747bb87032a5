-- Plans as data: what is written is read back, what is not a plan is refused by name, and nothing that is read runs.
local peri = require "perilune"
local shell = require "spec.support.shell"
local ffi = require "ffi"
local sim = require "perilune.dist.sim"
local plan, C = peri.plan, peri.ffi.C

local function example()
  return plan.ShardingPlan {
    [""] = { only = plan.data_parallel() },
    ["towers.0.ebc"] = {
      users = plan.row_wise { ranks = { 2, 0 }, sizes = { 7, 3 } },
      items = plan.table_wise(1, { compute_kernel = "dense" }),
      ["odd \"name\"\n"] = plan.column_wise { ranks = { 0, 1, 0 } },
      cached = plan.row_wise { compute_kernel = "fused_uvm_caching",
        cache_params = { algorithm = "LFU", load_factor = 0.1, ways = 8, reserved_memory = 4096, precision = "FP32",
          prefetch_pipeline = true } },
      plain = plan.row_wise { compute_kernel = "fused_uvm_caching" },
    },
  }
end

--- What C's reader of plans says of a text: nil, or the error's status and text. With `use`, a function(plan in C).
local plan_out = ffi.new "peri_plan *[1]"
local function in_c(text, use)
  local status = C.peri_plan_parse("p", text, #text, plan_out)
  if status < 0 then return ffi.string(C.peri_status_name(status)), ffi.string(C.peri_error_message()) end
  if use then use(plan_out[0]) end
  C.peri_plan_release(plan_out[0])
end

local function text_of(entry) return ('{"perilune_plan": 1, "modules": {"m": {"t": %s}}}'):format(entry) end

describe("a plan in JSON", function()
  it("says what the plan says, in a fixed order", function()
    local text = plan.to_json(example())
    assert.equal(tostring(example()), tostring(plan.from_json(text)))
    assert.equal(text, plan.to_json(plan.from_json(text)))
    assert.equal([[
{
  "perilune_plan": 1,
  "modules": {
    "ebc": {
      "a": {"sharding_type": "row_wise", "compute_kernel": "fused"},
      "b": {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [1]}
    }
  }
}
]], plan.to_json(plan.ShardingPlan { ebc = { a = plan.row_wise(), b = plan.table_wise(1) } }))
    local read = plan.from_json(text).plan["towers.0.ebc"].tables
    assert.same({ { 2, 0 }, { 7, 3 }, "dense", 0.1 }, { read.users.ranks, read.users.sizes, read.items.compute_kernel,
      read.cached.cache_params.load_factor })
  end)

  it("is a file that plan.load and DistributedModelParallel take", function()
    local folder, clean = shell.temporary()
    local path = folder .. "/plan.json"
    plan.save_json(plan.ShardingPlan { [""] = { t = plan.row_wise() } }, path)
    assert.equal("row_wise", plan.load(path, { world_size = 2 }).plan[""].tables.t.sharding_type)
    local model = peri.DistributedModelParallel { plan = path,
      module = peri.EmbeddingBagCollection { fused_params = { optimizer = "sgd" },
        tables = { peri.EmbeddingBagConfig { name = "t", num_embeddings = 9, embedding_dim = 4,
          feature_names = { "f" } } } } }
    assert.equal("row_wise", model.plan.plan[""].tables.t.sharding_type)
    -- A program under that name is no plan, and does not run.
    shell.write(path, ("local file = io.open('%s/ran', 'w') file:close() return {}"):format(folder))
    assert.error_matches(function() plan.load(path, { world_size = 2 }) end,
      "plan '.*plan.json': no valid JSON value at line 1, column 1")
    assert.error_matches(function() plan.load_json(path) end, "no valid JSON value")
    assert.is_nil(io.open(folder .. "/ran"))
    assert.error_matches(function() plan.load_json(folder .. "/none.json") end,
      "plan.load_json: .*none.json: No such file")
    assert.error_matches(function() plan.load_json(folder) end, "plan.load_json: ")
    assert.error_matches(function() plan.save_json(example(), folder .. "/no/plan.json") end,
      "plan.save_json: .*No such file")
    clean()
  end)

  for _, case in ipairs {
    { "", "plan.from_json: " }, { "  ", "plan.from_json: " }, { "[]", "the plan is a list, wanted an object" },
    { "7", "the plan is a number, wanted an object" }, { "{", "unterminated object" },
    { "null", "the plan is null, wanted an object" }, { "{}", "the plan: the key 'perilune_plan' is missing" },
    { '{"perilune_plan": 1}', "the plan: the key 'modules' is missing" },
    { '{"perilune_plan": 2, "modules": {}}', "perilune_plan %(the version of the format%) is 2, allowed: 1" },
    { '{"perilune_plan": 1, "modules": {}} {}', "there is more after the plan: '{}'" },
    { '{"perilune_plan": 1, "modules": {}, "comment": 3}',
      "the plan: no key 'comment'; allowed: modules, perilune_plan" },
    { '{"perilune_plan": 1, "modules": []}', "modules is a list, wanted an object" },
    { '{"perilune_plan": 1, "modules": {"m": 3}}', "module 'm' is a number, wanted an object" },
    { '{"perilune_plan": 1, "modules": {"m": {}, "m": {}}}', "the key 'm' comes twice" },
    { '{"perilune_plan": 1, "modules": {"m": null}}', "m is null" },
    { '{"perilune_plan": 1, "modules": {{}}}', "a value without a key in an object" },
    { text_of "3", "module 'm', table 't' is a number, wanted an object" },
    { text_of "{}", "module 'm', table 't': the key 'sharding_type' is missing" },
    { text_of '{"sharding_type": "row_wise", "rank": 1}',
      "table 't': no key 'rank'; allowed: cache_params, compute_kernel, hosts, ranks" },
    { text_of '{"sharding_type": "diagonal"}',
      "table 't': ParameterSharding: sharding_type 'diagonal', allowed: column_wise" },
    { text_of '{"sharding_type": {}}', "table 't': ParameterSharding: sharding_type 'table" },
    { text_of '{"sharding_type": "row_wise", "compute_kernel": "magic"}',
      "table 't': ParameterSharding: compute_kernel 'magic', allowed" },
    { text_of '{"sharding_type": "row_wise", "ranks": 1}', "table 't': ranks is a number, wanted a list" },
    { text_of '{"sharding_type": "row_wise", "ranks": {"0": 1}}', "table 't': ranks is an object, wanted a list" },
    { text_of '{"sharding_type": "row_wise", "ranks": ["0"]}',
      "table 't': ParameterSharding: ranks%[1%] is '0', wanted a whole number" },
    { text_of '{"sharding_type": "row_wise", "ranks": [1e999]}', "table 't': ParameterSharding: ranks%[1%] is inf" },
    { text_of '{"sharding_type": "row_wise", "ranks": [0], "sizes": [1, 2]}',
      "table 't': ParameterSharding: 2 sizes for 1 ranks" },
    { text_of '{"sharding_type": "row_wise", "ranks": null}', "ranks is null" },
    { text_of '{"sharding_type": "row_wise", "cache_params": {}}',
      "table 't': ParameterSharding: cache_params with compute_kernel 'fused'" },
    { text_of('{"sharding_type": "row_wise", "compute_kernel": "fused_uvm_caching", "cache_params": {"directory": '
      .. '"/tmp"}}'), "table 't': cache_params: no key 'directory'; allowed: algorithm, load_factor" },
    { text_of('{"sharding_type": "row_wise", "compute_kernel": "fused_uvm_caching", "cache_params": {"load_factor": '
      .. '2}}'), "table 't': CacheParams: load_factor is 2" },
    { text_of('{"sharding_type": "row_wise", "compute_kernel": "fused_uvm_caching", "cache_params": '
      .. '{"prefetch_pipeline": 1}}'), "table 't': cache_params: prefetch_pipeline is a number, wanted true or false" },
    { ("["):rep(200000), "plan.from_json: lists and objects within each other, 33 deep; allowed: 32" },
    { ('{"a":'):rep(200000), "plan.from_json: lists and objects within each other, 33 deep" },
    { '/* "[" */ {"perilune_plan": 1, "modules": {}}', "a comment at byte 1, which JSON has not" },
    { '{"perilune_plan": 1, "modules": {},}', "a comma at byte 35, before the end of a list or an object" },
    { '{"perilune_plan": 1 "modules": {}}', "a comma is missing before byte 21" },
    { '{"modules": {} "perilune_plan": 1}', "a comma is missing before byte 16" },
    { '{"perilune_plan": "1", "modules": {}}', "perilune_plan %(the version of the format%) is '1', allowed: 1" },
  } do
    it("refuses " .. case[1]:sub(1, 70), function()
      assert.error_matches(function() plan.from_json(case[1]) end, case[2])
      local status, message = in_c(case[1])
      assert.is_true(status == "EFORMAT" or status == "EINVAL", status)
      assert.matches("^plan 'p'", message)
    end)
  end

  it("is not made of what it cannot say", function()
    local cached = plan.row_wise { compute_kernel = "fused_uvm_caching", cache_params = { directory = "/tmp/rows" } }
    assert.error_matches(function() plan.to_json(plan.ShardingPlan { m = { t = cached } }) end,
      "module 'm', table 't': cache_params have a directory, which plans in files of data do not")
    assert.error_matches(function() plan.to_json {} end, "plan.to_json: a table, wanted a ShardingPlan")
    assert.error_matches(function() plan.from_json(nil) end, "plan.from_json: a nil, wanted a text")
  end)

  it("never does more than fail, whatever is in the text", function()
    local text = plan.to_json(example())
    local pieces = { "{", "}", "[", "]", ":", ",", '"', "null", "true", "1e999", "-1", "0", "\\u0000", "\\", "\255",
      "/*", "\n", '"ranks"', '"sharding_type"', '"row_wise"', '"x": 1,', "{}" }
    math.randomseed(20)
    local read, refused, in_c_too = 0, 0, 0
    for _ = 1, 2500 do
      local mutant = text
      for _ = 1, math.random(3) do
        local at, length, by = math.random(#mutant), math.random(0, 12), pieces[math.random(#pieces)]
        if math.random(3) == 1 then by = mutant:sub(math.random(#mutant), math.random(#mutant)):sub(1, 40) end
        mutant = mutant:sub(1, at - 1) .. by .. mutant:sub(at + length)
      end
      local ok, result = pcall(plan.from_json, mutant)
      if ok then
        read = read + 1
        local status, message = in_c(mutant)
        -- Lua's reader of JSON takes some that is none (escapes, a missing comma); numbers below 0 it leaves to those
        -- who make modules.
        if not status then in_c_too = in_c_too + 1 end
        assert.is_truthy(not status or status == "EFORMAT" or mutant:match "%-%d", (message or "") .. mutant)
        assert.equal(plan.to_json(result), plan.to_json(plan.from_json(plan.to_json(result))))
      else
        refused = refused + 1
        local message = type(result) == "table" and result.message or result
        assert.is_truthy(message:match "^plan%.from_json: ", message)
        assert.is_truthy(in_c(mutant), mutant)
      end
    end
    assert.is_true(read > 20 and refused > 400 and in_c_too > read / 2,
      ("%d read, %d in C, %d refused"):format(read, in_c_too, refused))
  end)

  it("says options by names that C lists", function()
    local value = ffi.new("int32_t[1]", 77)
    assert.equal(0, C.peri_option_value("sharding_type", "grid_shard", value))
    assert.equal(C.PERI_GRID_SHARD, value[0])
    assert.equal(0, C.peri_option_value("data_type", "INT4", value))
    assert.equal(C.PERI_ROWS_INT4, value[0])
    local refused = { pooling = "pooling is 'MAX', allowed: SUM, MEAN, NONE$",
      colour = "there is no option 'colour', allowed: pooling" }
    for option, text in peri.util.ordered(refused) do
      assert.equal(C.PERI_EINVAL, C.peri_option_value(option, "MAX", value))
      assert.matches(text, ffi.string(C.peri_error_message()))
      assert.equal(C.PERI_ROWS_INT4, value[0])
    end
    local types = peri.ffi.options "sharding_type"
    for name in peri.util.ordered(plan.ShardingType) do types[plan.ShardingType[name]] = nil end
    assert.same({}, types)
  end)

  it("is put into the tables of a C program as it is into those of a model", function()
    local shapes = { users = { 10, 8 }, items = { 30, 8 }, ['odd "name"\n'] = { 6, 12 }, cached = { 90, 4 },
      plain = { 50, 4 } }
    local text, names = plan.to_json(example()), peri.util.keys(shapes)
    sim.run(3, function(_, world)
      local tables, anchors = peri.ffi.structs("peri_sharded_table", #names), {}
      for i, name in ipairs(names) do
        anchors[i] = ffi.new("char[?]", #name + 1, name)
        tables[i - 1].name, tables[i - 1].rows, tables[i - 1].cols = anchors[i], shapes[name][1], shapes[name][2]
      end
      local function apply(p, path, n) return C.peri_plan_apply(p, path, world:ptr(), tables, n) end
      assert.is_nil(in_c(text, function(p)
        assert.equal(0, apply(p, "towers.0.ebc", #names), ffi.string(C.peri_error_message()))
        local entries = example().plan["towers.0.ebc"].tables
        for i, name in ipairs(names) do
          local t, e = tables[i - 1], entries[name]
          assert.equal(e.sharding_type, ffi.string(C.peri_sharding_type_name(t.sharding_type)))
          assert.equal(e.compute_kernel == "dense" and C.PERI_KERNEL_DENSE or C.PERI_KERNEL_FUSED, t.compute_kernel)
          for k = 1, t.n_ranks do assert.equal(e.ranks[k], t.ranks[k - 1]) end
          assert.equal(e.ranks and #e.ranks or 0, t.n_ranks)
          for k = 1, e.sizes and #e.sizes or 0 do assert.equal(e.sizes[k], tonumber(t.sizes[k - 1])) end
          assert.equal(e.compute_kernel == "fused_uvm_caching", t.cache ~= nil)
          assert.equal(not e.sizes, t.sizes == nil)
        end
        local cache = tables[peri.util.index_of(names).cached - 1].cache
        assert.same({ C.PERI_CACHE_LFU, 0.1, 8, 4096 }, { cache.algorithm, cache.load_factor, cache.ways,
          tonumber(cache.reserved_memory) })
        -- What does not fit changes nothing, and is named.
        local before = tables[0].ranks
        local function refused(path, n, text_wanted)
          assert.is_true(apply(p, path, n) < 0)
          assert.matches(text_wanted, ffi.string(C.peri_error_message()))
          assert.equal(before, tables[0].ranks)
        end
        refused("towers.1.ebc", #names, "plan 'p' has no module 'towers.1.ebc'; the first one is ''")
        refused("", 1, "module '' has no table 'cached'")
        refused("towers.0.ebc", #names - 1, "module 'towers.0.ebc' has a table 'users', which is not among those given")
        tables[peri.util.index_of(names).users - 1].rows = 11
        refused("towers.0.ebc", #names, "table 'users'.*10")
      end))
      -- hosts: all three ranks are on one node
      local hosts = text_of '{"sharding_type": "table_row_wise", "hosts": [0]}'
      local t = peri.ffi.structs("peri_sharded_table", 1)
      anchors.t = ffi.new("char[2]", "t")
      t[0].name, t[0].rows, t[0].cols = anchors.t, 9, 4
      assert.is_nil(in_c(hosts, function(p)
        assert.equal(0, C.peri_plan_apply(p, "m", world:ptr(), t, 1))
        assert.same({ 3, 0, 1, 2 }, { t[0].n_ranks, t[0].ranks[0], t[0].ranks[1], t[0].ranks[2] })
      end))
      assert.is_nil(in_c(hosts:gsub("%[0%]", "[1]"), function(p)
        assert.is_true(C.peri_plan_apply(p, "m", world:ptr(), t, 1) < 0)
        assert.matches("table 't': there is no host 1", ffi.string(C.peri_error_message()))
      end))
    end)
    local path = os.tmpname()
    shell.write(path, text)
    assert.equal(0, C.peri_plan_read(path, plan_out))
    C.peri_plan_retain(plan_out[0])
    C.peri_plan_release(plan_out[0])
    C.peri_plan_release(plan_out[0])
    os.remove(path)
    assert.equal(C.PERI_ENOTFOUND, C.peri_plan_read(path, plan_out))
  end)
end)
