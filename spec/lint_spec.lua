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

describe("the lint of public names", function()
  local rule = "public names follow the rules of docs/embedding_c.md"

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
        "peri_moon_new has the parameter n behind results, wanted: results last",
      ["PERI_API peri_status peri_moon_new(peri_moon **moon);"] =
      "peri_moon_new gives a new object through 'moon', wanted: out", ["PERI_API peri_status peri_moon_look(int n);"] =
      "peri_moon_look counts 'n' as int, wanted: int32_t or int64_t",
      ["PERI_API peri_status peri_set_moon(int32_t n);"] =
        "peri_set_moon is a setting's, wanted: peri_<noun>_<setting>_set, and peri_<noun>_<setting>",
      ["PERI_API void peri_moon_phase_set(peri_moon *moon, int32_t phase);"] =
        "peri_moon_phase_set cannot say that it failed, wanted: peri_status",
      ["PERI_API peri_status peri_moon_shine(peri_moon *moon, bool on);"] =
        "peri_moon_shine takes a switch and nothing else, so it sets something, wanted: _set",
      ["PERI_API peri_status peri_moon_add(peri_moon *moon, peri_tensor *const *parts, int64_t n);"] =
        "peri_moon_add counts entries by int64_t n, wanted: int32_t",
      ["PERI_API peri_status peri_moon_new(const peri_moon_args *args, peri_moon **out);"] =
        "peri_moon_new makes an object with peri_moon_args, wanted: a _config",
      ["PERI_API peri_status peri_moon_turn(peri_moon *moon, const peri_moon_args *options);"] =
        "peri_moon_turn has a parameter options, wanted: config or args",
      ["typedef struct peri_moon_params {\n    int64_t size;\n} peri_moon_params;"] =
        "peri_moon_params is called _params, wanted: _config",
      ["typedef struct peri_moon_config {\n    int64_t size;\n    int64_t n_seas;\n} peri_moon_config;"] =
        "peri_moon_config counts n_seas by int64_t, wanted: int32_t",
      ["PERI_API peri_status peri_moon_release(peri_moon *m);"] =
      "peri_moon_release can fail, wanted: void, since a release never fails",
      ["typedef struct peri_moon_args {\n    int32_t n;\n} peri_moon_args;"] =
        "peri_moon_args does not begin with int64_t size",
    } do
      assert.same({ header .. ": " .. said }, with(text))
    end
    assert.same({ "PERI_REDUCE_SUM is 0, and PERI_REDUCTION_SUM is 2: one is taken for the other" },
      with "enum { PERI_REDUCTION_NONE = 0, PERI_REDUCTION_SUM = 2 };")
    assert.same({ "PERI_DECAY_COUNTER is 3, and PERI_MOON_DECAY_COUNTER is 1: one is taken for the other" },
      with "enum { PERI_MOON_DECAY_NONE = 0, PERI_MOON_DECAY_COUNTER = 1 };")
  end)
end)

