"""Jobs that fail before Spark has begun them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from horovod_spark_runner.cluster.spark.jobs import TaggedJob


def gone(tag: str) -> None:
    raise ConnectionError("the server is gone")


def test_what_fails_before_the_job_is_raised_and_told() -> None:
    # As of Spark Connect.
    spark: Any = SimpleNamespace(getTags=set, addTag=gone, interruptTag=gone)
    with pytest.raises(ConnectionError, match="the server is gone"):
        TaggedJob(spark, "tag", "a job", lambda: 1).run()
    ended: list[int] = []
    job = TaggedJob(spark, "tag", "a job", lambda: 1)
    job.start(lambda: ended.append(1))
    job.join(10)
    assert ended == [1]
    assert job.failed_by_itself
    assert not job.is_alive()
