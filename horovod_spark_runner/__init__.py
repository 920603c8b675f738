"""Train a neural network from a Spark DataFrame, with Horovod over MPI inside Spark's own tasks.

Importing this package loads no framework; what a name needs is loaded when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import (
    CheckpointError,
    DataError,
    EnvironmentProblem,
    HorovodSparkError,
    InvalidInputError,
    LaunchError,
    ModelError,
    NotEnoughSlotsError,
    PreemptedError,
    RankFailedError,
    RanksDivergedError,
    RunCancelledError,
    RunDirectoryError,
    RunFailedError,
    StalledError,
    StorageError,
    UnreachableError,
)

if TYPE_CHECKING:
    from .api import run_training
    from .cluster.driver.result import RunResult
    from .cluster.worker.reporting import attempt, report_progress
    from .config.data import DataOptions
    from .config.launch import LaunchOptions, MpiOptions
    from .config.sync import Allreduce, AsyncServer, DiLoCo, LocalSGD, PowerSGD, Threshold, TopK
    from .config.training import CheckpointOptions, InitialWeights, MlflowOptions, RestartOptions
    from .dataset import Dataset, prepare_dataset
    from .engines.torch.torch_callback import TorchCallback, TorchEarlyStopping
    from .engines.torch.torch_model import TorchModel
    from .estimator import HorovodEstimator
    from .export.pipeline import export_pipeline
    from .model.torch_transformer import TorchTransformer
    from .model.transformer import TFTransformer
    from .planning.call import plan_training
    from .planning.model import Link
    from .planning.plan import TrainingPlan
    from .runner import HorovodRunner
    from .training.spec import training_steps

_LAZY = {
    "Allreduce": ".config.sync",
    "AsyncServer": ".config.sync",
    "CheckpointOptions": ".config.training",
    "DataOptions": ".config.data",
    "Dataset": ".dataset",
    "DiLoCo": ".config.sync",
    "HorovodEstimator": ".estimator",
    "HorovodRunner": ".runner",
    "InitialWeights": ".config.training",
    "LaunchOptions": ".config.launch",
    "Link": ".planning.model",
    "LocalSGD": ".config.sync",
    "MlflowOptions": ".config.training",
    "MpiOptions": ".config.launch",
    "PowerSGD": ".config.sync",
    "RestartOptions": ".config.training",
    "RunResult": ".cluster.driver.result",
    "TFTransformer": ".model.transformer",
    "Threshold": ".config.sync",
    "TopK": ".config.sync",
    "TorchCallback": ".engines.torch.torch_callback",
    "TorchEarlyStopping": ".engines.torch.torch_callback",
    "TorchModel": ".engines.torch.torch_model",
    "TorchTransformer": ".model.torch_transformer",
    "TrainingPlan": ".planning.plan",
    "attempt": ".cluster.worker.reporting",
    "export_pipeline": ".export.pipeline",
    "plan_training": ".planning.call",
    "prepare_dataset": ".dataset",
    "report_progress": ".cluster.worker.reporting",
    "run_training": ".api",
    "training_steps": ".training.spec",
}

__all__ = [
    "Allreduce",
    "AsyncServer",
    "CheckpointError",
    "CheckpointOptions",
    "DataError",
    "DataOptions",
    "Dataset",
    "DiLoCo",
    "EnvironmentProblem",
    "HorovodEstimator",
    "HorovodRunner",
    "HorovodSparkError",
    "InitialWeights",
    "InvalidInputError",
    "LaunchError",
    "LaunchOptions",
    "Link",
    "LocalSGD",
    "MlflowOptions",
    "ModelError",
    "MpiOptions",
    "NotEnoughSlotsError",
    "PowerSGD",
    "PreemptedError",
    "RankFailedError",
    "RanksDivergedError",
    "RestartOptions",
    "RunCancelledError",
    "RunDirectoryError",
    "RunFailedError",
    "RunResult",
    "StalledError",
    "StorageError",
    "TFTransformer",
    "Threshold",
    "TopK",
    "TorchCallback",
    "TorchEarlyStopping",
    "TorchModel",
    "TorchTransformer",
    "TrainingPlan",
    "UnreachableError",
    "__version__",
    "attempt",
    "export_pipeline",
    "plan_training",
    "prepare_dataset",
    "report_progress",
    "run_training",
    "training_steps",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
