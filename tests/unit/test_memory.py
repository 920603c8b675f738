"""Spark's limit of the memory of Python workers."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_spark_runner.cluster.spark.session import check_memory_limit
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
