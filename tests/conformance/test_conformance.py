"""Whatever Keras trains, we train as ``fit`` would: one test for each case and each claim."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .case import Case
from .run import CHECKS
from .supervise import World, differences, start
from .table import CASES

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def worlds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, World]]:
    """Both worlds, at work on the cases of the tests that were asked for."""
    items = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    asked: list[Any] = [item.callspec.params["case"] for item in items]
    names = {case.name for case in asked}
    chosen = [case for case in CASES if case.name in names]
    started = start(tmp_path_factory.mktemp("conformance"), chosen)
    yield started
    for world in started.values():
        world.stop()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(worlds: dict[str, World], case: Case, check: str) -> None:
    function, parts = CHECKS[check]
    found = differences(case, worlds, function, *parts)
    assert not found, "\n" + "\n".join(found)
