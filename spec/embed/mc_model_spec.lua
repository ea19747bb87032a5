-- Managed collision beside the plain models, which the vectors of TorchRec bear out (mc_golden_spec.lua): random maps,
-- ids, batches and operations. OPERATIONS= as many as wanted, of which the device opaque has a fifth; 40,000 usually.
-- deadline: 300 s
-- takes: 5 s
local collision = require "spec.support.collision"
local worlds = require "spec.support.collision_world"

local SEED = tonumber(os.getenv "SEED" or "") or 1
local OPERATIONS = tonumber(os.getenv "OPERATIONS" or "") or 40000
local CASES = math.max(10, OPERATIONS / 500)
local OPAQUE = os.getenv "PERI_OPAQUE_DEVICE" and 0.04 or 0.2 -- the share of the device opaque; a pretended GPU is slow

describe("random operations", function()
  for _, case in ipairs { { "cpu", 0.8 }, { "opaque", OPAQUE } } do
    local device, share = unpack(case)
    for kind, make in pairs { ["sorted maps"] = "mch", ["probing maps"] = "hash" } do
      it(("on %s of %s agree with the model"):format(kind, device), function()
        local cases = math.floor(CASES * share / 2)
        for c = 1, cases do
          local seed = SEED * 1000 + c
          local r = collision.random(seed)
          local ok, why = pcall(worlds.play, r, worlds[make](r, device), device,
            math.ceil(OPERATIONS * share / 2 / cases))
          if ok then why:_own_map():release() end
          if not ok then error(("seed %d, case %d: %s"):format(SEED, c, tostring(why)), 0) end
        end
      end)
    end
  end
end)
