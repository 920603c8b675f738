"""Comparison of a training step's results for a batch with those for the batch's parts.

Ranks share the rows of a batch, and what each gives is averaged by its rows. One process gives the
same where the whole's value is the mean of the parts', as of any mean over rows. A sum over rows, a
mean divided by the rows again, and what compares rows with each other, are told from it by their
values, before some of the steps (`agreement.StepTrials`). The step is called on its own weights,
which may treat all rows alike (a last layer of zeros), only where it cannot be called on others.
"""

from __future__ import annotations

import enum
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import ModelError, on_one_line

logger = logging.getLogger(__name__)

# Kind and name. What is of one kind has one magnitude; within it, values have names.
Key = tuple[str, str]
Values = Mapping[Key, ArrayLike]
# Values, given numbers of rows and what part of the whole these are.
_Compute = Callable[[np.ndarray, float], Values]

GRADIENT, CHANGE = "gradient", "change"
# Of what a processor computes in single precision, and of anything less precise.
TOLERANCE, LOW_PRECISION = 1e-4, 5e-2
# Below this part of all values of a kind, one is what rounding leaves of 0.
_ROUNDING = 1e-5
# Rows, repeated ones counted, whose mean a random step is judged by; copies of a row in a batch.
_RANDOM_ROWS, _COPIES = 128, 4
# So many random numbers that their distances are hardly by chance.
_MANY = 50
# About so many numbers of one array are compared.
_COMPARED = 1 << 16


class _Verdict(enum.Enum):
    """Relation of the value for a batch to those for its parts."""

    SUM = "sum"
    DIVIDED = "divided"
    CLIPPED = "clipped"
    NEITHER = "neither"


# By what doubling the rows multiplies a value that depends on their number, which is refused.
_BY_DOUBLING = {_Verdict.SUM: 2.0, _Verdict.DIVIDED: 0.5}


