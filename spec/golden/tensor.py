"""What PyTorch makes of everyday functions of tensors: spec/golden/ops/tensor/everyday.json, which spec/tensor_functions_spec.lua compares.

    python spec/golden/tensor.py > spec/golden/ops/tensor/everyday.json

A case: its name; `in`: tensors; `out`: the results; `up`: the gradient fed to the first result; `grad`: that of each input, null where it
has none. A tensor is [dtype, shape, flat list]; numbers that JSON lacks, or a double cannot hold, are texts.
"""
import json

import torch

NAMES = {torch.float32: "f32", torch.float64: "f64", torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.bool: "bool"}
torch.manual_seed(1)
nan, inf = float("nan"), float("inf")


def number(x):
    if isinstance(x, bool):
        return int(x)
    if isinstance(x, int) and abs(x) >= 2**53:
        return str(x)
    if isinstance(x, float) and (x != x or x in (inf, -inf)):
        return str(x)
    return x


def dump(t):
    return None if t is None else [NAMES[t.dtype], list(t.shape), [number(x) for x in t.reshape(-1).tolist()]]


cases = []


def case(name, f, *inputs):
    given = [dump(t) for t in inputs]
    leaves = [t.clone().requires_grad_() if t.dtype.is_floating_point else t for t in inputs]
    out = f(*leaves)
    out = list(out) if isinstance(out, (tuple, list)) else [out]
    entry = {"name": name, "in": given, "out": [dump(t.detach()) for t in out]}
    if out[0].requires_grad:
        up = torch.linspace(-1, 2, out[0].numel()).reshape(out[0].shape)
        out[0].backward(up)
        entry["up"] = dump(up)
        entry["grad"] = [dump(t.grad) if t.dtype.is_floating_point else None for t in leaves]
    cases.append(entry)


x = torch.randn(3, 4)
y = torch.randn(3, 4)
row = torch.randn(4)
cube = torch.randn(2, 3, 4)
odd = torch.tensor([[1.0, nan, -inf, 0.0], [-0.0, 2.5, inf, -1.0], [2.5, nan, nan, 2.5]])
ties = torch.tensor([[3.0, 1.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0], [-1.0, 0.0, 0.0, -1.0]])
whole = torch.tensor([[3, -1, 3, 7], [9007199254740993, 2, 9007199254740992, 2], [0, 0, -5, 1]])
mask = torch.tensor([[True, False, True, False], [False, False, True, True], [True, True, True, False]])

for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    f = getattr(torch, name)
    case(name + " tensors", f, odd, ties)
    case(name + " broadcast", f, ties, row.round())
    case(name + " number", lambda t, f=f: f(t, 2.5), odd)
    case(name + " whole numbers", f, whole, whole.flip(0))
    case(name + " whole and 2", lambda t, f=f: f(t, 2), whole)
    case(name + " whole and 1.5", lambda t, f=f: f(t, 1.5), whole)
