-- amalgamation.lua: the library as two files, perilune.c and perilune.h, for hosts that compile it with one call of a
-- compiler.
--
-- Usage: luajit amalgamation.lua <folder for the two files> <version> <source.c ...>
-- perilune.h is all public headers, one after the other. perilune.c is all sources: the internal headers that the
-- runtime shares once, then each source in its turn. Sources know nothing of each other's file-scope names, so a name
-- that two of them have gets a number in front: by a macro around the source, or, where members of structures have the
-- same name, word by word.
local M = {}

local function slurp(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read "*a"
  file:close()
  return text
end

local function normal(path)
  local parts = {}
  for part in path:gmatch "[^/]+" do
    if part == ".." and #parts > 0 and parts[#parts] ~= ".." then parts[#parts] = nil
    elseif part ~= "." then parts[#parts + 1] = part end
  end
  return table.concat(parts, "/")
end

local function exists(path)
  local file = io.open(path)
  return file and file:close() and true
end

local HEAD = [[
/* Perilune %s in two files, perilune.c and perilune.h, made by `make amalgamation`.
 *   cc -std=gnu11 -O2 host.c perilune.c -lxxhash -lpthread -ldl -lm
 * Without MPI and CUDA. With -DPERI_HAVE_URING -luring tables in files are read faster; with -DPERI_HAVE_ZLIB -lz packed files of data
 * are read, too. Under gcc's -Wall add -Wno-misleading-indentation: looking for it takes gcc 20 s. Licence: Apache-2.0. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "perilune.h"
/* A product and a sum are rounded one after the other, also where the processor could do both at once. */
#if defined(__clang__)
#pragma clang fp contract(off)
#pragma clang diagnostic ignored "-Wunknown-pragmas" /* those below are gcc's */
#elif defined(__OPTIMIZE__)
#pragma GCC optimize("fp-contract=off")
#endif
#ifndef PERI_ISA_MOST /* 0: the scalar kernels only */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PERI_ISA_MOST 1
#else
#define PERI_ISA_MOST 0
#endif
#endif
]]

-- -- words ------------------------------------------------------------------------------------------------------------

-- by byte: what a word may have, what a number may, and space within a line
local in_word, in_number, in_space = {}, {}, {}
for c = 0, 255 do
  local s = string.char(c)
  in_word[c], in_number[c], in_space[c] = s:match "[%w_]" ~= nil, s:match "[%w_%.]" ~= nil, s:match "[ \t\r\f]" ~= nil
end

--- The last place from `at` on up to which all bytes are of a kind.
local function last_of(kind, text, at)
  while kind[text:byte(at + 1) or 0] do at = at + 1 end
  return at
end

--- The end of the directive that begins at `at`, with its continuations.
local function end_of_directive(text, at)
  while true do
    local e = text:find("\n", at, true) or #text + 1
    if text:byte(e - 1) ~= 92 then return e - 1 end -- a backslash
    at = e + 1
  end
end

--- Calls f(kind, text) for each token of C text: "word", "space" (comments too), "text" (strings, characters, numbers),
--- "mark", and "line" (a directive, with its continuations). By bytes, which LuaJIT compiles: there are millions.
local function each_token(text, f)
  local at, line_start = 1, true
  while at <= #text do
    local c, after = text:byte(at, at + 1)
    local kind, stop = "mark", at
    if c == 47 and after == 42 then kind, stop = "space", assert(text:find("*/", at + 2, true)) + 1
    elseif c == 47 and after == 47 then kind, stop = "space", (text:find("\n", at, true) or #text + 1) - 1
    elseif c == 10 then kind, line_start = "space", true
    elseif in_space[c] then kind, stop = "space", last_of(in_space, text, at)
    elseif c == 35 and line_start then kind, stop = "line", end_of_directive(text, at)
    else
      line_start = false
      if c == 34 or c == 39 then -- quotes
        kind, stop = "text", at + 1
        while text:byte(stop) ~= c do stop = stop + (text:byte(stop) == 92 and 2 or 1) end
      elseif c >= 48 and c <= 57 then kind, stop = "text", last_of(in_number, text, at)
      elseif in_word[c] then kind, stop = "word", last_of(in_word, text, at)
      elseif c == 45 and after == 62 then stop = at + 1 end -- ->
    end
    f(kind, text:sub(at, stop))
    at = stop + 1
  end
end

--- All tokens, as a list of { kind =, text = }.
local function tokens(text)
  local list, n = {}, 0
  each_token(text, function(kind, s)
    n = n + 1
    list[n] = { kind = kind, text = s }
  end)
  return list
end

--- Comments and blank lines go; words of a macro's text are words, too.
local function without_space(list)
  local out = {}
  for _, t in ipairs(list) do
    if t.kind ~= "space" then out[#out + 1] = t end
  end
  return out
end

local control = {}
for word in ("void int char bool double float long short unsigned signed const struct union enum if for while switch "
  .. "return sizeof typeof __typeof__ __attribute__ _Alignas _Static_assert"):gmatch "%S+" do control[word] = true end

local kinds = { struct = true, union = true, enum = true }
local opens, closes = { ["("] = true, ["{"] = true, ["["] = true }, { [")"] = true, ["}"] = true, ["]"] = true }

local function text_at(s, k) return s[k] and s[k].text end

--- Names of structures, unions and enums that the statement `s` defines.
local function tags(s, names)
  for k, x in ipairs(s) do
    if x.depth == 0 and kinds[x.text] and text_at(s, k + 2) == "{" and s[k + 1].kind == "word" then
      names[s[k + 1].text] = true
    end
  end
end

--- Names of the constants of its enums, wherever they are.
local function enumerators(s, names)
  for k, x in ipairs(s) do
    local at = x.text == "enum" and (text_at(s, k + 1) == "{" and k + 1 or text_at(s, k + 2) == "{" and k + 2)
    local level, fresh = 0, true
    while at and s[at] do
      local y = s[at]
      level = level + (opens[y.text] and 1 or closes[y.text] and -1 or 0)
      if level == 0 then break end
      if y.kind == "word" and fresh and level == 1 then names[y.text], fresh = true, false end
      if y.text == "," and level == 1 then fresh = true end
      at = at + 1
    end
  end
end

--- Whether word k is the name of a pointer to a function, or of an array of them: void (*name)(...), void (*const
--- names[])(...).
local function points(s, k)
  local before, after = text_at(s, k - 1), text_at(s, k + 1)
  if before ~= "*" and before ~= "const" or after ~= ")" and after ~= "[" then return false end
  while s[k] and s[k].text ~= "(" do k = k - 1 end
  return text_at(s, k + 1) == "*"
end

--- Names of what a static declaration, or a typedef, declares.
local function declarators(s, is_type, names)
  local level, value = 0, false
  for k, x in ipairs(s) do
    local after = text_at(s, k + 1) or ";"
    level = level + (opens[x.text] and 1 or closes[x.text] and -1 or 0)
    if level == 0 and x.text == "=" then value = true end
    if level == 0 and x.text == "," then value = false end
    if x.kind == "word" and not value and not control[x.text] then
      local variable = level == 0 and (after == "=" or after == "[" or after == "," or after == ";")
      local function_type = is_type and text_at(s, k + 2) ~= "*" -- typedef int f(int), but not typedef int (*f)(int)
      local called = level == 0 and after == "(" and (not is_type or function_type) and not x.text:match "^[%u%d_]+$"
      if variable or called or level == 1 and points(s, k) then names[x.text] = true end
    end
  end
end

--- The names that a statement at file scope keeps to its source.
local function declared(s, names)
  local is_static, is_type = false, false
  for _, x in ipairs(s) do
    if x.depth == 0 and (x.text == "static" or x.text:match "_INLINE$") then is_static = true end
    if x.depth == 0 and x.text == "typedef" then is_type = true end
  end
  tags(s, names)
  enumerators(s, names)
  if is_static or is_type then declarators(s, is_type, names) end
end

--- Whether the statement, which a closing brace ends, is a whole function: those of types and of values go on.
local function is_function(s, after)
  if after == ";" or after == "," or after == "=" then return false end
  local head
  for k, x in ipairs(s) do
    if x.depth == 0 and x.text == "=" then return false end
    if x.depth == 0 and kinds[x.text] and (text_at(s, k + 1) == "{" or text_at(s, k + 2) == "{") then return false end
    if x.depth == 0 and x.text == "{" and not head then head = text_at(s, k - 1) end
  end
  return head == ")"
end

--- Where a directive leads: both branches of a condition begin at the same place.
local function directive(line, at, macros)
  local word = line:match "^#%s*(%a+)"
  if word == "define" then macros[line:match "^#%s*define%s+([%w_]+)"] = true
  elseif word == "if" or word == "ifdef" or word == "ifndef" then at.stack[#at.stack + 1] = { at.depth, at.round,
    #at.statement }
  elseif word == "else" or word == "elif" then
    local top = at.stack[#at.stack]
    at.depth, at.round = top[1], top[2]
    while #at.statement > top[3] do table.remove(at.statement) end
  elseif word == "endif" then table.remove(at.stack) end
end

--- The names that a source has at file scope and keeps to itself, in `names`; macros in `macros`.
local function own_names(list, names, macros)
  local t, at = without_space(list), { depth = 0, round = 0, stack = {}, statement = {} }
  for i, x in ipairs(t) do
    if x.kind == "line" then directive(x.text, at, macros)
    else
      if x.text == "}" then at.depth = at.depth - 1 end
      x.depth = at.depth
      at.statement[#at.statement + 1] = x
      if x.text == "{" then at.depth = at.depth + 1 end
      at.round = at.round + (x.text == "(" and 1 or x.text == ")" and -1 or 0)
      local whole = at.depth == 0 and at.round == 0
        and (x.text == ";" or x.text == "}" and is_function(at.statement, text_at(t, i + 1)))
      if whole then
        declared(at.statement, names)
        at.statement = {}
      end
    end
  end
end

-- -- sources ----------------------------------------------------------------------------------------------------------

-- Of the C library: a source may have functions of these names, as long as it does not include what declares them.
local system_functions =
  "write read open close sync link unlink select poll send recv accept bind listen connect pause signal wait index "
    .. "gets step remove rename truncate access pipe dup"

local system = { list = {}, seen = {} } -- #include <...> of all, in the order in which they come

--- The text of a file with the local files that it includes, each header once for each `seen`; what the runtime shares
--- goes to `shared`.
local function expand(path, seen, shared)
  local folder = path:match "^(.*)/" or "."
  local out = {}
  for line in (slurp(path) .. "\n"):gmatch "([^\n]*)\n" do
    local own, foreign = line:match '^%s*#%s*include%s+"([^"]+)"', line:match "^%s*#%s*include%s+<([^>]+)>"
    if own then
      local target = normal(folder .. "/" .. own)
      if not exists(target) then target = normal(own) end
      if target:match "%.def$" or target:match "%.c$" then out[#out + 1] = expand(target, seen, shared)
      elseif shared.is(target) then
        if not shared.seen[target] then
          shared.seen[target] = true
          local text = expand(target, seen, shared) -- after those that it includes
          shared.list[#shared.list + 1] = text
        end
      elseif not seen[target] then
        seen[target] = true
        out[#out + 1] = expand(target, seen, shared)
      end
    elseif foreign then
      if not foreign:match "^perilune/" and not system.seen[foreign] then
        system.seen[foreign] = true
        system.list[#system.list + 1] = foreign
      end
    else out[#out + 1] = line end
  end
  return table.concat(out, "\n")
end

--- Headers of kernels that depend on the instruction set are of each unit; all others are shared.
local contract = {} -- headers that kernels/kernels.h includes, with itself; and those of what units hand to each other
local function find_contract(path)
  if contract[path] then return end
  contract[path] = true
  for own in slurp(path):gmatch '#%s*include%s+"([^"]+)"' do
    find_contract(normal(path:match "^(.*)/" .. "/" .. own))
  end
end
local function is_shared(path) return contract[path] or path:match "^runtime/.*%.h$" ~= nil end

--- The list of names that come after '.' or '->' in the text, or are members of its structures.
local function member_names(list, into)
  local t = without_space(list)
  for i = 2, #t do
    if t[i].kind == "word" and (t[i - 1].text == "." or t[i - 1].text == "->") then into[t[i].text] = true end
    if t[i].kind == "line" then
      for word in t[i].text:gmatch "[%.>]([%a_][%w_]*)" do into[word] = true end
    end
  end
end

--- Rename words of the text, but not members of structures.
local function rename(list, renamed)
  local out, before, structs, level, pending = {}, "", {}, 0, false
  local t = list
  local function next_mark(i)
    repeat i = i + 1 until not t[i] or t[i].kind ~= "space"
    return t[i] and t[i].text or ""
  end
  for i, x in ipairs(t) do
    local s = x.text
    if x.kind == "word" then
      if s == "struct" or s == "union" then pending = true end
      local to = renamed[s]
      if to and before ~= "." and before ~= "->" then
        local after = next_mark(i)
        local member = structs[#structs] and (after == ";" or after == "," or after == "[" or after == ":"
          or after == ")")
          and before ~= "[" and before ~= "("
        if not member then s = to end
      end
    elseif x.kind == "line" then
      s = s:gsub("()([%a_][%w_]*)", function(at, word)
        local sign = x.text:sub(1, at - 1):match "(%S)%s*$"
        return sign ~= "." and not x.text:sub(1, at - 1):match "%->$" and renamed[word] or nil
      end)
    elseif s == "{" then
      level = level + 1
      structs[level] = pending or false
      pending = false
    elseif s == "}" then
      structs[level] = nil
      level = level - 1
    elseif s == ";" or s == ")" or s == "=" then pending = false end
    out[#out + 1] = s
    if x.kind ~= "space" then before = x.text end
  end
  return table.concat(out)
end

local function sorted(set)
  local list = {}
  for name in pairs(set) do list[#list + 1] = name end
  table.sort(list)
  return list
end

--- Without comments and blank lines, which headers and sources of the repository have.
local function plain(text)
  local out = {}
  each_token(text, function(kind, s)
    if kind == "space" and s:byte() == 47 then s = " " -- a comment
    elseif kind == "line" then s = s:gsub("/%*.-%*/", " ") end
    out[#out + 1] = s
  end)
  return (table.concat(out):gsub("[ \t]+\n", "\n"):gsub("\n\n+", "\n"))
end

--- perilune.h: the public headers, in an order in which each finds what it includes. `headers`: their paths.
function M.header(headers, version)
  local out, seen = {}, {}
  local function add(path)
    if seen[path] then return end
    seen[path] = true
    for line in (slurp(path) .. "\n"):gmatch "([^\n]*)\n" do
      local other = line:match "^%s*#%s*include%s+<perilune/([%w_]+%.h)>"
      if other then add(path:match "^(.*/)" .. other) else out[#out + 1] = line end
    end
  end
  out[1] = ("/* Perilune %s in two files, perilune.c and perilune.h, made by `make amalgamation`. */"):format(version)
  for _, path in ipairs(headers) do add(path) end
  return table.concat(out, "\n") .. "\n"
end

--- Names that macros of the source put together: #define M(name) static void prefix_##name(...), and M(x).
local function pasted_names(text, names)
  for macro, body in text:gsub("\\%s*\n", " "):gmatch "#define ([%w_]+)%([%w_, ]*%)([^\n]*)" do
    local prefix = body:match "static [^(;]-([%w_]+)##[%w_]+%("
    if prefix then
      for name in text:gmatch("\n%s*" .. macro .. "%(([%w_]+)") do names[prefix .. name] = true end
    end
  end
end

--- The sources as units: { path =, piece = (of "kernels/cpu/unit_tbe_batch.c:f32": see kernels/cpu/unit.h), list =
--- tokens, names =, macros =, members = }, and the text of what they share.
local function read_units(sources)
  find_contract "kernels/kernels.h"
  find_contract "kernels/cpu/tbe_calls.h"
  local shared, units = { is = is_shared, seen = {}, list = {} }, {}
  for _, source in ipairs(sources) do
    local path, piece = source:match "^([^:]+):?(.*)$"
    local unit = { path = path, piece = piece ~= "" and piece or nil, names = {}, macros = {}, members = {} }
    local text = plain(expand(path, {}, shared))
    unit.list = tokens(text)
    own_names(unit.list, unit.names, unit.macros)
    pasted_names(text, unit.names)
    member_names(unit.list, unit.members)
    -- a macro of a header, which defines a static function
    if text:match "PERI_FORK_LOCK%(" then unit.names.fork_lock_ = true end
    units[#units + 1] = unit
  end
  return units, plain(table.concat(shared.list, "\n"))
end

local OWN_CBLAS = [[
enum CBLAS_ORDER { CblasRowMajor = 101 };
enum CBLAS_TRANSPOSE { CblasNoTrans = 111, CblasTrans = 112 };
void cblas_sgemm(enum CBLAS_ORDER order, enum CBLAS_TRANSPOSE ta, enum CBLAS_TRANSPOSE tb, int m, int n, int k, float alpha, const float *a,
                 int lda, const float *b, int ldb, float beta, float *c, int ldc);
void cblas_dgemm(enum CBLAS_ORDER order, enum CBLAS_TRANSPOSE ta, enum CBLAS_TRANSPOSE tb, int m, int n, int k, double alpha,
                 const double *a, int lda, const double *b, int ldb, double beta, double *c, int ldc);
#ifndef PERI_OPENBLAS_FOLDER
#define PERI_OPENBLAS_FOLDER "/usr/lib"
#endif
]]

--- What comes before the sources: the C library's headers. OpenBLAS is loaded at the first matrix product, so its
--- header is not needed.
local function head(version)
  local text, intrinsics = { HEAD:format(version) }, ""
  for _, name in ipairs(system.list) do
    if name == "liburing.h" then text[#text + 1] = "#if defined(PERI_HAVE_URING)\n#include <liburing.h>\n#endif\n"
    elseif name == "zlib.h" then -- FAR is a macro of its own
      text[#text + 1] = "#if defined(PERI_HAVE_ZLIB)\n#include <zlib.h>\n#undef FAR\n#endif\n"
    elseif name:match "intrin%.h$" then -- parts of it; all units of all instruction sets are in this file
      intrinsics = "#if defined(__x86_64__)\n#include <immintrin.h>\n#endif\n"
    elseif name == "cblas.h" then text[#text + 1] = OWN_CBLAS
    else text[#text + 1] = ("#include <%s>\n"):format(name) end
  end
  return table.concat(text) .. intrinsics
end

--- The names of a unit that others have, too: by macros, { name, to }, and word by word, name -> to.
local function renames(unit, number, count, members)
  local macros, words = {}, {}
  for _, name in ipairs(sorted(unit.names)) do
    if (count[name] > 1 or members[name]) and not unit.macros[name] and not name:match "^peri_" then
      local to = ("u%d_%s"):format(number, name)
      if unit.members[name] or members[name] then words[name] = to else macros[#macros + 1] = { name, to } end
    end
  end
  return macros, words
end

local WORDS = '#pragma GCC push_options\n#ifdef __OPTIMIZE__\n#pragma GCC optimize(%s)\n#endif\n'
local KERNELS = '"%s", "tree-vectorize", "no-math-errno", "no-trapping-math", "fp-contract=off"'

--- Folders of the runtime that have loops over data of their own. The others call kernels, and take half as long to
--- compile at -O1.
local LOOPS = { base = true, io = true, model = true }

--- One unit. Kernels are compiled as the Makefile does, but less: those of kernels/cpu are called where the processor
--- has AVX2.
local function unit_text(unit, macros, words, common_macros)
  local cpu, ref = unit.path:match "^kernels/cpu/", unit.path:match "^kernels/ref/"
  local options = (cpu or ref) and KERNELS:format(cpu and "O2" or "O1")
    or not LOOPS[unit.path:match "^runtime/(%w+)/"] and '"O1"'
  local text = { "\n/* ", unit.path, " */\n" }
  local function add(...) for _, s in ipairs { ... } do text[#text + 1] = s end end
  if cpu then add "#if PERI_ISA_MOST >= 1\n#define K_ISA avx2\n" end
  if unit.piece then add("#define K_PIECE ", unit.piece, "\n") end
  if options then add(WORDS:format(options)) end
  if cpu then add '#pragma GCC target("avx2,fma,f16c,bmi2")\n' end
  for _, m in ipairs(macros) do add("#define ", m[1], " ", m[2], "\n") end
  add(rename(unit.list, words), "\n")
  for _, m in ipairs(macros) do add("#undef ", m[1], "\n") end
  for _, name in ipairs(sorted(unit.macros)) do
    if not common_macros[name] then add("#undef ", name, "\n") end
  end
  if options then add "#pragma GCC pop_options\n" end
  if unit.piece then add "#undef K_PIECE\n" end
  if cpu then add "#undef K_ISA\n#endif\n" end
  return table.concat(text)
end

--- perilune.c. sources: the paths, in their order; a unit of kernels/cpu is that of AVX2.
function M.source(sources, version)
  local units, common = read_units(sources)
  local count, names, macros, members = {}, {}, {}, {}
  own_names(tokens(common), names, macros)
  member_names(tokens(common), members)
  for name in pairs(names) do count[name] = 1 end
  for name in system_functions:gmatch "%S+" do count[name] = 1 end
  for _, unit in ipairs(units) do
    for name in pairs(unit.names) do count[name] = (count[name] or 0) + 1 end
  end
  local text = { head(version), "#pragma GCC visibility push(hidden)\n", common, "\n" }
  for number, unit in ipairs(units) do
    local by_macro, by_word = renames(unit, number, count, members)
    text[#text + 1] = unit_text(unit, by_macro, by_word, macros)
  end
  text[#text + 1] = "#pragma GCC visibility pop\n"
  return table.concat(text)
end

if arg and arg[0]:match "amalgamation%.lua$" then
  local folder, version = arg[1], arg[2]
  local sources = {}
  for i = 3, #arg do sources[#sources + 1] = arg[i] end
  local function write(name, text)
    local file = assert(io.open(folder .. "/" .. name, "wb"))
    file:write(text)
    assert(file:close())
  end
  write("perilune.h", M.header({ "runtime/include/perilune/perilune.h", "runtime/include/perilune/host.h" }, version))
  write("perilune.c", M.source(sources, version))
end

return M
