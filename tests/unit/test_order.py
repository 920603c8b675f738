"""Files of tests that take long come first, each with its tests in their own order."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.order import LONG, THOROUGH, pytest_collection_modifyitems

ROOT = Path(__file__).parents[2]


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


def test_long_files_come_first_and_thorough_ones_last() -> None:
    found = [
        f"{THOROUGH[1]}::y",
        "tests/cluster/test_short.py::one",
        *(f"{LONG[1]}::{name}" for name in "ba"),
    ]
    found += [f"{LONG[0]}::x", "tests/unit/test_short.py::two"]
    items: Any = [Item(name) for name in found]
    pytest_collection_modifyitems(cast("list[pytest.Item]", items))
    first, *rest = [item.nodeid for item in items]
    assert first == f"{LONG[0]}::x"
    assert rest == [found[2], found[3], found[1], found[5], found[0]]


def test_long_files_are_files_of_tests() -> None:
    files = [*LONG, *THOROUGH]
    assert len(set(files)) == len(files)
    assert [name for name in files if not (ROOT / name).is_file()] == []
