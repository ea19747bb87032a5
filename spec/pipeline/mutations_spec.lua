-- Random edits of legal schedules: each is refused with a reason, or learns what the plain loop learns.
-- PERI_TEST_MUTATIONS of them (200), from PERI_TEST_SEED.
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local support = require "spec.support.pipeline"
local schedules = peri.pipeline.schedules

local COUNT = tonumber(os.getenv "PERI_TEST_MUTATIONS" or 200)
local SEED = tonumber(os.getenv "PERI_TEST_SEED" or 4711)

local names = { "base", "sparse_dist", "sparse_dist_lite", "fused_sparse_dist", "prefetch_sparse_dist", "wire_first" }
local streams = { "main", "dist", "copy", "embed", "other" }

--- Numbers from 1 to n, in a sequence of the seed.
local function drawer(seed)
  local k = 0
  return function(n)
    k = k + 1
    return 1 + math.floor(peri.ffi.C.peri_random_uniform(seed, 17, k) * n)
  end
end

local edits = {
  function(s, name, draw)
    local others = {}
    for _, o in ipairs(s.operations) do
      if o.name ~= name then others[#others + 1] = o.name end
    end
    return s:move(name, { [draw(2) == 1 and "before" or "after"] = others[draw(#others)] })
  end,
  function(s, name, draw)
    for _, o in ipairs(s.operations) do
      if o.name == name then return s:retime { [name] = o.ahead + (draw(2) == 1 and 1 or -1) } end
    end
  end,
  function(s, name, draw) return s:set { [name] = { on = streams[draw(#streams)] } } end,
  function(s, _, draw) -- all that runs ahead, a batch earlier or later
    local aheads, by = {}, draw(2) == 1 and 1 or -1
    for _, o in ipairs(s.operations) do
      if o.ahead > 0 then aheads[o.name] = o.ahead + by end
    end
    return s:retime(aheads)
  end,
  function(s, name, draw)
    if draw(4) > 1 then return s end
    return s:drop(name)
  end,
  function(s, name, draw)
    -- those two make another, legal, loop
    if name == "zero_grad" or name == "optimizer" or draw(3) > 1 then return s end
    return s:set { [name] = { every = 2 } }
  end,
  function(s, _, draw)
    local kinds = { "lookup", "prefetch", "wait_dist", "zero_grad", "to_device", "wait_grads" }
    return s:insert({ kinds[draw(#kinds)], name = "more" .. draw(1000), ahead = draw(3) - 1 }, { last = true })
  end,
}

local function mutant(seed)
  local draw = drawer(seed)
  local s = schedules[names[draw(#names)]]:with { depth = 16 }
  for _ = 1, draw(3) do
    local ok, edited = pcall(edits[draw(#edits)], s, s.operations[draw(#s.operations)].name, draw)
    if ok then s = edited end -- else the edit itself is refused
  end
  return s, ({ 1, 2, 3 })[draw(3)], draw(3) == 1 and "opaque" or "cpu", draw(6) - 1
end

local known = {}
local function plain(n, device, batches)
  local key = ("%d %s %d"):format(n, device, batches)
  known[key] = known[key] or sim.run(n, function(rank, world)
    local model = support.model(world, device)
    support.plain(model, support.optimizer(model), support.batches(rank, device, batches))
    return support.learned(model)
  end, { device = device })
  return known[key]
end

describe("edited schedules", function()
  it(("are refused or right: %d from seed %d"):format(COUNT, SEED), function()
    local ran, refused, different = 0, 0, {}
    for i = 1, COUNT do
      local seed = SEED + i
      local s, n, device, batches = mutant(seed)
      local ok, err = pcall(s.check, s)
      if ok then
        ran = ran + 1
        different[s:text():gsub("^[^\n]*", "")] = true
        local expected = plain(n, device, batches)
        local good, why = pcall(sim.run, n, function(rank, world)
          local model = support.model(world, device)
          local p = peri.pipeline.Pipeline { model = model, optimizer = support.optimizer(model), schedule = s }
          for _ in p:run(support.batches(rank, device, batches)) do end -- luacheck: ignore
          support.assert_same(expected[rank + 1], model, s.name)
        end, { device = device })
        local text = not good and (type(why) == "table" and why.message or tostring(why))
        if text and text:match("there is an optimizer, but schedule '[%w_]+' has no operation "
          .. "'optimizer'") then refused = refused + 1
        elseif text then
          error(("seed %d, %d ranks on %s, %d batches: %s\n%s"):format(seed, n, device, batches, text,
            s:text()), 0)
        end
      else
        refused = refused + 1
        assert.matches("^schedule '", err.message, nil, nil, ("seed %d"):format(seed))
        assert.matches("'", err.message)
      end
    end
    local kinds = 0
    for _ in pairs(different) do kinds = kinds + 1 end -- any order: counted
    assert.is_true(kinds >= COUNT / 12 and refused >= COUNT / 6, ("%d ran, of %d kinds, %d refused"):format(ran, kinds,
      refused))
  end)
end)
