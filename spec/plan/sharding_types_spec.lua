-- The one table of what sharding types do (plan/sharding_types.lua): it says what their shards are, and nobody keeps
-- another.
local peri = require "perilune"
local sharding_types = require "perilune.plan.sharding_types"
local shell = require "spec.support.shell"
local plan = peri.plan

--- Facts of a type by its shards of a table of 40 x 16 on nodes of two and three ranks.
local function seen(name)
  local nodes = { 0, 0, 1, 1, 1 }
  local shards = plan.ParameterSharding { sharding_type = name }:shards({ name = "t", num_embeddings = 40,
    embedding_dim = 16 }, { world_size = 5, nodes = nodes })
  local rows, columns, hosts = false, false, {} -- hosts: by block of columns, those on which it lies
  for _, s in ipairs(shards) do
    rows, columns = rows or s.rows < 40, columns or s.cols < 16
    hosts[s.col_offset] = hosts[s.col_offset] or {}
    hosts[s.col_offset][nodes[s.rank + 1]] = true
  end
  local several, all = 0, {} -- blocks on more nodes than one; nodes of the table
  for _, of in peri.util.ordered(hosts) do
    several = several + (#peri.util.keys(of) > 1 and 1 or 0)
    for host in pairs(of) do all[host] = true end
  end
  local cut = rows or columns
  return { cuts_rows = rows, cuts_columns = columns, replica = #shards == 0,
    in_node = cut and several == 0 and (#peri.util.keys(all) == 1 or rows and columns) }
end

describe("the table of sharding types", function()
  for _, t in ipairs(sharding_types.list) do
    it("says what the shards of " .. t.name .. " are", function()
      local facts = seen(t.name)
      for fact, value in peri.util.ordered(facts) do assert.equal(value, t[fact], fact) end
    end)
  end

  it("knows no other types", function()
    assert.equal(-1, peri.ffi.C.peri_sharding_type_facts(-1))
    assert.equal(-1, peri.ffi.C.peri_sharding_type_facts(#sharding_types.list))
    assert.equal(#peri.util.keys(sharding_types.of), #sharding_types.list)
  end)

  it("is the only one: planners, pipelines and sharded modules name no type", function()
    for path in shell.run("cd lua/perilune; find plan explain simulation pipeline shard -name "
      .. "'*.lua'"):gmatch "[^\n]+" do
      path = "lua/perilune/" .. path
      local number = 0
      for line in io.lines(path) do
        number = number + 1
        local code = line:gsub("%-%-.*$", "")
        for _, t in ipairs(sharding_types.list) do
          local named = code:find('"' .. t.name .. '"', 1, true) or code:find("%f[%w_]" .. t.name .. "%s*=")
          -- The constructors of plans: M.row_wise(...) is made of shorthand("row_wise", ...).
          local constructor = path:find "plan/types.lua$" and code:find("%((\"" .. t.name .. "\")")
            and not code:find "=="
          if named and not constructor then error(("%s:%d: %s"):format(path, number, line)) end
        end
      end
    end
  end)
end)
