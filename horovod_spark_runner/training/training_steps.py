"""Number of steps of a training, for the code that makes its model and learning rate schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import InvalidInputError


@dataclass(frozen=True)
class TrainingSteps:
    """Steps of a training, all ranks together: the same numbers on every rank.

    Attributes:
        per_epoch: steps of an epoch.
        total: steps of all epochs.
    """

    per_epoch: int
    total: int


_provided: TrainingSteps | None = None


def training_steps() -> TrainingSteps:
    """Return the number of steps of the training, for ``model_fn`` and objects it creates.

    For learning rate schedules whose length is the training's, such as Keras' ``CosineDecay`` and
    PyTorch's ``OneCycleLR``. It counts batches from the first epoch to the last, also where the run
    was resumed. Where the model is built without a training, to predict, both numbers are 1.

    Raises:
        InvalidInputError: it is called elsewhere, as on the driver.
    """
    if _provided is None:
        raise InvalidInputError(
            "training_steps() is called outside a training: call it in model_fn, or in a function "
            "that model_fn passes on, such as TorchModel(scheduler=…); it is known on the ranks"
        )
    return _provided


@contextlib.contextmanager
def provide_steps(steps: TrainingSteps | None = None) -> Iterator[None]:
    """Provide ``steps`` to `training_steps`; by default 1, unless a training provides them."""
    global _provided
    before = _provided
    _provided = steps or before or TrainingSteps(1, 1)
    try:
        yield
    finally:
        _provided = before
