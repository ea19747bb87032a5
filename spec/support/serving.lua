-- serving.lua: `perilune serve` as specs need it: a server of its own port, questions by curl, and its end.
local shell = require "spec.support.shell"

local M = {}
local Server = {}
Server.__index = Server

--- What a command says, and its status.
function M.run(command)
  local pipe = io.popen(command .. " 2>&1; printf '\\n%d' $?")
  local text = pipe:read "*a"
  pipe:close()
  local out, code = text:match "^(.*)\n(%d+)$"
  return out, tonumber(code)
end

--- Why there is no server here; nil: there is one.
function M.missing()
  local file = io.open(shell.build .. "/perilune-serve")
  if not file then return "libmicrohttpd was not found, so there is no server" end
  file:close()
  if not M.run("curl --version"):match "^curl" then return "curl was not found: make setup" end
end

-- `make stress`: beside a server under the thread sanitizer
local program = os.getenv "PERI_SERVE_PROGRAM" or shell.perilune

--- Start the server of a model file; options: words of its command line; env: of its environment (NAME=VALUE). Returns
--- { url =, log =, process = }.
function M.start(path, options, env)
  local server = setmetatable({ log = os.tmpname() }, Server)
  server.process = M.run(("%s %s serve %s -p 0 %s >%s 2>&1 & echo $!"):format(env or "", program, path, options or "",
    server.log)):match "%d+"
  for _ = 1, 200 do
    server.url = shell.read(server.log):match "http://[%d.]+:%d+/"
    if server.url then return server end
    os.execute "sleep 0.05"
  end
  error(shell.read(server.log))
end

--- End it by a signal ("TERM"), and wait for it; nothing may have been found by a sanitizer. Returns what it said.
function Server:stop(signal)
  local pid = self.process
  if not pid then return end
  self.process = nil
  os.execute(("kill -%s %s"):format(signal or "TERM", pid))
  for _ = 1, 200 do
    if M.run("kill -0 " .. pid):match "No such" then
      local text = shell.read(self.log)
      os.remove(self.log)
      assert(not text:match "Sanitizer", text)
      return text
    end
    os.execute "sleep 0.05"
  end
  error("it does not stop: " .. shell.read(self.log))
end

function Server:get(where) return (M.run("curl -s " .. self.url .. where)) end

function Server:post(where, body, headers)
  local file = os.tmpname()
  local f = assert(io.open(file, "wb"))
  f:write(body)
  f:close()
  local out = M.run(("curl -s -S --data-binary @%s %s %s"):format(file, headers or "", self.url .. where))
  os.remove(file)
  return out
end

return M
