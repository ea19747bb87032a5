"""sparse.py: PyTorch's and FBGEMM's CPU sparse operators on the numbers that tests/bench/sparse.lua wrote.

    python sparse.py --folder DIR --threads N [--runs N]

DIR holds case.json (features, batch, rows, dim, only) and raw arrays by name. Prints one JSON object a line: case (sparse.lua's name), what (the
peer), best_ms, median_ms; "skipped" with a reason where a peer cannot.
"""
import argparse
import json
import os
import statistics
import time
import warnings

import numpy
import torch

warnings.filterwarnings("ignore")


def seconds(f, runs):
    f()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return times


def cases(c, load):
    """(case, peer, function) for everything that sparse.lua measures under the same name."""
    fb = torch.ops.fbgemm
    lengths, ids, weights = load("lengths", numpy.int32), load("ids", numpy.int64), load("weights", numpy.float32)
    square, order = lengths.view(c["features"], c["batch"]), load("order", numpy.int32)
    offsets, chosen = load("offsets", numpy.int64), load("chosen", numpy.int64)
    matrix = load("matrix", numpy.float32).view(c["batch"], c["dim"])
    rows16 = load("rows16", numpy.float32).view(-1, 16)
    floats, shuffled, permutation = load("floats", numpy.float32), load("shuffled", numpy.int32), load("permutation", numpy.int64)
    n, bags = ids.numel(), lengths.numel()
    yield "copy of the ids", "PyTorch", lambda: ids.clone()
    yield "cumsum", "FBGEMM", lambda: fb.asynchronous_complete_cumsum(lengths)
    yield "permute_2D", "FBGEMM", lambda: fb.permute_2D_sparse_data(order, square, ids, None, n)
    yield "permute_2D weighted", "FBGEMM", lambda: fb.permute_2D_sparse_data(order, square, ids, weights, n)
    yield "permute_1D", "FBGEMM", lambda: fb.permute_1D_sparse_data(shuffled, lengths, ids)
    yield "jagged_index_select D16", "FBGEMM", lambda: fb.jagged_index_select(rows16, lengths.long(), chosen)
    for p in (2, 8, 16):
        blocks = torch.full((c["features"],), -(-c["rows"] // p), dtype=torch.int64)
        for sequence in (False, True):
            yield (f"bucketize {p}" + (" sequence" if sequence else ""), "FBGEMM",
                   lambda blocks=blocks, p=p, s=sequence: fb.block_bucketize_sparse_features(lengths.long(), ids, False, s, blocks, p))
    for name, file in (("uniform", "ids"), ("skewed", "skewed"), ("62 bits", "wide")):
        x = load(file, numpy.int64)
        yield f"unique {name}", "PyTorch", lambda x=x: torch.unique(x, sorted=True, return_inverse=True)
        yield f"unique {name} counts", "PyTorch", lambda x=x: torch.unique(x, sorted=True, return_inverse=True, return_counts=True)
    bounds, new_bounds, wide_order = load("bounds", numpy.int64), load("new_bounds", numpy.int64), order.long()
    yield "expand_into_jagged_permute", "FBGEMM", lambda: fb.expand_into_jagged_permute(wide_order, bounds, new_bounds, n)
    yield "offsets_range", "FBGEMM", lambda: fb.offsets_range(offsets[:-1], n)
    yield "invert_permute", "FBGEMM", lambda: fb.invert_permute(permutation)
    yield "segment_sum_csr", "FBGEMM", lambda: fb.segment_sum_csr(1, offsets, floats)
    yield "jagged_1d_to_dense", "FBGEMM", lambda: fb.jagged_1d_to_dense(ids, offsets, 40, 0)
    yield "jagged_2d_to_dense D16", "FBGEMM", lambda: fb.jagged_2d_to_dense(rows16, offsets, 40)
    padded = fb.jagged_2d_to_dense(rows16, offsets, 40)
    yield "dense_to_jagged D16", "FBGEMM", lambda: fb.dense_to_jagged(padded, [offsets], n)
    dims = torch.arange(27) * 64
    turned = torch.tensor([i * 7 % 26 for i in range(1, 27)])
    back = torch.argsort(turned)
    yield "permute_pooled_embs", "FBGEMM", lambda: fb.permute_pooled_embs(matrix, dims, turned, dims, back)
    small, bag_bounds, one_table = ids.int(), torch.tensor([0, n], dtype=torch.int32), torch.tensor([0, c["rows"]])
    remapping, hash_table = load("remapping", numpy.int32), load("hash_table", numpy.int32).view(-1, 2)
    yield "pruned_array_lookup", "FBGEMM", lambda: fb.pruned_array_lookup(small, bag_bounds, remapping, one_table)
    yield "pruned_hashmap_lookup", "FBGEMM", lambda: fb.pruned_hashmap_lookup(small, bag_bounds, hash_table, one_table)
    mask, wide_lengths, starts = load("mask", numpy.bool_), lengths.long(), torch.zeros(bags, dtype=torch.int64)
    yield "masked_select_jagged_1d", "FBGEMM", lambda: fb.masked_select_jagged_1d(floats, wide_lengths, mask)
    yield "jagged_slice", "FBGEMM", lambda: fb.jagged_slice(floats, wide_lengths, starts, 10)
    reverse, unary_weight = load("reverse", numpy.int64), load("unary_weight", numpy.float32).view(3, -1)
    yield ("jagged_acc_weights_and_counts", "FBGEMM",
           lambda: fb.jagged_acc_weights_and_counts(weights, reverse, c["rows"]))
    yield "batched_unary_embeddings", "FBGEMM", lambda: fb.batched_unary_embeddings(unary_weight, one_table, offsets, ids)
    logits = load("logits", numpy.float32)
    examples, positives = torch.full((5000,), 100.0, dtype=torch.float64), torch.full((5000,), 30.0, dtype=torch.float64)
    yield ("histogram_binning_calibration", "FBGEMM",
           lambda: fb.histogram_binning_calibration(logits, examples, positives, 0.4, 0.0, 1.0, 10, 0.9995))
    flat, chosen_rows, eighth = matrix.view(-1), load("chosen_rows", numpy.int64), [c["batch"]] * 8
    yield ("batch_index_select_dim0", "FBGEMM",
           lambda: fb.batch_index_select_dim0(flat, chosen_rows, eighth, eighth, [c["dim"] // 8] * 8, False))
    eight = fb.FloatToFused8BitRowwiseQuantized(matrix)
    yield "quantize int8", "FBGEMM", lambda: fb.FloatToFused8BitRowwiseQuantized(matrix)
    yield "restore int8", "FBGEMM", lambda: fb.Fused8BitRowwiseQuantizedToFloat(eight)
    for name, bits in (("int8 f16 scale", 8), ("int4", 4), ("int2", 2)):
        rows = fb.FloatToFusedNBitRowwiseQuantizedSBHalf(matrix, bits)
        yield f"quantize {name}", "FBGEMM", lambda bits=bits: fb.FloatToFusedNBitRowwiseQuantizedSBHalf(matrix, bits)
        yield f"restore {name}", "FBGEMM", lambda rows=rows, bits=bits: fb.FusedNBitRowwiseQuantizedSBHalfToFloat(rows, bits)
    codes = fb.FloatToHFP8Quantized(matrix, 4, 7, 240.0)
    yield "quantize fp8", "FBGEMM", lambda: fb.FloatToHFP8Quantized(matrix, 4, 7, 240.0)
    yield "restore fp8", "FBGEMM", lambda: fb.HFP8QuantizedToFloat(codes, 4, 7)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    import fbgemm_gpu  # noqa: F401
    import fbgemm_gpu.sparse_ops  # noqa: F401

    with open(os.path.join(options.folder, "case.json")) as file:
        c = json.load(file)

    def load(name, dtype):
        return torch.from_numpy(numpy.fromfile(os.path.join(options.folder, name), dtype))

    for name, peer, f in cases(c, load):
        if c["only"] not in name:
            continue
        try:
            times = seconds(f, options.runs)
            line = {"best_ms": min(times) * 1e3, "median_ms": statistics.median(times) * 1e3}
        except Exception as problem:  # whatever a peer raises is its answer
            line = {"skipped": str(problem).split("\n")[0][:160]}
        print(json.dumps({"case": name, "what": peer, **line}), flush=True)


main()
