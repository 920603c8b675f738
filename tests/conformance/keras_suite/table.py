"""The table of Keras' own tests in ``docs/keras-tests.md``.

``python -m tests.conformance.keras_suite.table`` runs them and prints it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version

from .reasons import REASONS, reason_for
from .run import Result, run_suite

_HEAD = """\
# Keras' own tests

Keras {version} comes with tests that call `fit`: of its trainer and its callbacks, of optimizers
and models. `tests/conformance/keras_suite` runs them, as they are installed, with an adapter in the
place of `Model.fit`: what `fit` is given, arrays, tensors, datasets or generators, is written to
Parquet as rows, and this project's own training trains the test's very model on it. What the test
then expects of the history, the callbacks, the weights or the error, it expects of our training.
`evaluate`, `predict` and `train_on_batch` stay Keras' own; tests of these alone are left out. One
rank trains; [our own cases](../tests/conformance/table.py) show that more ranks train the same
model.

`python -m tests.conformance.keras_suite.table` prints this page.
"""


def kind_of(name: str, result: Result) -> str:
    """Return the table's column for a test: what became of it."""
    if result.outcome == "skipped":
        return "skipped"
    if result.outcome == "failed" or result.refused:
        return "cannot apply" if reason_for(name) is not None else "failed"
    return "trained" if result.trained else "no training"


def render(results: Mapping[str, Result]) -> str:
    """Return the page for what became of the tests."""
    kinds = {name: kind_of(name, result) for name, result in results.items()}
    lines = [_HEAD.format(version=version("keras")), "## Counts", ""]
    lines += _counts(kinds)
    lines += [
        "",
        "Tests that call no `fit` run unchanged and prove nothing here.",
        "",
        "## Why tests cannot apply",
        "",
        "| Reason | Tests |",
        "|---|---|",
    ]
    for reason in REASONS:
        named = [
            name
            for name, kind in kinds.items()
            if kind == "cannot apply" and reason_for(name) == reason.text
        ]
        lines.append(f"| {reason.text} | {len(named)}: {_shown(named)} |")
    skipped = Counter(
        result.message.removeprefix("Skipped: ").removeprefix("Skipped: ")
        for name, result in results.items()
        if kinds[name] == "skipped"
    )
    lines += ["", "## What Keras itself skips", "", "| Keras' reason | Tests |", "|---|---|"]
    lines += [f"| {text} | {count} |" for text, count in sorted(skipped.items())]
    return "\n".join(lines) + "\n"


def _counts(kinds: Mapping[str, str]) -> list[str]:
    columns = ("trained", "no training", "cannot apply", "skipped")
    modules = list(dict.fromkeys(name.partition("::")[0] for name in kinds))
    lines = [
        "| Tests of | pass, trained by us | pass, no `fit` | cannot apply | skipped by Keras |",
        "|---|---|---|---|---|",
    ]
    counts = Counter((name.partition("::")[0], kind) for name, kind in kinds.items())
    for module in modules:
        row = (str(counts[module, column]) for column in columns)
        lines.append(f"| `{module}` | {' | '.join(row)} |")
    total = (str(sum(kind == column for kind in kinds.values())) for column in columns)
    return [*lines, f"| **all** | {' | '.join(total)} |"]


def _shown(names: list[str]) -> str:
    """Return the names of tests without their modules and what parametrizes them apart."""
    short = dict.fromkeys(f"`{name.rpartition('::')[2]}`" for name in names)
    return ", ".join(short)


if __name__ == "__main__":
    found, output = run_suite()
    if not found:
        sys.exit(output)
    print(render(found), end="")
    for name, result in found.items():
        if kind_of(name, result) == "failed":
            print(f"failed: {name}: {result.message} {result.refused}", file=sys.stderr)
