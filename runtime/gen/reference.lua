-- reference.lua: makes the reference of the definition files and the C headers.
--
--   luajit runtime/gen/reference.lua pages FOLDER                the pages docs/reference/*.md, and the definition file
--                                                                faces.lua: `make reference`
--   luajit runtime/gen/reference.lua manual >manual.lua          the module perilune.manual, of which `perilune help`
--                                                                shows texts
package.path = "runtime/gen/?.lua;" .. package.path
local annotations = require "annotations"
local c_pages = require "c_pages"
local families = require "families"

local M = {}

local HEADERS, DEFINITIONS = "runtime/include/perilune", "lua/perilune/reference"
M.FACES = DEFINITIONS .. "/faces.lua"
local WIDTH, NOTICE, anchor = c_pages.WIDTH, c_pages.NOTICE, c_pages.anchor

local function list(command)
  local out, pipe = {}, assert(io.popen("LC_ALL=C " .. command))
  for line in pipe:lines() do out[#out + 1] = line end
  pipe:close()
  return out
end

--- The definition files' pages in the order of their families, and the types of all of them.
function M.pages()
  local written = {} -- by hand
  for _, path in ipairs(list(("ls %s/*.lua"):format(DEFINITIONS))) do
    if path ~= M.FACES then written[#written + 1] = path end
  end
  local pages, types = annotations.all(written)
  local by_name, sorted = {}, {}
  for _, page in ipairs(pages) do by_name[page.name] = page end
  for _, family in ipairs(families) do
    for i = 2, #family do
      local page = by_name[family[i]] or error(("runtime/gen/families.lua: there is no page '%s'"):format(family[i]), 0)
      page.family, sorted[#sorted + 1] = family[1], page
    end
  end
  for _, page in ipairs(pages) do
    if not page.family then error(("runtime/gen/families.lua: page '%s' is in no family"):format(page.name), 0) end
  end
  return sorted, types
end

--- Where the errors of an entry with arguments are told, if not by itself: the class or face that it is of; nil.
local function teller_of(entry, pages)
  if entry.errors or not entry.owner or #entry.params == 0 then return nil end
  for _, page in ipairs(pages) do
    for _, e in ipairs(page.entries) do
      if e.name == entry.owner then return e.errors and e or nil end
    end
  end
end

--- The headers' pages.
function M.headers()
  local pages = {}
  for _, path in ipairs(list(("ls %s/*.h"):format(HEADERS))) do
    if not path:match "/perilune%.h$" then pages[#pages + 1] = annotations.header(path) end
  end
  return pages
end

-- -- words of an entry ------------------------------------------------------------------------------------------------

--- The name of the table of arguments that a constructor or a function takes, and its block.
local function arguments_of(entry, types)
  local name = entry.overload and entry.overload:match "^fun%(args%??: ([%w_%.]+)%)"
  if entry.kind == "function" and #entry.params == 1 and entry.params[1].name == "args" then
    name = entry.params[1].type
  end
  return name and types[name]
end
M.arguments_of = arguments_of

--- "kjt:permute(indices)", "peri.KeyedJaggedTensor { keys, values, lengths?, ... }".
function M.call(entry, types)
  local args = arguments_of(entry, types)
  local inner
  if args then
    local names = {}
    for i, f in ipairs(args.fields) do names[i] = f.name .. (f.optional and "?" or "") end
    inner = " { " .. table.concat(names, ", ") .. " }"
  elseif entry.kind == "function" then
    local names = {}
    for i, p in ipairs(entry.params) do names[i] = p.name .. (p.optional and "?" or "") end
    inner = "(" .. table.concat(names, ", ") .. ")"
  elseif entry.overload then inner = entry.overload:match "^fun(%b())":gsub("%b<>", ""):gsub(": [^,%)]+", "")
  else inner = "" end
  return entry.name .. inner
end

--- The first sentence of a description, in one line. A full stop in code (`q . k`), in brackets or of "et al."
--- ends none.
function M.brief(entry)
  local first = (entry.description:match "^(.-)\n\n" or entry.description):gsub("\n", " ")
  for at in (first .. " "):gmatch "[%.%?]() " do
    local sentence = first:sub(1, at - 1)
    local open = sentence:gsub("%b()", ""):match "%(" or sentence:match "et al%.$" and at <= #first
    if select(2, sentence:gsub("`", "")) % 2 == 0 and not open then return sentence end
  end
  return first
end

--- A call in lines that fit on a page, broken behind commas.
local function in_lines(call)
  local lines, line = {}, ""
  for part in (call:gsub(" }$", "\1}") .. " "):gmatch "(.-,?) " do -- the last argument and the brace stay together
    if line ~= "" and #line + 1 + #part > WIDTH then lines[#lines + 1], line = line, "   " end
    line = line == "" and part or line .. " " .. part
  end
  lines[#lines + 1] = line
  return (table.concat(lines, "\n"):gsub("\1", " "))
end

local function cell(text) return (text:gsub("|", "\\|")) end

--- A type as a cell shows it: alternatives are set apart, so that a long list of them has places to break.
local function type_cell(text) return cell((text:gsub("|", " | "))) end

--- What is told of the arguments, one by one: behind one that is a table of them those that it may have.
function M.parameters(entry, types)
  local args, out = arguments_of(entry, types), {}
  if args then return args.fields, args end
  for _, p in ipairs(entry.params) do
    out[#out + 1] = p
    for _, f in ipairs((types[p.type:match "^[^|]*%.args" or false] or { fields = {} }).fields) do
      out[#out + 1] = setmetatable({ name = p.name .. "." .. f.name }, { __index = f })
    end
  end
  return out
end

-- -- pages ------------------------------------------------------------------------------------------------------------

--- The classes that the definition files describe: name -> { entry =, page = its name }.
local function classes_of(pages)
  local classes = {}
  for _, page in ipairs(pages) do
    for _, entry in ipairs(page.entries) do
      if entry.kind == "class" then classes[entry.name] = { entry = entry, page = page.name } end
    end
  end
  return classes
end

--- "It has the methods of [`peri.nn.Module`](modules.md#perinnmodule), too."
local function bases(entry, classes)
  local base = entry.base and classes[entry.base]
  if not base then return nil end
  return ("It has the methods of [`%s`](%s.md#%s), too.\n"):format(entry.base, base.page, anchor(entry.base))
end

--- inner: a function of a class whose heading stands above.
local function render_entry(out, entry, types, classes, inner)
  local level = inner and "###" or "##"
  out[#out + 1] = ("%s %s\n"):format(level, entry.name)
  if entry.kind ~= "value" and entry.kind ~= "face" and (entry.kind == "function" or entry.overload) then
    out[#out + 1] = ("```\n%s\n```\n"):format(in_lines(M.call(entry, types)))
  end
  out[#out + 1] = entry.description .. "\n"
  out[#out + 1] = bases(entry, classes)
  local list_of = M.parameters(entry, types)
  if #list_of > 0 then
    out[#out + 1] = "| argument | type | meaning |\n|---|---|---|"
    for _, p in ipairs(list_of) do
      out[#out + 1] = ("| `%s`%s | `%s` | %s |"):format(p.name, p.optional and " (optional)" or "", type_cell(p.type),
        cell(p.text))
    end
    out[#out + 1] = ""
  end
  if entry.kind == "class" and entry.class and #entry.fields > 0 then
    out[#out + 1] = "| field | type | meaning |\n|---|---|---|"
    for _, p in ipairs(entry.fields) do
      out[#out + 1] = ("| `%s` | `%s` | %s |"):format(p.name, type_cell(p.type), cell(p.text))
    end
    out[#out + 1] = ""
  end
  for _, r in ipairs(entry.returns) do
    out[#out + 1] = ("Returns `%s`%s\n"):format(r.type, r.text == "" and "." or ": " .. r.text)
  end
  if entry.errors then out[#out + 1] = "*Errors:* " .. entry.errors .. "\n" end
  for _, example in ipairs(entry.examples) do out[#out + 1] = ("```lua\n%s```\n"):format(example) end
end

--- The intro of a page; where it tells of other pages by their names, these are links.
local function intro_of(page)
  if not page.intro:match "pages? `" then return page.intro end
  local pages = {}
  for _, family in ipairs(families) do
    for i = 2, #family do pages[family[i]] = ("[%s](%s.md)"):format(family[i], family[i]) end
  end
  return (page.intro:gsub("`([%l_]+)`", pages))
end

--- The Markdown of a page of Lua names.
function M.lua_page(page, types, classes)
  local out = { NOTICE:format(page.path), ("# %s\n"):format(page.title), intro_of(page) .. "\n" }
  local class -- whose line stands above: its functions come below it, by the last part of their names
  for _, entry in ipairs(page.entries) do
    local inner = class ~= nil and entry.owner == class
    if entry.kind == "class" then class, inner = entry.name, false elseif not inner then class = nil end
    out[#out + 1] = ("%s- [`%s`](#%s): %s"):format(inner and "  " or "", inner and entry.name:sub(#class + 1)
      or entry.name, anchor(entry.name), M.brief(entry))
  end
  out[#out + 1] = ""
  local seen = {} -- classes whose headings stand above
  for _, entry in ipairs(page.entries) do
    if entry.kind == "class" then seen[entry.name] = true end
    render_entry(out, entry, types, classes, entry.kind == "function" and seen[entry.owner])
  end
  local text = table.concat(out, "\n"):gsub("([%s%(])docs/([%w_]+)%.md", "%1[docs/%2.md](../%2.md)")
  return (text:gsub("\n+$", "\n"))
end

local INDEX = [[
# Reference

Everything that a script or a C program may call. `perilune help NAME` shows the same in a terminal, and editors with a language server that
reads LuaCATS (LuaLS, EmmyLua's) complete names, arguments and what calls return, from the files that these pages are made of: `make install`
puts them beside the library, in `share/lua/5.1/perilune/reference`; tell the editor that `share/lua/5.1` is a library. In the examples `peri` is `require "perilune"`; `nn`, `plan` and `data` are `peri.nn`, `peri.plan` and
`peri.data`. What they print stands behind `-->`. Shapes are written `[B, D]`. Names that begin with `_` are the library's own. Below, a name that begins with `.` is of the same module as the one before it.

## Lua

]]

--- The index of all pages.
function M.index(pages, headers)
  local out, family = { NOTICE:format(DEFINITIONS) .. "\n" .. INDEX:gsub("\n+$", "") }, nil
  for _, page in ipairs(pages) do
    local names, all = {}, {}
    if page.family ~= family then out[#out + 1] = ("\n### %s\n\n| page | names |\n|---|---|"):format(page.family) end
    family = page.family
    local module -- of the name before: the next ones of it show their last part
    for _, e in ipairs(page.entries) do
      local name = e.name:gsub("^peri%.", "")
      local own = name:match "^(%l[%l_]*%.[%l_]+)%.[%w_]+$"
      if own and own == module then name = name:sub(#own + 1) end
      module = own
      all[#all + 1] = ("[`%s`](%s.md#%s)"):format(name, page.name, anchor(e.name))
      if e.kind ~= "face" and (e.kind ~= "function" or e.owner:match "^peri%.?[%l_%.]*$") then
        names[#names + 1] = all[#all]
      end
    end
    if #names == 0 then names = all end -- methods only
    out[#out + 1] = ("| [%s](%s.md) | %s |"):format(page.title, page.name, table.concat(names, ", "))
  end
  out[#out + 1] = "\n## C\n\n| header | what is in it |\n|---|---|"
  for _, page in ipairs(headers) do
    local first = page.intro:gsub("\n", " "):gsub("^[%w_]+%.h: ", ""):match "^(.-%.)%f[%s%z]"
      or page.intro:gsub("\n", " ")
    out[#out + 1] = ("| [%s.h](c_%s.md) | %s |"):format(page.name, page.name, cell(first))
  end
  return table.concat(out, "\n") .. "\n"
end

--- Every page: name of the file -> its text.
function M.make()
  local files, pages, types = {}, M.pages()
  local headers, classes = M.headers(), classes_of(pages)
  for _, page in ipairs(pages) do files[page.name .. ".md"] = M.lua_page(page, types, classes) end
  for _, page in ipairs(headers) do files["c_" .. page.name .. ".md"] = c_pages.page(page) end
  files["README.md"] = M.index(pages, headers)
  return files
end

-- -- for editors ------------------------------------------------------------------------------------------------------

local function read(path)
  local file = assert(io.open(path))
  local text = file:read "*a"
  file:close()
  return text
end

--- The functions of nn.functional that tensors have as methods, by what the library's files say: name -> true.
local function tensor_methods()
  local methods = {}
  for _, path in ipairs(list "ls lua/perilune/tensor/*.lua") do
    for names in read(path):gmatch "for _, name in ipairs (%b{}) do%s+Tensor%.methods%[name%]" do
      for name in names:gmatch '"([%w_]+)"' do methods[name] = true end
    end
  end
  return methods
end

--- A function as the type of a field: fun(t: peri.Tensor, k: integer, dim?: integer): peri.Tensor, peri.Tensor; that of
--- a method (`self`) begins with self in place of the first argument.
local function function_type(entry, self)
  local takes, gives = { self }, {}
  for i = self and 2 or 1, #entry.params do
    local p = entry.params[i]
    takes[#takes + 1] = ("%s%s: %s"):format(p.name, p.optional and "?" or "", p.type)
  end
  for i, r in ipairs(entry.returns) do gives[i] = r.type end
  return ("fun(%s)%s"):format(table.concat(takes, ", "), #gives > 0 and ": " .. table.concat(gives, ", ") or "")
end

--- Lines that say what calls of modules take and return: those of forward, their own or that of a class above. In their
--- definitions a call of the class makes an object; editors do not tell the two apart but by their arguments.
local function module_calls(pages)
  local classes, forwards, names, out = {}, {}, {}, {}
  for _, page in ipairs(pages) do
    for _, entry in ipairs(page.entries) do
      if entry.kind == "class" then classes[entry.name], names[#names + 1] = entry, entry.name end
      if entry.key == "forward" and entry.colon and #entry.returns > 0 then forwards[entry.owner] = entry end
    end
  end
  table.sort(names)
  for _, name in ipairs(names) do
    local above = classes[name]
    while above and not forwards[above.name] do above = classes[above.base or false] end
    local forward = above and classes[name].overload and forwards[above.name]
    local first = forward and forward.params[1]
    local fits_class = first and (first.type == "any" or first.type:match "table" or first.type:match "%[%]")
    if first and not fits_class then -- else a call of the class with its table of arguments would be taken for one
      out[#out + 1] = ("\n---@class %s\n---@overload %s"):format(name, function_type(forward))
    end
  end
  return out
end

--- The definition file that tells editors what follows from the others: the faces of the library are fields of those
--- that they are in, functions of tensors are methods, and modules are called as their forward is.
function M.faces()
  local pages = M.pages()
  local fields, owners, known = {}, {}, {}
  local function add(owner, name, type_)
    if known[owner .. "." .. name] then return end
    known[owner .. "." .. name] = true
    if not fields[owner] then fields[owner], owners[#owners + 1] = {}, owner end
    table.insert(fields[owner], ("---@field %s %s"):format(name, type_))
  end
  for _, page in ipairs(pages) do
    for name in ("\n" .. read(page.path)):gmatch "\n%-%-%-@class (peri[%w_%.]*)" do
      local owner, last = name:match "^(.*)%.([%l_]+)$" -- classes have capitals, and tables of arguments are of those
      if owner and not owner:match "%u" and last ~= "args" then add(owner, last, name) end
    end
  end
  add("peri", "Tensor", "peri.Tensor")
  local methods, everyday = tensor_methods(), {}
  for name in read "lua/perilune/init.lua":gmatch '([%w_]+) = "Tensor"' do everyday[name] = true end
  for _, page in ipairs(pages) do
    for _, entry in ipairs(page.entries) do
      local name = entry.name:match "^peri%.nn%.functional%.([%w_]+)$"
      if name and methods[name] then add("peri.Tensor", name, function_type(entry, "self: peri.Tensor")) end
      local made = entry.kind == "function" and entry.name:match "^peri%.Tensor%.([%w_]+)$"
      if made and everyday[made] then add("peri", made, function_type(entry)) end
    end
  end
  local out = { "-- faces.lua: what follows from the other definition files: made of them by `make reference`.",
    "---@meta" }
  table.sort(owners)
  for _, owner in ipairs(owners) do
    out[#out + 1] = "\n---@class " .. owner
    table.sort(fields[owner])
    if owner == "peri.Tensor" then
      for _, operator in ipairs { "add", "sub", "mul", "div", "mod", "pow" } do
        out[#out + 1] = ("---@operator %s(peri.Tensor|number): peri.Tensor"):format(operator)
      end
      out[#out + 1] = "---@operator unm: peri.Tensor"
    end
    out[#out + 1] = table.concat(fields[owner], "\n")
  end
  for _, call in ipairs(module_calls(pages)) do out[#out + 1] = call end
  return table.concat(out, "\n") .. "\n"
end

-- -- the terminal -----------------------------------------------------------------------------------------------------

--- The text that `perilune help` shows of an entry.
function M.terminal(entry, types, teller)
  local out = {}
  if entry.kind ~= "face" then out[#out + 1] = "  " .. M.call(entry, types) .. "\n" end
  out[#out + 1] = entry.description
  if entry.kind == "class" and entry.base then
    out[#out + 1] = ("\nIt has the methods of %s, too."):format(entry.base)
  end
  local list_of = M.parameters(entry, types)
  local fields = entry.kind == "class" and entry.class and entry.fields or {}
  for _, group in ipairs { { "Arguments", list_of }, { "Fields", fields } } do
    if #group[2] > 0 then out[#out + 1] = "\n" .. group[1] .. ":" end
    for _, p in ipairs(group[2]) do
      out[#out + 1] = ("  %s%s: %s"):format(p.name, p.optional and "?" or "", p.type)
      if p.text ~= "" then out[#out + 1] = "      " .. p.text end
    end
  end
  for _, r in ipairs(entry.returns) do
    out[#out + 1] = ("\nReturns %s%s"):format(r.type, r.text == "" and "" or ": " .. r.text)
  end
  if entry.errors then out[#out + 1] = "\nErrors: " .. entry.errors end
  if teller then out[#out + 1] = ("\nErrors: those of %s: %s"):format(teller.name, teller.errors) end
  for _, example in ipairs(entry.examples) do
    out[#out + 1] = "\nExample:\n\n" .. ("\n" .. example):gsub("\n%f[^\n%z]", "\n    "):gsub("^\n", ""):gsub("%s+$", "")
  end
  return table.concat(out, "\n")
end

--- Calls f(word, row) for each word of the table in docs/glossary.md; "rank, world" is two words with the row
--- "rank, world: what they mean".
function M.each_word(f)
  for line in io.lines "docs/glossary.md" do
    local words, text = line:match "^| ([%a, ]+) | (.*) |$"
    if words and words ~= "word" then
      for word in words:gmatch "[^,]+" do f(word:match "^ *(.-)$":lower(), words .. ": " .. text) end
    end
  end
end

--- The module perilune.manual: { pages = { { name, title, family, intro, { names } } }, texts = { name -> text },
--- briefs = { name -> sentence }, bases = { class -> the class above it }, words = { word -> meaning } }.
function M.manual()
  local pages, types = M.pages()
  local out = { "-- Generated by runtime/gen/reference.lua. Do not edit.",
    "local M = { pages = {}, texts = {}, briefs = {}, bases = {}, words = {} }" }
  local function add(name, text, brief)
    out[#out + 1] = ("M.texts[%q] = %q"):format(name, text)
    if brief then out[#out + 1] = ("M.briefs[%q] = %q"):format(name, brief) end
  end
  local function add_page(name, title, family, names, intro)
    local quoted = {}
    for i, n in ipairs(names) do quoted[i] = ("%q"):format(n) end
    out[#out + 1] = ("M.pages[#M.pages + 1] = { name = %q, title = %q, family = %q, intro = %q, names = { %s } }")
      :format(name, title, family, intro or "", table.concat(quoted, ", "))
  end
  for _, page in ipairs(pages) do
    local names = {}
    for _, entry in ipairs(page.entries) do
      names[#names + 1] = entry.name
      add(entry.name, M.terminal(entry, types, teller_of(entry, pages)), M.brief(entry))
      if entry.kind == "class" and entry.base then
        out[#out + 1] = ("M.bases[%q] = %q"):format(entry.name, entry.base)
      end
    end
    add_page(page.name, page.title, page.family, names, page.intro)
  end
  for _, page in ipairs(M.headers()) do
    local names = {}
    for _, entry in ipairs(page.entries) do
      for _, name in ipairs(entry.names or {}) do
        names[#names + 1] = name
        add(name, entry.text .. (entry.text == "" and "" or "\n\n") .. "  " .. entry.code:gsub("\n", "\n  "))
      end
    end
    add_page(page.name .. ".h", "perilune/" .. page.name .. ".h", "C", names)
  end
  M.each_word(function(word, text)
    text = text:gsub("%[[^%]]*%]%(([^)#]*)[^)]*%)", "docs/%1"):gsub("[`*]", "") -- links, as a terminal shows them
    out[#out + 1] = ("M.words[%q] = %q"):format(word, text)
  end)
  out[#out + 1] = "return M"
  return table.concat(out, "\n") .. "\n"
end

if arg and arg[0] and arg[0]:match "gen/reference%.lua$" then
  if arg[1] == "manual" then io.write(M.manual())
  else
    local folder = assert(arg[2], "usage: reference.lua pages FOLDER")
    os.execute(("rm -f %s/*.md"):format(folder))
    local function write(path, text)
      local file = assert(io.open(path, "w"))
      file:write(text)
      file:close()
    end
    for name, text in pairs(M.make()) do write(folder .. "/" .. name, text) end -- any order: files
    write(M.FACES, M.faces())
  end
end

return M
