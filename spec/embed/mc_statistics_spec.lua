-- Numbers of maps are read while the device works: they wait for nothing, say what has come so far, and are exact once
-- the device is idle.
local peri = require "perilune"
local embed, stream = peri.embed, peri.stream

local function module_of(kind, device)
  if kind == "hash" then
    return embed.HashZchManagedCollisionModule { zch_size = 64, total_num_buckets = 4, device = device }
  end
  return embed.MCHManagedCollisionModule { zch_size = 64, buckets = 4, device = device, eviction_interval = 1000,
    eviction_policy = embed.LFU_EvictionPolicy {} }
end

describe("statistics of maps", function()
  for _, kind in ipairs { "mch", "hash" } do
    it("wait for nothing: " .. kind, function()
      local module, device, behind = module_of(kind, "opaque"), "opaque", 0
      local ids = peri.tensor({ 1, 2, 3, 4, 5, 6, 7, 8 }, "i64", device)
      module:_remap_values { ids }
      module:eval() -- looks only: nothing that a step would wait for
      for round = 1, 20 do
        module:_remap_values { ids }
        local s = module:statistics()
        assert.is_true(s.ids <= 8 * (round + 1))
        behind = behind + (s.ids < 8 * (round + 1) and 1 or 0) -- never, if it had waited
      end
      stream.current(device):synchronize()
      module:_remap_values { ids }
      stream.current(device):synchronize()
      assert.equal(8 * 22, module:statistics().ids)
      assert.is_true(behind > 0)
    end)
  end
end)
