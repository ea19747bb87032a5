-- The page at / of `perilune serve`, in a headless Chromium: it asks the server when it opens, shows the answer to what
-- stands in its fields, complains beside the field that is wrong, and fits into the windows of a desk and of a phone.
-- takes: 6 s, most of them the browser's
local json = require "dkjson"
local peri = require "perilune"
local serving = require "spec.support.serving"
local shell = require "spec.support.shell"
local nn = peri.nn

local LONG = "a_feature_whose_name_does_not_fit_into_any_column_of_the_page_however_wide_it_is_made"

local function export(path)
  local tables = {}
  for i, feature in ipairs { "shop", LONG } do
    tables[i] = peri.EmbeddingBagConfig { name = "t" .. i, num_embeddings = 40 * i, embedding_dim = 4,
      feature_names = { feature } }
  end
  local model = nn.DLRM { embedding_bag_collection = peri.EmbeddingBagCollection { tables = tables },
    dense_in_features = 13, dense_arch_layer_sizes = { 4 }, over_arch_layer_sizes = { 4, 1 } }
  local values, lengths = {}, {}
  for i = 1, 24 do values[i], lengths[i] = i, 1 end
  model:export(path, { name = "asked by hand", finite = false, allowed_difference = 1,
    call = function(m, b) return m(b.dense_features, b.sparse_features) end,
    batches = { { dense_features = peri.Tensor.uniform({ 12, 13 }, -1, 1, 1),
      sparse_features = peri.KeyedJaggedTensor { keys = { "shop", LONG }, values = values, lengths = lengths } } } })
end

-- In place of the page's own fetch, which a page of a file may not use: what the server said, and what it was asked.
local before = [[<script>
const said = %s, asked = [];
window.fetch = async (where, how) => {
  asked.push(how ? how.body : where);
  const bad = how && how.body.includes('"shop":[77]'), text = bad ? said.bad : how ? said.answer : said[where];
  return { ok: !bad, headers: new Map(), text: async () => text, json: async () => JSON.parse(text) };
};
</script>]]

local after = [[<script>
window.addEventListener("load", () => setTimeout(async () => {
  const page = document.documentElement, found = { wide: [] };
  const wide = when => { if (page.scrollWidth > page.clientWidth) found.wide.push(when + ": " + page.scrollWidth); };
  const shop = at("form").elements.namedItem("shop");
  wide("an answer");
  shop.value = "77";
  await ask();
  wide("a complaint");
  found.complaint = shop.nextSibling.textContent;
  found.marked = shop.className + " " + (document.activeElement === shop);
  shop.value = "1; 2";
  await ask();
  found.unreadable = shop.nextSibling.textContent;
  found.asked = asked.length;
  draw();
  await ask();
  found.calm = at("error").textContent + shop.className;
  found.answer = at("outputs").textContent;
  document.body.innerHTML = "<pre>BEGIN" + JSON.stringify(found).replace(/</g, " ") + "END</pre>";
}, 50));
</script>]]

describe("the page at /", function()
  local browser, missing = shell.browser()
  missing = serving.missing() or missing
  if missing then return it("is shown by a browser", function() pending(missing) end) end

  local folder, clean, server
  setup(function()
    folder, clean = shell.temporary()
    export(folder .. "/m.peri")
    server = serving.start(folder .. "/m.peri")
  end)
  teardown(function()
    server:stop()
    clean()
  end)

  local function dump(url, width)
    return (shell.run(("%s --user-data-dir=%s/profile --virtual-time-budget=3000 "
      .. "--window-size=%d,800 --dump-dom '%s' 2>/dev/null"):format(browser, folder, width, url)))
  end

  it("shows an answer when it opens: that of the command that it shows", function()
    local page = dump(server.url, 1000)
    local names = { ["&amp;"] = "&", ["&lt;"] = "<", ["&gt;"] = ">", ["&nbsp;"] = " " }
    local command = page:match '<pre id="shell">(.-)</pre>':gsub("&%a+;", names)
    assert.matches("^curl http", command)
    local answer = json.decode((serving.run((command:gsub("^curl", "curl -s"))))).predictions[1]
    assert.equal("number", type(answer))
    assert.matches("logits</td><td>([^<]*)</td>", page)
    assert.equal(answer, tonumber(page:match "logits</td><td>([^<]*)</td>"))
    assert.matches('id="error" class="bad" role="alert"></p>', page, 1, true)
    assert.matches("ids 0 to 79", page, 1, true)
    assert.matches("13 numbers", page, 1, true)
    assert.matches("ready, the model is", page, 1, true)
    assert.matches("<title>asked by hand - perilune serve</title>", page, 1, true)
    assert.matches("computed [%d.]+ ms", page)
  end)

  for name, width in pairs { desk = 1280, phone = 500 } do
    it("fits into the window of a " .. name .. ", and complains beside the field", function()
      local where = "v1/models/asked%20by%20hand:predict"
      local list = ("0,"):rep(12) .. "0"
      local function ask(id)
        return server:post(where, ('{"instances":[{"dense_features":[%s],"shop":[%d],"%s":[1]}]}'):format(list, id,
          LONG))
      end
      local said = { ["/v2"] = server:get "v2", ["/health"] = server:get "health",
        ["/v2/models/asked%20by%20hand"] = server:get "v2/models/asked%20by%20hand", answer = ask(1), bad = ask(77) }
      local stand_in = before:format((json.encode(said):gsub("</", "<\\/")))
      local page = server:get "":gsub("<script>", function() return stand_in .. "<script>" end, 1)
      page = page:gsub("</body>", function() return after .. "</body>" end)
      shell.write(folder .. "/page.html", page)
      local out = dump(("file://%s/page.html"):format(folder), width)
      local found = json.decode(out:match "BEGIN(.*)END" or error(out))
      assert.same({}, found.wide)
      assert.equal(json.decode(said.bad).error, found.complaint)
      assert.matches("id 77, allowed: 0 to 39", found.complaint, 1, true)
      assert.equal("bad true", found.marked)
      assert.equal("feature 'shop': 1; 2, wanted: numbers with commas between them", found.unreadable)
      assert.equal(5, found.asked) -- three and an answer when it opened, a complaint; what cannot be read is not sent
      assert.equal("", found.calm)
      assert.matches(tostring(json.decode(said.answer).predictions[1]):sub(1, 6), found.answer, 1, true)
    end)
  end
end)
