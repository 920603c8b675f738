"""Whether what a run directory tells people is as it was written. Pure.

A file may be cut short, or damaged within. What is left of such a record is not shown: a part of
its calls would look like all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

Check: TypeAlias = Callable[[object], bool]


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: object) -> bool:
    return isinstance(value, str)


def _list(of: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(of, value))


def _by_name(of: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(of, value.values()))


def _fields(always: Mapping[str, Check], sometimes: Mapping[str, Check] | None = None) -> Check:
    """Return what tells a dictionary that has these entries, and maybe those; others may be any."""
    known = {**always, **(sometimes or {})}
    return lambda value: (
        isinstance(value, dict)
        and always.keys() <= value.keys()
        and all(check(value[name]) for name, check in known.items() if name in value)
    )


def is_object(value: object) -> bool:
    """Tell whether ``value`` has names for what it holds."""
    return isinstance(value, dict)


_account = _fields(
    {"ranks": _list(_whole), "seconds": _by_name(_list(_number))}, {"mean": _by_name(_number)}
)


def is_account(value: object) -> bool:
    """Tell whether ``value`` is where the time of ranks went."""
    return (
        isinstance(value, dict)
        and _account(value)
        and all(len(each) == len(value["ranks"]) for each in value["seconds"].values())
    )


_ATTEMPT: Mapping[str, Check] = {
    **dict.fromkeys(("number", "workers", "first_step", "last_step"), _whole),
    **dict.fromkeys(("started", "ended"), _number),
    "ending": _text,
}
_attempt = _fields(_ATTEMPT, {"cause": _text})


def is_attempt(value: object) -> bool:
    """Tell whether ``value`` has the fields of an `Attempt`, and no others."""
    return isinstance(value, dict) and _attempt(value) and value.keys() <= {*_ATTEMPT, "cause"}


_rank = _fields({"rank": _whole, "host": _text, "slot": _whole, "gpus": _list(_text)})
is_call = _fields(
    {"seconds": _by_name(_number)},
    {
        "accounts": lambda value: value == {} or is_account(value),
        "ended": _number,
        "placement": _list(_rank),
        "versions": _by_name(_text),
        "workers": _whole,
    },
)
is_settings = _fields(
    {},
    {
        "fit": _fields({}, {"epochs": _whole, "batch_size": _whole}),
        "num_workers": _whole,
        "sync": _fields({"sync": _text}),
    },
)
