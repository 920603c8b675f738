"""The deterministic trainings that faults are injected into."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horovod_spark_runner import (
    CheckpointOptions,
    DataOptions,
    LaunchOptions,
    RestartOptions,
    run_training,
)
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from tests.digits import load as load_digits
from tests.runs import assert_same_arrays

from .injection import Fault, callbacks_for
from .phases import PhaseFault, hooks_for, rows_with

ROWS = 400
EPOCHS = 3
STEPS = 60
RANKS = 2
EVERY = 4


def model_fn() -> Any:
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def plain_model_fn() -> Any:
    """Return a model to which it is the same how a global batch is spread over ranks."""
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def make_frame(spark: Any) -> Any:
    """Return the rows, in one partition: in the same order on any master."""
    images, labels = load_digits()
    rows = list(zip(images[:ROWS].tolist(), labels[:ROWS].tolist(), strict=True))
    return spark.createDataFrame(rows, "image array<float>, digit int").coalesce(1)


def train(
    frame: Any,
    run_dir: Path | str,
    faults: Sequence[Fault | PhaseFault] = (),
    folder: str = "",
    *,
    plain: bool = False,
    validate: bool = False,
    **options: Any,
) -> Any:
    """Train with faults; ``folder`` takes their notes. ``validate``: on the same rows.

    ``options`` holds settings by `run_training`'s arguments ``data``, ``launch`` and ``restarts``,
    as a command line can hold them, too.
    """
    restarts = {"max_restarts": len(faults), "backoff_seconds": 0.1}
    of_steps = [fault for fault in faults if isinstance(fault, Fault)]
    of_phases = [fault for fault in faults if isinstance(fault, PhaseFault)]
    makers = [
        callbacks_for(of_steps, folder),
        hooks_for(of_phases, folder, str(run_dir), EVERY),
    ]
    return run_training(
        rows_with(of_phases, frame, folder),
        plain_model_fn if plain else model_fn,
        feature_cols=["image"],
        label_cols=["digit"],
        num_workers=RANKS,
        batch_size=10,
        epochs=EPOCHS,
        run_dir=str(run_dir),
        callbacks=lambda: [callback for make in makers for callback in make()],
        validation=frame if validate else None,
        stream_logs=False,
        checkpoints=CheckpointOptions(every_steps=EVERY),
        data=DataOptions(**options.pop("data", {})),
        launch=LaunchOptions(**options.pop("launch", {})),
        restarts=RestartOptions(**{**restarts, **options.pop("restarts", {})}),
        **options,
    )


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return RunDirectory(str(run_dir)).read_metrics()


def assert_same_end(run_dir: Path, undisturbed: Path) -> None:
    """Check that a run ended as the undisturbed one, to the bit: also optimizer and all ranks."""
    last = f"checkpoints/step-{STEPS:08d}"
    for file in ("model/weights.npz", f"{last}/variables.npz", f"{last}/ranks.npz"):
        assert_same_arrays(run_dir / file, undisturbed / file)
    assert metrics_of(run_dir) == metrics_of(undisturbed)


def assert_nearly_same_end(run_dir: Path, undisturbed: Path) -> None:
    """Check that a run of other numbers of ranks ended as the undisturbed one, but for rounding."""
    for file in ("model/weights.npz", f"checkpoints/step-{STEPS:08d}/variables.npz"):
        assert_same_arrays(run_dir / file, undisturbed / file, atol=1e-5)
    ours, theirs = metrics_of(run_dir), metrics_of(undisturbed)
    assert len(ours) == len(theirs) == EPOCHS
    for found, expected in zip(ours, theirs, strict=True):
        assert found.keys() == expected.keys()
        assert all(abs(found[name] - value) < 1e-4 for name, value in expected.items())
