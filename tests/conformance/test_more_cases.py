"""The cases that `test_conformance` leaves out."""

from __future__ import annotations

import pytest

from .case import Case
from .run import CHECKS
from .supervise import World, differences
from .table import CASES
from .test_conformance import CORE

pytestmark = [pytest.mark.mpi, pytest.mark.thorough, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in CORE], ids=lambda case: case.name
)
def test_case(worlds: dict[str, World], case: Case, check: str) -> None:
    function, parts = CHECKS[check]
    found = differences(case, worlds, function, *parts)
    assert not found, "\n" + "\n".join(found)
