"""Whatever Keras trains, we train as ``fit`` would: one test for each case and each claim.

Here is a case or two for each mechanism; `test_more_cases` has all others.
"""

from __future__ import annotations

import pytest

from .case import Case
from .run import CHECKS
from .supervise import World, differences
from .table import BY_NAME

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(1800)]

CORE = (
    # How a model is built, what feeds it and what it gives.
    "sequential-without-input", "nested", "shared-layer", "tied-weights", "frozen-layer",
    "subclassed-takes-dict",
    "two-columns-for-one-output", "rnn-stateful", "embedding-masked-lstm",
    # What a layer computes over rows, draws or keeps.
    "batch-normalisation", "dropout", "normalization-adapted", "text-vectorization",
    "add-loss-in-layer", "regularized",
    # Losses, weights and metrics: their sums over rows.
    "loss-function", "masked-sequence-loss",
    "sample-weights-zero-in-places", "class-weight", "metrics-curves",
    "metric-that-is-no-sum",
    # Rows and steps.
    "one-row-left-subclassed", "steps-per-epoch", "run-eagerly",
    # Optimizers and what they do between steps.
    "optimizer-adam", "optimizer-multioptimizer", "schedule-cosinedecay",
    "ema-overwrites", "accumulation-across-epochs", "mixed-float16",
    # Callbacks, and steps of a model's own.
    "early-stopping-best-weights", "backup-and-restore",
    "train-step-own-trackers", "compute-loss", "gan-attributes",
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", [BY_NAME[name] for name in CORE], ids=CORE)
def test_case(worlds: dict[str, World], case: Case, check: str) -> None:
    function, parts = CHECKS[check]
    found = differences(case, worlds, function, *parts)
    assert not found, "\n" + "\n".join(found)
