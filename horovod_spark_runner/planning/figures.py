"""What ranks are asked to measure, and what they answer; light enough for the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..training.spec import TrainingSpec


@dataclass(frozen=True)
class Question:
    """What ranks are to measure.

    Attributes:
        spec: the training.
        batch_sizes: rows of a rank in a step; those of which the rows do not fill a step of all
            ranks are left out.
        seconds: how long to train with each, and to read, about.
        kept: whether a rank keeps the rows it has read.
        noise: whether to tell the gradient noise scale; of two ranks, or more.
        per_core: how many ranks of a host `measure_shared` keeps to a core.
    """

    spec: TrainingSpec
    batch_sizes: Sequence[int]
    seconds: float
    kept: bool
    noise: bool = False
    per_core: int = 1


@dataclass(frozen=True)
class StepFigures:
    """Steps of one batch size on one rank; see `model.StepTime`.

    Attributes:
        seconds: of a step, the mean.
        spread: their standard deviation, without the slowest twentieth.
        cpu_seconds: processor time of all threads, per step.
        exchange: seconds of a step's exchange; ``None`` where the framework does not tell.
    """

    seconds: float
    spread: float
    cpu_seconds: float
    exchange: float | None


@dataclass(frozen=True)
class RankFigures:
    """What one rank has measured.

    Attributes:
        build: seconds of building the model.
        first_step: seconds of the first step.
        steps: by batch size.
        sums: seconds of a sum over all ranks through the framework, by bytes; none of one rank.
        latency: seconds of MPI's own sum of one number.
        gradient_bytes: of all weights that are trained.
        model_bytes: of all real numbers of the model.
        reader_rows: rows per second that the reader gives at first, with nothing else to do.
        reader_cpu_seconds: processor time of a row, likewise.
        cores: of the host that this process may use.
        noise: mean squares of the gradients of single ranks, and of those of all, if asked for.
    """

    build: float
    first_step: float
    steps: Mapping[int, StepFigures]
    sums: Mapping[int, float]
    latency: float
    gradient_bytes: int
    model_bytes: int
    reader_rows: float
    reader_cpu_seconds: float
    cores: int
    noise: tuple[float, float] | None = None


@dataclass(frozen=True)
class Shared:
    """Steps of one rank on a core that it shares.

    Attributes:
        seconds: of a step on rows in memory, the mean.
        per_core: ranks for each core.
        reader_cpu_seconds: processor time of reading a row at first, all of these ranks at once.
    """

    seconds: float
    per_core: float
    reader_cpu_seconds: float


def measure_shared(question: Question) -> Shared:
    """Measure steps of the training's batch size, and reading, several ranks on a core.

    Raises:
        HorovodSparkError: see `measure_rank`.
    """
    from .rank import measure_on_shared_cores

    return measure_on_shared_cores(question)


def measure_rank(question: Question) -> RankFigures:
    """Measure on this rank, together with all others.

    Raises:
        HorovodSparkError: of the kinds that `horovod_spark_runner.training.loop.train` names.
    """
    from .rank import measure

    return measure(question)
