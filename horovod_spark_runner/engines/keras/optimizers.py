"""The optimizers of a model, wherever it keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras

from ...config.sync import Compression, Moving, Residual
from ...errors import ModelError
from ...sync.codec import notice_late_momentum
from .model import all_layers


def find_optimizers(
    model: keras.Model, applied: Sequence[keras.optimizers.Optimizer] = ()
) -> list[keras.optimizers.Optimizer]:
    """Return the model's optimizers, in the same order on all ranks.

    The compiled one comes first, then what is kept in attributes of the model and of its layers
    and inner models, also in lists and dictionaries. One that wraps others stands for them.

    Args:
        model: the model.
        applied: optimizers that its step was seen to use, wherever they are kept.
    """
    optimizers: list[keras.optimizers.Optimizer] = []
    _collect(model.optimizer, optimizers, set())
    seen: set[int] = set()
    for layer in all_layers(model):
        _collect(vars(layer), optimizers, seen)
    _collect(list(applied), optimizers, seen)
    inner = {id(part) for optimizer in optimizers for part in _inner_optimizers(optimizer)}
    return [optimizer for optimizer in optimizers if id(optimizer) not in inner]


def _collect(value: object, optimizers: list[keras.optimizers.Optimizer], seen: set[int]) -> None:
    if isinstance(value, keras.optimizers.Optimizer):
        if not any(value is optimizer for optimizer in optimizers):
            optimizers.append(value)
    elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for item in list(value.values() if isinstance(value, Mapping) else value):
            _collect(item, optimizers, seen)


def _inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers that one wraps, as loss scaling and ``MultiOptimizer`` do."""
    inner = [getattr(optimizer, "inner_optimizer", None)]
    inner += list(getattr(optimizer, "optimizers", None) or ())
    return [part for part in inner if isinstance(part, keras.optimizers.Optimizer)]


def leaf_optimizers(
    optimizers: Sequence[keras.optimizers.Optimizer],
) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers that update variables themselves."""
    leaves: list[keras.optimizers.Optimizer] = []
    for optimizer in optimizers:
        inner = _inner_optimizers(optimizer)
        leaves += leaf_optimizers(inner) if inner else [optimizer]
    return leaves


def rate_of_last_step(optimizer: keras.optimizers.Optimizer) -> float:
    """Return the learning rate an optimizer used last, as long as nobody has set it since.

    Args:
        optimizer: one that updates variables itself; before its first step, what that will use.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        # It counts a step at its end: what it gives now is for the next one.
        return float(rate(max(int(optimizer._iterations) - 1, 0)))
    return float(optimizer.learning_rate)


def check_optimizers(optimizers: Sequence[keras.optimizers.Optimizer]) -> None:
    """Check that none is a `DistributedOptimizer` of Horovod's.

    Raises:
        ModelError: an optimizer is a `DistributedOptimizer`.
    """
    for optimizer in leaf_optimizers(optimizers):
        if any(
            str(getattr(member, "__module__", "")).startswith("horovod.")
            for member in vars(optimizer).values()
        ):
            raise ModelError(
                f"optimizer {optimizer.name!r} is a DistributedOptimizer of Horovod's; compile the "
                "model with the plain Keras optimizer: run_training averages the gradients itself"
            )


def check_compression(
    optimizers: Sequence[keras.optimizers.Optimizer], compression: Compression
) -> None:
    """Check that a model's gradients can be compressed so.

    Raises:
        ModelError: an optimizer would be given something else than it takes it for.
    """
    if not isinstance(compression, Residual):
        return
    kind = type(compression).__name__
    for optimizer in optimizers:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ModelError(
                f"optimizer {optimizer.name!r} scales the loss by a changing factor, but "
                f"compression={kind}(…) sends a part of a step's gradients in later steps. Train "
                "in float32 or mixed_bfloat16, or use compression='bf16' or 'none'"
            )
    leaves = leaf_optimizers(optimizers)
    if not isinstance(compression, Moving) or not compression.momentum:
        moves = any(getattr(optimizer, "momentum", 0.0) for optimizer in leaves)
        notice_late_momentum(compression, moves=moves)
        return
    for optimizer in leaves:
        plain = type(optimizer) is keras.optimizers.SGD
        limits = ("clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps")
        if not plain or any(getattr(optimizer, limit) for limit in ("momentum", *limits)):
            raise ModelError(
                f"optimizer {optimizer.name!r} ({type(optimizer).__name__}) would see sums of "
                f"momentum, which compression={kind}(…, momentum={compression.momentum:g}) applies "
                "on each rank. Compile the model with plain keras.optimizers.SGD(rate), without "
                "momentum, clipping and accumulation, or give momentum=0"
            )


class LearningRates:
    """The rates of a model's optimizers, to be scaled and warmed up.

    Args:
        optimizers: the model's optimizers.
        scaling: the ``lr_scaling`` they are wanted for.

    Raises:
        ModelError: a rate is a schedule.
    """

    def __init__(self, optimizers: Sequence[keras.optimizers.Optimizer], scaling: str) -> None:
        self._optimizers = leaf_optimizers(optimizers)
        for optimizer in self._optimizers:
            if not hasattr(optimizer._learning_rate, "assign"):
                raise ModelError(
                    f"lr_scaling={scaling!r} needs a plain learning rate, but that of "
                    f"{optimizer.name!r} is a {type(optimizer._learning_rate).__name__}; scale the "
                    "schedule in model_fn instead"
                )

    def read(self) -> list[float]:
        """Return the rates as they are now."""
        return [float(optimizer.learning_rate) for optimizer in self._optimizers]

    def write(self, values: Sequence[float]) -> None:
        """Set the rates."""
        for optimizer, value in zip(self._optimizers, values, strict=True):
            optimizer.learning_rate = value
