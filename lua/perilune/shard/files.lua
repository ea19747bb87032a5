-- files.lua: row files of sharded modules over ranks: opened only if all are of one flush, and flushed as one event.
-- What one rank finds wrong is an error on all.
local ffi = require "ffi"
local errors = require "perilune.errors"
local P = require "perilune.ffi"
local util = require "perilune.util"
local all_gather_object = require("perilune.dist.collective_utils").all_gather_object
local signature = require "perilune.signature"
local C, check = P.C, P.check

local M = {}
local info = ffi.new "peri_flush_info"

local function describe(err)
  if type(err) == "table" and err.message then
    return { message = tostring(err.message), name = err.name, code = err.code }
  end
  return { message = tostring(err) }
end

--- Raise the error of the first rank that has one.
local function raise_first(group, func, list)
  for r, x in ipairs(list) do
    local e = x.error
    if e then
      errors.raise { code = e.code or C.PERI_EPEER, name = e.name or "EPEER", where = "", rank = group:rank(),
        message = ("%s: rank %d: %s"):format(func, r - 1, e.message) }
    end
  end
end

--- What a module says of its files, by one of its functions.
local function info_of(ask, module)
  check(ask(module:_pointer(), info))
  return {
    number = tonumber(info.number), stamp = info.stamp + 0ULL, iteration = tonumber(info.iteration),
    files = tonumber(info.files), path = ffi.string(info.path), changed = info.changed,
  }
end

--- The entries of modules that have files, of all ranks: list of { rank, number, stamp, iteration, path, changed }.
local function with_files(list)
  local files = {}
  for r, x in ipairs(list) do
    for _, f in ipairs(x.modules) do
      f.rank = r - 1
      if f.files > 0 then files[#files + 1] = f end
    end
  end
  return files
end

local function text_of(f)
  return ("'%s' (rank %d, %s)"):format(f.path, f.rank,
    f.number == 0 and "flush 0, never flushed" or ("flush %d, iteration %d"):format(f.number, f.iteration))
end

local function mismatch(group, func, a, b)
  local runs = a.number == b.number and "; they are of different runs" or ""
  errors.raise { code = C.PERI_EMISMATCH, name = "EMISMATCH", where = "", rank = group:rank(),
    message = ("%s: row files %s and %s%s: they must be of the same flush; restore all files of the module from one "
      .. "flush, or remove all")
      :format(func, text_of(a), text_of(b), runs) }
end

local function agree(group, func, modules, err)
  local mine = { error = err and describe(err) or nil, modules = {} }
  if not err then
    for i, m in ipairs(modules) do mine.modules[i] = info_of(C.peri_sharded_files_found, m) end
  end
  local list = all_gather_object(group, mine, func .. " with compute kernel fused_uvm_caching")
  raise_first(group, func, list)
  local files = with_files(list)
  for _, f in ipairs(files) do
    if f.number ~= files[1].number or f.stamp ~= files[1].stamp then mismatch(group, func, files[1], f) end
  end
end

--- All ranks come here with modules just made, or with the error `err` that this rank met instead. Raises, on all
--- ranks, when one has an error or when files are not of the same flush; the modules are released then. Collective.
function M.agree(group, func, modules, err)
  local ok, why = pcall(agree, group, func, modules, err)
  if ok then return end
  for _, m in ipairs(modules) do
    if m._ref then m._ref:release() end
  end
  error(why, 0)
end

--- Run f for each module; what it raises.
local function attempt(modules, f)
  for _, m in ipairs(modules) do
    local ok, err = pcall(f, m)
    if not ok then return describe(err) end
  end
end

--- Flush the tables in files of some modules (those that have some): all files on all ranks get one number, or none
--- does. When nothing has changed since the last flush, nothing is done. Collective.
function M.flush(group, func, modules)
  local mine = { modules = {}, new = C.peri_flush_stamp() }
  mine.error = attempt(modules, function(m)
    m:check_moment()
    check(C.peri_sharded_flush_prepare(m:_pointer()))
    mine.modules[#mine.modules + 1] = info_of(C.peri_sharded_flush_info, m)
  end)
  local list = all_gather_object(group, mine, func)
  raise_first(group, func, list)
  local files, number, changed = with_files(list), 0, false
  for _, f in ipairs(files) do
    number = math.max(number, f.number)
    changed = changed or f.changed or f.number == 0 or f.number ~= files[1].number or f.stamp ~= files[1].stamp
  end
  if #files > 0 and not changed then return end
  local stamp = list[1].new
  local err = attempt(modules, function(m) check(C.peri_sharded_flush_commit(m:_pointer(), number + 1, stamp)) end)
  raise_first(group, func, all_gather_object(group, { error = err }, func))
end

--- Those of the modules that have tables in files.
function M.tables_in_files(modules)
  local list = {}
  for _, m in ipairs(modules) do
    if m:in_files() then list[#list + 1] = m end
  end
  return list
end

signature.kind("collections", "a list of sharded collections", function(x)
  if type(x) ~= "table" then return false end
  for i = 1, #x do
    if type(x[i]) ~= "table" or not util.is_callable(x[i].in_files) then return false end
  end
  return true
end)
signature.check("shard.files.", M,
  { tables_in_files = "modules: collections", flush = "group: Group, func: string, modules: collections",
    agree = "group: Group, func: string, modules: collections, err: any" })

return M
