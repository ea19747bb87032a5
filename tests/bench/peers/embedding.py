"""embedding.py: PyTorch's and FBGEMM's CPU kernels on the ids that tests/bench/embed.lua wrote.

    python embedding.py --ids DIR --threads N [--runs N] [--forward]

DIR holds cases.json (a list of objects: name, batch, tables, rows, dim, length, sets, dtype) and <name>.ids: `sets` batches of i64 ids, each of
batch bags of `length` ids for table after table. The batches take turns. Prints one JSON object a line: case, what, peer, best_ms, median_ms; "skipped" with a reason where a peer cannot.
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


def say(case, what, peer, seconds=None, **more):
    line = {"case": case["name"], "what": what, "peer": peer, **more}
    if seconds:
        line["best_ms"] = min(seconds) * 1e3
        line["median_ms"] = statistics.median(seconds) * 1e3
    print(json.dumps(line), flush=True)


def attempt(case, what, peer, measure):
    """measure() -> {what: [seconds]}; a peer that refuses is reported, not hidden."""
    try:
        for name, seconds in measure().items():
            say(case, name, peer, seconds)
    except Exception as problem:  # whatever a peer raises is its answer
        say(case, what, peer, skipped=str(problem).split("\n")[0][:160])


def steps(sets, forward, backward, names, runs):
    """Times of forward(batch) and of backward(its result), apart: means over the batches, once a run."""
    times = {name: [] for name in names}
    for run in range(runs + 1):
        spent = [0, 0]
        for batch in sets:
            start = time.perf_counter()
            result = forward(batch)
            middle = time.perf_counter()
            if backward:
                backward(result)
            spent[0] += middle - start
            spent[1] += time.perf_counter() - middle
        for name, total in zip(names, spent):
            if run:
                times[name].append(total / len(sets))
    return times


class Fbgemm:
    def __init__(self):
        import fbgemm_gpu  # noqa: F401
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

        self.optimizers, self.types, self.place, self.sum = EmbOptimType, SparseType, EmbeddingLocation.HOST, PoolingMode.SUM
        self.cpu, self.training, self.inference = ComputeDevice.CPU, SplitTableBatchedEmbeddingBagsCodegen, IntNBitTableBatchedEmbeddingBagsCodegen

    def train(self, case, ids, optimizer, runs, forward):
        tables = [(case["rows"], case["dim"], self.place, self.cpu)] * case["tables"]
        batch = self.training(tables, optimizer=self.optimizers["EXACT_" + optimizer.upper()], learning_rate=0.01, eps=1e-8,
                              pooling_mode=self.sum, weights_precision=self.types[case["dtype"]])
        batch.init_embedding_weights_uniform(-0.01, 0.01)
        values = [torch.from_numpy(x) for x in ids]
        offsets = torch.arange(case["batch"] * case["tables"] + 1) * case["length"]
        grad = torch.randn(case["batch"], case["tables"] * case["dim"])
        if forward:
            return steps(values, lambda x: batch(x, offsets), None, ("forward",), runs)
        return steps(values, lambda x: batch(x, offsets), lambda out: out.backward(grad.to(out.dtype)), ("forward", "backward+" + optimizer), runs)

    def infer(self, case, ids, dtype, runs):
        tables = [(f"t{i}", case["rows"], case["dim"], self.types[dtype], self.place) for i in range(case["tables"])]
        batch = self.inference(tables, device="cpu", output_dtype=self.types["FP32"], pooling_mode=self.sum)
        batch.fill_random_weights()
        values = [torch.from_numpy(x.astype(numpy.int32)) for x in ids]
        offsets = (torch.arange(case["batch"] * case["tables"] + 1) * case["length"]).to(torch.int32)
        name = "forward " + ("f16" if dtype == "FP16" else dtype.lower())
        return steps(values, lambda x: batch(x, offsets), None, (name,), runs)


def embedding_bags(case, ids, runs, only_forward):
    """nn.EmbeddingBag with sparse gradients and torch.optim.SGD, a bag module for each table."""
    bags = [torch.nn.EmbeddingBag(case["rows"], case["dim"], mode="sum", sparse=True, include_last_offset=True) for _ in range(case["tables"])]
    values = [[torch.from_numpy(x) for x in batch.reshape(case["tables"], -1)] for batch in ids]
    offsets = torch.arange(case["batch"] + 1) * case["length"]
    optimizer = torch.optim.SGD([b.weight for b in bags], lr=0.01)
    grads = [torch.randn(case["batch"], case["dim"])] * case["tables"]

    def forward(batch):
        return [b(x, offsets) for b, x in zip(bags, batch)]

    def backward(outs):
        torch.autograd.backward(outs, grads)
        optimizer.step()
        optimizer.zero_grad()

    if only_forward:
        return steps(values, forward, None, ("forward",), runs)
    return steps(values, forward, backward, ("forward", "backward+sgd"), runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--forward", action="store_true", help="no backward passes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.setdefault("FBGEMM_TBE_MAX_NUM_THREADS", str(options.threads))  # its lookups of quantized tables go by these
    os.environ.setdefault("FBGEMM_TBE_MIN_TABLES_PER_THREAD", "1")
    try:
        fbgemm = Fbgemm()
    except ImportError as problem:
        fbgemm = None
        print(json.dumps({"peer": "FBGEMM", "skipped": str(problem)}), flush=True)
    with open(os.path.join(options.ids, "cases.json")) as file:
        cases = json.load(file)
    for case in cases:
        ids = numpy.fromfile(os.path.join(options.ids, case["name"] + ".ids"), dtype=numpy.int64).reshape(case["sets"], -1)
        runs = options.runs
        if fbgemm:
            for optimizer in ("sgd",) if options.forward else ("rowwise_adagrad", "sgd", "adagrad"):
                attempt(case, "backward+" + optimizer, "FBGEMM", lambda: fbgemm.train(case, ids, optimizer, runs, options.forward))
            if case["dtype"] == "FP32":
                for dtype in ("INT8", "FP16", "FP8", "INT4", "INT2"):
                    attempt(case, "forward " + dtype.lower(), "FBGEMM inference", lambda: fbgemm.infer(case, ids, dtype, runs))
        if case["dtype"] == "FP32":
            attempt(case, "forward", "nn.EmbeddingBag", lambda: embedding_bags(case, ids, runs, options.forward))


if __name__ == "__main__":
    main()
