"""Several trainings on the same rows, prepared once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ..config.data import WINDOW_BYTES, DataOptions
from ..config.training import TrainingConfig
from ..data.prepare.datasets import Prepared
from ..data.prepare.folds import SharedData, prepare_folds
from ..model.transformer import TrainedTransformer
from ..storage.filesystem import Location
from .pipeline import import_ahead, prepare_data, train_run
from .resolve import ResolvedRun, resolve

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class SharedFit:
    """One of several trainings that share their rows; called once, or abandoned."""

    run: ResolvedRun
    shared: SharedData

    def __call__(self) -> TrainedTransformer:
        use = partial(self.shared.use, _key(self.run))
        return train_run(self.run, use)

    def abandon(self) -> None:
        """Give up this training; the rows are deleted after the last one."""
        self.shared.leave()


def train_several(
    df: DataFrame, configs: Sequence[TrainingConfig], run_folder: Location
) -> list[SharedFit]:
    """Resolve all configurations, and return a `SharedFit` for each.

    They may be called by several threads. Those with equally prepared rows share the datasets,
    which the first of them writes and which are deleted, unless they are kept, after the last one;
    also if they differ in the column of validation rows.

    Args:
        df: the rows.
        configs: the trainings.
        run_folder: folder for the datasets if there is no cache directory.

    Raises:
        InvalidInputError: a training cannot be carried out.
        NotEnoughSlotsError: Spark cannot run as many tasks at once.
        EnvironmentProblem: something is not installed or set up.
    """
    runs = [resolve(df, config) for config in configs]
    groups: list[list[ResolvedRun]] = []
    for run in runs:
        matching = next((group for group in groups if _share(group[0], run)), None)
        if matching is None:
            groups.append([run])
        else:
            matching.append(run)
    fits: dict[int, SharedFit] = {}
    for number, group in enumerate(groups):
        # In separate folders: the next writer in one deletes incomplete datasets.
        folder = run_folder if len(groups) == 1 else run_folder.join(str(number))
        shared = SharedData(partial(_prepare, group, folder), len(group))
        for run in group:
            fits[id(run)] = SharedFit(run, shared)
    return [fits[id(run)] for run in runs]


def _share(one: ResolvedRun, other: ResolvedRun) -> bool:
    """Return whether the rows of two trainings can be prepared together."""
    ours, theirs = one.config, other.config
    split = ours.validation is theirs.validation
    if _key(one) is not None:
        split = _key(other) is not None
    elif isinstance(ours.validation, float):  # others may be DataFrames, which do not compare
        split = ours.validation == theirs.validation and one.fit.seed == other.fit.seed
    same_options = _of_rows(ours.data) == _of_rows(theirs.data)
    return split and one.columns.roles == other.columns.roles and same_options


def _key(run: ResolvedRun) -> str | None:
    """Return the column of validation rows, if there is one."""
    validation = run.config.validation
    return validation if isinstance(validation, str) else None


@contextlib.contextmanager
def _prepare(
    group: Sequence[ResolvedRun], run_folder: Location
) -> Iterator[Mapping[str | None, Prepared]]:
    first = group[0]
    import_ahead(first)
    names = [name for name in dict.fromkeys(map(_key, group)) if name is not None]
    if len(names) > 1:
        with prepare_folds(
            first.df, first.columns.roles, first.config.data, names, run_folder
        ) as folds:
            yield folds
    else:
        with prepare_data(first, run_folder) as data:
            yield {_key(first): data}


def _of_rows(options: DataOptions) -> DataOptions:
    """Return the options that affect the preparation of rows."""
    return replace(options, transforms={}, window_bytes=WINDOW_BYTES)
