"""Configuration of one training: `TrainingConfig`, and options of fitting and checkpoints."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args

from ..errors import InvalidInputError, brief
from .data import DataOptions
from .fields import Settings, derive, from_table, required, setting
from .keywords import usage_within
from .launch import LaunchOptions, LaunchSettings
from .prediction import PredictionCol, check_prediction_col
from .sync import STRATEGIES, Allreduce, Sync, check_sync
from .validators import (
    FLAG,
    SECONDS,
    TEXT,
    TEXT_MAP,
    ColumnNames,
    Kind,
    check_choice,
    check_count,
    check_options,
    check_place,
    choice,
    count,
    number,
    number_above_zero,
    optional,
)

BestMode = Literal["min", "max"]
LrScaling = Literal["none", "linear", "sqrt"]
OnCheckpointError = Literal["raise", "warn"]
# An integer as JSON writes it.
_WHOLE = re.compile("-?[0-9]+")


def _check_validation_freq(name: str, value: object) -> int | tuple[int, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(check_count(name, one) for one in value)
    return check_count(name, value)


def _check_class_weight(name: str, weights: object) -> dict[int, float]:
    if isinstance(weights, Mapping):  # the keys of JSON are text
        weights = {
            int(label) if isinstance(label, str) and _WHOLE.fullmatch(label) else label: weight
            for label, weight in weights.items()
        }
    if not isinstance(weights, Mapping) or not all(
        isinstance(label, Integral)  # also True and False, as of labels that are those
        and isinstance(weight, Real)
        and math.isfinite(weight)
        and float(weight) >= 0
        for label, weight in weights.items()
    ):
        raise InvalidInputError(
            f"{name} must map classes (integers) to weights of at least 0, such as "
            f"{{0: 1.0, 1: 5.0}}, got {brief(weights)}"
        )
    return {int(label): float(weight) for label, weight in weights.items()}


def _check_metric(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidInputError(f"{name} must be the name of a metric, got {brief(value)}")
    return value


def _check_profile_steps(name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise InvalidInputError(
            f"{name} must be two numbers, the first step and the last, such as (100, 110), got "
            f"{brief(value)}"
        )
    first, last = (check_count(name, step) for step in value)
    if last < first:
        raise InvalidInputError(f"{name} must not end before it begins, got {brief(value)}")
    return first, last


def _check_weights(name: str, value: object) -> str | os.PathLike[str]:
    if not isinstance(value, (str, os.PathLike)) or value == "":
        raise InvalidInputError(
            "initial_weights must be the path or URL of a run, a file of weights or a SavedModel, "
            f"got {brief(value)}"
        )
    return value


_EPOCH_NUMBERS: Kind[int | Sequence[int]] = Kind(
    "integer, at least 1, or a list of some", _check_validation_freq
)
_PROFILE_STEPS: Kind[Sequence[int]] = Kind("two integers, at least 1", _check_profile_steps)
_CLASS_WEIGHTS: Kind[Mapping[int, float]] = Kind(
    "dictionary from integers to weights of at least 0", _check_class_weight
)
_METRIC: Kind[str] = Kind("name of a metric", _check_metric, "toString", str)
_WEIGHTS: Kind[str | os.PathLike[str]] = Kind("path or URL", _check_weights, "toString", str)


@from_table
@dataclass(frozen=True, kw_only=True)
class FitOptions(Settings):
    """Options of fitting a model."""

    batch_size: int = setting(
        32,
        count(),
        "rows per rank and step (32); a global batch is ``num_workers`` times as large.",
    )
    epochs: int = setting(
        1,
        count(),
        "total epochs of the run (1); a resumed run trains the remaining ones.",
    )
    steps_per_epoch: int | None = setting(
        None,
        optional(count()),
        "steps of an epoch; the next one continues in the data where it ended. By default, an "
        "epoch is all rows once.",
    )
    validation_freq: int | Sequence[int] = setting(
        1,
        _EPOCH_NUMBERS,
        "validate after every so many epochs (1), or after those of these numbers, counted from 1.",
    )
    class_weight: Mapping[int, float] | None = setting(
        None,
        optional(_CLASS_WEIGHTS),
        "weights of the classes in the loss, such as ``{0: 1.0, 1: 5.0}``; 1 for others. For a "
        "model with one output, and not beside ``sample_weight_col``.",
    )
    seed: int = setting(
        0, count(0), "seed of the order of rows, the split and the model's initial weights (0)."
    )
    shuffle: bool = setting(True, FLAG, "shuffle the rows anew every epoch (default).")
    lr_scaling: LrScaling = setting(
        "none",
        choice(*get_args(LrScaling)),
        '``"linear"`` multiplies the learning rate by the number of ranks, ``"sqrt"`` by its root; '
        '``"none"`` (default).',
    )
    warmup_epochs: float = setting(
        0.0,
        number(),
        "epochs over which the rate rises to its scaled value (0). A callback that sets the rate "
        "ends the warm-up.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed >= 2**32:
            raise InvalidInputError(f"seed must be below 2**32, got {self.seed}")
        if self.warmup_epochs and self.lr_scaling == "none":
            raise InvalidInputError(
                f"warmup_epochs={self.warmup_epochs} needs lr_scaling='linear' or 'sqrt': the "
                "warm-up rises from the model's learning rate to the scaled one"
            )

    def order_settings(self, workers: int, window_bytes: int) -> dict[str, object]:
        """Return the settings that the order of samples follows from, as checkpoints record them.

        Args:
            workers: ranks of the run.
            window_bytes: see `DataOptions`.
        """
        return {
            "global_batch": self.batch_size * workers,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "window_bytes": window_bytes,
            "steps_per_epoch": self.steps_per_epoch,
        }

    def validates(self, epoch: int) -> bool:
        """Return whether the epoch of this number, from 0, is followed by a validation."""
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq

    def validations(self, first: int, end: int) -> int:
        """Return how many of the epochs from ``first``, from 0, to before ``end`` validate."""
        if isinstance(self.validation_freq, int):
            return end // self.validation_freq - first // self.validation_freq
        return sum(first < number <= end for number in set(self.validation_freq))


@from_table
@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Settings):
    """Options of checkpoints: when they are taken besides every epoch's end, which are kept."""

    every_steps: int | None = setting(
        None,
        optional(count()),
        "also after every so many steps of the whole run; by default, at every epoch's end only.",
    )
    every_minutes: float | None = setting(
        None, optional(number_above_zero("minutes")), "also whenever so many minutes have passed."
    )
    keep: int = setting(3, count(), "number of newest checkpoints to keep (3).")
    best_metric: str | None = setting(
        None,
        optional(_METRIC),
        "also keep the one of the epoch with the best value of this metric, such as "
        '``"val_loss"``.',
    )
    best_mode: BestMode = setting(
        "min", choice(*get_args(BestMode)), 'whether ``"min"`` (default) or ``"max"`` is best.'
    )
    on_error: OnCheckpointError = setting(
        "raise",
        choice(*get_args(OnCheckpointError)),
        '``"raise"`` (default) ends the training when a checkpoint cannot be written; ``"warn"`` '
        "continues until the next one.",
    )
    event_files: bool = setting(
        True,
        FLAG,
        "write the metrics of every epoch, learning rate and samples per second for TensorBoard "
        "to ``events/`` in the run directory (default).",
    )
    saved_model: bool = setting(
        False,
        FLAG,
        "also write the trained model as a SavedModel, to ``saved_model/`` in the run directory: "
        "its inputs are the feature columns, and it predicts with TensorFlow alone, see "
        "`TFTransformer.export` (false).",
    )

    timeline: bool = setting(
        False,
        FLAG,
        "record Horovod's timeline of each tensor, with the ranks' waiting times, to "
        "``events/timeline-STEP.json`` in the run directory, for chrome://tracing and Perfetto "
        "(false). It grows with every step.",
    )
    profile_steps: Sequence[int] | None = setting(
        None,
        optional(_PROFILE_STEPS),
        "profile these steps of the run on rank 0, the first and the last of them counted from 1, "
        "such as ``(100, 110)``, with TensorFlow's profiler or PyTorch's, to ``events/profile/`` "
        "in the run directory, for TensorBoard.",
    )

    @property
    def best_is_highest(self) -> bool:
        """Whether a higher value of ``best_metric`` is better."""
        return self.best_mode == "max"


