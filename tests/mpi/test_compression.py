"""Gradients that are compressed between ranks, in trainings of Keras models."""

from __future__ import annotations

import os
import re
import signal
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_spark_runner import (
    Allreduce,
    AsyncServer,
    CheckpointOptions,
    DataOptions,
    DiLoCo,
    LaunchOptions,
    LocalSGD,
    ModelError,
    PowerSGD,
    RestartOptions,
    StalledError,
    Threshold,
    TopK,
)
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.data.manifest import Manifest
from horovod_spark_runner.data.read.reader import DatasetReader
from horovod_spark_runner.data.read.sharding import plan_epoch
from horovod_spark_runner.sync.codec import _counts_of, _matrix_form
from horovod_spark_runner.testing import Fault, Faults
from tests import trainings
from tests.compression import AdaptiveThreshold, GradientCompression, LowRank, Reference
from tests.runs import assert_same_weights

pytestmark = [pytest.mark.mpi, pytest.mark.spark]

# 8 global batches of 24 rows and one row more: in each epoch's last step, one rank alone has any.
ROWS, GLOBAL_BATCH, EPOCHS, STEPS = 193, 24, 2, 9
RATE = 0.1


def make_model(optimizer: Any = None) -> Any:
    import keras

    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(24, activation="tanh"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    chosen = keras.optimizers.SGD(RATE) if optimizer is None else optimizer(keras)
    model.compile(chosen, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def frame(digits_df: Any) -> Any:
    return digits_df.filter(f"id < {ROWS}")


def train(frame: Any, place: Path, compression: Any, **given: Any) -> Any:
    arguments: dict[str, Any] = {
        "model_fn": make_model,
        "batch_size": 12,
        "epochs": EPOCHS,
        "data": DataOptions(keep_data=True),
        "sync": Allreduce(compression=compression),
    }
    return trainings.train(frame, place, **{**arguments, **given})


def plain_weights(run: Path, worlds: Sequence[int], reference: Reference) -> list[np.ndarray]:
    """Train with plain Keras, on what the ranks of a run saw and what a paper makes of it.

    Args:
        run: the run's directory.
        worlds: the number of ranks in each epoch.
        reference: what the paper makes of it.
    """
    import keras
    import tensorflow as tf

    manifest = Manifest.from_json(next(run.glob("data/data-*/manifest.json")).read_text())
    model = make_model()
    for epoch, ranks in enumerate(worlds):
        if epoch and ranks != worlds[epoch - 1]:
            reference.regroup(ranks)
        plan = plan_epoch(
            [(group.rows, group.size) for group in manifest.row_groups],
            global_batch=GLOBAL_BATCH,
            seed=0,
            epoch=epoch,
            window_bytes=256 * 1024 * 1024,
        )
        parts = [DatasetReader(manifest).epoch(plan, rank, ranks) for rank in range(ranks)]
        for batches in zip(*parts, strict=True):
            rows = sum(batch.rows for batch in batches)
            terms = []
            for batch in batches:
                own = [np.zeros(w.shape, np.float32) for w in model.trainable_weights]
                if batch.rows:
                    with tf.GradientTape() as tape:
                        output = model(batch.arrays["image"], training=True)
                        losses = keras.losses.sparse_categorical_crossentropy(
                            batch.arrays["digit"], output
                        )
                        mean = tf.reduce_mean(losses)
                    variables = [w.value for w in model.trainable_weights]
                    found = tape.gradient(mean, variables)
                    own = [batch.rows / rows * np.asarray(gradient) for gradient in found]
                terms.append(own)
            for weight, total in zip(model.trainable_weights, reference.step(terms), strict=True):
                weight.assign(np.asarray(weight) - RATE * total)
    weights: list[np.ndarray] = model.get_weights()
    return weights


SHAPES = [(64, 24), (24,), (24, 10), (10,)]
FALLING = [0.05 ** (step / 4) for step in range(4)] + [0.05] * (EPOCHS * STEPS)


def low_rank() -> LowRank:
    forms = {n: form for n, shape in enumerate(SHAPES) if (form := _matrix_form(shape, 2))}
    seed = zlib.crc32(b"0.0")
    first = {
        n: np.random.default_rng([seed, n]).standard_normal((form[1], 2))
        for n, form in forms.items()
    }
    return LowRank(first)


@pytest.mark.parametrize(
    ("way", "ranks", "reference"),
    [
        (
            TopK(ratio=0.05, momentum=0.6, warmup_steps=4),
            2,
            lambda: GradientCompression(FALLING, 0.6),
        ),
        (
            Threshold(start=0.01, target_sparsity=(0.01, 0.1), momentum=0.6),
            3,
            lambda: AdaptiveThreshold(0.01, 0.01, 0.1, momentum=0.6, most=5.0),
        ),
        (PowerSGD(rank=2), 2, low_rank),
    ],
    ids=["top_k", "threshold", "power_sgd"],
)
def test_ranks_train_what_the_papers_say(
    frame: Any, tmp_path: Path, way: Any, ranks: int, reference: Callable[[], Reference]
) -> None:
    batch = GLOBAL_BATCH // ranks
    run = train(frame, tmp_path, way, num_workers=ranks, batch_size=batch)
    expected = plain_weights(tmp_path, [ranks] * EPOCHS, reference())
    for ours, theirs in zip(run.getModel().get_weights(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


@pytest.fixture(scope="module")
def plain(frame: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two ranks without any compression."""
    return train(frame, tmp_path_factory.mktemp("plain") / "run", "none")


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_entries_are_plain_allreduce(
    frame: Any, plain: Any, tmp_path: Path, ranks: int
) -> None:
    given = {"num_workers": ranks, "batch_size": GLOBAL_BATCH // ranks}
    if ranks != 2:
        plain = train(frame, tmp_path / "plain", "none", **given)
    train(frame, tmp_path / "all", TopK(ratio=1.0), **given)
    assert_same_weights(tmp_path / "all", Path(plain.summary.run_dir), atol=1e-6)


@pytest.mark.thorough
def test_half_precision_is_near_to_plain(frame: Any, plain: Any, tmp_path: Path) -> None:
    half = train(frame, tmp_path / "half", "bf16")
    assert_same_weights(tmp_path / "half", Path(plain.summary.run_dir), atol=5e-3)
    traffic = half.summary.traffic
    # Every number takes half, but for the requests and counts that go along.
    assert 0.5 < traffic["bytes_sent"] / plain.summary.traffic["bytes_sent"] < 0.53


def test_bytes_are_counted(frame: Any, tmp_path: Path) -> None:
    run = train(frame, tmp_path, TopK(ratio=0.01))
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    # With two ranks, a ring of sums sends what there is once; a place and a value are 8 bytes, a
    # message has 8 for its length, and three requests go along.
    along = 3 * 4
    steps = 2 * EPOCHS * STEPS
    whole = steps * (4 * sum(sizes) + along)
    sent = steps * (8 * sum(_counts_of(sizes, 0.01)) + 8 + along)
    assert run.summary.traffic == {"bytes_sent": sent, "bytes_uncompressed": whole}
    accounts = RunDirectory(str(tmp_path)).read_accounts(EPOCHS)
    assert sum(account["bytes_sent"] for account in accounts if account) == sent
    report = (tmp_path / "report.html").read_text()
    assert "sent between ranks" in report
    assert f"{100 * sent / whole:.3g} % " in report


@pytest.mark.thorough
def test_bytes_of_ranks_that_train_alone_are_counted(frame: Any, tmp_path: Path) -> None:
    run = train(frame, tmp_path, "none", sync=LocalSGD(every=4))
    weights = 4 * sum(int(np.prod(shape)) for shape in SHAPES)
    # Every fourth step of the run, and the ends of both epochs of nine.
    meetings = len({4, 8, 9, 12, 16, 18})
    assert run.summary.traffic == {
        "bytes_sent": 2 * meetings * (weights + 8),
        "bytes_uncompressed": 2 * EPOCHS * STEPS * weights,
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    "way",
    [TopK(ratio=0.05, momentum=0.9, warmup_steps=4), Threshold(start=0.01, momentum=0.9)],
    ids=["top_k", "threshold"],
)
def test_a_run_that_was_killed_ends_as_it_would_have(frame: Any, tmp_path: Path, way: Any) -> None:
    kept = tmp_path / "run" / "checkpoints" / "step-00000009"
    notes = tmp_path / "faults"

    def die_once() -> list[Any]:
        import keras
        from mpi4py import MPI

        faults = Faults((Fault(11, rank=1),), str(notes))

        class Dies(keras.callbacks.Callback):
            steps = 0

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.steps += 1
                while self.steps == 11 and not (kept.exists() or notes.exists()):
                    time.sleep(0.01)
                faults.after_step(self.steps, MPI.COMM_WORLD.Get_rank())

        return [Dies()]

    checkpoints = CheckpointOptions(every_steps=3, keep=9)
    restarts = RestartOptions(max_restarts=1, backoff_seconds=0.1)
    run = train(
        frame,
        tmp_path / "run",
        way,
        callbacks=die_once,
        checkpoints=checkpoints,
        restarts=restarts,
    )
    whole = train(frame, tmp_path / "whole", way, checkpoints=checkpoints)
    assert [attempt.first_step for attempt in run.summary.attempts] == [0, 9]
    assert run.summary.history == whole.summary.history
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


@pytest.mark.thorough
def test_a_run_goes_on_with_other_ranks_and_another_compression(frame: Any, tmp_path: Path) -> None:
    way = TopK(ratio=0.02)
    worlds = [3, 2, 1]
    for epoch, ranks in enumerate(worlds, start=1):
        given = {"num_workers": ranks, "batch_size": GLOBAL_BATCH // ranks}
        run = train(frame, tmp_path, way, epochs=epoch, **given)
    # A single rank sends all that three and two have left.
    shares = [0.02] * (2 * STEPS) + [1.0] * STEPS
    expected = plain_weights(tmp_path, worlds, GradientCompression(shares))
    for ours, theirs in zip(run.getModel().get_weights(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)
    again = train(frame, tmp_path, PowerSGD(), epochs=4)
    losses = [logs["loss"] for logs in again.summary.history]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4


def stop_rank_1() -> list[Any]:
    import keras
    from mpi4py import MPI

    class Stops(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == STEPS + 1 and MPI.COMM_WORLD.Get_rank() == 1:
                os.kill(os.getpid(), signal.SIGSTOP)

    return [Stops()]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sync", "waiting"),
    [
        (Allreduce(compression=TopK(ratio=0.05)), "sync/mpi.py"),
        (LocalSGD(every=8), "(agreement|local_sgd).py"),
        (AsyncServer(staleness=1), "asynchronous.py"),
    ],
    ids=["top_k", "local_sgd", "async_server"],
)
def test_a_stopped_rank_is_a_stall(frame: Any, tmp_path: Path, sync: Any, waiting: str) -> None:
    launch = LaunchOptions(stall_timeout=6)
    with pytest.raises(StalledError, match="stall_timeout=6 s") as caught:
        train(frame, tmp_path, "none", sync=sync, callbacks=stop_rank_1, launch=launch)
    # The others show where they wait; the one that was stopped is named.
    assert re.search(waiting, caught.value.stacks[0])
    assert "SIGSTOP" in caught.value.stacks[1]


def scaled(keras: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("optimizer", "way", "message"),
    [
        (scaled, TopK(ratio=0.1), r"loss.*compression=TopK\(…\)"),
        (
            lambda keras: keras.optimizers.Adam(0.1),
            TopK(ratio=0.1, momentum=0.9),
            r"\(Adam\).*momentum",
        ),
        (
            lambda keras: keras.optimizers.SGD(0.1, clipnorm=1.0),
            TopK(ratio=0.1, momentum=0.9),
            r"\(SGD\).*momentum",
        ),
    ],
    ids=["loss_scale", "adam", "clipping"],
)
def test_what_cannot_be_compressed_is_refused(
    frame: Any, tmp_path: Path, optimizer: Any, way: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        train(frame, tmp_path, way, model_fn=lambda: make_model(optimizer))


LEARNED = {
    "bf16": Allreduce(compression="bf16"),
    "top_k": Allreduce(compression=TopK(ratio=0.05, warmup_steps=40)),
    "momentum": Allreduce(compression=TopK(ratio=0.02, warmup_steps=40, momentum=0.9)),
    "threshold": Allreduce(
        compression=Threshold(
            start=0.02, target_sparsity=(0.02, 0.1), warmup_steps=40, momentum=0.9
        )
    ),
    "power_sgd": Allreduce(compression=PowerSGD(rank=2, warmup_steps=40)),
    "local_sgd": LocalSGD(every=8, warmup_steps=20),
    "diloco": DiLoCo(every=10, warmup_steps=20, outer_momentum=0.7),
    "async_server": AsyncServer(),
}


@pytest.fixture(scope="module")
def learned(digits_df: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], float]:
    """A function that trains on two thirds of the digits; returns the accuracy on the others."""
    held = digits_df.filter("id % 3 = 0")
    rest = digits_df.filter("id % 3 != 0")

    def accuracy(sync: Any) -> float:
        own = isinstance(sync, Allreduce) and bool(getattr(sync.compression, "momentum", 0.0))

        def model() -> Any:
            return make_model(lambda keras: keras.optimizers.SGD(0.1, 0.0 if own else 0.9))

        run = trainings.train(
            rest,
            tmp_path_factory.mktemp("learned") / "run",
            model_fn=model,
            validation=held,
            epochs=25,
            sync=sync,
        )
        last = [logs["val_accuracy"] for logs in run.summary.history[-5:]]
        return float(np.mean(last))

    return accuracy


@pytest.fixture(scope="module")
def plainly_learned(learned: Callable[[Any], float]) -> float:
    return learned(Allreduce())


@pytest.mark.thorough
@pytest.mark.parametrize("name", LEARNED)
def test_digits_are_learned_as_well(
    learned: Callable[[Any], float], plainly_learned: float, name: str
) -> None:
    found = learned(LEARNED[name])
    print(f"{found:.4f}, plain {plainly_learned:.4f}")
    assert plainly_learned > 0.94
    assert found > plainly_learned - 0.005
