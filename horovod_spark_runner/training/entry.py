"""The function the ranks call; light enough to be named on the driver."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from ..errors import EnvironmentProblem
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
    """Train on this rank; see `horovod_spark_runner.training.loop`.

    Raises:
        EnvironmentProblem: an environment variable makes Keras another than what is trained here.
    """
    for problem, advice in wrong_variables(os.environ):
        raise EnvironmentProblem(f"{problem}; {advice}")
    from .loop import train

    return train(spec)


def wrong_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what environment variables break, and what to do. Pure."""
    if environment.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        yield "TF_USE_LEGACY_KERAS is set: TensorFlow would use Keras 2", "unset it"
    backend = environment.get("KERAS_BACKEND") or "tensorflow"
    if backend != "tensorflow":
        yield (
            f"KERAS_BACKEND is {backend!r}: Keras would not use TensorFlow, as training needs",
            "unset it, or set it to tensorflow",
        )
