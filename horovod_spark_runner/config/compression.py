"""Settings of gradient compression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Literal, get_args

from ..errors import InvalidInputError, brief
from .fields import Settings, from_table, parse_settings, required, setting
from .validators import Kind, count, number, number_above_zero, optional

# Compressions that shorten each number, and lose the rest.
Narrow = Literal["none", "fp16", "bf16"]
# Key of the kind of compression or strategy in a dictionary of its settings.
KIND_KEY = "way"
# Limits of thresholds, which must stay valid as float32.
_SMALLEST, _LARGEST = 1e-30, 1e30


def _check_momentum(name: str, value: object) -> float:
    momentum = number().check(name, value)
    if momentum >= 1:
        raise InvalidInputError(f"{name} must be at least 0 and below 1, got {brief(value)}")
    return momentum


def _check_share(name: str, value: object) -> float:
    share = number_above_zero().check(name, value)
    if share > 1:
        raise InvalidInputError(f"{name} must be above 0 and at most 1, got {brief(value)}")
    return share


def _check_threshold(name: str, value: object) -> float:
    threshold = number_above_zero().check(name, value)
    if not _SMALLEST <= threshold <= _LARGEST:
        raise InvalidInputError(
            f"{name} must be from {_SMALLEST:g} to {_LARGEST:g}, got {brief(value)}"
        )
    return threshold


def _check_range(name: str, value: object) -> tuple[float, float]:
    pair = tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(pair) != 2 or not all(isinstance(one, Real) for one in pair):
        raise InvalidInputError(
            f"{name} must be the smallest and the largest share, such as (1e-4, 1e-2), got "
            f"{brief(value)}"
        )
    low, high = (_check_share(name, one) for one in pair)
    if low >= high:
        raise InvalidInputError(f"{name} must begin with the smaller share, got {brief(value)}")
    return low, high


MOMENTUM: Kind[float] = Kind("number from 0 to below 1", _check_momentum, "toFloat", float)
_SHARE: Kind[float] = Kind("number above 0, at most 1", _check_share, "toFloat", float)
_THRESHOLD: Kind[float] = Kind(
    f"number from {_SMALLEST:g} to {_LARGEST:g}", _check_threshold, "toFloat", float
)
_RANGE: Kind[tuple[float, float]] = Kind("pair of numbers above 0, at most 1", _check_range)


@dataclass(frozen=True, kw_only=True)
class Residual(Settings):
    """A compression in which each rank adds the unsent part to its next gradients."""

    warmup_steps: int = setting(
        0,
        count(0),
        "steps at the beginning of a run in which gradients are sent whole (0); with `TopK`, over "
        "which the sent share falls from 1 to its ``ratio``, by the same factor in each.",
    )


@dataclass(frozen=True, kw_only=True)
class Moving(Residual):
    """A compression that may apply momentum, in place of the optimizer."""

    momentum: float = setting(
        0.0,
        MOMENTUM,
        "momentum that each rank applies before it chooses, in place of the optimizer's, which "
        "must be plain SGD (0). With `TopK`, it begins anew where an entry is sent.",
    )


@from_table
@dataclass(frozen=True, kw_only=True)
class TopK(Moving):
    """Each rank sends the entries of its gradients with the largest absolute values.

    The unsent part is added to the next step's gradients, so nothing is lost, only late.
    The algorithm, with momentum correction and warm-up: Lin and others, "Deep Gradient
    Compression", ICLR 2018.
    """

    ratio: float = required(_SHARE, "share of each variable's entries that a rank sends in a step.")


@from_table
@dataclass(frozen=True, kw_only=True)
class Threshold(Moving):
    """Each rank sends index and sign of gradients beyond a threshold.

    The others use the threshold as the value. The rest is added to the next step's gradients. The
    threshold changes by 3.5 % per step while the sent share is out of its range, as
    Deeplearning4j's adaptive one does, and stays above a millionth of ``start``. Deeplearning4j
    sends the optimizer's steps, momentum included: so does ``momentum``. An optimizer's own
    momentum would add to late gradients, and may make the training diverge.
    """

    start: float = setting(1e-4, _THRESHOLD, "threshold to begin with (0.0001).")
    target_sparsity: tuple[float, float] = setting(
        (1e-4, 1e-2),
        _RANGE,
        "smallest and largest share of the entries that is to be sent in a step, in the mean of "
        "the ranks ((0.0001, 0.01)).",
    )
    clip_residual: float | None = setting(
        5.0,
        optional(number_above_zero()),
        "after every fifth step, the rest is clipped to so many thresholds, as in Deeplearning4j, "
        "so that it does not grow beyond what can be sent (5). The clipped part is lost; ``None`` "
        "disables clipping.",
    )


@from_table
@dataclass(frozen=True, kw_only=True)
class PowerSGD(Residual):
    """Gradients of matrices are sent as two thin factors each; of others, whole.

    The error of the factors is added to the next step's gradients. A convolution's weights are
    reshaped to the matrix that is nearest to a square. The algorithm: Vogels and others,
    "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019.
    """

    rank: int = setting(2, count(), "columns of a factor (2); the paper has 1 to 4.")


Compression = Narrow | TopK | Threshold | PowerSGD
# By their names in dictionaries and in records of a run.
_COMPRESSIONS: dict[str, type[Residual]] = {
    "top_k": TopK,
    "threshold": Threshold,
    "power_sgd": PowerSGD,
}


def _check_compression(name: str, value: object) -> Compression:
    if isinstance(value, str) and value in get_args(Narrow):
        return value  # type: ignore[return-value]
    if type(value) in _COMPRESSIONS.values():
        return value  # type: ignore[return-value]
    if isinstance(value, Mapping):
        made: Compression = _from_fields(name, value)
        return made
    words = ", ".join(get_args(Narrow))
    choices = [f"{cls.__name__}(…)" for cls in _COMPRESSIONS.values()]
    raise InvalidInputError(
        f"{name} must be one of {words}, {', '.join(choices[:-1])} and {choices[-1]}, got "
        f"{brief(value)}"
    )


def _from_fields(name: str, fields: Mapping[str, Any]) -> Any:
    """Return the compression that a dictionary describes."""
    kind = fields.get(KIND_KEY)
    if not isinstance(kind, str) or kind not in _COMPRESSIONS:
        raise InvalidInputError(
            f"{name}[{KIND_KEY!r}] must be one of {', '.join(map(repr, _COMPRESSIONS))}, got "
            f"{brief(kind)}"
        )
    settings = {key: value for key, value in fields.items() if key != KIND_KEY}
    return parse_settings(_COMPRESSIONS[kind], name, settings)


def as_json(compression: Compression) -> object:
    """Return a compression as JSON, which the setting accepts again."""
    if isinstance(compression, str):
        return compression
    kind = next(name for name, cls in _COMPRESSIONS.items() if type(compression) is cls)
    values = asdict(compression)
    return {
        KIND_KEY: kind,
        **{k: list(v) if isinstance(v, tuple) else v for k, v in values.items()},
    }


COMPRESSION: Kind[Compression] = Kind(
    "one of "
    + ", ".join(f'`"{word}"`' for word in get_args(Narrow))
    + ", `TopK`, `Threshold`, `PowerSGD`; or a dictionary of one of these",
    _check_compression,
    parse=str,
)
