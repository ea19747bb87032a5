-- Ranks that srun has started: how they end when one fails. mpirun stands in for srun here: it starts ranks with PMIx
-- too, and is told to leave the others alone when one fails, as srun does. Slurm kills a job when the connection of a
-- rank to PMIx breaks; the words by which PMIx tells that a rank has left it in order are what is looked for.
-- takes: 12 s, mostly waits
local shell = require "spec.support.shell"
local missing = shell.no_launcher() or not shell.has "mpirun" and "mpirun was not found"

local folder, clean
setup(function() folder, clean = shell.temporary() end)
teardown(function() clean() end)

--- Three ranks, of which rank 1 does `act`: what they print, their exit codes by rank, and which have left PMIx in
--- order.
local function srun(act)
  local rank = shell.write(folder .. "/rank.sh", [[
    rank=$OMPI_COMM_WORLD_RANK
    export SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NUM_NODES=1
    unset OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_SIZE OMPI_COMM_WORLD_LOCAL_RANK
    "$@"; code=$?
    echo "rank $rank: code $code"; exit 0]]) -- Open MPI 5 at times loses the last words of a rank that ends with another code
  local path = shell.write(folder .. "/script.lua", ([[
    local peri = require "perilune"
    local world = peri.init { timeout = 30 }
    world:timeout(1.5)
    world:barrier():wait()
    if world.rank_number == 1 then %s end
    world:all_reduce(peri.ones { 3 }):wait()]]):format(act))
  local out = shell.run(("%s --enable-recovery -n 3 sh %s %s run %s"):format(shell.mpirun, rank, shell.perilune, path),
    { PERI_LOG = "error", PMIX_MCA_pmix_client_base_verbose = "5", PMIX_MCA_psec = "^munge" })
  local codes, left = {}, {}
  for r = 0, 2 do
    codes[r] = tonumber(out:match(("rank %d: code (%%d+)"):format(r)))
    left[r] = out:find((":%d pmix:client finalize sync received"):format(r), 1, true) ~= nil
  end
  return out, codes, left
end

describe("under srun", function()
  local function each(name, body)
    it(name, function()
      if missing then return pending(missing) end
      body()
    end)
  end

  each("a world is one, and ends well", function()
    local _, codes = srun ""
    assert.same({ [0] = 0, 0, 0 }, codes)
  end)

  each("the exit code of a rank that fails is its own, and all leave in order", function()
    local out, codes, left = srun "os.exit(5)"
    assert.same({ [0] = 1, 5, 1 }, codes, out)
    assert.same({ [0] = true, true, true }, left, out)
    assert.matches("%[rank 0%] [^\n]*rank 1 gave up: the script called os%.exit%(5%)", out)
    assert.matches("%[rank 2%] [^\n]*rank 1 gave up: the script called os%.exit%(5%)", out)
    out, codes, left = srun "error('the disk is full', 0)"
    assert.same({ [0] = 1, 1, 1 }, codes, out)
    assert.same({ [0] = true, true, true }, left, out)
    assert.matches("%[rank 1%] the disk is full", out)
  end)

  each("a rank that does not end is left to Slurm, which sees the others break off", function()
    local out, codes, left = srun "os.execute 'sleep 7' os.exit(0)"
    assert.equal(1, codes[0], out)
    assert.equal(1, codes[2], out)
    assert.is_false(left[0])
    assert.is_false(left[2])
    assert.matches("%[rank 0%] [^\n]*waiting for rank 1", out)
  end)

  each("without PMIx the error says what to do", function()
    local path = shell.write(folder .. "/script.lua", "require('perilune').init()")
    local out, status = shell.run(("%s run %s"):format(shell.perilune, path),
      { SLURM_PROCID = "0", SLURM_STEP_NUM_TASKS = "2" })
    assert.equal(1, status)
    assert.matches("^%[rank 0%] mpi: srun has started this rank without PMIx[^\n]*: srun %-%-mpi=pmix", out)
  end)

  each("without the transport no rank trains alone", function() -- a launcher without its plugins
    local path = shell.write(folder .. "/script.lua", "require('perilune').init()")
    local out, status = shell.run(("cp %s %s/perilune && %s/perilune run %s"):format(shell.perilune, folder, folder,
      path), { SLURM_PROCID = "1", SLURM_STEP_NUM_TASKS = "2", PERI_PLUGIN_PATH = folder })
    assert.equal(1, status)
    assert.matches("^%[rank 1%] [^\n]*launched as one of 2 ranks, but transport 'mpi' cannot be used", out)
  end)
end)
