"""Facts of a run, from its run directory, for its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...checkpoint.retry_policy import RUNNING
from ...checkpoint.run_directory import Account, RunDirectory
from ...storage.paths import redact_url
from ...training.time_breakdown import mean_seconds
from .state import RunSummary, read_run


@dataclass(frozen=True)
class RunFacts:
    """A run as its report shows it.

    Attributes:
        name: of its directory.
        place: the directory.
        state: what became of it, with attempts and checkpoints.
        settings: those of the newest call; empty if they are not known.
        epochs: metrics of each epoch.
        accounts: where the time of each of these went, as far as that is known.
        calls: what each call of `run_training` has recorded at its end, oldest first.
        notes: what of all this cannot be read, or is missing, a sentence each.
    """

    name: str
    place: str
    state: RunSummary
    settings: Mapping[str, Any]
    epochs: Sequence[Mapping[str, object]]
    accounts: Sequence[Account]
    calls: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()

    def metric_names(self) -> list[str]:
        """Return the names of metrics that are numbers, without ``val_``, in order."""
        names: dict[str, None] = {}
        for epoch in self.epochs:
            for name, value in epoch.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    names[name.removeprefix("val_")] = None
        # A loss is what is trained; the rest by name.
        return sorted(names, key=lambda name: (name != "loss", "loss" not in name, name))

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Return the epochs, from 1, that have a metric, and its values."""
        points = [
            (float(number), float(value))
            for number, epoch in enumerate(self.epochs, 1)
            if isinstance(value := epoch.get(name), (int, float)) and not isinstance(value, bool)
        ]
        return [x for x, _ in points], [y for _, y in points]

    def recorded(self, name: str) -> tuple[list[float], list[float]]:
        """Return the epochs, from 1, whose account has a number of that name, and the numbers."""
        points = [
            (float(number), float(account[name]))
            for number, account in enumerate(self.accounts, 1)
            if account is not None and isinstance(account.get(name), (int, float))
        ]
        return [x for x, _ in points], [y for _, y in points]

    def rate_names(self) -> list[str]:
        """Return the names of learning rates that accounts tell."""
        names = {n for a in self.accounts if a is not None for n in a if n.startswith("learning_")}
        return sorted(names)

    @property
    def last_call(self) -> Mapping[str, Any]:
        return self.calls[-1] if self.calls else {}

    @property
    def seconds(self) -> float:
        """The wall-clock time of all calls that have ended."""
        return float(sum(sum(call.get("seconds", {}).values()) for call in self.calls))

    def mean_seconds(self) -> list[dict[str, float]]:
        """Return the mean over ranks of each epoch's seconds by kind; empty where not recorded."""
        return [mean_seconds(account) for account in self.accounts]


def read_facts(directory: RunDirectory, now: float, *, ended: bool = False) -> RunFacts:
    """Read the facts of a run directory.

    Args:
        directory: the run directory.
        now: seconds since the epoch.
        ended: whether the run is known to have ended, though its lock is still held.

    Raises:
        InvalidInputError: it holds no run.
        RunDirectoryError: its metrics are damaged.
    """
    state = read_run(directory, now, verify=False, ended=ended)
    notes = list(state.notes)
    epochs = directory.read_metrics(notes.append)
    checkpointed = max((line.epoch for line in state.checkpoints), default=0)
    if checkpointed > len(epochs) and state.state != RUNNING:
        notes.append(
            f"metrics.jsonl tells of {len(epochs):,} whole epochs, checkpoints of "
            f"{checkpointed:,}: the last ones are missing here."
        )
    return RunFacts(
        name=directory.location.name,
        place=redact_url(str(directory.location)),
        state=state,
        settings=directory.read_config(),
        epochs=epochs,
        accounts=directory.read_accounts(len(epochs), notes.append),
        calls=directory.read_calls(notes.append),
        notes=notes,
    )
