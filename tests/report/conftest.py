"""Fixtures for tests of reports."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from .browser import Browser

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture
def browser(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Browser, None, None]:
    """A browser; the pictures it took stay if the test fails, and it says where."""
    yield Browser(tmp_path)
    if request.node.stash.get(_FAILED, False):
        pictures = sorted(map(str, tmp_path.glob("*.png")))
        print("what the browser has seen:", *pictures, sep="\n  ")
    else:
        for picture in tmp_path.glob("*.png"):
            picture.unlink()
