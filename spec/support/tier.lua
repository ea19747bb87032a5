-- tier.lua: what the specs of tables in files share: pairs of table batches, one in memory and one in files, trained
-- side by side.
local ffi = require "ffi"
local peri = require "perilune"
local support = require "spec.support.tbe"
local embed = peri.embed

local M = {}

pcall(ffi.cdef, "int setenv(const char *, const char *, int); int unsetenv(const char *);")

--- Run f with files read in this way ("uring", "threads"); uring only where the machine allows it.
function M.with_io(io, f)
  local before = os.getenv "PERI_ROW_IO"
  if io == "threads" or M.has_uring() then ffi.C.setenv("PERI_ROW_IO", io, 1) end
  local ok, err = pcall(f)
  if before then ffi.C.setenv("PERI_ROW_IO", before, 1) else ffi.C.unsetenv "PERI_ROW_IO" end
  if not ok then error(err, 0) end
end

local uring
function M.has_uring()
  if uring == nil then
    local b = embed.tbe.new { tables = { { name = "x", rows = 1, cols = 1 } }, device = "cpu",
      fused_params = { optimizer = "sgd", cache_params = {} } }
    uring = b:cache_statistics().io == "io_uring"
  end
  return uring
end

-- -- files ------------------------------------------------------------------------------------------------------------

function M.folder()
  local name = os.tmpname()
  os.remove(name)
  assert(os.execute("mkdir " .. name) == 0)
  return name
end
function M.remove(folder) os.execute("rm -rf " .. folder) end

