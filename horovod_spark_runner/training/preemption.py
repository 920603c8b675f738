"""The request to end soon: SIGTERM, as spot instances and decommissioned nodes send it."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class PreemptionWatch:
    """Notes a SIGTERM instead of dying of it; use as a context manager, in the main thread."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> PreemptionWatch:
        self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
