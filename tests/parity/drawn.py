"""Draws calls of tensor functions, and writes what PyTorch makes of them: python3 tests/parity/drawn.py SEED CALLS [NAME,NAME...] > FILE

    build/perilune run tests/parity/drawn.lua FILE

makes the same calls here and prints what differs: shapes, dtypes, values, gradients, and what only one of the two refuses. Arguments are drawn
from what is rarely thought of: no elements, no dimensions, views that are not contiguous, all dtypes, NaN and infinities, negative dimensions and some
that are not there, operands that broadcast. docs/tensors.md (What differs from PyTorch) has what is meant to differ.

Each line of FILE is a Lua chunk: { k = its number, name =, args = { ... }, and either err = PyTorch's words, or out = { results },
up = the gradient fed to the first result of floats, and grads = { of each tensor that wants one, or false } }. A tensor is { dtype, { shape },
{ numbers } }.
"""
import json
import math
import random
import sys
import warnings

import torch
import torch.nn.functional as TF

seed, calls = int(sys.argv[1]), int(sys.argv[2])
only = set(sys.argv[3].split(",")) if len(sys.argv) > 3 else None
R = random.Random(seed)
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
NAMES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
         "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool}
BACK = {dtype: name for name, dtype in NAMES.items()}
FLOATS, WHOLE = ["f32", "f32", "f32", "f64", "f16", "bf16"], ["i64", "i64", "i32", "bool", "u8", "i8", "i16"]
nan, inf = math.nan, math.inf


def number(x):
    """A number as Lua's text."""
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, int):
        return str(x) if abs(x) < 2**53 else "%dLL" % x if x > -2**63 else "(-9223372036854775807LL - 1)"
    return "(0/0)" if x != x else "math.huge" if x == inf else "-math.huge" if x == -inf else repr(x)


def dump(t):
    """A tensor as Lua's text."""
    flat = t.detach().reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.int64)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.to(torch.float32)
    return "{'%s',{%s},{%s}}" % (BACK[t.dtype], ",".join(map(str, t.shape)), ",".join(map(number, flat.tolist())))


class T:
    """A drawn tensor of a shape: base numbers, and sometimes a view of them that is not contiguous. values: what its numbers are drawn from;
    ids: below which number; special: whether NaN and infinities are among them; nograd: that no gradient is wanted."""

    def __init__(self, shape, dtype, values=None, special=None, ids=None, nograd=False):
        self.shape, self.dtype, self.nograd, self.views = list(shape), dtype, nograd, []
        base = self.view_of(list(shape)) if R.random() < 0.35 and shape else list(shape)
        special = R.random() < 0.15 if special is None else special
        drawn = [self.one(values, special, ids) for _ in range(math.prod(base))]
        self.base = torch.tensor(drawn, dtype=NAMES[dtype]).reshape(base)

    def one(self, values, special, ids):
        if ids is not None:
            return R.randrange(ids) if ids else 0
        if values is not None:
            return R.choice(values)
        if self.dtype == "bool":
            return R.random() < 0.5
        if self.dtype == "u8":
            return R.choice([0, 1, 2, 3, 200, 255])
        if self.dtype in WHOLE:
            return R.choice([0, 1, 2, 3, -1, -2, 7, 100, -100])
        if special and R.random() < 0.3:
            return R.choice([nan, inf, -inf, 0.0, -0.0, 1.0])
        return R.choice([0.0, 1.0, -1.0, 0.5, 2.5, -1.5]) if R.random() < 0.3 else R.gauss(0, 1.5)

    def view_of(self, base):
        """The shape of a base of which a view has the shape `base`."""
        kind, d = R.choice(["transpose", "step", "offset", "expand"]), R.randrange(len(base))
        size = base[d]
        if kind == "transpose" and len(base) > 1:
            a, b = R.sample(range(len(base)), 2)
            base[a], base[b] = base[b], base[a]
            self.views.append(("transpose", a, b))
        elif kind == "step":
            step = R.choice([2, 3])
            base[d] = max(0, (size - 1) * step + 1) if size else 0
            self.views.append(("slice", d, 0, base[d], step))
        elif kind == "offset":
            base[d] = size + 3
            self.views.append(("slice", d, 2, 2 + size, 1))
        elif kind == "expand" and size > 1:
            base[d] = 1
            self.views.append(("expand", self.shape))
        return base

    def torch(self):
        self.leaf = t = self.base.clone()
        if t.dtype in (torch.float32, torch.float64) and not self.nograd:
            t.requires_grad_()
        for v in self.views:
            if v[0] == "transpose":
                t = t.transpose(v[1], v[2])
            elif v[0] == "slice":
                t = t.transpose(0, v[1])[v[2]:v[3]:v[4]].transpose(0, v[1])
            else:
                t = t.expand(v[1])
        return t

    def lua(self):
        views = []
        for v in self.views:
            sizes = "{%s}" % ",".join(map(str, v[1])) if v[0] == "expand" else "%d" % (v[1] + 1)
            rest = [v[2] + 1] if v[0] == "transpose" else v[2:]
            views.append("{'%s',%s}" % (v[0], ",".join([sizes, *map(str, rest)])))
        return "{t=%s,views={%s},nograd=%s}" % (dump(self.base), ",".join(views), "true" if self.nograd else "false")


