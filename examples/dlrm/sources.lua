-- sources.lua: --data as a table: name, loader(args) (a loader of args.part with args.batch_size and so on),
-- training_part, samples (of that part), validation_samples, test_samples, keys, tables, dense_features, table_rows,
-- and for the package lists `packages`.
local peri = require "perilune"
local data = peri.data

local M = {}

local HOLDOUT = 0.1

local function samples_of(loader, part) return loader({ part = part, batch_size = 1 }).source:count() end

local function described(name, loader, options, extra)
  local part = options.validation > 0 and "fit" or "train"
  local train = loader { part = part, batch_size = 1 }
  local source = { name = name, loader = loader, training_part = part, samples = train.source:count(),
    keys = train.keys, rows = train.rows, tables = train:table_list(), dense_features = #train.dense }
  source.validation_samples = options.validation > 0 and samples_of(loader, "validation") or 0
  source.test_samples = samples_of(loader, "test")
  if source.samples == 0 or source.test_samples == 0 then
    peri.ffi.fail(("%s: %d samples to train on, %d to validate and %d to test with, wanted 1 or more to train on and "
      .. "to test with; give more data: each part should have hundreds"):format(name, source.samples,
      source.validation_samples, source.test_samples))
  end
  for key, value in pairs(extra or {}) do source[key] = value end
  return source
end

local function with(args, more)
  local all = {}
  for key, value in pairs(args) do all[key] = value end
  for key, value in pairs(more) do all[key] = value end
  return all
end

local function debian(options, say)
  say "reading the package lists ..."
  local packages = data.debian.read()
  return described("package lists", function(args)
    return data.debian(with(args, { packages = packages, seed = options.seed, holdout = HOLDOUT,
      validation = options.validation }))
  end, options, { packages = packages })
end

local function criteo(options)
  return described(options.data, function(args)
    return data.criteo(with(args, { path = options.data, rows = options.rows, holdout = HOLDOUT,
      validation = options.validation }))
  end, options)
end

local function synthetic(options, n)
  return described(("%d synthetic samples"):format(n), function(args)
    local from, to = data.Loader.bounds("synthetic", args.part, HOLDOUT, options.validation)
    local first, last = math.floor(from * n), math.floor(to * n)
    local all = with(args, { rows = options.rows, seed = options.seed, first_row = first, num_rows = last - first })
    all.part = nil
    return data.synthetic(all)
  end, options)
end

function M.open(options, say)
  if options.data == "" or options.data == "debian" then return debian(options, say) end
  local n = options.data:match "^synthetic:(%d+)$"
  if options.data == "synthetic" then n = 1000000 end
  if n then return synthetic(options, tonumber(n)) end
  return criteo(options)
end

return M
