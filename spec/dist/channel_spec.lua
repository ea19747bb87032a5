-- Channels: which one operations go on, and that scripts can choose one. (The order within them:
-- tests/unit/test_comm.c; sim enforces it in every other spec.) (mpirun: 2)
local ffi = require "ffi"
local peri = require "perilune"
local worlds = require "spec.support.worlds"

describe("channels", function()
  worlds.each("are named, and one is current", function(world)
    assert.equal("dense", world:channel())
    assert.equal("dense", world:channel "own11")
    assert.equal("own11", world:channel "rows")
    assert.equal("rows", world:channel "dense")
    assert.error_matches(function() world:channel "own12" end,
      "Group:channel: name is 'own12', allowed: dense, ids, .*own11")
    assert.error_matches(function() world:channel(false) end, "Group:channel: name is 'false', allowed: dense")
    assert.equal("dense", world:channel())
    local C = peri.ffi.C
    assert.equal("reports", ffi.string(C.peri_channel_name(C.PERI_CHANNEL_REPORTS)))
    assert.equal("own1", ffi.string(C.peri_channel_name(C.PERI_CHANNEL_OWN)))
    for _, none in ipairs { -1, C.PERI_CHANNEL_COUNT } do assert.is_true(C.peri_channel_name(none) == nil) end
  end, { sizes = { 2 }, devices = { "cpu" } })

  worlds.each("carry what is posted on them, and appear in the record", function(world, device, n)
    local before = world:channel "own2"
    local a = world:all_reduce(peri.ones({ 2 }, "f32", device))
    world:channel(before)
    local b = world:all_reduce(peri.ones({ 3 }, "f32", device))
    assert.same({ n, n, n }, b:wait():to_list())
    assert.same({ n, n }, a:wait():to_list())
    if device == "cpu" then
      assert.truthy(world:record():find("all_reduce sum f32 [2] on channel own2", 1, true))
      assert.truthy(world:record():find("all_reduce sum f32 [3], ", 1, true))
    end
  end, { sizes = { 2, 3 } })

  worlds.each("of exchanges are those of their data", function(world)
    local lists = {}
    for r = 1, world.world_size do lists[r] = { { r }, {} } end
    local keys = {}
    for r = 1, world.world_size do keys[r] = "f" .. r end
    local kjt = peri.KeyedJaggedTensor.from_lists { keys = keys, unpack(lists) }
    local splits = {}
    for r = 1, world.world_size do splits[r] = 1 end
    local got = peri.dist.KJTAllToAll(world, splits)(kjt):wait():wait()
    assert.equal(world.world_size, got:values():size(1))
    local record = world:record()
    assert.truthy(record:find("all_to_all i64 on channel control", 1, true), record)
    assert.truthy(record:find("all_to_all i64 on channel ids", 1, true), record)
    assert.truthy(record:find("operation %d+: not needed"), record) -- weights, which this batch has not
  end, { sizes = { 2, 3 }, devices = { "cpu" } })
end)
