"""The search of Spark's that asks for several fits, and whether anybody waits for it any more.

``CrossValidator`` and ``TrainValidationSplit`` fit in threads of their own. Ctrl-C ends the thread
that waits for those, and they go on with one fit after the other: Spark tells them nothing.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

from ..errors import RunCancelledError
from ..launch.shared.messages import Progress

_SEARCHES, _SEARCHING = "pyspark.ml.tuning", "_fit"


class Asker:
    """The search whose thread makes this object, if there is one; follows its trainings."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        # Held, as another call's could be at the same place otherwise.
        self._frame = _searching(sys._getframe())
        self._is_gone = False

    def epoch(self, progress: Progress) -> None:
        """A search does not look into its fits."""

    def look(self) -> None:
        """Raise if the search has ended before its fits.

        Raises:
            RunCancelledError: it was interrupted, or another fit has failed.
        """
        frame = self._frame
        if frame is not None and not _is_in(self._thread, frame):
            self._is_gone = True
            self.forget()
        if self._is_gone:
            raise RunCancelledError(
                "the search that asked for this fit has ended before it: it was interrupted, or "
                "another of its fits has failed"
            )

    def forget(self) -> None:
        """Hold on to nothing of the search."""
        self._frame = None


def _searching(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == (_SEARCHES, _SEARCHING):
            return frame
        frame = frame.f_back
    return None


def _is_in(thread: int, wanted: FrameType) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None
