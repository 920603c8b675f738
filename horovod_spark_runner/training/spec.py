"""The training as sent to the ranks, the function they call, and the report they return.

Loads no framework.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.attachments import Attachable
from ..checkpoint.files import LogValue
from ..checkpoint.run_directory import RunDirectory
from ..config.importable import explain_misfit
from ..config.training import FitOptions, TrainingConfig
from ..config.validators import ColumnNames, check_columns
from ..data.manifest import Manifest
from ..data.read.sharding import epoch_steps
from ..errors import DataError, InvalidInputError, ModelError, brief
from ..frameworks import KERAS
from ..storage.arrays import Arrays
from ..typed_json import JsonObject

# Spark ML's default names of the feature and label columns.
FEATURES = "features"
LABEL = "label"


@dataclass(frozen=True)
class TrainingSteps:
    """Steps of a training, all ranks together: the same numbers on every rank.

    Attributes:
        per_epoch: steps of an epoch.
        total: steps of all epochs.
    """

    per_epoch: int
    total: int


_provided: TrainingSteps | None = None


def training_steps() -> TrainingSteps:
    """Return the number of steps of the training, for ``model_fn`` and objects it creates.

    For learning rate schedules whose length is the training's, such as Keras' ``CosineDecay`` and
    PyTorch's ``OneCycleLR``. It counts batches from the first epoch to the last, also where the run
    was resumed. Where the model is built without a training, to predict, both numbers are 1.

    Raises:
        InvalidInputError: it is called elsewhere, as on the driver.
    """
    if _provided is None:
        raise InvalidInputError(
            "training_steps() is called outside a training: call it in model_fn, or in a function "
            "that model_fn passes on, such as TorchModel(scheduler=…); it is known on the ranks"
        )
    return _provided


@contextlib.contextmanager
def provide_steps(steps: TrainingSteps | None = None) -> Iterator[None]:
    """Provide ``steps`` to `training_steps`; by default 1, unless a training provides them."""
    global _provided
    before = _provided
    _provided = steps or before or TrainingSteps(1, 1)
    try:
        yield
    finally:
        _provided = before


@dataclass(frozen=True)
class ModelSource:
    """Source of the model: a function, or a file.

    Attributes:
        function: returns the model, a compiled ``keras.Model``, say.
        file: what the engine has read of a file.
        custom_objects: classes and functions by the name the file calls them.
        engine: dotted name of the module whose engine makes and trains it.
    """

    function: Callable[[], object] | None = None
    file: Attachable | str | None = field(default=None, repr=False)
    custom_objects: Mapping[str, object] = field(default_factory=dict)
    engine: str = KERAS

    def call_function(self) -> object:
        """Call `function`, also outside a training."""
        assert self.function is not None
        with provide_steps():
            return self.function()


def check_objects(custom_objects: object) -> dict[str, object]:
    """Return ``custom_objects`` as a dictionary.

    Raises:
        InvalidInputError: it is no dictionary by name.
    """
    if custom_objects is None:
        return {}
    if not isinstance(custom_objects, Mapping) or not all(
        isinstance(name, str) for name in custom_objects
    ):
        raise InvalidInputError(
            "custom_objects must be a dictionary from names to classes and functions, such as "
            f"{{'MyLayer': MyLayer}}, got {brief(custom_objects)}"
        )
    return dict(custom_objects)


def check_model_fn(function: Callable[..., Any]) -> None:
    """Check that ``model_fn`` can be called without arguments.

    Raises:
        ModelError: the function needs arguments.
    """
    wrong = explain_misfit(function)
    if wrong:
        raise ModelError(
            f"model_fn is called without arguments, but {wrong}; give them defaults, or "
            "functools.partial(model_fn, …)"
        )


@dataclass(frozen=True)
class Binding:
    """Binding of columns to the model's inputs, or to the outputs they are compared with.

    Attributes:
        slots: the columns of each input or output, in the order given. Several are joined along
            their last axis; an output without any has no label. One column may stand in several.
            One by itself may be given as its name.
        names: names of the model's inputs or outputs, in the same order, if given.
    """

    slots: tuple[tuple[str, ...], ...]
    names: tuple[str, ...] | None = None

    def __init__(
        self, slots: Iterable[str | Iterable[str]], names: tuple[str, ...] | None = None
    ) -> None:
        each = tuple((slot,) if isinstance(slot, str) else tuple(slot) for slot in slots)
        object.__setattr__(self, "slots", each)
        object.__setattr__(self, "names", names)

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns, each once."""
        return tuple(dict.fromkeys(name for slot in self.slots for name in slot))

    def describe(self) -> list[str]:
        """Return the columns of each slot, for messages."""
        return [" + ".join(slot) or "nothing" for slot in self.slots]


