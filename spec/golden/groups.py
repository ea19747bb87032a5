"""PyTorch's optimizers with groups of parameters, under schedulers, for spec/nn/groups_spec.lua: python3 spec/golden/groups.py (torch)."""
import json
import os

import torch

torch.manual_seed(5)
STEPS = 7


def numbers(x):
    return [float(v) for v in x.flatten()]


def case(name, make, groups, schedule, **common):
    start = [torch.randn(2, 3), torch.randn(4), torch.randn(3)]
    params = [torch.nn.Parameter(x.clone()) for x in start]
    optimizer = make([{"params": [params[i] for i in of], **options} for of, options in groups], **common)
    scheduler = schedule and schedule(optimizer)
    steps = []
    for k in range(STEPS):
        for p in params:
            p.grad = torch.randn_like(p)
        if k == 4 and not scheduler:
            optimizer.param_groups[1]["lr"] *= 3  # by hand
        optimizer.step()
        rates = [g["lr"] for g in optimizer.param_groups]
        steps.append({"grads": [numbers(p.grad) for p in params], "params": [numbers(p.data) for p in params], "lr": rates})
        if scheduler:
            scheduler.step()
    return {"name": name, "start": [numbers(x) for x in start], "groups": [{"of": of, "options": options} for of, options in groups],
            "common": common, "steps": steps}


two = [([0], {}), ([1, 2], {"lr": 0.05, "weight_decay": 0.1})]
o, s = torch.optim, torch.optim.lr_scheduler
cases = [
    case("SGD", o.SGD, [([0, 1], {"momentum": 0.5}), ([2], {"lr": 0.2, "nesterov": True})], None, lr=0.1, momentum=0.9),
    case("Adagrad", o.Adagrad, two, lambda x: s.StepLR(x, 2, 0.5), lr=0.1, lr_decay=0.01),
    case("Adam", o.Adam, two, lambda x: s.ExponentialLR(x, 0.8), lr=0.01),
    case("AdamW", o.AdamW, [([2], {"betas": [0.8, 0.99]}), ([0], {"weight_decay": 0}), ([1], {"lr": 0.2})], None, lr=0.01, weight_decay=0.3),
    case("RMSprop", o.RMSprop, two, lambda x: s.CosineAnnealingLR(x, 6), lr=0.02, alpha=0.9),
]
json.dump(cases, open(os.path.join(os.path.dirname(__file__), "groups.json"), "w"))