@from_table
@dataclass(frozen=True, kw_only=True)
class RestartOptions(Settings):
    """Options of restarting a run that fails for another reason than its own code."""

    max_restarts: int = setting(
        0,
        count(0),
        "maximum number of restarts from the newest checkpoint after an interruption (a rank "
        "killed, an executor lost) (0); exceptions of your own code are not retried, except those "
        "that its surroundings may cause: ``OSError``, ``ConnectionError``, ``TimeoutError`` and "
        "``MemoryError``.",
    )
    min_workers: int | None = setting(
        None,
        optional(count()),
        "minimum ranks of a restart if Spark has no slots for all; the global batch stays the "
        "same. By default, all.",
    )
    backoff_seconds: float = setting(
        0.5, SECONDS, "pause before the first restart (0.5); doubled while there is no progress."
    )


@from_table
@dataclass(frozen=True)
class InitialWeights(Settings):
    """Weights to begin a new run with. They must fit, weight by weight, in the model's order."""

    place: str | os.PathLike[str] = required(
        _WEIGHTS,
        "path or URL of another run's directory or one of its checkpoints; or, for a Keras model, "
        "a ``.keras`` or ``.weights.h5`` file or a SavedModel written by Keras; for a PyTorch "
        "module, a ``.pt`` or ``.pth`` file of ``torch.save(module.state_dict())`` or of a "
        'dictionary with it as ``"state_dict"`` or ``"model_state_dict"``.',
    )
    _: KW_ONLY
    skip_mismatch: bool = setting(
        False,
        FLAG,
        "use only weights that exist and fit, such as all but a new head's (false); the others "
        "keep their initial values. Weights are matched by their paths (layer and variable "
        "names), those of Keras files as by ``load_weights(skip_mismatch=True)``. The used ones "
        "are reported; it is an error if there is none.",
    )


