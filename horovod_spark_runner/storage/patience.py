"""Storage that fails for a moment is asked again; on storage that hangs nobody waits for ever."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from ..errors import CheckpointError, InvalidInputError, escaped

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Seconds to wait before storage that has failed is asked again.
PAUSES = (1.0, 4.0)
# How long storage may take for one answer, in seconds, and the variable that says otherwise.
ANSWER_SECONDS = 300.0
ANSWER_VARIABLE = "HSR_STORAGE_TIMEOUT"
_LONGEST_WAIT = 1e8  # three years; Python cannot wait for any number of seconds


class HungError(TimeoutError):
    """The storage does not answer, which a second try would not change."""


class Headway:
    """When a piece of work on storage last came further."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def made(self) -> None:
        self.last = time.monotonic()


def answered(act: Callable[[Headway], T], what: str) -> T:
    """Return what ``act`` does, unless the storage stops answering.

    It runs in a thread of its own: a call that hangs in the kernel, on a network file system whose
    server is away, can be left but not ended.

    Args:
        act: reads or writes; tells of its headway if it takes several steps.
        what: the place, for the message.

    Raises:
        HungError: it made no headway for `answer_seconds`.
    """
    limit, headway, done = answer_seconds(), Headway(), Future[T]()
    threading.Thread(
        target=_answer, args=(act, headway, done), name="hsr-storage", daemon=True
    ).start()
    while not done.done():
        left = headway.last + limit - time.monotonic()
        if left <= 0:
            raise _hung(what, limit)
        wait([done], timeout=left)
    try:
        return done.result()
    finally:
        del done  # an error and what it refers to would keep each other alive


def awaited(future: Future[T], what: str) -> T:
    """Return what another thread reads or writes, unless the storage stops answering.

    Args:
        future: what it is at.
        what: the place, for the message.

    Raises:
        HungError: it was waited for as long as `answer_seconds`.
    """
    limit = answer_seconds()
    wait([future], timeout=limit)
    if not future.done():
        raise _hung(what, limit)
    return future.result()


def _hung(what: str, limit: float) -> HungError:
    return HungError(f"{what}: the storage has not answered for {limit:g} s")


def _answer(act: Callable[[Headway], T], headway: Headway, done: Future[T]) -> None:
    try:
        done.set_result(act(headway))
    except BaseException as error:  # raised where it is waited for
        done.set_exception(escaped(error))
    finally:
        del done


def answer_seconds() -> float:
    """Return how long storage may take for one answer.

    Raises:
        InvalidInputError: the variable that says so is no number of seconds.
    """
    text = os.environ.get(ANSWER_VARIABLE, "")
    if not text:
        return ANSWER_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:  # also of nan
        raise InvalidInputError(f"{ANSWER_VARIABLE} must be a number of seconds, got {text!r}")
    return min(seconds, _LONGEST_WAIT)


def patiently(
    act: Callable[[], T],
    what: str,
    advice: str = "",
    pause: Callable[[float], None] = time.sleep,
) -> T:
    """Return what ``act`` does, which is tried again if the storage fails.

    Args:
        act: reads or writes something.
        what: what has not been possible if it fails, for the message.
        advice: what there is to know or do then.
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
            logger.warning("%s and is tried again: %s", what, error)
            pause(seconds)
