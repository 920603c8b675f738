"""The study of a search: optuna's, in the journal of its directory; its samplers and pruners."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from ..config.validators import check_choice
from ..errors import EnvironmentProblem, InvalidInputError, RunDirectoryError
from .directory import ERROR, FIT_SECONDS, PARAMS, StudyDirectory
from .space import Dimension, Space

# Optuna's name of the study; constant, because its pruners compute with it.
_NAME = "search"


class Study:
    """The trials of a search. Its methods are for one thread at a time.

    Args:
        directory: the study's directory, whose lock is held, or which is only read.
        direction: whether the metric is to be least (``"min"``) or greatest; ``None`` to read.
        sampler_for: returns what chooses the parameters of the trial of a number.
        pruner: ends trials.

    Raises:
        RunDirectoryError: there is no study to read.
    """

    def __init__(
        self,
        directory: StudyDirectory,
        direction: str | None = None,
        sampler_for: Callable[[int], BaseSampler] | None = None,
        pruner: BasePruner | None = None,
    ) -> None:
        self._directory = directory
        self._sampler_for = sampler_for
        self._stopped = False  # by the sampler
        if direction is None and not directory.journal.exists():
            raise RunDirectoryError(f"{directory.location} holds no study: it has no journal.log")
        try:
            directory.check_journal()
            self._storage = JournalStorage(JournalFileBackend(str(directory.journal)))
            # The driver reports the same events itself.
            verbosity = optuna.logging.get_verbosity()
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            try:
                self._study = self._open(direction, pruner)
            finally:
                optuna.logging.set_verbosity(verbosity)
        except (json.JSONDecodeError, ValueError, KeyError) as error:
            raise RunDirectoryError(f"{directory.journal} cannot be read: {error!r}") from error

        self._ranges: dict[str, list[BaseDistribution]] = {}
        for recorded in self.trials():
            if PARAMS in recorded.user_attrs:
                for name, one in recorded.distributions.items():
                    self._ranges.setdefault(name, []).append(one)

    def _open(self, direction: str | None, pruner: BasePruner | None) -> optuna.Study:
        if direction is None:
            return optuna.load_study(study_name=_NAME, storage=self._storage)
        return optuna.create_study(
            storage=self._storage,
            study_name=_NAME,
            direction="minimize" if direction == "min" else "maximize",
            pruner=pruner,
            load_if_exists=True,
        )

    def trials(self) -> list[FrozenTrial]:
        """Return the trials that count, by number.

        What failed before it had parameters is none: its call was refused, or a function failed.
        """
        return [
            one
            for one in self._study.get_trials()
            if one.state is not TrialState.FAIL or PARAMS in one.user_attrs
        ]

    def best(self) -> FrozenTrial | None:
        """Return the best of the finished trials, the first of equals; ``None`` if none is."""
        least = self._study.direction == optuna.study.StudyDirection.MINIMIZE
        finished = [one for one in self.trials() if one.state is TrialState.COMPLETE]
        choose = min if least else max  # both take the first of equal ones
        return choose(finished, key=lambda one: float(one.value or 0.0), default=None)

    def take_up(self) -> int:
        """Enqueue trials that an earlier driver has left unfinished; return their number."""
        left = [one for one in self.trials() if one.state is TrialState.RUNNING]
        for one in left:
            self.put_back(one.number)
        return len(left)

    def put_back(self, number: int) -> None:
        """Enqueue a trial again, unless it is finished, before new ones."""
        if not self._storage.get_trial(self._id(number)).state.is_finished():
            self._storage.set_trial_state_values(self._id(number), TrialState.WAITING)

    def ask(self, choose: Callable[[Trial], dict[str, Any]]) -> tuple[Trial, dict[str, Any]] | None:
        """Begin a trial, or take up one that was left; return its parameters, too.

        Returns nothing for a trial that ``choose`` has pruned.

        Args:
            choose: has the parameters of a new trial suggested.
        """
        if self._sampler_for is not None:
            # An interrupted trial without parameters draws what it would have drawn.
            drawn = [PARAMS in one.user_attrs or one.state.is_finished() for one in self.trials()]
            self._study.sampler = self._sampler_for(sum(drawn))
        trial = self._study.ask()
        recorded = trial.user_attrs.get(PARAMS)
        if recorded is not None:
            return trial, dict(recorded)
        try:
            params = choose(trial)
            self._check_same_ranges(trial)
            self._keep(trial, params)
        except optuna.TrialPruned:
            self.prune(trial)
            return None
        except BaseException as error:
            self.fail(trial, f"{type(error).__name__}: {error}")
            raise
        return trial, params

    def _check_same_ranges(self, trial: Trial) -> None:
        """Check that a space function uses the same ranges as in earlier calls.

        Ranges that have differed from trial to trial may keep doing so.
        """
        for name, one in trial.distributions.items():
            ranges = self._ranges.get(name, [one])
            if one not in ranges and all(other == ranges[0] for other in ranges):
                raise RunDirectoryError(
                    f"study_dir {self._directory.location} holds trials whose {name!r} was chosen "
                    f"from {ranges[0]}, now it is from {one}: they could not be compared; give "
                    "another study_dir, or, where its range depends on other parameters, another "
                    "name for each range"
                )

    def _keep(self, trial: Trial, params: Mapping[str, object]) -> None:
        for name, value in params.items():
            try:
                same = json.loads(json.dumps(value, allow_nan=False)) == value
            except (TypeError, ValueError):
                same = False
            if not same:
                raise InvalidInputError(
                    f"the parameter {name!r} of trial {trial.number} cannot be kept as JSON: "
                    f"{value!r:.300}; give finite numbers, text, booleans, None, and lists and "
                    "dictionaries of these, whose keys are text"
                )
        trial.set_user_attr(PARAMS, dict(params))

    def finish(self, trial: Trial, value: float, fit_seconds: float | None = None) -> None:
        """Record the value of a finished trial; a value that is not finite fails it.

        Args:
            trial: the trial.
            value: its metric.
            fit_seconds: what its epochs took.
        """
        trial.set_user_attr(FIT_SECONDS, fit_seconds)
        if math.isfinite(value):
            self._finish(trial, value)
        else:
            self.fail(trial, f"the metric of its last epoch is {value}")

    def prune(self, trial: Trial) -> None:
        """Record that a trial was pruned."""
        self._finish(trial, state=TrialState.PRUNED)

    def fail(self, trial: Trial, why: str) -> None:
        """Record that a trial has failed."""
        trial.set_user_attr(ERROR, why)
        self._finish(trial, state=TrialState.FAIL)

    def _finish(
        self, trial: Trial, value: float | None = None, state: TrialState | None = None
    ) -> None:
        try:
            self._study.tell(trial, value, state=state)
        except RuntimeError as error:
            # An exhausted sampler stops optuna's loop; the trial is recorded by then.
            if "Study.stop" not in str(error):
                raise
            self._stopped = True

    @property
    def exhausted(self) -> bool:
        """True if there are no trials left to begin, as at the end of a grid."""
        trials = self.trials()
        if any(one.state is TrialState.WAITING for one in trials):
            return False
        # A point of a grid is tried once, whatever its outcome.
        return self._stopped or _is_grid_started(self._study.get_trials())

    def reported(self, number: int) -> dict[int, float]:
        """Return the values of a trial's epochs so far, by number from 1."""
        return dict(self._storage.get_trial(self._id(number)).intermediate_values)

    def _id(self, number: int) -> int:
        study = self._storage.get_study_id_from_name(_NAME)
        return self._storage.get_trial_id_from_study_id_trial_number(study, number)


