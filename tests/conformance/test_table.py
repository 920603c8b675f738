"""The table is whole, says what it does, and is the one that is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

from .case import Case
from .table import CASES
from .training import forget


def exported(module: Any, kind: type) -> list[str]:
    """Return the names of the classes that a module of Keras exports."""
    found = (getattr(module, name) for name in dir(module))
    return sorted({v.__name__ for v in found if isinstance(v, type) and issubclass(v, kind)})


EXPORTED = {
    "callbacks": [
        *exported(keras.callbacks, keras.callbacks.Callback),
        "CallbackList",
    ],
    "losses": exported(keras.losses, keras.losses.Loss),
    "metrics": exported(keras.metrics, keras.metrics.Metric),
    "optimizers": exported(keras.optimizers, keras.optimizers.Optimizer),
    "schedules": exported(
        keras.optimizers.schedules, keras.optimizers.schedules.LearningRateSchedule
    ),
}


@pytest.mark.parametrize("module", EXPORTED)
def test_all_that_keras_exports_is_in_a_case(module: str) -> None:
    shown = {name for case in CASES for name in case.shows}
    assert len(EXPORTED[module]) > 5
    assert [name for name in EXPORTED[module] if f"{module}.{name}" not in shown] == []


def found_in(case: Case, folder: Path) -> set[str]:
    """Return what a case's model is compiled with, and its callbacks, by Keras' names."""
    model = case.model()
    metrics = [*_flat(getattr(model._compile_metrics, "_user_metrics", None)), *model.metrics]
    found = {f"metrics.{base}" for metric in metrics for base in _bases(metric)}
    found |= {f"losses.{base}" for loss in _flat(model.loss) for base in _bases(_loss(loss))}
    found |= {f"optimizers.{base}" for base in _bases(model.optimizer)}
    rate = getattr(model.optimizer, "_learning_rate", None)
    found |= {f"schedules.{base}" for base in _bases(rate)}
    if "orbax" not in case.name:  # needs a package that is not there
        found |= {f"callbacks.{base}" for c in case.callbacks(folder) for base in _bases(c)}
    return {name.lower() for name in found}


def _flat(value: Any) -> list[Any]:
    return [part for part in keras.tree.flatten(value) if part is not None]


def _bases(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [cls.__name__ for cls in type(value).__mro__]


def _loss(loss: Any) -> Any:
    if isinstance(loss, str):
        return keras.losses.get(loss).__name__.replace("_", "")
    return loss


@pytest.mark.thorough
@pytest.mark.parametrize("case", [case for case in CASES if case.shows], ids=lambda case: case.name)
def test_a_case_has_what_it_is_there_for(case: Case, tmp_path: Path) -> None:
    try:
        found = found_in(case, tmp_path)
    finally:
        forget()
    shown = [name for name in case.shows if "Orbax" not in name]
    assert [name for name in shown if name.lower() not in found] == []


def test_names_are_there_once() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_what_is_unusual_has_a_reason() -> None:
    assert [c.name for c in CASES if (c.two is None or c.two > 1e-5) and not c.why] == []
    assert [c.name for c in CASES if c.one > 1e-6 and not c.why] == []
