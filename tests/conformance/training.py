"""A case trained: by Keras' own ``fit``, and by this project on the ranks of a world."""

from __future__ import annotations

import gc
import json
import pickle
import re
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.config.data import DataOptions
from horovod_spark_runner.config.training import CheckpointOptions, FitOptions, TrainingConfig
from horovod_spark_runner.engines.keras.saved import ARCHIVE_FILE, CONFIG_FILE
from horovod_spark_runner.model.load import (
    _check_callable,
    _TrainedModel,
    read_finished_run,
    read_trained_model,
)
from horovod_spark_runner.model.shipping import load_model
from horovod_spark_runner.storage.filesystem import Location
from horovod_spark_runner.training.loop import train
from horovod_spark_runner.training.spec import AttemptSpec, ModelSource, TrainingSpec, bind_columns
from horovod_spark_runner.training.trained_model import Recipe

from .case import Case
from .data import (
    GLOBAL_BATCH,
    SEED,
    VALIDATION_ROWS,
    WINDOW,
    join,
    open_data,
    train_batches,
    validation_batches,
)
from .recording import Recording, plain, recorder

TOKEN = "conformance"
# Lines of a traceback that are kept.
TRACE = 12


class Batches(keras.utils.PyDataset):
    """Exactly these batches, other ones in each epoch."""

    def __init__(self, epochs: list[list[Any]]) -> None:
        super().__init__()
        self._epochs = [keras.tree.map_structure(_without_objects, epoch) for epoch in epochs]
        self._epoch = -1

    def __len__(self) -> int:
        return len(self._epochs[0])

    def __getitem__(self, index: int) -> Any:
        return self._epochs[max(0, self._epoch)][index]

    def on_epoch_begin(self) -> None:
        self._epoch = min(self._epoch + 1, len(self._epochs) - 1)


def _without_objects(values: np.ndarray) -> Any:
    """Return strings as tensors: Keras takes no arrays of Python objects."""
    return tf.constant(values.tolist()) if values.dtype == object else values


def fit(case: Case, data: Path, folder: Path) -> Recording:
    """Train ``case`` with ``Model.fit``."""
    noted = recorder()

    def work() -> tuple[Any, dict[str, Any]]:
        options: dict[str, Any] = dict(case.options)
        epochs = train_batches(open_data(data, case.rows, case), case.epochs)
        if "steps_per_epoch" in options:  # its epochs are parts of the first pass over the rows
            epochs = epochs[:1]
        if case.validation:
            held_out = validation_batches(open_data(data, VALIDATION_ROWS, case))
            options["validation_data"] = Batches([list(map(case.batch, held_out))])
        keras.utils.set_random_seed(SEED)
        model = case.model()
        folder.mkdir(parents=True, exist_ok=True)
        result = model.fit(
            Batches([list(map(case.batch, epoch)) for epoch in epochs]),
            epochs=case.epochs,
            callbacks=[*case.callbacks(folder), noted],
            verbose=0,
            shuffle=False,
            **options,
        )
        return model, result.history

    return _recorded(work, noted, folder)


def ours(case: Case, data: Path, folder: Path, run_dir: Path, size: int, rank: int) -> Recording:
    """Train ``case`` on this rank of a world of ``size`` ranks, together with the others."""
    noted = recorder()
    made: list[Any] = []
    saved: list[Any] = []

    def model_fn() -> Any:
        made.append(case.model())
        return made[-1]

    def work() -> tuple[Any, dict[str, Any]]:
        spec = _spec(case, data, run_dir, size, model_fn)
        spec.config.callbacks.append(noted)
        folder.mkdir(parents=True, exist_ok=True)
        spec.config.callbacks[:0] = case.callbacks(folder)
        if rank == 0:
            run_dir.mkdir(parents=True)
            (run_dir / "lock.json").write_text(json.dumps({"token": TOKEN}))
        report = train(spec)
        saved.append(report.saved)
        return made[0], _by_metric(report.history)

    recording = _recorded(work, noted, folder)
    if rank == 0 and not recording.error and size == 1:
        _predict(case, data, run_dir, made[0], saved[0], recording)
    return recording


def _spec(
    case: Case, data: Path, run_dir: Path, size: int, model: Callable[[], Any]
) -> TrainingSpec:
    """Return what `run_training` would tell the ranks."""
    return TrainingSpec(
        model=ModelSource(function=model),
        inputs=bind_columns(_as_argument(case.x), "feature_cols"),
        outputs=bind_columns(_as_argument(case.y), "label_cols"),
        config=TrainingConfig(
            model_fn=None,
            sample_weight_col=case.weight,
            data=DataOptions(window_bytes=WINDOW),
            checkpoints=CheckpointOptions(keep=1),
            callbacks=[],
            fit=FitOptions(
                batch_size=GLOBAL_BATCH // size,
                epochs=case.epochs,
                seed=SEED,
                **case.options,
            ),
        ),
        train=open_data(data, case.rows, case),
        validation=open_data(data, VALIDATION_ROWS, case) if case.validation else None,
        run_dir=str(run_dir),
        workers=size,
        run_id="conformance",
        attempt=AttemptSpec(lease_token=TOKEN),
        settings={},
    )