SamplerName = Literal["tpe", "random", "grid"]
PrunerName = Literal["median", "asha", "hyperband"]
# Of a grid, whose combinations optuna lists again for each trial: a tenth of a second for so many.
_MOST_POINTS = 100_000
# Packages that some of optuna's classes import once they are used, perhaps after several trials.
_NEEDS = {
    "CmaEsSampler": ("cmaes",),
    "GPSampler": ("scipy", "torch"),
    "QMCSampler": ("scipy",),
    "WilcoxonPruner": ("scipy",),
}


def check_sampler(sampler: object, space: Space) -> None:
    """Check the ``sampler`` argument of `tune`.

    Raises:
        InvalidInputError: it is none, or cannot choose from the space.
        EnvironmentProblem: it needs a package that is not installed.
    """
    if isinstance(sampler, BaseSampler):
        _check_installed("sampler", sampler)
    elif check_choice("sampler", sampler, get_args(SamplerName)) == "grid":
        _grid_of(space)


def _grid_of(space: Space) -> dict[str, list[Any]]:
    """Return the values of every parameter of a space that has finitely many.

    Raises:
        InvalidInputError: it has not, or there are too many combinations of them.
    """
    if not isinstance(space, Mapping):
        raise InvalidInputError(
            "sampler='grid' needs a space of choice(…) and integer(…) by name, got a function"
        )
    size = math.prod(_count_of(name, one) for name, one in space.items())
    if size > _MOST_POINTS:
        raise InvalidInputError(
            f"sampler='grid' was given a grid of {size:,} combinations ("
            + ", ".join(f"{name!r}: {one.count:,} values" for name, one in space.items())
            + f"); it takes at most {_MOST_POINTS:,}: name the values to try by choice(…), or use "
            "sampler='random'"
        )
    return {name: list(one.points or ()) for name, one in space.items()}


