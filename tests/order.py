"""The order of the tests: files that take long first, so that no lane ends with one of them.

Lanes take whole files, the next one in this order when theirs is nearly done. Last come those that
go over in many more cases what others test once. Where there is no end of time, they are run as all
others are; where ``HSR_TEST_END`` names one, in seconds since the epoch, none of their tests begins
in the last minutes before it, and the summary names what was left out.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

# Those that take more than a minute, the longest first.
LONG = (
    "tests/cluster/test_clusters.py",
    "tests/docs/test_readme.py",
    "tests/mpi/test_estimator.py",
    "tests/mpi/test_failures.py",
    "tests/mpi/test_training.py",
    "tests/cluster/test_hosts.py",
    "tests/mpi/test_what_keras_users_bring.py",
    "tests/mpi/test_ready.py",
)
# Those of many cases, and of what hardly changes: first what would be missed most.
THOROUGH = (
    "tests/docs/test_examples.py",
    "tests/conformance/test_conformance.py",
    "tests/mpi/test_tune.py",
    "tests/faults/test_faults.py",
    "tests/conformance/test_more_cases.py",
    "tests/conformance/keras_suite/test_keras_own_tests.py",
    "tests/faults/test_phases.py",
    "tests/faults/test_storage.py",
    "tests/faults/test_network.py",
    "tests/cluster/test_driver_ends.py",
    "tests/mpi/test_compression.py",
    "tests/cluster/test_gpus.py",
    "tests/spark/test_large_models.py",
    "tests/cluster/test_packed.py",
    "tests/cluster/test_many_hosts.py",
)
# What the longest of their tests takes on a slow machine.
LAST_MINUTES = 25
END = "HSR_TEST_END"
LEFT_OUT = "left out for want of time"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {file: place for place, file in enumerate(LONG)}
    others = len(places)
    places |= {file: others + 1 + place for place, file in enumerate(THOROUGH)}
    items.sort(key=lambda item: places.get(file_of(item.nodeid), others))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    end = os.environ.get(END)
    if end and file_of(item.nodeid) in THOROUGH and time.time() > float(end) - LAST_MINUTES * 60:
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    files = Counter(file_of(one.nodeid) for one in skipped if LEFT_OUT in str(one.longrepr))
    if files:
        told = ", ".join(f"{count} of {file}" for file, count in files.items())
        terminalreporter.section("not everything was tested", red=True, bold=True)
        terminalreporter.line(
            f"{LEFT_OUT}: {told}. ./scripts/test runs them, however long it takes"
        )


def file_of(name: str) -> str:
    """Return the file of a test."""
    return name.partition("::")[0]
