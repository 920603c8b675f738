"""Describe differences between a checkpoint's values and this call's. Pure.

`horovod_spark_runner.checkpoint.resume` decides what follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..typed_json import JsonObject

_SHOWN = 3
_LONGEST = 80


@dataclass(frozen=True)
class ModelChanges:
    """Differences between a model and the one that a checkpoint was taken of.

    Attributes:
        refusal: why the run cannot be resumed; ``None`` if it can.
        warnings: what is not honoured, or changes the rest of the run.
        optimizers: changed settings of the optimizers, for the message if variables do not fit.
        record: what to record of the model from now on.
    """

    refusal: str | None
    warnings: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    record: JsonObject = field(default_factory=dict)


def diff_values(then: object, now: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield where two JSON values differ: path, the old value, the new one."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in sorted({*then, *now}):
            below = f"{path}.{key}" if path else key
            # A setting that only one version of Keras has is not a change.
            if key in then and key in now:
                yield from diff_values(then[key], now[key], below)
    elif then != now:
        yield path, then, now


def diff_models(then: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """Return how two descriptions of a model differ, ``None`` if they do not."""
    changes = [describe_change(path, *pair) for path, *pair in diff_values(then, now)]
    return join_changes(changes) if changes else None


def diff_training(
    then: Mapping[str, object],
    now: Mapping[str, object],
    *,
    summed: Collection[str],
    warned: Collection[str],
    in_epoch: bool,
    prefix: str = "",
) -> tuple[str | None, list[str]]:
    """Compare the parts of a model's training that may change at the end of an epoch.

    Args:
        then: the checkpoint's description of the model.
        now: that of this call's model.
        summed: parts that an epoch's sums depend on.
        warned: parts whose change is reported.
        in_epoch: whether the checkpoint was taken within an epoch, whose sums are continued.
        prefix: precedes the names in messages.

    Returns:
        Why the run cannot be resumed, if so, and warnings.
    """
    changed = {
        name: describe_change_since(f"{prefix}{name}", then[name], now[name])
        for name in dict.fromkeys((*summed, *warned))
        if name in then and then[name] != now[name]
    }
    for name in summed:
        if in_epoch and name in changed:
            refusal = (
                f"{changed[name]}, within an epoch, whose sums continue; finish that epoch with "
                "the same value, then change it"
            )
            return refusal, []
    texts = [text for name, text in changed.items() if name in warned]
    return None, [f"{text}: the rest is trained with the new value" for text in texts]


def diff_optimizer(
    what: str,
    then: Mapping[str, object],
    now: Mapping[str, object],
    is_restored: Callable[[str, object, object], bool],
) -> tuple[list[str], list[str], JsonObject]:
    """Compare the settings of an optimizer, some of which the checkpoint decides.

    Args:
        what: the optimizer, for messages.
        then: the settings that the checkpoint records.
        now: those of this call.
        is_restored: returns, for a path and both values, whether the checkpoint's value holds.

    Returns:
        Ignored changes, all changes, and the settings to record, with the checkpoint's values.
    """
    ignored: list[str] = []
    changed: list[str] = []
    record = dict(now)
    for path, old, new in diff_values(then, now):
        restored = is_restored(path, old, new)
        describe = describe_change if restored else describe_change_since
        changed.append(describe(f"{path} of {what}", old, new))
        if restored:
            ignored.append(f"{changed[-1]}: the checkpoint's value is kept")
            record = _with(record, path.split("."), old)
    return ignored, changed, record


def _with(config: Mapping[str, Any], path: Sequence[str], value: object) -> JsonObject:
    first, *rest = path
    return {**config, first: _with(config[first], rest, value) if rest else value}


def describe_change(what: str, then: object, now: object) -> str:
    """Describe how a setting differs from that of the call that started the run."""
    return f"{what} is {_show(now)} now, the run was started with {_show(then)}"


def describe_change_since(what: str, then: object, now: object) -> str:
    """Describe the same for a setting that an earlier resuming call may have changed already."""
    return f"{what} is {_show(now)} now, the checkpoint was taken with {_show(then)}"


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, Mapping) and "class" in value:
        settings = ", ".join(f"{k}={_show(v)}" for k, v in value.items() if k != "class")
        text = f"{value['class']}({settings})"
    else:
        text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def join_changes(changes: Sequence[str]) -> str:
    """Return the first of some changes as one text, and how many more there are."""
    more = len(changes) - _SHOWN
    return "; ".join(changes[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
