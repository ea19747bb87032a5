-- packages.lua: the lists of Debian packages as arrays: one block of "Field: value" lines per package (deb-control
-- format).
local ffi = require "ffi"
local P = require "perilune.ffi"
local util = require "perilune.util"
local getenv = require "perilune.environment"
local Tensor = require "perilune.tensor"

local M = {}

-- -- reading ----------------------------------------------------------------------------------------------------------

local hint = "data.debian: `apt-cache dumpavail` gave no packages: this is no Debian machine, or its lists are empty "
  .. "(apt-get update). " ..
  "Give other data: DATA=train.txt (a file in the Criteo layout) or DATA=synthetic:100000"

--- The text of the lists: of a file, or of `apt-cache dumpavail`.
function M.text(path)
  local text, why
  if path then text, why = util.read_file(path)
  else
    -- where `getenv` gives no PATH (AT_SECURE), apt sees nothing of the caller's environment
    local with = getenv "PATH" and "LC_ALL=C" or "/usr/bin/env -i PATH=/usr/bin:/bin LC_ALL=C"
    local pipe = io.popen(with .. " apt-cache dumpavail 2>/dev/null", "r")
    text = pipe:read "*a"
    pipe:close()
  end
  if not text then P.fail("data.debian: " .. why) end
  if not text:find("Package: ", 1, true) then
    P.fail(path and ("data.debian: %s has no 'Package:' line"):format(path) or hint)
  end
  return text
end

--- Growing CSR lists: list i is values[offsets[i]..offsets[i+1]).
local function lists() return { offsets = { 0 }, values = {}, n = 0 } end
--- Add a value to the last list.
local function push(l, value)
  l.n = l.n + 1
  l.values[l.n] = value