function M.files(folder)
  local list, pipe = {}, io.popen("ls " .. folder .. "/*.peri 2>/dev/null | LC_ALL=C sort")
  for line in pipe:lines() do list[#list + 1] = line end
  pipe:close()
  return list
end

M.read_file = require("spec.support.shell").read

--- Bytes of a record in a file of that many rows: behind the records lies one bit for each row, in words of 64.
function M.record_bytes(path, rows) return (#M.read_file(path) - 4096 - math.ceil(rows / 64) * 8) / rows end

function M.write_file(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

-- -- pairs ------------------------------------------------------------------------------------------------------------

--- args: tables, device, cache (CacheParams), optimizer, features. Returns { plain, cached, tables }.
function M.pair(args)
  local function make(cache)
    local params = { optimizer = "sgd", learning_rate = 0.1 }
    for key, value in pairs(args.optimizer or {}) do params[key] = value end
    params.cache_params = cache
    return embed.tbe.new {
      tables = args.tables, device = args.device, seed = args.seed or 3, fused_params = params,
      features = args.features,
    }
  end
  return { plain = make(nil), cached = make(args.cache), tables = args.tables }
end

--- Every state of every table is the same, bit for bit.
function M.assert_same(pair)
  for t, config in ipairs(pair.tables) do
    for _, name in ipairs(pair.plain:state_names()) do
      local want = pair.plain:state(t, name)
      local got = pair.cached:read(t, name, 0, peri.zeros(want:shape(), "f32", want:device()))
      local a, b = want:to_list(), got:to_list()
      for i = 1, #a do
        if a[i] ~= b[i] then
          error(("table %s, %s, element %d: %.9g in memory, %.9g in the file"):format(config.name, name, i, a[i], b[i]),
            0)
        end
      end
    end
  end
end

-- -- training ---------------------------------------------------------------------------------------------------------

--- Four tables; the last two share the bags of a feature.
function M.tables()
  return {
    { name = "a", rows = 400, cols = 7 }, { name = "b", rows = 500, cols = 16, pooling = "MEAN" },
    { name = "c/ü", rows = 300, cols = 33 }, { name = "d", rows = 320, cols = 3, pooling = "MEAN" },
  }
end

local BAGS, WIDTH = 4, 7 + 16 + 33 + 3
local function block_list()
  return {
    { table = 2, first_bag = BAGS, bags = BAGS, out_offset = 7, out_stride = WIDTH },
    { table = 1, first_bag = 0, bags = BAGS, out_offset = 0, out_stride = WIDTH },
    { table = 3, first_bag = 3 * BAGS, bags = BAGS, out_offset = 23, out_stride = WIDTH },
    { table = 4, first_bag = 3 * BAGS, bags = BAGS, out_offset = 56, out_stride = WIDTH },
  } -- bags 2 * BAGS .. 3 * BAGS - 1 are looked up nowhere
end

function M.make(tables, args, cached)
  local params = {}
  for key, value in pairs(args.optimizer) do params[key] = value end
  if cached then
    params.cache_params = { load_factor = args.factor, algorithm = args.algorithm, directory = args.directory,
      prefetch_pipeline =
      args.prefetch, ways = args.ways }
  end
  return embed.tbe.new {
    tables = tables, device = args.device, seed = args.seed or 3, fused_params = params, data_type = args.data_type
      or "FP32",
  }
end

--- The batch of a step: ids that prefer low rows, so that caches have something to keep. The same for the same step.
local function batch(step, args)
  local draw = support.generator(100 + step)
  local rows = { 400, 500, 300, 300 }
  local ids, offsets = {}, { 0 }
  for k = 1, 4 do
    for _ = 1, BAGS do
      for _ = 1, draw(4) do ids[#ids + 1] = draw(12) == 0 and -1 or (draw(2) == 0 and draw(8) or draw(rows[k])) end
      offsets[#offsets + 1] = #ids
    end
  end
  local tensors = { ids = peri.tensor(ids, step % 2 == 0 and "i64" or "i32", args.device),
    offsets = peri.tensor(offsets, step % 3 == 0 and "i32" or "i64", args.device) }
  if args.weighted then
    tensors.weights = peri.tensor(support.numbers(#ids, draw), "f32", args.device)
    tensors.scale = peri.tensor(support.numbers(4 * BAGS, draw), "f32", args.device)
    tensors.weights:requires_grad(true)
  end
  tensors.grad = peri.tensor(support.numbers(BAGS * WIDTH, draw), "f32", args.device, { BAGS, WIDTH })
  return tensors
end

local function step_of(b, list, x)
  local out = b:lookup(x.ids, x.offsets, list, BAGS, WIDTH, x.weights, x.scale)
  local values = out:to_list()
  return out, values
end

--- Train both (either may be nil) on steps first .. last; outputs are the same, bit for bit.
function M.train(plain, cached, _, args, first, last)
  last = last or first
  local plain_list, cached_list = plain and plain:blocks(block_list()), cached and cached:blocks(block_list())
  local x = batch(first, args)
  for step = first, last do
    local ahead = batch(step + 1, args)
    local want, got, a, b, grads
    if plain then want, a = step_of(plain, plain_list, x) end
    if cached then got, b = step_of(cached, cached_list, x) end
    if cached and args.prefetch then
      cached:prefetch(ahead.ids, ahead.offsets, cached_list, ahead.weights, ahead.scale)
    end
    if plain and cached then
      for i = 1, #a do
        if a[i] ~= b[i] then
          error(("step %d, output %d: %.9g in memory, %.9g from the file"):format(step, i, a[i], b[i]), 0)
        end
      end
    end
    if want then
      want:backward(x.grad)
      if x.weights then
        grads = x.weights:grad():to_list()
        x.weights:set_grad(nil)
      end
    end
    if got then
      got:backward(x.grad)
      if x.weights then
        for i, g in ipairs(x.weights:grad():to_list()) do
          if grads and g ~= grads[i] then
            error(("step %d, gradient of weight %d: %.9g, wanted %.9g"):format(step, i, g, grads[i]), 0)
          end
        end
      end
    end
    x = ahead
  end
end

--- args: device, factor, algorithm, prefetch, steps, optimizer, directory, weighted, seed. Returns { plain, cached,
--- tables, args } after comparing outputs and states.
function M.run(args)
  local tables = M.tables()
  local run = { plain = M.make(tables, args, false), cached = M.make(tables, args, true), tables = tables, args = args }
  M.train(run.plain, run.cached, tables, args, 1, args.steps)
  run.statistics = run.cached:cache_statistics()
  M.assert_same(run)
  return run
end

return M
