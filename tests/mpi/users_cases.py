"""What Keras users bring, as cases that are trained one after another in one world.

The cases and how they are trained are those of `tests.conformance`; here is what only several
ranks, or a resumed run, can show.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from mpi4py import MPI

from horovod_spark_runner import AsyncServer
from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.engines.keras.metrics import epoch_logs
from horovod_spark_runner.engines.keras.optimizers import find_optimizers, leaf_optimizers
from horovod_spark_runner.training.loop import train
from horovod_spark_runner.training.spec import AttemptSpec
from tests.conformance.case import Case
from tests.conformance.recording import recorder
from tests.conformance.steps import Adversaries, own, registered
from tests.conformance.training import TOKEN, _spec, fit, forget


def dense(optimizer: Any = "sgd", loss: Any = "mse", kind: Any = None, **more: Any) -> Any:
    """Return a small compiled network on ``x``."""
    model = own(kind or keras.Model)
    model.compile(optimizer, loss, **more)
    return model


def gradients_of(model: Any, data: Any) -> tuple[Any, list[Any]]:
    x, y = data
    with tf.GradientTape() as tape:
        loss = ops.mean((model(x, training=True)[:, 0] - y) ** 2)
    return loss, tape.gradient(loss, model.trainable_variables)


# -- optimizers in places of their own ------------------------------------------------------------


class Tools:
    """A plain object that holds what a model trains with."""

    def __init__(self, maker: Any, judge: Any) -> None:
        self.maker, self.judge = maker, judge


@registered
class HelperAdversaries(Adversaries):
    """Adversaries whose optimizers are kept by an object that Keras does not look into."""

    def compile(self, **more: Any) -> None:
        super().compile(**more)
        maker = keras.optimizers.SGD(0.05, 0.9)
        self.tools = Tools(maker, keras.optimizers.Adam(0.02))

    @property
    def pair(self) -> tuple[Any, Any]:
        return self.tools.maker, self.tools.judge


def adversaries(keep: str) -> Callable[[], Any]:
    def make() -> Any:
        model = HelperAdversaries() if keep == "helper" else Adversaries(keep)
        model.compile()
        return model

    return make


# -- steps by which ranks would part --------------------------------------------------------------


class AssignsItself(keras.Model):
    """Descends by hand, without an optimizer."""

    def train_step(self, data: Any) -> Any:
        loss, gradients = gradients_of(self, data)
        for variable, gradient in zip(self.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return {"loss": loss}


class ByAutograph(keras.Model):
    """Applies gradients under a Python condition that AutoGraph turns into one on a tensor."""

    @tf.function
    def train_step(self, data: Any) -> Any:
        loss, gradients = gradients_of(self, data)
        if loss > 0.5:
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class SumsRows(keras.Model):
    """Descends a sum over the rows."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.sum((self(x, training=True)[:, 0] - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Anneals(keras.Model):
    """Adds a sum over the rows whose factor is 0 in the first two steps."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.made = self.add_weight(name="made", trainable=False, initializer="zeros")

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            errors = (self(x, training=True)[:, 0] - y) ** 2
            factor = ops.maximum(self.made - 1.0, 0.0)
            loss = (1 - ops.minimum(factor, 1.0)) * ops.mean(errors) + factor * ops.sum(errors)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.made.assign_add(1.0)
        return {"loss": loss}


class RateOfItsOwn(keras.callbacks.Callback):
    """Sets the rate from the rank's own clock."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer.iterations > 1:
            # Never equal by chance: even on one rank, odd on the other.
            rate = 2 * (time.perf_counter_ns() % 97) + hvd.rank()
            self.model.optimizer.learning_rate = 1e-3 * rate


class AssignsOnOneRank(keras.callbacks.Callback):
    """Changes a weight on the last rank."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if hvd.rank() == 1:
            weight = self.model.layers[-1].kernel
            weight.assign(weight + 1.0)


class BeginsOnOneRank(AssignsOnOneRank):
    """Does so before the second epoch's steps only."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            super().on_epoch_end(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Leave it."""


# -- noise ----------------------------------------------------------------------------------------


class Noisy(keras.Model):
    """Notes what it draws in its steps, compiled as they are."""

    def train_step(self, data: Any) -> Any:
        drawn = ops.stack([keras.random.normal(()), tf.random.normal(())])
        if not tf.executing_eagerly():  # as where a step is tried
            tf.numpy_function(_note, [drawn], [])
        return super().train_step(data)


DRAWN: list[list[float]] = []


def _note(values: np.ndarray) -> None:
    DRAWN.append([float(value) for value in values])


