"""Result of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..model.trained_transformer import TrainedTransformer

if TYPE_CHECKING:
    import pandas as pd
    from optuna.trial import FrozenTrial

    from .directory import StudyDirectory

# States of trials, for people.
FINISHED, PRUNED, FAILED, RUNNING, INTERRUPTED = STATES = (
    "finished",
    "pruned",
    "failed",
    "running",
    "interrupted",
)


# What is kept of a trial beside optuna's own.
PARAMS, ERROR, FIT_SECONDS = "params", "error", "fit_seconds"


@dataclass(frozen=True)
class TrialLine:
    """One trial.

    Attributes:
        trial: its number, from 0.
        state: ``"finished"``, ``"pruned"``, ``"failed"``, ``"running"``, or ``"interrupted"``: the
            same call resumes it.
        value: its metric; of a pruned one, that of its last epoch; ``None`` if there is none.
        epochs: epochs that were reported.
        seconds: what it took; ``None`` if it has not ended.
        fit_seconds: what its epochs took of that; ``None`` if it has not finished.
        params: its parameters.
        error: why it failed; empty if it has not.
        run_dir: its run directory.
    """

    trial: int
    state: str
    value: float | None
    epochs: int
    seconds: float | None
    fit_seconds: float | None
    params: Mapping[str, Any]
    error: str
    run_dir: str


def trial_line(trial: FrozenTrial, directory: StudyDirectory, *, searching: bool) -> TrialLine:
    """Return a trial as a line of the result table.

    Args:
        trial: optuna's.
        directory: the study's directory.
        searching: whether a search is running there now.
    """
    states = {
        "COMPLETE": FINISHED,
        "PRUNED": PRUNED,
        "FAIL": FAILED,
        "RUNNING": RUNNING if searching else INTERRUPTED,
        "WAITING": INTERRUPTED,
    }
    reported = trial.intermediate_values
    last = reported[max(reported)] if reported else None
    return TrialLine(
        trial=trial.number,
        state=states[trial.state.name],
        value=last if trial.value is None else trial.value,
        epochs=max(reported, default=0),
        seconds=None if trial.duration is None else trial.duration.total_seconds(),
        fit_seconds=trial.user_attrs.get(FIT_SECONDS),
        params=_with_integer_classes(trial.user_attrs.get(PARAMS, trial.params)),
        error=trial.user_attrs.get(ERROR, ""),
        run_dir=str(directory.trial(trial.number).location),
    )


def _with_integer_classes(params: Mapping[str, object]) -> dict[str, Any]:
    """Return parameters with the classes of ``class_weight`` as numbers, which JSON has as text."""
    weights = params.get("class_weight")
    if not isinstance(weights, Mapping):
        return dict(params)
    return {**params, "class_weight": {int(name): one for name, one in weights.items()}}


def trial_table(lines: Sequence[TrialLine]) -> pd.DataFrame:
    """Return trials as a table, with a column for each parameter, such as ``params.lr``."""
    import pandas as pd

    names = list(dict.fromkeys(name for line in lines for name in line.params))
    rows = []
    for line in lines:
        plain = asdict(line)
        params = plain.pop("params")
        rows.append({**plain, **{f"params.{name}": params.get(name) for name in names}})
    params_columns = [f"params.{name}" for name in names]
    ends = ["epochs", "seconds", "fit_seconds", "error", "run_dir"]
    order = ["trial", "state", "value", *params_columns, *ends]
    table: pd.DataFrame = pd.DataFrame(rows, columns=order)
    return table


@dataclass(frozen=True)
class TuneResult:
    """Result of a search.

    Attributes:
        best_params: the parameters of the best trial.
        best_value: the metric of its model.
        best_trial: its number.
        best_transformer: its trained model.
        trials: a row for each trial: ``trial`` (its number), ``state`` (``"finished"``,
            ``"pruned"`` or ``"failed"``), ``value``, a column for each parameter (``params.lr``),
            ``epochs``, ``seconds``, of these ``fit_seconds`` (from the first epoch to the end of
            the last), ``error`` and ``run_dir``.
        study_dir: the study's directory.
    """

    best_params: dict[str, Any]
    best_value: float
    best_trial: int
    best_transformer: TrainedTransformer = field(repr=False)
    trials: pd.DataFrame = field(repr=False)
    study_dir: str
