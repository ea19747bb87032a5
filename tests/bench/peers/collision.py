"""collision.py: TorchRec's MCHManagedCollisionModule on the CPU, on the ids and the map that tests/bench/collision.lua wrote.

    python collision.py --folder DIR --rows N --threads N [--runs N]

DIR holds the raw i64 arrays known (the ids of the map) and batch. Prints one JSON object: case, what, best_ms, median_ms.
"""
import argparse
import json
import logging
import statistics
import time
import warnings

import numpy
import torch

warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule
    from torchrec.sparse.jagged_tensor import JaggedTensor

    known, batch = (torch.from_numpy(numpy.fromfile(f"{args.folder}/{name}", numpy.int64)) for name in ("known", "batch"))
    module = MCHManagedCollisionModule(zch_size=args.rows, device=torch.device("cpu"), eviction_policy=LFU_EvictionPolicy(),
                                       eviction_interval=args.runs + 3)
    module._mch_sorted_raw_ids[: known.numel()] = known.sort().values
    module._mch_counts[: known.numel()] = 1
    features = {"f": JaggedTensor(values=batch, lengths=torch.ones(batch.numel(), dtype=torch.int64))}
    module.train()
    times = []
    for run in range(args.runs + 1):
        start = time.perf_counter()
        out = module(features)
        if run > 0:
            times.append(1e3 * (time.perf_counter() - start))
    missed = int((out["f"].values() == args.rows - 1).sum())
    print(json.dumps({"case": "hits", "what": "TorchRec", "best_ms": min(times), "median_ms": statistics.median(times), "missed": missed}))


main()
