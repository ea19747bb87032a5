-- The page of a plan: what its picture says is what the plan says, nothing on it reaches out, and a browser shows it
-- without overflow.
local peri = require "perilune"
local shell = require "spec.support.shell"
local json = require "dkjson"
local plan = peri.plan

local function page_of(tables, ranks, with_reasons)
  local model = plan.describe.of { tables = tables, optimizer = "rowwise_adagrad" }
  local planner = plan.EmbeddingShardingPlanner { topology = plan.Topology.preset("dgx_a100_40gb",
    { world_size = ranks }), sharder = plan.perilune_sharder, max_placements = 2e5 }
  planner:plan(model)
  local why = with_reasons and plan.reasons.of(planner, model) or nil
  return plan.html.page(planner, { title = "a <plan> & its 'name'", reasons = why }), planner, why
end

local small = { { name = "users", num_embeddings = 4e7, embedding_dim = 128 },
  { name = "items", num_embeddings = 3e6, embedding_dim = 256 },
  { name = "<script>a_name_that_does_not_fit_into_any_column_of_the_picture</script>", num_embeddings = 9e6,
    embedding_dim = 64 },
  { name = "tags", num_embeddings = 1000, embedding_dim = 16 } }

local function many(n)
  local tables = {}
  for i = 1, n do
    tables[i] = { name = "t" .. i, num_embeddings = 1000 * (i * i % 997 + 1), embedding_dim = 16 * (1 + i % 8) }
  end
  return tables
end

local RECT = '<rect class="([%w_ ]+)" x="([%d.-]+)" y="([%d.-]+)" width="([%d.-]+)" height="([%d.-]+)"([^>]*)>'

--- The rectangles of a class: { x, y, width, height, title, more }.
local function rects(page, class)
  local list = {}
  for names, x, y, w, h, more, title in page:gmatch(RECT .. "<title>([^<]*)</title>") do
    if (" " .. names .. " "):find(" " .. class .. " ", 1, true) then
      list[#list + 1] = { x = tonumber(x), y = tonumber(y), w = tonumber(w), h = tonumber(h), title = title,
        more = more, names = names }
    end
  end
  return list
end

