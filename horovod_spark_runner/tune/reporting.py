"""Keeps the page of a study up to date while its search goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..storage.filesystem import Location
from .directory import StudyDirectory
from .page import StudyFacts, study_page
from .result import trial_line

if TYPE_CHECKING:
    from .study import Study

# Of the time of a search, what drawing may take at most: trials need the driver meanwhile.
_SHARE = 0.02

logger = logging.getLogger(__name__)


def study_facts(
    study: Study, directory: StudyDirectory, record: Mapping[str, Any], *, searching: bool
) -> StudyFacts:
    """Return what is known of a study.

    Args:
        study: its trials.
        directory: its directory.
        record: what it was begun with.
        searching: whether a search goes on there.
    """
    trials, best = study.trials(), study.best()
    return StudyFacts(
        place=str(directory.location),
        record=record,
        searching=searching,
        best=None if best is None else best.number,
        trials=[trial_line(one, directory, searching=searching) for one in trials],
        reported={one.number: dict(one.intermediate_values) for one in trials},
        importances=study.importances(),
        log=frozenset(
            name
            for one in trials
            for name, chosen in one.distributions.items()
            if getattr(chosen, "log", False)
        ),
    )


class PageWriter:
    """Writes a study's page on a thread of its own whenever there is news, and once in the end.

    A page is no reason to lose a search: what goes wrong is warned of, once.

    Args:
        place: where the page goes.
        read: returns what is known; takes whether the search goes on.
    """

    def __init__(self, place: Location, read: Callable[[bool], StudyFacts]) -> None:
        self._place, self._read = place, read
        self._news, self._closed = threading.Event(), threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._serve, name="hsr-study-page", daemon=True)

    def __enter__(self) -> PageWriter:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._news.set()
        self._thread.join()
        self._write(searching=False)

    def tell(self) -> None:
        """Say that there is news; returns at once."""
        self._news.set()

    def _serve(self) -> None:
        while not self._closed.is_set():
            self._news.wait()
            self._news.clear()
            if not self._closed.is_set():
                began = time.monotonic()
                self._write(searching=True)
                self._closed.wait((time.monotonic() - began) / _SHARE)

    def _write(self, *, searching: bool) -> None:
        try:
            self._place.write_text(study_page(self._read(searching)))
        except Exception as error:
            if not self._failed:
                self._failed = True
                logger.warning("%s could not be written: %r", self._place, error)
