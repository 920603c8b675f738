"""Configuration of one training: every argument of `run_training` but the rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Literal, get_args

from ..errors import InvalidInputError, brief
from .data import DataOptions
from .fields import derive
from .launch import LaunchOptions, LaunchSettings
from .prediction import PredictionCol, check_prediction_col
from .sync import Allreduce, Sync, check_sync
from .training import (
    CheckpointOptions,
    FitOptions,
    InitialWeights,
    MlflowOptions,
    RestartOptions,
    check_min_workers,
)
from .validators import ColumnNames, check_choice, check_options, check_place

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

    Raises:
        InvalidInputError: a field is invalid.
    """

    model_fn: Any
    feature_cols: ColumnNames | None = None
    label_cols: ColumnNames | None = None
    sample_weight_col: str | None = None
    validation: Any = None
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
