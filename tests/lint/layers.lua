-- layers.lua: the law of the layers. A file includes or requires its own layer and lower ones, never a higher one.

-- C: folders of runtime, and which layer a public header belongs to.
local level = { base = 0, plugin = 1, kernels = 1, tensor = 2, sparse = 2.5, collision = 2.7, comm = 3, embed = 4,
  plan = 4.5, shard = 5, io = 6, checkpoint = 6, model = 6.5, host = 7, serve = 7 }
local public = {
  base = 0, tune = 0, device = 2, tensor = 2, ops = 2, precision = 2, graph = 2, optim = 2, jagged = 2, sparse = 2.5,
  quantize = 2.5, retrieval = 2.5, collision = 2.7, comm = 3, codec = 3,
  exchange = 3, embed = 4, moment = 4, shard = 4.5, io = 6, checkpoint = 6, model = 6.5, lua = 6.5, perilune = 6.6,
  host = 7,
}
-- Headers of foreign libraries and who may know them.
local foreign = {
  ["mpi.h"] = "^runtime/backends/mpi/", ["cblas.h"] = "^runtime/backends/cpu", ["lua.h"] = "^runtime/host/",
  ["lauxlib.h"] = "^runtime/host/", ["lualib.h"] = "^runtime/host/", ["luajit.h"] = "^runtime/host/",
  ["nccl.h"] = "^runtime/backends/nccl", ["microhttpd.h"] = "^runtime/serve/http%.c",
  ["liburing.h"] = "^runtime/embed/tier/row_io%.c", ["zlib.h"] = "^runtime/io/",
}

