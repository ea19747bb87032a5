-- Buffers of rows lie in memory that the ranks of a machine map from each other (runtime/backends/mpi/near_heap.c).
-- Where that is not to be had, or forbidden, rows travel as before: outputs and updated tables are the same, to the
-- bit.
-- (mpirun: none: it starts its own)
local shell = require "spec.support.shell"

local script = [[
local ffi = require "ffi"
local peri = require "perilune"
local plan = peri.plan
local world = peri.init()
local entries = { plan.table_wise(1), plan.column_wise(), plan.row_wise(), plan.table_wise(0) }
local tables, plans, keys = {}, {}, {}
for i, entry in ipairs(entries) do
  keys[i] = "f" .. i
  tables[i] = peri.EmbeddingBagConfig { name = "t" .. i, num_embeddings = 500, embedding_dim = 64, feature_names = { keys[i] } }
  plans["t" .. i] = entry
end
local module = peri.shard.ShardedEmbeddingBagCollection { tables = tables, plan = plans, group = world,
  fused_params = { optimizer = "adagrad", learning_rate = 0.1 } }
local SAMPLES, text = 600, ""
for step = 1, 3 do
  peri.scope(function()
    local values = {}
    for i = 1, 4 * SAMPLES do values[i] = (i * 7919 + step * 31 + world:rank() * 17) % 500 end
    local rows = module:forward(peri.KeyedJaggedTensor { keys = keys, values = peri.tensor(values, "i64"),
      lengths = peri.full({ 4 * SAMPLES }, 1, "i32") }):values()
    peri.backward({ rows }, { peri.full(rows:shape(), 0.01 * step, "f32") })
    text = text .. (" %.17g"):format((rows * rows):sum():item())
  end)
end
ffi.cdef "int memfd_create(const char *, unsigned); int ftruncate(int, long); int madvise(void *, size_t, int);"
ffi.cdef "void *mmap(void *, size_t, int, int, int, long);"
local MiB = 2 ^ 20
local reserved = tonumber(ffi.cast("intptr_t", ffi.C.mmap(nil, 4 * MiB, 3, 0x22, -1, 0)))
local at, file = ffi.cast("char *", math.ceil(reserved / (2 * MiB)) * 2 * MiB), ffi.C.memfd_create("probe", 0)
ffi.C.ftruncate(file, 2 * MiB)
ffi.C.mmap(at, 2 * MiB, 3, 0x11, file, 0) -- shared, there
at[0] = 1
local given = ffi.C.madvise(at, 2 * MiB, 25) == 0 -- MADV_COLLAPSE
local heaps, huge, within = 0, 0, false
for line in io.lines "/proc/self/smaps" do
  if line:match "^%x+%-%x+ " then within = line:match "/memfd:perilune" end
  if line:match "/memfd:perilune" then heaps = heaps + 1 end
  if within and tonumber(line:match "^ShmemPmdMapped:%s*(%d+)" or 0) > 0 then huge = huge + 1 end
end
print(("rank %d: heaps %d, huge %d of %s;%s"):format(world:rank(), heaps, huge, given, text))
peri.finish()
]]

--- By rank: the heaps that it had mapped, what it computed, and of how many heaps it had huge pages, if these were
--- given to it on demand.
local function run(before)
  local folder, clean = shell.temporary()
  local out, status = shell.run(("%s %s run -n 2 -t 1 %s"):format(before, shell.perilune,
    shell.write(folder .. "/script.lua", script)))
  clean()
  assert.equal(0, status, out)
  local heaps, sums, huge = {}, {}, {}
  for rank, n, pages, text in out:gmatch "rank (%d): heaps (%d+), huge ([^;]+);([^\n]*)" do
    rank = tonumber(rank)
    heaps[rank], sums[rank], huge[rank] = tonumber(n), text, pages
  end
  assert.is_truthy(sums[0] and sums[1], out)
  return heaps, sums, huge
end

describe("memory that ranks of a machine map from each other", function()
  local missing = not shell.has "mpirun" and "Open MPI was not found" or shell.no_launcher()
  local heaps, sums, huge

  it("is there on each, its own and the other's", function()
    if missing then return pending(missing) end
    heaps, sums, huge = run ""
    assert.same({ [0] = 2, [1] = 2 }, heaps)
    assert.is_true(tonumber((sums[0]:match "%S+$")) > 0)
  end)

  it("has huge pages where Linux gives them on demand", function()
    if missing then return pending(missing) end
    if (huge[0] .. huge[1]):match "false" then return pending "no huge pages on demand in files in memory" end
    assert.same({ [0] = "2 of true", [1] = "2 of true" }, huge)
  end)

  for what, before in pairs {
    ["where files may not be as long as memory"] = "ulimit -f 1000000;",
    ["where ranks send messages only"] = "PERI_MPI_NEAR=0",
    ["where /dev/shm is full"] = [[unshare --mount sh -c 'mount -t tmpfs -o size=64k none /dev/shm && ]]
      .. [[! head -c 1000000 /dev/zero >/dev/shm/full 2>/dev/null && exec "$@"' full]],
  } do
    it("changes no bit " .. what, function()
      if missing then return pending(missing) end
      if before:match "unshare" and select(2, shell.run "unshare --mount mount -t tmpfs none /dev/shm") ~= 0 then
        return pending "namespaces of mounts cannot be made here"
      end
      local few, same = run(before)
      local n = before:match "ulimit" and 0 or before:match "unshare" and 2 or 1
      assert.same({ [0] = n, [1] = n }, few)
      assert.same(sums, same)
    end)
  end
end)