class Sorted(T):
    """Five numbers in rising order."""

    def __init__(self, dtype):
        super().__init__([5], dtype, special=False, nograd=True)
        self.views, self.base = [], torch.sort(self.base.reshape(-1)[:5])[0]


class D(int):
    """A dimension as in Lua: 1, 2, ... or -1, -2, ..."""


def at(d):
    """A dimension as PyTorch counts it."""
    return d - 1 if d > 0 else int(d)


def shape(lo=0, hi=3, empty=0.1):
    return [0 if R.random() < empty else R.choice([1, 2, 3, 4, 5]) for _ in range(R.randint(lo, hi))]
def dt(kind="any"):
    if kind == "f": return R.choice(FLOATS)
    if kind == "w": return R.choice(WHOLE)
    return R.choice(FLOATS + FLOATS + WHOLE) if kind == "any" else kind
def t(kind="any", lo=0, hi=3, **k):
    empty = k.pop("empty", 0.1)
    return T(shape(lo, hi, empty), dt(kind), **k)
def dim_of(x, wrong=0.05):
    n = len(x.shape) if not isinstance(x, int) else x
    if R.random() < wrong or n == 0: return D(R.choice([1, -1, n + 1, -n - 1]))
    d = R.randint(1, n)
    return D(d if R.random() < 0.5 else d - n - 1)
def dims_of(x):
    r = R.random()
    if r < 0.3: return None
    if r < 0.7: return dim_of(x)
    n = len(x.shape)
    k = R.randint(1, n) if n else 0
    if not k: return None
    return [D(d if R.random() < 0.5 else d - n - 1) for d in R.sample(range(1, n + 1), k)]
def keep(): return R.choice([None, False, True])
def bcast(x):
    s = list(x.shape)
    for i in range(len(s)):
        if R.random() < 0.25: s[i] = 1
    if R.random() < 0.3: s = s[R.randint(0, len(s)):]
    elif R.random() < 0.2: s = [R.choice([1, 2])] + s
    return s
def other(x, kind="any"): return T(bcast(x), dt(kind) if kind != "same" else x.dtype)
def operand(x, kind="any"):
    r = R.random()
    if r < 0.3: return R.choice([0, 1, 2, -1, 3, 0.5, -1.5, 2.5, 1e-3, 300, math.inf, math.nan])
    return other(x, x.dtype if r < 0.6 else kind)

# Name -> how its arguments are drawn, in Lua's order, the same by PyTorch, and options: `lua`, another name there; `list`: the result is a list.
G = {}
def add(name, draw, f, **opts): G[name] = (draw, f, opts)

for n in ("relu sigmoid tanh exp log sqrt abs square neg log1p expm1 rsqrt sin cos erf floor ceil round trunc sign isnan isfinite isinf logical_not reciprocal").split():
    add(n, lambda: [t()], getattr(torch, n))
for n in "silu gelu softplus logsigmoid".split():
    add(n, lambda: [t()], getattr(TF, n))
add("leaky_relu", lambda: [t(), R.choice([None, 0.1, -0.5])], lambda x, s: TF.leaky_relu(x, 0.01 if s is None else s))
add("elu", lambda: [t(), R.choice([None, 0.5])], lambda x, s: TF.elu(x, 1.0 if s is None else s))
add("logit", lambda: [t(), R.choice([None, 0.1])], torch.logit)
add("nan_to_num", lambda: [t(special=True), R.choice([None, 1.5]), R.choice([None, 3]), R.choice([None, -3])], torch.nan_to_num)
def two(): x = t(); return [x, operand(x)]
for n in "add sub mul div floor_divide remainder fmod pow eq ne lt le gt ge".split():
    add(n, two, getattr(torch, n))
def swap(): a, b = two(); return [b, a]
for n in "add sub mul div floor_divide remainder pow".split():
    fn = {"sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "add": lambda a, b: a + b, "div": lambda a, b: a / b, "floor_divide": lambda a, b: a // b,
          "remainder": torch.remainder, "pow": torch.pow}[n]
    add("r_" + n, swap, fn, lua=n)
def pair(kind="any"):
    def d(): x = t(kind); return [x, other(x)]
    return d
for n in "maximum minimum logical_and logical_or logical_xor".split(): add(n, pair(), getattr(torch, n))
def close():
    x = t(); y = T(x.shape, x.dtype if R.random() < .8 else dt()); return [x, R.choice([x, y]), R.choice([None, .1]), R.choice([None, .5]), keep()]
add("isclose", close, lambda a, b, r, s, e: torch.isclose(a, b, 1e-5 if r is None else r, 1e-8 if s is None else s, bool(e)))
add("equal", lambda: (lambda x: [x, R.choice([x, T(x.shape, x.dtype), t()])])(t()), torch.equal)
def wh():
    x = t(); c = T(bcast(x), "bool"); return [c, x, operand(x)]
add("where", wh, torch.where)
def mf():
    x = t(); return [x, T(bcast(x)[-len(x.shape):] if x.shape else [], "bool"), R.choice([0, 1, -2, 1.5, math.inf, -math.inf, math.nan])]
