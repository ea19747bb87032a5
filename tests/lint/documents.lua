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
      for at in text:gmatch("()" .. place) do
        local _, before = text:sub(1, at):gsub("\n", "")
        complaints[#complaints + 1] = ("%s:%d: %s"):format(path, before + 1, text:match("[^\n]*", at))
      end
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

return { { "documents name what exists", paths }, { "no paths of one machine", machine_paths },
  { "public headers name what is installed", headers } }
