-- boundary.lua: one truth between C and Lua: headers that the FFI can read, exported symbols = declared = documented
-- functions.

local function public_headers(ctx) return ctx.files("runtime/include/perilune", "h") end

local function clean_headers(ctx)
  local complaints = {}
  for _, path in ipairs(public_headers(ctx)) do
    if not path:match "/host%.h$" then
      local n = 0
      for line in (ctx.read(path):gsub("/%*.-%*/", function(c) return c:gsub("[^\n]", "") end)):gmatch "([^\n]*)\n" do
        n = n + 1
        -- What only one of C and Lua sees may differ between them.
        local one_sided = line:match "PERI_CDEF_PASS" and not path:match "/base%.h$" and "a condition on PERI_CDEF_PASS"
        local why = one_sided or line:match "^%s*#%s*define%s+[%w_]+%(" and "a macro with arguments"
          or line:match "inline" and "an inline function"
          or line:match "^%s+[%w_ ]+%s:%s*%d+;" and "a bit-field" or line:match "%(%s*%*%s*[%w_]*%s*%)%s*%("
          and not line:match "^typedef [%w_ ]+ %(%*peri_[%w_]+_f%)%(" and "a function pointer without a type peri_..._f"
        if why then complaints[#complaints + 1] = ("%s:%d: %s: %s"):format(path, n, why, line) end
      end
    end
  end
  return complaints
end

--- Functions that the headers declare: name -> { path =, doc =, text = declaration, head = file comment }. The comment
--- in front of a declaration documents it, and the declarations that follow without a blank line; doc is nil where
--- there is none.
local function declared(ctx)
  local all = {}
  for _, path in ipairs(public_headers(ctx)) do
    local text = ctx.read(path)
    local head = text:match "^/%*.-%*/" or ""
    local at, doc, doc_end = 1, nil, 0
    while true do
      local comment, comment_end = text:find("/%*.-%*/", at)
      local start = text:find("\nPERI_API ", at, true)
      if not start then break end
      if comment and comment < start then
        doc, doc_end, at = text:sub(comment, comment_end), comment_end, comment_end + 1
      else
        local stop = text:find(";", start, true)
        local body = text:sub(start + 10, stop)
        local between = text:sub(doc_end + 1, start)
        if between:match "%S" or between:match "\n%s*\n" then doc = nil end
        all[body:match "([%w_]+)%s*%("] = { path = path, doc = doc and doc:match "^/%*%*" and doc, text = body,
          head = head }
        doc_end, at = stop, stop + 1
      end
    end
  end
  return all
end

local function keys(t)
  local list = {}
  for k in pairs(t) do list[#list + 1] = k end
  table.sort(list)
  return list
end

local function symbols(ctx, file)
  local found = {}
  for _, line in ipairs(ctx.lines(("nm -D --defined-only %s/%s"):format(ctx.build, file))) do
    local kind, name, rest = line:match "%x+ (%a) ([%w_]+)(%S*)"
    -- One @: for earlier programs, see kept(). Two: what programs of today are linked with.
    if name and name:match "^peri_" and not rest:match "^@PERI" then found[name] = kind end
  end
  return found
end

local function exported(ctx)
  local complaints, from_headers = {}, declared(ctx)
  local cdef = {}
  for name in dofile(ctx.build .. "/lua/perilune/cdef.lua"):gmatch "(peri_[%w_]+)%s*%(" do cdef[name] = true end
  local files = { "libperilune.so" }
  if ctx.exists(ctx.build .. "/perilune") then files[2] = "perilune" end
  for _, file in ipairs(files) do
    local there = symbols(ctx, file)
    for _, name in ipairs(keys(there)) do
      if not from_headers[name] then
        complaints[#complaints + 1] = ("%s exports %s, which no public header declares"):format(file, name)
      end
    end
    for _, name in ipairs(keys(from_headers)) do
      local d = from_headers[name]
      if not there[name] then
        complaints[#complaints + 1] = ("%s declares %s, which %s does not export"):format(d.path, name, file)
      end
      if not cdef[name] and not d.path:match "/host%.h$" then
        complaints[#complaints + 1] = name .. " is not in the generated cdef"
      end
    end
  end
  for _, name in ipairs(keys(cdef)) do
    if not from_headers[name] then
      complaints[#complaints + 1] = ("the cdef has %s, which is not marked PERI_API"):format(name)
    end
  end
  return complaints
end

--- Public functions that nobody calls: not the examples, nor Lua, nor the launcher, a plugin or a test.
--- P.handle("peri_x") in Lua calls peri_x_release and peri_x_retain.
local function called(ctx)
  local complaints, used = {}, {}
  for _, path in ipairs(ctx.files("examples lua spec tests runtime/host runtime/serve runtime/backends", "c", "cc", "h",
    "lua")) do
    local text = ctx.read(path)
    for name in text:gmatch "peri_[%w_]+" do used[name] = true end
    for name in text:gmatch 'handle%(?%s*"(peri_[%w_]+)"' do
      used[name .. "_release"], used[name .. "_retain"] = true, true
    end
  end
  for name, d in pairs(declared(ctx)) do
    if not used[name] then
      complaints[#complaints + 1] =
        ("%s: %s has no caller in examples, Lua or tests; let one use it, or remove it"):format(d.path, name)
    end
  end
  table.sort(complaints)
  return complaints
end

local function plugins(ctx)
  local complaints = {}
  for _, path in ipairs(ctx.lines(("ls %s/libperilune_*.so 2>/dev/null"):format(ctx.build))) do
    local names = keys(symbols(ctx, path:match "[^/]+$"))
    -- no backend: it exports a function of the C library's
    local of_mpirun = path:match "_loopback%.so$" and #names == 0
    if not of_mpirun and (#names ~= 1 or not names[1]:match "^peri_%a+_entry_v%d+$") then
      complaints[#complaints + 1] = ("%s exports {%s}; one entry function wanted"):format(path,
        table.concat(names, ", "))
    end
  end
  return complaints
end

local function documented(ctx)
  local complaints, all = {}, declared(ctx)
  for _, name in ipairs(keys(all)) do
    local d = all[name]
    local function complain(why) complaints[#complaints + 1] = ("%s: %s: %s"):format(d.path, name, why) end
    if not d.doc then complain "no comment in front of it"
    elseif d.text:match "%*%*%s*out" and not (d.doc .. d.head):match "%f[%a]new%f[%A]"
      and not d.doc:match "borrowed" then
      complain "the comment does not say whose @out is (new, borrowed)"
    end
  end
  return complaints
end

--- Plugins and the library compare layouts of arguments by the numbers in kernels/layout.h.
local function layouts(ctx)
  local differs = ctx.lines "luajit runtime/gen/layouts.lua 2>&1 | cmp - kernels/layout.h 2>&1"
  return { differs[1] and differs[1] .. ": luajit runtime/gen/layouts.lua >kernels/layout.h" }
end

--- Functions, structures and constants that programs of the last release rely on: runtime/gen/contract.lua.
local function contract(ctx)
  local check = "luajit runtime/gen/contract.lua check %s/lua/perilune/cdef.lua runtime/include/perilune "
    .. "runtime/gen/contract.txt runtime/gen/renamed.txt runtime/host/renamed.c"
  local complaints = ctx.lines(check:format(ctx.build))
  for i, complaint in ipairs(complaints) do
    complaints[i] = ("%s: undo it, or raise PERI_ABI_VERSION and record the contract (make contract)"):format(complaint)
  end
  return complaints
end

--- The parameters of a declaration, in order: text, name, and type without stars.
local function parameters_of(text)
  local list = {}
  for parameter in text:match("%((.*)%)"):gsub("%b()", ""):gmatch "[^,]+" do
    local plain = parameter:gsub("%b[]", "")
    local type_of, name = plain:match "^%s*(.-)%s*%**%s*([%w_]+)%s*$"
    list[#list + 1] = { text = parameter, name = name or "", type = type_of or "",
      object = plain:match "^%s*peri_[%w_]+ %*%*" ~= nil }
  end
  return list
end

--- What results do not do as those of other functions: they come last, one that is alone is `out`, and how many entries
--- of an array were given comes behind the array.
local function unlike_results(list, say)
  local objects, first = {}, nil
  for i, p in ipairs(list) do
    if p.object then objects[#objects + 1] = p end
    if not first and (p.object or p.name == "out") then first = i end
    if first and i > first and not p.text:find("*", 1, true) and not (p.type:match "int32_t" and (p.name:match "^n_"
      or p.name == "room")) then
      say("has the parameter %s behind results, wanted: results last", p.name)
    end
  end
  local before = list[#list - 1]
  local beside = before and before.text:find("*", 1, true) and before.text:match "^%s*[%w_]+_t " -- another result
  if #objects == 1 and objects[1].name ~= "out" and first == #list and not beside then
    say("gives a new object through '%s', wanted: out", objects[1].name)
  end
end

--- Settings are set by `_set`, which returns a status: what takes a switch and, at most, an object sets one.
local function unlike_setter(name, text, list, say)
  if name:match "_set_" or name:match "^peri_set_" or name:match "^peri_get_" or name:match "_enable$" then
    say "is a setting's, wanted: peri_<noun>_<setting>_set, and peri_<noun>_<setting>"
  end
  local last = list[#list]
  if last and last.text:match "^%s*bool%s+[%w_]+$" and #list <= 2 and (#list == 1 or list[1].text:match "^%s*peri_")
    and not name:match "_set$" then
    say "takes a switch and nothing else, so it sets something, wanted: _set"
  end
  if name:match "_set$" and not text:match "^peri_status " then say "cannot say that it failed, wanted: peri_status" end
end

--- What a public function does not do as the others: docs/embedding_c.md, "Names".
local function unlike(name, text)
  local why, list = {}, parameters_of(text)
  local function say(...) why[#why + 1] = select("#", ...) > 1 and string.format(...) or (...) end
  for word, instead in pairs { create = "new", make = "new", destroy = "release", free = "release",
    delete = "release", defaults = "default" } do
    if name:match("_" .. word .. "$") then say("is called _%s, wanted: _%s", word, instead) end
  end
  unlike_setter(name, text, list, say)
  unlike_results(list, say)
  for _, p in ipairs(list) do
    for plain in p.type:gmatch "[%w_]+" do
      if ({ size_t = true, int = true, unsigned = true, long = true, short = true })[plain] then
        say("counts '%s' as %s, wanted: int32_t or int64_t", p.name, plain)
      end
    end
    if (p.name == "n" or p.name:match "^n_") and p.type:match "int64_t" then
      say("counts entries by %s %s, wanted: int32_t", p.type, p.name)
    elseif (p.name == "count" or p.name == "len") and p.type:match "^int%d+_t$" then
      say("has a parameter %s, wanted: n or size", p.name)
    end
    if p.type:match "peri_[%w_]+_args$" and (name:match "_new$" or name:match "_open$") then
      say("makes an object with %s, wanted: a _config", p.type:match "peri_[%w_]+")
    end
    if p.name == "options" or p.name == "params" and p.type:match "peri_[%w_]+_%l+$" then
      say("has a parameter %s, wanted: config or args", p.name)
    end
  end
  if name:match "_release$" and not text:match "^void " then
    say "can fail, wanted: void, since a release never fails"
  end
  table.sort(why)
  return why
end

--- What structures are called that carry the parameters of something, or tell something; the words for both.
local instead = { options = "config or args", params = "config", settings = "config", facts = "config",
  parameters = "args", desc = "info", identity = "info", choice = "info", statistics = "stats" }

--- What a structure does not do as the others. known: a record has its layout, so that it stays as it is.
local function unlike_struct(name, body, known)
  local why = {}
  local word = name:match "_(%l+)$"
  if instead[word] then why[1] = ("is called _%s, wanted: _%s"):format(word, instead[word]) end
  for _, kind in ipairs { "config", "args", "info", "stats" } do
    if not known and word == kind and not body:match "^%s*int64_t size;" then
      why[#why + 1] = "does not begin with int64_t size"
    end
  end
  for kind, member in body:gsub("/%*.-%*/", ""):gmatch "([%w_]+) (n_[%w_]+)[;,]" do
    if kind ~= "int32_t" then why[#why + 1] = ("counts %s by %s, wanted: int32_t"):format(member, kind) end
  end
  return why
end

--- Families of constants, PERI_<FAMILY>_<MEMBER>, whose names are so near that one is taken for the other: the words of
--- both begin with the same four letters, or those of one are among those of the other, and a member of both has
--- different numbers.
local function twins(families)
  local why, list = {}, keys(families)
  local function near(a, b)
    return a:sub(1, 4) == b:sub(1, 4) or ("_" .. a .. "_"):find("_" .. b .. "_", 1, true)
      or ("_" .. b .. "_"):find("_" .. a .. "_", 1, true)
  end
  for i, a in ipairs(list) do
    for k = i + 1, #list do
      local b = list[k]
      for _, member in ipairs(near(a, b) and keys(families[a]) or {}) do
        local x, y = families[a][member], families[b][member]
        if y and x ~= y then
          why[#why + 1] = ("PERI_%s_%s is %d, and PERI_%s_%s is %d: one is taken for the other"):format(a, member, x, b,
            member, y)
        end
      end
    end
  end
  return why
end

--- The constants of a header by family: what all of one enum begin with.
local function families_of(text, families)
  for body in text:gsub("/%*.-%*/", ""):gmatch "enum (%b{})" do
    local all, family = {}, nil
    for name, number in body:gmatch "PERI_([%w_]+) = (%-?%d+)" do
      all[name] = tonumber(number)
      family = family or name
      while family ~= "" and name:sub(1, #family + 1) ~= family .. "_" do family = family:match "^(.*)_" or "" end
    end
    if family and family ~= "" then -- PERI_TABLE_WISE, PERI_ROW_WISE have none
      families[family] = families[family] or {}
      for name, number in pairs(all) do families[family][name:sub(#family + 2)] = number end
    end
  end
end

local function named(ctx)
  local complaints, known, all, families = {}, {}, declared(ctx), {}
  for name in ctx.read("runtime/gen/contract.txt"):gmatch "\nstruct (peri_[%w_]+)" do known[name] = true end
  for old, new in ctx.read("runtime/gen/renamed.txt"):gmatch "\ntype (%S+) (%S+)" do known[new] = known[old] end
  local function complain(path, name, list)
    for _, why in ipairs(list) do complaints[#complaints + 1] = ("%s: %s %s"):format(path, name, why) end
  end
  for _, name in ipairs(keys(all)) do complain(all[name].path, name, unlike(name, all[name].text)) end
  for _, path in ipairs(public_headers(ctx)) do
    local text = ctx.read(path)
    for name, body in text:gmatch "\ntypedef struct (peri_[%w_]+) (%b{})" do
      complain(path, name, unlike_struct(name, body:sub(2, -2), known[name]))
    end
    families_of(text, families)
  end
  for _, why in ipairs(twins(families)) do complaints[#complaints + 1] = why end
  return complaints
end

--- What the shared library keeps for programs of earlier releases (runtime/host/renamed.c): name@PERILUNE_<release>.
local function kept(ctx)
  local complaints, there, n = {}, {}, 0
  for _, line in ipairs(ctx.lines(("nm -D --defined-only %s/libperilune.so"):format(ctx.build))) do
    there[line:match "(%S+)$"] = true
  end
  local text = ctx.read("runtime/host/renamed.c"):gsub("%s+", " ")
  for release, name in text:gmatch "KEPT%((%d+%.%d+), [^,]-, ([%w_]+)," do
    local symbol = ("peri_%s@PERILUNE_%s"):format(name, release)
    n = n + 1
    if not there[symbol] then complaints[n] = ("libperilune.so does not export %s"):format(symbol) end
  end
  if n == 0 then complaints[1] = "runtime/host/renamed.c: nothing was read; the rule is blind" end
  return complaints
end

local function prefixed(ctx)
  -- Internal symbols are hidden and named peri__*; what a static library leaks into its host must carry the prefix too.
  local complaints = {}
  for _, line in ipairs(ctx.lines(("nm -g --defined-only %s/libperilune.a 2>/dev/null"):format(ctx.build))) do
    local name = line:match "%x+ [TDBRVC] ([%w_.]+)"
    -- DW.ref: the compiler's, of units with -fexceptions; hidden, and the same in whatever has it
    if name and not name:match "^peri_" and not name:match "^DW%.ref%." then
      complaints[#complaints + 1] = "libperilune.a defines the global symbol " .. name
    end
  end
  return complaints
end

--- What the head of a public header says of threads: the paragraph that begins with "Threads:", on one line; or nil.
local function threads_of(text)
  for paragraph in ((text:match "^/%*(.-)%*/" or ""):gsub("\n %*$", "\n *\n") .. "\n *\n"):gmatch "(.-)\n %*\n" do
    local said = paragraph:match "\n %* (Threads:.*)" or paragraph:match "^ %* (Threads:.*)"
    if said then return (said:gsub("\n %*%s*", " ")) end
  end
end

--- Objects, "typedef struct peri_x peri_x;", of which neither the paragraph on threads in their header's head nor the
--- comment in front of them says which threads may use them how.
local function threads(ctx)
  local complaints, n = {}, 0
  for _, path in ipairs(public_headers(ctx)) do
    local text = ctx.read(path)
    local said = threads_of(text)
    if not said and not path:match "/perilune%.h$" then
      complaints[#complaints + 1] = path .. ": its head has no paragraph 'Threads: ...'"
    end
    for at, name in text:gmatch "()\ntypedef struct (peri_[%w_]+) peri_[%w_]+;" do
      local before = text:sub(1, at - 1)
      local comment = before:match "%*/%s*$" and before:match ".*(/%*%*.*)$" or ""
      n = n + 1
      if not (said or ""):find("%f[%w_]" .. name .. "%f[^%w_]") and not comment:find "thread" then
        complaints[#complaints + 1] = ("%s: nothing says which threads may use a %s how; say it in the head, at "
          .. "'Threads:', or in front of the type"):format(path, name)
      end
    end
  end
  if n < 30 then complaints[#complaints + 1] = n .. " objects were found in public headers; the rule is blind" end
  return complaints
end

return {
  { "public headers are cdef-clean", clean_headers }, { "exported symbols = cdef = public headers", exported },
  { "public functions are documented", documented }, { "public objects say which threads may use them", threads },
  { "public functions have callers", called },
  { "public names follow the rules of docs/embedding_c.md", named },
  { "plugins export their entry only", plugins },
  { "global symbols carry the prefix", prefixed }, { "programs of the last release go on", contract },
  { "numbers of layouts are of today", layouts },
  { "the library has what earlier programs call", kept },
}
