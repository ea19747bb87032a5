"""Attention within sequences as padded dense attention by PyTorch: spec/golden/ops/tensor/sequences.json, which
spec/sparse/sequence_spec.lua compares.

    python spec/golden/sequences.py > spec/golden/ops/tensor/sequences.json

Every sequence is padded to the longest one, the mask is made of the matrix of distances as HSTU's authors define it, and einsum, softmax
or silu do the rest. A case: its name; `args`; `in`, `out`, `up` (the gradient fed to the result), `grad` (those of q, k, v). A tensor is
[dtype, shape, flat list].
"""
import json

import torch
import torch.nn.functional as F

torch.manual_seed(4)
NAMES = {torch.float32: "f32", torch.float64: "f64", torch.int64: "i64"}
cases = []


def dump(t):
    numbers = t.reshape(-1).tolist()
    return [NAMES[t.dtype], list(t.shape), [float("%.9g" % x) if t.is_floating_point() else x for x in numbers]]


def padded(x, lengths, n):
    rows = x.split(lengths)
    return torch.stack([F.pad(r, (0, 0) * (x.dim() - 1) + (0, n - r.shape[0])) for r in rows])


def mask(lengths, targets, n, causal, window, contextual, full):
    """[sequences, n, n]: row i sees column j. All contextual members have id 0, all targets the first id behind the history."""
    lengths = torch.tensor(lengths)
    history = lengths - (torch.tensor(targets) if targets else 0) - max(contextual - 1, 0)
    ids = torch.minimum((torch.arange(n).view(1, n) - max(contextual - 1, 0)).clamp(min=0), history.view(-1, 1))
    rows, columns = ids.unsqueeze(2), ids.unsqueeze(1)
    distance = rows - columns
    if not causal:
        distance = distance.abs()
    sees = distance > 0
    if window > 0:
        sees = sees & ((distance <= window) | ((full > 0) & (rows >= history.view(-1, 1, 1) - full)))
    if contextual > 0:
        sees = sees | ((rows == 0) & (columns < history.view(-1, 1, 1)))
    there = torch.arange(n).view(1, n) < lengths.view(-1, 1)
    return (sees | torch.eye(n, dtype=torch.bool)) & there.unsqueeze(1) & there.unsqueeze(2)


def attention(q, k, v, form, lengths, targets, causal, window, alpha, max_seq_len, contextual, full=0):
    n = max(lengths)
    sees = mask(lengths, targets, n, causal, window, contextual, full).unsqueeze(1)
    s = torch.einsum("bihd,bjhd->bhij", padded(q, lengths, n), padded(k, lengths, n)) * alpha
    if form == "softmax":
        w = s.masked_fill(~sees, float("-inf")).softmax(-1).nan_to_num(0)
    else:
        w = F.silu(s) / max_seq_len * sees
    out = torch.einsum("bhij,bjhv->bihv", w, padded(v, lengths, n))
    return torch.cat([out[b, :length] for b, length in enumerate(lengths)])


def case(form, lengths, heads, dim, v_dim, targets=None, causal=True, window=0, contextual=0, full=0):
    rows, n = sum(lengths), max(lengths)
    args = {"form": form, "lengths": lengths, "targets": targets, "causal": causal, "window": window, "alpha": dim ** -0.5,
            "max_seq_len": n + 2, "contextual": contextual}
    if full:
        args["full"] = full
    inputs = [torch.randn(rows, heads, d) for d in (dim, dim, v_dim)]
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = attention(*leaves, **args)
    up = torch.linspace(-1, 2, out.numel()).reshape(out.shape)
    out.backward(up)
    kind = "targets" if targets else "history"
    cases.append({"name": f"{form} {kind} causal={causal} window={window} contextual={contextual}{f' full={full}' if full else ''} {heads}x{dim},{v_dim}", "args": args,
                  "in": [dump(t) for t in inputs], "out": dump(out.detach()), "up": dump(up), "grad": [dump(t.grad) for t in leaves]})


def places(lengths, targets, most):
    history = [n - t for n, t in zip(lengths, targets or [0] * len(lengths))]
    return [min(h - min(i, h), most - 1) for n, h in zip(lengths, history) for i in range(n)]


def buckets(times, lengths, fn, increment, most):
    out = []
    for t in times.split(lengths):
        ts = (t[-1:] - t).double().clamp(min=1e-6) / increment
        ts = torch.log(ts) if fn == "log" else torch.sqrt(ts)
        out += ts.clamp(min=0).int().clamp(max=most).tolist()
    return out


def main():
    for form in ("softmax", "silu"):
        case(form, [3, 0, 5, 1], 2, 4, 3)
        case(form, [3, 0, 5, 1], 2, 4, 3, targets=[1, 0, 2, 1])
        case(form, [6, 4], 1, 5, 7, targets=[6, 1], causal=False)
        case(form, [6, 1, 4], 2, 3, 3, causal=False, window=2)
        case(form, [7, 5], 2, 8, 8, targets=[2, 0], window=2)
        case(form, [7, 2, 5], 1, 3, 2, targets=[3, 1, 2], causal=False, window=2)
        case(form, [35, 1, 18], 1, 9, 5, targets=[4, 0, 3])
    for form in ("softmax", "silu"):
        case(form, [7, 0, 3], 2, 3, 2, contextual=3)
        case(form, [7, 3], 1, 4, 3, targets=[2, 1], contextual=2)
        case(form, [8, 4], 1, 3, 4, targets=[2, 0], window=2, contextual=3)
        case(form, [8, 5], 2, 2, 3, targets=[2, 3], causal=False, window=3, contextual=2)
    for form in ("softmax", "silu"):
        case(form, [9, 6], 1, 4, 3, window=1, full=2)
        case(form, [9, 0, 6], 2, 3, 2, targets=[2, 0, 1], window=2, full=3)
        case(form, [9, 6], 1, 3, 4, targets=[3, 1], causal=False, window=1, full=2, contextual=2)
        case(form, [12, 3], 1, 3, 4, targets=[3, 1], causal=True, window=2, full=3, contextual=2)

    lengths = [4, 0, 3]
    times = torch.tensor([100, 160, 5000, 5060, 0, 86400, 1000000])
    more = {"positions": [{"lengths": lengths, "targets": t, "max_positions": m, "out": places(lengths, t, m)}
                          for t in (None, [1, 0, 3]) for m in (100, 3)],
            "buckets": [{"lengths": lengths, "times": dump(times), "fn": fn, "increment": i, "num_buckets": m,
                         "out": buckets(times, lengths, fn, i, m)}
                        for fn, i, m in (("sqrt", 60.0, 2048), ("log", 0.301, 10), ("sqrt", 7.5, 30))]}

    print('{"format": 1, "kind": "tensor", "library": "torch %s", "tolerance": {"abs": 2e-6, "rel": 2e-5},' % torch.__version__)
    print('"places": %s,\n"cases": [' % json.dumps(more))
    print(",\n".join(json.dumps(c) for c in cases))
    print("]}")


if __name__ == "__main__":
    main()
