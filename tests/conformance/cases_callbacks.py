"""Cases: every callback that Keras ships, and what users' own ones do."""

# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from keras import callbacks, optimizers

from .case import Case
from .models import compiled, dense

ROUND = "Adam divides by the size of gradients, so that rounding shows where they are near 0"


class Own(callbacks.Callback):
    """What a user's callback does at one hook."""

    def __init__(self, **hooks: Callable[..., None]) -> None:
        super().__init__()
        for name, hook in hooks.items():
            setattr(self, name, self._bound(hook))

    def _bound(self, hook: Callable[..., None]) -> Callable[..., None]:
        return lambda *given, **more: hook(self, *given, **more)


def rate_from_loss(own: Any, batch: int, logs: Any = None) -> None:
    """Set the learning rate from the loss that the callback is shown."""
    own.model.optimizer.learning_rate = 0.05 / (1.0 + float(logs["loss"]))


def stop_on_loss(own: Any, batch: int, logs: Any = None) -> None:
    """Stop within the second epoch, by the loss that the callback is shown."""
    own.seen = getattr(own, "seen", 0) + 1
    if own.seen == 6 and logs["loss"] > 0:
        own.model.stop_training = True


def add_to_logs(own: Any, epoch: int, logs: Any = None) -> None:
    """Add a number to the logs, as Keras' schedulers do."""
    logs["steps"] = own.params["steps"]


def add_to_batch_logs(own: Any, batch: int, logs: Any = None) -> None:
    """Add a number to the logs of a batch."""
    logs["tenth"] = logs["loss"] / 10


def shift_weights(own: Any, logs: Any = None) -> None:
    """Change a weight before training."""
    own.model.layers[-1].bias.assign(own.model.layers[-1].bias + 1.0)


def stop_early(own: Any, epoch: int, logs: Any = None) -> None:
    """Stop after the first epoch."""
    own.model.stop_training = True


def freeze(own: Any, epoch: int, logs: Any = None) -> None:
    """Set a rate of 0 from the second epoch on."""
    own.model.optimizer.learning_rate.assign(0.1 if epoch == 0 else 0.0)


def predict(own: Any, epoch: int, logs: Any = None) -> None:
    """Predict within training."""
    logs["one"] = float(own.model.predict(keras.ops.ones((1, 4)), verbose=0)[0, 0])


def check_params(own: Any, logs: Any = None) -> None:
    """Fail if the parameters that Keras promises lack."""
    assert {"epochs", "steps", "verbose"} <= set(own.params), own.params


def orders(*names: str) -> list[Any]:
    """Return callbacks of which each is to see what those before it have added."""
    return [
        Own(on_epoch_end=lambda own, epoch, logs=None, name=name: logs.update({name: len(logs)}))
        for name in names
    ]


def early(**options: Any) -> Callable[[Path], list[Any]]:
    """Return early stopping that is patient for no epoch."""
    options = {"monitor": "val_loss", "patience": 0, "mode": "max", **options}
    return lambda folder: [callbacks.EarlyStopping(**options)]


def checkpoints(name: str, **options: Any) -> Callable[[Path], list[Any]]:
    """Return checkpoints in the case's folder."""
    return lambda folder: [callbacks.ModelCheckpoint(folder / name, **options)]


def one(make: Callable[[], Any]) -> Callable[[Path], list[Any]]:
    """Return a list of one callback that writes no files."""
    return lambda folder: [make()]


