"""step.py: the training step of tests/bench/step.lua under TorchRec on CPU (gloo), in turns with ours.

    python step.py --perilune build/perilune [--ids 1 20] [--ranks 2] [--rounds 3] [--out build/bench/step.jsonl]

Needs torch, torchrec and fbgemm_gpu (the CPU build). Each round runs both sides once for each number of ids; what is compared are the medians
of the rounds' medians. Tables are table-wise (TorchRec's planner spreads them evenly), updated by fused row-wise Adagrad; one thread a rank.
Prints a line for each side, and appends one JSON object each to --out: peer, ids, ranks, median_ms, best_ms, samples_per_s, first_step_s,
ratio.
"""
import json
import statistics
import subprocess
import time

import turns

TABLES, ROWS, DIM, BATCH, STEPS = 26, 100_000, 64, 2048, 20


def build(ids, rank, ranks):
    """The model under DistributedModelParallel, its dense optimizer, and three batches of this rank."""
    import torch
    from torchrec.datasets.utils import Batch
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.models.dlrm import DLRM, DLRMTrain
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names = [f"f{i}" for i in range(TABLES)]
    bags = EmbeddingBagCollection(device=torch.device("meta"), tables=[
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name]) for i, name in enumerate(names)])
    model = DLRMTrain(DLRM(embedding_bag_collection=bags, dense_in_features=13, dense_arch_layer_sizes=[512, 256, DIM],
                           over_arch_layer_sizes=[512, 512, 256, 1], dense_device=torch.device("cpu")))
    apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.01})
    sharder = EmbeddingBagCollectionSharder()
    constraints = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"]) for i in range(TABLES)}
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=ranks, compute_device="cpu"), constraints=constraints)
    plan = planner.collective_plan(model, [sharder], torch.distributed.GroupMember.WORLD)
    model = DistributedModelParallel(model, device=torch.device("cpu"), sharders=[sharder], plan=plan)
    dense = [p for name, p in model.named_parameters() if ".embedding_bags." not in name]
    generator = torch.Generator().manual_seed(100 + rank)
    batches = []
    for _ in range(3):
        values = torch.randint(0, ROWS, (TABLES * BATCH * ids,), generator=generator)
        lengths = torch.full((TABLES * BATCH,), ids, dtype=torch.int32)
        labels = torch.randint(0, 2, (BATCH,), generator=generator)
        batches.append(Batch(dense_features=torch.randn(BATCH, 13, generator=generator), labels=labels,
                             sparse_features=KeyedJaggedTensor.from_lengths_sync(names, values, lengths)))
    return model, torch.optim.Adagrad(dense, lr=0.01), batches


def train(rank, ids, ranks, port, started, answer):
    turns.join(rank, ranks, port)
    import torch
    model, optimizer, batches = build(ids, rank, ranks)
    times, first = [], None
    for i in range(STEPS + 2):
        torch.distributed.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss, _ = model(batches[i % len(batches)])
        loss.backward()
        optimizer.step()
        times.append((time.perf_counter() - begin) * 1e3)
        first = first or time.time() - started
    turns.leave(rank, answer, {"median_ms": statistics.median(times[2:]), "best_ms": min(times[2:]), "first_step_s": first})


def run_ours(ids, ranks, path, launcher):
    command = [launcher, "run", "-n", str(ranks), "-t", "1", "tests/bench/step.lua", "--ids", str(ids), "--sharding", "table_wise"]
    subprocess.run(command + ["--steps", str(STEPS), "--out", path], check=True, stdout=subprocess.DEVNULL)
    with open(path) as file:
        return json.loads(file.read().splitlines()[-1])


def main():
    args = turns.arguments(__doc__, "--train")
    if args.once:
        ticks = float(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19])
        return turns.spawn(train, args, time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / 100)

    def describe(name, ids, line, runs):
        line.update(sharding="table_wise", dtype="f32", samples_per_s=BATCH * args.ranks / line["median_ms"] * 1e3,
                    first_step_s=statistics.median(r["first_step_s"] for r in runs))
        return (f"{args.ranks} ranks, table_wise {ids:2} ids: {name}: {line['median_ms']:7.1f} ms (best {line['best_ms']:.1f}), "
                f"{line['samples_per_s']:6.0f} samples/s, first step after {line['first_step_s']:.2f} s")

    turns.compare(args, {"TorchRec": lambda ids, path: turns.torchrec(__file__, "--train", ids, args.ranks, path),
                         "Perilune": lambda ids, path: run_ours(ids, args.ranks, path, args.perilune)}, describe)


if __name__ == "__main__":
    main()
