"""Function that the ranks call; light enough to be named on the driver."""

from __future__ import annotations

from ..training.spec import TrainingSpec
from .measurement import RankFigures


def measure_rank(spec: TrainingSpec, seconds: float, cached: bool) -> RankFigures:
    """Measure on this rank; see `horovod_spark_runner.planning.rank.measure`."""
    from .rank import measure

    return measure(spec, seconds, cached)
