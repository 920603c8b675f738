"""Settings of logging a training to MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .fields import Settings, from_table, setting
from .validators import FLAG, TEXT, TEXT_MAP, optional


@from_table
@dataclass(frozen=True, kw_only=True)
class MlflowOptions(Settings):
    """Options of logging a training to MLflow, by the driver, while it runs."""

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
