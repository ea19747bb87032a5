-- explain/draw.lua: the picture of a plan as SVG: ranks as columns; in each its shards as boxes scaled by bytes, bars
-- of its memories, and a bar of its time by parts.
local util = require "perilune.util"
local partitioners = require "perilune.plan.partitioners"
local topologies = require "perilune.plan.topology"
local reasons = require "perilune.explain.reasons"

local M = {}

local MOST_COLUMNS = 64
local WIDTH, LEFT, RIGHT = 1180, 76, 10          -- of the picture, its margins
local BOXES, TIMES, BAR, GAP = 340, 150, 9, 30    -- heights of the zones, of a memory bar, between zones
local SMALLEST = 2                                -- boxes lower than this are one box together
local LETTER = 6.7                                -- width of a letter in a box

--- Parts of a rank's time, as they are stacked, and their names.
M.parts = { { "fwd_compute", "forward, lookup" }, { "fwd_comms", "forward, exchange" },
  { "bwd_comms", "backward, exchange" }, { "bwd_compute", "backward, update" }, { "prefetch_compute", "prefetch" } }

local entities = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;", ["'"] = "&#39;" }

--- Text for a page: what could be markup is not, control characters are question marks.
function M.escape(text)
  return (tostring(text):gsub("[&<>\"']", entities):gsub("%c", function(c) return c == "\n" and c or "?" end))
end

--- 1234567 -> "1,234,567".
function M.grouped(n)
  local text = ("%d"):format(n)
  return (text:reverse():gsub("(%d%d%d)", "%1,"):reverse():gsub("^,", ""))
end

local function all_bytes(storage) return storage.hbm + storage.ddr + storage.ssd end

