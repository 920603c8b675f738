"""Requests to end soon: SIGTERM of spot instances and decommissioned nodes, Ctrl-C."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class SignalWatch:
    """Notes a signal instead of dying of it; use as a context manager.

    Outside the main thread, which handles signals, it notes nothing.

    Args:
        number: the signal.
        once: leave a second one to the handler from before, and one that is ignored alone.
    """

    def __init__(self, number: signal.Signals, *, once: bool = False) -> None:
        self.requested = False
        self._number, self._once = number, once
        self._handles = False
        self._before: Any = None

    def __enter__(self) -> SignalWatch:
        known = signal.getsignal(self._number)
        ignored = self._once and known in (signal.SIG_IGN, None)
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._before = signal.signal(self._number, self._on_signal)
            self._handles = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handles:
            signal.signal(self._number, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._once and self.requested:
            signal.signal(number, self._before)
            signal.raise_signal(number)
        self.requested = True
