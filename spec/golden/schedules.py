"""Rates under PyTorch's schedulers where a script sets one by hand, where two schedulers share an optimizer, and where a group of parameters
is added, for spec/nn/groups_spec.lua: python3 spec/golden/schedules.py (torch)."""
import json
import os
import warnings

import torch

warnings.simplefilter("ignore")
STEPS = 16
HAND, ADD = 5, 9  # the steps before which a rate is set, a group is added

schedulers = {
    "StepLR": {"step_size": 3, "gamma": 0.5},
    "MultiStepLR": {"milestones": [2, 6, 6, 11], "gamma": 0.5},
    "ExponentialLR": {"gamma": 0.8},
    "ConstantLR": {"factor": 0.25, "total_iters": 7},
    "LinearLR": {"start_factor": 0.25, "end_factor": 0.75, "total_iters": 8},
    "PolynomialLR": {"total_iters": 12, "power": 2},
    "CosineAnnealingLR": {"T_max": 6, "eta_min": 0.01},
    "CosineAnnealingWarmRestarts": {"T_0": 4, "T_mult": 2, "eta_min": 0.01},
    "OneCycleLR": {"max_lr": 1.5, "total_steps": 15},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.6, "step_size_up": 3},
}


def parameter(k):
    return torch.nn.Parameter(torch.full((2,), float(k)))


def run(names, hand, add):
    params = [parameter(k) for k in range(3)]
    optimizer = torch.optim.SGD([{"params": [params[0]]}, {"params": [params[1]], "lr": 0.125}], lr=0.5, momentum=0.9)
    made = [getattr(torch.optim.lr_scheduler, name)(optimizer, **schedulers[name]) for name in names]
    rates, momenta = [], []
    for step in range(STEPS):
        if hand and step == HAND:
            optimizer.param_groups[0]["lr"] = 0.0625
        if add and step == ADD:
            optimizer.add_param_group({"params": [params[2]], "lr": 0.3})
        rates.append([g["lr"] for g in optimizer.param_groups])
        momenta.append([g["momentum"] for g in optimizer.param_groups])
        if step < STEPS - 1:
            optimizer.step()
            for s in made:
                s.step()
    return {"schedulers": names, "hand": hand, "add": add, "lr": rates, "momentum": momenta}


cases = []
for name in schedulers:
    for add in [False, True]:
        try:
            cases.append(run([name], True, add))
        except (KeyError, ValueError) as why:  # PyTorch has no rates for a group that such a scheduler has not seen
            print(name, "add" if add else "", repr(why))
for pair in [["LinearLR", "StepLR"], ["ConstantLR", "ExponentialLR"], ["PolynomialLR", "ExponentialLR"], ["MultiStepLR", "LinearLR"],
             ["LinearLR", "CosineAnnealingWarmRestarts"], ["OneCycleLR", "StepLR"], ["CyclicLR", "CosineAnnealingLR"]]:
    cases.append(run(pair, False, False))
document = {"schedulers": schedulers, "hand": HAND, "add": ADD, "cases": cases}
json.dump(document, open(os.path.join(os.path.dirname(__file__), "schedules.json"), "w"))
