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
    "subclassed-takes-dict", "inputs-nested", "outputs-dict-other-names",
    "two-columns-for-one-output", "rnn-stateful", "embedding-masked-lstm",
    # What a layer computes over rows, draws or keeps.
    "batch-normalisation", "dropout", "normalization-adapted", "text-vectorization",
    "sequence-of-unknown-length", "add-loss-in-layer", "regularized",
    # Losses, weights and metrics: their sums over rows.
    "loss-function", "loss-function-sum", "loss-ignore-class", "masked-sequence-loss",
    "loss-weights-dict", "sample-weights-zero-in-places", "class-weight", "metrics-curves",
    "metric-that-is-no-sum", "metrics-of-two-outputs",
    # Rows and steps.
    "one-row-left-subclassed", "steps-per-epoch", "validation-freq-list", "run-eagerly",
    # Optimizers and what they do between steps.
    "optimizer-adam", "optimizer-multioptimizer", "schedule-cosinedecay", "global-clipnorm",
    "ema-overwrites", "accumulation-across-epochs", "mixed-float16",
    # Callbacks, and steps of a model's own.
    "early-stopping-best-weights", "backup-and-restore", "swap-ema-weights", "own-adds-to-logs",
    "train-step-own-trackers", "compute-loss", "gan-attributes", "gan-dict",
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", [BY_NAME[name] for name in CORE], ids=CORE)
def test_case(worlds: dict[str, World], case: Case, check: str) -> None:
    function, parts = CHECKS[check]
    found = differences(case, worlds, function, *parts)
    assert not found, "\n" + "\n".join(found)
