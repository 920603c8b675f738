"""What a plan rests on, measured on the driver: one launch of a rank, one of all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..data.prepare.checks import NO_ROWS
from ..data.prepare.datasets import Prepared, session_of
from ..errors import DataError, HorovodSparkError, NotEnoughSlotsError, brief
from ..launch.driver.console import Console
from ..launch.driver.launch import RunResult
from ..launch.driver.launcher import chosen_launcher
from ..launch.shared.topology import in_words
from ..run.pipeline import import_ahead, training_spec
from ..run.request import CheckedRequest
from ..settings.launching import LaunchSettings
from ..settings.table import derive
from ..spark.session import described
from ..training.entry import modules_for
from .asked import Asked
from .figures import Question, measure_rank, measure_shared
from .launched import Crowded, Launched
from .measurement import Measurement, combined
from .writing import written_rows

# Ranks on a core that are measured together at most.
_MOST_PER_CORE = 4


def measure(checked: CheckedRequest, asked: Asked, seconds: float, rows: int) -> Measurement:
    """Measure a training on the cluster.

    Args:
        checked: the training.
        asked: what a plan is to tell.
        seconds: how long a rank is to measure each batch size.
        rows: rows of the whole training.

    Raises:
        DataError: the rows do not fill a step of all ranks.
        HorovodSparkError: as `run_training` does.
    """
    _check_enough(checked, rows, rows)
    began = time.monotonic()
    request, directory = checked.request, checked.directory
    console = Console(directory.location.name, quiet=not request.stream_logs)
    modules = modules_for(checked.source.engine)
    import_ahead(checked)
    place = directory.location.join("rows")
    with written_rows(checked, place, rows, asked.sample_rows) as written:
        known = written.data.rows
        _check_enough(checked, known, rows)
        console.say(
            f"measuring on {known:,} rows, ready after {time.monotonic() - began:.1f} s; all take "
            f"{written.seconds:.1f} s of writing"
        )
        spec = training_spec(checked, Prepared(written.data, None, False), "plan", None, "")
        kept = written.data.size * rows / known <= request.data.window_bytes
        question = Question(spec, asked.sizes(checked.fit.batch_size), seconds, kept)
        alone = _launch(checked, question, 1, modules)
        every = alone
        if checked.workers > 1:
            all_of = replace(question, noise=asked.noise_scale)
            every = _launch(checked, all_of, checked.workers, modules)
        shared = _shared(checked, question, asked, every, modules, console)
    return combined(
        spec,
        alone,
        every,
        shared=shared,
        rows=rows,
        known=known,
        kept=kept,
        materialize=written.seconds,
        seconds=time.monotonic() - began,
        # An algorithm that is asked for goes over all ranks, as NCCL does.
        by_hosts=not request.gpus_per_worker and checked.launching.mpi.algorithm == "auto",
    )


def _check_enough(checked: CheckedRequest, known: int, rows: int) -> None:
    """Check that rows fill a step of all ranks.

    Args:
        checked: the training.
        known: rows to measure with.
        rows: rows of the training.
    """
    batch, ranks = checked.fit.batch_size, checked.workers
    if not rows:
        raise DataError(f"{NO_ROWS}, so nothing to plan for")
    if known < batch * ranks:
        advice = ["a smaller batch_size"]
        advice += ["a smaller num_workers"] * (ranks > 1)
        advice += ["a larger sample_rows"] * (known < rows)
        raise DataError(
            f"a step of {in_words(ranks)} takes {batch * ranks:,} rows, {batch:,} of each, but "
            f"there are {known:,} to measure with; give {' or '.join(advice)}"
        )


def _launch(
    checked: CheckedRequest, question: Question, count: int, modules: Sequence[str]
) -> Launched:
    """Let so many ranks measure."""
    result = _answers(checked, measure_rank, question, count, modules)
    timings = result.timings
    hosts = tuple(one.host for one in result.placement)
    return Launched(result.results, hosts, timings["total"] - timings["function"])


def _shared(
    checked: CheckedRequest,
    question: Question,
    asked: Asked,
    every: Launched,
    modules: Sequence[str],
    console: Console,
) -> list[Crowded]:
    """Let ranks that share cores measure, two on each and as many as a plan asks for.

    Returns:
        What each launch has measured; nothing where a plan does not ask, ranks share cores anyway,
        or there is no room for more.
    """
    cores = min(rank.cores for rank in every.ranks)
    here = asked.ranks_per_host or every.here
    wanted = math.ceil(here / (asked.cores_per_host or cores))
    if len(every.ranks) == 1 or every.here > cores or wanted < 2:
        return []
    found: dict[float, Crowded] = {}
    for per_core in sorted({2, min(wanted, _MOST_PER_CORE)}):
        one = _crowd(checked, replace(question, per_core=per_core), every, modules, console)
        if one is None:
            break
        found.setdefault(one.per_core, one)
    return list(found.values())


def _crowd(
    checked: CheckedRequest,
    question: Question,
    every: Launched,
    modules: Sequence[str],
    console: Console,
) -> Crowded | None:
    """Let so many ranks share each core; ``None`` if there is no room, or they cannot."""
    per_core = question.per_core
    all_cores = len(every.ranks) * per_core
    fewest = len(every.ranks) if every.here >= per_core else len(set(every.hosts)) * per_core
    # Ranks are slower where no core is free, as in a training of so many.
    for count in dict.fromkeys((all_cores, fewest)):
        if count * checked.fit.batch_size > question.spec.train.rows:
            continue
        try:
            result = _answers(checked, measure_shared, question, count, modules)
        except NotEnoughSlotsError:
            continue
        except HorovodSparkError as error:
            console.say(f"what {in_words(per_core)} on a core take is not known: {brief(error)}")
            return None
        hosts = tuple(one.host for one in result.placement)
        if count == fewest or set(hosts) == set(every.hosts):
            return Crowded(result.results, hosts)
    return None


def _answers(
    checked: CheckedRequest,
    measured: Callable[[Question], Any],
    question: Question,
    count: int,
    modules: Sequence[str],
) -> RunResult:
    """Let so many ranks answer a question."""
    request, directory = checked.request, checked.directory
    launching = derive(LaunchSettings, checked.launching, num_workers=count)
    spark, task = session_of(request.frame), f"measuring steps, sums and reading, {in_words(count)}"
    console = Console(directory.location.name, quiet=not request.stream_logs, task=task)
    with described(spark, f"Horovod: planning {directory.location.name}"):
        return chosen_launcher().launch(
            spark, launching, measured, (question,), {}, console, modules, count
        )
