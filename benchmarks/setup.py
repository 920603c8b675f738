"""Measure the set-up, from a fresh clone with an empty cache to a trained model.

A clone of the last commit in a temporary folder, with a home folder of its own, so that no cache
of packages or of Horovod's wheel is there: ``./scripts/demo``, the same again, and
``./scripts/setup`` for the tests. With ``--tests`` the core tests follow. ``--interrupted`` ends
a set-up by Ctrl-C, again and again, each time later, before one that may end.

Run it with ``python benchmarks/setup.py`` on a quiet machine; ``--write`` puts the table into
``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import GOAL_HEAD, goal, present, shown_command, table

ROOT = Path(__file__).resolve().parent.parent
# What a user's machine has not: settings and caches that would be found outside the new home.
UNSET = ("HSR_", "UV_", "XDG_CACHE_HOME", "PIP_CACHE_DIR", "VIRTUAL_ENV", "PYTHONPATH")


class Machine:
    """A clone of this checkout, and a home folder in which nothing has been cached.

    Args:
        folder: where both are made.
    """

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        home = folder / "home"
        home.mkdir()
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(UNSET)},
            "HOME": str(home),
            # pyenv finds its Pythons by the home folder.
            "HSR_PYTHON": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
        }
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.checkout)], check=True)

    def run(self, *command: str, interrupt_after: float | None = None) -> float:
        """Run a script of the clone and return the seconds it took."""
        began = time.monotonic()
        print(f"$ {' '.join(command)}", flush=True)
        running = subprocess.Popen(
            command, cwd=self.checkout, env=self._environment, start_new_session=True
        )
        try:
            status = running.wait(interrupt_after)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGINT)  # as a terminal does
            status = running.wait(60)
            print(f"interrupted after {interrupt_after:.0f} s: exit code {status}", flush=True)
            return time.monotonic() - began
        if status:
            raise SystemExit(f"{' '.join(command)} failed with exit code {status}")
        return time.monotonic() - began

    def phases(self) -> dict[str, float]:
        """Return the seconds of the last set-up's phases."""
        state = json.loads((self.checkout / ".venv" / ".set-up.json").read_text())
        return {str(name): float(seconds) for name, seconds in state["seconds"].items()}

    def gigabytes(self) -> float:
        """Return what the environment takes."""
        output = subprocess.run(
            ["du", "-sk", str(self.checkout / ".venv")], check=True, capture_output=True, text=True
        ).stdout
        return int(output.split()[0]) / 1e6


def measure(tests: bool) -> str:
    """Return the tables."""
    with tempfile.TemporaryDirectory(prefix="hsr-setup-") as folder:
        machine = Machine(Path(folder))
        demo = machine.run("./scripts/demo")
        phases = {"demo": machine.phases()}
        size = machine.gigabytes()
        again = machine.run("./scripts/demo")
        setup = machine.run("./scripts/setup")
        phases["tests"] = machine.phases()
        goals = [
            goal("`./scripts/demo`, empty cache, seconds", demo, at_most=240),
            goal("the same again", again, at_most=45),
            goal("`./scripts/setup` for the tests after it", setup, at_most=240),
            goal("environment of the demo, GB", size, at_most=2.5),
        ]
        if tests:
            goals.append(goal("`./scripts/test`, core", machine.run("./scripts/test"), at_most=900))
    names = list(dict.fromkeys(name for each in phases.values() for name in each))
    rows = [[name, *(f"{each.get(name, 0):.0f}" for each in phases.values())] for name in names]
    text = "Where the set-up's seconds went; Horovod is compiled beside the rows before it:"
    return "\n".join([table(GOAL_HEAD, goals), "", text, "", table(["phase", *phases], rows)])


def interrupt() -> None:
    """Interrupt set-ups at increasing delays; the last one is not interrupted, and must work."""
    with tempfile.TemporaryDirectory(prefix="hsr-setup-") as folder:
        machine = Machine(Path(folder))
        for seconds in (0.5, 2, 5, 9, 14, 20, 30, 45, 70):
            machine.run("./scripts/demo", interrupt_after=seconds)
        machine.run("./scripts/demo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", action="store_true", help="run the core tests, too")
    parser.add_argument("--interrupted", action="store_true", help="only interrupt set-ups")
    parser.add_argument("--write", action="store_true", help="write the table into the docs")
    arguments = parser.parse_args()
    if arguments.interrupted:
        interrupt()
        return
    present("Set-up", shown_command(), measure(arguments.tests), arguments.write)


if __name__ == "__main__":
    main()
