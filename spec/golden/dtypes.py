"""What PyTorch makes of operands of two dtypes, and of a tensor and a number: spec/golden/ops/tensor/dtypes.json, which
spec/tensor_functions_spec.lua compares.

    python spec/golden/dtypes.py > spec/golden/ops/tensor/dtypes.json

`left` and `right` hold the tensors [3] of each dtype, `single` those without dimensions. A case: the function, the dtype
of the left operand, the right one ("i64": of right; "i64 []": of single; a number), the dtype and the elements of the
result, and, of results that have gradients, those of both operands for an upstream gradient of ones (null: none).
"""
import json

import torch

DTYPES = {"bool": torch.bool, "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64, "f16": torch.float16,
          "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LEFT, RIGHT, SINGLE = [5, -7, 3], [2, 3, -2], 3
LARGE = {"i32": [2**31 - 1, -7, -2**31], "i64": [2**63 - 1, 2**53 + 1, -2**63]}
NUMBERS = [2, -3, 1.5, 0]


def elements(name, values):
    if name in LARGE and values is LEFT:
        values = LARGE[name]
    return [abs(v) for v in values] if name == "u8" else [v > 0 for v in values] if name == "bool" else values


def tensor(name, values):
    return torch.tensor(elements(name, values) if isinstance(values, list) else values, dtype=DTYPES[name])


def number(x):
    return int(x) if isinstance(x, bool) else str(x) if isinstance(x, int) and abs(x) >= 2**53 or x != x or x in (
        float("inf"), float("-inf")) else x


def listed(t):
    return [number(x) for x in t.reshape(-1).tolist()]


choice = torch.tensor([True, False, True])
FUNCTIONS = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
             "minimum": torch.minimum, "eq": torch.eq, "lt": torch.lt, "ge": torch.ge,
             "where": lambda a, b: torch.where(choice, a, b), "floor_divide": torch.floor_divide,
             "remainder": torch.remainder, "fmod": torch.fmod, "power": torch.pow, "cat": lambda a, b: torch.cat([a, b])}
NO_GRADIENT = ("floor_divide",)  # PyTorch has none; here nothing is recorded
ONE = {"abs": torch.abs, "square": torch.square, "neg": torch.neg, "relu": torch.relu, "exp": torch.exp,
       "sqrt": lambda t: torch.sqrt(torch.abs(t)), "clamp": lambda t: torch.clamp(t, 1, 4), "pow": lambda t: t**3,
       "sum": torch.sum, "amax": torch.amax, "cumsum": lambda t: torch.cumsum(t, 0)}
cases = []


def case(function, f, left, right, *operands):
    leaves = [t.clone().requires_grad_() if isinstance(t, torch.Tensor) and t.dtype.is_floating_point else t for t in operands]
    try:
        out = f(*leaves)
    except (RuntimeError, TypeError):
        return
    entry = [function, left, right, NAMES[out.dtype], listed(out.detach())]
    # not of large numbers, whose sum in f32 is that of its order
    if out.requires_grad and len(operands) == 2 and left not in LARGE and function not in NO_GRADIENT:
        try:
            out.backward(torch.ones_like(out))
        except NotImplementedError:  # of a float to the power of a bool
            return
        entry.append([listed(t.grad) if getattr(t, "grad", None) is not None else None for t in leaves])
    cases.append(entry)


for name, f in FUNCTIONS.items():
    for a in DTYPES:
        x = tensor(a, LEFT)
        for b in DTYPES:
            case(name, f, a, b, x, tensor(b, RIGHT))
            if name != "cat":
                case(name, f, a, b + " []", x, tensor(b, SINGLE))
        for n in NUMBERS if name not in ("cat", "maximum", "minimum") else []:
            if name not in ("add", "sub", "mul") and a == "u8" and n < 0:
                continue  # PyTorch takes what is left of -3 in 8 bits
            case(name, f, a, n, x, n)
for name, f in ONE.items():
    for a in DTYPES:
        case(name, f, a, None, tensor(a, LEFT))

print('{"format": 1, "kind": "tensor", "library": "torch %s",' % torch.__version__)
print('"tolerance": {"f16": 1e-3, "bf16": 8e-3, "f32": 1e-6, "f64": 1e-12}, "single": %d,' % SINGLE)
for side, values in (("left", LEFT), ("right", RIGHT)):
    print('"%s": %s,' % (side, json.dumps({a: [number(x) for x in elements(a, values)] for a in DTYPES})))
print('"cases": [\n' + ",\n".join(json.dumps(c) for c in cases) + "\n]}")
