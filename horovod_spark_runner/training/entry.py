"""The function the ranks call; light enough to be named on the driver."""

from __future__ import annotations

from .spec import TrainingReport, TrainingSpec

# What a rank imports while Spark and mpirun still find each other.
MODULES = (
    "tensorflow",
    "keras",
    "horovod.tensorflow",
    "pyarrow.parquet",
    "horovod_spark_runner.training.loop",
)


def train_rank(spec: TrainingSpec) -> TrainingReport:
    """Train on this rank; see `horovod_spark_runner.training.loop`."""
    from .loop import train

    return train(spec)
