"""Timeouts and retries of calls to storage."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from ..errors import CheckpointError, InvalidInputError, escaped

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Seconds to wait before each retry.
PAUSES = (1.0, 4.0)
# Seconds that storage may take to answer, and the environment variable that overrides them.
TIMEOUT_SECONDS = 300.0
TIMEOUT_VARIABLE = "HSR_STORAGE_TIMEOUT"
_LONGEST_WAIT = 1e8  # three years; Python cannot wait for any number of seconds
# Seconds for another call meanwhile: the timeouts of a failing run's last calls must not add up.
_HANGING_SECONDS = 10.0
# The call that was abandoned last, and when.
_abandoned: tuple[Future[Any], float] | None = None


class HungError(TimeoutError):
    """The storage does not answer; a retry would not help."""


class Watchdog:
    """Time of the last progress of a call to storage."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Note progress: the timeout begins anew."""
        self.last = time.monotonic()


def call_with_timeout(act: Callable[[Watchdog], T], what: str) -> T:
    """Return the result of ``act``, unless the storage stops answering.

    It runs in a separate thread: a call that hangs in the kernel, on a network file system whose
    server is away, can be abandoned but not ended.

    Args:
        act: reads or writes; resets the watchdog after each step if it takes several.
        what: the place, for the message.

    Raises:
        HungError: it made no progress for `_timeout_seconds`; for 10 s, if another call was
            abandoned within that time and still hangs.
    """
    global _abandoned
    limit, watchdog, done = _timeout_seconds(), Watchdog(), Future[T]()
    if _abandoned is not None:
        hanging, since = _abandoned
        if not hanging.done() and time.monotonic() - since < limit:
            limit = min(limit, _HANGING_SECONDS)
    threading.Thread(
        target=_answer, args=(act, watchdog, done), name="hsr-storage", daemon=True
    ).start()
    while not done.done():
        left = watchdog.last + limit - time.monotonic()
        if left <= 0:
            _abandoned = done, time.monotonic()
            raise _hung(what, limit)
        wait([done], timeout=left)
    try:
        return done.result()
    finally:
        del done  # an error and what it refers to would keep each other alive


def await_with_timeout(future: Future[T], what: str) -> T:
    """Return the result of another thread's call, unless the storage stops answering.

    Args:
        future: the call's result.
        what: the place, for the message.

    Raises:
        HungError: it did not end within `_timeout_seconds`.
    """
    limit = _timeout_seconds()
    wait([future], timeout=limit)
    if not future.done():
        raise _hung(what, limit)
    return future.result()


def _hung(what: str, limit: float) -> HungError:
    return HungError(f"{what}: the storage has not answered for {limit:g} s")


def _answer(act: Callable[[Watchdog], T], watchdog: Watchdog, done: Future[T]) -> None:
    try:
        done.set_result(act(watchdog))
    except BaseException as error:  # raised where it is waited for
        done.set_exception(escaped(error))
    finally:
        del done


def _timeout_seconds() -> float:
    """Return the seconds that storage may take to answer.

    Raises:
        InvalidInputError: `TIMEOUT_VARIABLE` is not a number of seconds.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return TIMEOUT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:  # also of nan
        raise InvalidInputError(f"{TIMEOUT_VARIABLE} must be a number of seconds, got {text!r}")
    return min(seconds, _LONGEST_WAIT)


def retry(
    act: Callable[[], T],
    what: str,
    advice: str = "",
    pause: Callable[[float], None] = time.sleep,
) -> T:
    """Return the result of ``act``, which is retried if the storage fails.

    Args:
        act: reads or writes something.
        what: the failure, for the message.
        advice: what to know or do then.
        pause: how to wait; for tests.

    Raises:
        CheckpointError: the storage failed each time.
    """
    pauses = iter(PAUSES)
    while True:
        try:
            return act()
        except OSError as error:
            seconds = next(pauses, None)
            if seconds is None or isinstance(error, HungError):
                hint = f". {advice}" if advice else ""
                raise CheckpointError(f"{what}: {error}{hint}") from error
            logger.warning("%s and is retried: %s", what, error)
            pause(seconds)
