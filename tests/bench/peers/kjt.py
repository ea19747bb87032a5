"""kjt.py: TorchRec's KJTAllToAll on CPU (gloo), in turns with ours as tests/bench/comm.lua measures it.

    python kjt.py --perilune build/perilune [--ids 1 20] [--ranks 2] [--rounds 3] [--out build/bench/comm.jsonl]

Needs torch, torchrec and fbgemm_gpu (the CPU build). 26 features, batch 2,048 a rank, three batches that take turns;
the time of an exchange is that of its slowest rank, one thread a rank. Each round runs both sides once; what is compared are the medians of
the rounds' medians. Prints a line for each side, and appends one JSON object each to --out: op, peer, ids, ranks, median_ms, best_ms,
ratio (to ours).
"""
import json
import statistics
import subprocess
import time

import turns

KEYS, BATCH, ROWS, EXCHANGES = 26, 2048, 1_000_000, 60


def exchange(rank, ids, ranks, port, answer):
    turns.join(rank, ranks, port)
    import torch
    from torchrec.distributed.dist_data import KJTAllToAll
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    names = [f"f{i}" for i in range(KEYS)]
    generator = torch.Generator().manual_seed(rank)
    batches = [KeyedJaggedTensor.from_lengths_sync(names, torch.randint(0, ROWS, (KEYS * BATCH * ids,), generator=generator),
                                                   torch.full((KEYS * BATCH,), ids, dtype=torch.int32)) for _ in range(3)]
    dist = KJTAllToAll(torch.distributed.GroupMember.WORLD, [KEYS // ranks + (r < KEYS % ranks) for r in range(ranks)])
    times = []
    for i in range(EXCHANGES + 3):
        torch.distributed.barrier()
        begin = time.perf_counter()
        dist(batches[i % 3]).wait().wait()
        times.append((time.perf_counter() - begin) * 1e3)
    slowest = torch.tensor(times[3:])
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
    turns.leave(rank, answer, {"median_ms": statistics.median(slowest.tolist()), "best_ms": min(slowest.tolist())})


def run_ours(ids, ranks, path, launcher):
    command = [launcher, "run", "-n", str(ranks), "tests/bench/comm.lua", "--ops", "kjt_all_to_all", "--no-overlap", "--out", path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with open(path) as file:
        line = next(x for x in map(json.loads, file) if x["op"] == "kjt_all_to_all" and x["ids"] == ids)
    return {"median_ms": line["own_us"] / 1e3, "best_ms": line["best_us"] / 1e3}


def main():
    args = turns.arguments(__doc__, "--exchange")
    if args.once:
        return turns.spawn(exchange, args)

    def describe(name, ids, line, runs):
        line["op"] = "kjt_all_to_all"
        return f"kjt_all_to_all, {args.ranks} ranks, {ids:2} ids: {name}: {line['median_ms']:7.2f} ms (best {line['best_ms']:.2f})"

    turns.compare(args, {"TorchRec": lambda ids, path: turns.torchrec(__file__, "--exchange", ids, args.ranks, path),
                         "Perilune": lambda ids, path: run_ours(ids, args.ranks, path, args.perilune)}, describe)


if __name__ == "__main__":
    main()
