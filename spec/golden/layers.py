"""What PyTorch makes of layers and losses: spec/golden/ops/tensor/layers.json, which spec/nn/layers_golden_spec.lua compares.

    python spec/golden/layers.py > spec/golden/ops/tensor/layers.json

A case: its name; `args` of the constructor; `param`: parameters by name; `in`: the tensors that it is called with; `out`: the results;
`up`: the gradient fed to the first result; `grad`: those of inputs (null: none); `param_grad`. A tensor is [dtype, shape, flat list].
"""
import json

import torch
import torch.nn.functional as F

torch.manual_seed(2)
NAMES = {torch.float32: "f32", torch.int64: "i64", torch.bool: "bool"}
cases = []


def number(x):
    return int(x) if isinstance(x, bool) else x


def dump(t):
    return None if t is None else [NAMES[t.dtype], list(t.shape), [number(x) for x in t.reshape(-1).tolist()]]


def case(name, f, inputs, args=None, module=None, extra=()):
    leaves = [t.clone().requires_grad_() if t.dtype.is_floating_point and i not in extra else t for i, t in enumerate(inputs)]
    out = f(*leaves)
    out = list(out) if isinstance(out, (tuple, list)) else [out]
    up = torch.linspace(-1, 2, out[0].numel()).reshape(out[0].shape) if out[0].numel() > 1 else torch.ones(out[0].shape)
    out[0].backward(up)
    entry = {"name": name, "args": args or {}, "in": [dump(t) for t in inputs], "out": [dump(t.detach()) for t in out], "up": dump(up),
             "grad": [dump(t.grad) if t.is_leaf and t.requires_grad else None for t in leaves]}
    if module is not None:
        entry["param"] = {n: dump(p.detach()) for n, p in module.named_parameters()}
        entry["param_grad"] = {n: dump(p.grad) for n, p in module.named_parameters()}
    cases.append(entry)


def layer(name, module, inputs, args, f=None):
    case(name, f or module, inputs, args, module)


def lstm(name, module, inputs, args):
    def call(x, *first):
        out, (h, c) = module(x, first or None)
        return out, h, c

    layer(name, module, inputs, args, call)


mha = torch.nn.MultiheadAttention(6, 2)
with torch.no_grad():
    mha.in_proj_bias.normal_()
    mha.out_proj.bias.normal_()
q, k, v = torch.randn(3, 2, 6), torch.randn(4, 2, 6), torch.randn(4, 2, 6)
layer("MultiheadAttention", mha, [q, k, v], {"embed_dim": 6, "num_heads": 2})
mha.zero_grad()
causal = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)
layer("MultiheadAttention causal", mha, [q, causal], {"embed_dim": 6, "num_heads": 2},
      lambda x, m: mha(x, x, x, attn_mask=m, average_attn_weights=False))
mha.zero_grad()
padding = torch.tensor([[False, False, True, True], [False, True, False, False]])
layer("MultiheadAttention padded", mha, [q, k, v, padding], {"embed_dim": 6, "num_heads": 2},
      lambda a, b, c, m: mha(a, b, c, key_padding_mask=m))
first = torch.nn.MultiheadAttention(4, 4, bias=False, batch_first=True)
layer("MultiheadAttention batch first", first, [torch.randn(2, 3, 4)], {"embed_dim": 4, "num_heads": 4, "bias": False, "batch_first": True},
      lambda x: first(x, x, x))
x = torch.randn(4, 2, 3)
layer("GRU", torch.nn.GRU(3, 5), [x], {"input_size": 3, "hidden_size": 5})
layer("GRU h0", torch.nn.GRU(3, 5), [x, torch.randn(1, 2, 5)], {"input_size": 3, "hidden_size": 5})
layer("GRU two layers, both ways", torch.nn.GRU(3, 2, num_layers=2, bidirectional=True), [x],
      {"input_size": 3, "hidden_size": 2, "num_layers": 2, "bidirectional": True})
