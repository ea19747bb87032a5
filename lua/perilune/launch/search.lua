-- launch/search.lua: `perilune help WORDS`: the sections of the documents whose text has the words.
local M = {}

local MOST = 8 -- sections that are listed

--- Words of questions that are in every section.
local common = {}
for word in ([[a an and any are as at be by can do does for from how i in into is it its me my of on or
  our so than that the their them then there they this to use using was we what when where which who why will with you
  your]]):gmatch "%S+" do common[word] = true end

--- What words of one stem begin with: "rows" gives "row", "caching" and "caches" give "cach", "clipping" gives "clip".
local function stem(word)
  local one = word:match "^(..+[^s])s$"
  if one and #one == 3 then return one end
  for _, ending in ipairs { "ing", "ed", "es", "s", "e" } do
    local rest = word:match("^(.+)" .. ending .. "$")
    if rest and #rest >= 4 then return (rest:gsub("([^aeiouls])%1$", "%1")) end
  end
  return word
end

--- The stems of a question, each once, as patterns that match at the beginning of a word.
local function patterns_of(words)
  local list, seen = {}, {}
  for word in words:lower():gsub("@", " at "):gmatch "[%w_\128-\255]+" do
    local s = stem(word)
    if not common[word] and not seen[s] then list[#list + 1] = "%f[%w\128-\255]" .. s end
    seen[s] = true
  end
  return list
end

local function count_of(text, pattern) return (select(2, text:gsub(pattern, ""))) end

--- For the sections that have one of the patterns: how often each is in the text, and whether it is in the heading:
--- { { section, n = { [i] = times }, titled = { [i] = true } } ... }. And what finding a pattern is worth: more, the
--- fewer sections have it.
local function counted(sections, patterns)
  local list, worth = {}, {}
  for i in ipairs(patterns) do worth[i] = 0 end
  for _, s in ipairs(sections) do
    local entry, any = { section = s, n = {}, titled = {} }, false
    for i, pattern in ipairs(patterns) do
      entry.n[i], entry.titled[i] = count_of(s[3], pattern), s[2]:lower():find(pattern) ~= nil
      if entry.titled[i] or entry.n[i] > 0 then
        worth[i], any = worth[i] + 1, true
      end
    end
    if any then list[#list + 1] = entry end
  end
  for i, with in ipairs(worth) do worth[i] = math.log(1 + #sections / math.max(1, with)) end
  return list, worth
end

--- The sections that speak most of the words, best first: { { page, heading } ... }. A word counts what it is worth,
--- and a section must have more than half of all. (The ranking is Okapi BM25, with headings: a word that is in a text
--- again and again adds ever less, and in a long text less than in a short one.)
function M.find(words, sections)
  sections = sections or require "perilune.documents"
  local patterns = patterns_of(words)
  local list, worth = counted(sections, patterns)
  local all, length, hits = 0, 0, {}
  for i in ipairs(patterns) do all = all + worth[i] end
  for _, s in ipairs(sections) do length = length + #s[3] / #sections end
  for _, entry in ipairs(list) do
    local s, has, score = entry.section, 0, 0
    for i, n in ipairs(entry.n) do
      local titled = entry.titled[i]
      if titled or n > 0 then has = has + worth[i] end
      score = score + worth[i] * ((titled and 1 or 0) + 2.2 * n / (n + 0.3 + 0.9 * #s[3] / length))
    end
    if has > all / 2 then hits[#hits + 1] = { page = s[1], heading = s[2], score = score * (has / all) ^ 2 } end
  end
  table.sort(hits, function(a, b)
    if a.score ~= b.score then return a.score > b.score end
    return a.page == b.page and a.heading < b.heading or a.page < b.page
  end)
  return { unpack(hits, 1, MOST) }
end

--- Lines "page  heading" of what is found; nil: nothing is.
function M.text(words)
  local hits, width, lines = M.find(words), 0, {}
  for _, hit in ipairs(hits) do width = math.max(width, #hit.page) end
  for i, hit in ipairs(hits) do
    local below = hit.heading:match "^.- > (.*)$" -- the page's own heading says no more than its name
    lines[i] = ("  %-" .. width .. "s  %s"):format(hit.page, below or hit.heading)
  end
  return #lines > 0 and "In the documents:\n" .. table.concat(lines, "\n") or nil
end

return M
