-- groups.lua: short forms of many rows of names.lua at once. `names` are separated by spaces; "*" are all names of the
-- module that have no other row.
--
--   here(place, spec, names)                  each is place.name, and `spec` has its name; or "file: words", and it has
--                                             the words
--   elsewhere(symbol, proof, names, note)     symbol does what they do, under another name
--   missing(what, names)                      not built
--   never(why, names)                         make no sense outside Python or PyTorch, or nothing is lost without them
local M = {}

function M.here(place, spec, names) return { names = names, place = place, spec = spec } end
function M.elsewhere(symbol, proof, names, note) return { names = names, symbol, proof, note } end
function M.missing(what, names) return { names = names, missing = what } end
function M.never(why, names) return { names = names, never = why } end

--- Sections of one list, whose groups become rows: { name, symbol, spec, note, group = the group's number }. `listed`:
--- module -> its names.
function M.rows(sections, listed)
  local made = {}
  for _, section in ipairs(sections) do
    local module, answered = section[1], {}
    for i = 2, #section do
      if section[i][1] and not section[i].names then answered[section[i][1]] = true end
      for name in (section[i].names or ""):gmatch "[%w_]+" do answered[name] = true end
    end
    local rows = { module }
    for i = 2, #section do
      local g = section[i]
      if not g.names then rows[#rows + 1] = g end
      local names = {}
      for name in (g.names or ""):gmatch "[%w_]+" do names[#names + 1] = name end
      if g.names == "*" then
        for _, name in ipairs(listed[module] or {}) do
          if not answered[name] then names[#names + 1] = name end
        end
      end
      for _, name in ipairs(names) do
        local proof = g[2]
        if g.place then proof = g.spec:match ": " and g.spec or g.spec .. ": " .. name end
        rows[#rows + 1] = { name, g.place and g.place .. "." .. name or g[1], proof, g[3], missing = g.missing,
          never = g.never, group = g }
      end
    end
    made[#made + 1] = rows
  end
  return made
end

return M
