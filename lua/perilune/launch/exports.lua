-- launch/exports.lua: `perilune export`: a checkpoint, and a script that makes the model that it is of, as a model
-- file.
local errors = require "perilune.errors"
local util = require "perilune.util"
local P = require "perilune.ffi"
local export = require "perilune.export"
local checkpoint = require "perilune.checkpoint"
local names = require "perilune.checkpoint.names"
local Module = require "perilune.nn.module"

local M = {}

--- What is wrong with the options; nil: nothing.
function M.refusal(options)
  if options.verify then
    for _, name in ipairs { "model", "checkpoint", "tables", "size", "dense", "output" } do
      local said = name == "checkpoint" and name or "--" .. name
      if options[name] then return ("export: --verify FILE stands alone, without %s"):format(said) end
    end
    return nil
  end
  if not options.model then
    return "export: --model SCRIPT is missing: a Lua file that returns the model and held-out batches"
  end
  if not options.output then return "export: --output FILE is missing: where the model file will be" end
end

--- "int8", or "users=f16,items=int8,default=int4" as a table.
local function tables_of(text)
  if not text or not text:find "=" then return text end
  local tables = {}
  for part in text:gmatch "[^,]+" do
    local name, dtype = part:match "^(.-)=([%w]+)$"
    if not name then P.fail(("export: --tables '%s': '%s', wanted NAME=DTYPE"):format(text, part)) end
    tables[name] = dtype
  end
  return tables
end

--- What the script returns: { model =, batches =, and options of peri.export.save }.
local function load_script(path)
  local chunk, why = loadfile(path)
  if not chunk then P.fail(("export: --model %s: %s"):format(path, why)) end
  local made = chunk(path)
  if type(made) == "function" then made = made() end
  if type(made) ~= "table" or Module.is(made) or not Module.is(made.model) then
    P.fail(("export: --model %s returns %s, wanted { model = an nn.Module, batches = { held-out batches } }"):format(
      path, errors.kind(made)))
  end
  return made
end

--- What an input takes, in words.
local function text_of(x)
  local text = x.kind == "dense" and ("%d numbers"):format(x.columns) or x.kind == "whole" and "whole numbers"
    or x.kind == "numbers" and "numbers" or x.mapped and "any 64-bit ids" or ("ids 0..%d"):format(x.rows - 1)
  if x.weighted then text = text .. ", each with a weight" end
  if x.length > 0 then text = ("%s, %d of them"):format(text, x.length) end
  if x.like then text = ("%s, as many as '%s' has ids"):format(text, x.like) end
  if x.counts then text = ("%s, how many of '%s'"):format(text, x.counts) end
  return text .. (x.optional and " (optional)" or "")
end

local function verify(path)
  local file = export.open(path, { verify = true })
  local d = file:describe()
  print(("%s: whole; %sformat %d, by %s, digest %s"):format(path, d.step >= 0 and ("step %d, "):format(d.step) or "",
    d.format, d.producer, d.digest))
  print(("%d bytes, %d of them tables; %d operations"):format(d.bytes, d.table_bytes, d.operations))
  for _, x in ipairs(file:inputs()) do
    print(("input   %s: %s"):format(x.name, text_of(x)))
  end
  for _, x in ipairs(file:outputs()) do
    print(("output  %s: %d numbers%s"):format(x.name, x.columns, x.list and (" for members of '%s'"):format(x.list)
      or ""))
  end
  for _, x in ipairs(file:tables()) do
    print(("table   %s: %s [%d, %d], %d bytes"):format(x.name, x.dtype, x.rows, x.columns, x.bytes))
  end
end

--- The newest checkpoint of a folder that a Saver saves into; what is no such folder is a checkpoint itself.
local function newest_of(path)
  local ok, list = pcall(names.list, path)
  return ok and list[1] and list[1].path or path
end

--- The exit code after an error of this status: of --verify 1 says that the file is damaged, and 2 any other error.
function M.code(options, status) return options.verify and status ~= "EFORMAT" and 2 or 1 end

--- Do it. Returns the exit code.
function M.run(options)
  if options.verify then
    verify(options.verify)
    return 0
  end
  local made = load_script(options.model)
  local model, settings = made.model, util.copy(made)
  settings.model = nil
  if options.tables then settings.tables = tables_of(options.tables) end
  settings.dense, settings.size = options.dense or settings.dense, options.size or settings.size
  for _, module in ipairs(model:modules()) do -- as a training that shards them describes its tables
    if module._leave_meta then module:_leave_meta() end
  end
  if options.checkpoint then
    local path = newest_of(options.checkpoint)
    local values = checkpoint.load(path, { model = model }, { only = { "model" } })
    local saver = type(values) == "table" and type(values.saver) == "table" and values.saver or values
    settings.step = settings.step or type(saver) == "table" and tonumber(saver.step) or nil
  end
  local report = model:export(options.output, settings)
  print(report)
  print(("%s: %d bytes"):format(options.output, export.open(options.output):describe().bytes))
  return 0
end

return M
