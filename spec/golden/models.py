"""How the models of examples/models train as PyTorch computes it: spec/golden/ops/tensor/models.json, which
spec/examples/models_spec.lua compares.

    python spec/golden/models.py > spec/golden/ops/tensor/models.json

The models are written out here in plain PyTorch: dense embeddings, padded attention. Weights and batches are no files: `start` and `draw`
make them of numbers, here and in the spec. For each model: the loss of each step, before that step's update (Adagrad everywhere).
"""
import json
import math

import torch
import torch.nn.functional as F

from sequences import attention, buckets, places

SAMPLES, STEPS, LR, EPS, DIM = 6, 6, 0.05, 1e-8, 4


def start(name, *shape):
    """A parameter's first values: a sine by place, shifted by the bytes of its name; gains of norms lie around 1."""
    n, shift = math.prod(shape), 0.13 * sum(name.encode())
    w = [0.15 + 0.4 * math.sin(0.7 * i + shift) for i in range(n)]
    if name.endswith("norm.weight"):
        w = [1 + 0.2 * x for x in w]
    return torch.tensor(w, dtype=torch.float64).float().reshape(shape).requires_grad_()


def draw(step, k, below):
    return (31 * step + 17 * k + 3 * k * k) % below


class Model:
    def __init__(self):
        self.p = {}

    def param(self, name, *shape):
        if name not in self.p:
            self.p[name] = start(name, *shape)
        return self.p[name]

    def linear(self, name, x, out, bias=True):
        w = self.param(name + ".weight", out, x.shape[-1])
        return F.linear(x, w, self.param(name + ".bias", out) if bias else None)

    def norm(self, name, x):
        d = x.shape[-1]
        return F.layer_norm(x, (d,), self.param(name + ".weight", d), self.param(name + ".bias", d))

    def mlp(self, name, x, sizes):
        for i, size in enumerate(sizes):
            x = F.relu(self.linear(f"{name}._mlp.{i}._linear", x, size))
        return x

    def pooled(self, table, rows, bags, mean=False):
        t = self.param(table, rows, DIM)
        return torch.stack([t[bag].sum(0) / max(len(bag) if mean else 1, 1) if bag else torch.zeros(DIM) for bag in bags])


def bags(step, feature, rows, least=0):
    return [[draw(step, 11 * b + 3 * feature + 7 * i, rows) for i in range(least + draw(step, 5 * b + feature, 4))]
            for b in range(SAMPLES)]


def dense(step, columns):
    return torch.tensor([[(draw(step, 3 * b + c, 101) - 50) / 50 for c in range(columns)] for b in range(SAMPLES)])


def labels(step, tasks=1):
    return torch.tensor([[float(draw(step, 13 * b + 5 * t, 7) < 3) for t in range(tasks)] for b in range(SAMPLES)])


def two_tower(m, step):
    users = m.pooled("t/user", 11, bags(step, 0, 11))
    contexts = m.pooled("t/context", 7, bags(step, 1, 7))
    items = m.pooled("t/item", 13, bags(step, 2, 13))
    query = m.mlp("query_proj", torch.cat([users, contexts], 1), [8, 6])
    candidate = m.mlp("candidate_proj", items, [8, 6])
    return F.binary_cross_entropy_with_logits((query * candidate).sum(1), labels(step)[:, 0])


def deepfm(m, step):
    sparse = [m.pooled("t/user", 11, bags(step, 0, 11)), m.pooled("t/item", 13, bags(step, 1, 13))]
    x = F.relu(m.linear("model.dense_arch.model.0", dense(step, 3), 5))
    x = F.relu(m.linear("model.dense_arch.model.2", x, DIM))
    all_ = torch.cat([x] + sparse, 1)
    deep = F.relu(m.linear("model.inter_arch.deep_fm.dense_module.0", all_, 3))
    fm = 0.5 * ((all_.sum(1, keepdim=True) ** 2) - (all_ ** 2).sum(1, keepdim=True))
    p = torch.sigmoid(m.linear("model.over_arch.model.0", torch.cat([x, deep, fm], 1), 1))
    return F.binary_cross_entropy(p, labels(step))


def din(m, step):
    table = m.param("t/item", 13, DIM)
    interests, candidates = [], [draw(step, 19 * b + 2, 13) for b in range(SAMPLES)]
    for bag, c in zip(bags(step, 0, 13), candidates):
        h, of = table[torch.tensor(bag, dtype=torch.long)], table[c].expand(len(bag), DIM)
        w = m.linear("attention.2", torch.sigmoid(m.linear("attention.0", torch.cat([h, of, h - of, h * of], 1), 6)), 1)
        interests.append((h * w).sum(0))
    interest, c = torch.stack(interests), table[torch.tensor(candidates)]
    x = F.prelu(m.linear("over.0", torch.cat([interest, c, interest * c], 1), 5), m.param("over.1.weight", 1))
    return F.binary_cross_entropy_with_logits(m.linear("over.2", x, 1), labels(step))