case("isnan", torch.isnan, odd)
case("isfinite", torch.isfinite, odd)
case("where", torch.where, mask, x, y)
case("where broadcast", torch.where, mask, x, row)
case("where number", lambda m, t: torch.where(m, t, 0.5), mask, x)
case("masked_fill", lambda t, m: t.masked_fill(m, -2.0), x, mask)
case("masked_fill of a row", lambda t, m: t.masked_fill(m, -2.0), x, mask[0])
case("clamp", lambda t: t.clamp(-0.5, 0.75), x)
case("clamp min", lambda t: t.clamp(min=0.0), odd)
case("clamp max", lambda t: t.clamp(max=1.0), odd)
case("clamp at the bounds", lambda t: t.clamp(2.0, 3.0), ties)
case("clamp crossed", lambda t: t.clamp(1.0, -1.0), x)
case("maximum", torch.maximum, x, y)
case("maximum nan and ties", torch.maximum, odd, ties)
case("minimum", torch.minimum, ties, row.round())
case("minimum nan", torch.minimum, odd, x)
case("clone", lambda t: t.clone() * 2, x)
case("gather 1", lambda t, i: t.gather(0, i), x, torch.tensor([[0, 2, 1, 0], [2, 2, 0, 1]]))
case("gather 2", lambda t, i: t.gather(1, i), x, torch.tensor([[3, 3], [0, 1]]))
case("gather -1", lambda t, i: t.gather(-1, i), cube, torch.tensor([[[3], [0], [0]], [[1], [1], [2]]]))
case("index_select 1", lambda t, i: t.index_select(0, i), x, torch.tensor([2, 0, 2, 2]))
case("index_select 2", lambda t, i: t.index_select(1, i), x, torch.tensor([3, 0, 3]))
case("index_select -1", lambda t, i: t.index_select(-1, i), cube, torch.tensor([1, 1, 0]))
case("index by ids", lambda t, i: t[i], x, torch.tensor([[2, 0], [1, 1]]))
case("index", lambda t: t[1] * 2, x)
case("index -1", lambda t: t[-1] * 2, cube)
case("index several", lambda t: t[1, 0:3:2, -1] * 2, cube)
case("index part", lambda t: t[:, 1:] * 2, x)
case("squeeze", lambda t: (t.reshape(3, 1, 4).squeeze(1) * 2), x)
case("squeeze all", lambda t: (t.reshape(1, 3, 1, 4).squeeze() * 2), x)
case("unsqueeze", lambda t: t.unsqueeze(1) * 2, x)
case("unsqueeze -1", lambda t: t.unsqueeze(-1) * 2, x)
case("permute", lambda t: t.permute(2, 0, 1) * 2, cube)
for d in (None, 0, 1, -1):
    text = "" if d is None else " along %d" % (d if d < 0 else d + 1)
    case("amax" + text, lambda t, d=d: t.amax() if d is None else t.amax(d), ties)
    case("amin kept" + text, lambda t, d=d: t.amin() if d is None else t.amin(d, keepdim=True), ties)
    case("argmax" + text, lambda t, d=d: t.argmax() if d is None else t.argmax(d), odd)
    case("argmin" + text, lambda t, d=d: t.argmin() if d is None else t.argmin(d), whole)
    case("var" + text, lambda t, d=d: t.var() if d is None else t.var(d), x)
    case("std kept" + text, lambda t, d=d: t.std() if d is None else t.std(d, keepdim=True), x)
    case("norm" + text, lambda t, d=d: t.norm() if d is None else t.norm(dim=d), x)