# fmt: off
OF_CALLBACKS = [
    Case("csv-logger", lambda: compiled(dense(), metrics=["mae"]), callbacks=lambda folder: [callbacks.CSVLogger(folder / "log.csv")], shows=("callbacks.CSVLogger",)),
    Case("early-stopping", lambda: compiled(dense()), callbacks=early(), epochs=4, shows=("callbacks.EarlyStopping",)),
    Case("early-stopping-best-weights", lambda: compiled(dense()), callbacks=early(restore_best_weights=True), epochs=4),
    Case("early-stopping-on-train-metric", lambda: compiled(dense(), metrics=["mae"]), callbacks=early(monitor="mae"), epochs=4),
    Case("model-checkpoint", lambda: compiled(dense()), callbacks=checkpoints("{epoch}-{val_loss:.2f}.keras"), shows=("callbacks.ModelCheckpoint",)),
    Case("model-checkpoint-best", lambda: compiled(dense()), callbacks=checkpoints("best.keras", save_best_only=True, monitor="val_loss")),
    Case("model-checkpoint-weights-by-steps", lambda: compiled(dense()), callbacks=checkpoints("{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=3)),
    Case("backup-and-restore", lambda: compiled(dense()), callbacks=lambda folder: [callbacks.BackupAndRestore(folder / "backup")], shows=("callbacks.BackupAndRestore",)),
    Case("orbax-checkpoint", lambda: compiled(dense()), callbacks=lambda folder: [callbacks.OrbaxCheckpoint(folder / "orbax")], refused="orbax", shows=("callbacks.OrbaxCheckpoint",), note="needs the package orbax-checkpoint, and JAX"),
    Case("learning-rate-scheduler", lambda: compiled(dense()), callbacks=one(lambda: callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)), shows=("callbacks.LearningRateScheduler",)),
    Case("reduce-on-plateau", lambda: compiled(dense()), callbacks=one(lambda: callbacks.ReduceLROnPlateau("val_loss", 0.5, patience=0, mode="max", min_delta=10.0)), epochs=4, shows=("callbacks.ReduceLROnPlateau",)),
    Case("terminate-on-nan", lambda: compiled(dense(), optimizers.SGD(1e38)), callbacks=one(callbacks.TerminateOnNaN), two=None, why="the weights overflow", shows=("callbacks.TerminateOnNaN",)),
    Case("tensorboard", lambda: compiled(dense()), callbacks=lambda folder: [callbacks.TensorBoard(str(folder / "board"), histogram_freq=1, write_graph=False)], shows=("callbacks.TensorBoard",), note="needs the package tensorboard"),
    Case("tensorboard-by-batch", lambda: compiled(dense()), callbacks=lambda folder: [callbacks.TensorBoard(str(folder / "board"), update_freq="batch")]),
    Case("remote-monitor", lambda: compiled(dense()), callbacks=one(lambda: callbacks.RemoteMonitor("http://127.0.0.1:9")), shows=("callbacks.RemoteMonitor",), note="nobody listens; Keras warns"),
    Case("swap-ema-weights", lambda: compiled(dense(), optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)), callbacks=one(callbacks.SwapEMAWeights), shows=("callbacks.SwapEMAWeights",)),
    Case("swap-ema-weights-each-epoch", lambda: compiled(dense(), optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5)), callbacks=one(lambda: callbacks.SwapEMAWeights(swap_on_epoch=True)), two=1e-4, why=ROUND),
    Case("progbar-logger", lambda: compiled(dense()), callbacks=one(callbacks.ProgbarLogger), shows=("callbacks.ProgbarLogger",)),
    Case("history", lambda: compiled(dense()), callbacks=one(callbacks.History), shows=("callbacks.History",)),
    Case("lambda-callback", lambda: compiled(dense()), callbacks=one(lambda: callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(twice=2 * logs["loss"]))), shows=("callbacks.LambdaCallback",)),
    Case("callback-list", lambda: compiled(dense()), callbacks=lambda folder: [callbacks.CallbackList([callbacks.TerminateOnNaN()])], shows=("callbacks.CallbackList",)),
    Case("own-rate-from-loss", lambda: compiled(dense()), callbacks=one(lambda: Own(on_train_batch_end=rate_from_loss)), shows=("callbacks.Callback",), note="all ranks are shown the same loss"),
    Case("own-stops-on-loss", lambda: compiled(dense()), callbacks=one(lambda: Own(on_train_batch_end=stop_on_loss)), epochs=4),
    Case("own-stops-at-epoch-end", lambda: compiled(dense()), callbacks=one(lambda: Own(on_epoch_end=stop_early)), epochs=4),
    Case("own-stops-at-epoch-begin", lambda: compiled(dense()), callbacks=one(lambda: Own(on_epoch_begin=stop_early)), epochs=4),
    Case("own-adds-to-logs", lambda: compiled(dense()), callbacks=one(lambda: Own(on_epoch_end=add_to_logs))),
    Case("own-adds-to-batch-logs", lambda: compiled(dense()), callbacks=one(lambda: Own(on_train_batch_end=add_to_batch_logs))),
    Case("own-shifts-weights", lambda: compiled(dense()), callbacks=one(lambda: Own(on_train_begin=shift_weights))),
    Case("own-sets-rate", lambda: compiled(dense()), callbacks=one(lambda: Own(on_epoch_begin=freeze))),
    Case("own-predicts", lambda: compiled(dense()), callbacks=one(lambda: Own(on_epoch_end=predict))),
    Case("own-checks-params", lambda: compiled(dense()), callbacks=one(lambda: Own(on_train_begin=check_params))),
    Case("stop-before-executions", lambda: compiled(dense(), steps_per_execution=3), callbacks=one(lambda: Own(on_epoch_begin=stop_early, on_train_batch_end=add_to_batch_logs)), epochs=3, note="Keras ends the execution that it has begun"),
    Case("several-in-order", lambda: compiled(dense()), callbacks=lambda folder: orders("first", "second", "third")),
    Case("several-of-keras", lambda: compiled(dense(), metrics=["mae"]), callbacks=lambda folder: [callbacks.CSVLogger(folder / "a.csv"), *early(patience=1)(folder), *checkpoints("last.keras")(folder), callbacks.ReduceLROnPlateau(patience=0), callbacks.CSVLogger(folder / "b.csv")], epochs=3),

]
# fmt: on
