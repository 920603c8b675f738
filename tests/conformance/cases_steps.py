"""Cases: steps and losses of a model's own."""

# ruff: noqa: E501
from __future__ import annotations

from keras import layers, optimizers

from . import steps
from .case import Case
from .models import compiled, dense, stack

DRAWN = "each rank draws its own noise"
LAST = "logs that are no metrics are those of the last batch, of which a rank has its part"

# fmt: off
OF_STEPS = [
    Case("train-step", lambda: compiled(steps.own(steps.TrainStep), metrics=["mae"])),
    Case("train-step-weighted", lambda: compiled(steps.own(steps.TrainStep)), weight="w"),
    Case("train-step-tf-function", lambda: compiled(steps.own(steps.GraphTrainStep), metrics=["mae"])),
    Case("train-step-own-logs", lambda: compiled(steps.own(steps.OwnLogs)), why=LAST),
    Case("train-step-own-trackers", lambda: compiled(steps.own(steps.OwnTrackers), loss=None), shows=("metrics.Mean", "metrics.Sum")),
    Case("train-step-draws-noise", lambda: compiled(steps.own(steps.NoisyStep)), two=None, why=DRAWN),
    Case("train-step-applies-under-condition", lambda: compiled(steps.own(steps.Skips)), refused_by_two="condition"),
    Case("test-step", lambda: compiled(steps.own(steps.TestStep), metrics=["mae"])),
    Case("compute-loss", lambda: compiled(steps.own(steps.ComputeLoss), loss=None)),
    Case("compute-metrics", lambda: compiled(steps.own(steps.ComputeMetrics), metrics=["mae"])),
    Case("derived-logs", lambda: compiled(steps.own(steps.DerivedLogs), metrics=["mae"])),
    Case("add-loss-in-layer", lambda: compiled(stack(layers.Dense(5), steps.Penalty()))),
    Case("add-loss-in-call", lambda: compiled(steps.AddsLoss(), loss=None), y=None),
    Case("layer-only-in-training", lambda: compiled(steps.TrainingOnly())),
    Case("eager-only", lambda: compiled(steps.EagerOnly(), run_eagerly=True), lost="does not give the model that was trained", note="a class that cannot be built without rows; `from_run` takes `model_fn`"),
    Case("distiller", lambda: compiled(steps.Distiller())),
    Case("gan-attributes", lambda: compiled(steps.CalledAdversaries(), None, None), y="y2"),
    Case("gan-dict", lambda: compiled(steps.CalledAdversaries("dict"), None, None), y="y2"),
    Case("gan-list", lambda: compiled(steps.CalledAdversaries("list"), None, None), y="y2"),
    Case("gan-sub-models", lambda: compiled(steps.CalledAdversaries("sub-models"), None, None), y="y2"),
    Case("gan-without-call", lambda: compiled(steps.Adversaries(), None, None), y="y2", validation=False, predicts=None, note="without `call` it cannot predict"),
    Case("train-step-adam", lambda: compiled(steps.own(steps.TrainStep), optimizers.Adam(0.01)), two=1e-4, why="Adam divides by the size of gradients"),
    Case("no-trainable-weights", lambda: _frozen()),
]
# fmt: on


def _frozen() -> object:
    model = dense()
    model.trainable = False
    return compiled(model)