--- Every open tag is closed, in order.
local function balanced(page)
  local open = {}
  local void = { meta = true, input = true, ["!doctype"] = true }
  page = page:gsub("<style>.-</style>", ""):gsub("<script>.-</script>", "")
  for close, name, own in page:gmatch "<(/?)([%w!]+)[^>]-(/?)>" do
    if close == "/" then assert.equal(table.remove(open), name)
    elseif own == "" and not void[name] then open[#open + 1] = name end
  end
  assert.same({}, open)
end

describe("the page of a plan", function()
  it("has a box for every shard, as high as it has bytes, none over another", function()
    local page, planner = page_of(small, 16, true)
    balanced(page)
    local best, list, per_rank = planner.last.best, rects(page, "box"), {}
    local ratio, areas, shards = nil, 0, 0
    for _, box in ipairs(list) do
      local gib, unit, rank = box.title:match "\n([%d.]+) ([GM])iB on rank (%d+)"
      local index = box.more:match 'data%-t="(%d+)"'
      if index then
        shards = shards + 1
        local option = best.proposal[tonumber(index)]
        assert.matches(option.sharding_type, box.names, 1, true)
        local bytes = option.max_storage.hbm + option.max_storage.ddr
        local said = gib * (unit == "G" and 2 ^ 30 or 2 ^ 20)
        assert.is_true(math.abs(said / bytes - 1) < 0.06, box.title)
        ratio = ratio or box.h / bytes
        assert.is_true(math.abs(box.h / (bytes * ratio) - 1) < 0.02, box.title)
      else
        rank = box.title:match "smaller shards on rank (%d+)"
        shards = shards + tonumber(box.title:match "^(%d+) smaller")
      end
      per_rank[rank] = per_rank[rank] or {}
      table.insert(per_rank[rank], box)
      areas = areas + box.h
    end
    local wanted, total = 0, 0
    for _, option in ipairs(best.proposal) do
      wanted, total = wanted + option.num_shards, total + option.total_storage.hbm + option.total_storage.ddr
    end
    assert.equal(wanted, shards)
    assert.is_true(math.abs(areas / (total * ratio) - 1) < 0.02)
    for _, boxes in pairs(per_rank) do -- any order: each rank by itself
      table.sort(boxes, function(a, b) return a.y < b.y end)
      for i = 2, #boxes do
        assert.equal(boxes[1].x, boxes[i].x)
        assert.is_true(boxes[i - 1].y + boxes[i - 1].h <= boxes[i].y + 0.02)
      end
    end
  end)

  it("has each rank's memory and time, and each table's reasons, and a legend of the colours that are there", function()
    local page, planner, why = page_of(small, 16, true)
    local explained, drawn = {}, {}
    for class in page:gmatch '<li><i class="([%w_]+)">' do explained[class] = true end
    for kind, class in page:gmatch '<rect class="(%a+) ([%w_]+)"' do
      if kind == "box" or kind == "time" then drawn[class] = true end
    end
    assert.same(drawn, explained)
    local used = rects(page, "used")
    assert.equal(16, #used)
    local times = plan.NoopPerfModel { topology = planner.topology }
    assert.matches(("<b>%.4g ms</b><span>on the slowest rank"):format(times:rate(planner.last.best.proposal,
      planner.last.best.placement)), page, 1, true)
    for r, bar in ipairs(used) do
      local track, share = rects(page, "track")[r], tonumber(bar.title:match "%(([%d.]+) %%%)")
      assert.is_true(math.abs(bar.w / track.w * 100 - share) < 0.2, bar.title)
    end
    local tall = {}
    for _, bar in ipairs(rects(page, "time")) do
      local rank, ms = bar.title:match "^rank (%d+): ([%d.e-]+) ms"
      tall[rank] = { ms = tonumber(ms), h = (tall[rank] and tall[rank].h or 0) + bar.h }
    end
    for _, bar in pairs(tall) do -- any order: each rank by itself
      assert.is_true(math.abs(bar.h / bar.ms / (tall["0"].h / tall["0"].ms) - 1) < 0.02)
    end
    local _, n = page:gsub("<details>", "")
    assert.equal(4, n)
    local said = 0
    for _, entry in ipairs(why) do
      for _, other in ipairs(entry.others) do
        said = said + 1
        assert.matches(("<td>%s</td><td>%s</td><td>%s</td>"):format(other.option, other.kind,
          (other.text:gsub("'", "&#39;"))), page, 1, true)
      end
    end
    assert.is_true(said > 20)
  end)

  it("reaches nothing outside, and takes no name for markup", function()
    local page = page_of(small, 8, false)
    for _, outside in ipairs { "http:", "https:", "//[%w]+%.[%w]", "@import", "url%(", "src=", "<link" } do
      assert.not_matches(outside, (page:gsub("<!doctype html>", "")))
    end
    assert.matches("default-src 'none'", page, 1, true)
    assert.matches("<title>a &lt;plan&gt; &amp; its &#39;name&#39;</title>", page, 1, true)
    local _, scripts = page:gsub("<script>", "")
    assert.equal(1, scripts)
  end)

  it("is small for many tables on many ranks, which stand for all from the slowest to the fastest", function()
    local page, planner = page_of(many(300), 512, false)
    balanced(page)
    assert.is_true(#page < 4 * 2 ^ 20, #page)
    assert.equal(64, #rects(page, "track"))
    assert.matches("64 of 512 ranks, from the slowest to the fastest", page, 1, true)
    local first, last = 0, math.huge
    for _, bar in ipairs(rects(page, "time")) do
      local ms = tonumber(bar.title:match ": ([%d.e-]+) ms")
      first, last = math.max(first, ms), math.min(last, ms)
    end
    local times = planner.last.best.rating
    assert.is_true(math.abs(first / times - 1) < 1e-3 and last <= first)
  end)

  it("is refused without a plan, and for arguments that are none", function()
    local planner = plan.EmbeddingShardingPlanner { topology = plan.Topology { world_size = 2 } }
    assert.error_matches(function() plan.html.page(planner) end, "the planner has no plan yet")
    assert.error_matches(function() plan.html.page(select(2, page_of(small, 8)), { titel = 1 }) end,
      "no argument 'titel'")
  end)
end)

-- What a browser measures on the page: whatever is wider than its place, as { what, ... }.
local measure = [[<script>
function inside(a, b) { return a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1; }
var wrong = [], page = document.documentElement, place = function (e) { return e.getBoundingClientRect(); };
if (page.scrollWidth > page.clientWidth) { wrong.push("the page is " + page.scrollWidth + " wide of " + page.clientWidth); }
document.querySelectorAll("details").forEach(function (d) { d.open = true; });
var svg = place(document.querySelector("svg")), n = { text: 0, rect: 0, cells: 0 };
document.querySelectorAll("svg rect, svg text").forEach(function (e) {
  n[e.tagName]++;
  if (!inside(place(e), svg)) { wrong.push("outside of the picture: " + e.outerHTML.slice(0, 90)); }
});
document.querySelectorAll("svg text.name").forEach(function (e) {
  if (!inside(place(e), place(e.previousElementSibling))) { wrong.push("wider than its box: " + e.textContent); }
});
["tick", "rank"].forEach(function (c) {
  var list = document.querySelectorAll("svg text." + c);
  for (var i = 1; i < list.length; i++) {
    var a = place(list[i - 1]), b = place(list[i]);
    var over = a.left < b.right && b.left < a.right && a.top < b.bottom - 1 && b.top < a.bottom - 1;
    if (over) { wrong.push("over another: " + list[i].textContent); }
  }
});
var heads = Array.prototype.map.call(document.querySelector(".head").children, place);
document.querySelectorAll("summary").forEach(function (s) {
  Array.prototype.forEach.call(s.children, function (c, i) {
    n.cells++;
    if (Math.abs(place(c).left - heads[i].left) > 1 || place(c).height > 30) { wrong.push("not below its head: " + c.textContent); }
  });
});
document.querySelectorAll(".facts div").forEach(function (e) {
  if (e.scrollWidth > e.clientWidth) { wrong.push("too narrow: " + e.textContent); }
});
var box = document.querySelector("rect.box"), words = box.querySelector("title").textContent, tip = document.getElementById("tip");
box.dispatchEvent(new MouseEvent("mousemove", { bubbles: true, clientX: 300, clientY: 300 }));
if (tip.textContent != words || getComputedStyle(tip).display == "none") { wrong.push("nothing said about " + words); }
if (!box.classList.contains("lit") && box.dataset.t) { wrong.push("the table's shards are not lit"); }
tip.style.display = "none";
if (page.scrollWidth > page.clientWidth) { wrong.push("with reasons the page is " + page.scrollWidth + " wide"); }
document.body.innerHTML = "<pre>BEGIN" + JSON.stringify({ wrong: wrong, n: n }).replace(/</g, " ") + "END</pre>";
</script>]]

describe("a browser", function()
  local browser, missing = shell.browser()
  if missing then return it("shows the page", function() pending(missing) end) end

  for _, case in ipairs { { small, 16, 1280, "a small plan" },
    { many(200), 64, 800, "a large plan in a narrow window" } } do
    it("shows " .. case[4] .. " without overflow", function()
      local folder, clean = shell.temporary()
      local page = page_of(case[1], case[2], #case[1] < 10)
      shell.write(folder .. "/page.html", (page:gsub("</body>", function() return measure .. "</body>" end)))
      local out = shell.run(("%s --user-data-dir=%s/profile "
        .. "--window-size=%d,900 --dump-dom file://%s/page.html"):format(browser, folder, case[3], folder))
      clean()
      local found = json.decode(out:match "BEGIN(.*)END" or error(out))
      assert.same({}, found.wrong)
      assert.is_true(found.n.rect > 100 and found.n.text > 20 and found.n.cells == 7 * #case[1])
    end)
  end
end)
