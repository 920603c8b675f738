"""Jobs that fail before Spark has begun them."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_spark_runner.spark.tagged_job import TaggedJob


class Gone:
    """A session of Spark Connect whose server has gone away."""

    def getTags(self) -> set[str]:
        return set()

    def addTag(self, tag: str) -> None:
        raise ConnectionError("the server is gone")

    interruptTag = addTag


def test_what_fails_before_the_job_is_raised_and_told() -> None:
    spark: Any = Gone()
    with pytest.raises(ConnectionError, match="the server is gone"):
        TaggedJob(spark, "tag", "a job", lambda: 1).run()
    ended: list[int] = []
    job = TaggedJob(spark, "tag", "a job", lambda: 1)
    job.start(lambda: ended.append(1))
    job.join(10)
    assert ended == [1]
    assert job.failed_by_itself
    assert not job.is_alive()
