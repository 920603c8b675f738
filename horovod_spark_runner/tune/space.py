"""Search space: plain values by name, or a function of optuna's trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config.validators import as_integer
from ..errors import HorovodSparkError, InvalidInputError

if TYPE_CHECKING:
    from optuna.trial import Trial


class Dimension:
    """Values to choose one parameter from."""

    @property
    def bounds(self) -> tuple[object, ...]:
        """Values that are right if all are."""
        raise NotImplementedError

    @property
    def points(self) -> Sequence[object] | None:
        """All values, if they can be counted; of a range only its bounds are kept."""
        raise NotImplementedError

    @property
    def count(self) -> int | None:
        """Number of values, if they can be counted."""
        return None if self.points is None else len(self.points)

    def suggest(self, trial: Trial, name: str) -> Any:
        """Return the value of this name in a trial."""
        raise NotImplementedError


@dataclass(frozen=True)
class Range(Dimension):
    """Numbers between two bounds, which belong to it; see `uniform`, `loguniform`, `integer`.

    Attributes:
        low: the least.
        high: the greatest.
        log: whether it is drawn from by its logarithm.
        whole: whether it consists of whole numbers.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    @property
    def bounds(self) -> tuple[object, ...]:
        return self.low, self.high

    @property
    def points(self) -> Sequence[object] | None:
        if self.whole:
            return range(int(self.low), int(self.high) + 1)
        return (self.low,) if self.low == self.high else None

    @property
    def count(self) -> int | None:
        # Python's len() fails for a range of more than 2**63 numbers.
        return int(self.high) - int(self.low) + 1 if self.whole else super().count

    def suggest(self, trial: Trial, name: str) -> Any:
        if self.whole:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)


@dataclass(frozen=True)
class _Choice(Dimension):
    """One of several values; see `choice`.

    Attributes:
        values: numbers, text, booleans or ``None``.
    """

    values: tuple[Any, ...]

    @property
    def bounds(self) -> tuple[object, ...]:
        return self.values

    @property
    def points(self) -> tuple[object, ...]:
        return self.values

    def suggest(self, trial: Trial, name: str) -> Any:
        return trial.suggest_categorical(name, self.values)


Space = Mapping[str, Dimension] | Callable[["Trial"], Mapping[str, Any]]


def uniform(low: float, high: float) -> Range:
    """Return the real numbers between two bounds, all as likely.

    Args:
        low: the least.
        high: the greatest.

    Raises:
        InvalidInputError: they are no finite numbers, or ``low`` is above ``high``.
    """
    return Range(*_bounds("uniform", low, high))


def loguniform(low: float, high: float) -> Range:
    """Return the real numbers between two bounds above 0, all orders of magnitude as likely.

    Args:
        low: the least.
        high: the greatest.

    Raises:
        InvalidInputError: they are no finite numbers above 0, or ``low`` is above ``high``.
    """
    least, greatest = _bounds("loguniform", low, high)
    _check_log("loguniform", least, low, high)
    return Range(least, greatest, log=True)


def integer(low: int, high: int, *, log: bool = False) -> Range:
    """Return the whole numbers between two bounds, which belong to them.

    Args:
        low: the least.
        high: the greatest.
        log: whether all orders of magnitude are as likely, in place of all numbers (false).

    Raises:
        InvalidInputError: they are no whole numbers, ``low`` is above ``high``, or 0 with ``log``.
    """
    least, greatest = as_integer(low), as_integer(high)
    if least is None or greatest is None or least > greatest:
        raise InvalidInputError(
            f"integer({low!r}, {high!r}): two whole numbers are needed, the lower one first"
        )
    if log:
        _check_log("integer", least, low, high)
    return Range(least, greatest, log=bool(log), whole=True)


def choice(*values: Any) -> _Choice:
    """Return the choice of one of several values.

    Args:
        values: numbers (NumPy's become Python's), text, booleans or ``None``. Of anything else,
            such as layers' sizes or functions, give names, which ``model_fn`` knows the meaning of.

    Raises:
        InvalidInputError: there are none, two are equal (as 1 and ``True`` are), or one is
            something else, such as NaN or infinity.
    """
    values = tuple(one.item() if isinstance(one, np.generic) else one for one in values)
    wrong = [
        one
        for one in values
        if not isinstance(one, (bool, int, float, str, type(None)))
        or (isinstance(one, float) and not math.isfinite(one))
    ]
    if wrong:
        raise InvalidInputError(
            f"choice() takes numbers, text, booleans and None, got {wrong[0]!r} of type "
            f"{type(wrong[0]).__name__}; give names, whose meaning model_fn knows"
        )
    if not values or len(set(values)) < len(values):
        raise InvalidInputError(
            f"choice{values!r}: give one or more values, each once; optuna takes those that are "
            "equal, as 1, 1.0 and True are, for one"
        )
    return _Choice(values)


def _bounds(kind: str, low: object, high: object) -> tuple[float, float]:
    numbers = [
        float(one) if isinstance(one, Real) and not isinstance(one, bool) else math.nan
        for one in (low, high)
    ]
    if not all(map(math.isfinite, numbers)) or numbers[0] > numbers[1]:
        raise InvalidInputError(
            f"{kind}({low!r}, {high!r}): two finite numbers are needed, the lower one first"
        )
    return numbers[0], numbers[1]


def _check_log(kind: str, least: float, low: object, high: object) -> None:
    if least <= 0:
        raise InvalidInputError(f"{kind}({low!r}, {high!r}): a logarithm needs bounds above 0")


def check_space(space: object) -> Space:
    """Return ``space`` if it is one.

    Raises:
        InvalidInputError: it is neither a dictionary of dimensions nor a function.
    """
    if isinstance(space, Mapping) and space:
        for name, one in space.items():
            if not isinstance(name, str) or not isinstance(one, Dimension):
                raise InvalidInputError(
                    f"space gives {name!r} {one!r}; it must go from names to uniform(…), "
                    "loguniform(…), integer(…) or choice(…) of horovod_spark_runner.tune"
                )
        return dict(space)
    if callable(space):
        function: Callable[[Trial], Mapping[str, Any]] = space
        return function
    raise InvalidInputError(
        "space must be a dictionary such as {'lr': loguniform(1e-4, 1e-1)}, or a function of "
        f"optuna's trial that returns the parameters, got {space!r}"
    )


def describe_space(space: Space) -> object:
    """Return a study's record of its space, as JSON, different for different spaces."""
    if not isinstance(space, Mapping):
        return "a function"
    return {name: repr(one) for name, one in space.items()}


def suggest(space: Space, trial: Trial) -> dict[str, object]:
    """Return the parameters of a trial.

    Raises:
        InvalidInputError: the function of the space returns no dictionary by name, or the sampler
            cannot choose from the space.
    """
    if isinstance(space, Mapping):
        try:
            return {name: one.suggest(trial, name) for name, one in space.items()}
        except ValueError as error:  # as of a grid of other parameters
            raise InvalidInputError(f"the sampler cannot choose from the space: {error}") from error
    import optuna

    try:
        params = space(trial)
    except (optuna.TrialPruned, HorovodSparkError):
        raise
    except Exception as error:
        raise InvalidInputError(
            f"the function given as space has failed for trial {trial.number}, which does not "
            f"count: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise InvalidInputError(
            f"the function given as space must return a dictionary of parameters by name, got "
            f"{params!r}"
        )
    return dict(params)
