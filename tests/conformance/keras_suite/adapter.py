"""Something that looks like ``Model.fit`` and trains with this project's own training."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils

from horovod_spark_runner.checkpoint.run_directory import RunDirectory
from horovod_spark_runner.config.training import FitOptions, TrainingConfig
from horovod_spark_runner.training.loop import train
from horovod_spark_runner.training.spec import AttemptSpec, Binding, ModelSource, TrainingSpec

from .rows import NotRowsError, Part, Rows, rows_of, write_rows

SIGNATURE = inspect.signature(keras.Model.fit)


@dataclasses.dataclass
class Calls:
    """What became of the calls of ``fit`` so far.

    Attributes:
        asked: calls.
        trained: calls that our training has taken.
        refused: why others could not be told to it.
    """

    asked: int = 0
    trained: int = 0
    refused: list[str] = dataclasses.field(default_factory=list)


def make_fit(calls: Calls) -> Callable[..., Any]:
    """Return a ``fit`` that counts in ``calls``."""

    def fit(self: Any, *positional: Any, **named: Any) -> Any:
        calls.asked += 1
        model, *arguments = SIGNATURE.bind(self, *positional, **named).arguments.items()
        try:
            return _fit(model[1], calls=calls, **dict(arguments))
        except NotRowsError as error:
            calls.refused.append(str(error))
            raise

    return fit


def _fit(
    model: Any,
    *,
    calls: Calls,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
) -> Any:
    if initial_epoch:
        raise NotRowsError("initial_epoch: a run is resumed from its own checkpoints")
    if validation_batch_size not in (None, batch_size):
        raise NotRowsError("validation_batch_size: a batch has as many rows in validation")
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = array_slicing.train_validation_split(
            (x, y, sample_weight), validation_split=validation_split
        )
    needed = None if steps_per_epoch is None else steps_per_epoch * epochs
    rows = rows_of(x, y, sample_weight, needed)
    validation = None
    if validation_data is not None:
        held_out, labels, weights = data_adapter_utils.unpack_x_y_sample_weight(validation_data)
        validation = rows_of(held_out, labels, weights, validation_steps)
    settings = {
        "batch_size": batch_size or rows.batch_size or 32,
        "epochs": epochs,
        "shuffle": False,
        "class_weight": class_weight,
        "steps_per_epoch": steps_per_epoch,
        "validation_freq": validation_freq,
    }
    calls.trained += 1
    with tempfile.TemporaryDirectory() as folder, _as_model(model):
        _train(model, rows, validation, settings, callbacks, Path(folder))
    return model.history


def _train(
    model: Any,
    rows: Rows,
    validation: Rows | None,
    settings: dict[str, Any],
    callbacks: Any,
    folder: Path,
) -> None:
    directory = RunDirectory(str(folder / "run"))
    directory.location.make_folder()
    data = write_rows(rows, folder / "train")
    held_out = None if validation is None else write_rows(validation, folder / "validation")
    with directory.lease() as lease:
        train(
            TrainingSpec(
                model=ModelSource(function=lambda: model),
                inputs=_binding(rows.inputs),
                outputs=_binding(rows.labels),
                config=TrainingConfig(
                    model_fn=None,
                    sample_weight_col=next(iter(rows.weights.names), None),
                    callbacks=_callbacks(callbacks),
                    fit=FitOptions(**settings),
                ),
                train=data,
                validation=held_out,
                run_dir=str(folder / "run"),
                workers=1,
                run_id="keras-suite",
                attempt=AttemptSpec(lease_token=lease.token),
                settings={},
            )
        )


def _binding(part: Part) -> Binding:
    return Binding(slots=tuple((name,) for name in part.names), names=part.keys)


def _callbacks(given: Any) -> list[Any]:
    if isinstance(given, keras.callbacks.CallbackList):
        return list(given.callbacks)
    return [] if given is None else list(keras.tree.flatten(given))


@contextlib.contextmanager
def _as_model(model: Any) -> Iterator[None]:
    """Make a layer that is mixed with Keras' trainer a ``keras.Model`` for a while.

    Keras' tests train such; users have models.
    """
    own = type(model)
    if not isinstance(model, keras.Model):
        # The class' own methods go before those that a model would put in their place.
        methods = {name: getattr(own, name) for name in ("call", "build")}
        _set_class(model, type(own.__name__, (own, keras.Model), methods))
    try:
        yield
    finally:
        if type(model) is not own:
            _set_class(model, own)


def _set_class(model: Any, cls: type) -> None:
    object.__setattr__(model, "__class__", cls)  # Keras' own keeps track of attributes
