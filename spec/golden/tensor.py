"""What PyTorch makes of everyday functions of tensors: spec/golden/ops/tensor/everyday.json, which spec/tensor_functions_spec.lua compares.

    python spec/golden/tensor.py > spec/golden/ops/tensor/everyday.json

A case: its name (after `= `: the same in Lua, of the inputs a, b, c); `in`: tensors; `out`: the results; `up`: the gradient fed to the first result; `grad`: that of each input, null where it
has none. A tensor is [dtype, shape, flat list]; numbers that JSON lacks, or a double cannot hold, are texts.
"""
import json

import torch

NAMES = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.int8: "i8", torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.bool: "bool"}
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
        up = torch.linspace(-1, 2, out[0].numel()).reshape(out[0].shape).to(out[0].dtype)
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


# -- whose names are the calls in Lua ---------------------------------------------------------------------------------------------------

def same(call, *inputs):
    """A function of one name there and here: `a:name()`."""
    case("= a:%s()" % call, getattr(torch, call), *inputs)


halves = torch.tensor([[-2.5, -1.5, -0.5, 0.5], [1.5, 2.5, -3.7, 3.2], [0.0, -0.2, 7.0, -7.0]])
small = torch.tensor([[1e-7, -1e-7, 0.0, 1e-3], [-0.5, 0.3, -0.36, 2.0], [5.0, 0.75, -0.999, 30.0]])
places = torch.tensor([[0, 2, 0, 1], [2, 2, 1, 0]])
few = torch.tensor([2, 0, 2])
for name in ("floor", "ceil", "round", "trunc", "sign"):
    same(name, halves)
    same(name, odd)
    same(name, whole)
for name in ("sin", "cos", "erf"):
    same(name, 3 * x)
for name in ("log1p", "expm1"):
    same(name, small)
same("rsqrt", small.abs() + 0.01)
same("isinf", odd)
case("= a:nan_to_num()", torch.nan_to_num, odd)
case("= a:nan_to_num(1, 2, -3)", lambda t: torch.nan_to_num(t, 1.0, 2.0, -3.0), odd)
case("= a:logit()", torch.logit, torch.rand(3, 4))
case("= a:logit(0.2)", lambda t: torch.logit(t, 0.2), torch.rand(3, 4))
case("= a:elu(0.5)", lambda t: F.elu(t, 0.5), torch.tensor([-100.0, -1.0, 0.0, 0.5, 200.0]))
for name in ("logical_and", "logical_or", "logical_xor"):
    case("= F.%s(a, b)" % name, getattr(torch, name), mask, odd)
same("logical_not", whole)
case("= F.isclose(a, b)", torch.isclose, torch.tensor([1.0, 1.0, inf, nan, 0.0]), torch.tensor([1.000001, 1.1, inf, nan, 1e-9]))
case("= F.isclose(a, a, 0, 0, true)", lambda t: torch.isclose(t, t, 0, 0, True), odd)
case("= F.lerp(a, b, 0.25)", lambda a, b: torch.lerp(a, b, 0.25), x, y)
case("= F.lerp(a, b, c)", torch.lerp, x, y, torch.rand(4))
case("= F.addmm(a, b, c, 0.5, 2)", lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2), row, x, torch.randn(4, 4))
case("= F.baddbmm(a, b, c)", torch.baddbmm, torch.randn(2, 3, 3), cube, torch.randn(2, 4, 3))
case("= a:diff()", torch.diff, x)
case("= a:diff(2, 1)", lambda t: torch.diff(t, 2, 0), x)
case("= a:cumprod(1)", lambda t: t.cumprod(0), holes)
case("= a:cumprod(-1)", lambda t: t.cumprod(-1), holes)
case("= a:cumprod(2)", lambda t: t.cumprod(1), cube)
case("= a:cumprod(2)", lambda t: t.cumprod(1), whole)
case("= F.pairwise_distance(a, b)", F.pairwise_distance, x, y)
case("= F.pairwise_distance(a, b, 3, 0.1, true)", lambda a, b: F.pairwise_distance(a, b, 3, 0.1, True), x, y)
case("= F.triplet_margin_loss(a, b, c)", F.triplet_margin_loss, x, y, far)
case("= F.nll_loss(a, b, 'sum')", lambda a, b: F.nll_loss(a, b, reduction="sum"), x, few)
case("= F.cdist(a, b)", torch.cdist, x, y)
case("= F.cdist(a, b, 1)", lambda a, b: torch.cdist(a, b, 1), cube, torch.randn(2, 2, 4))
case("= F.cdist(a, b)", torch.cdist, torch.randn(30, 3), torch.randn(2, 3))
case("= F.rms_norm(a)", lambda t: F.rms_norm(t, (4,)), x)
case("= F.rms_norm(a, 2, b, 0.1)", lambda t, w: F.rms_norm(t, (3, 4), w, 0.1), cube, torch.randn(3, 4))
q, k = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
case("= F.scaled_dot_product_attention(a, b, c)", F.scaled_dot_product_attention, q, k, cube)
case("= F.scaled_dot_product_attention(a, b, c, nil, true)", lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), q, k, cube)
case("= F.scaled_dot_product_attention(a, b, b, c, false, 0.3)", lambda a, b, m: F.scaled_dot_product_attention(a, b, b, m, scale=0.3), q, k,
     torch.tensor([[True, False, True], [True, True, True], [False, False, True]]))
