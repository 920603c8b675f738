"""Storage that fails for a moment is asked again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from ..errors import CheckpointError

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Seconds to wait before storage that has failed is asked again.
PAUSES = (1.0, 4.0)


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
            if seconds is None:
                hint = f". {advice}" if advice else ""
                raise CheckpointError(f"{what}: {error}{hint}") from error
            logger.warning("%s and is tried again: %s", what, error)
            pause(seconds)
