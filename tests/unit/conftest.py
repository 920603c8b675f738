"""Every warning is an error here."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..strict import make_warnings_errors


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    make_warnings_errors(items, Path(__file__).parent)
