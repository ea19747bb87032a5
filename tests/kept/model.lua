-- model.lua: writes a model file as this version makes them, and prints what it answers: build/perilune run
-- tests/kept/model.lua FILE model-1.peri was written so by the version that has the first format;
-- spec/export_kept_spec.lua has its answers.
local peri = require "perilune"
peri.init()
local nn, F, embed = peri.nn, peri.nn.functional, peri.embed

local Model = nn.Module:extend "Model"
function Model:init()
  local function table_of(Config, name, rows, dim, features, pooling)
    return Config { name = name, num_embeddings = rows, embedding_dim = dim, feature_names = features,
      pooling = pooling }
  end
  local Bags = peri.EmbeddingBagConfig
  self.bags = peri.EmbeddingBagCollection { seed = 1, is_weighted = true,
    tables = { table_of(Bags, "items", 9, 4, { "item", "other" }, "SUM"),
      table_of(Bags, "tags", 7, 4, { "tag" }, "MEAN") } }
  self.rows = peri.EmbeddingCollection { seed = 2,
    tables = { table_of(peri.EmbeddingConfig, "clicks", 8, 4, { "clicked" }) } }
  local raw = { table_of(Bags, "users", 8, 4, { "user" }, "SUM"), table_of(Bags, "pages", 8, 4, { "page" }, "SUM") }
  self.raw = peri.ManagedCollisionEmbeddingBagCollection {
    embedding_bag_collection = peri.EmbeddingBagCollection { seed = 3, tables = raw,
      fused_params = { optimizer = "sgd", learning_rate = 0.1 } },
    managed_collision_collection = peri.ManagedCollisionCollection { embedding_configs = raw,
      managed_collision_modules = {
      users = peri.MCHManagedCollisionModule { zch_size = 8, buckets = 2, eviction_interval = 1,
        eviction_policy = embed.LFU_EvictionPolicy {} },
      pages = peri.HashZchManagedCollisionModule { zch_size = 8, total_num_buckets = 2, spread = "modulo" } } } }
  self.under, self.cross = nn.Linear { in_features = 3, out_features = 4 },
    nn.CrossNet { in_features = 4, num_layers = 1 }
  self.norm, self.over = nn.LayerNorm { normalized_shape = 4 }, nn.Linear { in_features = 27, out_features = 2 }
  self.slope = nn.PReLU { num_parameters = 4 }
end
function Model:forward(b)
  local dense = F.relu(self.under(b.dense))
  local bags, raw, clicked = self.bags(b.weighted):values(), self.raw(b.raw):values(),
    peri.util.resolve(self.rows(b.plain)).clicked
  local clicks = clicked:to_padded_dense(3, 0.5)
  local scores = F.bmm(clicks, raw:slice(2, 0, 4):reshape(-1, 4, 1)):reshape(-1, 3)
  local features = F.cat({ bags, raw }, 2):reshape(-1, 5, 4)
  local pairs = self.over(F.cat({ F.interaction(dense, features), scores, self.slope(self.cross(dense)),
    clicked:lengths():to "f32":reshape(-1, 1) * 0.25 }, 2))
  return { pairs = pairs, norm = self.norm(dense + F.sum(features, 2) / 5 - 0.25) }
end

local function kjt(keys, lengths, values, weights)
  return peri.KeyedJaggedTensor { keys = keys, lengths = lengths, values = peri.tensor(values, "i64"),
    weights = weights and peri.tensor(weights) or nil }
end
local function batch(n, seed)
  local x = seed
  local function draw(most)
    x = (x * 1103515245 + 12345) % 2 ^ 31
    return math.floor(x / 2 ^ 16) % most
  end
  local function lists(keys, rows, scale)
    local lengths, values, weights = {}, {}, {}
    for i = 1, #keys * n do
      lengths[i] = draw(4)
      for _ = 1, lengths[i] do values[#values + 1], weights[#weights + 1] = scale * draw(rows), draw(8) / 4 end
    end
    return lengths, values, weights
  end
  local dense = {}
  for i = 1, n do dense[i] = { draw(64) / 32 - 1, draw(64) / 32 - 1, draw(64) / 32 - 1 } end
  local wl, wv, ww = lists({ "item", "other", "tag" }, 7, 1)
  local pl, pv = lists({ "clicked" }, 8, 1)
  local rl, rv = lists({ "user", "page" }, 12, 0x9e3779b97f4a7c1LL)
  return { dense = peri.tensor(dense), weighted = kjt({ "item", "other", "tag" }, wl, wv, ww),
    plain = kjt({ "clicked" }, pl, pv), raw = kjt({ "user", "page" }, rl, rv) }
end

if arg and (arg[1] or ""):match "%.peri$" then
  nn.manual_seed(11)
  local model = Model()
  for i = 1, 4 do model(batch(6, i)).pairs:sum():backward() end
  print(model:export(arg[1],
    { batches = { batch(20, 9) }, tables = { default = "f32", items = "int8", users = "f16", clicks = "int4" },
      allowed_difference = 1, name = "kept", step = 4 }))
  for name, t in peri.util.ordered(peri.export.open(arg[1]):predict(batch(4, 99))) do
    local numbers, n = t:read()
    local list = {}
    for i = 0, n - 1 do list[i + 1] = ("%.9g"):format(numbers[i]) end
    print(("    %s = { %s },"):format(name, table.concat(list, ", ")))
  end
end

return batch