local function normal(path) -- "a/b/../c" -> "a/c"
  local parts = {}
  for part in path:gmatch "[^/]+" do
    if part == ".." then parts[#parts] = nil elseif part ~= "." then parts[#parts + 1] = part end
  end
  return table.concat(parts, "/")
end

local function layer_of(path) return path:match "^runtime/(%w+)/" or path:match "^(kernels)/" end

local function quoted(path, line, complaints, where)
  local target = line:match '^%s*#%s*include%s+"([^"]+)"'
  if not target then return end
  local to = normal(path:match "^(.*)/[^/]*$" .. "/" .. target)
  local from_layer, to_layer = layer_of(path), layer_of(to)
  local function complain(why) complaints[#complaints + 1] = ("%s includes %s: %s"):format(where, to, why) end
  if from_layer == "backends" then
    local lent = (to_layer == "plugin" or to_layer == "kernels") and not to:match "internal%.h$"
    if not lent and to_layer ~= "backends" then
      complain "a backend includes perilune/base.h, plugin/*.h and kernels/ only"
    end
  elseif to_layer == "backends" then complain "nobody includes a backend"
  elseif from_layer == "kernels" then
    if to_layer ~= "kernels" then complain "kernels include kernels only" end
  elseif not level[to_layer] then complain "no such layer"
  elseif level[to_layer] > level[from_layer] then complain(("%s lies above %s"):format(to_layer, from_layer)) end
end

local function angled(path, line, complaints, where)
  local target = line:match "^%s*#%s*include%s+<([^>]+)>"
  if not target then return end
  local function complain(why) complaints[#complaints + 1] = ("%s includes <%s>: %s"):format(where, target, why) end
  local noun, layer = target:match "^perilune/(%w+)%.h$", layer_of(path)
  if noun and not public[noun] then return complain "a public header without a layer (tests/lint/layers.lua)" end
  if noun and (layer == "backends" or layer == "kernels") then
    if noun ~= "base" then complain "backends and kernels include perilune/base.h only" end
  elseif noun then
    local own = path:match "^runtime/include/perilune/(%w+)%.h$"
    local from = own and public[own] or level[layer]
    if not from then complain "a public header without a layer (tests/lint/layers.lua) includes it"
    elseif public[noun] > from then complain(("it belongs to a layer above %s"):format(own or layer)) end
  elseif foreign[target] and not path:match(foreign[target]) then
    complain("only " .. foreign[target]:gsub("%^", "") .. "* knows this library")
  end
end

local function c_includes(ctx)
  local complaints = {}
  for _, path in ipairs(ctx.files("runtime kernels", "c", "h", "cu", "cuh")) do
    local n = 0
    for line in ctx.read(path):gmatch "([^\n]*)\n" do
      n = n + 1
      local where = ("%s:%d"):format(path, n)
      quoted(path, line, complaints, where)
      angled(path, line, complaints, where)
    end
  end
  return complaints
end

-- What a compiler sees at once is listed in one place: C files are included by the unit*.c of kernels only, and each of
-- theirs by one. (A test may be a unit, which begins with unit.h, too.)
local function units(ctx)
  local complaints, included = {}, {}
  for _, path in ipairs(ctx.files("runtime kernels tests", "c", "h", "cu", "cuh")) do
    local unit = path:match "^kernels/%w+/unit[%w_]*%.c$"
      or path:match "^tests/kernels/" and ctx.read(path):find("/kernels/cpu/unit.h\"\n", 1, true)
    for target in ("\n" .. ctx.read(path)):gmatch '\n%s*#%s*include%s+"([^"]+%.c)"' do
      included[normal(path:match "^(.*)/" .. "/" .. target)] = true
      if not unit then
        complaints[#complaints + 1] = ("%s includes %s: only a unit (kernels/*/unit*.c) includes C files"):format(path,
          target)
      end
    end
  end
  for _, path in ipairs(ctx.lines "ls kernels/*/*.c") do
    if not path:match "^kernels/cuda/" and not path:match "/unit[%w_]*%.c$" and not included[path] then
      complaints[#complaints + 1] = path .. ": no unit (kernels/*/unit*.c) includes it, so nobody compiles it"
    end
  end
  return complaints
end

local function calls_between(ctx, paths) -- path -> list of the paths that it calls, by the names of their functions
  local home, text, calls = {}, {}, {}
  for _, path in ipairs(paths) do
    text[path] = ("\n" .. ctx.read(path)):gsub("/%*.-%*/", "")
    for name in text[path]:gmatch "\n[%w_][%w_ %*]-(peri_[%w_]+)%b()%s*{" do home[name] = path end
  end
  for _, path in ipairs(paths) do
    local seen = {}
    calls[path] = {}
    for name in text[path]:gmatch "(peri_[%w_]+)%(" do
      local to = home[name]
      if to and to ~= path and not seen[to] then
        seen[to] = true
        table.insert(calls[path], to)
      end
    end
  end
  return calls
end

local function way_back(calls, from) -- the last step of a way from @from back to it, or nil
  local seen, open = {}, { from }
  while #open > 0 do
    local at = table.remove(open)
    for _, to in ipairs(calls[at]) do
      if to == from then return at end
      if not seen[to] then
        seen[to] = true
        open[#open + 1] = to
      end
    end
  end
end

-- Inside a folder of runtime calls between files go one way: no file is reached from itself.
local function c_calls(ctx)
  local complaints = {}
  for _, folder in ipairs(ctx.lines "ls -d runtime/*/") do
    local paths = ctx.files(folder, "c")
    local calls = calls_between(ctx, paths)
    for _, path in ipairs(paths) do
      local last = way_back(calls, path)
      if last then
        complaints[#complaints + 1] = ("%s calls files that call it, the last of them %s"):format(path, last)
      end
    end
  end
  return complaints
end

-- A batch walks through runtime/shard in one direction: a header includes headers before it only, a C file those and
-- its own. C files that have no header of their own, or need a later one, by the last header that they may include.
local walk = { "routes", "router", "way", "layout", "module", "module_batch", "rows" }
local last_header = { ["layout.c"] = "module", outbound = "router", batch_layouts = "module", identity = "module",
  module_files = "module", tables = "module", managed = "module_batch", weights_dist = "module_batch",
  ["module_batch.c"] = "rows", input = "rows", unbuffered = "rows", repeats = "rows", explain = "rows",
  pooled_stages = "rows", sequence_stages = "rows" }

local function walk_order(ctx)
  local at, complaints = {}, {}
  for i, name in ipairs(walk) do at[name] = i end
  for _, path in ipairs(ctx.files("runtime/shard", "c", "h")) do
    local file, noun = path:match "([%w_]+%.[ch])$", path:match "([%w_]+)%.[ch]$"
    local from = at[last_header[file] or last_header[noun] or noun]
    if not from then
      complaints[#complaints + 1] = path .. " has no place in a batch's walk (tests/lint/layers.lua: last_header)"
    end
    for name in ctx.read(path):gmatch '\n#include "([%w_]+)%.h"' do
      if from and (at[name] or #walk + 1) > from then
        complaints[#complaints + 1] = ("%s includes %s.h, which comes after it in a batch's walk"):format(path, name)
      end
    end
  end
  return complaints
end

-- The stages of a kind of sharded module take four arguments at most.
local function stage_arguments(ctx)
  local complaints, stages = {}, 0
  local kind = ctx.read("runtime/shard/module.h"):gsub("/%*.-%*/", ""):match "typedef struct peri__kind (%b{})"
  for name, arguments in (kind or ""):gmatch "%(%*([%w_]+)%)(%b())" do
    local _, commas = arguments:gsub(",", "")
    stages = stages + 1
    if commas > 3 then
      complaints[#complaints + 1] = ("runtime/shard/module.h: stage %s takes %d arguments, allowed: 4"):format(name,
        commas + 1)
    end
  end
  if stages == 0 then complaints[1] = "runtime/shard/module.h: no stages of peri__kind were found" end
  return complaints
end

-- Lua: the first name after "perilune.".
local rank = {
  environment = -2, errors = -1, tables = -0.8, classes = -0.5, util = 0,
  cdef = 0, manual = 0, documents = 0, launcher = 0, compiler = 0.5,
  library = 0.6, state = 0.7, handles = 0.8, ffi = 1, lua_states = 1.2, signature = 1.5, choices = 2,
  progress = 2, text = 2, tensor = 2,
  jagged = 3, nn = 4,
  dist = 4, data = 4, stop = 4, serial = 2, sparse = 4.5, embed = 5, plan = 6, explain = 6.5,
  simulation = 6.5, shard = 7, checkpoint = 7.5, export = 7.7, model = 8,
  pipeline = 9,
  hosted = 10, calibration = 10.5, launch = 11,
  cli = 12,
}

local function lua_requires(ctx)
  local complaints = {}
  for _, path in ipairs(ctx.files("lua/perilune", "lua")) do
    local from = path:match "^lua/perilune/([%w_]+)"
    local n = 0
    for line in ctx.read(path):gmatch "([^\n]*)\n" do
      n = n + 1
      for name in line:gsub("%-%-.*", ""):gmatch "require%s*%(?%s*[\"']perilune%.?([%w_]*)" do
        local function complain(why)
          complaints[#complaints + 1] = ("%s:%d requires perilune.%s: %s"):format(path, n, name, why)
        end
        if from == "init" then
          if name ~= "util" then complain "init.lua loads lazily, by its table" end
        elseif not rank[from] then complain(("perilune.%s has no layer (tests/lint/layers.lua)"):format(from))
        elseif name == "" then
          if rank[from] < rank.calibration then complain "only the command line uses the whole" end
        elseif not rank[name] then complain "it has no layer (tests/lint/layers.lua)"
        elseif rank[name] > rank[from] then complain(("it lies above perilune.%s"):format(from))
        elseif rank[name] == rank[from]
          and name ~= from then complain(("perilune.%s stands beside it"):format(from)) end
      end
    end
  end
  return complaints
end

return { { "C includes follow the layers", c_includes }, { "C files are included by units", units },
  { "C calls between files go one way", c_calls },
  { "a batch walks in one direction", walk_order },
  { "stages take at most four arguments", stage_arguments },
  { "Lua requires follow the layers", lua_requires } }
