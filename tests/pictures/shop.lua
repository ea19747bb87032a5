-- shop.lua: tables of an imaginary shop, for the picture of a plan: a few are too large for one GPU, some are small and
-- looked up often. { name, rows, columns, ids of a sample }
local of_shop = {
  { "users", 400e6, 128, 1 }, { "seen", 150e6, 128, 50 }, { "bought", 150e6, 128, 20 }, { "queries", 80e6, 64, 6 },
  { "reviews", 60e6, 64, 10 }, { "sellers", 6e6, 256, 1 }, { "pictures", 20e6, 256, 2 }, { "streets", 30e6, 64, 1 },
  { "phones", 2e6, 128, 1 }, { "brands", 5e5, 128, 4 }, { "cities", 2e5, 128, 1 }, { "words", 3e6, 128, 30 },
  { "tags", 1e6, 128, 12 }, { "shelves", 4e6, 64, 3 }, { "coupons", 8e6, 64, 2 }, { "categories", 3e4, 64, 10 },
  { "devices", 5000, 32, 1 }, { "hours", 168, 32, 1 },
}
local tables, constraints = {}, {}
for i, t in ipairs(of_shop) do
  tables[i] = { name = t[1], num_embeddings = t[2], embedding_dim = t[3], feature_names = { t[1] } }
  constraints[t[1]] = { pooling_factors = { t[4] } }
end
return { model = { tables = tables }, constraints = constraints }
