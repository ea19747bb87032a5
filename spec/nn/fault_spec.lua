-- Running out of memory at any point of a training step is an error that leaks nothing and leaves the tape usable
-- (style T5).
local peri = require "perilune"
local nn = peri.nn
local F = nn.functional
local C = peri.ffi.C

describe("out of memory", function()
  local bottom = nn.MLP { in_size = 4, layer_sizes = { 6, 5 }, activation = "swish_layernorm" }
  local top = nn.OverArch { in_features = 5 + 6, layer_sizes = { 4, 1 } }
  local cross = nn.LowRankMixtureCrossNet { in_features = 11, num_layers = 1, num_experts = 2, low_rank = 2 }
  local low_rank = nn.LowRankCrossNet { in_features = 11, num_layers = 2, low_rank = 2 }
  local params = {}
  for _, m in ipairs { bottom, cross, low_rank, top } do
    for _, p in ipairs(m:parameters()) do params[#params + 1] = p end
  end
  local x, sparse, labels = peri.ones { 3, 4 }, peri.ones({ 3, 3, 5 }):requires_grad(), peri.zeros { 3 }
  local classes = peri.zeros({ 3 }, "i64")

  local function step()
    local dense = F.dropout(bottom:forward(x), 0.3, 1, 1)
    local both = low_rank:forward(cross:forward(F.interaction(dense, sparse)))
    local logits = top:forward(both):reshape(-1)
    local wide = F.stack({ logits, logits / (logits * 0.1 + 3) }, 2):softmax(2)
    local loss = F.binary_cross_entropy_with_logits(logits, labels, labels:expand { 3 })
      + F.cross_entropy(wide, classes)
      + F.max(F.matmul(both, both:transpose(1, 2)), 2):mean() + F.muladd(both, both, both):sum():square():sqrt()
    loss:backward()
    local optimizer = nn.optim.Adam { params = params, amsgrad = true }
    nn.optim.clip_grad_norm(params, 1)
    optimizer:step()
    optimizer:zero_grad()
    sparse:set_grad(nil)
  end

  local function objects()
    collectgarbage()
    collectgarbage()
    return tonumber(C.peri_mem_objects())
  end

  for _, point in ipairs { "alloc", "device_alloc" } do
    it("at every " .. point, function()
      peri.scope(step)
      local before, failures = objects(), 0
      for k = 1, 5000 do
        peri.ffi.check(C.peri_fault_arm(point, k))
        local ok, err = pcall(peri.scope, step)
        C.peri_fault_arm(point, 0)
        for _, p in ipairs(params) do p:set_grad(nil) end
        sparse:set_grad(nil)
        if ok then break end
        failures = failures + 1
        assert.equal("ENOMEM", err.name, ("failure %d: %s"):format(k, tostring(err)))
        if k % 20 == 1 then assert.equal(before, objects(), ("failure %d (%s) leaks"):format(k, tostring(err))) end
      end
      assert.is_true(failures > 50 and failures < 4999)
      assert.equal(before, objects())
      peri.scope(step)
    end)
  end
end)