add("masked_fill", mf, lambda x, m, v: x.masked_fill(m, v))
add("clamp", lambda: [t(), R.choice([None, -1, 0, 0.5, -math.inf]), R.choice([1, 2, 0.25, math.inf, -1])], lambda x, a, b: torch.clamp(x, a, b))
add("clone", lambda: [t()], torch.clone)
add("lerp", lambda: (lambda x: [x, T(x.shape, x.dtype), R.choice([0.5, 0.25, 2])])(t("f")), torch.lerp)
def red(kind="any"):
    def d(): x = t(kind); return [x, dims_of(x), keep()]
    return d
def rd(f):
    return lambda x, d, k: f(x, tuple(range(x.dim())) if d is None else d, bool(k))
add("sum", red(), rd(torch.sum)); add("mean", red(), rd(torch.mean)); add("amax", red(), rd(torch.amax)); add("amin", red(), rd(torch.amin))
add("any", red(), rd(torch.any)); add("all", red(), rd(torch.all)); add("logsumexp", red(), rd(torch.logsumexp))
def one_dim(kind="any", opt=True):
    def d(): x = t(kind); return [x, R.choice([None, dim_of(x), dim_of(x)]) if opt else dim_of(x), keep()]
    return d
add("prod", one_dim(), lambda x, d, k: torch.prod(x, d, bool(k)) if d is not None else torch.prod(x))
for n in ("argmax", "argmin"):
    add(n, one_dim(), lambda x, d, k, f=getattr(torch, n): f(x, d, bool(k)))
for n in ("max", "min"):
    add(n, one_dim(opt=False), lambda x, d, k, f=getattr(torch, n): f(x, d, bool(k)))
    add(n + "_all", lambda: [t()], getattr(torch, n), lua=n)
def vs(): x = t(); return [x, dims_of(x), keep(), R.choice([None, 0, 1, 2])]
for n in ("var", "std"):
    add(n, vs, lambda x, d, k, c, f=getattr(torch, n): f(x, d, correction=1 if c is None else c, keepdim=bool(k)))
add("norm", lambda: (lambda x: [x, R.choice([None, 1, 2, 3, 0, 1.5, math.inf, -math.inf]), dims_of(x), keep()])(t()),
    lambda x, p, d, k: torch.linalg.vector_norm(x, 2 if p is None else p, d, bool(k)))
for n in "cumsum cumprod cummax cummin".split():
    add(n, lambda: (lambda x: [x, dim_of(x)])(t()), getattr(torch, n))
add("softmax", lambda: (lambda x: [x, dim_of(x)])(t()), torch.softmax)
add("log_softmax", lambda: (lambda x: [x, dim_of(x)])(t()), torch.log_softmax)
add("sort", lambda: (lambda x: [x, R.choice([None, dim_of(x)]), keep()])(t()), lambda x, d, k: torch.sort(x, dim=-1 if d is None else d, descending=bool(k), stable=True))
add("argsort", lambda: (lambda x: [x, R.choice([None, dim_of(x)]), keep()])(t()), lambda x, d, k: torch.argsort(x, dim=-1 if d is None else d, descending=bool(k), stable=True))
add("topk", lambda: (lambda x: [x, R.randint(0, 4), R.choice([None, dim_of(x)]), keep()])(t()), lambda x, n, d, k: torch.topk(x, n, dim=-1 if d is None else d, largest=k is not False)[0])
add("kthvalue", lambda: (lambda x: [x, R.randint(0, 4), R.choice([None, dim_of(x)]), keep()])(t()), lambda x, n, d, k: torch.kthvalue(x, n, dim=-1 if d is None else d, keepdim=bool(k))[0])
add("median", one_dim(opt=False), lambda x, d, k: torch.median(x, d, bool(k))[0])
add("median_all", lambda: [t()], torch.median, lua="median")
add("mode", one_dim(opt=False), lambda x, d, k: torch.mode(x, d, bool(k))[0])
add("quantile", lambda: (lambda x: [x, R.choice([0.5, 0, 1, 0.3, [0.1, 0.9]]), R.choice([None, dim_of(x)]), keep()])(t("f")),
    lambda x, q, d, k: torch.quantile(x, torch.tensor(q, dtype=x.dtype) if isinstance(q, list) else q, d, bool(k)))
def gat():
    x = t(lo=1); d = dim_of(x, 0)
    i = at(d) % len(x.shape)
    s = [R.randint(0, m) for m in x.shape]; s[i] = R.randint(0, 4) if x.shape[i] else 0
    return [x, d, T(s, "i64", ids=x.shape[i])]
add("gather", gat, torch.gather)
def isel():
    x = t(lo=1); d = dim_of(x, 0)
    i = at(d) % len(x.shape)
    return [x, d, T([R.randint(0, 4) if x.shape[i] else 0], R.choice(["i64", "i32"]), ids=x.shape[i])]
