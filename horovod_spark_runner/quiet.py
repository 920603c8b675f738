"""Importing frameworks: without the notices they print on every start, and sooner."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Hold back what native code writes to standard error; shown only if the imports fail.

    TensorFlow's C++ libraries write some notices before any setting of theirs can stop them.
    Garbage is not collected meanwhile: to look, again and again, at all that an import makes, none
    of which goes, is a quarter of TensorFlow's import.
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
