-- page.lua: docs/parity.md, made of names.lua, distributed.lua, planner.lua and modules.lua. `make parity` writes it.
local groups = dofile "tests/parity/groups.lua"
local M = {}

local files = { "names", "distributed", "planner", "modules" }
local PIPELINES = "torchrec.distributed.train_pipeline" -- what its modules define, it has too

local intro = [[
# Names of TorchRec, and what takes their place

This page is for you if you come from TorchRec and look for a name. It has every public class and function of `torchrec.distributed`,
`torchrec.modules`, `torchrec.sparse` and `torchrec.metrics` of %s. Search the page for the name; what stands behind it is one of four answers:

| behind the name | what it means | counted below as |
|---|---|---|
| "in `peri.dist`" | the same name is there | here |
| a name or a file by itself | does the same under that name, or inside of that file | elsewhere |
| **not built** | does not exist here | not built |
| no need | has no meaning without Python or PyTorch, or nothing is lost without it | no need |

`peri` is `require "perilune"`; names that begin with `peri_` are C functions. A class of the same name takes TorchRec's arguments by their names, as
far as they mean something here; an argument that it does not know is an error that lists what is allowed.

(`make parity` makes the page, of the list `tests/parity/torchrec.txt` and of the answers `tests/parity/*.lua`, which name the spec that tries each, too.
`spec/names_spec.lua` fails when a name has no answer, or when a symbol or a spec that is named does not exist.)

]]

--- The list of TorchRec's names: { version = "TorchRec 1.9.2", modules = a list, names = module -> list, older = module
--- -> list }.
function M.listed(path)
  local made = { modules = {}, names = {}, older = {} }
  local module
  for line in io.lines(path or "tests/parity/torchrec.txt") do
    local older, names = line:match "^  ([%w_%.]+): (.*)$"
    if older then
      made.older[older] = {}
      for name in names:gmatch "[%w_]+" do table.insert(made.older[older], name) end
    elseif line:match "^  " then
      for name in line:gmatch "[%w_]+" do table.insert(made.names[module], name) end
    elseif line:match "^torchrec%.[%w_%.]+$" then
      module = line
      table.insert(made.modules, module)
      made.names[module] = {}
    elseif not made.version then made.version = line:match "^[^,]+" end
  end
  return made
end

