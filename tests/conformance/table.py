"""All cases, and the page that shows them: ``python -m tests.conformance.table``."""

from __future__ import annotations

from pathlib import Path

from .case import Case
from .cases_callbacks import OF_CALLBACKS
from .cases_forms import FORMS
from .cases_inputs import OF_INPUTS
from .cases_losses import OF_LOSSES
from .cases_metrics import OF_METRICS
from .cases_optimizers import OF_OPTIMIZERS
from .cases_steps import OF_STEPS

GROUPS: dict[str, list[Case]] = {
    "Model forms": FORMS,
    "Inputs and settings": OF_INPUTS,
    "Losses and weights": OF_LOSSES,
    "Metrics": OF_METRICS,
    "Optimizers and number formats": OF_OPTIMIZERS,
    "Callbacks": OF_CALLBACKS,
    "Steps of a model's own": OF_STEPS,
}
CASES: list[Case] = [case for cases in GROUPS.values() for case in cases]
BY_NAME = {case.name: case for case in CASES}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