case("max of all", lambda t: t.max(), ties)
case("min of all", lambda t: t.min(), odd)
case("max along 2", lambda t: t.max(1), x)
case("min along 1, kept", lambda t: t.min(0, keepdim=True), x)
case("max of whole numbers", lambda t: t.max(1)[0], whole)
case("amax of two dimensions", lambda t: t.amax((0, 2)), cube)
case("var correction 0", lambda t: t.var(1, correction=0), x)
case("var of two dimensions", lambda t: t.var((0, 2)), cube)
case("var of one", lambda t: t.var(1), x[:, :1])
case("std of equal numbers", lambda t: t.std(1), ties)
case("norm of zeros", lambda t: t.norm(dim=1), torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
for p in (0, 1, 1.5, 3, inf, -inf):
    case("norm %s" % p, lambda t, p=p: torch.linalg.vector_norm(t if p else t.detach(), p, dim=1), x)
case("norm 3 of zeros", lambda t: torch.linalg.vector_norm(t, 3, dim=1), torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
case("norm inf of ties", lambda t: torch.linalg.vector_norm(t, inf, dim=1), ties)
case("cumsum 1", lambda t: t.cumsum(0), x)
case("cumsum -1", lambda t: t.cumsum(-1), cube)
case("cumsum of whole numbers", lambda t: t.cumsum(1), whole)
case("cumsum of bool", lambda t: t.cumsum(0), mask)
case("sum of bool", lambda t: t.sum(1), mask)
case("sum of whole numbers", lambda t: t.sum(), whole)
for descending in (False, True):
    text = " falling" if descending else ""
    case("sort" + text, lambda t, w=descending: t.sort(dim=-1, descending=w, stable=True), x)
    case("sort with nan" + text, lambda t, w=descending: t.sort(dim=1, descending=w, stable=True), odd)
    case("sort of ties along 1" + text, lambda t, w=descending: t.sort(dim=0, descending=w, stable=True), ties)
    case("sort of whole numbers" + text, lambda t, w=descending: t.sort(dim=-1, descending=w, stable=True), whole)
case("argsort", lambda t: t.argsort(dim=1, stable=True), ties)
case("topk", lambda t: t.topk(2), x)
case("topk along 1, smallest", lambda t: t.topk(2, 0, largest=False), x)
case("topk of nan", lambda t: t.topk(1, 1)[0], odd)
for equation, shapes in (("ij,jk->ik", [(2, 3), (3, 4)]), ("bij,bjk->bik", [(2, 3, 4), (2, 4, 2)]), ("bd,bd->b", [(3, 4), (3, 4)]),
                         ("bd,kd->bk", [(3, 4), (2, 4)]), ("i,j->ij", [(3,), (2,)]), ("ij->ji", [(2, 3)]), ("ij->j", [(2, 3)]),
                         ("ij->", [(2, 3)]), ("ij,jk", [(2, 3), (3, 2)]), ("...i,i->...", [(2, 3, 4), (4,)]),
                         ("b...i,b...j->b...ij", [(2, 2, 3), (2, 2, 2)]), ("bi,ij,bj->b", [(3, 2), (2, 4), (3, 4)]),
                         ("bhqd,bhkd->bhqk", [(2, 2, 3, 2), (2, 2, 4, 2)]), ("ab,cd->ad", [(2, 3), (2, 3)])):
    case("einsum " + equation, lambda *t, e=equation: torch.einsum(e, *t), *[torch.randn(s) for s in shapes])
case("arange 5", lambda: torch.arange(5))
case("arange 2 11 3", lambda: torch.arange(2, 11, 3))
case("arange 0 1 0.3", lambda: torch.arange(0, 1, 0.3))
case("arange 5 0 -2", lambda: torch.arange(5, 0, -2))


base = torch.tensor([[-2.0, -0.5, 0.0, 0.0], [1.5, 2.0, 0.0, -3.0], [4.0, 0.25, -1.0, 1.0]])
exponent = torch.tensor([[3.0, -2.0, 2.0, 0.0], [0.5, -1.5, -1.0, 0.0], [0.0, 2.5, 5.0, 7.0]])
case("power", torch.pow, base, exponent)
case("power broadcast", torch.pow, base.abs() + 0.25, row)
case("power of numbers", lambda t: 2.0**t, exponent)
case("power of 0", lambda t: 0.0**t, exponent)
case("power of whole numbers", torch.pow, torch.tensor([-1, -1, 2, 0, 1, -3, 7]), torch.tensor([-3, -2, -1, -1, -5, 3, 0]))
case("power of a float and whole numbers", torch.pow, base, torch.tensor([3, 2, 1, -2]))
for name in ("remainder", "fmod", "floor_divide"):
    f = getattr(torch, name)
    # PyTorch has no gradient of floor_divide: of constants here
    given = [(3 * x, y), (odd, ties), (ties, odd), (x, row)]
    for i, (a, b) in enumerate(given):
        entry = (lambda a, b, f=f: f(a.detach(), b.detach())) if name == "floor_divide" else f
        case("%s %d" % (name, i + 1), entry, a, b)
    case(name + " by a number", lambda t, f=f: f(t.detach() if f is torch.floor_divide else t, -0.75), 3 * x)
    case(name + " of a number", lambda t, f=f: f(torch.tensor(5.0), t.detach() if f is torch.floor_divide else t), x)
    case(name + " of whole numbers", f, torch.tensor([-7, 7, -7, 7]), torch.tensor([3, -3, -3, 3]))
holes = torch.tensor([[2.0, 0.0, -3.0, 4.0], [0.0, 5.0, 0.0, 1.5], [2.0, -1.0, 3.0, 0.5]])
case("prod", lambda t: t.prod(), x)
case("prod of one zero", lambda t: t.prod(), holes[0])
for d in (0, 1, -1):
    case("prod along %d" % (d if d < 0 else d + 1), lambda t, d=d: t.prod(d), holes)
case("prod kept", lambda t: t.prod(1, keepdim=True), cube)
case("prod of nothing", lambda t: t.prod(1), x[:, :0])
case("prod of whole numbers", lambda t: t.prod(1), whole)
case("prod of bool", lambda t: t.prod(0), mask)
for dtype in (torch.int64, torch.int32, torch.uint8):
    some = [torch.randint(0, 256, s).to(dtype) for s in ((3, 4), (4, 2), (2, 1, 3, 4), (5, 4, 2), (4,), (3,))]
    case("matmul %s" % dtype, torch.matmul, some[0], some[1])
    case("matmul of a batch %s" % dtype, torch.matmul, some[2], some[3])
    case("matmul of rows %s" % dtype, torch.matmul, some[4], some[1])
    case("matmul transposed %s" % dtype, lambda a, b: torch.matmul(a.t(), b), some[0], some[5])

F = torch.nn.functional
zeros = torch.tensor([[0.0, 0.0, 0.0, 0.0], [3.0, 4.0, 0.0, 0.0], [1.0, -2.0, 0.5, 0.25]])
far = torch.tensor([[0.0, 1.0, -1.0, 2.0], [0.5, -0.5, 3.0, -4.0], [0.25, -3.0, 1.5, 0.0]])
case("normalize", lambda t: F.normalize(t), zeros)
case("normalize 1 along 1", lambda t: F.normalize(t, p=1.0, dim=0, eps=0.5), far)
for d in (0, -1):
    case("logsumexp along %d" % (d if d < 0 else d + 1), lambda t, d=d: torch.logsumexp(t, d, keepdim=d < 0), 40 * x)
case("logsumexp of infinities", lambda t: torch.logsumexp(t, 1), torch.tensor([[-inf, -inf], [inf, 1.0], [-inf, 2.0]]))
for name in ("any", "all"):
    f = getattr(torch, name)
    case(name, f, mask)
    case(name + " along 2", lambda t, f=f: f(t, 1), odd)
    case(name + " kept", lambda t, f=f: f(t, 0, keepdim=True), whole)
    case(name + " of nothing", lambda t, f=f: f(t, 1), x[:, :0])
for n in (1, 2, 3, 5):
    case("chunk %d" % n, lambda t, n=n: torch.chunk(t, n, 1), x)
case("flatten", lambda t: torch.flatten(t) * 2, cube)
case("flatten 2 -1", lambda t: torch.flatten(t, 1) * 2, cube)
case("flatten 1 2", lambda t: torch.flatten(t, 0, 1) * 2, cube)
case("one_hot", lambda t: F.one_hot(t, 4), torch.tensor([[0, 3], [2, 2]]))
for reduction in ("mean", "sum", "none"):
    case("l1_loss " + reduction, lambda a, b, r=reduction: F.l1_loss(a, b, reduction=r), far, zeros)
    case("huber_loss " + reduction, lambda a, b, r=reduction: F.huber_loss(a, b, reduction=r, delta=1.5), far, zeros)
    case("smooth_l1_loss " + reduction, lambda a, b, r=reduction: F.smooth_l1_loss(a, b, reduction=r, beta=0.5), far, zeros)
case("smooth_l1_loss 0", lambda a, b: F.smooth_l1_loss(a, b, beta=0.0), far, zeros)

print('{"format": 1, "kind": "tensor", "library": "torch %s", "tolerance": {"abs": 1e-6, "rel": 1e-5}, "cases": [' % torch.__version__)
print(",\n".join(json.dumps(c) for c in cases))
print("]}")
