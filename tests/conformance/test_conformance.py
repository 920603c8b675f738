"""Whatever Keras trains, we train as ``fit`` would: one test for each case and each claim.

Here is every third case, of each kind some; `test_more_cases` has the others, which run last.
"""

from __future__ import annotations

import pytest

from .case import Case
from .run import CHECKS
from .supervise import World, differences
from .table import CASES

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_case(worlds: dict[str, World], case: Case, check: str) -> None:
    function, parts = CHECKS[check]
    found = differences(case, worlds, function, *parts)
    assert not found, "\n" + "\n".join(found)