layer("GRU batch first", torch.nn.GRU(3, 2, bias=False, batch_first=True), [x],
      {"input_size": 3, "hidden_size": 2, "bias": False, "batch_first": True})
rng = torch.get_rng_state()
lstm("LSTM", torch.nn.LSTM(3, 5), [x], {"input_size": 3, "hidden_size": 5})
lstm("LSTM h0, c0", torch.nn.LSTM(3, 5), [x, torch.randn(1, 2, 5), torch.randn(1, 2, 5)], {"input_size": 3, "hidden_size": 5})
lstm("LSTM two layers, both ways", torch.nn.LSTM(3, 2, num_layers=2, bidirectional=True), [x],
      {"input_size": 3, "hidden_size": 2, "num_layers": 2, "bidirectional": True})
lstm("LSTM batch first", torch.nn.LSTM(3, 2, bias=False, batch_first=True), [x],
      {"input_size": 3, "hidden_size": 2, "bias": False, "batch_first": True})
torch.set_rng_state(rng)  # the cases below are as they were
layer("PReLU", torch.nn.PReLU(), [torch.randn(3, 4)], {})
layer("PReLU of columns", torch.nn.PReLU(4, 0.1), [torch.randn(3, 4)], {"num_parameters": 4, "init": 0.1})

a, b = torch.randn(4, 1), torch.randn(4, 3)
signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
bits = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])


def focal(t, y, alpha=0.25, gamma=2.0):  # as torchvision.ops.sigmoid_focal_loss
    p = torch.sigmoid(t)
    ce = F.binary_cross_entropy_with_logits(t, y, reduction="none")
    p_t = p * y + (1 - p) * (1 - y)
    loss = ce * ((1 - p_t) ** gamma)
    return ((alpha * y + (1 - alpha) * (1 - y)) * loss if alpha >= 0 else loss).mean()


for reduction in ("mean", "sum", "none"):
    args = {"reduction": reduction}
    case("MarginRankingLoss " + reduction, lambda p, n, t: F.margin_ranking_loss(p, n, t, 0.3, reduction=reduction),
         [torch.randn(4), torch.randn(4), signs], {"margin": 0.3, **args}, extra=(2,))
    case("HingeEmbeddingLoss " + reduction, lambda t, s: F.hinge_embedding_loss(t, s, 0.8, reduction=reduction), [torch.randn(4), signs],
         {"margin": 0.8, **args}, extra=(1,))
    case("CosineEmbeddingLoss " + reduction, lambda p, n, t: F.cosine_embedding_loss(p, n, t, 0.1, reduction=reduction),
         [torch.randn(4, 3), torch.randn(4, 3), signs], {"margin": 0.1, **args}, extra=(2,))
    case("KLDivLoss " + reduction, lambda t, p: F.kl_div(t.log_softmax(1), p, reduction=reduction),
         [torch.randn(4, 3), torch.tensor([[0.2, 0.8, 0.0]] * 4)], args, extra=(1,))
    case("BPRLoss " + reduction, lambda p, n: getattr(-F.logsigmoid(p - n), reduction)() if reduction != "none" else -F.logsigmoid(p - n),
         [a, b], args)
case("kl_div batchmean", lambda t, p: F.kl_div(t.log_softmax(1), p.log_softmax(1), reduction="batchmean", log_target=True),
     [torch.randn(4, 3), torch.randn(4, 3)])
case("FocalLoss", focal, [torch.randn(4, 3), bits], extra=(1,))
case("FocalLoss without alpha", lambda t, y: focal(t, y, -1, 1.5), [torch.randn(4, 3), bits], {"alpha": -1, "gamma": 1.5}, extra=(1,))
case("cosine_similarity", lambda p, n: F.cosine_similarity(p, n, dim=1), [torch.randn(4, 3), torch.randn(4, 3)])
queries, items, log_q, ids = torch.randn(4, 3), torch.randn(4, 3), torch.log(torch.tensor([0.5, 0.1, 0.2, 0.2])), torch.tensor([7, 3, 7, 5])


