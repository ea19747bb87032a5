-- all_to_all as torch.distributed computes it (spec/golden/sharded/all_to_all_*): every dtype, uneven splits, the
-- documented examples.
local golden = require "spec.support.golden"
local peri = require "perilune"
local worlds = require "spec.support.worlds"

local complex = { complex64 = "c64", complex128 = "c128" }

local function load(case, name, device)
  local dtype = complex[case.dtype]
  if not dtype then return case:tensor(name, device) end
  local shape = case:shape(name)
  shape = { unpack(shape, 1, #shape - 1) } -- pairs in a last dimension of 2
  return peri.Tensor.from_memory((case:bytes(name)), shape, dtype, device)
end

describe("all_to_all of torch.distributed", function()
  for _, name in ipairs(golden.names("sharded", "^all_to_all_")) do
    local case = golden.load(name)
    worlds.each(case.name, function(world, device)
      local rank, recv = world.rank_number, {}
      for r = 1, world.world_size do recv[r] = case.splits[r][rank + 1] end
      local got = world:all_to_all_v(load(case, ("rank%d/input"):format(rank), device), case.splits[rank + 1],
        recv):wait()
      local want = load(case, ("rank%d/output"):format(rank), "cpu")
      assert.same(want:shape(), got:shape())
      assert.equal(want:dtype(), got:dtype())
      assert.same(want:to_list(), got:to_list())
    end, { sizes = { case.world_size } })
  end
end)
