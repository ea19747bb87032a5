-- c_pages.lua: the pages of the reference that are made of the public C headers.
local M = {}

M.WIDTH = 96 -- characters of a line of code that pages show without a bar to scroll
M.NOTICE = "<!-- Made by `make reference` of %s: change that file. -->\n"

--- What GitHub calls a heading in links.
function M.anchor(heading) return (heading:lower():gsub("[^%w%-_ ]", ""):gsub(" ", "-")) end

local WIDTH, anchor = M.WIDTH, M.anchor

--- What stands over a piece of C: its names; of many the first ones, of constants what they begin with.
local function heading_of(names)
  if #names > 1 and names[1]:match "^PERI_" then
    local common = names[1]
    for _, name in ipairs(names) do
      while name:sub(1, #common) ~= common do common = common:sub(1, -2) end
    end
    common = common:match "^PERI_.*_" or "PERI_"
    return common == "PERI_" and names[1] .. " and others" or common .. "*"
  end
  return table.concat(names, ", ", 1, math.min(#names, 3)) .. (#names > 3 and " and others" or "")
end

--- Words in lines of at most `width` characters.
local function filled(words, width)
  local lines, line = {}, nil
  for word in words:gmatch "%S+" do
    if line and #line + 1 + #word > width then lines[#lines + 1], line = line, nil end
    line = line and line .. " " .. word or word
  end
  lines[#lines + 1] = line
  return lines
end

--- A comment of a piece of C whose lines are too wide, filled anew. It stays behind what it tells of, unless that
--- leaves it less than half of the page: then it stands above. before: what its first line has in front of it.
local function c_comment(before, comment)
  local words = comment:gsub("^/%*+", ""):gsub("%*/$", ""):gsub("\n%s*%*", "\n")
  local indent, bare = before:match "^%s*", before:match "^(.-)%s*$"
  local at = #bare == 0 and #indent or #before
  if at > WIDTH / 2 then at = #bare + 1 end
  local above = bare ~= "" and at > WIDTH / 2
  local column = above and #indent or at
  local lines = filled(words, WIDTH - column - 6)
  local text = "/* " .. table.concat(lines, "\n" .. (" "):rep(column) .. " * ") .. " */"
  if above then return indent .. text .. "\n" .. bare end
  return bare .. (" "):rep(at - #bare) .. text
end

--- A declaration without comments, in one line, broken behind commas.
local function c_lines(call, indent)
  call = call:gsub("%s+", " ")
  if #call <= WIDTH then return call end
  local open, lines, line = call:find("[%({]"), {}, ""
  local inset = (" "):rep(open <= 40 and open or indent)
  for part in call:gmatch "[^,]+[,;]+" do
    if #line + #part > WIDTH and line ~= "" then lines[#lines + 1], line = line, inset .. part:gsub("^ ", "")
    else line = line .. part end
  end
  lines[#lines + 1] = line
  for _, l in ipairs(lines) do
    if #l > WIDTH and indent < open then return c_lines(call, open) end
  end
  return table.concat(lines, "\n")
end

--- A piece of C as a page shows it: without the macro of exported names, in lines that fit.
local function c_code(code)
  code = code:gsub("%f[%w]PERI_API ([^;{}]-;)", function(call) return c_lines(call, 8) end)
  code = ("\n" .. code):gsub("\n(typedef [^;{}/]-%(%*[^;{}/]-;)", function(call)
    return "\n" .. c_lines(call, 8)
  end):sub(2)
  code = ("\n" .. code):gsub("\n(enum {[^{}\n/]*};)", function(enum) return "\n" .. c_lines(enum, 4) end):sub(2)
  return (("\n" .. code):gsub("\n([^\n]-)(/%*.-%*/)", function(before, comment)
    local wide = false
    for line in (before .. comment):gmatch "[^\n]+" do wide = wide or #line > WIDTH end
    return wide and "\n" .. c_comment(before, comment) or nil
  end):sub(2))
end

--- Prose of a comment as a page shows it: names of C and parameters (`@path`) as code, other pages as links. Blocks
--- that are set in, and what is code already, stay as they are.
local function prose(text)
  local lines = {}
  for line in (text .. "\n"):gmatch "(.-)\n" do
    if not line:match "^    " then
      -- a line of prose that begins with a sign of a sum is no item of a list
      line = line:gsub("^%+ ", "\\+ ")
      line = ("`" .. line .. "`"):gsub("`([^`]*)`", function(bare)
        bare = bare:gsub("@([%a_][%w_]*)", "`%1`"):gsub("%f[%w_]peri_[%w_]+%f[^%w_]", "`%0`")
        bare = bare:gsub("%f[%w_]PERI_[%u%d_]+%*?", "`%0`")
        return "`" .. bare:gsub("%f[%w]docs/([%w_]+)%.md", "[docs/%1.md](../%1.md)") .. "`"
      end):sub(2, -2)
    end
    lines[#lines + 1] = line
  end
  return table.concat(lines, "\n")
end

--- The list of a page's names by section, as links.
local function names_of(page)
  local out, times = {}, {}
  local function link(heading, shown)
    local to = anchor(heading)
    times[to] = (times[to] or -1) + 1 -- GitHub numbers headings that differ in capitals only
    return ("[%s](#%s%s)"):format(shown, to, times[to] > 0 and "-" .. times[to] or "")
  end
  local at, between = 0, ""
  for _, entry in ipairs(page.entries) do
    if entry.heading then
      at, between = #out + 1, ": "
      out[at] = "- " .. link(entry.heading, (entry.heading:gsub("^%l", string.upper)))
    elseif #entry.names > 0 then
      if at == 0 then at, out[1] = 1, "- " end
      local heading = heading_of(entry.names)
      out[at] = out[at] .. between .. link(heading, "`" .. heading .. "`")
      between = ", "
    end
  end
  return table.concat(out, "\n"):gsub(#out == 1 and "^%- " or "^$", "") .. "\n"
end

--- The Markdown of a header's page.
function M.page(page)
  local out, level = { M.NOTICE:format(page.path), ("# C: perilune/%s.h\n"):format(page.name) }, "##"
  out[#out + 1] = prose(page.intro:gsub("^perilune/[%w_]+%.h: (%l?)", string.upper)) .. "\n"
  out[#out + 1] = names_of(page)
  for _, entry in ipairs(page.entries) do
    if entry.heading then
      level = "###" -- of the names in a section
      out[#out + 1] = ("## %s\n"):format((entry.heading:gsub("^%l", string.upper)))
    else
      if #entry.names > 0 then out[#out + 1] = ("%s %s\n"):format(level, heading_of(entry.names)) end
      if entry.text ~= "" then out[#out + 1] = prose(entry.text) .. "\n" end
      out[#out + 1] = ("```c\n%s\n```\n"):format(c_code(entry.code))
    end
  end
  return (table.concat(out, "\n"):gsub("\n+$", "\n"))
end

return M
