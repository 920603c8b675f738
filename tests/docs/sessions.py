"""Settings of Spark for scripts that make their session themselves."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def with_own_daemon(folder: Path) -> dict[str, str]:
    """Return the environment of a script whose Spark has the tests' daemon of Python workers.

    Args:
        folder: for the file of settings.
    """
    settings = folder / "conf"
    settings.mkdir(exist_ok=True)
    (settings / "spark-defaults.conf").write_text("spark.python.daemon.module tests.python_daemon")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"SPARK_CONF_DIR": str(settings), "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **own}
