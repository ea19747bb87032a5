"""sequence.py: the step of tests/bench/sequence.lua under torch's nn.Embedding and TorchRec's EmbeddingCollection, in turns with ours.

    python sequence.py --perilune build/perilune [--ids 1 20] [--rounds 3] [--out build/bench/shard.jsonl]

Needs torch and torchrec. Gradients of nn.Embedding are dense, which is its default, or sparse; those of TorchRec's collection, which has no
fused optimizer before it is sharded, are dense. torch's SGD applies them. One thread each. Prints a line for each side, and appends one JSON object each to --out.
"""
import json
import statistics
import subprocess
import sys
import time

import turns

TABLES, ROWS, DIM, BATCH, STEPS = 26, 100_000, 64, 2048, 5


def batches(ids):
    import torch
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, ROWS, (TABLES, BATCH * ids), generator=generator) for _ in range(3)]


def embedding(ids, sparse=False):
    """Forward of nn.Embeddings: batch -> list of rows, and their optimizer."""
    import torch
    tables = torch.nn.ModuleList([torch.nn.Embedding(ROWS, DIM, sparse=sparse) for _ in range(TABLES)])

    def forward(batch):
        return [table(values) for table, values in zip(tables, batch)]
    return forward, torch.optim.SGD(tables.parameters(), lr=0.01)


def collection(ids):
    """The same of an EmbeddingCollection."""
    import torch
    from torchrec.modules.embedding_configs import EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    keys = [f"f{i}" for i in range(TABLES)]
    module = EmbeddingCollection(device=torch.device("cpu"), tables=[
        EmbeddingConfig(name=f"t{i}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[key]) for i, key in enumerate(keys)])
    lengths = torch.full((TABLES * BATCH,), ids, dtype=torch.int32)

    def forward(batch):
        rows = module(KeyedJaggedTensor(keys=keys, values=batch.view(-1), lengths=lengths))
        return [rows[key].values() for key in keys]
    return forward, torch.optim.SGD(module.parameters(), lr=0.01)


SIDES = {"nn.Embedding": embedding, "nn.Embedding, sparse": lambda ids: embedding(ids, True), "TorchRec": collection}


def once(name, ids, path):
    """Times of one side in this process."""
    import torch
    torch.set_num_threads(1)
    forward, optimizer = SIDES[name](ids)
    inputs, times = batches(ids), []
    grads = [torch.full((BATCH * ids, DIM), 1e-3) for _ in range(TABLES)]
    for k in range(STEPS + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        torch.autograd.backward(forward(inputs[k % 3]), grads)
        optimizer.step()
        times.append((time.perf_counter() - start) * 1e3)
    with open(path, "w") as file:
        json.dump({"median_ms": statistics.median(times[1:]), "best_ms": min(times[1:])}, file)


def main():
    args = turns.arguments(__doc__, "--side")
    if args.once:
        name, path = args.once.split("=", 1)
        return once(name, args.ids[0], path)

    def peer(name):
        def run(ids, path):
            command = [sys.executable, __file__, "--side", f"{name}={path}", "--ids", str(ids)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            with open(path) as file:
                return json.load(file)
        return run

    def ours(ids, path):
        command = [args.perilune, "run", "-t", "1", "tests/bench/sequence.lua", "--ids", str(ids), "--steps", str(STEPS), "--out", path]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with open(path) as file:
            return json.load(file)

    def describe(name, ids, line, runs):
        line["module"] = "unsharded ec"
        return f"{name}, {ids} ids: {line['median_ms']:.1f} ms"
    args.ranks = 1
    turns.compare(args, {"Perilune": ours, **{name: peer(name) for name in SIDES}}, describe)


if __name__ == "__main__":
    main()
