-- errors.lua: what Perilune raises, and whose line it is: every error ends with the script's file and line, and inside
-- a model it begins with the module's path:   over_arch.model.0: Linear: x is [4, 16], wanted [*, 15] (my_model.lua:31)
--
-- The place is the innermost frame that is not Perilune's own. It is looked for when an error is raised, never before:
-- running code pays nothing. Errors that C or a check of Perilune raises know their place at once (`fail`, `raise`);
-- those of scripts, and what a check forgot, get it from `locate`, the handler of every xpcall of Perilune. Requires
-- nothing of Perilune but the environment.
local getenv = require "perilune.environment"

local M = {}

--- PERI_TRACEBACK=1: errors keep the stack of where they were raised.
M.tracing = getenv "PERI_TRACEBACK" == "1"

--- The number of the rank that runs, or nil. perilune.ffi says how.
function M.rank() end

-- -- the error --------------------------------------------------------------------------------------------------------

--- What failing calls raise.
---   code     negative number
---   name     "EINVAL"
---   message  what was wrong, without the places
---   where    place in C ("runtime/x.c:12") or ""
---   rank     that failed, or nil
---   place    of the script ("my_model.lua:31") or nil
---   path     of the module ("over_arch.model.0") or nil
---   trace    the stack (only when tracing)
--- As text it is "path: message (place)".
local Error = { class_name = "peri.Error" }
Error.__index = Error
M.Error = Error

local function text(message, path, place)
  if path then message = path .. ": " .. message end
  if place then message = ("%s (%s)"):format(message, place) end
  return message
end
function Error.__tostring(e) return text(e.message, e.path, e.place) end
function Error.__concat(a, b) return tostring(a) .. tostring(b) end

-- -- whose frame it is ------------------------------------------------------------------------------------------------

-- Chunks of Perilune: files beside this one; what the launcher has packed (runtime/gen/pack.lua), and what is made of
-- text (signature.lua).
local NAMED = "=perilune"
local folder = debug.getinfo(1, "S").source:match "^(.*)errors%.lua$"