case("= F.scaled_dot_product_attention(a, b, b, c)", lambda a, b, m: F.scaled_dot_product_attention(a, b, b, m), q, k, torch.randn(3, 3))

case("= a:roll(1)", lambda t: torch.roll(t, 1), x)
case("= a:roll(-1, 2)", lambda t: torch.roll(t, -1, 1), x)
case("= a:roll({ 2, 5 }, { 1, -1 })", lambda t: torch.roll(t, (2, 5), (0, -1)), cube)
case("= a:flip(2)", lambda t: torch.flip(t, (1,)), x)
case("= a:flip { 1, -1 }", lambda t: torch.flip(t, (0, -1)), cube)
case("= a:tile { 2 }", lambda t: torch.tile(t, (2,)), x)
case("= a:tile { 2, 1, 3 }", lambda t: torch.tile(t, (2, 1, 3)), x)
case("= a:repeat_interleave(2)", lambda t: torch.repeat_interleave(t, 2), x)
case("= a:repeat_interleave(3, -2)", lambda t: torch.repeat_interleave(t, 3, -2), x)
case("= a:repeat_interleave(b, 1)", lambda t, n: torch.repeat_interleave(t, n, 0), x, few)
for name in ("triu", "tril"):
    for k in (0, 1, -2):
        case("= a:%s(%d)" % (name, k), lambda t, n=name, k=k: getattr(torch, n)(t, k), cube)
    same(name, mask)
for k in (0, 2, -1, 7):
    case("= a:diag(%d)" % k, lambda t, k=k: torch.diag(t, k), x)
for k in (0, 2, -1):
    case("= a:diag(%d)" % k, lambda t, k=k: torch.diag(t, k), row)
