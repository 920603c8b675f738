"""A script that is only looked at: what it would train is handed over, and nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

# Of the whole process: a script may train in threads.
_take: Callable[[Any], NoReturn] | None = None


def hand_over_to(take: Callable[[Any], NoReturn]) -> None:
    """Let trainings that are begun from now on, in any thread, be handed over instead.

    There is no way back: threads of a script, and what it has left to ``atexit``, go on after it.

    Args:
        take: is given the `TrainingRequest`, or the function that `HorovodRunner` was to run; never
            returns.
    """
    global _take
    _take = take


def hand_over(asked: Any) -> None:
    """Hand over what is asked for, if it is not to be carried out: then this does not return."""
    if _take is not None:
        _take(asked)
