-- shell.lua: run commands from a spec and see what they print.
local M = {}

--- The folder of the build under test, relative to the tree ("build", "build/san-address").
M.build = os.getenv "PERI_BUILD" or "build"
--- The launcher of that build.
M.perilune = M.build .. "/perilune"
M.sanitizer = os.getenv "PERI_SAN" or ""

--- mpirun, and luajit as a rank of it: only the rank is run with the sanitizer's runtime that this process was started
--- with.
M.mpirun = "env -u LD_PRELOAD OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe"
M.rank = ("env LD_PRELOAD='%s' luajit"):format(os.getenv "LD_PRELOAD" or "")

--- Why there is no launcher, or nil: for `pending`.
function M.no_launcher()
  if M.exists(M.perilune) then return nil end
  return "the launcher was not built (libluajit or argparse was not found)"
end

function M.has(program) return os.execute(("command -v %s >/dev/null 2>&1"):format(program)) == 0 end

--- A function that compiles spec/support/NAME.c in `folder`, to be loaded before the C library (LD_PRELOAD), and
--- returns the library's path; or nil, and why not: for `pending`.
function M.preloaded(folder, name)
  if M.sanitizer ~= "" then return nil, "the sanitizers have calls of their own" end
  local cc = M.has "cc" and "cc" or M.has "gcc" and "gcc"
  if not cc then return nil, "no C compiler was found" end
  return function()
    local path = ("%s/%s.so"):format(folder, name)
    local out, status = M.run(("%s -shared -fPIC -o %s spec/support/%s.c -ldl"):format(cc, path, name))
    assert(status == 0, out)
    return path
  end
end

--- The command of a browser that needs no screen; or nil, and why there is none: for `pending`.
function M.browser()
  for _, name in ipairs { "chromium", "chromium-browser", "google-chrome" } do
    if M.has(name) then return name .. " --headless --no-sandbox --disable-gpu" end
  end
  return nil, "no chromium to look at the page with (Debian: chromium)"
end

--- Start a shell command; the function that is returned waits for its end: output (stdout and stderr together) and exit
--- status. Variables that the test runner sets for this process are kept from it, unless `env` (a table) sets them. It
--- is ended after `seconds` (60).
function M.start(command, env, seconds)
  local words = { "env -u LD_PRELOAD -u PERI_LIBRARY -u LUA_PATH -u PERI_TEST_REPORT -u PMIX_MCA_psec" }
  for name, value in pairs(env or {}) do words[#words + 1] = ("%s='%s'"):format(name, value) end
  local pipe = assert(io.popen(("%s timeout %d sh -c '%s' 2>&1; echo \"status $?\""):format(table.concat(words, " "),
    seconds or 60, command:gsub("'", "'\\''"))))
  return function()
    local text = pipe:read "*a"
    pipe:close()
    local out, status = text:match "^(.-)status (%d+)\n$"
    return out, tonumber(status)
  end
end

--- Run one: output and exit status.
function M.run(command, env, seconds) return M.start(command, env, seconds)() end

--- The environment in which plain luajit finds this tree's Lua files and the library under test (a sanitizer's runtime
--- comes first).
function M.luajit_env()
  local here = M.run("pwd"):match "^[^\n]*"
  return {
    LUA_PATH = ("%s/%s/lua/?.lua;%s/lua/?.lua;%s/lua/?/init.lua;%s/?.lua;;"):format(here, M.build, here, here, here),
    PERI_LIBRARY = ("%s/%s/libperilune.so"):format(here, M.build),
    PERI_PLUGIN_PATH = ("%s/%s"):format(here, M.build),
    LD_PRELOAD = os.getenv "LD_PRELOAD" or "",
    PERI_UNCOMPILED = not jit.status() and "1" or nil, -- this process has said it
  }
end

--- Run a Lua text in a plain luajit of its own: output and exit status.
function M.luajit(text)
  local folder, clean = M.temporary()
  local out, status = M.run("luajit " .. M.write(folder .. "/script.lua", text), M.luajit_env())
  clean()
  return out, status
end

--- A temporary folder, removed by the returned function.
function M.temporary()
  local pipe = assert(io.popen "mktemp -d")
  local folder = pipe:read "*l"
  pipe:close()
  return folder, function() os.execute("rm -rf " .. folder) end
end

function M.write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
  return path
end

--- Whether a file is there. (A file that is opened to see that, and not closed, is open in all programs that are
--- started before the collector closes it: mpirun dies of more than 1,024.)
function M.exists(path)
  local file = io.open(path, "rb")
  return file ~= nil and file:close()
end

function M.read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read "*a"
  file:close()
  return text
end

return M