--- All answers: a list of sections { module, row, ... } in the order of names.lua, then of the list. What
--- train_pipeline itself has is not asked of the modules behind it again.
function M.sections()
  local listed, merged, order, own = M.listed(), {}, {}, {}
  for _, file in ipairs(files) do
    for _, section in ipairs(dofile("tests/parity/" .. file .. ".lua")) do
      local module = section[1]
      if not merged[module] then
        merged[module] = { module }
        table.insert(order, module)
      end
      for i = 2, #section do table.insert(merged[module], section[i]) end
    end
  end
  for _, row in ipairs(merged[PIPELINES]) do
    if type(row) == "table" then own[row[1]] = true end
  end
  local asked = {}
  for module, names in pairs(listed.names) do -- a set is made of it: the order does not matter
    asked[module] = {}
    for _, name in ipairs(names) do
      if not (own[name] and module:sub(1, #PIPELINES + 1) == PIPELINES .. ".") then
        table.insert(asked[module], name)
      end
    end
  end
  table.sort(order)
  local sections = {}
  for i, module in ipairs(order) do sections[i] = merged[module] end
  return groups.rows(sections, asked), asked, listed
end

local kinds = { "here", "elsewhere", "missing", "never" }
local packages = { "torchrec.distributed", "torchrec.modules", "torchrec.sparse", "torchrec.metrics" }

function M.kind(row)
  if row.missing then return "missing" end
  if row.never then return "never" end
  return row[2]:match "[%w_]+$" == row[1] and "here" or "elsewhere"
end

local function code(text) return text and ("`%s`"):format(text) or "" end

--- The lines of a section's list. Rows of one group are one line, where their answers are alike.
local function lines_of(section)
  local lines, before = {}, nil
  for i = 2, #section do
    local row = section[i]
    local kind, symbol = M.kind(row), row[2]
    if row.group and row.group.place then symbol = row.group.place .. "." end
    local line = { names = { row[1] }, kind = kind, symbol = symbol,
      note = row.missing or row.never or row[4],
      group = row.group }
    if before and line.group and line.group == before.group and line.kind == before.kind then table.insert(before.names,
      row[1])
    else
      table.insert(lines, line)
      before = line
    end
  end
  local words = { missing = "**not built**", never = "no need" }
  for i, l in ipairs(lines) do
    local symbol = l.symbol
    if l.kind == "here" then symbol = "in " .. code(symbol:match "^(.-)%.?[%w_]*$")
    elseif symbol and symbol:match "%.$" then symbol = code(symbol .. (#l.names == 1 and l.names[1] or "*"))
    elseif l.kind == "elsewhere" then symbol = code(symbol)
    else symbol = words[l.kind] end
    lines[i] = ("- %s: %s%s"):format(table.concat(l.names, ", "), symbol, l.note and l.note ~= ""
      and "; " .. l.note or "")
  end
  return lines
end

--- What is not built, a line for each thing: its words, and the modules that have names of it.
local function gaps(sections)
  local order, of = {}, {}
  for _, section in ipairs(sections) do
    for i = 2, #section do
      local what = section[i].missing
      if what and not of[what] then
        of[what] = { names = 0, modules = {}, seen = {} }
        table.insert(order, what)
      end
      if what then
        local gap = of[what]
        gap.names = gap.names + 1
        if not gap.seen[section[1]] then table.insert(gap.modules, "`" .. section[1]:gsub("^torchrec%.", "") .. "`") end
        gap.seen[section[1]] = true
      end
    end
  end
  table.sort(order, function(a, b)
    if of[a].names ~= of[b].names then return of[a].names > of[b].names end
    return a < b
  end)
  local lines = {}
  for i, what in ipairs(order) do
    local gap = of[what]
    local some = #gap.modules > 4 and table.concat(gap.modules, ", ", 1, 3)
      .. (" and %d more modules"):format(#gap.modules - 3)
      or table.concat(gap.modules, ", ")
    lines[i] = ("| %s | %d | %s |"):format(what, gap.names, some)
  end
  return table.concat(lines, "\n")
end

--- The page, and how many names of each package are { here, elsewhere, missing, never }.
function M.make()
  local sections, _, listed = M.sections()
  local counts = {}
  for _, package in ipairs(packages) do counts[package] = { here = 0, elsewhere = 0, missing = 0, never = 0 } end
  for _, section in ipairs(sections) do
    local count = counts[section[1]:match "^torchrec%.%w+"]
    for i = 2, #section do count[M.kind(section[i])] = count[M.kind(section[i])] + 1 end
  end
  local text = { intro:format(listed.version)
    .. "| names of | here | elsewhere | not built | no need |\n|---|---|---|---|---|" }
  for _, package in ipairs(packages) do
    local row = { "`" .. package .. "`" }
    for _, kind in ipairs(kinds) do table.insert(row, counts[package][kind]) end
    table.insert(text, "| " .. table.concat(row, " | ") .. " |")
  end
  table.insert(text, "\n## What is not built\n\n| what | names | in |\n|---|---|---|\n" .. gaps(sections))
  for _, section in ipairs(sections) do
    table.insert(text, ("\n## %s\n"):format(section[1]))
    table.insert(text, table.concat(lines_of(section), "\n"))
  end
  return table.concat(text, "\n") .. "\n", counts
end

if arg and arg[0] and arg[0]:match "page%.lua$" then
  local file = assert(io.open("docs/parity.md", "w"))
  file:write((M.make()))
  file:close()
end

return M
