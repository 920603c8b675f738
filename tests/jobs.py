"""What Spark's UI shows of its jobs."""

from __future__ import annotations

from typing import Any


def descriptions(spark: Any) -> set[str]:
    """Return the descriptions of all jobs that the session's application has run."""
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    each = [jobs.apply(number).description() for number in range(jobs.size())]
    return {one.get() for one in each if one.isDefined()}
