-- launch/serve.lua: `perilune serve`: the options of the server, and becoming it. The server is a program of its own
-- beside the launcher, perilune-serve, without Lua in it: runtime/serve.
local M = {}

local TIMES = { us = 1e3, ms = 1e6, s = 1e9, m = 60e9, h = 3600e9 }
local SIZES = { [""] = 1, k = 2 ^ 10, M = 2 ^ 20, G = 2 ^ 30 }

--- The number n as perilune-serve takes it; nil and what is wrong with the option's text: it is none of least..most.
local function checked_text(option, text, n, least, most, words)
  if n and n >= least and n <= most then return ("%.0f"):format(n) end
  return nil, ("%s: '%s', allowed: %s"):format(option, text, words)
end

--- Converters of the text of an option: to what perilune-serve takes (nanoseconds, bytes).
local function time(option, least, most)
  local words = ("times from %s to %s, such as 500us, 2ms, 1.5s"):format(least > 0 and "1ms" or "0",
    most and "10s" or "24h")
  return function(text)
    local number, unit = text:match "^(%d+%.?%d*)(%a*)$"
    local n = number and (TIMES[unit] or number + 0 == 0 and unit == "" and 1) and number * (TIMES[unit] or 1)
    return checked_text(option, text, n, least, most or 86400e9, words)
  end
end

local function size(option)
  return function(text)
    local number, unit = text:match "^(%d+)([kMG]?)$"
    return checked_text(option, text, number and number * SIZES[unit], 1, 2 ^ 40,
      "sizes from 1 byte to 1024G, such as 64k, 16M, 1G")
  end
end

local function whole(option, least, most)
  return function(text)
    return checked_text(option, text, text:match "^%d+$" and tonumber(text), least, most,
      ("whole numbers %d..%d"):format(least, most))
  end
end

local function filled(text)
  if text == "" then return nil, "--name: it is empty, wanted the name by which requests call the model" end
  return text
end

local NAMES = { "listen", "port", "name", "workers", "batch", "delay", "queue", "timeout", "idle", "grace", "watch",
  "follow", "saved", "samples", "body", "memory", "connections" }

--- Declare the command and its options.
function M.add(parser)
  local serve = parser:command("serve",
    "Answer over HTTP with a model file: JSON, the Open Inference Protocol (KServe v2), a page at /.")
    :epilog("SIGTERM or Ctrl-C stops it: what has been asked is finished. docs/serving.md has the forms of requests, "
      .. "and what is done about what does not fit.")
  local function option(flags, help, argname, convert)
    local o = serve:option(flags, help):argname(argname)
    return convert and o:convert(convert) or o
  end
  serve:argument("model", "The model file (model.peri).")
  option("--listen", "The address to listen on; default: 127.0.0.1, which only this machine reaches; 0.0.0.0 means "
    .. "all addresses. There is no encryption and no password: put a proxy in front where others reach it.", "ADDRESS")
  option("-p --port", "The port (default: 8080; 0: any that is free, which is printed).", "PORT",
    whole("--port", 0, 65535))
  option("--name", "What requests call the model (default: the name in the file, or else the file's).", "NAME", filled)
  option("--host", "A name by which clients call this machine (Host), beside localhost and all numeric addresses; "
    .. "others are refused, since a stranger's page could let a name of its own point here. May be repeated.",
    "NAME"):count "*"
  option("-t --workers", "Threads that predict (default: as many as processors).", "N", whole("--workers", 1, 256))
  option("--batch", "A batch with so many samples takes no further request (256).", "N", whole("--batch", 1, 2 ^ 20))
  option("--delay", "How long a request may wait for others to make a batch with (0: only those that wait already go "
    .. "together).", "TIME", time("--delay", 0, 10e9))
  option("--queue", "Requests that may wait for a worker; another one is refused at once, with 503 (1000).", "N",
    whole("--queue", 1, 2 ^ 20))
  option("--timeout", "From the first byte of a request to its turn: later ones are not computed (504), and those "
    .. "that are not whole by then are closed. As long a client may take to read its answer (10s).", "TIME",
    time("--timeout", 1e6))
  option("--idle", "A connection without a request is closed after so long (60s).", "TIME", time("--idle", 1e6))
  option("--grace", "At the end: how long what has been asked may take (30s).", "TIME", time("--grace", 0))
  option("--watch", "Look so often whether the model file has been replaced, and go over to the new one between two "
    .. "batches (1s; 0: never).", "TIME", time("--watch", 0))
  option("--follow", "Serve what a trainer saves into this folder of checkpoints: the newest, increments too, soon "
    .. "after it is there. --watch is 100ms then.", "FOLDER")
  option("--saved", "What the model is called in those checkpoints, as in peri.checkpoint.save(path, { model = model "
    .. "}) (model).", "NAME")
  option("--samples", "The most samples of a request (4096).", "N", whole("--samples", 1, 2 ^ 20))
  option("--body", "The most bytes of a request (16M).", "SIZE", size "--body")
  option("--memory", "The most bytes of all requests at one time (256M).", "SIZE", size "--memory")
  option("--connections", "Connections at one time; a further one takes the place of the one that has been idle for "
    .. "longest (1000).", "N", whole("--connections", 1, 1000000))
end

--- The words of perilune-serve.
function M.words(options)
  local launcher = require "perilune.launcher"
  local words = { "model=" .. options.model, "workers=" .. (options.workers or math.min(launcher.cpus(), 256)) }
  for _, name in ipairs(NAMES) do
    if options[name] and name ~= "workers" then words[#words + 1] = name .. "=" .. options[name] end
  end
  for _, name in ipairs(options.host or {}) do words[#words + 1] = "host=" .. name end
  return words
end

--- Become the server. Returns, with an exit code, only if that is not possible.
function M.run(options)
  local launcher = require "perilune.launcher"
  local program = launcher.program:match "^(.*)/[^/]*$" .. "/perilune-serve"
  local why = launcher.become(program, M.words(options))
  if io.open(program) then io.stderr:write(("perilune: serve: %s: %s\n"):format(program, why))
  else
    io.stderr:write(("perilune: serve: there is no %s: Perilune was built without libmicrohttpd. Install it (Debian: "
      .. "apt-get install libmicrohttpd-dev; or: make setup) and build again (make probe all)\n"):format(program))
  end
  return 1
end

return M
