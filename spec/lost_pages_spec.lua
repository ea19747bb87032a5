-- Pages of a mapped model file that cannot be read for a while (EIO of a disk, a network that went away), by
-- spec/support/lost_pages.c: nobody is answered with zeros in their place, and what follows a run, or serves, goes on
-- by itself when they can be read again.
-- takes: 5 s, mostly waits
local peri = require "perilune"
local shell = require "spec.support.shell"
local serving = require "spec.support.serving"

describe("pages of a model file that cannot be read", function()
  local folder, clean = shell.temporary()
  local compile, why = shell.preloaded(folder, "lost_pages")
  teardown(clean)
  if not compile then return pending(why) end
  local lost
  setup(function() lost = compile() end)

  it("never are zeros in what a follower answers, and it comes to the newest step by itself", function()
    local env, refused = shell.luajit_env(), 0
    env.LD_PRELOAD = lost
    for seed = 1, 4 do
      local of = ("%s/%d"):format(folder, seed)
      os.execute("mkdir " .. of)
      local out, status = shell.run(("luajit spec/support/lost_pages.lua %s %d"):format(of, seed), env)
      assert.equal(0, status, ("seed %d: %s"):format(seed, out))
      local right, wrong = out:match "right (%d+), refused (%d+)"
      assert.is_true(tonumber(right) > 2)
      refused = refused + tonumber(wrong)
    end
    assert.is_true(refused > 0)
  end)

  it("make a server refuse what needs them, until they can be read", function()
    if serving.missing() or shell.no_launcher() then return pending(serving.missing() or shell.no_launcher()) end
    local path, says = folder .. "/served.peri", folder .. "/lost_page"
    local page = tonumber((shell.run "getconf PAGESIZE")) -- 4 KiB, or (ARM) 64
    local far = page / 2 + 100 -- a row in page 8 of the file: rows have 16 bytes
    local model = peri.nn.ModuleDict { ebc = peri.EmbeddingBagCollection { tables = { peri.EmbeddingBagConfig {
      name = "t", num_embeddings = page, embedding_dim = 4, feature_names = { "id" },
      init_fn = peri.embed.constant(7) } } } }
    local ids, ones = {}, {}
    for i = 1, 12 do ids[i], ones[i] = i, 1 end
    local batch = { ids = peri.KeyedJaggedTensor { keys = { "id" }, values = ids, lengths = ones } }
    model:export(path, { batches = { batch }, name = "m", call = function(m, b) return m.ebc(b.ids):values() end })
    for _, options in ipairs { "", "--follow " .. folder .. "/none" } do
      shell.write(says, "8")
      local server = serving.start(path, "--watch 20ms " .. options, ("LD_PRELOAD=%s LOST_PAGE=%s"):format(lost, says))
      local function ask(id) return server:post("v1/models/m:predict", ('{"instances":[{"id":%d}]}'):format(id)) end
      assert.matches("[7,7,7,7]", ask(10), 1, true)
      local refusal = ask(far)
      assert.matches('"error":".*served.peri.* could not be read', refusal)
      for _ = 1, 5 do
        local health = server:get "health"
        assert.is_true(health:find('"note":"', 1, true) ~= nil or health:find('"ready":true', 1, true) ~= nil, health)
        assert.matches('"error"', ask(far), 1, true)
        os.execute "sleep 0.02"
      end
      os.remove(says)
      local answer
      for _ = 1, 100 do
        answer = ask(far)
        if not answer:find("error", 1, true) then break end
        os.execute "sleep 0.02"
      end
      assert.matches("[7,7,7,7]", answer, 1, true)
      server:stop()
    end
  end)
end)