end
--- End the last list: what is pushed from now on is the next one's.
local function close(l) l.offsets[#l.offsets + 1] = l.n end
--- The first n numbers of a Lua table as a C array of 32-bit integers.
local function int32_array(values, n)
  local a = ffi.new("int32_t[?]", math.max(n, 1))
  for i = 1, n do a[i - 1] = values[i] end
  return a
end
--- Lists as C arrays. `wide` holds the values once more, as 64-bit ids: batches copy from there.
local function packed(l)
  local wide = ffi.new("int64_t[?]", math.max(l.n, 1))
  for i = 1, l.n do wide[i - 1] = l.values[i] end
  return { offsets = int32_array(l.offsets, #l.offsets), values = int32_array(l.values, l.n), wide = wide, n = l.n }
end

--- Numbers for names, in the order of their first use, from 0.
local function vocabulary() return { ids = {}, names = {}, n = 0 } end
local function id_of_name(v, name)
  local id = v.ids[name]
  if not id then
    id = v.n
    v.ids[name], v.names[id + 1], v.n = id, name, id + 1
  end
  return id
end

--- The value of a field of a block (which begins with a line end), continuation lines included; nil if it is not there.
local function field(block, name)
  local _, at = block:find("\n" .. name .. ": ", 1, true)
  if not at then return nil end
  local stop = block:find("\n[^ ]", at)
  return block:sub(at + 1, (stop or #block) - 1)
end

local common = {}
for word in ("a an and as at be by for from in is it of on or that the this to with"):gmatch "%a+" do
  common[word] = true
end

-- Push the words of a text (runs of digits and then letters), each once.
local function push_words(l, vocabulary_of_words, text, seen, stamp)
  for word in text:lower():gmatch "%d*%a*" do
    if word ~= "" and not common[word] then
      local id = id_of_name(vocabulary_of_words, word)
      if seen[id] ~= stamp then
        seen[id] = stamp
        push(l, id)
      end
    end
  end
  close(l)
end

local function push_tags(l, tags, text)
  for tag in (text or ""):gmatch "[^,%s]+" do push(l, id_of_name(tags, tag)) end
  close(l)
end

--- Blocks and names of the packages; later blocks of a known name (other versions) are left out.
local function split(text)
  local names, blocks, ids, at = {}, {}, {}, 1
  while at <= #text do
    local stop = text:find("\n\n", at, true) or #text
    local block = "\n" .. text:sub(at, stop)
    local name = field(block, "Package")
    if name and not ids[name] then
      ids[name] = #names
      names[#names + 1], blocks[#blocks + 1] = name, block
    end
    at = stop + 2
  end
  return names, blocks, ids
end

-- Push what a package needs: the first of each group of alternatives, without versions and architectures, if it is a
-- package.
local function push_dependencies(l, block, self_id, ids, seen)
  for _, name in ipairs { "Pre-Depends", "Depends", "Recommends" } do
    local value = field(block, name)
    if value then
      for target in value:gmatch "([^%s,:(|]+)[^,]*" do
        local id = ids[target]
        if id and id ~= self_id and seen[id] ~= self_id then
          seen[id] = self_id
          push(l, id)
        end
      end
    end
  end
  close(l)
end

--- Parse the lists: n packages, names, versions, and by package the lists `dependencies`, `name_words`,
--- `description_words`, `tags` and the arrays section, maintainer, source; sizes of the vocabularies in words,
--- tag_count, section_count, maintainer_count. ids: number by name; section_ids: number by section.
function M.parse(text)
  local names, blocks, ids = split(text)
  local n = #names
  local words, tags, sections, maintainers, sources = vocabulary(), vocabulary(), vocabulary(), vocabulary(),
    vocabulary()
  local dependencies, name_words, description_words, tag_lists = lists(), lists(), lists(), lists()
  local section, maintainer, source, versions = {}, {}, {}, {}
  local seen_package, seen_word = {}, {}
  for i = 1, n do
    local block, id = blocks[i], i - 1
    push_dependencies(dependencies, block, id, ids, seen_package)
    push_words(name_words, words, names[i], seen_word, 2 * id)
    push_words(description_words, words, (field(block, "Description") or ""):match "^[^\n]*", seen_word, 2 * id + 1)
    versions[i] = field(block, "Version") or ""
    push_tags(tag_lists, tags, field(block, "Tag"))
    section[i] = id_of_name(sections, field(block, "Section") or "")
    maintainer[i] = id_of_name(maintainers, field(block, "Maintainer") or "")
    source[i] = id_of_name(sources, (field(block, "Source") or names[i]):match "^%S+")
  end
  return {
    n = n, names = names, versions = versions, ids = ids, section_ids = sections.ids,
    dependencies = packed(dependencies), name_words = packed(name_words), description_words = packed(description_words),
    tags = packed(tag_lists), section = int32_array(section, n),
    maintainer = int32_array(maintainer, n), source = int32_array(source, n),
    words = words.n, tag_count = tags.n, section_count = sections.n, maintainer_count = maintainers.n,
  }
end

-- -- in other states of Lua -------------------------------------------------------------------------------------------

local COUNTS = { "n", "words", "tag_count", "section_count", "maintainer_count" }
local LISTS = { "dependencies", "name_words", "description_words", "tags" }
local ARRAYS = { "section", "maintainer", "source" }

--- The numbers among what `parse` returned.
function M.counts(parsed)
  local counts = {}
  for _, name in ipairs(COUNTS) do counts[name] = parsed[name] end
  return counts
end

--- The arrays of what `parse` returned as tensors, which several threads can hold: made once. Names, versions and ids
--- are not among them.
function M.shared(parsed)
  if parsed.tensors then return parsed.tensors end
  local tensors = {}
  local function add(memory, n, dtype) tensors[#tensors + 1] = Tensor.from_memory(memory, { n }, dtype, "cpu") end
  for _, name in ipairs(LISTS) do
    local l = parsed[name]
    add(l.offsets, parsed.n + 1, "i32")
    add(l.values, l.n, "i32")
    add(l.wide, l.n, "i64")
  end
  for _, name in ipairs(ARRAYS) do add(parsed[name], parsed.n, "i32") end
  parsed.tensors = tensors
  return tensors
end

local data = ffi.new "void *[1]"

--- What `parse` returned, without names, of its counts and such tensors, in another state of Lua.
function M.received(counts, tensors)
  local parsed, at = { tensors = tensors }, 0
  local function next_array(ctype)
    at = at + 1
    P.check(P.C.peri_tensor_data(Tensor.ptr(tensors[at]), data))
    return ffi.cast(ctype, data[0])
  end
  for _, name in ipairs(COUNTS) do parsed[name] = counts[name] end
  for _, name in ipairs(LISTS) do
    local l = { offsets = next_array "int32_t *", values = next_array "int32_t *", wide = next_array "int64_t *" }
    l.n, parsed[name] = tonumber(l.offsets[parsed.n]), l
  end
  for _, name in ipairs(ARRAYS) do parsed[name] = next_array "int32_t *" end
  return parsed
end

return M
