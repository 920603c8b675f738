"""Import frameworks without their notices, and faster."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppress output of native code to standard error, unless the imports fail.

    TensorFlow's C++ libraries print some notices before any of their settings can stop them.
    Garbage collection is paused: it is a quarter of TensorFlow's import, and frees nothing.
    """
    collects = gc.isenabled()
    gc.disable()
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(saved, held.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            if collects:
                gc.enable()