class WritesNoise(keras.callbacks.Callback):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_begin(self, logs: Any = None) -> None:
        DRAWN.clear()

    def on_train_end(self, logs: Any = None) -> None:
        (self.folder / "noise.json").write_text(json.dumps(DRAWN))


# -- rates ----------------------------------------------------------------------------------------


class Rates(keras.callbacks.Callback):
    """Writes the rates of all optimizers at each step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.rates: list[list[float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        found = leaf_optimizers(find_optimizers(self.model))
        self.rates.append([float(optimizer.learning_rate) for optimizer in found])

    def on_train_end(self, logs: Any = None) -> None:
        (self.folder / "rates.json").write_text(json.dumps(self.rates))


def multi() -> Any:
    model = own(keras.Model)
    by_path = {".*bias": keras.optimizers.SGD(0.03, 0.9)}
    chosen = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.01), by_path)
    model.compile(keras.optimizers.MultiOptimizer(chosen), "mse")
    return model


def two_rates() -> Any:
    model = Adversaries("dict")
    model.compile()
    return model


# -- callbacks ------------------------------------------------------------------------------------


class Bomb(keras.callbacks.Callback):
    """Fails at the begin of the second epoch, once."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.mark = folder / f"struck-{hvd.rank()}"

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1 and not self.mark.exists():
            self.mark.touch()
            raise ValueError("struck")


def backed_up(folder: Path) -> list[Any]:
    place = folder.parent.parent
    return [keras.callbacks.BackupAndRestore(place / "backup"), Bomb(place)]


class Summarizes(layers.Layer):
    """Writes a summary of what passes through it."""

    def call(self, inputs: Any) -> Any:
        tf.summary.scalar("what passes through", ops.mean(inputs))
        return inputs


def summarizing() -> Any:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(Summarizes()(inputs)))
    model.compile("sgd", "mse")
    return model


def synchronized() -> Any:
    inputs = keras.Input((4,))
    hidden = layers.BatchNormalization(synchronized=True)(layers.Dense(6)(inputs))
    model = keras.Model(inputs, layers.Dense(1)(ops.tanh(hidden)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


class DenseTable(layers.Embedding):
    """An embedding whose gradient is that of all its rows, not slices of those that are used."""

    def call(self, inputs: Any) -> Any:
        return ops.take(self.embeddings * 1.0, inputs, axis=0)


def embedded(optimizer: Any, table: Any = layers.Embedding) -> Any:
    """Return a network on tokens, some of which are several times in a batch."""
    inputs = keras.Input((6,), dtype="int32")
    hidden = layers.Flatten()(table(10, 4)(inputs))
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    model.compile(optimizer(), "mse")
    return model


EMBEDDING_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: keras.optimizers.Adam(0.05),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.05),
}


def with_moments() -> Any:
    return dense(keras.optimizers.Adam(0.02), metrics=["mae"])


Spread = Callable[[Path], list[Any]]


def linear(model: Callable[[], Any], extra: Spread, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "callbacks": lambda folder: [*extra(folder), Rates(folder)],
        "options": {"lr_scaling": "linear", **more},
        "epochs": 3,
    }


def halving(folder: Path) -> list[Any]:
    return [keras.callbacks.LearningRateScheduler(lambda epoch: 0.04 / 2**epoch)]


def plain(name: str, model: Callable[[], Any], **more: Any) -> Case:
    """Return a case without validation data, which show nothing of it."""
    return Case(name, model, validation=False, **more)


CASES = {
    case.name: case
    for case in [
        *(
            plain(f"optimizers-{keep}", adversaries(keep), y="y2")
            for keep in ("dict", "list", "sub-models", "helper")
        ),
        plain("assigns-itself", lambda: dense(kind=AssignsItself)),
        plain("by-autograph", lambda: dense(kind=ByAutograph)),
        plain("sums-rows", lambda: dense(kind=SumsRows)),
        plain("anneals", lambda: dense("adam", kind=Anneals)),
        plain("rate-of-its-own", dense, callbacks=lambda folder: [RateOfItsOwn()]),
        plain("assigns-on-one-rank", dense, callbacks=lambda folder: [AssignsOnOneRank()]),
        plain("noise", lambda: dense(kind=Noisy), callbacks=lambda folder: [WritesNoise(folder)]),
        Case("synchronized", synchronized),
        *(
            plain(f"embedding-{name}", functools.partial(embedded, make), x="tokens")
            for name, make in EMBEDDING_OPTIMIZERS.items()
        ),
        plain("rate-scheduled", **linear(dense, halving)),
        plain("rates-of-two", y="y2", **linear(two_rates, lambda folder: [])),
        Case("rates-of-multi", **linear(multi, lambda folder: [], warmup_epochs=1.0)),
        plain("backup", with_moments, callbacks=backed_up, epochs=3),
        plain("backup-again", with_moments, callbacks=backed_up, epochs=3),
        plain(
            "summaries",
            summarizing,
            callbacks=lambda folder: [keras.callbacks.TensorBoard(folder / "logs", update_freq=1)],
        ),
    ]
}