def in_batch(u, i, q, n):
    logits = u @ i.T / 0.5 - q
    same = (n[:, None] == n) & ~torch.eye(4, dtype=torch.bool)
    return F.cross_entropy(logits.masked_fill(same, float("-inf")), torch.arange(4))


case("InBatchSoftmaxLoss", lambda u, i: F.cross_entropy(u @ i.T, torch.arange(4)), [queries, items])
case("InBatchSoftmaxLoss corrected", in_batch, [queries, items, log_q, ids], {"temperature": 0.5}, extra=(2,))

layer("RMSNorm", torch.nn.RMSNorm(4), [torch.randn(3, 4)], {"normalized_shape": 4})
layer("RMSNorm of two dimensions", torch.nn.RMSNorm((3, 4), eps=0.1), [torch.randn(2, 3, 4)], {"normalized_shape": [3, 4], "eps": 0.1})
case("ELU", lambda t: F.elu(t, 0.5), [torch.randn(4)], {"alpha": 0.5})
case("LogSoftmax", lambda t: F.log_softmax(t, 0), [torch.randn(3, 2)], {"dim": 1})
case("Flatten", lambda t: torch.nn.Flatten()(t) * 1, [torch.randn(2, 3, 2)])
for reduction in ("mean", "sum", "none"):
    args = {"reduction": reduction}
    case("L1Loss " + reduction, torch.nn.L1Loss(reduction=reduction), [torch.randn(4), torch.randn(4)], args)
    case("HuberLoss " + reduction, torch.nn.HuberLoss(reduction, 0.7), [torch.randn(4), torch.randn(4)], {"delta": 0.7, **args})
    case("SmoothL1Loss " + reduction, torch.nn.SmoothL1Loss(reduction=reduction, beta=0.6), [torch.randn(4), torch.randn(4)],
         {"beta": 0.6, **args})
    case("NLLLoss " + reduction, torch.nn.NLLLoss(reduction=reduction), [torch.randn(4, 3), torch.tensor([2, 0, 1, 1])], args)
    case("TripletMarginLoss " + reduction, torch.nn.TripletMarginLoss(0.5, 3, reduction=reduction), [torch.randn(4, 3) for _ in range(3)],
         {"margin": 0.5, "p": 3, **args})

for i, (args, activation) in enumerate((({}, "relu"), ({"norm_first": True, "batch_first": True}, "gelu"), ({"bias": False}, "relu"))):
    block = torch.nn.TransformerEncoderLayer(4, 2, 6, 0.0, activation, **args)
    with torch.no_grad():
        for p in block.parameters():
            p.normal_(0, 0.5)
    layer("TransformerEncoderLayer %d" % (i + 1), block, [torch.randn(3, 2, 4)],
          {"d_model": 4, "nhead": 2, "dim_feedforward": 6, "dropout": 0, "activation": activation, **args})
block.zero_grad()
layer("TransformerEncoderLayer masked", block, [torch.randn(3, 2, 4), causal, torch.tensor([[False, False, True], [False, True, True]])],
      {"d_model": 4, "nhead": 2, "dim_feedforward": 6, "dropout": 0, "bias": False},
      lambda x, m, k: block(x, src_mask=m, src_key_padding_mask=k))
layer("LazyLinear", torch.nn.Linear(3, 2), [torch.randn(4, 3)], {"out_features": 2})
case("PoissonNLLLoss", torch.nn.PoissonNLLLoss(False, True, reduction="sum"), [torch.rand(4, 2) + 0.1, torch.tensor([[0.0, 3.0]] * 4)],
     {"log_input": False, "full": True, "reduction": "sum"}, extra=(1,))
case("GaussianNLLLoss", torch.nn.GaussianNLLLoss(full=True), [torch.randn(4, 2), torch.randn(4, 2), torch.rand(4, 1)], {"full": True}, extra=(1,))

print('{"format": 1, "kind": "tensor", "library": "torch %s", "tolerance": {"abs": 2e-6, "rel": 2e-5}, "cases": [' % torch.__version__)
print(",\n".join(json.dumps(c) for c in cases))
print("]}")
