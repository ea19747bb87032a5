-- explain/html.lua: a plan as one page that needs nothing else: its picture (draw.lua), its tables, and why each is
-- where it is.
local P = require "perilune.ffi"
local util = require "perilune.util"
local draw = require "perilune.explain.draw"
local planners = require "perilune.plan.planner"
local reasons = require "perilune.explain.reasons"
local sharding_types = require "perilune.plan.sharding_types"
local report = require "perilune.explain.report"

local M = {}
local escape = draw.escape

local style = [[
:root { color-scheme: light dark; --ground: #fbfaf8; --card: #fff; --ink: #1c2128; --soft: #5d6673; --line: #dfe2e6; --track: #e6e9ed;
  TYPES --rest: #8f98a5; --used: #55708d; --tight: #b3362b;
  --fwd_compute: #6d9fd8; --fwd_comms: #e3ac58; --bwd_comms: #b8741c; --bwd_compute: #33649c; --prefetch_compute: #8a63b8; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --card: #1c2027; --ink: #e6e9ee; --soft: #9aa5b3; --line: #323943;
  --track: #2b313a; --rest: #59626f; --used: #8fa9c4; --tight: #e8695d; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 24px; background: var(--ground); color: var(--ink); font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1228px; margin: 0 auto; }
h1 { font-size: 20px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 26px 0 8px; }
p { margin: 0 0 12px; color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 10px; margin: 14px 0; }
.facts div, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.facts div { padding: 8px 12px; }
.facts b { display: block; font-size: 18px; font-weight: 600; }
.facts span { color: var(--soft); font-size: 12px; }
.card { padding: 12px; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 760px; font: 11px system-ui, "DejaVu Sans", sans-serif; }
svg text { fill: var(--soft); }
svg .tick { text-anchor: end; }
svg .rank { text-anchor: middle; }
svg .name { fill: #fff; pointer-events: none; }
.grid { stroke: var(--line); stroke-width: 1; }
.host { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
.box, .time { stroke: var(--card); stroke-width: .6; }
.box.lit { stroke: var(--ink); stroke-width: 2; }
.track { fill: var(--track); }
.used { fill: var(--used); }
.tight { fill: var(--tight); }
COLOURS
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0 0; padding: 0; list-style: none; color: var(--soft);
  font-size: 12px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; vertical-align: -1px; }
.rows { font-variant-numeric: tabular-nums; }
.rows .line { display: grid; gap: 12px; padding: 5px 10px 5px 24px; align-items: baseline;
  grid-template-columns: minmax(0, 2.2fr) minmax(0, 1.5fr) minmax(0, 1.4fr) minmax(0, 1.3fr) minmax(0, 1.2fr) minmax(0, .9fr)
    minmax(0, .9fr); }
.rows .line > * { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.rows .head { color: var(--soft); font-size: 12px; border-bottom: 1px solid var(--line); }
.rows .number { text-align: right; }
.rows details { border-bottom: 1px solid var(--line); }
.rows details:last-child { border-bottom: 0; }
.rows summary { cursor: pointer; list-style: none; position: relative; }
.rows summary::-webkit-details-marker { display: none; }
.rows summary::before { content: "\25b8"; position: absolute; left: 8px; top: 5px; color: var(--soft); }
.rows details[open] summary::before { content: "\25be"; }
.rows .line i { display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 6px; }
.why { margin: 2px 10px 10px 24px; border-collapse: collapse; font-size: 13px; }
.why td { padding: 2px 16px 2px 0; vertical-align: top; overflow-wrap: anywhere; }
.why td:nth-child(1), .why td:nth-child(2) { white-space: nowrap; }
.why td:nth-child(2) { color: var(--soft); }
input { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 5px 10px;
  width: min(340px, 100%); margin-bottom: 10px; }
#tip { position: fixed; display: none; z-index: 2; max-width: 420px; padding: 7px 10px; border-radius: 6px; background: var(--ink);
  color: var(--ground); font-size: 12px; white-space: pre-line; overflow-wrap: anywhere; pointer-events: none; }
@media (max-width: 760px) { body { padding: 12px; } .rows > * { min-width: 736px; } }
]]

-- The page says everything without it: browsers show the titles of boxes by themselves.
local script = [[
var tip = document.getElementById("tip"), lit = [];
function light(t) {
  lit.forEach(function (b) { b.classList.remove("lit"); });
  lit = t ? Array.prototype.slice.call(document.querySelectorAll('.box[data-t="' + t + '"]')) : [];
  lit.forEach(function (b) { b.classList.add("lit"); });
}
document.querySelector("svg").addEventListener("mousemove", function (e) {
  var r = e.target.closest("rect"), title = r && r.querySelector("title");
  if (title) { r.dataset.words = title.textContent; title.remove(); }
  var words = r && r.dataset.words;
  tip.style.display = words ? "block" : "none";
  if (!words) { return light(null); }
  tip.textContent = words;
  light(r.dataset.t);
  tip.style.left = Math.max(4, Math.min(e.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(e.clientY + 14, innerHeight - tip.offsetHeight - 8)) + "px";
});
document.querySelector("svg").addEventListener("mouseleave", function () { tip.style.display = "none"; light(null); });
var find = document.getElementById("find");
find.hidden = false;
find.addEventListener("input", function () {
  document.querySelectorAll(".rows details").forEach(function (d) {
    d.hidden = d.querySelector("summary").textContent.toLowerCase().indexOf(find.value.toLowerCase()) < 0;
  });
});
]]

-- of sharding types, by their codes
local palette = { "#3b6ea5", "#a85600", "#1f7a70", "#a83a2e", "#4d7a1f", "#7a4fb0", "#9c3a78" }

local function style_of_types()
  return table.concat(util.map(sharding_types.list, function(t)
    return ("--%s: %s;"):format(t.name, palette[t.code % #palette + 1])
  end), " ")
end

local function colours()
  local lines = {}
  local names = sharding_types.names()
  names[#names + 1] = "rest"
  for _, part in ipairs(draw.parts) do names[#names + 1] = part[1] end
  for _, name in ipairs(names) do
    lines[#lines + 1] = (".%s { fill: var(--%s); background: var(--%s); }"):format(name, name, name)
  end
  return table.concat(lines, "\n")
end

--- What the colours mean that a picture has. entries: a list of { class, words }.
local function legend(picture, entries)
  local items = {}
  for _, e in ipairs(entries) do
    if picture:find(("<rect class=\"%%a+ %s\""):format(e[1])) then
      items[#items + 1] = ('<li><i class="%s"></i>%s</li>'):format(e[1], escape(e[2]))
    end
  end
  return '<ul class="legend">' .. table.concat(items) .. "</ul>"
end

local function fact_html(value, what)
  return ("<div><b>%s</b><span>%s</span></div>"):format(escape(value), escape(what))
end

--- The numbers above the picture.
local function facts_of(planner, f)
  local search, sum, total = planner.last, 0, 0
  for r = 1, #f.times do sum, total = sum + f.times[r], total + f.bytes[r] end
  local mean = sum / #f.times
  local out = { fact_html(draw.grouped(#search.best.proposal), "tables"), fact_html(draw.grouped(#f.times), "ranks"),
    fact_html(reasons._gib(total), "of all shards") }
  for _, rating in ipairs(reasons._ratings(planner)) do out[#out + 1] = fact_html(rating[1], rating[2]) end
  out[#out + 1] = fact_html(mean > 0 and ("%.2f"):format(f.peak_ms / mean) or "-", "slowest over mean rank")
  for _, tier in ipairs(f.tiers) do
    local most = 0
    for r = 1, #tier.used do most = math.max(most, tier.used[r] / math.max(tier.cap[r], 1)) end
    out[#out + 1] = fact_html(("%.1f %%"):format(100 * most), ("%s of the fullest rank"):format(tier.name))
  end
  return '<div class="facts">' .. table.concat(out) .. "</div>"
end

local function why_table(entry)
  if not entry then
    return '<p class="why">Why it is not otherwise was not looked into: the plan has too many tables.</p>'
  end
  local rows = util.map(entry.others, function(other)
    return ("<tr><td>%s</td><td>%s</td><td>%s</td></tr>"):format(escape(other.option), escape(other.kind),
      escape(other.text))
  end)
  return '<table class="why">' .. table.concat(rows) .. "</table>"
end

local function cell(text, class)
  return ('<span%s title="%s">%s</span>'):format(class or "", escape(text), escape(text))
end

local function table_rows(planner, why)
  local best, out, entries = planner.last.best, {}, {}
  for _, entry in ipairs(why or {}) do
    for _, name in ipairs(entry.tables) do entries[name] = entry end
  end
  local heads = { "table", "rows x columns", "sharding", "kernel", "ranks", "a shard", "ms a shard" }
  for i, head in ipairs(heads) do heads[i] = ("<span%s>%s</span>"):format(i > 5 and ' class="number"' or "", head) end
  out[1] = '<div class="line head">' .. table.concat(heads) .. "</div>"
  for i, o in ipairs(best.proposal) do
    local s = o.max_storage
    local cells = { cell(o.fqn), cell(("%s x %d"):format(draw.grouped(o.rows), o.dim)),
      ('<span><i class="%s"></i>%s</span>'):format(o.sharding_type, o.sharding_type), cell(o.compute_kernel),
      cell(report._ranks_text(best.placement[i])), cell(reasons._gib(s.hbm + s.ddr + s.ssd), ' class="number"'),
      cell(("%.3g"):format(o.max_perf), ' class="number"') }
    out[#out + 1] = ('<details><summary class="line">%s</summary>%s</details>'):format(table.concat(cells),
      why and why_table(entries[o.fqn]) or "")
  end
  return table.concat(out, "\n")
end

--- The page of a plan that a planner has made, as text. args: { title =, reasons = what reasons.of returned, or nil }.
function M.page(planner, args)
  local a = util.named("plan.html.page", args, { title = "plan", reasons = util.optional.list })
  if not planners.EmbeddingShardingPlanner.is(planner) then
    P.fail(("plan.html.page: planner is a %s, wanted an EmbeddingShardingPlanner"):format(type(planner)))
  end
  if not (planner.last and planner.last.best) then
    P.fail "plan.html.page: the planner has no plan yet; call planner:plan(model) first"
  end
  local f, types, seen = draw.facts(planner), {}, {}
  for _, o in ipairs(planner.last.best.proposal) do
    if not seen[o.sharding_type] then
      seen[o.sharding_type], types[#types + 1] = true, { o.sharding_type, o.sharding_type }
    end
  end
  types[#types + 1] = { "rest", "smaller shards together" }
  local picture = draw.svg(f, planner.topology.local_world_size)
  return table.concat({ "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'; '
      .. 'script-src \'unsafe-inline\'">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    ("<title>%s</title>"):format(escape(a.title)), "<style>" .. style:gsub("TYPES", style_of_types):gsub("COLOURS",
      colours) .. "</style></head><body><main>",
    ("<h1>%s</h1>"):format(escape(a.title)),
    ("<p>%s; %d samples a rank. Times are estimates.</p>"):format(escape(tostring(planner.topology):gsub("^Topology: ",
      "")), planner.batch_size), facts_of(planner, f),
    '<h2>Ranks</h2><div class="card">' .. picture .. legend(picture, types)
    .. legend(picture, draw.parts) .. "</div>",
    '<h2>Tables</h2><input id="find" type="search" placeholder="find a table" aria-label="find a table" hidden>',
    '<div class="card rows">' .. table_rows(planner, a.reasons) .. "</div>", '</main><div id="tip"></div><script>'
      .. script .. "</script></body></html>\n" }, "\n")
end

return M