same("trace", x)
case("= F.outer(a, b)", torch.outer, row, torch.randn(3))
case("= F.pad(a, { 1, 2 })", lambda t: F.pad(t, (1, 2)), x)
case("= F.pad(a, { 0, -1, 2, 0 }, 0.5)", lambda t: F.pad(t, (0, -1, 2, 0), value=0.5), cube)
case("= unpack(a:unbind(2))", lambda t: torch.unbind(t, 1), x)
case("= F.meshgrid { a, b }", lambda a, b: torch.meshgrid(a, b, indexing="ij"), row, torch.randn(3))
case("= a:scatter_add(1, b, c)", lambda t, i, s: t.scatter_add(0, i, s), x, places, torch.randn(2, 4))
case("= a:scatter_add(2, b, c)", lambda t, i, s: t.scatter_add(1, i, s), torch.randn(2, 3), places, torch.randn(2, 4))
case("= a:scatter_add(2, b, c)", lambda t, i, s: t.scatter_add(1, i, s), whole[:2], places, whole[:2])
case("= a:scatter(2, b, c)", lambda t, i, s: t.scatter(1, i, s), x, torch.tensor([[1, 0], [3, 2], [0, 1]]), torch.randn(3, 2))
case("= a:scatter(2, b, 5)", lambda t, i: t.scatter(1, i, 5), x, torch.tensor([[1], [3], [0]]))
case("= a:scatter(1, b, a)", lambda t, i: t.scatter(0, i, t), mask, torch.tensor([[2, 1, 0, 0], [0, 2, 1, 2], [1, 0, 2, 1]]))
case("= a:index_add(1, b, c)", lambda t, i, s: t.index_add(0, i, s), x, few, y)
case("= a:index_add(2, b, c, 2)", lambda t, i, s: t.index_add(1, i, s, alpha=2), x, few, torch.randn(3, 3))
case("= a:take_along_dim(b, 2)", lambda t, i: torch.take_along_dim(t, i, 1), cube, torch.tensor([[[2, 0, 1, 1]]]))
case("= a:take_along_dim(b)", torch.take_along_dim, x, few)
case("= a:masked_select(b)", torch.masked_select, x, mask)
case("= a:masked_select(b)", torch.masked_select, x, torch.tensor([True, False, True, True]))
case("= a[b]", lambda t, m: t[m], cube[0], torch.tensor([True, False, True]))
case("= a[b]", lambda t, m: t[m], x, mask)
same("nonzero", holes)
same("nonzero", mask)

for name in ("searchsorted", "searchsorted right"):
    right = name != "searchsorted"
    lua = "= F.searchsorted(a, b%s)" % (", true" if right else "")
    case(lua, lambda a, b, r=right: torch.searchsorted(a, b, right=r), torch.tensor([-1.0, 0.0, 0.0, 2.5]), odd)
    case(lua, lambda a, b, r=right: torch.searchsorted(a, b, right=r), whole.sort(1)[0], whole)
    case(lua, lambda a, b, r=right: torch.searchsorted(a, b, right=r), torch.tensor([1, 3, 3, 9]), torch.tensor([3, 0, 10]))
case("= a:bucketize(b)", torch.bucketize, x, torch.tensor([-1.0, 0.0, 1.0]))
for t in (whole, ties, mask, torch.tensor([3, 1, 3, 0], dtype=torch.uint8)):
    case("= a:unique(true, true)", lambda t: torch.unique(t.detach(), return_inverse=True, return_counts=True), t)
