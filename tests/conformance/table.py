"""All cases, and the page that shows them: ``python -m tests.conformance.table``."""

from __future__ import annotations

from .case import Case
from .cases_callbacks import CALLBACKS
from .cases_compile import COMPILE
from .cases_forms import FORMS

CASES: list[Case] = [*FORMS, *COMPILE, *CALLBACKS]
BY_NAME = {case.name: case for case in CASES}
