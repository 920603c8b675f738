"""Time breakdown of a run: by phase, rank and epoch, and the cost of stragglers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...checkpoint.run_directory import Account
from ...formatting import duration, share
from ...training.time_breakdown import Kind
from .charts import Part, Whole, legend, stacked_columns, stacked_rows
from .facts import RunFacts
from .page import Child, Markup, figure, grid, paragraph, table

# Phases of a call, with the keys of its record.
_PHASES: tuple[tuple[Part, tuple[str, ...]], ...] = (
    (Part("checks", 7, "of the call, the columns, and the slots Spark has"), ("prepare", "check")),
    (Part("rows", 0, "writing the rows for the ranks"), ("materialize",)),
    (Part("waiting for slots", 1, "other runs of this process held them"), ("slots",)),
    (Part("launch", 6, "Spark's tasks, and starting the ranks"), ("tasks", "rendezvous", "start")),
    (Part("training", 2, "building, epochs and saving, on the ranks"), ("function",)),
    (Part("attempts", 3, "those that failed, pauses after them, what is around"), ("attempts",)),
    (Part("results", 4, "their way back to the driver"), ("results",)),
)
# Activities of ranks, with the kinds of their time breakdown.
_RANK: tuple[tuple[Part, tuple[str, ...]], ...] = (
    (
        Part("building", 5, "the model, and the first step, which compiles it"),
        (Kind.BUILD, Kind.FIRST_STEP),
    ),
    (Part("computing", 2, "training steps, without the exchange"), (Kind.COMPUTE,)),
    (Part("computing and exchanging", 2, "training steps"), (Kind.STEP,)),
    (Part("exchanging", 1, "with other ranks, and waiting for them"), (Kind.EXCHANGE,)),
    (Part("waiting for data", 0, "the reader had no batch yet"), (Kind.DATA,)),
    (Part("validation", 4, "all of it"), (Kind.VALIDATION,)),
    (Part("checkpoints", 3, "what they held the training up"), (Kind.CHECKPOINT,)),
    (
        Part("callbacks, metrics", 6, "callbacks, the loop, and what ranks agree on"),
        (Kind.CALLBACKS, Kind.AGREE),
    ),
    (Part("saving", 7, "all after the last epoch"), (Kind.SAVE,)),
)
_PHASE_PARTS = [part for part, _ in _PHASES]
_RANK_PARTS = [part for part, _ in _RANK]
# Bars of calls, the last ones, and of ranks, the first ones and those that others waited for.
_MOST_ROWS = 24
# Of an epoch's chart, what belongs to the run and not to the epoch is left out.
_ONCE = {Kind.BUILD, Kind.FIRST_STEP}
# Activities in which ranks wait for each other.
_MEETING = (Kind.EXCHANGE, Kind.STEP, Kind.AGREE)


def _grouped(
    label: str, seconds: Mapping[str, float], parts: Sequence[tuple[Part, tuple[str, ...]]]
) -> Whole:
    """Return ``seconds`` summed by part; seconds of no part are left out."""
    values = {part.name: sum(seconds.get(key, 0.0) for key in keys) for part, keys in parts}
    return Whole(label, {name: max(value, 0.0) for name, value in values.items()})


def time_contents(run: RunFacts) -> list[Child]:
    """Return figures of where the time of a run went."""
    figures: list[Child] = []
    if run.calls:
        calls = [
            _grouped(f"call {i}", call.get("seconds", {}), _PHASES)
            for i, call in enumerate(run.calls, 1)
        ][-_MOST_ROWS:]
        figures.append(
            figure(
                "Each call",
                legend(_PHASE_PARTS, calls),
                stacked_rows(calls, _PHASE_PARTS, title="time"),
                about="from the beginning of the call to the trained model",
            )
        )
    accounts = run.last_call.get("accounts") or {}
    if accounts:
        ranks = _rank_wholes(accounts)
        left_out = int(run.last_call.get("workers", 0)) - len(ranks)
        figures.append(
            figure(
                "Each rank, in the last call",
                legend(_RANK_PARTS, ranks),
                stacked_rows(ranks, _RANK_PARTS, title="time in the training"),
                about=f"{left_out:,} ranks are left out" if left_out > 0 else "",
            )
        )
    figures += [*_epochs(run), *_slowest(run)]
    return [grid(figures)] if figures else []


def _rank_wholes(account: Mapping[str, Any]) -> list[Whole]:
    """Return the bars of ranks, of many those that say most."""
    ranks, seconds = account["ranks"], account["seconds"]
    chosen = list(range(len(ranks)))
    if len(chosen) > _MOST_ROWS:
        waiting = np.asarray(_waiting(seconds))
        slowest = np.argsort(waiting, kind="stable")[: _MOST_ROWS // 2].tolist()
        chosen = sorted({*slowest, *range(_MOST_ROWS - len(set(slowest)))})
    return [
        _grouped(f"rank {ranks[i]}", {kind: each[i] for kind, each in seconds.items()}, _RANK)
        for i in chosen
    ]


def _epochs(run: RunFacts) -> list[Markup]:
    epochs = [
        _grouped(f"epoch {i}", {k: v for k, v in each.items() if k not in _ONCE}, _RANK)
        for i, each in enumerate(run.mean_seconds(), 1)
    ]
    if not any(epoch.total for epoch in epochs):
        return []
    chart = stacked_columns(
        epochs, _RANK_PARTS, x_title="epoch", y_title="seconds, mean of the ranks"
    )
    about = "a checkpoint counts to the epoch after it; building and the first step are left out"
    return [figure("Each epoch", legend(_RANK_PARTS, epochs), chart, about=about)]


# -- what slow ranks cost ----------------------------------------------------------------------


@dataclass(frozen=True)
class _SlowRanks:
    """Time that the slowest ranks of each epoch cost the others.

    All ranks leave a step together, and what they agree on at an epoch's end. So the rank that has
    spent least in steps, or in their exchange, and in agreeing was the last to come, and what the
    others have spent more, they have waited for it. Over an epoch that is the least they have
    waited: the last one may be another in every step.

    Attributes:
        waited: seconds, the mean of the ranks, at least.
        exchanged: seconds of the exchange itself, with nobody to wait for; 0 where the framework
            does not tell it from computing.
        total: seconds of these epochs, the mean of the ranks.
        last: in how many epochs each rank came last, by rank.
    """

    waited: float
    exchanged: float
    total: float
    last: Mapping[int, int]


def _slow_ranks(accounts: Sequence[Account]) -> _SlowRanks:
    """Return the time that slow ranks cost in the epochs with accounts."""
    waited = exchanged = total = 0.0
    last: dict[int, int] = {}
    for account in accounts:
        if account is None or len(account["ranks"]) < 2:
            continue
        seconds = account["seconds"]
        each = np.asarray(_waiting(seconds))
        mean = account.get("mean") or {kind: float(np.mean(v)) for kind, v in seconds.items()}
        least = float(each.min())
        whole_step = Kind.EXCHANGE in mean and Kind.STEP not in mean
        waited += sum(mean.get(kind, 0.0) for kind in _MEETING) - least
        exchanged += min(seconds[Kind.EXCHANGE]) if whole_step else 0.0
        total += sum(value for kind, value in mean.items() if kind not in _ONCE)
        rank = int(account["ranks"][int(each.argmin())])
        last[rank] = last.get(rank, 0) + 1
    return _SlowRanks(waited, exchanged, total, last)


def _waiting(seconds: Mapping[str, Sequence[float]]) -> list[float]:
    """Return for each rank the seconds in which it may have waited for others."""
    kinds = [seconds[kind] for kind in _MEETING if kind in seconds]
    ranks = len(next(iter(seconds.values()), ()))
    return [sum(each) for each in zip(*kinds, strict=True)] if kinds else [0.0] * ranks


def _slowest(run: RunFacts) -> list[Child]:
    slow = _slow_ranks(run.accounts)
    if not slow.total:
        return []
    words = (
        f"Each rank waited at least {duration(slow.waited)} for slower ones, "
        f"{share(slow.waited, slow.total)} of the epochs, in the mean."
    )
    if slow.exchanged:
        words += (
            f" The exchange itself took {duration(slow.exchanged)}, "
            f"{share(slow.exchanged, slow.total)}."
        )
    hosts = {one["rank"]: one["host"] for one in run.last_call.get("placement", ())}
    rows = [
        [str(rank), hosts.get(rank, ""), f"{count:,} of {sum(slow.last.values()):,} epochs"]
        for rank, count in sorted(slow.last.items(), key=lambda item: (-item[1], item[0]))[:10]
    ]
    header = ["rank", "host", "came last in"]
    return [figure("What the slowest ranks cost", paragraph(words), table(header, rows))]
