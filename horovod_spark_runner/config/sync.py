"""Settings of gradient synchronisation: one class per strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import InvalidInputError, brief
from .compression import COMPRESSION, KIND_KEY, MOMENTUM, Compression, as_json
from .fields import Settings, from_table, required, setting
from .validators import FLAG, count, number_above_zero, optional


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


def recorded_sync(sync: Sync) -> dict[str, Any]:
    """Return a run's record of its strategy, as JSON."""
    return {"sync": strategy_name(sync), **plain_settings(sync)}


def plain_settings(sync: Sync) -> dict[str, Any]:
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