add("index_select", isel, torch.index_select)
add("select", lambda: (lambda x: [x, dim_of(x), R.randint(-3, 4)])(t(lo=1)), torch.select)
add("squeeze", lambda: (lambda x: [x, R.choice([None, dim_of(x)])])(t()), lambda x, d: torch.squeeze(x) if d is None else torch.squeeze(x, d))
add("unsqueeze", lambda: (lambda x: [x, dim_of(len(x.shape) + 1)])(t()), torch.unsqueeze)
add("flip", lambda: (lambda x: [x, dims_of(x) or dim_of(x)])(t()), lambda x, d: torch.flip(x, d if isinstance(d, list) else [d]))
add("roll", lambda: (lambda x: [x, R.randint(-5, 5), R.choice([None, dim_of(x)])])(t()), torch.roll)
add("tile", lambda: [t(), [R.randint(0, 3) for _ in range(R.randint(0, 4))]], torch.tile)
add("repeat_interleave", lambda: (lambda x: [x, R.randint(0, 3), R.choice([None, dim_of(x)])])(t()), torch.repeat_interleave)
for n in ("triu", "tril"): add(n, lambda: [t(lo=1), R.choice([None, -2, -1, 0, 1, 3])], lambda x, k, f=getattr(torch, n): f(x, k or 0))
add("diag", lambda: [t(lo=1, hi=2), R.choice([None, -2, -1, 0, 1, 3])], lambda x, k: torch.diag(x, k or 0))
add("trace", lambda: [t(lo=1, hi=3)], torch.trace)
add("outer", lambda: [t(lo=1, hi=1), t(lo=1, hi=1)], torch.outer)
add("pad", lambda: (lambda x: [x, [R.randint(-1, 2) for _ in range(2 * R.randint(0, len(x.shape)))], R.choice([None, 1])])(t()),
    lambda x, p, v: TF.pad(x, p, value=v))
add("unbind", lambda: (lambda x: [x, R.choice([None, dim_of(x)])])(t()), lambda x, d: torch.unbind(x, d or 0), list=True)
add("chunk", lambda: (lambda x: [x, R.randint(1, 4), R.choice([None, dim_of(x)])])(t()), lambda x, n, d: torch.chunk(x, n, d or 0), list=True)
add("flatten", lambda: (lambda x: [x, R.choice([None, dim_of(x)]), R.choice([None, dim_of(x)])])(t()), lambda x, a, b: torch.flatten(x, 0 if a is None else a, -1 if b is None else b))
add("diff", lambda: (lambda x: [x, R.choice([None, 0, 1, 2]), R.choice([None, dim_of(x)])])(t()), lambda x, n, d: torch.diff(x, 1 if n is None else n, -1 if d is None else d))
def scat(kind):
    def d():
        a = gat(); x, _, i = a
        if kind == "scatter": return a + [R.choice([0, 1, 2])]
        return a + [T(i.shape, x.dtype)]
    return d
add("scatter", scat("scatter"), torch.scatter)
add("scatter_add", scat("add"), torch.scatter_add)
def iadd():
    x = t(lo=1); d = dim_of(x, 0); i = at(d) % len(x.shape); n = R.randint(0, 4) if x.shape[i] else 0
    s = list(x.shape); s[i] = n
    return [x, d, T([n], "i64", ids=x.shape[i]), T(s, x.dtype), R.choice([None, 2])]
add("index_add", iadd, lambda x, d, i, s, a: torch.index_add(x, d, i, s, alpha=1 if a is None else a))
add("take_along_dim", lambda: gat() if R.random() < .7 else (lambda x: [x, None, T([3], "i64", ids=math.prod(x.shape))])(t(empty=0)),
    lambda *a: torch.take_along_dim(a[0], a[2], a[1]), swap=True)
add("masked_select", lambda: (lambda x: [x, T(bcast(x), "bool")])(t()), torch.masked_select)
add("nonzero", lambda: [t()], torch.nonzero)
add("unique", lambda: [t(special=False, nograd=True)], lambda x: torch.unique(x))
add("count_nonzero", lambda: (lambda x: [x, dims_of(x)])(t()), torch.count_nonzero)
add("bincount", lambda: [T([R.randint(0, 6)], R.choice(["i64", "i32", "u8", "i8", "i16"]), ids=5), None, R.choice([None, 3, 9])], lambda x, w, m: torch.bincount(x, w, m or 0))
add("histc", lambda: [t("f"), R.choice([None, 3]), R.choice([None, -1]), R.choice([None, 1])], lambda x, b, lo, hi: torch.histc(x, 100 if b is None else b, lo or 0, hi or 0))
add("isin", lambda: (lambda x: [x, T(shape(), x.dtype)])(t()), torch.isin)
add("searchsorted", lambda: (lambda d: [Sorted(d), T(shape(), d), keep()])(R.choice(["f32", "f64", "i64", "i32"])), lambda s, x, r: torch.searchsorted(s, x, right=bool(r)))
def mm():
    d = dt(); a, b, c = [R.choice([0, 1, 2, 3, 4]) if R.random() < .9 else 0 for _ in range(3)]
    la, lb = R.choice([([], []), ([2], []), ([], [3]), ([2], [2]), ([1], [3]), ([2, 1], [3])])
    x, y = [a, b], [b, c]
    r = R.random()
    if r < .15: return [T([b], d), T(lb + y, d)]
    if r < .3: return [T(la + x, d), T([b], d)]
    if r < .35: return [T([b], d), T([b], d)]
    return [T(la + x, d), T(lb + y, d if R.random() < .9 else dt())]
