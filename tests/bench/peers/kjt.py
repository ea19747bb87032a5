"""kjt.py: TorchRec's KJTAllToAll on CPU (gloo), in turns with ours as tests/bench/comm.lua measures it.

    python kjt.py --perilune build/perilune [--ids 1 20] [--ranks 2] [--rounds 3] [--out build/bench/comm.jsonl]

Needs torch, torchrec and fbgemm_gpu (the CPU build). 26 features, batch 2,048 a rank, three batches that take turns;
the time of an exchange is that of its slowest rank, one thread a rank. Each round runs both sides once; what is compared are the medians of
the rounds' medians. Prints a line for each side, and appends one JSON object each to --out: op, peer, ids, ranks, median_ms, best_ms,
ratio (to ours).
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

KEYS, BATCH, ROWS, EXCHANGES = 26, 2048, 1_000_000, 60


def exchange(rank, ids, ranks, port, answer):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    warnings.filterwarnings("ignore")
    import torch
    from torchrec.distributed.dist_data import KJTAllToAll
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
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
    if rank == 0:
        with open(answer, "w") as file:
            json.dump({"median_ms": statistics.median(slowest.tolist()), "best_ms": min(slowest.tolist())}, file)
    torch.distributed.destroy_process_group()


def run_torchrec(ids, ranks, path):
    command = [sys.executable, __file__, "--exchange", path, "--ids", str(ids), "--ranks", str(ranks)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with open(path) as file:
        return json.load(file)


def run_ours(ids, ranks, path, launcher):
    command = [launcher, "run", "-n", str(ranks), "tests/bench/comm.lua", "--ops", "kjt_all_to_all", "--no-overlap", "--out", path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with open(path) as file:
        line = next(x for x in map(json.loads, file) if x["op"] == "kjt_all_to_all" and x["ids"] == ids)
    return {"median_ms": line["own_us"] / 1e3, "best_ms": line["best_us"] / 1e3}


def compare(args):
    folder = tempfile.mkdtemp()
    sides = {"TorchRec": lambda ids, path: run_torchrec(ids, args.ranks, path),
             "Perilune": lambda ids, path: run_ours(ids, args.ranks, path, args.perilune)}
    for ids in args.ids:
        rounds = {name: [] for name in sides}
        for k in range(args.rounds):
            for name, run in sides.items():
                rounds[name].append(run(ids, os.path.join(folder, f"{name}.{ids}.{k}")))
        median = {name: statistics.median(r["median_ms"] for r in list_) for name, list_ in rounds.items()}
        for name, list_ in rounds.items():
            line = {"op": "kjt_all_to_all", "peer": name, "ids": ids, "ranks": args.ranks, "median_ms": median[name],
                    "best_ms": min(r["best_ms"] for r in list_), "ratio": median[name] / median["Perilune"]}
            print(f"kjt_all_to_all, {args.ranks} ranks, {ids:2} ids: {name}: {line['median_ms']:7.2f} ms (best {line['best_ms']:.2f}), "
                  f"{line['ratio']:.2f} times as long", flush=True)
            if args.out:
                with open(args.out, "a") as file:
                    file.write(json.dumps(line) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--perilune", default="build/perilune", help="our launcher")
    parser.add_argument("--ids", type=int, nargs="+", default=[1, 20], help="ids per bag")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="append JSON lines to this file")
    parser.add_argument("--exchange", metavar="FILE", help="run TorchRec's side once, and write its times there")
    args = parser.parse_args()
    if not args.exchange:
        return compare(args)
    import torch.multiprocessing
    port = 29500 + os.getpid() % 1000
    torch.multiprocessing.spawn(exchange, args=(args.ids[0], args.ranks, port, args.exchange), nprocs=args.ranks)


if __name__ == "__main__":
    main()
