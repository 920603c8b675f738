"""With ``HSR_REQUIRE_ALL=1``: a test that is skipped has failed.

What a machine lacks is easily taken for a success. Where all is said to be there, as in CI, a skip
says that something has gone missing.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

# Tests, or files of them, that may be skipped even so, and why.
MAY_BE_SKIPPED = {
    "tests/gpu/test_build.py::test_horovod_with_nccl_is_built_loads_and_adds_up": (
        "downloads gigabytes of CUDA, so it is run by hand"
    ),
    **dict.fromkeys(
        (
            "tests/spark/test_large_models.py::test_few_copies_are_made_of_a_model[4500000]",
            "tests/spark/test_large_models.py::test_a_trained_model_stays_out_of_the_driver[4500000]",
        ),
        "2 GB, for minutes, so it is run by hand: HSR_TEST_LARGE=1",
    ),
    "tests/kubernetes/test_kubernetes.py": (
        "needs an API server that takes a quarter of an hour to build; the summary says so loudly"
    ),
    "tests/mpi/test_hdfs.py": (
        "fetches Hadoop's server from PyPI and Debian; the summary says loudly where it cannot"
    ),
    "tests/tables/test_tables.py": (
        "fetches Spark from PyPI and packages from Maven; the summary says loudly where it cannot"
    ),
    "tests/yarn/test_yarn.py": (
        "fetches Hadoop's servers with Maven; the summary says loudly where it cannot"
    ),
    "tests/unit/test_learning_rate.py::test_optimizers_that_others_wrap_are_scaled": (
        "Keras for Python 3.10 has no such optimizers"
    ),
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _required(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    return (yield from _required(collector.nodeid))


def _required(name: str) -> Generator[None, Any, Any]:
    report = yield
    allowed = {name, name.partition("::")[0]} & MAY_BE_SKIPPED.keys()
    if report.skipped and not hasattr(report, "wasxfail") and not allowed:
        path, line, reason = report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason}. HSR_REQUIRE_ALL wants all tests to run ({path}:{line})"
    return report
