"""The validation of a model while it is trained: all ranks', each on its part of the rows."""

from __future__ import annotations

import contextlib

from ..cluster.worker.reporting import report_progress
from .agreement import Agreement
from .epochs import Epochs, execution
from .progress import Logs
from .trainee import Hooks, Trainee


def evaluate(
    trainee: Trainee, hooks: Hooks, epochs: Epochs, agreement: Agreement
) -> dict[str, object]:
    """Return the results over the rows of all ranks, as an epoch names them; all call this.

    Args:
        trainee: the model on this rank.
        hooks: its callbacks.
        epochs: the rows.
        agreement: of all ranks.
    """
    hooks.stop_evaluating = False
    hooks.test_begin()
    trainee.reset_metrics()
    length = trainee.steps_per_execution
    last: tuple[Logs | None, float] = ({}, 1.0)
    with contextlib.closing(epochs.steps_from(0)) as reading:
        for step in reading:
            begins, ends, end = execution(step.number, epochs.steps, length)
            if begins and hooks.watch_test:
                hooks.test_step_begin(step.number)
            logs = trainee.test_step(step, step.number == epochs.steps - 1)
            report_progress()
            last = logs, step.fraction
            if ends and hooks.watch_test:
                hooks.test_step_end(end, logs)
                if agreement.any_requests(hooks.stop_evaluating):
                    break
    results = trainee.results("test", *last)
    hooks.test_end(results)
    return {trainee.of_validation(name): value for name, value in results.items()}