def check_min_workers(workers: int, restarts: RestartOptions) -> None:
    """Check that a restart does not need more ranks than the run.

    Raises:
        InvalidInputError: ``min_workers`` is more than the run's ranks.
    """
    least = restarts.min_workers
    if least is not None and least > workers:
        raise InvalidInputError(f"min_workers={least} is more than num_workers={workers}")


@from_table
@dataclass(frozen=True, kw_only=True)
class MlflowOptions(Settings):
    """Options of logging a training to MLflow, by the driver, while it runs.

    A metric's step is its epoch, counted from 0, as MLflow's own autologging of Keras does.
    """

    tracking_uri: str | None = setting(
        None,
        optional(TEXT),
        "URI of MLflow's server or store; by default, MLflow's own (``MLFLOW_TRACKING_URI``). It "
        "is never logged.",
        shown=False,
    )
    experiment: str | None = setting(
        None,
        optional(TEXT),
        "name of the experiment, which is created if it does not exist; by default, MLflow's own "
        "(``MLFLOW_EXPERIMENT_NAME``, or ``Default``).",
    )

    run_name: str | None = setting(
        None, optional(TEXT), "name of the run in MLflow; by default, the run directory's."
    )
    tags: Mapping[str, str] = setting({}, TEXT_MAP, "tags of the run in MLflow.")
    log_model: bool = setting(
        True,
        FLAG,
        "also log the trained model's files, as artifacts in ``model/`` and ``saved_model/`` "
        "(default).",
    )


