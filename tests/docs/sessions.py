"""Scripts that make their Spark session themselves, as users' do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# First words of a snippet for another program, which is not run.
BEFORE = "# Before: "
_SETTINGS = """\
# Python workers that need not import TensorFlow, each again.
spark.python.daemon.module tests.python_daemon
spark.ui.enabled false
spark.sql.shuffle.partitions 4
"""


def enter(folder: str) -> None:
    """Make this the working directory of the process, and of its Spark session if it has one.

    Args:
        folder: where relative paths begin from now on.
    """
    from pyspark.sql import SparkSession

    os.chdir(folder)
    if (session := SparkSession.getActiveSession()) is not None:
        files = session._jvm.org.apache.hadoop.fs
        local = files.FileSystem.get(session.sparkContext._jsc.hadoopConfiguration())
        local.setWorkingDirectory(files.Path(folder))


class Interpreter:
    """A Python that runs scripts one after the other, each as one that is started by itself.

    They share a folder and a Spark session, which takes longer to start than most of them.

    Args:
        folder: where they run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("interpreter.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=_environment(folder),
        )

    def run(self, script: Path, *arguments: str) -> tuple[str, str]:
        """Return what a script prints to standard output and error; fail if it fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(script), *arguments]), file=self._process.stdin, flush=True)
        code = self._process.stdout.readline().strip()
        out, err = ((self._folder / f"{script.stem}.{end}").read_text() for end in ("out", "err"))
        assert code == "0", err[-4000:]
        return out, err

    def end(self) -> None:
        """End it and its session."""
        try:
            self._process.communicate(timeout=60)
        finally:
            self._process.kill()


def snippets_of(text: str) -> list[str]:
    """Return the Python snippets of a document; some are within lists."""
    return [textwrap.dedent(one) for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


class Pages:
    """Documents whose snippets run one after the other, each document as a script of its own.

    Args:
        folder: where they run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._interpreter = Interpreter(folder)

    def run(self, name: str, text: str, *further: str) -> tuple[str, str]:
        """Return what the Python snippets of a document print to standard output and error.

        Args:
            name: name of the script, and of its folder.
            text: the document; snippets of other programs, which begin with `BEFORE`, are left out.
            further: code that follows.
        """
        snippets = [one for one in snippets_of(text) if not one.startswith(BEFORE)]
        assert snippets
        # What the runs of another page have left is none of this one's.
        (own := self._folder / name).mkdir()
        begin = f"from tests.docs.sessions import enter\nenter({str(own)!r})"
        script = self._folder / f"{name}.py"
        script.write_text("\n".join([begin, *snippets, *further]))
        return self._interpreter.run(script)

    def end(self) -> None:
        """End them and their session."""
        self._interpreter.end()


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment of scripts whose Spark has the tests' own settings.

    Args:
        folder: for the file of settings.
    """
    settings = folder / "conf"
    settings.mkdir()
    (settings / "spark-defaults.conf").write_text(_SETTINGS)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "SPARK_CONF_DIR": str(settings),
        # As the package has it from its first job on: one daemon of Python workers, not a second.
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(paths),
    }
