"""Settings of gradient synchronisation: a class for each strategy, and for each compression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Literal, get_args

from ..errors import InvalidInputError, brief
from .fields import Settings, from_table, parse_settings, required, setting
from .validators import FLAG, Kind, count, number, number_above_zero, optional

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


def _from_fields(name: str, fields: Mapping[str, object]) -> Any:
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


@from_table
@dataclass(frozen=True, kw_only=True)
class Allreduce(Settings):
    """Ranks add up their gradients in every step."""

    compression: Compression = setting(
        "none",
        COMPRESSION,
        '``"none"`` (default); ``"fp16"`` and ``"bf16"`` halve the bytes of float32 gradients; the '
        "latter keeps their range, adds up in float32 and rounds the sum to bfloat16. "
        "`TopK`, `Threshold` and `PowerSGD` send a small part of them, and the rest later; as a "
        'dictionary: ``{"way": "top_k", "ratio": 0.01}``, ``"threshold"``, ``"power_sgd"``.',
    )


@dataclass(frozen=True, kw_only=True)
class Rounds(Settings):
    """Rounds in which ranks train alone between meetings."""

    every: int = required(
        count(),
        "ranks meet after each step of the run whose number is a multiple of it, counted over all "
        "epochs and ``warmup_steps``, after which they meet as well.",
    )
    warmup_steps: int = setting(
        0,
        count(0),
        "steps at the beginning of a run after each of which ranks take the mean of their weights "
        "(0).",
    )


@from_table
@dataclass(frozen=True, kw_only=True)
class LocalSGD(Rounds):
    """Ranks train alone for some steps, then take the mean of their weights.

    Every rank makes its steps with its own optimizer, like a separate process, on its own
    ``batch_size`` rows. When ranks meet, each weight becomes the ranks' mean, weighted by the rows
    that each has trained on since the last meeting; so do moments of batch normalisation. They also
    meet at every epoch's end, where the model is validated and saved. That sends less than
    `Allreduce`, but is not equivalent, unless ``every`` is 1 and the optimizer is plain SGD. The
    algorithm: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
    """

    average_optimizer: bool = setting(
        False,
        FLAG,
        "also average the optimizers' moments, which sends more; otherwise each rank keeps its own "
        "(false).",
    )


@from_table
@dataclass(frozen=True, kw_only=True)
class DiLoCo(Rounds):
    """Ranks train alone for many steps; an outer optimizer applies their mean change.

    As `LocalSGD`, but the change of the mean weights since the last meeting is the gradient of a
    step of SGD with Nesterov momentum on the weights of that meeting. Weights that are not trained
    (moments of batch normalisation) are averaged, and so are all in the first ``warmup_steps``. The
    paper has ``every=500``. The algorithm: Douillard and others,
    "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
    """

    outer_lr: float = setting(0.7, number_above_zero(), "learning rate of the outer step (0.7).")
    outer_momentum: float = setting(0.9, MOMENTUM, "Nesterov momentum of the outer steps (0.9).")


@from_table
@dataclass(frozen=True, kw_only=True)
class AsyncServer(Settings):
    """Ranks step asynchronously on shared weights, without waiting for each other.

    The trained weights are on servers, which are parts of the ranks. A rank reads them, makes a
    step with its own optimizer on ``batch_size`` rows, like a separate process, and adds the change
    to the current weights. Batches of an epoch go to free ranks, so a slow rank takes fewer; every
    row is still read once. Ranks meet at every epoch's end, where the model is validated and saved.
    The result depends on the ranks' speed: two runs differ. Ranks of several hosts connect to each
    other on separate ports.
    The algorithms: Recht and others, "Hogwild!", NIPS 2011; bounded delay as in Li and others,
    "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
    """

    staleness: int = setting(
        8,
        count(),
        "steps that each of the other ranks may begin, on average, during one rank's step; ranks "
        "that would begin more wait for it (8).",
    )
    servers: int | None = setting(
        None,
        optional(count()),
        "ranks that hold a part of the weights; by default all.",
    )


Sync = Allreduce | LocalSGD | DiLoCo | AsyncServer
# By their names in dictionaries and in records of a run.
STRATEGIES: dict[str, type[Sync]] = {
    "allreduce": Allreduce,
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
    "async_server": AsyncServer,
}


def check_sync(name: str, value: object) -> Sync:
    """Return ``value`` if it is a strategy; allreduce for ``None``.

    Raises:
        InvalidInputError: it is invalid.
    """
    if value is None:
        return Allreduce()
    for cls in STRATEGIES.values():
        if type(value) is cls:
            return value
    choices = [f"{cls.__name__}(…)" for cls in STRATEGIES.values()]
    raise InvalidInputError(
        f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, got an object of type "
        f"{type(value).__name__}"
    )


def check_servers(sync: Sync, workers: int) -> None:
    """Check that there are enough ranks to be servers.

    Raises:
        InvalidInputError: there are too few.
    """
    if isinstance(sync, AsyncServer) and sync.servers is not None and sync.servers > workers:
        raise InvalidInputError(
            f"sync=AsyncServer(servers={sync.servers}): servers are ranks, of which the run has "
            f"{workers}; give as many or fewer, or leave it out for all"
        )


def recorded_sync(sync: Sync) -> dict[str, object]:
    """Return a run's record of its strategy, as JSON."""
    return {"sync": strategy_name(sync), **plain_settings(sync)}


def plain_settings(sync: Sync) -> dict[str, object]:
    """Return the settings of a strategy by name, as JSON."""
    if isinstance(sync, Allreduce):
        return {"compression": as_json(sync.compression)}
    return asdict(sync)


def strategy_name(sync: Sync) -> str:
    """Return the name of a strategy."""
    return next(name for name, cls in STRATEGIES.items() if type(sync) is cls)


def strategy_class(name: str, values: Mapping[str, Any]) -> type[Sync]:
    """Return the strategy of a dictionary of settings, by its entry ``way``.

    Args:
        name: the dictionary's name, for the message.
        values: the dictionary.

    Raises:
        InvalidInputError: the strategy is unknown.
    """
    kind = values.get(KIND_KEY, "allreduce")
    if not isinstance(kind, str) or kind not in STRATEGIES:
        raise InvalidInputError(
            f"{name}[{KIND_KEY!r}] must be one of {', '.join(map(repr, STRATEGIES))}, got "
            f"{brief(kind)}"
        )
    return STRATEGIES[kind]