--- Which ranks have a column: all, or MOST_COLUMNS from the slowest to the fastest. Returns the ranks and whether these
--- are all.
local function columns_of(times)
  local order = {}
  for r = 1, #times do order[r] = r end
  if #times <= MOST_COLUMNS then return order, true end
  table.sort(order, function(a, b)
    if times[a] ~= times[b] then return times[a] > times[b] end
    return a < b
  end)
  local chosen = {}
  for c = 1, MOST_COLUMNS do chosen[c] = order[1 + math.floor((c - 1) * (#order - 1) / (MOST_COLUMNS - 1))] end
  return chosen, false
end

--- Shards of the ranks that have columns: by column a list of { option =, run =, index = of the option, bytes = }, the
--- largest first.
local function shards_of(best, columns)
  local at, lists = {}, {}
  for c, r in ipairs(columns) do at[r - 1], lists[c] = c, {} end
  for i, option in ipairs(best.proposal) do
    partitioners.each_shard(option, best.placement[i], function(rank, run)
      local c = at[rank]
      if c then table.insert(lists[c], { option = option, run = run, index = i, bytes = all_bytes(run.storage) }) end
    end)
  end
  for _, list in ipairs(lists) do
    table.sort(list, function(a, b)
      if a.bytes ~= b.bytes then return a.bytes > b.bytes end
      return a.index < b.index
    end)
  end
  return lists
end

--- What is drawn: { columns = ranks from 1, all = whether these are all, shards = by column, bytes and times = by rank,
--- parts = by part and rank, tiers = list of { name, used = by rank, cap = by rank }, peak_bytes, peak_ms }.
function M.facts(planner)
  local search, world_size = planner.last, planner.topology.world_size
  local best = search.best
  local function sums(value) return partitioners.by_rank(best.proposal, best.placement, world_size, value) end
  local f = { parts = {}, tiers = {}, bytes = sums(function(run) return all_bytes(run.storage) end),
    times = sums(function(run) return run.perf.total end), peak_bytes = 0, peak_ms = 0 }
  for i, part in ipairs(M.parts) do f.parts[i] = sums(function(run) return run.perf[part[1]] end) end
  for _, name in ipairs(topologies.tiers) do
    local used, any = sums(function(run) return run.storage[name] end), false
    for r = 1, world_size do any = any or used[r] > 0 end
    local cap = util.map(search.topology.devices, function(d) return d[name] end)
    if any then table.insert(f.tiers, { name = name, used = used, cap = cap }) end
  end
  for r = 1, world_size do
    f.peak_bytes, f.peak_ms = math.max(f.peak_bytes, f.bytes[r]), math.max(f.peak_ms, f.times[r])
  end
  f.columns, f.all = columns_of(f.times)
  f.shards = shards_of(best, f.columns)
  return f
end

-- -- pieces of SVG ----------------------------------------------------------------------------------------------------

local function rect(class, x, y, w, h, more)
  return ('<rect class="%s" x="%.2f" y="%.2f" width="%.2f" height="%.2f"%s'):format(class, x, y, w, h, more or "/>")
end

local function titled(text) return ("><title>%s</title></rect>"):format(M.escape(text)) end

local function label(class, x, y, text)
  return ('<text class="%s" x="%.1f" y="%.1f">%s</text>'):format(class, x, y, M.escape(text))
end

--- Round steps of an axis up to `most`: 1, 2 or 5 times a power of `base`.
local function ticks(most, unit)
  local raw, step = most / unit / 5, nil
  local power = 10 ^ math.floor(math.log10(math.max(raw, 1e-12)))
  for _, k in ipairs { 1, 2, 5, 10 } do step = step or k * power >= raw and k * power or nil end
  local list = {}
  for i = 0, math.floor(most / unit / step + 1e-9) do list[#list + 1] = i * step end
  return list, step
end

local function axis(out, x0, y, height, most, unit, name)
  for _, value in ipairs((ticks(most, unit))) do
    local at = y + height - value * unit / most * height
    out[#out + 1] = ('<line class="grid" x1="%d" x2="%d" y1="%.1f" y2="%.1f"/>'):format(x0, WIDTH - RIGHT, at, at)
    out[#out + 1] = label("tick", x0 - 8, at + 4, value == 0 and "0" or ("%g %s"):format(value, name))
  end
end

local units = { { "TiB", 2 ^ 40 }, { "GiB", 2 ^ 30 }, { "MiB", 2 ^ 20 }, { "KiB", 2 ^ 10 }, { "B", 1 } }
local function unit_of(bytes)
  for _, u in ipairs(units) do
    if bytes >= u[2] then return u end
  end
  return units[#units]
end

local function time_unit(ms) return ms >= 1 and { "ms", 1 } or ms >= 1e-3 and { "us", 1e-3 } or { "ns", 1e-6 } end

--- Words about a shard, for a pointer that hovers over it.
local function shard_text(shard, rank)
  local o, run = shard.option, shard.run
  local p = run.perf
  return table.concat({ o.fqn, ("%s, %s"):format(o.sharding_type, o.compute_kernel),
    ("%s x %d of %s x %d"):format(M.grouped(run.rows), run.cols, M.grouped(o.rows), o.dim),
    ("%s on rank %d"):format(reasons._gib(shard.bytes), rank),
    ("%.4g ms: lookup %.3g, exchange %.3g, gradients %.3g, update %.3g"):format(p.total, p.fwd_compute, p.fwd_comms,
      p.bwd_comms, p.bwd_compute) }, "\n")
end

local function boxes(out, f, column, x, w, y)
  local rank, floor, scale = f.columns[column] - 1, y + BOXES, BOXES / math.max(f.peak_bytes, 1)
  local rest, names = { n = 0, bytes = 0, ms = 0 }, {}
  for _, shard in ipairs(f.shards[column]) do
    local h = shard.bytes * scale
    if h >= SMALLEST then
      floor = floor - h
      out[#out + 1] = rect("box " .. shard.option.sharding_type, x, floor, w, h, (' data-t="%d"'):format(shard.index)
        .. titled(shard_text(shard, rank)))
      local letters = math.floor((w - 8) / LETTER)
      if h >= 16 and letters >= 3 then
        local name = shard.option.name
        out[#out + 1] = label("name", x + 4, floor + math.min(14, h / 2 + 4), #name > letters
          and name:sub(1, letters - 2) .. ".." or name)
      end
    else
      rest.n, rest.bytes, rest.ms = rest.n + 1, rest.bytes + shard.bytes, rest.ms + shard.run.perf.total
      if rest.n <= 8 then names[rest.n] = shard.option.fqn end
    end
  end
  if rest.n > 0 then
    local h = rest.bytes * scale
    out[#out + 1] = rect("box rest", x, floor - h, w, h,
      titled(("%d smaller shards on rank %d\n%s, %.4g ms\n%s%s"):format(rest.n, rank, reasons._gib(rest.bytes), rest.ms,
        table.concat(names, ", "), rest.n > #names and ", ..." or "")))
  end
end

local function memory(out, f, r, x, w, y)
  for i, tier in ipairs(f.tiers) do
    local used, cap = tier.used[r], math.max(tier.cap[r], 1)
    local share = used / cap
    local at = y + (i - 1) * (BAR + 6)
    local words = titled(("rank %d: %s of %s %s (%.1f %%)"):format(r - 1, reasons._gib(used), reasons._gib(tier.cap[r]),
      tier.name, 100 * share))
    out[#out + 1] = rect("track", x, at, w, BAR, words)
    out[#out + 1] = rect(share > 0.95 and "used tight" or "used", x, at, w * math.min(share, 1), BAR, words)
  end
end

local function time_bar(out, f, r, x, w, y)
  local floor, scale, lines = y + TIMES, TIMES / math.max(f.peak_ms, 1e-12), {}
  for i, part in ipairs(M.parts) do lines[i] = ("%s %.4g ms"):format(part[2], f.parts[i][r]) end
  local words = titled(("rank %d: %.4g ms\n%s"):format(r - 1, f.times[r], table.concat(lines, "\n")))
  for i, part in ipairs(M.parts) do
    local h = f.parts[i][r] * scale
    if h > 0 then
      floor = floor - h
      out[#out + 1] = rect("time " .. part[1], x, floor, w, h, words)
    end
  end
end

--- The picture of what `facts` found, for a machine whose hosts have local_world_size ranks.
function M.svg(f, local_world_size)
  local n = #f.columns
  local pitch = math.min(280, (WIDTH - LEFT - RIGHT) / n)
  local w = pitch - math.max(1.5, math.min(10, pitch * 0.12))
  local y_boxes = 24
  local y_memory = y_boxes + BOXES + 14
  local y_times = y_memory + #f.tiers * (BAR + 6) + GAP
  local height = y_times + TIMES + 44
  local bytes, ms = unit_of(f.peak_bytes), time_unit(f.peak_ms)
  local out = { ('<svg viewBox="0 0 %d %d" role="img" aria-label="Shards, memory and time of %d ranks">'):format(WIDTH,
    height, n) }
  axis(out, LEFT, y_boxes, BOXES, math.max(f.peak_bytes, 1), bytes[2], bytes[1])
  axis(out, LEFT, y_times, TIMES, math.max(f.peak_ms, 1e-12), ms[2], ms[1])
  for i, tier in ipairs(f.tiers) do
    out[#out + 1] = label("tick", LEFT - 8, y_memory + (i - 1) * (BAR + 6) + BAR - 0.5, tier.name)
  end
  local every = 1 -- columns from one number to the next, so that numbers do not touch
  while every * pitch < 9 * #tostring(#f.times - 1) do every = every + 1 end
  for c, r in ipairs(f.columns) do
    local x = LEFT + (c - 1) * pitch + (pitch - w) / 2
    boxes(out, f, c, x, w, y_boxes)
    memory(out, f, r, x, w, y_memory)
    time_bar(out, f, r, x, w, y_times)
    if (c - 1) % every == 0 then out[#out + 1] = label("rank", x + w / 2, y_times + TIMES + 16, r - 1) end
    if f.all and c > 1 and (r - 1) % local_world_size == 0 then
      out[#out + 1] = ('<line class="host" x1="%.1f" x2="%.1f" y1="%d" y2="%d"/>'):format(x - (pitch - w) / 2,
        x - (pitch - w) / 2, y_boxes, y_times + TIMES + 4)
    end
  end
  local words = f.all and "rank" or ("%d of %d ranks, from the slowest to the fastest"):format(n, #f.times)
  out[#out + 1] = label("rank", LEFT + pitch * n / 2, y_times + TIMES + 36, words)
  out[#out + 1] = "</svg>"
  return table.concat(out, "\n")
end

return M
