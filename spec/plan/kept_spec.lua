-- `perilune plan` without the name of a machine: the topology that is kept, of one host or of several, and a line that
-- says which it is.
local shell = require "spec.support.shell"

describe("perilune plan without a topology", function()
  if shell.no_launcher() then return it("is there", function() pending(shell.no_launcher()) end) end
  local folder, clean
  setup(function() folder, clean = shell.temporary() end)
  teardown(function() clean() end)

  --- Keep a topology of so many ranks, so many a host, where this user's are.
  local function keep(ranks, host)
    local script = folder .. "/keep.lua"
    local f = assert(io.open(script, "w"))
    f:write(([[local T = require("perilune").plan.Topology
      T({ world_size = %d, local_world_size = %d }):save(T.kept_path(%d, %d), true)]]):format(ranks, host, ranks, host))
    f:close()
    local out, status = shell.run(("XDG_CACHE_HOME=%s %s run -n 1 %s"):format(folder, shell.perilune, script), {})
    assert.equal(0, status, out)
  end

  local function planned(arguments)
    local model = folder .. "/model.lua"
    local f = assert(io.open(model, "w"))
    f:write "return { tables = { { name = 'a', num_embeddings = 4000, embedding_dim = 16 } } }"
    f:close()
    local out, status = shell.run(("XDG_CACHE_HOME=%s %s plan %s --no-reasons %s"):format(folder, shell.perilune, model,
      arguments), {})
    assert.equal(0, status, out)
    return out
  end

  it("says that none is kept, and what it plans for instead", function()
    local out = planned "-n 6"
    assert.matches("no topology of 6 ranks is kept %(perilune calibrate %-n 6%): planned for cpu_ethernet_10g", out)
  end)

  it("uses one of several hosts, and of several topologies says which others there are", function()
    keep(6, 3)
    local out = planned "-n 6"
    assert.matches("6 ranks %(cpu%), 3 a host", out)
    assert.matches("planned for the kept topology of 6 ranks, 3 a host\n", out)
    keep(6, 2)
    assert.matches("6 ranks, 3 a host %(kept too: 2 a host: %-%-topology [^ ]*6x2%.topology%)", planned "-n 6")
    assert.is_nil(planned("-n 8 --topology dgx_a100_40gb"):find("planned for", 1, true))
  end)
end)
