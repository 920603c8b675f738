"""N ranks with batch B train exactly what one process trains with batch N·B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import RanksDivergedError, run_training
from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.data.reader import DatasetReader
from horovod_spark_runner.data.sharding import plan_epoch

pytestmark = [pytest.mark.mpi, pytest.mark.spark]

GLOBAL_BATCH = 24
ROWS = 331  # 13 global batches and 19 rows more
EPOCHS = 2


def make_model(optimizer: str) -> Any:
    """A small network; every initial weight is set from the seed by the caller."""
    import keras

    keras.utils.set_random_seed(3)
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


def make_model_without_exchange() -> Any:
    """Return the network, and let this rank keep its gradients to itself."""
    from horovod_spark_runner.training.exchange import GradientExchange

    GradientExchange.reduce = lambda self, gradients: list(gradients)  # type: ignore[method-assign]
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


def train(
    frame: Any, folder: Path, optimizer: str, world: int, model_fn: Any = None
) -> tuple[list[np.ndarray], Any]:
    """Train on ``world`` ranks; return the weights of each rank after every step."""
    folder.mkdir(parents=True)
    place = str(folder)
    transformer = run_training(
        frame,
        model_fn or (lambda: make_model(optimizer)),
        feature_cols=["image"],
        label_cols=["digit"],
        num_workers=world,
        batch_size=GLOBAL_BATCH // world,
        epochs=EPOCHS,
        run_dir=str(folder / "run"),
        keep_data=True,
        callbacks=lambda: recorder(place),
        verbose=False,
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
    return {name: train(frame, folder / name, name, 1) for name in ("sgd", "adam")}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_ranks_equal_one_process(
    frame: Any, reference: Any, tmp_path: Path, optimizer: str, world: int
) -> None:
    weights, transformer = train(frame, tmp_path / "run", optimizer, world)
    single, single_transformer = reference[optimizer]
    steps = EPOCHS * -(-ROWS // GLOBAL_BATCH)
    assert weights[0].shape[0] == steps
    for other in weights[1:]:
        np.testing.assert_array_equal(other, weights[0])  # after every step, to the bit
    np.testing.assert_allclose(weights[0], single[0], rtol=0, atol=2e-5)
    assert not np.allclose(weights[0][0], weights[0][-1], atol=1e-2), "nothing was learnt"
    for ours, theirs in zip(transformer.history, single_transformer.history, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_without_the_exchange_the_run_ends_after_the_first_step(frame: Any, tmp_path: Path) -> None:
    with pytest.raises(RanksDivergedError, match=r"after the first step, \d+ of .* rank 1: 'seq"):
        train(frame, tmp_path / "run", "sgd", 2, make_model_without_exchange)


def test_one_rank_equals_plain_keras(
    frame: Any, reference: Any, digits: tuple[np.ndarray, np.ndarray]
) -> None:
    """The reference itself: Keras alone, fed the same batches in the same order."""
    _, transformer = reference["sgd"]
    run = Path(transformer.run_dir)
    manifest = Manifest.from_json(next(run.glob("data/data-*/manifest.json")).read_text())
    batches = {
        (epoch, batch.step): batch.arrays
        for epoch in range(EPOCHS)
        for batch in DatasetReader(manifest).epoch(
            plan_epoch(
                [(group.rows, group.size) for group in manifest.row_groups],
                global_batch=GLOBAL_BATCH,
                seed=0,
                epoch=epoch,
                window_bytes=256 * 1024 * 1024,
            ),
            0,
            1,
        )
    }
    assert sum(len(arrays["digit"]) for arrays in batches.values()) == EPOCHS * ROWS
    import keras

    model = make_model("sgd")
    steps = []
    for key in sorted(batches):
        model.train_on_batch(batches[key]["image"], batches[key]["digit"])
        steps.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_allclose(np.stack(steps), reference["sgd"][0][0], rtol=0, atol=1e-5)
    assert keras.backend.backend() == "tensorflow"
    assert json.loads((run / "config.json").read_text())["rows"] == ROWS
