"""What a plan in the run directory has predicted of a run, against what came."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...settings.sync import Allreduce, recorded_sync
from ...training.accounting import Kind, step_seconds
from ..markup import Child
from ..numbers import duration, number
from ..page import paragraph, table
from .facts import RunFacts

# The way of synchronising that plans are of.
_ALLREDUCE = recorded_sync(Allreduce())
# Epochs are compared if their rows differ by no more than this part.
_SAME_ROWS = 0.02


@dataclass(frozen=True)
class Compared:
    """One figure of a plan, and of the run.

    Attributes:
        name: what it is.
        predicted: by the plan.
        measured: in the run.
        show: says it for people.
    """

    name: str
    predicted: float
    measured: float
    show: Callable[[float], str]

    @property
    def off(self) -> str:
        """By how much the prediction is off, as a part of what came."""
        return f"{self.predicted / self.measured - 1:+.1%}" if self.measured else ""


@dataclass(frozen=True)
class Prediction:
    """What a plan says of a run.

    Attributes:
        compared: figures of both; none where they cannot be compared.
        notes: what else is to be known of the two, or why they cannot be compared.
    """

    compared: Sequence[Compared]
    notes: Sequence[str]


def prediction_of(run: RunFacts) -> Prediction | None:
    """Return what was predicted of a run; ``None`` if it has no plan, or none can be read."""
    if run.plan is None:
        return None
    try:
        return _compared(run, run.plan)
    except (KeyError, TypeError, ValueError, AttributeError):  # of another version
        return Prediction((), ("plan.json is not what this version of the package writes.",))


def predicted_contents(run: RunFacts) -> list[Child]:
    """Return the table of what was predicted and what came, if there is a plan."""
    found = prediction_of(run)
    if found is None:
        return []
    rows: list[list[Child]] = [
        [one.name, one.show(one.predicted), one.show(one.measured), one.off]
        for one in found.compared
    ]
    shown = [table(["", "predicted", "measured", "off by"], rows, numeric=(1, 2, 3))]
    return [*(shown if rows else []), *map(paragraph, found.notes)]


def _compared(run: RunFacts, plan: Mapping[str, Any]) -> Prediction:
    work, networks = plan["measured"]["workload"], plan["networks"]
    ranks = int(run.last_call.get("workers") or run.state.workers)
    batch = run.settings.get("fit", {}).get("batch_size")
    if work["batch_size"] != batch:
        return Prediction(
            (), (f"The plan is of batches of {work['batch_size']:,} rows, the run of {batch:,}.",)
        )
    sync = run.settings.get("sync", _ALLREDUCE)
    if {**_ALLREDUCE, **sync} != _ALLREDUCE:
        return Prediction(
            (), (f"The plan is of plain allreduce, the run was trained by {_told(sync)}.",)
        )
    hosts = len({one["host"] for one in run.last_call.get("placement", ())})
    told = [(one["name"], one["predictions"]) for one in networks]
    chosen = {name: each for name, all_of in told for each in all_of if each["ranks"] == ranks}
    if not chosen:
        return Prediction((), (f"The plan does not tell of {ranks:,} ranks, which the run has.",))
    accounts, notes = _accounts(run, ranks)
    if not accounts:
        return Prediction((), (f"No epoch of {ranks:,} ranks has been trained.",))
    predicted_hosts = next(iter(chosen.values()))["hosts"]
    if hosts and hosts != predicted_hosts:
        notes.append(f"The plan is of {predicted_hosts:,} hosts, the run was on {hosts:,}.")
    # Within a host, and where the plan's own cluster was measured, there is one network only.
    if predicted_hosts == 1 or plan["measured"]["between"] is not None:
        chosen = dict(list(chosen.items())[:1])
    rows = _epoch_rows(run, ranks)
    same_rows = rows is not None and abs(rows / work["rows"] - 1) <= _SAME_ROWS
    if not same_rows:
        had = "those of the run are not known" if rows is None else f"the run of {rows:,}"
        notes.append(
            f"The plan is of epochs of {work['rows']:,} rows, {had}: times are not compared."
        )
    whole = same_rows and _is_whole(run, work)
    rate = statistics.median(float(account["samples_per_second"]) for account in accounts)
    epoch = statistics.median(step_seconds(account) for account in accounts)
    compared = []
    for name, one in chosen.items():
        on = f", {name}" if len(chosen) > 1 else ""
        speed = float(one["samples_per_second"])
        compared.append(Compared(f"samples/s{on}", speed, rate, number))
        if same_rows:
            seconds = float(one["epoch_seconds"])
            compared.append(Compared(f"training of an epoch{on}", seconds, epoch, duration))
        if whole:
            seconds = float(one["total_seconds"])
            took = float(sum(run.last_call["seconds"].values()))
            compared.append(Compared(f"the whole call{on}", seconds, took, duration))
    if whole:
        notes.append("Validation, checkpoints and saving are in the whole call, not in the plan.")
    return Prediction(compared, notes)


def _told(sync: Mapping[str, Any]) -> str:
    """Return a way of synchronising, as a run has recorded it, for people."""
    given = [f"{name}={value}" for name, value in sync.items() if name != "sync"]
    return f"{sync['sync']} ({', '.join(given)})" if given else str(sync["sync"])


def _epoch_rows(run: RunFacts, ranks: int) -> int | None:
    """Return the rows that the run trained on in an epoch; ``None`` if it does not tell."""
    fit = run.settings["fit"]
    steps = fit.get("steps_per_epoch")
    if steps is not None:
        return int(steps) * ranks * int(fit["batch_size"])
    rows = run.settings.get("rows")
    return None if rows is None else int(rows)


def _accounts(run: RunFacts, ranks: int) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the accounts that a plan is to be compared with, and what there is to say of them."""
    own = [one for one in run.accounts if one is not None and one.get("workers") == ranks]
    # A call begins with an epoch in which the framework compiles, and which may be half of one.
    later = [one for one in own if Kind.BUILD not in one["seconds"]]
    if later:
        return later, [f"Measured: the median of {len(later):,} epochs, those that calls began "
                       "with left out."]  # fmt: skip
    return own, ["Measured: in the first epoch, which there is only."] if own else []


def _is_whole(run: RunFacts, work: Mapping[str, Any]) -> bool:
    """Tell whether one call has trained all that the plan is of, and nothing else."""
    return (
        len(run.calls) == 1
        and run.last_call.get("ending") == "finished"
        and len(run.state.attempts) <= 1
        and work["epochs"] == run.settings.get("fit", {}).get("epochs") == len(run.epochs)
    )
