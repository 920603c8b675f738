"""Files of tests that take long come first, each with its tests in their own order."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.order import LONG, pytest_collection_modifyitems

ROOT = Path(__file__).parents[2]


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


def test_long_files_come_first() -> None:
    found = ["tests/cluster/test_short.py::one", *(f"{LONG[1]}::{name}" for name in "ba")]
    found += [f"{LONG[0]}::x", "tests/unit/test_short.py::two"]
    items: Any = [Item(name) for name in found]
    pytest_collection_modifyitems(cast("list[pytest.Item]", items))
    first, *rest = [item.nodeid for item in items]
    assert first == f"{LONG[0]}::x"
    assert rest == [found[1], found[2], found[0], found[4]]


def test_long_files_are_files_of_tests() -> None:
    assert len(set(LONG)) == len(LONG)
    assert [name for name in LONG if not (ROOT / name).is_file()] == []
