-- dist.comm: places on nodes from launchers' variables and from worlds, and the groups within and across nodes.
-- (mpirun: 2 3 4)
local dist = require "perilune.dist"
local peri = require "perilune"
local worlds = require "spec.support.worlds"
local comm = dist.comm

describe("launcher variables", function()
  local function place(environment, world_size, rank)
    return { comm.get_local_size(world_size, environment), comm.get_local_rank(world_size, rank, environment),
      comm.get_group_rank(world_size, rank, environment), comm.get_num_groups(world_size, environment) }
  end

  it("of torchrun", function()
    assert.same({ 4, 3, 1, 2 }, place { WORLD_SIZE = "8", RANK = "7", LOCAL_WORLD_SIZE = "4", LOCAL_RANK = "3",
      GROUP_RANK = "1" })
  end)
  it("of Open MPI", function()
    assert.same({ 2, 1, 2, 3 }, place { OMPI_COMM_WORLD_SIZE = "6", OMPI_COMM_WORLD_RANK = "5",
      OMPI_COMM_WORLD_LOCAL_SIZE = "2", OMPI_COMM_WORLD_LOCAL_RANK = "1" })
  end)
  it("of Slurm", function()
    assert.same({ 4, 1, 2, 3 }, place { SLURM_STEP_NUM_TASKS = "12", SLURM_PROCID = "9", SLURM_LOCALID = "1",
      SLURM_NODEID = "2", SLURM_STEP_TASKS_PER_NODE = "4(x3)", SLURM_STEP_NUM_NODES = "3" })
    assert.same({ 4, 1, 2, 3 }, place { SLURM_NTASKS = "12", SLURM_PROCID = "9", SLURM_TASKS_PER_NODE = "4(x2),4" })
  end)
  it("of MVAPICH and Intel MPI", function()
    assert.same({ 2, 0, 1, 2 }, place { MV2_COMM_WORLD_SIZE = "4", MV2_COMM_WORLD_RANK = "2",
      MV2_COMM_WORLD_LOCAL_SIZE = "2", MV2_COMM_WORLD_LOCAL_RANK = "0" })
    assert.same({ 2, 1, 1, 2 }, place { PMI_SIZE = "4", PMI_RANK = "3", MPI_LOCALNRANKS = "2", MPI_LOCALRANKID = "1" })
  end)
  it("or none: one node", function()
    assert.same({ 1, 0, 0, 1 }, place {})
    assert.same({ 6, 4, 0, 1 }, place({}, 6, 4))
  end)
  it("that fit no equal nodes: one node; given numbers go before variables", function()
    assert.same({ 5, 3, 0, 1 }, place({ LOCAL_WORLD_SIZE = "4" }, 5, 3))
    assert.same({ 4, 2, 1, 2 }, place({ LOCAL_WORLD_SIZE = "4", LOCAL_RANK = "3" }, 8, 6))
  end)
  it("that are no numbers are errors", function()
    assert.error_matches(function() comm.get_local_size(4, { LOCAL_WORLD_SIZE = "four" }) end,
      "LOCAL_WORLD_SIZE is 'four'")
    assert.error_matches(function() comm.get_local_rank(4, nil, { LOCAL_RANK = "-1" }) end, "LOCAL_RANK is '%-1'")
    assert.error_matches(function() comm.get_local_size(4, { SLURM_TASKS_PER_NODE = "4(y2)" }) end, "4%(y2%)")
    assert.error_matches(function() comm.get_local_size(0) end, "world_size is 0")
    assert.error_matches(function() comm.get_group_rank(4, -1) end, "rank is %-1")
  end)
end)

describe("a joined world", function()
  worlds.each("knows its places", function(world)
    local rank = world.rank_number
    assert.same({ 2, rank % 2, math.floor(rank / 2), 3 },
      { comm.get_local_size(), comm.get_local_rank(), comm.get_group_rank(), comm.get_num_groups() })
  end, { sizes = { 6 }, local_size = 2, devices = { "cpu" } })
end)

