-- launch/help.lua: `perilune help NAME`, and help "NAME" in an interactive session: what docs/reference says of a name,
-- or where the reference and the documents speak of some words.
local util = require "perilune.util"

local M = {}

local function manual() return require "perilune.manual" end

--- How a name ends: "KeyedJaggedTensor:permute" and "permute" are ends of "peri.KeyedJaggedTensor:permute".
local function ends(full, name)
  full, name = full:gsub(":", "."), name:gsub(":", ".")
  return full == name or full:sub(-#name - 1) == "." .. name
end

--- The name under which a class above describes a method: "peri.nn.DLRM:state_dict" stands for
--- "peri.nn.Module:state_dict"; nil: none does.
local function inherited(name)
  local class, key = name:match "^(.*)[%.:]([%w_]+)$"
  if not class then return nil end
  local base = M.find(class)[1]
  while base do
    for _, mark in ipairs { ":", "." } do
      if manual().texts[base .. mark .. key] then return base .. mark .. key end
    end
    base = manual().bases[base]
  end
end

local by_last -- the full names by their last word in lower case, sorted

--- The full names whose last word is that of `name`, whatever the case.
local function like(name)
  if not by_last then
    by_last = {}
    for _, full in ipairs(util.keys(manual().texts)) do
      local last = full:match("[^.:]*$"):lower()
      by_last[last] = by_last[last] or {}
      table.insert(by_last[last], full)
    end
  end
  return by_last[name:match("[^.:]*$"):lower()] or {}
end

--- What scripts call nn.functional, a tensor and PyTorch, and where what they mean may be.
local written_as = { { "^F[%.:]", "peri.nn.functional." }, { "^t:", "peri.nn.functional." },
  { "^[Tt]ensor:", "peri.nn.functional." }, { "^peri%.Tensor:", "peri.nn.functional." },
  { "^torch%.nn%.functional%.", "peri.nn.functional." }, { "^torch%.nn%.", "peri.nn." },
  { "^torch%.", "peri.nn.functional." }, { "^torch%.", "peri.Tensor." }, { "^torch%.", "peri." },
  { "^peri%.", "peri.Tensor." } }

--- The full names that a name may stand for, sorted: itself, or those that end with it.
function M.find(name)
  local texts = manual().texts
  if texts[name] then return { name } end
  if texts["peri." .. name] then return { "peri." .. name } end
  for _, way in ipairs(written_as) do
    local full, n = name:gsub(way[1], way[2])
    if n > 0 and texts[full] then return { full } end
  end
  local found, lower = {}, {}
  for _, full in ipairs(like(name)) do
    if ends(full, name) then found[#found + 1] = full
    elseif ends(full:lower(), name:lower()) then lower[#lower + 1] = full end
  end
  if #found == 0 and #lower == 0 then return { inherited(name) } end
  return #found > 0 and found or lower
end

--- The words that a name is made of, in lower case, a space before each: "KeyedJaggedTensor" -> " keyed jagged tensor".
local function words_of(name)
  return " " .. name:gsub("(%l)(%u)", "%1 %2"):gsub("(%u)(%u%l)", "%1 %2"):gsub("[^%w]+", " "):lower()
end

--- Up to five names that are written much like one that is not there, or have a word that begins with it; and whether
--- one of them is as good as meant.
local function near(name)
  local wanted, list = name:lower():gsub("^peri%.", ""), {}
  for _, full in ipairs(util.keys(manual().texts)) do
    local last = full:match "[%w_]+$"
    local least = math.min(util.distance(wanted, last:lower()), util.distance(wanted, full:lower():gsub("^peri%.", "")))
    local inside = #wanted >= 3 and (words_of(full):find(" " .. wanted, 1, true)
      or wanted:find "[^%l]" and full:lower():find(wanted, 1, true))
    if least <= math.max(1, math.floor(#wanted / 3)) or inside then
      list[#list + 1] = { full, inside and least / 100 or least }
    end
  end
  table.sort(list, function(a, b) return a[2] < b[2] or a[2] == b[2] and a[1] < b[1] end)
  return util.map({ unpack(list, 1, 5) }, function(x) return x[1] end), #list > 0 and list[1][2] < 2
end

local by_prefix -- the full names by each of their prefixes that ends before a mark, sorted

--- The names within a table that has no text of its own, such as nn.init.
local function within(name)
  if not by_prefix then
    by_prefix = {}
    for _, full in ipairs(util.keys(manual().texts)) do
      for at in full:gmatch "()[.:]" do
        local prefix = full:sub(1, at - 1)
        by_prefix[prefix] = by_prefix[prefix] or {}
        table.insert(by_prefix[prefix], full)
      end
    end
  end
  local list = {}
  for _, prefix in ipairs { name, "peri." .. name } do
    for _, full in ipairs(by_prefix[prefix] or {}) do list[#list + 1] = full end
  end
  return list
end

--- Whether a text has all of some words in it.
local function has_all(text, words)
  text = text:lower()
  for word in words:gmatch "%S+" do
    if not text:find(word, 1, true) then return false end
  end
  return true
end

--- Up to ten names whose texts have some words in them: those that have them in their first sentence first.
local function speaking_of(words)
  words = words:lower():gsub("@", " at ") -- recall@k
  local first, others = {}, {}
  for _, full in ipairs(util.keys(manual().texts)) do
    local list = has_all(manual().briefs[full] or "", words) and first or others
    if list == first or has_all(manual().texts[full], words) then list[#list + 1] = full end
  end
  for _, full in ipairs(others) do first[#first + 1] = full end
  return { unpack(first, 1, 10) }
end

local function page_of(name)
  for _, page in ipairs(manual().pages) do
    if page.name == name then return page end
  end
end

--- Lines "name   its first sentence".
local function listing(names)
  local width, lines = 0, {}
  for _, name in ipairs(names) do width = math.max(width, math.min(#name, 48)) end
  for i, name in ipairs(names) do
    lines[i] = ("  %-" .. width .. "s  %s"):format(name, manual().briefs[name] or ""):gsub("%s+$", "")
  end
  return table.concat(lines, "\n")
end

local function contents()
  local lines, family = { "The reference. Pages:" }, nil
  for _, page in ipairs(manual().pages) do
    if page.family ~= family then lines[#lines + 1] = "\n" .. page.family .. "\n" end
    family = page.family
    lines[#lines + 1] = ("  %-20s %s"):format(page.name, page.title)
  end
  lines[#lines + 1] = "\nperilune help PAGE lists the names of a page, perilune help NAME tells about a name, such as "
    .. "KeyedJaggedTensor,"
  lines[#lines + 1] = "KeyedJaggedTensor:permute, permute or peri_kjt_permute. The same as pages: docs/reference."
  lines[#lines + 1] = "perilune help WORDS finds where the reference and the documents (docs/README.md) speak of them: "
    .. "help gradient clipping."
  return table.concat(lines, "\n")
end

--- What a class has: a listing of its methods and its own functions; "" of what is no class.
local function members(class)
  local list, methods = {}, 0
  for _, full in ipairs(within(class)) do
    local mark, key = full:sub(#class + 1):match "^([:.])([%l_][%w_]*)$"
    if key then list[#list + 1] = full end
    if mark == ":" then methods = methods + 1 end
  end
  return methods > 0 and "\n\nIt has:\n\n" .. listing(list) or ""
end

--- What is there about words that are no name: names that are much like them, else names that speak of them, and
--- sections of the documents; or nil and that there is nothing.
local function searched(words)
  local similar, meant = near(words)
  local speaking, parts = meant and {} or speaking_of(words), {}
  if #speaking > 0 then
    parts[1] = ("'%s' is no name; these speak of it:\n%s"):format(words, listing(speaking))
  elseif #similar > 0 then
    parts[1] = ("There is no name '%s'; is one of these meant?\n%s"):format(words, listing(similar))
  end
  parts[#parts + 1] = require("perilune.launch.search").text(words)
  if #parts > 0 then return table.concat(parts, "\n\n") end
  return nil, ("help: there is nothing about '%s'; perilune help lists the pages"):format(words)
end

local WIDTH = 80

--- Words in lines of at most WIDTH characters: the first one begins with `first`, the others with `hang`.
local function filled(words, first, hang)
  local lines, line = {}, nil
  for word in words:gmatch "%S+" do
    if line and #line + 1 + #word > WIDTH then lines[#lines + 1], line = line, hang .. word
    else line = line and line .. " " .. word or first .. word end
  end
  lines[#lines + 1] = line
  return table.concat(lines, "\n")
end

--- A text of the manual in lines of 80 characters. Code stays as it is; what is told of an argument is indented by 6.
local function in_columns(text)
  local lines, words, first, hang, arguments, code = {}, nil, "", "", false, false
  local function begin(next_words, its_first, its_hang)
    if words then lines[#lines + 1] = filled(words, first, hang) end
    words, first, hang = next_words, its_first, its_hang
  end
  local example = text:find "\nExample:\n" or #text
  for line in (text:sub(1, example) .. "\n"):gmatch "(.-)\n" do
    arguments = arguments or line == "Arguments:"
    local indent, rest = line:match "^( *)(.*)$"
    if line:find "^```" then
      begin(nil)
      code = not code
    elseif code or rest == "" or arguments and #indent == 2 then
      begin(nil)
      lines[#lines + 1] = code and "    " .. line or line
    elseif #lines == 0 and indent == "  " then begin(rest, indent, "      ") -- the call
    elseif arguments and #indent == 6 then begin(rest, indent, indent)
    elseif rest:find "^%- " then begin(rest, indent, indent .. "  ")
    elseif not words or rest:find "^Returns " then begin(rest, indent, indent)
    else words = words .. " " .. rest end
  end
  begin(nil)
  return table.concat(lines, "\n") .. text:sub(example + 1)
end

--- The text about a name of the reference, or nil.
local function described(name)
  local page, found = page_of(name), M.find(name)
  if page then
    return page.title .. "\n\n" .. (page.intro ~= "" and in_columns(page.intro) .. "\n\n" or "")
      .. listing(page.names)
  end
  if #found == 1 then
    local text = manual().texts[found[1]]
    return found[1] .. "\n\n" .. (found[1]:find "^peri[.:]" and in_columns(text) or text) .. members(found[1])
  end
  if #found > 1 then return ("'%s' is the name of several:\n\n%s"):format(name, listing(found)) end
  local others = within(name)
  if #others > 0 then return ("In '%s' are:\n\n%s"):format(name, listing(others)) end
end

--- What a word means here (docs/glossary.md), and what the launcher's command of this name does (commands: name ->
--- text); nil: it is neither.
local function meaning(name, commands)
  local words, lines = manual().words, {}
  local word = words[name:lower()] or words[name:lower():gsub("s$", "")]
  if word then lines[1] = word .. " (docs/glossary.md)" end
  local command = commands and commands[name]
  if command then
    lines[#lines + 1] = ("perilune %s, a command: %s Its options: perilune %s --help"):format(name, command, name)
  end
  return #lines > 0 and table.concat(lines, "\n") or nil
end

--- The text about a name or a word (nil: about the whole), else where words are spoken of; or nil and that there is
--- nothing. commands: of the launcher.
function M.text(name, commands)
  if not name then return contents() end
  local word, text = meaning(name, commands), described(name)
  if word then return text and word .. "\n\n" .. text or word end
  if text then return text end
  return searched(name)
end

--- The text about a value that the reference describes: a function, a class, an object of a class.
function M.text_of_value(value)
  local ffi = require "ffi"
  local P, peri = require "perilune.ffi", require "perilune"
  if type(value) == "cdata" and P.methods_of(value) then
    for _, name in ipairs { "Tensor", "KeyedJaggedTensor", "JaggedTensor", "KeyedTensor" } do
      if peri[name].methods == P.methods_of(value) then return M.text("peri." .. name) end
    end
  end
  local meta = type(value) == "table" and getmetatable(value)
  local class = type(meta) == "table" and rawget(meta, "class_name") and meta
  for _, full in ipairs(util.keys(manual().texts)) do
    if full:match "^peri[%.:]" then
      local x = peri
      for key in full:gsub("^peri", ""):gmatch "[%w_]+" do
        local methods = type(x) == "table" and rawget(x, "methods")
        local ok, found = pcall(function() return methods and rawget(methods, key) or x[key] end)
        x = ok and found or nil
        if x == nil or ffi.istype("void *", x) then break end
      end
      if x ~= nil and (rawequal(x, value) or class and rawequal(x, class)) then return M.text(full) end
    end
  end
  return nil, "help: the reference does not describe this value; help \"NAME\" looks for a name"
end

--- The command: prints the text. Returns the exit code.
function M.run(name, commands)
  local text, why = M.text(name, commands)
  if text then
    print(text)
    return 0
  end
  io.stderr:write("perilune: ", why, "\n")
  return 1
end

return M
