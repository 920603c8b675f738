"""What holds for tables with versions, of any format."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovod_spark_runner import RunDirectoryError, prepare_dataset

from .conftest import train


def ids(frame: Any) -> list[int]:
    """Return the column ``id``, sorted."""
    return sorted(row.id for row in frame.select("id").collect())


def prepared_ids(frame: Any, folder: Path) -> list[int]:
    """Return the column ``id`` as ranks read it, sorted."""
    data = prepare_dataset(frame, ["id", "x"], data_dir=str(folder))
    return sorted(
        int(i) for batch in data.share(rank=0, size=1, batch_size=64) for i in batch["id"]
    )


def datasets(folder: Path) -> set[str]:
    """Return the names of the prepared datasets in a folder."""
    return {path.name for path in folder.glob("data-*")}


def check_reuse(
    read: Callable[[], Any], change: Callable[[], object], folder: Path, caplog: Any
) -> None:
    """Check that rows are written once for each version of a table, and never compared.

    Args:
        read: returns the table as a DataFrame.
        change: makes another version of it.
        folder: an empty folder.
        caplog: pytest's.
    """
    caplog.set_level(logging.DEBUG, "horovod_spark_runner")
    frame = read()
    first = prepared_ids(frame, folder)
    assert first == ids(frame)
    written = datasets(folder)
    assert len(written) == 1
    assert prepared_ids(read(), folder) == first
    assert datasets(folder) == written
    change()
    for again in (read(), frame):  # Spark reads the newest version by the old one, too
        assert prepared_ids(again, folder) == ids(again) != first
        assert len(datasets(folder)) == 2
    assert "comparing the rows" not in caplog.text


def check_resume(
    read: Callable[[str | None], Any],
    version: Callable[[], str],
    change: Callable[[], object],
    run_dir: Path,
) -> None:
    """Check that a run is resumed with the version that it began with, and with no other.

    Args:
        read: returns the table as a DataFrame: a version of it, or with ``None`` the newest.
        version: returns the newest version.
        change: makes another one.
        run_dir: an empty folder.
    """
    train(read(None), run_dir)
    began = version()
    change()
    with pytest.raises(RunDirectoryError, match=f"VERSION AS OF {began} .*versionAsOf"):
        train(read(None), run_dir, epochs=2)
    run = train(read(began), run_dir, epochs=2)
    assert [attempt.first_step for attempt in run.summary.attempts][-1] == 10
    assert len(run.summary.history) == 2
