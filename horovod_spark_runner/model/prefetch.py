"""A thread that prepares the next batch while the one before it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
P = TypeVar("P")


class Prepared(Generic[T, P]):
    """Prepares things one ahead of their use; a context, at whose end its thread ends.

    Args:
        prepare: what makes one ready.
        ahead: whether a thread does; without one, each is prepared when it is its turn.
    """

    def __init__(self, prepare: Callable[[T], P], *, ahead: bool) -> None:
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hsr-prepare") if ahead else None

    def __enter__(self) -> Prepared[T, P]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def each(self, things: Sequence[T]) -> Iterator[tuple[T, P]]:
        """Yield each thing and what it was made into.

        Raises:
            Exception: whatever ``prepare`` raised, at the turn of what it could not prepare.
        """
        if self._pool is None:
            for thing in things:
                yield thing, self._prepare(thing)
            return
        coming = self._pool.submit(self._prepare, things[0])
        for thing, follower in zip(things, (*things[1:], None), strict=True):
            prepared = coming.result()
            if follower is not None:
                coming = self._pool.submit(self._prepare, follower)
            yield thing, prepared
