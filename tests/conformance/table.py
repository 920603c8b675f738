"""All cases, and the page of the documentation site that shows them."""

from __future__ import annotations

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

_OPENING = """\
# Conformance with `Model.fit`

Each of the {count} cases is a model with what it is compiled with and its callbacks, trained three
times on the same rows ({rows} rows in global batches of {batch}, the last one partial; the order of
rows is the same):

- by Keras' own `Model.fit`, in one process;
- by `run_training`'s loop on **one rank**. Weights, the optimizer's variables, history, every call
  of a callback with its logs, and the files that callbacks write must equal those of `fit`;
- by the same loop on **two ranks** with half of each batch. Both must hold the same weights to the
  bit, and equal one rank with the same global batch.

**Prediction**: the model in the run directory, loaded by the transformer of `run_training` and by
`TFTransformer.from_run`, predicts what the trained model predicts.

"same" allows {same:g}, relative to the value or to 1, for one rank and {close:g} for two ranks and
for predictions: sums of floats depend on their order. Otherwise the tolerance is given, or the
reason why two ranks differ. "refused" is an error before the first step, with part of its message.

`tests/conformance` runs the cases. Every metric, optimizer, learning rate schedule, loss and
callback that Keras exports is in one of them.
"""


def page() -> str:
    """Return the page. Pure."""
    from .data import GLOBAL_BATCH

    parts = [_OPENING.format(rows=59, batch=GLOBAL_BATCH, same=SAME, close=CLOSE, count=len(CASES))]
    for title, cases in GROUPS.items():
        parts.append(f"\n## {title}\n\n{_group(cases)}\n")
    return "".join(parts)


def _group(cases: list[Case]) -> str:
    """Return a list of the cases that are the same throughout, and a table of the others."""
    cells = {case.name: _cells(case) for case in cases}
    same = [name for name, row in cells.items() if row == ["same", "same", "same", ""]]
    others = {name: row for name, row in cells.items() if name not in same}
    lines = [
        f"Same in all three: {', '.join(f'`{name}`' for name in same)}.",
        "",
        "| Case | One rank, to `fit` | Two ranks, to one | Prediction | Note |",
        "|---|---|---|---|---|",
        *(f"| {name} | {' | '.join(row)} |" for name, row in others.items()),
    ]
    return "\n".join(lines)


def _cells(case: Case) -> list[str]:
    note = "; ".join(text for text in (case.why, case.note) if text)
    if case.refused:
        return [f"refused: `{case.refused}`", "refused", "", note]
    two = "differs" if case.two is None else _within(case.two, CLOSE)
    if case.refused_by_two:
        two = f"refused: `{case.refused_by_two}`"
    predicts = "none" if case.predicts is None else _within(case.predicts, CLOSE)
    if case.lost:
        predicts += f"; `from_run` refuses: `{case.lost}`"
    return [_within(case.one, SAME), two, predicts, note]


def _within(tolerance: float, usual: float) -> str:
    return "same" if tolerance <= usual else f"within {tolerance:g}"