case("= (a:unique())", lambda t: torch.unique(t.detach()), odd)
case("= a:bincount()", torch.bincount, torch.tensor([3, 1, 3, 0, 1, 3]))
case("= a:bincount(nil, 6)", lambda t: torch.bincount(t, minlength=6), torch.tensor([3, 1], dtype=torch.int32))
case("= a:bincount(b)", lambda t, w: torch.bincount(t, w.detach()), torch.tensor([3, 1, 3, 0]), row)
case("= a:histc(4)", lambda t: torch.histc(t.detach(), 4), x)
case("= a:histc(5, -1, 1)", lambda t: torch.histc(t.detach(), 5, -1, 1), torch.tensor([-1.0, -0.6, -2.0, 1.0, 0.0, 0.99, 3.0]))
case("= a:count_nonzero()", torch.count_nonzero, holes)
case("= a:count_nonzero(2)", lambda t: torch.count_nonzero(t, 1), holes)
case("= a:isin(b)", torch.isin, whole, torch.tensor([2, 9007199254740993, -5]))
case("= a:isin(b)", torch.isin, odd, torch.tensor([2.5, nan, inf]))
case("= a:kthvalue(2)", lambda t: torch.kthvalue(t, 2), x)
case("= a:kthvalue(3, 1, true)", lambda t: torch.kthvalue(t, 3, 0, True), x)
case("= a:median()", torch.median, x)
case("= a:median(1)", lambda t: torch.median(t, 0), x)
case("= a:median(2, true)", lambda t: torch.median(t, 1, True), x)
case("= (a:median(2))", lambda t: torch.median(t, 1)[0], odd)
case("= a:median(1)", lambda t: torch.median(t, 0), whole[:, :2])
case("= a:quantile(0.3)", lambda t: torch.quantile(t, 0.3), x)
case("= a:quantile({ 0, 0.5, 0.9, 1 }, 2)", lambda t: torch.quantile(t, torch.tensor([0, 0.5, 0.9, 1.0]), 1), x)
case("= a:quantile(0.25, 1, true)", lambda t: torch.quantile(t, 0.25, 0, True), cube)
case("= a:quantile(0.25, 2)", lambda t: torch.quantile(t, 0.25, 1), torch.tensor([[1.0, nan, 2.0], [3.0, 1.0, 2.0]]))
case("= peri.linspace(-1, 2, 7, nil, device)", lambda: torch.linspace(-1, 2, 7))
case("= peri.linspace(3, 0.1, 4, 'f64', device)", lambda: torch.linspace(3, 0.1, 4, dtype=torch.float64))
case("= peri.linspace(3, 5, 1, nil, device)", lambda: torch.linspace(3, 5, 1))
case("= peri.linspace(3, 5, 0, nil, device)", lambda: torch.linspace(3, 5, 0))
case("= peri.eye(2, 3, nil, device)", lambda: torch.eye(2, 3))
case("= peri.ones_like(a)", torch.ones_like, whole)
case("= peri.full_like(a, 2.5, 'f64')", lambda t: torch.full_like(t.detach(), 2.5, dtype=torch.float64), x)
for flat in (ties, odd, cube, whole, torch.tensor([[True, False, True], [False, False, True]])):
    case("= a:cummax(1)", lambda t: t.cummax(0), flat)
    case("= a:cummin(-1)", lambda t: t.cummin(-1), flat)
for flat in (ties, whole, torch.randint(0, 4, (3, 9)), torch.randint(0, 3, (9, 5)).float()):
    case("= a:mode()", lambda t: t.mode(), flat)
    case("= a:mode(1, true)", lambda t: t.mode(0, True), flat)
case("= F.tensordot(a, b, 1)", lambda a, b: torch.tensordot(a, b, 1), cube, torch.randn(4, 2))
case("= F.tensordot(a, b)", torch.tensordot, cube, torch.randn(3, 4, 2))
case("= F.tensordot(a, b, 0)", lambda a, b: torch.tensordot(a, b, 0), row, x)
case("= F.tensordot(a, b, { { 3, 1 }, { 1, -1 } })", lambda a, b: torch.tensordot(a, b, ([2, 0], [0, -1])), cube, torch.randn(4, 5, 2))

# tensors without dimensions, of no elements, of integers
for call, f in (("sum(-1)", lambda t: t.sum(-1)), ("mean(1, true)", lambda t: t.mean(0, True)), ("amax(1)", lambda t: t.amax(0)),
                ("max(1)", lambda t: t.max(0)), ("argmin(-1)", lambda t: t.argmin(-1)), ("prod(1)", lambda t: t.prod(0)),
                ("sort(1)", lambda t: t.sort(0)), ("topk(1)", lambda t: t.topk(1)), ("kthvalue(1)", lambda t: t.kthvalue(1)),
                ("median(1)", lambda t: t.median(0)), ("mode(-1)", lambda t: t.mode(-1)), ("cummax(1)", lambda t: t.cummax(0)),
                ("cummin(-1)", lambda t: t.cummin(-1)), ("cumsum(-1)", lambda t: t.cumsum(-1)), ("cumprod(1)", lambda t: t.cumprod(0)),
                ("softmax(1)", lambda t: t.softmax(0)), ("log_softmax(-1)", lambda t: t.log_softmax(-1)),
                ("logsumexp(1)", lambda t: t.logsumexp(0)), ("var(1, false, 0)", lambda t: t.var(0, correction=0)),
                ("norm(3, 1)", lambda t: torch.linalg.vector_norm(t, 3, 0)), ("squeeze(1) * 2", lambda t: t.squeeze(0) * 2),
                ("transpose(1, -1) * 2", lambda t: t.transpose(0, -1) * 2), ("flip(1)", lambda t: t.flip(0)),
                ("quantile({ 0.5 }, 1)", lambda t: t.quantile(torch.tensor([0.5]), 0)), ("count_nonzero(1)", lambda t: t.count_nonzero(0))):
    case("= a:" + call, f, torch.tensor(2.5))
