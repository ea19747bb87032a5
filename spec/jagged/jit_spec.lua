-- What a step does with jagged containers compiles (style J2).
local peri = require "perilune"
local support = require "spec.support.jit"
local KJT, JT, KT = peri.KeyedJaggedTensor, peri.JaggedTensor, peri.KeyedTensor

for _, device in ipairs { "cpu", "opaque" } do
  describe("jagged, compiled on " .. device, function()
    local keys = { "a", "b", "c" }
    local values = peri.tensor({ 1, 2, 3, 4, 5, 6 }, "i64", device)
    local lengths = peri.tensor({ 1, 0, 2, 1, 1, 1 }, "i32", device)
    local offsets = peri.tensor({ 0, 1, 1, 3, 4, 5, 6 }, "i64", device)
    local weights = peri.ones({ 6 }, "f32", device)
    local kjt = KJT { keys = keys, values = values, lengths = lengths, weights = weights }:sync()
    local jt = JT { values = weights, lengths = lengths }:validate()
    local kt = KT { keys = keys, length_per_key = { 1, 2, 1 }, values = peri.ones({ 2, 4 }, "f32", device) }
    local other = KT { keys = { "d" }, length_per_key = { 2 }, values = peri.ones({ 2, 2 }, "f32", device) }
    local module = peri.jagged.KTRegroupAsDict({ { "a", "d" }, { "b" } }, { "x", "y" })
    local indices, segments, kts = { 2, 0, 1, 1 }, { 1, 2 }, { kt, other }
    local room = KJT.empty_like(kjt)

    local hot = {
      { "a KJT from lengths", function()
        KJT({ keys = keys, values = values, lengths = lengths, weights = weights }):release()
      end }, { "a KJT from offsets",
        function() KJT({ keys = keys, values = values, offsets = offsets, stride = 2 }):release() end },
      { "from_lengths_sync", function()
        KJT.from_lengths_sync({ keys = keys, values = values, lengths = lengths }):release()
      end }, { "a JaggedTensor", function() JT({ values = weights, lengths = lengths }):release() end },
      { "permute", function() kjt:permute(indices):release() end },
      { "split", function()
        local parts = kjt:split(segments)
        parts[1]:release()
        parts[2]:release()
      end },
      { "copy_", function() room:copy_(kjt) end },
      { "tensors of a KJT", function()
        kjt:values():release()
        kjt:lengths():release()
        kjt:offsets():release()
        kjt:weights():release()
      end },
      { "numbers of a KJT", function()
        return kjt:stride() + #kjt:length_per_key() + #kjt:offset_per_key() + #kjt + kjt:longest()
      end }, { "strides of a KJT", function() return #kjt:stride_per_key() + #kjt:lengths_offset_per_key() end },
      { "a key of a KJT", function() kjt.b:release() end },
      { "the key list of a KJT", function() kjt:key_list():release() end },
      { "tensors of a JaggedTensor", function()
        jt:values():release()
        jt:lengths():release()
        jt:offsets():release()
      end },
      { "padding", function() jt:to_padded_dense(3):release() end },
      { "a key of a KeyedTensor", function() kt.b:release() end },
      { "regrouping", function()
        local groups = module(kts)
        groups.x:release()
        groups.y:release()
      end },
    }
    for _, case in ipairs(hot) do
      it(case[1], function() support.assert_compiles(case[1], case[2]) end)
    end
  end)
end