describe("the lint of threads", function()
  it("names an object of which nothing says which threads may use it", function()
    local rule, header = "public objects say which threads may use them", "runtime/include/perilune/moment.h"
    assert.same({}, complaints(rule))
    local object = "\ntypedef struct peri_moon peri_moon;\n#endif\n"
    assert.same({ header .. ": nothing says which threads may use a peri_moon how; say it in the head, at 'Threads:', "
      .. "or in front of the type" }, complaints(rule, { header, "\n#endif%s*$", object }))
    assert.same({}, complaints(rule, { header, "\n#endif%s*$", "\n/** A moon, of any thread. */" .. object }))
    local said = complaints(rule, { header, "Threads: a moment %(peri_moment%)", "A moment" })
    assert.equal(2, #said)
    assert.equal(header .. ": its head has no paragraph 'Threads: ...'", said[1])
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

describe("the contract with programs that were built with an earlier release", function()
  local contract = dofile "runtime/gen/contract.lua"
  local record = [[
release 0.2 contract 1
constant PERI_MOON_FULL 3
struct peri_moon_params 24 grows
member size 0 int64_t
member n_seas 8 int64_t
member tide 16 void*
function peri_moon_glow 0.2 _Bool(peri_moon*, _Bool)
function peri_moon_new 0.2 peri_status(const peri_moon_params*, int64_t, peri_moon**)
function peri_moon_text 0.2 void(const peri_moon*, char*, size_t)
]]
  local renamed = "type peri_moon_params peri_moon_config\nconstant PERI_MOON_FULL PERI_PHASE_FULL\n"
    .. "count peri_moon_params n_seas\npointer peri_moon_params tide peri_moon_tide_f\n"
  local kept = "KEPT(0.2, bool, moon_glow, (peri_moon *moon, bool on))\n{\n}\nKEPT(0.2, peri_status, moon_new,\n"
    .. "     (const peri_moon_config *config, int64_t n, peri_moon **out))\n"

  --- The complaints about a library of today, `change`d.
  local function compared(names, functions, change)
    local old, said = contract.read(record), {}
    local new = { release = "0.3", contract = 1, constants = { PERI_PHASE_FULL = 3 }, structs = {
      peri_moon_config = { size = 24, grows = true, members = { { name = "size", offset = 0, text = "int64_t" },
        { name = "n_seas", offset = 8, text = "int32_t" },
        { name = "tide", offset = 16, text = "peri_moon_tide_f" } } } }, functions = {
      peri_moon_glow_set = "peri_status(peri_moon*, _Bool)",
      peri_moon_new = "peri_status(const peri_moon_config*, int32_t, peri_moon**)",
      peri_moon_text = "void(const peri_moon*, char*, int64_t)" } }
    if change then change(new) end
    contract.renamed(old, names, said)
    return contract.compare(old, new, contract.kept(functions), said), contract.map(old, new)
  end

  it("holds where names are others and the functions of then are kept", function()
    local said, map = compared(renamed, kept)
    assert.same({}, said)
    -- What has other parameters now has another version, so that a program of today is not run by a library of then.
    assert.equal("PERILUNE_0.2 {\n  global:\n    peri_moon_text;\n};\nPERILUNE_0.3 {\n  global:\n"
      .. "    peri_moon_glow_set;\n    peri_moon_new;\n  local:\n    *;\n} PERILUNE_0.2;\n", map)
  end)

  it("does not hold where something is gone, or is not what it was", function()
    local function said(...) return table.concat((compared(...)), "; ") end
    assert.equal("constant PERI_MOON_FULL is gone", said((renamed:gsub("constant[^\n]*\n", "")), kept))
    assert.matches("struct peri_moon_params is gone; function peri_moon_new: .* keeps 'peri_status%(const "
      .. "peri_moon_config", said((renamed:gsub("type[^\n]*\n", "")), kept))
    assert.matches("struct peri_moon_config: member 2 was 'n_seas' %(int64_t%)",
      said((renamed:gsub("count[^\n]*\n", "")), kept))
    assert.matches("member 3 was 'tide' %(void%*%)", said((renamed:gsub("pointer[^\n]*\n", "")), kept))
    assert.equal("function peri_moon_glow is gone", said(renamed, (kept:gsub("^.-}\n", ""))))
    assert.matches("^function peri_moon_new is 'peri_status",
      said(renamed, (kept:gsub("KEPT%(0.2, peri_status.*", ""))))
    assert.matches("renamed.c keeps 'peri_status%(const peri_moon_config%*, int32_t",
      said(renamed, (kept:gsub("int64_t", "int32_t"))))
    assert.equal("constant PERI_PHASE_FULL is 4, was 3", said(renamed, kept, function(new)
      new.constants.PERI_PHASE_FULL = 4
    end))
    assert.matches("member 2 was 'n_seas' %(int32_t%) at byte 8, now 'n_seas' %(int32_t%) at byte 12",
      said(renamed, kept, function(new) new.structs.peri_moon_config.members[2].offset = 12 end))
    assert.equal("function peri_moon_text is gone", said(renamed, kept, function(new)
      new.functions.peri_moon_text = nil
    end))
    assert.equal("runtime/gen/renamed.txt: 'constant PERI_SUN 1' is about nothing in the record",
      said(renamed .. "constant PERI_SUN 1\n", kept))
  end)
end)
