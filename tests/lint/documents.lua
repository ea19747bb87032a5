-- documents.lua: what the documents name exists; nothing names a place of one developer's machine.

local tops = { runtime = true, kernels = true, lua = true, examples = true, spec = true, tests = true, docs = true }

local function paths(ctx)
  local complaints = {}
  for _, path in ipairs(ctx.lines "ls README.md docs/*.md docs/*/*.md 2>/dev/null") do
    local text = ctx.read(path)
    local function look(word)
      local top = word:match "^([%w_]+)/"
      if not top or not tops[top] or word:match "[<>%$ ]" then return end
      if #ctx.lines(("ls -d %s 2>/dev/null"):format(word)) == 0 then
        complaints[#complaints + 1] = ("%s names %s, which is not there"):format(path, word)
      end
    end
    for word in text:gmatch "`([^`\n]+)`" do look(word) end
    for word in text:gmatch "%]%(([^)#]+)" do
      if not word:match "^%a+://" then
        local from = path:match "^(.*/)" or ""
        if not ctx.exists(from .. word) then
          complaints[#complaints + 1] = ("%s links to %s, which is not there"):format(path, word)
        end
      end
    end
  end
  return complaints
end

--- Links to a section lead to its heading, by the name that GitHub gives it; headings go down one level at a time, from
--- one of the first level.
local function sections(ctx)
  local complaints, anchors, links = {}, {}, {}
  for _, path in ipairs(ctx.lines "ls README.md docs/*.md docs/*/*.md 2>/dev/null") do
    local code, level, number = false, 0, 0
    anchors[path] = {}
    for line in (ctx.read(path) .. "\n"):gmatch "(.-)\n" do
      number = number + 1
      if line:match "^```" then code = not code end
      local marks, heading = line:match "^(#+) +(.*)"
      if not code and marks then
        if #marks > level + 1 or #marks == 1 and level > 0 then
          complaints[#complaints + 1] = ("%s:%d: a heading of level %d below one of level %d"):format(path, number,
            #marks, level)
        end
        level = #marks
        local name = heading:gsub("%[([^%]]*)%]%([^)]*%)", "%1"):lower():gsub("[^%w%-_ \128-\255]", ""):gsub(" ", "-")
        local last, k = name, 0
        while anchors[path][last] do k, last = k + 1, ("%s-%d"):format(name, k + 1) end
        anchors[path][last] = true
      end
      for to in (code and "" or line):gmatch "%]%(([^)]*#[^)]+)%)" do
        links[#links + 1] = { path = path, number = number, to = to }
      end
    end
  end
  for _, link in ipairs(links) do
    local page, anchor = link.to:match "^([^#]*)#(.+)$"
    local target = page == "" and link.path or (link.path:match "^.*/" or "") .. page
    repeat local n; target, n = target:gsub("[^/]+/%.%./", "") until n == 0
    if anchors[target] and not anchors[target][anchor] then
      complaints[#complaints + 1] = ("%s:%d links to %s, which has no such heading"):format(link.path, link.number,
        link.to)
    end
  end
  return complaints
end

local function machine_paths(ctx)
  local complaints = {}
  local places = { "/wo" .. "rk/", "%.%./sha" .. "red", "/ho" .. "me/%w", "/ro" .. "ot/%w" }
  local files = ctx.files("runtime kernels lua examples spec tests docs", "c", "h", "cu", "cuh", "lua", "md", "sh",
    "json", "def", "gp")
  for _, path in ipairs(ctx.lines "ls Makefile README.md .ci/run .busted .luacheckrc 2>/dev/null") do
    files[#files + 1] = path
  end
  for _, path in ipairs(files) do
    local text = ctx.read(path)
    for _, place in ipairs(places) do
      -- most files do not even have the place without its last letter, which is soon seen
      local there = text:find(place:gsub("%%w$", ""):gsub("%%", ""), 1, true)
      for at in (there and text or ""):gmatch("()" .. place) do
        local _, before = text:sub(1, at):gsub("\n", "")
        complaints[#complaints + 1] = ("%s:%d: %s"):format(path, before + 1, text:match("[^\n]*", at))
      end
    end
  end
  return complaints
end

--- The manual for C programs has each public header in the title of a section.
local function manual(ctx)
  local complaints, titles = {}, {}
  for title in ctx.read "docs/embedding_c.md":gmatch "\n### ([^\n]*)" do titles[#titles + 1] = title end
  titles = table.concat(titles, "\n")
  for _, path in ipairs(ctx.lines "ls runtime/include/perilune/*.h") do
    local name = path:match "[^/]+$"
    if name ~= "perilune.h" and not titles:find("%f[%w]" .. name:gsub("%.", "%%.")) then
      complaints[#complaints + 1] = ("docs/embedding_c.md: no section has %s in its title"):format(name)
    end
  end
  return complaints
end

--- Who has an installation has the public headers and the documents, `make install` says which, and nothing else of
--- this tree.
local function headers(ctx)
  local complaints = {}
  for _, path in ipairs(ctx.lines "ls runtime/include/perilune/*.h") do
    for word in ctx.read(path):gmatch "[%w_%-]+/[%w_/%.%-]+" do
      word = word:gsub("%.$", "")
      local top = word:match "^([%w_]+)/"
      local there = (top == "perilune" and ctx.exists("runtime/include/" .. word))
        or ((word:match "^docs/.*%.md$" or word:match "^kernels/[%w_]+%.h$") and ctx.exists(word))
      if (tops[top] or top == "perilune") and not there and word ~= "docs/" and word ~= "kernels/" then
        complaints[#complaints + 1] = ("%s names %s, which is not installed"):format(path, word)
      end
    end
  end
  return complaints
end

-- -- what a page shows without a bar to scroll ------------------------------------------------------------------------
-- GitHub shows text in 838 pixels. A character of code has 8.2 of them, one of a table's text some 7.5; a block of code
-- has 32 beside its lines, a cell 27 beside its text. Cells break at spaces only, in code too.

-- A word wider than WORD in a cell would leave the other columns a few letters a line.

local PAGE, WORD, COLUMNS, CODE, TEXT, CELL = 838, 620, 96, 8.2, 7.5, 27

--- Tables that may be wider: of measurements with many columns, and of arguments with TorchRec's longest names. Their
--- pages, and what they begin with.
local wide_tables = { { "docs/benchmarks/training_step.md", "| case | step (best) |" },
  { "docs/benchmarks/training_step.md", "| | 1 machine | times the plain loop |" },
  { "docs/reference/managed_collision.md", "| argument | type |" } }

local function may_be_wide(path, line)
  for _, t in ipairs(wide_tables) do
    if t[1] == path and line:sub(1, #t[2]) == t[2] then return true end
  end
  return false
end

local function length(text) return select(2, text:gsub("[^\128-\191]", "")) end

--- Lines in which Markdown sees a list, a heading or a quotation though a word of code goes on over the line's end:
--- "`f(a +" and "1) end`" become a paragraph with a stray mark and a list of one entry.
local function marks(ctx)
  local complaints = {}
  for _, path in ipairs(ctx.lines "ls README.md docs/*.md docs/*/*.md 2>/dev/null") do
    local block, quotes, number = false, 0, 0
    for line in (ctx.read(path) .. "\n"):gmatch "(.-)\n" do
      number = number + 1
      if line:match "^```" then block = not block end
      local mark = line:match "^%s*(1[.)]) " or line:match "^%s*([-+*>]) " or line:match "^(#+) "
      if not block and mark and quotes % 2 == 1 then
        complaints[#complaints + 1] = ("%s:%d: '%s' begins a line within code; Markdown takes it for its own")
          :format(path, number, mark)
      end
      local _, n = line:gsub("`", "")
      quotes = (block or mark or not line:match "%S") and n or quotes + n
    end
  end
  return complaints
end

--- Pixels of a cell's widest word.
local function widest(cell)
  cell = cell:gsub("%]%([^)]*%)", ""):gsub("\\|", "|"):gsub("[*%[]", "")
  local most, code = 0, false
  for part, quote in cell:gmatch "([^`]*)(`?)" do
    for word in part:gmatch(code and "[^ ]+" or "[^ %-]+%-?") do
      most = math.max(most, length(word) * (code and CODE or TEXT))
    end
    if quote == "`" then code = not code end
  end
  return most
end

local function cells_of(line)
  local cells = {}
  for cell in line:gsub("\\|", "\1"):gmatch "|([^|]+)" do cells[#cells + 1] = cell:gsub("\1", "\\|") end
  return cells
end

local function widths(ctx)
  local complaints = {}
  for _, path in ipairs(ctx.lines "ls README.md docs/*.md docs/*/*.md 2>/dev/null") do
    local code, columns, first, number = false, {}, nil, 0
    local function table_ends()
      local sum = 1
      for _, pixels in ipairs(columns) do sum = sum + pixels + CELL end
      if sum > PAGE and not may_be_wide(path, first) then
        complaints[#complaints + 1] = ("%s:%d: a table of at least %d pixels; %d fit"):format(path, number, sum, PAGE)
      end
      columns, first = {}, nil
    end
    for line in (ctx.read(path) .. "\n"):gmatch "(.-)\n" do
      number = number + 1
      if line:match "^```" then code = not code
      else
        local shown = code and line or path:match "reference/c_" and line:match "^    (.*)" or ""
        if length(shown) > COLUMNS then
          complaints[#complaints + 1] = ("%s:%d: a line of code of %d characters; %d fit"):format(path, number,
            length(shown), COLUMNS)
        end
      end
      if not code and line:match "^|" then
        first = first or line
        for i, cell in ipairs(cells_of(line)) do
          local pixels = widest(cell)
          if pixels > WORD then
            complaints[#complaints + 1] = ("%s:%d: a word of %d pixels in a table; up to %d leave room"):format(path,
              number, pixels, WORD)
          end
          columns[i] = math.max(columns[i] or 0, pixels)
        end
      elseif #columns > 0 then table_ends() end
    end
  end
  return complaints
end

return { { "documents fit their page", widths }, { "lines of documents begin no list by accident", marks },
  { "documents name what exists", paths }, { "links of documents lead to headings, which go in order", sections },
  { "no paths of one machine", machine_paths }, { "public headers name what is installed", headers },
  { "the manual for C programs has all public headers", manual } }
