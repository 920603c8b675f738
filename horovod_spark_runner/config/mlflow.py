"""Settings of where a training is recorded while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .fields import Settings, from_table, setting
from .validators import FLAG, TEXT, TEXT_MAP, optional


@from_table
@dataclass(frozen=True, kw_only=True)
class MlflowOptions(Settings):
    """What is recorded of a training in MLflow, by the driver, while it runs."""

    tracking_uri: str | None = setting(
        None,
        optional(TEXT),
        "where MLflow's server or store is; by default, as MLflow itself finds it "
        "(``MLFLOW_TRACKING_URI``). It is never logged.",
        shown=False,
    )
    experiment: str | None = setting(
        None,
        optional(TEXT),
        "name of the experiment, which is made if it is not there; by default, MLflow's own "
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
