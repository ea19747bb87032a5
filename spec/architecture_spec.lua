-- docs/architecture.md says all files of the folders that it describes, and all files that are touched to add
-- something.
local shell = require "spec.support.shell"
local keys = require("perilune.util").keys
local page = shell.read "docs/architecture.md"

--- Names in backquotes.
local function quoted(text)
  local list = {}
  for name in text:gmatch "`([^`]+)`" do list[#list + 1] = name end
  return list
end

local function set_of(list)
  local set = {}
  for _, name in ipairs(list) do set[name] = true end
  return set
end

describe("docs/architecture.md", function()
  it("says all files of each folder that it describes, and no others", function()
    local folders = 0
    for folder, rows in page:gmatch "\n| File of `([%w_/]+)`[^\n]*\n|[%-|]+|\n(.-)\n\n" do
      local named, there = {}, {}
      for row in (rows .. "\n"):gmatch "| ([^|\n]*) |[^\n]*\n" do
        for _, name in ipairs(quoted(row)) do named[name] = true end
      end
      for name in shell.run("ls -p " .. folder):gmatch "%S+" do
        there[name:match "/$" and name or name:match "^[%w_]+"] = true
      end
      assert.same(keys(there), keys(named), folder)
      folders = folders + 1
    end
    assert.equal(2, folders)
  end)
end)

-- One of each kind, by the words with which code names it.
local kinds = {
  { row = "a sharding type", most = 5, words = { "PERI_GRID_SHARD", '"grid_shard"', "peri__grid_shard" },
    own = { ["runtime/plan/types/grid_shard.c"] = "runtime/plan/types/" } },
  { row = "an element-wise operation", most = 5, words = { "PERI_UNARY_SILU", "silu" } },
  { row = "a format of rows", most = 8,
    words = { "PERI_ROWS_INT2", "PERI_QUANTIZE_INT2", '"INT2"', "INT2 =", "int2 =" } },
  { row = "a transport", most = 2, words = { "nccl" }, own = { ["runtime/backends/nccl/"] = "runtime/backends/" } },
}

--- The text of a file without comments; the pieces of a unit are read by make.
local function code_of(path)
  local text = shell.read(path)
  if path:match "%.lua$" then return (text:gsub("%-%-[^\n]*", "")) end
  if path:match "Makefile$" then return (text:gsub("#[^\n]*", "")) end
  return (text:gsub("/%*.-%*/", ""):gsub("//[^\n]*", ""))
end

describe("to add", function()
  local sources = {}
  for path in shell.run [[find runtime kernels lua -name "*.[ch]" -o -name "*.cu" -o -name "*.cuh" -o -name "*.lua"; echo Makefile]]
    :gmatch "%S+" do
    if not path:match "^lua/perilune/reference/" then sources[path] = code_of(path) end -- which documents names
  end

  for _, kind in ipairs(kinds) do
    it(kind.row .. " the files that are named are touched", function()
      local needed, wanted = page:match("\n| " .. kind.row:gsub("%-", "%%-") .. " | ([^|]*)| ([^|]*)|")
      needed, wanted = quoted(needed), set_of(quoted(wanted))
      assert.is_true(#needed <= kind.most, #needed .. " files")
      local named, found = set_of(needed), {}
      for path, code in pairs(sources) do
        for _, word in ipairs(kind.words) do
          if code:find(word, 1, true) then
            local name = path
            for own, general in pairs(kind.own or {}) do
              if path:sub(1, #own) == own then name = general end
            end
            found[name] = true
          end
        end
      end
      for name in pairs(found) do assert(named[name] or wanted[name], name .. " is not in docs/architecture.md") end
      for name in pairs(named) do -- unit_tbe_forward.c names its pieces in a comment
        assert(found[name] or shell.read(name):find "pieces: [^\n]*int2", name .. " names nothing of the kind")
      end
    end)
  end
end)
