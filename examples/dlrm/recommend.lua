-- recommend.lua: what the model would suggest for some held-out packages, of which it is shown all dependencies but
-- one.
local ffi = require "ffi"
local peri = require "perilune"
local evaluation = require "dlrm.evaluation"
local data = peri.data

local M = {}
local SUGGESTED, LEAST = 5, 3

-- One package of each of these sections, where there is one.
local SECTIONS = { "games", "graphics", "video", "editors", "web", "gnome", "python", "science" }

--- The held-out package of a section with 6 to 30 dependencies and the most tags; and the dependency of it to hide: the
--- one of median popularity among those that training has seen.
local function choose(source, section)
  local lists, popularity = source.lists, source.features.popularity
  local offsets, best, most = lists.dependencies.offsets, nil, -1
  for i = 0, source._n - 1 do
    local s = source._s[i]
    local n, tags = offsets[s + 1] - offsets[s], lists.tags.offsets[s + 1] - lists.tags.offsets[s]
    if lists.section[s] == section and n >= 6 and n <= 30 and tags > most then best, most = s, tags end
  end
  if not best then return nil end
  local targets = {}
  for j = offsets[best], offsets[best + 1] - 1 do
    local c = lists.dependencies.values[j]
    if popularity[c] >= LEAST then targets[#targets + 1] = c end
  end
  table.sort(targets, function(a, b)
    return popularity[a] < popularity[b] or (popularity[a] == popularity[b] and a < b)
  end)
  return best, targets[math.ceil(#targets / 2)]
end

--- For n candidates: the logarithm of how likely package s needs each, up to a constant, with p hidden. The model was
--- trained against candidates drawn by popularity, so its logit tells how much likelier than popular; the popularity is
--- put back here. Collective.
local function scores(model, loader, s, candidates, n, p)
  local source, out = loader.source, ffi.new("double[?]", n)
  for from = 0, n - 1, loader.batch_size do
    local rows = math.min(loader.batch_size, n - from)
    local first, last = data.share(rows, peri.rank(), peri.world_size())
    local mine = last - first
    local ps, pc, pp = ffi.new("int32_t[?]", mine + 1), ffi.new("int32_t[?]", mine + 1), ffi.new("int32_t[?]", mine + 1)
    for i = 0, mine - 1 do ps[i], pc[i], pp[i] = s, candidates[from + first + i], p end
    local host = data.host_batch(#loader.dense, #loader.keys, mine, mine * #loader.keys)
    source.features:assemble(host, mine, ps, pc, pp)
    host.ptr.global_rows = rows
    local batch = data.upload(host, loader.keys, loader.device, peri.world_size())
    evaluation.logits(model, batch, out + from + first)
    batch:release()
    host:release()
  end
  evaluation.sum_over_ranks(out, n)
  for i = 0, n - 1 do out[i] = out[i] + math.log(source.features.popularity[candidates[i]]) end
  return out
end

--- The ranking of what s is not shown to need: what is suggested, and at which place the hidden dependency stands.
local function suggest(lists, s, hidden, candidates, n, score)
  local result = { package = lists.names[s + 1], hidden = lists.names[hidden + 1], depends = {}, suggested = {} }
  local known = { [s] = true }
  for j = lists.dependencies.offsets[s], lists.dependencies.offsets[s + 1] - 1 do
    local c = lists.dependencies.values[j]
    if c ~= hidden then
      known[c] = true
      result.depends[#result.depends + 1] = lists.names[c + 1]
    end
  end
  local ranked = {}
  for i = 0, n - 1 do
    if not known[candidates[i]] then ranked[#ranked + 1] = i end
  end
  table.sort(ranked, function(a, b) return score[a] > score[b] or (score[a] == score[b] and a < b) end)
  for place, i in ipairs(ranked) do
    if candidates[i] == hidden then result.place_of_hidden = place end
    if place <= SUGGESTED then result.suggested[place] = lists.names[candidates[i] + 1] end
  end
  return result
end

local function join(names, most)
  local text = table.concat(names, ", ", 1, math.min(#names, most))
  return #names > most and ("%s and %d more"):format(text, #names - most) or text
end

--- Print and return suggestions for a few packages; batch_size: candidates that are looked at together. Collective.
function M.run(model, data_source, batch_size, say)
  local loader = data_source.loader { part = "test", batch_size = batch_size }
  local source = loader.source
  local lists, popularity, results = source.lists, source.features.popularity, {}
  local candidates, n = ffi.new("int32_t[?]", lists.n), 0
  for c = 0, lists.n - 1 do
    if popularity[c] >= LEAST then
      candidates[n] = c
      n = n + 1
    end
  end
  say(("recommendations for held-out packages, one of whose dependencies is hidden from the model (*), among %d "
    .. "candidates:"):format(n))
  model:eval()
  for _, section in ipairs(SECTIONS) do
    local number = lists.section_ids[section]
    local s, hidden = choose(source, number)
    if hidden then
      local r = suggest(lists, s, hidden, candidates, n, scores(model, loader, s, candidates, n, hidden))
      results[#results + 1] = r
      local shown = peri.util.map(r.suggested, function(name) return name == r.hidden and name .. " *" or name end)
      say(("  %s, already depends on %s\n    suggested: %s%s"):format(r.package, join(r.depends, 5),
        table.concat(shown, ", "), r.place_of_hidden > SUGGESTED and ("; hidden *: %s, place %d"):format(r.hidden,
          r.place_of_hidden) or ""))
    end
  end
  model:train()
  return results
end

return M