case("= a:gather(1, b)", lambda t, i: t.gather(0, i), torch.tensor(2.5), torch.tensor(0))
case("= a:scatter(1, b, 7)", lambda t, i: t.scatter(0, i, 7), torch.tensor(2.5), torch.tensor(0))
for name in ("argmax", "argmin"):
    case("= a:%s(nil, true)" % name, lambda t, n=name: getattr(t, n)(keepdim=True), x)
for dtype in (torch.float32, torch.float64, torch.float16):
    case("= a:mean(1)", lambda t: t.detach().mean(0), torch.zeros(0, 3, dtype=dtype))
    case("= a:mean { 1, 3 }", lambda t: t.detach().mean((0, 2)), torch.zeros(0, 2, 3, dtype=dtype))
case("= a:logsumexp(1)", lambda t: t.detach().logsumexp(0), torch.zeros(0, 3))
small = torch.tensor([[100, -100, 3], [0, 1, 127]], dtype=torch.int8)
case("= a:logsumexp(2)", lambda t: t.logsumexp(1), small)
case("= a:logit()", torch.logit, torch.tensor([0, 1, 2, 200], dtype=torch.uint8))
case("= a:isinf()", torch.isinf, small)
case("= a:index_add(2, b, a, 2)", lambda t, i: t.index_add(1, i, t, alpha=2), small, torch.tensor([2, 0, 2]))
for dtype in (torch.float32, torch.float64): # gradients of infinities where a function is flat
    steep = torch.tensor([inf, -inf, 2.0, inf] * 3, dtype=dtype).reshape(3, 4)
    case("= a:relu() * b", lambda t, w: t.relu() * w.detach(), x.to(dtype), steep)
    case("= a:clamp(-0.5, 0.5) * b", lambda t, w: t.clamp(-0.5, 0.5) * w.detach(), x.to(dtype), steep)
holes_of = torch.tensor([[1.0, nan, 2.5], [nan, nan, nan], [-1.0, 0.0, inf]])
for call, f in (("nansum()", torch.nansum), ("nansum(1, true)", lambda t: torch.nansum(t, 0, True)), ("nanmean(2)", lambda t: torch.nanmean(t, 1)),
                ("nanmean()", torch.nanmean)):
    case("= a:" + call, lambda t, f=f: f(t.detach()), holes_of)  # of a line of NaN its gradients are NaN, ours 0
    case("= a:" + call, f, torch.where(mask, x, nan))
case("= a:nansum(2)", lambda t: torch.nansum(t, 1), whole)
for k in (0, 1, -2, 9):
    case("= peri.triu_indices(3, 4, %d, device)" % k, lambda k=k: torch.triu_indices(3, 4, k))
    case("= peri.tril_indices(4, nil, %d, device)" % k, lambda k=k: torch.tril_indices(4, 4, k))
classes = torch.tensor([2, 0, 3])
for reduction in ("mean", "sum", "none"):
    for ignore, smoothing in ((0, 0.0), (-100, 0.1), (3, 0.25), (7, 1.0)):
        case("= F.cross_entropy(a, b, '%s', %d, %s)" % (reduction, ignore, smoothing),
             lambda t, c, r=reduction, i=ignore, s=smoothing: F.cross_entropy(t, c, reduction=r, ignore_index=i, label_smoothing=s), x, classes)
