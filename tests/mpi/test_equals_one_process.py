"""N ranks with batch B train exactly what one process trains with batch N·B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import Allreduce, DataOptions, RanksDivergedError
from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.data.read.reader import DatasetReader
from horovod_spark_runner.data.read.sharding import plan_epoch
from tests.trainings import train

pytestmark = [pytest.mark.mpi, pytest.mark.spark]

GLOBAL_BATCH = 24
ROWS = 331  # 13 global batches and 19 rows more
EPOCHS = 2


def make_model(optimizer: str) -> Any:
    """A small network; every initial weight is set from the seed by the caller."""
    import keras

    keras.utils.set_random_seed(3)
    if optimizer == "adam":
        send_each_gradient_by_itself()
    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(16, activation="tanh", kernel_regularizer="l2"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    chosen = {
        "sgd": keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0),
        "adam": keras.optimizers.Adam(0.01),
    }[optimizer]
    model.compile(chosen, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def send_each_gradient_by_itself() -> None:
    """Let this rank's gradients leave while others are computed, as large ones between hosts do."""
    from horovod_spark_runner.engines.keras import exchange
    from horovod_spark_runner.sync import allreduce

    allreduce.BUCKET_BYTES = 1
    exchange._may_leave_early = lambda: True


def make_model_without_exchange() -> Any:
    """Return the network, and let this rank keep its gradients to itself."""
    from horovod_spark_runner.engines.keras.step import DistributedStep

    def reduce(self: Any, gradients: Any, place: str) -> Any:
        return list(gradients)

    DistributedStep.reduce = reduce  # type: ignore[method-assign]
    return make_model("sgd")


def recorder(folder: str) -> list[Any]:
    """Callbacks that write the weights after every step; run on each worker."""
    import horovod.tensorflow as hvd
    import keras

    class Recorder(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.steps: list[np.ndarray] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps.append(np.concatenate([w.ravel() for w in self.model.get_weights()]))

        def on_train_end(self, logs: Any = None) -> None:
            np.save(Path(folder, f"rank-{hvd.rank()}.npy"), np.stack(self.steps))

    return [Recorder()]


def recorded(
    frame: Any, folder: Path, optimizer: str, world: int, model_fn: Any = None, **more: Any
) -> tuple[list[np.ndarray], Any]:
    """Train on ``world`` ranks; return the weights of each rank after every step."""
    folder.mkdir(parents=True)
    place = str(folder)
    transformer = train(
        frame,
        folder / "run",
        model_fn=model_fn or (lambda: make_model(optimizer)),
        num_workers=world,
        batch_size=GLOBAL_BATCH // world,
        epochs=EPOCHS,
        data=DataOptions(keep_data=True),
        callbacks=lambda: recorder(place),
        **more,
    )
    weights = [np.load(folder / f"rank-{rank}.npy") for rank in range(world)]
    return weights, transformer


@pytest.fixture(scope="module")
def frame(digits_df: Any) -> Any:
    return digits_df.filter(f"id < {ROWS}")


@pytest.fixture(scope="module")
def reference(frame: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weights of one rank, by optimizer."""
    folder = tmp_path_factory.mktemp("one")
    return {name: recorded(frame, folder / name, name, 1) for name in ("sgd", "adam")}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_ranks_equal_one_process(
    frame: Any, reference: Any, tmp_path: Path, optimizer: str, world: int
) -> None:
    weights, transformer = recorded(frame, tmp_path / "run", optimizer, world)
    single, single_transformer = reference[optimizer]
    steps = EPOCHS * -(-ROWS // GLOBAL_BATCH)
    assert weights[0].shape[0] == steps
    for other in weights[1:]:
        np.testing.assert_array_equal(other, weights[0])  # after every step, to the bit
    np.testing.assert_allclose(weights[0], single[0], rtol=0, atol=2e-5)
    assert not np.allclose(weights[0][0], weights[0][-1], atol=1e-2), "nothing was learnt"
    for ours, theirs in zip(
        transformer.summary.history, single_transformer.summary.history, strict=True
    ):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_without_the_exchange_the_run_ends_after_the_first_step(frame: Any, tmp_path: Path) -> None:
    with pytest.raises(RanksDivergedError, match=r"first step.*\d+ of .* rank 1.*'seq"):
        recorded(frame, tmp_path / "run", "sgd", 2, make_model_without_exchange)


def plain_keras(run: Path) -> np.ndarray:
    """Feed Keras alone the batches of a run, in the same order; return the weights after each."""
    manifest = Manifest.from_json(next(run.glob("data/data-*/manifest.json")).read_text())
    rows = json.loads((run / "config.json").read_text())["rows"]
    assert keras_backend() == "tensorflow"
    model = make_model("sgd")
    steps = []
    for epoch in range(EPOCHS):
        plan = plan_epoch(
            [(group.rows, group.size) for group in manifest.row_groups],
            global_batch=GLOBAL_BATCH,
            seed=0,
            epoch=epoch,
            window_bytes=256 * 1024 * 1024,
        )
        seen = 0
        for batch in DatasetReader(manifest).epoch(plan, 0, 1):
            model.train_on_batch(batch.arrays["image"], batch.arrays["digit"])
            steps.append(np.concatenate([w.ravel() for w in model.get_weights()]))
            seen += len(batch.arrays["digit"])
        assert seen == rows
    return np.stack(steps)


def keras_backend() -> str:
    import keras

    return str(keras.backend.backend())


def test_one_rank_equals_plain_keras(reference: Any) -> None:
    """The reference itself."""
    weights, transformer = reference["sgd"]
    run = Path(transformer.summary.run_dir)
    assert json.loads((run / "config.json").read_text())["rows"] == ROWS
    np.testing.assert_allclose(weights[0], plain_keras(run), rtol=0, atol=1e-5)


def test_fewer_rows_in_the_last_batch_than_ranks(digits_df: Any, tmp_path: Path) -> None:
    """Four global batches and one row more: two of three ranks have none in the last step."""
    frame = digits_df.filter(f"id < {4 * GLOBAL_BATCH + 1}")
    weights, transformer = recorded(frame, tmp_path / "run", "sgd", 3)
    expected = plain_keras(Path(transformer.summary.run_dir))
    assert len(expected) == EPOCHS * 5
    last = np.abs(expected[4] - expected[3]).max()
    assert last > 1e-3, "the last step changes nothing"
    for ours in weights:
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.thorough
def test_gradients_are_sent_in_half_precision(frame: Any, reference: Any, tmp_path: Path) -> None:
    options = Allreduce(compression="fp16")
    weights, _ = recorded(frame, tmp_path / "run", "sgd", 2, sync=options)
    np.testing.assert_array_equal(weights[1], weights[0])
    exact = reference["sgd"][0][0]
    first = np.concatenate([w.ravel() for w in make_model("sgd").get_weights()])
    ours, theirs = weights[0][0] - first, exact[0] - first
    # Of a gradient's 24 bits, 11 are left: half a unit of the last is lost by either rank, and by
    # their sum.
    error = np.abs(ours - theirs)
    assert error.max() < np.abs(theirs).max() * 2**-9
    # Which single precision would not lose.
    changed = theirs != 0
    assert np.mean(error[changed] > np.abs(theirs[changed]) * 2**-18) > 0.5
    # What is lost does not add up: it is rounded, not cut off.
    np.testing.assert_allclose(weights[0], exact, rtol=0, atol=2e-3)
