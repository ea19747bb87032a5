-- retrieval.lua: Retrieval: the items with the largest products.
--
-- The last step of two-tower models: a query's vector is compared with the vectors of all items. N is the number of
-- items, Q that of queries, D the length of a vector.
---@meta

---@class peri.sparse
local sparse = {}

---For each query the `k` items with the largest products, the largest first; of equal ones the item with the smaller
---number comes first. All items are looked at; nothing of size Q x N is made. A query's answer has the same bits beside
---any other queries. A product that is NaN counts as -infinity. There is no gradient.
---
---Errors: items and queries of other lengths or on different devices; a `k` above N or 2048, or below 1; rows of codes
---without their format.
---
---```lua
---local queries, items = peri.tensor { { 1, 0 }, { 0, 1 } },
---  peri.tensor { { 3, 0 }, { 1, 1 }, { 0, 2 }, { 2, 1 } }
---local scores, which = peri.sparse.top_products(queries, items, 2)
---print(table.concat(which:to_list(), " "), table.concat(scores:to_list(), " "))
-----> 0 3 2 1 3 2 2 1
---```
---@param queries peri.Tensor Vectors `[Q, D]` of f32, f16 or bf16.
---@param items peri.Tensor Vectors `[N, D]` of f32, f16 or bf16; with `format` rows of codes, u8 `[N, bytes of a row]`.
---@param k integer How many items of each query: 1 to N, at most 2048.
---@param format? userdata What the codes are: of `peri.sparse.quantize.format` (default: the items are numbers).
---@return peri.Tensor # The products: f32 `[Q, k]`.
---@return peri.Tensor # The items' numbers: i64 `[Q, k]`.
function sparse.top_products(queries, items, k, format) end
