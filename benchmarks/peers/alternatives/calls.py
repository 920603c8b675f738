"""Notes how long a call took, for the benchmark."""

from __future__ import annotations

import time
from pathlib import Path


def note_call(out: str, call: int, seconds: float) -> None:
    """Note the seconds of a call, and the time at which it ended."""
    Path(f"{out}.call-{call}").write_text(f"{seconds} {time.time()}")
