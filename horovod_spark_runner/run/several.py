"""Several trainings on the same rows, which are prepared once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..data.prepare.shared import SharedData
from ..ml.transformer import TFTransformer
from ..settings.data import WINDOW_BYTES, DataOptions
from ..storage.filesystem import Location
from .pipeline import prepare_data, train_request
from .request import CheckedRequest, TrainingRequest, check_request


def train_several(
    requests: Sequence[TrainingRequest], own: Location
) -> list[Callable[[], TFTransformer]]:
    """Check all requests, and return a function for each that trains it.

    The functions may be called by several threads. Those whose rows are prepared in the same way
    read the same dataset, which the first of them writes and which goes, unless it is to be kept,
    with the last.

    Args:
        requests: what to train.
        own: folder for the datasets if there is no cache directory.

    Raises:
        InvalidInputError: a request cannot be carried out.
        NotEnoughSlotsError: Spark cannot run as many tasks at once.
        EnvironmentProblem: something is not set up as it must be.
    """
    groups: list[list[CheckedRequest]] = []
    for checked in map(check_request, requests):
        alike = next((group for group in groups if _same_data(group[0], checked)), None)
        if alike is None:
            groups.append([checked])
        else:
            alike.append(checked)
    calls: dict[int, Callable[[], TFTransformer]] = {}
    for number, group in enumerate(groups):
        # Each in a folder of its own: what a killed writer left in one is deleted by the next.
        folder = own if len(groups) == 1 else own.join(str(number))
        shared = SharedData(partial(prepare_data, group[0], folder), len(group))
        for checked in group:
            calls[id(checked.request)] = partial(train_request, checked, shared)
    return [calls[id(request)] for request in requests]


def _same_data(one: CheckedRequest, other: CheckedRequest) -> bool:
    """Tell whether two requests' rows are prepared in the same way."""
    ours, theirs = one.request, other.request
    held_out = ours.validation is theirs.validation
    if isinstance(ours.validation, (str, float)):  # others may be DataFrames, which do not compare
        held_out = ours.validation == theirs.validation
    return (
        ours.frame is theirs.frame
        and held_out
        and (not isinstance(ours.validation, float) or one.fit.seed == other.fit.seed)
        and one.roles == other.roles
        and _of_rows(ours.data) == _of_rows(theirs.data)
    )


def _of_rows(options: DataOptions) -> DataOptions:
    """Return the options without what matters to the reading of rows only."""
    return replace(options, transforms={}, window_bytes=WINDOW_BYTES)