case("= F.cross_entropy(a, b, nil, nil, 0.2)", lambda t, c: F.cross_entropy(t, c, label_smoothing=0.2), x, classes)
case("= F.cross_entropy(a, b, nil, 1)", lambda t, c: F.cross_entropy(t.detach(), c, ignore_index=1), x, torch.tensor([1, 1, 1]))
case("= F.lerp(a, b, 1)", lambda a, b: torch.lerp(a, b, 1), torch.tensor([1.0, -inf, 1e30]), torch.tensor([2.0, 3.0, 0.1]))
case("= F.kl_div(a, b, false, 'none')", lambda a, b: F.kl_div(a, b.detach(), reduction="none"), x[0], torch.tensor([-0.5, 0.0, nan, 0.3]))
case("= F.kl_div(a, b, false, 'batchmean')", lambda a, b: F.kl_div(a, b.detach(), reduction="batchmean"), torch.tensor(-0.3), torch.tensor(0.5))

# logarithms and powers, of which whole numbers are exact; activations
sizes = torch.tensor([1.0, 2.0, 8.0, 1048575.0, 1048576.0, 0.1, 1000.0, 1e-20, 3.0, inf, 0.0, -1.0, nan])
for dtype in (torch.float32, torch.float64):
    case("= a:log2()", lambda t: t.detach().log2(), sizes.to(dtype))
    case("= a:log10()", lambda t: t.detach().log10(), sizes.to(dtype))
    case("= a:exp2()", torch.exp2, torch.tensor([-3.0, 0.0, 10.0, 0.5, -1.5, 1.0], dtype=dtype))
    case("= a:log2():floor()", lambda t: t.detach().log2().floor(), 2.0 ** torch.arange(-20, 21, dtype=dtype))
case("= a:log2()", torch.log2, x.abs() + 0.1)
case("= a:log10()", torch.log10, x.abs() + 0.1)
for name in ("log2", "log10", "exp2"):
    case("= a:%s()" % name, getattr(torch, name), torch.tensor([1, 2, 8, 30]))
case("= a:selu()", F.selu, 3 * x)
case("= a:mish()", F.mish, 3 * x)
case("= a:glu()", F.glu, x)
case("= a:glu(1)", lambda t: F.glu(t, 0), cube)
case("= F.addcmul(a, b, c, -0.5)", lambda t, a, b: torch.addcmul(t, a, b, value=-0.5), x, y, row)
case("= F.addcmul(a, b, c)", torch.addcmul, torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, -6]))
case("= F.logaddexp(a, b)", torch.logaddexp, 3 * x, y)
case("= F.logaddexp(a, b)", lambda a, b: torch.logaddexp(a.detach(), b.detach()), torch.tensor([inf, -inf, -inf, nan, 2.0, 100.0]),
     torch.tensor([inf, -inf, 1.0, 0.0, 2.0, -100.0]))
for dim, there in (("", None), ("2", 1), ("-1, true", -1)):
    case("= a:aminmax(%s)" % dim, lambda t, d=there, k=dim.endswith("true"): torch.aminmax(t, dim=d, keepdim=k), x)
for name in ("std_mean", "var_mean"):
    case("= a:%s()" % name, getattr(torch, name), x)
    case("= a:%s(2, true, 0)" % name, lambda t, f=getattr(torch, name): f(t, 1, correction=0, keepdim=True), x)

