-- What a step does with sparse operators compiles (style J2).
local peri = require "perilune"
local support = require "spec.support.jit"
local sparse = peri.sparse

for _, device in ipairs { "cpu", "opaque" } do
  describe("sparse operators, compiled on " .. device, function()
    local order = peri.tensor({ 2, 0, 1 }, "i64", device)
    local lengths = peri.tensor({ 1, 0, 2 }, "i32", device)
    local values = peri.tensor({ 7, 8, 7 }, "i64", device)
    local weights = peri.ones({ 3 }, "f32", device)
    local offsets = peri.tensor({ 0, 1, 1, 3 }, "i64", device)
    local matrix = peri.ones({ 2, 4 }, "f32", device)
    local format = sparse.quantize.format { codes = "int8" }
    local rows = sparse.quantize.rows(matrix, format)
    local mask, starts = peri.tensor({ 1, 0, 1 }, "bool", device), peri.tensor({ 0, 0, 1 }, "i64", device)
    local pairs_, ends = peri.full({ 3, 2 }, -1, "i64", device), peri.tensor({ 0, 3 }, "i64", device)
    local unary = peri.ones({ 2, 3 }, "f32", device)
    local levels, sizes = { offsets }, { 2 }

    local hot = {
      { "a cumulative sum", function() sparse.asynchronous_complete_cumsum(lengths):release() end },
      { "permute", function()
        local l, v, w = sparse.permute_1D_sparse_data(order, lengths, values, weights)
        l:release()
        v:release()
        w:release()
      end },
      { "jagged_index_select", function()
        local v, l = sparse.jagged_index_select(values, lengths, order)
        v:release()
        l:release()
      end },
      { "index_select_dim0", function() sparse.index_select_dim0(matrix, offsets:slice(1, 0, 2)):release() end },
      { "invert_permute", function() sparse.invert_permute(order):release() end },
      { "offsets_range", function() sparse.offsets_range(order:slice(1, 1, 2), 3):release() end },
      { "lengths_range", function() sparse.lengths_range(lengths):release() end },
      { "segment_sum_csr", function() sparse.segment_sum_csr(1, offsets, weights):release() end },
      { "unique", function()
        local u, i, c = sparse.unique(values, true, true)
        u:release()
        i:release()
        c:release()
      end },
      { "jagged_to_padded_dense", function() sparse.jagged_to_padded_dense(weights, levels, sizes):release() end },
      { "masked_select_jagged_1d", function()
        local v, l = sparse.masked_select_jagged_1d(weights, lengths, mask)
        v:release()
        l:release()
      end },
      { "jagged_slice", function()
        local v, l = sparse.jagged_slice(weights, lengths, starts, 1)
        v:release()
        l:release()
      end },
      { "pruned_array_lookup", function() sparse.pruned_array_lookup(order, offsets, order, ends):release() end },
      { "pruned_hashmap_lookup", function() sparse.pruned_hashmap_lookup(order, offsets, pairs_, ends):release() end },
      { "batched_unary_embeddings", function()
        sparse.batched_unary_embeddings(unary, ends, offsets, order):release()
      end }, { "jagged_acc_weights_and_counts",
        function() sparse.jagged_acc_weights_and_counts(weights, order, 3):release() end },
      { "murmur_hash3", function() sparse.murmur_hash3(order, 0, 0):release() end },
      { "quantize.rows", function() sparse.quantize.rows(matrix, format):release() end },
      { "quantize.restore", function() sparse.quantize.restore(rows, format, 4):release() end },
    }
    for _, case in ipairs(hot) do
      it(case[1], function() support.assert_compiles(case[1], case[2]) end)
    end
  end)
end
