"""Prepared data that several trainings read: written for the first of them, kept for the last."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

from .datasets import Prepared


class SharedData:
    """Data for a number of trainings; safe for threads, which wait for the first to write them.

    They may be several datasets of the same rows, such as the folds of a cross-validation.

    They are deleted, where they are not to be kept, after the last training, or once nothing refers
    to this object any more.

    Args:
        prepare: prepares them all, by key, and cleans up at its exit.
        users: how many trainings there will be.
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
        self._found: Mapping[str | None, Prepared] = {}
        self._cleanup = weakref.finalize(self, self._held.close)

    @contextlib.contextmanager
    def use(self, key: str | None) -> Iterator[Prepared]:
        """Yield the data of a key, for one of the trainings.

        Raises:
            DataError: the values cannot be trained on.
        """
        try:
            with self._lock:  # the others wait here until the first has written them
                given = self._found or self._held.enter_context(self._prepare())
                self._found = {one: replace(data, reused=True) for one, data in given.items()}
            yield given[key]
        finally:
            self.leave()

    def leave(self) -> None:
        """Take note that one of the trainings needs the data no more, or will not be."""
        with self._lock:
            self._left -= 1
            if not self._left:
                self._cleanup()
