-- Table batches on the bad input that FBGEMM's bounds_check_indices was given (spec/golden/ops/sparse/bounds_check_*).
-- Where the reference repairs ids and offsets in place (a bad id becomes row 0, a bag that runs out of the ids is cut),
-- nothing is rewritten here: bad ids add nothing, and offsets that make no bag are an error in the mode WARNING too.
-- The counts agree.
local peri = require "perilune"
local golden = require "spec.support.golden"
local support = require "spec.support.tbe"
local C = peri.ffi.C

local MODES = { [0] = "FATAL", "WARNING", "IGNORE" }

--- The blocks of a case: table t's bags.
local function blocks_of(case, tables, bags)
  local list, from = {}, case:list "in.B_offsets"
  for t = 1, tables do
    local first = from and from[t] or (t - 1) * bags / tables
    local past = from and from[t + 1] or t * bags / tables
    list[t] = { table = t, feature = t, first_bag = first, bags = past - first, out_offset = first, out_stride = 1 }
  end
  return list
end

--- What is wrong by definition, and the sums of the rows (row r holds r + 1) that are none.
local function judge(ids, offsets, rows, blocks)
  local bad = { ids = 0, bags = 0, sums = {} }
  for t, x in ipairs(blocks) do
    for bag = x.first_bag + 1, x.first_bag + x.bags do
      local from, past = offsets[bag], offsets[bag + 1]
      bad.sums[bag] = 0
      if from < 0 or from > past or past > #ids then bad.bags = bad.bags + 1 end
      for i = math.max(from, 0) + 1, math.min(past, #ids) do
        local id = ids[i]
        if id >= 0 and id < rows[t] then
          bad.sums[bag] = bad.sums[bag] + id + 1
        elseif id ~= -1 then
          bad.ids = bad.ids + 1
        end
      end
    end
  end
  return bad
end

for _, device in ipairs { "cpu", "opaque" } do
  describe("bounds checks on " .. device, function()
    for _, name in ipairs(golden.names("ops/sparse", "^bounds_check_")) do
      it("know " .. name, function()
        local case = golden.load(name)
        local mode = MODES[case.args.bounds_check_mode]
        local rows, ids, offsets = case:list "in.rows_per_table", case:list "in.indices", case:list "in.offsets"
        local tables, names = {}, {}
        for t, n in ipairs(rows) do tables[t], names[t] = { name = "t" .. t, rows = n, cols = 1 }, "f" .. t end
        local b = support.maker(device)(tables, { optimizer = "sgd", learning_rate = 1, bounds_check_mode = mode },
          { features = names })
        for t, n in ipairs(rows) do
          local list = {}
          for r = 1, n do list[r] = r end
          b:write(t, "weight", 0, peri.tensor(list, "f32", device, { n, 1 }))
        end
        local blocks = blocks_of(case, #rows, #offsets - 1)
        local bad = judge(ids, offsets, rows, blocks)
        local x, y = case:tensor("in.indices", device), case:tensor("in.offsets", device)
        C.peri_log_level_set(C.PERI_LOG_ERROR)
        local ok, out = pcall(function() return b:lookup(x, y, b:blocks(blocks), #offsets - 1, 1) end)
        C.peri_log_level_set(C.PERI_LOG_WARN)

        local fails = mode == "FATAL" and bad.ids + bad.bags > 0 or mode == "WARNING" and bad.bags > 0
        assert.equal(not fails, ok)
        if mode == "FATAL" then assert.equal(case.args.raises, fails) end
        if fails then assert.truthy(tostring(out):find "table 't%d', feature 'f%d', sample %d+: ") end
        assert.same(ids, x:to_list())
        assert.same(offsets, y:to_list())
        assert.equal(bad.bags, b:statistics().bad_bags)
        if bad.bags == 0 then
          assert.equal(bad.ids, b:statistics().bad_ids)
          if mode == "WARNING" then assert.equal(case:list "out.warning"[1], bad.ids) end
          if ok then assert.same(bad.sums, out:to_list()) end
        end
      end)
    end
  end)
end
