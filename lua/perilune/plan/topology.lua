-- plan/topology.lua: the machines that a plan is made for: ranks, hosts, memory, bandwidths (TorchRec's Topology). A
-- description: nothing of it need be there.
local P = require "perilune.ffi"
local ffi = require "ffi"
local util = require "perilune.util"
local text = require "perilune.text"
local signature = require "perilune.signature"
local choices_of = require "perilune.choices"

local M = {}

local VERSION = 1 -- of files
local KiB, MiB, GiB = 2 ^ 10, 2 ^ 20, 2 ^ 30
M.GiB = GiB

--- Devices that plans are made for. Those with memory of their own keep tables in it ("hbm"); a cpu's are in the host's
--- ("ddr").
local devices = { "cpu", "cuda", "mtia", "tpu" }
M.compute_devices = devices
--- The kind of a device by its name: "cuda" of "cuda:1"; the pretended GPU is one, too.
function M.device_kind(name) return name:match "^cuda" or name:match "^[%a_]+" end
--- Kinds of memory, from the fastest.
M.tiers = { "hbm", "ddr", "ssd" }
M.ParameterStorage = util.face("peri.plan.ParameterStorage", { HBM = "hbm", DDR = "ddr", SSD = "ssd" })

--- What a step is priced by (plan/step.lua), in the order of prices: units of one rank and step.
---   step           1
---   table          shards that a rank has
---   way            kinds of exchanges of rows: whole rows, sums of all ranks, sums of hosts, gradients of replicas
---   home_id        ids that a rank sends
---   home_bag, home_bag_byte  bags that come back to a rank from others, and their bytes
---   id             ids that a rank looks up
---   id_byte        bytes of their rows, in updates of their gradients
---   row            rows that are looked up, each once
---   shared_row     those of them that several ids of the batch ask for: how many is known only there, which processors
---                  guess wrong
---   shared_id      the ids that do: their gradients are summed first
---   odd_id, odd_row  ids and rows of widths that kernels are not made for
---   cut_id, cut_bag  ids, and rows that are returned, of tables whose rows lie on several ranks: sorted by rank, and
---                    summed
---   mid_row_byte, mid_bag_byte  bytes of rows and bags that a processor's own cache has not
---   cold_row, cold_row_byte  rows that no cache has, and their bytes
---   bag            rows that a rank returns to those that asked
---   bag_byte       their bytes
---   cold_bag_byte  those of them that leave the caches before they are read again
---   state_row      rows whose optimizer keeps numbers for each of theirs, in updates
---   state_byte, cold_state_byte  bytes of these, and those of them that no cache has, in lines
---   replica_byte   bytes of replicated tables
---   cold_replica_byte  those of them that leave the caches before they are read again
---   near, far      milliseconds of exchanges at the topology's rates, within and across hosts
---   far_sums       milliseconds of links with rows that are summed within their host first
---   far_mixed      milliseconds that rows of several kinds of exchanges would take longer one after the other
M.units = { "step", "table", "way", "home_id", "home_bag", "home_bag_byte", "id", "id_byte", "row", "shared_row",
  "shared_id", "odd_id", "odd_row", "cut_id", "cut_bag", "mid_row_byte", "mid_bag_byte", "cold_row", "cold_row_byte",
  "state_row", "state_byte", "cold_state_byte", "bag", "bag_byte", "cold_bag_byte", "replica_byte", "cold_replica_byte",
  "near", "far", "far_sums", "far_mixed" }

--- Precisions of the dense part's products that are priced: f32, TF32, bf16 (autocast).
M.precisions = { "highest", "high", "bf16" }
M.dense_ways, M.dense_units = { "forward", "backward", "optimizer" }, { "product", "flop", "out_byte", "weight_byte" }

--- Bytes a millisecond: the unit of all bandwidths, as all times are milliseconds.
local function per_second(bytes) return bytes / 1000 end

local arguments = {
  world_size = util.whole(util.required, 1, 2 ^ 20), -- ranks
  compute_device = "cpu",                   -- "cpu", "cuda", "mtia" or "tpu"
  local_world_size = util.optional.number,  -- ranks of a host; default: all of them
  pod_size = 1,                             -- hosts of a group whose links are as fast as those within a host
  hbm_cap = 32 * GiB,                       -- bytes of a device's own memory; none where it is a cpu
  ddr_cap = 128 * GiB,                      -- bytes of the host's memory, for each rank
  ssd_cap = 2 * KiB * GiB,                  -- bytes of files, for each rank
  hbm_mem_bw = per_second(897 * GiB),       -- bandwidths: bytes a millisecond
  ddr_mem_bw = per_second(51 * GiB),
  ssd_mem_bw = per_second(100 * MiB),
  hbm_to_ddr_mem_bw = per_second(32 * GiB),
  intra_host_bw = per_second(600 * GiB),    -- of a rank, to others of its host
  inter_host_bw = per_second(12.5 * GiB),   -- of a rank, to other hosts
  intra_host_latency = 0,                   -- milliseconds of an exchange that moves nothing
  inter_host_latency = 0,
  inter_host_burst = 0,                     -- bytes of a rank that a link with a limit lets through at once after it
                                            -- rested
  bwd_compute_multiplier = 2,               -- time of a backward pass over that of its forward pass
  weighted_feature_bwd_compute_multiplier = 1,
  processors = util.optional.number,        -- of a host; default: one for each of its ranks
  hosts_sharing = 1,                        -- hosts that have these processors together, as parts of one machine;
                                            -- divides all of them
  cache_bytes = util.whole(32 * MiB, 0),    -- of a host's caches
  core_cache_bytes = util.whole(MiB, 0),    -- of those, a processor's own
  threads = util.whole(nil, 1, 2 ^ 20),     -- worker threads of a rank while it was measured
  rates = util.optional.table,              -- measured, of a rank while all are busy: { copy =, gather =, update =
                                            -- (bytes a millisecond), products = (operations a millisecond) }
  dense = util.optional.table,              -- measured: precision -> { forward =, backward =, optimizer = }:
                                            -- milliseconds a unit of plan/dense.lua
  costs = util.optional.table,              -- measured: { forward = , backward = }: milliseconds a unit of
                                            -- plan/step.lua
  choices = util.optional.table,            -- ways that processors differ about and that were measured: name -> way
  custom_topology_data = util.optional.table, -- { hbm_cap = a list with one number for each rank, ddr_cap =, ssd_cap =
                                              -- }
}

local Topology = util.seal(util.class "Topology", arguments)
M.Topology = Topology

--- An error unless x is a finite number above 0; zero: or 0 itself.
local function check_number(name, x, zero)
  if type(x) ~= "number" or not (x >= 0 and x < math.huge and (zero or x > 0)) then
    P.fail(("Topology: %s is %s, allowed: finite numbers %s 0"):format(name, signature.text(x), zero and ">=" or ">"))
  end
end

local function check_costs(costs)
  for way, list in util.ordered(costs) do
    util.one_of("Topology", "a key of costs", way, { "forward", "backward" })
    signature.value("Topology", "costs." .. way, list, "table")
    for unit, x in util.ordered(list) do
      if not util.index_of(M.units)[unit] then
        P.fail(("Topology: costs.%s.%s: there is no such unit, but %s; of prices of another version: measure again "
          .. "(perilune calibrate)")
          :format(way, tostring(unit), table.concat(M.units, ", ")))
      end
      check_number(("costs.%s.%s"):format(way, unit), x, true)
    end
  end
  for _, way in ipairs { "forward", "backward" } do
    if not costs[way] then
      P.fail(("Topology: costs.%s is missing, wanted costs = { forward =, backward = }"):format(way))
    end
  end
end

local function check_dense(dense)
  for precision, ways in util.ordered(dense) do
    util.one_of("Topology", "a key of dense", precision, M.precisions)
    for _, way in ipairs(M.dense_ways) do
      local list = signature.value("Topology", ("dense.%s.%s"):format(precision, way), ways[way], "table")
      for _, unit in ipairs(M.dense_units) do
        check_number(("dense.%s.%s.%s"):format(precision, way, unit), list[unit], true)
      end
    end
  end
end

--- Ways of choices: names and words of this version.
local function check_choices(choices)
  local known = {}
  for _, c in ipairs(choices_of.list()) do known[c.name] = util.map(c.ways, function(w) return w.word end) end
  for name, way in util.ordered(choices) do
    if not known[name] then
      P.fail(("Topology: choices.%s: there is no such choice, but %s; of another version's: measure again (perilune "
        .. "calibrate)"):format(
        tostring(name), table.concat(util.keys(known), ", ")))
    end
    util.one_of("Topology", "choices." .. name, way, known[name])
  end
end

--- What no default may stand for where prices were measured: they are those of these caches and links.
local function measured_fields(ranks, local_ranks)
  local names = { "local_world_size", "ddr_mem_bw", "cache_bytes", "core_cache_bytes" }
  if local_ranks > 1 then
    names[#names + 1], names[#names + 2] = "intra_host_bw", "intra_host_latency"
  end
  if ranks > local_ranks then
    names[#names + 1], names[#names + 2] = "inter_host_bw", "inter_host_latency"
  end
  return names
end

local function check_caps(custom, world_size)
  for name, list in util.ordered(custom) do
    util.one_of("Topology", "a key of custom_topology_data", name, { "hbm_cap", "ddr_cap", "ssd_cap" })
    signature.value("Topology", "custom_topology_data." .. name, list, "table")
    if #list ~= world_size then
      P.fail(("Topology: custom_topology_data.%s has %d numbers, wanted one for each of %d ranks"):format(name, #list,
        world_size))
    end
    for i, bytes in ipairs(list) do
      util.integer("Topology", ("custom_topology_data.%s[%d]"):format(name, i), bytes, 0)
    end
  end
end

--- Topology { world_size =, compute_device =, ... }: see `arguments`. It has devices: for rank r devices[r + 1] = {
--- rank =, hbm =, ddr =, ssd = } (bytes), and intra_group_size: ranks of a host, or of a pod.
function Topology:init(args)
  local f = "Topology"
  for name, value in util.ordered(util.named(f, args, arguments)) do self[name] = value end
  util.one_of(f, "compute_device", self.compute_device, devices)
  self.local_world_size = util.integer(f, "local_world_size", self.local_world_size or self.world_size, 1,
    self.world_size)
  util.integer(f, "pod_size", self.pod_size, 1, self.world_size)
  self.intra_group_size = math.min(self.pod_size * self.local_world_size, self.world_size)
  if self.world_size % self.intra_group_size ~= 0 then
    P.fail(("Topology: %d ranks of groups of %d (local_world_size %d, pod_size %d), allowed: groups that divide the "
      .. "ranks"):format(
      self.world_size, self.intra_group_size, self.local_world_size, self.pod_size))
  end
  for _, name in ipairs { "hbm_mem_bw", "ddr_mem_bw", "ssd_mem_bw", "hbm_to_ddr_mem_bw", "intra_host_bw",
    "inter_host_bw", "bwd_compute_multiplier", "weighted_feature_bwd_compute_multiplier" } do
    check_number(name, self[name])
  end
  for _, name in ipairs { "intra_host_latency", "inter_host_latency", "inter_host_burst" } do
    check_number(name, self[name], true)
  end
  self.processors = util.integer(f, "processors", self.processors or self.local_world_size, 1, 2 ^ 20)
  local hosts = math.ceil(self.world_size / self.local_world_size)
  util.integer(f, "hosts_sharing", self.hosts_sharing, 1, hosts)
  if hosts % self.hosts_sharing ~= 0 then
    P.fail(("Topology: hosts_sharing is %d of %d hosts, allowed: what divides them"):format(self.hosts_sharing, hosts))
  end
  for name, x in util.ordered(self.rates or {}) do
    util.one_of(f, "a key of rates", name, { "copy", "gather", "update", "products" })
    check_number("rates." .. name, x)
  end
  if self.costs then check_costs(self.costs) end
  if self.dense then check_dense(self.dense) end
  if self.choices then check_choices(self.choices) end
  for _, tier in ipairs(M.tiers) do util.integer(f, tier .. "_cap", self[tier .. "_cap"], 0) end
  local custom = self.custom_topology_data or {}
  check_caps(custom, self.world_size)
  if self.compute_device == "cpu" then
    self.hbm_cap, custom = 0, { ddr_cap = custom.ddr_cap, ssd_cap = custom.ssd_cap }
  end
  self.devices, self.rules = {}, false -- rules: of a planner's relations
  for r = 0, self.world_size - 1 do
    local device = { rank = r }
    for _, tier in ipairs(M.tiers) do device[tier] = (custom[tier .. "_cap"] or {})[r + 1] or self[tier .. "_cap"] end
    self.devices[r + 1] = device
  end
  self._made = {}
  for name in util.ordered(arguments) do self._made[name] = self[name] end
end

--- An error if a field was assigned since: `devices`, and what is compared with these, were made of it. Local.
function Topology:_check()
  for name, was in util.ordered(self._made) do
    if self[name] ~= was then
      P.fail(("Topology: %s is now %s, but was %s when it was made, and plans go on with that; make another one")
        :format(name, signature.text(self[name]), signature.text(was)))
    end
  end
end

--- A copy with other memory: change(device) alters a copy of each device. What storage reservations return.
function Topology:with_devices(change)
  local copy = setmetatable(util.copy(self), Topology)
  copy.devices = util.map(self.devices, function(d)
    d = util.copy(d)
    change(d)
    return d
  end)
  return copy
end

local collectives = { "all_to_all", "reduce_scatter", "all_gather", "all_reduce" }

--- Bytes a millisecond of a rank in a collective operation of `world_size` ranks of which `local_size` are on a host.
function Topology:bandwidth(collective, world_size, local_size)
  util.one_of("Topology:bandwidth", "collective", collective, collectives)
  if collective == "all_reduce" then return self.inter_host_bw * local_size end
  return world_size <= local_size and self.intra_host_bw or self.inter_host_bw
end

--- The kind of memory in which tables of the device's own kernels are.
function Topology:own_tier() return self.compute_device == "cpu" and "ddr" or "hbm" end

--- Machines: what Topology.preset knows, for one host. Makers' figures, one direction of links.
local function gpu(hbm, hbm_bw, intra, inter, host_link)
  return { compute_device = "cuda", local_world_size = 8, hbm_cap = hbm * GiB, hbm_mem_bw = per_second(hbm_bw * 1e9),
    intra_host_bw = per_second(intra * 1e9), inter_host_bw = per_second(inter * 1e9),
    hbm_to_ddr_mem_bw = per_second(host_link * 1e9), intra_host_latency = 0.01, inter_host_latency = 0.02 }
end

local presets = {
  torchrec = { compute_device = "cuda" }, -- TorchRec's defaults
  dgx_v100_32gb = gpu(32, 900, 150, 6.25, 16),
  dgx_a100_40gb = gpu(40, 1555, 300, 25, 32),
  dgx_a100_80gb = gpu(80, 2039, 300, 25, 32),
  dgx_h100_80gb = gpu(80, 3350, 450, 50, 64),
  cpu_ethernet_10g = { local_world_size = 1, ddr_cap = 64 * GiB, ddr_mem_bw = per_second(20e9),
    intra_host_bw = per_second(10e9), inter_host_bw = per_second(1.25e9), intra_host_latency = 0.005,
    inter_host_latency = 0.05 },
  cpu_ethernet_100g = { local_world_size = 2, ddr_cap = 256 * GiB, ddr_mem_bw = per_second(100e9),
    intra_host_bw = per_second(20e9), inter_host_bw = per_second(6.25e9), intra_host_latency = 0.005,
    inter_host_latency = 0.02 },
}

--- Machines that were measured: files of machines/, whose prices are of one device, and links that are makers' figures.
local links = { local_world_size = 8, intra_host_bw = per_second(450e9), inter_host_bw = per_second(50e9),
  intra_host_latency = 0.01, inter_host_latency = 0.02 }
local measured = { "h100" }
local function measured_preset(name)
  local fields = util.copy(require("perilune.plan.machines." .. name))
  fields.perilune_topology, fields.world_size = nil, nil
  for key, value in util.ordered(links) do fields[key] = value end
  return fields
end

Topology.presets = util.keys(presets)
for _, name in ipairs(measured) do table.insert(Topology.presets, name) end
table.sort(Topology.presets)

--- A machine by name, with other arguments over it: Topology.preset("dgx_a100_80gb", { world_size = 16 }).
function Topology.preset(name, args)
  util.one_of("Topology.preset", "the name", name, Topology.presets)
  local a = presets[name] and util.copy(presets[name]) or measured_preset(name)
  for key, value in util.ordered(args or {}) do a[key] = value end
  a.world_size = a.world_size or a.local_world_size
  local own = not (args and args.local_world_size) and a.local_world_size -- the machine's, of which fewer may be wanted
  if own and type(a.world_size) == "number" then a.local_world_size = math.min(own, a.world_size) end
  return Topology(a)
end

--- The arguments that made it, those that are not defaults: what a file of it says.
function Topology:arguments()
  local out = { world_size = self.world_size, local_world_size = self.local_world_size }
  for name, default in util.ordered(arguments) do
    local forced = name == "hbm_cap" and self.compute_device == "cpu"
    if self[name] ~= nil and self[name] ~= default and not forced then out[name] = self[name] end
  end
  for _, name in ipairs(self.costs and measured_fields(self.world_size, self.local_world_size) or {}) do
    out[name] = self[name]
  end
  return out
end

--- A topology into a file, as Lua text; and one from a file, read without running it: { perilune_topology = 1,
--- world_size =, ... }, or { perilune_topology = 1, preset = "dgx_a100_80gb", world_size = 16 }. `args` go over what
--- the file says.
--- folders: make those above it that are missing.
function Topology:save(path, folders)
  local says = self:arguments()
  if says.processors == says.local_world_size then says.processors = nil end
  says.perilune_topology = VERSION
  text.write(path, "return "
    .. text.encode(says, { "perilune_topology", "compute_device", "world_size", "local_world_size" }, 3) .. "\n",
    "Topology:save", folders)
end

--- A Topology of what a file says; preset: over such a machine. What was measured is whole, so that prices go with
--- their links and caches.
local function of_file(f, preset, fields)
  local ok, made = pcall(function() return preset and Topology.preset(preset, fields) or Topology(fields) end)
  if not ok then
    if getmetatable(made) == P.Error then made.message = f .. ": " .. made.message end
    error(made, 0)
  end
  for _, name in ipairs(fields.costs and not preset and measured_fields(made.world_size, made.local_world_size)
    or {}) do
    if fields[name] == nil then
      P.fail(("%s: costs were measured, and %s is missing for %d ranks, %d a host: measure them (perilune calibrate "
        .. "-n %d), or say it")
        :format(f, name, made.world_size, made.local_world_size, made.world_size))
    end
  end
  for way, list in util.ordered(fields.costs or {}) do
    for _, unit in ipairs(M.units) do
      if not list[unit] then
        P.fail(("%s: costs.%s.%s is missing: measure again (perilune calibrate), or say it"):format(f, way, unit))
      end
    end
  end
  return made
end

--- What other numbers of ranks change in what a file says: of a host there are no more than all. made: as the file says
--- it.
local function scale(fields, made, over)
  fields.local_world_size = over.local_world_size or math.min(made.local_world_size, over.world_size)
  if made.hosts_sharing > 1 and not over.hosts_sharing and type(fields.local_world_size) == "number" then
    local hosts, all = math.ceil(over.world_size / fields.local_world_size),
      math.ceil(made.world_size / made.local_world_size)
    fields.hosts_sharing = made.hosts_sharing == all and hosts or math.min(made.hosts_sharing, hosts)
  end
end

function Topology.load(path, args)
  local f, over = ("topology '%s'"):format(path), args or {}
  local says = text.decode(text.read(path, "Topology.load"), f)
  if type(says) ~= "table" or says.perilune_topology ~= VERSION then
    P.fail(("%s: perilune_topology (the version of the format) is %s, allowed: %d"):format(f,
      signature.text(type(says) == "table" and says.perilune_topology), VERSION))
  end
  local preset, fields = says.preset, util.copy(says)
  says.perilune_topology, says.preset, fields.perilune_topology, fields.preset = nil, nil, nil, nil
  for key, value in util.ordered(over) do fields[key] = value end
  if preset or says.world_size then -- what the file says is right by itself
    local made = of_file(f, preset, says)
    if type(over.world_size) == "number" then scale(fields, made, over) end
  end
  return of_file(f, preset, fields)
end

--- How steps are counted: another number when prices of the same units mean something else. 2: links are followed
--- through a step. 3: ranks are followed with them.
local COUNTED = 3

--- A hash of what is priced: builds that price other things have files of their own.
local function units_hash()
  local hash = COUNTED
  for char in table.concat(M.units, " "):gmatch "." do hash = (hash * 31 + char:byte()) % 2 ^ 32 end
  return hash
end

--- Where `perilune calibrate` keeps the topology of so many ranks, so many a host, of this user and kind of processor,
--- and of a kind of device ("cuda"; nil: the processor); nil: nowhere.
function Topology.kept_path(ranks, host, device)
  local path = ffi.string(P.C.peri_tune_path())
  return path ~= "" and ("%s.%08x.%s%dx%d.topology"):format(path, units_hash(), device and device .. "." or "", ranks,
    host) or nil
end

--- The topology that is kept there; nil: there is none. One that cannot be read is an error, which says how to get
--- another.
function Topology.kept(ranks, host, device)
  local path = Topology.kept_path(ranks, host, device)
  local file = path and io.open(path)
  if not file then return nil end
  file:close()
  local ok, found = pcall(Topology.load, path)
  if ok then return found end
  if getmetatable(found) == P.Error then
    found.message = ("%s; perilune calibrate has kept it of this machine: perilune calibrate -n %d%s measures it "
      .. "again"):format(
      found.message, ranks, device and " --device " .. device or "")
  end
  error(found, 0)
end

function Topology:__tostring()
  local tier = self:own_tier()
  return ("Topology: %s (%s), %d a host, %.1f GiB each"):format(util.number_of(self.world_size, "rank"),
    self.compute_device, self.local_world_size, self.devices[1][tier] / GiB)
end

signature.kind("Topology", "a Topology", Topology.is)
signature.check("plan.topology.", M, { device_kind = "name: string" })
signature.check("Topology:", Topology, { with_devices = "self: Topology, change: function",
  save = "self: Topology, path: string, folders: boolean?",
  bandwidth = "self: Topology, collective: string, world_size: int, local_size: int" })
signature.check("Topology.", Topology, { preset = "name: string, args: table?", load = "path: string, args: table?",
  kept_path = "ranks: count, host: count, device: string?", kept = "ranks: count, host: count, device: string?" })

return M
