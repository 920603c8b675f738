"""Cases: every optimizer that Keras exports, what it can be told, and number formats."""

# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers, optimizers
from keras.optimizers import schedules

from .case import Case
from .models import compiled, dense, stack

ROUND = "it divides by the size of gradients, so that rounding shows where they are near 0"
SIGN = "it takes gradients' signs, which rounding turns where they are near 0"
HALF = "half precision rounds each rank's part by itself"


@keras.saving.register_keras_serializable("conformance")
class Centred(optimizers.SGD):
    """An optimizer that divides gradients by their norm before it applies them."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        pairs = list(grads_and_vars)
        norm = keras.ops.sqrt(sum(keras.ops.sum(gradient**2) for gradient, _ in pairs))
        return super().apply_gradients([(gradient / norm, v) for gradient, v in pairs])


@keras.saving.register_keras_serializable("conformance")
class Signed(optimizers.Optimizer):
    """An optimizer of a user's own, with a state."""

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.speeds = [self.add_variable_from_reference(v, "speed") for v in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        speed = self.speeds[self._get_variable_index(variable)]
        speed.assign(0.5 * speed + gradient)
        self.assign_sub(variable, learning_rate * speed)


@keras.saving.register_keras_serializable("conformance")
class Halves(schedules.LearningRateSchedule):
    """A schedule of a user's own."""

    def __call__(self, step: Any) -> Any:
        return 0.1 * 0.5 ** keras.ops.cast(step, "float32")

    def get_config(self) -> dict[str, Any]:
        return {}


def by_layer() -> Any:
    """Return an optimizer that has another one for some variables."""
    chosen = optimizers.OptimizerMap(optimizers.SGD(0.1), {".*bias": optimizers.Adam(0.01)})
    return optimizers.MultiOptimizer(chosen)


def with_policy(policy: str, optimizer: Any = "sgd") -> Any:
    """Return a network in another number format, set for the whole process."""
    keras.config.set_dtype_policy(policy)
    return compiled(dense(), optimizer)


def trained_by(optimizer: Callable[[], Any]) -> Callable[[], Any]:
    """Return what makes a network with that optimizer."""
    return lambda: compiled(dense(), optimizer())


def at_rate(schedule: Callable[[], Any]) -> Callable[[], Any]:
    """Return what makes a network with that schedule of the learning rate."""
    return lambda: compiled(dense(), optimizers.SGD(schedule()))


# fmt: off
# By Keras' name: the optimizer, how far two ranks may be from one, and why.
OPTIMIZERS: dict[str, tuple[Callable[[], Any], float, str]] = {
    "Adadelta": (lambda: optimizers.Adadelta(1.0), 1e-4, ROUND),
    "Adafactor": (lambda: optimizers.Adafactor(0.05), 1e-4, ROUND),
    "Adagrad": (lambda: optimizers.Adagrad(0.1), 1e-4, ROUND),
    "Adam": (lambda: optimizers.Adam(0.01, amsgrad=True), 1e-4, ROUND),
    "AdamW": (lambda: optimizers.AdamW(0.01, weight_decay=0.01), 1e-4, ROUND),
    "Adamax": (lambda: optimizers.Adamax(0.01), 1e-4, ROUND),
    "Ftrl": (lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01), 1e-4, ROUND),
    "Lamb": (lambda: optimizers.Lamb(0.01), 1e-4, ROUND),
    "Lion": (lambda: optimizers.Lion(0.01), 1e-4, SIGN),
    "LossScaleOptimizer": (lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), dynamic_growth_steps=3), 1e-5, ""),
    "MultiOptimizer": (by_layer, 1e-4, ROUND),
    "Muon": (lambda: optimizers.Muon(0.01), 1e-3, "it orthogonalises updates in half precision"),
    "Nadam": (lambda: optimizers.Nadam(0.01), 1e-4, ROUND),
    "Optimizer": (lambda: Signed(0.1), 1e-5, ""),
    "RMSprop": (lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True), 1e-3, ROUND),
    "SGD": (lambda: optimizers.SGD(0.1, 0.9, nesterov=True, weight_decay=0.01), 1e-5, ""),
    "ScheduleFreeAdamW": (lambda: optimizers.ScheduleFreeAdamW(0.01), 1e-4, ROUND),
}
SCHEDULES: dict[str, Callable[[], Any]] = {
    "CosineDecay": lambda: schedules.CosineDecay(0.1, 6, warmup_target=0.2, warmup_steps=2),
    "CosineDecayRestarts": lambda: schedules.CosineDecayRestarts(0.1, 3),
    "ExponentialDecay": lambda: schedules.ExponentialDecay(0.1, 3, 0.5, staircase=True),
    "InverseTimeDecay": lambda: schedules.InverseTimeDecay(0.1, 2, 0.5),
    "PiecewiseConstantDecay": lambda: schedules.PiecewiseConstantDecay([2, 5], [0.1, 0.05, 0.01]),
    "LearningRateSchedule": Halves,
    "PolynomialDecay": lambda: schedules.PolynomialDecay(0.1, 6, 0.01, power=2.0),
}
OF_OPTIMIZERS = [
    Case(
        f"optimizer-{name.lower()}",
        trained_by(optimizer),
        two=two,
        why=why,
        shows=(f"optimizers.{name}",),
    )
    for name, (optimizer, two, why) in OPTIMIZERS.items()
] + [
    Case(
        f"schedule-{name.lower()}",
        at_rate(schedule),
        shows=(f"schedules.{name}",),
    )
    for name, schedule in SCHEDULES.items()
] + [
    Case("optimizer-by-name", lambda: compiled(dense(), "adam"), two=1e-4, why=ROUND),
    Case("own-apply-gradients", lambda: compiled(dense(), Centred(0.1)), refused_by_two="overrides apply_gradients()"),
    Case("clipnorm", lambda: compiled(dense(), optimizers.SGD(0.1, clipnorm=0.1))),
    Case("clipvalue", lambda: compiled(dense(), optimizers.SGD(0.1, clipvalue=0.05))),
    Case("global-clipnorm", lambda: compiled(dense(), optimizers.SGD(0.1, global_clipnorm=0.1))),
    Case("ema", lambda: compiled(dense(), optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))),
    Case("ema-overwrites", lambda: compiled(dense(), optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3))),
    Case("ema-validated", lambda: compiled(dense(), optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)), epochs=3, two=1e-4, why=ROUND),
    Case("accumulation", lambda: compiled(dense(), optimizers.SGD(0.1, 0.9, gradient_accumulation_steps=2))),
    Case("accumulation-across-epochs", lambda: compiled(dense(), optimizers.Adam(0.01, gradient_accumulation_steps=3)), two=1e-4, why=ROUND),
    Case("loss-scale-factor", lambda: compiled(dense(), optimizers.SGD(0.1, loss_scale_factor=128.0))),
    Case("exclude-from-weight-decay", lambda: compiled(dense(), _undecayed()), two=1e-4, why=ROUND),
    Case("mixed-bfloat16", lambda: with_policy("mixed_bfloat16"), one=1e-2, two=1e-2, predicts=1e-2, why=HALF),
    Case("mixed-float16", lambda: with_policy("mixed_float16", optimizers.SGD(0.1)), one=1e-3, two=1e-2, predicts=1e-2, why=HALF, note="where gradients overflow, the loss scale may be halved a step earlier or later than in one process; what follows differs more"),
    Case("pure-bfloat16", lambda: with_policy("bfloat16"), one=5e-2, two=5e-2, predicts=5e-2, why=HALF),
    Case("pure-float16", lambda: with_policy("float16"), one=1e-2, two=1e-2, predicts=1e-2, why=HALF),
    Case("pure-float64", lambda: with_policy("float64"), two=1e-6),
    Case("mixed-by-layer", lambda: compiled(stack(layers.Dense(6, "tanh", dtype="mixed_bfloat16"))), one=1e-2, two=1e-2, predicts=1e-2, why=HALF),
]
# fmt: on


def _undecayed() -> Any:
    optimizer = optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer
