"""Folds of a DataFrame, as for cross-validation, with every row written once.

Rows that all splits treat equally form one dataset. A split's training rows and validation rows are
unions of such datasets.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from ...config.data import DataOptions
from ...errors import DataError
from ...storage.filesystem import Location
from ..manifest import Manifest, RowGroup
from .checks import NO_ROWS
from .datasets import Prepared, frame_of, match_columns, track_datasets
from .materialize import join_checksums, materialize
from .schema import Roles
from .split import cache_rows, validation_condition


@contextlib.contextmanager
def prepare_folds(
    data: object,
    roles: Roles,
    options: DataOptions,
    indicators: Sequence[str],
    run_folder: Location,
) -> Iterator[Mapping[str | None, Prepared]]:
    """Yield the datasets of each split; delete those that are not kept afterwards.

    Args:
        data: a DataFrame, or the path of Parquet files.
        roles: the columns and their roles.
        options: how to prepare them.
        indicators: for each split, the column that is true for its validation rows.
        run_folder: folder for the datasets, if there is no cache directory.

    Raises:
        DataError: the values cannot be trained on, or a split leaves no rows to one side.
    """
    with track_datasets(data, roles, options, run_folder) as tracked:
        # The parts come from the same rows even if the frame is not deterministic.
        with cache_rows(frame_of(data)) as frame:
            flags = [validation_condition(frame, name) for name in indicators]
            distinct = frame.select(*(f.alias(str(n)) for n, f in enumerate(flags))).distinct()
            parts: dict[tuple[bool, ...], Manifest] = {}
            reused = True
            for kind in sorted(tuple(row) for row in distinct.collect()):
                rows = frame
                for flag, wanted in zip(flags, kind, strict=True):
                    rows = rows.filter(flag if wanted else ~flag)
                one = materialize(rows, tracked.request, tracked.folder)
                tracked.made.append(one)
                parts[kind] = one.manifest
                reused = reused and one.reused
        splits: dict[str | None, Prepared] = {
            name: _split(parts, number, name, reused=reused)
            for number, name in enumerate(indicators)
        }
        tracked.ready = True
        yield splits


def _split(
    parts: Mapping[tuple[bool, ...], Manifest], number: int, name: str, *, reused: bool
) -> Prepared:
    """Return both sides of a split.

    Raises:
        DataError: one has no rows, or their columns differ.
    """
    train = _side(parts, number, name, wanted=False)
    held_out = _side(parts, number, name, wanted=True)
    try:
        return Prepared(train, match_columns(held_out, train), reused)
    except DataError as error:
        raise DataError(f"validation={name!r}: {error}") from error


def _side(
    parts: Mapping[tuple[bool, ...], Manifest], number: int, name: str, *, wanted: bool
) -> Manifest:
    """Return the rows whose indicator is ``wanted``."""
    chosen = [part for kind, part in parts.items() if kind[number] is wanted]
    side = "validation" if wanted else "train"
    if not chosen:
        raise DataError(f"{side} rows (validation={name!r}): {NO_ROWS}")
    try:
        return _unite(chosen)
    except DataError as error:
        raise DataError(f"{side} rows (validation={name!r}): {error}") from error


def _unite(parts: Sequence[Manifest]) -> Manifest:
    """Return the union of datasets in the same folder. Pure.

    Raises:
        DataError: their columns differ.
    """
    first = parts[0]
    matching = [first, *(match_columns(part, first, ("some rows", "others")) for part in parts[1:])]
    files: list[str] = []
    groups: list[RowGroup] = []
    for part in matching:
        folder = Location(part.url).name
        groups += [replace(group, file=len(files) + group.file) for group in part.row_groups]
        files += [f"{folder}/{file}" for file in part.files]
    return replace(
        first,
        url=str(Location(first.url).parent),
        files=tuple(files),
        row_groups=tuple(groups),
        checksum=join_checksums([part.checksum for part in matching]),
        file_sizes=tuple(size for part in matching for size in part.file_sizes),
        footers=tuple(footer for part in matching for footer in part.footers),
        source="",
        row_order=".".join(part.row_order for part in matching),
        verified=all(part.verified for part in matching),
    )


class SharedData:
    """Data of several trainings; safe for threads, which wait for the first to write them.

    They may be several datasets of the same rows, such as the folds of a cross-validation. Unless
    they are kept, they are deleted after the last training, or with this object.

    Args:
        prepare: prepares them all, by key, and cleans up at its exit.
        users: number of trainings.
    """

    def __init__(
        self,
        prepare: Callable[[], AbstractContextManager[Mapping[str | None, Prepared]]],
        users: int,
    ) -> None:
        self._prepare = prepare
        self._left = users
        self._lock = threading.Lock()
        self._held = contextlib.ExitStack()
        self._datasets: Mapping[str | None, Prepared] = {}
        self._cleanup = weakref.finalize(self, self._held.close)

    @contextlib.contextmanager
    def use(self, key: str | None) -> Iterator[Prepared]:
        """Yield the data of a key, for one of the trainings.

        Raises:
            DataError: the values cannot be trained on.
        """
        try:
            with self._lock:  # the others wait here until the first has written them
                datasets = self._datasets or self._held.enter_context(self._prepare())
                self._datasets = {one: replace(data, reused=True) for one, data in datasets.items()}
            yield datasets[key]
        finally:
            self.leave()

    def leave(self) -> None:
        """Note that one of the trainings has ended, or will not take place."""
        with self._lock:
            self._left -= 1
            if not self._left:
                self._cleanup()
