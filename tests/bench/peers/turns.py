"""turns.py: what the scripts share that run TorchRec in turns with ours: their command line, its processes, the rounds and their report."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings


def arguments(doc, once):
    """The command line of a script. `once`: its option that runs TorchRec's side once and names the file for the times."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--perilune", default="build/perilune", help="our launcher")
    parser.add_argument("--ids", type=int, nargs="+", default=[1, 20], help="ids per bag")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="append JSON lines to this file")
    parser.add_argument(once, metavar="FILE", dest="once", help="run TorchRec's side once, and write its times there")
    return parser.parse_args()


def spawn(side, args, *more):
    """side(rank, ids, ranks, port, *more, answer) in a process for each rank."""
    import torch.multiprocessing
    port = 29500 + os.getpid() % 1000
    torch.multiprocessing.spawn(side, args=(args.ids[0], args.ranks, port, *more, args.once), nprocs=args.ranks)


def join(rank, ranks, port):
    """Make this process rank `rank` of torch's world; one thread."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    warnings.filterwarnings("ignore")
    import torch
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")


def leave(rank, answer, times):
    """The end of such a process; rank 0 writes its times."""
    import torch
    if rank == 0:
        with open(answer, "w") as file:
            json.dump(times, file)
    torch.distributed.destroy_process_group()


def torchrec(script, once, ids, ranks, path):
    """Times of one run of a script's TorchRec side."""
    command = [sys.executable, script, once, path, "--ids", str(ids), "--ranks", str(ranks)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with open(path) as file:
        return json.load(file)


def compare(args, sides, describe):
    """Run sides {name: run(ids, path) -> {median_ms, best_ms, ...}} in turns. describe(name, ids, line, runs) completes a side's line, and
    returns what to print before how many times as long it takes."""
    folder = tempfile.mkdtemp()
    for ids in args.ids:
        rounds = {name: [] for name in sides}
        for k in range(args.rounds):
            for name, run in sides.items():
                rounds[name].append(run(ids, os.path.join(folder, f"{name}.{ids}.{k}")))
        median = {name: statistics.median(r["median_ms"] for r in runs) for name, runs in rounds.items()}
        for name, runs in rounds.items():
            line = {"peer": name, "ids": ids, "ranks": args.ranks, "median_ms": median[name], "best_ms": min(r["best_ms"] for r in runs),
                    "ratio": median[name] / median["Perilune"]}
            print(f"{describe(name, ids, line, runs)}, {line['ratio']:.2f} times as long", flush=True)
            if args.out:
                with open(args.out, "a") as file:
                    file.write(json.dumps(line) + "\n")