# other shapes and places
case("= a:unflatten(3, { 2, -1 }) * 2", lambda t: t.unflatten(2, (2, -1)) * 2, cube)
case("= a:unflatten(-1, { 1, 4 }) * 2", lambda t: t.unflatten(-1, (1, 4)) * 2, cube)
case("= a:movedim(1, -1) * 2", lambda t: t.movedim(0, -1) * 2, cube)
case("= a:movedim({ 1, 2 }, { 3, 1 }) * 2", lambda t: t.movedim((0, 1), (2, 0)) * 2, cube)
case("= F.hstack { a, b }", lambda a, b: torch.hstack((a, b)), x, y)
case("= F.hstack { a, b }", lambda a, b: torch.hstack((a, b)), row, torch.tensor(3.0))
case("= F.vstack { a, b }", lambda a, b: torch.vstack((a, b)), x, row)
case("= F.vstack { a, b }", lambda a, b: torch.vstack((a, b)), row, row + 1)
case("= a:index_copy(2, b, c)", lambda t, i, u: t.index_copy(1, i, u), x, torch.tensor([3, 0]), torch.randn(3, 2))
case("= a:index_copy(1, b, c)", lambda t, i, u: t.index_copy(0, i, u), cube, torch.tensor([1]), torch.randn(1, 3, 4))
case("= a:index_fill(-1, b, 7)", lambda t, i: t.index_fill(-1, i, 7), x, torch.tensor([1, 3, 1]))
case("= a:index_fill(1, b, -2)", lambda t, i: t.index_fill(0, i, -2), whole, torch.tensor([2]))
at = torch.tensor([[0, 2, 0, 0, 3], [1, 1, 1, 3, 3], [2, 0, 1, 2, 2]])
for reduce in ("sum", "mean", "amax", "amin"):
    for own in (True, False):
        call = "= a:scatter_reduce(%%d, b, c, '%s', %s)" % (reduce, str(own).lower())
        case(call % 2, lambda t, i, u, r=reduce, o=own: t.scatter_reduce(1, i, u, r, include_self=o), x, at, torch.randn(3, 5))
        case(call % 1, lambda t, i, u, r=reduce, o=own: t.scatter_reduce(0, i, u, r, include_self=o), x, at[:, :4] % 3, torch.randn(3, 4))
        case(call % -1, lambda t, i, u, r=reduce, o=own: t.scatter_reduce(-1, i, u, r, include_self=o), torch.tensor([[5, -7, 0, 3]] * 3), at,
             torch.tensor([[4, -9, 3, -2, 8], [2, 2, -8, 1, 0], [-3, 5, 6, 7, 7]]))
        case(call % 1, lambda t, i, u, r=reduce, o=own: t.detach().scatter_reduce(0, i, u.detach(), r, include_self=o), row,
             torch.tensor([0, 0, 1, 1, 3]), torch.tensor([nan, 1.0, inf, -inf, nan]))

# counts and values with a variance
counts_of = torch.tensor([[0.0, 1.0, 2.0, 5.0], [1.0, 0.0, 7.0, 3.0], [2.0, 2.0, 0.0, 1.0]])
for reduction in ("mean", "sum", "none"):
    for full in (False, True):
        case("= F.poisson_nll_loss(a, b:detach(), true, %s, nil, '%s')" % (str(full).lower(), reduction),
             lambda t, c, f=full, r=reduction: F.poisson_nll_loss(t, c.detach(), full=f, reduction=r), x, counts_of)
        case("= F.poisson_nll_loss(a, b:detach(), false, %s, 0.01, '%s')" % (str(full).lower(), reduction),
             lambda t, c, f=full, r=reduction: F.poisson_nll_loss(t, c.detach(), log_input=False, full=f, eps=0.01, reduction=r), x.abs(), counts_of)
        case("= F.gaussian_nll_loss(a, b, c, %s, nil, '%s')" % (str(full).lower(), reduction),
             lambda t, c, v, f=full, r=reduction: F.gaussian_nll_loss(t, c, v, full=f, reduction=r), x, y, torch.rand(3, 4) + 0.1)
case("= F.gaussian_nll_loss(a, b, c)", lambda t, c, v: F.gaussian_nll_loss(t, c, v), x, y, torch.rand(3, 1) + 0.1)

# nn.utils
case("= peri.nn.utils.pad_sequence({ a, b, c })", lambda *list: torch.nn.utils.rnn.pad_sequence(list), x, cube[1, :1], cube[0, :2])
case("= peri.nn.utils.pad_sequence({ a, b, c }, true, -1)", lambda *list: torch.nn.utils.rnn.pad_sequence(list, True, -1),
     torch.tensor([4, 5, 6]), torch.tensor([7]), torch.tensor([], dtype=torch.int64))
case("= peri.nn.utils.parameters_to_vector { a, b, c } * 2", lambda *list: torch.nn.utils.parameters_to_vector(list) * 2, x, row, cube)

print('{"format": 1, "kind": "tensor", "library": "torch %s", "tolerance": {"abs": 1e-6, "rel": 1e-5}, "cases": [' % torch.__version__)
print(",\n".join(json.dumps(c) for c in cases))
print("]}")