add("matmul", mm, torch.matmul)
add("normalize", lambda: (lambda x: [x, R.choice([None, 1, 3]), R.choice([None, dim_of(x)]), None])(t("f")), lambda x, p, d, e: TF.normalize(x, 2 if p is None else p, 1 if d is None else d))
add("one_hot", lambda: [T(shape(0, 2), "i64", ids=4), 4], TF.one_hot)
add("cosine_similarity", lambda: (lambda x: [x, other(x, "same"), R.choice([None, dim_of(x)])])(t("f", lo=1)), lambda a, b, d: TF.cosine_similarity(a, b, -1 if d is None else d))
add("pairwise_distance", lambda: (lambda x: [x, T(x.shape, x.dtype), R.choice([None, 1, 3]), None, keep()])(t("f", lo=1)), lambda a, b, p, e, k: TF.pairwise_distance(a, b, 2 if p is None else p, keepdim=bool(k)))
def lossd(): x = t(R.choice(["f", "any"])); return [x, T(x.shape, x.dtype, nograd=True)]
for n, f in (("l1_loss", TF.l1_loss), ("mse_loss", TF.mse_loss)):
    add(n, lambda: lossd() + [R.choice([None, "sum", "none"])], lambda a, b, r, f=f: f(a, b, reduction=r or "mean"))
add("huber_loss", lambda: lossd() + [R.choice([None, .5]), R.choice([None, "sum", "none"])], lambda a, b, d, r: TF.huber_loss(a, b, delta=d or 1, reduction=r or "mean"))
add("smooth_l1_loss", lambda: lossd() + [R.choice([None, .5, 0]), R.choice([None, "sum", "none"])], lambda a, b, d, r: TF.smooth_l1_loss(a, b, beta=1 if d is None else d, reduction=r or "mean"))
add("kl_div", lambda: lossd() + [keep(), R.choice([None, "sum", "none", "batchmean"])], lambda a, b, l, r: TF.kl_div(a, b, log_target=bool(l), reduction=r or "mean"))
add("binary_cross_entropy_with_logits", lambda: (lambda x: [x, T(x.shape, x.dtype, values=[0, 1, .5], nograd=True), None, None, R.choice([None, "sum", "none"])])(t("f")),
    lambda a, b, w, p, r: TF.binary_cross_entropy_with_logits(a, b, reduction=r or "mean"))
def ce():
    n, c = R.randint(0, 4), R.randint(1, 4); return [T([n, c], dt("f")), T([n], "i64", ids=c), R.choice([None, "sum", "none"])]
add("cross_entropy", ce, lambda a, b, r: TF.cross_entropy(a, b, reduction=r or "mean"))
add("nll_loss", ce, lambda a, b, r: TF.nll_loss(a, b, reduction=r or "mean"))
add("transpose", lambda: (lambda x: [x, dim_of(x), dim_of(x)])(t()), torch.transpose)
add("cat", lambda: (lambda x, d: [[x, *[T([R.randint(0, 3) if i == at(d) % max(1, len(x.shape)) else m for i, m in enumerate(x.shape)], R.choice([x.dtype, dt()])) for _ in range(R.randint(0, 2))]], d])(*(lambda x: (x, dim_of(x, 0)))(t(lo=1))), torch.cat)
add("stack", lambda: (lambda x: [[x, *[T(x.shape, R.choice([x.dtype, dt()])) for _ in range(R.randint(0, 2))]], dim_of(len(x.shape) + 1)])(t()), torch.stack)
add("layer_norm", lambda: [t("f", lo=1, empty=.03), 1], lambda x, n: TF.layer_norm(x, x.shape[-1:]))
add("rms_norm", lambda: [t("f", lo=1, empty=.03), 1], lambda x, n: TF.rms_norm(x, x.shape[-1:]))
add("cdist", lambda: (lambda d, k: [T([R.randint(0, 4), k], d), T([R.randint(0, 4), k], d), R.choice([None, 1, 3])])(R.choice(["f32", "f64"]), R.randint(0, 4)), lambda a, b, p: torch.cdist(a, b, 2 if p is None else p))
add("to", lambda: [t(), dt()], lambda x, d: x.to(NAMES[d]))
def gat0():
    return [t(lo=0, hi=0), D(R.choice([1, -1])), T([], "i64", ids=1)]
add("gather0", gat0, torch.gather, lua="gather")
add("scatter0", lambda: gat0() + [R.choice([1, 2])], torch.scatter, lua="scatter")
def tdot():
    d = R.choice(["f32", "f64", "f16"]); n = R.randint(0, 2); s = [R.choice([1, 2, 3, 0]) for _ in range(n)]
    return [T(shape(0, 2) + s, d), T(s + shape(0, 2), d), n]
add("tensordot", tdot, torch.tensordot)
add("addmm", lambda: (lambda d, a, b, c: [T(R.choice([[a, c], [c], [1], []]), d), T([a, b], d), T([b, c], d), R.choice([None, 0, 2]), R.choice([None, 0, .5])])(R.choice(["f32", "f64"]), *[R.randint(0, 4) for _ in range(3)]),
    lambda t, a, b, be, al: torch.addmm(t, a, b, beta=1 if be is None else be, alpha=1 if al is None else al))
