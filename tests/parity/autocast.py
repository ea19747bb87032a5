"""What PyTorch makes of 200 steps of a small DCN v2 in f32 and under autocast (bf16) on a processor: spec/golden/ops/autocast/dcn.json.

    python3 tests/parity/autocast.py [--out FILE]

Numbers come from a generator that spec/nn/autocast_golden_spec.lua has, too. Runs that differ in nothing that ought to matter (the order of
a batch's rows, who makes the products, in how many parts a batch comes, as on several ranks) show how far two runs of PyTorch under
autocast lie apart.
"""
import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

DENSE, COLUMNS, DIM, RANK, BATCH, BATCHES, STEPS = 13, 64, 16, 16, 128, 40, 200
BOTTOM, TOP = (64, 32, DIM), (64, 32)
state = 1


def draw(n, low, high):
    """n numbers of the generator x = 16807 x mod (2^31 - 1), which doubles hold exactly."""
    global state
    out = []
    for _ in range(n):
        state = state * 16807 % 2147483647
        out.append(low + (high - low) * state / 2147483647)
    return out


def parameter(*shape):
    bound = shape[-1] ** -0.5
    size = 1
    for s in shape:
        size *= s
    return nn.Parameter(torch.tensor(draw(size, -bound, bound), dtype=torch.float64).float().reshape(shape))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        global state
        state = 1
        n, p = COLUMNS + DIM, []
        sizes = (DENSE,) + BOTTOM
        self.bottom = nn.ParameterList([x for a, b in zip(sizes, sizes[1:]) for x in (parameter(b, a), parameter(b))])
        self.cross = nn.ParameterList([x for _ in range(3) for x in (parameter(RANK, n), parameter(n, RANK), parameter(n))])
        sizes = (n,) + TOP
        self.top = nn.ParameterList([x for a, b in zip(sizes, sizes[1:]) for x in (parameter(b, a), parameter(b))])
        self.last = nn.ParameterList([parameter(1, TOP[-1]), parameter(1)])

    def forward(self, dense, pooled):
        x = dense
        for i in range(0, len(self.bottom), 2):
            x = F.relu(F.linear(x, self.bottom[i], self.bottom[i + 1]))
        x0 = x = torch.cat([x, pooled], 1)
        for i in range(0, len(self.cross), 3):
            x = x0 * F.linear(F.linear(x, self.cross[i]), self.cross[i + 1], self.cross[i + 2]) + x
        for i in range(0, len(self.top), 2):
            x = F.relu(F.linear(x, self.top[i], self.top[i + 1]))
        return F.linear(x, self.last[0], self.last[1]).reshape(-1)


def batches():
    global state
    state = 2
    out = []
    for _ in range(BATCHES):
        dense = torch.tensor(draw(BATCH * DENSE, -1, 1), dtype=torch.float64).float().reshape(BATCH, DENSE)
        pooled = torch.tensor(draw(BATCH * COLUMNS, -1, 1), dtype=torch.float64).float().reshape(BATCH, COLUMNS)
        noise = torch.tensor(draw(BATCH, -1, 1), dtype=torch.float64)
        labels = (dense[:, 0].double() * dense[:, 1].double() + pooled[:, 0].double() + noise > 0).float()
        out.append((dense, pooled, labels))
    return out


def run(autocast, order=None, mkldnn=True, parts=1):
    model = Model()
    opt = torch.optim.Adagrad(model.parameters(), lr=0.005)
    losses, data = [], batches()
    with torch.backends.mkldnn.flags(enabled=mkldnn):
        for i in range(STEPS):
            dense, pooled, labels = data[i % BATCHES]
            if order is not None:
                dense, pooled, labels = dense[order], pooled[order], labels[order]
            opt.zero_grad()
            total = 0.0
            for d, p, y in zip(dense.chunk(parts), pooled.chunk(parts), labels.chunk(parts)):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = F.binary_cross_entropy_with_logits(model(d, p).float(), y) / parts
                loss.backward()
                total += loss.item()
            opt.step()
            losses.append(total)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    permutation = [torch.randperm(BATCH, generator=torch.Generator().manual_seed(s)) for s in range(2)]
    f32 = run(False)
    cast = [run(True)] + [run(True, p) for p in permutation] + [run(True, mkldnn=False)] + [run(True, parts=n) for n in (2, 4, 8)]
    apart = [max(abs(a[i] - b[i]) for a in cast for b in cast) for i in range(STEPS)]
    print("step   f32      autocast  apart")
    for i in list(range(0, STEPS, 20)) + [STEPS - 1]:
        print(f"{i:4d} {f32[i]:9.6f} {cast[0][i]:9.6f} {apart[i]:9.6f}")
    print(f"largest difference of two runs under autocast {max(apart):.6f}, of f32 and autocast {max(abs(a - b) for a, b in zip(f32, cast[0])):.6f}")
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"format": 1, "kind": "autocast", "name": "dcn", "source": "torch", "library": {"torch": torch.__version__},
                       "text": "losses of a small DCN v2 under Adagrad, in f32, and of runs under autocast to bf16 that differ by rounding",
                       "f32": [round(x, 7) for x in f32], "autocast": [[round(x, 7) for x in run] for run in cast]}, file)
            file.write("\n")
