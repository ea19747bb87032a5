"""serve.py: a DLRM of the shape that tests/bench/serve.lua serves, in PyTorch: tables in FBGEMM's IntNBitTableBatchedEmbeddingBagsCodegen, products by
torch, one thread, inference mode, no server. Prints a JSON object for each number of samples: dtype, samples, p50_us, p99_us, samples_per_s.

    python serve.py --rows N --dtype int8 --batches 1,16,256 --seconds S [--dense f32|bf16|int8]

The interaction is torchrec's: a product of the vectors with each other, and its lower triangle. With --compile the dense part goes through
torch.compile first. --dense bf16: parameters and inputs of the dense part are bf16; int8: its Linear layers are dynamically quantized
(torch.ao.quantization), so that products are of int8.
"""
import argparse
import json
import time
import warnings

import torch

warnings.filterwarnings("ignore")
TABLES, COLUMNS, DENSE, SETS = 26, 64, 13, 64
BOTTOM, TOP = (512, 256, COLUMNS), (512, 512, 256, 1)


def layers(inputs, sizes, last):
    list_ = []
    for i, n in enumerate(sizes):
        list_.append(torch.nn.Linear(inputs, n))
        if last or i + 1 < len(sizes):
            list_.append(torch.nn.ReLU())
        inputs = n
    return torch.nn.Sequential(*list_)


class Dense(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = layers(DENSE, BOTTOM, True)
        pairs = TABLES * (TABLES + 1) // 2
        self.top = layers(COLUMNS + pairs, TOP, False)
        rows, cols = torch.tril_indices(TABLES + 1, TABLES + 1, offset=-1)
        self.register_buffer("at", rows * (TABLES + 1) + cols)

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        vectors = torch.cat([x.unsqueeze(1), sparse.view(-1, TABLES, COLUMNS)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, products.index_select(1, self.at)], dim=1))


def tables_of(rows, dtype):
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

    kind = {"f32": SparseType.FP32, "f16": SparseType.FP16, "int8": SparseType.INT8, "int4": SparseType.INT4}[dtype]
    specs = [(f"t{i}", rows, COLUMNS, kind, EmbeddingLocation.HOST) for i in range(TABLES)]
    tables = IntNBitTableBatchedEmbeddingBagsCodegen(specs, device="cpu", output_dtype=SparseType.FP32, pooling_mode=PoolingMode.SUM)
    tables.fill_random_weights()
    return tables


def measure(tables, dense, options, n):
    sets = [(torch.rand(n, DENSE), torch.randint(0, options.rows, (n * TABLES,), dtype=torch.int32)) for _ in range(SETS)]
    offsets = torch.arange(n * TABLES + 1, dtype=torch.int32)

    def call(i):
        numbers, ids = sets[i % SETS]
        vectors = tables(ids, offsets)
        return dense(numbers.bfloat16(), vectors.bfloat16()) if options.dense == "bf16" else dense(numbers, vectors)

    for i in range(SETS):
        call(i)
    times, till = [], time.perf_counter() + options.seconds
    while time.perf_counter() < till or len(times) < SETS:
        start = time.perf_counter()
        call(len(times))
        times.append(time.perf_counter() - start)
    total = sum(times)
    times.sort()
    m = len(times)
    return {"peer": "PyTorch and FBGEMM" + ("" if options.dense == "f32" else f", {options.dense}")
            + (", compiled" if options.compile else ""), "dtype": options.dtype, "samples": n,
            "p50_us": times[m // 2] * 1e6, "p99_us": times[min(m - 1, m * 99 // 100)] * 1e6, "samples_per_s": n * m / total}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--batches", required=True)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--dense", choices=["f32", "bf16", "int8"], default="f32")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        tables, dense = tables_of(options.rows, options.dtype), Dense()
        if options.dense == "bf16":
            dense = dense.bfloat16()
        elif options.dense == "int8":
            dense = torch.ao.quantization.quantize_dynamic(dense, {torch.nn.Linear}, dtype=torch.qint8)
        if options.compile:
            dense = torch.compile(dense)
        for n in options.batches.split(","):
            print(json.dumps(measure(tables, dense, options, int(n))), flush=True)


main()
