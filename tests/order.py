"""The order of the tests: files that take long first, so that no lane ends with one of them.

Lanes take whole files, the next one in this order when theirs is nearly done.
"""

from __future__ import annotations

import pytest

# Those that take more than a minute, the longest first.
LONG = (
    "tests/faults/test_faults.py",
    "tests/conformance/keras_suite/test_keras_own_tests.py",
    "tests/conformance/test_conformance.py",
    "tests/faults/test_phases.py",
    "tests/cluster/test_clusters.py",
    "tests/spark/test_large_models.py",
    "tests/docs/test_examples.py",
    "tests/faults/test_network.py",
    "tests/cluster/test_packed.py",
    "tests/mpi/test_tune.py",
    "tests/cluster/test_driver_ends.py",
    "tests/cluster/test_many_hosts.py",
    "tests/cluster/test_hosts.py",
    "tests/faults/test_storage.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {file: place for place, file in enumerate(LONG)}
    items.sort(key=lambda item: places.get(file_of(item.nodeid), len(LONG)))


def file_of(name: str) -> str:
    """Return the file of a test."""
    return name.partition("::")[0]