def bind_columns(columns: ColumnNames | None, title: str) -> Binding:
    """Return the binding of ``feature_cols`` or ``label_cols`` (``title``).

    Raises:
        InvalidInputError: it is neither a list nor a dictionary of columns.
        DataError: it names a column twice.
    """
    if columns is None and title == "label_cols":
        return Binding(())
    plain = check_columns(title, columns, may_lack=title == "label_cols")
    names = tuple(plain) if isinstance(plain, Mapping) else None
    entries = plain.values() if isinstance(plain, Mapping) else plain
    slots = tuple(() if one is None else one for one in entries)
    binding = Binding(slots, names)
    if title == "feature_cols" and names is None:
        flat = [name for slot in binding.slots for name in slot]
        twice = sorted({name for name in flat if flat.count(name) > 1})
        if twice:
            raise DataError(f"feature_cols names {', '.join(map(repr, twice))} more than once")
    return binding


@dataclass(frozen=True)
class ModelNames:
    """Names of a model's inputs and outputs, before any column is bound to them.

    Attributes:
        inputs: the names of all its inputs, once for each way to call them (by their layers, by
            the keys of a dictionary); empty if it has none before it is given data.
        outputs: those of its outputs, likewise.
        needs_labels: whether it has a loss that surely compares outputs with labels.
    """

    inputs: tuple[tuple[str, ...], ...] = ()
    outputs: tuple[tuple[str, ...], ...] = ()
    needs_labels: bool = False


@dataclass(frozen=True)
class WarmStart:
    """Weights to begin with, as the driver read them.

    Attributes:
        origin: where they come from, for messages.
        kind: ``"arrays"`` (an ``.npz`` of a run), or one of the engine's formats.
        files: contents by path.
        paths: paths of the weights in an ``.npz``, in its order; empty if they are not known.
        skip_mismatch: whether to take over only what is there and fits.
    """

    origin: str
    kind: str
    files: Mapping[str, Attachable] = field(repr=False)
    paths: tuple[str, ...] = field(default=(), repr=False)
    skip_mismatch: bool = False


@dataclass(frozen=True)
class AttemptSpec:
    """Settings of one attempt of a training.

    Attributes:
        checkpoint: steps of the checkpoint to resume from; one before it if that is damaged.
        lease_token: token of the run directory's lease, without which the attempt does not write.
    """

    checkpoint: int | None = None
    lease_token: str = ""


