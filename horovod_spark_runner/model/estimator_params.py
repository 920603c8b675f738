"""Spark ML's Params of `HorovodEstimator`, made from the tables of settings."""

from __future__ import annotations

from typing import Any

from ..config.estimator import EstimatorSettings
from ..config.importable import mark_user_settings
from ..config.launch import LaunchSettings
from ..config.training import FitOptions
from .params import P, PredictionParams, converted, set_defaults, with_params


@with_params(EstimatorSettings)
@with_params(LaunchSettings, "num_workers", "gpus_per_worker", "stream_logs")
@with_params(FitOptions)
class EstimatorParams(PredictionParams):
    """Params of the estimator: its training, and its model's columns."""

    def __init__(self) -> None:
        super().__init__()
        for settings in (EstimatorSettings, FitOptions, LaunchSettings):
            set_defaults(self, settings)
        self._setDefault(featuresCol="features")

    def _set(self, **values: Any) -> EstimatorParams:
        # Converters name functions, for grids; a stage keeps what it was given.
        for name, value in values.items():
            one = self.getParam(name)
            self._paramMap[one] = converted(one, value)
        return self

    def _assign(self: P, name: str, value: Any) -> P:
        super()._assign(name, value)
        one = self.getParam(name)
        if one in self._paramMap:
            self._paramMap[one] = mark_user_settings(self._paramMap[one])
        return self