def mmoe(m, step):
    sparse = [m.pooled("t/user", 11, bags(step, 0, 11), True), m.pooled("t/item", 13, bags(step, 1, 13), True)]
    x = torch.cat([dense(step, 3)] + sparse, 1)
    experts = torch.stack([m.mlp(f"experts.{i}", x, [5]) for i in range(3)], 1)
    logits = []
    for t in range(2):
        gate = torch.softmax(m.linear(f"gates.{t}", x, 3, bias=False), 1)
        mixed = torch.einsum("be,beh->bh", gate, experts)
        logits.append(m.linear(f"towers.{t}.1", m.mlp(f"towers.{t}.0", mixed, [4]), 1))
    return F.binary_cross_entropy_with_logits(torch.cat(logits, 1), labels(step, 2))


def hstu(m, step, context=()):
    most, actions = 12 + len(context), 4
    history = [draw(step, 5 * b, 6) for b in range(SAMPLES)]
    targets = [1 + draw(step, 3 * b, 3) for b in range(SAMPLES)]
    lengths = [h + t for h, t in zip(history, targets)]
    items, acts, times, y = [], [], [], []
    for b in range(SAMPLES):
        for i in range(lengths[b]):
            items.append(draw(step, 11 * b + 7 * i, 13))
            acts.append(1 + draw(step, b + i, actions - 1) if i < history[b] else 0)
            times.append(50 * i * i + b)
            if i >= history[b]:
                y.append(float(draw(step, 13 * b + 5 * i, 7) < 3))
    pos = places(lengths, targets, most + 1)
    bucket = buckets(torch.tensor(times), lengths, "sqrt", 60.0, 8)
    x = m.param("t/item", 13, DIM)[items] * math.sqrt(DIM) + m.param("t/action", actions, DIM)[acts]
    x = x + m.param("position.weight", most + 1, DIM)[pos] + m.param("time.weight", 9, DIM)[bucket]
    asked = torch.tensor([p == 0 for p in pos])
    if context:
        vectors = torch.stack([m.param("t/" + name, rows, DIM)[[draw(step, 7 * b + rows, rows) for b in range(SAMPLES)]]
                               for name, rows in context], 1) + m.param("context.weight", len(context), DIM)
        x = torch.cat([part for b, own in enumerate(x.split(lengths)) for part in (vectors[b], own)])
        none = torch.zeros(len(context), dtype=torch.bool)
        asked = torch.cat([part for own in asked.split(lengths) for part in (none, own)])
        lengths = [n + len(context) for n in lengths]
    for layer in ("layers.0", "layers.1"):
        h, a = 2 * 3, 2 * 2
        u, v, q, k = torch.split(F.silu(m.linear(layer + ".uvqk", m.norm(layer + ".input_norm", x), 2 * h + 2 * a)), [h, h, a, a], 1)
        n = len(x)
        o = attention(q.reshape(n, 2, 2), k.reshape(n, 2, 2), v.reshape(n, 2, 3), "silu", lengths, targets, True, 0, 2 ** -0.5, most,
                      len(context))
        x = x + m.linear(layer + ".output", u * m.norm(layer + ".output_norm", o.reshape(n, h)), DIM)
    return F.binary_cross_entropy_with_logits(m.linear("head", m.norm("norm", x)[asked], 1)[:, 0], torch.tensor(y))


def hstu_context(m, step):
    return hstu(m, step, (("country", 5), ("age", 3)))


def train(f):
    m, losses = Model(), []
    optimizer = None
    for step in range(1, STEPS + 1):
        loss = f(m, step)
        if optimizer is None:
            optimizer = torch.optim.Adagrad(list(m.p.values()), lr=LR, eps=EPS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float("%.9g" % loss.item()))
    return {"losses": losses, "parameters": {n: list(p.shape) for n, p in m.p.items()}}


def main():
    models = {f.__name__: train(f) for f in (two_tower, deepfm, din, mmoe, hstu, hstu_context)}
    print('{"format": 1, "kind": "tensor", "library": "torch %s", "tolerance": 1e-4, "models": {' % torch.__version__)
    print(",\n".join('"%s": %s' % (n, json.dumps(v)) for n, v in models.items()))
    print("}}")


if __name__ == "__main__":
    main()