def compare_parts(
    compute: _Compute, rows: int, tolerance: float = TOLERANCE
) -> dict[str, tuple[str, _Verdict]]:
    """Compare the values for a batch with those for its halves.

    Args:
        compute: returns values of some rows; it is called on the whole first.
        rows: of the batch, 2 at least.
        tolerance: relative rounding error of the values.

    Returns:
        By kind, a name of what is no mean over rows, of what depends on their number if there is
        any. Nothing where values are not finite, or are random beyond comparison.
    """
    verdicts = _compared(compute, rows, 1, tolerance)
    draws = max(2, _RANDOM_ROWS // (_COPIES * rows))
    if verdicts is None and (verdicts := _compared(compute, rows, draws, tolerance)):
        verdicts = _compared(compute, rows, draws, tolerance)  # not by chance
    return verdicts or {}


def try_varied(trial: Callable[[bool], Sequence[str]]) -> Sequence[str]:
    """Return the warnings of a trial on varied weights, or where it fails on a model's own.

    Args:
        trial: takes whether weights are varied; the user's own code in it may fail in any way.

    Raises:
        ModelError: what the trial raises.
    """
    for vary in (True, False):
        try:
            return trial(vary)
        except ModelError:
            raise
        except Exception as raised:
            kind, text = type(raised).__name__, on_one_line(raised)
            logger.info("a model could not be tried on parts of a batch: %s: %s", kind, text)
    return ()


def report_parts(
    verdicts: Mapping[str, tuple[str, _Verdict]], subjects: Mapping[str, str], advice: str
) -> list[str]:
    """Return warnings for the findings of `compare_parts`.

    Args:
        verdicts: what it returned.
        subjects: by kind, what the values are of, else the kind; ``{name}`` stands for the name.
        advice: how to write what the gradients are of as a mean.

    Raises:
        ModelError: something is a sum over rows, or a mean divided by them.
    """
    titles = {
        kind: subjects.get(kind, kind).replace("{name}", name)
        for kind, (name, _) in verdicts.items()
    }
    for kind, (_, verdict) in verdicts.items():
        if verdict not in _BY_DOUBLING:
            continue
        if kind == CHANGE:
            advice = "let it change by a mean over rows, or train with num_workers=1"
        what = "a sum over" if verdict is _Verdict.SUM else "a mean that is divided once more by"
        raise ModelError(
            f"{titles[kind]} is {what} the rows of a batch, which depends on how many ranks share "
            f"them; {advice}"
        )
    return [_warning(kind, titles[kind], verdict) for kind, (_, verdict) in verdicts.items()]


def _warning(kind: str, title: str, verdict: _Verdict) -> str:
    if verdict is _Verdict.CLIPPED:
        return (
            f"gradients of {title} are clipped or normalised by their norm before an optimizer is "
            "given them: every rank does so with those of its own rows, which is not what it does "
            "to those of the global batch. Let the optimizer clip them: it is given those of all "
            "ranks"
        )
    why = (
        "compares rows with each other, divides by what it counts in them, or adds a sum to a mean"
    )
    if kind == GRADIENT:
        why += " (or its gradients are clipped before an optimizer is given them)"
    return (
        f"{title} is no mean over the rows of a batch: it {why}. Every rank computes it from its "
        "own rows, and the mean of that counts, which is another number than that of the global "
        "batch"
    )


def _compared(
    compute: _Compute, rows: int, draws: int, tolerance: float
) -> dict[str, tuple[str, _Verdict]] | None:
    """Return `compare_parts` from several draws; ``None`` if a single draw is random."""
    order, cut = np.arange(rows), rows // 2
    share = cut / rows
    pieces = [(order, 1.0), (order, 1.0), (order[:cut], share), (order[cut:], 1.0 - share)]

    def measure(chosen: np.ndarray, fraction: float) -> dict[Key, np.ndarray]:
        chosen = np.tile(chosen, _COPIES) if draws > 1 else chosen
        return _mean([_as_vectors(compute(chosen, fraction)) for _ in range(draws)])

    whole, again, first, second = (measure(*piece) for piece in pieces)
    doubled = functools.cache(lambda: measure(np.tile(order, 2), 2.0))
    verdicts: dict[str, tuple[str, _Verdict]] = {}
    for kind in dict.fromkeys(kind for kind, _ in whole):
        keys = [key for key in whole if key[0] == kind]
        # Zeros where there is none, as of a weight that some rows do not use.
        piece_values = [
            [values.get(key, np.zeros_like(whole[key])) for key in keys]
            for values in (whole, again, first, second)
        ]
        joined = [np.concatenate(arrays) for arrays in piece_values]
        if not all(np.isfinite(array).all() for array in joined):
            continue
        size, noise = max(map(_norm, joined)), _norm(joined[0] - joined[1])
        if noise > tolerance * size:
            if draws == 1:
                return None
            # As one vector: of few numbers, chance makes anything.
            one, other, a, b = joined
            mean = share * a + (1 - share) * b
            factor = _factor_by_chance(one, other, mean)
            if not 0.7 < factor < 1.4:
                twice = [doubled().get(key, np.zeros_like(whole[key])) for key in keys]
                factor = _factor_by_chance(one, other, np.concatenate(twice))
            if not 0.7 < factor < 1.4:
                verdicts[kind] = keys[0][1], _Verdict.SUM if factor > 1 else _Verdict.DIVIDED
            elif one.size >= _MANY and _norm((one + other) / 2 - mean) > 3 * noise:
                verdicts[kind] = keys[0][1], _Verdict.NEITHER
            continue
        slack = _ROUNDING * size + 3 * noise
        for key, one, _, a, b in zip(keys, *piece_values, strict=True):
            limit = tolerance * max(_norm(one), _norm(a + b)) + slack
            if _norm(one - share * a - (1 - share) * b) <= limit:
                continue
            verdict = _verdict_by_doubling(one, doubled().get(key, 0 * one), tolerance, slack)
            if verdict in _BY_DOUBLING or kind not in verdicts:
                verdicts[kind] = key[1], verdict
        if verdicts.get(kind, ("", None))[1] is _Verdict.NEITHER and kind == GRADIENT:
            norms = [_norm(each) for each in joined]
            if max(norms) - min(norms) <= tolerance * size:  # whatever the rows
                verdicts[kind] = verdicts[kind][0], _Verdict.CLIPPED
    return verdicts


def _verdict_by_doubling(
    value: np.ndarray, doubled: np.ndarray, tolerance: float, slack: float
) -> _Verdict:
    """Return the verdict of what is no mean, by its value for rows of which each is there twice."""
    limit = tolerance * max(_norm(value), _norm(doubled)) + slack
    if _norm(value) > 4 * limit:  # so that only one factor fits
        for verdict, factor in _BY_DOUBLING.items():
            if _norm(doubled - factor * value) <= limit:
                return verdict
    return _Verdict.NEITHER


def _factor_by_chance(whole: np.ndarray, again: np.ndarray, other: np.ndarray) -> float:
    """Return the factor from random values to others, as vectors; 1 where chance decides."""
    inner_product = float(whole @ again)
    if inner_product <= 0.7 * _norm(whole) * _norm(again):
        return 1.0
    return float(other @ (whole + again)) / (2 * inner_product)


def sampled(values: Any, count: int = _COMPARED) -> Any:
    """Return about ``count`` numbers of an array or a tensor, at equal distances."""
    return values.reshape(-1)[:: max(1, math.prod(values.shape) // count)]


def _as_vectors(values: Values) -> dict[Key, np.ndarray]:
    arrays = {key: np.asarray(value) for key, value in values.items()}
    return {key: np.asarray(sampled(array), np.float64) for key, array in arrays.items()}


def _mean(drawn: Sequence[dict[Key, np.ndarray]]) -> dict[Key, np.ndarray]:
    return {
        key: np.asarray(np.mean([each.get(key, np.zeros_like(first)) for each in drawn], 0))
        for key, first in drawn[0].items()
    }


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))


def measure_change(value: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the change of a statistic, up to its precision."""
    now, then = np.asarray(value, np.float64), np.asarray(before, np.float64)
    return np.where(np.abs(now - then) > 1e-4 * np.abs(then), now - then, 0.0)


def vary_weights(value: np.ndarray) -> np.ndarray:
    """Return weights by which rows differ: of the same signs and sizes, and none of them 0."""
    random = 2 * np.random.Generator(np.random.Philox(0)).random(value.shape, np.float32) - 1
    return np.asarray(np.where(value == 0, 0.05 * random, value * (1 + 0.3 * random)), value.dtype)
