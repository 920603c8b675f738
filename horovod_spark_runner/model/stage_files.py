"""The folder of a stage of Spark ML, written and read through the package's own storage.

Spark may reach other storage than this process does, or none of the kind: its metadata are plain
text, which it reads wherever it can.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..cluster.spark.session import classic_context
from ..errors import InvalidInputError, RunDirectoryError
from ..storage.filesystem import Location
from ..storage.folders import saving, write_aside

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def write_stage(
    spark: SparkSession,
    path: str | os.PathLike[str],
    write: Callable[[Location], None],
    *,
    overwrite: bool,
) -> Location:
    """Write a stage, and return where it is.

    On local storage and HDFS a reader sees the old stage or the new one, on HDFS for a moment none,
    never a part; the old one is kept until the new one is in its place.

    Args:
        spark: the session it is to be loaded in.
        path: folder or URL.
        write: writes its files into a folder.
        overwrite: whether to replace what is there.

    Raises:
        RunDirectoryError: there is something at ``path``, which is not to be replaced.
        InvalidInputError: ``path`` is none, or Spark reads from other storage than this process
            writes to.
        StorageError: storage fails.
    """
    location = location_of(spark, path)
    if location.exists() and not (overwrite and location.is_folder):
        advice = "write().overwrite().save(path) replaces it"
        raise RunDirectoryError(
            f"{location} is there already; "
            + (advice if location.is_folder else "it is a file, not a folder")
        )
    with saving("the stage", location):
        if location.renames_whole:
            write_aside(location, write)
        else:
            write(location)
    if "://" not in os.fspath(path) and classic_context(spark) is None:
        _check_seen(spark, path, location)
    return location


def write_metadata(location: Location, text: str) -> None:
    """Write a stage's metadata as Spark ML does: one line of JSON."""
    folder = location.join("metadata")
    folder.make_folder()
    part, mark = folder.join("part-00000"), folder.join("_SUCCESS")
    part.write_text(text + "\n")
    mark.write_bytes(b"")
    # In an object store, where a stage is written over another: Spark reads all that is there.
    for place in folder.list():
        if place.name not in (part.name, mark.name):
            place.delete_file()


def read_metadata(location: Location) -> str:
    """Return a stage's metadata, whoever wrote them.

    Raises:
        RunDirectoryError: there are none, or they cannot be read.
    """
    folder = location.join("metadata")
    try:
        parts = [part for part in folder.list() if part.name.startswith("part-")]
        if parts:
            return parts[0].read_text()
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{folder} cannot be read: {error}") from error
    raise RunDirectoryError(f"{location} holds no saved stage: {folder} is missing")


def location_of(spark: SparkSession, path: str | os.PathLike[str]) -> Location:
    """Return the place that Spark means by a path: without a scheme, on its default file system.

    Raises:
        InvalidInputError: it is no path, or relative to a file system that is not this machine's.
    """
    location = Location(path)
    context = classic_context(spark)
    text = os.fspath(path)
    if context is None or not location.is_local or text.startswith("file:"):
        return location
    default = str(context._jsc.hadoopConfiguration().get("fs.defaultFS") or "file:///")
    if default.startswith("file:"):
        return location
    if not text.startswith("/"):
        raise InvalidInputError(
            f"{text!r} is relative, and Spark's default file system is {default}; give a whole "
            f"path there, or a URL, such as {location.spark_url}"
        )
    return Location(default.rstrip("/") + text)


def _check_seen(spark: SparkSession, path: str | os.PathLike[str], location: Location) -> None:
    """Check that the server of Spark Connect reads what this process has written.

    Raises:
        InvalidInputError: it does not; then nothing stays there.
    """
    written = location.join("metadata", "part-00000").read_text()
    try:
        row = spark.read.text(os.path.join(path, "metadata")).first()
        seen = row is not None and row[0] == written.rstrip("\n")
    except Exception:  # whatever Spark raises for what is not there
        seen = False
    if not seen:
        location.delete_folder()
        raise InvalidInputError(
            f"Spark's server finds nothing at {os.fspath(path)!r}, where this process has written "
            "to its own disk; give the URL of storage that both reach"
        )
