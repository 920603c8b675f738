"""Default place of a run or a search."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

from ..cluster.spark.session import runs_on_this_machine
from ..errors import InvalidInputError

# Those of this process: several threads may begin a run in one second.
_named: set[str] = set()
_naming = threading.Lock()


def default_place(spark: Any, setting: str, folder: str) -> str:
    """Return where something goes that was given no place: named after the time, once each.

    Args:
        spark: the session, of a ``local`` master.
        setting: what names the place.
        folder: where it is to be.

    Raises:
        InvalidInputError: the executors are on other machines.
    """
    if not runs_on_this_machine(spark):
        raise InvalidInputError(
            f"{setting} is needed on a cluster: a place that the driver and all executors can "
            "write to"
        )
    now = str(Path(folder, time.strftime("%Y%m%d-%H%M%S")))
    with _naming:
        names = (now if number == 1 else f"{now}-{number}" for number in itertools.count(1))
        # What is there is of another process that began in this second, or of before a clock was
        # put back: a run would go on with it.
        name = next(name for name in names if name not in _named and not os.path.lexists(name))
        _named.add(name)
    return name
