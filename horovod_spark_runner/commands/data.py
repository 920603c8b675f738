"""``horovod-spark-runner data``: list a folder's materialized datasets, and delete them."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence

from ..checkpoint.run_directory import RunDirectory
from ..data.store import StoredDataset, clear_datasets, list_datasets
from ..errors import InvalidInputError
from ..storage.filesystem import Location
from .output import show

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB")


def _parse_age(text: str) -> float:
    """Return an age such as ``"7d"`` in seconds.

    Raises:
        InvalidInputError: ``text`` is not an age.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise InvalidInputError(
            f"invalid age --older-than {text!r}: use a number and s, m, h, d or w, such as 7d"
        )
    return float(match[1]) * _UNITS[match[2]]


def _describe_datasets(datasets: Sequence[StoredDataset], now: float) -> list[str]:
    """Return one line per dataset: age, size, rows, columns and place. Pure."""
    lines = []
    for dataset in datasets:
        what = "incomplete"
        if dataset.manifest is not None:
            names = ", ".join(column.name for column in dataset.manifest.columns)
            what = f"{dataset.manifest.rows} rows of {names}"
        age = _describe_age(now - dataset.used)
        lines.append(f"{age:>5}  {_describe_size(dataset.size):>10}  {dataset.location}  {what}")
    return lines


def _describe_age(seconds: float) -> str:
    """Return seconds as "3d" or "12m"."""
    fitting = [unit for unit, length in _UNITS.items() if unit != "w" and seconds >= length]
    unit = fitting[-1] if fitting else "s"
    return f"{max(0, int(seconds / _UNITS[unit]))}{unit}"


def _describe_size(size: float) -> str:
    """Return bytes as "1.5 MiB"."""
    for prefix in _PREFIXES[:-1]:
        if size < 1024:
            return f"{size:.0f} B" if prefix == "B" else f"{size:.1f} {prefix}"
        size /= 1024
    return f"{size:.1f} {_PREFIXES[-1]}"


def _folder(text: str) -> Location:
    """Return the folder of datasets: the one given, or the one in a run directory.

    Raises:
        InvalidInputError: it is a file, or is not there.
    """
    inner = RunDirectory(text)
    if inner.config.exists():
        return inner.data
    folder = inner.location
    if folder.stat() is not None:
        raise InvalidInputError(f"{folder} is a file; give the folder that holds datasets")
    # Object stores know no empty folders: there it may be a cache of which nothing is left.
    if folder.has_atomic_rename and not folder.exists():
        raise InvalidInputError(f"{folder} does not exist; give the folder that holds datasets")
    return folder


def list_command(arguments: argparse.Namespace) -> int:
    """Print the datasets in ``arguments.folder``."""
    folder = _folder(arguments.folder)
    datasets = list_datasets(folder)
    show(*_describe_datasets(datasets, time.time()), f"{_count(datasets)} in {folder}")
    return 0


def clear_command(arguments: argparse.Namespace) -> int:
    """Delete the datasets in ``arguments.folder`` that were not used for a time; print them."""
    age = _parse_age(arguments.older_than)
    folder = _folder(arguments.folder)
    deleted = clear_datasets(folder, age, time.time())
    show(*_describe_datasets(deleted, time.time()), f"deleted {_count(deleted)} in {folder}")
    return 0


def _count(datasets: Sequence[StoredDataset]) -> str:
    number = len(datasets)
    size = _describe_size(sum(dataset.size for dataset in datasets))
    return f"{number} dataset{'' if number == 1 else 's'}, {size},"
