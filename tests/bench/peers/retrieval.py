"""retrieval.py: exact retrieval by PyTorch, and by faiss where it is installed, of the numbers that tests/bench/retrieval.lua wrote.

    python retrieval.py --folder DIR --threads N --dim D -k K --runs N

Prints one JSON object a line: case, what (the peer), queries, best_ms, median_ms.
"""
import argparse
import json
import os
import statistics
import time

import numpy
import torch

parser = argparse.ArgumentParser()
for name in ("--folder", "--threads", "--dim", "-k", "--runs"):
    parser.add_argument(name, required=True, type=str if name == "--folder" else int)
options = parser.parse_args()
torch.set_num_threads(options.threads)


def load(name):
    return numpy.fromfile(os.path.join(options.folder, name), numpy.float32).reshape(-1, options.dim)


items, queries = load("items"), load("queries")
peers = {"PyTorch": lambda q, x=torch.from_numpy(items): torch.topk(torch.from_numpy(q) @ x.T, options.k)}
try:
    import faiss

    faiss.omp_set_num_threads(options.threads)
    index = faiss.IndexFlatIP(options.dim)
    index.add(items)
    peers["faiss"] = lambda q: index.search(q, options.k)
except ImportError:
    pass
for what, f in peers.items():
    for n in (1, 16, 256):
        times = []
        for _ in range(options.runs + 1):
            start = time.perf_counter()
            f(queries[:n])
            times.append(1e3 * (time.perf_counter() - start))
        print(json.dumps({"case": "top_products", "what": what, "queries": n, "best_ms": min(times[1:]),
                          "median_ms": statistics.median(times[1:])}), flush=True)
