"""What the tests of trainings share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def small(digits_df: Any) -> Any:
    """The first 500 digits."""
    return digits_df.filter("id < 500").cache()
