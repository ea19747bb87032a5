-- What the exchanges between the devices of one process refuse. What they give is in exchange_spec.lua.
--
-- mpirun: none
local peri = require "perilune"
local dist = peri.dist

describe("exchanges between devices", function()
  local function refused(message, f) assert.error_matches(f, message) end

  it("refuse parts that do not fit", function()
    local a, b = peri.zeros { 2, 3 }, peri.zeros { 1, 3 }
    refused("EmbeddingsAllToOneReduce: 1 tensors, wanted a list of 2", function()
      dist.EmbeddingsAllToOneReduce { world_size = 2 } { a }
    end)
    refused("SeqEmbeddingsAllToOne: tensor 2 is 3, wanted a tensor", function()
      dist.SeqEmbeddingsAllToOne { world_size = 2 } { a, 3 }
    end)
    refused("part 1 is f32 %[1, 3%], part 0 f32 %[2, 3%]; only equal shapes and dtypes are added up", function()
      dist.EmbeddingsAllToOneReduce { world_size = 2 } { a, b } -- not even where they could be spread
    end)
    refused("part 1 is f64 %[2, 3%], part 0 f32", function()
      dist.EmbeddingsAllToOneReduce { world_size = 2 } { a, a:to "f64" }
    end)
    refused("cat_dim is 0, allowed: whole numbers 1..8", function()
      dist.EmbeddingsAllToOne { world_size = 1, cat_dim = 0 }
    end)
    refused("world_size is 0", function() dist.EmbeddingsAllToOne { world_size = 0 } end)
    assert.has_error(function() dist.EmbeddingsAllToOne { world_size = 2 } { a, b } end)
  end)

  it("refuse splits that do not fit", function()
    local kjt = peri.KeyedJaggedTensor.from_lists { keys = { "f", "g" }, { { 1 } }, { { 2 } } }
    refused("splits needs one number for each of 3 ranks, got 2", function() dist.KJTOneToAll({ 1, 1 }, 3) end)
    refused("KJTOneToAll: a table, wanted a KeyedJaggedTensor", function() dist.KJTOneToAll({ 1, 1 }, 2) {} end)
    assert.has_error(function() dist.KJTOneToAll({ 1, 2 }, 2)(kjt) end)
    assert.has_error(function() dist.KJTOneToAll({ 1, 1 }, 2, "nowhere")(kjt) end)
    assert.same({ { "f" }, { "g" } }, peri.util.map(dist.KJTOneToAll({ 1, 1 }, 2)(kjt), function(part)
      return part:keys()
    end))
  end)
end)