describe("intra_and_cross_node_pg", function()
  worlds.each("follows the world's nodes", function(world)
    local rank = world.rank_number
    local intra, cross = comm.intra_and_cross_node_pg()
    assert.same({ 2, rank % 2, 3, math.floor(rank / 2) }, { intra:size(), intra:rank(), cross:size(), cross:rank() })
    local sum = intra:all_reduce(peri.tensor({ rank })):wait():item()
    assert.equal(rank - rank % 2 + rank - rank % 2 + 1, sum)
    assert.equal(6 + 3 * (rank % 2), cross:all_reduce(peri.tensor({ rank })):wait():item())
    local again, and_cross = comm.intra_and_cross_node_pg { group = world }
    assert.equal(intra, again)
    assert.equal(cross, and_cross)
  end, { sizes = { 6 }, local_size = 2, devices = { "cpu" } })

  worlds.each("takes an imposed topology", function(world)
    local rank = world.rank_number
    local nodes = { 7, 3, 7, 3, 5, 5 } -- ranks 0 2, 1 3, 4 5
    local intra, cross = comm.intra_and_cross_node_pg { topology = nodes }
    local members = ({ [7] = { 0, 2 }, [3] = { 1, 3 }, [5] = { 4, 5 } })[nodes[rank + 1]]
    local place = members[1] == rank and 1 or 2
    assert.same(members, { intra:global_rank(0), intra:global_rank(1) })
    assert.same(place == 1 and { 1, 4, 0 } or { 3, 5, 2 },
      { cross:global_rank(0), cross:global_rank(1), cross:global_rank(2) })
    cross:barrier():wait()
    local halves = comm.intra_and_cross_node_pg { local_size = 3 }
    assert.equal(3, halves:size())
    assert.is_true(halves ~= intra)
    assert.equal(halves, (comm.intra_and_cross_node_pg { local_size = 3 }))
  end, { sizes = { 6 }, devices = { "cpu" } })

  worlds.each("gives every rank both groups, whatever the topology", function(world, device, n)
    local rank = world.rank_number
    for size = 1, n do
      if n % size == 0 then
        for _, alternate in ipairs { false, true } do
          local nodes = {}
          for r = 0, n - 1 do nodes[r + 1] = alternate and r % (n / size) or math.floor(r / size) end
          local intra, cross = comm.intra_and_cross_node_pg { topology = nodes }
          assert.same({ size, n / size }, { intra:size(), cross:size() })
          local in_node, across = 0, 0
          for r = 0, n - 1 do
            if nodes[r + 1] == nodes[rank + 1] then in_node = in_node + r end
            if alternate and math.floor(r / (n / size)) == math.floor(rank / (n / size)) or not alternate
              and r % size == rank % size then
              across = across + r
            end
          end
          assert.equal(in_node, intra:all_reduce(peri.full({ 1 }, rank, "f32", device)):wait():item())
          assert.equal(across, cross:all_reduce(peri.full({ 1 }, rank, "f32", device)):wait():item())
        end
      end
    end
  end)

  worlds.each("says what a topology must be", function()
    local function bad(args, pattern)
      assert.error_matches(function() comm.intra_and_cross_node_pg(args) end, pattern)
    end
    bad({ topology = { 0, 0, 1 } }, "node 1 has 1 ranks and another one 2")
    bad({ topology = { 0, 0 } }, "no node for each of the 3 ranks")
    bad({ topology = { 0, "a", 1 } }, "a node of topology is 'a', allowed: whole numbers")
    bad({ local_size = 2 }, "nodes of 2 ranks in a group of 3")
    bad({ local_size = 4 }, "local_size is 4")
    bad({ group = 5 }, "group is a number")
    bad({ nodes = 5 }, "nodes")
  end, { sizes = { 3 }, devices = { "cpu" } })
end)
