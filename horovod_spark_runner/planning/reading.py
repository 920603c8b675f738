"""What reading rows costs at first."""

from __future__ import annotations

import contextlib
import itertools
import time

from ..launch.worker.reporting import report_progress
from ..training.epochs import Epochs


def read_at_first(epochs: Epochs, seconds: float, *, whole: bool) -> tuple[float, float]:
    """Return the rows per second that are read at first, and the processor seconds of a row.

    Rows that are kept take memory that nobody has used before, which may cost more than reading
    them: one whole first pass tells, however long.

    Args:
        epochs: the passes, of which no row has been read yet.
        seconds: how long to read where rows are not kept, so that each pass is as the first; half
            of it is enough where a pass ends by itself.
        whole: read one pass, to its end.
    """
    began, cpu, rows = time.perf_counter(), time.process_time(), 0
    for number in itertools.count():
        with contextlib.closing(epochs.steps_from(number)) as steps:
            for step in steps:
                rows += step.batch.rows
                report_progress()
                if not whole and time.perf_counter() - began > seconds:
                    break
        spent = time.perf_counter() - began
        if whole or spent > seconds / 2:
            break
    rows = max(rows, 1)
    return rows / spent, (time.process_time() - cpu) / rows
