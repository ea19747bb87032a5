-- worlds.lua: one test body on many worlds of ranks.
--
--   local worlds = require "spec.support.worlds"
--   describe("all_reduce", function()
--     -- defines one `it` for each world size and device
--     worlds.each("sums", function(world, device, n) ... end)
--   end)
--
-- The body runs on every rank. Alone, the ranks are those of sim worlds of sizes 1, 2, 3, 5, 8, on the devices of
-- spec/support/devices.lua. Under mpirun (several ranks) the same body runs in the real world instead, once per device,
-- in a group of its own: a rank that fails aborts that group, so the others fail at once and the next test starts anew;
-- nodes are imposed, of LOCAL_SIZE ranks each, or on pretended machines (tests/net/nodes) are the machines. Every rank
-- must run the same tests in the same order (the same seed). An assertion that fails on any rank fails the test and
-- names the rank.
--
-- A usual run has half of all pairs of a size and a device, where a test has several of both: in turn, and the title
-- says which one begins. So each test sees each of its sizes, and each device with several ranks; and the tests of a
-- file together see all pairs. Under mpirun a test has one device. PERI_TEST_WORLDS=all, as in make
-- check-cuda: all pairs.
--
-- Options: sizes (of sim worlds; under mpirun the test is defined only if its size is among them), devices, local_size
-- (ranks per node; under mpirun the test is defined only if it is LOCAL_SIZE or left out), timeout (seconds), only
-- ("sim" or "mpi"), by_device (also with sim as the transport for tensors of "opaque", which then travel without host
-- memory).
local busted = require "busted"
local peri = require "perilune"
local sim = require "perilune.dist.sim"
local P = require "perilune.ffi"
local util = require "perilune.util"
local devices = require "spec.support.devices"

local M = {}

local launched = tonumber(os.getenv "OMPI_COMM_WORLD_SIZE" or "1")
--- Ranks that mpirun has started; nil outside.
M.mpirun = launched > 1 and launched or nil
--- Ranks of each of several machines, 0: they are unequal. Nodes are imposed where that leaves nothing to see: one
--- machine (nil), or one rank on each.
local slots = tonumber(os.getenv "PERI_TEST_SLOTS")
local imposed = slots == nil or slots == 1
--- The transport of tensors of "opaque" under mpirun; nil: they travel through host memory.
M.device_transport = os.getenv "PERI_TEST_DEVICE_TRANSPORT"
--- Ranks of a node under mpirun; 0: unequal.
M.LOCAL_SIZE = imposed and 2 or slots

local both = { "cpu", "opaque" }
local all_pairs = os.getenv "PERI_TEST_WORLDS" == "all" or M.device_transport ~= nil

--- Which pairs of a size and a device a test has: a function of their numbers in the lists.
local function pairs_of(title, sizes, device_count)
  local turn, several = 0, 0
  for i = 1, #title do turn = turn + title:byte(i) end
  for _, n in ipairs(sizes) do several = several + (n > 1 and 1 or 0) end
  return function(size, device)
    if all_pairs or device_count == 1 then return true end
    -- the only size with several ranks (or the only size) is for every device
    if several < device_count and (sizes[size] > 1 or several == 0) then return true end
    return (turn + size + device) % device_count == 0
  end
end

local function in_sim(n, device, body, options, device_transport)
  sim.run(n, function(_, world) body(world, device, n) end, {
    device = device, device_transport = device_transport, local_size = options.local_size, timeout = options.timeout,
  })
end

local function in_mpi(device, body, options)
  local world = peri.dist.init { local_size = imposed and M.LOCAL_SIZE or 0, device_transport = M.device_transport,
    device = M.device_transport and "opaque" }
  local ranks, before = {}, util.copy(P.state)
  for i = 1, world.world_size do ranks[i] = i - 1 end
  local group = world:new_group(ranks, "test")
  if options.timeout and options.timeout > 0 then group:timeout(options.timeout) end
  P.state.world, P.state.device, P.state.scope = group, device, false
  local ok, err = xpcall(function()
    body(group, device, world.world_size)
    group:barrier():wait() -- nobody goes on to the next test while another rank fails this one
  end, function(e) return (type(e) == "table" or type(e) == "string" and e:match "\nstack traceback") and e
    or debug.traceback(e, 2) end)
  if not ok then
    local text = type(err) == "table" and tostring(err.message or err) or tostring(err)
    group:abort(text:match "^[^\n]*")
  end
  util.exchange(P.state, before)
  group:release()
  if not ok then error(type(err) == "string" and ("rank %d: %s"):format(world.rank_number, err) or err, 0) end
end

--- Define the test `title` for every world; body(world, device, world_size).
function M.each(title, body, options)
  options = util.named("worlds.each", options, {
    sizes = { 1, 2, 3, 5, 8 }, devices = devices, local_size = 0, timeout = 0, only = util.optional,
    by_device = false,
  })
  local known = util.index_of(#options.devices > 1 and devices or options.devices)
  local among = options.devices == devices and both or options.devices
  local has = pairs_of(title, M.mpirun and { M.mpirun, M.mpirun + 1 } or options.sizes, #among)
  for d, device in ipairs(among) do
    local present = known[device] ~= nil
    if M.mpirun then
      local wanted = present and has(1, d + M.mpirun) and options.only ~= "sim"
        and (options.local_size == 0 or options.local_size == M.LOCAL_SIZE)
      local sized = false
      for _, n in ipairs(options.sizes) do sized = sized or n == M.mpirun end
      -- the usual list stands for any size
      if M.mpirun == 4 and options.sizes[#options.sizes] == 8 then sized = true end
      if wanted and sized then
        busted.it(("%s [mpi %d, %s]"):format(title, M.mpirun, device), function() in_mpi(device, body, options) end)
      end
    elseif options.only ~= "mpi" then
      for i, n in ipairs(options.sizes) do
        local taken = present and has(i, d)
        if taken then
          busted.it(("%s [sim %d, %s]"):format(title, n, device), function() in_sim(n, device, body, options) end)
        end
        if taken and options.by_device and device == "opaque" then
          busted.it(("%s [sim %d, %s by its own transport]"):format(title, n, device), function()
            in_sim(n, device, body, options, "sim")
          end)
        end
      end
    end
  end
end

return M
