-- launch/repl.lua: an interactive session: `perilune` on a terminal, and perilune -i, -e, -l.
local errors = require "perilune.errors"

local M = {}

local MOST_LINES = 1000 -- of the history
local MOST_ENTRIES, MOST_DEPTH = 24, 3 -- of a table that is shown

-- -- values -----------------------------------------------------------------------------------------------------------

local function key_text(key)
  return type(key) == "string" and key:match "^[%a_][%w_]*$" or ("[%s]"):format(M.show(key, MOST_DEPTH))
end

--- A value as a session shows it: strings in quotes, tables with what they hold, handles and objects as they print
--- themselves.
function M.show(value, depth)
  depth = depth or 0
  if type(value) == "string" then return ("%q"):format(value):gsub("\\\n", "\\n") .. "" end
  if type(value) == "number" then return errors.numeral(value) end
  local meta = type(value) == "table" and debug.getmetatable(value)
  if type(value) ~= "table" or meta and (meta.__tostring or meta.__names) then
    if meta and meta.__names then return "a part of the library: press Tab behind its name and a dot" end
    return value == nil and "nil" or errors.said(value)
  end
  if depth >= MOST_DEPTH then return "{...}" end
  local parts, n = {}, #value
  for i = 1, math.min(n, MOST_ENTRIES) do parts[i] = M.show(value[i], depth + 1) end
  local rest = math.max(0, n - MOST_ENTRIES)
  local names = {}
  for key in next, value do
    if not (type(key) == "number" and key >= 1 and key <= n and key == math.floor(key)) then names[#names + 1] = key end
  end
  table.sort(names, function(a, b) return tostring(a) < tostring(b) end)
  for _, key in ipairs(names) do
    if #parts < MOST_ENTRIES then parts[#parts + 1] = ("%s = %s"):format(key_text(key), M.show(value[key], depth + 1))
    else rest = rest + 1 end
  end
  if rest > 0 then parts[#parts + 1] = ("... %d more"):format(rest) end
  local line = "{ " .. table.concat(parts, ", ") .. " }"
  if #parts == 0 then return "{}" end
  if #line <= 100 and not line:find "\n" then return line end
  local indent = ("  "):rep(depth + 1)
  return "{\n" .. indent .. table.concat(parts, ",\n" .. indent) .. "\n" .. ("  "):rep(depth) .. "}"
end

-- -- lines ------------------------------------------------------------------------------------------------------------

--- `local x = 1` at the beginning of a line makes a variable of the session: a local would be gone with its line.
local function of_session(text)
  return (text:gsub("^%s*local%s+function%f[%W]", "function"):gsub("^%s*local%s+([%a_][%w_%s,]*=)", "%1"))
end

--- Load a text as an expression or as statements. Returns the function, and which of its results is the first that is
--- to be shown: of an expression the second (a call alone behind `return` would be a tail call, which leaves no line
--- for errors); or nil, "more" if it is not finished; or nil, the error.
function M.load(text)
  local body = of_session(text)
  local f, of_expression = loadstring("return nil, " .. body:gsub("^%s*=", ""), "=input")
  if f then return f, 2 end
  local problem
  f, problem = loadstring(body, "=input")
  if f then return f, 1 end
  if problem:match "near '<eof>'$" or of_expression:match "near '<eof>'$" then return nil, "more" end
  return nil, problem
end

--- Show the results of a call from number `first` on, or its error. Returns whether it worked.
local function shown(first, ok, ...)
  if not ok then
    local message, _, trace = errors.describe((...))
    io.stderr:write(message, "\n", trace and trace .. "\n" or "")
    return false
  end
  local n = select("#", ...)
  for i = first, n do print(M.show((select(i, ...)))) end
  return true
end

--- Run a loaded text, and show what it returns from result `first` on. Ctrl-C stops it. Returns whether it worked.
local function execute(f, first)
  local launcher = require "perilune.launcher"
  launcher.interrupts(true)
  local function ended(...)
    launcher.interrupts(false)
    return shown(first, ...)
  end
  local done = ended(xpcall(errors.run, errors.locate, f))
  io.stdout:flush()
  return done
end

-- -- the session ------------------------------------------------------------------------------------------------------

--- Where lines are kept from session to session; nil: nowhere.
local function history_file()
  local state, home = os.getenv "XDG_STATE_HOME", os.getenv "HOME"
  local folder = state and state ~= "" and state or home and home ~= "" and home .. "/.local/state"
  return folder and folder .. "/perilune/history"
end

local function read_history(editor)
  local file = history_file() and io.open((history_file()))
  if not file then return end
  local lines = {}
  for line in file:lines() do lines[#lines + 1] = line end
  file:close()
  for i = math.max(1, #lines - MOST_LINES + 1), #lines do editor:remember(lines[i]) end
end

local function write_history(editor)
  local path = history_file()
  if not path or #editor.history == 0 then return end
  local text = table.concat(editor.history, "\n", math.max(1, #editor.history - MOST_LINES + 1)) .. "\n"
  require("perilune.ffi").C.peri_file_write(path, text, #text, true) -- fails where a home cannot be written: no history
end

--- A function(prompt, text) -> line, which goes on with a text that is not finished (or nil); nil at the end; nil, true
--- for Ctrl-C. And what is to be done at the end.
local function reader()
  local launcher = require "perilune.launcher"
  if not launcher.interactive() then return function() return (io.read "*l") end, function() end end
  local earlier = ""
  local editor = require("perilune.launch.editor").new(launcher.key, function(text)
    io.stdout:write(text)
    io.stdout:flush()
  end, launcher.columns, function(before)
    local first, words = require("perilune.launch.complete").complete(earlier .. before)
    return first - #earlier, words
  end)
  read_history(editor)
  return function(prompt, begun)
    earlier = begun and begun .. "\n" or ""
    launcher.raw(true)
    local line, stopped = editor:line_of(prompt)
    launcher.raw(false)
    if line and editor:remember(line) then write_history(editor) end
    return line, stopped
  end, function() write_history(editor) end
end

--- What a session has: the library and its parts, and help.
local function settle()
  local peri = require "perilune"
  _G.peri = peri
  for _, name in ipairs { "nn", "plan", "data" } do
    if rawget(_G, name) == nil then _G[name] = peri[name] end
  end
  _G.help = setmetatable({}, { __call = function(_, what)
    local help = require "perilune.launch.help"
    local text, why
    if what == nil or type(what) == "string" then
      text, why = help.text(what)
    else
      text, why = help.text_of_value(what)
    end
    print(text or why)
  end, __tostring = function()
    return 'help "NAME" tells about a name or a word, help(value) about what a value is; help() lists the pages'
  end })
end

local BANNER = [[
%s   peri, nn, plan, data are the library; help "NAME" tells about a name, Tab completes, Ctrl-D leaves.]]

--- Gives sessions `quit` and `exit`, which people from other languages type. Returns a function that says whether one
--- of them was called.
local function add_quit()
  local left = false
  local quit = setmetatable({}, { __call = function() left = true end,
    __tostring = function() return "Ctrl-D leaves, and so does quit()" end })
  for _, name in ipairs { "quit", "exit" } do
    if rawget(_G, name) == nil then _G[name] = quit end
  end
  return function() return left end
end

local function session(version)
  local read, finish = reader()
  local left = add_quit()
  if require("perilune.launcher").interactive() then print(BANNER:format(version)) end
  local text
  while not left() do
    local line, stopped = read(text and ">> " or "> ", text)
    if stopped then text = nil
    elseif not line then break
    else
      text = text and text .. "\n" .. line or line
      local f, found = M.load(text)
      if f then
        jit.off(f) -- Ctrl-C does not reach a compiled loop; the functions that it calls are compiled
        execute(f, found)
      elseif found ~= "more" then io.stderr:write((errors.syntax(found)), "\n") end
      if f or found ~= "more" then text = nil end
    end
  end
  finish()
end

--- The words of `perilune -l MODULE -e TEXT -i [SCRIPT ARGUMENTS]`. Returns { steps = { { "l", x } ... }, interactive
--- =, script =, arguments = }, or nil and what is wrong.
function M.parse(words)
  local options, i = { steps = {}, arguments = {} }, 1
  while words[i] and words[i]:match "^%-" do
    local word = words[i]
    if word == "-i" then options.interactive = true
    elseif word:match "^%-[el]" then
      local value = word:sub(3)
      if value == "" then
        i = i + 1
        value = words[i]
      end
      if not value then
        return nil, word .. (word == "-e" and " is followed by Lua text" or " is followed by a module's name")
      end
      table.insert(options.steps, { word:sub(2, 2), value })
    else return nil, ("'%s' does not go with -e, -i, -l"):format(word) end
    i = i + 1
  end
  options.script = words[i]
  options.arguments = { unpack(words, i + 1) }
  return options
end

--- Steps of -l and -e, then the script. Returns whether all worked.
local function run_steps(options)
  for _, step in ipairs(options.steps) do
    local f, found
    if step[1] == "l" then
      f = loadstring(("_G[%q] = require %q"):format(step[2]:match "[%w_]+$" or step[2], step[2]), "=-l")
    else f, found = M.load(step[2]) end
    if found == "more" then found = "-e: the text is not finished" end
    if not f then io.stderr:write("perilune: ", (errors.syntax(found)), "\n") end
    if not (f and execute(f, found or 1)) then return false end
  end
  if not options.script then return true end
  local chunk, problem = loadfile(options.script)
  if not chunk then
    io.stderr:write("perilune: ", problem, "\n")
    return false
  end
  _G.arg = { [0] = options.script, unpack(options.arguments) }
  return execute(function() chunk(unpack(options.arguments)) end, 1)
end

--- The command. Returns the exit code: 1 if a step failed and no session followed.
function M.run(options, version)
  settle()
  local worked = run_steps(options)
  local interactive = options.interactive or #options.steps == 0 and not options.script
  if interactive then session(version) end
  if package.loaded["perilune.dist"] then pcall(require("perilune.dist").finish) end
  return (worked or interactive) and 0 or 1
end

return M
