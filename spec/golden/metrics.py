#!/usr/bin/env python3
"""metrics.py: values of TorchRec's metrics that spec/golden/ops/metrics has not, as metrics.json.

Run with a Python that has torch and torchrec: python spec/golden/metrics.py >spec/golden/metrics.json
Each case has four updates of 30 samples of one task; the window holds 70 samples, which are whole updates.
"""
import json, random, sys
import torch
from torchrec.metrics.metrics_config import RecTaskInfo
from torchrec.metrics.calibration_with_recalibration import RecalibratedCalibrationMetric
from torchrec.metrics.hindsight_target_pr import HindsightTargetPRMetric, get_pr_states, compute_threshold_idx, \
    compute_precision, compute_recall
from torchrec.metrics.mse import MSEMetric
from torchrec.metrics.multi_label_precision import MultiLabelPrecisionMetric
from torchrec.metrics.ne_with_recalibration import RecalibratedNEMetric
from torchrec.metrics.num_missing_labels import NumMissingLabelsMetric
from torchrec.metrics.num_positive_samples import NumPositiveSamplesMetric
from torchrec.metrics.serving_calibration import ServingCalibrationMetric
from torchrec.metrics.serving_ne import ServingNEMetric
from torchrec.metrics.sum_weights import SumWeightsMetric
from torchrec.metrics.weighted_sum_predictions import WeightedSumPredictionsMetric

N, UPDATES, WINDOW = 30, 4, 70
draw = random.Random(20261201)
task = RecTaskInfo(name="t", label_name="l", prediction_name="p", weight_name="w")


def samples(kind):
    probability = [round(draw.randrange(10, 9990) * 1e-4 + 3e-5, 5) for _ in range(N)]  # no threshold of a thousand
    label = [float(draw.random() < p) for p in probability]
    weight = [0.0 if draw.random() < 0.2 else round(draw.uniform(0.1, 3), 3) for _ in range(N)]
    if kind == "missing":
        label = [None if draw.random() < 0.3 else y for y in label]
    if kind == "numbers":
        probability = [round(draw.uniform(-2, 5), 3) for _ in range(N)]
        label = [round(p + draw.uniform(-1, 1), 3) for p in probability]
    if kind == "bits":
        probability, label = [[float(draw.randrange(16)) for _ in range(N)] for _ in range(2)]
    return {"predictions": probability, "labels": label, "weights": weight}


def tensor(list_):
    return torch.tensor([[float("nan") if x is None else x for x in list_]], dtype=torch.float64)


def values_of(metric):
    out = {}
    for r in metric._metrics_computations[0].compute():
        out[r.metric_prefix.value + r.name.value + (r.description or "")] = float(r.value.reshape(-1)[0])
    return out


def hindsight(updates, target):
    """TorchRec's functions; what its class reports as hindsight_target_pr are numbers that nobody wrote."""
    out = {}
    window = updates[-(WINDOW // N):]
    for prefix, part in (("lifetime_", updates), ("window_", window)):
        sums = None
        for u in part:
            states = get_pr_states(tensor(u["labels"])[0], tensor(u["predictions"])[0], tensor(u["weights"])[0])
            sums = states if sums is None else {k: sums[k] + states[k] for k in sums}
        tp, fp, fn = sums["true_pos_sum"], sums["false_pos_sum"], sums["false_neg_sum"]
        at = compute_threshold_idx(tp, fp, target)
        out[prefix + "hindsight_target_pr"] = at
        out[prefix + "hindsight_target_precision"] = float(compute_precision(tp[at], fp[at]))
        out[prefix + "hindsight_target_recall"] = float(compute_recall(tp[at], fn[at]))
    return out


cases = []


def case(cls, kind="plain", **kwargs):
    updates, outs = [], []
    window = WINDOW // N * N if cls is HindsightTargetPRMetric else WINDOW  # which keeps samples there
    metric = cls(world_size=1, my_rank=0, batch_size=N, tasks=[task], window_size=WINDOW, **kwargs)
    for _ in range(UPDATES):
        u = samples(kind)
        updates.append(u)
        if cls is HindsightTargetPRMetric:
            outs.append(hindsight(updates, kwargs["target_precision"]))
            continue
        metric.update(predictions={"t": tensor(u["predictions"])[0]}, labels={"t": tensor(u["labels"])[0]},
                      weights={"t": tensor(u["weights"])[0]})
        outs.append(values_of(metric))
    cases.append({"metric": cls.__name__, "args": dict(kwargs, window_size=window), "updates": updates, "values": outs})


for c in (NumPositiveSamplesMetric, SumWeightsMetric, WeightedSumPredictionsMetric, ServingNEMetric,
          ServingCalibrationMetric):
    case(c)
case(NumMissingLabelsMetric, "missing")
case(MSEMetric, "numbers", include_r_squared=True)
case(RecalibratedNEMetric, recalibration_coefficient=0.3)
case(RecalibratedCalibrationMetric, recalibration_coefficient=0.3)
case(MultiLabelPrecisionMetric, "bits", num_labels=3, label_names=["a", "b", "c"])
case(MultiLabelPrecisionMetric, "bits", num_labels=4)
for precision in (0.3, 0.8, 1.0):
    case(HindsightTargetPRMetric, target_precision=precision)
line = torch.linspace(0, 1, steps=1000)
json.dump({"torchrec": __import__("importlib.metadata").metadata.version("torchrec"), "cases": cases,
           "linspace": [line[i].item() for i in (0, 1, 333, 499, 500, 777, 998, 999)]}, sys.stdout)