local function of_library(source) return source:sub(1, #folder) == folder or source:sub(1, #NAMED) == NAMED end

--- Whether a chunk (its "source") is Perilune's.
M.of_library = of_library

local function place_of(info, line)
  local name = info.source:sub(1, 1) == "@" and info.source:sub(2) or info.short_src
  return line > 0 and ("%s:%d"):format(name, line) or name
end

--- Lines of a function's tail calls, from its bytecode: `return self.hidden(x)` leaves no frame behind.
local function tail_lines(f)
  local util = require "jit.util"
  local function op(g, pc)
    local ins = util.funcbc(g, pc)
    return ins and bit.band(ins, 255)
  end
  local tail = {} -- of calls with fixed and with variable arguments
  for _, example in ipairs { "local f = ... return f(1)", "local f = ... return f(...)" } do
    local g, pc = loadstring(example), 1
    while op(g, pc + 1) do pc = pc + 1 end
    tail[op(g, pc)] = true
  end
  local lines, pc = {}, 1
  while op(f, pc) do
    if tail[op(f, pc)] then lines[#lines + 1] = util.funcinfo(f, pc).currentline end
    pc = pc + 1
  end
  return lines
end

--- The place of a function that gave way to what it called: its only tail call, else where it begins.
local function tail_place(f)
  if type(f) ~= "function" then return end
  local info = debug.getinfo(f, "S")
  if info.what == "C" or of_library(info.source) then return end
  local lines = tail_lines(f)
  return place_of(info, #lines == 1 and lines[1] or info.linedefined)
end

local function is_module(x) return type(x) == "table" and type(rawget(x, "_children")) == "table" end

--- The path from module `from` down to module `to`, or nil.
local function path_between(from, to, seen)
  if rawequal(from, to) then return "" end
  if seen[from] then return end
  seen[from] = true
  for _, child in ipairs(from:named_children()) do
    local rest = path_between(child.module, to, seen)
    if rest then return rest == "" and child.name or child.name .. "." .. rest end
  end
end

--- The path of the innermost of `modules` (innermost first) in the outermost that has it. Wrappers of whole models have
--- no part in paths.
local function find_path(modules)
  for i = #modules, 2, -1 do
    local path = modules[i].wraps ~= true and path_between(modules[i], modules[1], {})
    if path and path ~= "" then return path end
  end
end

local searching = false
--- The same; nil where walking through the modules is an error itself.
local function path_of(modules)
  if searching or #modules < 2 then return end
  searching = true
  local ok, path = pcall(find_path, modules)
  searching = false
  return ok and path or nil
end

--- Functions of Perilune that do nothing but run a script's function, which they take first: they tell of it when it
--- has made room for what it called. And those that run the forward of the module that they take first.
M.runners, M.module_calls = setmetatable({}, { __mode = "k" }), setmetatable({}, { __mode = "k" })

local function through(...) return ... end
--- f(...), as a frame of its own.
function M.run(f, ...) return through(f(...)) end
M.runners[M.run] = true

local MOST_LEVELS = 1000 -- finding each one costs as many steps as it is deep, and a function that calls itself for
                         -- ever has 60,000

--- The running stack: place of the script, path of the innermost module, and that module if it is being called.
local function survey()
  local place, modules, called, inner, level = nil, {}, false, nil, 2
  while level < MOST_LEVELS do
    local info = debug.getinfo(level, "Slf")
    if not info then break end
    local name, value = debug.getlocal(level, 1)
    if name == "self" and is_module(value) then
      if modules[#modules] ~= value then modules[#modules + 1] = value end
      called = called or value == modules[1] and (M.module_calls[info.func] or info.func == value.forward)
    end
    local run = M.runners[info.func] and value or M.module_calls[info.func] and value.forward
    if not place and run and inner ~= run then place = tail_place(run) end
    if not place and info.currentline > 0 and not of_library(info.source) then
      place = place_of(info, info.currentline)
    end
    if info.what ~= "C" then inner = info.func end
    level = level + 1
  end
  return place, path_of(modules), called and modules[1] or nil
end

--- The stack, innermost first, without the frames of this file.
local function stack()
  if not M.tracing then return end
  local level = 2
  while debug.getinfo(level, "S") and debug.getinfo(level, "S").source == folder .. "errors.lua" do
    level = level + 1
  end
  return (debug.traceback("", level):gsub("^\n", ""))
end

-- -- raising ----------------------------------------------------------------------------------------------------------

--- The name of a module's class, if it is one of Perilune's. A module that is graphed has a forward of its own.
local function own_class(module)
  local forward = module and getmetatable(module).forward
  if forward and of_library(debug.getinfo(forward, "S").source) then return module.class_name end
end

--- Raise an error of these fields; its places are found here unless it brings them.
function M.raise(fields)
  if not fields.place then
    local module
    fields.place, fields.path, module = survey()
    local class = own_class(module) -- a layer's user knows the layer, not the function in C that it calls
    if class then fields.message = fields.message:gsub("^peri_[%w_]+", class) end
  end
  fields.trace, fields.rank = fields.trace or stack(), fields.rank or M.rank()
  error(setmetatable(fields, Error), 0)
end

--- An error for misuse that Lua found. -1: PERI_EINVAL.
function M.fail(message) M.raise { code = -1, name = "EINVAL", message = message, where = "" } end

-- -- errors of others -------------------------------------------------------------------------------------------------

--- A function(x) that names a tensor in a few words, and returns false for other values; of tensor/core.lua.
M.handle_text = false

--- A number as tostring writes it, with 14 digits, but for whole numbers below 2^63, which have all their digits, and
--- numbers that would look like whole ones.
function M.numeral(x)
  local digits = tostring(x)
  if x == math.floor(x) then return math.abs(x) < 2 ^ 63 and ("%.0f"):format(x) or digits end
  local shown = tonumber(digits)
  return shown == math.floor(shown) and ("%.17g"):format(x) or digits
end

--- What a value is, in a few words.
local function kind(value)
  local t = type(value)
  if t == "string" then return #value <= 40 and ("'%s'"):format(value) or ("'%s...'"):format(value:sub(1, 40)) end
  if t == "number" then return M.numeral(value) end
  if t == "boolean" or t == "nil" then return tostring(value) end
  if t == "cdata" then
    local short = M.handle_text and M.handle_text(value) -- a tensor's, without its elements
    if short then return short end
    local ok, said = pcall(tostring, value)
    return ok and (said:match "^cdata<struct peri_([%w_]+)_ref>" or said) or "cdata"
  end
  if t == "table" and type(rawget(value, "class_name")) == "string" then return "the class " .. value.class_name end
  local meta = t == "table" and getmetatable(value)
  local name = type(meta) == "table" and rawget(meta, "class_name")
  return name or "a " .. t
end
M.kind = kind

--- A plain table of few fields: "{ lr = '0.1', params = Linear }"; nil for others.
local function fields_of(value)
  if type(value) ~= "table" or getmetatable(value) then return end
  local parts = {}
  for key, field in next, value do
    if type(key) ~= "string" or #parts == 8 then return end
    parts[#parts + 1] = ("%s = %s"):format(key, kind(field))
  end
  table.sort(parts)
  return #parts > 0 and "{ " .. table.concat(parts, ", ") .. " }" or "{}"
end

--- "name(arguments)" of the function that runs at a level: arguments first, first + step, ... (negative numbers: of
--- `...`).
local function given(name, level, first, step)
  local values, n, i = {}, 0, first
  while true do
    local known, value = debug.getlocal(level, i)
    if not known or step > 0 and i > debug.getinfo(level, "u").nparams then break end
    values[#values + 1] = fields_of(value) or kind(value)
    if value ~= nil then n = #values end
    i = i + step
  end
  -- one nil may be meant, or be the mistake
  return ("%s(%s)"):format(name, table.concat(values, ", ", 1, math.min(n + 1, #values)))
end

--- The name of a function that a module of Perilune offers, or nil: a tail call leaves no name on the stack.
local function public_name(f)
  local found
  for module, content in pairs(package.loaded) do
    if module:match "^perilune" and type(content) == "table" then
      for key, value in next, content do
        if value == f and type(key) == "string" and (not found or key < found) then found = key end
      end
    end
  end
  return found
end

--- The function of Perilune that the script called, with what it was given: "matmul(tensor f32 [2, 3] on cpu, nil)";
--- inside a model, the innermost module. The stack is that of an error inside it.
local function called()
  local level, said = 2, "Perilune"
  while true do
    local info = debug.getinfo(level, "Slnfu")
    if not info or info.what ~= "C" and not of_library(info.source) or M.runners[info.func] then return said end
    if info.source ~= folder .. "errors.lua" and info.what ~= "C" then
      local first, self = debug.getlocal(level, 1)
      if M.module_calls[info.func] then return (given(self.class_name, level + 1, -1, -1)) end
      local name = info.name or public_name(info.func)
      if name and info.nparams > 0 then said = given(name:gsub("^__", ""), level + 1, first == "self" and 2 or 1, 1) end
    end
    level = level + 1
  end
end

--- The frame that a message "file:12: text" blames, and the text; nil when it names none.
local function blamed(message)
  for level = 2, math.huge do
    local info = debug.getinfo(level, "Sl")
    if not info then return end
    local head = ("%s:%d: "):format(info.short_src, info.currentline)
    if info.currentline > 0 and message:sub(1, #head) == head then return info, message:sub(#head + 1) end
  end
end

--- Words of Lua's own that have no position: what a call on something that cannot be called, or a C function, says.
local function lacks_position(message) return message:find "^attempt to " or message:find "^bad argument #" end

--- The innermost frame that is not C's or this file's.
local function innermost()
  for level = 2, math.huge do
    local info = debug.getinfo(level, "Sl")
    if not info then return end
    if info.what ~= "C" and info.source ~= folder .. "errors.lua" then return info end
  end
end

--- Is this error passed on by Perilune, which caught it and tidied up?
local function passed_on()
  local level = 3
  while true do
    local info = debug.getinfo(level, "S")
    if not info then return false end
    if info.what ~= "C" then return of_library(info.source) end
    level = level + 1
  end
end

--- Whether memory was short: of the library, or of Lua. LuaJIT's words are passed on with or without a position.
function M.memory(err)
  if type(err) == "table" then return err.name == "ENOMEM" end
  return type(err) == "string" and err:sub(-17) == "not enough memory"
end

local NOTHING = "an error without a message"
-- What was raised last that is no Error: its value, which must stay as it is, and its places.
local last = { value = false }

--- The handler of Perilune's protected calls: xpcall(f, errors.locate, ...). Messages of Lua become Errors with their
--- places. A value that a script raised on purpose (a table, a text without a position) stays as it is, and its places
--- are kept for `describe`.
function M.locate(err)
  if not err then err = NOTHING end -- callers take nil and false for "no error"
  if getmetatable(err) == Error then return err end
  if rawequal(err, last.value) and passed_on() then return err end
  local place, path = survey()
  local info, message
  if type(err) == "string" then info, message = blamed(err) end
  if not info and type(err) == "string" and lacks_position(err) then
    info = innermost()
    if info and not of_library(info.source) then info = nil end
  end
  if not info then
    last = { value = err, place = place, path = path, trace = stack() }
    return err
  end
  local trace = stack()
  if of_library(info.source) then
    if trace then trace = err .. "\n" .. trace end
    local dotted = err:match "local 'self' %(a %w+ value%)$" and called():match "^([%w_]+)%("
    message = dotted and ("%s: it is a method: object:%s(...), with a colon"):format(dotted, dotted)
      or ("%s: these arguments do not fit%s"):format(called(), trace and "" or " (PERI_TRACEBACK=1 tells where)")
  else
    place = place_of(info, info.currentline)
  end
  local code, name = -1, "ELUA"
  if M.memory(err) then code, name, message = -2, "ENOMEM", "no memory for Lua" end
  local fields = { code = code, name = name, message = message, where = "", rank = M.rank(), place = place, path = path,
    trace = trace }
  return setmetatable(fields, Error)
end

--- LuaJIT's words about a file that it could not load, taken apart: what is wrong, and where ("file:line").
function M.syntax(problem)
  local file, line, message = problem:match "^(.-):(%d+): (.*)$"
  if not file then return problem end
  return message, file .. ":" .. line
end

local function message_of(err) return err.message end
--- What a caught error says, whatever it is, without its places.
function M.said(err)
  local has_fields, message = pcall(message_of, type(err) == "table" and err or nil) -- some objects refuse other names
  if not has_fields or not message then message = err end
  if message == nil then return NOTHING end
  if type(message) ~= "table" or (getmetatable(message) or {}).__tostring then
    local ok, text_of = pcall(tostring, message)
    return ok and text_of or "an error object whose __tostring fails: " .. (type(text_of) == "string" and text_of
      or kind(text_of))
  end
  local fields = fields_of(message)
  return "the script raised a table" .. (fields and ": " .. fields or "")
end

--- What a check found that does not fit, in words; nil: nothing. ok, err: what pcall(check, ...) returned. A check that
--- had no memory has found nothing, and raises that.
function M.refusal(ok, err)
  if ok then return nil end
  if M.memory(err) then error(err, 0) end
  return (tostring(type(err) == "table" and err.message or err):gsub("^: ", ""))
end

--- The parts of a caught error, whatever it is: its text with its places, the name of its status (nil for scripts'
--- own), its stack (nil unless tracing), and its place in C.
function M.describe(err)
  if getmetatable(err) == Error then return tostring(err), err.name, err.trace, err.where end
  local kept = rawequal(err, last.value) and last or {}
  return text(M.said(err), kept.path, kept.place), type(err) == "table" and err.name or nil, kept.trace, ""
end

return M
