-- Rules of the lint find what they are for: each is run on this tree with a fault put into one file, as it reads it.

--- What rules get (tests/lint/run.lua), with other text in some files: changed[path] = function(text) return text,
--- count end.
local function context(changed)
  local ctx = {}
  function ctx.files(folder, suffix)
    local out, pipe = {}, assert(io.popen(("find %s -name '*.%s' -type f | LC_ALL=C sort"):format(folder, suffix)))
    for line in pipe:lines() do out[#out + 1] = line end
    pipe:close()
    return out
  end
  function ctx.read(path)
    local file = assert(io.open(path, "rb"))
    local text = file:read "*a"
    file:close()
    if not changed[path] then return text end
    local other, count = changed[path](text)
    assert(count == 1, "the change must hit one place")
    return other
  end
  return ctx
end

--- The complaints of the rule of this name when these files are changed: { path, pattern, replacement }...
local function complaints(rule, ...)
  local changed = {}
  for _, c in ipairs { ... } do changed[c[1]] = function(text) return text:gsub(c[2], c[3]) end end
  for _, file in ipairs { "faces", "boundary" } do
    for _, r in ipairs(require("tests.lint." .. file)) do
      if r[1] == rule then return r[2](context(changed)) end
    end
  end
  error("no rule " .. rule)
end

describe("the lint of new public names", function()
  local rule = "new public names follow the rules of the others"

  it("has nothing to say of this tree", function() assert.same({}, complaints(rule)) end)

  it("names what a new function or structure does not do as the others", function()
    local header = "runtime/include/perilune/optim.h"
    local function with(text) return complaints(rule, { header, "\n#endif%s*$", "\n" .. text .. "\n#endif\n" }) end
    assert.same({}, with("PERI_API peri_status peri_moon_new(const peri_moon_config *config, int32_t n, peri_moon "
      .. "**out);"))
    assert.same({}, with "typedef struct peri_moon_config {\n    int64_t size; /* sizeof */\n} peri_moon_config;")
    for text, said in pairs { -- any order
      ["PERI_API peri_status peri_moon_create(int32_t n, peri_moon **out);"] =
      "peri_moon_create is called _create, wanted: _new",
      ["PERI_API peri_status peri_moon_new(peri_moon **out, int32_t n);"] =
        "peri_moon_new has a parameter behind out, wanted: out last",
      ["PERI_API peri_status peri_moon_new(peri_moon **moon);"] =
      "peri_moon_new gives a new object through 'moon', wanted: out", ["PERI_API peri_status peri_moon_look(int n);"] =
      "peri_moon_look counts 'n' as int, wanted: int32_t or int64_t",
      ["PERI_API peri_status peri_set_moon(int32_t n);"] =
        "peri_set_moon is a setting's, wanted: peri_<noun>_<setting>_set",
      ["PERI_API peri_status peri_moon_release(peri_moon *m);"] =
      "peri_moon_release can fail, wanted: void, since a release never fails",
      ["typedef struct peri_moon_args {\n    int32_t n;\n} peri_moon_args;"] =
        "peri_moon_args does not begin with int64_t size",
    } do
      assert.same({ header .. ": " .. said }, with(text))
    end
  end)
end)

describe("the lint of CUDA faces", function()
  local rule = "kernels and operations have a CUDA face"

  it("has nothing to say of this tree", function() assert.same({}, complaints(rule)) end)

  it("names an operation that was added without one, and where it belongs", function()
    assert.same({
      "kernels/list.h lists the kernel quantize_more, which has no CUDA face: PERI_CUDA_KERNEL(quantize_more) is "
        .. "missing in kernels/cuda/quantize.cu",
    }, complaints(rule, { "kernels/list.h", "(#define PERI_KERNELS_QUANTIZE%(X%))",
      "%1 X(quantize_more, peri_k_more_args)" }))
    local said = complaints(rule, { "kernels/list.h", "(#define PERI_OPS_OPTIM%(X%))",
      "%1 X(norm_more, peri_k_more_args)" })
    assert.equal(2, #said)
    assert.matches("^kernels/list.h lists the operation norm_more, .*PERI_CUDA_OP%(norm_more%) is missing in "
      .. "kernels/cuda/optim.cu$", said[1])
    assert.matches("PERI_CUDA_SCRATCH%(norm_more%) is missing", said[2])
  end)

  it("names a face that is gone from its file", function()
    assert.same({
      "kernels/list.h lists the operation tbe_sort, which has no CUDA face: PERI_CUDA_SCRATCH(tbe_sort) is missing in "
        .. "kernels/cuda/tbe_batch.cu or kernels/cuda/tbe_forward.cu or kernels/cuda/tbe_gradient.cu or "
        .. "kernels/cuda/tbe_sort.cu or kernels/cuda/tbe_update.cu or kernels/cuda/tbe_whole.cu",
    }, complaints(rule, { "kernels/cuda/tbe_sort.cu", "\nPERI_CUDA_SCRATCH%(tbe_sort%)",
      "\nstatic int64_t other(tbe_sort)" }))
  end)

  it("names a family that no table has, and the file that its faces would be in", function()
    local said = complaints(rule,
      { "kernels/list.h", "(#endif\n)$", "#define PERI_OPS_NOVEL(X) X(novel_sum, peri_op_novel)\n%1" })
    assert.equal(3, #said)
    assert.matches("PERI_OPS_NOVEL is not in PERI_OPS,", said[3])
  end)

  it("names a face of what no list has", function()
    assert.same({ "kernels/cuda/cache.cu defines PERI_CUDA_KERNEL(cache_other), which no list of kernels/list.h asks "
      .. "for" }, complaints(rule, { "kernels/cuda/cache.cu", "^", "PERI_CUDA_KERNEL(cache_other)\n" }))
  end)
end)
