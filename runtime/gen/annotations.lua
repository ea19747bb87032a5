-- annotations.lua: reads the definition files, lua/perilune/reference/*.lua, which describe the public Lua API in
-- LuaCATS annotations (docs/testing.md tells how they are written), and the comments of the public C headers.
local M = {}

local function lines_of(path)
  local lines = {}
  for line in io.lines(path) do lines[#lines + 1] = line end
  return lines
end

local function trim(text) return (text:gsub("^%s+", ""):gsub("%s+$", "")) end

--- Split "TYPE rest" where TYPE may have brackets, `|` and `fun(...): TYPE` in it. Returns type, rest.
local function split_type(text)
  local depth, i = 0, 1
  while i <= #text do
    local c = text:sub(i, i)
    if c:match "[%(<{%[]" then depth = depth + 1
    elseif c:match "[%)>}%]]" then depth = depth - 1
    elseif c == " " and depth == 0 then
      local before, after = text:sub(1, i - 1), text:sub(i + 1)
      if not (before:match "[|,:]$" or after:match "^[|]") then break end
    end
    i = i + 1
  end
  return text:sub(1, i - 1), trim(text:sub(i))
end

--- "name? TYPE text" -> { name =, optional =, type =, text = }.
local function parameter(text, where)
  local name, optional, rest = text:match "^([%w_%.]+)(%??)%s+(.*)$"
  if not name then error(("%s: not 'name type text': %s"):format(where, text), 0) end
  local kind, words = split_type(rest)
  return { name = name, optional = optional == "?", type = kind, text = words }
end

local readers = {}
function readers.class(block, text)
  block.class, block.base = text:match "^([%w_%.]+)%s*:?%s*([%w_%.]*)"
  if block.base == "" then block.base = nil end
end
function readers.field(block, text, where) table.insert(block.fields, parameter(text, where)) end
function readers.param(block, text, where) table.insert(block.params, parameter(text, where)) end
readers["return"] = function(block, text)
  local kind, words = split_type(text)
  table.insert(block.returns, { type = kind, text = (words:gsub("^# ", "")) })
end
function readers.overload(block, text) block.overload = text end
function readers.type(block, text) block.type = text end
function readers.meta() end

local function new_block() return { text = {}, fields = {}, params = {}, returns = {} } end

local function add_line(block, line, where)
  local tag, rest = line:match "^%-%-%-@(%a+)%s*(.*)$"
  if not tag then
    block.text[#block.text + 1] = line:gsub("^%-%-%-", "")
    return
  end
  if not readers[tag] then error(("%s: the tag @%s is not one of those that are read"):format(where, tag), 0) end
  readers[tag](block, trim(rest), where)
end

--- The prose of a block: { description =, errors = (or nil), examples = { Lua texts } }.
local function prose(block)
  local text = table.concat(block.text, "\n")
  block.examples = {}
  for example in (text .. "\n"):gmatch "```lua\n(.-)```" do table.insert(block.examples, example) end
  block.plain = trim((text .. "\n"):gsub("```lua\n.-```\n?", ""))
  block.errors = (block.plain .. "\n"):match "%f[%w]Errors: (.-)\n\n" or block.plain:match "%f[%w]Errors: (.*)$"
  block.description = trim((block.plain:gsub("%f[%w]Errors: .*$", "")))
end

--- One definition file: { path =, name =, title =, intro =, entries = { ... }, types = { name -> block } }. An entry is
--- a block with name ("peri.KeyedJaggedTensor:permute"), kind ("class", "function", "value"), owner (the name of the
--- class or face that has it), key, colon.
function M.file(path)
  local lines = lines_of(path)
  local name, title = lines[1]:match "^%-%- ([%w_]+)%.lua: (.-)%.?$"
  if not name then error(path .. ": its first line is not '-- name.lua: Title.'", 0) end
  local page = { path = path, name = name, title = title, intro = {}, entries = {}, types = {} }
  local aliases, block, in_intro = {}, nil, true
  local function close(code, where)
    if not block then return end
    prose(block)
    block.where = where
    local var = code:match "^local ([%w_]+) = %{%}"
    local owner, mark, key = code:match "^function ([%w_%.]-)([%.:])([%w_]+)%("
    local assigned, value = code:match "^([%w_%.]+%.[%w_]+) = (.*)$"
    local function full(dotted)
      local first, rest = dotted:match "^([%w_]+)(.*)$"
      if not aliases[first] then error(("%s: '%s' is no local with @class"):format(where, first), 0) end
      return aliases[first] .. rest
    end
    if var then
      aliases[var], block.kind, block.name = block.class or error(where .. ": a local without @class", 0), "face",
        block.class
    elseif key then
      block.kind, block.owner, block.key, block.colon = "function", full(owner), key, mark == ":"
      block.name, block.names = block.owner .. mark .. key, code:match "%((.-)%)"
    elseif assigned then
      block.name = full(assigned)
      block.owner, block.key = block.name:match "^(.*)%.([%w_]+)$"
      block.kind = value == "{}" and "class" or "value"
      if block.kind == "class" and block.class ~= block.name then
        error(("%s: @class %s of what is %s"):format(where, tostring(block.class), block.name), 0)
      end
    elseif block.class then page.types[block.class] = block
    elseif #block.text > 0 then error(where .. ": a comment of nothing", 0) end
    if block.kind and not (block.kind == "face" and #block.text == 0) then table.insert(page.entries, block) end
    block = nil
  end
  for i = 2, #lines do
    local line, where = lines[i], ("%s:%d"):format(path, i)
    if line:match "^%-%-%-" then
      in_intro = false
      if line ~= "---@meta" then
        block = block or new_block()
        add_line(block, line, where)
      end
    elseif line:match "^%-%-" and in_intro then table.insert(page.intro, (line:gsub("^%-%- ?", "")))
    else close(line, where) end
  end
  close("", path)
  page.intro = trim(table.concat(page.intro, "\n"))
  return page
end

--- All definition files in the order of their names; and the types (argument tables) of all of them.
function M.all(paths)
  local pages, types = {}, {}
  for i, path in ipairs(paths) do
    pages[i] = M.file(path)
    for name, block in pairs(pages[i].types) do types[name] = block end -- any order: a set
  end
  return pages, types
end

-- -- C headers --------------------------------------------------------------------------------------------------------

local WIDTH = 96 -- characters of a line of code that pages show without a bar to scroll

--- Words in lines of at most WIDTH characters, the first behind `before`, the others set in by `column`.
local function filled(before, column, words)
  local lines, line = {}, before
  for word in words:gmatch "%S+" do
    if line:match "%S$" and #line + 1 + #word > WIDTH then lines[#lines + 1], line = line, (" "):rep(column) end
    line = line:match "%S$" and line .. " " .. word or line .. word
  end
  lines[#lines + 1] = line
  return lines
end

--- Lines of code or of a table as a page shows them. A line has its words behind the last gap of two spaces or more,
--- and lines that are set in as far go on with them; where one of these is too wide, they are filled anew. Words that
--- begin beyond the middle of the page go under what stands before them.
local function in_width(block)
  local out, i = {}, 1
  while i <= #block do
    local before, words = block[i]:match "^(.*  )(%S.*)$"
    if not before then before, words = block[i]:match "^( *)(.*)$" end
    local last, wide = i, #block[i] > WIDTH
    while before:match "%S" and last < #block and #block[last + 1]:match "^ *" == #before do
      last = last + 1
      words, wide = words .. " " .. block[last]:match "^ *(.*)$", wide or #block[last] > WIDTH
    end
    local column = #before
    if wide and before:match "%S" and column > WIDTH / 2 then
      out[#out + 1] = before:match "^(.-) *$"
      before = before:match "^ *" .. "    "
      column = #before
    end
    for _, line in ipairs(wide and filled(before, column, words) or { unpack(block, i, last) }) do
      out[#out + 1] = line
    end
    i = last + 1
  end
  return out
end

--- What stands in a comment, without its frame. Lines that are set in by three spaces or more, outside of a list, are
--- code or a table: they come as a Markdown block, set in by four, between empty lines.
local function uncomment(text)
  text = text:gsub("^/%*+", ""):gsub("%*/$", "")
  local out, block, least, in_list = {}, {}, 0, nil -- in_list: by how much its items are set in
  local function close()
    if #block == 0 then return end
    if out[#out] ~= "" then out[#out + 1] = "" end
    for i, line in ipairs(block) do block[i] = line:sub(least + 1) end
    for _, line in ipairs(in_width(block)) do out[#out + 1] = "    " .. line end
    out[#out + 1], block = "", {}
  end
  for line in (text .. "\n"):gmatch "(.-)\n" do
    local indent, words = line:gsub("^%s*%*", ""):match "^( *)(.-)%s*$"
    local item = words:match "^%- "
    if words == "" then in_list = nil elseif item then in_list = #indent end
    if in_list and not item and #indent <= in_list then -- prose behind the list
      in_list, out[#out + 1] = nil, ""
    end
    if words ~= "" and #indent >= 3 and not in_list and line:match "^%s*%*" then
      least = #block == 0 and #indent or math.min(least, #indent)
      block[#block + 1] = indent .. words
    else
      close()
      if words ~= "" or out[#out] ~= "" then out[#out + 1] = (in_list and not item and "  " or "") .. words end
    end
  end
  close()
  return (table.concat(out, "\n"):gsub("^%s*\n", ""):gsub("%s+$", ""):gsub("^ (%S)", "%1"))
end

--- The names that a piece of C declares: functions, else constants, else types.
local function declared(code)
  local names, bare = {}, code:gsub("/%*.-%*/", "")
  for name in bare:gmatch "%f[%w_](peri_[%w_]+)%(" do names[#names + 1] = name end
  if #names == 0 then
    for body in bare:gmatch "enum%s*(%b{})" do
      for name in body:gmatch "[{,]%s*(PERI_[%u%d_]+)" do names[#names + 1] = name end
    end
  end
  if #names == 0 then
    for name in bare:gmatch "(peri_[%w_]+);" do names[#names + 1] = name end
    if bare:match "^typedef struct peri_[%w_]+ {" then names = { bare:match "struct (peri_[%w_]+)" } end
  end
  return names
end

--- One header: { name =, intro =, entries = { { text =, code =, names = { ... } } or { heading = } } }. Declarations
--- that follow each other without an empty line or a comment between them belong to the comment above.
function M.header(path)
  local file = assert(io.open(path))
  local text = file:read "*a"
  file:close()
  local page = { path = path, name = path:match "([^/]+)%.h$", entries = {} }
  local comment, at = text:match "^(/%*.-%*/)()"
  page.intro = trim((uncomment(comment):gsub("^SPDX[^\n]*", "")))
  text = text:sub(at)
  local function entry(words, code)
    code = trim(code:gsub("\n#[^\n]*", "\n"):gsub("\n\n+", "\n"))
    if code:match "^#" then code = trim(code:gsub("^#[^\n]*", "")) end
    if code == "" then return end
    table.insert(page.entries, { text = words, code = code, names = declared(code) })
  end
  local pending, from, inside = "", 1, 0
  local function flush(to)
    entry(pending, text:sub(from, to))
    pending = ""
  end
  local i = 1
  while i <= #text do
    local start, stop = text:find("/%*.-%*/", i)
    local brace = text:find("[{}]", i)
    if brace and (not start or brace < start) then
      inside = inside + (text:sub(brace, brace) == "{" and 1 or -1)
      i = brace + 1
    elseif not start then break
    else
      local words = text:sub(start, stop)
      local heading = words:match "^/%* %-%- (.-) %-%-+ %*/$"
      local own_line = text:sub(1, start - 1):match "\n[ ]*$"
      if inside == 0 and own_line then
        flush(start - 1)
        if heading then table.insert(page.entries, { heading = heading }) else pending = uncomment(words) end
        from = stop + 1
      end
      i = stop + 1
    end
  end
  flush(#text)
  return page
end

return M
