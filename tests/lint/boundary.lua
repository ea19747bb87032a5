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
          and "a function pointer"
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
    local kind, name = line:match "%x+ (%a) ([%w_]+)"
    if name and name:match "^peri_" then found[name] = kind end
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

--- Functions, structures and constants that programs of the last release rely on: runtime/gen/contract.lua.
local function contract(ctx)
  local check = "luajit runtime/gen/contract.lua check %s/lua/perilune/cdef.lua runtime/include/perilune "
    .. "runtime/gen/contract.txt"
  local complaints = ctx.lines(check:format(ctx.build))
  for i, complaint in ipairs(complaints) do
    complaints[i] = ("%s: undo it, or raise PERI_ABI_VERSION and record the contract (make contract)"):format(complaint)
  end
  return complaints
end

--- What a public function that programs of the last release do not know yet does not do as the others:
--- docs/embedding_c.md, "Names". (What they know stays as it is.)
local function unlike(name, text)
  local why, parameters = {}, {}
  for word, instead in pairs { create = "new", make = "new", destroy = "release", free = "release",
    delete = "release" } do
    if name:match("_" .. word .. "$") then why[#why + 1] = ("is called _%s, wanted: _%s"):format(word, instead) end
  end
  if name:match "_set_" or name:match "^peri_set_" then
    why[#why + 1] = "is a setting's, wanted: peri_<noun>_<setting>_set"
  end
  for parameter in text:match("%((.*)%)"):gsub("%b()", ""):gmatch "[^,]+" do parameters[#parameters + 1] = parameter end
  for i, parameter in ipairs(parameters) do
    local type_of, word = parameter:gsub("%b[]", ""):match "^%s*(.-)%s*%**%s*([%w_]+)%s*$"
    if word == "out" and i ~= #parameters then why[#why + 1] = "has a parameter behind out, wanted: out last" end
    if parameter:match "^%s*peri_[%w_]+ %*%*out" == nil and parameter:match "^%s*peri_[%w_]+ %*%*[%w_]+%s*$" then
      why[#why + 1] = ("gives a new object through '%s', wanted: out"):format(word)
    end
    for plain in (type_of or ""):gmatch "[%w_]+" do
      if ({ size_t = true, int = true, unsigned = true, long = true, short = true })[plain] then
        why[#why + 1] = ("counts '%s' as %s, wanted: int32_t or int64_t"):format(word, plain)
      end
    end
  end
  if name:match "_release$" and not text:match "^void " then
    why[#why + 1] = "can fail, wanted: void, since a release never fails"
  end
  table.sort(why)
  return why
end

--- New structures that callers fill in, or have filled in, begin with their size.
local function unlike_struct(name, body)
  if name:match "_options$"
    or name:match "_params$" then return { "is called as none of the others: _config is what objects are made "
      .. "with, _args what a call takes" } end
  for _, kind in ipairs { "config", "args", "desc", "info", "stats" } do
    if name:match("_" .. kind .. "$") and not body:match "^%s*int64_t size;" then
      return { "does not begin with int64_t size" }
    end
  end
  return {}
end

local function named(ctx)
  local complaints, known, all = {}, {}, declared(ctx)
  for kind, name in ctx.read("runtime/gen/contract.txt"):gmatch "\n(%a+) (peri_[%w_]+)" do
    known[kind .. name] = true
  end
  local function complain(path, name, list)
    for _, why in ipairs(list) do complaints[#complaints + 1] = ("%s: %s %s"):format(path, name, why) end
  end
  for _, name in ipairs(keys(all)) do
    if not known["function" .. name] then complain(all[name].path, name, unlike(name, all[name].text)) end
  end
  for _, path in ipairs(public_headers(ctx)) do
    for name, body in ctx.read(path):gmatch "\ntypedef struct (peri_[%w_]+) (%b{})" do
      if not known["struct" .. name] then complain(path, name, unlike_struct(name, body:sub(2, -2))) end
    end
  end
  return complaints
end

local function prefixed(ctx)
  -- Internal symbols are hidden and named peri__*; what a static library leaks into its host must carry the prefix too.
  local complaints = {}
  for _, line in ipairs(ctx.lines(("nm -g --defined-only %s/libperilune.a 2>/dev/null"):format(ctx.build))) do
    local name = line:match "%x+ [TDBRVC] ([%w_]+)"
    if name and not name:match "^peri_" then
      complaints[#complaints + 1] = "libperilune.a defines the global symbol " .. name
    end
  end
  return complaints
end

return {
  { "public headers are cdef-clean", clean_headers }, { "exported symbols = cdef = public headers", exported },
  { "public functions are documented", documented }, { "public functions have callers", called },
  { "new public names follow the rules of the others", named },
  { "plugins export their entry only", plugins },
  { "global symbols carry the prefix", prefixed }, { "programs of the last release go on", contract },
}