Resume = Literal["auto", "never", "required"]
# The arguments that are objects, and the class of each.
OPTIONS: dict[str, type[Any]] = {
    "data": DataOptions,
    "checkpoints": CheckpointOptions,
    "restarts": RestartOptions,
    "launch": LaunchOptions,
    "mlflow": MlflowOptions,
}
_FIT = tuple(one.name for one in fields(FitOptions))


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Everything that decides a training but its rows; validated when it is made.

    The docstring of `run_training` explains each field.

    Attributes:
        fit: the arguments of `run_training` that are fields of `FitOptions`.
        params: parameters of a trial of a search; ``None`` for any other training.
        check_outputs: raises an error if the model's outputs do not fit the requested predictions;
            called on the ranks before the first step. For estimators.
        title: what distinguishes the training from others of the same call, for display.

    Raises:
        InvalidInputError: a field is invalid.
    """

    model_fn: Any
    feature_cols: ColumnNames | None = None
    label_cols: ColumnNames | None = None
    sample_weight_col: str | None = None
    validation: object = None
    num_workers: int | None = None
    gpus_per_worker: int = 0
    custom_objects: Mapping[str, Any] | None = None
    callbacks: Any = None
    run_dir: str | os.PathLike[str] | None = None
    resume: Resume = "auto"
    initial_weights: str | os.PathLike[str] | InitialWeights | None = None
    prediction_col: PredictionCol = None
    stream_logs: bool = True
    fit: FitOptions = field(default_factory=FitOptions)
    data: DataOptions = field(default_factory=DataOptions)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    restarts: RestartOptions = field(default_factory=RestartOptions)
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    sync: Sync = field(default_factory=Allreduce)
    mlflow: MlflowOptions | None = None
    params: Mapping[str, Any] | None = None
    check_outputs: Callable[..., None] | None = None
    title: str = ""

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> TrainingConfig:
        """Build the configuration of the arguments of `run_training`.

        Args:
            arguments: by name, without ``df``; fields of `FitOptions` stand among them.

        Raises:
            InvalidInputError: an argument is invalid.
        """
        others = {name: value for name, value in arguments.items() if name not in _FIT}
        fit = {name: arguments[name] for name in _FIT if name in arguments}
        return cls(fit=FitOptions(**fit), **others)

    def __post_init__(self) -> None:
        if self.run_dir == "":
            raise InvalidInputError(
                "run_dir is empty; give a folder or URL, or leave it out for runs/<time> on a "
                "local master"
            )
        if self.run_dir is not None:
            check_place("run_dir", self.run_dir)
        check_choice("resume", self.resume, get_args(Resume))
        weight = self.sample_weight_col
        if weight is not None and (not isinstance(weight, str) or not weight):
            raise InvalidInputError(
                f"sample_weight_col must be a column's name, got {brief(weight)}"
            )
        check_prediction_col("prediction_col", self.prediction_col)
        if isinstance(self.validation, Real) and not isinstance(self.validation, bool):
            self._set("validation", float(self.validation))
        weights = self.initial_weights
        if weights is not None and not isinstance(weights, InitialWeights):
            self._set("initial_weights", InitialWeights(weights))
        if self.callbacks is None:
            self._set("callbacks", ())
        for name, kind in OPTIONS.items():
            value = getattr(self, name)
            if name != "mlflow" or value is not None:
                self._set(name, check_options(name, value, kind))
        self._set("sync", check_sync("sync", self.sync))
        of_workers = {name: getattr(self, name) for name in ("num_workers", "gpus_per_worker")}
        derive(LaunchSettings, self.launch, **of_workers)  # raises
        if self.num_workers is not None:
            check_min_workers(self.num_workers, self.restarts)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_trial(self) -> bool:
        """Whether the training is a trial of a search."""
        return self.params is not None

    def recorded_data(self) -> dict[str, Any]:
        """Return what checkpoints record of the data options, as JSON."""
        options, validation = self.data, self.validation
        plain = validation is None or isinstance(validation, (str, float, int))
        return {
            "validation": validation if plain else "a DataFrame",
            "stratify": options.stratify,
            "shapes": {name: list(shape) for name, shape in options.shapes.items()},
            "dtypes": {name: str(dtype) for name, dtype in options.dtypes.items()},
            "transforms": sorted(options.transforms),
        }

    def for_ranks(self) -> TrainingConfig:
        """Return the configuration without what only the driver uses, which may hold secrets."""
        return replace(
            self,
            model_fn=None,
            custom_objects=None,
            validation=None,
            initial_weights=None,
            launch=LaunchOptions(),
            mlflow=None,
        )


@functools.cache
def training_usage() -> Mapping[str, str]:
    """Return how to set each argument of `run_training`, and each setting within one."""
    internal = ("fit", "params", "check_outputs", "title")
    names = (*_FIT, *(one.name for one in fields(TrainingConfig) if one.name not in internal))
    usage = usage_within("sync", *STRATEGIES.values())
    for argument, kind in OPTIONS.items():
        usage |= usage_within(argument, kind)
    return {**usage, **{name: f"{name}=…" for name in names}}
