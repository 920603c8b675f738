"""The function the ranks call; light enough to be named on the driver."""

from __future__ import annotations

import time

from .engine import engine_named
from .spec import TrainingReport, TrainingSpec

# Besides the engine's: what reads rows, the loop, and what writes its event files.
_MODULES = (
    "pyarrow.parquet",
    "horovod_spark_runner.training.loop",
    "tensorboard.summary.writer.record_writer",
)


def modules_for(engine: str) -> tuple[str, ...]:
    """Return the modules that a rank imports while Spark and mpirun still connect.

    Args:
        engine: the dotted name of the engine.
    """
    engine_modules = engine_named(engine).modules
    return (*engine_modules, *_MODULES)


def train_rank(spec: TrainingSpec) -> TrainingReport:
    """Train on this rank; see `horovod_spark_runner.training.loop`.

    Raises:
        HorovodSparkError: of the kinds that `horovod_spark_runner.training.loop.train` names.
    """
    began = time.perf_counter()
    from .loop import train

    return train(spec, began=began)
