-- recommend.lua: what the model would suggest for some held-out packages, of which it is shown all dependencies but one.
local ffi = require "ffi"
local peri = require "perilune"
local evaluation = require "dlrm.evaluation"
local data = peri.data

local M = {}
local SHOWN, SUGGESTED, CHUNK, LEAST = 6, 5, 8192, 3

--- Packages that people know: held out, with 4 to 30 dependencies, the most tags first. For each, the dependency to hide is the one with
--- the median popularity among those that training has seen.
local function choose(source)
  local lists, popularity = source.lists, source.features.popularity
  local offsets, seen, list = lists.dependencies.offsets, {}, {}
  for i = 0, source._n - 1 do
    local s = source._s[i]
    local n, tags = offsets[s + 1] - offsets[s], lists.tags.offsets[s + 1] - lists.tags.offsets[s]
    if not seen[s] and n >= 4 and n <= 30 then
      seen[s] = true
      list[#list + 1] = { s = s, tags = tags }
    end
  end
  table.sort(list, function(a, b) return a.tags > b.tags or (a.tags == b.tags and a.s < b.s) end)
  local chosen = {}
  for _, p in ipairs(list) do
    local targets = {}
    for j = offsets[p.s], offsets[p.s + 1] - 1 do
      local c = lists.dependencies.values[j]
      if popularity[c] >= LEAST then targets[#targets + 1] = c end
    end
    table.sort(targets, function(a, b) return popularity[a] < popularity[b] or (popularity[a] == popularity[b] and a < b) end)
    p.hidden = targets[math.ceil(#targets / 2)]
    if p.hidden and #chosen < SHOWN then chosen[#chosen + 1] = p end
  end
  return chosen
end

--- Probabilities of n candidates for package s with p hidden, on every rank. Collective.
local function scores(model, loader, s, candidates, n, p)
  local source, out = loader.source, ffi.new("double[?]", n)
  for from = 0, n - 1, CHUNK do
    local rows = math.min(CHUNK, n - from)
    local first, last = data.share(rows, peri.rank(), peri.world_size())
    local mine = last - first
    local ps, pc, pp = ffi.new("int32_t[?]", mine + 1), ffi.new("int32_t[?]", mine + 1), ffi.new("int32_t[?]", mine + 1)
    for i = 0, mine - 1 do ps[i], pc[i], pp[i] = s, candidates[from + first + i], p end
    local host = data.host_batch(#loader.dense, #loader.keys, mine, mine * #loader.keys)
    source.features:assemble(host, mine, ps, pc, pp)
    host.ptr.global_rows = rows
    local batch = data.upload(host, loader.keys, loader.device, peri.world_size())
    evaluation.predict(model, batch, out + from + first)
    batch:release()
    host:release()
  end
  evaluation.sum_over_ranks(out, n)
  return out
end

local function join(names, most)
  local text = table.concat(names, ", ", 1, math.min(#names, most))
  return #names > most and ("%s and %d more"):format(text, #names - most) or text
end

--- Print and return suggestions for a few packages. Collective.
function M.run(model, data_source, say)
  local loader = data_source.loader { part = "test", batch_size = CHUNK }
  local source = loader.source
  local lists, popularity, results = source.lists, source.features.popularity, {}
  local candidates, n = ffi.new("int32_t[?]", lists.n), 0
  for c = 0, lists.n - 1 do
    if popularity[c] >= LEAST then
      candidates[n] = c
      n = n + 1
    end
  end
  say(("recommendations: one dependency of a held-out package is hidden (marked * where the model suggests it), %d candidates"):format(n))
  model:eval()
  for _, p in ipairs(choose(source)) do
    local score, known, names = scores(model, loader, p.s, candidates, n, p.hidden), { [p.s] = true }, {}
    for j = lists.dependencies.offsets[p.s], lists.dependencies.offsets[p.s + 1] - 1 do
      local c = lists.dependencies.values[j]
      if c ~= p.hidden then
        known[c] = true
        names[#names + 1] = lists.names[c + 1]
      end
    end
    local ranked = {}
    for i = 0, n - 1 do
      if not known[candidates[i]] then ranked[#ranked + 1] = i end
    end
    table.sort(ranked, function(a, b) return score[a] > score[b] or (score[a] == score[b] and a < b) end)
    local result = { package = lists.names[p.s + 1], hidden = lists.names[p.hidden + 1], suggested = {} }
    local marked = {}
    for rank, i in ipairs(ranked) do
      local name = lists.names[candidates[i] + 1]
      if candidates[i] == p.hidden then result.rank_of_hidden = rank end
      if rank <= SUGGESTED then result.suggested[rank], marked[rank] = name, name .. (candidates[i] == p.hidden and " *" or "") end
    end
    results[#results + 1] = result
    say(("  %s (depends on %s)\n    suggested: %s%s"):format(result.package, join(names, 4), table.concat(marked, ", "),
      result.rank_of_hidden > SUGGESTED and ("; hidden: %s, at place %d"):format(result.hidden, result.rank_of_hidden) or ""))
  end
  model:train()
  return results
end

return M
