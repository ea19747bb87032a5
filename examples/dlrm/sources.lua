-- sources.lua: --data as a table: name, loader(args) (a loader of args.part with
-- args.batch_size and so on), samples (of the
-- training part), keys, tables, dense_features, table_rows, and for the package lists `packages`.
local peri = require "perilune"
local data = peri.data

local M = {}

local function described(name, loader, extra)
  local train = loader { part = "train", batch_size = 1 }
  local source = { name = name, loader = loader, samples = train.source:count(), keys = train.keys, rows = train.rows,
    tables = train:table_list(), dense_features = #train.dense, table_rows = 0 }
  for _, t in ipairs(source.tables) do source.table_rows = source.table_rows + t.rows end
  for key, value in pairs(extra or {}) do source[key] = value end
  return source
end

local function with(args, more)
  local all = {}
  for key, value in pairs(args) do all[key] = value end
  for key, value in pairs(more) do all[key] = value end
  return all
end

local function debian(options)
  local packages = data.debian.read()
  return described("package lists", function(args) return data.debian(with(args, { packages = packages, seed = options.seed })) end,
    { packages = packages })
end

local function criteo(options)
  return described(options.data, function(args) return data.criteo(with(args, { path = options.data, rows = options.rows })) end)
end

local function synthetic(options, n)
  return described(("%d synthetic samples"):format(n), function(args)
    local from, to = data.Loader.bounds("synthetic", args.part, 0.1)
    local first, last = math.floor(from * n), math.floor(to * n)
    local all = with(args, { rows = options.rows, seed = options.seed, first_row = first, num_rows = last - first })
    all.part = nil
    return data.synthetic(all)
  end)
end

function M.open(options)
  if options.data == "" or options.data == "debian" then return debian(options) end
  local n = options.data:match "^synthetic:(%d+)$"
  if options.data == "synthetic" then n = 1000000 end
  if n then return synthetic(options, tonumber(n)) end
  return criteo(options)
end

return M
