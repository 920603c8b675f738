"""Tiers of the tests: ``core``, which proves every promise, and ``thorough``, in parts.

A test is core unless it is marked ``thorough``. ``--tier core`` leaves the thorough ones out;
``--tier thorough`` takes only these, and ``--part`` those of one part. Files that take long come
first, so that no lane of xdist, which takes whole files, ends with one of them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from .affected import affected_tests

# Names of the parts of the thorough tests, and the folders and files of each: the first that fits.
PARTS: dict[str, tuple[str, ...]] = {
    "conformance": ("tests/conformance/",),
    "clusters": ("tests/cluster/", "tests/mpi/test_hdfs.py", "tests/mpi/test_object_store.py"),
    "yarn": ("tests/yarn/",),
    "kubernetes": ("tests/kubernetes/",),
    "faults": ("tests/faults/", "tests/mpi/test_failures.py"),
    "tables": ("tests/tables/",),
    "torch": ("tests/torch/",),
    "satellites": (
        "tests/docs/", "tests/report/", "tests/spark/test_export", "tests/training/test_export",
        "tests/mpi/test_tune.py", "tests/mpi/test_plan.py", "tests/unit/test_tune.py",
        "tests/unit/test_plan",
    ),
    "inference": ("tests/spark/", "tests/training/"),
    "training": ("tests/",),
}  # fmt: skip
# Seconds of each file of tests, by tier, as measured on two cores: ``--record`` writes it.
DURATIONS = Path(__file__).with_name("durations.json")


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=("core", "thorough"), help="run the tests of one tier only")
    group.addoption("--part", help=f"with --tier thorough: one of {', '.join(PARTS)}, or I/N")
    group.addoption("--record", action="store_true", help="record how long each file takes")


def pytest_configure(config: pytest.Config) -> None:
    tier, part = config.getoption("tier"), config.getoption("part")
    if part is not None:
        find_part(part)
    if part is not None and tier != "thorough":
        raise pytest.UsageError("--part needs --tier thorough")
    if config.getoption("record"):
        if tier is None:
            raise pytest.UsageError("--record needs --tier")
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Recorder(tier))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier, part = config.getoption("tier"), config.getoption("part")
    wanted = find_part(part) if part else None
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        is_thorough = item.get_closest_marker("thorough") is not None
        fits = (tier is None or is_thorough == (tier == "thorough")) and (
            wanted is None or part_of(file_of(item.nodeid)) == wanted
        )
        (chosen if fits else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
    seconds = load_durations(tier)
    items[:] = sorted(chosen, key=lambda item: -seconds.get(file_of(item.nodeid), 0))


def find_part(text: str) -> str:
    """Return the name of a part, given that or its number such as ``2/7``.

    Raises:
        pytest.UsageError: there is no such part.
    """
    number, _, count = text.partition("/")
    if number.isdecimal() and count == str(len(PARTS)) and 1 <= int(number) <= len(PARTS):
        return list(PARTS)[int(number) - 1]
    if text not in PARTS:
        listed = ", ".join(f"{n}/{len(PARTS)} {name}" for n, name in enumerate(PARTS, 1))
        raise pytest.UsageError(f"there is no part {text!r}; the parts are {listed}")
    return text


def part_of(file: str) -> str:
    """Return the part that a file of tests belongs to."""
    return next(name for name, starts in PARTS.items() if file.startswith(starts))


def file_of(name: str) -> str:
    """Return the file of a test."""
    return name.partition("::")[0]


def load_durations(tier: str | None = None) -> dict[str, float]:
    """Return the recorded seconds of each file of tests, of both tiers where ``tier`` is None."""
    durations: dict[str, dict[str, float]] = json.loads(DURATIONS.read_text())
    total: defaultdict[str, float] = defaultdict(float)
    for name in [tier] if tier else durations:
        for file, seconds in durations.get(name, {}).items():
            total[file] += seconds
    return dict(total)


def thorough_files(root: Path) -> dict[str, float]:
    """Return the files that have thorough tests, and their seconds: 1 where none are recorded."""
    known = load_durations("thorough")
    files = {
        str(path.relative_to(root)): path.read_text()
        for path in sorted((root / "tests").rglob("test_*.py"))
    }
    return {file: known.get(file, 1) for file, text in files.items() if "mark.thorough" in text}


def estimate_seconds(seconds: dict[str, float], lanes: int) -> float:
    """Return how long files of tests take in some lanes: no file is split."""
    return max([sum(seconds.values()) / lanes, *seconds.values(), 1.0])


def plan_parts(
    changed: list[str],
    graph: dict[str, set[str]],
    seconds: dict[str, float],
    day: int,
) -> list[str]:
    """Return the parts to run after a change, the first ones first.

    These are the parts with tests that the change can affect, those nearest to it first, and one
    rotating part: all are run in as many days as there are parts.

    Args:
        changed: changed files, relative to the root.
        graph: imports, as `tests.affected.import_graph` returns them.
        seconds: those of `thorough_files`.
        day: number of the day.
    """
    weight: defaultdict[str, float] = defaultdict(float)
    for file, distance in affected_tests(changed, graph).items():
        if file in seconds:
            weight[part_of(file)] += seconds[file] / 2**distance
    names = list(PARTS)
    rotating = names[day % len(names)]
    planned = sorted(weight, key=lambda name: -weight[name])
    return [*planned, *([] if rotating in planned else [rotating])]


class Recorder:
    """Sums up how long the tests of each file take, and writes it to `DURATIONS`.

    Files that were run replace what was recorded of them in their tier; files that are gone are
    dropped. A session that was interrupted or had errors records nothing.

    Args:
        tier: the tier that is run.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        durations = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        known = {**durations.get(self._tier, {}), **self._seconds}
        root = DURATIONS.parents[1]
        durations[self._tier] = {
            file: max(1, round(known[file])) for file in sorted(known) if (root / file).exists()
        }
        DURATIONS.write_text(json.dumps(durations, indent=1) + "\n")