@dataclass(frozen=True)
class TrainingSpec:
    """One training, as every rank needs to know it.

    Attributes:
        config: its configuration, see `TrainingConfig.for_ranks`; a resumed run keeps some of the
            original ``fit``.
        model: where the model comes from.
        inputs: the model's inputs.
        outputs: what its outputs are compared with.
        train: the training data.
        validation: the validation data.
        run_dir: path or URL of the run directory.
        run_id: identity of the run.
        workers: ranks of the run; a restart may have fewer. Global batch and learning rate follow
            from this number.
        settings: what to record in checkpoints.
        warm_start: weights to begin with where there is no checkpoint.
        attempt: what differs from attempt to attempt.
        sample: a few rows of all columns; the ranks read them.
    """

    config: TrainingConfig
    model: ModelSource
    inputs: Binding
    outputs: Binding
    train: Manifest
    validation: Manifest | None
    run_dir: str
    run_id: str
    workers: int
    settings: JsonObject
    warm_start: WarmStart | None = None
    attempt: AttemptSpec = AttemptSpec()
    sample: Arrays | None = field(default=None, repr=False)

    @property
    def engine(self) -> str:
        """Dotted name of the module whose engine trains."""
        return self.model.engine

    @property
    def fit(self) -> FitOptions:
        """Batch size, epochs and the other options of fitting the model."""
        return self.config.fit

    @property
    def directory(self) -> RunDirectory:
        """The run directory, as this attempt writes it."""
        return RunDirectory(self.run_dir, self.attempt.lease_token)

    def has_all_results(self, epoch: int) -> bool:
        """Return whether the epoch of this number, from 0, gives the results of a validation."""
        return self.validation is None or self.fit.validates(epoch)

    @property
    def weight_col(self) -> str | None:
        """Column of the rows' weights."""
        return self.config.sample_weight_col

    @property
    def columns(self) -> list[str]:
        """The columns that rows are read of: features, labels and weights, each once."""
        weight = () if self.weight_col is None else (self.weight_col,)
        return list(dict.fromkeys([*self.inputs.columns, *self.outputs.columns, *weight]))

    @property
    def global_batch(self) -> int:
        """Rows of a global batch."""
        return self.fit.batch_size * self.workers

    @property
    def steps(self) -> TrainingSteps:
        """Steps of the training."""
        per_epoch = self.fit.steps_per_epoch or epoch_steps(self.train.rows, self.global_batch)
        return TrainingSteps(per_epoch, per_epoch * self.fit.epochs)

    @property
    def order(self) -> dict[str, object]:
        """Settings that determine the order of samples, besides the data."""
        settings = self.fit.order_settings(self.workers, self.config.data.window_bytes)
        return {**settings, "row_order": self.train.row_order}


@dataclass(frozen=True)
class OutputSpec:
    """One output of a trained model.

    Attributes:
        name: its name.
        shape: shape of one row's value; ``None`` for a size that may vary.
        dtype: name of the type that it is computed in: NumPy's, ``"bfloat16"`` or ``"string"``.
        path: keys and indices that lead to it in what the model returns.
        activation: the last thing done to it, such as ``"softmax"``, or ``"linear"`` for nothing;
            ``""`` if that is not known.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    path: tuple[str | int, ...] = ()
    activation: str = ""


@dataclass(frozen=True)
class TrainingReport:
    """A rank's report of a finished training.

    Attributes:
        history: metrics of every epoch of the run, earlier parts included.
        samples_per_second: rows of all ranks over the time spent in training steps.
        train_seconds: time spent in training steps.
        preempted_at: step of the checkpoint saved because a rank was asked to end; ``None`` for
            a training that came to its end.
        saved: how to make the trained model again, as its engine says; only rank 0 knows.
        timings: seconds of rank 0 per phase, one after the other: ``build`` (of the model, and
            whatever comes before the first step), ``epochs``, ``save``. Of ``epochs``, by what it
            was spent on: see `horovod_spark_runner.training.time_breakdown`.
        accounts: where the time of all ranks went, as
            `horovod_spark_runner.training.time_breakdown.record` tells it; only rank 0 knows.
        staleness: how many updates of the weights came 0, 1, … updates of other ranks after these
            had been taken; empty where ranks do not step by themselves.
        final: metrics of the validation rows, of the model as it was saved, if that was asked for
            and the training's end has changed it after the last epoch; nothing without such rows.
        weights: description of the epoch that the saved weights are of.
    """

    history: list[dict[str, LogValue]]
    samples_per_second: float
    train_seconds: float
    preempted_at: int | None = None
    saved: Any = None
    timings: dict[str, float] = field(default_factory=dict)
    accounts: JsonObject = field(default_factory=dict)
    staleness: list[int] = field(default_factory=list)
    final: dict[str, LogValue] | None = None
    weights: str = ""


def train_rank(spec: TrainingSpec) -> TrainingReport:
    """Train on this rank; see `horovod_spark_runner.training.loop`.

    Raises:
        HorovodSparkError: of the kinds that `horovod_spark_runner.training.loop.train` names.
    """
    began = time.perf_counter()
    from .loop import train

    return train(spec, began=began)


def try_and_train_rank(spec: TrainingSpec) -> TrainingReport:
    """Train on this rank, as `train_rank`; rank 0 has a side process, which tries the step.

    Raises:
        HorovodSparkError: see `train_rank`.
    """
    return train_rank(spec)


try_and_train_rank.needs_side_process = True  # type: ignore[attr-defined]