def _count_of(name: str, one: Dimension) -> int:
    if one.count is None:
        raise InvalidInputError(
            f"sampler='grid' takes every value of choice(…) and integer(…), but {name!r} is {one}; "
            "name the values to try by choice(…), or use sampler='random'"
        )
    return one.count


def sampler_for(
    sampler: object, space: Space, seed: int, number: int, *, side_by_side: bool
) -> BaseSampler:
    """Return the sampler of one trial; one by name draws the same in a resumed study.

    Args:
        sampler: its name, or one of optuna's.
        space: what it chooses from.
        seed: seed of the search.
        number: the trial's.
        side_by_side: whether several trials run at once.
    """
    if isinstance(sampler, BaseSampler):
        return sampler
    if sampler == "grid":  # its order, set by the seed, must be equal for all trials
        return optuna.samplers.GridSampler(_grid_of(space), seed=seed)
    trial_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    if sampler == "random":
        return optuna.samplers.RandomSampler(seed=trial_seed)
    return optuna.samplers.TPESampler(seed=trial_seed, constant_liar=side_by_side)


def _is_grid_started(trials: list[FrozenTrial]) -> bool:
    """Return whether a trial has begun for every point of the last trial's grid.

    Optuna's own word for it counts those that have ended, so that others, at once, would be given
    points that are being tried.
    """
    grid = trials[-1].system_attrs.get("search_space") if trials else None
    if grid is None:
        return False
    points = {
        one.system_attrs["grid_id"]
        for one in trials
        if one.system_attrs.get("search_space") == grid and "grid_id" in one.system_attrs
    }
    return len(points) >= math.prod(map(len, grid.values()))


def make_pruner(pruner: object, epochs: int | None) -> BasePruner:
    """Return the requested pruner.

    Args:
        pruner: its name, one of optuna's, or ``None``.
        epochs: epochs of every trial; ``None`` if they are searched.

    Raises:
        InvalidInputError: it is none, or trials have one epoch.
        EnvironmentProblem: it needs a package that is not installed.
    """
    if pruner is None:
        return optuna.pruners.NopPruner()
    if not isinstance(pruner, BasePruner):
        check_choice("pruner", pruner, get_args(PrunerName))
    if epochs == 1:
        raise InvalidInputError(
            f"pruner={pruner!r} ends trials after an epoch, but they have one: epochs=1"
        )
    if isinstance(pruner, BasePruner):
        _check_installed("pruner", pruner)
        return pruner
    match pruner:
        case "median":
            return optuna.pruners.MedianPruner()
        case "asha":
            return optuna.pruners.SuccessiveHalvingPruner()
        case _:
            return optuna.pruners.HyperbandPruner(max_resource="auto" if epochs is None else epochs)


def _check_installed(what: str, component: object) -> None:
    name = type(component).__name__
    needs = _NEEDS.get(name, ()) if type(component).__module__.startswith("optuna.") else ()
    missing = [one for one in needs if importlib.util.find_spec(one) is None]
    if missing:
        raise EnvironmentProblem(
            f"{what}={name}(…) needs {' and '.join(missing)}, which is not installed: pip install "
            f"{' '.join(missing)}"
        )
