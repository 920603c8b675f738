"""Finished runs: what is in them, and how to leave one without a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.config.data import DataOptions
from horovod_spark_runner.config.training import FitOptions, TrainingConfig
from horovod_spark_runner.data.manifest import Column, Manifest
from horovod_spark_runner.engines.keras.saved import SavedModel
from horovod_spark_runner.training.spec import Binding, ModelSource, TrainingSpec
from horovod_spark_runner.training.trained_model import ModelInputs


def arrays_in(path: Path) -> dict[str, np.ndarray]:
    """Return what an ``.npz`` file holds."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def assert_same_arrays(found: Path, expected: Path, atol: float = 0.0) -> None:
    """Check that two ``.npz`` files hold the same arrays: to the bit, unless ``atol`` says more."""
    ours, theirs = arrays_in(found), arrays_in(expected)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], rtol=0, atol=atol, err_msg=name)


def assert_same_weights(run_dir: Path, expected: Path, atol: float = 0.0) -> None:
    """Check that two runs ended with the same weights."""
    weights = "model/weights.npz"
    assert_same_arrays(run_dir / weights, expected / weights, atol)


LABEL = Column("y", "float32")

# Fields of the configuration; ``validation`` is that of the spec.
CONFIG = {one.name for one in fields(TrainingConfig)} - {"validation"}


def spec_of(
    columns: Sequence[Column], labels: Sequence[Column] = (LABEL,), **given: Any
) -> TrainingSpec:
    """Return the spec of a training on ``columns``, each for the input of that name or order."""
    known = {column.name: column for column in (*columns, *labels)}
    manifest = Manifest("", (), tuple(known.values()), (), "")
    own = {name: given.pop(name) for name in CONFIG & given.keys()} | {"model_fn": None}
    own.setdefault("data", DataOptions(window_bytes=1 << 20))
    own.setdefault("fit", FitOptions(batch_size=4, epochs=1))
    values: dict[str, Any] = {
        "config": TrainingConfig(**own),
        "model": ModelSource(),
        "inputs": Binding(tuple(column.name for column in columns)),
        "outputs": Binding(tuple(column.name for column in labels)),
        "train": manifest,
        "validation": None,
        "run_dir": "",
        "run_id": "",
        "workers": 1,
        "settings": {},
        **given,
    }
    return TrainingSpec(**values)


def curves_in(folder: Path) -> dict[str, list[tuple[int, np.float32]]]:
    """Return the points of event files as TensorBoard itself reads them: step and value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(p.step, np.float32(p.value)) for p in events.Scalars(tag)] for tag in tags}


def variables_of(model: Any) -> Any:
    """Return the variables that a training of ``model`` goes on from."""
    from horovod_spark_runner.engines.keras.optimizers import find_optimizers
    from horovod_spark_runner.engines.keras.state import KerasVariables

    return KerasVariables(model, find_optimizers(model))


def save_run(place: Path | str, model: Any, columns: Sequence[Column], **fields: Any) -> SavedModel:
    """Leave ``model`` in a run directory as a training does."""
    from horovod_spark_runner.engines.keras.artifact import save_model
    from horovod_spark_runner.engines.keras.binding import InputBinding

    directory, spec = RunDirectory(str(place)), spec_of(columns, **fields)
    bind = InputBinding(model, spec.inputs, spec.train)
    saved: SavedModel = save_model(directory, model, ModelInputs.of_training(spec), bind)
    directory.write_metrics([{"loss": 1.0}])
    return saved


def source(function: Any, custom_objects: Mapping[str, Any] | None = None) -> ModelSource:
    return ModelSource(function=function, custom_objects=custom_objects or {})