def _as_argument(columns: Any) -> Any:
    return [columns] if isinstance(columns, str) else columns


def _by_metric(history: list[dict[str, Any]]) -> dict[str, list[Any]]:
    result: dict[str, list[Any]] = {}
    for logs in history:
        for name, value in logs.items():
            result.setdefault(name, []).append(value)
    return result


def _recorded(
    work: Callable[[], tuple[Any, dict[str, Any]]], noted: Any, folder: Path
) -> Recording:
    recording = Recording()
    began = time.monotonic()
    try:
        model, history = work()
        recording.history = plain(history)
        recording.weights = _values(model.weights)
        optimizer = model.optimizer
        recording.optimizer = _values(getattr(optimizer, "variables", []))
    except Exception as error:  # whatever a case raises is its result
        recording.error = f"{type(error).__name__}: {error}"
        recording.trace = "".join(traceback.format_exc().splitlines(keepends=True)[-TRACE:])
    recording.seconds = time.monotonic() - began
    recording.calls = noted.calls
    recording.params = plain(noted.first_params)
    recording.files = _files(folder)
    return recording


def _values(variables: Any) -> dict[str, np.ndarray]:
    return {f"{i:05d} {v.path}": np.array(v.numpy()) for i, v in enumerate(variables)}


def _files(folder: Path) -> dict[str, str]:
    """Return the files by name; times and processes in names count as equal."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = re.sub(r"\d{5,}.*", "…", str(path.relative_to(folder)))
            found[name] = path.read_text() if path.suffix == ".csv" else ""
    return found


def _predict(
    case: Case, data: Path, run_dir: Path, model: Any, saved: Any, recording: Recording
) -> None:
    """Note what the model predicts, and what comes of it by way of the run directory."""
    arrays = join(validation_batches(open_data(data, VALIDATION_ROWS, case)))
    inputs = case.inputs(arrays)
    directory = RunDirectory(Location(str(run_dir)))
    objects = {**_own_classes(run_dir / "model" / ARCHIVE_FILE), **case.custom_objects}
    source = ModelSource(function=case.model)

    done: dict[bytes, list[np.ndarray]] = {}

    def compute(recipe: Recipe) -> list[np.ndarray]:
        columns = [column.name for column in recipe.columns]
        values = load_model(recipe)({name: arrays[name] for name in columns})
        # In the order in which Keras flattens them.
        pairs = zip(recipe.outputs, values, strict=True)
        return [value for _, value in sorted(pairs, key=lambda pair: pair[0].path)]

    def predict(trained: _TrainedModel) -> list[np.ndarray]:
        _check_callable(trained)
        recipe = trained.recipe
        if recipe.parts.source is not None:
            return compute(recipe)
        # Made of the same bytes, it is the same model; what compiles it is for evaluation only.
        made_of = pickle.dumps(replace(recipe, parts=replace(recipe.parts, compiled_by=None)))
        if made_of not in done:
            done[made_of] = compute(recipe)
        return done[made_of]

    ways: dict[str, Callable[[], list[np.ndarray]]] = {
        "run_training": lambda: predict(read_trained_model(directory, source, saved, {})),
        "from_run": lambda: predict(read_finished_run(directory, custom_objects=objects)),
    }
    if case.lost:
        ways["model_fn"] = lambda: predict(read_finished_run(directory, model_fn=case.model))
    if case.predicts is not None:
        ways["model"] = lambda: keras.tree.flatten(model.predict(inputs, verbose=0))
    for way, predicted in ways.items():
        try:
            recording.predictions[way] = [np.array(value) for value in predicted()]
        except Exception as error:  # whatever a prediction raises is its result
            recording.failures[way] = f"{type(error).__name__}: {error}"


def _own_classes(archive: Path) -> dict[str, Any]:
    """Return the cases' own layers, models and the like, as a user would name them.

    They travel with their modules: those that the model's archive, if there is one, does not name
    are left at home.
    """
    registered = keras.saving.get_custom_objects()
    own = {name: c for name, c in registered.items() if name.startswith("conformance>")}
    if archive.exists():
        with zipfile.ZipFile(archive) as file:
            config = file.read(CONFIG_FILE).decode()
        own = {name: c for name, c in own.items() if json.dumps(name) in config}
    return {c.__name__: c for c in own.values()}


def forget() -> None:
    """Take back what a case may have left in Keras' global state.

    What TensorFlow keeps of it for good is not looked through for garbage again.
    """
    keras.backend.clear_session()
    gc.freeze()
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    keras.config.disable_traceback_filtering()
