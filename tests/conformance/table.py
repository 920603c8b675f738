"""All cases, and the page that shows them: ``python -m tests.conformance.table`` writes it."""

from __future__ import annotations

from pathlib import Path

from .case import CLOSE, SAME, Case
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

_OPENING = """\
# Conformance: what is trained as `Model.fit` would train it

For readers who know Keras. Each line below is a model, with what it is compiled with and what calls
it, that is trained three times on the same rows ({rows} rows in global batches of {batch}, the last
one partial; the order of rows is the same each time):

- by Keras' own `Model.fit`, in one process;
- by `run_training`'s loop on **one rank**. Weights, the optimizer's variables, history, the
  parameters of callbacks and every call of a callback with its logs must equal those of `fit`, and
  so must the files that callbacks write;
- by the same loop on **two ranks** with half of each batch. Both must hold the same weights to the
  bit, get the same history and show callbacks the same logs, and these must equal those of one rank
  with the same global batch.

**Prediction** means that the model in the run directory, read by the transformer that
`run_training` returns and by `TFTransformer.from_run`, predicts what the trained model predicts.

"same" allows {same:g}, relative to the value or to 1, for one rank and {close:g} for two ranks and
for predictions: sums of floats depend on their order. Where more is allowed the number is there,
and where two ranks differ from one by the nature of the thing, the reason is. "refused" means an
error that says so before the first step; part of its message is shown.

The table is the one that `tests/conformance` runs. {count} cases; every metric, optimizer, learning
rate schedule, loss and callback that Keras exports is in one of them.
"""


def page() -> str:
    """Return the page. Pure."""
    from .data import GLOBAL_BATCH

    parts = [_OPENING.format(rows=59, batch=GLOBAL_BATCH, same=SAME, close=CLOSE, count=len(CASES))]
    for title, cases in GROUPS.items():
        lines = [
            f"\n## {title}\n",
            "| Case | One rank, to `fit` | Two ranks, to one | Prediction | Note |",
            "|---|---|---|---|---|",
            *(_row(case) for case in cases),
        ]
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def _row(case: Case) -> str:
    note = "; ".join(text for text in (case.why, case.note) if text)
    if case.refused:
        return f"| {case.name} | refused: `{case.refused}` | refused | | {note} |"
    two = "differs" if case.two is None else _within(case.two, CLOSE)
    predicts = "none" if case.predicts is None else _within(case.predicts, CLOSE)
    if case.lost:
        predicts += f"; `from_run` refuses: `{case.lost}`"
    return f"| {case.name} | {_within(case.one, SAME)} | {two} | {predicts} | {note} |"


def _within(tolerance: float, usual: float) -> str:
    return "same" if tolerance <= usual else f"within {tolerance:g}"


if __name__ == "__main__":
    PAGE.write_text(page())
