"""The engine of tests/numpy_engine.py, which notes what it is asked for in the run directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from horovod_spark_runner import TFTransformer
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.storage.arrays import dump_arrays
from horovod_spark_runner.training.engine import Engine
from horovod_spark_runner.training.spec import Binding
from horovod_spark_runner.training.trained_model import (
    WEIGHTS_FILE,
    Model,
    ModelWriter,
    Signature,
)

from .numpy_engine import OUTPUT, NumpyEngine

NAME = "tests.counting_engine"


@dataclass(frozen=True)
class Counted:
    """A ``model_fn`` that says which engine it is for."""

    horovod_engine = NAME

    def __call__(self) -> None:
        return None


class CountingEngine(NumpyEngine):
    def parts(
        self, model: Any, source: Any, saved: Any, custom_objects: Any, trusted: bool = False
    ) -> Any:
        return model.read(WEIGHTS_FILE), str(model.directory.location)

    def load(self, recipe: Any) -> Model:
        weights, place = recipe.parts
        model = super().load(replace(recipe, parts=weights))
        note(place, "loads", os.getpid())

        def prepare(values: dict[str, np.ndarray]) -> Any:
            note(place, "rows", len(next(iter(values.values()))))
            return model.prepare(values)

        return Model(prepare, model.compute)


ENGINE: Engine = CountingEngine()


def note(place: str, what: str, number: int) -> None:
    with open(Path(place, what), "a") as file:
        file.write(f"{number}\n")


def noted(place: Path, what: str) -> list[int]:
    """Return what was noted since the last time."""
    path = place / what
    numbers = [int(line) for line in path.read_text().split()] if path.exists() else []
    path.unlink(missing_ok=True)
    return numbers


def save_line(place: Path, columns: Sequence[Column], weights: Sequence[float]) -> None:
    """Leave a linear model in a run directory; the last weight is the intercept."""
    writer = ModelWriter(RunDirectory(str(place)))
    writer.write(WEIGHTS_FILE, dump_arrays({"00000": np.array(weights, float)}))
    inputs = Binding(tuple(column.name for column in columns))
    writer.finish(Signature(inputs, tuple(columns), (OUTPUT,), NAME, ("weights",)))


def line(place: Path, **settings: Any) -> TFTransformer:
    """Return the transformer of a model that `save_line` left."""
    return TFTransformer.from_run(str(place), model_fn=Counted(), **settings)