add("split", lambda: (lambda x, d: [x, (lambda m: [m // 2, m - m // 2])(x.shape[at(d) % len(x.shape)]), d])(*(lambda x: (x, dim_of(x, 0)))(t(lo=1))), torch.split, list=True)
add("permute", lambda: (lambda x: [x, [D(i + 1 if R.random() < .5 else i - len(x.shape)) for i in R.sample(range(len(x.shape)), len(x.shape))]])(t()), torch.permute)
add("expand", lambda: (lambda s: [T([1 if R.random() < .4 else m for m in s], dt()), [R.randint(0, 2)] + s])(shape()), lambda x, s: x.expand(s))
add("slice", lambda: (lambda x: [x, dim_of(x, 0), R.randint(0, 2), R.randint(2, 3), R.choice([None, 1, 2])])(T([3, 4, 3][:R.randint(1, 3)], dt())), lambda x, d, a, b, c: x.transpose(0, d)[a:b:(c or 1)].transpose(0, d))
add("bincount_w", lambda: (lambda n: [T([n], "i64", ids=5), T([n], R.choice(["f32", "f64"]), nograd=True), R.choice([None, 8])])(R.randint(0, 6)), lambda x, w, m: torch.bincount(x, w, m or 0), lua="bincount")
def ein():
    d = R.choice(["f32", "f64", "f16"]); k = {c: R.choice([0, 1, 2, 3]) for c in "abcd"}
    eq = R.choice(["ab,bc->ac", "ab,ab->a", "a,b->ab", "abc,bc->ca", "ab->ba", "ab->", "abc,abd->acd", "ab,cb->ac", "abc,cd->abd", "ab,bc,cd->ad", "a,a->", "abc,abc->c", "ab,a->b"])
    ops = eq.split("->")[0].split(",")
    return [eq, *[T([k[c] for c in o], d) for o in ops]]
add("einsum", ein, torch.einsum)
add("muladd", lambda: (lambda x: [x, T(x.shape, x.dtype), T(x.shape, x.dtype)])(t("f")), lambda a, b, c: a * b + c)
add("softplus", lambda: [t("f")], TF.softplus)
add("allclose", lambda: (lambda x: [x, R.choice([x, T(x.shape, x.dtype)])])(t()), torch.allclose)
add("mean_dims", lambda: (lambda x: [x, dims_of(x), keep()])(t("f", empty=.4)), rd(torch.mean), lua="mean")
add("var_e", lambda: (lambda x: [x, dims_of(x), keep()])(t("f", empty=.4)), lambda x, d, k: torch.var(x, d, correction=1, keepdim=bool(k)), lua="var")
add("sum_e", lambda: (lambda x: [x, dims_of(x), keep()])(t(empty=.4)), rd(torch.sum), lua="sum")
add("prod_e", lambda: (lambda x: [x, dim_of(x), keep()])(t(empty=.4)), lambda x, d, k: torch.prod(x, d, bool(k)), lua="prod")
for n in "cumsum cumprod softmax sort".split():
    add(n + "_e", lambda: (lambda x: [x, dim_of(x)])(t("f", lo=1, empty=.4)), getattr(torch, n), lua=n)
add("rms_norm_w", lambda: (lambda x: [x, 1, T(x.shape[-1:], x.dtype), R.choice([None, 1e-6])])(t("f", lo=1, empty=0)), lambda x, n, w, e: TF.rms_norm(x, x.shape[-1:], w, e), lua="rms_norm")
add("layer_norm_w", lambda: (lambda x: [x, 1, T(x.shape[-1:], x.dtype), T(x.shape[-1:], x.dtype)])(t("f", lo=1, empty=0)), lambda x, n, w, b: TF.layer_norm(x, x.shape[-1:], w, b), lua="layer_norm")


def reduction():
    return R.choice([None, "sum", "none"])


def signs(shape):
    return T(shape, "f32", values=[1, -1], nograd=True)


def rows(n):
    """So many tensors of one shape."""
    sizes = [R.randint(1, 4), R.randint(1, 4)]
    return [T(sizes, "f32") for _ in range(n)]


def ranked():
    a, b = rows(2)
    return [a, b, signs(a.shape), R.choice([None, 0.5]), reduction()]


def hinged():
    a = rows(1)[0]
    return [a, signs(a.shape), R.choice([None, 0.5]), reduction()]


def cosines():
    a, b = rows(2)
    return [a, b, signs(a.shape[:1]), R.choice([None, 0.5]), reduction()]


def with_default(x, default):
    return default if x is None else x


add("triplet_margin_loss", lambda: rows(3) + [R.choice([None, 0.5]), None, None, reduction()],
    lambda a, b, c, m, p, e, r: TF.triplet_margin_loss(a, b, c, margin=with_default(m, 1), reduction=r or "mean"))
add("cosine_embedding_loss", cosines,
    lambda a, b, c, m, r: TF.cosine_embedding_loss(a, b, c, margin=with_default(m, 0), reduction=r or "mean"))
add("margin_ranking_loss", ranked,
    lambda a, b, c, m, r: TF.margin_ranking_loss(a, b, c, margin=with_default(m, 0), reduction=r or "mean"))
add("hinge_embedding_loss", hinged,
    lambda a, c, m, r: TF.hinge_embedding_loss(a, c, margin=with_default(m, 1), reduction=r or "mean"))


def maybe(*choices):
    return R.choice([None, *choices])


for n in "log2 log10 exp2".split():
    add(n, lambda: [t()], getattr(torch, n))
for n in "selu mish".split():
    add(n, lambda: [t("f")], getattr(TF, n))
add("glu", lambda: (lambda x: [x, maybe(dim_of(x))])(t("f", lo=1)), lambda x, d: TF.glu(x, with_default(d, -1)))


def three():
    x = t(empty=0.1)
    return [x, other(x, "same"), other(x, "same"), maybe(2, -0.5)]


add("addcmul", three, lambda x, a, b, v: torch.addcmul(x, a, b, value=with_default(v, 1)))
add("logaddexp", pair("f"), torch.logaddexp)
add("aminmax", red(), lambda x, d, k: (rd(torch.amin)(x, d, k), rd(torch.amax)(x, d, k)))
for n in ("std_mean", "var_mean"):
    add(n, vs, lambda x, d, k, c, f=getattr(torch, n): f(x, d, correction=with_default(c, 1), keepdim=bool(k)))
for n in ("nansum", "nanmean"):
    add(n, lambda: (lambda x: [x, dims_of(x), keep()])(t("f", special=True)), rd(getattr(torch, n)))
add("unflatten", lambda: (lambda x: [x, dim_of(x), R.choice([[-1, 1], [1, -1], [2, -1], [-1], [1, 1, -1]])])(t(lo=1)),
    torch.unflatten)
add("movedim", lambda: (lambda x: [x, dim_of(x), dim_of(x)])(t(lo=1)), torch.movedim)
for n in ("hstack", "vstack"):
    add(n, lambda: (lambda x: [[x, T(x.shape, R.choice([x.dtype, dt()]))]])(t()), lambda x, f=getattr(torch, n): f(x))
add("meshgrid", lambda: [[t(lo=1, hi=1) for _ in range(R.randint(1, 3))]],
    lambda x: torch.meshgrid(*x, indexing="ij"))
add("unique_all", lambda: [t(special=False, nograd=True), True, True],
    lambda x, i, c: torch.unique(x, return_inverse=True, return_counts=True), lua="unique")
add("bucketize", lambda: (lambda d: [T(shape(), d), Sorted(d), keep()])(R.choice(["f32", "f64", "i64", "i32"])),
    lambda x, s, r: torch.bucketize(x, s, right=bool(r)))


def placed():
    x, d, ids, src, _ = iadd()
    return [x, d, ids, src]


add("index_copy", placed, torch.index_copy)
add("index_fill", lambda: placed()[:3] + [R.choice([0, 1, -2, 0.5])], torch.index_fill)
add("scatter_of", scat("add"), torch.scatter, lua="scatter")
add("scatter_reduce", lambda: scat("add")() + [R.choice(["sum", "mean", "amax", "amin"]), maybe(True, False)],
    lambda x, d, i, s, r, own: torch.scatter_reduce(x, d, i, s, r, include_self=own is not False))
add("scatter_add0", lambda: (lambda a: a + [T([], a[0].dtype)])(gat0()), torch.scatter_add, lua="scatter_add")
add("scatter_reduce0", lambda: (lambda a: a + [T([], a[0].dtype), R.choice(["sum", "mean", "amax", "amin"])])(gat0()),
    torch.scatter_reduce, lua="scatter_reduce")
add("poisson_nll_loss", lambda: lossd() + [keep(), keep(), None, reduction()],
    lambda a, b, l, f, e, r: TF.poisson_nll_loss(a, b, log_input=l is not False, full=bool(f), reduction=r or "mean"))


def gaussian():
    x = t("f", lo=1)
    return [x, T(x.shape, x.dtype, nograd=True), T(x.shape, x.dtype, values=[0.5, 1, 2.5]), keep(), None, reduction()]


add("gaussian_nll_loss", gaussian,
    lambda a, b, v, f, e, r: TF.gaussian_nll_loss(a, b, v, full=bool(f), reduction=r or "mean"))


def classes():
    n, c, dtype = R.randint(0, 4), R.randint(1, 4), dt("f")
    return [T([n, c], dtype), T([n], "i64", ids=c), reduction(), maybe(0, 1, -100), maybe(0, 0.25, 1),
            maybe(T([c], dtype, values=[0, 0.5, 2], nograd=True))]


add("cross_entropy_all", classes,
    lambda a, b, r, i, s, w: TF.cross_entropy(a, b, w, reduction=r or "mean", ignore_index=with_default(i, -100),
                                              label_smoothing=with_default(s, 0)), lua="cross_entropy")


def logits():
    x = t("f", lo=1)
    return [x, T(x.shape, x.dtype, values=[0, 1, 0.5], nograd=True),
            maybe(T(bcast(x), x.dtype, values=[0, 1, 2.5], nograd=True)),
            maybe(T(x.shape[-1:], x.dtype, values=[0, 0.5, 3], nograd=True)), reduction()]


add("binary_cross_entropy_with_logits_all", logits,
    lambda a, b, w, p, r: TF.binary_cross_entropy_with_logits(a, b, w, pos_weight=p, reduction=r or "mean"),
    lua="binary_cross_entropy_with_logits")


def probabilities():
    x = t("f", lo=1)
    return [T(x.shape, x.dtype, values=[0, 1, 0.5, 0.125, 0.75]), T(x.shape, x.dtype, values=[0, 1, 0.5], nograd=True),
            maybe(T(bcast(x), x.dtype, values=[0, 1, 2.5], nograd=True)), reduction()]


add("binary_cross_entropy", probabilities,
    lambda a, b, w, r: TF.binary_cross_entropy(a, b, w, reduction=r or "mean"))


def attended():
    d, lead = R.choice(["f32", "f64"]), R.choice([[], [2], [1, 2]])
    n, m, k, v = R.randint(0, 3), R.randint(1, 3), R.randint(1, 3), R.randint(1, 3)
    mask, causal = maybe(T([n, m], "bool"), T([n, m], d, nograd=True)), keep()
    return [T(lead + [n, k], d), T(lead + [m, k], d), T(lead + [m, v], d), mask, causal and mask is None,
            maybe(0.5)]


add("scaled_dot_product_attention", attended,
    lambda q, k, v, m, c, s: TF.scaled_dot_product_attention(q, k, v, m, is_causal=bool(c), scale=s))
add("baddbmm", lambda: (lambda d, n, a, b, c: [T(R.choice([[n, a, c], [a, c], [c], [1, 1, 1]]), d), T([n, a, b], d),
                                               T([n, b, c], d), maybe(0, 2), maybe(1, 0.5)])(
    R.choice(["f32", "f64"]), *[R.randint(0, 3) for _ in range(4)]),
    lambda x, a, b, be, al: torch.baddbmm(x, a, b, beta=with_default(be, 1), alpha=with_default(al, 1)))
add("bmm", lambda: (lambda d, n, a, b, c: [T([n, a, b], d), T([n, b, c], d)])(dt("f"), *[R.randint(0, 3) for _ in "1234"]),
    torch.bmm)
add("repeat_interleave_each", lambda: (lambda x: (lambda d: [x, T([x.shape[at(d) % len(x.shape)]], "i64", ids=4), d])(
    dim_of(x, 0)))(t(lo=1)), torch.repeat_interleave, lua="repeat_interleave")
add("linear", lambda: (lambda d, lead, a, b: [T(lead + [a], d), T([b, a], d), maybe(T([b], d))])(
    dt("f"), R.choice([[], [2], [0], [2, 3]]), R.randint(0, 3), R.randint(0, 3)), TF.linear)
add("reshape", lambda: (lambda x: [x, R.choice([[-1], [math.prod(x.shape)], [1, -1], [-1, 1]])])(t()), torch.reshape)



def of_torch(a):
    """An argument for PyTorch."""
    if isinstance(a, T):
        return a.torch()
    if isinstance(a, list):
        return [of_torch(x) for x in a]
    return at(a) if isinstance(a, D) else a


def of_lua(a):
    """An argument as Lua's text."""
    if isinstance(a, T):
        return a.lua()
    if a is None or isinstance(a, str):
        return "nil" if a is None else "'%s'" % a
    if isinstance(a, list):
        return "{list=true,%s}" % ",".join(map(of_lua, a))
    return number(int(a) if isinstance(a, D) else a)


def tensors(args):
    for a in args:
        if isinstance(a, T):
            yield a
        elif isinstance(a, list):
            yield from tensors(a)


def answer(f, args):
    """What PyTorch makes of a call, as Lua's fields."""
    try:
        out = f(*map(of_torch, args))
        out = list(out) if isinstance(out, (tuple, list)) else [out]
        text = "out={%s}" % ",".join(dump(o) if isinstance(o, torch.Tensor) else number(o) for o in out)
        real = [o for o in out if isinstance(o, torch.Tensor) and o.dtype.is_floating_point]
        if not real or not real[0].requires_grad:
            return text
        up = torch.linspace(-1, 2, real[0].numel(), dtype=torch.float64).reshape(real[0].shape).to(real[0].dtype)
        real[0].backward(up)
        grads = ["false" if t.leaf.grad is None else dump(t.leaf.grad) for t in tensors(args)]
        return "%s,up=%s,grads={%s}" % (text, dump(up), ",".join(grads))
    except Exception as e:  # whatever PyTorch refuses
        return "err=%s" % json.dumps(str(e).split("\n")[0][:160])


names = [n for n in G if not only or n in only or G[n][2].get("lua", n) in only]
for k in range(calls):
    name = names[k % len(names)]
    draw, f, options = G[name]
    args = draw()
    text = answer(f, args)
    if options.get("swap"):  # PyTorch's second and third argument are Lua's third and second
        args = [args[0], args[2], args[1]]
    print("return {k=%d,name='%s',list=%s,n=%d,args={%s},%s}" % (
        k, options.get("lua", name), "true" if options.get("list") else "false", len(args), ",".join(map(of_lua, args)), text))
