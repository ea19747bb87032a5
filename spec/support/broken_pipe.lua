-- broken_pipe.lua: one rank of a world writes into a pipe that nobody reads; a child of it ends itself by SIGPIPE.
-- Prints one line. Run by spec/dist/mpi_fault_spec.lua under mpirun.
local ffi = require "ffi"
local peri = require "perilune"

ffi.cdef [[
int pipe(int *fds);
int close(int fd);
int64_t write(int fd, const void *data, size_t bytes);
]]
local fds = ffi.new "int[2]"

local world = peri.init { timeout = 30 }
assert(ffi.C.pipe(fds) == 0)
ffi.C.close(fds[0])
local wrote = tonumber(ffi.C.write(fds[1], "x", 1))
local pipe = io.popen "sh -c 'kill -PIPE $$'; echo $?"
local child = tonumber(pipe:read "*l") - 128
pipe:close()
io.stdout:write(("rank %d: write %d, children end by %d\n"):format(world:rank(), wrote, child))
world:barrier():wait()
