"""Count the rows of a DataFrame where that needs no computation."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ...cluster.spark.session import classic_context
from ...storage.filesystem import Location
from .datasets import frame_of
from .footers import read_metadata

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Parquet files whose footers are read for that, at most.
_MOST_FILES = 16
# Plan nodes that give as many rows as they get.
_SAME_ROWS = {
    *("Project", "SubqueryAlias", "View", "Sort", "Window", "Repartition"),
    *("RepartitionByExpression", "LogicalRelation"),
}


def rows_to_write(data: Any, validation: Any) -> int | None:
    """Return how many rows are to be written of what `run_training` was given, for people.

    Args:
        data: a DataFrame, or the place of Parquet files.
        validation: which rows to validate with; see `run_training`.

    Returns:
        The number; ``None`` where only computing the rows, or reading many files, would tell.
    """
    frames = [data]
    if validation is not None and not isinstance(validation, (str, int, float)):
        frames.append(validation)
    total = 0
    for frame in frames:
        count = known_rows(frame_of(frame))
        if count is None:
            return None
        total += count
    return total


def known_rows(frame: DataFrame) -> int | None:
    """Return how many rows a frame has, if few Parquet footers tell."""
    if classic_context(frame.sparkSession) is None:
        return None  # Spark Connect shows no plan
    # Nothing depends on it: what Spark or a storage cannot tell is not known.
    with contextlib.suppress(Exception):
        execution = getattr(frame, "_jdf").queryExecution()  # noqa: B009 (as Petastorm does)
        if _reads_rows_of_files(execution.analyzed()):
            return _in_footers(frame.inputFiles())
    return None


def _reads_rows_of_files(plan: Any) -> bool:
    """Tell whether a plan gives the rows of the Parquet files that it reads, all of them once."""
    while True:
        if plan.getClass().getSimpleName() not in _SAME_ROWS:
            return False
        children = plan.children()
        if not children.size():
            return "parquet" in str(plan.relation().fileFormat()).lower()
        plan = children.apply(0)


def _in_footers(files: list[str]) -> int | None:
    if not 0 < len(files) <= _MOST_FILES:
        return None
    return sum(int(read_metadata(Location(file))[0].num_rows) for file in files)
