"""Limits that Spark sets for Python workers."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_spark_runner.cluster.spark.session import check_idle_limit, check_memory_limit
from horovod_spark_runner.errors import EnvironmentProblem


class Session:
    """Stands in for a Spark session with one setting."""

    def __init__(self, limit: str | None) -> None:
        self.conf = self
        self._limit = limit

    def get(self, name: str, default: str) -> str:
        assert name == "spark.executor.pyspark.memory"
        return default if self._limit is None else self._limit


@pytest.mark.parametrize("limit", ["1g", "512m", "2048", "10G"])
def test_a_limit_is_refused_with_what_to_do(limit: str) -> None:
    session: Any = Session(limit)
    with pytest.raises(EnvironmentProblem, match=rf"memory.*\b{limit}\b.*memoryOverhead"):
        check_memory_limit(session)


@pytest.mark.parametrize("limit", [None, "", "0", "0g", "0b"])
def test_no_limit_is_none(limit: str | None) -> None:
    session: Any = Session(limit)
    check_memory_limit(session)


class Idle(dict[str, str]):
    """Stands in for a Spark session with these settings."""

    @property
    def conf(self) -> Idle:
        return self


ENDS = {"spark.python.worker.killOnIdleTimeout": "true"}
SECONDS = "spark.python.worker.idleTimeoutSeconds"


def test_workers_that_spark_ends_when_they_seem_idle_are_refused() -> None:
    session: Any = Idle({**ENDS, SECONDS: "60"})
    with pytest.raises(EnvironmentProblem, match=f"killOnIdleTimeout.*{SECONDS} 60"):
        check_idle_limit(session)


@pytest.mark.parametrize("settings", [{}, ENDS, {SECONDS: "60"}, {**ENDS, SECONDS: "0"}])
def test_workers_that_spark_lets_live_are_not(settings: dict[str, str]) -> None:
    session: Any = Idle(settings)
    check_idle_limit(session)
