"""What the two files of cases share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .supervise import World, start
from .table import CASES


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
