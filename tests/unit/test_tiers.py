"""Tiers of the tests, their parts, and the parts that a change can affect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.affected import affected_tests, import_graph
from tests.tiers import (
    PARTS,
    estimate_seconds,
    find_part,
    load_durations,
    part_of,
    plan_parts,
    thorough_files,
)

ROOT = Path(__file__).parents[2]
GRAPH = {
    "horovod_spark_runner/errors.py": set[str](),
    "horovod_spark_runner/loop.py": {"horovod_spark_runner/errors.py"},
    "tests/torch/test_step.py": {"horovod_spark_runner/loop.py", "tests/models.py"},
    "tests/faults/test_kill.py": {"horovod_spark_runner/errors.py"},
    "tests/models.py": set[str](),
}
SECONDS = {"tests/torch/test_step.py": 60.0, "tests/faults/test_kill.py": 60.0}


def test_change_affects_its_users() -> None:
    affected = affected_tests(["horovod_spark_runner/errors.py"], GRAPH)
    assert affected == {"tests/torch/test_step.py": 2, "tests/faults/test_kill.py": 1}
    assert affected_tests(["tests/models.py"], GRAPH) == {"tests/torch/test_step.py": 1}
    assert affected_tests(["docs/tune.md"], GRAPH) == {"tests/docs/test_readme.py": 1}
    for unknown in ("setup.cfg", "somewhere/new.txt"):
        assert set(affected_tests([unknown], GRAPH)) == SECONDS.keys()


def test_parts_near_the_change_come_first_and_one_rotates() -> None:
    assert plan_parts(["horovod_spark_runner/errors.py"], GRAPH, SECONDS, day=0) == [
        "faults", "torch", "conformance",
    ]  # fmt: skip
    days = range(len(PARTS))
    assert [plan_parts([], GRAPH, SECONDS, day) for day in days] == [[name] for name in PARTS]


def test_graph_of_this_repository() -> None:
    """Imports in functions, lazy names, and modules and files named by strings count."""
    graph = import_graph(ROOT)
    package = "horovod_spark_runner"
    assert f"{package}/api.py" in graph["tests/trainings.py"]
    assert f"{package}/engines/keras/saved.py" in graph["tests/runs.py"]
    assert f"{package}/commands/doctor.py" in graph[f"{package}/commands/cli.py"]
    assert f"{package}/api.py" not in graph[f"{package}/__init__.py"]
    for changed, test in {
        f"{package}/training/loop.py": "tests/mpi/test_resume.py",
        f"{package}/tune/study.py": "tests/mpi/test_tune.py",
        f"{package}/data/read/__init__.py": "tests/unit/test_reader.py",
        f"{package}/cluster/programs/tether.py": "tests/cluster/test_hosts.py",
        "tests/cluster/job.py": "tests/cluster/test_clusters.py",
        "tests/spark/load_stage.py": "tests/spark/test_stage.py",
        "tests/patient.c": "tests/mpi/test_resume.py",
        "tests/strict.py": "tests/unit/test_reader.py",
        "scripts/standalone": "tests/cluster/test_clusters.py",
    }.items():
        assert test in affected_tests([changed], graph), changed
    assert "tests/mpi/test_resume.py" not in affected_tests([f"{package}/tune/study.py"], graph)


def test_every_part_has_tests_and_every_test_a_part() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    assert {part_of(file) for file in files} == set(PARTS)
    for start in (start for starts in PARTS.values() for start in starts):
        assert any(file.startswith(start) for file in files), start


def test_a_part_is_named_or_numbered() -> None:
    numbers = [find_part(f"{n}/{len(PARTS)}") for n in range(1, len(PARTS) + 1)]
    assert numbers == list(PARTS)
    assert find_part("faults") == "faults"
    for wrong in ("fault", f"0/{len(PARTS)}", f"{len(PARTS) + 1}/{len(PARTS)}", "1/2", ""):
        with pytest.raises(pytest.UsageError, match=f"{re.escape(wrong)}.*conformance"):
            find_part(wrong)


def test_no_part_takes_more_than_twenty_minutes() -> None:
    """In three lanes, where they were measured."""
    seconds = thorough_files(ROOT)
    for part in PARTS:
        files = {file: each for file, each in seconds.items() if part_of(file) == part}
        assert 0 < estimate_seconds(files, lanes=3) <= 20 * 60, part
    assert load_durations("thorough").keys() <= seconds.keys()
