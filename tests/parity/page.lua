-- page.lua: docs/parity.md, made of names.lua. `make parity` writes it.
local M = {}

local intro = [[
# Names of TorchRec, and what takes their place

Made by `make parity` of `tests/parity/names.lua`; a spec fails when a symbol or a spec of this page does not exist. `peri` is
`require "perilune"`; names that begin with `peri_` are C functions. What is a class with the same name takes the same arguments, by name.
]]

local function code(text) return text and ("`%s`"):format(text) or "" end

local function rows_of(section)
  local list = {}
  for i = 2, #section do
    local row = section[i]
    local here, proof, note = code(row[2]), code(row[3] and row[3]:match "^[^:]+"), row[4] or ""
    if row.later then here, note = "", "not built yet: " .. row.later end
    if row.never then here, note = "none", row.never end
    list[#list + 1] = ("| %s | %s | %s | %s |"):format(row[1], here, proof, note)
  end
  return list
end

--- The page, and how many rows are { built, later, never }.
function M.make(sections)
  local counts = { built = 0, later = 0, never = 0 }
  for _, section in ipairs(sections) do
    for i = 2, #section do
      local kind = section[i].later and "later" or section[i].never and "never" or "built"
      counts[kind] = counts[kind] + 1
    end
  end
  local text = { intro, ("%d names: %d are here, %d are not built yet, %d make no sense outside Python or PyTorch."):format(
    counts.built + counts.later + counts.never, counts.built, counts.later, counts.never) }
  for _, section in ipairs(sections) do
    text[#text + 1] = ("\n## %s\n\n| name | here | proof | |\n|---|---|---|---|"):format(section[1])
    text[#text + 1] = table.concat(rows_of(section), "\n")
  end
  return table.concat(text, "\n") .. "\n", counts
end

if arg and arg[0] and arg[0]:match "page%.lua$" then
  local file = assert(io.open("docs/parity.md", "w"))
  file:write((M.make(dofile "tests/parity/names.lua")))
  file:close()
end

return M