# Cases that are trained for an epoch, and then resumed.
RESUMED = [
    "optimizers-dict",
    "optimizers-helper",
    "rates-of-multi",
]


def train_all(data: str, folder: str) -> dict[str, Any]:
    """Train all cases on this rank of the world; return what came of each."""
    hvd.init()
    rank = hvd.rank()
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        place = Path(folder, name.removesuffix("-again"))
        files = place / name / f"files-{rank}"
        files.mkdir(parents=True)
        found[name] = _trained(case, Path(data), place / f"run-{name}", files)
        notes = {p.name: json.loads(p.read_text()) for p in files.glob("*.json")}
        events = [p.read_bytes() for p in files.rglob("events*") if p.parent.name == "train"]
        found[name] |= {**notes, "events": events}
    for name in RESUMED:
        found[f"{name} resumed"] = _in_two_parts(CASES[name], Path(data), Path(folder, name))
    found["another share"] = _another_share(Path(data), Path(folder, "share"))
    parting = plain("begins-on-one-rank", dense, callbacks=lambda folder: [BeginsOnOneRank()])
    place = Path(folder, parting.name)
    found[parting.name] = _trained(parting, Path(data), place, place, sync=AsyncServer())
    found["logs"] = _logs_of_unequal_steps()
    for name, make in EMBEDDING_OPTIMIZERS.items():
        of_dense = functools.partial(embedded, make, DenseTable)
        case = replace(CASES[f"embedding-{name}"], model=of_dense)
        forget()
        alone = fit(case, Path(data), Path(folder, f"dense-{name}-{rank}"))
        found[f"dense-{name}"] = {"error": alone.error, "weights": list(alone.weights.values())}
    return found


def _trained(
    case: Case,
    data: Path,
    run_dir: Path,
    files: Path,
    options: Any = None,
    sync: Any = None,
    **changes: Any,
) -> dict[str, Any]:
    """Train a case, and return what came of it on this rank."""
    noted, made = recorder(), []

    def model() -> Any:
        made.append(case.model())
        return made[-1]

    forget()
    if hvd.rank() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "lock.json").write_text(json.dumps({"token": TOKEN}))
    spec = _spec(case, data, run_dir, hvd.size(), model)
    config = spec.config if sync is None else replace(spec.config, sync=sync)
    config = replace(config, fit=replace(spec.fit, **(options or {})))
    spec = replace(spec, **changes, config=config)
    spec.config.callbacks.extend([*case.callbacks(files), noted])
    found: dict[str, Any] = {"error": "", "history": []}
    try:
        found["history"] = train(spec).history
    except Exception as error:  # what a case raises is what came of it
        found["error"] = f"{type(error).__name__}: {error}"
    # No rank goes on to the next case before all are through with this one.
    MPI.COMM_WORLD.Barrier()
    optimizers = find_optimizers(made[0], _of_helper(made[0]))
    weights = [*made[0].weights, *(v for each in optimizers for v in each.variables)]
    return {**found, "weights": [np.array(v) for v in weights], "calls": noted.calls}


def _of_helper(model: Any) -> list[Any]:
    return list(vars(model.tools).values()) if hasattr(model, "tools") else []


def _in_two_parts(case: Case, data: Path, folder: Path) -> dict[str, Any]:
    """Train a case in two parts."""
    files, run_dir = folder / f"files-{hvd.rank()}", folder / "parts"
    files.mkdir(parents=True, exist_ok=True)
    _trained(case, data, run_dir, files, options={"epochs": 1})
    checkpoint = RunDirectory(str(run_dir)).checkpoint_steps()[0]
    return _trained(case, data, run_dir, files, attempt=AttemptSpec(checkpoint, TOKEN))


def _another_share(data: Path, folder: Path) -> dict[str, Any]:
    """Train as a world of three does that was restarted with fewer ranks: 15 rows a step."""
    case = Case("another-share", with_moments)
    return _trained(case, data, folder, folder, workers=3, options={"batch_size": 5})


def _logs_of_unequal_steps() -> dict[str, Any]:
    """Return the logs of an epoch whose last step had 3 rows on rank 0 and 1 on each other."""
    model = dense(kind=SumsRows)
    rank, size = hvd.rank(), hvd.size()
    fraction = (3 if rank == 0 else 1) / (3 + size - 1)
    return epoch_logs(model, {"own": tf.constant(float(rank + 1))}, {"own"}, fraction)
