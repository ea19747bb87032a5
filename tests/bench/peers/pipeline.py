"""pipeline.py: TorchRec's TrainPipelineSparseDist on CPU (gloo), on the model of step.py, in turns with ours (tests/bench/pipeline.lua).

    python pipeline.py --perilune build/perilune [--ids 1 20] [--ranks 2] [--rounds 3] [--out build/bench/pipeline.jsonl]

Needs torch, torchrec and fbgemm_gpu (the CPU build). Each round runs both sides once for each number of ids; what is compared are the medians
of the rounds' medians. Prints a line for each side, and appends one JSON object each to --out: peer, schedule, ids, ranks, median_ms, best_ms,
ratio.
"""
import itertools
import json
import statistics
import subprocess
import time

import step
import turns


def train(rank, ids, ranks, port, answer):
    turns.join(rank, ranks, port)
    import torch
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    model, optimizer, batches = step.build(ids, rank, ranks)
    pipeline = TrainPipelineSparseDist(model, optimizer, device=torch.device("cpu"))
    source, times = itertools.cycle(batches), []
    for _ in range(step.STEPS + 3):
        begin = time.perf_counter()
        pipeline.progress(source)
        times.append((time.perf_counter() - begin) * 1e3)
    turns.leave(rank, answer, {"median_ms": statistics.median(times[3:]), "best_ms": min(times[3:])})


def run_ours(ids, ranks, path, launcher):
    command = [launcher, "run", "-n", str(ranks), "-t", "1", "tests/bench/pipeline.lua", "--ids", str(ids), "--schedules", "sparse_dist"]
    subprocess.run(command + ["--rounds", "5", "--steps", "4", "--out", path], check=True, stdout=subprocess.DEVNULL)
    with open(path) as file:
        return json.loads(file.read().splitlines()[-1])


def main():
    args = turns.arguments(__doc__, "--train")
    if args.once:
        return turns.spawn(train, args)

    def describe(name, ids, line, runs):
        line.update(schedule="sparse_dist", samples_per_s=step.BATCH * args.ranks / line["median_ms"] * 1e3)
        return f"{args.ranks} ranks, {ids:2} ids, sparse_dist: {name}: {line['median_ms']:7.1f} ms (best {line['best_ms']:.1f})"

    turns.compare(args, {"TorchRec": lambda ids, path: turns.torchrec(__file__, "--train", ids, args.ranks, path),
                         "Perilune": lambda ids, path: run_ours(ids, args.ranks, path, args.perilune)}, describe)


if __name__ == "__main__":
    main()
