-- contract.lua: what programs that were built with the public headers rely on: functions, structures, constants. It
-- reads them from the generated declarations, writes them down (runtime/gen/contract.txt, for the last release), and
-- says what has changed since.
--
-- Names may change all the same. Those of structures, members and constants are in no program that was built:
-- runtime/gen/renamed.txt says what is called otherwise now. Functions are: runtime/host/renamed.c keeps, under its
-- version, each that has another name, or other parameters, by now.
--
-- Usage: luajit contract.lua check|record|map <build>/lua/perilune/cdef.lua <folder of the headers> <record>
--          <renamed.txt> <renamed.c>
--   check    complain of what programs of the last release would stumble over
--   record   write the record of this release (`make contract`), unless it breaks the last one under the same
--            PERI_ABI_VERSION
--   map      print the linker's version script: a function has the version of the release that brought it
local M = {}

--- Structures of the flat declarations: name, body, its members in order: { text = "const char *", name = "key" }.
function M.structs(flat)
  local list = {}
  for name, body, alias in flat:gmatch "typedef struct ([%w_]+) (%b{}) ([%w_]+);" do
    assert(name == alias, "struct " .. name .. " has another name as a type, " .. alias)
    local members = {}
    for declaration in body:sub(2, -2):gmatch "[^;]+" do
      local base
      for part in (declaration .. ","):gmatch "(.-)," do -- "int32_t a, b[3]" declares several
        local text, field, array = part:match "^%s*(.-)([%a_][%w_]*)%s*(%b[])%s*$"
        if not field then text, field = part:match "^%s*(.-)([%a_][%w_]*)%s*$" end
        if field and (base or text ~= "") then
          if not base then base = text:match "^([%w_ ]*[%w_])" end
          local kind = (text:gsub("^[%w_ ]*[%w_]", "", 1) .. (array or "")):gsub("%s+", "")
          members[#members + 1] = { name = field, text = base .. kind }
        end
      end
    end
    list[#list + 1] = { name = name, members = members }
  end
  return list
end

--- The names and declarations of functions; names of arguments are left out, which may change.
local function functions(flat)
  local found = {}
  for statement in flat:gsub("%b{}", ""):gmatch "([^;]+);" do
    local result, name, arguments = statement:match "^%s*([%w_ %*]-)%s*(peri_[%w_]+)%s*(%b())%s*$"
    if name and not result:match "typedef" then
      local kinds = {}
      for argument in (arguments:sub(2, -2) .. ","):gmatch "%s*(.-)%s*," do
        local kind = argument:match "^(.-[%s%*])[%a_][%w_]*$"
        if not kind or not kind:match "%S" or kind:match "^%s*const%s*$" then kind = argument end
        kinds[#kinds + 1] = kind:gsub("%s*%*%s*", "*"):gsub("%s+$", "")
      end
      found[name] = ("%s(%s)"):format(result:gsub("%s*%*%s*", "*"), table.concat(kinds, ", "))
    end
  end
  return found
end

--- What is there now. text: the declarations for the FFI; headers: their folder, of which host.h is not among the
--- declarations.
function M.now(text, headers)
  local ffi = require "ffi"
  pcall(ffi.cdef, text) -- once a process
  local flat = text:gsub("%s+", " ")
  local now = { version = {}, constants = {}, structs = {}, functions = functions(flat) }
  for body in flat:gmatch "enum (%b{})" do
    for name in body:gmatch "(PERI_[%w_]+)" do now.constants[name] = tonumber(ffi.new("int64_t", ffi.C[name])) end
  end
  for _, s in ipairs(M.structs(flat)) do
    local kept = { size = ffi.sizeof(s.name), grows = s.members[1].name == "size", members = {} }
    for _, m in ipairs(s.members) do
      kept.members[#kept.members + 1] = { name = m.name, offset = ffi.offsetof(s.name, m.name), text = m.text }
    end
    now.structs[s.name] = kept
  end
  local file = assert(io.open(headers .. "/host.h"))
  local host = file:read("*a"):gsub("/%*.-%*/", ""):gsub("%s+", " ")
  file:close()
  for result, name, rest in host:gmatch "PERI_API ([%w_ ]-[ %*]+)(peri_[%w_]+)(%b());" do
    now.functions[name] = (result .. rest):gsub("%s*%*%s*", "*")
  end
  file = assert(io.open(headers .. "/base.h"))
  for number in file:read("*a"):gmatch "#define PERI_VERSION_%u+ (%d+)" do now.version[#now.version + 1] = number end
  file:close()
  now.release, now.contract = ("%s.%s"):format(now.version[1], now.version[2]), now.constants.PERI_ABI_VERSION
  now.constants.PERI_ABI_VERSION = nil
  return now
end

local function names(t)
  local list = {}
  for name in pairs(t) do list[#list + 1] = name end
  table.sort(list)
  return list
end

--- A record as text, and back. since: function -> release that brought it; kept: functions that only programs of
--- earlier releases call, by "name release".
function M.write(now, since, kept)
  local out = { ("release %s contract %d"):format(now.release, now.contract) }
  for _, name in ipairs(names(now.constants)) do
    out[#out + 1] = ("constant %s %d"):format(name, now.constants[name])
  end
  for _, name in ipairs(names(now.structs)) do
    local s = now.structs[name]
    out[#out + 1] = ("struct %s %d %s"):format(name, s.size, s.grows and "grows" or "stays")
    for _, m in ipairs(s.members) do out[#out + 1] = ("member %s %d %s"):format(m.name, m.offset, m.text) end
  end
  for _, name in ipairs(names(now.functions)) do
    out[#out + 1] = ("function %s %s %s"):format(name, since[name] or now.release, now.functions[name])
  end
  for _, name in ipairs(names(kept)) do out[#out + 1] = ("kept %s %s"):format(name, kept[name]) end
  return table.concat(out, "\n") .. "\n"
end

function M.read(text)
  local kept, last = { constants = {}, structs = {}, functions = {}, since = {}, kept = {} }, nil
  for line in text:gmatch "[^\n]+" do
    local word, name, rest = line:match "^(%S+) (%S+) (.*)$"
    if word == "release" then kept.release, kept.contract = name, tonumber(rest:match "contract (%d+)")
    elseif word == "constant" then kept.constants[name] = tonumber(rest)
    elseif word == "struct" then
      last = { size = tonumber(rest:match "%d+"), grows = rest:match "grows" ~= nil, members = {} }
      -- Lua's handles stood in the headers until 0.3; no function takes one.
      if not name:match "_ref$" then kept.structs[name] = last end
    elseif word == "member" then
      local offset, kind = rest:match "^(%d+) (.*)$"
      last.members[#last.members + 1] = { name = name, offset = tonumber(offset), text = kind }
    elseif word == "function" then kept.since[name], kept.functions[name] = rest:match "^(%S+) (.*)$"
    elseif word == "kept" then
      local since, declaration = rest:match "^(%S+) (.*)$"
      kept.kept[name .. " " .. since] = declaration
    end
  end
  return kept
end

--- What runtime/host/renamed.c (its text) keeps: "peri_name release" -> its declaration, as functions() has it.
function M.kept(text)
  local kept = {}
  for release, result, name, parameters in text:gsub("%s+", " "):gmatch
    "KEPT%((%d+%.%d+), ([%w_ %*]-), ([%w_]+), (%b())%)" do
    local key, flat = ("peri_%s %s"):format(name, release), ("%s peri_%s%s;"):format(result, name, parameters)
    kept[key] = functions(flat:gsub("%f[%w_]bool%f[^%w_]", "_Bool"))["peri_" .. name]
    if parameters:find("(*", 1, true) then kept[key] = (result .. " " .. parameters):gsub("%s*%*%s*", "*") end
  end
  return kept
end

--- The record `old` in the names of today. text: runtime/gen/renamed.txt, a line each:
---   type OLD NEW | constant OLD NEW | member TYPE OLD NEW | count TYPE MEMBER (an int64_t that is an int32_t now: the
---   same bytes of numbers that are no larger, on the processors of today)
---   | pointer TYPE MEMBER FUNCTION (a void * that has the type of the function that it points to now)
--- complaints gets lines of it that say nothing.
function M.renamed(old, text, complaints)
  local types = {}
  for line in text:gmatch "[^\n]+" do
    local kind, a, b, c = line:match "^(%l+) (%S+) (%S+) ?(%S*)$"
    local found
    if kind == "type" then found, types[a] = old.structs[a], b
    elseif kind == "constant" then
      found = old.constants[a]
      old.constants[a] = nil
      if old.constants[b] == nil then old.constants[b] = found
      elseif old.constants[b] ~= found then found = nil end
    elseif kind then
      for _, m in ipairs(old.structs[a] and old.structs[a].members or {}) do
        if m.name == b then
          found = m
          if kind == "member" then m.name = c
          elseif kind == "pointer" and m.text == "void*" then m.text = c
          elseif kind == "count" and m.text == "int64_t" then m.text = "int32_t" end
        end
      end
    end
    if not found and not line:match "^#" then
      complaints[#complaints + 1] = ("runtime/gen/renamed.txt: '%s' is about nothing in the record"):format(line)
    end
  end
  --- size_t is said of none any more: on all processors here it is passed as int64_t is.
  local function today(declaration)
    return (declaration:gsub("[%w_]+", types):gsub(", size_t%f[,%)]", ", int64_t"))
  end
  local structs = {}
  for name, s in pairs(old.structs) do
    for _, m in ipairs(s.members) do m.text = today(m.text) end
    structs[types[name] or name] = s
  end
  old.structs = structs
  for name, declaration in pairs(old.functions) do old.functions[name] = today(declaration) end
  for key, declaration in pairs(old.kept) do old.kept[key] = today(declaration) end
end

local function compare_struct(say, name, old, new)
  for i, m in ipairs(old.members) do
    local n = new.members[i]
    if not n then say("struct %s: member %s is gone", name, m.name)
    elseif n.name ~= m.name or n.offset ~= m.offset or n.text ~= m.text then
      say("struct %s: member %d was '%s' (%s) at byte %d, now '%s' (%s) at byte %d", name, i, m.name, m.text, m.offset,
        n.name, n.text, n.offset)
    end
  end
  if old.grows ~= new.grows then
    say("struct %s: %s", name, new.grows and "begins with a size now" or "no longer begins with its size")
  end
  for i = #old.members + 1, #new.members do
    local m = new.members[i]
    if not old.grows then say("struct %s: member %s is new, and a struct that does not begin with its size stays as "
      .. "it is", name, m.name)
    elseif m.offset < old.size then
      say("struct %s: member %s is new, and lies within what the struct was: move it to the end", name, m.name)
    end
  end
  if new.size < old.size or (new.size ~= old.size and not old.grows) then
    say("struct %s: %d bytes, were %d", name, new.size, old.size)
  end
end

--- Complaints: what a program of the recorded release would stumble over. kept: of M.kept.
function M.compare(old, new, kept, complaints)
  local list = complaints or {}
  local function say(...) list[#list + 1] = string.format(...) end
  if old.contract ~= new.contract then return list end
  for _, name in ipairs(names(old.constants)) do
    local was, is = old.constants[name], new.constants[name]
    if is == nil then say("constant %s is gone", name)
    elseif is ~= was and not (name:match "_COUNT$" and is > was) then say("constant %s is %d, was %d", name, is,
      was) end
  end
  for _, name in ipairs(names(old.structs)) do
    if not new.structs[name] then say("struct %s is gone", name)
    else compare_struct(say, name, old.structs[name], new.structs[name]) end
  end
  for _, name in ipairs(names(old.functions)) do
    local was, is = old.functions[name], new.functions[name]
    local stays = kept and kept[name .. " " .. old.since[name]]
    if is == was then
      if stays then say("function %s: runtime/host/renamed.c keeps it, though it is as it was", name) end
    elseif stays and stays ~= was then say("function %s: runtime/host/renamed.c keeps '%s', was '%s'", name, stays, was)
    elseif stays and is and old.since[name] == new.release then
      say("function %s has changed within release %s", name, new.release)
    elseif not stays and not is then say("function %s is gone", name)
    elseif not stays then say("function %s is '%s', was '%s'", name, is, was) end
  end
  for _, key in ipairs(names(old.kept)) do
    if not kept or kept[key] ~= old.kept[key] then say("function %s, kept for earlier programs, is gone", key) end
  end
  return list
end

--- The version script of the shared library: what the record has not yet, or has with other parameters, is of this
--- release. All else is local, which the newest release says: said of one to which runtime/host/renamed.c adds
--- functions, it would hide these.
function M.map(old, new)
  local by, releases = {}, {}
  for _, name in ipairs(names(new.functions)) do
    local since = old.functions[name] == new.functions[name] and old.since[name] or new.release
    if not by[since] then
      by[since] = {}
      releases[#releases + 1] = since
    end
    table.insert(by[since], name)
  end
  local function order(v)
    local major, minor = v:match "^(%d+)%.(%d+)$"
    return tonumber(major) * 1e6 + tonumber(minor)
  end
  table.sort(releases, function(a, b) return order(a) < order(b) end)
  local out, before = {}, nil
  for i, release in ipairs(releases) do
    local node = "PERILUNE_" .. release
    out[#out + 1] = ("%s {\n  global:\n    %s;\n%s}%s;"):format(node, table.concat(by[release], ";\n    "),
      i == #releases and "  local:\n    *;\n" or "", before and " " .. before or "")
    before = node
  end
  return table.concat(out, "\n") .. "\n"
end

local function slurp(path)
  local file = io.open(path)
  if not file then return nil end
  local text = file:read "*a"
  file:close()
  return text
end

local verbs = {}
function verbs.check(old, new, _, kept, complaints)
  M.compare(old, new, kept, complaints)
  for _, complaint in ipairs(complaints) do print(complaint) end
  return #complaints == 0
end
function verbs.record(old, new, path, kept, complaints)
  if not verbs.check(old, new, path, kept, complaints) then
    print("contract.lua: undo this, or raise PERI_ABI_VERSION: programs of release " .. old.release .. " would stumble")
    return false
  end
  local since, more = {}, {}
  for name, declaration in pairs(new.functions) do
    since[name] = old.functions[name] == declaration and old.since[name] or nil
  end
  for key, declaration in pairs(kept) do
    local name, release = key:match "^(%S+) (%S+)$"
    more[key] = ("%s %s"):format(release, declaration)
    if not old.kept[key] and not old.functions[name] then more[key] = nil end
  end
  local file = assert(io.open(path, "w"))
  file:write(M.write(new, since, more))
  file:close()
  print "contract.lua: the record has the names of today: empty runtime/gen/renamed.txt"
  return true
end
function verbs.map(old, new)
  io.write(M.map(old, new))
  return true
end

if arg and arg[0] and arg[0]:match "contract%.lua$" then
  local verb, cdef, headers, record, renamed, kept = unpack(arg)
  local old, complaints = M.read(slurp(record) or ""), {}
  local new = M.now(dofile(cdef), headers)
  M.renamed(old, slurp(renamed) or "", complaints)
  os.exit(verbs[verb](old, new, record, M.kept(slurp(kept) or ""), complaints) and 0 or 1)
end
return M
